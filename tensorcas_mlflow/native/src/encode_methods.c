/* What Python calls of the encoder: groups of chunks, and each codec by itself for the choice of codings. */
#include "encode.h"

#include "watch.h"

#include <stdlib.h>
#include <string.h>

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
static int take_stored(PyObject *tables, Py_buffer *views, TcGroup *group, TcBytes *nowhere) {
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
    TcPayloads *payloads = NULL;
    TcBytes nowhere;
    int checks;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOy*y*y*y*y*y*pw*z*O:encode_group", &data, &bases, &itemsizes, &how, &sampled, &begins,
                          &digests, &encodings, &checks, &entries, &named, &tables))
        return NULL;
    Py_ssize_t n = PySequence_Size(data), n_viewed = 0;
    TcWorker *worker = NULL;
    Py_buffer *views = NULL;
    void *room = NULL;
    size_t count = n < 0 ? 0 : (size_t)n, needed = OVERHEAD_BYTES, n_encodings = (size_t)encodings.len / sizeof(TcEncoding);
    Py_ssize_t n_bases = n < 0 || bases == Py_None ? n : PySequence_Size(bases);
    if (n < 0 || n_bases < 0)
        goto done;
    if (n_bases != n) {
        misfit();
        goto done;
    }
    views = calloc(2 * count + 1, sizeof *views);
    room = calloc(count + 1, 3 * sizeof(uint8_t *) + 2 * sizeof(size_t));
    worker = tc_take_worker();
    if (views == NULL || room == NULL || worker == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    TcGroup group = {.n_chunks = count, .checks = checks, .named = named.buf, .changed = -1, .baseless = -1};
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
               (size_t)encodings.len == n_encodings * sizeof(TcEncoding) &&
               (named.buf == NULL || (size_t)named.len == count * sizeof(TcNamed)) &&
               (size_t)entries.len == count * sizeof(TcEntry) &&
               (uintptr_t)itemsizes.buf % 4 == 0 && (uintptr_t)how.buf % 4 == 0 && (uintptr_t)encodings.buf % 8 == 0;
    for (size_t number = 0; fits && number < n_encodings; number++)
        fits = tc_is_sound(&group.encodings[number]);
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
    if ((payloads = tc_make_payloads(needed)) == NULL)
        goto done;
    group.out = payloads->data;
    TcWatch watch;
    tc_leave(&watch);
    tc_encode_chunks(worker, &group);
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
        tc_give_worker(worker);
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

/* A call that encodes or examines one chunk: its arguments and its results. */
typedef struct {
    Py_buffer raw, base, codings;
    Py_ssize_t itemsize, unit;
    int level, transform, effort, at_any_cost;
    TcWorker *worker;
    uint8_t *out; /* room for a payload */
    size_t size;  /* of the payload */
    TcEncoded best;
    uint8_t chosen[MOST_PLANES];
    double share;
} Call;

static int takes_words(const Call *call) { return call->itemsize >= 1 && tc_is_word((size_t)call->itemsize); }

static size_t n_words_of(const Call *call) { return (size_t)(call->raw.len / call->itemsize); }

/* Raise a MemoryError, unless the handler of a signal has raised something: without libzstd, frames are made in Python. */
static PyObject *no_memory(void) { return PyErr_Occurred() != NULL ? NULL : PyErr_NoMemory(); }

/* Check the arguments, find a worker, and do a work without the interpreter's lock. Return its result; release the arguments. */
static PyObject *do_call(Call *call, int fits, void (*work)(Call *), PyObject *(*result_of)(Call *)) {
    Py_ssize_t width = takes_words(call) ? call->itemsize : 1;
    PyObject *result = NULL;
    fits = fits && call->itemsize >= 1 && call->itemsize <= UINT32_MAX && call->raw.len <= MAX_CHUNK_BYTES &&
           (call->base.buf == NULL || call->base.len == call->raw.len) &&
           (call->codings.buf == NULL || call->codings.len == width);
    if (!fits)
        misfit();
    else if ((call->worker = tc_take_worker()) == NULL)
        PyErr_NoMemory();
    else {
        call->out = tc_area_of(call->worker, AREA_OTHER_PAYLOAD, (size_t)call->raw.len + OVERHEAD_BYTES);
        Py_BEGIN_ALLOW_THREADS;
        if (call->out != NULL)
            work(call);
        Py_END_ALLOW_THREADS;
        result = call->worker->has_failed ? no_memory() : result_of(call);
        tc_give_worker(call->worker);
    }
    PyBuffer_Release(&call->raw);
    PyBuffer_Release(&call->base);
    PyBuffer_Release(&call->codings);
    return result;
}

static PyObject *payload_of(Call *call) {
    return call->size == NOT_SMALLER ? no_memory() : PyBytes_FromStringAndSize((char *)call->out, (Py_ssize_t)call->size);
}

static void do_best(Call *call) {
    call->best = tc_encode_best(call->worker, call->raw.buf, (size_t)call->raw.len, (size_t)call->itemsize, NULL, call->out);
    call->size = call->best.size;
}

static PyObject *best_of(Call *call) {
    PyObject *payload = call->best.codec == RAW ? Py_NewRef(Py_None) : payload_of(call);
    return payload == NULL ? NULL : Py_BuildValue("iiN", call->best.codec, call->best.typesize, payload);
}

/* encode_best(raw, itemsize) -> (codec, typesize, payload or None for a raw chunk) */
static PyObject *encode_best(PyObject *module, PyObject *args) {
    Call call = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*n:encode_best", &call.raw, &call.itemsize))
        return NULL;
    return do_call(&call, 1, do_best, best_of);
}

static void do_compress(Call *call) {
    size_t room = tc_frame_bound((size_t)call->raw.len);
    if ((call->out = tc_area_of(call->worker, AREA_OTHER, room)) != NULL)
        call->size = tc_compress_whole(call->worker, call->level, call->out, room, call->raw.buf, (size_t)call->raw.len);
}

/* compress(raw, level) -> frame; level 0 is the coder of planes */
static PyObject *compress(PyObject *module, PyObject *args) {
    Call call = {.itemsize = 1};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*i:compress", &call.raw, &call.level))
        return NULL;
    return do_call(&call, call.level >= 0 && call.level < TC_N_LEVELS, do_compress, payload_of);
}

static void do_records(Call *call) {
    size_t n_bytes = (size_t)call->raw.len, itemsize = (size_t)call->itemsize, room = tc_frame_bound(n_bytes) + OVERHEAD_BYTES;
    int way = tc_way_for_records(n_bytes, itemsize);
    if ((call->out = tc_area_of(call->worker, AREA_OTHER, room)) != NULL)
        call->size = tc_encode_records(call->worker, call->raw.buf, n_bytes, itemsize, way, call->out, room);
}

/* encode_records(raw, itemsize) -> payload */
static PyObject *encode_records(PyObject *module, PyObject *args) {
    Call call = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*n:encode_records", &call.raw, &call.itemsize))
        return NULL;
    return do_call(&call, 1, do_records, payload_of);
}

static void do_planes(Call *call) {
    call->size = tc_encode_planes(call->worker, call->raw.buf, (size_t)call->raw.len, (size_t)call->itemsize, call->codings.buf,
                                  call->effort, NULL, call->out);
}

/* encode_planes(raw, itemsize, codings or None, effort) -> payload */
static PyObject *encode_planes(PyObject *module, PyObject *args) {
    Call call = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nz*i:encode_planes", &call.raw, &call.itemsize, &call.codings, &call.effort))
        return NULL;
    return do_call(&call, 1, do_planes, payload_of);
}

static void do_delta(Call *call) {
    call->size = tc_encode_delta(call->worker, call->raw.buf, (size_t)call->raw.len, (size_t)call->itemsize, call->base.buf,
                                 call->transform, (size_t)call->unit, call->codings.buf, call->effort, call->out);
}

/* encode_delta(raw, itemsize, base, transform, unit, codings or None, effort) -> payload */
static PyObject *encode_delta(PyObject *module, PyObject *args) {
    Call call = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*ny*inz*i:encode_delta", &call.raw, &call.itemsize, &call.base, &call.transform, &call.unit,
                          &call.codings, &call.effort))
        return NULL;
    int fits = call.transform >= PLAIN && call.transform <= NUDGED && call.unit >= 1 && call.base.len == call.raw.len &&
               tc_fits_unit(takes_words(&call) ? (size_t)call.itemsize : 1, (size_t)call.unit);
    return do_call(&call, fits, do_delta, payload_of);
}

static void do_codings(Call *call) {
    tc_choose_codings(call->worker, call->raw.buf, call->base.buf, n_words_of(call), (size_t)call->itemsize, SHARE_SAMPLE_WORDS,
                      call->chosen);
}

static PyObject *codings_of(Call *call) { return PyBytes_FromStringAndSize((char *)call->chosen, call->itemsize); }

/* choose_codings(raw, width, base or None) -> a byte for each plane */
static PyObject *choose_codings(PyObject *module, PyObject *args) {
    Call call = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nz*:choose_codings", &call.raw, &call.itemsize, &call.base))
        return NULL;
    return do_call(&call, takes_words(&call), do_codings, codings_of);
}

static void do_transform(Call *call) {
    size_t unit;
    tc_choose_transform(call->worker, call->raw.buf, (size_t)call->raw.len, (size_t)call->itemsize, call->base.buf,
                        call->codings.buf, call->at_any_cost, &call->transform, &unit);
    call->unit = (Py_ssize_t)unit;
}

static PyObject *transform_of(Call *call) { return Py_BuildValue("in", call->transform, call->unit); }

/* choose_transform(raw, width, base, codings, at_any_cost) -> (transform, words of a unit) */
static PyObject *choose_transform(PyObject *module, PyObject *args) {
    Call call = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*ny*y*p:choose_transform", &call.raw, &call.itemsize, &call.base, &call.codings,
                          &call.at_any_cost))
        return NULL;
    int fits = takes_words(&call) && call.base.len == call.raw.len && call.codings.len == call.itemsize;
    return do_call(&call, fits, do_transform, transform_of);
}

static void do_share(Call *call) {
    call->share = tc_estimate_share(call->raw.buf, call->base.buf, n_words_of(call), (size_t)call->itemsize);
}

static PyObject *share_of(Call *call) { return PyFloat_FromDouble(call->share); }

/* estimate_share(raw, width, base or None) -> the share of its size that the chunk takes */
static PyObject *estimate_share(PyObject *module, PyObject *args) {
    Call call = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y*nz*:estimate_share", &call.raw, &call.itemsize, &call.base))
        return NULL;
    return do_call(&call, takes_words(&call), do_share, share_of);
}

PyMethodDef tc_encode_methods[] = {
    {"encode_group", encode_group, METH_VARARGS, NULL},
    {"encode_best", encode_best, METH_VARARGS, NULL},
    {"compress", compress, METH_VARARGS, NULL},
    {"encode_records", encode_records, METH_VARARGS, NULL},
    {"encode_planes", encode_planes, METH_VARARGS, NULL},
    {"encode_delta", encode_delta, METH_VARARGS, NULL},
    {"choose_codings", choose_codings, METH_VARARGS, NULL},
    {"choose_transform", choose_transform, METH_VARARGS, NULL},
    {"estimate_share", estimate_share, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
