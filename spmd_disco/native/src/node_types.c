/* The Python type of a node block; see node.h. */
#include "node.h"
#include "segment.h"

/* Python says how long it sleeps, within reason. */
#define LONGEST_REST_NS 1000000000

static PyObject *
py_node_size(PyObject *module, PyObject *args)
{
    unsigned int workers;
    unsigned long long ring_size, box_size;
    if (!PyArg_ParseTuple(args, "IKK:node_size", &workers, &ring_size, &box_size))
        return NULL;
    if (!node_is_possible(workers, ring_size, box_size)) {
        PyErr_Format(PyExc_ValueError, "a node of %u workers with a ring of %llu and boxes of %llu "
                     "bytes: allowed are 1 to %d workers, a power of two from 1024, and a multiple "
                     "of %d", workers, ring_size, box_size, NODE_MOST_WORKERS, CACHE_LINE);
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(node_size(workers, ring_size, box_size));
}

static PyObject *
node_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"segment", "me", "workers", "ring_size", "box_size", NULL};
    PyObject *segment;
    unsigned int me, workers = 0;
    unsigned long long ring_size = 0, box_size = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!I|IKK:Node", names, Segment_Type, &segment,
                                     &me, &workers, &ring_size, &box_size))
        return NULL;
    SegmentObject *memory = (SegmentObject *)segment;
    NodeObject *self = (NodeObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(segment);
    self->segment = segment;
    self->node.spin_ns = 100000;
    if (workers > 0) {
        if (me != 0 || !node_initialise(&self->node, memory->base, memory->size, workers, ring_size,
                                        box_size)) {
            Py_DECREF(self);
            PyErr_Format(PyExc_ValueError, "a node of %u workers does not fit: process 0 lays it "
                         "out, in a segment of node_size(workers, ring_size, box_size) bytes",
                         workers);
            return NULL;
        }
    } else if (!node_attach(&self->node, memory->base, memory->size, me)) {
        Py_DECREF(self);
        PyErr_Format(PyExc_ValueError, "the segment holds no node block of layout version %d with "
                     "a worker %u", NODE_VERSION, me);
        return NULL;
    }
    return (PyObject *)self;
}

static void
node_dealloc(NodeObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->segment);
    type->tp_free(self);
    Py_DECREF(type);
}

static int
worker_id(NodeObject *self, PyObject *number, uint32_t *worker)
{
    long value = PyLong_AsLong(number);
    if (value == -1 && PyErr_Occurred())
        return -1;
    if (value < 0 || value >= (long)self->node.workers) {
        PyErr_Format(PyExc_ValueError, "worker %ld: allowed are 0 to %u", value,
                     self->node.workers - 1);
        return -1;
    }
    *worker = (uint32_t)value;
    return 0;
}

static PyObject *
py_begin_wait(NodeObject *self, PyObject *unused)
{
    node_begin_wait(&self->node);
    Py_RETURN_NONE;
}

static PyObject *
py_end_wait(NodeObject *self, PyObject *unused)
{
    node_end_wait(&self->node);
    Py_RETURN_NONE;
}

/* The deadline that lies `seconds` ahead. */
static int64_t
deadline_in(double seconds)
{
    /* Also what is not a number; far enough for a wait that is bounded anyway. */
    if (!(seconds < 3600))
        seconds = 3600;
    return node_now() + (int64_t)(seconds * 1e9);
}

static PyObject *
py_wait(NodeObject *self, PyObject *args)
{
    unsigned int seen;
    double seconds;
    if (!PyArg_ParseTuple(args, "Id:wait", &seen, &seconds))
        return NULL;
    bool rung;
    Py_BEGIN_ALLOW_THREADS
    rung = node_wait(&self->node, seen, deadline_in(seconds));
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(rung);
}

static PyObject *
py_sleep(NodeObject *self, PyObject *args)
{
    unsigned int seen;
    double seconds;
    if (!PyArg_ParseTuple(args, "Id:sleep", &seen, &seconds))
        return NULL;
    bool rung;
    Py_BEGIN_ALLOW_THREADS
    int64_t ns = deadline_in(seconds) - node_now();
    rung = node_rest(&self->node, seen, ns < LONGEST_REST_NS ? ns : LONGEST_REST_NS);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(rung);
}

static PyObject *
py_wait_watch(NodeObject *self, PyObject *args)
{
    unsigned int seen;
    double seconds;
    if (!PyArg_ParseTuple(args, "Id:wait_watch", &seen, &seconds))
        return NULL;
    _Atomic uint32_t *bell = &self->node.header->watch_bell;
    Py_BEGIN_ALLOW_THREADS
    futex_wait(bell, seen, deadline_in(seconds) - node_now());
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(atomic_load(bell));
}

static PyObject *
py_ring_watchers(NodeObject *self, PyObject *unused)
{
    node_ring_watchers(&self->node);
    Py_RETURN_NONE;
}

static PyObject *
py_ring_bell(NodeObject *self, PyObject *number)
{
    uint32_t worker;
    if (worker_id(self, number, &worker) < 0)
        return NULL;
    node_ring_bell(&self->node, worker);
    Py_RETURN_NONE;
}

static PyObject *
py_ring_all(NodeObject *self, PyObject *unused)
{
    node_ring_all(&self->node);
    Py_RETURN_NONE;
}

static PyObject *
py_interrupt(NodeObject *self, PyObject *number)
{
    unsigned long long through = PyLong_AsUnsignedLongLong(number);
    if (through == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    node_interrupt(&self->node, through);
    Py_RETURN_NONE;
}

static PyObject *
py_note_interrupt(NodeObject *self, PyObject *number)
{
    unsigned long long through = PyLong_AsUnsignedLongLong(number);
    if (through == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    atomic_store(&self->node.mine->interrupted_through, through);
    Py_RETURN_NONE;
}

static PyObject *
py_begin_command(NodeObject *self, PyObject *args)
{
    unsigned long long number;
    const char *function = NULL;
    Py_ssize_t size = 0;
    if (!PyArg_ParseTuple(args, "K|z#:begin_command", &number, &function, &size))
        return NULL;
    node_begin_command(&self->node, number, function, (size_t)size);
    Py_RETURN_NONE;
}

static PyObject *
py_leave_command(NodeObject *self, PyObject *number)
{
    unsigned long long command = PyLong_AsUnsignedLongLong(number);
    if (command == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    node_leave_command(&self->node, command);
    Py_RETURN_NONE;
}

static PyObject *
py_fail_command(NodeObject *self, PyObject *number)
{
    unsigned long long command = PyLong_AsUnsignedLongLong(number);
    if (command == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    node_fail_command(&self->node, command);
    Py_RETURN_NONE;
}

static PyObject *
py_set_operation(NodeObject *self, PyObject *args)
{
    unsigned long long command, index;
    if (!PyArg_ParseTuple(args, "KK:set_operation", &command, &index))
        return NULL;
    node_set_operation(&self->node, command, index);
    Py_RETURN_NONE;
}

static PyObject *
py_clear_operation(NodeObject *self, PyObject *unused)
{
    node_clear_operation(&self->node);
    Py_RETURN_NONE;
}

static PyObject *
py_executed(NodeObject *self, PyObject *unused)
{
    Node *node = &self->node;
    PyObject *list = PyList_New(node->workers - 1);
    for (uint32_t i = 1; list != NULL && i < node->workers; i++) {
        uint64_t number = atomic_load_explicit(&node->status[i].executed, memory_order_acquire);
        PyObject *value = PyLong_FromUnsignedLongLong(number);
        if (value == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i - 1, value);
    }
    return list;
}

static PyObject *
py_status(NodeObject *self, PyObject *number)
{
    uint32_t worker;
    if (worker_id(self, number, &worker) < 0)
        return NULL;
    const NodeStatus *status = &self->node.status[worker];
    char text[NODE_FUNCTION_SIZE];
    size_t size = node_function(status, text);
    uint64_t running = atomic_load_explicit(&status->running, memory_order_acquire);
    uint64_t since = atomic_load_explicit(&status->since, memory_order_relaxed);
    uint64_t index = atomic_load_explicit(&status->operation_index, memory_order_acquire);
    uint64_t command = atomic_load_explicit(&status->operation_command, memory_order_relaxed);
    PyObject *function = PyUnicode_DecodeUTF8(text, (Py_ssize_t)size, "replace");
    if (function == NULL)
        return NULL;
    PyObject *operation = index == 0 ? Py_NewRef(Py_None)
                                     : Py_BuildValue("(KK)", (unsigned long long)command,
                                                     (unsigned long long)(index - 1));
    if (operation == NULL) {
        Py_DECREF(function);
        return NULL;
    }
    return Py_BuildValue(
        "{sIsKsKsKsdsNsNsKsKsKsisO}",
        "pid", (unsigned int)atomic_load(&status->pid),
        "tail", (unsigned long long)atomic_load(&status->tail),
        "executed", (unsigned long long)atomic_load(&status->executed),
        "running", (unsigned long long)running,
        "since", (double)since * 1e-9,
        "function", function,
        "operation", operation,
        "failed", (unsigned long long)atomic_load(&status->failed),
        "failures", (unsigned long long)atomic_load(&status->failures),
        "interrupted_through", (unsigned long long)atomic_load(&status->interrupted_through),
        "ended", (int)atomic_load(&status->ended) - 1,
        "gone", atomic_load(&status->gone) ? Py_True : Py_False);
}

static PyObject *
py_mark_gone(NodeObject *self, PyObject *args)
{
    PyObject *number;
    int how = -1;
    uint32_t worker;
    if (!PyArg_ParseTuple(args, "O|i:mark_gone", &number, &how) ||
        worker_id(self, number, &worker) < 0)
        return NULL;
    if (how >= 0)
        atomic_store(&self->node.status[worker].ended, (uint32_t)how + 1);
    atomic_store(&self->node.status[worker].gone, 1);
    node_ring_all(&self->node);
    node_count_up(&self->node, self->node.me);
    Py_RETURN_NONE;
}

static PyObject *
py_close(NodeObject *self, PyObject *unused)
{
    atomic_store(&self->node.header->closed, NODE_CLOSED);
    node_ring_watchers(&self->node);
    node_ring_all(&self->node);
    Py_RETURN_NONE;
}

static PyObject *
get_bell(NodeObject *self, void *closure)
{
    return PyLong_FromUnsignedLong(node_bell(&self->node));
}

static PyObject *
get_watch_bell(NodeObject *self, void *closure)
{
    return PyLong_FromUnsignedLong(atomic_load(&self->node.header->watch_bell));
}

static PyObject *
get_interrupted_through(NodeObject *self, void *closure)
{
    return PyLong_FromUnsignedLongLong(node_interrupted_through(&self->node));
}

static PyObject *
get_closed(NodeObject *self, void *closure)
{
    return PyBool_FromLong(node_closed(&self->node));
}

static PyObject *
get_workers(NodeObject *self, void *closure)
{
    return PyLong_FromUnsignedLong(self->node.workers);
}

static PyObject *
get_me(NodeObject *self, void *closure)
{
    return PyLong_FromUnsignedLong(self->node.me);
}

static PyObject *
get_segment(NodeObject *self, void *closure)
{
    return Py_NewRef(self->segment);
}

static PyObject *
get_spin(NodeObject *self, void *closure)
{
    return PyFloat_FromDouble((double)self->node.spin_ns * 1e-9);
}

static int
set_spin(NodeObject *self, PyObject *value, void *closure)
{
    double seconds = value == NULL ? -1 : PyFloat_AsDouble(value);
    if (seconds == -1 && PyErr_Occurred())
        return -1;
    if (!(seconds >= 0 && seconds <= 3600)) {
        PyErr_SetString(PyExc_ValueError, "spin is a number of seconds from 0 to 3600");
        return -1;
    }
    self->node.spin_ns = (int64_t)(seconds * 1e9);
    return 0;
}

static PyMethodDef node_methods[] = {
    {"begin_wait", (PyCFunction)py_begin_wait, METH_NOARGS, NULL},
    {"end_wait", (PyCFunction)py_end_wait, METH_NOARGS, NULL},
    {"wait", (PyCFunction)py_wait, METH_VARARGS, NULL},
    {"sleep", (PyCFunction)py_sleep, METH_VARARGS, NULL},
    {"wait_watch", (PyCFunction)py_wait_watch, METH_VARARGS, NULL},
    {"ring_watchers", (PyCFunction)py_ring_watchers, METH_NOARGS, NULL},
    {"ring_bell", (PyCFunction)py_ring_bell, METH_O, NULL},
    {"ring_all", (PyCFunction)py_ring_all, METH_NOARGS, NULL},
    {"interrupt", (PyCFunction)py_interrupt, METH_O, NULL},
    {"note_interrupt", (PyCFunction)py_note_interrupt, METH_O, NULL},
    {"begin_command", (PyCFunction)py_begin_command, METH_VARARGS, NULL},
    {"leave_command", (PyCFunction)py_leave_command, METH_O, NULL},
    {"fail_command", (PyCFunction)py_fail_command, METH_O, NULL},
    {"set_operation", (PyCFunction)py_set_operation, METH_VARARGS, NULL},
    {"clear_operation", (PyCFunction)py_clear_operation, METH_NOARGS, NULL},
    {"executed", (PyCFunction)py_executed, METH_NOARGS, NULL},
    {"status", (PyCFunction)py_status, METH_O, NULL},
    {"mark_gone", (PyCFunction)py_mark_gone, METH_VARARGS, NULL},
    {"close", (PyCFunction)py_close, METH_NOARGS, NULL},
    {NULL},
};

static PyGetSetDef node_attributes[] = {
    {"bell", (getter)get_bell, NULL, NULL, NULL},
    {"watch_bell", (getter)get_watch_bell, NULL, NULL, NULL},
    {"interrupted_through", (getter)get_interrupted_through, NULL, NULL, NULL},
    {"closed", (getter)get_closed, NULL, NULL, NULL},
    {"workers", (getter)get_workers, NULL, NULL, NULL},
    {"me", (getter)get_me, NULL, NULL, NULL},
    {"segment", (getter)get_segment, NULL, NULL, NULL},
    {"spin", (getter)get_spin, (setter)set_spin, NULL, NULL},
    {NULL},
};

static PyType_Slot node_slots[] = {
    {Py_tp_new, node_new},
    {Py_tp_dealloc, node_dealloc},
    {Py_tp_methods, node_methods},
    {Py_tp_getset, node_attributes},
    {Py_tp_doc, "One process's end of a node block."},
    {0, NULL},
};

static PyType_Spec node_spec = {
    .name = "spmd_disco.native._native.Node",
    .basicsize = sizeof(NodeObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = node_slots,
};

PyTypeObject *Node_Type;

static PyMethodDef functions[] = {
    {"node_size", py_node_size, METH_VARARGS, NULL},
    {NULL},
};

int
add_node(PyObject *module)
{
    Node_Type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &node_spec, NULL);
    if (Node_Type == NULL || PyModule_AddFunctions(module, functions) < 0)
        return -1;
    return PyModule_AddType(module, Node_Type);
}
