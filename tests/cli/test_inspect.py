"""`stio inspect`: what it says, to terminals, pipes and programs, and how it fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import large_imports, piped, refused, run, terminal, write_model, write_sharded
from crash.zygote import Zygote
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm.utils import disp_len

import stio

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
    assert lines[3:] == [
        "F32 (float32): 1 tensor, 48 B",
        "BF16 (bfloat16): 1 tensor, 8 B",
        "I64 (int64): 1 tensor, 8 B",
        "metadata format: pt",
    ]


def test_lists_shards(sharded: Path) -> None:
    for path in (sharded, sharded / "model.safetensors.index.json"):
        head, columns, first, second, *shards, total, metadata = inspect(path)
        assert head.endswith(": 2 tensors, 24 B, 2 shards")
        assert columns.split()[-1] == "shard"
        assert (first.split()[-1], second.split()[-1]) == ("1/2", "2/2")
        assert shards == [
            "shard 1/2: model-00001-of-00002.safetensors, 8 B",
            "shard 2/2: model-00002-of-00002.safetensors, 16 B",
        ]
        assert (total, metadata) == ("F32 (float32): 2 tensors, 24 B", "metadata total_size: 24")
    assert inspect(sharded, "--filter", "w2")[3:-2] == ["shard 2/2: model-00002-of-00002.safetensors, 16 B"]


def test_filter(model: Path) -> None:
    head, _, row, _, _ = inspect(model, "--filter", "*.bias")
    assert head.endswith(": 1 of 3 tensors, 8 B, 1 shard")
    assert row.startswith("a.bias")


@pytest.mark.parametrize("more", [[], ["--json"], ["--tree"]])
def test_nothing_matches(model: Path, more: list[str]) -> None:
    text = refused("inspect", model, "--filter", "weight", *more, status=3)
    assert text.startswith(f"Error: {model}: nothing matches --filter 'weight'; a glob is for the whole name")


def test_an_alias_that_matches_is_no_tensor_and_no_error(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "m.safetensors", metadata={"stio.aliases": '{"tied": "w"}'})
    assert "alias tied = w" in inspect(tmp_path, "--filter", "tied")


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
    shown = inspect(tmp_path)
    assert "alias tied = w" in shown
    assert shown[0].endswith(": 1 tensor and 1 alias, 8 B, 1 shard")


def test_no_torch(model: Path, program_zygote: Zygote) -> None:
    assert large_imports(program_zygote.python, "inspect", model) == []


def test_hostile_names_do_not_reach_the_terminal(program: list[str], tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\nrow\u202e\x9b31m"
    save_file({evil: torch.zeros(1)}, tmp_path / "m.safetensors", metadata={evil: evil})
    for text in (run("inspect", tmp_path).stdout, terminal(program, "inspect", tmp_path, NO_COLOR="1")):
        assert r"\x1b]0;owned\x07\x1b[2J\nrow\u202e\x9b31m" in text
        assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(text)
    assert json.loads(run("inspect", tmp_path, "--json").stdout)["tensors"][0]["name"] == evil


def test_markup_in_names_is_text(program: list[str], tmp_path: Path) -> None:
    save_file({"[red]w[/red] :smile:": torch.zeros(1)}, tmp_path / "m.safetensors")
    assert "[red]w[/red] :smile:" in terminal(program, "inspect", tmp_path, NO_COLOR="1")


def large(folder: Path) -> Path:
    """Write a checkpoint of three shards, with 40 layers and odd names."""
    tensors: dict[str, torch.Tensor] = {"lm_head.weight": torch.zeros(12, 4, dtype=torch.bfloat16)}
    for layer in range(40):
        for name in ("self_attn.q_proj.weight", "mlp.experts.103.gate_up_projection.weight", "input_layernorm.weight"):
            tensors[f"model.language_model.layers.{layer}.{name}"] = torch.zeros(4, dtype=torch.bfloat16)
    tensors["odd name with spaces, and a number 12345678901234567890123456789"] = torch.zeros(1)
    tensors["模型." * 20 + "weight"] = torch.zeros(1)
    stio.sync.save(tensors, folder, max_shard_size=400)
    return folder


@pytest.mark.matrix
@pytest.mark.parametrize("width", [60, 80, 120])
def test_c246_a_table_fits_the_terminal(program: list[str], tmp_path: Path, width: int) -> None:
    shown = terminal(program, "inspect", large(tmp_path / "m"), NO_COLOR="1", COLUMNS=str(width))
    lines = shown.splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("name "))  # the path above may take several
    end = next(k for k, line in enumerate(lines) if line.startswith("shard 1/3"))
    columns, *rows = lines[start:end]
    assert columns.split() == ["name", "dtype", "shape", "size", "shard"]
    assert max(disp_len(line) for line in [columns, *rows]) <= width
    of_tensors = [row for row in rows if re.fullmatch(r".+ (BF16|F32) +\[[\d, ]+\] +\d+ B +[123]/3", row)]
    assert len(of_tensors) == 123
    names = "".join(row[: columns.index("dtype")].rstrip() for row in rows)
    layers = [int(number) for number in re.findall(r"\.(\d+)\.self_attn.q_proj.weight", names)]
    assert layers == list(range(40)), "each name is whole, in natural order"


def test_nothing_is_shortened_in_pipes_nor_with_wide(program: list[str], tmp_path: Path) -> None:
    folder = large(tmp_path / "m")
    wide = terminal(program, "inspect", folder, "--wide", NO_COLOR="1")
    narrow = piped(program, "inspect", folder, COLUMNS="40").stdout
    assert wide.replace("\r", "").partition("\nname ")[2] == narrow.partition("\nname ")[2]
    with safe_open(folder / "model-00001-of-00003.safetensors", "pt") as file:
        assert all(f"{name} " in wide for name in file.keys())  # noqa: SIM118  # no mapping


def test_the_order_of_numbers_is_natural(tmp_path: Path) -> None:
    lines = inspect(write_names(tmp_path / "m.safetensors", *(f"h.{k}.w" for k in range(12))))
    assert [line.split()[0] for line in lines[2:14]] == [f"h.{k}.w" for k in range(12)]


def test_many_shards_are_not_all_listed_on_a_terminal(program: list[str], tmp_path: Path) -> None:
    stio.sync.save({f"w{k}": torch.zeros(3) for k in range(12)}, tmp_path / "m", max_shard_size=12)
    text = terminal(program, "inspect", tmp_path / "m", NO_COLOR="1")
    assert "shard 1/12: model-00001-of-00012.safetensors" in text
    assert "4 more shards: --wide lists them" in text
    assert "shard 9/12" not in text
    for whole in (
        terminal(program, "inspect", tmp_path / "m", "--wide", NO_COLOR="1"),
        run("inspect", tmp_path / "m").stdout,
    ):
        assert "shard 9/12: model-00009-of-00012.safetensors" in whole


def test_a_tree_fits_the_terminal(program: list[str], tmp_path: Path) -> None:
    names = [f"model.{'very_long_module_name.' * 5}{k}.{'x' * 30}.weight" for k in range(3)] + ["模型" * 40]
    text = terminal(program, "inspect", write_names(tmp_path / "m.safetensors", *names), "--tree", NO_COLOR="1")
    _, *lines, _ = text.splitlines()
    assert max(map(disp_len, lines)) <= 80
    assert len([line for line in lines if line.endswith("F32 [2]  8 B")]) == 4


def test_colours_on_terminals_only(program: list[str], model: Path) -> None:
    assert "\x1b[" in terminal(program, "inspect", model)
    assert "\x1b[" not in terminal(program, "inspect", model, NO_COLOR="1")
    assert "\x1b[" not in run("inspect", model).stdout


@pytest.mark.matrix
@pytest.mark.parametrize("encoding", ["cp1251", "ascii"])
def test_names_beyond_the_encoding(program: list[str], tmp_path: Path, encoding: str) -> None:
    save_file({"née": torch.zeros(1)}, tmp_path / "m.safetensors", metadata={"née": "née"})
    done = piped(program, "inspect", tmp_path, PYTHONIOENCODING=encoding)
    assert (done.returncode, r"n\xe9e  " in done.stdout, r"metadata n\xe9e: n\xe9e" in done.stdout) == (0, True, True)
    assert r"n\xe9e: there is no such file" in piped(program, "inspect", "née", PYTHONIOENCODING=encoding).stderr


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
    done = run("inspect", model, "--filter", pattern, "--json", status=0 if shown else 3)
    assert not shown or json.loads(done.stdout)["num_tensors"] == shown


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
    assert total == "F32 (float32): 6 tensors, 48 B"
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
    assert "'x' is not a valid integer range" in refused("inspect", path, "--depth", "x")


def test_a_tree_of_hostile_names_is_bounded(tmp_path: Path) -> None:
    names = ["." * 5000, "a" + ".b" * 5000, "a" + ".b" * 4999, "\x1b[2J.\n.\0x"[:-2] + "y", ""]
    lines = inspect(write_names(tmp_path / "m.safetensors", *names), "--tree")
    assert max(line.count("│") + line.count("   ") for line in lines) < 40
    assert not {"\x1b", "\0"} & set("".join(lines))
