/* The process's pool of threads (pool.h).
 *
 * Calls stand in a list; an idle thread joins the first one that wants threads. One mutex guards the list. A fork takes it too,
 * so the child finds the list whole: there the pool has no threads, and starts its own at the next call. */
#include "pool.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "watch.h"

enum { STACK_BYTES = 4 << 20 };

typedef struct Call {
    struct Call *next;
    TcTask task;
    void *context;
    TcWatch *watch;
    size_t n_tasks;
    atomic_size_t n_begun; /* may run past n_tasks */
    size_t n_joined;       /* threads that have joined, the caller included: the next slot */
    size_t n_wanted;       /* threads that may join */
    size_t n_working;      /* threads of the pool at work */
} Call;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t has_work = PTHREAD_COND_INITIALIZER;
static pthread_cond_t is_done = PTHREAD_COND_INITIALIZER;
static Call *first_call;
static size_t n_pool_threads, n_idle;
static int forks_are_seen_to;

static void before_fork(void) { pthread_mutex_lock(&lock); }

static void in_parent(void) { pthread_mutex_unlock(&lock); }

static void in_child(void) {
    /* The mutex and the conditions may hold traces of threads that the child does not have. */
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&has_work, NULL);
    pthread_cond_init(&is_done, NULL);
    first_call = NULL;
    n_pool_threads = n_idle = 0;
}

static void take_part(Call *call, size_t slot) {
    for (;;) {
        size_t index = atomic_fetch_add_explicit(&call->n_begun, 1, memory_order_relaxed);
        if (index >= call->n_tasks || tc_stops())
            return;
        call->task(call->context, index, slot);
    }
}

static Call *find_call(void) {
    for (Call *call = first_call; call != NULL; call = call->next)
        if (call->n_joined < call->n_wanted && atomic_load_explicit(&call->n_begun, memory_order_relaxed) < call->n_tasks)
            return call;
    return NULL;
}

static void *work(void *unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        Call *call = find_call();
        if (call == NULL) {
            n_idle++;
            pthread_cond_wait(&has_work, &lock);
            n_idle--;
            continue;
        }
        size_t slot = call->n_joined++;
        call->n_working++;
        pthread_mutex_unlock(&lock);
        tc_work_for(call->watch);
        take_part(call, slot);
        tc_work_for(NULL);
        pthread_mutex_lock(&lock);
        if (--call->n_working == 0)
            pthread_cond_broadcast(&is_done);
    }
    return NULL;
}

/* Start one more thread, which gets no signals: they belong to the interpreter. The lock is held. */
static int start_thread(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0)
        return 0;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int is_started = pthread_create(&thread, &attributes, work, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    n_pool_threads += (size_t)is_started;
    return is_started;
}

void tc_run(TcTask task, void *context, size_t n_tasks, size_t n_threads) {
    n_threads = n_threads < n_tasks ? n_threads : n_tasks;
    n_threads = n_threads < TC_MOST_THREADS ? n_threads : TC_MOST_THREADS;
    if (n_threads <= 1) {
        for (size_t index = 0; index < n_tasks && !tc_stops(); index++)
            task(context, index, 0);
        return;
    }
    Call call = {.task = task, .context = context, .watch = tc_watch(), .n_tasks = n_tasks, .n_joined = 1, .n_wanted = n_threads};
    Call **end = &first_call;
    pthread_mutex_lock(&lock);
    if (!forks_are_seen_to)
        forks_are_seen_to = pthread_atfork(before_fork, in_parent, in_child) == 0;
    while (*end != NULL)
        end = &(*end)->next;
    *end = &call;
    while (n_pool_threads < n_threads - 1 && start_thread()) {
    }
    for (size_t helper = 1; helper < n_threads && helper <= n_idle; helper++)
        pthread_cond_signal(&has_work);
    pthread_mutex_unlock(&lock);

    take_part(&call, 0);

    pthread_mutex_lock(&lock);
    for (end = &first_call; *end != &call; end = &(*end)->next) {
    }
    *end = call.next;
    while (call.n_working > 0)
        pthread_cond_wait(&is_done, &lock);
    pthread_mutex_unlock(&lock);
}
