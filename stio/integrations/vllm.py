"""A load format of vLLM: `vllm serve MODEL --load-format stio`, by an entry point that vLLM calls in each process.

The import of this module imports neither vLLM nor CUDA: `register`, which vLLM calls, makes the class of the loader.
It uses only the public interface for loaders (`register_model_loader`, `BaseModelLoader`), and the attributes by which
models name their files for the loaders of vLLM. vLLM is too large for the tests of this project. They check the loader
with a stand-in of that interface, and with vLLM where it is installed; `make frameworks` compares the interface with
the newest release.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, new_class
from typing import Any

import torch
from torch import nn

from stio.errors import AmbiguousCheckpointError, CheckpointNotFoundError, listed, printable
from stio.format.directory import INDEX_NAME, require_complete, why_none, without_index
from stio.format.naming import FILE_SUFFIX, is_hidden, is_index
from stio.integrations.iterators import weights
from stio.loading.open import open_checkpoint
from stio.loading.options import LoadOptions
from stio.storage.base import Root
from stio.storage.open import OneFile, open_directory

__all__ = ["LOAD_FORMAT", "register"]

LOAD_FORMAT = "stio"
"""Value of `--load-format`."""

_LOADERS = "vllm.model_executor.model_loader"
_ALL = f"*{FILE_SUFFIX}"
_DOWNLOADS = (_ALL, f"*{INDEX_NAME.removeprefix('model')}")


def register() -> None:
    """Register the load format `stio`. vLLM calls this, possibly more than once."""
    _register(import_module(_LOADERS))


@cache
def _register(loaders: ModuleType) -> None:
    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": __name__, "__doc__": _Loading.__doc__}

    loader = new_class("StioModelLoader", (_Loading, loaders.BaseModelLoader), exec_body=fill)
    loaders.register_model_loader(LOAD_FORMAT)(loader)


_KEYWORDS = [field.name for field in fields(LoadOptions)]
"""Keys that `--model-loader-extra-config` may have: the keywords of `stio.open`."""


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """One checkpoint with weights of a model."""

    model: str
    """A directory, or a repository of the hub."""
    revision: str | None
    """Revision on the hub."""
    prefix: str = ""
    """Prefix for each name."""
    patterns: Sequence[str] = (_ALL,)
    """Patterns of file names. The first pattern that matches any file counts."""
    subfolder: str | None = None
    """Directory of the files below the model's."""
    is_unused: Callable[[str], bool] | None = None
    """Whether the model does not use a weight, by its name without the prefix. Such a weight is not read."""

    @property
    def downloads(self) -> list[str]:
        """Patterns of the files to download."""
        below = f"{self.subfolder}/" if self.subfolder else ""
        return [below + pattern for pattern in dict.fromkeys([*self.patterns, *_DOWNLOADS])]


class _Loading:
    """Loads safetensors with stio.

    `--model-loader-extra-config` takes the keywords of `stio.open`. Tensors go to the device of the model. With several
    ranks they stay on the CPU: the ranks share the pages of the files, and each copies its part.
    """

    load_config: Any

    def __init__(self, load_config: Any) -> None:
        """Check the extra configuration before a model is made.

        Raises:
            ValueError: It has a key that is not a keyword of `stio.open`, or a value out of range.
            TypeError: A value has the wrong type.
        """
        super().__init__(load_config)  # type: ignore[call-arg]  # the next class is BaseModelLoader of vLLM
        extra = dict(load_config.model_loader_extra_config or {})
        if unknown := sorted(map(str, extra.keys() - _KEYWORDS)):
            raise ValueError(
                f"load format {LOAD_FORMAT!r} does not take {', '.join(map(printable, unknown))} in the extra "
                f"configuration; it takes {', '.join(_KEYWORDS)}"
            )
        LoadOptions(**extra)
        self._extra: dict[str, Any] = dict(extra)

    def download_model(self, model_config: Any) -> None:
        """Download the files, if they are on the hub."""
        self._directory(_Checkpoint(model_config.model, model_config.revision))

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Pass the tensors of the checkpoint to the `load_weights` of the model.

        Raises:
            ValueError: The model reports the weights that it took, and some are missing.
            StioError: See `stio.load`.
        """
        with closing(
            self._all_weights(model_config, model, _device(model))
        ) as tensors:  # an error in the model ends it
            loaded = model.load_weights(tensors)  # type: ignore[operator]  # every model of vLLM has it
        if loaded is not None and getattr(model_config, "quantization", None) is None:
            _require_all(model, loaded)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Return the tensors of the checkpoint. vLLM calls this when a running engine reloads its weights.

        They are on the CPU, unless the extra configuration has a `device`: the memory of the model's device is in use.

        Raises:
            StioError: At a step; see `stio.load`.
        """
        return self._all_weights(model_config, model, torch.device("cpu"))

    def _all_weights(
        self, model_config: Any, model: nn.Module, device: torch.device
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        keywords: dict[str, Any] = {"device": device, "progress": self._shows_progress(), **self._extra}
        # Models use these attributes to name their files for the loaders of vLLM.
        patterns = getattr(model, "allow_patterns_overrides", None) or (_ALL,)
        is_unused = getattr(model, "is_unused_checkpoint_weight", None)
        checkpoints = [
            _Checkpoint(model_config.model, model_config.revision, patterns=patterns, is_unused=is_unused),
            *map(_secondary, getattr(model, "secondary_weights", ())),
        ]
        return self._tensors(checkpoints, keywords)

    def _tensors(
        self, checkpoints: Sequence[_Checkpoint], keywords: Mapping[str, Any]
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        follow_symlinks = keywords.get("follow_symlinks", False)
        for checkpoint in checkpoints:
            names = None if checkpoint.is_unused is None else partial(_is_used, checkpoint.is_unused)
            with open_directory(self._directory(checkpoint), follow_symlinks=follow_symlinks) as root:
                for source in _sources(root, checkpoint.patterns):
                    with closing(weights(source, names=names, **keywords)) as pairs:
                        yield from map(partial(_prefixed, checkpoint.prefix), pairs) if checkpoint.prefix else pairs

    def _directory(self, checkpoint: _Checkpoint) -> str:
        """Return the directory of a checkpoint; downloads it from the hub if it is not a local directory."""
        below = checkpoint.subfolder or ""
        if os.path.isdir(checkpoint.model):
            return os.path.join(checkpoint.model, below)
        hub = import_module("huggingface_hub")  # vLLM requires it
        found: str = hub.snapshot_download(
            checkpoint.model,
            revision=checkpoint.revision,
            cache_dir=self.load_config.download_dir,
            allow_patterns=checkpoint.downloads,
            ignore_patterns=self.load_config.ignore_patterns,
        )
        return os.path.join(found, below)

    def _shows_progress(self) -> bool:
        return bool(self.load_config.use_tqdm_on_load) and _rank() == 0


def _sources(root: Root, patterns: Sequence[str]) -> Sequence[Root]:
    """Return the directory if it has an index; otherwise the files of the first pattern that matches any.

    Raises:
        CheckpointNotFoundError: There is no such file, or by their names shards are missing.
        AmbiguousCheckpointError: Two files hold one tensor.
        UnsafePathError: A file is a link that leads out of the directory.
        StioError: A file is no safetensors file, or the system refused.
    """
    directory = Path(root.path)
    for pattern in patterns:
        if pattern == _ALL and os.path.lexists(directory / INDEX_NAME):
            return [root]  # other files beside the indexed shards may hold the same tensors again
        if not pattern.endswith(FILE_SUFFIX):
            continue
        names = [
            str(path.relative_to(directory)) for path in sorted(directory.glob(pattern)) if not is_hidden(path.name)
        ]
        listing = root.listdir()
        complete = without_index([*names, *filter(is_hidden, listing)])
        for one in complete:
            require_complete(one.files, path=root.path)
        if names and not any(map(is_index, listing)):  # shards that only an index names are of no checkpoint
            names = [name for one in complete for name in one.files]
            if not names:
                raise CheckpointNotFoundError(why_none(listing), path=root.path, found=listed(listing))
        if names:
            _require_distinct(root, names)  # an error comes before the first tensor
            return [OneFile(root, name) for name in names]
    raise CheckpointNotFoundError("there are no safetensors files", path=root.path, expected=" or ".join(patterns))


def _require_distinct(root: Root, names: Sequence[str]) -> None:
    """Require that each tensor is in one of the files: otherwise the model would take the last one, silently."""
    file_of: dict[str, str] = {}
    for name in names:
        with closing(open_checkpoint(OneFile(root, name))) as opened:
            for tensor in opened.headers[0].names:
                if file_of.setdefault(tensor, name) != name:
                    raise AmbiguousCheckpointError(
                        f"two files hold the tensor {printable(tensor)!r}, and there is no index; remove the files of "
                        "another checkpoint from the directory",
                        path=root.path,
                        found=f"{file_of[tensor]} and {name}",
                    )


def _secondary(source: Any) -> _Checkpoint:
    """Return a further checkpoint of a model; older releases of vLLM do not have all attributes."""
    return _Checkpoint(
        source.model_or_path,
        source.revision,
        source.prefix,
        getattr(source, "allow_patterns_overrides", None) or (_ALL,),
        getattr(source, "subfolder", None),
        getattr(source, "is_unused_weight", None),
    )


def _is_used(is_unused: Callable[[str], bool], name: str) -> bool:
    return not is_unused(name)


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
    """Raise an error if a weight was not loaded: the model would run, with wrong results.

    Weights that a quantization method makes after the load (scales) need not be in a checkpoint.
    """
    missing = {name for name, _ in model.named_parameters()} - loaded
    for name, module in model.named_modules():
        if hasattr(getattr(module, "quant_method", None), "process_weights_after_loading"):
            missing -= {f"{name}.{parameter}" if name else parameter for parameter, _ in module.named_parameters()}
    if missing:
        raise ValueError(f"{len(missing)} of the model's weights are not in the checkpoint: {listed(sorted(missing))}")
