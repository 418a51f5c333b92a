"""Two processes that train together under transformers' Trainer with FSDP2, as a case for `integrations.kills`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from integrations.ddp_case import NUM_STEPS, result, train_in_two

__all__ = ["FSDP", "NUM_STEPS", "allow_fsdp_on_cpu", "result", "train"]

FSDP: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}


def allow_fsdp_on_cpu() -> None:
    """Let accelerate shard on the CPU. It ignores its FSDP plugin there, and trains with DDP, without a word.

    `AcceleratorState` sets the plugin in a branch for kinds of accelerators, which the CPU is not among. The rest of
    accelerate, Trainer and `fully_shard` is what runs on accelerators.
    """
    plain = AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **keywords: Any) -> None:
        plain(self, *arguments, fsdp_plugin=fsdp_plugin, **keywords)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def train(directory: Path) -> None:
    allow_fsdp_on_cpu()
    train_in_two(directory, **FSDP)
