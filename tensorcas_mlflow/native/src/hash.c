/* Digests of many buffers in one call. */
#define _GNU_SOURCE
#include "methods.h"

#include "blake3.h"
#include "pool.h"
#include "watch.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* A thread takes a task at a time: some whole messages, or a part of a large one. */
enum { LEAST_TASK = 256 << 10, LEAST_SHARED = 1 << 20 };

typedef struct {
    size_t message; /* the first one */
    size_t count;   /* messages; 0: the task is a part of one */
    size_t begin;   /* of the part, in the message */
    uint8_t *part;  /* the digest of the part */
} Task;

typedef struct {
    const uint8_t **data;
    size_t *n_bytes;
    uint8_t (*out)[TC_DIGEST];
    Task *tasks;
} Batch;

static void do_task(void *context, size_t index, size_t slot) {
    Batch *batch = context;
    Task *task = batch->tasks + index;
    size_t first = task->message;
    (void)slot;
    if (task->count > 0)
        tc_blake3_many(batch->data + first, batch->n_bytes + first, task->count, batch->out + first);
    else
        tc_blake3_part(batch->data[first], batch->n_bytes[first], task->begin, NULL, task->part);
}

static size_t parts_of(size_t n_bytes) { return n_bytes / TC_SUBTREE + (n_bytes % TC_SUBTREE != 0); }

/* Hash all messages; return 0 if there is no memory. Needs no lock of the interpreter. */
static int hash_all(Batch *batch, size_t count, size_t n_threads) {
    size_t n_tasks = 0, n_parts = 0, n_bytes = 0, n_shared = 0;
    for (size_t number = 0; number < count; number++)
        n_bytes += batch->n_bytes[number];
    if (n_bytes < 2 * LEAST_TASK) {
        tc_blake3_many(batch->data, batch->n_bytes, count, batch->out);
        return 1;
    }
    for (size_t number = 0; number < count; number++)
        if (batch->n_bytes[number] >= LEAST_SHARED) {
            n_parts += parts_of(batch->n_bytes[number]);
            n_shared++;
        }
    uint8_t(*parts)[TC_DIGEST] = malloc(n_parts * TC_DIGEST + 1);
    batch->tasks = malloc((n_parts + n_bytes / LEAST_TASK + n_shared + 2) * sizeof(Task));
    if (parts == NULL || batch->tasks == NULL) {
        free(parts);
        free(batch->tasks);
        return 0;
    }
    uint8_t(*part)[TC_DIGEST] = parts;
    for (size_t number = 0; number < count;) {
        Task *task = batch->tasks + n_tasks;
        if (batch->n_bytes[number] >= LEAST_SHARED) {
            for (size_t begin = 0; begin < batch->n_bytes[number]; begin += TC_SUBTREE)
                batch->tasks[n_tasks++] = (Task){.message = number, .begin = begin, .part = *part++};
            number++;
            continue;
        }
        *task = (Task){.message = number};
        for (size_t here = 0; number < count && here < LEAST_TASK && batch->n_bytes[number] < LEAST_SHARED; number++) {
            here += batch->n_bytes[number];
            task->count++;
        }
        n_tasks++;
    }
    tc_run(do_task, batch, n_tasks, n_threads);
    part = parts;
    for (size_t number = 0; number < count; number++)
        if (batch->n_bytes[number] >= LEAST_SHARED) {
            tc_blake3_join(part, parts_of(batch->n_bytes[number]), batch->out[number]);
            part += parts_of(batch->n_bytes[number]);
        }
    free(parts);
    free(batch->tasks);
    return 1;
}

/* Hash the messages of a batch without the interpreter's lock. */
static PyObject *finish(Batch *batch, size_t count, Py_ssize_t n_threads) {
    TcWatch watch;
    tc_leave(&watch);
    int has_memory = hash_all(batch, count, n_threads < 1 ? 1 : (size_t)n_threads);
    if (!tc_come_back(&watch))
        return NULL;
    return has_memory ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

/* hash_each(pieces, out, n_threads): the digest of each buffer of a list or tuple. */
static PyObject *hash_each(PyObject *module, PyObject *args) {
    PyObject *pieces, *result = NULL;
    Py_buffer out, *views = NULL;
    Py_ssize_t n_threads, n_views = 0, count = 0;
    Batch batch = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "Ow*n:hash_each", &pieces, &out, &n_threads))
        return NULL;
    /* Nobody else has the tuple, so nobody changes it while a buffer is asked for. */
    if ((pieces = PySequence_Tuple(pieces)) == NULL)
        goto done;
    count = PyTuple_Size(pieces);
    if (out.len % TC_DIGEST != 0 || out.len / TC_DIGEST != count) {
        PyErr_SetString(PyExc_ValueError, "the output has not 32 bytes for each buffer");
        goto done;
    }
    batch.data = malloc(((size_t)count + 1) * sizeof *batch.data);
    batch.n_bytes = malloc(((size_t)count + 1) * sizeof *batch.n_bytes);
    views = malloc(((size_t)count + 1) * sizeof *views);
    if (batch.data == NULL || batch.n_bytes == NULL || views == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; n_views < count; n_views++) {
        if (PyObject_GetBuffer(PyTuple_GetItem(pieces, n_views), views + n_views, PyBUF_SIMPLE) < 0)
            goto done;
        batch.data[n_views] = views[n_views].buf;
        batch.n_bytes[n_views] = (size_t)views[n_views].len;
    }
    batch.out = out.buf;
    result = finish(&batch, (size_t)count, n_threads);
done:
    while (n_views > 0)
        PyBuffer_Release(views + --n_views);
    free(views);
    free(batch.data);
    free(batch.n_bytes);
    Py_XDECREF(pieces);
    PyBuffer_Release(&out);
    return result;
}

/* Some chunks that one thread hashes and copies, small ones side by side; large ones are a task each. */
enum { GROUP_BYTES = 256 << 10, GROUP_CHUNKS = 1024 };

typedef struct {
    size_t count;
    const uint8_t **data;
    size_t *n_bytes;
    size_t *at;          /* of each chunk in the copy */
    size_t *tasks;       /* the first chunk of each task, and the end */
    uint8_t *copy;
    uint8_t *is_copied;
    const uint8_t (*known)[TC_DIGEST]; /* NULL: nothing is known */
    uint8_t (*out)[TC_DIGEST];
    uint8_t *scratch;    /* GROUP_BYTES for each thread; NULL if nothing is known */
} Copies;

/* Hash the copies, never the chunks themselves: whoever changes a chunk meanwhile changes the digest with it or not at all. A
 * chunk with a known digest is copied to the scratch area first, which stays in the cache, and from there if it has changed. */
static void copy_some(void *context, size_t index, size_t slot) {
    Copies *all = context;
    size_t first = all->tasks[index], end = all->tasks[index + 1], used = 0;
    if (all->n_bytes[first] > GROUP_BYTES) {
        if (all->known != NULL) {
            tc_blake3(all->data[first], all->n_bytes[first], all->out[first]);
            if (memcmp(all->out[first], all->known[first], TC_DIGEST) == 0)
                return;
        }
        tc_blake3_copy(all->data[first], all->n_bytes[first], all->copy + all->at[first], all->out[first]);
        all->is_copied[first] = 1;
        return;
    }
    const uint8_t *copies[GROUP_CHUNKS] = {0};
    for (size_t chunk = first; chunk < end; chunk++) {
        uint8_t *to = all->known == NULL ? all->copy + all->at[chunk] : all->scratch + slot * GROUP_BYTES + used;
        if (all->n_bytes[chunk] > 0)
            memcpy(to, all->data[chunk], all->n_bytes[chunk]);
        copies[chunk - first] = to;
        used += all->n_bytes[chunk];
    }
    tc_blake3_many(copies, all->n_bytes + first, end - first, all->out + first);
    for (size_t chunk = first; chunk < end; chunk++) {
        if (all->known != NULL) {
            if (memcmp(all->out[chunk], all->known[chunk], TC_DIGEST) == 0)
                continue;
            if (all->n_bytes[chunk] > 0)
                memcpy(all->copy + all->at[chunk], copies[chunk - first], all->n_bytes[chunk]);
        }
        all->is_copied[chunk] = 1;
    }
}

/* Copy and hash all chunks; return 0 if there is no memory. Needs no lock of the interpreter. */
static int copy_all(Copies *all, size_t n_threads) {
    size_t n_tasks = 0;
    n_threads = n_threads < 1 ? 1 : n_threads > TC_MOST_THREADS ? TC_MOST_THREADS : n_threads;
    for (size_t chunk = 0; chunk < all->count;) {
        size_t first = chunk, used = 0;
        all->tasks[n_tasks++] = first;
        do
            used += all->n_bytes[chunk++];
        while (chunk < all->count && chunk - first < GROUP_CHUNKS && used <= GROUP_BYTES &&
               all->n_bytes[chunk] <= GROUP_BYTES - used);
    }
    all->tasks[n_tasks] = all->count;
    if (all->known != NULL && (all->scratch = malloc(n_threads * GROUP_BYTES)) == NULL)
        return 0;
    tc_run(copy_some, all, n_tasks, n_threads);
    free(all->scratch);
    return 1;
}

/* copy_rows(rows, chunk_at, sizes, known or None, copy, is_copied, out, n_threads): copy the chunks of some buffers, except
 * those that have the known digests still, and hash them. The columns are int64; chunk_at has the number of the first chunk of
 * each row, and the end. A chunk's place in the copy is the sum of the sizes before it. */
static PyObject *copy_rows(PyObject *module, PyObject *args) {
    PyObject *rows, *result = NULL;
    Py_buffer chunk_at, sizes, known, copy, is_copied, out, *views = NULL;
    Py_ssize_t n_threads, n_views = 0, n_rows = 0;
    Copies all = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "Oy*y*z*w*w*w*n:copy_rows", &rows, &chunk_at, &sizes, &known, &copy, &is_copied, &out,
                          &n_threads))
        return NULL;
    if ((rows = PySequence_Tuple(rows)) == NULL)
        goto done;
    n_rows = PyTuple_Size(rows);
    size_t count = all.count = (size_t)sizes.len / sizeof(int64_t);
    if ((size_t)sizes.len != count * sizeof(int64_t) || chunk_at.len != (n_rows + 1) * (Py_ssize_t)sizeof(int64_t) ||
        (size_t)is_copied.len != count || (size_t)out.len != count * TC_DIGEST ||
        (known.buf != NULL && known.len != out.len)) {
        PyErr_SetString(PyExc_ValueError, "the columns of rows and chunks do not fit each other");
        goto done;
    }
    views = malloc(((size_t)n_rows + 1) * sizeof *views);
    all.data = malloc((count + 1) * sizeof *all.data);
    all.n_bytes = malloc((count + 1) * sizeof *all.n_bytes);
    all.at = malloc((count + 1) * sizeof *all.at);
    all.tasks = malloc((count + 1) * sizeof *all.tasks);
    if (views == NULL || all.data == NULL || all.n_bytes == NULL || all.at == NULL || all.tasks == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    size_t at = 0, chunk = 0;
    for (; n_views < n_rows; n_views++) {
        int64_t begin, end;
        memcpy(&begin, (const uint8_t *)chunk_at.buf + (size_t)n_views * sizeof begin, sizeof begin);
        memcpy(&end, (const uint8_t *)chunk_at.buf + (size_t)(n_views + 1) * sizeof end, sizeof end);
        if (PyObject_GetBuffer(PyTuple_GetItem(rows, n_views), views + n_views, PyBUF_SIMPLE) < 0)
            goto done;
        size_t in_row = 0, n_row = (size_t)views[n_views].len;
        int fits = begin == (int64_t)chunk && end >= begin && (uint64_t)end <= count;
        for (; fits && chunk < (size_t)end; chunk++) {
            int64_t size;
            memcpy(&size, (const uint8_t *)sizes.buf + chunk * sizeof size, sizeof size);
            if ((fits = size >= 0 && (uint64_t)size <= n_row - in_row && (uint64_t)size <= (size_t)copy.len - at) == 0)
                break;
            all.data[chunk] = (const uint8_t *)views[n_views].buf + in_row;
            all.n_bytes[chunk] = (size_t)size;
            all.at[chunk] = at;
            in_row += (size_t)size;
            at += (size_t)size;
        }
        if (!fits || in_row != n_row) {
            n_views++;
            PyErr_SetString(PyExc_ValueError, "the chunks are not those of the rows");
            goto done;
        }
    }
    if (chunk != count || at != (size_t)copy.len) {
        PyErr_SetString(PyExc_ValueError, "the chunks are not those of the rows");
        goto done;
    }
    all.copy = copy.buf;
    all.is_copied = is_copied.buf;
    all.known = known.buf;
    all.out = out.buf;
    memset(all.is_copied, 0, count);
    TcWatch watch;
    tc_leave(&watch);
    int has_memory = copy_all(&all, n_threads < 1 ? 1 : (size_t)n_threads);
    if (tc_come_back(&watch))
        result = has_memory ? Py_NewRef(Py_None) : PyErr_NoMemory();
done:
    while (n_views > 0)
        PyBuffer_Release(views + --n_views);
    free(views);
    free(all.data);
    free(all.n_bytes);
    free(all.at);
    free(all.tasks);
    Py_XDECREF(rows);
    PyBuffer_Release(&chunk_at);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&known);
    PyBuffer_Release(&copy);
    PyBuffer_Release(&is_copied);
    PyBuffer_Release(&out);
    return result;
}

/* Payloads of files that one thread reads together and hashes. */
enum { READ_BYTES = 1 << 20, READ_GAP = 64 << 10, READ_PAYLOADS = 1024, STORED_DIGEST = 16 };
enum { PAGE = 4096, HUGE_PAGE = 2 << 20 };

typedef struct {
    const int32_t *source;
    const uint64_t *start;
    const uint64_t *n_bytes;
    const uint8_t (*expected)[STORED_DIGEST];
    uint8_t *is_good;
    size_t *tasks; /* the first payload of each task, and the end */
    size_t room;   /* bytes of the longest task, and of the pages around it */
    uint8_t *scratch; /* `room` bytes for each thread */
} Payloads;

static int is_direct(int source) {
#ifdef O_DIRECT
    int flags = source < 0 ? -1 : fcntl(source, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) != 0;
#else
    (void)source;
    return 0;
#endif
}

/* Read a stretch of a file into memory that begins at a page; return the stretch, or NULL. A direct read is of whole pages. */
static const uint8_t *read_whole(int source, uint64_t start, uint8_t *to, size_t n_bytes) {
    uint64_t begin = start, stop = start + n_bytes, end = stop;
    int takes_pages = is_direct(source);
    if (takes_pages) {
        begin = begin / PAGE * PAGE;
        end = (end + PAGE - 1) / PAGE * PAGE;
    }
    for (uint64_t at = begin; at < stop;) {
        ssize_t n_read = pread(source, to + (at - begin), (size_t)(end - at), (off_t)at);
        if (n_read < 0 && errno == EINTR)
            continue;
        if (n_read <= 0)
            return NULL;
        at += (uint64_t)n_read;
        if (takes_pages && at % PAGE != 0 && at < stop)
            return NULL;
    }
    return to + (start - begin);
}

static void check_some(void *context, size_t index, size_t slot) {
    Payloads *all = context;
    size_t first = all->tasks[index], end = all->tasks[index + 1];
    const uint8_t *data[READ_PAYLOADS];
    size_t n_bytes[READ_PAYLOADS];
    uint8_t out[READ_PAYLOADS][TC_DIGEST];
    uint64_t begin = all->start[first];
    size_t n_read = (size_t)(all->start[end - 1] + all->n_bytes[end - 1] - begin);
    const uint8_t *read = read_whole(all->source[first], begin, all->scratch + slot * all->room, n_read);
    /* A group that cannot be read as one is damaged as far as this function tells; the caller asks again for each. */
    if (read == NULL)
        return;
    for (size_t at = first; at < end; at++) {
        data[at - first] = read + (all->start[at] - begin);
        n_bytes[at - first] = (size_t)all->n_bytes[at];
    }
    tc_blake3_many(data, n_bytes, end - first, out);
    for (size_t at = first; at < end; at++)
        all->is_good[at] = memcmp(out[at - first], all->expected[at], STORED_DIGEST) == 0;
}

/* Check all payloads; return 0 if there is no memory. Needs no lock of the interpreter. */
static int check_all(Payloads *all, size_t count, size_t n_threads) {
    size_t n_tasks = 0;
    n_threads = n_threads < 1 ? 1 : n_threads > TC_MOST_THREADS ? TC_MOST_THREADS : n_threads;
    for (size_t at = 0; at < count; n_tasks++) {
        size_t first = all->tasks[n_tasks] = at;
        uint64_t end = all->start[at] + all->n_bytes[at];
        for (at++; at < count && at - first < READ_PAYLOADS && all->source[at] == all->source[first] &&
                   all->start[at] >= end && all->start[at] - end <= READ_GAP &&
                   all->start[at] + all->n_bytes[at] - all->start[first] <= READ_BYTES;
             at++)
            end = all->start[at] + all->n_bytes[at];
        if (end - all->start[first] > all->room)
            all->room = (size_t)(end - all->start[first]);
    }
    all->tasks[n_tasks] = count;
    n_threads = n_threads < n_tasks ? n_threads : n_tasks;
    all->room = (all->room + 3 * PAGE - 1) / PAGE * PAGE;
    /* The driver of a disk splits a direct read into ordinary pages into many requests; huge pages avoid this. */
    size_t n_room = (n_threads < 1 ? 1 : n_threads) * all->room;
    if (posix_memalign((void **)&all->scratch, n_room < HUGE_PAGE ? PAGE : HUGE_PAGE, n_room) != 0)
        return 0;
#ifdef MADV_HUGEPAGE
    if (n_room >= HUGE_PAGE)
        (void)madvise(all->scratch, n_room, MADV_HUGEPAGE);
#endif
    tc_run(check_some, all, n_tasks, n_threads);
    free(all->scratch);
    return 1;
}

/* check_stored(sources, starts, sizes, expected, is_good, n_threads): read payloads of files, and tell which of them hash to
 * the first 16 bytes of a digest. Columns: int32 descriptors, uint64 starts and sizes; -1 is a file that is not open. Payloads
 * that lie one after the other are read together. A descriptor opened with O_DIRECT is read past the page cache. */
static PyObject *check_stored(PyObject *module, PyObject *args) {
    Py_buffer sources, starts, sizes, expected, is_good;
    Py_ssize_t n_threads;
    PyObject *result = NULL;
    Payloads all = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*w*n:check_stored", &sources, &starts, &sizes, &expected, &is_good, &n_threads))
        return NULL;
    size_t count = (size_t)is_good.len;
    if ((size_t)sources.len != count * sizeof(int32_t) || (size_t)starts.len != count * sizeof(uint64_t) ||
        (size_t)sizes.len != count * sizeof(uint64_t) || (size_t)expected.len != count * STORED_DIGEST) {
        PyErr_SetString(PyExc_ValueError, "the columns of the payloads have not the same number of rows");
        goto done;
    }
    all.source = sources.buf;
    all.start = starts.buf;
    all.n_bytes = sizes.buf;
    all.expected = expected.buf;
    all.is_good = is_good.buf;
    if ((uintptr_t)sources.buf % sizeof(int32_t) != 0 || (uintptr_t)starts.buf % sizeof(uint64_t) != 0 ||
        (uintptr_t)sizes.buf % sizeof(uint64_t) != 0) {
        PyErr_SetString(PyExc_ValueError, "a column of the payloads is not aligned");
        goto done;
    }
    for (size_t at = 0; at < count; at++)
        if (all.n_bytes[at] > UINT32_MAX || all.start[at] > INT64_MAX - UINT32_MAX) {
            PyErr_SetString(PyExc_ValueError, "a payload is too long, or lies behind the end of any file");
            goto done;
        }
    if ((all.tasks = malloc((count + 1) * sizeof *all.tasks)) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    memset(all.is_good, 0, count);
    TcWatch watch;
    tc_leave(&watch);
    int has_memory = check_all(&all, count, n_threads < 1 ? 1 : (size_t)n_threads);
    if (tc_come_back(&watch))
        result = has_memory ? Py_NewRef(Py_None) : PyErr_NoMemory();
done:
    free(all.tasks);
    PyBuffer_Release(&sources);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&expected);
    PyBuffer_Release(&is_good);
    return result;
}

/* digest(data) -> bytes */
static PyObject *digest(PyObject *module, PyObject *data) {
    Py_buffer view;
    uint8_t out[TC_DIGEST];
    (void)module;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    if (view.len < LEAST_TASK / 16) /* releasing the lock takes as long as this */
        tc_blake3(view.buf, (size_t)view.len, out);
    else {
        const uint8_t *bytes = view.buf;
        size_t n_bytes = (size_t)view.len;
        Batch batch = {.data = &bytes, .n_bytes = &n_bytes, .out = &out};
        PyObject *done = finish(&batch, 1, 1);
        if (done == NULL) {
            PyBuffer_Release(&view);
            return NULL;
        }
        Py_DECREF(done);
    }
    PyBuffer_Release(&view);
    return PyBytes_FromStringAndSize((const char *)out, TC_DIGEST);
}

/* hash_kernels() -> names, the one in use first */
static PyObject *hash_kernels(PyObject *module, PyObject *unused) {
    PyObject *names = PyList_New(0);
    (void)module;
    (void)unused;
    for (const char *const *name = tc_blake3_names(); names != NULL && *name != NULL; name++) {
        PyObject *text = PyUnicode_FromString(*name);
        if (text == NULL || PyList_Append(names, text) < 0)
            Py_CLEAR(names);
        Py_XDECREF(text);
    }
    return names;
}

/* use_hash_kernel(name): for tests */
static PyObject *use_hash_kernel(PyObject *module, PyObject *args) {
    const char *name;
    (void)module;
    if (!PyArg_ParseTuple(args, "s:use_hash_kernel", &name))
        return NULL;
    if (!tc_blake3_use(name)) {
        PyErr_Format(PyExc_ValueError, "this processor has no kernel %s", name);
        return NULL;
    }
    return Py_NewRef(Py_None);
}

PyMethodDef tc_hash_methods[] = {
    {"digest", digest, METH_O, NULL},
    {"hash_each", hash_each, METH_VARARGS, NULL},
    {"copy_rows", copy_rows, METH_VARARGS, NULL},
    {"check_stored", check_stored, METH_VARARGS, NULL},
    {"hash_kernels", hash_kernels, METH_NOARGS, NULL},
    {"use_hash_kernel", use_hash_kernel, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
