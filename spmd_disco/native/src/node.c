/* The node block: status lines, doorbells, interrupts; see node.h. */
#include "node.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "ring.h"

/* Polls between two yields. Without yields, waits among more processes than cores take milliseconds:
 * the one that is waited for does not get to run. */
#define POLLS_PER_YIELD 16

int64_t
node_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

void
futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void
futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t ns)
{
    if (ns <= 0)
        return;
    struct timespec limit = {ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0);
}

bool
node_wait(Node *node, uint32_t seen, int64_t deadline)
{
    _Atomic uint32_t *bell = &node->mine->bell;
    int64_t now = node_now(), spin_end = now + node->spin_ns;
    if (spin_end > deadline)
        spin_end = deadline;
    while (now < spin_end) {
        for (int poll = 0; poll < POLLS_PER_YIELD; poll++) {
            if (atomic_load(bell) != seen)
                return true;
            relax();
        }
        sched_yield();
        now = node_now();
    }
    return node_sleep(node, seen, deadline);
}

bool
node_sleep(Node *node, uint32_t seen, int64_t deadline)
{
    _Atomic uint32_t *bell = &node->mine->bell;
    int64_t ns = deadline - node_now();
    if (ns > 0) {
        atomic_fetch_add(&node->mine->asleep, 1);
        /* The kernel compares the word once more: who counts up later sees that we are asleep. */
        futex_wait(bell, seen, ns < NODE_LONGEST_SLEEP_NS ? ns : NODE_LONGEST_SLEEP_NS);
        atomic_fetch_sub(&node->mine->asleep, 1);
    }
    return atomic_load(bell) != seen;
}

void
node_begin_command(Node *node, uint64_t number, const char *function, size_t size)
{
    NodeStatus *mine = node->mine;
    if (function != NULL) {
        if (size > NODE_FUNCTION_SIZE) {
            size = NODE_FUNCTION_SIZE;
            /* Not in the middle of a character. */
            while (size > 0 && ((uint8_t)function[size] & 0xC0) == 0x80)
                size--;
        }
        uint32_t version = atomic_load_explicit(&mine->function_version, memory_order_relaxed) | 1;
        atomic_store_explicit(&mine->function_version, version, memory_order_relaxed);
        atomic_thread_fence(memory_order_release);
        for (size_t i = 0; i < size; i++)
            atomic_store_explicit(&mine->function[i], function[i], memory_order_relaxed);
        atomic_store_explicit(&mine->function_size, size, memory_order_relaxed);
        atomic_store_explicit(&mine->function_version, version + 1, memory_order_release);
    }
    atomic_store_explicit(&mine->since, node_now(), memory_order_relaxed);
    atomic_store_explicit(&mine->running, number, memory_order_release);
}

/* Copy a worker's function text into `text` and return its size. */
static size_t
read_function(const NodeStatus *status, char *text)
{
    size_t size = 0;
    /* A few tries are enough for all but a process that was killed while it wrote. */
    for (int tries = 0; tries < 8; tries++) {
        uint32_t before = atomic_load_explicit(&status->function_version, memory_order_acquire);
        size = atomic_load_explicit(&status->function_size, memory_order_relaxed);
        if (size > NODE_FUNCTION_SIZE)
            size = NODE_FUNCTION_SIZE;
        for (size_t i = 0; i < size; i++)
            text[i] = atomic_load_explicit(&status->function[i], memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        uint32_t after = atomic_load_explicit(&status->function_version, memory_order_relaxed);
        if (before == after && before % 2 == 0)
            break;
    }
    return size;
}

void
node_ring_watchers(Node *node)
{
    atomic_fetch_add(&node->header->watch_bell, 1);
    futex_wake(&node->header->watch_bell);
}

void
node_interrupt(Node *node, uint64_t through)
{
    _Atomic uint64_t *word = &node->header->interrupted_through;
    uint64_t known = atomic_load(word);
    while (known < through && !atomic_compare_exchange_weak(word, &known, through))
        ;
    node_ring_watchers(node);
    node_ring_all(node);
}

/* Layout --------------------------------------------------------------------------------------- */

static uint64_t
aligned(uint64_t offset)
{
    return (offset + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

static void
lay_out(NodeHeader *header, uint32_t workers, uint64_t ring_size, uint64_t box_size)
{
    header->magic = NODE_MAGIC;
    header->version = NODE_VERSION;
    header->workers = workers;
    header->ring_size = ring_size;
    header->box_size = box_size;
    header->status_offset = aligned(SEGMENT_HEADER + sizeof(NodeHeader));
    header->ring_offset = aligned(header->status_offset + workers * sizeof(NodeStatus));
    header->boxes_offset = aligned(header->ring_offset + sizeof(RingHeader) + ring_size);
    header->end = header->boxes_offset + workers * (sizeof(BoxHeader) + box_size);
}

static bool
sizes_are_possible(uint32_t workers, uint64_t ring_size, uint64_t box_size)
{
    return workers >= 1 && workers <= NODE_MOST_WORKERS && ring_size >= 1024 &&
           ring_size <= (uint64_t)1 << 31 && (ring_size & (ring_size - 1)) == 0 &&
           box_size >= CACHE_LINE && box_size <= (uint64_t)1 << 31 && box_size % CACHE_LINE == 0;
}

uint64_t
node_size(uint32_t workers, uint64_t ring_size, uint64_t box_size)
{
    NodeHeader header = {0};
    lay_out(&header, workers, ring_size, box_size);
    return header.end;
}

static void
take(Node *node, uint8_t *base, const NodeHeader *layout, uint32_t me)
{
    node->base = base;
    node->header = (NodeHeader *)(base + SEGMENT_HEADER);
    node->status = (NodeStatus *)(base + layout->status_offset);
    node->workers = layout->workers;
    node->me = me;
    node->mine = &node->status[me];
    node->ring_offset = layout->ring_offset;
    node->ring_size = layout->ring_size;
    node->boxes_offset = layout->boxes_offset;
    node->box_size = layout->box_size;
    node->waiters = 0;
    atomic_store(&node->mine->pid, (uint32_t)getpid());
}

bool
node_initialise(Node *node, uint8_t *base, uint64_t size, uint32_t workers, uint64_t ring_size,
                uint64_t box_size)
{
    NodeHeader *header = (NodeHeader *)(base + SEGMENT_HEADER);
    if (!sizes_are_possible(workers, ring_size, box_size) ||
        size < node_size(workers, ring_size, box_size))
        return false;
    lay_out(header, workers, ring_size, box_size);
    header->controller_pid = (uint32_t)getpid();
    take(node, base, header, 0);
    return true;
}

bool
node_attach(Node *node, uint8_t *base, uint64_t size, uint32_t me)
{
    if (size < SEGMENT_HEADER + sizeof(NodeHeader))
        return false;
    /* What follows uses this copy: nobody can change it between the check and the use. */
    const volatile NodeHeader *shared = (NodeHeader *)(base + SEGMENT_HEADER);
    NodeHeader layout = {0};
    if (shared->magic != NODE_MAGIC || shared->version != NODE_VERSION)
        return false;
    uint32_t workers = shared->workers;
    uint64_t ring_size = shared->ring_size, box_size = shared->box_size;
    if (!sizes_are_possible(workers, ring_size, box_size) || me >= workers)
        return false;
    lay_out(&layout, workers, ring_size, box_size);
    if (size < layout.end)
        return false;
    take(node, base, &layout, me);
    return true;
}

/* The Python type ------------------------------------------------------------------------------ */

static PyObject *
py_node_size(PyObject *module, PyObject *args)
{
    unsigned int workers;
    unsigned long long ring_size, box_size;
    if (!PyArg_ParseTuple(args, "IKK:node_size", &workers, &ring_size, &box_size))
        return NULL;
    if (!sizes_are_possible(workers, ring_size, box_size)) {
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
    rung = node_sleep(&self->node, seen, deadline_in(seconds));
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
    size_t size = read_function(status, text);
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
