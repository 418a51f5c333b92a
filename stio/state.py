"""`save_state` and `load_state`: nested state of optimizers, schedulers and training loops.

A save separates the state (`stio.saving.nested`) into tensors and a tree of all other values, and saves a checkpoint. A
load reads and checks the tree, loads the tensors as any load does, and puts them into the tree. There is no pickle: a
file cannot cause code to run. A value of any other type raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from stio import process
from stio.errors import FormatError, printable
from stio.format import SharedPolicy
from stio.format.files import HashName
from stio.format.state import Reference, Tree
from stio.limits import Limits
from stio.loading import DevicesLike, DtypesLike, LoadOptions, Memory, collect, load, reading_operation, select_tensors
from stio.loading.targets import read_nested
from stio.runtime import Operation
from stio.runtime.reports import Progress, Trace
from stio.saving import DEFAULT_PATTERN, CommitStep, DestinationLike, Durability, SaveResult, ShardNames, flatten, save
from stio.storage.checkpoint import CacheLike, OpenCheckpoint, SourceLike
from stio.storage.commit import LOCK_TIMEOUT_SECONDS
from stio.text import described_by, keywords_for


@described_by(save)
async def save_state(
    state: object,
    destination: DestinationLike,
    *,
    budget_bytes: int | str | None = None,
    max_shard_size: int | str | None = None,
    metadata: Mapping[str, str] | None = None,
    filename_pattern: str = DEFAULT_PATTERN,
    shared: SharedPolicy = "dedupe",
    shard_names: ShardNames = "auto",
    commit: CommitStep = "index",
    durability: Durability = "full",
    hash: HashName | None = None,
    lock_timeout: float = LOCK_TIMEOUT_SECONDS,
    progress: Progress = None,
    trace: Trace | None = None,
    switch_interval: float | None = None,
) -> SaveResult:
    """Save nested state, atomically and durably, such as `optimizer.state_dict()` or the state of a scheduler.

    Supported types: dict, OrderedDict, Counter (keys: text, integers of 64 bits, floats but NaN, bools, None, tuples of
    those), list, tuple; tensors, parameters (restored as parameters, with their `requires_grad`), `stio.LazyTensor`;
    text, integers, floats, bools, None, bytes; `torch.Size`, `torch.dtype`, `torch.device`; arrays and scalars of
    numpy, except objects and records (`np.random.get_state()` may be saved as it is). The values of a tensor are
    saved, as by `stio.save`. The items of a container are saved, and not its attributes (such as the `_metadata` of a
    module's state_dict).

    A tensor that occurs several times is saved once, and restored as one tensor. Tensors that only overlap, and
    containers that occur several times, are saved separately, and are separate after a load.

    The result is a checkpoint that `stio.load` and any other safetensors reader can open. The name of a tensor is its
    path, `state/0/exp_avg`. The tree of all other values is in the metadata under `stio.state`, or in a U8 tensor
    `/stio.state` if it is long. A cancel rolls the save back, unless its commit has begun.

    Args:
        state: The state. It must not change before this function returns; a `Saver` returns earlier.
        ...: The other arguments are those of `stio.save`.

    Raises:
        TypeError: A value or a key has another type; the message has its path in the state. Nothing was written.
        ValueError: A container contains itself, or a key is NaN.
        LimitError: The state exceeds the default `stio.Limits` of a load, or containers are nested more than 200 deep.
        StioError: See `stio.save`.
    """
    options = keywords_for(save, locals())
    tensors, options["metadata"] = await flatten(state, metadata)
    return await save(tensors, **options)


@described_by(load)
async def load_state(
    source: SourceLike,
    *,
    device: DevicesLike = "cpu",
    dtype: DtypesLike | None = None,
    memory: Memory = "copy",
    budget_bytes: int | str | None = None,
    strict: bool = True,
    limits: Limits | None = None,
    verify: bool = False,
    follow_symlinks: bool = False,
    progress: Progress = None,
    cache: CacheLike | None = None,
    trace: Trace | None = None,
    switch_interval: float | None = None,
) -> Any:
    """Load nested state that `save_state` saved.

    Nothing in the file is executed. The whole tree is checked before any tensor is read. A cancel ends the load.

    Args:
        memory: See `stio.load`. The default is `"copy"`: training writes in place, and with a mapping the first write
            to each page costs a page fault.
        limits: See `stio.load`. They apply to the tree too.
        ...: The other arguments are those of `stio.load`.

    Returns:
        The state, with its types and its order. A tensor that occurs several times is one tensor. The caller owns
        the tensors.

    Raises:
        FormatError: The checkpoint has no nested state (`stio.load` loads its tensors), or a malformed one.
        StioError: See `stio.load`.
    """
    options = LoadOptions(**keywords_for(LoadOptions, locals()))

    operation = reading_operation(source, options, lambda operation, opened: restore(operation, opened, options))
    take = await operation.wait()
    return take()


def restore(operation: Operation[Any], opened: OpenCheckpoint, options: LoadOptions) -> Callable[[], Any]:
    """Load the state of an open checkpoint.

    Returns:
        A function that returns the state. The consumer's thread calls it, so that its stream waits for the copies.

    Raises:
        FormatError: The checkpoint has no nested state, or a malformed one.
        StioError: See `stio.load_state`.
    """
    nested = read_nested(opened, options.limits or Limits(), check=operation.check)
    tree, holds_bytes = nested.tree, nested.holds_bytes
    names = (lambda name: name not in holds_bytes) if holds_bytes else None
    take_tensors = collect(operation, select_tensors(opened, names, options))
    with process.collection_paused(tree.num_nodes):
        made = [_filled(tree, take_tensors(), nested.host_values, opened.path)]

    def take() -> Any:
        # The operation's thread may be the last to hold this function, and at the interpreter's exit a thread that
        # frees a tensor aborts the process.
        return made.pop()

    return take


def _filled(tree: Tree, tensors: Mapping[str, torch.Tensor], host_values: Mapping[str, object], path: str) -> Any:
    """Put the tensors into the tree. Their bytes are not used here: copies to the device may be under way."""
    parameters: dict[tuple[int, bool], nn.Parameter] = {}

    def resolve(reference: Reference) -> object:
        if reference.in_host_memory:
            return host_values[reference.name]
        tensor = tensors[reference.name]
        if reference.kind == "tensor":
            return tensor
        requires_grad = reference.kind == "parameter"
        key = id(tensor), requires_grad
        if key not in parameters:  # the same parameter in all its places
            try:
                parameters[key] = nn.Parameter(tensor, requires_grad=requires_grad)
            except RuntimeError:  # integers cannot have a gradient
                message = f"tensor {printable(reference.name)!r} cannot be a parameter"
                raise FormatError(message, path=path, found=str(tensor.dtype)) from None
        return parameters[key]

    return tree.fill(resolve)
