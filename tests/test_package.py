"""What is shipped: what importing it costs, what the wheel and the sdist hold, and the types that a user's checker sees."""

from __future__ import annotations

import ctypes
import email
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import venv
import zipfile
from pathlib import Path

import extras
import installs
import pytest

import hatch_build
import stio
from stio import native
from stio.errors import DISTRIBUTION

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, MYPY = SETTINGS["project"], SETTINGS["tool"]["mypy"]


# Importing.


def processor_seconds(code: str) -> float:
    """Return the processor time of an interpreter that runs this: of a noisy machine it sees less than a clock does."""
    # A real interpreter without torch, with -I; so is the next one.
    process = subprocess.Popen([sys.executable, "-I", "-c", code], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.slow
def test_importing_costs_next_to_nothing() -> None:
    path = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    extra = [processor_seconds(f"{path}import stio") - processor_seconds(f"{path}pass") for _ in range(7)]
    assert statistics.median(extra) < 0.06, extra  # 12 ms here


def test_importing_brings_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "anyio", "asyncio", "msgspec", "aiofiles", "logging", "opentelemetry"]
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import stio; print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


# What is built.


# `make package` installs what is built, in each way; here are the forms of a wheel only.

MODULES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "stio").rglob("*.py")} | {"stio/py.typed"}
ENGINE = "stio/native/libstio.so"
WITHOUT = "stio is built without its engine, so loads are slower: "
has_compiler = shutil.which(shlex.split(os.environ.get("CC", "cc"))[0]) is not None
needs_compiler = pytest.mark.skipif(not has_compiler, reason="needs a C compiler")


def build(kind: str, target: Path, **environment: str) -> tuple[Path, str]:
    """Build one file; return it, and what the build wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(target)],
        check=True, cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "STIO_REQUIRE_NATIVE": "0", **environment},
    )  # fmt: skip
    (made,) = target.iterdir()
    return made, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tmp_path_factory.mktemp("wheel"))[0]


def packaged(wheel: Path) -> set[str]:
    """Return what a wheel installs."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@needs_compiler
def test_the_wheel_holds_the_package_and_its_engine(wheel: Path, tmp_path: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"stio_torch-{stio.__version__}-py3-none-{platform}.whl"
    assert packaged(wheel) == {*MODULES, ENGINE}
    with zipfile.ZipFile(wheel) as archive:
        folder = f"stio_torch-{stio.__version__}.dist-info"
        assert b"Root-Is-Purelib: false" in archive.read(f"{folder}/WHEEL")
        library = Path(archive.extract(ENGINE, tmp_path))
    assert ctypes.CDLL(str(library)).stio_engine_version() == native.VERSION
    shown = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    assert {line.split()[-1][:5] for line in shown.splitlines()} == {"stio_"}  # no name of another library is hidden


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path) -> None:
    """And the library of the checkout, which may be in use, is left alone."""
    before = native.LIBRARY.stat() if native.LIBRARY.exists() else None
    made, output = build("wheel", tmp_path / "dist", CC="/nonexistent -m64")
    assert made.name == f"stio_torch-{stio.__version__}-py3-none-any.whl"
    assert packaged(made) == MODULES
    lines = [line for line in output.splitlines() if WITHOUT in line]
    assert [line.partition(WITHOUT)[2] for line in lines] == ["there is no C compiler '/nonexistent'"]
    assert (native.LIBRARY.stat() if native.LIBRARY.exists() else None) == before


@pytest.mark.slow
@needs_compiler
def test_a_compiler_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CFLAGS", "-DSTIO_ENGINE_VERSION= -Werror")
    monkeypatch.delenv("STIO_REQUIRE_NATIVE", raising=False)
    (tmp_path / "libstio.so").write_text("the old one")
    why = hatch_build.compile_library(tmp_path / "libstio.so")
    line = hatch_build.refused(why)
    assert re.fullmatch(rf"{WITHOUT}the C compiler '.+' failed: .*error.*", line)
    monkeypatch.setenv("STIO_REQUIRE_NATIVE", "1")
    with pytest.raises(RuntimeError, match=r"(?s)\n.+ -Werror .+\n.+STIO_ENGINE_VERSION"):  # all of it
        hatch_build.refused(why)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("libstio.so", "the old one")]


def test_a_tree_keeps_a_library_only_if_it_is_newer_than_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/nonexistent")
    monkeypatch.setattr(hatch_build, "LIBRARY", tmp_path / "libstio.so")
    monkeypatch.setattr(hatch_build, "FOLDER", tmp_path)
    for name in ("engine.c", "engine.h", "libstio.so"):
        (tmp_path / name).touch()
    newest = (tmp_path / "engine.h").stat().st_mtime + 10
    os.utime(tmp_path / "libstio.so", (newest, newest))
    assert hatch_build.compile_in_tree()
    assert (tmp_path / "libstio.so").exists()
    os.utime(tmp_path / "engine.h", (newest + 10, newest + 10))
    assert hatch_build.compile_in_tree()
    assert not (tmp_path / "libstio.so").exists()


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the engine is not compiled in this tree")
def test_the_library_of_the_checkout_is_that_of_its_sources() -> None:
    """Or the tests would run another engine than the one that they are for. `make test` compiles it."""
    sources = [ROOT / "hatch_build.py", *(ROOT / "stio" / "native").glob("*.[ch]")]
    newer = [path.name for path in sources if path.stat().st_mtime > native.LIBRARY.stat().st_mtime]
    assert not newer, "python hatch_build.py compiles the engine anew"


def test_the_wheel_says_what_the_project_does(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folder = f"stio_torch-{stio.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        entry_points = archive.read(f"{folder}/entry_points.txt").decode()
        assert "[console_scripts]\nstio = stio.__main__:main\n" in entry_points
        assert "[vllm.general_plugins]\nstio = stio.integrations.vllm:register\n" in entry_points
        assert archive.read(f"{folder}/licenses/LICENSE")
    assert metadata["Name"] == DISTRIBUTION == "stio-torch"
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split("[^a-z]", line)[0] for line in required) == [
        "aiofiles",
        "anyio",
        "msgspec",
        "numpy",
        "torch",
    ]


@pytest.mark.costly("a build")
def test_the_sdist_can_be_built_from_and_tested(tmp_path: Path) -> None:
    made, _ = build("sdist", tmp_path)
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = [(ROOT / name).rglob("*") for name in (".github", "benchmarks", "docs", "examples", "stio", "tests")]
    wanted = [path for paths in folders for path in paths if path.is_file() and "__pycache__" not in path.parts]
    wanted += [*ROOT.glob("*.md"), *ROOT.glob("*.txt"), *ROOT.glob("*.yml")]
    left_out = {path.relative_to(ROOT).as_posix() for path in wanted} - names
    assert {name for name in left_out if not re.search(r"/\.gitignore$|-partial\.|libstio\.so", name)} == set()
    assert not [name for name in names if ".so" in name]
    assert {"pyproject.toml", "hatch_build.py", "Makefile", "constraints.txt", "LICENSE", "README.md"} <= names
    assert not [name for name in names if re.search(r"(^|/)(\.git|\.venv|dist|build|__pycache__)(/|$)", name)]


def test_every_requirement_is_pinned_for_development() -> None:
    text = (ROOT / "constraints.txt").read_text()
    pins = {re.sub("[-_.]+", "-", name).lower() for name in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}
    needed = [
        *PROJECT["dependencies"],
        *(line for lines in PROJECT["optional-dependencies"].values() for line in lines),
    ]
    names = {re.sub("[-_.]+", "-", re.split(r"[^\w.-]", line)[0]).lower() for line in needed}
    assert names - pins == set()


# What a type checker sees from outside.

PROGRAMS = {
    "good.py": """
    from collections.abc import Callable
    from typing import Any, assert_type

    import stio
    import torch
    from torch import nn


    def show(event: stio.ProgressEvent) -> None:
        assert_type(event.done_bytes, int)
        assert_type(event.seconds, float)


    async def load(module: nn.Module) -> None:
        tensors = await stio.load("model/", device="cuda", dtype=torch.bfloat16, memory="copy", progress=show)
        assert_type(tensors, dict[str, torch.Tensor])
        await stio.load("model/", names=lambda name: name.startswith("h."), slices={"a": slice(3)}, limits=stio.Limits())
        await stio.load("model/", names=["a", "b"], budget_bytes=1 << 20, verify=True, switch_interval=0.0005)
        report = await stio.load_into(module, "model/", strict=False, assign=True)
        assert_type(report, stio.LoadReport)
        assert_type(report.missing, tuple[str, ...])
        trace = stio.Trace()
        async with stio.open("model/", device=torch.device("cpu"), trace=trace) as checkpoint:
            assert_type(checkpoint, stio.Checkpoint)
            assert_type(checkpoint.keys(), list[str])
            assert_type(len(checkpoint), int)
            assert_type(checkpoint.info("wte"), stio.TensorInfo)
            assert_type(checkpoint.info("wte").shape, tuple[int, ...])
            assert_type(await checkpoint.read("wte", slice(0, 8)), torch.Tensor)
            async with checkpoint.stream() as stream:
                assert_type(stream, stio.Stream)
                async for name, tensor in stream:
                    assert_type(name, str)
                    assert_type(tensor, torch.Tensor)
        cache = stio.HostCache(1 << 30, device="cpu")
        await cache.prefetch("model/")
        assert_type(cache.stats(), stio.CacheStats)
        await stio.load("model/", cache=cache, device={"h.0": 0, "": "cpu"})
        disk = stio.DiskCache("cache/", max_bytes=1 << 30)
        await stio.load("s3://bucket/model", cache=disk)
        await stio.load("s3://bucket/model", cache=(disk, cache))
        async with stio.ModelPool(device="cuda", device_bytes="60GB", host_bytes=1 << 30, disk=disk) as pool:
            assert_type(pool, stio.ModelPool)
            pool.add("chat", "model/", make=lambda: module, dtype="bfloat16")
            await pool.prefetch("chat")
            async with pool.use("chat", priority=1) as model:
                assert_type(model, Any)
            await pool.update("chat", "model-v2/")
            assert_type(pool.status("chat"), stio.ModelStatus)
            assert_type(pool.stats(), stio.PoolStats)
            assert_type(pool.names(), list[str])
        assert_type(disk.stats(), stio.CacheStats)
        assert_type(disk.leftovers(), list[str])
        assert_type(disk.evict(), int)
        async with stio.warm_start(module, "model/", device="cuda") as warm:
            assert_type(warm, stio.WarmStart)
            assert_type(await warm.done(), stio.LoadReport)
        assert_type(trace.spans, list[stio.Span])
        assert_type(trace.save_svg("a.svg", title="a load"), None)
        statistics = stio.stats()
        assert_type(statistics, stio.Stats)
        assert_type(statistics.num_loads_done, int)
        assert_type(statistics.load_seconds, float)
        assert_type(statistics.engine, str)


    async def save(module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        result = await stio.save(module, "out/", max_shard_size="5GB", metadata={"a": "b"}, hash="sha256")
        assert_type(result, stio.SaveResult)
        assert_type(result.files, tuple[str, ...])
        lazy = stio.LazyTensor(torch.float32, (2, 3), lambda: torch.empty(2, 3))
        await stio.save({"lazy": lazy, **tensors}, "out.safetensors", durability="none")
        async with stio.Saver(keep_last=3, when_full="error") as saver:
            assert_type(saver, stio.Saver)
            pending = await saver.save(tensors, "step-100/")
            assert_type(pending, stio.PendingSave)
            assert_type(await pending, stio.SaveResult)
            assert_type(pending.result(timeout=1.0), stio.SaveResult)
        await stio.save_state({"step": 3}, "optim.safetensors")
        assert_type(await stio.load_state("optim.safetensors"), Any)


    def block(tensors: dict[str, torch.Tensor]) -> None:
        assert_type(stio.sync.load("model/"), dict[str, torch.Tensor])
        with stio.sync.open("model/") as checkpoint:
            assert_type(checkpoint.read("wte"), torch.Tensor)
            for name, tensor in checkpoint.stream():
                assert_type((name, tensor), tuple[str, torch.Tensor])
        assert_type(stio.sync.save(tensors, "out/"), stio.SaveResult)
        with stio.sync.Saver() as saver:
            assert_type(saver.save(tensors, "out/").result(), stio.SaveResult)


    def errors(error: Exception) -> None:
        if isinstance(error, stio.NoSpaceError):
            found: OSError = error
        if isinstance(error, stio.TensorNotFoundError):
            missing: KeyError = error
        if isinstance(error, stio.StioError):
            assert_type(error.path, str | None)
    """,
    "bad.py": """
    import stio

    async def wrong() -> None:
        await stio.load("model/", devise="cuda")  # E: call-arg
        await stio.load(3)  # E: arg-type
        await stio.load("model/", memory="mapped")  # E: arg-type
        stio.load("model/")  # E: unused-coroutine
        stio.lode("model/")  # E: attr-defined
        reveal_type(await stio.load("model/"))  # N: dict[str, torch._tensor.Tensor]
        reveal_type(stio.open("model/"))  # N: stio.loading.api.Checkpoint
        with stio.open("model/"):  # E: attr-defined
            pass
        await stio.save({"a": 3}, "out/")  # E: dict-item
        await stio.save({}, "out/", hash="md5")  # E: arg-type
        stio.Saver(keep_last="3")  # E: arg-type
        stio.stats().num_loads_done = 3  # E: misc
        stio.Limits(3)  # E: call-arg
        missing: int = stio.stats().load_seconds  # E: assignment
    """,
}


@pytest.fixture(scope="module")
def findings(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[tuple[int, str]]]:
    """Return what a strict checker says of both programs, beside the wheel in an environment of its own.

    In one run: most of its time goes into reading torch. What the wheel needs comes from the environment of the tests.
    """
    home = tmp_path_factory.mktemp("installed")
    venv.create(home / "venv")
    (packages,) = (home / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    python = home / "venv" / "bin" / "python"
    code = f"import importlib.metadata, stio; print(stio.__file__, importlib.metadata.version({DISTRIBUTION!r}))"
    done = subprocess.run([python, "-I", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"{packages}/stio/__init__.py {stio.__version__}\n"
    for name, text in PROGRAMS.items():
        (home / name).write_text(textwrap.dedent(text))
    # What `make check` has cached of torch is valid here too, with the same options as in pyproject.toml. It is a copy:
    # the entries of stio become others.
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", home / ".mypy_cache")
    skipped = [rule for rule in MYPY["overrides"] if "follow_imports" in rule]
    sections = (
        f"[mypy-{','.join(rule['module'])}]\nfollow_imports = skip\nignore_missing_imports = True" for rule in skipped
    )
    (home / "mypy.ini").write_text("\n".join(["[mypy]\nstrict = True\nwarn_unreachable = True", *sections]))
    options = ["--no-error-summary", "--python-executable", str(python)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *PROGRAMS],
        cwd=home, env={k: v for k, v in os.environ.items() if k != "MYPYPATH"}, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.stderr
    found: dict[str, set[tuple[int, str]]] = {name: set() for name in PROGRAMS}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r'(\w+\.py):(\d+): (?:error: .+\[([a-z-]+)\]|note: (?:Revealed type is "(.+)"|.+))', line)
        assert match, line
        name, number, error, kind = match.groups()
        if error or kind:
            found[name].add((int(number), f"E: {error}" if error else f"N: {kind}"))
    return found


def test_a_program_is_checked_against_the_installed_package(findings: dict[str, set[tuple[int, str]]]) -> None:
    assert findings["good.py"] == set()


def test_mistakes_are_found(findings: dict[str, set[tuple[int, str]]]) -> None:
    lines = textwrap.dedent(PROGRAMS["bad.py"]).splitlines()
    expected = {(k, line.partition("  # ")[2]) for k, line in enumerate(lines, 1) if "  # " in line}
    assert findings["bad.py"] == expected


# Forms of installation: `make package` tries them, this only that it tries each one with and without a compiler.


def test_every_form_is_installed_without_a_compiler() -> None:
    assert set(installs.WAYS) == {"wheel", "sdist", "tree", "editable"}
    for tries in installs.WAYS.values():
        assert {expected for variables, expected in tries if "CC" not in variables} == {installs.ENGINE}
        assert installs.NO_COMPILER in [variables for variables, _ in tries]
    assert f"engine {native.VERSION}" == installs.ENGINE
    compile(installs.CHECK, "installs.py", "exec")


# Extras, one by one: `make extras` does it, this only that it leaves none out.


def test_every_extra_is_installed_alone() -> None:
    assert set(extras.CHECKS) == {extras.NONE, *PROJECT["optional-dependencies"]}
    for code in extras.CHECKS.values():
        compile(code, "extras.py", "exec")
    assert "$(PYTHON) tests/extras.py" in (ROOT / "Makefile").read_text()
