"""The pages in docs/: their Python blocks run, section by section, and their commands are commands."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from stio.cli import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "migration.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_every_block_is_run() -> None:
    assert len(SECTIONS) == 4
    fences = len(re.findall("^```", PAGE, re.MULTILINE))
    assert fences == 2 * sum(len(blocks(text, kind)) for text in SECTIONS.values() for kind in ("python", "sh"))


@pytest.mark.parametrize("section", SECTIONS)
def test_blocks_run_one_after_the_other(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks(SECTIONS[section], "python")):
        name = f"migration.md, {section}, block {number}"
        code = compile(block, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        result = eval(code, names)
        if inspect.iscoroutine(result):

            async def run(body: Any = result) -> None:
                await body

            asyncio.run(run())
    if "row" in names:
        assert torch.equal(names["row"], torch.tensor([[3.0, 4.0, 5.0]]))


def test_commands_exist() -> None:
    lines = [line for text in SECTIONS.values() for block in blocks(text, "sh") for line in block.splitlines()]
    assert lines
    for line in lines:
        program, name, *arguments = shlex.split(line)
        assert program == "stio"
        command = main.commands[name]
        command.make_context(name, arguments)  # parses, and runs nothing
        assert isinstance(command, click.Command)
