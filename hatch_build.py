"""Compiles the engine (`stio/native`) when stio is built or installed. hatchling calls it, and so does `make`.

    python hatch_build.py    # in a checkout: compile the library into the tree

A wheel that is built with a C compiler (`CC`, else `cc`; `CFLAGS` and `LDFLAGS` are added) contains the library. Its
tag is `py3-none-PLATFORM`, since the library uses no API of Python. Without a compiler, or if it fails, the wheel is
pure, and one line says so. With `STIO_REQUIRE_NATIVE=1` that is an error. Only an editable installation and `make`
compile into the tree. A wheel gets a library of its own, so building one does not change what a checkout uses.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "stio" / "native"
LIBRARY = FOLDER / "libstio.so"
"""The library of the tree. `.gitignore` and pyproject.toml keep it out of commits, sdists and wheels."""
FLAGS = ("-std=c11", "-O2", "-Wall", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")


def compile_library(library: Path, *flags: str) -> str:
    """Compile the engine; return why it cannot be compiled here, nothing if it was.

    Args:
        library: Is replaced in one step, so that a process that has loaded the old one keeps it. Left as it was if the
            compiler fails.
        flags: Further flags of the compiler.

    Returns:
        A first line that says what failed, and then the command with all that the compiler wrote.
    """
    if not sys.platform.startswith("linux"):
        return f"it is for Linux, not for {sys.platform}"
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(compiler[0]) is None:
        return f"there is no C compiler {compiler[0]!r}"
    new = library.with_name(f"{library.name}.{os.getpid()}")
    command = [
        *compiler, *FLAGS, *shlex.split(os.environ.get("CFLAGS", "")), *flags, *map(str, sorted(FOLDER.glob("*.c"))),
        "-o", str(new), *shlex.split(os.environ.get("LDFLAGS", "")), "-ldl",
    ]  # fmt: skip
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "LC_ALL": "C"},
        text=True, errors="replace",
    )  # fmt: skip
    if done.returncode or not new.exists():
        new.unlink(missing_ok=True)
        first = next((line for line in done.stdout.splitlines() if "error" in line), f"status {done.returncode}")
        return f"the C compiler {compiler[0]!r} failed: {first}\n{shlex.join(command)}\n{done.stdout}"
    new.replace(library)
    return ""


def compile_in_tree() -> str:
    """Compile the library of the tree; return why it cannot be compiled.

    Then a library that is older than its sources is removed: stio would load it, and it may do something else.
    """
    why = compile_library(LIBRARY)
    if why and LIBRARY.exists():
        sources = [Path(__file__), *FOLDER.glob("*.[ch]")]
        if LIBRARY.stat().st_mtime < max(path.stat().st_mtime for path in sources):
            LIBRARY.unlink()
    return why


def refused(why: str) -> str:
    """Return the line about a build without the engine.

    Raises:
        RuntimeError: `STIO_REQUIRE_NATIVE=1` is set.
    """
    if os.environ.get("STIO_REQUIRE_NATIVE") == "1":
        raise RuntimeError(f"the engine of stio cannot be compiled: {why}")
    return f"stio is built without its engine, so loads are slower: {why.partition(chr(10))[0]}"


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object  # type: ignore[assignment,misc]


class EngineHook(BuildHookInterface):  # type: ignore[misc,type-arg]
    """Adds the library to a wheel, or compiles it into the tree of an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a build. `version` is `"standard"` or `"editable"`."""
        if self.target_name != "wheel":
            return
        if version == "editable":
            if why := compile_in_tree():
                self.app.display_warning(refused(why))
            return
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self._folder.name, LIBRARY.name)
        if why := compile_library(library):
            self.app.display_warning(refused(why))
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"][str(library)] = LIBRARY.relative_to(Path(__file__).parent).as_posix()

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling after a build."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


if __name__ == "__main__":
    if why := compile_in_tree():
        try:
            print(refused(why), file=sys.stderr)
        except RuntimeError as error:
            sys.exit(str(error))
