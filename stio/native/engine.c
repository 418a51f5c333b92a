/* Transfers and threads: which chunk is next, how its bytes move, when its group is complete.
 *
 * One lock guards all state. It is held for some microseconds a chunk, and never while bytes move. A thread takes the
 * next chunk of the transfer that has had the least bytes by its weight, so loads and saves share the machine. Groups of a
 * transfer are cut in their order. A chunk never has bytes of two groups.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

#define PAGE ((int64_t)4096)             /* places and lengths of direct reads and writes are multiples of it */
#define HOST_CHUNK_BYTES ((int64_t)4 << 20)
#define WRITTEN_BYTES ((int64_t)8 << 20)
#define WRITEBACK_BYTES ((size_t)4 << 20) /* for less, the call costs more than it saves */
#define POPULATED_BYTES ((int64_t)8 << 20)
#define GAP_BYTES ((int64_t)64 << 10)    /* longest run of other bytes that a chunk reads too */
#define MAX_RANGES 512                  /* of a chunk into host memory: of a file they are buffers of one call */
#define TOUCHED_BYTES ((size_t)256 << 10)
#define NICENESS 5
#define TIMER_SLACK_NS 1000UL
#define STACK_BYTES ((size_t)2 << 20) /* thread-local variables of all libraries lie in it too */

engine_state engine = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .limit = 4,
    .idle_ms = 10000,
};
static pthread_t threads[STIO_MAX_THREADS];

double stio_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void new_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* Wait for a condition; false if the time has come. NULL: no limit. */
static bool wait_until(pthread_cond_t *condition, const struct timespec *until) {
    if (until == NULL) return pthread_cond_wait(condition, &engine.lock) == 0;
    return pthread_cond_timedwait(condition, &engine.lock, until) != ETIMEDOUT;
}

static struct timespec after(int ms) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    if (ms < 0) ms = 0; /* a negative part of a second is an error, and a wait that fails keeps the lock */
    until.tv_sec += ms / 1000;
    until.tv_nsec += (long)(ms % 1000) * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec += 1;
        until.tv_nsec -= 1000000000;
    }
    return until;
}

/* Forks. A child has none of its parent's threads: it forgets what they did, and starts its own when it needs them. */

static void before_fork(void) { pthread_mutex_lock(&engine.lock); }
static void after_fork(void) { pthread_mutex_unlock(&engine.lock); }
static void in_child(void) {
    new_condition(&engine.work);
    new_condition(&engine.changed);
    engine.transfers = NULL;
    engine.num_threads = engine.num_idle = engine.num_joinable = engine.num_waiting = engine.num_in_files = 0;
    engine.is_ending = false;
    engine.generation += 1;
    stio_rings_forget();
    stio_pinned_forget();
    pthread_mutex_unlock(&engine.lock);
}

__attribute__((constructor)) static void prepare(void) { /* so that no call comes before it, a fork neither */
    new_condition(&engine.work);
    new_condition(&engine.changed);
    pthread_atfork(before_fork, after_fork, in_child);
}

/* Whether a transfer is of this process. The conditions of a parent's transfer are never touched: threads that wait for
 * them are not in the child, and a call that waits until they have left would not return. */
static bool is_own(const stio_transfer *transfer) { return transfer->generation == engine.generation; }

static void notify(stio_transfer *transfer) {
    if (is_own(transfer)) pthread_cond_broadcast(&transfer->changed);
}

/* Chunks. */

static _Thread_local int this_thread = -1;
static _Thread_local bool waits; /* this thread is counted in `engine.num_waiting` */

static bool start_threads(size_t wanted, int limit);
static void start_spare(void);

/* Count this thread as one that waits for events, if another thread is left that does not; otherwise return false. A
 * device may stand still as long as its caller's own work takes, and other loads must go on meanwhile. */
static bool may_wait(void) {
    if (engine.num_waiting + 1 >= engine.num_threads) start_threads((size_t)engine.num_threads + 1, engine.limit);
    if (engine.num_waiting + 1 >= engine.num_threads && engine.num_threads > 1) return false;
    engine.num_waiting += 1;
    waits = true;
    return true;
}

void stio_waits_no_more(void) {
    if (!waits) return;
    waits = false;
    engine.num_waiting -= 1;
    if (engine.num_idle > 0) pthread_cond_signal(&engine.work); /* one that was not allowed to wait */
}

static bool is_for_cufile(const stio_transfer *transfer, const stio_range *range) {
    return range->flags & STIO_CUFILE && !__atomic_load_n(&transfer->cufile_refused, __ATOMIC_RELAXED);
}

/* Whether chunks of a range count against the most chunks of their transfer. */
static bool is_counted(const stio_range *range) { return range->ring != NULL || (range->flags & STIO_WRITE) != 0; }

static const stio_range *next_range(const group *of) { return &of->ranges[of->next]; }

/* Return the place in a transfer's order of the group that is cut next; `last`: there is none that may be moved now.
 * Beyond the most chunks, writes are passed over; behind chunks for a device everything waits. */
static size_t next_place(const stio_transfer *transfer) {
    size_t at = transfer->first;
    if (transfer->max_chunks == 0 || transfer->under_way_counted < (uint32_t)transfer->max_chunks) return at;
    while (at < transfer->last && (next_range(transfer->order[at])->flags & STIO_WRITE)) ++at;
    return at < transfer->last && is_counted(next_range(transfer->order[at])) ? transfer->last : at;
}

static bool is_active(const stio_transfer *transfer) {
    return !transfer->is_stopped && next_place(transfer) < transfer->last;
}

/* Return the ring through whose slots an active transfer's next chunk moves, NULL if it needs none. */
static stio_ring *ring_of_next(const stio_transfer *transfer) {
    const stio_range *const range = next_range(transfer->order[next_place(transfer)]);
    return is_for_cufile(transfer, range) ? NULL : range->ring;
}

/* Whether a thread may move the next chunk of an active transfer. A disk may stand still, so beyond the limit a thread
 * copies memory, or begins a transfer that has nothing under way. */
static bool may_move(const stio_transfer *transfer) {
    if (engine.num_in_files < engine.limit || transfer->under_way == 0) return true;
    return next_range(transfer->order[next_place(transfer)])->fd < 0;
}

/* Return the transfer whose turn it is; with `ready`, of those whose next chunk this thread can move without a wait. */
static stio_transfer *next_transfer(bool ready) {
    stio_transfer *best = NULL;
    for (stio_transfer *one = engine.transfers; one != NULL; one = one->next) {
        if (!is_active(one) || !may_move(one) || (best != NULL && one->turn >= best->turn)) continue;
        const stio_ring *const ring = ring_of_next(one);
        if (!ready || ring == NULL || stio_ring_has_slot(ring, this_thread)) best = one;
    }
    return best;
}

/* Return the least turn of the transfers that have work, or that of `transfer` if it is greater. */
static uint64_t turn_beside_others(const stio_transfer *transfer) {
    const stio_transfer *const least = next_transfer(false);
    return least != NULL && least->turn > transfer->turn ? least->turn : transfer->turn;
}

static int64_t stop_of(const stio_range *range) { return range->offset + (int64_t)range->nbytes; }

/* Cut the next chunk of a transfer. */
static chunk cut(stio_transfer *transfer) {
    const size_t place = next_place(transfer);
    group *const from = transfer->order[place];
    const stio_range *const range = next_range(from);
    const bool is_shared =
        !(range->flags & (STIO_POPULATE | STIO_WRITE | STIO_CUFILE)) && (range->fd >= 0 || range->ring == NULL);
    const int64_t begin = from->position;
    int64_t most = range->flags & STIO_POPULATE ? POPULATED_BYTES : HOST_CHUNK_BYTES;
    int64_t base = begin;
    if (range->flags & STIO_WRITE) {
        most = WRITTEN_BYTES;
        base = begin / PAGE * PAGE;
    }
    if (range->ring != NULL && range->fd >= 0) {
        most = (int64_t)STIO_CHUNK_BYTES;
        if (range->direct_fd >= 0 || range->flags & STIO_CUFILE) base = begin / PAGE * PAGE;
    }
    const int64_t limit = base + most;
    chunk made = {.transfer = transfer, .group = from, .ranges = range, .num_ranges = 1, .begin = begin};
    made.end = stop_of(range) < limit ? stop_of(range) : limit;
    size_t last = from->next;
    /* Ranges behind it share the read, or the chunk of copies, as far as they are in it. */
    while (is_shared && made.end == stop_of(&from->ranges[last]) && last + 1 < from->num_ranges) {
        const stio_range *const next = &from->ranges[last + 1];
        if (next->fd != range->fd || next->ring != range->ring || next->offset < made.end) break;
        if (next->direct_fd != range->direct_fd || next->flags != range->flags) break; /* moved in another way */
        if (next->offset - made.end > GAP_BYTES || next->offset >= limit) break;
        if (range->ring == NULL && made.num_ranges == MAX_RANGES) break;
        made.end = stop_of(next) < limit ? stop_of(next) : limit;
        made.num_ranges += 1;
        last += 1;
    }
    from->next = last;
    from->position = made.end;
    if (made.end == stop_of(&from->ranges[last])) {
        from->next += 1;
        if (from->next < from->num_ranges)
            from->position = from->ranges[from->next].offset;
        else
            from->is_cut = true;
    }
    if (from->is_cut) {
        group **const first = transfer->order + transfer->first;
        memmove(first + 1, first, (place - transfer->first) * sizeof *first); /* writes that were passed over */
        transfer->first += 1;
    }
    if (from->started == 0) from->started = stio_now();
    from->under_way += 1;
    transfer->under_way += 1;
    transfer->under_way_counted += is_counted(range);
    const uint64_t nbytes = (uint64_t)(made.end - begin); /* with gaps, so it may be more than is left */
    transfer->left_bytes -= nbytes < transfer->left_bytes ? nbytes : transfer->left_bytes;
    transfer->turn += (uint64_t)(made.end - made.begin) / (uint64_t)transfer->weight + 1;
    return made;
}

void stio_chunk_ended(const chunk *ended, const stio_failure *failure) {
    stio_transfer *const transfer = ended->transfer;
    group *const of = ended->group;
    const bool counted = is_counted(ended->ranges);
    of->under_way -= 1;
    transfer->under_way -= 1;
    transfer->under_way_counted -= counted;
    if (failure->kind != 0 && !transfer->has_failed && !transfer->is_stopped) {
        transfer->failure = *failure;
        transfer->failure.group = of->number;
        transfer->has_failed = true;
    }
    if (failure->kind != 0) transfer->is_stopped = true;
    bool wakes = transfer->is_stopped;
    if (!transfer->is_stopped) {
        transfer->moved_bytes += (uint64_t)(ended->end - ended->begin);
        if (of->is_cut && of->under_way == 0) { /* there is room: `add_group` has reserved it */
            transfer->done[transfer->num_done++] = (stio_done){of->number, this_thread, of->started, stio_now()};
            wakes = true;
        }
    }
    if (wakes) pthread_cond_broadcast(&transfer->changed);
    if (counted && transfer->max_chunks != 0) pthread_cond_broadcast(&engine.work);
}

/* Reads. */

static void set_failure(stio_failure *failure, int kind, int code, int64_t offset, uint64_t nbytes) {
    failure->kind = kind;
    failure->code = code;
    failure->offset = offset;
    failure->nbytes = nbytes;
}

/* Fill buffers with the bytes from `offset` on; they are changed. */
static bool read_all(int fd, struct iovec *buffers, int num_buffers, int64_t offset, stio_failure *failure) {
    uint64_t left = 0;
    for (int k = 0; k < num_buffers; ++k) left += buffers[k].iov_len;
    while (left > 0) {
        const ssize_t count = preadv(fd, buffers, num_buffers, offset);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            set_failure(failure, count < 0 ? STIO_ERRNO : STIO_TRUNCATED, count < 0 ? errno : 0, offset, left);
            return false;
        }
        offset += count;
        left -= (uint64_t)count;
        size_t done = (size_t)count;
        while (num_buffers > 0 && done >= buffers->iov_len) {
            done -= buffers->iov_len;
            ++buffers, --num_buffers;
        }
        if (done > 0) {
            buffers->iov_base = (char *)buffers->iov_base + done;
            buffers->iov_len -= done;
        }
    }
    return true;
}

/* Read [begin, begin + nbytes) past the page cache; return how many bytes came. The rest is read through the cache, where
 * an error that stays is reported. `begin` and the memory are aligned; the memory has room for whole pages. */
static size_t read_direct(stio_transfer *transfer, int fd, char *memory, size_t nbytes, int64_t begin) {
    size_t done = 0;
    while (done < nbytes && !__atomic_load_n(&transfer->direct_refused, __ATOMIC_RELAXED)) {
        const size_t whole = (nbytes - done + (size_t)PAGE - 1) / (size_t)PAGE * (size_t)PAGE;
        const ssize_t count = pread(fd, memory + done, whole, begin + (int64_t)done);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) __atomic_store_n(&transfer->direct_refused, true, __ATOMIC_RELAXED);
        if (count <= 0) break;
        done += (size_t)count;
        if (count % PAGE != 0) break; /* the file's end */
    }
    return done < nbytes ? done : nbytes;
}

/* Read a chunk into memory whose first byte is for `base`, at or before the chunk's begin. */
static bool read_chunk(const chunk *one, char *memory, int64_t base, stio_failure *failure) {
    const stio_range *const range = one->ranges;
    const size_t nbytes = (size_t)(one->end - base);
    size_t done = 0;
    if (range->direct_fd >= 0 && base % PAGE == 0)
        done = read_direct(one->transfer, range->direct_fd, memory, nbytes, base);
    if (done < (size_t)(one->begin - base)) done = (size_t)(one->begin - base);
    struct iovec rest = {memory + done, nbytes - done};
    return read_all(range->fd, &rest, 1, base + (int64_t)done, failure);
}

static bool move_to_device(const chunk *one, int thread, stio_failure *failure, bool *is_queued) {
    const stio_range *const range = one->ranges;
    if (is_for_cufile(one->transfer, range)) {
        if (stio_cufile_read(one)) return true;
        __atomic_store_n(&one->transfer->cufile_refused, true, __ATOMIC_RELAXED); /* an error that stays is the ring's */
    }
    slot *const into = stio_ring_acquire(range->ring, thread, failure);
    if (into == NULL) return false;
    into->chunk = *one;
    const char *memory = into->memory;
    int64_t base = one->begin;
    bool ok = true;
    if (range->fd >= 0) {
        if (range->direct_fd >= 0) base = one->begin / PAGE * PAGE;
        ok = read_chunk(one, into->memory, base, failure);
    } else {
        memory = (const char *)(uintptr_t)range->source + (one->begin - range->offset);
    }
    pthread_mutex_lock(&engine.lock);
    const bool is_stopped = one->transfer->is_stopped;
    if (!ok || is_stopped) {
        into->state = SLOT_FREE;
        pthread_cond_broadcast(&engine.changed);
    }
    pthread_mutex_unlock(&engine.lock);
    if (!ok || is_stopped) return ok;
    *is_queued = stio_ring_submit(into, memory, base, failure);
    return *is_queued;
}

/* Return the part of a range that is in a chunk: where it begins and ends. */
static int64_t low_of(const stio_range *range, const chunk *one) {
    return range->offset > one->begin ? range->offset : one->begin;
}
static int64_t high_of(const stio_range *range, const chunk *one) {
    return stop_of(range) < one->end ? stop_of(range) : one->end;
}

static void copy_on_host(const chunk *one) {
    for (const stio_range *part = one->ranges; part < one->ranges + one->num_ranges; ++part) {
        const int64_t low = low_of(part, one), at = low - part->offset;
        const char *const source = (const char *)(uintptr_t)part->source + at;
        memcpy((char *)(uintptr_t)part->target + at, source, (size_t)(high_of(part, one) - low));
    }
}

static bool move_to_host(const chunk *one, stio_failure *failure) {
    const stio_range *const range = one->ranges;
    char *const target = (char *)(uintptr_t)(range->target + (uint64_t)(one->begin - range->offset));
    if (range->fd < 0) {
        copy_on_host(one);
        return true;
    }
    const bool is_aligned = one->begin % PAGE == 0 && (uintptr_t)target % (uintptr_t)PAGE == 0;
    if (one->num_ranges == 1) {
        size_t done = 0;
        const size_t nbytes = (size_t)(one->end - one->begin), whole = nbytes / (size_t)PAGE * (size_t)PAGE;
        if (range->direct_fd >= 0 && is_aligned) /* whole pages: there is no room for more */
            done = read_direct(one->transfer, range->direct_fd, target, whole, one->begin);
        struct iovec rest = {target + done, nbytes - done};
        return read_all(range->fd, &rest, 1, one->begin + (int64_t)done, failure);
    }
    struct iovec buffers[2 * MAX_RANGES];
    char discarded[GAP_BYTES]; /* the bytes between two ranges; nobody reads them */
    int num_buffers = 0;
    int64_t at = one->begin;
    for (size_t k = 0; k < one->num_ranges; ++k) {
        const stio_range *const part = &one->ranges[k];
        const int64_t low = low_of(part, one), high = high_of(part, one);
        if (low > at) buffers[num_buffers++] = (struct iovec){discarded, (size_t)(low - at)};
        char *const into = (char *)(uintptr_t)(part->target + (uint64_t)(low - part->offset));
        if (high > low) buffers[num_buffers++] = (struct iovec){into, (size_t)(high - low)};
        at = high;
    }
    return read_all(range->fd, buffers, num_buffers, one->begin, failure);
}

/* Writes. */

static bool write_all(int fd, const char *memory, size_t nbytes, int64_t offset, stio_failure *failure) {
    while (nbytes > 0) {
        const ssize_t count = pwrite(fd, memory, nbytes, offset);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            set_failure(failure, STIO_ERRNO, count < 0 ? errno : EIO, offset, nbytes);
            return false;
        }
        memory += count;
        offset += count;
        nbytes -= (size_t)count;
    }
    return true;
}

/* Write past the page cache; place, memory and length are aligned. Return how many bytes were written: the rest is to be
 * written through the cache. A filesystem without direct writes, or with another alignment, refuses them; any other error
 * is a failure: the page cache would take the same bytes, and lose them later. */
static size_t write_direct(const chunk *one, const char *memory, size_t nbytes, int64_t offset, stio_failure *failure) {
    bool *const refused = &one->transfer->direct_refused;
    size_t done = 0;
    while (done < nbytes && done % (size_t)PAGE == 0 && !__atomic_load_n(refused, __ATOMIC_RELAXED)) {
        const ssize_t count = pwrite(one->ranges->direct_fd, memory + done, nbytes - done, offset + (int64_t)done);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && (errno == EINVAL || errno == EOPNOTSUPP)) {
            __atomic_store_n(refused, true, __ATOMIC_RELAXED);
        } else if (count <= 0) {
            set_failure(failure, STIO_ERRNO, count < 0 ? errno : EIO, offset + (int64_t)done, nbytes - done);
            break;
        } else {
            done += (size_t)count;
        }
    }
    return done;
}

/* Whole pages of the file that begin at a page of memory go past the page cache, if there is a descriptor for that. */
static bool write_chunk(const chunk *one, stio_failure *failure) {
    const stio_range *const range = one->ranges;
    const char *const memory = (const char *)(uintptr_t)range->source + (one->begin - range->offset);
    const size_t nbytes = (size_t)(one->end - one->begin);
    const size_t head = (size_t)((PAGE - one->begin % PAGE) % PAGE);
    size_t done = 0;
    failure->doing = STIO_WRITE;
    if (range->direct_fd >= 0 && nbytes >= head + (size_t)PAGE && (uintptr_t)(memory + head) % (uintptr_t)PAGE == 0) {
        if (!write_all(range->fd, memory, head, one->begin, failure)) return false;
        const size_t whole = (nbytes - head) / (size_t)PAGE * (size_t)PAGE;
        done = head + write_direct(one, memory + head, whole, one->begin + (int64_t)head, failure);
        if (failure->kind != 0) return false;
    }
    if (!write_all(range->fd, memory + done, nbytes - done, one->begin + (int64_t)done, failure)) return false;
    if (nbytes - done >= WRITEBACK_BYTES) /* advice: the disk begins now, and not at the end */
        sync_file_range(range->fd, one->begin + (int64_t)done, (int64_t)(nbytes - done), SYNC_FILE_RANGE_WRITE);
    return true;
}

/* Read pages once that a disk has just written to memory.
 *
 * A virtual machine may get its memory from the host at the first access. There the first read of a page that only a disk
 * has written costs 0.3 to 1 microsecond, and up to 90 on a host that is short of memory. Idle processors can do this
 * while the disk works. It reads the file and not the mapping: if the file was cut, an access to the mapping raises
 * SIGBUS. A touch of 256 KiB takes 30 to 100 microseconds; touches end as soon as they take 240 on average. */
static void touch(stio_transfer *transfer, int fd, int64_t begin, int64_t end) {
    char scratch[TOUCHED_BYTES];
    pthread_mutex_lock(&transfer->touching);
    while (begin < end && transfer->patience > 0) {
        const size_t nbytes = end - begin < (int64_t)TOUCHED_BYTES ? (size_t)(end - begin) : TOUCHED_BYTES;
        const double started = stio_now();
        const ssize_t count = pread(fd, scratch, nbytes, begin);
        if (count <= 0) break; /* the read of its bytes raises it */
        begin += count;
        transfer->patience += (double)count / (1 << 30) - (stio_now() - started);
    }
    pthread_mutex_unlock(&transfer->touching);
}

static bool populate(const chunk *one, stio_failure *failure) {
    const stio_range *const range = one->ranges;
    struct stat found; /* an access past the end is SIGBUS, which cannot be caught */
    failure->doing = STIO_POPULATE;
    if (fstat(range->fd, &found) != 0) {
        set_failure(failure, STIO_ERRNO, errno, one->begin, 0);
        return false;
    }
    if (one->end > found.st_size) {
        set_failure(failure, STIO_SHRUNK, 0, found.st_size, (uint64_t)(one->end - found.st_size));
        return false;
    }
    const uintptr_t begin = (uintptr_t)(range->target + (uint64_t)(one->begin - range->offset));
    const uintptr_t start = begin & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    const size_t nbytes = (size_t)(one->end - one->begin) + (begin - start);
    int code;
    do code = madvise((void *)start, nbytes, MADV_POPULATE_READ) == 0 ? 0 : errno;
    while (code == EINTR);
    if (code == EFAULT || code == EINVAL || code == EPERM || code == ENOSYS) {
        /* EFAULT: a failing disk, or a file that was cut; a read returns an error number, a page fault does not.
         * EINVAL: a kernel before 5.14; a read brings the pages into the page cache, where faults find them.
         * EPERM, ENOSYS: a sandbox. */
        char scratch[GAP_BYTES];
        failure->doing = 0;
        for (int64_t at = one->begin; at < one->end; at += GAP_BYTES) {
            const int64_t left = one->end - at;
            struct iovec buffer = {scratch, (size_t)(left < GAP_BYTES ? left : GAP_BYTES)};
            if (!read_all(range->fd, &buffer, 1, at, failure)) return false;
        }
    } else if (code != 0 && code != EAGAIN) {
        set_failure(failure, STIO_ERRNO, code, one->begin, 0);
        return false;
    }
    if (range->flags & STIO_TOUCH) touch(one->transfer, range->fd, one->begin, one->end);
    return true;
}

/* Move a chunk; called with the lock, which is released meanwhile. */
static void move(chunk *one, int thread) {
    stio_failure failure = {0};
    bool is_queued = false;
    const bool device = one->ranges->ring != NULL, of_file = one->ranges->fd >= 0;
    engine.num_in_files += of_file;
    start_spare();
    pthread_mutex_unlock(&engine.lock);
    if (device)
        move_to_device(one, thread, &failure, &is_queued);
    else if (one->ranges->flags & STIO_POPULATE)
        populate(one, &failure);
    else if (one->ranges->flags & STIO_WRITE)
        write_chunk(one, &failure);
    else
        move_to_host(one, &failure);
    pthread_mutex_lock(&engine.lock);
    engine.num_in_files -= of_file;
    if (!is_queued) stio_chunk_ended(one, &failure); /* otherwise it ends when its event has passed */
}

/* Threads. */

static void *run(void *number) {
    const int thread = (int)(intptr_t)number;
    this_thread = thread;
    const pid_t tid = (pid_t)syscall(SYS_gettid);
    /* Below the process, and not below the thread that has started this one, which may be a low one already. A sandbox
     * may forbid it. */
    setpriority(PRIO_PROCESS, (id_t)tid, getpriority(PRIO_PROCESS, (id_t)getpid()) + NICENESS);
    prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS); /* for the short pauses between two looks at an event */
    pthread_mutex_lock(&engine.lock);
    while (!engine.is_ending) {
        const double due = stio_rings_trim(); /* first, since there may be work without end */
        if (engine.is_ending) break;
        if (stio_pinned_work()) continue;
        stio_transfer *transfer = next_transfer(false);
        const stio_ring *const wanted = transfer == NULL ? NULL : ring_of_next(transfer);
        if (wanted != NULL && !stio_ring_has_slot(wanted, thread) && !may_wait()) transfer = next_transfer(true);
        if (transfer != NULL) {
            chunk one = cut(transfer);
            const stio_ring *const ring = is_for_cufile(transfer, one.ranges) ? NULL : one.ranges->ring;
            move(&one, thread);
            stio_waits_no_more(); /* it failed before it had to wait */
            stio_ring_end_passed(ring); /* with such work without end nobody waits for other slots */
            continue;
        }
        if (engine.copied_from != NULL && may_wait()) {
            stio_ring_wait_oldest();
            stio_waits_no_more();
            continue;
        }
        const struct timespec until = {(time_t)due, (long)((due - (double)(time_t)due) * 1e9)};
        engine.num_idle += 1;
        wait_until(&engine.work, due == 0 ? NULL : &until);
        engine.num_idle -= 1;
    }
    while (stio_ring_wait_oldest()) continue;
    engine.num_threads -= 1;
    pthread_cond_broadcast(&engine.changed);
    pthread_mutex_unlock(&engine.lock);
    return NULL;
}

/* Start threads until there are so many, or as many as the limit; false if there is none. Called with the lock. */
static bool start_threads(size_t wanted, int limit) {
    if (engine.is_ending) return false;
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV); /* these two are raised by the thread itself: a handler that prints stacks gets them */
    sigdelset(&all, SIGBUS);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    while (engine.num_threads < limit && (size_t)engine.num_threads < wanted) {
        pthread_t *const one = &threads[engine.num_threads];
        if (pthread_create(one, &attributes, run, (void *)(intptr_t)engine.num_threads) != 0) break;
        char name[16];
        snprintf(name, sizeof name, "stio-%d", engine.num_threads);
        pthread_setname_np(*one, name);
        engine.num_joinable = engine.num_threads += 1;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return engine.num_threads > 0;
}

/* Where all threads move chunks of files, start one more for a transfer that may move: a thread that waits for a disk
 * needs no processor. Called with the lock. */
static void start_spare(void) {
    if (engine.num_in_files < engine.num_threads || engine.num_threads == STIO_MAX_THREADS) return;
    if (next_transfer(false) != NULL) start_threads((size_t)engine.num_threads + 1, STIO_MAX_THREADS);
}

void stio_want_threads(size_t wanted) {
    start_threads(wanted, engine.limit);
    pthread_cond_broadcast(&engine.work);
}

int stio_engine_version(void) { return STIO_ENGINE_VERSION; }

void stio_engine_set_threads(int num_threads) {
    pthread_mutex_lock(&engine.lock);
    engine.limit = num_threads < 1 ? 1 : num_threads > STIO_MAX_THREADS ? STIO_MAX_THREADS : num_threads;
    pthread_mutex_unlock(&engine.lock);
}

void stio_engine_set_idle(int milliseconds) {
    pthread_mutex_lock(&engine.lock);
    engine.idle_ms = milliseconds;
    pthread_cond_broadcast(&engine.work);
    pthread_mutex_unlock(&engine.lock);
}

int stio_engine_num_threads(void) {
    pthread_mutex_lock(&engine.lock);
    const int num_threads = engine.num_threads;
    pthread_mutex_unlock(&engine.lock);
    return num_threads;
}

void stio_engine_end(int milliseconds) {
    const struct timespec until = after(milliseconds);
    pthread_mutex_lock(&engine.lock);
    engine.is_ending = true;
    for (stio_transfer *one = engine.transfers; one != NULL; one = one->next) {
        one->is_stopped = one->is_woken = true;
        pthread_cond_broadcast(&one->changed);
    }
    pthread_cond_broadcast(&engine.work);
    while (engine.num_threads > 0 && wait_until(&engine.changed, &until)) continue;
    const int num_joined = engine.num_threads == 0 ? engine.num_joinable : 0;
    if (num_joined > 0) engine.num_joinable = 0; /* another caller joins none of them */
    pthread_mutex_unlock(&engine.lock);
    for (int k = 0; k < num_joined; ++k) pthread_join(threads[k], NULL);
}

/* Transfers. */

stio_transfer *stio_transfer_new(int weight, int max_chunks) {
    stio_transfer *const transfer = calloc(1, sizeof *transfer);
    if (transfer == NULL) return NULL;
    transfer->weight = weight < 1 ? 1 : weight;
    transfer->max_chunks = max_chunks;
    transfer->patience = 0.02;
    new_condition(&transfer->changed);
    pthread_mutex_init(&transfer->touching, NULL);
    pthread_mutex_lock(&engine.lock);
    transfer->generation = engine.generation;
    const bool started = start_threads(1, engine.limit);
    if (started) {
        transfer->next = engine.transfers;
        engine.transfers = transfer;
    }
    pthread_mutex_unlock(&engine.lock);
    if (started) return transfer;
    pthread_cond_destroy(&transfer->changed);
    pthread_mutex_destroy(&transfer->touching);
    free(transfer);
    return NULL;
}

/* Return an array with room for `wanted` items of `size` bytes, NULL if there is no memory. */
static void *with_room(void *array, size_t *capacity, size_t wanted, size_t size) {
    if (wanted <= *capacity) return array;
    const size_t larger = wanted > 2 * *capacity ? wanted : 2 * *capacity;
    void *const made = realloc(array, larger * size);
    if (made != NULL) *capacity = larger;
    return made;
}

/* Add the ring of a range to those that the transfer uses. */
static bool use_ring(stio_transfer *transfer, stio_ring *ring) {
    for (size_t k = 0; k < transfer->num_rings; ++k)
        if (transfer->rings[k] == ring) return true;
    stio_ring **const rings = realloc(transfer->rings, (transfer->num_rings + 1) * sizeof *rings);
    if (rings == NULL) return false;
    transfer->rings = rings;
    rings[transfer->num_rings++] = ring;
    ring->num_users += 1;
    return true;
}

/* Append one group. Called with the lock. */
static bool add_group(stio_transfer *transfer, const stio_range *ranges, size_t num_ranges) {
    const size_t number = (size_t)ranges->group;
    if (number >= transfer->num_numbers) {
        const size_t wanted = 2 * number + 16;
        group **const groups = realloc(transfer->groups, wanted * sizeof *groups);
        if (groups == NULL) return false;
        memset(groups + transfer->num_numbers, 0, (wanted - transfer->num_numbers) * sizeof *groups);
        transfer->groups = groups;
        transfer->num_numbers = wanted;
    }
    group **const order =
        with_room(transfer->order, &transfer->capacity, transfer->last + 1, sizeof *transfer->order);
    if (order == NULL) return false;
    transfer->order = order;
    stio_done *const done =
        with_room(transfer->done, &transfer->done_capacity, transfer->last + 1, sizeof *transfer->done);
    if (done == NULL) return false;
    transfer->done = done;
    for (size_t k = 0; k < num_ranges; ++k)
        if (ranges[k].ring != NULL && !use_ring(transfer, ranges[k].ring)) return false;
    group *const made = calloc(1, sizeof *made);
    stio_range *const copied = malloc(num_ranges * sizeof *copied);
    if (made == NULL || copied == NULL || transfer->groups[number] != NULL) {
        free(made);
        free(copied);
        return false;
    }
    memcpy(copied, ranges, num_ranges * sizeof *copied);
    *made = (group){.ranges = copied, .num_ranges = num_ranges, .position = ranges->offset, .number = ranges->group};
    transfer->groups[number] = made;
    transfer->order[transfer->last++] = made;
    return true;
}

int stio_transfer_add(stio_transfer *transfer, const stio_range *ranges, size_t num_ranges) {
    bool ok = true;
    pthread_mutex_lock(&engine.lock);
    if (transfer->is_stopped || !is_own(transfer)) num_ranges = 0; /* an ended transfer does not leave its rings again */
    if (transfer->first == transfer->last) transfer->turn = turn_beside_others(transfer); /* time without work is lost */
    for (size_t first = 0, stop; ok && first < num_ranges; first = stop) {
        for (stop = first; stop < num_ranges && ranges[stop].group == ranges[first].group; ++stop)
            transfer->left_bytes += ranges[stop].nbytes;
        ok = ranges[first].group >= 0 && add_group(transfer, ranges + first, stop - first);
    }
    start_threads(1 + transfer->left_bytes / STIO_CHUNK_BYTES, engine.limit);
    start_spare();
    pthread_cond_broadcast(&engine.work);
    pthread_mutex_unlock(&engine.lock);
    return ok ? 0 : ENOMEM;
}

void stio_transfer_arrange(stio_transfer *transfer, const int32_t *groups, size_t num_groups) {
    pthread_mutex_lock(&engine.lock);
    const size_t num_left = transfer->last - transfer->first;
    group **const order = num_left == 0 ? NULL : malloc(num_left * sizeof *order);
    size_t count = 0;
    for (size_t k = 0; order != NULL && k < num_groups; ++k) {
        const size_t number = (size_t)groups[k];
        group *const one = number < transfer->num_numbers ? transfer->groups[number] : NULL;
        if (one == NULL || one->is_cut || one->is_marked) continue;
        one->is_marked = true;
        order[count++] = one;
    }
    for (size_t k = 0; order != NULL && k < num_left; ++k) {
        group *const one = transfer->order[transfer->first + k];
        if (!one->is_marked) order[count++] = one;
        one->is_marked = false;
    }
    if (order != NULL) memcpy(transfer->order + transfer->first, order, num_left * sizeof *order);
    free(order); /* without memory the order stays as it is */
    pthread_mutex_unlock(&engine.lock);
}

int stio_transfer_take(stio_transfer *transfer, stio_done *done, int capacity, int timeout, stio_failure *failure) {
    const struct timespec until = after(timeout < 0 ? 0 : timeout);
    int found = 0;
    pthread_mutex_lock(&engine.lock);
    bool in_time = true;
    if (!is_own(transfer) && !transfer->has_failed) {
        transfer->failure = (stio_failure){.kind = STIO_ERRNO, .code = ECHILD, .group = -1};
        transfer->has_failed = true;
    }
    while (transfer->num_done == 0 && !transfer->has_failed && !transfer->is_woken && !transfer->is_stopped && in_time)
        in_time = wait_until(&transfer->changed, timeout < 0 ? NULL : &until);
    if (transfer->num_done > 0 && !transfer->has_failed) {
        found = transfer->num_done < (size_t)capacity ? (int)transfer->num_done : capacity;
        memcpy(done, transfer->done, (size_t)found * sizeof *done);
        transfer->num_done -= (size_t)found;
        memmove(transfer->done, transfer->done + found, transfer->num_done * sizeof *done);
    } else if (transfer->has_failed) {
        *failure = transfer->failure;
        found = -1;
    } else {
        transfer->is_woken = false;
    }
    pthread_mutex_unlock(&engine.lock);
    return found;
}

void stio_transfer_wake(stio_transfer *transfer) {
    pthread_mutex_lock(&engine.lock);
    transfer->is_woken = true;
    notify(transfer);
    pthread_mutex_unlock(&engine.lock);
}

void stio_transfer_stop(stio_transfer *transfer) {
    pthread_mutex_lock(&engine.lock);
    transfer->is_stopped = transfer->is_woken = true;
    notify(transfer);
    pthread_mutex_unlock(&engine.lock);
}

uint64_t stio_transfer_moved_bytes(stio_transfer *transfer) {
    pthread_mutex_lock(&engine.lock);
    const uint64_t moved_bytes = transfer->moved_bytes;
    pthread_mutex_unlock(&engine.lock);
    return moved_bytes;
}

/* Stop a transfer, and end it once nothing is under way: with `until_idle` wait for that, otherwise return false. */
static bool end_transfer(stio_transfer *transfer, bool until_idle) {
    pthread_mutex_lock(&engine.lock);
    transfer->is_stopped = transfer->is_woken = true;
    notify(transfer);
    /* The chunks and the rings of a transfer of this child's parent are not the child's. */
    while (until_idle && is_own(transfer) && transfer->under_way > 0) pthread_cond_wait(&transfer->changed, &engine.lock);
    const bool ends = !is_own(transfer) || transfer->under_way == 0;
    if (ends && is_own(transfer) && !transfer->has_ended) {
        stio_transfer **at = &engine.transfers;
        while (*at != transfer) at = &(*at)->next;
        *at = transfer->next;
        for (size_t k = 0; k < transfer->num_rings; ++k) stio_ring_leave(transfer->rings[k]);
        transfer->has_ended = true;
    }
    pthread_mutex_unlock(&engine.lock);
    return ends;
}

void stio_transfer_end(stio_transfer *transfer) { end_transfer(transfer, true); }
int stio_transfer_try_end(stio_transfer *transfer) { return end_transfer(transfer, false); }

void stio_transfer_free(stio_transfer *transfer) {
    stio_transfer_end(transfer);
    for (size_t k = 0; k < transfer->num_numbers; ++k) {
        if (transfer->groups[k] == NULL) continue;
        free(transfer->groups[k]->ranges);
        free(transfer->groups[k]);
    }
    free(transfer->groups);
    free(transfer->order);
    free(transfer->done);
    free(transfer->rings);
    if (is_own(transfer)) { /* `engine.generation` changes in a forked child only, before it has threads */
        pthread_cond_destroy(&transfer->changed);
        pthread_mutex_destroy(&transfer->touching);
    }
    free(transfer);
}
