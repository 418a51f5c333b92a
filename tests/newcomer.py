"""Runs a page as a new user does, in a new environment: `make tutorial` and `make readme`. Takes minutes and installs torch.

    python tests/newcomer.py tutorial    # word for word, from the installation on
    python tests/newcomer.py readme      # with the wheel in dist/, which has the extra `cli`

This also runs the blocks of the tutorial that the tests leave out, so it starts with the installation. One terminal
installs, and the Python is pasted into it. A second terminal runs the other commands. `~` is replaced by an empty directory.
The README gets an environment with the wheel, held to constraints.txt, and an empty directory: the checkout is not on the
path. Then the commands `stio inspect` and `stio verify` read the model that the README saved.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

import pages

DISTRIBUTION = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]["name"]
OTHER_LIBRARIES = ("safetensors",)
"""What the README's section on other libraries replaces; its readers have them."""


def main() -> None:
    """Run a page.

    Raises:
        PageError: A block fails, or its output differs from the page.
        CalledProcessError: An installation fails.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page", choices=["tutorial", "readme"])
    arguments = parser.parse_args()
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    with tempfile.TemporaryDirectory() as home:
        if arguments.page == "tutorial":
            run_tutorial(home, env)
        else:
            run_readme(Path(home), env)
    print(f"the {arguments.page} works as written", file=sys.stderr)


def run_tutorial(home: str, env: dict[str, str]) -> None:
    """Install from the checkout with the commands of the page, then run its other blocks."""
    blocks = pages.blocks_of(pages.DOCS / "tutorial.md")
    consoles = [block for block in blocks if block.language == "console"]
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


def run_readme(home: Path, env: dict[str, str]) -> None:
    """Install the wheel in dist/, check what was installed, and run the blocks and two commands."""
    wheel = built_wheel()
    venv.create(home / "venv", with_pip=True)
    python = str(home / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    install = [*pip, "install", "--no-compile", "--constraint", str(pages.ROOT / "constraints.txt")]
    subprocess.run([*install, f"{wheel}[cli]", *OTHER_LIBRARIES], env=env, check=True)
    where = home / "work"
    where.mkdir()
    run_installed(python, where, env)
    # What an error message says to run. stio itself may be on no package index: pip uses the one that is installed.
    subprocess.run([*install, f"{DISTRIBUTION}[hash]"], cwd=where, env=env, check=True)
    subprocess.run([python, "-c", "import xxhash"], cwd=where, env=env, check=True)
    subprocess.run([*pip, "check"], env=env, check=True)


def built_wheel() -> Path:
    """Return the wheel in dist/; the program ends if there is not exactly one."""
    found = sorted((pages.ROOT / "dist").glob("*.whl"))
    if len(found) != 1 or not found[0].name.startswith(f"{DISTRIBUTION.replace('-', '_')}-"):
        names = ", ".join(path.name for path in found) or "no wheel"
        sys.exit(f"dist/ has {names}, and not one wheel of {DISTRIBUTION}: make package")
    return found[0]


def run_installed(python: str, where: Path, env: dict[str, str]) -> None:
    """Run the README in an empty directory, with an interpreter that has the wheel and its extra `cli`."""
    code = f"import importlib.metadata, stio; print(importlib.metadata.version({DISTRIBUTION!r}), stio.__file__)"
    done = subprocess.run([python, "-c", code], cwd=where, env=env, check=True, capture_output=True, text=True)
    version, place = done.stdout.split()
    if Path(place).is_relative_to(pages.ROOT / "stio"):
        raise pages.PageError(f"the checkout is imported, and not the wheel: {place}")
    blocks = pages.blocks_of(pages.ROOT / "README.md")
    pages.run_in_repl(blocks, python=python, cwd=where, env=env)
    command = [str(Path(python).parent / "stio")]
    for arguments, shown in (
        (["--version"], version),
        (["inspect", "model/"], "0.weight"),
        (["verify", "model/"], ""),
    ):
        done = subprocess.run([*command, *arguments], cwd=where, env=env, check=True, capture_output=True, text=True)
        if shown not in done.stdout:
            raise pages.PageError(f"stio {' '.join(arguments)} does not show {shown}:\n{done.stdout}")


def lines(block: pages.Block, home: str) -> list[str]:
    return [command.replace("~/", f"{home}/") for command, _ in pages.commands(block)]


if __name__ == "__main__":
    main()
