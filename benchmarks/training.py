"""Measure what a save costs the steps of a training: `make bench-training`, or `python -m benchmarks.training`.

    python -m benchmarks.training --dir DIR                  # rounds of all contestants, 4 min 20 s on two cores
    python -m benchmarks.training --report FILE              # the table again, from the raw figures of --out
    python -m benchmarks.training --device cuda              # on a GPU

A transformer with FP32 weights and AdamW trains, and saves weights and optimizer once, between two steps. Each
contestant has a process of its own, and rounds are interleaved. The first save of the process is not measured: it
starts threads and touches staging memory. *Blocked* is how long the training stood still for the save; *under way* the
median step that began before the save ended, through the median step without a save; *cost* all seconds that the save
added: those blocked, and those that the slower steps took longer. A save of `stio` is durable at its end, and so are
DCP's files; `torch.save` is followed by fsync.

`stio`: a `Saver`; `stio, 256MB`: with `budget_bytes=`, so it takes the snapshot while it writes. `dcp, thread`,
`dcp, process`: torch's `async_save`. `dcp, staged`: its stager copies on a thread too; the optimizer waits for that
copy. `torch.save`: of a copy, in a thread. `blocking`: `torch.save`, while the training waits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import machine, meters

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "training.jsonl"
MAX_SECONDS = 300
NUM_WARM_STEPS = 3
NUM_STEPS = 5
"""Steps without a save, before the save and after it."""
SMALL_BUDGET = "256MB"

Record = dict[str, Any]


class Pending(NamedTuple):
    """A save under way."""

    staged: Callable[[], object]
    """Waits until the weights may change."""
    is_done: Callable[[], bool]
    wait: Callable[[], object]


Save = Callable[[dict[str, Any], Path], Pending]


def _stio(**options: Any) -> Callable[[], Iterator[Save]]:
    def make() -> Iterator[Save]:
        import stio

        with stio.sync.Saver(**options) as saver:

            def save(state: dict[str, Any], path: Path) -> Pending:
                pending = saver.save_state(state, path)
                return Pending(lambda: None, pending.done, pending.result)

            yield save

    return make


def _dcp(mode: str) -> Callable[[], Iterator[Save]]:
    def make() -> Iterator[Save]:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        has_device = bool(__import__("torch").accelerator.is_available())
        stager = None
        if mode == "staged":
            stager = DefaultStager(StagingOptions(has_device, False, True, has_device))
        kind = AsyncCheckpointerType.PROCESS if mode == "process" else AsyncCheckpointerType.THREAD
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

        def save(state: dict[str, Any], path: Path) -> Pending:
            response: Any = dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=kind, async_stager=stager)
            if stager is None:
                return Pending(lambda: None, response.done, response.result)
            upload = response.upload_completion
            return Pending(response.staging_completion.result, upload.done, upload.result)

        yield save
        if stager is not None:
            stager.close()
        dist.destroy_process_group()

    return make


def _torch(*, in_thread: bool) -> Callable[[], Iterator[Save]]:
    def write(state: dict[str, Any], path: Path) -> None:
        import torch

        torch.save(state, path)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def make() -> Iterator[Save]:
        from torch.utils import _pytree as pytree

        def save(state: dict[str, Any], path: Path) -> Pending:
            if not in_thread:
                write(state, path)
                return Pending(lambda: None, lambda: True, lambda: None)
            copy = pytree.tree_map(lambda value: value.cpu().clone() if hasattr(value, "clone") else value, state)
            thread = threading.Thread(target=write, args=(copy, path))
            thread.start()
            return Pending(lambda: None, lambda: not thread.is_alive(), thread.join)

        yield save

    return make


CONTESTANTS: dict[str, Callable[[], Iterator[Save]]] = {
    "stio": _stio(),
    f"stio, {SMALL_BUDGET}": _stio(budget_bytes=SMALL_BUDGET),
    "dcp, thread": _dcp("thread"),
    "dcp, process": _dcp("process"),
    "dcp, staged": _dcp("staged"),
    "torch.save": _torch(in_thread=True),
    "blocking": _torch(in_thread=False),
}


def train(contestant: str, folder: Path, width: int, device: str) -> Record:
    """Train with one measured save; return what it cost."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(8192, width), nn.TransformerEncoder(layer, 4), nn.Linear(width, 8192)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)

    def step(before_update: Callable[[], object]) -> tuple[float, float]:
        """Return the seconds of a step, and those for which the update waited."""
        begin = time.perf_counter()
        tokens = torch.randint(8192, (4, 32), device=device)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        loss.item()
        wait = time.perf_counter()
        before_update()
        waited = time.perf_counter() - wait
        optimizer.step()
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter() - begin - waited, waited

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def nothing() -> None:
        pass

    for _ in range(NUM_WARM_STEPS):
        step(nothing)
    state_bytes = sum(tensor.nbytes for tensor in model.state_dict().values()) * 3
    meters.prime_memory(2 * state_bytes)
    with contextmanager(CONTESTANTS[contestant])() as save:
        first = save(state(), folder / "first")
        first.staged()
        first.wait()
        os.sync()
        alone = [step(nothing)[0] for _ in range(NUM_STEPS)]
        begin = time.perf_counter()
        pending = save(state(), folder / "second")
        blocked = time.perf_counter() - begin
        under_way = []
        while not pending.is_done():
            seconds, waited = step(pending.staged)
            blocked += waited
            under_way.append(seconds)
        saved = time.perf_counter() - begin
        pending.wait()
        alone += [step(nothing)[0] for _ in range(NUM_STEPS)]
    usual = median(alone)
    written = sum(file.stat().st_size for file in folder.rglob("second*") if file.is_file())
    written = written or sum(file.stat().st_size for file in (folder / "second").rglob("*"))
    return {
        "step": usual,
        "blocked": blocked,
        "under_way": under_way,
        "saved": saved,
        "cost": blocked + sum(seconds - usual for seconds in under_way),
        "state_bytes": state_bytes,
        "written_bytes": written,
    }


def report(records: Sequence[Record]) -> str:
    """Return the table: medians of the rounds."""
    about, rest = records[0], [record for record in records if "contestant" in record]
    size = median(record["state_bytes"] for record in rest)
    lines = [
        f"{size / 1e9:.2f} GB of weights and optimizer, {about['num_cpus']} cores, torch {about['packages']['torch']}, "
        f"{about['date']}; a step without a save {median(r['step'] for r in rest):.3f} s; medians of "
        f"{max(r['round'] for r in rest) + 1} rounds",
        "",
        "| | blocked, s | steps under way / without | until saved, s | cost, s |",
        "|---|--:|--:|--:|--:|",
    ]
    for contestant in dict.fromkeys(record["contestant"] for record in rest):
        rows = [record for record in rest if record["contestant"] == contestant]
        ratios = [median(row["under_way"]) / row["step"] for row in rows if row["under_way"]]
        cells = [f"{median(row[what] for row in rows):.2f}" for what in ("blocked", "saved", "cost")]
        cells.insert(1, f"{median(ratios):.2f}" if ratios else "")
        lines.append(f"| {contestant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where the files are made; default: a temporary directory")
    parser.add_argument("--width", type=int, default=768, help="of the transformer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.report:
        print(report([json.loads(line) for line in arguments.report.read_text().splitlines()]))
        return 0
    if arguments.child:
        warnings.simplefilter("ignore")
        contestant, folder = arguments.child
        print(json.dumps(train(contestant, Path(folder), arguments.width, arguments.device)))
        return 0
    with machine.recording(arguments.out, arguments.dir) as (folder, records, emit):
        for number in range(arguments.rounds):
            turn = number % len(arguments.contestants)
            for contestant in [*arguments.contestants[turn:], *arguments.contestants[:turn]]:
                place = folder / "saves"
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                os.sync()
                command = [sys.executable, "-m", "benchmarks.training", "--child", contestant, str(place)]
                command += ["--width", str(arguments.width), "--device", arguments.device]
                done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS, cwd=ROOT)
                if done.returncode:
                    raise RuntimeError(done.stderr)
                emit({"contestant": contestant, "round": number, **json.loads(done.stdout.splitlines()[-1])})
    print(report(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
