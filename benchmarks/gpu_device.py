"""The device that is measured, and its stand-in: a rehearsal on the CPU runs all of it, and measures nothing."""

from __future__ import annotations

import os
from typing import Any

import torch

REHEARSAL = "STIO_GPU_REHEARSAL"
"""Set in the environment where the CPU stands for the accelerator."""


def device() -> torch.device:
    """Give the accelerator, or the CPU in a rehearsal."""
    if os.environ.get(REHEARSAL):
        return torch.device("cpu")
    return torch.device("cuda", 0)


def is_pinned() -> bool:
    """Tell whether host memory can be pinned for it."""
    return device().type != "cpu"


def prepare() -> None:
    """Make the device's context, so that no contestant pays for it on the clock."""
    torch.zeros(1, device=device())
    synchronize()


def synchronize() -> None:
    """Wait until the device has done all that was asked of it."""
    if device().type != "cpu":
        torch.cuda.synchronize(device())


def memory_in_use() -> int:
    """Give the device's bytes that tensors hold."""
    return torch.cuda.memory_allocated(device()) if device().type != "cpu" else 0


def peak_memory() -> int:
    """Give the most of it since the process began."""
    return torch.cuda.max_memory_allocated(device()) if device().type != "cpu" else 0


def forget_peak() -> None:
    """Give back what torch keeps of memory that nobody uses, and begin anew to look for the peak."""
    if device().type != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device())


def describe() -> dict[str, Any]:
    """Give what a reader of the figures must know about the device."""
    if device().type == "cpu":
        return {"accelerator": "a rehearsal: the CPU stands for an accelerator, no figure here means anything"}
    found = torch.cuda.get_device_properties(device())
    return {"accelerator": f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"}


def is_there() -> bool:
    """Tell whether torch sees a CUDA device, without making a context on it."""
    return torch.cuda.is_available()


def has_gds() -> bool:
    """Tell whether kvikio finds GPUDirect Storage set up: where it does not, a load goes through the host."""
    try:
        from kvikio import cufile_driver

        return bool(cufile_driver.get("is_gds_available"))
    except (ImportError, AttributeError, OSError, RuntimeError):
        return False
