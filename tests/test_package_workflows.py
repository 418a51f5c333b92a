"""The hosted workflows run the commands of a developer. A release's tag, version, changelog and pages must agree."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import newcomer
import pages
import pytest
import release
import yaml

from stio import errors

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS: dict[str, dict[Any, Any]] = {
    path.name: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github" / "workflows").iterdir())
}
JOBS: dict[str, dict[str, Any]] = {
    f"{workflow}: {name}": job for workflow, document in WORKFLOWS.items() for name, job in document["jobs"].items()
}


# Workflows.


def commands(job: str) -> Iterator[list[str]]:
    """Yield the words of each line that a job runs."""
    for step in JOBS[job]["steps"]:
        for line in step.get("run", "").splitlines():
            yield shlex.split(line)


def test_workflows_run_the_commands_of_a_developer() -> None:
    found: dict[str, list[str]] = {}
    for job in JOBS:
        for make, *words in commands(job):
            assert make == "make", job
            found.setdefault(job, []).extend(word for word in words if "=" not in word)
            python = "PYTHON=python3.11" if "container" in JOBS[job] else "PYTHON=python"
            assert {python} <= {word for word in words if "=" in word} <= {python, "TAG=$GITHUB_REF_NAME"}
    assert found == {
        "ci.yml: test": ["test"],
        "ci.yml: package": ["readme"],
        "ci.yml: wheel": ["wheel"],
        "ci.yml: docs": ["docs"],
        "publish.yml: build": ["release-check", "readme"],
        "publish.yml: wheel": ["wheel"],
    }
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert {target for called in found.values() for target in called} <= targets
    assert re.search(r"^readme: package ", MAKEFILE, re.MULTILINE)  # so both build, and check the metadata


def test_every_supported_python_is_tested() -> None:
    prefix = "Programming Language :: Python :: 3."
    supported = [f"3.{line.removeprefix(prefix)}" for line in PROJECT["classifiers"] if re.match(f"{prefix}\\d", line)]
    for job in ("ci.yml: test", "ci.yml: package"):
        assert JOBS[job]["strategy"]["matrix"]["python-version"] == supported
        assert "${{ matrix.python-version }}" in [
            step.get("with", {}).get("python-version") for step in JOBS[job]["steps"]
        ]
    assert PROJECT["requires-python"] == f">={supported[0]}"
    for job in JOBS.values():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/setup-python@"):
                assert step["with"]["python-version"] in ("${{ matrix.python-version }}", supported[0])


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_are_bounded(name: str) -> None:
    """A test of its own for each bound would say no more: a missing key fails with its name."""
    document = WORKFLOWS[name]
    assert document["permissions"] == {"contents": "read"}
    assert document["concurrency"]["cancel-in-progress"] is (name == "ci.yml")
    for job in document["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 60
        assert not job["runs-on"].endswith("latest")
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step["uses"]), step
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_a_release_is_built_once_then_tried_then_published() -> None:
    """What is published are the files that were on the test index; only the jobs that upload can prove who they are."""
    document = WORKFLOWS["publish.yml"]
    assert document[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    assert list(document["jobs"]) == ["build", "wheel", "test-index", "index"]
    build, wheel, test_index, index = document["jobs"].values()
    assert (test_index["needs"], index["needs"]) == (["build", "wheel"], "test-index")
    assert (test_index["environment"], index["environment"]) == ("test-index", "index")
    assert not {"permissions", "needs"} & {*build, *wheel}
    for job in (test_index, index):
        assert job["permissions"] == {"id-token": "write"}
        download, publish = job["steps"]
        assert download["with"] == {"path": "dist/", "merge-multiple": True}
        assert publish["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert test_index["steps"][1]["with"] == {"repository-url": "${{ vars.UPLOAD_URL }}"}
    assert "with" not in index["steps"][1]
    uploads = [job["steps"][-1]["with"] for job in (build, wheel)]
    assert [(one["name"], one["path"]) for one in uploads] == [
        ("sdist", "dist/*.tar.gz"),
        ("wheel-${{ matrix.architecture }}", "dist/"),
    ]


@pytest.mark.parametrize("job", ["ci.yml: wheel", "publish.yml: wheel"])
def test_wheels_have_the_engine_of_each_processor(job: str) -> None:
    """They are built where the C library is as old as their tag says; auditwheel checks it."""
    matrix = JOBS[job]["strategy"]["matrix"]["include"]
    assert {(one["architecture"], one["runner"]) for one in matrix} == {
        ("x86_64", "ubuntu-24.04"),
        ("aarch64", "ubuntu-24.04-arm"),
    }
    assert JOBS[job]["runs-on"] == "${{ matrix.runner }}"
    (tag,) = re.findall(r"^MANYLINUX \?= (\w+)$", MAKEFILE, re.MULTILINE)
    assert JOBS[job]["container"] == f"quay.io/pypa/{tag}_${{{{ matrix.architecture }}}}"
    for target in ("package", "wheel"):
        (recipe,) = re.findall(rf"^{target}: .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
        assert "STIO_REQUIRE_NATIVE=1 $(TOOLS)/bin/python -m build" in recipe
        assert "-m auditwheel" in recipe
        assert "tests/installs.py" in recipe


def test_continuous_integration_needs_the_engine() -> None:
    """Without a compiler it would test another program than the one that is released."""
    assert WORKFLOWS["ci.yml"]["env"]["STIO_REQUIRE_NATIVE"] == "1"
    script = ROOT / ".ci" / "run"
    assert not script.exists() or "export STIO_REQUIRE_NATIVE=1" in script.read_text()  # an sdist does not contain it


def test_workflows_have_no_secret() -> None:
    assert not re.search(r"secrets\.|password|token: (?!write)", yaml.dump(WORKFLOWS))


# Releases.


def release_tree(
    root: Path,
    version: str = "1.2.0",
    heading: str = "1.2.0, 2026-01-31",
    page: str = "a page",
    readme: str = "",
    table: str = "urls",
) -> Path:
    (root / "stio").mkdir()
    (root / "docs" / "howto").mkdir(parents=True)
    (root / "stio" / "__init__.py").write_text(f'"""A docstring."""\n\n__version__ = "{version}"\n')
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n## {heading}\n\n## 1.1.0, 2025-01-31\n")
    (root / "README.md").write_text(f"# stio\n\n[a page](https://host/page), [a part](#part){readme}\n")
    (root / "pyproject.toml").write_text(f"[project]\n[project.{table}]\nHomepage = 'https://host'\n")
    (root / "docs" / "howto" / "install.md").write_text(page)
    return root


def test_a_release_that_agrees(tmp_path: Path) -> None:
    assert list(release.problems(release_tree(tmp_path), "v1.2.0")) == []


@pytest.mark.parametrize(
    ("changes", "tag", "expected"),
    [
        ({}, "1.2.0", "the tag is 1.2.0, and stio.__version__ is 1.2.0: the tag must be v1.2.0"),
        ({}, "v1.2.1", "the tag is v1.2.1, and stio.__version__ is 1.2.0: the tag must be v1.2.0"),
        (
            {"version": "1.2.0.dev0", "heading": "1.2.0, not released yet"},
            "v1.2.0",
            "stio.__version__ is 1.2.0.dev0, which is not the version of a release",
        ),
        (
            {"heading": "1.2.0, not released yet"},
            "v1.2.0",
            "CHANGELOG.md says 'not released yet' of 1.2.0: a release needs its date, as 2026-01-31",
        ),
        ({"heading": "1.1.0, 2025-01-31"}, "v1.2.0", "CHANGELOG.md starts with 1.1.0, and stio.__version__ is 1.2.0"),
        (
            {"page": f"stio is {release.UNPUBLISHED}"},
            "v1.2.0",
            f"docs/howto/install.md says that stio is {release.UNPUBLISHED}",
        ),
        ({"table": "scripts"}, "v1.2.0", "pyproject.toml has no [project.urls]"),
        (
            {"readme": "![x](docs/x.svg)"},
            "v1.2.0",
            "README.md links to docs/x.svg: on the page of a package index, only absolute links work",
        ),
    ],
)
def test_what_does_not_fit_a_release(tmp_path: Path, changes: dict[str, str], tag: str, expected: str) -> None:
    assert list(release.problems(release_tree(tmp_path, **changes), tag)) == [expected]


def test_a_development_version_has_no_date(tmp_path: Path) -> None:
    root = release_tree(tmp_path, version="1.2.0.dev0")
    (problem,) = release.changelog_problems(root)
    assert problem.endswith("it must say 'not released yet'")


def test_the_changelog_starts_with_this_version() -> None:
    assert list(release.changelog_problems(ROOT)) == []


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["v0.0.0"], 1)])
def test_the_check_of_a_release_fails(arguments: list[str], status: int) -> None:
    done = subprocess.run([sys.executable, "tests/release.py", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr


def test_the_checklist_names_what_exists() -> None:
    text = (ROOT / "RELEASING.md").read_text()
    assert release.UNPUBLISHED in text
    assert {"test-index", "index"} <= set(re.findall(r"`([\w-]+)`", text))
    for path in re.findall(r"`((?:stio|tests|docs|\.github)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


# The name of the distribution.


def test_no_text_has_the_name_of_another_project() -> None:
    """`stio` on the package index is another project: nobody is told to install it."""
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "stio").rglob("*.py"), ROOT / "Makefile"]
    texts += [*(ROOT / "examples").iterdir(), *(ROOT / ".github").rglob("*.yml"), *(ROOT / "benchmarks").glob("*.md")]
    assert len(texts) > 100
    other = re.compile(
        r"(?:pip3? (?:install|download)|uv add)(?:\s+-\S+)*\s+[\"']?stio(?![\w-])|(?<![\w.-])stio\[(?!-)"
    )
    found = {path: other.findall(path.read_text()) for path in texts if path.is_file()}
    assert {path: names for path, names in found.items() if names} == {}
    assert (
        other.search("pip install stio") and other.search("pip install -U 'stio[cli]'") and other.search("'stio[hub]'")
    )
    assert not other.search("pip install 'stio-torch[cli]'")


def test_hints_name_extras_that_exist() -> None:
    used = {
        name: path
        for path in (ROOT / "stio").rglob("*.py")
        for name in re.findall(r"install_command\(['\"](\w+)['\"]\)", path.read_text())
    }
    assert used.keys() >= {"cli", "gds", "hash", "otel"}
    assert used.keys() <= PROJECT["optional-dependencies"].keys()
    assert errors.install_command("hub") == f"pip install '{PROJECT['name']}[hub]'"


# The README with an installed wheel: `make readme` does it, this only parts of it.


def test_a_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="dist/ has no wheel"):
        newcomer.built_wheel()
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "stio-1.0-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match="not one wheel of stio-torch: make package"):
        newcomer.built_wheel()
    (tmp_path / "dist" / "stio-1.0-py3-none-any.whl").rename(tmp_path / "dist" / "stio_torch-1.0-py3-none-any.whl")
    assert newcomer.built_wheel().name == "stio_torch-1.0-py3-none-any.whl"
