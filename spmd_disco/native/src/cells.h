/* Arrivals and collectives of the workers of one node, through memory that they share.
 *
 * A block of shared memory holds, for each worker, what it has left and failed, and for each
 * communicator (the world, and the worker's group) and member a few alternating cells. A member
 * that comes to an operation posts a record in its next cell; its records are a stream in the order
 * of (command, index). Beside each cell lies a slot for the payload of a small operation. */
#ifndef SPMD_DISCO_CELLS_H
#define SPMD_DISCO_CELLS_H

#include "cells_shared.h"
#include "native.h"
#include "node.h"
#include "peer_mail.h"
#include "pool.h"
#include "segment.h"

enum {
    /* Cells of one member on one communicator. */
    CELLS_EACH = 4,
    /* The most bytes of one member's payload that go through its slots. */
    CELLS_SLOT = 16384,
    /* Large operations on ordinary memory go through these in turn: as many pieces of so many
     * bytes, small enough that what one member has written is in a cache when the next one reads
     * it. */
    CELLS_STAGES = 4,
    CELLS_PIECE = 65536,
    CELLS_STAGING = 2 * CELLS_STAGES * CELLS_PIECE,
};

enum cells_operation {
    CELLS_ALLREDUCE = 1,
    CELLS_ALLGATHER = 2,
    CELLS_BROADCAST = 3,
    CELLS_SCATTER = 4,
    CELLS_GATHER = 5,
};

/* The answers to Python, by the same numbers as in peer_ccl.py. */
enum cells_verdict {
    /* Nothing has been posted: the arguments are not for the fast path. */
    CELLS_OTHERWISE = -1,
    CELLS_WAIT = 0,
    CELLS_MOVED = 1,
    CELLS_MISMATCH = 2,
    CELLS_GONE = 3,
    /* A process has ended in the middle of a move. */
    CELLS_DEAD = 4,
    /* Not told to Python: all have come, and the data is to be moved. */
    CELLS_ARRIVED = 5,
};

#define CELLS_DIED (-1)

enum cells_decision { CELLS_UNDECIDED, CELLS_GO, CELLS_WITHDRAWN };

/* What a record of a large operation says of its member: which of its arrays lie in its memory
 * pool, where all can reach them; whether it can read the memory of all others; and whether there
 * are more workers than cores. */
enum {
    CELLS_SEND_IN_POOL = 1,
    CELLS_RECV_IN_POOL = 2,
    CELLS_READS_ALL = 4,
    CELLS_CROWDED = 8,
};

/* Shared ----------------------------------------------------------------------------------------*/

/* What a worker tells everybody. */
struct cells_worker {
    /* The newest command in which it takes no part any more. */
    _Atomic int64_t left;
    /* The newest command that failed there, times two; odd where only a peer was the cause. */
    _Atomic int64_t failed;
    /* The command with which it has closed, CELLS_DIED where its process has ended, or 0. */
    _Atomic int64_t closed;
    _Atomic int64_t pid;
    /* Where in its own memory there is which number, by which others can tell that they read that
     * process's memory. */
    _Atomic uint64_t probe_address;
    _Atomic uint64_t probe;
    /* Whether it has found that it can read the memory of all others. */
    _Atomic uint32_t reads_all;
} __attribute__((aligned(CELLS_APART)));

/* What a member of a communicator tells the others beside its records. */
struct cells_member {
    /* How many of its own records it is done with: for these it reads nobody's slots any more. */
    _Atomic uint64_t resolved;
    /* Steps of large moves that it has done. Each move adds the same to all three on all
     * members. */
    _Atomic uint64_t put;
    _Atomic uint64_t reduced;
    _Atomic uint64_t taken;
    /* The first member's: pieces of such moves that the members share out as they come. */
    _Atomic uint64_t claimed;
} __attribute__((aligned(CELLS_APART)));

struct cells_cell {
    /* 2 s + 2 for the complete s-th record of the stream, 2 s + 1 while it is written. */
    _Atomic uint64_t sequence;
    _Atomic int64_t command;
    _Atomic uint64_t index;
    /* Of the signature: that which must be the same on all members. */
    _Atomic uint64_t digest;
    /* Whether a large operation goes ahead: see decide(). */
    _Atomic uint32_t decision;
    _Atomic uint32_t flags;
    /* Offsets in the member's pool, or else addresses in its process. */
    _Atomic uint64_t send;
    _Atomic uint64_t recv;
    uint64_t unused;
    uint8_t signature[CELLS_APART];
} __attribute__((aligned(CELLS_APART)));

/* One worker's own view -------------------------------------------------------------------------*/

/* Where a member stands, as far as this one has looked. */
struct cells_peer {
    struct cells_worker *worker;
    struct cells_member *told;
    struct cells_cell *cells;
    uint8_t *slots;
    uint8_t *staging;
    /* The number of the record of its stream that is looked at next. */
    uint64_t cursor;
    /* Whether it has arrived at the operation under way. */
    bool here;
    /* A descriptor of its process, once one was needed; or -1. */
    int process;
};

enum cells_resolution { CELLS_OPEN, CELLS_DONE, CELLS_RELEASED };

struct cells_members {
    int size;
    int rank;
    int first;
    struct cells_peer *peers;
    /* How many records this member has posted here. */
    uint64_t posted;
    /* The number of the newest of them at which all members were seen. */
    uint64_t met;
    /* What those that are still in the cells were about, and what became of them. */
    struct {
        int64_t command;
        uint64_t index;
        enum cells_resolution resolution;
    } own[CELLS_EACH];
    /* The newest command that cannot be done here because somebody has gone, and, where that one
     * had come and took it back, the member. */
    int64_t gone;
    int withdrawn;
    /* The command that the index counts in. */
    int64_t command;
    uint64_t index;
    /* Steps of all large moves so far, and pieces that have been claimed in them. */
    uint64_t steps;
    uint64_t claimed;
    /* The signatures of all members after a mismatch. */
    uint8_t *signatures;
};

enum cells_stage { CELLS_IDLE, CELLS_READY, CELLS_POSTED };

/* The operation under way. */
struct cells_under_way {
    enum cells_stage stage;
    struct cells_members *members;
    enum cells_operation operation;
    int64_t command;
    uint64_t index;
    uint64_t digest;
    uint8_t signature[CELLS_SIGNATURE];
    /* For an allreduce: as disco_reduce has them. */
    int kind;
    int dtype;
    size_t count;
    /* The bytes of one member's part. */
    size_t bytes;
    const uint8_t *send;
    uint8_t *recv;
    bool large;
    uint32_t flags;
    uint64_t send_place;
    uint64_t recv_place;
    /* Kept while they are used. */
    PyObject *owners[2];
    /* Called when the data has been moved, before any signal handler of Python's runs; or NULL. */
    PyObject *after;
    int missing;
    bool differs;
};

/* A signature that was needed before. The key is what it is made of. */
enum { CELLS_KNOWN = 256, CELLS_DIMENSIONS = 6 };

struct cells_known {
    PyObject *dtype;
    int operation;
    int kind;
    int ndim;
    Py_ssize_t shape[CELLS_DIMENSIONS];
    /* What follows from it. */
    bool fast;
    int code;
    size_t itemsize;
    size_t count;
    uint64_t digest;
    uint8_t signature[CELLS_SIGNATURE];
};

typedef struct {
    PyObject_HEAD
    SegmentObject *block;
    int worker;
    int num_workers;
    struct cells_worker *own;
    struct cells_members world;
    /* Of size 0 where there is only one group. */
    struct cells_members group;
    int64_t command;
    bool closed;
    /* A thread is in here that has released the GIL. */
    bool busy;
    struct cells_under_way op;
    struct mail mail;
    /* Called with (operation, kind, dtype, shape); returns (signature, digest, itemsize, the code
     * of the dtype for reductions), or None where Python is to do it. */
    PyObject *describe;
    /* By the name that a user gives it, the number of a reduction. */
    PyObject *kinds;
    PyTypeObject *array_type;
    struct cells_known known[CELLS_KNOWN];
    int64_t spin_ns;
    int polls_per_yield;
    uint64_t probe;
    /* Whether the memory of all other workers can be read: yes, no, or 0 for not known yet. */
    int reads_all;
    /* Whether the operation under way stands in this worker's status line. */
    bool is_shown;
    /* Where those who sleep are woken, or NULL. */
    NodeObject *node;
    /* The workers' memory pools, or NULL. */
    PoolTableObject *pools;
} CellsObject;

/* cells.c ---------------------------------------------------------------------------------------*/

struct cells_layout {
    size_t workers, members[2], cells[2], slots[2], staging[2], mail, size;
};

struct cells_layout cells_lay_out(int num_workers, int num_groups);
/* Fill in a communicator; 0, or -1 with an exception. */
int cells_make_members(CellsObject *self, struct cells_members *c,
                       const struct cells_layout *l, int which, int first, int size);
void cells_free_members(struct cells_members *c);

/* The cell of a member that is here, and the slot beside it. */
static inline struct cells_cell *
cells_cell_of(const struct cells_peer *p)
{
    return &p->cells[p->cursor % CELLS_EACH];
}

static inline const uint8_t *
cells_slot_of(const struct cells_peer *p)
{
    return p->slots + p->cursor % CELLS_EACH * CELLS_SLOT;
}

static inline int64_t
cells_left_by(const struct cells_peer *p)
{
    return atomic_load_explicit(&p->worker->left, memory_order_acquire);
}

/* Have those looked up who wait for something of these members. */
static inline void
cells_ring(CellsObject *self, const struct cells_members *c)
{
    if (self->node != NULL)
        node_ring_bells(&self->node->node, c->first, c->first + c->size);
}

/* One look at everything that the operation under way waits for. No GIL needed. */
enum cells_verdict cells_step(CellsObject *self, bool look_at_left);
/* Note that this member is done with its newest record. */
void cells_resolve(struct cells_under_way *op, enum cells_resolution resolution);

/* cells_run.c -----------------------------------------------------------------------------------*/

/* Polls between two yields: with fewer cores than workers a peer may come only when this one makes
 * room. */
enum { CELLS_POLLS = 16, CELLS_POLLS_CROWDED = 4 };

/* Go on with the operation under way, and wait for a short while. Returns the verdict, or -2 with
 * an exception. */
int cells_run(CellsObject *self, int64_t spin_ns);
/* Break it off. Where the others count on this member, its part is done. 0, or -1 with an
 * exception. */
int cells_break_off(CellsObject *self);
/* Let go of what an operation held. */
void cells_let_go(struct cells_under_way *op);
/* Begin to move `bytes` for each member, and return the verdict as Python's integer. The rest of
 * the operation under way has been filled in. */
PyObject *cells_go(CellsObject *self, struct cells_members *c, int operation, size_t bytes,
                   const uint8_t *send, uint8_t *recv, bool staged);
/* Say that this worker takes no part any more in commands up to this one. */
void cells_has_left(CellsObject *self, int64_t command);

/* The type's methods ----------------------------------------------------------------------------*/

/* Whether the memory has been given back; what is called then anyway does nothing. */
static inline bool
cells_released(const CellsObject *self)
{
    return self->block == NULL;
}

static inline PyObject *
cells_refuse(void)
{
    return PyErr_Format(PyExc_RuntimeError, "the data plane has been closed");
}

/* cells_arrays.c: whether arrays are laid out in memory as the fast path takes it. */
bool cells_probe(PyObject *const *examples, PyObject *dtype, uint8_t *address);
PyObject *cells_allreduce(CellsObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *cells_allgather(CellsObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *cells_gather(CellsObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *cells_broadcast(CellsObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *cells_scatter(CellsObject *self, PyObject *const *args, Py_ssize_t nargs);

/* Whether an argument is the number of a worker, and which; else there is an exception. */
bool cells_take_worker(const CellsObject *self, PyObject *arg, const char *method, int *worker);

/* cells_messages.c */
PyObject *cells_send(CellsObject *self, PyObject *args);
PyObject *cells_letter(CellsObject *self, PyObject *arg);
PyObject *cells_read(CellsObject *self, PyObject *args);
PyObject *cells_drop(CellsObject *self, PyObject *arg);
PyObject *cells_pump(CellsObject *self, PyObject *unused);

/* peer_moves.c ----------------------------------------------------------------------------------*/

/* Do a large operation to which all members have come: MOVED, or DEAD. Without the GIL. */
enum cells_verdict peer_move(CellsObject *self);
/* Find out whether the memory of all other workers can be read. */
bool peer_reads_all(CellsObject *self);

#endif
