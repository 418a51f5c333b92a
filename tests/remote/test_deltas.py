"""Deltas in stores: their bases are beside them there, and `stio pull` copies the whole chain."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from deltas import id_of, next_state, write_chain, write_checkpoint
from fake_hub import Repository, fake_hub, use
from servers import HttpServer

import stio
from stio.cli.main import main
from stio.storage.checkpoint import open_checkpoint
from stio.storage.checkpoint.chain import read_tensor

State = dict[str, torch.Tensor]


@pytest.fixture
def chain(tmp_path: Path) -> tuple[Path, list[State]]:
    """Write a full checkpoint and two deltas, `step-0` to `step-2`, with a file beside each."""
    generator = torch.Generator().manual_seed(0)
    states: list[State] = [{"w": torch.randn(400, 30, generator=generator), "b": torch.ones(9).bfloat16()}]
    states += [next_state(states[0], 0.02, generator)]
    states += [next_state(states[1], 0.02, generator)]
    for path in write_chain(tmp_path / "there", states):
        (path / "config.json").write_text("{}")
    return tmp_path / "there", states


def same(source: object, state: State) -> bool:
    opened = open_checkpoint(source)  # type: ignore[arg-type]
    try:
        return all(
            read_tensor(opened, opened.info(name)).tobytes() == bytes(one.flatten().view(torch.uint8).numpy())
            for name, one in state.items()
        )
    finally:
        opened.close()


def put_all(folder: Path, s3: Any = None, server: HttpServer | None = None, prefix: str = "run") -> None:
    for path in folder.rglob("*.*"):
        if path.is_file():
            key = f"{prefix}/{path.relative_to(folder)}"
            if s3 is not None:
                s3.put_object(Bucket="bucket", Key=key, Body=path.read_bytes())
            if server is not None:
                server.put(f"/{key}", path.read_bytes())


def pull(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, ["pull", "--no-progress", *map(str, words)])
    shown = f"{result.output}{result.stderr}"
    assert result.exit_code == status, shown
    assert "SECRET" not in shown
    return shown


def test_a_store(chain: tuple[Path, list[State]], s3: Any) -> None:
    folder, states = chain
    put_all(folder, s3)
    for name in ("step-2", "step-2/", "step-2/model.safetensors"):
        assert same(f"s3://bucket/run/{name}", states[2])
    assert same(stio.RemoteRoot("s3://bucket/run/step-2"), states[2])


def test_a_delta_that_nothing_is_beside(chain: tuple[Path, list[State]], s3: Any) -> None:
    """No other bucket is read."""
    s3.upload_file(str(chain[0] / "step-1" / "model.safetensors"), "bucket", "model.safetensors")
    with pytest.raises(stio.CheckpointNotFoundError, match="base of this delta is missing"):
        open_checkpoint("s3://bucket")


def test_a_web_server_that_wants_a_signature(chain: tuple[Path, list[State]], server: HttpServer) -> None:
    folder, states = chain
    put_all(folder, server=server)
    url = f"{server.url.replace('//', '//me:PASSWORD@')}/run/step-2"
    assert same(f"{url}?signature=SECRET", states[2])
    assert same(f"{url}/model.safetensors?signature=SECRET", states[2])
    asked = [request for request in server.requests if "/step-0/" in request.path]
    assert asked
    assert all("signature=SECRET" in request.path and "authorization" in request.headers for request in asked)


def test_a_pull_copies_the_chain(chain: tuple[Path, list[State]], s3: Any, tmp_path: Path) -> None:
    folder, states = chain
    put_all(folder, s3)
    target = tmp_path / "here" / "newest"
    found = json.loads(pull("s3://bucket/run/step-2", target, "--json"))
    assert set(found["files"]) == {"model.safetensors", "config.json"}
    assert found["fetched_bytes"] > found["total_bytes"]
    shutil.rmtree(folder)
    assert same(target, states[2])
    assert sorted(os.listdir(target.parent)) == ["newest", "step-0", "step-1"]
    assert same(target.parent / "step-1", states[1])
    assert "nothing fetched" in pull("s3://bucket/run/step-2", target)
    assert "nothing fetched" in pull("s3://bucket/run/step-1", tmp_path / "here" / "step-1")


def test_a_pull_that_was_interrupted_between_the_links(
    chain: tuple[Path, list[State]], s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_all(chain[0], s3)
    target = tmp_path / "here" / "step-2"
    (target.parent / "step-1").mkdir(parents=True)
    (target.parent / "step-1" / "mine").write_text("something else")
    assert "holds something else" in pull("s3://bucket/run/step-2", target, status=2)
    assert same(target.parent / "step-0", chain[1][0])
    assert not target.exists()
    shutil.rmtree(target.parent / "step-1")
    pull("s3://bucket/run/step-2", target)
    assert same(target, chain[1][2])


@pytest.mark.parametrize("name", ["step-0", "step-1"])
def test_a_pull_into_the_place_of_a_base(chain: tuple[Path, list[State]], s3: Any, tmp_path: Path, name: str) -> None:
    put_all(chain[0], s3)
    assert "give another name" in pull("s3://bucket/run/step-2", tmp_path / "here" / name, status=2)
    assert os.listdir(tmp_path / "here") == [] or not any(
        one.startswith("step") for one in os.listdir(tmp_path / "here")
    )


def test_a_chain_that_is_not_whole_is_not_pulled(chain: tuple[Path, list[State]], s3: Any, tmp_path: Path) -> None:
    shutil.rmtree(chain[0] / "step-0")
    write_checkpoint(chain[0] / "step-0", chain[1][0], {"stio.id": id_of(7)})
    put_all(chain[0], s3)
    assert "was replaced" in pull("s3://bucket/run/step-2", tmp_path / "here" / "step-2", status=2)
    assert not any(not name.startswith(".") for name in os.listdir(tmp_path / "here"))


def test_verify_and_convert_from_a_store(chain: tuple[Path, list[State]], s3: Any) -> None:
    put_all(chain[0], s3)
    result = CliRunner().invoke(main, ["verify", "s3://bucket/run/step-2"])
    assert result.exit_code == 0, result.output
    assert "../step-0/model.safetensors" in result.output


def test_the_hub(chain: tuple[Path, list[State]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base is of the commit of the delta, and downloaded when the delta is opened."""
    pytest.importorskip("huggingface_hub")
    folder, states = chain
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    with fake_hub() as hub:
        use(hub.url, monkeypatch, tmp_path / "cache")
        hub.repositories["org/tiny"] = Repository()
        commit = hub.repositories["org/tiny"].commit(files)
        assert same("hf://org/tiny/step-2", states[2])
        hub.repositories["org/tiny"].commit({"step-1/model.safetensors": b"other"})
        assert same(f"hf://org/tiny@{commit}/step-1/model.safetensors", states[1])
        pull(f"hf://org/tiny@{commit}/step-2", tmp_path / "here" / "step-2")
        shutil.rmtree(tmp_path / "here" / "step-0")
        pull(f"hf://org/tiny@{commit}/step-2", tmp_path / "here" / "step-2")
        num_requests = len(hub.requests)
        assert "nothing fetched" in pull(f"hf://org/tiny@{commit}/step-2", tmp_path / "here" / "step-2")
        assert len(hub.requests) == num_requests
    assert same(tmp_path / "here" / "step-2", states[2])
