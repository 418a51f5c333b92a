"""The house stands: each room imports from rooms below it only. The floors are read from ARCHITECTURE.md's table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "stio"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

NEVER = [
    ("device/", "storage/", "target.py brings the two together"),
    ("storage/", "device/", "target.py brings the two together"),
    ("plan/", "storage/", "planning does no I/O"),
    ("plan/", "device/", "planning knows no torch"),
]
"""Below is not enough: these never see each other."""

PURE_ROOMS = ("codec/", "plan/")
IMPURE = {
    *("torch", "numpy", "anyio", "asyncio", "trio", "aiofiles"),
    *("os", "io", "mmap", "ctypes", "pathlib", "shutil", "tempfile", "socket", "subprocess"),
}
"""What bytes-to-values code needs none of."""

TORCH_FREE = "engine/opened.py"
"""What `stio inspect` runs on, with all that it imports."""

LOCAL_IMPORTS: dict[str, str] = {}
"""Files that import inside functions, with the reason; there are none."""

DYNAMIC_IMPORTS = {
    "__init__.py": "the lazy table: `import stio` must not cost torch",
    "bench_child.py": "one process loads by one contestant of `stio bench`, and imports that alone",
    "cli_load.py": "torch, when the command runs: all commands are imported to list them",
    "comparison.py": "numpy, when values differ: equal checkpoints cost none",
    "compat/safetensors/_open.py": "torch is wanted with framework='pt' only, the engine with another device only",
    "compat/safetensors/_serialize.py": "the save path needs torch, `serialize` does not",
    "integrations/vllm.py": "vLLM is there when it calls; the hub is asked for files that are not on this machine only",
    "manifest.py": "xxhash is an extra, wanted with hash='xxh3' only",
    "storage/gds.py": "kvikio is an extra, wanted with memory='gds' only",
    "progress.py": "tqdm is an extra, wanted with progress=True only",
}
"""Files that call `import_module`, with the reason."""


@dataclass(frozen=True)
class Room:
    floor: int
    name: str
    files: frozenset[str]


def rooms() -> list[Room]:
    """Read the table of floors: | floor | room | files | what for |."""
    found = []
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        match = re.fullmatch(r"\| (\d) \| `stio/([a-z]*/?)` \| (.+?) \| .+ \|", line)
        if match:
            floor, folder, files = match.groups()
            found.append(Room(int(floor), folder, frozenset(folder + name for name in re.findall(r"`(\S+?)`", files))))
    return found


ROOMS = rooms()
ROOM_OF = {file: room for room in ROOMS for file in room.files}


def imported(file: str) -> Iterator[str]:
    """Yield the files of the package that a file imports, for type checking too."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            if (node.module or "").partition(".")[0] == "stio":
                for alias in node.names:
                    yield _file_of(f"{node.module}.{alias.name}") or _file_of(node.module or "") or "?"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "stio":
                    yield _file_of(alias.name) or "?"


def _file_of(module: str) -> str | None:
    path = "/".join(module.split(".")[1:])
    return next((file for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if file in FILES), None)


def foreign(file: str) -> set[str]:
    """Return the top names of other packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
    return found - {"stio"}


def is_package_marker(file: str) -> bool:
    return file.endswith("/__init__.py") and file not in ROOM_OF  # a package that is a face stands in the table


def test_every_file_has_a_floor_and_every_row_its_files() -> None:
    listed = [file for room in ROOMS for file in room.files]
    assert len(listed) == len(set(listed)), "a file stands on two floors"
    without = [file for file in FILES if file not in ROOM_OF and not is_package_marker(file)]
    assert not without, f"no floor in ARCHITECTURE.md's table: {without}"
    assert set(listed) <= set(FILES), "ARCHITECTURE.md's table lists files that are not there"


def test_package_markers_are_empty() -> None:
    assert [file for file in FILES if is_package_marker(file) and (PACKAGE / file).read_text().strip()] == []


@pytest.mark.parametrize("file", [file for file in FILES if not is_package_marker(file)])
def test_imports_lead_down(file: str) -> None:
    room = ROOM_OF.get(file)
    assert room is not None, f"{file} has no floor in ARCHITECTURE.md's table"
    for target in imported(file):
        other = ROOM_OF.get(target)
        assert other is not None, f"{file} imports {target}, which has no floor"
        assert (other.floor, other.name) == (room.floor, room.name) or other.floor < room.floor, (
            f"{file} (floor {room.floor}) imports {target} (floor {other.floor})"
        )
        for one, two, reason in NEVER:
            assert not (file.startswith(one) and target.startswith(two)), f"{file} imports {target}: {reason}"


def test_no_cycle() -> None:
    graph = {file: set(imported(file)) for file in FILES}
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith(PURE_ROOMS)])
def test_pure_rooms_do_no_io(file: str) -> None:
    assert not foreign(file) & IMPURE


def test_inspect_needs_no_torch() -> None:
    seen: set[str] = set()
    ahead = [TORCH_FREE, "cli.py"]
    while ahead:
        file = ahead.pop()
        if file not in seen and file != "__init__.py":  # its imports are lazy
            seen.add(file)
            ahead += imported(file)
            assert not foreign(file) & {"torch", "numpy"}, file


def test_imports_stand_at_the_top() -> None:
    inside = set()
    for file in FILES:
        for function in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and any(
                isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(function)
            ):
                inside.add(file)
    assert inside == set(LOCAL_IMPORTS)


def test_dynamic_imports_are_known() -> None:
    calls = {
        file
        for file in FILES
        for node in ast.walk(ast.parse((PACKAGE / file).read_text()))
        if isinstance(node, ast.Call)
        and (getattr(node.func, "id", "") or getattr(node.func, "attr", "")) in ("import_module", "__import__")
    }
    assert calls == set(DYNAMIC_IMPORTS)


def test_files_and_functions_are_short() -> None:
    long = []
    for file in FILES:
        text = (PACKAGE / file).read_text()
        if (count := len(text.splitlines())) > 400:
            long.append(f"{file}: {count} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 60:
                    long.append(f"{file}: {node.name} has {length} lines")
    assert long == []
