"""What there is to save: every tensor that torch can show is described, every other one refused by name."""

from __future__ import annotations

import threading
import time
import types
from typing import Any

import pytest
import torch
from support import ALL_DTYPES, ramp
from torch.utils._python_dispatch import TorchDispatchMode

from stio.device import describe
from stio.device.describe import LazyTensor, describe_tensors
from stio.device.tensors import FORMAT_DTYPES
from stio.errors import DeviceError, UnsupportedDtypeError
from stio.format.dtypes import tensor_nbytes
from stio.format.shared import TensorSource, resolve_shared


def source_of(tensor: Any) -> TensorSource:
    (source,) = describe_tensors({"x": tensor})
    return source


def aliases(**tensors: torch.Tensor) -> dict[str, str]:
    return resolve_shared(describe_tensors(tensors), "dedupe")[1]


# What is described.


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_dtypes(dtype: torch.dtype) -> None:
    source = source_of(ramp(3, 5, dtype=dtype))
    assert source.dtype == FORMAT_DTYPES[dtype]
    assert source.shape == (3, 5)
    assert source.nbytes == tensor_nbytes(source.dtype, source.shape)


def test_f4_counts_elements() -> None:
    dtype = getattr(torch, "float4_e2m1fn_x2", None)
    if dtype is None:
        pytest.skip("this torch has no F4")
    source = source_of(torch.zeros(3, 4, dtype=torch.uint8).view(dtype))
    assert (source.dtype, source.shape, source.nbytes) == ("F4", (3, 8), 12)
    assert source_of(torch.zeros(3, 0, dtype=torch.uint8).view(dtype)).shape == (3, 0)
    with pytest.raises(ValueError, match="'x'.*reshape"):
        describe_tensors({"x": torch.zeros((), dtype=torch.uint8).view(dtype)})
    with pytest.raises(ValueError, match="'x'.*reshape"):
        describe_tensors({"x": LazyTensor(dtype, (), lambda: None)})


def test_order_is_the_mappings() -> None:
    tensors = {name: torch.zeros(2) for name in "cab"}
    sources = describe_tensors(tensors)
    assert [source.name for source in sources] == ["c", "a", "b"]
    assert all(source.data is tensors[source.name] for source in sources)
    assert describe_tensors({}) == []


@pytest.mark.parametrize(
    ("view", "span"),
    [
        (lambda x: x, (0, 96)),
        (lambda x: x[1], (24, 48)),
        (lambda x: x[:, 2], (8, 84)),
        (lambda x: x[2, 3], (60, 64)),
        (lambda x: x.t(), (0, 96)),
        (lambda x: x[::2, ::3], (0, 64)),
        (lambda x: x[1:2].expand(5, 6), (24, 48)),
    ],
)
def test_span_is_what_is_touched(view: Any, span: tuple[int, int]) -> None:
    base = torch.zeros(4, 6)
    source = source_of(view(base))
    assert source.span == span
    assert source.storage_key == source_of(base).storage_key


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_empty_tensors_share_nothing(shape: tuple[int, ...]) -> None:
    source = source_of(torch.zeros(shape))
    assert (source.nbytes, source.storage_key, source.shape) == (0, None, shape)


def test_one_tensor_under_two_names() -> None:
    base = torch.zeros(4, 4)
    parameter = torch.nn.Parameter(base)
    assert aliases(b=base, a=parameter, c=base.detach(), d=base.view(4, 4)) == {"a": "b", "c": "b", "d": "b"}


def test_a_dimension_of_one_element_has_any_stride() -> None:
    base = torch.zeros(4)
    assert aliases(a=base.as_strided((1, 4), (4, 1)), b=base.as_strided((1, 4), (77, 1))) == {"b": "a"}


def test_what_shows_other_numbers_is_another_tensor() -> None:
    base = torch.zeros(4, 4, dtype=torch.complex64)
    views = {
        "base": base,
        "transposed": base.t(),
        "conj": base.conj(),
        "neg": torch._neg_view(base),
        "part": base[:2],
        "flat": base.view(-1),
        "bits": base.view(torch.float64),
    }
    assert aliases(**views) == {}
    assert len({source.storage_key for source in describe_tensors(views)}) == 1


def test_separate_tensors_share_nothing() -> None:
    sources = describe_tensors(
        {f"{k}": torch.zeros(4) for k in range(10)} | {"first": (kept := torch.zeros(4)), "k": kept}
    )
    assert len({source.storage_key for source in sources}) == 11


def test_a_subclass_of_functions_only_is_saved() -> None:
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("nothing of the subclass runs")

    with torch._C.DisableTorchFunctionSubclass():
        tensor = torch.arange(4.0).as_subclass(Named)
    source = source_of(tensor)
    assert type(source.data) is torch.Tensor
    assert source.data.tolist() == [0, 1, 2, 3]


# What is refused.


class Wrapper(torch.Tensor):
    """Numbers in another tensor, as DTensor and quantized weights have them."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2), dtype=torch.float32)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing of the subclass runs")


def freed() -> torch.Tensor:
    tensor = torch.zeros(10)
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk() -> torch.Tensor:
    tensor = torch.zeros(10)
    tensor.untyped_storage().resize_(20)
    return tensor


def quantized() -> torch.Tensor:
    return torch._empty_affine_quantized([4], scale=0.1, zero_point=0, dtype=torch.qint8)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: [1.0], TypeError, "is no tensor, its type is list;"),
        (lambda: None, TypeError, "is no tensor, its type is NoneType;"),
        (lambda: torch.nn.Linear(1, 1), TypeError, "is no tensor, its type is Linear;"),
        (lambda: torch.zeros(2, 2).to_sparse(), ValueError, "to_dense"),
        (lambda: torch.zeros(2, 2, device="meta"), ValueError, "on meta"),
        (lambda: torch.nn.Parameter(torch.zeros(2, device="meta")), ValueError, "on meta"),
        (freed, ValueError, "freed or shrunk"),
        (shrunk, ValueError, "freed or shrunk"),
        (torch.nn.UninitializedParameter, ValueError, "lazy parameter"),
        (torch.nn.UninitializedBuffer, ValueError, "lazy parameter"),
        (Wrapper, TypeError, "is a Wrapper.*gather"),
        (lambda: torch.zeros(2, dtype=torch.complex128), UnsupportedDtypeError, "real and imaginary"),
        (lambda: torch.zeros(2, dtype=torch.complex32), UnsupportedDtypeError, "no such dtype"),
        (quantized, UnsupportedDtypeError, "no such dtype"),
        (lambda: LazyTensor(torch.complex128, (2,), lambda: None), UnsupportedDtypeError, "no such dtype"),
        (lambda: LazyTensor(torch.float32, (2**62,), lambda: None), ValueError, "overflows"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_refused_by_name(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s)'layer.3'.*{message}"):
        describe_tensors({"fine": torch.zeros(3), "layer.3": make()})


@pytest.mark.filterwarnings("ignore")
def test_other_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="sparse_csr"):
        describe_tensors({"x": torch.eye(3).to_sparse_csr()})
    for layout in (torch.strided, torch.jagged):
        with pytest.raises((ValueError, TypeError), match="'x'"):
            describe_tensors({"x": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)})


def test_fake_tensors_are_refused() -> None:
    subclasses = pytest.importorskip("torch._subclasses.fake_tensor")
    with subclasses.FakeTensorMode():
        tensor = torch.zeros(3)
    with pytest.raises(TypeError, match="'x' is a FakeTensor"):
        describe_tensors({"x": tensor})


@pytest.mark.parametrize("name", [1, None, b"x", ("a", "b")])
def test_names_are_text(name: object) -> None:
    with pytest.raises(TypeError, match="a name is a string"):
        describe_tensors({name: torch.zeros(1)})  # type: ignore[dict-item]


def test_a_device_without_streams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace())
    with pytest.raises(DeviceError, match="no streams.*requested mps"):
        describe.require_streams(torch.device("mps"))


def test_nothing_is_computed() -> None:
    """Describing runs no operator: nothing is copied, and no device is waited for."""

    class NoOperator(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} was called")

    base = torch.zeros(4, 4, dtype=torch.complex64)
    tensors = {"a": base, "b": base.t(), "c": base.conj(), "d": torch.nn.Parameter(torch.zeros(3)), "e": base[:0]}
    describe_tensors(tensors)  # what sets of dispatch keys mean is looked up once
    with NoOperator():
        assert len(describe_tensors(tensors)) == 5


# Lazy ones.


def test_lazy() -> None:
    lazy = LazyTensor(torch.bfloat16, [3, 4], lambda: None)
    assert lazy.shape == (3, 4)
    source = source_of(lazy)
    assert (source.dtype, source.shape, source.nbytes, source.storage_key) == ("BF16", (3, 4), 24, None)
    assert source.data is lazy
    with pytest.raises(AttributeError):
        lazy.shape = (1,)  # type: ignore[misc]


def test_lazy_takes_a_torch_size() -> None:
    assert LazyTensor(torch.float32, torch.zeros(2, 3).shape, lambda: None).shape == (2, 3)


@pytest.mark.parametrize(
    ("dtype", "shape", "produce", "error"),
    [
        ("float32", (1,), lambda: None, TypeError),
        (torch.float32, (1.5,), lambda: None, TypeError),
        (torch.float32, 3, lambda: None, TypeError),
        (torch.float32, (-1,), lambda: None, ValueError),
        (torch.float32, (1,), None, TypeError),
        (torch.float32, (1,), torch.zeros(1), TypeError),
    ],
)
def test_lazy_refusals(dtype: Any, shape: Any, produce: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        LazyTensor(dtype, shape, produce)


# Speed.


@pytest.mark.slow
def test_10_000_tensors_beside_a_busy_thread() -> None:
    tensors = {f"layer.{k}.weight": torch.nn.Parameter(torch.zeros(2, 3)) for k in range(10_000)}
    done = threading.Event()

    def spin() -> None:
        while not done.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        start = time.perf_counter()
        assert len(describe_tensors(tensors)) == 10_000
        taken = time.perf_counter() - start
    finally:
        done.set()
        thread.join()
    assert taken < 5  # 0.04 s alone, twice that here; one call that drops the GIL for each tensor makes it 50 s


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap, torch.func.functionalize])
@pytest.mark.parametrize("part", [slice(None), slice(0, 1), slice(0, 0)])
def test_a_tensor_of_a_function_transform_is_named(transform, part):
    """Also one without elements; a plain tensor beside it is not."""
    plain, caught = torch.ones(2), []

    def use(tensor):
        with pytest.raises(TypeError, match="torch.func") as error:
            describe_tensors({"plain": plain, "b": tensor[part], "c": tensor * 2})
        caught.append(str(error.value))
        return tensor.sum()

    transform(use)(torch.ones(3, 2) if transform is torch.vmap else torch.ones(3))
    assert caught[0].startswith("tensor 'b'")


def test_a_tensor_of_zeros_without_memory_is_refused():
    with pytest.raises((TypeError, ValueError), match="'zeros'"):
        describe_tensors({"zeros": torch._efficientzerotensor((3,))})
