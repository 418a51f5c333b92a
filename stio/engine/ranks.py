"""Whether this process shares its host with others that are likely to read the same files: ranks of one job."""

from __future__ import annotations

import os

import torch

__all__ = ["host_is_shared"]


def host_is_shared() -> bool:
    """Return whether other ranks of this job run on this host.

    What torchrun says counts. Where no launcher tells how many ranks a host has (`torch.multiprocessing.spawn`), a
    process group of several is taken for one host's: to ask the others would be a collective, which a load must not be.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    if told.isdecimal():
        return int(told) > 1
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
