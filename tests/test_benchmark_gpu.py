"""The GPU benchmark: a turn that dies or does not end costs itself alone; the plan fits into its time; what it compares."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from crash.zygote import Zygote
from support import run_python

from benchmarks import gpu, gpu_contestants, gpu_device, gpu_results, gpu_run, gpu_stages, gpu_tasks
from benchmarks.gpu_child import NO_DEVICE_STATUS, SAFETENSORS, Absent, NoDevice, Options

ROOT = Path(__file__).resolve().parent.parent

FAKES = """
import os, signal
from dataclasses import replace
from pathlib import Path

from benchmarks.suite import Case, Entry
from benchmarks.gpu_child import Absent, NoDevice, Stage
from benchmarks.gpu_stages import SUITE as REAL

WORK, PRIME_BYTES, PEERS = __name__, 0, {"peer", "endless-peer"}

def stage(name, *entries, seconds=60, rounds=2, place="disk"):
    entries = tuple(entry if isinstance(entry, Entry) else Entry(entry) for entry in entries)
    case = Case(name, "a case", entries, rounds, place=place)
    return Stage(name, f"what {name} asks", seconds, (case,))

PLAN = (
    stage("first", "stio", "absent", "peer", Entry("limit", behind="stio")),
    stage("raises", "stio", "wrong"),
    stage("killed", "stio", "killed"),
    stage("endless", "stio", Entry("endless", limit_seconds=2), Entry("endless-peer", limit_seconds=2)),
    stage("last", "stio", rounds=3),
)
STAGES = (*PLAN, stage("extra", "stio"), stage("tmpfs", "stio", place="tmpfs"))
NAMES = ("stio", "absent", "peer", "wrong", "killed", "endless", "endless-peer", "limit")
SUITE = replace(REAL, cases=tuple(case for stage in STAGES for case in stage.cases), bounds=(), labels={n: n for n in NAMES})

def prepare(options):
    if options.device == "none":
        raise NoDevice("there is no such device")
    if options.device == "broken":
        raise OSError("the disk is full")
    checkpoint = Path(options.directory, "checkpoint")
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "model").write_text("weights")
    return {"accelerator": "a fake", "checkpoint": str(checkpoint)}

def turn(options, case, entry, number):
    if entry.contestant == "absent":
        raise Absent("it is not installed")
    if entry.contestant == "peer":
        raise ValueError("a peer's own fault")
    if entry.contestant == "wrong":
        raise ValueError("wrong bits")
    if entry.contestant == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if entry.contestant.startswith("endless"):
        while True:
            signal.pause()
    print("a library's own words")
    num_lines = len((Path(options.out) / "results.jsonl").read_text().splitlines())
    there = {"num_lines": num_lines, "process": os.getpid(), "directory": options.directory}
    assert Path(options.directory, "checkpoint", "model").read_text() == "weights"
    return {"first_seconds": 3.0, "seconds": 2.0, "data_bytes": 10**9, "rate": 5e8, "first_rate": 3e8} | there
"""

Run = Callable[..., int]
Read = Callable[[], dict[str, gpu_results.Attempt]]


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Return the parent of processes that begin with what a turn imports."""
    zygote = Zygote(tmp_path_factory.mktemp("output"), ["benchmarks.suite", "benchmarks.runs", "benchmarks.report"])
    yield zygote
    zygote.close()


@pytest.fixture
def command(tmp_path: Path, turns: Zygote, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Return the command, over stages that fail in every way."""
    monkeypatch.setattr(sys, "executable", str(turns.python))
    (tmp_path / "gpu_fakes.py").write_text(FAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> int:
        return gpu.main(["--out", str(tmp_path / "out"), "--dir", str(tmp_path), *arguments], module="gpu_fakes")

    yield run
    signal.signal(signal.SIGTERM, before)
    sys.modules.pop("gpu_fakes", None)


@pytest.fixture
def attempts(tmp_path: Path) -> Read:
    """Return a function that reads the results."""
    return lambda: gpu_results.attempts(gpu_results.read(tmp_path / "out" / gpu_results.FILE_NAME))


def rounds(attempt: gpu_results.Attempt, entry: str) -> list[int]:
    """Return the rounds of an entry that have a result."""
    runs = [record for record in attempt.records if record["kind"] == "run" and record["entry"] == entry]
    return [record["round"] for record in runs if "error" not in record]


def errors(attempt: gpu_results.Attempt, entry: str) -> list[str]:
    """Return the errors of an entry."""
    runs = [record for record in attempt.records if record["kind"] == "run" and record["entry"] == entry]
    return [record["error"] for record in runs if "error" in record]


@pytest.mark.slow
def test_a_turn_that_fails_leaves_the_others_results(
    command: Run, attempts: Read, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "_DUMP_SECONDS", 0.3)
    assert command() == 1
    found = attempts()
    assert list(found) == ["first", "raises", "killed", "endless", "last"]
    assert [found[name].end["status"] for name in found] == ["complete", *["failed"] * 3, "complete"]
    how = {name: attempt.end["how"] for name, attempt in found.items()}
    assert how["raises"] == "1 failed, the first: raises, wrong: ValueError: wrong bits"
    assert how["killed"] == "1 failed, the first: killed, killed: its process was killed by SIGKILL"
    assert how["endless"] == "1 failed, the first: endless, endless: no end within 2 s"
    assert [rounds(found[name], "stio") for name in found] == [[0, 1]] * 4 + [[0, 1, 2]]
    assert found["first"].left_out == ["first, absent: it is not installed"]
    assert errors(found["first"], "peer") == ["ValueError: a peer's own fault"]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert re.search(r'gpu_fakes.py", line \d+ in turn', log)  # where the process was that had no end
    for text in (capfd.readouterr().out, (tmp_path / "out" / "report.md").read_text()):
        assert "| killed | failed | " in text and "| last | complete | " in text


@pytest.mark.slow
def test_a_turn_past_its_limit_is_killed_and_its_contestant_takes_part_no_more(
    command: Run, attempts: Read, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "_DUMP_SECONDS", 0.0)
    assert command("--stage", "endless") == 1
    found = attempts()["endless"]
    assert errors(found, "endless") == errors(found, "endless-peer") == ["no end within 2 s"]  # of two rounds
    assert "endless-peer" not in found.end["how"]  # a peer's failure is not the stage's
    assert rounds(found, "stio") == [0, 1]
    assert "endless #0 endless-peer: FAILED: no end within 2 s" in capfd.readouterr().out


@pytest.mark.slow
def test_results_come_as_they_come(command: Run, tmp_path: Path) -> None:
    """Each turn has a process of its own, and sees in the file all that came before it; entries behind one share it."""
    assert command("--stage", "last", "first") == 0
    records = gpu_results.read(tmp_path / "out" / gpu_results.FILE_NAME)
    assert [record["kind"] for record in records[:3]] == ["machine", "begin", "device"]
    runs = [(number, record) for number, record in enumerate(records) if record["kind"] == "run"]
    runs = [(number, record) for number, record in runs if "error" not in record]
    assert [record["num_lines"] for number, record in runs if record["entry"] == "stio"] == [
        number for number, record in runs if record["entry"] == "stio"
    ]
    processes = {name: [run["process"] for _, run in runs if run["entry"] == name] for name in ("stio", "limit")}
    assert len(set(processes["stio"])) == 5
    assert processes["limit"] == processes["stio"][:2]


@pytest.mark.slow
def test_a_command_goes_on_where_another_ended(
    command: Run, attempts: Read, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stages = ("--stage", "first", "raises")
    assert command(*stages) == 1
    capfd.readouterr()
    assert command(*stages) == 1
    printed = capfd.readouterr().out
    assert "first: complete already" in printed and "raises: complete already" not in printed
    assert command("--stage", "first", "--quick") == 0  # other settings: other results
    assert rounds(attempts()["first"], "stio") == [0]
    assert command("--stage", "first", "--again") == 0
    assert rounds(attempts()["first"], "stio") == [0, 1]
    begin = attempts()["first"].begin
    gpu_results.append(tmp_path / "out" / gpu_results.FILE_NAME, begin)  # begun once more, and killed
    assert rounds(attempts()["first"], "stio") == [0, 1]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, float]]:
    """Replace the clock and what stages do; return what each stage was given and takes, in seconds."""
    seconds = {"bits": 25.0, "loads": 85.0, "busy": 85.0}
    now, found = [0.0], {}

    def prepare(module: str, options: Options) -> dict[str, Any]:
        now[0] += 15.0
        return {"accelerator": "none: the clock is simulated"}

    def run(self: gpu_run.StageRun) -> None:
        given = self._deadline - now[0]
        took = min(given, seconds.get(self._stage.name, 30.0))
        if took < seconds.get(self._stage.name, 30.0):
            self._leave_out("rounds 2 to 3", gpu_run.TIME_OVER)
        found[self._stage.name] = given, took
        now[0] += took

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(gpu_run, "prepare", prepare)
    monkeypatch.setattr(gpu_run.StageRun, "run", run)
    return found


def test_a_stage_may_use_what_those_before_it_have_left(tmp_path: Path, taken: dict[str, tuple[float, float]]) -> None:
    gpu.main(["--out", str(tmp_path), "--dir", str(tmp_path)])
    assert list(taken) == [stage.name for stage in gpu_stages.PLAN]
    bits, loads = (stage.seconds for stage in gpu_stages.PLAN[:2])
    assert taken["bits"] == (gpu.PREPARE_SECONDS + bits - 15, 25)
    assert taken["loads"] == (gpu.PREPARE_SECONDS + bits + loads - 15 - 25, 85)


def test_what_the_time_does_not_suffice_for_is_left_out_aloud(
    tmp_path: Path, taken: dict[str, tuple[float, float]], capfd: pytest.CaptureFixture[str]
) -> None:
    """The stages keep their order: the later ones are cut and left out."""
    gpu.main(["--out", str(tmp_path), "--dir", str(tmp_path), "--total-seconds", "200"])
    assert list(taken) == ["bits", "loads", "busy"]
    assert taken["busy"] == (200 - 15 - 25 - 85, 75)
    printed = capfd.readouterr().out
    found = gpu_results.attempts(gpu_results.read(tmp_path / gpu_results.FILE_NAME))
    assert {name: attempt.end["status"] for name, attempt in found.items()} == {
        **dict.fromkeys(("bits", "loads"), "complete"), "busy": "cut short",
        **dict.fromkeys(("cache", "refresh", "saves", "peers"), "left out"),
    }  # fmt: skip
    for name in ("cache", "refresh", "saves", "peers"):
        assert f"{name}: left out, the command's time was over" in printed
        assert f"| {name} | left out | 0 | all of it: the command's time was over |" in printed
    taken.clear()
    gpu.main(["--out", str(tmp_path), "--dir", str(tmp_path)])
    assert list(taken) == ["busy", "cache", "refresh", "saves", "peers"]  # what was cut runs again


def test_a_turn_is_killed_when_the_time_of_its_stage_is_over(
    command: Run, attempts: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left out then, and has not failed."""
    monkeypatch.setattr(gpu_run, "_DUMP_SECONDS", 0.0)
    monkeypatch.setattr(gpu_run, "TMPFS", Path("none"))
    start = gpu_run.StageRun.__init__

    def start_late(self: gpu_run.StageRun, *arguments: Any) -> None:
        start(self, *arguments)
        self._deadline = time.monotonic() + 0.02  # less than a process takes

    monkeypatch.setattr(gpu_run.StageRun, "__init__", start_late)
    assert command("--stage", "last") == 0
    over = "the stage's time was over"
    assert attempts()["last"].left_out == [f"last, round 1: stio: {over}", f"last, rounds 2 to 3: {over}"]
    assert attempts()["last"].end["status"] == "complete"  # it had its own budget


@pytest.mark.slow
def test_only_the_plan_runs_by_default(command: Run, attempts: Read, capfd: pytest.CaptureFixture[str]) -> None:
    assert command("--list") == 0
    listed = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed if "in the plan" in line] == [
        "first",
        "raises",
        "killed",
        "endless",
        "last",
    ]
    assert [line.split()[0] for line in listed if "by --stage" in line] == ["extra", "tmpfs"]
    assert command("--total-seconds", "0") == 0
    assert list(attempts()) == ["first", "raises", "killed", "endless", "last"]
    assert command("--total-seconds", "0", "--all") == 0
    assert list(attempts())[-2:] == ["extra", "tmpfs"]


@pytest.mark.slow
def test_a_stage_on_tmpfs(command: Run, attempts: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are copied there, and removed; too little room is said."""
    place = tmp_path / "shm"
    place.mkdir()
    monkeypatch.setattr(gpu_run, "TMPFS", place)
    assert command("--stage", "tmpfs") == 0
    directories = {run["directory"] for run in attempts()["tmpfs"].records if run["kind"] == "run"}
    assert len(directories) == 1 and str(place) in directories.pop()
    assert list(place.iterdir()) == []
    monkeypatch.setattr(gpu_run, "TMPFS", tmp_path / "none")
    assert command("--stage", "tmpfs", "--again") == 0
    assert attempts()["tmpfs"].left_out == [f"tmpfs: {tmp_path / 'none'} has too little room for 0.0 GB"]


def test_the_report_needs_the_file_alone(command: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "copied"
    out.mkdir()
    run = {"kind": "run", "stage": "last", "case": "last", "entry": "stio", "data_bytes": 10**9, "other_cpus": 0.0}
    machine = {
        "cpu": "a processor",
        "num_cpus": 2,
        "memory_bytes": 1 << 30,
        "kernel": "6",
        "python": "3.12",
        "packages": {},
    }
    disk = {"filesystem": "ext4", "read_ahead_kb": "128"}
    for record in (
        {"kind": "machine", **machine, "disk": disk, "date": "2026-01-01", "size_bytes": 10**9, "prime_bytes": 0},
        {"kind": "begin", "stage": "last", "settings": {}},
        {"kind": "device", "stage": "last", "accelerator": "a device of its own"},
        run | {"round": 0, "seconds": 4.0, "rate": 2.5e8},
        run | {"round": 1, "seconds": 2.0, "rate": 5e8},
    ):
        gpu_results.append(out / gpu_results.FILE_NAME, record)
    with open(out / gpu_results.FILE_NAME, "ab") as file:
        file.write(b'{"kind": "run", "stage": "la')  # its writer died inside it
    assert command("--report", str(out)) == 0
    printed = capfd.readouterr().out
    assert "| last | failed | 0 | no end was written: interrupted |" in printed
    assert "a device of its own" in printed
    assert "| stio |  | 3.000 s | 2.000 s to 4.000 s | 0.38 | 2 |" in printed
    assert "Fewer than 3 rounds, so no spread to speak of: last." in printed
    gpu_results.append(
        out / gpu_results.FILE_NAME, {"kind": "end", "stage": "last", "status": "complete", "seconds": 1}
    )
    assert gpu_results.attempts(gpu_results.read(out / gpu_results.FILE_NAME))["last"].is_complete


def test_without_the_device_nothing_is_measured(command: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert command("--device", "none") == 2
    assert capfd.readouterr().err == "there is no such device: nothing was measured\n"


def test_a_failed_preparation_says_why(command: Run) -> None:
    with pytest.raises(SystemExit, match=r"preparing failed: its process ended with 1: OSError: the disk is full"):
        command("--device", "broken")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_where_torch_sees_no_accelerator_it_says_so() -> None:
    with pytest.raises(NoDevice, match="torch sees no accelerator here"):
        gpu_device.use("cuda")


def test_the_stages_are_whole() -> None:
    """Each entry has a task and a label, each loader and each bound belongs to something, processes are shared rightly."""
    cases = gpu_stages.SUITE.cases
    entries = [entry for case in cases for entry in case.entries]
    contestants, tasks = {entry.contestant for entry in entries}, {entry.task for entry in entries}
    assert contestants == set(gpu_stages.LABELS)
    assert tasks == set(gpu_tasks._TASKS)
    loaders = {entry.contestant for entry in entries if entry.task in ("load", "turns")}
    assert loaders == set(gpu_contestants.CONTESTANTS)
    refreshes = {entry.contestant for entry in entries if entry.task == "refresh"}
    assert refreshes == set(gpu_tasks._REFRESHES)
    names = {case.name for case in cases}
    assert {bound.case for bound in gpu_stages.BOUNDS} <= names
    assert {panel.case for panel in gpu_stages.SUITE.panels} <= names
    assert gpu_stages.PEERS.issubset(gpu_stages.LABELS)
    assert all(case.rounds >= gpu_results.FEWEST_ROUNDS for case in cases)
    for case in cases:
        first = {entry.name for entry in case.entries if not entry.behind}
        assert {entry.behind for entry in case.entries if entry.behind} <= first
        assert len({entry.name for entry in case.entries}) == len(case.entries)
        for entry in case.entries:  # no package beside another one of its name, no loader after another one
            assert not entry.behind or entry.contestant.startswith(("stio", "raw-", "pin-", "wake-"))
            assert "prefetch" not in entry.contestant or not entry.behind


def test_the_plan_answers_in_order_within_eight_minutes() -> None:
    assert [stage.name for stage in gpu_stages.PLAN] == ["bits", "loads", "busy", "cache", "refresh", "saves", "peers"]
    assert gpu.planned_seconds(gpu_stages) <= 480
    assert gpu.SIZE_BYTES == 6_000_000_000
    assert gpu_stages.STAGES[: len(gpu_stages.PLAN)] == gpu_stages.PLAN


START_SECONDS = 5.5
"""Of a process, until its clock starts; imports are 4 s of that."""

SECONDS = {
    "stio": 0.8, "safetensors": 2.6, "safetensors-prefetch": 0.7, "instanttensor-buffered": 0.6, "instanttensor": 0.5,
    "fastsafetensors": 1.0, "runai": 3.4, "stio-cache": 3.0, "stio-refresh": 0.9, "prefetch-copy": 0.9,
    "dcp-copy": 3.0, "stio-saver": 3.0, "dcp": 4.0,
    "stio busy": 2.0, "safetensors-prefetch busy": 3.6, "safetensors busy": 14.0, "runai busy": 40.0,
}  # fmt: skip
"""Of all loads or saves of a process, of 6 and 2 GB, on an H200 with 16 processors (2026-11-26); of limits 0.3 at most.

Those of `stio busy` and of `dcp` are guesses."""


@pytest.mark.parametrize("stage", gpu_stages.PLAN[1:], ids=lambda stage: stage.name)
def test_the_rounds_of_the_plan_fit_into_their_budgets(stage: Any) -> None:
    """By what was measured; to compare all bits of a load, in the first round, takes 1.5 s."""
    needed = 3.0 * (stage.name == "peers")  # the copy of the checkpoint
    for entry in stage.cases[0].entries:
        seconds = SECONDS.get(entry.name, 0.3) + START_SECONDS * (not entry.behind)
        needed += min(seconds, entry.limit_seconds or gpu_run.TURN_SECONDS) * (entry.rounds or 3)
        needed += 1.5 * (not entry.behind and entry.task in ("load", "refresh"))
    assert needed <= stage.seconds


# What is compared.


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a small checkpoint of the benchmark, with the digests of tensors of many parts."""
    monkeypatch.setattr(gpu_tasks, "_PART_WORDS", 1000)
    gpu_tasks._weights.cache_clear()
    yield gpu_tasks.checkpoint(Options(out="", directory=str(tmp_path)), 1_000_000)
    gpu_tasks._weights.cache_clear()


def loaded(model: Path) -> dict[str, torch.Tensor]:
    """Load it, by plain reads."""
    return {name: plain.clone() for name, plain in gpu_tasks.plain_tensors(gpu_contestants.shards_of(model))}


@pytest.mark.slow
def test_each_wrong_bit_is_found(model: Path) -> None:
    tensors = loaded(model)
    gpu_tasks.verify(tensors, model, all_bits=True)
    name = "model.embed_tokens.weight"
    for place in (0, 7, 8_001, tensors[name].numel() - 1):
        tensors[name][place] ^= 128
        with pytest.raises(gpu_tasks.WrongBits, match=rf"{name}, and 0 others: wrong bits"):
            gpu_tasks.verify(tensors, model)
        tensors[name][place] ^= 128
    gpu_tasks.verify(tensors, model)


@pytest.mark.slow
def test_exchanged_words_are_found(model: Path) -> None:
    tensors = loaded(model)
    words = tensors["lm_head.weight"].view(torch.int64)
    for first, second in ((0, 1), (0, 1000), (17, 4321)):
        words[[first, second]] = words[[second, first]]
        with pytest.raises(gpu_tasks.WrongBits):
            gpu_tasks.verify(tensors, model)
        words[[first, second]] = words[[second, first]]
    gpu_tasks.verify(tensors, model)


@pytest.mark.slow
def test_a_tensor_that_is_not_aligned_has_the_same_digest(model: Path) -> None:
    tensors = loaded(model)
    data = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = torch.cat([data[:2], data])[2:]
    gpu_tasks.verify(tensors, model)


@pytest.mark.slow
def test_digests_that_agree_do_not_hide_a_wrong_bit(model: Path) -> None:
    """In one round all bits are compared, with plain reads."""
    tensors = loaded(model)
    tensors["lm_head.weight"][5] ^= 1
    digests = {name: int(gpu_tasks.digest(tensor)) for name, tensor in tensors.items()}
    (model / "digests.json").write_text(json.dumps(digests))
    gpu_tasks.verify(tensors, model)
    with pytest.raises(gpu_tasks.WrongBits, match="lm_head.weight: wrong bits in bytes 0 to"):
        gpu_tasks.verify(tensors, model, all_bits=True)


@pytest.mark.slow
def test_a_name_a_device_or_a_byte_too_few_is_found(model: Path) -> None:
    tensors = loaded(model)
    with pytest.raises(gpu_tasks.WrongBits, match="1 names are missing or too many"):
        gpu_tasks.verify({name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, model)
    with pytest.raises(gpu_tasks.WrongBits, match="lm_head.weight is on meta"):
        gpu_tasks.verify(tensors | {"lm_head.weight": torch.empty(8, device="meta")}, model)
    with pytest.raises(gpu_tasks.WrongBits, match="wrong bits"):
        gpu_tasks.verify(tensors | {"lm_head.weight": tensors["lm_head.weight"][:-8]}, model)


# Contestants.


SECOND_SAFETENSORS = """
class safe_open:
    def __init__(self, path, framework, device):
        print("open", path.name, framework, device)
        self.path = path
    def __enter__(self):
        return self
    def __exit__(self, *error):
        print("close", self.path.name)
    def prefetch(self):
        print("prefetch", self.path.name)
        return Loader(self.path)

class Loader:
    def __init__(self, path):
        self.path = path
    def __enter__(self):
        return self
    def __exit__(self, *error):
        pass
    def __iter__(self):
        print("take", self.path.name)
        yield self.path.name, "a tensor"
"""

PREFETCHES = """
import json, sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks import gpu_contestants
from benchmarks.gpu_child import Absent

directory = Path(sys.argv[1])
index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
(directory / "model.safetensors.index.json").write_text(json.dumps(index))
try:
    load = gpu_contestants.prepared("safetensors-prefetch", ExitStack())
except Absent as reason:
    sys.exit(str(reason))
print(sorted(load(directory)))
"""


def prefetched(zygote: Zygote, directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Load with the second safetensors."""
    known = {name: value for name, value in os.environ.items() if name != SAFETENSORS}
    command = [zygote.python, "-c", PREFETCHES, directory]
    return subprocess.run(command, cwd=ROOT, env=known | environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_second_safetensors_comes_from_its_folder(torch_zygote: Zygote, tmp_path: Path) -> None:
    """It has the name of the first one. Loaders of all shards are started before a tensor is taken."""
    package = tmp_path / "folder" / "safetensors"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SECOND_SAFETENSORS)
    (package / "torch.py").touch()
    done = prefetched(torch_zygote, tmp_path, **{SAFETENSORS: str(package.parent)})
    assert done.stdout.splitlines() == [
        "open 1.safetensors pt cpu",
        "open 2.safetensors pt cpu",
        *("prefetch 1.safetensors", "prefetch 2.safetensors", "take 1.safetensors", "take 2.safetensors"),
        *("close 2.safetensors", "close 1.safetensors"),
        "['1.safetensors', '2.safetensors']",
    ], done.stderr


@pytest.mark.slow
def test_without_the_second_safetensors_its_contestant_is_absent(torch_zygote: Zygote, tmp_path: Path) -> None:
    assert f"{SAFETENSORS} names no folder with safetensors 0.9" in prefetched(torch_zygote, tmp_path).stderr
    assert f"and not in {tmp_path}" in prefetched(torch_zygote, tmp_path, **{SAFETENSORS: str(tmp_path)}).stderr
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text("safe_open = None")
    (tmp_path / "safetensors" / "torch.py").touch()
    assert "has no prefetch" in prefetched(torch_zygote, tmp_path, **{SAFETENSORS: str(tmp_path)}).stderr


@pytest.mark.slow
def test_the_report_names_the_version_of_both_safetensors(
    command: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "folder" / "safetensors-0.9.0rc1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: safetensors\nVersion: 0.9.0rc1\n")
    monkeypatch.setenv(SAFETENSORS, str(info.parent))
    assert command("--stage", "last", "--quick") == 0
    printed = capfd.readouterr().out
    assert f"safetensors in {SAFETENSORS} 0.9.0rc1" in printed
    assert re.search(r"torch \d.*, safetensors \d", printed)


@pytest.mark.parametrize(("name", "backend"), [("instanttensor", None), ("instanttensor-buffered", "buffered")])
def test_instanttensor_reads_with_the_backend_of_its_contestant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backend: str | None
) -> None:
    """Its default is None: direct I/O, and a mapping on tmpfs. All files go into one call."""
    calls = []

    class Opened:
        def __init__(self, paths: list[str], **keywords: Any) -> None:
            calls.append((paths, keywords))

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def tensors(self) -> list[tuple[str, str]]:
            return [("a", "a tensor")]

    package = SimpleNamespace(safe_open=Opened, BackendPolicy=SimpleNamespace(BUFFERED="buffered"))
    monkeypatch.setattr(gpu_contestants, "imported", lambda name: package)
    monkeypatch.setattr(gpu_device, "cuda_runtime", lambda: None)
    monkeypatch.setattr(gpu_device, "_device", torch.device("cuda", 0))
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert gpu_contestants.prepared(name, ExitStack())(tmp_path) == {"a": "a tensor"}
    paths = [str(tmp_path / "1.safetensors"), str(tmp_path / "2.safetensors")]
    assert calls == [(paths, {"framework": "pt", "device": 0, "backend": backend})]


@pytest.mark.slow
def test_dcp_saves_several_times_where_its_stager_closes_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of torch 2.11 does, after each staging: its table of copy functions is empty then."""
    staging = pytest.importorskip("torch.distributed.checkpoint.staging")
    stage = staging.DefaultStager._stage

    def stage_and_close(self: Any, state_dict: Any, **keywords: Any) -> Any:
        found = stage(self, state_dict, **keywords)
        self._state_dict_stager.close()
        return found

    monkeypatch.setattr(staging.DefaultStager, "_stage", stage_and_close)
    tensors = {f"{k}": torch.full((3, 5), k, dtype=torch.int16) for k in range(3)}

    async def save() -> None:
        async with gpu_tasks._dcp(tensors) as begin:
            for k in range(3):
                finish = await begin(tmp_path / f"{k}")
                await finish()
                torch._foreach_add_(list(tensors.values()), 1)

    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        asyncio.run(save())
        saved = dict(gpu_tasks._saved("dcp", tmp_path / "2", tensors))
    assert [tensor.unique().tolist() for tensor in saved.values()] == [[2], [3], [4]]


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
        self.calls.append(("register", nbytes, flags))
        return self.Status(self.status)

    def cudaHostUnregister(self, address: int) -> Runtime.Status:  # noqa: N802 - CUDA's name
        self.calls.append(("unregister",))
        return self.Status(0)


def test_registered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0)
    monkeypatch.setattr(gpu_device, "cuda_runtime", lambda: runtime)
    memory = np.zeros(100_000, np.uint8)
    with gpu_device.registered(memory, read_only=True):
        assert runtime.calls == [("register", 100_000, 8)]
    assert runtime.calls[1:] == [("unregister",)]
    runtime.status = 801
    with pytest.raises(OSError, match="801"), gpu_device.registered(memory):
        pass
    assert runtime.calls[2:] == [("register", 100_000, 0)]


def test_what_only_cuda_has_is_absent_elsewhere() -> None:
    with pytest.raises(Absent, match="only CUDA has this"), gpu_device.registered(np.zeros(1, np.uint8)):
        pass


# The tests on a device.


@pytest.mark.slow
def test_child_processes_of_tests_find_what_pythonpath_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a rented machine without network the packages are carried there, in a folder that PYTHONPATH names."""
    (tmp_path / "carried.py").write_text("here = 'carried'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import carried, crash.zygote_main, stio; print(carried.here, stio.__file__)"
    expected = f"carried {ROOT / 'stio' / '__init__.py'}\n"
    assert run_python(code).stdout == expected  # a real interpreter without torch: its own search path
    zygote = Zygote(tmp_path, modules=())
    try:
        assert zygote.run(code).stdout == expected
        assert run_python(code, python=zygote.python).stdout == expected
    finally:
        zygote.close()


# Rehearsals.


def rehearsed(tmp_path: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script beside the benchmark; skip the test where there is no simulated device."""
    # A real interpreter: torch must start with the simulated device.
    command = [sys.executable, "-c", code, str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == NO_DEVICE_STATUS or "nothing was measured" in done.stderr:
        pytest.skip(done.stderr)
    return done


REHEARSAL = """
import sys
from benchmarks import gpu

out, *names = sys.argv[1:]
sys.exit(gpu.main(["--device", "sim", "--out", out, "--dir", out, "--stage", *names]))
"""


@pytest.mark.slow  # a process for each turn, each with an import of torch
def test_rehearsal(tmp_path: Path) -> None:
    """Turns of all kinds go through on a simulated device, with every bit as it should be."""
    names = [stage.name for stage in gpu_stages.STAGES if not stage.tests]
    done = rehearsed(tmp_path, REHEARSAL, *names)
    assert done.returncode == 0, done.stdout + done.stderr
    records = gpu_results.read(tmp_path / gpu_results.FILE_NAME)
    runs = [record for record in records if record["kind"] == "run"]
    assert [record["error"] for record in runs if "error" in record] == []
    assert {record["stage"] for record in runs} == set(names)
    ours = {"stio", "stio busy", "stio-cache", "stio-refresh", "stio-saver", "stio-cast", "stio-warm", "stio-then"}
    assert ours | {"dcp", "raw-d2h"} <= {record["entry"] for record in runs}
    absent = {record["what"] for record in records if record.get("reason") == "only CUDA has this"}
    assert {"pinning, pin-registered", "direct, raw-disk-registered", "wakeup, wake-sleep"} <= absent
    refreshed = next(record for record in runs if record["entry"] == "stio-refresh")
    assert 0 < refreshed["added_peak_bytes"] < refreshed["data_bytes"] * 1.25


RACE = """
import sys
import torch
from benchmarks import gpu_child, gpu_contestants, gpu_device, gpu_stages, gpu_tasks

def races(module):
    stream = gpu_device.stream()
    def refresh(directory):
        state = module.state_dict()
        with gpu_device.on(stream):  # which waits for nothing
            for name, plain in gpu_tasks.plain_tensors(gpu_contestants.shards_of(directory)):
                state[name].copy_(plain.view(torch.bfloat16).view(state[name].shape))
        stream.synchronize()
    return refresh

options = gpu_child.Options(out=sys.argv[1], directory=sys.argv[1], device="sim", quick=True, size_bytes=40_000_000)
try:
    gpu_tasks.prepare(options)
except gpu_child.NoDevice as error:
    print(error, file=sys.stderr)
    sys.exit(gpu_child.NO_DEVICE_STATUS)
gpu_tasks._REFRESHES["stio-refresh"] = races
case = next(case for case in gpu_stages.SUITE.cases if case.name == "refresh")
try:
    gpu_tasks.turn(options, case, case.entries[0], 0)
except gpu_tasks.WrongBits as error:
    print(error)
"""


@pytest.mark.slow
def test_a_refresh_that_does_not_wait_is_found(tmp_path: Path) -> None:
    done = rehearsed(tmp_path, RACE)
    assert done.stdout.endswith("what was queued before the refresh saw new weights\n"), done.stderr
