/* A block of a pool that its owner lends to the workers of the node, who read it where it is.
 *
 * The block begins with one byte for each worker, in whole cache lines, which say what the worker
 * has made of the loan. The owner looks at them, and frees the block when no worker has it, or can
 * still come to have it. So nobody has to tell anybody, and a worker gives the block back by one
 * store, whenever its last array goes. */
#include "pool.h"

enum LoanState { LOAN_OFFERED, LOAN_TAKEN, LOAN_GIVEN_BACK };

static PyObject *
loan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PoolTableObject *table;
    Py_ssize_t member, offset, nbytes, index, count;
    static char *names[] = {"", "", "", "", "", "", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!nnnnn:Loan", names, PoolTable_Type, &table,
                                     &member, &offset, &nbytes, &index, &count))
        return NULL;
    uint8_t *base = NULL;
    size_t header = ((size_t)count + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    if (offset >= 0 && nbytes >= 0 && index >= 0 && index < count)
        base = pool_address(table, member, (size_t)offset, header + (size_t)nbytes);
    if (base == NULL) {
        PyErr_Format(PyExc_ValueError, "the pool of member %zd has no loan of %zd bytes for worker "
                     "%zd of %zd at %zd", member, nbytes, index, count, offset);
        return NULL;
    }
    PoolLoanObject *self = (PoolLoanObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->table = (PoolTableObject *)Py_NewRef(table);
    self->data = base + header;
    self->nbytes = nbytes;
    self->forks = pool_forks();
    self->state = (atomic_uchar *)(base + index);
    atomic_store_explicit(self->state, LOAN_TAKEN, memory_order_release);
    return (PyObject *)self;
}

static void
loan_dealloc(PoolLoanObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    /* A forked child has it from its parent, who gives it back. */
    if (self->forks == pool_forks())
        atomic_store_explicit(self->state, LOAN_GIVEN_BACK, memory_order_release);
    Py_DECREF(self->table);
    type->tp_free(self);
    Py_DECREF(type);
}

static int
loan_buffer(PoolLoanObject *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->data, self->nbytes, 1, flags);
}

static Py_ssize_t
loan_length(PoolLoanObject *self)
{
    return self->nbytes;
}

static PyType_Slot loan_slots[] = {
    {Py_tp_new, loan_new},
    {Py_tp_dealloc, loan_dealloc},
    {Py_sq_length, loan_length},
    {Py_bf_getbuffer, loan_buffer},
    {Py_tp_doc, "Memory that another worker lends to this one; it is given back when this goes."},
    {0, NULL},
};

PyType_Spec pool_loan_spec = {
    .name = "spmd_disco.native._native.Loan",
    .basicsize = sizeof(PoolLoanObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = loan_slots,
};
