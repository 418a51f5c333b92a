"""A trainer that is killed again and again, and two followers, in processes of their own.

Each version that a follower reports is one that the trainer saved, bit for bit. `STIO_TEST_FOLLOW_SECONDS` says how
long this goes on: 5 seconds, and in a nightly run 600.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from crash.zygote import Zygote
from support import eventually

SECONDS = float(os.environ.get("STIO_TEST_FOLLOW_SECONDS", "5"))

COMMON = """
    import hashlib, os, sys, time, torch, stio.sync

    def digest(tensors):
        whole = hashlib.sha256()
        for name in sorted(tensors):
            whole.update(name.encode() + tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()

    run, seed = sys.argv[1:3]
"""

TRAINER = (
    COMMON
    + """
    chance = torch.Generator().manual_seed(int(seed))
    path = stio.latest(run, default=None)
    if path is None:
        step, state = -1, {"w": torch.randn(200, 300).bfloat16(), "b": torch.randn(5000), "few": torch.zeros(3)}
    else:
        step, state = int(path.rpartition("-")[2]), stio.sync.load(path, memory="copy")
    with stio.sync.Saver(full_every=6, keep_last=4) as saver:
        while True:
            step += 1
            for tensor in state.values():
                chosen = torch.rand(tensor.shape, generator=chance) < 0.01
                tensor[chosen] = torch.randn(int(chosen.sum()), generator=chance).to(tensor.dtype)
            print(step, digest(state), flush=True)
            saver.save(state, f"{run}/step-{step}")
    """
)

FOLLOWER = (
    COMMON
    + """
    memory = {"w": torch.empty(200, 300).bfloat16(), "b": torch.empty(5000), "few": torch.empty(3)}
    with stio.sync.follow(memory, run, poll_seconds=0.01) as updates:
        version = updates.version
        while not os.path.exists(f"{run}/../stop"):
            if version is not None:
                print(version.step, digest(memory), version.kind, flush=True)
            version = updates.apply() if updates.wait(timeout=0.1) else None
    print("end", flush=True)
    """
)


@pytest.mark.slow
@pytest.mark.costly("processes of its own")
@pytest.mark.timeout(SECONDS + 120)
def test_every_version_of_a_follower_is_one_that_was_saved(torch_zygote: Zygote, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    chance = random.Random(3)
    followers = [torch_zygote.start(FOLLOWER, run, 0) for _ in range(2)]
    saved: set[tuple[str, ...]] = set()
    until, seed = time.monotonic() + SECONDS, 0
    while time.monotonic() < until or seed < 3:
        seed += 1
        trainer = torch_zygote.start(TRAINER, run, seed)
        is_saving = eventually(lambda trainer=trainer: trainer.stdout().count("\n") > 3, 60)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.2))
        os.kill(trainer.pid, signal.SIGKILL)
        done = trainer.wait()
        assert is_saving and done.returncode == -signal.SIGKILL, (seed, done)
        saved |= {tuple(line.split()) for line in done.stdout.splitlines()}
    (tmp_path / "stop").touch()
    kinds = set()
    for follower in followers:
        ended = follower.wait()
        lines = [line.split() for line in ended.stdout.splitlines()]
        assert ended.returncode == 0 and lines[-1] == ["end"], ended.stderr
        wrong = [line for line in lines[:-1] if tuple(line[:2]) not in saved]
        assert len(lines) > 5 and not wrong, wrong
        kinds |= {line[2] for line in lines[:-1]}
    print(f"{len(saved)} versions of {seed} trainers")
    assert kinds == {"full", "delta"}
