"""Hosts on this machine, for ranks: each has a network namespace, a name, processes and a clock of its own.

All of them see one filesystem. A cable connects two hosts: a pair of virtual interfaces. One process imports torch,
with the library for the clocks preloaded. It forks the first process of each host, which forks the ranks.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from distributed.ranks import MAX_SECONDS, PRELOADED, results_of, run_some

from tests.crash import shim

INTERFACE = "eth0"
ADDRESSES = ["10.77.0.1", "10.77.0.2"]
CLOCK_VARIABLE = "STIO_TEST_CLOCK_SECONDS"
_PREFIX = "stio-test-"
_PORT = 29500
_START_SECONDS = 60

_NEW_MOUNTS, _NEW_NAME, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x4000000, 0x20000000, 0x40000000  # CLONE_NEW...
_SET_PARENT_DEATH_SIGNAL = 1


def why_not() -> str | None:
    """Return why there can be no hosts here; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for tool in ("ip", "mount"):
        if shutil.which(tool) is None:
            return f"there is no {tool!r}"
    if shutil.which("cc") is None:
        return "there is no C compiler for the clocks"
    name = f"{_PREFIX}{os.getpid()}-none"
    made = _ip("netns", "add", name)
    if made.returncode == 0:
        made = _ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", "other", "netns", name)
        _ip("netns", "delete", name)
    return f"no network namespaces: {made.stderr.strip()}" if made.returncode else None


class Hosts:
    """Two hosts with a cable between them.

    Args:
        folder: A directory of the test, which both see.
        clocks: How far the clock of each is from the right time, in seconds.
    """

    def __init__(self, folder: Path, clocks: Sequence[int]) -> None:
        self._folder, self._clocks = folder, clocks
        self._spaces = [f"{_PREFIX}{os.getpid()}-{k}" for k in range(2)]
        self._process: subprocess.Popen[bytes] | None = None
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        _remove_old_spaces()
        try:
            self._connect()
            self._start()
            for pipe in self._pipes:
                assert pipe.poll(_START_SECONDS) and pipe.recv() == "ready"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        if self._process is not None:
            self._process.kill()  # the first process of each host ends with it, and all others of the host with that
            self._process.wait()
        for space in self._spaces:
            _ip("netns", "delete", space)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks_per_host: int = 1,
        killed: Collection[int] = (),
    ) -> list[Any]:
        """Call a function in ranks on both hosts; see `run_ranks`. The first rank is on the first host."""
        for space in self._spaces:
            _require("-n", space, "link", "set", INTERFACE, "up")
        results = self._folder / f"results-{secrets.token_hex(4)}"
        results.mkdir()
        num_ranks = 2 * ranks_per_host
        for number, pipe in enumerate(self._pipes):
            own = range(number * ranks_per_host, (number + 1) * ranks_per_host)
            pipe.send((own, function, num_ranks, results, arguments, killed))
        answers = [pipe.recv() if pipe.poll(MAX_SECONDS + 10) else "a host does not answer" for pipe in self._pipes]
        wrong = "\n".join(dict.fromkeys(answer for answer in answers if answer is not None))
        assert not wrong, wrong
        return results_of(num_ranks, results)

    def _connect(self) -> None:
        one, other = self._spaces
        for space in self._spaces:
            _require("netns", "add", space)
        _require("link", "add", INTERFACE, "netns", one, "type", "veth", "peer", "name", INTERFACE, "netns", other)
        for space, address in zip(self._spaces, ADDRESSES, strict=True):
            _require("-n", space, "address", "add", f"{address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _require("-n", space, "link", "set", interface, "up")

    def _start(self) -> None:
        pipes = [Pipe(), Pipe()]
        self._pipes = [own for own, _ in pipes]
        hosts = []
        for number, (space, clock, (_, other)) in enumerate(zip(self._spaces, self._clocks, pipes, strict=True)):
            boot = self._folder / f"boot-{number}"
            boot.write_text(f"{secrets.token_hex(4)}-0000-4000-8000-{secrets.token_hex(6)}\n")
            hosts.append(_Host(space, clock, str(boot), other.fileno()))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
            "LD_PRELOAD": str(shim.build(self._folder, Path(__file__).with_name("clock.c"))),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(_PORT),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps([astuple(host) for host in hosts])],
            env=environment,
            pass_fds=[host.pipe for host in hosts],
        )
        for _, other in pipes:
            other.close()


def cut_the_cable() -> None:
    """Take the interface of this host down: nothing arrives any more, and no connection is closed."""
    _require("link", "set", INTERFACE, "down")


def _remove_old_spaces() -> None:
    """Remove the namespaces of tests that were killed."""
    for line in _ip("netns", "list").stdout.splitlines():
        name = line.split()[0]
        if name.startswith(_PREFIX) and not Path("/proc", name.removeprefix(_PREFIX).split("-")[0]).exists():
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


def _require(*arguments: str) -> None:
    done = _ip(*arguments)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


# In the processes of the hosts.


@dataclass(frozen=True)
class _Host:
    space: str
    clock: int
    boot: str
    """A file with the id of its start."""
    pipe: int


def _main(hosts: Sequence[_Host]) -> None:
    for module in ["host_ranks", *PRELOADED]:
        importlib.import_module(module)
    forked = []
    for host in hosts:
        pid = _fork()
        if pid == 0:
            _be(host)
            return
        forked.append(pid)
    for pid in forked:
        os.waitpid(pid, 0)


def _be(host: _Host) -> None:
    """Enter the namespaces of a host, and become its first process."""
    os.environ[CLOCK_VARIABLE] = str(host.clock)
    with open(f"/run/netns/{host.space}") as network:
        _call("setns", network.fileno(), _NEW_NETWORK)
    _call("unshare", _NEW_MOUNTS | _NEW_NAME | _NEW_PROCESSES)
    if pid := _fork():
        os.waitpid(pid, 0)
        return
    socket.sethostname(host.space)
    for mount in (
        ["--make-rprivate", "/"],
        ["-t", "proc", "proc", "/proc"],
        ["--bind", host.boot, "/proc/sys/kernel/random/boot_id"],
    ):
        subprocess.run(["mount", *mount], check=True)
    _serve(Connection(host.pipe))


def _fork() -> int:
    """Fork; the child ends with its parent."""
    pid = os.fork()
    if pid == 0:
        _call("prctl", _SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    return pid


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def _serve(pipe: Connection) -> None:
    """Run the ranks of this host, again and again."""
    context = get_context("fork")
    pipe.send("ready")
    while True:
        try:
            own, function, num_ranks, results, arguments, killed = pipe.recv()
        except EOFError:
            return
        try:
            run_some(context, own, function, num_ranks, "env://", results, arguments, killed)
        except AssertionError as error:
            pipe.send(f"{socket.gethostname()}: {error}")
        else:
            pipe.send(None)


if __name__ == "__main__":
    _main([_Host(*values) for values in json.loads(sys.argv[1])])
