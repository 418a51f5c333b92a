"""The description of a delta as text, and how its files hold the changed elements; see `stio.format.delta`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from stio.errors import FormatError, LimitError, printable
from stio.format.dtypes import BITS, tensor_nbytes
from stio.format.header import Header, TensorInfo

FORMAT = "stio-delta"
"""Value of the metadata `format` in the files of a delta."""

ID_KEY = "stio.id"
"""Metadata key of stio: the id of a save."""

DELTA_KEY = "stio.delta"
"""Metadata key of stio: the description of a delta, or `DELTA_POINTER`."""

DELTA_TENSOR = "/stio.delta"
"""U8 tensor that holds a long description. Names of tensors that only a delta has begin so."""

DELTA_POINTER = f'{{"{DELTA_KEY}":1,"tensor":"{DELTA_TENSOR}"}}'
"""Value in the metadata if the description is in a tensor."""

MAX_LINKS = 64
"""Most deltas on one full checkpoint."""

_VERSION = 1
_ID = re.compile(r"[0-9a-f]{32}|sha256:[0-9a-f]{64}")
_CODE_BYTES = {"U8": 1, "U16": 2}


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor of which a delta holds the changed elements."""

    name: str
    """Its name in the checkpoint."""
    dtype: str
    """Its dtype, as in the format; that of the values too."""
    shape: tuple[int, ...]
    """Its shape, as in the format."""
    count: int
    """Number of changed elements, one or more."""

    @property
    def item_bytes(self) -> int:
        """Bytes of an element; of a dtype below a byte the elements are bytes."""
        return max(8, BITS[self.dtype]) // 8

    @property
    def num_elements(self) -> int:
        """Number of its elements."""
        return tensor_nbytes(self.dtype, self.shape) // self.item_bytes


@dataclass(frozen=True, slots=True)
class Delta:
    """The description of a delta. The positions and values of `changed[k]` are the tensors of `names_of(k)`."""

    base: str
    """Path of the base, relative to the directory that holds the delta; without `..`."""
    base_id: str
    """Its id, or the digest of its files: `sha256:` and hexadecimal digits."""
    depth: int
    """Number of deltas from here to the full checkpoint, this one included."""
    is_directory: bool
    """Whether the delta was saved as a directory; then the directory that holds it is the parent of its files'."""
    changed: Sequence[ChangedTensor]
    """The tensors of which elements are in it."""

    def encode(self) -> bytes:
        """Return the text; equal descriptions have equal texts."""
        document = {
            DELTA_KEY: _VERSION,
            "base": self.base,
            "base_id": self.base_id,
            "depth": self.depth,
            "directory": self.is_directory,
            "changed": [[one.name, one.dtype, list(one.shape), one.count] for one in self.changed],
        }
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


class FileRange(NamedTuple):
    """A range of an open file."""

    shard: int
    """The file: its index in `OpenCheckpoint.files`."""
    offset: int
    """First byte in the file."""
    nbytes: int
    """Number of bytes."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Where the changed elements of one tensor are."""

    codes: FileRange
    """The codes of the positions."""
    code_bytes: int
    """Bytes of a code: 1 or 2."""
    values: FileRange
    """The values."""
    count: int
    """Number of changed elements."""
    item_bytes: int
    """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Bytes of codes and values."""
        return self.codes.nbytes + self.values.nbytes


class _Versioned(msgspec.Struct, rename={"version": DELTA_KEY}):
    version: int


class _Text(msgspec.Struct, forbid_unknown_fields=True, rename={"version": DELTA_KEY, "is_directory": "directory"}):
    version: int
    base: str
    base_id: str
    depth: int
    is_directory: bool
    changed: list[tuple[str, str, tuple[int, ...], int]]


_decode = msgspec.json.Decoder(_Text).decode
_decode_version = msgspec.json.Decoder(_Versioned).decode


def names_of(k: int) -> tuple[str, str]:
    """Return the names of the tensors with the positions and the values of the changed tensor `k`."""
    return f"{DELTA_TENSOR}/{k}/positions", f"{DELTA_TENSOR}/{k}/values"


def is_own_name(name: str) -> bool:
    """Return whether a tensor belongs to the delta, and is no tensor of the checkpoint."""
    return name == DELTA_TENSOR or name.startswith(f"{DELTA_TENSOR}/")


def parse_delta(text: bytes, *, path: str) -> Delta:
    """Parse and check a description.

    Raises:
        FormatError: It is malformed, or of another version.
        LimitError: Its chain is too long.
    """
    try:
        if (version := _decode_version(text).version) != _VERSION:
            message = "another version of stio has written this delta; load it with that version"
            raise FormatError(message, path=path, expected=f"version {_VERSION}", found=version)
        raw = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"the description of the delta is malformed: {printable(str(error))}", path=path) from None
    if raw.depth < 1:
        raise FormatError("the depth of the delta is malformed", path=path, expected="1 or more", found=raw.depth)
    if raw.depth > MAX_LINKS:
        message = "the chain of deltas is too long; `stio convert` with the version that wrote it makes it full"
        raise LimitError(message, path=path, expected=f"at most {MAX_LINKS}", found=raw.depth)
    parts = raw.base.split("/")
    if not raw.base or {"", ".", ".."} & set(parts) or "\0" in raw.base or "\\" in raw.base:
        message = "the base of a delta is named by a path below the directory that holds the delta"
        raise FormatError(message, path=path, found=printable(raw.base))
    if not _ID.fullmatch(raw.base_id):
        raise FormatError("the id of the delta's base is malformed", path=path, found=printable(raw.base_id))
    changed = [ChangedTensor(*row) for row in raw.changed]
    if len({one.name for one in changed}) != len(changed):
        raise FormatError("the description of the delta names a tensor twice", path=path)
    for one in changed:
        what = f"the delta's changed tensor {printable(one.name)!r}"
        if is_own_name(one.name) or one.dtype not in BITS or min(one.shape, default=0) < 0:
            raise FormatError(f"{what} is malformed", path=path, found=f"{printable(one.dtype)} {list(one.shape)}")
        tensor_nbytes(one.dtype, one.shape, path=path)  # for its errors
        if not 1 <= one.count <= one.num_elements:
            expected = f"from 1 to {one.num_elements:,} elements"
            raise FormatError(f"{what} has a wrong count", path=path, expected=expected, found=one.count)
    return Delta(raw.base, raw.base_id, raw.depth, raw.is_directory, changed)


def patches_of(delta: Delta, headers: Sequence[Header], *, first: int = 0, path: str) -> Mapping[str, Patch]:
    """Find the changed elements of each tensor in the files of a delta.

    Args:
        delta: The description.
        headers: Of its files.
        first: Index of its first file in `OpenCheckpoint.files`.
        path: The delta, to name in errors.

    Raises:
        FormatError: A tensor with positions or values is missing, superfluous or malformed.
    """
    own = {
        name: (shard, header)
        for shard, header in enumerate(headers, first)
        for name in header.names
        if is_own_name(name)
    }
    own.pop(DELTA_TENSOR, None)
    patches = {}
    for k, one in enumerate(delta.changed):
        names = names_of(k)
        (codes_shard, codes), (values_shard, values) = (_own_tensor(own, name, path) for name in names)
        code_bytes = _CODE_BYTES.get(codes.dtype, 0)
        # Each code that is no element leads as many elements on as its value: more of them lead past the end.
        max_codes = one.count + one.num_elements // ((1 << 8 * code_bytes) - 1) if code_bytes else 0
        if len(codes.shape) != 1 or not one.count <= codes.shape[0] <= max_codes:
            raise FormatError(f"the positions of {printable(one.name)!r} in the delta are malformed", path=path)
        if values.nbytes != one.count * one.item_bytes:
            raise FormatError(f"the values of {printable(one.name)!r} in the delta are malformed", path=path)
        if codes.nbytes + values.nbytes >= (nbytes := one.num_elements * one.item_bytes):  # it would be written whole
            message = f"the changed elements of {printable(one.name)!r} in the delta are longer than the tensor"
            raise FormatError(message, path=path, expected=f"less than {nbytes:,}", found=codes.nbytes + values.nbytes)
        patches[one.name] = Patch(
            FileRange(codes_shard, codes.file_offset, codes.nbytes),
            code_bytes,
            FileRange(values_shard, values.file_offset, values.nbytes),
            one.count,
            one.item_bytes,
        )
    if own:
        raise FormatError(
            "the delta has tensors that its description does not name", path=path, found=printable(min(own))
        )
    return patches


def _own_tensor(own: dict[str, tuple[int, Header]], name: str, path: str) -> tuple[int, TensorInfo]:
    try:
        shard, header = own.pop(name)
    except KeyError:
        raise FormatError("a tensor of the delta is missing", path=path, expected=name) from None
    return shard, header.info(name)
