"""Hooks of mkdocs: link to the code, files of the benchmarks, outputs, charts, search, keywords."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from stio.text import completed

_LOOKED_UP = ("reference/", "faults.md", "benchmarks.md", "tables.md", "threat-model.md")
"""Pages to look something up. The search shows those first that explain."""
_NOT_RUN = re.compile(r"^<!-- not run: .*-->\n", re.MULTILINE)  # see tests/pages.py
_DRAWING = re.compile(r'<div class="language-text highlight">(<pre>.*?</pre>)', re.DOTALL)
_COLUMNS = 100
"""Characters of a line of code that a page shows at a width of 1280 pixels."""
_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|µs|[kMGT]?B(?:/s)?)</td>)")
"""The space between the number and the unit of a cell: a narrow column would break it."""
_CHART = re.compile(r'<img alt="[^"]*" src="[^"]*\.svg"\s*/?>')


def on_config(config: MkDocsConfig) -> None:
    """Link every page to the code, if `pyproject.toml` names its repository."""
    project = Path(config.config_file_path).with_name("pyproject.toml").read_text("utf-8")
    if url := tomllib.loads(project)["project"].get("urls", {}).get("Repository"):
        config.repo_url, config.repo_name = url, urlsplit(url).path.strip("/")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `results/`: charts, raw figures, and a list that a link to the directory opens."""
    results = Path(config.config_file_path).parent / "benchmarks" / "results"
    found = sorted(path for path in results.iterdir() if path.suffix in (".jsonl", ".svg"))
    for path in found:
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    links = "".join(f"- [{path.name}]({path.name})\n" for path in found)
    listing = f"# Raw figures of the [benchmarks](../benchmarks.md)\n\n{links}"
    hidden = InclusionLevel.NOT_IN_NAV
    files.append(File.generated(config, "results/index.md", content=listing, inclusion=hidden))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark outputs, hide why code is not run, and put tables and names behind pages that explain.

    A fence of `text` is what the Python above it prints: it wraps, and no button copies it.
    Indented blocks have the same language, but are commands or drawings. In the search, pages of
    tables and names have half the weight.
    """
    if page.file.src_uri.startswith(_LOOKED_UP):
        page.meta.setdefault("search", {"boost": 0.5})
    markdown = _NOT_RUN.sub("", markdown)
    return re.sub(r"^```text$", "``` {.text .output .no-copy}", markdown, flags=re.MULTILINE)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put each chart into a box that scrolls, so that style.css keeps its text readable on a phone.

    Drawings of characters that are wider than the page get smaller letters, since they cannot wrap.
    A number and its unit stay on one line of a table. A link to the directory of raw figures opens
    its list, also from disk, where no server adds the name of a file.
    """
    html = html.replace('href="results/"', 'href="results/index.html"')
    html = _UNIT.sub("&nbsp;", html)
    html = _DRAWING.sub(_fit, html)
    return _CHART.sub(lambda match: f'<span class="picture">{match[0]}</span>', html)


def _fit(drawing: re.Match[str]) -> str:
    num_columns = max(map(len, unescape(re.sub(r"<[^>]*>", "", drawing[1])).splitlines()))
    kind = "highlight wide" if num_columns > _COLUMNS else "highlight"
    return drawing[0].replace("highlight", kind, 1)


class Keywords(griffe.Extension):
    """Does with the sources what decorators of keywords do at the import."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Complete the docstrings and signatures of a package that was read."""
        done: set[str] = set()
        for described in _functions_and_classes(pkg):
            _complete(described, done)


def _functions_and_classes(owner: griffe.Object) -> Iterator[griffe.Function | griffe.Class]:
    for member in owner.members.values():
        if isinstance(member, griffe.Function | griffe.Class):
            yield member
        if isinstance(member, griffe.Module | griffe.Class):
            yield from _functions_and_classes(member)


def _complete(described: griffe.Function | griffe.Class, done: set[str]) -> None:
    if described.path in done:
        return
    done.add(described.path)
    for decorator in described.decorators:
        if decorator.callable_path == "stio.sync._takes_what":
            (source,) = _arguments(described, decorator)
            described.parameters = source.parameters
        elif decorator.callable_path == "stio.text.described_by":
            sources = _arguments(described, decorator)
            for source in sources:
                _complete(source, done)  # its docstring may be completed by that of another one
            texts = [source.docstring.value for source in sources]
            names = [one.name for one in described.parameters]
            described.docstring.value = completed(described.docstring.value, names, texts)


def _arguments(
    described: griffe.Object, decorator: griffe.Decorator
) -> list[griffe.Function | griffe.Class]:
    """Return the functions and classes that a decorator is called with: names of the module."""
    found = []
    for argument in decorator.value.arguments:
        name, *rest = str(argument).split(".")
        found.append(
            described.modules_collection[".".join([described.module.resolve(name), *rest])]
        )
    return [one.final_target if isinstance(one, griffe.Alias) else one for one in found]
