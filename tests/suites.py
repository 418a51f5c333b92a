"""Runs the test suites of safetensors and huggingface_hub, unchanged, over stio's drop-in modules.

    python tests/suites.py DIR      # `make suites DIR=...`

DIR holds checkouts of the two repositories, `safetensors` and `huggingface_hub`; one that is missing is left out. The
suites are not part of this repository. What must pass was counted with the checkouts of May 2026 (safetensors 24b0b28)
and August 2026 (huggingface_hub ee0a451). A test that fails and is not in `EXPECTED` is a fault of a drop-in module.

Exit status: 0, all is as expected; 1, it is not; 77, there is no checkout.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from checkout import python_path

SKIPPED = 77


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests of another repository."""

    tests: str
    """Their directory in its checkout."""
    files: tuple[str, ...]
    """Those that test what stio replaces, for torch and numpy."""
    min_passed: int
    """How many must pass."""
    expected: Mapping[str, str]
    """Tests that fail, each with the reason."""
    conftest: str
    """Puts stio's modules in the place of the original's."""


SUITES = {
    "safetensors": Suite(
        "bindings/python/tests",
        tuple(
            f"test_{name}.py"
            for name in (
                "handle",
                "multithreaded",
                "pread_backend",
                "pt_comparison",
                "pt_model",
                "simple",
                "threadable",
            )
        ),
        66,
        {},
        """
import sys

import stio.compat.safetensors.numpy
import stio.compat.safetensors.torch

for name in ("safetensors", "safetensors.numpy", "safetensors.torch"):
    sys.modules[name] = sys.modules[f"stio.compat.{name}"]
""",
    ),
    "huggingface_hub": Suite(
        "tests",
        ("test_serialization.py",),
        45,
        {
            "test_load_state_dict_from_file": "a pickle is loaded with safe=False only, as by huggingface_hub 2.4",
            "test_load_torch_model_index_selection[model.variant{suffix}.bin-True-files_exist5-model.variant{suffix}.bin]": (
                "a pattern of pickles contradicts safe=True, as in huggingface_hub 2.4"
            ),
        },
        """
import sys
import types

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.serialization._base
import huggingface_hub.utils
import stio.compat.huggingface_hub as stio_hub

serialization = types.ModuleType("huggingface_hub.serialization")
vars(serialization).update({name: value for name, value in vars(stio_hub).items() if not name.startswith("__")})
serialization._base, serialization._torch = huggingface_hub.serialization._base, stio_hub
sys.modules["huggingface_hub.serialization"] = huggingface_hub.serialization = serialization
sys.modules["huggingface_hub.serialization._torch"] = stio_hub
for name in stio_hub.__all__:
    setattr(huggingface_hub, name, getattr(stio_hub, name))
""",
    ),
}


def run(name: str, checkout: Path) -> bool:
    """Run a suite; print what failed, and return whether all is as expected."""
    suite = SUITES[name]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkout / suite.tests, Path(folder, "tests"))
        Path(folder, "conftest.py").write_text(suite.conftest)
        command = [sys.executable, "-m", "pytest", "-q", "-r", "fE", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *(f"tests/{file}" for file in suite.files)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": python_path()},
            capture_output=True,
            text=True,
        )
    lines = done.stdout.splitlines()
    passed = int((re.search(r"(\d+) passed", done.stdout) or ["", "0"])[1])
    failed = {line.split("::", 1)[-1].partition(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))}
    unexpected = sorted(failed - suite.expected.keys())
    print(f"{name}: {passed} passed ({suite.min_passed} must), {len(failed)} failed")
    for test in sorted(failed & suite.expected.keys()):
        print(f"  expected: {test}: {suite.expected[test]}")
    for test in unexpected:
        print(f"  FAILED: {test}")
    if done.returncode not in (0, 1) or (unexpected and not failed):
        print("\n".join([*lines[-20:], done.stderr[-1000:]]))
    return done.returncode in (0, 1) and not unexpected and passed >= suite.min_passed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="holds the checkouts safetensors and huggingface_hub")
    directory = parser.parse_args().directory
    found = [name for name in SUITES if (directory / name / SUITES[name].tests).is_dir()]
    if not found:
        print(f"{directory} has no checkout of {' or '.join(SUITES)}")
        return SKIPPED
    results = [run(name, directory / name) for name in found]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
