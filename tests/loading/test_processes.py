"""What only another process can show: limits, forks, signals, and the interpreter's end."""

from __future__ import annotations

import os
import signal
import textwrap

import pytest
from support import eventually, ramp, save_sharded

PRELUDE = """
import asyncio, errno, gc, os, resource, signal, sys, threading, time, warnings
import torch
torch.set_num_threads(1)
import stio
from stio import sync
from support import Gate
from support import HookedRoot
from support import descriptors
from support import eventually
from support import num_threads
from support import oracle
from support import require_equal
from pathlib import Path
directory = Path(sys.argv[1])
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_sharded({f"layer.{k}": ramp(64, 64 + k) for k in range(40)}, tmp_path_factory.mktemp("model"), 20)


def indented(code: str) -> str:
    return PRELUDE + textwrap.dedent(code)


def run(zygote, code, directory):
    found = zygote.run(indented(code), directory)
    assert found.returncode == 0, found.stderr
    return found


def test_c99_too_many_files(zygote, directory):
    """Few descriptors: shards are read in turn. None: a clear error, and those that were open are back."""
    found = run(
        zygote,
        """
        sync.load(directory)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        for _ in range(3):
            before = descriptors()
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, usual[1]))
            try:
                sync.load(directory)
            except stio.StorageError as error:
                assert error.errno == errno.EMFILE, error
                assert "ulimit -n" in str(error)
            else:
                raise AssertionError
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, usual)
            assert descriptors() == before
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, usual[1]))
        assert len(sync.load(directory)) == 40
        assert descriptors() == before
        print("done")
        """,
        directory,
    )
    assert found.stdout == "done\n"


@pytest.mark.matrix
@pytest.mark.parametrize("first", ["nothing", "a load", "a load under way", "a stream"])
def test_c100_fork(zygote, directory, first):
    """A child loads whatever its parent did or is doing, and drops what it inherited without a hang."""
    found = run(
        zygote,
        """
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
        first = sys.argv[2]
        root = HookedRoot(directory)
        expected = oracle(directory)
        stream = None
        if first == "a load":
            sync.load(directory)
        elif first == "a load under way":
            root.hook = gate = Gate(after=3)
            thread = threading.Thread(target=lambda: sync.load(root, memory="copy"), daemon=True)
            thread.start()
            assert gate.reached.wait(10)
        elif first == "a stream":
            checkpoint = sync.open(directory, memory="copy", budget_bytes=20_000)
            checkpoint.__enter__()
            stream = checkpoint.stream()
            next(stream)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                require_equal(sync.load(directory), expected)
                require_equal(asyncio.run(stio.load(directory, memory="copy")), expected)
                if stream is not None:
                    try:
                        while True:
                            next(stream)
                    except (stio.ClosedError, StopIteration):
                        pass
                    stream.promote(["layer.3"])
                    del stream
                    gc.collect()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        if first == "a load under way":
            gate.opened.set()
            thread.join(10)
        elif first == "a stream":
            assert len(list(stream)) == 39
            checkpoint.close()
        require_equal(sync.load(directory), expected)
        print("done")
        """.replace("sys.argv[2]", repr(first)),
        directory,
    )
    assert found.stdout == "done\n"


def test_c100_fork_through_multiprocessing(zygote, directory):
    found = run(
        zygote,
        """
        import multiprocessing
        warnings.simplefilter("ignore", DeprecationWarning)
        sync.load(directory)

        def child(queue):
            queue.put(sorted(sync.load(directory)))

        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        assert len(queue.get()) == 40
        process.join()
        assert process.exitcode == 0
        print("done")
        """,
        directory,
    )
    assert found.stdout == "done\n"


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["load", "stream", "daemon", "asyncio", "open"])
def test_exit_does_not_hang(zygote, directory, what):
    """The interpreter ends while a read is really under way; the gate opens once the exit waits for it."""
    found = run(
        zygote,
        """
        what = sys.argv[2]
        root = HookedRoot(directory)
        root.hook = gate = Gate(after=2)
        from stio.runtime import operation as runtime

        def open_at_exit():
            # Lets the read go once the exit has asked the operation to end.
            def body():
                eventually(lambda: all(o.cancelled for o in list(runtime.counters.running)) and bool(runtime.counters.running) or gate.opened.is_set())
                gate.opened.set()
            threading.Thread(target=body, daemon=True).start()

        if what == "load":
            from stio.loading.body import collect
            from stio.loading.body import reading_operation
            from stio.loading.select import select_tensors
            from stio.loading.options import LoadOptions
            options = LoadOptions(memory="copy")
            operation = reading_operation(root, options, lambda operation, opened: collect(operation, select_tensors(opened, None, options))).start()
        elif what == "stream":
            checkpoint = sync.open(root, memory="copy", budget_bytes=100_000)
            checkpoint.__enter__()
            stream = checkpoint.stream()
            next(stream)
        elif what == "daemon":
            threading.Thread(target=lambda: sync.load(root, memory="copy"), daemon=True).start()
        elif what == "asyncio":
            async def main():
                task = asyncio.ensure_future(stio.load(root, memory="copy"))
                while not gate.reached.is_set():
                    await asyncio.sleep(0)
                open_at_exit()
            asyncio.run(main())
        elif what == "open":
            checkpoint = sync.open(directory)
            checkpoint.__enter__()
            gate.reached.set()
        assert gate.reached.wait(10)
        if what != "asyncio":
            open_at_exit()
        print("done", flush=True)
        """.replace("sys.argv[2]", repr(what)),
        directory,
    )
    assert found.stdout == "done\n"
    assert "did not end" not in found.stderr


@pytest.mark.slow
def test_an_exit_function_of_the_user_may_wait_for_a_load(torch_zygote, tmp_path):
    """The engine ends when all operations have ended, and not before an exit function that was registered earlier."""
    save_sharded({f"t{k}": ramp(1000, start=k) for k in range(20)}, tmp_path)
    found = torch_zygote.run(
        """
        import atexit, sys, threading, time
        import stio.runtime.calls  # what an earlier operation of the process imports

        begun = threading.Event()

        def work():
            print(len(sync.load(sys.argv[1], memory="copy", progress=lambda _: (begun.set(), time.sleep(0.02)))), flush=True)

        from stio import sync
        load = threading.Thread(target=work, daemon=True)
        atexit.register(lambda: load.join(20))
        load.start()
        assert begun.wait(20)
        """,
        tmp_path,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "20\n", "")


def test_keyboard_interrupt_of_a_sync_load(zygote, directory):
    """SIGINT while a read is under way: the load ends before the KeyboardInterrupt comes out."""
    code = indented(
        """
        root = HookedRoot(directory)
        root.hook = gate = Gate(after=2)

        def interrupt():
            assert gate.reached.wait(10)
            os.kill(os.getpid(), signal.SIGINT)
            from stio.runtime import operation as runtime
            assert eventually(lambda: all(o.cancelled for o in list(runtime.counters.running)))
            gate.opened.set()

        before = num_threads()
        threading.Thread(target=interrupt).start()
        try:
            sync.load(root, memory="copy", budget_bytes=100_000)
        except KeyboardInterrupt:
            assert all(file.closed and not file.inside for file in root.files)
            assert eventually(lambda: num_threads() <= before)
            print("interrupted")
        root.hook = lambda *_: None
        assert len(sync.load(root)) == 40
        print("done")
        """
    )
    found = zygote.run(code, directory)
    assert (found.returncode, found.stdout) == (0, "interrupted\ndone\n"), found.stderr


def test_keyboard_interrupt_of_asyncio_run(zygote, directory):
    code = indented(
        """
        root = HookedRoot(directory)
        root.hook = gate = Gate(after=2)

        def interrupt():
            assert gate.reached.wait(10)
            os.kill(os.getpid(), signal.SIGINT)
            from stio.runtime import operation as runtime
            assert eventually(lambda: all(o.cancelled for o in list(runtime.counters.running)))
            gate.opened.set()

        threading.Thread(target=interrupt).start()
        try:
            asyncio.run(stio.load(root, memory="copy", budget_bytes=100_000))
        except KeyboardInterrupt:
            assert all(file.closed and not file.inside for file in root.files)
            print("interrupted")
        """
    )
    found = zygote.run(code, directory)
    assert (found.returncode, found.stdout) == (0, "interrupted\n"), found.stderr


def test_a_killed_process_is_killed(zygote, directory):
    """SIGTERM has no handler here: the default ends the process at once."""
    child = zygote.start(indented("print('up', flush=True)\nsignal.pause()"), directory)
    assert eventually(lambda: child.stdout() == "up\n", 20), child.wait()
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait().returncode == -signal.SIGTERM


@pytest.mark.costly("processes of its own")
def test_import_starts_nothing(torch_zygote):
    found = torch_zygote.run(
        """
        import sys
        torch = sys.modules.pop("torch")
        import stio
        assert "torch" not in sys.modules
        sys.modules["torch"] = torch
        import stio.sync
        from support import num_threads
        from stio.runtime import calls as loop
        from stio.runtime import operation as runtime
        assert loop._loop is None
        print(len(runtime.counters.running))
        """
    )
    assert (found.returncode, found.stdout) == (0, "0\n"), found.stderr


def test_a_loop_that_was_closed_under_a_load(zygote, directory):
    """The loop ends without asking its tasks: the load is dropped with them, and ends."""
    found = run(
        zygote,
        """
        from stio.runtime import operation as runtime
        root = HookedRoot(directory)
        root.hook = gate = Gate(after=2)
        loop = asyncio.new_event_loop()
        coroutine = stio.load(root, memory="copy")
        task = loop.create_task(coroutine)
        while not gate.reached.is_set():
            loop.run_until_complete(asyncio.sleep(0))
        task._log_destroy_pending = False
        loop.close()
        del task
        coroutine.close()
        gate.opened.set()
        assert eventually(lambda: not runtime.counters.running)
        assert eventually(lambda: all(file.closed for file in root.files))
        print("done")
        """,
        directory,
    )
    assert found.stdout == "done\n"
