"""vLLM: `vllm serve MODEL --load-format stio`, by the entry point that vLLM calls in each of its processes.

Importing this costs neither vLLM nor CUDA: the loader's class is made when vLLM calls `register`. It stands on what
vLLM publishes for loaders of others (`register_model_loader`, `BaseModelLoader`) and on no private name. vLLM is too
large for this project's tests: they hold the loader against a stand-in with that interface, and against vLLM
itself where it is installed.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, new_class
from typing import Any, cast

import torch
from torch import nn

from stio.errors import CheckpointNotFoundError, printable
from stio.integrations.iterators import weights
from stio.loading.open import INDEX_NAME
from stio.loading.options import Keywords, Settings

__all__ = ["LOAD_FORMAT", "register"]

LOAD_FORMAT = "stio"
"""What `--load-format` is given."""

_LOADERS = "vllm.model_executor.model_loader"
_ALL = "*.safetensors"
_WANTED = (_ALL, f"*{INDEX_NAME.removeprefix('model')}")
_SHOWN_NAMES = 5


def register() -> None:
    """Make the load format `stio` known to vLLM; vLLM calls this, any number of times."""
    _register(import_module(_LOADERS))


@cache
def _register(loaders: ModuleType) -> None:
    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": __name__, "__doc__": _Loading.__doc__}

    loader = new_class("StioModelLoader", (_Loading, loaders.BaseModelLoader), exec_body=fill)
    loaders.register_model_loader(LOAD_FORMAT)(loader)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One checkpoint that a model's weights come from."""

    model: str
    """A directory, or a repository on the hub."""
    revision: str | None
    """On the hub."""
    prefix: str = ""
    """Goes before each name."""
    patterns: Sequence[str] = (_ALL,)
    """Which files: those of the first pattern that finds any."""


class _Loading:
    """Loads safetensors by stio.

    `--model-loader-extra-config` takes the keywords of `stio.open`. Tensors go to the device that the model is on,
    but to the CPU where several ranks load: they share the file's pages there, and each takes its part.
    """

    load_config: Any

    def __init__(self, load_config: Any) -> None:
        """Check the extra configuration, so that what is wrong is said before a model is made.

        Raises:
            ValueError: It holds a key that is no keyword of `stio.open`, or a value out of range.
            TypeError: A value of another type.
        """
        super().__init__(load_config)  # type: ignore[call-arg]  # the next in line is vLLM's BaseModelLoader
        extra = dict(load_config.model_loader_extra_config or {})
        if unknown := sorted(map(str, extra.keys() - Keywords.__annotations__.keys())):
            raise ValueError(
                f"load format {LOAD_FORMAT!r} does not know {', '.join(map(printable, unknown))} in the extra "
                f"configuration; it takes {', '.join(Keywords.__annotations__)}"
            )
        Settings(**extra)
        self._extra = cast(Keywords, extra)

    def download_model(self, model_config: Any) -> None:
        """Bring the files here, if they are on the hub."""
        self._folder(_Wanted(model_config.model, model_config.revision))

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Hand the checkpoint's tensors to the model's own `load_weights`.

        Raises:
            ValueError: The model says which weights it took, and some are missing.
            StioError: See `stio.load`.
        """
        keywords: Keywords = {"device": _device(model), "progress": self._shows_progress(), **self._extra}
        # Both attributes are how models tell vLLM's own loader of their files.
        patterns = getattr(model, "allow_patterns_overrides", None) or (_ALL,)
        wanted = [_Wanted(model_config.model, model_config.revision, patterns=patterns)]
        for other in getattr(model, "secondary_weights", ()):
            chosen = getattr(other, "allow_patterns_overrides", None) or (_ALL,)
            wanted.append(_Wanted(other.model_or_path, other.revision, other.prefix, chosen))
        with closing(self._tensors(wanted, keywords)) as tensors:  # an error in the model ends the reading, too
            loaded = model.load_weights(tensors)  # type: ignore[operator]  # every model of vLLM's has it
        if loaded is not None and getattr(model_config, "quantization", None) is None:
            _require_all(model, loaded)

    def _tensors(
        self, wanted: Sequence[_Wanted], keywords: Keywords
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        for each in wanted:
            for source in _sources(self._folder(each), each.patterns):
                with closing(weights(source, **keywords)) as pairs:
                    yield from map(partial(_prefixed, each.prefix), pairs) if each.prefix else pairs

    def _folder(self, wanted: _Wanted) -> str:
        """Return the directory that holds a checkpoint, fetched from the hub if it is not on this machine."""
        if os.path.isdir(wanted.model):
            return wanted.model
        hub = import_module("huggingface_hub")  # vLLM requires it
        found: str = hub.snapshot_download(
            wanted.model,
            revision=wanted.revision,
            cache_dir=self.load_config.download_dir,
            allow_patterns=list(dict.fromkeys([*wanted.patterns, *_WANTED])),
            ignore_patterns=self.load_config.ignore_patterns,
        )
        return found

    def _shows_progress(self) -> bool:
        return bool(self.load_config.use_tqdm_on_load) and _rank() == 0


def _sources(folder: str, patterns: Sequence[str]) -> list[Path]:
    """Return what to open: the directory where its index says all, else the files of the first pattern with any."""
    for pattern in patterns:
        if pattern == _ALL and (Path(folder) / INDEX_NAME).exists():
            return [Path(folder)]  # beside the indexed shards there may be all of it once more in one file
        if pattern.endswith(".safetensors") and (found := sorted(Path(folder).glob(pattern))):
            return found
    raise CheckpointNotFoundError("there are no safetensors files", path=folder, expected=" or ".join(patterns))


def _prefixed(prefix: str, pair: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    return prefix + pair[0], pair[1]


def _device(model: nn.Module) -> torch.device:
    if _num_ranks() > 1:
        return torch.device("cpu")
    devices: Iterator[torch.device] = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def _num_ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _rank() -> int:
    return torch.distributed.get_rank() if _num_ranks() > 1 else 0


def _require_all(model: nn.Module, loaded: set[str]) -> None:
    """Refuse a model of which a part stayed as it was made: it would answer, and wrongly.

    What a quantization method makes itself after the load (scales) need not be in a checkpoint.
    """
    missing = {name for name, _ in model.named_parameters()} - loaded
    for name, module in model.named_modules():
        if hasattr(getattr(module, "quant_method", None), "process_weights_after_loading"):
            missing -= {f"{name}.{parameter}" if name else parameter for parameter, _ in module.named_parameters()}
    if missing:
        shown = ", ".join(map(printable, sorted(missing)[:_SHOWN_NAMES]))
        raise ValueError(f"{len(missing)} of the model's weights are not in the checkpoint: {shown}")
