/* Words from byte planes (join.h).
 *
 * Every step but one is a loop over neighbours, which the compiler turns into vectors. The exception moves words from the order
 * of their groups to their places; it does nothing else, so that the processor has many of its loads under way. */
#include "join.h"

#include <string.h>

enum { BLOCK = 2048 };

#define LOOPS(WORD)                                                                                                    \
    TC_VECTORS static void add_##WORD(const WORD *restrict words, const uint8_t *restrict base, size_t n_words,        \
                                      uint8_t *restrict out) {                                                         \
        for (size_t at = 0; at < n_words; at++) {                                                                      \
            WORD word;                                                                                                 \
            memcpy(&word, base + at * sizeof word, sizeof word);                                                       \
            word = (WORD)(word + words[at]);                                                                           \
            memcpy(out + at * sizeof word, &word, sizeof word);                                                        \
        }                                                                                                              \
    }                                                                                                                  \
    /* UNIT is constant in every call. */                                                                              \
    static inline void move_##WORD(const uint8_t *restrict grouped, size_t class, uint32_t *restrict cursors,          \
                                   WORD *restrict words, const size_t UNIT) {                                          \
        uint32_t *mine = cursors + class * UNIT, places[TC_MOST_UNIT];                                                 \
        memcpy(places, mine, UNIT * sizeof *places);                                                                   \
        for (size_t place = 0; place < UNIT; place++)                                                                  \
            mine[place] = places[place] + 1;                                                                           \
        for (size_t place = 0; place < UNIT; place++)                                                                  \
            memcpy(words + place, grouped + places[place] * sizeof *words, sizeof *words);                             \
    }                                                                                                                  \
    static inline void ungroup_##WORD(const uint8_t *grouped, size_t n_words, const uint8_t *base,                     \
                                      const uint8_t *classes, TcCursors *cursors, uint8_t *out, const size_t UNIT) {   \
        WORD words[TC_STREAMS][BLOCK / TC_STREAMS];                                                                    \
        size_t n_units = n_words / UNIT, length = n_units / TC_STREAMS, most = BLOCK / TC_STREAMS / UNIT;              \
        for (size_t begin = 0; begin < length; begin += most) {                                                        \
            size_t here = length - begin < most ? length - begin : most;                                               \
            for (size_t at = 0; at < here; at++)                                                                       \
                for (size_t stream = 0; stream < TC_STREAMS; stream++)                                                 \
                    move_##WORD(grouped, classes[stream * length + begin + at], cursors->places[stream],               \
                                words[stream] + at * UNIT, UNIT);                                                      \
            for (size_t stream = 0; stream < TC_STREAMS; stream++) {                                                   \
                size_t first = (stream * length + begin) * UNIT * sizeof(WORD);                                        \
                add_##WORD(words[stream], base + first, here * UNIT, out + first);                                     \
            }                                                                                                          \
        }                                                                                                              \
        for (size_t number = TC_STREAMS * length; number < n_units; number++) {                                        \
            size_t first = number * UNIT * sizeof(WORD);                                                               \
            move_##WORD(grouped, classes[number], cursors->places[TC_STREAMS - 1], words[0], UNIT);                    \
            add_##WORD(words[0], base + first, UNIT, out + first);                                                     \
        }                                                                                                              \
    }

LOOPS(uint8_t)
LOOPS(uint16_t)
LOOPS(uint32_t)
LOOPS(uint64_t)

#define PLANES_1 const uint8_t *restrict p0 = planes[0]
#define PLANES_2 PLANES_1, *restrict p1 = planes[1]
#define PLANES_4 PLANES_2, *restrict p2 = planes[2], *restrict p3 = planes[3]
#define PLANES_8 PLANES_4, *restrict p4 = planes[4], *restrict p5 = planes[5], *restrict p6 = planes[6], *restrict p7 = planes[7]

#define WORD_1 p0[at]
#define WORD_2 (p0[at] | p1[at] << 8)
#define WORD_4 ((uint32_t)WORD_2 | (uint32_t)p2[at] << 16 | (uint32_t)p3[at] << 24)
#define WORD_8 (WORD_4 | ((uint64_t)(p4[at] | p5[at] << 8) | (uint64_t)p6[at] << 16 | (uint64_t)p7[at] << 24) << 32)

/* One pass over the planes, for each meaning of the words. The memory of words need not be aligned. */
#define JOINS(WORD, WIDTH)                                                                                             \
    TC_VECTORS static void join_words_##WORD(const uint8_t *const *planes, size_t n_words, uint8_t *restrict words) {  \
        PLANES_##WIDTH;                                                                                                \
        for (size_t at = 0; at < n_words; at++) {                                                                      \
            WORD word = (WORD)WORD_##WIDTH;                                                                            \
            memcpy(words + at * sizeof word, &word, sizeof word);                                                      \
        }                                                                                                              \
    }                                                                                                                  \
    TC_VECTORS static void join_differences_##WORD(const uint8_t *const *planes, size_t n_words,                       \
                                                   uint8_t *restrict words) {                                          \
        PLANES_##WIDTH;                                                                                                \
        for (size_t at = 0; at < n_words; at++) {                                                                      \
            WORD word = (WORD)WORD_##WIDTH;                                                                            \
            word = (WORD)((WORD)(word >> 1) ^ (WORD)(0 - (word & 1)));                                                 \
            memcpy(words + at * sizeof word, &word, sizeof word);                                                      \
        }                                                                                                              \
    }                                                                                                                  \
    TC_VECTORS static void join_sums_##WORD(const uint8_t *const *planes, size_t n_words, const uint8_t *restrict base, \
                                            uint8_t *restrict words) {                                                 \
        PLANES_##WIDTH;                                                                                                \
        for (size_t at = 0; at < n_words; at++) {                                                                      \
            WORD word = (WORD)WORD_##WIDTH, of_base;                                                                   \
            memcpy(&of_base, base + at * sizeof of_base, sizeof of_base);                                              \
            word = (WORD)((WORD)((WORD)(word >> 1) ^ (WORD)(0 - (word & 1))) + of_base);                               \
            memcpy(words + at * sizeof word, &word, sizeof word);                                                      \
        }                                                                                                              \
    }

JOINS(uint8_t, 1)
JOINS(uint16_t, 2)
JOINS(uint32_t, 4)
JOINS(uint64_t, 8)

#define JOIN(WORD)                                                                                                     \
    do {                                                                                                               \
        if (meaning == TC_WORDS)                                                                                       \
            join_words_##WORD(planes, n_words, words);                                                                 \
        else if (meaning == TC_DIFFERENCES)                                                                            \
            join_differences_##WORD(planes, n_words, words);                                                           \
        else                                                                                                           \
            join_sums_##WORD(planes, n_words, base, words);                                                            \
    } while (0)

void tc_join_planes(const uint8_t *const *planes, size_t n_words, size_t width, TcMeaning meaning, const uint8_t *base,
                    uint8_t *words) {
    if (width == 1)
        JOIN(uint8_t);
    else if (width == 2)
        JOIN(uint16_t);
    else if (width == 4)
        JOIN(uint32_t);
    else
        JOIN(uint64_t);
}

#define UNGROUP(WORD)                                                                                                  \
    do {                                                                                                               \
        if (unit == 1)                                                                                                 \
            ungroup_##WORD(grouped, n_words, base, classes, cursors, words, 1);                                        \
        else if (unit == 2)                                                                                            \
            ungroup_##WORD(grouped, n_words, base, classes, cursors, words, 2);                                        \
        else if (unit == 4)                                                                                            \
            ungroup_##WORD(grouped, n_words, base, classes, cursors, words, 4);                                        \
        else                                                                                                           \
            ungroup_##WORD(grouped, n_words, base, classes, cursors, words, 8);                                        \
    } while (0)

void tc_ungroup(const uint8_t *grouped, size_t n_words, size_t width, const uint8_t *base, const uint8_t *classes,
                size_t unit, TcCursors *cursors, uint8_t *words) {
    if (width == 1)
        UNGROUP(uint8_t);
    else if (width == 2)
        UNGROUP(uint16_t);
    else if (width == 4)
        UNGROUP(uint32_t);
    else
        UNGROUP(uint64_t);
}
