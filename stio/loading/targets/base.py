"""What a load fills: memory of the caller, which is compared with the checkpoint before any tensor is read.

A `LoadTarget` has the memory that each tensor of the checkpoint is copied to, whole or in part. `ModuleTarget`
(`module.py`) gets it from a module, `StateTarget` (`nested.py`) from a nested state, `PartsTarget` from its caller. Of
one tensor several parts may be wanted. They are read together, as one part that contains them all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import torch

from stio import process
from stio.device import TORCH_DTYPES, LoadedGroup, Lost, TargetMemory, TorchAccelerator, TorchEvent, tensors_in
from stio.errors import MismatchError, listed, printable
from stio.loading.casts import require_as_stored
from stio.loading.options import DevicesLike, LoadOptions
from stio.loading.read_paths import elements_in
from stio.loading.targets.module_tree import (
    Span,
    is_on_meta,
    memory_key,
    overlapping,
    span_of,
    why_not_copied,
    why_refused,
)
from stio.runtime import WorkerPool
from stio.runtime.memory import num_processors
from stio.storage.checkpoint import Changes, OpenCheckpoint, apply_changes, read_update

_ONE_THREAD_BYTES = 1 << 20
"""Changed elements of fewer bytes are copied by the calling thread alone."""

Stored: TypeAlias = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor, as in the format."""

Box: TypeAlias = tuple[slice, ...]
"""A part of a tensor: a slice with a start, a stop and a step of 1 for each dimension."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Names that only the module or only the checkpoint has, and buffers that no checkpoint holds."""

    missing: tuple[str, ...]
    """Names that only the module has (a tied name is not missing if the tensor is loaded under another name)."""
    unexpected: tuple[str, ...]
    """Names that only the checkpoint has; their data was not read, unless a load hook may use it."""
    unfilled: tuple[str, ...] = field(default=(), compare=False)
    """Buffers with `persistent=False`, which no checkpoint holds; the load leaves them as they are. If the module's
    memory is new (`to_empty`), compute them anew."""
    path: str = field(default="", compare=False, repr=False)
    """The checkpoint, as errors name it; of a repository of the hub with its commit."""


@dataclass(frozen=True, slots=True)
class LocalPart:
    """Memory of this process that is a part of a tensor of the checkpoint."""

    local: torch.Tensor
    """The memory."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    index: Box
    """Which part it is."""


Casting = Literal["safe", "same_kind"]
"""Which dtypes may be copied into which, as in numpy: `"safe"`, if each value is held exactly."""


def checked_casting(casting: object) -> Casting:
    """Return the value of `casting=`.

    Raises:
        ValueError: It is none of these.
    """
    if casting not in ("safe", "same_kind"):
        raise ValueError(f"casting= takes 'safe' or 'same_kind', not {printable(repr(casting))}")
    return casting


PartOf: TypeAlias = Callable[[str, torch.Tensor], LocalPart | None]
"""Returns from its name and itself the part that a tensor of the target is; None: an ordinary tensor."""


class Place(NamedTuple):
    """Memory that gets a tensor of the checkpoint, or a part of it."""

    name: str
    """Its name in the target."""
    memory: torch.Tensor
    """The memory."""
    part: LocalPart | None = None
    """Which part of the tensor it gets; None: the whole."""
    box: Box | None = None
    """Which part of what is read it gets; None: all of it."""
    stored: str = ""
    """Dtype of the tensor in the checkpoint."""


class LoadTarget(ABC):
    """Memory that a load fills, by the name of the tensor that it gets."""

    _is_apart = False  # whether it is known that no memory of two tensors overlaps
    assigns = False
    """Whether the load replaces tensors and does not copy into them."""

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()  # the thread that copies may be another one
        self._path = ""
        self._memory = TargetMemory("")
        self._casting: Casting = "same_kind"
        self._places: dict[str, list[Place]] = {}  # by the name that has the data
        self.lost = Lost()
        """Values that copies into memory of another dtype have lost."""
        self.slices: dict[str, tuple[object, ...]] = {}
        """Which part of a tensor of the checkpoint to read, by its name there, after `select`."""

    @abstractmethod
    def select(self, opened: OpenCheckpoint, options: LoadOptions, check: Callable[[], None]) -> list[str]:
        """Compare the target with a checkpoint, before any tensor is read; return the names to read.

        Args:
            opened: The checkpoint.
            options: Options of the load.
            check: Called now and then; may raise to end the call.

        Raises:
            MismatchError: They differ, or memory cannot be filled.
        """

    def _begin(self, path: str) -> None:
        """Name the checkpoint, for messages."""
        self._path, self._memory = path, TargetMemory(path)

    def _fits(self, stored: str, dtype: torch.dtype) -> bool:
        """Return whether tensors of a dtype of the format may be copied into memory of this dtype."""
        own = TORCH_DTYPES.get(stored)
        return own is None or not (
            TORCH_DTYPES.loses_values(stored, dtype)
            or (self._casting == "safe" and not TORCH_DTYPES.holds_all(own, dtype))
        )

    def _require_memory(self, name: str, tensor: torch.Tensor, *, can_assign: bool = False) -> None:
        """Raise unless values can be copied into a tensor.

        Args:
            name: The tensor, for the error.
            tensor: The tensor.
            can_assign: Whether the load takes `assign=True`, which replaces tensors.

        Raises:
            MismatchError: They cannot.
        """
        why = why_refused(tensor)
        if not why and is_on_meta(tensor):
            why = "it is on 'meta' and has no memory to copy into; give it memory first"
        if why := why or why_not_copied(tensor, in_inference_mode=self._inference, can_assign=can_assign):
            raise MismatchError(f"{printable(name)} cannot be filled: {why}", path=self._path)
        self._memory.require(name, tensor)

    def _add(self, name: str, tensor: torch.Tensor, part: LocalPart | None, source: str, stored: Stored) -> None:
        """Fill memory from a tensor of the checkpoint.

        Args:
            name: Its name in the target.
            tensor: The memory, if it is no part.
            part: The part that is filled; None: the whole tensor.
            source: Name of the tensor.
            stored: Dtype and shape of the tensor.

        Raises:
            MismatchError: They do not fit, or the memory cannot be filled.
        """
        memory, whole = (tensor, tuple(tensor.shape)) if part is None else (part.local, part.shape)
        shown, (dtype, shape) = printable(name), stored
        self._require_memory(name, memory)
        if not TORCH_DTYPES.fits(dtype, shape, whole):
            message = f"{shown} has another shape in the checkpoint"
            raise MismatchError(message, path=self._path, expected=list(whole), found=list(shape))
        if not memory.is_quantized and not self._fits(dtype, memory.dtype):
            message = f"{shown} has another dtype in the checkpoint, and a copy may lose values"
            if self._casting == "safe" and not TORCH_DTYPES.loses_values(dtype, memory.dtype):
                message += "; make the state with the checkpoint's dtype, or allow that by casting='same_kind'"
            raise MismatchError(message, path=self._path, expected=str(memory.dtype), found=dtype)
        self._places.setdefault(source, []).append(Place(name, memory, part, stored=dtype))

    def _join_parts(self) -> None:
        """Determine which part of each tensor to read: one that contains all that are wanted of it."""
        for source, places in list(self._places.items()):
            if all(place.part is None for place in places):
                continue
            places = [place for place in places if place.part is None or place.memory.numel()]
            if parts := [place.part for place in places if place.part is not None]:
                index, boxes = joined([part.index for part in parts])
                whole = whole_of(parts[0].shape)
                if len(parts) < len(places) or index == whole:
                    boxes = [whole if place.part is None else place.part.index for place in places]
                else:
                    self.slices[source] = index
                if len(places) > 1:
                    places = [place._replace(box=box) for place, box in zip(places, boxes, strict=True)]
            self._places[source] = places
        self._places = {source: places for source, places in self._places.items() if places}

    @property
    def on_cpu(self) -> bool:
        """Whether all memory is on the CPU."""
        return all(device.type == "cpu" for device in self._devices())

    def _devices(self) -> set[torch.device]:
        return {place.memory.device for places in self._places.values() for place in places}

    @property
    def device(self) -> DevicesLike:
        """Where tensors are loaded to, by the name in the checkpoint: to the device of the memory, if it is on one.

        Otherwise to the CPU. A copy from a device to pinned memory could be under way when the load returns.
        """
        cpu, found = torch.device("cpu"), self._devices()
        if len(found) <= 1:
            return found.pop() if found else cpu
        devices: dict[str, torch.device] = {}
        for name, places in self._places.items():
            first, *others = {place.memory.device for place in places}
            devices[name] = cpu if others else first
        return devices

    def copied_names(self, *, by_engine: bool) -> AbstractSet[str]:
        """Return names of tensors whose bytes are copied as they are, into memory of the device they are loaded to.

        Empty if memory of several tensors on the CPU overlaps: the order of the copies decides then, so torch makes
        them. Called after `select`.

        Args:
            by_engine: The engine copies on the CPU. Otherwise torch does.
        """
        found = {name for name, places in self._places.items() if _takes_bytes(places, by_engine)}
        return found if self._is_apart or not self._overlaps(found) else frozenset()

    def _overlaps(self, names: AbstractSet[str]) -> bool:
        spans: list[Span] = []
        for name in names:  # one memory may be several places of a tensor, but not of two
            own = [(place.memory, span_of(place.memory)) for place in self._places[name] if place.memory.is_cpu]
            spans += {memory_key(memory, span): span for memory, span in own}.values()
        return overlapping(spans)

    @process.contextmanager
    def _writing(self) -> Iterator[None]:
        """Return a context in which tensors are written, in the mode of torch of the thread that called the load."""
        mode = torch.inference_mode() if self._inference else torch.no_grad()
        with process.collection_paused(len(self._places)), mode:
            yield

    def copy(self, group: LoadedGroup) -> None:
        """Copy a group's tensors into the memory, in the order of the calling thread's stream."""
        with self._writing():
            if group.image is not None:
                places = [
                    (place.name, name, place.memory)
                    for name in group.image.tensors
                    for place in self._places.get(name, ())
                ]
                self._memory.copy_image(group.image, places)
                return
            pairs = [(place, tensor) for name, tensor in group.take().items() for place in self._places.get(name, ())]
            self._memory.copy(
                [
                    (place.name, place.memory, tensor if place.box is None else tensor[place.box])
                    for place, tensor in pairs
                ],
                lost=self.lost,
            )

    def update_from(
        self,
        opened: OpenCheckpoint,
        held: str,
        options: LoadOptions,
        *,
        check: Callable[[], None],
        on_write: Callable[[], object],
    ) -> int | None:
        """Copy what was changed since a version that the memory holds; blocks. Called instead of `select` and `copy`.

        On a device it is copied in the order of the streams of the options, or else of the current one, and is there
        when this returns.

        Args:
            opened: The newer version, opened `with_manifest`.
            held: Id of the version that the memory holds.
            options: Options of a load. Deltas of more than `budget_bytes` are not read.
            check: Called between reads; may raise to end the call.
            on_write: Called before the first tensor is written.

        Returns:
            Bytes of the changed elements and tensors. None: the newer version must be loaded whole, into a new target;
            nothing was written.

        Raises:
            StioError: See `select` and `read_update`.
        """
        self.select(opened, options, check)
        update = None
        if self._takes_elements():
            update = read_update(opened, held, budget_bytes=options.budget, check=check)
        if update is None:
            return None
        regions, changes = update
        places = [place for name in (*regions, *changes) for place in self._places.get(name, ())]
        for place in places:
            self._memory.require(place.name, place.memory)
        stored = opened.dtypes_and_shapes()
        whole = {
            name: tensors_in(region, [name], [stored[name][0]], [stored[name][1]], [0])[name]
            for name, region in regions.items()
        }
        devices = {place.memory.device for place in places if not place.memory.is_cpu}
        streams = options.streams if isinstance(options.streams, Mapping) else {}
        on_write()
        with TorchAccelerator.on_streams({device: streams[device] for device in devices & streams.keys()}):
            self._copy_update(whole, changes)
            for device in devices:
                TorchEvent.now(device).synchronize()  # the copies read the update until then
        self.complete()
        self.lost.report(opened.path)
        new_elements = (one.values.nbytes for them in changes.values() for one in them)
        return sum(region.nbytes for region in regions.values()) + sum(new_elements)

    def _takes_elements(self) -> bool:
        """Return whether elements can be copied into the memory, and not only whole tensors; after `select`."""
        return all(
            place.part is None and place.box is None and TargetMemory.has_elements(place.memory)
            for places in self._places.values()
            for place in places
        )

    def _copy_update(self, whole: Mapping[str, torch.Tensor], changed: Mapping[str, Sequence[Changes]]) -> None:
        """Copy tensors, and changed elements of others, to their places."""
        pairs = [(place, changes) for name, changes in changed.items() for place in self._places.get(name, ())]
        on_host = [pair for pair in pairs if pair[0].memory.is_cpu and _takes_bytes([pair[0]], True)]
        done = {id(place) for place, _ in on_host}
        with self._writing():
            self._memory.copy(
                [
                    (place.name, place.memory, one)
                    for name, one in whole.items()
                    for place in self._places.get(name, ())
                ],
                lost=self.lost,
            )
            for place, _ in on_host:
                if not place.memory.is_inference():
                    torch.autograd.graph.increment_version(place.memory)
            apply_to_host((place.memory, changes) for place, changes in on_host)
            for place, changes in pairs:
                if id(place) not in done:
                    apply_by_torch(place.name, place.memory, place.stored, changes, self.lost)

    def complete(self) -> LoadReport:
        """Complete the load, on the consumer's thread."""
        self.discard()
        return LoadReport((), (), path=self._path)

    def discard(self) -> None:
        """Drop the memory: after a failure its traceback may hold this object for long."""
        self._places.clear()


def _takes_bytes(places: Sequence[Place], by_engine: bool) -> bool:
    """Return whether copies of a tensor into all of its places are copies of its bytes, on one device.

    Args:
        places: The places.
        by_engine: Whether the engine copies on the CPU.
    """
    for _, memory, _, box, stored in places:
        if (
            box is not None
            or memory.dtype != TORCH_DTYPES.get(stored)
            or (memory.is_cpu and not by_engine)
            or not TargetMemory.has_plain_bytes(memory)
        ):
            return False
    return len(places) == 1 or len({place.memory.device for place in places}) == 1


class PartsTarget(LoadTarget):
    """Parts of tensors of a checkpoint, in memory of the caller. All of them must be in the checkpoint.

    Args:
        parts: For each part, the name in the checkpoint and the memory. A name may occur several times.
        casting: See `Casting`.
    """

    def __init__(self, parts: Sequence[tuple[str, LocalPart]], casting: Casting = "same_kind") -> None:
        super().__init__()
        self._casting = casting
        self._parts = parts

    def select(self, opened: OpenCheckpoint, options: LoadOptions, check: Callable[[], None]) -> list[str]:
        """See `LoadTarget.select`."""
        self._begin(opened.path)
        stored, aliases = opened.dtypes_and_shapes(), opened.aliases
        if missing := [name for name, _ in self._parts if aliases.get(name, name) not in stored]:
            raise MismatchError(f"the checkpoint lacks tensors: {listed(missing)}", path=self._path)
        kinds = {name: dtype for name, (dtype, _) in stored.items()}
        require_as_stored(kinds, [(aliases.get(name, name), part.local) for name, part in self._parts], path=self._path)
        for name, part in self._parts:
            source, sizes = aliases.get(name, name), [one.stop - one.start for one in part.index]
            if list(part.local.shape) != sizes or any(
                one.stop > size for one, size in zip(part.index, part.shape, strict=True)
            ):
                message = f"the memory for a part of {printable(name)} has another shape"
                raise MismatchError(message, path=self._path, expected=sizes, found=list(part.local.shape))
            self._add(name, part.local, part, source, stored[source])
        self._join_parts()
        return list(self._places)

    def _fits(self, stored: str, dtype: torch.dtype) -> bool:
        """Return whether the dtypes are the same, or both are floating."""
        own = TORCH_DTYPES.get(stored)
        both_float = own is not None and own.is_floating_point and dtype.is_floating_point
        return own is None or own == dtype or (both_float and super()._fits(stored, dtype))

    def discard(self) -> None:
        """See `LoadTarget.discard`."""
        super().discard()
        self._parts = ()


def whole_of(shape: Sequence[int]) -> Box:
    """Return the index of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def joined(boxes: Sequence[Box]) -> tuple[tuple[object, ...], list[Box]]:
    """Return the index of a part that contains all boxes, and the place of each of them in that part.

    If boxes differ in one dimension only, and leave rows out, the index has a list of slices there.
    """
    dims = range(len(boxes[0]))
    index: list[object] = []
    places: list[list[slice]] = [[] for _ in boxes]
    differing = [dim for dim in dims if len({(box[dim].start, box[dim].stop) for box in boxes}) > 1]
    for dim in dims:
        intervals = sorted({(box[dim].start, box[dim].stop) for box in boxes})
        first, last = intervals[0][0], max(stop for _, stop in intervals)
        if differing == [dim] and sum(stop - start for start, stop in intervals) < last - first:
            begins, length = {}, 0
            for interval in intervals:
                begins[interval] = length
                length += interval[1] - interval[0]
            index.append([slice(*interval) for interval in intervals])
        else:
            begins = {interval: interval[0] - first for interval in intervals}
            index.append(slice(first, last))
        for box, place in zip(boxes, places, strict=True):
            begin = begins[box[dim].start, box[dim].stop]
            place.append(slice(begin, begin + box[dim].stop - box[dim].start))
    return tuple(index), [tuple(place) for place in places]


def apply_to_host(jobs: Iterable[tuple[torch.Tensor, Sequence[Changes]]]) -> None:
    """Copy changed elements, which were checked, into contiguous tensors on the CPU, on a few threads."""
    left = [(tensor.data_ptr(), tensor.nbytes, changes) for tensor, changes in jobs]
    left.sort(key=lambda job: sum(one.nbytes for one in job[2]))  # the last is taken first
    workers = WorkerPool("apply")

    def work() -> None:
        for address, nbytes, changes in workers.items(left):
            num_elements = nbytes // changes[0].item_bytes
            apply_changes(changes, num_elements, [(0, num_elements, address)])

    nbytes = sum(one.nbytes for _, _, changes in left for one in changes)
    workers.run(work, 1 if nbytes < _ONE_THREAD_BYTES else min(len(left), num_processors()))


def apply_by_torch(name: str, tensor: torch.Tensor, dtype: str, changes: Sequence[Changes], lost: Lost) -> None:
    """Copy changed elements into a tensor of any layout and dtype; on a device, on the current stream.

    Args:
        name: Its name, to count the values that a cast loses.
        tensor: The tensor.
        dtype: Dtype of the elements, as in the format.
        changes: The elements, which were checked; the oldest first.
        lost: Where these values are counted.
    """
    for one in changes:
        codes, values = elements_in(one, dtype)
        if values.dtype != tensor.dtype:
            values = lost.cast(name, values.to(tensor.device), tensor.dtype)
        TargetMemory.copy_elements(tensor, codes, values)
