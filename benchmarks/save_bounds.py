"""The bounds that stio's saves have to keep, each with the figure that is held against it."""

from __future__ import annotations

from benchmarks.verdicts import Bound, cost, faster, held, lag, seconds

_DCP_STAGERS = ("dcp-async", "dcp-caller")

BOUNDS: tuple[Bound, ...] = (
    faster("durable", "stio.save / raw O_DIRECT writer", "stio", "raw", 0.9),
    faster("durable", "stio.save / safetensors + fsync of file and directory", "stio", "safetensors-fsync", 1.25),
    faster("durable", "stio.save / DCP", "stio", "dcp", 3.0),
    faster("durable", "a Saver's later saves / raw O_DIRECT writer", "stio-saver", "raw"),
    faster("durable", "a Saver's later saves / safetensors + fsync", "stio-saver", "safetensors-fsync"),
    faster("durable", "stio.save / DCP's HuggingFaceStorageWriter", "stio", "dcp-hf"),
    faster("durable", "stio.save / safetensors, not durable", "stio", "safetensors"),
    faster("durable", "stio.save / huggingface_hub, not durable", "stio", "hub"),
    faster("durable", "stio.save / torch.save, not durable", "stio", "torch"),
    cost("staged", "later saves: staging through one memcpy", "stio-saver", "memcpy", "staged_seconds", 1.3),
    cost("staged", "later saves: staging through DCP's own", "stio-saver", _DCP_STAGERS, "staged_seconds", 1.2),
    seconds("staged", "later saves: staging", "stio-saver", "staged_seconds", None, "ms"),
    seconds("staged", "the first save: staging", "stio-saver", "first_staged_seconds", None, "ms"),
    cost("staged", "the first save: staging through DCP's own", "stio-saver", _DCP_STAGERS, "first_staged_seconds"),
    cost(
        "training", "durable: beside torch steps through alone", "stio beside steps", "stio", "committed_seconds", 1.5
    ),
    cost("training", "the same, as the blocked caller sees it", "stio beside steps", "stio", "seconds"),
    cost("training", "durable: beside sleeping steps through alone", "stio beside sleeps", "stio", "committed_seconds"),
    held("stio 512 MiB", "stio.save, budget 512 MiB, through budget + 64 MB"),
    held("stio 64 MiB", "stio.save, budget 64 MiB, through budget + 64 MB"),
    held("stio-saver 512 MiB", "Saver, budget 512 MiB, through budget + 64 MB"),
    held("stio-saver 64 MiB", "Saver, budget 64 MiB, through budget + 64 MB"),
    lag("loop", "p99 lag above the baseline, alone", "stio alone", 0.005),
    lag("loop", "p99 lag above the baseline, busy", "stio busy", 0.025),
    lag("loop", "p99 lag above the baseline, busy, switch_interval 0.5 ms", "stio-switch busy", 0.005),
    lag("loop", "p99 lag above the baseline, alone, a Saver", "stio-saver alone", None),
)
