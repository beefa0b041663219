/* BLAKE3, the hash without a key, with digests of 32 bytes.
 *
 * Written from the specification: https://github.com/BLAKE3-team/BLAKE3-specs (blake3.pdf). No function allocates memory or
 * fails. All may run on any number of threads at once. */
#ifndef TC_BLAKE3_H
#define TC_BLAKE3_H

#include <stddef.h>
#include <stdint.h>

enum { TC_DIGEST = 32, TC_SUBTREE = 256 << 10 };

/* Hash one message. */
void tc_blake3(const uint8_t *data, size_t n, uint8_t out[TC_DIGEST]);

/* Hash many messages; small ones side by side, in the lanes of vectors. */
void tc_blake3_many(const uint8_t *const *data, const size_t *n, size_t count, uint8_t (*out)[TC_DIGEST]);

/* Copy a message and hash the copy, each part while it is in the cache. The areas do not overlap. */
void tc_blake3_copy(const uint8_t *data, size_t n, uint8_t *copy, uint8_t out[TC_DIGEST]);

/* Hash a part of a longer message, so that threads share it: TC_SUBTREE bytes from the given multiple of TC_SUBTREE on, or
 * fewer at the message's end. `tc_blake3_join` makes the digest of the parts. `copy` may be NULL. */
void tc_blake3_part(const uint8_t *data, size_t n, size_t begin, uint8_t *copy, uint8_t out[TC_DIGEST]);

/* Return the digest of a message of two parts or more; overwrites the parts. */
void tc_blake3_join(uint8_t (*parts)[TC_DIGEST], size_t n_parts, uint8_t out[TC_DIGEST]);

/* The names of the implementations that run on this processor, the one in use first; ends with NULL. */
const char *const *tc_blake3_names(void);

/* Use the implementation of this name, for tests; return 0 if this processor has none. */
int tc_blake3_use(const char *name);

#endif
