"""The tutorial, word for word, in an environment of its own: `make tutorial`. Takes minutes and installs torch.

What the tests leave out of the page is run here too: it begins with its installation. One terminal installs and then takes
the Python, pasted; the other one runs the rest of the commands. Only `~` is another place: one that was empty.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pages


def main() -> None:
    """Follow the page.

    Raises:
        PageError: Something fails, or prints what the page does not show.
    """
    blocks = pages.blocks_of(pages.DOCS / "tutorial.md")
    consoles = [block for block in blocks if block.language == "console"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as home:
        install, start, enter = [lines(block, home) for block in consoles if not block.runs]
        if start != ["python -m asyncio"]:
            raise pages.PageError(f"the tutorial begins Python in a way that is not known here: {start}")
        subprocess.run(["bash", "-ec", "\n".join(install)], cwd=pages.ROOT, env=env, check=True)
        where = Path(home, "stio-tutorial")
        pages.run_in_repl(blocks, python=str(where / "bin" / "python"), cwd=where, env=env)
        for block in blocks:
            if block.is_file:
                pages.write_file(block, where)
            elif block.language == "console" and block.runs:
                for command, shown in pages.commands(block):
                    pages.run_command(block, "\n".join([*enter, command]), shown, env)
    print("the tutorial works as it is written", file=sys.stderr)


def lines(block: pages.Block, home: str) -> list[str]:
    return [command.replace("~/", f"{home}/") for command, _ in pages.commands(block)]


if __name__ == "__main__":
    main()
