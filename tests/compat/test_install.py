"""`stio.compat.install`: whose names are replaced, what comes back, what is refused, threads and forks."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import pydoc
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from checkout import python_path

import stio.compat
import stio.compat.safetensors
import stio.compat.safetensors.torch
from stio.compat import replacement
from stio.compat.safetensors import _installed

MODULES: tuple[ModuleType, ...] = (
    safetensors,
    safetensors.torch,
    safetensors.numpy,
    sys.modules["safetensors._safetensors_rust"],
)
BEFORE = {module.__name__: dict(vars(module)) for module in MODULES}
"""The originals, as objects."""

TORCH = BEFORE["safetensors.torch"]
RAW = BEFORE["safetensors"]


def is_as_before() -> bool:
    return all(
        vars(module).get(name) is value
        for module in MODULES
        for name, value in BEFORE[module.__name__].items()
        if callable(value)
    )


def is_stio(value: Any) -> bool:
    return str(value.__module__).startswith("stio.")


@pytest.fixture(autouse=True)
def originals() -> Iterator[None]:
    assert is_as_before()
    yield
    stio.compat.uninstall()
    assert is_as_before()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    TORCH["save_file"]({"w": torch.arange(6.0).reshape(2, 3)}, path, {"format": "pt"})
    return path


@pytest.fixture
def importer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that imported names before, one of them under another name."""
    return loaded(monkeypatch, "imports_before", _IMPORTS)


_IMPORTS = """
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file as read, save_file
import safetensors.numpy as arrays
default = lambda path, load=read: load(path)
table = {"read": read}
"""


def loaded(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> ModuleType:
    module = ModuleType(name)
    exec(text, module.__dict__)
    monkeypatch.setitem(sys.modules, name, module)
    return module


# What is replaced, and what comes back.


def test_names_are_stios_in_the_modules_and_where_they_were_imported_before(importer: ModuleType, file: Path) -> None:
    with stio.compat.install() as installed:
        for name in ("load", "load_file", "load_model", "save", "save_file", "save_model", "storage_ptr"):
            assert is_stio(getattr(safetensors.torch, name)), name
        for name in ("load", "load_file", "save", "save_file"):
            assert is_stio(getattr(safetensors.numpy, name)), name
        for name in ("safe_open", "serialize", "serialize_file", "deserialize"):
            assert name not in RAW or is_stio(getattr(safetensors, name)), name
        assert importer.read is safetensors.torch.load_file
        assert importer.safe_open is safetensors.safe_open is safetensors.torch.safe_open
        assert importer.read(file)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
        with importer.safe_open(file, "pt") as opened:
            assert isinstance(opened, stio.compat.safetensors.safe_open)
            assert opened.get_slice("w")[1].tolist() == [3, 4, 5]
        assert installed.replaced["imports_before"] == ("read", "safe_open", "save_file")
        assert "load_file" in installed.replaced["safetensors.torch"]
        assert installed.is_active
    assert importer.read is TORCH["load_file"]
    assert importer.safe_open is RAW["safe_open"]
    assert not installed.is_active
    assert installed.replaced == {}


def test_a_save_through_a_replaced_name_is_stios_and_byte_equal(importer: ModuleType, tmp_path: Path) -> None:
    tensors = {"w": torch.arange(4.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    importer.save_file(tensors, tmp_path / "theirs")
    with stio.compat.install():
        assert is_stio(importer.save_file)
        importer.save_file(tensors, tmp_path / "ours")
        importer.arrays.save_file({"w": np.arange(4.0)}, tmp_path / "arrays")
        assert importer.arrays.load_file(tmp_path / "arrays")["w"].tolist() == [0, 1, 2, 3]
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_module_that_is_imported_later_gets_stio_and_loses_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with stio.compat.install():
        later = loaded(monkeypatch, "imports_later", _IMPORTS)
        assert is_stio(later.read)
        assert is_stio(later.safe_open)
    assert later.read is TORCH["load_file"]
    assert later.safe_open is RAW["safe_open"]


def test_a_module_that_imports_the_drop_in_itself_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from stio.compat.safetensors import safe_open\nfrom stio.compat.safetensors.torch import load_file"
    asked = loaded(monkeypatch, "asked_for_stio", text)
    with stio.compat.install():
        pass
    assert asked.load_file is stio.compat.safetensors.torch.load_file
    assert asked.safe_open is stio.compat.safetensors.safe_open


def test_what_stays_is_as_documented(importer: ModuleType, file: Path) -> None:
    with stio.compat.install():
        assert importer.table["read"] is TORCH["load_file"]
        assert importer.default.__defaults__ == (TORCH["load_file"],)
        assert importer.default(file)["w"].shape == (2, 3)  # the original's code, with what its module has now
        assert safetensors.SafetensorError is RAW["SafetensorError"]
        assert getattr(safetensors, "TensorSpec", None) is RAW.get("TensorSpec")
        assert safetensors.__version__ == RAW["__version__"]


def test_uninstall_leaves_a_name_that_someone_else_has_replaced(importer: ModuleType) -> None:
    def other() -> None: ...

    stio.compat.install()
    importer.read = other
    stio.compat.uninstall()
    assert importer.read is other
    assert importer.safe_open is RAW["safe_open"]


def test_uninstall_restores_what_someone_else_had_put_there(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    def wrapped(filename: Any, device: Any = "cpu", *, backend: str = "mmap") -> Any:
        raise AssertionError("not called while stio is installed")

    importer = loaded(monkeypatch, "imports_before", _IMPORTS)
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "load_file", wrapped)
        with stio.compat.install():
            assert safetensors.torch.load_file(file)["w"].shape == (2, 3)
        assert safetensors.torch.load_file is wrapped
    assert importer.read is TORCH["load_file"]


def test_code_of_modules_does_not_run_when_they_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: ModuleType, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    for name, members in (
        ("by_getattr", {"__getattr__": refuse}),
        ("by_getattribute", {"__getattribute__": refuse}),
        ("by_property", {"__dict__": property(lambda module: refuse(module, "__dict__"))}),
    ):
        module = type(name, (ModuleType,), members)(name)
        vars(ModuleType)["__dict__"].__get__(module)["read"] = TORCH["load_file"]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "no_module", object())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "stopped", None)  # type: ignore[arg-type]
    with stio.compat.install() as installed:
        for name in ("by_getattr", "by_getattribute", "by_property"):
            assert installed.replaced[name] == ("read",)


def test_a_lazy_module_is_not_loaded_and_takes_stio_when_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loads_late.py").write_text(_IMPORTS + "ran = True")
    spec = importlib.util.spec_from_file_location("loads_late", tmp_path / "loads_late.py")
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loads_late", module)
    spec.loader.exec_module(module)
    with stio.compat.install():
        assert "ran" not in object.__getattribute__(module, "__dict__")
        assert is_stio(module.read)
    assert module.read is TORCH["load_file"]


def test_a_module_that_changes_while_it_is_searched(monkeypatch: pytest.MonkeyPatch, importer: ModuleType) -> None:
    real = replacement._replace

    def replace(module: str, namespace: dict[str, Any], pairs: Any) -> None:
        if module == "imports_before":
            namespace[f"more{len(namespace)}"] = TORCH["save"]
        real(module, namespace, pairs)

    monkeypatch.setattr(replacement, "_replace", replace)
    with stio.compat.install():
        assert all(is_stio(value) for name, value in vars(importer).items() if name.startswith("more"))
    assert all(value is TORCH["save"] for name, value in vars(importer).items() if name.startswith("more"))


def test_no_name_of_builtins_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors.torch, "storage_ptr", max)
    with stio.compat.install():
        assert is_stio(safetensors.torch.storage_ptr)
        assert max.__module__ == "builtins"
    assert safetensors.torch.storage_ptr is max


def test_replaced_functions_and_classes_pickle() -> None:
    with stio.compat.install():
        for value in (safetensors.torch.load_file, safetensors.numpy.load_file, safetensors.safe_open):
            assert pickle.loads(pickle.dumps(value)) is value


def test_signature_and_help_are_those_of_the_function() -> None:
    before = {name: list(inspect.signature(TORCH[name]).parameters) for name in ("load", "load_model", "save_file")}
    with stio.compat.install():
        for name, parameters in before.items():
            found = getattr(safetensors.torch, name)
            assert list(inspect.signature(found).parameters)[: len(parameters)] == parameters
            assert found.__name__ == name
            assert pydoc.plain(pydoc.render_doc(found)).splitlines()[2].startswith(f"{name}(")
        assert list(inspect.signature(safetensors.safe_open).parameters) == [
            *("filename", "framework", "device", "backend")
        ]


def test_a_partial_keeps_the_original(file: Path) -> None:
    bound = functools.partial(safetensors.torch.load_file, device="cpu")
    with stio.compat.install():
        assert bound.func is TORCH["load_file"]
        assert bound(file)["w"].shape == (2, 3)


def test_the_drop_in_itself_does_not_change(file: Path) -> None:
    modules = (stio.compat.safetensors, stio.compat.safetensors.torch, stio.compat.safetensors.numpy)
    before = [dict(vars(module)) for module in modules]
    with stio.compat.install() as installed:
        assert [dict(vars(module)) for module in modules] == before
        assert not any(name.startswith("stio.") for name in installed.replaced)
        with stio.compat.safetensors.safe_open(file, "pt") as opened:
            assert type(opened) is stio.compat.safetensors.safe_open
        with pytest.raises(stio.compat.safetensors.SafetensorError, match="not supported here"):
            stio.compat.safetensors.safe_open(file, "jax")
    assert [dict(vars(module)) for module in modules] == before


_RELOAD = """
import importlib, sys
import safetensors.torch, stio.compat

stio.compat.install()
for module in (safetensors, safetensors.torch):
    importlib.reload(module)
assert safetensors.safe_open.__module__.startswith("stio."), "a reload takes the names of the Rust module"
assert safetensors.torch.load_file.__module__ == "safetensors.torch"  # its own code, over stio's safe_open
assert safetensors.torch.load_file(sys.argv[1])["w"].shape == (2, 3)
stio.compat.uninstall()
assert safetensors.torch.safe_open.__module__ == "builtins"
reloaded = [safetensors.torch.load_file]
with stio.compat.install():
    assert safetensors.torch.load_file.__module__.startswith("stio.")
assert safetensors.torch.load_file is reloaded[0]
"""


@pytest.mark.slow
def test_a_reload(file: Path, torch_zygote: Any) -> None:
    subprocess.run([str(torch_zygote.python), "-c", _RELOAD, str(file)], check=True, timeout=120)


# Names that other code replaces too.


@pytest.mark.slow
def test_a_patch_that_ends_after_uninstall(file: Path) -> None:
    with mock.patch.object(safetensors.torch, "load_file") as patched:
        stio.compat.install()
        assert is_stio(safetensors.torch.load_file)
        stio.compat.uninstall()
        assert safetensors.torch.load_file is patched
    assert is_as_before()
    stio.compat.install()
    with mock.patch.object(safetensors, "safe_open"), mock.patch.object(safetensors.torch, "load_file"):
        stio.compat.uninstall()
    assert is_stio(safetensors.safe_open)  # put back by the patch
    with stio.compat.install():  # with what it knows of the original
        assert type(safetensors.safe_open(file, "jax")) is RAW["safe_open"]
    assert is_as_before()
    stio.compat.install()
    with mock.patch.object(safetensors, "safe_open"):
        stio.compat.uninstall()
    stio.compat.uninstall()
    assert is_as_before()


def test_an_original_that_is_no_function_stays(monkeypatch: pytest.MonkeyPatch, importer: ModuleType) -> None:
    importer.nothing = None
    monkeypatch.setattr(safetensors.torch, "storage_size", None)
    with stio.compat.install():
        assert importer.nothing is None
        assert safetensors.torch.storage_size is None


# Counting.


def test_calls_nest() -> None:
    with stio.compat.install() as outer:
        with stio.compat.install() as inner:
            assert inner.replaced == outer.replaced
        assert not inner.is_active
        assert outer.is_active
        assert is_stio(safetensors.torch.load_file)
        inner.uninstall()  # again: nothing
        assert is_stio(safetensors.torch.load_file)
    assert is_as_before()


def test_the_order_in_which_installations_end_does_not_matter() -> None:
    first, second = stio.compat.install(), stio.compat.install()
    first.uninstall()
    assert is_stio(safetensors.safe_open)
    second.uninstall()
    assert is_as_before()


@pytest.mark.slow
def test_uninstall_ends_all_and_a_new_installation_is_its_own() -> None:
    old = stio.compat.install()
    stio.compat.install()
    stio.compat.uninstall()
    assert is_as_before()
    stio.compat.uninstall()
    new = stio.compat.install()
    old.uninstall()
    assert new.is_active
    assert is_stio(safetensors.safe_open)


def test_an_error_in_the_block_uninstalls() -> None:
    with pytest.raises(ZeroDivisionError), stio.compat.install():
        raise ZeroDivisionError
    assert is_as_before()


def test_threads_install_and_uninstall_at_the_same_time(file: Path) -> None:
    barrier, failures = threading.Barrier(6), []

    def work() -> None:
        barrier.wait()
        try:
            for _ in range(15):
                with stio.compat.install():
                    assert is_stio(safetensors.torch.load_file)
                    assert safetensors.torch.load_file(file)["w"].shape == (2, 3)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert is_as_before()


def test_a_module_that_is_imported_between_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread imports it when the list of modules is made: it must find stio's names already."""
    real, modules = replacement._namespaces, []

    def namespaces() -> list[tuple[str, dict[str, Any]]]:
        found = real()
        if not modules:
            modules.append(loaded(monkeypatch, "imports_meanwhile", _IMPORTS))
        return found

    monkeypatch.setattr(replacement, "_namespaces", namespaces)
    with stio.compat.install():
        assert is_stio(modules[0].read)
        assert is_stio(modules[0].safe_open)
    assert modules[0].read is TORCH["load_file"]


@pytest.mark.slow
def test_a_thread_imports_while_another_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"imports_in_thread_{number}" for number in range(150)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("from safetensors.torch import load_file as read, save_file\n" * 5)
    monkeypatch.syspath_prepend(tmp_path)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for name in names:
                importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        with stio.compat.install():
            pass
    thread.join()
    try:
        assert failures == []
        with stio.compat.install():
            assert all(is_stio(sys.modules[name].read) for name in names)
        assert all(sys.modules[name].read is TORCH["load_file"] for name in names)
    finally:
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture
def in_the_middle(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[], object]], list[int]]]:
    """A function that lets a signal handler call something in the middle of the next change, once."""
    real, previous = getattr(replacement, request.param), signal.getsignal(signal.SIGUSR1)

    def arrange(call: Callable[[], object]) -> list[int]:
        calls: list[int] = []

        def handle(number: int, frame: Any) -> None:
            calls.append(number)
            call()

        def interrupted(*arguments: Any) -> Any:
            if not calls:
                signal.raise_signal(signal.SIGUSR1)
            return real(*arguments)

        signal.signal(signal.SIGUSR1, handle)
        monkeypatch.setattr(replacement, request.param, interrupted)
        return calls

    yield arrange
    signal.signal(signal.SIGUSR1, previous)


DURING_INSTALLATION = pytest.mark.parametrize("in_the_middle", ["_namespaces", "_set_error_base"], indirect=True)
DURING_UNINSTALLATION = pytest.mark.parametrize("in_the_middle", ["_namespaces", "_set_error_base"], indirect=True)


@pytest.mark.matrix
@DURING_INSTALLATION
def test_a_signal_handler_uninstalls_during_an_installation(
    importer: ModuleType, in_the_middle: Callable[[Callable[[], object]], list[int]]
) -> None:
    calls = in_the_middle(stio.compat.uninstall)
    installed = stio.compat.install()
    assert len(calls) == 1
    assert not installed.is_active
    assert is_as_before()
    assert importer.read is TORCH["load_file"]
    with stio.compat.install():
        assert is_stio(importer.read)
    assert importer.read is TORCH["load_file"]


@pytest.mark.matrix
@DURING_UNINSTALLATION
def test_a_signal_handler_installs_during_an_uninstallation(
    importer: ModuleType, in_the_middle: Callable[[Callable[[], object]], list[int]]
) -> None:
    stio.compat.install()
    calls = in_the_middle(stio.compat.install)
    stio.compat.uninstall()
    assert len(calls) == 1
    assert is_stio(importer.read)
    stio.compat.uninstall()
    assert importer.read is TORCH["load_file"]


@pytest.mark.matrix
@DURING_INSTALLATION
def test_a_signal_handler_uses_a_block_during_an_installation(
    importer: ModuleType, in_the_middle: Callable[[Callable[[], object]], list[int]]
) -> None:
    def block() -> None:
        with stio.compat.install():
            pass

    in_the_middle(block)
    with stio.compat.install() as installed:
        assert installed.is_active
        assert is_stio(importer.read)
    assert importer.read is TORCH["load_file"]


@pytest.mark.slow
def test_an_uninstallation_that_is_interrupted_is_completed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, importer: ModuleType
) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    stio.compat.install()
    with monkeypatch.context() as patch:
        patch.setattr(replacement, "_namespaces", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stio.compat.uninstall()
    stio.compat.uninstall()
    assert is_as_before()
    assert importer.read is TORCH["load_file"]
    with stio.compat.install():
        assert is_stio(importer.read)


# Errors.


def caught_by(kinds: Any, path: Path) -> bool:
    try:
        safetensors.safe_open(path, "pt")
    except kinds:
        return True
    except Exception:  # noqa: BLE001
        return False
    return False


def test_an_except_clause_catches_stios_errors_however_it_holds_the_class(tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"no header")
    held = (OSError, RAW["SafetensorError"])  # a tuple, made before
    with stio.compat.install():
        assert caught_by(held, bad)
        assert caught_by(safetensors.SafetensorError, bad)
        assert caught_by(stio.compat.safetensors.SafetensorError, bad)
        with pytest.raises(RAW["SafetensorError"]) as caught:
            safetensors.torch.load_file(bad)
        assert issubclass(_errors().UnsupportedDtypeError, RAW["SafetensorError"])
        assert issubclass(_errors().UnsupportedDtypeError, TypeError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is stio.compat.safetensors.SafetensorError
    assert again.args == caught.value.args
    assert not issubclass(stio.compat.safetensors.SafetensorError, RAW["SafetensorError"])
    assert stio.compat.safetensors.SafetensorError.__mro__[1:] == (_errors().ErrorBase, *Exception.__mro__)


def _errors() -> Any:
    from stio.compat.safetensors import _file as errors

    return errors


# The original beside it.


@pytest.mark.matrix
@pytest.mark.parametrize("framework", ["tf", "tensorflow", "jax", "flax", "mlx"])
def test_frameworks_that_stio_does_not_serve_go_to_the_original(file: Path, framework: str) -> None:
    with pytest.raises(stio.compat.safetensors.SafetensorError, match="not supported here"):
        stio.compat.safetensors.safe_open(file, framework)
    with stio.compat.install():
        backend = {"backend": "pread"} if "backend" in inspect.signature(RAW["safe_open"]).parameters else {}
        opened = safetensors.safe_open(file, framework=framework, **backend)
        assert type(opened) is RAW["safe_open"]
        assert isinstance(opened, safetensors.safe_open)
        assert opened.keys() == ["w"]
        with pytest.raises(RAW["SafetensorError"], match="framework nonsense is invalid"):
            safetensors.safe_open(file, "nonsense")


def test_an_open_file_of_the_original_keeps_working(file: Path) -> None:
    opened = RAW["safe_open"](file, framework="pt")
    part = opened.get_slice("w")
    with stio.compat.install():
        assert opened.get_tensor("w")[1].tolist() == [3, 4, 5]
        assert part[0].tolist() == [0, 1, 2]
        assert isinstance(opened, safetensors.safe_open)
        ours = safetensors.safe_open(file, "pt")
        assert isinstance(ours, safetensors.safe_open)
        assert not isinstance(part, safetensors.safe_open)
    assert ours.get_tensor("w").shape == (2, 3)


def test_classes_before_during_and_after(file: Path) -> None:
    ours = stio.compat.safetensors.safe_open
    with stio.compat.install():
        kept = safetensors.safe_open
        assert issubclass(ours, kept)
        assert issubclass(RAW["safe_open"], kept)
        assert issubclass(kept, ours)
        assert not issubclass(int, kept)
        assert isinstance(mock.Mock(spec=kept), kept)

        class Logged(safetensors.safe_open):  # the original cannot have a subclass
            pass

        opened = Logged(file, "pt")
        assert type(opened) is Logged
        assert isinstance(opened, Logged) and isinstance(opened, kept)
        assert not isinstance(kept(file, "pt"), Logged)
        assert not issubclass(RAW["safe_open"], Logged)
        with pytest.raises(safetensors.SafetensorError, match="not supported here"):
            Logged(file, "jax")
    assert isinstance(kept(file, "pt"), kept)
    assert isinstance(RAW["safe_open"](file, "pt"), kept)
    assert isinstance(opened, Logged)


def test_types_of_other_releases_know_both_kinds(file: Path) -> None:
    with stio.compat.safetensors.safe_open(file, "pt") as opened:
        assert isinstance(opened.get_slice("w"), _installed.PySafeSlice)
        assert isinstance(opened.get_tensor_meta("w"), _installed.TensorMeta)
        loader = opened.prefetch()
        assert isinstance(loader, _installed.PrefetchLoader)
        loader.close()
        assert not isinstance(opened, _installed.PrefetchLoader)


def test_serialize_takes_tensors_in_all_forms(tmp_path: Path) -> None:
    array = np.arange(4.0, dtype=np.float32)
    values, pairs = {"dtype": "float32", "shape": [4]}, {"dtype": "float4_e2m1fn_x2", "shape": [2, 8]}

    def form(kind: Callable[..., Any]) -> dict[str, Any]:
        memory = {"data_ptr": array.ctypes.data, "data_len": array.nbytes}
        return {"w": kind(**values, **memory), "p": kind(**pairs, **memory)}

    dicts = {"w": values | {"data": array.tobytes()}, "p": pairs | {"data": array.tobytes()}}
    ours = form(stio.compat.safetensors.TensorSpec)
    forms = [ours, dicts, *([form(RAW["TensorSpec"])] if "TensorSpec" in RAW else [])]
    expected = stio.compat.safetensors.serialize(ours, {"k": "v"})  # compared with the original elsewhere
    with stio.compat.install():
        for tensors in forms:
            assert safetensors.serialize(tensors, {"k": "v"}) == expected
            safetensors.serialize_file(tensors, tmp_path / "x", {"k": "v"})
            assert (tmp_path / "x").read_bytes() == expected
        with pytest.raises(TypeError, match="'dict' object is not an instance of 'TensorSpec'"):
            safetensors.serialize({"w": values})
        with pytest.raises(TypeError):
            safetensors.serialize([("w", values)])
        with pytest.raises(TypeError):
            safetensors.serialize({"w": 3})


# Refusals: nothing is changed.


@pytest.mark.matrix
@pytest.mark.parametrize("version", ["0.4.5", "0.10.0", "1.0", "unknown"])
def test_a_release_that_was_not_compared_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(safetensors, "__version__", version)
    with pytest.raises(RuntimeError, match=f"supports safetensors>=0.5,<0.10, and found {version}.*any_version=True"):
        stio.compat.install()
    assert is_as_before()
    with stio.compat.install(any_version=True) as installed:
        assert installed.version == version
        assert is_stio(safetensors.safe_open)


@pytest.mark.matrix
@pytest.mark.parametrize("version", ["0.5.0-rc.0", "0.5.3", "0.7.0", "0.9.0rc1"])
def test_supported_releases(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(safetensors, "__version__", version)
    with stio.compat.install() as installed:
        assert installed.version == version


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match=r"not installed: pip install 'safetensors>=0.5,<0.10'"):
        stio.compat.install()


@pytest.mark.slow
def test_an_installation_that_is_interrupted_is_rolled_back(
    monkeypatch: pytest.MonkeyPatch, importer: ModuleType
) -> None:
    class Interrupted(dict[str, Any]):
        def copy(self) -> Any:
            raise KeyboardInterrupt

    real, calls = replacement._namespaces, []

    def namespaces() -> list[tuple[str, dict[str, Any]]]:
        calls.append(1)
        return [*real(), ("last", Interrupted())] if len(calls) == 1 else real()

    monkeypatch.setattr(replacement, "_namespaces", namespaces)
    with pytest.raises(KeyboardInterrupt):
        stio.compat.install()
    assert is_as_before()
    assert importer.read is TORCH["load_file"]
    assert stio.compat.safetensors.SafetensorError.__bases__ == (_errors().ErrorBase,)
    with stio.compat.install():
        assert is_stio(importer.read)


# Processes.


def test_importing_stio_compat_is_light() -> None:
    code = (
        "import sys, stio\n"
        "stio.compat.uninstall()\n"  # found without an import of its own
        "print(sorted({'torch', 'numpy', 'safetensors', 'anyio'} & set(sys.modules)))"
    )
    # A real interpreter without torch: what it imports.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_install_imports_what_it_replaces(file: Path, torch_zygote: Any) -> None:
    code = (
        "import sys, stio.compat; stio.compat.install()\n"
        "assert not isinstance(3, __import__('stio').compat.safetensors._installed.PrefetchLoader)\n"
        "from safetensors.torch import load_file\n"
        "assert load_file.__module__.startswith('stio.'), load_file.__module__\n"
        f"print(load_file({str(file)!r})['w'].sum().item())"
    )
    done = subprocess.run([str(torch_zygote.python), "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "15.0"


_FORK = """
import os, sys, threading
import stio.compat, safetensors
from stio.compat import replacement

original = [safetensors.safe_open]  # in a list, which nobody searches
handle = stio.compat.install()
held, release = threading.Event(), threading.Event()

def hold():
    with replacement._state.lock:
        held.set()
        release.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    assert safetensors.safe_open is not original[0]
    with stio.compat.install():
        pass
    handle.uninstall()
    os._exit(0 if safetensors.safe_open is original[0] else 1)
release.set()
thread.join()
_, status = os.waitpid(child, 0)
assert safetensors.safe_open is not original[0]
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_has_it_installed_and_a_lock_of_its_own(torch_zygote: Any) -> None:
    command = [str(torch_zygote.python), "-W", "ignore::DeprecationWarning", "-c", _FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0"


_FORK_IN_THE_MIDDLE = """
import os, threading
import safetensors, stio.compat
from safetensors import safe_open
from stio.compat import replacement

original, real, statuses = [safe_open], replacement._namespaces, []

def fork():
    child = os.fork()
    if child == 0:
        is_complete = safe_open is safetensors.safe_open is not original[0]
        stio.compat.uninstall()
        os._exit(0 if is_complete and safe_open is original[0] else 1)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def namespaces():
    replacement._namespaces = real
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return real()

replacement._namespaces = namespaces
stio.compat.install()
print(*statuses)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_that_is_forked_during_an_installation_completes_it(torch_zygote: Any) -> None:
    command = [str(torch_zygote.python), "-W", "ignore::DeprecationWarning", "-c", _FORK_IN_THE_MIDDLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "0"


@pytest.mark.slow
def test_a_forked_pool_has_it_and_a_spawned_one_calls_install_itself(
    file: Path, torch_zygote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource_tracker.ensure_running()  # a real interpreter without torch: it stays until this process ends
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(torch_zygote.python))
    with stio.compat.install():
        for start, options in (("fork", {}), ("spawn", {"initializer": stio.compat.install})):
            context = multiprocessing.get_context(start)
            with ProcessPoolExecutor(1, context, **options) as pool:
                code = "__import__('safetensors').safe_open.__module__"
                assert pool.submit(eval, code).result() == "stio.compat.safetensors._installed"
                # A function that was pickled while stio is installed is stio's there too.
                assert pool.submit(safetensors.numpy.load_file, file).result()["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


# The command line.

_PROGRAM = """
import sys
from safetensors.torch import load_file
import beside
print(load_file.__module__, __name__, sys.argv[1:], beside.here)
sys.exit(3)
"""


def run_program(
    directory: Path, *arguments: str, path: str = "", python: str | Path = sys.executable
) -> subprocess.CompletedProcess[str]:
    first = [Path(path)] if path else []
    environment = os.environ | {"PYTHONPATH": python_path(*first, Path(stio.__file__).parents[1])}
    command = [python, "-m", "stio.compat", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["script", "module"])
def test_a_program_runs_over_stio_unchanged(tmp_path: Path, name: str, torch_zygote: Any) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    (tmp_path / "beside.py").write_text("here = True")
    (tmp_path / "elsewhere").mkdir()
    if name == "script":
        done = run_program(tmp_path / "elsewhere", "../program.py", "-m", "--help", python=torch_zygote.python)
    else:
        done = run_program(tmp_path, "-m", "program", "-m", "--help", python=torch_zygote.python)
    assert done.returncode == 3, done.stderr
    assert done.stdout == "stio.compat.safetensors._installed __main__ ['-m', '--help'] True\n"


@pytest.mark.slow
def test_the_command_line_is_refused(tmp_path: Path) -> None:
    for arguments, status in (((), 2), (("-m",), 2), (("--unknown", "x"), 2), (("--help",), 0)):
        done = run_program(
            tmp_path, *arguments
        )  # a real interpreter without torch: it is refused before that is imported
        assert done.returncode == status
        assert done.stderr.startswith("usage: python -m stio.compat SCRIPT")
    (tmp_path / "old" / "safetensors").mkdir(parents=True)
    (tmp_path / "old" / "safetensors" / "__init__.py").write_text("__version__ = '0.4.5'")
    (tmp_path / "program.py").write_text("raise AssertionError")
    done = run_program(tmp_path, "program.py", path=str(tmp_path / "old"))
    assert done.returncode == 1
    assert re.fullmatch(r"stio: .* supports safetensors>=0.5,<0.10, and found 0.4.5: .*\n", done.stderr)
