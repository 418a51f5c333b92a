"""Parameters that wait, one by one: nothing of torch's gets at what they are before their data is there."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref

import pytest
import torch
from support import quick_switches
from torch import nn

from stio.errors import ClosedError, WarmStartError
from stio.serving.warm_start.parameter import MatchedParameter, Placeholder, PlaceholderParameter, placeholder_of


class FakeLoad:
    """Refuses every use, or fills the placeholder."""

    def __init__(self, data=None):
        self.data = data
        self.asked = []

    def has_ended(self):
        return self.data is None

    def wait(self, placeholders):
        self.asked += placeholders
        for placeholder in placeholders:
            if self.data is None:
                raise ClosedError("closed")
            if not placeholder.filled:
                with torch.inference_mode(False):  # as a worker's thread is, which is what fills
                    placeholder.fill(self.data.clone())


def waiting(load, shape=(4,), kind=nn.Parameter, **keywords):
    parameter = kind(torch.empty(shape, device="meta"))
    made = {"device": torch.device("cpu"), "wait": load.wait, "has_ended": load.has_ended}
    found = MatchedParameter(parameter, "p", keywords.pop("source", "p"), keywords.pop("dtype", torch.float32))
    return parameter, Placeholder(found, **(made | keywords))


DATA = torch.tensor([1.0, 2.0, 3.0, 4.0])

NAMES = sorted(
    name
    for name in dir(torch.Tensor)
    # What Python itself needs of any object, and what is no use of a tensor.
    if name
    not in {"__class__", "__dict__", "__weakref__", "__init__", "__new__", "__subclasshook__", "__init_subclass__"}
    and name not in {"__getattribute__", "__setattr__", "__delattr__", "__dir__", "__sizeof__", "__getstate__"}
    and not isinstance(inspect.getattr_static(torch.Tensor, name), classmethod | staticmethod | type)
)

ARGUMENTS = [(), (1,), (2.0,), (0, 1), (torch.ones(4),), (torch.float16,), ("cpu",), ([2, 2],)]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_no_attribute_or_method_gives_anything_that_needs_data(name):
    """Answered without a tensor, refused, or a wrong call: never a result on `meta`."""
    parameter, _ = waiting(FakeLoad())
    try:
        value = getattr(parameter, name)
    except (ClosedError, AttributeError):
        return
    assert not isinstance(value, torch.Tensor), name
    if not callable(value):
        return
    for arguments in ARGUMENTS:
        try:
            result = value(*arguments)
        except ClosedError:
            continue
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, NotImplementedError):
            continue  # a wrong call, for this method
        found = result if isinstance(result, tuple | list) else [result]
        assert not any(isinstance(item, torch.Tensor) and item is not parameter for item in found), (name, arguments)
    assert isinstance(parameter, PlaceholderParameter)


FUNCTIONS = {
    "add": lambda p: torch.add(p, 1),
    "linear": lambda p: nn.functional.linear(DATA, p.view(1, 4)),
    "as_tensor and on": lambda p: torch.as_tensor(p) + 1,
    "rand_like": torch.rand_like,
    "empty_like": torch.empty_like,
    "equal": lambda p: torch.equal(p, DATA),
    "where": lambda p: torch.where(DATA > 1, p, 0),
    "cat": lambda p: torch.cat([DATA, p]),
    "einsum": lambda p: torch.einsum("i,i", DATA, p),
    "copy_": lambda p: DATA.clone().copy_(p),
    "setitem": lambda p: DATA.clone().__setitem__(slice(None), p),
    "op": lambda p: torch.ops.aten.mul.Tensor(p, 2),
    "nn.Parameter": nn.Parameter,
    "from below": lambda p: torch._C._VariableFunctions.add(p, 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_refuse_what_has_no_data(name):
    parameter, _ = waiting(FakeLoad())
    with torch.no_grad(), pytest.raises(ClosedError):
        FUNCTIONS[name](parameter)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_filled_by_its_first_use(mode):
    load = FakeLoad(DATA)
    parameter, placeholder = waiting(load)
    with mode():
        assert torch.equal(parameter * 2, DATA * 2)
    assert type(parameter) is nn.Parameter
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert vars(parameter) == {}
    assert load.asked == [placeholder]
    (parameter * 2).sum().backward()
    assert torch.equal(parameter.grad, torch.full((4,), 2.0))
    with torch.no_grad():
        parameter += 1
    assert torch.equal(parameter, DATA + 1)


def test_gates_are_asked_for_all_of_theirs_at_once():
    loads = FakeLoad(DATA), FakeLoad(DATA)
    made = [waiting(load) for load in (*loads, loads[0])]
    torch.stack([parameter for parameter, _ in made])
    placeholders = [placeholder for _, placeholder in made]
    assert loads[0].asked == [placeholders[0], placeholders[2]]
    assert loads[1].asked == [placeholders[1]]


def test_a_filled_parameter_and_its_gradient_belong_together():
    """requires_grad is what it was set to while it waited."""
    for wants in (True, False):
        parameter, placeholder = waiting(FakeLoad(DATA))
        parameter.requires_grad_(wants)
        placeholder.fill(DATA.clone())
        assert parameter.requires_grad is wants


def test_restored():
    parameter, placeholder = waiting(FakeLoad(), dtype=torch.float16)
    assert parameter.dtype == torch.float16
    parameter.requires_grad_(False)
    placeholder.restore()
    assert type(parameter) is nn.Parameter
    assert parameter.device.type == "meta"
    assert parameter.dtype == torch.float32
    assert not parameter.requires_grad
    assert vars(parameter) == {}
    assert (parameter + 1).is_meta


def test_a_use_by_cpp_always_raises_an_error():
    """A scripted module has the tensor of before in a placeholder of its own; it must not compute with it when all is there."""
    load = FakeLoad(DATA)
    parameter, placeholder = waiting(load)
    kept = torch._C._functorch._wrap_for_grad  # only here to say so: the wrapper is refused when it is used
    assert callable(kept)
    with pytest.raises(WarmStartError, match=r"uses p .*done\(\)"):
        torch.vmap(lambda x: x * 2)(parameter)
    placeholder.fill(DATA.clone())
    assert torch.equal(torch.vmap(lambda x: x * 2)(parameter), DATA * 2)
    with pytest.raises(WarmStartError, match="captured before"):
        placeholder._other + 1
    assert placeholder._other.shape == (4,)


def test_a_filled_slot_holds_no_memory():
    parameter, placeholder = waiting(FakeLoad(DATA))
    placeholder.fill(DATA.clone())
    placeholder.release()
    reference = weakref.ref(parameter)
    del parameter
    assert reference() is None
    del placeholder
    gc.collect()


def test_a_kind_that_cannot_change_is_left_as_it_was():
    class Rigid(nn.Parameter):
        __slots__ = ("x",)

    with pytest.raises(TypeError):
        waiting(FakeLoad(), kind=Rigid)
    kept = []

    def keep(data):
        kept.append(nn.Parameter(data))
        return kept[-1]

    parameter, placeholder = waiting(FakeLoad(), kind=keep)
    assert placeholder_of(parameter) is placeholder
    assert placeholder.parameter is kept[0]


def test_no_plain_parameter_without_data_is_visible():
    """While one thread fills, others look: the class is plain only when the data is there."""
    wrong, stop = [], threading.Event()
    shown = [waiting(FakeLoad(DATA))[0]]

    def look():
        while not stop.is_set():
            parameter = shown[0]
            if type(parameter) is nn.Parameter and parameter.is_meta:
                wrong.append(parameter)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    with quick_switches():
        for _ in range(300):
            shown[0], placeholder = waiting(FakeLoad(DATA))
            placeholder.fill(DATA.clone())
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_subclass_that_asks_first(recwarn):
    """Another class's `__torch_function__` may run an operation without ours: it is refused, not computed."""

    class Nosy(torch.Tensor):
        pass

    parameter, _ = waiting(FakeLoad())
    with pytest.raises((ClosedError, WarmStartError)):
        DATA.as_subclass(Nosy) * parameter
