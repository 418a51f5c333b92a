/* Rings: slots of pinned memory out of which a device copies, and the events behind the copies.
 *
 * A slot belongs to one thread. The thread fills it, queues the copies of its chunk on the ring's stream, and an event
 * behind them. The chunk has ended when the event has passed. The thread waits for it when it needs the slot again; a
 * thread without other work waits for the oldest one of all. So while reads are slower than the device nobody waits for
 * it. To wait is to ask the driver again after a pause. A thread that is busy with chunks for the host, or for another
 * device, asks after each of them whether the oldest event has passed: otherwise such work would keep a load from its end.
 * Calls of the driver are made by the engine's threads only: to make a context the current one would change the current
 * device of a caller's thread.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "internal.h"

#define SLOTS_BYTES (STIO_SLOTS_PER_THREAD * STIO_CHUNK_BYTES)
#define DISABLE_TIMING 2u
#define RELAXED 2 /* of capture modes: this thread may make any call while another one captures a graph */
#define SHORT_PAUSE_NS 20000L
#define LONG_PAUSE_NS 500000L
#define SHORT_PAUSES 100 /* then the pauses become longer: the device is busy with other work */

static _Thread_local void *current_context;

bool stio_driver_failed(const stio_driver *driver, int code, stio_failure *failure) {
    const char *text = NULL;
    if (driver->error_text != NULL) driver->error_text(code, &text);
    failure->kind = STIO_DRIVER;
    failure->code = code;
    snprintf(failure->text, sizeof failure->text, "%s", text != NULL ? text : "");
    return false;
}

bool stio_make_current(const stio_driver *driver, void *context, stio_failure *failure) {
    if (current_context == context && current_context != NULL) return true;
    current_context = NULL; /* unknown, if one of the two calls fails */
    int code = driver->make_current(context), mode = RELAXED;
    if (code == 0 && driver->exchange_capture_mode != NULL) code = driver->exchange_capture_mode(&mode);
    if (code != 0) return stio_driver_failed(driver, code, failure);
    current_context = context;
    return true;
}

static bool make_current(stio_ring *ring, stio_failure *failure) {
    return stio_make_current(ring->driver, ring->context, failure);
}

stio_ring *stio_ring_new(const stio_driver *driver, void *context, void *stream, int node) {
    stio_ring *const ring = calloc(1, sizeof *ring);
    if (ring == NULL) return NULL;
    ring->driver = driver;
    ring->context = context;
    ring->stream = stream;
    ring->node = node;
    for (int thread = 0; thread < STIO_MAX_THREADS; ++thread)
        for (int k = 0; k < STIO_SLOTS_PER_THREAD; ++k) ring->of_thread[thread].slots[k].ring = ring;
    pthread_mutex_lock(&engine.lock);
    ring->next = engine.rings;
    engine.rings = ring;
    pthread_mutex_unlock(&engine.lock);
    return ring;
}

/* Allocate the slots of a thread. Called without the lock: only this thread uses them, while it has a chunk of the ring. */
static bool allocate(stio_ring *ring, int thread, stio_failure *failure) {
    char *const memory = stio_pages_map(SLOTS_BYTES, ring->node);
    if (memory == NULL) {
        failure->kind = STIO_NO_MEMORY;
        failure->nbytes = SLOTS_BYTES;
        return false;
    }
    slot *const slots = ring->of_thread[thread].slots;
    int code = 0, made = 0;
    for (; made < STIO_SLOTS_PER_THREAD && code == 0; ++made)
        code = ring->driver->event_create(&slots[made].event, DISABLE_TIMING);
    if (code != 0) {
        for (int k = 0; k < made - 1; ++k) ring->driver->event_destroy(slots[k].event);
        stio_pages_unmap(memory, SLOTS_BYTES);
        return stio_driver_failed(ring->driver, code, failure);
    }
    stio_pages_touch(memory, SLOTS_BYTES);
    const int refused = ring->driver->pin(memory, SLOTS_BYTES, STIO_PORTABLE);
    pthread_mutex_lock(&engine.lock);
    for (int k = 0; k < STIO_SLOTS_PER_THREAD; ++k) {
        slots[k].memory = memory + (size_t)k * STIO_CHUNK_BYTES;
        slots[k].state = SLOT_FREE;
    }
    ring->of_thread[thread].memory = memory;
    ring->of_thread[thread].is_pinned = refused == 0;
    if (refused != 0) ring->refused = refused;
    if (refused == 0) engine.pinned_bytes += SLOTS_BYTES;
    pthread_mutex_unlock(&engine.lock);
    return true;
}

/* Wait until an event has passed. The driver's own wait either spins, or needs an interrupt of the device for each event,
 * and those cost 4 % of the bus (H200). */
static int wait_until_passed(const stio_driver *driver, void *event) {
    struct timespec pause = {0, SHORT_PAUSE_NS};
    for (int k = 0;; ++k) {
        const int code = driver->event_query(event);
        if (code != driver->not_ready) return code;
        if (k >= SHORT_PAUSES) pause.tv_nsec = pause.tv_nsec < LONG_PAUSE_NS / 2 ? 2 * pause.tv_nsec : LONG_PAUSE_NS;
        nanosleep(&pause, NULL);
    }
}

/* Wait for the event of a slot, which is in the state SLOT_WAITED_FOR; its chunk has ended then. Called with the lock. */
static void wait_for(slot *one) {
    stio_ring *const ring = one->ring;
    stio_failure failure = {0}, ignored = {0};
    pthread_mutex_unlock(&engine.lock);
    make_current(ring, &ignored); /* refused: the copies are under way, so the event is waited for nevertheless */
    const int code = wait_until_passed(ring->driver, one->event);
    if (code != 0) stio_driver_failed(ring->driver, code, &failure);
    pthread_mutex_lock(&engine.lock);
    if (failure.kind != 0) ring->failed = failure.code;
    one->state = failure.kind != 0 ? SLOT_LOST : SLOT_FREE; /* the device may still read a slot whose event fails */
    stio_chunk_ended(&one->chunk, &failure);
    pthread_cond_broadcast(&engine.changed);
}

static void unlink_copied_from(slot *one) {
    slot *before = NULL;
    for (slot *at = engine.copied_from; at != one; at = at->next) before = at;
    if (before == NULL)
        engine.copied_from = one->next;
    else
        before->next = one->next;
    if (engine.last_copied_from == one) engine.last_copied_from = before;
    one->next = NULL;
    one->state = SLOT_WAITED_FOR;
}

bool stio_ring_wait_oldest(void) {
    slot *const oldest = engine.copied_from;
    if (oldest == NULL) return false;
    unlink_copied_from(oldest);
    wait_for(oldest);
    return true;
}

void stio_ring_end_passed(const stio_ring *except) {
    const uint64_t look = ++engine.num_looks;
    for (;;) {
        slot *found = engine.copied_from;
        while (found != NULL && (found->ring == except || found->ring->look >= look)) found = found->next;
        if (found == NULL) return;
        stio_ring *const ring = found->ring;
        unlink_copied_from(found);
        pthread_mutex_unlock(&engine.lock);
        stio_failure ignored = {0};
        make_current(ring, &ignored);
        const bool is_ready = ring->driver->event_query(found->event) != ring->driver->not_ready;
        pthread_mutex_lock(&engine.lock);
        if (is_ready) {
            wait_for(found);
            continue;
        }
        ring->look = look; /* those behind it on the ring's stream have not passed either */
        found->state = SLOT_COPIED_FROM;
        found->next = engine.copied_from;
        engine.copied_from = found;
        if (engine.last_copied_from == NULL) engine.last_copied_from = found;
        if (engine.num_idle > 0) pthread_cond_signal(&engine.work);
        pthread_cond_broadcast(&engine.changed); /* its thread may wait for it */
    }
}

bool stio_ring_has_slot(const stio_ring *ring, int thread) {
    const thread_slots *const mine = &ring->of_thread[thread];
    bool has_slot = mine->memory == NULL || ring->failed != 0; /* it allocates them, or fails at once */
    for (int k = 0; k < STIO_SLOTS_PER_THREAD; ++k) has_slot = has_slot || mine->slots[k].state == SLOT_FREE;
    return has_slot;
}

slot *stio_ring_acquire(stio_ring *ring, int thread, stio_failure *failure) {
    if (!make_current(ring, failure)) return NULL;
    pthread_mutex_lock(&engine.lock);
    const bool is_allocated = ring->of_thread[thread].memory != NULL;
    int failed = ring->failed;
    pthread_mutex_unlock(&engine.lock);
    if (failed != 0) {
        stio_driver_failed(ring->driver, failed, failure);
        return NULL;
    }
    if (!is_allocated && !allocate(ring, thread, failure)) return NULL;
    slot *found = NULL;
    slot *const slots = ring->of_thread[thread].slots;
    pthread_mutex_lock(&engine.lock);
    while (found == NULL && ring->failed == 0) {
        slot *oldest = NULL;
        for (int k = 0; k < STIO_SLOTS_PER_THREAD && found == NULL; ++k)
            if (slots[k].state == SLOT_FREE) found = &slots[k];
        if (found != NULL) break;
        for (slot *at = engine.copied_from; at != NULL && oldest == NULL; at = at->next)
            if (at >= slots && at < slots + STIO_SLOTS_PER_THREAD) oldest = at;
        if (oldest != NULL) {
            unlink_copied_from(oldest);
            wait_for(oldest);
        } else {
            pthread_cond_wait(&engine.changed, &engine.lock); /* another thread waits for each of them */
        }
    }
    if (found != NULL) found->state = SLOT_FILLING;
    stio_waits_no_more();
    failed = ring->failed;
    pthread_mutex_unlock(&engine.lock);
    if (found == NULL) stio_driver_failed(ring->driver, failed, failure);
    return found;
}

bool stio_ring_submit(slot *filled, const char *memory, int64_t begin, stio_failure *failure) {
    stio_ring *const ring = filled->ring;
    const chunk *const one = &filled->chunk;
    int code = 0;
    bool queued = false;
    for (size_t k = 0; k < one->num_ranges && code == 0; ++k) {
        const stio_range *const range = &one->ranges[k];
        const int64_t low = range->offset > one->begin ? range->offset : one->begin;
        const int64_t stop = range->offset + (int64_t)range->nbytes, high = stop < one->end ? stop : one->end;
        if (low >= high) continue;
        const uint64_t target = range->target + (uint64_t)(low - range->offset);
        code = ring->driver->copy(target, memory + (low - begin), (size_t)(high - low), ring->stream);
        queued = queued || code == 0;
    }
    const int refused = code;
    code = 0;
    if (refused == 0 || queued) code = ring->driver->event_record(filled->event, ring->stream);
    if (refused != 0 && queued && code == 0) code = wait_until_passed(ring->driver, filled->event);
    if (refused != 0 || code != 0) {
        stio_driver_failed(ring->driver, refused != 0 ? refused : code, failure);
        pthread_mutex_lock(&engine.lock);
        if (code != 0) ring->failed = code; /* a copy that is only refused is the error of its load alone */
        filled->state = queued && code != 0 ? SLOT_LOST : SLOT_FREE;
        pthread_cond_broadcast(&engine.changed);
        pthread_mutex_unlock(&engine.lock);
        return false;
    }
    pthread_mutex_lock(&engine.lock);
    filled->state = SLOT_COPIED_FROM;
    filled->next = NULL;
    if (engine.last_copied_from != NULL)
        engine.last_copied_from->next = filled;
    else
        engine.copied_from = filled;
    engine.last_copied_from = filled;
    if (engine.num_idle > 0) pthread_cond_signal(&engine.work); /* one of them waits for the event */
    pthread_mutex_unlock(&engine.lock);
    return true;
}

/* Release the slots of a ring without users. Called with the lock, which is released meanwhile. A transfer may begin to use
 * the ring then, so the slots are taken out of the ring first, all of them before the lock is released. */
static void release_slots(stio_ring *ring) {
    thread_slots taken[STIO_MAX_THREADS];
    memcpy(taken, ring->of_thread, sizeof taken);
    for (int thread = 0; thread < STIO_MAX_THREADS; ++thread) ring->of_thread[thread].memory = NULL;
    ring->is_trimmed = false;
    ring->is_releasing = true;
    pthread_mutex_unlock(&engine.lock);
    uint64_t unpinned_bytes = 0;
    for (int thread = 0; thread < STIO_MAX_THREADS; ++thread) {
        char *const memory = taken[thread].memory;
        stio_failure ignored = {0};
        if (memory == NULL) continue;
        /* What the device may still read is kept until the process ends. */
        bool is_lost = !make_current(ring, &ignored);
        slot *const slots = taken[thread].slots;
        for (int k = 0; k < STIO_SLOTS_PER_THREAD; ++k) is_lost = is_lost || slots[k].state == SLOT_LOST;
        if (is_lost) continue;
        for (int k = 0; k < STIO_SLOTS_PER_THREAD; ++k) ring->driver->event_destroy(slots[k].event);
        if (taken[thread].is_pinned && ring->driver->unpin(memory) == 0) unpinned_bytes += SLOTS_BYTES;
        stio_pages_unmap(memory, SLOTS_BYTES);
    }
    pthread_mutex_lock(&engine.lock);
    engine.pinned_bytes -= unpinned_bytes;
    ring->is_releasing = false;
}

static uint64_t held_bytes(const stio_ring *ring) {
    uint64_t held = 0;
    for (int thread = 0; thread < STIO_MAX_THREADS; ++thread)
        if (ring->of_thread[thread].memory != NULL) held += SLOTS_BYTES;
    return held;
}

/* Return a ring to release. `due`: when the first of the others is idle for long enough, 0: none. */
static stio_ring *to_release(double *due) {
    *due = 0;
    for (stio_ring *ring = engine.rings; ring != NULL; ring = ring->next) {
        if (ring->num_users != 0 || ring->is_releasing) continue;
        if (ring->is_trimmed || ring->is_released) return ring;
        if (held_bytes(ring) == 0) continue;
        const double until = ring->left + engine.idle_ms * 1e-3;
        if (until <= stio_now()) return ring;
        if (*due == 0 || until < *due) *due = until;
    }
    return NULL;
}

double stio_rings_trim(void) {
    double due;
    for (stio_ring *ring; (ring = to_release(&due)) != NULL;) {
        release_slots(ring); /* releases the lock meanwhile, so the list may change */
        if (ring->is_released && ring->num_users == 0) {
            stio_ring **at = &engine.rings;
            while (*at != ring) at = &(*at)->next;
            *at = ring->next;
            free(ring);
        }
        pthread_cond_broadcast(&engine.changed);
    }
    return due;
}

uint64_t stio_ring_state(stio_ring *ring, int *refused, int *failed) {
    pthread_mutex_lock(&engine.lock);
    const uint64_t held = held_bytes(ring);
    *refused = ring->refused;
    *failed = ring->failed;
    pthread_mutex_unlock(&engine.lock);
    return held;
}

void stio_ring_trim(stio_ring *ring) {
    pthread_mutex_lock(&engine.lock);
    if (engine.num_threads > 0 && !engine.is_ending) {
        ring->is_trimmed = true;
        pthread_cond_broadcast(&engine.work);
        while (((ring->is_trimmed && ring->num_users == 0) || ring->is_releasing) && engine.num_threads > 0)
            pthread_cond_wait(&engine.changed, &engine.lock);
    }
    pthread_mutex_unlock(&engine.lock);
}

void stio_ring_free(stio_ring *ring) {
    pthread_mutex_lock(&engine.lock);
    ring->is_released = true;
    pthread_cond_broadcast(&engine.work);
    pthread_mutex_unlock(&engine.lock);
}

void stio_ring_leave(stio_ring *ring) {
    ring->num_users -= 1;
    ring->left = stio_now();
    if (ring->num_users == 0) pthread_cond_signal(&engine.work); /* a thread looks when it is to be released */
}

void stio_rings_forget(void) {
    for (stio_ring *ring = engine.rings; ring != NULL; ring = ring->next) {
        for (int thread = 0; thread < STIO_MAX_THREADS; ++thread) ring->of_thread[thread].memory = NULL;
        ring->num_users = 0;
        ring->is_trimmed = ring->is_releasing = false;
    }
    engine.copied_from = engine.last_copied_from = NULL;
}
