"""`stio inspect`: what it says, to terminals, pipes and programs, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import refused, run, stio, terminal, write_model, write_sharded
from safetensors.torch import save_file

LONG = "model." + "deep." * 60 + "weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.safetensors", LONG)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_sharded(tmp_path / "sharded")


def inspect(*arguments: object) -> list[str]:
    done = run("inspect", *arguments)
    assert done.stderr == ""
    return done.stdout.splitlines()


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
    found: dict[str, Any] = json.loads(run("inspect", sharded, "--json").stdout)
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
        "import sys; from stio.cli.main import main; main(['inspect', sys.argv[1]], standalone_mode=False);"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\nrow\u202e\x9b31m"
    save_file({evil: torch.zeros(1)}, tmp_path / "m.safetensors", metadata={evil: evil})
    for text in (run("inspect", tmp_path).stdout, terminal("inspect", tmp_path, NO_COLOR="1")):
        assert r"\x1b]0;owned\x07\x1b[2J\nrow\u202e\x9b31m" in text
        assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(text)
    assert json.loads(run("inspect", tmp_path, "--json").stdout)["tensors"][0]["name"] == evil


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    save_file({"[red]w[/red] :smile:": torch.zeros(1)}, tmp_path / "m.safetensors")
    assert "[red]w[/red] :smile:" in terminal("inspect", tmp_path, NO_COLOR="1")


def test_a_narrow_terminal_gets_whole_names(model: Path) -> None:
    assert LONG in "".join(line.split(" ")[0] for line in terminal("inspect", model, NO_COLOR="1").splitlines())


def test_colours_on_terminals_only(model: Path) -> None:
    assert "\x1b[" in terminal("inspect", model)
    assert "\x1b[" not in terminal("inspect", model, NO_COLOR="1")
    assert "\x1b[" not in run("inspect", model).stdout


def test_names_beyond_the_encoding(tmp_path: Path) -> None:
    save_file({"née": torch.zeros(1)}, tmp_path / "m.safetensors")
    done = stio("inspect", tmp_path, PYTHONIOENCODING="cp1251")
    assert (done.returncode, r"n\xe9e" in done.stdout) == (0, True)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_bad_files_are_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    assert refused("inspect", path).startswith(f"Error: {path}"[:60])


def test_nothing_there(tmp_path: Path) -> None:
    assert refused("inspect", tmp_path / "absent").endswith("there is no such file or directory; check the path")
    assert "give a directory with .safetensors files" in refused("inspect", tmp_path)


def test_a_link_that_leads_out(tmp_path: Path, model: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "m.safetensors").symlink_to(model)
    assert "; copy the file there if you trust it" in refused("inspect", tmp_path / "folder")


@pytest.mark.parametrize(
    ("pattern", "shown"),
    [("*.weight", 2), ("/weight$/", 2), ("/^a\\./", 2), ("a.*", 2), ("a", 0), ("/a/", 2), ("/", 0), ("//", 3)],
)
def test_globs_and_expressions(model: Path, pattern: str, shown: int) -> None:
    assert json.loads(run("inspect", model, "--filter", pattern, "--json").stdout)["num_tensors"] == shown


def test_a_malformed_expression_is_an_error(model: Path) -> None:
    assert "without the slashes it is a glob" in refused("inspect", model, "--filter", "/(/")


# The tree.


def write_names(path: Path, *names: str) -> Path:
    save_file({name: torch.zeros(2) for name in names}, path)
    return path


def test_a_tree_groups_by_dots_and_sorts_numbers(tmp_path: Path) -> None:
    names = ["h.10.w", "h.2.w", "h.2.b", "embed", "head.deep.er.w", "h.2"]
    head, *lines, total = inspect(write_names(tmp_path / "m.safetensors", *names), "--tree")
    assert head.endswith(": 6 tensors, 48 B, 1 shard")
    assert total == "F32: 6 tensors, 48 B"
    assert lines == [
        f"{label:17}  {text}"
        for label, text in (
            ("├─ embed", "F32 [2]  8 B"),
            ("├─ h", "4 tensors, 32 B"),
            ("│  ├─ 2", "F32 [2]  8 B"),
            ("│  │  ├─ b", "F32 [2]  8 B"),
            ("│  │  └─ w", "F32 [2]  8 B"),
            ("│  └─ 10.w", "F32 [2]  8 B"),
            ("└─ head.deep.er.w", "F32 [2]  8 B"),
        )
    ]


def test_depth_cuts_a_tree(tmp_path: Path) -> None:
    path = write_names(tmp_path / "m.safetensors", "h.0.w", "h.1.w", "x")
    assert inspect(path, "--depth", 1)[1:3] == ["├─ h  2 tensors, 16 B", "└─ x  F32 [2]  8 B"]
    assert len(inspect(path, "--depth", 2)) == len(inspect(path, "--tree")) == 6
    assert "Invalid value for '--depth'" in refused("inspect", path, "--depth", 0)


def test_a_tree_of_hostile_names_is_bounded(tmp_path: Path) -> None:
    names = ["." * 5000, "a" + ".b" * 5000, "a" + ".b" * 4999, "\x1b[2J.\n.\0x"[:-2] + "y", ""]
    lines = inspect(write_names(tmp_path / "m.safetensors", *names), "--tree")
    assert max(line.count("│") + line.count("   ") for line in lines) < 40
    assert not {"\x1b", "\0"} & set("".join(lines))


def test_a_tree_where_the_encoding_has_no_lines(tmp_path: Path) -> None:
    path = write_names(tmp_path / "m.safetensors", "h.0", "h.1")
    lines = stio("inspect", path, "--tree", PYTHONIOENCODING="ascii").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["`-", "|-", "`-"]
