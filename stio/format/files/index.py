"""The index of a sharded checkpoint: which file holds which tensor.

The index is untrusted text that names files to open. `parse_index` therefore checks each shard's name
(`check_shard_name`) before anything is opened. stio reads every index through it, in the drop-ins too.
`check_shards` compares an index with the headers of its shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stio.errors import IndexFormatError, listed, printable
from stio.format.files.names import FILE_SUFFIX, PICKLE_SUFFIXES, FileName, check_shard_name
from stio.format.files.other_kinds import CONVERT, WHOLE_BY_TORCH
from stio.format.header import Header
from stio.format.json_scanner import Scanner
from stio.limits import Limits, advice_on_limit

_LENIENT = "`stio.load(..., strict=False)`"
_DEFAULT_LIMITS = Limits()
_FAST_KEYS = ("fst.shard.set", "fst.shard.index", "fst.shard.count")
_DCP_PARTS = "DCP_SHARDING_INFO"
_decode_parts = msgspec.json.Decoder(dict[str, dict[str, Any]]).decode


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Content of an index file."""

    metadata: dict[str, object]
    """The object under `metadata`, empty where there is none."""
    weight_map: dict[str, str]
    """Shard of each tensor, in the order of the file. Equal shard names are one object."""
    shards: tuple[str, ...]
    """Names of the shards, in order of their first appearance, each one checked."""
    names_elsewhere: frozenset[str] = frozenset()
    """Of a part of an index: names of the tensors in other shards."""
    is_part: bool = False
    """Whether it is a part of an index."""

    def part(self, shards: Collection[str]) -> ShardIndex:
        """Return the part of the index that names these shards only."""
        chosen = set(shards)
        return ShardIndex(
            {key: value for key, value in self.metadata.items() if key != "total_size"},
            {name: shard for name, shard in self.weight_map.items() if shard in chosen},
            tuple(shard for shard in self.shards if shard in chosen),
            frozenset(name for name, shard in self.weight_map.items() if shard not in chosen),
            is_part=True,
        )


def parse_index(raw: bytes, *, path: str, limits: Limits = _DEFAULT_LIMITS, suffix: str = FILE_SUFFIX) -> ShardIndex:
    """Parse an index and check the names of its shards.

    Args:
        raw: The file's bytes.
        path: File to name in errors.
        limits: `header_bytes` bounds the text, and with it the number of tensors.
        suffix: Required end of each shard's name.

    Raises:
        IndexFormatError: Not JSON, a repeated key, no map of strings to strings, too long, another suffix.
        UnsafePathError: A shard's name leads out of the directory of the index, on some system.
    """
    if len(raw) > limits.header_bytes:
        message = "the index is longer than the limit `header_bytes`" + advice_on_limit("header_bytes")
        raise IndexFormatError(message, path=path, expected=f"at most {limits.header_bytes} bytes", found=len(raw))
    scanner = Scanner(raw, path=path, base=0, error=IndexFormatError, what="index")
    metadata: dict[str, object] | None = None
    weight_map: dict[str, str] | None = None
    keys: set[str] = set()
    for start in scanner.members():
        if scanner.accept_key("weight_map"):
            key, weight_map = "weight_map", scanner.string_map()
        else:
            key, value = scanner.member()
            if key == "metadata":
                metadata = value
        if key in ("metadata", "weight_map") and key in keys:
            scanner.fail("a key occurs twice", at=start, found=key)
        keys.add(key)
    scanner.finish()
    if not isinstance(metadata, dict | None):
        scanner.fail("metadata must be an object", at=0, found=metadata)
    if weight_map is None:
        scanner.fail("there is no weight_map", at=0, expected="a map from tensor to shard", found="none")
    shards: dict[str, str] = {}
    weight_map = {name: shards.setdefault(shard, shard) for name, shard in weight_map.items()}
    for shard in shards:
        if suffix == FILE_SUFFIX and shard.endswith(PICKLE_SUFFIXES):
            message = f"this is an index of files of torch.save: {CONVERT}"
            raise IndexFormatError(message, path=path, expected=f"a name ending in {suffix}", found=shard)
        check_shard_name(shard, path=path, suffix=suffix)
    return ShardIndex(metadata or {}, weight_map, tuple(shards))


def check_shards(
    index: ShardIndex | None, headers: Sequence[Header], *, strict: bool, path: str
) -> tuple[list[Header], list[str]]:
    """Compare the headers of all shards with each other, and with the index.

    Where they disagree about a tensor, the index decides: without `strict`, and for a part of an index, which is made
    for the names that a caller has selected.

    Args:
        index: The parsed index; None: there is none.
        headers: The headers, in the order of the index's shards.
        strict: Whether a difference is an error.
        path: The index or the directory, to name in errors.

    Returns:
        The headers without the tensors that the index gives to other shards, and warnings, as sentences.

    Raises:
        IndexFormatError: A tensor is in another shard than the index has it, and not in that one; two shards hold a
            tensor that the index leaves out, or there is no index; with `strict`, a shard holds a tensor that the index
            leaves out, or a rank's part of one. If the index does not decide: no shard has a tensor of the index, or
            two have it.
    """
    warnings = _parts_of_tensors(headers, strict=strict, path=path)
    if index is None:
        if len(headers) > 1:
            why = "there is no index that decides; get the index, or load a shard by its path"
            _shard_of_each({header.shard: header.names for header in headers}, why, path=path)
        return list(headers), warnings
    rows_of = {shard: header.positions for shard, header in zip(index.shards, headers, strict=True)}
    decides = index.is_part or not strict
    missing = [name for name, shard in index.weight_map.items() if name not in rows_of[shard]]
    if missing:
        warnings.append(_missing(index, missing, rows_of, decides=decides, path=path))
    stale: dict[str, list[str]] = {}
    # So if the shards hold as many tensors as the index names for them, they hold nothing else and nothing twice, and
    # the search is not needed.
    if sum(map(len, rows_of.values())) != len(index.weight_map) - len(missing):
        if stale := _stale(index, rows_of):
            warnings.append(_conflict(index, stale, decides=decides, path=path))
        warnings += _unindexed(index, rows_of, strict=strict, path=path)
    total = sum(header.data_bytes for header in headers)
    claimed = index.metadata.get("total_size")
    if claimed is not None and claimed != total:
        claims = f"the index claims total_size {printable(claimed)}"
        warnings.append(f"{printable(path)}: {claims}, the shards hold {total} bytes")
    return [header.without(stale.get(shard, ())) for shard, header in zip(index.shards, headers, strict=True)], warnings


def require_one_set(headers: Sequence[Header], *, path: str) -> None:
    """Require that shards without an index are all of one save, where fastsafetensors has marked them.

    Raises:
        IndexFormatError: They are of several saves, or some are missing.
    """
    names = [header.metadata.get(_FAST_KEYS[0]) for header in headers]
    if names.count(None) == len(names):
        return
    marks = [tuple(map(header.metadata.get, _FAST_KEYS)) for header in headers]
    (first, _, count), numbers = marks[0], {number for _, number, _ in marks}
    if any((name, total) != (first, count) for name, _, total in marks):
        sets = " and ".join(dict.fromkeys(printable(name) for name, _, _ in marks))
        message = "the shards are of several saves, as fastsafetensors has marked them; keep those of one save"
        raise IndexFormatError(message, path=path, expected="one fst.shard.set", found=sets)
    if count != str(len(headers)) or numbers != set(map(str, range(len(headers)))):
        message = "shards are missing, as fastsafetensors has marked them; get the others, or load a shard by its path"
        raise IndexFormatError(message, path=path, expected=f"{printable(count)} shards", found=len(headers))


def _parts_of_tensors(headers: Sequence[Header], *, strict: bool, path: str) -> list[str]:
    """Return warnings of tensors that are, or may be, one rank's part of them; with `strict`, raise if they are.

    torch's HuggingFaceStorageWriter saves them so.
    """
    warnings = []
    for header in headers:
        if _DCP_PARTS not in header.metadata:
            continue
        try:
            parts = _decode_parts(header.metadata[_DCP_PARTS])
        except (msgspec.MsgspecError, RecursionError):
            continue
        begins = {name: part.get("saved_offsets") for name, part in parts.items()}
        cut = [name for name in header.names if isinstance(begin := begins.get(name), list) and any(begin)]
        if cut and strict:
            message = f"the file holds one rank's part of tensor {printable(cut[0])!r}; {WHOLE_BY_TORCH}"
            raise IndexFormatError(f"{message}; {_LENIENT} loads the parts", path=path, found=header.shard)
        if cut or (parts and FileName(header.shard.rpartition("/")[2]).rank is not None):
            maybe = "holds" if cut else "may hold"
            warnings.append(f"{printable(path)}: {printable(header.shard)} {maybe} one rank's part of its tensors")
    return warnings


def _shard_of_each(names_in: Mapping[str, Iterable[str]], why: str, *, path: str) -> dict[str, str]:
    """Return the shard of each name; raise if two have it."""
    shard_of: dict[str, str] = {}
    for shard, names in names_in.items():
        for name in names:
            if shard_of.setdefault(name, shard) != shard:
                message = f"two shards hold the tensor {printable(name)!r}, and {why}"
                raise IndexFormatError(message, path=path, expected="one", found=f"{shard_of[name]} and {shard}")
    return shard_of


def _missing(
    index: ShardIndex, missing: list[str], rows_of: Mapping[str, dict[str, int]], *, decides: bool, path: str
) -> str:
    """Return a warning about tensors that no shard has; raise if the index does not decide, or if another one has."""
    name, other = missing[0], None
    for shard, rows in rows_of.items() if not index.is_part else ():
        if found := next(filter(rows.__contains__, missing), None):
            name, other = found, shard
            break
    message = f"{_count(missing)} not in the shard that the index names for it"
    if other is None and decides:
        return f"{printable(path)}: {message}, and not loaded"
    advice = f"; {_LENIENT} loads the others" if other is None else "; index and shards are of different saves"
    raise IndexFormatError(
        message + advice,
        path=path,
        expected=f"{printable(name)} in {index.weight_map[name]}",
        found=None if other is None else f"it in {other}",
    )


def _stale(index: ShardIndex, rows_of: Mapping[str, dict[str, int]]) -> dict[str, list[str]]:
    """Return by shard the tensors that it holds, and that the index gives to another shard."""
    stale = {
        shard: [name for name in rows if index.weight_map.get(name, shard) != shard or name in index.names_elsewhere]
        for shard, rows in rows_of.items()
    }
    return {shard: names for shard, names in stale.items() if names}


def _conflict(index: ShardIndex, stale: Mapping[str, list[str]], *, decides: bool, path: str) -> str:
    """Return a warning about tensors that the index gives to another shard; raise if the index does not decide."""
    if decides:
        every = [name for names in stale.values() for name in names]
        return f"{printable(path)}: {_count(every)} in another shard than the index names, and not loaded from there"
    shard, (name, *_) = next(iter(stale.items()))
    raise IndexFormatError(
        f"two shards hold the tensor {printable(name)!r}; {_LENIENT} takes that of the shard which the index names",
        path=path,
        expected=f"it in {index.weight_map[name]} only",
        found=f"it in {shard} too",
    )


def _unindexed(index: ShardIndex, rows_of: Mapping[str, dict[str, int]], *, strict: bool, path: str) -> list[str]:
    """Return a warning about the tensors that are in the shards but not in the index; with `strict`, raise."""
    others = {
        shard: [name for name in rows if name not in index.weight_map and name not in index.names_elsewhere]
        for shard, rows in rows_of.items()
    }
    shard_of = _shard_of_each(others, "the index has it in neither", path=path)
    if not shard_of:
        return []
    message = f"{_count([*shard_of])} in a shard, but not in the index"
    if strict:
        raise IndexFormatError(f"{message}; {_LENIENT} loads it too", path=path, found=next(iter(shard_of.values())))
    return [f"{printable(path)}: {message}"]


def _count(names: list[str]) -> str:
    return f"tensor{'s' if len(names) > 1 else ''} {listed(map(repr, names))} {'are' if len(names) > 1 else 'is'}"
