"""`stio verify`: what it finds, what it says, how it ends."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from commands import large_imports, refused, run, write_model, write_sharded
from crash.zygote import Zygote
from safetensors.torch import save_file
from support import run_python

from stio.text import show_bytes


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.safetensors", "n")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "sharded")


def note(folder: Path, name: str = "model.safetensors.manifest.json") -> Path:
    """Write the manifest that a save would leave."""
    files = {
        path.name: [{"nbytes": path.stat().st_size, "digest": hashlib.sha256(path.read_bytes()).hexdigest()}]
        for path in folder.glob("*.safetensors")
    }
    (folder / name).write_text(json.dumps({"version": 1, "algorithm": "sha256", "files": files}))
    return folder / name


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def verified(*arguments: object, status: int = 0) -> list[str]:
    done = run("verify", *arguments, status=status)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_verifies_hashes(sharded: Path) -> None:
    note(sharded)
    assert verified(sharded) == [
        "shard 1/2: header, sizes and sha256 fit (1 tensor, 8 B)",
        "shard 2/2: header, sizes and sha256 fit (1 tensor, 16 B)",
        f"{sharded}: ok",
    ]
    assert verified(sharded, "--hash-required") == verified(sharded / "model.safetensors.index.json")


def test_c102_every_damaged_file_is_named(sharded: Path) -> None:
    save_file({"w3": torch.zeros(3)}, sharded / "model-00003-of-00003.safetensors")
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["w3"] = "model-00003-of-00003.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    manifest = json.loads(note(sharded).read_text())
    del manifest["files"]["model-00003-of-00003.safetensors"]
    (sharded / "model.safetensors.manifest.json").write_text(json.dumps(manifest))
    damage(sharded / "model-00001-of-00002.safetensors")
    first, second, third, *rest = verified(sharded, status=1)
    assert first.startswith("shard 1/3, model-00001-of-00002.safetensors: ")
    assert "its sha256 differs from the manifest (expected " in first
    assert "header, sizes and sha256 fit" in second
    assert second.startswith("shard 2/3: ")
    assert "the manifest does not name this file" in third
    assert third.startswith("shard 3/3, model-00003-of-00003.safetensors: ")
    assert rest == [
        f"warning: {sharded}: the index claims total_size 24, the shards hold 36 bytes",
        f"{sharded}: 2 of 3 files wrong",
    ]


def test_no_manifest_is_said(model: Path) -> None:
    found = "header and sizes fit (3 tensors, 64 B)"
    none = "there is no manifest with hashes: headers and sizes were checked, and not the values of tensors"
    assert verified(model) == [none, f"{model}: ok, {found}"]
    assert verified(model.parent) == [f"model.safetensors: {found}", none, f"{model.parent}: ok"]
    (why,) = verified(model, "--hash-required", status=1)
    assert why.startswith(f"{model}: wrong: the checkpoint has no manifest to verify it")


def test_each_name_is_said_once(model: Path) -> None:
    note(model.parent, model.name + ".manifest.json")
    note(model.parent)
    damage(model)
    (alone,) = verified(model, status=1)
    assert alone.startswith(f"{model}: wrong: the file is damaged or another one")
    assert alone.count(model.name) == 1
    first, verdict = verified(model.parent, status=1)
    assert first.startswith("model.safetensors: the file is damaged or another one")
    assert verdict == f"{model.parent}: 1 of 1 file wrong"
    model.write_bytes(b"")
    (alone,) = verified(model, status=1)
    assert alone.count(model.name) == 1


def test_verify_names_checkpoints_below_that_it_did_not_check(sharded: Path) -> None:
    for name in ("step-3", "checkpoint-10", "lib64", "1_Pooling", ".step-5"):
        (sharded / name).mkdir()
    (sharded / "step-4").write_text("no directory")
    assert "were not checked, and may be checkpoints: checkpoint-10, step-3\n" in run("verify", sharded).output


def test_verify_as_json(sharded: Path) -> None:
    note(sharded)
    damage(sharded / "model-00002-of-00002.safetensors")
    done = run("verify", sharded, "--json", status=1)
    found = json.loads(done.stdout)
    problem = found["files"][1].pop("problem")
    assert "sha256 differs from the manifest" in problem
    first = {
        "name": "model-00001-of-00002.safetensors",
        "file_bytes": 80,
        "data_bytes": 8,
        "num_tensors": 1,
        "is_compared": True,
        "ok": True,
        "problem": None,
    }
    second = {
        "name": "model-00002-of-00002.safetensors",
        "file_bytes": 88,
        "data_bytes": 16,
        "num_tensors": 1,
        "is_compared": True,
        "ok": False,
    }
    assert found == {
        "path": str(sharded),
        "ok": False,
        "problem": None,
        "algorithm": "sha256",
        "files": [first, second],
        "warnings": [],
    }
    (sharded / "model.safetensors.manifest.json").unlink()
    assert json.loads(run("verify", sharded, "--json").stdout)["algorithm"] is None


def write_bools(path: Path, **tensors: bytes) -> Path:
    header, data = {}, b""
    for name, content in tensors.items():
        header[name] = {"dtype": "BOOL", "shape": [len(content)], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_c70_bool_bytes_other_than_0_and_1(tmp_path: Path) -> None:
    far = bytes(5 << 20) + b"\1\xff\2"
    path = write_bools(
        tmp_path / "m.safetensors", good=b"\0\1\1", two=b"\0\2\xff", far=far, empty=b"", **{"\x1b[2J": b"\2"}
    )
    size = path.stat().st_size
    start = size - len(far) - 7
    lines = verified(path)
    assert lines == [
        f"warning: the BOOL tensor 'two' holds bytes other than 0 and 1, the first one 2 at byte {start + 4:,} of m.safetensors",
        f"warning: the BOOL tensor 'far' holds bytes other than 0 and 1, the first one 255 at byte {size - 3:,} of m.safetensors",
        f"warning: the BOOL tensor '\\\\x1b[2J' holds bytes other than 0 and 1, the first one 2 at byte {size - 1:,} of m.safetensors",
        "there is no manifest with hashes: headers and sizes were checked, and not the values of tensors",
        f"{path}: ok, header and sizes fit (5 tensors, {show_bytes(len(far) + 7)})",
    ]
    assert len(json.loads(run("verify", path, "--json").stdout)["warnings"]) == 3


def test_verify_refuses_what_a_load_refuses(tmp_path: Path, sharded: Path) -> None:
    """Holes, tensors that the index leaves out, malformed manifests are damage; what is not there is an error."""
    hole = {"w": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}
    text = json.dumps(hole).encode()
    path = tmp_path / "hole.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"ab")
    note(sharded).write_text("[]")
    (tmp_path / "extra").mkdir()
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "extra" / "m.safetensors")
    (tmp_path / "extra" / "m.safetensors.index.json").write_text('{"weight_map": {"a": "m.safetensors"}}')
    for case in (path, sharded, tmp_path / "extra"):
        (why,) = verified(case, status=1)
        assert why.startswith(f"{case}: wrong: ")
        found = json.loads(run("verify", case, "--json", status=1).stdout)
        assert (found["ok"], found["files"]) == (False, [])
        assert found["problem"].partition(": ")[2] in why
    assert "check the path" in refused("verify", tmp_path / "absent")


def test_verify_escapes_what_a_terminal_would_obey(tmp_path: Path) -> None:
    folder = tmp_path / "\x1b[2J\nx"
    folder.mkdir()
    path = folder / "\x1b]0;owned\x07.safetensors"
    save_file({"w": torch.zeros(1)}, path)
    note(folder, path.name + ".manifest.json")
    damage(path)
    for source, arguments in ((folder, []), (path, []), (path, ["--json"])):
        done = run("verify", source, *arguments, status=1)
        assert not {"\x1b", "\x07"} & set(done.stdout)
    assert json.loads(done.stdout)["files"][0]["name"] == path.name


def test_verify_with_a_package_that_is_not_there(sharded: Path, program_zygote: Zygote) -> None:
    manifest = {"version": 1, "algorithm": "xxh3", "files": {}}
    (sharded / "model.safetensors.manifest.json").write_text(json.dumps(manifest))
    code = "import sys; sys.modules['xxhash'] = None; from stio.cli.main import main; main(['verify', sys.argv[1]])"
    done = run_python(code, sharded, python=program_zygote.python)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: the hash xxh3 comes from the package xxhash: pip install 'stio-torch[hash]'\n"


def test_verify_needs_no_torch(sharded: Path, program_zygote: Zygote) -> None:
    note(sharded)
    assert large_imports(program_zygote.python, "verify", sharded) == []


def test_an_interrupt_ends_a_verification(tmp_path: Path, program_zygote: Zygote) -> None:
    """The threads that hash are gone before the process is."""
    code = """
import itertools, os, signal, sys
from stio.storage.checkpoint import integrity
from stio.cli.main import main
turns = itertools.count()
class Hasher:
    def update(self, data):
        if next(turns) == 0:
            os.kill(os.getpid(), signal.SIGINT)
    def hexdigest(self):
        return "0" * 64
integrity.new_hasher = lambda algorithm: Hasher()
main(["verify", sys.argv[1]])
"""
    for number in range(4):
        save_file({f"w{number}": torch.zeros(1 << 20)}, tmp_path / f"m{number}.safetensors")
    weight_map = {f"w{number}": f"m{number}.safetensors" for number in range(4)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    note(tmp_path)
    done = run_python(code, tmp_path, python=program_zygote.python, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nInterrupted.\n")
