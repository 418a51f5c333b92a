"""What a save does with tensors that share memory: each once, each by itself, or refused; and how ties are recorded.

Memory is known by spans of a storage (`TensorSource`), which whoever knows torch has found out.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Literal

from stio.errors import SharedTensorsError, printable
from stio.format.gil_slices import row_pieces, sort_in_turns
from stio.format.sharding import TensorSource

__all__ = ["ALIASES_KEY", "SharedPolicy", "aliases_json", "resolve_shared"]

ALIASES_KEY = "stio.aliases"
"""Metadata key of stio's own: JSON object of names that share another tensor's data."""

SharedPolicy = Literal["dedupe", "clone", "error"]
"""What to do with tensors that share memory: save each once, save each by itself, or refuse."""

_SHOWN_GROUPS = 3
_SHOWN_NAMES = 5


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
