"""Processes that begin with torch and stio imported, and end as any interpreter does: forked, not started.

An import takes seconds on a busy machine. The parent of them all runs `crash/zygote_main.py`: it forks for each
request. `Zygote.run` runs a script; `Zygote.python` is a program with the command line of an interpreter.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import eventually, python_path

SAVING = """
import asyncio, atexit, faulthandler, os, signal, sys, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
import stio
from stio import sync
from stio.runtime import operation as runtime
from stio.storage.commit import syscalls as calls
from crash.generations import MANY, save, tensors_of
from support import eventually
where, keywords = Path(sys.argv[1]), {} if sys.argv[1].endswith(".safetensors") else MANY
plain, reached, opened = calls.fsync, threading.Event(), threading.Event()

def held(fd):
    reached.set()
    opened.wait(30)
    plain(fd)

calls.fsync = held

def open_once_cancelled():
    def body():
        running = runtime.stats.running
        if not eventually(lambda: bool(running) and all(o.cancelled for o in list(running)), 20):
            faulthandler.dump_traceback()
            raise AssertionError(f"not cancelled: {list(running)}")
        opened.set()
    threading.Thread(target=body, daemon=True).start()
"""
"""Begin of scripts about a save that is held where it syncs its first file, until `opened` is set."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a script."""

    returncode: int
    """Exit code, or the negative number of the signal that ended it."""
    stdout: str
    """What it printed."""
    stderr: str
    """What it complained of."""


def script(code: str) -> str:
    """Return a script about a save that is held."""
    return SAVING + textwrap.dedent(code)


class Child:
    """A script that runs.

    Args:
        zygote: Its parent.
        pid: Its process.
        output: Begin of the names of the files that it prints to.
    """

    def __init__(self, zygote: Zygote, pid: int, output: Path) -> None:
        self._zygote, self.pid, self._output = zygote, pid, output

    def stdout(self) -> str:
        """Return what it has printed so far."""
        return self._output.with_suffix(".out").read_text()

    def wait(self) -> Finished:
        """Wait until it has ended; one that does not end is killed, and has failed."""
        status = self._zygote.ask({"wait": self.pid})
        return Finished(status, self.stdout(), self._output.with_suffix(".err").read_text())


class Zygote:
    """The parent of scripts.

    Args:
        directory: Where what they print is kept.
        modules: What they begin with imported.
    """

    def __init__(self, directory: Path, modules: Sequence[str] = ("torch", "stio.sync", "support")) -> None:
        address = f"stio-zygote-{os.getpid()}-{secrets.token_hex(8)}"
        command = [sys.executable, Path(__file__).with_name("zygote_main.py"), address, python_path(), *modules]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._directory = directory
        self._num_children = 0
        self.python = directory / "python"
        """Runs a command line as `sys.executable` does, in a fork; see `crash.zygote_client`."""
        client = Path(__file__).with_name("zygote_client.py").read_text()
        self.python.write_text(f"#!{sys.executable} -IS\n" + client.replace('ADDRESS = ""', f"ADDRESS = {address!r}"))
        self.python.chmod(0o755)
        self.program = [str(self.python), "-m", "stio"]
        """Runs the command line of `stio`."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, request: dict[str, Any]) -> int:
        """Send a request, return its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, code: str, *arguments: object, cwd: Path | None = None, **environment: str) -> Child:
        """Start a script; its arguments stand in `sys.argv` from 1 on."""
        self._num_children += 1
        output = self._directory / f"child-{self._num_children}"
        output.with_suffix(".out").touch()
        request = {"code": textwrap.dedent(code), "argv": ["child", *map(str, arguments)], "output": str(output)}
        request |= {"cwd": str(cwd or Path.cwd()), "environment": environment}
        return Child(self, self.ask(request), output)

    def run(self, code: str, *arguments: object, cwd: Path | None = None, **environment: str) -> Finished:
        """Run a script to its end."""
        return self.start(code, *arguments, cwd=cwd, **environment).wait()

    def close(self) -> None:
        """End the parent."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


def started(zygote: Zygote, code: str, *arguments: object) -> Child:
    """Start a script about a save that is held, and wait until it says that it is up."""
    child = zygote.start(script(code), *arguments)
    assert eventually(lambda: child.stdout() == "up\n", 20), child.wait()
    return child
