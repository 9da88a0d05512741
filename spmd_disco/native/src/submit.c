/* Publishing a command, and running worker 0's half of it.
 *
 * controller.py is the reference. Signal handlers run only where Python code does: in the channel's
 * methods, while it waits for room, and in worker 0's half. What has come in between is repaired by
 * Python's side. */
#include "submit.h"

#include <string.h>

static PyObject *str_acquire, *str_enter, *str_hit, *str_leave, *str_published, *str_release,
    *str_reserve;

int
call_method(PyObject *object, PyObject *name)
{
    PyObject *result = PyObject_CallMethodNoArgs(object, name);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Calls a method when something is over, with or without an exception. That one stays set, unless the
 * method raises another. */
static int
end_by(PyObject *object, PyObject *name)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (call_method(object, name) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        return -1;
    }
    PyErr_Restore(type, error, traceback);
    return 0;
}

int
acquire_lock(ControllerState *self)
{
    return call_method(self->lock, str_acquire);
}

int
release_lock(ControllerState *self)
{
    return end_by(self->lock, str_release);
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
    if (end_by(self->output, str_leave) < 0)
        Py_CLEAR(error);
    return error;
}

int
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

long long
next_number(ControllerState *self)
{
    if (self->ring != NULL)
        return (long long)ring_published(&self->ring->ring) + 1;
    PyObject *published = PyObject_GetAttr(self->channel, str_published);
    long long number = published == NULL ? -1 : PyLong_AsLongLong(published);
    Py_XDECREF(published);
    return number < 0 && PyErr_Occurred() ? -1 : number + 1;
}

/* See tell. With the lock held. */
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

long long
tell(ControllerState *self, int action, uint64_t id, long target)
{
    if (acquire_lock(self) < 0)
        return -1;
    long long number = tell_locked(self, action, id, target);
    return release_lock(self) < 0 ? -1 : number;
}

int
intern_names(const Name *names, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        PyObject *text = PyUnicode_InternFromString(names[i].text);
        if (text == NULL)
            return -1;
        Py_XSETREF(*names[i].where, text);
    }
    return 0;
}

int
prepare_submit(void)
{
    const Name names[] = {
        {&str_acquire, "acquire"}, {&str_enter, "enter"}, {&str_hit, "hit"},
        {&str_leave, "leave"}, {&str_published, "published"}, {&str_release, "release"},
        {&str_reserve, "reserve"},
    };
    return intern_names(names, sizeof names / sizeof *names);
}
