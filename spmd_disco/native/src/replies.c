/* Replies of any size through the boxes (box.h): each comes after its size, in as many pieces as it
 * takes. */
#include "ring.h"

#include <string.h>

/* No reply is larger; a size above it is rubbish. */
#define LARGEST_REPLY ((uint64_t)1 << 46)

static int
damaged(void)
{
    PyErr_SetString(PyExc_OSError, "a box of replies is damaged: something has written into the "
                    "memory that the processes of this session share");
    return -1;
}

/* Writes more of the first pending reply; how much, or -1 where the box is damaged. */
static int64_t
write_some(RepliesObject *self)
{
    PyObject *message = PyList_GET_ITEM(self->pending, 0);
    uint64_t size = (uint64_t)PyBytes_GET_SIZE(message);
    int64_t written;
    if (self->sent < sizeof size)
        written = box_write(&self->box, (uint8_t *)&size + self->sent, sizeof size - self->sent);
    else {
        uint64_t from = self->sent - sizeof size;
        written = box_write(&self->box, PyBytes_AS_STRING(message) + from, size - from);
    }
    if (written > 0)
        self->sent += (uint64_t)written;
    return written;
}

int
replies_pump(RepliesObject *self)
{
    bool some = false;
    int result = 0;
    while (PyList_GET_SIZE(self->pending) > 0) {
        uint64_t size = (uint64_t)PyBytes_GET_SIZE(PyList_GET_ITEM(self->pending, 0));
        if (self->sent == sizeof size + size) {
            self->sent = 0;
            if (PySequence_DelItem(self->pending, 0) < 0)
                return -1;
            continue;
        }
        int64_t written = write_some(self);
        if (written < 0)
            return damaged();
        if (written > 0)
            some = true;
        else if (box_block(&self->box)) {
            result = 1;
            break;
        }
    }
    if (some)
        node_ring_bell(self->node, 0);
    return result;
}

int
replies_send(RepliesObject *self, PyObject *message)
{
    if (PyList_Append(self->pending, message) < 0)
        return -1;
    return replies_pump(self);
}

bool
replies_waiting(const RepliesObject *self, uint32_t worker)
{
    return box_available(&self->incoming[worker].box) != 0;
}

/* Reads at most `size` bytes of what is available. */
static uint64_t
read_some(Box *box, uint64_t available, void *to, uint64_t size)
{
    uint64_t part = size < available ? size : available;
    box_read(box, to, part);
    return part;
}

/* Takes what is here of the replies in one box: 1 if it was something, 0, or -1. */
static int
poll_box(Incoming *in, uint32_t worker, PyObject *queue)
{
    int64_t available = box_available(&in->box);
    if (available <= 0)
        return available == 0 ? 0 : damaged();
    uint64_t end = in->box.at + (uint64_t)available;
    while (in->box.at != end) {
        if (in->message == NULL) {
            in->length_size += (uint32_t)read_some(&in->box, end - in->box.at,
                                                   in->length + in->length_size,
                                                   sizeof in->length - in->length_size);
            if (in->length_size < sizeof in->length)
                break;
            memcpy(&in->size, in->length, sizeof in->size);
            if (in->size > LARGEST_REPLY)
                return damaged();
            in->have = 0;
            in->message = new_message(in->size, &in->data);
            if (in->message == NULL)
                return -1;
        }
        in->have += read_some(&in->box, end - in->box.at, in->data + in->have, in->size - in->have);
        if (in->have < in->size)
            break;
        PyObject *pair = Py_BuildValue("(IO)", worker, in->message);
        PyObject *done = pair == NULL ? NULL : PyObject_CallMethod(queue, "append", "(O)", pair);
        Py_XDECREF(pair);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
        Py_CLEAR(in->message);
        in->length_size = 0;
    }
    return 1;
}

int
replies_poll(RepliesObject *self, PyObject *queue)
{
    for (uint32_t i = 1; i < self->node->workers; i++) {
        Incoming *in = &self->incoming[i];
        int result = poll_box(in, i, queue);
        if (result != 0)
            box_release(&in->box, self->node, i);
        if (result < 0)
            return -1;
    }
    return 0;
}

static void
replies_dealloc(RepliesObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->incoming != NULL)
        for (uint32_t i = 0; i < self->node->workers; i++)
            Py_XDECREF(self->incoming[i].message);
    PyMem_Free(self->incoming);
    Py_XDECREF(self->pending);
    Py_XDECREF(self->owner);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
replies_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"node", NULL};
    PyObject *node;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Replies", names, Node_Type, &node))
        return NULL;
    RepliesObject *self = (RepliesObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(node);
    self->owner = node;
    self->node = &((NodeObject *)node)->node;
    self->pending = PyList_New(0);
    if (self->node->me == 0)
        self->incoming = PyMem_Calloc(self->node->workers, sizeof *self->incoming);
    for (uint32_t i = 0; self->incoming != NULL && i < self->node->workers; i++)
        box_open(&self->incoming[i].box, self->node, i);
    box_open(&self->box, self->node, self->node->me);
    if (self->pending == NULL || (self->node->me == 0 && self->incoming == NULL)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyObject *
py_send(RepliesObject *self, PyObject *message)
{
    if (!PyBytes_Check(message) || self->node->me == 0) {
        PyErr_SetString(PyExc_TypeError, "a worker other than worker 0 sends bytes");
        return NULL;
    }
    int result = replies_send(self, message);
    return result < 0 ? NULL : PyBool_FromLong(result);
}

static PyObject *
py_pump(RepliesObject *self, PyObject *unused)
{
    int result = replies_pump(self);
    return result < 0 ? NULL : PyBool_FromLong(result);
}

static PyObject *
py_poll(RepliesObject *self, PyObject *queue)
{
    if (self->node->me != 0) {
        PyErr_SetString(PyExc_ValueError, "only the controller takes replies");
        return NULL;
    }
    if (replies_poll(self, queue) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef replies_methods[] = {
    {"send", (PyCFunction)py_send, METH_O, NULL},
    {"pump", (PyCFunction)py_pump, METH_NOARGS, NULL},
    {"poll", (PyCFunction)py_poll, METH_O, NULL},
    {NULL},
};

static PyType_Slot replies_slots[] = {
    {Py_tp_new, replies_new},
    {Py_tp_dealloc, replies_dealloc},
    {Py_tp_methods, replies_methods},
    {Py_tp_doc, "The boxes of replies, or a worker's own."},
    {0, NULL},
};

static PyType_Spec replies_spec = {
    .name = "spmd_disco.native._native.Replies",
    .basicsize = sizeof(RepliesObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = replies_slots,
};

PyTypeObject *Replies_Type;

int
add_replies(PyObject *module)
{
    Replies_Type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &replies_spec, NULL);
    if (Replies_Type == NULL)
        return -1;
    return PyModule_AddType(module, Replies_Type);
}
