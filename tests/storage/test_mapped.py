"""Mapped files: alive without their descriptor, private, and clear about files that shrink and disks that fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import needs_engine

from stio.errors import StorageError, TruncatedError
from stio.storage.local import LocalFile, MappedFile

DATA = random.Random(2).randbytes(3_000_001)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "faulty.bin"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def file(path: Path) -> Iterator[LocalFile]:
    file = LocalFile.open(str(path))
    yield file
    file.close()


@pytest.mark.parametrize("lazy", [False, True])
def test_holds_the_files_bytes(file: LocalFile, lazy: bool) -> None:
    mapped = MappedFile(file, lazy=lazy)
    mapped.populate(0, len(DATA))
    assert mapped.region.nbytes == len(DATA)
    assert mapped.region.tobytes() == DATA


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 0), (1, 1), (4095, 2), (4096, 4096), (len(DATA), 0), (len(DATA) - 1, 1)]
)
def test_populates_any_range(file: LocalFile, offset: int, nbytes: int) -> None:
    mapped = MappedFile(file)
    mapped.populate(offset, nbytes)
    assert mapped.region.sub(offset, nbytes).tobytes() == DATA[offset : offset + nbytes]


def test_outlives_descriptor_and_name(path: Path) -> None:
    file = LocalFile.open(str(path))
    region = MappedFile(file).region
    file.close()
    path.unlink()
    assert region.tobytes() == DATA


def test_writing_leaves_the_file_alone(file: LocalFile, path: Path) -> None:
    first, second = MappedFile(file), MappedFile(file)
    first.populate(0, len(DATA))
    first.region.write(5000, b"changed")
    assert first.region.sub(5000, 7).tobytes() == b"changed"
    assert second.region.tobytes() == DATA
    assert path.read_bytes() == DATA


def test_c90_shrunk_before_populating(file: LocalFile, path: Path) -> None:
    mapped = MappedFile(file)
    with path.open("r+b") as other:
        other.truncate(10_000)
    mapped.populate(0, 10_000)
    assert mapped.region.sub(0, 10_000).tobytes() == DATA[:10_000]
    with pytest.raises(TruncatedError) as caught:
        mapped.populate(9_000, 2_000)
    assert caught.value.offset == 10_000
    assert caught.value.path == str(path)


def test_c90_shrunk_before_mapping(file: LocalFile, path: Path) -> None:
    path.write_bytes(b"")
    mapped = MappedFile(file)
    with pytest.raises(TruncatedError):
        mapped.populate(0, 1)


def test_closed_file(path: Path) -> None:
    file = LocalFile.open(str(path))
    mapped = MappedFile(file)
    file.close()
    with pytest.raises(StorageError):
        mapped.populate(0, 1)
    with pytest.raises(StorageError, match="mapping"):
        MappedFile(file)


BY = pytest.mark.parametrize("by", ["plain", pytest.param("engine", marks=needs_engine)])
"""Who populates: `MappedFile`, or the engine."""


@pytest.mark.slow
@BY
def test_c89_disk_error(run_faulty: Callable[..., str], path: Path, by: str) -> None:
    """A fault does not say why; the read that follows it does."""
    run_faulty(
        """
        mapped = MappedFile(LocalFile.open(path))
        with pytest.raises(StorageError) as caught:
            populate(mapped, 8192, 4096, sys.argv[2])
        assert (caught.value.errno, caught.value.offset) == (errno.EIO, 8192)
        """,
        path,
        by,
        modes="fault broken",
    )


@pytest.mark.slow
def test_c90_fault_at_a_file_that_was_cut(run_faulty: Callable[..., str], path: Path) -> None:
    run_faulty(
        """
        mapped = MappedFile(LocalFile.open(path))
        from stio.storage.local import LocalFile
        real, cut = LocalFile.nbytes_now, []
        def late_cut(file):  # between the look at the size and the populating
            found = real(file)
            if not cut:
                cut.append(os.truncate(path, 9000))
            return found
        LocalFile.nbytes_now = late_cut
        with pytest.raises(TruncatedError) as caught:
            mapped.populate(8192, 4096)
        assert caught.value.offset == 9000
        """,
        path,
        modes="fault",
    )


@pytest.mark.matrix
@BY
@pytest.mark.parametrize("modes", ["fault", "oldkernel", "signal"])
def test_populating_is_advice(run_faulty: Callable[..., str], path: Path, modes: str, by: str) -> None:
    """A kernel that has no such call, a signal, a fault that does not come again: the bytes are there all the same."""
    run_faulty(
        """
        data, mapped = Path(path).read_bytes(), MappedFile(LocalFile.open(path))
        populate(mapped, 100, 2_500_000, sys.argv[2])
        assert hits() >= 1
        assert mapped.region.tobytes() == data
        """,
        path,
        by,
        modes=modes,
    )


@pytest.mark.matrix
@BY
def test_c89_poisoned_page(run_faulty: Callable[..., str], path: Path, by: str) -> None:
    run_faulty(
        """
        with pytest.raises(StorageError, match="populating") as caught:
            populate(MappedFile(LocalFile.open(path)), 0, 4096, sys.argv[2])
        assert caught.value.errno == 133  # EHWPOISON
        """,
        path,
        by,
        modes="poisoned",
    )
