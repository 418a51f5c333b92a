"""Build a header: the same bytes as the format's reference writer, and the same bytes for equal input.

Data are ordered by dtype, wide ones first, so that each tensor stays aligned to its own width; inside a dtype by
name. The reference writer puts metadata keys in a random order; stio sorts them, so that equal checkpoints are equal
files (caches, deduplicating stores and hashes rely on that). With one key or none the bytes are those of the reference
writer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring

from stio.errors import LimitError, UnsupportedDtypeError, printable
from stio.format.dtypes import BITS, DTYPES, tensor_nbytes
from stio.format.gil_slices import row_slices, sort_in_slices
from stio.format.header import METADATA_KEY

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
    num_tensors = 0
    for name, dtype, shape in tensors:
        kind = dtype, tuple(shape)
        found = known.get(kind)
        if found is None:
            found = known[kind] = _entry(name, *kind)
        entries[name] = found
        names_of[dtype].append(name)
        num_tensors += 1
    _check_names(list(entries))
    if len(entries) != num_tensors:
        raise ValueError("two tensors have the same name")
    # Python orders text by code points, which is the order of its UTF-8 bytes.
    order = [name for dtype in DTYPES for name in sort_in_slices(names_of.get(dtype, ()))]
    parts = [] if metadata is None else [_metadata_json(metadata)]
    offset = 0
    for rows in row_slices(len(order)):
        texts = []
        for name in order[rows]:
            text, nbytes = entries[name]
            end = offset + nbytes
            texts.append(f"{encode_basestring(name)}:{text}{offset},{end}]}}")
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


LATE_BYTES = 128
"""Room in a header for a tensor whose size is not known yet, see `with_late_tensor`."""


def with_late_tensor(header: bytes, name: str, data_bytes: int, nbytes: int | None) -> bytes:
    """Return a header with `LATE_BYTES` more, in which a U8 tensor is named whose data follow all others.

    Its length does not depend on the tensor's size, so the other data can be written before that is known.

    Args:
        header: The header of the other tensors, from `build_header`.
        name: The tensor's name; at most 24 bytes.
        data_bytes: Bytes of the other data.
        nbytes: Its size. None: the tensor is left out, there is only the room for it.
    """
    body = header[8:].rstrip(b" ")
    room = len(header) - 8 + LATE_BYTES
    if nbytes is not None:
        begin, end = data_bytes, data_bytes + nbytes
        text = f"{encode_basestring(name)}:{_entry(name, 'U8', (nbytes,))[0]}{begin},{end}]}}".encode()
        body = body[:-1] + (b"," if body != b"{}" else b"") + text + b"}"
    assert len(body) <= room, name
    return room.to_bytes(8, "little") + body.ljust(room, b" ")


def _entry(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, int]:
    """Return the text of a tensor's entry before its offsets, and the size of its data in bytes."""
    if dtype not in BITS:
        raise UnsupportedDtypeError(
            f"tensor {printable(name)!r}: the safetensors format has no such dtype", found=dtype
        )
    dimensions = ",".join(map(str, shape))
    return f'{{"dtype":"{dtype}","shape":[{dimensions}],"data_offsets":[', tensor_nbytes(dtype, shape)


def _check_names(names: Sequence[str]) -> None:
    """Require that all names are valid. Many are checked in one step, since nearly all are."""
    for rows in row_slices(len(names)):
        part = names[rows]
        text = "\0".join(part)
        if text.count("\0") != len(part) - 1 or METADATA_KEY in part or not is_encodable(text):
            for name in part:
                _check_name(name)


def _check_name(name: str) -> None:
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
    members = []
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(
                f"metadata must map strings to strings, not {printable(repr(key))} to {printable(repr(value))}"
            )
    for key, value in sorted(metadata.items()):
        if not (is_encodable(key) and is_encodable(value)):
            raise ValueError(f"the metadata under {printable(key)!r} hold half of a surrogate pair")
        members.append(f"{encode_basestring(key)}:{encode_basestring(value)}")
    return f'"{METADATA_KEY}":{{{",".join(members)}}}'.encode()
