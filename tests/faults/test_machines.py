"""Faults 248 to 250: other versions of torch, and what a control group lets a process use.

Functions of the installed torch are replaced by ones that behave as in another version; `make floors` runs the tests with
other versions. A limit of memory or processors is set for real, on a child process in a control group of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import REPOSITORY
from click.testing import CliRunner
from crash.zygote import Finished
from fakes import FakeDevice, FaultyRoot, MemoryRoot, checkpoint_files, write_checkpoint
from support import PATIENCE_SECONDS, eventually, require_equal
from torch import nn

import stio
from stio import sync
from stio.cli.main import main
from stio.compat import huggingface_hub, olmo
from stio.compat.safetensors import torch as drop_in
from stio.integrations import iterators

TENSORS = {"a": torch.ones(4), "b": torch.full((4,), 2.0)}
MIB = 1 << 20


# Fault 248: other versions of torch.


class _Model(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        for name in TENSORS:
            self.register_parameter(name, nn.Parameter(torch.zeros(4, device=device), requires_grad=False))


@pytest.fixture
def torch_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `torch.accelerator` do what it does in torch 2.6 where there is none: it raises, and has fewer names."""

    def none_available(*_: object) -> Any:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    found = torch.accelerator
    for name in ("current_accelerator", "current_device_index", "current_stream", "set_stream", "synchronize"):
        monkeypatch.setattr(found, name, none_available)
    monkeypatch.delattr(found, "device_index", raising=False)
    monkeypatch.setattr(found, "is_available", lambda: False)
    monkeypatch.setattr(found, "device_count", lambda: 0)


async def _stream(source: Path) -> dict[str, torch.Tensor]:
    async with stio.open(source) as checkpoint:
        return {name: tensor async for name, tensor in checkpoint.stream()}


def _load_into(source: Path) -> dict[str, torch.Tensor]:
    model = _Model()
    sync.load_into(model, source)
    return model.state_dict()


def _warm_start(source: Path) -> dict[str, torch.Tensor]:
    model = _Model("meta")
    with sync.warm_start(model, source) as warm:
        warm.done()
    return model.state_dict()


def _cached(source: Path) -> dict[str, torch.Tensor]:
    with sync.HostCache(MIB) as cache:
        cache.prefetch(source)
        return sync.load(source, cache=cache)


def _by_the_hub_s_drop_in(source: Path) -> dict[str, torch.Tensor]:
    model = _Model()
    huggingface_hub.load_torch_model(model, source)
    return model.state_dict()


def _saved(source: Path) -> dict[str, torch.Tensor]:
    sync.save(TENSORS, source.parent / "saved.safetensors")
    with sync.Saver() as saver:
        saver.save(TENSORS, source.parent / "saved").result()
    return drop_in.load_file(source.parent / "saved.safetensors")


def _command(*arguments: object) -> None:
    done = CliRunner().invoke(main, list(map(str, arguments)))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output


def _converted(source: Path) -> dict[str, torch.Tensor]:
    sync.convert(source, source.parent / "converted.safetensors")
    return drop_in.load_file(source.parent / "converted.safetensors")


def _by_command(name: str) -> Callable[[Path], dict[str, torch.Tensor]]:
    def run(source: Path) -> dict[str, torch.Tensor]:
        _command(name, source)
        return TENSORS

    return run


CALLS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    "load": lambda source: asyncio.run(stio.load(source)),
    "sync.load": sync.load,
    "cpu": lambda source: sync.load(source, device="cpu"),
    "auto": lambda source: sync.load(source, device="auto"),
    "devices": lambda source: sync.load(source, device={"a": "cpu", "b": torch.device("cpu")}),
    "fake": lambda source: sync.load(source, device=FakeDevice()),
    "load_into": _load_into,
    "stream": lambda source: asyncio.run(_stream(source)),
    "warm_start": _warm_start,
    "cache": _cached,
    "iterators": lambda source: dict(iterators.weights(source)),
    "huggingface_hub": _by_the_hub_s_drop_in,
    "convert": _converted,
    "command-load": _by_command("load"),
    "safetensors": drop_in.load_file,
    "save": _saved,
    "inspect": _by_command("inspect"),
    "verify": _by_command("verify"),
}


@pytest.mark.usefixtures("torch_2_6")
@pytest.mark.parametrize("load", [pytest.param(load, id=name) for name, load in CALLS.items()])
def test_c248_torch_2_6_without_an_accelerator(tmp_path: Path, load: Callable[[Path], dict[str, torch.Tensor]]) -> None:
    write_checkpoint(tmp_path, TENSORS)
    require_equal(load(tmp_path / "model.safetensors"), TENSORS)


@pytest.mark.usefixtures("torch_2_6")
def test_c248_nested_state_on_torch_2_6(tmp_path: Path) -> None:
    sync.save_state({"a": TENSORS["a"], "n": 1}, tmp_path / "state.safetensors")
    assert sync.load_state(tmp_path / "state.safetensors")["n"] == 1


@pytest.mark.usefixtures("torch_2_6")
def test_c248_olmo_s_state_on_torch_2_6(tmp_path: Path) -> None:
    olmo.state_dict_to_safetensors_file({"a": TENSORS["a"], "n": 1}, tmp_path / "state.safetensors")
    assert olmo.safetensors_file_to_state_dict(tmp_path / "state.safetensors")["n"] == 1


@pytest.mark.usefixtures("torch_2_6")
def test_c248_a_device_that_is_not_there_on_torch_2_6(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TENSORS)
    with pytest.raises(RuntimeError) as caught:  # DeviceError is one
        sync.load(tmp_path, device="cuda")
    assert isinstance(caught.value, stio.DeviceError)
    assert "cuda" in str(caught.value)


def test_c248_a_private_name_that_torch_2_6_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device could be used then, since its module was not imported."""
    monkeypatch.delattr(torch, "float4_e2m1fn_x2", raising=False)
    spec = find_spec("stio.device.torch_private")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    copy = module.copy_of(TENSORS["a"])
    assert torch.equal(copy, TENSORS["a"]) and copy.data_ptr() != TENSORS["a"].data_ptr()


@pytest.fixture(params=[DeprecationWarning, FutureWarning])
def warning_jit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `torch.jit.script` and `torch.jit.trace` give a warning of a class, which is ignored."""

    def warning(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            warnings.warn("TorchScript is deprecated", request.param, stacklevel=2)
            return function(*arguments, **keywords)

        return call

    for name in ("script", "trace"):
        monkeypatch.setattr(torch.jit, name, warning(getattr(torch.jit, name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("warning_jit")
def test_c248_a_scripted_module_is_refused_whatever_torch_warns_of() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(stio.WarmStartError, match="compiled"):
        sync.warm_start(scripted, "never-opened")


@pytest.mark.usefixtures("warning_jit")
@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(lambda module: torch.jit.trace(module, torch.ones(3)), id="trace"),
        pytest.param(lambda module: torch.jit.script(module)(torch.ones(3)), id="script"),
    ],
)
def test_c248_torch_jit_is_refused_during_a_warm_start(compiled: Callable[[nn.Module], object]) -> None:
    """The message says when the module can be compiled."""
    linear = nn.Linear(3, 3)
    root = FaultyRoot(MemoryRoot(checkpoint_files(linear.state_dict())), gate=threading.Event(), gate_at=2)
    module, errors = nn.Linear(3, 3, device="meta"), []

    def body() -> None:
        try:
            compiled(module)
        except Exception as error:
            errors.append(error)

    with sync.warm_start(module, root) as warm:
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        thread.join(PATIENCE_SECONDS)
        assert root.gate is not None
        root.gate.set()
        assert len(errors) == 1
        assert "done()" in str(errors[0])
        warm.done()
    compiled(module)


_SUITE = """
import os, sys, warnings
import pytest, torch
warnings.resetwarnings()

{change}

status = pytest.main(["-q", "-p", "no:cacheprovider", "--assert=plain", *sys.argv[1:]])
sys.stdout.flush()
os._exit(status)
"""
"""Runs tests in a child, on a torch that is changed before."""


def _run_suite(zygote: Any, change: str, directory: Path, *arguments: object) -> Finished:
    code = _SUITE.format(change=textwrap.dedent(change))
    done: Finished = zygote.run(code, f"--basetemp={directory / 'suite'}", *arguments, cwd=REPOSITORY)
    return done


def _tests_with(pattern: str) -> list[Path]:
    """Return the files of tests that hold a line with this pattern, without this one."""
    found = (path for path in (REPOSITORY / "tests").rglob("test_*.py") if path != Path(__file__))
    return sorted(path for path in found if re.search(pattern, path.read_text(), re.MULTILINE))


@pytest.mark.slow
def test_c248_tests_are_collected_on_a_cuda_build_without_a_driver(tmp_path: Path, zygote: Any) -> None:
    """As torch 2.7 does it: CUDA is compiled in, and whatever starts it raises."""
    change = """
        def no_driver(*_):
            raise RuntimeError("Found no NVIDIA driver on your system.")

        torch.accelerator.current_accelerator = lambda check_available=False: (
            None if check_available else torch.device("cuda")
        )
        torch.accelerator.is_available = lambda: False
        for name in ("device_count", "current_device_index", "current_stream", "synchronize"):
            setattr(torch.accelerator, name, no_driver)
    """
    files = _tests_with(r"^\S.*\btorch\.(accelerator|cuda)\.")  # where it runs at the import
    done = _run_suite(zygote, change, tmp_path, "--collect-only", *files)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.slow
def test_c248_tests_of_torch_jit_pass_when_torch_warns(tmp_path: Path, zygote: Any) -> None:
    change = """
        def warning(function):
            def call(*arguments, **keywords):
                warnings.warn("TorchScript is deprecated", FutureWarning, stacklevel=2)
                return function(*arguments, **keywords)

            return call

        torch.jit.script, torch.jit.trace = warning(torch.jit.script), warning(torch.jit.trace)
    """
    done = _run_suite(zygote, change, tmp_path, "-x", "--tb=line", "-k", "scripted", *_tests_with(r"torch\.jit\."))
    assert done.returncode == 0, done.stdout[-2000:]


# Control groups.


def needs_root(test: Any) -> Any:
    """Mark a test as one that makes control groups."""
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    return pytest.mark.root(pytest.mark.skipif(not is_root, reason="needs root for control groups")(test))


_JOIN = """
def join(procs, mount, kind, controller):
    with open(procs, "w") as file:
        file.write(str(os.getpid()))
    if not mount:
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *arguments):
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), name)

    call("unshare", 0x00020000 | 0x02000000)  # namespaces of mounts and of control groups
    call("mount", b"none", b"/", None, 0x4000 | 0x40000, None)  # what is mounted from here on stays here
    call("umount2", mount.encode(), 2)
    call("mount", b"none", mount.encode(), kind.encode(), 0, controller.encode() if kind == "cgroup" else None)

"""


def _hierarchy(controller: str) -> tuple[Path, Path, int]:
    """Return where a controller is mounted, the group to make others in, and the version; skip where there is none."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        own |= dict.fromkeys(names.split(","), path)
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        mount = Path(point)
        if kind == "cgroup" and controller in options.split(","):
            beneath = mount / own.get(controller, "/").lstrip("/")
            return mount, beneath if beneath.is_dir() else mount, 1
        if kind == "cgroup2" and controller in (mount / "cgroup.controllers").read_text().split():
            return mount, mount, 2
    pytest.skip(f"no controller for {controller} is mounted")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        pytest.skip(f"this machine does not let {path.name} be set: {error.strerror}")


@contextmanager
def _limited(controller: str, where: str, limits: Callable[[int], dict[str, str]]) -> Iterator[str]:
    """Make a group with a limit, remove it after the block; yield the call by which a child enters it.

    Args:
        controller: "memory" or "cpu".
        where: "own": the limit is on the process's own group, far below the mount's root. "above": on the group above
            its own, as batch systems make a job and its steps. "container": the process sees its own group as the root.
        limits: Files and their text, by the version of control groups.
    """
    mount, parent, version = _hierarchy(controller)
    job = parent / f"stio-test-{os.getpid()}-{time.monotonic_ns()}"
    step = job / "step"
    if version == 2:
        _write(parent / "cgroup.subtree_control", f"+{controller}")
    try:
        job.mkdir()
    except OSError as error:
        pytest.skip(f"this machine does not let a control group be made: {error.strerror}")
    try:
        if where != "container":
            if version == 2:
                _write(job / "cgroup.subtree_control", f"+{controller}")
            step.mkdir()
        for name, text in limits(version).items():
            limited = (step if where == "own" else job) / name
            if "sw" not in name or limited.exists():  # not every kernel counts what is swapped out
                _write(limited, text)
        joined = job if where == "container" else step
        inside = (str(mount), "cgroup" if version == 1 else "cgroup2", controller)
        arguments = (str(joined / "cgroup.procs"), *(inside if where == "container" else ("", "", "")))
        yield f"join{arguments!r}"
    finally:
        for group in (step, job):
            assert eventually(lambda group=group: _removed(group)), f"{group} cannot be removed"


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # the last process is still on its way out
        return False
    return True


# Fault 249: memory that the control group does not allow.

LIMIT_BYTES = 64 * MIB
LARGE_BYTES = 96 * MIB


def _write_sparse(path: Path, num_tensors: int, nbytes: int, dtype: str, itemsize: int, *, first: int = 0) -> None:
    """Write a file of zeros that takes no room on the disk."""
    header = {
        f"t{first + k}": {
            "dtype": dtype,
            "shape": [nbytes // itemsize],
            "data_offsets": [k * nbytes, (k + 1) * nbytes],
        }
        for k in range(num_tensors)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + num_tensors * nbytes)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a file that does not fit under the limit, and with one that doubles when it is cast."""
    directory = tmp_path_factory.mktemp("large")
    _write_sparse(directory / "large.safetensors", 8, LARGE_BYTES // 8, "F32", 4)
    _write_sparse(directory / "half.safetensors", 8, LARGE_BYTES // 16, "BF16", 2)
    shards = {f"t{k}": f"model-0000{k + 1}-of-00004.safetensors" for k in range(4)}
    (directory / "shards").mkdir()
    for k, name in enumerate(shards.values()):
        _write_sparse(directory / "shards" / name, 1, LARGE_BYTES // 4, "F32", 4, first=k)
    (directory / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for path in directory.iterdir():
        sync.load(path, memory="map")  # its pages in the cache count for the group of this process
    return directory


_IN_MEMORY = """
import ctypes, json, os, sys
import torch
import stio
from stio import sync
from fakes import write_checkpoint
from pathlib import Path

{join}
where, out = Path(sys.argv[1]), Path(sys.argv[2])
large, half = where / "large.safetensors", where / "half.safetensors"
sync.load(write_checkpoint(out / "small", {{"a": torch.ones(4)}}), memory="copy")  # imports what a load imports
whole = {{f"t{{k}}": torch.zeros({numel}) for k in range(8)}} if {is_whole} else {{}}


def meta():
    module = torch.nn.Module()
    with torch.device("meta"):
        for k in range(8):
            module.register_parameter(f"t{{k}}", torch.nn.Parameter(torch.zeros({numel})))
    return module


def stream(**keywords):
    with sync.open(large, memory="copy", **keywords) as checkpoint, checkpoint.stream() as pairs:
        return sum(1 for _ in pairs)


def warm_start():
    with sync.warm_start(meta(), large, memory="copy") as warm:
        warm.done()


def first(count):
    return [f"t{{k}}" for k in range(count)]


def prefetch(source):
    with sync.HostCache(256 << 20, device="cpu") as cache:
        cache.prefetch(source)


def cached(count):
    with sync.HostCache(256 << 20, device="cpu") as cache:
        return len(sync.load(large, cache=cache, names=first(count)))


def snapshot():
    with sync.Saver() as saver:
        saver.save(whole, out / "saved").result()


def snapshots():
    with sync.Saver(max_pending=2, keep_last=1) as saver:
        for k in range(3):
            saver.save(whole, out / f"saved-{{k}}")


before = stio.stats().read_bytes
{call}
try:
    result = {action}
    answer = {{"error": None, "result": result if isinstance(result, int) else None}}
except stio.StioError as error:
    available = getattr(error, "free_bytes", getattr(error, "available_bytes", None))
    answer = {{
        "error": type(error).__name__,
        "message": str(error),
        "needed": getattr(error, "needed_bytes", None),
        "available": available,
    }}
print(json.dumps({{**answer, "read_bytes": stio.stats().read_bytes - before}}))
sys.stdout.flush()
os._exit(0)  # an interpreter that ends writes to the pages that it shares with its parent, and they count too
"""


def _memory_limits(version: int) -> dict[str, str]:
    if version == 1:
        return {"memory.limit_in_bytes": str(LIMIT_BYTES), "memory.memsw.limit_in_bytes": str(LIMIT_BYTES)}
    return {"memory.max": str(LIMIT_BYTES), "memory.swap.max": "0"}


def _run_in_memory(zygote: Any, where: str, action: str, large: Path, out: Path) -> dict[str, Any]:
    """Run an action under the limit, and return what it came to; killed by the kernel fails."""
    with _limited("memory", where, _memory_limits) as join:
        code = _IN_MEMORY.format(
            join=_JOIN,
            call=join,
            action=action,
            numel=LARGE_BYTES // 32,
            is_whole="whole" in action or "snapshot" in action,  # tensors that count for the group of before
        )
        done: Finished = zygote.run(code, large, out)
    assert done.returncode != -9, "killed by the kernel"
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


WHERE = ["own", "above", "container"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("where", "action"),
    [
        *(pytest.param(where, "sync.load(large, memory='copy')", id=f"copy-{where}") for where in WHERE),
        pytest.param("own", "sync.load(half, dtype=torch.float32)", id="cast"),
        pytest.param("own", "sync.load_into(meta(), large, assign=True, memory='copy')", id="load_into-assign"),
        pytest.param("own", "warm_start()", id="warm_start"),
    ],
)
@needs_root
def test_c249_what_cannot_fit_is_refused_before_it_is_read(
    tmp_path: Path, zygote: Any, large: Path, where: str, action: str
) -> None:
    """With what is needed and what is available, as other errors say it of disks and devices."""
    found = _run_in_memory(zygote, where, action, large, tmp_path)
    assert found["error"] is not None, "loaded"
    assert found["needed"] >= LARGE_BYTES
    assert 0 <= found["available"] <= LIMIT_BYTES
    assert found["read_bytes"] == 0
    assert ".safetensors" in found["message"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    "action",
    [
        pytest.param("prefetch(large)", id="prefetch"),
        pytest.param("snapshot()", id="snapshot"),
        pytest.param("sync.convert(large, out / 'converted')", id="convert"),
        pytest.param("sync.save(whole, out / 'saved')", id="save"),
        pytest.param("prefetch(where / 'shards')", id="prefetch-shards"),  # each of them would fit alone
        pytest.param("snapshots()", id="snapshots"),
        pytest.param("cached(8)", id="cache"),
    ],
)
@needs_root
def test_c249_what_holds_memory_is_refused_or_takes_less(tmp_path: Path, zygote: Any, large: Path, action: str) -> None:
    """A cache, a snapshot, a conversion: an error of stio's or a way that needs less, and not the kernel's kill."""
    _run_in_memory(zygote, "above", action, large, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("action", "result"),
    [
        pytest.param("len(sync.load(large, memory='copy', names=['t1', 't2']))", 2, id="names"),
        pytest.param(
            "len(sync.load(large, memory='copy', slices={f't{k}': slice(9) for k in range(8)}))", 8, id="slices"
        ),
        pytest.param("stream(budget_bytes=24 << 20)", 8, id="stream"),
        pytest.param("stream()", 8, id="stream-by-default"),
        pytest.param("len(sync.load(large, memory='copy', names=first(4)))", 4, id="most"),
        pytest.param("len(sync.load(half, dtype=torch.float32, names=first(4)))", 4, id="cast"),
        pytest.param("len(sync.load(half, memory='copy', dtype=torch.float32, names=first(4)))", 4, id="copy-and-cast"),
        pytest.param("cached(4)", 4, id="cache-beside"),
        pytest.param("len(sync.load(large, memory='lazy'))", 8, id="lazy"),
        pytest.param("len(sync.load(large))", 8, id="auto"),
    ],
)
@needs_root
def test_c249_what_fits_is_loaded(tmp_path: Path, zygote: Any, large: Path, action: str, result: int) -> None:
    """What counts is what is held at a time, and pages of the file are none of that."""
    found = _run_in_memory(zygote, "above", action, large, tmp_path)
    assert (found["error"], found["result"]) == (None, result)


@pytest.mark.matrix
@pytest.mark.parametrize("memory", ["auto", "map"])
@pytest.mark.parametrize("where", WHERE)
@needs_root
def test_c249_a_map_is_not_populated_against_the_limit(
    tmp_path: Path, zygote: Any, large: Path, where: str, memory: str
) -> None:
    """What the last pages would displace is read again when it is used: slower than not reading it at all."""
    found = _run_in_memory(zygote, where, f"len(sync.load(large, memory={memory!r}))", large, tmp_path)
    assert (found["error"], found["result"]) == (None, 8)
    assert found["read_bytes"] <= LIMIT_BYTES


# Fault 250: processors that the control group does not allow.

NUM_CORES, NUM_ALLOWED = 16, 2
TOLERANCE = 2
"""What the page cache holds, and a worker that comes too late for work, make a difference of so many threads."""

_WORKERS = """
import ctypes, json, os, sys, threading, time, _thread
import torch
from pathlib import Path

{join}
num_cores, num_allowed = int(sys.argv[1]), int(sys.argv[2])
where = Path(sys.argv[3])
os.cpu_count = lambda: num_cores
os.sched_getaffinity = lambda pid: set(range(num_allowed))
started = []


def counted(start):
    def begin(*arguments, **keywords):
        started.append(arguments)
        return start(*arguments, **keywords)

    return begin


for module in (_thread, threading):
    for name in ("start_new_thread", "_start_new_thread", "start_joinable_thread", "_start_joinable_thread"):
        if hasattr(module, name):
            setattr(module, name, counted(getattr(module, name)))
for name in [name for name in sys.modules if name.partition(".")[0] == "stio"]:
    del sys.modules[name]  # what is asked of the system at the import is asked here again
{call}

import stio
from click.testing import CliRunner
from stio import sync
from stio.cli.main import main
from stio.errors import StorageError
from fakes import FakeDevice, FaultyRoot, MemoryRoot


def threads_of(action):
    started.clear()
    action()
    return len(started)


def readers():
    data = (where / "large.safetensors").read_bytes()
    root = FaultyRoot(MemoryRoot({{"model.safetensors": data}}), gate=threading.Event(), gate_at=2, fail_at=2)

    def load():
        try:
            sync.load(root, device=FakeDevice())
        except StorageError:
            pass

    started.clear()
    thread = threading.Thread(target=load)
    thread.start()
    num_readers, since = 0, time.monotonic()
    # All threads that were started wait at the gate, except those that begin the load and those of the device.
    # A busy machine may take long until the first one does.
    while thread.is_alive() and (
        not num_readers or (num_readers < len(started) - 2 and time.monotonic() < since + 3)
    ):
        if root.num_waiting != num_readers:
            num_readers, since = root.num_waiting, time.monotonic()
        time.sleep(0.001)
    root.gate.set()
    thread.join()
    return num_readers


def verify():
    assert CliRunner().invoke(main, ["verify", str(where / "hashed")]).exit_code == 0


print(json.dumps({{
    "map": threads_of(lambda: sync.load(where / "large.safetensors", memory="map")),
    "device": readers(),
    "verified-load": threads_of(lambda: sync.load(where / "hashed", verify=True)),
    "verify": threads_of(verify),
}}))
sys.stdout.flush()
os._exit(0)
"""


def _cpu_limits(version: int) -> dict[str, str]:
    if version == 1:
        return {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(NUM_ALLOWED * 100_000)}
    return {"cpu.max": f"{NUM_ALLOWED * 100_000} 100000"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with what there is to load and to verify; the page cache holds it."""
    directory = tmp_path_factory.mktemp("checkpoints")
    _write_sparse(directory / "large.safetensors", 24, 8 * MIB, "F32", 4)
    sync.load(directory / "large.safetensors", memory="map")
    tensors = {f"t{k}": torch.full((1 << 18,), float(k)) for k in range(24)}
    sync.save(tensors, directory / "hashed", max_shard_size="1MiB", hash="sha256")
    return directory


Threads = Callable[[int, int, str], dict[str, int]]


@pytest.fixture(scope="module")
def threads(zygote: Any, checkpoints: Path) -> Threads:
    """Return a function that counts the threads which operations start, on a machine that is claimed to be so."""
    known: dict[tuple[int, int, str], dict[str, int]] = {}

    def count(num_cores: int, num_allowed: int, where: str) -> dict[str, int]:
        def run(call: str) -> dict[str, int]:
            code = _WORKERS.format(join=_JOIN, call=call)
            done: Finished = zygote.run(code, num_cores, num_allowed, checkpoints)
            assert done.returncode == 0, done.stderr
            found: dict[str, int] = json.loads(done.stdout)
            return found

        key = (num_cores, num_allowed, where)
        if key not in known:
            if where:
                with _limited("cpu", where, _cpu_limits) as join:
                    known[key] = run(join)
            else:
                known[key] = run("")
        return known[key]

    return count


OPERATIONS = ["map", "device", "verified-load", "verify"]


@pytest.mark.costly("processes of its own")
@pytest.mark.matrix
@pytest.mark.parametrize("where", ["above", "container"])
@pytest.mark.parametrize("operation", OPERATIONS)
@needs_root
def test_c250_a_processor_quota_is_seen(threads: Threads, operation: str, where: str) -> None:
    """Where two processors may be used there are as many workers as on a machine that has two."""
    expected = threads(NUM_ALLOWED, NUM_ALLOWED, "")[operation]
    assert threads(NUM_CORES, NUM_CORES, where)[operation] <= expected + TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
def test_c250_an_affinity_is_seen(threads: Threads, operation: str) -> None:
    """The same where a process may run on two cores only."""
    expected = threads(NUM_ALLOWED, NUM_ALLOWED, "")[operation]
    assert threads(NUM_CORES, NUM_ALLOWED, "")[operation] <= expected + TOLERANCE
