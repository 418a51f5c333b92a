"""Writes the output of commands, and their pictures, into the pages again: `make captures`. It takes a few minutes.

Each page with a console runs from top to bottom, as in the tests, but the output of a command is written into the page
instead of being compared. Output that the page shortens with `...` stays unchanged. A console below the line
`<!-- not run: only by make captures: WHY -->` runs here. A picture without a directory in its path is copied from
the directory in which the commands drew it. Pages whose commands need a server are left out. The demo draws
`docs/demo.svg`, and `examples/timeline.py` a load of a trained model to a fake device, `docs/timeline.svg`.
"""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pages
import support
from fakes import FakeDevice

CAPTURED = "only by make captures: "
_ELIDED = re.compile(r"(?<!\])\.\.\.")  # but not `[ARGS]...`, which click prints


def main() -> None:
    """Renew every page, then the pictures of the examples."""
    for page in sorted(pages.DOCS.rglob("*.md")):
        name = str(page.relative_to(pages.DOCS))
        if name not in pages.NEED_SERVERS and any(block.language == "console" for block in pages.blocks_of(page)):
            print(name, flush=True)
            renew(page)
    draw_timeline(support.trained_model() / "model.safetensors", pages.DOCS / "timeline.svg")
    demo = pages.ROOT / "examples" / "demo.py"
    subprocess.run([sys.executable, str(demo), "--picture", str(pages.DOCS / "demo.svg")], check=True)


def draw_timeline(model: Path, picture: Path) -> None:
    """Draw a load to a fake device: it shows how reads, copies and the consumer overlap, and no speed."""
    example = runpy.run_path(str(pages.ROOT / "examples" / "timeline.py"))
    trace = asyncio.run(example["record"](model, device=FakeDevice(delay_seconds=0.004), budget_bytes=32 << 20))
    example["draw"](trace, picture, f"{model.name} to a fake device")
    # The path of the model on this machine is not part of the picture.
    picture.write_text(re.sub("&#10;/[^<]*", "", picture.read_text("utf-8")), "utf-8")


def renew(page: Path) -> None:
    """Run one page in a new directory, and write the output of its commands into the page."""
    renewed: dict[int, str] = {}

    def capture(block: pages.Block) -> None:
        if block.runs or block.reason.startswith(CAPTURED):
            renewed[block.line] = captured(block)

    where = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            pages.run_page(page, capture)
        finally:
            os.chdir(where)
        for picture in re.findall(r"!\[[^]]*\]\(([\w-]+\.svg)\)", page.read_text()):
            if Path(folder, picture).is_file():
                shutil.copy(Path(folder, picture), page.parent / picture)
    lines = page.read_text().splitlines(keepends=True)
    for block in reversed(pages.blocks_of(page)):
        if block.line in renewed:
            lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = [renewed[block.line]]
    page.write_text("".join(lines))


def captured(block: pages.Block) -> str:
    """Run a console block and return its new text."""
    text = ""
    for command, shown in pages.commands(block):
        script, env = pages.script_of(command)
        is_unchanged = not shown or _ELIDED.search(shown) is not None
        printed = pages.run_command(block, script, shown if is_unchanged else "", env)
        text += f"$ {command}\n" + (
            shown if is_unchanged else "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
        )
    return text


if __name__ == "__main__":
    main()
