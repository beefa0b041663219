/* The chunks of one group, encoded as chosen for their tensors, with their entries in a pack's table. */
#include "encode.h"

#include "blake3.h"
#include "watch.h"
#include "words.h"

#include <string.h>

/* --- choices --- */

int tc_is_sound(const TcEncoding *encoding) {
    size_t width = encoding->itemsize;
    if ((encoding->has_codings || encoding->has_delta) && !tc_is_word(width))
        return 0;
    if (!encoding->has_delta)
        return 1;
    return encoding->transform <= NUDGED && tc_fits_unit(width, encoding->unit);
}

static TcEncoded encode_plain(TcWorker *worker, const TcEncoding *encoding, const uint8_t *raw, size_t n_bytes, uint8_t *out) {
    if (!encoding->has_codings)
        return tc_encode_best(worker, raw, n_bytes, encoding->itemsize, NULL, out);
    size_t n_kept = 0;
    for (size_t place = 0; place < encoding->itemsize; place++)
        n_kept += encoding->codings[place] == KEEP;
    if (n_kept == encoding->itemsize)
        return tc_as_raw();
    size_t size = tc_encode_planes(worker, raw, n_bytes, encoding->itemsize, encoding->codings, encoding->effort, NULL, out);
    if ((double)size > CLEARLY_SMALLER * (double)n_bytes)
        return tc_as_raw();
    return (TcEncoded){PLANES, (uint8_t)encoding->itemsize, size};
}

/* Encode a chunk as chosen for its tensor; see `encode_chosen` in `tests/reference/choose.py`. */
static TcEncoded encode_chosen(TcWorker *worker, const TcEncoding *encoding, const uint8_t *raw, size_t n_bytes, const uint8_t *base,
                               uint8_t *out) {
    if (base == NULL || !encoding->has_delta || n_bytes < LEAST_DELTA_BYTES)
        return encode_plain(worker, encoding, raw, n_bytes, out);
    int transform = n_bytes >= LEAST_GROUPED_BYTES ? encoding->transform : PLAIN;
    const uint8_t *codings = encoding->has_delta_codings ? encoding->delta_codings : NULL;
    size_t size =
        tc_encode_delta(worker, raw, n_bytes, encoding->itemsize, base, transform, encoding->unit, codings, encoding->effort, out);
    TcEncoded delta = {DELTA, (uint8_t)encoding->itemsize, size};
    if (size != NOT_SMALLER && (double)size < CLEARLY_SMALLER * encoding->plain_share * (double)n_bytes)
        return delta;
    uint8_t *other = tc_area_of(worker, AREA_OTHER_PAYLOAD, n_bytes + OVERHEAD_BYTES);
    if (other == NULL)
        return tc_as_raw();
    TcEncoded plain = encode_plain(worker, encoding, raw, n_bytes, other);
    size_t plain_size = plain.codec == RAW ? n_bytes : plain.size;
    if (size != NOT_SMALLER && (double)size < CLEARLY_SMALLER * (double)plain_size)
        return delta;
    if (plain.codec != RAW)
        memcpy(out, other, plain.size);
    return plain;
}

/* --- a group of chunks --- */

/* Figures of the sampled small chunks of a group, for each size of words. */
typedef struct {
    int n_samples[4];
    TcAlike planes[4][MOST_PLANES];
} AllAlike;

static void begin_samples(AllAlike *alike) {
    memset(alike, 0, sizeof *alike);
    for (int size = 0; size < 4; size++)
        for (int place = 0; place < MOST_PLANES; place++)
            alike->planes[size][place] = (TcAlike){1, 2, 0};
}

static const TcAlike *alike_of(const AllAlike *alike, size_t itemsize) {
    return tc_is_word(itemsize) && alike->n_samples[tc_log2_of(itemsize)] ? alike->planes[tc_log2_of(itemsize)] : NULL;
}

/* Try the codings of a sample's planes. */
static void note_sample(TcWorker *worker, AllAlike *alike, const uint8_t *raw, size_t n_bytes, size_t itemsize, uint8_t *planes) {
    if (itemsize == 1 || !tc_is_word(itemsize) || n_bytes < LEAST_SHUFFLED_BYTES)
        return;
    size_t n_words = n_bytes / itemsize;
    uint8_t *frame = tc_area_of(worker, AREA_FRAME, tc_frame_bound(n_words));
    if (frame == NULL)
        return;
    alike->n_samples[tc_log2_of(itemsize)]++;
    tc_split(raw, n_words, itemsize, NULL, planes);
    for (size_t place = 0; place < itemsize; place++) {
        TcAlike *mine = &alike->planes[tc_log2_of(itemsize)][place];
        const uint8_t *plane = planes + place * n_words;
        size_t entropy = tc_compress_whole(worker, TC_ENTROPY, frame, tc_frame_bound(n_words), plane, n_words);
        if (entropy == NOT_SMALLER || (double)entropy >= LEAST_PLANE_GAIN * (double)n_words)
            continue;
        mine->is_kept = 0;
        size_t match = tc_compress_whole(worker, 1, frame, tc_frame_bound(n_words), plane, n_words);
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
static int are_small_ones_raw(TcWorker *worker, const TcGroup *group, AllAlike *alike) {
    size_t n_small = 0, n_raw = 0, n_stored = 0;
    for (size_t at = 0; at < group->n_chunks; at++)
        n_small += group->may_be_sampled[at];
    if (n_small <= SAMPLED)
        return 0;
    for (size_t at = 0, number = 0; at < group->n_chunks; at++)
        if (group->may_be_sampled[at] && number++ % SAMPLED == 0) {
            /* Of a copy: nobody changes it meanwhile. */
            uint8_t *copy = tc_area_of(worker, AREA_COPY, group->sizes[at] + 1);
            if (copy == NULL)
                return 1;
            memcpy(copy, group->data[at], group->sizes[at]);
            note_sample(worker, alike, copy, group->sizes[at], group->itemsizes[at], group->out);
            TcEncoded made = tc_encode_best(worker, copy, group->sizes[at], group->itemsizes[at], NULL, group->out);
            n_raw += group->sizes[at];
            n_stored += made.codec == RAW ? group->sizes[at] : made.size;
        }
    return (double)n_stored > 0.875 * (double)n_raw;
}

/* Set `base` to the verified base of a chunk, or to NULL if it has none or needs none; return 0 if the base is unreadable. It
 * stays until the worker finds the next one. */
static int find_base(TcWorker *worker, const TcGroup *group, size_t number, const uint8_t **base) {
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

void tc_encode_chunks(TcWorker *worker, TcGroup *group) {
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
            uint8_t *copy = how == AS_IT_IS ? out + gap : tc_area_of(worker, AREA_COPY, n_bytes + 1), actual[TC_DIGEST];
            if (copy == NULL)
                return;
            tc_blake3_copy(raw, n_bytes, copy, actual);
            if (memcmp(actual, wanted, TC_DIGEST) != 0) {
                group->changed = (Py_ssize_t)number;
                return;
            }
            raw = copy;
        }
        TcEncoded made = tc_as_raw();
        if (how >= 0)
            made = encode_chosen(worker, &group->encodings[how], raw, n_bytes, base, out);
        else if (how == BY_ELEMENTS)
            made = tc_encode_best(worker, raw, n_bytes, group->itemsizes[number],
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
        TcEntry *entry = &group->entries[number];
        memset(entry, 0, sizeof *entry);
        memcpy(entry->digest, wanted, 32);
        memcpy(entry->stored_digest, wanted, 16);
        entry->offset = at - origin;
        entry->stored_bytes = (uint32_t)made.size;
        entry->raw_bytes = (uint32_t)n_bytes;
        entry->codec = made.codec;
        entry->typesize = made.typesize;
        if (made.codec == DELTA && group->named != NULL) {
            const TcNamed *named = &group->named[number];
            entry->depth = (uint8_t)(named->depth + 1);
            memcpy(entry->base_pack, named->pack, sizeof named->pack);
            memcpy(entry->base_digest, named->digest, sizeof named->digest);
        }
        at += made.size;
    }
    uint8_t(*stored)[TC_DIGEST] = (uint8_t(*)[TC_DIGEST])tc_area_of(worker, AREA_CLASSES, group->n_payloads * TC_DIGEST);
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
