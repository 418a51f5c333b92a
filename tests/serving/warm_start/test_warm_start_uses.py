"""Warm starts: every way to use a parameter waits for it, is answered without its data, or is refused."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from support import eventually, nothing_left, require_equal
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize
from warm import TOKENS, Net, alike, held, in_thread, made, on_meta, saved

import stio
from stio import sync
from stio.errors import WarmStartError


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


# Uses that wait.


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


def pickled(module):
    return pickle.loads(pickle.dumps(module)).state_dict()


def saved_by_torch(module):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def trained(module):
    """One step; the optimizer was made before anything was there."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
    module(TOKENS).square().mean().backward()
    optimizer.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def functional(module):
    with torch.no_grad():
        return torch.func.functional_call(module, dict(module.named_parameters()), (TOKENS,))


def initialised(module):
    nn.init.constant_(module.norm.weight, 3.0)
    return module.norm.weight.detach()


def in_place(module):
    with torch.no_grad():
        module.scale += 1
        module.scale[0] = 7
    return module.scale.detach()


def replaced_data(module):
    module.scale.data = torch.ones(8)
    return module.scale.detach()


def parametrized(module):
    parametrize.register_parametrization(module.first, "weight", Doubled())
    return module.first.weight.detach()


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def weight_normed(module):
    parametrizations.weight_norm(module.first)
    return module.first(torch.ones(8)).detach()


def by_inference(module):
    with torch.inference_mode():
        out = module(TOKENS)
    assert not module.scale.is_inference()
    return out.clone()


def under_autocast(module):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return module(TOKENS)


def with_a_default_device(module):
    with torch.device("cpu"), torch.no_grad():
        return module(TOKENS)


def gradients(module):
    module(TOKENS).sum().backward()
    return {name: p.grad for name, p in module.named_parameters()}


def gradients_of_a_function(module):
    Scale(module.scale)(torch.ones(2, 8)).sum().backward()
    return module.scale.grad


class Scale(nn.Module):
    """Gives its parameter to a function where no class of the parameter's is asked."""

    def __init__(self, scale=None):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8)) if scale is None else scale

    def forward(self, x):
        return Scaled.apply(x, self.scale)


class Borrowing(nn.Module):
    """Gives another module's parameter to such a function, so that no hook waits for it."""

    def __init__(self):
        super().__init__()
        self.lender = Scale()

    def forward(self, x):
        return Scaled.apply(x, self.lender.scale)


def hooked(module):
    module.scale.register_hook(lambda gradient: gradient * 0 + 5)
    module(TOKENS).sum().backward()
    return module.scale.grad


def double(module):
    return module.double().state_dict()


USES = {
    "forward": lambda m: m(TOKENS).detach(),
    "inference mode": by_inference,
    "autocast": under_autocast,
    "default device": with_a_default_device,
    "functional": lambda m: nn.functional.linear(torch.ones(8), m.first.weight).detach(),
    "functional, by keyword": lambda m: nn.functional.layer_norm(torch.ones(8), [8], weight=m.norm.weight).detach(),
    "operator": lambda m: (2 * m.scale).detach(),
    "matmul": lambda m: (torch.ones(8) @ m.first.weight).detach(),
    "in a list": lambda m: torch.stack([m.scale, m.norm.weight]).detach(),
    "einsum": lambda m: torch.einsum("i,ij->j", torch.ones(8), m.first.weight).detach(),
    "foreach": lambda m: torch._foreach_norm(list(m.parameters())),
    "out=": lambda m: torch.add(torch.ones(8), 1, out=m.scale.data),
    "index": lambda m: m.scale[2:4].detach(),
    "iterate": lambda m: [x.detach() for x in m.scale],
    "contains": lambda m: 5.0 in m.scale,
    "compare": lambda m: (m.scale == 1).any(),
    "data": lambda m: m.scale.data,
    "detach": lambda m: m.scale.detach(),
    "clone": lambda m: m.scale.clone().detach(),
    "to": lambda m: m.scale.to("cpu").detach(),
    "numpy": lambda m: torch.from_numpy(np.array(m.scale.detach().numpy())),
    "array": lambda m: torch.from_numpy(np.asarray(m.norm.weight.requires_grad_(False)).copy()),
    "dlpack": lambda m: torch.from_dlpack(m.scale.requires_grad_(False)).clone(),
    "tolist": lambda m: m.scale.tolist(),
    "item": lambda m: m.scale.sum().item(),
    "bool": lambda m: bool(m.scale.max()),
    "storage": lambda m: m.scale.untyped_storage().nbytes(),
    "format": lambda m: f"{m.scale}",
    "new tensors": lambda m: torch.zeros_like(m.scale).detach(),
    "new_zeros": lambda m: m.scale.new_zeros(3),
    "as_tensor": lambda m: torch.as_tensor(m.scale).detach(),
    "share_memory_": lambda m: m.scale.share_memory_().detach(),
    "state_dict": lambda m: m.state_dict(),
    "deepcopy": lambda m: copy.deepcopy(m).state_dict(),
    "deepcopy of one": lambda m: copy.deepcopy(m.scale).detach(),
    "copy of one": lambda m: copy.copy(m.scale).detach(),
    "pickle": pickled,
    "pickle of one": lambda m: pickle.loads(pickle.dumps(m.scale)).detach(),
    "torch.save": saved_by_torch,
    "double": double,
    "to(device)": lambda m: m.to("cpu").state_dict(),
    "parameters_to_vector": lambda m: parameters_to_vector(m.parameters()).detach(),
    "clip_grad_norm_": lambda m: gradients(m) and nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "functional_call": functional,
    "weight_norm": weight_normed,
    "init": initialised,
    "in place": in_place,
    "data =": replaced_data,
    "optimizer": trained,
    "gradients": gradients,
    "autograd.grad": lambda m: torch.autograd.grad((m.scale * 2).sum(), [m.scale]),
    "hook": hooked,
}


@pytest.mark.matrix
@pytest.mark.parametrize("use", USES)
def test_waits(tmp_path, use):
    with held(Net, tmp_path) as load:
        parameters = dict(load.module.named_parameters())
        found = load.after_waiting(USES[use])
        assert same(found, USES[use](load.real)), (found, USES[use](load.real))
        for name, parameter in load.module.named_parameters():
            assert parameter is parameters.get(name, parameter)


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        alike_in_kind = found.dtype == expected.dtype and found.device == expected.device
        return alike_in_kind and (torch.equal(found, expected) or alike(found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


# What is known without the data.


ANSWERED = {
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0)),
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "is_cpu": lambda p: (p.is_cpu, p.is_cuda),
    "layout": lambda p: p.layout,
    "numel": lambda p: (p.numel(), torch.numel(p), p.nelement(), p.dim(), p.ndim, len(p)),
    "bytes": lambda p: (p.nbytes, p.itemsize, p.element_size()),
    "stride": lambda p: (p.stride(), p.is_contiguous(), p.storage_offset()),
    "kind": lambda p: (p.is_floating_point(), torch.is_floating_point(p), p.is_complex(), p.is_sparse, p.is_quantized),
    "grad": lambda p: (p.grad, p.grad_fn, p.is_leaf, p.requires_grad, p.retains_grad),
    "isinstance": lambda p: (isinstance(p, nn.Parameter), isinstance(p, torch.Tensor), torch.is_tensor(p)),
    "hash": lambda p: {p: 1}[p],
    "weakref": lambda p: weakref.ref(p)() is p,
}


@pytest.mark.matrix
@pytest.mark.parametrize("question", ANSWERED)
def test_answers_at_once(tmp_path, question):
    with held(Net, tmp_path) as load:
        found = ANSWERED[question](load.module.norm.weight)
        assert load.module.norm.weight.is_meta
        assert found == ANSWERED[question](load.real.norm.weight)
    assert found == ANSWERED[question](load.module.norm.weight)
    assert not load.module.norm.weight.is_meta


def test_what_a_program_does_before_it_runs_a_forward(tmp_path):
    """None of it waits: counting, freezing, an optimizer, a look at where to put the inputs."""
    with held(Net, tmp_path) as load:
        module = load.module
        assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in load.real.parameters())
        assert next(module.parameters()).device == torch.device("cpu")
        module.eval().train(False)
        module.zero_grad()
        module.norm.requires_grad_(False)
        module.scale.requires_grad = False
        optimizer = torch.optim.AdamW(p for p in module.parameters() if p.requires_grad)
        optimizer.zero_grad()
        assert "norm.weight waits for its data: [8], torch.float32, cpu" in repr(module.norm.weight)
        assert repr(module)
        assert not load.waiters()
        held_by_the_optimizer = optimizer.param_groups[0]["params"]
    assert not module.scale.requires_grad
    assert not module.norm.weight.requires_grad
    assert module.first.weight.requires_grad
    assert held_by_the_optimizer[0] is module.embed.weight
    assert module.first.weight.is_leaf
    module(TOKENS).sum().backward()
    assert module.scale.grad is None
    assert module.first.weight.grad is not None
    optimizer.step()


def test_attributes_and_kinds_of_parameters_stay(tmp_path):
    class Mine(nn.Parameter):
        pass

    def make():
        module = nn.Linear(3, 3)
        module.weight = Mine(module.weight.detach())
        module.weight.no_decay = True
        return module

    with held(make, tmp_path) as load:
        assert isinstance(load.module.weight, nn.Parameter)
        assert load.module.weight.no_decay
        load.module.bias.mine = "set while it waited"
    assert type(load.module.weight) is Mine
    assert vars(load.module.weight) == {"no_decay": True}
    assert vars(load.module.bias) == {"mine": "set while it waited"}
    assert load.module.weight._version == 0


def test_hooks_for_gradients_that_were_there_before(tmp_path):
    seen = []

    def make():
        module = nn.Linear(3, 3)
        module.weight.register_hook(lambda gradient: gradient * 0 + 2)
        module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p))
        return module

    with held(make, tmp_path) as load:
        load.gate.opened.set()
        load.module(torch.ones(3)).sum().backward()
    assert torch.equal(load.module.weight.grad, torch.full((3, 3), 2.0))
    assert seen[-1] is load.module.weight


def test_weak_references_stay(tmp_path):
    with held(Net, tmp_path) as load:
        reference = weakref.ref(load.module.scale)
    assert reference() is load.module.scale


# Modules that look at their parameters in ways of their own.


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)


def decoder():
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)


def padded(module):
    mask = torch.tensor([[False, False, False, True], [False, False, True, True]])
    out = module(torch.linspace(-1, 1, 64).reshape(2, 4, 8), src_key_padding_mask=mask)
    return out[~mask]


SEQUENCE = torch.linspace(-1, 1, 64).reshape(2, 4, 8)
MODULES = {
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda m: m(SEQUENCE, SEQUENCE, SEQUENCE)[0]),
    "attention with other widths": (
        lambda: nn.MultiheadAttention(8, 2, kdim=8, vdim=8, add_bias_kv=True, batch_first=True),
        lambda m: m(SEQUENCE, SEQUENCE * 2, SEQUENCE)[0],
    ),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), lambda m: m(SEQUENCE)),
    "encoder": (encoder, lambda m: m(SEQUENCE)),
    "encoder with padding": (encoder, padded),
    "decoder": (decoder, lambda m: m(SEQUENCE, SEQUENCE)),
    "lstm": (lambda: nn.LSTM(8, 4, 2, bidirectional=True), lambda m: m(SEQUENCE)[0]),
    "gru": (lambda: nn.GRU(8, 4, batch_first=True), lambda m: m(SEQUENCE)[0]),
    "rnn cell": (lambda: nn.RNNCell(8, 4), lambda m: m(SEQUENCE[0])),
    "convolution": (lambda: nn.Conv1d(4, 3, 2), lambda m: m(SEQUENCE)),
    "batch norm": (lambda: nn.BatchNorm1d(4), lambda m: m(SEQUENCE)),
    "embedding bag": (lambda: nn.EmbeddingBag(11, 8), lambda m: m(TOKENS)),
    "prelu": (nn.PReLU, lambda m: m(SEQUENCE)),
    "bilinear": (lambda: nn.Bilinear(8, 8, 3), lambda m: m(SEQUENCE, SEQUENCE)),
    "parameter list": (lambda: nn.ParameterList([nn.Parameter(torch.rand(8)) for _ in range(3)]), lambda m: sum(m)),
    "parametrized": (
        lambda: parametrize.register_parametrization(nn.Linear(8, 3), "weight", nn.Tanh()),
        lambda m: m(SEQUENCE),
    ),
    "function": (Scale, lambda m: m(SEQUENCE)),
    "function of another module's parameter": (Borrowing, lambda m: m(SEQUENCE) + m(SEQUENCE)),
}


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("grad", ["with gradients", "no_grad", "inference_mode"])
@pytest.mark.parametrize("kind", MODULES)
def test_modules(tmp_path, kind, grad):
    make, use = MODULES[kind]
    mode = {"with gradients": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[grad]

    def run(module):
        with mode():
            return use(module)

    with held(make, tmp_path) as load:
        found, expected = load.after_waiting(run), run(load.real)
        assert alike(found, expected)
        if grad == "with gradients":
            found.sum().backward()
            expected.sum().backward()
            for (name, p), q in zip(load.module.named_parameters(), load.real.parameters(), strict=True):
                assert alike(p.grad, q.grad), name
    assert alike(run(load.module), expected)
    require_equal(dict(load.module.state_dict()), dict(load.real.state_dict()))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_padded_encoder_whose_first_layer_is_there(tmp_path):
    """It would make a nested tensor, which its second layer could not take."""
    real, module = made(encoder), on_meta(encoder)
    with sync.warm_start(module, saved(real, tmp_path)) as warm:
        assert eventually(lambda: type(module.layers[0].linear1.weight) is nn.Parameter)
        with torch.no_grad():
            assert alike(padded(module), padded(real))
        warm.done()
        assert module.use_nested_tensor
        with torch.no_grad():
            assert alike(padded(module), padded(real))


# Threads.


def test_first_uses_in_many_threads(tmp_path):
    def use(module, k):
        with torch.inference_mode() if k % 2 else torch.enable_grad():
            return module(TOKENS).detach().clone()

    with held(Net, tmp_path) as load:
        calls, threads = [], []
        for k in range(12):
            call = in_thread(use, load.module, k)
            calls.append(call.__enter__())
            threads.append(call)
        assert eventually(lambda: load.waiters() == 12)
        load.gate.opened.set()
        for call in threads:
            call.__exit__(None, None, None)
        for call in calls:
            assert alike(call.outcome(), load.real(TOKENS))


@pytest.mark.slow
def test_uses_while_parameters_arrive(tmp_path):
    """No thread ever computes with what is not there, whenever it comes."""

    def make():
        return nn.Sequential(*[nn.Linear(16, 16) for _ in range(60)])

    real, x, stop = made(make), torch.rand(2, 16), threading.Event()
    with torch.inference_mode():
        expected = [layer(x) for layer in real]
    directory = saved(real, tmp_path)
    for _ in range(5):
        module = on_meta(make)

        def work(module, first):
            with torch.inference_mode():
                for k in range(60):
                    at = (first + k) % 60
                    assert torch.equal(nn.functional.linear(x, module[at].weight, module[at].bias), expected[at])

        with sync.warm_start(module, directory, memory="copy"):
            with in_thread(work, module, 0) as a, in_thread(work, module, 30) as b, in_thread(work, module, 59) as c:
                pass
            for call in (a, b, c):
                call.outcome()
    stop.set()


# Refused.


def compiled_in_place():
    module = nn.Linear(2, 2, device="meta")
    module.compile(backend="eager")
    return module


def meta_subclass():
    class Tagged(torch.Tensor):
        pass

    module = nn.Linear(2, 2, device="meta")
    module.weight = nn.Parameter(module.weight.detach().as_subclass(Tagged))
    return module


REFUSED = {
    "lazy": (lambda: nn.LazyLinear(3, device="meta"), "lazy"),
    "scripted": (lambda: torch.jit.script(nn.Linear(2, 2)), "compiled"),
    "compiled": (lambda: torch.compile(nn.Linear(2, 2, device="meta"), backend="eager"), "compiled"),
    "compiled in place": (compiled_in_place, "compiled"),
    "replicated": (lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))), "replicates"),
    "a class of its own": (meta_subclass, "handles its uses itself"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind.startswith("compiled") else ()) for kind in REFUSED]
)
@pytest.mark.filterwarnings("ignore")  # torch warns of lazy modules and of torch.jit, by a class of each version
def test_modules_that_are_refused(kind):
    make, match = REFUSED[kind]
    for face in (stio.warm_start, sync.warm_start):
        with pytest.raises(WarmStartError, match=match):
            face(make(), "x")


def test_two_warm_starts_of_one_module(tmp_path):
    with held(Net, tmp_path) as load:
        with pytest.raises(WarmStartError, match="another warm start"):
            sync.warm_start(load.module.norm, tmp_path)


BELOW = {
    "vmap": lambda m: torch.vmap(lambda w: w * 2)(m.scale),
    "grad": lambda m: torch.func.grad(lambda w: w.sum())(m.scale),
    "functional_call under grad": lambda m: torch.func.grad(
        lambda p: torch.func.functional_call(m, p, (TOKENS,)).sum()
    )(dict(m.named_parameters())),
    "torch.tensor": lambda m: torch.tensor(m.scale),
    "no overrides": lambda m: without_overrides(m),
    "trace": lambda m: torch.jit.trace(m.first, torch.ones(8)),
    "script": lambda m: torch.jit.script(m.first)(torch.ones(8)),
    "parametrization": parametrized,
    "set_": lambda m: m.first.weight.requires_grad_(False).set_(torch.ones(8, 8)),
}


def without_overrides(module):
    with torch._C.DisableTorchFunctionSubclass():
        return nn.functional.linear(torch.ones(8), module.first.weight)


@pytest.mark.matrix
@pytest.mark.parametrize("use", BELOW)
@pytest.mark.filterwarnings("ignore")  # torch warns of torch.jit, by a class of each version
def test_uses_that_are_refused(tmp_path, use):
    """They look at what a parameter is now, and would compute garbage with it, or keep it."""
    with held(Net, tmp_path) as load:
        with in_thread(BELOW[use], load.module) as running:
            assert eventually(lambda: load.waiters() or running.over.is_set())
            load.gate.opened.set()  # one that waits first for something else is refused then
        assert running.error is not None
        assert "done()" in str(running.error)
    BELOW[use](load.module)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiling_inside_the_block(tmp_path):
    """It falls back to the plain forward, which waits; when all is there it compiles."""
    with held(Net, tmp_path) as load:
        compiled = torch.compile(load.module, backend="eager")
        with torch.no_grad():
            found = load.after_waiting(lambda _: compiled(TOKENS))
            assert alike(found, load.real(TOKENS))
    with torch.no_grad():
        assert alike(compiled(TOKENS), load.real(TOKENS))
