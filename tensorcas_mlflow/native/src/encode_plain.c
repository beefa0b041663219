/* Codecs without a base: byte planes, shuffled records, and whole frames (docs/format.md, Codecs). */
#include "encode.h"

#include "words.h"

#include <math.h>
#include <string.h>

/* --- words --- */

void tc_put_u32(uint8_t *out, size_t value) {
    uint32_t word = (uint32_t)value;
    memcpy(out, &word, 4);
}

size_t tc_stretches_of(const uint8_t *words, size_t n_have, size_t width, size_t n_words, uint8_t *out) {
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
    size_t n_sampled = tc_stretches_of(words, n_have, width, n_words, sample);
    if (base != NULL)
        tc_stretches_of(base, n_have, width, n_words, of_base);
    tc_split(sample, n_sampled, width, base == NULL ? NULL : of_base, planes);
    return n_sampled;
}

/* --- planes --- */

void tc_choose_codings(TcWorker *worker, const uint8_t *words, const uint8_t *base, size_t n_words, size_t width,
                       size_t n_wanted, uint8_t *codings) {
    uint8_t planes[2 * PLANE_SAMPLE_WORDS * MOST_PLANES], frame[2 * PLANE_SAMPLE_WORDS + OVERHEAD_BYTES];
    size_t n_sampled = split_sample(words, base, n_words, width, n_wanted, planes);
    for (size_t place = 0; place < width; place++) {
        const uint8_t *plane = planes + place * n_sampled;
        size_t entropy = tc_compress_whole(worker, TC_ENTROPY, frame, sizeof frame, plane, n_sampled);
        codings[place] = KEEP;
        if (entropy != NOT_SMALLER && (double)entropy < LEAST_PLANE_GAIN * (double)n_sampled) {
            size_t match = tc_compress_whole(worker, 1, frame, sizeof frame, plane, n_sampled);
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

/* Compress one plane in the given coding; return the size of the frame at *frame, or NOT_SMALLER to keep the plane. */
static size_t compress_plane(TcWorker *worker, const uint8_t *plane, size_t length, int coding, int effort, const TcAlike *alike,
                             uint8_t **frame) {
    if (coding == KEEP || length == 0)
        return NOT_SMALLER;
    /* With less room Zstandard may fail, though the frame would fit. */
    size_t room = tc_frame_bound(length);
    uint8_t *best = tc_area_of(worker, AREA_FRAME, room), *other = tc_area_of(worker, AREA_OTHER_FRAME, room);
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
        size_t size = tc_compress_whole(worker, ways[way], other, room, plane, length);
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

size_t tc_put_planes(TcWorker *worker, const uint8_t *planes, size_t stride, size_t length, size_t width,
                     const uint8_t *codings, int effort, const TcAlike *alike, uint8_t *out) {
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
        tc_put_u32(head + 1 + 4 * place, size);
        at += size;
    }
    memcpy(out, head, 1 + 4 * width);
    return at;
}

size_t tc_encode_planes(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, const uint8_t *codings,
                        int effort, const TcAlike *alike, uint8_t *out) {
    size_t width = tc_is_word(itemsize) ? itemsize : 1, n_words = n_bytes / width, head = 1 + 4 * width;
    uint8_t chosen[MOST_PLANES];
    if (codings == NULL && n_words > FEW_WORDS) {
        tc_choose_codings(worker, raw, NULL, n_words, width, PLANE_SAMPLE_WORDS, chosen);
        codings = chosen;
    }
    tc_split(raw, n_words, width, NULL, out + head);
    size_t size = tc_put_planes(worker, out + head, n_words, n_words, width, codings, effort, alike, out);
    memcpy(out + size, raw + n_words * width, n_bytes - n_words * width);
    return size + n_bytes - n_words * width;
}

double tc_estimate_share(const uint8_t *words, const uint8_t *base, size_t n_words, size_t width) {
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

int tc_way_for_records(size_t n_bytes, size_t itemsize) {
    if (itemsize >= 4 && itemsize < 256)
        return TC_RECORDS;
    return itemsize < 4 && n_bytes > SMALL_CHUNK_BYTES ? 1 : level_for(n_bytes);
}

size_t tc_encode_records(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, int way, uint8_t *out,
                         size_t room) {
    size_t width = itemsize >= 1 && itemsize <= MAX_RECORD_BYTES ? itemsize : 1, n_records = n_bytes / width;
    uint8_t *shuffled = tc_area_of(worker, AREA_SHUFFLED, n_bytes);
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
    size_t size = tc_compress_in_blocks(worker, way, out + 2, room - 2, shuffled, n_bytes, width < 256 ? step : 0);
    return size == NOT_SMALLER ? NOT_SMALLER : size + 2;
}

TcEncoded tc_encode_best(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, const TcAlike *alike,
                         uint8_t *out) {
    if (n_bytes < LEAST_ENCODED_BYTES)
        return tc_as_raw();
    uint8_t codec = WHOLE;
    if (itemsize > 1 && itemsize <= MAX_RECORD_BYTES && n_bytes >= LEAST_SHUFFLED_BYTES && n_bytes >= 8 * itemsize) {
        codec = PLANES;
        if (!tc_is_word(itemsize)) {
            size_t tried = n_bytes < RECORDS_TRIED_BYTES ? n_bytes : RECORDS_TRIED_BYTES, room = tried + OVERHEAD_BYTES;
            size_t plain = tc_compress_whole(worker, 1, out, room, raw, tried);
            size_t shuffled = tc_encode_records(worker, raw, tried, itemsize, tc_way_for_records(SMALL_CHUNK_BYTES + 1, itemsize), out, room);
            codec = plain < shuffled ? WHOLE : SHUFFLE_ZSTD;
        }
    }
    size_t size;
    if (codec == PLANES) {
        size = tc_encode_planes(worker, raw, n_bytes, itemsize, NULL, 1, alike, out);
        if (itemsize >= MIXED_ITEMSIZE && n_bytes <= SMALL_CHUNK_BYTES) {
            size_t room = n_bytes + OVERHEAD_BYTES, plain = NOT_SMALLER;
            uint8_t *other = tc_area_of(worker, AREA_OTHER, room);
            if (other != NULL)
                plain = tc_compress_whole(worker, MIXED_TRIED_LEVEL, other, room, raw, n_bytes);
            /* If a fast level is far behind, the slow level loses too. */
            if (plain != NOT_SMALLER && (double)plain < (double)size + MOST_BEHIND * (double)n_bytes)
                plain = tc_compress_whole(worker, level_for(n_bytes), other, room, raw, n_bytes);
            else
                plain = NOT_SMALLER;
            if (plain < size) {
                codec = WHOLE, size = plain;
                memcpy(out, other, size);
            }
        }
    } else if (codec == WHOLE)
        size = tc_compress_whole(worker, level_for(n_bytes), out, n_bytes + OVERHEAD_BYTES, raw, n_bytes);
    else
        size = tc_encode_records(worker, raw, n_bytes, itemsize, tc_way_for_records(n_bytes, itemsize), out, n_bytes + OVERHEAD_BYTES);
    if (size == NOT_SMALLER || (double)size > LEAST_GAIN * (double)n_bytes)
        return tc_as_raw();
    return (TcEncoded){codec, (uint8_t)(itemsize < MAX_TYPESIZE ? itemsize : MAX_TYPESIZE), size};
}
