"""What a source may be, and what is refused before a byte of data is read."""

from __future__ import annotations

import json
import logging
import os

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from support import (
    INDEX,
    HookedRoot,
    descriptors,
    eventually,
    nothing_left,
    oracle,
    ramp,
    require_equal,
    save_file,
    save_raw,
    save_sharded,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import stio
from stio import sync
from stio.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    FormatError,
    IndexFormatError,
    LimitError,
    StioError,
    StorageError,
    TensorNotFoundError,
    TruncatedError,
    UnsafePathError,
)
from stio.format.header import build_header
from stio.format.shared import ALIASES_KEY
from stio.limits import Limits
from stio.storage.checkpoint import shards as opened_module
from stio.storage.checkpoint.open import open_checkpoint
from stio.storage.checkpoint.shards import OpenOptions


@pytest.fixture
def tensors():
    return {f"layer.{k}": ramp(4, k + 1, start=k) for k in range(7)}


@pytest.fixture
def directory(tmp_path, tensors):
    return save_sharded(tensors, tmp_path / "model")


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


def refused(error, source, match=None, **keywords):
    """Open, and require that it fails with every descriptor given back."""
    with pytest.raises(error, match=match) as caught:
        open_checkpoint(source, OpenOptions(**keywords))
    assert isinstance(caught.value, StioError)
    return caught.value


def rewrite_index(directory, change):
    document = json.loads((directory / INDEX).read_text())
    change(document)
    (directory / INDEX).write_text(json.dumps(document))


# Sources.


@pytest.mark.parametrize(
    "source",
    [
        lambda d: str(d),
        lambda d: d,
        lambda d: str(d) + "/",
        lambda d: d / INDEX,
        lambda d: str(d / INDEX),
        lambda d: os.fsencode(d),
        lambda d: os.path.relpath(d),
        lambda d: HookedRoot(d),
    ],
    ids=["str", "Path", "slash", "index Path", "index str", "bytes", "relative", "Root"],
)
def test_sharded_sources(directory, tensors, source):
    source = source(directory)
    with sync.open(source) as checkpoint:
        assert set(checkpoint.keys()) == set(tensors)
        assert len(checkpoint) == 7
        assert list(checkpoint) == checkpoint.keys()
        assert "layer.3" in checkpoint
        assert "layer.9" not in checkpoint
        assert 3 not in checkpoint
        assert checkpoint.metadata["total_size"] == sum(t.nbytes for t in tensors.values())
        info = checkpoint.info("layer.3")
        assert (info.name, info.dtype, info.shape, info.nbytes) == ("layer.3", "F32", (4, 4), 64)
        assert info.shard == "model-00001-of-00003.safetensors"
        require_equal(checkpoint.load(), tensors)
        with pytest.raises(TensorNotFoundError):
            checkpoint.info("layer.9")
    if isinstance(source, HookedRoot):
        source.close()


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors", "weights.bin", "x y ü.safetensors"])
def test_single_file(tmp_path, tensors, name):
    file = save_file(tensors, tmp_path / "sub dir ü" / name, metadata={"format": "pt"})
    for source in [file, str(file), os.fsencode(file)]:
        require_equal(sync.load(source), tensors)
    with sync.open(file) as checkpoint:
        assert checkpoint.metadata == {"format": "pt"}


def test_directory_with_a_single_file(tmp_path, tensors):
    save_file(tensors, tmp_path / "whatever.safetensors")
    (tmp_path / "config.json").write_text("{}")
    require_equal(sync.load(tmp_path), tensors)


def test_directory_named_like_a_file(tmp_path, tensors):
    save_file(tensors, tmp_path / "odd.safetensors" / "model.safetensors")
    require_equal(sync.load(tmp_path / "odd.safetensors"), tensors)


def test_an_index_of_another_name(directory, tensors):
    (directory / INDEX).rename(directory / "other.safetensors.index.json")
    require_equal(sync.load(directory), tensors)
    require_equal(sync.load(directory / "other.safetensors.index.json"), tensors)


def test_the_index_goes_before_stray_files(directory, tensors):
    save_file({"stray": ramp(2)}, directory / "consolidated.safetensors")
    require_equal(sync.load(directory), tensors)


def test_more_than_a_hundred_shards(tmp_path):
    tensors = {f"t{k}": ramp(3, start=k) for k in range(130)}
    directory = save_sharded(tensors, tmp_path, 130)
    require_equal(sync.load(directory), tensors)
    require_equal(sync.load(directory, names=["t7", "t129"]), {"t7": tensors["t7"], "t129": tensors["t129"]})


def test_a_current_directory(directory, tensors, monkeypatch):
    monkeypatch.chdir(directory)
    for source in [".", INDEX]:
        require_equal(sync.load(source), tensors)


def test_index_in_the_current_directory_of_nested_shards(tmp_path, tensors):
    save_file(tensors, tmp_path / "deep" / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "deep/a.safetensors")}))
    require_equal(sync.load(tmp_path), tensors)


# Nothing to load, or too much.


def test_nothing_at_this_path(tmp_path):
    for source in [tmp_path / "no", tmp_path / "no.safetensors", tmp_path / "no" / INDEX, ""]:
        error = refused(CheckpointNotFoundError, source)
        assert isinstance(error, FileNotFoundError)


def test_directory_without_a_checkpoint(tmp_path):
    error = refused(CheckpointNotFoundError, tmp_path, "holds no checkpoint")
    assert error.found == "an empty directory"
    for k in range(7):
        (tmp_path / f"file{k}.bin").touch()
    error = refused(CheckpointNotFoundError, tmp_path, "holds no checkpoint")
    assert "file0.bin" in str(error)
    assert "2 others" in str(error)
    assert str(tmp_path) in str(error)
    assert ".safetensors" in str(error)


def test_two_candidates_and_no_index(tmp_path, tensors):
    for name in ["a", "b"]:
        save_file(tensors, tmp_path / f"{name}.safetensors")
    error = refused(AmbiguousCheckpointError, tmp_path, "give the path of the one you mean")
    assert "a.safetensors, b.safetensors" in str(error)
    for name in ["a", "b"]:
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    error = refused(AmbiguousCheckpointError, tmp_path)
    assert "a.safetensors.index.json" in str(error)


# The index and its shards.


def test_b80_missing_shard_fails_before_any_read(directory):
    (directory / "model-00003-of-00003.safetensors").unlink()
    root = HookedRoot(directory)
    error = refused(CheckpointNotFoundError, root, "download may be incomplete")
    assert "model-00003-of-00003.safetensors" in str(error)
    assert {name for name, _, _ in root.log} == {INDEX}
    assert all(file.closed for file in root.files)
    root.close()


def test_b81_tensor_not_in_its_shard(directory):
    def move(document):
        document["weight_map"]["layer.0"] = "model-00002-of-00003.safetensors"

    rewrite_index(directory, move)
    error = refused(IndexFormatError, directory, "not in the shard")
    assert "layer.0" in str(error)


def test_b82_tensor_not_in_the_index(directory, tensors, caplog):
    rewrite_index(directory, lambda document: document["weight_map"].pop("layer.4"))
    error = refused(IndexFormatError, directory, "not in the index")
    assert "layer.4" in str(error)
    with caplog.at_level(logging.WARNING, "stio"):
        require_equal(sync.load(directory, strict=False), tensors)
    assert "layer.4" in caplog.text


def test_b83_tensor_in_two_shards(directory):
    save_file(
        {"layer.0": ramp(4, 1), "layer.1": ramp(4, 2), "layer.4": ramp(4, 5)},
        directory / "model-00002-of-00003.safetensors",
    )
    error = refused(IndexFormatError, directory, "two shards hold")
    assert "layer.0" in str(error)


def test_b85_wrong_total_size_is_a_warning(directory, tensors, caplog):
    rewrite_index(directory, lambda document: document["metadata"].update(total_size=5))
    with caplog.at_level(logging.WARNING, "stio"):
        require_equal(sync.load(directory), tensors)
    assert "total_size 5" in caplog.text


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("../x.safetensors", UnsafePathError),
        ("/etc/x.safetensors", UnsafePathError),
        ("C:x.safetensors", UnsafePathError),
        ("..\\x.safetensors", UnsafePathError),
        ("\\\\host\\x.safetensors", UnsafePathError),
        ("https://host/x.safetensors", UnsafePathError),
        ("%2e%2e/x.safetensors", UnsafePathError),
        ("x.bin", IndexFormatError),
    ],
)
def test_b74_b75_b76_b79_b87_shard_names(directory, name, error):
    rewrite_index(directory, lambda document: document["weight_map"].update({"layer.0": name}))
    root = HookedRoot(directory)
    refused(error, root)
    assert [opened.path for opened in root.files] == [str(directory / INDEX)]
    root.close()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": 5}}', '{"weight_map": null}', "\ufeff{}"])
def test_b84_malformed_index(directory, text):
    (directory / INDEX).write_text(text)
    refused(IndexFormatError, directory)


def test_index_beyond_the_limit(directory):
    refused(
        LimitError, directory, r"index is larger.*limits=stio.Limits\(header_bytes=", limits=Limits(header_bytes=100)
    )


def test_header_beyond_the_limits(tmp_path, tensors):
    file = save_file(tensors, tmp_path / "x.safetensors")
    refused(LimitError, file, r"pass limits=stio.Limits\(header_bytes=", limits=Limits(header_bytes=16))
    refused(LimitError, file, r"pass limits=stio.Limits\(max_tensors=", limits=Limits(max_tensors=6))
    with pytest.raises(LimitError):
        sync.load(file, limits=stio.Limits(max_rank=1))


def test_b77_shard_that_links_out(tmp_path, directory, tensors):
    shard = directory / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "outside.safetensors")
    shard.symlink_to("../outside.safetensors")
    error = refused(UnsafePathError, directory, "follow_symlinks=True")
    assert "outside.safetensors" in str(error)
    with pytest.raises(UnsafePathError):
        sync.load(directory)
    require_equal(sync.load(directory, follow_symlinks=True), tensors)


def test_b77_link_inside_the_root(directory, tensors):
    shard = directory / "model-00002-of-00003.safetensors"
    shard.rename(directory / "data.bin")
    shard.symlink_to("data.bin")
    require_equal(sync.load(directory), tensors)


def test_b77_hugging_face_cache(tmp_path, tensors):
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    save_sharded(tensors, snapshot)
    (repo / "blobs").mkdir()
    for k, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(repo / "blobs" / f"hash{k}")
        file.symlink_to(f"../../blobs/hash{k}")
    require_equal(sync.load(snapshot), tensors)
    require_equal(sync.load(snapshot / INDEX), tensors)
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (snapshot / "model-00001-of-00003.safetensors").unlink()
    (repo / "blobs" / "hash0").rename(other / "hash0")
    (snapshot / "model-00001-of-00003.safetensors").symlink_to("../../../models--org--other/blobs/hash0")
    refused(UnsafePathError, snapshot)


def test_a_file_that_the_caller_names_may_be_a_link(tmp_path, tensors):
    save_file(tensors, tmp_path / "real" / "x.safetensors")
    (tmp_path / "link.safetensors").symlink_to("real/x.safetensors")
    (tmp_path / "linked").symlink_to("real")
    require_equal(sync.load(tmp_path / "link.safetensors"), tensors)
    require_equal(sync.load(tmp_path / "linked"), tensors)


@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "dangling"])
def test_b78_what_is_no_file_never_hangs(directory, kind):
    shard = directory / "model-00002-of-00003.safetensors"
    shard.unlink()
    if kind == "fifo":
        os.mkfifo(shard)
    elif kind == "directory":
        shard.mkdir()
    elif kind == "device":
        shard.symlink_to("/dev/zero")
    else:
        shard.symlink_to("nowhere")
    for options in [{}, {"follow_symlinks": True}]:
        refused((StorageError, CheckpointNotFoundError, UnsafePathError), directory, **options)
    with pytest.raises((StorageError, CheckpointNotFoundError)):
        sync.load(shard)


def test_descriptors_are_back_when_a_later_header_is_wrong(directory):
    (directory / "model-00003-of-00003.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0hello")
    refused(FormatError, directory)
    (directory / "model-00003-of-00003.safetensors").write_bytes(b"")
    refused(FormatError, directory)
    save_raw(
        directory / "model-00003-of-00003.safetensors",
        {"layer.2": {"dtype": "F32", "shape": [4, 3], "data_offsets": [0, 48]}},
        b"short",
    )
    refused(TruncatedError, directory)


def test_check_ends_the_opening(directory):
    calls = []

    def check():
        calls.append(True)
        if len(calls) == 4:
            raise KeyError("enough")

    with pytest.raises(KeyError):
        open_checkpoint(directory, OpenOptions(check=check))


def test_close_is_idempotent(directory):
    before = descriptors()
    opened = open_checkpoint(directory)
    assert len(descriptors()) == len(before) + 3
    opened.close()
    opened.close()
    assert descriptors() == before


# Aliases.


def test_aliases_are_the_same_tensor(tmp_path, tensors):
    text = json.dumps({"tied": "layer.2", "tied.too": "layer.2", "head": "layer.5"})
    file = save_file(tensors, tmp_path / "x.safetensors", metadata={ALIASES_KEY: text})
    loaded = sync.load(file)
    assert loaded["tied"] is loaded["layer.2"] is loaded["tied.too"]
    assert loaded["head"] is loaded["layer.5"]
    assert len(loaded) == 10
    assert list(sync.load(file, names="tied")) == ["tied"]
    assert set(sync.load(file, names=["tied", "layer.0"])) == {"tied", "layer.0"}
    assert set(sync.load(file, names=lambda name: name.startswith("tied"))) == {"tied", "tied.too"}
    with sync.open(file) as checkpoint:
        assert checkpoint.aliases == json.loads(text)
        assert len(checkpoint) == 10
        assert checkpoint.keys()[-3:] == ["tied", "tied.too", "head"]
        assert "tied" in checkpoint
        assert checkpoint.info("tied").nbytes == tensors["layer.2"].nbytes
        assert torch.equal(checkpoint.read("tied"), tensors["layer.2"])
        assert torch.equal(checkpoint.read("tied", 1), tensors["layer.2"][1])
        streamed = dict(checkpoint.stream())
        assert streamed["tied"] is streamed["layer.2"]
        assert set(streamed) == set(checkpoint.keys())


def test_aliases_of_the_index(tmp_path, tensors):
    directory = save_sharded(tensors, tmp_path, metadata={ALIASES_KEY: json.dumps({"tied": "layer.2"})})
    loaded = sync.load(directory)
    assert loaded["tied"] is loaded["layer.2"]


def test_aliases_of_several_shards(directory, tensors):
    for k in range(3):
        path = directory / f"model-{k + 1:05d}-of-00003.safetensors"
        save_file(oracle(path), path, metadata={ALIASES_KEY: json.dumps({f"tied.{k}": f"layer.{k}"})})
    loaded = sync.load(directory)
    assert all(loaded[f"tied.{k}"] is loaded[f"layer.{k}"] for k in range(3))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        '{"a": 5}',
        '{"a": "absent"}',
        '{"layer.0": "layer.1"}',
        '{"a": "b", "b": "layer.0"}',
        "[" * 100_000,
    ],
    ids=["empty", "cut", "list", "int", "to int", "to nothing", "from a tensor", "chain", "deep"],
)
def test_wrong_aliases(tmp_path, tensors, text):
    file = save_file(tensors, tmp_path / "x.safetensors", metadata={ALIASES_KEY: text})
    refused(FormatError, file, "aliases")


@pytest.mark.parametrize("tensors", [{"embed": torch.ones(4), "head": torch.zeros(4)}, {"other": torch.ones(4)}])
def test_aliases_that_a_program_has_copied_to_other_tensors(tmp_path, tensors):
    shared = torch.ones(4)
    sync.save({"embed": shared, "head": shared}, tmp_path / "tied.safetensors")
    with safetensors.safe_open(tmp_path / "tied.safetensors", "pt") as file:
        metadata = file.metadata()
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata=metadata)
    error = refused(FormatError, tmp_path / "x.safetensors", "save without it")
    assert "safetensors.torch.save_file(load_file(FILE), NEW)" in str(error)
    safetensors.torch.save_file(safetensors.torch.load_file(tmp_path / "x.safetensors"), tmp_path / "new.safetensors")
    require_equal(sync.load(tmp_path / "new.safetensors"), tensors)


def test_wrong_aliases_of_the_index(tmp_path, tensors):
    directory = save_sharded(tensors, tmp_path, metadata={ALIASES_KEY: 5})
    refused(FormatError, directory, "aliases")


def test_discarding_frees_large_headers_on_another_thread(tmp_path) -> None:
    """Their memory would otherwise be given back by the thread that closes: an event loop's, for 8 ms."""
    path = tmp_path / "x.safetensors"
    header, _ = build_header((f"t{k}", "U8", (0,)) for k in range(10_000))
    path.write_bytes(header)
    opened = open_checkpoint(path)
    [held] = opened.headers
    assert "t77" in held
    opened.discard()
    assert opened.headers == [] and opened.files == []
    assert eventually(lambda: not held.names and not held.positions)
    assert not held.shapes and not held.begins and not held.ends and not held.dtypes
    opened.discard()


def test_discarding_without_another_thread(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: object, *, name: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(opened_module, "start_thread", refuse)
    path = tmp_path / "x.safetensors"
    path.write_bytes(build_header((f"t{k}", "U8", (0,)) for k in range(10_000))[0])
    opened = open_checkpoint(path)
    opened.discard()
    assert opened.headers == [] and opened.files == []


@pytest.mark.filterwarnings("ignore")  # torch has several about a save without a process group
def test_a_checkpoint_of_dcp_is_named_with_what_converts_it(tmp_path, tensors):
    """The message names a function of torch: its result is converted here, to show that the advice is right."""
    directory = tmp_path / "dcp"
    dcp.save({name: tensor for name, tensor in tensors.items() if tensor.dim()}, checkpoint_id=directory)
    assert {".metadata", "__0_0.distcp"} <= {path.name for path in directory.iterdir()}
    advice = r"this is a checkpoint of torch.distributed.checkpoint: torch's dcp_to_torch_save .*`stio convert"
    refused(CheckpointNotFoundError, directory, advice)
    with pytest.raises(CheckpointNotFoundError, match=advice):
        sync.convert(directory, tmp_path / "out")
    dcp_to_torch_save(directory, tmp_path / "one.pt")
    sync.convert(tmp_path / "one.pt", tmp_path / "one.safetensors")
    require_equal(oracle(tmp_path / "one.safetensors"), {k: t for k, t in tensors.items() if t.dim()})
