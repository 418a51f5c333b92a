"""Installs what `make package` has put into dist/, in each way, and loads a checkpoint with it: with and without a compiler.

    python tests/installs.py          # all ways
    python tests/installs.py wheel    # one of them: wheel, sdist, tree, editable

Each environment is fresh, and finds torch and the tools of packaging in the one that runs this program, which gets what
stio needs first. Where there is no compiler, `PATH` is empty and `CC` names nothing. It must not matter for a wheel that
was built with one. An installation that compiles must say `plain` without one, and load all the same; with
`STIO_REQUIRE_NATIVE=1` it must fail. The checkout is used for nothing but dist/: a tree is what the sdist contains.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
IGNORED = {"CFLAGS", "LDFLAGS", "PYTHONPATH", "STIO_NATIVE"}
"""Variables of the caller that would change what is found."""
NO_COMPILER = {"PATH": "/nonexistent", "CC": "/nonexistent"}
FAILING = {"CC": "false"}
REQUIRED = {"STIO_REQUIRE_NATIVE": "1"}
ENGINE, PLAIN, REFUSED = "engine 5", "plain", "refused"

WAYS = {
    "wheel": [({}, ENGINE), (NO_COMPILER, ENGINE)],
    "sdist": [({}, ENGINE), (NO_COMPILER, PLAIN), (FAILING, PLAIN), ({**NO_COMPILER, **REQUIRED}, REFUSED)],
    "tree": [(REQUIRED, ENGINE), (NO_COMPILER, PLAIN)],
    "editable": [(REQUIRED, ENGINE), (NO_COMPILER, PLAIN), ({**FAILING, **REQUIRED}, REFUSED)],
}
"""Environment variables of an installation, and what `stio.stats()` says after it."""

CHECK = """
import sys
from pathlib import Path
import torch
import stio
from stio import native, sync

assert Path(stio.__file__).is_relative_to(sys.argv[1]), stio.__file__
tensors = {"a": torch.arange(1000.0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
sync.save(tensors, "model")
for memory in ("map", "copy"):
    loaded = sync.load("model", memory=memory)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
if native.available():  # its threads read the file too
    with open("model/model.safetensors", "rb") as file:
        data = torch.tensor(list(file.read()), dtype=torch.uint8)
        read, ranges, transfer = torch.zeros_like(data), native.Ranges(), native.Transfer()
        ranges.file_to_host(0, file.fileno(), -1, 0, len(data), read.data_ptr())
        transfer.add(ranges)
        assert [done.group for done in transfer.take(60)] == [0]
        transfer.end()
        assert torch.equal(read, data)
print(stio.stats().engine)
"""


def main(ways: list[str]) -> int:
    """Check the ways, all by default; return how many installations did something else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pip = ["-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    run([sys.executable, *pip, "--constraint", ROOT / "constraints.txt", *project["dependencies"]], ROOT)
    failed = 0
    for way in ways or WAYS:
        for variables, expected in WAYS[way]:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = installed(way, variables, Path(folder).resolve())
                except subprocess.CalledProcessError as error:
                    found = f"status {error.returncode}\n{error.stdout}"
            failed += found != expected
            where = " ".join(f"{name}={value}" for name, value in variables.items())
            print(f"{way}{' with ' if where else ''}{where}: {found}", flush=True)
            if found != expected:
                print(f"failed: {expected} is expected", flush=True)
    return failed


def installed(way: str, variables: dict[str, str], folder: Path) -> str:
    """Install in a fresh environment, and use it; return the name of its engine, or `REFUSED`.

    Raises:
        CalledProcessError: A step failed.
    """
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    target = source(way, folder)
    environment = {name: value for name, value in os.environ.items() if name not in IGNORED}
    environment = {**environment, "STIO_REQUIRE_NATIVE": "0", **variables}
    options = ["--verbose", "--no-deps", "--no-build-isolation", *(["--editable"] if way == "editable" else [])]
    try:
        output = run([python, "-m", "pip", "install", *options, target], folder, environment)
    except subprocess.CalledProcessError as error:
        if "the engine of stio cannot be compiled" in error.stdout:
            return REFUSED
        raise
    (folder / "work").mkdir()
    place = target if way == "editable" else packages
    switched_off = run([python, "-c", CHECK, place], folder / "work", {**environment, "STIO_NATIVE": "0"}).strip()
    found = run([python, "-c", CHECK, place], folder / "work", environment).strip()
    told = output.count("stio is built without its engine")
    if switched_off != PLAIN or told != (found == PLAIN):
        return f"{found}, and with STIO_NATIVE=0 {switched_off}; {told} lines say that there is no engine\n{output}"
    return found


def source(way: str, folder: Path) -> Path:
    """Return what pip is told to install."""
    (found,) = (ROOT / "dist").glob("stio_torch-*.whl" if way == "wheel" else "stio_torch-*.tar.gz")
    if way in ("wheel", "sdist"):
        return found
    with tarfile.open(found) as archive:
        archive.extractall(folder, filter="data")
    return folder / found.name.removesuffix(".tar.gz")


def run(command: list[object], cwd: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
