"""Faults of loads that users of other projects have reported: 304 to 310, and 338 to 340, on local files."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from counts import count
from fakes import checkpoint_bytes, write_checkpoint
from faults.load_helpers import in_a_child
from integrations import published_vllm
from support import nothing_left, require_equal, save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import stio
from stio import sync
from stio.cli.main import main
from stio.cli.verify import examine
from stio.compat import huggingface_hub as hub
from stio.compat.safetensors import numpy as safetensors_numpy
from stio.compat.safetensors import torch as safetensors_torch
from stio.distributed import StioStorageReader, StioStorageWriter
from stio.format.files.directory import choose
from stio.format.files.names import FileName
from stio.integrations import iterators, vllm

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
OLD = {"a": torch.zeros(3), "b": torch.full((4,), 2.0)}
NEW = {"a": torch.ones(3), "b": torch.full((4,), 3.0)}
SHARDS = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]


class Model(nn.Module):
    """A module with the tensors of `OLD`."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((3,), 9.0, device=device))
        self.b = nn.Parameter(torch.full((4,), 9.0, device=device))

    def values(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A directory with the old checkpoint in two shards."""
    return write_checkpoint(tmp_path / "m", OLD, 2)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings since the last call."""
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


PICKLES = [f"pytorch_model-0000{k}-of-00002.bin" for k in (1, 2)]


def write_pickles(folder: Path, holds: dict[str, list[str]]) -> None:
    """Write files of `torch.save` and their index: for each tensor that it names, what its file holds."""
    for file, names in zip(PICKLES, holds.values(), strict=True):
        torch.save({name: OLD.get(name, torch.zeros(1)) for name in names}, folder / file)
    weight_map = dict(zip(holds, PICKLES, strict=True))
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


# Each way to load a directory.


def by_load_into(path: Path) -> dict[str, torch.Tensor]:
    sync.load_into(module := Model(), path)
    return module.values()


def by_open(path: Path) -> dict[str, torch.Tensor]:
    with sync.open(path) as checkpoint:
        return checkpoint.load()


def by_warm_start(path: Path) -> dict[str, torch.Tensor]:
    with sync.warm_start(module := Model("meta"), path) as warm:
        warm.done()
    return module.values()


def by_cache(path: Path) -> dict[str, torch.Tensor]:
    with sync.HostCache(1 << 20, device="cpu") as cache:
        return sync.load(path, cache=cache)


def by_dcp(path: Path) -> dict[str, torch.Tensor]:
    state = {name: torch.empty_like(tensor) for name, tensor in OLD.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch: no process group
        try:
            dcp.load(state, storage_reader=stio.distributed.StioStorageReader(path), no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from None
    return state


def by_hub(path: Path) -> dict[str, torch.Tensor]:
    hub.load_torch_model(module := Model(), path)
    return module.values()


def by_convert(path: Path) -> dict[str, torch.Tensor]:
    sync.convert(path, path.parent / "converted.safetensors")
    return sync.load(path.parent / "converted.safetensors")


def by_vllm(path: Path) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        published_vllm.install(patch)
        vllm.register()
        config = published_vllm.LoadConfig(load_format="stio", use_tqdm_on_load=False)
        loader = import_module("vllm.model_executor.model_loader").get_model_loader(config)
        return dict(loader.get_all_weights(SimpleNamespace(model=str(path), revision=None), Model()))


LOADS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "load": sync.load,
    "names": lambda path: sync.load(path, names=["a", "b"]),
    "open": by_open,
    "load_into": by_load_into,
    "warm_start": by_warm_start,
    "HostCache": by_cache,
    "dcp": by_dcp,
    "convert": by_convert,
    "vllm": by_vllm,
    "hub": by_hub,
}


# 306. A newer file beside an old index.

WRITERS: dict[str, Callable[[Path], object]] = {
    "save": lambda file: sync.save(NEW, file),
    "save_file": lambda file: safetensors_torch.save_file(NEW, file),
    "numpy": lambda file: safetensors_numpy.save_file({n: t.numpy() for n, t in NEW.items()}, file),
    "save_model": lambda file: safetensors_torch.save_model(_filled(NEW), str(file)),
    "Saver": lambda file: _by_saver(file),
    "convert": lambda file: sync.convert(_pickled(file.parent.parent), file),
    "dcp": lambda file: _save_by_dcp(file),
}


def _filled(tensors: dict[str, torch.Tensor]) -> Model:
    module = Model()
    module.load_state_dict(tensors)
    return module


def _by_saver(file: Path) -> None:
    with sync.Saver() as saver:
        saver.save(NEW, file).result()


def _save_by_dcp(file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed is not initialized
        dcp.save(dict(NEW), storage_writer=StioStorageWriter(file))


def _pickled(folder: Path) -> Path:
    torch.save(NEW, folder / "new.pt")
    return folder / "new.pt"


@pytest.mark.matrix
@pytest.mark.parametrize("name", [WHOLE, "other.safetensors"])
@pytest.mark.parametrize("write", WRITERS)
def test_c306_a_save_that_its_directory_hides_warns(
    write: str, name: str, old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    WRITERS[write](old / name)
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"{old / name}: saved, but a load of its directory follows {INDEX}")
    require_equal(sync.load(old / name), NEW)  # the advice
    for file in (INDEX, *SHARDS):
        (old / file).unlink()
    require_equal(sync.load(old), NEW)  # the other advice


def test_c306_a_directory_that_is_saved_under_another_pattern_warns(
    old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sync.save(NEW, old, filename_pattern="ema{suffix}.safetensors", max_shard_size=12)
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"{old}/ema.safetensors.index.json: saved, but a load of its directory follows {INDEX}")
    require_equal(sync.load(old / "ema.safetensors.index.json"), NEW)
    warnings_of(caplog)
    hub.save_torch_state_dict(NEW, old, filename_pattern="x{suffix}.safetensors")
    assert len(warnings_of(caplog)) == 1
    hub.save_torch_state_dict(NEW, old, is_main_process=False)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.safetensors", "adapter_model.safetensors"])
@pytest.mark.parametrize("size", [None, 12], ids=["one file", "shards"])
def test_c306_a_file_that_a_library_reads_by_its_name_is_told(
    name: str, size: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    safetensors_torch.save_file(OLD, folder / name)
    sync.save(NEW, folder, max_shard_size=size)
    (warning,) = warnings_of(caplog)
    assert warning.startswith(f"{folder}: saved, but ") and f" reads {name} there" in warning
    pattern = name.replace(".safetensors", "{suffix}.safetensors")
    assert repr(pattern) in warning
    sync.save(NEW, folder, filename_pattern=pattern)  # the advice
    require_equal(safetensors_torch.load_file(folder / name), NEW)


def test_c306_an_adapter_beside_its_model_is_no_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    safetensors_torch.save_file({"lora_A": torch.zeros(2)}, folder / "adapter_model.safetensors")
    (folder / "diffusion_pytorch_model.safetensors").write_bytes(b"no checkpoint")
    sync.save(NEW, folder)
    sync.save(NEW, folder / "other.safetensors")
    assert warnings_of(caplog) == []


def test_c306_a_directory_of_torchs_own_writer_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed is not initialized
        dcp.save(dict(OLD), checkpoint_id=path)
        _save_by_dcp(path)
        (warning,) = warnings_of(caplog)
        assert warning.startswith(f"{path}: saved, but the directory holds a checkpoint of torch's own writer too")
        found = {name: torch.empty_like(tensor) for name, tensor in OLD.items()}
        dcp.load(found, storage_reader=StioStorageReader(path))  # the advice
        require_equal(found, NEW)
        _save_by_dcp(tmp_path / "new")
    assert warnings_of(caplog) == []


def test_c306_no_warning_where_nothing_is_hidden(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    sync.save({"exp_avg": torch.zeros(3)}, old / "optimizer.safetensors")  # other names: no copy of the model
    sync.save_state({"step": 3, "m": torch.zeros(2)}, old / "state.safetensors")
    sync.save(NEW, old.parent / "elsewhere.safetensors")
    sync.save(NEW, old / "below" / WHOLE)
    sync.save(NEW, old / "model.fp16.safetensors")
    safetensors_torch.save_file({"a": NEW["a"]}, old / SHARDS[0])  # the index names it
    sync.save(NEW, old)
    require_equal(sync.load(old), NEW)
    hub.save_torch_state_dict(OLD, old.parent)
    require_equal(sync.load(old.parent / WHOLE), OLD)
    assert warnings_of(caplog) == []


@pytest.mark.matrix
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", [WHOLE, "model.sft"])
def test_c306_a_load_warns_once_of_the_file_that_it_does_not_take(
    load: str, name: str, old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (old / name).write_bytes(checkpoint_bytes(NEW))
    require_equal(LOADS[load](old), OLD)
    found = warnings_of(caplog)
    if load == "hub" and name != WHOLE:
        return  # the original library does not look at these names
    assert [name in one and INDEX in one for one in found] == [True]


def test_c306_verify_names_a_file_of_another_name_with_the_same_tensors(
    old: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A load opens no other file than those it reads."""
    (old / "weights.safetensors").write_bytes(checkpoint_bytes(NEW))
    require_equal(sync.load(old), OLD)
    assert warnings_of(caplog) == []
    (warning,) = examine(str(old)).warnings
    assert "weights.safetensors" in warning and INDEX in warning


def test_c306_shards_beside_the_index_are_named(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    for k, (name, tensor) in enumerate([*NEW.items(), ("c", torch.zeros(1))], 1):
        save_file({name: tensor}, old / f"model-0000{k}-of-00003.safetensors")
    require_equal(sync.load(old), OLD)
    (warning,) = warnings_of(caplog)
    assert "model-00001-of-00003.safetensors and 2 others" in warning


@pytest.mark.parametrize("load", LOADS)
def test_c307_an_index_that_names_nothing_beside_a_whole_file(
    load: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / INDEX).write_text('{"metadata": {}, "weight_map": {}}')
    save_file(NEW, folder / WHOLE)
    require_equal(LOADS[load](folder), NEW)
    (warning,) = warnings_of(caplog)
    assert WHOLE in warning and INDEX in warning


def test_c307_a_save_of_nothing_is_nothing(old: Path) -> None:
    sync.save({}, old)
    assert sync.load(old) == {}


def test_c306_files_that_are_no_checkpoint_are_not_named(old: Path, caplog: pytest.LogCaptureFixture) -> None:
    (old / "broken.safetensors").write_bytes(b"no")
    (old / "empty.safetensors").touch()
    (old / "dangling.safetensors").symlink_to("nowhere")
    save_file({"lora": torch.zeros(2)}, old / "adapter_model.safetensors")
    (old / "model-0123456789-00001-of-00002.safetensors").write_bytes(checkpoint_bytes(NEW))  # a save under way
    require_equal(sync.load(old), OLD)
    require_equal(sync.load(old / INDEX), OLD)
    assert warnings_of(caplog) == []


def test_c306_the_commands_say_it(old: Path) -> None:
    (old / WHOLE).write_bytes(checkpoint_bytes(NEW))
    found = CliRunner().invoke(main, ["verify", str(old), "--json"])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert len(report["warnings"]) == 1
    assert WHOLE in report["warnings"][0]


def test_c306_pickles_beside_their_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "m").mkdir()
    torch.save(OLD, tmp_path / "m" / "pytorch_model-00001-of-00001.bin")
    torch.save(NEW, tmp_path / "m" / "pytorch_model.bin")
    index = {"weight_map": dict.fromkeys(OLD, "pytorch_model-00001-of-00001.bin")}
    (tmp_path / "m" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    sync.convert(tmp_path / "m", tmp_path / "out.safetensors")
    assert "pytorch_model.bin in the same directory" in warnings_of(caplog)[0]
    require_equal(sync.load(tmp_path / "out.safetensors"), OLD)


BESIDE: dict[str, tuple[str, str, bool]] = {
    "an adapter": ("adapter_model.safetensors", "pytorch_model.bin", True),
    "an optimizer": ("optimizer.safetensors", "pytorch_model-00001-of-00002.bin", True),
    "a variant": ("model.fp16.safetensors", "pytorch_model.bin", True),
    "an index": ("adapter_model.safetensors", "pytorch_model.bin.index.json", True),
    "another component": ("model.safetensors", "diffusion_pytorch_model.bin", False),
    "the same model": ("model.safetensors", "pytorch_model.bin", False),
    "the same shards": ("model-00001-of-00001.safetensors", "pytorch_model-00001-of-00002.bin", False),
    "the same component": ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin", False),
    "a variant of the pickle": ("model.safetensors", "pytorch_model.fp16.bin", False),
    "the state of a training": ("adapter_model.safetensors", "training_args.bin", False),
    "another kind": ("lora.safetensors", "tokenizer.bin", False),
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", BESIDE)
def test_c306_a_model_of_torch_save_beside_another_checkpoint_is_named(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, pickle, is_told = BESIDE[case]
    write_checkpoint(tmp_path / "m", OLD, 1)
    (tmp_path / "m" / WHOLE).rename(tmp_path / "m" / name)
    torch.save(NEW, tmp_path / "m" / pickle)
    for load in (sync.load, by_convert, by_load_into):
        require_equal(load(tmp_path / "m"), OLD)
        assert [name in one and pickle in one for one in warnings_of(caplog)] == [True] * is_told
    if pickle == "pytorch_model.bin":  # the step
        require_equal(by_convert(tmp_path / "m" / pickle), NEW)
    require_equal(sync.load(tmp_path / "m" / name), OLD)
    assert warnings_of(caplog) == []


# 307. An index whose shards are all gone.


@pytest.fixture
def gone(old: Path) -> Path:
    """A directory with a whole file and an index without shards, as other writers leave it."""
    for shard in SHARDS:
        (old / shard).unlink()
    save_file(NEW, old / WHOLE)
    return old


@pytest.mark.parametrize("load", LOADS)
def test_c307_the_whole_file_is_loaded(load: str, gone: Path, caplog: pytest.LogCaptureFixture) -> None:
    require_equal(LOADS[load](gone), NEW)
    (warning,) = warnings_of(caplog)
    assert f"none of the shards exists that the index {INDEX} names, so {WHOLE} is loaded" in warning


def test_c307_some_shards_are_left(old: Path) -> None:
    save_file(NEW, old / WHOLE)
    (old / SHARDS[0]).unlink()
    with pytest.raises(stio.CheckpointNotFoundError, match="shard that does not exist"):
        sync.load(old)
    with pytest.raises(FileNotFoundError):
        hub.load_torch_model(Model(), old)


@pytest.mark.parametrize("name", ["other.safetensors", "model.fp16.safetensors", ".model.safetensors"])
def test_c307_a_file_of_another_name_is_not_taken(name: str, gone: Path) -> None:
    (gone / WHOLE).rename(gone / name)
    with pytest.raises(stio.CheckpointNotFoundError, match="shard that does not exist"):
        sync.load(gone)
    require_equal(sync.load(gone / name), NEW)


def test_c307_an_index_that_the_caller_names(gone: Path) -> None:
    with pytest.raises(stio.CheckpointNotFoundError):
        sync.load(gone / INDEX)


def test_c307_a_broken_whole_file_is_an_error(gone: Path) -> None:
    (gone / WHOLE).write_bytes(b"no")
    with pytest.raises(stio.FormatError):
        sync.load(gone)


def test_c307_pickles(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write_pickles(tmp_path / "m", {"a": ["a"], "b": ["b"]})
    torch.save(NEW, tmp_path / "m" / "pytorch_model.bin")
    for shard in PICKLES:
        (tmp_path / "m" / shard).unlink()
        with pytest.raises(stio.CheckpointNotFoundError, match=r"a file that does not exist; the download may be"):
            sync.convert(tmp_path / "m", tmp_path / "out")
    sync.convert(tmp_path / "m" / "pytorch_model.bin", tmp_path / "out")
    require_equal(sync.load(tmp_path / "out"), NEW)


def test_c307_verify_and_a_save_over_it(gone: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = CliRunner().invoke(main, ["verify", str(gone)])
    assert found.exit_code == 0, found.output
    assert "none of the shards exists" in " ".join(found.stdout.split())
    safetensors_torch.save_file(OLD, gone / WHOLE)  # it is not hidden
    assert warnings_of(caplog) == []
    sync.save(OLD, gone)
    require_equal(sync.load(gone), OLD)
    assert warnings_of(caplog)[1:] == []


# 308. A tensor in two shards, one of which the index names.


@pytest.fixture(params=["before", "behind", "between"])
def stale(request: pytest.FixtureRequest, old: Path) -> Path:
    """A checkpoint whose second shard holds an old `a` too, at some place among its own tensors."""
    wrong = {"a": torch.full((3,), 7.0)}
    own = {"b": OLD["b"]}
    if request.param == "between":
        own = {"0": torch.full((3,), 5.0), "b": OLD["b"]}
        document = json.loads((old / INDEX).read_text())
        document["weight_map"]["0"] = SHARDS[1]
        (old / INDEX).write_text(json.dumps(document))
    save_file(wrong | own if request.param == "before" else own | wrong, old / SHARDS[1])
    return old


def expected_of(path: Path) -> dict[str, torch.Tensor]:
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    return {name: OLD.get(name, torch.full((3,), 5.0)) for name in weight_map}


@pytest.mark.matrix
@pytest.mark.parametrize("memory", ["map", "copy", "lazy"])
def test_c308_the_index_decides(memory: Any, stale: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = expected_of(stale)
    require_equal(dict(sorted(sync.load(stale, strict=False, memory=memory).items())), dict(sorted(expected.items())))
    assert sum("'a' is in another shard than the index names" in one for one in warnings_of(caplog)) == 1
    for names in (["a"], ["a", "b"], lambda name: name in "ab"):
        found = sync.load(stale, names=names, memory=memory)
        require_equal(found, {name: expected[name] for name in expected if name in found})
        assert "a" in found
    require_equal(sync.load(stale, names="b"), {"b": OLD["b"]})
    require_equal(sync.load(stale, names=["a"], slices={"a": slice(0, 2)}), {"a": OLD["a"][:2]})
    with sync.open(stale, strict=False) as checkpoint:
        assert sorted(checkpoint.keys()) == sorted(expected)
        assert checkpoint.info("a").shard == SHARDS[0]
        require_equal(dict(checkpoint.stream(["a"])), {"a": OLD["a"]})
    with sync.HostCache(1 << 20, device="cpu") as cache:
        cache.prefetch(stale, strict=False)
        require_equal(sync.load(stale, names=["a", "b"], cache=cache), OLD)


def test_c308_modules_and_the_drop_in(stale: Path) -> None:
    sync.load_into(module := Model(), stale, strict=False)
    require_equal(module.values(), OLD)
    hub.load_torch_model(module := Model(), stale)
    require_equal(module.values(), OLD)
    with sync.warm_start(module := Model("meta"), stale, strict=False) as warm:
        warm.done()
    require_equal(module.values(), OLD)


def test_c308_the_strict_error_says_what_to_do(stale: Path) -> None:
    for call in (sync.load, lambda path: sync.convert(path, path.parent / "x.safetensors")):
        with pytest.raises(stio.IndexFormatError, match=r"two shards hold the tensor 'a'.*strict=False") as caught:
            call(stale)
        assert caught.value.expected == f"it in {SHARDS[0]} only"
        assert caught.value.found == f"it in {SHARDS[1]} too"
    found = CliRunner().invoke(main, ["verify", str(stale)])
    assert found.exit_code == 1
    assert "not in the index" not in found.output


@pytest.mark.parametrize(
    ("holds", "message"),
    [
        ({"a": ["a"], "b": ["c"]}, r"tensor 'b' is not in the file .*it in no file"),
        ({"a": ["b"], "b": ["a"]}, r"tensor 'a' is not in the file .*it in pytorch_model-00002"),
        ({"a": ["a", "b"], "b": ["b"]}, r"two files hold the tensor 'b'.*-00001-of.* and .*-00002-of"),
    ],
)
def test_c308_c309_pickles_that_do_not_fit_their_index(holds: Any, message: str, tmp_path: Path) -> None:
    write_pickles(tmp_path, holds)
    for source in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
        with pytest.raises(stio.IndexFormatError, match=message):
            sync.convert(source, tmp_path / "out.safetensors")
    if "two files" not in message:  # the step
        (tmp_path / "pytorch_model.bin.index.json").unlink()
        found = by_convert(tmp_path)
        assert found.keys() == {name for names in holds.values() for name in names}


def test_c309_what_an_index_of_pickles_leaves_out_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_pickles(tmp_path, {"a": ["a", "c"], "b": ["b"]})
    assert by_convert(tmp_path).keys() == {"a", "b", "c"}
    assert "not in the index, and are converted too: c" in warnings_of(caplog)[0]


def test_c308_what_the_index_does_not_know_in_two_shards(old: Path) -> None:
    for shard, name in zip(SHARDS, OLD, strict=True):
        save_file({name: OLD[name], "x": torch.zeros(1)}, old / shard)
    for strict in (True, False):
        with pytest.raises(stio.IndexFormatError, match="two shards hold the tensor 'x', and the index has it in nei"):
            sync.load(old, strict=strict)


# 309. A tensor that no shard has.


@pytest.fixture
def lacking(old: Path) -> Path:
    document = json.loads((old / INDEX).read_text())
    document["weight_map"]["c"] = SHARDS[0]
    (old / INDEX).write_text(json.dumps(document))
    return old


def test_c309_the_others_are_loaded(lacking: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(stio.IndexFormatError, match=r"'c' is not in the shard.*strict=False.*loads the others"):
        sync.load(lacking)
    require_equal(sync.load(lacking, strict=False), OLD)
    assert "'c' is not in the shard that the index names for it, and not loaded" in warnings_of(caplog)[0]
    require_equal(sync.load(lacking, names=["a", "b"]), OLD)
    require_equal(sync.load(lacking, names=lambda name: name != "c"), OLD)
    require_equal(by_load_into(lacking), OLD)
    require_equal(by_warm_start(lacking), OLD)
    require_equal(by_hub(lacking), OLD)
    for call in (
        lambda: sync.load(lacking, names="c"),
        lambda: sync.load(lacking, names=["a", "c"], strict=False),
    ):
        with pytest.raises(stio.TensorNotFoundError) as caught:
            call()
        assert caught.value.requested == "c"


def test_c308_c309_both_at_once(lacking: Path) -> None:
    save_file({"a": NEW["a"], "b": OLD["b"]}, lacking / SHARDS[1])  # as many tensors as the index names
    require_equal(sync.load(lacking, strict=False), OLD)
    require_equal(sync.load(lacking, names=["a", "b"]), OLD)
    require_equal(by_hub(lacking), OLD)


def test_c309_a_module_that_needs_it_is_refused(lacking: Path) -> None:
    module = Model()
    module.c = nn.Parameter(torch.zeros(1))
    with pytest.raises(stio.MismatchError, match="missing c"):
        sync.load_into(module, lacking)
    assert module.a[0] == 9
    assert sync.load_into(module, lacking, strict=False).missing == ("c",)


# 310. Variants.

VARIANTS = [
    "X.safetensors.index.fp16.json",  # transformers and diffusers
    "X.fp16.safetensors.index.json",
    "X.safetensors.fp16.index.json",  # diffusers before 0.20
    "X.safetensors.index.fp8.e4m3.json",
]


@pytest.mark.parametrize("name", VARIANTS)
def test_c310_an_index_of_a_variant(name: str, old: Path) -> None:
    (old / INDEX).rename(old / name)
    require_equal(sync.load(old), OLD)
    require_equal(sync.load(old / name), OLD)
    require_equal(sync.load(str(old / name), names="a"), {"a": OLD["a"]})
    sync.convert(old / name, old.parent / "out")
    require_equal(sync.load(old.parent / "out"), OLD)
    assert CliRunner().invoke(main, ["inspect", str(old / name)]).exit_code == 0


@pytest.mark.parametrize("name", ["model.fp16.safetensors", "diffusion_pytorch_model.non_ema.safetensors", "x.sft"])
def test_c310_a_file_of_a_variant(name: str, tmp_path: Path) -> None:
    save_file(OLD, tmp_path / name)
    require_equal(sync.load(tmp_path), OLD)
    require_equal(sync.load(tmp_path / name), OLD)


def _variant(directory: Path, name: str, tensors: dict[str, torch.Tensor], pattern: str) -> None:
    """Write two shards and their index, as `save_pretrained(variant=)` of transformers does."""
    weight_map = {}
    for k, (key, tensor) in enumerate(tensors.items(), 1):
        shard = pattern.format(f"-0000{k}-of-00002")
        save_file({key: tensor}, directory / shard)
        weight_map[key] = shard
    (directory / name).write_text(json.dumps({"weight_map": weight_map}))


def test_c310_the_default_is_loaded_as_in_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for stem in ("model", "diffusion_pytorch_model"):
        folder = tmp_path / stem
        folder.mkdir()
        _variant(folder, f"{stem}.safetensors.index.json", OLD, f"{stem}{{}}.safetensors")
        _variant(folder, f"{stem}.safetensors.index.fp16.json", NEW, f"{stem}.fp16{{}}.safetensors")
        require_equal(sync.load(folder), OLD)
        require_equal(sync.load(folder / f"{stem}.safetensors.index.fp16.json"), NEW)
    assert warnings_of(caplog) == []


def test_c310_several_variants_are_offered_by_their_indexes(tmp_path: Path) -> None:
    _variant(tmp_path, "X.safetensors.index.fp16.json", OLD, "X.fp16{}.safetensors")
    _variant(tmp_path, "X.safetensors.index.bf16.json", NEW, "X.bf16{}.safetensors")
    with pytest.raises(stio.AmbiguousCheckpointError) as caught:
        sync.load(tmp_path)
    assert caught.value.found == "X.safetensors.index.bf16.json, X.safetensors.index.fp16.json"
    save_file(OLD, tmp_path / "X.safetensors")
    (tmp_path / "X.safetensors.index.bf16.json").unlink()
    require_equal(sync.load(tmp_path), OLD)  # the plain name, as in diffusers


def test_c310_pickles_of_a_variant(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    torch.save(OLD, tmp_path / "m" / "pytorch_model.fp16-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys(OLD, "pytorch_model.fp16-00001-of-00001.bin")}
    name = "pytorch_model.bin.index.fp16.json"
    (tmp_path / "m" / name).write_text(json.dumps(index))
    for k, source in enumerate([tmp_path / "m", tmp_path / "m" / name]):
        sync.convert(source, tmp_path / f"{k}.safetensors")
        require_equal(sync.load(tmp_path / f"{k}.safetensors"), OLD)
    with pytest.raises(stio.StioError, match="stio convert"):
        sync.load(tmp_path / "m" / name)


def test_c310_names() -> None:
    for name in VARIANTS[:3]:
        assert FileName(name).whole == "X.fp16.safetensors"
        assert FileName(name).is_checkpoint
    for name in ("pytorch_model.bin.index.json", "config.json", "index.json", "x.safetensors.json"):
        assert not FileName(name).is_checkpoint


# 338. Shards without an index.


@pytest.fixture
def unindexed(old: Path) -> Path:
    (old / INDEX).unlink()
    return old


@pytest.mark.parametrize("load", LOADS)
def test_c338_a_complete_set_is_loaded(load: str, unindexed: Path) -> None:
    require_equal(dict(sorted(LOADS[load](unindexed).items())), OLD)


@pytest.mark.matrix
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("missing", [0, 1])
def test_c338_an_incomplete_set_is_refused(load: str, missing: int, unindexed: Path) -> None:
    (unindexed / SHARDS[missing]).unlink()
    with pytest.raises(FileNotFoundError, match=rf"shards.*{SHARDS[missing]}.*1 of 2 shards"):
        LOADS[load](unindexed)
    require_equal(sync.load(unindexed / SHARDS[1 - missing]), {"ab"[1 - missing]: OLD["ab"[1 - missing]]})


def test_c338_many_missing_shards_are_named_shortly(tmp_path: Path) -> None:
    (tmp_path / "x-00007-of-99999.safetensors").write_bytes(checkpoint_bytes(OLD))
    with pytest.raises(stio.CheckpointNotFoundError) as caught:
        sync.load(tmp_path)
    assert str(caught.value.expected).startswith("x-00001-of-99999.safetensors, x-00002-of-99999.safetensors")
    assert "and 99,995 others" in str(caught.value.expected)
    assert len(str(caught.value)) < 600


def test_c338_a_tensor_in_two_shards(unindexed: Path) -> None:
    save_file({"a": NEW["a"], "b": NEW["b"]}, unindexed / SHARDS[1])
    for strict in (True, False):
        with pytest.raises(stio.IndexFormatError, match="two shards hold the tensor 'a', and there is no index"):
            sync.load(unindexed, strict=strict)
    with pytest.raises(stio.AmbiguousCheckpointError, match="two files hold the tensor 'a'"):
        by_vllm(unindexed)


SETS: dict[str, tuple[list[str], bool]] = {
    "no zeros": ([f"m-{k}-of-11.safetensors" for k in range(1, 12)], True),
    "from zero": ([f"m-0000{k}-of-00003.safetensors" for k in range(3)], True),
    "alone": (["model-00001-of-00001.safetensors"], True),
    "a variant": ([f"model.fp16-0000{k}-of-00002.safetensors" for k in (1, 2)], True),
    "the old variant": ([f"model-0000{k}-of-00002.fp16.safetensors" for k in (1, 2)], True),
    "bare": ([f"0000{k}-of-00002.safetensors" for k in (1, 2)], True),
    "a gap": ([f"m-{k}-of-11.safetensors" for k in range(1, 12) if k != 5], False),
    "too many": ([f"m-0000{k}-of-00002.safetensors" for k in (1, 2, 3)], False),
}


@pytest.mark.parametrize("case", SETS)
def test_c338_names_of_shards(case: str) -> None:
    names, is_complete = SETS[case]
    if is_complete:
        found = choose(sorted(names), path="d").files
        numbers = [shard.k for name in found if (shard := FileName(name).shard) is not None]
        assert sorted(found) == sorted(names)
        assert numbers == sorted(numbers)
    else:
        with pytest.raises(stio.CheckpointNotFoundError):
            choose(sorted(names), path="d")


def test_c338_two_sets_are_ambiguous(unindexed: Path) -> None:
    save_file(NEW, unindexed / WHOLE)
    with pytest.raises(stio.AmbiguousCheckpointError, match=rf"{SHARDS[0]} and the other shards, 2 files"):
        sync.load(unindexed)


def test_c338_two_sets_are_separated(unindexed: Path) -> None:
    for k, (name, tensor) in enumerate(NEW.items(), 1):
        save_file({name: tensor}, unindexed / f"new-0000{k}-of-00002.safetensors")
    with pytest.raises(stio.AmbiguousCheckpointError, match="each set of shards into a directory of its own"):
        sync.load(unindexed)
    (unindexed / "new").mkdir()
    for path in unindexed.glob("new-*"):
        path.rename(unindexed / "new" / path.name)
    require_equal(sync.load(unindexed / "new"), NEW)
    require_equal(sync.load(unindexed), OLD)


@pytest.mark.matrix
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("number", [1, 2])
def test_c338_shards_of_a_save_need_their_index(load: str, number: int, tmp_path: Path) -> None:
    sync.save(OLD, tmp_path / "m")  # a second save to a directory gives names with an id
    sync.save(NEW, tmp_path / "m", max_shard_size=16)
    index = (tmp_path / "m" / INDEX).read_bytes()
    (tmp_path / "m" / INDEX).unlink()
    shards = sorted((tmp_path / "m").glob("model-*"))
    assert len(shards) == 2
    for shard in shards[number:]:
        shard.unlink()
    with pytest.raises(stio.CheckpointNotFoundError, match="shards of a save of stio without their index"):
        LOADS[load](tmp_path / "m")
    assert len(sync.load(shards[0])) == 1  # the steps
    (tmp_path / "m" / INDEX).write_bytes(index)
    if number == 2:
        require_equal(LOADS[load](tmp_path / "m"), NEW)


def test_c338_an_index_of_another_name_still_names_shards_of_a_save(tmp_path: Path) -> None:
    for tensors in (OLD, NEW):
        sync.save(tensors, tmp_path / "m", max_shard_size=16, filename_pattern="x{suffix}.safetensors")
    require_equal(by_vllm(tmp_path / "m"), NEW)


@pytest.mark.parametrize("load", LOADS)
def test_c338_a_set_beside_a_save_that_was_interrupted(load: str, unindexed: Path) -> None:
    (unindexed / ".stio-kept-0123456789").touch()  # stays for good, and says nothing of shards
    require_equal(dict(sorted(LOADS[load](unindexed).items())), OLD)
    (unindexed / ".stio-0123456789").mkdir()
    (unindexed / ".stio-0123456789" / "lock").touch()
    with pytest.raises(stio.CheckpointNotFoundError, match=r"was interrupted, .*; wait .*stio gc DIRECTORY"):
        LOADS[load](unindexed)
    assert CliRunner().invoke(main, ["gc", str(unindexed)]).exit_code == 0  # the step
    require_equal(dict(sorted(LOADS[load](unindexed).items())), OLD)


def test_c338_a_state_in_shards(tmp_path: Path) -> None:
    state = {"m": torch.ones(3000), "n": [torch.zeros(3000), 5]}
    sync.save_state(state, tmp_path / "s", max_shard_size=12000)
    (tmp_path / "s" / INDEX).unlink()
    with pytest.raises(stio.FormatError, match="no nested state"):  # the index held it
        sync.load_state(tmp_path / "s")
    assert len(sync.load(tmp_path / "s")) == 2  # the advice
    next((tmp_path / "s").glob("*-00002-*")).unlink()
    with pytest.raises(stio.CheckpointNotFoundError, match="1 of 2 shards"):
        sync.load_state(tmp_path / "s")


def test_c338_pickles(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for k, (name, tensor) in enumerate(OLD.items(), 1):
        torch.save({name: tensor}, tmp_path / "m" / f"pytorch_model-0000{k}-of-00002.bin")
    sync.convert(tmp_path / "m", tmp_path / "out.safetensors")
    require_equal(sync.load(tmp_path / "out.safetensors"), OLD)
    (tmp_path / "m" / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(stio.CheckpointNotFoundError, match="1 of 2 shards"):
        sync.convert(tmp_path / "m", tmp_path / "other.safetensors")
    with pytest.raises(stio.CheckpointNotFoundError, match="1 of 2 shards"):
        hub.load_torch_model(Model(), tmp_path / "m", safe=False)


def test_c338_verify_of_a_complete_set(unindexed: Path) -> None:
    assert CliRunner().invoke(main, ["verify", str(unindexed)]).exit_code == 0
    assert "2 shards" in CliRunner().invoke(main, ["inspect", str(unindexed)]).stdout


# 339. Names that begin with a dot.

HIDDEN = [".model.old.safetensors", "._model.safetensors", ".model.sft", f".{INDEX}", f"._{INDEX}"]


@pytest.mark.parametrize("load", LOADS)
def test_c339_hidden_files_are_no_checkpoints(load: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in HIDDEN:
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / name).write_bytes(checkpoint_bytes(NEW))
    with pytest.raises((stio.CheckpointNotFoundError, ValueError)):
        LOADS[load](tmp_path / "m")
    save_file(OLD, tmp_path / "m" / WHOLE)
    require_equal(LOADS[load](tmp_path / "m"), OLD)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("load", LOADS)
def test_c339_hidden_files_beside_shards(load: str, old: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (*HIDDEN[:4], f"._{SHARDS[0]}"):
        (old / name).write_bytes(b"\0\5\x16\7")
    require_equal(LOADS[load](old), OLD)
    (old / INDEX).unlink()
    require_equal(dict(sorted(LOADS[load](old).items())), OLD)
    assert warnings_of(caplog) == []


def test_c339_a_hidden_file_that_the_caller_names(tmp_path: Path) -> None:
    save_file(OLD, tmp_path / ".x.safetensors")
    require_equal(sync.load(tmp_path / ".x.safetensors"), OLD)
    with pytest.raises(stio.CheckpointNotFoundError, match="a name that begins with a dot does not count"):
        sync.load(tmp_path)


def test_c339_a_save_makes_no_hidden_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="begins with a dot"):
        sync.save(OLD, tmp_path / "m", filename_pattern=".x{suffix}.safetensors")
    assert not (tmp_path / "m").exists()


def test_c339_pickles(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    torch.save(OLD, tmp_path / "m" / "x.pt")
    (tmp_path / "m" / "._x.pt").write_bytes(b"\0\5\x16\7")
    sync.convert(tmp_path / "m", tmp_path / "out.safetensors")
    require_equal(sync.load(tmp_path / "out.safetensors"), OLD)


# 304. Casts that lose values.

WHOLE_NUMBERS = ["int8", "I8", torch.uint8, "int64", "bool", "BOOL", torch.int32, "torch.int16"]


@pytest.mark.parametrize("dtype", WHOLE_NUMBERS, ids=str)
def test_c304_a_cast_to_whole_numbers_is_refused(dtype: Any, old: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: sync.load(old, dtype=dtype),
        lambda: sync.open(old, dtype=dtype),
        lambda: sync.load_into(Model(), old, dtype=dtype),
        lambda: sync.load_into(Model("meta"), old, assign=True, dtype=dtype),
        lambda: sync.warm_start(Model("meta"), old, dtype=dtype),
        lambda: sync.load_state(old, dtype=dtype),
        lambda: iterators.weights(old, dtype=dtype),
        lambda: sync.convert(old, old.parent / "out", dtype=dtype),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="dtype="):
            call()
    found = CliRunner().invoke(main, ["convert", str(old), str(old.parent / "out"), "--dtype", str(dtype)])
    assert found.exit_code == 2
    assert not (old.parent / "out").exists()


FLOATS = ["float16", "BF16", torch.float64, "F8_E4M3", torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_c304_a_cast_to_another_floating_dtype_is_allowed(dtype: Any, old: Path) -> None:
    found = sync.load(old, dtype=dtype)
    assert all(tensor.dtype.is_floating_point for tensor in found.values())
    assert found["b"].float().tolist() == [2.0] * 4
    sync.convert(old, old.parent / "out", dtype=dtype)
    require_equal(sync.load(old.parent / "out"), found)


KINDS = [
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int64),
    (torch.float8_e4m3fn, torch.uint8),
    (torch.float16, torch.bool),
    (torch.complex64, torch.float32),
    (torch.complex64, torch.int32),
]


def _with_weight(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.w = nn.Parameter(tensor, requires_grad=False)
    module.register_buffer("v", tensor.clone())
    return module


@pytest.mark.parametrize(("stored", "own"), KINDS, ids=str)
def test_c304_a_copy_into_a_dtype_of_another_kind_is_refused(
    stored: torch.dtype, own: torch.dtype, tmp_path: Path
) -> None:
    path = save_file({"w": torch.ones(3, dtype=stored), "v": torch.ones(3, dtype=stored)}, tmp_path / WHOLE)
    module = _with_weight(torch.zeros(3, dtype=own))
    for strict in (True, False):
        with pytest.raises(stio.MismatchError, match="would lose the values"):
            sync.load_into(module, path, strict=strict)
    assert not module.w.any()
    with sync.open(path) as checkpoint, pytest.raises(stio.MismatchError, match="would lose the values"):
        checkpoint.load_into(module)
    with pytest.raises(stio.MismatchError, match="would lose the values"):
        with sync.warm_start(_with_weight(torch.zeros(3, dtype=own, device="meta")), path):
            pass
    sync.load_into(module, path, assign=True)  # the advice
    assert module.w.dtype == module.v.dtype == stored


@pytest.mark.parametrize(
    ("stored", "own"), [(torch.int8, torch.float32), (torch.float64, torch.float16), (torch.float32, torch.complex64)]
)
def test_c304_other_copies_are_those_of_torch(stored: torch.dtype, own: torch.dtype, tmp_path: Path) -> None:
    path = save_file({"w": torch.ones(3, dtype=stored), "v": torch.ones(3, dtype=stored)}, tmp_path / WHOLE)
    sync.load_into(module := _with_weight(torch.zeros(3, dtype=own)), path)
    assert module.w.dtype == own
    assert bool((module.w == 1).all())


# 305. Buffers that stay on meta.


class Rotary(nn.Module):
    """A module with a buffer that no checkpoint holds."""

    def __init__(self, *, persistent: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("inv_freq", torch.arange(3.0), persistent=persistent)


def _on_meta(**keywords: bool) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(Rotary(**keywords), Rotary(**keywords))


@pytest.fixture
def rotary(tmp_path: Path) -> Path:
    return save_file({"0.weight": torch.ones(3), "1.weight": torch.ones(3)}, tmp_path / "r.safetensors")


def test_c305_an_error_names_the_buffers(rotary: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = _on_meta()
    with pytest.raises(stio.MismatchError, match=r"assign each its values.*0\.inv_freq, 1\.inv_freq"):
        sync.load_into(module, rotary, assign=True)
    assert all(parameter.is_meta for parameter in module.parameters())
    for part in module:  # the advice
        part.inv_freq = torch.arange(3.0)
    report = sync.load_into(module, rotary, assign=True)
    assert report.unfilled == ("0.inv_freq", "1.inv_freq")
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    assert warnings_of(caplog) == []


def _open_and_load(module: nn.Module, path: Path) -> None:
    with sync.open(path) as checkpoint:
        checkpoint.load_into(module, assign=True)


def _warm_start(module: nn.Module, path: Path) -> None:
    with sync.warm_start(module, path):
        pass


def _load_into_memory(module: nn.Module, path: Path) -> None:
    for part in module:  # type: ignore[attr-defined]
        part.weight = nn.Parameter(torch.zeros(3))
    sync.load_into(module, path)


def _use_of_a_pool(module: nn.Module, path: Path) -> None:
    with sync.ModelPool(device="cpu", device_bytes="1MB") as pool:
        pool.add("model", path, make=lambda: module)
        with pool.use("model"):
            pass


@pytest.mark.parametrize("load", [_open_and_load, _warm_start, _load_into_memory, _use_of_a_pool])
def test_c413_each_way_to_load_refuses_a_buffer_on_meta(
    rotary: Path, load: Callable[[nn.Module, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(stio.MismatchError, match=r"no checkpoint holds these buffers.*assign each.*0\.inv_freq"):
        load(_on_meta(), rotary)
    module = _on_meta()
    for part in module:
        part.inv_freq = torch.arange(3.0)
    load(module, rotary)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("strict", [True, False])
def test_c413_strict_makes_no_difference(rotary: Path, strict: bool) -> None:
    with pytest.raises(stio.MismatchError, match="no checkpoint holds these buffers"):
        sync.load_into(_on_meta(), rotary, assign=True, strict=strict)


def test_c305_a_persistent_buffer_that_the_checkpoint_lacks(rotary: Path, caplog: pytest.LogCaptureFixture) -> None:
    sync.load_into(_on_meta(persistent=True), rotary, assign=True, strict=False)
    assert len(warnings_of(caplog)) == 1
    with pytest.raises(stio.MismatchError, match=r"would compute without their data.*0\.inv_freq"):
        with sync.warm_start(_on_meta(persistent=True), rotary, strict=False):
            pass


def test_c305_parameters_that_the_checkpoint_lacks(rotary: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = _on_meta()
    module.append(nn.Linear(2, 2, device="meta"))
    for part in module[:2]:
        part.inv_freq = torch.arange(3.0)
    sync.load_into(module, rotary, assign=True, strict=False)
    (warning,) = warnings_of(caplog)
    assert "2.weight, 2.bias" in warning
    assert "inv_freq" not in warning


def test_c305_nothing_is_said_of_a_module_that_is_complete(rotary: Path, caplog: pytest.LogCaptureFixture) -> None:
    sync.load_into(nn.Sequential(Rotary(), Rotary()), rotary)
    with pytest.raises(stio.MismatchError):
        sync.load_into(_on_meta(persistent=True), rotary, assign=True)
    assert warnings_of(caplog) == []


def test_c305_a_hook_that_fills_the_buffer(rotary: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = _on_meta()
    for part in module:
        part.register_load_state_dict_post_hook(lambda part, _: setattr(part, "inv_freq", torch.arange(3.0)))
    sync.load_into(module, rotary, assign=True)
    assert warnings_of(caplog) == []


# 340. More shards than descriptors.

MANY = count(100, 300)

_MANY = (
    f"NUM_SHARDS = {MANY}\n"
    + """
import logging, warnings
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
expected = {f"layer.{k}": [float(k)] * 2 for k in range(NUM_SHARDS)}

def require(found):
    assert {name: tensor.tolist() for name, tensor in found.items()} == expected

class Module(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.layer = nn.Module()
        for k in range(NUM_SHARDS):
            self.layer.register_parameter(str(k), nn.Parameter(torch.full((2,), -1.0, device=device)))

def into(assign=False):
    module = Module("meta" if assign else "cpu")
    sync.load_into(module, directory, assign=assign)
    require(module.state_dict())

def sliced():
    assert sync.load(directory, slices={"layer.8": slice(0, 1)})["layer.8"].tolist() == [8.0]

def warm():
    module = Module("meta")
    with sync.warm_start(module, directory) as warm:
        warm.done()
    require(module.state_dict())

def opened():
    with sync.open(directory) as checkpoint:
        require(checkpoint.load())
        require(dict(checkpoint.stream()))
        assert checkpoint.read("layer.7").tolist() == [7.0, 7.0]

def cached():
    with sync.HostCache(1 << 22, device="cpu") as cache:
        cache.prefetch(directory)
        assert cache.stats().entries == NUM_SHARDS
        require(sync.load(directory, cache=cache))

def by_dcp():
    from torch.distributed import checkpoint as dcp
    state = {name: torch.empty(2) for name in expected}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=stio.distributed.StioStorageReader(directory), no_dist=True)
    require(state)

def by_hub():
    from stio.compat.huggingface_hub import load_torch_model
    module = Module()
    load_torch_model(module, directory)
    require(module.state_dict())

def by_weights():
    from stio.integrations.iterators import weights
    require(dict(weights(directory)))

def converted(**keywords):
    target = directory.parent / f"out{len(keywords)}"
    sync.convert(directory, target, **keywords)
    require(sync.load(target))

def command(*arguments):
    from click.testing import CliRunner
    from stio.cli.main import main
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output

def unindexed():
    link = directory.parent / "unindexed"
    link.mkdir()
    for file in directory.glob("*.safetensors"):
        os.link(file, link / file.name)
    require(sync.load(link))

def crowded():
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
    try:
        require(sync.load(directory))
        few = directory.parent / "few"
        sync.save({name: torch.tensor(values) for name, values in list(expected.items())[:15]}, few, max_shard_size=8)
        assert len(sync.load(few)) == 15
    finally:
        for fd in held:
            os.close(fd)

"""
)

ALL_OF_MANY = {
    "load": "require(sync.load(directory))",
    "map": "require(sync.load(directory, memory='map'))",
    "lazy": "require(sync.load(directory, memory='lazy'))",
    "copy": "require(sync.load(directory, memory='copy'))",
    "names": "require(sync.load(directory, names=list(expected)))",
    "predicate": "require(sync.load(directory, names=lambda name: True))",
    "slices": "sliced()",
    "verify": "require(sync.load(directory, verify=True))",
    "device": "sync.load(directory, device=FakeDevice())",
    "open": "opened()",
    "load_into": "into()",
    "load_into assign": "into(assign=True)",
    "warm_start": "warm()",
    "HostCache": "cached()",
    "dcp": "by_dcp()",
    "hub": "by_hub()",
    "weights": "by_weights()",
    "convert": "converted()",
    "convert to shards": "converted(max_shard_size=8)",
    "command verify": "command('verify', directory)",
    "command diff": "command('diff', directory, directory)",
    "command inspect": "command('inspect', directory)",
    "command load": "command('load', directory, '--device', 'cpu')",
    "without an index": "unindexed()",
    "crowded": "crowded()",
}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {f"layer.{k}": torch.full((2,), float(k)) for k in range(MANY)}
    directory = tmp_path_factory.mktemp("many") / "m"
    sync.save(tensors, directory, max_shard_size=8, hash="sha256", durability="none")
    assert len([*directory.glob("*.safetensors")]) == MANY
    return directory


@pytest.mark.matrix
@pytest.mark.parametrize("use", ALL_OF_MANY)
def test_c340_all_of_many_shards(use: str, zygote: Any, many: Path) -> None:
    assert in_a_child(zygote, _MANY + f"attempt(lambda: {ALL_OF_MANY[use]})", many) == ["done"]


def test_c340_a_file_that_changes_is_noticed(many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stio.storage.checkpoint.shards.max_open_files", lambda: 1)
    write_checkpoint(tmp_path / "m", OLD, 2)
    with nothing_left(), sync.open(tmp_path / "m") as checkpoint:
        require_equal(checkpoint.load(), OLD)
        save_file({"b": NEW["b"]}, tmp_path / "new").replace(tmp_path / "m" / SHARDS[1])
        with pytest.raises(stio.ChangedDuringReadError):
            checkpoint.load()
        (tmp_path / "m" / SHARDS[1]).unlink()
        with pytest.raises(stio.ChangedDuringReadError):
            checkpoint.load()
        require_equal({"a": checkpoint.read("a")}, {"a": OLD["a"]})
