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
    /* UNIT is constant in every call. The cursors of a class are one vector, and all of them advance by one. */       \
    static inline void move_##WORD(const uint8_t *restrict grouped, const uint8_t *restrict classes, size_t n_units,   \
                                   uint32_t *restrict cursors, WORD *restrict words, const size_t UNIT) {              \
        for (size_t number = 0; number < n_units; number++) {                                                          \
            uint32_t *mine = cursors + classes[number] * UNIT, places[8];                                              \
            memcpy(places, mine, UNIT * sizeof *places);                                                               \
            for (size_t place = 0; place < UNIT; place++)                                                              \
                mine[place] = places[place] + 1;                                                                       \
            for (size_t place = 0; place < UNIT; place++)                                                              \
                memcpy(words + number * UNIT + place, grouped + places[place] * sizeof *words, sizeof *words);         \
        }                                                                                                              \
    }                                                                                                                  \
    static void ungroup_##WORD(const uint8_t *grouped, size_t n_words, const uint8_t *base, const uint8_t *classes,    \
                               size_t unit, uint32_t *cursors, uint8_t *out) {                                         \
        WORD words[BLOCK];                                                                                             \
        for (size_t begin = 0; begin < n_words; begin += BLOCK) {                                                      \
            size_t here = n_words - begin < BLOCK ? n_words - begin : BLOCK, n_units = here / unit;                    \
            const uint8_t *of_units = classes + begin / unit;                                                          \
            if (unit == 1)                                                                                             \
                move_##WORD(grouped, of_units, n_units, cursors, words, 1);                                            \
            else if (unit == 2)                                                                                        \
                move_##WORD(grouped, of_units, n_units, cursors, words, 2);                                            \
            else if (unit == 4)                                                                                        \
                move_##WORD(grouped, of_units, n_units, cursors, words, 4);                                            \
            else                                                                                                       \
                move_##WORD(grouped, of_units, n_units, cursors, words, 8);                                            \
            add_##WORD(words, base + begin * sizeof(WORD), here);                                                      \
            memcpy(out + begin * sizeof(WORD), words, here * sizeof(WORD));                                            \
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

void tc_ungroup(const uint8_t *grouped, size_t n_words, size_t width, const uint8_t *base, const uint8_t *classes,
                size_t unit, uint32_t *cursors, uint8_t *words) {
    if (width == 1)
        ungroup_uint8_t(grouped, n_words, base, classes, unit, cursors, words);
    else if (width == 2)
        ungroup_uint16_t(grouped, n_words, base, classes, unit, cursors, words);
    else if (width == 4)
        ungroup_uint32_t(grouped, n_words, base, classes, unit, cursors, words);
    else
        ungroup_uint64_t(grouped, n_words, base, classes, unit, cursors, words);
}
