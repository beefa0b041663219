/* The compression function of BLAKE3 for one instruction set; `blake3.c` includes this file once for each.
 *
 * Before: LANES (4, 8 or 16), NAME(function), TARGET (attributes of functions), BYTE_ROTATE (1: a shuffle of bytes rotates
 * words faster than shifts do). `Row` is a vector of four words, `Lanes` one of LANES words. */

#define Lanes NAME(Lanes)
typedef uint32_t Lanes __attribute__((vector_size(4 * LANES)));
#define Bytes NAME(Bytes)
typedef uint8_t Bytes __attribute__((vector_size(4 * LANES)));

#define ROTATED(x, n) (((x) >> (n)) | ((x) << (32 - (n))))
#if BYTE_ROTATE
#define ROTATED_ROW_16(x)                                                                                              \
    ((Row)__builtin_shufflevector((RowBytes)(x), (RowBytes)(x), 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13))
#define ROTATED_ROW_8(x)                                                                                               \
    ((Row)__builtin_shufflevector((RowBytes)(x), (RowBytes)(x), 1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8, 13, 14, 15, 12))
#if LANES == 8
#define ROTATED_16(x)                                                                                                  \
    ((Lanes)__builtin_shufflevector((Bytes)(x), (Bytes)(x), 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13, 18,  \
                                    19, 16, 17, 22, 23, 20, 21, 26, 27, 24, 25, 30, 31, 28, 29))
#define ROTATED_8(x)                                                                                                   \
    ((Lanes)__builtin_shufflevector((Bytes)(x), (Bytes)(x), 1, 2, 3, 0, 5, 6, 7, 4, 9, 10, 11, 8, 13, 14, 15, 12, 17,  \
                                    18, 19, 16, 21, 22, 23, 20, 25, 26, 27, 24, 29, 30, 31, 28))
#else
#define ROTATED_16(x) ROTATED_ROW_16(x)
#define ROTATED_8(x) ROTATED_ROW_8(x)
#endif
#else
#define ROTATED_ROW_16(x) ROTATED(x, 16)
#define ROTATED_ROW_8(x) ROTATED(x, 8)
#define ROTATED_16(x) ROTATED(x, 16)
#define ROTATED_8(x) ROTATED(x, 8)
#endif

/* Interleave words, or pairs of words, of the lower or upper halves of each 16 bytes. */
#if LANES == 4
#define LOW_WORDS(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define HIGH_WORDS(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#define LOW_PAIRS(a, b) __builtin_shufflevector(a, b, 0, 1, 4, 5)
#define HIGH_PAIRS(a, b) __builtin_shufflevector(a, b, 2, 3, 6, 7)
#elif LANES == 8
#define LOW_WORDS(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH_WORDS(a, b) __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW_PAIRS(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH_PAIRS(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#else
#define LOW_WORDS(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH_WORDS(a, b) __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW_PAIRS(a, b) __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH_PAIRS(a, b) __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#endif

/* Compress one block: the rows of the state are vectors, and a round is done on all columns, then on all diagonals. */
TARGET __attribute__((unused)) static void NAME(compress)(uint32_t chain[8], const uint8_t *block, uint32_t length, uint64_t counter,
                                  uint32_t flags) {
    Row first, second, a, b, c = {IV0, IV1, IV2, IV3};
    Row d = {(uint32_t)counter, (uint32_t)(counter >> 32), length, flags}, words[4];
    memcpy(&first, chain, sizeof first);
    memcpy(&second, chain + 4, sizeof second);
    memcpy(words, block, sizeof words);
    a = first;
    b = second;
    /* The words that the columns take first and second, and those that the diagonals take. */
    Row x = __builtin_shufflevector(words[0], words[1], 0, 2, 4, 6);
    Row y = __builtin_shufflevector(words[0], words[1], 1, 3, 5, 7);
    Row z = __builtin_shufflevector(words[2], words[3], 0, 2, 4, 6);
    Row w = __builtin_shufflevector(words[2], words[3], 1, 3, 5, 7);
#define MIX_ROWS(m, n)                                                                                                 \
    a += b + (m);                                                                                                      \
    d ^= a;                                                                                                            \
    d = ROTATED_ROW_16(d);                                                                                             \
    c += d;                                                                                                            \
    b ^= c;                                                                                                            \
    b = ROTATED(b, 12);                                                                                                \
    a += b + (n);                                                                                                      \
    d ^= a;                                                                                                            \
    d = ROTATED_ROW_8(d);                                                                                              \
    c += d;                                                                                                            \
    b ^= c;                                                                                                            \
    b = ROTATED(b, 7);
    for (int round = 0;; round++) {
        MIX_ROWS(x, y)
        b = __builtin_shufflevector(b, b, 1, 2, 3, 0);
        c = __builtin_shufflevector(c, c, 2, 3, 0, 1);
        d = __builtin_shufflevector(d, d, 3, 0, 1, 2);
        MIX_ROWS(z, w)
        b = __builtin_shufflevector(b, b, 3, 0, 1, 2);
        c = __builtin_shufflevector(c, c, 2, 3, 0, 1);
        d = __builtin_shufflevector(d, d, 1, 2, 3, 0);
        if (round == 6)
            break;
        /* The permutation of the words between two rounds; x, y, z and w hold words 0 2 4 6, 1 3 5 7, 8 10 12 14 and
         * 9 11 13 15 before and after it. */
        Row next_x = __builtin_shufflevector(x, y, 1, 5, 7, 2);
        Row of_x_and_z = __builtin_shufflevector(x, z, 3, 5, 0, 0);
        Row next_y = __builtin_shufflevector(of_x_and_z, w, 0, 1, 2, 6);
        Row of_y_and_z = __builtin_shufflevector(y, z, 0, 6, 0, 0);
        Row next_z = __builtin_shufflevector(of_y_and_z, w, 0, 1, 4, 7);
        Row of_w_and_y = __builtin_shufflevector(w, y, 1, 6, 1, 6);
        Row next_w = __builtin_shufflevector(of_w_and_y, z, 0, 1, 7, 4);
        x = next_x;
        y = next_y;
        z = next_z;
        w = next_w;
    }
#undef MIX_ROWS
    first = a ^ c;
    second = b ^ d;
    memcpy(chain, &first, sizeof first);
    memcpy(chain + 4, &second, sizeof second);
}

/* Read 16 bytes of each lane and transpose them: four vectors, of the same word of each lane. */
TARGET static inline __attribute__((always_inline)) void NAME(load_words)(const uint8_t *const *lanes, size_t at,
                                                                          Lanes *words) {
    Lanes rows[4];
    for (int row = 0; row < 4; row++) {
#define PIECE(NUMBER) (*(const UnalignedRow *)(lanes[row + 4 * (NUMBER)] + at))
#if LANES == 4
        rows[row] = PIECE(0);
#elif LANES == 8
        rows[row] = __builtin_shufflevector(PIECE(0), PIECE(1), 0, 1, 2, 3, 4, 5, 6, 7);
#else
        Half low = __builtin_shufflevector(PIECE(0), PIECE(1), 0, 1, 2, 3, 4, 5, 6, 7);
        Half high = __builtin_shufflevector(PIECE(2), PIECE(3), 0, 1, 2, 3, 4, 5, 6, 7);
        rows[row] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#endif
#undef PIECE
    }
    Lanes low01 = LOW_WORDS(rows[0], rows[1]), high01 = HIGH_WORDS(rows[0], rows[1]);
    Lanes low23 = LOW_WORDS(rows[2], rows[3]), high23 = HIGH_WORDS(rows[2], rows[3]);
    words[0] = LOW_PAIRS(low01, low23);
    words[1] = HIGH_PAIRS(low01, low23);
    words[2] = LOW_PAIRS(high01, high23);
    words[3] = HIGH_PAIRS(high01, high23);
}

/* The other way: write four words of each lane. */
TARGET static inline __attribute__((always_inline)) void NAME(store_words)(const Lanes *words, uint8_t *const *lanes,
                                                                           size_t at) {
    Lanes low01 = LOW_WORDS(words[0], words[1]), high01 = HIGH_WORDS(words[0], words[1]);
    Lanes low23 = LOW_WORDS(words[2], words[3]), high23 = HIGH_WORDS(words[2], words[3]);
    Lanes rows[4] = {LOW_PAIRS(low01, low23), HIGH_PAIRS(low01, low23), LOW_PAIRS(high01, high23),
                     HIGH_PAIRS(high01, high23)};
    for (int row = 0; row < 4; row++)
        for (int piece = 0; piece < LANES / 4; piece++)
            memcpy(lanes[row + 4 * piece] + at, (const uint8_t *)&rows[row] + 16 * piece, 16);
}

/* Hash LANES messages of equally many blocks: chunks, or the two digests below a parent. */
TARGET static void NAME(hash_lanes)(const LaneJobs *jobs) {
    Lanes chain[8] = {IV0 - (Lanes){0}, IV1 - (Lanes){0}, IV2 - (Lanes){0}, IV3 - (Lanes){0},
                      IV4 - (Lanes){0}, IV5 - (Lanes){0}, IV6 - (Lanes){0}, IV7 - (Lanes){0}};
    Lanes counter_low, counter_high, last_lengths, last_flags;
    memcpy(&counter_low, jobs->counter_low, sizeof counter_low);
    memcpy(&counter_high, jobs->counter_high, sizeof counter_high);
    memcpy(&last_lengths, jobs->last_lengths, sizeof last_lengths);
    memcpy(&last_flags, jobs->last_flags, sizeof last_flags);
    for (size_t block = 0; block < jobs->n_blocks; block++) {
        int is_last = block + 1 == jobs->n_blocks;
        const uint8_t *const *from = is_last ? jobs->last_blocks : jobs->inputs;
        size_t at = is_last ? 0 : 64 * block;
        Lanes m[16], v[16];
        for (int quarter = 0; quarter < 4; quarter++)
            NAME(load_words)(from, at + 16 * (size_t)quarter, m + 4 * quarter);
        for (int word = 0; word < 8; word++)
            v[word] = chain[word];
        v[8] = IV0 - (Lanes){0};
        v[9] = IV1 - (Lanes){0};
        v[10] = IV2 - (Lanes){0};
        v[11] = IV3 - (Lanes){0};
        v[12] = counter_low;
        v[13] = counter_high;
        v[14] = is_last ? last_lengths : 64 - (Lanes){0};
        v[15] = (is_last ? last_flags : (Lanes){0}) | (block == 0 ? jobs->first_flags : 0);
#define EACH(STEP, a0, b0, a1, b1, a2, b2, a3, b3)                                                                     \
    STEP(v[a0], v[b0]) STEP(v[a1], v[b1]) STEP(v[a2], v[b2]) STEP(v[a3], v[b3])
#define ADD(a, b) a += b;
#define XOR_16(d, a) d = ROTATED_16(d ^ a);
#define XOR_12(b, c) b ^= c, b = ROTATED(b, 12);
#define XOR_8(d, a) d = ROTATED_8(d ^ a);
#define XOR_7(b, c) b ^= c, b = ROTATED(b, 7);
#define MIX(a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3, m0, n0, m1, n1, m2, n2, m3, n3)             \
    v[a0] += m[m0], v[a1] += m[m1], v[a2] += m[m2], v[a3] += m[m3];                                                    \
    EACH(ADD, a0, b0, a1, b1, a2, b2, a3, b3)                                                                          \
    EACH(XOR_16, d0, a0, d1, a1, d2, a2, d3, a3)                                                                       \
    EACH(ADD, c0, d0, c1, d1, c2, d2, c3, d3)                                                                          \
    EACH(XOR_12, b0, c0, b1, c1, b2, c2, b3, c3)                                                                       \
    v[a0] += m[n0], v[a1] += m[n1], v[a2] += m[n2], v[a3] += m[n3];                                                    \
    EACH(ADD, a0, b0, a1, b1, a2, b2, a3, b3)                                                                          \
    EACH(XOR_8, d0, a0, d1, a1, d2, a2, d3, a3)                                                                        \
    EACH(ADD, c0, d0, c1, d1, c2, d2, c3, d3)                                                                          \
    EACH(XOR_7, b0, c0, b1, c1, b2, c2, b3, c3)
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)                                     \
    MIX(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, s0, s1, s2, s3, s4, s5, s6, s7)                          \
    MIX(0, 5, 10, 15, 1, 6, 11, 12, 2, 7, 8, 13, 3, 4, 9, 14, s8, s9, s10, s11, s12, s13, s14, s15)
        ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
        ROUND(2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
        ROUND(3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1)
        ROUND(10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6)
        ROUND(12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4)
        ROUND(9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7)
        ROUND(11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13)
#undef ROUND
#undef MIX
#undef XOR_7
#undef XOR_8
#undef XOR_12
#undef XOR_16
#undef ADD
#undef EACH
        for (int word = 0; word < 8; word++)
            chain[word] = v[word] ^ v[word + 8];
    }
    NAME(store_words)(chain, jobs->outputs, 0);
    NAME(store_words)(chain + 4, jobs->outputs, 16);
}

#undef LOW_WORDS
#undef HIGH_WORDS
#undef LOW_PAIRS
#undef HIGH_PAIRS
#undef ROTATED
#undef ROTATED_16
#undef ROTATED_8
#undef ROTATED_ROW_16
#undef ROTATED_ROW_8
#undef Lanes
#undef Bytes
#undef LANES
#undef NAME
#undef TARGET
#undef BYTE_ROTATE
