"""Kinds of modules: `load_into` and `warm_start` give the result of `load_state_dict`, or refuse before any change.

The rows are those of the table in docs/howto/modules.md.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import MemoryRoot, checkpoint_files
from support import bits_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize, prune

import stio
from stio import sync

PAGE = Path(__file__).parents[2] / "docs/howto/modules.md"

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning"
)

Tensors = dict[str, torch.Tensor]


def values_for(module: nn.Module) -> Tensors:
    """Return tensors for all names that `load_state_dict` of a module expects."""
    found: Tensors = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        own = dict(part._parameters) | {
            name: buffer for name, buffer in part._buffers.items() if name not in part._non_persistent_buffers_set
        }
        for name, tensor in own.items():
            if tensor is not None:
                values = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(found)))
                found[f"{prefix}.{name}".lstrip(".")] = values.to(tensor.dtype)
    return found


@dataclass(frozen=True)
class Row:
    """One kind of module."""

    make: Callable[[], nn.Module]
    """Makes it on the default device."""
    values: Callable[[nn.Module], Tensors] = values_for
    """Returns the tensors of a checkpoint that fits."""
    refuses: str = ""
    """Uses that are refused: of `copied`, `assigned` and `warm`."""
    runs_hooks: bool = False
    """Errors may come after a change, as those of torch."""
    has_meta: bool = True
    """Whether it can be made on `meta`."""


class Part(nn.Linear):
    """A submodule that records which tensors its hooks saw."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.calls: list[object] = []


class Overriding(Part):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.calls.append(prefix)
        if f"{prefix}weight" in state:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, *rest)


class OverridingAll(nn.Sequential):
    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        return super().load_state_dict({name.replace("old.", ""): value for name, value in state.items()}, **options)


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


class Wrapped(torch.Tensor):
    """A tensor that holds its data elsewhere."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data: torch.Tensor) -> None:
        self.data_inside = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_inside)
        raise NotImplementedError(func)


def around(part: nn.Module) -> nn.Module:
    """Return a module with ordinary parts around another one."""
    return nn.Sequential(nn.Linear(2, 3), part, nn.Linear(3, 2))


def frozen() -> nn.Module:
    module = around(nn.Linear(3, 3))
    module[1].requires_grad_(False)
    return module


def complex_parameters() -> nn.Module:
    module = nn.Linear(3, 3, dtype=torch.complex64)
    module.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    return module


def with_buffer(make: Callable[[], torch.Tensor], *, persistent: bool = True) -> nn.Module:
    module = around(nn.Linear(3, 3))
    module[1].register_buffer("extra", make(), persistent=persistent)
    return module


def tied() -> nn.Module:
    module = around(nn.Linear(3, 3))
    module.head = nn.Linear(2, 3)
    module.head.weight = module[0].weight
    return module


def values_of_tied(module: nn.Module) -> Tensors:
    values = values_for(module)
    return values | {"head.weight": values["0.weight"].clone()}


def twice() -> nn.Module:
    part = nn.Linear(3, 3)
    return nn.Sequential(part, nn.ReLU(), part)


def values_of_twice(module: nn.Module) -> Tensors:
    values = values_for(module)
    return values | {"2.weight": values["0.weight"].clone(), "2.bias": values["0.bias"].clone()}


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def parametrized() -> nn.Module:
    module = around(nn.Linear(3, 3))
    parametrize.register_parametrization(module[1], "weight", Doubling())
    return module


def pruned() -> nn.Module:
    module = around(nn.Linear(3, 3))
    prune.l1_unstructured(module[1], "weight", amount=2)
    return module


def values_of_old_weight_norm(module: nn.Module) -> Tensors:
    names = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    return {re.sub("parametrizations.*", lambda m: names[m[0]], name): v for name, v in values_for(module).items()}


def hooked_before() -> nn.Module:
    part = Part()

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        part.calls.append(sorted(state))
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel") + 1

    part.register_load_state_dict_pre_hook(hook)
    return around(part)


def values_with_kernel(module: nn.Module) -> Tensors:
    return {name.replace("1.weight", "1.kernel"): value for name, value in values_for(module).items()}


def hooked_after() -> nn.Module:
    part = Part()

    def hook(module: nn.Module, incompatible: Any) -> None:
        part.calls.append((list(incompatible.missing_keys), list(incompatible.unexpected_keys)))
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name != "1.bias"]

    part.register_load_state_dict_post_hook(hook)
    return around(part)


def without(name: str) -> Callable[[nn.Module], Tensors]:
    return lambda module: {key: value for key, value in values_for(module).items() if key != name}


def copying() -> nn.Module:
    module = around(nn.Linear(3, 3))
    module.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.update({k: v.detach().clone() for k, v in state.items()})
    )
    return module


def renaming() -> nn.Module:
    module = around(nn.Linear(3, 3))

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
        for name in list(state):
            state[f"all.{name}"] = state.pop(name)

    module.register_state_dict_post_hook(hook)
    return module


def views() -> nn.Module:
    module = nn.Module()
    memory = torch.zeros(12)
    module.register_buffer("all", memory)
    module.register_buffer("first", memory[:8].view(2, 4))
    module.register_buffer("last", memory[6:])
    return module


def of_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 3)


def of_a_subclass() -> nn.Module:
    module = around(nn.Linear(3, 3))
    module[1].weight = nn.Parameter(Wrapped(torch.zeros(3, 3)))
    return module


class Plain(torch.Tensor):
    """A tensor with methods of its own only."""


def of_a_plain_subclass() -> nn.Module:
    module = around(nn.Linear(3, 3))
    module[1].weight = nn.Parameter(torch.zeros(3, 3).as_subclass(Plain))
    return module


def values_of_subclass(module: nn.Module) -> Tensors:
    return values_for(around(nn.Linear(3, 3, device="cpu")).to_empty(device="cpu"))


def quantized() -> nn.Module:
    with torch.device("cpu"):
        return nn.Sequential(torch.ao.nn.quantized.Linear(3, 3))


def values_of_extra(module: nn.Module) -> Tensors:
    return values_for(module) | {"1._extra_state": torch.arange(3.0)}


ROWS = {
    "Ordinary modules": Row(lambda: around(nn.LayerNorm(3))),
    "Frozen parameters": Row(frozen),
    "Complex parameters": Row(complex_parameters),
    "Buffers that are not persistent": Row(lambda: with_buffer(lambda: torch.ones(2, device="cpu"), persistent=False)),
    "Batch normalization": Row(lambda: around(nn.BatchNorm1d(3))),
    "Recurrent modules": Row(lambda: nn.Sequential(nn.LSTM(3, 2, num_layers=2), nn.GRU(2, 2))),
    "Tied parameters": Row(tied, values_of_tied),
    "A submodule under two names": Row(twice, values_of_twice),
    "Parametrizations": Row(parametrized),
    "`weight_norm` as a parametrization": Row(
        lambda: around(parametrizations.weight_norm(nn.Linear(3, 3))), refuses="warm", runs_hooks=True
    ),
    "`weight_norm`, the old one": Row(lambda: around(nn.utils.weight_norm(nn.Linear(3, 3)))),
    "`spectral_norm` as a parametrization": Row(
        lambda: around(parametrizations.spectral_norm(nn.Linear(3, 3))), has_meta=False
    ),
    "`spectral_norm`, the old one": Row(
        lambda: around(nn.utils.spectral_norm(nn.Linear(3, 3))), refuses="warm", runs_hooks=True
    ),
    "Pruning": Row(pruned, has_meta=False),
    "Hooks before a load": Row(hooked_before, values_with_kernel, refuses="warm", runs_hooks=True),
    "Hooks after a load": Row(hooked_after, without("1.bias"), refuses="warm", runs_hooks=True),
    "`_load_from_state_dict` overridden": Row(lambda: around(Overriding()), refuses="warm", runs_hooks=True),
    "`load_state_dict` overridden": Row(
        lambda: OverridingAll(nn.Linear(2, 3)),
        lambda module: {f"old.{name}": value for name, value in values_for(module).items()},
        refuses="warm",
        runs_hooks=True,
    ),
    "Extra state": Row(lambda: around(WithExtraState(3, 3)), values_of_extra, refuses="warm", runs_hooks=True),
    "`checkpoint_wrapper`": Row(
        lambda: around(checkpoint_wrapper(nn.Linear(3, 3))),
        lambda module: values_for(around(nn.Linear(3, 3))),
        refuses="warm",
    ),
    "`state_dict` returns copies": Row(copying),
    "`state_dict` renames, and no load hook renames back": Row(renaming, refuses="copied assigned warm"),
    "Lazy modules": Row(
        lambda: around(nn.LazyLinear(3)),
        lambda module: values_for(around(nn.Linear(3, 3))),
        refuses="warm",
        runs_hooks=True,
        has_meta=False,
    ),
    "`torch.compile(module)`": Row(lambda: torch.compile(around(nn.Linear(3, 3)), backend="eager"), refuses="warm"),
    "`DataParallel`": Row(lambda: nn.DataParallel(around(nn.Linear(3, 3))), refuses="warm"),
    "Views of one memory": Row(views),
    "Expanded buffers": Row(
        lambda: with_buffer(lambda: torch.zeros(1, device="cpu").expand(3)), refuses="copied warm", has_meta=False
    ),
    "Tensors of inference mode": Row(of_inference, refuses="copied warm", has_meta=False),
    "Sparse buffers": Row(
        lambda: with_buffer(lambda: torch.zeros(3, device="cpu").to_sparse()), refuses="copied warm", has_meta=False
    ),
    "Parameters of a tensor subclass with its own `__torch_dispatch__`": Row(
        of_a_subclass, values_of_subclass, refuses="copied assigned warm", has_meta=False
    ),
    "Parameters of another tensor subclass": Row(of_a_plain_subclass, has_meta=False),
    "Quantized modules": Row(
        quantized, lambda module: {"0.weight": torch.zeros(3, 3)}, refuses="copied assigned warm", has_meta=False
    ),
}
MORE = {
    "`weight_norm` as a parametrization": Row(
        lambda: around(parametrizations.weight_norm(nn.Linear(3, 3))),
        values_of_old_weight_norm,
        refuses="warm",
        runs_hooks=True,
    ),
    "Batch normalization": Row(lambda: around(nn.BatchNorm1d(3)), without("1.num_batches_tracked"), refuses="warm"),
    "`_load_from_state_dict` overridden": Row(
        lambda: nn.Sequential(Overriding(), nn.Sequential(around(Overriding()))), refuses="warm", runs_hooks=True
    ),
    "Tied parameters": Row(tied, lambda module: values_for(module) | {"head.weight": torch.ones(3, 2)}),
}
"""Variations of some rows."""


def _cases(rows: Mapping[str, Row], end: str = "") -> Iterator[Any]:
    for name, row in rows.items():
        # To compile imports for seconds; `bit_paths` has a compiled module too.
        marks = [pytest.mark.slow] if "compile" in name else []
        yield pytest.param(row, id=re.sub("[^a-z_]+", " ", name.lower()).strip() + end, marks=marks)


CASES = [*_cases(ROWS), *_cases(MORE, " varied")]


def made(row: Row, *, on_meta: bool) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta") if on_meta and row.has_meta else nullcontext():
        return row.make()


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    parts = module.named_modules(remove_duplicate=False)
    return {
        f"{prefix}.{name}": tensor
        for prefix, part in parts
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]
        if tensor is not None
    }


def is_readable(tensor: torch.Tensor) -> bool:
    lazy = isinstance(tensor, nn.parameter.UninitializedTensorMixin)
    return not (lazy or isinstance(tensor, Wrapped) or tensor.is_meta or tensor.layout is not torch.strided)


def described(module: nn.Module) -> dict[str, object]:
    """Return the values of a module's tensors, their kinds, and what hooks and extra state have recorded."""
    found: dict[str, object] = {}
    for name, tensor in tensors_of(module).items():
        value = bits_of(tensor.detach()) if is_readable(tensor) else "unreadable"
        found[name] = type(tensor).__name__, tensor.dtype, tensor.requires_grad, str(tensor.device), value
    for name, part in module.named_modules():
        if isinstance(part, Part):
            found[f"{name} calls"] = part.calls
        if isinstance(part, WithExtraState) and hasattr(part, "extra"):
            found[f"{name} extra"] = part.extra.tolist()
    return found


def as_torch(module: nn.Module, tensors: Tensors, **options: Any) -> object:
    """Return the names that `load_state_dict` reports, or its error."""
    try:
        found = module.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, **options)
    except RuntimeError as error:
        return error
    return sorted(found.missing_keys), sorted(found.unexpected_keys)


def as_stio(module: nn.Module, tensors: Tensors, **options: Any) -> object:
    try:
        report = sync.load_into(module, MemoryRoot(checkpoint_files(tensors)), **options)
    except stio.StioError as error:
        return error
    return sorted(report.missing), sorted(report.unexpected)


def checkpoints(row: Row) -> list[Tensors]:
    """Return a checkpoint that fits, one with a name less, and one with a name more."""
    fitting = row.values(made(row, on_meta=False))
    less = dict(list(fitting.items())[1:])
    return [fitting, less, fitting | {"other.name": torch.ones(2)}]


@pytest.mark.matrix
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "common"])
@pytest.mark.parametrize("use", ["copied", "assigned"])
@pytest.mark.parametrize("row", CASES)
def test_load_into_does_what_load_state_dict_does(row: Row, use: str, strict: bool) -> None:
    assign = use == "assigned"
    for tensors in checkpoints(row):
        module, expected = (made(row, on_meta=assign) for _ in range(2))
        objects, before = {name: id(tensor) for name, tensor in tensors_of(module).items()}, described(module)
        found = as_stio(module, tensors, assign=assign, strict=strict)
        if isinstance(found, stio.StioError) and (use in row.refuses or not row.runs_hooks):
            assert described(module) == before
            assert objects == {name: id(tensor) for name, tensor in tensors_of(module).items()}
        if use in row.refuses:
            assert isinstance(found, stio.StioError)
            continue
        wanted = as_torch(expected, tensors, assign=assign, strict=strict)
        if not _is_tied(row) or isinstance(wanted, RuntimeError) is isinstance(found, stio.StioError):
            assert isinstance(found, stio.StioError) is isinstance(wanted, RuntimeError), (found, wanted)
        if not isinstance(found, stio.StioError) and not isinstance(wanted, RuntimeError):
            if not _is_tied(row):
                assert found == wanted
            if not (_is_tied(row) and assign):
                assert described(module) == described(expected)


def _is_tied(row: Row) -> bool:
    """Tied names may be absent, and stay tied; there stio gives more than torch."""
    return row.make in (tied, twice)


@pytest.mark.matrix
@pytest.mark.parametrize("row", CASES)
def test_a_warm_start_gives_the_same_module(row: Row) -> None:
    tensors = checkpoints(row)[0]
    module, expected = (made(row, on_meta=True) for _ in range(2))
    before = {name: id(tensor) for name, tensor in tensors_of(module).items()}
    try:
        with sync.warm_start(module, MemoryRoot(checkpoint_files(tensors))) as warm:
            warm.done()
    except stio.StioError:
        assert "warm" in row.refuses or not row.has_meta
        assert before == {name: id(tensor) for name, tensor in tensors_of(module).items()}
        return
    assert "warm" not in row.refuses
    assert not isinstance(as_torch(expected, tensors, assign=True), RuntimeError)
    if not _is_tied(row):
        assert described(module) == described(expected)
    for name, parameter in module.named_parameters():
        assert not parameter.is_meta, name


def test_tied_parameters_stay_tied_and_get_the_value_of_the_last_name() -> None:
    values = MORE["Tied parameters"].values(tied())
    for assign in [False, True]:
        module = tied()
        assert as_stio(module, values, assign=assign) == ([], [])
        assert module.head.weight is module[0].weight
        assert torch.equal(module[0].weight, values["head.weight"])


def test_parameters_are_swapped_if_torch_is_set_to_that() -> None:
    values = values_for(around(nn.Linear(3, 3)))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for assign in [False, True]:
            module = around(nn.Linear(3, 3))
            before = list(module.parameters())
            assert as_stio(module, values, assign=assign) == ([], [])
            assert all(old is new for old, new in zip(before, module.parameters(), strict=True))
            assert all(torch.equal(module.get_parameter(name), value) for name, value in values.items())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("assign", [False, True])
def test_a_hook_gets_the_tensors_of_its_part_on_the_thread_of_the_load(assign: bool) -> None:
    module, threads = nn.Sequential(hooked_before(), nn.Linear(2, 2)), []
    module[0][1].register_load_state_dict_pre_hook(lambda *_: threads.append(threading.get_ident()))
    values = values_for(module)
    assert as_stio(module, values, assign=assign) == ([], [])
    assert module[0][1].calls == [["0.1.bias", "0.1.weight"]]
    assert len(threads) == 1 and threads[0] != threading.get_ident()
    assert all(torch.equal(module.get_parameter(name), value) for name, value in values.items())


@pytest.mark.parametrize("assign", [False, True])
def test_parts_that_no_hook_concerns_are_compared_before_the_load(assign: bool) -> None:
    module = nn.Sequential(hooked_before(), nn.Linear(2, 2))
    values = values_for(module)
    for wrong in ({"1.weight": torch.ones(2, 3)}, {"1.other": torch.ones(2)}):
        before = described(module)
        assert isinstance(as_stio(module, values | wrong, assign=assign), stio.MismatchError)
        assert described(module) == before


def test_hooks_run_in_the_modes_of_the_caller() -> None:
    """As those of `module.load_state_dict()` do, though on another thread."""
    variable: ContextVar[str] = ContextVar("variable", default="none")
    seen: list[object] = []

    def hook(module: nn.Module, keys: object) -> None:
        module.weight.mul_(2)
        seen.extend((torch.is_autocast_enabled("cpu"), variable.get(), torch.empty(1).device.type))

    module = nn.Linear(2, 2)
    module.register_load_state_dict_post_hook(hook)
    variable.set("of the caller")
    tensors = {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    root = MemoryRoot(checkpoint_files(tensors))
    with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
        sync.load_into(module, root)
    assert seen == [True, "of the caller", "meta"] and module.weight.tolist() == [[2.0, 2.0]] * 2


def test_a_hook_on_a_wrapper_of_checkpointing_runs() -> None:
    module, calls = nn.Sequential(checkpoint_wrapper(nn.Linear(3, 3))), []
    module[0].register_load_state_dict_post_hook(lambda *_: calls.append("called"))
    values = values_for(nn.Sequential(nn.Linear(3, 3)))
    assert as_stio(module, values) == ([], [])
    assert calls == ["called"]
    assert torch.equal(module[0]._checkpoint_wrapped_module.weight, values["0.weight"])


def test_an_error_of_a_hook_comes_out_as_it_is() -> None:
    module = around(nn.Linear(3, 3))

    def hook(*_: object) -> None:
        raise LookupError("mine")

    module[1].register_load_state_dict_post_hook(hook)
    with pytest.raises(LookupError, match="mine"):
        as_stio(module, values_for(module))


def fitted(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stio.runtime.memory.available_bytes", lambda enough=0: nbytes)


@pytest.mark.slow
@pytest.mark.parametrize("hooked", [False, True])
def test_what_hooks_get_must_fit_into_memory(hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4096, 2048), nn.Linear(2048, 4096))  # 32 MiB each
    if hooked:
        module[0].register_load_state_dict_pre_hook(lambda *_: None)
    values = {name: torch.zeros(tensor.shape) for name, tensor in module.state_dict().items()}
    read: list[int] = []
    options: dict[str, Any] = {"memory": "copy", "progress": lambda event: read.append(event.done_bytes)}
    fitted(48 << 20, monkeypatch)
    if hooked:
        found = as_stio(module, values, **options)
        assert isinstance(found, stio.HostMemoryError)
        assert found.needed_bytes is not None and found.needed_bytes > 64 << 20
        assert not any(read)
        fitted(80 << 20, monkeypatch)
    assert as_stio(module, values, **options) == ([], [])


def test_a_tensor_of_inference_mode_is_filled_inside_inference_mode() -> None:
    module = of_inference()
    values = values_for(module)
    with torch.inference_mode():
        assert as_stio(module, values) == ([], [])
        assert torch.equal(module.weight, values["weight"])


def test_an_assigned_recurrent_module_computes_with_the_new_parameters() -> None:
    source = nn.LSTM(3, 2)
    with torch.device("meta"):
        module = nn.LSTM(3, 2)
    assert as_stio(module, {name: tensor.detach() for name, tensor in source.named_parameters()}, assign=True)
    x = torch.rand(4, 3)
    assert torch.equal(module(x)[0], source(x)[0])


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (nn.DataParallel, "module."),
        pytest.param(torch.compile, "_orig_mod.", marks=pytest.mark.slow),  # as above
        (lambda m: nn.ModuleDict({"model": m}), "model."),
    ],
)
@pytest.mark.parametrize("assign", [False, True])
def test_a_prefix_is_never_guessed_and_the_error_names_it(wrap: Any, prefix: str, assign: bool) -> None:
    wrapped, plain = wrap(nn.Linear(3, 3)), nn.Linear(3, 3)
    bare = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
    for module, tensors in [(wrapped, bare), (plain, {prefix + name: value for name, value in bare.items()})]:
        before = described(module)
        found = as_stio(module, tensors, assign=assign)
        assert isinstance(found, stio.MismatchError)
        assert prefix in found.message.split(";", 2)[2]
        assert described(module) == before


def test_instance_norm_refuses_old_statistics_as_torch() -> None:
    module = around(nn.InstanceNorm1d(3, affine=True))
    values = values_for(module) | {"1.running_mean": torch.ones(3)}
    before = described(module)
    assert isinstance(as_torch(module, values, strict=False), RuntimeError)
    module = around(nn.InstanceNorm1d(3, affine=True))
    before = described(module)
    assert isinstance(as_stio(module, values, strict=False), stio.MismatchError)
    assert described(module) == before


def test_the_table_of_the_docs_has_these_rows_and_says_what_is_refused() -> None:
    lines = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert [name for name, _, _ in lines] == list(ROWS)
    for name, load, warm in lines:
        refuses = ROWS[name].refuses
        assert warm.startswith("Refused") is ("warm" in refuses), name
        assert load.startswith("Refused") is ("assigned" in refuses), name
        assert ("refused otherwise" in load) is ("copied" in refuses and "assigned" not in refuses), name
        assert ("see below" in load) is ("see below" in warm) is _is_tied(ROWS[name]), name
