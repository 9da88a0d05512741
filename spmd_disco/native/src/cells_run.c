/* Operations of a worker on its node, from the arrival (cells.c) to the end.
 *
 * What is called with the GIL gives it up for longer waits and moves; handlers of signals do not
 * run in here, so an operation that has moved is over. */
#include "cells.h"

#include <sched.h>
#include <string.h>

#include "reduce.h"

/* Polls with the GIL held: most peers are there, or come at once. */
#define EAGER_POLLS 64
/* What peers have left is looked at less often than their cells: those lines change more often. */
#define POLLS_PER_LEFT 4

/* Moving ----------------------------------------------------------------------------------------*/

static void
move_small(struct cells_under_way *op)
{
    struct cells_members *c = op->members;
    size_t bytes = op->bytes;
    switch (op->operation) {
    case CELLS_ALLREDUCE: {
        const void *parts[c->size];
        for (int m = 0; m < c->size; m++)
            parts[m] = cells_slot_of(&c->peers[m]);
        void *outs[1] = {op->recv};
        disco_reduce(op->dtype, op->kind, outs, 1, parts, c->size, op->count, 0);
        break;
    }
    case CELLS_ALLGATHER:
        for (int m = 0; m < c->size; m++)
            memcpy(op->recv + m * bytes, cells_slot_of(&c->peers[m]), bytes);
        break;
    case CELLS_GATHER:
        if (c->rank == 0)
            for (int m = 0; m < c->size; m++)
                memcpy(op->recv + m * bytes, cells_slot_of(&c->peers[m]), bytes);
        break;
    case CELLS_BROADCAST:
        if (c->rank != 0 || op->recv != op->send)
            memcpy(op->recv, cells_slot_of(&c->peers[0]), bytes);
        break;
    case CELLS_SCATTER:
        memcpy(op->recv, cells_slot_of(&c->peers[0]) + c->rank * bytes, bytes);
        break;
    }
}

void
cells_let_go(struct cells_under_way *op)
{
    Py_CLEAR(op->owners[0]);
    Py_CLEAR(op->owners[1]);
    Py_CLEAR(op->after);
}

/* Move the data of an operation to which all have come. Returns -2 with an exception where that is
 * one of what is called afterwards. */
static int
finish(CellsObject *self)
{
    struct cells_under_way *op = &self->op;
    enum cells_verdict verdict = CELLS_MOVED;
    if (op->large) {
        self->busy = true;
        Py_BEGIN_ALLOW_THREADS
        verdict = peer_move(self);
        Py_END_ALLOW_THREADS
        self->busy = false;
    } else
        move_small(op);
    cells_resolve(op, CELLS_DONE);
    if (op->after == NULL || verdict != CELLS_MOVED)
        return verdict;
    PyObject *after = op->after;
    op->after = NULL;
    PyObject *result = PyObject_CallNoArgs(after);
    Py_DECREF(after);
    Py_XDECREF(result);
    return result == NULL ? -2 : (int)verdict;
}

/* Have the operation under way stand in this worker's status line, or not. */
static void
show(CellsObject *self, bool shown)
{
    if (self->node == NULL || shown == self->is_shown)
        return;
    self->is_shown = shown;
    if (shown)
        node_set_operation(&self->node->node, self->op.command, self->op.index);
    else
        node_clear_operation(&self->node->node);
}

int
cells_run(CellsObject *self, int64_t spin_ns)
{
    int verdict = CELLS_WAIT;
    for (int i = 0; i < EAGER_POLLS && verdict == CELLS_WAIT; i++) {
        verdict = cells_step(self, i % POLLS_PER_LEFT == 0);
        if (verdict == CELLS_WAIT) {
            if (i % self->polls_per_yield == self->polls_per_yield - 1)
                break;
            relax();
        }
    }
    if (verdict == CELLS_WAIT && spin_ns > 0) {
        self->busy = true;
        Py_BEGIN_ALLOW_THREADS
        int64_t end = node_now() + spin_ns;
        for (int i = 1; verdict == CELLS_WAIT; i++) {
            if (i % self->polls_per_yield == 0) {
                sched_yield();
                if (node_now() >= end)
                    break;
            } else
                relax();
            verdict = cells_step(self, i % POLLS_PER_LEFT == 0);
        }
        Py_END_ALLOW_THREADS
        self->busy = false;
    }
    show(self, verdict == CELLS_WAIT);
    if (verdict == CELLS_ARRIVED)
        verdict = finish(self);
    if (verdict != CELLS_WAIT)
        cells_let_go(&self->op);
    return verdict;
}

void
cells_has_left(CellsObject *self, int64_t command)
{
    if (command <= atomic_load_explicit(&self->own->left, memory_order_relaxed))
        return;
    atomic_store_explicit(&self->own->left, command, memory_order_release);
    cells_ring(self, &self->world);
}

/* Begin an operation whose arrays and signature have been filled in. */
static int
begin_operation(CellsObject *self, struct cells_members *c)
{
    struct cells_under_way *op = &self->op;
    if (c->command != self->command) {
        c->command = self->command;
        c->index = 0;
    }
    op->members = c;
    op->command = self->command;
    op->index = c->index;
    op->stage = CELLS_READY;
    op->missing = c->size - 1;
    op->differs = false;
    for (int m = 0; m < c->size; m++)
        c->peers[m].here = m == c->rank;
    return cells_run(self, self->spin_ns);
}

int
cells_break_off(CellsObject *self)
{
    struct cells_under_way *op = &self->op;
    struct cells_members *c = op->members;
    int result = 0;
    /* Another thread's. */
    if (self->busy)
        return 0;
    if (op->stage == CELLS_POSTED) {
        uint32_t found = CELLS_UNDECIDED;
        if (op->large
            && !atomic_compare_exchange_strong(&cells_cell_of(&c->peers[c->rank])->decision, &found,
                                               CELLS_WITHDRAWN)) {
            /* Somebody has seen all members here. */
            if (cells_step(self, true) == CELLS_ARRIVED && finish(self) == -2)
                result = -1;
        }
        if (op->stage == CELLS_POSTED)
            cells_resolve(op, CELLS_OPEN);
    }
    op->stage = CELLS_IDLE;
    show(self, false);
    cells_let_go(op);
    return result;
}

/* Fill in where the arrays of a large operation lie. */
static void
place(CellsObject *self, size_t send_bytes, size_t recv_bytes)
{
    struct cells_under_way *op = &self->op;
    size_t offset = 0;
    op->send_place = (uintptr_t)op->send;
    op->recv_place = (uintptr_t)op->recv;
    if (peer_reads_all(self))
        op->flags |= CELLS_READS_ALL;
    if (self->polls_per_yield == CELLS_POLLS_CROWDED)
        op->flags |= CELLS_CROWDED;
    if (self->pools == NULL)
        return;
    if (op->send != NULL && pool_find(self->pools, op->send, send_bytes, &offset) == self->worker) {
        op->flags |= CELLS_SEND_IN_POOL;
        op->send_place = offset;
    }
    if (op->recv != NULL && pool_find(self->pools, op->recv, recv_bytes, &offset) == self->worker) {
        op->flags |= CELLS_RECV_IN_POOL;
        op->recv_place = offset;
    }
}

PyObject *
cells_go(CellsObject *self, struct cells_members *c, int operation, size_t bytes,
         const uint8_t *send, uint8_t *recv, bool staged)
{
    struct cells_under_way *op = &self->op;
    bool first = c->rank == 0;
    /* How many parts there are in each array. */
    size_t send_parts = operation == CELLS_SCATTER ? c->size : 1;
    size_t recv_parts = operation == CELLS_ALLGATHER || operation == CELLS_GATHER ? c->size : 1;
    op->operation = operation;
    op->bytes = bytes;
    op->send = send;
    op->recv = recv;
    /* The same on all members, since it follows from what their signatures stand for. */
    op->large = bytes > CELLS_SLOT / send_parts;
    if ((operation == CELLS_BROADCAST || operation == CELLS_SCATTER) && !first)
        op->send = NULL;
    if (operation == CELLS_GATHER && !first)
        op->recv = NULL;
    op->flags = 0;
    if (op->large && !staged)
        place(self, bytes * send_parts, bytes * recv_parts);
    int verdict = begin_operation(self, c);
    return verdict == -2 ? NULL : PyLong_FromLong(verdict);
}
