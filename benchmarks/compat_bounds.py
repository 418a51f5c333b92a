"""The bounds that the drop-ins have to keep, each with the figure that is held against it."""

from __future__ import annotations

from functools import partial

from benchmarks.stats import ratio
from benchmarks.verdicts import Bound, faster

_SIZES = ("1MB", "90MB", "1.7GB")


def _quicker(case: str, text: str, ours: str, theirs: str, key: str, at_least: float | None) -> Bound:
    """How many times as fast ours is as theirs, by the figure `key`."""
    return Bound(case, text, partial(ratio, case=case, ours=ours, theirs=theirs, key=key), at_least=at_least)


BOUNDS: tuple[Bound, ...] = (
    *(
        _quicker(f"load-{size}", f"load_file, {text}", "stio", "official", key, 1.0)
        for size in _SIZES
        for text, key in (
            ("warm, untouched", "untouched_seconds"),
            ("warm, every page touched", "touched_seconds"),
            ("cold, every page touched", "cold_seconds"),
        )
    ),
    *(
        faster(f"save-{size}", text, "stio", theirs, at_least)
        for size in _SIZES
        for text, theirs, at_least in (
            ("save_file (durable) / official + fsync of file and directory", "official-fsync", 1.0),
            ("save_file (durable) / official to another name, fsync, rename, fsync", "official-atomic", None),
            ("save_file (durable) / official, not durable", "official", None),
        )
    ),
    _quicker("slice", 'get_slice()[row], mmap / official "pread"', "stio", "official-pread", "row_seconds", 20.0),
    _quicker(
        "slice", 'get_slice()[row], "pread" / official "pread"', "stio-pread", "official-pread", "row_seconds", 20.0
    ),
    _quicker("slice", "open and get_slice()[row], mmap", "stio", "official-pread", "open_seconds", 20.0),
    _quicker("slice", 'open and get_slice()[row], "pread"', "stio-pread", "official-pread", "open_seconds", 20.0),
    _quicker("slice", "get_slice()[row], mmap / official mmap", "stio", "official", "row_seconds", None),
    _quicker("state", "save_state / torch.save + fsync", "stio-state", "torch-state", "save_seconds", 5.0),
    _quicker("state", "load_state / torch.load", "stio-state", "torch-state", "load_seconds", 5.0),
)
