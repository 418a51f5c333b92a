"""Files of objects that are copied: marks that cannot be trusted."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest

from stio.remote.disk_cache import BLOCK_BYTES, Download, opened_directory
from stio.storage.base import Requests
from stio.storage.commit import syscalls as calls
from stio.storage.local import LocalRoot

DATA = random.Random(1).randbytes(2 * BLOCK_BYTES + 5)


@pytest.mark.parametrize("mark", [2, 255])
def test_a_damaged_mark_is_no_block_that_is_complete(tmp_path: Path, mark: int) -> None:
    (tmp_path / "object").write_bytes(DATA)
    part = tmp_path / "a.part"
    with opened_directory(str(tmp_path)) as dir_fd, closing(LocalRoot(tmp_path)) as root:
        with closing(root.open("object")) as source:
            Download(part.name, len(DATA), dir_fd).close()
            with part.open("r+b") as file:
                file.seek(len(DATA) + 1)
                file.write(bytes([mark]))
            with closing(Download(part.name, len(DATA), dir_fd)) as download:
                assert download.missing_bytes == len(DATA)
                download.fill(source, Requests(1 << 20, 2, 0))
                download.publish("copy")
    assert (tmp_path / "copy").read_bytes() == DATA


def test_c104_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "object").write_bytes(DATA)
    plain = calls.write_bytes
    monkeypatch.setattr(
        calls, "write_bytes", lambda fd, data, offset: plain(fd, data[: max(1, len(data) // 2)], offset)
    )
    with opened_directory(str(tmp_path)) as dir_fd, closing(LocalRoot(tmp_path)) as root:
        with closing(root.open("object")) as source, closing(Download("a.part", len(DATA), dir_fd)) as download:
            download.fill(source, Requests(1 << 20, 2, 0))
            download.publish("copy")
    assert (tmp_path / "copy").read_bytes() == DATA


def test_a_system_that_writes_no_bytes_ends_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "object").write_bytes(DATA)
    with opened_directory(str(tmp_path)) as dir_fd, closing(LocalRoot(tmp_path)) as root:
        with closing(root.open("object")) as source, closing(Download("a.part", len(DATA), dir_fd)) as download:
            monkeypatch.setattr(calls, "write_bytes", lambda *arguments: 0)
            with pytest.raises(OSError, match="wrote no bytes"):
                download.fill(source, Requests(1 << 20, 2, 0))
            assert download.missing_bytes
