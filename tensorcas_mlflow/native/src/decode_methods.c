/* The batch decode as a Python function. */
#include "methods.h"

#include <stdlib.h>

#include "decode.h"
#include "watch.h"

/* The buffers of a sequence. */
typedef struct {
    Py_buffer *views;
    TcBytes *bytes;
    Py_ssize_t count;
} Buffers;

static void release(Buffers *buffers) {
    for (Py_ssize_t at = 0; at < buffers->count; at++)
        PyBuffer_Release(buffers->views + at);
    free(buffers->views);
    free(buffers->bytes);
}

static int take_buffers(Buffers *buffers, PyObject *sequence, int flags) {
    Py_ssize_t n_buffers = PySequence_Size(sequence);
    if (n_buffers < 0)
        return 0;
    buffers->views = malloc(((size_t)n_buffers + 1) * sizeof *buffers->views);
    buffers->bytes = malloc(((size_t)n_buffers + 1) * sizeof *buffers->bytes);
    if (buffers->views == NULL || buffers->bytes == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (Py_ssize_t at = 0; at < n_buffers; at++) {
        PyObject *item = PySequence_GetItem(sequence, at);
        int failed = item == NULL || PyObject_GetBuffer(item, buffers->views + at, flags) < 0;
        Py_XDECREF(item);
        if (failed)
            return 0;
        buffers->bytes[at] =
            (TcBytes){.data = buffers->views[at].buf, .n_bytes = (size_t)buffers->views[at].len};
        buffers->count++;
    }
    return 1;
}

/* decode(reads, links, chunks, parts, sources, blocks, verifies, n_threads): return the status of each chunk. */
static PyObject *decode(PyObject *module, PyObject *args) {
    Py_buffer reads, links, chunks, parts;
    PyObject *of_sources, *of_blocks, *result = NULL;
    int verifies;
    Py_ssize_t n_threads;
    Buffers sources = {0}, blocks = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*y*OOpn:decode", &reads, &links, &chunks, &parts, &of_sources, &of_blocks, &verifies,
                          &n_threads))
        return NULL;
    if (!take_buffers(&sources, of_sources, PyBUF_SIMPLE) || !take_buffers(&blocks, of_blocks, PyBUF_WRITABLE))
        goto done;
    TcBatch batch = {
        .reads = reads.buf,
        .links = links.buf,
        .chunks = chunks.buf,
        .parts = parts.buf,
        .n_reads = (size_t)reads.len / sizeof(TcRead),
        .n_links = (size_t)links.len / sizeof(TcLink),
        .n_chunks = (size_t)chunks.len / sizeof(TcChunk),
        .n_parts = (size_t)parts.len / sizeof(TcPart),
        .sources = sources.bytes,
        .blocks = blocks.bytes,
        .n_sources = (size_t)sources.count,
        .n_blocks = (size_t)blocks.count,
        .verifies = verifies,
    };
    /* numpy aligns its arrays; a foreign buffer may begin anywhere. */
    int is_aligned = (((uintptr_t)reads.buf | (uintptr_t)links.buf | (uintptr_t)chunks.buf | (uintptr_t)parts.buf) & 7) == 0;
    int fits = is_aligned && reads.len % sizeof(TcRead) == 0 && links.len % sizeof(TcLink) == 0 && chunks.len % sizeof(TcChunk) == 0 &&
               parts.len % sizeof(TcPart) == 0 && tc_check_batch(&batch);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the tables of a batch and its buffers do not fit each other");
        goto done;
    }
    result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)batch.n_chunks);
    if (result == NULL)
        goto done;
    batch.statuses = (uint8_t *)PyBytes_AsString(result);
    TcWatch watch;
    tc_leave(&watch);
    int has_room = tc_decode(&batch, n_threads < 1 ? 1 : (size_t)n_threads);
    if (!tc_come_back(&watch))
        Py_CLEAR(result);
    else if (!has_room) {
        Py_CLEAR(result);
        PyErr_NoMemory();
    }
done:
    release(&blocks);
    release(&sources);
    PyBuffer_Release(&parts);
    PyBuffer_Release(&chunks);
    PyBuffer_Release(&links);
    PyBuffer_Release(&reads);
    return result;
}

/* decode_payload(codec, payload, out, base or None): return the status. */
static PyObject *decode_payload(PyObject *module, PyObject *args) {
    Py_buffer payload = {0}, out = {0}, base = {0};
    PyObject *result = NULL;
    int codec;
    (void)module;
    if (!PyArg_ParseTuple(args, "iy*w*z*:decode_payload", &codec, &payload, &out, &base))
        return NULL;
    int has_base = base.buf != NULL, fits = payload.len <= UINT32_MAX && out.len <= UINT32_MAX && base.len <= UINT32_MAX;
    TcBytes sources[2] = {{payload.buf, (size_t)payload.len}, {base.buf, (size_t)base.len}};
    TcBytes block = {out.buf, (size_t)out.len};
    uint8_t status = CHUNK_GOOD;
    TcRead reads[2] = {{.n_bytes = (uint64_t)payload.len}, {.n_bytes = (uint64_t)base.len, .source = 1}};
    TcLink links[2] = {
        {.n_stored = (uint32_t)payload.len, .n_bytes = (uint32_t)out.len, .codec = (uint16_t)codec},
        {.n_stored = (uint32_t)base.len, .read = 1, .n_bytes = (uint32_t)base.len}, /* as it is */
    };
    TcChunk chunk = {.n_bytes = (uint32_t)out.len, .n_links = has_base ? 2 : 1};
    TcPart part = {.last_read = chunk.n_links, .last_chunk = 1};
    TcBatch batch = {
        .reads = reads, .links = links, .chunks = &chunk, .parts = &part, .sources = sources, .blocks = &block,
        .n_reads = chunk.n_links, .n_links = chunk.n_links, .n_chunks = 1, .n_parts = 1,
        .n_sources = chunk.n_links, .n_blocks = 1, .statuses = &status,
    };
    if (!fits || !tc_check_batch(&batch))
        PyErr_SetString(PyExc_ValueError, "a payload, its base and its chunk have no sizes of chunks");
    else {
        TcWatch watch;
        tc_leave(&watch);
        int has_room = tc_decode(&batch, 1);
        if (tc_come_back(&watch))
            result = has_room ? PyLong_FromLong(status) : PyErr_NoMemory();
    }
    PyBuffer_Release(&base);
    PyBuffer_Release(&out);
    PyBuffer_Release(&payload);
    return result;
}

PyMethodDef tc_decode_methods[] = {
    {"decode", decode, METH_VARARGS, NULL},
    {"decode_payload", decode_payload, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
