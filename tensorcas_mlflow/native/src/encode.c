/* The encoder: payloads of chunks, and their entries in a pack's table (docs/format.md, Codecs and Packs).
 *
 * `encode_group` encodes the chunks of one group into one buffer, without the interpreter's lock; it reads and decodes the base
 * of a delta just before it encodes the delta. The functions below it encode one chunk with one codec. All make the decisions
 * that `tests/reference` makes.
 *
 * A worker holds the Zstandard contexts and the scratch memory of one call. Workers are kept for later calls, so a context is
 * set up once.
 */
#include "methods.h"

#include "blake3.h"
#include "decode.h"
#include "frames.h"
#include "watch.h"
#include "words.h"

#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

typedef struct Worker {
    struct Worker *next;
    TcFrames *frames;
    uint8_t *areas[N_AREAS];
    size_t rooms[N_AREAS];
    TcDecoder *decoder; /* of bases */
    int has_failed;     /* for lack of memory */
} Worker;

static pthread_mutex_t workers_lock = PTHREAD_MUTEX_INITIALIZER;
static Worker *idle_workers = NULL;

static void free_worker(Worker *worker) {
    tc_free_frames(worker->frames);
    for (int use = 0; use < N_AREAS; use++)
        free(worker->areas[use]);
    tc_free_decoder(worker->decoder);
    free(worker);
}

/* Return an idle worker, or a new one; NULL if there is no memory. Nobody waits for the lock: it may be held by a thread that
 * a fork has not taken along. */
static Worker *take_worker(void) {
    Worker *worker = NULL;
    if (pthread_mutex_trylock(&workers_lock) == 0) {
        worker = idle_workers;
        if (worker != NULL)
            idle_workers = worker->next;
        pthread_mutex_unlock(&workers_lock);
    }
    if (worker == NULL)
        worker = calloc(1, sizeof(Worker));
    if (worker != NULL)
        worker->has_failed = 0;
    return worker;
}

static void give_worker(Worker *worker) {
    for (int use = 0; use < N_AREAS; use++)
        if (worker->rooms[use] > KEPT_BYTES) {
            free(worker->areas[use]);
            worker->areas[use] = NULL;
            worker->rooms[use] = 0;
        }
    tc_trim_decoder(worker->decoder);
    if (pthread_mutex_trylock(&workers_lock) != 0) {
        free_worker(worker);
        return;
    }
    worker->next = idle_workers;
    idle_workers = worker;
    pthread_mutex_unlock(&workers_lock);
}

/* --- memory of payloads --- */

/* Payloads of one group: a buffer for Python, whose memory serves another group once nobody has a view of it. The kernel takes
 * as long to fill fresh memory as the encoder takes to fill it again. */
typedef struct {
    PyObject_HEAD
    uint8_t *data;
    size_t room;
    Py_ssize_t n_bytes;
} Payloads;

static struct {
    uint8_t *data;
    size_t room;
} idle_memory[MOST_IDLE];
static size_t n_idle;
static PyObject *payloads_type = NULL;

static void give_memory(uint8_t *data, size_t room) {
    if (room <= MOST_IDLE_BYTES && pthread_mutex_trylock(&workers_lock) == 0) {
        if (n_idle < MOST_IDLE) {
            idle_memory[n_idle].data = data;
            idle_memory[n_idle++].room = room;
            data = NULL;
        }
        pthread_mutex_unlock(&workers_lock);
    }
    free(data);
}

static uint8_t *take_memory(size_t needed, size_t *room) {
    uint8_t *data = NULL;
    if (needed <= MOST_IDLE_BYTES && pthread_mutex_trylock(&workers_lock) == 0) {
        for (size_t at = n_idle; at > 0 && data == NULL; at--)
            if (idle_memory[at - 1].room >= needed) {
                data = idle_memory[at - 1].data;
                *room = idle_memory[at - 1].room;
                idle_memory[at - 1] = idle_memory[--n_idle];
            }
        pthread_mutex_unlock(&workers_lock);
    }
    if (data == NULL) {
        *room = needed > LEAST_ROOM_BYTES ? needed : LEAST_ROOM_BYTES;
        data = malloc(*room);
    }
    return data;
}

static int view_payloads(PyObject *self, Py_buffer *view, int flags) {
    Payloads *payloads = (Payloads *)self;
    return PyBuffer_FillInfo(view, self, payloads->data, payloads->n_bytes, 1, flags);
}

static void free_payloads(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (((Payloads *)self)->data != NULL)
        give_memory(((Payloads *)self)->data, ((Payloads *)self)->room);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot payloads_slots[] = {
    {Py_tp_dealloc, free_payloads},
    {Py_bf_getbuffer, view_payloads},
    {0, NULL},
};
static PyType_Spec payloads_spec = {
    "tensorcas_mlflow.native._core.Payloads", sizeof(Payloads), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, payloads_slots,
};

static Payloads *make_payloads(size_t needed) {
    if (payloads_type == NULL && (payloads_type = PyType_FromSpec(&payloads_spec)) == NULL)
        return NULL;
    Payloads *payloads = (Payloads *)PyType_GenericAlloc((PyTypeObject *)payloads_type, 0);
    if (payloads != NULL && (payloads->data = take_memory(needed, &payloads->room)) == NULL) {
        Py_DECREF(payloads);
        PyErr_NoMemory();
        return NULL;
    }
    return payloads;
}

/* Return scratch memory, valid until the next call for the same use; NULL if there is none. */
static uint8_t *area_of(Worker *worker, int use, size_t n_bytes) {
    if (worker->rooms[use] < n_bytes || worker->areas[use] == NULL) {
        size_t room = n_bytes < (64 << 10) ? 64 << 10 : n_bytes;
        free(worker->areas[use]);
        worker->areas[use] = malloc(room);
        worker->rooms[use] = worker->areas[use] == NULL ? 0 : room;
        if (worker->areas[use] == NULL)
            worker->has_failed = 1;
    }
    return worker->areas[use];
}

/* Compress into at most `room` bytes, with blocks that end where the caller wants them; see `tc_compress`. Return the size, or
 * NOT_SMALLER if it does not fit. */
static size_t compress_in_blocks(Worker *worker, int way, uint8_t *out, size_t room, const uint8_t *data, size_t n_bytes, size_t step) {
    if (worker->frames == NULL)
        worker->frames = tc_new_frames();
    size_t size = worker->frames == NULL ? TC_NO_FRAME_MEMORY : tc_compress(worker->frames, way, out, room, data, n_bytes, step);
    if (size == TC_NO_FRAME_MEMORY)
        worker->has_failed = 1;
    return size >= TC_NO_FRAME_MEMORY ? NOT_SMALLER : size;
}

static size_t compress(Worker *worker, int way, uint8_t *out, size_t room, const uint8_t *data, size_t n_bytes) {
    return compress_in_blocks(worker, way, out, room, data, n_bytes, 0);
}

/* --- words --- */

static int is_word(size_t itemsize) { return itemsize == 1 || itemsize == 2 || itemsize == 4 || itemsize == 8; }

static uint8_t log2_of(size_t number) { return number == 1 ? 0 : number == 2 ? 1 : number == 4 ? 2 : 3; }

static void put_u32(uint8_t *out, size_t value) {
    uint32_t word = (uint32_t)value;
    memcpy(out, &word, 4);
}

/* Copy about n_words words in four stretches; return their number, at most 2 * n_words. */
static size_t stretches_of(const uint8_t *words, size_t n_have, size_t width, size_t n_words, uint8_t *out) {
    if (n_have <= 2 * n_words) {
        memcpy(out, words, n_have * width);
        return n_have;
    }
    size_t length = n_words / N_STRETCHES, last = n_have - length;
    double step = (double)last / (N_STRETCHES - 1);
    for (size_t stretch = 0; stretch < N_STRETCHES; stretch++) {
        size_t start = stretch == N_STRETCHES - 1 ? last : (size_t)((double)stretch * step);
        memcpy(out + stretch * length * width, words + start * width, length * width);
    }
    return N_STRETCHES * length;
}

/* Split a sample of words, or of their differences from a base, into planes; return the number of words. */
static size_t split_sample(const uint8_t *words, const uint8_t *base, size_t n_have, size_t width, size_t n_words,
                           uint8_t *planes) {
    uint8_t sample[2 * PLANE_SAMPLE_WORDS * MOST_PLANES], of_base[2 * PLANE_SAMPLE_WORDS * MOST_PLANES];
    size_t n_sampled = stretches_of(words, n_have, width, n_words, sample);
    if (base != NULL)
        stretches_of(base, n_have, width, n_words, of_base);
    tc_split(sample, n_sampled, width, base == NULL ? NULL : of_base, NULL, 1, 1, planes);
    return n_sampled;
}

/* --- planes --- */

/* Choose the coding of each plane by trying both on a sample. */
static void choose_codings(Worker *worker, const uint8_t *words, const uint8_t *base, size_t n_words, size_t width,
                           size_t n_wanted, uint8_t *codings) {
    uint8_t planes[2 * PLANE_SAMPLE_WORDS * MOST_PLANES], frame[2 * PLANE_SAMPLE_WORDS + OVERHEAD_BYTES];
    size_t n_sampled = split_sample(words, base, n_words, width, n_wanted, planes);
    for (size_t place = 0; place < width; place++) {
        const uint8_t *plane = planes + place * n_sampled;
        size_t entropy = compress(worker, TC_ENTROPY, frame, sizeof frame, plane, n_sampled);
        codings[place] = KEEP;
        if (entropy != NOT_SMALLER && (double)entropy < LEAST_PLANE_GAIN * (double)n_sampled) {
            size_t match = compress(worker, 1, frame, sizeof frame, plane, n_sampled);
            codings[place] = match != NOT_SMALLER && match < entropy ? MATCH : ENTROPY;
        }
    }
}

/* Tell whether the bytes of a plane are as different as those of noise: about as many pairs are equal as chance makes equal.
 * Fewer pairs are equal in a ramp of indices, and more in bytes that repeat or have a code. */
static int is_noise(const uint8_t *plane, size_t length) {
    uint32_t counts[4][256] = {{0}};
    uint64_t n = length, equal = 0;
    for (size_t at = 0; at < length; at++)
        counts[at % 4][plane[at]]++;
    for (size_t value = 0; value < 256; value++) {
        uint64_t count = (uint64_t)counts[0][value] + counts[1][value] + counts[2][value] + counts[3][value];
        equal += count * count;
    }
    return 256 * equal >= n * n + NOISE_AT_LEAST * n && 256 * equal <= n * n + NOISE_AT_MOST * n;
}

/* One plane of the sampled small chunks of a group: other chunks of the group need no trials that these show to be useless. */
typedef struct {
    int is_kept;        /* no sample's plane became smaller */
    double least, most; /* shares of their sizes that frames without matches take, a tenth wider; none if matches helped */
} Alike;

/* Compress one plane in the given coding; return the size of the frame at *frame, or NOT_SMALLER to keep the plane. */
static size_t compress_plane(Worker *worker, const uint8_t *plane, size_t length, int coding, int effort, const Alike *alike,
                             uint8_t **frame) {
    if (coding == KEEP || length == 0)
        return NOT_SMALLER;
    /* With less room Zstandard may fail, though the frame would fit. */
    size_t room = tc_frame_bound(length);
    uint8_t *best = area_of(worker, AREA_FRAME, room), *other = area_of(worker, AREA_OTHER_FRAME, room);
    if (best == NULL || other == NULL)
        return NOT_SMALLER;
    int ways[3] = {TC_ENTROPY, 1, 9}, n_ways = 1;
    if (effort == SMALL_EFFORT)
        n_ways = 3;
    else if (coding < 0)
        n_ways = 2;
    else if (coding == MATCH)
        ways[0] = 1;
    size_t least = NOT_SMALLER;
    if (alike != NULL && alike->is_kept && is_noise(plane, length))
        return NOT_SMALLER;
    for (int way = 0; way < n_ways; way++) {
        if (way == 1 && alike != NULL && (double)least >= alike->least * (double)length && (double)least <= alike->most * (double)length)
            break; /* no sample of such a size had matches */
        size_t size = compress(worker, ways[way], other, room, plane, length);
        if (size != NOT_SMALLER && size < least) {
            uint8_t *swapped = best;
            best = other, other = swapped, least = size;
        }
        /* Level 1 does not make smaller a plane that a Huffman code does not make smaller. */
        if (effort != SMALL_EFFORT && (least == NOT_SMALLER || (double)least >= LEAST_PLANE_GAIN * (double)length))
            break;
    }
    *frame = best;
    return least != NOT_SMALLER && (double)least < LEAST_PLANE_GAIN * (double)length ? least : NOT_SMALLER;
}

/* Write the header and the encoded planes; return their size.
 *
 * The planes may lie in `out`, each at its place behind the header or further on: no plane is overwritten before it is
 * encoded. `codings` may be NULL to try all on each plane. */
static size_t put_planes(Worker *worker, const uint8_t *planes, size_t stride, size_t length, size_t width,
                         const uint8_t *codings, int effort, const Alike *alike, uint8_t *out) {
    size_t at = 1 + 4 * width;
    uint8_t head[1 + 4 * MOST_PLANES];
    head[0] = (uint8_t)width;
    for (size_t place = 0; place < width; place++) {
        const uint8_t *plane = planes + place * stride;
        uint8_t *frame = NULL;
        size_t size = compress_plane(worker, plane, length, codings == NULL ? -1 : codings[place], effort,
                                     alike == NULL ? NULL : alike + place, &frame);
        if (size == NOT_SMALLER) {
            size = length;
            if (out + at != plane)
                memmove(out + at, plane, length);
        } else
            memcpy(out + at, frame, size);
        put_u32(head + 1 + 4 * place, size);
        at += size;
    }
    memcpy(out, head, 1 + 4 * width);
    return at;
}

/* Encode a chunk as planes; return the size of the payload. */
static size_t encode_planes(Worker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, const uint8_t *codings,
                            int effort, const Alike *alike, uint8_t *out) {
    size_t width = is_word(itemsize) ? itemsize : 1, n_words = n_bytes / width, head = 1 + 4 * width;
    uint8_t chosen[MOST_PLANES];
    if (codings == NULL && n_words > FEW_WORDS) {
        choose_codings(worker, raw, NULL, n_words, width, PLANE_SAMPLE_WORDS, chosen);
        codings = chosen;
    }
    tc_split(raw, n_words, width, NULL, NULL, 1, 1, out + head);
    size_t size = put_planes(worker, out + head, n_words, n_words, width, codings, effort, alike, out);
    memcpy(out + size, raw + n_words * width, n_bytes - n_words * width);
    return size + n_bytes - n_words * width;
}

/* Estimate the share of its size that a chunk takes as planes, or as a delta, by the entropy of its planes' bytes with the
 * correction of Miller and Madow. */
static double estimate_share(const uint8_t *words, const uint8_t *base, size_t n_words, size_t width) {
    uint8_t planes[2 * SHARE_SAMPLE_WORDS * MOST_PLANES];
    size_t n = split_sample(words, base, n_words, width, SHARE_SAMPLE_WORDS, planes);
    if (n == 0)
        return 1;
    double bits = 0, count = (double)n;
    for (size_t place = 0; place < width; place++) {
        uint32_t counts[256] = {0};
        double sum = 0, used = 0;
        for (size_t at = 0; at < n; at++)
            counts[planes[place * n + at]]++;
        for (size_t value = 0; value < 256; value++)
            if (counts[value]) {
                sum += counts[value] * log2(counts[value]);
                used++;
            }
        double entropy = log2(count) - sum / count + (used - 1) / (2 * count * 0.6931471805599453);
        /* Rounding may leave a little less than nothing. */
        bits += entropy < 0 ? 0 : entropy < 8 ? entropy : 8;
    }
    return bits / (8 * (double)width);
}

/* --- records, and chunks as they are --- */

static int level_for(size_t n_bytes) { return n_bytes <= SMALL_CHUNK_BYTES ? 12 : 3; }

/* Choose the way to compress a chunk of shuffled records. */
static int way_for_records(size_t n_bytes, size_t itemsize) {
    if (itemsize >= 4 && itemsize < 256)
        return TC_RECORDS;
    return itemsize < 4 && n_bytes > SMALL_CHUNK_BYTES ? 1 : level_for(n_bytes);
}

/* Encode a chunk as shuffled records into at most `room` bytes; return NOT_SMALLER if it does not fit. */
static size_t encode_records(Worker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, int way, uint8_t *out,
                             size_t room) {
    size_t width = itemsize >= 1 && itemsize <= MAX_RECORD_BYTES ? itemsize : 1, n_records = n_bytes / width;
    uint8_t *shuffled = area_of(worker, AREA_SHUFFLED, n_bytes);
    if (shuffled == NULL || room < 2)
        return NOT_SMALLER;
    for (size_t place = 0; place < width; place++)
        for (size_t record = 0; record < n_records; record++)
            shuffled[place * n_records + record] = raw[record * width + place];
    memcpy(shuffled + n_records * width, raw + n_records * width, n_bytes - n_records * width);
    out[0] = (uint8_t)width;
    out[1] = (uint8_t)(width >> 8);
    /* One frame, whose blocks end where the bytes of a place end: each block has Huffman codes of its own. Zstandard's own blocks
     * of 128 KiB give the bytes of an exponent and of a mantissa one code. */
    size_t least = n_bytes / MOST_BLOCKS, step;
    if (least < LEAST_BLOCK_BYTES)
        least = LEAST_BLOCK_BYTES;
    step = n_records ? n_records * ((least + n_records - 1) / n_records) : least;
    size_t size = compress_in_blocks(worker, way, out + 2, room - 2, shuffled, n_bytes, width < 256 ? step : 0);
    return size == NOT_SMALLER ? NOT_SMALLER : size + 2;
}

/* A payload under way. */
typedef struct {
    uint8_t codec;
    uint8_t typesize;
    size_t size; /* of the payload in `out`; not used if the codec is RAW */
} Encoded;

static Encoded as_raw(void) { return (Encoded){RAW, 1, 0}; }

/* Encode a chunk with the codec that fits its elements; see `codecs.encode_best`. */
static Encoded encode_best(Worker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, const Alike *alike,
                           uint8_t *out) {
    if (n_bytes < LEAST_ENCODED_BYTES)
        return as_raw();
    uint8_t codec = WHOLE;
    if (itemsize > 1 && itemsize <= MAX_RECORD_BYTES && n_bytes >= LEAST_SHUFFLED_BYTES && n_bytes >= 8 * itemsize) {
        codec = PLANES;
        if (!is_word(itemsize)) {
            size_t tried = n_bytes < RECORDS_TRIED_BYTES ? n_bytes : RECORDS_TRIED_BYTES, room = tried + OVERHEAD_BYTES;
            size_t plain = compress(worker, 1, out, room, raw, tried);
            size_t shuffled = encode_records(worker, raw, tried, itemsize, way_for_records(SMALL_CHUNK_BYTES + 1, itemsize), out, room);
            codec = plain < shuffled ? WHOLE : SHUFFLE_ZSTD;
        }
    }
    size_t size;
    if (codec == PLANES) {
        size = encode_planes(worker, raw, n_bytes, itemsize, NULL, 1, alike, out);
        if (itemsize >= MIXED_ITEMSIZE && n_bytes <= SMALL_CHUNK_BYTES) {
            size_t room = n_bytes + OVERHEAD_BYTES, plain = NOT_SMALLER;
            uint8_t *other = area_of(worker, AREA_OTHER, room);
            if (other != NULL)
                plain = compress(worker, MIXED_TRIED_LEVEL, other, room, raw, n_bytes);
            /* If a fast level is far behind, the slow level loses too. */
            if (plain != NOT_SMALLER && (double)plain < (double)size + MOST_BEHIND * (double)n_bytes)
                plain = compress(worker, level_for(n_bytes), other, room, raw, n_bytes);
            else
                plain = NOT_SMALLER;
            if (plain < size) {
                codec = WHOLE, size = plain;
                memcpy(out, other, size);
            }
        }
    } else if (codec == WHOLE)
        size = compress(worker, level_for(n_bytes), out, n_bytes + OVERHEAD_BYTES, raw, n_bytes);
    else
        size = encode_records(worker, raw, n_bytes, itemsize, way_for_records(n_bytes, itemsize), out, n_bytes + OVERHEAD_BYTES);
    if (size == NOT_SMALLER || (double)size > LEAST_GAIN * (double)n_bytes)
        return as_raw();
    return (Encoded){codec, (uint8_t)(itemsize < MAX_TYPESIZE ? itemsize : MAX_TYPESIZE), size};
}

/* --- deltas --- */

static int compare_doubles(const void *one, const void *other) {
    double a = *(const double *)one, b = *(const double *)other;
    return (a > b) - (a < b);
}

/* Return a quantile as numpy computes it, by linear interpolation; the values change their order. */
static double quantile(double *values, size_t n, double share) {
    qsort(values, n, sizeof(double), compare_doubles);
    double place = share * (double)(n - 1), below = floor(place), part = place - below;
    size_t at = (size_t)below, next = at + 1 < n ? at + 1 : at;
    double gap = values[next] - values[at];
    return part < 0.5 ? values[at] + gap * part : values[next] - gap * (1 - part);
}

static void sort_losses(uint32_t *values, size_t n, uint32_t *room) { /* below 2^21 */
    for (int shift = 0; shift < 22; shift += 11) {
        size_t starts[2049] = {0};
        for (size_t at = 0; at < n; at++)
            starts[(values[at] >> shift & 2047) + 1]++;
        for (size_t key = 0; key < 2048; key++)
            starts[key + 1] += starts[key];
        for (size_t at = 0; at < n; at++)
            room[starts[values[at] >> shift & 2047]++] = values[at];
        memcpy(values, room, n * sizeof(uint32_t));
    }
}

/* Find the decay that explains many differences of words from their base; return 0 if there is none. */
static int fit_decay(const uint8_t *words, const uint8_t *base, size_t n_words, uint32_t *n_steps, uint16_t *rate) {
    uint32_t sample[MOST_DECAY_SAMPLE], of_base[MOST_DECAY_SAMPLE], losses[MOST_DECAY_SAMPLE], room[MOST_DECAY_SAMPLE];
    double k_least[MOST_DECAY_SAMPLE], k_most[MOST_DECAY_SAMPLE];
    size_t n = stretches_of(words, n_words, 4, DECAY_SAMPLE_WORDS, (uint8_t *)sample), n_losses = 0, most = 0;
    stretches_of(base, n_words, 4, DECAY_SAMPLE_WORDS, (uint8_t *)of_base);
    for (size_t at = 0; at < n; at++) {
        uint32_t lost = of_base[at] - sample[at];
        if (lost - 1 < MOST_UNITS)
            losses[n_losses++] = lost;
    }
    if (n_losses < LEAST_TIMES || (double)n_losses < 0.15 * (double)n)
        return 0;
    sort_losses(losses, n_losses, room);
    for (size_t begin = 0, end; begin < n_losses; begin = end) {
        for (end = begin; end < n_losses && losses[end] == losses[begin]; end++) {
        }
        if (end - begin > most)
            most = end - begin;
    }
    size_t least_times = most / 8 > LEAST_TIMES ? most / 8 : LEAST_TIMES, n_common = 0, n_values = 0;
    uint32_t divisor = 0, *common = room;
    for (size_t begin = 0, end; begin < n_losses; begin = end) {
        for (end = begin; end < n_losses && losses[end] == losses[begin]; end++) {
        }
        if (end - begin < least_times)
            continue;
        n_common += end - begin;
        common[n_values++] = losses[begin];
        for (uint32_t a = losses[begin], b = divisor;;) {
            if (b == 0) {
                divisor = a;
                break;
            }
            uint32_t rest = a % b;
            a = b, b = rest;
        }
    }
    if (n_common < 1 || (double)n_common < 0.15 * (double)n)
        return 0;
    size_t n_explained = 0;
    for (size_t at = 0; at < n; at++) {
        uint32_t lost = of_base[at] - sample[at];
        if (lost - 1 >= MOST_UNITS)
            continue;
        size_t low = 0, high = n_values;
        while (low < high) {
            size_t middle = (low + high) / 2;
            if (common[middle] < lost)
                low = middle + 1;
            else
                high = middle;
        }
        if (low == n_values || common[low] != lost)
            continue;
        double mantissa = (double)((of_base[at] >> 8 & 0x7FFF) | 0x8000), k = (double)lost / divisor;
        k_least[n_explained] = (k - 0.5) / mantissa;
        k_most[n_explained++] = (k + 0.5) / mantissa;
    }
    double least = quantile(k_least, n_explained, 0.99), top = quantile(k_most, n_explained, 0.01);
    double found = (least + top) / 2 * 16777216.0, rounded = nearbyint(found / 256) * 256;
    found = least * 16777216.0 <= rounded && rounded <= top * 16777216.0 ? rounded : nearbyint(found);
    if (!(found > 0 && found < 65536))
        return 0;
    *n_steps = divisor;
    *rate = (uint16_t)found;
    return 1;
}

static void decay_words(const uint8_t *restrict base, size_t n_words, uint32_t n_steps, uint16_t rate, uint8_t *restrict out) {
    for (size_t at = 0; at < n_words; at++) {
        uint32_t word;
        memcpy(&word, base + 4 * at, 4);
        uint32_t mantissa = (word >> 8 & 0x7FFF) | 0x8000;
        word -= n_steps * ((mantissa * (uint32_t)rate + (1u << 23)) >> 24);
        memcpy(out + 4 * at, &word, 4);
    }
}

/* Choose the ends of the groups; return the number of groups. */
static size_t choose_thresholds(const uint8_t *base, size_t n_words, size_t width, uint8_t *thresholds) {
    static const double few[] = {0.1, 0.35}, many[] = {0.06, 0.15, 0.32, 0.6};
    const double *shares = width <= 2 ? few : many;
    size_t n_shares = width <= 2 ? 2 : 4, below[256] = {0}, n_groups = 1, top = 0;
    size_t step = n_words / 4096 > 1 ? n_words / 4096 : 1;
    for (size_t at = 0; at < n_words; at += step) {
        const uint8_t *word = base + at * width;
        uint8_t high = word[width - 1], low = width > 1 ? word[width - 2] : 0;
        below[(uint8_t)(high << 1 | low >> 7)]++;
    }
    for (size_t value = 0; value < 256; value++) {
        if (below[value])
            top = value;
        if (value)
            below[value] += below[value - 1];
    }
    for (size_t share = 0, end = 0; share < n_shares; share++) {
        while (end < 256 && (double)below[end] < shares[share] * (double)below[255])
            end++;
        if (end < top && (n_groups == 1 || thresholds[n_groups - 2] != end))
            thresholds[n_groups++ - 1] = (uint8_t)end;
    }
    return n_groups;
}

/* Tell whether units of so many words fit a word of eight bytes, and their classes a byte. */
static int fits_unit(size_t width, size_t unit) {
    /* Three groups make 81 classes of four words, and 6,561 of eight. */
    return (unit == 1 || unit == 2 || unit == 4) && unit * width <= 8;
}

static size_t default_unit(size_t width) { return width <= 2 ? 4 : width == 4 ? 2 : 1; }

/* Return the number of the first word from some place on that differs from the base's; `n_words` if none does. */
static size_t next_change(const uint8_t *words, const uint8_t *base, size_t at, size_t n_words, size_t width) {
    size_t step = 8 / width;
    for (;; at++) {
        for (uint64_t one, other; at + step <= n_words; at += step) {
            memcpy(&one, words + at * width, 8);
            memcpy(&other, base + at * width, 8);
            if (one != other)
                break;
        }
        for (size_t end = at + step < n_words ? at + step : n_words; at < end; at++)
            if (memcmp(words + at * width, base + at * width, width) != 0)
                return at;
        if (at >= n_words)
            return n_words;
        at--;
    }
}

static int is_sparse(const uint8_t *words, const uint8_t *base, size_t n_words, size_t width) {
    size_t n_changed = 0, most = n_words / LEAST_SPARSE_WORDS;
    for (size_t at = 0; (at = next_change(words, base, at, n_words, width)) < n_words; at++)
        if (++n_changed > most)
            return 0;
    return 1;
}

/* Encode the changed words of a chunk and their places; return the size of the payload, or NOT_SMALLER if many changed, or if they
 * and their places could take more than the chunk. */
static size_t encode_sparse(Worker *worker, const uint8_t *raw, size_t n_bytes, size_t width, const uint8_t *base, int effort,
                            uint8_t *out) {
    size_t n_words = n_bytes / width, n_tail = n_bytes % width, most = n_words / LEAST_SPARSE_WORDS, before = 0;
    uint8_t *gaps = area_of(worker, AREA_CLASSES, most + n_words / LONG_GAP + 1);
    uint8_t *changed = area_of(worker, AREA_GROUPED, most * width + 1);
    if (gaps == NULL || changed == NULL)
        return NOT_SMALLER;
    size_t n_changed = 0, n_gap_bytes = 0;
    for (size_t at = 0; (at = next_change(raw, base, at, n_words, width)) < n_words; before = ++at) {
        if (n_changed == most)
            return NOT_SMALLER;
        size_t gap = at - before;
        for (; gap >= LONG_GAP; gap -= LONG_GAP)
            gaps[n_gap_bytes++] = LONG_GAP;
        gaps[n_gap_bytes++] = (uint8_t)gap;
        uint64_t word = 0, of_base = 0;
        memcpy(&word, raw + at * width, width);
        memcpy(&of_base, base + at * width, width);
        uint64_t difference = word - of_base, sign = 0 - (difference >> (8 * width - 1) & 1);
        difference = (difference << 1) ^ sign;
        memcpy(changed + n_changed++ * width, &difference, width);
    }
    if (n_gap_bytes + n_changed * width > n_words * width) /* words of one byte, and long gaps: `out` has no room for both */
        return NOT_SMALLER;
    out[0] = PLANES;
    out[1] = (uint8_t)(SPARSE | log2_of(width) << 4);
    size_t size = 14;
    put_u32(out + 2, n_changed);
    put_u32(out + 6, n_gap_bytes);
    size += encode_planes(worker, gaps, n_gap_bytes, 1, NULL, effort, NULL, out + size);
    put_u32(out + 10, size - 14);
    size += encode_planes(worker, changed, n_changed * width, width, NULL, effort, NULL, out + size);
    memcpy(out + size, raw + n_words * width, n_tail);
    return size + n_tail;
}

/* Write a number of seven bits a byte; return the place behind it. */
static size_t put_varint(uint8_t *out, size_t at, size_t number) {
    for (; number >= 128; number >>= 7)
        out[at++] = (uint8_t)(number | 128);
    out[at++] = (uint8_t)number;
    return at;
}

/* Set bits in memory that is zero up to eight bytes behind them. */
static void put_bits(uint8_t *field, uint64_t at, uint64_t bits, unsigned count) {
    for (unsigned done = 0; done < count; done += 32) {
        uint64_t word, some = bits >> done & 0xFFFFFFFF;
        memcpy(&word, field + (at + done) / 8, 8);
        word |= some << ((at + done) & 7);
        memcpy(field + (at + done) / 8, &word, 8);
    }
}

static void put_one(uint8_t *field, uint64_t at) { field[at / 8] |= (uint8_t)(1 << (at & 7)); }

static unsigned bit_length(uint64_t number) { return number ? 64 - (unsigned)__builtin_clzll(number) : 0; }

/* Choose the number of low bits of gaps; set the sum of their upper parts. */
static unsigned choose_low_bits(const uint32_t *gaps, size_t count, uint64_t *upper) {
    uint64_t sum = 0, least = UINT64_MAX;
    *upper = 0;
    if (count == 0)
        return 0;
    for (size_t at = 0; at < count; at++)
        sum += gaps[at];
    unsigned middle = bit_length(sum / count), chosen = 0;
    for (unsigned bits = middle > 2 ? middle - 2 : 0; bits <= middle && bits < 32; bits++) {
        uint64_t of_upper = 0;
        for (size_t at = 0; at < count; at++)
            of_upper += gaps[at] >> bits;
        if (of_upper + (uint64_t)bits * count < least)
            least = of_upper + (uint64_t)bits * count, *upper = of_upper, chosen = bits;
    }
    return chosen;
}

/* Encode the changed words of a chunk, most of which move by one unit; return the size of the payload, or NOT_SMALLER if many
 * changed or the payload would be longer than the chunk. */
static size_t encode_nudged(Worker *worker, const uint8_t *raw, size_t n_bytes, size_t width, const uint8_t *base,
                            uint8_t *out) {
    size_t n_words = n_bytes / width, n_tail = n_bytes % width, most = n_words / LEAST_NUDGED_WORDS;
    uint32_t *gaps = (uint32_t *)(void *)area_of(worker, AREA_CLASSES, 2 * (most * sizeof *gaps + 8));
    uint64_t *magnitudes = (uint64_t *)(void *)area_of(worker, AREA_GROUPED, most * sizeof *magnitudes + 8);
    uint8_t *signs = area_of(worker, AREA_SHUFFLED, most + 8);
    if (gaps == NULL || magnitudes == NULL || signs == NULL)
        return NOT_SMALLER;
    uint32_t *of_large = gaps + most + 2;
    size_t n_changed = 0, n_large = 0, before = 0, before_large = 0;
    uint64_t n_exponents = 0, upper, upper_of_large;
    for (size_t at = 0; (at = next_change(raw, base, at, n_words, width)) < n_words; before = ++at) {
        if (n_changed == most)
            return NOT_SMALLER;
        uint64_t word = 0, of_base = 0;
        memcpy(&word, raw + at * width, width);
        memcpy(&of_base, base + at * width, width);
        unsigned unused = (unsigned)(64 - 8 * width);
        uint64_t difference = (word - of_base) << unused, sign = difference >> 63;
        uint64_t magnitude = (sign ? 0 - difference : difference) >> unused;
        gaps[n_changed] = (uint32_t)(at - before);
        signs[n_changed] = (uint8_t)sign;
        if (magnitude > 1) {
            of_large[n_large] = (uint32_t)(n_changed - before_large);
            before_large = n_changed + 1;
            magnitudes[n_large++] = magnitude - 1;
            n_exponents += bit_length(magnitude - 1) - 1;
        }
        n_changed++;
    }
    unsigned low_bits = choose_low_bits(gaps, n_changed, &upper);
    unsigned low_bits_of_large = choose_low_bits(of_large, n_large, &upper_of_large);
    size_t n_gaps = (size_t)(upper + n_changed + 7) / 8, n_low = (n_changed * (low_bits + 1) + 7) / 8;
    size_t n_of_large = (size_t)(upper_of_large + n_exponents + 2 * n_large + 7) / 8;
    size_t n_large_low = (n_large * low_bits_of_large + 7) / 8, n_magnitudes = (size_t)(n_exponents + 7) / 8, at = 4;
    out[0] = RAW;
    out[1] = (uint8_t)(NUDGED | log2_of(width) << 4);
    out[2] = (uint8_t)low_bits;
    out[3] = (uint8_t)low_bits_of_large;
    at = put_varint(out, at, n_changed);
    at = put_varint(out, at, n_large);
    at = put_varint(out, at, n_gaps);
    at = put_varint(out, at, n_of_large);
    size_t size = at + n_gaps + n_low + n_of_large + n_large_low + n_magnitudes + n_tail;
    if (size > n_bytes)
        return NOT_SMALLER;
    memset(out + at, 0, size - at + 8);
    uint8_t *field = out + at, *low = field + n_gaps, *large = low + n_low, *large_low = large + n_of_large;
    uint8_t *rest = large_low + n_large_low;
    uint64_t place = 0;
    for (size_t number = 0; number < n_changed; number++, place++) {
        place += gaps[number] >> low_bits;
        put_one(field, place);
        uint64_t bits = signs[number] | (uint64_t)(gaps[number] & (((uint64_t)1 << low_bits) - 1)) << 1;
        put_bits(low, (uint64_t)number * (low_bits + 1), bits, low_bits + 1);
    }
    place = 0;
    uint64_t done = 0;
    for (size_t number = 0; number < n_large; number++, place++) {
        unsigned exponent = bit_length(magnitudes[number]) - 1;
        place += of_large[number] >> low_bits_of_large;
        put_one(large, place);
        place += 1 + exponent;
        put_one(large, place);
        put_bits(large_low, (uint64_t)number * low_bits_of_large,
                 of_large[number] & (((uint64_t)1 << low_bits_of_large) - 1), low_bits_of_large);
        put_bits(rest, done, magnitudes[number] ^ (uint64_t)1 << exponent, exponent);
        done += exponent;
    }
    memcpy(out + size - n_tail, raw + n_words * width, n_tail);
    return size;
}

/* Encode a chunk as a delta; return the size of the payload. */
static size_t encode_delta(Worker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, const uint8_t *base,
                           int transform, size_t unit, const uint8_t *codings, int effort, uint8_t *out) {
    size_t width = is_word(itemsize) ? itemsize : 1;
    if (transform == SPARSE || transform == NUDGED) {
        size_t size = transform == NUDGED ? encode_nudged(worker, raw, n_bytes, width, base, out) : NOT_SMALLER;
        if (size == NOT_SMALLER)
            size = encode_sparse(worker, raw, n_bytes, width, base, effort, out);
        if (size != NOT_SMALLER)
            return size;
        transform = GROUPED;
        unit = default_unit(width);
    }
    if (transform != GROUPED)
        unit = 1;
    size_t n_words = n_bytes / (width * unit) * unit, n_tail = n_bytes - n_words * width, at = 2;
    uint8_t chosen[MOST_PLANES];
    uint32_t n_steps = 0;
    uint16_t rate = 0;
    if (transform == DECAYED && (width != 4 || !fit_decay(raw, base, n_words, &n_steps, &rate)))
        transform = PLAIN;
    out[0] = PLANES;
    out[1] = (uint8_t)(transform | log2_of(width) << 4);
    if (transform == DECAYED) {
        uint8_t *decayed = area_of(worker, AREA_DECAYED, n_bytes);
        if (decayed == NULL)
            return NOT_SMALLER;
        decay_words(base, n_words, n_steps, rate, decayed);
        memcpy(out + 2, &n_steps, 4);
        memcpy(out + 6, &rate, 2);
        base = decayed;
        codings = NULL;
        at = 8;
    }
    if (codings == NULL && (transform == GROUPED || n_words > FEW_WORDS)) {
        choose_codings(worker, raw, base, n_words, width, PLANE_SAMPLE_WORDS, chosen);
        codings = chosen;
    }
    if (transform == GROUPED) {
        uint8_t thresholds[MOST_GROUPS];
        size_t n_groups = n_words ? choose_thresholds(base, n_words, width, thresholds) : 1, begin = 0;
        size_t lengths[MOST_GROUPS] = {0};
        uint8_t *classes = area_of(worker, AREA_CLASSES, n_words / unit + 8);
        uint8_t *planes = area_of(worker, AREA_PLANES, n_words * width);
        uint8_t *grouped = area_of(worker, AREA_GROUPED, n_words * width);
        if (classes == NULL || planes == NULL || grouped == NULL)
            return NOT_SMALLER;
        TcCounts of_class;
        tc_count_units(base, n_words, width, thresholds, n_groups - 1, unit, classes, &of_class);
        tc_count_groups(&of_class, n_groups, unit, lengths);
        tc_split_units(raw, n_words, width, base, classes, &of_class, n_groups, unit, grouped, planes);
        out[at++] = (uint8_t)(n_groups | (size_t)log2_of(unit) << 4);
        memcpy(out + at, thresholds, n_groups - 1);
        uint8_t *sizes = out + at + n_groups - 1;
        at += n_groups - 1 + 4 * n_groups;
        for (size_t group = 0; group < n_groups; group++) {
            size_t size = put_planes(worker, planes + begin, n_words, lengths[group], width, codings, effort, NULL, out + at);
            put_u32(sizes + 4 * group, size);
            at += size;
            begin += lengths[group];
        }
    } else {
        uint8_t *planes = out + at + 1 + 4 * width;
        tc_split(raw, n_words, width, base, NULL, 1, 1, planes);
        at += put_planes(worker, planes, n_words, n_words, width, codings, effort, NULL, out + at);
    }
    memcpy(out + at, raw + n_words * width, n_tail);
    return at + n_tail;
}

/* Choose the transform of a chunk's differences, and the words of a unit, by trying them on a part of it; see
 * `codecs.choose_transform`. */
static void choose_transform(Worker *worker, const uint8_t *raw, size_t n_bytes, size_t width, const uint8_t *base,
                             const uint8_t *codings, int at_any_cost, int *transform, size_t *unit) {
    uint8_t sample[2 * SHARE_SAMPLE_WORDS * 4], of_base[2 * SHARE_SAMPLE_WORDS * 4];
    uint32_t n_steps;
    uint16_t rate;
    struct { int transform; size_t unit; } ways[3];
    size_t n_ways = 0, begin = n_bytes > TRIED_BYTES ? (n_bytes - TRIED_BYTES) / 16 * 8 : 0;
    size_t tried = n_bytes - begin < TRIED_BYTES ? n_bytes - begin : TRIED_BYTES;
    uint8_t *out = area_of(worker, AREA_OTHER_PAYLOAD, n_bytes + OVERHEAD_BYTES);
    *transform = PLAIN;
    *unit = 1;
    if (out == NULL)
        return;
    if (width == 4) {
        size_t n = stretches_of(raw, n_bytes / 4, 4, SHARE_SAMPLE_WORDS, sample);
        stretches_of(base, n_bytes / 4, 4, SHARE_SAMPLE_WORDS, of_base);
        if (fit_decay(sample, of_base, n, &n_steps, &rate))
            ways[n_ways].transform = DECAYED, ways[n_ways++].unit = 1;
    }
    ways[n_ways].transform = GROUPED, ways[n_ways++].unit = default_unit(width);
    ways[n_ways].transform = GROUPED, ways[n_ways++].unit = 1;
    size_t plain = encode_delta(worker, raw + begin, tried, width, base + begin, PLAIN, 1, codings, 1, out), least = plain;
    if (is_sparse(raw + begin, base + begin, tried / width, width)) {
        size_t size = encode_delta(worker, raw + begin, tried, width, base + begin, SPARSE, 1, NULL, 1, out);
        if (size < least + tried / SPARSE_WORTH) {
            *transform = SPARSE, least = size;
            /* The tables of Zstandard's codes take a larger share of a part than of the chunk. */
            int is_whole = is_sparse(raw, base, n_bytes / width, width);
            size_t from = is_whole ? 0 : begin, length = is_whole ? n_bytes : tried;
            size_t sparse = encode_delta(worker, raw + from, length, width, base + from, SPARSE, 1, NULL, 1, out);
            size_t nudged = encode_delta(worker, raw + from, length, width, base + from, NUDGED, 1, NULL, 1, out);
            if ((double)nudged <= (at_any_cost ? 1 : NUDGED_WORTH) * (double)sparse) {
                *transform = NUDGED;
                size = encode_delta(worker, raw + begin, tried, width, base + begin, NUDGED, 1, NULL, 1, out);
                least = size < least ? size : least;
            }
        }
    }
    for (size_t way = 0; way < n_ways; way++) {
        int is_last = ways[way].transform == GROUPED && ways[way].unit == 1;
        if (is_last && !at_any_cost && (double)least < ENOUGH * (double)plain)
            break;
        size_t size = encode_delta(worker, raw + begin, tried, width, base + begin, ways[way].transform, ways[way].unit,
                                   codings, 1, out);
        if ((double)size < (at_any_cost ? 1 : WORTH_SLOWER) * (double)least)
            *transform = ways[way].transform, *unit = ways[way].unit, least = size;
    }
}

/* --- choices --- */

/* The encoding chosen for a tensor; `store._choose` has the meaning of each. */
typedef struct {
    double plain_share;
    uint32_t itemsize;
    uint8_t effort;
    uint8_t has_codings, has_delta, has_delta_codings;
    uint8_t transform, unit;
    uint8_t codings[MOST_PLANES], delta_codings[MOST_PLANES];
    uint8_t unused[6];
} Encoding;

_Static_assert(sizeof(Encoding) == 40, "store._encode describes an encoding of this size");

static int is_sound(const Encoding *encoding) {
    size_t width = encoding->itemsize;
    if ((encoding->has_codings || encoding->has_delta) && !is_word(width))
        return 0;
    if (!encoding->has_delta)
        return 1;
    return encoding->transform <= NUDGED && fits_unit(width, encoding->unit);
}

static Encoded encode_plain(Worker *worker, const Encoding *encoding, const uint8_t *raw, size_t n_bytes, uint8_t *out) {
    if (!encoding->has_codings)
        return encode_best(worker, raw, n_bytes, encoding->itemsize, NULL, out);
    size_t n_kept = 0;
    for (size_t place = 0; place < encoding->itemsize; place++)
        n_kept += encoding->codings[place] == KEEP;
    if (n_kept == encoding->itemsize)
        return as_raw();
    size_t size = encode_planes(worker, raw, n_bytes, encoding->itemsize, encoding->codings, encoding->effort, NULL, out);
    if ((double)size > CLEARLY_SMALLER * (double)n_bytes)
        return as_raw();
    return (Encoded){PLANES, (uint8_t)encoding->itemsize, size};
}

/* Encode a chunk as chosen for its tensor; see `EncodingChoice` in `store/_choose.py`. */
static Encoded encode_chosen(Worker *worker, const Encoding *encoding, const uint8_t *raw, size_t n_bytes, const uint8_t *base,
                             uint8_t *out) {
    if (base == NULL || !encoding->has_delta || n_bytes < LEAST_DELTA_BYTES)
        return encode_plain(worker, encoding, raw, n_bytes, out);
    int transform = n_bytes >= LEAST_GROUPED_BYTES ? encoding->transform : PLAIN;
    const uint8_t *codings = encoding->has_delta_codings ? encoding->delta_codings : NULL;
    size_t size =
        encode_delta(worker, raw, n_bytes, encoding->itemsize, base, transform, encoding->unit, codings, encoding->effort, out);
    Encoded delta = {DELTA, (uint8_t)encoding->itemsize, size};
    if (size != NOT_SMALLER && (double)size < CLEARLY_SMALLER * encoding->plain_share * (double)n_bytes)
        return delta;
    uint8_t *other = area_of(worker, AREA_OTHER_PAYLOAD, n_bytes + OVERHEAD_BYTES);
    if (other == NULL)
        return as_raw();
    Encoded plain = encode_plain(worker, encoding, raw, n_bytes, other);
    size_t plain_size = plain.codec == RAW ? n_bytes : plain.size;
    if (size != NOT_SMALLER && (double)size < CLEARLY_SMALLER * (double)plain_size)
        return delta;
    if (plain.codec != RAW)
        memcpy(out, other, plain.size);
    return plain;
}

/* --- a group of chunks --- */

enum { AS_IT_IS = -2, BY_ELEMENTS = -1 }; /* else the number of an encoding */

/* An entry of a pack's table, and its base; `layout.ENTRY`. */
typedef struct __attribute__((packed)) {
    uint8_t digest[32], stored_digest[16];
    uint64_t offset;
    uint32_t stored_bytes, raw_bytes;
    uint8_t codec, typesize, depth, effort;
    uint8_t base_pack[16], base_digest[32];
} Entry;

_Static_assert(sizeof(Entry) == 116, "an entry is as layout.ENTRY describes it");

/* The copy of a base that a delta names; `store._base_plans.NAMED`. */
typedef struct __attribute__((packed)) {
    uint8_t pack[16], digest[32], depth;
} Named;

_Static_assert(sizeof(Named) == 49, "a named base is as store._base_plans.NAMED describes it");

typedef struct {
    size_t n_chunks;
    const uint8_t **data, **bases; /* an address each; that of a base may be NULL */
    const Named *named;            /* the base of each; NULL if none has one */
    TcBatch stored;                /* chunks to decode as bases, each a part of its own */
    const int32_t *parts;          /* for each chunk the part of its base, -1 for none; NULL if none has one */
    const size_t *sizes;
    const uint32_t *itemsizes;
    const int32_t *how;
    const uint8_t *may_be_sampled, *begins_row, *digests;
    const Encoding *encodings;
    int checks;
    Entry *entries;
    uint8_t *out;
    const uint8_t **payloads; /* room for the addresses and sizes of payloads that are not raw */
    size_t *payload_sizes, n_payloads;
    /* Results. */
    size_t n_bytes, first_row, first_bytes; /* of the whole; and of the rest of a tensor that begins in an earlier group */
    Py_ssize_t changed;                     /* a chunk with other bytes than its digest's; -1 for none */
    Py_ssize_t baseless;                    /* a chunk whose base does not decode or has another digest; -1 for none */
} Group;

/* Figures of the sampled small chunks of a group, for each size of words. */
typedef struct {
    int n_samples[4];
    Alike planes[4][MOST_PLANES];
} AllAlike;

static void begin_samples(AllAlike *alike) {
    memset(alike, 0, sizeof *alike);
    for (int size = 0; size < 4; size++)
        for (int place = 0; place < MOST_PLANES; place++)
            alike->planes[size][place] = (Alike){1, 2, 0};
}

static const Alike *alike_of(const AllAlike *alike, size_t itemsize) {
    return is_word(itemsize) && alike->n_samples[log2_of(itemsize)] ? alike->planes[log2_of(itemsize)] : NULL;
}

/* Try the codings of a sample's planes. */
static void note_sample(Worker *worker, AllAlike *alike, const uint8_t *raw, size_t n_bytes, size_t itemsize, uint8_t *planes) {
    if (itemsize == 1 || !is_word(itemsize) || n_bytes < LEAST_SHUFFLED_BYTES)
        return;
    size_t n_words = n_bytes / itemsize;
    uint8_t *frame = area_of(worker, AREA_FRAME, tc_frame_bound(n_words));
    if (frame == NULL)
        return;
    alike->n_samples[log2_of(itemsize)]++;
    tc_split(raw, n_words, itemsize, NULL, NULL, 1, 1, planes);
    for (size_t place = 0; place < itemsize; place++) {
        Alike *mine = &alike->planes[log2_of(itemsize)][place];
        const uint8_t *plane = planes + place * n_words;
        size_t entropy = compress(worker, TC_ENTROPY, frame, tc_frame_bound(n_words), plane, n_words);
        if (entropy == NOT_SMALLER || (double)entropy >= LEAST_PLANE_GAIN * (double)n_words)
            continue;
        mine->is_kept = 0;
        size_t match = compress(worker, 1, frame, tc_frame_bound(n_words), plane, n_words);
        double share = (double)entropy / (double)n_words;
        if (match < entropy) /* from now on both are tried on every chunk */
            mine->least = 2, mine->most = -1;
        if (mine->most < 0)
            continue;
        if (share * 0.9 < mine->least)
            mine->least = share * 0.9;
        if (share * 1.1 > mine->most)
            mine->most = share * 1.1;
    }
}

/* Tell whether the small chunks, judged by some of them, gain too little to be encoded one by one. */
static int are_small_ones_raw(Worker *worker, const Group *group, AllAlike *alike) {
    size_t n_small = 0, n_raw = 0, n_stored = 0;
    for (size_t at = 0; at < group->n_chunks; at++)
        n_small += group->may_be_sampled[at];
    if (n_small <= SAMPLED)
        return 0;
    for (size_t at = 0, number = 0; at < group->n_chunks; at++)
        if (group->may_be_sampled[at] && number++ % SAMPLED == 0) {
            /* Of a copy: nobody changes it meanwhile. */
            uint8_t *copy = area_of(worker, AREA_COPY, group->sizes[at] + 1);
            if (copy == NULL)
                return 1;
            memcpy(copy, group->data[at], group->sizes[at]);
            note_sample(worker, alike, copy, group->sizes[at], group->itemsizes[at], group->out);
            Encoded made = encode_best(worker, copy, group->sizes[at], group->itemsizes[at], NULL, group->out);
            n_raw += group->sizes[at];
            n_stored += made.codec == RAW ? group->sizes[at] : made.size;
        }
    return (double)n_stored > 0.875 * (double)n_raw;
}

/* Set `base` to the verified base of a chunk, or to NULL if it has none or needs none; return 0 if the base is unreadable. It
 * stays until the worker finds the next one. */
static int find_base(Worker *worker, const Group *group, size_t number, const uint8_t **base) {
    int32_t how = group->how[number];
    *base = NULL;
    if (how < 0 || !group->encodings[how].has_delta || group->sizes[number] < LEAST_DELTA_BYTES)
        return 1;
    if (group->bases[number] != NULL) {
        uint8_t actual[TC_DIGEST];
        *base = group->bases[number];
        if (group->named == NULL)
            return 1;
        tc_blake3(*base, group->sizes[number], actual);
        return memcmp(actual, group->named[number].digest, TC_DIGEST) == 0;
    }
    if (group->parts == NULL || group->parts[number] < 0)
        return 1;
    if (worker->decoder == NULL && (worker->decoder = tc_new_decoder()) == NULL) {
        worker->has_failed = 1;
        return 1;
    }
    int status = tc_decode_part(worker->decoder, &group->stored, (size_t)group->parts[number], base);
    worker->has_failed |= status == CHUNK_NO_MEMORY;
    return status == CHUNK_GOOD || status == CHUNK_NO_MEMORY;
}

static void encode_chunks(Worker *worker, Group *group) {
    AllAlike alike;
    begin_samples(&alike);
    int small_ones_raw = are_small_ones_raw(worker, group, &alike), is_after_first = 0;
    size_t at = 0, origin = 0;
    if (worker->has_failed)
        return;
    for (size_t number = 0; number < group->n_chunks; number++) {
        const uint8_t *raw = group->data[number], *wanted = group->digests + 32 * number, *base;
        if (tc_stops())
            return;
        size_t n_bytes = group->sizes[number];
        int how = small_ones_raw && group->may_be_sampled[number] ? AS_IT_IS : group->how[number];
        /* A payload is made at its place, unless it turns out to be raw and to begin a tensor. */
        uint8_t *out = group->out + at;
        int begins = group->begins_row[number];
        size_t gap = begins && is_after_first ? (ALIGNMENT - (at - origin) % ALIGNMENT) % ALIGNMENT : 0;
        if (!find_base(worker, group, number, &base)) {
            group->baseless = (Py_ssize_t)number;
            return;
        }
        if (group->checks) {
            /* The owner may change the bytes at any time: what is hashed here is what is stored. */
            uint8_t *copy = how == AS_IT_IS ? out + gap : area_of(worker, AREA_COPY, n_bytes + 1), actual[TC_DIGEST];
            if (copy == NULL)
                return;
            tc_blake3_copy(raw, n_bytes, copy, actual);
            if (memcmp(actual, wanted, TC_DIGEST) != 0) {
                group->changed = (Py_ssize_t)number;
                return;
            }
            raw = copy;
        }
        Encoded made = as_raw();
        if (how >= 0)
            made = encode_chosen(worker, &group->encodings[how], raw, n_bytes, base, out);
        else if (how == BY_ELEMENTS)
            made = encode_best(worker, raw, n_bytes, group->itemsizes[number],
                               group->may_be_sampled[number] ? alike_of(&alike, group->itemsizes[number]) : NULL, out);
        if (worker->has_failed)
            return;
        if (made.codec == RAW) {
            made.size = n_bytes;
            if (begins && !is_after_first) {
                is_after_first = 1;
                group->first_row = number;
                group->first_bytes = origin = at;
            }
            memset(group->out + at, 0, gap);
            at += gap;
            if (raw != group->out + at)
                memcpy(group->out + at, raw, n_bytes);
        } else {
            group->payloads[group->n_payloads] = out;
            group->payload_sizes[group->n_payloads++] = made.size;
        }
        Entry *entry = &group->entries[number];
        memset(entry, 0, sizeof *entry);
        memcpy(entry->digest, wanted, 32);
        memcpy(entry->stored_digest, wanted, 16);
        entry->offset = at - origin;
        entry->stored_bytes = (uint32_t)made.size;
        entry->raw_bytes = (uint32_t)n_bytes;
        entry->codec = made.codec;
        entry->typesize = made.typesize;
        if (made.codec == DELTA && group->named != NULL) {
            const Named *named = &group->named[number];
            entry->depth = (uint8_t)(named->depth + 1);
            memcpy(entry->base_pack, named->pack, sizeof named->pack);
            memcpy(entry->base_digest, named->digest, sizeof named->digest);
        }
        at += made.size;
    }
    uint8_t(*stored)[TC_DIGEST] = (uint8_t(*)[TC_DIGEST])area_of(worker, AREA_CLASSES, group->n_payloads * TC_DIGEST);
    if (stored == NULL)
        return;
    tc_blake3_many(group->payloads, group->payload_sizes, group->n_payloads, stored);
    for (size_t number = 0, payload = 0; number < group->n_chunks; number++)
        if (group->entries[number].codec != RAW)
            memcpy(group->entries[number].stored_digest, stored[payload++], 16);
    if (!is_after_first) {
        group->first_row = group->n_chunks;
        group->first_bytes = at;
    }
    group->n_bytes = at;
}

/* --- what Python calls --- */

/* A view of a buffer, or of None, as read-only bytes; return 0 with an exception set if it is neither. */
static int view_of(PyObject *object, Py_buffer *view) {
    memset(view, 0, sizeof *view);
    return object == Py_None || PyObject_GetBuffer(object, view, PyBUF_SIMPLE) == 0;
}

static PyObject *misfit(void) {
    PyErr_SetString(PyExc_ValueError, "chunks, bases, codings and buffers do not fit each other");
    return NULL;
}

/* Take the tables of bases to decode, (reads, links, chunks, parts, part of each chunk), and check them; return 0 with an
 * exception set. */
static int take_stored(PyObject *tables, Py_buffer *views, Group *group, TcBytes *nowhere) {
    if (!PyTuple_Check(tables)) {
        PyErr_SetString(PyExc_TypeError, "the tables of bases are a tuple");
        return 0;
    }
    if (!PyArg_ParseTuple(tables, "y*y*y*y*y*:bases", &views[0], &views[1], &views[2], &views[3], &views[4]))
        return 0;
    *nowhere = (TcBytes){NULL, SIZE_MAX}; /* a base is decoded in the worker's memory, and put nowhere else */
    group->stored = (TcBatch){
        .reads = views[0].buf,
        .links = views[1].buf,
        .chunks = views[2].buf,
        .parts = views[3].buf,
        .n_reads = (size_t)views[0].len / sizeof(TcRead),
        .n_links = (size_t)views[1].len / sizeof(TcLink),
        .n_chunks = (size_t)views[2].len / sizeof(TcChunk),
        .n_parts = (size_t)views[3].len / sizeof(TcPart),
        .blocks = nowhere,
        .n_blocks = 1,
    };
    group->parts = views[4].buf;
    uintptr_t places = 0;
    for (int table = 0; table < 4; table++)
        places |= (uintptr_t)views[table].buf;
    int fits = places % 8 == 0 && (uintptr_t)views[4].buf % 4 == 0 && (size_t)views[0].len % sizeof(TcRead) == 0 &&
               (size_t)views[1].len % sizeof(TcLink) == 0 && (size_t)views[2].len % sizeof(TcChunk) == 0 &&
               (size_t)views[3].len % sizeof(TcPart) == 0 &&
               (size_t)views[4].len == 4 * group->n_chunks && tc_check_batch(&group->stored);
    for (size_t number = 0; fits && number < group->n_chunks; number++) {
        if (group->parts[number] < 0)
            continue;
        fits = (size_t)group->parts[number] < group->stored.n_parts;
        const TcPart *part = fits ? &group->stored.parts[group->parts[number]] : NULL;
        fits = fits && part->last_chunk - part->first_chunk == 1 &&
               group->stored.chunks[part->first_chunk].n_bytes == group->sizes[number];
    }
    if (!fits)
        misfit();
    return fits;
}

/* encode_group(data, bases or None, itemsizes, how, is_sampled, begins_row, digests, encodings, checks, entries, named or None,
 *              tables of bases or None) ->
 * (a chunk that is not its digest's or -1, a chunk whose base is unreadable or -1, payloads, the first chunk that begins
 *  aligned, the place of its payload) */
static PyObject *encode_group(PyObject *module, PyObject *args) {
    PyObject *data, *bases, *tables, *result = NULL;
    Py_buffer itemsizes, how, sampled, begins, digests, encodings, entries, named, stored[5] = {{0}};
    Payloads *payloads = NULL;
    TcBytes nowhere;
    int checks;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOy*y*y*y*y*y*pw*z*O:encode_group", &data, &bases, &itemsizes, &how, &sampled, &begins,
                          &digests, &encodings, &checks, &entries, &named, &tables))
        return NULL;
    Py_ssize_t n = PySequence_Size(data), n_viewed = 0;
    Worker *worker = NULL;
    Py_buffer *views = NULL;
    void *room = NULL;
    size_t count = n < 0 ? 0 : (size_t)n, needed = OVERHEAD_BYTES, n_encodings = (size_t)encodings.len / sizeof(Encoding);
    Py_ssize_t n_bases = n < 0 || bases == Py_None ? n : PySequence_Size(bases);
    if (n < 0 || n_bases < 0)
        goto done;
    if (n_bases != n) {
        misfit();
        goto done;
    }
    views = calloc(2 * count + 1, sizeof *views);
    room = calloc(count + 1, 3 * sizeof(uint8_t *) + 2 * sizeof(size_t));
    worker = take_worker();
    if (views == NULL || room == NULL || worker == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Group group = {.n_chunks = count, .checks = checks, .named = named.buf, .changed = -1, .baseless = -1};
    group.data = room;
    group.bases = group.data + count;
    group.payloads = group.bases + count;
    size_t *sizes = (size_t *)(group.payloads + count);
    group.sizes = sizes;
    group.payload_sizes = sizes + count;
    group.itemsizes = itemsizes.buf;
    group.how = how.buf;
    group.may_be_sampled = sampled.buf;
    group.begins_row = begins.buf;
    group.digests = digests.buf;
    group.encodings = encodings.buf;
    group.entries = entries.buf;
    int fits = (size_t)itemsizes.len == 4 * count && (size_t)how.len == 4 * count && (size_t)sampled.len == count &&
               (size_t)begins.len == count && (size_t)digests.len == 32 * count &&
               (size_t)encodings.len == n_encodings * sizeof(Encoding) &&
               (named.buf == NULL || (size_t)named.len == count * sizeof(Named)) &&
               (size_t)entries.len == count * sizeof(Entry) &&
               (uintptr_t)itemsizes.buf % 4 == 0 && (uintptr_t)how.buf % 4 == 0 && (uintptr_t)encodings.buf % 8 == 0;
    for (size_t number = 0; fits && number < n_encodings; number++)
        fits = is_sound(&group.encodings[number]);
    for (size_t number = 0; fits && number < count; number++) {
        for (int is_base = 0; is_base < 2; is_base++) {
            PyObject *from = is_base ? bases : data, *item = NULL;
            if (from != Py_None && (item = PySequence_GetItem(from, (Py_ssize_t)number)) == NULL)
                goto done;
            int viewed = view_of(item == NULL ? Py_None : item, &views[n_viewed]);
            Py_XDECREF(item);
            if (!viewed)
                goto done;
            n_viewed++;
        }
        const Py_buffer *chunk = &views[n_viewed - 2], *base = &views[n_viewed - 1];
        group.data[number] = chunk->buf;
        sizes[number] = (size_t)chunk->len;
        group.bases[number] = base->obj == NULL ? NULL : base->buf;
        needed += (size_t)chunk->len + ALIGNMENT;
        fits = chunk->obj != NULL && chunk->len <= MAX_CHUNK_BYTES && (base->obj == NULL || base->len == chunk->len) &&
               group.how[number] >= AS_IT_IS && group.how[number] < (int64_t)n_encodings && group.itemsizes[number] >= 1;
    }
    if (!fits) {
        misfit();
        goto done;
    }
    if (tables != Py_None && !take_stored(tables, stored, &group, &nowhere))
        goto done;
    if ((payloads = make_payloads(needed)) == NULL)
        goto done;
    group.out = payloads->data;
    TcWatch watch;
    tc_leave(&watch);
    encode_chunks(worker, &group);
    if (!tc_come_back(&watch))
        goto done;
    if (worker->has_failed)
        PyErr_NoMemory();
    else {
        payloads->n_bytes = (Py_ssize_t)group.n_bytes;
        result = Py_BuildValue("nnOnn", group.changed, group.baseless, payloads, (Py_ssize_t)group.first_row,
                               (Py_ssize_t)group.first_bytes);
    }
done:
    while (n_viewed > 0)
        PyBuffer_Release(&views[--n_viewed]);
    if (worker != NULL)
        give_worker(worker);
    free(views);
    free(room);
    PyBuffer_Release(&itemsizes);
    PyBuffer_Release(&how);
    PyBuffer_Release(&sampled);
    PyBuffer_Release(&begins);
    PyBuffer_Release(&digests);
    PyBuffer_Release(&encodings);
    PyBuffer_Release(&entries);
    PyBuffer_Release(&named);
    for (int table = 0; table < 5; table++)
        PyBuffer_Release(&stored[table]);
    Py_XDECREF((PyObject *)payloads);
    return result;
}

/* The arguments of a call that encodes or examines one chunk. */
typedef struct {
    Py_buffer raw, base, codings;
    Worker *worker;
    uint8_t *out; /* room for a payload */
} Call;

static void end_call(Call *call) {
    if (call->worker != NULL)
        give_worker(call->worker);
    PyBuffer_Release(&call->raw);
    PyBuffer_Release(&call->base);
    PyBuffer_Release(&call->codings);
}

/* Check the arguments, and find a worker; return 0 with an exception set. */
static int begin_call(Call *call, Py_ssize_t itemsize) {
    Py_ssize_t width = is_word((size_t)itemsize) ? itemsize : 1;
    int fits = itemsize >= 1 && itemsize <= UINT32_MAX && call->raw.len <= MAX_CHUNK_BYTES &&
               (call->base.buf == NULL || call->base.len == call->raw.len) &&
               (call->codings.buf == NULL || call->codings.len == width);
    if (!fits) {
        misfit();
        return 0;
    }
    call->worker = take_worker();
    call->out = call->worker == NULL ? NULL : area_of(call->worker, AREA_OTHER_PAYLOAD, (size_t)call->raw.len + OVERHEAD_BYTES);
    if (call->out == NULL)
        PyErr_NoMemory();
    return call->out != NULL;
}

/* Raise a MemoryError, unless the handler of a signal has raised something: without libzstd, frames are made in Python. */
static PyObject *no_memory(void) { return PyErr_Occurred() != NULL ? NULL : PyErr_NoMemory(); }

static PyObject *payload_of(Call *call, size_t size) {
    return call->worker->has_failed || size == NOT_SMALLER ? no_memory()
                                                           : PyBytes_FromStringAndSize((char *)call->out, (Py_ssize_t)size);
}

/* encode_best(raw, itemsize) -> (codec, typesize, payload or None for a raw chunk) */
static PyObject *py_encode_best(PyObject *module, PyObject *args) {
    Call call = {0};
    Py_ssize_t itemsize;
    PyObject *payload = NULL, *result = NULL;
    Encoded made = as_raw();
    (void)module;
    if (!PyArg_ParseTuple(args, "y*n:encode_best", &call.raw, &itemsize))
        return NULL;
    if (begin_call(&call, itemsize)) {
        Py_BEGIN_ALLOW_THREADS;
        made = encode_best(call.worker, call.raw.buf, (size_t)call.raw.len, (size_t)itemsize, NULL, call.out);
        Py_END_ALLOW_THREADS;
        payload = made.codec == RAW && !call.worker->has_failed ? Py_NewRef(Py_None) : payload_of(&call, made.size);
        if (payload != NULL)
            result = Py_BuildValue("iiN", made.codec, made.typesize, payload);
    }
    end_call(&call);
    return result;
}

/* compress(data, level) -> frame; level 0 is the coder of planes. */
static PyObject *py_compress(PyObject *module, PyObject *args) {
    Call call = {0};
    PyObject *result = NULL;
    int level;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*i:compress", &call.raw, &level))
        return NULL;
    if (level < 0 || level >= TC_N_LEVELS)
        misfit();
    else if (begin_call(&call, 1)) {
        size_t size = 0, room = tc_frame_bound((size_t)call.raw.len);
        uint8_t *out = area_of(call.worker, AREA_OTHER, room);
        if (out != NULL) {
            Py_BEGIN_ALLOW_THREADS;
            size = compress(call.worker, level, out, room, call.raw.buf, (size_t)call.raw.len);
            Py_END_ALLOW_THREADS;
        }
        call.out = out;
        result = payload_of(&call, size);
    }
    end_call(&call);
    return result;
}

/* encode_records(raw, itemsize, level) -> payload; with level 0, the core chooses */
static PyObject *py_encode_records(PyObject *module, PyObject *args) {
    Call call = {0};
    Py_ssize_t itemsize;
    PyObject *result = NULL;
    int level;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*ni:encode_records", &call.raw, &itemsize, &level))
        return NULL;
    if (level < 0 || level >= TC_N_LEVELS)
        misfit();
    else if (begin_call(&call, itemsize)) {
        size_t size = 0, n_bytes = (size_t)call.raw.len, room = tc_frame_bound(n_bytes) + OVERHEAD_BYTES;
        int way = level ? level : way_for_records(n_bytes, (size_t)itemsize);
        uint8_t *out = area_of(call.worker, AREA_OTHER, room);
        if (out != NULL) {
            Py_BEGIN_ALLOW_THREADS;
            size = encode_records(call.worker, call.raw.buf, n_bytes, (size_t)itemsize, way, out, room);
            Py_END_ALLOW_THREADS;
        }
        call.out = out;
        result = payload_of(&call, size);
    }
    end_call(&call);
    return result;
}

/* encode_planes(raw, itemsize, codings or None, effort) -> payload */
static PyObject *py_encode_planes(PyObject *module, PyObject *args) {
    Call call = {0};
    Py_ssize_t itemsize;
    PyObject *result = NULL;
    size_t size;
    int effort;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nz*i:encode_planes", &call.raw, &itemsize, &call.codings, &effort))
        return NULL;
    if (begin_call(&call, itemsize)) {
        Py_BEGIN_ALLOW_THREADS;
        size = encode_planes(call.worker, call.raw.buf, (size_t)call.raw.len, (size_t)itemsize, call.codings.buf, effort,
                             NULL, call.out);
        Py_END_ALLOW_THREADS;
        result = payload_of(&call, size);
    }
    end_call(&call);
    return result;
}

/* encode_delta(raw, itemsize, base, transform, unit, codings or None, effort) -> payload */
static PyObject *py_encode_delta(PyObject *module, PyObject *args) {
    Call call = {0};
    Py_ssize_t itemsize, unit;
    PyObject *result = NULL;
    size_t size;
    int transform, effort;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*ny*inz*i:encode_delta", &call.raw, &itemsize, &call.base, &transform, &unit, &call.codings,
                          &effort))
        return NULL;
    if (transform < PLAIN || transform > NUDGED || unit < 1 ||
        !fits_unit(is_word((size_t)itemsize) ? (size_t)itemsize : 1, (size_t)unit) || call.base.len != call.raw.len)
        misfit();
    else if (begin_call(&call, itemsize)) {
        Py_BEGIN_ALLOW_THREADS;
        size = encode_delta(call.worker, call.raw.buf, (size_t)call.raw.len, (size_t)itemsize, call.base.buf, transform,
                            (size_t)unit, call.codings.buf, effort, call.out);
        Py_END_ALLOW_THREADS;
        result = payload_of(&call, size);
    }
    end_call(&call);
    return result;
}

/* choose_codings(raw, width, base or None) -> a byte for each plane */
static PyObject *py_choose_codings(PyObject *module, PyObject *args) {
    Call call = {0};
    Py_ssize_t width;
    PyObject *result = NULL;
    uint8_t codings[MOST_PLANES];
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nz*:choose_codings", &call.raw, &width, &call.base))
        return NULL;
    if (width < 1 || !is_word((size_t)width))
        misfit();
    else if (begin_call(&call, width)) {
        Py_BEGIN_ALLOW_THREADS;
        choose_codings(call.worker, call.raw.buf, call.base.buf, (size_t)call.raw.len / (size_t)width, (size_t)width,
                       SHARE_SAMPLE_WORDS, codings);
        Py_END_ALLOW_THREADS;
        result = call.worker->has_failed ? no_memory() : PyBytes_FromStringAndSize((char *)codings, width);
    }
    end_call(&call);
    return result;
}

/* choose_transform(raw, width, base, codings, at_any_cost) -> (transform, words of a unit) */
static PyObject *py_choose_transform(PyObject *module, PyObject *args) {
    Call call = {0};
    Py_ssize_t width;
    PyObject *result = NULL;
    int at_any_cost, transform;
    size_t unit;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*ny*y*p:choose_transform", &call.raw, &width, &call.base, &call.codings, &at_any_cost))
        return NULL;
    if (width < 1 || !is_word((size_t)width) || call.base.len != call.raw.len || call.codings.len != width)
        misfit();
    else if (begin_call(&call, width)) {
        Py_BEGIN_ALLOW_THREADS;
        choose_transform(call.worker, call.raw.buf, (size_t)call.raw.len, (size_t)width, call.base.buf, call.codings.buf,
                         at_any_cost, &transform, &unit);
        Py_END_ALLOW_THREADS;
        result = call.worker->has_failed ? no_memory() : Py_BuildValue("in", transform, (Py_ssize_t)unit);
    }
    end_call(&call);
    return result;
}

/* estimate_share(raw, width, base or None) -> the share of its size that the chunk takes */
static PyObject *py_estimate_share(PyObject *module, PyObject *args) {
    Call call = {0};
    Py_ssize_t width;
    PyObject *result = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nz*:estimate_share", &call.raw, &width, &call.base))
        return NULL;
    if (width < 1 || !is_word((size_t)width))
        misfit();
    else if (begin_call(&call, width))
        result = PyFloat_FromDouble(
            estimate_share(call.raw.buf, call.base.buf, (size_t)call.raw.len / (size_t)width, (size_t)width));
    end_call(&call);
    return result;
}

PyMethodDef tc_encode_methods[] = {
    {"encode_group", encode_group, METH_VARARGS, NULL},
    {"encode_best", py_encode_best, METH_VARARGS, NULL},
    {"compress", py_compress, METH_VARARGS, NULL},
    {"encode_records", py_encode_records, METH_VARARGS, NULL},
    {"encode_planes", py_encode_planes, METH_VARARGS, NULL},
    {"encode_delta", py_encode_delta, METH_VARARGS, NULL},
    {"choose_codings", py_choose_codings, METH_VARARGS, NULL},
    {"choose_transform", py_choose_transform, METH_VARARGS, NULL},
    {"estimate_share", py_estimate_share, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
