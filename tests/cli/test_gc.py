"""`stio gc`: what it finishes, undoes and leaves alone, and what it would."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from commands import large_imports, refused, run
from crash.zygote import Zygote
from support import run_python

import stio
from stio.cli import gc as cli_gc
from stio.storage.commit.recovery import GarbageReport
from tests.storage.transactions import begin_local


def tree(folder: Path) -> list[tuple[str, int]]:
    """Return all paths below a directory, with their times of change."""
    return sorted((str(path.relative_to(folder)), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def cut_off(zygote: Zygote, place: Path, call: str) -> Path:
    """Leave a save over the checkpoint at `place` whose process was killed at the first call of one name.

    Returns:
        Its staging directory.
    """
    code = f"""
import os, sys, torch, stio
from stio.storage.commit import syscalls as calls
calls.{call} = lambda *_, **__: os._exit(9)
stio.sync.save({{f"w{{k}}": torch.full((100,), 2.0) for k in range(4)}}, sys.argv[1], max_shard_size=400)
"""
    done = run_python(code, place, python=zygote.python)
    assert done.returncode == 9, done.stderr
    (staging,) = (path for path in place.glob(".stio-*") if path.is_dir())  # the lock file may be there too
    return staging


@pytest.fixture
def place(tmp_path: Path) -> Path:
    stio.sync.save({f"w{k}": torch.full((100,), 1.0) for k in range(4)}, tmp_path / "m", max_shard_size=400)
    return tmp_path / "m"


def values(place: Path) -> set[float]:
    return {float(tensor[0]) for tensor in stio.sync.load(place).values()}


def test_nothing_to_do(place: Path) -> None:
    assert run("gc", place).stdout == f"{place}: no save was interrupted here\n"
    found = json.loads(run("gc", place, "--json").stdout)
    assert found == {
        "path": str(place),
        "dry_run": False,
        "finished": [],
        "undone": [],
        "kept": [],
        "removed": [],
        "unused": [],
        "aborted": [],
        "newer": [],
        "failed": [],
    }


def test_undoes_what_was_not_published(zygote: Zygote, place: Path) -> None:
    staging = cut_off(zygote, place, "rename")
    before = tree(place)
    assert (
        run("gc", place, "--dry-run").stdout == f"{staging}: would be rolled back, its checkpoint was not published\n"
    )
    assert json.loads(run("gc", place, "--dry-run", "--json").stdout)["undone"] == [str(staging)]
    assert tree(place) == before
    assert run("gc", place).stdout == f"{staging}: rolled back, its checkpoint was not published\n"
    assert not list(place.glob(".stio-*"))
    assert values(place) == {1.0}


def test_finishes_what_was_published(zygote: Zygote, place: Path) -> None:
    staging = cut_off(zygote, place, "unlink")
    assert values(place) == {2.0}
    before = tree(place)
    assert run("gc", place, "--dry-run").stdout == f"{staging}: would be completed, its checkpoint is published\n"
    assert tree(place) == before
    assert run("gc", place).stdout == f"{staging}: completed, its checkpoint is published\n"
    assert not list(place.glob(".stio-*"))
    assert values(place) == {2.0}
    assert len(list(place.glob("*.safetensors"))) == 4


def test_leaves_the_living_alone(place: Path) -> None:
    transaction = begin_local(place, num_shards=2)
    (staging,) = place.glob(".stio-*")
    for options in ([], ["--dry-run"], ["--max-age", "0"]):
        assert (
            run("gc", place, *options).stdout
            == f"{staging}: left alone, its process runs or may run, or it cannot be removed\n"
        )
    transaction.roll_back()
    assert values(place) == {1.0}


def test_a_directory_without_a_lock(tmp_path: Path) -> None:
    staging = tmp_path / ".stio-0123456789"
    staging.mkdir()
    assert json.loads(run("gc", tmp_path, "--json").stdout)["kept"] == [str(staging)]
    os.utime(staging, (1, 1))
    for _ in range(2):
        assert json.loads(run("gc", tmp_path, "--dry-run", "--json").stdout)["undone"] == [str(staging)]
        assert list(staging.iterdir()) == []
    run("gc", tmp_path)
    assert not staging.exists()


def test_leftovers_of_a_cleanup_are_listed_and_not_changed_by_a_dry_run(tmp_path: Path) -> None:
    leftover = tmp_path / ".stio-trash-0123456789"
    leftover.mkdir()
    text = "removed, an earlier cleanup was interrupted\n"
    assert run("gc", tmp_path, "--dry-run").stdout == f"{leftover}: would be {text}"
    assert json.loads(run("gc", tmp_path, "--dry-run", "--json").stdout)["removed"] == [str(leftover)]
    assert leftover.exists()
    assert run("gc", tmp_path).stdout == f"{leftover}: {text}"
    assert not leftover.exists()
    assert run("gc", tmp_path).stdout == f"{tmp_path}: no save was interrupted here\n"


def test_wrong_calls(tmp_path: Path) -> None:
    text = "there is no such destination, and no save to it was interrupted; check the path"
    assert refused("gc", tmp_path / "a" / "b") == f"Error: {tmp_path}/a/b: {text}"
    for nowhere in (tmp_path / "a", tmp_path / "a.safetensors"):  # a first save may come
        assert run("gc", nowhere).stdout == f"{nowhere}: {text}\n"
    assert "'--max-age'" in refused("gc", tmp_path, "--max-age", "-1")
    assert "not NaN" in refused("gc", tmp_path, "--max-age", "nan")


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_url_is_shown_without_its_secrets(monkeypatch: pytest.MonkeyPatch, more: list[str]) -> None:
    class Destination:
        def collect_unused(self, **_: object) -> GarbageReport:
            return GarbageReport()

    monkeypatch.setattr(cli_gc, "open_destination", lambda url: Destination())
    text = run("gc", "s3://user:secret@bucket/m?X-Amz-Signature=secret", *more).stdout
    assert "s3://bucket/m" in text
    assert "secret" not in text


def test_a_first_save_leaves_no_destination_and_is_cleaned_up(tmp_path: Path) -> None:
    staging = tmp_path / ".stio-0123456789"
    staging.mkdir()
    os.utime(staging, (1, 1))
    absent = tmp_path / "m"
    assert run("gc", absent).stdout == f"{staging}: rolled back, its checkpoint was not published\n"
    assert "there is no such destination" in run("gc", absent).stdout


def test_needs_no_torch(tmp_path: Path, program_zygote: Zygote) -> None:
    assert large_imports(program_zygote.python, "gc", tmp_path) == []
