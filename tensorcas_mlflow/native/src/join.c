/* Words from byte planes (join.h).
 *
 * Every step but one is a loop over neighbours, which the compiler turns into vectors. The exception moves words from the order
 * of their groups to their places; it does nothing else, so that the processor has many of its loads under way. */
#include "join.h"

#include <string.h>

enum { BLOCK = 2048 };

TC_VECTORS static void join_2(const uint8_t *restrict low, const uint8_t *restrict high, size_t n_words,
                              uint16_t *restrict words) {
    for (size_t at = 0; at < n_words; at++)
        words[at] = (uint16_t)(low[at] | high[at] << 8);
}

TC_VECTORS static void join_halves(const uint16_t *restrict low, const uint16_t *restrict high, size_t n_words,
                                   uint32_t *restrict words) {
    for (size_t at = 0; at < n_words; at++)
        words[at] = low[at] | (uint32_t)high[at] << 16;
}

TC_VECTORS static void join_quarters(const uint32_t *restrict low, const uint32_t *restrict high, size_t n_words,
                                     uint64_t *restrict words) {
    for (size_t at = 0; at < n_words; at++)
        words[at] = low[at] | (uint64_t)high[at] << 32;
}

#define LOOPS(WORD)                                                                                                    \
    TC_VECTORS static void undo_zigzag_##WORD(WORD *restrict words, size_t n_words) {                                  \
        for (size_t at = 0; at < n_words; at++)                                                                        \
            words[at] = (WORD)((WORD)(words[at] >> 1) ^ (WORD)(0 - (words[at] & 1)));                                  \
    }                                                                                                                  \
    TC_VECTORS static void add_##WORD(WORD *restrict words, const uint8_t *restrict base, size_t n_words) {            \
        for (size_t at = 0; at < n_words; at++) {                                                                      \
            WORD of_base;                                                                                              \
            memcpy(&of_base, base + at * sizeof of_base, sizeof of_base);                                              \
            words[at] = (WORD)(words[at] + of_base);                                                                   \
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
                add_##WORD(words[stream], base + first, here * UNIT);                                                  \
                memcpy(out + first, words[stream], here * UNIT * sizeof(WORD));                                        \
            }                                                                                                          \
        }                                                                                                              \
        for (size_t number = TC_STREAMS * length; number < n_units; number++) {                                        \
            size_t first = number * UNIT * sizeof(WORD);                                                               \
            move_##WORD(grouped, classes[number], cursors->places[TC_STREAMS - 1], words[0], UNIT);                    \
            add_##WORD(words[0], base + first, UNIT);                                                                  \
            memcpy(out + first, words[0], UNIT * sizeof(WORD));                                                        \
        }                                                                                                              \
    }                                                                                                                  \
    static void finish_##WORD(WORD *words, size_t n_words, TcMeaning meaning, const uint8_t *base, uint8_t *out) {     \
        if (meaning != TC_WORDS)                                                                                       \
            undo_zigzag_##WORD(words, n_words);                                                                        \
        if (meaning == TC_SUMS)                                                                                        \
            add_##WORD(words, base, n_words);                                                                          \
        memcpy(out, words, n_words * sizeof *words);                                                                   \
    }

LOOPS(uint8_t)
LOOPS(uint16_t)
LOOPS(uint32_t)
LOOPS(uint64_t)

/* Put at most BLOCK words of four planes together. */
static void join_4(const uint8_t *const *planes, size_t begin, size_t here, uint32_t *words) {
    uint16_t low[BLOCK], high[BLOCK];
    join_2(planes[0] + begin, planes[1] + begin, here, low);
    join_2(planes[2] + begin, planes[3] + begin, here, high);
    join_halves(low, high, here, words);
}

void tc_join_planes(const uint8_t *const *planes, size_t n_words, size_t width, TcMeaning meaning, const uint8_t *base,
                    uint8_t *words) {
    union {
        uint8_t bytes[BLOCK];
        uint16_t halves[BLOCK];
        uint32_t singles[BLOCK];
        uint64_t doubles[BLOCK];
    } block;
    for (size_t begin = 0; begin < n_words; begin += BLOCK) {
        size_t here = n_words - begin < BLOCK ? n_words - begin : BLOCK;
        const uint8_t *of_base = base == NULL ? NULL : base + begin * width;
        uint8_t *out = words + begin * width;
        if (width == 1) {
            memcpy(block.bytes, planes[0] + begin, here);
            finish_uint8_t(block.bytes, here, meaning, of_base, out);
        } else if (width == 2) {
            join_2(planes[0] + begin, planes[1] + begin, here, block.halves);
            finish_uint16_t(block.halves, here, meaning, of_base, out);
        } else if (width == 4) {
            join_4(planes, begin, here, block.singles);
            finish_uint32_t(block.singles, here, meaning, of_base, out);
        } else {
            uint32_t low[BLOCK], high[BLOCK];
            join_4(planes, begin, here, low);
            join_4(planes + 4, begin, here, high);
            join_quarters(low, high, here, block.doubles);
            finish_uint64_t(block.doubles, here, meaning, of_base, out);
        }
    }
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
