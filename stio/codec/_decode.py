"""JSON members to columns: in pieces by msgspec where counting proves it safe, else by the strict scanner.

Both members of tensors and members of string maps (`__metadata__`, `weight_map`) go the same way. A piece is the
text from the start of a member to a likely end of a later one. If `{piece}` decodes, the piece is a list of members
by the grammar, and since JSON reads in one way only, it is the list of members that stands there, wherever the cut
came from. If it does not decode, or one of the checks below fails, the scanner reads it member by member, and
either accepts what msgspec would not, or names the culprit.

msgspec lets pass: keys that come twice, unknown keys (unchecked UTF-8 in them), `-0`, integers above 64 bits.

- Keys: in text that decoded, a backslash occurs only in a string, as the start of an escape. Without the escapes of
  backslash and quote, each remaining quote opens or closes a string, so their number is twice the number of strings.
  A tensor's member has at least five (its name, three keys, the dtype), or a required key would be missing; a string
  map's member has two. So 10 (or 4) quotes for each *distinct* name leave no room for a name that comes twice,
  a key that comes twice, or an unknown key.
- Numbers: they stand only in arrays, so a minus sign before one follows a bracket, a comma or white space. Where none
  does, no number is negative or `-0`. Large ones fail the checks of sizes (`_layout.py`), exactly or by overflow.
- The rest msgspec refuses itself (tested): floats, leading zeros, control characters, invalid UTF-8, lone
  surrogates, trailing commas, unknown dtypes, arrays of a wrong length, null, bool, text after the end.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import msgspec

from stio.codec._json import Scanner
from stio.codec._turns import WINDOW_BYTES
from stio.codec.dtypes import BITS, DtypeName
from stio.errors import LimitError, printable
from stio.events import Limits

__all__ = ["METADATA_KEY", "TensorColumns", "rank_error", "read_string_map", "read_tensors"]

METADATA_KEY = "__metadata__"

_METADATA_START = b'"__metadata__"'
_MINUS_BEFORE_NUMBER = re.compile(rb"[\[,\s]-")
_TENSOR_QUOTES = 10
_STRING_QUOTES = 4


class _Info(msgspec.Struct, gc=False):
    """One tensor's entry, as the format spells it. Untracked: it holds no cycles and lives for one piece."""

    dtype: DtypeName
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_decode_infos = msgspec.json.Decoder(dict[str, _Info]).decode
_decode_strings = msgspec.json.Decoder(dict[str, str]).decode


class TensorColumns:
    """The tensors read so far, as columns in the order of the text."""

    __slots__ = ("_seen", "begins", "dtypes", "ends", "metadata", "names", "shapes")

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self.names: list[str] = []
        self.dtypes: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.metadata: dict[str, str] | None = None

    def add_piece(self, scanner: Scanner, stop: int) -> bool:
        """Decode the members up to `stop` at once; tell whether that was possible, changing nothing if not."""
        piece = scanner.raw[scanner.pos : stop]
        infos = _decoded(_decode_infos, piece, _TENSOR_QUOTES)
        if not infos or METADATA_KEY in infos or (b"-" in piece and _MINUS_BEFORE_NUMBER.search(piece)):
            return False
        self._seen.update(infos)
        if len(self._seen) != len(self.names) + len(infos):
            _fail_twice(scanner, next(filter(set(self.names).__contains__, infos)))
        self.names += infos
        # Comprehensions beat `map(attrgetter(...))` by half: attributes in slots are specialised bytecode.
        rows = infos.values()
        self.dtypes += [info.dtype for info in rows]
        self.shapes += [info.shape for info in rows]
        self.begins += [info.data_offsets[0] for info in rows]
        self.ends += [info.data_offsets[1] for info in rows]
        scanner.pos = stop
        return True

    def add_member(self, scanner: Scanner, *, limits: Limits, path: str) -> None:
        """Read one member, a tensor or the metadata, by the scanner."""
        start = scanner.pos
        name = scanner.key()
        if name == METADATA_KEY:
            if self.metadata is not None:
                scanner.fail("__metadata__ stands here twice", at=start)
            self.metadata = {} if scanner.null() else read_string_map(scanner)
            return
        if name in self._seen:
            _fail_twice(scanner, name, at=start)
        dtype, shape, begin, end = _read_info(scanner, name, limits=limits, path=path)
        self._seen.add(name)
        self.names.append(name)
        self.dtypes.append(dtype)
        self.shapes.append(shape)
        self.begins.append(begin)
        self.ends.append(end)


def _fail_twice(scanner: Scanner, name: str, *, at: int | None = None) -> NoReturn:
    scanner.fail("a tensor name stands here twice", at=at, expected="distinct names", found=name)


def _decoded(decode: Any, piece: bytes, quotes_each: int) -> dict[str, Any] | None:
    """Return the members of a piece, or None where msgspec refuses it or the count of quotes is off."""
    try:
        members: dict[str, Any] = decode(b"{" + piece + b"}")
    except (ValueError, RecursionError):
        return None
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
    return members if piece.count(b'"') == quotes_each * len(members) else None


def read_tensors(scanner: Scanner, *, limits: Limits, path: str) -> TensorColumns:
    """Read the header's object from its brace to the end of the text.

    Raises:
        FormatError: It is not what the format says.
        LimitError: Too many tensors, or dimensions of one; raised as soon as that is known.
    """
    columns = TensorColumns()
    scanner.trim()
    slow_until = 0
    members = scanner.open_object()
    while members:
        start = scanner.pos
        if start < slow_until or scanner.raw.startswith(_METADATA_START, start):
            columns.add_member(scanner, limits=limits, path=path)
        else:
            stop = _cut_tensors(scanner)
            if stop <= start or not columns.add_piece(scanner, stop):
                slow_until = stop if stop > start else start + WINDOW_BYTES
                columns.add_member(scanner, limits=limits, path=path)
        if len(columns.names) > limits.max_tensors:
            raise LimitError(
                "more tensors than the limit `max_tensors`",
                path=path,
                expected=f"at most {limits.max_tensors:,}",
                found=f"{len(columns.names):,} or more",
            )
        members = scanner.next_member()
    scanner.finish()
    return columns


def _cut_tensors(scanner: Scanner) -> int:
    """Return where a piece that starts at the position may end: a guess that decoding proves or disproves."""
    pos, last = scanner.pos, scanner.end - 1  # the last byte is the header's closing brace, or an error
    if last - pos <= WINDOW_BYTES:
        return last
    return scanner.raw.rfind(b"},", pos, pos + WINDOW_BYTES) + 1


def read_string_map(scanner: Scanner, *, shared_values: dict[str, str] | None = None) -> dict[str, str]:
    """Read an object of strings.

    Args:
        scanner: Stands at the object's brace; afterwards behind its end.
        shared_values: Where given, equal values become one object, and this dict collects them in order of first
            appearance.
    """
    strings: dict[str, str] = {}
    slow_until = 0
    members = scanner.open_object()
    while members:
        start = stop = scanner.pos
        if start >= slow_until:
            stop = _cut_strings(scanner)
            slow_until = stop if stop > start else start + WINDOW_BYTES
        if stop <= start or not _add_strings(strings, scanner.raw[start:stop], shared_values):
            key = scanner.key()
            if key in strings:
                scanner.fail("a key stands here twice", at=start, expected="distinct keys", found=key)
            value = scanner.string()
            strings[key] = value if shared_values is None else shared_values.setdefault(value, value)
        else:
            scanner.pos = stop
        members = scanner.next_member()
    return strings


def _cut_strings(scanner: Scanner) -> int:
    """Return where a piece may end: before a brace, else after the last string that a comma follows."""
    pos, end = scanner.pos, scanner.end
    stop = min(pos + WINDOW_BYTES, end)
    brace = scanner.raw.find(b"}", pos, stop)
    return brace if brace >= 0 else scanner.raw.rfind(b'",', pos, stop) + 1


def _add_strings(strings: dict[str, str], piece: bytes, shared_values: dict[str, str] | None) -> bool:
    """Add a piece's members at once; tell whether that was possible, changing nothing if not."""
    members = _decoded(_decode_strings, piece, _STRING_QUOTES)
    if not members or not strings.keys().isdisjoint(members):
        return False
    if shared_values is None:
        strings.update(members)
    else:
        distinct = dict.fromkeys(members.values())
        for value in distinct:
            shared_values.setdefault(value, value)
        strings.update(zip(members, map(shared_values.__getitem__, members.values()), strict=True))
    return True


def _read_info(scanner: Scanner, name: str, *, limits: Limits, path: str) -> tuple[str, tuple[int, ...], int, int]:
    """Read one tensor's entry. Unknown keys are stepped over, as the reference reader does."""
    start = scanner.pos
    dtype: str | None = None
    shape: list[int] | None = None
    offsets: list[int] | None = None
    members = scanner.open_object()
    while members:
        at = scanner.pos
        key = scanner.key()
        if (key == "dtype" and dtype) or (key == "shape" and shape is not None) or (key == "data_offsets" and offsets):
            scanner.fail("a key stands twice in a tensor's entry", at=at, found=key)
        at = scanner.pos
        if key == "dtype":
            dtype = scanner.string()
            if dtype not in BITS:
                scanner.fail("unknown dtype", at=at, expected="a dtype of the format, such as 'F32'", found=dtype)
        elif key == "shape":
            shape = scanner.integers(at_most=limits.max_rank)
            if len(shape) > limits.max_rank:
                raise rank_error(name, len(shape), max_rank=limits.max_rank, path=path)
        elif key == "data_offsets":
            offsets = scanner.integers(at_most=2)
            if len(offsets) != 2:
                found = "more" if len(offsets) > 2 else len(offsets)
                scanner.fail("data_offsets of a wrong length", at=at, expected="2 integers", found=found)
        else:
            scanner.skip_value(depth=2)
        members = scanner.next_member()
    if dtype is None or shape is None or offsets is None:
        scanner.fail("a tensor's entry is incomplete", at=start, expected="dtype, shape and data_offsets", found=name)
    return dtype, tuple(shape), offsets[0], offsets[1]


def rank_error(name: str, rank: int, *, max_rank: int, path: str) -> LimitError:
    """Return the error for a tensor of too many dimensions."""
    return LimitError(
        f"tensor {printable(name)!r} has more dimensions than the limit `max_rank`",
        path=path,
        expected=f"at most {max_rank}",
        found=f"{rank} or more",
    )
