"""torch tensors on an accelerator: whole files by stio's engine, single tensors by torch's own copy.

The engine reads ahead into pinned memory while the device copies. A device that it does not serve (torch has no
streams for it, or it is not there) is torch's to copy to, or to complain about.
"""

from __future__ import annotations

import torch

from stio.compat.safetensors._errors import reading
from stio.compat.safetensors._file import File
from stio.compat.safetensors._tensors import Tensors, require_torch_dtype
from stio.device.base import Target, resolve_device
from stio.device.copy_out import has_streams
from stio.device.tensors import TORCH_DTYPES
from stio.errors import DeviceError, DeviceMemoryError
from stio.loading.body import collect
from stio.loading.open import OpenCheckpoint
from stio.loading.targets import LoadOptions
from stio.runtime.operation import Operation

__all__ = ["Onto"]


class Onto(Tensors):
    """Makes torch tensors on an accelerator."""

    def whole(self, file: File) -> dict[str, torch.Tensor] | None:
        """Return all tensors of a file; None where they have to be copied one by one.

        Raises:
            torch.OutOfMemoryError: The device is full, as torch's own copy would say.
        """
        target = served(self._device)
        if target is None:
            return None
        header = file.header
        for dtype, shape in zip(header.dtypes, header.shapes, strict=True):
            if dtype not in TORCH_DTYPES or dtype == "F4":
                require_torch_dtype(dtype, shape)
        # Names that stio ties by a metadata key of its own are not tensors of this format: no aliases.
        opened = OpenCheckpoint(file.path, [file.source], [header], header.metadata, {})
        options = LoadOptions(device=target)
        operation = Operation(lambda operation: collect(operation, opened, None, options), name="load")
        with reading(file.path):
            try:
                return operation.start().result()()
            except DeviceMemoryError as error:
                raise torch.OutOfMemoryError(str(error)) from error


def served(device: str | int) -> Target | None:
    """Return the device if the engine copies to it."""
    try:
        resolved = resolve_device(device)
    except DeviceError:
        return None
    return resolved if resolved.type != "cpu" and has_streams(resolved) else None
