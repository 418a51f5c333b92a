"""The blocking twins, as a new user tries them: 462, 463; and what objects show of themselves: 468."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import stio
import stio.distributed
from stio import sync
from stio.compat import install

WAITING = (
    "Checkpoint Follower HostCache ModelPool Saver Stream WarmStart "
    "convert follow load load_into load_state open preload save save_state warm_start"
)


@pytest.mark.parametrize("name", [name for name in stio.__all__ if name != "sync"])
def test_c462_sync_has_every_public_name(name: str) -> None:
    ours = getattr(sync, name)
    if name in WAITING.split():
        assert ours is not getattr(stio, name)
    else:
        assert ours is getattr(stio, name)
        assert name in sync.__all__ or name == "__version__"


def test_c462_sync_takes_the_place_of_stio(tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    exec("import stio.sync as stio\nfrom stio.sync import *", scope)
    assert scope["StioError"] is stio.StioError and scope["load"] is sync.load
    assert scope["stio"].compat is stio.compat and scope["stio"].sync is sync
    with pytest.raises(scope["stio"].CheckpointNotFoundError):
        scope["stio"].load(tmp_path)
    with pytest.raises(AttributeError, match="'stio.sync' has no attribute 'lode'"):
        sync.lode  # noqa: B018
    assert sync.__all__ == sorted(sync.__all__)


def _meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


ONE = {"a": torch.ones(1)}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (stio.Saver, "Saver"),
        (stio.distributed.Saver, "distributed.Saver"),
        (lambda: stio.open("model/"), "open"),
        (lambda: stio.warm_start(_meta(), "model/"), "warm_start"),
        (lambda: stio.ModelPool(device="cpu", device_bytes=4), "ModelPool"),
    ],
)
def test_c463_a_plain_with_names_the_twin(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(TypeError, match=rf"takes `async with`.* stio\.sync\.{name}$"):
        with make():
            raise AssertionError
    assert eval(name, vars(sync) | {"distributed": sync.distributed})


@pytest.mark.anyio
async def test_c463_a_stream_and_a_use_name_the_twin_too(tmp_path: Path) -> None:
    save_file(ONE, tmp_path / "m.safetensors")
    async with AsyncExitStack() as stack:
        checkpoint = await stack.enter_async_context(stio.open(tmp_path))
        pool = await stack.enter_async_context(stio.ModelPool(device="cpu", device_bytes="1MB"))
        pool.add("m", tmp_path)
        for block, name in ((checkpoint.stream(), "open"), (pool.use("m"), "ModelPool")):
            with pytest.raises(TypeError, match=rf"stio\.sync\.{name}$"), block:
                raise AssertionError


def test_c463_a_save_that_nobody_awaits_names_the_twin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = stio.Saver()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own
        saver.save(ONE, tmp_path / "a")  # type: ignore[unused-coroutine]
        gc.collect()
    del saver
    assert "stio.sync.Saver" in caplog.text and not [*tmp_path.iterdir()]


@pytest.mark.anyio
async def test_c463_a_saver_that_is_used_or_closed_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stio.Saver():
        pass
    saver = stio.Saver()
    await (await saver.save(ONE, tmp_path / "a"))
    del saver
    sync.Saver(), sync.distributed.Saver()
    with suppress(ValueError):
        stio.Saver(keep_last=0)
    assert caplog.records == []


def test_c463_a_checkpoint_is_opened_and_closed_by_hand(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3), "b": torch.ones(2)}, tmp_path / "m.safetensors")
    checkpoint = sync.open(tmp_path)
    assert "not open" in repr(checkpoint)
    assert torch.equal(checkpoint["a"], torch.arange(3))
    assert checkpoint.open() is checkpoint and checkpoint.open() is checkpoint
    assert checkpoint.keys() == ["a", "b"] and dict(checkpoint)["b"].shape == (2,)
    with pytest.raises(stio.TensorNotFoundError):
        checkpoint["c"]
    checkpoint.close()
    checkpoint.close()
    for use in (lambda: checkpoint["a"], checkpoint.keys, lambda: checkpoint.metadata, checkpoint.stream):
        with pytest.raises(stio.ClosedError):
            use()


@pytest.mark.parametrize("use", [len, sync.Checkpoint.open])
def test_c463_a_block_takes_over_a_checkpoint_that_is_open(
    tmp_path: Path, use: Callable[[sync.Checkpoint], Any]
) -> None:
    save_file(ONE, tmp_path / "m.safetensors")
    checkpoint = sync.open(tmp_path)
    use(checkpoint)
    with checkpoint as entered:
        assert entered is checkpoint and len(entered) == 1
        with pytest.raises(RuntimeError, match="open already"), checkpoint:
            raise AssertionError
    with pytest.raises(stio.ClosedError):
        checkpoint.keys()


def test_c463_a_checkpoint_that_was_never_opened_is_closed(tmp_path: Path) -> None:
    checkpoint = sync.open(tmp_path / "no")
    checkpoint.close()
    with pytest.raises(stio.ClosedError):
        checkpoint.keys()
    later = sync.open(tmp_path / "m.safetensors")
    with pytest.raises(stio.CheckpointNotFoundError):
        later.open()
    save_file(ONE, tmp_path / "m.safetensors")
    assert len(later) == 1  # it can be tried again
    later.close()


def test_c468_a_pending_save_shows_its_state(tmp_path: Path) -> None:
    with sync.Saver() as saver:
        pending = saver.save(ONE, tmp_path / "a")
        assert repr(pending) in (f"<PendingSave '{tmp_path}/a': {state}>" for state in ("under way", "saved"))
        pending.result()
        assert repr(pending) == f"<PendingSave '{tmp_path}/a': saved>"
    (tmp_path / "file").write_bytes(b"")
    with suppress(stio.StorageError), sync.Saver() as saver:
        failed = saver.save(ONE, tmp_path / "file" / "x")
        with suppress(stio.StorageError):
            failed.result()
        assert repr(failed) == f"<PendingSave '{tmp_path}/file/x': failed, StorageError>"
        assert repr(failed) == repr(failed)


def test_c468_a_pending_save_that_was_rolled_back(tmp_path: Path) -> None:
    def cancel(_: object) -> None:
        pending[0].cancel()

    pending: list[stio.PendingSave] = []
    start = stio.PendingSave.start
    with pytest.MonkeyPatch.context() as patch, sync.Saver(progress=cancel) as saver, suppress(stio.ClosedError):
        patch.setattr(stio.PendingSave, "start", lambda self, *args: (pending.append(self), start(self, *args))[1])
        saver.save(ONE, tmp_path / "a").result()
    assert repr(pending[0]) == f"<PendingSave '{tmp_path}/a': rolled back>"


def test_c468_an_installation_shows_its_state() -> None:
    with install() as installation:
        assert repr(installation) == f"<Installation: safetensors {installation.version}, active>"
    assert repr(installation) == f"<Installation: safetensors {installation.version}, not active>"
