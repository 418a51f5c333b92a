"""`stio diff`: what differs between two checkpoints, however they are cut, and how it is said."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import large_imports, refused, run, terminal
from crash.zygote import Zygote
from safetensors.torch import save_file
from support import nothing_left, run_python

import stio
from stio.cli import diff as comparison
from stio.cli.diff import compare

Tensors = dict[str, torch.Tensor]


def write(path: Path, **tensors: torch.Tensor) -> Path:
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    values = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    other = values.clone()
    other[1, 2] += 0.25
    other[3, 5] = math.nan
    a = write(tmp_path / "a.safetensors", w=values, same=values, gone=values[:1], cast=values, cut=values)
    b = write(tmp_path / "b.safetensors", w=other, same=values, new=values[:2], cast=values.half(), cut=values[:2])
    return a, b


def found(*arguments: object, status: int = 0) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run("diff", *arguments, "--json", status=status).stdout)
    return result


def test_says_what_differs(pair: tuple[Path, Path]) -> None:
    a, b = pair
    done = run("diff", a, b, status=1)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"{a} (A) and {b} (B): different: 1 tensor only in A, 1 tensor only in B, "
        "2 tensors with another dtype or shape, 1 tensor with other values; 2 tensors compared by values",
        "           name  dtype and shape           differing  by at most",
        "only in A  gone  F32 [1, 6]",
        "only in B  new   F32 [2, 6]",
        "changed    cast  F32 [4, 6] -> F16 [4, 6]  0 of 24",
        "changed    cut   F32 [4, 6] -> F32 [2, 6]",
        "differs    w     F32 [4, 6]                2 of 24    0.25",
    ]


def test_json(pair: tuple[Path, Path]) -> None:
    a, b = pair
    assert found(a, b, status=1) == {
        "a": str(a),
        "b": str(b),
        "equal": False,
        "header_only": False,
        "tolerance": None,
        "num_compared": 2,
        "differences": [
            described("changed", "cast", ("F32", [4, 6]), ("F16", [4, 6]), {"num_differing": 0, "max_abs": 0}),
            described("changed", "cut", ("F32", [4, 6]), ("F32", [2, 6]), None),
            described("only in A", "gone", ("F32", [1, 6]), None, None),
            described("only in B", "new", None, ("F32", [2, 6]), None),
            described("differs", "w", ("F32", [4, 6]), ("F32", [4, 6]), {"num_differing": 2, "max_abs": 0.25}),
        ],
    }


def described(
    kind: str,
    name: str,
    a: tuple[str, list[int]] | None,
    b: tuple[str, list[int]] | None,
    difference: dict[str, float] | None,
) -> dict[str, Any]:
    sides = {side: one and {"dtype": one[0], "shape": one[1]} for side, one in (("a", a), ("b", b))}
    return {"kind": kind, "name": name, **sides, "difference": difference}


def test_a_filter_that_matches_nothing_is_no_equality(pair: tuple[Path, Path]) -> None:
    a, b = pair
    for more in ([], ["--json"], ["--header-only"]):
        text = refused("diff", a, b, "--filter", "am", *more, status=3)
        assert text == (
            f"Error: {a} and {b}: nothing matches --filter 'am'"
            "; a glob is for the whole name, and `stio inspect` lists the names"
        )
    assert "only in" in run("diff", a, b, "--filter", "gone", status=1).stdout, "one side is enough"


def test_the_order_of_names_is_natural(tmp_path: Path) -> None:
    a = write(tmp_path / "a.safetensors", **{f"h.{k}": torch.zeros(1) for k in range(12)})
    b = write(tmp_path / "b.safetensors", **{f"h.{k}": torch.ones(1) for k in range(12)})
    lines = run("diff", a, b, status=1).stdout.splitlines()
    assert [line.split()[1] for line in lines[2:]] == [f"h.{k}" for k in range(12)]


# With a tolerance.


@pytest.fixture
def near(tmp_path: Path) -> tuple[Path, Path]:
    w, i = torch.arange(8, dtype=torch.float32), torch.arange(4)
    a = write(tmp_path / "a.safetensors", w=w, same=w, i=i)
    b = write(tmp_path / "b.safetensors", w=w + torch.tensor([0.25] + [0.0] * 6 + [0.125]), same=w, i=i + 1)
    return a, b


def test_values_within_the_tolerance_are_equal(near: tuple[Path, Path]) -> None:
    a, b = near
    assert run("diff", a, b, "--tolerance", "1").stdout == (
        f"{a} and {b}: equal, 3 tensors compared by values, with a tolerance of 1; "
        "differences up to 1 were tolerated, in 2 tensors\n"
    )
    result = found(a, b, "--tolerance", "1")
    assert (result["equal"], result["tolerance"]) == (True, 1)
    assert [(one["name"], one["kind"], one["difference"]) for one in result["differences"]] == [
        ("i", "tolerated", {"num_differing": 0, "max_abs": 1}),
        ("w", "tolerated", {"num_differing": 0, "max_abs": 0.25}),
    ]


def test_values_beyond_the_tolerance_differ(near: tuple[Path, Path]) -> None:
    a, b = near
    assert run("diff", a, b, "--tolerance", "0.2", status=1).stdout.splitlines() == [
        f"{a} (A) and {b} (B): different: 2 tensors with other values; 3 tensors compared by values, with a tolerance of 0.2",
        "         name  dtype and shape  differing  by at most",
        "differs  i     I64 [4]          4 of 4     1",
        "differs  w     F32 [8]          1 of 8     0.25",
    ]
    assert run("diff", a, b, "--tolerance", "0.25", "--filter", "w").exit_code == 0, "the bound itself is equal"


def test_a_tolerance_does_not_change_names_and_shapes(pair: tuple[Path, Path]) -> None:
    a, b = pair
    lines = run("diff", a, b, "--tolerance", "inf", status=1).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["only in A", "only in B", "changed", "differs"]
    assert lines[-1].endswith("w     F32 [4, 6]                1 of 24    0.25")


def test_wrong_tolerances(pair: tuple[Path, Path]) -> None:
    assert "'--tolerance'" in refused("diff", *pair, "--tolerance", "-1")
    assert "not NaN" in refused("diff", *pair, "--tolerance", "nan")
    assert "'--tolerance': 'little' is not a valid number" in refused("diff", *pair, "--tolerance", "little")
    assert "give one of the two" in refused("diff", *pair, "--tolerance", "1", "--header-only")


def test_header_only_reads_no_values(pair: tuple[Path, Path]) -> None:
    a, b = pair
    assert all(one["difference"] is None for one in found(a, b, "--header-only", status=1)["differences"])
    done = run("diff", a, b, "--header-only", "--filter", "w")
    assert done.stdout == f"{a} and {b}: equal, 1 tensor compared by names, dtypes and shapes\n"
    os.truncate(b, os.path.getsize(b) - 1)
    refused("diff", a, b, "--header-only")  # a header that promises more is an error all the same


def test_filter(pair: tuple[Path, Path]) -> None:
    a, b = pair
    assert run("diff", a, b, "--filter", "same").stdout == f"{a} and {b}: equal, 1 tensor compared by values\n"
    assert found(a, b, "--filter", "/^c/", status=1)["num_compared"] == 0


def test_shards_and_order_do_not_count(tmp_path: Path) -> None:
    tensors = {f"w{k}": torch.arange(k + 1, dtype=torch.float32) for k in range(20)}
    stio.sync.save(tensors, tmp_path / "one.safetensors", metadata={"made": "here"})
    stio.sync.save(tensors, tmp_path / "many", max_shard_size=100)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert found(tmp_path / "one.safetensors", tmp_path / "many")["num_compared"] == 20


def test_aliases_are_tensors(tmp_path: Path) -> None:
    tied, other = torch.arange(4.0), torch.arange(4.0) + 1
    stio.sync.save({"a": tied, "b": tied}, tmp_path / "tied.safetensors")
    stio.sync.save({"a": tied, "b": tied.clone()}, tmp_path / "loose.safetensors")
    stio.sync.save({"a": tied, "b": other}, tmp_path / "other.safetensors")
    assert found(tmp_path / "tied.safetensors", tmp_path / "loose.safetensors")["num_compared"] == 2
    (one,) = found(tmp_path / "other.safetensors", tmp_path / "tied.safetensors", status=1)["differences"]
    assert (one["name"], one["difference"]["max_abs"]) == ("b", 1.0)


def test_infinity_is_text_in_json(tmp_path: Path) -> None:
    a = write(tmp_path / "a.safetensors", w=torch.tensor([1.0]))
    b = write(tmp_path / "b.safetensors", w=torch.tensor([math.inf]))
    (one,) = found(a, b, status=1)["differences"]
    assert one["difference"]["max_abs"] == "Infinity"
    assert " 1 of 1     inf\n" in run("diff", a, b, status=1).stdout


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / f"{k}.safetensors", e=torch.zeros(0, 3), s=torch.tensor(k), t=torch.tensor(1)) for k in (1, 2)
    ]
    (one,) = found(*paths, status=1)["differences"]
    assert (one["name"], one["a"]["shape"], one["difference"]) == ("s", [], {"num_differing": 1, "max_abs": 1})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_pieces_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(comparison, "PIECE_BYTES", 48)
    raw = (torch.arange(4096) % 2).to(torch.uint8)
    a = raw.view(torch.uint8).clone()
    b = a.clone()
    size = torch.empty(0, dtype=dtype).element_size()
    at = [0, 5, 63, 64, 255]
    for k in at:
        b[k * size] ^= 1
    paths = [write(tmp_path / f"{n}.safetensors", w=x.view(dtype), v=x.view(dtype)) for n, x in (("a", a), ("b", b))]
    assert [one["difference"]["num_differing"] for one in found(*paths, status=1)["differences"]] == [len(at)] * 2


@pytest.mark.slow  # a smaller bound is below what the pieces and threads of any comparison take
def test_memory_is_bounded(tmp_path: Path, zygote: Zygote) -> None:
    """Two tensors of 300 MB that differ everywhere, in a process that may add 250 MB to what it has when it begins."""
    for name, value in (("a", 0.0), ("b", 1.0)):
        write(tmp_path / f"{name}.safetensors", w=torch.full((75_000_000,), value))
    code = """
import ctypes, resource, sys
from pathlib import Path
from stio.cli.main import main
import torch
M_ARENA_MAX = -8  # a thread's own arena reserves 64 MB of addresses, and uses next to nothing of it
ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (250 << 20), used + (250 << 20)))
main(["diff", *sys.argv[1:]])
"""
    files = [str(tmp_path / f"{name}.safetensors") for name in ("a", "b")]
    done = run_python(code, *files, python=zygote.python)
    assert (done.returncode, done.stderr) == (1, "")
    assert "75,000,000 of 75,000,000  1\n" in done.stdout


def test_equal_checkpoints_cost_no_torch(tmp_path: Path, program_zygote: Zygote) -> None:
    path = write(tmp_path / "a.safetensors", w=torch.ones(9))
    assert large_imports(program_zygote.python, "diff", path, path) == []


def test_errors_are_status_2(tmp_path: Path) -> None:
    good = write(tmp_path / "a.safetensors", w=torch.ones(9))
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\xff" * 64)
    for pair in ((good, bad), (bad, good), (good, tmp_path / "none")):
        with nothing_left():
            refused("diff", *pair)


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J\n\u202ex"
    for name, tensors in (("a", {evil: torch.ones(1)}), ("b", {evil: torch.zeros(1), evil + "2": torch.ones(1)})):
        save_file(tensors, tmp_path / f"{name}.safetensors")
    text = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", status=1).stdout
    assert not {"\x1b", "\u202e"} & set(text)
    assert text.count(r"\x1b[2J\n\u202ex") == 2


def test_a_terminal_is_not_filled_by_one_name(tmp_path: Path, zygote: Zygote) -> None:
    a = write(tmp_path / "a.safetensors", **{"x" * 50_000: torch.zeros(1)})
    b = write(tmp_path / "b.safetensors", **{"x" * 50_000: torch.ones(1)})
    shown = terminal(zygote.program, "diff", a, b, NO_COLOR="1")
    assert "(50,000 characters)" in "".join(line[9:40].strip() for line in shown.splitlines())
    assert len(shown) < 1000
    assert "x" * 50_000 in run("diff", a, b, status=1).stdout, "a pipe gets the whole name"


def test_a_file_that_changes_meanwhile(pair: tuple[Path, Path]) -> None:
    a, b = pair

    def rewrite(nbytes: int, total: int) -> None:
        os.utime(b, (1, 1))

    with nothing_left(), pytest.raises(stio.ChangedDuringReadError):
        compare(str(a), str(b), progress=rewrite)


def test_progress_counts_to_the_end(pair: tuple[Path, Path]) -> None:
    steps: list[tuple[int, int]] = []
    compare(*map(str, pair), progress=lambda nbytes, total: steps.append((nbytes, total)))
    assert {total for _, total in steps} == {3 * 96}  # a cast tensor is read too
    assert sum(nbytes for nbytes, _ in steps) == 3 * 96


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_what_breaks_a_comparison_leaves_nothing(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(comparison, "_same", fail)
    with nothing_left(), pytest.raises(error):
        compare(*map(str, pair))
    assert not re.search("ThreadPool", str(__import__("threading").enumerate()))
