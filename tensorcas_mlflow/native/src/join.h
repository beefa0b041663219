/* Words from byte planes: the reverse of tc_split, in the steps that the decoder takes. */
#ifndef TC_JOIN_H
#define TC_JOIN_H

#include <stddef.h>
#include <stdint.h>

#include "words.h"

/* Loops that a compiler turns into vectors are built once for each kind of processor; the linker's loader chooses. Sanitizers
 * cannot run in a chooser. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TC_VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define TC_VECTORS
#endif

/* Contents of planes: words, zigzag differences to be kept as differences, or zigzag differences from a base. */
typedef enum { TC_WORDS, TC_DIFFERENCES, TC_SUMS } TcMeaning;

/* Put words together from `width` planes of `n_words` bytes each, the least significant first. With TC_SUMS each is added to a
 * word of `base`. */
void tc_join_planes(const uint8_t *const *planes, size_t n_words, size_t width, TcMeaning meaning, const uint8_t *base,
                    uint8_t *words);

/* Move units of differences from the order of their groups to their places, and add them to the base. The cursors come
 * from tc_begin_order. */
void tc_ungroup(const uint8_t *grouped, size_t n_words, size_t width, const uint8_t *base, const uint8_t *classes,
                size_t unit, TcCursors *cursors, uint8_t *words);

#endif
