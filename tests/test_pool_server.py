"""examples/pool_server.py as people run it: a real process, real clients, more models than fit."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from crash.zygote import Zygote
from safetensors.torch import save_file
from support import eventually
from test_server import INTERPRETER, PATIENCE_SECONDS, TOKENS, Server, expected, server, server_zygote, weights_of

__all__ = ["server_zygote"]

SEEDS = {"a": 1, "b": 2, "c": 3}
ANSWERS = {name: expected(weights_of(seed)) for name, seed in SEEDS.items()}
MODEL_BYTES = 16_384
"""Somewhat more than one model: 32 x 16 x 2 and 2 x 64 x 16 x 2 floats of 4 bytes are 20,480 bytes."""


@pytest.fixture(scope="module", autouse=True)
def _interpreter(server_zygote: Zygote) -> Iterator[None]:  # a fixture
    INTERPRETER.append(str(server_zygote.python))
    yield
    INTERPRETER.clear()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, seed in SEEDS.items():
        save_file(weights_of(seed), root / f"{name}.safetensors")
    (root / "directory").mkdir()
    save_file(weights_of(1), root / "directory" / "model.safetensors")
    save_file(weights_of(1, hidden=64), root / "large.safetensors")
    save_file({"more": torch.ones(1)}, root / "other.safetensors")
    (root / "garbage.safetensors").write_bytes(b"\xff" * 100)
    (root / "readme.txt").write_text("no model")
    return root


@contextmanager
def running(models: Path, log: Path, *options: str) -> Iterator[Server]:
    command = ["examples/pool_server.py", str(models), "--device-bytes", "45000", "--port", "0", *options]
    with log.open("w") as stderr, server(command, 0, stderr=stderr, stdout=subprocess.DEVNULL) as found:
        assert eventually(lambda: "running on" in log.read_text(), PATIENCE_SECONDS), log.read_text()
        found.client.base_url = httpx.URL(re.findall(r"running on (http://\S+)", log.read_text())[0])
        yield found
        assert found.stop() < 5
    assert "Application shutdown complete" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def served(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(models, tmp_path_factory.mktemp("log") / "stderr", "--host-bytes", "1MB") as found:
        yield found


def ask(served: Server, name: str) -> httpx.Response:
    return served.client.post(f"/v1/models/{name}/predict", json={"tokens": TOKENS})


@pytest.mark.costly("a server in a process of its own")
def test_each_model_answers_and_the_bound_is_kept(served: Server) -> None:
    with ThreadPoolExecutor(8) as threads:
        names = [name for name in SEEDS for _ in range(20)] * 3
        for name, answer in zip(names, threads.map(lambda name: ask(served, name), names), strict=True):
            assert answer.status_code == 200, answer.text
            assert answer.json() == {"model": name, "next": ANSWERS[name]}
    stats = served.client.get("/stats").json()
    assert 0 < stats["device_bytes"] <= stats["peak_device_bytes"] <= 45_000
    assert stats["num_evictions"] > 0 and stats["num_failed"] == 0


def test_where_each_model_is(served: Server) -> None:
    assert ask(served, "a").status_code == 200
    found = served.client.get("/v1/models").json()
    assert found.keys() == {"a", "b", "c", "directory", "large", "other", "garbage"}
    assert found["a"]["tier"] == "device" and found["a"]["progress"] == 1.0
    assert {one["tier"] for one in found.values()} <= {"device", "host", "source"}


def test_a_prefetch(served: Server) -> None:
    answer = served.client.post("/v1/models/directory/prefetch")
    assert answer.json()["tier"] == "host"
    assert ask(served, "directory").json()["next"] == ANSWERS["a"]


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("nowhere", 404, "no model"),
        ("large", 503, "does not fit"),
        ("other", 422, "other tensors"),
        ("garbage", 500, "garbage"),
    ],
)
def test_what_cannot_be_served(served: Server, name: str, status: int, text: str) -> None:
    answer = ask(served, name)
    assert answer.status_code == status, answer.text
    assert text in answer.json()["detail"]
    assert ("retry-after" in answer.headers) == (status == 503)
    assert ask(served, "b").json()["next"] == ANSWERS["b"]
    if status != 404:
        return
    assert served.client.post(f"/v1/models/{name}/prefetch").status_code == 404


@pytest.mark.slow
def test_a_load_that_takes_longer_goes_on(models: Path, tmp_path: Path) -> None:
    """The first answer is 503, with the progress; the load goes on, and a later request has its answer."""
    with running(models, tmp_path / "log", "--patience", "0") as found:
        answer = ask(found, "c")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert 0 <= answer.json()["detail"]["loading"]["progress"] <= 1
        assert eventually(lambda: found.client.get("/v1/models").json()["c"]["tier"] == "device", PATIENCE_SECONDS)
        assert found.client.get("/stats").json()["num_loads"] == 1
        assert found.client.post("/v1/models/c/prefetch").status_code == 422
