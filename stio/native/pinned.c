/* Pinned memory: huge pages, which several threads touch before the driver pins them.
 *
 * A driver pins memory page by page. Of pages that are touched and huge it pins a GiB in 0.03 s; its own allocation takes
 * 0.38 s a GiB, and one thread touches a GiB in 0.14 s (H200, 2026-11-26). So the engine's threads help the caller to
 * touch, and the caller pins. To unpin and unmap takes milliseconds, and the last reference to memory may be dropped on
 * the thread of an event loop: a thread of the engine does that, one at a time, so that loads go on beside it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"

#define HUGE_PAGE ((size_t)2 << 20)
#define MPOL_PREFERRED 1                /* another node is used if this one is full */
#define TOUCHED_BYTES ((size_t)4 << 20) /* by one thread at a time */

struct stio_pinned {
    const stio_driver *driver;
    void *context;
    char *memory;
    size_t nbytes, pinned_bytes;
    size_t touched_bytes; /* from the first byte on; `num_touching` threads are about the last of them */
    int num_touching;
    unsigned generation; /* of the process that pinned it */
    struct stio_pinned *next; /* in `engine.touched` or `engine.unpinned` */
};

char *stio_pages_map(size_t nbytes, int node) {
    const size_t mapped = nbytes + HUGE_PAGE;
    char *const found = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) return NULL;
    char *const start = (char *)(((uintptr_t)found + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    if (start > found) munmap(found, (size_t)(start - found));
    munmap(start + nbytes, mapped - nbytes - (size_t)(start - found));
    madvise(start, nbytes, MADV_HUGEPAGE); /* advice: a refusal costs speed */
    madvise(start, nbytes, MADV_DONTFORK); /* a child that writes would otherwise move the parent's pages */
    if (node >= 0 && node < 64) {
        unsigned long mask = 1UL << node;
        syscall(SYS_mbind, start, nbytes, MPOL_PREFERRED, &mask, sizeof mask * 8 + 1, 0); /* containers may refuse */
    }
    return start;
}

void stio_pages_touch(char *memory, size_t nbytes) {
    for (size_t at = 0; at < nbytes; at += 4096) ((volatile char *)memory)[at] = 0;
}

void stio_pages_unmap(char *memory, size_t nbytes) { munmap(memory, nbytes); }

/* Touch the next part; false: there is none left. Called with the lock, which is released meanwhile. */
static bool touch_part(stio_pinned *one) {
    const size_t begin = one->touched_bytes, left = one->nbytes - begin;
    if (left == 0) return false;
    const size_t nbytes = left < TOUCHED_BYTES ? left : TOUCHED_BYTES;
    one->touched_bytes += nbytes;
    one->num_touching += 1;
    pthread_mutex_unlock(&engine.lock);
    stio_pages_touch(one->memory + begin, nbytes);
    pthread_mutex_lock(&engine.lock);
    one->num_touching -= 1;
    if (one->num_touching == 0) pthread_cond_broadcast(&engine.changed);
    return true;
}

/* Unpin and unmap; false: the driver refused, and the device may still use the memory, so it stays until the process
 * ends. The context is current. Called without the lock. */
static bool release(stio_pinned *one) {
    int code = 0;
    for (size_t at = 0; at < one->pinned_bytes && code == 0; at += STIO_PINNED_BYTES)
        code = one->driver->unpin(one->memory + at);
    if (code == 0) stio_pages_unmap(one->memory, one->nbytes);
    free(one);
    return code == 0;
}

bool stio_pinned_work(void) {
    for (stio_pinned *one = engine.touched; one != NULL; one = one->next)
        if (touch_part(one)) return true;
    stio_pinned *const one = engine.unpinned;
    if (one == NULL || engine.is_unpinning) return false;
    const size_t nbytes = one->nbytes;
    engine.unpinned = one->next;
    engine.is_unpinning = true;
    pthread_mutex_unlock(&engine.lock);
    stio_failure ignored = {0};
    const bool is_released = stio_make_current(one->driver, one->context, &ignored) && release(one);
    pthread_mutex_lock(&engine.lock);
    engine.is_unpinning = false;
    if (is_released) engine.pinned_bytes -= nbytes;
    return true;
}

stio_pinned *stio_pinned_new(const stio_driver *driver, void *context, size_t nbytes, int node, void **memory,
                             stio_failure *failure) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    nbytes = (nbytes + page - 1) / page * page;
    stio_pinned *const made = malloc(sizeof *made);
    char *const pages = made == NULL ? NULL : stio_pages_map(nbytes, node);
    if (pages == NULL) {
        free(made);
        *failure = (stio_failure){.kind = STIO_NO_MEMORY, .code = ENOMEM, .nbytes = nbytes, .text = "no memory"};
        return NULL;
    }
    *made = (stio_pinned){.driver = driver, .context = context, .memory = pages, .nbytes = nbytes};
    pthread_mutex_lock(&engine.lock);
    made->generation = engine.generation;
    made->next = engine.touched;
    engine.touched = made;
    stio_want_threads(nbytes / TOUCHED_BYTES);
    while (touch_part(made)) continue;
    while (made->num_touching > 0) pthread_cond_wait(&engine.changed, &engine.lock);
    stio_pinned **at = &engine.touched;
    while (*at != made) at = &(*at)->next;
    *at = made->next;
    pthread_mutex_unlock(&engine.lock);
    /* Not by `stio_make_current`: on a thread of the caller's, others change the context too. */
    int code = driver->make_current(context);
    while (code == 0 && made->pinned_bytes < nbytes) {
        const size_t left = nbytes - made->pinned_bytes, piece = left < STIO_PINNED_BYTES ? left : STIO_PINNED_BYTES;
        code = driver->pin(pages + made->pinned_bytes, piece, STIO_PORTABLE);
        if (code == 0) made->pinned_bytes += piece;
    }
    if (code != 0) {
        stio_driver_failed(driver, code, failure);
        release(made);
        return NULL;
    }
    pthread_mutex_lock(&engine.lock);
    engine.pinned_bytes += nbytes;
    pthread_mutex_unlock(&engine.lock);
    *memory = pages;
    return made;
}

void stio_pinned_free(stio_pinned *one) {
    pthread_mutex_lock(&engine.lock);
    const bool is_own = one->generation == engine.generation;
    if (is_own) {
        one->next = engine.unpinned;
        engine.unpinned = one;
        stio_want_threads(1);
    }
    pthread_mutex_unlock(&engine.lock);
    if (!is_own) free(one); /* a forked child has not its parent's memory */
}

uint64_t stio_pinned_bytes(void) {
    pthread_mutex_lock(&engine.lock);
    const uint64_t nbytes = engine.pinned_bytes;
    pthread_mutex_unlock(&engine.lock);
    return nbytes;
}

void stio_pinned_forget(void) {
    engine.touched = engine.unpinned = NULL;
    engine.is_unpinning = false;
    engine.pinned_bytes = 0;
}
