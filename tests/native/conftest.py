"""The engine, compiled from the sources of this checkout, and simulated devices for it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from native.support import REPOSITORY, Device, compiled, devices_of

from stio import native


def why_not() -> str | None:
    """Return why the engine cannot be compiled here, None if it can."""
    if sys.platform != "linux":
        return "the engine is for Linux"
    return None if shutil.which("cc") else "there is no C compiler"


@pytest.fixture(scope="session", autouse=True)
def _library() -> None:
    """Compile the library if it is missing or older than its sources."""
    if reason := why_not():
        pytest.skip(reason)
    sources = [*(REPOSITORY / "stio" / "native").glob("*.[ch]"), REPOSITORY / "hatch_build.py"]
    newest = max(path.stat().st_mtime for path in sources)
    if not native.LIBRARY.exists() or native.LIBRARY.stat().st_mtime < newest:
        sys.path.insert(0, str(REPOSITORY))
        try:
            from hatch_build import compile_in_tree
        finally:
            sys.path.remove(str(REPOSITORY))
        assert compile_in_tree() == ""
    if not native.available():
        pytest.skip("the engine is switched off by STIO_NATIVE=0")


@pytest.fixture(scope="session")
def device_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("devices")
    return compiled(folder / "fake_device.so", "fake_device.c", "-shared", "-fPIC", "-Wno-unused-function")


@pytest.fixture(scope="session")
def devices(device_library: Path) -> list[Device]:
    """Return two simulated devices; nobody else uses them."""
    return devices_of(device_library)


@pytest.fixture
def device(devices: list[Device]) -> Iterator[Device]:
    """Return a simulated device without delay, whose rings are released behind the test."""
    yield devices[0]
    devices[0].reset()
