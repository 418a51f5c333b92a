"""Faults 100 and 121: the interpreter's end, signals and forks while a save is under way."""

from __future__ import annotations

import os
import signal

import pytest
from crash.generations import MANY, leftovers, look, look_by_stio, save
from crash.held_saves import script, started

NAMES = ["model", "model.safetensors"]


@pytest.fixture(params=NAMES)
def where(request, tmp_path):
    path = tmp_path / request.param
    save(path, 1, MANY)
    return path


def require_stands(where, generation):
    assert look(where) == look_by_stio(where) == generation
    assert leftovers(where) == []


@pytest.mark.matrix
@pytest.mark.parametrize("face", ["sync", "asyncio", "abandoned task", "thread"])
def test_c121_exit_with_a_save_pending(where, zygote, face):
    """It is finished; a task that asyncio cancels on its way out is rolled back."""
    found = zygote.run(
        script(
            """
            face = sys.argv[2]
            if face == "sync":
                saver = sync.Saver()
                saver.save(tensors_of(2), where, **keywords)
            elif face == "asyncio":
                async def main():
                    global saver
                    saver = stio.Saver()
                    await saver.save(tensors_of(2), where, **keywords)
                asyncio.run(main())
            elif face == "abandoned task":
                async def main():
                    global task
                    task = asyncio.ensure_future(stio.save(tensors_of(2), where, **keywords))
                    while not reached.is_set():
                        await asyncio.sleep(0)
                    open_once_cancelled()
                asyncio.run(main())
            else:
                # Freeing a tensor drops the GIL; a daemon thread that does so at the interpreter's exit ends the process by
                # `terminate` (Python 3.11: the thread is ended inside a destructor of torch's). So they are kept.
                kept = tensors_of(2)
                threading.Thread(target=lambda: sync.save(kept, where, **keywords), daemon=True).start()
            assert reached.wait(20)
            if face != "abandoned task":
                assert runtime.counters.running
            atexit.register(opened.set)  # before the exit waits for saves: they are the last to be registered for it
            print("done")
            """
        ),
        where,
        face,
    )
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
    require_stands(where, 1 if face == "abandoned task" else 2)


@pytest.mark.matrix
def test_c121_exit_gives_a_stuck_save_up(where, zygote):
    """After its patience it is rolled back, and the process ends."""
    found = zygote.run(
        script(
            """
            from stio.saving import SaveOptions
            SaveOptions.EXIT_PATIENCE_SECONDS = 0.1
            saver = sync.Saver()
            saver.save(tensors_of(2), where, **keywords)
            assert reached.wait(20)
            open_once_cancelled()
            print("done")
            """
        ),
        where,
    )
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
    require_stands(where, 1)


def test_c121_sigterm_by_default(where, zygote):
    """The process ends at once; the old checkpoint stands, and what is left is reclaimed."""
    child = started(
        zygote,
        """
        saver = sync.Saver()
        saver.save(tensors_of(2), where, **keywords)
        assert reached.wait(20)
        print("up", flush=True)
        while True:  # not signal.pause(): a signal just before it would not end it
            opened.wait(0.05)
        """,
        where,
    )
    os.kill(child.pid, signal.SIGTERM)
    found = child.wait()
    assert found.returncode == -signal.SIGTERM, found.stderr
    assert look(where) == look_by_stio(where) == 1
    assert leftovers(where)
    save(where, 2, MANY)
    require_stands(where, 2)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("what", "generation"), [("saver", 2), ("block", 2), ("save", 1), ("staging", 1), ("asyncio", 1)]
)
def test_c121_sigterm_that_raises_system_exit(where, zygote, what, generation):
    """A pending save is finished; one that the main thread waits for is rolled back, and so is what asyncio cancels on
    its way out. The exit code is the handler's."""
    child = started(
        zygote,
        """
        what = sys.argv[2]

        def handler(*_):
            if what in ("saver", "block"):
                opened.set()
            else:
                open_once_cancelled()
            sys.exit(7)

        signal.signal(signal.SIGTERM, handler)

        staged = threading.Event()
        if what in ("save", "staging"):
            staged.set()

        def announce():
            assert reached.wait(20)
            assert staged.wait(20)  # a signal before that would roll back
            print("up", flush=True)

        threading.Thread(target=announce).start()
        if what == "saver":
            saver = sync.Saver()
            saver.save(tensors_of(2), where, **keywords)
            staged.set()
            while True:  # not signal.pause(): a signal just before it would not end it
                opened.wait(0.05)
        elif what == "block":
            with sync.Saver() as saver:
                saver.save(tensors_of(2), where, **keywords)
                staged.set()
                while True:  # not signal.pause(): a signal just before it would not end it
                    opened.wait(0.05)
        elif what == "save":
            sync.save(tensors_of(2), where, **keywords)
        elif what == "staging":
            def produce():
                reached.set()
                opened.wait(20)
                return torch.zeros(3)
            sync.Saver().save({"w": stio.LazyTensor(torch.float32, (3,), produce)}, where, **keywords)
        else:
            async def main():
                loop = asyncio.get_running_loop()

                def tick():  # a signal just before the loop waits would not end its wait
                    loop.call_later(0.05, tick)

                async with stio.Saver() as saver:
                    await saver.save(tensors_of(2), where, **keywords)
                    tick()
                    # Raised in a step of this task, the exit would leave the block, which waits for the save.
                    loop.call_later(0.05, staged.set)
                    await asyncio.sleep(30)  # waits: until the process is ended
            asyncio.run(main())
        """,
        where,
        what,
    )
    os.kill(child.pid, signal.SIGTERM)
    found = child.wait()
    assert found.returncode == 7, found.stderr
    require_stands(where, generation)


@pytest.mark.matrix
@pytest.mark.parametrize("face", ["sync", "asyncio"])
def test_c121_keyboard_interrupt(where, zygote, face):
    child = started(
        zygote,
        """
        def announce():
            assert reached.wait(20)
            open_once_cancelled()
            print("up", flush=True)

        threading.Thread(target=announce).start()
        try:
            if sys.argv[2] == "sync":
                sync.save(tensors_of(2), where, **keywords)
            else:
                asyncio.run(stio.save(tensors_of(2), where, **keywords))
        except KeyboardInterrupt:
            assert not runtime.counters.running
            sys.exit(9)
        """,
        where,
        face,
    )
    os.kill(child.pid, signal.SIGINT)
    found = child.wait()
    assert found.returncode == 9, found.stderr
    require_stands(where, 1)


@pytest.mark.matrix
def test_c100_a_fork_beside_a_save(where, zygote):
    """The child of a process that is saving neither finishes, nor disturbs, nor locks what the parent does."""
    found = zygote.run(
        script(
            """
            import warnings
            warnings.simplefilter("ignore", DeprecationWarning)
            saver = sync.Saver()
            pending = saver.save(tensors_of(2), where, **keywords)
            assert reached.wait(20)
            source, target = os.pipe()
            child = os.fork()
            if not child:
                os.close(target)
                os.read(source, 1)
                os._exit(0)
            os.close(source)
            opened.set()
            pending.result()
            saver.close()
            save(where, 3, MANY)  # beside a child that holds copies of every descriptor
            os.close(target)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            print("done")
            """
        ),
        where,
    )
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
    require_stands(where, 3)
