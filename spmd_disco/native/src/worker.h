/* A worker's native part; see worker.c. */
#ifndef SPMD_DISCO_WORKER_H
#define SPMD_DISCO_WORKER_H

#include "native.h"
#include "node.h"

/* What the native module knows of protocol.py: the head of a command, and some actions. */
typedef struct __attribute__((packed)) {
    uint64_t number;
    uint8_t action, flags;
    uint32_t kills;
    int32_t target;
    uint64_t destination;
} CommandHead;

enum { KILL_REG = 1, CALL_PACKED = 3, DEBUG_GET_FROM_REMOTE = 7, ALL = -1 };

/* Kinds of references to functions, see codec.py. */
enum {
    FUNCTION_REGISTER = 0,
    FUNCTION_GLOBAL = 1,
    FUNCTION_IMPORT = 2,
    FUNCTION_KNOWN = 4,
    FUNCTION_NONE = 5,
    DIGEST = 16,
};

enum { MOST_ARGUMENTS = 255 };

typedef struct {
    PyObject_HEAD
    PyObject *registers;   /* dict: register -> value */
    PyObject *function;    /* what the running command calls, or None */
    PyObject *begin;       /* called with each command's number, or None */
    PyObject *leave;       /* called with the number of each command that is over, or None */
    PyObject *on_command;  /* called after each function, or None */
    PyObject *functions;   /* dict: reference -> what it means, kept by the registry */
    PyObject *codes;       /* OrderedDict: digest -> [pickle, function or None, size] */
    PyObject *failures;    /* list: what the controller has not heard of */
    NodeObject *node;      /* whose status line it writes, or NULL */
    PyObject *told;        /* the function that stands there */
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

/* What an encoded reference to a global function or an import path means, borrowed; NULL with
 * nothing set where that has to be looked up. */
PyObject *worker_named(WorkerState *self, PyObject *reference);

/* A function that was sent by value before, borrowed; NULL with nothing set where it is not at hand. */
PyObject *worker_known(WorkerState *self, PyObject *digest);

/* Counts an entry of an OrderedDict as used last, as both sides of a session do alike. */
int move_to_end(PyObject *codes, PyObject *key);

/* The value of a register, borrowed; NULL where it has none or holds a failure. */
PyObject *worker_value(WorkerState *self, uint64_t id);

int worker_drop(WorkerState *self, uint64_t id);

/* How often a process has been forked off since the module was loaded, down to this one. */
extern unsigned fork_count;

/* The methods `step` and `drain`; see steps.c and the stub file. */
PyObject *worker_step(WorkerState *self, PyObject *message);
PyObject *worker_drain(WorkerState *self, PyObject *args);

#endif
