/* Zstandard frames (frames.h). */
#include "methods.h"

#include <stdlib.h>
#include <string.h>

#include "decode.h"
#include "frames.h"

size_t tc_frame_bound(size_t n_bytes) {
    /* ZSTD_compressBound; a small input may take a little more, relatively. */
    return n_bytes + (n_bytes >> 8) + (n_bytes < (128 << 10) ? ((128 << 10) - n_bytes) >> 11 : 0) + 64;
}

#ifdef TC_HAS_ZSTD

#include <zstd.h>
#include <zstd_errors.h>

const char *tc_zstd_version(void) { return ZSTD_versionString(); }

struct TcFrames {
    ZSTD_CCtx *ways[TC_N_WAYS];
    ZSTD_DCtx *reader;
};

TcFrames *tc_new_frames(void) { return calloc(1, sizeof(TcFrames)); }

void tc_free_frames(TcFrames *frames) {
    if (frames == NULL)
        return;
    for (int way = 0; way < TC_N_WAYS; way++)
        ZSTD_freeCCtx(frames->ways[way]);
    ZSTD_freeDCtx(frames->reader);
    free(frames);
}

/* TC_ENTROPY is little more than a Huffman coder. Its table of 64 hashes of 7 bytes finds only matches that are long or
 * frequent. The matches that level 1 finds in the bytes of floating point numbers are chance, and cost more room than they save.
 * TC_RECORDS is for shuffled records. Level 1 takes matches of 6 bytes, which are mostly chance in the planes of numbers.
 * Matches of 7 bytes take two thirds of its time, and less room. */
static ZSTD_CCtx *make_context(int way) {
    ZSTD_CCtx *context = ZSTD_createCCtx();
    if (context == NULL)
        return NULL;
    size_t error = 0;
    if (way == TC_ENTROPY || way == TC_RECORDS) {
        const struct { ZSTD_cParameter parameter; int value; } values[] = {
            {ZSTD_c_strategy, ZSTD_fast},
            {ZSTD_c_windowLog, way == TC_ENTROPY ? 17 : 18},
            {ZSTD_c_hashLog, way == TC_ENTROPY ? 6 : 13},
            {ZSTD_c_chainLog, 6},
            {ZSTD_c_searchLog, 1},
            {ZSTD_c_minMatch, 7},
            {ZSTD_c_targetLength, 0},
        };
        for (size_t at = 0; at < sizeof values / sizeof values[0]; at++)
            error |= ZSTD_isError(ZSTD_CCtx_setParameter(context, values[at].parameter, values[at].value));
    } else
        error = ZSTD_isError(ZSTD_CCtx_setParameter(context, ZSTD_c_compressionLevel, way));
    if (error) {
        ZSTD_freeCCtx(context);
        return NULL;
    }
    return context;
}

static size_t compress_in_blocks(ZSTD_CCtx *context, uint8_t *out, size_t room, const uint8_t *data, size_t n_bytes, size_t step) {
    ZSTD_outBuffer to = {out, room, 0};
    ZSTD_CCtx_reset(context, ZSTD_reset_session_only);
    if (ZSTD_isError(ZSTD_CCtx_setPledgedSrcSize(context, n_bytes)))
        return TC_NO_FRAME;
    for (size_t at = 0; at < n_bytes || at == 0; at += step) {
        size_t here = n_bytes - at < step ? n_bytes - at : step;
        int is_last = at + here == n_bytes;
        ZSTD_inBuffer from = {data + at, here, 0};
        size_t left;
        do
            left = ZSTD_compressStream2(context, &to, &from, is_last ? ZSTD_e_end : ZSTD_e_flush);
        while (!ZSTD_isError(left) && left != 0 && to.pos < to.size);
        if (ZSTD_isError(left) || left != 0) {
            ZSTD_CCtx_reset(context, ZSTD_reset_session_only);
            return TC_NO_FRAME;
        }
    }
    return to.pos;
}

size_t tc_compress(TcFrames *frames, int way, uint8_t *out, size_t room, const uint8_t *data, size_t n_bytes, size_t step) {
    if (frames->ways[way] == NULL && (frames->ways[way] = make_context(way)) == NULL)
        return TC_NO_FRAME_MEMORY;
    if (step != 0)
        return compress_in_blocks(frames->ways[way], out, room, data, n_bytes, step);
    size_t size = ZSTD_compress2(frames->ways[way], out, room, data, n_bytes);
    return ZSTD_isError(size) ? TC_NO_FRAME : size;
}

int tc_decompress(TcFrames *frames, const uint8_t *stored, size_t n_stored, uint8_t *out, size_t n_bytes) {
    uint32_t magic = 0;
    if (n_stored >= sizeof magic)
        memcpy(&magic, stored, sizeof magic);
    if (magic != ZSTD_MAGICNUMBER || ZSTD_getFrameContentSize(stored, n_stored) != n_bytes)
        return CHUNK_MALFORMED;
    /* Neither bytes nor other frames follow. */
    if (ZSTD_findFrameCompressedSize(stored, n_stored) != n_stored)
        return CHUNK_MALFORMED;
    if (frames->reader == NULL && (frames->reader = ZSTD_createDCtx()) == NULL)
        return CHUNK_NO_MEMORY;
    size_t n_made = ZSTD_decompressDCtx(frames->reader, out, n_bytes, stored, n_stored);
    if (ZSTD_isError(n_made) && ZSTD_getErrorCode(n_made) == ZSTD_error_memory_allocation)
        return CHUNK_NO_MEMORY;
    return n_made == n_bytes ? CHUNK_GOOD : CHUNK_MALFORMED;
}

#else

#include "watch.h"

const char *tc_zstd_version(void) { return ""; }

/* Contexts are objects of the package zstandard, one set for each thread that the interpreter knows. */
struct TcFrames {
    int unused;
};

TcFrames *tc_new_frames(void) { return calloc(1, sizeof(TcFrames)); }

void tc_free_frames(TcFrames *frames) { free(frames); }

/* Call a function of `native/_frames.py`; the interpreter's lock is held. Return NULL with an exception set if it fails. */
static PyObject *call(const char *name, PyObject *arguments) {
    PyObject *module = arguments == NULL ? NULL : PyImport_ImportModule("tensorcas_mlflow.native._frames");
    PyObject *function = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    PyObject *result = function == NULL ? NULL : PyObject_CallObject(function, arguments);
    Py_XDECREF(function);
    Py_XDECREF(module);
    Py_XDECREF(arguments);
    return result;
}

/* Take the interpreter's lock; return 0 without it if the call of the core stops for an exception. */
static int enter(PyGILState_STATE *state) {
    *state = PyGILState_Ensure();
    if (PyErr_Occurred() == NULL)
        return 1;
    PyGILState_Release(*state);
    return 0;
}

/* Release the lock. A status tells the caller that there is no memory. An exception that the handler of a signal has raised stays
 * set, and ends the call of the core. */
static void leave(PyGILState_STATE state) {
    if (PyErr_Occurred() != NULL && (PyErr_ExceptionMatches(PyExc_MemoryError) || !tc_stop()))
        PyErr_Clear();
    PyGILState_Release(state);
}

static PyObject *view_of(const uint8_t *data, size_t n_bytes, int flags) {
    static char nothing;
    return PyMemoryView_FromMemory(n_bytes ? (char *)data : &nothing, (Py_ssize_t)n_bytes, flags);
}

size_t tc_compress(TcFrames *frames, int way, uint8_t *out, size_t room, const uint8_t *data, size_t n_bytes, size_t step) {
    (void)frames;
    PyGILState_STATE state;
    size_t size = TC_NO_FRAME_MEMORY;
    if (!enter(&state))
        return size;
    PyObject *view = view_of(data, n_bytes, PyBUF_READ);
    PyObject *frame = view == NULL ? NULL : call("compress", Py_BuildValue("(iOn)", way, view, (Py_ssize_t)step));
    if (frame != NULL) {
        char *bytes = NULL;
        Py_ssize_t n_made = 0;
        if (PyBytes_AsStringAndSize(frame, &bytes, &n_made) == 0 && (size_t)n_made > room)
            size = TC_NO_FRAME;
        else if (bytes != NULL) {
            memcpy(out, bytes, (size_t)n_made);
            size = (size_t)n_made;
        }
        Py_DECREF(frame);
    }
    Py_XDECREF(view);
    leave(state);
    return size;
}

int tc_decompress(TcFrames *frames, const uint8_t *stored, size_t n_stored, uint8_t *out, size_t n_bytes) {
    (void)frames;
    PyGILState_STATE state;
    int status = CHUNK_NO_MEMORY;
    if (!enter(&state))
        return status;
    PyObject *frame = view_of(stored, n_stored, PyBUF_READ);
    PyObject *to = frame == NULL ? NULL : view_of(out, n_bytes, PyBUF_WRITE);
    PyObject *is_good = to == NULL ? NULL : call("decompress", Py_BuildValue("(OO)", frame, to));
    if (is_good != NULL) {
        status = is_good == Py_True ? CHUNK_GOOD : CHUNK_MALFORMED;
        Py_DECREF(is_good);
    }
    Py_XDECREF(frame);
    Py_XDECREF(to);
    leave(state);
    return status;
}

#endif
