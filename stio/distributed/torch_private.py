"""What `stio.distributed` uses of torch.distributed that is not documented."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store


def default_store(process_group: dist.ProcessGroup | None) -> tuple[Store, str]:
    """Return the store of a process group, in which keys of other groups do not occur, and the group's name."""
    group = process_group or distributed_c10d._get_default_group()
    name: str = group.group_name
    # `ProcessGroup.get_group_store` is not in all versions, and for some backends it has no store.
    return PrefixStore(name, distributed_c10d._get_default_store()), name
