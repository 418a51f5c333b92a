"""`stio bench`: what it measures, what it says of it, and that it leaves nothing behind."""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import interrupted, refused, run
from crash.zygote import Zygote
from safetensors.torch import save_file

import stio
from stio.cli import bench as cli_bench
from stio.cli import bench_child
from stio.cli import output as cli_output
from stio.cli.bench import Contestant, verdict
from stio.cli.output import rate_text
from stio.runtime.text import show_seconds
from stio.storage.local import LocalFile

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs Linux")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(3000.0), "b": torch.full((5,), 7, dtype=torch.uint8), "none": torch.zeros(0)}
    save_file({**tensors, "one": torch.tensor(1.0)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Replace the runs by records by contestant, which the test may change."""
    record = {"checksum": 5, "resident_fraction": 0.0, "is_direct": True, "version": "1.2"}
    record |= {"write_seconds": [0.1, 0.1]}
    records: dict[str, dict[str, Any]] = {
        "limit": {**record, "seconds": 0.9, "checksum": None, "version": "", "write_seconds": None},
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


def test_ctrl_c_leaves_no_file_and_no_process(tmp_path: Path) -> None:
    done = interrupted("bench", "--size", "64MB", when=lambda: bool(list(tmp_path.glob("*/*"))), cwd=tmp_path)
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
    lines = run("bench", model).stdout.splitlines()[:4]
    assert max(map(len, lines)) == 80
    assert [line.count("█") for line in lines[1:]] == [6, 5, 2]


def test_what_does_not_fit_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_bench, "fits", lambda nbytes: False)
    assert refused("bench", model).endswith(" do not fit into memory; measure with one shard of it")
    made: list[str] = []
    monkeypatch.setattr(cli_bench, "_make", lambda path, nbytes: made.append(path))
    assert refused("bench", "--size", "1GB") == "Error: 1 GB do not fit into memory; use a smaller --size"
    assert made == [], "nothing is written first"


# One run.


def spec_of(contestant: str, model: Path) -> dict[str, Any]:
    files = {"source": str(model), "paths": [str(model)]}
    return {"contestant": contestant, "device": "cpu", "memory_bytes": 8 << 20, **files}


@pytest.mark.parametrize("contestant", ["stio", "safetensors"])
def test_a_run_touches_every_tensor(model: Path, contestant: str) -> None:
    record = bench_child.main(json.dumps(spec_of(contestant, model)))
    a = torch.arange(3000.0).view(torch.uint8)
    expected = int(a[::4096].sum()) + int(a[-1]) + 7 + 7 + 2 * 0 + 0x3F
    assert record["checksum"] == expected
    assert record["seconds"] > 0
    assert record["resident_fraction"] in (None, 0.0)


def test_the_limit_reads_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_child, "_BLOCK_BYTES", 64 << 10)
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
    assert bench_child.main(json.dumps(spec))["is_direct"] in (True, False)
    assert sum(read) == sum(map(os.path.getsize, paths))


@pytest.mark.usefixtures("forked")
def test_a_run_that_fails_is_a_record(model: Path) -> None:
    record = cli_bench._run({**spec_of("stio", model), "device": "none"})
    assert "none" in record["error"]
    assert record["error"].isprintable()


def test_modules_of_the_working_directory_do_not_count(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    monkeypatch.chdir(tmp_path)
    assert "error" not in cli_bench._run(spec_of("limit", model))


@pytest.mark.parametrize(
    ("is_direct", "order"), [(True, ["evict", "read"]), (False, ["write", "write", "evict", "read"])]
)
def test_the_limit_takes_memory_only_through_the_page_cache(
    model: Path, monkeypatch: pytest.MonkeyPatch, is_direct: bool, order: list[str]
) -> None:
    did = recorded(monkeypatch)
    monkeypatch.setattr(bench_child, "_limit", lambda paths: (lambda: did.append("read"), is_direct))
    record = bench_child.main(json.dumps(spec_of("limit", model)))
    assert did == order
    assert (record["write_seconds"] is None) == is_direct


def test_a_run_writes_to_memory_then_evicts_then_loads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did = recorded(monkeypatch)
    monkeypatch.setitem(bench_child._LOADERS, "stio", lambda *_: lambda: did.append("load") or {})
    record = bench_child.main(json.dumps(spec_of("stio", model)))
    assert did == ["write", "write", "evict", "load"]
    assert min(record["write_seconds"]) > 0


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the steps before the measured time, in their order."""
    did: list[str] = []
    write, evict = bench_child._write_memory, bench_child._evict

    def writing(nbytes: int) -> float:
        assert nbytes == 8 << 20
        did.append("write")
        return write(nbytes)

    monkeypatch.setattr(bench_child, "_write_memory", writing)
    monkeypatch.setattr(bench_child, "_evict", lambda paths: did.append("evict") or evict(paths))
    return did


def test_every_page_of_the_memory_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    resident: list[int] = []
    real = np.frombuffer

    def remember(memory: mmap.mmap, dtype: Any) -> Any:
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would hide the pages that were left out
        resident.append(resident_bytes())
        return real(memory, dtype)

    monkeypatch.setattr(np, "frombuffer", remember)
    monkeypatch.setattr(bench_child, "perf_counter", lambda: resident.append(resident_bytes()) or 0.0)
    bench_child._write_memory(64 << 20)
    assert resident[-1] - resident[0] >= 64 << 20
    assert resident_bytes() - resident[0] < 32 << 20, "it is free again"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_file_that_is_in_use_is_evicted_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [0.4, 0.1, 0.0]
    monkeypatch.setattr(bench_child, "_EVICTION_SECONDS", 0)
    monkeypatch.setattr(LocalFile, "resident_fraction", lambda self: left.pop(0))
    assert bench_child._evict([str(model)]) == 0.0
    assert left == []
    monkeypatch.setattr(LocalFile, "resident_fraction", lambda self: 0.3)
    assert bench_child._evict([str(model)]) == 0.3


# What is said.


def test_the_table(model: Path, scripted: dict[str, dict[str, Any]]) -> None:
    done = run("bench", model)
    assert done.stderr == ""
    head, limit, ours, theirs, *sentences = done.stdout.splitlines()
    assert head.split() == ["median", "rate", "fastest", "slowest"]
    of_limit = rate_text(os.path.getsize(model), 0.9).split()
    rate = rate_text(2 * os.path.getsize(model) + (256 << 20), 0.1)
    assert limit.split() == ["disk's", "limit", "0.900", "s", *of_limit, "0.900", "s", "0.900", "s", "█" * 24]
    assert ours.split()[:3] == ["stio", "1.2", "1.000"]
    assert theirs.split()[:3] == ["safetensors", "1.2", "2.000"]
    assert theirs.split()[-1] == "█" * 10 + "▊"  # 0.9 / 2 of 24
    assert sentences == [
        "stio reaches 90% of the disk's limit (90% to 90% in 7 rounds).",
        "It is 2.00 times as fast as safetensors (2.00 to 2.00 in 7 rounds).",
        f"First write to memory: {rate}; later ones: {rate}. So new memory delays no load here.",
    ]


def test_the_chart(model: Path, scripted: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    chart = tmp_path / "c.svg"
    done = run("bench", model, "--chart", chart)
    assert done.stdout.splitlines()[-1] == f"chart: {chart}"
    text = chart.read_text()
    assert all(f">{label}</text>" in text for label in ("disk&#x27;s limit", "stio 1.2", "safetensors 1.2"))
    assert ">stio reaches 90% of the disk&#x27;s limit (90% to 90% in 7 rounds).</text>" in text
    assert json.loads(run("bench", model, "--chart", chart, "--json").stdout)["chart"] == str(chart)


def test_a_chart_that_could_not_be_written_is_refused_first(model: Path, tmp_path: Path) -> None:
    assert "its name must end in .svg" in refused("bench", model, "--chart", tmp_path / "c.png")
    assert "choose another place" in refused("bench", model, "--chart", tmp_path / "none" / "c.svg")


def test_each_round_runs_all(model: Path, scripted: dict[str, dict[str, Any]]) -> None:
    found = json.loads(run("bench", model, "--rounds", 4, "--json").stdout)
    assert [one["seconds"] for one in found["contestants"]] == [[0.9] * 4, [1.0] * 4, [2.0] * 4]


def test_a_peer_that_fails_is_left_out(model: Path, scripted: dict[str, dict[str, Any]]) -> None:
    scripted["safetensors"] = {"error": "no such dtype"}
    lines = run("bench", model).stdout.splitlines()
    assert "safetensors: failed: no such dtype" in lines
    assert lines[-2].startswith("There is no peer to compare it with")


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


def contestants(**seconds: list[float]) -> Iterator[Contestant]:
    for name, runs in seconds.items():
        yield Contestant(name, seconds=runs)


@pytest.mark.parametrize(
    ("seconds", "sentences"),
    [
        (
            {"limit": [1.0], "stio": [1.02]},
            ["stio reads as fast as a raw reader (98% to 98% in 1 round).", "There is no peer to compare it with"],
        ),
        (
            {"limit": [1.0] * 4, "stio": [2.0] * 4, "safetensors": [2.0, 2.1, 1.9, 2.05]},
            ["stio reaches 50%", "It is as fast as safetensors (0.95 to 1.05 in 4 rounds)."],
        ),
        (
            {"limit": [1.0] * 4, "stio": [2.0, 2.5, 2.0, 2.0], "safetensors": [5.0] * 4},
            [
                "stio reaches 50% of the disk's limit (40% to 50% in 4 rounds).",
                "It is 2.50 times as fast as safetensors (2.00 to 2.50 in 4 rounds).",
            ],
        ),
        (
            {"limit": [1.0, 2.0, 3.0], "stio": [3.0] * 3, "safetensors": [2.0, 2.5, 1.5]},
            [
                "stio reaches 67% of the disk's limit (33% to 100% in 3 rounds).",
                "safetensors is 1.50 times as fast as stio here (1.20 to 2.00 in 3 rounds).",
                "Fewer than 4 rounds show no difference reliably",
                "The disk's own rate changed by a factor of 3.0",
            ],
        ),
        (
            {"limit": [1.0] * 5, "stio": [1.0, 2.0, 3.0, 1.0, 4.0], "safetensors": [3.0, 3.0, 4.5, 0.8, 2.0]},
            [
                "stio reaches 50%",
                "Its difference from safetensors is within the noise: 1.50 times as fast (0.50 to 3.00 in 5 rounds).",
            ],
        ),
        ({"limit": [1.0], "stio": []}, ["stio could not load this"]),
    ],
)
def test_verdicts(seconds: dict[str, list[float]], sentences: list[str]) -> None:
    said = verdict(list(contestants(**seconds)))
    assert len(said) == len(sentences)
    for text, begin in zip(said, sentences, strict=True):
        assert text.startswith(begin)


def test_only_runs_of_one_round_are_compared() -> None:
    """The machine becomes slower from round to round; in each of them stio is faster."""
    slow = [float(2**k) for k in range(7)]
    said = verdict(list(contestants(limit=slow, stio=[1.25 * s for s in slow], safetensors=[2.5 * s for s in slow])))
    assert said[:2] == [
        "stio reaches 80% of the disk's limit (80% to 80% in 7 rounds).",
        "It is 2.00 times as fast as safetensors (2.00 to 2.00 in 7 rounds).",
    ]


@pytest.mark.parametrize(("num_rounds", "allowed"), [(4, 0), (6, 0), (7, 1), (10, 2), (20, 6)])
def test_so_many_rounds_may_disagree(num_rounds: int, allowed: int) -> None:
    for peer, word in ((2.0, "It is 2.00 times"), (0.5, "safetensors is 2.00 times")):
        for exceptions, expected in ((allowed, word), (allowed + 1, "Its difference from safetensors is within")):
            if 2 * exceptions < num_rounds:
                theirs = [1 / peer] * exceptions + [peer] * (num_rounds - exceptions)
                said = verdict(list(contestants(limit=[1.0] * num_rounds, stio=[1.0] * num_rounds, safetensors=theirs)))
                assert said[1].startswith(expected)


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (0.5, "First write to memory: 640 MB/s; later ones: 3.2 GB/s. The host of a virtual machine provides memory"),
        (0.15, "First write to memory: 2.13 GB/s; later ones: 3.2 GB/s. So new memory delays no load here."),
    ],
)
def test_what_new_memory_costs(
    model: Path, scripted: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, first: float, sentence: str
) -> None:
    monkeypatch.setattr(cli_bench, "room_in_memory", lambda: 640_000_000)
    monkeypatch.setattr(cli_bench, "_BUFFER_BYTES", 1 << 40)  # so half of the room is used
    scripted["stio"]["write_seconds"] = [first, 0.1]
    note = run("bench", model).stdout.splitlines()[-1]
    assert note.startswith(sentence)
    assert note.endswith(f"{show_seconds(0.4 * os.path.getsize(model) / 320e6)} longer than these.") == (first == 0.5)


def test_memory_for_all_copies_is_written_to(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(cli_bench, "_run", lambda spec: seen.append(spec) or {"error": "none"})
    run("bench", model, status=2)
    assert {spec["memory_bytes"] for spec in seen} == {2 * os.path.getsize(model) + (256 << 20)}


def test_lines_fit_a_terminal(
    model: Path, scripted: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_output, "width_of", lambda stream: 80)
    monkeypatch.setattr(cli_bench, "width_of", lambda stream: 80)
    scripted["stio"] |= {"write_seconds": [2.0, 0.1], "seconds": 0.95}
    scripted["safetensors"] |= {"version": "1.23.456.post1.dev7890"}
    lines = run("bench", model).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 12
