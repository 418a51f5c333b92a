"""The header of a safetensors file: eight bytes of length, JSON, then the data.

The caller does the reading: it gives the first eight bytes to `header_nbytes`, reads that many more, and gives them
to `parse_header`. What comes back is a set of columns in file order, checked: whoever reads by them stays inside the
file and reads no byte twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from stio.codec._decode import read_tensors
from stio.codec._json import Scanner
from stio.codec._layout import check_coverage, put_in_file_order
from stio.codec._turns import ROWS, row_pieces
from stio.errors import FormatError, LimitError
from stio.events import Limits

__all__ = ["PREFIX_BYTES", "Header", "TensorInfo", "header_nbytes", "parse_header"]

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
