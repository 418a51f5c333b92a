"""Everything that readers copy runs: the code, commands and names of the README, and all files in examples/.

Ray is not among the packages of the tests: of `ray_train.py` it is only tested that its page shows it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pages
import pytest
import torch
from crash.zygote import Zygote
from safetensors.torch import save_file

import stio

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FENCES = pages.blocks_of(ROOT / "README.md")
BLOCKS = [block.text for block in FENCES if block.runs]
DEMO = (ROOT / "docs" / "demo.svg").read_text()
PAGES = sorted(path.name for path in ROOT.glob("*.md"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    tensors = {
        "embed.weight": torch.randn(256, 32),
        "head.weight": torch.randn(256, 32),
        "head.bias": torch.randn(256),
    }
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model" / "model.safetensors"


@pytest.mark.filterwarnings("ignore:stio.sync blocks the running event loop")
def test_readme_code_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty directory, so the code needs nothing that is not on the page."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}

    async def run() -> None:
        for number, block in enumerate(BLOCKS):
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code = compile(block, f"README.md, block {number}", "exec", flags=flags, dont_inherit=True)
            result = eval(code, names)
            if inspect.iscoroutine(result):
                await result

    try:
        asyncio.run(run())
    finally:
        stio.compat.uninstall()


@pytest.mark.matrix
@pytest.mark.parametrize("page", ["README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))])
def test_code_can_be_pasted_at_a_prompt(page: str) -> None:
    """The prompt takes the line after an indented block as part of the block, unless an empty line separates them."""
    for block in pages.blocks_of(ROOT / page):
        if block.language == "python" and block.runs:
            code = compile(
                block.text, page, "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
            )
            for statement, follower in pairwise(code.body):
                if hasattr(statement, "body"):
                    first = min([follower.lineno, *(each.lineno for each in getattr(follower, "decorator_list", []))])
                    assert first > statement.end_lineno + 1, ast.unparse(statement)


def test_readme_code_that_cannot_run_here_uses_names_that_exist() -> None:
    left_out = [block for block in FENCES if not block.runs]
    assert any('device="cuda"' in block.text for block in left_out)
    for block in left_out:
        assert "GPU" in block.reason
        pages.check_unrun(block)


def test_readme_starts_with_code_a_picture_and_two_tables() -> None:
    """Two commands, five lines of code that run, one picture, what others do, and figures."""
    first = README.split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", first, re.DOTALL | re.MULTILINE)
    imports, lines = code.split("\n\n")
    assert imports == "import stio\nimport torch"
    assert len(lines.splitlines()) == 3
    assert re.findall(r"^    make (\w+) ", first, re.MULTILINE) == ["demo", "test"]
    assert README.splitlines().index(code.splitlines()[0]) < 30
    assert len(re.findall(r"^!\[", first, re.MULTILINE)) == 1
    assert len(re.findall(r"^\|[-|: ]+\|$", first, re.MULTILINE)) == 2
    assert len(first.splitlines()) < 50


def test_readme_says_how_long_the_loads_of_its_picture_took() -> None:
    """Of both, as the picture says it, in seconds."""
    drawn = re.search(r"load_file in a thread: .*? loaded in (\d+) ms\. stio: .*? loaded in (\d+) ms", DEMO)
    assert drawn is not None
    caption = " ".join(README.split("](docs/demo.svg)", 1)[1].split("|", 1)[0].split())
    thread, ours = (f"{int(milliseconds) / 1e3:.2f} s with" for milliseconds in drawn.groups())
    assert f"{ours} stio" in caption
    assert f"{thread} safetensors in a thread" in caption


def test_readme_is_short() -> None:
    """At most 1,000 words outside code, and lines of prose of less than 160 characters."""
    lines = re.sub(r"^(<!-- not run: [^\n]*\n)?```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE).splitlines()
    prose = [line for line in lines if not line.startswith("    ")]
    assert len(" ".join(prose).split()) <= 1000
    assert [line for line in prose if len(line) >= 160 and not line.startswith("|")] == []


def test_the_reference_names_all_public_names() -> None:
    names = (ROOT / "docs" / "reference" / "index.md").read_text().split("## Terms")[0]
    errors = {name for name in stio.__all__ if name.endswith("Error")}
    assert set(stio.__all__) - errors - {"__version__"} <= set(re.findall(r"`(\w+)`", names.replace("stio.", "")))
    assert errors <= set(re.findall(r"::: stio\.(\w+)", (ROOT / "docs" / "reference" / "errors.md").read_text()))


def test_readme_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"^    make ([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", PAGES)
def test_links_point_to_existing_files(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def example(zygote: Zygote, *arguments: object) -> str:
    done = subprocess.run([str(zygote.python), *map(str, arguments)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_timeline(model: Path, tmp_path: Path, zygote: Zygote) -> None:
    example(zygote, "examples/timeline.py", model, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert all(f">{word}" in text for word in ("read", "consume", "wait", "caller", "stream", "model.safetensors"))


def test_pictures_need_no_plotting_library(zygote: Zygote) -> None:
    code = (
        "import sys; sys.path.insert(0, 'examples'); sys.modules['matplotlib'] = None; import demo_picture, timeline; "
        "print('matplotlib' in {name.partition('.')[0] for name, module in sys.modules.items() if module})"
    )
    assert example(zygote, "-c", code).strip() == "False"


def test_the_page_on_ray_shows_the_function_of_the_example() -> None:
    code = (ROOT / "examples" / "ray_train.py").read_text()
    function = code[code.index("def train(config):") : code.index("if __name__")].strip()
    assert function in (ROOT / "docs" / "frameworks" / "ray.md").read_text()


@pytest.mark.slow
def test_a_picture_of_a_pool(tmp_path: Path, zygote: Zygote) -> None:
    """Each model has a row with its places, and a mark for each of its requests."""
    example(zygote, "examples/pool_demo.py", tmp_path / "pool.svg", "--mb", "1", "--seconds", "0.5", "--models", "5")
    root = ElementTree.parse(tmp_path / "pool.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    texts = [one.text or "" for one in root.iter(f"{name}text")]
    assert [f"model-{k}" for k in range(5)] == [text for text in texts if text.startswith("model-")]
    places = {one.get("class") for one in root.iter(f"{name}rect")}
    assert places == {"paper", "device", "loading", "host", "source"}
    (requests,) = re.findall(r"([\d,]+) requests", texts[0])
    marks = "".join(one.get("d") or "" for one in root.iter(f"{name}path"))
    assert marks.count("M") == int(requests.replace(",", "")) > 10


@pytest.mark.slow
def test_a_trainer_that_is_killed_and_two_followers(tmp_path: Path, zygote: Zygote) -> None:
    done = example(zygote, "examples/follow.py", tmp_path / "run", tmp_path / "a.svg", "--steps", "8")
    assert str(done).count("the last one is step 8") == 3
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
