/* The native module's type Cells; _native.pyi says what its methods do. */
#include "cells.h"

#include <sched.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "reduce.h"

/* A command's number. */
static bool
take_command(PyObject *arg, long long *command)
{
    *command = PyLong_AsLongLong(arg);
    return *command != -1 || !PyErr_Occurred();
}

/* The communicator that a truth value means, or NULL with an exception. */
static struct cells_members *
take_members(CellsObject *self, PyObject *in_group)
{
    int truth = PyObject_IsTrue(in_group);
    if (truth < 0)
        return NULL;
    return truth && self->group.size > 0 ? &self->group : &self->world;
}

bool
cells_take_worker(const CellsObject *self, PyObject *arg, const char *method, int *worker)
{
    long number = PyLong_AsLong(arg);
    if (number == -1 && PyErr_Occurred())
        return false;
    if (number < 0 || number >= self->num_workers) {
        PyErr_Format(PyExc_ValueError, "%s: no such worker", method);
        return false;
    }
    *worker = (int)number;
    return true;
}

/* begin(command): this worker starts it, and so has left all before. */
static PyObject *
cells_begin(CellsObject *self, PyObject *arg)
{
    if (cells_released(self))
        Py_RETURN_NONE;
    long long command;
    if (!take_command(arg, &command))
        return NULL;
    if (self->op.stage != CELLS_IDLE && cells_break_off(self) < 0)
        return NULL;
    self->command = command;
    cells_has_left(self, command - 1);
    if (!self->busy && self->mail.queued > 0)
        mail_pump(&self->mail, self->node);
    Py_RETURN_NONE;
}

static PyObject *
cells_leave(CellsObject *self, PyObject *arg)
{
    if (cells_released(self))
        Py_RETURN_NONE;
    long long command;
    if (!take_command(arg, &command))
        return NULL;
    cells_has_left(self, command);
    Py_RETURN_NONE;
}

/* fail(command): it takes no part any more in what is left of it. */
static PyObject *
cells_fail(CellsObject *self, PyObject *arg)
{
    if (cells_released(self))
        Py_RETURN_NONE;
    long long command;
    if (!take_command(arg, &command))
        return NULL;
    int done = self->op.stage == CELLS_IDLE ? 0 : cells_break_off(self);
    bool released = self->world.gone == command || self->group.gone == command;
    atomic_store_explicit(&self->own->failed, 2 * command + released, memory_order_relaxed);
    cells_has_left(self, command);
    return done < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
cells_close(CellsObject *self, PyObject *arg)
{
    if (cells_released(self))
        Py_RETURN_NONE;
    long long command;
    if (!take_command(arg, &command))
        return NULL;
    if (self->op.stage != CELLS_IDLE && cells_break_off(self) < 0)
        return NULL;
    self->closed = true;
    atomic_store_explicit(&self->own->closed, command, memory_order_relaxed);
    cells_has_left(self, INT64_MAX);
    Py_RETURN_NONE;
}

/* bury(worker): its process has ended; nobody is to wait for it. */
static PyObject *
cells_bury(CellsObject *self, PyObject *arg)
{
    if (cells_released(self))
        return cells_refuse();
    int worker;
    if (!cells_take_worker(self, arg, "bury", &worker))
        return NULL;
    struct cells_worker *dead = self->world.peers[worker].worker;
    atomic_store_explicit(&dead->closed, CELLS_DIED, memory_order_relaxed);
    atomic_store_explicit(&dead->left, INT64_MAX, memory_order_release);
    cells_ring(self, &self->world);
    Py_RETURN_NONE;
}

static PyObject *
cells_resume(CellsObject *self, PyObject *unused)
{
    if (cells_released(self))
        return cells_refuse();
    if (self->op.stage == CELLS_IDLE || self->busy)
        return PyErr_Format(PyExc_RuntimeError, "no operation is under way in this thread");
    int verdict = cells_run(self, 0);
    return verdict == -2 ? NULL : PyLong_FromLong(verdict);
}

static PyObject *
cells_abandon(CellsObject *self, PyObject *unused)
{
    if (cells_released(self))
        Py_RETURN_NONE;
    if (!self->busy && self->op.stage != CELLS_IDLE && cells_break_off(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* start(operation, kind, in_group, signature, digest, code, count, bytes, send, recv, owners,
 * after, staged) begins an operation on contiguous memory at the given addresses. */
static PyObject *
cells_start(CellsObject *self, PyObject *args)
{
    if (cells_released(self))
        return cells_refuse();
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
    if (op->stage != CELLS_IDLE && cells_break_off(self) < 0)
        return NULL;
    op->digest = digest;
    memcpy(op->signature, signature, CELLS_SIGNATURE);
    op->kind = kind;
    op->dtype = code;
    op->count = count;
    op->owners[0] = Py_NewRef(owners);
    op->after = after == Py_None ? NULL : Py_NewRef(after);
    return cells_go(self, c, operation, bytes, (const uint8_t *)(uintptr_t)send,
              (uint8_t *)(uintptr_t)recv, staged);
}

/* exchange(bytes, send, recv): after the data of a staged, large operation has been moved, and as
 * what is called then, gather as many more bytes of each member on all of them. */
static PyObject *
cells_exchange(CellsObject *self, PyObject *args)
{
    if (cells_released(self))
        return cells_refuse();
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
    if (cells_released(self))
        return cells_refuse();
    struct cells_members *c = take_members(self, in_group);
    if (c == NULL)
        return NULL;
    return PyBytes_FromStringAndSize((char *)c->signatures, (Py_ssize_t)c->size * CELLS_SIGNATURE);
}

/* What each worker has told: (left, failed, only for a peer's sake, closed). */
static PyObject *
cells_told(CellsObject *self, PyObject *unused)
{
    if (cells_released(self))
        return cells_refuse();
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
    if (cells_released(self))
        return cells_refuse();
    struct cells_members *c = take_members(self, in_group);
    if (c == NULL)
        return NULL;
    if (c->withdrawn < 0)
        Py_RETURN_NONE;
    return PyLong_FromLong(c->first + c->withdrawn);
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
    if (cells_released(self))
        return cells_refuse();
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
    if (cells_released(self)) {
        cells_refuse();
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

static PyObject *
cells_required(PyTypeObject *type, PyObject *args)
{
    int num_workers, num_groups;
    if (!PyArg_ParseTuple(args, "ii:required", &num_workers, &num_groups))
        return NULL;
    if (num_workers < 1 || num_groups < 1 || num_workers % num_groups)
        return PyErr_Format(PyExc_ValueError, "%d workers in %d groups", num_workers, num_groups);
    return PyLong_FromSize_t(cells_lay_out(num_workers, num_groups).size);
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
    struct cells_layout layout = cells_lay_out(num_workers, num_groups);
    if ((size_t)((SegmentObject *)block)->size < layout.size)
        return PyErr_Format(PyExc_ValueError, "the block has %zd bytes; %d workers in %d groups "
                            "need %zu", ((SegmentObject *)block)->size, num_workers, num_groups,
                            layout.size);
    if ((node != Py_None && !PyObject_TypeCheck(node, Node_Type))
        || (pools != Py_None && !PyObject_TypeCheck(pools, PoolTable_Type)))
        return PyErr_Format(PyExc_TypeError, "node must be a Node and pools a PoolTable, or None");
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
    self->polls_per_yield = num_workers > cores ? CELLS_POLLS_CROWDED : CELLS_POLLS;
    int group_size = num_workers / num_groups;
    if (cells_make_members(self, &self->world, &layout, 0, 0, num_workers) < 0
        || (num_groups > 1
            && cells_make_members(self, &self->group, &layout, 1, worker / group_size * group_size,
                            group_size) < 0)) {
        Py_DECREF(self);
        return NULL;
    }
    PyObject *dtype = PyObject_GetAttrString(first, "dtype");
    uint8_t *rings = self->block->base + layout.mail;
    if (dtype == NULL || mail_make(&self->mail, rings, worker, num_workers) < 0) {
        Py_XDECREF(dtype);
        Py_DECREF(self);
        return NULL;
    }
    PyObject *examples[] = {first, second};
    if (cells_probe(examples, dtype, (uint8_t *)(uintptr_t)address))
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
    cells_let_go(&self->op);
    Py_CLEAR(self->describe);
    Py_CLEAR(self->kinds);
    return 0;
}

/* Give the memory back; the object may live on in a cycle of references. */
static void
release(CellsObject *self)
{
    self->closed = true;
    mail_free(&self->mail);
    cells_free_members(&self->world);
    cells_free_members(&self->group);
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
    if (!cells_released(self)) {
        if (self->op.stage != CELLS_IDLE && cells_break_off(self) < 0)
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
