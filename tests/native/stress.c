/* A stress of the engine, with devices that this program simulates.
 *
 *     stress SECONDS SEED
 *
 * It starts processes, one after the other, each with the next seed; with 0 seconds one. In each process some threads
 * run transfers of random ranges into memory with guards between the ranges, and one thread changes what it can at
 * random: it stops, wakes and arranges transfers, replaces and trims rings, refuses and fails calls of the driver and of
 * cuFile. The process forks now and then, and ends the engine, half of the times with transfers under way. All of these
 * threads pin memory and release it, and copy memory of a device by calls of their own.
 *
 * What is checked: each byte of a complete group; that no other byte has changed, during a transfer or after its end;
 * that each group is complete once, and all of them without a fault; that failures have their code; that no copy which
 * is queued refers to memory of a transfer that has ended, or to memory that is given back; that copies and events use
 * the right stream, and a context is current; that pinned memory is zero, belongs to one owner, and is unpinned in the
 * context of its device; that rings and owners give all memory back. On a failure the seed is printed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../../stio/native/engine.h"

#if defined(__SANITIZE_THREAD__)
#define CAN_FORK false /* the sanitizer cannot start threads in a child of a process with threads */
#define ARENA_BYTES ((size_t)7 << 20) /* each page costs it five */
#define EPISODE_SECONDS 2.0
#else
#define CAN_FORK true
#define ARENA_BYTES ((size_t)14 << 20)
#define EPISODE_SECONDS 0.7
#endif

#define NUM_FILES 2
#define NUM_WORKERS 3
#define FILE_BYTES (((size_t)9 << 20) + 1234)
#define MOST_GROUPS 24
#define MAX_RANGES 6000
#define WATCHDOG_SECONDS 90
#define POISON 0xA5
#define AFTER_END 0x5B

static uint64_t seed;

/* What all processes have done, in shared memory. */
typedef struct {
    uint64_t transfers, groups, bytes, stopped, failed, driver_failed, cufile_failed, forks, ends, trims, pins;
} counts;
static counts *total;
#define COUNT(name, number) __atomic_fetch_add(&total->name, (uint64_t)(number), __ATOMIC_RELAXED)

static void fail(const char *what, long one, long two) {
    fprintf(stderr, "stress: %s (%ld, %ld), seed %llu\n", what, one, two, (unsigned long long)seed);
    abort();
}
#include "device.h"
#include "cufile.h"

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* Files and their bytes. */

typedef struct {
    int fd, direct_fd;
    unsigned char *bytes, *mapping; /* the mapping has a page more than the file */
} file;
static file files[NUM_FILES];
static int closed_fd, folder_fd;
static char *no_memory; /* pages that cannot be written */

static void make_files(void) {
    uint64_t random = 42; /* the same files for all seeds */
    for (int k = 0; k < NUM_FILES; ++k) {
        file *const one = &files[k];
        char path[] = "./stress-XXXXXX";
        one->bytes = aligned_alloc(4096, (FILE_BYTES + 4096) / 4096 * 4096); /* so that some writes are direct */
        one->fd = mkstemp(path);
        REQUIRE(one->fd >= 0 && one->bytes != NULL, errno, 0);
        for (size_t at = 0; at < FILE_BYTES; at += 8) {
            const uint64_t value = next_random(&random);
            memcpy(one->bytes + at, &value, 8);
        }
        for (size_t at = 0; at < FILE_BYTES;) {
            const ssize_t count = write(one->fd, one->bytes + at, FILE_BYTES - at);
            REQUIRE(count > 0, errno, 0);
            at += (size_t)count;
        }
        REQUIRE(fsync(one->fd) == 0, errno, 0);
        one->direct_fd = open(path, O_RDONLY | O_DIRECT); /* -1 where it is not possible */
        one->mapping = mmap(NULL, FILE_BYTES + 4096, PROT_READ, MAP_SHARED, one->fd, 0);
        REQUIRE(one->mapping != MAP_FAILED, errno, 0);
        unlink(path);
    }
    closed_fd = 1000; /* no descriptor has this number */
    folder_fd = open(".", O_RDONLY | O_DIRECTORY);
    no_memory = mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(folder_fd >= 0 && no_memory != MAP_FAILED, errno, 0);
}

/* Rings, one of each device at a time. A transfer uses it before the lock is released, so it may be released then. */

static pthread_mutex_t rings_lock = PTHREAD_MUTEX_INITIALIZER;
static stio_ring *rings[NUM_DEVICES];

static void renew_ring(int d) {
    if (rings[d] != NULL) stio_ring_free(rings[d]);
    rings[d] = stio_ring_new(&driver, &devices[d], &devices[d], -1);
    REQUIRE(rings[d] != NULL, d, 0);
}

/* cuFile. */

/* A context is current, and no copy that is queued refers to the memory. */
static ssize_t checked_read(void *handle, void *target, size_t nbytes, off_t offset, off_t target_offset) {
    REQUIRE(current != NULL, 0, 0);
    REQUIRE(!refers(current, (char *)target + target_offset, nbytes), nbytes, offset);
    return cuFileRead(handle, target, nbytes, offset, target_offset);
}

static const stio_cufile cufile_table = {
    .driver_open = cuFileDriverOpen,
    .get_properties = cuFileDriverGetProperties,
    .handle_register = cuFileHandleRegister,
    .handle_deregister = cuFileHandleDeregister,
    .read = checked_read,
};
static stio_cufile_file *cufile_files[NUM_FILES];

static void open_cufile(void) {
    for (int k = 0; k < NUM_FILES; ++k) {
        char why[STIO_TEXT_BYTES];
        int has_driver = 0;
        cufile_files[k] = stio_cufile_open(&cufile_table, files[k].fd, &has_driver, why);
        REQUIRE(cufile_files[k] != NULL && has_driver == 1, k, has_driver);
    }
}

static void close_cufile(void) {
    for (int k = 0; k < NUM_FILES; ++k) {
        stio_failure failure;
        if (stio_cufile_failed(cufile_files[k], &failure)) COUNT(cufile_failed, 1);
        stio_cufile_close(cufile_files[k]);
    }
    REQUIRE(cufile.num_open == 0, cufile.num_open, 0);
}

/* Pinned memory of one thread. */

#define NUM_HELD 3
typedef struct {
    stio_pinned *pinned;
    char *memory;
    size_t nbytes;
} held_memory;

static bool all_are(const char *memory, size_t nbytes, int value) {
    return nbytes == 0 || ((unsigned char)*memory == value && memcmp(memory, memory + 1, nbytes - 1) == 0);
}

static void release_held(held_memory *one) {
    if (one->pinned == NULL) return;
    REQUIRE(all_are(one->memory, one->nbytes, POISON), one->nbytes, 0);
    stio_pinned_free(one->pinned);
    one->pinned = NULL;
}

/* Pin memory, or release what is held. */
static void change_held(held_memory held[NUM_HELD], uint64_t *random) {
    held_memory *const one = &held[below(random, NUM_HELD)];
    if (one->pinned != NULL) {
        release_held(one);
        return;
    }
    void *memory = NULL;
    stio_failure failure = {0};
    one->nbytes = 1 + below(random, chance(random, 20) ? (size_t)9 << 20 : (size_t)100 << 10);
    one->pinned = stio_pinned_new(&driver, &devices[below(random, NUM_DEVICES)], one->nbytes, -1, &memory, &failure);
    if (one->pinned == NULL) {
        REQUIRE(failure.kind == STIO_DRIVER, failure.kind, failure.code);
        REQUIRE(failure.code == PIN_REFUSED || failure.code == CONTEXT_REFUSED, failure.code, 0);
        return;
    }
    one->memory = memory;
    REQUIRE(all_are(one->memory, one->nbytes, 0), one->nbytes, 0);
    memset(one->memory, POISON, one->nbytes);
    COUNT(pins, 1);
}

static held_memory main_held[NUM_HELD];

/* Transfers. */

enum way { FILE_TO_HOST, HOST_TO_HOST, FILE_TO_DEVICE, HOST_TO_DEVICE, CUFILE_TO_DEVICE, MAPPING, HOST_TO_FILE, NUM_WAYS };
enum fault { NO_FAULT, BAD_DESCRIPTOR, IS_FOLDER, PAST_END, BAD_ADDRESS, PAST_END_OF_MAPPING, READ_ONLY, BAD_SOURCE, NUM_FAULTS };

typedef struct {
    size_t first, num_ranges;
    bool is_added, is_done;
} planned;

typedef struct {
    uint64_t random;
    char *arena;
    size_t used;
    int target_fd, target_direct_fd; /* a file of its own */
    size_t written; /* bytes of it that ranges have */
    stio_range ranges[MAX_RANGES];
    size_t num_ranges;
    planned groups[MOST_GROUPS];
    int num_groups;
    enum fault fault;
    bool uses_device;
    stio_ring *rings[NUM_DEVICES];
    /* Guarded by `lock`: for the thread that disturbs. */
    pthread_mutex_t lock;
    stio_transfer *transfer;
    bool is_stopped;
    pthread_t thread;
    held_memory held[NUM_HELD];
} worker;

static worker workers[NUM_WORKERS];
static bool is_ending, engine_ended;
static bool flag(const bool *one) { return __atomic_load_n(one, __ATOMIC_ACQUIRE); }
static void set_flag(bool *one) { __atomic_store_n(one, true, __ATOMIC_RELEASE); }

/* Return where the bytes of a range come from, as they must arrive. */
static const unsigned char *expected(const stio_range *range) {
    if (range->fd < 0 || (range->flags & STIO_WRITE)) return (const unsigned char *)(uintptr_t)range->source;
    for (int k = 0; k < NUM_FILES; ++k)
        if (range->fd == files[k].fd) return files[k].bytes + range->offset;
    return NULL;
}

static bool in_arena(const stio_range *range) {
    return !(range->flags & (STIO_POPULATE | STIO_WRITE)) && (char *)(uintptr_t)range->target != no_memory;
}

static size_t random_size(uint64_t *random, int style) {
    switch (style) {
    case 0: return below(random, 300);                      /* tiny, empty ones too */
    case 1: return 1 + below(random, 80 << 10);             /* gapped */
    case 2: return 1 + below(random, 200 << 10);            /* adjacent */
    case 3: return ((size_t)1 << 20) + below(random, 5 << 20); /* large */
    default: return 1 + below(random, 16);                  /* very many */
    }
}

static void plan_group(worker *self) {
    uint64_t *const random = &self->random;
    const enum way way = (enum way)below(random, NUM_WAYS);
    const int style = (int)below(random, 100), kind = style < 30 ? 0 : style < 55 ? 1 : style < 80 ? 2 : style < 95 ? 3 : 4;
    const size_t wanted = kind == 3 ? 1 : kind == 4 ? 1 + below(random, 1300) : 1 + below(random, 30);
    const file *const from = &files[below(random, NUM_FILES)];
    const int device_number = (int)below(random, NUM_DEVICES);
    const bool is_direct = chance(random, 50), is_aligned = chance(random, 50);
    planned *const group = &self->groups[self->num_groups];
    *group = (planned){.first = self->num_ranges};
    int64_t offset = (int64_t)below(random, FILE_BYTES / 2);
    if (is_aligned) offset -= offset % 4096;
    for (size_t k = 0; k < wanted && self->num_ranges < MAX_RANGES; ++k) {
        size_t nbytes = random_size(random, kind);
        if (k > 0 && kind == 0) offset += (int64_t)below(random, chance(random, 10) ? 200000 : 100);
        if (k > 0 && kind == 1) offset += (int64_t)below(random, 100 << 10);
        if (k > 0 && chance(random, 3)) offset += 1 << 20; /* scattered */
        if (offset >= (int64_t)FILE_BYTES) break;
        if (nbytes > FILE_BYTES - (size_t)offset || (kind == 3 && chance(random, 20))) nbytes = FILE_BYTES - (size_t)offset;
        size_t at = self->used + 1 + below(random, 64);
        if (is_aligned) at = (at + 4095) / 4096 * 4096;
        if (at + nbytes + 64 > ARENA_BYTES) break;
        stio_range *const range = &self->ranges[self->num_ranges];
        *range = (stio_range){
            .offset = offset,
            .target = (uint64_t)(uintptr_t)(self->arena + at),
            .nbytes = nbytes,
            .fd = from->fd,
            .direct_fd = is_direct ? from->direct_fd : -1,
            .group = self->num_groups,
        };
        if (way == HOST_TO_HOST || way == HOST_TO_DEVICE) {
            range->source = (uint64_t)(uintptr_t)(from->bytes + offset);
            range->fd = range->direct_fd = -1;
            if (chance(random, 50)) range->offset = 0;
        }
        if (way == CUFILE_TO_DEVICE && chance(random, 80)) { /* others of the group go through the ring */
            range->flags = STIO_CUFILE;
            range->source = (uint64_t)(uintptr_t)cufile_files[from - files];
        }
        if (way == FILE_TO_DEVICE || way == HOST_TO_DEVICE || way == CUFILE_TO_DEVICE) {
            range->ring = self->rings[device_number];
            self->uses_device = true;
        }
        if (way == HOST_TO_FILE) {
            const size_t to = self->written + below(random, 64);
            range->flags = STIO_WRITE;
            range->source = (uint64_t)(uintptr_t)(from->bytes + offset);
            range->target = 0;
            range->offset = (int64_t)(is_aligned ? (to + 4095) / 4096 * 4096 : to);
            range->fd = self->target_fd;
            if (is_direct) range->direct_fd = self->target_direct_fd;
            self->written = (size_t)range->offset + nbytes;
        } else if (way == MAPPING) {
            range->flags = STIO_POPULATE | (chance(random, 50) ? STIO_TOUCH : 0);
            range->target = (uint64_t)(uintptr_t)(from->mapping + offset);
        } else {
            self->used = at + nbytes;
        }
        offset += (int64_t)nbytes;
        self->num_ranges += 1;
    }
    group->num_ranges = self->num_ranges - group->first;
    if (group->num_ranges > 0) self->num_groups += 1;
}

/* A group whose transfer must fail. */
static void plan_fault(worker *self) {
    if (self->num_ranges == MAX_RANGES || self->num_groups == MOST_GROUPS || self->used + 8192 > ARENA_BYTES) return;
    self->fault = (enum fault)(1 + below(&self->random, NUM_FAULTS - 1));
    stio_range *const range = &self->ranges[self->num_ranges];
    *range = (stio_range){
        .offset = 4096,
        .target = (uint64_t)(uintptr_t)(self->arena + self->used + 64),
        .nbytes = 4000,
        .fd = files[0].fd,
        .direct_fd = -1,
        .group = self->num_groups,
    };
    if (self->fault == BAD_DESCRIPTOR) range->fd = closed_fd;
    if (self->fault == IS_FOLDER) range->fd = folder_fd;
    if (self->fault == PAST_END || self->fault == PAST_END_OF_MAPPING) range->offset = (int64_t)FILE_BYTES - 1000;
    if (self->fault == PAST_END && chance(&self->random, 50)) range->direct_fd = files[0].direct_fd;
    if (self->fault == BAD_ADDRESS) range->target = (uint64_t)(uintptr_t)no_memory;
    if (self->fault == READ_ONLY || self->fault == BAD_SOURCE) {
        range->flags = STIO_WRITE;
        range->source = (uint64_t)(uintptr_t)(self->fault == READ_ONLY ? (char *)files[0].bytes : no_memory);
        if (self->fault == BAD_SOURCE) range->fd = self->target_fd;
        if (self->fault == READ_ONLY) range->fd = folder_fd; /* as good: it cannot be written */
    } else if (self->fault == PAST_END_OF_MAPPING) {
        range->flags = STIO_POPULATE;
        range->target = (uint64_t)(uintptr_t)(files[0].mapping + range->offset);
    } else {
        self->used += 64 + 4000;
    }
    self->groups[self->num_groups++] = (planned){.first = self->num_ranges++, .num_ranges = 1};
}

static void check_written(const worker *self, const stio_range *range) {
    static _Thread_local char found[64 << 10];
    for (size_t at = 0; at < range->nbytes;) {
        const size_t wanted = range->nbytes - at < sizeof found ? range->nbytes - at : sizeof found;
        const ssize_t count = pread(self->target_fd, found, wanted, range->offset + (int64_t)at);
        REQUIRE(count > 0, errno, range->offset);
        REQUIRE(memcmp(found, (const char *)(uintptr_t)range->source + at, (size_t)count) == 0, range->offset, at);
        at += (size_t)count;
    }
}

static void check_done(worker *self, int number) {
    REQUIRE(number >= 0 && number < self->num_groups, number, self->num_groups);
    planned *const group = &self->groups[number];
    REQUIRE(group->is_added && !group->is_done, number, 0);
    group->is_done = true;
    for (size_t k = group->first; k < group->first + group->num_ranges; ++k) {
        const stio_range *const range = &self->ranges[k];
        const unsigned char *const bytes = expected(range);
        REQUIRE(bytes != NULL, k, 0); /* a fault is not complete */
        if (range->flags & STIO_WRITE)
            check_written(self, range);
        else
            REQUIRE(memcmp((const void *)(uintptr_t)range->target, bytes, range->nbytes) == 0, k, range->nbytes);
        COUNT(bytes, range->nbytes);
    }
    COUNT(groups, 1);
}

/* Require that nothing but the ranges has changed, and these to what they must become. */
static void check_arena(const worker *self) {
    size_t at = 0;
    for (size_t k = 0; k < self->num_ranges; ++k) {
        const stio_range *const range = &self->ranges[k];
        if (!in_arena(range)) continue;
        const size_t start = (size_t)((char *)(uintptr_t)range->target - self->arena);
        REQUIRE(all_are(self->arena + at, start - at, POISON), at, start);
        at = start + range->nbytes;
        const unsigned char *const bytes = expected(range), *const found = (unsigned char *)self->arena + start;
        if (bytes == NULL || (range->offset + (int64_t)range->nbytes > (int64_t)FILE_BYTES && range->fd >= 0)) continue;
        if (memcmp(found, bytes, range->nbytes) == 0) continue;
        REQUIRE(!self->groups[range->group].is_done, range->group, k);
        for (size_t b = 0; b < range->nbytes; ++b) REQUIRE(found[b] == bytes[b] || found[b] == POISON, k, b);
    }
    REQUIRE(all_are(self->arena + at, self->used + 64 - at, POISON), at, self->used);
}

static void check_failure(const worker *self, const stio_failure *failure) {
    if (failure->kind == STIO_DRIVER) {
        REQUIRE(self->uses_device, failure->code, 0);
        REQUIRE(failure->code == COPY_REFUSED || failure->code == EVENT_FAILED || failure->code == CREATE_REFUSED ||
                    failure->code == CONTEXT_REFUSED,
                failure->code, 0);
        REQUIRE(failure->text[0] != 0, failure->code, 0);
        COUNT(driver_failed, 1);
        return;
    }
    REQUIRE(self->fault != NO_FAULT, failure->kind, failure->code);
    REQUIRE(failure->group == self->num_groups - 1, failure->group, 0);
    const int64_t end = (int64_t)FILE_BYTES;
    const struct {
        int kind, code;
        int64_t offset;
    } must[NUM_FAULTS] = {
        [BAD_DESCRIPTOR] = {STIO_ERRNO, EBADF, 4096},
        [IS_FOLDER] = {STIO_ERRNO, EISDIR, 4096},
        [PAST_END] = {STIO_TRUNCATED, 0, end},
        [BAD_ADDRESS] = {STIO_ERRNO, EFAULT, 4096},
        [PAST_END_OF_MAPPING] = {STIO_SHRUNK, 0, end},
        [READ_ONLY] = {STIO_ERRNO, EBADF, 4096},
        [BAD_SOURCE] = {STIO_ERRNO, EFAULT, 4096},
    };
    REQUIRE(failure->kind == must[self->fault].kind, failure->kind, self->fault);
    REQUIRE(failure->code == must[self->fault].code, failure->code, self->fault);
    REQUIRE(failure->offset == must[self->fault].offset, failure->offset, self->fault);
    if (self->fault == PAST_END) REQUIRE(failure->nbytes == 3000, failure->nbytes, 0);
    COUNT(failed, 1);
}

static void add_some(worker *self, int *added, int wanted) {
    int stop = *added + wanted;
    if (stop > self->num_groups) stop = self->num_groups;
    if (stop <= *added) return;
    for (int k = *added; k < stop; ++k) self->groups[k].is_added = true;
    const planned *const first = &self->groups[*added], *const last = &self->groups[stop - 1];
    REQUIRE(stio_transfer_add(self->transfer, self->ranges + first->first,
                              last->first + last->num_ranges - first->first) == 0, 0, 0);
    *added = stop;
}

static void arrange_some(worker *self, uint64_t *random) {
    int32_t groups[8];
    for (size_t k = 0; k < 8; ++k) groups[k] = (int32_t)below(random, MOST_GROUPS + 4) - 2; /* unknown ones too */
    stio_transfer_arrange(self->transfer, groups, below(random, 9));
}

static void run_transfer(worker *self) {
    uint64_t *const random = &self->random;
    self->num_ranges = 0;
    self->num_groups = 0;
    self->used = self->written = 0;
    self->fault = NO_FAULT;
    self->uses_device = false;
    stio_transfer *const transfer =
        stio_transfer_new((int)below(random, 4) + (chance(random, 5) ? 1000 : 0), (int)below(random, 4));
    if (transfer == NULL) {
        REQUIRE(flag(&is_ending), 0, 0);
        return;
    }
    pthread_mutex_lock(&rings_lock);
    memcpy(self->rings, rings, sizeof rings);
    const int wanted = 1 + (int)below(random, MOST_GROUPS - 2);
    for (int k = 0; k < wanted; ++k) plan_group(self);
    if (chance(random, 12)) plan_fault(self);
    memset(self->arena, POISON, self->used + 64);
    pthread_mutex_lock(&self->lock);
    self->transfer = transfer;
    self->is_stopped = false;
    pthread_mutex_unlock(&self->lock);
    int added = 0;
    const bool at_once = self->uses_device || chance(random, 50);
    add_some(self, &added, at_once ? self->num_groups : 1);
    pthread_mutex_unlock(&rings_lock);

    const bool stops = chance(random, 15);
    int num_done = 0, result = 0;
    stio_failure failure;
    while (num_done < self->num_groups) {
        if (added < self->num_groups && chance(random, 60)) add_some(self, &added, 1 + (int)below(random, 3));
        if (chance(random, 20)) arrange_some(self, random);
        if (stops && chance(random, 20)) {
            pthread_mutex_lock(&self->lock);
            self->is_stopped = true;
            stio_transfer_stop(transfer);
            pthread_mutex_unlock(&self->lock);
        }
        stio_done done[8];
        const int timeout = chance(random, 30) ? (int)below(random, 3) : added < self->num_groups ? 5 : -1;
        memset(&failure, 0, sizeof failure);
        result = stio_transfer_take(transfer, done, 1 + (int)below(random, 8), timeout, &failure);
        if (result < 0) break;
        for (int k = 0; k < result; ++k) check_done(self, done[k].group);
        num_done += result > 0 ? result : 0;
        pthread_mutex_lock(&self->lock);
        const bool is_stopped = self->is_stopped;
        pthread_mutex_unlock(&self->lock);
        if (result == 0 && (is_stopped || flag(&engine_ended))) break;
    }
    if (result < 0) check_failure(self, &failure);
    if (result >= 0 && num_done == self->num_groups) REQUIRE(self->fault == NO_FAULT, self->fault, 0);
    if (result >= 0 && num_done < self->num_groups) COUNT(stopped, 1);

    stio_transfer_end(transfer);
    for (int d = 0; d < NUM_DEVICES; ++d) REQUIRE(!refers(&devices[d], self->arena, ARENA_BYTES), d, 0);
    check_arena(self);
    memset(self->arena, AFTER_END, self->used + 64);
    if (chance(random, 50)) pause_us(below(random, 2000));
    REQUIRE(all_are(self->arena, self->used + 64, AFTER_END), 0, 0);
    pthread_mutex_lock(&self->lock); /* nobody disturbs it any more */
    self->transfer = NULL;
    stio_transfer_free(transfer);
    pthread_mutex_unlock(&self->lock);
    if (result < 0 && failure.kind == STIO_DRIVER) {
        pthread_mutex_lock(&rings_lock);
        for (int d = 0; d < NUM_DEVICES; ++d) {
            int refused = 0, failed = 0;
            stio_ring_state(rings[d], &refused, &failed);
            if (failed != 0) renew_ring(d);
        }
        pthread_mutex_unlock(&rings_lock);
    }
    COUNT(transfers, 1);
}

/* Copy memory of a device on its stream, some of it by a caller's own call, and look at each byte. */
static void copy_once(uint64_t *random) {
    enum { COUNT_OF_COPIES = 20, NBYTES = 3000 };
    static _Thread_local char source[COUNT_OF_COPIES * NBYTES], target[COUNT_OF_COPIES * NBYTES];
    stio_range ranges[COUNT_OF_COPIES] = {{0}};
    device *const on = &devices[below(random, NUM_DEVICES)];
    for (size_t k = 0; k < sizeof source; ++k) source[k] = (char)next_random(random);
    memset(target, POISON, sizeof target);
    for (size_t k = 0; k < COUNT_OF_COPIES; ++k) {
        ranges[k].source = (uint64_t)(uintptr_t)(source + k * NBYTES);
        ranges[k].target = (uint64_t)(uintptr_t)(target + k * NBYTES);
        ranges[k].nbytes = below(random, NBYTES + 1);
    }
    stio_failure failure = {0};
    const int code = stio_copies_queue(&driver, on, on, chance(random, 50), ranges, COUNT_OF_COPIES, &failure);
    REQUIRE(code == 0 || failure.kind == STIO_DRIVER, code, failure.kind);
    REQUIRE(code == 0 || failure.code == COPY_REFUSED || failure.code == CONTEXT_REFUSED, failure.code, 0);
    while (refers(on, target, sizeof target)) pause_us(100);
    for (size_t k = 0; k < COUNT_OF_COPIES; ++k) {
        const char *const from = source + k * NBYTES, *const to = target + k * NBYTES;
        const bool is_copied = memcmp(from, to, ranges[k].nbytes) == 0;
        REQUIRE(is_copied || (code != 0 && all_are(to, ranges[k].nbytes, POISON)), k, code);
        REQUIRE(all_are(to + ranges[k].nbytes, NBYTES - ranges[k].nbytes, POISON), k, code);
    }
}

static void *worker_run(void *argument) {
    worker *const self = argument;
    while (!flag(&is_ending)) {
        run_transfer(self);
        change_held(self->held, &self->random);
        copy_once(&self->random);
    }
    for (int k = 0; k < NUM_HELD; ++k) release_held(&self->held[k]);
    return NULL;
}

/* Disturb what can be disturbed. */
static void disturb(uint64_t *random) {
    worker *const other = &workers[below(random, NUM_WORKERS)];
    const int d = (int)below(random, NUM_DEVICES);
    const uint64_t what = below(random, 100);
    if (what < 40) {
        pthread_mutex_lock(&other->lock);
        if (other->transfer != NULL) {
            if (what < 5) {
                other->is_stopped = true;
                stio_transfer_stop(other->transfer);
            } else if (what < 20) {
                stio_transfer_wake(other->transfer);
            } else if (what < 30) {
                stio_transfer_moved_bytes(other->transfer);
            } else {
                arrange_some(other, random);
            }
        }
        pthread_mutex_unlock(&other->lock);
    } else if (what < 60) {
        pthread_mutex_lock(&rings_lock);
        stio_ring_trim(rings[d]);
        pthread_mutex_unlock(&rings_lock);
        COUNT(trims, 1);
    } else if (what < 66) {
        pthread_mutex_lock(&rings_lock);
        renew_ring(d);
        pthread_mutex_unlock(&rings_lock);
    } else if (what < 74) {
        stio_engine_set_idle((int)below(random, 20));
    } else if (what < 78) {
        stio_engine_set_threads((int)below(random, 9));
    } else if (what < 80) {
        pthread_mutex_lock(&cufile_lock);
        cufile.fail_read = chance(random, 60) ? 0 : (int32_t)(cufile.num_reads + 1 + (int64_t)below(random, 60));
        cufile.fail_code = (int32_t[]){-5044, EIO, 0}[below(random, 3)];
        cufile.max_bytes = chance(random, 50) ? 0 : 20000 + (int64_t)below(random, 500000);
        pthread_mutex_unlock(&cufile_lock);
    } else {
        pthread_mutex_lock(&devices[d].lock);
        devices[d].max_delay_us = chance(random, 40) ? 0 : (unsigned)below(random, 300);
        if (what == 83) devices[d].copies_until_refused = 1 + (int)below(random, 60);
        if (what == 84) devices[d].events_until_failed = 1 + (int)below(random, 60);
        if (what == 85) devices[d].creations_until_refused = 1 + (int)below(random, 4);
        if (what == 86) devices[d].contexts_until_refused = 1 + (int)below(random, 20);
        if (what == 87) __atomic_store_n(&devices[d].pin_refused, chance(random, 30), __ATOMIC_RELAXED);
        pthread_mutex_unlock(&devices[d].lock);
    }
}

/* In a child: the engine works anew, and what belongs to the parent is dropped without a wait. */
static int child(worker *other) {
    static char target[100000];
    alarm(WATCHDOG_SECONDS / 3);
    stio_failure failure;
    stio_done done;
    for (int k = 0; k < NUM_HELD; ++k)
        if (main_held[k].pinned != NULL) stio_pinned_free(main_held[k].pinned);
    if (stio_pinned_bytes() != 0) return 8;
    if (other->transfer != NULL) {
        stio_transfer_wake(other->transfer);
        stio_transfer_stop(other->transfer);
        if (stio_transfer_take(other->transfer, &done, 1, -1, &failure) == 0) return 2;
        stio_transfer_end(other->transfer);
        stio_transfer_free(other->transfer);
    }
    stio_transfer *const transfer = stio_transfer_new(1, 0);
    if (transfer == NULL) return 3;
    stio_ring_trim(rings[0]);
    const stio_range range = {
        .offset = 12345,
        .target = (uint64_t)(uintptr_t)target,
        .nbytes = sizeof target,
        .fd = files[0].fd,
        .direct_fd = -1,
    };
    if (stio_transfer_add(transfer, &range, 1) != 0) return 4;
    if (stio_transfer_take(transfer, &done, 1, -1, &failure) != 1) return 5;
    if (memcmp(target, files[0].bytes + 12345, sizeof target) != 0) return 6;
    stio_transfer_free(transfer);
    stio_engine_end(WATCHDOG_SECONDS * 1000);
    return stio_engine_num_threads() == 0 ? 0 : 7;
}

static void fork_once(uint64_t *random) {
    worker *const other = &workers[below(random, NUM_WORKERS)];
    pthread_mutex_lock(&rings_lock);
    pthread_mutex_lock(&other->lock);
    const pid_t pid = fork();
    if (pid == 0) _exit(child(other));
    pthread_mutex_unlock(&other->lock);
    pthread_mutex_unlock(&rings_lock);
    int status = 0;
    REQUIRE(pid > 0 && waitpid(pid, &status, 0) == pid, errno, 0);
    REQUIRE(status == 0, status, 0);
    COUNT(forks, 1);
}

static void too_long(int number) {
    (void)number;
    fail("no end", 0, 0);
}

static int episode(double seconds) {
    uint64_t random = seed;
    signal(SIGALRM, too_long);
    alarm(WATCHDOG_SECONDS);
    stio_engine_set_threads(1 + (int)below(&random, 8));
    stio_engine_set_idle((int)below(&random, 50));
    for (int d = 0; d < NUM_DEVICES; ++d) {
        const uint64_t of_device = next_random(&random);
        device_start(&devices[d], of_device, (unsigned)below(&random, 200));
        renew_ring(d);
    }
    open_cufile();
    for (int k = 0; k < NUM_WORKERS; ++k) {
        worker *const one = &workers[k];
        one->random = next_random(&random);
        pthread_mutex_init(&one->lock, NULL);
        one->arena = mmap(NULL, ARENA_BYTES + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(one->arena != MAP_FAILED, errno, 0);
        char path[] = "./stress-XXXXXX";
        one->target_fd = mkstemp(path);
        REQUIRE(one->target_fd >= 0, errno, 0);
        one->target_direct_fd = open(path, O_WRONLY | O_DIRECT);
        unlink(path);
        REQUIRE(pthread_create(&one->thread, NULL, worker_run, one) == 0, k, 0);
    }
    const double until = now() + seconds;
    const bool disturbs = chance(&random, 75), ends_early = chance(&random, 50);
    while (now() < until) {
        pause_us(1 + below(&random, 3000));
        if (disturbs) disturb(&random);
        change_held(main_held, &random);
        if (CAN_FORK && chance(&random, 1)) fork_once(&random);
    }
    if (ends_early) {
        set_flag(&is_ending);
        stio_engine_end(WATCHDOG_SECONDS * 1000);
        REQUIRE(stio_engine_num_threads() == 0, stio_engine_num_threads(), 0);
        set_flag(&engine_ended);
        COUNT(ends, 1);
    }
    set_flag(&is_ending);
    for (int k = 0; k < NUM_WORKERS; ++k) pthread_join(workers[k].thread, NULL);
    close_cufile();
    for (int d = 0; d < NUM_DEVICES; ++d) stio_ring_free(rings[d]);
    for (int k = 0; k < NUM_HELD; ++k) release_held(&main_held[k]);
    while (!ends_early && !flag(&any_lost) && stio_engine_num_threads() > 0) { /* the threads release the rings */
        pthread_mutex_lock(&pins_lock);
        const int64_t left = pinned_bytes;
        pthread_mutex_unlock(&pins_lock);
        if (left == 0 && stio_pinned_bytes() == 0) break;
        pause_us(1000);
    }
    stio_engine_end(WATCHDOG_SECONDS * 1000);
    REQUIRE(stio_engine_num_threads() == 0, stio_engine_num_threads(), 0);
    for (int d = 0; d < NUM_DEVICES; ++d) {
        pthread_mutex_lock(&devices[d].lock);
        devices[d].is_ended = true;
        pthread_cond_broadcast(&devices[d].changed);
        pthread_mutex_unlock(&devices[d].lock);
        pthread_join(devices[d].thread, NULL);
    }
    return 0;
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: stress SECONDS SEED\n");
        return 2;
    }
    const double until = now() + atof(arguments[1]);
    seed = strtoull(arguments[2], NULL, 10);
    total = mmap(NULL, sizeof *total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(total != MAP_FAILED, errno, 0);
    make_files();
    do {
        const pid_t pid = fork(); /* before there is any thread */
        if (pid == 0) _exit(episode(EPISODE_SECONDS));
        int status = 0;
        REQUIRE(pid > 0 && waitpid(pid, &status, 0) == pid, errno, 0);
        if (status != 0) {
            fprintf(stderr, "stress: status %d; again: %s 0 %llu\n", status, arguments[0], (unsigned long long)seed);
            return 1;
        }
        seed += 1;
    } while (now() < until);
    printf("transfers %llu, groups %llu, MiB %llu, stopped %llu, failed %llu, failed by a driver %llu, by cuFile %llu, forks %llu, "
           "ended early %llu, trims %llu, pins %llu\n",
           (unsigned long long)total->transfers, (unsigned long long)total->groups,
           (unsigned long long)(total->bytes >> 20), (unsigned long long)total->stopped,
           (unsigned long long)total->failed, (unsigned long long)total->driver_failed,
           (unsigned long long)total->cufile_failed,
           (unsigned long long)total->forks, (unsigned long long)total->ends, (unsigned long long)total->trims,
           (unsigned long long)total->pins);
    return total->groups > 0 || atof(arguments[1]) < 2 ? 0 : 1; /* otherwise nothing was proved */
}
