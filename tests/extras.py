"""Each extra alone, in an environment of its own: `make extras`, or `python tests/extras.py cli hash` for some of them.

A fresh environment gets the pinned torch first and then the wheel in dist/ with one extra, held to constraints.txt. pip must
find nothing broken, torch must be the one that was there, and what the extra is for must work. The first is no extra at all.
Takes a minute or two each.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
NONE = "none"

_SAVED = "import stio.sync, torch; stio.sync.save({'w': torch.arange(4.0)}, 'm', hash=None); "
CHECKS = {
    NONE: f"{_SAVED}assert stio.sync.load('m')['w'].sum() == 6; from stio.compat.safetensors.torch import load_file",
    "bench": "import fastsafetensors, runai_model_streamer, runai_model_streamer_s3",
    "cli": "from stio.cli.main import main; from tqdm.auto import tqdm; main(['--version'])",
    "dev": "import blockbuster, fastapi, httpx, hypothesis, mypy, pytest, ruff, safetensors, trio, uvicorn",
    "docs": "import material, mkdocs, mkdocstrings",
    "gds": "from stio.loading.gds_path import GdsFile; GdsFile.require_library()",
    "hash": f"{_SAVED.replace('None', repr('xxh3'))}stio.sync.load('m', verify=True)",
    "hub": "from stio.compat.huggingface_hub import save_torch_model; import torch; from pathlib import Path; "
    "Path('m').mkdir(); save_torch_model(torch.nn.Linear(2, 2), 'm')",
    "lightning": "from stio.integrations.lightning import StioCheckpointIO; StioCheckpointIO()",
    "otel": "from stio.integrations.opentelemetry import recording",
    "plot": "import matplotlib.pyplot",
    "remote": "from stio import RemoteRoot; assert RemoteRoot('https://127.0.0.1/m').path == 'https://127.0.0.1/m'",
    "transformers": "from stio.integrations.transformers import StioCallback; StioCallback()",
}
"""What must work with an extra, run by `python -c` in an empty directory."""


def main(wanted: list[str]) -> int:
    """Install what is wanted, all by default; return how many failed."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if set(CHECKS) != {NONE, *extras}:
        sys.exit(f"no check for: {sorted({NONE, *extras} ^ set(CHECKS))}")
    (wheel,) = (ROOT / "dist").glob("stio_torch-*.whl")
    failed = 0
    for extra in wanted or sorted(CHECKS):
        with tempfile.TemporaryDirectory() as folder:
            try:
                install(wheel, extra, Path(folder))
                print(f"{extra}: installs alone, and works", flush=True)
            except subprocess.CalledProcessError as error:
                failed += 1
                print(f"{extra}: failed: {' '.join(map(str, error.cmd))}\n{error.stdout}", flush=True)
    return failed


def install(wheel: Path, extra: str, folder: Path) -> None:
    """Make an environment with one extra and use it.

    Raises:
        CalledProcessError: A step failed.
    """
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    into = [*pip, "install", "--no-compile", "--constraint", ROOT / "constraints.txt"]
    version = [python, "-c", "import importlib.metadata; print(importlib.metadata.version('torch'))"]
    run([*into, "torch"], folder)
    before = run(version, folder)
    run([*into, str(wheel) if extra == NONE else f"{wheel}[{extra}]"], folder)
    run([*pip, "check"], folder)
    if (after := run(version, folder)) != before:
        raise subprocess.CalledProcessError(1, into, f"torch was {before} and is {after}")
    (folder / "work").mkdir()
    run([python, "-I", "-c", CHECKS[extra]], folder / "work")


def run(command: list[object], cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
