/* Codec 3: differences of words from a base, in the layout of a transform (docs/format.md, Deltas). */
#include "encode.h"

#include "words.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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
    size_t n = tc_stretches_of(words, n_words, 4, DECAY_SAMPLE_WORDS, (uint8_t *)sample), n_losses = 0, most = 0;
    tc_stretches_of(base, n_words, 4, DECAY_SAMPLE_WORDS, (uint8_t *)of_base);
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

int tc_fits_unit(size_t width, size_t unit) {
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
static size_t encode_sparse(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t width, const uint8_t *base, int effort,
                            uint8_t *out) {
    size_t n_words = n_bytes / width, n_tail = n_bytes % width, most = n_words / LEAST_SPARSE_WORDS, before = 0;
    uint8_t *gaps = tc_area_of(worker, AREA_CLASSES, most + n_words / LONG_GAP + 1);
    uint8_t *changed = tc_area_of(worker, AREA_GROUPED, most * width + 1);
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
    out[1] = (uint8_t)(SPARSE | tc_log2_of(width) << 4);
    size_t size = 14;
    tc_put_u32(out + 2, n_changed);
    tc_put_u32(out + 6, n_gap_bytes);
    size += tc_encode_planes(worker, gaps, n_gap_bytes, 1, NULL, effort, NULL, out + size);
    tc_put_u32(out + 10, size - 14);
    size += tc_encode_planes(worker, changed, n_changed * width, width, NULL, effort, NULL, out + size);
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
static size_t encode_nudged(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t width, const uint8_t *base,
                            uint8_t *out) {
    size_t n_words = n_bytes / width, n_tail = n_bytes % width, most = n_words / LEAST_NUDGED_WORDS;
    uint32_t *gaps = (uint32_t *)(void *)tc_area_of(worker, AREA_CLASSES, 2 * (most * sizeof *gaps + 8));
    uint64_t *magnitudes = (uint64_t *)(void *)tc_area_of(worker, AREA_GROUPED, most * sizeof *magnitudes + 8);
    uint8_t *signs = tc_area_of(worker, AREA_SHUFFLED, most + 8);
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
    out[1] = (uint8_t)(NUDGED | tc_log2_of(width) << 4);
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

size_t tc_encode_delta(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t itemsize, const uint8_t *base,
                       int transform, size_t unit, const uint8_t *codings, int effort, uint8_t *out) {
    size_t width = tc_is_word(itemsize) ? itemsize : 1;
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
    out[1] = (uint8_t)(transform | tc_log2_of(width) << 4);
    if (transform == DECAYED) {
        uint8_t *decayed = tc_area_of(worker, AREA_DECAYED, n_bytes);
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
        tc_choose_codings(worker, raw, base, n_words, width, PLANE_SAMPLE_WORDS, chosen);
        codings = chosen;
    }
    if (transform == GROUPED) {
        uint8_t thresholds[MOST_GROUPS];
        size_t n_groups = n_words ? choose_thresholds(base, n_words, width, thresholds) : 1, begin = 0;
        size_t lengths[MOST_GROUPS] = {0};
        uint8_t *classes = tc_area_of(worker, AREA_CLASSES, n_words / unit + 8);
        uint8_t *planes = tc_area_of(worker, AREA_PLANES, n_words * width);
        uint8_t *grouped = tc_area_of(worker, AREA_GROUPED, n_words * width);
        if (classes == NULL || planes == NULL || grouped == NULL)
            return NOT_SMALLER;
        TcCounts of_class;
        tc_count_units(base, n_words, width, thresholds, n_groups - 1, unit, classes, &of_class);
        tc_count_groups(&of_class, n_groups, unit, lengths);
        tc_split_units(raw, n_words, width, base, classes, &of_class, n_groups, unit, grouped, planes);
        out[at++] = (uint8_t)(n_groups | (size_t)tc_log2_of(unit) << 4);
        memcpy(out + at, thresholds, n_groups - 1);
        uint8_t *sizes = out + at + n_groups - 1;
        at += n_groups - 1 + 4 * n_groups;
        for (size_t group = 0; group < n_groups; group++) {
            size_t size = tc_put_planes(worker, planes + begin, n_words, lengths[group], width, codings, effort, NULL, out + at);
            tc_put_u32(sizes + 4 * group, size);
            at += size;
            begin += lengths[group];
        }
    } else {
        uint8_t *planes = out + at + 1 + 4 * width;
        tc_split(raw, n_words, width, base, planes);
        at += tc_put_planes(worker, planes, n_words, n_words, width, codings, effort, NULL, out + at);
    }
    memcpy(out + at, raw + n_words * width, n_tail);
    return at + n_tail;
}

void tc_choose_transform(TcWorker *worker, const uint8_t *raw, size_t n_bytes, size_t width, const uint8_t *base,
                         const uint8_t *codings, int at_any_cost, int *transform, size_t *unit) {
    uint8_t sample[2 * SHARE_SAMPLE_WORDS * 4], of_base[2 * SHARE_SAMPLE_WORDS * 4];
    uint32_t n_steps;
    uint16_t rate;
    struct { int transform; size_t unit; } ways[3];
    size_t n_ways = 0, begin = n_bytes > TRIED_BYTES ? (n_bytes - TRIED_BYTES) / 16 * 8 : 0;
    size_t tried = n_bytes - begin < TRIED_BYTES ? n_bytes - begin : TRIED_BYTES;
    uint8_t *out = tc_area_of(worker, AREA_OTHER_PAYLOAD, n_bytes + OVERHEAD_BYTES);
    *transform = PLAIN;
    *unit = 1;
    if (out == NULL)
        return;
    if (width == 4) {
        size_t n = tc_stretches_of(raw, n_bytes / 4, 4, SHARE_SAMPLE_WORDS, sample);
        tc_stretches_of(base, n_bytes / 4, 4, SHARE_SAMPLE_WORDS, of_base);
        if (fit_decay(sample, of_base, n, &n_steps, &rate))
            ways[n_ways].transform = DECAYED, ways[n_ways++].unit = 1;
    }
    ways[n_ways].transform = GROUPED, ways[n_ways++].unit = default_unit(width);
    ways[n_ways].transform = GROUPED, ways[n_ways++].unit = 1;
    size_t plain = tc_encode_delta(worker, raw + begin, tried, width, base + begin, PLAIN, 1, codings, 1, out), least = plain;
    if (is_sparse(raw + begin, base + begin, tried / width, width)) {
        size_t size = tc_encode_delta(worker, raw + begin, tried, width, base + begin, SPARSE, 1, NULL, 1, out);
        if (size < least + tried / SPARSE_WORTH) {
            *transform = SPARSE, least = size;
            /* The tables of Zstandard's codes take a larger share of a part than of the chunk. */
            int is_whole = is_sparse(raw, base, n_bytes / width, width);
            size_t from = is_whole ? 0 : begin, length = is_whole ? n_bytes : tried;
            size_t sparse = tc_encode_delta(worker, raw + from, length, width, base + from, SPARSE, 1, NULL, 1, out);
            size_t nudged = tc_encode_delta(worker, raw + from, length, width, base + from, NUDGED, 1, NULL, 1, out);
            if ((double)nudged <= (at_any_cost ? 1 : NUDGED_WORTH) * (double)sparse) {
                *transform = NUDGED;
                size = tc_encode_delta(worker, raw + begin, tried, width, base + begin, NUDGED, 1, NULL, 1, out);
                least = size < least ? size : least;
            }
        }
    }
    for (size_t way = 0; way < n_ways; way++) {
        int is_last = ways[way].transform == GROUPED && ways[way].unit == 1;
        if (is_last && !at_any_cost && (double)least < ENOUGH * (double)plain)
            break;
        size_t size = tc_encode_delta(worker, raw + begin, tried, width, base + begin, ways[way].transform, ways[way].unit,
                                   codings, 1, out);
        if ((double)size < (at_any_cost ? 1 : WORTH_SLOWER) * (double)least)
            *transform = ways[way].transform, *unit = ways[way].unit, least = size;
    }
}
