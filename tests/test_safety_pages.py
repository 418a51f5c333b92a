"""The pages docs/threat-model.md and docs/faults.md: every test that they name exists, and every number has its row."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import commands
import pytest
import torch
from faults import table
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]
TESTS, DOCS = ROOT / "tests", ROOT / "docs"
PAGES = ["faults.md", "threat-model.md"]
NUMBERS = [*range(1, 123), *range(201, 218), *range(221, 235), *range(241, 251), *range(301, 346)]
NUMBERS += [*range(401, 420), 421, 422, *range(431, 440), *range(441, 446), *range(451, 459), *range(461, 469)]
NUMBERS += range(471, 475)
WITHOUT_TESTS: set[int] = set()
"""Numbers that stay open; the page says why."""
LIST = ROOT.parent / "shared" / "faults.md"
"""The list that the numbers come from; only the project's own machines have it."""

NAMED = re.compile(r"`((?:\w+/)*test_\w+\.py)` ((?:`test_\w+(?:\[\w+\])?`(?:, )?)+)")


@cache
def source_of(file: str) -> tuple[set[str], str]:
    """Return the names of the tests in a file, and its text."""
    text = (TESTS / file).read_text()
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)}, text


def named(text: str) -> list[tuple[str, str, str]]:
    """Return each test that a text names: its file, its name, the beginning of the ids of its cases or nothing."""
    found = []
    for file, tests in NAMED.findall(text):
        for test in re.findall(r"`([^`]+)`", tests):
            name, _, case = test.removesuffix("]").partition("[")
            found.append((file, name, case))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_named_test_exists(page: str) -> None:
    text = (DOCS / page).read_text()
    tests = named(text)
    assert len(tests) > 30
    assert len(re.findall(r"`test_(?!x\[)\w+[`\[]", text)) == len(tests), "a test stands without its file"
    for file, name, case in tests:
        assert (TESTS / file).is_file(), f"{page} names tests/{file}, which does not exist: run `make faults`"
        names, source = source_of(file)
        assert name in names, f"{page} names {name}, which tests/{file} does not have: run `make faults`"
        assert re.search(rf"[\"']{case}-", source) if case else True, f"{file} has no case {case}: run `make faults`"


def test_every_number_has_a_row_and_tests() -> None:
    rows = {int(row[1]): row for row in table.ROW.finditer((DOCS / "faults.md").read_text())}
    assert list(rows) == NUMBERS
    assert {number for number, row in rows.items() if not named(row[4])} == WITHOUT_TESTS
    for number in WITHOUT_TESTS:
        assert rows[number][4].startswith(table.OPEN), number
        assert len(rows[number][4]) > len(table.OPEN), number


@pytest.mark.slow
def test_each_test_of_a_number_stands_in_its_row() -> None:
    page = (DOCS / "faults.md").read_text()
    assert table.with_tests(page, table.named_tests()) == page, "run `make faults`"


@pytest.mark.slow
def test_a_row_names_tests_of_its_number() -> None:
    found = table.named_tests()
    for row in table.ROW.finditer((DOCS / "faults.md").read_text()):
        files = found.get(int(row[1]), {})
        for file, name, case in named(row[4]):
            assert (f"{name}[{case}]" if case else name) in files.get(file, []), f"number {row[1]}: run `make faults`"


@pytest.mark.skipif(not LIST.exists(), reason="the list of faults is not part of the repository")
def test_the_numbers_are_those_of_the_list() -> None:
    listed, marker, found = LIST.read_text().partition("## F.")  # there a number may also stand behind a sentence
    numbers = re.findall(r"(?:·|\n)\s*(\d{1,3})\s", listed)
    assert marker
    assert [int(number) for number in numbers + re.findall(r"(?:\n|[.,] )([34]\d\d) ", found)] == NUMBERS


def test_the_page_is_made_from_the_tests() -> None:
    """Text without tests stays, and a row gets the tests that name its number."""
    page = "| 4 | a | b | old |\n| 5 | a | b | open: why |\n"
    assert table.with_tests(page, {4: {"x/test_y.py": ["test_a04_z", "test_v[A04]"]}}) == (
        "| 4 | a | b | `x/test_y.py` `test_a04_z`, `test_v[A04]` |\n| 5 | a | b | open: why |\n"
    )


def test_numbers_are_found_in_names_and_ids(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "CASES = [case('A04-x'), *MORE]\nMORE: list = [case('A05-x')]\nOTHER = ['A06-x']\n"
        "@pytest.mark.parametrize('case', CASES)\ndef test_v(case): ...\n"
        "async def test_c90_and_c91_x(): OTHER\ndef test_of_b200s(): ...\n"
    )
    assert {number: dict(files) for number, files in table.named_tests(tmp_path).items()} == {
        4: {"test_a.py": ["test_v[A04]"]},
        5: {"test_a.py": ["test_v[A05]"]},
        90: {"test_a.py": ["test_c90_and_c91_x"]},
        91: {"test_a.py": ["test_c90_and_c91_x"]},
    }


def test_the_security_policy_names_the_page() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    (page,) = re.findall(r"\]\((docs/[^)]+)\)", text)
    assert (ROOT / page).is_file()
    assert "Report a vulnerability" in text


# Promises of the threat model that no other test covers.


NETWORK = {
    "asyncio.streams", "ftplib", "http", "httpx", "imaplib", "poplib", "requests", "smtplib", "socketserver", "ssl",
    "telnetlib", "urllib", "urllib3", "webbrowser", "xmlrpc", "aiohttp",
}  # fmt: skip


def test_stio_opens_no_connection() -> None:
    remote = ROOT / "stio" / "remote"
    for path in sorted({*(ROOT / "stio").rglob("*.py")} - {remote / "save.py"}):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
                assert node.module != "socket", path
            for module in modules:
                if module != "urllib.parse":  # only text
                    assert module not in NETWORK, path
                    assert module.partition(".")[0] not in NETWORK, path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "socket" or node.attr == "gethostname", path
                assert "connect" not in node.attr or node.value.id not in ("asyncio", "anyio"), path


def test_only_remote_sources_use_obstore() -> None:
    """By `import_module`, since it is an extra."""
    found = {path for path in (ROOT / "stio").rglob("*.py") if re.search(r"import_module\(\"obstore", path.read_text())}
    assert {path.parent for path in found} == {ROOT / "stio" / "remote"}


EVIL = "\x1b[31mx\nFAKE: ok\r\u202e"


@pytest.mark.parametrize("command", ["inspect", "verify", "load", "gc", "diff", "convert"])
def test_no_command_shows_control_characters(tmp_path: Path, command: str) -> None:
    """In names of tensors, keys and values of metadata, and paths, of safetensors files and pickles."""
    folder = tmp_path / EVIL
    folder.mkdir()
    tensors = {EVIL: torch.ones(2), f"b{EVIL}": torch.ones(1)}
    save_file(tensors, folder / f"x{EVIL}.safetensors", metadata={EVIL: EVIL})
    odd = bytearray((folder / f"x{EVIL}.safetensors").read_bytes())
    (folder / f"y{EVIL}.safetensors").write_bytes(odd.replace(b"[2]", b"[3]"))
    torch.save({EVIL: {EVIL: torch.ones(1)}, "n": 3}, folder / f"x{EVIL}.pt")
    sources = [folder, *sorted(folder.iterdir()), folder / "absent", folder / f"absent{EVIL}.safetensors"]
    for number, source in enumerate(sources):
        others = {"diff": [sources[1]], "convert": [tmp_path / f"out{number}"]}.get(command, [])
        done = commands.CliRunner().invoke(commands.main, [command, *map(str, (source, *others))])
        assert done.exception is None or isinstance(done.exception, SystemExit), (source, done.exception)
        assert done.output.replace("\n", "").isprintable(), source
        assert not any(line.startswith("FAKE") for line in done.output.splitlines()), source
