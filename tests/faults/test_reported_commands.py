"""Faults 332 to 334: what `load`, `diff`, `inspect` and `verify` show in a terminal of 80 and 120 columns, and in a pipe.

A terminal is a pseudo-terminal of the given width, on which the real program runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import termios
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from crash.zygote import Zygote
from safetensors import safe_open
from support import save_file
from tqdm.utils import disp_len

from stio import sync
from stio.cli.diff import compare, differences
from stio.device.tensors import TORCH_DTYPES
from stio.text import show_bytes

LONG = "base_model.model.language_model.layers.{}.self_attention.rotary_projection.lora_A.default.weight"
WIDTHS = pytest.mark.parametrize("width", [80, 120])


def shown(zygote: Zygote, width: int, *arguments: object, colours: bool = False) -> str:
    """Return what the program shows on a terminal of some columns."""
    main_fd, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
    environment |= {"TERM": "xterm-256color"} | ({} if colours else {"NO_COLOR": "1"})
    command = [*zygote.program, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=environment)
    os.close(side)
    content = b""
    while True:
        try:
            content += os.read(main_fd, 65536)
        except OSError:
            break
    process.wait()
    os.close(main_fd)
    return content.decode().replace("\r\n", "\n")


def lines(zygote: Zygote, width: int, *arguments: object) -> list[str]:
    """Return the lines that are shown, none of them wider than the terminal."""
    found = shown(zygote, width, *arguments).splitlines()
    assert max(map(disp_len, found)) <= width, found
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with checkpoints of few, many and tied tensors, and with long names."""
    folder = tmp_path_factory.mktemp("terminal")
    with chdir(folder):
        generator = torch.Generator().manual_seed(1)
        few = {"wte": torch.randn(50, 8, generator=generator), "h.bias": torch.zeros(8), "n": torch.tensor(1)}
        many = {LONG.format(k): torch.randn(16, 4, generator=generator) for k in range(60)}
        tuned = {name: tensor + (k % 2) / 4 for k, (name, tensor) in enumerate(many.items())}
        tuned["new"] = tuned.pop(LONG.format(7))
        sync.save(few, "few.safetensors")
        sync.save(many, "many", max_shard_size="4kB", hash="sha256")
        sync.save(tuned, "tuned.safetensors")
        tie = torch.ones(30, 4)
        tied = {LONG.format(k): tie for k in range(40)}
        sync.save(tied, "tied.safetensors", metadata={"note": "word " * 200})
        sync.convert("many", "half.safetensors", dtype="bfloat16")
    return folder


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


# 332: a mapping is called one.


def test_c332_a_mapped_load_says_so() -> None:
    for memory, text in (("auto", " mapped on cpu in "), ("map", " mapped on cpu in "), ("copy", "kB on cpu in ")):
        done = run("load", "few.safetensors", "--device", "cpu", "--memory", memory)
        assert text in done.stdout
        found = json.loads(run("load", "few.safetensors", "--device", "cpu", "--memory", memory, "--json").stdout)
        assert found["mapped"] == (memory != "copy")
    lazy = run("load", "many", "--device", "cpu", "--memory", "lazy").stdout
    assert re.search(r" mapped on cpu in .* s, read when they are used\n", lazy)


def test_c332_what_is_not_mapped_does_not_say_so(tmp_path: Path) -> None:
    sync.save({}, tmp_path / "empty.safetensors")
    assert " on no device in " in run("load", tmp_path / "empty.safetensors", "--device", "cpu").stdout
    timeline = tmp_path / "t.json"
    done = run("load", "few.safetensors", "--device", "cpu", "--timeline", timeline)
    assert " mapped on cpu" in done.stdout and timeline.exists()


# 333: diff.


@pytest.mark.matrix
@WIDTHS
@pytest.mark.parametrize("other", ["tuned.safetensors", "half.safetensors"])
def test_c333_the_verdict_is_first_and_the_columns_are_aligned(zygote: Zygote, width: int, other: str) -> None:
    found = lines(zygote, width, "diff", "many", other, "--no-progress")
    assert found[0].startswith(f"many (A) and {other} (B): different: ")
    start = next(k for k, line in enumerate(found) if "dtype and shape" in line)
    column = found[start].index("dtype and shape")
    rows = [line for line in found[start + 1 :] if "more; --all" not in line]
    assert len(rows) > 5
    kinds = len("only in A") if other == "tuned.safetensors" else len("changed")
    names = "".join(row[kinds:column].strip() for row in rows)  # a name that has no room goes on in the next line
    assert all(LONG.format(k) in names for k in (0, 1, 2) if other == "half.safetensors" or k % 2)
    for row in rows:
        assert row[column:].startswith(("F32 ", "F32 [16, 4] -> BF16 [16, 4]")) or not row[column:]
        assert row[column - 1 : column] in (" ", "")


@pytest.mark.parametrize("arguments", [(), ("--header-only",), ("--tolerance", "0.001")])
def test_c333_many_differences_are_limited_unless_all_are_requested(arguments: tuple[str, ...]) -> None:
    found = run("diff", "many", "tuned.safetensors", *arguments, status=1).stdout.splitlines()
    every = run("diff", "many", "tuned.safetensors", *arguments, "--all", status=1).stdout.splitlines()
    assert found[0] == every[0]
    assert len(found) <= 26
    assert not any("--all" in line for line in every)
    if "--header-only" not in arguments:
        (more,) = [line for line in found if "--all" in line]
        assert re.fullmatch(r"differs +(\d+) more; --all lists them", more)
        differing = [line for line in every if line.startswith("differs")]
        assert len(differing) == 20 + int(re.findall(r"\d+", more)[0]) == 29
    assert [line.split()[3] for line in every if line.startswith("only in")] == [LONG.format(7), "new"]


@pytest.mark.slow
def test_c333_colours_are_for_terminals(zygote: Zygote) -> None:
    coloured = shown(zygote, 100, "diff", "many", "tuned.safetensors", "--no-progress", colours=True)
    assert "\x1b[31monly in A\x1b[0m" in coloured
    assert "\x1b[32monly in B\x1b[0m" in coloured
    assert "\x1b[33mdiffers  \x1b[0m" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert plain == shown(zygote, 100, "diff", "many", "tuned.safetensors", "--no-progress")
    assert "\x1b" not in run("diff", "many", "tuned.safetensors", status=1).stdout
    assert "\x1b[3" not in shown(zygote, 100, "diff", "many", "tuned.safetensors", "--no-progress")


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_c333_a_converted_checkpoint_is_compared_by_value(tmp_path: Path, dtype: str) -> None:
    sync.convert("few.safetensors", tmp_path / "c.safetensors", dtype=dtype)
    with safe_open("few.safetensors", "pt") as few, safe_open(tmp_path / "c.safetensors", "pt") as cast:
        gaps = (few.get_tensor("wte").double() - cast.get_tensor("wte").double()).abs()
    for sides in (("few.safetensors", tmp_path / "c.safetensors"), (tmp_path / "c.safetensors", "few.safetensors")):
        text = run("diff", *sides, status=1).stdout
        assert "different: 2 tensors with another dtype or shape; 1 tensor compared by values" in text
        assert f" {int((gaps > 0).sum())} of 400" in text
        assert run("diff", *sides, "--tolerance", "0.5").stdout.startswith(
            f"{sides[0]} and {sides[1]}: equal, 3 tensors compared by values, with a tolerance of 0.5"
        )
    found = json.loads(run("diff", "few.safetensors", tmp_path / "c.safetensors", "--json", status=1).stdout)
    assert [(one["kind"], one["name"]) for one in found["differences"]] == [("changed", "h.bias"), ("changed", "wte")]
    assert found["differences"][1]["difference"] == {
        "num_differing": int((gaps > 0).sum()),
        "max_abs": float(gaps.max()),
    }


def test_c333_a_converted_checkpoint_with_other_values_is_told(tmp_path: Path) -> None:
    values = torch.tensor([1.0, -2.0, 1e-9, 3e38, 0.5])
    other = values.bfloat16()
    other[1] = -2.02
    save_file({"w": values}, tmp_path / "a.safetensors")
    save_file({"w": other}, tmp_path / "b.safetensors")
    text = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", status=1).stdout
    assert "different: 1 tensor with another dtype or shape" in text
    assert "changed  w     F32 [5] -> BF16 [5]  3 of 5     " in text
    text = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--tolerance", "1e-3", status=1).stdout
    assert "different: 1 tensor with other values; 1 tensor compared by values, with a tolerance of 0.001" in text
    assert re.search(r"differs  w     F32 \[5\] -> BF16 \[5\]  2 of 5 ", text)
    assert (
        "another dtype or shape"
        in run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--header-only", status=1).stdout
    )


def test_c333_only_floats_of_one_shape_are_compared(tmp_path: Path) -> None:
    save_file({"i": torch.ones(4), "s": torch.ones(4), "b": torch.ones(4).bool()}, tmp_path / "a.safetensors")
    save_file({"i": torch.ones(4).int(), "s": torch.ones(2, 2).half(), "b": torch.ones(4)}, tmp_path / "b.safetensors")
    pairs = compare(str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), tolerance=9.0)
    assert [pair.kind for pair in pairs] == ["changed"] * 3


FLOATS = [name for name, dtype in TORCH_DTYPES.items() if dtype.is_floating_point and name not in ("F4", "F64")]


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wide", ["F64", "F32"])
def test_c333_two_dtypes_as_torch_would(dtype: str, wide: str) -> None:
    """Over many sizes of values, those below the smallest normal one too."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.exp(torch.empty(20_000, dtype=torch.float64).uniform_(-40, 5, generator=generator))
    if dtype == "F8_E8M0":
        sizes = 2.0 ** torch.randint(-20, 20, (20_000,), generator=generator).double()
    values = sizes.to(TORCH_DTYPES[wide])
    cast = values.float().to(TORCH_DTYPES[dtype])
    gaps = (values.double() - cast.double()).abs()
    raw = [one.view(torch.uint8).numpy().tobytes() for one in (values, cast)]
    found = differences(wide, raw[0], dtype, raw[1])
    assert found.num_differing == int((gaps > 0).sum())
    assert found.max_abs == (float(gaps.max()) if dtype != wide else None)
    assert differences(dtype, raw[1], wide, raw[0]) == found
    assert differences(wide, raw[0], dtype, raw[1], 1e-3).num_differing == int((gaps > 1e-3).sum())


def test_c333_special_values_of_two_dtypes() -> None:
    a = np.array([np.inf, -np.inf, np.nan, 1.0, np.inf, np.nan, 1e300], "<f8")
    b = np.array([np.inf, -np.inf, np.nan, np.nan, 1.0, 1.0, np.inf], "<f4")
    found = differences("F64", a.tobytes(), "F32", b.tobytes())
    assert found == (4, np.inf)
    assert differences("F64", a.tobytes(), "F32", b.tobytes(), 1e308).num_differing == 4
    assert differences("F64", b"", "F32", b"").max_abs is None


def test_c333_large_tensors_of_two_dtypes_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stio.cli.diff.PIECE_BYTES", 6 << 10)
    values = torch.arange(50_001, dtype=torch.float32)
    save_file({"w": values}, tmp_path / "a.safetensors")
    save_file({"w": values.double()}, tmp_path / "b.safetensors")
    steps: list[Any] = []
    sides = (str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"))
    (pair,) = compare(*sides, progress=lambda nbytes, total: steps.append(nbytes))
    assert (pair.kind, pair.difference) == ("changed", (0, 0.0))
    assert sum(steps) == values.nbytes
    (pair,) = compare(*sides, tolerance=0.0)
    assert pair.kind == "tolerated"


# 334: inspect and verify.


@pytest.mark.matrix
@WIDTHS
@pytest.mark.parametrize("name", ["few.safetensors", "many", "tied.safetensors", "tuned.safetensors"])
@pytest.mark.parametrize("command", [("inspect",), ("inspect", "--tree"), ("verify", "--no-progress")])
def test_c334_no_line_is_wider_than_the_terminal(
    zygote: Zygote, width: int, name: str, command: tuple[str, ...]
) -> None:
    assert lines(zygote, width, *command, name)[0]


@pytest.mark.matrix
@WIDTHS
def test_c334_some_aliases_are_shown_on_a_terminal(zygote: Zygote, width: int) -> None:
    found = lines(zygote, width, "inspect", "tied.safetensors")
    text = " ".join(map(str.strip, found))
    assert len([line for line in found if line.startswith("alias ")]) == 8
    assert "31 more aliases: --wide lists them" in found
    assert "stio.aliases" not in text
    assert re.search(r"metadata note: (word ?)+\.\.\. \(1,000 characters\)", text)


def test_c334_a_pipe_and_wide_get_all_of_them(zygote: Zygote) -> None:
    for text in (run("inspect", "tied.safetensors").stdout, shown(zygote, 80, "inspect", "tied.safetensors", "--wide")):
        text = "".join(text.split())  # a terminal breaks lines
        assert text.count("alias" + LONG[:4]) == 39
        assert f"alias{LONG.format(12)}={LONG.format(0)}" in text
        assert "word" * 200 in text
    assert len(json.loads(run("inspect", "tied.safetensors", "--json").stdout)["aliases"]) == 39


def test_c334_one_size_in_all_commands(tmp_path: Path) -> None:
    for name, nbytes in (("few.safetensors", 1640), ("many", 60 * 256)):
        size = show_bytes(nbytes)
        assert f" tensors, {size}, " in run("inspect", name).stdout
        assert f" tensors, {size} " in run("load", name, "--device", "cpu").stdout
        assert f", {size} in " in run("convert", name, tmp_path / f"{name}.copy").stdout
    assert "(3 tensors, 1.64 kB)" in run("verify", "few.safetensors").stdout
    shards = [line.split(", ") for line in run("inspect", "many").stdout.splitlines() if line.startswith("shard ")]
    verified = re.findall(r"tensors?, (.*)\)", run("verify", "many").stdout)
    assert [shard[1] for shard in shards] == verified


@pytest.mark.matrix
@pytest.mark.parametrize("given", ["broken", "broken/", "./broken", "broken/model.safetensors.index.json"])
@pytest.mark.parametrize("damage", ["header", "short", "text"])
def test_c334_verify_says_a_path_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, damage: str) -> None:
    monkeypatch.chdir(tmp_path)
    sync.save({f"t{k}": torch.ones(100) for k in range(6)}, "broken", max_shard_size="800")
    shard = sorted(tmp_path.glob("broken/*-00002-of-*"))[0]
    content = shard.read_bytes()
    shard.write_bytes({"header": content[:8] + b"[" + content[9:], "short": content[:-9], "text": b"<html>"}[damage])
    (found,) = run("verify", given, status=1).stdout.splitlines()
    assert found.startswith(f"{given}: wrong: {shard.name}: ")
    assert found.count(shard.name) == 1
    assert found.count("broken") == 1
    (found,) = run("verify", shard, status=1).stdout.splitlines()
    assert found.count(shard.name) == 1


def test_c334_a_path_that_begins_like_another_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sync.save({"a": torch.ones(3)}, "m.safetensors")
    Path("m.safetensors").write_bytes(b"{}")
    (found,) = run("verify", "m.safetensors", status=1).stdout.splitlines()
    assert found.startswith("m.safetensors: wrong: ") and found.count("m.safetensors") == 1
