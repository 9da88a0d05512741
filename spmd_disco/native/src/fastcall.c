/* The methods that users call most, Session.call and DRef.get: the short way for the usual arguments.
 *
 * sessions.py and dref.py are the reference. Wherever anything is out of the ordinary, Python takes
 * over before anything has been sent: other arguments, other functions, an import path that has
 * changed, failures to be reported, a closed session. */
#include "submit.h"

#include <string.h>
#include <structmember.h>

#include "handle.h"

static PyObject *str_controller, *str_level, *str_poll, *str_structlog;
static PyObject *root_fields; /* of the root logger */

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

/* Encodes a function that goes by a name, as far as that is known already; see encode_reference. */
static int
encode_named(ControllerState *self, Buffer *buffer, PyObject *function, Call *call)
{
    if (self->references == NULL || self->worker == NULL)
        return 0;
    /* No others are among the keys; a callable's own __hash__ may do anything. */
    if (!PyUnicode_CheckExact(function) && !PyFunction_Check(function)
        && !PyCFunction_Check(function) && !PyType_CheckExact(function)
        && Py_TYPE(function)->tp_hash != PyBaseObject_Type.tp_hash)
        return 0;
    PyObject *reference = PyDict_GetItemWithError(self->references, function);
    if (reference == NULL || !PyBytes_CheckExact(reference))
        return PyErr_Occurred() ? -1 : 0;
    PyObject *known = worker_named(self->worker, reference);
    if (known == NULL || (!PyUnicode_CheckExact(function) && known != function))
        return PyErr_Occurred() ? -1 : 0;
    uint8_t *to = buffer_extend(buffer, PyBytes_GET_SIZE(reference));
    if (to == NULL)
        return -1;
    memcpy(to, PyBytes_AS_STRING(reference), PyBytes_GET_SIZE(reference));
    call->function = known;
    return 1;
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
    int named = encode_named(self, buffer, function, call);
    if (named != 0)
        return named;
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
    return 0;
}

/* Whether `value` is a handle of another session, or of none; they are Python's to refuse. */
static bool
is_foreign(ControllerState *self, PyObject *session, PyObject *value)
{
    return PyObject_TypeCheck(value, Handle_Type) && ((HandleObject *)value)->session != session;
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
    /* Another thread may replace it while this one hands the command over. */
    PyObject *function = Py_XNewRef(call.function);
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
    Py_XDECREF(function);
    Py_XDECREF(digest);
    buffer_free(&buffer);
    return done;
}

static PyObject *
no_registers(void *context, uint64_t id)
{
    PyErr_Format(PyExc_TypeError, "register %llu stands where only plain values can",
                 (unsigned long long)id);
    return NULL;
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

/* What a worker has been asked, and where it answers. */
struct question {
    const RepliesObject *boxes;
    uint32_t worker;
};

static bool
is_answered(const void *what)
{
    const struct question *question = what;
    return replies_waiting(question->boxes, question->worker);
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
    struct question question = {boxes, (uint32_t)target};
    bool here;
    Py_BEGIN_ALLOW_THREADS
    here = node_poll(is_answered, &question, boxes->node->spin_ns);
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
    if (acquire_lock(controller) < 0)
        goto end;
    int done = call_locked(controller, args[0], args + 1, count - 1, &result);
    if (release_lock(controller) < 0) {
        Py_CLEAR(result);
        goto end;
    }
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

int
add_fastcall(PyObject *module)
{
    const Name names[] = {
        {&str_controller, "_controller"}, {&str_level, "level"}, {&str_poll, "_poll"},
        {&str_structlog, "structlog"},
    };
    if (intern_names(names, sizeof names / sizeof *names) < 0)
        return -1;
    PyObject *logging = PyImport_ImportModule("logging");
    PyObject *root = logging == NULL ? NULL : PyObject_GetAttrString(logging, "root");
    PyObject *fields = root == NULL ? NULL : PyObject_GetAttrString(root, "__dict__");
    Py_XDECREF(logging);
    Py_XDECREF(root);
    if (fields == NULL || prepare_submit() < 0)
        return -1;
    Py_XSETREF(root_fields, fields);
    PyTypeObject *fastcall = (PyTypeObject *)PyType_FromModuleAndSpec(module, &fastcall_spec, NULL);
    if (fastcall == NULL)
        return -1;
    int done = PyModule_AddType(module, fastcall);
    Py_DECREF(fastcall);
    return done;
}
