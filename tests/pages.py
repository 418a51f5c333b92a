"""Runs the code in the pages of docs/. Needs only stio and the standard library, so `newcomer.py` can use it.

The fences of a page run from top to bottom in one directory. The Python runs in one namespace under one running event
loop, like the cells of a notebook: `await` works at the top level, and so does `stio.sync`. There are three languages:
`python`, `console` (commands after `$ `, which bash runs) and `text`, the output of the Python block before it. The
output must equal the text; `...` matches anything in a line, or any number of lines if it is alone in a line.

The line `<!-- not run: REASON -->` directly above a fence says why the block cannot run here: it is compiled, and the
names of stio that it uses are looked up. Readers do not see this line. They see the title of a fence. The title of a
block that runs is a file name: the block is written to that file.

A command that ends in ` &` starts a server. It runs until the end of the page, and its output is not shown. A page names
the port 8000, and the tests use a free one.

The output of a command is from one run. Times and rates may differ in the next run. `captures.py` writes this output
and the pictures of the commands into the pages.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NEED_SERVERS = ("howto/object-stores.md", "howto/hugging-face-hub.md", "howto/server.md")
"""Pages whose code needs what `test_docs.py` has: a store, a hub, a free port."""
PORT = 8000
"""The port that pages name."""
LANGUAGES = ("python", "console", "text", "yaml")

NOT_RUN = re.compile(r"^<!-- not run: (.+) -->\n", re.MULTILINE)
_FENCE = re.compile(
    r'(?:^<!-- not run: ([^\n]+) -->\n)?^```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE
)
_MEASURED = re.compile(r"(?<![\w.,])[0-9][0-9.,]* (?:([kMGT]?B/s)|s|ms|µs)(?![\w/])")
_TOP_LEVEL_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_PROMPT = """
import contextlib, runpy, sys
if sys.version_info >= (3, 13):  # without a terminal, its console compiles each line alone
    with contextlib.suppress(ImportError):
        import code, _pyrepl.console
        _pyrepl.console.InteractiveColoredConsole = code.InteractiveConsole
runpy.run_module("asyncio", run_name="__main__", alter_sys=True)
"""
"""Runs `python -m asyncio`."""
PYTHON = sys.executable
"""What commands run as `python`; `stio` and `uvicorn` are its modules."""
_PATIENCE_SECONDS = 60
_SHELL = (
    'stio() { "$STIO_PYTHON" -m stio "$@"; }; python() { "$STIO_PYTHON" "$@"; }; '
    'uvicorn() { "$STIO_PYTHON" -m uvicorn --port "$STIO_PORT" "$@"; }; '
    'curl() { command curl --silent --show-error "$@"; }; set -o pipefail\n'
)
"""In a terminal, curl shows no progress either."""


@dataclass(frozen=True)
class Block:
    """One fence of a page."""

    page: str
    line: int
    """Number of its first line in the page, from 1."""
    language: str
    title: str
    text: str
    reason: str = ""
    """Why the tests do not run it; empty if they do."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        return not self.reason

    @property
    def is_file(self) -> bool:
        return self.runs and bool(self.title)


class PageError(AssertionError):
    """A page shows something that is not true."""


def blocks_of(page: Path) -> list[Block]:
    """Return the fences of a page; raise for a fence that has an unknown form, or would be skipped."""
    text = page.read_text()
    name = page.relative_to(DOCS).as_posix() if page.is_relative_to(DOCS) else page.name
    found = [
        Block(name, text.count("\n", 0, match.start(4)) + 1, match[2], match[3] or "", match[4], match[1] or "")
        for match in _FENCE.finditer(text)
    ]
    if len(re.findall(r"^[ \t]*(?:```|~~~)", text, re.MULTILINE)) != 2 * len(found):
        raise PageError(f"{name}: a fence is indented, not closed, or has unknown options")
    if text.count("<!-- not run") != sum(not block.runs for block in found):
        raise PageError(f"{name}: '<!-- not run: REASON -->' with no reason, or not directly above a fence")
    for before, block in pairwise([None, *found]):
        assert block is not None
        if block.language not in LANGUAGES:
            raise PageError(f"{block.place}: {block.language or 'no language'} is not one of {', '.join(LANGUAGES)}")
        if block.title.lower().startswith("not run"):
            raise PageError(f"{block.place}: readers see the title; say why it is not run in a line above the fence")
        if block.language == "yaml" and block.runs:
            raise PageError(f"{block.place}: yaml is not run here; the line above the fence must say why")
        if block.is_file and not re.fullmatch(r"\w+\.\w+", block.title):
            raise PageError(f"{block.place}: the title of a block that runs is a file name")
        if block.language == "text" and not (
            before and before.language == "python" and before.runs and not before.is_file
        ):
            raise PageError(f"{block.place}: output with no Python before it that runs")
    return found


def agrees(shown: str, printed: str) -> bool:
    """Return whether the shown output matches the printed one; `...` matches anything in a line, or any lines.

    Of a time or a rate, only the kind of its unit is compared.
    """
    pattern = ""
    for line in shown.splitlines():
        parts = [_measured(part) for part in line.rstrip().split("...")]
        pattern += r"(?:.*\n)*?" if line.strip() == "..." else ".*?".join(parts) + "\n"
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in printed.splitlines())) is not None


def _measured(text: str) -> str:
    """Return a pattern that matches the text with any times and rates."""
    pattern, last = "", 0
    for match in _MEASURED.finditer(text):
        unit = "[kMGT]?B/s" if match[1] else "(?:s|ms|µs)"
        pattern += re.escape(text[last : match.start()]) + rf"[0-9][0-9.,]* {unit}"
        last = match.end()
    return pattern + re.escape(text[last:])


def require_shown(block: Block, shown: str, printed: str) -> None:
    if not re.search(r"\w", shown.replace("...", "")):
        raise PageError(f"{block.place}: the shown output has no text:\n{shown}")
    if not agrees(shown, printed):
        raise PageError(f"{block.place}: the page shows\n{shown}\nand this was printed:\n{printed}")


# Run a page.


def run_page(page: Path, on_console: Callable[[Block], None] | None = None, port: int = PORT) -> dict[str, Any]:
    """Run a page in the working directory; return the names that its Python defined.

    Args:
        page: The page.
        on_console: Runs each console block, also those that the tests do not run. By default `run_commands`, which
            compares the output.
        port: What stands for the port of the page.
    """
    blocks = [replace(block, text=block.text.replace(f":{PORT}", f":{port}")) for block in blocks_of(page)]
    names: dict[str, Any] = {"__name__": "__main__"}

    async def run(servers: contextlib.ExitStack) -> None:
        for block, after in pairwise([*blocks, None]):
            assert block is not None
            if on_console is not None and block.language == "console":
                on_console(block)
            elif not block.runs:
                check_unrun(block)
            elif block.is_file:
                write_file(block, Path())
            elif block.language == "console":
                for command, shown in commands(block):
                    script, env = script_of(command, port)
                    if command.endswith(" &"):
                        servers.enter_context(run_server(block, script.removesuffix(" &"), env, port))
                    else:
                        run_command(block, script, shown, env)
            elif block.language == "python":
                printed = await execute(block, names)
                shown = after.text if after is not None and after.language == "text" else ""
                if shown or printed:  # a page shows all output of its code
                    require_shown(block, shown, printed)

    with contextlib.ExitStack() as servers:
        asyncio.run(run(servers))
    return names


def write_file(block: Block, directory: Path) -> None:
    (directory / block.title).write_text(block.text)


async def execute(block: Block, names: dict[str, Any]) -> str:
    """Run one block of Python; return its output."""
    padded = "\n" * (block.line - 1) + block.text  # so a traceback has the line numbers of the page
    code = compile(padded, str(DOCS / block.page), "exec", flags=_TOP_LEVEL_AWAIT, dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result
    return printed.getvalue()


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block, and the output shown below it."""
    first, *parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    if first or not parts:
        raise PageError(f"{block.place}: a console starts with a command after '$ '")
    for part in parts:
        match = re.fullmatch(r"((?:[^\n]*\\\n)*[^\n]*\n)(.*)", part, re.DOTALL)
        assert match is not None
        yield match[1].rstrip(), match[2]


def script_of(command: str, port: int = PORT) -> tuple[str, dict[str, str]]:
    """Return a command for bash and its environment; `stio`, `python` and `uvicorn` use this interpreter."""
    return _SHELL + command, {**environment(), "STIO_PYTHON": PYTHON, "STIO_PORT": str(port), "COLUMNS": "80"}


def run_command(block: Block, script: str, shown: str, env: dict[str, str]) -> str:
    """Run a line of bash, which must succeed and print the shown output. Return its output."""
    done = subprocess.run(["bash", "-ec", script], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise PageError(f"{block.place}: exit status {done.returncode}:\n{script}\n{done.stdout}")
    if shown:
        printed = _ABOUT_RETRIES.sub("", done.stdout) if "--retry" in script else done.stdout
        require_shown(block, shown, printed)
    return done.stdout


_ABOUT_RETRIES = re.compile(r"^(curl: \(\d+\)|Warning: Problem).*\n", re.MULTILINE)
"""What curl prints before it asks again: on a slow machine it has to."""


@contextlib.contextmanager
def run_server(block: Block, script: str, env: dict[str, str], port: int) -> Iterator[None]:
    """Run a line of bash that starts a server, from when it can be reached until the end of the `with` block."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            ["bash", "-ec", script], env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.02)
            else:
                log.seek(0)
                raise PageError(f"{block.place}: no server listens on port {port}:\n{script}\n{log.read()}")
            yield
        finally:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(_PATIENCE_SECONDS)
                while time.monotonic() < deadline:  # bash ends before the server, which has the port until its end
                    os.killpg(process.pid, 0)
                    time.sleep(0.02)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_PATIENCE_SECONDS)


def environment() -> dict[str, str]:
    """Return the environment of a process that imports the stio of this checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}


def run_in_repl(
    blocks: list[Block], *, cwd: Path, python: str = sys.executable, env: dict[str, str] | None = None
) -> None:
    """Paste the Python of a page into `python -m asyncio`, with an empty line after each block."""
    pasted = [block for block in blocks if block.language == "python" and block.runs and not block.is_file]
    done = subprocess.run(
        [python, "-c", _PROMPT],
        input="".join(f"{block.text}\n" for block in pasted),
        cwd=cwd,
        env=environment() if env is None else env,
        text=True,
        capture_output=True,
    )
    if done.returncode or "Error" in done.stderr:
        raise PageError(f"{blocks[0].page}: pasted at a prompt it fails:\n{done.stdout}\n{done.stderr}")
    printed = re.sub(r"^(?:(?:>>>|\.\.\.) )+", "", done.stdout, flags=re.MULTILINE)
    if texts := [block.text for block in blocks if block.language == "text"]:
        require_shown(blocks[0], "...\n" + "...\n".join(texts) + "...\n", printed)


# Check blocks that cannot run.


def check_unrun(block: Block) -> None:
    """Compile Python that cannot run here, and look up its names of stio. Split commands into words; YAML is not read."""
    if block.language == "console":
        for command, _ in commands(block):
            shlex.split(command)
        return
    if block.language == "yaml":
        return
    compile(block.text, block.page, "exec", flags=_TOP_LEVEL_AWAIT, dont_inherit=True)
    wrong = list(_unknown(ast.parse(block.text)))
    if wrong:
        raise PageError(f"{block.place}: stio has no {', '.join(wrong)}")


def _unknown(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if (module or alias.name).split(".")[0] == "stio" and not _can_import(module, alias.name):
                    yield module + alias.name
        elif isinstance(node, ast.Attribute) and (dotted := _dotted(node)) and find(dotted) is None:
            yield dotted
        elif isinstance(node, ast.Call) and (dotted := _dotted(node.func)):
            known = _keywords(find(dotted))
            yield from (
                f"{dotted}({word.arg}=)" for word in node.keywords if word.arg and known and word.arg not in known
            )


def _can_import(module: str, name: str) -> bool:
    try:
        if module and hasattr(import_module(module.rstrip(".")), name):
            return True
        import_module(module + name)
    except ImportError:
        return False
    return True


def _dotted(node: ast.AST) -> str:
    """Return `stio.a.b` if the expression is such a name, else an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(["stio", *reversed(parts)]) if isinstance(node, ast.Name) and node.id == "stio" and parts else ""


def find(dotted: str) -> Any:
    """Return the object `stio.a.b`, None if there is none."""
    found: Any = import_module("stio")
    for name in dotted.split(".")[1:]:
        path = f"{getattr(found, '__name__', '')}.{name}"
        found = getattr(found, name, None)
        if found is None and _can_import("", path):
            found = import_module(path)
    return found


def _keywords(function: Any) -> set[str]:
    """Return the parameters of a function or class; none if it accepts any keyword, or is an object of another kind."""
    if not callable(function):
        return set()
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return set()
    return {parameter.name for parameter in parameters}
