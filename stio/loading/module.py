"""Loading into a module: what fits, what is missing, and putting tensors in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from stio.device.tensors import TORCH_DTYPES, torch_shape
from stio.errors import MismatchError, printable
from stio.format.header import TensorInfo

__all__ = ["Into", "LoadReport", "listed"]

_SHOWN_NAMES = 5


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_into` found to differ; both empty when everything fitted."""

    missing: tuple[str, ...]
    """Names that the module has and the checkpoint lacks (tied names with a loaded twin are not missing)."""
    unexpected: tuple[str, ...]
    """Names that the checkpoint has and the module lacks; they were not read."""


class Into:
    """A module's tensors as the target of a load.

    Args:
        module: Its `state_dict()` decides names and shapes.
        assign: Replace the tensors by the loaded ones instead of copying into them.
        fills: Tensors on `meta` get memory of their own (`stio.warm_start`); this only compares.
    """

    def __init__(self, module: nn.Module, *, assign: bool = False, fills: bool = False) -> None:
        self._module = module
        self._fills = fills
        self.assigns = assign
        """Whether tensors are replaced and not copied into."""
        self._targets: dict[str, torch.Tensor] = {
            name: value
            for name, value in module.state_dict(keep_vars=True).items()
            # What get_extra_state() made is no tensor of the module's: nothing would take it back.
            if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")
        }
        self._loaded: dict[str, torch.Tensor] = {}
        self._made: list[tuple[nn.Module, str, torch.Tensor]] = []
        self._aliases: Mapping[str, str] = {}

    def match(
        self, infos: Mapping[str, TensorInfo], aliases: Mapping[str, str], *, strict: bool, path: str
    ) -> tuple[list[str], LoadReport]:
        """Hold module and checkpoint against each other, before anything is read.

        Args:
            infos: What the checkpoint has.
            aliases: Its tied names.
            strict: Missing or unexpected names are an error.
            path: For messages.

        Returns:
            The names to read, the module's where its tensors are replaced; and what differs.

        Raises:
            MismatchError: A shape differs; or names do, and `strict`.
        """
        self._aliases = {alias: target for alias, target in aliases.items() if alias in self._targets}
        wanted = [name for name in infos if name in self._targets]
        present = dict.fromkeys([*wanted, *self._aliases])  # in an order that messages keep
        twins = {_place(self._targets[name]) for name in present}
        missing = tuple(
            name for name, target in self._targets.items() if name not in present and _place(target) not in twins
        )
        unexpected = tuple(name for name in infos if name not in self._targets)
        self._require_shapes(infos, path)
        has_room = self.assigns or self._fills
        if not has_room and (empty := tuple(name for name in present if self._targets[name].is_meta)):
            raise MismatchError(
                f"the module's tensors on 'meta' have no memory to copy into; pass assign=True: {listed(empty)}",
                path=path,
            )
        if strict and (missing or unexpected):
            raise MismatchError(
                "the checkpoint does not fit the module; strict=False loads what fits: "
                f"missing {listed(missing)}, unexpected {listed(unexpected)}",
                path=path,
            )
        # What is replaced may go to a device by its own name; what is copied is wanted once, tied or not.
        read = [*wanted, *self._aliases] if self.assigns else dict.fromkeys([*wanted, *self._aliases.values()])
        return list(read), LoadReport(missing, unexpected)

    def _require_shapes(self, infos: Mapping[str, TensorInfo], path: str) -> None:
        wrong = []
        for name, target in self._targets.items():
            info = infos.get(self._aliases.get(name, name))
            if info is not None and torch_shape(info.dtype, info.shape) != tuple(target.shape):
                wrong.append(f"{printable(name)} {list(info.shape)} for {list(target.shape)}")
            elif info is not None and self.assigns and target.requires_grad and not _has_gradient(info.dtype):
                raise MismatchError(
                    "the module's parameter wants a gradient, which this dtype cannot have; assign=False casts",
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
        """By the module's name: the checkpoint's name for it, and the tensor. Tied tensors are one object."""
        return {name: (self._aliases.get(name, name), target) for name, target in self._targets.items()}

    @property
    def on_cpu(self) -> bool:
        """Whether all that holds data is on the CPU."""
        return all(target.device.type in ("cpu", "meta") for target in self._targets.values())

    @property
    def device(self) -> torch.device:
        """Device to load to: the module's, if it has just one that holds data."""
        devices = {target.device for target in self._targets.values()}
        return devices.pop() if len(devices) == 1 and "meta" not in {d.type for d in devices} else torch.device("cpu")

    def put(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take loaded tensors: copy them into the module's, or keep them for `make`."""
        if self.assigns:
            self._loaded.update(tensors)
            return
        sources = {alias: tensors[target] for alias, target in self._aliases.items() if target in tensors}
        sources |= {name: tensor for name, tensor in tensors.items() if name in self._targets}
        with torch.no_grad():
            for name, tensor in sources.items():
                self._targets[name].copy_(tensor, non_blocking=True)

    def make(self) -> None:
        """With `assign`, make the module's new tensors, tied names one and the same: the first of them that came.

        Each call of torch's may wait for the GIL, a few for each tensor: not for the thread of somebody's event loop.
        """
        found = {name: self._loaded.get(name) for name in self._targets}
        # A checkpoint may hold one of several tied names only, without saying so: the module knows of its ties.
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

    def complete(self) -> None:
        """With `assign`, put what was made in its place: all of it at once, for whoever shares this thread."""
        for submodule, leaf, new in self._made:
            if isinstance(new, nn.Parameter):
                submodule.register_parameter(leaf, new)
            else:
                submodule.register_buffer(leaf, new)

    def discard(self) -> None:
        """Let go of what was loaded and made."""
        self._loaded.clear()
        self._made.clear()


def _has_gradient(dtype: str) -> bool:
    found = TORCH_DTYPES.get(dtype)
    return found is None or found.is_floating_point or found.is_complex


def _place(tensor: torch.Tensor) -> object:
    """Return what two names of one tensor share; unique for tensors without memory."""
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape


def listed(names: tuple[str, ...]) -> str:
    """Return names for a message, the first few of many."""
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN_NAMES} others" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(printable(name) for name in names[:_SHOWN_NAMES]) + more
