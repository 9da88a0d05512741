/* Memory that processes of one node share; shared.c says how they find it. */
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "segment.h"

static void
segment_dealloc(SegmentObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->named && self->base != NULL)
        shared_unlink(self->base);
    if (self->base != NULL)
        munmap(self->base, self->size);
    if (self->fd >= 0)
        close(self->fd);
    type->tp_free(self);
    Py_DECREF(type);
}

static SegmentObject *
new_segment(PyTypeObject *type)
{
    SegmentObject *self = (SegmentObject *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->base = NULL;
        self->size = 0;
        self->fd = -1;
        self->named = false;
    }
    return self;
}

static PyObject *
segment_create(PyTypeObject *type, PyObject *args)
{
    Py_ssize_t size, reserved = -1;
    int named = 0;
    if (!PyArg_ParseTuple(args, "n|np:create", &size, &reserved, &named))
        return NULL;
    if (reserved < 0)
        reserved = size;
    if (size < SEGMENT_HEADER || reserved > size) {
        PyErr_Format(PyExc_ValueError, "a segment of %zd bytes with %zd of them reserved: it has %d "
                     "at least, and reserves as many at most", size, reserved, SEGMENT_HEADER);
        return NULL;
    }
    SegmentObject *self = new_segment(type);
    if (self == NULL)
        return NULL;
    uint8_t nonce[NONCE_SIZE];
    self->named = named;
    self->fd = shared_make((size_t)size, nonce, &self->named);
    /* Reserving makes a lack of memory an error here, instead of a SIGBUS at first touch. */
    int error = self->fd < 0 ? errno : 0;
    if (!error && reserved > 0)
        error = posix_fallocate(self->fd, 0, reserved);
    if (!error) {
        void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, self->fd, 0);
        if (base == MAP_FAILED)
            error = errno;
        else {
            self->base = base;
            self->size = size;
        }
    }
    if (error) {
        if (self->fd >= 0)
            shared_unlink(nonce);
        Py_DECREF(self);
        errno = error;
        if (error == ENOMEM || error == ENOSPC) {
            PyErr_Format(PyExc_MemoryError, "no %zd bytes of shared memory are to be had: %s",
                         reserved, strerror(error));
            return NULL;
        }
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    memcpy(self->base, nonce, sizeof nonce);
    return (PyObject *)self;
}

uint8_t *
segment_map(long pid, int fd, const char *nonce, Py_ssize_t nonce_size, const char *what,
            int *opened, size_t *size)
{
    *size = 0;
    errno = ESTALE;
    *opened = nonce_size == NONCE_SIZE
                  ? shared_find((pid_t)pid, fd, (const uint8_t *)nonce, size) : -1;
    void *base = MAP_FAILED;
    if (*opened >= 0) {
        errno = ESTALE;
        if (*size >= SEGMENT_HEADER)
            base = mmap(NULL, *size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, *opened,
                        0);
    }
    if (base != MAP_FAILED)
        return base;
    int error = errno;
    PyObject *path = PyUnicode_FromFormat("/proc/%ld/fd/%d", pid, fd);
    if (path != NULL && error == ESTALE)
        PyErr_Format(PyExc_OSError, "%U is not the %s that was announced: its process is on "
                     "another node, or in another container", path, what);
    else if (path != NULL) {
        errno = error;
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    }
    Py_XDECREF(path);
    if (*opened >= 0)
        close(*opened);
    *opened = -1;
    return NULL;
}

static PyObject *
segment_attach(PyTypeObject *type, PyObject *args)
{
    long pid;
    int fd;
    const char *nonce;
    Py_ssize_t nonce_size;
    if (!PyArg_ParseTuple(args, "liy#:attach", &pid, &fd, &nonce, &nonce_size))
        return NULL;
    SegmentObject *self = new_segment(type);
    if (self == NULL)
        return NULL;
    size_t size;
    self->base = segment_map(pid, fd, nonce, nonce_size, "segment", &self->fd, &size);
    if (self->base == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    self->size = (Py_ssize_t)size;
    return (PyObject *)self;
}

static PyObject *
segment_get_nonce(SegmentObject *self, void *closure)
{
    return PyBytes_FromStringAndSize((char *)self->base, NONCE_SIZE);
}

static PyObject *
segment_get_fd(SegmentObject *self, void *closure)
{
    return PyLong_FromLong(self->fd);
}

static PyObject *
segment_get_address(SegmentObject *self, void *closure)
{
    return PyLong_FromVoidPtr(self->base);
}

static Py_ssize_t
segment_length(SegmentObject *self)
{
    return self->size;
}

static int
segment_buffer(SegmentObject *self, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)self, self->base, self->size, 0, flags);
}

static PyObject *
segment_unlink(SegmentObject *self, PyObject *unused)
{
    if (self->named)
        shared_unlink(self->base);
    Py_RETURN_NONE;
}

static PyObject *
segment_get_named(SegmentObject *self, void *closure)
{
    return PyBool_FromLong(self->named);
}

static PyMethodDef segment_methods[] = {
    {"create", (PyCFunction)segment_create, METH_VARARGS | METH_CLASS, NULL},
    {"attach", (PyCFunction)segment_attach, METH_VARARGS | METH_CLASS, NULL},
    {"unlink", (PyCFunction)segment_unlink, METH_NOARGS, NULL},
    {NULL},
};

static PyGetSetDef segment_attributes[] = {
    {"nonce", (getter)segment_get_nonce, NULL, NULL, NULL},
    {"fd", (getter)segment_get_fd, NULL, NULL, NULL},
    {"named", (getter)segment_get_named, NULL, NULL, NULL},
    {"address", (getter)segment_get_address, NULL, NULL, NULL},
    {NULL},
};

static PyType_Slot segment_slots[] = {
    {Py_tp_dealloc, segment_dealloc},
    {Py_tp_methods, segment_methods},
    {Py_tp_getset, segment_attributes},
    {Py_sq_length, segment_length},
    {Py_bf_getbuffer, segment_buffer},
    {Py_tp_doc, "Memory that processes of one node share."},
    {0, NULL},
};

static PyType_Spec segment_spec = {
    .name = "spmd_disco.native._native.Segment",
    .basicsize = sizeof(SegmentObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = segment_slots,
};

PyTypeObject *Segment_Type;

int
add_segment(PyObject *module)
{
    Segment_Type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &segment_spec, NULL);
    if (Segment_Type == NULL || PyModule_AddIntConstant(module, "SEGMENT_HEADER", SEGMENT_HEADER) < 0)
        return -1;
    return PyModule_AddType(module, Segment_Type);
}
