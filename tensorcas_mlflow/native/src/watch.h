/* Long calls look for signals, so that Ctrl-C ends them within a fraction of a second. */
#ifndef TC_WATCH_H
#define TC_WATCH_H

#include <stdatomic.h>
#include <stdint.h>

/* One call from Python, while it works without the interpreter's lock. */
typedef struct TcWatch {
    struct TcWatch *before; /* of the same thread: a signal's handler may call the core too */
    void *state;            /* the interpreter's state of the calling thread */
    uint64_t next_look_ns;
    atomic_int stops;
} TcWatch;

/* Release the interpreter's lock and begin to watch. */
void tc_leave(TcWatch *watch);

/* Take the lock again and end the watch. Return 0 with an exception set if the handler of a signal has raised one; the work
 * is then incomplete. */
int tc_come_back(TcWatch *watch);

/* Tell whether the call stops early. Its loops ask at each step: ten times a second the calling thread runs the handlers of
 * signals. Whatever the bytes that a call works on, it asks again within a step of bounded size. */
int tc_stops(void);

/* Stop the call that this thread works for, because the interpreter has an exception for its caller, and the lock is held. Return
 * 0 in a thread of the pool, which has no caller. */
int tc_stop(void);

/* The watch of the call that this thread works for; NULL outside of calls that watch. */
TcWatch *tc_watch(void);

/* Make a thread of the pool work for a call; NULL at the end. */
void tc_work_for(TcWatch *watch);

#endif
