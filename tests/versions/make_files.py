"""Write the archives of this version: every kind of file and directory that stio leaves on a disk, whole or cut off.

    PYTHONPATH=.:tests .venv/bin/python -m versions.make_files            # write files/<version>/
    PYTHONPATH=.:tests .venv/bin/python -m versions.make_files --check    # only compare with what is there

A save that was cut off is made by a child that SIGKILL ends at one system call, by the shim of the crash tests. Ids of
saves, times of change and the owner's identity are replaced, so a second run writes the same archives. What each
reader must find is said here by hand; what lies there after the next save and after `stio gc` is recorded from a run.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import lzma
import os
import secrets
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # an optimizer's first step imports it, for seconds
from checkout import python_path
from crash import shim
from crash.generations import fast_directory
from crash.shim import KILL, KILL_AFTER, MKDIR, OPEN, RENAME, UNLINK, WRITE, Fault, Shim
from support import ALL_DTYPES, ramp
from versions import archive, look
from versions.look import MANY, describe_state, describe_tensors, tensors_of

import stio
from stio.compat import huggingface_hub, olmo
from stio.compat.safetensors.numpy import save_file as save_numpy
from stio.compat.safetensors.torch import save_file as save_torch

Tensors = dict[str, torch.Tensor]

_OLD_IDS, _NEW_IDS = 0xA0_0000_0001, 0xB0_0000_0001
S = ".stio-b000000001"
"""The staging directory of the save that is cut off."""
TRASH = ".stio-trash-b000000001"
"""Its name once it is only to be deleted."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Where a child dies."""

    kinds: int
    """Kinds of system calls."""
    how: int
    """At the call, or after it."""
    where: str
    """Begin of the path that the call is about, below the root of the scenario."""
    nth: int = 1
    """Which such call, from 1."""


def at(kinds: int, where: str, nth: int = 1) -> Kill:
    return Kill(kinds, KILL, where, nth)


def after(kinds: int, where: str, nth: int = 1) -> Kill:
    return Kill(kinds, KILL_AFTER, where, nth)


@dataclass(frozen=True, slots=True)
class Read:
    """What a reader finds, by the name of a state or of an error class; `mixed` says old or new, tensor by tensor."""

    path: str
    now: str
    """As the archive is."""
    then: str
    """After `stio gc`."""
    way: str = "load"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One archive."""

    name: str
    kind: str
    """What it is, in words."""
    act: Callable[[Path], object]
    """Makes it, below a root; or the part that is cut off."""
    reads: tuple[Read, ...]
    destination: str
    """What the next save and `stio gc` are given."""
    prepare: Callable[[Path], object] | None = None
    """Makes what stands there before."""
    kill: Kill | None = None
    next: tuple[str, Mapping[str, Any]] = ("save", {})
    """The next save: see `versions.look.save_next`."""
    rewrite: Mapping[str, Any] = field(default_factory=dict)
    """How the same bytes are written again: see `test_files.py`."""
    users: tuple[str, ...] = ()
    """Files of the user beside, which always stay."""


# Contents.


def assorted() -> Tensors:
    tensors = {f"dtype.{str(dtype)[6:]}": ramp(3, 5, dtype=dtype, start=k) for k, dtype in enumerate(ALL_DTYPES)}
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.empty(0)
    tensors["empty.middle"] = torch.empty(3, 0, 2, dtype=torch.bfloat16)
    tensors["nan"] = torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    tensors["név with \u2028 and \x1b"] = ramp(7)
    return tensors


def tied() -> Tensors:
    tensors = {"head": ramp(4, 5), "norm": ramp(40, dtype=torch.bfloat16)}
    return {**tensors, "embedding": tensors["head"], "part": tensors["norm"]}


def every_node() -> dict[Any, Any]:
    """Return a state with every kind of container, value, key and tensor."""
    same = ramp(5)
    empty = torch.empty(0, 3)
    parameter = torch.nn.Parameter(ramp(2, 2))
    return {
        "none": None,
        "bools": [True, False],
        "integers": [0, -1, 2**62, -(2**63), 2**64 - 1, 2**64, -(2**70), 10**400],
        "floats": [0.1, -0.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan")],
        "text": ["", "plain", "név \u2028 \x00 \x1b", "\ud800 alone"],
        "bytes": [b"", bytes(range(256))],
        "tuples": ((), (1, (2.5, "x", ramp(2))), (None,)),
        "ordered": OrderedDict([("b", 1), ("a", OrderedDict())]),
        "counter": Counter({"x": 3, 7: -1}),
        "empty": [{}, [], Counter()],
        "size": torch.Size([2, 0, 3]),
        "dtypes": [*ALL_DTYPES, torch.complex128],
        "devices": [torch.device("cpu"), torch.device("cuda", 1), torch.device("meta")],
        "keys": {0: "int", "0": "text", 1.5: "float", -1: "negative", None: "none", "None": 1, "": 2, "a/b%": 3}
        | {(1, ("x", None, 2.5)): "tuple", True: "bool", "\ud800": 4, 2**64 - 1: 5, float("inf"): 6, "é": 7},
        "tensors": {str(dtype)[6:]: ramp(2, 3, dtype=dtype, start=k) for k, dtype in enumerate(ALL_DTYPES)},
        "ties": [same, same, {"again": same}, same.view(5)],
        "no_bytes": [empty, empty],
        "parameters": [parameter, parameter, torch.nn.Parameter(ramp(3), requires_grad=False)],
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }


def long_state() -> dict[Any, Any]:
    """Return a state whose tree, and one of whose values, are too long for a header."""
    return {"zeros": [0] * 40_000, "bytes": b"\x07" * 70_000, "tensor": ramp(3)}


def sharded_state() -> dict[Any, Any]:
    return {"step": 7, "groups": [{"lr": 0.1, "params": [0, 1]}], "moments": {k: ramp(30, start=k) for k in range(4)}}


def olmo_state() -> dict[Any, Any]:
    return {
        "optim": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": ramp(4)}, "w": {"exp_avg": ramp(2, 2)}}},
        "step": 12,
        "lr": 0.25,
        "name": "run",
        "flags": [True, None, (1, b"x")],
        "nothing": {},
    }


HYPERPARAMETERS = {"lr": 0.1, "names": ["a", "b"]}


def lightning_checkpoint(generation: int) -> dict[str, Any]:
    from argparse import Namespace
    from collections import defaultdict

    return {
        "epoch": generation,
        "state_dict": OrderedDict(tensors_of(generation)),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(float(generation))}}, "param_groups": [{"lr": 0.1}]}],
        "hyper_parameters": {**HYPERPARAMETERS, "path": Path("/data/x"), "set": {1}, "frozen": frozenset({2})},
        "namespace": Namespace(a=1, b=[2]),
        "default": defaultdict(list, {"x": [1]}),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "number": np.float64(0.5),
    }


def lightning_plain(generation: int) -> dict[str, Any]:
    """Return what `stio.load_state` finds in the file: what is no plain state as dicts with a tag."""
    checkpoint = lightning_checkpoint(generation)
    tag = "stio.type"
    checkpoint["hyper_parameters"] |= {
        "path": {tag: "path", "value": "/data/x"},
        "set": {tag: "set", "value": [1]},
        "frozen": {tag: "frozenset", "value": [2]},
    }
    checkpoint["namespace"] = {tag: "namespace", "value": {"a": 1, "b": [2]}}
    checkpoint["default"] = {tag: "defaultdict", "factory": "list", "value": {"x": [1]}}
    checkpoint["array"] = {tag: "ndarray", "value": torch.arange(6, dtype=torch.int16).reshape(2, 3)}
    checkpoint["number"] = {tag: "scalar", "value": torch.tensor(0.5, dtype=torch.float64)}
    return checkpoint


def states() -> dict[str, Any]:
    """Return the description of every state that a reader may find, from what was saved and not from what is read."""
    module = {f"{name}": tensor for name, tensor in tensors_of(2).items()}
    return {
        "generation 0": describe_tensors(tensors_of(0)),
        "old": describe_tensors(tensors_of(1)),
        "new": describe_tensors(tensors_of(2)),
        "next": describe_tensors(tensors_of(look.EXAMPLE_GENERATION)),
        "next state": describe_state(
            {"generation": look.EXAMPLE_GENERATION, "tensors": tensors_of(look.EXAMPLE_GENERATION)}
        ),
        "nothing": describe_tensors({}),
        "assorted": describe_tensors(assorted()),
        "numpy": describe_tensors({"a": torch.arange(6, dtype=torch.int16).reshape(2, 3), "b": torch.zeros(0)}),
        "tied": describe_tensors(tied()),
        "hub tied": describe_tensors({name: t for name, t in tied().items() if name in ("embedding", "norm")}),
        "converted": describe_tensors({**module, "tied": module["layer.0"]}),
        "every node": describe_state(every_node()),
        "long state": describe_state(long_state()),
        "sharded state": describe_state(sharded_state()),
        "old state": describe_state({"generation": 1, "tensors": tensors_of(1)}),
        "new state": describe_state({"generation": 2, "tensors": tensors_of(2)}),
        "olmo": describe_state(look.sorted_keys(olmo_state())),
        "lightning old": describe_state(lightning_plain(1)),
        "lightning new": describe_state(lightning_plain(2)),
    }


# Ways to save.


def save(generation: int, name: str = "model", **keywords: Any) -> Callable[[Path], object]:
    return lambda root: stio.sync.save(tensors_of(generation), root / name, **keywords)


def in_turn(*acts: Callable[[Path], object]) -> Callable[[Path], object]:
    def act(root: Path) -> None:
        for one in acts:
            one(root)

    return act


def made(name: str) -> Callable[[Path], object]:
    return lambda root: (root / name).mkdir()


def hub(generation: int, **keywords: Any) -> Callable[[Path], object]:
    def act(root: Path) -> None:
        (root / "model").mkdir(exist_ok=True)
        huggingface_hub.save_torch_state_dict(tensors_of(generation), root / "model", **keywords)

    return act


def saver(keep_last: int, *names: str, **keywords: Any) -> Callable[[Path], object]:
    """Save generation 1 to the first name, 2 to the second and so on, and delete all but the last ones."""

    def act(root: Path) -> None:
        with stio.sync.Saver(keep_last=keep_last, **keywords) as saver:
            for generation, name in enumerate(names, 1):
                saver.save(tensors_of(generation), root / name).result()

    return act


def save_ckpt(generation: int) -> Callable[[Path], object]:
    def act(root: Path) -> None:
        from stio.integrations.lightning import StioCheckpointIO

        StioCheckpointIO(asynchronous=False).save_checkpoint(lightning_checkpoint(generation), root / "last.ckpt")

    return act


def train(*, max_steps: int = 1, **keywords: Any) -> Callable[[Path], object]:
    """Train a model of a hundred numbers by transformers' Trainer, with a checkpoint after each step."""

    def act(root: Path) -> None:
        from integrations.trainer_case import Sentences
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

        from stio.integrations.transformers import StioCallback

        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=2, n_layer=1, n_head=1))
        settings = TrainingArguments(
            str(root / "run"),
            max_steps=max_steps,
            save_steps=1,
            logging_strategy="no",
            per_device_train_batch_size=4,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            seed=7,
        )
        callback = StioCallback(**keywords)
        Trainer(model, settings, train_dataset=Sentences(), callbacks=[callback]).train()

    return act


def converted(source: Callable[[Path], object], name: str, **keywords: Any) -> Callable[[Path], object]:
    def act(root: Path) -> None:
        source(root)
        stio.sync.convert(root / name, root / "model", **keywords)

    return act


def write_pickle(root: Path) -> None:
    tensors = tensors_of(2)
    torch.save({**tensors, "tied": tensors["layer.0"]}, root / "pytorch_model.bin")


def write_tied_shards(root: Path) -> None:
    tensors = tensors_of(2)
    stio.sync.save({**tensors, "tied": tensors["layer.0"]}, root / "source", max_shard_size=300)


# What is whole.


def whole(name: str, kind: str, act: Callable[[Path], object], *reads: Read, **fields: Any) -> Scenario:
    fields.setdefault("destination", reads[0].path)
    return Scenario(name, kind, act, reads, **fields)


def reads_same(path: str, state: str, way: str = "load") -> Read:
    return Read(path, state, state, way)


SHA = {"hash": "sha256"}
XXH = {"hash": "xxh3"}
HUB = {**MANY, "shard_names": "hub", "commit": "files"}
METADATA = {"metadata": {"made by": "a test", "format": "pt", "ü": "\u2028"}}
PATTERN = {"filename_pattern": "weights{suffix}.v2.safetensors"}
USERS = ("tokenizer.json", "model-finetuned-00001-of-00001.safetensors", ".stio-notes", ".stio-cache/data")

FILE = "model.safetensors"
INDEX = "model/model.safetensors.index.json"
MANIFEST = "model/model.safetensors.manifest.json"


def at_rest() -> list[Scenario]:
    again = {"by": "save"}
    return [
        whole("file", "one file with every dtype, and metadata",
              lambda root: stio.sync.save(assorted(), root / FILE, **METADATA), reads_same(FILE, "assorted"),
              rewrite={**again, "keywords": METADATA}),
        whole("file-sha256", "one file and its manifest", save(2, FILE, **SHA), reads_same(FILE, "new"),
              next=("save", SHA), rewrite={**again, "keywords": SHA}),
        whole("file-xxh3", "one file and its manifest, the other hash", save(2, FILE, **XXH), reads_same(FILE, "new"),
              next=("save", SHA), rewrite={**again, "keywords": XXH}),
        whole("file-tied", "one file, names that share memory",
              lambda root: stio.sync.save(tied(), root / FILE), reads_same(FILE, "tied"), rewrite=again),
        whole("nothing", "a checkpoint without tensors",
              lambda root: stio.sync.save({}, root / "model"), reads_same("model", "nothing"), rewrite=again),
        whole("directory-one-file", "a directory with one file", save(2), reads_same("model", "new"),
              next=("save", MANY), rewrite=again),
        whole("sharded", "a directory of shards in the hub's names, with metadata",
              save(2, **MANY, **METADATA), reads_same("model", "new"),
              next=("save", MANY), rewrite={**again, "keywords": {**MANY, **METADATA}}),
        whole("sharded-sha256", "the same with a manifest", save(2, **MANY, **SHA), reads_same("model", "new"),
              next=("save", {**MANY, **XXH}), rewrite={**again, "keywords": {**MANY, **SHA}}),
        whole("sharded-xxh3", "the same with the other hash", save(2, **MANY, **XXH), reads_same("model", "new"),
              next=("save", {**MANY, **XXH}), rewrite={**again, "keywords": {**MANY, **XXH}}),
        whole("sharded-tied", "shards, names that share memory",
              lambda root: stio.sync.save(tied(), root / "model", max_shard_size=100), reads_same("model", "tied"),
              rewrite={**again, "keywords": {"max_shard_size": 100}}),
        whole("sharded-overwritten", "shards in stio's own unique names, with a manifest",
              in_turn(save(1, **MANY, **SHA), save(2, **MANY, **SHA)), reads_same("model", "new"),
              next=("save", {**MANY, **SHA}), rewrite={**again, "keywords": {**MANY, **SHA}, "over": True}),
        whole("sharded-one", "an index over one shard, where there were several",
              in_turn(save(1, **MANY), save(2)), reads_same("model", "new"),
              rewrite={**again, "over": True}),
        whole("sharded-files", "shards that were replaced one by one under the hub's names",
              in_turn(save(1, **MANY), save(2, **HUB)), reads_same("model", "new"),
              next=("save", HUB), rewrite={**again, "keywords": HUB, "over": True}),
        whole("sharded-pattern", "shards in names of the caller's, with a manifest",
              save(2, **MANY, **PATTERN, **SHA), reads_same("model", "new"),
              next=("save", {**MANY, **PATTERN, **SHA}), rewrite={**again, "keywords": {**MANY, **PATTERN, **SHA}}),
        whole("sharded-users", "shards beside files of the user",
              in_turn(save(1, **MANY), add_users, save(2, **MANY)), reads_same("model", "new"),
              next=("save", MANY), users=USERS),
        whole("state", "nested state of every kind, its tree in the metadata",
              lambda root: stio.sync.save_state(every_node(), root / FILE),
              reads_same(FILE, "every node", "load_state"),
              next=("save_state", {}), rewrite={"by": "save_state"}),
        whole("state-long", "nested state, its tree and bytes in tensors",
              lambda root: stio.sync.save_state(long_state(), root / FILE),
              reads_same(FILE, "long state", "load_state"),
              next=("save_state", {}), rewrite={"by": "save_state"}),
        whole("state-sharded", "nested state in shards, its tree in the index",
              lambda root: stio.sync.save_state(sharded_state(), root / "model", **MANY, **SHA),
              reads_same("model", "sharded state", "load_state"),
              next=("save_state", MANY), rewrite={"by": "save_state", "keywords": {**MANY, **SHA}}),
        whole("converted-pickle", "shards that were converted from a pickle",
              converted(write_pickle, "pytorch_model.bin", max_shard_size=200, hash="sha256"),
              reads_same("model", "converted"),
              next=("save", {**MANY, **SHA}),
              rewrite={"by": "convert", "source": "pytorch_model.bin", "keywords": {**MANY, **SHA}}),
        whole("converted-sharded", "one file that was converted from shards",
              in_turn(write_tied_shards, lambda root: stio.sync.convert(root / "source", root / FILE)),
              reads_same(FILE, "converted"), reads_same("source", "converted"),
              rewrite={"by": "convert", "source": "source"}),
        whole("hub-file", "the hub drop-in's single file, with a name that was dropped",
              lambda root: (made("model")(root), huggingface_hub.save_torch_state_dict(tied(), root / "model")),
              reads_same("model", "hub tied"), next=("hub", {}), rewrite={"by": "hub", "keywords": {
                  "metadata": {"head": "embedding", "part": "norm"}}}),
        whole("hub-sharded", "the hub drop-in's shards", hub(2, **MANY), reads_same("model", "new"),
              next=("hub", MANY), rewrite={"by": "hub", "keywords": MANY}),
        whole("hub-pickle", "the hub drop-in's pickles with their index", hub(2, **MANY, safe_serialization=False),
              reads_same("model", "new", "convert"),
              next=("hub", {**MANY, "safe_serialization": False})),
        whole("olmo", "OLMo's own format", lambda root: olmo.state_dict_to_safetensors_file(olmo_state(), root / FILE),
              reads_same(FILE, "olmo", "olmo"), rewrite={"by": "olmo"}),
        whole("olmo-stio", "nested state by the drop-in for OLMo",
              lambda root: olmo.state_dict_to_safetensors_file(olmo_state(), root / FILE, format="stio"),
              reads_same(FILE, "olmo", "olmo"), next=("save_state", {})),
        whole("safetensors-torch", "the safetensors drop-in's file, under another ending",
              lambda root: save_torch(assorted(), root / "model.st", metadata={"a": "b"}),
              reads_same("model.st", "assorted"), next=("save_file", {}),
              rewrite={"by": "save_file", "keywords": {"metadata": {"a": "b"}}}),
        whole("safetensors-numpy", "the safetensors drop-in's file of numpy arrays",
              lambda root: save_numpy({"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.zeros(0, "f4")},
                                      root / FILE),
              reads_same(FILE, "numpy"), rewrite={"by": "save_file"}),
        whole("lightning", "a checkpoint of Lightning's with tagged values", save_ckpt(2),
              reads_same("last.ckpt", "lightning new", "load_state"), next=("save_file", {}),
              rewrite={"by": "save_state"}),
        whole("trainer", "a checkpoint of transformers' Trainer", train(),
              reads_same("run/checkpoint-1", "recorded"),
              reads_same("run/checkpoint-1/training_state", "recorded", "load_state"),
              destination="run/checkpoint-9"),
    ]  # fmt: skip


def add_users(root: Path) -> None:
    for name in USERS:
        path = root / "model" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"the user's\n")


# What was cut off.


def dead(
    name: str,
    kind: str,
    prepare: Callable[[Path], object] | None,
    act: Callable[[Path], object],
    kill: Kill,
    now: str,
    then: str,
    *,
    path: str = "model",
    **fields: Any,
) -> Scenario:
    way = fields.pop("way", "load")
    reads = (Read(path, now, then, way), *fields.pop("also", ()))
    fields.setdefault("destination", path)
    return Scenario(name, kind, act, reads, prepare=prepare, kill=kill, **fields)


MISSING = "CheckpointNotFoundError"


def first_saves() -> list[Scenario]:
    def case(name: str, kind: str, kill: Kill, now: str = MISSING) -> Scenario:
        act = save(2, **MANY, **SHA)
        return dead(
            f"first-{name}", f"first save to a directory: {kind}", None, act, kill, now, now, next=("save", MANY)
        )

    return [
        case("no-lock", "no lock file yet", at(OPEN, f"{S}/lock")),
        case("empty-lock", "the lock file is empty", at(WRITE, f"{S}/lock")),
        case("no-files", "no directory for files yet", at(MKDIR, f"{S}/new")),
        case("half-written", "some files are written", at(WRITE, f"{S}/new/", 2)),
        case("written", "all is written, nothing published", at(RENAME, "model")),
        case("published", "published, the staging directory is there", after(RENAME, "model"), "new"),
        case("trash", "published, the staging directory is renamed to trash", after(RENAME, TRASH), "new"),
        case("trash-half", "published, the trash is half deleted", after(UNLINK, TRASH), "new"),
        dead("first-file", "first save to a file: not published", None, save(2, FILE), at(RENAME, FILE),
             MISSING, MISSING, path=FILE),
        dead("first-inside", "first save into an empty directory: some shards are moved in", made("model"),
             save(2, **MANY), after(RENAME, "model/model-"), MISSING, MISSING, next=("save", MANY)),
        dead("first-inside-committed", "first save into an empty directory: the index is in place", made("model"),
             save(2, **MANY), after(RENAME, INDEX), "new", "new", next=("save", MANY)),
    ]  # fmt: skip


def file_over_file() -> list[Scenario]:
    def case(name: str, kind: str, kill: Kill, state: str, **keywords: Any) -> Scenario:
        old = save(1, FILE, **keywords)
        return dead(f"file-{name}", f"a file over a file{' and its manifest' if keywords else ''}: {kind}",
                    old, save(2, FILE, **keywords), kill, state, state, path=FILE, next=("save", keywords))  # fmt: skip

    name = f"{FILE}.manifest.json"
    return [
        case("over-staged", "not published", at(RENAME, FILE), "old"),
        case("over-published", "published", after(RENAME, FILE), "new"),
        case("note-half", "the manifest's successors are half staged", at(OPEN, f"{S}/note-0-after"), "old", **SHA),
        case("record-part", "the record is half there", at(RENAME, f"{S}/intent.json"), "old", **SHA),
        case("record", "the record is there", after(RENAME, f"{S}/intent.json"), "old", **SHA),
        case("note-before", "the manifest knows both", after(RENAME, name), "old", **SHA),
        case("note-published", "the file is renamed, the manifest knows both", after(RENAME, FILE, 2), "new", **SHA),
        case("note-after", "the manifest knows the new one", after(RENAME, name, 2), "new", **SHA),
        case("note-xxh3", "the manifest knows both, the other hash", after(RENAME, name), "old", **XXH),
    ]


def shards_over_shards() -> list[Scenario]:
    def case(name: str, kind: str, kill: Kill, state: str, **fields: Any) -> Scenario:
        # The old ones have names of stio's own, by a save over another one.
        old = in_turn(save(0, **MANY), save(1, **MANY), *([add_users] if "users" in fields else []))
        return dead(f"index-{name}", f"shards over shards: {kind}", old, save(2, **MANY), kill, state, state,
                    next=("save", MANY), **fields)  # fmt: skip

    s, trash = f"model/{S}", f"model/{TRASH}"
    new = "model/model-b000000001"
    return [
        case("no-lock", "no lock file yet", at(OPEN, f"{s}/lock"), "old"),
        case("half-written", "some files are written", at(WRITE, f"{s}/new/", 2), "old"),
        case("staged", "all is written, no record", at(OPEN, f"{s}/intent.json"), "old"),
        case("record-part", "the record is half there", at(RENAME, f"{s}/intent.json"), "old"),
        case("record", "the record is there", after(RENAME, f"{s}/intent.json"), "old"),
        case("half-moved", "some shards are moved in", after(RENAME, new, 2), "old"),
        case("moved", "all shards are moved in", at(RENAME, INDEX), "old", users=USERS),
        case("committed", "the index is renamed", after(RENAME, INDEX), "new", users=USERS),
        case("half-removed", "some old shards are removed", after(UNLINK, "model/model-a", 1), "new"),
        case("removed", "all old shards are removed", after(UNLINK, "model/model-a", 3), "new"),
        case("trash", "the staging directory is renamed to trash", after(RENAME, trash), "new"),
        case("trash-half", "the trash is half deleted", after(UNLINK, trash), "new"),
    ]


def hashed_shards() -> list[Scenario]:
    def case(name: str, kind: str, kill: Kill, state: str, before: Any = SHA, now: Any = SHA) -> Scenario:
        return dead(f"hashed-{name}", f"shards with a manifest: {kind}", save(1, **MANY, **before),
                    save(2, **MANY, **now), kill, state, state, next=("save", {**MANY, **SHA}))  # fmt: skip

    return [
        case("record", "the record is there", after(RENAME, f"model/{S}/intent.json"), "old"),
        case("note-before", "the manifest knows both", after(RENAME, MANIFEST), "old"),
        case("moved", "all shards are moved in", at(RENAME, INDEX), "old"),
        case("committed", "the index is renamed", after(RENAME, INDEX), "new"),
        case("note-after", "the manifest knows the new ones", after(RENAME, MANIFEST, 2), "new"),
        case("half-removed", "some old shards are removed", after(UNLINK, "model/model-0"), "new"),
        case("other-hash", "another hash: the old manifest is removed, the new one not there",
             after(UNLINK, MANIFEST), "old", now=XXH),
        case("other-hash-committed", "another hash: the index is renamed, no manifest", after(RENAME, INDEX), "new",
             now=XXH),
        case("no-hash", "the new one has no manifest: the old one is removed", after(UNLINK, MANIFEST), "old", now={}),
        case("first-hash", "the old one had no manifest: the index is renamed", after(RENAME, INDEX), "new", before={}),
    ]  # fmt: skip


def other_numbers() -> list[Scenario]:
    def case(name: str, kind: str, before: Any, now: Any, kill: Kill, state: str) -> Scenario:
        return dead(name, kind, save(1, **before), save(2, **now), kill, state, state, next=("save", now))

    return [
        case("one-to-many-moved", "shards over one file: all shards are moved in", {}, MANY, at(RENAME, INDEX), "old"),
        case("one-to-many-committed", "shards over one file: the index is there, the old file too", {}, MANY,
             after(RENAME, INDEX), "new"),
        case("many-to-one-moved", "one shard over several: it is moved in", MANY, {}, at(RENAME, INDEX), "old"),
        case("many-to-one-committed", "one shard over several: the index is renamed", MANY, {},
             after(RENAME, INDEX), "new"),
        case("one-to-one-staged", "one file over one in a directory: not published", {}, {},
             at(RENAME, "model/model.safetensors"), "old"),
        case("one-to-one-published", "one file over one in a directory: published", {}, {},
             after(RENAME, "model/model.safetensors"), "new"),
    ]  # fmt: skip


def numbered(generation: int) -> dict[str, Any]:
    """Return keywords that make the index of each generation another one, where its shards have the same names."""
    return {"metadata": {"generation": str(generation)}}


def file_by_file() -> list[Scenario]:
    def case(name: str, kind: str, kill: Kill, now: str, then: str, **keywords: Any) -> Scenario:
        return dead(f"files-{name}", f'commit="files": {kind}', save(1, **MANY, **numbered(1), **keywords),
                    save(2, **HUB, **numbered(2), **keywords), kill, now, then,
                    next=("save", {**HUB, **keywords}))  # fmt: skip

    record, shard = f"model/{S}/intent.json", "model/model-0000"
    return [
        case("record-part", "the record is half there", at(RENAME, record), "old", "old"),
        case("record", "the record commits, no file is replaced", after(RENAME, record), "old", "new"),
        case("one-replaced", "one file is replaced", after(RENAME, shard), "mixed", "new"),
        case("all-replaced", "all shards are replaced", after(RENAME, shard, 3), "new", "new"),
        case("index-replaced", "the index too", after(RENAME, INDEX), "new", "new"),
        case("hashed-record", "with a manifest, no file is replaced", after(RENAME, record), "old", "new", **SHA),
        case("hashed-replaced", "with a manifest, one file is replaced", after(RENAME, shard), "mixed", "new", **SHA),
        case(
            "hashed-note-after", "with a manifest, that is the new one", after(RENAME, MANIFEST, 2), "new", "new", **SHA
        ),
    ]


def hub_drop_in() -> list[Scenario]:
    pickles: dict[str, Any] = {**MANY, "safe_serialization": False}
    return [
        dead("hub-over-index-staged", "the hub drop-in's file over an index: not published", save(1, **MANY), hub(2),
             at(RENAME, "model/model.safetensors"), "old", "old", next=("hub", {})),
        dead("hub-over-index-moved", "the hub drop-in's file over an index: the file is there, the index too",
             save(1, **MANY), hub(2), at(UNLINK, INDEX), "old", "new", next=("hub", {})),
        dead("hub-over-index-committed", "the hub drop-in's file over an index: the index is removed",
             save(1, **MANY), hub(2), after(UNLINK, INDEX), "new", "new", next=("hub", {})),
        dead("hub-over-own-names", "the hub drop-in's file over an index of stio's own names: the index is removed",
             in_turn(save(0, **MANY), save(1, **MANY)), hub(2), after(UNLINK, INDEX), "new", "new", next=("hub", {})),
        dead("hub-shards-over-file", "the hub drop-in's shards over a file: all shards are moved in", hub(1),
             hub(2, **MANY), at(RENAME, INDEX), "old", "old", next=("hub", MANY)),
        dead("hub-shards-over-shards", "the hub drop-in's shards over shards: one is replaced",
             hub(1, **MANY, **numbered(1)), hub(2, **MANY, **numbered(2)), after(RENAME, "model/model-0"),
             "mixed", "new", next=("hub", MANY)),
        dead("hub-pickles-staged", "the hub drop-in's pickles: staged",
             hub(1, **pickles, **numbered(1)), hub(2, **pickles, **numbered(2)),
             at(OPEN, f"model/{S}/intent.json"), "old", "old", way="convert", next=("hub", pickles)),
        dead("hub-pickles-replaced", "the hub drop-in's pickles: one is replaced", hub(1, **pickles, **numbered(1)),
             hub(2, **pickles, **numbered(2)), after(RENAME, "model/pytorch_model-0"), "mixed", "new", way="convert",
             next=("hub", pickles)),
    ]  # fmt: skip


def states_and_frameworks() -> list[Scenario]:
    def state(generation: int) -> Callable[[Path], object]:
        value = {"generation": generation, "tensors": tensors_of(generation)}
        return lambda root: stio.sync.save_state(value, root / "model", **MANY)

    def trainer(name: str, kind: str, kill: Kill, now: str, then: str, **fields: Any) -> Scenario:
        act = train(max_steps=fields.pop("max_steps", 1), save_optimizer=False, **fields.pop("keywords", {}))
        return dead(f"trainer-{name}", f"a checkpoint of Trainer's: {kind}", fields.pop("prepare", None), act, kill,
                    now, then, path="run/checkpoint-1", destination="run/checkpoint-9", **fields)  # fmt: skip

    return [
        dead("state-moved", "nested state in shards: all are moved in", state(1), state(2), at(RENAME, INDEX),
             "old state", "old state", way="load_state", next=("save_state", MANY)),
        dead("state-committed", "nested state in shards: the index is renamed", state(1), state(2),
             after(RENAME, INDEX), "new state", "new state", way="load_state", next=("save_state", MANY)),
        dead("lightning-staged", "Lightning's checkpoint over another: not published", save_ckpt(1), save_ckpt(2),
             at(RENAME, "last.ckpt"), "lightning old", "lightning old", path="last.ckpt", way="load_state",
             next=("save_file", {})),
        dead("lightning-published", "Lightning's checkpoint over another: published", save_ckpt(1), save_ckpt(2),
             after(RENAME, "last.ckpt"), "lightning new", "lightning new", path="last.ckpt", way="load_state",
             next=("save_file", {})),
        trainer("weights", "in the save of the weights", at(RENAME, f"run/{S}/new/model.safetensors"),
                MISSING, MISSING),
        trainer("staged", "whole, not published", at(RENAME, "run/checkpoint-1"), MISSING, MISSING),
        trainer("published", "published", after(RENAME, "run/checkpoint-1"), "recorded", "recorded"),
        trainer("replaced", "over one of that name: the old one is renamed to trash, the new one not published",
                after(RENAME, "run/.stio-trash-checkpoint-1"), MISSING, MISSING, prepare=train(save_optimizer=False)),
        trainer("rotated", "an older one is renamed to trash", after(RENAME, "run/.stio-trash-b000000007"), MISSING,
                MISSING, max_steps=2, keywords={"keep_last": 1}, also=(reads_same("run/checkpoint-2", "recorded"),)),
    ]  # fmt: skip


def retention() -> list[Scenario]:
    def case(name: str, kind: str, kill: Kill, now: str, *names: str, **fields: Any) -> Scenario:
        keywords = fields.pop("keywords", MANY)
        return dead(f"retention-{name}", f"keep_last: {kind}", fields.pop("prepare", made("run")),
                    saver(1, *names, **keywords), kill, now, fields.pop("then", now), path=names[0], destination=names[0],
                    also=(reads_same(names[1], "new"),), next=("save", keywords), **fields)  # fmt: skip

    steps = ("run/step-1", "run/step-2")
    files = ("run/step-1.safetensors", "run/step-2.safetensors")
    trash = ".stio-trash-b000000003"
    return [
        case("trash", "the old directory is renamed to trash", after(RENAME, f"run/{trash}"), MISSING, *steps),
        case("trash-half", "the trash is half deleted", after(UNLINK, f"run/{trash}", 2), MISSING, *steps),
        case("files-half", "in a directory of the user's the index is removed",
             after(UNLINK, f"run/step-1/{trash}/model.safetensors.index"), MISSING, *steps,
             then="AmbiguousCheckpointError", prepare=in_turn(made("run"), made("run/step-1"))),
        case("file-half", "a file is removed, its manifest not", after(UNLINK, f"run/{trash}/step-1.safetensors"),
             MISSING, *files, keywords=SHA),
    ]  # fmt: skip


RACES = frozenset({"first-half-written", "index-half-written"})
"""Several threads write there; which of the files are written is not the same at every run."""


def scenarios() -> list[Scenario]:
    """Return all of them."""
    return [
        *at_rest(),
        *first_saves(),
        *file_over_file(),
        *shards_over_shards(),
        *hashed_shards(),
        *other_numbers(),
        *file_by_file(),
        *hub_drop_in(),
        *states_and_frameworks(),
        *retention(),
    ]


# Making them.


def make(scenario: Scenario, root: Path) -> None:
    """Make a scenario in a child below an empty directory."""
    child = os.fork()
    if not child:
        try:
            _make_in_child(scenario, root)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    expected = 0 if scenario.kill is None else -9
    if status != expected:
        raise SystemExit(f"{scenario.name}: the child ended with {status}, not {expected}: {look.listing(root)}")
    archive.settle(root)


def _make_in_child(scenario: Scenario, root: Path) -> None:
    os.umask(0o022)
    logging.disable()
    if scenario.prepare is not None:
        _count_ids(_OLD_IDS)
        scenario.prepare(root)
        archive.settle(root, before=True)
    _count_ids(_NEW_IDS)
    if scenario.kill is not None:
        kill = scenario.kill
        Shim().arm(root / kill.where, Fault(kill.kinds, how=kill.how), kill.nth)
    scenario.act(root)


def _count_ids(first: int) -> None:
    """Have saves take ids that count up."""
    numbers = iter(range(first, first + 1000))

    def token_hex(nbytes: int) -> str:
        return f"{next(numbers):0{2 * nbytes}x}"

    secrets.token_hex = token_hex  # type: ignore[assignment]


def record(scenario: Scenario, packed: Path, place: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Return what `scenarios.json` says of a scenario, after a run that has to agree with what is said here by hand."""
    document: dict[str, Any] = {
        "kind": scenario.kind,
        "destination": scenario.destination,
        "next": {"by": scenario.next[0], "keywords": scenario.next[1]},
    }
    if scenario.rewrite:
        document["rewrite"] = scenario.rewrite
    if scenario.users:
        document["users"] = [f"model/{name}" for name in scenario.users]

    def fresh(name: str) -> Path:
        root = place / name
        root.mkdir()
        return archive.unpack(packed, root)

    root = fresh("now")
    reads = []
    for k, read in enumerate(scenario.reads):
        now, then = (f"{scenario.name} {k}" if state == "recorded" else state for state in (read.now, read.then))
        found = look.found_by(read.way, root / read.path)
        if read.now == "recorded":
            known[now] = found
        _agree(scenario, f"{read.path} by {read.way}", found, now, known)
        reads.append({"path": read.path, "way": read.way, "now": now, "then": then})
    document["reads"] = reads
    document["gc"] = look.collect(root / scenario.destination, root)
    document["left_after_gc"] = look.listing(root)
    for read in reads:
        found = look.found_by(read["way"], root / read["path"])
        _agree(scenario, f"{read['path']} by {read['way']} after gc", found, read["then"], known)

    root = fresh("next")
    look.save_next(*[scenario.next[0], root / scenario.destination, scenario.next[1]])
    document["left_after_save"] = look.listing(root, masked=True)
    document["gc_after_save"] = look.collect(root / scenario.destination, root)
    return document


def _agree(scenario: Scenario, what: str, found: Any, state: str, known: Mapping[str, Any]) -> None:
    if state == "mixed":
        parts = {next((s for s in ("old", "new") if known[s].get(name) == line), None) for name, line in found.items()}
        assert parts == {"old", "new"}, f"{scenario.name}: {what}: {parts}"
    elif found != known.get(state, state):
        names = [name for name, one in known.items() if one == found] or found
        print(f"DISAGREES {scenario.name}: {what}: {names}, and not {state}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing: compare with the archives that are there")
    parser.add_argument("--only", help="names that begin so")
    arguments = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        _start_again_with_the_shim()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("stio").setLevel(logging.CRITICAL)
    from transformers.utils import logging as theirs

    import stio.integrations.lightning
    import stio.integrations.transformers  # once, and not in every child

    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    gc.freeze()
    target = archive.FILES / stio.__version__
    known, documents, different = states(), {}, []
    with tempfile.TemporaryDirectory(dir=fast_directory()) as folder:
        wanted = [one for one in scenarios() if one.name.startswith(arguments.only or "")]
        packed = Path(folder, "packed")
        packed.mkdir()
        for scenario in wanted:  # children first: what forks has no threads then
            root = Path(folder).resolve() / scenario.name
            root.mkdir()
            make(scenario, root)
            (packed / f"{scenario.name}.tar.xz").write_bytes(archive.pack(root))
            shutil.rmtree(root)
        for scenario in wanted:
            place = Path(folder, "place")
            place.mkdir()
            documents[scenario.name] = record(scenario, packed / f"{scenario.name}.tar.xz", place, known)
            shutil.rmtree(place)
        (packed / "scenarios.json").write_text(_lines(known, documents))
        if arguments.check:
            for path in sorted(packed.iterdir()):
                there = target / path.name
                if there.exists() and path.name.removesuffix(".tar.xz") in RACES:
                    continue
                if not there.exists() or _plain(there) != _plain(path):
                    different.append(path.name)
            print(f"{len(different)} of {len(wanted)} differ", *different, sep="\n")
            return 1 if different else 0
        target.mkdir(parents=True, exist_ok=True)
        for path in packed.iterdir():
            shutil.copy(path, target / path.name)
    total = sum(path.stat().st_size for path in target.iterdir())
    print(f"{len(wanted)} scenarios, {total:,} bytes in {target}")
    return 0


def _lines(known: Mapping[str, Any], documents: Mapping[str, Any]) -> str:
    """Return the text of `scenarios.json`: one line for each state and each scenario."""
    parts = []
    for title, table in (("states", known), ("scenarios", documents)):
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(table[name], sort_keys=True)}" for name in sorted(table))
        parts.append(f'"{title}": {{\n{lines}\n}}')
    return "{" + ",\n".join(parts) + "}\n"


def _plain(path: Path) -> bytes:
    """Return a file's bytes; of an archive those of the tar, whichever xz packed it."""
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def _start_again_with_the_shim() -> None:
    reason = shim.why_not()
    if reason:
        raise SystemExit(reason)
    folder = Path(tempfile.mkdtemp())
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim.build(folder)),
        "PYTHONPATH": python_path(),
        "HF_HUB_OFFLINE": "1",
    }
    os.execve(sys.executable, [sys.executable, "-m", "versions.make_files", *sys.argv[1:]], environment)


if __name__ == "__main__":
    sys.exit(main())
