"""The public face: one list of names, cheap to import, documented, and at home in `stio`."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import subprocess
import sys
import time
import typing
from pathlib import Path
from typing import Any

import pytest
from crash.zygote import Zygote

import stio
import stio.sync

NAMES = [name for name in stio.__all__ if name not in ("__version__", "sync")]
CLASSES = [name for name in NAMES if isinstance(getattr(stio, name), type)]
ERRORS = [name for name in CLASSES if issubclass(getattr(stio, name), Exception)]


def run(code: str) -> str:
    # A real interpreter without torch: what `import stio` alone does.
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_the_lazy_table_is_what_type_checkers_see() -> None:
    seen = {}
    for node in ast.walk(ast.parse(Path(stio.__file__).read_text())):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                for alias in line.names:
                    assert alias.asname == alias.name  # the form that re-exports
                    seen[alias.name] = line.module
    assert seen.pop("distributed") == seen.pop("sync") == "stio"
    assert seen == stio._MODULE_OF
    assert set(stio.__all__) == {"__version__", "preload", "sync", *seen}
    assert set(dir(stio)) >= set(stio.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        stio.lode  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.slow
def test_stio_distributed_is_imported_at_its_first_use(torch_zygote: Zygote) -> None:
    code = (
        "import sys; torch = sys.modules.pop('torch'); import stio; before = 'torch' in sys.modules;"
        "sys.modules['torch'] = torch; print(before, stio.distributed.load_into.__name__)"
    )
    assert torch_zygote.run(code).stdout == "False load_into\n"


@pytest.mark.costly("imports of torch or of a framework in processes of its own")
def test_import_sync_imports_all_that_it_runs(torch_zygote: Zygote, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.arange(6.0)}, tmp_path / "model.safetensors")
    code = (
        "import sys, stio.sync; before = set(sys.modules);"
        f"stio.sync.load({str(tmp_path)!r});"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith('stio')))"
    )
    assert torch_zygote.run(code).stdout == "[]\n"


@pytest.mark.parametrize("name", NAMES)
def test_objects_say_stio(name: str) -> None:
    assert getattr(stio, name).__module__ == "stio"
    assert getattr(stio, name).__doc__


@pytest.mark.costly("imports of torch or of a framework in processes of its own")
def test_errors_say_stio_before_anybody_asked(torch_zygote: Zygote) -> None:
    code = "import stio.sync, stio.errors; print(stio.errors.FormatError)"
    assert torch_zygote.run(code).stdout == "<class 'stio.FormatError'>\n"


@pytest.mark.parametrize(
    "name", ["Checkpoint", "Follower", "Limits", "ProgressEvent", "Span", "Stats", "Stream", "TensorInfo", "Trace"]
)
def test_members_are_documented(name: str) -> None:
    for member, value in vars(getattr(stio, name)).items():
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
            assert inspect.getdoc(value), f"{name}.{member}"


def test_sync_has_the_same_names() -> None:
    for name in stio.sync.__all__:
        awaitable, blocking = getattr(stio, name), getattr(stio.sync, name)
        assert blocking.__doc__
        if inspect.isfunction(awaitable):
            assert inspect.signature(awaitable).parameters == inspect.signature(blocking).parameters, name
    wanted = {"aclose": "close", "__aenter__": "__enter__", "__aexit__": "__exit__", "__anext__": "__next__"}
    for name in ("Checkpoint", "Follower", "Stream"):
        members = {wanted.get(m, m) for m in vars(getattr(stio, name)) if m in wanted or not m.startswith("_")}
        assert members <= set(dir(getattr(stio.sync, name))), name


@pytest.mark.parametrize("name", ERRORS)
def test_errors_pickle(name: str) -> None:
    made: Any = getattr(stio, name)("it broke", path="a/b", offset=8, expected=1, found="two")
    for again in (pickle.loads(pickle.dumps(made)), copy.copy(made)):
        assert type(again) is type(made)
        assert (str(again), again.path, again.offset) == (str(made), "a/b", 8)


def test_values_pickle() -> None:
    values = [
        stio.Limits(max_rank=3),
        stio.LoadReport(("a",), ("b",)),
        stio.ProgressEvent(1, 2, 3, 4, 5.0),
        stio.Span("read", "read-1", 0.0, 1.0),
        stio.TensorInfo("w", "F32", (2, 3), 24, "model.safetensors", 80),
        stio.Trace(origin=0.5),
    ]
    assert pickle.loads(pickle.dumps(values)) == values
    assert copy.deepcopy(values) == values
    assert pickle.loads(pickle.dumps(stio.load)) is stio.load


@pytest.mark.parametrize("name", CLASSES)
def test_annotations_resolve_from_stio(name: str) -> None:
    typing.get_type_hints(getattr(stio, name))


def test_a_pickled_error_opens_in_a_process_that_has_nothing_imported() -> None:
    data = pickle.dumps(stio.TruncatedError("short", path="x"))
    assert run(f"import pickle; print(type(pickle.loads({data!r})))") == "<class 'stio.TruncatedError'>"


@pytest.mark.matrix
@pytest.mark.parametrize(("gil", "num_warnings"), [("lambda: False", 1), ("lambda: True", 0), ("", 0)])
def test_a_python_without_the_gil_gets_one_warning(gil: str, num_warnings: int) -> None:
    patch = f"sys._is_gil_enabled = {gil}" if gil else "vars(sys).pop('_is_gil_enabled', None)"
    code = (
        f"import sys, warnings; {patch}; caught = warnings.catch_warnings(record=True); seen = caught.__enter__();"
        "warnings.simplefilter('always'); import stio, stio.errors; stio.Trace, stio.Limits;"
        "print([(type(one.message).__name__, 'without the GIL' in str(one.message), one.filename) for one in seen])"
    )
    assert run(code) == str([("RuntimeWarning", True, "<string>")] * num_warnings)


def test_version_is_the_installed_one() -> None:
    code = "import importlib.metadata as m; (entry,) = m.entry_points(group='console_scripts', name='stio')"
    assert run(f"{code}; print(entry.dist.version)") == stio.__version__


def test_time_to_first_name_is_not_torch() -> None:
    start = time.perf_counter()
    assert run("import sys, stio; stio.FormatError, stio.Trace; print('torch' in sys.modules)") == "False"
    assert time.perf_counter() - start < 5
