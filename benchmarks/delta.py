"""Measure saves and loads of what changed: `python -m benchmarks.delta`.

    python -m benchmarks.delta --dir DIR                     # 1.7 GB of BF16, of which 2 % and 0.2 % change
    python -m benchmarks.delta --size-bytes 400000000 --rounds 5
    python -m benchmarks.delta --report FILE                 # the tables again, from the raw figures of --out

Each measurement has a process of its own, and rounds are interleaved. The elements that change are drawn at random, and
one bit of each is another. Saves are durable; before the one that is measured, the same process has saved the state
before the change, so staging memory is touched. Files that are read are in the page cache.

`full`, `delta`: a `stio.Saver`, without and with `full_every=`. `torch.save`: into one file, then fsync. `indices`:
what a program would write without stio: `torch.nonzero(old != new)` of each tensor as I32, and the values, by
`safetensors.torch.save_file`, then fsync. `memcpy`: copies of all tensors into memory that is touched.

`load_into`: of a full checkpoint into a module that has the state before. `apply`: of a `stio.follow` that has it; with
SHA-256 in the manifest of the delta, as by default, or with XXH3.
`load`: of one full checkpoint; `chain`: of a full one and 19 deltas, `memory="copy"` the same into memory of their own.
`make`: a `Comparison`, one thread, on memory that is touched.

`--training` measures a training instead: a transformer of four layers with BF16 weights and AdamW at 3e-6 on the CPU,
which saves after each step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine, meters

ROOT = Path(__file__).resolve().parent.parent
FRACTIONS = (0.02, 0.002)
SAVES = ("full", "delta", "torch.save", "indices", "memcpy")
APPLIES = ("load_into", "apply", "apply, xxh3")
LOADS = ("load", "chain", "load, copy", "chain, copy")
TASKS = {"apply": APPLIES, "load": LOADS, "save": SAVES, "make": ("make",)}
CHAIN = 19
COLUMNS = 4096
MAX_SECONDS = 900

Record = dict[str, Any]


# One measurement.


def state(size_bytes: int) -> dict[str, Any]:
    """Return tensors of about 16 MiB with random bits of numbers that weights have."""
    import torch

    rows = (16 << 20) // 2 // COLUMNS
    count = max(1, round(size_bytes / (rows * COLUMNS * 2)))
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(rows, COLUMNS, generator=generator).bfloat16()
    return {f"layers.{k}.weight": one.roll(k, 1).contiguous() for k in range(count)}


def change(tensors: dict[str, Any], fraction: float, seed: int) -> None:
    """Change one bit in a fraction of the elements."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        flat = tensor.view(torch.int16).view(-1)
        chosen = torch.randint(flat.numel(), (int(flat.numel() * fraction),), generator=generator)
        flat[chosen] ^= 1


async def save(contestant: str, folder: Path, size_bytes: int, fraction: float) -> Record:
    import torch
    from safetensors.torch import save_file

    import stio

    tensors = state(size_bytes)
    if contestant in ("full", "delta"):
        async with stio.Saver(full_every=100 if contestant == "delta" else None) as saver:
            await (await saver.save(tensors, folder / "step-0"))
            change(tensors, fraction, 0)
            begin = time.perf_counter()
            pending = await saver.save(tensors, folder / "step-1")
            blocked = time.perf_counter() - begin
            result = await pending
            seconds = time.perf_counter() - begin
            written = sum(file.stat().st_size for file in (folder / "step-1").iterdir())
            assert result.kind == contestant
            return {"blocked": blocked, "seconds": seconds, "bytes": written}
    old = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors, fraction, 0)
    path = folder / "model"
    begin = time.perf_counter()
    if contestant == "memcpy":
        for name, tensor in tensors.items():
            old[name].copy_(tensor)
        return {"blocked": time.perf_counter() - begin}
    if contestant == "torch.save":
        torch.save(tensors, path)
    else:
        changed = {}
        for name, tensor in tensors.items():
            at = torch.nonzero((old[name].view(torch.int16) != tensor.view(torch.int16)).view(-1)).view(-1)
            changed[f"{name}.indices"], changed[f"{name}.values"] = at.int(), tensor.view(-1)[at]
        save_file(changed, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.perf_counter() - begin
    return {"blocked": seconds, "seconds": seconds, "bytes": path.stat().st_size}


async def prepare(folder: Path, size_bytes: int, fraction: float, num_deltas: int) -> None:
    """Write `step-0`, deltas on it, and `full`, which is equal to the last one."""
    import stio

    tensors = state(size_bytes)
    async with stio.Saver(full_every=100, durability="none") as saver:
        await (await saver.save(tensors, folder / "step-0"))
        for step in range(1, num_deltas + 1):
            change(tensors, fraction, step)
            result = await (await saver.save(tensors, folder / f"step-{step}"))
            assert result.kind == "delta"
    await stio.save(tensors, folder / "full", durability="none")


async def apply(contestant: str, folder: Path) -> Record:
    import stio

    tensors = dict(await stio.load(folder / "step-0", memory="copy"))
    module = _module(tensors)
    if contestant == "load_into":
        begin = time.perf_counter()
        await stio.load_into(module, folder / "full")
        return {"seconds": time.perf_counter() - begin}
    run = folder / "run"
    run.mkdir(exist_ok=True)
    for name in ("step-0", "step-1"):
        shutil.rmtree(run / name, ignore_errors=True)
    shutil.copytree(folder / "step-0", run / "step-0", copy_function=os.link)
    async with stio.follow(module, run, poll_seconds=0.01) as updates:
        shutil.copytree(folder / "step-1", run / "step-1", copy_function=os.link)
        if contestant == "apply, xxh3":
            _hash_anew(run / "step-1")
        while await updates.wait() is None:
            pass
        begin = time.perf_counter()
        version = await updates.apply()
        seconds = time.perf_counter() - begin
    assert version.kind == "delta"
    return {"seconds": seconds}


def _hash_anew(path: Path) -> None:
    """Replace the manifest of a delta by one of XXH3."""
    from stio.format.files import FileState, Manifest, new_hasher

    data = (path / "delta.safetensors").read_bytes()
    hasher = new_hasher("xxh3")
    hasher.update(memoryview(data))
    manifest = path / "delta.safetensors.manifest.json"
    manifest.unlink()
    manifest.write_bytes(Manifest("xxh3", {"delta.safetensors": (FileState(len(data), hasher.hexdigest()),)}).encode())


def _module(tensors: dict[str, Any]) -> Any:
    from torch import nn

    module = nn.Module()
    for name, tensor in tensors.items():
        parent = module
        *parts, last = name.split(".")
        for part in parts:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    return module


async def load(contestant: str, folder: Path) -> Record:
    import stio

    memory = "copy" if contestant.endswith("copy") else "auto"
    path = folder / ("full" if contestant.startswith("load") else f"step-{CHAIN}")
    begin = time.perf_counter()
    tensors = await stio.load(path, memory=memory)
    meters.touch_all(meters.tensor_arrays(tensors), "read")
    return {"seconds": time.perf_counter() - begin}


def make(size_bytes: int, fraction: float) -> Record:
    from stio.storage.checkpoint import Comparison

    before, after = state(size_bytes), state(size_bytes)
    change(after, fraction, 0)
    begin = time.perf_counter()
    for name, tensor in after.items():
        comparison = Comparison(tensor.numel(), 2, num_pieces=1)
        comparison.compare(0, before[name].data_ptr(), tensor.data_ptr(), tensor.numel())
        comparison.changes()
    return {"seconds": time.perf_counter() - begin}


def measure(task: str, contestant: str, folder: Path, size_bytes: int, fraction: float) -> Record:
    import stio

    if task == "make":
        return make(size_bytes, fraction)
    asyncio.run(stio.load(folder / "small"))  # imports what it needs
    meters.prime_memory(size_bytes * 2)
    if task == "save":
        return asyncio.run(save(contestant, folder, size_bytes, fraction))
    return asyncio.run((apply if task == "apply" else load)(contestant, folder))


async def train(full_every: int | None, folder: Path, num_steps: int) -> Record:
    """Train, save after each step; return medians over the steps behind the first ten."""
    import torch
    from torch import nn

    import stio

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(8192, 512), nn.TransformerEncoder(layer, 4), nn.Linear(512, 8192)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    steps: list[Record] = []
    async with stio.Saver(keep_last=3, full_every=full_every) as saver:
        pending = None
        for step in range(num_steps):
            begin = time.perf_counter()
            tokens = torch.randint(8192, (4, 64))
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trained = time.perf_counter()
            if pending is not None:
                result = await pending
                steps[-1] |= {"kind": result.kind, "written": result.written_bytes, "changed": result.changed_bytes}
            pending = await saver.save(model, folder / f"step-{step}")
            steps.append({"train": trained - begin, "step": time.perf_counter() - begin})
        total_bytes = (await pending).total_bytes
    rest = [one for one in steps[10:-1] if full_every is None or one["kind"] == "delta"]
    found = {what: median(one[what] for one in rest) for what in ("train", "step", "written", "changed")}
    return {"total_bytes": total_bytes, "num_steps": len(rest), **found}


# All of them.


def child(*words: object) -> Record:
    command = [sys.executable, "-m", "benchmarks.delta", "--child", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return dict(json.loads(done.stdout or "{}"))


def run(folder: Path, size_bytes: int, rounds: int, tasks: Sequence[str], emit: Callable[[Record], None]) -> None:
    for fraction in FRACTIONS:
        place = folder / str(fraction)
        child("prepare", "", place, size_bytes, fraction, CHAIN if "load" in tasks else 1)
        for number in range(rounds):
            for task in tasks:
                contestants = TASKS[task]
                turn = number % len(contestants)
                for contestant in [*contestants[turn:], *contestants[:turn]]:
                    where = folder / "saves" if task == "save" else place
                    shutil.rmtree(folder / "saves", ignore_errors=True)
                    if task == "save":
                        where.mkdir()
                        shutil.copytree(place / "small", where / "small")
                    os.sync()
                    found = child(task, contestant, where, size_bytes, fraction, 0)
                    emit({"task": task, "contestant": contestant, "fraction": fraction, "round": number, **found})
        shutil.rmtree(place)


def report(records: Sequence[Record]) -> str:
    """Return the tables."""
    about = records[0]
    lines = [f"{about['size_bytes'] / 1e9:.1f} GB of BF16, {about['num_cpus']} cores, {about['date']}; medians", ""]
    lines += ["| | changed | caller blocked | durable, or to the end | bytes |", "|---|--:|--:|--:|--:|"]
    measured = [one for one in records if "task" in one]
    for task, contestant, fraction in dict.fromkeys((r["task"], r["contestant"], r["fraction"]) for r in measured):
        key = (task, contestant, fraction)
        rows = [r for r in measured if (r["task"], r["contestant"], r["fraction"]) == key]

        def cell(what: str, unit: str, rows: Sequence[Record] = rows) -> str:
            found = [row[what] for row in rows if what in row]
            return f"{median(found):{unit}}" if found else ""

        size = cell("bytes", ",.0f")
        lines.append(
            f"| {contestant} | {fraction:.1%} | {cell('blocked', '.3f')} | {cell('seconds', '.3f')} | {size} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where the files are made; default: a temporary directory")
    parser.add_argument("--size-bytes", type=int, default=1_700_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "delta.jsonl")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.report:
        print(report([json.loads(line) for line in given.report.read_text().splitlines()]))
        return 0
    if given.training:
        for number in range(given.rounds):
            for full_every in (None, 20):
                with tempfile.TemporaryDirectory(dir=given.dir) as place:
                    print(
                        json.dumps(
                            {"round": number, "full_every": full_every, **child("train", full_every, place, 0, 0, 40)}
                        )
                    )
        return 0
    if given.child:
        task, contestant, folder, size_bytes, fraction, number = given.child
        place = Path(folder)
        if task == "train":
            full_every = None if contestant == "None" else int(contestant)
            print(json.dumps(asyncio.run(train(full_every, place, int(number)))))
        elif task == "prepare":
            import torch

            import stio

            asyncio.run(prepare(place, int(size_bytes), float(fraction), int(number)))
            asyncio.run(stio.save({"w": torch.zeros(8)}, place / "small"))
        else:
            print(json.dumps(measure(task, contestant, place, int(size_bytes), float(fraction))))
        return 0
    with machine.recording(given.out, given.dir, given.size_bytes, 2 * given.size_bytes) as (folder, records, emit):
        run(folder, given.size_bytes, given.rounds, given.tasks, emit)
    print(report(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
