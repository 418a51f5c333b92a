"""What tests of the command line share: the program in this process, in another one, and a terminal to run it on."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from support import run_python

from stio.cli.main import main


def write_model(path: Path, third: str = "n") -> Path:
    """Write three tensors of three dtypes, with metadata."""
    tensors = {"a.weight": torch.zeros(3, 4), "a.bias": torch.zeros(4, dtype=torch.bfloat16), third: torch.tensor(1)}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def write_sharded(folder: Path) -> Path:
    """Write two shards and their index to a new directory."""
    folder.mkdir()
    weight_map = {}
    for number in (1, 2):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({f"w{number}": torch.zeros(number, 2)}, folder / shard)
        weight_map[f"w{number}"] = shard
    index = {"metadata": {"total_size": 24}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def run(*arguments: object, status: int = 0) -> Result:
    """Run in this process, with pipes for standard output and error."""
    done = CliRunner().invoke(main, list(map(str, arguments)))
    assert done.exit_code == status, done.output
    return done


def refused(*arguments: object, status: int = 2) -> str:
    """Run what ends in an error, and return the one sentence that it says."""
    done = run(*arguments, status=status)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


def piped(program: Sequence[str], *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with pipes."""
    return subprocess.run(
        [*program, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, **environment}
    )


def large_imports(python: str | Path, *arguments: object) -> list[str]:
    """Return which of torch and numpy an interpreter has imported after a command."""
    code = """
import sys
from stio.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print(*sorted({"torch", "numpy"} & set(sys.modules)))
"""
    done = run_python(code, *arguments, python=python)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()


def terminal(program: Sequence[str], *arguments: object, **environment: str) -> str:
    """Run a program on a pseudoterminal of 80 columns and return all it was sent."""
    main_fd, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environ = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    environ |= {"TERM": "xterm-256color", "COLUMNS": "80", **environment}
    with subprocess.Popen([*program, *map(str, arguments)], stdin=side, stdout=side, stderr=side, env=environ):
        os.close(side)
        received = b""
        try:
            while piece := os.read(main_fd, 65536):
                received += piece
        except OSError:  # EIO: the other side was closed
            pass
    os.close(main_fd)
    return received.decode()


def interrupted(
    program: Sequence[str], *arguments: object, when: Callable[[], bool], cwd: Path | None = None
) -> tuple[int, str, str]:
    """Run a program, press Ctrl-C when something is true, and return status, output and error."""
    process = subprocess.Popen(
        [*program, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd
    )
    deadline = time.monotonic() + 60
    while not when():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    return process.returncode, out, error
