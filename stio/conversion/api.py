"""Conversion of checkpoints to safetensors: from other formats, to other shards, to another dtype, in bounded memory.

The source is opened first (`sources.py`); that reads names and headers only. The save is the usual one, so a checkpoint
at the destination is replaced in one step, or not at all. Tensors of a safetensors source are read in the order in
which the save writes them, one window ahead of it (`ReadAhead`). Tensors of a pickle are mapped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from stio.conversion.sources import OpenSource, open_source
from stio.conversion.torch_files import Key, check_key
from stio.device import TORCH_DTYPES
from stio.errors import ClosedError, printable
from stio.format import TensorSource
from stio.format.files import FILE_SUFFIX, FileName, HashName
from stio.limits import checked_size
from stio.runtime import Operation
from stio.runtime.memory import default_budget_bytes
from stio.runtime.reports import Progress, progress_callback, shown
from stio.saving import (
    Durability,
    PendingSave,
    SaveOptions,
    SaveResult,
    SharedBySaves,
    WritePlan,
    absolute_destination,
    plan_writes,
    save,
)
from stio.storage import open_destination
from stio.storage.commit import LOCK_TIMEOUT_SECONDS
from stio.text import described_by, is_url

PathLike = str | os.PathLike[str]

_CASTS = {dtype for name, dtype in TORCH_DTYPES.items() if dtype.is_floating_point and name != "F4"}
"""Floating dtypes that torch can cast to. It cannot cast to packed pairs (F4)."""


@described_by(save)
async def convert(
    source: PathLike,
    destination: PathLike,
    *,
    max_shard_size: int | str | None = None,
    dtype: torch.dtype | str | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress = None,
    budget_bytes: int | str | None = None,
    durability: Durability = "full",
    hash: HashName | None = None,
    lock_timeout: float = LOCK_TIMEOUT_SECONDS,
    key: Key | None = None,
    trust_pickle: bool = False,
) -> SaveResult:
    """Convert a checkpoint to safetensors, or to other shards or another dtype, in one step and bounded memory.

    Tied weights stay tied, and text metadata is copied. The source is not changed, unless source and destination are
    the same directory: then the new safetensors files replace the old ones, as in any save. A cancel rolls back,
    unless the commit has begun, and returns when no thread works on the files.

    Args:
        source: A safetensors file, index or directory; a file of `torch.save` (read with `weights_only=True`); an
            index of such files (`pytorch_model.bin.index.json`), or a directory with one of these. The keys of a nested
            state of OLMo are joined by dots; one with values other than tensors raises an error.
        dtype: Cast floating tensors to it: a torch dtype, or its name in torch or in the format. Scales of quantized
            weights are not cast; weights that have scales are refused. None: no cast.
        metadata: Text to store in addition to that of the source. For equal keys this text is stored, except for
            `total_parameters`, which is counted in the source.
        budget_bytes: Most bytes of memory: a number, or text such as `"2GB"`. None: 512 MiB. Half is staging memory of
            the save, a quarter holds tensors read ahead. A single row that is larger than an eighth of it needs memory
            in addition.
        key: Key of the tensors in a pickle that holds other values too, such as `"state_dict"`; or a path of keys, such
            as `"model.state_dict"` or `("model", "state_dict")`. The number of an item of a list is a key.
            Beside the tensors, values of classes that are not plain are skipped; their code is not run.
        trust_pickle: Unpickle any object. **This executes code that the author of the file chose.**
        ...: The other arguments are those of `stio.save`.

    Returns:
        Files, sizes and times of the save, and the number of values that left the range of `dtype`. The new checkpoint
        survives a power cut.

    Raises:
        ValueError: The destination is a file of the source or looks like one of another kind, or an argument is out of
            range.
        TypeError: An argument has the wrong type.
        AmbiguousCheckpointError: A pickle holds other values beside tensors by name, and there is no `key`.
        FormatError: The source is broken, or needs `trust_pickle`.
        StioError: See `stio.open` and `stio.save`. After an error the destination is unchanged.
    """
    wanted = _floating_dtype(dtype)
    budget = default_budget_bytes() if budget_bytes is None else checked_size(budget_bytes)
    check_key(key)
    options = SaveOptions(
        max_shard_size=max_shard_size,
        metadata=metadata or {},
        durability=durability,
        hash=hash,
        lock_timeout=lock_timeout,
        progress=progress_callback(progress, "converting"),
    )
    absolute_destination(destination)  # raises for what is no destination
    options.max_shard_bytes(destination)  # raises for a wrong argument before the work starts
    plan_writes([], max_shard_bytes=None, block_bytes=1 << 20, metadata=options.metadata)  # the same for the metadata

    def body(operation: Operation[SaveResult]) -> SaveResult:
        opened = open_source(
            os.fspath(source),
            dtype=wanted,
            window_bytes=max(1 << 20, budget // 8),
            key=key,
            trust_pickle=trust_pickle,
            check=operation.check,
        )
        try:
            result = _save(operation, opened, os.fspath(destination), options, budget // 2)
            return replace(result, out_of_range=opened.lost.report(shown(source)))
        finally:
            if opened.reader is not None:
                opened.reader.close()

    return await Operation(body, name="convert", about=shown(source)).wait()


def _floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that `dtype=` means.

    Raises:
        ValueError: It is not a floating dtype, or not the name of one.
        TypeError: It is neither a dtype nor text.
    """
    wanted = None if dtype is None else TORCH_DTYPES.parse(dtype)
    if wanted is not None and wanted not in _CASTS:
        raise ValueError(f"dtype= takes a floating dtype, such as 'bfloat16' or 'BF16', not {printable(str(dtype))!r}")
    return wanted


def _save(
    operation: Operation[SaveResult], opened: OpenSource, destination: str, options: SaveOptions, budget_bytes: int
) -> SaveResult:
    """Save an open source; metadata of the options come before those of the source."""
    if opened.reader is not None:
        operation.on_cancel(opened.reader.stop)
    _require_other_file(opened, destination)
    options = replace(options, metadata={**opened.metadata, **(options.metadata or {})})
    max_shard_bytes, metadata = options.max_shard_bytes(destination), options.metadata or {}
    targets = set(opened.ties.values())
    count = opened.metadata.get("total_parameters")  # the tensors stay the same
    counted: dict[str, int] = {"total_parameters": count} if type(count) is int and count >= 0 else {}

    def plan(sources: Sequence[TensorSource], block_bytes: int) -> WritePlan:
        """Plan like any save. Tied names of lazy tensors get the same storage key, as if they shared memory."""
        tied = [
            replace(source, storage_key=("tied", opened.ties.get(source.name, source.name)))
            if source.name in opened.ties or source.name in targets
            else source
            for source in sources
        ]
        made = plan_writes(
            tied, max_shard_bytes=max_shard_bytes, block_bytes=block_bytes, metadata=metadata, tied=opened.tied
        )
        if opened.reader is not None:
            opened.reader.expect([name for shard in made.shards for name in shard.names])
        return replace(made, metadata={**made.metadata, **counted})

    budget = max(4 << 20, budget_bytes)
    pending = PendingSave(opened.tensors, destination, options, saver=SharedBySaves.alone(budget), planner=plan)
    operation.on_cancel(pending.cancel)
    try:
        return pending.start().result()
    except ClosedError:
        operation.check()  # raises if this operation was cancelled
        raise


def _require_other_file(opened: OpenSource, destination: str) -> None:
    """Refuse a destination that is a file of the source, or a delta that is converted in place.

    It would be safe, since the file is open. But a file converted into itself, or one shard replaced by the whole
    checkpoint, is a mistaken name.

    Raises:
        ValueError: The destination is that.
    """
    if not destination.endswith(FILE_SUFFIX):
        folder = os.path.realpath(destination)
        names = [os.path.basename(path) for path in opened.files if os.path.realpath(os.path.dirname(path)) == folder]
        if any(FileName(name).without_delta for name in names):
            raise ValueError(
                f"the destination {printable(destination)!r} is the delta itself, and others may be based on it; "
                "choose another directory"
            )
        return
    if is_url(destination):
        is_same = str(open_destination(destination)) in opened.files
    else:
        files = [path for path in opened.files if os.path.exists(path)]
        is_same = os.path.exists(destination) and any(os.path.samefile(path, destination) for path in files)
    if is_same:
        raise ValueError(
            f"the destination {printable(destination)!r} is a file of the source; choose another name (a directory "
            "may be converted in place)"
        )
