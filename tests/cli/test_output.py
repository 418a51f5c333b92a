"""What commands share: lines and tables that fit a terminal, advice."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Sequence
from typing import Any

import pytest
from commands import terminal
from hypothesis import given
from hypothesis import strategies as st
from tqdm.utils import disp_len

from stio.cli.output import CommandError, _broken, joined, matcher, no_match, spelled, table
from stio.errors import one_line

SENTENCE = "shard 1/2, m.safetensors: 76 of 1,024 tensors, 29.5 MB in 0.123 s, 1.2 GB/s, F32 [4096, 14336] of '/a/b c'"


def lines(rows: Sequence[Sequence[str]], **keywords: Any) -> list[str]:
    return list(map(joined, table(rows, **keywords)))


def test_a_name_without_room_goes_on_in_the_next_line() -> None:
    rows = [["name", "size"], ["model.vision.encoder.layers.0.weight", "4 B"], ["v", "16 B"]]
    assert lines(rows, right={1}) == [f"{name:36}  {size:>4}" for name, size in rows]
    assert lines(rows, right={1}, width=26) == [
        "name                  size",
        "model.vision.encoder   4 B",
        ".layers.0.weight",
        "v                     16 B",
    ]


@given(st.text(max_size=200), st.integers(20, 100))
def test_a_table_fits(name: str, width: int) -> None:
    shown = lines([["name", "size"], [one_line(name), "4 B"]], right={1}, width=width)
    assert max(map(disp_len, shown)) <= width


def test_hostile_names_do_not_flood_a_terminal() -> None:
    for name in ("." * 100_000, "x" * 100_000, "a" + "\u0301" * 100_000):
        assert sum(map(len, lines([[name, "4 B"]], width=40))) < 1000


@pytest.mark.parametrize("width", [24, 40, 60, 79])
def test_c246_lines_are_broken_between_words(width: int) -> None:
    lines = _broken(SENTENCE, width).split("\n")
    assert " ".join(line.strip() for line in lines) == SENTENCE
    assert max(map(len, lines)) <= width
    assert all(line.startswith("  ") for line in lines[1:])
    assert max(map(disp_len, _broken("模型 " * 50, width).split("\n"))) <= width


def test_errors_and_notes_are_broken_on_a_terminal(program: list[str]) -> None:
    shown = terminal(program, "inspect", "/nowhere/" + "x" * 40, NO_COLOR="1").splitlines()
    assert len(shown) == 2
    assert max(map(len, shown)) <= 80
    assert " ".join(map(str.strip, shown)).endswith("there is no such file or directory; check the path")


def test_errors_fit_their_own_terminal(program: list[str]) -> None:
    """The one behind standard error, where standard output is a pipe."""
    main_fd, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    subprocess.run(
        [*program, "inspect", "/nowhere/x"], stdout=subprocess.PIPE, stderr=side, env=environment, check=False
    )
    os.close(side)
    lines = os.read(main_fd, 65536).decode().splitlines()
    os.close(main_fd)
    assert len(lines) == 2
    assert max(map(len, lines)) <= 50


@pytest.mark.parametrize("pattern", ["/(/", "/x{99999999999}/", f"/{'(' * 5000}x{')' * 5000}/"])
def test_malformed_expressions_are_sentences(pattern: str) -> None:
    with pytest.raises(CommandError, match=r"(?s)is no regular expression: .+; without the slashes it is a glob"):
        matcher(pattern)


def test_a_long_cell_moves_its_own_row_only() -> None:
    rows = [["a", "[1]", "x"], ["b", "[" + "1, " * 64 + "1]", "y"]]
    first, second = lines(rows)
    assert first == "a  [1]" + " " * 31 + "x"
    assert second == f"b  {rows[1][1]}  y"


def test_no_match() -> None:
    assert str(no_match("m", "\x1b[2J")).isprintable()
    assert no_match("m", "q").exit_code == 3


def test_keywords_are_options() -> None:
    assert spelled("dtype= takes a floating dtype; trust_pickle=True reads it") == (
        "--dtype takes a floating dtype; --trust-pickle reads it"
    )
