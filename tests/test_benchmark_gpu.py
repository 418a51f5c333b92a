"""The GPU benchmark: a stage that dies costs its own results alone, and a rehearsal on a simulated device goes through."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu, gpu_contestants, gpu_device, gpu_results, gpu_stages, gpu_tasks
from benchmarks.gpu_child import NO_DEVICE_STATUS, Absent, NoDevice

ROOT = Path(__file__).resolve().parent.parent

FAKES = """
import os, signal
from dataclasses import replace
from pathlib import Path

from benchmarks.suite import Case, Entry
from benchmarks.gpu_child import Absent, NoDevice, Stage
from benchmarks.gpu_stages import SUITE as REAL

WORK, PRIME_BYTES, PEERS = __name__, 0, {"peer"}

def stage(name, *entries, seconds=60, rounds=3, is_fresh=False):
    case = Case(name, "a case", tuple(map(Entry, entries)), rounds)
    return Stage(name, f"what {name} asks", seconds, (case,), is_fresh)

STAGES = (
    stage("first", "stio", "absent", "peer"),
    stage("raises", "stio", "wrong"),
    stage("killed", "stio", "killed"),
    stage("hangs", "waits", seconds=3),
    stage("fresh", "stio", "killed", is_fresh=True, rounds=2),
    stage("last", "stio"),
)
NAMES = ("stio", "absent", "peer", "wrong", "killed", "waits")
SUITE = replace(REAL, cases=tuple(case for stage in STAGES for case in stage.cases), bounds=(), labels={n: n for n in NAMES})

def prepare(options):
    if options.device == "none":
        raise NoDevice("there is no such device")
    return {"accelerator": "a fake"}

def turn(options, case, entry, number):
    if entry.contestant == "absent":
        raise Absent("it is not installed")
    if entry.contestant == "peer":
        raise ValueError("a peer's own fault")
    if entry.contestant == "wrong":
        raise ValueError("wrong bits")
    if entry.contestant == "killed" and number:
        os.kill(os.getpid(), signal.SIGKILL)
    if entry.contestant == "waits":
        signal.pause()
    print("a library's own words")
    num_lines = len((Path(options.out) / "results.jsonl").read_text().splitlines())
    return {"seconds": 2.0, "data_bytes": 10**9, "rate": 5e8, "num_lines": num_lines, "process": os.getpid()}
"""

Run = Callable[..., int]
Read = Callable[[], dict[str, gpu_results.Attempt]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Return the command, over stages that die in every way."""
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


def test_a_stage_that_dies_leaves_the_others_results(
    command: Run, attempts: Read, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_END_SECONDS", 0.0)
    assert command() == 1
    found = attempts()
    assert list(found) == ["first", "raises", "killed", "hangs", "fresh", "last"]
    assert [found[name].end["status"] for name in found] == ["complete", *["failed"] * 4, "complete"]
    how = {name: attempt.end["how"] for name, attempt in found.items()}
    assert how["raises"] == "1 runs failed, the first: raises, wrong: ValueError: wrong bits"
    assert how["killed"].startswith("killed by SIGKILL")
    assert how["hangs"].startswith("killed: no end after 3 s")
    assert "1 runs failed" in how["fresh"] and "-9" in how["fresh"]
    assert {name: rounds(found[name], "stio") for name in ("first", "raises", "killed", "fresh", "last")} == {
        "first": [0, 1, 2], "raises": [0, 1, 2], "killed": [0], "fresh": [0, 1], "last": [0, 1, 2],
    }  # fmt: skip
    assert found["first"].left_out == ["first, absent: it is not installed"]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert re.search(r'gpu_fakes.py", line \d+ in turn', log)  # where the stage was that had no end
    for text in (capfd.readouterr().out, (tmp_path / "out" / "report.md").read_text()):
        assert "| killed | failed | " in text and "| last | complete | " in text


def test_results_come_as_they_come(command: Run, tmp_path: Path) -> None:
    """Each run sees in the file all that came before it; runs of a fresh stage have a process each, others one."""
    assert command("--stage", "last", "fresh", "--quick") == 0
    records = gpu_results.read(tmp_path / "out" / gpu_results.FILE_NAME)
    assert [record["kind"] for record in records[:3]] == ["machine", "begin", "device"]
    runs = [(number, record) for number, record in enumerate(records) if record["kind"] == "run"]
    assert [record["num_lines"] for _, record in runs] == [number for number, _ in runs]
    assert len({record["process"] for _, record in runs}) == len(runs) == 3


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
    assert rounds(attempts()["first"], "stio") == [0, 1, 2]
    begin = attempts()["first"].begin
    gpu_results.append(tmp_path / "out" / gpu_results.FILE_NAME, begin)  # begun once more, and killed
    assert rounds(attempts()["first"], "stio") == [0, 1, 2]


def test_what_the_time_does_not_suffice_for_is_left_out_aloud(command: Run, attempts: Read) -> None:
    assert command("--stage", "last", "--seconds", "0.001") == 0
    assert rounds(attempts()["last"], "stio") == [0]
    assert attempts()["last"].left_out == ["last, rounds 2 to 3: the stage's time was over"]
    assert command("--stage", "first", "--total-seconds", "0") == 0
    assert attempts()["first"].end["status"] == "left out"
    assert command("--stage", "last", "first") == 0
    assert rounds(attempts()["first"], "stio") == [0, 1, 2]


def test_a_stage_whose_time_the_command_cut_is_run_again(
    command: Run, attempts: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "FEWEST_SECONDS", 0.0)
    for seconds in ("0.1", "0.3", "0.9"):  # less than the start of a process takes, and enough to begin the stage
        assert command("--stage", "last", "--total-seconds", seconds) == 0
        if attempts()["last"].end["status"] != "left out":
            break
    assert attempts()["last"].end["status"] == "cut short"
    assert command("--stage", "last") == 0
    assert rounds(attempts()["last"], "stio") == [0, 1, 2]


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


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_where_torch_sees_no_accelerator_it_says_so() -> None:
    with pytest.raises(NoDevice, match="torch sees no accelerator here"):
        gpu_device.use("cuda")


def test_the_stages_are_whole() -> None:
    """Each entry has a task and a label, each loader and each bound belongs to something, no task exceeds its limit."""
    cases = gpu_stages.SUITE.cases
    entries = [entry for case in cases for entry in case.entries]
    contestants, tasks = {entry.contestant for entry in entries}, {entry.task for entry in entries}
    assert contestants == set(gpu_stages.LABELS)
    assert tasks == set(gpu_tasks._TASKS)
    loaders = {entry.contestant for entry in entries if entry.task in ("load", "again", "turns")}
    assert loaders == set(gpu_contestants.CONTESTANTS)
    names = {case.name for case in cases}
    assert {bound.case for bound in gpu_stages.BOUNDS} <= names
    assert {panel.case for panel in gpu_stages.SUITE.panels} <= names
    assert gpu_stages.PEERS.issubset(gpu_stages.LABELS)
    assert all(stage.seconds + gpu._END_SECONDS <= gpu.MOST_SECONDS for stage in gpu_stages.STAGES)
    assert all(case.rounds >= gpu_results.FEWEST_ROUNDS for case in cases)


@pytest.mark.parametrize("place", [0, 70_000, (64 << 20) + 1])
def test_one_wrong_bit_is_found(place: int) -> None:
    expected = {"weight": torch.zeros((64 << 20) + 2, dtype=torch.uint8), "bias": torch.full((3,), float("nan"))}
    found = {"weight": expected["weight"].clone().view(torch.bfloat16), "bias": expected["bias"].clone()}
    gpu_tasks.verify(found, expected)
    found["weight"].view(torch.uint8)[place] ^= 4
    with pytest.raises(gpu_tasks.WrongBits, match=r"weight: wrong bits in bytes (0|67108864) to"):
        gpu_tasks.verify(found, expected)


def test_a_name_or_a_byte_too_few_is_found() -> None:
    expected = {"weight": torch.zeros(4), "bias": torch.zeros(1)}
    with pytest.raises(gpu_tasks.WrongBits, match="1 names are missing or too many"):
        gpu_tasks.verify({"weight": torch.zeros(4)}, expected)
    with pytest.raises(gpu_tasks.WrongBits, match="weight: 12 bytes on cpu, not 16"):
        gpu_tasks.verify({"weight": torch.zeros(3), "bias": torch.zeros(1)}, expected)


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


REHEARSAL = """
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import gpu_child, gpu_device, gpu_stages, gpu_tasks

out, *names = sys.argv[1:]
gpu_stages.STAGES = tuple(replace(stage, is_fresh=False) for stage in gpu_stages.STAGES)  # one process for all
options = gpu_child.Options(out=out, directory=out, device="sim", quick=True, size_bytes=40_000_000)
for name in names:
    if status := gpu_child.main(["benchmarks.gpu_stages", options.encode(), name]):
        sys.exit(status)

def races(module):
    stream = gpu_device.stream()
    def refresh(directory):
        state = module.state_dict()
        with gpu_device.on(stream):  # which waits for nothing
            for name, plain in gpu_tasks.reference(directory).items():
                state[name].copy_(plain.view(torch.bfloat16).view(state[name].shape), non_blocking=True)
        stream.synchronize()
    return refresh

gpu_tasks._REFRESHES["stio-refresh"] = races
case = next(case for case in gpu_stages.SUITE.cases if case.name == "refresh")
try:
    gpu_tasks.turn(options, case, case.entries[0], 0)
except gpu_tasks.WrongBits as error:
    print(error)
"""


@pytest.mark.slow  # a process for each stage, each with an import of torch: `make rehearse-gpu` runs all of them
def test_rehearsal(tmp_path: Path) -> None:
    """Turns of all kinds go through on a simulated device, with every bit as it should be."""
    alike = {
        "tests",
        "first-load",
        "warm",
        "cold",
        "busy",
        "save",
        "decoder",
        "limits",
        "gds",
    }  # what they do others do too
    names = [stage.name for stage in gpu_stages.STAGES if stage.name not in alike]
    done = subprocess.run(
        [sys.executable, "-c", REHEARSAL, str(tmp_path), *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode == NO_DEVICE_STATUS:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("what was queued before the refresh saw new weights")
    records = gpu_results.read(tmp_path / gpu_results.FILE_NAME)
    runs = [record for record in records if record["kind"] == "run"]
    assert [record["error"] for record in runs if "error" in record] == []
    assert {record["stage"] for record in runs} == set(names)
    ours = {"stio", "stio-saver", "stio-cast", "stio-refresh", "stio-warm", "stio-then", "stio reserved", "dcp"}
    assert ours <= {record["entry"] for record in runs}
    absent = {record["what"] for record in records if record.get("reason") == "only CUDA has this"}
    assert {"pinning, pin-registered", "direct, raw-disk-registered", "wakeup, wake-sleep"} <= absent
    refreshed = next(record for record in runs if record["entry"] == "stio-refresh")
    assert 0 < refreshed["added_peak_bytes"] < refreshed["data_bytes"] * 1.1
