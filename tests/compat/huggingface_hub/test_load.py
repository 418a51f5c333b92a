"""Loading by the hub's rules: what is chosen, what is refused, devices, ties."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerators import gpu
from safetensors.torch import save_file
from torch import nn

from stio import sync
from stio.compat import huggingface_hub as hub
from stio.device.base import resolve_device
from stio.errors import AmbiguousCheckpointError, FormatError, IndexFormatError, StorageError, UnsafePathError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Model(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)


class Tied(nn.Module):
    """Two names on one parameter, and a third one on its memory."""

    def __init__(self, value: float = 0.0, device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.full((4, 4), value, device=device))
        self.head = self.embed
        self.bias = nn.Parameter(torch.full((4,), value, device=device))
        if device == "cpu":
            self.register_buffer("flat", self.embed.detach().view(-1))


def values(model: nn.Module) -> set[float]:
    return {float(value) for tensor in model.state_dict().values() for value in tensor.flatten()}


def write_index(folder: Path, weight_map: Any, **more: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map, **more}))


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


# One file.


@pytest.mark.parametrize("name", [SINGLE, "weights.bin", "model.SAFETENSORS", "noname"])
def test_a_file_is_read_as_safetensors_whatever_its_name(tmp_path: Path, name: str) -> None:
    save_file({"x": torch.arange(6.0)}, tmp_path / name)
    for where in (tmp_path / name, str(tmp_path / name)):
        assert torch.equal(hub.load_state_dict_from_file(where)["x"], torch.arange(6.0))
    if name.lower().endswith(".safetensors"):
        assert list(hub.load_state_dict_from_file(tmp_path / name, safe=False)) == ["x"]


@pytest.mark.parametrize("name", [SINGLE, "model.bin", "model.SafeTensors", INDEX])
def test_a_pickle_is_never_run_where_safe(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    (tmp_path / name).write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(ValueError, match="Cannot load .* as safetensors"):
        hub.load_state_dict_from_file(tmp_path / name)
    if name.lower().endswith(".safetensors"):
        with pytest.raises(FormatError):
            hub.load_state_dict_from_file(tmp_path / name, safe=False, weights_only=False)
    assert not mark.exists()


def test_an_index_is_no_file_of_tensors(tmp_path: Path) -> None:
    sync.save({"x": torch.ones(9), "y": torch.ones(9)}, tmp_path, max_shard_size=36)
    with pytest.raises(ValueError, match="Cannot load .* as safetensors"):
        hub.load_state_dict_from_file(tmp_path / INDEX)


def test_pickles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.bin"
    torch.save({"x": torch.ones(2), "n": 3}, path)
    with mock.patch.object(torch, "load", wraps=torch.load) as load:
        assert hub.load_state_dict_from_file(path, "cpu", True, True, safe=False)["n"] == 3
    assert load.call_args == mock.call(path, map_location="cpu", weights_only=True, mmap=True)
    assert not caplog.text
    mark = tmp_path / "mark"
    torch.save(Payload(mark), path)
    with pytest.raises(pickle.UnpicklingError):
        hub.load_state_dict_from_file(path, safe=False)
    assert not mark.exists()
    hub.load_state_dict_from_file(path, safe=False, weights_only=False)
    assert mark.exists()
    assert "arbitrary code at load time" in caplog.text


@pytest.mark.parametrize("name", ["absent.safetensors", "", "absent\0.bin", "."])
def test_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError, match="No checkpoint file found"):
        hub.load_state_dict_from_file(str(tmp_path / name))


@pytest.mark.parametrize(
    "metadata, fine",
    [
        (None, True),
        ({"format": "pt"}, True),
        ({"format": "mlx", "x": "y"}, True),
        ({"format": "tf"}, False),
        ({"x": "y"}, True),
        ({}, True),
    ],
)
def test_metadata_name_a_format(tmp_path: Path, metadata: Any, fine: bool) -> None:
    path = tmp_path / SINGLE
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    header["__metadata__x"] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    for safe in (True, False):
        if fine:
            assert list(hub.load_state_dict_from_file(path, safe=safe)) == ["__metadata__x"]
        else:
            with pytest.raises(OSError, match="does not contain the valid metadata") as caught:
                hub.load_state_dict_from_file(path, safe=safe)
            assert isinstance(caught.value, StorageError)


@pytest.mark.parametrize("where", [None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, {"cuda:0": "cpu"}, "meta"])
def test_map_location(tmp_path: Path, where: Any, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"x": torch.arange(6.0)}, tmp_path / SINGLE)
    found = hub.load_state_dict_from_file(tmp_path / SINGLE, map_location=where)["x"]
    assert found.device == torch.device("cpu")
    assert torch.equal(found, torch.arange(6.0))
    assert bool(caplog.text) == (where == "meta")


@pytest.mark.parametrize(
    "where, error", [("bogus", RuntimeError), (lambda storage, place: storage, TypeError), ("cuda:99", RuntimeError)]
)
def test_wrong_map_location(tmp_path: Path, where: Any, error: type[Exception]) -> None:
    save_file({"x": torch.arange(6.0)}, tmp_path / SINGLE)
    with pytest.raises(error):
        hub.load_state_dict_from_file(tmp_path / SINGLE, map_location=where)


@gpu
def test_b_map_location_keeps_its_index(tmp_path: Path) -> None:
    last = torch.device(resolve_device("auto").type, torch.accelerator.device_count() - 1)
    save_file(Model(3).state_dict(), tmp_path / SINGLE)
    found = hub.load_state_dict_from_file(tmp_path / SINGLE, map_location=last)
    assert {tensor.device for tensor in found.values()} == {last}
    assert {float(value) for tensor in found.values() for value in tensor.flatten()} == {3.0}


# A directory.


def test_one_file_of_any_name(tmp_path: Path) -> None:
    save_file(Model(2).state_dict(), tmp_path / "whatever.safetensors")
    torch.save(Model(3).state_dict(), tmp_path / "a.bin")
    model = Model()
    result = hub.load_torch_model(model, tmp_path)
    assert result.missing_keys == result.unexpected_keys == []
    assert str(result) == "<All keys matched successfully>"
    assert values(model) == {2.0}
    hub.load_torch_model(model, tmp_path, safe=False)  # a fallback, not a preference
    assert values(model) == {2.0}
    save_file(Model(4).state_dict(), tmp_path / "second.safetensors")
    for safe in (True, False):
        with pytest.raises(AmbiguousCheckpointError, match="does not contain a valid checkpoint"):
            hub.load_torch_model(model, tmp_path, safe=safe)
    assert values(model) == {2.0}


@pytest.mark.parametrize("safe", [True, False])
def test_no_checkpoint(tmp_path: Path, safe: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="does not contain a valid checkpoint"):
        hub.load_torch_model(Model(), tmp_path, safe=safe)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        hub.load_torch_model(Model(), tmp_path / "absent", safe=safe)


@pytest.mark.parametrize(
    "pattern, safe, there, chosen",
    [
        (None, True, [INDEX], "model{suffix}.safetensors"),
        (None, False, ["pytorch_model.bin.index.json"], "pytorch_model{suffix}.bin"),
        (None, False, [INDEX, "pytorch_model.bin.index.json"], "model{suffix}.safetensors"),
        ("v{suffix}.bin", False, ["v.bin.index.json", INDEX], "v{suffix}.bin"),
        ("v{suffix}.safetensors", True, ["v.safetensors.index.json", INDEX], "v{suffix}.safetensors"),
    ],
)
def test_which_index(tmp_path: Path, pattern: str | None, safe: bool, there: list[str], chosen: str) -> None:
    for name in there:
        (tmp_path / name).touch()
    with mock.patch("stio.compat.huggingface_hub._load_sharded_checkpoint") as load:
        hub.load_torch_model(Model(), tmp_path, safe=safe, filename_pattern=pattern)
    assert load.call_args.kwargs["filename_pattern"] == chosen


def test_a_pattern_for_pickles_is_not_safe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not describe safetensors files but `safe=True`"):
        hub.load_torch_model(Model(), tmp_path, filename_pattern="model{suffix}.bin")


# Shards.


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_shards(tmp_path: Path, safe: bool, strict: bool) -> None:
    hub.save_torch_model(Model(5), tmp_path, max_shard_size=64, safe_serialization=safe)
    model = Model()
    result = hub.load_torch_model(model, tmp_path, safe=safe, strict=strict)
    assert result.missing_keys == result.unexpected_keys == []
    assert values(model) == {5.0}


def test_names_that_differ(tmp_path: Path) -> None:
    for most in (64, "5GB"):
        hub.save_torch_state_dict(
            {"a.weight": torch.ones(4, 4), "extra": torch.ones(99)}, tmp_path, max_shard_size=most
        )
        result = hub.load_torch_model(Model(), tmp_path)
        assert sorted(result.missing_keys) == ["a.bias", "b.bias", "b.weight"]
        assert result.unexpected_keys == ["extra"]
        with pytest.raises(RuntimeError, match=r'(?s)Missing key\(s\).*"a.bias".*|Unexpected key\(s\).*"extra"'):
            hub.load_torch_model(Model(), tmp_path, strict=True)


def test_the_index_cannot_say_what_was_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hub.save_torch_model(Model(5), tmp_path, max_shard_size=80)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    del weight_map["a.bias"]
    weight_map["ghost"] = weight_map["a.weight"]
    write_index(tmp_path, weight_map)
    for strict in (True, False):
        model = Model()
        result = hub.load_torch_model(model, tmp_path, strict=strict)
        assert result.missing_keys == result.unexpected_keys == []
        assert values(model) == {5.0}
    assert "a.bias" in caplog.text


def test_a_missing_shard(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "sub/model-00001-of-00001.safetensors"})
    with pytest.raises(FileNotFoundError, match="does not contain a valid checkpoint: .*shard that does not exist"):
        hub.load_torch_model(Model(), tmp_path)
    (tmp_path / "sub").mkdir()
    save_file(Model(1).state_dict(), tmp_path / "sub" / "model-00001-of-00001.safetensors")
    hub.load_torch_model(Model(), tmp_path, strict=True)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        '{"weight_map": {"a": "b//x.safetensors"}}',
        *["null", "[1, 2]", '{"foo": 1}', '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "", "{", "\ufeff{}"],
        '{"weight_map": ' + "[" * 100_000,
        '{"weight_map": {"a": ' + "1" * 5000 + "}}",
    ],
    ids=range(12),
)
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(IndexFormatError, match="Invalid (index file|shard filename)"):
        hub.load_torch_model(mock.Mock(), tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        *("/tmp/x", "\\x", "C:x", "C:\\x", "\\\\server\\share\\x", "../x", "..\\x", "a/../../x", "a:b", "x\0"),
        *("a\\x", "./x", "a/.. /x", "%2e%2e/x", "x\n", "s3://bucket/x"),
    ],
)
def test_unsafe_shards(tmp_path: Path, shard: str) -> None:
    write_index(tmp_path, {"a": shard + ".safetensors"})
    with pytest.raises(UnsafePathError, match=r"Invalid shard filename in index file.*without '..' components"):
        hub.load_torch_model(mock.Mock(), tmp_path)


def test_an_index_of_safetensors_names_no_pickles(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "model.bin").write_bytes(pickle.dumps(Payload(mark)))
    write_index(tmp_path, {"a": "model.bin"})
    for safe in (True, False):
        with pytest.raises(
            ValueError, match=r"Invalid shard filename in index file.*Expected '.safetensors' extension"
        ):
            hub.load_torch_model(mock.Mock(), tmp_path, safe=safe, weights_only=False)
    assert not mark.exists()


# Ties.


@pytest.mark.parametrize("most", ["5GB", 64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_b_strict_takes_a_tie_for_loaded(tmp_path: Path, most: Any, device: str) -> None:
    saved = Tied(7.0)
    if device == "meta":
        del saved.flat
    hub.save_torch_model(saved, tmp_path, max_shard_size=most)
    model = Tied(device=device)
    if device == "meta":
        with pytest.raises(RuntimeError, match=r"'meta' have no memory.*load by `stio.load_into\(assign=True\)`"):
            hub.load_torch_model(model, tmp_path, strict=True)
        return
    result = hub.load_torch_model(model, tmp_path, strict=True)
    assert values(model) == {7.0}
    assert result.missing_keys == result.unexpected_keys == []
    assert sorted(hub.load_torch_model(Tied(), tmp_path).missing_keys) == (["flat", "head"])


@pytest.mark.parametrize("most", ["5GB", 64])
def test_strict_misses_what_is_not_tied(tmp_path: Path, most: Any) -> None:
    hub.save_torch_model(Tied(7.0), tmp_path, max_shard_size=most)
    model = Tied()
    model.flat = torch.zeros(16)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "flat"'):
        hub.load_torch_model(model, tmp_path, strict=True)
    model = Tied()
    model.embed = nn.Parameter(torch.zeros(4, 4))
    del model.flat
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"head"'):
        hub.load_torch_model(model, tmp_path, strict=True)


def test_aliases_of_stios_own_are_loaded_too(tmp_path: Path) -> None:
    model = Tied(7.0)
    del model.flat
    sync.save(model, tmp_path)
    found = Tied()
    del found.flat
    assert hub.load_torch_model(found, tmp_path, strict=True).missing_keys == []
    assert values(found) == {7.0}
