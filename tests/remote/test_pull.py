"""`stio pull`: what is in the new directory, what a kill leaves, what is refused."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from counts import count
from fakes import checkpoint_bytes
from servers import Fault, HttpServer, Request
from support import run_python

import stio
from stio.cli.main import main
from stio.format.files.names import FILE_SUFFIX
from stio.remote import pulls as pulling
from stio.runtime.operation import Operation
from stio.storage.commit import syscalls

SIZE = 4 << 20
"""Bytes of one tensor, and of one shard."""
NUM_SHARDS = 3
HEAD, STATE = "bytes=0-131071", "bytes=0-0"


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"w{k}": torch.randn(SIZE // 4, generator=generator) for k in range(NUM_SHARDS)}


@pytest.fixture
def model(server: HttpServer, tensors: dict[str, torch.Tensor], tmp_path: Path) -> str:
    """Put a checkpoint in shards into the store; return its URL."""
    stio.sync.save(tensors, tmp_path / "source", max_shard_size=SIZE, hash="sha256")
    (tmp_path / "source" / "config.json").write_text('{"a": 1}')
    for path in (tmp_path / "source").iterdir():
        server.put(f"/model/{path.name}", path.read_bytes())
    return f"{server.url.replace('//', '//me:PASSWORD@')}/model?signature=SECRET"


def run(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, ["pull", "--no-progress", *map(str, words)])
    assert result.exit_code == status, result.output
    shown = f"{result.output}{result.stderr}"
    assert "SECRET" not in shown
    assert "PASSWORD" not in shown
    return shown


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def wait_for(ready: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.005)


def is_data(request: Request, shard: int) -> bool:
    """Return whether a request is for the tensors of a shard, counted from 1: others open it, or ask for its state."""
    path = request.path.partition("?")[0]
    return path.endswith(f"-0000{shard}-of-00003.safetensors") and request.headers["range"] not in (HEAD, STATE)


def test_a_directory(model: str, server: HttpServer, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    target = tmp_path / "new" / "m"
    found = json.loads(run(model, target, "--also", "config.json", "--json"))
    assert found["verified"] == "sha256"
    assert found["fetched_bytes"] == found["total_bytes"] == sum(found["files"].values())
    assert found["url"] == f"{server.url}/model"
    assert same(stio.sync.load(target, verify=True), tensors)
    for name, nbytes in found["files"].items():
        assert (target / name).read_bytes() == server.objects[f"/model/{name}"]
        assert (target / name).stat().st_size == nbytes
        assert os.access(target / name, os.W_OK)
    assert set(os.listdir(target)) == {*found["files"], pulling.RECORD_NAME}
    assert "config.json" in found["files"]
    assert os.listdir(target.parent) == ["m"]
    # Again: nothing is fetched.
    assert "nothing fetched" in run(model, target, "--also", "config.json")


def test_one_file(model: str, server: HttpServer, tmp_path: Path) -> None:
    shard = next(name for name in server.objects if name.endswith("-00001-of-00003.safetensors"))
    assert "headers checked" in run(server.url + shard, tmp_path / "m")
    assert list(stio.sync.load(tmp_path / "m" / shard.rpartition("/")[2])) == ["w0"]
    with pytest.raises(stio.CheckpointNotFoundError, match="1 of 3 shards"):  # it is not the whole checkpoint
        stio.sync.load(tmp_path / "m")
    assert model


@pytest.mark.slow
def test_s3_has_the_files_beside_the_weights(s3: Any, model: str, server: HttpServer, tmp_path: Path) -> None:
    for name, data in server.objects.items():
        s3.put_object(Bucket="bucket", Key=name[1:], Body=data)
    for name in ("pytorch_model.bin", "below/tokenizer.json", "tokenizer.json", ""):  # "": as consoles make it
        s3.put_object(Bucket="bucket", Key=f"model/{name}", Body=b"x")
    found = json.loads(run("s3://bucket/model", tmp_path / "m", "--json"))
    expected = {name.rpartition("/")[2] for name in server.objects} | {"tokenizer.json"}
    assert set(found["files"]) == expected
    assert same(stio.sync.load(tmp_path / "m"), stio.sync.load(model))


@pytest.mark.matrix
@pytest.mark.parametrize("max_shard_size", [None, 100])
def test_c338_what_was_saved_to_a_store(s3: Any, max_shard_size: int | None, tmp_path: Path) -> None:
    """The names of its shards hold the id of the save, so they are a checkpoint by their index only."""
    saved = {"a": torch.arange(20.0), "b": torch.ones(20)}
    stio.sync.save(saved, "s3://bucket/mine", max_shard_size=max_shard_size)
    assert "headers checked" in run("s3://bucket/mine", tmp_path / "m")
    assert same(stio.sync.load(tmp_path / "m"), saved)


def killed_child(program_zygote: Any, url: str, target: Path, ready: Callable[[], object]) -> None:
    code = f"import sys; sys.argv[1:] = ['pull', {url!r}, {str(target)!r}]; from stio.__main__ import main; main()"
    child = program_zygote.start(code, NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
    try:
        wait_for(ready)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait().returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [0, 1, 2])
def test_it_continues_after_a_kill(
    model: str,
    server: HttpServer,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    program_zygote: Any,
    num_shards: int,
) -> None:
    go_on = threading.Event()
    blocked: list[str] = []

    def fault(number: int, request: Request) -> None:
        if is_data(request, num_shards + 1):
            blocked.append(request.path)
            go_on.wait(60)

    server.fault = fault
    target = tmp_path / "new" / "m"
    try:
        killed_child(program_zygote, model, target, lambda: blocked)
    finally:
        go_on.set()
    assert not target.exists()
    began = len(server.requests)
    found = json.loads(run(model, target, "--json"))
    assert found["fetched_bytes"] == sum(found["files"].values()) - sum(
        nbytes for name, nbytes in found["files"].items() if before(name, num_shards)
    )
    read = [shard for shard in (1, 2, 3) for request in server.requests[began:] if is_data(request, shard)]
    assert sorted(set(read)) == [1, 2, 3][num_shards:]
    assert same(stio.sync.load(target), tensors)
    assert os.listdir(target.parent) == ["m"]


def before(name: str, num_shards: int) -> bool:
    """Return whether a file was complete when the process was killed: the first shards."""
    return any(name.endswith(f"-0000{k + 1}-of-00003.safetensors") for k in range(num_shards))


@pytest.mark.slow
def test_kills_at_any_time(model: str, tensors: dict[str, torch.Tensor], tmp_path: Path, program_zygote: Any) -> None:
    target = tmp_path / "new" / "m"
    code = f"""
import os, random, signal, threading, time
from stio.remote.pulls import pull
import obstore.store
random.seed(3)
for k in range({count(15, 200)}):
    seconds = random.uniform(0, 0.25)
    child = os.fork()
    if not child:
        def end():
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=end, daemon=True).start()
        pull({model!r}, {str(target)!r})
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    if os.path.exists({str(target)!r}):
        os.rename({str(target)!r}, {str(target)!r} + str(k))
"""
    done = run_python(code, python=program_zygote.python, timeout=100)
    assert done.returncode == 0, done.stderr
    complete = sorted(path for path in target.parent.iterdir() if not path.name.startswith("."))
    for path in complete:
        assert same(stio.sync.load(path, verify=True), tensors)
    run(model, target)
    assert same(stio.sync.load(target, verify=True), tensors)


@pytest.mark.slow
def test_another_state_is_fetched_again(
    model: str, server: HttpServer, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """What an interrupted call left of an older state is not used."""
    server.fault = lambda number, request: Fault(status=403) if is_data(request, 3) else None
    run(model, tmp_path / "m", status=2)
    assert not (tmp_path / "m").exists()
    server.fault = lambda number, request: None
    tensors = {name: -tensor for name, tensor in tensors.items()}
    stio.sync.save(tensors, tmp_path / "other", max_shard_size=SIZE, hash="sha256")
    server.objects.clear()
    for path in (tmp_path / "other").iterdir():
        server.put(f"/model/{path.name}", path.read_bytes())
    found = json.loads(run(model, tmp_path / "m", "--json"))
    assert same(stio.sync.load(tmp_path / "m", verify=True), tensors)
    assert found["fetched_bytes"] >= NUM_SHARDS * SIZE
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    # The complete directory of an older state is not replaced.
    stio.sync.save(dict.fromkeys(tensors, torch.zeros(3)), tmp_path / "third", max_shard_size=4)
    server.objects.clear()
    for path in (tmp_path / "third").iterdir():
        server.put(f"/model/{path.name}", path.read_bytes())
    assert "holds something else" in run(model, tmp_path / "m", status=2)
    assert same(stio.sync.load(tmp_path / "m", verify=True), tensors)


@pytest.mark.slow
def test_damage_is_not_published(model: str, server: HttpServer, tmp_path: Path) -> None:
    name = next(name for name in server.objects if name.endswith("-00002-of-00003.safetensors"))
    data = server.objects[name]
    server.put(name, data[:-1] + bytes([data[-1] ^ 1]))
    assert "-00002-of-00003.safetensors" in run(model, tmp_path / "m", status=2)
    assert not (tmp_path / "m").exists()
    server.put(name, data)
    run(model, tmp_path / "m")


def test_a_change_during_the_pull(model: str, server: HttpServer, tmp_path: Path) -> None:
    index = next(name for name in server.objects if name.endswith(".index.json"))

    def change(number: int, request: Request) -> None:
        if is_data(request, 3):
            server.put(index, server.objects[index] + b" ")

    server.fault = change
    assert "replaced while it was being read" in run(model, tmp_path / "m", status=2)
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_two_at_one_time(model: str, server: HttpServer, tmp_path: Path) -> None:
    results: list[pulling.PullResult] = []
    server.latency_seconds = 0.02
    threads = [threading.Thread(target=lambda: results.append(pulling.pull(model, tmp_path / "m"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert sum(result.fetched_bytes for result in results) == results[0].total_bytes


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 8, 10])
def test_a_cancel(model: str, server: HttpServer, tmp_path: Path, after: int) -> None:
    go_on = threading.Event()

    def fault(number: int, request: Request) -> None:
        if number >= after:
            go_on.wait(60)

    server.fault = fault
    operation: Operation[Any] = Operation(lambda _: pulling.pull(model, tmp_path / "m"), name="pull").start()
    try:
        wait_for(lambda: len(server.requests) > after)
        began = time.monotonic()
        operation.cancel()
        operation.join()
        assert time.monotonic() - began < 1.5
        assert operation.failure is None
        assert operation.done
    finally:
        go_on.set()
    assert not (tmp_path / "m").exists()
    run(model, tmp_path / "m")


def test_a_link_in_place_of_the_staging_directory(model: str, tmp_path: Path) -> None:
    """As another user may make it in a directory that all users write to."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / ".m.stio-pull").symlink_to(tmp_path / "theirs")
    run(model, tmp_path / "m", status=2)
    assert os.listdir(tmp_path / "theirs") == []
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_what_is_refused(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is no URL" in run("model", tmp_path / "m", status=2)
    assert "'hf:/a/b' is no URL" in run("hf:/a/b", tmp_path / "m", status=2)
    assert "the store has no such object" in run(model.replace("?", "/w.pt?"), tmp_path / "m", status=2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    assert "holds something else" in run(model, tmp_path / "full", status=2)
    (tmp_path / "empty").mkdir()
    run(model, tmp_path / "empty")
    assert "mount point" in run(model, "/proc", status=2)
    assert "no such object" in run(model, tmp_path / "m", "--also", "none.json", status=2)
    assert "is not allowed" in run(model, tmp_path / "m", "--also", "../x", status=2)
    assert "is not allowed" in run(model, tmp_path / "m", "--also", pulling.RECORD_NAME, status=2)

    def fail(fd: int, nbytes: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(syscalls, "reserve", fail)
    assert os.strerror(28) in run(model, tmp_path / "m", status=2)
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
@pytest.mark.parametrize("other", ["adapter_model.safetensors", "a.bin.index.json", "a.safetensors.index.json"])
def test_a_further_file_is_not_taken_for_the_checkpoint(server: HttpServer, tmp_path: Path, other: str) -> None:
    stio.sync.save({"w": torch.ones(8)}, tmp_path / "source", hash="sha256")
    for path in (tmp_path / "source").iterdir():
        server.put(f"/m/{path.name}", path.read_bytes())
    further = b'{"weight_map": {"a": "missing.safetensors"}}'
    if other.endswith(FILE_SUFFIX):
        further = checkpoint_bytes({"lora": torch.ones(2)})
    server.put(f"/m/{other}", further)
    first = pulling.pull(f"{server.url}/m", tmp_path / "target", also=[other])
    assert first.verified == "sha256"
    again = pulling.pull(f"{server.url}/m", tmp_path / "target", also=[other])
    assert (again.verified, again.fetched_bytes) == ("sha256", 0)
    data = (tmp_path / "source" / "model.safetensors").read_bytes()
    server.put("/m/model.safetensors", data[:-1] + b"x")
    for also in ([other], [other, "model.safetensors"]):
        with pytest.raises(stio.IntegrityError, match=r"model\.safetensors"):
            pulling.pull(f"{server.url}/m", tmp_path / "damaged", also=also)
