"""`safe_open` and `load_file`: what they return, what they refuse, and what outlives them."""

from __future__ import annotations

import gc
import json
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch as official
import torch
from checkout import python_path
from support import needs_f4

import stio.compat.safetensors as package
from stio.compat.safetensors import SafetensorError, safe_open
from stio.compat.safetensors import numpy as in_numpy
from stio.compat.safetensors import torch as in_torch

BACKENDS = ("mmap", "pread")


def written(path: Path, entries: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(12.0).reshape(3, 4),
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.0),
        "flags": torch.tensor([True, False]),
        "z": torch.tensor([1 + 2j]),
    }


@pytest.fixture
def file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = tmp_path / "model.safetensors"
    official.save_file(tensors, path, {"k": "v"})
    return path


def test_the_public_names_are_the_original_s() -> None:
    newer = {"PrefetchLoader", "PySafeSlice", "TensorMeta"}  # see test_prefetch
    ours = set(package.__all__) - newer
    assert ours == {name for name in vars(safetensors) if name in ours}
    assert all(hasattr(package, name) for name in package.__all__)
    assert package.__all__ == sorted(package.__all__)
    for module, theirs in ((in_torch, official), (in_numpy, safetensors.numpy)):
        assert all(hasattr(theirs, name) for name in module.__all__)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("framework", ["pt", "torch", "pytorch"])
def test_all_of_a_file(file: Path, tensors: dict[str, torch.Tensor], framework: str, backend: str) -> None:
    with safe_open(file, framework, backend=backend) as opened, safetensors.safe_open(file, "pt") as expected:
        assert opened.keys() == expected.keys() == sorted(tensors)
        assert opened.offset_keys() == expected.offset_keys()
        assert opened.metadata() == {"k": "v"}
        together = opened.get_tensors()
        assert list(together) == list(expected.get_tensors())
        for name in opened.keys():  # noqa: SIM118 -- no mapping
            for found in (opened.get_tensor(name), together[name]):
                assert found.dtype == tensors[name].dtype
                assert found.shape == tensors[name].shape
                assert torch.equal(found, tensors[name])
                assert found.untyped_storage().nbytes() == found.nbytes
                assert found.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("framework", ["np", "numpy"])
def test_arrays(file: Path, tensors: dict[str, torch.Tensor], framework: str, backend: str) -> None:
    with safe_open(str(file), framework=framework, device="cpu", backend=backend) as opened:
        for name in ("w", "empty", "scalar", "flags", "z"):
            found = opened.get_tensor(name)
            assert isinstance(found, np.ndarray)
            assert found.flags.writeable
            np.testing.assert_array_equal(found, tensors[name].numpy(), strict=True)
        with pytest.raises(TypeError, match="'bfloat16' not understood") as caught:
            opened.get_tensor("b")
        assert isinstance(caught.value, SafetensorError)


@pytest.mark.parametrize(
    ("header", "expected"),
    [(b"{}", None), (b'{"__metadata__":{}}', {}), (b'{"__metadata__":null}', None), (b'{"\\u005f_metadata__":{}}', {})],
)
def test_no_metadata_and_empty_metadata_differ(tmp_path: Path, header: bytes, expected: object) -> None:
    path = written(tmp_path / "f", header)
    with safe_open(path, "pt") as opened, safetensors.safe_open(path, "pt") as theirs:
        assert opened.metadata() == theirs.metadata() == expected
        assert opened.keys() == []
        assert opened.get_tensors() == {}


def test_the_caller_s_lists_are_copies(file: Path) -> None:
    with safe_open(file, "pt") as opened:
        opened.keys().clear()
        opened.offset_keys().clear()
        metadata = opened.metadata()
        assert metadata is not None
        metadata.clear()
        assert opened.metadata() == {"k": "v"}
        assert len(opened.offset_keys()) == len(opened.keys()) == 6
        opened.get_slice("w").get_shape().clear()
        assert opened.get_slice("w").get_shape() == [3, 4]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_tensors_and_slices_outlive_the_file(file: Path, framework: str, backend: str) -> None:
    with safe_open(file, framework, backend=backend) as opened:
        tensor, part = opened.get_tensor("w"), opened.get_slice("w")
    for call in (opened.keys, opened.offset_keys, opened.metadata, opened.get_tensors):
        with pytest.raises(SafetensorError, match="File is closed"):
            call()
    for called in (opened.get_tensor, opened.get_slice):
        with pytest.raises(SafetensorError, match="File is closed"):
            called("w")
    os.unlink(file)
    gc.collect()
    assert np.asarray(tensor).tolist() == torch.arange(12.0).reshape(3, 4).tolist()
    assert np.asarray(part[1]).tolist() == [4.0, 5.0, 6.0, 7.0]
    assert part.get_shape() == [3, 4]
    assert part.get_dtype() == "F32"
    opened.__exit__(None, None, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_descriptors_come_back(file: Path, backend: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    opened = safe_open(file, "pt", backend=backend)
    part = opened.get_slice("w")
    del opened
    part[0]
    del part
    with safe_open(file, "pt", backend=backend):
        pass
    for broken in (b"", b"\xff" * 40):
        file.write_bytes(broken)
        with pytest.raises(SafetensorError):
            safe_open(file, "pt", backend=backend)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_writing_to_a_tensor_leaves_the_file_alone(file: Path, backend: str) -> None:
    bytes_before = file.read_bytes()
    tensor = in_torch.load_file(file, backend=backend)["w"]
    tensor.mul_(2)
    array = in_numpy.load_file(written(file.parent / "a", {"a": entry("U8", [2], 0, 2)}, b"ab"), backend=backend)["a"]
    array[:] = 0
    assert file.read_bytes() == bytes_before
    assert (file.parent / "a").read_bytes().endswith(b"ab")
    assert tensor[0, 1] == 2


def test_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in (tmp_path / "nope", str(tmp_path / "no" / "nope"), "", "nul\0nul", tmp_path / "file" / "below"):
        with pytest.raises(FileNotFoundError) as caught:
            safe_open(name, "pt")
        assert str(caught.value) == f"No such file or directory: {name}"
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        in_torch.load_file(tmp_path / "nope")


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        safe_open(tmp_path, "pt")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        safe_open(tmp_path / "fifo", "pt")


@pytest.mark.slow
def test_permission_denied(file: Path) -> None:
    """Better: the original says that there is no such file."""
    file.chmod(0)
    code = (
        "import os, sys\nfrom stio.compat.safetensors import safe_open\nos.setuid(65534)\n"
        f"try: safe_open({file.name!r}, 'np')\nexcept PermissionError as error: print(error.errno)\n"
    )
    if os.geteuid():
        with pytest.raises(PermissionError):
            safe_open(file, "pt")
        return
    # The directory stays reachable as the one we stand in, whatever is above it.
    file.parent.chmod(0o755)
    # A real interpreter without torch, in a user's rights that this process would not get back.
    found = subprocess.run([sys.executable, "-c", code], cwd=file.parent, capture_output=True, text=True, env=_here())
    assert found.stdout.strip() == "13", found.stderr


def _here() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": python_path(Path(package.__file__).parents[3])}


TYPE_ERRORS: list[tuple[str, Callable[[Path], object]]] = [
    ("filename", lambda f: safe_open(3, "pt")),  # type: ignore[arg-type]
    ("filename", lambda f: safe_open(os.fsencode(f), "pt")),  # type: ignore[arg-type]
    ("framework", lambda f: safe_open(f, 1)),  # type: ignore[arg-type]
    ("backend", lambda f: safe_open(f, "pt", backend=None)),  # type: ignore[arg-type]
    ("positional", lambda f: safe_open(f, "pt", "cpu", "mmap")),  # type: ignore[misc]
    ("framework", lambda f: safe_open(f)),  # type: ignore[call-arg]
    ("name", lambda f: safe_open(f, "pt").get_tensor(1)),  # type: ignore[arg-type]
    ("name", lambda f: safe_open(f, "pt").get_slice(None)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("match", "call"), TYPE_ERRORS)
def test_arguments_of_wrong_types(file: Path, match: str, call: Callable[[Path], object]) -> None:
    with pytest.raises(TypeError, match=match):
        call(file)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"framework": "zz"}, "framework zz is invalid"),
        ({"framework": "PT"}, "framework PT is invalid"),
        ({"framework": "flax"}, "framework flax is not supported here"),
        ({"framework": "pt", "backend": "x"}, 'backend "x" is invalid (expected one of: "mmap", "pread")'),
        ({"framework": "pt", "device": "zz"}, "device zz is invalid"),
        ({"framework": "pt", "device": "meta"}, "device meta is invalid"),
        ({"framework": "pt", "device": "cpu:0"}, "device cpu:0 is invalid"),
        ({"framework": "pt", "device": -1}, "device -1 is invalid"),
        ({"framework": "pt", "device": 1.5}, "device 1.5 is invalid"),
        ({"framework": "pt", "device": "cuda:0:1"}, "device cuda:0:1 is invalid"),
        ({"framework": "pt", "device": "mps:1"}, "device mps:1 is invalid"),
        ({"framework": "np", "device": "cuda"}, "Device cuda:0 is not supported for framework numpy"),
        ({"framework": "np", "device": 0}, "Device 0 is not supported for framework numpy"),
    ],
)
def test_arguments_that_name_nothing(file: Path, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(SafetensorError) as caught:
        safe_open(file, **keywords)
    assert str(caught.value).startswith(message)


def test_devices(file: Path) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        safe_open(file, "pt", device="cuda:x")
    for cpu in ("cpu", None, torch.device("cpu"), torch.device("cpu:0")):
        assert safe_open(file, "pt", device=cpu).get_tensor("w").device == torch.device("cpu")  # type: ignore[arg-type]
    opened = safe_open(file, "pt", device="cuda")  # opening touches no device
    if not torch.accelerator.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            opened.get_tensor("w")


def test_a_default_device_changes_nothing(file: Path) -> None:
    for backend in BACKENDS:
        with torch.device("meta"):
            found = in_torch.load_file(file, backend=backend)
            found["part"] = safe_open(file, "pt", backend=backend).get_slice("w")[0:0]
        assert {tensor.device.type for tensor in found.values()} == {"cpu"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_name_that_is_not_there(file: Path, backend: str) -> None:
    with safe_open(file, "pt", backend=backend) as opened:
        for call in (opened.get_tensor, opened.get_slice):
            with pytest.raises(SafetensorError, match=r"^File does not contain tensor nope$"):
                call("nope")


GOOD = {"a": entry("U8", [4], 0, 4)}
BROKEN: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "header too small"),
    ("seven bytes", b"\0" * 7, "header too small"),
    ("length past the end", struct.pack("<Q", 100) + b"{}", "invalid header length"),
    ("length above the limit", struct.pack("<Q", 100_000_001) + b"{}", "header too large"),
    ("length of all ones", b"\xff" * 20, "header too large"),
    ("no JSON", struct.pack("<Q", 4) + b"nope", "invalid JSON in header"),
    ("NUL padding", struct.pack("<Q", 3) + b"{}\0", "invalid JSON in header"),
    ("twice the metadata", struct.pack("<Q", 37) + b'{"__metadata__":{},"__metadata__":{}}', "invalid JSON in header"),
    ("unknown dtype", b"", '{"a":{"dtype":"F7","shape":[4],"data_offsets":[0,4]}}'),
    ("cut", b"", "incomplete metadata, file not fully covered"),
    ("too long", b"", "incomplete metadata, file not fully covered"),
    ("a hole", b"", "invalid"),
    ("sizes that do not fit", b"", "invalid shape, data type, or offset for tensor"),
]


def test_too_many_dimensions(tmp_path: Path) -> None:
    """The shape is what is wrong, and not the header's length."""
    path = written(tmp_path / "f", {"a": entry("U8", [1] * 65, 0, 1)}, b"x")
    with pytest.raises(SafetensorError, match="header: invalid shape, data type, or offset for tensor: .*max_rank"):
        safe_open(path, "pt")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("what", "raw", "phrase"), BROKEN, ids=[case[0] for case in BROKEN])
def test_broken_files(tmp_path: Path, what: str, raw: bytes, phrase: str, backend: str) -> None:
    path = tmp_path / "broken"
    path.write_bytes(raw)
    if what == "unknown dtype":
        written(path, phrase.encode(), b"abcd")
        phrase = "invalid JSON in header"
    elif what == "cut":
        written(path, GOOD, b"abc")
    elif what == "too long":
        written(path, GOOD, b"abcde")
    elif what == "a hole":
        written(path, {"a": entry("U8", [2], 0, 2), "b": entry("U8", [1], 3, 4)}, b"abcd")
    elif what == "sizes that do not fit":
        written(path, {"a": entry("F32", [2], 0, 4)}, b"abcd")
    for call in (lambda: safe_open(path, "pt", backend=backend), lambda: in_torch.load_file(path, backend=backend)):
        with pytest.raises(SafetensorError, match=f"^Error while deserializing header: {phrase}") as caught:
            call()
        assert caught.value.__cause__ is not None
    with pytest.raises(SafetensorError, match=f"^Error while deserializing: {phrase}"):
        package.deserialize(path.read_bytes())
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "pt")


def test_equal_names_are_refused(tmp_path: Path) -> None:
    """Better: the original lets the last one win."""
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\\u0061":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
    with pytest.raises(SafetensorError, match="twice"):
        safe_open(written(tmp_path / "f", text, b"ab"), "pt")


def test_names_from_the_file_are_escaped_in_errors(tmp_path: Path) -> None:
    with pytest.raises(SafetensorError) as caught:
        safe_open(written(tmp_path / "f", {"\x1b[31m": entry("U8", [2], 0, 1)}, b"a"), "pt")
    assert "\x1b" not in str(caught.value)


def test_dtypes_beyond_torch(tmp_path: Path) -> None:
    path = written(tmp_path / "f", {"x": entry("F6_E3M2", [4], 0, 3)}, b"abc")
    for framework in ("pt", "np"):
        for backend in BACKENDS:
            with safe_open(path, framework, backend=backend) as opened:
                part = opened.get_slice("x")
                assert (part.get_shape(), part.get_dtype()) == ([4], "F6_E3M2")
                for call in (
                    partial(opened.get_tensor, "x"),
                    opened.get_tensors,
                    partial(part.__getitem__, slice(0, 1)),
                ):
                    with pytest.raises(SafetensorError, match="Dtype not understood: F6_E3M2"):
                        call()
    assert package.deserialize(path.read_bytes()) == [
        ("x", {"shape": [4], "dtype": "F6_E3M2", "data": bytearray(b"abc")})
    ]


@needs_f4
@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_f4(tmp_path: Path, backend: str) -> None:
    path = written(tmp_path / "f", {"x": entry("F4", [2, 3], 0, 3)}, b"abc")
    with pytest.raises(SafetensorError, match=r"divisible by 2 in torch: got \[2, 3\]"):
        safe_open(path, "pt", backend=backend).get_tensor("x")


def test_misaligned_data(tmp_path: Path) -> None:
    data = np.arange(3, dtype="<f4").tobytes()
    path = written(tmp_path / "f", {"p": entry("U8", [1], 0, 1), "w": entry("F32", [3], 1, 13)}, b"x" + data)
    for backend in BACKENDS:
        assert in_torch.load_file(path, backend=backend)["w"].tolist() == [0, 1, 2]
        array = in_numpy.load_file(path, backend=backend)["w"]
        assert array.flags.aligned
        assert array.tolist() == [0, 1, 2]
        assert safe_open(path, "pt", backend=backend).get_slice("w")[1:].tolist() == [1, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_and_large_tensors(tmp_path: Path, backend: str) -> None:
    """Headers above the first read; tensors above and below what is read together."""
    tensors = {f"t{k}": torch.full((k % 5,), float(k)) for k in range(700)}
    tensors |= {f"big{k}": torch.full((3 << 20,), k, dtype=torch.uint8) for k in range(4)}
    tensors["huge"] = torch.full((9 << 20,), 9, dtype=torch.uint8)
    official.save_file(tensors, tmp_path / "f")
    found = in_torch.load_file(tmp_path / "f", backend=backend)
    assert set(found) == set(tensors)  # the original's order of empty tensors is another one each time
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].untyped_storage().nbytes() == tensor.nbytes


def test_a_file_that_shrank_is_no_crash(tmp_path: Path) -> None:
    path = written(tmp_path / "f", GOOD, b"abcd")
    opened = safe_open(path, "pt", backend="pread")
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(SafetensorError, match="cut short"):
        opened.get_tensor("a")


def test_concurrent_use(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    for backend in BACKENDS:
        with safe_open(file, "pt", backend=backend) as opened:
            wrong: list[object] = []
            start = threading.Barrier(4)

            def work(opened: safe_open = opened, wrong: list[object] = wrong, start: threading.Barrier = start) -> None:
                start.wait(10)
                for _ in range(50):
                    if not torch.equal(opened.get_tensor("w"), tensors["w"]) or opened.get_slice("w")[1, 2] != 6:
                        wrong.append(1)

            threads = [threading.Thread(target=work) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong


def test_errors_pickle_and_have_a_home() -> None:
    error = pickle.loads(pickle.dumps(SafetensorError("x")))
    assert (type(error), str(error)) == (SafetensorError, "x")
    assert issubclass(SafetensorError, Exception) and not issubclass(SafetensorError, (OSError, ValueError))
    assert sys.modules[SafetensorError.__module__] is package


@pytest.mark.slow
def test_numpy_needs_no_torch(file: Path) -> None:
    code = (
        "import sys\nfrom stio.compat.safetensors import safe_open, serialize\n"
        "from stio.compat.safetensors.numpy import load, load_file, save\nimport numpy as np\n"
        f"with safe_open({str(file)!r}, 'np') as f: print(f.get_slice('w')[0, 1])\n"
        "print(load(save({'a': np.ones(2)}))['a'].sum(), 'torch' in sys.modules)"
    )
    # A real interpreter without torch: what it imports.
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_here())
    assert found.stdout.split() == ["1.0", "2.0", "False"]
