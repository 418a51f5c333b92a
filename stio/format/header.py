"""The header of a safetensors file: eight bytes of length, JSON, then the data.

The caller does the reading. It passes the first eight bytes to `header_nbytes`, reads that many more, and passes these
to `parse_header`. There the JSON becomes columns, the columns are put in file order, and their layout is checked. A
reader that follows the resulting `Header` stays inside the file and reads no byte twice.

The JSON is decoded by msgspec, many members at once. Members that msgspec refuses, or decodes more leniently than the
format allows, are decoded one by one (`json_scanner`).

`build_header` makes the same bytes as the format's reference writer, and the same bytes for equal input. Data are
ordered by dtype, wide ones first, so that each tensor stays aligned to its own width; inside a dtype by name. The
reference writer puts metadata keys in a random order; stio sorts them, so that equal checkpoints are equal files
(caches, deduplicating stores and hashes rely on that). With one key or none the bytes are those of the reference
writer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from json.encoder import encode_basestring
from math import prod
from operator import mul
from typing import NoReturn

import msgspec

from stio.errors import FormatError, LimitError, TruncatedError, UnsupportedDtypeError, printable
from stio.format.dtypes import BITS, DTYPES, MAX_ELEMENTS, U64_MAX, WHOLE_BYTES, DtypeName, tensor_nbytes
from stio.format.gil_slices import ROWS, WINDOW_BYTES, row_slices, sort_in_slices
from stio.format.json_scanner import Scanner
from stio.limits import Limits, limit_error

PREFIX_BYTES = 8
"""Bytes before the JSON: its length as a little-endian u64."""

METADATA_KEY = "__metadata__"
"""Member of the JSON that holds a map of text instead of a tensor."""

_MINUS_BEFORE_NUMBER = re.compile(rb"[\[,\s]-")
_TENSOR_QUOTES = 10
_CUT = "its download or copy may be incomplete: fetch it again"
_DEFAULT_LIMITS = Limits()


# The prefix.


def header_nbytes(prefix: bytes, *, file_bytes: int, limits: Limits = _DEFAULT_LIMITS, path: str) -> int:
    """Return the length of the JSON that follows the prefix.

    Args:
        prefix: The file's first `PREFIX_BYTES` bytes, or all of a shorter file.
        file_bytes: Size of the file.
        limits: `header_bytes` bounds the length.
        path: File to name in errors.

    Raises:
        FormatError: The file is too short, or the length is zero or exceeds the rest of the file.
        LimitError: The length exceeds the limit, as that of nearly all files of another kind does.
    """
    if len(prefix) < PREFIX_BYTES:
        raise FormatError(
            f"too short for a safetensors file; {_CUT}",
            path=path,
            offset=0,
            expected="8 bytes or more",
            found=len(prefix),
        )
    nbytes = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    left = max(0, file_bytes - PREFIX_BYTES)  # subtracted, so that no number here can overflow
    if nbytes > limits.header_bytes:
        what = "the header's length exceeds"
        refused = limit_error(what, "header_bytes", limits.header_bytes, path=path, offset=0, found=nbytes)
        if nbytes <= left:
            raise refused
        message = "this is no safetensors file: its first 8 bytes are not the length of a header; fetch it again"
        raise LimitError(message, path=path, offset=0, expected=refused.expected, found=nbytes)
    if nbytes > left:
        message = f"the header's length leads past the end of the file; {_CUT}"
        raise FormatError(message, path=path, offset=0, expected=f"at most {left}", found=nbytes)
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
    allow_trailing: bool = False,
) -> Header:
    """Parse and check the JSON of a header.

    Other threads run every millisecond or two (`gil_slices.py`), unless a single member is longer than a window.

    Args:
        raw: The JSON, exactly the bytes that the prefix counts.
        file_bytes: Size of the file.
        path: File to name in errors.
        shard: Name of the file relative to the checkpoint's root, for `TensorInfo.shard`.
        limits: Bounds on tensors and dimensions.
        allow_trailing: Whether the file may go on after its last tensor.

    Raises:
        FormatError: The header breaks the format; or a name or key is repeated, for which it has no rule.
        LimitError: More tensors or dimensions than the limits allow.
        TruncatedError: The file ends before its last tensor does.
    """
    columns = _Columns(Scanner(raw, path=path, base=PREFIX_BYTES, error=FormatError, what="header"), limits)
    columns.read()
    data_start = PREFIX_BYTES + len(raw)
    if not columns.is_sound():
        columns.put_in_file_order()
        columns.check_layout(data_start)
    data_end = data_start + (columns.ends[-1] if columns.ends else 0)
    if data_end > file_bytes:
        raise TruncatedError(
            f"the file ends before its last tensor does; {_CUT}",
            path=path,
            expected=f"{data_end} bytes",
            found=file_bytes,
        )
    if data_end < file_bytes and not allow_trailing:
        raise FormatError(
            "bytes after the last tensor: something was added to the file; `stio convert` saves the tensors without it",
            path=path,
            offset=data_end,
            expected=f"{data_end} bytes",
            found=file_bytes,
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
        has_metadata=columns.metadata is not None,
    )


class _HeaderEntry(msgspec.Struct, gc=False):
    """One tensor's entry, as in the JSON. Not tracked for garbage: it has no cycles and exists for one slice."""

    dtype: DtypeName
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_decode = msgspec.json.Decoder(dict[str, _HeaderEntry]).decode


def _decode_entries(text: bytes) -> dict[str, _HeaderEntry]:
    """Decode entries of tensors.

    Raises:
        ValueError: msgspec refuses them, or accepts what the format does not: -0, and the metadata's key.
    """
    entries = _decode(text)
    if METADATA_KEY in entries or (b"-" in text and _MINUS_BEFORE_NUMBER.search(text)):
        raise ValueError
    return entries


class _Columns:
    """The tensors of a header as columns, first in the order of the text, then in the order of the data.

    Args:
        scanner: A scanner at the beginning of the JSON.
        limits: Bounds on tensors and dimensions.
    """

    def __init__(self, scanner: Scanner, limits: Limits) -> None:
        self._scanner = scanner
        self._limits = limits
        self._path = scanner.path
        self._distinct_names: set[str] = set()
        self.names: list[str] = []
        self.dtypes: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.begins: list[int] = []
        self.ends: list[int] = []
        self.metadata: dict[str, str] | None = None
        """None where the key is missing or its value is null."""

    # JSON to columns.

    def read(self) -> None:
        """Read the header's object from its brace to the end of the text.

        Raises:
            FormatError: It breaks the format.
            LimitError: Too many tensors; raised as soon as that is known.
        """
        scanner, max_tensors = self._scanner, self._limits.max_tensors
        has_metadata = False
        for start in scanner.members():
            if scanner.accept_key(METADATA_KEY):
                if has_metadata:
                    scanner.fail("__metadata__ occurs twice", at=start)
                has_metadata = True
                self.metadata = None if scanner.accept(b"null") else scanner.string_map()
                continue
            entries = scanner.batch(_decode_entries, self._end_of_entries(), _TENSOR_QUOTES) or self._next_entry()
            if not self._distinct_names.isdisjoint(entries):
                twice = next(filter(self._distinct_names.__contains__, entries))
                scanner.fail("a tensor name occurs twice", at=start, expected="distinct names", found=twice)
            self._add(entries)
            if len(self.names) > max_tensors:
                count = f"{len(self.names):,} or more"
                raise limit_error("more tensors than", "max_tensors", max_tensors, path=self._path, found=count)
        scanner.finish()

    def _end_of_entries(self) -> int:
        """Return where members that start at the position may end. This is a guess; decoding checks it."""
        # The last byte is the header's closing brace, or an error.
        pos, last = self._scanner.pos, self._scanner.end - 1
        if last - pos <= WINDOW_BYTES:
            return last
        return self._scanner.raw.rfind(b"},", pos, pos + WINDOW_BYTES) + 1

    def _add(self, entries: dict[str, _HeaderEntry]) -> None:
        self._distinct_names.update(entries)
        self.names += entries
        # Comprehensions are faster than `map(attrgetter(...))` by half: attributes in slots are specialised bytecode.
        rows = entries.values()
        self.dtypes += [entry.dtype for entry in rows]
        self.shapes += [entry.shape for entry in rows]
        self.begins += [entry.data_offsets[0] for entry in rows]
        self.ends += [entry.data_offsets[1] for entry in rows]

    def _next_entry(self) -> dict[str, _HeaderEntry]:
        """Read one entry by Python's decoder. Unknown keys are skipped, as the reference reader does."""
        start = self._scanner.pos
        name, value = self._scanner.member()
        try:
            entry = msgspec.convert(value, _HeaderEntry)
        except msgspec.ValidationError as error:
            self._scanner.fail(f"tensor {printable(name)!r}: {printable(str(error))}", at=start, found=value)
        if min((*entry.shape, *entry.data_offsets)) < 0:  # the product of two may fit
            self._scanner.fail(f"tensor {printable(name)!r}: a number is negative", at=start, found=value)
        return {name: entry}

    # The layout of the data.

    def is_sound(self) -> bool:
        """Return whether the rows are certainly valid as they are, and in file order, as in most files.

        The sizes that follow from shapes and dtypes, added up, must give the offsets. If they do, no product
        overflowed, and no dimension is large, since each is at most the last offset. Three kinds of headers are left to
        `check_layout`: rows in another order, shapes with a zero, and dtypes below a byte.
        """
        data_end = 0
        for rows in row_slices(len(self.begins)):
            if not self._are_sound(rows, data_end):
                return False
            data_end = self.ends[rows.stop - 1]
        return True

    def _are_sound(self, rows: slice, data_end: int) -> bool:
        shapes = self.shapes[rows]
        if max(map(len, shapes)) > self._limits.max_rank:  # first: the product of a million dimensions would take long
            return False
        num_elements = list(map(prod, shapes))
        try:
            widths = list(map(WHOLE_BYTES.__getitem__, self.dtypes[rows]))
        except KeyError:
            return False
        edges = list(accumulate(map(mul, num_elements, widths), initial=data_end))
        return (
            0 not in num_elements
            and edges[1:] == self.ends[rows]
            and edges[:-1] == self.begins[rows]
            and edges[-1] <= MAX_ELEMENTS
        )

    def put_in_file_order(self) -> None:
        """Sort the rows by their ranges. Equal ranges, which only empty tensors have, keep the order of the text."""
        begins, ends = self.begins, self.ends
        order = sort_in_slices(range(len(begins)), key=lambda row: (begins[row], ends[row]))
        # Comprehensions, because the interpreter can release its lock inside them.
        self.names = [self.names[row] for row in order]
        self.dtypes = [self.dtypes[row] for row in order]
        self.shapes = [self.shapes[row] for row in order]
        self.begins = [begins[row] for row in order]
        self.ends = [ends[row] for row in order]

    def check_layout(self, data_start: int) -> None:
        """Check that the data, in file order, begin at 0 and follow one another without gap or overlap.

        Raises:
            FormatError: A size does not fit its shape; a gap, an overlap.
            LimitError: A tensor of too many dimensions.
        """
        data_end = 0
        for rows in row_slices(len(self.begins)):
            if not self._are_sound(rows, data_end):
                self._check_rows(rows, data_end, data_start)
            data_end = self.ends[rows.stop - 1]

    def _check_rows(self, rows: slice, data_end: int, data_start: int) -> None:
        offsets = zip(self.begins[rows], self.ends[rows], strict=True)
        described = zip(self.names[rows], self.dtypes[rows], self.shapes[rows], offsets, strict=True)
        for name, dtype, shape, (begin, end) in described:
            if len(shape) > self._limits.max_rank:
                what, max_rank = f"tensor {printable(name)!r} has more dimensions than", self._limits.max_rank
                raise limit_error(what, "max_rank", max_rank, path=self._path, found=len(shape))
            if not begin <= end <= U64_MAX:
                self._fail_layout(name, "data_offsets are reversed or overflow 64 bits", None, "begin <= end < 2**64")
            if begin != data_end:
                problem = "its data overlap those of another" if begin < data_end else "a hole before its data"
                self._fail_layout(name, problem, data_start + min(begin, data_end), f"data from {data_end}", begin)
            nbytes = tensor_nbytes(dtype, shape, path=self._path)
            if nbytes != end - begin:
                problem = f"its data_offsets do not fit {dtype} {list(shape)}"
                self._fail_layout(name, problem, data_start + begin, f"{nbytes} bytes", end - begin)
            data_end = end

    def _fail_layout(
        self, name: str, problem: str, offset: int | None, expected: str, found: int | None = None
    ) -> NoReturn:
        raise FormatError(
            f"tensor {printable(name)!r}: {problem}", path=self._path, offset=offset, expected=expected, found=found
        )


# The result.


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Description of one tensor of a checkpoint."""

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

    Row `k` of each column belongs to one tensor. Ranges are half-open and relative to `data_start`. The lists belong
    to the header: read them, do not change them.
    """

    shard: str
    """File with this header, relative to the checkpoint's root."""
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
    """End of each tensor's data; equal to the next one's begin, unless the header `has_holes`."""
    has_metadata: bool = False
    """Whether the file has that text map: some libraries distinguish an empty one from none."""
    has_holes: bool = False
    """Whether the file has further tensors, which are left out here."""
    _positions: dict[str, int] = field(default_factory=dict, init=False)
    """Row of each name, filled on first use: loading all tensors in file order never needs it."""

    @property
    def positions(self) -> dict[str, int]:
        """Row of each name. It belongs to the header: read it, do not change it."""
        positions = self._positions
        if len(positions) != len(self.names):
            # Two threads may both do this; they write the same rows.
            for rows in row_slices(len(self.names)):
                positions.update(zip(self.names[rows], range(rows.start, rows.stop), strict=True))
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
        if self.has_holes:
            return sum(self.ends) - sum(self.begins)
        return self.data_end

    @property
    def data_end(self) -> int:
        """End of the data of the last tensor."""
        return self.ends[-1] if self.ends else 0

    def without(self, names: Collection[str]) -> Header:
        """Return the header without some tensors, whose data is not read then."""
        if not names:
            return self
        left_out = {self.positions[name] for name in names}
        rows = [row for row in range(len(self.names)) if row not in left_out]
        return replace(
            self,
            names=[self.names[row] for row in rows],
            dtypes=[self.dtypes[row] for row in rows],
            shapes=[self.shapes[row] for row in rows],
            begins=[self.begins[row] for row in rows],
            ends=[self.ends[row] for row in rows],
            has_holes=True,
        )

    def clear(self) -> None:
        """Release the rows, a slice at a time (`gil_slices.py`): freed at once, 100,000 of them take 8 ms."""
        for column in (self.shapes, self.begins, self.ends, self.dtypes, self.names):
            while column:
                del column[-ROWS:]
        while self._positions:
            for _ in range(min(ROWS, len(self._positions))):
                self._positions.popitem()

    def info(self, name: str) -> TensorInfo:
        """Return the description of one tensor.

        Raises:
            KeyError: There is no tensor of this name.
        """
        row = self.positions[name]
        begin, end = self.begins[row], self.ends[row]
        return TensorInfo(name, self.dtypes[row], self.shapes[row], end - begin, self.shard, self.data_start + begin)


# Writing.

MAX_HEADER_BYTES = 100_000_000
"""Longest JSON that the format allows."""

HEADER_ALIGNMENT = 8
"""The data start at a multiple of this: no dtype is wider."""


def build_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Return the bytes before the data, and the order of the data.

    Args:
        tensors: Name, dtype and shape of each (for F4 the shape counts elements, not pairs).
        metadata: Text to store beside them. None leaves the key out, an empty mapping does not.

    Returns:
        Length, JSON and padding, ready to be written at offset 0; and the names in the order in which their data
        follow, without a gap.

    Raises:
        ValueError: A name is repeated, is `__metadata__` (no reader would find it), or holds NUL or half a surrogate
            pair; metadata hold such text.
        TypeError: A metadata key or value is no string.
        UnsupportedDtypeError: The format has no such dtype.
        FormatError: A shape is negative, overflows, or leaves a byte half filled (see `tensor_nbytes`).
        LimitError: The header would be longer than readers accept.
    """
    entries: dict[str, tuple[str, int]] = {}  # the text before the offsets, and the size in bytes
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    known: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}  # many tensors, few shapes
    for name, dtype, shape in tensors:
        kind = dtype, tuple(shape)
        entry = known.get(kind)
        if entry is None:
            entry = known[kind] = _entry(name, *kind)
        entries[name] = entry
        names_of[dtype].append(name)
    # Python orders text by code points, which is the order of its UTF-8 bytes.
    order = [name for dtype in DTYPES if dtype in names_of for name in sort_in_slices(names_of[dtype])]
    if len(entries) != len(order):
        raise ValueError("two tensors have the same name")
    parts = [] if metadata is None else [_metadata_json(metadata)]
    end = 0
    for rows in row_slices(len(order)):
        names = order[rows]
        _check_names(names)
        texts, sizes = zip(*[entries[name] for name in names], strict=True)
        edges = list(accumulate(sizes, initial=end))
        end = edges[-1]
        members = zip(map(encode_basestring, names), texts, edges, edges[1:], strict=False)
        parts.append(",".join([f"{name}:{text}{begin},{end}]}}" for name, text, begin, end in members]).encode())
    body = b",".join(parts)
    padding = b" " * (-(len(body) + 2) % HEADER_ALIGNMENT)
    nbytes = len(body) + 2 + len(padding)
    if nbytes > MAX_HEADER_BYTES:
        message = "the header would be longer than the format allows; save in shards, or with less metadata"
        raise LimitError(message, expected=f"at most {MAX_HEADER_BYTES} bytes", found=nbytes)
    return b"".join([nbytes.to_bytes(8, "little"), b"{", body, b"}", padding]), order


def _entry(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, int]:
    """Return the text of a tensor's entry before its offsets, and the size of its data in bytes."""
    if dtype not in BITS:
        raise UnsupportedDtypeError(
            f"tensor {printable(name)!r}: the safetensors format has no such dtype", found=dtype
        )
    dimensions = ",".join(map(str, shape))
    return f'{{"dtype":"{dtype}","shape":[{dimensions}],"data_offsets":[', tensor_nbytes(dtype, shape)


def _check_names(names: Sequence[str]) -> None:
    text = "".join(names)
    if METADATA_KEY in text or "\0" in text or not is_encodable(text):
        for name in names:
            check_name(name)


def check_name(name: str) -> None:
    """Require that a header can hold a name, for all readers.

    Raises:
        ValueError: It is the metadata's, or holds NUL or half of a surrogate pair.
    """
    if name == METADATA_KEY:
        raise ValueError(f"a tensor cannot have the name {METADATA_KEY!r}: the format keeps its metadata there")
    if "\0" in name:
        raise ValueError(f"the tensor name {printable(name)!r} holds a NUL character, which many readers refuse")
    if not is_encodable(name):
        raise ValueError(f"the tensor name {printable(name)!r} holds half of a surrogate pair")


def is_encodable(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _metadata_json(metadata: Mapping[str, str]) -> bytes:
    require_text(list(metadata.items()), "metadata")
    members = (f"{encode_basestring(key)}:{encode_basestring(value)}" for key, value in sorted(metadata.items()))
    return f'"{METADATA_KEY}":{{{",".join(members)}}}'.encode()


def require_text(pairs: Sequence[tuple[object, object]], what: str) -> None:
    """Require that all keys and values are text that UTF-8 can express.

    Raises:
        TypeError: One is no text.
        ValueError: One holds half of a surrogate pair.
    """
    for key, value in pairs:
        if not (isinstance(key, str) and isinstance(value, str)):
            shown = f"{printable(repr(key))} to {printable(repr(value))}"
            raise TypeError(f"{what} must map strings to strings, not {shown}")
    if not is_encodable("".join(f"{key}{value}" for key, value in pairs)):
        raise ValueError(f"a text in {what} holds half of a surrogate pair, which no reader takes")
