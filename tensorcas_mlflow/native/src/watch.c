/* Signals during long calls (watch.h). */
#include "methods.h"

#include <time.h>

#include "watch.h"

static const uint64_t LOOK_NS = 100000000;

static _Thread_local TcWatch *current;
static _Thread_local int is_helper; /* a thread of the pool: it has no state of the interpreter, and asks no handlers */

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

void tc_leave(TcWatch *watch) {
    watch->before = current;
    watch->next_look_ns = now_ns() + LOOK_NS;
    atomic_init(&watch->stops, 0);
    current = watch;
    watch->state = PyEval_SaveThread();
}

int tc_come_back(TcWatch *watch) {
    PyEval_RestoreThread(watch->state);
    current = watch->before;
    return !atomic_load_explicit(&watch->stops, memory_order_relaxed);
}

int tc_stops(void) {
    TcWatch *watch = current;
    if (watch == NULL)
        return 0;
    if (atomic_load_explicit(&watch->stops, memory_order_relaxed))
        return 1;
    if (is_helper || now_ns() < watch->next_look_ns)
        return 0;
    PyEval_RestoreThread(watch->state);
    int has_raised = PyErr_CheckSignals() < 0;
    watch->state = PyEval_SaveThread();
    watch->next_look_ns = now_ns() + LOOK_NS;
    atomic_store_explicit(&watch->stops, has_raised, memory_order_relaxed);
    return has_raised;
}

int tc_stop(void) {
    if (current != NULL && !is_helper)
        atomic_store_explicit(&current->stops, 1, memory_order_relaxed);
    return !is_helper;
}

TcWatch *tc_watch(void) { return current; }

void tc_work_for(TcWatch *watch) {
    current = watch;
    is_helper = watch != NULL;
}
