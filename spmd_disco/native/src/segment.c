/* Memory that processes of one node share: a memfd, which its peers open through /proc/PID/fd.
 *
 * It has no name, so nothing is left of it when its last process ends, however that ends, and no
 * limit of /dev/shm. A nonce in its first bytes, read through the mapping, proves to a peer that
 * it runs on the same node and has the right memory: process ids alone prove neither. */
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "segment.h"

static void
segment_dealloc(SegmentObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
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
    }
    return self;
}

static PyObject *
segment_create(PyTypeObject *type, PyObject *args)
{
    Py_ssize_t size, reserved = -1;
    if (!PyArg_ParseTuple(args, "n|n:create", &size, &reserved))
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
    self->fd = memfd_create("spmd_disco", MFD_CLOEXEC);
    /* Reserving makes a lack of memory an error here, instead of a SIGBUS at first touch. */
    int error = self->fd < 0 || ftruncate(self->fd, size) < 0 ? errno : 0;
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
    uint8_t nonce[NONCE_SIZE];
    if (!error && getrandom(nonce, sizeof nonce, 0) != (ssize_t)sizeof nonce)
        error = errno;
    if (error) {
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

static PyObject *
segment_attach(PyTypeObject *type, PyObject *args)
{
    long pid;
    int fd;
    const char *nonce;
    Py_ssize_t nonce_size;
    if (!PyArg_ParseTuple(args, "liy#:attach", &pid, &fd, &nonce, &nonce_size))
        return NULL;
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/fd/%d", pid, fd);
    SegmentObject *self = new_segment(type);
    if (self == NULL)
        return NULL;
    struct stat info;
    self->fd = open(path, O_RDWR | O_CLOEXEC);
    if (self->fd < 0 || fstat(self->fd, &info) < 0) {
        Py_DECREF(self);
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    }
    if (S_ISREG(info.st_mode) && info.st_size >= SEGMENT_HEADER) {
        void *base = mmap(NULL, info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                          self->fd, 0);
        if (base == MAP_FAILED) {
            Py_DECREF(self);
            return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
        }
        self->base = base;
        self->size = info.st_size;
    }
    if (self->base == NULL || nonce_size != NONCE_SIZE || memcmp(self->base, nonce, NONCE_SIZE)) {
        Py_DECREF(self);
        PyErr_Format(PyExc_OSError, "%s is not the segment that was announced: its process is on "
                     "another node, or in another container", path);
        return NULL;
    }
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

static PyMethodDef segment_methods[] = {
    {"create", (PyCFunction)segment_create, METH_VARARGS | METH_CLASS, NULL},
    {"attach", (PyCFunction)segment_attach, METH_VARARGS | METH_CLASS, NULL},
    {NULL},
};

static PyGetSetDef segment_attributes[] = {
    {"nonce", (getter)segment_get_nonce, NULL, NULL, NULL},
    {"fd", (getter)segment_get_fd, NULL, NULL, NULL},
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
