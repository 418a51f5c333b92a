"""A module as the target of a load: compares it with the checkpoint, and puts the tensors into it.

Names and shapes are compared before any tensor is read. Tensors are copied into those of the module when their group is
loaded. With `assign`, groups are collected, and replace all of the module's tensors together at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from stio.device.base import LoadedGroup
from stio.device.tensors import TORCH_DTYPES, torch_shape
from stio.errors import MismatchError, printable
from stio.format.header import TensorInfo

_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Names that only the module or only the checkpoint has; both are empty if all names match."""

    missing: tuple[str, ...]
    """Names that only the module has (a tied name is not missing if the tensor is loaded under another name)."""
    unexpected: tuple[str, ...]
    """Names that only the checkpoint has; their data was not read."""


class ModuleTarget:
    """A module's tensors as the target of a load.

    Args:
        module: The module; its `state_dict()` has the expected names and shapes.
        assign: Replace the tensors by the loaded ones instead of copying into them.
        fills: Tensors on `meta` get new memory elsewhere (`stio.warm_start`); this object only compares.
    """

    def __init__(self, module: nn.Module, *, assign: bool = False, fills: bool = False) -> None:
        self._module = module
        self._fills = fills
        self.assigns = assign
        """Whether tensors are replaced and not copied into."""
        self._targets: dict[str, torch.Tensor] = {
            name: value
            for name, value in module.state_dict(keep_vars=True).items()
            # The result of get_extra_state() is not a tensor of the module: a load could not put it back.
            if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")
        }
        self._groups: list[LoadedGroup] = []
        self._loaded: dict[str, torch.Tensor] = {}
        self._made: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._aliases: Mapping[str, str] = {}
        self._report = LoadReport((), ())

    def match(
        self, infos: Mapping[str, TensorInfo], aliases: Mapping[str, str], *, strict: bool, path: str
    ) -> tuple[list[str], LoadReport]:
        """Compare module and checkpoint, before any tensor is read.

        Args:
            infos: Tensors of the checkpoint, by name.
            aliases: Tied names of the checkpoint.
            strict: Missing or unexpected names are an error.
            path: For messages.

        Returns:
            The names to read (those of the module if its tensors are replaced), and the differences.

        Raises:
            MismatchError: A shape differs; or names do, and `strict`.
        """
        self._aliases = {alias: target for alias, target in aliases.items() if alias in self._targets}
        wanted = [name for name in infos if name in self._targets]
        present = dict.fromkeys([*wanted, *self._aliases])  # in the order of messages
        twins = {_place(self._targets[name]) for name in present}
        missing = tuple(
            name for name, target in self._targets.items() if name not in present and _place(target) not in twins
        )
        unexpected = tuple(name for name in infos if name not in self._targets)
        self._require_shapes(infos, path)
        has_memory = self.assigns or self._fills
        if not has_memory and (empty := tuple(name for name in present if self._targets[name].is_meta)):
            raise MismatchError(
                f"the module's tensors on 'meta' have no memory to copy into; pass assign=True: {listed(empty)}",
                path=path,
            )
        if strict and (missing or unexpected):
            raise MismatchError(
                "the checkpoint does not fit the module; strict=False loads the common names: "
                f"missing {listed(missing)}, unexpected {listed(unexpected)}",
                path=path,
            )
        self._report = LoadReport(missing, unexpected)
        # If tensors are replaced, a tied name may have a device of its own. If they are copied, each is read once.
        read = [*wanted, *self._aliases] if self.assigns else dict.fromkeys([*wanted, *self._aliases.values()])
        return list(read), self._report

    def _require_shapes(self, infos: Mapping[str, TensorInfo], path: str) -> None:
        wrong = []
        for name, target in self._targets.items():
            info = infos.get(self._aliases.get(name, name))
            if info is not None and torch_shape(info.dtype, info.shape) != tuple(target.shape):
                wrong.append(f"{printable(name)} {list(info.shape)} for {list(target.shape)}")
            elif info is not None and self.assigns and target.requires_grad and not _has_gradient(info.dtype):
                raise MismatchError(
                    "the module's parameter requires a gradient, which this dtype cannot have; assign=False casts",
                    path=path,
                    expected="a floating or complex dtype",
                    found=f"{info.dtype} for {name}",
                )
        if wrong:
            more = f" and {len(wrong) - _SHOWN_NAMES} others" if len(wrong) > _SHOWN_NAMES else ""
            raise MismatchError(
                f"shapes differ, the checkpoint's for the module's: {'; '.join(wrong[:_SHOWN_NAMES])}{more}", path=path
            )

    @property
    def sources(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Name in the checkpoint and tensor, by the module's name. Tied tensors are one object."""
        return {name: (self._aliases.get(name, name), target) for name, target in self._targets.items()}

    @property
    def on_cpu(self) -> bool:
        """Whether all tensors with data are on the CPU."""
        return all(target.device.type in ("cpu", "meta") for target in self._targets.values())

    @property
    def device(self) -> torch.device:
        """Device to load to: that of the module, if all its tensors are on one device; otherwise the CPU."""
        devices = {target.device for target in self._targets.values()}
        return devices.pop() if len(devices) == 1 and "meta" not in {d.type for d in devices} else torch.device("cpu")

    def copy(self, group: LoadedGroup) -> None:
        """Copy a group's tensors into the module's, in the order of the calling thread's stream."""
        tensors = group.take()
        sources = {alias: tensors[target] for alias, target in self._aliases.items() if target in tensors}
        sources |= {name: tensor for name, tensor in tensors.items() if name in self._targets}
        with torch.no_grad():
            for name, tensor in sources.items():
                self._targets[name].copy_(tensor, non_blocking=True)

    def keep(self, group: LoadedGroup) -> None:
        """With `assign`, collect a group's tensors for `make` (called by workers)."""
        self._groups.append(group)  # for the thread that calls `complete`
        self._loaded.update(group.tensors)

    def make(self) -> None:
        """With `assign`, make the module's new tensors; tied names get the same one, the first that was loaded.

        Each tensor needs a few calls of torch, which may wait for the GIL: so not on the thread of an event loop.
        """
        found = {name: self._loaded.get(name) for name in self._targets}
        # A checkpoint may hold only one of several tied names, without aliases. The ties are found in the module.
        twins: dict[object, torch.Tensor] = {}
        for name, loaded in found.items():
            if loaded is not None:
                twins.setdefault(_place(self._targets[name]), loaded)
        made: dict[int, nn.Parameter] = {}
        for name, old in self._targets.items():
            new = twins.get(_place(old))
            if new is None:
                continue
            owner, _, leaf = name.rpartition(".")
            if isinstance(old, nn.Parameter):
                if (key := id(new)) not in made:
                    made[key] = nn.Parameter(new, requires_grad=old.requires_grad)
                new = made[key]
            self._made.append((self._module.get_submodule(owner), leaf, new))

    def complete(self) -> LoadReport:
        """Complete the load in the consumer's thread: with `assign`, put all new tensors into the module."""
        for group in self._groups:
            group.take()
        for submodule, leaf, new in self._made:
            if isinstance(new, nn.Parameter):
                submodule.register_parameter(leaf, new)
            else:
                submodule.register_buffer(leaf, new)
        self.discard()
        return self._report

    def discard(self) -> None:
        """Drop all loaded and made tensors: after a failure its traceback may hold this object for long."""
        self._groups.clear()
        self._loaded.clear()
        self._made.clear()


def _has_gradient(dtype: str) -> bool:
    found = TORCH_DTYPES.get(dtype)
    return found is None or found.is_floating_point or found.is_complex


def _place(tensor: torch.Tensor) -> object:
    """Return a key that two names of one tensor share; unique for tensors without memory."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape


def listed(names: tuple[str, ...]) -> str:
    """Return names for a message, the first few of many."""
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN_NAMES} others" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(printable(name) for name in names[:_SHOWN_NAMES]) + more
