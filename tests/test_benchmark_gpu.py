"""The benchmark of a GPU, where there is none: it says so, and a rehearsal on the CPU goes through all but CUDA's calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_device, gpu_limits

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_measured_without_a_gpu() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("torch sees no CUDA device here: nothing was measured")


def test_rehearsal(tmp_path: Path) -> None:
    """Every byte that was loaded or saved is compared in the processes; a wrong one is an error of that run."""
    page = ROOT / "benchmarks" / "README.md"
    before = page.read_bytes()
    out = tmp_path / "figures.jsonl"
    cases = ["gpu-swap", "gpu-forward", "gpu-save"]
    done = run("--rehearse", "--cases", *cases, "--dir", str(tmp_path), "--out", str(out))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    runs = [record for record in records if record["kind"] == "run"]
    assert {record["case"] for record in runs} == set(cases), done.stderr
    assert [record["error"] for record in runs if "error" in record] == []
    assert all(record["seconds"] > 0 for record in runs)
    assert {"stio-cache", "stio-warm", "stio-saver", "dcp", "safetensors"} <= {record["entry"] for record in runs}
    assert "a rehearsal" in records[0]["accelerator"]
    assert page.read_bytes() == before


class Runtime:
    """CUDA's, as torch shows it: statuses are an enum's values, which are true, whatever they say."""

    class Status:
        def __init__(self, value: int) -> None:
            self.value = value

        def __int__(self) -> int:
            return self.value

    def __init__(self, status: int) -> None:
        self.status, self.calls = status, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Runtime.Status:  # noqa: N802 - CUDA's name
        self.calls.append(("register", nbytes))
        return self.Status(self.status)

    def cudaHostUnregister(self, address: int) -> Runtime.Status:  # noqa: N802 - CUDA's name
        self.calls.append(("unregister",))
        return self.Status(0)


@pytest.mark.parametrize("status", [0, 801])
def test_a_registered_mapping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    runtime = Runtime(status)
    monkeypatch.setenv(gpu_device.REHEARSAL, "1")
    monkeypatch.setattr(gpu_device, "is_pinned", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    path = tmp_path / "file"
    path.write_bytes(bytes(100_000))
    copy = gpu_limits.prepare_registered()
    if status:
        with pytest.raises(OSError, match="801"):
            copy([path])
        assert runtime.calls == [("register", 100_000)]
    else:
        copy([path])
        assert runtime.calls == [("register", 100_000), ("unregister",)]
