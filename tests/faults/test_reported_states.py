"""Fault 318: scalars and arrays of numpy in states, wherever states are saved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed.ranks import run_ranks
from support import same

import stio
from stio import sync
from stio.distributed import StioStorageReader, StioStorageWriter
from stio.format.state.tree import STATE_KEY, encode_tree
from stio.integrations._training import from_plain, to_plain

CODES = ["?", *"bBhHiIlLqQefdFD", "S3", "U3", "M8[ns]", "m8[s]", ">f4", ">i8", ">U2"]
LARGE = np.arange(40_000, dtype=np.float64).reshape(4, 100, 100)
STATES: dict[str, Any] = {
    "legacy generator": {"rng": np.random.get_state()},
    "generators": [np.random.default_rng(3).bit_generator.state, np.random.MT19937(4).state, np.random.Philox(5).state],
    "scalars": {
        code: np.zeros(1, code)[0] for code in CODES[:18] if code not in "qQ"
    },  # these are int64 by another name
    "values": [np.float64("nan"), np.float32(-0.0), np.uint64(2**64 - 1), np.bool_(True), np.complex128(1 - 2j)],
    "text": [np.str_("ä\ud800"), np.str_(""), np.bytes_(b"a\0b"), np.str_("x" * 1000)],
    "dates": [np.datetime64("2026-11-26T01:02:03"), np.timedelta64(5, "D"), np.datetime64("NaT", "s")],
    "arrays": {code: np.ones((2, 3), code) if code[-1] != "]" else np.ones(2, "i8").astype(code) for code in CODES},
    "shapes": [np.zeros(()), np.zeros((0, 2)), np.zeros((2, 0, 3), "i2"), np.arange(6.0).reshape(2, 3).T, LARGE[::-2]],
    "broadcast": np.broadcast_to(np.float32(2), (2, 2)),
    "large": {"w": torch.ones(2), "buffer": LARGE, "again": [LARGE, (LARGE.astype(np.uint16), 3)]},
    "large of other kinds": [np.full(3000, "abcdefgh"), LARGE.astype(">f8"), LARGE.astype("F")[0], LARGE.astype("D")],
    "in a tuple": (np.float64(1.5), (np.arange(3), torch.arange(3)), "x"),
    "a scheduler": {"base_lrs": [np.float64(0.1)], "last_epoch": np.int64(3), "best": np.inf},
}


@pytest.mark.matrix
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_c318_save_state(tmp_path: Path, state: Any) -> None:
    expected = to_plain(state)
    sync.save_state(state, tmp_path / "s.safetensors")
    found = sync.load_state(tmp_path / "s.safetensors", verify=False)
    assert same(found, state), found
    sync.save_state(found, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "s.safetensors").read_bytes()
    assert same(from_plain(expected), state)


def load_into_all(folder: str) -> None:
    """Plain values are replaced, tensors are filled."""

    def other(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: other(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(other, value))
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value)
        return np.float32(7) if isinstance(value, np.ndarray | np.generic) else value

    for number, (name, state) in enumerate(STATES.items()):
        sync.save_state({"all": [state]}, f"{folder}/{number}.safetensors")
        mine = {"all": [other(state)]}
        sync.distributed.load_into(mine, f"{folder}/{number}.safetensors")
        assert same(mine, {"all": [state]}), name


@pytest.mark.slow
def test_c318_load_into_a_state(tmp_path: Path) -> None:
    run_ranks(load_into_all, 1, tmp_path, str(tmp_path))


def test_c318_an_array_may_change_after_the_snapshot(tmp_path: Path) -> None:
    small, large = np.zeros(3), LARGE.copy()
    large.flags.writeable = False
    with sync.Saver() as saver:
        pending = saver.save_state({"small": small, "large": large}, tmp_path / "s")
        small[:] = 1
        large.flags.writeable = True
        large[:] = 1
        pending.result()
    found = sync.load_state(tmp_path / "s")
    assert same(found, {"small": np.zeros(3), "large": LARGE})
    found["small"][:] = 2  # and may be written to
    found["large"][:] = 2


def test_c318_a_large_array_is_a_tensor_for_other_readers(tmp_path: Path) -> None:
    sync.save_state({"buffer": LARGE}, tmp_path / "s.safetensors")
    assert torch.equal(sync.load(tmp_path / "s.safetensors")["buffer"], torch.from_numpy(LARGE))
    assert same(
        sync.load_state(tmp_path / "s.safetensors", dtype="bfloat16"), {"buffer": LARGE}
    )  # no tensor of the state


def test_c318_a_training_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    np.random.seed(5)
    sync.save_state({"numpy": np.random.get_state(), "python": random.getstate()}, tmp_path / "s.safetensors")
    expected = np.random.random(4).tolist()
    np.random.set_state(sync.load_state(tmp_path / "s.safetensors")["numpy"])
    assert np.random.random(4).tolist() == expected


REFUSED = {
    "objects": (np.array([None]), "a numpy.ndarray of dtype object"),
    "records": (np.zeros(1, "i4,f4"), "a numpy.ndarray of dtype"),
    "record": (np.zeros(1, "i4,f4")[0], "a numpy.void of dtype"),
    "long double": (np.longdouble(1), "of dtype"),
    "masked": (np.ma.masked_array([1, 2], [0, 1]), r"MaskedArray.*numpy\.asarray"),
    "matrix": (np.zeros(2).view(np.recarray), r"recarray"),
    "generator": (np.random.default_rng(1), r"pass its bit_generator\.state"),
    "bit generator": (np.random.MT19937(1), r"bit_generator\.state"),
    "legacy": (np.random.RandomState(1), r"get_state\(\)"),
}


@pytest.mark.parametrize(("value", "message"), REFUSED.values(), ids=REFUSED)
def test_c318_what_is_no_plain_array_is_refused_with_advice(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"state\['a'\]\[0\] is .*{message}"):
        sync.save_state({"a": [value]}, tmp_path / "s.safetensors")
    assert list(tmp_path.iterdir()) == []


BAD = [
    "<f8;2;AAAA",
    "<f8;2,2;" + "A" * 32,
    "O;1;AAAAAAAAAAA=",
    "|V8;1;AAAAAAAAAAA=",
    "<U0;1000000000;",
    "|S0;1000000000,1000000000;",
    "<f8;-1;",
    "<f8;99999999999999999999;",
    "<f8;0,99999999999999999999;",
    "<f9;1;AAAAAAAAAAA=",
    "<M8[zz];1;AAAAAAAAAAA=",
    "<f8",
    "<f8;1;!!!!",
    "<f16;1;AAAAAAAAAAAAAAAAAAAAAA==;",
    "<U1;1;/////w==",
]


@pytest.mark.matrix
@pytest.mark.parametrize("tag", ["ndarray", "numpy_scalar"])
@pytest.mark.parametrize("text", BAD)
def test_c318_a_malformed_array_in_a_file(tmp_path: Path, tag: str, text: str) -> None:
    tree = encode_tree([("list", 1), (tag, text)]).decode()
    sync.save({}, tmp_path / "s.safetensors", metadata={"x": "y"})
    raw = (tmp_path / "s.safetensors").read_bytes()
    import json

    header = json.dumps({"__metadata__": {STATE_KEY: tree}}).encode()
    (tmp_path / "s.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert raw
    try:
        found = sync.load_state(tmp_path / "s.safetensors")
    except stio.FormatError:
        return
    assert text == "<U1;1;/////w==" and tag == "ndarray", found  # numpy checks text when it is used


def test_c318_scalars_of_numpy_are_no_keys(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a key that is or holds a numpy.int64"):
        sync.save_state({np.int64(3): 1}, tmp_path / "s.safetensors")


# Many ranks, torch's distributed checkpoint.


def on_ranks(folder: str) -> None:
    state = {"w": torch.ones(4), "rng": np.random.MT19937(3).state, "legacy": STATES["a scheduler"], "buffer": LARGE}
    sync.distributed.save(state, f"{folder}/ranks")
    torch.distributed.barrier()
    assert same(sync.load_state(f"{folder}/ranks"), state)


def test_c318_many_ranks(tmp_path: Path) -> None:
    run_ranks(on_ranks, 2, tmp_path, str(tmp_path))


class Transforming(dcp.DefaultSavePlanner):
    """A planner whose values stio gets as torch pickles them."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object)


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("planner", [None, Transforming])
@pytest.mark.parametrize("name", [name for name in STATES if name not in ("broadcast",)])
def test_c318_torchs_distributed_checkpoint(tmp_path: Path, name: str, planner: Any) -> None:
    state = {"w": torch.ones(3), "other": STATES[name]}
    if name in ("in a tuple",):  # a tuple with tensors is no value of DCP
        return
    dcp.save(state, storage_writer=StioStorageWriter(tmp_path / "d"), planner=planner and planner(), no_dist=True)
    found = sync.load_state(tmp_path / "d")
    if name in ("arrays", "large of other kinds"):  # torch's pickles of arrays have the machine's order of bytes
        assert planner is not None or same(found, state)
        return
    assert same(found, state)
    target = {"w": torch.zeros(3), "other": STATES[name]}
    dcp.load(target, storage_reader=StioStorageReader(tmp_path / "d"), no_dist=True)
    assert same(target, state)
