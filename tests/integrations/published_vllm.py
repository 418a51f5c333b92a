"""A stand-in for vLLM with the interface that it publishes for loaders of others, and no more.

Written from vLLM 0.33.0 (`vllm.model_executor.model_loader`, `vllm.config.load`); `check_published.py` compares it. The
same names and signatures stand in 0.15.0 and 0.28.0. What is not loading (configurations, quantization,
building a model from its name) is left out: `load_model` here is given the model's class.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

VERSION = "0.33.0"


@dataclass
class LoadConfig:
    """`vllm.config.load.LoadConfig`, as far as loading safetensors goes."""

    load_format: str = "auto"
    download_dir: str | None = None
    model_loader_extra_config: dict = field(default_factory=dict)
    device: str | None = None
    ignore_patterns: list[str] | str = field(default_factory=lambda: ["original/**/*"])
    safetensors_load_strategy: str | None = None
    use_tqdm_on_load: bool = True

    def __post_init__(self):
        self.load_format = self.load_format.lower()


class BaseModelLoader(ABC):
    """`vllm.model_executor.model_loader.BaseModelLoader`."""

    def __init__(self, load_config: LoadConfig):
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config) -> None:
        raise NotImplementedError

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config) -> None:
        raise NotImplementedError

    def load_model(self, vllm_config, model_config, prefix: str = "") -> nn.Module:
        device = self.load_config.device or vllm_config.device_config.device
        with torch.device(device):
            model = model_config.model_class()
        self.load_weights(model, model_config)
        return model.eval()


class DefaultModelLoader(BaseModelLoader):
    """`vllm.model_executor.model_loader.default_loader.DefaultModelLoader`: the filters that it makes before a load.

    vLLM takes the experts of a rank from its parallel configuration, here the configuration of the model has them.
    """

    def _init_ep_weight_filter(self, model_config) -> None:
        self.local_expert_ids = model_config.local_expert_ids

    def _init_mm_encoder_only_weight_filter(self, model, model_config) -> None:
        self._encoder_only_lm_prefixes = tuple(f"{name}." for name in model._language_model_names) or None
        self._encoder_only_weights_mapper = getattr(model, "hf_to_vllm_mapper", None)


def should_skip_weight(weight_name: str, local_expert_ids: set[int] | None) -> bool:
    """`vllm.model_executor.model_loader.ep_weight_filter.should_skip_weight`."""
    found = re.search(r"\.experts\.(\d+)\.", weight_name)
    if local_expert_ids is None or found is None or not weight_name.endswith((".weight", ".weight_packed")):
        return False
    return int(found[1]) not in local_expert_ids


def make() -> SimpleNamespace:
    """Return fresh modules by name, and the warnings that registering gave."""
    loaders: dict[str, type[BaseModelLoader]] = {}
    warnings: list[str] = []

    def register_model_loader(load_format: str):
        def wrap(loader_class):
            if load_format in loaders:
                warnings.append(f"{load_format} is already registered")
            if not issubclass(loader_class, BaseModelLoader):
                raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")
            loaders[load_format] = loader_class
            return loader_class

        return wrap

    def get_model_loader(load_config: LoadConfig) -> BaseModelLoader:
        if load_config.load_format not in loaders:
            raise ValueError(f"Load format `{load_config.load_format}` is not supported")
        return loaders[load_config.load_format](load_config)

    names = (
        "vllm",
        "vllm.config",
        "vllm.config.load",
        "vllm.model_executor",
        "vllm.model_executor.model_loader",
        "vllm.model_executor.model_loader.base_loader",
        "vllm.model_executor.model_loader.default_loader",
        "vllm.model_executor.model_loader.ep_weight_filter",
    )
    modules = {name: ModuleType(name) for name in names}
    modules["vllm"].__version__ = VERSION
    modules["vllm.config.load"].LoadConfig = LoadConfig
    modules["vllm.model_executor.model_loader.base_loader"].BaseModelLoader = BaseModelLoader
    modules["vllm.model_executor.model_loader.default_loader"].DefaultModelLoader = DefaultModelLoader
    modules["vllm.model_executor.model_loader.ep_weight_filter"].should_skip_weight = should_skip_weight
    package = modules["vllm.model_executor.model_loader"]
    package.BaseModelLoader = BaseModelLoader
    package.register_model_loader = register_model_loader
    package.get_model_loader = get_model_loader
    return SimpleNamespace(modules=modules, warnings=warnings)


def install(monkeypatch) -> SimpleNamespace:
    """Put fresh modules where `import vllm` finds them."""
    made = make()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in made.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made
