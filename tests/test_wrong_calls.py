"""Wrong values of keywords: each is refused at the call, by an error that names the keyword and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import save_file

import stio
from stio import sync
from stio.remote.pulls import pull

WEIGHTS = {"w": torch.ones(2, 3), "b": torch.ones(2)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def _load(path: Path, **keywords: Any) -> object:
    return sync.load(path, **keywords)


def _save(path: Path, **keywords: Any) -> object:
    return sync.save(WEIGHTS, path.with_name("out"), **keywords)


BOTH = (_load, _save)
WRONG: list[tuple[tuple[Callable[..., object], ...], str, Any, type[Exception], str]] = [
    (BOTH, "switch_interval", "a", TypeError, "switch_interval= takes a number of seconds, not 'a'"),
    (BOTH, "switch_interval", True, TypeError, "switch_interval= takes a number of seconds, not True"),
    (BOTH, "switch_interval", 0, ValueError, "switch_interval must be positive, not 0"),
    (BOTH, "trace", "x", TypeError, "trace= takes a stio.Trace, not 'x'"),
    (BOTH, "budget_bytes", 1.5, TypeError, "budget_bytes: a size is a number of bytes, or text such as '2GB', not 1.5"),
    ((_load,), "slices", 5, TypeError, "slices= takes a mapping from names to indices, not 5"),
    ((_load,), "device", None, stio.DeviceError, "(requested None, expected one of: cpu"),
    ((_save,), "max_shard_size", 1.5, TypeError, "max_shard_size: a size is a number of bytes"),
    ((_save,), "max_shard_size", True, TypeError, "max_shard_size: a size is a number of bytes"),
    ((_save,), "max_shard_size", 0, ValueError, "max_shard_size: a size must be positive, not 0"),
    ((_save,), "max_shard_size", "x", ValueError, "max_shard_size: 'x' is no size"),
    ((_save,), "lock_timeout", -1, ValueError, "lock_timeout must be from 0 to"),
]


@pytest.mark.parametrize(
    ("call", "keyword", "value", "kind", "text"),
    [
        pytest.param(call, *rest, id=f"{call.__name__[1:]}-{rest[0]}-{rest[1]!r}")
        for calls, *rest in WRONG
        for call in calls
    ],
)
def test_a_wrong_value_names_its_keyword(
    call: Callable[..., object], keyword: str, value: Any, kind: type[Exception], text: str, model: Path
) -> None:
    before = sorted(model.parent.iterdir())
    with pytest.raises(kind) as caught:
        call(model, **{keyword: value})
    assert text in str(caught.value)
    assert sorted(model.parent.iterdir()) == before


def _read(path: Path, name: Any) -> object:
    with sync.open(path) as checkpoint:
        return checkpoint.read(name)


def _info(path: Path, name: Any) -> object:
    with sync.open(path) as checkpoint:
        return checkpoint.info(name)


def _into(path: Path, value: Any) -> object:
    return sync.load_into(torch.nn.Linear(3, 2), path, assign=value, strict=False)


def _warm(path: Path, value: Any) -> object:
    with sync.warm_start(torch.nn.Linear(3, 2, device="meta"), path, device="cpu", order=value):
        return None


@pytest.mark.parametrize(
    ("call", "value", "text"),
    [
        (_read, None, "the name of a tensor is text, not None"),
        (_read, ["w"], "the name of a tensor is text, not ['w']"),
        (_info, ["w"], "the name of a tensor is text, not ['w']"),
        (_into, "cuda", "assign= takes True or False, not 'cuda'"),
        (_warm, 5, "order= takes names of parameters and submodules, not 5"),
    ],
)
def test_a_wrong_argument_is_named(call: Callable[..., object], value: Any, text: str, model: Path) -> None:
    with pytest.raises(TypeError) as caught:
        call(model, value)
    assert text in str(caught.value)


def test_a_device_that_moves_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = torch.nn.Linear(3, 2)
    sync.save(module, tmp_path / "m")
    for keywords in ({}, {"device": "cpu"}, {"device": "auto"}, {"assign": True}):
        sync.load_into(module, tmp_path / "m", **keywords)
    assert caplog.records == []
    sync.load_into(module, tmp_path / "m", device="cuda:0")
    (record,) = caplog.records
    assert "stay on cpu; move the module first, or pass assign=True" in record.getMessage()


def test_slices_of_another_kind_are_refused_with_names_too(tmp_path: Path) -> None:
    sync.save(WEIGHTS, tmp_path / "m", max_shard_size=8)
    with pytest.raises(TypeError, match="slices= takes a mapping"):
        sync.load(tmp_path / "m", names="b", slices=5)  # type: ignore[arg-type]


def test_integers_of_numpy_are_sizes(model: Path) -> None:
    number: Any = np.int64(1 << 20)
    assert sync.load(model, budget_bytes=number).keys() == WEIGHTS.keys()
    assert len(sync.save(WEIGHTS, model.with_name("out"), max_shard_size=number, budget_bytes=number).files) == 1


def test_what_changed_in_a_file_is_said_in_words(model: Path) -> None:
    with sync.open(model) as checkpoint:
        data = model.read_bytes()
        model.write_bytes(data + data)
        with pytest.raises(stio.ChangedDuringReadError) as caught:
            checkpoint.read("w")
    assert "Identity" not in str(caught.value)
    assert f"(expected {len(data)} bytes, inode" in str(caught.value)
    assert f"found {2 * len(data)} bytes, inode" in str(caught.value)


def test_an_array_among_tensors_gets_the_call_that_makes_a_tensor(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'a' is no tensor, its type is ndarray; torch\.as_tensor\(\) makes one of it"):
        sync.save({"a": np.ones(2)}, tmp_path / "m")  # type: ignore[dict-item]


def test_a_url_of_a_local_file_gets_its_path(model: Path) -> None:
    for url in (model.as_uri(), Path(model.as_uri())):
        with pytest.raises(stio.CheckpointNotFoundError) as caught:
            sync.load(url)
        assert str(caught.value).endswith(f"pass the path of a file of this machine, not a URL: {str(model)!r}")


def test_an_empty_destination_has_no_path_in_its_message() -> None:
    with pytest.raises(
        stio.StorageError, match=r"^the destination is an empty path; give a file, a directory or a URL$"
    ):
        sync.save(WEIGHTS, "")


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        (5, TypeError, "takes the path of a directory, not 5"),
        ("", ValueError, "takes a directory, not an empty path"),
        ("~/cache", ValueError, "pass os.path.expanduser(path)"),
        (
            "s3://user:secret@bucket/cache",
            ValueError,
            "takes a directory of this machine, not the URL s3://bucket/cache",
        ),
        (Path("s3://bucket/cache"), ValueError, "takes a directory of this machine, not the URL s3:/bucket/cache"),
    ],
    ids=["a number", "nothing", "a home directory", "a URL", "a URL as a path"],
)
@pytest.mark.parametrize(
    "take",
    [
        lambda path: stio.DiskCache(path, max_bytes="1GB"),
        lambda path: pull("http://localhost:1/m.safetensors", path),
        lambda path: stio.Saver(adopt=path, keep_last=1),
        stio.latest,
    ],
    ids=["DiskCache", "pull", "Saver", "latest"],
)
def test_what_is_no_directory_of_this_machine_is_refused(
    take: Callable[[Any], object],
    path: Any,
    kind: type[Exception],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as caught:
        take(path)
    assert text in str(caught.value)
    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keyword", "value"), [("trace", 5), ("max_hold_seconds", "a"), ("max_hold_seconds", True)], ids=str
)
def test_keywords_of_a_pool(keyword: str, value: Any) -> None:
    keywords: dict[str, Any] = {keyword: value}
    with pytest.raises(TypeError, match=f"{keyword}= takes"):
        stio.ModelPool(device="cpu", device_bytes="1MB", **keywords)
