"""The loader for vLLM, held against the interface that vLLM publishes, and against vLLM itself where it is installed.

The stand-in is `published_vllm.py`, which names the version that it was written from. Nothing here serves a request.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import re
import shutil
import sys
import tomllib
import warnings
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub
import pytest
import torch
from integrations import published_vllm
from support import HookedRoot, nothing_left, ramp, run_python, save_file, save_sharded
from torch import nn

from stio import sync
from stio.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    FormatError,
    MismatchError,
    StioError,
    StorageError,
    UnsafePathError,
)
from stio.integrations import iterators, vllm
from stio.limits import Limits
from stio.storage.local import LocalFile

ROOT = Path(__file__).parents[2]
LOADERS = "vllm.model_executor.model_loader"


# vLLM itself takes part where it is.
@pytest.fixture(params=["published", *(["installed"] if find_spec("vllm") else [])])
def loaders(request, monkeypatch):
    """Return the module of vLLM's loaders, stio's among them."""
    if request.param == "published":
        published_vllm.install(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import of vLLM gives warnings of its own
        import_module(f"{LOADERS}.default_loader")
    vllm.register()
    return import_module(LOADERS)


def loader_of(loaders, **fields):
    config = import_module("vllm.config.load").LoadConfig(load_format="stio", **{"use_tqdm_on_load": False, **fields})
    return loaders.get_model_loader(config)


def config_of(model, **fields):
    return SimpleNamespace(**{"model": str(model), "revision": None, "quantization": None, **fields})


class Model(nn.Module):
    """A model as vLLM's are: it takes an iterator of names and tensors, and says what it took."""

    def __init__(self, names=("a", "b"), tracks=True):
        super().__init__()
        self.names, self.tracks = names, tracks
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((4, 6), torch.nan), requires_grad=False))
        self.devices = set()

    def load_weights(self, pairs):
        loaded = set()
        for name, tensor in pairs:
            self.devices.add(tensor.device)
            self.get_parameter(name).copy_(tensor)
            loaded.add(name)
        return loaded if self.tracks else None


def tensors_of(*names):
    return {name: ramp(4, 6, start=place) for place, name in enumerate(names)}


def require_loaded(model, tensors):
    for name, tensor in tensors.items():
        assert torch.equal(model.get_parameter(name), tensor), name


def seen_by_open(monkeypatch, source=None, **replaced):
    """Return a list of the keywords that checkpoints will be opened with; some of these are replaced, or the source."""
    seen, really = [], sync.open

    def open_(found, **keywords):
        seen.append(keywords)
        return really(source or found, **{**keywords, **replaced})

    monkeypatch.setattr(vllm.sync, "open", open_)
    return seen


@pytest.fixture
def directory(tmp_path):
    save_file(tensors_of("a", "b"), tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def _clean():
    gc.collect()
    with nothing_left():
        yield


# The plugin.


def test_the_entry_point_registers(monkeypatch):
    made = published_vllm.install(monkeypatch)
    group = "vllm.general_plugins"
    (entry,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group].items()
    register = EntryPoint(*entry, group).load()
    assert register is vllm.register
    for _ in range(3):  # vLLM's processes may call a plugin more than once
        register()
    assert made.warnings == []
    loader = loader_of(made.modules[LOADERS])
    assert isinstance(loader, published_vllm.BaseModelLoader)
    assert (type(loader).__name__, type(loader).__module__) == ("StioModelLoader", "stio.integrations.vllm")
    assert "extra-config" in type(loader).__doc__


def test_without_vllm_it_says_so(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="vllm"):
        vllm.register()


@pytest.mark.slow
def test_importing_it_touches_neither_vllm_nor_cuda(torch_zygote):
    code = """
        import sys, torch
        def touched(*_, **__):
            raise SystemExit("CUDA was touched")
        for name in ("_lazy_init", "init", "is_available", "device_count", "current_device", "get_device_properties"):
            setattr(torch.cuda, name, touched)
        torch._C._cuda_getDeviceCount = touched
        import stio.integrations.iterators, stio.integrations.vllm
        print([name for name in sys.modules if name.partition(".")[0] in ("vllm", "huggingface_hub", "transformers")])
    """
    done = run_python(code, python=torch_zygote.python)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_signatures_are_the_published_ones(loaders):
    mine = type(loader_of(loaders))
    for name in ("__init__", "download_model", "load_weights"):
        published = inspect.signature(getattr(loaders.BaseModelLoader, name)).parameters
        assert list(inspect.signature(getattr(mine, name)).parameters) == list(published)
    assert mine.load_model is loaders.BaseModelLoader.load_model
    assert not inspect.isabstract(mine)


# Loading.


def test_load_weights(loaders, directory):
    loader, model = loader_of(loaders), Model()
    loader.download_model(config_of(directory))  # it is here: nothing to do
    loader.load_weights(model, config_of(directory))
    require_loaded(model, tensors_of("a", "b"))
    assert model.devices == {torch.device("cpu")}


def test_load_model_goes_through_it(monkeypatch, directory):
    loaders = published_vllm.install(monkeypatch).modules[LOADERS]
    vllm.register()
    vllm_config = SimpleNamespace(device_config=SimpleNamespace(device="cpu"))
    model = loader_of(loaders).load_model(vllm_config, config_of(directory, model_class=Model))
    require_loaded(model, tensors_of("a", "b"))
    assert not model.training


@pytest.mark.parametrize(("extra", "device"), [({}, "cpu"), ({"device": "cuda:1"}, "cuda:1")])
def test_a_reload_reads_to_the_cpu_unless_told(loaders, directory, monkeypatch, extra, device):
    """A reload comes while the engine's caches fill the device."""
    seen = seen_by_open(monkeypatch, device="cpu")
    model = Model()
    monkeypatch.setattr(model, "parameters", lambda: iter([SimpleNamespace(device=torch.device("cuda:3"))]))
    loader = loader_of(loaders, model_loader_extra_config=extra)
    assert model.load_weights(loader.get_all_weights(config_of(directory), model)) == {"a", "b"}
    assert [torch.device(given["device"]) for given in seen] == [torch.device(device)]


def test_a_reload_reads_the_files_that_the_model_names(loaders, directory, tmp_path):
    loader, model = loader_of(loaders), Model(("a", "b", "tower_weight"))
    save_file({"weight": ramp(4, 6, start=9), "unused": ramp(1)}, tmp_path / "second" / "model.safetensors")
    model.secondary_weights = [
        SimpleNamespace(
            model_or_path=str(tmp_path / "second"),
            revision=None,
            prefix="tower_",
            is_unused_weight=lambda name: name == "unused",
        )
    ]
    loader.load_weights(model, config_of(directory))
    changed = {name: tensor + 7 for name, tensor in tensors_of("a", "b").items()}
    save_file(changed, tmp_path / "newer" / "model.safetensors")
    pairs = loader.get_all_weights(config_of(tmp_path / "newer"), model)
    model.load_weights(pairs)
    require_loaded(model, {**changed, "tower_weight": ramp(4, 6, start=9)})


def test_a_reload_that_ends_early_leaves_nothing(loaders, directory):
    pairs = loader_of(loaders).get_all_weights(config_of(directory), Model())
    name, tensor = next(pairs)
    del pairs  # vLLM does not close it; what remains is checked after each test
    assert torch.equal(tensor, tensors_of("a", "b")[name])


def test_extra_configuration_becomes_keywords(loaders, directory, monkeypatch):
    seen = seen_by_open(monkeypatch)
    text = '{"memory": "copy", "budget_bytes": 1048576, "switch_interval": 0.001, "device": "cpu"}'
    loader = loader_of(loaders, model_loader_extra_config=json.loads(text))
    loader.load_weights(model := Model(), config_of(directory))
    require_loaded(model, tensors_of("a", "b"))
    assert seen == [{"progress": False, **json.loads(text)}]


@pytest.mark.parametrize(
    ("is_local", "extra", "memory"),
    [
        (True, {}, "lazy"),
        (False, {}, None),
        (True, {"memory": "copy"}, "copy"),
        (True, {"device": "meta"}, None),
    ],
)
def test_files_on_a_local_disk_are_only_mapped(loaders, directory, monkeypatch, is_local, extra, memory):
    """The model copies each page once; pages that are mapped ahead of it would count as memory of the process."""
    seen = seen_by_open(monkeypatch, device="cpu")
    monkeypatch.setattr(LocalFile, "on_local_filesystem", is_local)
    loader_of(loaders, model_loader_extra_config=extra).load_weights(model := Model(), config_of(directory))
    require_loaded(model, tensors_of("a", "b"))
    assert [keywords.get("memory") for keywords in seen] == [memory]


def test_a_file_that_cannot_be_opened_is_an_error_of_the_load(loaders, directory, tmp_path):
    (directory / "model.safetensors").rename(tmp_path / "elsewhere")
    (directory / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError):
        loader_of(loaders).load_weights(Model(), config_of(directory))


@pytest.mark.parametrize(
    ("extra", "error", "text"),
    [
        ({"num_threads": 8}, ValueError, r"does not take num_threads.*it takes .*budget_bytes"),
        ({"memory": "copy", "colour\n": 1}, ValueError, r"colour\\n"),
        ({"memory": "none"}, ValueError, "memory="),
        ({"budget_bytes": "1 GBit"}, ValueError, "budget_bytes"),
        ({"limits": {"colour": 1}}, ValueError, "limits in the extra configuration.*colour"),
        ({"limits": {"max_rank": -1}}, ValueError, "max_rank"),
        ({"limits": 3}, TypeError, "limits="),
        ({"cache": {"path": "/cache"}}, ValueError, "cache in the extra configuration.*max_bytes"),
        ({"cache": "/cache"}, TypeError, "cache="),
        ({"trace": 1}, TypeError, "trace="),
        ({"verify": "yes"}, TypeError, "verify="),
        ({"enable_weights_track": "yes"}, TypeError, "enable_weights_track"),
        ({"streams": "copy"}, ValueError, "does not take streams"),
    ],
)
def test_extra_configuration_that_is_wrong(loaders, extra, error, text):
    with pytest.raises(error, match=text):
        loader_of(loaders, model_loader_extra_config=extra)


def test_extra_configuration_with_objects(loaders, directory, monkeypatch, tmp_path, caplog):
    seen = seen_by_open(monkeypatch)
    extra = {
        "limits": {"max_rank": 2},
        "cache": {"path": str(tmp_path / "cache"), "max_bytes": "1GB"},
        "trace": str(tmp_path / "trace.json"),
    }
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM shows what is logged itself
    with caplog.at_level("INFO", "vllm"):
        loader_of(loaders, model_loader_extra_config=extra).load_weights(Model(), config_of(directory))
    assert seen[0]["limits"] == Limits(max_rank=2)
    assert (seen[0]["cache"].path, seen[0]["cache"].max_bytes) == (str(tmp_path / "cache"), 10**9)
    assert json.loads((tmp_path / "trace.json").read_text())
    assert re.search(r"Loading weights took \d+\.\d\d seconds", caplog.text)


@pytest.mark.parametrize("strategy", ["eager", "prefetch", "torchao"])
def test_strategies_of_vllms_own_loader(loaders, strategy):
    with pytest.raises(ValueError, match=f"does not take safetensors_load_strategy='{strategy}'; memory='copy'"):
        loader_of(loaders, safetensors_load_strategy=strategy)
    loader_of(loaders, safetensors_load_strategy="lazy")


def test_a_model_in_an_object_store(loaders, directory, monkeypatch):
    """vLLM puts the other files into a local directory; the weights are read from the store."""
    seen = []
    really = sync.open
    monkeypatch.setattr(vllm.sync, "open", lambda source, **given: seen.append(source) or really(directory, **given))
    config = config_of("/local", model_weights="s3://bucket/model")
    loader = loader_of(loaders)
    loader.download_model(config)
    loader.load_weights(model := Model(), config)
    require_loaded(model, tensors_of("a", "b"))
    assert seen == ["s3://bucket/model"]


@pytest.mark.parametrize(("shows", "rank", "bars"), [(True, 0, True), (False, 0, False), (True, 1, False)])
def test_the_first_rank_shows_a_bar(loaders, directory, monkeypatch, shows, rank, bars):
    seen = seen_by_open(monkeypatch, device="cpu", progress=False)
    monkeypatch.setattr(vllm, "_num_ranks", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    loader_of(loaders, use_tqdm_on_load=shows).load_weights(Model(), config_of(directory))
    assert seen[0]["progress"] is bars


@pytest.mark.parametrize(("ranks", "device"), [(1, "cuda:3"), (2, "cpu")])
def test_tensors_go_where_the_model_is_unless_ranks_share_them(loaders, directory, monkeypatch, ranks, device):
    seen = seen_by_open(monkeypatch, device="cpu", progress=False)
    monkeypatch.setattr(vllm, "_num_ranks", lambda: ranks)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    model = Model()
    elsewhere = SimpleNamespace(device=torch.device("cuda:3"))
    on_meta = SimpleNamespace(device=torch.device("meta"))
    monkeypatch.setattr(model, "parameters", lambda: iter([on_meta, elsewhere]))
    loader_of(loaders).load_weights(model, config_of(directory))
    assert seen[0]["device"] == torch.device(device)


def test_one_process_is_one_rank():
    assert (vllm._num_ranks(), vllm._rank()) == (1, 0)


# Which files.


def test_the_index_says_all(loaders, tmp_path):
    save_sharded(tensors_of("a", "b"), tmp_path, 2)
    save_file(tensors_of("consolidated"), tmp_path / "consolidated.safetensors")
    loader_of(loaders).load_weights(model := Model(), config_of(tmp_path))
    require_loaded(model, tensors_of("a", "b"))


def test_files_without_an_index(loaders, tmp_path):
    tensors = tensors_of("a", "b")
    for name, tensor in tensors.items():
        save_file({name: tensor}, tmp_path / f"{name}.safetensors")
    loader_of(loaders).load_weights(model := Model(), config_of(tmp_path))
    require_loaded(model, tensors)
    with pytest.raises(AmbiguousCheckpointError):  # stio itself does not guess; vLLM's users expect it
        next(iterators.weights(tmp_path))


def test_the_files_that_the_model_chooses(loaders, directory):
    save_file(tensors_of("other"), directory / "part" / "x.safetensors")
    model = Model(("other",))
    model.allow_patterns_overrides = ["none/*.safetensors", "*.bin", "part/*.safetensors", "*.safetensors"]
    loader_of(loaders).load_weights(model, config_of(directory))
    require_loaded(model, tensors_of("other"))


def test_secondary_weights_and_their_prefix(loaders, directory, tmp_path):
    save_file({"weight": ramp(4, 6, start=9)}, tmp_path / "second" / "model.safetensors")
    model = Model(("a", "b", "tower_weight"))
    model.secondary_weights = [
        SimpleNamespace(
            model_or_path=str(tmp_path / "second"), revision=None, prefix="tower_", allow_patterns_overrides=None
        )
    ]
    loader_of(loaders).load_weights(model, config_of(directory))
    require_loaded(model, {**tensors_of("a", "b"), "tower_weight": ramp(4, 6, start=9)})


def test_secondary_weights_in_a_subfolder(loaders, directory, tmp_path, monkeypatch):
    save_file({"weight": ramp(4, 6, start=9), "unused": ramp(1)}, tmp_path / "second" / "tower" / "model.safetensors")
    model = Model(("a", "b", "tower_weight"))
    second = SimpleNamespace(
        model_or_path=str(tmp_path / "second"),
        revision=None,
        subfolder="tower",
        prefix="tower_",
        fall_back_to_pt=True,
        allow_patterns_overrides=None,
        is_unused_weight=lambda name: name == "unused",
    )
    model.secondary_weights = [second]
    loader_of(loaders).load_weights(model, config_of(directory))
    require_loaded(model, {**tensors_of("a", "b"), "tower_weight": ramp(4, 6, start=9)})

    asked = []
    fetched = lambda repository, **keywords: asked.append(keywords) or str(tmp_path / "second")  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    second.model_or_path = "org/tower"
    loader_of(loaders).load_weights(model, config_of(directory))
    assert [keywords["allow_patterns"] for keywords in asked] == [
        ["tower/*.safetensors", "tower/*.safetensors.index.json"]
    ]


def test_weights_that_the_model_does_not_use_are_not_read(loaders, tmp_path):
    save_file({**tensors_of("a", "b"), "draft.c": ramp(4, 6)}, tmp_path / "model.safetensors")
    model = Model()
    model.is_unused_checkpoint_weight = lambda name: name.startswith("draft.")
    loader_of(loaders).load_weights(model, config_of(tmp_path))  # the model does not know draft.c
    require_loaded(model, tensors_of("a", "b"))


class Parallel(nn.Module):
    """One rank of a layer whose weights are divided as vLLM's are: each loader takes its part of a whole tensor."""

    def __init__(self, rank, size):
        super().__init__()
        heads, kv_heads, width = 8 // size, max(1, 2 // size), 4
        self.rank, self.size, self.kv_rank = rank, size, rank // max(1, size // 2)
        self.sizes = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
        shapes = {
            "column": (48 // size, 16),
            "row": (16, 48 // size),
            "qkv": (sum(self.sizes.values()), 16),
            "gate_up": (2 * 24 // size, 16),
            "vocab": (-(-13 // 4) * 4 // size, 16),  # 13 words, padded to 16
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, pairs):
        loaded = set()
        for name, tensor in pairs:
            loaded.add(self.load(name, tensor))
        return loaded

    def load(self, name, tensor):
        if name == "row":
            length = self.row.shape[1]
            self.row.copy_(tensor.narrow(1, self.rank * length, length))
        elif name in self.sizes:
            begin = sum(list(self.sizes.values())[: list(self.sizes).index(name)])
            length, part = self.sizes[name], self.rank if name == "q" else self.kv_rank
            self.qkv.narrow(0, begin, length).copy_(tensor.narrow(0, part * length, length))
            return "qkv"
        elif name in ("gate", "up"):
            length = self.gate_up.shape[0] // 2
            target = self.gate_up.narrow(0, length * (name == "up"), length)
            target.copy_(tensor.narrow(0, self.rank * length, length))
            return "gate_up"
        elif name == "vocab":
            length = self.vocab.shape[0]
            part = tensor[self.rank * length : (self.rank + 1) * length]
            self.vocab[: len(part)].copy_(part)
        else:
            length = self.column.shape[0]
            self.column.copy_(tensor.narrow(0, self.rank * length, length))
        return name


@pytest.mark.matrix
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("memory", ["map", "copy", "lazy"])
def test_each_rank_takes_its_part(loaders, tmp_path, monkeypatch, size, memory):
    rows = {"column": 48, "q": 32, "k": 8, "v": 8, "gate": 24, "up": 24, "vocab": 13}
    tensors = {name: torch.randn(count, 16) for name, count in rows.items()} | {"row": torch.randn(16, 48)}
    save_sharded(tensors, tmp_path, 2)
    monkeypatch.setattr(vllm, "_num_ranks", lambda: size)
    for rank in range(size):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        expected = Parallel(rank, size)
        expected.load_weights(tensors.items())
        loader = loader_of(loaders, model_loader_extra_config={"memory": memory})
        loader.load_weights(found := Parallel(rank, size), config_of(tmp_path))
        for name, parameter in expected.named_parameters():
            assert torch.equal(found.get_parameter(name), parameter), (rank, name)
            assert parameter.any()


@pytest.mark.parametrize("name", ["model.bin", "readme.md"])
def test_a_directory_without_any(loaders, tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"\*\.safetensors"):
        loader_of(loaders).load_weights(Model(), config_of(tmp_path))


def test_what_is_on_the_hub_is_fetched(loaders, directory, monkeypatch):
    asked, signature = [], inspect.signature(huggingface_hub.snapshot_download)

    def snapshot_download(repository, **keywords):
        asked.append((repository, keywords))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loader = loader_of(loaders, download_dir="/cache", ignore_patterns=["original/**/*"])
    loader.download_model(config_of("org/name", revision="main"))
    loader.load_weights(model := Model(), config_of("org/name", revision="main"))
    require_loaded(model, tensors_of("a", "b"))
    repository, keywords = asked[0]
    assert repository == "org/name"
    assert keywords == {
        "revision": "main",
        "cache_dir": "/cache",
        "allow_patterns": ["*.safetensors", "*.safetensors.index.json"],
        "ignore_patterns": ["original/**/*"],
    }
    signature.bind(repository, **keywords)
    assert asked[1] == asked[0]


# What each rank reads, by the filters of vLLM's own loader; the stand-in's take their answer from the configuration.


@pytest.fixture
def published(monkeypatch):
    loaders = published_vllm.install(monkeypatch).modules[LOADERS]
    vllm.register()
    return loaders


class Listing(nn.Module):
    """A model that keeps the names of what it gets."""

    def load_weights(self, pairs):
        self.names = sorted(name for name, _ in pairs)
        return set(self.names)


@pytest.mark.parametrize(("experts", "read"), [({0, 2}, {0, 2}), (None, {0, 1, 2, 3})])
def test_a_rank_reads_its_experts(published, tmp_path, experts, read):
    names = [f"layers.0.experts.{k}.up_proj.weight" for k in range(4)]
    shared = ["a", "layers.0.experts.3.up_proj.scale"]
    save_file(tensors_of(*shared, *names), tmp_path / "model.safetensors")
    config, model = config_of(tmp_path, is_moe=True, local_expert_ids=experts), Listing()
    loader_of(published).load_weights(model, config)
    assert model.names == sorted([*shared, *(names[k] for k in read)])
    assert sorted(dict(loader_of(published).get_all_weights(config, model))) == model.names


def test_an_engine_that_only_encodes_reads_no_language_model(published, tmp_path):
    save_file(tensors_of("lm.layers.0", "vision.0"), tmp_path / "model.safetensors")
    model = Listing()
    model._language_model_names = ["language_model"]
    model.hf_to_vllm_mapper = SimpleNamespace(_map_name=lambda name: name.replace("lm.", "language_model."))
    encoder = SimpleNamespace(mm_encoder_only=True)
    loader_of(published).load_weights(model, config_of(tmp_path, multimodal_config=encoder))
    assert model.names == ["vision.0"]


# Reloads: all is checked before vLLM changes the model.


SHARDS = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]

BROKEN = {
    "no directory": (lambda folder: shutil.rmtree(folder), (OSError, "newer")),
    "missing shard": (lambda folder: (folder / SHARDS[1]).unlink(), (CheckpointNotFoundError, SHARDS[1])),
    "cut shard": (lambda folder: os.truncate(folder / SHARDS[1], 150), (FormatError, SHARDS[1])),
    "empty shard": (lambda folder: os.truncate(folder / SHARDS[1], 0), (FormatError, SHARDS[1])),
    "no index": (
        lambda folder: [(folder / name).unlink() for name in ("model.safetensors.index.json", SHARDS[1])],
        (CheckpointNotFoundError, "1 of 2 shards"),
    ),
    "wrong shapes": (
        lambda folder: save_sharded({"a": ramp(4, 7), "b": ramp(4, 6)}, folder, 2),
        (MismatchError, r"1 weights have another shape.*a of shape \[4, 6\].*\[4, 7\]"),
    ),
    "missing weight": (
        lambda folder: [shutil.rmtree(folder), save_file(tensors_of("a"), folder / "model.safetensors")],
        (MismatchError, "1 weights .* are not in the checkpoint.*no b"),
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", BROKEN)
def test_a_reload_that_cannot_succeed_fails_before_anything_changes(loaders, directory, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", not_on_the_hub)
    model, newer = Model(), tmp_path / "newer"
    loader_of(loaders).load_weights(model, config_of(directory))
    changed = {name: tensor + 7 for name, tensor in tensors_of("a", "b").items()}
    spoil, (error, text) = BROKEN[kind]
    for _ in range(3):
        save_sharded(changed, newer, 2)
        spoil(newer)
        with pytest.raises(error, match=text):
            loader_of(loaders).get_all_weights(config_of(newer), model)  # no step is taken
        require_loaded(model, tensors_of("a", "b"))
        model.load_weights(loader_of(loaders).get_all_weights(config_of(directory), model))
        require_loaded(model, tensors_of("a", "b"))
        shutil.rmtree(newer, ignore_errors=True)
    save_sharded(changed, newer, 2)
    model.load_weights(loader_of(loaders).get_all_weights(config_of(newer), model))
    require_loaded(model, changed)


def not_on_the_hub(repository, **keywords):
    raise OSError(f"{repository} is not on the hub")


@pytest.mark.parametrize("how", ["dropped", "closed", "ended"])
def test_files_are_open_until_the_iterator_ends(loaders, directory, how):
    before = len(os.listdir("/proc/self/fd"))
    pairs = loader_of(loaders).get_all_weights(config_of(directory), Model())
    assert len(os.listdir("/proc/self/fd")) > before
    shutil.rmtree(directory)  # what was checked is what is read
    if how == "ended":
        assert dict(pairs).keys() == {"a", "b"}
    elif how == "closed":
        pairs.close()
        assert list(pairs) == []
    del pairs
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_cut_after_the_check_fails_at_a_step(loaders, directory):
    loader = loader_of(loaders, model_loader_extra_config={"memory": "copy"})
    pairs = loader.get_all_weights(config_of(directory), Model())
    os.truncate(directory / "model.safetensors", 150)
    with pytest.raises(StioError, match=r"model\.safetensors"):
        list(pairs)


class Packed(Model):
    """A model that has two weights of the checkpoint in one, as vLLM's have, and others under another prefix."""

    packed_modules_mapping: ClassVar = {"qk_proj": ["q_proj", "k_proj"]}

    def __init__(self, **fields):
        nn.Module.__init__(self)
        self.names = ()
        self.layer = nn.Module()
        self.layer.qk_proj = nn.Linear(2, 2, bias=False)
        self.layer.experts = nn.Linear(2, 2, bias=False)
        vars(self).update(fields)

    def load_weights(self, pairs):
        taken = {"q_proj": "qk_proj", "k_proj": "qk_proj"}
        found = {name for name, _ in pairs if "unused" not in name}
        return {
            "layer.experts.weight" if ".experts." in name else name.replace(part := name.split(".")[-2], taken[part])
            for name in map(self.map_name, found)
        }

    def map_name(self, name):
        return name.replace("old.", "layer.").replace("new.", "layer.")


PACKED = ["old.q_proj.weight", "old.k_proj.weight", "old.experts.0.up.weight", "old.unused"]


@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (PACKED, ""),
        (PACKED[:3], ""),
        ([PACKED[0], *PACKED[2:]], "1 weights .*no old.k_proj.weight"),
        (PACKED[:2], "1 weights .*no old.experts.0.up.weight"),
        ([name.replace("old.", "new.") for name in PACKED], ""),
        (["new.unused"], r"3 weights .*no old.experts.0.up.weight, old.k_proj.weight"),
    ],
)
def test_a_reload_has_what_the_first_load_took(loaders, tmp_path, present, missing):
    model = Packed()
    model.hf_to_vllm_mapper = SimpleNamespace(_map_name=model.map_name)
    save_file(tensors_of(*PACKED), tmp_path / "first" / "model.safetensors")
    save_file(tensors_of(*present), tmp_path / "second" / "model.safetensors")
    loader_of(loaders).load_weights(model, config_of(tmp_path / "first"))
    if not missing:
        assert dict(loader_of(loaders).get_all_weights(config_of(tmp_path / "second"), model)).keys() == {*present}
        return
    with pytest.raises(MismatchError, match=missing):
        loader_of(loaders).get_all_weights(config_of(tmp_path / "second"), model)
    untracked = loader_of(loaders, model_loader_extra_config={"enable_weights_track": False})
    untracked.get_all_weights(config_of(tmp_path / "second"), model).close()


def test_a_weight_that_was_tied_since_may_be_missing(loaders, tmp_path):
    """vLLM ties a head again that turned out to be the embedding."""
    save_file(tensors_of("embedding", "head"), tmp_path / "first" / "model.safetensors")
    save_file(tensors_of("embedding"), tmp_path / "second" / "model.safetensors")
    model = Model(("embedding", "head"))
    loader_of(loaders).load_weights(model, config_of(tmp_path / "first"))
    with pytest.raises(MismatchError, match="no head"):
        loader_of(loaders).get_all_weights(config_of(tmp_path / "second"), model)
    model.head = model.embedding
    assert [*dict(loader_of(loaders).get_all_weights(config_of(tmp_path / "second"), model))] == ["embedding"]


# What goes wrong.


def test_weights_that_are_missing_are_an_error(loaders, directory):
    with pytest.raises(ValueError, match=r"1 of the model's weights .* c$"):
        loader_of(loaders).load_weights(Model(("a", "b", "c")), config_of(directory))


@pytest.mark.parametrize("how", ["untracked", "quantized", "made by the quantization", "enable_weights_track"])
def test_weights_that_may_be_missing(loaders, directory, how):
    model = Model(("a", "b", "c"), tracks=how != "untracked")
    if how == "made by the quantization":
        model.quant_method = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    loader = loader_of(loaders, model_loader_extra_config={how: False} if how.startswith("enable") else {})
    loader.load_weights(model, config_of(directory, quantization="fp8" if how == "quantized" else None))
    require_loaded(model, tensors_of("a", "b"))


class UnquantizedLinearMethod:
    """As vLLM's: it processes weights after the load, for the layout of the machine."""

    def process_weights_after_loading(self, layer):
        raise NotImplementedError


class Layers(nn.Module):
    """Two plain layers, one of whose weights the model does not report, and a quantized one."""

    def __init__(self):
        super().__init__()
        for name in ("up", "down", "packed"):
            layer = nn.Linear(6, 4, bias=False)
            layer.quant_method = UnquantizedLinearMethod()
            self.add_module(name, layer)
        self.packed.quant_method = SimpleNamespace(process_weights_after_loading=lambda layer: None)

    def load_weights(self, pairs):
        return {name for name, _ in pairs} - {"up.weight"}


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize(
    ("present", "missing"),
    [
        (["up", "down"], ""),
        (["up", "packed"], r"1 of the model's weights are not in the checkpoint: down\.weight$"),
        (["packed"], r"2 of the model's weights are not in the checkpoint: down\.weight, up\.weight$"),
    ],
)
def test_a_weight_of_a_plain_layer_is_required(loaders, tmp_path, quantization, present, missing):
    save_file(tensors_of(*(f"{name}.weight" for name in present)), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=missing) if missing else nullcontext():
        loader_of(loaders).load_weights(Layers(), config_of(tmp_path, quantization=quantization))


def test_an_error_of_the_models_ends_the_reading(loaders, directory, monkeypatch):
    root = HookedRoot(directory)
    seen_by_open(monkeypatch, root, memory="copy")

    class Failing(Model):
        def load_weights(self, pairs):
            self.kept = pairs  # even so
            next(pairs)
            raise KeyError("unexpected")

    model = Failing()
    with pytest.raises(KeyError, match="unexpected"):
        loader_of(loaders).load_weights(model, config_of(directory))
    assert all(file.closed for file in root.files)
    assert list(model.kept) == []
    root.close()


def test_an_error_of_the_storage_comes_out(loaders, directory, monkeypatch):
    def fail(name, offset, nbytes):
        raise StorageError("the cable is out", path=name)

    root = HookedRoot(directory, fail)
    seen_by_open(monkeypatch, root, memory="copy")
    with pytest.raises(StorageError, match="cable"):
        loader_of(loaders).load_weights(Model(), config_of(directory))
    root.close()
