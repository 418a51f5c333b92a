"""Tensors to be saved, described without torch (`TensorSource`), and those among them that share memory.

Memory is described by spans of a storage. Here is decided which tensors overlap and what a save does with them.
`overlap_groups` is the only sweep over such spans; the drop-ins use it too. `parse_aliases` reads the ties of a file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stio.errors import FormatError, SharedTensorsError, listed
from stio.format.gil_slices import sort_in_slices
from stio.format.json_scanner import Scanner
from stio.limits import limit_error

ALIASES_KEY = "stio.aliases"
"""Metadata key of stio: a JSON object of names that share another tensor's data."""

_MADE_ANEW = frozenset({ALIASES_KEY, "stio.delta", "stio.id", "total_size", "total_parameters"})
"""Metadata keys whose values describe the tensors of one checkpoint; the last two are the hub's. Each save makes its
own, so metadata of a checkpoint can be passed to the next save as they are."""
_LAYOUTS_OF_OTHERS = ("DCP_SHARDING_INFO", "fst.shard.")
"""Begin of the keys that describe how the files of one save belong together: of torch's DCP, and of fastsafetensors."""


def may_be_copied(key: str) -> bool:
    """Return whether an entry of metadata says something of the tensors that is true in other files too."""
    return key not in _MADE_ANEW and not key.startswith(_LAYOUTS_OF_OTHERS)


SharedPolicy = Literal["dedupe", "clone", "error"]
"""What to do with tensors that share memory: save each once, save each by itself, or refuse."""

_NUM_SHOWN_GROUPS = 3


@dataclass(slots=True)  # not frozen: making 60,000 takes 25 ms instead of 80
class TensorSource:
    """A tensor to be saved, described for packages without torch. It is not changed once it is made."""

    name: str
    """Name in the checkpoint."""
    dtype: str
    """Dtype as the format spells it."""
    shape: tuple[int, ...]
    """Dimensions as in the header: for F4 the last one counts elements, not pairs."""
    nbytes: int
    """Bytes of its data in the file."""
    storage_key: Hashable | None
    """Equal exactly for tensors on one storage; None if the tensor cannot share memory with another."""
    span: tuple[int, int]
    """Range of bytes that the tensor uses in that storage, half-open."""
    layout: Hashable
    """What else must be equal, besides the span, if two names are one tensor: strides, pending conjugation."""
    data: Any
    """The tensor, from which the device package copies the bytes."""


@dataclass(frozen=True, slots=True)
class TiedNames:
    """What a module declares about names of one tensor, for readers that do not read stio's metadata."""

    sources: Mapping[str, str | None] = field(default_factory=dict)
    """Names that such readers restore from another name, each with that name; None: from any name of the tensor."""
    required: Collection[str] = frozenset()
    """Names that they restore from a file only, as far as `sources` does not say otherwise."""

    def dropped(self, names: Sequence[str]) -> tuple[str, list[str]]:
        """Return which of several names of one tensor is saved in any case, and which others are not saved.

        Args:
            names: In the caller's order.
        """
        restored = {name for name in names if name in self.sources and self.sources[name] in (None, *names)}
        saved = next((name for name in names if name not in restored), names[0])
        return saved, [name for name in names if name != saved and (name in restored or name not in self.required)]


def resolve_shared(
    sources: Sequence[TensorSource], policy: SharedPolicy, tied: TiedNames | None = None
) -> tuple[list[TensorSource], dict[str, str]]:
    """Decide what to do with tensors that share memory.

    With `dedupe`, a tensor with several names (equal memory, dtype, shape and layout) is saved once: under the first
    name that its module does not derive from another one, otherwise under the first name. A name that the module's own
    readers would miss is saved too, with bytes of its own. Tensors that only overlap, such as a view and its base, are
    each saved with bytes of their own: the tie is lost, but no data, and loading does not depend on the model. The
    hub's saver differs: it drops every name but one that covers the whole storage, also if the dropped tensor is
    smaller or has another shape.

    Memory is compared by spans: two strided tensors that interleave without a common element count as overlapping.

    Args:
        sources: The tensors.
        policy: `dedupe`; `clone` saves every name with bytes of its own; `error` refuses tensors that overlap.
        tied: What the module of the tensors declares, if they have one.

    Returns:
        The tensors to save, in the order given; and for each dropped name the name that is saved instead.

    Raises:
        SharedTensorsError: With `error`; it names the groups that overlap.
    """
    if policy == "clone":
        return list(sources), {}
    stored = [source for source in sources if source.storage_key is not None and source.nbytes]
    if len({source.storage_key for source in stored}) == len(stored):  # nearly always
        return list(sources), {}
    by_storage: defaultdict[Hashable, list[TensorSource]] = defaultdict(list)
    for source in stored:
        by_storage[source.storage_key].append(source)
    if policy == "error":
        _refuse_overlaps(by_storage.values())
        return list(sources), {}
    aliases = dict(
        pair for group in by_storage.values() if len(group) > 1 for pair in _aliases_among(group, tied or TiedNames())
    )
    return [source for source in sources if source.name not in aliases] if aliases else list(sources), aliases


def _aliases_among(group: Sequence[TensorSource], tied: TiedNames) -> Iterator[tuple[str, str]]:
    """Yield, for tensors on one storage, each name to drop and the name that is saved instead."""
    same: defaultdict[Hashable, list[str]] = defaultdict(list)
    for source in group:
        same[source.span, source.dtype, source.shape, source.layout].append(source.name)
    for names in same.values():
        saved, dropped = tied.dropped(names)
        for name in dropped:
            yield name, saved


def _refuse_overlaps(storages: Iterable[Sequence[TensorSource]]) -> None:
    groups = [
        names
        for storage in storages
        if len(storage) > 1
        for names in overlap_groups((*source.span, source.name) for source in storage)
        if len(names) > 1
    ]
    if not groups:
        return
    shown = "; ".join(listed(map(repr, names)) for names in groups[:_NUM_SHOWN_GROUPS])
    more = f"; and {len(groups) - _NUM_SHOWN_GROUPS} more groups" if len(groups) > _NUM_SHOWN_GROUPS else ""
    raise SharedTensorsError(
        f"tensors share memory: {shown}{more}. Save them with shared='dedupe' (equal ones once, and tied again when "
        "they are loaded) or shared='clone' (each with bytes of its own)"
    )


def overlap_groups(spans: Iterable[tuple[int, int, str]]) -> Iterator[list[str]]:
    """Yield groups of names with overlapping spans, directly or through others; a name without overlap is a group too.

    Args:
        spans: Begin, end (half-open) and name of each, all in one storage or address space.
    """
    names: list[str] = []
    reach = -1
    for begin, end, name in sort_in_slices(list(spans)):
        if begin >= reach and names:
            yield names
            names = []
        names.append(name)
        reach = max(reach, end)  # not the end of the last one: a short span may be inside a long one
    if names:
        yield names


def parse_aliases(text: str, *, path: str, max_aliases: int) -> dict[str, str]:
    """Parse the text that records aliases, which is as untrusted as the file.

    Args:
        text: Value of `ALIASES_KEY` in the metadata.
        path: File to name in errors.
        max_aliases: Most aliases.

    Raises:
        FormatError: It is no JSON object of texts, or has a key twice.
        LimitError: There are too many.
    """
    scanner = Scanner(text.encode(errors="surrogatepass"), path=path, base=0, error=FormatError, what=ALIASES_KEY)
    try:
        aliases = scanner.string_map()
        scanner.finish()
    except FormatError as error:  # its offset is one in the text, and none in the file
        raise FormatError(error.message, path=path, expected=error.expected, found=error.found) from None
    if len(aliases) > max_aliases:
        what = f"{ALIASES_KEY}: more names than"
        raise limit_error(what, "max_tensors", max_aliases, path=path, found=f"{len(aliases):,}")
    return aliases
