"""Tensor names of OLMo's nested state: URL-safe base64 of a pickle of (key path, whether the tensor is a pickle).

`safe_pickle.py` reads a name and runs nothing: a crafted name only causes an error. Equal paths give equal
names. A plain `pickle.dumps` does not guarantee that: it writes the second of two texts as a reference if both are the
same object, and in full if they are only equal.
"""

from __future__ import annotations

import base64
import binascii
import pickle
from collections.abc import Iterable
from typing import Any, TypeAlias

from stio.errors import printable
from stio.format.safe_pickle import MAX_DEPTH, PickleRefused, PlainPickles

KeyPath: TypeAlias = tuple[Any, ...]
"""Keys from the outermost dict to the innermost."""

MAX_NAME_BYTES = 16 << 10
"""Longest name; a real one has about a hundred bytes."""

MAX_LEAF_BYTES = 64 << 20
"""Longest pickle of a value that is not a tensor."""

MAX_KEYS = 500
"""Most dicts inside each other that a writer takes; their keys make one name."""

_PROTOCOL = 4
_MAX_NODES = 1000
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))


def looks_encoded(names: Iterable[str]) -> bool:
    """Return whether all names have OLMo's form: base64 of a pickle of protocol 2 to 5; False for no names."""
    listed = list(names)
    return bool(listed) and all(name[:2] == "gA" and "I" <= name[2:3] <= "X" and len(name) % 4 == 0 for name in listed)


def encode_name(path: KeyPath, *, is_pickled: bool) -> str:
    """Return the name of a tensor.

    Args:
        path: Its keys.
        is_pickled: Whether the tensor is the pickle of something else.

    Raises:
        TypeError: A key that cannot be read without running code.
        ValueError: A key that is NaN, or the name would be longer than a reader accepts.
    """
    if len(path) > MAX_KEYS:
        raise ValueError(f"dicts are nested more than {MAX_KEYS} deep")
    for key in path:
        _require_plain_key(key, path)
    data = stable_pickle((path, is_pickled))
    if len(data) > MAX_NAME_BYTES:
        raise ValueError(f"the keys of {shown(path)} are longer than {MAX_NAME_BYTES:,} bytes")
    return base64.urlsafe_b64encode(data).decode("ascii")


def _require_plain_key(key: object, path: KeyPath, depth: int = 0) -> None:
    if type(key) is tuple:
        if depth >= MAX_DEPTH // 2:
            raise ValueError("a key is a tuple that is nested too deeply")
        for part in key:
            _require_plain_key(part, path, depth + 1)
    elif type(key) is float and key != key:
        raise ValueError(f"{shown(path)}: a key is NaN, which equals no key; two of them would get one name")
    elif type(key) not in _PLAIN_KEYS:
        raise TypeError(
            f"{shown(path)}: a key is text, a number, bytes, None or a tuple of these, not a {type(key).__name__}"
        )


def decode_name(name: str, pickles: PlainPickles) -> tuple[KeyPath, bool]:
    """Return the key path of a tensor, and whether the tensor is a pickle. Runs nothing.

    Raises:
        PickleRefused: The name is not of this form, or refers to code.
    """
    path, is_pickled = path_of_name(pickles.loads(name_bytes(name), max_nodes=_MAX_NODES))
    for key in path:
        pickles.require_key(key)
    return path, is_pickled


def name_bytes(name: str) -> bytes:
    """Return the pickle in a name.

    Raises:
        PickleRefused: It is not base64, or too long.
    """
    if len(name) > 2 * MAX_NAME_BYTES:
        raise PickleRefused(f"the name has {len(name):,} characters, which no key path needs")
    try:
        return base64.b64decode(name.encode("ascii"), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise PickleRefused("the name is not base64") from None


def path_of_name(value: object) -> tuple[KeyPath, bool]:
    """Check the unpickled content of a name.

    Raises:
        PickleRefused: It is not a key path with a flag.
    """
    if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], bool)):
        raise PickleRefused("the name holds something else than keys and a flag")
    path, is_pickled = value
    if not (isinstance(path, tuple) and path):
        raise PickleRefused("the name holds no keys")
    try:
        hash(path)
    except TypeError:
        raise PickleRefused("the name holds values that cannot be keys") from None
    return path, is_pickled


def shown(path: KeyPath) -> str:
    """Return a key path for a message, as Python would index it: `['state'][0]['exp_avg']`."""
    return printable("".join(f"[{key!r}]" for key in path)) or "the state"


def nest(leaves: Iterable[tuple[KeyPath, Any]]) -> dict[Any, Any]:
    """Return nested dicts with the leaves at their paths.

    No dict has whole paths as keys: a crafted file could choose tuples with equal hashes.

    Raises:
        PickleRefused: A path leads through a leaf.
    """
    result: dict[Any, Any] = {}
    made = {id(result)}  # a leaf may be a dict too, and no other leaf is put into it
    for path, leaf in leaves:
        target = result
        for key in path[:-1]:
            if key not in target:
                fresh: dict[Any, Any] = {}
                made.add(id(fresh))
                target[key] = fresh
            target = target[key]
            if id(target) not in made:
                raise PickleRefused(f"{shown(path)} leads through a value that is not a dict")
        if path[-1] in target:
            raise PickleRefused(f"{shown(path)} is there twice, or has others below it")
        target[path[-1]] = leaf
    return result


def stable_pickle(value: object) -> bytes:
    """Return a pickle that is the same for equal plain values; other values are pickled as usual.

    Raises:
        ValueError: Plain containers that contain themselves, or are nested deeper than the reader accepts.
    """
    return pickle.dumps(_Stable().copy(value), protocol=_PROTOCOL)


class _Stable:
    """Copies plain values so that equal texts are one object; a shared container stays shared."""

    def __init__(self) -> None:
        self._atoms: dict[tuple[type, Any], object] = {}
        self._copies: dict[int, Any] = {}
        self._open: set[int] = set()

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in (str, bytes):
            return self._atoms.setdefault((kind, value), value)
        if kind not in (tuple, list, dict):
            return value
        if id(value) in self._open:
            raise ValueError("a container contains itself")
        if id(value) in self._copies:
            return self._copies[id(value)]
        if len(self._open) >= MAX_DEPTH:
            raise ValueError(f"containers are nested more than {MAX_DEPTH} deep")
        self._open.add(id(value))
        if kind is dict:
            made: Any = {self.copy(key): self.copy(item) for key, item in value.items()}
        else:
            made = kind(map(self.copy, value))
        self._open.discard(id(value))
        return self._copies.setdefault(id(value), made)
