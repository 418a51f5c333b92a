"""A library that stands between stio and the kernel, and makes reads and writes fail as disks and signals do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_int hits;
int shim_hits(void) { return hits; }

static int mode_is(const char *word) {
    const char *modes = getenv("SHIM_MODES");
    return modes && strstr(modes, word);
}

/* Whether a call of this number is hit: all of them, or, with SHIM_AT, one. */
static int is_hit(int number) {
    const char *at = getenv("SHIM_AT");
    return !at || number == atoi(at);
}

static int matches(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return strstr(path, "faulty") != NULL;
}

/* Cut the file SHIM_PATH to SHIM_SIZE bytes. */
static void cut(void) {
    if (truncate(getenv("SHIM_PATH"), atol(getenv("SHIM_SIZE"))) != 0) abort();
}

static ssize_t hooked(int fd, const struct iovec *iov, int count, off64_t offset) {
    static ssize_t (*real)(int, const struct iovec *, int, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "preadv64");
    if (!matches(fd)) return real(fd, iov, count, offset);
    int hit = ++hits;
    if (!is_hit(hit)) return real(fd, iov, count, offset);
    if (mode_is("cut")) cut();
    if (mode_is("standing")) usleep(2000000); /* waits: as a disk that does not answer */
    int after = getenv("SHIM_AFTER") ? atoi(getenv("SHIM_AFTER")) : 0;
    if (mode_is("direct") && (fcntl(fd, F_GETFL) & O_DIRECT)) { errno = EINVAL; return -1; }
    if (mode_is("interrupted") && (hit % 2 || getenv("SHIM_AT"))) { errno = EINTR; return -1; }
    if (mode_is("broken") && hit > after) { errno = EIO; return -1; }
    if (mode_is("short")) {
        for (int k = 0; k < count; k++) {
            if (!iov[k].iov_len) continue;
            struct iovec one = {iov[k].iov_base, iov[k].iov_len > 700 ? 700 : (iov[k].iov_len + 1) / 2};
            return real(fd, &one, 1, offset);
        }
    }
    return real(fd, iov, count, offset);
}

ssize_t preadv(int fd, const struct iovec *iov, int count, off_t offset) { return hooked(fd, iov, count, offset); }
ssize_t preadv64(int fd, const struct iovec *iov, int count, off64_t offset) { return hooked(fd, iov, count, offset); }

/* Reads that must not wait: the file is on a disk that would have to be waited for. */
static ssize_t hooked_now(int fd, const struct iovec *iov, int count, off64_t offset, int flags) {
    static ssize_t (*real)(int, const struct iovec *, int, off64_t, int);
    if (!real) real = dlsym(RTLD_NEXT, "preadv64v2");
    if (matches(fd)) { errno = EAGAIN; return -1; }
    return real(fd, iov, count, offset, flags);
}

ssize_t preadv2(int fd, const struct iovec *iov, int count, off_t offset, int flags) {
    return hooked_now(fd, iov, count, offset, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *iov, int count, off64_t offset, int flags) {
    return hooked_now(fd, iov, count, offset, flags);
}

/* One buffer: what reads past the page cache. */
static ssize_t hooked_one(int fd, void *memory, size_t nbytes, off64_t offset) {
    struct iovec one = {memory, nbytes};
    if (mode_is("short") && (fcntl(fd, F_GETFL) & O_DIRECT) && matches(fd) && is_hit(hits + 1)) {
        hits++; /* whole pages, as a disk returns them */
        one.iov_len = nbytes > 8192 ? nbytes / 2 / 4096 * 4096 : nbytes;
        static ssize_t (*real)(int, const struct iovec *, int, off64_t);
        if (!real) real = dlsym(RTLD_NEXT, "preadv64");
        return real(fd, &one, 1, offset);
    }
    return hooked(fd, &one, 1, offset);
}

ssize_t pread(int fd, void *memory, size_t nbytes, off_t offset) { return hooked_one(fd, memory, nbytes, offset); }
ssize_t pread64(int fd, void *memory, size_t nbytes, off64_t offset) { return hooked_one(fd, memory, nbytes, offset); }

/* Writes. `shim_writes(1)`: those past the page cache, `(0)`: the others; `shim_most_writes`: under way at one time. */
static atomic_int writes[2], under_way, max_under_way, writebacks;
int shim_writes(int direct) { return writes[direct]; }
int shim_most_writes(void) { return max_under_way; }
int shim_writebacks(void) { return writebacks; }

static ssize_t hooked_write(int fd, const void *memory, size_t nbytes, off64_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    if (!matches(fd)) return real(fd, memory, nbytes, offset);
    int is_direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0, hit = ++hits;
    writes[is_direct]++;
    if (mode_is("slow")) {
        int now = ++under_way, most = max_under_way;
        while (now > most && !atomic_compare_exchange_weak(&max_under_way, &most, now)) continue;
        usleep(3000);
        ssize_t count = real(fd, memory, nbytes, offset);
        under_way--;
        return count;
    }
    if (!is_hit(hit)) return real(fd, memory, nbytes, offset);
    if (mode_is("refused") && is_direct) { errno = mode_is("unsupported") ? EOPNOTSUPP : EINVAL; return -1; }
    if (mode_is("interrupted")) { errno = EINTR; return -1; }
    if (mode_is("broken")) { errno = EIO; return -1; }
    if (mode_is("full")) { errno = ENOSPC; return -1; }
    if (mode_is("nothing")) return 0;
    if (mode_is("short")) return real(fd, memory, is_direct && nbytes > 8192 ? 4096 : nbytes > 700 ? 700 : nbytes, offset);
    if (mode_is("torn")) { /* past the page cache, and not to the end of a page */
        if (!is_direct || nbytes < 8192) return real(fd, memory, nbytes, offset);
        ssize_t count = real(fd, memory, 8192, offset);
        return count < 0 ? count : 4096 + 512;
    }
    return real(fd, memory, nbytes, offset);
}

ssize_t pwrite(int fd, const void *memory, size_t nbytes, off_t offset) { return hooked_write(fd, memory, nbytes, offset); }
ssize_t pwrite64(int fd, const void *memory, size_t nbytes, off64_t offset) { return hooked_write(fd, memory, nbytes, offset); }

int sync_file_range(int fd, off64_t offset, off64_t nbytes, unsigned flags) {
    static int (*real)(int, off64_t, off64_t, unsigned);
    if (!real) real = dlsym(RTLD_NEXT, "sync_file_range");
    if (matches(fd)) writebacks++;
    return real(fd, offset, nbytes, flags);
}

int madvise(void *address, size_t length, int advice) {
    static int (*real)(void *, size_t, int);
    if (!real) real = dlsym(RTLD_NEXT, "madvise");
    if (getenv("SHIM_AT")) {
        if (advice != 22 || !is_hit(++hits)) return real(address, length, advice);
        if (mode_is("cut")) cut();
        if (mode_is("fault")) { errno = EFAULT; return -1; }
        if (mode_is("again")) { errno = EAGAIN; return -1; }
        if (mode_is("oldkernel")) { errno = EINVAL; return -1; }
        if (mode_is("poisoned")) { errno = EHWPOISON; return -1; }
        if (mode_is("interrupted")) { errno = EINTR; return -1; }
        return real(address, length, advice);
    }
    if (advice == 22 && mode_is("fault")) { hits++; errno = EFAULT; return -1; }
    if (advice == 22 && mode_is("oldkernel")) { hits++; errno = EINVAL; return -1; }
    if (advice == 22 && mode_is("poisoned")) { hits++; errno = EHWPOISON; return -1; }
    if (advice == 22 && mode_is("signal") && ++hits < 3) { errno = EINTR; return -1; }
    return real(address, length, advice);
}
"""

PRELUDE = """
import ctypes, errno, os, sys
from pathlib import Path
import pytest
from stio import native
from stio.runtime import memory
from stio.errors import StorageError, TruncatedError
from stio.storage.local import LocalFile, LocalRoot
from stio.storage.local import MappedFile

hits = ctypes.CDLL(None).shim_hits if os.environ.get("LD_PRELOAD") else None
path = sys.argv[1]

def read(source, offset, *lengths):
    regions = [memory.allocate(length).sub(0, length) for length in lengths]
    source.read_into(offset, regions)
    return b"".join(region.tobytes() for region in regions)

def populate(mapped, offset, nbytes, by):
    if by == "plain":
        mapped.populate(offset, nbytes)
        return
    ranges, transfer = native.Ranges(), native.Transfer()
    ranges.file_to_host(0, mapped.file.fd, -1, offset, nbytes, mapped.region.address + offset, native.POPULATE)
    transfer.add(ranges)
    try:
        while not transfer.take():
            pass
    except native.Failure as failure:
        raise mapped.file.error(failure) from None
    finally:
        transfer.end()
"""


def build_shim(folder: Path) -> Path:
    """Build the library that makes reads fail; skip the test without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler for the library that makes reads fail")
    (folder / "shim.c").write_text(SHIM)
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", "shim.so", "shim.c", "-ldl"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "shim.so"


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the library."""
    return build_shim(tmp_path_factory.mktemp("shim"))


Script = Callable[..., str]


@pytest.fixture
def run_script() -> Script:
    """Return a function that runs a script in a process of its own, without torch unless it imports it."""

    def run(body: str, *arguments: object, **environment: str) -> str:
        done = subprocess.run(  # a real interpreter, for LD_PRELOAD; few of the scripts import torch
            [sys.executable, "-c", PRELUDE + textwrap.dedent(body), *map(str, arguments)],
            cwd=REPOSITORY,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def run_faulty(shim: Path, run_script: Script) -> Script:
    """Return a function that runs a script behind the library; `modes` says what goes wrong."""

    def run(body: str, *arguments: object, modes: str, after: int = 0) -> str:
        return run_script(body, *arguments, LD_PRELOAD=str(shim), SHIM_MODES=modes, SHIM_AFTER=str(after))

    return run
