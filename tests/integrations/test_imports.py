"""Each framework is imported by one module only, and no other module imports that one."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import run_python

import stio

PACKAGE = Path(stio.__file__).parent
OWNERS = {"transformers": "integrations/transformers.py", "lightning": "integrations/lightning.py"}


@cache
def imported() -> dict[str, set[str]]:
    """Return by module of stio what it imports."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        names = found[path.relative_to(PACKAGE).as_posix()] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            names |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
    return found


def importers(package: str) -> set[str]:
    return {
        path
        for path, names in imported().items()
        if any(name == package or name.startswith(f"{package}.") for name in names)
    }


@pytest.mark.slow
@pytest.mark.parametrize("package", OWNERS)
def test_one_module_imports_a_framework(package: str) -> None:
    assert importers(package) == {OWNERS[package]}
    assert importers(f"stio.integrations.{package}") == set()


@pytest.mark.slow
@pytest.mark.parametrize("package", OWNERS)
def test_a_missing_framework_is_named_with_its_extra(package: str, torch_zygote: Any) -> None:
    done = run_python(
        f"""
        import sys
        sys.modules[{package!r}] = None
        try:
            import stio.integrations.{package}
        except ImportError as error:
            print(error)
        """,
        python=torch_zygote.python,
    )
    assert done.stdout.endswith(f" of {package}: pip install 'stio-torch[{package}]'\n"), done.stderr


@pytest.mark.costly("imports of torch or of a framework in processes of its own")
def test_stio_imports_none_of_them(torch_zygote: Any) -> None:
    code = f"import sys, stio.sync, stio.integrations; print(sorted({set(OWNERS)} & set(sys.modules)))"
    done = run_python(code, python=torch_zygote.python)
    assert done.stdout == "[]\n", done.stderr
