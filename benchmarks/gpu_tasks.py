"""What the entries of the GPU benchmark do in a turn: each task gives the record of one.

Before each turn host memory is touched and freed, the files are brought into the case's state, and the device's memory
is emptied. A clock stops when the device has done all that was asked of it. What was loaded or saved is compared
behind the clock, on the device: after each load by digests, which plain reads gave, and all bits in the first round.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import files, gpu_device, gpu_limits, limits, meters, pagecache
from benchmarks.contestants import import_stio
from benchmarks.gpu_child import Absent, Options
from benchmarks.gpu_contestants import Tensors, finished, prepared, shards_of
from benchmarks.gpu_decoder import Decoder, make_decoder
from benchmarks.gpu_stages import PRIME_BYTES
from benchmarks.runs import Record
from benchmarks.suite import Case, Entry

_SHARD_BYTES = 5_000_000_000
_FREE_BYTES_KEPT = 4_000_000_000
_SAVE_BYTES, _PIN_BYTES, _WAKE_BYTES = 2_000_000_000, 2_000_000_000, 4 << 20
_SECOND_MODEL = 0.6
_COMPARED_BYTES, _PART_WORDS = 64 << 20, 8 << 20
_NUM_SAVES, _NUM_REFRESHES, _NUM_WAITS, _NUM_FORWARDS, _NUM_TOKENS = 3, 4, 200, 5, 512
_DIGESTS = "digests.json"
_BUSY_SECONDS, _ORDER_SECONDS = 0.5, 0.2


class WrongBits(AssertionError):
    """What was loaded or saved is not what it should be."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one entry."""

    options: Options
    case: Case
    entry: Entry
    number: int
    stack: ExitStack
    """What has to be closed when it is over."""

    @property
    def layout(self) -> files.Layout:
        """The model's."""
        return files.llama_layout(self.options.size_bytes)

    @property
    def directory(self) -> Path:
        """The model's checkpoint."""
        return checkpoint(self.options, self.options.size_bytes)

    def load(self, **keywords: Any) -> Callable[[Path], Tensors]:
        """Prepare the entry's contestant."""
        return prepared(self.entry.contestant, self.stack, **keywords)

    def set_state(self, directory: Path) -> None:
        """Bring the files into the case's state: cold or, by default, warm."""
        for path in shards_of(directory):
            if self.case.state == "cold":
                pagecache.evict(path)
            elif pagecache.resident_fraction(path) < 1.0:
                pagecache.fill_by_reads(path)

    def busy_seconds(self, seconds: float) -> float:
        """Give the seconds for which the device is busy: fewer in a rehearsal."""
        return seconds / 10 if gpu_device.is_simulated() else seconds


def prepare(options: Options) -> Record:
    """Choose the device and make the checkpoint; return what a reader must know of both."""
    gpu_device.use(options.device)
    return gpu_device.describe() | {"checkpoint": str(checkpoint(options, options.size_bytes))}


def turn(options: Options, case: Case, entry: Entry, number: int) -> Record:
    """Do one turn."""
    gpu_device.prepare()
    primed = meters.prime_memory(min(PRIME_BYTES, options.size_bytes, meters.available_bytes() // 2))
    with ExitStack() as stack:
        here = Turn(options, case, entry, number, stack)
        record: Record = {"data_bytes": here.layout.data_bytes, "prime_seconds": primed} | _TASKS[entry.task](here)
    for name in ("rate", "first_rate") if record["data_bytes"] else ():
        if (key := name.replace("rate", "seconds")) in record:
            record[name] = record["data_bytes"] / record[key]
    return record


# Checkpoints, and what their tensors should be.


def checkpoint(options: Options, size_bytes: int) -> Path:
    """Give the checkpoint of a size, with the digests of its tensors; make it if it is not there."""
    layout = files.llama_layout(size_bytes)
    parent = Path(options.directory)
    directory = parent / f"checkpoint-{layout.data_bytes}"
    if not directory.exists():
        needed_bytes = layout.data_bytes + min(layout.data_bytes, 2 * _SAVE_BYTES) + _FREE_BYTES_KEPT
        if shutil.disk_usage(parent).free < needed_bytes:
            raise OSError(f"too little is free in {parent} for a checkpoint of {layout.data_bytes / 1e9:.1f} GB")
        partial_directory = directory.with_suffix(".partial")  # of a process that was killed, perhaps
        shutil.rmtree(partial_directory, ignore_errors=True)
        partial_directory.mkdir()
        files.write_sharded(partial_directory, layout, min(_SHARD_BYTES, -(-layout.data_bytes // 3)))
        digests = {name: int(digest(plain)) for name, plain in plain_tensors(shards_of(partial_directory))}
        (partial_directory / _DIGESTS).write_text(json.dumps(digests))
        partial_directory.rename(directory)
    return directory


def plain_tensors(paths: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the bytes of each tensor in the host's memory, by plain reads; each is valid until the next one."""
    buffer = np.empty(0, np.uint8)  # one for all: the first touch of fresh memory costs more than the read
    for path in paths:
        data_start, spans = files.read_header(path)
        with open(path, "rb") as file:
            for name, (start, end) in spans.items():
                if len(buffer) < end - start:
                    buffer = np.empty(end - start, np.uint8)
                gpu_limits.read_block(file.fileno(), buffer[: end - start], data_start + start)
                yield name, torch.from_numpy(buffer[: end - start])


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Give odd numbers, one for each word of a part: so a sum changes with each bit, and when words are exchanged."""
    return torch.arange(1, 2 * _PART_WORDS, 2, dtype=torch.int64, device=device)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Give the sum of all words of 64 bits, each times a weight, modulo 2**64; where the tensor is."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    is_aligned = data.data_ptr() % 8 == data.storage_offset() % 8 == 0
    words = (data if is_aligned else data.clone()).view(torch.int64)
    weights, total = _weights(words.device), torch.zeros((), dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(_PART_WORDS)):
        total += (part * weights[: len(part)]).sum() * (2 * number + 1)
    return total


def verify(tensors: Tensors, directory: Path, *, all_bits: bool = False) -> None:
    """Compare tensors on the device with a checkpoint: by digests, or all bits with those of plain reads.

    Raises:
        WrongBits: A name, a device or a bit is wrong.
    """
    expected: dict[str, int] = json.loads((directory / _DIGESTS).read_text())
    _require_names(tensors, expected)
    if wrong := [name for name, tensor in tensors.items() if tensor.device != gpu_device.device()]:
        raise WrongBits(f"{wrong[0]} is on {tensors[wrong[0]].device}")
    found = torch.stack([digest(tensor) for tensor in tensors.values()]).tolist()
    if wrong := [name for name, number in zip(tensors, found, strict=True) if number != expected[name]]:
        raise WrongBits(f"{wrong[0]}, and {len(wrong) - 1} others: wrong bits")
    if all_bits:
        for name, plain in plain_tensors(shards_of(directory)):
            _require_equal(name, tensors[name], plain)


def _require_names(found: Iterable[str], expected: Iterable[str]) -> None:
    if different := set(found) ^ set(expected):
        raise WrongBits(f"{len(different)} names are missing or too many")


def _require_equal(name: str, tensor: torch.Tensor, plain: torch.Tensor) -> None:
    """Compare all bits, where the tensor is."""
    found, other = (each.detach().reshape(-1).view(torch.uint8) for each in (tensor, plain))
    if len(found) != len(other):
        raise WrongBits(f"{name}: {len(found)} bytes, not {len(other)}")
    for start in range(0, len(found), _COMPARED_BYTES):
        part = slice(start, start + _COMPARED_BYTES)
        if not torch.equal(found[part], other[part].to(found.device)):
            raise WrongBits(f"{name}: wrong bits in bytes {start} to {min(len(found), part.stop)}")


# Loads.


def _load(here: Turn) -> Record:
    """Load as often as the entry says, each time after the tensors of the load before were dropped."""
    is_limit = here.entry.contestant.startswith("raw-")
    trace = import_stio().Trace() if here.entry.options.get("trace") else None
    load = here.load(**({} if trace is None else {"trace": trace}))
    num_loads = here.entry.options.get("loads", 1)
    memory = gpu_device.Memory()
    tensors: Tensors = {}
    seconds: list[float] = []
    figures: Record = {}
    for number in range(num_loads):
        tensors.clear()
        here.set_state(here.directory)
        with meters.busy_thread(here.entry.busy):
            start = time.perf_counter()
            tensors = load(here.directory)
            seconds.append(gpu_device.seconds_since(start))
        figures = figures or memory.figures()
        if not is_limit:
            verify(tensors, here.directory, all_bits=not here.number and number == num_loads - 1)
    if trace is not None:
        trace.save_svg(str(Path(here.options.out) / "timeline.svg"), title=f"stio.load, {seconds[0]:.2f} s")
    if here.entry.contestant == "raw-disk-pinned":
        _verify_slot(shards_of(here.directory)[0])
    return _first_and_later(seconds) | figures


def _first_and_later(seconds: list[float]) -> Record:
    """Give the first time, and the median of the others; of one time both are the same."""
    return {"first_seconds": seconds[0], "seconds": median(seconds[1:] or seconds)}


def _turns(here: Turn) -> Record:
    """Load two models in turns, each dropped before the next: `first_seconds`, and `seconds` of the last load."""
    second = checkpoint(here.options, int(here.options.size_bytes * _SECOND_MODEL))
    load, memory = here.load(), gpu_device.Memory()
    tensors: Tensors = {}
    seconds = []
    for directory in [here.directory, second] * 2:
        tensors.clear()
        here.set_state(directory)
        start = time.perf_counter()
        tensors = load(directory)
        seconds.append(gpu_device.seconds_since(start))
    size_bytes = sum(path.stat().st_size for path in shards_of(second))
    record = {"first_seconds": seconds[0], "seconds": seconds[-1], "data_bytes": size_bytes} | memory.figures()
    verify(tensors, second)
    return record


def _verify_slot(path: Path) -> None:
    """Read a file's beginning past the page cache into a pinned slot; compare it with a plain read, on the device."""
    slot = gpu_device.pinned(limits.READ_BYTES)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        gpu_limits.read_block(descriptor, slot.numpy(), 0)
    finally:
        os.close(descriptor)
    plain = torch.from_numpy(np.fromfile(path, np.uint8, len(slot)))
    _require_equal("slot", slot[: len(plain)].to(gpu_device.device()), plain)


def _cast(here: Turn) -> Record:
    """Load with a cast, twice, each time beside a stream that is busy: its kernels are loaded during the first."""
    stio, other = import_stio(), gpu_device.stream()
    here.set_state(here.directory)
    record: Record = {}
    tensors: Tensors = {}
    for key in ("first_seconds", "seconds"):
        tensors.clear()
        with gpu_device.busy_stream(other, here.busy_seconds(_BUSY_SECONDS)) as busy:
            start = time.perf_counter()
            tensors = finished(stio.load(here.directory, device=gpu_device.device(), dtype=torch.float16))
            gpu_device.recorded(gpu_device.current_stream()).synchronize()
            record[key] = time.perf_counter() - start
            busy.synchronize()
            record["busy_seconds"] = time.perf_counter() - start
    for name, plain in plain_tensors(shards_of(here.directory)):
        # What a cast makes of the payload of a NaN is not said anywhere.
        cast = plain.view(torch.bfloat16).to(gpu_device.device()).half().nan_to_num()
        _require_equal(name, tensors.pop(name).reshape(-1).nan_to_num(), cast)
    return record


# New weights for a module that is there.


def _refresh(here: Turn) -> Record:
    """Load into a module on the device; its parameters keep their memory, and change in the stream's order."""
    module = make_decoder(here.layout).requires_grad_(False).to_empty(device=gpu_device.device())
    state = dict(module.state_dict())
    addresses = {name: tensor.data_ptr() for name, tensor in state.items()}
    refresh = partial(_REFRESHES[here.entry.contestant](module), here.directory)
    memory = gpu_device.Memory()
    seconds: list[float] = []
    figures: Record = {}
    for number in range(_NUM_REFRESHES):
        torch._foreach_zero_(list(state.values()))
        here.set_state(here.directory)
        gpu_device.synchronize()
        start = time.perf_counter()
        refresh()
        seconds.append(gpu_device.seconds_since(start))
        figures = figures or memory.figures()
        verify(state, here.directory, all_bits=not here.number and number == _NUM_REFRESHES - 1)
    if not here.number:
        _verify_order(here, state, refresh)
    if {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} != addresses:
        raise WrongBits("parameters lie elsewhere now")
    return _first_and_later(seconds) | figures


def _verify_order(here: Turn, state: Tensors, refresh: Callable[[], None]) -> None:
    """Require that what was queued before a refresh sees the old weights, and what is queued behind it the new."""
    names = sorted(state)[:: max(1, len(state) // 3)]
    torch._foreach_zero_(list(state.values()))
    gpu_device.synchronize()
    gpu_device.keep_busy(here.busy_seconds(_ORDER_SECONDS))
    old = {name: state[name].clone() for name in names}
    refresh()
    new = {name: state[name].clone() for name in names}
    gpu_device.synchronize()
    for name, plain in plain_tensors(shards_of(here.directory)):
        if name in new:
            _require_equal(name, new[name], plain)
    for name in names:
        if old[name].view(torch.int16).any():
            raise WrongBits(f"{name}: what was queued before the refresh saw new weights")


def _stio_refresh(module: Decoder) -> Callable[[Path], None]:
    stio = import_stio()

    def refresh(directory: Path) -> None:
        finished(stio.load_into(module, directory))

    return refresh


def _prefetch_refresh(module: Decoder) -> Callable[[Path], None]:
    load = prepared("safetensors-prefetch", ExitStack())

    def refresh(directory: Path) -> None:
        module.load_state_dict(load(directory))

    return refresh


def _dcp_refresh(module: Decoder) -> Callable[[Path], None]:
    import torch.distributed.checkpoint as dcp

    if not hasattr(dcp, "HuggingFaceStorageReader"):
        raise Absent("this torch's DCP reads no safetensors")

    def refresh(directory: Path) -> None:
        dcp.load(module.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(str(directory)), no_dist=True)

    return refresh


_REFRESHES = {"stio-refresh": _stio_refresh, "prefetch-copy": _prefetch_refresh, "dcp-copy": _dcp_refresh}


# First forwards.


def _forward(here: Turn) -> Record:
    """Take the time from the start to the end of a first forward: `seconds`; `load_seconds` to the last tensor."""
    module = make_decoder(here.layout).requires_grad_(False)
    tokens = torch.randint(0, module.lm_head.out_features, (1, _NUM_TOKENS), device=gpu_device.device())
    with ThreadPoolExecutor(1) as thread:  # cuBLAS has a handle for each thread: all forwards run on this one

        def run_forward(module: Decoder) -> None:
            def run() -> None:
                with torch.inference_mode():
                    module(tokens)
                gpu_device.synchronize()

            thread.submit(run).result()

        run_forward(_small_decoder(here.layout))
        here.set_state(here.directory)
        memory = gpu_device.Memory()
        record = _FORWARDS[here.entry.contestant](here, module, run_forward)
        record |= memory.figures()
    verify(dict(module.state_dict()), here.directory, all_bits=not here.number)
    return record


def _small_decoder(layout: files.Layout) -> Decoder:
    """Make the model with one layer: its forward loads kernels and cuBLAS, which is no loader's fault."""
    short = [tensor for tensor in layout.tensors if ".layers." not in tensor.name or ".layers.0." in tensor.name]
    return make_decoder(files.Layout(layout.label, tuple(short))).to_empty(device=gpu_device.device())


def _warm_start(here: Turn, module: Decoder, run_forward: Callable[[Decoder], None]) -> Record:
    stio = import_stio()

    async def start_warm() -> Record:
        start = time.perf_counter()
        async with stio.warm_start(module, here.directory, device=gpu_device.device()) as warm:
            await asyncio.to_thread(run_forward, module)
            seconds = time.perf_counter() - start
            await warm.done()
            return {"seconds": seconds, "load_seconds": gpu_device.seconds_since(start)}

    return finished(start_warm())


def _load_then_forward(here: Turn, module: Decoder, run_forward: Callable[[Decoder], None]) -> Record:
    stio = import_stio()
    start = time.perf_counter()
    finished(stio.load_into(module, here.directory, device=gpu_device.device(), assign=True))
    load_seconds = gpu_device.seconds_since(start)
    run_forward(module)
    return {"seconds": time.perf_counter() - start, "load_seconds": load_seconds}


def _safetensors_then_forward(here: Turn, module: Decoder, run_forward: Callable[[Decoder], None]) -> Record:
    load = prepared("safetensors", here.stack)
    start = time.perf_counter()
    module.load_state_dict(load(here.directory), assign=True)
    load_seconds = gpu_device.seconds_since(start)
    run_forward(module)
    return {"seconds": time.perf_counter() - start, "load_seconds": load_seconds}


def _forward_alone(here: Turn, module: Decoder, run_forward: Callable[[Decoder], None]) -> Record:
    """Put the weights there by plain copies; a first forward, and the median of later ones."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    plain = plain_tensors(shards_of(here.directory))
    tensors = {name: data.to(gpu_device.device()).view(torch.bfloat16).view(shapes[name]) for name, data in plain}
    module.load_state_dict(tensors, assign=True)
    seconds = []
    for _ in range(_NUM_FORWARDS):
        start = time.perf_counter()
        run_forward(module)
        seconds.append(time.perf_counter() - start)
    return {"first_seconds": seconds[0], "seconds": median(seconds[1:])}


_FORWARDS = {
    "stio-warm": _warm_start,
    "stio-then": _load_then_forward,
    "safetensors-then": _safetensors_then_forward,
    "decoder": _forward_alone,
}


# Saves: the clock runs until a change in place, queued as soon as the contestant allows it, has been made.


Finish = Callable[[], Awaitable[None]]
Begin = Callable[[Path], Awaitable[Finish]]
"""Returns when the tensors may change; what it gives waits until the save is done."""


@asynccontextmanager
async def _stio_saver(tensors: Tensors) -> AsyncIterator[Begin]:
    async with import_stio().Saver() as saver:

        async def begin(path: Path) -> Finish:
            pending = await saver.save(tensors, path)

            async def finish() -> None:
                await pending

            return finish

        yield begin


@asynccontextmanager
async def _dcp(tensors: Tensors) -> AsyncIterator[Begin]:
    """Save as DCP does for a GPU: pinned memory, used again, copies that do not block, on the stager's thread."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    on_cuda = gpu_device.device().type == "cuda"  # both need CUDA
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=on_cuda, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=on_cuda
        )
    )
    # In torch 2.11 `DefaultStager` closes its `StateDictStager` after each staging. That drops the pinned memory, and
    # clears the table of copy functions, so the second save fails with KeyError(type). It serves several saves, as its
    # documentation says and as newer releases do, if the inner stager is closed at the end alone.
    inner: Any = stager._state_dict_stager
    close, inner.close = inner.close, lambda: None

    async def begin(path: Path) -> Finish:
        writer = dcp.FileSystemWriter(str(path))
        response = dcp.async_save(tensors, storage_writer=writer, async_stager=stager, no_dist=True)
        await asyncio.to_thread(response.staging_completion.result)

        async def finish() -> None:
            await asyncio.to_thread(response.upload_completion.result)

        return finish

    try:
        yield begin
    finally:
        stager.close()
        close()


@asynccontextmanager
async def _bus(tensors: Tensors) -> AsyncIterator[Begin]:
    copy = gpu_limits.prepare_bus(to_device=False)

    async def nothing() -> None:
        """There is nothing to wait for."""

    async def begin(path: Path) -> Finish:
        copy(sum(tensor.nbytes for tensor in tensors.values()))
        return nothing

    yield begin


_SAVERS = {
    "stio-saver": _stio_saver,
    "dcp": _dcp,
    "raw-d2h": _bus,
}


def _save(here: Turn) -> Record:
    """Save some times; give `first_seconds`, `seconds` until they had changed, `done_seconds` to the end."""
    layout = files.llama_layout(min(here.options.size_bytes, _SAVE_BYTES))
    directory = Path(here.options.directory) / "saves"
    here.stack.callback(shutil.rmtree, directory, ignore_errors=True)
    directory.mkdir(exist_ok=True)
    torch.manual_seed(1)
    tensors = {
        tensor.name: torch.randint(-(2**15), 2**15, tensor.shape, dtype=torch.int16, device=gpu_device.device())
        for tensor in layout.tensors
    }
    return {"data_bytes": layout.data_bytes} | finished(_save_times(here, tensors, directory))


async def _save_times(here: Turn, tensors: Tensors, directory: Path) -> Record:
    blocked, done = [], []
    memory = gpu_device.Memory()
    async with _SAVERS[here.entry.contestant](tensors) as begin:
        for number in range(_NUM_SAVES):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            path = directory / f"save-{number}"
            gpu_device.synchronize()
            start = time.perf_counter()
            finish = await begin(path)
            torch._foreach_neg_(list(tensors.values()))
            gpu_device.recorded(gpu_device.current_stream()).synchronize()
            blocked.append(time.perf_counter() - start)
            await finish()
            done.append(time.perf_counter() - start)
        figures = memory.figures()
    torch._foreach_neg_(list(tensors.values()))  # as they were saved
    for name, saved in _saved(here.entry.contestant, path, tensors):
        _require_equal(name, tensors[name], saved)
    return _first_and_later(blocked) | {"done_seconds": median(done[1:])} | figures


def _saved(contestant: str, path: Path, tensors: Tensors) -> Iterable[tuple[str, torch.Tensor]]:
    """Give what a save has written, read without stio; nothing for a limit, which writes nothing."""
    if contestant == "raw-d2h":
        return
    if contestant == "dcp":
        import torch.distributed.checkpoint as dcp

        found = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in tensors.items()}
        dcp.load(found, storage_reader=dcp.FileSystemReader(str(path)), no_dist=True)
        yield from found.items()
        return
    paths = sorted(path.glob("*.safetensors"))
    _require_names(tensors, [name for each in paths for name in files.read_header(each)[1]])
    yield from plain_tensors(paths)


# Pinning, and waiting.


class Stalls:
    """How late two other threads come inside the block: one sleeps, one launches and waits on its own stream."""

    def __init__(self) -> None:
        self._late: dict[str, list[float]] = {"python": [], "launch": []}

    def __enter__(self) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=target) for target in (self._sleep, self._launch)]
        started = threading.Barrier(3, timeout=30)
        self._started = started
        for thread in self._threads:
            thread.start()
        started.wait()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _sleep(self) -> None:
        self._started.wait()
        while not self._stop.is_set():
            due = time.perf_counter() + meters.BEAT_SECONDS
            time.sleep(meters.BEAT_SECONDS)
            self._late["python"].append(time.perf_counter() - due)

    def _launch(self) -> None:
        stream = gpu_device.stream()
        with gpu_device.on(stream):
            small = torch.zeros(1024, device=gpu_device.device())
            small.add_(1)
            stream.synchronize()
            self._started.wait()
            while not self._stop.is_set():
                start = time.perf_counter()
                small.add_(1)
                gpu_device.recorded(stream).synchronize()
                self._late["launch"].append(time.perf_counter() - start)
                time.sleep(meters.BEAT_SECONDS)

    def figures(self) -> Record:
        """Give the percentiles, if there was such a block."""
        found = {name: meters.percentiles(late) for name, late in self._late.items()}
        return {"stalls": found} if self._late["launch"] else {}


_all_pinned: list[Any] = []
"""Held, or torch would give the next turn the same memory, pinned already."""


def _pin(here: Turn) -> Record:
    """Pin memory: `seconds`, and by how much other threads come late."""
    size_bytes = min(_PIN_BYTES, here.options.size_bytes // 8)
    how = here.entry.contestant
    if how == "pin-registered":
        gpu_device.cuda_runtime()
    buffer = limits.huge_buffer(size_bytes if how in ("pin-touch", "pin-registered") else 0)
    allocate = import_stio().device.pinned.PinnedAllocator(gpu_device.device()) if how == "pin-stio" else None
    if how == "pin-registered":
        buffer[:] = 1
    stalls = Stalls()
    with ExitStack() as held, stalls:
        start = time.perf_counter()
        if how == "pin-none":
            time.sleep(here.busy_seconds(_BUSY_SECONDS))
        elif how == "pin-touch":
            buffer[:: meters.PAGE_BYTES] = 1
        elif how == "pin-torch":
            _all_pinned.append(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True))
        elif allocate is not None:
            _all_pinned.append(allocate(size_bytes))
        else:
            held.enter_context(gpu_device.registered(buffer))
        seconds = time.perf_counter() - start
        time.sleep(0.01)  # so that each thread has come back from what it was in
    record: Record = {"seconds": seconds, "data_bytes": 0} | stalls.figures()
    if how != "pin-none":
        record |= {"data_bytes": size_bytes, "seconds_per_gb": seconds / size_bytes * 1e9}
    return record


def _wakeup(here: Turn) -> Record:
    """Wait for copies: `seconds` is the median from the queueing of one to the return of the call that waits."""
    host, stream = gpu_device.pinned(_WAKE_BYTES), gpu_device.stream()
    there = torch.empty_like(host, device=gpu_device.device())
    waits = []
    with meters.busy_thread(here.entry.busy), gpu_device.on(stream):
        for _ in range(_NUM_WAITS // 10 if here.options.quick else _NUM_WAITS):
            start = time.perf_counter()
            there.copy_(host, non_blocking=True)
            event = gpu_device.recorded(stream, sleeps=here.entry.contestant == "wake-sleep")
            if here.entry.contestant == "wake-query":
                while not event.query():
                    pass
            else:
                event.synchronize()
            waits.append(time.perf_counter() - start)
    found = meters.percentiles(waits)
    return {"seconds": found["p50"], "p99": found["p99"], "max": found["max"], "data_bytes": _WAKE_BYTES}


def _kernels(here: Turn) -> Record:
    """Launch kernels that the process has not used, beside a stream that is busy; and again."""
    stream, record = gpu_device.stream(), {"data_bytes": 0}
    with gpu_device.on(gpu_device.stream()):
        numbers = torch.ones(1024, device=gpu_device.device())
        order = torch.zeros(1024, dtype=torch.int64, device=gpu_device.device())
        torch.empty(1 << 20, device=gpu_device.device())  # torch has memory for this stream by then
        if here.entry.options["environment"]["CUDA_MODULE_LOADING"] == "EAGER":
            gpu_device.cuda_runtime()
        for key in ("first_seconds", "seconds"):
            with gpu_device.busy_stream(stream, here.busy_seconds(_BUSY_SECONDS)) as busy:
                start = time.perf_counter()
                found = [numbers.bfloat16(), numbers.neg(), numbers.sin(), numbers.cumsum(0), numbers.softmax(0)]
                found += [numbers.index_select(0, order), numbers.logical_not()]
                gpu_device.recorded(gpu_device.current_stream()).synchronize()
                record[key] = time.perf_counter() - start
                busy.synchronize()
                record["busy_seconds"] = time.perf_counter() - start
            del found
    return record


_TASKS: dict[str, Callable[[Turn], Record]] = {
    "load": _load,
    "turns": _turns,
    "refresh": _refresh,
    "forward": _forward,
    "save": _save,
    "pin": _pin,
    "wakeup": _wakeup,
    "kernels": _kernels,
    "cast": _cast,
}
