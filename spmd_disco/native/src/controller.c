/* The controller's side of the usual command, a call of a function with compact arguments.
 *
 * controller.py and sessions.py are the reference. The method that users call takes the short way
 * here where it can, and hands over to Python wherever anything is out of the ordinary: other
 * arguments, other functions, an import path that has changed, a closed session. */
#include "controller.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#include "codec.h"
#include "handle.h"

static PyObject *str_structlog, *str_level, *str_acquire, *str_release, *str_published,
    *str_reserve, *str_hit, *str_enter, *str_leave, *str_controller, *str_poll;
static PyObject *root_fields; /* of the root logger */

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

/* Drops the first so many dead registers on worker 0, too. More may die by that. */
static int
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

/* The short way ------------------------------------------------------------------------------- */

/* Whether the workers know the import path and the logging of this process as they are. */
static bool
context_is_known(ControllerState *self)
{
    PyObject *path = PySys_GetObject("path");
    if (self->path == NULL || path == NULL || !PyList_CheckExact(path) ||
        PyList_GET_SIZE(path) != PyTuple_GET_SIZE(self->path))
        return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(path); i++)
        if (PyList_GET_ITEM(path, i) != PyTuple_GET_ITEM(self->path, i))
            return false;
    /* structlog's configuration has to be compared in Python. */
    return PyDict_GetItem(PyImport_GetModuleDict(), str_structlog) == NULL &&
           PyDict_GetItem(root_fields, str_level) == self->level;
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

/* Encodes which function to call: 1, 0 if that is Python's to do, or -1 with an exception. */
static int
encode_reference(ControllerState *self, Buffer *buffer, PyObject *function, Call *call,
                 PyObject **digest)
{
    uint8_t *to;
    if (PyObject_TypeCheck(function, Handle_Type)) {
        HandleObject *handle = (HandleObject *)function;
        if (handle->session == NULL)
            return 0;
        to = buffer_extend(buffer, 9);
        if (to == NULL)
            return -1;
        to[0] = FUNCTION_REGISTER;
        uint64_t id = handle->reg_id;
        memcpy(to + 1, &id, sizeof id);
        call->function_register = id;
        return 1;
    }
    if (PyFunction_Check(function) && self->known != NULL) {
        PyObject *key = PyObject_CallOneArg(self->known, function);
        if (key == NULL)
            return -1;
        PyObject *known = NULL;
        if (PyBytes_CheckExact(key) && PyBytes_GET_SIZE(key) == DIGEST)
            known = worker_known(self->worker, key);
        if (known == NULL || (to = buffer_extend(buffer, 1 + DIGEST)) == NULL) {
            Py_DECREF(key);
            return PyErr_Occurred() ? -1 : 0;
        }
        to[0] = FUNCTION_KNOWN;
        memcpy(to + 1, PyBytes_AS_STRING(key), DIGEST);
        call->function = known;
        *digest = key;
        return 1;
    }
    if (!PyUnicode_CheckExact(function) || self->references == NULL || self->worker == NULL ||
        self->worker->functions == NULL)
        return 0;
    PyObject *reference = PyDict_GetItemWithError(self->references, function);
    if (reference == NULL || !PyBytes_CheckExact(reference))
        return PyErr_Occurred() ? -1 : 0;
    PyObject *known = PyDict_GetItemWithError(self->worker->functions, reference);
    if (known == NULL)
        return PyErr_Occurred() ? -1 : 0;
    to = buffer_extend(buffer, PyBytes_GET_SIZE(reference));
    if (to == NULL)
        return -1;
    memcpy(to, PyBytes_AS_STRING(reference), PyBytes_GET_SIZE(reference));
    call->function = known;
    return 1;
}

/* Whether `value` is a handle of another session, or of none; they are Python's to refuse. */
static bool
is_foreign(ControllerState *self, PyObject *session, PyObject *value)
{
    return PyObject_TypeCheck(value, Handle_Type) && ((HandleObject *)value)->session != session;
}

static int
call_method(PyObject *object, PyObject *name)
{
    PyObject *result = PyObject_CallMethodNoArgs(object, name);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Hands a message to the channel, when that has room. Returns -1 if it could not, or if an interrupt
 * came in between; `recover` then says how far things are. */
static int
publish(ControllerState *self, const Buffer *buffer, long long number)
{
    PyObject *size = PyLong_FromSize_t(buffer->size), *done = NULL;
    if (size == NULL)
        return -1;
    if (self->ring != NULL) {
        struct iovec part = {buffer->data, buffer->size};
        int pushed;
        while ((pushed = ring_try_push(&self->ring->ring, (uint64_t)number, &part, 1)) == 0) {
            done = PyObject_CallMethodOneArg(self->channel, str_reserve, size);
            if (done == NULL)
                break;
            Py_CLEAR(done);
        }
        Py_DECREF(size);
        return pushed > 0 ? 0 : -1;
    }
    done = PyObject_CallMethodOneArg(self->channel, str_reserve, size);
    Py_DECREF(size);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    done = PyObject_CallMethod(self->channel, "publish", "Liy#", number, ALL, buffer->data,
                               (Py_ssize_t)buffer->size);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Python's side finds out how far a command has come that was struck in between, and repairs it.
 * What is to be raised stays set. */
static void
recover(ControllerState *self, const Buffer *buffer, long long number)
{
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    PyErr_NormalizeException(&type, &raised, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(raised, traceback);
    PyObject *told = PyObject_CallMethod((PyObject *)self, "_recover", "Ly#O", number, buffer->data,
                                         (Py_ssize_t)buffer->size, raised);
    if (told != NULL) {
        Py_DECREF(told);
        PyErr_Restore(type, raised, traceback);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(raised);
    Py_XDECREF(traceback);
}

/* Runs worker 0's half of a command, with its output labelled: see worker_run. */
static PyObject *
run_own_half(ControllerState *self, const Call *call, PyObject *digest)
{
    /* The workers do the same with their own. */
    if (digest != NULL && (move_to_end(self->codes, digest) < 0 ||
                           move_to_end(self->worker->codes, digest) < 0))
        return NULL;
    if (self->output == NULL || self->output == Py_None)
        return worker_run(self->worker, call);
    if (call_method(self->output, str_enter) < 0)
        return NULL;
    PyObject *error = worker_run(self->worker, call);
    PyObject *type, *raised, *traceback;
    PyErr_Fetch(&type, &raised, &traceback);
    if (call_method(self->output, str_leave) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(raised);
        Py_XDECREF(traceback);
        Py_CLEAR(error);
    }
    else
        PyErr_Restore(type, raised, traceback);
    return error;
}

/* Publishes a command and runs worker 0's half. Returns -1 with what is to be raised. */
static int
publish_and_run(ControllerState *self, Buffer *buffer, Call *call, size_t dead, PyObject *digest)
{
    if (PyObject_SetAttr(self->interrupts, str_hit, Py_False) < 0)
        return -1;
    PyObject *error = NULL;
    if (publish(self, buffer, call->number) == 0 && drop_dead(self, dead) == 0)
        error = run_own_half(self, call, digest);
    if (error == NULL) {
        recover(self, buffer, call->number);
        return -1;
    }
    PyObject *told = NULL;
    if (error != Py_None) {
        told = PyObject_CallMethod((PyObject *)self, "_after_failure", "O", error);
        if (told == NULL) {
            Py_DECREF(error);
            return -1;
        }
        Py_DECREF(told);
    }
    Py_DECREF(error);
    return 0;
}

static long long
next_number(ControllerState *self)
{
    if (self->ring != NULL)
        return (long long)ring_published(&self->ring->ring) + 1;
    PyObject *published = PyObject_GetAttr(self->channel, str_published);
    long long number = published == NULL ? -1 : PyLong_AsLongLong(published);
    Py_XDECREF(published);
    return number < 0 && PyErr_Occurred() ? -1 : number + 1;
}

/* With the lock held: 1, or 0 if the call is Python's to make and nothing has been sent, or -1. */
static int
call_locked(ControllerState *self, PyObject *session, PyObject *const *args, Py_ssize_t count,
            PyObject **result)
{
    if (self->closed || self->submitting || !context_is_known(self))
        return 0;
    Buffer buffer;
    buffer_init(&buffer);
    size_t dead = self->dead_count;
    PyObject *digest = NULL;
    CommandHead head = {.action = CALL_PACKED, .kills = (uint32_t)dead, .target = ALL};
    Call call = {.arguments = args + 1, .count = count - 1};
    int done = dead > UINT32_MAX ? 0 : 1;
    uint8_t *to = buffer_extend(&buffer, sizeof head + 8 * dead);
    if (to == NULL)
        return -1;
    memcpy(to + sizeof head, self->dead, 8 * dead);
    if (done > 0)
        done = encode_reference(self, &buffer, args[0], &call, &digest);
    if (done > 0 && (to = buffer_extend(&buffer, 2)) == NULL)
        done = -1;
    if (done > 0) {
        to[0] = 'A';
        to[1] = (uint8_t)(count - 1);
    }
    for (Py_ssize_t i = 1; i < count && done > 0; i++) {
        if (PyObject_TypeCheck(args[i], Handle_Type)) {
            uint64_t id = ((HandleObject *)args[i])->reg_id;
            to = buffer_extend(&buffer, 9);
            if (to == NULL)
                done = -1;
            else {
                to[0] = 'r';
                memcpy(to + 1, &id, sizeof id);
            }
        }
        else
            done = encode_compact(&buffer, args[i]);
    }
    HandleObject *handle = NULL;
    if (done > 0) {
        PyTypeObject *type = (PyTypeObject *)self->dref_type;
        handle = (HandleObject *)type->tp_alloc(type, 0);
        call.number = handle == NULL ? -1 : next_number(self);
        if (call.number < 0)
            done = -1;
    }
    if (done > 0) {
        head.number = (uint64_t)call.number;
        head.destination = call.destination = ++self->registers;
        memcpy(buffer.data, &head, sizeof head);
        self->submitting = 1;
        done = publish_and_run(self, &buffer, &call, dead, digest) < 0 ? -1 : 1;
        self->submitting = 0;
    }
    if (done > 0) {
        handle->reg_id = call.destination;
        handle->command = call.number;
        handle->session = Py_NewRef(session);
        handle->owner = (ControllerState *)Py_NewRef(self);
        *result = (PyObject *)handle;
    }
    else
        Py_XDECREF(handle);
    Py_XDECREF(digest);
    buffer_free(&buffer);
    return done;
}

/* Whether this thread may use the session, and nothing is to be reported that is known of. */
static bool
is_quiet(const ControllerState *self)
{
    return (self->ring != NULL || self->alone) && !self->closed && !self->submitting && self->forks == fork_count &&
           self->worker != NULL && current_worker() == NULL && self->unreported != NULL &&
           PyList_CheckExact(self->unreported) && PyList_GET_SIZE(self->unreported) == 0 &&
           self->worker->failures != NULL && PyList_CheckExact(self->worker->failures) &&
           PyList_GET_SIZE(self->worker->failures) == 0;
}

/* Publishes a command in which worker 0 has nothing to do but to drop registers. Returns its number,
 * 0 where that is Python's to do, or -1. With the lock held. */
static long long
tell_locked(ControllerState *self, int action, uint64_t id, long target)
{
    if (!is_quiet(self))
        return 0;
    size_t dead = self->dead_count;
    if (dead > UINT32_MAX)
        return 0;
    Buffer buffer;
    buffer_init(&buffer);
    long long number = next_number(self);
    CommandHead head = {(uint64_t)number, (uint8_t)action, 0, (uint32_t)dead, (int32_t)target, id};
    uint8_t *to = number < 0 ? NULL : buffer_extend(&buffer, sizeof head + 8 * dead);
    int done = -1;
    if (to != NULL && PyObject_SetAttr(self->interrupts, str_hit, Py_False) == 0) {
        memcpy(to, &head, sizeof head);
        memcpy(to + sizeof head, self->dead, 8 * dead);
        self->submitting = 1;
        done = publish(self, &buffer, number);
        if (done == 0)
            done = drop_dead(self, dead);
        if (done < 0)
            recover(self, &buffer, number);
        self->submitting = 0;
    }
    buffer_free(&buffer);
    return done < 0 ? -1 : number;
}

static PyObject *
no_registers(void *context, uint64_t id)
{
    PyErr_Format(PyExc_TypeError, "register %llu stands where only plain values can",
                 (unsigned long long)id);
    return NULL;
}

/* The same, taking the lock for it. */
static long long
tell(ControllerState *self, int action, uint64_t id, long target)
{
    if (call_method(self->lock, str_acquire) < 0)
        return -1;
    long long number = tell_locked(self, action, id, target);
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (call_method(self->lock, str_release) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        return -1;
    }
    PyErr_Restore(type, error, traceback);
    return number;
}

/* The value in a reply that says nothing of failures and is compact; NULL with nothing set if not. */
static PyObject *
take_reply(ControllerState *self, long long number, long target)
{
    PyObject *polled = PyObject_CallMethodNoArgs((PyObject *)self, str_poll);
    if (polled == NULL)
        return NULL;
    Py_DECREF(polled);
    if (self->replies == NULL || !PyDict_CheckExact(self->replies))
        return NULL;
    PyObject *key = Py_BuildValue("lL", target, number), *value = NULL;
    PyObject *reply = key == NULL ? NULL : PyDict_GetItemWithError(self->replies, key);
    if (reply != NULL && PyMemoryView_Check(reply)) {
        Py_buffer *view = PyMemoryView_GET_BUFFER(reply);
        const uint8_t *data = view->buf;
        if (view->len > 9 && view->len < 2048 && data[8] == 'N') {
            Reader reader = {data + 9, (size_t)view->len - 9, 0};
            value = decode_compact(&reader, no_registers, NULL);
            if (value != NULL && PyDict_DelItem(self->replies, key) < 0)
                Py_CLEAR(value);
        }
    }
    Py_XDECREF(key);
    return value;
}

/* DRef.get: the value of worker 0 if it needs no copy, or that of another if it is small. */
static PyObject *
get_value(PyObject *const *args, Py_ssize_t count)
{
    HandleObject *handle = (HandleObject *)args[0];
    if (count > 2 || !PyObject_TypeCheck(args[0], Handle_Type) || handle->session == NULL)
        return NULL;
    long target = 0;
    if (count == 2) {
        if (!PyLong_CheckExact(args[1]))
            return NULL;
        int overflow;
        target = PyLong_AsLongAndOverflow(args[1], &overflow);
        if (overflow)
            return NULL;
    }
    PyObject *owner = PyObject_GetAttr(handle->session, str_controller), *value = NULL;
    if (owner == NULL) {
        PyErr_Clear(); /* Python's side says so */
        return NULL;
    }
    ControllerState *self = (ControllerState *)owner;
    if (!PyObject_TypeCheck(owner, ControllerState_Type) || !is_quiet(self) || target < 0 ||
        (target > 0 && (self->ring == NULL || target >= (long)self->ring->ring.node->workers)))
        goto end;
    if (target == 0) {
        value = worker_value(self->worker, handle->reg_id);
        /* Only what nobody can change is handed out without a copy. */
        value = value != NULL && (value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
                                  PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) ||
                                  PyBytes_CheckExact(value))
                    ? Py_NewRef(value)
                    : NULL;
        goto end;
    }
    long long number =
        self->boxes == NULL ? 0 : tell(self, DEBUG_GET_FROM_REMOTE, handle->reg_id, target);
    if (number <= 0)
        goto end;
    RepliesObject *boxes = (RepliesObject *)Py_NewRef((PyObject *)self->boxes);
    bool here = false;
    Py_BEGIN_ALLOW_THREADS
    int64_t end = node_now() + boxes->node->spin_ns;
    do {
        for (int poll = 0; poll < 16 && !here; poll++) {
            here = replies_waiting(boxes, (uint32_t)target);
            relax();
        }
        if (!here)
            sched_yield();
    } while (!here && node_now() < end);
    Py_END_ALLOW_THREADS
    Py_DECREF(boxes);
    if (here)
        value = take_reply(self, number, target);
    if (value == NULL && !PyErr_Occurred())
        value = PyObject_CallMethod(owner, "_finish_get", "Ll", number, target);
end:
    Py_DECREF(owner);
    return value;
}

/* A method that takes the short way where it can, and else is what it wraps. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *wrapped;
    bool gets; /* it is DRef.get, and not Session.call */
} FastCall;

static PyObject *
fastcall_call(FastCall *self, PyObject *const *args, size_t flags, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject *owner = NULL, *result = NULL;
    if (self->gets) {
        if (count > 0 && (names == NULL || PyTuple_GET_SIZE(names) == 0))
            result = get_value(args, count);
        if (result == NULL && !PyErr_Occurred())
            result = PyObject_Vectorcall(self->wrapped, args, flags, names);
        return result;
    }
    if (count < 2 || count - 2 > MOST_ARGUMENTS || (names != NULL && PyTuple_GET_SIZE(names) > 0) ||
        current_worker() != NULL)
        goto slow;
    owner = PyObject_GetAttr(args[0], str_controller);
    if (owner == NULL) {
        PyErr_Clear(); /* Python's side says so */
        goto slow;
    }
    ControllerState *controller = (ControllerState *)owner;
    if (!PyObject_TypeCheck(owner, ControllerState_Type) || controller->closed ||
        controller->forks != fork_count || controller->lock == NULL || controller->worker == NULL ||
        controller->channel == NULL || controller->dref_type == NULL)
        goto slow;
    for (Py_ssize_t i = 1; i < count; i++)
        if (is_foreign(controller, args[0], args[i]))
            goto slow;
    if (call_method(controller->lock, str_acquire) < 0)
        goto end;
    int done = call_locked(controller, args[0], args + 1, count - 1, &result);
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (call_method(controller->lock, str_release) < 0) {
        Py_CLEAR(result);
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        goto end;
    }
    PyErr_Restore(type, error, traceback);
    if (done != 0)
        goto end;
slow:
    result = PyObject_Vectorcall(self->wrapped, args, flags, names);
end:
    Py_XDECREF(owner);
    return result;
}

static PyObject *
fastcall_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *wrapped;
    int gets = 0;
    if (!PyArg_ParseTuple(args, "O|p:FastCall", &wrapped, &gets))
        return NULL;
    FastCall *self = (FastCall *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->vectorcall = (vectorcallfunc)fastcall_call;
        self->wrapped = Py_NewRef(wrapped);
        self->gets = gets;
    }
    return (PyObject *)self;
}

static int
fastcall_traverse(FastCall *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->wrapped);
    return 0;
}

static int
fastcall_clear(FastCall *self)
{
    Py_CLEAR(self->wrapped);
    return 0;
}

static void
fastcall_dealloc(FastCall *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    fastcall_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
fastcall_get(PyObject *self, PyObject *instance, PyObject *owner)
{
    return instance == NULL || instance == Py_None ? Py_NewRef(self)
                                                   : PyMethod_New(self, instance);
}

/* Name, text, signature and module are those of what it wraps. */
static PyObject *
fastcall_getattro(FastCall *self, PyObject *name)
{
    PyObject *value = PyObject_GenericGetAttr((PyObject *)self, name);
    if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError) && self->wrapped != NULL) {
        PyErr_Clear();
        value = PyObject_GetAttr(self->wrapped, name);
    }
    return value;
}

static PyObject *
fastcall_doc(FastCall *self, void *closure)
{
    return PyObject_GetAttrString(self->wrapped, "__doc__");
}

static PyMemberDef fastcall_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastCall, vectorcall), READONLY, NULL},
    {"__wrapped__", T_OBJECT, offsetof(FastCall, wrapped), READONLY, NULL},
    {NULL},
};

static PyGetSetDef fastcall_attributes[] = {
    {"__doc__", (getter)fastcall_doc, NULL, NULL, NULL},
    {NULL},
};

static PyType_Slot fastcall_slots[] = {
    {Py_tp_new, fastcall_new},
    {Py_tp_traverse, fastcall_traverse},
    {Py_tp_clear, fastcall_clear},
    {Py_tp_dealloc, fastcall_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_descr_get, fastcall_get},
    {Py_tp_getattro, fastcall_getattro},
    {Py_tp_members, fastcall_members},
    {Py_tp_getset, fastcall_attributes},
    {0, NULL},
};

static PyType_Spec fastcall_spec = {
    .name = "spmd_disco.native._native.FastCall",
    .basicsize = sizeof(FastCall),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_METHOD_DESCRIPTOR,
    .slots = fastcall_slots,
};

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
    uint64_t number = ring_published(&ring->ring);
    bool left = all_have_left(node, number);
    if (!left) {
        Py_BEGIN_ALLOW_THREADS
        int64_t end = node_now() + node->spin_ns;
        do {
            for (int poll = 0; poll < 16 && !left; poll++) {
                left = all_have_left(node, number);
                relax();
            }
            if (!left)
                sched_yield();
        } while (!left && node_now() < end);
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

static int
add_names(void)
{
    struct {
        PyObject **where;
        const char *text;
    } names[] = {
        {&str_structlog, "structlog"}, {&str_level, "level"}, {&str_acquire, "acquire"},
        {&str_release, "release"}, {&str_published, "published"}, {&str_reserve, "reserve"},
        {&str_hit, "hit"}, {&str_enter, "enter"}, {&str_leave, "leave"},
        {&str_controller, "_controller"}, {&str_poll, "_poll"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        PyObject *text = PyUnicode_InternFromString(names[i].text);
        if (text == NULL)
            return -1;
        Py_XSETREF(*names[i].where, text);
    }
    PyObject *logging = PyImport_ImportModule("logging");
    PyObject *root = logging == NULL ? NULL : PyObject_GetAttrString(logging, "root");
    PyObject *fields = root == NULL ? NULL : PyObject_GetAttrString(root, "__dict__");
    Py_XDECREF(logging);
    Py_XDECREF(root);
    if (fields == NULL)
        return -1;
    Py_XSETREF(root_fields, fields);
    return 0;
}

int
add_controller(PyObject *module)
{
    if (add_names() < 0)
        return -1;
    ControllerState_Type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &controller_spec, NULL);
    if (ControllerState_Type == NULL || PyModule_AddType(module, ControllerState_Type) < 0)
        return -1;
    PyTypeObject *fastcall = (PyTypeObject *)PyType_FromModuleAndSpec(module, &fastcall_spec, NULL);
    if (fastcall == NULL)
        return -1;
    int done = PyModule_AddType(module, fastcall);
    Py_DECREF(fastcall);
    return done;
}
