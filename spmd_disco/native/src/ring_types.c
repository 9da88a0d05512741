/* The Python type of the ring; see ring.h. */
#include "ring.h"

static PyObject *
ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"node", NULL};
    PyObject *node;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Ring", names, Node_Type, &node))
        return NULL;
    RingObject *self = (RingObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(node);
    self->node = node;
    ring_open(&self->ring, &((NodeObject *)node)->node);
    self->ring.named_blocks = ((SegmentObject *)((NodeObject *)node)->segment)->named;
    return (PyObject *)self;
}

static void
ring_dealloc(RingObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ring_close(&self->ring);
    Py_XDECREF(self->node);
    type->tp_free(self);
    Py_DECREF(type);
}

static int
check_side(Ring *ring, bool writer)
{
    if ((ring->node->me == 0) == writer)
        return 0;
    PyErr_SetString(PyExc_ValueError, writer ? "only the controller pushes commands"
                                             : "only workers other than worker 0 read commands");
    return -1;
}

static PyObject *
py_has_room(RingObject *self, PyObject *number)
{
    unsigned long long size = PyLong_AsUnsignedLongLong(number);
    if ((size == (unsigned long long)-1 && PyErr_Occurred()) || check_side(&self->ring, true) < 0)
        return NULL;
    return PyBool_FromLong(ring_has_room(&self->ring, size));
}

static PyObject *
py_try_push(RingObject *self, PyObject *args)
{
    unsigned long long number;
    Py_buffer message;
    if (!PyArg_ParseTuple(args, "Ky*:try_push", &number, &message))
        return NULL;
    int result = -1;
    if (check_side(&self->ring, true) == 0) {
        struct iovec part = {message.buf, (size_t)message.len};
        result = ring_try_push(&self->ring, number, &part, 1);
    }
    PyBuffer_Release(&message);
    return result < 0 ? NULL : PyBool_FromLong(result);
}

/* Take the next message, after polling for it for `ns`. */
static PyObject *
take_message(Ring *ring, int64_t ns)
{
    const uint8_t *data = NULL;
    size_t size = 0;
    uint64_t number;
    int result = check_side(ring, false) < 0 ? -1 : ring_peek(ring, &data, &size, &number);
    if (result == 0 && ns > 0) {
        bool found;
        Py_BEGIN_ALLOW_THREADS
        found = ring_spin(ring, ns);
        Py_END_ALLOW_THREADS
        if (found)
            result = ring_peek(ring, &data, &size, &number);
    }
    if (result < 0)
        return NULL;
    if (result == 0)
        Py_RETURN_NONE;
    uint8_t *to;
    PyObject *message = new_message(size, &to);
    if (message == NULL)
        return NULL;
    copy_message(to, data, size);
    ring_advance(ring);
    return message;
}

static PyObject *
py_pop(RingObject *self, PyObject *unused)
{
    return take_message(&self->ring, 0);
}

static PyObject *
py_spin(RingObject *self, PyObject *unused)
{
    return take_message(&self->ring, self->ring.node->spin_ns);
}

static PyObject *
py_collect(RingObject *self, PyObject *unused)
{
    ring_collect(&self->ring);
    Py_RETURN_NONE;
}

static PyObject *
py_slowest(RingObject *self, PyObject *unused)
{
    Ring *ring = &self->ring;
    uint64_t slowest = UINT64_MAX;
    unsigned long worker = 0;
    for (uint32_t i = 1; i < ring->node->workers; i++) {
        const NodeStatus *status = &ring->node->status[i];
        uint64_t tail = atomic_load_explicit(&status->tail, memory_order_relaxed);
        if (!atomic_load_explicit(&status->gone, memory_order_relaxed) && tail < slowest) {
            slowest = tail;
            worker = i;
        }
    }
    return PyLong_FromUnsignedLong(worker);
}

static PyObject *
get_published(RingObject *self, void *closure)
{
    return PyLong_FromUnsignedLongLong(self->ring.published);
}

static PyMethodDef ring_methods[] = {
    {"has_room", (PyCFunction)py_has_room, METH_O, NULL},
    {"try_push", (PyCFunction)py_try_push, METH_VARARGS, NULL},
    {"pop", (PyCFunction)py_pop, METH_NOARGS, NULL},
    {"spin", (PyCFunction)py_spin, METH_NOARGS, NULL},
    {"collect", (PyCFunction)py_collect, METH_NOARGS, NULL},
    {"slowest", (PyCFunction)py_slowest, METH_NOARGS, NULL},
    {NULL},
};

static PyGetSetDef ring_attributes[] = {
    {"published", (getter)get_published, NULL, NULL, NULL},
    {NULL},
};

static PyType_Slot ring_slots[] = {
    {Py_tp_new, ring_new},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, ring_methods},
    {Py_tp_getset, ring_attributes},
    {Py_tp_doc, "One process's end of the ring of commands."},
    {0, NULL},
};

static PyType_Spec ring_spec = {
    .name = "spmd_disco.native._native.Ring",
    .basicsize = sizeof(RingObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = ring_slots,
};

PyTypeObject *Ring_Type;

int
add_ring(PyObject *module)
{
    Ring_Type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &ring_spec, NULL);
    if (Ring_Type == NULL)
        return -1;
    return PyModule_AddType(module, Ring_Type);
}
