/* The interpreter's step for the usual command, a call of a function with compact arguments.
 *
 * worker.py is the reference; it takes all other commands, and describes failures. Signal handlers
 * run only where Python code does, so what stands between two calls of Python here is atomic. */
#include "worker.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <structmember.h>

#include "codec.h"
#include "handle.h"
#include "ring.h"

unsigned fork_count;
static PyTypeObject *failed_type; /* what a register holds whose command failed */
static _Thread_local WorkerState *current;

static void
note_fork(void)
{
    fork_count++;
}

PyObject *
current_worker(void)
{
    return (PyObject *)current;
}

static PyObject *
get_current(PyObject *module, PyObject *ignored)
{
    return Py_NewRef(current == NULL ? Py_None : (PyObject *)current);
}

static PyObject *
set_current(PyObject *module, PyObject *worker)
{
    if (worker != Py_None && !PyObject_TypeCheck(worker, WorkerState_Type)) {
        PyErr_SetString(PyExc_TypeError, "the current worker is a worker or None");
        return NULL;
    }
    WorkerState *previous = current;
    current = worker == Py_None ? NULL : (WorkerState *)Py_NewRef(worker);
    return previous == NULL ? Py_NewRef(Py_None) : (PyObject *)previous;
}

/* Registers ----------------------------------------------------------------------------------- */

int
worker_drop(WorkerState *self, uint64_t id)
{
    PyObject *key = PyLong_FromUnsignedLongLong(id);
    if (key == NULL)
        return -1;
    int found = PyDict_Contains(self->registers, key);
    if (found > 0)
        found = PyDict_DelItem(self->registers, key);
    Py_DECREF(key);
    return found < 0 ? -1 : 0;
}

PyObject *
worker_value(WorkerState *self, uint64_t id)
{
    PyObject *key = PyLong_FromUnsignedLongLong(id);
    PyObject *value = key == NULL ? NULL : PyDict_GetItemWithError(self->registers, key);
    Py_XDECREF(key);
    return value == NULL || Py_TYPE(value) == failed_type ? NULL : value;
}

static PyObject *
lookup(void *context, uint64_t id)
{
    WorkerState *self = context;
    PyObject *key = PyLong_FromUnsignedLongLong(id);
    if (key == NULL)
        return NULL;
    PyObject *value = PyDict_GetItemWithError(self->registers, key);
    if (value != NULL && Py_TYPE(value) != failed_type)
        Py_INCREF(value);
    else if (PyErr_Occurred())
        value = NULL;
    else /* it says what there is to say */
        value = PyObject_CallMethod((PyObject *)self, "lookup", "O", key);
    Py_DECREF(key);
    return value;
}

int
move_to_end(PyObject *codes, PyObject *key)
{
    PyObject *moved = PyObject_CallMethod(codes, "move_to_end", "O", key);
    Py_XDECREF(moved);
    return moved == NULL ? -1 : 0;
}

PyObject *
worker_named(WorkerState *self, PyObject *reference)
{
    if (self->functions == NULL)
        return NULL;
    PyObject *entry = PyDict_GetItemWithError(self->functions, reference);
    if (entry == NULL || !PyTuple_CheckExact(entry))
        return entry;
    /* An import path. The program may have replaced the module or the function since. */
    PyObject *module_name, *module, *fields, *name, *function;
    if (!PyArg_ParseTuple(entry, "OOOOO", &module_name, &module, &fields, &name, &function))
        return NULL;
    if (PyDict_GetItemWithError(PyImport_GetModuleDict(), module_name) != module
        || PyDict_GetItemWithError(fields, name) != function)
        return NULL;
    return function;
}

PyObject *
worker_known(WorkerState *self, PyObject *digest)
{
    PyObject *entry = self->codes == NULL || !PyDict_Check(self->codes) ? NULL : PyDict_GetItemWithError(self->codes, digest);
    if (entry == NULL || !PyList_CheckExact(entry) || PyList_GET_SIZE(entry) != 3)
        return NULL;
    PyObject *function = PyList_GET_ITEM(entry, 1);
    return function == Py_None ? NULL : function;
}

/* Calls --------------------------------------------------------------------------------------- */

/* Says in the status line which command this worker is in, and what that calls. */
static void
tell_begin(WorkerState *self, long long number)
{
    if (self->node == NULL)
        return;
    /* The text only changes with the function; most programs call few in turn. */
    if (self->told == self->function || self->function == NULL) {
        node_begin_command(&self->node->node, number, NULL, 0);
        return;
    }
    PyObject *name = PyUnicode_CheckExact(self->function)
                         ? Py_NewRef(self->function)
                         : PyObject_GetAttrString(self->function, "__qualname__");
    Py_ssize_t size = 0;
    const char *text = name != NULL && PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &size)
                                                             : NULL;
    if (text == NULL) {
        PyErr_Clear(); /* something callable without a name, or with a strange one */
        text = Py_TYPE(self->function)->tp_name;
        size = (Py_ssize_t)strlen(text);
    }
    node_begin_command(&self->node->node, number, text, size);
    Py_XDECREF(name);
    Py_XSETREF(self->told, Py_NewRef(self->function));
}

/* Fills `into` with new references to the arguments. Returns their number, or -1. */
static Py_ssize_t
get_arguments(WorkerState *self, const Call *call, PyObject **into, PyObject **all,
              PyObject **names)
{
    Py_ssize_t count = 0;
    if (call->encoded == NULL) {
        for (; count < call->count; count++) {
            PyObject *argument = call->arguments[count];
            into[count] = PyObject_TypeCheck(argument, Handle_Type)
                              ? lookup(self, ((HandleObject *)argument)->reg_id)
                              : Py_NewRef(argument);
            if (into[count] == NULL)
                goto error;
        }
        return count;
    }
    if (call->encoded_size >= 2 && call->encoded[0] == 'A') {
        Reader reader = {call->encoded, call->encoded_size, 2};
        for (; count < call->encoded[1]; count++) {
            into[count] = decode_compact(&reader, lookup, self);
            if (into[count] == NULL)
                break;
        }
        if (count == call->encoded[1])
            return count;
        if (PyErr_Occurred())
            goto error;
        while (count > 0)
            Py_DECREF(into[--count]);
    }
    /* Python decodes what is not compact. */
    PyObject *view = PyMemoryView_FromMemory((char *)call->encoded, call->encoded_size, PyBUF_READ);
    if (view == NULL)
        return -1;
    PyObject *both = PyObject_CallMethod((PyObject *)self, "_decode_arguments", "O", view);
    Py_DECREF(view);
    if (both == NULL)
        return -1;
    if (!PyArg_ParseTuple(both, "O!O!", &PyTuple_Type, all, &PyDict_Type, names)) {
        Py_DECREF(both);
        return -1;
    }
    Py_INCREF(*all);
    Py_INCREF(*names);
    Py_DECREF(both);
    return 0;
error:
    while (count > 0)
        Py_DECREF(into[--count]);
    return -1;
}

/* Calls the function and stores what it returns. Returns -1 with the failure set. */
static int
call_function(WorkerState *self, const Call *call)
{
    PyObject *function = call->function != NULL ? Py_NewRef(call->function)
                                                : lookup(self, call->function_register);
    if (function == NULL)
        return -1;
    int done = -1;
    Py_ssize_t count = 0;
    /* One place before the arguments, which a bound method may use for its object. */
    PyObject *space[1 + MOST_ARGUMENTS], **arguments = space + 1, *all = NULL, *names = NULL;
    if (PyCallable_Check(function))
        Py_XSETREF(self->function, Py_NewRef(function));
    if (call->number <= self->interrupted_through) {
        PyErr_SetNone(PyExc_KeyboardInterrupt);
        goto end;
    }
    count = get_arguments(self, call, arguments, &all, &names);
    if (count < 0) {
        count = 0;
        goto end;
    }
    if (!PyCallable_Check(function)) {
        PyErr_Format(PyExc_TypeError, "%R is not callable", function);
        goto end;
    }
    tell_begin(self, call->number);
    self->thread = PyThread_get_thread_ident();
    unsigned forks = fork_count;
    self->running = 1;
    PyObject *value = all != NULL
                          ? PyObject_Call(function, all, names)
                          : PyObject_Vectorcall(function, arguments,
                                                count | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    self->running = 0;
    if (fork_count != forks) {
        /* A child of the function's has come out of it: the Python side ends it. */
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        PyObject *never = PyObject_CallMethod((PyObject *)self, "_end_child", "O",
                                              error == NULL ? Py_None : error);
        Py_XDECREF(never);
        PyErr_WriteUnraisable((PyObject *)self);
        _exit(1);
    }
    if (self->on_command != Py_None && self->on_command != NULL) {
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyObject *ended = PyObject_CallNoArgs(self->on_command);
        if (ended == NULL) {
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(traceback);
            Py_CLEAR(value);
        }
        else {
            Py_DECREF(ended);
            PyErr_Restore(type, error, traceback);
        }
    }
    if (value != NULL) {
        PyObject *key = PyLong_FromUnsignedLongLong(call->destination);
        if (key != NULL)
            done = PyDict_SetItem(self->registers, key, value);
        Py_XDECREF(key);
        Py_DECREF(value);
    }
end:
    while (count > 0)
        Py_DECREF(arguments[--count]);
    Py_XDECREF(all);
    Py_XDECREF(names);
    Py_DECREF(function);
    return done;
}

static PyObject *
worker_begin(WorkerState *self, PyObject *number)
{
    long long value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred())
        return NULL;
    tell_begin(self, value);
    Py_RETURN_NONE;
}

static PyObject *
worker_leave(WorkerState *self, PyObject *args)
{
    long long number;
    int failed;
    if (!PyArg_ParseTuple(args, "Lp:_tell_left", &number, &failed))
        return NULL;
    if (self->node != NULL) {
        if (failed)
            node_fail_command(&self->node->node, number);
        node_leave_command(&self->node->node, number);
    }
    Py_RETURN_NONE;
}

static int
call_with_number(PyObject *function, long long number)
{
    if (function == NULL || function == Py_None)
        return 0;
    PyObject *argument = PyLong_FromLongLong(number);
    PyObject *result = argument == NULL ? NULL : PyObject_CallOneArg(function, argument);
    Py_XDECREF(argument);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

PyObject *
worker_run(WorkerState *self, const Call *call)
{
    self->number = call->number;
    if (call_with_number(self->begin, call->number) < 0)
        return NULL;
    WorkerState *previous = current;
    current = self;
    PyObject *result = Py_None;
    if (call_function(self, call) < 0) {
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback != NULL)
            PyException_SetTraceback(error, traceback);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        self->running = 0;
        PyObject *told = PyObject_CallMethod((PyObject *)self, "_fail_call", "LKO", call->number,
                                             (unsigned long long)call->destination, error);
        if (told == NULL)
            Py_CLEAR(error);
        Py_XDECREF(told);
        result = error;
    }
    else
        Py_INCREF(result);
    self->running = 0;
    current = previous;
    Py_XSETREF(self->function, Py_NewRef(Py_None));
    if (result != NULL) {
        self->finished = call->number;
        if (self->node != NULL) {
            if (result != Py_None)
                node_fail_command(&self->node->node, call->number);
            node_leave_command(&self->node->node, call->number);
        }
        if (call_with_number(self->leave, call->number) < 0)
            Py_CLEAR(result);
    }
    return result;
}

/* The type ------------------------------------------------------------------------------------ */

static int
worker_traverse(WorkerState *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->registers);
    Py_VISIT(self->function);
    Py_VISIT(self->begin);
    Py_VISIT(self->leave);
    Py_VISIT(self->on_command);
    Py_VISIT(self->functions);
    Py_VISIT(self->codes);
    Py_VISIT(self->failures);
    Py_VISIT(self->node);
    Py_VISIT(self->told);
    return 0;
}

static int
worker_clear(WorkerState *self)
{
    Py_CLEAR(self->registers);
    Py_CLEAR(self->function);
    Py_CLEAR(self->begin);
    Py_CLEAR(self->leave);
    Py_CLEAR(self->on_command);
    Py_CLEAR(self->functions);
    Py_CLEAR(self->codes);
    Py_CLEAR(self->failures);
    Py_CLEAR(self->node);
    Py_CLEAR(self->told);
    return 0;
}

static void
worker_dealloc(WorkerState *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    worker_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
worker_get_registers(WorkerState *self, void *closure)
{
    if (self->registers == NULL) {
        PyErr_SetString(PyExc_AttributeError, "registers");
        return NULL;
    }
    return Py_NewRef(self->registers);
}

static int
worker_set_registers(WorkerState *self, PyObject *value, void *closure)
{
    if (value == NULL || !PyDict_CheckExact(value)) {
        PyErr_SetString(PyExc_TypeError, "registers is a dict");
        return -1;
    }
    Py_XSETREF(self->registers, Py_NewRef(value));
    return 0;
}

static PyObject *
worker_get_functions(WorkerState *self, void *closure)
{
    return Py_NewRef(self->functions == NULL ? Py_None : self->functions);
}

static int
worker_set_functions(WorkerState *self, PyObject *value, void *closure)
{
    if (value == NULL || !PyDict_CheckExact(value)) {
        PyErr_SetString(PyExc_TypeError, "functions is a dict");
        return -1;
    }
    Py_XSETREF(self->functions, Py_NewRef(value));
    return 0;
}

static PyObject *
worker_set_node(WorkerState *self, PyObject *node)
{
    if (node != Py_None && !PyObject_TypeCheck(node, Node_Type)) {
        PyErr_SetString(PyExc_TypeError, "a Node or None is wanted");
        return NULL;
    }
    Py_XSETREF(self->node, node == Py_None ? NULL : (NodeObject *)Py_NewRef(node));
    Py_RETURN_NONE;
}

static PyGetSetDef worker_attributes[] = {
    {"registers", (getter)worker_get_registers, (setter)worker_set_registers, NULL, NULL},
    {"functions", (getter)worker_get_functions, (setter)worker_set_functions, NULL, NULL},
    {NULL},
};

static PyMemberDef worker_members[] = {
    {"function", T_OBJECT, offsetof(WorkerState, function), 0, NULL},
    {"_failures", T_OBJECT, offsetof(WorkerState, failures), 0, NULL},
    {"_codes", T_OBJECT, offsetof(WorkerState, codes), 0, NULL},
    {"_begin", T_OBJECT, offsetof(WorkerState, begin), 0, NULL},
    {"_leave", T_OBJECT, offsetof(WorkerState, leave), 0, NULL},
    {"_on_command", T_OBJECT, offsetof(WorkerState, on_command), 0, NULL},
    {"number", T_LONGLONG, offsetof(WorkerState, number), 0, NULL},
    {"finished", T_LONGLONG, offsetof(WorkerState, finished), 0, NULL},
    {"interrupted_through", T_LONGLONG, offsetof(WorkerState, interrupted_through), 0, NULL},
    {"_worker_id", T_INT, offsetof(WorkerState, worker_id), 0, NULL},
    {"thread", T_ULONG, offsetof(WorkerState, thread), 0, NULL},
    {"running", T_BOOL, offsetof(WorkerState, running), 0, NULL},
    {"closed", T_BOOL, offsetof(WorkerState, closed), 0, NULL},
    {NULL},
};

static PyMethodDef worker_methods[] = {
    {"step", (PyCFunction)worker_step, METH_O, NULL},
    {"drain", (PyCFunction)worker_drain, METH_VARARGS, NULL},
    {"set_node", (PyCFunction)worker_set_node, METH_O, NULL},
    {"_tell_begin", (PyCFunction)worker_begin, METH_O, NULL},
    {"_tell_left", (PyCFunction)worker_leave, METH_VARARGS, NULL},
    {NULL},
};

static PyType_Slot worker_slots[] = {
    {Py_tp_traverse, worker_traverse},
    {Py_tp_clear, worker_clear},
    {Py_tp_dealloc, worker_dealloc},
    {Py_tp_members, worker_members},
    {Py_tp_getset, worker_attributes},
    {Py_tp_methods, worker_methods},
    {Py_tp_doc, "The native part of a worker."},
    {0, NULL},
};

static PyType_Spec worker_spec = {
    .name = "spmd_disco.native._native.WorkerState",
    .basicsize = sizeof(WorkerState),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = worker_slots,
};

PyTypeObject *WorkerState_Type;

static PyObject *
set_failed_type(PyObject *module, PyObject *type)
{
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "a type is wanted");
        return NULL;
    }
    Py_XSETREF(failed_type, (PyTypeObject *)Py_NewRef(type));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"current_worker", get_current, METH_NOARGS, NULL},
    {"set_current_worker", set_current, METH_O, NULL},
    {"set_failed_type", set_failed_type, METH_O, NULL},
    {NULL},
};

int
add_worker(PyObject *module)
{
    if (pthread_atfork(NULL, NULL, note_fork) != 0) {
        PyErr_SetString(PyExc_OSError, "pthread_atfork");
        return -1;
    }
    WorkerState_Type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &worker_spec, NULL);
    if (WorkerState_Type == NULL || PyModule_AddType(module, WorkerState_Type) < 0)
        return -1;
    return PyModule_AddFunctions(module, functions);
}
