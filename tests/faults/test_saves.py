"""Faults 227 and 229 to 234: what a save refuses, keeps and promises.

Retention is in `test_save_retention.py`, locks and signals are in `test_save_locks.py`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from checkout import REPOSITORY
from crash.zygote import Zygote
from fakes import MemoryDestination
from faults.save_helpers import (
    ACCESS_ACL,
    DEFAULT_ACL,
    GROUP_OBJ,
    INDEX,
    MASK,
    NOBODY,
    OTHER,
    SHARDED,
    USER,
    USER_OBJ,
    HeldRename,
    acl,
    generation,
    group_rights,
    leftovers,
    public_directory,
    require_generation,
    script,
)
from support import eventually_async, require_equal

import stio
from stio import sync
from stio.compat.safetensors.torch import save_file

# 227: what a cancel leaves.


@pytest.mark.anyio
async def test_c227_a_cancel_during_the_commit_leaves_the_whole_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too late to roll back: the call returns when the commit has ended, and nothing is left beside the checkpoint."""
    where = tmp_path / "w.safetensors"
    await stio.save(generation(1), where)
    held = HeldRename(where.name)
    monkeypatch.setattr(os, "rename", held)
    monkeypatch.setattr(os, "replace", held)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                assert await eventually_async(held.reached.is_set)
                scope.cancel()
                held.opened.set()

            group.start_soon(cancel)
            await stio.save(generation(2), where)
    assert held.reached.is_set()
    require_equal(await stio.load(where), generation(2))
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("offset", [0, 1])
def test_c227_a_cancel_before_the_commit_leaves_the_old_checkpoint(tmp_path: Path, offset: int) -> None:
    """The snapshot is complete; the commit has not begun, because an earlier save of the saver is held."""
    sync.save(generation(1), tmp_path / "x")
    gate = threading.Event()
    with sync.Saver(max_pending=2) as saver:
        saver.save(generation(0), MemoryDestination(gate=gate))
        pending = saver.save(generation(2), tmp_path / "x", max_shard_size=SHARDED * offset or None)
        pending.cancel()
        with pytest.raises(stio.ClosedError):
            pending.result(5)
        gate.set()
    require_generation(tmp_path / "x", 1)
    assert leftovers(tmp_path) == []


def claims(text: str) -> list[str]:
    """Return the sentences and table rows that say what a save leaves that was cancelled, or did not return."""
    parts = re.split(r"(?<=[.:])\s|\n\s*\n|\|\n", text)
    about = re.compile(r"cancel|did not")
    return [part for part in parts if about.search(part) and "old checkpoint" in part]


@pytest.mark.parametrize("where", ["stio.save", "docs/howto/training.md", "README.md"])
def test_c227_the_documentation_says_that_a_cancel_may_come_too_late(where: str) -> None:
    """A promise of the old checkpoint has to name the exception: a commit that has begun is carried to its end."""
    text = str(stio.save.__doc__) if where == "stio.save" else (REPOSITORY / where).read_text()
    assert [claim for claim in claims(text) if not re.search("commit|publish|late", claim)] == []


# 229: access control lists.


LIST = acl((USER_OBJ, 6, None), (USER, 4, 1234), (GROUP_OBJ, 0, None), (MASK, 4, None), (OTHER, 0, None))
"""The user 1234 may read, the owning group may nothing; the mode shows the mask, 0640."""


def set_attribute(path: Path, name: str, value: bytes) -> None:
    """Set an extended attribute, or skip the test where the filesystem has none."""
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.ENOSYS):
            raise
        pytest.skip(f"the filesystem has no {name}")


def attribute_of(path: Path, name: str) -> bytes | None:
    """Return an extended attribute, None where there is none."""
    return os.getxattr(path, name) if name in os.listxattr(path) else None


def save_one_file(number: int, directory: Path) -> list[Path]:
    """Save to a file; return the files that hold the checkpoint."""
    sync.save(generation(number), directory / "w.safetensors")
    return [directory / "w.safetensors"]


def save_directory(number: int, directory: Path) -> list[Path]:
    """Save one file to a directory."""
    sync.save(generation(number), directory / "w")
    return [directory / "w" / "model.safetensors"]


def save_shards(number: int, directory: Path) -> list[Path]:
    """Save two shards to a directory."""
    sync.save(generation(number), directory / "w", max_shard_size=SHARDED)
    return [
        directory / "w" / name for name in {*json.loads((directory / "w" / INDEX).read_text())["weight_map"].values()}
    ]


def save_index(number: int, directory: Path) -> list[Path]:
    """Save two shards to a directory; the index is meant."""
    save_shards(number, directory)
    return [directory / "w" / INDEX]


def save_by_drop_in(number: int, directory: Path) -> list[Path]:
    """Save to a file as users of the safetensors package do."""
    save_file(generation(number), directory / "w.safetensors")
    return [directory / "w.safetensors"]


@pytest.mark.parametrize("save", [save_one_file, save_directory, save_shards, save_index, save_by_drop_in])
def test_c229_the_owning_group_gets_no_wider_rights(tmp_path: Path, save: Callable[[int, Path], list[Path]]) -> None:
    for path in save(1, tmp_path):
        set_attribute(path, ACCESS_ACL, LIST)
        assert group_rights(path) == 0
    assert {group_rights(path) for path in save(2, tmp_path)} == {0}


@pytest.mark.parametrize("save", [save_one_file, save_directory, save_shards])
def test_c229_new_files_inherit_the_default_list_of_their_directory(
    tmp_path: Path, save: Callable[[int, Path], list[Path]]
) -> None:
    """As files and directories do that a plain program creates there."""
    default = acl((USER_OBJ, 7, None), (USER, 6, 1234), (GROUP_OBJ, 0, None), (MASK, 7, None), (OTHER, 0, None))
    set_attribute(tmp_path, DEFAULT_ACL, default)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    for path in save(1, tmp_path):
        assert attribute_of(path, ACCESS_ACL) == attribute_of(tmp_path / "plain" / "file", ACCESS_ACL)
        if path.parent != tmp_path:
            for name in (ACCESS_ACL, DEFAULT_ACL):
                assert attribute_of(path.parent, name) == attribute_of(tmp_path / "plain", name)


# 230: lazy tensors without elements.


def plainly(made: torch.Tensor) -> torch.Tensor:
    return made


async def awaited(made: torch.Tensor) -> torch.Tensor:
    await anyio.lowlevel.checkpoint()
    return made


def by_rows(made: torch.Tensor) -> Iterator[torch.Tensor]:
    yield made


@pytest.mark.parametrize("how", [plainly, awaited, by_rows])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_c230_a_lazy_tensor_without_elements_is_produced_once(
    tmp_path: Path, shape: tuple[int, ...], how: Callable[[torch.Tensor], Any]
) -> None:
    """Its producer may be what counts steps or closes a source; it is called like every other."""
    calls = []

    def produce() -> Any:
        calls.append(shape)
        return how(torch.zeros(shape))

    sync.save({"empty": stio.LazyTensor(torch.float32, shape, produce)}, tmp_path / "w.safetensors")
    assert calls == [shape]
    require_equal(sync.load(tmp_path / "w.safetensors"), {"empty": torch.zeros(shape)})


@pytest.mark.parametrize("made", [torch.zeros(0, dtype=torch.int32), torch.zeros(2), torch.zeros(0, 5)])
def test_c230_what_it_produces_is_checked(tmp_path: Path, made: torch.Tensor) -> None:
    """Another dtype or shape is refused, as with elements."""
    with pytest.raises(ValueError, match="empty"):
        sync.save({"empty": stio.LazyTensor(torch.float32, (0,), lambda: made)}, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_c230_an_error_of_its_producer_fails_the_save(tmp_path: Path) -> None:
    def produce() -> torch.Tensor:
        raise KeyError("the source of it")

    with pytest.raises(KeyError, match="the source of it"):
        sync.save({"empty": stio.LazyTensor(torch.float32, (0,), produce)}, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


# 231: tensors inside torch's function transforms.


def under_vmap(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.vmap(use)(torch.ones(3, 2))


def under_grad(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.func.grad(use)(torch.ones(3))


def under_functionalize(use: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.func.functionalize(use)(torch.ones(3))


FIRST = torch.ones(2)
"""A plain tensor: a function transform may also replace what is made inside of it."""


def plain_values(tensor: torch.Tensor, where: Path) -> None:
    sync.save({"first": FIRST, "blocks.weight": tensor}, where)


def produced(tensor: torch.Tensor, where: Path) -> None:
    lazy = stio.LazyTensor(torch.float32, tuple(tensor.shape), lambda: tensor)
    sync.save({"first": FIRST, "blocks.weight": lazy}, where)


def state(tensor: torch.Tensor, where: Path) -> None:
    sync.save_state({"first": FIRST, "blocks": {"weight": tensor}}, where)


def by_saver(tensor: torch.Tensor, where: Path) -> None:
    with sync.Saver() as saver:
        saver.save({"first": FIRST, "blocks.weight": tensor}, where)


@pytest.mark.parametrize("transform", [under_vmap, under_grad, under_functionalize])
@pytest.mark.parametrize("save", [plain_values, produced, state, by_saver])
def test_c231_a_tensor_of_a_function_transform_is_refused_by_name(
    tmp_path: Path,
    transform: Callable[[Callable[[torch.Tensor], torch.Tensor]], None],
    save: Callable[[torch.Tensor, Path], None],
) -> None:
    """Or saved with the numbers that it shows; never an error that leaves the tensor to be guessed."""
    where, error = tmp_path / "w.safetensors", None

    def use(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal error
        try:
            save(tensor, where)
        except (TypeError, ValueError, stio.StioError) as caught:
            error = caught
        return tensor.sum()

    transform(use)
    if error is None:
        assert any(torch.equal(tensor, torch.ones(3)) for tensor in sync.load(where).values())
    else:
        assert re.search(r"blocks[./]weight", str(error)), error
        assert list(tmp_path.iterdir()) == []


# 232: names of 255 bytes.


MAX_NAME_BYTES = 255


@pytest.fixture
def long_names(tmp_path: Path) -> Path:
    """Return the directory, whose filesystem takes names of 255 bytes."""
    if os.pathconf(tmp_path, "PC_NAME_MAX") != MAX_NAME_BYTES:
        pytest.skip("the filesystem has another limit")
    return tmp_path


def require_refused_before_the_first_byte(where: Path, **keywords: Any) -> None:
    """Require an error that says what is too long, and that nothing was written before."""
    events: list[stio.ProgressEvent] = []
    with pytest.raises((stio.StioError, ValueError)) as caught:
        sync.save(generation(1), where, progress=events.append, **keywords)
    assert re.search("too long|255", str(caught.value))
    assert [event.done_bytes for event in events if event.done_bytes] == []
    assert leftovers(where.parent) == []


def test_c232_the_name_of_the_manifest_beside_a_file_is_too_long(long_names: Path) -> None:
    name = "w".ljust(MAX_NAME_BYTES - len(".safetensors"), "w") + ".safetensors"
    require_refused_before_the_first_byte(long_names / name, hash="sha256")
    assert list(long_names.iterdir()) == []


def test_c232_the_name_of_the_manifest_in_a_directory_is_too_long(long_names: Path) -> None:
    pattern = "w".ljust(MAX_NAME_BYTES - len(".safetensors"), "w") + "{suffix}.safetensors"
    require_refused_before_the_first_byte(long_names / "x", filename_pattern=pattern, hash="sha256")


def test_c232_the_names_of_shards_are_too_long(long_names: Path) -> None:
    pattern = "w".ljust(MAX_NAME_BYTES - len(".safetensors"), "w") + "{suffix}.safetensors"
    require_refused_before_the_first_byte(long_names / "x", filename_pattern=pattern, max_shard_size=SHARDED)


def test_c232_the_names_of_new_shards_beside_old_ones_are_too_long(long_names: Path) -> None:
    """Names of a second generation are longer than those of the first."""
    suffix = "-00001-of-00002.safetensors"
    pattern = "w".ljust(MAX_NAME_BYTES - len(suffix), "w") + "{suffix}.safetensors"
    sync.save(generation(0), long_names / "x", filename_pattern=pattern, max_shard_size=SHARDED)
    require_refused_before_the_first_byte(long_names / "x", filename_pattern=pattern, max_shard_size=SHARDED)
    require_generation(long_names / "x", 0)


def test_c232_a_name_of_255_bytes_is_no_fault(long_names: Path) -> None:
    where = long_names / ("w".ljust(MAX_NAME_BYTES - len(".safetensors"), "w") + ".safetensors")
    for number in (1, 2):
        sync.save(generation(number), where)
        require_generation(where, number)


# 233: what cannot be read is not what cannot be written.


def refusal(zygote: Zygote, where: Path) -> str:
    """Return the message of a save by a user without root's rights."""
    found = zygote.run(
        script(
            """
            where = Path(sys.argv[1])
            sync.save(generation(0), sys.argv[2], max_shard_size=100)  # imports all that a save needs
            become_nobody()
            try:
                sync.save(generation(2), where, max_shard_size=100)
            except stio.StorageError as error:
                print(error.errno, error)
            """
        ),
        where,
        where.parent / "warm-up",
    )
    assert (found.returncode, found.stderr) == (0, "")
    number, _, message = found.stdout.partition(" ")
    assert number == str(errno.EACCES), found.stdout
    return message


@pytest.fixture
def theirs(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return a checkpoint of two shards that belongs to a user without root's rights."""
    with public_directory(NOBODY) as directory:
        where = directory / "x"
        sync.save(generation(1), where, max_shard_size=SHARDED)
        if os.geteuid() == 0:
            for path in (where, *where.iterdir()):
                os.chown(path, NOBODY, NOBODY)
        yield where
        where.chmod(0o755)


def test_c233_an_index_that_cannot_be_read_is_named(zygote: Zygote, theirs: Path) -> None:
    (theirs / INDEX).chmod(0o200)
    message = refusal(zygote, theirs)
    assert INDEX in message
    assert "writable" not in message


def test_c233_a_directory_that_cannot_be_listed_is_not_called_unwritable(zygote: Zygote, theirs: Path) -> None:
    theirs.chmod(0o300)
    message = refusal(zygote, theirs)
    assert "writable" not in message or "readable" in message


def test_c233_a_directory_that_cannot_be_written_is_called_so(zygote: Zygote, theirs: Path) -> None:
    theirs.chmod(0o555)
    assert "writable" in refusal(zygote, theirs)


# 234: destinations that look like files of another kind.


def by_save(where: Path) -> None:
    sync.save(generation(1), where)


def by_save_state(where: Path) -> None:
    sync.save_state({"a": generation(1)}, where)


def by_a_saver(where: Path) -> None:
    with sync.Saver() as saver:
        saver.save(generation(1), where)


def by_a_savers_state(where: Path) -> None:
    with sync.Saver() as saver:
        saver.save_state({"a": generation(1)}, where)


def by_convert(where: Path) -> None:
    source = where.parent / "source.safetensors"
    sync.save(generation(1), source)
    try:
        sync.convert(source, where)
    finally:
        source.unlink()


@pytest.mark.parametrize("name", ["w.pt", "w.pth", "w.bin", "w.ckpt", "w.PT"])
@pytest.mark.parametrize("save", [by_save, by_save_state, by_a_saver, by_a_savers_state, by_convert])
def test_c234_a_name_of_another_kind_of_file_is_refused_with_advice(
    tmp_path: Path, name: str, save: Callable[[Path], None]
) -> None:
    with pytest.raises((ValueError, stio.StioError), match=r"\.safetensors") as caught:
        save(tmp_path / name)
    assert name in str(caught.value)
    assert list(tmp_path.iterdir()) == []


KINDS = [
    "w.pkl",
    "w.npz",
    "w.h5",
    "w.gguf",
    "w.onnx",
    "w.msgpack",
    "w.tar.gz",
    "w.json",
    "w.SafeTensors",
    "w.safetensor",
    "..w.pt",
]  # more of them: test_reported_names.py


@pytest.mark.parametrize("name", KINDS)
def test_c234_more_kinds(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(name)):
        by_save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("save", [by_save, by_save_state, by_a_saver, by_convert])
def test_c234_a_directory_of_such_a_name_is_the_callers_choice(tmp_path: Path, save: Callable[[Path], None]) -> None:
    (tmp_path / "w.pt").mkdir()
    save(tmp_path / "w.pt")
    assert [path.name for path in (tmp_path / "w.pt").iterdir() if path.suffix == ".safetensors"]


def test_c234_a_slash_means_a_directory(tmp_path: Path) -> None:
    sync.save(generation(1), f"{tmp_path}/w.pt/")
    require_generation(tmp_path / "w.pt", 1)


def test_c234_a_file_of_such_a_name_stays(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_text("mine")
    with pytest.raises(ValueError, match=r"w\.safetensors"):
        by_save(tmp_path / "w.pt")
    assert (tmp_path / "w.pt").read_text() == "mine"


def test_c234_drop_ins_take_any_name(tmp_path: Path) -> None:
    save_file(generation(1), tmp_path / "w.bin")
    assert (tmp_path / "w.bin").is_file()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hdfs://cluster/out", "saves go to local paths"),
        ("hf://me/model", "saves go to local paths"),
        ("HTTPS://host/w.safetensors", "saves go to local paths"),
        (Path("gs://bucket/out"), "the URL gs://bucket/out with a slash missing"),
    ],
)
def test_c234_a_url_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: Any, words: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words):
        by_save(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [".pt", "..bin", "bin", "w.pt.d", "a:b", "w.ptx"])
def test_c234_other_names_are_directories(tmp_path: Path, name: str) -> None:
    by_save(tmp_path / name)
    require_generation(tmp_path / name, 1)


@pytest.mark.parametrize("name", ["step-1", "llama-3.1", "v1.0", "run.2026-01-01", "model.safetensors-shards"])
def test_c234_a_name_with_a_dot_is_a_directory(tmp_path: Path, name: str) -> None:
    sync.save(generation(1), tmp_path / name)
    assert [path.name for path in (tmp_path / name).iterdir()] == ["model.safetensors"]
    require_generation(tmp_path / name, 1)
