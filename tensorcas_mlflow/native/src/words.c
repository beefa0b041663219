/* The loops of codecs 3 and 4: words into byte planes and back, differences from a base, groups by its magnitude.
 *
 * `tests/reference/words.py` documents each function, and its numpy code does the same more slowly: every numpy step is a pass over
 * memory that releases the interpreter's lock and takes it again, so threads mostly wait for each other. Here a chunk is one
 * pass without the lock.
 *
 * The content of a chunk cannot make these loops touch other memory, as long as no other thread writes to the buffers
 * meanwhile: classes are those that tc_count_units has made of the base.
 */
#include "join.h"
#include "words.h"

#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are little-endian in chunks and in memory"
#endif

enum { UNIT_ROOM = TC_MOST_UNIT, BLOCK_WORDS = 4096 };

/* The places of a chunk's words in its planes. */
typedef struct {
    size_t n_words;
    size_t unit;             /* words that move together */
    const uint8_t *classes;  /* of each unit; NULL: words keep their order */
    TcCursors cursors;
} Order;

#define WITH_CONSTANT(UNIT, LOOP, ...)                                                                                 \
    if ((UNIT) == 1)                                                                                                   \
        LOOP(__VA_ARGS__, 1);                                                                                          \
    else if ((UNIT) == 2)                                                                                              \
        LOOP(__VA_ARGS__, 2);                                                                                          \
    else if ((UNIT) == 4)                                                                                              \
        LOOP(__VA_ARGS__, 4);                                                                                          \
    else                                                                                                               \
        LOOP(__VA_ARGS__, 8);

#define PLANES_1 uint8_t *restrict p0 = planes
#define PLANES_2 PLANES_1, *restrict p1 = p0 + n_words
#define PLANES_4 PLANES_2, *restrict p2 = p1 + n_words, *restrict p3 = p2 + n_words
#define PLANES_8 PLANES_4, *restrict p4 = p3 + n_words, *restrict p5 = p4 + n_words, *restrict p6 = p5 + n_words, *restrict p7 = p6 + n_words

#define PUT_1 p0[at] = (uint8_t)word
#define PUT_2 PUT_1, p1[at] = (uint8_t)(word >> 8)
#define PUT_4 PUT_2, p2[at] = (uint8_t)(word >> 16), p3[at] = (uint8_t)(word >> 24)
#define PUT_8 PUT_4, p4[at] = (uint8_t)(word >> 32), p5[at] = (uint8_t)(word >> 40), p6[at] = (uint8_t)(word >> 48), p7[at] = (uint8_t)(word >> 56)

/* The loops over words of one size. Every call passes a constant UNIT, so that the compiler unrolls them. */
#define KERNELS(WORD, BYTES)                                                                                           \
    static inline WORD load_##WORD(const uint8_t *from) {                                                              \
        WORD word;                                                                                                     \
        memcpy(&word, from, BYTES);                                                                                    \
        return word;                                                                                                   \
    }                                                                                                                  \
    static inline WORD zigzag_##WORD(WORD difference) {                                                                \
        return (WORD)((WORD)(difference << 1) ^ (WORD)(0 - (difference >> (8 * BYTES - 1))));                          \
    }                                                                                                                  \
    /* Moves the differences of one unit to their places among the words of their groups. */                           \
    static inline void group_unit_##WORD(const uint8_t *words, const uint8_t *base, uint32_t *cursors,                 \
                                         uint8_t *grouped, const size_t UNIT) {                                        \
        WORD unit[UNIT_ROOM], of_base[UNIT_ROOM];                                                                      \
        uint32_t places[UNIT_ROOM];                                                                                    \
        memcpy(unit, words, UNIT * BYTES);                                                                             \
        memcpy(of_base, base, UNIT * BYTES);                                                                           \
        memcpy(places, cursors, UNIT * sizeof *places);                                                                \
        for (size_t place = 0; place < UNIT; place++)                                                                  \
            cursors[place] = places[place] + 1;                                                                        \
        for (size_t place = 0; place < UNIT; place++)                                                                  \
            unit[place] = (WORD)(unit[place] - of_base[place]);                                                        \
        for (size_t place = 0; place < UNIT; place++)                                                                  \
            memcpy(grouped + BYTES * (size_t)places[place], &unit[place], BYTES);                                      \
    }                                                                                                                  \
    static inline void group_units_##WORD(Order *order, const uint8_t *restrict words, const uint8_t *restrict base,   \
                                          uint8_t *restrict grouped, const size_t UNIT) {                              \
        size_t n_units = order->n_words / UNIT, length = n_units / TC_STREAMS;                                         \
        for (size_t at = 0; at < length; at++)                                                                         \
            for (size_t stream = 0; stream < TC_STREAMS; stream++) {                                                   \
                size_t number = stream * length + at, first = number * (UNIT * BYTES);                                 \
                uint32_t *cursors = order->cursors.places[stream] + order->classes[number] * UNIT;                     \
                group_unit_##WORD(words + first, base + first, cursors, grouped, UNIT);                                \
            }                                                                                                          \
        for (size_t number = TC_STREAMS * length; number < n_units; number++) {                                        \
            size_t first = number * (UNIT * BYTES);                                                                    \
            uint32_t *cursors = order->cursors.places[TC_STREAMS - 1] + order->classes[number] * UNIT;                 \
            group_unit_##WORD(words + first, base + first, cursors, grouped, UNIT);                                    \
        }                                                                                                              \
    }                                                                                                                  \
    /* Writes the eight bits below the top one of each word. */                                                        \
    TC_VECTORS static void magnitudes_##WORD(const uint8_t *restrict base, size_t n_words,                             \
                                             uint8_t *restrict magnitudes) {                                           \
        for (size_t at = 0; at < n_words; at++)                                                                        \
            magnitudes[at] = (uint8_t)((WORD)(load_##WORD(base + at * BYTES) << 1) >> (8 * BYTES - 8));                \
    }                                                                                                                  \
    TC_VECTORS static void scatter_words_##WORD(const uint8_t *restrict words, size_t n_words,                         \
                                                uint8_t *restrict planes) {                                            \
        PLANES_##BYTES;                                                                                                \
        for (size_t at = 0; at < n_words; at++) {                                                                      \
            WORD word = load_##WORD(words + at * BYTES);                                                               \
            PUT_##BYTES;                                                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    TC_VECTORS static void scatter_zigzag_##WORD(const uint8_t *restrict differences, size_t n_words,                  \
                                                 uint8_t *restrict planes) {                                           \
        PLANES_##BYTES;                                                                                                \
        for (size_t at = 0; at < n_words; at++) {                                                                      \
            WORD word = zigzag_##WORD(load_##WORD(differences + at * BYTES));                                          \
            PUT_##BYTES;                                                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    TC_VECTORS static void scatter_differences_##WORD(const uint8_t *restrict words, const uint8_t *restrict base,     \
                                                      size_t n_words, uint8_t *restrict planes) {                      \
        PLANES_##BYTES;                                                                                                \
        for (size_t at = 0; at < n_words; at++) {                                                                      \
            WORD word = load_##WORD(words + at * BYTES), of_base = load_##WORD(base + at * BYTES);                     \
            word = zigzag_##WORD((WORD)(word - of_base));                                                              \
            PUT_##BYTES;                                                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    static void split_##WORD(Order *order, const uint8_t *restrict words, const uint8_t *restrict base,                \
                             uint8_t *restrict grouped, uint8_t *restrict planes) {                                    \
        size_t n_words = order->n_words;                                                                               \
        if (order->classes != NULL) {                                                                                  \
            /* Writing a hundred places of each plane would take twice as long. */                                     \
            WITH_CONSTANT(order->unit, group_units_##WORD, order, words, base, grouped)                                \
            scatter_zigzag_##WORD(grouped, n_words, planes);                                                           \
        } else if (base != NULL)                                                                                       \
            scatter_differences_##WORD(words, base, n_words, planes);                                                  \
        else                                                                                                           \
            scatter_words_##WORD(words, n_words, planes);                                                              \
    }

KERNELS(uint8_t, 1)
KERNELS(uint16_t, 2)
KERNELS(uint32_t, 4)
KERNELS(uint64_t, 8)

/* A word has 1, 2, 4 or 8 bytes, and a unit as many words. */
static int is_power(size_t count) { return count == 1 || count == 2 || count == 4 || count == 8; }

/* Return the number of classes, n_groups to the power of unit; 0 if there are too many. */
static size_t count_classes(size_t n_groups, size_t unit) {
    size_t n_classes = 1;
    if (n_groups < 1 || n_groups > TC_MOST_CLASSES || !is_power(unit))
        return 0;
    for (size_t place = 0; place < unit; place++)
        if ((n_classes *= n_groups) > TC_MOST_CLASSES)
            return 0;
    return n_classes;
}

/* Number units by the groups of their words, the digits of the number, the first word's the last one. */
TC_VECTORS static void number_groups(const uint8_t *restrict magnitudes, size_t n_words, const uint8_t *thresholds,
                                     size_t n_groups, uint8_t *restrict groups) {
    memset(groups, 0, n_words);
    for (size_t number = 0; number + 1 < n_groups; number++)
        for (size_t at = 0; at < n_words; at++)
            groups[at] = (uint8_t)(groups[at] + (magnitudes[at] > thresholds[number]));
}

/* Make one number of two neighbours, each of `n_values` values. */
TC_VECTORS static void join_numbers(const uint8_t *numbers, size_t n_halves, unsigned n_values, uint8_t *half) {
    for (size_t at = 0; at < n_halves; at++) {
        uint16_t both;
        memcpy(&both, numbers + 2 * at, sizeof both);
        half[at] = (uint8_t)((both & 255) + n_values * (both >> 8));
    }
}

/* Count the units of each class. Neighbours are often of one class, and each count would wait for the one before; counts of the
 * streams do not. */
static void count_classes_of_streams(const uint8_t *classes, size_t n_units, TcCounts *of_class) {
    size_t length = n_units / TC_STREAMS;
    memset(of_class, 0, sizeof *of_class);
    for (size_t at = 0; at < length; at++)
        for (size_t stream = 0; stream < TC_STREAMS; stream++)
            of_class->counts[stream][classes[stream * length + at]]++;
    for (size_t at = TC_STREAMS * length; at < n_units; at++)
        of_class->counts[TC_STREAMS - 1][classes[at]]++;
}

int tc_count_units(const uint8_t *base, size_t n_words, size_t width, const uint8_t *thresholds, size_t n_thresholds,
                   size_t unit, uint8_t *classes, TcCounts *of_class) {
    size_t n_groups = n_thresholds + 1, n_classes = count_classes(n_groups, unit);
    if (!is_power(width) || n_classes == 0 || n_words % unit != 0)
        return 0;
    uint8_t magnitudes[BLOCK_WORDS], groups[BLOCK_WORDS], pairs[BLOCK_WORDS / 2], fours[BLOCK_WORDS / 4];
    size_t n_units = n_words / unit, units_of_block = BLOCK_WORDS / unit;
    for (size_t begin = 0; begin < n_units; begin += units_of_block) {
        size_t here = n_units - begin < units_of_block ? n_units - begin : units_of_block, n_here = here * unit;
        const uint8_t *block = base + begin * unit * width;
        uint8_t *numbers = classes + begin;
        if (width == 1)
            magnitudes_uint8_t(block, n_here, magnitudes);
        else if (width == 2)
            magnitudes_uint16_t(block, n_here, magnitudes);
        else if (width == 4)
            magnitudes_uint32_t(block, n_here, magnitudes);
        else
            magnitudes_uint64_t(block, n_here, magnitudes);
        unsigned values = (unsigned)n_groups;
        number_groups(magnitudes, n_here, thresholds, n_groups, unit == 1 ? numbers : groups);
        if (unit > 1)
            join_numbers(groups, n_here / 2, values, unit == 2 ? numbers : pairs);
        if (unit > 2)
            join_numbers(pairs, n_here / 4, values * values, unit == 4 ? numbers : fours);
        if (unit > 4)
            join_numbers(fours, n_here / 8, values * values * values * values, numbers);
    }
    count_classes_of_streams(classes, n_units, of_class);
    return 1;
}

void tc_count_groups(const TcCounts *of_class, size_t n_groups, size_t unit, size_t *lengths) {
    memset(lengths, 0, n_groups * sizeof *lengths);
    for (size_t number = 0; number < count_classes(n_groups, unit); number++)
        for (size_t place = 0, rest = number; place < unit; place++, rest /= n_groups)
            for (size_t stream = 0; stream < TC_STREAMS; stream++)
                lengths[rest % n_groups] += of_class->counts[stream][number];
}

void tc_begin_order(const TcCounts *of_class, size_t n_groups, size_t unit, TcCursors *cursors) {
    size_t next[TC_MOST_CLASSES + 1] = {0}, n_classes = count_classes(n_groups, unit);
    tc_count_groups(of_class, n_groups, unit, next + 1);
    for (size_t group = 1; group < n_groups; group++)
        next[group] += next[group - 1];
    /* Groups one after the other; in each the first words of units, then the second ones, ...; of those the units in the
     * order of their classes. */
    for (size_t place = 0, power = 1; place < unit; place++, power *= n_groups)
        for (size_t number = 0; number < n_classes; number++) {
            size_t group = number / power % n_groups;
            for (size_t stream = 0; stream < TC_STREAMS; stream++) {
                cursors->places[stream][number * unit + place] = (uint32_t)next[group];
                next[group] += of_class->counts[stream][number];
            }
        }
}

/* Split words; `grouped` is room for all of them if there are classes. */
static void split_words(Order *order, const uint8_t *words, size_t width, const uint8_t *base, uint8_t *grouped,
                        uint8_t *planes) {
    if (width == 1)
        split_uint8_t(order, words, base, grouped, planes);
    else if (width == 2)
        split_uint16_t(order, words, base, grouped, planes);
    else if (width == 4)
        split_uint32_t(order, words, base, grouped, planes);
    else
        split_uint64_t(order, words, base, grouped, planes);
}

void tc_split_units(const uint8_t *words, size_t n_words, size_t width, const uint8_t *base, const uint8_t *classes,
                    const TcCounts *of_class, size_t n_groups, size_t unit, uint8_t *grouped, uint8_t *planes) {
    Order order = {.n_words = n_words, .unit = unit, .classes = classes};
    tc_begin_order(of_class, n_groups, unit, &order.cursors);
    split_words(&order, words, width, base, grouped, planes);
}

void tc_split(const uint8_t *words, size_t n_words, size_t width, const uint8_t *base, uint8_t *planes) {
    Order order = {.n_words = n_words};
    split_words(&order, words, width, base, NULL, planes);
}
