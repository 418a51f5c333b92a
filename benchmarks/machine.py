"""The machine: what it is, which disk holds a path, a loop mount with a small read-ahead, the processors' load."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PACKAGES = (
    *(
        "stio-torch",
        "torch",
        "numpy",
        "safetensors",
        "transformers",
        "huggingface_hub",
        "runai-model-streamer",
        "fastsafetensors",
    ),
    "instanttensor",
    *("anyio", "msgspec"),
    *("fastapi", "uvicorn", "uvloop", "httpx"),
)


class MountUnavailable(RuntimeError):
    """This machine does not let the benchmark make the mount that it needs."""


def describe() -> dict[str, object]:
    """Give what a reader of the figures must know about the machine."""
    return {
        "cpu": _cpu_model(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def record(directory: Path, size_bytes: int, prime_bytes: int) -> dict[str, object]:
    """Give the first line of the raw figures: the machine, its disk, and the sizes of the run."""
    return {
        "kind": "machine",
        **describe(),
        "disk": describe_disk(directory),
        "date": time.strftime("%Y-%m-%d"),
        "size_bytes": size_bytes,
        "prime_bytes": prime_bytes,
    }


@contextmanager
def recording(
    out: Path, directory: Path | None, size_bytes: int = 0, prime_bytes: int = 0
) -> Iterator[tuple[Path, list[dict[str, Any]], Callable[[dict[str, Any]], None]]]:
    """Yield a temporary directory, the records of a run, and what adds one to them and to the file `out`.

    The first record is that of the machine. The directory is removed at the end.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as place, out.open("w") as file:
        records: list[dict[str, Any]] = []

        def emit(one: dict[str, Any]) -> None:
            records.append(one)
            file.write(json.dumps(one) + "\n")
            file.flush()

        emit(record(Path(place), size_bytes, prime_bytes))
        yield Path(place), records, emit


def describe_disk(path: Path) -> dict[str, object]:
    """Give the filesystem, scheduler and read-ahead below `path`."""
    device = block_device(path)
    return {
        "filesystem": _filesystem(path),
        "scheduler": _read(f"/sys/dev/block/{device}/queue/scheduler"),
        "read_ahead_kb": _read(f"/sys/dev/block/{device}/queue/read_ahead_kb"),
    }


def block_device(path: Path) -> str:
    """Give "major:minor" of the whole disk that holds `path`."""
    number = os.stat(path).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    sysfs = Path(f"/sys/dev/block/{device}")
    if (sysfs / "partition").exists():
        return (sysfs.resolve().parent / "dev").read_text().strip()
    return device


@contextmanager
def loop_mount(image: Path, size_bytes: int, read_ahead_kb: int) -> Iterator[Path]:
    """Mount a fresh ext4 image with the given read-ahead; its own file is read by direct I/O, past the page cache.

    Raises:
        MountUnavailable: A tool or the permission is missing.
    """
    point = image.with_suffix(".mount")
    device = ""
    try:
        with open(image, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        _command("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
        device = _command("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
        queue = Path("/sys/block") / Path(device).name
        if (queue / "loop/dio").read_text().strip() != "1":
            raise MountUnavailable("the loop device refuses direct I/O")
        point.mkdir(exist_ok=True)
        _command("mount", device, str(point))
        (queue / "queue/read_ahead_kb").write_text(str(read_ahead_kb))
        yield point
    except OSError as error:
        raise MountUnavailable(f"loop mount: {error}") from error
    finally:
        if point.is_mount():
            _command("umount", str(point))
        if device:
            _command("losetup", "--detach", device)
        if point.is_dir():
            point.rmdir()
        image.unlink(missing_ok=True)


def busy_cpu_seconds() -> float:
    """Give the seconds that all processors together have been busy or stolen since boot."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _command(*words: str) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise MountUnavailable(f"{words[0]} is not installed") from error
    except subprocess.CalledProcessError as error:
        raise MountUnavailable(f"{words[0]}: {error.stderr.strip()}") from error


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _filesystem(path: Path) -> str:
    best, kind = "", "?"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, name, *_ = line.split()
        if str(path.resolve()).startswith(point) and len(point) > len(best):
            best, kind = point, name
    return kind


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
