"""Compare two source trees of stio, measured in pairs: `python -m benchmarks.compare --before DIR --after DIR`.

Each round starts one fresh process for each tree, with that tree first on its path. The runner then goes through the
cases: one process measures while the other waits, and which of them is first changes from case to case and from round
to round. So the two figures of a pair are seconds apart, read the same file, and write to the same directory. The
table shows the median of the paired ratios after / before: above 1 the second tree is slower. All single figures go
to a JSON file. The cases use public names only, so that trees with different modules inside can be compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from asyncio import Runner
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import files, meters, pagecache

ROOT = Path(__file__).resolve().parent.parent
SIDES = ("before", "after")
SIZE_BYTES = 400_000_000
MANY, MANY_BYTES = 10_000, 4096
SHARD_BYTES = 100_000_000
SMALL_BYTES = 1_000_000
SLOWER, FEWEST_PAIRS = 1.05, 6
"""A median ratio above it is marked: `SLOWER` if the whole interval of enough pairs is above 1, else `slower?`."""

Figures = dict[str, float]


@dataclass
class Bench:
    """What the cases of one process share."""

    stio: Any
    directory: Path
    """With the files to load; what is saved goes into its folder `saves`."""

    size_bytes: int
    loop: Runner = field(default_factory=Runner)

    def __post_init__(self) -> None:
        import torch

        self.torch = torch

    def wait(self, coroutine: Any) -> Any:
        """Run a coroutine on the one event loop."""
        return self.loop.run(coroutine)

    @property
    def layouts(self) -> dict[str, files.Layout]:
        """The tensors of each kind of checkpoint, by the name of its file."""
        return layouts(self.size_bytes)

    def module(self, name: str, device: str) -> Any:
        """Make a module with the parameters of a checkpoint."""
        root = self.torch.nn.Module()
        for tensor in self.layouts[name].tensors:
            *parents, last = tensor.name.split(".")
            owner = root
            for part in parents:
                if not hasattr(owner, part):
                    owner.add_module(part, self.torch.nn.Module())
                owner = getattr(owner, part)
            data = self.torch.empty(tensor.shape, dtype=self.torch.bfloat16, device=device)
            owner.register_parameter(last, self.torch.nn.Parameter(data, requires_grad=False))
        return root

    def tensors(self, name: str) -> dict[str, Any]:
        """Make the tensors of a checkpoint, filled and thereby touched."""
        layout = self.layouts[name]
        made = {tensor.name: self.torch.empty(tensor.shape, dtype=self.torch.bfloat16) for tensor in layout.tensors}
        files.fill_arrays(array for _, array in meters.tensor_arrays(made))
        return made

    @cached_property
    def model(self) -> dict[str, Any]:
        """The tensors of the model."""
        return self.tensors("model")

    @cached_property
    def many(self) -> dict[str, Any]:
        """Many small tensors."""
        return self.tensors("many")

    @cached_property
    def state(self) -> dict[str, Any]:
        """A nested state as an optimizer's: a step and two moments for each of 5,000 parameters."""
        each = lambda number: {  # noqa: E731
            "step": self.torch.tensor(float(number)),
            "exp_avg": self.torch.full((64,), float(number)),
            "exp_avg_sq": self.torch.full((64,), 2.0 * number),
        }
        return {"state": {number: each(number) for number in range(5000)}, "param_groups": [{"lr": 3e-4}]}


def layouts(size_bytes: int) -> dict[str, files.Layout]:
    """Give the tensors of each kind of checkpoint."""
    return {
        "model": files.llama_layout(size_bytes),
        "sharded": files.llama_layout(size_bytes),
        "many": files.many_layout(MANY, MANY_BYTES),
        "small": files.bert_layout("small", 64, 2, 6_000),
    }


@dataclass(frozen=True, slots=True)
class Case:
    """One case."""

    name: str
    text: str
    work: Callable[..., Any]
    """What is timed: of (bench, path) in a load, of (bench, tensors, path) in a save."""

    source: str = "model"
    """The checkpoint, a key of `layouts`, or `state`."""

    state: str = "cold"
    """Of the files of a load: cold or warm."""

    turns: int = 2
    """Pairs of measurements in a round."""

    calls: int = 1
    """Calls in one measurement of a load, for calls too short for one: the figure is their mean."""

    busy: bool = False
    """Beside a thread that counts in pure Python."""

    setup: Callable[[Bench], Any] | None = None
    """Makes the third argument of `work`, before the clock starts."""


def measure_load(bench: Bench, case: Case, verify: bool) -> Figures:
    """Time from the call until a byte of every page of the result has been read; a busy thread ends before that."""
    path = bench.directory / _file_name(case.source)
    if case.source == "state" and not path.exists():
        bench.stio.sync.save_state(bench.state, path)
    parts = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    extra = () if case.setup is None else (case.setup(bench),)
    gc.collect()
    num_threads, seconds = _num_threads(), 0.0
    for part in parts:
        _set_state(part, case.state)
    meters.prime_memory(sum(part.stat().st_size for part in parts))
    for _ in range(case.calls):
        with meters.busy_thread(case.busy):
            started = time.perf_counter()
            result = case.work(bench, path, *extra)
            seconds += time.perf_counter() - started
        started = time.perf_counter()
        checksum = result if isinstance(result, int) else _touch(result)
        seconds += time.perf_counter() - started
        del result
    del extra
    _wait_for_threads(num_threads)
    return {"seconds": seconds / case.calls, "checksum": checksum}


def measure_save(bench: Bench, case: Case, verify: bool) -> Figures:
    """Time saves into fresh places until they are durable; of a `Saver`, those after its first, and their snapshots."""
    saves = bench.directory / "saves"
    tensors = getattr(bench, case.source)
    saves.mkdir()
    gc.collect()
    meters.prime_memory(2 * bench.size_bytes if case.source == "model" else 0)
    with meters.busy_thread(case.busy):
        started = time.perf_counter()
        figures = case.work(bench, tensors, saves / "0") or {"seconds": time.perf_counter() - started}
    if verify:
        figures["checksum"] = sum(zlib.crc32(part.read_bytes()) for part in saves.rglob("*.safetensors"))
    files.discard(saves)
    return dict(figures)


def _set_state(path: Path, state: str) -> None:
    if state == "cold":
        pagecache.evict(path)
    elif pagecache.resident_fraction(path) < 1:
        pagecache.fill_by_reads(path)


def _touch(tensors: Any) -> int:
    return meters.touch_all(meters.tensor_arrays(tensors), "page")


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _wait_for_threads(most: int) -> None:
    """Wait until large mappings are unmapped, which stio does on a thread."""
    deadline = time.perf_counter() + 0.3
    while _num_threads() > most and time.perf_counter() < deadline:
        time.sleep(0.005)


def _load(**options: Any) -> Callable[[Bench, Path], Any]:
    return lambda bench, path: bench.wait(bench.stio.load(path, **options))


def _load_blocking(bench: Bench, path: Path) -> Any:
    return bench.stio.sync.load(path)


def _load_fake_device(bench: Bench, path: Path) -> int:
    fakes = import_module("fakes" if find_spec("fakes") is not None else "stio.testing")  # earlier trees
    tensors = bench.wait(bench.stio.load(path, device=fakes.FakeDevice()))
    return len(tensors)


def _names(bench: Bench, path: Path) -> int:
    async def call() -> int:
        async with bench.stio.open(path) as checkpoint:
            return len(list(checkpoint.keys()))

    return int(bench.wait(call()))


def _reads(bench: Bench, path: Path) -> Any:
    """Read each tensor of its own, and eight rows of each matrix."""

    async def call() -> Any:
        found = {}
        async with bench.stio.open(path) as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 - no mapping
                found[name] = await checkpoint.read(name)
                if len(checkpoint.info(name).shape) > 1:
                    found[f"{name} rows"] = (await checkpoint.read(name, np.s_[8:16])).contiguous()
        return found

    return bench.wait(call())


def _stream(**options: Any) -> Callable[[Bench, Path], int]:
    async def call(bench: Bench, path: Path) -> int:
        sums = {}
        async with bench.stio.open(path, **options) as checkpoint:
            async for name, tensor in checkpoint.stream():
                sums[name] = _touch({name: tensor})
        return meters.combine(sums)

    return lambda bench, path: int(bench.wait(call(bench, path)))


def _into(*, assign: bool = False) -> Callable[[Bench, Path, Any], Any]:
    def work(bench: Bench, path: Path, module: Any) -> Any:
        bench.wait(bench.stio.load_into(module, path, assign=assign))
        return module.state_dict()

    return work


def _from_cache(bench: Bench, path: Path, cache: Any) -> Any:
    return bench.wait(bench.stio.load(path, cache=cache))


def _filled_cache(bench: Bench) -> Any:
    cache = bench.stio.HostCache(4 * bench.size_bytes)
    bench.wait(bench.stio.load(bench.directory / _file_name("model"), cache=cache))
    return cache


def _warm_start(bench: Bench, path: Path, module: Any) -> Any:
    async def call() -> Any:
        async with bench.stio.warm_start(module, path) as warm:
            await warm.done()
        return module.state_dict()

    return bench.wait(call())


def _load_state(bench: Bench, path: Path) -> int:
    return len(bench.wait(bench.stio.load_state(path))["state"])


def _save(suffix: str = "", **options: Any) -> Callable[[Bench, Any, Path], None]:
    def work(bench: Bench, tensors: Any, path: Path) -> None:
        bench.wait(bench.stio.save(tensors, path.with_suffix(suffix), **options))

    return work


def _save_blocking(bench: Bench, tensors: Any, path: Path) -> None:
    bench.stio.sync.save(tensors, path.with_suffix(".safetensors"))


def _save_over(bench: Bench, tensors: Any, path: Path) -> Figures:
    """Save into a directory that holds a checkpoint: the new index is the commit."""

    async def call() -> float:
        await bench.stio.save(tensors, path)
        started = time.perf_counter()
        await bench.stio.save(tensors, path)
        return time.perf_counter() - started

    return {"seconds": bench.wait(call())}


def _saver(**options: Any) -> Callable[[Bench, Any, Path], Figures]:
    async def call(bench: Bench, tensors: Any, path: Path) -> Figures:
        later: list[Figures] = []
        async with bench.stio.Saver(**options) as saver:
            for number in range(3):
                target = path / f"step-{number}"
                started = time.perf_counter()
                pending = await saver.save(tensors, target)
                snapshot = time.perf_counter() - started
                await pending
                later.append({"snapshot": snapshot, "durable": time.perf_counter() - started})
        return {key: median(each[key] for each in later[1:]) for key in later[0]}

    def work(bench: Bench, tensors: Any, path: Path) -> Figures:
        path.mkdir()
        figures: Figures = bench.wait(call(bench, tensors, path))
        return figures

    return work


def _save_state(bench: Bench, state: Any, path: Path) -> None:
    bench.wait(bench.stio.save_state(state, path.with_suffix(".safetensors")))


def _on_meta(bench: Bench) -> Any:
    return bench.module("model", "meta")


def _on_cpu(bench: Bench) -> Any:
    return bench.module("model", "cpu")


_WARM = {"state": "warm", "turns": 3}
_MANY = {"source": "many", "state": "warm", "turns": 4}
_SMALL = {"source": "small", "state": "warm", "turns": 3, "calls": 40}
_SHARDED = {"max_shard_size": SHARD_BYTES}
_SMALL_BUDGET = {"budget_bytes": 64 << 20}

LOADS = (
    Case("cold", "one file, cold", _load()),
    Case("cold-copy", 'the same, memory="copy"', _load(memory="copy")),
    Case("cold-sharded", "a directory of shards, cold", _load(), source="sharded"),
    Case("cold-many", "10,000 tensors, cold", _load(), source="many", turns=3),
    Case("cold-stream", "stream of one file, cold", _stream()),
    Case("warm", "one file, warm", _load(), state="warm", turns=5),
    Case("warm-blocking", "the same by stio.sync", _load_blocking, state="warm", turns=5),
    Case("warm-map", 'the same, memory="map"', _load(memory="map"), state="warm", turns=5),
    Case("warm-lazy", 'the same, memory="lazy"', _load(memory="lazy"), state="warm", turns=5),
    Case("warm-copy", 'the same, memory="copy"', _load(memory="copy"), **_WARM),
    Case("warm-busy", "beside a busy Python thread", _load(), **_WARM, busy=True),
    Case("warm-stream", "stream, budget 64 MiB", _stream(**_SMALL_BUDGET), **_WARM),
    Case("warm-reads", "each tensor and rows of it by read()", _reads, **_WARM),
    Case("warm-device", "to a fake device", _load_fake_device, **_WARM),
    Case("into", "load_into, copied into parameters", _into(), **_WARM, setup=_on_cpu),
    Case("into-assign", "load_into with assign", _into(assign=True), **_WARM, setup=_on_meta),
    Case("warm-start", "warm_start until done", _warm_start, **_WARM, setup=_on_meta),
    Case("host-cache", "out of a HostCache", _from_cache, state="warm", calls=3, setup=_filled_cache),
    Case("many", "10,000 tensors, warm", _load(), **_MANY),
    Case("many-stream", "stream of them", _stream(), **_MANY),
    Case("many-names", "open and list their names", _names, **_MANY),
    Case("many-busy", "10,000, beside a busy thread", _load(), **_MANY, busy=True),
    Case("small", "1 MB, a call", _load(), **_SMALL),
    Case("small-blocking", "1 MB, a call of stio.sync", _load_blocking, **_SMALL),
    Case("state", "load_state of 15,000 tensors", _load_state, source="state", **_WARM),
)
SAVES = (
    Case("save-file", "one file", _save(".safetensors")),
    Case("save-blocking", "one file by stio.sync", _save_blocking),
    Case("save-sharded", "shards of 100 MB", _save(**_SHARDED)),
    Case("save-budget", "the same, budget 64 MiB", _save(**_SHARDED, **_SMALL_BUDGET)),
    Case("save-over", "over a checkpoint, 10,000 tensors", _save_over, source="many"),
    Case("save-many", "10,000 tensors, one file", _save(".safetensors"), source="many", turns=3),
    Case("saver", "a Saver's later saves", _saver(), turns=2),
    Case("saver-busy", "the same beside a busy thread", _saver(), turns=2, busy=True),
    Case("save-state", "save_state of 15,000 tensors", _save_state, source="state"),
)


def _file_name(source: str) -> str:
    return "sharded" if source == "sharded" else f"{source}.safetensors"


def serve(options: argparse.Namespace) -> None:
    """Measure the cases whose names come by stdin, one a line; answer each with a line of JSON."""
    warnings.filterwarnings("ignore", message=".*event loop.*")
    sys.path.insert(0, str(options.child))
    sys.path.append(str(options.child / "tests"))  # for the fake device
    answers, sys.stdout = sys.stdout, sys.stderr
    import stio
    import stio.sync

    if not Path(stio.__file__).is_relative_to(options.child):
        raise SystemExit(f"stio came from {stio.__file__}")
    bench = Bench(stio, options.dir, options.size_bytes)
    cases = {case.name: case for case in LOADS + SAVES}
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        name, verify = json.loads(line)
        case = cases[name]
        try:
            found: dict[str, Any] = dict((measure_load if case in LOADS else measure_save)(bench, case, verify))
        except Exception as error:  # noqa: BLE001 - a failure is a result
            shutil.rmtree(options.dir / "saves", ignore_errors=True)
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers, flush=True)
    os._exit(0)


class Side:
    """The process of one tree in one round."""

    def __init__(self, name: str, tree: Path, options: argparse.Namespace) -> None:
        self.name = name
        command = [sys.executable, "-m", "benchmarks.compare", "--child", str(tree), "--dir", str(options.dir)]
        self._process = subprocess.Popen(
            [*command, "--size-bytes", str(options.size_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(tree)},
        )

    def answer(self) -> dict[str, Any]:
        """Wait for the next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, case: Case, verify: bool) -> dict[str, Any]:
        """Have a case measured."""
        assert self._process.stdin is not None
        print(json.dumps([case.name, verify]), file=self._process.stdin, flush=True)
        return self.answer()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def run(cases: list[Case], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a record for each case, tree and turn of each round."""
    trees = dict(zip(SIDES, (options.before, options.after), strict=True))
    for number in range(options.rounds):
        sides = [Side(name, tree, options) for name, tree in trees.items()]
        try:
            for side in sides:
                side.answer()
            turns = [(case, turn) for case in cases for turn in range(case.turns)]
            for place, (case, turn) in enumerate(turns):
                for side in sides if (number + place) % 2 == 0 else sides[::-1]:
                    found = side.measure(case, verify=number == turn == 0)
                    yield {"case": case.name, "side": side.name, "pair": number * case.turns + turn, **found}
        finally:
            for side in sides:
                side.end()


def make_files(options: argparse.Namespace, cases: list[Case]) -> None:
    """Write the checkpoints that the cases load, without stio; the first tree writes the nested state."""
    for name in {case.source for case in cases if case in LOADS} - {"state"}:
        path = options.dir / _file_name(name)
        if name == "sharded":
            path.mkdir()
            files.write_sharded(path, layouts(options.size_bytes)[name], SHARD_BYTES)
        else:
            files.write_file(path, layouts(options.size_bytes)[name])


def table(cases: list[Case], records: list[dict[str, Any]]) -> str:
    """Give a line for each figure of each case."""
    head = f"{'case':16} {'what':46} {'before, s':>10} {'after, s':>10} {'ratio':>6}   95 %             min to max"
    lines = [head]
    for case in cases:
        own = [record for record in records if record["case"] == case.name]
        if errors := [record for record in own if "error" in record]:
            lines.append(f"{case.name:16} FAILED {errors[0]['side']}: {errors[0]['error']}")
            continue
        for key in [key for key in own[0] if key not in ("case", "side", "pair", "checksum")] if own else []:
            sides = [{each["pair"]: each[key] for each in own if each["side"] == name} for name in SIDES]
            lines.append(_row(case, key, *sides))
        if len(checksums := {record["checksum"] for record in own if "checksum" in record}) > 1:
            lines.append(f"{case.name:16} DIFFERENT BYTES: {sorted(checksums)}")
    return "\n".join(lines)


def _row(case: Case, key: str, before: dict[int, float], after: dict[int, float]) -> str:
    ratios = np.array([after[pair] / before[pair] for pair in sorted(before.keys() & after.keys())])
    if not ratios.size:
        return f"{case.name:16} no pair"
    picks = np.random.default_rng(0).integers(0, len(ratios), (10_000, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), [2.5, 97.5])
    middle = float(np.median(ratios))
    is_sure = low > 1 and len(ratios) >= FEWEST_PAIRS
    mark = "" if middle <= SLOWER else "  SLOWER" if is_sure else "  slower?"
    return (
        f"{case.name:16} {case.text if key == 'seconds' else f'{case.text}: {key}':46} {median(before.values()):10.4f} "
        f"{median(after.values()):10.4f} {middle:6.3f}   {low:.3f} to {high:.3f}   "
        f"{ratios.min():.3f} to {ratios.max():.3f} ({len(ratios)}){mark}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="benchmarks.compare", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("groups", nargs="*", choices=("load", "save", []), help="only one of them")
    parser.add_argument("--before", type=Path, help="a source tree: the directory that holds `stio/`")
    parser.add_argument("--after", type=Path, default=ROOT, help="another one; this one by default")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of processes")
    parser.add_argument(
        "--cases", nargs="+", metavar="CASE", help=f"of: {', '.join(case.name for case in (*LOADS, *SAVES))}"
    )
    parser.add_argument("--size-bytes", type=int, default=SIZE_BYTES, help=f"of the model, {SIZE_BYTES} by default")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="on a real disk, for the files")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "compare.json", help="for all single figures")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return serve(options)
    cases = {"load": LOADS, "save": SAVES}
    groups = [case for name in options.groups or cases for case in cases[name]]
    wanted = [case for case in groups if not options.cases or case.name in options.cases]
    if options.before is None or not wanted:
        parser.error("--before DIR is missing" if wanted else "no such case")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the files and the processes are removed
    options.before, options.after = options.before.resolve(), options.after.resolve()
    options.dir.mkdir(exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    head = {"before": str(options.before), "after": str(options.after), "size_bytes": options.size_bytes}
    records = []
    with tempfile.TemporaryDirectory(prefix="stio-compare-", dir=options.dir) as name:
        options.dir = Path(name)
        make_files(options, wanted)
        for record in run(wanted, options):
            records.append(record)
            print("  " + json.dumps(record), file=sys.stderr, flush=True)
            options.out.write_text(json.dumps({**head, "records": records}, indent=1))
    print(table(wanted, records))
    return None


if __name__ == "__main__":
    main()
