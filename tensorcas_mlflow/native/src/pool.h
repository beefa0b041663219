/* Threads of the process: one call does many tasks, on the caller's thread and on threads that the pool keeps.
 *
 * The threads know nothing of Python: a task must not touch an object, nor need the interpreter's lock. */
#ifndef TC_POOL_H
#define TC_POOL_H

#include <stddef.h>

enum { TC_MOST_THREADS = 64 };

/* One task. `slot` numbers the threads of one call from 0; no two of them have the same one at a time, so it chooses a
 * thread's working memory. */
typedef void (*TcTask)(void *context, size_t index, size_t slot);

/* Do the tasks 0 to n_tasks - 1, each once, on at most n_threads threads, the caller among them (at most TC_MOST_THREADS).
 * Return when all are done, or when those under way are done if the call stops early (watch.h). Tasks begin in the order of their numbers. The call never fails: where no thread can be started,
 * fewer do the work. Several threads may call at once. A task must not call it. */
void tc_run(TcTask task, void *context, size_t n_tasks, size_t n_threads);

#endif
