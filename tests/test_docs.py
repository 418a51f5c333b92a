"""The pages in docs/: their code runs and prints what they show, and the site's table of contents is complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
import yaml
from pages import DOCS, ROOT, Block, PageError

import stio

PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
WITH_CODE = [page for page in PAGES if pages.blocks_of(DOCS / page)]
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


@pytest.mark.parametrize("page", WITH_CODE)
@pytest.mark.filterwarnings("ignore:stio.sync blocks the running event loop:RuntimeWarning")  # the pages say so
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = pages.run_page(DOCS / page)
    assert names.keys() > {"__name__"}
    if page == "migration.md":
        assert torch.equal(names["row"], torch.tensor([[3.0, 4.0, 5.0]]))


def test_the_tutorial_can_be_pasted(tmp_path: Path) -> None:
    pages.run_in_repl(pages.blocks_of(DOCS / "tutorial.md"), cwd=tmp_path)


# The site.


def listed(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for item in (nav.values() if isinstance(nav, dict) else nav) for page in listed(item)]


def test_the_table_of_contents_names_every_page_once() -> None:
    assert sorted(listed(SITE["nav"])) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_links_and_includes_lead_somewhere(page: str) -> None:
    text = (DOCS / page).read_text()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        beside = ROOT / "benchmarks" if target.startswith("results/") else (DOCS / page).parent  # see docs/hooks.py
        assert target.startswith("https://") or (beside / target).is_file(), target
    for target in re.findall(r'^--8<-- "(.+)"$', text, re.MULTILINE):
        assert (ROOT / target).is_file(), target


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join((DOCS / page).read_text() for page in PAGES if page.startswith("reference/"))
    found = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(found) == len(set(found))
    for name in set(stio.__all__) - {"__version__", "sync"}:
        assert f"stio.{name}" in found, name
    assert [name for name in found if pages.find(name) is None] == []


def test_make_docs_builds_strictly() -> None:
    assert SITE["strict"] is True
    assert re.search(r"^docs: .*\n\t.*mkdocs build", (ROOT / "Makefile").read_text(), re.MULTILINE)


# The tests themselves can fail.


def page_of(tmp_path: Path, text: str) -> Path:
    (tmp_path / "page.md").write_text(text)
    return tmp_path / "page.md"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a 1\n", "a 1\n", True),
        ("a 1\n", "a 2\n", False),
        ("a ... s\n", "a 0.25 s\n", True),
        ("a ... s\n", "a 0.25 ms or so\n", False),
        ("a...\n", "a\nb\n", False),
        ("a\n...\nz\n", "a\nb\nc\nz\n", True),
        ("a\n...\nz\n", "a\nb\nc\n", False),
        ("(a) [b]\n", "(a) [b]\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n", "", False),
        ("", "", True),
    ],
)
def test_what_is_shown_is_compared(shown: str, printed: str, same: bool) -> None:
    assert pages.agrees(shown, printed) is same


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page.md:2: the page shows\n2\n"),
        ("```python\nprint(1)\n```\n", "says nothing"),
        ("```python\nprint(1)\n```\n\n```text\n...\n```\n", "says nothing"),
        ("```console\n$ echo 1\n2\n```\n", "the page shows\n2\n"),
        ("```console\n$ exit 3\n```\n", "exit status 3"),
        ("```console\nls\n```\n", "begins with a command"),
        ("```text\n1\n```\n", "output of nothing"),
        ("```sh\nls\n```\n", "sh is none of"),
        ("```\nls\n```\n", "no language"),
        ("- list\n\n    ```python\n    1\n    ```\n", "a fence that is indented"),
        ('```python norun="1"\n1\n```\n', "options that nobody knows"),
        ('```python title="Not run here"\n1\n```\n', "does not say why"),
        ('```python title="Listing one"\n1\n```\n', "neither a reason nor a file's name"),
        ('```python title="Not run here: why"\nstio.lode(1)\n```\n', "stio does not know stio.lode"),
        ('```python title="Not run here: why"\nawait stio.load(1, devise=2)\n```\n', r"stio.load\(devise=\)"),
        ('```python title="Not run here: why"\nstio.Saver(keep=2)\n```\n', r"stio.Saver\(keep=\)"),
        ('```python title="Not run here: why"\nfrom stio import lode\n```\n', "stio.lode"),
        ('```python title="Not run here: why"\nimport stio.lode\n```\n', "stio.lode"),
    ],
)
def test_a_page_that_is_wrong_fails(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(PageError, match=said):
        pages.run_page(page_of(tmp_path, text))


def test_code_that_fails_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        pages.run_page(page_of(tmp_path, "# Page\n\n```python\na = 1\na / 0\n```\n"))
    assert caught.traceback[-1].lineno == 4  # pytest counts from 0
    with pytest.raises(SyntaxError):
        pages.check_unrun(Block("page.md", 1, "python", "Not run here: why", "def\n"))


def test_what_cannot_run_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        '```python title="Not run here: a GPU"\nimport stio\nraise SystemExit(await stio.load("m", device="cuda"))\n```\n'
        '```console title="Not run here: it downloads"\n$ exit 1\n```\n'
        '```python title="made.py"\nprint("made")\n```\n```console\n$ python made.py\nmade\n```\n'
    )
    pages.run_page(page_of(tmp_path, text))


def test_a_page_that_cannot_be_pasted_fails(tmp_path: Path) -> None:
    page = page_of(tmp_path, "```python\nfor k in range(2):\n    print(k)\nprint(3)\n```\n\n```text\n0\n1\n3\n```\n")
    with pytest.raises(PageError, match="SyntaxError"):
        pages.run_in_repl(pages.blocks_of(page), cwd=tmp_path)
