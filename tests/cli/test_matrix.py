"""Every command in every situation: real weights, hostile files, missing paths, pipes, terminals, Ctrl-C.

Each test runs the real program in a process of its own. To import torch takes seconds, and the program half a second, so
the processes are forked from one that has imported what the command needs. The text of a command is tested in its file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from commands import terminal
from crash.zygote import Finished, Zygote
from remote.servers import http_server
from support import trained_model

from stio.cli.main import main
from stio.storage.commit.journal import LOCK_NAME

COMMANDS = sorted(main.commands)
PLAIN = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "PYTHONUNBUFFERED")}

_ALONE = """
import sys
from stio.cli import bench as cli_bench
sys.executable = {!r}  # of its runs
cli_bench.PEERS = {{}}  # each of them costs seconds
"""
_RECORDED = """
cli_bench._run = lambda spec: {
    "seconds": 1.0, "resident_fraction": 0.0, "is_direct": True, "version": "1", "checksum": None
    if spec["contestant"] == "limit" else 5, "write_seconds": [1.0, 0.1],
}
"""
"""Makes a bench start no processes, each of which imports torch, where only its output matters."""
_MAIN = "from stio.__main__ import main; main()"

MADE = {"convert": ["made.safetensors"], "pull": ["made"]}
"""What a command leaves in the directory that it is called in."""
WEB: list[str] = []
"""The URL of the server, while it runs."""

Program = Callable[..., list[str]]
Called = Callable[..., Finished]


@pytest.fixture
def program(zygote: Zygote, program_zygote: Zygote) -> Program:
    """Return a function that returns the program for a command, with code that is run before its begin."""

    def start(name: str, before: str = "") -> list[str]:
        parent = zygote if name in ("convert", "load") else program_zygote
        return [
            str(parent.python),
            "-c",
            (_ALONE.format(str(zygote.python)) if name == "bench" else "") + before + _MAIN,
        ]

    return start


def recorded(name: str) -> str:
    """Return code that makes a bench measure nothing; of the other commands, nothing is replaced."""
    return _RECORDED if name == "bench" else ""


class Disk(dict[str, bytes]):
    """The files of this machine, as the objects of a server."""

    def get(self, path: str, default: Any = None) -> Any:
        if not Path(path).is_file():
            return default
        if path not in self:  # read once, and not for each range
            self[path] = Path(path).read_bytes()
        return self[path]


@pytest.fixture(scope="module", autouse=True)
def web() -> Iterator[None]:
    """Serve the files of this machine, for commands that take a URL."""
    with http_server(objects=Disk()) as server:
        WEB.append(server.url)
        yield
        WEB.clear()


def arguments(name: str, source: Path, home: Path) -> list[str]:
    """Return what a command takes to work on a source; what it makes goes below `home`."""
    if name == "pull":
        return [name, WEB[0] + quote(str(source)), str(home / "made")]
    more = {
        "bench": ["--rounds", "1"],
        "convert": [str(home / "made.safetensors"), "--dtype", "bfloat16"],
        "diff": [str(source)],
        "load": ["--device", "cpu", "--memory", "copy"],
    }
    return [name, str(source), *more.get(name, [])]


@pytest.fixture
def called(program: Program) -> Called:
    """Return a function that runs a command, with no terminal for its output."""

    def call(name: str, source: Path, home: Path, *more: str, before: str = "", **environment: str) -> Finished:
        command = [*program(name, before), *arguments(name, source, home), *more]
        done = subprocess.run(command, capture_output=True, text=True, cwd=home, env=PLAIN | environment, timeout=100)
        return Finished(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model, as it was published, in a directory of its own."""
    folder = tmp_path_factory.mktemp("weights") / "model"
    folder.mkdir()
    shutil.copy(trained_model() / "model.safetensors", folder)
    return folder


# Real weights, through pipes.


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_real_weights(called: Called, name: str, weights: Path, tmp_path: Path) -> None:
    done = called(name, weights, tmp_path, FORCE_COLOR="1")
    assert (done.returncode, done.stderr) == (0, ""), "and no bar in a pipe"
    says = {
        "bench": "stio re",
        "convert": "1 file, 45.4 MB",
        "diff": "equal, 104 tensors",
        "gc": "no save was interrupted here",
        "inspect": "104 tensors, 90.9 MB, 1 shard",
        "load": "104 tensors, 90.9 MB on cpu",
        "pull": "1 file, 90.9 MB, headers checked; 90.9 MB fetched",
        "verify": "104 tensors, 90.9 MB",
    }
    assert says[name] in done.stdout
    if name != "inspect":  # whose colours are asked for
        assert "\x1b" not in done.stdout
    assert os.listdir(tmp_path) == MADE.get(name, [])


@pytest.mark.matrix
@pytest.mark.parametrize("name", COMMANDS)
def test_json(called: Called, name: str, weights: Path, tmp_path: Path) -> None:
    done = called(name, weights, tmp_path, "--json", before=recorded(name))
    assert (done.returncode, done.stderr) == (0, "")
    assert isinstance(json.loads(done.stdout), dict)


# Terminals.


@pytest.mark.matrix
@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminal_without_colours(program: Program, name: str, weights: Path, tmp_path: Path) -> None:
    text = terminal(program(name, recorded(name)), *arguments(name, weights, tmp_path), NO_COLOR="1")
    assert text.strip()
    assert not re.search(r"\x1b\[[\d;]*m", text)
    assert "Error" not in text


# Hostile files.


def hostile(folder: Path, kind: str) -> Path:
    """Write a hostile file: not of this format, with a wrong header, or with control characters in names."""
    path = folder / "\x1b]0;owned\x07\n.safetensors"
    if kind == "garbage":
        path.write_bytes(b"\xff" * 64)
    else:
        evil = "\x1b[2J\x07\u202e" * 3
        shape, end = {"liar": ([1 << 40], 4), "name": ([1], 9)}[kind]
        header = json.dumps({evil: {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return path


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["garbage", "liar", "name"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_hostile_file(called: Called, name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "evil").mkdir()
    (tmp_path / "home").mkdir()
    path = hostile(tmp_path / "evil", kind)
    before = path.read_bytes()
    done = called(name, path, tmp_path / "home")
    said = done.stdout + done.stderr
    assert not {"\x1b", "\x07", "\u202e"} & set(said)
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1
    assert done.returncode == {"verify": 1, "gc": 0}.get(name, 2)
    assert bool(done.stderr) == (done.returncode == 2)
    assert os.listdir(tmp_path / "home") == []
    assert path.read_bytes() == before


def test_a_hostile_record_of_a_dead_save(called: Called, tmp_path: Path) -> None:
    """gc reads the record in a staging directory. A wrong record removes nothing but its own directory."""
    staging = tmp_path / ".stio-0123456789abcdef"
    staging.mkdir()
    (tmp_path / "precious.safetensors").write_bytes(b"precious")
    for path in (staging / LOCK_NAME, staging / "intent.json", staging / "\x1b[2J"):
        path.write_bytes(b'{"new": ["../precious.safetensors"], "old": ["precious.safetensors"]}')
    done = called("gc", tmp_path, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert (tmp_path / "precious.safetensors").read_bytes() == b"precious"


# Paths that lead nowhere.


@pytest.mark.matrix
@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_path(called: Called, name: str, tmp_path: Path) -> None:
    done = called(name, tmp_path / "none" / "absent", tmp_path)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith("Error: ")
    assert line.endswith("give the URL of an index or of a file" if name == "pull" else "; check the path")
    assert os.listdir(tmp_path) == []


# Readers that leave.


@pytest.mark.matrix
@pytest.mark.parametrize("name", COMMANDS)
def test_a_broken_pipe(program: Program, name: str, weights: Path, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*program(name, recorded(name)), *arguments(name, weights, tmp_path)],
        stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path, env=PLAIN, timeout=100,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
    assert os.listdir(tmp_path) == MADE.get(name, []), "what was done is done"


# Ctrl-C.

PRESSED = {
    "bench": "cli.bench._run",
    "convert": "cli.output.Bar.__call__",
    "diff": "cli.diff.compare",
    "gc": "cli.gc.collect_garbage",
    "inspect": "cli.inspect.open_checkpoint",
    "load": "cli.output.Bar.__call__",
    "pull": "remote.pull",
    "verify": "cli.verify.examine",
}
"""Where each command is when the key is pressed: in the middle of its work."""


@pytest.mark.matrix
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c(called: Called, name: str, weights: Path, tmp_path: Path) -> None:
    home, _, attribute = f"stio.{PRESSED[name]}".rpartition(".")
    press = f"""
import itertools, os, pkgutil, signal, threading
import stio.cli.main
from stio.runtime import operation as runtime
turns = itertools.count()
home = pkgutil.resolve_name({home!r})
plain = getattr(home, {attribute!r})
def pressed(*arguments, **keywords):
    if next(turns) == 0:
        os.kill(os.getpid(), signal.SIGINT)
        if threading.current_thread() is not threading.main_thread():  # which may be slow to hear of it
            from support import eventually
            assert eventually(lambda: any(operation.cancelled for operation in list(runtime.counters.running)))
    return plain(*arguments, **keywords)
setattr(home, {attribute!r}, pressed)
"""
    done = called(name, weights, tmp_path, before=press)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "\nInterrupted.\n")
    assert os.listdir(tmp_path) == []


def test_no_command_is_left_out() -> None:
    assert sorted(PRESSED) == COMMANDS
