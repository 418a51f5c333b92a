"""The record of vLLM's and SGLang's interfaces: a release that moved is noticed; the stand-in is as the record says.

The releases themselves are not installed here. `make frameworks` downloads the newest ones and compares them.
"""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
from integrations import published_vllm
from integrations.check_published import CONTRACTS, Contract, check
from integrations.test_vllm import LOADERS

import stio.compat
from stio.integrations import sglang

VLLM = {
    "vllm/plugins/__init__.py": 'DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"',
    "vllm/model_executor/model_loader/__init__.py": """
from .base_loader import BaseModelLoader
def register_model_loader(load_format): ...
def get_model_loader(load_config): ...
""",
    "vllm/model_executor/model_loader/base_loader.py": """
class BaseModelLoader(ABC):
    def __init__(self, load_config): ...
    @abstractmethod
    def download_model(self, model_config): ...
    @abstractmethod
    def load_weights(self, model, model_config): ...
    def load_model(self, vllm_config, model_config, prefix=""): ...
""",
    "vllm/config/load.py": """
class LoadConfig:
    load_format: str
    download_dir: str
    model_loader_extra_config: dict
    ignore_patterns: list
    use_tqdm_on_load: bool
    safetensors_load_strategy: str
""",
    "vllm/config/model.py": """
class ModelConfig:
    model_weights: str
""",
    "vllm/model_executor/model_loader/ep_weight_filter.py": """
def should_skip_weight(weight_name, local_expert_ids): ...
""",
    "vllm/model_executor/model_loader/default_loader.py": """
class DefaultModelLoader:
    class Source:
        model_or_path: str
        revision: str
        subfolder: str
        prefix: str
        fall_back_to_pt: bool
        allow_patterns_overrides: list
        is_unused_weight: object
    def get_all_weights(self, model_config, model):
        a = getattr(model, "fall_back_to_pt_during_load", True)
        b = getattr(model, "allow_patterns_overrides", None)
        c = getattr(model, "is_unused_checkpoint_weight", None)
        d = getattr(model, "secondary_weights", ())
    def _init_ep_weight_filter(self, model_config): ...
    def _init_mm_encoder_only_weight_filter(self, model, model_config): ...
""",
    "vllm/model_executor/model_loader/reload/inplace.py": """
def reload_weights(vllm_config, model, weights_iterator, weights_path, is_checkpoint_format):
    if not hasattr(model_loader, "get_all_weights"):
        raise NotImplementedError
""",
    "vllm/model_executor/model_loader/checkpoint_weight_patch.py": """
class CheckpointWeightPatch(NamedTuple):
    name: str
    shape: tuple
    dtype: object
    values: object
    indices: object = None
def load_checkpoint_weight_patches(model, patches, *, max_chunk_bytes=1, validate_unique_indices=True): ...
""",
    "vllm/distributed/weight_transfer/factory.py": """
class WeightTransferEngineFactory:
    @classmethod
    def register_engine(cls, name, module_path_or_cls, class_name=None): ...
""",
    "vllm/distributed/weight_transfer/base.py": """
class WeightTransferEngine(ABC):
    def __init__(self, config, vllm_config, device, model): ...
    @abstractmethod
    def init_transfer_engine(self, init_info): ...
    @abstractmethod
    def start_weight_update(self): ...
    @abstractmethod
    def finish_weight_update(self): ...
    @abstractmethod
    def receive_weights(self, update_info): ...
    @abstractmethod
    def shutdown(self): ...
""",
}
SGLANG = {
    "sglang/srt/plugins/__init__.py": 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"\ndef load_plugins(): ...',
    "sglang/srt/managers/scheduler.py": "def run():\n    load_plugins()",
    "sglang/srt/environ.py": 'class Envs:\n    SGLANG_PLUGINS = EnvStr("")',
    "sglang/srt/model_loader/weight_utils.py": """
import safetensors.torch
def iterate(path):
    safetensors.torch.load(b"")
    safetensors.safe_open(path)
""",
}
MOVED = [
    (VLLM, "vllm.general_plugins", "vllm.plugins"),
    (VLLM, "def register_model_loader(load_format)", "def register_model_loader(load_format, version)"),
    (VLLM, "def register_model_loader", "def register_loader"),
    (VLLM, "from .base_loader import BaseModelLoader", "from .base_loader import ModelLoader"),
    (VLLM, "def load_weights(self, model, model_config)", "def load_weights(self, vllm_config)"),
    (VLLM, "    def load_model", "    @abstractmethod\n    def load_model"),
    (VLLM, "    use_tqdm_on_load: bool\n", ""),
    (VLLM, "        prefix: str\n", ""),
    (VLLM, "def _init_ep_weight_filter(self, model_config)", "def _init_ep_weight_filter(self)"),
    (VLLM, "weight_name, local_expert_ids", "weight_name"),
    (VLLM, "model_weights", "weights"),
    (VLLM, "secondary_weights", "further_weights"),
    (VLLM, "class DefaultModelLoader", "class ModelLoader"),
    (VLLM, "def get_all_weights(self, model_config, model)", "def get_all_weights(self, model, model_config)"),
    (VLLM, 'hasattr(model_loader, "get_all_weights")', 'hasattr(model_loader, "iterate")'),
    (VLLM, "    values: object\n", ""),
    (VLLM, "module_path_or_cls, class_name=None", "engine_cls"),
    (VLLM, "def shutdown(self)", "def close(self)"),
    (SGLANG, "sglang.srt.plugins", "sglang.plugins"),
    (SGLANG, "def load_plugins()", "def load_plugins(group)"),
    (SGLANG, "    load_plugins()", "    load()"),
    (SGLANG, "SGLANG_PLUGINS", "SGLANG_ALL"),
    (SGLANG, "safetensors.safe_open", "safetensors.open"),
]


def written(files: dict[str, str], directory: Path) -> Path:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


@pytest.mark.parametrize("files", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_a_release_as_recorded(tmp_path: Path, files: dict[str, str]) -> None:
    assert check(written(files, tmp_path / "directory")) == []
    with ZipFile(tmp_path / "wheel.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    assert check(tmp_path / "wheel.whl") == []


@pytest.mark.matrix
@pytest.mark.parametrize(("files", "old", "new"), MOVED, ids=[f"{old} -> {new}" for _, old, new in MOVED])
def test_a_release_that_moved(tmp_path: Path, files: dict[str, str], old: str, new: str) -> None:
    assert sum(text.count(old) for text in files.values()) >= 1
    changed = {name: text.replace(old, new) for name, text in files.items()}
    written(changed, tmp_path)
    assert check(tmp_path)
    script = Path(__file__).with_name("check_published.py")
    if old == MOVED[0][1]:
        # A real interpreter without torch: the script runs where neither stio nor torch is.
        done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True)
        assert done.returncode == 1 and "expected 'vllm.general_plugins'" in done.stdout


@pytest.mark.parametrize("contract", CONTRACTS.values(), ids=list(CONTRACTS))
def test_a_file_that_is_gone_or_broken(tmp_path: Path, contract: Contract) -> None:
    files = {"vllm": VLLM, "sglang": SGLANG}[contract.package]
    last = contract.facts[-1].path
    written(files | {last: "def ("}, tmp_path)
    assert "SyntaxError" in check(tmp_path)[0]
    (tmp_path / last).unlink()
    assert "not found" in check(tmp_path)[0]
    (tmp_path / "none").mkdir()
    assert "neither vllm nor sglang" in check(tmp_path / "none")[0]


@pytest.mark.parametrize("package", CONTRACTS)
def test_the_installed_release(package: str) -> None:
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    assert check(Path(found.origin).parents[1]) == []


def test_the_stand_in_is_as_recorded() -> None:
    """`published_vllm.py` has the parameters of the record."""
    tree = ast.parse(inspect.getsource(published_vllm))
    assert CONTRACTS["vllm"].version == published_vllm.VERSION
    for fact in CONTRACTS["vllm"].facts:
        if fact.path.endswith("base_loader.py"):
            assert fact.find(tree) == fact.expected, fact.about
    package = published_vllm.make().modules[LOADERS]
    assert list(inspect.signature(package.register_model_loader).parameters) == ["load_format"]
    assert list(inspect.signature(package.get_model_loader).parameters) == ["load_config"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("names", "installs"), [(None, False), ("", False), ("other", False), ("stio", True), ("other, stio", True)]
)
def test_sglang_s_plugin_is_asked_for(monkeypatch: pytest.MonkeyPatch, names: str | None, installs: bool) -> None:
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if names is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", names)
    import safetensors
    import safetensors.torch

    original = safetensors.safe_open
    try:
        sglang.register()
        assert (safetensors.safe_open is not original) == installs
        assert (safetensors.torch.load.__module__ == "safetensors.torch") != installs
    finally:
        stio.compat.uninstall()


def test_sglang_s_entry_point() -> None:
    """Its import needs neither torch nor SGLang."""
    code = (
        "import sys; from importlib.metadata import EntryPoint as E; "
        "E('stio', 'stio.integrations.sglang:register', 'sglang.srt.plugins').load()(); "
        "assert not {'torch', 'safetensors', 'sglang'} & sys.modules.keys()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "SGLANG_PLUGINS"}
    # A real interpreter without torch: what it imports.
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
