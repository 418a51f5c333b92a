"""Warm starts that end early: failed loads, the block's errors, cancels, interrupts, forks; and what is left then."""

from __future__ import annotations

import asyncio
import copy
import errno
import pickle
import signal
import threading
from functools import partial

import anyio
import pytest
import torch
from support import (
    Gate,
    HookedRoot,
    cancelled_after_every_round,
    cancelled_at_every_await,
    cancelled_natively_at_every_await,
    eventually,
    eventually_async,
    nothing_left,
    require_equal,
)
from torch import nn
from warm import TOKENS, Held, Net, alike, held, in_thread, load_of, made, on_meta, saved

import stio
from stio import sync
from stio.errors import ClosedError, MismatchError, StorageError
from stio.serving.warm_start.parameter import PlaceholderParameter

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(sync, "_warned", True)  # some hold a load in a loop's thread, which is what is tested
    with nothing_left():
        yield


@pytest.fixture
def directory(tmp_path):
    return saved(made(Net), tmp_path)


class Mine(Exception):
    """Raised by the caller's code."""


def require_refusing(module, match):
    """No parameter computes anything, and nothing else of the warm start is left on the module."""
    for use in [lambda: module(TOKENS), lambda: module.scale + 1, module.state_dict, lambda: copy.deepcopy(module)]:
        with torch.no_grad(), pytest.raises(ClosedError, match=match):
            use()
    with pytest.raises(ClosedError, match=match):
        pickle.dumps(module.scale)
    assert module.scale.shape == (8,)
    assert "has no data" in repr(module.scale)
    assert not any(part._forward_pre_hooks for part in module.modules())


# Failed loads.


async def test_a_failed_load_fails_the_forward(tmp_path):
    """A use says which parameter it was, and why; `done()` and the block's end raise the error itself."""
    load = Held(Net, tmp_path)

    def fail(*read):
        load.gate(*read)
        if load.gate.opened.is_set():
            raise StorageError("the disk is gone", errno=errno.EIO, path="disk")

    load.root.hook = fail
    with pytest.raises(StorageError, match="disk: the disk is gone"):
        with load.warm as warm:
            with in_thread(load.module, TOKENS) as running:
                assert eventually(load.waiters)
                load.gate.opened.set()
            assert isinstance(running.error, ClosedError)
            assert "scale was not loaded: the warm start failed: disk: the disk is gone" in str(running.error)
            assert isinstance(running.error.__cause__, StorageError)
            require_refusing(load.module, "failed: disk")
            with pytest.raises(StorageError):
                warm.done()
            load.entered = True
    assert load.entered
    load.root.close()


@pytest.mark.matrix
@pytest.mark.parametrize("n", [1, 2, 5, 9, 14])
async def test_a_read_that_fails(tmp_path, n):
    """Whichever it is: the block is not entered, or its end raises; what came is right, what did not refuses."""
    wide = partial(Net, 64)
    real, module, count = made(wide), on_meta(wide), [0]
    root = HookedRoot(saved(real, tmp_path))

    def fail(*_):
        count[0] += 1
        if count[0] == n:
            raise StorageError("mine", errno=errno.EIO)

    root.hook = fail
    with pytest.raises(StorageError, match="mine"):
        async with stio.warm_start(module, root, memory="copy"):
            assert n > 1
    for name, parameter in module.named_parameters():
        if type(parameter) is PlaceholderParameter:
            with pytest.raises(ClosedError, match="mine"):
                parameter + 1
        elif not parameter.is_meta:
            assert torch.equal(parameter, real.get_parameter(name))
    if n == 1:
        assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in module.parameters())
        assert module.steps.is_meta
    root.close()


async def test_a_file_that_was_changed_meanwhile(tmp_path):
    with pytest.raises(stio.ChangedDuringReadError):
        with held(Net, tmp_path):
            with open(tmp_path / "model.safetensors", "ab") as file:
                file.write(b" ")


async def test_an_error_of_the_callers_progress_function(directory):
    def fail(event):
        if event.done_bytes:
            raise Mine

    module = on_meta(Net)
    with pytest.raises(Mine):
        async with stio.warm_start(module, directory, progress=fail) as warm:
            with pytest.raises(Mine):
                await warm.done()


# The block's own ends.


@pytest.mark.parametrize("face", ["async", "sync"])
async def test_an_error_of_the_block_ends_the_load(tmp_path, face):
    load = Held(Net, tmp_path)
    load.gate.opened.set()
    mine = Mine()
    with pytest.raises(Mine) as caught:
        if face == "sync":
            with load.warm:
                raise mine
        async with stio.warm_start(load.module, load.root):
            raise mine
    assert caught.value is mine
    assert caught.value.__context__ is None
    assert all(file.closed for file in load.root.files)
    load.root.close()


def leave_early(load, warm=None):
    """Enter a warm start and leave it by an error before any parameter has come."""
    warm = warm or load.warm

    def open_late():  # the block's end waits for reads under way
        assert eventually(lambda: load_of(warm) is not None and load_of(warm).operation.cancelled)
        load.gate.opened.set()

    with in_thread(open_late):
        with pytest.raises(Mine):
            with warm:
                assert load.gate.reached.wait(5)
                raise Mine


@pytest.fixture
def ended(tmp_path):
    load = Held(Net, tmp_path)
    leave_early(load)
    yield load
    load.root.close()


async def test_what_has_not_come_refuses(ended):
    require_refusing(ended.module, "the warm start ended before that")
    with pytest.raises(ClosedError):
        ended.warm.done()
    ended.warm.close()


async def test_a_second_warm_start_fills_what_the_first_did_not(ended):
    before = dict(ended.module.named_parameters())
    ended.module.scale.requires_grad_(False)
    async with stio.warm_start(ended.module, ended.root) as warm:
        with torch.no_grad():
            assert alike(ended.module(TOKENS), ended.real(TOKENS))
        await warm.done()
    assert dict(ended.module.named_parameters()) == before
    assert all(type(parameter) is nn.Parameter for parameter in before.values())
    assert not ended.module.scale.requires_grad


async def test_load_into_fills_what_a_warm_start_did_not(ended):
    with pytest.raises(MismatchError, match="assign=True"):
        await stio.load_into(ended.module, ended.root)
    await stio.load_into(ended.module, ended.root, assign=True)
    require_equal(dict(ended.module.state_dict()), dict(ended.real.state_dict()))
    assert ended.module.head.weight is ended.module.embed.weight


async def test_a_module_that_was_warm_started_for_another_dtype(tmp_path):
    """A second one begins from the module's own dtype."""
    load = Held(Net, tmp_path)
    leave_early(load, sync.warm_start(load.module, load.root, dtype=torch.float64))
    assert load.module.scale.dtype == torch.float64
    async with stio.warm_start(load.module, load.root):
        pass
    assert {p.dtype for p in load.module.parameters()} == {torch.float32}
    load.root.close()


# Cancels.


async def test_a_cancelled_wait_for_done_is_the_waits_alone(tmp_path):
    load = Held(Net, tmp_path)
    module = on_meta(Net)
    gate = Gate(after=1)
    load.root.hook = gate
    async with stio.warm_start(module, load.root) as warm:
        with anyio.move_on_after(0.01) as scope:
            await warm.done()
        assert scope.cancelled_caught
        gate.opened.set()
        assert await warm.done() == stio.LoadReport((), ())
    require_equal(dict(module.state_dict()), dict(load.real.state_dict()))
    load.root.close()


async def test_a_cancel_of_the_block_ends_the_load(tmp_path):
    load = Held(Net, tmp_path)
    over = []

    async def block():
        try:
            async with stio.warm_start(load.module, load.root):
                with in_thread(load.module, TOKENS) as running:
                    over.append(running)
                    await anyio.sleep_forever()
        finally:
            over.append(sum(file.inside for file in load.root.files))

    async with anyio.create_task_group() as group:
        group.start_soon(block)
        assert await eventually_async(lambda: over and load.gate.reached.is_set())
        group.cancel_scope.cancel()
        load.gate.opened.set()
    assert over[-1] == 0
    running = over[0]
    assert eventually(running.over.is_set)
    assert running.error is None or isinstance(running.error, ClosedError)
    load.root.close()


@pytest.fixture
def make(directory):
    async def run():
        async with stio.warm_start(on_meta(Net), directory, memory="copy") as warm:
            await anyio.lowlevel.checkpoint()
            await warm.done()
            await anyio.lowlevel.checkpoint()

    return run


@pytest.mark.matrix
async def test_cancel_at_every_await(make):
    assert await cancelled_at_every_await(make, least=3) > 2


@pytest.mark.matrix
@pytest.mark.parametrize("at_resume", [False, True])
@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)
async def test_native_cancel_at_every_await(make, at_resume):
    assert await cancelled_natively_at_every_await(make, at_resume=at_resume, least=3) > 2


@pytest.mark.matrix
async def test_cancel_after_every_round_of_the_loop(make):
    assert await cancelled_after_every_round(make) > 3


async def test_a_cancel_while_entering_leaves_the_module_as_it_was(directory):
    root, module, gate = HookedRoot(directory), on_meta(Net), Gate()
    root.hook = gate  # held at the buffers

    async def block():
        async with stio.warm_start(module, root):
            raise AssertionError("the block was entered")

    async with anyio.create_task_group() as group:
        group.start_soon(block)
        assert await eventually_async(gate.reached.is_set)
        group.cancel_scope.cancel()
        gate.opened.set()
    for parameter in module.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.device.type == "meta"
    assert module.steps.is_meta
    assert all(file.closed for file in root.files)
    root.close()


def test_a_thrown_away_coroutine(directory):
    """What it held is given back though nobody awaits any more."""
    module = on_meta(Net)

    async def block():
        async with stio.warm_start(module, directory):
            await asyncio.sleep(60)  # waits: until it is cancelled

    async def main():
        coroutine = block()
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(0.05)
        task._log_destroy_pending = False
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


# Interrupts, forks, exits.


def test_a_keyboard_interrupt_in_a_waiting_forward(tmp_path):
    load = Held(Net, tmp_path)

    def interrupt():
        assert eventually(lambda: load_of(load.warm) is not None and load.waiters())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert eventually(lambda: load_of(load.warm).operation.cancelled)
        load.gate.opened.set()

    with in_thread(interrupt):
        with pytest.raises(KeyboardInterrupt):
            with load.warm:
                load.module(TOKENS)
    require_refusing(load.module, "warm start ended")
    load.root.close()


FORKED = """
    import os, threading, warnings
    import torch
    from torch import nn
    from support import Gate, HookedRoot, eventually
    from warm import TOKENS, Net, alike, held, made
    from pathlib import Path
    import stio, sys
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.set_num_threads(1)
"""


@pytest.mark.slow
def test_a_forked_child_is_told(zygote, tmp_path):
    """It has no load: what had not come when it was forked raises, what had is there."""
    found = zygote.run(
        FORKED
        + """
    with held(Net, Path(sys.argv[1])) as load:
        assert load.gate.reached.wait(5)
        waiting = threading.Thread(target=lambda: load.module.scale + 1)
        waiting.start()
        assert eventually(load.waiters)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                assert torch.equal(load.module.steps, load.real.steps)
                assert load.module.scale.shape == (8,)
                load.module.scale.requires_grad_(False)
                for use in (lambda: load.module(TOKENS), lambda: load.module.scale + 1, load.module.state_dict):
                    try:
                        use()
                    except stio.ClosedError as error:
                        assert "forked child" in str(error)
                        code = 0
                    else:
                        code = 2
                        break
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        load.gate.opened.set()
        waiting.join()
        assert alike(load.module(TOKENS), load.real(TOKENS))
        pid = os.fork()
        if not pid:
            os._exit(0 if alike(load.module(TOKENS), load.real(TOKENS)) else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    print("done")
    """,
        tmp_path,
    )
    assert found.stdout == "done\n", found.stderr


@pytest.mark.slow
def test_exit_inside_the_block(zygote, tmp_path):
    """The interpreter ends though a load is held: it is cancelled, and nobody hangs."""
    found = zygote.run(
        FORKED
        + """
    from warm import Held
    load = Held(Net, Path(sys.argv[1]))
    load.warm.__enter__()
    assert load.gate.reached.wait(5)
    threading.Timer(0.2, load.gate.opened.set).start()
    print("done")
    """,
        tmp_path,
    )
    assert found.stdout == "done\n", found.stderr
    assert found.returncode == 0, found.stderr
