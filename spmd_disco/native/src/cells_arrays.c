/* Collectives on NumPy's arrays, where these are ready for them: contiguous, of a dtype that needs
 * no conversion, and so on. Everything else goes by way of Python (peer_ccl.py). */
#include "cells.h"

#include <string.h>

/* What an array object of NumPy's begins with, in all its versions: this is what extensions that
 * do without NumPy's headers rely on, and what cells_probe() checks before any use. */
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
    PyObject *found = PyObject_CallFunction(self->describe, "iiON", operation, kind, a->dtype,
                                            shape);
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

/* Begin an operation on arrays that have been found to be ready for it. */
static PyObject *
go_on_arrays(CellsObject *self, struct cells_members *c, const struct cells_known *k,
             int operation, int kind, const struct array *send, const struct array *recv)
{
    struct cells_under_way *op = &self->op;
    if (op->stage != CELLS_IDLE && cells_break_off(self) < 0)
        return NULL;
    op->digest = k->digest;
    memcpy(op->signature, k->signature, CELLS_SIGNATURE);
    op->kind = kind;
    op->dtype = k->code;
    op->count = k->count;
    /* The wait lets other threads run, which may drop them. */
    op->owners[0] = Py_XNewRef((PyObject *)send);
    op->owners[1] = Py_XNewRef((PyObject *)recv);
    return cells_go(self, c, operation, k->count * k->itemsize, send == NULL ? NULL : send->data,
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
    return send->data < recv->data + bytes * recv_parts
           && recv->data < send->data + bytes * send_parts;
}

PyObject *
cells_allreduce(CellsObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4)
        return PyErr_Format(PyExc_TypeError, "allreduce takes 4 arguments, not %zd", nargs);
    struct cells_members *c = members_of(self, args[2]);
    const struct array *send = as_array(self, args[0]), *recv = as_array(self, args[3]);
    if (c == NULL || send == NULL || recv == NULL || send->dtype != recv->dtype
        || !(recv->flags & ARRAY_WRITEABLE))
        return otherwise();
    /* Python knows more ways to write a kind, and that a bool is none: it would be found here. */
    if ((!PyUnicode_CheckExact(args[1]) && !PyLong_Check(args[1])) || PyBool_Check(args[1]))
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

PyObject *
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

PyObject *
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

PyObject *
cells_broadcast(CellsObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return from_first(self, CELLS_BROADCAST, args, nargs);
}

PyObject *
cells_scatter(CellsObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    return from_first(self, CELLS_SCATTER, args, nargs);
}

/* Whether arrays are laid out in memory as the fast path takes it; if not, it stays off. The
 * examples are float32 arrays of shape (3, 5): one that is contiguous and writeable, and a
 * transposed, read-only view of it. */
bool
cells_probe(PyObject *const *examples, PyObject *dtype, uint8_t *address)
{
    const struct array *a = (const struct array *)examples[0];
    const struct array *b = (const struct array *)examples[1];
    const int all = ARRAY_CONTIGUOUS | ARRAY_ALIGNED | ARRAY_WRITEABLE;
    return a->data == address && b->data == address && a->ndim == 2 && b->ndim == 2
           && a->shape[0] == 3 && a->shape[1] == 5 && b->shape[0] == 5 && b->shape[1] == 3
           && a->strides[0] == 20 && a->strides[1] == 4 && a->dtype == dtype && b->dtype == dtype
           && (a->flags & all) == all && (b->flags & all) == ARRAY_ALIGNED;
}
