/* Batch decode: read, decode and verify many chunks, and copy each good one into the caller's memory.
 *
 * A batch is divided into parts. One thread handles a part: it reads the part's stretches of packs, then decodes the part's
 * chunks one after the other. Everything about one chunk (stored bytes, planes, base, result) stays in the cache of its core.
 * A chunk is decoded in scratch memory and copied to its target after its digest has been compared, so a damaged chunk never
 * reaches the target.
 *
 * `tc_check_batch` checks the tables against each other and against the lengths of all buffers; `tc_decode` relies on that.
 * Stored bytes are hostile: every length in them is checked before it is used. The caller finds out the reason of a failure by
 * decoding the chunk once more, link by link (`chunk_io/_decode.py`). The format page describes the payloads. */
#define _GNU_SOURCE
#include "decode.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "blake3.h"
#include "frames.h"
#include "join.h"
#include "pool.h"
#include "watch.h"
#include "words.h"

enum { RAW = 0, ZSTD = 1, SHUFFLE_ZSTD = 2, DELTA = 3, PLANES = 4 };
enum { PLAIN = 0, GROUPED = 1, DECAYED = 2, SPARSE = 3, NUDGED = 4, MOVED = 5, LONG_GAP = 255 };
enum { MOST_LOW_BITS = 31 };
enum { PAGE = 4096, HUGE_PAGE = 2 << 20, KEPT_BYTES = 16 << 20, MOST_GROUPS = 15, MOST_WIDTH = 8, MOST_PENDING = 64 };
enum { MOST_CHUNK_BYTES = 64 << 20, MOST_LINKS = 65, MOST_LEVELS = 8 };

#define MOST_PART_BYTES ((uint64_t)2 << 30)

/* --- scratch memory, kept from one batch to the next: fresh memory costs more than decoding into it */

typedef struct {
    uint8_t *memory;
    size_t n_bytes;
    TcFrames *frames[TC_MOST_THREADS];
} Slab;

static _Atomic(Slab *) kept_slab;

static void free_slab(Slab *slab) {
    if (slab == NULL)
        return;
    for (int worker = 0; worker < TC_MOST_THREADS; worker++)
        tc_free_frames(slab->frames[worker]);
    free(slab->memory);
    free(slab);
}

static Slab *take_slab(size_t n_bytes) {
    Slab *slab = atomic_exchange(&kept_slab, NULL);
    if (slab == NULL)
        slab = calloc(1, sizeof *slab);
    if (slab == NULL || slab->n_bytes >= n_bytes)
        return slab;
    free(slab->memory);
    /* The driver of a disk splits a direct read into ordinary pages into many requests; huge pages avoid this. */
    size_t alignment = n_bytes >= HUGE_PAGE ? HUGE_PAGE : PAGE;
    n_bytes = (n_bytes + alignment - 1) / alignment * alignment;
    slab->n_bytes = 0;
    if (posix_memalign((void **)&slab->memory, alignment, n_bytes) != 0) {
        slab->memory = NULL;
        free_slab(slab);
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    if (alignment == HUGE_PAGE)
        (void)madvise(slab->memory, n_bytes, MADV_HUGEPAGE);
#endif
    slab->n_bytes = n_bytes;
    return slab;
}

static void give_back(Slab *slab) {
    if (slab->n_bytes <= KEPT_BYTES)
        slab = atomic_exchange(&kept_slab, slab);
    free_slab(slab);
}

/* --- codecs */

/* A link that is decoded already. */
typedef struct {
    TcLink link;
    const uint8_t *made; /* NULL if another link was made in the same memory later */
} Held;

/* The memory of one thread for the chunk it decodes; each area is as long as the longest link. */
typedef struct {
    TcFrames **frames;
    uint8_t *out;
    uint8_t *planes;
    uint8_t *grouped;
    uint8_t *classes;
    uint8_t *levels; /* areas for the links of a chain that stay for the next one, `n_levels` of them, used in turn */
    size_t n_levels, next_level;
    size_t n_bytes;  /* of each area */
    Held held[MOST_LINKS]; /* the chain decoded last, its end first: the next chunk may share its beginning */
    size_t n_held;
} Areas;

enum { N_AREAS = 4 }; /* besides the levels */
enum { MOVED_BYTES = 6 }; /* of a moved delta before the delta within it */

static size_t levels_of(size_t n_links) { return n_links < MOST_LEVELS ? n_links : MOST_LEVELS; }

static uint32_t u32_at(const uint8_t *from) {
    uint32_t number;
    memcpy(&number, from, sizeof number);
    return number;
}

/* Decompress the one whole frame that `stored` is, which states `n_bytes` as its content size. */
static int decode_frame(Areas *areas, const uint8_t *stored, size_t n_stored, uint8_t *out, size_t n_bytes) {
    if (*areas->frames == NULL && (*areas->frames = tc_new_frames()) == NULL)
        return CHUNK_NO_MEMORY;
    return tc_decompress(*areas->frames, stored, n_stored, out, n_bytes);
}

static int decode_shuffled(Areas *areas, const uint8_t *stored, size_t n_stored, uint8_t *out, size_t n_bytes) {
    if (n_stored < 2)
        return CHUNK_MALFORMED;
    size_t width = (size_t)stored[0] | (size_t)stored[1] << 8;
    if (width == 0)
        return CHUNK_MALFORMED;
    uint8_t *shuffled = areas->planes;
    int status = decode_frame(areas, stored + 2, n_stored - 2, shuffled, n_bytes);
    if (status != CHUNK_GOOD)
        return status;
    size_t n_records = n_bytes / width, n_whole = n_records * width;
    for (size_t place = 0; place < width && n_records; place++) {
        const uint8_t *from = shuffled + place * n_records;
        uint8_t *to = out + place;
        for (size_t record = 0; record < n_records; record++)
            to[record * width] = from[record];
    }
    memcpy(out + n_whole, shuffled + n_whole, n_bytes - n_whole);
    return CHUNK_GOOD;
}

/* Decode the planes of so many words. Planes stored as they are stay where they are; others are decoded to `areas->planes`. */
static int decode_planes(Areas *areas, const uint8_t *part, size_t n_part, size_t width, size_t n_words,
                         const uint8_t **planes) {
    size_t begin = 1 + 4 * width, total = begin;
    if (n_part < begin || part[0] != width)
        return CHUNK_MALFORMED;
    for (size_t place = 0; place < width; place++) {
        size_t size = u32_at(part + 1 + 4 * place);
        if (size > n_words)
            return CHUNK_MALFORMED;
        total += size;
    }
    if (total != n_part)
        return CHUNK_MALFORMED;
    for (size_t place = 0; place < width; place++) {
        size_t size = u32_at(part + 1 + 4 * place);
        planes[place] = part + begin;
        if (size != n_words) {
            uint8_t *plane = areas->planes + place * n_words;
            int status = decode_frame(areas, part + begin, size, plane, n_words);
            if (status != CHUNK_GOOD)
                return status;
            planes[place] = plane;
        }
        begin += size;
    }
    return CHUNK_GOOD;
}

/* Decode the planes of so many words, and put the words together. */
static int decode_words(Areas *areas, const uint8_t *part, size_t n_part, size_t width, size_t n_words, TcMeaning meaning,
                        const uint8_t *base, uint8_t *words) {
    const uint8_t *planes[MOST_WIDTH];
    int status = decode_planes(areas, part, n_part, width, n_words, planes);
    if (status == CHUNK_GOOD)
        tc_join_planes(planes, n_words, width, meaning, base, words);
    return status;
}

/* Decode a payload of codec 4. */
static int decode_word_chunk(Areas *areas, const uint8_t *stored, size_t n_stored, uint8_t *out, size_t n_bytes) {
    size_t width = n_stored ? stored[0] : 0;
    if (width != 1 && width != 2 && width != 4 && width != 8)
        return CHUNK_MALFORMED;
    size_t n_words = n_bytes / width, tail = n_bytes % width;
    if (n_stored < tail)
        return CHUNK_MALFORMED;
    memcpy(out + n_bytes - tail, stored + n_stored - tail, tail);
    return decode_words(areas, stored, n_stored - tail, width, n_words, TC_WORDS, NULL, out);
}

/* Decode a payload of the codecs that a delta may contain. */
static int decode_inner(Areas *areas, unsigned codec, const uint8_t *stored, size_t n_stored, uint8_t *out,
                        size_t n_bytes) {
    if (codec == ZSTD)
        return decode_frame(areas, stored, n_stored, out, n_bytes);
    if (codec == PLANES)
        return decode_word_chunk(areas, stored, n_stored, out, n_bytes);
    if (n_stored != n_bytes)
        return CHUNK_MALFORMED;
    memcpy(out, stored, n_bytes);
    return CHUNK_GOOD;
}

/* Turn zigzag differences into differences, or with a base into sums, in place. Only deltas of other inner codecs than planes
 * need it; no release writes them. */
static void undo_zigzag(uint8_t *words, size_t n_words, size_t width, const uint8_t *base) {
    for (size_t at = 0; at < n_words; at++) {
        uint64_t word = 0, of_base = 0;
        memcpy(&word, words + at * width, width);
        if (base != NULL)
            memcpy(&of_base, base + at * width, width);
        of_base += (word >> 1) ^ (0 - (word & 1));
        memcpy(words + at * width, &of_base, width);
    }
}

/* Decode a grouped delta, from behind its first two bytes on. */
static int decode_groups(Areas *areas, unsigned inner, size_t width, const uint8_t *stored, size_t n_stored,
                         const uint8_t *base, uint8_t *out, size_t n_bytes) {
    if (n_stored == 0)
        return CHUNK_MALFORMED;
    size_t n_groups = stored[0] & 15, unit = (size_t)1 << (stored[0] >> 4), begin = 5 * n_groups;
    if (n_groups == 0 || n_stored < begin || unit * width > 8)
        return CHUNK_MALFORMED;
    const uint8_t *thresholds = stored + 1;
    for (size_t number = 1; number + 1 < n_groups; number++)
        if (thresholds[number] <= thresholds[number - 1])
            return CHUNK_MALFORMED;
    size_t n_words = n_bytes / (unit * width) * unit, tail = n_bytes - n_words * width, total = begin + tail;
    size_t sizes[MOST_GROUPS], lengths[MOST_GROUPS];
    TcCounts of_class;
    for (size_t group = 0; group < n_groups; group++)
        total += sizes[group] = u32_at(stored + n_groups + 4 * group);
    if (total != n_stored)
        return CHUNK_MALFORMED;
    if (!tc_count_units(base, n_words, width, thresholds, n_groups - 1, unit, areas->classes, &of_class))
        return CHUNK_MALFORMED; /* there are more classes than a byte tells apart */
    tc_count_groups(&of_class, n_groups, unit, lengths);
    int is_split = inner == PLANES;
    for (size_t group = 0, at = begin; group < n_groups; at += sizes[group++])
        is_split = is_split && sizes[group] > 0 && stored[at] == width;
    uint8_t *grouped = areas->grouped;
    for (size_t group = 0, at = begin; group < n_groups; at += sizes[group++]) {
        size_t n_grouped = lengths[group] * width;
        int status = is_split ? decode_words(areas, stored + at, sizes[group], width, lengths[group], TC_DIFFERENCES, NULL,
                                             grouped)
                              : decode_inner(areas, inner, stored + at, sizes[group], grouped, n_grouped);
        if (status != CHUNK_GOOD)
            return status;
        grouped += n_grouped;
    }
    if (!is_split)
        undo_zigzag(areas->grouped, n_words, width, NULL);
    TcCursors cursors;
    tc_begin_order(&of_class, n_groups, unit, &cursors);
    tc_ungroup(areas->grouped, n_words, width, base, areas->classes, unit, &cursors, out);
    memcpy(out + n_bytes - tail, stored + n_stored - tail, tail);
    return CHUNK_GOOD;
}

/* Compute single precision words after weight decay. */
static void decay(const uint8_t *words, size_t n_words, uint32_t n_steps, uint32_t rate, uint8_t *out) {
    for (size_t at = 0; at < n_words; at++) {
        uint32_t word = u32_at(words + 4 * at);
        uint32_t mantissa = (word >> 8 & 0x7FFF) | 0x8000;
        word -= n_steps * ((mantissa * rate + ((uint32_t)1 << 23)) >> 24);
        memcpy(out + 4 * at, &word, sizeof word);
    }
}

/* Change words of `out` by zigzag differences, at the places that the gaps state; return 0 if there are other numbers of both, or a
 * place is behind the words. */
#define DEFINE_CHANGE(name, word_type)                                                                                          \
    static int name(const uint8_t *gaps, size_t n_gap_bytes, const uint8_t *differences, size_t n_changed, size_t n_words,      \
                    uint8_t *out) {                                                                                             \
        size_t place = 0, n_placed = 0;                                                                                         \
        for (size_t at = 0; at < n_gap_bytes; at++) {                                                                           \
            place += gaps[at];                                                                                                  \
            if (gaps[at] == LONG_GAP)                                                                                           \
                continue;                                                                                                       \
            if (n_placed == n_changed || place >= n_words)                                                                      \
                return 0;                                                                                                       \
            word_type word, difference;                                                                                         \
            memcpy(&word, out + place * sizeof word, sizeof word);                                                              \
            memcpy(&difference, differences + n_placed++ * sizeof word, sizeof word);                                           \
            word = (word_type)(word + ((word_type)(difference >> 1) ^ (word_type)(0 - (difference & 1))));                      \
            memcpy(out + place++ * sizeof word, &word, sizeof word);                                                            \
        }                                                                                                                       \
        return n_placed == n_changed;                                                                                           \
    }
DEFINE_CHANGE(change_1, uint8_t)
DEFINE_CHANGE(change_2, uint16_t)
DEFINE_CHANGE(change_4, uint32_t)
DEFINE_CHANGE(change_8, uint64_t)
#undef DEFINE_CHANGE

/* Decode a sparse delta, from behind its first two bytes on: copy the base, and change some words. `out` may be the base, which is
 * then lost, also if the payload is malformed. */
static int decode_sparse(Areas *areas, unsigned inner, size_t width, const uint8_t *stored, size_t n_stored,
                         const uint8_t *base, uint8_t *out, size_t n_bytes) {
    size_t n_words = n_bytes / width, tail = n_bytes % width, begin = 12;
    if (n_stored < begin + tail)
        return CHUNK_MALFORMED;
    size_t n_changed = u32_at(stored), n_gap_bytes = u32_at(stored + 4), n_of_gaps = u32_at(stored + 8);
    if (n_changed > n_words || n_gap_bytes > n_bytes || n_of_gaps > n_stored - begin - tail)
        return CHUNK_MALFORMED;
    const uint8_t *gaps = areas->classes, *differences = areas->grouped;
    int status = decode_inner(areas, inner, stored + begin, n_of_gaps, areas->classes, n_gap_bytes);
    if (status == CHUNK_GOOD)
        status = decode_inner(areas, inner, stored + begin + n_of_gaps, n_stored - begin - n_of_gaps - tail, areas->grouped,
                              n_changed * width);
    if (status != CHUNK_GOOD)
        return status;
    if (n_gap_bytes > 0 && gaps[n_gap_bytes - 1] == LONG_GAP)
        return CHUNK_MALFORMED;
    if (out != base)
        memcpy(out, base, n_bytes - tail);
    memcpy(out + n_bytes - tail, stored + n_stored - tail, tail);
    int is_good = width == 1   ? change_1(gaps, n_gap_bytes, differences, n_changed, n_words, out)
                  : width == 2 ? change_2(gaps, n_gap_bytes, differences, n_changed, n_words, out)
                  : width == 4 ? change_4(gaps, n_gap_bytes, differences, n_changed, n_words, out)
                               : change_8(gaps, n_gap_bytes, differences, n_changed, n_words, out);
    return is_good ? CHUNK_GOOD : CHUNK_MALFORMED;
}

/* A field of bits, the least significant of each byte first. */
typedef struct {
    const uint8_t *bytes;
    size_t n_bytes;
} Field;

/* Return the 64 bits from a byte on; bits behind the field are zero. */
static uint64_t bits_at(const Field *field, size_t byte) {
    uint64_t bits = 0;
    if (byte < field->n_bytes)
        memcpy(&bits, field->bytes + byte, field->n_bytes - byte < 8 ? field->n_bytes - byte : 8);
    return bits;
}

/* Return `count` bits, at most 57, from a bit on. */
static uint64_t take_bits(const Field *field, uint64_t at, unsigned count) {
    uint64_t bits;
    if (at / 8 + 8 <= field->n_bytes)
        memcpy(&bits, field->bytes + at / 8, 8);
    else
        bits = bits_at(field, (size_t)(at / 8));
    return bits >> (at & 7) & (((uint64_t)1 << count) - 1);
}

/* The places of the ones in a field, in order. */
typedef struct {
    Field field;
    uint64_t bits; /* those not yet returned of the eight bytes before `next` */
    size_t next;
} Ones;

/* Return the place of the next one, or UINT64_MAX behind the last. */
static inline uint64_t next_one(Ones *ones) {
    while (ones->bits == 0) {
        if (ones->next >= ones->field.n_bytes)
            return UINT64_MAX;
        ones->bits = bits_at(&ones->field, ones->next);
        ones->next += 8;
    }
    uint64_t place = 8 * (uint64_t)(ones->next - 8) + (uint64_t)__builtin_ctzll(ones->bits);
    ones->bits &= ones->bits - 1;
    return place;
}

/* Read a number of seven bits a byte, the least significant first, of at most five bytes. Return 0 if there is none. */
static int read_varint(const uint8_t *stored, size_t n_stored, size_t *at, size_t *number) {
    *number = 0;
    for (unsigned shift = 0; shift < 35; shift += 7) {
        if (*at >= n_stored)
            return 0;
        uint8_t byte = stored[(*at)++];
        *number |= (size_t)(byte & 127) << shift;
        if (byte < 128)
            return 1;
    }
    return 0;
}

/* The words of a nudged delta that change by more than one unit. */
typedef struct {
    Ones ones;
    Field low, magnitudes;
    size_t n_changed, n_left, n_read;
    uint64_t upper, sum, at; /* of the gaps' upper parts; of the low ones; bits read of the magnitudes */
    uint64_t before;         /* the last one's place in its field, and one more */
    unsigned low_bits, most_exponent;
} Large;

/* Find the number of the next such word among the changed ones, higher than the last, and its magnitude. Return 0 if the payload is
 * malformed. */
static int next_large(Large *large, uint64_t *number, uint64_t *magnitude) {
    uint64_t end = next_one(&large->ones), last = next_one(&large->ones);
    if (end == UINT64_MAX || last == UINT64_MAX || last - end - 1 > large->most_exponent)
        return 0;
    unsigned exponent = (unsigned)(last - end - 1), first = exponent < 32 ? exponent : 32;
    large->upper += end - large->before;
    if (large->upper >= large->n_changed) /* and no sum below exceeds 64 bits */
        return 0;
    large->before = last + 1;
    large->sum += take_bits(&large->low, (uint64_t)large->n_read * large->low_bits, large->low_bits);
    *number = (large->upper << large->low_bits) + large->sum + large->n_read++;
    if (*number >= large->n_changed)
        return 0;
    *magnitude = ((uint64_t)1 << exponent) + 1 + take_bits(&large->magnitudes, large->at, first);
    *magnitude += take_bits(&large->magnitudes, large->at + first, exponent - first) << first;
    large->at += exponent;
    large->n_left--;
    return 1;
}

/* Add to a word of `out`. */
static inline __attribute__((always_inline)) void add_to_word(uint8_t *out, uint64_t place, size_t width, uint64_t number) {
    uint64_t word = 0;
    memcpy(&word, out + place * width, width);
    word += number;
    memcpy(out + place * width, &word, width);
}

/* Move the words of a nudged delta: some of them by one unit, and then those further that are large, so that neither loop has
 * a branch that is hard to predict. Inlined for each width, because a word of any width takes a call to copy. */
static inline __attribute__((always_inline)) int nudge_words(Ones ones, Field low, Large *large, size_t n_changed,
                                                             unsigned low_bits, size_t width, uint8_t *out, size_t n_words) {
    enum { N_PLACES = 512 };
    uint32_t places[N_PLACES]; /* and the sign of each in the highest bit */
    uint64_t sum = 0, of_large = UINT64_MAX, magnitude = 0;
    if (large->n_left > 0 && !next_large(large, &of_large, &magnitude))
        return CHUNK_MALFORMED;
    for (size_t begin = 0, end; begin < n_changed; begin = end) {
        end = n_changed - begin < N_PLACES ? n_changed : begin + N_PLACES;
        for (size_t number = begin; number < end; number++) {
            uint64_t one = next_one(&ones);
            if (one == UINT64_MAX)
                return CHUNK_MALFORMED;
            uint64_t bits = take_bits(&low, (uint64_t)number * (low_bits + 1), low_bits + 1);
            sum += bits >> 1;
            uint64_t place = ((one - number) << low_bits) + sum + number;
            if (one - number >= n_words || place >= n_words)
                return CHUNK_MALFORMED;
            places[number - begin] = (uint32_t)place | (uint32_t)(bits & 1) << 31;
            add_to_word(out, place, width, 1 - 2 * (bits & 1));
        }
        while (of_large < end) {
            uint64_t place = places[of_large - begin], sign = 0 - (place >> 31), further = magnitude - 1;
            add_to_word(out, place & INT32_MAX, width, (further ^ sign) - sign);
            of_large = UINT64_MAX;
            if (large->n_left > 0 && !next_large(large, &of_large, &magnitude))
                return CHUNK_MALFORMED;
        }
    }
    /* Each one counts, and a word that moves further than a unit is one of the changed words. */
    if (next_one(&ones) != UINT64_MAX || next_one(&large->ones) != UINT64_MAX || large->n_left > 0 || of_large != UINT64_MAX ||
        (large->at + 7) / 8 != large->magnitudes.n_bytes)
        return CHUNK_MALFORMED;
    return CHUNK_GOOD;
}

/* Decode a nudged delta, from behind its first two bytes on: copy the base, and move some words, most by one unit. `out` may be
 * the base, which is then lost, also if the payload is malformed. */
static int decode_nudged(const uint8_t *stored, size_t n_stored, size_t width, const uint8_t *base, uint8_t *out,
                         size_t n_bytes) {
    size_t n_words = n_bytes / width, tail = n_bytes % width, at = 2, n_changed, n_large, n_gaps, n_of_large;
    if (n_stored < 2 || stored[0] > MOST_LOW_BITS || stored[1] > MOST_LOW_BITS)
        return CHUNK_MALFORMED;
    unsigned low_bits = stored[0];
    if (!read_varint(stored, n_stored, &at, &n_changed) || !read_varint(stored, n_stored, &at, &n_large) ||
        !read_varint(stored, n_stored, &at, &n_gaps) || !read_varint(stored, n_stored, &at, &n_of_large))
        return CHUNK_MALFORMED;
    if (n_changed > n_words || n_large > n_changed || n_stored - at < tail)
        return CHUNK_MALFORMED;
    size_t left = n_stored - at - tail, n_low = (n_changed * (low_bits + 1) + 7) / 8, n_large_low = (n_large * stored[1] + 7) / 8;
    if (n_gaps > left || n_low > left - n_gaps || n_of_large > left - n_gaps - n_low ||
        n_large_low > left - n_gaps - n_low - n_of_large)
        return CHUNK_MALFORMED;
    Ones ones = {.field = {stored + at, n_gaps}};
    Field low = {stored + at + n_gaps, n_low};
    Large large = {
        .ones = {.field = {low.bytes + n_low, n_of_large}},
        .low = {low.bytes + n_low + n_of_large, n_large_low},
        .n_changed = n_changed,
        .n_left = n_large,
        .low_bits = stored[1],
        .most_exponent = (unsigned)(8 * width - 1),
    };
    large.magnitudes = (Field){large.low.bytes + n_large_low, left - n_gaps - n_low - n_of_large - n_large_low};
    if (out != base)
        memcpy(out, base, n_bytes - tail);
    memcpy(out + n_bytes - tail, stored + n_stored - tail, tail);
    if (width == 1)
        return nudge_words(ones, low, &large, n_changed, low_bits, 1, out, n_words);
    if (width == 2)
        return nudge_words(ones, low, &large, n_changed, low_bits, 2, out, n_words);
    if (width == 4)
        return nudge_words(ones, low, &large, n_changed, low_bits, 4, out, n_words);
    return nudge_words(ones, low, &large, n_changed, low_bits, 8, out, n_words);
}

/* Decode a delta; `n_base` is the size of its base, which only a moved delta may exceed. */
static int decode_delta(Areas *areas, const uint8_t *stored, size_t n_stored, const uint8_t *base, size_t n_base, uint8_t *out,
                        size_t n_bytes) {
    if (base != NULL && n_stored >= MOVED_BYTES && stored[0] == RAW && stored[1] == MOVED) {
        size_t offset = u32_at(stored + 2);
        if (offset > n_base || n_base - offset < n_bytes)
            return CHUNK_MALFORMED;
        base += offset, n_base = n_bytes, stored += MOVED_BYTES, n_stored -= MOVED_BYTES;
    }
    if (base == NULL || n_base != n_bytes || n_stored < 2)
        return CHUNK_MALFORMED;
    unsigned inner = stored[0], transform = stored[1] & 15, log_width = stored[1] >> 4;
    if ((inner != RAW && inner != ZSTD && inner != PLANES) || transform > NUDGED || log_width > 3)
        return CHUNK_MALFORMED;
    size_t width = (size_t)1 << log_width, begin = 2;
    if (transform == GROUPED)
        return decode_groups(areas, inner, width, stored + 2, n_stored - 2, base, out, n_bytes);
    if (transform == SPARSE)
        return decode_sparse(areas, inner, width, stored + 2, n_stored - 2, base, out, n_bytes);
    if (transform == NUDGED)
        return inner == RAW ? decode_nudged(stored + 2, n_stored - 2, width, base, out, n_bytes) : CHUNK_MALFORMED;
    size_t n_words = n_bytes / width, tail = n_bytes % width;
    if (transform == DECAYED) {
        begin += 6;
        if (width != 4 || n_stored < begin)
            return CHUNK_MALFORMED;
        decay(base, n_words, u32_at(stored + 2), (uint32_t)stored[6] | (uint32_t)stored[7] << 8, areas->grouped);
        base = areas->grouped;
    }
    if (inner == PLANES && n_stored > begin && stored[begin] == width) {
        if (n_stored - begin < tail)
            return CHUNK_MALFORMED;
        memcpy(out + n_bytes - tail, stored + n_stored - tail, tail);
        return decode_words(areas, stored + begin, n_stored - tail - begin, width, n_words, TC_SUMS, base, out);
    }
    int status = decode_inner(areas, inner, stored + begin, n_stored - begin, out, n_bytes);
    if (status == CHUNK_GOOD)
        undo_zigzag(out, n_words, width, base);
    return status;
}

/* Decode a chunk; `base` is the decoded base of a delta. */
static int decode_one(Areas *areas, unsigned codec, const uint8_t *stored, size_t n_stored, const uint8_t *base, size_t n_base,
                      uint8_t *out, size_t n_bytes) {
    if (codec == SHUFFLE_ZSTD)
        return decode_shuffled(areas, stored, n_stored, out, n_bytes);
    if (codec == DELTA)
        return decode_delta(areas, stored, n_stored, base, n_base, out, n_bytes);
    return codec <= PLANES ? decode_inner(areas, codec, stored, n_stored, out, n_bytes) : CHUNK_MALFORMED;
}

/* --- parts */

static int read_file(const TcRead *read, uint8_t *room, const uint8_t **stored) {
    uint64_t begin = read->start, stop = read->start + read->n_bytes, end = stop;
    if (read->kind == TC_DIRECT) {
        begin = begin / PAGE * PAGE;
        end = (end + PAGE - 1) / PAGE * PAGE;
    }
    for (uint64_t at = begin; at < stop;) {
        ssize_t n_read = pread(read->source, room + (at - begin), (size_t)(end - at), (off_t)at);
        if (n_read < 0 && errno == EINTR)
            continue;
        if (n_read <= 0)
            return 0;
        at += (uint64_t)n_read;
        if (read->kind == TC_DIRECT && at % PAGE != 0 && at < stop)
            return 0;
    }
    *stored = room + (read->start - begin);
    return 1;
}

static size_t room_of(const TcRead *read) {
    return read->kind == TC_MEMORY ? 0 : ((size_t)read->n_bytes + 3 * PAGE - 1) / PAGE * PAGE;
}

/* Set `stored` to the bytes of a read, or to NULL if it fails; return the rest of the room for reads. */
static uint8_t *fetch(const TcBatch *batch, const TcRead *read, uint8_t *room, const uint8_t **stored) {
    *stored = NULL;
    if (read->kind == TC_MEMORY)
        *stored = batch->sources[read->source].data + read->start;
    else
        (void)read_file(read, room, stored);
    return room + room_of(read);
}

static int is_raw(const TcBatch *batch, const TcChunk *chunk) {
    return chunk->n_links == 1 && batch->links[chunk->first_link].codec == RAW;
}

static size_t longest_link(const TcBatch *batch, const TcChunk *chunk) {
    size_t longest = 0;
    for (size_t number = 0; number < chunk->n_links; number++) {
        const TcLink *link = batch->links + chunk->first_link + number;
        longest = link->n_bytes > longest ? link->n_bytes : longest;
    }
    return longest;
}

/* Damaged bytes may decode to the chunk all the same, and another release of Zstandard may refuse them. */
static int is_as_written(const TcLink *link, const uint8_t *payload) {
    uint8_t digest[TC_DIGEST];
    tc_blake3(payload, link->n_stored, digest);
    return memcmp(digest, link->stored_digest, sizeof link->stored_digest) == 0;
}

static int is_held(const Areas *areas, size_t level, const TcLink *link) {
    const Held *held = areas->held + level;
    return level < areas->n_held && held->link.n_bytes == link->n_bytes && held->link.read == link->read &&
           held->link.begin == link->begin && held->link.n_stored == link->n_stored && held->link.codec == link->codec;
}

/* Forget what was made in some memory, since another link is made there now. */
static void forget(Areas *areas, const uint8_t *memory) {
    for (size_t level = 0; level < areas->n_held; level++)
        if (areas->held[level].made == memory)
            areas->held[level].made = NULL;
}

/* Return the memory to make a link in: that of its base for a sparse or nudged delta, which changes few words, and else another
 * level. */
static uint8_t *level_for(Areas *areas, const TcLink *link, const uint8_t *payload, const uint8_t *base) {
    uint8_t *levels = areas->levels, *out;
    int is_of_few = link->codec == DELTA && link->n_stored > 1 && ((payload[1] & 15) == SPARSE || (payload[1] & 15) == NUDGED);
    if (is_of_few && base >= levels && base < levels + areas->n_levels * areas->n_bytes)
        out = levels + (base - levels);
    else
        do {
            out = levels + areas->next_level * areas->n_bytes;
            areas->next_level = (areas->next_level + 1) % areas->n_levels;
        } while (out == base);
    forget(areas, out);
    return out;
}

/* Decode the chain of a chunk; set `made` to the chunk: in `areas->out + n_pending`, in the levels, or in the memory of its
 * read. What the chain shares with the chain before is not decoded again, as far as it is still there. */
static int decode_chain(const TcBatch *batch, const TcChunk *chunk, const uint8_t *const *stored, uint32_t first_read,
                        Areas *areas, size_t n_pending, const uint8_t **made) {
    const TcLink *links = batch->links + chunk->first_link;
    size_t n_base = 0, n_links = chunk->n_links, n_shared = 0;
    for (size_t number = 0; number < n_links; number++) {
        const TcLink *link = links + number;
        if (stored[link->read - first_read] == NULL)
            return CHUNK_UNREAD;
        if (link->n_bytes == 0) /* no chunk is empty, and areas without a byte would have one address */
            return CHUNK_MALFORMED;
        if (link->checks && !is_as_written(link, stored[link->read - first_read] + link->begin))
            return CHUNK_DIFFERS;
    }
    while (n_shared < n_links && is_held(areas, n_shared, links + (n_links - 1 - n_shared)))
        n_shared++;
    while (n_shared > 0 && areas->held[n_shared - 1].made == NULL)
        n_shared--;
    areas->n_held = n_shared;
    const uint8_t *base = n_shared > 0 ? areas->held[n_shared - 1].made : NULL;
    if (n_shared > 0)
        n_base = areas->held[n_shared - 1].link.n_bytes;
    for (size_t level = n_shared; level < n_links; level++) {
        const TcLink *link = links + (n_links - 1 - level);
        const uint8_t *payload = stored[link->read - first_read] + link->begin;
        if (tc_stops())
            return CHUNK_UNREAD;
        size_t n_bytes = link->n_bytes;
        if (link->codec == RAW) {
            if (link->n_stored != n_bytes)
                return CHUNK_MALFORMED;
            base = payload;
        } else {
            /* A chunk that waits for others to be verified with it does not stay for the next chain. */
            int stays = level + 1 < n_links || n_bytes > areas->n_bytes / 2;
            uint8_t *out = stays ? level_for(areas, link, payload, base) : areas->out + n_pending;
            int status = decode_one(areas, link->codec, payload, link->n_stored, base, n_base, out, n_bytes);
            if (status != CHUNK_GOOD)
                return status;
            base = out;
            if (!stays)
                continue;
        }
        n_base = n_bytes;
        areas->held[level] = (Held){.link = *link, .made = base};
        areas->n_held = level + 1;
    }
    *made = base;
    return CHUNK_GOOD;
}

/* Decoded chunks that wait to be verified together: small ones are hashed side by side. */
typedef struct {
    const TcBatch *batch;
    size_t count, n_bytes;
    uint32_t numbers[MOST_PENDING];
    const uint8_t *made[MOST_PENDING];
    size_t sizes[MOST_PENDING];
    uint8_t digests[MOST_PENDING][TC_DIGEST];
} Pending;

static void settle(Pending *pending) {
    const TcBatch *batch = pending->batch;
    if (batch->verifies)
        tc_blake3_many(pending->made, pending->sizes, pending->count, pending->digests);
    for (size_t at = 0; at < pending->count; at++) {
        const TcChunk *chunk = batch->chunks + pending->numbers[at];
        int is_good = !batch->verifies || memcmp(pending->digests[at], chunk->digest, TC_DIGEST) == 0;
        if (is_good && chunk->block != TC_NOWHERE)
            memcpy(batch->blocks[chunk->block].data + chunk->start, pending->made[at], chunk->n_bytes);
        batch->statuses[pending->numbers[at]] = is_good ? CHUNK_GOOD : CHUNK_DIFFERS;
    }
    pending->count = pending->n_bytes = 0;
}

typedef struct {
    const TcBatch *batch;
    Slab *slab;
    size_t reads_bytes; /* of one worker's memory for reads */
    size_t area_bytes;  /* of each of its areas */
    size_t n_areas;
    size_t most_reads;  /* of one part */
    const uint8_t **stored; /* for each worker and read of its part: its bytes; NULL if it failed */
} Work;

static void do_part(void *context, size_t index, size_t slot) {
    const Work *work = context;
    const TcBatch *batch = work->batch;
    const TcPart *part = batch->parts + index;
    const uint8_t **stored = work->stored + slot * work->most_reads;
    uint8_t *room = work->slab->memory + slot * (work->reads_bytes + work->n_areas * work->area_bytes);
    uint8_t *area = room + work->reads_bytes;
    Areas areas = {
        .frames = work->slab->frames + slot,
        .out = area,
        .planes = area + work->area_bytes,
        .grouped = area + 2 * work->area_bytes,
        .classes = area + 3 * work->area_bytes,
        .levels = area + N_AREAS * work->area_bytes,
        .n_levels = work->n_areas - N_AREAS,
        .n_bytes = work->area_bytes,
    };
    for (uint32_t number = part->first_read; number < part->last_read; number++)
        room = fetch(batch, batch->reads + number, room, stored + (number - part->first_read));
    Pending pending = {.batch = batch};
    for (uint32_t number = part->first_chunk; number < part->last_chunk; number++) {
        const TcChunk *chunk = batch->chunks + number;
        /* A chunk stored raw is taken from the memory it was read into. */
        size_t n_bytes = is_raw(batch, chunk) ? 0 : chunk->n_bytes;
        if (pending.count == MOST_PENDING || pending.n_bytes + n_bytes > work->area_bytes)
            settle(&pending);
        const uint8_t **made = pending.made + pending.count;
        int status = decode_chain(batch, chunk, stored, part->first_read, &areas, pending.n_bytes, made);
        if (status != CHUNK_GOOD) {
            batch->statuses[number] = (uint8_t)status;
            continue;
        }
        pending.numbers[pending.count] = number;
        pending.sizes[pending.count++] = chunk->n_bytes;
        pending.n_bytes += n_bytes;
        if (*made >= areas.levels && *made < area + work->n_areas * work->area_bytes)
            settle(&pending); /* the next chain takes the levels */
    }
    settle(&pending);
}

int tc_check_batch(const TcBatch *batch) {
    for (size_t number = 0; number < batch->n_reads; number++) {
        const TcRead *read = batch->reads + number;
        if (read->kind > TC_DIRECT || read->source < (read->kind == TC_MEMORY ? 0 : -1) || read->n_bytes > MOST_PART_BYTES || read->start > INT64_MAX / 2)
            return 0;
        if (read->kind == TC_MEMORY && ((size_t)read->source >= batch->n_sources ||
                                        read->start + read->n_bytes > batch->sources[read->source].n_bytes))
            return 0;
    }
    size_t first_read = 0, first_chunk = 0;
    for (size_t at = 0; at < batch->n_parts; at++) {
        const TcPart *part = batch->parts + at;
        if (part->first_read != first_read || part->last_read < first_read || part->last_read > batch->n_reads ||
            part->first_chunk != first_chunk || part->last_chunk < first_chunk || part->last_chunk > batch->n_chunks)
            return 0;
        uint64_t n_bytes = 0;
        for (size_t number = first_read; number < part->last_read; number++)
            if ((n_bytes += room_of(batch->reads + number)) > MOST_PART_BYTES)
                return 0;
        for (size_t number = first_chunk; number < part->last_chunk; number++) {
            const TcChunk *chunk = batch->chunks + number;
            if (chunk->n_links < 1 || chunk->n_links > MOST_LINKS || chunk->first_link > batch->n_links ||
                batch->n_links - chunk->first_link < chunk->n_links || chunk->n_bytes > MOST_CHUNK_BYTES)
                return 0;
            if (chunk->block != TC_NOWHERE &&
                (chunk->block >= batch->n_blocks || chunk->start > batch->blocks[chunk->block].n_bytes ||
                 batch->blocks[chunk->block].n_bytes - chunk->start < chunk->n_bytes))
                return 0;
            for (size_t of_chunk = 0; of_chunk < chunk->n_links; of_chunk++) {
                const TcLink *link = batch->links + chunk->first_link + of_chunk;
                if (link->read < first_read || link->read >= part->last_read ||
                    link->begin > batch->reads[link->read].n_bytes ||
                    batch->reads[link->read].n_bytes - link->begin < link->n_stored || link->n_bytes > MOST_CHUNK_BYTES ||
                    (of_chunk == 0 && link->n_bytes != chunk->n_bytes))
                    return 0;
            }
        }
        first_read = part->last_read;
        first_chunk = part->last_chunk;
    }
    return first_read == batch->n_reads && first_chunk == batch->n_chunks;
}

int tc_decode(const TcBatch *batch, size_t n_workers) {
    Work work = {.batch = batch, .most_reads = 1};
    for (size_t at = 0; at < batch->n_parts; at++) {
        const TcPart *part = batch->parts + at;
        size_t n_bytes = 0, n_reads = part->last_read - part->first_read;
        for (size_t number = part->first_read; number < part->last_read; number++)
            n_bytes += room_of(batch->reads + number);
        work.reads_bytes = n_bytes > work.reads_bytes ? n_bytes : work.reads_bytes;
        work.most_reads = n_reads > work.most_reads ? n_reads : work.most_reads;
    }
    size_t most_links = 0;
    for (size_t number = 0; number < batch->n_chunks; number++) {
        const TcChunk *chunk = batch->chunks + number;
        most_links = chunk->n_links > most_links ? chunk->n_links : most_links;
        if (!is_raw(batch, chunk) && longest_link(batch, chunk) > work.area_bytes)
            work.area_bytes = longest_link(batch, chunk);
    }
    if (work.area_bytes > 0)
        work.area_bytes = (work.area_bytes + 2 * PAGE - 1) / PAGE * PAGE;
    if (n_workers > batch->n_parts)
        n_workers = batch->n_parts;
    n_workers = n_workers < 1 ? 1 : n_workers > TC_MOST_THREADS ? TC_MOST_THREADS : n_workers;
    work.n_areas = N_AREAS + levels_of(most_links);
    work.slab = take_slab(n_workers * (work.reads_bytes + work.n_areas * work.area_bytes));
    work.stored = malloc(n_workers * work.most_reads * sizeof *work.stored);
    int has_room = work.slab != NULL && work.stored != NULL;
    if (has_room)
        tc_run(do_part, &work, batch->n_parts, n_workers);
    if (work.slab != NULL)
        give_back(work.slab);
    free(work.stored);
    return has_room;
}

/* --- single chunks */

struct TcDecoder {
    uint8_t *memory;
    size_t n_bytes;
    TcFrames *frames;
};

TcDecoder *tc_new_decoder(void) { return calloc(1, sizeof(TcDecoder)); }

void tc_free_decoder(TcDecoder *decoder) {
    if (decoder == NULL)
        return;
    tc_free_frames(decoder->frames);
    free(decoder->memory);
    free(decoder);
}

void tc_trim_decoder(TcDecoder *decoder) {
    if (decoder == NULL || decoder->n_bytes <= KEPT_BYTES)
        return;
    free(decoder->memory);
    decoder->memory = NULL;
    decoder->n_bytes = 0;
}

int tc_decode_part(TcDecoder *decoder, const TcBatch *batch, size_t number, const uint8_t **made) {
    const TcPart *part = batch->parts + number;
    const uint8_t *stored[MOST_LINKS];
    if (part->last_chunk - part->first_chunk != 1 || part->last_read - part->first_read > MOST_LINKS)
        return CHUNK_MALFORMED;
    const TcChunk *chunk = batch->chunks + part->first_chunk;
    size_t area_bytes = (longest_link(batch, chunk) + 2 * PAGE - 1) / PAGE * PAGE;
    size_t n_levels = levels_of(chunk->n_links), areas_bytes = (N_AREAS + n_levels) * area_bytes, needed = areas_bytes;
    for (uint32_t read = part->first_read; read < part->last_read; read++)
        needed += room_of(batch->reads + read);
    if (decoder->n_bytes < needed) {
        free(decoder->memory);
        decoder->n_bytes = 0;
        if (posix_memalign((void **)&decoder->memory, PAGE, needed) != 0) {
            decoder->memory = NULL;
            return CHUNK_NO_MEMORY;
        }
        decoder->n_bytes = needed;
    }
    uint8_t *area = decoder->memory, *room = area + areas_bytes;
    Areas areas = {
        .frames = &decoder->frames,
        .out = area,
        .planes = area + area_bytes,
        .grouped = area + 2 * area_bytes,
        .classes = area + 3 * area_bytes,
        .levels = area + N_AREAS * area_bytes,
        .n_levels = n_levels,
        .n_bytes = area_bytes,
    };
    for (uint32_t read = part->first_read; read < part->last_read; read++)
        room = fetch(batch, batch->reads + read, room, stored + (read - part->first_read));
    int status = decode_chain(batch, chunk, stored, part->first_read, &areas, 0, made);
    if (status != CHUNK_GOOD)
        return status;
    uint8_t digest[TC_DIGEST];
    tc_blake3(*made, chunk->n_bytes, digest);
    return memcmp(digest, chunk->digest, TC_DIGEST) == 0 ? CHUNK_GOOD : CHUNK_DIFFERS;
}
