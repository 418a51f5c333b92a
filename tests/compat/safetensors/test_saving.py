"""Saving: the original's checks and bytes, and what a save must not do to what stands there."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import safetensors.numpy as official_numpy
import safetensors.torch as official
import torch
from support import needs_f4

import stio
import stio.sync
from stio.compat.safetensors import SafetensorError
from stio.compat.safetensors import numpy as in_numpy
from stio.compat.safetensors import torch as in_torch
from stio.errors import StorageError
from stio.storage.commit import collect_garbage
from stio.storage.commit import syscalls as calls
from stio.storage.commit.destination import SingleFile, is_one_file, resolve
from stio.storage.commit.directory_lock import directory_lock
from stio.storage.commit.transaction import LocalTransaction

T = torch.arange(4.0)
A = np.arange(4, dtype=np.float32)

Save = Callable[..., bytes]


def in_file(save_file: Callable[..., None]) -> Callable[[Path], Save]:
    def bind(folder: Path) -> Save:
        def save(tensors: Any, metadata: Any = None) -> bytes:
            save_file(tensors, folder / "out.safetensors", metadata)
            assert os.listdir(folder) == ["out.safetensors"]
            return (folder / "out.safetensors").read_bytes()

        return save

    return bind


@pytest.fixture(params=["memory", "file"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Save:
    return in_torch.save if request.param == "memory" else in_file(in_torch.save_file)(tmp_path)


@pytest.fixture(params=["memory", "file"])
def save_arrays(request: pytest.FixtureRequest, tmp_path: Path) -> Save:
    return in_numpy.save if request.param == "memory" else in_file(in_numpy.save_file)(tmp_path)


CASES: list[tuple[dict[str, torch.Tensor], dict[str, str] | None]] = [
    ({}, None),
    ({}, {"k": "v"}),
    ({"a": T}, None),
    ({"a": T}, {}),
    ({"a": T}, {'k\n"\\é': "\u2028\0\x7f"}),
    ({"b": T, "a": T + 1, "c": torch.arange(3), "d": torch.zeros(0, 3), "e": torch.tensor(1.0)}, {"format": "pt"}),
    ({"": T, "é\n": T + 1, "\x7f": T + 2}, None),
    ({"a": T[:2], "b": T[2:]}, None),
    ({"z": torch.zeros(0, 3).t(), "y": torch.zeros(3, 0)}, None),
    ({"p": torch.nn.Parameter(T)}, None),
]
BYTES = torch.ones(2, 2, dtype=torch.uint8)
for name in ("float4_e2m1fn_x2", "float8_e8m0fnu"):
    if hasattr(torch, name):  # from 2.7 or 2.8 on
        CASES.append(({"x": BYTES.view(getattr(torch, name)), "h": torch.ones(2, dtype=torch.bfloat16)}, None))


@pytest.mark.matrix
@pytest.mark.parametrize(("tensors", "metadata"), CASES)
def test_the_bytes_are_the_original_s(
    save: Save, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> None:
    assert save(tensors, metadata) == official.save(tensors, metadata)


def test_several_metadata_keys_are_in_order(save: Save) -> None:
    """Better: the original's order is another one each time."""
    metadata = {f"k{k}": "v" for k in (3, 1, 2)}
    raw = save({"a": T}, metadata)
    assert raw == save({"a": T}, dict(sorted(metadata.items())))
    assert list(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]) == ["k1", "k2", "k3"]


def test_nothing_with_empty_metadata(save: Save) -> None:
    """Better: the original writes what no JSON reader takes."""
    raw = save({}, {})
    assert json.loads(raw[8:]) == {"__metadata__": {}}
    assert in_torch.load(raw) == {}


def test_an_ordered_dict_and_a_subclass_are_dicts(save: Save) -> None:
    assert save(OrderedDict(a=T)) == official.save({"a": T})


REFUSED: list[tuple[str, Callable[[], object], type[Exception], str]] = [
    ("list", lambda: [T], ValueError, "Expected a dict of [str, torch.Tensor] but received <class 'list'>"),
    (
        "none",
        lambda: {"a": None},
        ValueError,
        "Key `a` is invalid, expected torch.Tensor but received <class 'NoneType'>",
    ),
    (
        "array",
        lambda: {"a": A},
        ValueError,
        "Key `a` is invalid, expected torch.Tensor but received <class 'numpy.ndarray'>",
    ),
    ("sparse", lambda: {"a": T.to_sparse()}, ValueError, "You are trying to save a sparse tensors: `['a']` which this"),
    (
        "strided",
        lambda: {"a": torch.zeros(3, 4).t()},
        ValueError,
        "You are trying to save a non contiguous tensor: `a`",
    ),
    (
        "expanded",
        lambda: {"a": torch.ones(1).expand(4)},
        ValueError,
        "You are trying to save a non contiguous tensor: `a`",
    ),
    ("same", lambda: {"a": T, "b": T}, RuntimeError, "Some tensors share memory"),
    ("overlap", lambda: {"a": T[:3], "b": T[2:]}, RuntimeError, "Some tensors share memory"),
    ("meta", lambda: {"a": torch.zeros(2, device="meta")}, RuntimeError, "Cannot copy out of meta tensor; no data!"),
    ("name", lambda: {1: T}, TypeError, "'int' object is not an instance of 'str'"),
    ("half", lambda: {"\ud800": T}, UnicodeEncodeError, "surrogates not allowed"),
]


@pytest.mark.parametrize(
    ("tensors", "kind", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refused_as_by_the_original(
    save: Save, tensors: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        save(tensors())
    assert message in " ".join(str(caught.value).split())
    with pytest.raises(kind) as theirs:
        official.save(tensors())
    assert message in " ".join(str(theirs.value).split())


def test_shared_names_are_named(save: Save) -> None:
    with pytest.raises(RuntimeError, match=r"\{'(one|two)', '(one|two)'\}"):
        save({"one": T, "two": T, "three": torch.ones(1)})


def test_a_small_tensor_inside_hides_no_other(save: Save) -> None:
    """Better: the original compares with the last end, not the furthest."""
    assert in_torch._find_shared_tensors({"a": T, "b": T[:1], "c": T[2:]}) == [{"a", "b", "c"}]
    with pytest.raises(RuntimeError, match="share memory"):
        save({"a": T, "c": T[2:]})


@pytest.mark.parametrize("dtype", [torch.complex128, torch.bits8], ids=str)
def test_dtypes_that_the_format_lacks(save: Save, dtype: torch.dtype) -> None:
    """Better: a KeyError there."""
    with pytest.raises(SafetensorError, match=f'Unknown dtype "{str(dtype)[6:]}". Supported dtypes: bool'):
        save({"a": torch.zeros(2, dtype=dtype)})


def test_names_that_no_reader_finds(save: Save, save_arrays: Save) -> None:
    """Better: the original saves them."""
    for name in ("__metadata__", "a\0b"):
        for call, value in ((save, T), (save_arrays, A)):
            with pytest.raises(SafetensorError, match="a tensor cannot have the name"):
                call({name: value})


@needs_f4
def test_a_pair_of_f4_without_a_dimension(save: Save) -> None:
    with pytest.raises(SafetensorError, match="half a byte"):
        save({"a": torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)})


def test_pending_conjugation_and_negation(save: Save) -> None:
    """Better: saved unresolved there."""
    number = torch.tensor([1 + 2j, 3 - 1j])
    shown = {"c": number.conj(), "n": torch.tensor([1 + 2j]).conj().imag.contiguous()}
    assert shown["c"].is_conj()
    negative = torch._neg_view(torch.tensor([5.0, -6.0]))
    assert negative.is_neg()
    shown["n"] = negative
    found = in_torch.load(save(shown))
    assert found["c"].tolist() == [1 - 2j, 3 + 1j]
    assert found["n"].tolist() == [-5.0, 6.0]


def test_autograd_is_no_obstacle(save: Save) -> None:
    weight = torch.ones(2, requires_grad=True)
    assert in_torch.load(save({"a": weight, "b": weight * 2}))["b"].tolist() == [2, 2]


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, ["a"], "a", {"a": None}])
def test_metadata_of_wrong_types(save: Save, save_arrays: Save, metadata: Any) -> None:
    for call, value in ((save, T), (save_arrays, A)):
        with pytest.raises(TypeError, match="argument 'metadata'"):
            call({"a": value}, metadata)
    with pytest.raises(TypeError):
        official.save({"a": T}, metadata)


def test_metadata_with_half_a_pair(save: Save) -> None:
    with pytest.raises(UnicodeEncodeError):
        save({"a": T}, {"k": "\ud800"})


# numpy.

ARRAYS: list[tuple[str, np.ndarray[Any, Any]]] = [
    ("plain", np.arange(6.0).reshape(2, 3)),
    ("scalar", np.array(3, np.int16)),
    ("bool", np.array([True, False])),
    ("half", np.arange(3, dtype=np.float16)),
    ("complex", np.array([1 + 2j], np.complex64)),
    ("big-endian", np.arange(5, dtype=">i4")),
    ("big-endian half", np.arange(5, dtype=">f2")),
    ("empty", np.zeros((0, 4), np.uint64)),
    ("read-only", np.frombuffer(b"1234", np.uint8)),
]
BETTER_ARRAYS: list[tuple[str, np.ndarray[Any, Any]]] = [
    ("transposed", np.arange(6.0).reshape(2, 3).T),
    ("fortran", np.asfortranarray(np.arange(6.0).reshape(2, 3))),
    ("every other", np.arange(8, dtype=np.uint8)[::2]),
    ("backwards", np.arange(8, dtype=np.uint8)[::-1]),
    ("broadcast", np.broadcast_to(np.float32(1), (3, 2))),
    ("big-endian strided", np.arange(6, dtype=">i8").reshape(2, 3).T),
    ("number", np.float32(2.5)),  # type: ignore[list-item]
]


@pytest.mark.parametrize("array", [case[1] for case in ARRAYS], ids=[case[0] for case in ARRAYS])
def test_arrays(save_arrays: Save, array: np.ndarray[Any, Any]) -> None:
    assert save_arrays({"a": array, "b": A}) == official_numpy.save({"a": array, "b": A})


@pytest.mark.matrix
@pytest.mark.parametrize(
    "array", [case[1] for case in ARRAYS + BETTER_ARRAYS], ids=[case[0] for case in ARRAYS + BETTER_ARRAYS]
)
def test_arrays_come_back(save_arrays: Save, tmp_path: Path, array: np.ndarray[Any, Any]) -> None:
    """Better: strides are scrambled there."""
    raw = save_arrays({"a": array})
    wanted = np.asarray(array).astype(np.asarray(array).dtype.newbyteorder("="))
    for found in (in_numpy.load(raw)["a"], official_numpy.load(raw)["a"]):
        np.testing.assert_array_equal(found, wanted, strict=True)
    (tmp_path / "again").write_bytes(raw)
    for backend in ("mmap", "pread"):
        found = in_numpy.load_file(tmp_path / "again", backend=backend)["a"]
        np.testing.assert_array_equal(found, wanted, strict=True)
        assert found.flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.zeros(2, complex), np.array(["x"]), np.array([{}]), np.zeros(1, "M8[D]"), np.zeros(2, "V1")],
    ids=lambda a: a.dtype.name,
)
def test_arrays_that_the_format_lacks(save_arrays: Save, array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(SafetensorError, match="^Unknown dtype"):
        save_arrays({"a": array})


@pytest.mark.parametrize("value", [[A], {"a": [1]}, {"a": T}])
def test_what_is_no_array(save_arrays: Save, value: Any) -> None:
    for call in (save_arrays, official_numpy.save):
        with pytest.raises(AttributeError):
            call(value)


# Files.


@pytest.mark.parametrize("name", ["model", "model.st", "model.safetensors", "model.safetensors.part", ".hidden"])
def test_any_name_is_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.manifest.json").write_text("somebody's")
    for path in (tmp_path / name, str(tmp_path / name)):
        in_torch.save_file({"a": T}, path)
        assert (tmp_path / name).read_bytes() == official.save({"a": T})
    assert set(os.listdir(tmp_path)) - {name} <= {"model.safetensors.manifest.json"}
    assert name == "model.safetensors" or (tmp_path / "model.safetensors.manifest.json").read_text() == "somebody's"


def test_a_relative_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_numpy.save_file({"a": A}, "plain")
    assert in_numpy.load_file("plain")["a"].tolist() == A.tolist()


def test_modes(tmp_path: Path) -> None:
    """Better: 0600 there, whatever the umask, whatever stood there."""
    old = os.umask(0o027)
    try:
        in_torch.save_file({"a": T}, tmp_path / "f")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o640
    (tmp_path / "f").chmod(0o604)
    in_torch.save_file({"a": T}, tmp_path / "f")
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o604


def test_saving_over_what_is_mapped(tmp_path: Path) -> None:
    in_torch.save_file({"a": T}, tmp_path / "f")
    loaded, arrays = in_torch.load_file(tmp_path / "f"), in_numpy.load_file(tmp_path / "f")
    in_torch.save_file({"a": loaded["a"] + 1}, tmp_path / "f")
    in_torch.save_file(loaded, tmp_path / "g")
    assert loaded["a"].tolist() == arrays["a"].tolist() == T.tolist()
    assert in_torch.load_file(tmp_path / "f")["a"].tolist() == (T + 1).tolist()
    assert in_torch.load_file(tmp_path / "g")["a"].tolist() == T.tolist()


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    in_torch.save_file({"a": T}, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == official.save({"a": T})


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    before = sorted(os.listdir(tmp_path))
    for bad in (tmp_path / "no" / "f", tmp_path / "dir", tmp_path / "file" / "f", tmp_path / "fifo", ""):
        for call in (
            lambda bad=bad: in_torch.save_file({"a": T}, bad),
            lambda bad=bad: in_numpy.save_file({"a": A}, bad),
        ):
            with pytest.raises(SafetensorError, match="^Error while serializing: I/O error: "):
                call()
    assert sorted(os.listdir(tmp_path)) == before
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    for wrong in (None, 3, b"name"):
        with pytest.raises(TypeError, match="filename"):
            in_torch.save_file({"a": T}, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="filename"):
            in_numpy.save_file({"a": A}, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("small_bytes", [-1, 1 << 20], ids=["transaction", "small"])
def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int) -> None:
    monkeypatch.setattr(in_numpy, "_SMALL_BYTES", small_bytes)
    in_torch.save_file({"a": T}, tmp_path / "f")
    before = (tmp_path / "f").read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(calls, "fsync", full)
    for call in (
        lambda: in_torch.save_file({"a": T + 1}, tmp_path / "f"),
        lambda: in_numpy.save_file({"a": A}, tmp_path / "f"),
    ):
        with pytest.raises(SafetensorError, match="No space left on device") as caught:
            call()
        assert isinstance(caught.value.__cause__, StorageError)
        assert caught.value.__cause__.errno == errno.ENOSPC
    assert (tmp_path / "f").read_bytes() == before
    assert os.listdir(tmp_path) == ["f"]


@pytest.fixture
def no_file_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_numpy, "_SMALL_BYTES", -1)


@pytest.mark.parametrize("small_bytes", [-1, 1 << 20], ids=["transaction", "small"])
def test_files_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int) -> None:
    """Better: nothing is synced there."""
    monkeypatch.setattr(in_numpy, "_SMALL_BYTES", small_bytes)
    log: list[str] = []
    for name in ("fsync", "sync_directory", "rename"):
        plain = getattr(calls, name)
        monkeypatch.setattr(calls, name, lambda *a, plain=plain, name=name, **k: (log.append(name), plain(*a, **k))[1])
    in_torch.save_file({"a": T}, tmp_path / "f")
    published = log.index("rename")
    if small_bytes < 0:  # the first one shows that the filesystem renames
        published = log.index("rename", published + 1)
    assert "fsync" in log[:published]
    assert "sync_directory" in log[published:]


@pytest.mark.slow
def test_large_tensors_and_many(tmp_path: Path) -> None:
    tensors = {f"t{k}": torch.full((k % 7,), float(k)) for k in range(500)} | {
        "big": torch.arange(9 << 20, dtype=torch.int32)
    }
    in_torch.save_file(tensors, tmp_path / "f", {"k": "v"})
    assert (tmp_path / "f").read_bytes() == official.save(tensors, {"k": "v"})
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    in_numpy.save_file(arrays, tmp_path / "g", {"k": "v"})
    assert (tmp_path / "g").read_bytes() == (tmp_path / "f").read_bytes()


def small_file_steps(path: Path, monkeypatch: pytest.MonkeyPatch, *, dies_at: int) -> int:
    """Save a small file; a system call that changes the disk raises, and nothing after it is done. Return how many ran."""

    class Died(BaseException):
        pass

    done = 0

    def dying(plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal done
            if done >= dies_at:
                raise Died
            done += 1
            return plain(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch:
        for name in ("open_file", "try_lock", "write_bytes", "fsync", "rename", "unlink", "unlock", "sync_directory"):
            patch.setattr(calls, name, dying(getattr(calls, name)))
        with suppress(Died):
            in_torch.save_file({"a": T + 1}, path)
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # that of the list itself is closed
            if os.readlink(f"/proc/self/fd/{fd}").endswith("/.stio-lock"):
                os.close(fd)  # a process that dies holds no lock
    return done


def test_a_small_save_that_dies_leaves_the_old_or_the_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps = small_file_steps(tmp_path / "f", monkeypatch, dies_at=99)
    assert 8 <= num_steps < 24
    left = set()
    for step in range(num_steps):
        in_torch.save_file({"a": T}, tmp_path / "f")
        small_file_steps(tmp_path / "f", monkeypatch, dies_at=step)
        found = in_torch.load_file(tmp_path / "f")["a"].clone()
        assert torch.equal(found, T) or torch.equal(found, T + 1)
        left |= {re.sub("[0-9a-f]{10}", "ID", name) for name in os.listdir(tmp_path)}
        assert collect_garbage(tmp_path / "f").failed == ()
        assert set(os.listdir(tmp_path)) <= {"f", ".stio-lock"}
        assert torch.equal(in_torch.load_file(tmp_path / "f")["a"], found)
    assert left == {"f", ".stio-ID.file", ".stio-lock"}
    in_torch.save_file({"a": T}, tmp_path / "f")
    assert os.listdir(tmp_path) == ["f"]


def test_recovery_keeps_a_small_file_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, reports = calls.fsync, []

    def recovered(fd: int) -> None:
        if not reports:
            reports.append(collect_garbage(tmp_path / "f"))
            in_torch.save_file({"a": T + 1}, tmp_path / "g")  # beside it: by a transaction
        plain(fd)

    monkeypatch.setattr(calls, "fsync", recovered)
    in_torch.save_file({"a": T}, tmp_path / "f")
    assert len(reports[0].kept) == 1
    assert sorted(os.listdir(tmp_path)) == ["f", "g"]


def test_a_recovery_that_sees_a_small_file_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, reports = calls.try_lock, []

    def late(fd: int) -> bool | None:
        if not reports:
            reports.append(None)
            reports.append(collect_garbage(tmp_path / "f"))
        return plain(fd)

    monkeypatch.setattr(calls, "try_lock", late)
    in_torch.save_file({"a": T}, tmp_path / "f")
    assert len(reports[1].undone) == 1
    assert torch.equal(in_torch.load_file(tmp_path / "f")["a"], T)
    assert os.listdir(tmp_path) == ["f"]


def test_a_checkpoint_that_is_saved_meanwhile_leaves_no_manifest_beside_a_small_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is listed again under its lock, behind which nobody else publishes."""
    path, fsync, saved = tmp_path / "model.safetensors", calls.fsync, list[object]()

    def meanwhile(fd: int) -> None:
        if not saved:
            saved.append(None)
            stio.sync.save({"b": torch.zeros(9)}, path, hash="sha256")
            assert sorted(os.listdir(tmp_path))[-1] == "model.safetensors.manifest.json"
        fsync(fd)

    monkeypatch.setattr(calls, "fsync", meanwhile)
    in_torch.save_file({"a": torch.ones(3)}, path)
    assert saved and os.listdir(tmp_path) == [path.name]
    assert official.load_file(path)["a"].tolist() == [1, 1, 1]


def test_a_small_file_waits_for_the_lock_of_its_directory(tmp_path: Path) -> None:
    home_fd = os.open(tmp_path, os.O_RDONLY)
    with directory_lock(home_fd, str(tmp_path)):
        thread = threading.Thread(target=in_torch.save_file, args=({"a": torch.ones(3)}, tmp_path / "x"))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and not (tmp_path / "x").exists()
    thread.join(20)
    os.close(home_fd)
    assert os.listdir(tmp_path) == ["x"]


def test_one_file_is_a_destination_of_its_own(tmp_path: Path) -> None:
    assert is_one_file(SingleFile("x"))
    assert is_one_file("x.safetensors")
    assert not is_one_file("x")
    assert os.fspath(SingleFile("x")) == "x"
    assert resolve(SingleFile(str(tmp_path / "x"))).kind == "file"
    assert resolve(tmp_path / "x").kind == "fresh"
    with pytest.raises(StorageError, match="is a directory"):
        resolve(SingleFile(str(tmp_path)))


@pytest.mark.usefixtures("no_file_is_small")
@pytest.mark.parametrize("between", ["another save", "another program", "its end"])
def test_a_writer_that_is_overtaken_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: Literal["another save", "another program", "its end"]
) -> None:
    """However often it is: here each time that it comes to publish."""
    path = tmp_path / "f"
    in_torch.save_file({"a": T}, path)
    plain = LocalTransaction.prepare_commit  # which takes the lock of the directory

    def overtaken(self: LocalTransaction, *arguments: Any) -> None:
        if self.state != "open":
            return  # `commit` calls it once more
        if between == "another save":
            with monkeypatch.context() as undone:
                undone.setattr(LocalTransaction, "prepare_commit", plain)
                in_torch.save_file({"a": T + 1}, path)
        elif between == "another program":
            path.write_bytes(b"other")
        else:
            path.unlink()
        plain(self, *arguments)

    monkeypatch.setattr(LocalTransaction, "prepare_commit", overtaken)
    in_torch.save_file({"a": T + 2}, path)
    assert torch.equal(in_torch.load_file(path)["a"], T + 2)
    assert os.listdir(tmp_path) == ["f"]


def test_several_writers_of_one_file(tmp_path: Path) -> None:
    """The last one wins, as with the original; none fails, and no mixture comes out."""
    failed: list[BaseException] = []
    start = threading.Barrier(4)

    def write(number: int) -> None:
        try:
            start.wait(10)
            for _ in range(5):
                in_torch.save_file({"a": torch.full((5000,), float(number))}, tmp_path / "f")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(in_torch.load_file(tmp_path / "f")["a"].unique()) == 1
    assert os.listdir(tmp_path) == ["f"]
