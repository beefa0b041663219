/* Digests of many buffers in one call. */
#include "methods.h"

#include "blake3.h"
#include "pool.h"

#include <stdlib.h>
#include <string.h>

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
    if (n_threads <= 1 || n_bytes < 2 * LEAST_TASK) {
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

/* Hash the columns of a batch without the interpreter's lock; free them. */
static PyObject *finish(Batch *batch, size_t count, Py_ssize_t n_threads) {
    int has_memory;
    Py_BEGIN_ALLOW_THREADS;
    has_memory = hash_all(batch, count, n_threads < 1 ? 1 : (size_t)n_threads);
    Py_END_ALLOW_THREADS;
    return has_memory ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

static int allocate(Batch *batch, size_t count) {
    batch->data = malloc((count + 1) * sizeof *batch->data);
    batch->n_bytes = malloc((count + 1) * sizeof *batch->n_bytes);
    if (batch->data != NULL && batch->n_bytes != NULL)
        return 1;
    PyErr_NoMemory();
    return 0;
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
    if (!allocate(&batch, (size_t)count))
        goto done;
    if ((views = malloc(((size_t)count + 1) * sizeof *views)) == NULL) {
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

/* hash_spans(data, starts, stops, out, n_threads): the digest of each span of one buffer; columns of int64. */
static PyObject *hash_spans(PyObject *module, PyObject *args) {
    Py_buffer data, starts, stops, out;
    Py_ssize_t n_threads;
    PyObject *result = NULL;
    Batch batch = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*w*n:hash_spans", &data, &starts, &stops, &out, &n_threads))
        return NULL;
    size_t count = (size_t)starts.len / sizeof(int64_t);
    if ((size_t)starts.len != count * sizeof(int64_t) || stops.len != starts.len ||
        (size_t)out.len % TC_DIGEST != 0 || (size_t)out.len / TC_DIGEST != count) {
        PyErr_SetString(PyExc_ValueError, "the columns of starts, stops and digests have not the same number of rows");
        goto done;
    }
    if (!allocate(&batch, count))
        goto done;
    for (size_t number = 0; number < count; number++) {
        int64_t start, stop;
        memcpy(&start, (const uint8_t *)starts.buf + number * sizeof start, sizeof start);
        memcpy(&stop, (const uint8_t *)stops.buf + number * sizeof stop, sizeof stop);
        if (start < 0 || stop < start || stop > data.len) {
            PyErr_SetString(PyExc_ValueError, "a span is not in the buffer");
            goto done;
        }
        batch.data[number] = (const uint8_t *)data.buf + start;
        batch.n_bytes[number] = (size_t)(stop - start);
    }
    batch.out = out.buf;
    result = finish(&batch, count, n_threads);
done:
    free(batch.data);
    free(batch.n_bytes);
    PyBuffer_Release(&data);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&stops);
    PyBuffer_Release(&out);
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
        Py_BEGIN_ALLOW_THREADS;
        tc_blake3(view.buf, (size_t)view.len, out);
        Py_END_ALLOW_THREADS;
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
    {"hash_spans", hash_spans, METH_VARARGS, NULL},
    {"hash_kernels", hash_kernels, METH_NOARGS, NULL},
    {"use_hash_kernel", use_hash_kernel, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
