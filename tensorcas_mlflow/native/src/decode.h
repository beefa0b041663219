/* Batch decode of chunks; `decode.c` says how. The tables are numpy arrays: `chunk_io/_decode.py` declares the same fields. */
#ifndef TC_DECODE_H
#define TC_DECODE_H

#include <stddef.h>
#include <stdint.h>

enum { TC_MEMORY = 0, TC_FILE = 1, TC_DIRECT = 2 };
#define TC_NOWHERE UINT32_MAX /* the block of a chunk that is verified and not kept */
enum { CHUNK_GOOD = 0, CHUNK_UNREAD = 1, CHUNK_MALFORMED = 2, CHUNK_DIFFERS = 3, CHUNK_NO_MEMORY = 4 };

/* A stretch of a pack, read in one call or in memory already. */
typedef struct {
    uint64_t start;   /* in the file or in the buffer */
    uint64_t n_bytes;
    int32_t source;   /* a file's descriptor, -1 if it could not be opened; or the number of a buffer */
    uint32_t kind;    /* TC_MEMORY, TC_FILE, or TC_DIRECT for a descriptor opened with O_DIRECT */
} TcRead;

/* A stored chunk: a wanted one, or one needed to decode it. */
typedef struct {
    uint64_t begin;    /* in the read */
    uint32_t n_stored;
    uint32_t read;     /* number of the read, one of the chunk's part */
    uint32_t n_bytes;  /* of the decoded chunk */
    uint16_t codec;
    uint16_t checks;   /* whether to compare the stored bytes with `stored_digest` */
    uint8_t stored_digest[16];
} TcLink;

/* A wanted chunk. */
typedef struct {
    uint64_t start;      /* in its block of memory */
    uint32_t block;      /* number of the block, or TC_NOWHERE */
    uint32_t n_bytes;
    uint32_t first_link; /* its own link; then its base, then the base of that */
    uint32_t n_links;
    uint8_t digest[32];
} TcChunk;

/* The work of one thread at a time: consecutive reads and consecutive chunks. */
typedef struct {
    uint32_t first_read, last_read;
    uint32_t first_chunk, last_chunk;
} TcPart;

typedef struct {
    uint8_t *data;
    size_t n_bytes;
} TcBytes;

typedef struct {
    const TcRead *reads;
    const TcLink *links;
    const TcChunk *chunks;
    const TcPart *parts;
    size_t n_reads, n_links, n_chunks, n_parts;
    const TcBytes *sources; /* buffers with stored bytes */
    const TcBytes *blocks;  /* the caller's memory for the chunks */
    size_t n_sources, n_blocks;
    int verifies;
    uint8_t *statuses; /* out: one for each chunk */
} TcBatch;

/* Tell whether all numbers in the tables lie within the other tables and the buffers. */
int tc_check_batch(const TcBatch *batch);

/* Decode a batch that `tc_check_batch` accepts, on `n_workers` threads. Returns 0 if there is no memory. */
int tc_decode(const TcBatch *batch, size_t n_workers);

/* A decoder of single chunks, for one thread at a time: its memory serves one chunk after another. */
typedef struct TcDecoder TcDecoder;

/* Return a decoder, or NULL if there is no memory. */
TcDecoder *tc_new_decoder(void);

/* Free a decoder, which may be NULL. */
void tc_free_decoder(TcDecoder *decoder);

/* Free memory of a decoder above the size that ordinary chunks need. */
void tc_trim_decoder(TcDecoder *decoder);

/* Read, decode and verify the only chunk of a part, in a batch that `tc_check_batch` accepts. Return its status; set `made` to
 * its bytes, which stay until the next call, in the decoder or in the memory of its read. */
int tc_decode_part(TcDecoder *decoder, const TcBatch *batch, size_t part, const uint8_t **made);

#endif
