"""The parent of forked interpreters: imports the modules that its command line names, and forks for each request.

A request is a line on standard input (see `crash.zygote.Zygote`), or comes by a socket from `crash/zygote_client.py`. A
child leaves by the main module's end, so that exit handlers run as they always do. This module imports only the standard
library: what a child has imported is what the command line names.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_PATIENCE_SECONDS = 60
_MAX_FILES = 253
"""Open files that one message can carry."""
LIBC = ctypes.CDLL(None)
_FREE_FROM = 500
"""Descriptors from here on are free in a child that is about to take over the open files of a client."""


def serve(listening: socket.socket) -> dict[str, Any] | None:
    """Answer requests; return in each child with what it has to run, in the parent at the end."""
    running: set[int] = set()
    clients: set[int] = set()
    while True:
        for source in select.select([sys.stdin, listening], [], [])[0]:
            if source is listening:
                connection, _ = listening.accept()
                child = os.fork()
                if not child:
                    return serve_client(connection)
                connection.close()
                clients = {pid for pid in clients if not os.waitpid(pid, os.WNOHANG)[0]} | {child}
                continue
            line = sys.stdin.readline()  # one request at a time: no other line waits in the buffer
            if not line:
                end(running | clients)
                return None
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


def end(running: set[int]) -> None:
    """Kill what a failed test did not wait for; take the status of what serves clients."""
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


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


# Clients: what runs in a child is a command line, with the client's open files, environment and working directory.


def serve_client(connection: socket.socket) -> dict[str, Any] | None:
    """Fork what the client wants to run; return in the child, and stay beside it in this process to report its end."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(connection, 1, _MAX_FILES)
    with connection.makefile("rb") as received:
        request: dict[str, Any] = marshal.load(received)
    child = os.fork()
    if child:
        for file in files:
            os.close(file)
        report(connection, child)
        os._exit(0)
    connection.close()
    take_over(files, request["files"])
    return request


def report(connection: socket.socket, child: int) -> None:
    """Pass the client's signals on until the child has ended, and send its status; end it if the client has gone."""
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([connection, ended], [], [])[0]):
        assert ready
        for number in connection.recv(64) or [signal.SIGKILL]:
            os.kill(child, number)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):  # the client was killed
        connection.sendall(str(status).encode())


def take_over(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Make the client's open files those of this process, with the numbers that they have there."""
    high = [os.dup2(file, _FREE_FROM + k) for k, file in enumerate(files)]
    os.closerange(0, _FREE_FROM)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def open_streams(numbers: Sequence[int], environment: Mapping[str, str], is_unbuffered: bool) -> None:
    """Open the standard streams on the files that there are, as an interpreter does."""
    is_unbuffered |= bool(environment.get("PYTHONUNBUFFERED"))
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        is_raw = is_unbuffered and mode == "w"
        stream = number in numbers and io.TextIOWrapper(
            os.fdopen(number, mode + "b", buffering=0 if is_raw else -1, closefd=False),
            encoding=environment.get("PYTHONIOENCODING", "utf-8"),
            errors="backslashreplace" if number == 2 else "strict",
            line_buffering=number == 2 or os.isatty(number),
            write_through=is_raw,
        )
        setattr(sys, name, stream or None)
        setattr(sys, f"__{name}__", stream or None)


def begin(request: dict[str, Any]) -> tuple[types.CodeType | None, dict[str, Any]]:
    """Make this process that of a command line: `-c CODE`, `-m MODULE` or a file, after `-u`, `-B`, `-P` and
    `-W FILTER`.

    Returns:
        The code to run and its names; no code if the names are those of a module to run.
    """
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ |= request["environment"]
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    warnings.filters[:] = FILTERS
    words = list(request["argv"])
    options = set()
    while words[0] in ("-u", "-B", "-P", "-W"):
        option = words.pop(0)
        options.add(option)
        if option == "-W":
            warnings._setoption(words.pop(0))  # type: ignore[attr-defined]  # what the interpreter itself calls
    open_streams(request["files"], request["environment"], "-u" in options)
    first = {"-c": "", "-m": os.getcwd()}.get(words[0], os.path.dirname(os.path.abspath(words[0])))
    sys.path[:] = [*([] if "-P" in options else [first]), *own, *PATH]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        return None, {"name": words[1]}
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        return compile(words[1], "<string>", "exec"), main.__dict__
    assert not words[0].startswith("-"), f"a forked interpreter has no option {words[0]}"
    sys.argv = words
    main.__dict__["__file__"] = words[0]
    with open(words[0], "rb") as file:
        return compile(file.read(), words[0], "exec"), main.__dict__


PACKAGES: dict[str, Any] = {}
"""The installed packages that a child begins with."""


def load(modules: Sequence[str]) -> None:
    """Import what a child begins with."""
    atexit.register(leave_packages)  # before all other handlers, so that it runs after them
    for module in modules:
        importlib.import_module(module)
    for final in weakref.finalize._registry:  # type: ignore[attr-defined]  # torch's, which undo each operator
        final.atexit = False
    installed = f"{os.sep}site-packages{os.sep}"
    PACKAGES.update(
        {k: module for k, module in sys.modules.items() if installed in str(getattr(module, "__file__", ""))}
    )
    PACKAGES["itself"] = PACKAGES  # never freed, as the collector does not look at what is frozen


def leave_packages() -> None:
    """Let the interpreter's end not undo their imports, which takes 0.3 s for torch, unless a thread runs beside that."""
    if len(os.listdir("/proc/self/task")) == 1:
        for name in PACKAGES:
            sys.modules.pop(name, None)
        LIBC.on_exit(LIBC._exit, None)  # in place of the destructors of libraries


if __name__ == "__main__":
    address, python_path, *modules = sys.argv[1:]
    FILTERS, PATH = list(warnings.filters), sys.path[1:]
    sys.path[:1] = python_path.split(os.pathsep)
    os.environ["PYTHONPATH"] = python_path
    load(modules)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, time_out)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what it puts in the background so
        signal.signal(signal.SIGINT, signal.default_int_handler)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{address}")
    listener.listen(64)
    print("ready", flush=True)
    gc.collect()
    gc.freeze()  # no child looks through what it inherits, in its collections and at its end: 0.6 s each
    request = serve(listener)
    if request is not None:
        if "torch" in sys.modules:
            # It makes its pool anew in a forked child, and not safely where threads do that.
            sys.modules["torch"].set_num_threads(1)
        # Not in a function: the script ends where the main module does.
        if "code" in request:
            listener.close()
            sys.argv = request["argv"]
            os.chdir(request["cwd"])
            os.environ |= request["environment"]
            exec(compile(request["code"], "<script>", "exec"), {"__name__": "__main__"})  # its names end with it
        else:
            listener.detach()  # its number is another file's now
            code, names = begin(request)
            if code is None:
                runpy._run_module_as_main(names["name"])  # type: ignore[attr-defined]  # what the interpreter itself calls
            else:
                exec(code, names)
