/* Words and their byte planes, for codecs 3 and 4 (`tests/reference/words.py` says what each function does).
 *
 * The functions need neither Python nor its lock. Buffers do not overlap. */
#ifndef TC_WORDS_H
#define TC_WORDS_H

#include <stddef.h>
#include <stdint.h>

enum { TC_MOST_CLASSES = 256, TC_MOST_UNIT = 8 };

/* Units fall into TC_STREAMS streams of neighbours, of equal length but for the last one, each with counts and cursors of its
 * own, so that work on one stream does not wait for work on another. */
enum { TC_STREAMS = 4 };

typedef struct {
    uint32_t counts[TC_STREAMS][TC_MOST_CLASSES]; /* of the units of each class */
} TcCounts;

typedef struct {
    uint32_t places[TC_STREAMS][TC_MOST_CLASSES * TC_MOST_UNIT]; /* for each class and place in a unit: of its next word */
} TcCursors;

/* Number the units of a base by the groups of their words, and count the units of each class. `classes` has room for one byte a
 * unit. Return 0 if there are no such words or units, n_words is not whole units, or there are more than TC_MOST_CLASSES classes.
 * tc_count_groups makes the words of each of n_thresholds + 1 groups of the counts, and tc_begin_order the places of the words in
 * their groups. */
int tc_count_units(const uint8_t *base, size_t n_words, size_t width, const uint8_t *thresholds, size_t n_thresholds,
                   size_t unit, uint8_t *classes, TcCounts *of_class);
void tc_count_groups(const TcCounts *of_class, size_t n_groups, size_t unit, size_t *lengths);
void tc_begin_order(const TcCounts *of_class, size_t n_groups, size_t unit, TcCursors *cursors);

/* Split words, or their differences from a base unless it is NULL, into planes: width bytes a word in each buffer. */
void tc_split(const uint8_t *words, size_t n_words, size_t width, const uint8_t *base, uint8_t *planes);

/* Split differences into planes, in the order of their groups, with the classes and counts that tc_count_units has made; `grouped`
 * is room for all words. */
void tc_split_units(const uint8_t *words, size_t n_words, size_t width, const uint8_t *base, const uint8_t *classes,
                    const TcCounts *of_class, size_t n_groups, size_t unit, uint8_t *grouped, uint8_t *planes);

#endif
