"""Which tensors a save keeps, how they are split into shards, what the files are called, and the index over them.

The splitter, the names and the index are the hub's to the byte, so that whoever reads its checkpoints reads these.
Tensors come in as values (`TensorSource`): what shares memory with what was found out by whoever knows torch.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring, encode_basestring_ascii
from string import Formatter
from typing import Any, Literal

from stio.codec._turns import row_pieces, sort_in_turns
from stio.codec.index import check_shard_name
from stio.errors import SharedTensorsError, printable

__all__ = [
    "ALIASES_KEY",
    "MANIFEST_SUFFIX",
    "SharedPolicy",
    "TensorSource",
    "aliases_json",
    "build_index",
    "check_pattern",
    "index_name",
    "is_checkpoint_file",
    "manifest_name",
    "parse_size",
    "resolve_shared",
    "shard_name",
    "split_into_shards",
]

ALIASES_KEY = "stio.aliases"
"""Metadata key of stio's own: JSON object of names that share another tensor's data."""

MANIFEST_SUFFIX = ".manifest.json"
"""Follows the name of the single file, or of the index without its own `.index.json`."""

SharedPolicy = Literal["dedupe", "clone", "error"]
"""What to do with tensors that share memory: save each once, save each by itself, or refuse."""

_FILE_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".index.json"
_TOTAL_SIZE = "total_size"

_UNITS = {
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}

# Hexadecimal, and of this length: `model-finetuned-00001-of-00002` is somebody else's.
_SAVE_ID = "[0-9a-f]{8,32}"
_SHOWN_GROUPS = 3
_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """A tensor to be saved, as the rooms that know no torch see it."""

    name: str
    """Name in the checkpoint."""
    dtype: str
    """Dtype as the format spells it."""
    shape: tuple[int, ...]
    """Dimensions as in the header: for F4 the last one counts elements, not pairs."""
    nbytes: int
    """Bytes of its data in the file."""
    storage_key: Hashable | None
    """Equal exactly for tensors on one storage; None if it can share memory with no other."""
    span: tuple[int, int]
    """Bytes of that storage from the first to the last one it touches, half-open."""
    layout: Hashable
    """What besides the span must be equal for two names to be one tensor: strides, pending conjugation."""
    data: Any
    """What the device room copies the bytes from."""


def resolve_shared(sources: Sequence[TensorSource], policy: SharedPolicy) -> tuple[list[TensorSource], dict[str, str]]:
    """Decide what to do with tensors that share memory.

    With `dedupe`, names of one and the same tensor (equal memory, dtype, shape and layout) are saved once, under the
    name that sorts first. Tensors that only overlap, a view and its base or two windows, are each saved with bytes of
    their own. The hub's saver drops every name but one that covers the whole storage, also where the dropped tensor
    is smaller or shaped otherwise, so that it must be put together again by whoever knows the model; here the tie is
    lost in such a case, never data, and loading needs to know nothing.

    Memory is compared by spans: two combs that interleave without a common element count as overlapping.

    Args:
        sources: The tensors.
        policy: `dedupe`; `clone` saves every name with bytes of its own; `error` refuses tensors that overlap.

    Returns:
        The tensors to save, in the order given, and for each name that was dropped the one that stands for it.

    Raises:
        SharedTensorsError: With `error`; it names the groups that overlap.
        ValueError: There is no such policy.
    """
    if policy not in ("dedupe", "clone", "error"):
        raise ValueError(f"shared must be 'dedupe', 'clone' or 'error', not {printable(policy)!r}")
    if policy == "clone":
        return list(sources), {}
    together: defaultdict[Hashable, list[TensorSource]] = defaultdict(list)
    for source in sources:
        if source.storage_key is not None and source.nbytes:
            together[source.storage_key].append(source)
    if policy == "error":
        _refuse_overlaps(together.values())
        return list(sources), {}
    aliases = {alias: kept for group in together.values() if len(group) > 1 for alias, kept in _aliases_among(group)}
    return [source for source in sources if source.name not in aliases] if aliases else list(sources), aliases


def _aliases_among(group: Sequence[TensorSource]) -> Iterator[tuple[str, str]]:
    """Yield the names, of tensors on one storage, that are another's, and whose."""
    kept: dict[Hashable, str] = {}
    for source in sort_in_turns(group, key=operator.attrgetter("name")):
        same = (source.span, source.dtype, source.shape, source.layout)
        first = kept.setdefault(same, source.name)
        if first != source.name:
            yield source.name, first


def _refuse_overlaps(storages: Iterable[Sequence[TensorSource]]) -> None:
    groups = [names for group in storages if len(group) > 1 for names in _overlapping(group)]
    if not groups:
        return
    shown = "; ".join(_listed(names) for names in groups[:_SHOWN_GROUPS])
    more = f"; and {len(groups) - _SHOWN_GROUPS} more groups" if len(groups) > _SHOWN_GROUPS else ""
    raise SharedTensorsError(
        f"tensors share memory: {shown}{more}. Save them with shared='dedupe' (equal ones once, and tied again when "
        "they are loaded) or shared='clone' (each with bytes of its own)"
    )


def _overlapping(group: Sequence[TensorSource]) -> Iterator[list[str]]:
    """Yield the names of each set of tensors, on one storage, that hangs together by overlaps."""
    names: list[str] = []
    reach = -1
    for source in sort_in_turns(group, key=operator.attrgetter("span", "name")):
        begin, end = source.span
        if begin >= reach:
            if len(names) > 1:
                yield names
            names = []
        names.append(source.name)
        reach = max(reach, end)  # not the last one's end: a short tensor may lie inside a long one
    if len(names) > 1:
        yield names


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(printable(name)) for name in names[:_SHOWN_NAMES])
    return f"{shown} and {len(names) - _SHOWN_NAMES} others" if len(names) > _SHOWN_NAMES else shown


def aliases_json(aliases: Mapping[str, str]) -> str:
    """Return the text that records aliases in metadata: compact JSON, sorted."""
    pairs = sort_in_turns(list(aliases.items()), key=operator.itemgetter(0))
    texts = [
        ",".join(f"{encode_basestring(alias)}:{encode_basestring(kept)}" for alias, kept in pairs[piece])
        for piece in row_pieces(len(pairs))
    ]
    return f"{{{','.join(texts)}}}"


def parse_size(size: int | str) -> int:
    """Return a size in bytes.

    Args:
        size: A number of bytes, or text: digits alone, or a number and a unit, in any case. TB, GB, MB and KB are
            powers of ten, as on the hub; TiB, GiB, MiB and KiB powers of two.

    Raises:
        TypeError: Neither an integer nor text.
        ValueError: No such unit, no number, or not a positive, finite size.
    """
    if isinstance(size, bool):
        raise TypeError("a size is a number of bytes or text such as '5GB', not a bool")
    if isinstance(size, str):
        number, unit = _split_size(size)
        try:
            nbytes = int(float(number) * _UNITS[unit]) if unit else int(number)
        except (ValueError, OverflowError):  # OverflowError: infinite
            raise ValueError(
                f"{printable(size)!r} is no size; give a number of bytes, or a number and KB, MB, GB, TB, KiB, MiB, "
                "GiB or TiB"
            ) from None
    else:
        nbytes = operator.index(size)
    if nbytes <= 0:
        raise ValueError(f"a size must be one byte or more, not {printable(size)!r}")
    return nbytes


def _split_size(text: str) -> tuple[str, str]:
    lowered = text.strip().lower()
    unit = next((unit for unit in _UNITS if lowered.endswith(unit)), "")
    return lowered.removesuffix(unit), unit


def split_into_shards(sizes: Iterable[tuple[str, int, Hashable | None]], max_shard_bytes: int) -> list[list[str]]:
    """Split tensors into shards by the hub's greedy rule.

    In the order given, a tensor that would make the open shard larger than the maximum starts a new one. One that is
    larger than the maximum by itself becomes a shard of its own at once, before the one that is open.

    Args:
        sizes: Name, bytes and storage of each. Later tensors of one storage join the shard of its first one, and
            are not counted; None is a storage of its own.
        max_shard_bytes: Largest shard, headers not counted.

    Returns:
        The names in each shard; no shard where there is no tensor.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    shard_of: dict[Hashable, list[str]] = {}
    later: list[tuple[Hashable, str]] = []
    for name, nbytes, storage in sizes:
        if storage is not None and storage in shard_of:
            later.append((storage, name))
            continue
        if nbytes > max_shard_bytes:
            shard = [name]
            shards.append(shard)
        else:
            if current_bytes + nbytes > max_shard_bytes:
                shards.append(current)
                current, current_bytes = [], 0
            current.append(name)
            current_bytes += nbytes
            shard = current
        if storage is not None:
            shard_of[storage] = shard
    if current:
        shards.append(current)
    followers: dict[Hashable, list[str]] = {storage: [] for storage in shard_of}
    for storage, name in later:
        followers[storage].append(name)
    for storage, names in followers.items():  # storage by storage, as the hub does: the index keeps this order
        shard_of[storage].extend(names)
    return shards


def check_pattern(pattern: str) -> None:
    """Require that a pattern gives each shard a name of its own, in the checkpoint's directory, on every system.

    Args:
        pattern: Such as `model{suffix}.safetensors`.

    Raises:
        TypeError: Not text.
        ValueError: `{suffix}` is not in it exactly once, something else in braces is, it does not end in
            `.safetensors`, leads into another directory, or gives a name that some system reads otherwise.
    """
    before, after = _around_suffix(pattern)
    if not after.endswith(_FILE_SUFFIX):
        raise ValueError(f"the filename pattern must end in '{{suffix}}...{_FILE_SUFFIX}', not {printable(pattern)!r}")
    if any(character in pattern for character in "/\\\0"):
        raise ValueError(f"the filename pattern {printable(pattern)!r} must name files, without a directory or NUL")
    try:
        name = f"{before}{after}"
        name.encode()
        check_shard_name(name, path="filename_pattern")
    except ValueError as error:
        reason = getattr(error, "message", "it is no valid text")
        raise ValueError(f"the filename pattern {printable(pattern)!r} gives an unsafe name: {reason}") from None


def _around_suffix(pattern: str) -> tuple[str, str]:
    """Return the text before and after `{suffix}`."""
    if not isinstance(pattern, str):
        raise TypeError(f"a filename pattern is text, not {type(pattern).__name__}")
    wrong = f"the filename pattern must hold {{suffix}} once, and nothing else in braces, not {printable(pattern)!r}"
    before, after, found = "", "", 0
    try:
        for text, field, spec, conversion in Formatter().parse(pattern):
            before, after = (before, after + text) if found else (before + text, after)
            if field is not None:
                found += 1
                if field != "suffix" or spec or conversion:
                    raise ValueError(wrong)
    except ValueError:  # also an open brace
        raise ValueError(wrong) from None
    if found != 1:
        raise ValueError(f"{wrong}: the shards would overwrite each other" if not found else wrong)
    return before, after


def shard_name(pattern: str, k: int, n: int, *, save_id: str | None = None) -> str:
    """Return the name of a shard.

    Args:
        pattern: Such as `model{suffix}.safetensors`.
        k: Which shard, from 0. The name counts from 1.
        n: How many there are.
        save_id: Sets the shards of one save apart from those that stand beside them: 8 to 32 lower-case hexadecimal
            digits.

    Raises:
        ValueError: There is no such shard, or the save id is none.
    """
    if not 0 <= k < n:
        raise ValueError(f"there is no shard {k} of {n}; they count from 0")
    if save_id is not None and not re.fullmatch(_SAVE_ID, save_id):
        raise ValueError(f"a save id is 8 to 32 lower-case hexadecimal digits, not {printable(save_id)!r}")
    before, after = _around_suffix(pattern)
    if n == 1 and save_id is None:
        return before + after
    mark = "" if save_id is None else f"-{save_id}"
    return f"{before}{mark}-{k + 1:05d}-of-{n:05d}{after}"


def index_name(pattern: str) -> str:
    """Return the name of the index over the shards of a pattern."""
    return "".join(_around_suffix(pattern)) + _INDEX_SUFFIX


def manifest_name(pattern: str) -> str:
    """Return the name of the manifest of the files of a pattern."""
    return "".join(_around_suffix(pattern)) + MANIFEST_SUFFIX


def is_checkpoint_file(name: str, pattern: str) -> bool:
    """Return whether a file of this name belongs to a checkpoint that was saved with this pattern.

    The hub's rule for what an older checkpoint left (single file, shards, index), and stio's names with a save id.
    """
    before, after = map(re.escape, _around_suffix(pattern))
    rule = rf"{before}(?:(?:-{_SAVE_ID})?-[0-9]{{5,}}-of-[0-9]{{5,}})?{after}(?:{re.escape(_INDEX_SUFFIX)})?"
    return re.fullmatch(rule, name) is not None


def build_index(weight_map: Mapping[str, str], total_bytes: int, metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of an index, as `json.dump(indent=2)` of the hub's document would write them.

    Composed line by line, so that 100,000 tensors do not hold the interpreter's lock in one call.

    Args:
        weight_map: Shard of each tensor, in the order to be written.
        total_bytes: Bytes of all tensors, each storage counted once.
        metadata: Text to store beside `total_size`; sorted, so that equal checkpoints are equal files.

    Raises:
        TypeError: A name, shard, metadata key or value is no text.
        ValueError: The metadata hold `total_size`, or a text holds half of a surrogate pair.
    """
    entries = {_TOTAL_SIZE: str(operator.index(total_bytes))}
    if _TOTAL_SIZE in metadata:
        raise ValueError(f"the index counts {_TOTAL_SIZE!r} itself; leave it out of the metadata")
    texts = list(metadata.items())
    _require_text(texts, "metadata")
    entries |= {key: encode_basestring_ascii(value) for key, value in sorted(texts)}
    shards = {shard: encode_basestring_ascii(shard) for shard in dict.fromkeys(weight_map.values())}
    rows = list(weight_map.items())
    parts = []
    for piece in row_pieces(len(rows)):
        part = rows[piece]
        _require_text(part, "weight_map")
        lines = [f"    {encode_basestring_ascii(name)}: {shards[shard]}" for name, shard in part]
        parts.append(",\n".join(lines).encode())
    described = ",\n".join(f"    {encode_basestring_ascii(key)}: {value}" for key, value in entries.items())
    mapped = b"{\n" + b",\n".join(parts) + b"\n  }" if parts else b"{}"
    return b'{\n  "metadata": {\n' + described.encode() + b'\n  },\n  "weight_map": ' + mapped + b"\n}"


def _require_text(pairs: Sequence[tuple[object, object]], what: str) -> None:
    for key, value in pairs:
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"{what} must map strings to strings, not {printable(key)} to {printable(value)}")
    try:
        "".join(f"{key}{value}" for key, value in pairs).encode()
    except UnicodeEncodeError:
        raise ValueError(f"a text in {what} holds half of a surrogate pair, which no reader takes") from None
