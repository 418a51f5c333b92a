"""Reads pickles of plain values and runs nothing: a pickle machine without instructions to call or import.

It reads protocols 2 to 5 and makes None, booleans, numbers, text, bytes, tuples, lists, dicts and sets. An instruction
that refers to code is refused and named. `pickletools.genops` splits a pickle into its instructions; it checks each
length before it reads so many bytes, and executes nothing. The input is untrusted. Steps are counted over all
pickles of a file. The memo grows by one slot at a time (a jump to slot 2**31 would allocate as many). Nesting is
bounded when containers are made, because hashing a tuple recurses in C. At the end the value is measured with its
repetitions: by references, a short pickle can describe 2**60 values.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Any

from stio.errors import printable

MAX_STEPS = 4_000_000
"""Instructions in all pickles of one file; about 10 s, and 400 MB of empty dicts at worst."""

MAX_DEPTH = 100
"""Deepest nesting."""

_MAX_FORGEABLE_KEYS = 10_000
"""Most keys with hashes that a file can choose."""

_DISTINCT_INTEGERS = range(-(2**61) + 2, 2**61 - 1)
"""Each of these is its own hash, so distinct integers have distinct hashes."""

_MARK = object()

_CALLS = [
    "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID", "BINPERSID",
    "EXT1", "EXT2", "EXT4",
]  # fmt: skip
"""Instructions that import or call, for messages."""


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
        machine = _Machine(data, self.require_key)
        try:
            for instruction, argument, at in machine.instructions:
                machine.at = at or 0
                if not self.steps_left:
                    raise PickleRefused("the pickles of this file are longer than plain values need")
                self.steps_left -= 1
                handler = _HANDLERS.get(instruction.name)
                if handler is None:
                    raise PickleRefused(machine.refusal(instruction.name, argument))
                handler(machine, argument)
            value = machine.result()
            _measure(value, max_nodes)
        except PickleRefused:
            raise
        except UnicodeDecodeError as error:
            raise PickleRefused("a text in the pickle is not UTF-8") from error
        except (IndexError, ValueError, DeprecationWarning) as error:  # a warning about escapes may be an error
            raise PickleRefused("the pickle is cut off or malformed") from error
        return value

    def require_key(self, key: object, weight: int = 1) -> None:
        """Refuse keys that take long to hash, or that would make a dict slow by equal hashes.

        Args:
            key: Value to be used as a key.
            weight: How many values it contains, itself included.

        Raises:
            PickleRefused: The key is not plain; or there are too many keys with hashes that a file can choose.
        """
        if key is None or type(key) in (str, bytes, bool):
            return
        if isinstance(key, int) and key in _DISTINCT_INTEGERS:
            return
        if not isinstance(key, int | float | tuple | frozenset):
            raise PickleRefused(f"a {type(key).__name__} cannot be a key")
        if weight > 1000:
            raise PickleRefused("a key is larger than plain ones are")
        if not self._forgeable_keys_left:
            raise PickleRefused("there are too many keys that are tuples, floats or large integers")
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
    return list(node) if isinstance(node, tuple | list | set | frozenset) else []


class _Machine:
    """The state of reading one pickle.

    Args:
        data: The pickle.
        require_hashable: Called with each key and its weight; raises for a key that is refused.
    """

    def __init__(self, data: bytes, require_hashable: Callable[[object, int], None]) -> None:
        self._num_bytes = len(data)
        self.instructions = islice(pickletools.genops(data), 1, None)  # the first one is the protocol
        self.at = 0
        """Position of the instruction."""
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        self._require_hashable = require_hashable
        self._sizes: dict[int, tuple[int, int]] = {}  # weight and depth of each tuple and frozenset
        self._made: list[object] = []  # keeps these allocated: the id of a freed object could be reused

    def result(self) -> Any:
        """Return the value, once the pickle has ended."""
        if len(self._stack) != 1 or self.at + 1 != self._num_bytes or self._stack[0] is _MARK:
            raise PickleRefused("the pickle does not end with exactly one value")
        return self._stack[0]

    def refusal(self, name: str, argument: Any) -> str:
        """Return the message about an instruction that plain values do not need."""
        code = name if name in _CALLS else ""
        if name == "GLOBAL":
            code = argument.replace(" ", ".")
        if name == "STACK_GLOBAL" and all(isinstance(text, str) for text in self._stack[-2:]):
            code = ".".join(self._stack[-2:])
        if code:
            return f"it refers to code ({printable(code)})"
        return f"the instruction {name} at byte {self.at} is none that plain values need"

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleRefused("the pickle takes a value that is not there")
        return value

    def since_mark(self) -> list[Any]:
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def frozen(self, value: tuple[Any, ...] | frozenset[Any]) -> None:
        sizes = [self._sizes.get(id(item), (1, 0)) for item in value]
        depth = 1 + max((depth for _, depth in sizes), default=0)
        if depth > MAX_DEPTH:
            raise PickleRefused(f"the value is nested more than {MAX_DEPTH} deep")
        self._sizes[id(value)] = 1 + sum(weight for weight, _ in sizes), depth
        self._made.append(value)
        self._stack.append(value)

    def key(self, key: object) -> Hashable:
        self._require_hashable(key, self._sizes.get(id(key), (1, 0))[0])
        try:
            hash(key)
        except TypeError:
            raise PickleRefused("a key holds a value that cannot be a key") from None
        return key

    def _target(self, kind: type[Any]) -> Any:
        target = self._stack[-1]
        if type(target) is not kind:
            raise PickleRefused(f"the pickle fills a {kind.__name__} that is not there")
        return target

    # The instructions.

    def frame(self, nbytes: int) -> None:
        if nbytes > self._num_bytes - self.at - 9:  # the instruction itself has 9 bytes
            raise PickleRefused("the pickle is cut off")

    def push(self, value: object) -> None:
        self._stack.append(value)

    def tuple_of(self, count: int) -> None:
        self.frozen(tuple([self.pop() for _ in range(count)][::-1]))

    def extend(self, values: list[Any]) -> None:
        self._target(list).extend(values)

    def update(self, values: list[Any]) -> None:
        self._target(set).update(map(self.key, values))

    def fill(self, pairs: list[Any]) -> None:
        target = self._target(dict)
        for key, value in zip(pairs[::2], pairs[1::2], strict=False):
            if self.key(key) in target:
                raise PickleRefused("a dict in the pickle has one key twice")
            target[key] = value
        if len(pairs) % 2:
            raise PickleRefused("a dict in the pickle has a key without a value")

    def memoize(self) -> None:
        self._memo.append(self._stack[-1])

    def put(self, slot: int) -> None:
        if slot != len(self._memo):
            raise PickleRefused("the pickle fills its memo out of order")
        self.memoize()

    def get(self, slot: int) -> None:
        self._stack.append(self._memo[slot])


_LITERALS = [
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8",
]  # fmt: skip
"""Instructions with a value as their argument."""

_HANDLERS: dict[str, Callable[[_Machine, Any], object]] = {
    "STOP": lambda m, _: None,
    "FRAME": _Machine.frame,
    "MARK": lambda m, _: m.push(_MARK),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    **dict.fromkeys(_LITERALS, _Machine.push),
    "EMPTY_TUPLE": lambda m, _: m.tuple_of(0),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "TUPLE": lambda m, _: m.frozen(tuple(m.since_mark())),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "APPEND": lambda m, _: m.extend([m.pop()]),
    "APPENDS": lambda m, _: m.extend(m.since_mark()),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "SETITEM": lambda m, _: m.fill([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, _: m.fill(m.since_mark()),
    "EMPTY_SET": lambda m, _: m.push(set()),
    "ADDITEMS": lambda m, _: m.update(m.since_mark()),
    "FROZENSET": lambda m, _: m.frozen(frozenset(map(m.key, m.since_mark()))),
    "MEMOIZE": lambda m, _: m.memoize(),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
}
"""The instructions of plain values, by their names in `pickletools`."""
