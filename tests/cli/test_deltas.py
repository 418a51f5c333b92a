"""The commands about a checkpoint, given a delta: they see the checkpoint that it means."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from deltas import id_of, next_state, write_chain, write_checkpoint

from stio.cli.main import main
from stio.format.files import FileState, Manifest

State = dict[str, torch.Tensor]


@pytest.fixture
def states() -> list[State]:
    generator = torch.Generator().manual_seed(0)
    found: list[State] = [
        {"w": torch.randn(80, 70, generator=generator), "mask": torch.rand(900) < 0.5, "same": torch.ones(2)}
    ]
    found[0]["new"] = torch.zeros(7).bfloat16()
    for step in (1, 2):
        found.append(next_state(found[-1], 0.02, generator) | {"same": torch.ones(2)})
        found[-1]["new"] = torch.full((7,), step).bfloat16()
    return found


@pytest.fixture
def folder(tmp_path: Path, states: list[State], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write `step-0` to `step-2`, and `full` with what `step-2` means; they are the working directory."""
    write_chain(tmp_path, states)
    write_checkpoint(tmp_path / "full", states[2], {"format": "pt"})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exit_code == status, f"{result.output}{result.stderr}"
    return f"{result.output}{result.stderr}"


def manifest(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    state = (FileState(len(data), hashlib.sha256(data).hexdigest()),)
    (path / "model.safetensors.manifest.json").write_bytes(Manifest("sha256", {"model.safetensors": state}).encode())


def damage(path: Path, at: int) -> None:
    raw = bytearray((path / "model.safetensors").read_bytes())
    raw[at] ^= 1
    (path / "model.safetensors").write_bytes(raw)


# inspect


def test_inspect_shows_the_whole_and_what_changed(folder: Path, states: list[State]) -> None:
    found = json.loads(run("inspect", "step-2", "--json"))
    whole = json.loads(run("inspect", "full", "--json"))
    shapes = [{one["name"]: (one["dtype"], one["shape"]) for one in each["tensors"]} for each in (found, whole)]
    assert shapes[0] == shapes[1]
    assert (found["kind"], whole["kind"]) == ("delta", "full")
    assert found["base"] == str(folder / "step-1")
    assert [(one["kind"], one["id"]) for one in found["links"]] == [
        ("full", id_of(0)),
        ("delta", id_of(1)),
        ("delta", id_of(2)),
    ]
    assert [one["file_bytes"] for one in found["links"]] == [one["file_bytes"] for one in found["shards"]]
    changed = {one["name"]: one.get("changed_elements") for one in found["tensors"]}
    assert changed == {
        "w": int((states[1]["w"] != states[2]["w"]).sum()),
        "mask": int((states[1]["mask"].view(torch.uint8) != states[2]["mask"].view(torch.uint8)).sum()),
        "same": None,
        "new": 7,
    }


def test_inspect_as_text(folder: Path) -> None:
    shown = run("inspect", "step-2")
    assert "delta 2 of a chain, on " in shown
    assert "full: " in shown
    header, *rows = shown.splitlines()[1:5]
    assert header.split() == ["name", "dtype", "shape", "size", "shard", "changed"]
    by_name = {row.split()[0]: row.split()[-1] for row in rows}
    assert by_name["new"] == "100.00%"
    assert by_name["same"] == "1/3"
    assert "changed" not in run("inspect", "full")
    assert "w" in run("inspect", "step-2", "--tree")


# verify


def test_verify_compares_each_link_with_its_own_manifest(folder: Path) -> None:
    assert "there is no manifest" in run("verify", "step-2")
    manifest(folder / "step-2")
    shown = run("verify", "step-2")
    assert shown.count("has no manifest with hashes") == 2
    assert "shard 3/3: header, sizes and sha256 fit" in shown
    assert "no manifest to verify it" in run("verify", "step-2", "--hash-required", status=1)
    for step in (0, 1):
        manifest(folder / f"step-{step}")
    found = json.loads(run("verify", "step-2", "--hash-required", "--json"))
    assert [(file["name"], file["is_compared"]) for file in found["files"]] == [
        ("../step-0/model.safetensors", True),
        ("../step-1/model.safetensors", True),
        ("model.safetensors", True),
    ]
    assert found["algorithm"] == "sha256"
    damage(folder / "step-0", -1)
    shown = run("verify", "step-2", status=1)
    assert "1 of 3 files wrong" in shown
    assert "../step-0/model.safetensors: the file is damaged" in shown


def test_verify_checks_positions_without_a_manifest(folder: Path) -> None:
    raw = bytearray((folder / "step-1" / "model.safetensors").read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    begin, end = header["/stio.delta/0/positions"]["data_offsets"]
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start + begin : start + end] = b"\xfe" * (end - begin)
    (folder / "step-1" / "model.safetensors").write_bytes(raw)
    shown = run("verify", "step-2", status=1)
    assert "../step-1/model.safetensors: the positions of a delta lead past the end" in shown


def test_verify_of_a_broken_chain(folder: Path, states: list[State]) -> None:
    shutil.rmtree(folder / "step-0")
    assert "base of this delta is missing" in run("verify", "step-2", status=2)
    write_checkpoint(folder / "step-0", states[0], {"stio.id": "f" * 32})
    assert "was replaced" in run("verify", "step-2", status=1)


def test_bench_measures_full_checkpoints(folder: Path) -> None:
    assert f"measure {folder / 'step-0'}" in run("bench", "step-2", status=2)


# diff


def test_diff_compares_values_of_deltas(folder: Path, states: list[State], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stio.cli.diff.PIECE_BYTES", 3 << 8)  # so that a tensor is compared in many pieces
    assert "equal, 4 tensors compared by values" in run("diff", "full", "step-2")
    assert "equal" in run("diff", "step-2", "full")
    found = json.loads(run("diff", "step-2", "step-1", "--json", status=1))
    differing = {one["name"]: one["difference"]["num_differing"] for one in found["differences"]}
    assert differing == {
        name: int((states[1][name].view(torch.uint8) != states[2][name].view(torch.uint8)).sum())
        if name == "mask"
        else int((states[1][name] != states[2][name]).sum())
        for name in ("w", "mask", "new")
    }
    assert "equal" in run("diff", "--header-only", "step-0", "step-2")
