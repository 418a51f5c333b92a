"""Memory between pages that nobody may touch: an access one byte outside of a tensor's storage ends the process.

`build` compiles a library for LD_PRELOAD. torch then gets its host memory from one arena: each allocation ends at a page
without access, and a freed one is without access for ever. `guarded` makes a tensor over memory of that kind that torch
has not allocated.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

MIN_BYTES = 256
"""Smaller allocations of torch are ordinary ones."""

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ARENA (1UL << 40)
#define LEAST %(least)dUL
#define PAGE 4096UL
#define FILL 0xa5

static char *arena;
static _Atomic size_t used;
static _Atomic long served;
static void (*real_free)(void *);
static int (*real_align)(void **, size_t, size_t);

__attribute__((constructor)) static void begin(void) {
    real_free = dlsym(RTLD_NEXT, "free");
    real_align = dlsym(RTLD_NEXT, "posix_memalign");
    char *found = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    arena = found == MAP_FAILED ? NULL : found;
}

long guard_served(void) { return served; }

/* The header of an allocation has its size and its first byte. */
int posix_memalign(void **out, size_t align, size_t size) {
    if (!arena || size < LEAST || align > PAGE) {
        if (!real_align) real_align = dlsym(RTLD_NEXT, "posix_memalign");
        return real_align(out, align, size);
    }
    size_t room = (size + PAGE - 1) / PAGE * PAGE;
    size_t at = atomic_fetch_add(&used, room + 3 * PAGE);  /* a guard, the header, a guard, memory */
    if (at + room + 4 * PAGE > ARENA) return ENOMEM;
    char *head = arena + at + PAGE, *memory = head + 2 * PAGE;
    if (mprotect(head, PAGE, PROT_READ | PROT_WRITE) || mprotect(memory, room, PROT_READ | PROT_WRITE)) return ENOMEM;
    char *first = memory + room - (size + align - 1) / align * align;
    memset(memory, FILL, room);
    ((size_t *)head)[0] = size;
    ((char **)head)[1] = first;
    served++;
    *out = first;
    return 0;
}

void free(void *pointer) {
    char *p = pointer;
    if (!arena || p < arena || p >= arena + ARENA) {
        if (real_free) real_free(pointer);
        return;
    }
    char *memory = (char *)((uintptr_t)p / PAGE * PAGE), *head = memory - 2 * PAGE;
    size_t size = ((size_t *)head)[0], room = (size + PAGE - 1) / PAGE * PAGE;
    if (((char **)head)[1] != p) abort();
    for (char *q = memory; q < p; q++) if ((unsigned char)*q != FILL) abort();
    for (char *q = p + size; q < memory + room; q++) if ((unsigned char)*q != FILL) abort();
    madvise(head, room + 2 * PAGE, MADV_DONTNEED);
    mprotect(head, room + 2 * PAGE, PROT_NONE);
}
"""


def why_not() -> str:
    """Return why the library cannot be built; empty if it can."""
    return "" if shutil.which("cc") else "there is no C compiler"


def build(directory: Path) -> Path:
    """Compile the library for LD_PRELOAD."""
    source, library = directory / "guarded.c", directory / "guarded.so"
    source.write_text(_SOURCE % {"least": MIN_BYTES})
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def num_guarded() -> int:
    """Return how many allocations had guards so far; 0 without the library."""
    try:
        served = ctypes.CDLL(None).guard_served
    except AttributeError:
        return 0
    served.restype = ctypes.c_long
    return int(served())


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
READ, READ_WRITE = 1, 3


class Guarded:
    """Pages with a page without access on both sides; a tensor over them keeps them.

    Args:
        nbytes: Size of the tensor's storage, which ends at the second of these pages.
    """

    def __init__(self, nbytes: int) -> None:
        room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, room + 2 * mmap.PAGESIZE)
        self._first = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + mmap.PAGESIZE
        self._room = room
        self.address = self._first + room - nbytes
        """The first byte of the storage."""
        for guard in (self._first - mmap.PAGESIZE, self._first + room):
            assert _libc.mprotect(guard, mmap.PAGESIZE, 0) == 0

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], nbytes: int) -> torch.Tensor:
        """Return a tensor whose storage is exactly the guarded memory."""
        buffer: Any = (ctypes.c_char * nbytes).from_address(self.address)
        buffer.keep = self
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def protect(self, access: int) -> None:
        """Change which accesses are allowed."""
        assert _libc.mprotect(self._first, self._room, access) == 0


def guarded(dtype: torch.dtype, shape: tuple[int, ...], access: int = READ_WRITE) -> torch.Tensor:
    """Return a tensor of zeros that ends at a page without access."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    memory = Guarded(nbytes)
    tensor = memory.tensor(dtype, shape, nbytes)
    memory.protect(access)
    return tensor
