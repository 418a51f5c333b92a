/* The changed elements of a tensor: found by comparing an image of it with its new bytes, and written into memory.
 *
 * The format is that of stio/format/delta/__init__.py. To compare is to make a mask of the bytes that differ in each line
 * of 64, fold it to elements and take its bits: one code for all widths. A part collects codes of one byte, as if it were
 * a tensor, in memory that grows; of that, the parts' codes are joined, or made codes of two bytes if these are shorter.
 * To apply is to decode all deltas of a tensor side by side, a window at a time, so that the window stays in the
 * processor's cache however many they are. Nothing here takes a lock.
 */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "engine.h"

#define LINE ((size_t)64)
#define COMPARED_BYTES ((size_t)16 << 10) /* between two looks at the memory that is left, and at the other parts */
#define AHEAD_BYTES 2048 /* prefetched: at 2 % mispredicted branches hide the memory's latency no more; 4.9 GB/s, not 3.5 */
#define WINDOW_BYTES ((uint64_t)128 << 10) /* of the target; with what is read beside it, it fits a cache of 256 KiB */
#define SUMMED ((size_t)256) /* codes; their sum fits 32 bits */
#define INLINE static inline __attribute__((always_inline))

enum { M1 = 0xFF, M2 = 0xFFFF }; /* the largest codes */

typedef struct delta_part {
    uint64_t num_elements, tail; /* `tail`: unchanged elements behind the last change */
    uint64_t count;              /* changed elements */
    uint64_t escapes;            /* codes M2, if codes had two bytes */
    uint8_t *codes, *values;
    size_t codes_nbytes, codes_capacity, values_capacity;
} delta_part;

struct stio_delta {
    uint64_t num_elements, max_count; /* `max_count`: so many changes are too long, with one byte for each code */
    uint64_t count;                   /* atomic: of all parts */
    bool is_too_long;                 /* atomic */
    int shift;                        /* an element has `1 << shift` bytes */
    size_t num_parts;
    delta_part parts[];
};

stio_delta *stio_delta_new(uint64_t num_elements, int item_bytes, size_t num_parts) {
    stio_delta *const made = calloc(1, sizeof *made + num_parts * sizeof(delta_part));
    if (made == NULL) return NULL;
    const uint64_t each = (uint64_t)item_bytes + 1;
    made->num_elements = num_elements;
    made->max_count = (num_elements * (uint64_t)item_bytes + each - 1) / each;
    made->shift = __builtin_ctz((unsigned)item_bytes);
    made->num_parts = num_parts;
    return made;
}

void stio_delta_free(stio_delta *delta) {
    for (size_t k = 0; k < delta->num_parts; ++k) {
        free(delta->parts[k].codes);
        free(delta->parts[k].values);
    }
    free(delta);
}

/* Comparing. */

/* The bytes that differ, of 16: a bit for each, the first one the lowest. */
#ifdef __SSE2__
INLINE uint64_t differing_of_16(const uint8_t *one, const uint8_t *other) {
    const __m128i a = _mm_loadu_si128((const __m128i *)(const void *)one);
    const __m128i b = _mm_loadu_si128((const __m128i *)(const void *)other);
    return (uint64_t)(_mm_movemask_epi8(_mm_cmpeq_epi8(a, b)) ^ 0xFFFF);
}
#else
INLINE uint64_t differing_of_8(const uint8_t *one, const uint8_t *other) {
    const uint64_t low = 0x7F7F7F7F7F7F7F7F; /* of each byte all bits but the highest */
    uint64_t a, b;
    memcpy(&a, one, 8);
    memcpy(&b, other, 8);
    const uint64_t x = a ^ b, highest = (((x & low) + low) | x) & ~low;
    return (highest >> 7) * 0x0102040810204080 >> 56; /* little-endian */
}
INLINE uint64_t differing_of_16(const uint8_t *one, const uint8_t *other) {
    return differing_of_8(one, other) | differing_of_8(one + 8, other + 8) << 8;
}
#endif

/* The bytes of a line that differ. */
INLINE uint64_t differing(const uint8_t *one, const uint8_t *other) {
    return differing_of_16(one, other) | differing_of_16(one + 16, other + 16) << 16 |
           differing_of_16(one + 32, other + 32) << 32 | differing_of_16(one + 48, other + 48) << 48;
}

/* The elements of a line that differ: the bit of the first byte of each. */
INLINE uint64_t folded(uint64_t mask, int shift) {
    static const uint64_t first[] = {~(uint64_t)0, 0x5555555555555555, 0x1111111111111111, 0x0101010101010101,
                                     0x0001000100010001};
    for (int k = 0; k < shift; ++k) mask |= mask >> (1 << k);
    return mask & first[shift];
}

/* Compare `nbytes`, a multiple of a line, at element `at` of the part. There is memory for all that may be found. */
INLINE void compare_lines(delta_part *part, uint64_t at, uint8_t *image, const uint8_t *fresh, size_t nbytes,
                          int shift) {
    uint64_t next = at - part->tail; /* the element behind the last change */
    uint64_t count = 0;
    uint8_t *code = part->codes + part->codes_nbytes, *value = part->values + (part->count << shift);
    for (size_t k = 0; k < nbytes; k += LINE) {
        __builtin_prefetch(image + k + AHEAD_BYTES);
        __builtin_prefetch(fresh + k + AHEAD_BYTES);
        uint8_t line[LINE]; /* read once: image and changes agree even if somebody writes to the new bytes meanwhile */
        memcpy(line, fresh + k, LINE);
        uint64_t mask = folded(differing(image + k, line), shift);
        if (mask == 0) continue;
        memcpy(image + k, line, LINE);
        do {
            const size_t byte = k + (size_t)__builtin_ctzll(mask);
            uint64_t gap = at + (byte >> shift) - next;
            mask &= mask - 1;
            next += gap + 1;
            if (gap >= M1) {
                part->escapes += gap / M2;
                memset(code, M1, gap / M1);
                code += gap / M1;
                gap %= M1;
            }
            *code++ = (uint8_t)gap;
            memcpy(value, image + byte, (size_t)1 << shift);
            value += (size_t)1 << shift;
            count += 1;
        } while (mask != 0);
    }
    part->count += count;
    part->codes_nbytes = (size_t)(code - part->codes);
    part->tail = at + (nbytes >> shift) - next;
}

static void compare(delta_part *part, int shift, uint64_t at, uint8_t *image, const uint8_t *fresh, size_t nbytes) {
    switch (shift) {
    case 0: compare_lines(part, at, image, fresh, nbytes, 0); break;
    case 1: compare_lines(part, at, image, fresh, nbytes, 1); break;
    case 2: compare_lines(part, at, image, fresh, nbytes, 2); break;
    case 3: compare_lines(part, at, image, fresh, nbytes, 3); break;
    default: compare_lines(part, at, image, fresh, nbytes, 4); break;
    }
}

/* Compare less than a line. */
static void compare_rest(delta_part *part, int shift, uint64_t at, uint8_t *image, const uint8_t *fresh, size_t nbytes) {
    uint8_t old[LINE] = {0}, new[LINE] = {0};
    memcpy(old, image, nbytes);
    memcpy(new, fresh, nbytes);
    compare(part, shift, at, old, new, LINE);
    memcpy(image, new, nbytes);
    part->tail -= (LINE - nbytes) >> shift;
}

static bool grown(uint8_t **memory, size_t *capacity, size_t needed) {
    if (needed <= *capacity) return true;
    if (needed < *capacity + *capacity / 2) needed = *capacity + *capacity / 2;
    uint8_t *const larger = realloc(*memory, needed); /* what is not written is not touched */
    if (larger == NULL) return false;
    *memory = larger;
    *capacity = needed;
    return true;
}

/* Make sure that there is memory for all that may be found in so many bytes. */
static bool has_room(delta_part *part, int shift, size_t nbytes) {
    const uint64_t items = nbytes >> shift;
    return grown(&part->values, &part->values_capacity, (part->count << shift) + nbytes) &&
           grown(&part->codes, &part->codes_capacity, part->codes_nbytes + items + (part->tail + items) / M1 + 1);
}

void stio_delta_make(stio_delta *delta, size_t k, void *image, const void *fresh, uint64_t num_elements) {
    delta_part *const part = &delta->parts[k];
    const int shift = delta->shift;
    const size_t nbytes = num_elements << shift;
    uint8_t *const old = image;
    const uint8_t *const new = fresh;
    size_t at = 0;
    while (at < nbytes && !__atomic_load_n(&delta->is_too_long, __ATOMIC_RELAXED)) {
        const size_t left = nbytes - at, some = left < COMPARED_BYTES ? left : COMPARED_BYTES;
        const size_t lines = some / LINE * LINE;
        const uint64_t before = part->count;
        bool is_too_long = !has_room(part, shift, (some + LINE - 1) / LINE * LINE);
        if (!is_too_long) {
            compare(part, shift, at >> shift, old + at, new + at, lines);
            at += lines;
            if (lines < some) compare_rest(part, shift, at >> shift, old + at, new + at, some - lines);
            at += some - lines;
            const uint64_t count = __atomic_add_fetch(&delta->count, part->count - before, __ATOMIC_RELAXED);
            is_too_long = count >= delta->max_count;
        }
        if (is_too_long) __atomic_store_n(&delta->is_too_long, true, __ATOMIC_RELAXED);
    }
    if (at < nbytes) memcpy(old + at, new + at, nbytes - at);
    part->num_elements = num_elements;
}

/* Joining. */

/* The gap before the first change of a part, and the number of its codes. */
static uint64_t lead_of(const delta_part *part, size_t *num_codes) {
    size_t k = 0;
    while (part->codes[k] == M1) ++k;
    *num_codes = k + 1;
    return (uint64_t)k * M1 + part->codes[k];
}

int stio_delta_size(const stio_delta *delta, uint64_t *count, uint64_t *codes_nbytes) {
    uint64_t compared = 0, tail = 0, escapes = 0, changed = 0, one = 0;
    for (size_t k = 0; k < delta->num_parts; ++k) {
        const delta_part *const part = &delta->parts[k];
        compared += part->num_elements;
        if (part->count > 0) {
            size_t num_codes;
            const uint64_t lead = lead_of(part, &num_codes);
            changed += part->count;
            one += part->codes_nbytes - num_codes + (tail + lead) / M1 + 1;
            escapes += part->escapes - lead / M2 + (tail + lead) / M2;
            tail = 0;
        }
        tail += part->tail;
    }
    if (compared != delta->num_elements) return -1;
    if (delta->is_too_long) return 0;
    const uint64_t two = 2 * (changed + escapes);
    const uint64_t whole = delta->num_elements << delta->shift;
    *count = changed;
    *codes_nbytes = one <= two ? one : two;
    if (whole > 0 && *codes_nbytes + (changed << delta->shift) >= whole) return 0;
    return one <= two ? 1 : 2;
}

/* Write the codes of a gap, and return where they end. */
INLINE uint8_t *put(uint8_t *code, int code_bytes, uint64_t gap) {
    const uint64_t most = code_bytes == 1 ? M1 : M2;
    const size_t skipped = (size_t)(gap / most) * (size_t)code_bytes;
    memset(code, 0xFF, skipped);
    const uint16_t last = (uint16_t)(gap % most);
    memcpy(code + skipped, &last, (size_t)code_bytes); /* little-endian */
    return code + skipped + code_bytes;
}

void stio_delta_write(const stio_delta *delta, int code_bytes, void *codes, void *values) {
    uint8_t *code = codes, *value = values;
    uint64_t tail = 0;
    for (size_t k = 0; k < delta->num_parts; ++k) {
        const delta_part *const part = &delta->parts[k];
        if (part->count > 0) {
            size_t done;
            code = put(code, code_bytes, tail + lead_of(part, &done));
            if (code_bytes == 1) {
                memcpy(code, part->codes + done, part->codes_nbytes - done);
                code += part->codes_nbytes - done;
            } else {
                for (uint64_t gap = 0; done < part->codes_nbytes; ++done) {
                    gap += part->codes[done];
                    if (part->codes[done] == M1) continue;
                    code = put(code, 2, gap);
                    gap = 0;
                }
            }
            memcpy(value, part->values, part->count << delta->shift);
            value += part->count << delta->shift;
            tail = 0;
        }
        tail += part->tail;
    }
}

/* Applying. */

typedef struct cursor {
    const uint8_t *code, *end, *value;
    uint64_t next; /* the next change; UINT64_MAX: there is none */
} cursor;

INLINE uint16_t code_at(const uint8_t *codes, uint64_t k, int code_bytes) {
    uint16_t code;
    if (code_bytes == 1) return codes[k]; /* the compiler makes vectors of this, and not of a `memcpy` of one byte */
    memcpy(&code, codes + 2 * k, 2); /* little-endian */
    return code;
}

/* By how many elements some codes go on, at most SUMMED of them; `*count`: how many are changes. */
INLINE uint64_t summed(const uint8_t *codes, size_t num_codes, int code_bytes, uint64_t *count) {
    uint32_t sum = 0, changes = 0;
    for (size_t k = 0; k < num_codes; ++k) {
        const uint16_t code = code_at(codes, k, code_bytes);
        sum += code;
        changes += code != (code_bytes == 1 ? M1 : M2);
    }
    *count = changes;
    return (uint64_t)sum + changes;
}

INLINE bool is_valid(const stio_changes *one, uint64_t num_elements, int code_bytes) {
    const uint8_t *const codes = one->codes;
    uint64_t end = 0, count = 0, changes;
    for (uint64_t k = 0; k < one->num_codes; k += SUMMED) {
        const uint8_t *const block = codes + k * (size_t)code_bytes;
        if (one->num_codes - k >= SUMMED) end += summed(block, SUMMED, code_bytes, &changes); /* a loop of known length */
        else end += summed(block, (size_t)(one->num_codes - k), code_bytes, &changes);
        count += changes;
        if (end > num_elements) return false;
    }
    if (count != one->count) return false;
    if (one->num_codes == 0) return true;
    return code_at(codes, one->num_codes - 1, code_bytes) != (code_bytes == 1 ? M1 : M2);
}

/* Go on to the next change. The last code is one. */
INLINE void step(cursor *at, int code_bytes) {
    if (at->code == at->end) {
        at->next = UINT64_MAX;
        return;
    }
    const uint16_t most = code_bytes == 1 ? M1 : M2;
    uint16_t code;
    do {
        code = code_at(at->code, 0, code_bytes);
        at->code += code_bytes;
        at->next += code;
    } while (code == most);
    at->next += 1;
}

/* Go on to the first change at `first` or behind, by blocks of codes as far as they end before it. */
INLINE void seek(cursor *at, uint64_t first, int shift, int code_bytes) {
    const size_t block = SUMMED * (size_t)code_bytes;
    while (at->next < first) {
        uint64_t changes = 0, distance = UINT64_MAX;
        if ((size_t)(at->end - at->code) > block) distance = summed(at->code, SUMMED, code_bytes, &changes);
        if (distance < first - at->next) {
            at->next += distance;
            at->code += block;
            at->value += changes << shift;
            continue; /* if the block ends within a gap, `next` is in it, and still before `first` */
        }
        at->value += (size_t)1 << shift;
        step(at, code_bytes);
    }
}

/* Write the changes before element `end` into memory whose first element is `first`. */
INLINE void write_changes(cursor *shared, uint8_t *target, uint64_t first, uint64_t end, int shift, int code_bytes) {
    cursor at = *shared;
    seek(&at, first, shift, code_bytes);
    while (at.next < end) {
        memcpy(target + ((at.next - first) << shift), at.value, (size_t)1 << shift);
        at.value += (size_t)1 << shift;
        step(&at, code_bytes);
    }
    *shared = at;
}

static void apply_window(cursor *at, uint8_t *target, uint64_t first, uint64_t end, int shift, int code_bytes) {
    switch (2 * shift + code_bytes) {
    case 1: write_changes(at, target, first, end, 0, 1); break;
    case 2: write_changes(at, target, first, end, 0, 2); break;
    case 3: write_changes(at, target, first, end, 1, 1); break;
    case 4: write_changes(at, target, first, end, 1, 2); break;
    case 5: write_changes(at, target, first, end, 2, 1); break;
    case 6: write_changes(at, target, first, end, 2, 2); break;
    case 7: write_changes(at, target, first, end, 3, 1); break;
    case 8: write_changes(at, target, first, end, 3, 2); break;
    case 9: write_changes(at, target, first, end, 4, 1); break;
    default: write_changes(at, target, first, end, 4, 2); break;
    }
}

size_t stio_delta_apply(const stio_changes *changes, size_t num_changes, int item_bytes, uint64_t num_elements,
                        const stio_piece *pieces, size_t num_pieces) {
    const int shift = __builtin_ctz((unsigned)item_bytes);
    for (size_t k = 0; k < num_changes; ++k) {
        const stio_changes *const one = &changes[k];
        if (!(one->code_bytes == 1 ? is_valid(one, num_elements, 1) : is_valid(one, num_elements, 2))) return k + 1;
    }
    cursor *const cursors = malloc(num_changes * sizeof *cursors + 1);
    if (cursors == NULL) return num_changes + 1;
    for (size_t k = 0; k < num_changes; ++k) {
        const stio_changes *const one = &changes[k];
        const uint8_t *const codes = one->codes;
        cursors[k] = (cursor){codes, codes + one->num_codes * one->code_bytes, one->values, UINT64_MAX};
        step(&cursors[k], (int)one->code_bytes); /* from "before the first element" */
    }
    for (const stio_piece *piece = pieces; piece < pieces + num_pieces; ++piece) {
        for (uint64_t at = 0; at < piece->num_elements;) {
            const uint64_t left = piece->num_elements - at, most = WINDOW_BYTES >> shift;
            const uint64_t first = piece->first + at, end = first + (left < most ? left : most);
            uint8_t *const target = (uint8_t *)piece->memory + (at << shift);
            for (size_t k = 0; k < num_changes; ++k)
                apply_window(&cursors[k], target, first, end, shift, (int)changes[k].code_bytes);
            at += end - first;
        }
    }
    free(cursors);
    return 0;
}
