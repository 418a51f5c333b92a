"""`safe_open.prefetch`: tensors and slices of one file that are declared ahead, and read in the background.

The interface is that of safetensors 0.9.0rc1: `prefetch` returns a `PrefetchLoader`, which returns each tensor once, by
`take` or by iteration, and the file object itself is unchanged. In an earlier state of the interface `prefetch`
returned None, and `get_tensor` of the file object returned the tensors. That is not done here: `get_tensor` would take
a tensor from a loader that other code holds, and the `take` of that code would fail. Code for that state gets the right
tensors: it drops the loader, whose reading ends, and `get_tensor` reads each tensor. Such code should call `take`.

Beyond the original: it loads to the CPU too, and to every device of torch; a plan may have any index that `stio.load`
takes in `slices=`, with several intervals along a dimension; and `budget_bytes` bounds what was read and not taken.

A loader is a load whose tensors are taken by name (`stio.loading.by_name`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from stio.compat.safetensors import _accelerator
from stio.compat.safetensors._errors import SafetensorError, reading, wrong_type
from stio.compat.safetensors._file import DropInFile
from stio.compat.safetensors._tensors import require_torch_dtypes, require_whole_pairs, selected_shape
from stio.device.base import AnyDevice, resolve_device
from stio.loading.by_name import LoadByName
from stio.loading.open import OpenCheckpoint
from stio.loading.options import LoadOptions


class PrefetchLoader:
    """Tensors of one file that are read in the background. Made by `safe_open.prefetch`; a context manager.

    Each tensor is returned once, by `take` or by iteration. It stays valid after the loader is closed. On a device its
    data are there for every stream; a part that a copy cannot cut out (with steps) only for the stream that was current
    at `prefetch`. Several threads may use a loader. It has its own descriptor of the file, so the file object may be
    closed before it. Reading ends, and tensors that were not taken are freed,
    when the loader is closed or deleted. In a forked child it is closed.
    """

    __module__ = "stio.compat.safetensors"
    __slots__ = ("__weakref__", "_load")

    def __init__(self, load: LoadByName) -> None:
        self._load = load

    def names(self) -> list[str]:
        """Return the names of the plan, in the order of their data; also those that were taken."""
        return list(self._load.names)

    def __len__(self) -> int:
        return len(self._load.names)

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor, or the part that the plan has, after a wait for its data if necessary.

        A KeyboardInterrupt during the wait leaves the loader as it was.

        Raises:
            SafetensorError: The plan does not have the name, the tensor was taken before, the loader was closed, or
                the file is shorter than its header says.
            OSError: The system refuses to read, or the file was changed. Every later call raises it too.
            torch.OutOfMemoryError: The device is full.
        """
        load = self._load
        if not isinstance(name, str):
            raise wrong_type("name", name, "str")
        with _accelerator.loading(load.path):
            load.require_open()
            if name not in load.names:
                raise SafetensorError(f"{name} is not in the prefetch plan")
            if not load.claim(name):
                raise SafetensorError(
                    f"{name}: tensor already delivered (each is returned once, by take or by iteration)"
                )
            return load.take(name)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of those that were not taken, as they become ready; errors as for `take`."""
        load = self._load
        while True:
            with _accelerator.loading(load.path):
                if (name := load.claim_ready()) is None:
                    return
                tensor = load.take(name)
            yield name, tensor
            del tensor

    def close(self) -> None:
        """End the reading and free what was not taken; wait until no thread of the loader is left. Idempotent."""
        self._load.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_load"):
            self._load.cancel()


def prefetch(
    file: DropInFile,
    plan: Mapping[str, Any] | None,
    device: str | int,
    *,
    threads: int,
    budget_bytes: int | str | None,
) -> PrefetchLoader:
    """Start to read the tensors of a plan; see `safe_open.prefetch`."""
    names, slices = _checked(plan, file)
    loaded_to: AnyDevice = torch.device("cpu")
    moved_to = None
    if device != "cpu":
        served = _accelerator.served(device)
        if served is not None:
            loaded_to = served
        else:  # torch itself copies each tensor when it is taken
            with reading(file.path):
                moved_to = resolve_device(device)
    options = LoadOptions(device=loaded_to, memory="auto" if file.is_mapped else "copy", budget_bytes=budget_bytes)
    source = file.opened_again()
    # No aliases are passed: stio records them under a metadata key of its own, and this format has none.
    opened = OpenCheckpoint(file.path, [source], [file.header], file.header.metadata, {})
    load = LoadByName(opened, dict.fromkeys(names), options, slices=slices, max_workers=threads, moved_to=moved_to)
    try:
        with _accelerator.loading(file.path):
            load.start()
    except BaseException:
        load.close()
        raise
    return PrefetchLoader(load)


def _checked(plan: Mapping[str, Any] | None, file: DropInFile) -> tuple[list[str], dict[str, Any]]:
    """Return the names of a plan in the order of their data, and the indices of those that are sliced."""
    header = file.header
    if plan is None:
        require_torch_dtypes(header.dtypes, header.shapes)
        return list(header.names), {}
    if not isinstance(plan, Mapping):
        raise wrong_type("plan", plan, "dict")
    plan = dict(plan)
    for name in plan:
        if not isinstance(name, str):
            raise SafetensorError(f"prefetch plan keys must be tensor names, got {type(name).__name__}")
        if name not in header:
            raise SafetensorError(f"File does not contain tensor {name}")
    if not plan:
        raise SafetensorError("prefetch plan selects no tensors")
    rows = sorted(map(header.positions.__getitem__, plan))
    require_torch_dtypes([header.dtypes[row] for row in rows], [header.shapes[row] for row in rows])
    slices = {name: index for name, index in plan.items() if index is not None}
    for name, index in slices.items():
        row = header.positions[name]
        if header.dtypes[row] == "F4":
            with reading(file.path):
                require_whole_pairs(header.shapes[row], partial(selected_shape, index))
    return [header.names[row] for row in rows], slices
