"""The header of a safetensors file: eight bytes of length, JSON, then the data.

The caller does the reading: it gives the first eight bytes to `header_nbytes`, reads that many more, and gives them
to `parse_header`. What comes back is a set of columns in file order, checked: whoever reads by them stays inside the
file and reads no byte twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Literal, NoReturn

import msgspec

from stio.errors import FormatError, LimitError, TruncatedError, printable
from stio.format.dtypes import BITS, MAX_ELEMENTS, WHOLE_BYTES, DtypeName, tensor_nbytes
from stio.format.gil_slices import ROWS, WINDOW_BYTES, row_pieces, sort_in_turns
from stio.format.json_scanner import Scanner
from stio.runtime.limits import Limits

__all__ = [
    "METADATA_KEY",
    "PREFIX_BYTES",
    "Header",
    "TensorColumns",
    "TensorInfo",
    "check_coverage",
    "header_nbytes",
    "parse_header",
    "put_in_file_order",
    "rank_error",
    "read_string_map",
    "read_tensors",
]

PREFIX_BYTES = 8
"""Bytes before the JSON: its length as a little-endian u64."""

_DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a checkpoint says of one tensor."""

    name: str
    """Name in the checkpoint: an opaque key, never a path."""
    dtype: str
    """Dtype as the format spells it, such as `"BF16"`."""
    shape: tuple[int, ...]
    """Dimensions as in the header."""
    nbytes: int
    """Size of the data in the file."""
    shard: str
    """File that holds it, relative to the checkpoint's root."""
    file_offset: int
    """First byte of its data in that file, counted from the file's start."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Header:
    """A checked header, as columns in the order of the data in the file.

    Row `k` of each column belongs to one tensor; offsets are half-open and relative to `data_start`. The lists are
    the header's own: read them, do not change them.
    """

    shard: str
    """File that this is the header of, relative to the checkpoint's root."""
    metadata: dict[str, str]
    """The text map under `__metadata__`, empty where the file has none."""
    data_start: int
    """Offset of the first data byte in the file."""
    names: list[str]
    """Names of the tensors."""
    dtypes: list[str]
    """Dtypes as the format spells them."""
    shapes: list[tuple[int, ...]]
    """Dimensions as in the header."""
    begins: list[int]
    """First byte of each tensor's data."""
    ends: list[int]
    """End of each tensor's data; equal to the next one's begin."""
    _positions: dict[str, int] = field(default_factory=dict, init=False)
    """Row of each name, filled on first use: who loads all tensors in file order never asks for it."""

    @property
    def positions(self) -> dict[str, int]:
        """Row of each name. The header's own: read it, do not change it."""
        positions = self._positions
        if len(positions) != len(self.names):
            # Two threads may both do this; they write the same rows.
            for piece in row_pieces(len(self.names)):
                positions.update(zip(self.names[piece], range(piece.start, piece.stop), strict=True))
        return positions

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.positions

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __repr__(self) -> str:
        return f"<Header of {self.shard!r}: {len(self)} tensors, {self.data_bytes} bytes>"

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors together."""
        return self.ends[-1] if self.ends else 0

    def clear(self) -> None:
        """Let go of the rows, a piece at a time: freed at once, 100,000 of them hold the interpreter for 8 ms."""
        for column in (self.shapes, self.begins, self.ends, self.dtypes, self.names):
            while column:
                del column[-ROWS:]
        while self._positions:
            for _ in range(min(ROWS, len(self._positions))):
                self._positions.popitem()

    def index_of(self, name: str) -> int:
        """Return a tensor's row.

        Raises:
            KeyError: There is no tensor of this name.
        """
        return self.positions[name]

    def info(self, name: str) -> TensorInfo:
        """Return what the header says of one tensor.

        Raises:
            KeyError: There is no tensor of this name.
        """
        row = self.positions[name]
        begin, end = self.begins[row], self.ends[row]
        return TensorInfo(name, self.dtypes[row], self.shapes[row], end - begin, self.shard, self.data_start + begin)


def header_nbytes(prefix: bytes, *, file_bytes: int, limits: Limits = _DEFAULT_LIMITS, path: str) -> int:
    """Return the length of the JSON that follows the prefix.

    Args:
        prefix: The file's first `PREFIX_BYTES` bytes, or all it has.
        file_bytes: Size of the file.
        limits: `header_bytes` bounds the length.
        path: File to name in errors.

    Raises:
        FormatError: The file is too short, or the length is zero or leads past the file's end.
        LimitError: The length exceeds the limit, as that of nearly all files of another kind does.
    """
    if len(prefix) < PREFIX_BYTES:
        raise FormatError(
            "too short for a safetensors file", path=path, offset=0, expected="8 bytes or more", found=len(prefix)
        )
    nbytes = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if nbytes > limits.header_bytes:
        raise LimitError(
            "the header's length exceeds the limit `header_bytes`, or this is no safetensors file",
            path=path,
            offset=0,
            expected=f"at most {limits.header_bytes}",
            found=nbytes,
        )
    # Compared after the limit, and by subtraction: nothing here could wrap in any language.
    if nbytes > file_bytes - PREFIX_BYTES:
        raise FormatError(
            "the header's length leads past the end of the file",
            path=path,
            offset=0,
            expected=f"at most {max(0, file_bytes - PREFIX_BYTES)}",
            found=nbytes,
        )
    if nbytes == 0:
        raise FormatError("the header is empty", path=path, offset=0, expected="a JSON object", found="no bytes")
    return nbytes


def parse_header(
    raw: bytes,
    *,
    file_bytes: int,
    path: str,
    shard: str,
    limits: Limits = _DEFAULT_LIMITS,
    trailing: Literal["error", "allow"] = "error",
) -> Header:
    """Parse and check the JSON of a header.

    The interpreter's lock can change hands every millisecond or two, whatever the size (see `_turns.py`).

    Args:
        raw: The JSON, exactly the bytes that the prefix counts.
        file_bytes: Size of the file.
        path: File to name in errors.
        shard: Name of the file relative to the checkpoint's root, for `TensorInfo.shard`.
        limits: Bounds on tensors and dimensions.
        trailing: Whether bytes after the last tensor are an error.

    Raises:
        FormatError: The header breaks the format, or is stricter read ambiguous (a name or key that comes twice).
        LimitError: More tensors or dimensions than the limits allow.
        TruncatedError: The file ends before its last tensor does.
    """
    data_start = PREFIX_BYTES + len(raw)
    scanner = Scanner(raw, path=path, base=PREFIX_BYTES, error=FormatError, what="header")
    columns = read_tensors(scanner, limits=limits, path=path)
    put_in_file_order(columns)
    check_coverage(
        columns,
        data_start=data_start,
        file_bytes=file_bytes,
        max_rank=limits.max_rank,
        trailing=trailing,
        path=path,
    )
    return Header(
        shard=shard,
        metadata=columns.metadata or {},
        data_start=data_start,
        names=columns.names,
        dtypes=columns.dtypes,
        shapes=columns.shapes,
        begins=columns.begins,
        ends=columns.ends,
    )


_U64_MAX = 2**64 - 1


def put_in_file_order(columns: TensorColumns) -> None:
    """Sort rows by their ranges (ties, which are empty tensors, as they stood), unless they touch already."""
    begins, ends = columns.begins, columns.ends
    previous_end = 0
    for piece in row_pieces(len(begins)):
        if begins[piece] != [previous_end, *ends[piece][:-1]]:
            break
        previous_end = ends[piece.stop - 1]
    else:
        return
    order = sort_in_turns(range(len(begins)), key=lambda row: (begins[row], ends[row]))
    # Comprehensions, because the interpreter can hand over its lock inside them.
    columns.names = [columns.names[row] for row in order]
    columns.dtypes = [columns.dtypes[row] for row in order]
    columns.shapes = [columns.shapes[row] for row in order]
    columns.begins = [begins[row] for row in order]
    columns.ends = [ends[row] for row in order]


def check_coverage(
    columns: TensorColumns,
    *,
    data_start: int,
    file_bytes: int,
    max_rank: int,
    trailing: Literal["error", "allow"],
    path: str,
) -> None:
    """Check the columns, in file order, against each other and against the size of the file.

    Raises:
        FormatError: A size does not fit its shape; a hole, an overlap, bytes after the last tensor.
        LimitError: A tensor of more than `max_rank` dimensions.
        TruncatedError: All fits, but the file ends before the last tensor does.
    """
    data_end = 0
    for piece in row_pieces(len(columns.begins)):
        if not _is_sound(columns, piece, data_end, max_rank):
            _check_rows(columns, piece, data_end, data_start=data_start, max_rank=max_rank, path=path)
        data_end = columns.ends[piece.stop - 1]
    file_end = data_start + data_end
    if file_end > file_bytes:
        raise TruncatedError(
            "the file ends before its last tensor does", path=path, expected=f"{file_end} bytes", found=file_bytes
        )
    if file_end < file_bytes and trailing == "error":
        raise FormatError(
            "bytes after the last tensor", path=path, offset=file_end, expected=f"{file_end} bytes", found=file_bytes
        )


def _is_sound(columns: TensorColumns, piece: slice, data_end: int, max_rank: int) -> bool:
    """Tell whether these rows are certainly good.

    The sizes that shapes and dtypes ask for, added up, must give the offsets. If they do, no product overflowed and
    no dimension is large, since each is at most the last offset; except beside a zero, which is for the loop, as are
    dtypes below a byte. The rank comes first: the product of a million dimensions would take long.
    """
    shapes = columns.shapes[piece]
    if max(map(len, shapes)) > max_rank:
        return False
    num_elements = list(map(prod, shapes))
    try:
        widths = list(map(WHOLE_BYTES.__getitem__, columns.dtypes[piece]))
    except KeyError:
        return False
    edges = list(accumulate(map(mul, num_elements, widths), initial=data_end))
    return (
        0 not in num_elements
        and edges[1:] == columns.ends[piece]
        and edges[:-1] == columns.begins[piece]
        and edges[-1] <= MAX_ELEMENTS
    )


def _check_rows(
    columns: TensorColumns, piece: slice, data_end: int, *, data_start: int, max_rank: int, path: str
) -> None:
    rows = zip(
        columns.names[piece],
        columns.dtypes[piece],
        columns.shapes[piece],
        columns.begins[piece],
        columns.ends[piece],
        strict=True,
    )
    for name, dtype, shape, begin, end in rows:
        if len(shape) > max_rank:
            raise rank_error(name, len(shape), max_rank=max_rank, path=path)
        shown = f"tensor {printable(name)!r}"
        if not begin <= end <= _U64_MAX:
            raise FormatError(
                f"{shown}: data_offsets are reversed or overflow 64 bits", path=path, expected="begin <= end < 2**64"
            )
        if begin != data_end:
            raise FormatError(
                f"{shown}: {'its data overlap those of another' if begin < data_end else 'a hole before its data'}",
                path=path,
                offset=data_start + min(begin, data_end),
                expected=f"data from {data_end}",
                found=begin,
            )
        nbytes = tensor_nbytes(dtype, shape, path=path)
        if nbytes != end - begin:
            raise FormatError(
                f"{shown}: its data_offsets do not fit {dtype} {list(shape)}",
                path=path,
                offset=data_start + begin,
                expected=f"{nbytes} bytes",
                found=end - begin,
            )
        data_end = end


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
