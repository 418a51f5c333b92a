"""examples/server.py as people run it: a real process, a real client, real weights."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from checkout import python_path
from crash.zygote import Zygote
from safetensors.torch import save_file
from support import eventually
from torch.nn import functional

ROOT = Path(__file__).parents[1]
TOKENS = [3, 1, 4, 1, 5]
PATIENCE_SECONDS = 30.0


# Models.


def weights_of(seed: int, *, hidden: int = 16, num_blocks: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = {"embed.weight": draw(32, hidden), "head.weight": draw(32, hidden)}
    for number in range(num_blocks):
        weights |= {f"blocks.{number}.0.weight": draw(64, hidden), f"blocks.{number}.2.weight": draw(hidden, 64)}
    return weights


def expected(weights: dict[str, torch.Tensor]) -> int:
    """Compute what the model says, without the example's code."""
    x = weights["embed.weight"][TOKENS].mean(0)
    for number in range(sum(name.endswith(".2.weight") for name in weights)):
        x = x + weights[f"blocks.{number}.2.weight"] @ functional.gelu(weights[f"blocks.{number}.0.weight"] @ x)
    return int((weights["head.weight"] @ x).argmax())


ONE, TWO = weights_of(1), weights_of(2)
ANSWERS = {"one": expected(ONE), "two": expected(TWO)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_file(ONE, root / "one.safetensors", {"version": "one"})
    (root / "second").mkdir()
    save_file(TWO, root / "second" / "model.safetensors", {"version": "two"})
    save_file({"embed.weight": ONE["embed.weight"]}, root / "part.safetensors")
    save_file(ONE | {"more": torch.ones(1)}, root / "more.safetensors")
    save_file(ONE | {"head.weight": torch.ones(31, 16)}, root / "shape.safetensors")
    save_file({"embed.weight": torch.ones(3), "blocks.0.0.weight": torch.ones(3)}, root / "rank.safetensors")
    (root / "garbage.safetensors").write_bytes(b"\xff" * 100)
    (root / "empty").mkdir()
    return root


# Processes.


@dataclass
class Server:
    process: subprocess.Popen[str]
    client: httpx.Client
    pid: int = 0
    """Of the server; `process` starts it and ends with it. 0: it prints no log."""

    def ready(self) -> Any:
        return self.client.get("/ready").json()

    def predict(self) -> Any:
        return self.client.post("/predict", json={"tokens": TOKENS})

    def swap(self, path: str) -> httpx.Response:
        return self.client.post("/models", json={"path": path})

    def until(self, **fields: object) -> Any:
        """Wait until /ready says this."""
        found: dict[str, Any] = {}

        def arrived() -> bool:
            found.update(self.ready())
            return fields.items() <= found.items()

        assert eventually(arrived, PATIENCE_SECONDS), found
        return found

    def stop(self) -> float:
        """Ask for a shutdown; return the seconds until the process was gone."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE_SECONDS)
        return time.monotonic() - started


INTERPRETER: list[str] = []
"""What servers run in: processes that are forked with torch imported."""


@pytest.fixture(scope="module", autouse=True)
def _interpreter(server_zygote: Zygote) -> Iterator[None]:
    INTERPRETER.append(str(server_zygote.python))
    yield
    INTERPRETER.clear()


@pytest.fixture(scope="module")
def server_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    modules = ["torch", "stio.sync", "support", "fastapi", "uvicorn"]
    zygote = Zygote(tmp_path_factory.mktemp("output"), modules)
    yield zygote
    zygote.close()


@contextmanager
def server(command: list[str], port: int, **options: Any) -> Iterator[Server]:
    process = subprocess.Popen(
        [*INTERPRETER, *command],
        cwd=ROOT,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path(ROOT, ROOT / "tests", ROOT / "examples")},
        **options,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS) as client:
            yield Server(process, client)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def running(models: Path, first: str, log: Path) -> Iterator[Server]:
    """The command of the example's first line."""
    command = ["examples/server.py", str(models), first, "--port", "0"]
    with log.open("w") as stderr, server(command, 0, stderr=stderr, stdout=subprocess.DEVNULL) as found:
        assert eventually(lambda: "running on" in log.read_text(), PATIENCE_SECONDS), log.read_text()
        found.client.base_url = httpx.URL(re.findall(r"running on (http://\S+)", log.read_text())[0])
        found.pid = int(re.findall(r"Started server process \[(\d+)\]", log.read_text())[0])
        yield found
        assert found.stop() < 5
    assert "Application shutdown complete" in log.read_text()


@pytest.fixture(scope="module")
def served(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "stderr"
    with running(models, "one.safetensors", log) as found:
        yield found
    assert "Traceback" not in log.read_text()


@pytest.fixture
def one(served: Server) -> Server:
    """The same with `one` in place."""
    served.until(loading=None)
    if served.ready()["version"] != "one":
        assert served.swap("one.safetensors").status_code == 202
    served.until(version="one", loading=None)
    return served


# Answers and swaps.


def test_answers_are_the_models(one: Server) -> None:
    assert one.client.get("/health").json() == {"status": "ok"}
    assert one.client.get("/ready").status_code == 200
    assert one.ready() == {"ready": True, "version": "one", "loading": None, "error": None}
    assert one.predict().json() == {"version": "one", "next": ANSWERS["one"]}


def test_a_swap_replaces_and_frees(one: Server) -> None:
    maps = Path(f"/proc/{one.pid}/maps")
    mapped = "one.safetensors" in maps.read_text()
    answer = one.swap("second")
    assert answer.status_code == 202
    one.until(version="two", loading=None)
    assert one.predict().json() == {"version": "two", "next": ANSWERS["two"]}
    assert ANSWERS["one"] != ANSWERS["two"]
    assert eventually(lambda: "one.safetensors" not in maps.read_text()), "the old model is still there"
    if not mapped:
        pytest.skip("models are not mapped on this filesystem: whether the old one was freed does not show")


@pytest.mark.costly("a server in a process of its own")
def test_no_request_fails_during_swaps(one: Server) -> None:
    stop = threading.Event()

    def ask(method: str, path: str, body: Any) -> list[tuple[int, Any]]:
        answers = []
        with httpx.Client(base_url=one.client.base_url, timeout=PATIENCE_SECONDS) as client:
            while not stop.is_set():
                response = client.request(method, path, json=body)
                answers.append((response.status_code, response.json()))
        return answers

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, "POST", "/predict", {"tokens": TOKENS}) for _ in range(3)]
        asked.append(pool.submit(ask, "GET", "/health", None))
        try:
            for path, version in [("second", "two"), ("one.safetensors", "one")] * 5:
                assert one.swap(path).status_code == 202
                one.until(version=version, loading=None, error=None)
        finally:
            stop.set()
    *predictions, health = [each.result() for each in asked]
    assert {status for status, _ in health} == {200}
    found = [answer for each in predictions for answer in each]
    assert {status for status, _ in found} == {200}
    # Each answer is one model's, the one that it names: never the weights of both.
    assert {(body["version"], body["next"]) for _, body in found} == set(ANSWERS.items())


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("nowhere", 404, "nowhere"),
        ("nowhere.safetensors", 404, "nowhere"),
        ("empty", 404, "empty"),
        ("garbage.safetensors", 422, "garbage"),
        ("part.safetensors", 422, "other tensors"),
        ("more.safetensors", 422, "other tensors"),
        ("shape.safetensors", 422, "other tensors"),
        ("rank.safetensors", 422, "other tensors"),
        ("../one.safetensors", 400, "directory of models"),
        ("/etc/passwd", 400, "directory of models"),
        ("a\0b", 422, "a"),
        ("", 422, "at least 1 character"),
    ],
)
def test_a_bad_path_is_refused_and_the_old_model_stays(one: Server, path: str, status: int, text: str) -> None:
    answer = one.swap(path)
    assert answer.status_code == status, answer.text
    assert text in str(answer.json()["detail"])
    assert one.ready() == {"ready": True, "version": "one", "loading": None, "error": None}
    assert one.predict().json()["next"] == ANSWERS["one"]


@pytest.mark.slow
def test_a_first_model_of_another_kind_is_named_and_can_be_replaced(models: Path, tmp_path: Path) -> None:
    with running(models, "more.safetensors", tmp_path / "log") as found:
        assert eventually(lambda: found.ready()["error"] is not None, PATIENCE_SECONDS)
        assert found.ready()["error"].endswith("these are other tensors than this server's model has")
        assert found.swap("one.safetensors").status_code == 202
        found.until(version="one", loading=None, error=None)


@pytest.mark.parametrize("body", [{}, {"tokens": []}, {"tokens": [-1]}, {"tokens": [32]}, {"tokens": ["a"]}], ids=str)
def test_questions_that_cannot_be_answered(one: Server, body: Any) -> None:
    answer = one.client.post("/predict", json=body)
    assert answer.status_code == 422, answer.text
    assert "token" in str(answer.json()["detail"])


# Loads that take their time: the same server, over files whose reads can be held, slowed and broken.

LARGE = weights_of(3, hidden=256, num_blocks=16)
"""About 500 reads of 4 KiB."""

HELD_AFTER = 200
READ_SECONDS = 0.1

SLOW = f"""
    import asyncio, json, signal, socket, sys, time
    from pathlib import Path

    import torch, uvicorn
    import server, stio
    from support import HookedRoot, descriptors, num_threads

    root, first, descriptor = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)

    def hook_for(path):
        count = 0

        def hook(name, offset, nbytes):
            nonlocal count
            count += 1
            if (path / "slow").exists():
                time.sleep({READ_SECONDS})
            if count > {HELD_AFTER}:
                if (path / "broken").exists():
                    raise OSError(5, "the cable is out")
                while (path / "held").exists():
                    time.sleep(0.005)

        return hook

    async def load(path, progress):
        source = HookedRoot(path, hook_for(path))
        try:
            async with stio.open(source, progress=progress, memory="copy", budget_bytes=1 << 14) as checkpoint:
                return server.Served(path.name, server.assemble(await checkpoint.load()))
        finally:
            source.close()

    async def main(served):
        before = num_threads()
        await served.serve([socket.socket(fileno=descriptor)])
        until = time.monotonic() + 5
        while num_threads() > before and time.monotonic() < until:  # one that has done its work may still be on its way out
            await asyncio.sleep(0.01)
        print(json.dumps([num_threads() - before, [path for path in descriptors() if str(root) in path]]), flush=True)

    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again when it is done
    config = uvicorn.Config(server.create_app(root, first, load), log_level="critical")
    asyncio.run(main(uvicorn.Server(config)))
"""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    for name in ("good", "held", "slow", "broken"):
        (tmp_path / name).mkdir()
        save_file(LARGE, tmp_path / name / "model.safetensors")
        (tmp_path / name / name).touch()
    return tmp_path


@contextmanager
def slow_server(root: Path, first: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, descriptor = listening.getsockname()[1], listening.fileno()
        command = ["-c", textwrap.dedent(SLOW), str(root), first, str(descriptor)]
        with server(command, port, pass_fds=[descriptor], stdout=subprocess.PIPE) as found:
            listening.close()
            yield found


def require_nothing_left(found: Server) -> None:
    assert found.process.stdout is not None
    assert json.loads(found.process.stdout.readline()) == [0, []], "threads, open files"
    assert found.process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.costly("a server in a process of its own")
def test_health_and_progress_while_the_first_model_comes_in(large: Path) -> None:
    with slow_server(large, "held") as found:
        assert found.client.get("/health").status_code == 200
        assert found.client.get("/ready").status_code == 503
        assert found.predict().status_code == 503
        total = sum(weight.nbytes for weight in LARGE.values())

        def arrived() -> bool:
            loading = found.ready()["loading"]
            return loading is not None and loading["bytes"] > 0

        assert eventually(arrived, PATIENCE_SECONDS)
        loading = found.ready()["loading"]
        assert (loading["path"], loading["total_bytes"]) == ("held", total)
        assert 0 < loading["bytes"] < total
        assert loading["percent"] == round(100 * loading["bytes"] / total, 1)
        # One load at a time, however many ask, and however they ask.
        with ThreadPoolExecutor(4) as pool:
            refused = list(pool.map(found.swap, ["good"] * 8))
        assert {answer.status_code for answer in refused} == {409}
        assert "held is being loaded" in refused[0].json()["detail"]
        (large / "held" / "held").unlink()
        assert found.until(ready=True, loading=None)["version"] == "held"
        assert found.predict().json() == {"version": "held", "next": expected(LARGE)}
        found.stop()
        require_nothing_left(found)


@pytest.mark.slow
def test_of_swaps_at_one_time_one_is_taken(large: Path) -> None:
    with slow_server(large, "good") as found:
        found.until(version="good", loading=None)
        with ThreadPoolExecutor(8) as pool:
            answers = sorted(answer.status_code for answer in pool.map(found.swap, ["held"] * 8))
        assert answers == [202, *[409] * 7]
        assert found.ready()["version"] == "good"  # it answers on
        assert found.predict().json()["version"] == "good"
        (large / "held" / "held").unlink()
        found.until(version="held", loading=None)

        assert found.swap("broken").status_code == 202  # its header is in order
        state = found.until(loading=None)
        assert "cable" in state["error"] and state["error"].startswith("broken: ")
        assert (state["ready"], state["version"]) == (True, "held")
        assert found.predict().json()["version"] == "held"
        assert found.swap("good").status_code == 202
        assert found.until(version="good", loading=None)["error"] is None
        found.stop()
        require_nothing_left(found)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["slow", "good"], ids=["the first load", "a swap"])
def test_shutdown_cancels_a_load(large: Path, first: str) -> None:
    with slow_server(large, first) as found:
        if first == "good":
            found.until(version="good", loading=None)
            assert found.swap("slow").status_code == 202

        def under_way() -> bool:
            loading = found.ready()["loading"]
            return loading is not None and loading["path"] == "slow" and loading["total_bytes"] > 0

        assert eventually(under_way, PATIENCE_SECONDS)
        seconds = found.stop()
        require_nothing_left(found)
        num_reads = sum(weight.nbytes for weight in LARGE.values()) / 4096
        assert seconds < num_reads * READ_SECONDS / 4 / 3  # what four workers would have needed, divided by three


@pytest.mark.slow
def test_a_first_model_that_is_not_there_can_be_replaced(large: Path) -> None:
    with slow_server(large, "nowhere") as found:
        assert eventually(lambda: found.ready()["error"] is not None, PATIENCE_SECONDS)
        assert found.client.get("/health").status_code == 200
        assert found.client.get("/ready").status_code == 503
        assert found.swap("good").status_code == 202
        found.until(version="good", loading=None, error=None)
        found.stop()
        require_nothing_left(found)
