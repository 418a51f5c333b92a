"""`stio bench`: what it measures, what it says of it, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import interrupted, refused, run
from crash.zygote import Zygote
from safetensors.torch import save_file

import stio
from stio.cli import bench as cli_bench
from stio.cli.bench import verdict
from stio.cli.output import rate_text

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs Linux")


@pytest.fixture
def model(disk_path: Path) -> Path:
    """Give a file whose pages a run can drop: one in memory stays there."""
    tensors = {"a": torch.arange(3000.0), "b": torch.full((5,), 7, dtype=torch.uint8), "none": torch.zeros(0)}
    save_file({**tensors, "one": torch.tensor(1.0)}, disk_path / "m.safetensors")
    return disk_path / "m.safetensors"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Replace the runs by records by contestant, which the test may change."""
    record = {"checksum": 5, "resident_fraction": 0.0, "is_direct": True, "version": "1.2"}
    records: dict[str, dict[str, Any]] = {
        "limit": {**record, "seconds": 0.9, "checksum": None, "version": ""},
        "stio": {**record, "seconds": 1.0},
        "safetensors": {**record, "seconds": 2.0},
    }
    monkeypatch.setattr(cli_bench, "_run", lambda spec: records[spec["contestant"]])
    return records


@pytest.fixture
def forked(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of a bench from one that has imported torch: how long they take does not matter."""
    monkeypatch.setattr(sys, "executable", str(zygote.python))


# The whole thing.


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_measures_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = json.loads(run("bench", "--size", "8MB", "--rounds", 1, "--json").stdout)
    assert os.listdir(tmp_path) == []
    assert (found["path"], found["device"]) == (None, "cpu")
    assert 7_900_000 < found["total_bytes"] < 8_100_000
    assert [one["name"] for one in found["contestants"]] == ["limit", "stio", "safetensors"]
    for one in found["contestants"]:
        assert one["failure"] is None
        assert one["seconds"] == [one["median_seconds"]]
        assert one["bytes_per_second"] == pytest.approx(found["total_bytes"] / one["median_seconds"])
    assert found["contestants"][1]["version"] == stio.__version__
    assert any(sentence.startswith("stio re") for sentence in found["verdict"])


@pytest.mark.slow
def test_ctrl_c_leaves_no_file_and_no_process(tmp_path: Path, zygote: Zygote) -> None:
    arguments = ("bench", "--size", "64MB")
    done = interrupted(zygote.program, *arguments, when=lambda: bool(list(tmp_path.glob("*/*"))), cwd=tmp_path)
    assert done == (-signal.SIGINT, "", "\nInterrupted.\n")
    assert os.listdir(tmp_path) == []


def test_wrong_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "is no size" in refused("bench", "--size", "much")
    assert "there is no space for" in refused("bench", "--size", "900000TB")
    assert "check the path" in refused("bench", tmp_path / "none")
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 64)
    refused("bench", tmp_path / "bad.safetensors")
    assert "'--rounds'" in refused("bench", "--rounds", 0)
    assert os.listdir(tmp_path) == ["bad.safetensors"]


@pytest.mark.parametrize("url", ["https://user:secret@host/m/", "s3://bucket/m", "hf://owner/name"])
def test_a_url_is_refused_with_what_measures_it(url: str) -> None:
    shown = url.replace("user:secret@", "")
    text = refused("bench", url)
    assert text.startswith(f"Error: {shown}: `stio bench` measures files on a disk")
    assert f"`stio load {shown}` prints the rate of a load" in text


def test_c246_a_table_fits_80_columns(model: Path, scripted: dict[str, dict[str, Any]]) -> None:
    scripted["safetensors"]["version"] = "1.23.456.post1.dev7890"
    assert max(map(len, run("bench", model).stdout.splitlines()[:4])) <= 80


def test_what_does_not_fit_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench, "fits", lambda nbytes: False)
    assert refused("bench", model).endswith(
        " do not fit into memory; measure with one shard of it, or with a smaller --size"
    )


# One run.


def spec_of(contestant: str, model: Path) -> dict[str, Any]:
    files = {"source": str(model), "paths": [str(model)]}
    return {"contestant": contestant, "device": "cpu", "memory_bytes": 8 << 20, **files}


@pytest.mark.parametrize("contestant", ["stio", "safetensors"])
def test_a_run_touches_every_tensor(model: Path, contestant: str) -> None:
    record = cli_bench.measure(spec_of(contestant, model))
    a = torch.arange(3000.0).view(torch.uint8)
    expected = int(a[::4096].sum()) + int(a[-1]) + 7 + 7 + 2 * 0 + 0x3F
    assert record["checksum"] == expected
    assert record["seconds"] > 0
    assert record["resident_fraction"] in (None, 0.0)


def test_the_limit_reads_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench, "_BLOCK_BYTES", 64 << 10)
    paths = []
    for k in range(2):
        save_file({"w": torch.zeros(100_000 + k)}, tmp_path / f"{k}.safetensors")
        paths.append(str(tmp_path / f"{k}.safetensors"))
    read: list[int] = []
    real = os.preadv

    def count(*arguments: Any) -> int:
        read.append(real(*arguments))
        return read[-1]

    monkeypatch.setattr(os, "preadv", count)
    spec = {**spec_of("limit", tmp_path), "paths": paths}
    assert cli_bench.measure(spec)["is_direct"] in (True, False)
    assert sum(read) == sum(map(os.path.getsize, paths))


@pytest.mark.usefixtures("forked")
def test_a_run_that_fails_is_a_record(model: Path) -> None:
    record = cli_bench._run({**spec_of("stio", model), "device": "none"})
    assert "none" in record["error"]
    assert record["error"].isprintable()


@pytest.mark.slow
def test_modules_of_the_working_directory_do_not_count(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    # A real interpreter without torch: its own search path.
    assert "error" not in cli_bench._run(spec_of("limit", model))


def test_a_run_writes_to_memory_then_evicts_then_loads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    evict = cli_bench._evict
    monkeypatch.setattr(cli_bench, "_write_memory", lambda nbytes: did.append("write"))
    monkeypatch.setattr(cli_bench, "_evict", lambda path: did.append("evict") or evict(path))
    monkeypatch.setitem(cli_bench._LOADERS, "stio", lambda *_: lambda: did.append("load") or {})
    record = cli_bench.measure(spec_of("stio", model))
    assert did == ["write", "evict", "load"]
    assert record["seconds"] > 0


# What is said.


def test_the_table(model: Path, scripted: dict[str, dict[str, Any]]) -> None:
    done = run("bench", model)
    assert done.stderr == ""
    head, limit, ours, theirs, *sentences = done.stdout.splitlines()
    assert head.split() == ["median", "rate", "fastest", "slowest"]
    of_limit = rate_text(os.path.getsize(model), 0.9).split()
    assert limit.split() == ["disk's", "limit", "0.900", "s", *of_limit, "0.900", "s", "0.900", "s"]
    assert ours.split()[:3] == ["stio", "1.2", "1.000"]
    assert theirs.split()[:3] == ["safetensors", "1.2", "2.000"]
    assert sentences == [
        "stio reaches 90% of the disk's limit (90% to 90% in 7 rounds).",
        "It is 2.00 times as fast as safetensors (2.00 to 2.00 in 7 rounds).",
    ]


def test_each_round_runs_all(model: Path, scripted: dict[str, dict[str, Any]]) -> None:
    found = json.loads(run("bench", model, "--rounds", 4, "--json").stdout)
    assert [one["seconds"] for one in found["contestants"]] == [[0.9] * 4, [1.0] * 4, [2.0] * 4]


def test_a_peer_that_fails_is_left_out(model: Path, scripted: dict[str, dict[str, Any]]) -> None:
    scripted["safetensors"] = {"error": "no such dtype"}
    lines = run("bench", model).stdout.splitlines()
    assert "safetensors: failed: no such dtype" in lines


def test_a_peer_with_other_tensors_has_failed(model: Path, scripted: dict[str, dict[str, Any]]) -> None:
    scripted["safetensors"]["checksum"] = 6
    assert "safetensors: failed: its tensors are not those that stio loads" in run("bench", model).stdout


def test_stio_that_fails_is_status_2(model: Path, scripted: dict[str, dict[str, Any]]) -> None:
    scripted["stio"] = {"error": "broken"}
    done = run("bench", model, status=2)
    assert "stio could not load this; there is nothing to compare." in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"resident_fraction": 0.5}, "The file could not be evicted"),
        ({"is_direct": False}, "This filesystem has no direct reads"),
    ],
)
def test_circumstances_are_told(
    model: Path, scripted: dict[str, dict[str, Any]], change: dict[str, Any], sentence: str
) -> None:
    scripted["limit"] |= change
    assert sentence in run("bench", model).stdout


@pytest.mark.parametrize(
    ("seconds", "sentences"),
    [
        (
            {"limit": [1.0], "stio": [1.25]},
            [
                "stio reaches 80% of the disk's limit (80% to 80% in 1 round).",
                "safetensors, with which stio is compared, is not installed.",
            ],
        ),
        (
            {"limit": [1.0] * 4, "stio": [2.0, 2.5, 2.0, 2.0], "safetensors": [5.0] * 4},
            [
                "stio reaches 50% of the disk's limit (40% to 50% in 4 rounds).",
                "It is 2.50 times as fast as safetensors (2.00 to 2.50 in 4 rounds).",
            ],
        ),
        (
            {"limit": [1.0] * 5, "stio": [1.0, 2.0, 3.0, 1.0, 4.0], "safetensors": [3.0, 3.0, 4.5, 0.8, 2.0]},
            [
                "stio reaches 50%",
                "It is 1.50 times as fast as safetensors (0.50 to 3.00 in 5 rounds). The rounds do not show which is",
            ],
        ),
        ({"limit": [1.0]}, ["stio could not load this"]),
    ],
)
def test_verdicts(seconds: dict[str, list[float]], sentences: list[str]) -> None:
    said = verdict(seconds, max(len(seconds), 2))
    assert len(said) == len(sentences)
    for text, begin in zip(said, sentences, strict=True):
        assert text.startswith(begin)


def test_only_runs_of_one_round_are_compared() -> None:
    """The machine becomes slower from round to round; in each of them stio is faster."""
    slow = [float(2**k) for k in range(7)]
    said = verdict({"limit": slow, "stio": [1.25 * s for s in slow], "safetensors": [2.5 * s for s in slow]}, 3)
    assert said == [
        "stio reaches 80% of the disk's limit (80% to 80% in 7 rounds).",
        "It is 2.00 times as fast as safetensors (2.00 to 2.00 in 7 rounds).",
    ]
