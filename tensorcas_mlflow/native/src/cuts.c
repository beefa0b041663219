/* Content-defined cuts: the search for the next place whose window has a small hash (`base/content_cuts.py`). */
#include "methods.h"

#include <stdint.h>

enum { WINDOW_BYTES = 32, N_GEARS = 256, N_LANES = 4, LANE_BYTES = 1024 };

/* Hash the bytes before a place of `data`, as many as still count once one more is added. */
static uint32_t hash_before(const uint8_t *before, int64_t n_before, const uint8_t *data, int64_t place,
                            const uint32_t *gears) {
    uint32_t hash = 0;
    for (int64_t at = place - WINDOW_BYTES + 1; at < place; at++) {
        if (at >= 0)
            hash = 2 * hash + gears[data[at]];
        else if (n_before + at >= 0)
            hash = 2 * hash + gears[before[n_before + at]];
    }
    return hash;
}

/* Return the first byte from `at` on, before `stop`, that ends a window with a hash below `small`; `stop` if none does. */
static int64_t scan(uint32_t hash, const uint8_t *data, int64_t at, int64_t stop, uint32_t small,
                    const uint32_t *gears) {
    for (; at < stop; at++) {
        hash = 2 * hash + gears[data[at]];
        if (hash < small)
            break;
    }
    return at;
}

/* Return the first place from `first` to `stop` that ends a window with a hash below `small`; 0 if there is none.

   A place is a number of bytes of `data`. A byte leaves the hash by itself, 32 bytes later. So stretches of the data can
   be hashed side by side, which is faster: one hash waits for the one before. */
static int64_t find(const uint8_t *before, int64_t n_before, const uint8_t *data, int64_t first, int64_t stop,
                    uint32_t small, const uint32_t *gears) {
    int64_t at = first - 1;
    for (; stop - at >= N_LANES * LANE_BYTES; at += N_LANES * LANE_BYTES) {
        uint32_t hashes[N_LANES], least[N_LANES];
        for (int lane = 0; lane < N_LANES; lane++) {
            hashes[lane] = hash_before(before, n_before, data, at + lane * LANE_BYTES, gears);
            least[lane] = UINT32_MAX;
        }
        for (int64_t nth = at; nth < at + LANE_BYTES; nth++) {
            for (int lane = 0; lane < N_LANES; lane++) {
                hashes[lane] = 2 * hashes[lane] + gears[data[nth + lane * LANE_BYTES]];
                least[lane] = hashes[lane] < least[lane] ? hashes[lane] : least[lane];
            }
        }
        for (int lane = 0; lane < N_LANES; lane++) {
            int64_t begin = at + lane * LANE_BYTES;
            if (least[lane] < small)
                return scan(hash_before(before, n_before, data, begin, gears), data, begin, stop, small, gears) + 1;
        }
    }
    if (at >= stop)
        return 0;
    at = scan(hash_before(before, n_before, data, at, gears), data, at, stop, small, gears);
    return at < stop ? at + 1 : 0;
}

static PyObject *find_cut(PyObject *module, PyObject *args) {
    Py_buffer before, data, gears;
    long long first, stop;
    unsigned int small;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*LLIy*:find_cut", &before, &data, &first, &stop, &small, &gears))
        return NULL;
    PyObject *result = NULL;
    if (first < 1 || stop > data.len || gears.len != N_GEARS * (Py_ssize_t)sizeof(uint32_t) ||
        (uintptr_t)gears.buf % sizeof(uint32_t) != 0) {
        PyErr_SetString(PyExc_ValueError, "places lie between 1 and the size of the data, and each byte has a number");
    } else {
        int64_t found = 0;
        Py_BEGIN_ALLOW_THREADS;
        if (first <= stop)
            found = find(before.buf, before.len, data.buf, first, stop, small, gears.buf);
        Py_END_ALLOW_THREADS;
        result = PyLong_FromLongLong(found);
    }
    PyBuffer_Release(&before);
    PyBuffer_Release(&data);
    PyBuffer_Release(&gears);
    return result;
}

PyMethodDef tc_cut_methods[] = {
    {"find_cut", find_cut, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
