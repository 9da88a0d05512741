/* The native part of a controller: its fields, dead handles, and what is known of the workers.
 *
 * controller.py is the reference. */
#include "controller.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#include "handle.h"
#include "submit.h"

/* Dead handles -------------------------------------------------------------------------------- */

void
controller_bury(ControllerState *self, uint64_t id)
{
    if (self->closed || self->forks != fork_count)
        return;
    if (self->dead_count == self->dead_capacity) {
        size_t capacity = self->dead_capacity ? 2 * self->dead_capacity : 256;
        unsigned long long *dead = realloc(self->dead, capacity * sizeof *dead);
        if (dead == NULL)
            return; /* that register stays until the session ends */
        self->dead = dead;
        self->dead_capacity = capacity;
    }
    self->dead[self->dead_count++] = id;
}

static PyObject *
controller_dead(ControllerState *self, PyObject *ignored)
{
    PyObject *list = PyList_New(0);
    for (size_t i = 0; i < self->dead_count && list != NULL; i++) {
        PyObject *id = PyLong_FromUnsignedLongLong(self->dead[i]);
        if (id == NULL || PyList_Append(list, id) < 0)
            Py_CLEAR(list);
        Py_XDECREF(id);
    }
    return list;
}

static void
forget_dead(ControllerState *self, size_t count)
{
    self->dead_count -= count;
    memmove(self->dead, self->dead + count, self->dead_count * sizeof *self->dead);
}

int
drop_dead(ControllerState *self, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (worker_drop(self->worker, self->dead[i]) < 0)
            return -1;
    forget_dead(self, count);
    return 0;
}

static PyObject *
controller_forget_dead(ControllerState *self, PyObject *count)
{
    size_t number = PyLong_AsSize_t(count);
    if (number == (size_t)-1 && PyErr_Occurred())
        return NULL;
    if (number > self->dead_count) {
        PyErr_SetString(PyExc_ValueError, "there are not so many");
        return NULL;
    }
    forget_dead(self, number);
    Py_RETURN_NONE;
}

static PyObject *
controller_new_register(ControllerState *self, PyObject *ignored)
{
    return PyLong_FromUnsignedLongLong(++self->registers);
}

static PyObject *
set_context(ControllerState *self, PyObject *args)
{
    PyObject *path, *level;
    if (!PyArg_ParseTuple(args, "O!O:set_context", &PyTuple_Type, &path, &level))
        return NULL;
    Py_XSETREF(self->path, Py_NewRef(path));
    Py_XSETREF(self->level, Py_NewRef(level));
    Py_RETURN_NONE;
}

bool
is_quiet(const ControllerState *self)
{
    return (self->ring != NULL || self->alone) && !self->closed && !self->submitting && self->forks == fork_count &&
           self->worker != NULL && current_worker() == NULL && self->unreported != NULL &&
           PyList_CheckExact(self->unreported) && PyList_GET_SIZE(self->unreported) == 0 &&
           self->worker->failures != NULL && PyList_CheckExact(self->worker->failures) &&
           PyList_GET_SIZE(self->worker->failures) == 0;
}

/* The type ------------------------------------------------------------------------------------ */

static PyObject *
controller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    ControllerState *self = (ControllerState *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->forks = fork_count;
    return (PyObject *)self;
}

static int
controller_traverse(ControllerState *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->lock);
    Py_VISIT(self->channel);
    Py_VISIT(self->worker);
    Py_VISIT(self->output);
    Py_VISIT(self->interrupts);
    Py_VISIT(self->dref_type);
    Py_VISIT(self->references);
    Py_VISIT(self->known);
    Py_VISIT(self->codes);
    Py_VISIT(self->ring);
    Py_VISIT(self->boxes);
    Py_VISIT(self->replies);
    Py_VISIT(self->unreported);
    Py_VISIT(self->path);
    Py_VISIT(self->level);
    return 0;
}

static int
controller_clear(ControllerState *self)
{
    Py_CLEAR(self->lock);
    Py_CLEAR(self->channel);
    Py_CLEAR(self->worker);
    Py_CLEAR(self->output);
    Py_CLEAR(self->interrupts);
    Py_CLEAR(self->dref_type);
    Py_CLEAR(self->references);
    Py_CLEAR(self->known);
    Py_CLEAR(self->codes);
    Py_CLEAR(self->ring);
    Py_CLEAR(self->boxes);
    Py_CLEAR(self->replies);
    Py_CLEAR(self->unreported);
    Py_CLEAR(self->path);
    Py_CLEAR(self->level);
    return 0;
}

static void
controller_dealloc(ControllerState *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    controller_clear(self);
    free(self->dead);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
controller_prepare(ControllerState *self, PyObject *args)
{
    PyObject *lock, *channel, *worker, *output, *interrupts, *dref_type, *references;
    if (!PyArg_ParseTuple(args, "OOO!OOO!O!:prepare", &lock, &channel, WorkerState_Type, &worker,
                          &output, &interrupts, &PyType_Type, &dref_type, &PyDict_Type, &references))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)dref_type, Handle_Type)) {
        PyErr_SetString(PyExc_TypeError, "the type of handles is one of Handle's");
        return NULL;
    }
    Py_XSETREF(self->lock, Py_NewRef(lock));
    Py_XSETREF(self->channel, Py_NewRef(channel));
    Py_XSETREF(self->worker, (WorkerState *)Py_NewRef(worker));
    Py_XSETREF(self->output, Py_NewRef(output));
    Py_XSETREF(self->interrupts, Py_NewRef(interrupts));
    Py_XSETREF(self->dref_type, Py_NewRef(dref_type));
    Py_XSETREF(self->references, Py_NewRef(references));
    Py_RETURN_NONE;
}

static PyObject *
set_known(ControllerState *self, PyObject *args)
{
    PyObject *known, *codes;
    if (!PyArg_ParseTuple(args, "OO!:set_known", &known, &PyDict_Type, &codes))
        return NULL;
    Py_XSETREF(self->known, Py_NewRef(known));
    Py_XSETREF(self->codes, Py_NewRef(codes));
    Py_RETURN_NONE;
}

static PyObject *
set_ring(ControllerState *self, PyObject *args)
{
    PyObject *ring, *boxes;
    if (!PyArg_ParseTuple(args, "OO:_set_ring", &ring, &boxes))
        return NULL;
    bool none = ring == Py_None && boxes == Py_None;
    if (!none && (!PyObject_TypeCheck(ring, Ring_Type) || !PyObject_TypeCheck(boxes, Replies_Type) ||
                  ((RepliesObject *)boxes)->node != ((RingObject *)ring)->ring.node)) {
        PyErr_SetString(PyExc_TypeError, "a Ring and Replies of one Node, or two None, are wanted");
        return NULL;
    }
    Py_XSETREF(self->ring, none ? NULL : (RingObject *)Py_NewRef(ring));
    Py_XSETREF(self->boxes, none ? NULL : (RepliesObject *)Py_NewRef(boxes));
    Py_RETURN_NONE;
}

/* How many commands have failed on all workers but worker 0, so far. */
static unsigned long long
count_failures(const ControllerState *self)
{
    const Node *node = self->ring->ring.node;
    unsigned long long count = 0;
    for (uint32_t i = 1; i < node->workers; i++)
        count += atomic_load_explicit(&node->status[i].failures, memory_order_acquire);
    return count;
}

static PyObject *
failure_count(ControllerState *self, PyObject *ignored)
{
    return PyLong_FromUnsignedLongLong(self->ring == NULL ? 0 : count_failures(self));
}

static bool
all_have_left(const Node *node, uint64_t number)
{
    for (uint32_t i = 1; i < node->workers; i++)
        if (atomic_load_explicit(&node->status[i].executed, memory_order_acquire) < number)
            return false;
    return true;
}

/* A command of a node's. */
struct command {
    const Node *node;
    uint64_t number;
};

static bool
is_left_by_all(const void *what)
{
    const struct command *command = what;
    return all_have_left(command->node, command->number);
}

/* Whether all workers have left all commands, and nothing has failed that is still to be reported.
 * Waits for that as long as such waits usually last. False says nothing. */
static PyObject *
all_is_well(ControllerState *self, PyObject *ignored)
{
    if (!is_quiet(self))
        Py_RETURN_FALSE;
    if (self->ring == NULL) /* worker 0 alone */
        return PyBool_FromLong(self->dead_count == 0);
    /* Who waits for all expects that what has been dropped is gone. */
    if (self->dead_count > 0 && tell(self, KILL_REG, 0, ALL) < 0)
        return NULL;
    if (self->ring == NULL)
        Py_RETURN_FALSE;
    RingObject *ring = (RingObject *)Py_NewRef((PyObject *)self->ring);
    Node *node = ring->ring.node;
    struct command command = {node, ring_published(&ring->ring)};
    bool left = is_left_by_all(&command);
    if (!left) {
        Py_BEGIN_ALLOW_THREADS
        left = node_poll(is_left_by_all, &command, node->spin_ns);
        Py_END_ALLOW_THREADS
    }
    bool well = left && self->ring == ring && count_failures(self) == self->failures_seen;
    Py_DECREF(ring);
    return PyBool_FromLong(well);
}

/* Whether all other workers have left a command. If not, who does so rings the bell from now on. */
static PyObject *
all_left(ControllerState *self, PyObject *argument)
{
    unsigned long long number = PyLong_AsUnsignedLongLong(argument);
    if (number == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    if (self->ring == NULL)
        Py_RETURN_TRUE;
    Node *node = self->ring->ring.node;
    atomic_store(&node->header->awaited, number);
    atomic_thread_fence(memory_order_seq_cst);
    bool left = all_have_left(node, number);
    if (left)
        atomic_store(&node->header->awaited, 0);
    return PyBool_FromLong(left);
}

static PyMemberDef controller_members[] = {
    {"closed", T_BOOL, offsetof(ControllerState, closed), 0, NULL},
    {"_failures_seen", T_ULONGLONG, offsetof(ControllerState, failures_seen), 0, NULL},
    {"_replies", T_OBJECT, offsetof(ControllerState, replies), 0, NULL},
    {"_unreported", T_OBJECT, offsetof(ControllerState, unreported), 0, NULL},
    {"_alone", T_BOOL, offsetof(ControllerState, alone), 0, NULL},
    {"_submitting", T_BOOL, offsetof(ControllerState, submitting), 0, NULL},
    {NULL},
};

static PyMethodDef controller_methods[] = {
    {"_prepare", (PyCFunction)controller_prepare, METH_VARARGS, NULL},
    {"_set_ring", (PyCFunction)set_ring, METH_VARARGS, NULL},
    {"_failure_count", (PyCFunction)failure_count, METH_NOARGS, NULL},
    {"_all_left", (PyCFunction)all_left, METH_O, NULL},
    {"_all_is_well", (PyCFunction)all_is_well, METH_NOARGS, NULL},
    {"_set_known", (PyCFunction)set_known, METH_VARARGS, NULL},
    {"_set_context", (PyCFunction)set_context, METH_VARARGS, NULL},
    {"_dead_registers", (PyCFunction)controller_dead, METH_NOARGS, NULL},
    {"_forget_dead", (PyCFunction)controller_forget_dead, METH_O, NULL},
    {"new_register", (PyCFunction)controller_new_register, METH_NOARGS, NULL},
    {NULL},
};

static PyType_Slot controller_slots[] = {
    {Py_tp_new, controller_new},
    {Py_tp_traverse, controller_traverse},
    {Py_tp_clear, controller_clear},
    {Py_tp_dealloc, controller_dealloc},
    {Py_tp_members, controller_members},
    {Py_tp_methods, controller_methods},
    {Py_tp_doc, "The native part of a controller."},
    {0, NULL},
};

static PyType_Spec controller_spec = {
    .name = "spmd_disco.native._native.ControllerState",
    .basicsize = sizeof(ControllerState),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = controller_slots,
};

PyTypeObject *ControllerState_Type;

int
add_controller(PyObject *module)
{
    ControllerState_Type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &controller_spec, NULL);
    return ControllerState_Type == NULL ? -1 : PyModule_AddType(module, ControllerState_Type);
}
