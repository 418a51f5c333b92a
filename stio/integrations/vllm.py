"""A load format of vLLM: `vllm serve MODEL --load-format stio`, by an entry point that vLLM calls in each process.

The import of this module imports neither vLLM nor CUDA: `register`, which vLLM calls, makes the class of the loader.
It uses the public interface for loaders (`register_model_loader`, `BaseModelLoader`), the attributes by which models
name their files, and the filters by which vLLM's own loader leaves out what a rank does not keep.

All that can be checked is checked when vLLM asks for the tensors: vLLM changes a running model after that, and an
error would then end the engine. `make test` runs the loader with a stand-in of the interface, and `make engines` with
vLLM itself; `make frameworks` compares the interface with the newest release.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from stio import sync
from stio.errors import AmbiguousCheckpointError, CheckpointNotFoundError, MismatchError, StioError, listed, printable
from stio.format.files import FILE_SUFFIX, INDEX_SUFFIX, FileName, NamedCheckpoint, choose
from stio.limits import Limits
from stio.loading import LoadOptions
from stio.remote import DiskCache
from stio.runtime.reports import Trace
from stio.storage import Root, SingleFileRoot, open_directory
from stio.storage.checkpoint import SourceLike
from stio.text import is_url

__all__ = ["LOAD_FORMAT", "register"]

LOAD_FORMAT = "stio"
"""Value of `--load-format`."""

_LOADERS = "vllm.model_executor.model_loader"
_ALL = f"*{FILE_SUFFIX}"
_DOWNLOADS = (_ALL, f"*{FILE_SUFFIX}{INDEX_SUFFIX}")


def register() -> None:
    """Register the load format and the weight transfer backend `stio`. vLLM calls this, possibly more than once."""
    _register(import_module(_LOADERS))
    with suppress(ImportError):  # of a release without backends
        _register_backend(import_module("vllm.distributed.weight_transfer"))


@cache
def _register(loaders: ModuleType) -> None:
    class StioModelLoader(_Loading, loaders.BaseModelLoader):  # type: ignore[misc, name-defined]  # known at run time
        __doc__ = _Loading.__doc__

    loaders.register_model_loader(LOAD_FORMAT)(StioModelLoader)


@cache
def _register_backend(transfer: ModuleType) -> None:
    module = f"{__name__}_updates"  # vLLM imports it when an engine with the backend starts
    transfer.WeightTransferEngineFactory.register_engine(LOAD_FORMAT, module, "StioWeightTransferEngine")


_KEYWORDS = tuple(name for name in signature(sync.open).parameters if name != "source")
"""Keys that `--model-loader-extra-config` may have: the keywords of `stio.open`."""
_TRACK = "enable_weights_track"
"""A further key, that of vLLM's own loader: whether missing weights are an error."""
_OBJECTS = {"limits": Limits, "cache": DiskCache}
"""Keywords whose value is an object, which is made of the keys of a JSON object."""

_EXPERTS = ".experts."

_Shape = tuple[int, ...]

_loaded_from: WeakKeyDictionary[nn.Module, dict[str, _Shape]] = WeakKeyDictionary()
"""By model, the tensors of its first checkpoint that it took, by name, with their shapes. A reload must have them."""

logger = logging.getLogger(f"{_LOADERS}.{LOAD_FORMAT}")  # vLLM shows the loggers below its own


@dataclass(frozen=True, slots=True)
class _ModelCheckpoint:
    """One checkpoint with weights of a model."""

    model: str
    """A directory, a repository of the hub, or a URL."""
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
    local_expert_ids: set[int] | None = None
    """Set by vLLM's filter: the experts of this rank; None: all."""
    _encoder_only_lm_prefixes: tuple[str, ...] | None = None
    """Set by vLLM's filter: the parts of the model that this engine leaves out; None: none."""
    _encoder_only_weights_mapper: Any = None

    def __init__(self, load_config: Any) -> None:
        """Check the configuration before a model is made.

        Raises:
            ValueError: The extra configuration has a key that it does not take, or a value that is wrong; or a strategy
                of vLLM's own loader was chosen.
            TypeError: A value has the wrong type.
        """
        super().__init__(load_config)  # type: ignore[call-arg]  # the next class is BaseModelLoader of vLLM
        if (strategy := load_config.safetensors_load_strategy) not in (None, "lazy"):
            raise ValueError(
                f"load format {LOAD_FORMAT!r} does not take safetensors_load_strategy={strategy!r}; memory='copy' or "
                "memory='map' in the extra configuration chooses how files are read"
            )
        extra = dict(load_config.model_loader_extra_config or {})
        if unknown := sorted(map(str, extra.keys() - {*_KEYWORDS, _TRACK})):
            raise ValueError(
                f"load format {LOAD_FORMAT!r} does not take {', '.join(map(printable, unknown))} in the extra "
                f"configuration; it takes {', '.join(_KEYWORDS)}, {_TRACK}"
            )
        for key in _OBJECTS.keys() & extra.keys():
            try:
                extra[key] = _OBJECTS[key](**extra[key]) if isinstance(extra[key], Mapping) else extra[key]
            except TypeError as error:
                raise ValueError(f"{key} in the extra configuration of load format {LOAD_FORMAT!r}: {error}") from None
        self._trace_path: str | None = None
        if isinstance(extra.get("trace"), str):
            self._trace_path, extra["trace"] = extra["trace"], Trace()
        self._tracks = extra.pop(_TRACK, True)
        if not isinstance(self._tracks, bool):
            raise TypeError(f"{_TRACK} takes true or false, not {self._tracks!r}")
        LoadOptions(**extra)
        self._extra: dict[str, Any] = extra

    def download_model(self, model_config: Any) -> None:
        """Download the files, if they are on the hub."""
        if not is_url(model := _model_of(model_config)):
            self._directory(_ModelCheckpoint(model, model_config.revision))

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Pass the tensors of the checkpoint to the `load_weights` of the model.

        Raises:
            ValueError: The model reports the weights that it took, and some are missing.
            StioError: See `stio.load`.
        """
        began = perf_counter()
        pairs = self._all_weights(model_config, model, _device(model))
        shapes: dict[str, _Shape] = next(pairs)
        with closing(pairs):  # an error in the model ends it
            loaded = model.load_weights(pairs)  # type: ignore[operator]  # every model of vLLM has it
        if _rank() == 0:
            logger.info("Loading weights took %.2f seconds", perf_counter() - began)
        if self._trace_path is not None:
            self._extra["trace"].save_chrome(f"{self._trace_path}.{_rank()}" if _num_ranks() > 1 else self._trace_path)
        if loaded is not None and self._tracks:
            is_quantized = getattr(model_config, "quantization", None) is not None
            _require_all(model, loaded, shapes, is_quantized=is_quantized)
            taken_by = _parameters_of(model, shapes, loaded)
            _loaded_from.setdefault(model, {name: shape for name, shape in shapes.items() if taken_by[name]})

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Return the tensors of the checkpoint. vLLM calls this when a running engine reloads its weights.

        They are on the CPU, unless the extra configuration has a `device`: the memory of the model's device is in use.
        All files are open, and are checked, when this returns.

        Raises:
            MismatchError: The checkpoint does not have the tensors, or the shapes, of the one before.
            StioError: See `stio.load`. At a step only if a file cannot be read, or was cut since.
        """
        pairs = self._all_weights(model_config, model, torch.device("cpu"))
        next(pairs)
        return pairs

    def _all_weights(self, model_config: Any, model: nn.Module, device: torch.device) -> Generator[Any, None, None]:
        progress = bool(self.load_config.use_tqdm_on_load) and _rank() == 0
        keywords: dict[str, Any] = {"device": device, "progress": progress}
        if any(parameter.device.type not in ("cpu", "meta") for parameter in model.parameters()):
            keywords["memory"] = "auto"  # whether mappings alone are as fast was measured for models on the CPU
        keywords |= self._extra
        # Models use these attributes to name their files for the loaders of vLLM.
        patterns = getattr(model, "allow_patterns_overrides", None) or (_ALL,)
        is_unused = getattr(model, "is_unused_checkpoint_weight", None)
        checkpoints = [
            _ModelCheckpoint(_model_of(model_config), model_config.revision, patterns=patterns, is_unused=is_unused),
            *map(_secondary, getattr(model, "secondary_weights", ())),
        ]
        return self._tensors(model, checkpoints, self._filters(model, model_config), keywords)

    def _filters(self, model: nn.Module, model_config: Any) -> list[Callable[[str], bool]]:
        """Return the rules by which vLLM's own loader leaves out weights that this rank does not keep."""
        filters: list[Callable[[str], bool]] = []
        if getattr(model_config, "is_moe", False):
            import_module(f"{_LOADERS}.default_loader").DefaultModelLoader._init_ep_weight_filter(self, model_config)
            skip = import_module(f"{_LOADERS}.ep_weight_filter").should_skip_weight
            if self.local_expert_ids is not None:
                filters.append(lambda name: skip(name, self.local_expert_ids))
        if getattr(getattr(model_config, "multimodal_config", None), "mm_encoder_only", False):
            default = import_module(f"{_LOADERS}.default_loader").DefaultModelLoader
            default._init_mm_encoder_only_weight_filter(self, model, model_config)
            if prefixes := self._encoder_only_lm_prefixes:
                map_name = _mapping(self._encoder_only_weights_mapper)
                filters.append(lambda name: (map_name(name) or "").startswith(prefixes))
        return filters

    def _tensors(
        self,
        model: nn.Module,
        checkpoints: Sequence[_ModelCheckpoint],
        filters: Sequence[Callable[[str], bool]],
        keywords: Mapping[str, Any],
    ) -> Generator[Any, None, None]:
        """Open and check all checkpoints, yield the shapes of their tensors by name, and then yield the tensors.

        The caller takes the shapes at once: a generator closes what it opened, even if it is dropped, once it began.
        """
        with ExitStack() as opening:
            shapes: dict[str, _Shape] = {}
            parts: list[tuple[str, sync.Checkpoint, Callable[[str], bool] | None]] = []
            for checkpoint in checkpoints:
                unused = [*filters] if checkpoint.is_unused is None else [*filters, checkpoint.is_unused]
                names: Callable[[str], bool] | None = partial(_is_used, unused) if unused else None
                for opened in self._opened(checkpoint, keywords, opening):
                    parts.append((checkpoint.prefix, opened, names))
                    kept = filter(names, opened) if names is not None else opened
                    shapes |= {checkpoint.prefix + name: opened.info(name).shape for name in kept}
            if self._tracks:
                _require_as_before(model, shapes, checkpoints[0].model)
            yield shapes
            for prefix, opened, names in parts:
                with opened.stream(names) as pairs:
                    yield from map(partial(_prefixed, prefix), pairs) if prefix else pairs

    def _opened(
        self, checkpoint: _ModelCheckpoint, keywords: Mapping[str, Any], opening: ExitStack
    ) -> Iterator[sync.Checkpoint]:
        """Open the files of a checkpoint, which `opening` closes; each tensor must be in one of them."""
        sources: Sequence[SourceLike] = [checkpoint.model]
        if not is_url(checkpoint.model):
            directory, follow_symlinks = self._directory(checkpoint), keywords.get("follow_symlinks", False)
            root = opening.enter_context(open_directory(directory, follow_symlinks=follow_symlinks))
            sources = _sources(root, checkpoint.patterns)
            if keywords["device"] == torch.device("cpu") and not keywords.keys() & {"memory", "cache"}:
                if all(map(_is_on_local_disk, sources)):
                    keywords = {**keywords, "memory": "lazy"}
        file_of: dict[str, str] = {}
        for source in sources:
            opened = opening.enter_context(sync.open(source, **keywords))
            if isinstance(source, SingleFileRoot):
                _require_distinct(opened, source, file_of)
            yield opened

    def _directory(self, checkpoint: _ModelCheckpoint) -> str:
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


def _sources(root: Root, patterns: Sequence[str]) -> Sequence[Root]:
    """Return the directory if it has an index; otherwise the files of the first pattern that matches any.

    Raises:
        CheckpointNotFoundError: There is no such file, or by their names shards are missing.
        StorageError: The system refused.
    """
    directory = Path(root.path)
    for pattern in patterns:
        if pattern == _ALL and os.path.lexists(directory / f"model{FILE_SUFFIX}{INDEX_SUFFIX}"):
            return [root]  # other files beside the indexed shards may hold the same tensors again
        if not pattern.endswith(FILE_SUFFIX):
            continue
        names = [str(path.relative_to(directory)) for path in sorted(directory.glob(pattern)) if path.name[:1] != "."]
        listing = root.listdir()
        hidden = [name for name in listing if FileName(name).is_hidden]
        complete = NamedCheckpoint.without_index([*names, *hidden])
        for one in complete:
            one.require_complete(path=root.path)
        if names and not any(
            FileName(name).is_index for name in listing
        ):  # shards that only an index names are of no checkpoint
            names = [name for one in complete for name in one.files]
            if not names:
                choose(listing, path=root.path)  # raises
        if names:
            return [SingleFileRoot(root, name) for name in names]
    raise CheckpointNotFoundError("there are no safetensors files", path=root.path, expected=" or ".join(patterns))


def _is_on_local_disk(source: Root) -> bool:
    """Return whether files need only be mapped, since a local disk has them.

    The model copies each tensor once. On two cores threads that populate pages ahead of it took its time: 700 MB from
    a disk of which the kernel reads 8 MiB ahead took 2.0 of the time of vLLM's own loader, and 0.98 without them. Such
    pages also count as memory of the process.
    """
    try:
        for name in source.listdir():
            if name.endswith(FILE_SUFFIX) and not FileName(name).is_hidden:
                with closing(source.open(name)) as file:
                    if not getattr(file, "on_local_filesystem", False):  # only files of this machine have it
                        return False
    except StioError:  # it is reported when the checkpoint is opened
        return False
    return True


def _require_distinct(opened: sync.Checkpoint, source: SingleFileRoot, file_of: dict[str, str]) -> None:
    """Require that no file before this one holds its tensors: the model would take the last one, silently."""
    for tensor in opened:
        if file_of.setdefault(tensor, source.name) != source.name:
            raise AmbiguousCheckpointError(
                f"two files hold the tensor {printable(tensor)!r}, and there is no index; remove the files of another "
                "checkpoint from the directory",
                path=source.path,
                found=f"{file_of[tensor]} and {source.name}",
            )


def _secondary(source: Any) -> _ModelCheckpoint:
    """Return a further checkpoint of a model; older releases of vLLM do not have all attributes."""
    return _ModelCheckpoint(
        source.model_or_path,
        source.revision,
        source.prefix,
        getattr(source, "allow_patterns_overrides", None) or (_ALL,),
        getattr(source, "subfolder", None),
        getattr(source, "is_unused_weight", None),
    )


def _is_used(unused: Sequence[Callable[[str], bool]], name: str) -> bool:
    return not any(is_unused(name) for is_unused in unused)


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


def _model_of(model_config: Any) -> str:
    """Return where the weights are: for a model in an object store vLLM has the other files in a local directory."""
    model: str = getattr(model_config, "model_weights", "") or model_config.model
    return model


def _mapping(mapper: Any) -> Callable[[str], str | None]:
    """Return the function by which a model renames the tensors of a checkpoint; None: it does not load one."""
    return (lambda name: name) if mapper is None else mapper._map_name


def _parameters_of(model: nn.Module, names: Iterable[str], parameters: set[str]) -> dict[str, set[str]]:
    """Return, by its name, into which of these parameters of a model a tensor is loaded, as far as it can be known."""
    map_name = _mapping(getattr(model, "hf_to_vllm_mapper", None))
    packed = [
        (f".{part}.", f".{whole}.")
        for whole, parts in (getattr(model, "packed_modules_mapping", None) or {}).items()
        for part in parts
    ]
    of_experts: dict[str, set[str]] = {}
    for parameter in parameters:
        layer, found, _ = parameter.partition(_EXPERTS)
        if found:
            of_experts.setdefault(layer, set()).add(parameter)
    taken_by = {}
    for name in names:
        mapped = map_name(name) or ""
        taken_by[name] = {mapped, *(mapped.replace(part, whole) for part, whole in packed)} & parameters
        if not taken_by[name] and _EXPERTS in mapped:
            taken_by[name] = of_experts.get(mapped.partition(_EXPERTS)[0], set())
    return taken_by


def _require_as_before(model: nn.Module, shapes: Mapping[str, _Shape], path: str) -> None:
    """Require the tensors that the model was loaded from first: after this vLLM changes the model that runs.

    Raises:
        MismatchError: One is missing, or has another shape.
    """
    before = _loaded_from.get(model, {})
    if missing := before.keys() - shapes.keys():
        map_name = _mapping(getattr(model, "hf_to_vllm_mapper", None))
        others = {map_name(name) for name in shapes.keys() - before.keys()}  # other releases use other prefixes
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        tied = every - {name for name, _ in model.named_parameters()}
        missing = {name for name in missing if map_name(name) not in others | tied}
    if missing:
        raise MismatchError(
            f"{len(missing):,} weights that the model was loaded from are not in the checkpoint; nothing was changed",
            path=path,
            found=f"no {listed(sorted(missing))}",
        )
    if wrong := [name for name in before.keys() & shapes.keys() if before[name] != shapes[name]]:
        first = min(wrong)
        raise MismatchError(
            f"{len(wrong):,} weights have another shape than those that the model was loaded from; nothing was changed",
            path=path,
            expected=f"{printable(first)} of shape {list(before[first])}",
            found=list(shapes[first]),
        )


def _require_all(
    model: nn.Module, loaded: set[str], shapes: Mapping[str, _Shape], *, is_quantized: bool = False
) -> None:
    """Raise an error if a weight was not loaded: the model would run, with wrong results.

    What a quantization method makes after the load (scales) need not be in a checkpoint. Of a model that is quantized
    in part only what is named `weight` is required, and only in layers that are not quantized.

    vLLM lets pass all layers whose method processes them after the load, and in this version those that are not
    quantized have one too. Not every model reports all that it took from such a layer, so that a parameter passes here
    if the checkpoint has a tensor for it.
    """
    missing = {name for name, _ in model.named_parameters()} - loaded
    processed: set[str] = set()
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            own = {f"{name}.{parameter}" if name else parameter for parameter, _ in module.named_parameters()}
            if type(method).__name__.startswith("Unquantized"):
                processed |= own
            else:
                missing -= own
    if is_quantized:
        processed = missing = {name for name in missing if name.rpartition(".")[2] == "weight"}
    if missing & processed:
        missing = missing.difference(*_parameters_of(model, shapes, processed).values())
    if missing:
        raise ValueError(
            f"{len(missing):,} of the model's weights are not in the checkpoint: {listed(sorted(missing))}"
        )
