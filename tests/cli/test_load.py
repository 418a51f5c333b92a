"""`stio load`: to a device, with a rate and a timeline."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from accelerators import gpu
from commands import refused, run, terminal
from crash.zygote import Zygote
from safetensors.torch import save_file

import stio
from stio.cli import load as cli_load
from stio.errors import DeviceMemoryError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {f"layers.{k}.weight": torch.randn(64, 64) for k in range(8)}
    save_file({**tensors, "bias": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_loads_and_says_how_fast(model: Path) -> None:
    done = run("load", model, "--device", "cpu")
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{model}: 9 tensors, 131 kB mapped on cpu in 0.0")
    assert line.endswith("B/s")


@pytest.mark.parametrize("memory", ["auto", "map", "copy", "lazy"])
def test_json(model: Path, memory: str) -> None:
    found = json.loads(run("load", model, "--memory", memory, "--device", "cpu", "--json").stdout)
    seconds, rate = found.pop("seconds"), found.pop("bytes_per_second")
    assert found == {
        "path": str(model),
        "device": ["cpu"],
        "memory": memory,
        "mapped": memory != "copy",
        "num_tensors": 9,
        "total_bytes": 8 * 64 * 64 * 4 + 6,
        "timeline": None,
    }
    assert 0 < seconds < 60
    assert rate is None if memory == "lazy" else rate == pytest.approx(found["total_bytes"] / seconds)


def test_lazy_has_no_rate(model: Path) -> None:
    assert run("load", model, "--memory", "lazy", "--device", "cpu").stdout.endswith(" s, read when they are used\n")


def test_filter(model: Path) -> None:
    found = json.loads(run("load", model, "--filter", "/layers.[0-3]/", "--json").stdout)
    assert found["num_tensors"] == 4


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_nothing_matches(model: Path, more: list[str]) -> None:
    text = refused("load", model, "--filter", "weight", *more, status=3)
    assert text == (
        f"Error: {model}: nothing matches --filter 'weight'"
        "; a glob is for the whole name, and `stio inspect` lists the names"
    )


def test_an_alias_counts_once(tmp_path: Path) -> None:
    tied = torch.ones(10)
    stio.sync.save({"a": tied, "b": tied}, tmp_path / "m")
    found = json.loads(run("load", tmp_path / "m", "--json").stdout)
    assert (found["num_tensors"], found["total_bytes"]) == (2, 40)


def test_verify(tmp_path: Path) -> None:
    stio.sync.save({"a": torch.ones(10)}, tmp_path / "m", hash="sha256")
    run("load", tmp_path / "m", "--verify")
    path = tmp_path / "m" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "its sha256 differs from the manifest" in refused("load", tmp_path / "m", "--verify")


def test_a_timeline_for_perfetto(model: Path, tmp_path: Path) -> None:
    timeline = tmp_path / "t.json"
    done = run("load", model, "--timeline", timeline)
    assert done.stdout.splitlines()[1] == f"timeline: {timeline}"
    names = {event["name"] for event in json.loads(timeline.read_text())["traceEvents"]}
    assert "open" in names


@pytest.mark.parametrize("suffix", ["svg", "json"])
def test_the_suffix_picks_the_writer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """Against the interface of `Trace`: a method for each kind, which takes the path."""

    class Recorder(stio.Trace):
        def save_svg(self, path: str) -> None:
            Path(path).write_text(f"svg {len(self.spans) > 0}")

        def save_chrome(self, path: str) -> None:
            Path(path).write_text(f"json {len(self.spans) > 0}")

    monkeypatch.setattr(cli_load, "Trace", Recorder)
    timeline = tmp_path / f"T.{suffix.upper()}"
    run("load", model, "--timeline", timeline)
    assert timeline.read_text() == f"{suffix} True"


def test_a_timeline_that_could_not_be_written_is_refused_first(model: Path, tmp_path: Path) -> None:
    assert "end in .json or .svg" in refused("load", model, "--timeline", tmp_path / "t.png")
    assert "end in .json or .svg" in refused("load", model, "--timeline", tmp_path / "t.html")
    assert "choose another place" in refused("load", model, "--timeline", tmp_path / "none" / "t.json")


def test_devices_that_are_not_there(model: Path) -> None:
    assert "torch has no such device" in refused("load", model, "--device", "gpu-of-mine")
    assert "no data to load" in refused("load", model, "--device", "meta")
    if not torch.accelerator.is_available():
        assert refused("load", model, "--device", "cuda").endswith(
            "; give a device of this machine, for example --device cpu"
        )


def test_a_device_without_free_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DeviceMemoryError("out of memory", needed_bytes=2, free_bytes=1)

    monkeypatch.setattr(stio.sync, "load", fail)
    assert refused("load", model) == "Error: out of memory; free memory of the device, or use --device cpu"


@gpu
def test_an_accelerator_is_what_auto_means(model: Path) -> None:
    found = json.loads(run("load", model, "--json").stdout)
    assert found["device"] == [f"{torch.accelerator.current_accelerator()}:0"]


def test_hostile_files_are_errors(tmp_path: Path) -> None:
    for name, content in (("a", b""), ("b", b"\xff" * 99), ("c", (1 << 40).to_bytes(8, "little") + b"{")):
        (tmp_path / f"{name}.safetensors").write_bytes(content)
        assert "fetch it again" in refused("load", tmp_path / f"{name}.safetensors") or name == "b"


def test_gds_is_a_way_to_an_accelerator(model: Path) -> None:
    assert "reads to an accelerator" in refused("load", model, "--memory", "gds", "--device", "cpu")


@pytest.mark.slow
def test_a_bar_on_terminals_only(zygote: Zygote, model: Path) -> None:
    assert "loading" in terminal(zygote.program, "load", model)
    without = terminal(zygote.program, "load", model, "--no-progress")
    assert "loading" not in without
    assert without.strip()


def test_ctrl_c_ends_a_load(model: Path, tmp_path: Path, zygote: Zygote) -> None:
    """Pressed at its first sign of progress; no timeline is left."""
    code = """
import os, signal, sys
from stio.cli.output import Bar
Bar.__call__ = lambda self, event: os.kill(os.getpid(), signal.SIGINT)
from stio.__main__ import main
main()
"""
    arguments = ["load", str(model), "--timeline", str(tmp_path / "t.json")]
    done = subprocess.run([str(zygote.python), "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-2, "", "\nInterrupted.\n")
    assert os.listdir(tmp_path) == [model.name]
