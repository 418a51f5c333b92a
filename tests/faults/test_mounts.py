"""441 to 443. Mounts without rename, system calls that sandboxes refuse, files that a server has replaced."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from faults.sandbox import CALLS, is_possible

import stio
from stio import sync
from stio.cli.main import main
from stio.errors import StorageError
from stio.storage.commit import syscalls as calls

TENSORS = {"w": torch.arange(1000.0), "v": torch.ones(5)}

# 441. Mounts without rename: mount-s3 answers ENOSYS, others EPERM.


@pytest.fixture(params=[errno.ENOSYS, errno.EPERM], ids=errno.errorcode.get)
def no_rename(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    refuse_renames(monkeypatch, request.param)
    number: int = request.param
    return number


def refuse_renames(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Refuse all renames and hard links, and all changes of modes."""

    def refuses(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    def refuses_in_c(*_: object) -> int:
        ctypes.set_errno(number)
        return -1

    for name in ("rename", "replace", "link", "chmod", "fchmod"):
        monkeypatch.setattr(os, name, refuses)
    monkeypatch.setattr(calls, "_renameat2", refuses_in_c)


def leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*"))


DESTINATIONS = ("new", "a/b/new", "new.safetensors", "a/new.safetensors")


@pytest.mark.parametrize("destination", DESTINATIONS)
def test_c441_a_save_is_refused_before_its_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_rename: int, destination: str
) -> None:
    monkeypatch.setattr(calls, "reserve", lambda *_: pytest.fail("space was reserved"))
    with pytest.raises(StorageError, match=r"by a rename.*s3://") as caught:
        sync.save(TENSORS, tmp_path / destination)
    assert caught.value.errno == no_rename
    assert leftovers(tmp_path) == []


def test_c441_what_was_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync.save(TENSORS, tmp_path / "model")
    before = leftovers(tmp_path)
    refuse_renames(monkeypatch, errno.ENOSYS)
    with pytest.raises(StorageError, match="by a rename"):
        sync.save({"w": torch.zeros(3)}, tmp_path / "model")
    with pytest.raises(StorageError, match="by a rename"), sync.Saver() as saver:
        saver.save(TENSORS, tmp_path / "step-1").result()
    assert leftovers(tmp_path) == before
    assert torch.equal(sync.load(tmp_path / "model")["w"], TENSORS["w"])


def test_c441_modes_that_cannot_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    for name in ("chmod", "fchmod", "chown", "fchown", "utime"):
        monkeypatch.setattr(os, name, refuses)
    for _ in range(2):
        sync.save(TENSORS, tmp_path / "model")
    assert torch.equal(sync.load(tmp_path / "model")["w"], TENSORS["w"])


def staged(directory: Path) -> Path:
    """Make what a killed save leaves; return its path."""
    left = directory / ".stio-0123456789"
    (left / "new").mkdir(parents=True)
    (left / "lock").touch()
    (left / "new" / "model.safetensors").write_bytes(b"part")
    return left


def test_c441_gc_removes_what_an_interrupted_save_left(tmp_path: Path, no_rename: int) -> None:
    left = staged(tmp_path)
    result = CliRunner().invoke(main, ["gc", str(tmp_path / "model")])
    assert result.exit_code == 0, result.output
    assert "rolled back" in result.output
    assert not left.exists()
    assert leftovers(tmp_path) == []


def test_c441_gc_fails_where_it_cannot_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_rename: int) -> None:
    left = staged(tmp_path)

    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "unlink", refuses)
    monkeypatch.setattr(os, "rmdir", refuses)
    result = CliRunner().invoke(main, ["gc", str(tmp_path / "model")])
    assert result.exit_code == 1, result.output
    assert f"{left}: left alone, the system does not let this process remove it" in result.output
    assert left.exists()


def test_c441_gc_of_a_save_under_way_is_no_failure(tmp_path: Path) -> None:
    left = staged(tmp_path)
    with (left / "lock").open("wb") as file:
        assert calls.try_lock(file.fileno())
        result = CliRunner().invoke(main, ["gc", str(tmp_path / "model")])
        calls.unlock(file.fileno())
    assert (result.exit_code, left.exists()) == (0, True), result.output


# 442. System calls that sandboxes refuse.

IN_SANDBOX = """
import os, sys, tempfile, warnings
import torch
from faults.sandbox import refuse

where, call, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
try:
    refuse(call, number)
except OSError:
    print("no seccomp")
    sys.exit()
import stio
from click.testing import CliRunner
from stio import sync
from stio.cli.main import main

TENSORS = {"w": torch.arange(300_000.0), "v": torch.ones(5)}
for k in range(2):
    sync.save(TENSORS, f"{where}/a", hash="sha256")
    sync.save(TENSORS, f"{where}/s", max_shard_size=1 << 19, shard_names="hub", commit="files")
    sync.save(TENSORS, f"{where}/x.safetensors")
with sync.Saver(keep_last=1) as saver:
    for step in range(2):
        saver.save(TENSORS, f"{where}/run/step-{step}")
for path in ("a", "s", "x.safetensors"):
    for memory in ("map", "copy"):
        found = sync.load(f"{where}/{path}", memory=memory, verify=path == "a")
        assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
model = torch.nn.ParameterDict(TENSORS)
sync.load_into(model, f"{where}/a")
assert stio.latest(f"{where}/run").endswith("step-1")
for words in (["verify", f"{where}/a"], ["gc", f"{where}/a"]):
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
assert not [name for name in os.listdir(where) if name.startswith(".stio")]
print("ok")
"""


@pytest.mark.skipif(not is_possible(), reason="numbers of system calls are those of Linux on x86-64")
@pytest.mark.matrix
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
@pytest.mark.parametrize("call", CALLS)
def test_c442_a_call_that_the_sandbox_refuses(zygote: Any, tmp_path: Path, call: str, number: int) -> None:
    done = zygote.run(IN_SANDBOX, tmp_path, call, number)
    if done.stdout == "no seccomp\n":
        pytest.skip("this system installs no filters")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


# 443. A file that the server has replaced, and a mount that is gone.

WORDS = {
    errno.ESTALE: "the file was replaced on the server: try again",
    errno.ENOTCONN: "the mount is gone: mount it, and try again",
}


@pytest.fixture(params=WORDS, ids=errno.errorcode.get)
def number(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, below: Path) -> None:
    """Let a function of `os` fail for names below a directory, or relative to an open one."""
    plain = getattr(os, name)

    def fails(path: Any, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(path, int) or not os.fspath(path).startswith("/") or os.fspath(path).startswith(str(below)):
            raise OSError(number, os.strerror(number), path)
        return plain(path, *arguments, **keywords)

    monkeypatch.setattr(os, name, fails)


@pytest.mark.parametrize("call", ["open", "listdir"])
def test_c443_a_load_says_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    sync.save(TENSORS, tmp_path / "step-1")
    failing(monkeypatch, call, number, tmp_path)
    with pytest.raises(StorageError, match=WORDS[number]) as caught:
        sync.load(tmp_path / "step-1")
    assert caught.value.errno == number


@pytest.mark.parametrize("call", ["make_directory", "open_directory", "fsync", "rename_new"])
def test_c443_a_save_says_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(calls, call, fails)
    with pytest.raises(StorageError, match=WORDS[number]) as caught:
        sync.save(TENSORS, tmp_path / "new")
    assert caught.value.errno == number
    assert not (tmp_path / "new").exists()


def test_c443_a_mount_that_is_gone_is_no_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    assert stio.latest(tmp_path / "run", default=None) is None
    sync.save(TENSORS, tmp_path / "run" / "step-1")
    for call in ("stat", "lstat", "listdir"):
        failing(monkeypatch, call, number, tmp_path)
    with pytest.raises(StorageError, match=WORDS[number]):
        stio.latest(tmp_path / "run", default=None)


READ = """
import sys
from faults.sandbox import refuse
from stio import sync
from stio.errors import StorageError

for call in ("preadv", "preadv2", "pread64"):
    refuse(call, int(sys.argv[2]))
for memory in ("copy", "lazy"):
    try:
        sync.load(sys.argv[1], memory=memory)
    except StorageError as error:
        print(error)
"""


@pytest.mark.skipif(not is_possible(), reason="numbers of system calls are those of Linux on x86-64")
def test_c443_reads_say_what_happened(zygote: Any, tmp_path: Path, number: int) -> None:
    sync.save(TENSORS, tmp_path / "x.safetensors")
    done = zygote.run(READ, tmp_path / "x.safetensors", number)
    assert done.stdout.count(WORDS[number]) == 2, done
