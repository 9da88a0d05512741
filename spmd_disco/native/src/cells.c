/* Arrivals and small collectives through shared memory; cells.h says what lies in it.
 *
 * All or none: an operation (communicator, command, index) is done when the records of all members
 * have been posted, and by everybody then, since a record stays until all members are done with it
 * or have left its command. A member's record is therefore looked for before its word for what it
 * has left, and once more after that word: it may have arrived and then left.
 *
 * The shared memory is another process's to write. Whatever it holds, nothing is read or written
 * outside it, and no wait in here is without a bound: the callers wait, and can break off. */
#include "cells.h"

#include <sched.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "reduce.h"

/* Polls with the GIL held: most peers are there, or come at once. */
#define EAGER_POLLS 64
/* What peers have left is looked at less often than their cells: those lines change more often. */
#define POLLS_PER_LEFT 4
#define POLLS_PER_YIELD 16
#define POLLS_PER_YIELD_CROWDED 4

/* What an array object of NumPy's begins with, in all its versions: this is what extensions that
 * do without NumPy's headers rely on, and what probe() checks before any use. */
struct array {
    PyObject_HEAD
    uint8_t *data;
    int ndim;
    Py_ssize_t *shape;
    Py_ssize_t *strides;
    PyObject *base;
    PyObject *dtype;
    int flags;
};

enum { ARRAY_CONTIGUOUS = 0x1, ARRAY_ALIGNED = 0x100, ARRAY_WRITEABLE = 0x400 };

/* Layout ----------------------------------------------------------------------------------------*/

struct layout {
    size_t workers, members[2], cells[2], slots[2], staging[2], mail, size;
};

static struct layout
lay_out(int num_workers, int num_groups)
{
    struct layout l;
    size_t n = num_workers, at = CELLS_APART;
    l.workers = at;
    at += n * sizeof(struct cells_worker);
    /* The world, and the groups unless there is one. */
    for (int i = 0; i < (num_groups > 1 ? 2 : 1); i++) {
        l.members[i] = at;
        at += n * sizeof(struct cells_member);
        l.cells[i] = at;
        at += n * CELLS_EACH * sizeof(struct cells_cell);
        l.slots[i] = at;
        at += n * CELLS_EACH * CELLS_SLOT;
        l.staging[i] = at;
        at += n * CELLS_STAGING;
    }
    l.mail = at;
    l.size = at + mail_bytes(num_workers);
    return l;
}

static int
make_members(CellsObject *self, struct cells_members *c, const struct layout *l, int which,
             int first, int size)
{
    uint8_t *base = self->block->base;
    c->size = size;
    c->first = first;
    c->rank = self->worker - first;
    c->gone = c->command = c->withdrawn = -1;
    c->peers = PyMem_Calloc(size, sizeof *c->peers);
    c->signatures = PyMem_Calloc(size, CELLS_SIGNATURE);
    if (c->peers == NULL || c->signatures == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int m = 0; m < size; m++) {
        size_t w = first + m;
        struct cells_peer *p = &c->peers[m];
        p->worker = (struct cells_worker *)(base + l->workers) + w;
        p->told = (struct cells_member *)(base + l->members[which]) + w;
        p->cells = (struct cells_cell *)(base + l->cells[which]) + w * CELLS_EACH;
        p->slots = base + l->slots[which] + w * CELLS_EACH * CELLS_SLOT;
        p->staging = base + l->staging[which] + w * CELLS_STAGING;
        p->process = -1;
    }
    return 0;
}

/* Records ---------------------------------------------------------------------------------------*/

static inline bool
before(int64_t command, uint64_t index, int64_t other_command, uint64_t other_index)
{
    return command < other_command || (command == other_command && index < other_index);
}

enum sight { NOT_YET, HERE, PASSED };

/* Look for a member's record of (command, index) in its stream. Older ones are passed over. */
static enum sight
look(struct cells_peer *p, int64_t command, uint64_t index)
{
    for (;;) {
        struct cells_cell *cell = &p->cells[p->cursor % CELLS_EACH];
        uint64_t wanted = 2 * p->cursor + 2;
        uint64_t sequence = atomic_load_explicit(&cell->sequence, memory_order_acquire);
        if (sequence < wanted)
            return NOT_YET;
        if (sequence > wanted) {
            /* It has been overwritten, so this member has no use for it. */
            uint64_t newest = (sequence - 1) / 2;
            p->cursor++;
            if (newest > CELLS_EACH && p->cursor < newest - CELLS_EACH + 1)
                p->cursor = newest - CELLS_EACH + 1;
            continue;
        }
        int64_t its_command = atomic_load_explicit(&cell->command, memory_order_relaxed);
        uint64_t its_index = atomic_load_explicit(&cell->index, memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&cell->sequence, memory_order_relaxed) != wanted)
            continue;
        if (its_command == command && its_index == index)
            return HERE;
        if (!before(its_command, its_index, command, index))
            return PASSED;
        p->cursor++;
    }
}

/* The cell of a member that is here, and the slot beside it. */
static inline struct cells_cell *
cell_of(const struct cells_peer *p)
{
    return &p->cells[p->cursor % CELLS_EACH];
}

static inline const uint8_t *
slot_of(const struct cells_peer *p)
{
    return p->slots + p->cursor % CELLS_EACH * CELLS_SLOT;
}

static inline int64_t
left_by(const struct cells_peer *p)
{
    return atomic_load_explicit(&p->worker->left, memory_order_acquire);
}

/* Whether nobody needs any more what is in the cell that the next record goes to. */
static bool
cell_is_free(struct cells_members *c)
{
    if (c->posted < CELLS_EACH)
        return true;
    uint64_t number = c->posted - CELLS_EACH;
    int slot = number % CELLS_EACH;
    int64_t command = c->own[slot].command;
    uint64_t index = c->own[slot].index;
    /* Not done by anybody; or all have come to a later one since. */
    if (c->own[slot].resolution == CELLS_RELEASED || number < c->met)
        return true;
    for (int m = 0; m < c->size; m++) {
        struct cells_peer *p = &c->peers[m];
        if (m == c->rank || left_by(p) >= command)
            continue;
        enum sight sight = look(p, command, index);
        if (sight == NOT_YET)
            return false;
        if (sight == HERE
            && atomic_load_explicit(&p->told->resolved, memory_order_acquire) <= p->cursor)
            return false;
    }
    return true;
}

/* The payload of this member in a small operation. */
static size_t
payload(const struct cells_under_way *op)
{
    const struct cells_members *c = op->members;
    if (op->large)
        return 0;
    switch (op->operation) {
    case CELLS_BROADCAST:
        return c->rank == 0 ? op->bytes : 0;
    case CELLS_SCATTER:
        return c->rank == 0 ? op->bytes * c->size : 0;
    default:
        return op->bytes;
    }
}

/* Have those looked up who wait for something of these members. */
static inline void
ring(CellsObject *self, const struct cells_members *c)
{
    if (self->node != NULL)
        node_ring_bells(&self->node->node, c->first, c->first + c->size);
}

static void
post(CellsObject *self)
{
    struct cells_under_way *op = &self->op;
    struct cells_members *c = op->members;
    uint64_t number = c->posted;
    int slot = number % CELLS_EACH;
    struct cells_peer *me = &c->peers[c->rank];
    struct cells_cell *cell = &me->cells[slot];
    atomic_store_explicit(&cell->sequence, 2 * number + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&cell->command, op->command, memory_order_relaxed);
    atomic_store_explicit(&cell->index, op->index, memory_order_relaxed);
    if (atomic_load_explicit(&cell->digest, memory_order_relaxed) != op->digest) {
        atomic_store_explicit(&cell->digest, op->digest, memory_order_relaxed);
        memcpy(cell->signature, op->signature, CELLS_SIGNATURE);
    }
    size_t size = payload(op);
    if (size > 0)
        memcpy(me->slots + slot * CELLS_SLOT, op->send, size);
    if (op->large) {
        atomic_store_explicit(&cell->decision, CELLS_UNDECIDED, memory_order_relaxed);
        atomic_store_explicit(&cell->flags, op->flags, memory_order_relaxed);
        atomic_store_explicit(&cell->send, op->send_place, memory_order_relaxed);
        atomic_store_explicit(&cell->recv, op->recv_place, memory_order_relaxed);
    }
    c->own[slot].command = op->command;
    c->own[slot].index = op->index;
    c->own[slot].resolution = CELLS_OPEN;
    me->cursor = number;
    c->posted = number + 1;
    c->index = op->index + 1;
    op->stage = CELLS_POSTED;
    atomic_store_explicit(&cell->sequence, 2 * number + 2, memory_order_release);
    ring(self, c);
}

/* Note that this member is done with its newest record. */
static void
resolve(struct cells_under_way *op, enum cells_resolution resolution)
{
    struct cells_members *c = op->members;
    c->own[(c->posted - 1) % CELLS_EACH].resolution = resolution;
    atomic_store_explicit(&c->peers[c->rank].told->resolved, c->posted, memory_order_release);
    op->stage = CELLS_IDLE;
}

/* Say whether a large operation goes ahead, where all members have come to it.
 *
 * It does when the records of all are marked so, and everybody tries to mark them. A member that
 * must break off marks its own as withdrawn instead, unless that is marked already: then it stays,
 * since the others may have begun to move. So all come to the same answer. A small operation needs
 * none of that: what the others need of a member has come with its record. */
static bool
decide(struct cells_members *c)
{
    for (int m = 0; m < c->size; m++) {
        uint32_t found = CELLS_UNDECIDED;
        if (!atomic_compare_exchange_strong(&cell_of(&c->peers[m])->decision, &found, CELLS_GO)
            && found == CELLS_WITHDRAWN) {
            c->withdrawn = m;
            return false;
        }
    }
    return true;
}

/* One look at everything that the operation under way waits for. */
static enum cells_verdict
step(CellsObject *self, bool look_at_left)
{
    struct cells_under_way *op = &self->op;
    struct cells_members *c = op->members;
    if (op->stage == CELLS_READY) {
        if (c->gone >= op->command) {
            op->stage = CELLS_IDLE;
            return CELLS_GONE;
        }
        if (!cell_is_free(c)) {
            for (int m = 0; m < c->size; m++)
                if (m != c->rank && left_by(&c->peers[m]) >= op->command) {
                    c->gone = op->command;
                    op->stage = CELLS_IDLE;
                    return CELLS_GONE;
                }
            return CELLS_WAIT;
        }
        post(self);
    }
    for (int m = 0; m < c->size; m++) {
        struct cells_peer *p = &c->peers[m];
        if (p->here)
            continue;
        enum sight sight = look(p, op->command, op->index);
        if (sight == NOT_YET) {
            if (!look_at_left || left_by(p) < op->command)
                continue;
            sight = look(p, op->command, op->index);
        }
        if (sight != HERE) {
            c->gone = op->command;
            c->withdrawn = -1;
            resolve(op, CELLS_RELEASED);
            return CELLS_GONE;
        }
        p->here = true;
        op->missing--;
        if (atomic_load_explicit(&cell_of(p)->digest, memory_order_relaxed) != op->digest)
            op->differs = true;
    }
    if (op->missing > 0)
        return CELLS_WAIT;
    c->met = c->posted - 1;
    if (op->differs) {
        for (int m = 0; m < c->size; m++)
            memcpy(c->signatures + m * CELLS_SIGNATURE, cell_of(&c->peers[m])->signature,
                   CELLS_SIGNATURE);
        resolve(op, CELLS_DONE);
        return CELLS_MISMATCH;
    }
    if (op->large && !decide(c)) {
        c->gone = op->command;
        /* Others may still be deciding. */
        resolve(op, CELLS_DONE);
        return CELLS_GONE;
    }
    return CELLS_ARRIVED;
}

/* Moving ----------------------------------------------------------------------------------------*/

static void
move_small(struct cells_under_way *op)
{
    struct cells_members *c = op->members;
    size_t bytes = op->bytes;
    switch (op->operation) {
    case CELLS_ALLREDUCE: {
        const void *parts[c->size];
        for (int m = 0; m < c->size; m++)
            parts[m] = slot_of(&c->peers[m]);
        void *outs[1] = {op->recv};
        disco_reduce(op->dtype, op->kind, outs, 1, parts, c->size, op->count, 0);
        break;
    }
    case CELLS_ALLGATHER:
        for (int m = 0; m < c->size; m++)
            memcpy(op->recv + m * bytes, slot_of(&c->peers[m]), bytes);
        break;
    case CELLS_GATHER:
        if (c->rank == 0)
            for (int m = 0; m < c->size; m++)
                memcpy(op->recv + m * bytes, slot_of(&c->peers[m]), bytes);
        break;
    case CELLS_BROADCAST:
        if (c->rank != 0 || op->recv != op->send)
            memcpy(op->recv, slot_of(&c->peers[0]), bytes);
        break;
    case CELLS_SCATTER:
        memcpy(op->recv, slot_of(&c->peers[0]) + c->rank * bytes, bytes);
        break;
    }
}

/* Let go of what an operation held. */
static void
let_go(struct cells_under_way *op)
{
    Py_CLEAR(op->owners[0]);
    Py_CLEAR(op->owners[1]);
    Py_CLEAR(op->after);
}

/* Move the data of an operation to which all have come. Returns -2 with an exception where that is
 * one of what is called afterwards. */
static int
finish(CellsObject *self)
{
    struct cells_under_way *op = &self->op;
    enum cells_verdict verdict = CELLS_MOVED;
    if (op->large) {
        self->busy = true;
        Py_BEGIN_ALLOW_THREADS
        verdict = peer_move(self);
        Py_END_ALLOW_THREADS
        self->busy = false;
    } else
        move_small(op);
    resolve(op, CELLS_DONE);
    if (op->after == NULL || verdict != CELLS_MOVED)
        return verdict;
    PyObject *after = op->after;
    op->after = NULL;
    PyObject *result = PyObject_CallNoArgs(after);
    Py_DECREF(after);
    Py_XDECREF(result);
    return result == NULL ? -2 : (int)verdict;
}

/* Go on with the operation under way, and wait for a short while. Returns the verdict, or -2 with
 * an exception. */
static int
run(CellsObject *self, int64_t spin_ns)
{
    int verdict = CELLS_WAIT;
    for (int i = 0; i < EAGER_POLLS && verdict == CELLS_WAIT; i++) {
        verdict = step(self, i % POLLS_PER_LEFT == 0);
        if (verdict == CELLS_WAIT) {
            if (i % self->polls_per_yield == self->polls_per_yield - 1)
                break;
            relax();
        }
    }
    if (verdict == CELLS_WAIT && spin_ns > 0) {
        self->busy = true;
        Py_BEGIN_ALLOW_THREADS
        int64_t end = node_now() + spin_ns;
        for (int i = 1; verdict == CELLS_WAIT; i++) {
            if (i % self->polls_per_yield == 0) {
                sched_yield();
                if (node_now() >= end)
                    break;
            } else
                relax();
            verdict = step(self, i % POLLS_PER_LEFT == 0);
        }
        Py_END_ALLOW_THREADS
        self->busy = false;
    }
    if (self->node != NULL && (verdict == CELLS_WAIT) != self->is_shown) {
        self->is_shown = !self->is_shown;
        if (self->is_shown)
            node_set_operation(&self->node->node, self->op.command, self->op.index);
        else
            node_clear_operation(&self->node->node);
    }
    if (verdict == CELLS_ARRIVED)
        verdict = finish(self);
    if (verdict != CELLS_WAIT)
        let_go(&self->op);
    return verdict;
}

/* Say that this worker takes no part any more in commands up to this one. */
static void
leave(CellsObject *self, int64_t command)
{
    if (command <= atomic_load_explicit(&self->own->left, memory_order_relaxed))
        return;
    atomic_store_explicit(&self->own->left, command, memory_order_release);
    ring(self, &self->world);
}

/* Begin an operation whose arrays and signature have been filled in. */
static int
begin_operation(CellsObject *self, struct cells_members *c)
{
    struct cells_under_way *op = &self->op;
    if (c->command != self->command) {
        c->command = self->command;
        c->index = 0;
    }
    op->members = c;
    op->command = self->command;
    op->index = c->index;
    op->stage = CELLS_READY;
    op->missing = c->size - 1;
    op->differs = false;
    for (int m = 0; m < c->size; m++)
        c->peers[m].here = m == c->rank;
    return run(self, self->spin_ns);
}

/* Break the operation under way off. Where the others count on this member, its part is done.
 * Returns 0, or -1 with an exception. */
static int
abandon(CellsObject *self)
{
    struct cells_under_way *op = &self->op;
    struct cells_members *c = op->members;
    int result = 0;
    if (op->stage == CELLS_POSTED) {
        uint32_t found = CELLS_UNDECIDED;
        if (op->large
            && !atomic_compare_exchange_strong(&cell_of(&c->peers[c->rank])->decision, &found,
                                               CELLS_WITHDRAWN)) {
            /* Somebody has seen all members here. */
            if (step(self, true) == CELLS_ARRIVED && finish(self) == -2)
                result = -1;
        }
        if (op->stage == CELLS_POSTED)
            resolve(op, CELLS_OPEN);
    }
    op->stage = CELLS_IDLE;
    let_go(op);
    return result;
}

/* The fast path ---------------------------------------------------------------------------------*/

static inline const struct array *
as_array(CellsObject *self, PyObject *x)
{
    if (Py_TYPE(x) != self->array_type)
        return NULL;
    const struct array *a = (const struct array *)x;
    const int wanted = ARRAY_CONTIGUOUS | ARRAY_ALIGNED;
    return (a->flags & wanted) == wanted ? a : NULL;
}

static inline size_t
elements(const struct array *a)
{
    size_t count = 1;
    for (int i = 0; i < a->ndim; i++)
        count *= a->shape[i];
    return count;
}

/* What is known of an operation on arrays like `a`; NULL with or without an exception where the
 * fast path is not for them. */
static const struct cells_known *
signature_of(CellsObject *self, int operation, int kind, const struct array *a)
{
    if (a->ndim > CELLS_DIMENSIONS)
        return NULL;
    uint64_t hash = ((uintptr_t)a->dtype >> 4) ^ (uint64_t)(operation * 8 + kind + 1) << 32;
    for (int i = 0; i < a->ndim; i++)
        hash = (hash ^ (uint64_t)a->shape[i]) * UINT64_C(0x9E3779B97F4A7C15);
    struct cells_known *k = &self->known[(hash * UINT64_C(0x9E3779B97F4A7C15) >> 32) % CELLS_KNOWN];
    if (k->dtype == a->dtype && k->operation == operation && k->kind == kind && k->ndim == a->ndim
        && memcmp(k->shape, a->shape, a->ndim * sizeof *a->shape) == 0)
        return k->fast ? k : NULL;
    PyObject *shape = PyTuple_New(a->ndim);
    if (shape == NULL)
        return NULL;
    for (int i = 0; i < a->ndim; i++) {
        PyObject *length = PyLong_FromSsize_t(a->shape[i]);
        if (length == NULL) {
            Py_DECREF(shape);
            return NULL;
        }
        PyTuple_SET_ITEM(shape, i, length);
    }
    PyObject *found = PyObject_CallFunction(self->describe, "iiON", operation, kind, a->dtype, shape);
    if (found == NULL)
        return NULL;
    struct cells_known new = {.operation = operation, .kind = kind, .ndim = a->ndim};
    memcpy(new.shape, a->shape, a->ndim * sizeof *a->shape);
    if (found != Py_None) {
        const char *bytes;
        Py_ssize_t length, itemsize;
        unsigned long long digest;
        if (!PyArg_ParseTuple(found, "y#Kni", &bytes, &length, &digest, &itemsize, &new.code)
            || length != CELLS_SIGNATURE) {
            Py_DECREF(found);
            return NULL;
        }
        memcpy(new.signature, bytes, CELLS_SIGNATURE);
        new.digest = digest;
        new.itemsize = itemsize;
        new.count = elements(a);
        new.fast = true;
    }
    Py_DECREF(found);
    new.dtype = Py_NewRef(a->dtype);
    Py_XDECREF(k->dtype);
    *k = new;
    return new.fast ? k : NULL;
}

/* The communicator that a truth value means, or NULL where the fast path has none. */
static inline struct cells_members *
members_of(CellsObject *self, PyObject *in_group)
{
    int truth = in_group == Py_False ? 0 : in_group == Py_True ? 1 : PyObject_IsTrue(in_group);
    if (truth < 0 || self->closed || self->busy)
        return NULL;
    struct cells_members *c = truth && self->group.size > 0 ? &self->group : &self->world;
    return c->size > 1 ? c : NULL;
}

/* Fill in where the arrays of a large operation lie. */
static void
place(CellsObject *self, size_t send_bytes, size_t recv_bytes)
{
    struct cells_under_way *op = &self->op;
    size_t offset = 0;
    op->send_place = (uintptr_t)op->send;
    op->recv_place = (uintptr_t)op->recv;
    if (peer_reads_all(self))
        op->flags |= CELLS_READS_ALL;
    if (self->polls_per_yield == POLLS_PER_YIELD_CROWDED)
        op->flags |= CELLS_CROWDED;
    if (self->pools == NULL)
        return;
    if (op->send != NULL && pool_find(self->pools, op->send, send_bytes, &offset) == self->worker) {
        op->flags |= CELLS_SEND_IN_POOL;
        op->send_place = offset;
    }
    if (op->recv != NULL && pool_find(self->pools, op->recv, recv_bytes, &offset) == self->worker) {
        op->flags |= CELLS_RECV_IN_POOL;
        op->recv_place = offset;
    }
}

/* Begin to move `bytes` for each member, and return the verdict as Python's integer. */
static PyObject *
go(CellsObject *self, struct cells_members *c, int operation, size_t bytes, const uint8_t *send,
   uint8_t *recv, bool staged)
{
    struct cells_under_way *op = &self->op;
    bool first = c->rank == 0;
    /* How many parts there are in each array. */
    size_t send_parts = operation == CELLS_SCATTER ? c->size : 1;
    size_t recv_parts = operation == CELLS_ALLGATHER || operation == CELLS_GATHER ? c->size : 1;
    op->operation = operation;
    op->bytes = bytes;
    op->send = send;
    op->recv = recv;
    /* The same on all members, since it follows from what their signatures stand for. */
    op->large = bytes > CELLS_SLOT / send_parts;
    if ((operation == CELLS_BROADCAST || operation == CELLS_SCATTER) && !first)
        op->send = NULL;
    if (operation == CELLS_GATHER && !first)
        op->recv = NULL;
    op->flags = 0;
    if (op->large && !staged)
        place(self, bytes * send_parts, bytes * recv_parts);
    int verdict = begin_operation(self, c);
    return verdict == -2 ? NULL : PyLong_FromLong(verdict);
}

/* The same for arrays of NumPy's in the fast path. */
static PyObject *
go_on_arrays(CellsObject *self, struct cells_members *c, const struct cells_known *k,
             int operation, int kind, const struct array *send, const struct array *recv)
{
    struct cells_under_way *op = &self->op;
    if (op->stage != CELLS_IDLE && abandon(self) < 0)
        return NULL;
    op->digest = k->digest;
    memcpy(op->signature, k->signature, CELLS_SIGNATURE);
    op->kind = kind;
    op->dtype = k->code;
    op->count = k->count;
    /* The wait lets other threads run, which may drop them. */
    op->owners[0] = Py_XNewRef((PyObject *)send);
    op->owners[1] = Py_XNewRef((PyObject *)recv);
    return go(self, c, operation, k->count * k->itemsize, send == NULL ? NULL : send->data,
              recv == NULL ? NULL : recv->data, false);
}

static PyObject *
otherwise(void)
{
    return PyErr_Occurred() ? NULL : PyLong_FromLong(CELLS_OTHERWISE);
}

/* Whether a large operation could overwrite what it has still to read. */
static bool
collides(const struct cells_known *k, const struct array *send, size_t send_parts,
         const struct array *recv, size_t recv_parts)
{
    size_t bytes = k->count * k->itemsize;
    if (send == NULL || recv == NULL || bytes <= CELLS_SLOT / send_parts)
        return false;
    if (send->data == recv->data && send_parts == 1 && recv_parts == 1)
        return false;
    return send->data < recv->data + bytes * recv_parts && recv->data < send->data + bytes * send_parts;
}

static PyObject *
cells_allreduce(CellsObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4)
        return PyErr_Format(PyExc_TypeError, "allreduce takes 4 arguments, not %zd", nargs);
    struct cells_members *c = members_of(self, args[2]);
    const struct array *send = as_array(self, args[0]), *recv = as_array(self, args[3]);
    if (c == NULL || send == NULL || recv == NULL || send->dtype != recv->dtype
        || !(recv->flags & ARRAY_WRITEABLE))
        return otherwise();
    /* Not hashable, and so not there: Python knows more ways to write a kind. */
    if (!PyUnicode_CheckExact(args[1]) && !PyLong_Check(args[1]))
        return otherwise();
    PyObject *number = PyDict_GetItemWithError(self->kinds, args[1]);
    if (number == NULL)
        return otherwise();
    int kind = (int)PyLong_AsLong(number);
    const struct cells_known *k = signature_of(self, CELLS_ALLREDUCE, kind, send);
    if (k == NULL || elements(recv) != k->count || collides(k, send, 1, recv, 1))
        return otherwise();
    return go_on_arrays(self, c, k, CELLS_ALLREDUCE, kind, send, recv);
}

static PyObject *
cells_allgather(CellsObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3)
        return PyErr_Format(PyExc_TypeError, "allgather takes 3 arguments, not %zd", nargs);
    struct cells_members *c = members_of(self, args[1]);
    const struct array *send = as_array(self, args[0]), *recv = as_array(self, args[2]);
    if (c == NULL || send == NULL || recv == NULL || send->dtype != recv->dtype
        || !(recv->flags & ARRAY_WRITEABLE))
        return otherwise();
    const struct cells_known *k = signature_of(self, CELLS_ALLGATHER, -1, send);
    if (k == NULL || elements(recv) != k->count * c->size || collides(k, send, 1, recv, c->size))
        return otherwise();
    return go_on_arrays(self, c, k, CELLS_ALLGATHER, 0, send, recv);
}

static PyObject *
cells_gather(CellsObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3)
        return PyErr_Format(PyExc_TypeError, "gather takes 3 arguments, not %zd", nargs);
    struct cells_members *c = members_of(self, args[1]);
    const struct array *send = as_array(self, args[0]), *recv = NULL;
    if (c == NULL || send == NULL)
        return otherwise();
    if (c->rank == 0) {
        recv = as_array(self, args[2]);
        if (recv == NULL || send->dtype != recv->dtype || !(recv->flags & ARRAY_WRITEABLE))
            return otherwise();
    }
    const struct cells_known *k = signature_of(self, CELLS_GATHER, -1, send);
    if (k == NULL || (recv != NULL && elements(recv) != k->count * c->size)
        || collides(k, send, 1, recv, c->size))
        return otherwise();
    return go_on_arrays(self, c, k, CELLS_GATHER, 0, send, recv);
}

/* Broadcast and scatter: everybody receives, and the first member sends `parts` as much. */
static PyObject *
from_first(CellsObject *self, int operation, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3)
        return PyErr_Format(PyExc_TypeError, "3 arguments are taken, not %zd", nargs);
    struct cells_members *c = members_of(self, args[1]);
    const struct array *recv = as_array(self, args[2]), *send = NULL;
    if (c == NULL || recv == NULL || !(recv->flags & ARRAY_WRITEABLE))
        return otherwise();
    if (c->rank == 0) {
        send = as_array(self, args[0]);
        if (send == NULL || send->dtype != recv->dtype)
            return otherwise();
    }
    size_t parts = operation == CELLS_SCATTER ? c->size : 1;
    const struct cells_known *k = signature_of(self, operation, -1, recv);
    if (k == NULL || (send != NULL && elements(send) != k->count * parts)
        || collides(k, send, parts, recv, 1))
        return otherwise();
    return go_on_arrays(self, c, k, operation, 0, send, recv);
}

static PyObject *
cells_broadcast(CellsObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return from_first(self, CELLS_BROADCAST, args, nargs);
}

static PyObject *
cells_scatter(CellsObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return from_first(self, CELLS_SCATTER, args, nargs);
}

/* Everything else ------------------------------------------------------------------------------ */

/* Whether the memory has been given back; what is called then anyway does nothing. */
static inline bool
released(const CellsObject *self)
{
    return self->block == NULL;
}

static PyObject *
refuse_released(void)
{
    return PyErr_Format(PyExc_RuntimeError, "the data plane has been closed");
}

/* begin(command): this worker starts it, and so has left all before. */
static PyObject *
cells_begin(CellsObject *self, PyObject *arg)
{
    if (released(self))
        Py_RETURN_NONE;
    long long command = PyLong_AsLongLong(arg);
    if (command == -1 && PyErr_Occurred())
        return NULL;
    if (self->op.stage != CELLS_IDLE && abandon(self) < 0)
        return NULL;
    self->command = command;
    leave(self, command - 1);
    if (!self->busy && self->mail.queued > 0)
        mail_pump(&self->mail, self->node);
    Py_RETURN_NONE;
}

static PyObject *
cells_leave(CellsObject *self, PyObject *arg)
{
    if (released(self))
        Py_RETURN_NONE;
    long long command = PyLong_AsLongLong(arg);
    if (command == -1 && PyErr_Occurred())
        return NULL;
    leave(self, command);
    Py_RETURN_NONE;
}

/* fail(command): it takes no part any more in what is left of it. */
static PyObject *
cells_fail(CellsObject *self, PyObject *arg)
{
    if (released(self))
        Py_RETURN_NONE;
    long long command = PyLong_AsLongLong(arg);
    if (command == -1 && PyErr_Occurred())
        return NULL;
    int done = self->op.stage == CELLS_IDLE ? 0 : abandon(self);
    bool released = self->world.gone == command || self->group.gone == command;
    atomic_store_explicit(&self->own->failed, 2 * command + released, memory_order_relaxed);
    leave(self, command);
    return done < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
cells_close(CellsObject *self, PyObject *arg)
{
    if (released(self))
        Py_RETURN_NONE;
    long long command = PyLong_AsLongLong(arg);
    if (command == -1 && PyErr_Occurred())
        return NULL;
    if (self->op.stage != CELLS_IDLE && abandon(self) < 0)
        return NULL;
    self->closed = true;
    atomic_store_explicit(&self->own->closed, command, memory_order_relaxed);
    leave(self, INT64_MAX);
    Py_RETURN_NONE;
}

/* bury(worker): its process has ended; nobody is to wait for it. */
static PyObject *
cells_bury(CellsObject *self, PyObject *arg)
{
    if (released(self))
        return refuse_released();
    long worker = PyLong_AsLong(arg);
    if (worker == -1 && PyErr_Occurred())
        return NULL;
    if (worker < 0 || worker >= self->num_workers)
        return PyErr_Format(PyExc_ValueError, "bury: no such worker");
    struct cells_worker *dead = self->world.peers[worker].worker;
    atomic_store_explicit(&dead->closed, CELLS_DIED, memory_order_relaxed);
    atomic_store_explicit(&dead->left, INT64_MAX, memory_order_release);
    ring(self, &self->world);
    Py_RETURN_NONE;
}

static PyObject *
cells_resume(CellsObject *self, PyObject *unused)
{
    if (released(self))
        return refuse_released();
    if (self->op.stage == CELLS_IDLE || self->busy)
        return PyErr_Format(PyExc_RuntimeError, "no operation is under way in this thread");
    int verdict = run(self, 0);
    return verdict == -2 ? NULL : PyLong_FromLong(verdict);
}

static PyObject *
cells_abandon(CellsObject *self, PyObject *unused)
{
    if (released(self))
        Py_RETURN_NONE;
    if (!self->busy && self->op.stage != CELLS_IDLE && abandon(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* start(operation, kind, in_group, signature, digest, code, count, bytes, send, recv, owners, after,
 * staged) begins an operation on contiguous memory at the given addresses. */
static PyObject *
cells_start(CellsObject *self, PyObject *args)
{
    if (released(self))
        return refuse_released();
    int operation, kind, in_group, code, staged;
    const char *signature;
    Py_ssize_t length, count, bytes;
    unsigned long long digest, send, recv;
    PyObject *owners, *after;
    if (!PyArg_ParseTuple(args, "iipy#KinnKKOOp:start", &operation, &kind, &in_group, &signature,
                          &length, &digest, &code, &count, &bytes, &send, &recv, &owners, &after,
                          &staged))
        return NULL;
    struct cells_members *c = in_group && self->group.size > 0 ? &self->group : &self->world;
    if (length != CELLS_SIGNATURE || operation < CELLS_ALLREDUCE || operation > CELLS_GATHER
        || count < 0 || bytes < 0 || self->closed || self->busy)
        return PyErr_Format(PyExc_ValueError, "start: bad arguments, or closed or in use");
    if (operation == CELLS_ALLREDUCE
        && (!disco_can_reduce(code, kind) || (size_t)bytes != count * disco_dtype_size(code)))
        return PyErr_Format(PyExc_ValueError, "start: no such reduction");
    struct cells_under_way *op = &self->op;
    if (op->stage != CELLS_IDLE && abandon(self) < 0)
        return NULL;
    op->digest = digest;
    memcpy(op->signature, signature, CELLS_SIGNATURE);
    op->kind = kind;
    op->dtype = code;
    op->count = count;
    op->owners[0] = Py_NewRef(owners);
    op->after = after == Py_None ? NULL : Py_NewRef(after);
    return go(self, c, operation, bytes, (const uint8_t *)(uintptr_t)send,
              (uint8_t *)(uintptr_t)recv, staged);
}

/* exchange(bytes, send, recv): after the data of a staged, large operation has been moved, and as
 * what is called then, gather as many more bytes of each member on all of them. */
static PyObject *
cells_exchange(CellsObject *self, PyObject *args)
{
    if (released(self))
        return refuse_released();
    Py_ssize_t bytes;
    unsigned long long send, recv;
    if (!PyArg_ParseTuple(args, "nKK:exchange", &bytes, &send, &recv))
        return NULL;
    struct cells_under_way *op = &self->op;
    if (bytes < 0 || self->busy || op->members == NULL || op->stage != CELLS_IDLE)
        return PyErr_Format(PyExc_RuntimeError, "exchange: no operation has just moved");
    op->operation = CELLS_ALLGATHER;
    op->bytes = bytes;
    op->send = (const uint8_t *)(uintptr_t)send;
    op->recv = (uint8_t *)(uintptr_t)recv;
    enum cells_verdict verdict;
    self->busy = true;
    Py_BEGIN_ALLOW_THREADS
    verdict = peer_move(self);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (verdict != CELLS_MOVED)
        return PyErr_Format(PyExc_ConnectionError, "worker %d has ended",
                            op->members->first + op->members->withdrawn);
    Py_RETURN_NONE;
}

/* After a mismatch: the signatures of all members, one behind the other. */
static PyObject *
cells_signatures(CellsObject *self, PyObject *in_group)
{
    if (released(self))
        return refuse_released();
    int truth = PyObject_IsTrue(in_group);
    if (truth < 0)
        return NULL;
    struct cells_members *c = truth && self->group.size > 0 ? &self->group : &self->world;
    return PyBytes_FromStringAndSize((char *)c->signatures, (Py_ssize_t)c->size * CELLS_SIGNATURE);
}

/* What each worker has told: (left, failed, only for a peer's sake, closed). */
static PyObject *
cells_told(CellsObject *self, PyObject *unused)
{
    if (released(self))
        return refuse_released();
    PyObject *list = PyList_New(self->num_workers);
    for (int w = 0; list != NULL && w < self->num_workers; w++) {
        struct cells_worker *worker = self->world.peers[w].worker;
        long long left = atomic_load(&worker->left), failed = atomic_load(&worker->failed);
        PyObject *entry = Py_BuildValue("LLOL", left, failed >> 1, failed & 1 ? Py_True : Py_False,
                                        (long long)atomic_load(&worker->closed));
        if (entry == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, w, entry);
    }
    return list;
}

/* The worker that took its arrival at an operation back, or that has died in one; or None. */
static PyObject *
cells_withdrawn(CellsObject *self, PyObject *in_group)
{
    if (released(self))
        return refuse_released();
    int truth = PyObject_IsTrue(in_group);
    if (truth < 0)
        return NULL;
    struct cells_members *c = truth && self->group.size > 0 ? &self->group : &self->world;
    if (c->withdrawn < 0)
        Py_RETURN_NONE;
    return PyLong_FromLong(c->first + c->withdrawn);
}

/* Messages ------------------------------------------------------------------------------------- */

/* send(receiver, signature, address, bytes) */
static PyObject *
cells_send(CellsObject *self, PyObject *args)
{
    if (released(self))
        return refuse_released();
    int receiver;
    const char *signature;
    Py_ssize_t length, bytes;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "iy#Kn:send", &receiver, &signature, &length, &address, &bytes))
        return NULL;
    if (receiver < 0 || receiver >= self->num_workers || length != CELLS_SIGNATURE || bytes < 0
        || self->busy)
        return PyErr_Format(PyExc_ValueError, "send: bad arguments, or in use");
    int result;
    bool is_read = peer_reads_all(self)
                   && atomic_load(&self->world.peers[receiver].worker->reads_all);
    self->busy = true;
    Py_BEGIN_ALLOW_THREADS
    result = mail_send(&self->mail, receiver, self->command, (const uint8_t *)signature,
                       (const uint8_t *)(uintptr_t)address, bytes, is_read);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (result < 0)
        return PyErr_NoMemory();
    if (self->node != NULL)
        node_ring_bell(&self->node->node, receiver);
    Py_RETURN_NONE;
}

/* letter(sender): the (command, bytes, signature) of the oldest message; None where it may still
 * come, False where none will in this command. */
static PyObject *
cells_letter(CellsObject *self, PyObject *arg)
{
    if (released(self))
        return refuse_released();
    long sender = PyLong_AsLong(arg);
    if (sender == -1 && PyErr_Occurred())
        return NULL;
    if (sender < 0 || sender >= self->num_workers)
        return PyErr_Format(PyExc_ValueError, "letter: no such worker");
    peer_reads_all(self);
    const struct mail_header *header = mail_look(&self->mail, (int)sender);
    if (header == NULL) {
        if (left_by(&self->world.peers[sender]) < self->command)
            Py_RETURN_NONE;
        /* It may have sent, and then left. */
        header = mail_look(&self->mail, (int)sender);
        if (header == NULL) {
            if (mail_is_coming(&self->mail, (int)sender))
                Py_RETURN_NONE;
            Py_RETURN_FALSE;
        }
    }
    if (header->command > self->command)
        Py_RETURN_FALSE;
    return Py_BuildValue("LKy#", (long long)header->command, (unsigned long long)header->bytes,
                         (const char *)header->signature, (Py_ssize_t)CELLS_SIGNATURE);
}

/* read(sender, address, bytes): read on in the message of so many bytes; whether it is complete. */
static PyObject *
cells_read(CellsObject *self, PyObject *args)
{
    if (released(self))
        return refuse_released();
    int sender;
    unsigned long long address;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "iKn:read", &sender, &address, &bytes))
        return NULL;
    if (sender < 0 || sender >= self->num_workers || !self->mail.in[sender].open
        || self->mail.in[sender].header.bytes != (uint64_t)bytes || self->busy)
        return PyErr_Format(PyExc_ValueError, "read: no message of so many bytes, or in use");
    int complete;
    pid_t process = (pid_t)atomic_load(&self->world.peers[sender].worker->pid);
    self->busy = true;
    Py_BEGIN_ALLOW_THREADS
    complete = mail_read(&self->mail, sender, (uint8_t *)(uintptr_t)address, self->pools,
                         process);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (self->node != NULL)
        node_ring_bell(&self->node->node, sender);
    if (complete < 0)
        return PyErr_Format(PyExc_ConnectionError, "worker %d has ended", sender);
    return PyBool_FromLong(complete);
}

static PyObject *
cells_drop(CellsObject *self, PyObject *arg)
{
    if (released(self))
        return refuse_released();
    long sender = PyLong_AsLong(arg);
    if (sender == -1 && PyErr_Occurred())
        return NULL;
    if (sender < 0 || sender >= self->num_workers)
        return PyErr_Format(PyExc_ValueError, "drop: no such worker");
    mail_drop(&self->mail, (int)sender);
    Py_RETURN_NONE;
}

static PyObject *
cells_pump(CellsObject *self, PyObject *unused)
{
    if (released(self))
        Py_RETURN_NONE;
    if (self->busy)
        Py_RETURN_NONE;
    for (int w = 0; w < self->num_workers && self->mail.queued + self->mail.lent > 0; w++)
        if (atomic_load_explicit(&self->world.peers[w].worker->closed, memory_order_relaxed))
            mail_forget(&self->mail, w);
    mail_pump(&self->mail, self->node);
    Py_RETURN_NONE;
}

static PyObject *
cells_get_outstanding(CellsObject *self, void *closure)
{
    return PyBool_FromLong(self->mail.queued > 0);
}

/* Whether some message has not been read by its receiver, and this worker's memory is needed. */
static PyObject *
cells_get_lends(CellsObject *self, void *closure)
{
    return PyBool_FromLong(self->mail.lent > 0);
}

static PyObject *
cells_get_waiting(CellsObject *self, void *closure)
{
    const struct cells_under_way *op = &self->op;
    if (op->stage == CELLS_IDLE)
        Py_RETURN_NONE;
    return Py_BuildValue("iKO", op->signature[0], (unsigned long long)op->index,
                         op->members == &self->group ? Py_True : Py_False);
}

/* The operation and index of the operation under way, or of the last one. */
static PyObject *
cells_get_last(CellsObject *self, void *closure)
{
    return Py_BuildValue("iK", self->op.signature[0], (unsigned long long)self->op.index);
}

/* Whether the memory of all other workers can be read; where it can, that can be refused. */
static PyObject *
cells_get_read_memory(CellsObject *self, void *closure)
{
    if (released(self))
        return refuse_released();
    return PyBool_FromLong(peer_reads_all(self));
}

static int
cells_set_read_memory(CellsObject *self, PyObject *value, void *closure)
{
    int truth = value == NULL ? -1 : PyObject_IsTrue(value);
    if (truth < 0) {
        if (value == NULL)
            PyErr_SetString(PyExc_AttributeError, "read_memory cannot be deleted");
        return -1;
    }
    if (released(self)) {
        refuse_released();
        return -1;
    }
    self->reads_all = truth ? 0 : -1;
    atomic_store(&self->own->reads_all, 0);
    return 0;
}

static PyObject *
cells_get_command(CellsObject *self, void *closure)
{
    return PyLong_FromLongLong(self->command);
}

/* Whether arrays are laid out in memory as the fast path takes it; if not, it stays off. The
 * examples are float32 arrays of shape (3, 5): one that is contiguous and writeable, and a
 * transposed, read-only view of it. */
static bool
probe(PyObject *const *examples, PyObject *dtype, uint8_t *address)
{
    const struct array *a = (const struct array *)examples[0];
    const struct array *b = (const struct array *)examples[1];
    const int all = ARRAY_CONTIGUOUS | ARRAY_ALIGNED | ARRAY_WRITEABLE;
    return a->data == address && b->data == address && a->ndim == 2 && b->ndim == 2
           && a->shape[0] == 3 && a->shape[1] == 5 && b->shape[0] == 5 && b->shape[1] == 3
           && a->strides[0] == 20 && a->strides[1] == 4 && a->dtype == dtype && b->dtype == dtype
           && (a->flags & all) == all && (b->flags & all) == ARRAY_ALIGNED;
}

static PyObject *
cells_required(PyTypeObject *type, PyObject *args)
{
    int num_workers, num_groups;
    if (!PyArg_ParseTuple(args, "ii:required", &num_workers, &num_groups))
        return NULL;
    if (num_workers < 1 || num_groups < 1 || num_workers % num_groups)
        return PyErr_Format(PyExc_ValueError, "%d workers in %d groups", num_workers, num_groups);
    return PyLong_FromSize_t(lay_out(num_workers, num_groups).size);
}

static PyObject *
cells_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"block", "worker", "num_workers", "num_groups", "describe", "kinds",
                            "examples", "address", "spin", "node", "pools", NULL};
    PyObject *block, *describe, *kinds, *first, *second, *node, *pools;
    int worker, num_workers, num_groups;
    unsigned long long address;
    double spin;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!iiiOO!(OO)KdOO:Cells", names, Segment_Type,
                                     &block, &worker, &num_workers, &num_groups, &describe,
                                     &PyDict_Type, &kinds, &first, &second, &address, &spin, &node,
                                     &pools))
        return NULL;
    if (num_workers < 1 || num_groups < 1 || num_workers % num_groups || worker < 0
        || worker >= num_workers)
        return PyErr_Format(PyExc_ValueError, "worker %d of %d in %d groups", worker, num_workers,
                            num_groups);
    struct layout layout = lay_out(num_workers, num_groups);
    if ((size_t)((SegmentObject *)block)->size < layout.size)
        return PyErr_Format(PyExc_ValueError, "the block has %zd bytes; %d workers in %d groups "
                            "need %zu", ((SegmentObject *)block)->size, num_workers, num_groups,
                            layout.size);
    if ((node != Py_None && !PyObject_TypeCheck(node, Node_Type))
        || (pools != Py_None && !PyObject_TypeCheck(pools, PoolTable_Type)))
        return PyErr_Format(PyExc_TypeError, "node and pools must be a Node and a PoolTable, or None");
    uint64_t probe_number;
    if (getrandom(&probe_number, sizeof probe_number, 0) != sizeof probe_number)
        return PyErr_SetFromErrno(PyExc_OSError);
    CellsObject *self = (CellsObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->probe = probe_number | 1;
    self->block = (SegmentObject *)Py_NewRef(block);
    self->describe = Py_NewRef(describe);
    self->kinds = Py_NewRef(kinds);
    self->node = node == Py_None ? NULL : (NodeObject *)Py_NewRef(node);
    self->pools = pools == Py_None ? NULL : (PoolTableObject *)Py_NewRef(pools);
    self->worker = worker;
    self->num_workers = num_workers;
    self->spin_ns = (int64_t)(spin * 1e9);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        cores = CPU_COUNT(&set);
    /* With fewer cores than workers a peer may not come before this one makes room. */
    self->polls_per_yield = num_workers > cores ? POLLS_PER_YIELD_CROWDED : POLLS_PER_YIELD;
    int group_size = num_workers / num_groups;
    if (make_members(self, &self->world, &layout, 0, 0, num_workers) < 0
        || (num_groups > 1
            && make_members(self, &self->group, &layout, 1, worker / group_size * group_size,
                            group_size) < 0)) {
        Py_DECREF(self);
        return NULL;
    }
    PyObject *dtype = PyObject_GetAttrString(first, "dtype");
    if (dtype == NULL || mail_make(&self->mail, self->block->base + layout.mail, worker, num_workers) < 0) {
        Py_XDECREF(dtype);
        Py_DECREF(self);
        return NULL;
    }
    PyObject *examples[] = {first, second};
    if (probe(examples, dtype, (uint8_t *)(uintptr_t)address))
        self->array_type = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(first));
    Py_DECREF(dtype);
    if (self->pools != NULL && self->pools->own == worker
        && Py_TYPE(self->pools->ranges[worker].owner) == Pool_Type)
        self->mail.pool = ((PoolObject *)self->pools->ranges[worker].owner)->pool;
    self->own = self->world.peers[worker].worker;
    self->command = 0;
    atomic_store(&self->own->failed, -1);
    atomic_store(&self->own->left, 0);
    atomic_store(&self->own->pid, getpid());
    atomic_store(&self->own->probe_address, (uintptr_t)&self->probe);
    atomic_store(&self->own->probe, self->probe);
    return (PyObject *)self;
}

static int
cells_traverse(CellsObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->describe);
    Py_VISIT(self->kinds);
    Py_VISIT(self->op.owners[0]);
    Py_VISIT(self->op.owners[1]);
    Py_VISIT(self->op.after);
    return 0;
}

static int
cells_clear(CellsObject *self)
{
    let_go(&self->op);
    Py_CLEAR(self->describe);
    Py_CLEAR(self->kinds);
    return 0;
}

static void
free_members(struct cells_members *c)
{
    for (int m = 0; m < c->size && c->peers != NULL; m++)
        if (c->peers[m].process >= 0)
            close(c->peers[m].process);
    PyMem_Free(c->peers);
    PyMem_Free(c->signatures);
    c->peers = NULL;
    c->signatures = NULL;
}

/* Give the memory back; the object may live on in a cycle of references. */
static void
release(CellsObject *self)
{
    self->closed = true;
    mail_free(&self->mail);
    free_members(&self->world);
    free_members(&self->group);
    self->own = NULL;
    Py_CLEAR(self->node);
    Py_CLEAR(self->pools);
    Py_CLEAR(self->block);
}

static PyObject *
cells_release(CellsObject *self, PyObject *unused)
{
    if (self->busy)
        return PyErr_Format(PyExc_RuntimeError, "the data plane is in use");
    if (!released(self)) {
        if (self->op.stage != CELLS_IDLE && abandon(self) < 0)
            return NULL;
        release(self);
    }
    Py_RETURN_NONE;
}

static void
cells_dealloc(CellsObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    cells_clear(self);
    for (int i = 0; i < CELLS_KNOWN; i++)
        Py_XDECREF(self->known[i].dtype);
    release(self);
    Py_XDECREF(self->array_type);
    type->tp_free(self);
    Py_DECREF(type);
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))cells_##name, METH_FASTCALL, NULL}

static PyMethodDef cells_methods[] = {
    FAST(allreduce),
    FAST(allgather),
    FAST(broadcast),
    FAST(scatter),
    FAST(gather),
    {"start", (PyCFunction)cells_start, METH_VARARGS, NULL},
    {"exchange", (PyCFunction)cells_exchange, METH_VARARGS, NULL},
    {"resume", (PyCFunction)cells_resume, METH_NOARGS, NULL},
    {"abandon", (PyCFunction)cells_abandon, METH_NOARGS, NULL},
    {"send", (PyCFunction)cells_send, METH_VARARGS, NULL},
    {"letter", (PyCFunction)cells_letter, METH_O, NULL},
    {"read", (PyCFunction)cells_read, METH_VARARGS, NULL},
    {"drop", (PyCFunction)cells_drop, METH_O, NULL},
    {"pump", (PyCFunction)cells_pump, METH_NOARGS, NULL},
    {"begin", (PyCFunction)cells_begin, METH_O, NULL},
    {"leave", (PyCFunction)cells_leave, METH_O, NULL},
    {"fail", (PyCFunction)cells_fail, METH_O, NULL},
    {"close", (PyCFunction)cells_close, METH_O, NULL},
    {"release", (PyCFunction)cells_release, METH_NOARGS, NULL},
    {"bury", (PyCFunction)cells_bury, METH_O, NULL},
    {"signatures", (PyCFunction)cells_signatures, METH_O, NULL},
    {"told", (PyCFunction)cells_told, METH_NOARGS, NULL},
    {"withdrawn", (PyCFunction)cells_withdrawn, METH_O, NULL},
    {"required", (PyCFunction)cells_required, METH_VARARGS | METH_CLASS, NULL},
    {NULL},
};

static PyGetSetDef cells_attributes[] = {
    {"read_memory", (getter)cells_get_read_memory, (setter)cells_set_read_memory, NULL, NULL},
    {"command", (getter)cells_get_command, NULL, NULL, NULL},
    {"lends", (getter)cells_get_lends, NULL, NULL, NULL},
    {"outstanding", (getter)cells_get_outstanding, NULL, NULL, NULL},
    {"last", (getter)cells_get_last, NULL, NULL, NULL},
    {"waiting", (getter)cells_get_waiting, NULL, NULL, NULL},
    {NULL},
};

static PyType_Slot cells_slots[] = {
    {Py_tp_new, cells_new},
    {Py_tp_dealloc, cells_dealloc},
    {Py_tp_traverse, cells_traverse},
    {Py_tp_clear, cells_clear},
    {Py_tp_methods, cells_methods},
    {Py_tp_getset, cells_attributes},
    {Py_tp_doc, "One worker's side of the arrivals and collectives on its node."},
    {0, NULL},
};

static PyType_Spec cells_spec = {
    .name = "spmd_disco.native._native.Cells",
    .basicsize = sizeof(CellsObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = cells_slots,
};

int
add_cells(PyObject *module)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &cells_spec, NULL);
    if (type == NULL)
        return -1;
    int result = PyModule_AddType(module, type);
    Py_DECREF(type);
    return result;
}
