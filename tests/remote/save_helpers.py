"""What tests of saves to stores have in common."""

from __future__ import annotations

from typing import Any

import torch

from stio.remote.requests import Patience

IMPATIENT = Patience(num_attempts=2, first_pause_seconds=0.001, longest_pause_seconds=0.002, stall_seconds=0.4)

Tensors = dict[str, torch.Tensor]


def generation(number: int, nbytes: int = 4000) -> Tensors:
    return {f"w{k}": torch.full((nbytes // 4,), float(number * 10 + k)) for k in range(4)}


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def keys(client: Any, prefix: str = "") -> list[str]:
    found = client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", ())
    return sorted(one["Key"] for one in found)


def uploads(client: Any) -> list[str]:
    """Return the keys of the multipart uploads that were neither completed nor aborted."""
    return [one["Key"] for one in client.list_multipart_uploads(Bucket="bucket").get("Uploads", ())]
