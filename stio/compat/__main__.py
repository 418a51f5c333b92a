"""Run a program that uses safetensors over stio, unchanged: `python -m stio.compat SCRIPT ARGS`, or `-m MODULE ARGS`.

It calls `install`, and then runs the program as `python SCRIPT ARGS` or `python -m MODULE ARGS` would.
"""

from __future__ import annotations

import os
import runpy
import sys

from stio.compat.replacement import install

_USAGE = "usage: python -m stio.compat SCRIPT [ARGS...]\n       python -m stio.compat -m MODULE [ARGS...]"


def main() -> None:
    """Run the program that the command line names.

    Raises:
        SystemExit: The program ends so, or nothing is named, or stio cannot be put in the place of safetensors.
    """
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    del arguments[:is_module]
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        raise SystemExit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    try:
        install()
    except (ImportError, RuntimeError) as error:
        raise SystemExit(f"stio: {error}") from error
    sys.argv[:] = arguments
    if is_module:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        if not sys.flags.safe_path:
            sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
