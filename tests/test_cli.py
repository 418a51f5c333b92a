"""`stio inspect` and `stio verify`: what they say, to terminals, pipes and programs, and how they fail."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stio.cli import _size

LONG = "model." + "deep." * 60 + "weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {"a.weight": torch.zeros(3, 4), "a.bias": torch.zeros(4, dtype=torch.bfloat16), LONG: torch.tensor(1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    weight_map = {}
    for number in (1, 2):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({f"w{number}": torch.zeros(number, 2)}, folder / shard)
        weight_map[f"w{number}"] = shard
    index = {"metadata": {"total_size": 24}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def stio(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stio", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def inspect(*arguments: object) -> list[str]:
    done = stio("inspect", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def terminal(*arguments: object, **environment: str) -> str:
    """Run on a pseudoterminal of 80 columns and return all it was sent."""
    pty = pytest.importorskip("pty")
    main, side = pty.openpty()
    environ = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    environ |= {"TERM": "xterm-256color", "COLUMNS": "80", **environment}
    with subprocess.Popen(
        [sys.executable, "-m", "stio", *map(str, arguments)], stdin=side, stdout=side, stderr=side, env=environ
    ):
        os.close(side)
        received = b""
        try:
            while piece := os.read(main, 65536):
                received += piece
        except OSError:  # EIO: the other side was closed
            pass
    os.close(main)
    return received.decode()


def test_lists_a_file(model: Path) -> None:
    head, columns, *lines = inspect(model)
    assert head == f"{model}: 3 tensors, 64 B, 1 shard"
    assert columns.split() == ["name", "dtype", "shape", "size"]
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines[:3]}
    assert rows["a.weight"].split() == ["F32", "[3,", "4]", "48", "B"]
    assert rows["a.bias"].split() == ["BF16", "[4]", "8", "B"]
    assert rows[LONG].split() == ["I64", "[]", "8", "B"]  # the whole name: a pipe gets nothing cut
    assert lines[3:] == ["F32: 1 tensor, 48 B", "BF16: 1 tensor, 8 B", "I64: 1 tensor, 8 B", "metadata format: pt"]


def test_lists_shards(sharded: Path) -> None:
    for path in (sharded, sharded / "model.safetensors.index.json"):
        head, columns, first, second, total, metadata = inspect(path)
        assert head.endswith(": 2 tensors, 24 B, 2 shards")
        assert columns.split()[-1] == "shard"
        assert first.split()[-1] == "model-00001-of-00002.safetensors"
        assert second.split()[-1] == "model-00002-of-00002.safetensors"
        assert (total, metadata) == ("F32: 2 tensors, 24 B", "metadata total_size: 24")


def test_filter(model: Path) -> None:
    head, _, row, _, _ = inspect(model, "--filter", "*.bias")
    assert head.endswith(": 1 of 3 tensors, 8 B, 1 shard")
    assert row.startswith("a.bias")
    assert inspect(model, "--filter", "nothing")[0].endswith(": 0 of 3 tensors, 0 B, 1 shard")


def test_json_is_what_the_official_reader_sees(sharded: Path) -> None:
    found: dict[str, Any] = json.loads(stio("inspect", sharded, "--json").stdout)
    assert found["num_tensors"] == 2
    assert found["dtypes"] == {"F32": {"num_tensors": 2, "nbytes": 24}}
    for tensor in found["tensors"]:
        data = (sharded / tensor["shard"]).read_bytes()
        assert len(data) == tensor["file_offset"] + tensor["nbytes"]
    sizes = {shard["name"]: shard["file_bytes"] for shard in found["shards"]}
    assert sizes == {path.name: path.stat().st_size for path in sharded.glob("*.safetensors")}


def test_aliases_are_shown(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "m.safetensors", metadata={"stio.aliases": '{"tied": "w"}'})
    assert "alias tied = w" in inspect(tmp_path)


def test_no_torch(model: Path) -> None:
    code = (
        "import sys; from stio.cli import main; main(['inspect', sys.argv[1]], standalone_mode=False);"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\nrow\u202e\x9b31m"
    save_file({evil: torch.zeros(1)}, tmp_path / "m.safetensors", metadata={evil: evil})
    for text in (stio("inspect", tmp_path).stdout, terminal("inspect", tmp_path, NO_COLOR="1")):
        assert r"\x1b]0;owned\x07\x1b[2J\nrow\u202e\x9b31m" in text
        assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(text)
    assert json.loads(stio("inspect", tmp_path, "--json").stdout)["tensors"][0]["name"] == evil


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    save_file({"[red]w[/red] :smile:": torch.zeros(1)}, tmp_path / "m.safetensors")
    assert "[red]w[/red] :smile:" in terminal("inspect", tmp_path, NO_COLOR="1")


def test_a_narrow_terminal_gets_whole_names(model: Path) -> None:
    assert LONG in "".join(line.split(" ")[0] for line in terminal("inspect", model, NO_COLOR="1").splitlines())


def test_colours_on_terminals_only(model: Path) -> None:
    assert "\x1b[" in terminal("inspect", model)
    assert "\x1b[" not in terminal("inspect", model, NO_COLOR="1")
    assert "\x1b[" not in stio("inspect", model).stdout


def test_names_beyond_the_encoding(tmp_path: Path) -> None:
    save_file({"née": torch.zeros(1)}, tmp_path / "m.safetensors")
    done = stio("inspect", tmp_path, PYTHONIOENCODING="cp1251")
    assert (done.returncode, r"n\xe9e" in done.stdout) == (0, True)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_bad_files_are_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    done = stio("inspect", path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {path}"[:60])


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        done = stio("inspect", path)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)


def test_wrong_calls_are_2() -> None:
    assert stio("inspect").returncode == 2
    assert stio("inspect", "x", "--no-such-option").returncode == 2
    assert stio("no-such-command").returncode == 2
    assert stio("--version").stdout.startswith("stio, version ")


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    save_file({f"tensor.{k:05}": torch.zeros(1) for k in range(5000)}, tmp_path / "m.safetensors")
    with subprocess.Popen(
        [sys.executable, "-m", "stio", "inspect", str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_missing_extras_are_named(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import stio.__main__"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "stio: the command line needs two more packages: pip install 'stio[cli]'\n"


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (7 * 10**15, "7,000.0 TB")]
)
def test_sizes(nbytes: int, text: str) -> None:
    assert _size(nbytes) == text


# `stio verify`.


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
    done = stio("verify", *arguments)
    assert (done.returncode, done.stderr) == (status, "")
    return done.stdout.splitlines()


def test_verifies_hashes(sharded: Path) -> None:
    note(sharded)
    assert verified(sharded) == [
        "model-00001-of-00002.safetensors: header and sizes fit, sha256 as in the manifest (1 tensor, 80 B)",
        "model-00002-of-00002.safetensors: header and sizes fit, sha256 as in the manifest (1 tensor, 88 B)",
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
    assert first.startswith("model-00001-of-00002.safetensors: ")
    assert "its sha256 is not what the manifest says (expected " in first
    assert "sha256 as in the manifest" in second
    assert "the manifest does not name this file" in third
    assert rest == [
        f"warning: {sharded}: the index claims total_size 24, the shards hold 36 bytes",
        f"{sharded}: 2 of 3 files wrong",
    ]


def test_no_manifest_is_said(model: Path) -> None:
    assert verified(model) == [
        f"model.safetensors: header and sizes fit, not compared with a hash (3 tensors, {_size(model.stat().st_size)})",
        "no manifest: nothing says what the bytes should be",
        f"{model}: ok",
    ]
    done = stio("verify", model, "--hash-required")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "has no manifest to be verified against" in line


def test_verify_as_json(sharded: Path) -> None:
    note(sharded)
    damage(sharded / "model-00002-of-00002.safetensors")
    done = stio("verify", sharded, "--json")
    found = json.loads(done.stdout)
    problem = found["files"][1].pop("problem")
    assert "sha256 is not what the manifest says" in problem
    assert (done.returncode, found) == (
        1,
        {
            "path": str(sharded),
            "ok": False,
            "algorithm": "sha256",
            "files": [
                {
                    "name": "model-00001-of-00002.safetensors",
                    "file_bytes": 80,
                    "num_tensors": 1,
                    "ok": True,
                    "problem": None,
                },
                {"name": "model-00002-of-00002.safetensors", "file_bytes": 88, "num_tensors": 1, "ok": False},
            ],
            "warnings": [],
        },
    )
    (sharded / "model.safetensors.manifest.json").unlink()
    assert json.loads(stio("verify", sharded, "--json").stdout)["algorithm"] is None


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
    assert lines[1:] == [
        f"warning: the BOOL tensor 'two' holds bytes other than 0 and 1, the first one 2 at byte {start + 4:,} of m.safetensors",
        f"warning: the BOOL tensor 'far' holds bytes other than 0 and 1, the first one 255 at byte {size - 3:,} of m.safetensors",
        f"warning: the BOOL tensor '\\\\x1b[2J' holds bytes other than 0 and 1, the first one 2 at byte {size - 1:,} of m.safetensors",
        "no manifest: nothing says what the bytes should be",
        f"{path}: ok",
    ]
    assert len(json.loads(stio("verify", path, "--json").stdout)["warnings"]) == 3


def test_verify_refuses_what_a_load_refuses(tmp_path: Path, sharded: Path) -> None:
    """Holes, tensors that the index leaves out, missing shards, malformed manifests: one line, status 1."""
    hole = {"w": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}
    text = json.dumps(hole).encode()
    path = tmp_path / "hole.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"ab")
    note(sharded).write_text("[]")
    cases = [path, sharded, tmp_path / "absent"]
    (tmp_path / "extra").mkdir()
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "extra" / "m.safetensors")
    (tmp_path / "extra" / "m.safetensors.index.json").write_text('{"weight_map": {"a": "m.safetensors"}}')
    for case in [*cases, tmp_path / "extra"]:
        done = stio("verify", case)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("Error: ")


def test_verify_escapes_what_a_terminal_would_obey(tmp_path: Path) -> None:
    folder = tmp_path / "\x1b[2J\nx"
    folder.mkdir()
    path = folder / "\x1b]0;owned\x07.safetensors"
    save_file({"w": torch.zeros(1)}, path)
    note(folder, path.name + ".manifest.json")
    damage(path)
    for source, arguments in ((folder, []), (path, []), (path, ["--json"])):
        done = stio("verify", source, *arguments)
        assert done.returncode == 1
        assert not {"\x1b", "\x07"} & set(done.stdout)
    assert json.loads(done.stdout)["files"][0]["name"] == path.name


def test_verify_with_a_package_that_is_not_there(sharded: Path) -> None:
    manifest = {"version": 1, "algorithm": "xxh3", "files": {}}
    (sharded / "model.safetensors.manifest.json").write_text(json.dumps(manifest))
    code = "import sys; sys.modules['xxhash'] = None; from stio.cli import main; main(['verify', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", code, sharded], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: the hash xxh3 comes from the package xxhash: pip install 'stio[hash]'\n"


def test_verify_needs_no_torch(sharded: Path) -> None:
    note(sharded)
    code = (
        "import sys; from stio.cli import main; main(['verify', sys.argv[1]], standalone_mode=False);"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, sharded], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_interrupt_ends_a_verification(tmp_path: Path) -> None:
    """The threads that hash are gone before the process is."""
    code = """
import itertools, os, signal, sys
from stio import integrity
from stio.cli import main
turns = itertools.count()
def hash_region(hasher, region):
    if next(turns) == 0:
        os.kill(os.getpid(), signal.SIGINT)
integrity.hash_region = hash_region
main(["verify", sys.argv[1]])
"""
    for number in range(4):
        save_file({f"w{number}": torch.zeros(1 << 20)}, tmp_path / f"m{number}.safetensors")
    weight_map = {f"w{number}": f"m{number}.safetensors" for number in range(4)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    note(tmp_path)
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "\nAborted!\n")
