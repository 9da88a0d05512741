/* The Python types of peer memory: a worker's pool and its blocks, the mapping of a peer's pool,
 * and the table of all that a process can reach. */
#include "pool.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "segment.h"

PyTypeObject *Pool_Type, *PoolBlock_Type, *PeerMap_Type, *PoolTable_Type, *PoolLoan_Type;

void
pool_raise(struct Pool *pool, size_t bytes, enum PoolResult result)
{
    if (result == POOL_FORKED)
        PyErr_SetString(PyExc_RuntimeError, "this process was forked from a worker, whose pool of "
                        "peer memory it cannot use: allocate with numpy.empty here");
    else if (result == POOL_CLOSED)
        PyErr_SetString(PyExc_RuntimeError, "the pool of peer memory is closed");
    else
        PyErr_Format(PyExc_MemoryError, "%zu bytes of peer memory are not to be had: %zu of the "
                     "pool's %zu bytes are in use%s; SPMD_DISCO_PEER_POOL sets its size, and 0 has "
                     "arrays in ordinary memory", bytes, pool_used(pool), pool_cap(pool),
                     result == POOL_NO_MEMORY ? ", and the system has not so much left" : "");
}

/* Blocks ------------------------------------------------------------------------------------ */

PyObject *
pool_new_block(PoolObject *owner, size_t bytes)
{
    size_t offset;
    enum PoolResult result = pool_alloc_at_once(owner->pool, bytes, &offset);
    if (result == POOL_BUSY) {
        Py_BEGIN_ALLOW_THREADS
        result = pool_alloc(owner->pool, bytes, &offset);
        Py_END_ALLOW_THREADS
    }
    if (result != POOL_OK) {
        pool_raise(owner->pool, bytes, result);
        return NULL;
    }
    PoolBlockObject *self = (PoolBlockObject *)PoolBlock_Type->tp_alloc(PoolBlock_Type, 0);
    if (self == NULL) {
        pool_free(owner->pool, offset);
        return NULL;
    }
    self->owner = (PoolObject *)Py_NewRef(owner);
    self->offset = offset;
    self->nbytes = (Py_ssize_t)bytes;
    return (PyObject *)self;
}

#if PY_VERSION_HEX < 0x030d0000
#define Py_IsFinalizing _Py_IsFinalizing
#endif

static void
block_dealloc(PoolBlockObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    /* When the interpreter comes to its end, what peers still read stays as it is: the memory goes
     * with the last process that has it mapped. */
    if (!Py_IsFinalizing())
        pool_free(self->owner->pool, self->offset);
    Py_DECREF(self->owner);
    type->tp_free(self);
    Py_DECREF(type);
}

static int
block_buffer(PoolBlockObject *self, Py_buffer *view, int flags)
{
    uint8_t *address = pool_base(self->owner->pool) + self->offset;
    return PyBuffer_FillInfo(view, (PyObject *)self, address, self->nbytes, 0, flags);
}

static Py_ssize_t
block_length(PoolBlockObject *self)
{
    return self->nbytes;
}

static PyObject *
block_get_offset(PoolBlockObject *self, void *closure)
{
    return PyLong_FromSize_t(self->offset);
}

static PyObject *
block_get_address(PoolBlockObject *self, void *closure)
{
    return PyLong_FromVoidPtr(pool_base(self->owner->pool) + self->offset);
}

static PyGetSetDef block_attributes[] = {
    {"offset", (getter)block_get_offset, NULL, NULL, NULL},
    {"address", (getter)block_get_address, NULL, NULL, NULL},
    {NULL},
};

static PyType_Slot block_slots[] = {
    {Py_tp_dealloc, block_dealloc},
    {Py_tp_getset, block_attributes},
    {Py_sq_length, block_length},
    {Py_bf_getbuffer, block_buffer},
    {Py_tp_doc, "Memory from a pool, which gets it back when this object goes."},
    {0, NULL},
};

static PyType_Spec block_spec = {
    .name = "spmd_disco.native._native.Block",
    .basicsize = sizeof(PoolBlockObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = block_slots,
};

/* The pool ---------------------------------------------------------------------------------- */

static PyObject *
pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t cap;
    PyObject *limits = NULL;
    int named = 0;
    static char *names[] = {"", "limits", "named", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n|O!p:Pool", names, &cap, &PyTuple_Type,
                                     &limits, &named))
        return NULL;
    if (cap < 0) {
        PyErr_Format(PyExc_ValueError, "a pool has 0 bytes or more, not %zd", cap);
        return NULL;
    }
    PoolObject *self = (PoolObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->pool = pool_create((size_t)cap, named);
    if (self->pool == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    for (Py_ssize_t i = 0; limits != NULL && i < PyTuple_GET_SIZE(limits); i++) {
        const char *usage, *statistics;
        Py_ssize_t limit;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(limits, i), "ssn;a limit is (path of the usage, "
                              "path of the statistics, bytes)", &usage, &statistics, &limit)) {
            Py_DECREF(self);
            return NULL;
        }
        if (pool_add_limit(self->pool, usage, statistics, (size_t)limit) < 0) {
            Py_DECREF(self);
            return PyErr_NoMemory();
        }
    }
    return (PyObject *)self;
}

static void
pool_dealloc(PoolObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->pool != NULL)
        pool_destroy(self->pool);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
pool_empty(PoolObject *self, PyObject *size)
{
    Py_ssize_t bytes = PyNumber_AsSsize_t(size, PyExc_OverflowError);
    if (bytes == -1 && PyErr_Occurred())
        return NULL;
    if (bytes < 0) {
        PyErr_Format(PyExc_ValueError, "a block has 0 bytes or more, not %zd", bytes);
        return NULL;
    }
    return pool_new_block(self, (size_t)bytes);
}

static PyObject *
pool_locate(PoolObject *self, PyObject *args)
{
    Py_ssize_t nbytes;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "Kn:locate", &address, &nbytes))
        return NULL;
    size_t size = pool_size(self->pool);
    size_t at = (uintptr_t)address - (uintptr_t)pool_base(self->pool);
    if (nbytes < 0 || at > size || (size_t)nbytes > size - at)
        return PyLong_FromLong(-1);
    return PyLong_FromSize_t(at);
}

static PyObject *
pool_trim_method(PoolObject *self, PyObject *nothing)
{
    size_t released;
    Py_BEGIN_ALLOW_THREADS
    released = pool_trim(self->pool);
    Py_END_ALLOW_THREADS
    return PyLong_FromSize_t(released);
}

static PyObject *
pool_close_method(PoolObject *self, PyObject *nothing)
{
    Py_BEGIN_ALLOW_THREADS
    pool_close(self->pool);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *
pool_get(PoolObject *self, void *which)
{
    size_t (*function)(const struct Pool *) = which;
    return PyLong_FromSize_t(function(self->pool));
}

static PyObject *
pool_get_fd(PoolObject *self, void *closure)
{
    return PyLong_FromLong(pool_fd(self->pool));
}

static PyObject *
pool_get_address(PoolObject *self, void *closure)
{
    return PyLong_FromVoidPtr(pool_base(self->pool));
}

static PyObject *
pool_get_nonce(PoolObject *self, void *closure)
{
    return PyBytes_FromStringAndSize((char *)pool_base(self->pool), NONCE_SIZE);
}

static PyObject *
pool_unlink_method(PoolObject *self, PyObject *unused)
{
    pool_unlink(self->pool);
    Py_RETURN_NONE;
}

static PyObject *
pool_get_named(PoolObject *self, void *closure)
{
    return PyBool_FromLong(pool_is_named(self->pool));
}

static PyMethodDef pool_methods[] = {
    {"empty", (PyCFunction)pool_empty, METH_O, NULL},
    {"locate", (PyCFunction)pool_locate, METH_VARARGS, NULL},
    {"trim", (PyCFunction)pool_trim_method, METH_NOARGS, NULL},
    {"close", (PyCFunction)pool_close_method, METH_NOARGS, NULL},
    {"unlink", (PyCFunction)pool_unlink_method, METH_NOARGS, NULL},
    {NULL},
};

static PyGetSetDef pool_attributes[] = {
    {"fd", (getter)pool_get_fd, NULL, NULL, NULL},
    {"named", (getter)pool_get_named, NULL, NULL, NULL},
    {"nonce", (getter)pool_get_nonce, NULL, NULL, NULL},
    {"address", (getter)pool_get_address, NULL, NULL, NULL},
    {"size", (getter)pool_get, NULL, NULL, pool_size},
    {"cap", (getter)pool_get, NULL, NULL, pool_cap},
    {"used", (getter)pool_get, NULL, NULL, pool_used},
    {"reserved", (getter)pool_get, NULL, NULL, pool_reserved},
    {"peak", (getter)pool_get, NULL, NULL, pool_peak},
    {NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_new, pool_new},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_attributes},
    {Py_tp_doc, "Memory for arrays that the peers on the node can reach."},
    {0, NULL},
};

static PyType_Spec pool_spec = {
    .name = "spmd_disco.native._native.Pool",
    .basicsize = sizeof(PoolObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = pool_slots,
};

/* A peer's pool ----------------------------------------------------------------------------- */

static PyObject *
map_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    long pid;
    int fd;
    const char *nonce;
    Py_ssize_t nonce_size;
    static char *names[] = {"", "", "", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "liy#:PeerMap", names, &pid, &fd, &nonce,
                                     &nonce_size))
        return NULL;
    PeerMapObject *self = (PeerMapObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    int opened;
    self->base = segment_map(pid, fd, nonce, nonce_size, "pool", &opened, &self->size);
    if (self->base == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    close(opened);
    /* Its owner's dump has it. */
    madvise(self->base, self->size, MADV_DONTDUMP);
    return (PyObject *)self;
}

static void
map_dealloc(PeerMapObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->base != NULL)
        munmap(self->base, self->size);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
map_get_address(PeerMapObject *self, void *closure)
{
    return PyLong_FromVoidPtr(self->base);
}

static PyObject *
map_get_size(PeerMapObject *self, void *closure)
{
    return PyLong_FromSize_t(self->size);
}

static int
map_buffer(PeerMapObject *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->base, (Py_ssize_t)self->size, 0, flags);
}

static PyGetSetDef map_attributes[] = {
    {"address", (getter)map_get_address, NULL, NULL, NULL},
    {"size", (getter)map_get_size, NULL, NULL, NULL},
    {NULL},
};

static PyType_Slot map_slots[] = {
    {Py_tp_new, map_new},
    {Py_tp_dealloc, map_dealloc},
    {Py_tp_getset, map_attributes},
    {Py_bf_getbuffer, map_buffer},
    {Py_tp_doc, "The pool of a peer, mapped into this process."},
    {0, NULL},
};

static PyType_Spec map_spec = {
    .name = "spmd_disco.native._native.PeerMap",
    .basicsize = sizeof(PeerMapObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = map_slots,
};

/* All that a process can reach -------------------------------------------------------------- */

static PyObject *
table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *given;
    static char *names[] = {"", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:PoolTable", names, &given))
        return NULL;
    PyObject *members = PySequence_Tuple(given);
    if (members == NULL)
        return NULL;
    PoolTableObject *self = (PoolTableObject *)type->tp_alloc(type, 0);
    Py_ssize_t count = PyTuple_GET_SIZE(members);
    if (self != NULL) {
        self->own = -1;
        self->ranges = PyMem_Calloc((size_t)count, sizeof *self->ranges);
        if (self->ranges == NULL)
            PyErr_NoMemory();
        else
            self->count = count;
    }
    for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); i++) {
        PyObject *member = PyTuple_GET_ITEM(members, i);
        struct PoolRange *range = &self->ranges[i];
        if (Py_IS_TYPE(member, Pool_Type)) {
            range->base = pool_base(((PoolObject *)member)->pool);
            range->size = pool_size(((PoolObject *)member)->pool);
            self->own = i;
        }
        else if (Py_IS_TYPE(member, PeerMap_Type)) {
            range->base = ((PeerMapObject *)member)->base;
            range->size = ((PeerMapObject *)member)->size;
        }
        else if (member != Py_None) {
            PyErr_Format(PyExc_TypeError, "member %zd is a %s: allowed are Pool, PeerMap and None",
                         i, Py_TYPE(member)->tp_name);
            break;
        }
        range->owner = Py_NewRef(member);
    }
    Py_DECREF(members);
    if (PyErr_Occurred())
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void
table_dealloc(PoolTableObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    for (Py_ssize_t i = 0; i < self->count; i++)
        Py_XDECREF(self->ranges[i].owner);
    PyMem_Free(self->ranges);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
table_locate(PoolTableObject *self, PyObject *args)
{
    Py_ssize_t nbytes;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "Kn:locate", &address, &nbytes))
        return NULL;
    size_t offset;
    Py_ssize_t member = nbytes < 0 ? -1 : pool_find(self, (void *)(uintptr_t)address,
                                                    (size_t)nbytes, &offset);
    if (member < 0)
        Py_RETURN_NONE;
    return Py_BuildValue("nK", member, (unsigned long long)offset);
}

static PyObject *
table_address(PoolTableObject *self, PyObject *args)
{
    Py_ssize_t member, offset, nbytes;
    if (!PyArg_ParseTuple(args, "nnn:address", &member, &offset, &nbytes))
        return NULL;
    uint8_t *address = NULL;
    if (offset >= 0 && nbytes >= 0)
        address = pool_address(self, member, (size_t)offset, (size_t)nbytes);
    if (address == NULL) {
        PyErr_Format(PyExc_ValueError, "no %zd bytes at %zd of the pool of member %zd are mapped "
                     "here", nbytes, offset, member);
        return NULL;
    }
    return PyLong_FromVoidPtr(address);
}

static Py_ssize_t
table_length(PoolTableObject *self)
{
    return self->count;
}

static PyMethodDef table_methods[] = {
    {"locate", (PyCFunction)table_locate, METH_VARARGS, NULL},
    {"address", (PyCFunction)table_address, METH_VARARGS, NULL},
    {NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, table_methods},
    {Py_sq_length, table_length},
    {Py_tp_doc, "The pools that this process can reach, by member."},
    {0, NULL},
};

static PyType_Spec table_spec = {
    .name = "spmd_disco.native._native.PoolTable",
    .basicsize = sizeof(PoolTableObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = table_slots,
};

int
add_pool(PyObject *module)
{
    struct {
        PyTypeObject **type;
        PyType_Spec *spec;
    } types[] = {
        {&Pool_Type, &pool_spec},
        {&PoolBlock_Type, &block_spec},
        {&PeerMap_Type, &map_spec},
        {&PoolTable_Type, &table_spec},
        {&PoolLoan_Type, &pool_loan_spec},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        *types[i].type = (PyTypeObject *)PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        if (*types[i].type == NULL || PyModule_AddType(module, *types[i].type) < 0)
            return -1;
    }
    return PyModule_AddIntConstant(module, "POOL_ALIGNMENT", POOL_ALIGNMENT);
}
