"""Reads pickles of plain values and runs nothing; and the names of OLMo's tensors, which are such pickles.

It reads protocols 2 to 5 and makes None, booleans, numbers, text, bytes, tuples, lists, and dicts with scalar keys. The
input is untrusted. First `pickletools.genops` splits a pickle into its instructions; it checks each length before it
reads so many bytes, and executes nothing. They are counted over all pickles of a file. Then Python's own unpickler
makes the value, without the instructions that plain values do not need; the one in C would allocate as many slots for
its memo as a pickle says. No class is found, and no container is a key, since its hash recurses in C. At the end the
value is measured with its repetitions: by references, a short pickle can describe 2**60 values.

A name of a tensor in OLMo's nested state is URL-safe base64 of a pickle of (key path, whether the tensor is a pickle).
A crafted name only causes an error.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
import pickletools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, TypeAlias

from stio.errors import printable

MAX_STEPS = 4_000_000
"""Instructions in all pickles of one file; about 10 s, and 400 MB of empty dicts at worst."""

MAX_DEPTH = 100
"""Deepest nesting."""

_MAX_FORGEABLE_KEYS = 10_000
"""Most keys with hashes that a file can choose."""

_DISTINCT_INTEGERS = range(-(2**61) + 2, 2**61 - 1)
"""Each of these is its own hash, so distinct integers have distinct hashes."""

_INSTRUCTIONS = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "GLOBAL", "STACK_GLOBAL",  # refused with the name of the code
}  # fmt: skip
"""The instructions of plain values, by their names in `pickletools`."""


class PickleRefused(ValueError):
    """A pickle that is broken, too large, or refers to code."""


class PlainPickles:
    """Reads the pickles of one file.

    Args:
        max_steps: Most instructions in all of them.
    """

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self.steps_left = max_steps
        """Instructions that may still be read."""
        self._forgeable_keys_left = _MAX_FORGEABLE_KEYS

    def loads(self, data: bytes, *, max_nodes: int = MAX_STEPS) -> Any:
        """Return the value of a pickle.

        Args:
            data: The pickle.
            max_nodes: Most values in it; a value with several references counts once for each.

        Raises:
            PickleRefused: It is broken, too large, or refers to code.
        """
        if len(data) < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
            raise PickleRefused("not a pickle of protocol 2 to 5")
        try:
            self._scan(data)
            value = _Unpickler(data, self.require_key).load()
            _measure(value, max_nodes)
        except PickleRefused:
            raise
        except UnicodeDecodeError as error:
            raise PickleRefused("a text in the pickle is not UTF-8") from error
        except _MALFORMED as error:
            raise PickleRefused("the pickle is cut off or malformed") from error
        return value

    def _scan(self, data: bytes) -> None:
        """Require that a pickle is whole, and that there are not too many instructions."""
        last = 0
        for instruction, argument, at in pickletools.genops(data):
            last = at or 0
            if not self.steps_left:
                raise PickleRefused("the pickles of this file are longer than plain values need")
            self.steps_left -= 1
            if instruction.name == "FRAME" and (argument or 0) > len(data) - last - 9:  # 9: the instruction itself
                raise PickleRefused("the pickle is cut off")
        if last + 1 != len(data):
            raise PickleRefused("something follows the pickle")

    def require_key(self, key: object) -> None:
        """Refuse keys that are containers, and keys that would make a dict slow by equal hashes.

        Raises:
            PickleRefused: The key is no scalar; or there are too many keys with hashes that a file can choose.
        """
        if key is None or type(key) in (str, bytes, bool):
            return
        if isinstance(key, int) and key in _DISTINCT_INTEGERS:
            return
        if not isinstance(key, int | float):
            raise PickleRefused(f"a {type(key).__name__} cannot be a key")
        if not self._forgeable_keys_left:
            raise PickleRefused("there are too many keys that are floats or large integers")
        self._forgeable_keys_left -= 1


def _measure(value: object, max_nodes: int) -> None:
    """Refuse a value that contains itself, is nested too deeply, or contains too many values."""
    weights: dict[int, int] = {}
    inside: set[int] = set()
    ahead: list[tuple[object, bool]] = [(value, False)]
    while ahead:
        node, is_leaving = ahead.pop()
        children = _children(node)
        if is_leaving:
            inside.discard(id(node))
            weight = 1 + sum(weights.get(id(child), 1) for child in children)
            if weight > max_nodes:
                raise PickleRefused("the value unfolds to more than plain values need")
            weights[id(node)] = weight
        elif children and id(node) not in weights:
            if id(node) in inside:
                raise PickleRefused("the value contains itself")
            if len(inside) >= MAX_DEPTH:
                raise PickleRefused(f"the value is nested more than {MAX_DEPTH} deep")
            inside.add(id(node))
            ahead.append((node, True))
            ahead += [(child, False) for child in children]


def _children(node: object) -> list[object]:
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    return list(node) if isinstance(node, tuple | list) else []


_MALFORMED = (
    ValueError, IndexError, AttributeError, TypeError, EOFError, pickle.UnpicklingError,
    DeprecationWarning,  # about escapes in a text; it may be an error
)  # fmt: skip
"""What `pickletools` and the unpickler raise for malformed pickles."""

_Python: Any = pickle._Unpickler
"""Python's unpickler; typeshed knows only what the one in C has."""


def _refuse(name: str, _: object) -> None:
    raise PickleRefused(f"the instruction {name} is none that plain values need")


class _Unpickler(_Python):  # type: ignore[misc]
    """Makes the value of a pickle, and refuses all but `_INSTRUCTIONS`.

    Args:
        data: The pickle.
        require_key: Called with each key of a dict; raises for one that is refused.
    """

    def __init__(self, data: bytes, require_key: Callable[[object], None]) -> None:
        super().__init__(io.BytesIO(data))
        self._require_key = require_key

    def load(self) -> Any:
        value = super().load()
        if self.stack or self.metastack:
            raise PickleRefused("the pickle does not end with exactly one value")
        return value

    def find_class(self, module: str, name: str) -> Any:
        raise PickleRefused(f"it refers to code ({printable(f'{module}.{name}')})")

    def fill(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise PickleRefused("the pickle fills a dict that is not there")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._require_key(key)
            if key in target:
                raise PickleRefused("a dict in the pickle has one key twice")
            target[key] = value

    dispatch: ClassVar = {
        ord(one.code): _Python.dispatch[ord(one.code)] if one.name in _INSTRUCTIONS else partial(_refuse, one.name)
        for one in pickletools.opcodes
    } | {
        pickle.SETITEM[0]: lambda self: self.fill([self.stack.pop(), self.stack.pop()][::-1]),
        pickle.SETITEMS[0]: lambda self: self.fill(self.pop_mark()),
    }


# The names of OLMo's tensors.

KeyPath: TypeAlias = tuple[Any, ...]
"""Keys from the outermost dict to the innermost."""

MAX_NAME_BYTES = 16 << 10
"""Longest name; a real one has about a hundred bytes."""

MAX_KEYS = 500
"""Most dicts inside each other that a writer takes; their keys make one name."""

_MAX_NODES = 1000


def looks_encoded(names: Iterable[str]) -> bool:
    """Return whether all names have OLMo's form: base64 of a pickle of protocol 2 to 5; False for no names."""
    listed = list(names)
    return bool(listed) and all(name[:2] == "gA" and "I" <= name[2:3] <= "X" and len(name) % 4 == 0 for name in listed)


def decode_name(name: str, pickles: PlainPickles | None) -> tuple[KeyPath, bool]:
    """Return the key path of a tensor, and whether the tensor is a pickle.

    Args:
        name: The name.
        pickles: Reads the name, and runs nothing; None: `pickle.loads` reads it.

    Raises:
        PickleRefused: The name is not of this form, or refers to code.
    """
    if len(name) > 2 * MAX_NAME_BYTES:
        raise PickleRefused(f"the name has {len(name):,} characters, which no key path needs")
    try:
        data = base64.b64decode(name.encode("ascii"), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise PickleRefused("the name is not base64") from None
    value = pickle.loads(data) if pickles is None else pickles.loads(data, max_nodes=_MAX_NODES)
    path, is_pickled = value if isinstance(value, tuple) and len(value) == 2 else (None, None)
    if not (isinstance(path, tuple) and path and isinstance(is_pickled, bool)):
        raise PickleRefused("the name holds something else than keys and a flag")
    if pickles is not None:
        for key in path:
            pickles.require_key(key)
    try:
        hash(path)
    except TypeError:
        raise PickleRefused("the name holds values that cannot be keys") from None
    return path, is_pickled


def shown(path: KeyPath) -> str:
    """Return a key path for a message, as Python would index it: `['state'][0]['exp_avg']`."""
    return printable("".join(f"[{key!r}]" for key in path)) or "the state"
