"""torch tensors on an accelerator: whole files by stio's loads, single tensors by torch's own copy.

A load of stio reads ahead into pinned memory while the device copies. stio's loads do not support a device without
streams in torch, or one that does not exist: there torch itself copies, or raises its own error.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from stio.compat.safetensors._errors import reading
from stio.compat.safetensors._file import DropInFile
from stio.compat.safetensors._tensors import Tensors, require_torch_dtypes
from stio.device.base import AnyDevice, resolve_device
from stio.device.cuda import has_streams
from stio.errors import DeviceError, DeviceMemoryError
from stio.loading.body import collect
from stio.loading.open import OpenCheckpoint
from stio.loading.options import LoadOptions
from stio.loading.select import select_tensors
from stio.runtime.contexts import contextmanager
from stio.runtime.operation import Operation


class AcceleratorTensors(Tensors):
    """Makes torch tensors on an accelerator; see `Framework`."""

    def make_all(self, file: DropInFile) -> dict[str, torch.Tensor]:
        """Return all tensors of a file by name, in the order of their data.

        Raises:
            torch.OutOfMemoryError: The device is full; torch's own copy raises the same error.
        """
        target = served(self._device)
        if target is None:
            return super().make_all(file)
        header = file.header
        require_torch_dtypes(header.dtypes, header.shapes)
        # No aliases are passed: stio records them under a metadata key of its own, and this format has none.
        opened = OpenCheckpoint(file.path, [file.source], [header], header.metadata, {})
        options = LoadOptions(device=target)
        operation = Operation(
            lambda operation: collect(operation, select_tensors(opened, None, options), options), name="load"
        )
        with loading(file.path):
            return operation.result()()


@contextmanager
def loading(path: str) -> Iterator[None]:
    """Turn the errors of a load inside the block into those of `reading`, and a full device's into torch's."""
    with reading(path):
        try:
            yield
        except DeviceMemoryError as error:
            raise torch.OutOfMemoryError(str(error)) from error


def served(device: str | int) -> AnyDevice | None:
    """Return the device if stio's loads copy to it, else None."""
    try:
        resolved = resolve_device(device)
    except DeviceError:
        return None
    return resolved if resolved.type != "cpu" and has_streams(resolved) else None
