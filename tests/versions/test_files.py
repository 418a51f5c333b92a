"""Files of every version so far, whole and cut off: read, verified, saved over, cleaned up, and written again.

`files/<version>/` holds archives and `scenarios.json`, which says what each reader must find in them. Nothing here
knows how stio is built: public functions and the command line only.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from versions import archive, look
from versions.archive import FILES, NEWEST, Owner, unpack

import stio
from stio.compat import huggingface_hub, olmo
from stio.compat.safetensors.torch import save_file

HOW_TO_CHANGE = (
    "A change of bytes is a change of format. If it is meant: older versions of stio must read the new files or refuse "
    "them by a version number, and make_files.py writes them to a directory of the new version. Never edit an old one."
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One archive, and what `scenarios.json` says of it."""

    archive: Path
    says: Mapping[str, Any]
    states: Mapping[str, Any]
    """Descriptions by name, of the same version."""

    def unpack(self, into: Path, owner: Owner = archive.DEAD) -> Path:
        return unpack(self.archive, into, owner)

    @property
    def destination(self) -> str:
        return str(self.says["destination"])


def known() -> dict[str, Scenario]:
    """Return all scenarios of all versions, by version and name."""
    found = {}
    for directory in sorted(FILES.iterdir()):
        document = json.loads((directory / "scenarios.json").read_text())
        for name, says in document["scenarios"].items():
            path = directory / f"{name}.tar.xz"
            found[f"{directory.name}/{name}"] = Scenario(path, says, document["states"])
    return found


ALL = known()
scenarios = pytest.mark.parametrize("scenario", ALL.values(), ids=list(ALL))


def of(name: str) -> Scenario:
    return ALL[f"{NEWEST}/{name}"]


HAS_EVERY_DTYPE = hasattr(torch, "float8_e8m0fnu")
"""False for torch 2.6, which has all other dtypes of the archives."""

WITHOUT_A_DTYPE = {"assorted": "UnsupportedDtypeError", "every node": "FormatError"}
"""By description of a content with every dtype, how a reader refuses it if torch lacks one."""


CHANGED = {("retention-files-half", "run/step-1"): "old"}
"""What later versions answer in another way, by scenario and path: a complete set of shards is loaded without its index,
which the deletion of a checkpoint removes first."""


def require_found(scenario: Scenario, root: Path, when: str) -> None:
    """Require that every reader finds what `scenarios.json` says, bit for bit."""
    for read in scenario.says["reads"]:
        found = look.found_by(read["way"], root / read["path"])
        expected = CHANGED.get((scenario.archive.name.removesuffix(".tar.xz"), read["path"]), read[when])
        if not HAS_EVERY_DTYPE:
            expected = WITHOUT_A_DTYPE.get(expected, expected)
        where = f"{read['path']} by {read['way']}"
        if expected == "mixed":
            # The documented window of commit="files": each tensor is whole, the old one or the new one.
            old, new = scenario.states["old"], scenario.states["new"]
            assert found.keys() == new.keys(), where
            assert all(line in (old[name], new[name]) for name, line in found.items()), where
        else:
            assert found == scenario.states.get(expected, expected), f"{where}: {expected!r} is expected"


@pytest.fixture
def place(fast_path: Path) -> Path:
    return fast_path


# Reading, and the command that cleans up.


@pytest.mark.matrix
@scenarios
def test_every_reader_finds_what_was_saved_and_the_command_recovers_it(scenario: Scenario, place: Path) -> None:
    """The old or the new checkpoint, or a refusal by class; what is cut off is finished or undone once."""
    root = scenario.unpack(place)
    before = look.listing(root)
    require_found(scenario, root, "now")
    require_shown(scenario, root)
    planned = json.loads(run("gc", root / scenario.destination, "--dry-run", "--json").stdout)
    assert look.listing(root) == before, "readers and a dry run change nothing"
    found = look.collect(root / scenario.destination, root)
    assert found == scenario.says["gc"]
    for key, names in found.items():
        assert planned[key] == [str(root / name) for name in names]
    require_left(look.listing(root), scenario.says["left_after_gc"])
    require_found(scenario, root, "then")
    assert look.collect(root / scenario.destination, root) == {}


def require_shown(scenario: Scenario, root: Path) -> None:
    """Require that `stio verify` finds nothing wrong, and that `stio inspect` lists what a load gives."""
    for read in scenario.says["reads"]:
        if read["way"] == "load" and "Error" not in read["now"]:
            run("verify", root / read["path"], "--no-progress")
            listed = json.loads(run("inspect", root / read["path"], "--json").stdout)["tensors"]
            expected = scenario.states.get(read["now"], scenario.states["new"])
            tied = {name for name, line in expected.items() if " is " in line}
            assert {one["name"] for one in listed} == set(expected) - tied


HASHED = [
    name
    for name, one in ALL.items()
    if any("manifest" in file for file in one.says["left_after_gc"]) and one.destination.startswith("model")
]


@pytest.mark.matrix
@pytest.mark.parametrize("name", HASHED)
def test_manifests_are_held_against_the_files(name: str, place: Path) -> None:
    """Before and after the recovery all files are as they say, and one changed byte is found."""
    root = ALL[name].unpack(place)
    destination = root / ALL[name].destination
    run("verify", destination, "--no-progress")  # some have none for the moment
    run("gc", destination)
    run("verify", destination, "--hash-required", "--no-progress")
    files = sorted(destination.glob("*.safetensors")) or [destination]
    data = bytearray(files[-1].read_bytes())
    data[-1] ^= 1
    files[-1].write_bytes(data)
    run("verify", destination, "--hash-required", "--no-progress", status=1)


# The next save.


@pytest.mark.matrix
@scenarios
def test_the_next_save_replaces_it(scenario: Scenario, place: Path) -> None:
    """What may go is gone, what is the user's is not, and what is left the command cleans up."""
    root = scenario.unpack(place)
    users = {name: (root / name).read_bytes() for name in scenario.says.get("users", ())}
    destination, way = root / scenario.destination, scenario.says["next"]["by"]
    look.save_next(way, destination, scenario.says["next"]["keywords"])
    require_next(scenario, destination, way)
    require_left(look.listing(root, masked=True), scenario.says["left_after_save"])
    run("gc", destination)
    assert not [name for name in look.listing(root) if is_dead(name) and name not in users]
    require_next(scenario, destination, way)
    for name, data in users.items():
        assert (root / name).read_bytes() == data


@pytest.mark.parametrize("name", ["index-committed", "files-one-replaced", "first-published"])
def test_a_saver_replaces_it_and_deletes_its_own_only(name: str, place: Path) -> None:
    """`keep_last` counts no checkpoint of another process, and removes no file of the user's."""
    (place / "step-2").mkdir()
    root = of(name).unpack(place / "step-2")
    users = set(of(name).says.get("users", ()))
    with stio.sync.Saver(keep_last=1, **look.MANY) as saver:
        for where in (place / "step-1", root / "model", place / "step-3"):
            saver.save(look.tensors_of(look.EXAMPLE_GENERATION), where).result()
            assert look.found_by("load", where) == of(name).states["next"]
    assert not (place / "step-1").exists()
    assert {path.name for path in (root / "model").glob("*.safetensors*")} <= {Path(user).name for user in users}
    assert users <= set(look.listing(root))


def require_next(scenario: Scenario, destination: Path, way: str) -> None:
    if way == "save_state":
        assert look.found_by("load_state", destination) == scenario.states["next state"]
    else:
        pickles = scenario.says["next"]["keywords"].get("safe_serialization") is False
        assert look.found_by("convert" if pickles else "load", destination) == scenario.states["next"]


def is_dead(name: str) -> bool:
    """Return whether a name is of a staging directory, or in one; the user's own names differ from those."""
    return any(part.startswith((".stio-trash-", ".stio-*")) or archive.STAGING.match(part) for part in name.split("/"))


def require_left(found: list[str], recorded: list[str]) -> None:
    """Require the recorded names. Of dead directories a later version may leave fewer."""
    assert [name for name in found if not is_dead(name)] == [name for name in recorded if not is_dead(name)]
    assert {name for name in found if is_dead(name)} <= {name for name in recorded if is_dead(name)}


# What was replaced since, by a program that knows nothing of stio.


def write_other(root: Path, *names: str) -> None:
    """Put another checkpoint in place: one shard for each name, and an index over them."""
    tensors = look.tensors_of(7)
    weight_map = {}
    for k, name in enumerate(names):
        some = {key: tensors[key] for key in list(tensors)[k :: len(names)]}
        save_file(some, root / "model" / name)
        weight_map |= dict.fromkeys(some, name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (root / "model/model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["files-record", "files-one-replaced", "index-moved", "index-committed"])
def test_a_checkpoint_that_was_put_there_since_stays(name: str, place: Path) -> None:
    """No record goes forward over it, and no record takes it back."""
    root = of(name).unpack(place)
    write_other(root, "model-x-1.safetensors", "model-x-2.safetensors")
    other = look.describe_tensors(look.tensors_of(7))
    assert look.found_by("load", root / "model") == other
    run("gc", root / "model")
    assert look.found_by("load", root / "model") == other
    assert not [one for one in look.listing(root) if is_dead(one)]


@pytest.mark.parametrize(
    ("name", "shard"),
    [
        ("index-committed", "model-a000000002-00002-of-00003.safetensors"),
        ("index-moved", "model-b000000001-00002-of-00003.safetensors"),
        ("one-to-many-committed", "model.safetensors"),
    ],
    ids=["an old file, forward", "a new file, back", "the one old file, forward"],
)
@pytest.mark.parametrize("by", ["size", "time"])
def test_a_file_that_was_replaced_since_stays(name: str, shard: str, by: str, place: Path) -> None:
    """Under a name that the record deletes, with another size or another time of change."""
    root = of(name).unpack(place)
    path = root / "model" / shard
    found = path.stat()
    data = path.read_bytes() + (b"more" if by == "size" else b"")
    path.unlink()
    path.write_bytes(data)
    later = found.st_mtime_ns + (0 if by == "size" else 1)
    os.utime(path, ns=(later, later))
    run("gc", root / "model")
    assert path.read_bytes() == data
    removed = {"model/" + shard} ^ set(look.listing(root))
    assert removed == set(of(name).says["left_after_gc"])


def test_a_new_shard_that_was_taken_into_use_stays(place: Path) -> None:
    """An index names it by now; the others are removed."""
    root = of("index-moved").unpack(place)
    names = sorted(path.name for path in (root / "model").glob("model-b000000001-*"))
    index = root / "model/model.safetensors.index.json"
    document = json.loads(index.read_text())
    with_one = dict.fromkeys(document["weight_map"], names[0])
    index.write_text(json.dumps({**document, "weight_map": with_one}))
    run("gc", root / "model")
    assert sorted(path.name for path in (root / "model").glob("model-b000000001-*")) == names[:1]


# Owners.

LONG = 25 * 3600.0
ELSEWHERE = "another-host.example"
EARLIER = "00000000-0000-0000-0000-000000000000"
RECORDED = ["index-moved", "files-one-replaced", "trainer-weights"]


def alive(**fields: Any) -> Owner:
    return Owner(pid=os.getpid(), **fields)


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize(
    "owner",
    [Owner(age_seconds=0), Owner(host=ELSEWHERE), Owner(boot=EARLIER), alive(), Owner(age_seconds=LONG)],
    ids=["dead, just now", "of another host", "of an earlier boot", "a number that is used again", "dead for a day"],
)
def test_a_free_lock_means_a_dead_owner(name: str, owner: Owner, place: Path) -> None:
    """On a filesystem of this machine, whatever the lock file says."""
    root = of(name).unpack(place, owner)
    assert look.collect(root / of(name).destination, root) == of(name).says["gc"]
    require_found(of(name), root, "then")


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a filesystem that knows no locks."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.matrix
@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize(
    ("owner", "is_dead"),
    [
        (Owner(), False),
        (Owner(age_seconds=LONG), True),
        (alive(age_seconds=LONG), False),
        (Owner(host=ELSEWHERE), False),
        (alive(host=ELSEWHERE, age_seconds=LONG), True),
        (alive(boot=EARLIER, age_seconds=LONG), True),
    ],
    ids=["dead, young", "dead, old", "alive, old", "elsewhere, young", "elsewhere, old", "earlier boot, old"],
)
def test_without_locks_age_host_boot_and_process_decide(name: str, owner: Owner, is_dead: bool, place: Path) -> None:
    root = of(name).unpack(place, owner)
    before = look.listing(root)
    found = look.collect(root / of(name).destination, root)
    if is_dead:
        assert found == of(name).says["gc"]
        require_found(of(name), root, "then")
    else:
        assert found == {"kept": sorted(one for some in of(name).says["gc"].values() for one in some)}
        assert look.listing(root) == before
        require_found(of(name), root, "now")


@pytest.mark.usefixtures("without_locks")
def test_without_locks_the_caller_may_give_another_age(place: Path) -> None:
    root = of("index-moved").unpack(place)
    run("gc", root / "model", "--max-age", "0")
    assert look.listing(root) == of("index-moved").says["left_after_gc"]


@pytest.mark.usefixtures("without_locks")
def test_without_locks_an_empty_lock_file_means_a_dead_owner_after_a_day(place: Path) -> None:
    root = of("first-empty-lock").unpack(place, Owner(age_seconds=LONG))
    assert look.collect(root / "model", root) == {"undone": [".stio-b000000001"]}


@pytest.mark.parametrize("name", ["first-no-lock", "index-no-lock"])
def test_a_directory_without_a_lock_file_is_left_alone_for_a_minute(name: str, place: Path) -> None:
    """Its owner may be about to create it; a save beside it does not wait."""
    root = of(name).unpack(place, Owner(age_seconds=5))
    before = look.listing(root)
    staging = next(path for path in before if path.endswith(".stio-b000000001/"))
    assert look.collect(root / "model", root) == {"kept": [staging.rstrip("/")]}
    assert look.listing(root) == before
    look.save_next("save", root / "model", look.MANY)
    assert staging in look.listing(root)
    assert look.found_by("load", root / "model") == of(name).states["next"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_in_a_sticky_directory_records_of_other_users_are_not_followed(place: Path) -> None:
    root = of("index-committed").unpack(place)
    os.chown(root / "model/.stio-b000000001", 12345, 12345)
    (root / "model").chmod(0o1777)
    before = look.listing(root)
    assert look.collect(root / "model", root) == {"kept": ["model/.stio-b000000001"]}
    assert look.listing(root) == before
    (root / "model").chmod(0o755)
    assert look.collect(root / "model", root) == of("index-committed").says["gc"]


# The same bytes.

CHANGED = {
    "0.1.0.dev0/sharded": "each shard has the metadata of the save; versions before read them from there too (403)"
}
"""Scenarios whose bytes this version writes otherwise, with the reason. No version was released before."""

WRITTEN = [name for name, one in ALL.items() if "rewrite" in one.says and name.startswith(f"{NEWEST}/")]


@pytest.mark.matrix
@pytest.mark.parametrize("name", WRITTEN)
def test_this_version_writes_the_same_bytes(name: str, place: Path) -> None:
    """What was saved is loaded and saved again."""
    scenario = ALL[name]
    if not HAS_EVERY_DTYPE and any(read["now"] in WITHOUT_A_DTYPE for read in scenario.says["reads"]):
        pytest.skip("this torch has no float8_e8m0fnu")
    there, here = place / "there", place / "here"
    for directory in (there, here):
        directory.mkdir()
        scenario.unpack(directory)
    rewrite, target = scenario.says["rewrite"], here / scenario.destination
    keywords = rewrite.get("keywords", {})
    way = rewrite["by"]
    source = there / scenario.destination
    if not rewrite.get("over"):
        for path in target.iterdir() if target.is_dir() else [target, Path(f"{target}.manifest.json")]:
            path.unlink(missing_ok=True)
        if target.is_dir() and way != "hub":
            target.rmdir()
    if way == "save":
        stio.sync.save(stio.sync.load(source), target, **keywords)
    elif way == "save_state":
        # A path of another ending is a directory to `save_state`; the frameworks' files hold the same bytes.
        written = target if target.suffix != ".ckpt" else target.with_suffix(".safetensors")
        stio.sync.save_state(stio.sync.load_state(source), written, **keywords)
        written.rename(target)
    elif way == "convert":
        stio.sync.convert(there / rewrite["source"], target, **keywords)
    elif way == "hub":
        huggingface_hub.save_torch_state_dict(stio.sync.load(source), target, **keywords)
    elif way == "olmo":
        olmo.state_dict_to_safetensors_file(olmo.safetensors_file_to_state_dict(source), target)
    else:
        assert way == "save_file", way
        save_file(stio.sync.load(source), target, **keywords)
    if name in CHANGED:
        assert masked(here) != masked(there), f"{name} has the same bytes again: take it out of CHANGED"
    else:
        assert masked(here) == masked(there), f"{name}: {HOW_TO_CHANGE}"


def masked(root: Path) -> dict[str, bytes]:
    """Return all files' bytes by name, without the ids of saves in names and texts."""
    found = {}
    for path in root.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            is_text = path.suffix == ".json"
            name = look.mask(path.relative_to(root).as_posix())
            found[name] = look.mask(data.decode()).encode() if is_text else data
    return found


@pytest.mark.parametrize("directory", sorted(FILES.iterdir()), ids=lambda directory: directory.name)
def test_archives_are_small_and_listed(directory: Path) -> None:
    archives = {path.name.removesuffix(".tar.xz") for path in directory.glob("*.tar.xz")}
    assert {f"{directory.name}/{name}" for name in archives} == {
        name for name in ALL if name.startswith(f"{directory.name}/")
    }
    assert sum(path.stat().st_size for path in directory.iterdir()) < 300_000
    assert not any(path.stat().st_size > 16_000 for path in directory.glob("*.tar.xz"))


# Nothing is left out.

_ID = r"[0-9a-f]{10}"
NAMES = {
    "a staging directory": rf"(.*/)?\.stio-{_ID}",
    "its lock": rf"(.*/)?\.stio-{_ID}/lock",
    "its directory of new files": rf"(.*/)?\.stio-{_ID}/new",
    "a staged shard": rf".*\.stio-{_ID}/new/model-{_ID}-\d{{5}}-of-\d{{5}}\.safetensors",
    "a staged index": rf".*\.stio-{_ID}/new/model\.safetensors\.index\.json",
    "a staged manifest": rf".*\.stio-{_ID}/new/model\.safetensors\.manifest\.json",
    "a staged pickle": rf".*\.stio-{_ID}/new/pytorch_model-.*\.bin",
    "a record": rf"(.*/)?\.stio-{_ID}/intent\.json",
    "a record that is being written": rf"(.*/)?\.stio-{_ID}/intent\.json\.part",
    "a note as it was": rf"(.*/)?\.stio-{_ID}/note-0-was",
    "a note for both": rf"(.*/)?\.stio-{_ID}/note-0-before",
    "a note for the new one": rf"(.*/)?\.stio-{_ID}/note-0-after",
    "a staging directory inside a staged directory": rf"run/\.stio-{_ID}/new/\.stio-{_ID}",
    "trash": rf"(.*/)?\.stio-trash-{_ID}",
    "trash of a checkpoint by its name": r"run/\.stio-trash-checkpoint-1",
    "one file": r"model\.safetensors",
    "its manifest": r"model\.safetensors\.manifest\.json",
    "one file in a directory": r"model/model\.safetensors",
    "a shard in the hub's names": r"model/model-\d{5}-of-\d{5}\.safetensors",
    "a shard in stio's own names": rf"model/model-{_ID}-\d{{5}}-of-\d{{5}}\.safetensors",
    "a shard in the caller's names": r"model/weights-\d{5}-of-\d{5}\.v2\.safetensors",
    "an index": r"model/model\.safetensors\.index\.json",
    "a directory's manifest": r"model/model\.safetensors\.manifest\.json",
    "a pickle": r"model/pytorch_model-\d{5}-of-\d{5}\.bin",
    "an index of pickles": r"model/pytorch_model\.bin\.index\.json",
    "a file of the drop-ins' under any name": r"model\.st",
    "a file of Lightning's": r"last\.ckpt",
    "a Trainer's checkpoint": r"run/checkpoint-\d+/trainer_state\.json",
    "its training state": r"run/checkpoint-\d+/training_state/state\.safetensors",
}
"""Every kind of name that stio gives."""

TAGS = {
    *("dict", "ordered_dict", "counter", "list", "tuple", "size"),
    *("int", "float", "text", "bytes", "dtype", "device"),
    *("tensor", "parameter", "frozen_parameter", "bytes_tensor"),
}
"""Every tag of a nested state's tree."""

FRAMEWORK_TAGS = {"path", "set", "frozenset", "namespace", "defaultdict", "ndarray", "scalar"}
"""Every tag of what frameworks keep besides."""


@pytest.fixture(scope="module")
def held() -> dict[str, bytes | None]:
    """Return everything in the newest version's archives, by archive and name."""
    directory = FILES / NEWEST
    return {
        f"{path.name}:{name}": data
        for path in directory.glob("*.tar.xz")
        for name, data in archive.contents(path).items()
    }


def test_every_kind_of_name_is_in_an_archive(held: dict[str, bytes | None]) -> None:
    names = {name.partition(":")[2] for name in held}
    assert [what for what, rule in NAMES.items() if not any(re.fullmatch(rule, name) for name in names)] == []
    inside = {found[1] for name in names if (found := re.search(r"\.stio-(?:trash-)?b[0-9a-f]{9}/([^/]+)$", name))}
    own = {one for one in inside if not one.endswith((".safetensors", ".index.json", "config.json", "_state.json"))}
    steps = {f"note-0-{when}" for when in ("was", "before", "after")}
    assert own == {"lock", "new", "intent.json", "intent.json.part", *steps}, "a name that NAMES does not list"


def test_every_kind_of_record_is_in_an_archive(held: dict[str, bytes | None]) -> None:
    """Each commit; with and without what comes before it, what goes after it, and notes of each course."""
    records = [json.loads(data) for name, data in held.items() if name.endswith("/intent.json") and data]
    assert {record["version"] for record in records} == {1}
    assert {record["commit"] for record in records} == {"index", "file", "files"}
    for key in ("last_sha256", "old_sha256", "moves", "unlink", "notes"):
        assert {bool(record[key]) for record in records} == {True, False}, key
    courses = {
        tuple(note[key] is not None for key in ("was", "before", "after"))
        for record in records
        for note in record["notes"]
    }
    assert courses == {(True, True, True), (True, False, True), (True, False, False), (False, False, True)}
    assert any(name.endswith(".index.json") for record in records for name in record["unlink"])
    locks = [data for name, data in held.items() if name.endswith("/lock")]
    assert {bool(data) for data in locks} == {True, False}
    assert {tuple(json.loads(data)) for data in locks if data} == {("pid", "boot", "host", "time")}


def test_every_kind_of_manifest_is_in_an_archive(held: dict[str, bytes | None]) -> None:
    manifests = [json.loads(data) for name, data in held.items() if name.endswith(".manifest.json") and data]
    assert {manifest["version"] for manifest in manifests} == {1}
    assert {manifest["algorithm"] for manifest in manifests} == {"sha256", "xxh3"}
    assert {len(states) for manifest in manifests for states in manifest["files"].values()} == {1, 2}


def test_every_kind_of_node_is_in_an_archive(held: dict[str, bytes | None]) -> None:
    trees: list[Any] = []
    for name, data in held.items():
        if data and name.endswith((".safetensors", ".ckpt")) and b"stio.state" in data:
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            tree = json.loads(header["__metadata__"]["stio.state"]) if "__metadata__" in header else {}
            if "tensor" in tree:
                begin, end = header[tree["tensor"]]["data_offsets"]
                tree = json.loads(data[8 + length + begin : 8 + length + end])
            trees.append(tree)
        elif data and name.endswith(".index.json") and b"stio.state" in data:
            trees.append(json.loads(json.loads(data)["metadata"]["stio.state"]))
    assert {tree["stio.state"] for tree in trees} == {1}
    rows = {node[0] for tree in trees for node in tree["nodes"] if isinstance(node, list)}
    assert rows == TAGS
    plain = {node for tree in trees for node in tree["nodes"] if isinstance(node, str)}
    assert plain >= {"stio.type", *FRAMEWORK_TAGS}


def test_archives_name_no_machine(held: dict[str, bytes | None]) -> None:
    host = socket.gethostname().encode()
    for name, data in held.items():
        if name.endswith("/lock") and data:
            assert json.loads(data)["host"] == "HOST"
            assert host not in data
