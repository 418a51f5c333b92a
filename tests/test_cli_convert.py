"""`stio convert`: what it says to terminals, pipes and programs, how it fails, and what Ctrl-C leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import stio.sync


def convert(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "stio", "convert", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    return done


def refused(*arguments: object, status: int = 1) -> str:
    done = convert(*arguments, status=status)
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
    assert done.stdout.startswith(f"{one}: 1 file, 64 bytes in ")
    assert done.stderr == ""  # no bar in a pipe
    found = load_file(one)
    assert (found["a"].dtype, found["b"].tolist()) == (torch.bfloat16, [0, 1, 2, 3, 4])


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
    assert "is a file of the source" in refused(tmp_path / "d.safetensors", tmp_path / "d.safetensors", status=2)
    assert "floating dtype" in refused(source, tmp_path / "d", "--dtype", "int8", status=2)
    assert "is no size" in refused(source, tmp_path / "d", "--max-shard-size", "big", status=2)
    assert not (tmp_path / "d").exists()


def test_wrong_calls_are_2(source: Path) -> None:
    convert(source, status=2)
    convert(source, "d", "--hash", "md5", status=2)


def test_trust_is_said_aloud(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3), tmp_path / "module.pt")
    assert "trust_pickle" in refused(tmp_path / "module.pt", tmp_path / "d.safetensors")
    done = convert(tmp_path / "module.pt", tmp_path / "d.safetensors", "--trust-pickle")
    assert "can run any code" in done.stderr


def test_help_and_listing_cost_no_torch() -> None:
    code = (
        "import sys; from stio.cli import main; main(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "convert" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_a_bar_on_terminals_only(source: Path, tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    for flag, drawn in (((), True), (("--no-progress",), False)):
        main, side = pty.openpty()
        arguments = ["convert", str(source), str(tmp_path / "d.safetensors"), "--key", "state_dict", *flag]
        environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "CI")}
        with subprocess.Popen(
            [sys.executable, "-m", "stio", *arguments],
            stdin=side,
            stdout=subprocess.DEVNULL,
            stderr=side,
            env=environment | {"TERM": "xterm-256color", "COLUMNS": "100"},
        ):
            os.close(side)
            received = b""
            try:
                while piece := os.read(main, 65536):
                    received += piece
            except OSError:  # EIO: the other side was closed
                pass
        os.close(main)
        assert (b"converting" in received) == drawn


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    """600 MB to be hashed and written are still ahead when the first staging directory shows."""
    folder = tmp_path / "m"
    folder.mkdir()
    for number in range(6):
        save_file({f"w{number}": torch.zeros(100 << 20, dtype=torch.uint8)}, folder / f"s{number}.safetensors")
    weight_map = {f"w{number}": f"s{number}.safetensors" for number in range(6)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    destination = tmp_path / "d.safetensors"
    destination.write_text("old")
    process = subprocess.Popen(
        [sys.executable, "-m", "stio", "convert", str(folder), str(destination), "--hash", "sha256"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".stio-*")):  # it has begun to write
        assert process.poll() is None
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error.strip()) == (1, "", "Aborted!")
    assert destination.read_text() == "old"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["d.safetensors", "m"]
