"""Reads pickles of plain values, and runs nothing: a pickle machine that has no instruction to call or import.

It knows protocols 2 to 5 and builds None, booleans, numbers, text, bytes, tuples, lists, dicts and sets. An
instruction that refers to code is refused and named. Input is hostile: lengths are checked before they are used, steps
are counted over all pickles of a file, memo slots are those that a pickler fills (a jump to slot 2**31 would allocate
as many), nesting is bounded where containers are made (hashing a tuple recurses in C), and what repeats itself by
references is measured at the end, so that nobody downstream unfolds 2**60 nodes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from stio.errors import printable

__all__ = ["MAX_STEPS", "PickleRefused", "PlainPickles"]

MAX_STEPS = 4_000_000
"""Instructions in all pickles of one file; about 10 s, and 400 MB of empty dicts at worst."""

MAX_DEPTH = 100
"""Deepest nesting."""

_MAX_ODD_KEYS = 10_000
_DISTINCT_INTEGERS = range(-(2**61) + 2, 2**61 - 1)
"""Their hashes are themselves, so that equal hashes are equal numbers."""

_MARK = object()

_CODE = {
    0x93: "STACK_GLOBAL", 0x52: "REDUCE", 0x62: "BUILD", 0x69: "INST", 0x6F: "OBJ", 0x81: "NEWOBJ", 0x92: "NEWOBJ_EX",
    0x50: "PERSID", 0x51: "BINPERSID", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4",
}  # fmt: skip


class PickleRefused(ValueError):
    """A pickle that is broken, too large, or refers to code."""


class PlainPickles:
    """Reads the pickles of one file.

    Args:
        max_steps: Most instructions in all of them.
    """

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._steps_left = max_steps
        self._odd_keys_left = _MAX_ODD_KEYS

    def loads(self, data: bytes, *, max_nodes: int = MAX_STEPS) -> Any:
        """Return the value of a pickle.

        Args:
            data: The pickle.
            max_nodes: Most values in it, each counted as often as it is met.

        Raises:
            PickleRefused: See there.
        """
        machine = _Machine(data, self.require_key)
        try:
            while not machine.stopped:
                if not self._steps_left:
                    raise PickleRefused("the pickles of this file are longer than plain values need")
                self._steps_left -= 1
                machine.step()
            value = machine.result()
            _measure(value, max_nodes)
        except (IndexError, struct.error) as error:
            raise PickleRefused("the pickle is cut off or malformed") from error
        except UnicodeDecodeError as error:
            raise PickleRefused("a text in the pickle is not UTF-8") from error
        return value

    def require_key(self, key: object, weight: int = 1) -> None:
        """Refuse keys whose hashing or coming together could take long.

        Args:
            key: What is to be a key.
            weight: How many values it unfolds to.

        Raises:
            PickleRefused: The key is not plain, or there are too many whose hashes an author can choose.
        """
        if key is None or type(key) in (str, bytes, bool):
            return
        if isinstance(key, int) and key in _DISTINCT_INTEGERS:
            return
        if not isinstance(key, int | float | tuple | frozenset):
            raise PickleRefused(f"a {type(key).__name__} is no key")
        if weight > 1000:
            raise PickleRefused("a key is larger than plain ones are")
        if not self._odd_keys_left:
            raise PickleRefused("there are too many keys that are tuples, floats or large integers")
        self._odd_keys_left -= 1


def _measure(value: object, max_nodes: int) -> None:
    """Refuse what contains itself, is nested deeply, or unfolds to too many values."""
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
    """One pickle on its way to a value.

    Args:
        data: The pickle.
        require_hashable: Judges a key and its weight.
    """

    def __init__(self, data: bytes, require_hashable: Callable[[object, int], None]) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        self._require_hashable = require_hashable
        self._sizes: dict[int, tuple[int, int]] = {}  # weight and depth of each tuple and frozenset
        self._made: list[object] = []  # keeps these alive, or an id could come twice
        self.stopped = False
        """Whether the pickle has ended."""
        if len(data) < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
            raise PickleRefused("not a pickle of protocol 2 to 5")
        self._at = 2

    def step(self) -> None:
        """Carry out one instruction."""
        code = self._data[self._at]
        self._at += 1
        handler = _HANDLERS.get(code)
        if handler is None:
            raise PickleRefused(self._refusal(code))
        handler(self)

    def result(self) -> Any:
        """Return the value, once the pickle has ended."""
        if len(self._stack) != 1 or self._at != len(self._data) or self._stack[0] is _MARK:
            raise PickleRefused("the pickle leaves something over")
        return self._stack[0]

    def _refusal(self, code: int) -> str:
        if code == 0x63:  # GLOBAL: two lines of text
            lines = self._data[self._at : self._at + 200].split(b"\n")
            return f"it refers to code ({printable(b'.'.join(lines[:2]).decode('utf-8', 'replace'))})"
        if code == 0x93 and all(isinstance(text, str) for text in self._stack[-2:]):
            return f"it refers to code ({printable('.'.join(self._stack[-2:]))})"
        if code in _CODE:
            return f"it refers to code ({_CODE[code]})"
        return f"the instruction {code:#04x} at byte {self._at - 1} is none that plain values need"

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise PickleRefused("the pickle is cut off")
        part = self._data[self._at : end]
        self._at = end
        return part

    def _number(self, nbytes: int) -> int:
        return int.from_bytes(self._bytes(nbytes), "little")

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise PickleRefused("the pickle takes a value that is not there")
        return value

    def _since_mark(self) -> list[Any]:
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _frozen(self, value: tuple[Any, ...] | frozenset[Any]) -> None:
        sizes = [self._sizes.get(id(item), (1, 0)) for item in value]
        depth = 1 + max((depth for _, depth in sizes), default=0)
        if depth > MAX_DEPTH:
            raise PickleRefused(f"the value is nested more than {MAX_DEPTH} deep")
        self._sizes[id(value)] = 1 + sum(weight for weight, _ in sizes), depth
        self._made.append(value)
        self._stack.append(value)

    def _key(self, key: object) -> Hashable:
        self._require_hashable(key, self._sizes.get(id(key), (1, 0))[0])
        try:
            hash(key)
        except TypeError:
            raise PickleRefused("a key holds what cannot be one") from None
        return key

    def _target(self, kind: type[Any]) -> Any:
        target = self._stack[-1]
        if type(target) is not kind:
            raise PickleRefused(f"the pickle fills a {kind.__name__} that is not there")
        return target

    # The instructions, by what they do.

    def end(self) -> None:
        self.stopped = True

    def frame(self) -> None:
        if self._number(8) > len(self._data) - self._at:
            raise PickleRefused("the pickle is cut off")

    def mark(self) -> None:
        self._stack.append(_MARK)

    def push(self, value: object) -> None:
        self._stack.append(value)

    def integer(self, nbytes: int, signed: bool = False) -> None:
        self._stack.append(int.from_bytes(self._bytes(nbytes), "little", signed=signed))

    def long(self, length_bytes: int) -> None:
        self.integer(self._number(length_bytes), signed=True)

    def double(self) -> None:
        self._stack += struct.unpack(">d", self._bytes(8))

    def text(self, length_bytes: int) -> None:
        self._stack.append(self._bytes(self._number(length_bytes)).decode("utf-8", "surrogatepass"))

    def raw(self, length_bytes: int, kind: type[Any] = bytes) -> None:
        self._stack.append(kind(self._bytes(self._number(length_bytes))))

    def tuple_of(self, count: int) -> None:
        self._frozen(tuple([self._pop() for _ in range(count)][::-1]))

    def tuple_since_mark(self) -> None:
        self._frozen(tuple(self._since_mark()))

    def frozenset_since_mark(self) -> None:
        self._frozen(frozenset(map(self._key, self._since_mark())))

    def append(self) -> None:
        value = self._pop()
        self._target(list).append(value)

    def appends(self) -> None:
        values = self._since_mark()
        self._target(list).extend(values)

    def add_items(self) -> None:
        values = self._since_mark()
        self._target(set).update(map(self._key, values))

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._fill([key, value])

    def set_items(self) -> None:
        self._fill(self._since_mark())

    def _fill(self, pairs: list[Any]) -> None:
        target = self._target(dict)
        for key, value in zip(pairs[::2], pairs[1::2], strict=False):
            if self._key(key) in target:
                raise PickleRefused("a dict in the pickle has one key twice")
            target[key] = value
        if len(pairs) % 2:
            raise PickleRefused("a dict in the pickle has a key without a value")

    def memoize(self) -> None:
        self._memo.append(self._stack[-1])

    def put(self, nbytes: int) -> None:
        if self._number(nbytes) != len(self._memo):
            raise PickleRefused("the pickle remembers a value out of turn")
        self.memoize()

    def get(self, nbytes: int) -> None:
        self._stack.append(self._memo[self._number(nbytes)])


def _handlers() -> Iterable[tuple[int, Callable[[_Machine], object]]]:
    """Yield each instruction of plain values, by its code."""
    yield 0x2E, _Machine.end
    yield 0x95, _Machine.frame
    yield 0x28, _Machine.mark
    yield 0x4E, lambda m: m.push(None)
    yield 0x88, lambda m: m.push(True)
    yield 0x89, lambda m: m.push(False)
    yield 0x4B, lambda m: m.integer(1)
    yield 0x4D, lambda m: m.integer(2)
    yield 0x4A, lambda m: m.integer(4, signed=True)
    yield 0x8A, lambda m: m.long(1)
    yield 0x8B, lambda m: m.long(4)
    yield 0x47, _Machine.double
    yield 0x8C, lambda m: m.text(1)
    yield 0x58, lambda m: m.text(4)
    yield 0x8D, lambda m: m.text(8)
    yield 0x43, lambda m: m.raw(1)
    yield 0x42, lambda m: m.raw(4)
    yield 0x8E, lambda m: m.raw(8)
    yield 0x96, lambda m: m.raw(8, bytearray)
    yield 0x29, lambda m: m.tuple_of(0)
    yield 0x85, lambda m: m.tuple_of(1)
    yield 0x86, lambda m: m.tuple_of(2)
    yield 0x87, lambda m: m.tuple_of(3)
    yield 0x74, _Machine.tuple_since_mark
    yield 0x5D, lambda m: m.push([])
    yield 0x61, _Machine.append
    yield 0x65, _Machine.appends
    yield 0x7D, lambda m: m.push({})
    yield 0x73, _Machine.set_item
    yield 0x75, _Machine.set_items
    yield 0x8F, lambda m: m.push(set())
    yield 0x90, _Machine.add_items
    yield 0x91, _Machine.frozenset_since_mark
    yield 0x94, _Machine.memoize
    yield 0x71, lambda m: m.put(1)
    yield 0x72, lambda m: m.put(4)
    yield 0x68, lambda m: m.get(1)
    yield 0x6A, lambda m: m.get(4)


_HANDLERS = dict(_handlers())
