/* BLAKE3 from its specification (blake3.h): the tree of a message in plain C, its compression function in vectors.
 *
 * A message is cut into chunks of 1 KiB. Chunks are hashed side by side, one in each lane of a vector, and so are the parents
 * of each level of the tree. Several small messages fill the lanes together. What does not fill the lanes, such as a message of
 * one block, is hashed alone, with the rows of the state as vectors. */
#include "blake3.h"

#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the words of a block are read as they lie in memory, little-endian"
#endif

enum { CHUNK = 1024, BLOCK = 64, MOST_LANES = 16, MOST_CHUNKS = TC_SUBTREE / CHUNK, MOST_SMALL = 32 * CHUNK };
enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

#define IV0 0x6A09E667u
#define IV1 0xBB67AE85u
#define IV2 0x3C6EF372u
#define IV3 0xA54FF53Au
#define IV4 0x510E527Fu
#define IV5 0x9B05688Cu
#define IV6 0x1F83D9ABu
#define IV7 0x5BE0CD19u

/* One input for each lane; all have equally many blocks. */
typedef struct {
    size_t n_blocks;
    uint32_t first_flags;                   /* of the first block */
    const uint8_t *inputs[MOST_LANES];      /* all blocks but the last */
    const uint8_t *last_blocks[MOST_LANES]; /* filled up with zeros */
    uint32_t last_lengths[MOST_LANES];
    uint32_t last_flags[MOST_LANES];
    uint32_t counter_low[MOST_LANES];
    uint32_t counter_high[MOST_LANES];
    uint8_t *outputs[MOST_LANES];
} LaneJobs;

typedef void (*Compress)(uint32_t chain[8], const uint8_t *block, uint32_t length, uint64_t counter, uint32_t flags);

typedef struct {
    size_t n_lanes;
    void (*hash)(const LaneJobs *jobs);
} Vector;

typedef struct {
    const char *name;
    Compress compress;
    Vector vectors[4]; /* from the widest on; the last one has no lanes */
} Kernel;

static inline uint32_t rotated(uint32_t word, int n) { return word >> n | word << (32 - n); }

static void compress_plain(uint32_t chain[8], const uint8_t *block, uint32_t length, uint64_t counter, uint32_t flags) {
    static const uint8_t PERMUTED[16] = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};
    uint32_t m[16], next[16];
    uint32_t v[16] = {chain[0], chain[1], chain[2], chain[3], chain[4], chain[5], chain[6], chain[7],
                      IV0, IV1, IV2, IV3, (uint32_t)counter, (uint32_t)(counter >> 32), length, flags};
    memcpy(m, block, sizeof m);
#define MIX(a, b, c, d, x, y)                                                                                          \
    v[a] += v[b] + m[x], v[d] = rotated(v[d] ^ v[a], 16), v[c] += v[d], v[b] = rotated(v[b] ^ v[c], 12);               \
    v[a] += v[b] + m[y], v[d] = rotated(v[d] ^ v[a], 8), v[c] += v[d], v[b] = rotated(v[b] ^ v[c], 7);
    for (int round = 0; round < 7; round++) {
        MIX(0, 4, 8, 12, 0, 1)
        MIX(1, 5, 9, 13, 2, 3)
        MIX(2, 6, 10, 14, 4, 5)
        MIX(3, 7, 11, 15, 6, 7)
        MIX(0, 5, 10, 15, 8, 9)
        MIX(1, 6, 11, 12, 10, 11)
        MIX(2, 7, 8, 13, 12, 13)
        MIX(3, 4, 9, 14, 14, 15)
        for (int word = 0; word < 16; word++)
            next[word] = m[PERMUTED[word]];
        memcpy(m, next, sizeof m);
    }
#undef MIX
    for (int word = 0; word < 8; word++)
        chain[word] = v[word] ^ v[word + 8];
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_VECTORS 1
#endif
#endif

#if HAS_VECTORS
typedef uint32_t Row __attribute__((vector_size(16)));
typedef uint32_t UnalignedRow __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t RowBytes __attribute__((vector_size(16)));

#define LANES 4
#define NAME(FUNCTION) FUNCTION##_of_4
#define TARGET
#define BYTE_ROTATE 0
#include "blake3_lanes.h"

#if defined(__x86_64__)
typedef uint32_t Half __attribute__((vector_size(32)));
#define HAS_X86 1

#define LANES 8
#define NAME(FUNCTION) FUNCTION##_of_8
#define TARGET __attribute__((target("avx2")))
#define BYTE_ROTATE 1
#include "blake3_lanes.h"

/* The narrower vectors of AVX-512 rotate words and have 32 registers too. */
#define AVX512 __attribute__((target("avx512f,avx512vl")))
#define LANES 16
#define NAME(FUNCTION) FUNCTION##_of_16
#define TARGET AVX512
#define BYTE_ROTATE 0
#include "blake3_lanes.h"

#define LANES 8
#define NAME(FUNCTION) FUNCTION##_of_8_with_avx512
#define TARGET AVX512
#define BYTE_ROTATE 0
#include "blake3_lanes.h"

#define LANES 4
#define NAME(FUNCTION) FUNCTION##_of_4_with_avx512
#define TARGET AVX512
#define BYTE_ROTATE 0
#include "blake3_lanes.h"
#endif
#endif

static const Kernel KERNELS[] = {
#if HAS_X86
    {"avx512", compress_of_4_with_avx512,
     {{16, hash_lanes_of_16}, {8, hash_lanes_of_8_with_avx512}, {4, hash_lanes_of_4_with_avx512}, {0, NULL}}},
    {"avx2", compress_of_8, {{8, hash_lanes_of_8}, {0, NULL}}},
#endif
#if HAS_VECTORS
    {"vectors", compress_of_4, {{4, hash_lanes_of_4}, {0, NULL}}},
#endif
    {"plain", compress_plain, {{0, NULL}}},
};
enum { N_KERNELS = sizeof KERNELS / sizeof *KERNELS };

static const Kernel *in_use = &KERNELS[N_KERNELS - 1];

static int runs_here(const Kernel *kernel) {
#if HAS_X86
    __builtin_cpu_init();
    if (kernel->vectors[0].n_lanes == 16)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl");
    if (kernel->vectors[0].n_lanes == 8)
        return __builtin_cpu_supports("avx2") != 0;
#endif
    (void)kernel;
    return 1;
}

/* Before any other code runs, so that no thread reads `in_use` while it is written. */
__attribute__((constructor)) static void choose(void) {
    for (const Kernel *kernel = KERNELS + N_KERNELS - 1; kernel >= KERNELS; kernel--)
        if (runs_here(kernel))
            in_use = kernel;
}

const char *const *tc_blake3_names(void) {
    static const char *names[N_KERNELS + 2];
    size_t n_names = 0;
    names[n_names++] = in_use->name;
    for (const Kernel *kernel = KERNELS; kernel < KERNELS + N_KERNELS; kernel++)
        if (kernel != in_use && runs_here(kernel))
            names[n_names++] = kernel->name;
    names[n_names] = NULL;
    return names;
}

int tc_blake3_use(const char *name) {
    for (const Kernel *kernel = KERNELS; kernel < KERNELS + N_KERNELS; kernel++)
        if (strcmp(kernel->name, name) == 0 && runs_here(kernel)) {
            in_use = kernel;
            return 1;
        }
    return 0;
}

/* A chunk, or the two digests below a parent. */
typedef struct {
    const uint8_t *data;
    uint32_t n_bytes;
    uint32_t flags; /* of the last block */
    uint64_t counter;
    uint8_t *out;
} Job;

static inline size_t blocks_of(const Job *job) { return job->n_bytes <= BLOCK ? 1 : (job->n_bytes + BLOCK - 1) / BLOCK; }

static void hash_alone(const Job *job, uint32_t first_flags) {
    uint32_t chain[8] = {IV0, IV1, IV2, IV3, IV4, IV5, IV6, IV7};
    const Kernel *kernel = in_use;
    const uint8_t *data = job->data;
    uint32_t rest = job->n_bytes, flags = first_flags;
    uint8_t padded[BLOCK];
    for (; rest > BLOCK; rest -= BLOCK, data += BLOCK, flags = 0)
        kernel->compress(chain, data, BLOCK, job->counter, flags);
    if (rest < BLOCK) {
        memset(padded, 0, BLOCK);
        if (rest > 0)
            memcpy(padded, data, rest);
        data = padded;
    }
    kernel->compress(chain, data, rest, job->counter, flags | job->flags);
    memcpy(job->out, chain, TC_DIGEST);
}

/* Hash jobs of equally many blocks. */
static void hash_alike(const Job *jobs, size_t n_jobs, uint32_t first_flags) {
    const Vector *vector = in_use->vectors;
    while (n_jobs > 1 && vector->n_lanes > 0) {
        while (vector[1].n_lanes >= n_jobs)
            vector++;
        size_t n_lanes = vector->n_lanes;
        size_t here = n_jobs < n_lanes ? n_jobs : n_lanes;
        uint8_t padded[MOST_LANES][BLOCK], unused[TC_DIGEST];
        LaneJobs lanes = {.n_blocks = blocks_of(jobs), .first_flags = first_flags};
        for (size_t lane = 0; lane < n_lanes; lane++) {
            const Job *job = jobs + (lane < here ? lane : 0); /* lanes without a job repeat the first one */
            uint32_t before = (uint32_t)(lanes.n_blocks - 1) * BLOCK, last = job->n_bytes - before;
            lanes.inputs[lane] = job->data;
            lanes.last_blocks[lane] = job->data + before;
            if (last < BLOCK) {
                memset(padded[lane], 0, BLOCK);
                if (last > 0)
                    memcpy(padded[lane], job->data + before, last);
                lanes.last_blocks[lane] = padded[lane];
            }
            lanes.last_lengths[lane] = last;
            lanes.last_flags[lane] = job->flags;
            lanes.counter_low[lane] = (uint32_t)job->counter;
            lanes.counter_high[lane] = (uint32_t)(job->counter >> 32);
            lanes.outputs[lane] = lane < here ? job->out : unused;
        }
        vector->hash(&lanes);
        jobs += here;
        n_jobs -= here;
    }
    for (; n_jobs > 0; jobs++, n_jobs--)
        hash_alone(jobs, first_flags);
}

/* A message, or a part of one. */
typedef struct {
    const uint8_t *data;
    size_t n_bytes;
    uint64_t first_chunk;
    int is_whole;
    uint8_t *out;
} Message;

static inline size_t chunks_of(size_t n_bytes) { return n_bytes <= CHUNK ? 1 : (n_bytes + CHUNK - 1) / CHUNK; }

/* The digests of one message in a batch, reduced level by level. */
typedef struct {
    uint8_t (*digests)[TC_DIGEST];
    size_t n_digests;
    uint32_t root;
    uint8_t *out;
} Tree;

/* Hash the parents in some trees, level by level, until each tree has one digest. `n_below` is the number of all digests. */
static void reduce(Tree *trees, size_t n_trees, Job *jobs) {
    for (;;) {
        size_t n_jobs = 0, n_left = 0;
        for (size_t number = 0; number < n_trees; number++) {
            Tree *tree = trees + number;
            uint32_t flags = PARENT | (tree->n_digests == 2 ? tree->root : 0);
            for (size_t pair = 0; pair < tree->n_digests / 2; pair++)
                jobs[n_jobs++] = (Job){.data = tree->digests[2 * pair],
                                       .n_bytes = BLOCK,
                                       .flags = flags,
                                       .out = tree->n_digests == 2 ? tree->out : tree->digests[pair]};
        }
        if (n_jobs == 0)
            return;
        /* A job writes where no later job reads, and jobs in lanes read before one of them writes. */
        hash_alike(jobs, n_jobs, PARENT);
        for (size_t number = 0; number < n_trees; number++) {
            Tree *tree = trees + number;
            size_t n_pairs = tree->n_digests / 2;
            if (tree->n_digests % 2 == 1)
                memmove(tree->digests[n_pairs], tree->digests[tree->n_digests - 1], TC_DIGEST);
            tree->n_digests -= n_pairs;
            if (tree->n_digests > 1)
                trees[n_left++] = *tree;
        }
        n_trees = n_left;
    }
}

/* Hash some messages of MOST_CHUNKS chunks together or fewer. */
static void hash_batch(const Message *messages, size_t n_messages) {
    uint8_t digests[MOST_CHUNKS][TC_DIGEST];
    Job jobs[MOST_CHUNKS], sorted[MOST_CHUNKS];
    Tree trees[MOST_CHUNKS / 2];
    size_t n_jobs = 0, n_trees = 0, n_digests = 0, of_length[CHUNK / BLOCK + 1] = {0};
    for (size_t number = 0; number < n_messages; number++) {
        const Message *message = messages + number;
        size_t n_chunks = chunks_of(message->n_bytes);
        uint32_t root = message->is_whole ? ROOT : 0;
        for (size_t chunk = 0; chunk < n_chunks; chunk++) {
            size_t begin = chunk * CHUNK, rest = message->n_bytes - begin;
            Job *job = jobs + n_jobs++;
            job->data = message->data + begin;
            job->n_bytes = (uint32_t)(rest < CHUNK ? rest : CHUNK);
            job->flags = CHUNK_END | (n_chunks == 1 ? root : 0);
            job->counter = message->first_chunk + chunk;
            job->out = n_chunks == 1 ? message->out : digests[n_digests + chunk];
            of_length[blocks_of(job)]++;
        }
        if (n_chunks > 1) {
            trees[n_trees++] =
                (Tree){.digests = digests + n_digests, .n_digests = n_chunks, .root = root, .out = message->out};
            n_digests += n_chunks;
        }
    }
    size_t begin = 0, next[CHUNK / BLOCK + 1];
    for (size_t n_blocks = 1; n_blocks <= CHUNK / BLOCK; begin += of_length[n_blocks++])
        next[n_blocks] = begin;
    for (size_t number = 0; number < n_jobs; number++)
        sorted[next[blocks_of(jobs + number)]++] = jobs[number];
    begin = 0;
    for (size_t n_blocks = 1; n_blocks <= CHUNK / BLOCK; begin += of_length[n_blocks++])
        hash_alike(sorted + begin, of_length[n_blocks], CHUNK_START);
    reduce(trees, n_trees, jobs);
}

void tc_blake3_part(const uint8_t *data, size_t n, size_t begin, uint8_t *copy, uint8_t out[TC_DIGEST]) {
    size_t n_bytes = n - begin < TC_SUBTREE ? n - begin : TC_SUBTREE;
    const uint8_t *from = data + begin;
    if (copy != NULL)
        from = memcpy(copy + begin, data + begin, n_bytes);
    Message part = {.data = from, .n_bytes = n_bytes, .first_chunk = begin / CHUNK, .is_whole = n_bytes == n, .out = out};
    hash_batch(&part, 1);
}

void tc_blake3_join(uint8_t (*parts)[TC_DIGEST], size_t n_parts, uint8_t out[TC_DIGEST]) {
    Job jobs[MOST_CHUNKS];
    /* Level by level, in pieces that the jobs have room for. */
    while (n_parts > MOST_CHUNKS) {
        size_t n_pairs = n_parts / 2;
        for (size_t begin = 0; begin < n_pairs;) {
            size_t n_jobs = n_pairs - begin < MOST_CHUNKS ? n_pairs - begin : MOST_CHUNKS;
            for (size_t pair = 0; pair < n_jobs; pair++)
                jobs[pair] = (Job){.data = parts[2 * (begin + pair)],
                                   .n_bytes = BLOCK,
                                   .flags = PARENT,
                                   .out = parts[begin + pair]};
            hash_alike(jobs, n_jobs, PARENT);
            begin += n_jobs;
        }
        if (n_parts % 2 == 1)
            memmove(parts[n_pairs], parts[n_parts - 1], TC_DIGEST);
        n_parts -= n_pairs;
    }
    Tree tree = {.digests = parts, .n_digests = n_parts, .root = ROOT, .out = out};
    reduce(&tree, 1, jobs);
}

/* Hash a message of several parts in one thread: the digests of whole subtrees wait in a stack, at most one of each height. */
static void hash_parts(const uint8_t *data, size_t n, uint8_t *copy, uint8_t out[TC_DIGEST]) {
    uint8_t stack[64][TC_DIGEST];
    size_t depth = 0, n_parts = (n + TC_SUBTREE - 1) / TC_SUBTREE;
    for (size_t part = 0; part < n_parts; part++) {
        tc_blake3_part(data, n, part * TC_SUBTREE, copy, stack[depth++]);
        /* As many pairs are whole as the number of parts so far is even; after the last part, all that are left. */
        size_t number = part + 1;
        while (number == n_parts ? depth > 1 : number % 2 == 0) {
            int is_root = number == n_parts && depth == 2;
            Job parent = {.data = stack[depth - 2],
                          .n_bytes = BLOCK,
                          .flags = PARENT | (is_root ? ROOT : 0),
                          .out = stack[depth - 2]};
            hash_alone(&parent, PARENT);
            depth--;
            if (number != n_parts)
                number /= 2;
        }
    }
    memcpy(out, stack[0], TC_DIGEST);
}

void tc_blake3(const uint8_t *data, size_t n, uint8_t out[TC_DIGEST]) {
    if (n <= CHUNK) {
        Job job = {.data = data, .n_bytes = (uint32_t)n, .flags = CHUNK_END | ROOT, .out = out};
        hash_alone(&job, CHUNK_START);
    } else if (n <= TC_SUBTREE)
        tc_blake3_part(data, n, 0, NULL, out);
    else
        hash_parts(data, n, NULL, out);
}

void tc_blake3_copy(const uint8_t *data, size_t n, uint8_t *copy, uint8_t out[TC_DIGEST]) {
    if (n > TC_SUBTREE) {
        hash_parts(data, n, copy, out);
        return;
    }
    if (n > 0)
        memcpy(copy, data, n);
    tc_blake3(copy, n, out);
}

void tc_blake3_many(const uint8_t *const *data, const size_t *n, size_t count, uint8_t (*out)[TC_DIGEST]) {
    Message batch[MOST_CHUNKS];
    size_t n_messages = 0, n_chunks = 0;
    for (size_t number = 0; number < count; number++) {
        if (n[number] > MOST_SMALL) {
            tc_blake3(data[number], n[number], out[number]);
            continue;
        }
        if (n_chunks + chunks_of(n[number]) > MOST_CHUNKS) {
            hash_batch(batch, n_messages);
            n_messages = n_chunks = 0;
        }
        batch[n_messages++] =
            (Message){.data = data[number], .n_bytes = n[number], .is_whole = 1, .out = out[number]};
        n_chunks += chunks_of(n[number]);
    }
    hash_batch(batch, n_messages);
}
