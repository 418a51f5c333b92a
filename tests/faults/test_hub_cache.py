"""421, 422 and 444. The cache of the Hugging Face hub: damaged, empty and cut blobs, and a cache without `refs`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save as as_bytes

from stio import sync
from stio.cli.main import main
from stio.errors import CheckpointNotFoundError, FormatError, IndexFormatError, IntegrityError, StioError, StorageError
from stio.remote.pulls import pull

pytest.importorskip("huggingface_hub")
sys.path.insert(0, str(Path(__file__).parent.parent / "remote"))
fake_hub: Any = import_module("fake_hub")

MODEL = "hf://org/tiny"
TENSORS = {f"layer.{k}": torch.arange(1000.0) + k for k in range(3)}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    with fake_hub.fake_hub() as hub:
        yield hub


@pytest.fixture
def hub(running: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    running.repositories.clear()
    fake_hub.use(running.url, monkeypatch, tmp_path / "cache")
    return running


def publish(hub: Any, files: dict[str, bytes]) -> str:
    hub.repositories["org/tiny"] = repository = fake_hub.Repository()
    commit: str = repository.commit(files)
    return commit


@pytest.fixture
def snapshot(hub: Any, tmp_path: Path) -> Path:
    """Return the snapshot, in the cache, of a repository with two shards."""
    sync.save(TENSORS, tmp_path / "saved", max_shard_size=9000)
    commit = publish(hub, {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()})
    sync.load(MODEL)
    return tmp_path / "cache" / "models--org--tiny" / "snapshots" / commit


def shards(snapshot: Path) -> list[Path]:
    return sorted(snapshot.glob("*.safetensors"))


def flip_last(path: Path) -> None:
    """Change the last byte of a blob."""
    blob = path.resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)


def invoked(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, [*map(str, words)])
    return result.exit_code, result.output


def test_c421_a_healthy_cache_needs_no_manifest(snapshot: Path, tmp_path: Path) -> None:
    for source in (MODEL, snapshot, snapshot / INDEX, shards(snapshot)[0], shards(snapshot)[0].resolve()):
        assert sync.load(source, verify=True)
    for place in (MODEL, snapshot):
        code, output = invoked("verify", place, "--hash-required", "--no-progress")
        assert code == 0, output
        assert "sha256" in output
    result = pull(MODEL, tmp_path / "pulled")
    assert result.verified == "sha256"
    assert sync.load(tmp_path / "pulled").keys() == TENSORS.keys()


@pytest.mark.parametrize("which", [0, 1])
def test_c421_a_damaged_blob(snapshot: Path, tmp_path: Path, which: int) -> None:
    flip_last(shards(snapshot)[which])
    for source in (MODEL, snapshot, snapshot / INDEX, shards(snapshot)[which], shards(snapshot)[which].resolve()):
        with pytest.raises(IntegrityError, match="its sha256 differs from its name"):
            sync.load(source, verify=True)
    for place in (MODEL, snapshot):
        code, output = invoked("verify", place, "--no-progress")
        assert code == 1
        assert "1 of 2 files wrong" in output
    with pytest.raises(IntegrityError):
        pull(MODEL, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


def test_c421_a_damaged_blob_beside_one_without_a_digest(snapshot: Path) -> None:
    first, second = shards(snapshot)
    flip_last(first)
    other = second.resolve().with_name("0" * 40)  # as git names a blob
    second.resolve().rename(other)
    second.unlink()
    second.symlink_to(other)
    code, output = invoked("verify", snapshot, "--no-progress")
    assert code == 1 and "1 of 2 files wrong" in output
    assert "shard 2/2: header and sizes fit" in output
    with pytest.raises(IntegrityError, match="no manifest"):
        sync.load(snapshot, verify=True)


def test_c421_any_link_to_a_blob(tmp_path: Path) -> None:
    data = as_bytes(TENSORS)
    name = import_module("hashlib").sha256(data).hexdigest()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / name).write_bytes(data)
    link = tmp_path / "model.safetensors"
    link.symlink_to(f"blobs/{name}")
    assert sync.load(link, verify=True).keys() == TENSORS.keys()
    flip_last(link)
    with pytest.raises(IntegrityError, match="delete .*blobs/"):
        sync.load(link, verify=True)
    code, output = invoked("verify", link)
    assert (code, "wrong" in output) == (1, True)


def test_c421_other_names_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    for name in ("0" * 40, "sha256-" + "0" * 64):
        (tmp_path / "blobs" / name).write_bytes(as_bytes(TENSORS))
        with pytest.raises(IntegrityError, match="no manifest"):
            sync.load(tmp_path / "blobs" / name, verify=True)


def test_c421_a_manifest_goes_before_the_names(hub: Any, tmp_path: Path) -> None:
    sync.save(TENSORS, tmp_path / "saved", hash="sha256")
    files = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    publish(hub, files)
    assert sync.load(MODEL, verify=True).keys() == TENSORS.keys()
    assert pull(MODEL, tmp_path / "pulled").verified == "sha256"
    (name,) = [name for name in files if name.endswith(".safetensors")]
    publish(hub, {**files, name: as_bytes({"layer.0": torch.zeros(5)}), "new": b""})  # healthy, and not what was saved
    with pytest.raises(StioError):
        sync.load(MODEL, verify=True)


def emptied(blob: Path) -> None:
    blob.write_bytes(b"")


def cut(blob: Path) -> None:
    os.truncate(blob, blob.stat().st_size - 1)


@pytest.mark.parametrize("damage", [emptied, cut])
@pytest.mark.parametrize("is_url", [True, False], ids=["url", "path"])
@pytest.mark.parametrize("is_index", [True, False], ids=["index", "shard"])
def test_c422_the_command_that_fetches_it_again(
    snapshot: Path, damage: Callable[[Path], None], is_url: bool, is_index: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage((snapshot / INDEX if is_index else shards(snapshot)[1]).resolve())
    source = MODEL if is_url else snapshot
    with pytest.raises((FormatError, IndexFormatError)) as caught:
        sync.load(source)
    command = str(caught.value).partition("fetch it again: ")[2].partition(" --force-download")[0]
    words = shlex.split(command)
    assert words[:2] == ["hf", "download"]
    options = dict(zip(words[4::2], words[5::2], strict=True))
    download = import_module("huggingface_hub").hf_hub_download
    kwargs = {"cache_dir": options["--cache-dir"]} if "--cache-dir" in options else {}
    download(words[2], words[3], revision=options["--revision"], force_download=True, **kwargs)
    assert sync.load(source, verify=True).keys() == TENSORS.keys()


def test_c422_other_files_get_no_such_advice(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FormatError) as caught:
        sync.load(tmp_path)
    assert "hf download" not in str(caught.value)


@pytest.mark.parametrize("is_reached", [False, True], ids=["offline", "503"])
def test_c444_a_cache_without_refs(hub: Any, snapshot: Path, is_reached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("shutil").rmtree(snapshot.parent.parent / "refs")
    fake_hub.go_offline(monkeypatch, not is_reached)
    monkeypatch.setattr(hub, "fault", lambda method, path: 503)
    for source in (MODEL, f"{MODEL}@main", f"{MODEL}@v1", f"{MODEL}/{INDEX}"):
        with pytest.raises((CheckpointNotFoundError, StorageError), match=snapshot.name) as caught:
            sync.load(source)
        assert f"{MODEL}@{snapshot.name}" in str(caught.value)
    assert sync.load(f"{MODEL}@{snapshot.name}").keys() == TENSORS.keys()
    with pytest.raises((CheckpointNotFoundError, StorageError)) as caught:
        sync.load("hf://org/other")
    assert "the cache" not in str(caught.value).replace("its cache", "")


def test_c444_the_directory_of_a_repository(snapshot: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=f"snapshots/{snapshot.name}"):
        sync.load(snapshot.parent.parent)


def test_c444_only_commits_are_offered(hub: Any, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snapshot.parent / ".DS_Store").touch()
    (snapshot.parent / ("0" * 40)).touch()
    (snapshot.parent / "tmp").mkdir()
    with pytest.raises(CheckpointNotFoundError) as caught:
        sync.load(snapshot.parent.parent)
    assert all(name not in str(caught.value) for name in (".DS_Store", "snapshots/tmp", "and tmp", "0" * 40))


@pytest.mark.parametrize("end", ["", f"/{INDEX}"])
def test_c444_the_commit_of_a_branch_without_its_files(
    hub: Any, snapshot: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (snapshot.parent.parent / "refs" / "main").write_text("1" * 40)
    fake_hub.go_offline(monkeypatch, True)
    with pytest.raises((CheckpointNotFoundError, StorageError)) as caught:
        sync.load(MODEL + end)
    assert f"{MODEL}@{snapshot.name}" in str(caught.value)


def test_c422_a_blob_that_is_gone(snapshot: Path) -> None:
    shards(snapshot)[1].resolve().unlink()
    for source in (snapshot, shards(snapshot)[1]):
        with pytest.raises(CheckpointNotFoundError, match=f"hf download org/tiny {shards(snapshot)[1].name} "):
            sync.load(source)


def test_c422_a_blob_that_is_gone_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "w.safetensors").symlink_to(tmp_path / "blobs" / ("0" * 64))
    with pytest.raises(CheckpointNotFoundError, match="which does not exist: restore") as caught:
        sync.load(tmp_path / "w.safetensors")
    assert "delete" not in str(caught.value)


def test_c438_a_directory_that_is_named_like_a_file(hub: Any, tmp_path: Path) -> None:
    publish(hub, {"run/last.ckpt/model.safetensors": as_bytes(TENSORS)})
    assert sync.load(f"{MODEL}/run/last.ckpt/").keys() == TENSORS.keys()
    pull(f"{MODEL}/run/last.ckpt/", tmp_path / "pulled")
    assert sync.load(tmp_path / "pulled").keys() == TENSORS.keys()
