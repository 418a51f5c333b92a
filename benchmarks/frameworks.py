"""Compare `from_pretrained` over safetensors and over stio, by one added line: `python -m benchmarks.frameworks`.

The script is the same: `AutoModelForCausalLM.from_pretrained` and `save_pretrained` of transformers. stio's side calls
`stio.compat.install()` before. Imports and that call are off the clock; what the call takes is a figure of its own.
Memory is what the call adds to the process: its peak, with the pages of the page cache that a mapping shows, and the
private part at the end, when every page was used. What stio's own modules take (some MB) is in the peak of the process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import files, meters, pagecache, runner
from benchmarks.child import Spec
from benchmarks.contestants import fsync
from benchmarks.report import cost, count_cell, difference, plain, seconds
from benchmarks.runs import Bound, Record, Runs
from benchmarks.suite import Case, Columns, Entry, Measure, Settings, Suite

_SIDES = (Entry("stio"), Entry("official"))
_MODEL = "model.safetensors"
_PRIME_SPARE = 1.25
_SAME_BYTES = 4_000_000
"""Difference of memory below which two sides use the same: allocators and threads differ by so much from run to run."""

CASES: tuple[Case, ...] = (
    Case("load-cold", "from_pretrained, cold", _SIDES, rounds=5, state="cold"),
    Case("load-warm", "from_pretrained, warm", _SIDES, rounds=5, state="warm"),
    Case(
        "save",
        "save_pretrained, to a fresh directory",
        (Entry("stio"), Entry("official"), Entry("official-fsync")),
        rounds=5,
        state="save",
    ),
)

_LOADS = (("load-cold", "cold", 1.0), ("load-warm", "warm", 1.05))
BOUNDS: tuple[Bound, ...] = (
    *(
        cost(case, f"from_pretrained, {state}{text}: stio / official", "stio", "official", key, at_most)
        for case, state, at_most in _LOADS
        for text, key in (("", "seconds"), (", every page used", "touched_seconds"))
    ),
    *(
        Bound(
            case,
            f"from_pretrained, {state}: {text}, stio less official",
            partial(difference, case=case, entry="stio", upper=key, lower=key, lower_entry="official"),
            at_most=_SAME_BYTES,
            unit="MB",
        )
        for case, state, _ in _LOADS
        for text, key in (("peak memory of the call", "peak_bytes"), ("private memory", "private_bytes"))
    ),
    seconds(
        "load-warm", "stio.compat.install(), once in a process, beside transformers", "stio", "install_seconds", None
    ),
    cost("save", "save_pretrained: stio (durable) / official + fsync", "stio", "official-fsync", "seconds"),
    cost("save", "save_pretrained: stio (durable) / official, not durable", "stio", "official", "seconds"),
    Bound(
        "save",
        "save_pretrained: peak memory of the call, stio less official",
        partial(difference, case="save", entry="stio", upper="peak_bytes", lower="peak_bytes", lower_entry="official"),
        unit="MB",
    ),
)

LABELS = {
    "stio": "stio.compat.install()",
    "official": "safetensors",
    "official-fsync": "safetensors, fsync of files and directory",
}


def config_of(layout: files.Layout) -> dict[str, Any]:
    """Give the configuration with which transformers expects the tensors of a Llama-like layout."""
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    vocabulary, hidden = shapes["model.embed_tokens.weight"]
    layers = sum(name.endswith("input_layernorm.weight") for name in shapes)
    heads = hidden // 64
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": shapes["model.layers.0.mlp.up_proj.weight"][0],
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
    }


def write_model(directory: Path, layout: files.Layout) -> None:
    """Write a directory that `from_pretrained` reads."""
    directory.mkdir()
    files.write_file(directory / _MODEL, layout)
    (directory / "config.json").write_text(json.dumps(config_of(layout)))


# One run, in its own process.


def run(spec: Spec) -> Record:
    """Do one run; see the tasks below."""
    transformers = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    make = transformers.AutoModelForCausalLM.from_pretrained  # imports what the model needs
    import_module("transformers.models.llama.modeling_llama")
    record: Record = {}
    if spec.contestant == "stio":
        compat = import_module("stio.compat")
        started = time.perf_counter()
        record["num_replaced"] = sum(map(len, compat.install().replaced.values()))
        record["install_seconds"] = time.perf_counter() - started
    return record | (_save if spec.state == "save" else _load)(spec, make)


def _load(spec: Spec, make: Any) -> Record:
    """Load: seconds of the call, touched_seconds with a use of every page, memory."""
    path = Path(spec.path) / _MODEL
    spec.prime()
    if spec.state == "warm":
        pagecache.fill_by_reads(path)
    else:
        pagecache.evict(path)
    meters.reset_peak_rss()
    before = _memory()
    started = time.perf_counter()
    model = make(spec.path)
    called = time.perf_counter() - started
    found = meters.touch_all(meters.tensor_arrays(model.state_dict()), "page")
    touched = time.perf_counter() - started
    memory = _added(before)
    _check(path, model, found, every_byte=spec.verify)
    return {"seconds": called, "touched_seconds": touched} | memory


def _check(path: Path, model: Any, found: int, *, every_byte: bool) -> None:
    """Compare the model's tensors with the file.

    Raises:
        ValueError: They differ.
    """
    import numpy as np

    data, (start, spans) = np.memmap(path, np.uint8, mode="r"), files.read_header(path)
    if found != meters.touch_all(meters.file_arrays(data, start, spans), "page"):
        raise ValueError("wrong bytes were loaded")
    if every_byte:
        checksum = meters.checksum_all(meters.tensor_arrays(model.state_dict()))
        if checksum != meters.checksum_all(meters.file_arrays(data, start, spans)):
            raise ValueError("wrong bytes were loaded")


def _save(spec: Spec, make: Any) -> Record:
    """Save to a fresh directory: seconds, memory."""
    source, target = Path(spec.options["source"]), Path(spec.path)
    model = make(source)
    meters.touch_all(meters.tensor_arrays(model.state_dict()), "page")
    spec.prime()
    meters.reset_peak_rss()
    before = _memory()
    started = time.perf_counter()
    model.save_pretrained(target)
    if spec.contestant == "official-fsync":
        fsync(*target.iterdir(), target, target.parent)
    saved = time.perf_counter() - started
    memory = _added(before)
    _check(target / _MODEL, model, _touched(target / _MODEL), every_byte=spec.verify)
    return {"seconds": saved} | memory


def _touched(path: Path) -> int:
    import numpy as np

    start, spans = files.read_header(path)
    return meters.touch_all(meters.file_arrays(np.memmap(path, np.uint8, mode="r"), start, spans), "page")


def _memory() -> dict[str, int]:
    """Give this process's resident memory, its peak, and the part that no other process can share."""
    private = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        key, _, value = line.partition(":")
        if key == "Private_Dirty":
            private = int(value.split()[0]) * 1024
    return meters.rss_bytes() | {"private_bytes": private}


def _added(before: dict[str, int]) -> Record:
    """Give the peak and the private memory above what there was before, and the whole process's peak."""
    now = _memory()
    return {
        "peak_bytes": now["peak_rss_bytes"] - before["rss_bytes"],
        "private_bytes": now["private_bytes"] - before["private_bytes"],
        "process_peak_bytes": now["peak_rss_bytes"],
    }


# The runs of a case.


@contextmanager
def prepared(case: Case, settings: Settings) -> Iterator[Measure]:
    """Make the models that a case reads, each side's its own; give the function that runs an entry."""
    directory = settings.directory / case.name
    if directory.exists():  # of a run that was killed, in a directory that stays
        files.discard(directory)
    directory.mkdir()
    layout = files.llama_layout(settings.size_bytes)
    saves = case.state == "save"

    def measure(entry: Entry, number: int, verify: bool) -> Record:
        target = directory / ("saved" if saves else entry.contestant)
        spec = Spec(
            contestant=entry.contestant,
            path=str(target),
            size_bytes=settings.size_bytes,
            case=case.name,
            state=case.state,
            verify=verify,
            prime_bytes=min(settings.prime_bytes, int(_PRIME_SPARE * layout.data_bytes)),
            options={"source": str(directory / "source")},
        )
        try:
            return {"data_bytes": layout.data_bytes} | runner.run_child(
                "benchmarks.frameworks", spec, settings.timeout_seconds
            )
        finally:
            if saves:
                files.discard(target)

    try:
        for name in ["source"] if saves else [entry.contestant for entry in settings.entries(case)]:
            write_model(directory / name, layout)
        yield measure
    finally:
        files.discard(directory)


# Tables.


_COLUMNS = {
    "load": (
        ("call, s", "seconds", 1.0),
        ("with every page used, s", "touched_seconds", 1.0),
        ("peak of the call, MB", "peak_bytes", 1e-6),
        ("private, MB", "private_bytes", 1e-6),
        ("peak of the process, MB", "process_peak_bytes", 1e-6),
    ),
    "save": (("save, s", "seconds", 1.0), ("peak of the call, MB", "peak_bytes", 1e-6)),
}


def _columns(case: Case) -> Columns:
    columns = _COLUMNS[case.name.partition("-")[0]]

    def row(name: str, entry: str, runs: Runs) -> list[str]:
        cells = []
        for _, key, factor in columns:
            found = plain(runs, name, entry, key)
            cells.append(_number(found.value * factor) + _spread(found, factor))
        return [*cells, count_cell(runs, name, entry)]

    return Columns((*(f"{text} (min to max)" for text, _, _ in columns), "runs"), row)


def _spread(found: Any, factor: float) -> str:
    return f" ({_number(found.low * factor)} to {_number(found.high * factor)})"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:,.0f}"


SUITE = Suite(
    name="frameworks",
    cases=CASES,
    bounds=BOUNDS,
    labels=LABELS,
    prepared=prepared,
    columns=_columns,
    size_bytes=900_000_000,
)

if __name__ == "__main__":
    sys.exit(runner.main(SUITE, __doc__ or ""))
