/* The native part of a DRef: its fields, and the note of its death.
 *
 * A handle may die in any thread, during a garbage collection, in a signal handler. All that
 * happens then is that its number is appended to an array, which the next command takes along. */
#include "handle.h"

#include <structmember.h>

#include "controller.h"

static int
handle_init(HandleObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"reg_id", "session", "command", NULL};
    unsigned long long reg_id;
    long long command;
    PyObject *session;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KOL:DRef", names, &reg_id, &session, &command))
        return -1;
    PyObject *owner = PyObject_GetAttrString(session, "_controller");
    if (owner == NULL)
        return -1;
    if (!PyObject_TypeCheck(owner, ControllerState_Type)) {
        PyErr_SetString(PyExc_TypeError, "a DRef is made by a session");
        Py_DECREF(owner);
        return -1;
    }
    if (self->session != NULL) {
        PyErr_SetString(PyExc_TypeError, "a DRef is initialised once");
        Py_DECREF(owner);
        return -1;
    }
    self->reg_id = reg_id;
    self->command = command;
    self->session = Py_NewRef(session);
    self->owner = (ControllerState *)owner;
    return 0;
}

static int
handle_traverse(HandleObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->session);
    Py_VISIT(self->owner);
    return 0;
}

static int
handle_clear(HandleObject *self)
{
    if (self->owner != NULL) {
        controller_bury(self->owner, self->reg_id);
        Py_CLEAR(self->owner);
    }
    Py_CLEAR(self->session);
    return 0;
}

static void
handle_dealloc(HandleObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    handle_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef handle_members[] = {
    {"reg_id", T_ULONGLONG, offsetof(HandleObject, reg_id), 0, NULL},
    {"_command", T_LONGLONG, offsetof(HandleObject, command), 0, NULL},
    {"session", T_OBJECT_EX, offsetof(HandleObject, session), 0, NULL},
    {NULL},
};

static PyType_Slot handle_slots[] = {
    {Py_tp_init, handle_init},
    {Py_tp_traverse, handle_traverse},
    {Py_tp_clear, handle_clear},
    {Py_tp_dealloc, handle_dealloc},
    {Py_tp_members, handle_members},
    {Py_tp_doc, "The native part of a DRef."},
    {0, NULL},
};

static PyType_Spec handle_spec = {
    .name = "spmd_disco.native._native.Handle",
    .basicsize = sizeof(HandleObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = handle_slots,
};

PyTypeObject *Handle_Type;

int
add_handle(PyObject *module)
{
    Handle_Type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &handle_spec, NULL);
    return Handle_Type == NULL ? -1 : PyModule_AddType(module, Handle_Type);
}
