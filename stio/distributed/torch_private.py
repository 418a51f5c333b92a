"""What `stio.distributed` uses of torch.distributed that is not documented."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import _nested_dict, state_dict_saver
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

__all__ = ["NamePath", "flat_state", "local_memory", "state_of_save", "store_of", "tree_leaves", "with_local"]


def store_of(process_group: dist.ProcessGroup | None) -> tuple[Store, dist.ProcessGroup]:
    """Return the store of a process group, in which keys of other groups do not occur, and the group.

    A group that is made after all groups were destroyed may have the name of an older one of other ranks.
    """
    group = process_group or distributed_c10d._get_default_group()
    members = hashlib.sha256(str(dist.get_process_group_ranks(group)).encode()).hexdigest()[:16]
    # `ProcessGroup.get_group_store` is not in all versions, and for some backends it has no store.
    return PrefixStore(f"{group.group_name}/{members}", distributed_c10d._get_default_store()), group


NamePath: TypeAlias = tuple[str | int, ...]
"""The path of a value in a nested state, as DCP's planner has it: keys of mappings as text, indices of lists."""


def flat_state(state: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, NamePath]]:
    """Return the values of a nested state by their flattened names, and their paths, as `dcp.save` does.

    Raises:
        ValueError: Two values have one name.
    """
    flat: tuple[dict[str, Any], dict[str, NamePath]] = _nested_dict.flatten_state_dict(dict(state))
    return flat


def state_of_save() -> Mapping[Any, Any] | None:
    """Return the state that the `dcp.save` which called this saves; None: it was not called by one.

    A planner has the state with text in place of its keys, and without the empty mappings in it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_save_state_dict" and frame.f_globals.get("__name__") == state_dict_saver.__name__:
            state = frame.f_locals.get("state_dict")
            return state if isinstance(state, Mapping) else None
        frame = frame.f_back
    return None


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a `DTensor` like another one, over other local memory.

    `DTensor.from_local` would copy memory of the host to the device of the mesh.
    """
    made: Callable[..., DTensor] = DTensor
    return made(local, tensor._spec, requires_grad=False)


def local_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, without a gradient; waits for the collective call that makes it."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local
