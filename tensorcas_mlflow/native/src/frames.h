/* Zstandard frames. libzstd makes and reads them where the core was built with it; elsewhere the package zstandard does, which
 * needs the interpreter's lock for every frame (`native/_frames.py`). */
#ifndef TC_FRAMES_H
#define TC_FRAMES_H

#include <stddef.h>
#include <stdint.h>

enum { TC_N_LEVELS = 23 };
/* Ways to compress; the others are levels of Zstandard's. */
enum { TC_ENTROPY = 0, TC_RECORDS = TC_N_LEVELS, TC_N_WAYS };

#define TC_NO_FRAME SIZE_MAX              /* it does not fit */
#define TC_NO_FRAME_MEMORY (SIZE_MAX - 1) /* there is no memory */

/* Contexts for one thread at a time, each set up at its first use. */
typedef struct TcFrames TcFrames;

/* Return the version of libzstd in the core; an empty text if it has none. */
const char *tc_zstd_version(void);

/* Return no contexts yet, or NULL if there is no memory. */
TcFrames *tc_new_frames(void);

/* Free contexts, which may be NULL. */
void tc_free_frames(TcFrames *frames);

/* Return the most bytes that the frame of so many bytes takes. */
size_t tc_frame_bound(size_t n_bytes);

/* Compress into one frame of at most `room` bytes, whose blocks end at each multiple of `step` bytes; 0 leaves that to Zstandard.
 * Return its size, TC_NO_FRAME or TC_NO_FRAME_MEMORY. */
size_t tc_compress(TcFrames *frames, int way, uint8_t *out, size_t room, const uint8_t *data, size_t n_bytes, size_t step);

/* Decompress the one whole frame that `stored` is, which states `n_bytes` as its content size. Return a status of decode.h. */
int tc_decompress(TcFrames *frames, const uint8_t *stored, size_t n_stored, uint8_t *out, size_t n_bytes);

#endif
