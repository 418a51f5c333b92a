"""An open checkpoint as text and as HTML, for prompts and notebooks: short, whatever the number of its tensors."""

from __future__ import annotations

from heapq import nsmallest

from stio.errors import printable
from stio.loading.open import OpenCheckpoint
from stio.runtime.text import MAX_ROWS, counted, natural_key, show_bytes, table


def headline(opened: OpenCheckpoint) -> str:
    """Return one line: the path, and what the checkpoint holds."""
    headers = opened.headers
    parts = [counted(sum(map(len, headers)), "tensor"), show_bytes(sum(header.data_bytes for header in headers))]
    if len(headers) > 1:
        parts.append(counted(len(headers), "shard"))
    if opened.aliases:
        parts.append(f"tied names: {len(opened.aliases):,}")
    return f"{printable(opened.path)!r}: {', '.join(parts)}"


def as_html(opened: OpenCheckpoint) -> str:
    """Return a table of the tensors, in the natural order of their names; of many, the first ones."""
    numbers = {header.shard: f"{k}/{len(opened.headers)}" for k, header in enumerate(opened.headers, 1)}
    every = ((name, header) for header in opened.headers for name in header.names)
    rows = []
    for name, header in nsmallest(MAX_ROWS, every, key=lambda one: natural_key(one[0])):
        info = header.info(name)
        row = [name, info.dtype, str(list(info.shape)), show_bytes(info.nbytes)]
        rows.append([*row, numbers[info.shard]] if len(numbers) > 1 else row)
    columns = ["name", "dtype", "shape", "size", *(["shard"] if len(numbers) > 1 else [])]
    return table(f"Checkpoint {headline(opened)}", columns, rows, num_rows=sum(map(len, opened.headers)))
