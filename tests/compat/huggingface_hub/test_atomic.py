"""The hub's drop-in saves whole or not at all: failing calls, killed processes, several savers in one directory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pickle import PicklingError
from typing import Any

import pytest
import torch
from counts import count
from safetensors.torch import load_file

from stio.compat import huggingface_hub as hub
from stio.errors import CommitUncertainError, StorageError
from stio.storage.commit import journal
from tests.storage.transactions import Killed, System, sweep

NAMES = [f"w{k}" for k in range(6)]
ONE, TWO, THREE = "5GB", 3 * 16, 2 * 16
CHANGES = [
    pytest.param(ONE, ONE, id="one_to_one"),
    pytest.param(ONE, TWO, id="one_to_many"),
    pytest.param(THREE, ONE, id="many_to_one"),
    pytest.param(THREE, TWO, id="many_to_fewer"),
    pytest.param(TWO, TWO, id="many_to_as_many"),
    pytest.param(None, TWO, id="none_to_many"),
]


def save(folder: Path, generation: int, most: Any, *, safe: bool = True, **keywords: Any) -> None:
    tensors = {name: torch.full((4,), float(generation)) for name in NAMES}
    hub.save_torch_state_dict(tensors, folder, max_shard_size=most, safe_serialization=safe, **keywords)


def look(folder: Path, *, safe: bool = True) -> float | None:
    """Return the generation that a reader finds, through the index if there is one; None for no checkpoint."""
    single, read = ("model.safetensors", load_file) if safe else ("pytorch_model.bin", torch.load)
    index = folder / f"{single}.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        tensors = {name: read(folder / file)[name] for name, file in weight_map.items()}
    elif (folder / single).exists():
        tensors = read(folder / single)
    else:
        return None
    assert sorted(tensors) == NAMES
    found = {float(value) for tensor in tensors.values() for value in tensor}
    assert len(found) == 1, f"generations are mixed: {found}"
    return found.pop()


def only_files_of(folder: Path, most: Any, *, safe: bool = True) -> bool:
    """Return whether there are the files of one generation, and nothing else but what was there before."""
    stem, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    if most is None:
        expected = []
    elif most == ONE:
        expected = [stem + suffix]
    else:
        count = {TWO: 2, THREE: 3}[most]
        expected = [f"{stem}-{k + 1:05d}-of-{count:05d}{suffix}" for k in range(count)] + [f"{stem}{suffix}.index.json"]
    return sorted(os.listdir(folder)) == sorted([*expected, "config.json"])


def prepared(folder: Path, old: Any, *, safe: bool) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if old is not None:
        save(folder, 1, old, safe=safe)
    return folder


def numbers(shift: int) -> Iterator[int]:
    """Return the numbers of the calls to hit: in `make test` each eighth one from the fourth on, by the shift."""
    return (number for number in range(1, 10_000) if number < 4 or (number + shift) % count(8, 1) == 0)


@pytest.mark.matrix
@pytest.mark.parametrize("old, new", CHANGES)
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickles"])
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from_then_on"])
def test_any_call_may_fail(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, old: Any, new: Any, safe: bool, persistent: bool
) -> None:
    outcomes = set()
    was = None if old is None else 1.0
    for number in numbers(safe + 2 * persistent):
        folder = prepared(fast_path / str(number), old, safe=safe)
        failed: Exception | None = None
        with pytest.MonkeyPatch.context() as patch:
            system = System(patch, fail_at=number, persistent=persistent)
            try:
                save(folder, 2, new, safe=safe)
            except StorageError as error:
                failed = error
            assert system.num_open == 0
        if system.hit is None:
            assert failed is None
            break
        if failed is None:  # a call that can be done without, or a cleaning that the next one goes on with
            assert look(folder, safe=safe) == 2
        elif not isinstance(failed, CommitUncertainError):
            assert look(folder, safe=safe) == was
        sweep(monkeypatch, folder)
        found = look(folder, safe=safe)
        if isinstance(failed, CommitUncertainError) and not (old == new == TWO):
            assert found == 2  # where names were taken, a record that could not be taken back may say either
        assert found == 2 if failed is None else found in (was, 2)
        assert only_files_of(folder, new if found == 2 else old, safe=safe), sorted(os.listdir(folder))
        outcomes.add(type(failed))
    assert number > 10
    assert StorageError in outcomes


@pytest.mark.matrix
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("old, new", CHANGES)
def test_the_process_may_end_at_any_call(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, old: Any, new: Any, after: bool
) -> None:
    """Pickles are saved on the caller's thread, and published by the same steps as tensors.

    In `make test` at each fourth call.
    """
    was = None if old is None else 1.0
    seen = set()
    for number in range(2, 10_000, count(4, 1)):
        folder = prepared(fast_path / str(number), old, safe=False)
        with pytest.MonkeyPatch.context() as patch:
            system = System(patch, kill_at=number, kill_after=after)
            try:
                save(folder, 2, new, safe=False)
            except Killed:
                pass
            system.bury()
        if system.hit is None:
            break
        if (
            old != new or old == ONE
        ):  # under names that were taken a crash may leave a mixture for the next save to mend
            assert look(folder, safe=False) in (was, 2)
        sweep(monkeypatch, folder)
        found = look(folder, safe=False)
        assert found in (was, 2)
        assert only_files_of(folder, new if found == 2 else old, safe=False), sorted(os.listdir(folder))
        seen.add(found)
    assert seen == {was, 2}


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickles"])
def test_the_old_index_goes_before_its_shards(tmp_path: Path, safe: bool) -> None:
    folder = prepared(tmp_path / "out", THREE, safe=safe)
    log: list[tuple[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        System(patch, hook=lambda name, args, kwargs, result: log.append((name, args[0])))
        save(folder, 2, ONE, safe=safe)
    unlinked = [what for name, what in log if name == "unlink" and what != "lock" and not what.startswith(".stio-")]
    assert unlinked[0].endswith(".index.json") and len(unlinked) == 4
    at = log.index(("unlink", unlinked[0]))
    assert [name for name, _ in log[at : at + 3]] == ["unlink", "sync_directory", "unlink"]
    renamed = max(k for k, (name, _) in enumerate(log[:at]) if name == "rename")
    assert any(name == "sync_directory" for name, _ in log[renamed:at])  # what comes is durable before what was goes


@pytest.mark.parametrize("is_readable", [True, False])
def test_an_index_that_cannot_be_removed_is_told(tmp_path: Path, is_readable: bool) -> None:
    folder = prepared(tmp_path / "out", THREE, safe=True)
    with pytest.MonkeyPatch.context() as patch:

        def unreadable(dir_fd: int, name: str) -> None:
            raise OSError(errno.EIO, "")

        def unlink(name: str, *, dir_fd: int) -> None:
            if not is_readable:
                patch.setattr(journal, "stamp_of", unreadable)
            raise PermissionError(1, "no")

        patch.setattr("stio.storage.commit.syscalls.unlink", unlink)
        with pytest.raises(CommitUncertainError, match="old index could not be removed"):
            save(folder, 2, ONE)
    assert look(folder) == 1
    save(folder, 3, TWO)  # finishes what was left, and goes on
    assert look(folder) == 3
    assert only_files_of(folder, TWO)


def test_what_cannot_be_pickled_leaves_what_was(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "out", ONE, safe=False)
    tensor = torch.ones(2)
    tensor.bad = lambda: None  # type: ignore[attr-defined]
    with pytest.raises((AttributeError, PicklingError)):
        hub.save_torch_state_dict({"a": torch.ones(1), "b": tensor}, folder, safe_serialization=False, max_shard_size=4)
    assert look(folder, safe=False) == 1
    assert only_files_of(folder, ONE, safe=False)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(work, k) for k in range(count)]:
            future.result()


@pytest.mark.matrix
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickles"])
def test_savers_with_patterns_of_their_own(fast_path: Path, safe: bool) -> None:
    suffix = ".safetensors" if safe else ".bin"

    def work(rank: int) -> None:
        for generation in range(8):
            save(
                fast_path,
                generation,
                TWO if generation % 2 else ONE,
                safe=safe,
                filename_pattern=f"rank{rank}{{suffix}}{suffix}",
            )

    in_threads(4, work)
    assert len(os.listdir(fast_path)) == 4 * 3
    read = load_file if safe else torch.load
    for path in fast_path.glob(f"rank*{suffix}"):
        assert {float(value) for tensor in read(path).values() for value in tensor} == {7.0}


@pytest.mark.matrix
@pytest.mark.parametrize("most", [ONE, TWO])
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickles"])
def test_savers_of_the_same_files(fast_path: Path, most: Any, safe: bool) -> None:
    """Where every process saves, as on TPUs, the last one wins."""
    in_threads(
        4, lambda rank: [save(fast_path, 5, most, safe=safe, is_main_process=rank == 0) for _ in range(6)] and None
    )
    assert look(fast_path, safe=safe) == 5
    (fast_path / "config.json").write_text("{}")
    assert only_files_of(fast_path, most, safe=safe)


@pytest.mark.slow
def test_processes_in_one_directory(fast_path: Path, zygote: Any) -> None:
    code = (
        "import sys, torch\n"
        "from stio.compat.huggingface_hub import save_torch_state_dict\n"
        "rank, where = int(sys.argv[1]), sys.argv[2]\n"
        "for k in range(15):\n"
        "    tensors = {f'w{i}': torch.full((4,), float(rank)) for i in range(6)}\n"
        "    pattern = {'filename_pattern': f'rank{rank}{{suffix}}.safetensors'} if k % 2 else {}\n"
        "    save_torch_state_dict(tensors, where, max_shard_size=48, is_main_process=rank == 0, **pattern)\n"
    )
    started = [
        subprocess.Popen([zygote.python, "-c", code, str(rank), str(fast_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for process in started:
        _, stderr = process.communicate(timeout=100)
        assert process.returncode == 0, stderr
    assert look(fast_path) in (0, 1)
    assert len(os.listdir(fast_path)) == 3 * 3
