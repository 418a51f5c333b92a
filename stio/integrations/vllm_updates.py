"""The weight transfer backend `stio` of vLLM: a running engine takes over the newest checkpoint of a training.

    llm = LLM(model, load_format="stio", weight_transfer_config={"backend": "stio"})
    llm.start_weight_update()
    llm.update_weights({"update_info": {"path": "run/step-6"}})
    llm.finish_weight_update()

vLLM (0.29 or newer) imports this module when an engine with that backend starts. If the checkpoint is a delta whose
chain contains the one that the model has, and the model computes with its parameters as they were loaded, only the
changed elements are read: they become `CheckpointWeightPatch`es of vLLM. Otherwise the whole checkpoint is read, as by
vLLM's `reload_weights`. Either way everything is opened and checked before the model changes.

vLLM writes patches into parameters through the loaders of the model. It does not check what that needs, so `_in_place`
does: kernels that read a packed copy of a weight would go on with the old one.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from stio.device import TORCH_DTYPES, tensors_in
from stio.errors import MismatchError
from stio.integrations.vllm import LOAD_FORMAT
from stio.runtime.memory import Region
from stio.storage.checkpoint import Changes, OpenCheckpoint, OpenOptions, latest, open_checkpoint, read_update

_transfer = import_module("vllm.distributed.weight_transfer")
_loaders = import_module("vllm.model_executor.model_loader")
_reloads = import_module("vllm.model_executor.model_loader.reload.inplace")
_patching = import_module("vllm.model_executor.model_loader.checkpoint_weight_patch")

_PLAIN_LAYERS = {"LinearBase", "VocabParallelEmbedding", "RMSNorm", "LayerNorm"}
"""Classes of vLLM that, unless they are quantized, compute with their parameters as they were loaded."""
_PATCHED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""vLLM marks elements that stay by NaN, so that other dtypes, and new values that are NaN, cannot be patched."""

logger = logging.getLogger(f"{_transfer.__name__}.{LOAD_FORMAT}")  # vLLM shows the loggers below its own


@dataclass(frozen=True, slots=True)
class Connection:
    """What `init_weight_transfer_engine` takes: nothing, since files need no connection."""


@dataclass(frozen=True, slots=True)
class Update:
    """What `update_weights` takes."""

    path: str
    """A checkpoint; with one rank also a directory of steps, whose newest one is taken."""


class StioWeightTransferEngine(_transfer.WeightTransferEngine):  # type: ignore[misc, name-defined]  # known at run time
    """Takes the weights from a path. After an error that changed the model the next update reads everything."""

    init_info_cls = Connection
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        """Require the load format, whose options and checks are used.

        Raises:
            ValueError: The engine was started with another load format.
        """
        super().__init__(config, vllm_config, device, model)
        if (found := vllm_config.load_config.load_format) != LOAD_FORMAT:
            raise ValueError(f"weight transfer backend 'stio' needs --load-format {LOAD_FORMAT}, not {found}")
        extra = dict(vllm_config.load_config.model_loader_extra_config or {})
        self._options = OpenOptions(follow_symlinks=extra.get("follow_symlinks", False), with_manifest=True)
        self._id: str = ""  # of the checkpoint whose weights the model has, as far as it is known

    def init_transfer_engine(self, init_info: Connection) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Do nothing."""

    def finish_weight_update(self) -> None:
        """Do nothing: an update is complete when `update_weights` returns."""

    def shutdown(self) -> None:
        """Do nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take the weights of a checkpoint. vLLM's own method always fails on the CPU, where it waits for a device."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Update) -> None:
        """Take the weights of a checkpoint.

        Raises:
            MismatchError: The checkpoint does not have the tensors of the model; or vLLM could not apply a patch.
            StioError: See `stio.load`; nothing was changed.
        """
        path = update_info.path
        if self.parallel_config.world_size_across_dp == 1 and os.path.isdir(path):  # ranks might find different steps
            path = latest(path, follow_symlinks=self._options.follow_symlinks, default=path)
        with closing(open_checkpoint(path, self._options)) as opened:
            new_id = opened.id
            if new_id and new_id == self._id:
                return
            patches = self._patches(opened)
        if patches is None:
            self._reload(path)
            with closing(open_checkpoint(path, self._options)) as opened:  # whether it was another one meanwhile
                self._id = new_id if opened.id == new_id else ""
            logger.info("Read all weights of %s", path)
            return
        self._id = ""
        try:
            _patching.load_checkpoint_weight_patches(self.model, patches, validate_unique_indices=False)
        except Exception as error:
            message = f"vLLM could not apply a patch ({error}); the model has a part of the update, so update it again"
            raise MismatchError(f"{message}: the next update reads the whole checkpoint", path=path) from error
        self._id = new_id
        logger.info("Applied patches of %d tensors of %s", len({one.name for one in patches}), path)

    def _reload(self, path: str) -> None:
        config = copy.copy(self.model_config)
        config.model, config.model_weights, config.revision = path, "", None
        loader = _loaders.get_model_loader(self.vllm_config.load_config)
        pairs = loader.get_all_weights(config, self.model)  # opens and checks all
        self._id = ""
        _reloads.reload_weights(self.vllm_config, self.model, pairs, None, True)

    def _patches(self, opened: OpenCheckpoint) -> list[Any] | None:
        """Return what was changed since the model's checkpoint; None: everything has to be read."""
        if not self._id or not _in_place(self.model, self.vllm_config):
            return None
        update = read_update(opened, self._id, budget_bytes=None)
        if update is None or any(_dtype(opened, name) not in _PATCHED_DTYPES for part in update for name in part):
            return None
        patches = [
            _patching.CheckpointWeightPatch(name, shape, values.dtype, values.to(self.device), at.to(self.device))
            for name, shape, at, values in _elements(opened, *update)
        ]
        return None if any(one.values.isnan().any() for one in patches) else patches


def _dtype(opened: OpenCheckpoint, name: str) -> torch.dtype:
    return TORCH_DTYPES[opened.info(name).dtype]


def _elements(
    opened: OpenCheckpoint, whole: Mapping[str, Region], changed: Mapping[str, Sequence[Changes]]
) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor, torch.Tensor]]:
    """Yield name and shape of changed tensors, and positions and values of their new elements, the oldest first."""
    for name, region in whole.items():
        info = opened.info(name)
        if region.nbytes:
            values = tensors_in(region, [""], [info.dtype], [info.shape], [0])[""].view(-1)
            yield name, info.shape, torch.arange(len(values)), values
    for name, changes in changed.items():
        info = opened.info(name)
        for one in changes:
            values = tensors_in(one.values, [""], [info.dtype], [(one.count,)], [0])[""]
            yield name, info.shape, torch.from_numpy(one.positions()), values


def _in_place(model: nn.Module, vllm_config: Any) -> bool:
    """Return whether a model computes with its parameters as they were loaded, and with nothing made of them."""
    config = vllm_config.model_config
    if config.quantization is not None or config.is_moe or config.use_mla or vllm_config.lora_config is not None:
        return False
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own and not _PLAIN_LAYERS & {one.__name__ for one in type(module).__mro__}:
            return False
        if not all(one.numel() for one in own):  # packed for a kernel, as linear layers are on the CPU
            return False
    return True
