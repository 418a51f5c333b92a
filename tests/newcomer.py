"""Runs the tutorial, word for word, in a new environment: `make tutorial`. Takes minutes and installs torch.

This also runs the blocks that the tests leave out, so it starts with the installation. One terminal installs, and the
Python is pasted into it. A second terminal runs the other commands. `~` is replaced by an empty directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pages


def main() -> None:
    """Run the page.

    Raises:
        PageError: A block fails, or its output differs from the page.
    """
    blocks = pages.blocks_of(pages.DOCS / "tutorial.md")
    consoles = [block for block in blocks if block.language == "console"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as home:
        install, start, enter = [lines(block, home) for block in consoles if not block.runs]
        if start != ["python -m asyncio"]:
            raise pages.PageError(f"the tutorial starts Python with an unknown command: {start}")
        subprocess.run(["bash", "-ec", "\n".join(install)], cwd=pages.ROOT, env=env, check=True)
        where = Path(home, "stio-tutorial")
        pages.run_in_repl(blocks, python=str(where / "bin" / "python"), cwd=where, env=env)
        for block in blocks:
            if block.is_file:
                pages.write_file(block, where)
            elif block.language == "console" and block.runs:
                for command, shown in pages.commands(block):
                    pages.run_command(block, "\n".join([*enter, command]), shown, env)
    print("the tutorial works as written", file=sys.stderr)


def lines(block: pages.Block, home: str) -> list[str]:
    return [command.replace("~/", f"{home}/") for command, _ in pages.commands(block)]


if __name__ == "__main__":
    main()
