"""Processes that begin with torch and stio imported, and end as any interpreter does: forked, not started.

An import takes seconds on a busy machine. The parent of them all runs `python -m crash.zygote`: it forks for each
request, and the child runs a script and leaves by the main module's end, so that exit handlers run as they always do.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support import REPOSITORY, eventually

from stio import sync

_PATIENCE_SECONDS = 60

SAVING = """
import asyncio, atexit, os, signal, sys, threading
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
        assert eventually(lambda: bool(runtime._live) and all(o.cancelled for o in list(runtime._live)), 20)
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
    """

    def __init__(self, directory: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "crash.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._directory = directory
        self._num_children = 0

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


def serve() -> dict[str, Any] | None:
    """Answer requests; return in each child with what it has to run, in the parent at the end."""
    running = set()
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "wait" in request:
            answer = wait(request["wait"])
            running.discard(request["wait"])
        else:
            answer = os.fork()
            if not answer:
                redirect(request["output"])
                return request
            running.add(answer)
        print(answer, flush=True)
    for pid in running:  # a test has failed before it came to wait for it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def wait(pid: int) -> int:
    signal.alarm(_PATIENCE_SECONDS)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 124
    finally:
        signal.alarm(0)


def redirect(output: str) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for fd, name in ((0, os.devnull), (1, output + ".out"), (2, output + ".err")):
        source = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(source, fd)
        os.close(source)


def time_out(*_: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert sync.save  # imported, with all that it runs
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, time_out)
    gc.collect()
    gc.freeze()  # no child looks through what it inherits, in its collections and at its end: 0.6 s each
    request = serve()
    if request is not None:
        sys.argv = request["argv"]
        os.chdir(request["cwd"])
        os.environ |= request["environment"]
        torch.set_num_threads(1)  # it makes its pool anew in a forked child, and not safely where threads do that
        # Not in a function: the script ends where the main module does.
        exec(compile(request["code"], "<script>", "exec"), {"__name__": "__main__"})
