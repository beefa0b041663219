/* Memory of the encoder: a worker for each call, which holds contexts and scratch memory, and buffers of payloads. */
#include "encode.h"

#include <pthread.h>
#include <stdlib.h>

static pthread_mutex_t workers_lock = PTHREAD_MUTEX_INITIALIZER;
static TcWorker *idle_workers = NULL;

static void free_worker(TcWorker *worker) {
    tc_free_frames(worker->frames);
    for (int use = 0; use < N_AREAS; use++)
        free(worker->areas[use]);
    tc_free_decoder(worker->decoder);
    free(worker);
}

TcWorker *tc_take_worker(void) {
    TcWorker *worker = NULL;
    if (pthread_mutex_trylock(&workers_lock) == 0) {
        worker = idle_workers;
        if (worker != NULL)
            idle_workers = worker->next;
        pthread_mutex_unlock(&workers_lock);
    }
    if (worker == NULL)
        worker = calloc(1, sizeof(TcWorker));
    if (worker != NULL)
        worker->has_failed = 0;
    return worker;
}

void tc_give_worker(TcWorker *worker) {
    for (int use = 0; use < N_AREAS; use++)
        if (worker->rooms[use] > KEPT_BYTES) {
            free(worker->areas[use]);
            worker->areas[use] = NULL;
            worker->rooms[use] = 0;
        }
    tc_trim_decoder(worker->decoder);
    if (pthread_mutex_trylock(&workers_lock) != 0) {
        free_worker(worker);
        return;
    }
    worker->next = idle_workers;
    idle_workers = worker;
    pthread_mutex_unlock(&workers_lock);
}

/* --- memory of payloads --- */

static struct {
    uint8_t *data;
    size_t room;
} idle_memory[MOST_IDLE];
static size_t n_idle;
static PyObject *payloads_type = NULL;

static void give_memory(uint8_t *data, size_t room) {
    if (room <= MOST_IDLE_BYTES && pthread_mutex_trylock(&workers_lock) == 0) {
        if (n_idle < MOST_IDLE) {
            idle_memory[n_idle].data = data;
            idle_memory[n_idle++].room = room;
            data = NULL;
        }
        pthread_mutex_unlock(&workers_lock);
    }
    free(data);
}

static uint8_t *take_memory(size_t needed, size_t *room) {
    uint8_t *data = NULL;
    if (needed <= MOST_IDLE_BYTES && pthread_mutex_trylock(&workers_lock) == 0) {
        for (size_t at = n_idle; at > 0 && data == NULL; at--)
            if (idle_memory[at - 1].room >= needed) {
                data = idle_memory[at - 1].data;
                *room = idle_memory[at - 1].room;
                idle_memory[at - 1] = idle_memory[--n_idle];
            }
        pthread_mutex_unlock(&workers_lock);
    }
    if (data == NULL) {
        *room = needed > LEAST_ROOM_BYTES ? needed : LEAST_ROOM_BYTES;
        data = malloc(*room);
    }
    return data;
}

static int view_payloads(PyObject *self, Py_buffer *view, int flags) {
    TcPayloads *payloads = (TcPayloads *)self;
    return PyBuffer_FillInfo(view, self, payloads->data, payloads->n_bytes, 1, flags);
}

static void free_payloads(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (((TcPayloads *)self)->data != NULL)
        give_memory(((TcPayloads *)self)->data, ((TcPayloads *)self)->room);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot payloads_slots[] = {
    {Py_tp_dealloc, free_payloads},
    {Py_bf_getbuffer, view_payloads},
    {0, NULL},
};
static PyType_Spec payloads_spec = {
    "tensorcas_mlflow.native._core.Payloads", sizeof(TcPayloads), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, payloads_slots,
};

TcPayloads *tc_make_payloads(size_t needed) {
    if (payloads_type == NULL && (payloads_type = PyType_FromSpec(&payloads_spec)) == NULL)
        return NULL;
    TcPayloads *payloads = (TcPayloads *)PyType_GenericAlloc((PyTypeObject *)payloads_type, 0);
    if (payloads != NULL && (payloads->data = take_memory(needed, &payloads->room)) == NULL) {
        Py_DECREF(payloads);
        PyErr_NoMemory();
        return NULL;
    }
    return payloads;
}

uint8_t *tc_area_of(TcWorker *worker, int use, size_t n_bytes) {
    if (worker->rooms[use] < n_bytes || worker->areas[use] == NULL) {
        size_t room = n_bytes < (64 << 10) ? 64 << 10 : n_bytes;
        free(worker->areas[use]);
        worker->areas[use] = malloc(room);
        worker->rooms[use] = worker->areas[use] == NULL ? 0 : room;
        if (worker->areas[use] == NULL)
            worker->has_failed = 1;
    }
    return worker->areas[use];
}

size_t tc_compress_in_blocks(TcWorker *worker, int way, uint8_t *out, size_t room, const uint8_t *data, size_t n_bytes, size_t step) {
    if (worker->frames == NULL)
        worker->frames = tc_new_frames();
    size_t size = worker->frames == NULL ? TC_NO_FRAME_MEMORY : tc_compress(worker->frames, way, out, room, data, n_bytes, step);
    if (size == TC_NO_FRAME_MEMORY)
        worker->has_failed = 1;
    return size >= TC_NO_FRAME_MEMORY ? NOT_SMALLER : size;
}

size_t tc_compress_whole(TcWorker *worker, int way, uint8_t *out, size_t room, const uint8_t *data, size_t n_bytes) {
    return tc_compress_in_blocks(worker, way, out, room, data, n_bytes, 0);
}
