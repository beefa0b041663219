/* DEFLATE as zlib 1.3.1 writes it with its default strategy, memory level 8 and a window of 32 KiB: levels 1 to 9.
 *
 * `docs/format.md` (Deflate) describes the result bit by bit, and `codecs/_deflate.py` computes the same without this file. The
 * library itself would not do: its later releases, and other libraries under its name, may write other streams of the same bytes.
 *
 * Positions count from the first byte of the data. zlib counts from the first byte of its window, which it moves by 32 KiB, and
 * its hash table cannot name position 0 of the window: `window_start` tells which positions zlib has lost.
 */
#include "methods.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "watch.h"

enum {
    WINDOW = 1 << 15,
    LEAST_MATCH = 3,
    MOST_MATCH = 258,
    LEAST_AHEAD = MOST_MATCH + LEAST_MATCH + 1, /* bytes that zlib keeps in its window before it looks for a match */
    MOST_DISTANCE = WINDOW - LEAST_AHEAD,
    TOO_FAR = 4096,                             /* a match of three bytes farther away costs more than three literals */
    N_HASHES = 1 << 15,
    MOST_SYMBOLS = (1 << 14) - 1,               /* of one block */
    SYMBOLS_BETWEEN_LOOKS = 512,
    N_LITERALS = 286,
    N_DISTANCES = 30,
    N_LENGTHS = 19,
    END_OF_BLOCK = 256,
    MOST_BITS = 15,
    N_NODES = 2 * N_LITERALS + 1,
    REPEAT = 16, ZEROS = 17, MANY_ZEROS = 18,
};

typedef struct { uint16_t good, lazy, nice, chain; } Effort;

static const Effort EFFORTS[] = {
    {0, 0, 0, 0},       {4, 4, 8, 4},       {4, 5, 16, 8},        {4, 6, 32, 32},       {4, 4, 16, 16},
    {8, 16, 32, 32},    {8, 16, 128, 128},  {8, 32, 128, 256},    {32, 128, 258, 1024}, {32, 258, 258, 4096},
};
enum { FIRST_LAZY_LEVEL = 4 };

static const uint8_t LENGTH_BITS[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
static const uint8_t DISTANCE_BITS[N_DISTANCES] = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                                   6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};
static const uint8_t ORDER_OF_LENGTHS[N_LENGTHS] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};

/* A tree of codes. A node of `up` is first the number of its parent, then its depth, as a leaf's is its code's length. */
typedef struct {
    uint16_t count[N_NODES], up[N_NODES], code[N_LITERALS + 2];
    int n_symbols, most_bits, last; /* the last symbol with a code */
} Tree;

typedef struct {
    const uint8_t *data;
    uint32_t n_bytes;
    Effort effort;
    uint32_t at, window_start, window_end, block_start;
    uint32_t heads[N_HASHES], before[WINDOW];
    uint32_t match_start;

    uint16_t distances[MOST_SYMBOLS + 1]; /* 0 for a literal */
    uint8_t literals[MOST_SYMBOLS + 1];   /* or the length of a match, less LEAST_MATCH */
    int n_symbols;
    Tree of_literals, of_distances, of_lengths;

    uint8_t length_codes[256], distance_codes[512];
    uint16_t first_lengths[29], first_distances[N_DISTANCES];
    uint16_t fixed_codes[N_LITERALS + 2];

    uint8_t *out;            /* NULL to compare with `expected` */
    const uint8_t *expected;
    size_t n_out, most_out;
    int differs;             /* or the result is longer than `most_out` */
    uint64_t bits;
    int n_bits;
} Stream;

/* --- output */

static void put_byte(Stream *stream, uint8_t byte) {
    if (stream->n_out >= stream->most_out || (stream->out == NULL && stream->expected[stream->n_out] != byte))
        stream->differs = 1;
    else {
        if (stream->out != NULL)
            stream->out[stream->n_out] = byte;
        stream->n_out++;
    }
}

static inline void put_bits(Stream *stream, uint32_t value, int n_bits) {
    stream->bits |= (uint64_t)value << stream->n_bits;
    stream->n_bits += n_bits;
    while (stream->n_bits >= 8) {
        put_byte(stream, (uint8_t)stream->bits);
        stream->bits >>= 8;
        stream->n_bits -= 8;
    }
}

static void end_byte(Stream *stream) {
    if (stream->n_bits > 0)
        put_bits(stream, 0, 8 - stream->n_bits);
}

/* --- codes */

static inline int distance_code(const Stream *stream, uint32_t distance) {
    uint32_t less = distance - 1;
    return stream->distance_codes[less < 256 ? less : 256 + (less >> 7)];
}

/* Give the symbols of a length the codes that RFC 1951 (3.2.2) defines, with the first bit lowest. */
static void number_codes(const uint16_t *lengths, int n_symbols, uint16_t *codes) {
    uint16_t n_of_length[MOST_BITS + 1] = {0}, next[MOST_BITS + 1] = {0};
    for (int symbol = 0; symbol < n_symbols; symbol++)
        n_of_length[lengths[symbol]]++;
    n_of_length[0] = 0;
    for (int bits = 1; bits <= MOST_BITS; bits++)
        next[bits] = (uint16_t)((next[bits - 1] + n_of_length[bits - 1]) << 1);
    for (int symbol = 0; symbol < n_symbols; symbol++) {
        int length = lengths[symbol];
        if (length == 0)
            continue;
        uint32_t code = next[length]++, turned = 0;
        for (int bit = 0; bit < length; bit++)
            turned |= ((code >> bit) & 1) << (length - 1 - bit);
        codes[symbol] = (uint16_t)turned;
    }
}

static uint16_t fixed_length(int symbol) { return symbol < 144 ? 8 : symbol < 256 ? 9 : symbol < 280 ? 7 : 8; }

static uint32_t turned_distance(int code) {
    uint32_t turned = 0;
    for (int bit = 0; bit < 5; bit++)
        turned |= (uint32_t)((code >> bit) & 1) << (4 - bit);
    return turned;
}

static void make_tables(Stream *stream) {
    uint16_t lengths[N_LITERALS + 2];
    int at = 0;
    for (int code = 0; code < 28; code++) {
        stream->first_lengths[code] = (uint16_t)at;
        for (int n = 0; n < 1 << LENGTH_BITS[code]; n++)
            stream->length_codes[at++] = (uint8_t)code;
    }
    stream->length_codes[255] = 28; /* the longest match has a code of its own */
    stream->first_lengths[28] = 255;
    at = 0;
    for (int code = 0; code < N_DISTANCES; code++) {
        stream->first_distances[code] = (uint16_t)at;
        for (int n = 0; n < 1 << DISTANCE_BITS[code]; n++, at++)
            if (at < 256)
                stream->distance_codes[at] = (uint8_t)code;
            else
                stream->distance_codes[256 + (at >> 7)] = (uint8_t)code;
    }
    for (int symbol = 0; symbol < N_LITERALS + 2; symbol++)
        lengths[symbol] = fixed_length(symbol);
    number_codes(lengths, N_LITERALS + 2, stream->fixed_codes);
}

/* --- trees */

typedef struct {
    Tree *tree;
    uint16_t nodes[N_NODES + 1]; /* a heap from 1 on; behind it, from the end, the nodes in the order of their removal */
    uint8_t depth[N_NODES];
    int size, sorted;
} Heap;

static int comes_first(const Heap *heap, int one, int other) {
    const uint16_t *count = heap->tree->count;
    return count[one] < count[other] || (count[one] == count[other] && heap->depth[one] <= heap->depth[other]);
}

static void sift(Heap *heap, int place) {
    uint16_t node = heap->nodes[place];
    for (int child = 2 * place; child <= heap->size; child *= 2) {
        if (child < heap->size && comes_first(heap, heap->nodes[child + 1], heap->nodes[child]))
            child++;
        if (comes_first(heap, node, heap->nodes[child]))
            break;
        heap->nodes[place] = heap->nodes[child];
        place = child;
    }
    heap->nodes[place] = node;
}

/* Turn the parents of the nodes into depths; no code is longer than `most_bits`. */
static void measure_codes(Heap *heap) {
    Tree *tree = heap->tree;
    uint16_t n_of_length[MOST_BITS + 1] = {0};
    int place = heap->sorted, n_too_long = 0;
    tree->up[heap->nodes[place]] = 0;
    for (place++; place < N_NODES; place++) {
        int node = heap->nodes[place], bits = tree->up[tree->up[node]] + 1;
        if (bits > tree->most_bits) {
            bits = tree->most_bits;
            n_too_long++;
        }
        tree->up[node] = (uint16_t)bits;
        if (node <= tree->last)
            n_of_length[bits]++;
    }
    if (n_too_long == 0)
        return;
    for (; n_too_long > 0; n_too_long -= 2) {
        int bits = tree->most_bits - 1;
        while (n_of_length[bits] == 0)
            bits--;
        n_of_length[bits]--;
        n_of_length[bits + 1] += 2;
        n_of_length[tree->most_bits]--;
    }
    for (int bits = tree->most_bits; bits > 0; bits--)
        for (int n = n_of_length[bits]; n > 0;) {
            int node = heap->nodes[--place];
            if (node > tree->last)
                continue;
            tree->up[node] = (uint16_t)bits;
            n--;
        }
}

/* Compute the lengths and the codes of a tree's symbols from their counts. */
static void build(Tree *tree) {
    Heap heap = {.tree = tree, .size = 0, .sorted = N_NODES};
    tree->last = -1;
    for (int symbol = 0; symbol < tree->n_symbols; symbol++) {
        tree->up[symbol] = 0;
        if (tree->count[symbol] != 0) {
            heap.nodes[++heap.size] = (uint16_t)symbol;
            tree->last = symbol;
        }
    }
    while (heap.size < 2) { /* a tree has two codes at least */
        int symbol = tree->last < 2 ? ++tree->last : 0;
        heap.nodes[++heap.size] = (uint16_t)symbol;
        tree->count[symbol] = 1;
    }
    for (int place = heap.size / 2; place > 0; place--)
        sift(&heap, place);
    int node = tree->n_symbols;
    do {
        int one = heap.nodes[1];
        heap.nodes[1] = heap.nodes[heap.size--];
        sift(&heap, 1);
        int other = heap.nodes[1];
        heap.nodes[--heap.sorted] = (uint16_t)one;
        heap.nodes[--heap.sorted] = (uint16_t)other;
        tree->count[node] = (uint16_t)(tree->count[one] + tree->count[other]);
        heap.depth[node] = (uint8_t)((heap.depth[one] > heap.depth[other] ? heap.depth[one] : heap.depth[other]) + 1);
        tree->up[one] = tree->up[other] = (uint16_t)node;
        heap.nodes[1] = (uint16_t)node++;
        sift(&heap, 1);
    } while (heap.size >= 2);
    heap.nodes[--heap.sorted] = heap.nodes[1];
    measure_codes(&heap);
    number_codes(tree->up, tree->last + 1, tree->code);
}

/* Walk over the lengths of a tree's codes in runs: count the symbols of the runs, or write them. */
static void walk_lengths(Stream *stream, const Tree *tree, int writes) {
    Tree *lengths = &stream->of_lengths;
    int before = -1, next = tree->up[0], n = 0, most = next == 0 ? 138 : 7, least = next == 0 ? 3 : 4;
    for (int symbol = 0; symbol <= tree->last; symbol++) {
        int length = next;
        next = symbol < tree->last ? tree->up[symbol + 1] : -1;
        if (++n < most && length == next)
            continue;
        int written[2] = {-1, -1}, n_extra = 0, extra = 0, n_single = 0;
        if (n < least)
            n_single = n;
        else if (length != 0) {
            n_single = length != before;
            written[1] = REPEAT, n_extra = 2, extra = n - n_single - 3;
        } else if (n <= 10)
            written[1] = ZEROS, n_extra = 3, extra = n - 3;
        else
            written[1] = MANY_ZEROS, n_extra = 7, extra = n - 11;
        if (!writes) {
            lengths->count[length] = (uint16_t)(lengths->count[length] + n_single);
            if (written[1] >= 0)
                lengths->count[written[1]]++;
        } else {
            for (int nth = 0; nth < n_single; nth++)
                put_bits(stream, lengths->code[length], lengths->up[length]);
            if (written[1] >= 0) {
                put_bits(stream, lengths->code[written[1]], lengths->up[written[1]]);
                put_bits(stream, (uint32_t)extra, n_extra);
            }
        }
        n = 0;
        before = length;
        most = next == 0 ? 138 : length == next ? 6 : 7;
        least = next == 0 || length == next ? 3 : 4;
    }
}

/* --- blocks */

static void begin_block(Stream *stream) {
    memset(stream->of_literals.count, 0, sizeof stream->of_literals.count);
    memset(stream->of_distances.count, 0, sizeof stream->of_distances.count);
    memset(stream->of_lengths.count, 0, sizeof stream->of_lengths.count);
    stream->of_literals.count[END_OF_BLOCK] = 1;
    stream->n_symbols = 0;
}

static void put_symbols(Stream *stream, int is_fixed) {
    const Tree *literals = &stream->of_literals, *distances = &stream->of_distances;
#define PUT_LITERAL(SYMBOL)                                                                                            \
    put_bits(stream, is_fixed ? stream->fixed_codes[SYMBOL] : literals->code[SYMBOL],                                  \
             is_fixed ? fixed_length(SYMBOL) : literals->up[SYMBOL])
    for (int nth = 0; nth < stream->n_symbols; nth++) {
        uint32_t distance = stream->distances[nth], literal = stream->literals[nth];
        if (distance == 0) {
            PUT_LITERAL(literal);
            continue;
        }
        int code = stream->length_codes[literal];
        PUT_LITERAL(END_OF_BLOCK + 1 + code);
        put_bits(stream, literal - stream->first_lengths[code], LENGTH_BITS[code]);
        code = distance_code(stream, distance);
        put_bits(stream, is_fixed ? turned_distance(code) : distances->code[code], is_fixed ? 5 : distances->up[code]);
        put_bits(stream, distance - 1 - stream->first_distances[code], DISTANCE_BITS[code]);
    }
    PUT_LITERAL(END_OF_BLOCK);
#undef PUT_LITERAL
}

/* Write the symbols since the last block, in the shortest of three ways. */
static void end_block(Stream *stream, int is_last) {
    Tree *literals = &stream->of_literals, *distances = &stream->of_distances, *lengths = &stream->of_lengths;
    uint16_t n_of_literal[N_LITERALS], n_of_distance[N_DISTANCES];
    memcpy(n_of_literal, literals->count, sizeof n_of_literal);
    memcpy(n_of_distance, distances->count, sizeof n_of_distance);
    build(literals);
    build(distances);
    walk_lengths(stream, literals, 0);
    walk_lengths(stream, distances, 0);
    uint16_t n_of_length[N_LENGTHS];
    memcpy(n_of_length, lengths->count, sizeof n_of_length);
    build(lengths);
    int n_lengths = N_LENGTHS;
    while (n_lengths > 4 && lengths->up[ORDER_OF_LENGTHS[n_lengths - 1]] == 0)
        n_lengths--;

    uint64_t fixed = 0, own = 3 * (uint64_t)n_lengths + 5 + 5 + 4;
    for (int symbol = 0; symbol < N_LITERALS; symbol++) {
        uint64_t extra = symbol > END_OF_BLOCK ? LENGTH_BITS[symbol - END_OF_BLOCK - 1] : 0;
        fixed += n_of_literal[symbol] * (fixed_length(symbol) + extra);
        own += n_of_literal[symbol] * (literals->up[symbol] + extra);
    }
    for (int code = 0; code < N_DISTANCES; code++) {
        fixed += n_of_distance[code] * (5 + (uint64_t)DISTANCE_BITS[code]);
        own += n_of_distance[code] * ((uint64_t)distances->up[code] + DISTANCE_BITS[code]);
    }
    for (int length = 0; length < N_LENGTHS; length++)
        own += n_of_length[length] * ((uint64_t)lengths->up[length] + (length == REPEAT ? 2 : length == ZEROS ? 3 : length == MANY_ZEROS ? 7 : 0));
    uint64_t fixed_bytes = (fixed + 3 + 7) >> 3, own_bytes = (own + 3 + 7) >> 3;
    uint64_t least = fixed_bytes <= own_bytes ? fixed_bytes : own_bytes, n_raw = stream->at - stream->block_start;

    /* zlib has lost the first bytes of a block that began before its window. */
    if (n_raw + 4 <= least && stream->block_start >= stream->window_start) {
        put_bits(stream, (uint32_t)is_last, 3);
        end_byte(stream);
        put_bits(stream, (uint32_t)n_raw, 16);
        put_bits(stream, (uint32_t)n_raw ^ 0xffff, 16);
        for (uint64_t nth = 0; nth < n_raw; nth++)
            put_byte(stream, stream->data[stream->block_start + nth]);
    } else if (fixed_bytes == least) {
        put_bits(stream, (1 << 1) + (uint32_t)is_last, 3);
        put_symbols(stream, 1);
    } else {
        put_bits(stream, (2 << 1) + (uint32_t)is_last, 3);
        put_bits(stream, (uint32_t)(literals->last + 1 - 257), 5);
        put_bits(stream, (uint32_t)distances->last, 5);
        put_bits(stream, (uint32_t)(n_lengths - 4), 4);
        for (int nth = 0; nth < n_lengths; nth++)
            put_bits(stream, lengths->up[ORDER_OF_LENGTHS[nth]], 3);
        walk_lengths(stream, literals, 1);
        walk_lengths(stream, distances, 1);
        put_symbols(stream, 0);
    }
    if (is_last)
        end_byte(stream);
    stream->block_start = stream->at;
    begin_block(stream);
}

/* Tell whether the block is full. A symbol may take thousands of looks, so look for signals between some. */
static inline int is_full_block(Stream *stream) {
    if (stream->n_symbols % SYMBOLS_BETWEEN_LOOKS == 0)
        stream->differs |= tc_stops();
    return stream->n_symbols == MOST_SYMBOLS;
}

/* Note a symbol; return whether the block is full. */
static inline int note_literal(Stream *stream, uint8_t byte) {
    stream->distances[stream->n_symbols] = 0;
    stream->literals[stream->n_symbols++] = byte;
    stream->of_literals.count[byte]++;
    return is_full_block(stream);
}

static inline int note_match(Stream *stream, uint32_t distance, uint32_t length) {
    stream->distances[stream->n_symbols] = (uint16_t)distance;
    stream->literals[stream->n_symbols++] = (uint8_t)(length - LEAST_MATCH);
    stream->of_literals.count[END_OF_BLOCK + 1 + stream->length_codes[length - LEAST_MATCH]]++;
    stream->of_distances.count[distance_code(stream, distance)]++;
    return is_full_block(stream);
}

/* --- matches */

/* Move the window as zlib does, before each search for a match. */
static inline void fill_window(Stream *stream) {
    if (stream->window_end - stream->at >= LEAST_AHEAD)
        return;
    if (stream->at - stream->window_start >= WINDOW + MOST_DISTANCE)
        stream->window_start += WINDOW;
    uint64_t end = (uint64_t)stream->window_start + 2 * WINDOW;
    stream->window_end = end < stream->n_bytes ? (uint32_t)end : stream->n_bytes;
}

/* Enter a position with at least three bytes into the table; return the position before it with their hash. */
static inline uint32_t enter(Stream *stream, uint32_t at) {
    const uint8_t *bytes = stream->data + at;
    uint32_t hash = ((uint32_t)bytes[0] << 10 ^ (uint32_t)bytes[1] << 5 ^ bytes[2]) & (N_HASHES - 1);
    uint32_t found = stream->heads[hash];
    stream->before[at & (WINDOW - 1)] = found;
    stream->heads[hash] = at;
    return found;
}

static inline uint32_t matching_bytes(const uint8_t *one, const uint8_t *other, uint32_t most) {
    uint32_t n = 0;
    while (n + 8 <= most && memcmp(one + n, other + n, 8) == 0)
        n += 8;
    while (n < most && one[n] == other[n])
        n++;
    return n;
}

/* Return the length of the longest match, or `best` if none is longer; note its start. */
static uint32_t find_match(Stream *stream, uint32_t found, uint32_t best) {
    uint32_t at = stream->at, ahead = stream->n_bytes - at, most = ahead < MOST_MATCH ? ahead : MOST_MATCH;
    uint32_t n_tries = stream->effort.chain, nice = stream->effort.nice < ahead ? stream->effort.nice : ahead;
    uint32_t limit = stream->window_start;
    const uint8_t *bytes = stream->data + at;
    if (at - stream->window_start > MOST_DISTANCE)
        limit = at - MOST_DISTANCE;
    if (best >= stream->effort.good)
        n_tries >>= 2;
    /* The match before is as long as the rest of the data: it stays. */
    if (best >= most)
        return most;
    do {
        const uint8_t *earlier = stream->data + found;
        if (earlier[best] == bytes[best] && earlier[best - 1] == bytes[best - 1] && earlier[0] == bytes[0] &&
            earlier[1] == bytes[1]) {
            uint32_t length = matching_bytes(bytes, earlier, most);
            if (length > best) {
                stream->match_start = found;
                best = length;
                if (length >= nice || length == most)
                    break;
            }
        }
    } while ((found = stream->before[found & (WINDOW - 1)]) > limit && --n_tries != 0);
    return best;
}

/* Levels 1 to 3: take each match. */
static void deflate_greedily(Stream *stream) {
    uint32_t n_bytes = stream->n_bytes;
    while (fill_window(stream), stream->at < n_bytes && !stream->differs) {
        uint32_t at = stream->at, length = 0, found = 0;
        if (n_bytes - at >= LEAST_MATCH)
            found = enter(stream, at);
        if (found > stream->window_start && at - found <= MOST_DISTANCE)
            length = find_match(stream, found, LEAST_MATCH - 1);
        int is_full;
        if (length >= LEAST_MATCH) {
            is_full = note_match(stream, at - stream->match_start, length);
            if (length <= stream->effort.lazy && n_bytes - at - length >= LEAST_MATCH)
                for (uint32_t nth = 1; nth < length; nth++)
                    enter(stream, at + nth);
            stream->at += length;
        } else {
            is_full = note_literal(stream, stream->data[at]);
            stream->at++;
        }
        if (is_full)
            end_block(stream, 0);
    }
}

/* Levels 4 to 9: take a match unless the next byte begins a longer one. */
static void deflate_lazily(Stream *stream) {
    uint32_t n_bytes = stream->n_bytes, length = LEAST_MATCH - 1;
    int has_literal = 0;
    while (fill_window(stream), stream->at < n_bytes && !stream->differs) {
        uint32_t at = stream->at, found = 0, length_before = length, start_before = stream->match_start;
        if (n_bytes - at >= LEAST_MATCH)
            found = enter(stream, at);
        length = LEAST_MATCH - 1;
        if (found > stream->window_start && length_before < stream->effort.lazy && at - found <= MOST_DISTANCE) {
            length = find_match(stream, found, length_before);
            if (length == LEAST_MATCH && at - stream->match_start > TOO_FAR)
                length = LEAST_MATCH - 1;
        }
        if (length_before >= LEAST_MATCH && length <= length_before) {
            int is_full = note_match(stream, at - 1 - start_before, length_before);
            for (uint32_t nth = at + 1; nth < at - 1 + length_before; nth++)
                if (n_bytes - nth >= LEAST_MATCH)
                    enter(stream, nth);
            stream->at = at - 1 + length_before;
            has_literal = 0;
            length = LEAST_MATCH - 1;
            if (is_full)
                end_block(stream, 0);
        } else {
            if (has_literal && note_literal(stream, stream->data[at - 1]))
                end_block(stream, 0);
            has_literal = 1;
            stream->at++;
        }
    }
    if (has_literal && !stream->differs)
        note_literal(stream, stream->data[n_bytes - 1]);
}

static void deflate_all(Stream *stream, int level) {
    stream->effort = EFFORTS[level];
    stream->of_literals.n_symbols = N_LITERALS, stream->of_literals.most_bits = MOST_BITS;
    stream->of_distances.n_symbols = N_DISTANCES, stream->of_distances.most_bits = MOST_BITS;
    stream->of_lengths.n_symbols = N_LENGTHS, stream->of_lengths.most_bits = 7;
    make_tables(stream);
    begin_block(stream);
    if (level < FIRST_LAZY_LEVEL)
        deflate_greedily(stream);
    else
        deflate_lazily(stream);
    if (!stream->differs)
        end_block(stream, 1);
}

/* --- functions for Python */

/* Run on checked buffers; return the size of the result, or -1 if it is another one, or if there is no memory. */
static PyObject *run(Py_buffer *data, int level, uint8_t *out, const uint8_t *expected, Py_ssize_t most_out) {
    if (level < 1 || level > 9 || data->len > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a level is 1 to 9, and data are shorter than 2 GiB");
        return NULL;
    }
    Stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        return PyErr_NoMemory();
    TcWatch watch;
    tc_leave(&watch);
    stream->data = data->buf;
    stream->n_bytes = (uint32_t)data->len;
    stream->out = out;
    stream->expected = expected;
    stream->most_out = (size_t)most_out;
    deflate_all(stream, level);
    long long n_out = stream->differs ? -1 : (long long)stream->n_out;
    free(stream);
    if (!tc_come_back(&watch))
        return NULL;
    return PyLong_FromLongLong(n_out);
}

static PyObject *deflate(PyObject *module, PyObject *args) {
    Py_buffer data, out;
    int level;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*iw*:deflate", &data, &level, &out))
        return NULL;
    PyObject *result = run(&data, level, out.buf, NULL, out.len);
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

static PyObject *deflates_to(PyObject *module, PyObject *args) {
    Py_buffer data, expected;
    int level;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*iy*:deflates_to", &data, &level, &expected))
        return NULL;
    PyObject *result = run(&data, level, NULL, expected.buf, expected.len);
    PyBuffer_Release(&data);
    if (result != NULL) {
        PyObject *is_equal = PyBool_FromLong(PyLong_AsLongLong(result) == expected.len);
        Py_DECREF(result);
        result = is_equal;
    }
    PyBuffer_Release(&expected);
    return result;
}

PyMethodDef tc_deflate_methods[] = {
    {"deflate", deflate, METH_VARARGS, NULL},
    {"deflates_to", deflates_to, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
