"""The command `stio`, also `python -m stio`: imports the command line, runs it, and ends as the shell expects."""

from __future__ import annotations

import sys

from stio.cli.interrupts import die_of_interrupt, ignore, starting
from stio.errors import install_command

try:
    with starting():
        from stio.cli.main import main as command
        from stio.cli.output import ERROR, INTERRUPTED
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("click", "tqdm"):
        raise
    print(f"stio: the command line needs click and tqdm: {install_command('cli')}", file=sys.stderr)
    sys.exit(2)

__all__ = ["main"]


def main() -> None:
    """Run the program and exit."""
    try:
        command()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            die_of_interrupt()
        raise
    except KeyboardInterrupt:  # a second one
        die_of_interrupt()
    except Exception:  # a bug; the interpreter's own status for it would mean damage or a difference
        sys.excepthook(*sys.exc_info())
        sys.exit(ERROR)
    finally:
        ignore()  # only the end of the interpreter is left


if __name__ == "__main__":
    main()
