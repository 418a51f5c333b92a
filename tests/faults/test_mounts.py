"""441 to 443. Mounts without rename, system calls that sandboxes refuse, files that a server has replaced."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.sandbox import CALLS, is_possible

import stio
from stio import sync
from stio.errors import StorageError
from stio.storage.commit import syscalls as calls

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


TENSORS = {"w": torch.arange(1000.0), "v": torch.ones(5)}
WORDS = {
    errno.ESTALE: "the file was replaced on the server: {} again",
    errno.ENOTCONN: "the mount is gone: mount it, and {} again",
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
    with pytest.raises(StorageError, match=WORDS[number].format("load")) as caught:
        sync.load(tmp_path / "step-1")
    assert caught.value.errno == number


@pytest.mark.parametrize("call", ["make_directory", "open_directory", "fsync", "rename_new"])
def test_c443_a_save_says_what_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(calls, call, fails)
    with pytest.raises(StorageError, match=WORDS[number].format("save")) as caught:
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
    with pytest.raises(StorageError, match=WORDS[number].format("load")):
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
    assert done.stdout.count(WORDS[number].format("load")) == 2, done
