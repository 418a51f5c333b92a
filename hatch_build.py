"""Compiles the engine (`stio/native`) when stio is installed or built: hatchling calls it, and so does `make`.

    python hatch_build.py           # in a checkout: compile it anew

With a C compiler (`CC`, else `cc`; `CFLAGS` are added) the wheel has the library and the tag `py3-none-PLATFORM`.
Without one, or where it fails, the wheel is pure, with one line that says so; with `STIO_REQUIRE_NATIVE=1` that is an
error.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "stio" / "native"
LIBRARY = FOLDER / "libstio.so"
FLAGS = ("-std=c11", "-O2", "-Wall", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")


def compile_library(library: Path = LIBRARY, *flags: str) -> str:
    """Compile the engine; return why it cannot be compiled here, nothing if it was.

    Args:
        library: Is written, or left as it was.
        flags: Further flags of the compiler.
    """
    if not sys.platform.startswith("linux"):
        return f"the engine is for Linux, not for {sys.platform}"
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(compiler[0]) is None:
        return f"there is no C compiler {compiler[0]!r}"
    new = library.with_name(f"{library.name}.{os.getpid()}")
    command = [
        *compiler, *FLAGS, *shlex.split(os.environ.get("CFLAGS", "")), *flags,
        *map(str, sorted(FOLDER.glob("*.c"))), "-o", str(new), "-ldl",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        new.unlink(missing_ok=True)
        return f"the C compiler failed: {shlex.join(command)}\n{done.stderr}"
    new.replace(library)  # a process that has loaded the old one keeps it
    return ""


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object  # type: ignore[assignment,misc]


class EngineHook(BuildHookInterface):  # type: ignore[misc,type-arg]
    """Compiles the library into the tree, and adds it to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before a build."""
        if self.target_name != "wheel":
            return
        if why := compile_library():
            if os.environ.get("STIO_REQUIRE_NATIVE") == "1":
                raise RuntimeError(why)
            self.app.display_warning(f"stio is built without its engine, so loads are slower: {why}")
            LIBRARY.unlink(missing_ok=True)
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(f"/{LIBRARY.relative_to(Path(__file__).parent)}")


if __name__ == "__main__":
    sys.exit(compile_library())
