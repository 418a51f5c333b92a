"""`stio convert`: what it says to terminals, pipes and programs, how it fails, and what Ctrl-C leaves behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from click.testing import Result
from commands import interrupted, run, terminal
from crash.zygote import Zygote
from safetensors.torch import load_file

import stio.sync


def convert(*arguments: object, status: int = 0) -> Result:
    return run("convert", *arguments, status=status)


def refused(*arguments: object) -> str:
    done = convert(*arguments, status=2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save({"state_dict": {"a": torch.ones(3, 4), "b": torch.arange(5)}, "epoch": 2}, tmp_path / "m.pt")
    return tmp_path / "m.pt"


def test_converts(source: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.safetensors"
    done = convert(source, one, "--key", "state_dict", "--dtype", "bfloat16")
    assert done.stdout.startswith(f"{one}: 1 file, 64 B in ")
    assert done.stderr == ""  # no bar in a pipe
    found = load_file(one)
    assert (found["a"].dtype, found["b"].tolist()) == (torch.bfloat16, [0, 1, 2, 3, 4])


@pytest.mark.parametrize("name", ["bfloat16", "BF16", "bf16", "torch.bfloat16"])
def test_a_dtype_has_two_names(source: Path, tmp_path: Path, name: str) -> None:
    convert(source, tmp_path / "d.safetensors", "--key", "state_dict", "--dtype", name)
    assert load_file(tmp_path / "d.safetensors")["a"].dtype == torch.bfloat16


def test_json(source: Path, tmp_path: Path) -> None:
    done = convert(
        *(source, tmp_path / "d", "--key", "state_dict", "--max-shard-size", "48", "--hash", "sha256", "--json")
    )
    found = json.loads(done.stdout)
    assert found["files"] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert (found["total_bytes"], set(found["hashes"])) == (88, set(found["files"]))
    assert stio.sync.load(tmp_path / "d", verify=True)["a"].shape == (3, 4)


def test_errors_are_one_sentence(source: Path, tmp_path: Path) -> None:
    assert "--key state_dict" in refused(source, tmp_path / "d")
    assert "no such file" in refused(tmp_path / "none.pt", tmp_path / "d")
    assert "no such key" in refused(source, tmp_path / "d", "--key", "\x1b[2Jx")
    convert(source, tmp_path / "d.safetensors", "--key", "state_dict")
    assert "is a file of the source" in refused(tmp_path / "d.safetensors", tmp_path / "d.safetensors")
    assert "floating dtype" in refused(source, tmp_path / "d", "--dtype", "int8")
    assert "--dtype takes a floating dtype, such as " in refused(source, tmp_path / "d", "--dtype", "int8")
    unknown = refused(source, tmp_path / "d", "--dtype", "bfloat61")
    assert "--dtype takes the name of a dtype in torch or in the format, such as " in unknown
    assert "'bfloat16' or 'BF16'" in unknown
    assert unknown.endswith("; did you mean 'bfloat16'?")
    assert "is no size" in refused(source, tmp_path / "d", "--max-shard-size", "big")
    assert not (tmp_path / "d").exists()


def test_wrong_calls_are_2(source: Path) -> None:
    convert(source, status=2)
    convert(source, "d", "--hash", "md5", status=2)


def test_what_needs_trust_is_refused_without(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3), tmp_path / "module.pt")
    assert "--trust-pickle reads more" in refused(tmp_path / "module.pt", tmp_path / "d.safetensors")


@pytest.mark.slow
def test_a_bar_on_terminals_only(zygote: Zygote, source: Path, tmp_path: Path) -> None:
    arguments = ("convert", source, tmp_path / "d.safetensors", "--key", "state_dict")
    assert "converting" in terminal(zygote.program, *arguments)
    without = terminal(zygote.program, *arguments, "--no-progress")
    assert "converting" not in without
    assert without.strip()


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, zygote: Zygote) -> None:
    """1.8 GB to be hashed and written are still ahead when the first staging directory shows."""
    folder = tmp_path / "m"
    folder.mkdir()
    for number in range(6):
        header = json.dumps(
            {f"w{number}": {"dtype": "U8", "shape": [300 << 20], "data_offsets": [0, 300 << 20]}}
        ).encode()
        with open(folder / f"s{number}.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + (300 << 20))  # zeros that take no room
    weight_map = {f"w{number}": f"s{number}.safetensors" for number in range(6)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    destination = tmp_path / "d.safetensors"
    destination.write_text("old")
    done = interrupted(
        zygote.program,
        *("convert", folder, destination, "--hash", "sha256"),
        when=lambda: bool(list(tmp_path.glob(".stio-*"))),
    )
    assert done == (-signal.SIGINT, "", "\nInterrupted.\n")
    assert destination.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["d.safetensors", "m"]
