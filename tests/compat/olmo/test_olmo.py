"""OLMo's nested state: read and written against OLMo's own reader and writer, nothing run, old files used if new ones are missing."""

from __future__ import annotations

import asyncio
import base64
import collections
import os
import pickle
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from counts import count
from safetensors.torch import load_file, save_file

import stio
from stio.compat import olmo
from stio.conversion import safe_pickle
from stio.conversion.safe_pickle import PlainPickles

Nested = dict[Any, Any]


def read_as_olmo(path: Path) -> Nested:
    """Do what OLMo's reader does: unpickle names and leaves, put them into dicts."""
    result: Nested = {}
    for name, tensor in load_file(path).items():
        keys, is_pickled = pickle.loads(base64.urlsafe_b64decode(name))
        inner = result
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = pickle.loads(tensor.numpy().tobytes()) if is_pickled else tensor
    return result


def flat_as_olmo(state: Nested, above: tuple[Any, ...] = ()) -> dict[str, torch.Tensor]:
    """Do what OLMo's writer does."""
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat_as_olmo(value, (*above, key))
            continue
        is_tensor = isinstance(value, torch.Tensor)
        name = base64.urlsafe_b64encode(pickle.dumps(((*above, key), not is_tensor))).decode()
        found[name] = value if is_tensor else torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and set(one) == set(other) and all(same(one[k], other[k]) for k in one)
    return type(one) is type(other) and bool(one == other)


def optimizer_state() -> Nested:
    layer = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    layer(torch.ones(4)).sum().backward()
    optimizer.step()
    state: Nested = optimizer.state_dict()
    state["names"] = {"wte.weight": {"exp_avg": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T}}
    return state


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "optim.safetensors"


def test_round_trip_and_the_other_reader(path: Path) -> None:
    state = optimizer_state() | {"rng": random.getstate(), "none": None, "text": "x", "deep": {1: {b"k": b"z"}}}
    result = olmo.state_dict_to_safetensors_file(state, path)
    assert result.files == (path.name,)
    assert same(read_as_olmo(path), state)
    assert same(olmo.safetensors_file_to_state_dict(path), state)


def test_a_file_of_the_other_writer(path: Path) -> None:
    state = optimizer_state()
    save_file({name: tensor.contiguous() for name, tensor in flat_as_olmo(state).items()}, path)
    assert same(olmo.safetensors_file_to_state_dict(path), state)


def test_writes_the_bytes_of_the_other_writer(path: Path, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(3), "b": torch.zeros(2, dtype=torch.float16)}, "step": 7}
    save_file(flat_as_olmo(state), tmp_path / "other.safetensors")
    olmo.state_dict_to_safetensors_file(state, path)
    assert path.read_bytes() == (tmp_path / "other.safetensors").read_bytes()


def test_equal_states_are_equal_files(path: Path, tmp_path: Path) -> None:
    state = optimizer_state()
    olmo.state_dict_to_safetensors_file(state, path)
    again = olmo.safetensors_file_to_state_dict(path)
    olmo.state_dict_to_safetensors_file(again, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_empty_dicts_and_ordered_ones(path: Path) -> None:
    state = {"state": {}, "o": collections.OrderedDict(a=torch.ones(1)), "e": collections.OrderedDict()}
    olmo.state_dict_to_safetensors_file(state, path)
    expected = {"state": {}, "o": {"a": torch.ones(1)}, "e": {}}
    assert same(olmo.safetensors_file_to_state_dict(path), expected)
    assert same(read_as_olmo(path), expected)
    olmo.state_dict_to_safetensors_file({}, path)
    assert olmo.safetensors_file_to_state_dict(path) == {}


def test_shared_memory_is_saved_each(path: Path) -> None:
    weight = torch.ones(3)
    olmo.state_dict_to_safetensors_file({"a": weight, "b": weight, "view": weight[1:]}, path)
    assert same(read_as_olmo(path), {"a": weight, "b": weight, "view": weight[1:]})


def test_tensors_are_ones_own(path: Path) -> None:
    olmo.state_dict_to_safetensors_file({"a": torch.ones(3)}, path)
    olmo.safetensors_file_to_state_dict(path, torch.device("cpu"))["a"].mul_(2)
    assert same(olmo.safetensors_file_to_state_dict(path, "cpu"), {"a": torch.ones(3)})
    with pytest.raises(TypeError, match="map_location"):
        olmo.safetensors_file_to_state_dict(path, {"cuda": "cpu"})  # type: ignore[arg-type]


def test_no_warning_under_a_running_loop(path: Path) -> None:
    async def body() -> Nested:
        olmo.state_dict_to_safetensors_file({"a": 1}, path)
        return olmo.safetensors_file_to_state_dict(path)

    assert asyncio.run(body()) == {"a": 1}  # warnings are errors here


# What is not plain.


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


def test_crafted_names_and_leaves_run_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = base64.urlsafe_b64encode(pickle.dumps(((_Runs(),), False))).decode()
    leaf = torch.frombuffer(bytearray(pickle.dumps(_Runs())), dtype=torch.uint8)
    good = base64.urlsafe_b64encode(pickle.dumps((("state", 0), True))).decode()
    for tensors, shown in (({name: torch.ones(1)}, "name"), ({good: leaf}, r"\['state'\]\[0\]")):
        save_file(tensors, path)
        with pytest.raises(stio.FormatError, match=rf"{path.name}: .*{shown}.*refers to code.*mkdir.*trust_pickle"):
            olmo.safetensors_file_to_state_dict(path)
    assert not (tmp_path / "pwned").exists()


def test_trusted_pickles_are_read_and_said_aloud(path: Path) -> None:
    state = {"numpy": np.random.get_state(), "when": collections.Counter("aab").most_common, "plain": 1}
    state["when"] = collections.deque([1])
    with pytest.warns(
        RuntimeWarning, match=r"only trust_pickle=True will read \['numpy'\], \['when'\]: it refers to code"
    ) as said:
        olmo.state_dict_to_safetensors_file(state, path)
    assert [warning.filename for warning in said] == [__file__]
    with pytest.raises(stio.FormatError, match="trust_pickle"):
        olmo.safetensors_file_to_state_dict(path)
    with pytest.warns(RuntimeWarning, match=r"unpickling \['.*can run any code") as said:
        found = olmo.safetensors_file_to_state_dict(path, trust_pickle=True)
    assert len(said) == 1
    assert said[0].filename == __file__
    with pytest.warns(RuntimeWarning) as said:
        olmo.load_state_dict(path.parent, path.name, trust_pickle=True)
    assert said[0].filename == __file__
    assert found["when"] == collections.deque([1])
    assert (found["numpy"][1] == state["numpy"][1]).all()


def test_the_warning_of_a_save_lists_a_few_values(path: Path) -> None:
    torch.save({"optim": {k: complex(k) for k in range(8)}, "lr": [torch.ones(1)]}, path.with_suffix(".pt"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        olmo.pt_file_to_safetensors_file(path.with_suffix(".pt"), path, trust_pickle=True)
    (warning,) = [warning for warning in said if "only trust_pickle=True will read" in str(warning.message)]
    assert re.search(
        r"\['optim'\]\[0\], .*\['optim'\]\[4\] and 4 others: it refers to code .*; save", str(warning.message)
    )
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(1), 1.0),
        (np.longlong(3), 3),
        ({"lr": np.float64(0.5)}, {"lr": 0.5}),
        ([np.bool_(True)], [True]),
        (torch.float16, "float16"),
    ],
)
def test_a_save_warns_of_what_stands_anywhere_but_in_plain_state(path: Path, value: Any, plain: Any) -> None:
    with pytest.warns(RuntimeWarning, match="deep"):
        olmo.state_dict_to_safetensors_file({"a": {"deep": [value]}}, path)
    olmo.state_dict_to_safetensors_file({"a": {"deep": [plain]}}, path)
    assert olmo.safetensors_file_to_state_dict(path) == {"a": {"deep": [plain]}}


@pytest.mark.parametrize("value", [1, {"a": 1, "b": 2}])
def test_a_key_that_is_nan_is_refused(path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="NaN"):
        olmo.state_dict_to_safetensors_file({"x": {float("nan"): value}}, path)
    assert not path.exists()


@pytest.mark.matrix
@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(
    ("key", "most"),
    [(lambda k: k + 0.5, count(1000, safe_pickle._MAX_FORGEABLE_KEYS)), (lambda k: k + (1 << 64), 100)],
    ids=["floats", "integers"],
)
def test_a_save_counts_odd_keys_as_the_reader_does(
    path: Path, monkeypatch: pytest.MonkeyPatch, key: Any, most: int, more: int
) -> None:
    """In `make nightly` with as many as there may be of one kind, which takes seconds."""
    monkeypatch.setattr(safe_pickle, "_MAX_FORGEABLE_KEYS", most)
    state = {"names": dict.fromkeys(map(key, range(most - 10)), 1), "value": [{key(k): 1 for k in range(10 + more)}]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        olmo.state_dict_to_safetensors_file(state, path)
    assert len(caught) == more
    if caught:
        with pytest.raises(stio.FormatError, match="too many keys"):
            olmo.safetensors_file_to_state_dict(path)
    else:
        assert olmo.safetensors_file_to_state_dict(path) == state


def test_a_save_counts_steps_at_least_as_the_reader_does(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainPickles.__init__, "__defaults__", (1_000,))
    for number in range(5, 60, 5):
        state = {
            "t": {k: torch.ones(1) for k in range(number)},
            "n": {"a" * k: 1 for k in range(number)},
            "l": [1] * number,
        }
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            olmo.state_dict_to_safetensors_file(state, path)
        if not caught:
            assert olmo.safetensors_file_to_state_dict(path) == state
    assert caught


def test_a_value_whose_pickling_fails_in_any_way_is_named(path: Path) -> None:
    class Odd:
        def __reduce__(self) -> Any:
            raise NotImplementedError("of the value")

    with pytest.raises(TypeError, match=r"\['odd'\] cannot be pickled: of the value"):
        olmo.state_dict_to_safetensors_file({"odd": [Odd()]}, path)


def test_trust_says_nothing_where_it_is_not_used(path: Path) -> None:
    olmo.state_dict_to_safetensors_file({"a": [1, {"b": 2.5}]}, path)
    assert olmo.safetensors_file_to_state_dict(path, trust_pickle=True) == {"a": [1, {"b": 2.5}]}


def test_pickles_that_fail_are_format_errors(path: Path) -> None:
    name = base64.urlsafe_b64encode(pickle.dumps((("a",), True))).decode()
    save_file({name: torch.tensor([0x80, 4, 0x2E], dtype=torch.uint8)}, path)
    with pytest.raises(stio.FormatError, match="plain values"):
        olmo.safetensors_file_to_state_dict(path)
    with pytest.warns(RuntimeWarning), pytest.raises(stio.FormatError, match="cannot be unpickled"):
        olmo.safetensors_file_to_state_dict(path, trust_pickle=True)
    save_file({name: torch.ones(3)}, path)
    with pytest.raises(stio.FormatError, match="row of bytes"):
        olmo.safetensors_file_to_state_dict(path)


def test_paths_that_contradict_each_other(path: Path) -> None:
    def name(*keys: object, protocol: int = 4) -> str:
        return base64.urlsafe_b64encode(pickle.dumps((keys, False), protocol=protocol)).decode()

    for names in ([name("a"), name("a", protocol=2)], [name("a"), name("a", "b")]):
        save_file({one: torch.ones(1) for one in names}, path)
        with pytest.raises(stio.FormatError, match=r"\['a'\]"):
            olmo.safetensors_file_to_state_dict(path)


def test_other_files(path: Path) -> None:
    save_file({"wte.weight": torch.ones(1)}, path)
    with pytest.raises(stio.FormatError, match=r"load its tensors by stio\.load"):
        olmo.safetensors_file_to_state_dict(path)
    path.write_bytes(b"short")
    with pytest.raises(stio.StioError):
        olmo.safetensors_file_to_state_dict(path)
    with pytest.raises(FileNotFoundError):
        olmo.safetensors_file_to_state_dict(path.with_name("none.safetensors"))


@pytest.mark.parametrize(
    ("state", "error", "match"),
    [
        ([], TypeError, "must be a dict"),
        ({"a": {object(): 1}}, TypeError, "a key is text"),
        ({"a": {("b", 0): 1}}, TypeError, "a key is text"),
        ({"a": {"b": lambda: 1}}, TypeError, r"\['a'\]\['b'\] cannot be pickled"),
        ({"a": {"b": torch.ones(2).to_sparse()}}, ValueError, r"\['a'\]\['b'\].*sparse"),
        ({"a": {"b": torch.ones(2, device="meta")}}, ValueError, r"\['a'\]\['b'\].*meta"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, stio.UnsupportedDtypeError, "no such dtype"),
    ],
)
def test_what_cannot_be_written(path: Path, state: Any, error: type[Exception], match: str) -> None:
    path.write_text("old")
    with pytest.raises(error, match=match):
        olmo.state_dict_to_safetensors_file(state, path)
    assert path.read_text() == "old"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_state_that_contains_itself(path: Path) -> None:
    state: Nested = {"a": {}}
    state["a"]["b"] = state
    with pytest.raises(ValueError, match="contains itself"):
        olmo.state_dict_to_safetensors_file(state, path)
    shared = {"x": 1}
    olmo.state_dict_to_safetensors_file({"a": shared, "b": shared}, path)
    assert olmo.safetensors_file_to_state_dict(path) == {"a": {"x": 1}, "b": {"x": 1}}


def nested(kind: Any, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = kind(value)
    return value


def itself() -> list[Any]:
    value: list[Any] = [1]
    value.append({"again": value})
    return value


@pytest.mark.parametrize(
    "value",
    [itself(), nested(lambda inner: [inner], 101), nested(lambda inner: [{"k": inner}], 51)],
    ids=["cycle", "lists", "lists of dicts"],
)
def test_a_save_warns_of_what_the_reader_would_refuse(path: Path, value: Any) -> None:
    with pytest.warns(
        RuntimeWarning, match=r"only trust_pickle=True will read \['a'\]: the value (contains|is nested)"
    ):
        olmo.state_dict_to_safetensors_file({"a": value}, path)
    with pytest.raises(stio.FormatError, match="trust_pickle=True reads it"):
        olmo.safetensors_file_to_state_dict(path)


@pytest.mark.parametrize(
    ("state", "error", "match"),
    [
        ({"a": nested(lambda inner: [inner], 100_000)}, TypeError, r"\['a'\] cannot be pickled: .*recursion"),
        ({"a": nested(lambda inner: {"k": inner}, 100_000)}, ValueError, "dicts are nested"),
    ],
    ids=["lists", "dicts"],
)
def test_what_no_reader_could_read_is_not_written(path: Path, state: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        olmo.state_dict_to_safetensors_file(state, path)
    assert not path.exists()


@pytest.mark.parametrize(
    "state",
    [
        {"a": nested(lambda inner: [inner], 99)},
        nested(lambda inner: {"k": inner}, 500),
    ],
    ids=["lists", "dicts"],
)
def test_what_is_just_not_too_deep_comes_back(path: Path, state: Any) -> None:
    olmo.state_dict_to_safetensors_file(state, path)
    assert olmo.safetensors_file_to_state_dict(path) == state


def test_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.safetensors"):
        olmo.state_dict_to_safetensors_file({"a": 1}, tmp_path / "optim.st")


# `load_state_dict` and files of torch.save.


def test_the_newer_file_goes_first(tmp_path: Path) -> None:
    torch.save({"from": "pt", "w": torch.ones(2)}, tmp_path / "optim.pt")
    assert olmo.load_state_dict(tmp_path, "optim.pt")["from"] == "pt"
    olmo.state_dict_to_safetensors_file({"from": "safetensors"}, tmp_path / "optim.safetensors")
    assert olmo.load_state_dict(str(tmp_path), "optim.pt", map_location="cpu") == {"from": "safetensors"}
    assert olmo.load_state_dict(tmp_path, "optim.safetensors") == {"from": "safetensors"}


def test_the_index_of_a_device_is_not_the_cpu(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "optim.pt")
    if torch.accelerator.is_available():
        assert olmo.load_state_dict(tmp_path, "optim.pt", map_location=0)["w"].device.index == 0
    else:
        with pytest.raises(stio.DeviceError):
            olmo.load_state_dict(tmp_path, "optim.pt", map_location=0)


@pytest.mark.parametrize("content", [b"", b"broken", None])
def test_a_corrupt_newer_file_is_no_missing_one(tmp_path: Path, content: bytes | None) -> None:
    torch.save({"from": "pt"}, tmp_path / "optim.pt")
    if content is None:
        (tmp_path / "optim.safetensors").symlink_to(tmp_path / "gone")
    else:
        (tmp_path / "optim.safetensors").write_bytes(content)
    with pytest.raises(stio.StioError):
        olmo.load_state_dict(tmp_path, "optim.pt")


def test_the_cache_is_looked_into_first(tmp_path: Path) -> None:
    for folder in ("cache", "dir"):
        (tmp_path / folder).mkdir()
        olmo.state_dict_to_safetensors_file({"from": folder}, tmp_path / folder / "a.safetensors")
    torch.save({"from": "pt"}, tmp_path / "cache" / "b.pt")
    olmo.state_dict_to_safetensors_file({"from": "dir"}, tmp_path / "dir" / "b.safetensors")
    assert olmo.load_state_dict(tmp_path / "dir", "a.pt", local_cache=tmp_path / "cache") == {"from": "cache"}
    assert olmo.load_state_dict(tmp_path / "dir", "b.pt", local_cache=tmp_path / "cache") == {"from": "dir"}


def test_wrong_calls(tmp_path: Path) -> None:
    with pytest.raises(stio.CheckpointNotFoundError):
        olmo.load_state_dict("s3://bucket/step1", "model.pt")
    with pytest.raises(ValueError, match=r"ends in \.pt"):
        olmo.load_state_dict(tmp_path, "model.bin")
    with pytest.raises(stio.CheckpointNotFoundError, match=r"model\.safetensors or model\.pt"):
        olmo.load_state_dict(tmp_path, "model.pt")


def test_old_files_run_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": _Runs()}, tmp_path / "train.pt")
    with pytest.raises(stio.FormatError, match="trust_pickle"):
        olmo.load_state_dict(tmp_path, "train.pt")
    assert not (tmp_path / "pwned").exists()
    with pytest.warns(RuntimeWarning, match="can run any code"):
        olmo.load_state_dict(tmp_path, "train.pt", trust_pickle=True)
    assert (tmp_path / "pwned").exists()


@pytest.mark.parametrize("new_format", [True, False])
def test_conversion_of_a_pt_file(tmp_path: Path, new_format: bool) -> None:
    state = optimizer_state()
    torch.save(state, tmp_path / "optim.pt", _use_new_zipfile_serialization=new_format)
    olmo.pt_file_to_safetensors_file(tmp_path / "optim.pt")
    (tmp_path / "optim.pt").unlink()
    assert same(olmo.load_state_dict(tmp_path, "optim.pt"), state)


def test_conversion_of_what_is_no_state(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(stio.FormatError, match="no dict"):
        olmo.pt_file_to_safetensors_file(tmp_path / "list.pt")
    (tmp_path / "cut.pt").write_bytes(b"PK\x03\x04")
    for name in ("cut.pt", "none.pt"):
        with pytest.raises(stio.StioError):
            olmo.pt_file_to_safetensors_file(tmp_path / name)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["cut.pt", "list.pt"]


def test_stios_format_keeps_types_order_and_ties_without_a_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    state: Nested = collections.OrderedDict(
        z={"w": tied, 0: (1, [2.5, None, b"x"]), "dtype": torch.bfloat16}, a=[tied, {}], empty={}
    )
    path = tmp_path / "state.safetensors"
    olmo.state_dict_to_safetensors_file(state, path, format="stio")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    for found in (
        olmo.safetensors_file_to_state_dict(path),
        olmo.load_state_dict(tmp_path, "state.pt"),
        stio.sync.load_state(path),
    ):
        assert type(found) is collections.OrderedDict and list(found) == ["z", "a", "empty"]
        assert found["z"]["w"] is found["a"][0] and torch.equal(found["z"]["w"], tied)
        assert found["z"][0] == (1, [2.5, None, b"x"]) and found["z"]["dtype"] is torch.bfloat16
        assert found["a"][1] == {} == found["empty"]


def test_a_pt_file_becomes_stios_format(tmp_path: Path) -> None:
    torch.save({"a": {"b": torch.ones(2)}, "n": 3}, tmp_path / "x.pt")
    olmo.pt_file_to_safetensors_file(tmp_path / "x.pt", format="stio")
    found = stio.sync.load_state(tmp_path / "x.safetensors")
    assert found["n"] == 3 and torch.equal(found["a"]["b"], torch.ones(2))


def test_no_such_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format= takes"):
        olmo.state_dict_to_safetensors_file({}, tmp_path / "x.safetensors", format="pickle")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"state\['a'\]"):
        olmo.state_dict_to_safetensors_file({"a": object()}, tmp_path / "x.safetensors", format="stio")
    assert not list(tmp_path.iterdir())
