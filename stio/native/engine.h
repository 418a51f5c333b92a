/* The engine: moves bytes of ranges between files, host memory and devices, on threads of its own. Loads read files into
 * memory; saves copy tensors into their staging memory, and write that into files.
 *
 * Strategy. A transfer is an order of ranges; threads cut the next chunk from a transfer and move it, and take the
 * transfers in turn. A chunk for a device is read into a slot of pinned memory, then copied by the device on one copy
 * stream, with an event behind it. Slots belong to one thread: about three a thread, so that a thread reads while the
 * device copies. They are small, so that the processor's cache holds them. A group of ranges is complete when its bytes
 * are there for every thread and every stream: the engine waits for the events, not its caller.
 *
 * The engine calls no Python, parses nothing, opens and closes no file. Its caller keeps descriptors, memory and streams
 * valid until `stio_transfer_end` has returned. All functions may be called from any thread.
 *
 * Forks: a child has no thread of its parent's and starts its own. A transfer of its parent moves nothing there: `take`
 * fails with ECHILD, `end` returns at once. A ring of its parent has no memory there, and no users.
 */
#ifndef STIO_ENGINE_H
#define STIO_ENGINE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#pragma GCC visibility push(default) /* all else is hidden */

#define STIO_ENGINE_VERSION 5
#define STIO_MAX_THREADS 16
#define STIO_SLOTS_PER_THREAD 3
#define STIO_CHUNK_BYTES ((size_t)2 << 20) /* size of a slot, and most bytes of a chunk for a device */
#define STIO_PINNED_BYTES ((size_t)512 << 20) /* most bytes that are pinned at once; some systems refuse 2 GiB */
#define STIO_TEXT_BYTES 256

/* The functions of a device's driver. Each returns 0, or a code of the driver. Their shapes are those of CUDA's driver. */
typedef struct stio_driver {
    int (*make_current)(void *context);
    int (*copy)(uint64_t target, const void *source, size_t nbytes, void *stream);
    int (*copy_to_host)(void *target, uint64_t source, size_t nbytes, void *stream);
    int (*copy_on_device)(uint64_t target, uint64_t source, size_t nbytes, void *stream);
    int (*event_create)(void **event, unsigned flags);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event); /* `not_ready` while the event has not passed */
    int (*event_destroy)(void *event);
    int (*pin)(void *address, size_t nbytes, unsigned flags);
    int (*unpin)(void *address);
    int (*error_text)(int code, const char **text); /* may be NULL */
    int (*exchange_capture_mode)(int *mode); /* of the calling thread; may be NULL */
    int not_ready;
} stio_driver;

/* The functions of cuFile, in its shapes. */
typedef struct stio_cufile_status {
    int code, driver_code; /* 0, or a code of cuFile; and of CUDA's driver */
} stio_cufile_status;
typedef struct stio_cufile_file_description {
    int kind; /* 1: a descriptor */
    union {
        int fd;
        void *handle;
    } of;
    const void *operations; /* NULL: those of the system */
} stio_cufile_file_description;
typedef struct stio_cufile {
    stio_cufile_status (*driver_open)(void);
    stio_cufile_status (*get_properties)(void *properties);
    stio_cufile_status (*handle_register)(void **handle, stio_cufile_file_description *description);
    void (*handle_deregister)(void *handle);
    /* Returns the number of bytes, -1 with `errno`, or a code of cuFile below -1. */
    ssize_t (*read)(void *handle, void *target, size_t nbytes, off_t offset, off_t target_offset);
} stio_cufile;

typedef struct stio_cufile_file stio_cufile_file;
typedef struct stio_ring stio_ring;
typedef struct stio_transfer stio_transfer;
typedef struct stio_pinned stio_pinned;

enum {
    STIO_POPULATE = 1, /* `target` is the file's mapping at `offset`: its pages are read and mapped */
    STIO_TOUCH = 2,    /* the pages were on a disk: read each once after it is mapped (see `touch` in engine.c) */
    STIO_CUFILE = 4,   /* cuFile reads into memory of the ring's device; `source`: a `stio_cufile_file` of `fd`. Nothing
                          that is queued uses the memory. Once a read fails, the ring moves what is left of the transfer */
    STIO_WRITE = 8,    /* from host memory at `source` into the file; `target` is not used */
};

/* Bytes to move. From `fd` at `offset`, or, with `fd` -1, from host memory at `source`; to `target`. Ranges of a group from
 * host memory to host memory share chunks if their offsets ascend by their lengths: they cost less then. */
typedef struct stio_range {
    int64_t offset;
    uint64_t source;
    uint64_t target; /* address in host memory; with `ring`, in memory of the ring's device */
    uint64_t nbytes;
    stio_ring *ring;   /* NULL: host memory */
    int32_t fd;
    int32_t direct_fd; /* the same file, opened with O_DIRECT; -1: none. Used where places, lengths and memory allow it */
    int32_t group;
    int32_t flags;
} stio_range;

/* What ended a transfer. */
enum { STIO_ERRNO = 1, STIO_TRUNCATED, STIO_SHRUNK, STIO_DRIVER, STIO_NO_MEMORY };
typedef struct stio_failure {
    int32_t kind;
    int32_t code;   /* errno, or the driver's code */
    int32_t group;
    int32_t doing;  /* 0: reading; STIO_POPULATE: mapping; STIO_WRITE: writing */
    int64_t offset; /* in the file */
    uint64_t nbytes; /* bytes that were missing (STIO_TRUNCATED, STIO_SHRUNK), needed (STIO_NO_MEMORY), or not written */
    char text[STIO_TEXT_BYTES]; /* of the driver */
} stio_failure;

/* A group that is complete. Times are seconds of CLOCK_MONOTONIC: its first chunk began, its last one ended. */
typedef struct stio_done {
    int32_t group;
    int32_t thread; /* that ended it, from 0 on */
    double started, ended;
} stio_done;

/* The process's threads. */
int stio_engine_version(void);
/* Let transfers use so many threads, at most STIO_MAX_THREADS; more are started when they are needed, none is ended. */
void stio_engine_set_threads(int num_threads);
/* Return slots of rings without users to the system after so many milliseconds without work. */
void stio_engine_set_idle(int milliseconds);
/* End all threads, for the exit of the process; wait for them for at most so many milliseconds. Transfers stop. */
void stio_engine_end(int milliseconds);
int stio_engine_num_threads(void);

/* A ring. Nothing is allocated before its first chunk. `node`: NUMA node of the device, -1: unknown. */
stio_ring *stio_ring_new(const stio_driver *driver, void *context, void *stream, int node);
/* Return bytes of slots. `*refused`: the driver's code if it refused to pin (the slots are plain memory then), else 0.
 * `*failed`: its code if copies that were queued have failed, else 0; each later chunk of the ring fails. A copy that is
 * refused is a failure of its transfer alone. */
uint64_t stio_ring_state(stio_ring *ring, int *refused, int *failed);
/* Release the ring's slots at once, where no chunk is in them. */
void stio_ring_trim(stio_ring *ring);
/* Release the ring when its last transfer is freed. */
void stio_ring_free(stio_ring *ring);

/* Pinned memory, for copies of a device in both directions. Map it on a node (-1: any), touch it by several threads, pin
 * it in pieces of STIO_PINNED_BYTES: a copy should not cross the end of a piece. Makes the context the calling thread's
 * current one. NULL: `failure` is filled (STIO_NO_MEMORY, STIO_DRIVER), and nothing is left. */
stio_pinned *stio_pinned_new(const stio_driver *driver, void *context, size_t nbytes, int node, void **memory,
                             stio_failure *failure);
/* Release the memory, which no copy reads or writes any more. Short: a thread of the engine unpins and unmaps it. Behind
 * `stio_engine_end` it is left to the system. In a child of the process that pinned it nothing is released. */
void stio_pinned_free(stio_pinned *pinned);
/* Bytes that are pinned now, those of rings included. */
uint64_t stio_pinned_bytes(void);

/* A transfer. `weight`: share of the threads' time beside other transfers, 1 or more. `max_chunks`: most chunks for
 * devices, and of writes, that are under way at one time, 0: no limit. NULL: no memory. */
stio_transfer *stio_transfer_new(int weight, int max_chunks);
/* Append ranges, which are copied. Groups are moved in the order in which they were added. All ranges of a group come in
 * one call, in the order of their places in the file. Group numbers are small; offset + nbytes fits an int64_t. Ignored
 * once the transfer is stopped or has failed. Returns 0 or ENOMEM. */
int stio_transfer_add(stio_transfer *transfer, const stio_range *ranges, size_t num_ranges);
/* Move the groups, as far as they have chunks left, before all others, in this order. */
void stio_transfer_arrange(stio_transfer *transfer, const int32_t *groups, size_t num_groups);
/* Wait until a group is complete, `stio_transfer_wake` was called, or a timeout (milliseconds; -1: none). Returns the
 * number of complete groups that were stored, -1 once the transfer has failed (`failure` is filled), 0 otherwise. Does not
 * wait once the transfer is stopped. */
int stio_transfer_take(stio_transfer *transfer, stio_done *done, int capacity, int timeout, stio_failure *failure);
void stio_transfer_wake(stio_transfer *transfer);
/* Begin no further chunk. */
void stio_transfer_stop(stio_transfer *transfer);
/* Bytes of chunks that are complete. */
uint64_t stio_transfer_moved_bytes(stio_transfer *transfer);
/* Stop, and wait until no chunk is under way, on the device neither: then the caller's memory is not used any more. */
void stio_transfer_end(stio_transfer *transfer);
/* The same without a wait: returns 0 if a chunk is under way. */
int stio_transfer_try_end(stio_transfer *transfer);
/* End and release the transfer. No other call with it may be under way. */
void stio_transfer_free(stio_transfer *transfer);

/* Queue copies on a stream of the caller's device, in the order of the ranges: `source` is memory of the device, `target`
 * too, or with `to_host` memory of the host; their other fields are not used. Does not wait, if host memory is pinned.
 * Makes the context the calling thread's current one. Returns 0, or -1: `failure` is filled, and the copies before the
 * one that was refused are queued. */
int stio_copies_queue(const stio_driver *driver, void *context, void *stream, int to_host, const stio_range *ranges,
                      size_t num_ranges, stio_failure *failure);

/* Tables of drivers. */
/* Find a driver: "cuda" or "hip". Returns NULL, and why, if it is not here. `*context` belongs to the device. */
const stio_driver *stio_driver_open(const char *kind, int device, void **context, char why[STIO_TEXT_BYTES]);

/* cuFile. */
/* Load the library. Returns NULL, and why, if it is not there; otherwise its functions, which are kept. */
const stio_cufile *stio_cufile_load(const char *path, char why[STIO_TEXT_BYTES]);
/* Register a file for ranges with STIO_CUFILE; the device is the thread's current one. Returns NULL, and why, if cuFile
 * refuses it. `*has_driver`: nvidia-fs is loaded. */
stio_cufile_file *stio_cufile_open(const stio_cufile *library, int fd, int *has_driver, char why[STIO_TEXT_BYTES]);
/* Whether a read of the file has failed; `failure` is the first one. */
int stio_cufile_failed(stio_cufile_file *file, stio_failure *failure);
/* Release it. The transfers that read it have ended. */
void stio_cufile_close(stio_cufile_file *file);

/* Deltas: the elements of a tensor that have changed, as stio/format/delta/__init__.py defines codes and values. All runs
 * on the calling thread. An element has 1, 2, 4, 8 or 16 bytes; no address needs to be aligned. */
typedef struct stio_delta stio_delta;
/* Begin to compare a tensor, in so many parts. NULL: no memory. */
stio_delta *stio_delta_new(uint64_t num_elements, int item_bytes, size_t num_parts);
/* Compare part `k`, `num_elements` of the tensor, and make `image` equal to `fresh` in the same pass. Several threads may
 * compare different parts at the same time, each part once. If codes and values of all parts cannot be shorter than the
 * tensor any more, or if there is no memory for them, the image is brought up to date and nothing is collected. If somebody
 * writes to `fresh` meanwhile, the image still is what it was with the changes. */
void stio_delta_make(stio_delta *delta, size_t k, void *image, const void *fresh, uint64_t num_elements);
/* After the last part: store how many elements have changed, and the bytes of their codes. Returns the bytes of a code, 1
 * or 2; 0: codes and values are no shorter than the tensor, or there was no memory; -1: the parts are not the tensor. */
int stio_delta_size(const stio_delta *delta, uint64_t *count, uint64_t *codes_nbytes);
/* Write the codes, as long as `stio_delta_size` says, and the values. */
void stio_delta_write(const stio_delta *delta, int code_bytes, void *codes, void *values);
void stio_delta_free(stio_delta *delta);

/* The changed elements that a delta has of a tensor. */
typedef struct stio_changes {
    const void *codes, *values;
    uint64_t num_codes;
    uint64_t code_bytes; /* 1 or 2 */
    uint64_t count;      /* elements at `values` */
} stio_changes;
/* A part of a tensor that is in memory. */
typedef struct stio_piece {
    uint64_t first, num_elements;
    void *memory;
} stio_piece;
/* Write the changed elements of several deltas of one tensor, the oldest first, into pieces that ascend and do not
 * overlap. Returns 0; the number of a delta, from 1, and nothing is written: its codes lead past the end of the tensor, or
 * are not of `count` elements; `num_changes + 1`: there is no memory. Several threads may write different pieces: each
 * call checks all codes, and passes over those before its pieces at the speed of memory. */
size_t stio_delta_apply(const stio_changes *changes, size_t num_changes, int item_bytes, uint64_t num_elements,
                     const stio_piece *pieces, size_t num_pieces);

#pragma GCC visibility pop
#endif
