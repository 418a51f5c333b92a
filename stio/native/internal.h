/* What the engine's files share. Fields are guarded by `engine.lock`, unless it is said otherwise. */
#ifndef STIO_INTERNAL_H
#define STIO_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "engine.h"

typedef struct group {
    stio_range *ranges;
    size_t num_ranges;
    size_t next;         /* first range that is not cut yet */
    int64_t position;    /* in its file, from which it is not cut yet */
    uint32_t under_way;  /* chunks */
    int32_t number;
    bool is_cut;         /* all of it is cut into chunks */
    bool is_marked;      /* for `stio_transfer_arrange` */
    double started;
} group;

/* A part of one group that a thread moves: the bytes [begin, end) of its file that are in some ranges. */
typedef struct chunk {
    stio_transfer *transfer;
    group *group;
    const stio_range *ranges;
    size_t num_ranges;
    int64_t begin, end;
} chunk;

typedef enum { SLOT_FREE, SLOT_FILLING, SLOT_COPIED_FROM, SLOT_WAITED_FOR, SLOT_LOST } slot_state;

/* Pinned memory of one thread, an event, and the chunk whose copies read the memory. */
typedef struct slot {
    stio_ring *ring;
    char *memory;
    void *event;
    slot_state state;
    chunk chunk;
    struct slot *next; /* in `engine.copied_from` */
} slot;

typedef struct thread_slots {
    char *memory; /* of all slots of one thread; NULL: not allocated */
    bool is_pinned;
    slot slots[STIO_SLOTS_PER_THREAD];
} thread_slots;

struct stio_ring {
    const stio_driver *driver;
    void *context, *stream;
    int node;
    thread_slots of_thread[STIO_MAX_THREADS];
    int num_users;    /* transfers */
    int refused;      /* the driver's code where it refused to pin */
    int failed;       /* the driver's code where copies that were queued have failed: the ring is not used again */
    double left;      /* when its last transfer ended */
    uint64_t look;    /* the last one at which its oldest event had not passed */
    bool is_released; /* by its owner */
    bool is_trimmed;  /* a thread is asked to release the slots */
    bool is_releasing; /* a thread releases memory that was taken out of `of_thread` */
    stio_ring *next;
};

struct stio_transfer {
    int weight, max_chunks;
    group **groups; /* by number */
    size_t num_numbers;
    group **order; /* groups that are not cut: [first, last) */
    size_t first, last, capacity;
    stio_done *done;
    size_t num_done, done_capacity;
    uint32_t under_way;         /* chunks */
    uint32_t under_way_counted; /* those for devices, and writes */
    uint64_t turn;             /* bytes that were cut, divided by the weight, counted from the others' turn at the start */
    uint64_t moved_bytes;
    uint64_t left_bytes;       /* of groups, that are not cut; decides how many threads start */
    bool is_stopped, is_woken, has_failed, has_ended, direct_refused, cufile_refused;
    stio_failure failure;
    pthread_cond_t changed;
    pthread_mutex_t touching; /* guards `patience` */
    double patience;          /* seconds that touches may still take */
    stio_ring **rings;
    size_t num_rings;
    unsigned generation; /* of the process: a forked child does not wait for its parent's */
    struct stio_transfer *next;
};

typedef struct engine {
    pthread_mutex_t lock;
    pthread_cond_t work;    /* for threads: a chunk, a slot to wait for, a ring to trim, the end */
    pthread_cond_t changed; /* a slot is free, a ring is trimmed, a thread has ended */
    stio_transfer *transfers;
    stio_ring *rings;
    slot *copied_from, *last_copied_from; /* slots whose events nobody waits for, oldest first */
    int limit, num_threads, num_idle;
    int num_waiting; /* threads that wait for events, or are about to */
    int num_in_files; /* threads that move chunks of files, and may wait for a disk */
    int num_joinable; /* threads that nobody has joined */
    int idle_ms;
    stio_pinned *touched;    /* memory that is being touched before it is pinned */
    stio_pinned *unpinned;   /* memory that nobody uses any more */
    uint64_t pinned_bytes;   /* of slots too */
    bool is_unpinning;
    uint64_t num_looks; /* of `stio_ring_end_passed` */
    bool is_ending;
    unsigned generation;
} engine_state;

extern engine_state engine;

double stio_now(void);

#define STIO_PORTABLE 1u /* pinned for all devices */

/* drivers.c */
typedef struct stio_symbol {
    const char *name;
    void *into;
} stio_symbol;
/* Load a library, and find functions in it. Returns NULL, and why, if one is missing. */
void *stio_library_of(const char *name, const stio_symbol *symbols, size_t num_symbols, char why[STIO_TEXT_BYTES]);

/* cufile.c */
/* Read a chunk of a range with STIO_CUFILE. False: the file has the failure, and nothing writes to the memory. Called
 * without the lock. */
bool stio_cufile_read(const chunk *chunk);

/* ring.c. `thread` is the calling thread's number. */
/* Make a context the current one. Called by threads of the engine only, without the lock. False: `failure` is filled. */
bool stio_make_current(const stio_driver *driver, void *context, stio_failure *failure);
/* Fill `failure` with a code of the driver and its text; return false. */
bool stio_driver_failed(const stio_driver *driver, int code, stio_failure *failure);
/* Return a slot of this thread that no copy reads, in the state SLOT_FILLING. Waits for its oldest copies. NULL: `failure`
 * is filled. Called without the lock. */
slot *stio_ring_acquire(stio_ring *ring, int thread, stio_failure *failure);
/* Copy from a filled slot, or with `source` from there, to the ranges of its chunk; the slot is then free behind that.
 * False: `failure` is filled, nothing reads the memory any more. Called without the lock. */
bool stio_ring_submit(slot *slot, const char *memory, int64_t begin, stio_failure *failure);
/* Whether `thread` gets a slot without a wait. Called with the lock. */
bool stio_ring_has_slot(const stio_ring *ring, int thread);
/* Take the oldest slot that is copied from, and wait for it; false: there is none. Called with the lock. */
bool stio_ring_wait_oldest(void);
/* End the chunks of other rings whose events have passed, without a wait. Called with the lock, which is released
 * meanwhile. */
void stio_ring_end_passed(const stio_ring *except);
/* Release memory of rings without users: where it was asked for, and where nobody used it for `engine.idle_ms`. Called with
 * the lock. Returns when the next ring is to be looked at again, 0: none. */
double stio_rings_trim(void);
/* Release a ring of which a transfer was freed. Called with the lock. */
void stio_ring_leave(stio_ring *ring);
/* Forget what a parent had queued, and its slots, whose memory a child has not. Called in a forked child. */
void stio_rings_forget(void);

/* engine.c */
/* Wake threads, and start some until there are so many, as far as the limits allow. Called with the lock. */
void stio_want_threads(size_t wanted);
/* The calling thread waits for events no more, if it was counted so. Called with the lock. */
void stio_waits_no_more(void);
/* A chunk has ended. With `failure` it has failed, if that has a kind. Called with the lock. */
void stio_chunk_ended(const chunk *chunk, const stio_failure *failure);

/* pinned.c */
/* Map whole pages, huge ones where there are, on a node if it is not -1. NULL: no memory. */
char *stio_pages_map(size_t nbytes, int node);
void stio_pages_touch(char *memory, size_t nbytes);
void stio_pages_unmap(char *memory, size_t nbytes);
/* Touch a part of memory that is to be pinned, or release memory; false: there is no such work. Called by threads of the
 * engine with the lock, which is released meanwhile. */
bool stio_pinned_work(void);
/* Forget what a parent touches and releases. Called in a forked child. */
void stio_pinned_forget(void);

#endif
