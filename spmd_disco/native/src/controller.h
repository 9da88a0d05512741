/* The controller's native part; see controller.c. */
#ifndef SPMD_DISCO_CONTROLLER_H
#define SPMD_DISCO_CONTROLLER_H

#include "native.h"
#include "ring.h"
#include "worker.h"

typedef struct ControllerState {
    PyObject_HEAD
    PyObject *lock;       /* an RLock, held from the publishing of a command to the end of worker 0's half */
    PyObject *channel;
    WorkerState *worker;
    PyObject *output;     /* of worker 0, or None */
    PyObject *interrupts; /* has an attribute `hit` */
    PyObject *dref_type;
    PyObject *references; /* dict: name of a function -> encoded reference, kept by the registry */
    PyObject *known;      /* gives the digest of a function that went by value before, or None */
    PyObject *codes;      /* OrderedDict: digest -> pickle, of those that the workers remember */
    RingObject *ring;     /* which the channel goes by, or NULL */
    RepliesObject *boxes; /* and the workers' replies to it */
    PyObject *replies;    /* dict: (worker, command) -> what has come */
    PyObject *unreported; /* list: failures that came with replies that nobody waited for */
    unsigned long long failures_seen; /* of all workers, at the last sync point of all */
    /* What the workers have been told of: the import path and the level of the log. */
    PyObject *path, *level;
    unsigned long long registers; /* the last that was given away */
    unsigned long long *dead;     /* registers whose handles have died */
    size_t dead_count, dead_capacity;
    unsigned forks;
    char closed, submitting;
    char alone; /* worker 0 is the only one */
} ControllerState;

extern PyTypeObject *ControllerState_Type;

/* Notes that a register's handle has died. Needs the GIL, raises nothing. */
void controller_bury(ControllerState *self, uint64_t id);

/* Drops the first so many dead registers on worker 0, too. More may die by that. */
int drop_dead(ControllerState *self, size_t count);

/* Whether this thread may use the session, and nothing is to be reported that is known of. */
bool is_quiet(const ControllerState *self);

#endif
