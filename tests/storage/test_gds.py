"""Files read into a device's memory: the contract of any storage, and what kvikio says made stio's errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvikio_stand_in import Kvikio

from stio.errors import StorageError
from stio.storage.gds import GdsFile
from stio.storage.local import HAVE_PREADV, LocalFile, open_file
from stio.testing import SourceContract, read_guarded

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not HAVE_PREADV, reason="GPUDirect Storage is Linux's")


class OfLocalFile(GdsFile):
    """Closes the file too."""

    def __init__(self, file: LocalFile) -> None:
        super().__init__(file)
        self._local = file

    def close(self) -> None:
        super().close()
        self._local.close()


class TestGdsFile(SourceContract):
    @pytest.fixture(autouse=True)
    def _kvikio(self, monkeypatch: pytest.MonkeyPatch):
        kvikio = Kvikio().install(monkeypatch)
        yield
        assert kvikio.num_open == 0

    def open(self, path: Path) -> OfLocalFile:
        return OfLocalFile(open_file(str(path)))


class TestShortReads(TestGdsFile):
    """A read may bring less than was asked for."""

    @pytest.fixture(autouse=True)
    def _kvikio(self, monkeypatch: pytest.MonkeyPatch):
        Kvikio(most_bytes=701).install(monkeypatch)


@pytest.fixture
def file(tmp_path: Path):
    path = tmp_path / "data"
    path.write_bytes(b"x" * 10_000)
    file = open_file(str(path))
    yield file
    file.close()


def test_errors_of_kvikio_become_stios(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    kvikio = Kvikio(fail_read=1).install(monkeypatch)
    direct = GdsFile(file)
    with pytest.raises(StorageError, match="I/O error") as caught:
        read_guarded(direct, 4096, 10)
    assert (caught.value.path, caught.value.offset) == (file.path, 4096)
    direct.close()
    kvikio.refuse_open = 2
    with pytest.raises(StorageError, match="no such driver"):
        GdsFile(file)
    kvikio.is_there = False
    with pytest.raises(StorageError, match="not set up"):
        GdsFile(file)
    assert kvikio.num_open == 0


def test_without_kvikio(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ImportError, match=r"pip install 'stio-torch\[gds\]', or, .* pip install kvikio-cu12"):
        GdsFile(file)


def test_a_kvikio_that_says_nothing_of_gds(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones have no such question."""
    Kvikio().install(monkeypatch)
    monkeypatch.delattr(sys.modules["kvikio.cufile_driver"], "get")
    with pytest.raises(StorageError, match="has no attribute 'get'"):
        GdsFile(file)
