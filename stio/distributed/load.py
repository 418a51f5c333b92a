"""Loads into modules and nested states that hold `DTensor`s.

A save may replace the checkpoint between the opens of two ranks. So each rank describes what it has opened
(`describe_opened`), and ranks that have opened files at one place must have opened the same files. A place is a path on
one filesystem of one machine, or a URL: other hosts may have copies of their own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from stio.distributed.broadcast import Broadcast, SharedFill
from stio.distributed.parts import part_of
from stio.distributed.ranks import RANK_TIMEOUT_SECONDS, Ranks
from stio.errors import ChangedDuringReadError
from stio.loading.api import fill_from, load
from stio.loading.module import ModuleTarget
from stio.loading.nested import StateTarget
from stio.loading.options import LoadOptions, Memory
from stio.loading.target import Casting, LoadReport, LoadTarget, checked_casting
from stio.runtime.limits import Limits
from stio.runtime.operation import Operation
from stio.runtime.progress import Progress
from stio.runtime.text import described_by, is_url, keywords_for
from stio.runtime.trace import Trace
from stio.storage.checkpoint.caches import CacheLike
from stio.storage.checkpoint.open import SourceLike
from stio.storage.checkpoint.shards import OpenCheckpoint
from stio.storage.commit.directory_lock import boot_id


@described_by(load)
async def load_into(
    target: object,
    source: SourceLike,
    *,
    memory: Memory = "auto",
    budget_bytes: int | str | None = None,
    strict: bool = True,
    limits: Limits | None = None,
    verify: bool = False,
    follow_symlinks: bool = False,
    progress: Progress = None,
    cache: CacheLike | None = None,
    trace: Trace | None = None,
    switch_interval: float | None = None,
    casting: Casting = "safe",
    broadcast: Broadcast = "auto",
    process_group: ProcessGroup | None = None,
    rank_timeout: float = RANK_TIMEOUT_SECONDS,
) -> LoadReport:
    """Load a checkpoint into a module or a state that is sharded over ranks; each rank calls this, and reads its part.

    Parameters and buffers that are `DTensor`s get their part of the checkpoint's tensor; others get the whole tensor.
    Works for `fully_shard` (FSDP2), also of a module made on `meta` and given memory by `to_empty`, for tensor
    parallelism (`parallelize_module`), and for both on one mesh. Rows are read alone; of parts of other dimensions
    whole rows are read, as far as that is faster. The call returns when all ranks have loaded. If one fails, is
    cancelled or killed, it raises on all of them; some tensors have new values then.

    Buffers that are not in the checkpoint (`persistent=False`) are not filled; `LoadReport.unfilled` names them. After
    `to_empty` compute them anew.

    A nested state, such as that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, is compared with
    the one that `stio.save_state` saved: tensors are filled in place, numbers, text and None are replaced in their
    containers at the end. The number of ranks may be another one than at the save. A mapping of tensors by name is also
    filled from an ordinary checkpoint.

    Args:
        target: A module; or a state of dictionaries, lists and tuples with `DTensor`s, tensors and plain values. It is
            changed in place, and after an error or a cancel some tensors have new values.
        strict: Module and checkpoint must hold the same names, and a state the same keys. Otherwise what both have is
            loaded; sequences must have the same lengths in any case.
        verify: See `stio.load`. Each rank reads all files for that.
        progress: See `stio.load`. It counts what this rank reads.
        casting: Which dtypes of a nested state may be copied into which, as in numpy: `"safe"`, only if the target
            holds every value exactly (moments in F32 are not copied into BF16); `"same_kind"`, floating ones into any
            floating ones, integers into any integers. For a module and for tensors by name it is `"same_kind"`.
        broadcast: Whether of tensors that several ranks need each rank reads a part and sends it to the others, so that
            no byte is read twice: replicated tensors, copies of HSDP, parts of inner dimensions. `"auto"`: if the
            source is behind a network and most ranks need most of these tensors; not with a `DiskCache`. Files of this
            machine are read faster by each rank. All ranks must pass the same. Has no effect on a nested state.
        process_group: The ranks that call this. None: all ranks of the default group.
        rank_timeout: Seconds without a sign of life of a rank, after which the load fails on all others.
        ...: The other arguments are those of `stio.load`.

    Returns:
        The names that are missing or unexpected (of a state: paths such as `state['step']`); both are empty with
        `strict=True`.

    Raises:
        ValueError: An argument has a wrong value, or `broadcast` differs between ranks.
        MismatchError: Target and checkpoint differ, a tensor is on `meta`, or a placement cannot be loaded.
        FormatError: The nested state in the checkpoint is malformed.
        ChangedDuringReadError: The checkpoint was replaced while ranks opened it.
        RankError: The load failed on another rank, whose error is `__cause__`.
        StioError: See `stio.load`.
    """
    given = locals()
    async with Ranks(process_group, about="load", timeout=rank_timeout) as ranks:
        options = LoadOptions(**keywords_for(LoadOptions, given))
        if not (isinstance(broadcast, bool) or broadcast == "auto"):
            raise ValueError(f"broadcast= takes True, False or 'auto', not {broadcast!r}")
        opened_as = b""

        def fill_first(
            operation: Operation[Any], opened: OpenCheckpoint, target: LoadTarget, names: list[str]
        ) -> list[str]:
            nonlocal opened_as
            opened_as = describe_opened(opened, source)
            return SharedFill(ranks, options, broadcast).fill(operation, opened, target, names)

        report = await fill_from(
            source,
            _filled(target, checked_casting(casting)),
            options,
            on_begin=lambda load: ranks.on_failure(load.cancel),
            fill_first=fill_first,
        )
        require_same(await ranks.arrive("loaded", opened_as), path=report.path)
        return report


def _filled(target: object, casting: Casting) -> LoadTarget:
    """Return what fills a module or a state."""
    if not isinstance(target, nn.Module):
        return StateTarget(target, part_of=part_of, casting=casting)
    for part in target.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # or the next forward would use what was gathered before the load
    return ModuleTarget(target, part_of=part_of)


_DIGEST_BYTES = 16


def describe_opened(opened: OpenCheckpoint, source: object) -> bytes:
    """Return what ranks compare by `require_same`; empty if another rank cannot compare it.

    Args:
        opened: The checkpoint.
        source: As the caller named it: a link may lead elsewhere now.
    """
    if not isinstance(source, str | os.PathLike):
        return b""
    name, identities = os.fspath(source), [file.identity for file in opened.files]
    if all(one.etag for one in identities):
        place, states = repr(name), [one.etag for one in identities]
    elif boot_id() and all(one.device for one in identities):
        devices = sorted({one.device for one in identities})
        place = repr((boot_id(), name if is_url(name) else os.path.abspath(name), devices))
        states = [f"{one.nbytes} {one.mtime_ns}" for one in identities]
    else:
        return b""
    files = [(header.shard, state) for header, state in zip(opened.headers, states, strict=True)]
    return _digest(place) + _digest(repr(files))


def require_same(found: Sequence[bytes], *, path: str) -> None:
    """Require that ranks have opened the same checkpoint.

    Args:
        found: `describe_opened` of each rank.
        path: For messages.

    Raises:
        ChangedDuringReadError: Two ranks have opened different files at the same place.
    """
    first: dict[bytes, int] = {}
    for rank, one in enumerate(found):
        other = first.setdefault(one[:_DIGEST_BYTES], rank)
        if found[other] != one:
            raise ChangedDuringReadError(
                f"ranks {other} and {rank} have opened different checkpoints: it was replaced between their opens; "
                "load it again",
                path=path,
            )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
