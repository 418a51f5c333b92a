"""Faults of loads that users of other projects have reported, in stores and repositories: 306 to 310, 338 to 340."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fake_hub import FakeHub, Repository, fake_hub, use
from fakes import checkpoint_bytes, checkpoint_files
from servers import HttpServer
from support import require_equal

import stio
from stio import sync
from stio.cli.main import main
from stio.remote.pulls import pull

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
OLD = {"a": torch.zeros(3), "b": torch.full((4,), 2.0)}
NEW = {"a": torch.ones(3), "b": torch.full((4,), 3.0)}
SHARDS = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
FILES = checkpoint_files(OLD, 2)


class Bucket:
    """A place in an S3 store."""

    url = "s3://bucket/m"

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            self._client.put_object(Bucket="bucket", Key=f"m/{name}", Body=data)


class Hub:
    """A repository of the hub."""

    url = "hf://org/m"

    def __init__(self, hub: FakeHub) -> None:
        self._repository = hub.repositories["org/m"] = Repository()

    def put(self, files: dict[str, bytes]) -> None:
        self._repository.commit(files)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    pytest.importorskip("huggingface_hub")
    with fake_hub() as running:
        use(running.url, monkeypatch, tmp_path / "cache")
        yield running


@pytest.fixture(params=["s3", "hf"])
def place(request: pytest.FixtureRequest) -> Any:
    return Bucket(request.getfixturevalue("s3")) if request.param == "s3" else Hub(request.getfixturevalue("hub"))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING and one.name == "stio"]
    caplog.clear()
    return found


def loads(url: str, tmp_path: Path) -> Iterator[dict[str, torch.Tensor]]:
    """Load in each way."""
    yield sync.load(url)
    yield sync.load(url, cache=stio.DiskCache(tmp_path / "disk", max_bytes=1 << 20))
    with sync.open(url) as checkpoint:
        yield checkpoint.load()
    sync.convert(url, tmp_path / "converted.safetensors")
    yield sync.load(tmp_path / "converted.safetensors")


@pytest.mark.slow
def test_c306_a_newer_file_beside_the_index(place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place.put({**FILES, WHOLE: checkpoint_bytes(NEW)})
    for found in loads(place.url, tmp_path):
        require_equal(found, OLD)
        (warning,) = warnings_of(caplog)
        assert WHOLE in warning
        assert INDEX in warning
    require_equal(sync.load(f"{place.url}/{WHOLE}"), NEW)
    pull(place.url, tmp_path / "pulled")
    require_equal(sync.load(tmp_path / "pulled"), OLD)
    assert len(warnings_of(caplog)) == 1
    assert WHOLE in CliRunner().invoke(main, ["verify", place.url]).stdout


@pytest.mark.slow
def test_c306_a_save_to_a_store(s3: Any, caplog: pytest.LogCaptureFixture) -> None:
    Bucket(s3).put(FILES)
    sync.save({"exp_avg": torch.zeros(2)}, "s3://bucket/m/optimizer.safetensors")
    sync.save(NEW, "s3://bucket/m/below/model.safetensors")
    assert warnings_of(caplog) == []
    for name in (WHOLE, "ema.safetensors"):
        sync.save(NEW, f"s3://bucket/m/{name}")
        (warning,) = warnings_of(caplog)
        assert warning.startswith(f"s3://bucket/m/{name}: saved, but a load of its directory follows {INDEX}")
        require_equal(sync.load("s3://bucket/m"), OLD)
        assert f"{WHOLE}{' and 1 other' if name != WHOLE else ''} in the same directory" in warnings_of(caplog)[0]
    sync.save(NEW, "s3://bucket/m", filename_pattern="x{suffix}.safetensors")
    assert len(warnings_of(caplog)) == 1
    sync.save(NEW, "s3://bucket/m")
    require_equal(sync.load("s3://bucket/m"), NEW)


@pytest.mark.slow
def test_c307_the_shards_are_gone(place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place.put({INDEX: FILES[INDEX], WHOLE: checkpoint_bytes(NEW), "config.json": b"{}"})
    for found in loads(place.url, tmp_path):
        require_equal(found, NEW)
        (warning,) = warnings_of(caplog)
        assert f"so {WHOLE} is loaded" in warning
    pull(place.url, tmp_path / "pulled")
    assert not (tmp_path / "pulled" / INDEX).exists()
    require_equal(sync.load(tmp_path / "pulled"), NEW)
    place.put({INDEX: FILES[INDEX], WHOLE: checkpoint_bytes(NEW), SHARDS[0]: FILES[SHARDS[0]]})
    with pytest.raises(stio.CheckpointNotFoundError, match="shard that does not exist"):
        sync.load(place.url)


def test_c307_by_http(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    server.put(f"/m/{INDEX}", FILES[INDEX])
    server.put(f"/m/{WHOLE}", checkpoint_bytes(NEW))
    require_equal(sync.load(f"{server.url}/m"), NEW)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.matrix
def test_c308_c309_the_index_decides(place: Any) -> None:
    index = json.loads(FILES[INDEX])
    index["weight_map"]["c"] = SHARDS[0]
    stale = checkpoint_bytes({"a": NEW["a"], "b": OLD["b"]})
    place.put({**FILES, SHARDS[1]: stale, INDEX: json.dumps(index).encode()})
    with pytest.raises(stio.IndexFormatError):
        sync.load(place.url)
    require_equal(sync.load(place.url, strict=False), OLD)
    require_equal(sync.load(place.url, names=["a", "b"]), OLD)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["X.safetensors.index.fp16.json", "X.fp16.safetensors.index.json"])
def test_c310_an_index_of_a_variant(name: str, place: Any, tmp_path: Path) -> None:
    files = {**FILES, name: FILES[INDEX]}
    del files[INDEX]
    place.put(files)
    require_equal(sync.load(place.url), OLD)
    require_equal(sync.load(f"{place.url}/{name}"), OLD)
    for k, url in enumerate((place.url, f"{place.url}/{name}")):
        pull(url, tmp_path / f"pulled{k}")
        require_equal(sync.load(tmp_path / f"pulled{k}"), OLD)
        assert pull(url, tmp_path / f"pulled{k}").fetched_bytes == 0
    place.put({**files, "X.safetensors.index.bf16.json": FILES[INDEX]})
    with pytest.raises(stio.AmbiguousCheckpointError, match=r"index\.bf16\.json") as caught:
        sync.load(place.url)
    assert SHARDS[0] not in str(caught.value)


def test_c310_by_http(server: HttpServer) -> None:
    for name, data in FILES.items():
        server.put(f"/m/{name.replace('.index.json', '.index.fp16.json')}", data)
    require_equal(sync.load(f"{server.url}/m/model.safetensors.index.fp16.json"), OLD)


@pytest.mark.slow
def test_c338_shards_without_an_index(place: Any, tmp_path: Path) -> None:
    place.put({shard: FILES[shard] for shard in SHARDS})
    for found in loads(place.url, tmp_path):
        require_equal(found, OLD)
    pull(place.url, tmp_path / "pulled")
    require_equal(sync.load(tmp_path / "pulled"), OLD)
    assert pull(place.url, tmp_path / "pulled").fetched_bytes == 0


def test_c338_an_incomplete_set(place: Any, tmp_path: Path) -> None:
    place.put({SHARDS[1]: FILES[SHARDS[1]]})
    for call in (lambda: sync.load(place.url), lambda: pull(place.url, tmp_path / "pulled")):
        with pytest.raises(stio.CheckpointNotFoundError, match=f"{SHARDS[0]}.*1 of 2 shards"):
            call()
    require_equal(sync.load(f"{place.url}/{SHARDS[1]}"), {"b": OLD["b"]})


@pytest.mark.matrix
def test_c339_names_that_begin_with_a_dot(place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hidden = {name: checkpoint_bytes(NEW) for name in (".model.safetensors", "._model.safetensors", f"._{INDEX}")}
    place.put(hidden)
    with pytest.raises(stio.CheckpointNotFoundError, match="begins with a dot"):
        sync.load(place.url)
    place.put({**hidden, WHOLE: checkpoint_bytes(OLD)})
    for found in loads(place.url, tmp_path):
        require_equal(found, OLD)
    pull(place.url, tmp_path / "pulled")
    assert {path.name for path in (tmp_path / "pulled").glob("*.safetensors")} == {WHOLE}
    assert warnings_of(caplog) == []


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3])
def test_c340_a_cache_on_disk_warns_once(
    most: int, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {f"w{k}": torch.full((2000,), float(k)) for k in range(9)}
    Bucket(s3).put(checkpoint_files(tensors, 9))
    for module in ("stio.storage.checkpoint.shards", "stio.remote.disk_cache"):
        monkeypatch.setattr(f"{module}.max_open_files", lambda: most)
    cache = stio.DiskCache(tmp_path / "disk", max_bytes=1 << 20)
    for _ in range(2):
        require_equal(sync.load(Bucket.url, cache=cache), tensors)
        (warning,) = warnings_of(caplog)
        assert f"{9 - most} objects are read without the cache" in warning
    assert cache.stats().entries == most
    assert cache.stats().hits >= most
    require_equal(sync.load(Bucket.url, names="w0", cache=cache), {"w0": tensors["w0"]})
    assert warnings_of(caplog) == []
