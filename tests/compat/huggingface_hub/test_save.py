"""Saving by the hub's rules: names, headers, index, shared tensors, what goes and what stays."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from stio import sync
from stio.compat import huggingface_hub as hub
from stio.errors import DeviceError, SharedTensorsError, UnsupportedDtypeError

INDEX = "model.safetensors.index.json"


def state(count: int = 3, value: float = 1) -> dict[str, torch.Tensor]:
    return {f"layer.{k}": torch.full((4,), float(value + k)) for k in range(count)}


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def read(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def equal(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_one_file(tmp_path: Path) -> None:
    assert hub.save_torch_state_dict(state(), tmp_path, metadata={"by": "me"}) is None  # type: ignore[func-returns-value]
    assert names_in(tmp_path) == ["model.safetensors"]
    assert metadata_of(tmp_path / "model.safetensors") == {"format": "pt", "by": "me"}
    assert equal(read(tmp_path), state())


def test_shards_and_index(tmp_path: Path) -> None:
    hub.save_torch_state_dict(state(), tmp_path, max_shard_size=32, metadata={"z": "1", "a": "2"})
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert names_in(tmp_path) == [*shards, INDEX]
    assert [metadata_of(tmp_path / shard) for shard in shards] == [{"format": "pt"}] * 2
    index = {
        "metadata": {"total_size": 48, "z": "1", "a": "2"},
        "weight_map": {"layer.0": shards[0], "layer.1": shards[0], "layer.2": shards[1]},
    }
    assert (tmp_path / INDEX).read_text() == json.dumps(index, indent=2)
    assert equal(read(tmp_path), state())


def test_saving_a_model_is_saving_its_state(tmp_path: Path) -> None:
    model = mock.Mock()
    keywords: dict[str, Any] = {
        "filename_pattern": "my-pattern",
        "force_contiguous": False,
        "max_shard_size": "3GB",
        "metadata": {"a": "b"},
        "safe_serialization": False,
        "is_main_process": False,
        "shared_tensors_to_discard": ["x"],
    }
    with mock.patch("stio.compat.huggingface_hub.save_torch_state_dict") as save:
        hub.save_torch_model(model, tmp_path, **keywords)
    save.assert_called_once_with(state_dict=model.state_dict.return_value, save_directory=tmp_path, **keywords)


@pytest.mark.parametrize(("most", "num_files"), [("1KiB", 1), ("1.0 kb", 2), ("1000", 2), (1024, 1), (1023, 2), (0, 2)])
def test_b_sizes_of_shards(tmp_path: Path, most: Any, num_files: int) -> None:
    hub.save_torch_state_dict({"a": torch.ones(128), "b": torch.ones(128)}, tmp_path, max_shard_size=most)
    assert len(list(tmp_path.glob("*.safetensors"))) == num_files


@pytest.mark.parametrize("most", [-1, "-1KB", "infGB", "1XB", ""])
def test_b_no_sizes(tmp_path: Path, most: Any) -> None:
    with pytest.raises(ValueError, match="size"):
        hub.save_torch_state_dict(state(), tmp_path, max_shard_size=most)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("pattern", ["model.fp16{suffix}.safetensors", "a{suffix}b.safetensors", "weights{suffix}.bin"])
@pytest.mark.parametrize("most", ["5GB", 16])
def test_patterns(tmp_path: Path, pattern: str, most: Any) -> None:
    (tmp_path / "model.safetensors.manifest.json").write_text("{}")  # another checkpoint's
    hub.save_torch_state_dict(state(2), tmp_path, filename_pattern=pattern, max_shard_size=most)
    shards = [""] if most == "5GB" else ["-00001-of-00002", "-00002-of-00002"]
    expected = [pattern.format(suffix=shard) for shard in shards]
    expected += [pattern.format(suffix="") + ".index.json"] if most == 16 else []
    assert names_in(tmp_path) == sorted([*expected, "model.safetensors.manifest.json"])


@pytest.mark.parametrize(
    "pattern", ["model.safetensors", "sub/model{suffix}.safetensors", "..\\m{suffix}.safetensors", "m{x}{suffix}"]
)
@pytest.mark.parametrize("safe", [True, False])
def test_b_patterns_that_lose_or_lead_elsewhere(tmp_path: Path, pattern: str, safe: bool) -> None:
    with pytest.raises(ValueError, match="filename_pattern|filename pattern"):
        hub.save_torch_state_dict(state(), tmp_path, filename_pattern=pattern, safe_serialization=safe)
    assert names_in(tmp_path) == []


def test_no_directory(tmp_path: Path) -> None:
    for safe in (True, False):
        with pytest.raises(FileNotFoundError):
            hub.save_torch_state_dict(state(), tmp_path / "absent", safe_serialization=safe)
        (tmp_path / "file").write_text("")
        with pytest.raises(NotADirectoryError):
            hub.save_torch_state_dict(state(), tmp_path / "file", safe_serialization=safe)
    assert names_in(tmp_path) == ["file"]


def test_a_directory_may_be_called_like_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "x.safetensors"
    folder.mkdir()
    hub.save_torch_state_dict(state(), str(folder))
    assert names_in(folder) == ["model.safetensors"]


# What goes.

OLD = [
    "model.safetensors",
    INDEX,
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
    "model-00003-of-00003.safetensors",
    "model-00003-of-00003.safetensors.index.json",
]
STAYS = [
    "model.safetensors.backup",
    "model-00001-of-0003.safetensors",
    "model-abcdef01-00001-of-00003.safetensors",
    "xmodel.safetensors",
    "model.fp16.safetensors",
    "modelXsafetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "config.json",
]


@pytest.mark.matrix
@pytest.mark.parametrize("most", ["5GB", 16, 32])
@pytest.mark.parametrize("main", [True, False])
@pytest.mark.parametrize("old", [OLD, OLD[:1], OLD[1:2], OLD[2:4]], ids=len)
def test_what_goes_is_what_the_hub_removes(tmp_path: Path, most: Any, main: bool, old: list[str]) -> None:
    for name in [*old, *STAYS]:
        (tmp_path / name).write_text(name)
    hub.save_torch_state_dict(state(), tmp_path, max_shard_size=most, is_main_process=main)
    count = {"5GB": 1, 16: 3, 32: 2}[most]
    new = [f"model-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)] if count > 1 else OLD[:1]
    new += [INDEX] if count > 1 else []
    kept = [] if main else old
    assert names_in(tmp_path) == sorted({*STAYS, *new, *kept})
    for name in {*STAYS, *kept} - set(new):
        assert (tmp_path / name).read_text() == name
    written: dict[str, torch.Tensor] = {}
    for name in new:
        written |= load_file(tmp_path / name) if name != INDEX else {}
    assert equal(written, state())


def test_nothing_in_no_files(tmp_path: Path) -> None:
    for name in [*OLD, *STAYS]:
        (tmp_path / name).write_text(name)
    hub.save_torch_state_dict({}, tmp_path)
    assert names_in(tmp_path) == sorted(STAYS)
    hub.save_torch_state_dict({}, tmp_path, is_main_process=False, safe_serialization=False)
    assert names_in(tmp_path) == sorted(STAYS)


@pytest.mark.parametrize("most", ["5GB", 16])
def test_stios_own_generation_is_replaced_whole(tmp_path: Path, most: Any) -> None:
    """Shards that are named by a save's id would never be removed once their index is gone."""
    for value in (1, 2):  # the second one's shards have names of their own
        sync.save(state(value=value), tmp_path, max_shard_size=16, hash="sha256")
    assert any(len(name) > len("model-00001-of-00003.safetensors") for name in names_in(tmp_path) if "-of-" in name)
    hub.save_torch_state_dict(state(value=5), tmp_path, max_shard_size=most)
    shards = ["model.safetensors"] if most == "5GB" else [*OLD[2:5], INDEX]
    assert names_in(tmp_path) == sorted(shards)  # the manifest, which would be wrong, is gone too
    assert equal(read(tmp_path), state(value=5))
    assert equal(sync.load(tmp_path), state(value=5))


def test_links_are_replaced_not_followed(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_text("precious")
    (folder / "model.safetensors").symlink_to(elsewhere)
    (folder / "model-00001-of-00002.safetensors").symlink_to(elsewhere)
    hub.save_torch_state_dict(state(), folder)
    assert elsewhere.read_text() == "precious"
    assert names_in(folder) == ["model.safetensors"]
    assert not (folder / "model.safetensors").is_symlink()


def test_b_modes(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        hub.save_torch_state_dict(state(), tmp_path)
        hub.save_torch_state_dict(state(), tmp_path, safe_serialization=False)
    finally:
        os.umask(old)
    for name in ("model.safetensors", "pytorch_model.bin"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
        (tmp_path / name).chmod(0o600)
    hub.save_torch_state_dict(state(), tmp_path)
    hub.save_torch_state_dict(state(), tmp_path, safe_serialization=False)
    for name in ("model.safetensors", "pytorch_model.bin"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


# Shared tensors.


def test_shared_tensors_are_saved_once_and_recorded(tmp_path: Path) -> None:
    whole = torch.arange(8.0)
    given = {"b": whole, "c": whole.view(2, 4), "a": whole[2:4], "d": torch.ones(2)}
    metadata = {"c": "mine"}
    before = dict(given)
    hub.save_torch_state_dict(given, tmp_path, metadata=metadata)
    assert metadata_of(tmp_path / "model.safetensors") == {"format": "pt", "c": "mine", "a": "b"}
    assert equal(read(tmp_path), {"b": whole, "d": torch.ones(2)})
    assert given == before and list(given) == list(before)  # Better: the caller's dicts stay as they are
    assert metadata == {"c": "mine"}


@pytest.mark.parametrize(
    "discard, kept", [([], "a"), (["a"], "b"), (["a", "b"], "c"), (["a", "b", "c"], "a"), (["z"], "a")]
)
def test_names_to_discard(tmp_path: Path, discard: list[str], kept: str) -> None:
    tensor = torch.ones(3)
    given = {"c": tensor, "a": tensor, "b": tensor.view(3, 1)}
    hub.save_torch_state_dict(given, tmp_path, shared_tensors_to_discard=discard, max_shard_size=1)
    assert list(read(tmp_path)) == [kept]
    assert metadata_of(tmp_path / "model.safetensors") == {"format": "pt"} | {
        name: kept for name in given if name != kept
    }


def test_shared_names_stand_in_the_index(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    hub.save_torch_state_dict({"b": tensor, "a": tensor, "c": torch.ones(1)}, tmp_path, max_shard_size=12)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 16, "b": "a"}
    assert list(index["weight_map"]) == ["a", "c"]


def test_b_slices_that_share_nothing_are_saved(tmp_path: Path) -> None:
    whole = torch.arange(8.0)
    given = {
        "head": whole[:4],
        "tail": whole[4:],
        "row": torch.arange(12.0).view(3, 4)[1],
        "wide": torch.ones(1).expand(3),
    }
    hub.save_torch_state_dict(given, tmp_path)
    assert equal(read(tmp_path), given)
    hub.save_torch_state_dict(given, tmp_path, max_shard_size=16)
    assert json.loads((tmp_path / INDEX).read_text())["metadata"] == {"total_size": 16 + 16 + 16 + 12}
    assert len(names_in(tmp_path)) == 5  # each counted by its own bytes, not by its storage's
    assert equal(read(tmp_path), given)


def test_b_what_overlaps_is_decided_by_the_furthest_end(tmp_path: Path) -> None:
    whole = torch.arange(8.0)
    hub.save_torch_state_dict({"all": whole, "b": whole[1:2], "c": whole[4:5]}, tmp_path)
    assert metadata_of(tmp_path / "model.safetensors") == {"format": "pt", "b": "all", "c": "all"}


def test_overlaps_that_cover_nothing_are_refused(tmp_path: Path) -> None:
    whole = torch.arange(8.0)
    with pytest.raises(SharedTensorsError, match="no suitable name to keep"):
        hub.save_torch_state_dict({"a": whole[:4], "b": whole[2:6]}, tmp_path)
    assert names_in(tmp_path) == []


def test_elements_that_are_used_twice_do_not_cover_a_storage(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    comb = whole.as_strided((2, 2), (3, 0))  # as many bytes as the storage, from its first to its last, and two unseen
    with pytest.raises(SharedTensorsError):
        hub.save_torch_state_dict({"a": comb, "b": whole[1:3]}, tmp_path)
    hub.save_torch_state_dict({"a": comb, "b": whole}, tmp_path)
    assert equal(read(tmp_path), {"b": whole})


def test_empty_tensors_share_nothing(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    given = {"a": torch.ones(0), "b": torch.ones(0, 3), "c": whole[2:2], "d": whole}
    hub.save_torch_state_dict(given, tmp_path, max_shard_size=1)
    assert equal(read(tmp_path), given)
    # The hub takes empty tensors for one storage, so they follow the first of them.
    hub.save_torch_state_dict(
        {"a": torch.ones(0, 0), "b": torch.ones(1), "c": torch.ones(0, 0)}, tmp_path, max_shard_size=1
    )
    assert list(json.loads((tmp_path / INDEX).read_text())["weight_map"]) == ["b", "a", "c"]


def test_other_numbers_on_the_same_memory_are_no_duplicates(tmp_path: Path) -> None:
    z = torch.complex(torch.arange(3.0), torch.ones(3))
    hub.save_torch_state_dict({"z": z, "conj": z.conj()}, tmp_path)
    assert equal(read(tmp_path), {"z": z, "conj": z.conj().resolve_conj()})


def test_a_subclass_with_memory_of_its_own(tmp_path: Path) -> None:
    class Named(torch.Tensor):
        pass

    given = {"n": torch.arange(3.0).as_subclass(Named), "p": nn.Parameter(torch.ones(2))}
    hub.save_torch_state_dict(given, tmp_path)
    assert equal(read(tmp_path), {"n": torch.arange(3.0), "p": torch.ones(2)})


# Layouts and what cannot be saved.


def test_layouts(tmp_path: Path) -> None:
    given = {"t": torch.arange(6.0).view(2, 3).t()}
    hub.save_torch_state_dict(given, tmp_path)
    assert equal(read(tmp_path), given)
    with pytest.raises(ValueError, match="non contiguous"):
        hub.save_torch_state_dict(given, tmp_path, force_contiguous=False)
    hub.save_torch_state_dict(state(), tmp_path, force_contiguous=False)
    assert equal(read(tmp_path), state())


@pytest.mark.parametrize(
    "tensor, error",
    [
        (torch.empty(3, device="meta"), DeviceError),
        (torch.eye(3).to_sparse(), ValueError),
        (torch.ones(2, dtype=torch.complex128), UnsupportedDtypeError),
        (TwoTensor(torch.ones(2), torch.ones(2)), TypeError),
        ("text", TypeError),
        ([1, 2], TypeError),
    ],
    ids=["meta", "sparse", "complex128", "wrapper", "text", "list"],
)
def test_what_cannot_be_saved_leaves_what_was(tmp_path: Path, tensor: Any, error: type[Exception]) -> None:
    assert issubclass(DeviceError, RuntimeError)
    hub.save_torch_state_dict(state(), tmp_path)
    with pytest.raises(error, match="w"):
        hub.save_torch_state_dict({"w": tensor}, tmp_path)
    assert names_in(tmp_path) == ["model.safetensors"]
    assert equal(read(tmp_path), state())


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}])
def test_a_header_holds_text(tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(TypeError, match="strings"):
        hub.save_torch_state_dict(state(), tmp_path, metadata=metadata)
    assert names_in(tmp_path) == []


def test_an_index_holds_what_json_does(tmp_path: Path) -> None:
    hub.save_torch_state_dict(state(), tmp_path, max_shard_size=16, metadata={"step": 5, "total_size": 7})  # type: ignore[dict-item]
    assert json.loads((tmp_path / INDEX).read_text())["metadata"] == {"total_size": 7, "step": 5}
    with pytest.raises(TypeError):
        hub.save_torch_state_dict(state(), tmp_path, max_shard_size=16, metadata={"bad": object()})  # type: ignore[dict-item]


# Pickles.


@pytest.mark.parametrize("most", ["5GB", 32])
def test_pickles(tmp_path: Path, most: Any, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("pytorch_model.bin", "pytorch_model-00001-of-00009.bin", "pytorch_model.bin.index.json", *OLD):
        (tmp_path / name).write_text(name)
    given = state()
    given["tied"] = given["layer.2"]
    hub.save_torch_state_dict(given, tmp_path, max_shard_size=most, safe_serialization=False)
    assert "we strongly recommend using safe serialization" in caplog.text
    shards = ["pytorch_model.bin"]
    if most == 32:
        shards = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
        index = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())
        assert index["metadata"] == {"total_size": 48}
        assert index["weight_map"]["tied"] == index["weight_map"]["layer.2"] == shards[1]
    expected = [*shards, "pytorch_model.bin.index.json"] if most == 32 else shards
    assert names_in(tmp_path) == sorted([*expected, *OLD])
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        found |= torch.load(tmp_path / shard)
    assert equal(found, given)
    assert found["tied"].data_ptr() == found["layer.2"].data_ptr()


def test_pickles_hold_wrappers(tmp_path: Path) -> None:
    one = torch.ones(2)
    hub.save_torch_state_dict({"w": TwoTensor(one, one)}, tmp_path, safe_serialization=False)  # type: ignore[dict-item]
    assert torch.equal(torch.load(tmp_path / "pytorch_model.bin", weights_only=False)["w"].a, one)


# Around it.


def test_no_warning_on_a_running_loop(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)

    async def body() -> None:
        hub.save_torch_model(model, tmp_path)
        hub.load_torch_model(model, tmp_path, strict=True)

    asyncio.run(body())  # warnings are errors


@pytest.mark.slow
def test_what_to_install_is_named(torch_zygote: Any) -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "import stio.sync, stio.compat.safetensors.torch\n"
        "try:\n"
        "    import stio.compat.huggingface_hub\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([torch_zygote.python, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("which is not installed: pip install 'stio-torch[hub]'\n"), done.stderr


def test_the_split_is_the_hubs_own() -> None:
    for name in ("StateDictSplit", "split_torch_state_dict_into_shards", "get_torch_storage_id"):
        assert getattr(hub, name) is getattr(huggingface_hub, name)


def test_names_are_sorted_and_there() -> None:
    assert hub.__all__ == sorted(hub.__all__)
    assert all(getattr(hub, name).__doc__ for name in hub.__all__)
