/* How the native module publishes commands; see submit.c. All with the GIL held. */
#ifndef SPMD_DISCO_SUBMIT_H
#define SPMD_DISCO_SUBMIT_H

#include "codec.h"
#include "controller.h"

/* Calls a method without arguments, for its effect. */
int call_method(PyObject *object, PyObject *name);

/* Take the session's lock, and let go of it: what is to be raised stays set, unless the latter
 * raises itself. Both return 0 or -1. */
int acquire_lock(ControllerState *self);
int release_lock(ControllerState *self);

/* The number of the next command, or -1. */
long long next_number(ControllerState *self);

/* Publishes a call and runs worker 0's half. `dead` registers have been noted in it; `digest` is
 * that of a function by value. Returns -1 with what is to be raised. With the lock held. */
int publish_and_run(ControllerState *self, Buffer *buffer, Call *call, size_t dead,
                    PyObject *digest);

/* Publishes a command in which worker 0 has nothing to do but to drop registers. Returns its number,
 * 0 where that is Python's to do, or -1. Takes the lock. */
long long tell(ControllerState *self, int action, uint64_t id, long target);

/* Variables that hold the names of attributes, and those names. */
typedef struct {
    PyObject **where;
    const char *text;
} Name;

int intern_names(const Name *names, size_t count);
int prepare_submit(void);

#endif
