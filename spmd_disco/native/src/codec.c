/* The compact encoding of arguments, as spmd_disco/codec.py defines it: one byte that says what
 * follows, then little-endian numbers. That module is the reference, and takes what is left here:
 * dtypes, devices and pickles. */
#include "codec.h"

#include <string.h>

#include "handle.h"

void
buffer_free(Buffer *buffer)
{
    if (buffer->data != buffer->small)
        PyMem_Free(buffer->data);
}

uint8_t *
buffer_extend(Buffer *buffer, size_t size)
{
    size_t needed = buffer->size + size;
    if (needed > buffer->capacity) {
        size_t capacity = needed + needed / 2;
        uint8_t *data = PyMem_Malloc(capacity);
        if (data == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        memcpy(data, buffer->data, buffer->size);
        buffer_free(buffer);
        buffer->data = data;
        buffer->capacity = capacity;
    }
    uint8_t *start = buffer->data + buffer->size;
    buffer->size = needed;
    return start;
}

static void
store(uint8_t *to, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        to[i] = (uint8_t)(value >> 8 * i);
}

static uint64_t
load(const uint8_t *from, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)from[i] << 8 * i;
    return value;
}

/* A tag and a number behind it. */
static int
put_number(Buffer *buffer, char tag, uint64_t value, int bytes)
{
    uint8_t *to = buffer_extend(buffer, 1 + bytes);
    if (to == NULL)
        return -1;
    to[0] = tag;
    store(to + 1, value, bytes);
    return 1;
}

static int
put_bytes(Buffer *buffer, char tag, const char *data, Py_ssize_t size)
{
    if (size > UINT32_MAX)
        return 0;
    uint8_t *to = buffer_extend(buffer, 5 + (size_t)size);
    if (to == NULL)
        return -1;
    to[0] = tag;
    store(to + 1, (uint64_t)size, 4);
    memcpy(to + 5, data, size);
    return 1;
}

static int
put_tuple(Buffer *buffer, PyObject *value)
{
    Py_ssize_t count = PyTuple_GET_SIZE(value);
    if (count > UINT8_MAX)
        return 0;
    if (Py_EnterRecursiveCall(" while encoding an argument")) {
        /* Python's encoder finds the same, and pickles it. */
        PyErr_Clear();
        return 0;
    }
    int done = put_number(buffer, 't', (uint64_t)count, 1);
    for (Py_ssize_t i = 0; i < count && done > 0; i++)
        done = encode_compact(buffer, PyTuple_GET_ITEM(value, i));
    Py_LeaveRecursiveCall();
    return done;
}

int
encode_compact(Buffer *buffer, PyObject *value)
{
    if (value == Py_None)
        return put_number(buffer, 'N', 0, 0);
    if (value == Py_True)
        return put_number(buffer, 'T', 0, 0);
    if (value == Py_False)
        return put_number(buffer, 'F', 0, 0);
    if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow ? 0 : put_number(buffer, 'i', (uint64_t)number, 8);
    }
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        return put_number(buffer, 'f', bits, 8);
    }
    if (PyUnicode_CheckExact(value)) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(value, &size);
        if (text == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
                return -1;
            PyErr_Clear(); /* lone surrogates */
            return 0;
        }
        return put_bytes(buffer, 's', text, size);
    }
    if (PyBytes_CheckExact(value))
        return put_bytes(buffer, 'b', PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value));
    if (PyTuple_CheckExact(value))
        return put_tuple(buffer, value);
    return 0;
}

static const uint8_t *
take(Reader *reader, size_t size)
{
    if (size > reader->size - reader->at) {
        PyErr_Format(PyExc_ValueError, "the payload ends %zu bytes too early",
                     size - (reader->size - reader->at));
        return NULL;
    }
    const uint8_t *from = reader->data + reader->at;
    reader->at += size;
    return from;
}

static PyObject *
decode_tuple(Reader *reader, Lookup lookup, void *context)
{
    const uint8_t *head = take(reader, 1);
    if (head == NULL || Py_EnterRecursiveCall(" while decoding an argument"))
        return NULL;
    Py_ssize_t count = head[0];
    PyObject *value = PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count && value != NULL; i++) {
        PyObject *item = decode_compact(reader, lookup, context);
        if (item == NULL)
            Py_CLEAR(value);
        else
            PyTuple_SET_ITEM(value, i, item);
    }
    Py_LeaveRecursiveCall();
    return value;
}

PyObject *
decode_compact(Reader *reader, Lookup lookup, void *context)
{
    const uint8_t *from = take(reader, 1);
    if (from == NULL)
        return NULL;
    switch (from[0]) {
    case 'N':
        Py_RETURN_NONE;
    case 'T':
        Py_RETURN_TRUE;
    case 'F':
        Py_RETURN_FALSE;
    case 'i':
        from = take(reader, 8);
        return from == NULL ? NULL : PyLong_FromLongLong((long long)load(from, 8));
    case 'f': {
        from = take(reader, 8);
        if (from == NULL)
            return NULL;
        uint64_t bits = load(from, 8);
        double number;
        memcpy(&number, &bits, sizeof number);
        return PyFloat_FromDouble(number);
    }
    case 'r':
        from = take(reader, 8);
        return from == NULL ? NULL : lookup(context, load(from, 8));
    case 's':
    case 'b': {
        bool text = from[0] == 's';
        from = take(reader, 4);
        size_t size = from == NULL ? 0 : load(from, 4);
        if (from == NULL || (from = take(reader, size)) == NULL)
            return NULL;
        return text ? PyUnicode_DecodeUTF8((const char *)from, size, "surrogatepass")
                    : PyBytes_FromStringAndSize((const char *)from, size);
    }
    case 't':
        return decode_tuple(reader, lookup, context);
    case 'd':
    case 'D':
    case 'P':
        return NULL; /* dtypes, devices and pickles: Python's */
    default:
        PyErr_Format(PyExc_ValueError, "the payload has a value of the unknown kind %d", from[0]);
        return NULL;
    }
}

/* For the tests, which hold this against codec.py --------------------------------------------- */

static PyObject *
call_lookup(void *context, uint64_t id)
{
    return PyObject_CallFunction(context, "K", (unsigned long long)id);
}

static PyObject *
native_encode_arguments(PyObject *module, PyObject *args)
{
    if (!PyTuple_Check(args) || PyTuple_GET_SIZE(args) > UINT8_MAX) {
        PyErr_SetString(PyExc_TypeError, "a tuple of at most 255 arguments is encoded");
        return NULL;
    }
    Buffer buffer;
    buffer_init(&buffer);
    int done = put_number(&buffer, 'A', (uint64_t)PyTuple_GET_SIZE(args), 1);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args) && done > 0; i++)
        done = encode_compact(&buffer, PyTuple_GET_ITEM(args, i));
    PyObject *result = NULL;
    if (done > 0)
        result = PyBytes_FromStringAndSize((char *)buffer.data, buffer.size);
    else if (done == 0)
        result = Py_NewRef(Py_None);
    buffer_free(&buffer);
    return result;
}

static PyObject *
native_decode_value(PyObject *module, PyObject *args)
{
    Py_buffer view;
    PyObject *lookup;
    if (!PyArg_ParseTuple(args, "y*O:decode_value", &view, &lookup))
        return NULL;
    Reader reader = {view.buf, view.len, 0};
    PyObject *value = decode_compact(&reader, call_lookup, lookup);
    PyBuffer_Release(&view);
    if (value == NULL && !PyErr_Occurred())
        Py_RETURN_NOTIMPLEMENTED;
    return value == NULL ? NULL : Py_BuildValue("Nn", value, (Py_ssize_t)reader.at);
}

static PyMethodDef functions[] = {
    {"encode_arguments", native_encode_arguments, METH_O, NULL},
    {"decode_value", native_decode_value, METH_VARARGS, NULL},
    {NULL},
};

int
add_codec(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
