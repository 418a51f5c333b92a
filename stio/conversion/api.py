"""Conversion: checkpoints of other kinds and cuts become safetensors, in one window of memory.

A source (`origins.py`) is opened and described first; nothing is read for that but headers. The save is the usual one,
so what stands at the destination is replaced in one step, or not at all. Tensors of a safetensors source are read in
the order in which the save writes them, ahead of it by one window (`window.py`); those of a pickle are mapped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypedDict, Unpack

import torch

from stio.conversion.sources import Origin, open_origin
from stio.device.tensors import TORCH_DTYPES
from stio.errors import ClosedError, printable
from stio.format.sharding import TensorSource
from stio.runtime.hashing import HashName
from stio.runtime.limits import DEFAULT_BUDGET_BYTES
from stio.runtime.operation import Operation
from stio.runtime.progress import Progress
from stio.runtime.trace import shown
from stio.saving.options import SaveOptions, SaveResult
from stio.saving.pending import PendingSave
from stio.saving.plan import WritePlan, plan_writes
from stio.saving.staging_pool import StagingPool

__all__ = ["ConvertKeywords", "PathLike", "convert", "start_conversion"]

PathLike = str | os.PathLike[str]

_SUFFIX = ".safetensors"

_CASTS = {dtype for name, dtype in TORCH_DTYPES.items() if name != "F4"}
"""What torch casts to; of packed pairs it knows no numbers."""


class ConvertKeywords(TypedDict, total=False):
    """Keywords of `convert`; their meaning and defaults stand in `ConvertSettings`."""

    max_shard_size: int | str | None
    dtype: torch.dtype | str | None
    metadata: Mapping[str, str] | None
    progress: Progress
    budget_bytes: int | None
    durability: Literal["full", "none"]
    hash: HashName | None
    key: str | None
    trust_pickle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSettings:
    """The keywords of `convert`, as they came."""

    max_shard_size: int | str | None = None
    """Most bytes of tensors in one file of a directory, `"5GB"` unless said otherwise; a file destination has none."""
    dtype: torch.dtype | str | None = None
    """Cast floating tensors to it; torch's or the format's name of it will do."""
    metadata: Mapping[str, str] | None = None
    """Text to store, beside and before what the source holds."""
    progress: Progress = None
    """Callable, bar or nothing."""
    budget_bytes: int | None = None
    """Most bytes of memory, 512 MiB by default: half of it stages what is written, a quarter is read ahead. A single
    row that is larger than an eighth comes on top."""
    durability: Literal["full", "none"] = "full"
    """`"none"` leaves out every fsync."""
    hash: HashName | None = None
    """Write a manifest with a digest of every file."""
    key: str | None = None
    """Where the tensors are in a pickle that holds other things too, such as `"state_dict"`."""
    trust_pickle: bool = False
    """Unpickle anything. **Runs what the file's author put there.**"""

    def __post_init__(self) -> None:
        if self.budget_bytes is not None and (not isinstance(self.budget_bytes, int) or self.budget_bytes <= 0):
            raise ValueError(f"budget_bytes must be a positive number of bytes, not {self.budget_bytes!r}")
        if self.key is not None and not isinstance(self.key, str):
            raise TypeError(f"key= takes text, not {self.key!r}")
        self.torch_dtype()

    def torch_dtype(self) -> torch.dtype | None:
        """Return the dtype that is meant.

        Raises:
            ValueError: A name that is no floating dtype's, or a dtype that is none.
            TypeError: Neither a dtype nor text.
        """
        wanted = self.dtype
        if isinstance(wanted, str):
            wanted = TORCH_DTYPES.get(wanted) or getattr(torch, wanted, None)
        if self.dtype is None:
            return None
        if not isinstance(self.dtype, str | torch.dtype):
            raise TypeError(f"dtype= takes a torch.dtype or the name of one, not {self.dtype!r}")
        if not (isinstance(wanted, torch.dtype) and wanted.is_floating_point and wanted in _CASTS):
            raise ValueError(f"dtype= takes a floating dtype such as 'bfloat16', not {printable(str(self.dtype))!r}")
        return wanted

    def save_settings(self, metadata: Mapping[str, str]) -> SaveOptions:
        """Return what concerns the save."""
        return SaveOptions(
            max_shard_size=self.max_shard_size,
            metadata=metadata,
            progress=self.progress,
            durability=self.durability,
            hash=self.hash,
        )


async def convert(source: PathLike, destination: PathLike, **keywords: Unpack[ConvertKeywords]) -> SaveResult:
    """Convert a checkpoint to safetensors, or to other shards or another dtype, in one step and bounded memory.

    Tied weights stay tied. Metadata that is text is carried over. The source is not changed, unless it is a directory
    and the destination the same one: then its safetensors files go when the new ones are in place, as with any save.

    Args:
        source: A safetensors file, index or directory; a file of `torch.save` (read with `weights_only=True`); an
            index of such files (`pytorch_model.bin.index.json`) or a directory that holds either. Of a file of OLMo's
            nested state the keys are joined by dots; one with values that are no tensors is refused.
        destination: A path ending in `.safetensors` is one file; any other a directory in the hub's layout.
        **keywords: See `ConvertKeywords`.

    Returns:
        What was saved, once it survives a power cut.

    Raises:
        ValueError: The destination is a file that would be read; an argument is wrong.
        AmbiguousCheckpointError: A pickle that holds more than tensors by name, and no `key` that chooses.
        FormatError: The source is broken, or needs `trust_pickle`.
        StioError: See `stio.open` and `stio.save`. What stood at the destination stands, whatever is raised.
    """
    return await start_conversion(source, destination, **keywords).wait()


def start_conversion(
    source: PathLike, destination: PathLike, **keywords: Unpack[ConvertKeywords]
) -> Operation[SaveResult]:
    """Check the arguments and begin, on a thread of the conversion's own; see `convert`."""
    settings = ConvertSettings(**keywords)
    save_settings = settings.save_settings(settings.metadata or {})  # raises now for what it cannot use
    save_settings.max_shard_bytes(destination)
    plan_writes([], max_shard_bytes=None, block_bytes=1 << 20, metadata=settings.metadata)  # likewise for the metadata

    def body(operation: Operation[SaveResult]) -> SaveResult:
        return _carry_out(operation, os.fspath(source), os.fspath(destination), settings)

    return Operation(body, name="convert", about=shown(source)).start()


def _carry_out(
    operation: Operation[SaveResult], source: str, destination: str, settings: ConvertSettings
) -> SaveResult:
    budget_bytes = settings.budget_bytes or DEFAULT_BUDGET_BYTES
    origin = open_origin(
        source,
        dtype=settings.torch_dtype(),
        window_bytes=max(1 << 20, budget_bytes // 8),
        key=settings.key,
        trust_pickle=settings.trust_pickle,
        check=operation.check,
    )
    try:
        operation.on_cancel(origin.stop)
        _require_other_file(origin, destination)
        save_settings = settings.save_settings({**origin.metadata, **(settings.metadata or {})})
        planner = partial(
            _plan,
            origin=origin,
            max_shard_bytes=save_settings.max_shard_bytes(destination),
            metadata=save_settings.metadata or {},
        )
        pending = PendingSave(
            origin.tensors,
            destination,
            save_settings,
            pool=StagingPool(max(4 << 20, budget_bytes // 2)),
            stage_first=False,
            planner=planner,
        )
        operation.on_cancel(pending.cancel)
        try:
            return pending.result()
        except ClosedError:
            operation.check()  # the cancel was ours
            raise
    finally:
        origin.close()


def _plan(
    sources: Sequence[TensorSource],
    *,
    block_bytes: int,
    origin: Origin,
    max_shard_bytes: int | None,
    metadata: Mapping[str, str],
) -> WritePlan:
    """Plan as any save, lazily read names of one tensor tied as if they were the same memory."""
    targets = set(origin.ties.values())
    tied = [
        replace(source, storage_key=("tied", origin.ties.get(source.name, source.name)))
        if source.name in origin.ties or source.name in targets
        else source
        for source in sources
    ]
    plan = plan_writes(tied, max_shard_bytes=max_shard_bytes, block_bytes=block_bytes, metadata=metadata)
    origin.expect([name for shard in plan.shards for name in shard.names])
    return plan


def _require_other_file(origin: Origin, destination: str) -> None:
    """Refuse to replace a file that is being read.

    It would do no harm, the file is open; but who converts a file into itself, or one shard into all, mistook a name.

    Raises:
        ValueError: The destination is one of the source's files.
    """
    if not destination.endswith(_SUFFIX):
        return
    for path in origin.files:
        try:
            is_same = os.path.samefile(path, destination)
        except OSError:
            continue  # one of them is not there
        if is_same:
            raise ValueError(
                f"the destination {printable(destination)!r} is a file of the source; choose another name (a directory "
                "may be converted in place)"
            )
