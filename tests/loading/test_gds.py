"""Files for cuFile: where the library is found, what is registered and released, what it refuses made stio's errors."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import cufile_stand_in
import pytest
from support import needs_engine

from stio.errors import StorageError
from stio.loading import gds_path
from stio.loading.gds_path import GdsFile
from stio.storage.local import LocalFile

pytestmark = [
    needs_engine,
    pytest.mark.skipif(sys.platform != "linux", reason="GPUDirect Storage is Linux's"),
]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LocalFile]:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 10_000)
    file = LocalFile.open(str(path))
    yield file
    file.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_is_registered_and_released(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice at one time too, by a descriptor of its own each: cuFile refuses one that it knows."""
    cufile, before = cufile_stand_in.install(monkeypatch), num_descriptors()
    both = [GdsFile(file), GdsFile(file)]
    assert cufile.num_open == 2
    assert len({file.fd, *(one._fd for one in both)}) == 3
    assert all(os.path.samestat(os.fstat(one._fd), os.fstat(file.fd)) for one in both)
    assert [one.error for one in both] == [None, None]
    assert all(one.has_driver for one in both)
    for one in both:
        one.close()
    assert (cufile.num_open, num_descriptors()) == (0, before)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"refuse_file": 1}, "the filesystem of this file does not support it"),
        ({"open_code": 5001}, "nvidia-fs is not loaded"),
        ({"open_code": 5030}, "/run/udev"),
        ({"open_code": 5049}, "cuFile's error 5049$"),
    ],
    ids=str,
)
def test_what_cufile_refuses(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch, fault: dict[str, int], says: str
) -> None:
    cufile, before = cufile_stand_in.install(monkeypatch, **fault), num_descriptors()
    with pytest.raises(StorageError, match=says) as caught:
        GdsFile(file)
    assert (caught.value.path, caught.value.errno) == (file.path, errno.EIO)
    assert (cufile.num_open, num_descriptors()) == (0, before)


def test_a_driver_that_is_open_already(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another user of cuFile in the process."""
    cufile_stand_in.install(monkeypatch, open_code=5026)
    GdsFile(file).close()


def test_compatibility_mode_is_told(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    cufile_stand_in.install(monkeypatch, has_driver=0)
    direct = GdsFile(file)
    assert not direct.has_driver
    direct.close()


def test_a_filesystem_without_direct_reads(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuFile decides what it makes of a descriptor without O_DIRECT."""
    cufile_stand_in.install(monkeypatch)
    opened = os.open

    def without_direct(path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads")
        return opened(path, flags)

    monkeypatch.setattr(gds_path.os, "open", without_direct)
    GdsFile(file).close()


def test_a_system_without_a_list_of_modules(file: LocalFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """cuFile would not return there."""
    cufile = cufile_stand_in.install(monkeypatch)
    monkeypatch.setattr(gds_path, "_MODULES", tmp_path / "modules")
    with pytest.raises(StorageError, match="modules, which cuFile needs"):
        GdsFile(file)
    assert cufile.num_opened == 0


def test_without_cufile(file: LocalFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gds_path, "_CUFILE", "libnowhere.so.0")
    monkeypatch.setattr(gds_path, "_CUDA_LIBRARIES", str(tmp_path))
    with pytest.raises(
        ImportError, match=r"pip install 'stio-torch\[gds\]', or, .* nvidia-cufile-cu12; libnowhere.so.0: cannot"
    ):
        GdsFile(file)


def test_a_library_that_is_not_cufile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds_path, "_cufile_paths", lambda: ["libc.so.6"])
    with pytest.raises(ImportError, match="libc.so.6 has no function cuFileDriverOpen"):
        GdsFile.require_library()


@pytest.mark.parametrize("place", ["cufile", "cu13", "toolkit"])
def test_the_library_is_found_in_wheels_and_in_the_toolkit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    """NVIDIA's wheels for CUDA 12 and 13 have it in different folders, of which none is on the linker's path."""
    monkeypatch.setattr(gds_path, "_CUFILE", "libstand_in.so.0")
    monkeypatch.setattr(gds_path, "_CUDA_LIBRARIES", str(tmp_path / "toolkit" / "lib"))
    spec = ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(gds_path, "find_spec", lambda name: {"nvidia": spec}[name])
    library = tmp_path / place / "lib" / "libstand_in.so.0"
    library.parent.mkdir(parents=True)
    library.write_bytes(cufile_stand_in.library().read_bytes())
    assert GdsFile.require_library()
