"""hf://: which files are downloaded, of which commit; without the hub; refusals in words; cancels. By a fake hub."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from click.testing import CliRunner
from crash.zygote import Zygote
from fake_hub import SIGNATURE, TOKEN, FakeHub, Repository, fake_hub, go_offline, use
from loops import on_all
from torch import nn

import stio
from stio.cli.main import main
from stio.errors import CheckpointNotFoundError, StioError, StorageError
from stio.remote import hub as storage_hub
from stio.remote.pulls import pull
from stio.runtime.operation import Operation

huggingface_hub: Any = pytest.importorskip("huggingface_hub")
constants: Any = pytest.importorskip("huggingface_hub.constants")

MODEL = "hf://org/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Run a hub, which huggingface_hub asks, with an empty cache."""
    with fake_hub() as running:
        use(running.url, monkeypatch, tmp_path / "cache")
        yield running


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{k}": torch.randn(40, 25, generator=torch.Generator().manual_seed(k)) for k in range(5)}


@pytest.fixture(scope="module")
def files(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return a repository: a checkpoint in shards, other weights, and one more checkpoint below a folder."""
    where = tmp_path_factory.mktemp("repository")
    stio.sync.save(tensors, where, max_shard_size=9000)
    stio.sync.save(tensors, where / "sub" / "model.safetensors")
    found = {str(path.relative_to(where)): path.read_bytes() for path in where.rglob("*.safetensors*")}
    return found | {"consolidated.safetensors": b"no", "pytorch_model.bin": b"no", "config.json": b"{}"}


@pytest.fixture
def repository(hub: FakeHub, files: dict[str, bytes]) -> Repository:
    made = hub.repositories["org/tiny"] = Repository()
    made.commit(files)
    return made


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]


def test_the_index_and_its_shards_are_downloaded_once(
    hub: FakeHub, repository: Repository, tensors: dict[str, torch.Tensor]
) -> None:
    assert same(stio.sync.load(MODEL), tensors)
    assert hub.downloads()[0] == INDEX
    assert sorted(hub.downloads()) == [*SHARDS, INDEX]
    hub.requests.clear()
    assert same(stio.sync.load(f"{MODEL}/"), tensors)
    assert hub.downloads() == []


def test_only_the_shards_of_the_chosen_tensors_are_downloaded(
    hub: FakeHub, repository: Repository, tensors: dict[str, torch.Tensor]
) -> None:
    found = stio.sync.load(MODEL, names="layer.4")
    assert torch.equal(found["layer.4"], tensors["layer.4"])
    assert hub.downloads() == [INDEX, SHARDS[2]]


URLS = {
    "a file": "hf://org/tiny/sub/model.safetensors",
    "a folder": "hf://org/tiny/sub/",
    "a type": "hf://models/org/tiny@main/sub",
    "an index": f"hf://org/tiny/{INDEX}",
    "upper case": "HF://org/tiny",
}


@pytest.mark.matrix
@pytest.mark.parametrize("url", URLS.values(), ids=URLS.keys())
def test_what_a_url_names(url: str, repository: Repository, tensors: dict[str, torch.Tensor]) -> None:
    assert same(stio.sync.load(url), tensors)


def test_revisions(hub: FakeHub, repository: Repository, files: dict[str, bytes]) -> None:
    first = repository.refs["main"]
    other = stio.sync.load(f"{MODEL}@{first}")
    for name, ref in (("v1", "v1"), ("refs/pr/7", "refs/pr/7"), ("a/b", "a%2Fb")):
        repository.commit({**files, name: b""}, name)
        assert same(stio.sync.load(f"{MODEL}@{ref}"), other)
    hub.requests.clear()
    assert same(stio.sync.load(f"{MODEL}@{first}"), other)
    assert hub.requests == [], "a commit that is in the cache needs no request"


def test_a_folder_of_a_commit_that_is_in_the_cache(
    hub: FakeHub, repository: Repository, tensors: dict[str, torch.Tensor]
) -> None:
    url = f"{MODEL}@{repository.refs['main']}"
    stio.sync.load(url)
    assert same(stio.sync.load(f"{url}/sub"), tensors)
    hub.requests.clear()
    assert same(stio.sync.load(f"{url}/sub"), tensors)
    assert hub.requests == []


@pytest.mark.matrix
@pytest.mark.anyio
@on_all
async def test_every_function_on_every_loop(repository: Repository, tensors: dict[str, torch.Tensor]) -> None:
    assert same(await stio.load(MODEL, memory="map"), tensors)
    async with stio.open(MODEL) as checkpoint:
        assert same({name: tensor async for name, tensor in checkpoint.stream()}, tensors)
    module = Layers()
    trace = stio.Trace()
    report = await stio.load_into(module, MODEL, trace=trace)
    assert report.path == f"{MODEL}@{repository.refs['main']}"
    assert report.path in {span.detail for span in trace.spans}
    assert same(module.state_dict(), tensors)
    with torch.device("meta"):
        empty = Layers()
    async with stio.warm_start(empty, MODEL) as warm:
        assert (await warm.done()).path == report.path


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ParameterList(nn.Parameter(torch.zeros(40, 25)) for _ in range(5))


def test_a_host_cache_keeps_and_drops_it(repository: Repository, tensors: dict[str, torch.Tensor]) -> None:
    with stio.sync.HostCache(budget_bytes=64 << 20) as cache:
        cache.prefetch(MODEL)
        assert same(stio.sync.load(MODEL, cache=cache), tensors)
        assert (cache.stats().hits, cache.stats().entries) == (3, 3)
        cache.evict(MODEL)
        assert cache.stats().entries == 0


def test_a_host_cache_has_one_copy_of_a_file_of_two_commits(
    repository: Repository, files: dict[str, bytes], tensors: dict[str, torch.Tensor]
) -> None:
    first = repository.refs["main"]
    changed = bytearray(files[SHARDS[2]])
    changed[-4:] = torch.tensor([7.0]).numpy().tobytes()
    with stio.sync.HostCache(budget_bytes=64 << 20) as cache:
        cache.prefetch(MODEL)
        repository.commit({**files, SHARDS[2]: bytes(changed), "new": b""})
        cache.prefetch(MODEL)
        assert cache.stats().entries == 4
        assert stio.sync.load(MODEL, cache=cache)["layer.4"][-1, -1] == 7
        assert same(stio.sync.load(f"{MODEL}@{first}", cache=cache), tensors)


def test_a_disk_cache_copies_no_file_that_is_on_the_disk(
    repository: Repository, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    cache = stio.DiskCache(tmp_path / "disk", max_bytes=1 << 30)
    assert same(stio.sync.load(MODEL, cache=cache), tensors)
    assert not list((tmp_path / "disk").rglob("*"))


def test_commands(repository: Repository, tmp_path: Path) -> None:
    def run(*words: str, status: int = 0) -> str:
        done = CliRunner().invoke(main, words)
        assert done.exit_code == status, done.output
        return done.output

    assert "5 tensors" in run("inspect", MODEL)
    assert repository.refs["main"] in run("verify", MODEL, "--no-progress", "--json")
    assert "5 tensors" in run("load", MODEL, "--device", "cpu", "--no-progress")
    assert "equal" in run("diff", MODEL, f"{MODEL}/sub", "--no-progress")
    run("convert", MODEL, str(tmp_path / "m.safetensors"), "--no-progress")
    assert "equal" in run("diff", MODEL, str(tmp_path / "m.safetensors"), "--no-progress")


# Copies in a directory.


def pulled(url: str, directory: Path) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["pull", url, str(directory), "--no-progress", "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("linked", [True, False])
def test_a_pull_copies_the_checkpoint_and_the_files_beside_it(
    hub: FakeHub,
    repository: Repository,
    tensors: dict[str, torch.Tensor],
    tmp_path: Path,
    linked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not linked:

        def refuse(*arguments: object, **keywords: object) -> None:
            raise OSError(errno.EXDEV, "")

        monkeypatch.setattr(os, "link", refuse)
    commit = repository.refs["main"]
    stio.sync.load(f"{MODEL}@{commit}")  # of the cache's files alone, config.json would be missing
    found = pulled(f"{MODEL}@{commit}", tmp_path / "copy")
    assert found["url"] == f"{MODEL}@{commit}"
    assert set(found["files"]) == {INDEX, *SHARDS, "config.json"}
    assert found["fetched_bytes"] == found["total_bytes"] == sum(found["files"].values())
    assert same(stio.sync.load(tmp_path / "copy"), tensors)
    cached = os.path.realpath(huggingface_hub.try_to_load_from_cache("org/tiny", SHARDS[0], revision=commit))
    assert os.path.samefile(cached, tmp_path / "copy" / SHARDS[0]) is linked
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
    # Again, without the cache: the commit of the branch is asked for, and that of a commit is known.
    shutil.rmtree(tmp_path / "cache")
    hub.requests.clear()
    assert pulled(MODEL, tmp_path / "copy")["fetched_bytes"] == 0
    assert hub.requests == ["GET /api/models/org/tiny"]
    go_offline(monkeypatch)
    assert pulled(f"{MODEL}@{commit}", tmp_path / "copy")["files"] == found["files"]


def test_a_pull_continues_and_takes_no_other_commit(
    hub: FakeHub, repository: Repository, files: dict[str, bytes], tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    hub.fault = lambda method, path: 403 if path.endswith(SHARDS[2]) else None
    for _ in range(2):
        done = CliRunner().invoke(main, ["pull", MODEL, str(tmp_path / "copy")])
        assert (done.exit_code, "refused the request" in done.output) == (2, True)
    assert not (tmp_path / "copy").exists()
    hub.fault = lambda method, path: None
    assert pulled(MODEL, tmp_path / "copy")
    assert sorted(hub.downloads()) == ["config.json", *SHARDS, INDEX]
    repository.commit({**files, "more": b""})
    done = CliRunner().invoke(main, ["pull", MODEL, str(tmp_path / "copy")])
    assert "holds something else" in done.output
    assert pulled(MODEL, tmp_path / "new")["files"].keys() >= {"more"}


def test_a_pull_finds_that_a_file_was_cut(repository: Repository, tmp_path: Path) -> None:
    pulled(MODEL, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_bytes(b"")
    done = CliRunner().invoke(main, ["pull", MODEL, str(tmp_path / "copy")])
    assert (done.exit_code, "holds something else" in done.output) == (2, True)


@pytest.mark.parametrize("place", ["sub", "sub/model.safetensors"])
def test_a_pull_of_a_part(place: str, repository: Repository, tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert list(pulled(f"{MODEL}/{place}", tmp_path / "copy")["files"]) == ["model.safetensors"]
    assert same(stio.sync.load(tmp_path / "copy"), tensors)


def test_a_cancelled_pull_leaves_no_directory(
    hub: FakeHub, repository: Repository, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    started = threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "GET" and path.endswith(SHARDS[0]):
            hub.gate.clear()
            started.set()

    hub.fault = hold
    operation: Operation[Any] = Operation(lambda _: pull(MODEL, tmp_path / "copy"), name="pull").start()
    assert started.wait(10)
    began = time.monotonic()
    operation.cancel()
    operation.join()
    assert time.monotonic() - began < 2
    assert not (tmp_path / "copy").exists()
    hub.fault = lambda method, path: None
    hub.gate.set()
    assert same(stio.sync.load(pulled(MODEL, tmp_path / "copy")["path"]), tensors)


# Without the hub.


def test_offline_the_cache_is_used(
    hub: FakeHub, repository: Repository, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_offline(monkeypatch)
    with pytest.raises(CheckpointNotFoundError, match="HF_HUB_OFFLINE"):
        stio.sync.load(MODEL)
    assert hub.requests == []
    go_offline(monkeypatch, False)
    stio.sync.load(MODEL, names="layer.0")
    go_offline(monkeypatch)
    hub.requests.clear()
    assert torch.equal(stio.sync.load(MODEL, names="layer.0")["layer.0"], tensors["layer.0"])
    with pytest.raises(StorageError, match="cache does not have the file") as caught:
        stio.sync.load(MODEL)
    assert caught.value.path is not None
    assert caught.value.path.startswith(f"{MODEL}@{repository.refs['main']}/model-0000")
    assert hub.requests == []


def test_no_file_is_taken_for_the_checkpoint_because_it_is_alone_in_the_cache(
    hub: FakeHub, repository: Repository, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.commit({**files, "consolidated.safetensors": files["sub/model.safetensors"]})
    stio.sync.load(f"{MODEL}/consolidated.safetensors")
    go_offline(monkeypatch)
    for url in (MODEL, f"{MODEL}@{repository.refs['main']}"):
        with pytest.raises(CheckpointNotFoundError, match="give the URL of the file") as caught:
            stio.sync.load(url)
        assert caught.value.__cause__ is not None
    assert stio.sync.load(f"{MODEL}/consolidated.safetensors")


def test_offline_a_verification_needs_no_manifest(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    stio.sync.load(MODEL)
    go_offline(monkeypatch)
    done = CliRunner().invoke(main, ["verify", MODEL, "--no-progress"])
    assert done.exit_code == 0, done.output
    assert "header, sizes and sha256 fit" in done.output


@pytest.mark.parametrize("kind", ["no connection", "503"])
def test_a_hub_that_does_not_answer(
    hub: FakeHub,
    repository: Repository,
    tensors: dict[str, torch.Tensor],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def break_it() -> None:
        if kind == "503":
            hub.fault = lambda method, path: 503
            return
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")

    break_it()
    with pytest.raises(StorageError, match="cannot be reached") as caught:
        stio.sync.load(MODEL)
    assert caught.value.path == MODEL
    assert caught.value.__cause__ is not None
    hub.fault = lambda method, path: None
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    stio.sync.load(MODEL)
    break_it()
    assert same(stio.sync.load(MODEL), tensors)
    assert f"commit {repository.refs['main']} is in the cache, and is used" in caplog.text


@pytest.mark.slow
def test_a_fault_at_each_request(
    hub: FakeHub, repository: Repository, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """A load has the right tensors or a typed error, and the next one continues."""
    stio.sync.load(f"{MODEL}/sub")  # huggingface_hub asks for something else once
    num_requests = 1 + 2 * (1 + len(SHARDS))  # the commit; head and body of each file
    num_failed = 0
    for k in range(num_requests):
        shutil.rmtree(tmp_path / "cache")
        hub.requests.clear()
        # A list's `pop` is atomic: requests come on several threads.
        answers = [None] * (10 * num_requests) + [(500, 403)[k % 2]] + [None] * k
        hub.fault = lambda method, path, answers=answers: answers.pop()  # type: ignore[misc]
        try:
            assert same(stio.sync.load(MODEL), tensors)
        except StorageError as error:
            num_failed += 1
            assert (error.path or "").startswith(MODEL)
            assert error.__cause__ is not None
        hub.fault = lambda method, path: None
        assert same(stio.sync.load(MODEL), tensors)
        assert len(hub.downloads()) <= 5, "a file that was downloaded is used"
    assert num_failed > 2  # the request for a shard is repeated once


# Refusals.


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hf://gpt2", "hf://owner/name"),
        ("hf://", "hf://owner/name"),
        ("hf://org/tiny@", "hf://owner/name"),
        ("hf://datasets/org/data", "a repository of models"),
        ("hf://buckets/org/data/x.safetensors", "a repository of models"),
        ("hf://org/tiny/../x.safetensors", "a repository of models"),
        ("hf://org/none", "no such repository, or it is private"),
        ("hf://org/ti--ny", "no repositories of this name"),
        ("hf://org/tiny@v9", "no such revision"),
        ("hf://org/tiny/none.safetensors", "no such file"),
        ("hf://org/tiny/none", "no"),
        ("hf://org/tiny/pytorch_model.bin", r"download and convert it \(stio.convert\)"),
        ("hf://org/pickle", "download it, then `stio convert"),
    ],
)
def test_what_is_not_there(url: str, words: str, hub: FakeHub, repository: Repository) -> None:
    hub.repositories["org/pickle"] = Repository()
    hub.repositories["org/pickle"].commit({"pytorch_model.bin": b"no"})
    with pytest.raises(StioError, match=words) as caught:
        stio.sync.load(url)
    assert url.rstrip("/@") in re.sub("@[0-9a-f]{40}", "", str(caught.value))


@pytest.mark.parametrize("url", ["hf://me:hf_secret@org/tiny", f"{MODEL}?token=hf_secret", f"{MODEL}@main#hf_secret"])
def test_secrets_in_a_url_are_refused_and_not_shown(url: str, hub: FakeHub) -> None:
    with pytest.raises(CheckpointNotFoundError, match="hf://owner/name") as caught:
        stio.sync.load(url)
    assert "secret" not in f"{caught.value} {caught.value.__cause__}"
    assert hub.requests == []


def test_the_text_of_an_error_has_no_secrets() -> None:
    error = Exception("403 for https://me:pw@host/file?X-Amz-Signature=abc&x=1 with\n hf_abcdefghijkl")
    assert storage_hub._text_of(error) == "403 for https://host/file with hf_..."


def test_a_signed_url_is_not_shown(hub: FakeHub, repository: Repository) -> None:
    hub.fault = lambda method, path: 403 if path.startswith("/signed/") else None
    with pytest.raises(StorageError, match="/signed/") as caught:
        stio.sync.load(MODEL)
    assert SIGNATURE not in str(caught.value)
    assert caught.value.errno == errno.EACCES


def test_a_shard_that_the_repository_does_not_have_is_found_before_any_is_downloaded(
    hub: FakeHub, repository: Repository, files: dict[str, bytes]
) -> None:
    repository.commit({name: data for name, data in files.items() if name != SHARDS[1]})
    with pytest.raises(CheckpointNotFoundError, match="has no such file") as caught:
        stio.sync.load(MODEL)
    assert caught.value.path == f"{MODEL}@{repository.refs['main']}/{SHARDS[1]}"
    assert hub.downloads() == [INDEX]


def test_the_first_error_ends_the_downloads(
    hub: FakeHub, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_hub, "_NUM_DOWNLOADS", 1)
    hub.fault = lambda method, path: 403 if path.endswith(SHARDS[0]) else None
    with pytest.raises(StorageError, match="refused the request") as caught:
        stio.sync.load(MODEL)
    assert (caught.value.path or "").endswith(SHARDS[0])
    assert hub.downloads() == [INDEX]


def test_gated_and_private_repositories(
    hub: FakeHub, repository: Repository, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.is_gated = True
    with pytest.raises(StorageError, match=f"gated; request access on {hub.url}/org/tiny") as gated:
        stio.sync.load(MODEL)
    repository.is_gated, repository.is_private = False, True
    with pytest.raises(CheckpointNotFoundError, match="or it is private"):
        stio.sync.load(MODEL)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert same(stio.sync.load(MODEL), tensors)
    hub.fault = lambda method, path: 400
    with pytest.raises(StorageError, match="refused the request") as refused:
        stio.sync.load(MODEL)
    for error in (gated.value, refused.value):
        assert TOKEN not in f"{error} {error.__cause__}"


def test_a_cache_that_cannot_be_written(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(StioError) as caught:
        stio.sync.load(MODEL)
    assert MODEL in str(caught.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(storage_hub, "import_module", missing)
    with pytest.raises(ImportError, match=r"hf:// needs huggingface_hub: pip install .*\[hub\]"):
        stio.sync.load(MODEL)


# Cancels.


@pytest.mark.anyio
async def test_a_cancel_is_heard_while_a_file_is_downloaded(
    hub: FakeHub, repository: Repository, tensors: dict[str, torch.Tensor]
) -> None:
    hub.gate.clear()
    started = threading.Event()
    hub.fault = lambda method, path: started.set() if method == "GET" and "/resolve/" in path else None
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stio.load, MODEL)
            await anyio.to_thread.run_sync(started.wait, 10)
            began = time.monotonic()
            scope.cancel()
    assert time.monotonic() - began < 2
    hub.gate.set()  # what was under way ends in the background; a further load takes it from there
    assert same(await stio.load(MODEL), tensors)


@pytest.mark.slow
def test_a_command_that_is_interrupted_while_a_file_is_downloaded_ends(
    zygote: Zygote, hub: FakeHub, repository: Repository, tensors: dict[str, torch.Tensor]
) -> None:
    """It runs in a process of its own, which finds the hub by its environment."""
    hub.gate.clear()
    started = threading.Event()
    hub.fault = lambda method, path: started.set() if path.endswith(INDEX) and method == "GET" else None
    command = [*zygote.program, "load", MODEL, "--device", "cpu", "--no-progress"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert started.wait(30)
            child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=10)
        finally:
            child.kill()
    assert child.returncode == -signal.SIGINT, said
    assert "Traceback" not in said
    hub.gate.set()
    assert same(stio.sync.load(MODEL), tensors)


def test_a_commit_replaces_the_branch_while_a_load_goes_on(
    hub: FakeHub, repository: Repository, files: dict[str, bytes], tensors: dict[str, torch.Tensor]
) -> None:
    """All files are of one commit: that which the branch had at first."""

    def fault(method: str, path: str) -> None:
        if path.endswith(INDEX) and method == "GET":
            repository.commit({**files, **dict.fromkeys(SHARDS, b"another model")})

    hub.fault = fault
    assert same(stio.sync.load(MODEL), tensors)
    with pytest.raises(StioError):
        stio.sync.load(MODEL)


def test_the_files_are_in_the_hubs_own_cache(repository: Repository) -> None:
    stio.sync.load(MODEL)
    path = huggingface_hub.try_to_load_from_cache("org/tiny", INDEX)
    assert isinstance(path, str)
    assert os.path.exists(path)
