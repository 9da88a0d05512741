/* The interpreter's steps: the plain calls that come in messages, and some small commands beside.
 *
 * worker.py is the reference, and takes all others. */
#include "worker.h"

#include <string.h>

#include "codec.h"
#include "ring.h"

/* Bytes of a reply that is given at once. */
enum { MOST_QUICK = 1000 };

/* A plain call as it stands in a message. */
typedef struct {
    Call call;
    PyObject *function; /* a reference, or NULL where a register holds it */
    const uint8_t *kills;
    uint32_t kill_count;
} PlainCall;

/* Finds out if a message is a call that this file can run: 1, or 0, or -1 with an exception set. */
static int
parse_call(WorkerState *self, const uint8_t *data, size_t size, PlainCall *plain)
{
    CommandHead head;
    size_t at = sizeof head;
    if (size < sizeof head)
        return 0;
    memcpy(&head, data, sizeof head);
    if (head.action != CALL_PACKED || head.flags != 0 || head.target != ALL ||
        head.kills > (size - at) / 8 || self->registers == NULL)
        return 0;
    *plain = (PlainCall){
        .call = {.number = (long long)head.number, .destination = head.destination},
        .kills = data + at,
        .kill_count = head.kills,
    };
    at += 8 * (size_t)head.kills;
    /* Which function; only what is worth it to be quick. */
    PyObject *key, *function = NULL;
    if (size - at >= 9 && data[at] == FUNCTION_REGISTER) {
        memcpy(&plain->call.function_register, data + at + 1, 8);
        at += 9;
    }
    else if (size - at >= 5 && (data[at] == FUNCTION_GLOBAL || data[at] == FUNCTION_IMPORT)) {
        uint32_t length;
        memcpy(&length, data + at + 1, 4);
        /* Arguments follow, or for a global function that it comes without its definition. */
        if (length >= size - at - 5)
            return 0;
        size_t reference = 5 + (size_t)length;
        if (data[at] == FUNCTION_GLOBAL && data[at + reference++] != FUNCTION_NONE)
            return 0;
        key = PyBytes_FromStringAndSize((const char *)data + at, reference);
        if (key == NULL)
            return -1;
        function = worker_named(self, key);
        Py_DECREF(key);
        if (function == NULL)
            return PyErr_Occurred() ? -1 : 0;
        at += reference;
    }
    else if (size - at > DIGEST && data[at] == FUNCTION_KNOWN) {
        key = PyBytes_FromStringAndSize((const char *)data + at + 1, DIGEST);
        if (key == NULL)
            return -1;
        function = worker_known(self, key);
        bool failed = function == NULL ? PyErr_Occurred() != NULL : move_to_end(self->codes, key) < 0;
        Py_DECREF(key);
        if (failed || function == NULL)
            return failed ? -1 : 0;
        at += 1 + DIGEST;
    }
    else
        return 0;
    plain->function = Py_XNewRef(function);
    plain->call.function = function;
    plain->call.encoded = data + at;
    plain->call.encoded_size = size - at;
    return 1;
}

static int
drop_all(WorkerState *self, const uint8_t *kills, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t id;
        memcpy(&id, kills + 8 * (size_t)i, 8);
        if (worker_drop(self, id) < 0)
            return -1;
    }
    return 0;
}

/* Drops the dead registers and runs the call. Returns -1 when it was interrupted in between. */
static int
run_plain(WorkerState *self, PlainCall *plain)
{
    PyObject *result = NULL;
    if (drop_all(self, plain->kills, plain->kill_count) == 0)
        result = worker_run(self, &plain->call);
    Py_XDECREF(plain->function);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Runs the command in `message` if it is a plain call: True, or False if Python is to do it. */
PyObject *
worker_step(WorkerState *self, PyObject *message)
{
    Py_buffer view;
    if (PyObject_GetBuffer(message, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    PlainCall plain;
    int done = parse_call(self, view.buf, view.len, &plain);
    if (done > 0 && run_plain(self, &plain) < 0)
        done = -1;
    PyBuffer_Release(&view);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* A command that only drops registers, or a question for the value of one that can be answered with
 * a few bytes, or is another worker's: 1 and the reply (NULL if there is none to send), 0, or -1 with
 * an exception set. */
static int
parse_small(WorkerState *self, const uint8_t *data, size_t size, CommandHead *head, PyObject **reply)
{
    *reply = NULL;
    if (size < sizeof *head)
        return 0;
    memcpy(head, data, sizeof *head);
    if (head->flags != 0 || size != sizeof *head + 8 * (size_t)head->kills)
        return 0;
    if (head->action == KILL_REG && head->target == ALL)
        return 1;
    if (head->action != DEBUG_GET_FROM_REMOTE || head->target == ALL)
        return 0;
    if (head->target != self->worker_id)
        return 1;
    /* Failures that are to be reported are Python's. */
    if (self->failures == NULL || !PyList_CheckExact(self->failures) ||
        PyList_GET_SIZE(self->failures) > 0)
        return 0;
    for (uint32_t i = 0; i < head->kills; i++)
        if (memcmp(data + sizeof *head + 8 * (size_t)i, &head->destination, 8) == 0)
            return 0;
    PyObject *value = worker_value(self, head->destination);
    if (value == NULL || PyTuple_CheckExact(value))
        return PyErr_Occurred() ? -1 : 0;
    Buffer buffer;
    buffer_init(&buffer);
    uint8_t *to = buffer_extend(&buffer, 9);
    memcpy(to, &head->number, 8);
    to[8] = 'N'; /* nothing has failed */
    int encoded = encode_compact(&buffer, value);
    if (encoded > 0 && buffer.size > MOST_QUICK)
        encoded = 0;
    if (encoded > 0)
        *reply = PyBytes_FromStringAndSize((char *)buffer.data, buffer.size);
    buffer_free(&buffer);
    return encoded > 0 && *reply == NULL ? -1 : encoded;
}

/* Polls for a message in the ring, without the GIL, as long as such waits usually last. */
static bool
await_message(Ring *ring)
{
    bool found;
    Py_BEGIN_ALLOW_THREADS
    found = ring_spin(ring, ring->node->spin_ns);
    Py_END_ALLOW_THREADS
    return found;
}

/* Runs the plain calls that come through a ring, one after the other. Returns None when no more
 * comes for a while, False when the next message is Python's to receive, and, when asked to stop
 * after each, True after one. */
PyObject *
worker_drain(WorkerState *self, PyObject *args)
{
    RingObject *object;
    RepliesObject *replies;
    int once;
    if (!PyArg_ParseTuple(args, "O!O!p:drain", Ring_Type, &object, Replies_Type, &replies, &once))
        return NULL;
    Ring *ring = &object->ring;
    uint8_t copy[1024];
    for (;;) {
        if (self->node != NULL) {
            /* The watcher may be a moment later. */
            long long through = (long long)node_interrupted_through(&self->node->node);
            if (through > self->interrupted_through)
                self->interrupted_through = through;
        }
        const uint8_t *data;
        size_t size;
        uint64_t number;
        PlainCall plain;
        int got = ring_peek(ring, &data, &size, &number);
        if (got < 0)
            return NULL;
        if (got == 0) {
            if (await_message(ring))
                continue;
            Py_RETURN_NONE;
        }
        if (size > sizeof copy)
            Py_RETURN_FALSE;
        /* What is decoded must not lie in memory that the controller may write to again. */
        memcpy(copy, data, size);
        int plainly = parse_call(self, copy, size, &plain);
        if (plainly < 0)
            return NULL;
        if (plainly == 0) {
            CommandHead head;
            PyObject *reply;
            int quick = parse_small(self, copy, size, &head, &reply);
            if (quick < 0)
                return NULL;
            if (quick == 0)
                Py_RETURN_FALSE;
            ring_advance(ring);
            int sent = reply == NULL ? 0 : replies_send(replies, reply);
            Py_XDECREF(reply);
            if (sent < 0 || drop_all(self, copy + sizeof head, head.kills) < 0)
                return NULL;
            if (self->node != NULL)
                node_leave_command(&self->node->node, head.number);
            continue;
        }
        ring_advance(ring);
        if (run_plain(self, &plain) < 0 || PyErr_CheckSignals() < 0)
            return NULL;
        if (once)
            Py_RETURN_TRUE;
    }
}
