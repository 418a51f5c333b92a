/* Simulated devices as a library, for the tests in Python. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../stio/native/engine.h"
#include "device.h"

static void fail(const char *what, long one, long two) {
    fprintf(stderr, "simulated device: %s (%ld, %ld)\n", what, one, two);
    abort();
}

/* Return the number of the thread's current device, in the shape of CUDA's function. */
int fake_current(int *number) {
    *number = current == NULL ? -1 : (int)(current - devices);
    return 0;
}

const void *fake_table(void) { return &driver; }

void *fake_device(int number) {
    device *const one = &devices[number];
    if (one->thread == 0) device_start(one, 1, 0);
    return one;
}

void fake_pause(device *one, bool is_paused) {
    pthread_mutex_lock(&one->lock);
    one->is_paused = is_paused;
    one->steps = 0;
    pthread_cond_broadcast(&one->changed);
    pthread_mutex_unlock(&one->lock);
}

/* Let so many operations run although it is paused. */
void fake_step(device *one, int count) {
    pthread_mutex_lock(&one->lock);
    one->steps = count;
    pthread_cond_broadcast(&one->changed);
    pthread_mutex_unlock(&one->lock);
}

/* Let the n-th call from now on of copy, event_query of an event that has passed, event_create or make_current fail, 0: none; refuse to pin. */
void fake_fail(device *one, int copy, int event, int creation, int context, bool pin) {
    pthread_mutex_lock(&one->lock);
    one->copies_until_refused = copy;
    one->events_until_failed = event;
    one->creations_until_refused = creation;
    one->contexts_until_refused = context;
    __atomic_store_n(&one->pin_refused, pin, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&one->lock);
}

void fake_delay(device *one, unsigned max_delay_us) {
    pthread_mutex_lock(&one->lock);
    one->max_delay_us = max_delay_us;
    pthread_mutex_unlock(&one->lock);
}

uint64_t fake_num_copies(device *one) {
    pthread_mutex_lock(&one->lock);
    const uint64_t number = one->num_copies;
    pthread_mutex_unlock(&one->lock);
    return number;
}

/* Let calls that unpin memory wait, or go on. */
void fake_hold_unpin(bool is_held) {
    __atomic_store_n(&unpin_waits, false, __ATOMIC_RELEASE);
    __atomic_store_n(&unpin_is_held, is_held, __ATOMIC_RELEASE);
}

bool fake_unpin_waits(void) { return __atomic_load_n(&unpin_waits, __ATOMIC_ACQUIRE); }

bool fake_refers(device *one, const char *memory, size_t nbytes) { return refers(one, memory, nbytes); }

int64_t fake_pinned_bytes(void) {
    pthread_mutex_lock(&pins_lock);
    const int64_t nbytes = pinned_bytes;
    pthread_mutex_unlock(&pins_lock);
    return nbytes;
}
