"""Trainings whose tensors are sharded over ranks. Imported for them only: not every torch has `torch.distributed`."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from stio.distributed.parts import part_of
from stio.errors import MismatchError


def set_optimizer_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put a saved state into an optimizer with sharded parameters; each rank copies its part of the whole tensors.

    Args:
        optimizer: Its parameters are those of the saved one, in the same order, sharded over any number of ranks.
        saved: What `state_dict` returned, with whole tensors. It may be mapped memory: only the part is read.

    Raises:
        MismatchError: A tensor of the state has not the shape of its parameter, so its part is not known.
    """
    states = dict(saved["state"])
    for number, parameter in enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        if isinstance(parameter, DTensor) and number in states:
            states[number] = {
                name: _part(f"{name!r} of parameter {number} in the optimizer", value, parameter)
                for name, value in states[number].items()
            }
    optimizer.load_state_dict({**saved, "state": states})


def _part(what: str, whole: Any, parameter: DTensor) -> Any:
    if not isinstance(whole, torch.Tensor) or whole.dim() == 0:
        return whole
    if whole.shape != parameter.shape:
        raise MismatchError(
            f"{what} cannot be sharded: it has another shape than the parameter",
            expected=list(parameter.shape),
            found=list(whole.shape),
        )
    made = torch.empty_like(parameter.detach(), dtype=whole.dtype)
    part = part_of(what, made)
    assert part is not None  # it is a DTensor
    part.local.copy_(whole[part.index])
    return made
