/* A fuzz of the engine's deltas, against plain loops.
 *
 *     delta SECONDS SEED
 *
 * Each round makes a tensor at random: width, length, addresses that are not aligned, and how many elements change. It is
 * compared in parts on several threads; what comes out is decoded, and must be the elements that differ. Then a chain of
 * such deltas is applied to pieces of the tensor on several threads. At last the codes are damaged: what is malformed is
 * refused, and nothing is written. Before all rounds a thread writes to new bytes while they are compared, and tensors
 * with a very long gap are compared. All memory has its exact size, so that a sanitizer sees what lies outside.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../stio/native/engine.h"

#if defined(__SANITIZE_THREAD__)
#define RACES_ARE_ERRORS true
#else
#define RACES_ARE_ERRORS false
#endif
#define MAX_BYTES ((size_t)400 << 10) /* some windows of the engine's */
#define MAX_PARTS 6
#define MAX_DELTAS 5

static uint64_t seed, state;

#define REQUIRE(condition)                                                                                   \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "delta: line %d: %s, seed %llu\n", __LINE__, #condition, (unsigned long long)seed); \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

static uint64_t next_random(void) {
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}
static uint64_t below(uint64_t limit) { return next_random() % limit; }

/* Memory at any address, of an exact size. */
typedef struct memory {
    void *start;
    uint8_t *bytes;
} memory;
static memory new_memory(size_t nbytes) {
    const size_t shift = below(16);
    memory made = {malloc(nbytes + shift), NULL};
    REQUIRE(made.start != NULL || nbytes + shift == 0);
    made.bytes = (uint8_t *)made.start + shift;
    return made;
}
static memory copy_of(const uint8_t *bytes, size_t nbytes) {
    const memory made = new_memory(nbytes);
    if (nbytes > 0) memcpy(made.bytes, bytes, nbytes);
    return made;
}

/* Changed elements, and where they are. */
typedef struct delta {
    memory codes, values;
    uint64_t count, num_codes;
    int code_bytes;
} delta;

static uint64_t code_at(const delta *one, uint64_t k) {
    uint16_t code = 0;
    memcpy(&code, one->codes.bytes + k * (uint64_t)one->code_bytes, (size_t)one->code_bytes);
    return code;
}

/* Whether the codes are those of `count` elements below `num_elements`; each is written into `target`, if not NULL. */
static bool decode(const delta *one, uint64_t num_elements, size_t item, uint8_t *target) {
    const uint64_t most = one->code_bytes == 1 ? 0xFF : 0xFFFF;
    uint64_t position = 0, count = 0;
    for (uint64_t k = 0; k < one->num_codes; ++k) {
        const uint64_t code = code_at(one, k);
        position += code;
        if (code == most) continue;
        if (position >= num_elements || count == one->count) return false;
        if (target != NULL) memcpy(target + position * item, one->values.bytes + count * item, item);
        position += 1;
        count += 1;
    }
    return count == one->count && (one->num_codes == 0 || code_at(one, one->num_codes - 1) != most);
}

typedef struct task {
    stio_delta *comparison;
    size_t part;
    uint8_t *image;
    const uint8_t *fresh;
    uint64_t num_elements;
} task;
static void *compare(void *argument) {
    const task *const one = argument;
    stio_delta_make(one->comparison, one->part, one->image, one->fresh, one->num_elements);
    return NULL;
}

/* Compare while another thread writes to the new bytes: the image must be what it was with the changes. */
typedef struct scribbling {
    uint8_t *byte;
    bool is_ending; /* atomic */
} scribbling;
static void *scribble(void *argument) {
    scribbling *const one = argument;
    while (!__atomic_load_n(&one->is_ending, __ATOMIC_RELAXED)) *(volatile uint8_t *)one->byte ^= 1;
    return NULL;
}
static void require_agreement(void) {
    enum { NBYTES = 256, LINE = 64 };
    if (RACES_ARE_ERRORS) return;
    uint8_t before[NBYTES], image[NBYTES], fresh[NBYTES] = {0}, codes[NBYTES], values[NBYTES];
    memset(fresh, 2, LINE); /* the last element of a line, so that there is time between its comparison and its value */
    scribbling one = {fresh + LINE - 1, false};
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, scribble, &one) == 0);
    for (int k = 0; k < 100000; ++k) {
        memset(image, 0, NBYTES);
        memset(before, 0, NBYTES);
        stio_delta *const comparison = stio_delta_new(NBYTES, 1, 1);
        REQUIRE(comparison != NULL);
        stio_delta_make(comparison, 0, image, fresh, NBYTES);
        delta found = {.codes.bytes = codes, .values.bytes = values, .code_bytes = 1};
        REQUIRE(stio_delta_size(comparison, &found.count, &found.num_codes) == 1);
        stio_delta_write(comparison, 1, codes, values);
        stio_delta_free(comparison);
        REQUIRE(decode(&found, NBYTES, 1, before) && memcmp(before, image, NBYTES) == 0);
    }
    __atomic_store_n(&one.is_ending, true, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
}

/* Compare on a thread a part, and check all that is known of the result. Returns false if the tensor is to be whole. */
static bool compared(uint8_t *image, const uint8_t *fresh, uint64_t num_elements, size_t item, size_t num_parts,
                     delta *found) {
    const size_t nbytes = num_elements * item;
    uint64_t sizes[3] = {0}, gap = 0, count = 0; /* bytes of the codes, by their width */
    for (uint64_t k = 0; k < num_elements; ++k) {
        gap += 1;
        if (memcmp(image + k * item, fresh + k * item, item) == 0) continue;
        sizes[1] += (gap - 1) / 0xFF + 1;
        sizes[2] += 2 * ((gap - 1) / 0xFFFF + 1);
        count += 1;
        gap = 0;
    }
    const memory before = copy_of(image, nbytes);
    stio_delta *const comparison = stio_delta_new(num_elements, (int)item, num_parts);
    REQUIRE(comparison != NULL);
    task tasks[MAX_PARTS];
    pthread_t threads[MAX_PARTS];
    uint64_t at = 0;
    for (size_t k = 0; k < num_parts; ++k) {
        const uint64_t left = num_elements - at, some = k + 1 == num_parts ? left : below(left + 1);
        tasks[k] = (task){comparison, k, image + at * item, fresh + at * item, some};
        at += some;
        REQUIRE(pthread_create(&threads[k], NULL, compare, &tasks[k]) == 0);
    }
    for (size_t k = 0; k < num_parts; ++k) pthread_join(threads[k], NULL);
    REQUIRE(nbytes == 0 || memcmp(image, fresh, nbytes) == 0);
    uint64_t codes_nbytes = 0;
    const int code_bytes = sizes[1] <= sizes[2] ? 1 : 2, result = stio_delta_size(comparison, &found->count, &codes_nbytes);
    const bool is_whole = nbytes > 0 && sizes[code_bytes] + count * item >= nbytes;
    REQUIRE(result == (is_whole ? 0 : code_bytes));
    if (!is_whole) {
        REQUIRE(found->count == count && codes_nbytes == sizes[code_bytes]);
        found->code_bytes = code_bytes;
        found->num_codes = codes_nbytes / (uint64_t)code_bytes;
        found->codes = new_memory(codes_nbytes);
        found->values = new_memory(count * item);
        stio_delta_write(comparison, code_bytes, found->codes.bytes, found->values.bytes);
        REQUIRE(decode(found, num_elements, item, before.bytes));
        REQUIRE(nbytes == 0 || memcmp(before.bytes, fresh, nbytes) == 0);
    }
    stio_delta_free(comparison);
    free(before.start);
    return !is_whole;
}

typedef struct writing {
    const stio_changes *changes;
    size_t num_changes, item, num_pieces;
    uint64_t num_elements;
    const stio_piece *pieces;
    size_t result;
} writing;
static void *apply(void *argument) {
    writing *const one = argument;
    one->result = stio_delta_apply(one->changes, one->num_changes, (int)one->item, one->num_elements, one->pieces,
                                   one->num_pieces);
    return NULL;
}

/* Apply deltas to pieces of a tensor, on two threads; what is in no piece keeps its bytes. */
static void require_applied(const uint8_t *base, const delta *deltas, size_t num_deltas, uint64_t num_elements, size_t item) {
    const size_t nbytes = num_elements * item;
    const memory expected = copy_of(base, nbytes);
    stio_changes changes[MAX_DELTAS];
    size_t wrong = 0; /* the first that is malformed, from 1 */
    for (size_t k = 0; k < num_deltas; ++k) {
        const delta *const one = &deltas[k];
        changes[k] = (stio_changes){one->codes.bytes, one->values.bytes, one->num_codes, (uint64_t)one->code_bytes, one->count};
        if (wrong == 0 && !decode(one, num_elements, item, NULL)) wrong = k + 1;
    }
    for (size_t k = 0; wrong == 0 && k < num_deltas; ++k) decode(&deltas[k], num_elements, item, expected.bytes);
    stio_piece pieces[MAX_PARTS];
    memory memories[MAX_PARTS];
    size_t num_pieces = 0;
    for (uint64_t at = 0; num_pieces < MAX_PARTS;) {
        const uint64_t first = at + (below(2) ? below(num_elements - at + 1) : 0), length = below(num_elements - first + 1);
        memories[num_pieces] = copy_of(base + first * item, length * item);
        pieces[num_pieces] = (stio_piece){first, length, memories[num_pieces].bytes};
        at = first + length;
        num_pieces += 1;
    }
    const size_t half = below(num_pieces + 1);
    writing one = {changes, num_deltas, item, half, num_elements, pieces, SIZE_MAX}, other = one;
    other.pieces += half;
    other.num_pieces = num_pieces - half;
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, apply, &other) == 0);
    apply(&one);
    pthread_join(thread, NULL);
    REQUIRE(one.result == wrong && other.result == one.result);
    for (size_t k = 0; k < num_pieces; ++k) {
        const size_t length = pieces[k].num_elements * item;
        REQUIRE(length == 0 || memcmp(memories[k].bytes, expected.bytes + pieces[k].first * item, length) == 0);
        free(memories[k].start);
    }
    free(expected.start);
}

static void damage(delta *one) {
    const uint64_t nbytes = one->num_codes * (uint64_t)one->code_bytes;
    switch (below(nbytes == 0 ? 1 : 4)) {
    case 0: one->count += below(2) ? 1 : (uint64_t)-1; break; /* is not read: the counts differ */
    case 1: one->num_codes -= 1 + below(one->num_codes < 3 ? one->num_codes : 3); break;
    case 2: one->codes.bytes[below(nbytes)] = below(2) ? 0xFF : (uint8_t)next_random(); break;
    default:
        for (uint64_t k = below(nbytes); k < nbytes; ++k) one->codes.bytes[k] = below(2) ? 0xFF : (uint8_t)next_random();
    }
}

static void one_round(void) {
    const size_t item = (size_t)1 << below(5);
    const uint64_t most = MAX_BYTES / item, num_elements = below(4) == 0 ? below(300) : below(most);
    const size_t nbytes = num_elements * item;
    const memory base = new_memory(nbytes), image = new_memory(nbytes), fresh = new_memory(nbytes);
    for (size_t k = 0; k < nbytes; ++k) base.bytes[k] = (uint8_t)next_random();
    if (nbytes > 0) memcpy(image.bytes, base.bytes, nbytes);
    if (nbytes > 0) memcpy(fresh.bytes, base.bytes, nbytes);
    static const uint64_t distances[] = {1, 2, 3, 10, 50, 250, 256, 1000, 70000, 1000000};
    delta deltas[MAX_DELTAS];
    size_t num_deltas = 0;
    while (num_deltas < MAX_DELTAS) {
        const uint64_t distance = distances[below(10)];
        for (uint64_t k = below(distance); k < num_elements; k += 1 + below(2 * distance - 1))
            fresh.bytes[k * item + below(item)] ^= (uint8_t)(1 + below(255));
        if (!compared(image.bytes, fresh.bytes, num_elements, item, 1 + below(MAX_PARTS), &deltas[num_deltas]))
            break;
        num_deltas += 1;
    }
    require_applied(base.bytes, deltas, num_deltas, num_elements, item);
    if (num_deltas > 0) {
        damage(&deltas[below(num_deltas)]);
        require_applied(base.bytes, deltas, num_deltas, num_elements, item);
    }
    for (size_t k = 0; k < num_deltas; ++k) {
        free(deltas[k].codes.start);
        free(deltas[k].values.start);
    }
    free(base.start);
    free(image.start);
    free(fresh.start);
}

/* Gaps that take more codes than a block of the engine's has elements. */
static void require_long_gaps(void) {
    const size_t nbytes = (size_t)5 << 20;
    uint8_t *const image = calloc(1, nbytes), *const fresh = calloc(1, nbytes);
    REQUIRE(image != NULL && fresh != NULL);
    for (size_t item = 1; item <= 16; item *= 2) {
        delta found;
        fresh[nbytes - 1] ^= 1;
        REQUIRE(compared(image, fresh, nbytes / item, item, 1, &found) && found.count == 1);
        free(found.codes.start);
        free(found.values.start);
    }
    free(image);
    free(fresh);
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: delta SECONDS SEED\n");
        return 2;
    }
    uint64_t rounds = 0;
    seed = strtoull(arguments[2], NULL, 10);
    state = seed;
    require_agreement();
    require_long_gaps();
    const time_t until = time(NULL) + atol(arguments[1]);
    do {
        state = seed;
        one_round();
        seed += 1;
        rounds += 1;
    } while (time(NULL) < until);
    printf("rounds %llu\n", (unsigned long long)rounds);
    return 0;
}
