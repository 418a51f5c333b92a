"""Processes that begin with torch and stio imported, and end as any interpreter does: forked, not started.

An import takes seconds on a busy machine. The parent of them all runs `crash/zygote_main.py`: it forks for each
request. `Zygote.run` runs a script; `Zygote.python` is a program with the command line of an interpreter. Under
`tests/run.py` a zygote that needs torch is itself forked, from one that all lanes share.
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

from checkout import python_path

WITH_TORCH = "STIO_TEST_PYTHON_WITH_TORCH"
"""The variable that names the `python` of a zygote that has imported torch."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of a script."""

    returncode: int
    """Exit code, or the negative number of the signal that ended it."""
    stdout: str
    """What it printed."""
    stderr: str
    """What it complained of."""


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
        python = os.environ.get(WITH_TORCH, sys.executable) if "torch" in modules else sys.executable
        command = [python, Path(__file__).with_name("zygote_main.py"), address, python_path(), *modules]
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
