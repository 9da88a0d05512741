/* Arrivals and small collectives through shared memory; cells.h says what lies in it.
 *
 * All or none: an operation (communicator, command, index) is done when the records of all members
 * have been posted, and by everybody then, since a record stays until all members are done with it
 * or have left its command. A member's record is therefore looked for before its word for what it
 * has left, and once more after that word: it may have arrived and then left.
 *
 * The shared memory is another process's to write. Whatever it holds, nothing is read or written
 * outside it, and no wait in here is without a bound: the callers wait, and can break off. */
#include "cells.h"

#include <string.h>
#include <unistd.h>

/* Layout ----------------------------------------------------------------------------------------*/

struct cells_layout
cells_lay_out(int num_workers, int num_groups)
{
    struct cells_layout l;
    size_t n = num_workers, at = CELLS_APART;
    l.workers = at;
    at += n * sizeof(struct cells_worker);
    /* The world, and the groups unless there is one. */
    for (int i = 0; i < (num_groups > 1 ? 2 : 1); i++) {
        l.members[i] = at;
        at += n * sizeof(struct cells_member);
        l.cells[i] = at;
        at += n * CELLS_EACH * sizeof(struct cells_cell);
        l.slots[i] = at;
        at += n * CELLS_EACH * CELLS_SLOT;
        l.staging[i] = at;
        at += n * CELLS_STAGING;
    }
    l.mail = at;
    l.size = at + mail_bytes(num_workers);
    return l;
}

int
cells_make_members(CellsObject *self, struct cells_members *c, const struct cells_layout *l,
                   int which, int first, int size)
{
    uint8_t *base = self->block->base;
    c->size = size;
    c->first = first;
    c->rank = self->worker - first;
    c->gone = c->command = c->withdrawn = -1;
    c->peers = PyMem_Calloc(size, sizeof *c->peers);
    c->signatures = PyMem_Calloc(size, CELLS_SIGNATURE);
    if (c->peers == NULL || c->signatures == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int m = 0; m < size; m++) {
        size_t w = first + m;
        struct cells_peer *p = &c->peers[m];
        p->worker = (struct cells_worker *)(base + l->workers) + w;
        p->told = (struct cells_member *)(base + l->members[which]) + w;
        p->cells = (struct cells_cell *)(base + l->cells[which]) + w * CELLS_EACH;
        p->slots = base + l->slots[which] + w * CELLS_EACH * CELLS_SLOT;
        p->staging = base + l->staging[which] + w * CELLS_STAGING;
        p->process = -1;
    }
    return 0;
}

void
cells_free_members(struct cells_members *c)
{
    for (int m = 0; m < c->size && c->peers != NULL; m++)
        if (c->peers[m].process >= 0)
            close(c->peers[m].process);
    PyMem_Free(c->peers);
    PyMem_Free(c->signatures);
    c->peers = NULL;
    c->signatures = NULL;
}

/* Records ---------------------------------------------------------------------------------------*/

static inline bool
before(int64_t command, uint64_t index, int64_t other_command, uint64_t other_index)
{
    return command < other_command || (command == other_command && index < other_index);
}

enum sight { NOT_YET, HERE, PASSED };

/* Look for a member's record of (command, index) in its stream. Older ones are passed over. */
static enum sight
look(struct cells_peer *p, int64_t command, uint64_t index)
{
    for (;;) {
        struct cells_cell *cell = &p->cells[p->cursor % CELLS_EACH];
        uint64_t wanted = 2 * p->cursor + 2;
        uint64_t sequence = atomic_load_explicit(&cell->sequence, memory_order_acquire);
        if (sequence < wanted)
            return NOT_YET;
        if (sequence > wanted) {
            /* It has been overwritten, so this member has no use for it. */
            uint64_t newest = (sequence - 1) / 2;
            p->cursor++;
            if (newest > CELLS_EACH && p->cursor < newest - CELLS_EACH + 1)
                p->cursor = newest - CELLS_EACH + 1;
            continue;
        }
        int64_t its_command = atomic_load_explicit(&cell->command, memory_order_relaxed);
        uint64_t its_index = atomic_load_explicit(&cell->index, memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&cell->sequence, memory_order_relaxed) != wanted)
            continue;
        if (its_command == command && its_index == index)
            return HERE;
        if (!before(its_command, its_index, command, index))
            return PASSED;
        p->cursor++;
    }
}

/* Whether nobody needs any more what is in the cell that the next record goes to. */
static bool
cell_is_free(struct cells_members *c)
{
    if (c->posted < CELLS_EACH)
        return true;
    uint64_t number = c->posted - CELLS_EACH;
    int slot = number % CELLS_EACH;
    int64_t command = c->own[slot].command;
    uint64_t index = c->own[slot].index;
    /* Not done by anybody; or all have come to a later one since. */
    if (c->own[slot].resolution == CELLS_RELEASED || number < c->met)
        return true;
    for (int m = 0; m < c->size; m++) {
        struct cells_peer *p = &c->peers[m];
        if (m == c->rank || cells_left_by(p) >= command)
            continue;
        enum sight sight = look(p, command, index);
        if (sight == NOT_YET)
            return false;
        if (sight == HERE
            && atomic_load_explicit(&p->told->resolved, memory_order_acquire) <= p->cursor)
            return false;
    }
    return true;
}

/* The payload of this member in a small operation. */
static size_t
payload(const struct cells_under_way *op)
{
    const struct cells_members *c = op->members;
    if (op->large)
        return 0;
    switch (op->operation) {
    case CELLS_BROADCAST:
        return c->rank == 0 ? op->bytes : 0;
    case CELLS_SCATTER:
        return c->rank == 0 ? op->bytes * c->size : 0;
    default:
        return op->bytes;
    }
}

static void
post(CellsObject *self)
{
    struct cells_under_way *op = &self->op;
    struct cells_members *c = op->members;
    uint64_t number = c->posted;
    int slot = number % CELLS_EACH;
    struct cells_peer *me = &c->peers[c->rank];
    struct cells_cell *cell = &me->cells[slot];
    atomic_store_explicit(&cell->sequence, 2 * number + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&cell->command, op->command, memory_order_relaxed);
    atomic_store_explicit(&cell->index, op->index, memory_order_relaxed);
    if (atomic_load_explicit(&cell->digest, memory_order_relaxed) != op->digest) {
        atomic_store_explicit(&cell->digest, op->digest, memory_order_relaxed);
        memcpy(cell->signature, op->signature, CELLS_SIGNATURE);
    }
    size_t size = payload(op);
    if (size > 0)
        memcpy(me->slots + slot * CELLS_SLOT, op->send, size);
    if (op->large) {
        atomic_store_explicit(&cell->decision, CELLS_UNDECIDED, memory_order_relaxed);
        atomic_store_explicit(&cell->flags, op->flags, memory_order_relaxed);
        atomic_store_explicit(&cell->send, op->send_place, memory_order_relaxed);
        atomic_store_explicit(&cell->recv, op->recv_place, memory_order_relaxed);
    }
    c->own[slot].command = op->command;
    c->own[slot].index = op->index;
    c->own[slot].resolution = CELLS_OPEN;
    me->cursor = number;
    c->posted = number + 1;
    c->index = op->index + 1;
    op->stage = CELLS_POSTED;
    atomic_store_explicit(&cell->sequence, 2 * number + 2, memory_order_release);
    cells_ring(self, c);
}

/* Note that this member is done with its newest record. */
void
cells_resolve(struct cells_under_way *op, enum cells_resolution resolution)
{
    struct cells_members *c = op->members;
    c->own[(c->posted - 1) % CELLS_EACH].resolution = resolution;
    atomic_store_explicit(&c->peers[c->rank].told->resolved, c->posted, memory_order_release);
    op->stage = CELLS_IDLE;
}

/* Say whether a large operation goes ahead, where all members have come to it.
 *
 * It does when the records of all are marked so, and everybody tries to mark them. A member that
 * must break off marks its own as withdrawn instead, unless that is marked already: then it stays,
 * since the others may have begun to move. So all come to the same answer. A small operation needs
 * none of that: what the others need of a member has come with its record. */
static bool
decide(struct cells_members *c)
{
    for (int m = 0; m < c->size; m++) {
        uint32_t found = CELLS_UNDECIDED;
        struct cells_cell *cell = cells_cell_of(&c->peers[m]);
        if (!atomic_compare_exchange_strong(&cell->decision, &found, CELLS_GO)
            && found == CELLS_WITHDRAWN) {
            c->withdrawn = m;
            return false;
        }
    }
    return true;
}

/* One look at everything that the operation under way waits for. */
enum cells_verdict
cells_step(CellsObject *self, bool look_at_left)
{
    struct cells_under_way *op = &self->op;
    struct cells_members *c = op->members;
    if (op->stage == CELLS_READY) {
        if (c->gone >= op->command) {
            op->stage = CELLS_IDLE;
            return CELLS_GONE;
        }
        if (!cell_is_free(c)) {
            for (int m = 0; m < c->size; m++)
                if (m != c->rank && cells_left_by(&c->peers[m]) >= op->command) {
                    c->gone = op->command;
                    op->stage = CELLS_IDLE;
                    return CELLS_GONE;
                }
            return CELLS_WAIT;
        }
        post(self);
    }
    for (int m = 0; m < c->size; m++) {
        struct cells_peer *p = &c->peers[m];
        if (p->here)
            continue;
        enum sight sight = look(p, op->command, op->index);
        if (sight == NOT_YET) {
            if (!look_at_left || cells_left_by(p) < op->command)
                continue;
            sight = look(p, op->command, op->index);
        }
        if (sight != HERE) {
            c->gone = op->command;
            c->withdrawn = -1;
            cells_resolve(op, CELLS_RELEASED);
            return CELLS_GONE;
        }
        p->here = true;
        op->missing--;
        if (atomic_load_explicit(&cells_cell_of(p)->digest, memory_order_relaxed) != op->digest)
            op->differs = true;
    }
    if (op->missing > 0)
        return CELLS_WAIT;
    c->met = c->posted - 1;
    if (op->differs) {
        for (int m = 0; m < c->size; m++)
            memcpy(c->signatures + m * CELLS_SIGNATURE, cells_cell_of(&c->peers[m])->signature,
                   CELLS_SIGNATURE);
        cells_resolve(op, CELLS_DONE);
        return CELLS_MISMATCH;
    }
    if (op->large && !decide(c)) {
        c->gone = op->command;
        /* Others may still be deciding. */
        cells_resolve(op, CELLS_DONE);
        return CELLS_GONE;
    }
    return CELLS_ARRIVED;
}
