"""A module as the target of a load: compares it with the checkpoint, and puts the tensors into it.

The result is that of `module.load_state_dict`. Names and shapes are compared before any tensor is read. Tensors are
copied into those of the module when their group is loaded. With `assign`, groups are collected, and replace all of the
module's tensors together at the end. If code of the module takes part in loads (`ModuleTree.custom`), all tensors are
collected, and torch's own `load_state_dict` fills the module, on the load's thread.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stio import process
from stio.device import TORCH_DTYPES, FileNames, LoadedGroup, TorchAccelerator, typed
from stio.errors import MismatchError, WarmStartError, listed, one_line, printable, with_article
from stio.format.state import STATE_KEY, TREE_TENSOR
from stio.loading.casts import require_together, warn_of_codes
from stio.loading.options import LoadOptions
from stio.loading.targets.base import LoadReport, LoadTarget, LocalPart, PartOf, Place, Stored, whole_of
from stio.loading.targets.module_tree import (
    ModuleTree,
    Span,
    is_on_meta,
    memory_key,
    overlapping,
    span_of,
    span_to_fill,
    tied_names,
    views_in_files,
    why_refused,
)
from stio.storage.checkpoint import OpenCheckpoint
from stio.text import log

_SHOWN_CHARACTERS = 2000
_WRAPPERS = re.compile(r"_orig_mod\.|module\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")
"""What wrappers of torch add to names: `torch.compile`, DDP and `DataParallel`, `checkpoint_wrapper`, FSDP."""
_OF_ADAPTERS = ("lora_", "poly_lora_", "oft_", "ln_tuning_")
"""How names of PEFT's layers begin that hold a module for each adapter."""


_STATE = (
    "it is a nested state of save_state: load_state returns it, and `module.load_state_dict()` takes the part of it "
    "that belongs to the module, such as state['model']"
)


def _current_modes() -> list[AbstractContextManager[object]]:
    """Return contexts with the calling thread's gradient mode, autocast and default device, for another thread."""
    kinds = {"cpu", *(device.type for device in TorchAccelerator.current_streams())}
    autocast = [
        torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=torch.is_autocast_cache_enabled())
        for kind in sorted(kinds)
        if torch.is_autocast_enabled(kind)
    ]
    return [torch.set_grad_enabled(torch.is_grad_enabled()), torch.device(torch.get_default_device()), *autocast]


class ModuleTarget(LoadTarget):
    """A module's tensors as the target of a load.

    Args:
        module: The module; the names of its parameters and persistent buffers are the expected ones.
        assign: Replace the tensors by the loaded ones instead of copying into them.
        fills: Tensors on `meta` get new memory elsewhere (`stio.warm_start`); this object only compares.
        part_of: Returns the part of a tensor that this process holds.

    Raises:
        TypeError: It is no module.
        MismatchError: `state_dict()` of the module renames tensors, and no code of it renames them back in a load. Or
            `part_of` refuses a tensor.
    """

    _is_apart = True  # `select` leaves a module whose tensors overlap to torch's load_state_dict

    def __init__(
        self, module: nn.Module, *, assign: bool = False, fills: bool = False, part_of: PartOf | None = None
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"load_into takes a module, not {_kind_of(module)}; stio.load returns tensors, and "
                "stio.distributed.load_into fills those of a dictionary"
            )
        if not isinstance(assign, bool):
            raise TypeError(f"assign= takes True or False, not {assign!r}")
        super().__init__()
        self._module = module
        self._fills = fills
        self.assigns = assign
        with process.collection_paused(sys.maxsize):  # how many tensors there are is not known yet
            self._tree = ModuleTree(module)
        self._can_assign = part_of is None  # loads of ranks fill memory
        self._parts: dict[str, LocalPart] = {}
        if part_of is not None:
            parts = {name: part_of(name, tensor) for name, tensor in self._tree.tensors.items()}
            self._parts = {name: part for name, part in parts.items() if part is not None}
        self._targets = self._tree.tensors | {name: part.local for name, part in self._parts.items()}
        self._fillable: set[str] = set()  # ordinary tensors, which a copy can fill
        self._ties: dict[str, list[str]] = {}  # by name, all names of its tensor, where there are several
        if self._tree.renames:
            self._require_own_names()
        self._stored: dict[str, Stored] = {}
        self._aliases: Mapping[str, str] = {}
        self._names: dict[str, None] = {}  # all names of the checkpoint
        self._chosen: dict[str, str] = {}  # by name, the one of all names of its tensor whose data is loaded
        self._by_torch = False  # whether `load_state_dict` fills the module
        self._streams = TorchAccelerator.current_streams()  # as `_inference`: of the caller's thread
        self._modes, self._context = _current_modes(), copy_context()
        self._strict = True
        self._loaded: dict[str, torch.Tensor] = {}
        self._made: dict[str, torch.Tensor] = {}
        self.report = LoadReport((), ())
        """Names that only module or checkpoint has, after `select`."""

    def _require_own_names(self) -> None:
        """Raise if `state_dict()` has a tensor under a name that `load_state_dict` does not use for it."""
        names: dict[object, set[str]] = {}
        for name, target in self._targets.items():
            names.setdefault(memory_key(target, span_of(target)), set()).add(name)
        for name, value in self._module.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and not self._tree.is_custom(name) and name not in self._parts:
                own = names.get(memory_key(value, span_of(value)))
                if own is not None and name not in own:
                    raise MismatchError(
                        "state_dict() of the module renames tensors, and no load hook renames them back, so "
                        "load_state_dict() would put a tensor of this name elsewhere or nowhere; give the module a "
                        "hook by register_load_state_dict_pre_hook()",
                        expected=f"the name {printable(min(own))}",
                        found=name,
                    )

    def _find_ties(self) -> dict[str, Span]:
        """Find tensors with several names, and those that can be filled; return where the memory of each tensor is."""
        spans: dict[str, Span] = {}
        for name, target in self._targets.items():
            if span := span_to_fill(target):
                self._fillable.add(name)
            spans[name] = span or span_of(target)
        for name, part in self._parts.items():
            if not part.local.numel():  # without an address, two names of one tensor are found by the object
                spans[name] = (-id(self._tree.tensors[name]),) * 2
        self._ties = tied_names(self._targets, spans)
        return spans

    def _choose(self) -> None:
        """Choose whose data a tied tensor gets: that of its last name, as the last copy of load_state_dict does."""
        for name, names in self._ties.items():
            if present := [own for own in names if own in self._names]:
                chosen = present[-1]
                if self.assigns:  # of the names with the same data in the file, the first determines the device
                    source = self._source_of(chosen)
                    chosen = next(own for own in names if self._source_of(own) == source)
                self._chosen[name] = chosen

    def select(self, opened: OpenCheckpoint, options: LoadOptions, check: Callable[[], None]) -> list[str]:
        """See `LoadTarget.select`. Names of custom submodules are compared by `load_state_dict`.

        Returns:
            The names to read; those of the module if all tensors are collected.

        Raises:
            MismatchError: A shape differs; or names do, and `strict`, or if transformers must convert them; or a tensor
                of the module cannot be filled, or a buffer on `meta` is not persistent.
            WarmStartError: With `fills`, a submodule is custom.
        """
        with process.collection_paused(sum(map(len, opened.headers))):
            self._begin(opened.path)
            self._strict, tree = options.strict, self._tree
            self._stored = opened.dtypes_and_shapes()
            if TREE_TENSOR not in self._targets:  # of a nested state
                self._stored.pop(TREE_TENSOR, None)
            if not self._targets.keys() <= self._stored.keys():
                self._use_names_of_files()
            spans = self._find_ties()
            self._aliases = {a: t for a, t in opened.aliases.items() if a in self._targets or tree.is_custom(a)}
            self._names = dict.fromkeys([*self._stored, *self._aliases])
            self._choose()
            self._by_torch = self._must_use_torch(spans)
            self._require_supported()
            self._require_targets()
            self._compare_names(is_state=STATE_KEY in opened.metadata)
            self._require_values()
            if self._by_torch:
                return [name for name in self._names if name in self._targets or tree.is_custom(name)]
            if self._parts:
                self._join_parts()
            return [name for name in self._names if name in self._places]

    def _require_supported(self) -> None:
        if self._tree.refused:
            name, why = next(iter(self._tree.refused.items()))
            shown = f"the submodule {printable(name)!r}" if name else "the module"
            raise MismatchError(f"{shown} cannot be loaded into: {why}", path=self._path)
        if self._fills and self._tree.custom:
            raise WarmStartError(
                "load hooks, overridden methods and extra state need loaded tensors, and a warm start has none yet; "
                f"load_into(..., assign=True) calls them: {self._custom_names()}",
                path=self._path,
            )
        if self._parts and self._by_torch:
            what = (
                f"code of {self._custom_names()} that takes part in loads"
                if self._tree.custom
                else "tensors that overlap"
            )
            raise MismatchError(
                f"the module's tensors are parts, and {what} would need the whole ones; shard the module after the "
                "load, or load into module.state_dict(), which runs no such code",
                path=self._path,
            )
        if old := [name for name in self._tree.must_lack if name in self._names]:
            raise MismatchError(
                "the checkpoint has statistics of a normalization that does not track them "
                f"(track_running_stats=False): {listed(old)}",
                path=self._path,
            )

    def _custom_names(self) -> str:
        return listed([name or "the module itself" for name in self._tree.custom])

    def _must_use_torch(self, spans: Mapping[str, Span]) -> bool:
        """Return whether torch itself must put in all tensors.

        Code of the module takes part; or tensors overlap, so that the order of copies decides; or torch is set to swap
        the contents of parameters.
        """
        if self._tree.custom or self._fills:
            return not self._fills
        if self.assigns:
            return torch.__future__.get_swap_module_params_on_conversion()
        return overlapping(span for name, span in spans.items() if self._is_loaded(name))

    def _is_loaded(self, name: str) -> bool:
        """Return whether a tensor of the module gets its data by this one of its names."""
        return name in self._names and self._chosen.get(name, name) == name

    def _compare_names(self, *, is_state: bool) -> None:
        tree, stored = self._tree, self._stored
        missing = tuple(
            name
            for name in self._targets
            if name not in self._names
            and name not in tree.may_lack
            and name not in self._chosen
            and not tree.is_custom(name)
        )
        unexpected = tuple(name for name in stored if name not in self._targets and not tree.is_custom(name))
        has_common = len(unexpected) < len(stored)
        if is_state and missing and not has_common:
            message = f"the checkpoint has no tensor of the module: missing {listed(missing)}; {_STATE}"
            raise MismatchError(message, path=self._path)
        if self._strict and (missing or unexpected):
            reason = "the checkpoint does not fit the module; strict=False loads the common names"
            if not has_common:
                reason = "the checkpoint and the module have no name in common; load the checkpoint of this model"
            raise MismatchError(f"{reason}: {_named(missing, unexpected)}", path=self._path)
        if stored and not tree.custom and self._targets.keys().isdisjoint(self._names):
            what = "%s: no tensor has a name of the module, so nothing is loaded: %s"
            log(logging.WARNING, what, self._path, _named(missing, unexpected))
        self.report = LoadReport(missing, unexpected, tuple(tree.never_stored), self._path)

    def _use_names_of_files(self) -> None:
        """Fill views that have the names and shapes of the checkpoint, if transformers has changed those of the module.

        Raises:
            MismatchError: The module has no memory, or the tensors of the files are no views of it.
        """
        tree = self._tree
        others = [name for name in self._stored if name not in self._targets]
        kinds = (FileNames(self._module, as_read=as_read) for as_read in (True, False))
        names = next((names for names in kinds if names.has_any(others)), None)
        if names is None:
            return
        needs_others = self.assigns or self._fills
        views = views_in_files(names, tree.tensors)
        if views and not (needs_others or self._parts or tree.custom or any(map(is_on_meta, tree.tensors.values()))):
            tree.tensors = self._targets = views
            return
        in_place = "; or call load_into without assign=True for a module that is not on 'meta': it converts them"
        raise MismatchError(
            "transformers gives tensors of this model other names and shapes in files than in the module, and "
            "from_pretrained converts them: call that after stio.compat.install(), which reads by stio too; or "
            f"save with save_pretrained(..., save_original_format=False){in_place if views and needs_others else ''}. "
            f"Only in files: {listed(names.in_files.values())}",
            path=self._path,
        )

    def _require_values(self) -> None:
        """Raise for buffers that nothing has values for, and for quantized tensors that would lose their meaning."""
        left = [name for name, buffer in self._tree.never_stored.items() if is_on_meta(buffer)]
        if left := [name for name in left if not self._tree.is_custom(name)]:  # a hook may compute the others
            raise MismatchError(
                "no checkpoint holds these buffers (persistent=False), and they are on 'meta', without values; before "
                "the load, assign each its values (setattr of its submodule), or make it on a device and not on "
                f"'meta': {listed(left)}",
                path=self._path,
            )
        filled = [name for name in self._targets if name in self._names and not self._tree.is_custom(name)]
        require_together(
            {name: dtype for name, (dtype, _) in self._stored.items()},
            self._targets,
            {name: self._source_of(name) for name in filled},
            assigns=self.assigns,
            path=self._path,
        )

    def _require_targets(self) -> None:
        """Compare tensors with those of the checkpoint, and note their places.

        Raises:
            MismatchError: torch would not fill a tensor, or would silently replace it by something else; or a shape or
                a dtype does not fit.
        """
        empty, wrong, has_custom = [], [], bool(self._tree.custom)
        for name, target in self._targets.items():
            source, is_custom = self._aliases.get(name, name), has_custom and self._tree.is_custom(name)
            # A hook may rename a tensor of the checkpoint to any name of its submodule.
            if not is_custom and name not in self._names:
                continue
            if self.assigns or is_on_meta(target):
                if why := why_refused(target):
                    raise MismatchError(f"{printable(name)} cannot be filled: {why}", path=self._path)
                if not self.assigns and name in self._names:
                    empty.append(name)
            elif name not in self._fillable:
                self._require_memory(name, target, can_assign=self._can_assign)
            if is_custom or source not in self._stored:
                continue
            part, (dtype, shape) = self._parts.get(name), self._stored[source]
            expected = tuple(target.shape) if part is None else part.shape
            if shape != expected and not TORCH_DTYPES.fits(dtype, shape, expected):
                wrong.append(f"{printable(name)} is {list(shape)} in the checkpoint, {list(expected)} in the module")
            elif TORCH_DTYPES.get(dtype) != target.dtype:
                self._require_dtype(name, target, dtype)
            if not self._by_torch and self._is_loaded(name):
                place = Place(name, target, part, None, dtype)
                self._places.setdefault(name if self.assigns else source, []).append(place)
        if empty and not self._fills:
            remedy = "pass assign=True" if self._can_assign else "call module.to_empty(device=...) first"
            raise MismatchError(
                f"the module's tensors on 'meta' have no memory to copy into; {remedy}: {listed(empty)}",
                path=self._path,
            )
        if wrong:
            raise MismatchError(
                f"shapes differ; make the module with the checkpoint's settings: {listed(wrong, separator='; ')}",
                path=self._path,
            )

    def _require_dtype(self, name: str, target: torch.Tensor, dtype: str) -> None:
        """Raise if a tensor of the module cannot have the values of another dtype, which the checkpoint has."""
        if self.assigns and target.requires_grad and not _has_gradient(dtype):
            raise MismatchError(
                "the module's parameter requires a gradient, which this dtype cannot have; assign=False casts",
                path=self._path,
                expected="a floating or complex dtype",
                found=f"{dtype} for {name}",
            )
        is_copied = not (self.assigns or self._fills or target.is_quantized)
        if is_copied and TORCH_DTYPES.loses_values(dtype, target.dtype):
            raise MismatchError(
                "a copy would lose the values of a tensor, whose dtype in the module is of another kind; "
                + ("assign=True keeps" if self._can_assign else "give the module")
                + " the dtype of the checkpoint",
                path=self._path,
                expected=str(target.dtype),
                found=f"{dtype} for {name}",
            )

    def _source_of(self, name: str) -> str:
        return self._aliases.get(name, name)

    @property
    def names(self) -> list[str]:
        """Names of the module's tensors, in its order."""
        return list(self._targets)

    @property
    def sources(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Name in the checkpoint and tensor, by the module's name, after `select`. Tied tensors have one source."""
        return {name: (self._source_of(self._chosen.get(name, name)), target) for name, target in self._targets.items()}

    def warn_of_device(self, device: object) -> None:
        """Log that `device=` of a call moves nothing, if the module's tensors are copied into and are elsewhere."""
        wanted = str(device).partition(":")[0]
        if self.assigns or not isinstance(device, str | torch.device) or wanted in ("cpu", "auto"):
            return
        own = {target.device.type for target in self._targets.values()}
        if own and not own & {wanted, "meta"}:
            log(
                logging.WARNING,
                "device=%r of load_into is for assign=True: without it the module's tensors stay on %s; move the "
                "module first, or pass assign=True",
                str(device),
                listed(sorted(own)),
            )

    def synchronize(self) -> None:
        """Wait for all work on the devices of the tensors: `copy_rows` is not in the order of the caller's stream."""
        for device in {target.device for target in self._targets.values()}:
            if device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(device)

    def copy_rows(self, source: str, rows: torch.Tensor, dim: int, begin: int, whole: tuple[int, ...]) -> None:
        """Copy some rows of a tensor of the checkpoint into those of the module, as far as they hold them; blocks.

        Args:
            source: Name in the checkpoint.
            rows: Rows of its tensor, on the CPU.
            dim: The dimension of which they are a part; all dimensions before it have size 1.
            begin: Place of the first of them.
            whole: Shape of the tensor.
        """
        with self._writing():
            for name, memory, part, *_ in self._places.get(source, ()):
                index, common = whole_of(whole) if part is None else part.index, rows
                if index and memory.dim():  # what the rows and this part of the tensor have in common
                    first, end = max(begin, index[dim].start), min(begin + rows.shape[dim], index[dim].stop)
                    if first >= end:
                        continue
                    self._memory.extent(name, memory)  # torch makes no views of a storage that is too short
                    common = rows[(*index[:dim], slice(first - begin, end - begin), *index[dim + 1 :])]
                    memory = memory.narrow(dim, first - index[dim].start, end - first)
                self._memory.copy([(name, memory, common)], lost=self.lost)

    @property
    def keeps(self) -> bool:
        """Whether the load collects all tensors by `keep`, and then calls `make`; after `select`."""
        return self.assigns or self._by_torch

    def _takes_elements(self) -> bool:
        return not self.keeps and super()._takes_elements()

    def keep(self, group: LoadedGroup) -> None:
        """Collect a group's tensors for `make`."""
        self._loaded |= group.take()

    def make(self) -> None:
        """Make the module's new tensors, on the load's thread; tied names get the same one. Or call `load_state_dict`.

        Each tensor needs a few calls of torch, which may wait for the GIL: so not on the thread of an event loop.
        """
        if self._by_torch:
            self.report = self._load_as_torch()
            return
        for chosen in self._places:
            new, names = self._new(chosen), self._ties.get(chosen)
            if names is None and not self._aliases:  # no other name has this tensor
                self._made[chosen] = _become(self._targets[chosen], new)
                continue
            names = names or [chosen]
            # Names of one parameter share the new one. Two parameters that share memory stay two.
            made = {id(old): _as(old, new) for old in (self._targets[name] for name in names)}
            self._made.update((name, made[id(self._targets[name])]) for name in names)
        for name in self._tree.may_lack:  # in files of old versions, as load_state_dict does
            if name not in self._names and name in self._targets and is_on_meta(self._targets[name]):
                self._made[name] = torch.tensor(0)

    def complete(self) -> LoadReport:
        """Complete the load in the consumer's thread: put all new tensors into the module."""
        try:
            for name, new in self._made.items():
                self._tree.put(name, new)
            self._warn_of_meta()
            return self.report
        finally:
            self.discard()

    def _warn_of_meta(self) -> None:
        """Warn of tensors that have no data after the load: a forward would fail, or compute wrong values."""
        if not (names := (*self.report.unfilled, *self.report.missing)):
            return
        tree = ModuleTree(self._module)
        now = tree.tensors | tree.never_stored
        if left := [name for name in names if name in now and is_on_meta(now[name])]:
            log(
                logging.WARNING,
                "%s: the checkpoint does not hold these tensors of the module, and they stay on 'meta', without data; "
                "assign each its values (setattr of its submodule), or make the module with only those parameters on "
                "'meta' that the checkpoint holds: %s",
                printable(self._path),
                listed(left),
            )

    def _new(self, name: str) -> torch.Tensor:
        new, target = self._loaded[name], self._targets.get(name)
        return new if target is None or is_lazy(target) or target.dim() else typed(new, ())

    def _load_as_torch(self) -> LoadReport:
        """Run the module's `load_state_dict` in the caller's modes of torch."""
        state = self._state()
        for name, target in self._targets.items() if not self.assigns else ():
            if name in state or self._tree.is_custom(name):
                self._memory.require(name, target)  # since the load began, it may have been freed
            if name in self._loaded and not target.is_quantized:
                self.lost.count_cast(name, state[name], target.dtype)  # hooks may change values: counted without them
        options = {"assign": True} if self.assigns else {}  # an overridden method may not have this keyword
        devices = {tensor.device for tensor in (*self._targets.values(), *state.values())}
        try:
            with ExitStack() as modes:
                streams = {device: self._streams[device] for device in devices & self._streams.keys()}
                modes.enter_context(TorchAccelerator.on_streams(streams))
                modes.enter_context(torch.inference_mode(self._inference))
                for mode in self._modes:
                    modes.enter_context(mode)
                keys = self._context.run(self._module.load_state_dict, state, strict=self._strict, **options)
        except RuntimeError as error:
            if not str(error).startswith("Error(s) in loading state_dict"):
                raise
            raise MismatchError(one_line(str(error)[:_SHOWN_CHARACTERS]), path=self._path) from error
        missing, unexpected = (getattr(keys, kind, ()) for kind in ("missing_keys", "unexpected_keys"))
        warn_of_codes({name: kind for name, (kind, _) in self._stored.items()}, set(unexpected), path=self._path)
        return LoadReport(tuple(missing), tuple(unexpected), tuple(self._tree.never_stored), self._path)

    def _state(self) -> OrderedDict[str, torch.Tensor]:
        """Return what `load_state_dict` gets: names of a tie that the checkpoint lacks too, and what is unexpected."""
        nothing = torch.empty(0, device="meta")  # torch only reports the names that are unexpected
        state = OrderedDict((name, self._new(name) if name in self._loaded else nothing) for name in self._names)
        for names in {names[0]: names for names in self._ties.values()}.values():
            if present := [name for name in names if name in state]:
                shared = state[present[-1]]
                if self.assigns and all(isinstance(self._targets[name], nn.Parameter) for name in names):
                    shared = nn.Parameter(shared, requires_grad=False)  # torch sets what the module requires
                state.update((name, shared) for name in names if self.assigns or name not in state)
        return state

    def discard(self) -> None:
        """See `LoadTarget.discard`; drops all loaded and new tensors too."""
        super().discard()
        self._loaded.clear()
        self._made.clear()


def _kind_of(value: object) -> str:
    kind = type(value)
    return f"the class {printable(value.__name__)}" if isinstance(value, type) else with_article(kind.__name__)


def _as(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _become(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return `new` as what `old` is, a parameter or not. Its class is changed: to make another tensor takes longer."""
    if not isinstance(old, nn.Parameter):
        return new
    new.__class__ = nn.Parameter  # as torch's lazy parameters change theirs
    new.requires_grad = old.requires_grad
    return new


def _has_gradient(dtype: str) -> bool:
    found = TORCH_DTYPES.get(dtype)
    return found is None or found.is_floating_point or found.is_complex


def _named(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    return f"missing {listed(missing)}; unexpected {listed(unexpected)}{_advice(missing, unexpected)}"


def _advice(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return advice for names that differ by what a wrapper adds to them; empty if they differ otherwise."""
    if not missing or not unexpected:
        return ""
    bare = [{_WRAPPERS.sub("", name) for name in names} for names in (missing, unexpected)]
    if not (bare[0] <= bare[1] or bare[1] <= bare[0]):
        return (
            _advice_on_prefix(missing, unexpected)
            or _advice_on_prefix(unexpected, missing, "checkpoint")
            or _advice_on_adapters(missing, unexpected)
        )
    added = [sorted({w for n in names for w in _WRAPPERS.findall(n)}) for names in (missing, unexpected)]
    return (
        f"; names differ by what wrappers add: {', '.join(added[0]) or 'nothing'} in the module's names, "
        f"{', '.join(added[1]) or 'nothing'} in the checkpoint's; load into the module without its wrapper "
        "(`.module`, `._orig_mod`), or save the plain module"
    )


def _advice_on_prefix(longer: Sequence[str], shorter: Sequence[str], which: str = "module") -> str:
    """Return advice if most names of one side are names of the other side below a prefix, such as `model.`."""
    known = set(shorter)
    counts = Counter(prefix for name in longer if (prefix := _prefix_of(name, known)))
    if not counts:
        return ""
    prefix, number = counts.most_common(1)[0]
    if 2 * number < max(len(longer), len(shorter)):
        return ""
    remedy = f"load into the submodule module.{printable(prefix[:-1])}"
    if which == "checkpoint":
        remedy = "load with stio.load, remove the prefix from the names, and call the module's load_state_dict"
    others = "" if number == len(longer) else f", {number:,} of {len(longer):,}"
    return f"; only the {which}'s names begin with {printable(prefix)!r}{others}: {remedy}"


def _advice_on_adapters(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Return advice if the checkpoint lacks what PEFT adds to names: `lora_A.default.weight`."""
    parts = [name.rsplit(".", 2) for name in missing if name.count(".") > 1]
    shorter = {
        f"{start}.{end}": part for start, part, end in parts if start.rpartition(".")[2].startswith(_OF_ADAPTERS)
    }
    if 2 * sum(name in shorter for name in unexpected) < len(unexpected):
        return ""
    part = next(shorter[name] for name in unexpected if name in shorter)
    return (
        f"; only the module's names have {printable(f'.{part}.')!r}, as PEFT names an adapter: "
        "peft.set_peft_model_state_dict(module, stio.load(...)) puts the adapter's tensors in place"
    )


def _prefix_of(name: str, known: Collection[str]) -> str:
    """Return what stands before the dot behind which a name is a known one; empty without it."""
    dot = 0
    for _ in range(_MAX_DOTS if len(name) < _MAX_CHARACTERS else 0):
        dot = name.find(".", dot) + 1
        if not dot:
            break
        if name[dot:] in known:
            return name[:dot]
    return ""


_MAX_DOTS, _MAX_CHARACTERS = 8, 1000
"""Bounds on the search for a prefix: names may come from a hostile file."""
