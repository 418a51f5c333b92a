"""Two versions that save into one directory exclude each other or refuse, by locks that lie on the disk.

The other version is `other_version.py`: a process that takes the locks of the protocol and imports nothing of stio. If
one of these tests fails, this version and the versions that are installed elsewhere no longer exclude each other. The
second half is about files of newer formats: they are left alone or refused, never deleted and never misread.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from support import eventually
from versions import archive, look
from versions.archive import NEWEST, unpack
from versions.look import MANY, describe_tensors, found_by, listing, tensors_of

import stio
from stio import clock

A_WHILE = 0.15
"""Seconds in which a save that is staged already, and did not wait, would be published several times over."""

BOUND = 5.0
"""Seconds after which something that should come has not come."""

SCRIPT = Path(__file__).with_name("other_version.py")
OLD, NEW, OTHER = 1, 2, 5
"""Generations: what stands there, what this version saves, what the other version publishes."""


class OtherVersion:
    """A process that follows the protocol without stio."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, call: str, **arguments: Any) -> Any:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"call": call, **{key: _text(value) for key, value in arguments.items()}}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"{SCRIPT.name} ended at {call}"
        return json.loads(answer)

    def kill(self) -> None:
        """End the process without any cleanup; the next call starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate(timeout=BOUND)


def _text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, Path) else value


@pytest.fixture(scope="module")
def process() -> Iterator[OtherVersion]:
    process = OtherVersion()
    yield process
    process.kill()


@pytest.fixture
def other(process: OtherVersion) -> Iterator[OtherVersion]:
    yield process
    process("drop_all")


# What is saved, and where.

STAGING = "model/.stio-b000000001"
"""The staging directory in an archive of a save that was cut off."""

SHARDS: Mapping[str, Any] = MANY
HUB: Mapping[str, Any] = {**MANY, "shard_names": "hub", "commit": "files"}


class Place:
    """A destination with an old checkpoint.

    Args:
        root: Directory for it.
        name: Of the destination in it.
        keywords: Of its saves.
    """

    def __init__(self, root: Path, name: str, keywords: Mapping[str, Any]) -> None:
        self.root, self.path, self.keywords = root, root / name, keywords
        old = {key: value for key, value in keywords.items() if key in ("max_shard_size", "hash")}
        stio.sync.save(tensors_of(OLD), self.path, **old)

    @property
    def home(self) -> Path:
        """Directory in which a save works, and whose lock it takes."""
        return self.path if self.path.is_dir() else self.root

    @property
    def last(self) -> str:
        """Name of the file whose rename is the last step of the commit."""
        return "model.safetensors.index.json" if self.keywords else "model.safetensors"

    def staging(self) -> list[Path]:
        return sorted(path for path in self.home.glob(".stio-*") if path.is_dir())

    def require(self, generation: int) -> None:
        """Require a whole generation, and nothing staged."""
        assert found_by("load", self.path) == describe_tensors(tensors_of(generation))
        assert sorted(self.home.glob(".stio-*")) == []


PLACES = {
    "file": ("model.safetensors", {}),
    "one file in a directory": ("model", {}),
    "shards by their index": ("model", SHARDS),
    "shards one by one": ("model", HUB),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, *PLACES[request.param])


class Held:
    """Tensors of the new generation, the last of which is produced when that is allowed."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def tensors(self) -> dict[str, torch.Tensor | stio.LazyTensor]:
        *plain, (name, last) = tensors_of(NEW).items()

        def produce() -> torch.Tensor:
            self.reached.set()
            assert self.opened.wait(BOUND)
            return last

        return {**dict(plain), name: stio.LazyTensor(last.dtype, last.shape, produce)}


class Saving:
    """A save of this version, on a thread."""

    def __init__(self, path: Path, keywords: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> None:
        self.error: BaseException | None = None
        values = tensors_of(NEW) if tensors is None else tensors
        self._thread = threading.Thread(target=self._save, args=(values, path, keywords), daemon=True)
        self._thread.start()

    def _save(self, tensors: Any, path: Path, keywords: Mapping[str, Any]) -> None:
        try:
            stio.sync.save(tensors, path, **keywords)
        except BaseException as error:
            self.error = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> None:
        """Wait for its end, and raise what it raised."""
        self._thread.join(BOUND)
        assert self.done(), "the save does not end"
        if self.error is not None:
            raise self.error


# The other version holds the lock of the directory.


@pytest.mark.matrix
def test_a_save_waits_while_another_version_publishes(place: Place, other: OtherVersion) -> None:
    """It changes nothing that is seen and loses nothing; then it goes on."""
    before = listing(place.root)
    assert other("take_lock_file", path=place.home)["taken"]
    saving = Saving(place.path, place.keywords)
    assert eventually(lambda: bool(place.staging()))
    assert not eventually(saving.done, A_WHILE), f"it did not wait: {saving.error!r}"
    assert [name for name in listing(place.root) if "/.stio-" not in f"/{name}"] == before
    assert found_by("load", place.path) == describe_tensors(tensors_of(OLD))
    other("drop_lock_file", path=place.home)
    saving.result()
    place.require(NEW)


def test_a_save_that_has_waited_a_minute_refuses(
    place: Place, other: OtherVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other("take_lock_file", path=place.home)["taken"]
    saving = Saving(place.path, place.keywords)
    assert not eventually(saving.done, A_WHILE / 2)
    began, looks = clock.monotonic(), itertools.count(1)
    monkeypatch.setattr(clock, "monotonic", lambda: began + 61 * next(looks))  # a minute goes by at each look
    with pytest.raises(stio.ConcurrentSaveError, match="another save has been publishing here"):
        saving.result()
    other("drop_lock_file", path=place.home)
    place.require(OLD)


def test_the_command_waits_while_another_version_publishes(tmp_path: Path, other: OtherVersion) -> None:
    root = unpack(archive.FILES / NEWEST / "files-one-replaced.tar.xz", tmp_path)
    before = listing(root)
    assert other("take_lock_file", path=root / "model")["taken"]
    before += ["model/.stio-lock"]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(look.collect(root / "model", root)), daemon=True)
    thread.start()
    assert not eventually(lambda: bool(found), A_WHILE)
    assert listing(root) == sorted(before)
    other("drop_lock_file", path=root / "model")
    thread.join(BOUND)
    assert found == [{"finished": ["model/.stio-b000000001"]}]


@pytest.mark.matrix
def test_what_another_version_is_staging_is_left_alone(place: Place, other: OtherVersion) -> None:
    """By saves, by the command whatever the age; once its owner is dead it goes."""
    staging = Path(other("stage", path=place.home, save_id="0123456789")["staging"])
    then = time.time() - 30 * 3600
    for path in (staging / "lock", staging):
        os.utime(path, (then, then))
    before = listing(staging)
    stio.sync.save(tensors_of(NEW), place.path, **place.keywords)
    assert found_by("load", place.path) == describe_tensors(tensors_of(NEW))
    for options in ((), ("--max-age", "0")):
        assert json.loads(run("gc", place.path, "--json", *options).stdout)["kept"] == [str(staging)]
    assert listing(staging) == before
    assert (staging / "new/model.safetensors").read_bytes() == b"of another version"
    other.kill()
    assert json.loads(run("gc", place.path, "--json").stdout)["undone"] == [str(staging)]
    place.require(NEW)


@pytest.mark.parametrize("save_id", ["01234567", "0123456789abcdef0123456789abcdef"], ids=["short", "long"])
def test_ids_of_saves_may_have_other_lengths(save_id: str, tmp_path: Path, other: OtherVersion) -> None:
    place = Place(tmp_path, "model", SHARDS)
    staging = Path(other("stage", path=place.home, save_id=save_id)["staging"])
    assert json.loads(run("gc", place.path, "--json").stdout)["kept"] == [str(staging)]
    other.kill()
    assert json.loads(run("gc", place.path, "--json").stdout)["undone"] == [str(staging)]


# This version holds a lock.


def _has_staging(folder: Path) -> bool:
    with suppress(FileNotFoundError):  # a directory that is renamed while they are listed
        return any((one / "new").exists() for one in folder.rglob(".stio-*"))
    return False


@contextmanager
def held_while_staging(path: Path, keywords: Mapping[str, Any]) -> Iterator[Saving]:
    """Have a save that has begun, and waits for a tensor."""
    held = Held()
    saving = Saving(path, keywords, held.tensors())
    assert held.reached.wait(BOUND)
    assert eventually(lambda: _has_staging(path.parent))
    try:
        yield saving
    finally:
        held.opened.set()


def require_owned(staging: Path, other: OtherVersion) -> None:
    """Require that the other version finds a staging directory taken, and could ask for its owner."""
    assert re.fullmatch(r"\.stio-[0-9a-f]{8,32}", staging.name)
    assert staging.stat().st_mode & 0o777 == 0o700
    found = other("try_staging", path=staging)
    assert not found["taken"]
    boot = archive.boot_id()
    assert found["owner"] | {"time": 0} == {"pid": os.getpid(), "boot": boot, "host": socket.gethostname(), "time": 0}
    assert abs(found["owner"]["time"] - time.time()) < 60


def test_another_version_finds_a_save_under_way_taken(place: Place, other: OtherVersion) -> None:
    """The staging directory is taken; nothing is published, so the directory's lock is free."""
    with held_while_staging(place.path, place.keywords) as saving:
        (staging,) = place.staging()
        require_owned(staging, other)
        assert not (Path(place.home) / ".stio-lock").exists()
    saving.result()
    place.require(NEW)


def test_another_version_finds_a_first_save_taken(tmp_path: Path, other: OtherVersion) -> None:
    with held_while_staging(tmp_path / "model", SHARDS) as saving:
        (staging,) = tmp_path.glob(".stio-*")
        require_owned(staging, other)
    saving.result()
    assert found_by("load", tmp_path / "model") == describe_tensors(tensors_of(NEW))


@pytest.fixture
def stopped_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Have renames to one name wait, once that was asked for; the returned event says that one waits."""
    wanted: list[str] = []
    reached, opened = threading.Event(), threading.Event()

    def waiting(rename: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Any, target: Any, **fds: Any) -> None:
            if wanted and os.path.basename(os.fspath(target)) == wanted[0]:
                reached.set()
                assert opened.wait(BOUND)
            rename(source, target, **fds)

        return renamed

    for name in ("rename", "replace", "link"):
        monkeypatch.setattr(os, name, waiting(getattr(os, name)))

    def stop(name: str) -> threading.Event:
        wanted.append(name)
        return reached

    stop.go_on = opened.set  # type: ignore[attr-defined]
    yield stop
    opened.set()


def test_another_version_finds_a_commit_taken(place: Place, other: OtherVersion, stopped_at: Any) -> None:
    """While files are renamed."""
    reached = stopped_at(place.last)
    saving = Saving(place.path, place.keywords)
    assert reached.wait(BOUND), "the commit's rename goes by another function of os; let this test stop that one"
    (staging,) = place.staging()
    require_owned(staging, other)
    assert not other("take_lock_file", path=place.home)["taken"]
    stopped_at.go_on()
    saving.result()
    place.require(NEW)
    assert not (Path(place.home) / ".stio-lock").exists(), "it is given back"


def form(value: Any) -> Any:
    """Return the form of a record: keys in their order, types, and one for all files."""
    if isinstance(value, dict):
        by_name = {"*" if "." in key else key: form(item) for key, item in value.items()}
        return list(by_name.items())
    return [form(value[0])] if isinstance(value, list) and value else type(value).__name__


@pytest.mark.parametrize(
    ("keywords", "name"),
    [({**SHARDS, "hash": "sha256"}, "hashed-moved"), ({**HUB, "hash": "sha256"}, "files-hashed-replaced")],
    ids=["shards by their index", "shards one by one"],
)
def test_older_versions_understand_the_record(
    keywords: Mapping[str, Any], name: str, tmp_path: Path, stopped_at: Any
) -> None:
    """Its form is that of the archives. Another form needs another number: older versions leave it alone then."""
    recorded = json.loads(archive.contents(archive.FILES / NEWEST / f"{name}.tar.xz")[f"{STAGING}/intent.json"] or b"")
    place = Place(tmp_path, "model", keywords)
    reached = stopped_at(place.last)
    saving = Saving(place.path, place.keywords)
    assert reached.wait(BOUND)
    (staging,) = place.staging()
    names = {path.name for path in staging.iterdir()}
    record = json.loads((staging / "intent.json").read_text())
    stopped_at.go_on()
    saving.result()
    assert names >= {"lock", "new", "intent.json", "note-0-was", "note-0-after"}
    assert record["version"] == recorded["version"] == 1
    assert form(record) == form(recorded)


# Both save.


def shards_of_another_version(root: Path) -> dict[str, str]:
    """Write a checkpoint as another version would, under names of its own; return where its files lie, index last."""
    source = root / "of another version"
    source.mkdir()
    files = {}
    weight_map = {}
    for k, (name, tensor) in enumerate(tensors_of(OTHER).items(), 1):
        shard = f"model-ffffffffff-{k:05d}-of-00006.safetensors"
        stio.sync.save({name: tensor}, source / shard)
        files[shard], weight_map[name] = str(source / shard), shard
    index = source / "index"
    total = sum(tensor.nbytes for tensor in tensors_of(OTHER).values())
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return {**files, "model.safetensors.index.json": str(index)}


def test_a_save_refuses_where_another_version_has_saved_meanwhile(place: Place, other: OtherVersion) -> None:
    """The other one's checkpoint stands whole, and nothing of the refused one is left."""
    source = place.root.parent / f"{place.root.name}-source"
    source.mkdir()
    if place.keywords:
        files = shards_of_another_version(source)
    else:
        stio.sync.save(tensors_of(OTHER), source / "model.safetensors")
        files = {"model.safetensors": str(source / "model.safetensors")}
    with held_while_staging(place.path, place.keywords) as saving:
        assert other("publish", path=place.home, files=files)["taken"]
    with pytest.raises(stio.ConcurrentSaveError, match="changed the destination"):
        saving.result()
    place.require(OTHER)


def test_a_first_save_refuses_where_another_version_was_first(tmp_path: Path, other: OtherVersion) -> None:
    stio.sync.save(tensors_of(OTHER), tmp_path / "source")
    with held_while_staging(tmp_path / "model", SHARDS) as saving:
        other("make_directory", path=tmp_path / "model", source=tmp_path / "source")
    with pytest.raises(stio.ConcurrentSaveError, match="changed the destination"):
        saving.result()
    assert found_by("load", tmp_path / "model") == describe_tensors(tensors_of(OTHER))
    assert listing(tmp_path) == ["model/model.safetensors"]


# Files of newer formats.


class Newer:
    """A save that was cut off, as a newer version might have left it.

    Args:
        root: Directory for it.
        name: Archive that it is made from.
        change: Makes the newer format out of the staging directory.
    """

    def __init__(self, root: Path, name: str, change: Callable[[Path], object]) -> None:
        self.root = unpack(archive.FILES / NEWEST / f"{name}.tar.xz", root)
        self.staging = self.root / STAGING
        change(self.staging)
        then = time.time() - 30 * 3600
        for path in (self.staging / "lock", self.staging):
            os.utime(path, (then, then))
        self._before = self._contents()

    def _contents(self) -> dict[str, bytes]:
        files = (path for path in self.staging.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}

    def require_untouched(self) -> None:
        assert self.staging.is_dir(), "the staging directory of a newer version was deleted"
        assert self._contents() == self._before


def change_record(**values: Any) -> Callable[[Path], None]:
    """Return what changes keys of a record."""

    def change(staging: Path) -> None:
        record = json.loads((staging / "intent.json").read_text())
        (staging / "intent.json").write_text(json.dumps(record | values))

    return change


def replace_record(staging: Path) -> None:
    """Leave nothing of today's record but its number."""
    (staging / "intent.json").write_text('{"version": 2, "steps": [{"do": "rename"}]}')


def rename_record(staging: Path) -> None:
    """Have a record of another name, and a lock file that says so."""
    (staging / "intent.json").rename(staging / "journal.json")
    lock = json.loads((staging / "lock").read_text())
    (staging / "lock").write_text(json.dumps({**lock, "version": 2}))


CUT_OFF = ["index-moved", "files-one-replaced"]
cut_off = pytest.mark.parametrize("name", CUT_OFF)
newer_records = pytest.mark.parametrize(
    "change", [change_record(version=2), replace_record], ids=["a newer number", "nothing but a newer number"]
)


@cut_off
@newer_records
def test_a_newer_record_is_left_alone(name: str, change: Callable[[Path], None], tmp_path: Path) -> None:
    """By the command, by its dry run, and by a save, which is refused with the reason or stands then."""
    newer = Newer(tmp_path, name, change)
    found = found_by("load", newer.root / "model")
    before = listing(newer.root)
    for options in (["--dry-run"], [], ["--max-age", "0"]):
        said = json.loads(run("gc", newer.root / "model", "--json", *options).stdout)
        assert said["kept"] == [str(newer.staging)]
    assert listing(newer.root) == before
    assert found_by("load", newer.root / "model") == found
    newer.require_untouched()
    try:
        look.save_next("save", newer.root / "model", MANY)
    except stio.StioError as error:
        assert "version" in str(error)
    else:
        found = describe_tensors(tensors_of(look.EXAMPLE_GENERATION))
    newer.require_untouched()
    assert found_by("load", newer.root / "model") == found


def test_the_command_says_that_a_record_is_of_a_newer_version(tmp_path: Path) -> None:
    newer = Newer(tmp_path, "index-moved", change_record(version=2))
    said = run("gc", newer.root / "model").output.replace(str(newer.root), "")
    assert "version" in said or "newer" in said


def test_a_save_over_a_cut_off_save_of_a_newer_version_refuses(tmp_path: Path) -> None:
    newer = Newer(tmp_path, "files-one-replaced", change_record(version=2))
    refusal = ""
    try:
        look.save_next("save", newer.root / "model", MANY)
    except stio.StioError as error:
        refusal = str(error).replace(str(newer.root), "")
    assert "version" in refusal


@pytest.mark.parametrize(
    "change",
    [change_record(version="2"), change_record(commit="journal"), rename_record],
    ids=["the number as text", "another commit", "another name"],
)
def test_a_record_that_is_not_understood_is_left_alone(change: Callable[[Path], None], tmp_path: Path) -> None:
    newer = Newer(tmp_path, "index-moved", change)
    run("gc", newer.root / "model")
    newer.require_untouched()


@pytest.mark.parametrize("name", [".stio-v2-b000000001", ".stio-B000000001", ".stio-b000000001.d"])
def test_a_staging_directory_of_another_name_is_left_alone(name: str, tmp_path: Path) -> None:
    """So a newer version can protect a directory from all older ones by its name alone."""
    root = unpack(archive.FILES / NEWEST / "index-moved.tar.xz", tmp_path)
    (root / STAGING).rename(root / "model" / name)
    before = listing(root)
    assert look.collect(root / "model", root) == {}
    assert listing(root) == before
    look.save_next("save", root / "model", MANY)
    kept = [one for one in before if f"/{name}/" in one]
    assert kept and set(kept) <= set(listing(root))


def change_manifest(path: Path, **values: Any) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | values, indent=2))


@pytest.mark.parametrize("values", [{"version": 2}, {"algorithm": "blake3"}, {"signed": True}], ids=list("nak"))
def test_a_newer_manifest_is_refused_where_it_is_wanted(values: dict[str, Any], tmp_path: Path) -> None:
    """A load that does not ask for it goes on; a save replaces it."""
    root = unpack(archive.FILES / NEWEST / "sharded-sha256.tar.xz", tmp_path)
    change_manifest(root / "model/model.safetensors.manifest.json", **values)
    assert found_by("load", root / "model") == describe_tensors(tensors_of(2))
    with pytest.raises(stio.FormatError, match=r"manifest\.json.*newer stio"):
        stio.sync.load(root / "model", verify=True)
    said = run("verify", root / "model", "--no-progress", status=1).stdout
    assert "manifest.json" in said and "newer stio" in said
    look.save_next("save", root / "model", {**MANY, "hash": "sha256"})
    run("verify", root / "model", "--hash-required", "--no-progress")


def rewritten(source: Path, target: Path, change: Callable[[bytes], bytes]) -> Path:
    """Copy a file of safetensors, its header changed."""
    data = source.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = change(data[8 : 8 + length])
    target.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    return target


@pytest.mark.parametrize("name", ["state", "state-long"])
def test_a_newer_tree_of_state_is_refused(name: str, tmp_path: Path) -> None:
    """Its tensors by themselves can be loaded."""
    root = unpack(archive.FILES / NEWEST / f"{name}.tar.xz", tmp_path)
    there = root / "model.safetensors"
    newer = rewritten(there, root / "newer.safetensors", lambda header: _change(header, b'stio.state\\":1', b"2"))
    with pytest.raises(stio.FormatError, match=r"another version.*expected version 1, found version 2"):
        stio.sync.load_state(newer)
    assert found_by("load", newer) == found_by("load", there)


def _change(header: bytes, key: bytes, number: bytes) -> bytes:
    assert header.count(key) == 1
    return header.replace(key, key[:-1] + number)


@pytest.mark.parametrize("tag", ["dtype", "counter"], ids=["a value", "a container"])
def test_an_unknown_node_of_state_is_refused(tag: str, tmp_path: Path) -> None:
    root = unpack(archive.FILES / NEWEST / "state.tar.xz", tmp_path)
    known, unknown = f'[\\"{tag}\\",'.encode(), b'[\\"newest\\",'
    newer = rewritten(
        root / "model.safetensors", root / "newer.safetensors", lambda header: header.replace(known, unknown)
    )
    with pytest.raises(stio.FormatError) as refused:
        stio.sync.load_state(newer)
    assert "a newer stio may know it" in str(refused.value) and "newest" in str(refused.value)


def test_the_other_version_is_no_stio(tmp_path: Path) -> None:
    """The script runs where there is no stio at all."""
    script = shutil.copy(SCRIPT, tmp_path / "script.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", script], input="", capture_output=True, text=True, cwd=tmp_path, timeout=BOUND
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "import stio" not in SCRIPT.read_text()


@pytest.mark.parametrize("lock", ['{"version": 2}', '{"pid": 1, "version": "next"}'])
def test_a_newer_save_beside_a_new_directory_is_none_of_its_business(lock: str, tmp_path: Path) -> None:
    """It may be of any other destination there. A file is renamed over one that the newer record may name."""
    staging = tmp_path / ".stio-0123456789"
    (staging / "new").mkdir(parents=True)
    (staging / "lock").write_text(lock)
    tensors = {"w": torch.zeros(2)}
    stio.sync.save(tensors, tmp_path / "new")
    with pytest.raises(stio.StorageError, match="another version of stio was interrupted here"):
        stio.sync.save(tensors, tmp_path / "m.safetensors")
    assert (staging / "lock").read_text() == lock
    assert sorted(path.name for path in tmp_path.iterdir()) == [staging.name, "new"]
