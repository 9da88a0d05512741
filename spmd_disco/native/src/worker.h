/* A worker's native part; see worker.c. */
#ifndef SPMD_DISCO_WORKER_H
#define SPMD_DISCO_WORKER_H

#include "native.h"

typedef struct {
    PyObject_HEAD
    PyObject *registers;   /* dict: register -> value */
    PyObject *function;    /* what the running command calls, or None */
    PyObject *begin;       /* called with each command's number, or None */
    PyObject *on_command;  /* called after each function, or None */
    PyObject *functions;   /* dict: reference -> global function, kept by the registry */
    PyObject *codes;       /* OrderedDict: digest -> [pickle, function or None, size] */
    long long number, finished, interrupted_through;
    unsigned long thread;
    int worker_id;
    char running, closed;
} WorkerState;

extern PyTypeObject *WorkerState_Type;

/* The worker whose function runs in this thread; borrowed, or NULL. */
PyObject *current_worker(void);

/* One call of a function: what it calls and what it is given. */
typedef struct {
    long long number;
    uint64_t destination;
    /* The function itself, or the register that holds it. */
    PyObject *function;
    uint64_t function_register;
    /* Either the arguments as the controller has them, with handles for registers, or encoded. */
    PyObject *const *arguments;
    Py_ssize_t count;
    const uint8_t *encoded;
    size_t encoded_size;
} Call;

/* Runs a call whose dead registers have been dropped. Returns a new reference: None, or the
 * exception that it failed with. NULL with an exception set: it was interrupted in between. */
PyObject *worker_run(WorkerState *self, const Call *call);

/* A function that was sent by value before, borrowed; NULL with nothing set where it is not at hand. */
PyObject *worker_known(WorkerState *self, PyObject *digest);

/* Counts an entry of an OrderedDict as used last, as both sides of a session do alike. */
int move_to_end(PyObject *codes, PyObject *key);

int worker_drop(WorkerState *self, uint64_t id);

/* How often a process has been forked off since the module was loaded, down to this one. */
extern unsigned fork_count;

#endif
