"""Updates of a running engine of vLLM by the weight transfer backend `stio`; `make engines` runs these."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest
import torch
from deltas import id_of, next_state, write_chain, write_checkpoint, write_delta
from engines import models
from engines.test_vllm_engine import EngineError, Engines, pytestmark  # noqa: F401  # the mark skips these too

from stio.format.delta import ID_KEY
from stio.format.files import FileState, Manifest

UNPACKED = {"STIO_TEST_UNPACKED": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
PATCHED, RELOADED = "Applied patches of", "Read all weights of"
"""What is printed by an update."""
NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def states():
    """Return the weights of four steps: a few elements change in each, and all of one short tensor."""
    generator = torch.Generator().manual_seed(1)
    found = [models.weights_of(models.LLAMA)]
    for _ in range(3):
        found.append(next_state(found[-1], 0.02, generator))
        found[-1][NORM] = found[-1][NORM] + 1
    return found


class Updated:
    """A running engine with the backend."""

    def __init__(self, engine: Engines, folder: Path) -> None:
        self.engine = engine
        self._folder = folder
        self._digests = bool(engine.environment)
        self._num_full = 0

    def to(self, path: Path, how: str | None = None) -> object:
        """Update it, and require how that was done, "": not at all; return what shows the weights that it has."""
        before = self._counts()
        self.engine.call("update", str(path))
        more = [now > then for now, then in zip(self._counts(), before, strict=True)]
        assert how is None or more == [how == PATCHED, how == RELOADED], self.engine.printed()
        return self.seen()

    def _counts(self) -> list[int]:
        return [self.engine.printed().count(text) for text in (PATCHED, RELOADED)]

    def to_full(self, state: dict[str, torch.Tensor]) -> object:
        """Update it from files without an id, of which everything has to be read."""
        self._num_full += 1
        path = self._folder / f"{self._num_full}"
        write_checkpoint(path, state, {"format": "pt"})
        return self.to(path, RELOADED)

    def seen(self) -> object:
        """Return the digests of its weights; without them its answers, which in float32 are not always the same."""
        tokens = [[token for token, _ in answer] for answer in self.engine.generate()]
        return (self.engine.call("digest"), tokens) if self._digests else self.engine.generate()


@contextmanager
def started(
    folder: Path, state: dict, environment: dict[str, str] | None = None, **options: object
) -> Iterator[Updated]:
    engines = Engines(folder / "log", **(environment or {}))
    try:
        model = models.write(folder / "model", state, models.LLAMA)
        with engines.start(model, weight_transfer_config={"backend": "stio"}, **options) as engine:
            yield Updated(engine, folder)
    finally:
        engines.close()


@pytest.fixture(scope="module")
def one(tmp_path_factory, states):
    """Return an engine whose linear layers compute with their parameters, as on a GPU."""
    with started(tmp_path_factory.mktemp("one"), states[2], UNPACKED, dtype="float32") as found:
        yield found


def _require_steps(one: Updated, run: Path, states) -> None:
    expected = [one.to_full(state) for state in states]
    assert len({json.dumps(answer) for answer in expected}) == 4
    steps = write_chain(run, states)
    assert one.to(steps[0], RELOADED) == expected[0]
    assert one.to(steps[1], PATCHED) == expected[1]
    assert one.to(steps[1], "") == expected[1]
    assert one.to(steps[3], PATCHED) == expected[3]  # two deltas at once
    assert one.to(steps[0], RELOADED) == expected[0]  # back: the chain of this one does not contain the other


def test_what_changed_is_patched(one, tmp_path, states):
    _require_steps(one, tmp_path / "run", states)
    assert one.to(tmp_path / "run", PATCHED) == one.to_full(states[3])  # the newest


def test_two_ranks(tmp_path, states):
    with started(tmp_path, states[2], UNPACKED, dtype="float32", tensor_parallel_size=2) as one:
        _require_steps(one, tmp_path / "run", states)
        with pytest.raises(EngineError, match="CheckpointNotFoundError"):  # each rank might find another newest step
            one.to(tmp_path / "run")


def _spoil(path: Path, kind: str) -> None:
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    if kind == "cut":
        del data[-5:]
    elif kind == "positions":  # they lead past the end of their tensor
        header = json.loads(data[8:first])
        begin, end = next(one["data_offsets"] for name, one in header.items() if name.endswith("/positions"))
        data[first + begin : first + end] = b"\xfe" * (end - begin)
    elif kind == "values":  # only a digest shows it
        state = FileState(len(data), hashlib.sha256(data).hexdigest())
        (path / "model.safetensors.manifest.json").write_bytes(Manifest("sha256", {file.name: (state,)}).encode())
        data[-1] ^= 1
    file.write_bytes(data)


KINDS = {"cut": "TruncatedError", "positions": "FormatError", "values": "IntegrityError"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_delta_changes_nothing(one, tmp_path, states, kind):
    steps = write_chain(tmp_path / "run", states[:2])
    before = one.to(steps[0])
    good = (steps[1] / "model.safetensors").read_bytes()
    _spoil(steps[1], kind)
    with pytest.raises(EngineError, match=KINDS[kind]):
        one.to(steps[1])
    assert one.seen() == before
    (steps[1] / "model.safetensors").write_bytes(good)
    assert one.to(steps[1], PATCHED) == one.to_full(states[1])


def test_a_patch_that_fails_is_made_good(one, tmp_path, states):
    """A tensor that the model does not have: vLLM may find out when it has written others."""
    (base,) = write_chain(tmp_path / "run", states[:1])
    before, after = ({**states[k], "model.other.weight": torch.full((64,), k * 1.0)} for k in range(2))
    write_checkpoint(tmp_path / "other" / "base", before, {"format": "pt", ID_KEY: id_of(0)})
    write_delta(tmp_path / "other" / "step-1", before, after, base="base", step=1)
    one.to(base)
    with pytest.raises(EngineError, match="the next update reads the whole checkpoint"):
        one.to(tmp_path / "other" / "step-1")
    assert one.to(base, RELOADED) == one.to_full(states[0])


def test_a_new_value_that_is_nan_is_reloaded(one, tmp_path, states):
    after = {name: tensor.clone() for name, tensor in states[1].items()}
    after[HEAD][0, 0] = float("nan")
    steps = write_chain(tmp_path / "run", [states[0], after])
    expected = one.to_full(after)
    one.to(steps[0])
    assert one.to(steps[1], RELOADED) == expected


def test_weights_that_are_packed_are_reloaded(tmp_path, states):
    """As vLLM's engine for the CPU packs them; in bfloat16, for which it has other kernels."""
    with started(tmp_path, states[2]) as one:
        expected = [one.to_full(state) for state in states]
        steps = write_chain(tmp_path / "run", states)
        assert one.to(steps[0], RELOADED) == expected[0]
        assert one.to(steps[1], RELOADED) == expected[1]
        (steps[2] / "model.safetensors").rename(steps[2] / "other")
        with pytest.raises(EngineError, match="CheckpointNotFoundError"):
            one.to(steps[3])
        assert one.seen() == expected[1]
        (steps[2] / "other").rename(steps[2] / "model.safetensors")
        assert one.to(tmp_path / "run", RELOADED) == expected[3]


def test_another_load_format_is_refused(tmp_path, states):
    with pytest.raises(EngineError, match="weight transfer backend 'stio' needs --load-format stio, not safetensors"):
        with started(tmp_path, states[0], load_format="safetensors"):
            pass


@pytest.mark.filterwarnings("ignore")  # the import of vLLM uses what torch has deprecated
def test_what_patches_of_vllm_cannot_hold():
    """If this fails, the backend can do more: it reads everything for the sake of these rules."""
    patching = import_module("vllm.model_executor.model_loader.checkpoint_weight_patch")
    model = torch.nn.Linear(2, 2)

    def load(values: torch.Tensor) -> None:
        patch = patching.CheckpointWeightPatch("weight", (2, 2), values.dtype, values, torch.tensor([0]))
        patching.load_checkpoint_weight_patches(model, [patch])

    with pytest.raises(ValueError, match="NaN"):
        load(torch.tensor([float("nan")]))
    with pytest.raises(TypeError, match="floating"):
        load(torch.tensor([1]))
    with pytest.raises(RuntimeError, match="accelerator"):  # vLLM's own `update_weights` calls it on the CPU too
        torch.accelerator.synchronize()
