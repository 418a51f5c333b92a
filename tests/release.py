"""Checks of a release that no test makes: `make release-check TAG=v0.1.0`. Builds and uploads nothing.

The tag, the version in stio/__init__.py and the first heading of CHANGELOG.md must agree, the version must be that of a
release, no page may say that stio is not published, and the README must work as the project's page on a package index.
RELEASING.md has the whole list.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNPUBLISHED = "not on a package index yet"
"""What pages say until the first release. RELEASING.md quotes it too."""


def main(tags: list[str]) -> int:
    """Print what is wrong; return 1 if anything is."""
    if len(tags) != 1:
        print("one tag is needed, for example: make release-check TAG=v0.1.0", file=sys.stderr)
        return 2
    found = list(problems(ROOT, tags[0]))
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(f"{tags[0]}: the version, the changelog and the pages agree")
    return int(bool(found))


def problems(root: Path, tag: str) -> Iterator[str]:
    """Yield what does not fit a release with this tag."""
    version = version_of(root)
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"stio.__version__ is {version}, which is not the version of a release"
    elif tag != f"v{version}":
        yield f"the tag is {tag}, and stio.__version__ is {version}: the tag must be v{version}"
    yield from changelog_problems(root)
    for page in sorted([root / "README.md", *root.glob("docs/**/*.md")]):
        if UNPUBLISHED in page.read_text():
            yield f"{page.relative_to(root)} says that stio is {UNPUBLISHED}"
    if "urls" not in tomllib.loads(root.joinpath("pyproject.toml").read_text())["project"]:
        yield "pyproject.toml has no [project.urls]"
    for target in re.findall(r"\]\((?!https://|#)([^)]+)\)", root.joinpath("README.md").read_text()):
        yield f"README.md links to {target}: on the page of a package index, only absolute links work"


def changelog_problems(root: Path) -> Iterator[str]:
    """Yield what is wrong with the first heading of the changelog.

    It is `## 0.1.0, not released yet` while the version is `0.1.0.dev0`, and `## 0.1.0, 2026-01-31` for a release.
    """
    heading = re.search(r"^## (.+)$", root.joinpath("CHANGELOG.md").read_text(), re.MULTILINE)
    named, _, state = heading[1].partition(", ") if heading else ("", "", "")
    base, development, _ = version_of(root).partition(".dev")
    if named != base:
        yield f"CHANGELOG.md starts with {named or 'no version'}, and stio.__version__ is {version_of(root)}"
    elif development and state != "not released yet":
        yield f"CHANGELOG.md says {state!r} of {named}, which is in development: it must say 'not released yet'"
    elif not development and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", state):
        yield f"CHANGELOG.md says {state!r} of {named}: a release needs its date, as 2026-01-31"


def version_of(root: Path) -> str:
    """Return the version in stio/__init__.py, without importing it."""
    found = re.search(r'^__version__ = "(.+)"$', root.joinpath("stio", "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
