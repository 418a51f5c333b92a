"""The levels of design: each package imports from lower levels only, format and plans stay pure, some parts need no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from counts import count
from crash.zygote import Zygote

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "stio"
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))

LEVELS: dict[str, int] = {
    "cli": 9,
    "compat": 9,
    "integrations": 9,
    "testing.py": 9,
    "__main__.py": 9,
    "__init__.py": 8,
    "sync.py": 8,
    "conversion": 7,
    "distributed": 7,
    "serving": 7,
    "state.py": 7,
    "remote": 6,
    "loading": 5,
    "saving": 5,
    "device": 4,
    "storage": 4,
    "format": 3,
    "native": 2,
    "runtime": 2,
    "process.py": 1,
    "text.py": 1,
    "limits.py": 1,
    "schemes.py": 0,
    "clock.py": 0,
    "errors.py": 0,
}
"""What stands at the top of `stio/`, each with its level."""

SAME_LEVEL = {
    ("__main__.py", "cli"): "it runs the command",
    ("__init__.py", "sync.py"): "`stio.sync` is a public name",
    ("integrations", "compat"): "the plugin of SGLang is a call of `stio.compat.install`",
    ("runtime", "native"): "`reports/counters.py` names the engine",
}
"""Imports between parts of one level that are meant, with the reason."""

PURE = (
    "format/",
    "distributed/placements.py",
    "loading/companions.py",
    "loading/plan.py",
    "serving/pool/policy.py",
    "saving/plan.py",
    "distributed/plan_parts.py",
)
IMPURE = {
    *("torch", "numpy", "anyio", "asyncio", "trio", "aiofiles"),
    *("os", "io", "mmap", "ctypes", "pathlib", "shutil", "tempfile", "socket", "subprocess"),
}
"""What code that turns bytes or numbers into values does not import."""

TORCH_FREE = ("format/", "storage/base.py", "storage/local.py", "storage/commit/", "storage/checkpoint/", "cli/main.py")
"""What needs no torch, with all that it imports: `stio inspect`, `verify`, `diff` and `gc` answer at once."""

DYNAMIC_IMPORTS = {
    "__init__.py": "the table of public names: `import stio` must not import torch",
    "cli/bench.py": "one process measures one contestant of `stio bench`, and imports that one only",
    "cli/load.py": "torch, when the command runs: all commands are imported to list them",
    "cli/pull.py": "stores, and numpy with them, when the command runs",
    "cli/diff.py": "torch, when values differ: a comparison of equal checkpoints needs none",
    "compat/safetensors/__init__.py": "torch is needed with `PrefetchLoader`",
    "compat/replacement.py": "`install` imports safetensors and torch, `import stio.compat` neither",
    "compat/safetensors/_open.py": "torch is needed with framework='pt' only, loading with another device only",
    "compat/safetensors/numpy.py": "saving a file needs torch, `serialize` does not",
    "format/files/manifest.py": "xxhash is an extra, needed with hash='xxh3' only",
    "integrations/lightning.py": "torch.distributed is needed with modules that are sharded only",
    "integrations/vllm.py": "vLLM is there when it calls; the hub is asked for files that are not on this machine only",
    "integrations/vllm_updates.py": "vLLM imports it, and then is there",
    "runtime/reports/progress.py": "tqdm is an extra, needed with progress=True only",
    "remote/hub.py": "huggingface_hub is an extra, needed with hf:// only",
    "schemes.py": "what reads URLs, and numpy with it, is needed with a URL only",
    "remote/stores.py": "obstore is an extra, needed with URLs only; boto3 with profiles of AWS and uploads of S3 only",
    "storage/checkpoint/changes.py": "numpy, without the engine only",
    "sync.py": "torch.distributed is needed with stio.distributed only",
}
"""Files that call `import_module`, with the reason."""

CIRCLES: dict[tuple[str, ...], str] = {
    (
        "compat/safetensors/numpy.py",
        "compat/safetensors/torch.py",
    ): "`serialize_file` works without torch until it saves, and saves as `torch.py` does",
}
"""Files that import each other, one of them by name, with the reason."""


def part_of(file: str) -> str:
    return file.partition("/")[0]


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


@cache
def imported(file: str) -> frozenset[str]:
    """Return the files of the package that a file imports, for type checking too; of a name in a face, its module."""
    found = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            if (node.module or "").partition(".")[0] == "stio":
                found |= {_file_of_name(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {_file_of(alias.name) or "?" for alias in node.names if alias.name.partition(".")[0] == "stio"}
    return frozenset(found)


def _file_of_name(module: str, name: str) -> str:
    """Return the file that a name comes from: behind a face, the module that it names."""
    file = _file_of(f"{module}.{name}") or _file_of(module) or "?"
    if file.endswith("/__init__.py"):
        for node in tree_of(file).body:
            if isinstance(node, ast.ImportFrom) and any(name in (alias.asname, alias.name) for alias in node.names):
                return _file_of_name(node.module or "", name) if (node.module or "").startswith("stio.") else file
    return file


@cache
def executed(file: str) -> frozenset[str]:
    """Return the files that Python runs to import a file: also the faces on the way, with all that they import."""
    seen: set[str] = set()
    ahead = [file]
    while ahead:
        one = ahead.pop()
        if one in seen or one == "__init__.py":  # its imports are lazy
            continue
        seen.add(one)
        folders = one.split("/")[:-1]
        ahead += [f"{'/'.join(folders[:k])}/__init__.py" for k in range(1, len(folders) + 1)]
        ahead += imported(one)
    return frozenset(seen)


@cache
def imported_by_name(file: str) -> frozenset[str]:
    """Return the files of the package that a file imports by `import_module`: a text, or a constant of the module."""
    tree = tree_of(file)
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found: set[str] = set()
    for call in filter(_imports_by_name, ast.walk(tree)):
        assert isinstance(call, ast.Call)
        argument = call.args[0]
        argument = constants.get(argument.id, argument) if isinstance(argument, ast.Name) else argument
        for text in ast.walk(argument):
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.startswith("stio."):
                folder = "/".join(text.value.split(".")[1:])
                is_begin = text.value.endswith(".")  # of an f-string: any module below
                below = {other for other in FILES if is_begin and folder and other.startswith(folder)}
                found |= below or {_file_of(text.value) or "?"}
    return frozenset(found - {"?"})


def _imports_by_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and (getattr(node.func, "id", "") or getattr(node.func, "attr", "")) in (
        "import_module",
        "__import__",
    )


def circles() -> set[frozenset[str]]:
    """Return the groups of files that import each other, also by name. The imports of `__init__.py` are lazy."""
    ahead = {
        file: {*imported(file), *imported_by_name(file)} - {"__init__.py"} for file in FILES if file != "__init__.py"
    }

    def reach(file: str) -> set[str]:
        seen: set[str] = set()
        left = list(ahead[file])
        while left:
            one = left.pop()
            if one not in seen:
                seen.add(one)
                left += ahead[one]
        return seen

    below = {file: reach(file) for file in ahead}
    return {frozenset(other for other in below[file] if file in below[other]) for file in ahead if file in below[file]}


@cache
def _file_of(module: str) -> str | None:
    path = "/".join(module.split(".")[1:])
    return next((file for file in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if file in FILES), None)


@cache
def foreign(file: str) -> set[str]:
    """Return the top names of other packages that a file imports."""
    found = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
    return found - {"stio"}


@cache
def reached(file: str) -> set[str]:
    """Return a file and all files of the package that it imports, directly or not."""
    seen: set[str] = set()
    ahead = [file]
    while ahead:
        one = ahead.pop()
        if one not in seen and one != "__init__.py":  # its imports are lazy
            seen.add(one)
            ahead += imported(one)
    return seen


def files_in(*prefixes: str) -> Iterator[str]:
    yield from (file for file in FILES if file.startswith(prefixes))


def test_the_top_level_is_that_of_the_design() -> None:
    assert {part_of(file) for file in FILES} == set(LEVELS)


@pytest.mark.parametrize("file", FILES)
def test_imports_lead_to_lower_levels(file: str) -> None:
    mine = part_of(file)
    for target in imported(file):
        assert target != "?", f"{file} imports a module of stio that does not exist"
        other = part_of(target)
        allowed = other == mine or LEVELS[other] < LEVELS[mine] or (mine, other) in SAME_LEVEL
        assert allowed, f"{file} (level {LEVELS[mine]}) imports {target} (level {LEVELS[other]})"


MAX_NAMES = 25
FACES = [file for file in FILES if file.endswith("/__init__.py")]


@cache
def names_of(face: str) -> list[str]:
    """Return the names in `__all__` of a package."""
    for node in tree_of(face).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


@pytest.mark.parametrize("face", FACES)
def test_a_face_is_narrow(face: str) -> None:
    names = names_of(face)
    assert len(names) == len(set(names)) <= MAX_NAMES  # ruff sorts them


def test_packages_import_from_faces() -> None:
    """A name of another package is imported from the package: what is not in its face may change tomorrow."""
    past = {
        f"{file}: from {node.module} import {alias.name}"
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stio.")
        for alias in node.names
        if not is_by_face(file, node.module or "", alias.name)
    }
    assert past == set()


def is_by_face(file: str, module: str, name: str) -> bool:
    target = _file_of(module) or "?"
    if part_of(target) == part_of(file) or "/" not in target:  # of its own package, or a module at the top
        return True
    if (file, target) in PAST_FACES or target in ONE_MODULE:
        return True
    return target in FACES and name in names_of(target)


PAST_FACES = {
    **dict.fromkeys(
        [("__main__.py", f"cli/{name}.py") for name in ("interrupts", "main", "output")], "it is the command"
    ),
    ("integrations/_training.py", "distributed/parts.py"): "the face of `stio.distributed` is public",
}
"""Imports past a face that are meant, with the reason."""

ONE_MODULE = {"native/__init__.py", "runtime/memory.py"}
"""Modules that are faces: what they define without an underscore is for others."""


def test_an_import_past_a_face_is_found() -> None:
    assert not is_by_face("cli/main.py", "stio.loading.plan", "Group")
    assert not is_by_face("cli/main.py", "stio.loading", "no_name")
    assert is_by_face("loading/plan.py", "stio.loading.api", "load")


def test_a_name_in_a_face_is_used() -> None:
    used = {
        f"{node.module}.{alias.name}"
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ImportFrom) and part_of(file) != part_of(_file_of(node.module or "") or "")
        for alias in node.names
    }
    faces = [face for face in FACES if not face.startswith(NOT_USED_HERE)]
    listed = {
        f"stio.{face.removesuffix('/__init__.py').replace('/', '.')}.{name}"
        for face in faces
        for name in names_of(face)
    }
    assert listed - used == {"stio.remote.pull"}, "`stio pull` imports that one by name"


NOT_USED_HERE = ("compat/", "distributed/", "integrations/", "native/")
"""Packages whose faces users import, or that are imported as a whole."""


def test_no_import_circle() -> None:
    TopologicalSorter({file: set(imported(file)) for file in FILES}).prepare()  # raises CycleError


def test_circles_that_an_import_by_name_closes_are_known() -> None:
    unknown = [sorted(found) for found in circles() if not any(found <= set(known) for known in CIRCLES)]
    assert unknown == []


def test_an_import_by_name_is_found() -> None:
    assert "device/tensors.py" in imported_by_name("cli/diff.py")
    assert imported_by_name("compat/replacement.py") >= {"compat/safetensors/_installed.py"}, "a constant names it"


@pytest.mark.parametrize("file", list(files_in(*PURE)))
def test_format_and_plans_do_no_io(file: str) -> None:
    for one in reached(file):
        # Below the format there are only errors and bounds.
        assert not foreign(one) & IMPURE, one


@pytest.mark.parametrize("file", list(files_in(*TORCH_FREE)))
def test_needs_no_torch(file: str) -> None:
    for one in executed(file):
        assert not foreign(one) & {"torch"}, f"{file} imports {one}, which imports torch"


@pytest.mark.costly("imports of torch or of a framework in processes of its own")
def test_imports_stand_at_the_top() -> None:
    inside = set()
    for file in FILES:
        for function in ast.walk(tree_of(file)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and any(
                isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(function)
            ):
                inside.add(file)
    assert inside == set()


def test_dynamic_imports_are_known() -> None:
    calls = {file for file in FILES if any(map(_imports_by_name, ast.walk(tree_of(file))))}
    assert calls == set(DYNAMIC_IMPORTS)


_SHUFFLED = """
import importlib, random, sys, inspect
import stio
modules = sys.argv[2:]
random.Random(int(sys.argv[1])).shuffle(modules)
for name in modules:
    importlib.import_module(name)
for name in stio.__all__:
    value = getattr(stio, name)
    if name not in ("__version__", "sync"):
        assert not inspect.ismodule(value), f"stio.{name} is a module"
        assert callable(value), name
for name in stio.sync.__all__:
    assert callable(getattr(stio.sync, name)), name
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(count(1, 3)))
def test_public_names_survive_the_import_of_all_submodules(torch_zygote: Zygote, seed: int) -> None:
    skipped = ("__main__.py", "integrations/")  # they run, or need a framework
    names = [
        "stio." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in FILES
        if file != "__init__.py" and not file.startswith(skipped)
    ]
    found = torch_zygote.run(_SHUFFLED, seed, *names)
    assert found.returncode == 0, found.stderr


def test_importing_stio_imports_no_torch() -> None:
    code = "import sys, stio; sys.exit('torch' in sys.modules or 'numpy' in sys.modules or 'anyio' in sys.modules)"
    # A real interpreter without torch: what it imports.
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_files_that_architecture_names_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py|[a-z_]+\.py)`", text))
    assert len(named) > 30
    assert sorted(name for name in named if name not in FILES and not (ROOT / name).exists()) == []


_TWINS = ("sync.py", "compat/safetensors/_installed.py", "compat/safetensors/_file.py")
"""Files whose classes have the names of those that they stand for."""

_SAME_CLASS_NAME = {"Saver": "`stio.Saver` and `stio.distributed.Saver` are public names"}


def test_a_name_of_a_class_has_one_meaning() -> None:
    """Also with and without an underscore: a reader searches for the word."""
    found: dict[str, list[str]] = {}
    for file in FILES:
        for node in tree_of(file).body if file not in _TWINS else ():
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(file)
    twice = {name: files for name, files in found.items() if len(files) > 1}
    assert twice.keys() == _SAME_CLASS_NAME.keys(), twice


def test_each_package_opens_with_an_essay() -> None:
    short = []
    for file in files_in(""):
        if file.endswith("/__init__.py"):
            lines = (ast.get_docstring(tree_of(file)) or "").splitlines()
            if len(lines) < 5:
                short.append(file)
    assert short == []
