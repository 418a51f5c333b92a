"""The private names of torch that loads and saves use, each with the reason why no public name does the same.

A new release of torch is checked against this module first. Names that only warm starts need are in their package.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack
"""Makes a tensor from a capsule; `torch.from_dlpack` would have the object make a capsule of its own."""

to_dlpack: Callable[[torch.Tensor], Any] = torch._C._to_dlpack
"""Makes a capsule; `Tensor.__dlpack__` would make one stream wait for another."""

foreach_copy: Callable[..., None] = torch._foreach_copy_
"""Copies a list of tensors into another list in one call, which drops the GIL once."""

without_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Context in which a subclass of `torch.Tensor` does not override torch's functions."""

_known_bits: dict[int, tuple[bool, bool]] = {}


def conj_neg_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return whether a conjugation and a negation of a tensor are not carried out yet.

    The public calls drop the GIL. Both bits are in the tensor's set of dispatch keys, of which there are few.
    """
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    found = _known_bits.get(keys)
    if found is None:
        found = _known_bits[keys] = (tensor.is_conj(), tensor.is_neg())
    return found
