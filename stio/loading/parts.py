"""Memory of the caller as the target of a load: each piece of it is a part of a tensor of the checkpoint.

Names, shapes and dtypes are compared before any tensor is read. Of one tensor several parts may be wanted. They are
read together, as one part that contains them all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import torch

from stio.device.base import LoadedGroup
from stio.device.tensor_memory import TargetMemory, copy_all
from stio.device.tensors import TORCH_DTYPES, torch_shape
from stio.errors import MismatchError, listed, printable
from stio.loading.module import LoadReport, Part, Stored
from stio.loading.module_tree import is_on_meta, why_not_copied, why_refused

Box: TypeAlias = tuple[slice, ...]
"""A part of a tensor: a slice with a start, a stop and a step of 1 for each dimension."""


class PartsTarget:
    """Parts of tensors of a checkpoint as the target of a load.

    Args:
        parts: For each part, the name in the checkpoint and the memory. A name may occur several times.
    """

    def __init__(self, parts: Sequence[tuple[str, Part]]) -> None:
        self._parts = parts
        self._copies: dict[str, list[tuple[Part, Box]]] = {}  # with the place in what is read, by the name that is read
        self._path = ""
        self._inference = torch.is_inference_mode_enabled()  # the thread that copies may be another one
        self.slices: dict[str, object] = {}
        """Which part of a tensor to read, by its name, after `match`."""
        self.kept_names: Collection[str] = ()
        """Names of tensors that are kept until the end of the load: none."""

    @property
    def on_cpu(self) -> bool:
        """Whether all memory is on the CPU."""
        return all(part.local.device.type == "cpu" for _, part in self._parts)

    @property
    def device(self) -> str:
        """Device to load to: that of the memory, if all is on one device; otherwise the CPU."""
        devices = {part.local.device for _, part in self._parts}
        return str(devices.pop()) if len(devices) == 1 else "cpu"

    def match(
        self,
        stored: Mapping[str, Stored],
        aliases: Mapping[str, str],
        *,
        strict: bool,
        path: str,
        is_state: bool = False,
    ) -> tuple[list[str], LoadReport]:
        """Compare memory and checkpoint, before any tensor is read.

        Args:
            stored: Tensors of the checkpoint, by name.
            aliases: Tied names of the checkpoint.
            strict: Not used: names that only the checkpoint has are never an error, missing ones always are.
            path: For messages.
            is_state: Not used: the names are those of the state.

        Returns:
            The names to read, and the report of a complete load.

        Raises:
            MismatchError: The checkpoint lacks a name, shape or kind of dtype differs, or memory cannot be filled.
        """
        if missing := [name for name, _ in self._parts if aliases.get(name, name) not in stored]:
            raise MismatchError(f"the checkpoint lacks tensors: {listed(missing)}", path=path)
        self._path, memory = path, TargetMemory(path)
        wanted: dict[str, list[Part]] = {}
        for name, part in self._parts:
            source = aliases.get(name, name)
            _require_fits(name, part, *stored[source], inference=self._inference, path=path)
            memory.require(name, part.local)
            if part.local.numel():
                wanted.setdefault(source, []).append(part)
        for source, parts in wanted.items():
            index, boxes = joined([part.index for part in parts])
            self._copies[source] = list(zip(parts, boxes, strict=True))
            if index != tuple(slice(0, size) for size in parts[0].shape):
                self.slices[source] = index
        return list(wanted), LoadReport((), (), path=path)

    def copy(self, group: LoadedGroup) -> None:
        """Copy a group's tensors into the memory, in the order of the calling thread's stream."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        names: list[str] = []
        for name, tensor in group.take().items():
            for part, box in self._copies[name]:
                names.append(name)
                targets.append(part.local)
                sources.append(tensor if tensor.shape == part.local.shape else tensor[box])
        with torch.inference_mode() if self._inference else torch.no_grad():
            copy_all(targets, sources, names, path=self._path)

    def complete(self) -> LoadReport:
        """Complete the load."""
        return LoadReport((), ())

    def discard(self) -> None:
        """Drop the memory: after a failure its traceback may hold this object for long."""
        self._copies.clear()
        self._parts = ()


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


def _require_fits(name: str, part: Part, dtype: str, shape: tuple[int, ...], *, inference: bool, path: str) -> None:
    """Raise `MismatchError` unless a part of a tensor of the checkpoint can be copied into this memory."""
    shape, local, sizes = torch_shape(dtype, shape), part.local, [one.stop - one.start for one in part.index]
    if shape != part.shape or any(one.stop > size for one, size in zip(part.index, shape, strict=True)):
        message = f"{printable(name)} has another shape in the checkpoint"
        raise MismatchError(message, path=path, expected=list(part.shape), found=list(shape))
    if list(local.shape) != sizes:
        message = f"the memory for a part of {printable(name)} has another shape"
        raise MismatchError(message, path=path, expected=sizes, found=list(local.shape))
    own = TORCH_DTYPES.get(dtype)
    if own is not None and own != local.dtype and not (own.is_floating_point and local.dtype.is_floating_point):
        message = f"{printable(name)} has another dtype in the checkpoint; only floating dtypes are cast"
        raise MismatchError(message, path=path, expected=str(local.dtype), found=str(own))
    why = "it is on 'meta'" if is_on_meta(local) else why_refused(local)
    if why := why or why_not_copied(local, in_inference_mode=inference, can_assign=False):
        raise MismatchError(f"{printable(name)} cannot be filled: {why}", path=path)
