"""What commands share: lines that a terminal shows without broken words, names that are shortened, tables, advice."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest
from commands import PROGRAM, terminal
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from stio.cli.output import CommandError, aligned, broken, matcher, no_match, require_writable, shortened, spelled
from stio.errors import one_line

SENTENCE = "shard 1/2, m.safetensors: 76 of 1,024 tensors, 29.5 MB in 0.123 s, 1.2 GB/s, F32 [4096, 14336] of '/a/b c'"


@pytest.mark.parametrize(
    ("name", "width", "expected"),
    [
        ("model.layers.12.mlp.weight", 26, "model.layers.12.mlp.weight"),
        ("model.layers.12.mlp.weight", 25, "model.….12.mlp.weight"),
        ("model.layers.12.mlp.experts.103.down_proj.weight", 38, "model.….12.….103.down_proj.weight"),
        ("model.layers.12.mlp.experts.103.down_proj.weight", 28, "model.….12.….103.….weight"),
        ("model.layers.12.mlp.experts.103.down_proj.weight", 22, "….12.….103.….weight"),
        ("model.layers.12.mlp.experts.103.down_proj.weight", 18, "….103.….weight"),
        ("..a..b.c..d", 8, ".….c..d"),
        ("model.language_model.layers.12.self_attn.q_proj.weight", 40, "model.….12.self_attn.q_proj.weight"),
        ("model.language_model.layers.12.self_attn.q_proj.weight", 31, "model.….12.….q_proj.weight"),
        ("encoder.12345", 10, "….12345"),
        ("x" * 50, 20, "…" + "x" * 19),
        ("x1234567", 5, "…4567"),
        ("w1234567.b", 5, "….b"),
    ],
)
def test_names_are_shortened_between_their_dots(
    name: str, width: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stio.cli.output.is_encodable", lambda text: True)
    assert shortened(name, width) == expected


def test_names_that_would_look_alike_keep_what_tells_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stio.cli.output.is_encodable", lambda text: True)
    towers = [f"model.{one}.encoder.layers.{{}}.attention.out_proj.weight" for one in ("vision", "language")]
    names = [one.format(k) for one in towers for k in (0, 11)]
    lines = list(aligned([["name", "size"], *([name, "4 B"] for name in names)], right={1}, width=51))
    assert lines[1:] == [
        "model.vision.….0.attention.out_proj.weight      4 B",
        "model.vision.….11.attention.out_proj.weight     4 B",
        "model.language.….0.attention.out_proj.weight    4 B",
        "model.language.….11.attention.out_proj.weight   4 B",
    ]


def test_a_wide_cell_is_aligned_where_names_have_room() -> None:
    rows = [["name", "shape", "note"], ["w", "F32 -> BF16 [128, 64]", "a"], ["v", "F32 [1]", "b"]]
    for width in (None, 80, 40):
        assert {line.rstrip()[-1:] for line in aligned(rows, right=set(), width=width)} == {"e", "a", "b"}
        assert (
            len({len(line.rstrip()) - len(line.split()[-1]) for line in aligned(rows, right=set(), width=width)}) == 1
        )


@given(st.text(max_size=200), st.integers(12, 100))
def test_a_shortened_name_fits(name: str, width: int) -> None:
    assert cell_len(shortened(one_line(name), width)) <= width


def test_hostile_names_are_shortened_at_once() -> None:
    for name in ("." * 100_000, "a.1" * 100_000, "x" * 100_000, "1" * 100_000):
        assert len(shortened(name, 40)) <= 40


def test_characters_without_a_column_do_not_flood_a_terminal() -> None:
    assert len(shortened("a" + "\u0301" * 100_000, 40)) <= 40
    assert shortened("क्षेत्र.वज़न", 40) == "क्षेत्र.वज़न"


@pytest.mark.parametrize("width", [24, 40, 60, 79])
def test_c246_lines_arebroken_between_words(width: int) -> None:
    lines = broken(SENTENCE, width).split("\n")
    assert " ".join(line.strip() for line in lines) == SENTENCE
    assert max(map(len, lines)) <= width
    for together in ("29.5 MB", "0.123 s", "1.2 GB/s", "[4096, 14336]", "1,024"):
        assert any(together in line for line in lines)
    assert all(line.startswith("  ") for line in lines[1:])


def test_a_word_that_is_longer_than_a_line_stays_whole() -> None:
    path = "/a/" + "b" * 100
    assert broken(f"Error: {path}: no such file", 40).split("\n") == ["Error:", f"  {path}:", "  no such file"]


def test_short_lines_and_indents_stay() -> None:
    assert broken("  two  spaces", 40) == "  two  spaces"
    assert broken("  a b c d e f g h i j k l m", 20) == "  a b c d e f g h i\n    j k l m"


def test_errors_and_notes_arebroken_on_a_terminal() -> None:
    shown = terminal("inspect", "/nowhere/" + "x" * 40, NO_COLOR="1").splitlines()
    assert len(shown) == 2
    assert max(map(len, shown)) <= 80
    assert " ".join(map(str.strip, shown)).endswith("there is no such file or directory; check the path")


def test_errors_fit_their_own_terminal() -> None:
    """The one behind standard error, where standard output is a pipe."""
    main_fd, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    subprocess.run(
        [*PROGRAM, "inspect", "/nowhere/x"], stdout=subprocess.PIPE, stderr=side, env=environment, check=False
    )
    os.close(side)
    lines = os.read(main_fd, 65536).decode().splitlines()
    os.close(main_fd)
    assert len(lines) == 2
    assert max(map(len, lines)) <= 50


def test_a_file_that_could_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.svg").mkdir()
    with pytest.raises(CommandError, match=r"c\.svg: this is no writable file; choose another name"):
        require_writable(str(tmp_path / "c.svg"), "chart", [".svg"])
    require_writable(str(tmp_path / "d.svg"), "chart", [".svg"])
    (tmp_path / "d.svg").touch()
    require_writable(str(tmp_path / "d.svg"), "chart", [".svg"])
    assert (tmp_path / "d.svg").read_bytes() == b""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file")
def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.svg").touch(0o400)
    with pytest.raises(CommandError, match="this is no writable file"):
        require_writable(str(tmp_path / "c.svg"), "chart", [".svg"])


@pytest.mark.parametrize("pattern", ["/(/", "/x{99999999999}/", f"/{'(' * 5000}x{')' * 5000}/"])
def test_malformed_expressions_are_sentences(pattern: str) -> None:
    with pytest.raises(CommandError, match=r"(?s)is no regular expression: .+; without the slashes it is a glob"):
        matcher(pattern)


def test_a_long_cell_moves_its_own_row_only() -> None:
    rows = [["a", "[1]", "x"], ["b", "[" + "1, " * 64 + "1]", "y"]]
    first, second = aligned(rows, right=set())
    assert first == "a  [1]" + " " * 31 + "x"
    assert second == f"b  {rows[1][1]}  y"


def test_the_advice_for_no_match() -> None:
    assert str(no_match("m", "/x/", ["x"]).message).endswith("; `stio inspect` lists the names")
    assert str(no_match("m", "\x1b[2J", ["\x1b[2Ja"])).isprintable()
    assert no_match("m", "q", ["a"]).exit_code == 3
    assert re.search(r"among 1 tensor;", str(no_match("m", "q", ["a"])))


def test_keywords_are_options() -> None:
    assert spelled("dtype= takes a floating dtype; trust_pickle=True reads it") == (
        "--dtype takes a floating dtype; --trust-pickle reads it"
    )
