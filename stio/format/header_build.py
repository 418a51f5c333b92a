"""Build a header: the same bytes as the format's reference writer, and the same ones each time.

Data are laid out by dtype, wide ones first, so that each tensor stays aligned to its own width; inside a dtype by
name. The reference writer puts metadata keys in a random order; stio sorts them, so that equal checkpoints are equal
files (caches, deduplicating stores and hashes rely on that). With one key or none the bytes are equal to its.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring

from stio.errors import LimitError, UnsupportedDtypeError, printable
from stio.format.dtypes import DTYPES, WRITE_RANK, tensor_nbytes
from stio.format.gil_slices import row_pieces, sort_in_turns
from stio.format.header import METADATA_KEY

__all__ = ["HEADER_ALIGNMENT", "MAX_HEADER_BYTES", "build_header", "write_order"]

MAX_HEADER_BYTES = 100_000_000
"""Longest JSON that the format allows."""

HEADER_ALIGNMENT = 8
"""The data start at a multiple of this: no dtype is wider."""


def write_order(tensors: Iterable[tuple[str, str]]) -> list[str]:
    """Return names in the order in which their data are written.

    Args:
        tensors: Name and dtype of each.

    Raises:
        UnsupportedDtypeError: The format has no such dtype.
        ValueError: A name comes twice.
    """
    names_of: defaultdict[str, list[str]] = defaultdict(list)
    for name, dtype in tensors:
        if dtype not in WRITE_RANK:
            raise UnsupportedDtypeError(
                f"tensor {printable(name)!r}: the safetensors format has no such dtype", found=dtype
            )
        names_of[dtype].append(name)
    # Python orders text by code points, which is the order of its UTF-8 bytes.
    ordered = [name for dtype in DTYPES for name in sort_in_turns(names_of.get(dtype, ()), key=_itself)]
    if len(set(ordered)) != len(ordered):
        twice = next(name for name in ordered if ordered.count(name) > 1)
        raise ValueError(f"two tensors have the name {printable(twice)!r}")
    return ordered


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
        ValueError: A name comes twice, is `__metadata__` (no reader would find it), or holds NUL or half a surrogate
            pair; metadata hold such text.
        TypeError: A metadata key or value is no string.
        UnsupportedDtypeError: The format has no such dtype.
        FormatError: A shape is negative, overflows, or leaves a byte half filled (see `tensor_nbytes`).
        LimitError: The header would be longer than readers accept.
    """
    entries = {}
    num_tensors = 0
    for name, dtype, shape in tensors:
        _check_name(name)
        entries[name] = (dtype, shape)
        num_tensors += 1
    if len(entries) != num_tensors:
        raise ValueError("two tensors have the same name")
    order = write_order((name, dtype) for name, (dtype, _) in entries.items())
    parts = [] if metadata is None else [_metadata_json(metadata)]
    offset = 0
    known: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}  # many tensors, few shapes
    for piece in row_pieces(len(order)):
        texts = []
        for name in order[piece]:
            dtype, shape = entries[name]
            kind = dtype, tuple(shape)
            found = known.get(kind)
            if found is None:
                dimensions = ",".join(map(str, shape))
                text = f'{{"dtype":"{dtype}","shape":[{dimensions}],"data_offsets":['
                found = known[kind] = text, tensor_nbytes(dtype, shape)
            end = offset + found[1]
            texts.append(f"{encode_basestring(name)}:{found[0]}{offset},{end}]}}")
            offset = end
        parts.append(",".join(texts).encode())
    body = b"{" + b",".join(parts) + b"}"
    body += b" " * (-len(body) % HEADER_ALIGNMENT)
    if len(body) > MAX_HEADER_BYTES:
        raise LimitError(
            "the header would be longer than the format allows; save in shards, or with less metadata",
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            found=len(body),
        )
    return len(body).to_bytes(8, "little") + body, order


def _itself(name: str) -> str:
    return name


def _check_name(name: str) -> None:
    if name == METADATA_KEY:
        raise ValueError(f"a tensor cannot have the name {METADATA_KEY!r}: the format keeps its metadata there")
    if "\0" in name:
        raise ValueError(f"the tensor name {printable(name)!r} holds a NUL character, which many readers cannot take")
    if not _is_encodable(name):
        raise ValueError(f"the tensor name {printable(name)!r} holds half of a surrogate pair")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _metadata_json(metadata: Mapping[str, str]) -> bytes:
    members = []
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"metadata must map strings to strings, not {printable(key)} to {printable(value)}")
    for key, value in sorted(metadata.items()):
        if not (_is_encodable(key) and _is_encodable(value)):
            raise ValueError(f"the metadata under {printable(key)!r} hold half of a surrogate pair")
        members.append(f"{encode_basestring(key)}:{encode_basestring(value)}")
    return f'"{METADATA_KEY}":{{{",".join(members)}}}'.encode()
