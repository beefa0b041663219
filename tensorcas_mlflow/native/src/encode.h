/* The encoder: payloads of chunks, and their entries in a pack's table (docs/format.md, Codecs and Packs).
 *
 * `tc_encode_chunks` encodes the chunks of one group into one buffer, without the interpreter's lock; it reads and decodes the base
 * of a delta just before it encodes the delta. The other functions encode one chunk with one codec. All make the decisions that
 * the numpy code in `tests/reference` makes.
 *
 * A worker holds the Zstandard contexts and the scratch memory of one call. Workers are kept for later calls, so a context is
 * set up once. */
#ifndef TC_ENCODE_H
#define TC_ENCODE_H

#include "methods.h"

#include "decode.h"
#include "frames.h"

#include <stddef.h>
#include <stdint.h>

enum { RAW = 0, WHOLE = 1, SHUFFLE_ZSTD = 2, DELTA = 3, PLANES = 4 };           /* codecs */
enum { PLAIN = 0, GROUPED = 1, DECAYED = 2, SPARSE = 3, NUDGED = 4 };         /* transforms */
enum { KEEP = 0, ENTROPY = 1, MATCH = 2 };                                    /* codings of planes */
enum { SMALL_EFFORT = 2 };

#define NOT_SMALLER SIZE_MAX
#define LEAST_GAIN 0.97
#define CLEARLY_SMALLER 0.97
#define LEAST_PLANE_GAIN 0.985
#define MOST_BEHIND 0.02
#define WORTH_SLOWER 0.99
#define NUDGED_WORTH 0.94
#define ENOUGH 0.96

enum {
    MOST_PLANES = 8,
    MOST_GROUPS = 15,
    PLANE_SAMPLE_WORDS = 4096,
    FEW_WORDS = 2 * PLANE_SAMPLE_WORDS,
    NOISE_AT_LEAST = 166,
    NOISE_AT_MOST = 346,
    SHARE_SAMPLE_WORDS = 2048,
    N_STRETCHES = 4,
    LEAST_ENCODED_BYTES = 32,
    LEAST_SHUFFLED_BYTES = 512,
    MAX_RECORD_BYTES = 0xFFFF,
    MAX_TYPESIZE = 255,
    MIXED_ITEMSIZE = 8,
    MIXED_TRIED_LEVEL = 3,
    SMALL_CHUNK_BYTES = 64 << 10,
    RECORDS_TRIED_BYTES = 16 << 10,
    TRIED_BYTES = 64 << 10,
    LEAST_DELTA_BYTES = 1024,
    LEAST_GROUPED_BYTES = 32 << 10,
    MOST_BLOCKS = 8,
    LEAST_BLOCK_BYTES = 1024,
    DECAY_SAMPLE_WORDS = 4096,
    MOST_DECAY_SAMPLE = 2 * DECAY_SAMPLE_WORDS,
    LEAST_TIMES = 8,
    MOST_UNITS = 1 << 20,
    LEAST_SPARSE_WORDS = 2,
    LEAST_NUDGED_WORDS = 4,
    LONG_GAP = 255,
    SPARSE_WORTH = 1024,
    SAMPLED = 32,
    ALIGNMENT = 64,
    OVERHEAD_BYTES = 4096, /* headers of a payload, while it is made */
    KEPT_BYTES = 4 << 20,  /* a larger scratch buffer is freed after the call */
    MOST_IDLE = 8, /* buffers of payloads, each of at most so many bytes */
    MOST_IDLE_BYTES = 5 << 19,
    LEAST_ROOM_BYTES = 5 << 18,
    MAX_CHUNK_BYTES = 1 << 30,
};

enum {
    AREA_COPY,
    AREA_PLANES,
    AREA_FRAME,
    AREA_OTHER_FRAME,
    AREA_CLASSES,
    AREA_DECAYED,
    AREA_OTHER,
    AREA_OTHER_PAYLOAD,
    AREA_SHUFFLED,
    AREA_GROUPED,
    N_AREAS
};

typedef struct TcWorker {
    struct TcWorker *next;
    TcFrames *frames;
    uint8_t *areas[N_AREAS];
    size_t rooms[N_AREAS];
    TcDecoder *decoder; /* of bases */
    int has_failed;     /* for lack of memory */
} TcWorker;

/* --- encode_memory.c --- */

/* The payloads of one group: a buffer for Python, whose memory serves another group once nobody has a view of it. The kernel takes
 * as long to fill fresh memory as the encoder takes to fill it again. */
typedef struct {
    PyObject_HEAD
    uint8_t *data;
    size_t room;
    Py_ssize_t n_bytes;
} TcPayloads;

/* Return an idle worker, or a new one; NULL if there is no memory. Nobody waits for the lock: it may be held by a thread that
 * a fork has not taken along. */
TcWorker *tc_take_worker(void);

/* Keep a worker for later calls, without its larger scratch memory. */
void tc_give_worker(TcWorker *worker);

/* Return a buffer with room for so many bytes; NULL with an error of Python's. */
TcPayloads *tc_make_payloads(size_t needed);

/* Return scratch memory, valid until the next call for the same use; NULL if there is none. */
uint8_t *tc_area_of(TcWorker *worker, int use, size_t n_bytes);

/* Compress into at most `room` bytes, with blocks that end where the caller wants them; see `tc_compress`. Return the size, or
 * NOT_SMALLER if it does not fit. */
size_t tc_compress_in_blocks(TcWorker *worker, int way, uint8_t *out, size_t room, const uint8_t *data, size_t n_bytes, size_t step);

/* Compress like `tc_compress_in_blocks`, with blocks as Zstandard chooses them. */
size_t tc_compress_whole(TcWorker *worker, int way, uint8_t *out, size_t room, const uint8_t *data, size_t n_bytes);

/* --- encode_plain.c --- */

/* One plane of the sampled small chunks of a group: other chunks of the group need no trials that these show to be useless;
 * `Alike` of `tests/reference/planes.py`. */
typedef struct {
    int is_kept;        /* no sample's plane became smaller */
    double least, most; /* shares of their sizes that frames without matches take, a tenth wider; none if matches helped */
} TcAlike;

/* A payload under way. */
typedef struct {
    uint8_t codec;
    uint8_t typesize;
    size_t size; /* of the payload in `out`; not used if the codec is RAW */
} TcEncoded;

/* Tell whether elements are words, which have planes. */
static inline int tc_is_word(size_t itemsize) { return itemsize == 1 || itemsize == 2 || itemsize == 4 || itemsize == 8; }

/* Return the logarithm of the size of a word. */
static inline uint8_t tc_log2_of(size_t number) { return number == 1 ? 0 : number == 2 ? 1 : number == 4 ? 2 : 3; }

/* Write a number, the low byte first. */
void tc_put_u32(uint8_t *out, size_t value);

/* Copy about n_words words in four stretches; return their number, at most 2 * n_words. */
size_t tc_stretches_of(const uint8_t *words, size_t n_have, size_t width, size_t n_words, uint8_t *out);

/* Choose the coding of each plane by trying both on a sample. */
void tc_choose_codings(TcWorker *worker, const uint8_t *words, const uint8_t *base, size_t n_words, size_t width,
                       size_t n_wanted, uint8_t *codings);

/* Write the header and the encoded planes; return their size.
 *
 * The planes may lie in `out`, each at its place behind the header or further on: no plane is overwritten before it is
 * encoded. `codings` may be NULL to try all on each plane. */
size_t tc_put_planes(TcWorker *worker, const uint8_t *planes, size_t stride, size_t length, size_t width,
                     const uint8_t *codings, int effort, const TcAlike *alike, uint8_t *out);

/* Encode a chunk as planes; return the size of the payload. */
size_t tc_encode_planes(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, const uint8_t *codings,
                        int effort, const TcAlike *alike, uint8_t *out);

/* Estimate the share of its size that a chunk takes as planes, or as a delta, by the entropy of its planes' bytes with the
 * correction of Miller and Madow. */
double tc_estimate_share(const uint8_t *words, const uint8_t *base, size_t n_words, size_t width);

/* Choose the way to compress a chunk of shuffled records. */
int tc_way_for_records(size_t n_bytes, size_t itemsize);

/* Encode a chunk as shuffled records into at most `room` bytes; return NOT_SMALLER if it does not fit. */
size_t tc_encode_records(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, int way, uint8_t *out,
                         size_t room);

/* Return the payload that is the chunk itself. */
static inline TcEncoded tc_as_raw(void) { return (TcEncoded){RAW, 1, 0}; }

/* Encode a chunk with the codec that fits its elements; see `encode_best` in `tests/reference/choose.py`. */
TcEncoded tc_encode_best(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, const TcAlike *alike,
                         uint8_t *out);

/* --- encode_deltas.c --- */

/* Tell whether units of so many words fit a word of eight bytes, and their classes a byte. */
int tc_fits_unit(size_t width, size_t unit);

/* Encode a chunk as a delta; return the size of the payload. */
size_t tc_encode_delta(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, const uint8_t *base,
                       int transform, size_t unit, const uint8_t *codings, int effort, uint8_t *out);

/* Choose the transform of a chunk's differences, and the words of a unit, by trying them on a part of it; see
 * `choose_transform` in `tests/reference/choose.py`. */
void tc_choose_transform(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t width, const uint8_t *base,
                         const uint8_t *codings, int at_any_cost, int *transform, size_t *unit);

/* --- encode_groups.c --- */

/* The encoding chosen for a tensor; `store._choose` has the meaning of each. */
typedef struct {
    double plain_share;
    uint32_t itemsize;
    uint8_t effort;
    uint8_t has_codings, has_delta, has_delta_codings;
    uint8_t transform, unit;
    uint8_t codings[MOST_PLANES], delta_codings[MOST_PLANES];
    uint8_t unused[6];
} TcEncoding;

_Static_assert(sizeof(TcEncoding) == 40, "store._encode describes an encoding of this size");

enum { AS_IT_IS = -2, BY_ELEMENTS = -1 }; /* else the number of an encoding */

/* An entry of a pack's table, and its base; `layout.ENTRY`. */
typedef struct __attribute__((packed)) {
    uint8_t digest[32], stored_digest[16];
    uint64_t offset;
    uint32_t stored_bytes, raw_bytes;
    uint8_t codec, typesize, depth, effort;
    uint8_t base_pack[16], base_digest[32];
} TcEntry;

_Static_assert(sizeof(TcEntry) == 116, "an entry is as layout.ENTRY describes it");

/* The copy of a base that a delta names; `store._base_plans.NAMED`. */
typedef struct __attribute__((packed)) {
    uint8_t pack[16], digest[32], depth;
} TcNamed;

_Static_assert(sizeof(TcNamed) == 49, "a named base is as store._base_plans.NAMED describes it");

/* The chunks of one group, and where their payloads go. */
typedef struct {
    size_t n_chunks;
    const uint8_t **data, **bases; /* an address each; that of a base may be NULL */
    const TcNamed *named;            /* the base of each; NULL if none has one */
    TcBatch stored;                /* chunks to decode as bases, each a part of its own */
    const int32_t *parts;          /* for each chunk the part of its base, -1 for none; NULL if none has one */
    const size_t *sizes;
    const uint32_t *itemsizes;
    const int32_t *how;
    const uint8_t *may_be_sampled, *begins_row, *digests;
    const TcEncoding *encodings;
    int checks;
    TcEntry *entries;
    uint8_t *out;
    const uint8_t **payloads; /* room for the addresses and sizes of payloads that are not raw */
    size_t *payload_sizes, n_payloads;
    /* Results. */
    size_t n_bytes, first_row, first_bytes; /* of the whole; and of the rest of a tensor that begins in an earlier group */
    Py_ssize_t changed;                     /* a chunk with other bytes than its digest's; -1 for none */
    Py_ssize_t baseless;                    /* a chunk whose base does not decode or has another digest; -1 for none */
} TcGroup;

/* Tell whether an encoding that Python gave is one that a chunk can have. */
int tc_is_sound(const TcEncoding *encoding);

/* Encode the chunks of a group; its last fields and the entries are the results. */
void tc_encode_chunks(TcWorker *worker, TcGroup *group);

#endif
