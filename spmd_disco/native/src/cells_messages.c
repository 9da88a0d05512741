/* The methods for messages between two workers (peer_mail.c). */
#include "cells.h"

/* send(receiver, signature, address, bytes) */
PyObject *
cells_send(CellsObject *self, PyObject *args)
{
    if (cells_released(self))
        return cells_refuse();
    int receiver;
    const char *signature;
    Py_ssize_t length, bytes;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "iy#Kn:send", &receiver, &signature, &length, &address, &bytes))
        return NULL;
    if (receiver < 0 || receiver >= self->num_workers || length != CELLS_SIGNATURE || bytes < 0
        || self->busy)
        return PyErr_Format(PyExc_ValueError, "send: bad arguments, or in use");
    int result;
    bool is_read = peer_reads_all(self)
                   && atomic_load(&self->world.peers[receiver].worker->reads_all);
    self->busy = true;
    Py_BEGIN_ALLOW_THREADS
    result = mail_send(&self->mail, receiver, self->command, (const uint8_t *)signature,
                       (const uint8_t *)(uintptr_t)address, bytes, is_read);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (result < 0)
        return PyErr_NoMemory();
    if (self->node != NULL)
        node_ring_bell(&self->node->node, receiver);
    Py_RETURN_NONE;
}

/* letter(sender): the (command, bytes, signature) of the oldest message; None where it may still
 * come, False where none will in this command. */
PyObject *
cells_letter(CellsObject *self, PyObject *arg)
{
    if (cells_released(self))
        return cells_refuse();
    int sender;
    if (!cells_take_worker(self, arg, "letter", &sender))
        return NULL;
    peer_reads_all(self);
    const struct mail_header *header = mail_look(&self->mail, sender);
    if (header == NULL) {
        if (cells_left_by(&self->world.peers[sender]) < self->command)
            Py_RETURN_NONE;
        /* It may have sent, and then left. */
        header = mail_look(&self->mail, sender);
        if (header == NULL) {
            if (mail_is_coming(&self->mail, sender))
                Py_RETURN_NONE;
            Py_RETURN_FALSE;
        }
    }
    if (header->command > self->command)
        Py_RETURN_FALSE;
    return Py_BuildValue("LKy#", (long long)header->command, (unsigned long long)header->bytes,
                         (const char *)header->signature, (Py_ssize_t)CELLS_SIGNATURE);
}

/* read(sender, address, bytes): read on in the message of so many bytes; whether it is complete. */
PyObject *
cells_read(CellsObject *self, PyObject *args)
{
    if (cells_released(self))
        return cells_refuse();
    int sender;
    unsigned long long address;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(args, "iKn:read", &sender, &address, &bytes))
        return NULL;
    if (sender < 0 || sender >= self->num_workers || !self->mail.in[sender].open
        || self->mail.in[sender].header.bytes != (uint64_t)bytes || self->busy)
        return PyErr_Format(PyExc_ValueError, "read: no message of so many bytes, or in use");
    int complete;
    pid_t process = (pid_t)atomic_load(&self->world.peers[sender].worker->pid);
    self->busy = true;
    Py_BEGIN_ALLOW_THREADS
    complete = mail_read(&self->mail, sender, (uint8_t *)(uintptr_t)address, self->pools,
                         process);
    Py_END_ALLOW_THREADS
    self->busy = false;
    if (self->node != NULL)
        node_ring_bell(&self->node->node, sender);
    if (complete < 0)
        return PyErr_Format(PyExc_ConnectionError, "worker %d has ended", sender);
    return PyBool_FromLong(complete);
}

PyObject *
cells_drop(CellsObject *self, PyObject *arg)
{
    if (cells_released(self))
        return cells_refuse();
    int sender;
    if (!cells_take_worker(self, arg, "drop", &sender))
        return NULL;
    mail_drop(&self->mail, sender);
    Py_RETURN_NONE;
}

PyObject *
cells_pump(CellsObject *self, PyObject *unused)
{
    if (cells_released(self))
        Py_RETURN_NONE;
    if (self->busy)
        Py_RETURN_NONE;
    for (int w = 0; w < self->num_workers && self->mail.queued + self->mail.lent > 0; w++)
        if (atomic_load_explicit(&self->world.peers[w].worker->closed, memory_order_relaxed))
            mail_forget(&self->mail, w);
    mail_pump(&self->mail, self->node);
    Py_RETURN_NONE;
}
