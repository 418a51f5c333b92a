"""The index of a sharded checkpoint: which tensor stands in which file.

The index is untrusted text that names files to open, so each shard's name is judged before anything is opened, and
by the rules of POSIX and of Windows alike: a checkpoint that is safe on one machine is safe on all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from stio.errors import IndexFormatError, UnsafePathError, printable
from stio.format.header import Header, read_string_map
from stio.format.json_scanner import Scanner
from stio.runtime.limits import Limits

__all__ = ["MAX_METADATA_BYTES", "ShardIndex", "check_against_shards", "check_shard_name", "parse_index"]

MAX_METADATA_BYTES = 10 * 1024 * 1024
"""Longest `metadata` of an index; it is decoded in one call, and real ones hold a hundred bytes."""

_SUFFIX = ".safetensors"
_PERCENT_ENCODED = re.compile("%[0-9a-fA-F]{2}")
_SHOWN_NAMES = 3
_DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """What an index file says."""

    metadata: dict[str, object]
    """The object under `metadata`, empty where there is none."""
    weight_map: dict[str, str]
    """Shard of each tensor, in the order of the file. Equal names of shards are one object."""
    total_size: int | None
    """Bytes of all tensors as the index claims; None where it does not, or not as a number of bytes."""
    shards: tuple[str, ...]
    """Names of the shards, in order of their first appearance, each one checked."""


def parse_index(raw: bytes, *, path: str, limits: Limits = _DEFAULT_LIMITS) -> ShardIndex:
    """Parse an index and check the names of its shards.

    Args:
        raw: The file's bytes.
        path: File to name in errors.
        limits: `header_bytes` bounds the text, and with it the number of tensors.

    Raises:
        IndexFormatError: Not JSON, a key that comes twice, no map of strings to strings, too long.
        UnsafePathError: A shard's name leads elsewhere, or could on some system.
    """
    if len(raw) > limits.header_bytes:
        raise IndexFormatError(
            "the index is longer than the limit `header_bytes`",
            path=path,
            expected=f"at most {limits.header_bytes} bytes",
            found=len(raw),
        )
    scanner = Scanner(raw, path=path, base=0, error=IndexFormatError, what="index")
    metadata: dict[str, object] = {}
    weight_map: dict[str, str] | None = None
    shards: dict[str, str] = {}
    keys: set[str] = set()
    scanner.trim()
    members = scanner.open_object()
    while members:
        start = scanner.pos
        key = scanner.key()
        if key in ("metadata", "weight_map") and key in keys:
            scanner.fail("a key stands here twice", at=start, found=key)
        keys.add(key)
        if key == "weight_map":
            weight_map = read_string_map(scanner, shared_values=shards)
        elif key == "metadata":
            metadata = {} if scanner.null() else _read_metadata(scanner)
        else:
            scanner.skip_value(depth=1)
        members = scanner.next_member()
    scanner.finish()
    if weight_map is None:
        scanner.fail("no weight_map", at=0, expected="a map from tensor to shard", found="none")
    for shard in shards:
        check_shard_name(shard, path=path)
    return ShardIndex(metadata, weight_map, _total_size(metadata), tuple(shards))


def _read_metadata(scanner: Scanner) -> dict[str, object]:
    """Read an object of any values. The scanner checks the text and its depth, `json` makes the values."""
    start = scanner.pos
    if scanner.peek() != ord("{"):
        scanner.fail("metadata must be an object")
    scanner.skip_value(depth=1)
    if scanner.pos - start > MAX_METADATA_BYTES:
        scanner.fail("the metadata are too long", at=start, expected=f"at most {MAX_METADATA_BYTES} bytes")

    def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) != len(pairs):
            scanner.fail("a key in the metadata stands there twice", at=start)
        return values

    def integer(digits: str) -> int:
        if len(digits) > 40:
            scanner.fail("an integer in the metadata is too long", at=start, found=f"{len(digits)} digits")
        return int(digits)

    decoded: dict[str, object] = json.loads(
        scanner.raw[start : scanner.pos], object_pairs_hook=distinct, parse_int=integer
    )
    return decoded


def _total_size(metadata: Mapping[str, object]) -> int | None:
    claimed = metadata.get("total_size")
    if isinstance(claimed, float) and claimed.is_integer():
        claimed = int(claimed)  # older converters wrote `1.0e9`
    if isinstance(claimed, bool) or not isinstance(claimed, int) or claimed < 0:
        return None
    return claimed


def check_shard_name(name: str, *, path: str) -> None:
    """Require that a shard's name stays below the index's directory, on every system.

    Links are for whoever opens the file: only there can they be seen.

    Args:
        name: Name as in the index, with `/` between folders.
        path: The index, to name in errors.

    Raises:
        UnsafePathError: The name has a root, a drive, `..`, or characters that some system or layer reads as such.
        IndexFormatError: The name is no path of a `.safetensors` file.
    """

    def unsafe(reason: str) -> NoReturn:
        raise UnsafePathError(f"shard name {reason}", path=path, expected="a path below the index", found=name)

    if any(character < " " or character == "\x7f" for character in name):
        unsafe("holds control characters")
    if "\\" in name:
        unsafe("holds a backslash, which separates folders on Windows")
    # A drive (`C:x`), a stream of a file (`x:y`) and a URL (`s3://x`) all need the colon.
    if ":" in name:
        unsafe("holds a colon: a drive, a stream or a URL")
    # Nothing here decodes percent signs, but a remote storage might: `%2e%2e%2f` is `../` there.
    if _PERCENT_ENCODED.search(name):
        unsafe("is percent-encoded")
    parts = name.split("/")
    if name.startswith("/"):
        unsafe("is absolute")
    if ".." in parts:
        unsafe("holds '..', which leads out of its directory")
    # Windows drops dots and spaces at the end of a part, so `.. ` is `..` there.
    if any(part and not part.rstrip(". ") for part in parts):
        unsafe("has a part of dots and spaces alone, which some systems take for '..'")
    if not name.endswith(_SUFFIX) or parts[-1] == _SUFFIX or "" in parts:
        raise IndexFormatError(
            "shard name is no path of a safetensors file", path=path, expected=f"a name ending in {_SUFFIX}", found=name
        )


def check_against_shards(index: ShardIndex, headers: Mapping[str, Header], *, strict: bool, path: str) -> list[str]:
    """Compare an index with the headers of its shards.

    Args:
        index: The parsed index.
        headers: Header of each shard that the index names.
        strict: Whether a shard's tensor that the index leaves out is an error.
        path: The index, to name in errors.

    Returns:
        Warnings, as sentences.

    Raises:
        IndexFormatError: A shard lacks a tensor that the index says it has, or is not there; two shards hold one
            tensor; with `strict`, a shard holds a tensor that the index leaves out.
    """
    absent = [shard for shard in index.shards if shard not in headers]
    if absent:
        raise IndexFormatError("a shard is missing", path=path, expected=absent[0], found="no header for it")
    rows_of = {shard: headers[shard].positions for shard in index.shards}
    missing = [name for name, shard in index.weight_map.items() if name not in rows_of[shard]]
    if missing:
        shard = index.weight_map[missing[0]]
        raise IndexFormatError(
            f"{_count(missing)} not in the shard that the index names for it", path=path, expected=f"it in {shard}"
        )
    # Each indexed name was found in its shard. So the shards hold nothing else, and nothing twice, exactly if they
    # hold as many tensors as the index does; only otherwise is there something to look for.
    warnings = []
    if sum(map(len, rows_of.values())) != len(index.weight_map):
        warnings += _unindexed(index, rows_of, strict=strict, path=path)
    total = sum(headers[shard].data_bytes for shard in index.shards)
    if index.metadata.get("total_size") is not None and index.total_size != total:
        claimed = printable(index.metadata["total_size"])
        warnings.append(f"{printable(path)}: the index claims total_size {claimed}, the shards hold {total} bytes")
    return warnings


def _unindexed(index: ShardIndex, rows_of: Mapping[str, dict[str, int]], *, strict: bool, path: str) -> list[str]:
    """Find what the shards hold besides what the index names."""
    weight_map = index.weight_map
    shard_of: dict[str, str] = {}
    extra: list[str] = []
    for shard, rows in rows_of.items():
        for name in rows:
            if shard_of.setdefault(name, shard) != shard:
                raise IndexFormatError(
                    f"two shards hold the tensor {printable(name)!r}",
                    path=path,
                    expected="one",
                    found=f"{shard_of[name]} and {shard}",
                )
            if name not in weight_map:
                extra.append(name)
    message = f"{_count(extra)} in a shard, but not in the index"
    if strict:
        raise IndexFormatError(message, path=path, found=shard_of[extra[0]])
    return [f"{printable(path)}: {message}"]


def _count(names: list[str]) -> str:
    shown = ", ".join(repr(printable(name)) for name in names[:_SHOWN_NAMES])
    if len(names) == 1:
        return f"tensor {shown} is"
    more = len(names) - _SHOWN_NAMES
    return f"tensors {shown}{f' and {more} more' if more > 0 else ''} are"
