/* Large collectives through shared memory, once all members have arrived (cells.c).
 *
 * Arrays that lie in the workers' memory pools are read and written where they are. Others are read
 * by way of the system from the memory of the process that has them, where it lets all workers do
 * that; else they go through staging areas (peer_staged.c). The way is a function of the members'
 * records, and so the same for all.
 *
 * Three counters of each member say how far it is, in steps that each move adds alike to all of
 * them on all members: `put`, the pieces that others may read; `reduced`, those that it has reduced
 * its part of; `taken`, those that it is done with. They only grow, from move to move, so that the
 * staging area is not written again before all have read it, and no barrier is needed at the end.
 *
 * Nothing here fails, except that a peer's process ends: a wait notices that after a while. */
#include "peer_moves.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "copy.h"
#include "reduce.h"

/* After so many ns a wait sleeps between its looks, and looks whether the peers' processes live. */
#define PATIENCE_NS 2000000
#define SLEEP_NS 100000
#define LOOKS_PER_CHECK 100

/* The bytes of the last cache, where the system does not say it. */
#define LAST_CACHE (16L * 1024 * 1024)

/* Waits -----------------------------------------------------------------------------------------*/

static bool
has_ended(struct cells_peer *p)
{
    pid_t pid = (pid_t)atomic_load(&p->worker->pid);
    if (atomic_load(&p->worker->closed) == CELLS_DIED)
        return true;
#ifdef SYS_pidfd_open
    /* A process that has ended and that nobody has waited for is still there for kill(). */
    if (p->process < 0 && pid > 0)
        p->process = (int)syscall(SYS_pidfd_open, pid, 0);
    if (p->process >= 0) {
        struct pollfd ended = {.fd = p->process, .events = POLLIN};
        return poll(&ended, 1, 0) == 1;
    }
#endif
    return pid > 0 && kill(pid, 0) < 0 && errno == ESRCH;
}

/* Wait until a member's counter has come to `target`. */
bool
move_reach(struct move *move, int member, const _Atomic uint64_t *counter, uint64_t target)
{
    if (move->dead)
        return false;
    int64_t start = 0;
    for (unsigned i = 1;
         (int64_t)(atomic_load_explicit(counter, memory_order_acquire) - target) < 0; i++) {
        if (i % move->self->polls_per_yield != 0) {
            relax();
            continue;
        }
        sched_yield();
        int64_t now = node_now();
        if (start == 0)
            start = now;
        if (now - start < PATIENCE_NS)
            continue;
        if (i % (LOOKS_PER_CHECK * move->self->polls_per_yield) == 0
            && has_ended(&move->c->peers[member])) {
            move->c->withdrawn = member;
            move->dead = true;
            return false;
        }
        nanosleep(&(struct timespec){.tv_nsec = SLEEP_NS}, NULL);
    }
    return true;
}

void
move_tell_all(struct move *move, uint64_t steps)
{
    struct cells_member *me = move_mine(move);
    move->c->steps = move->base + steps;
    move_tell(&me->reduced, move->base + steps);
    move_tell(&me->taken, move->base + steps);
    move_tell(&me->put, move->base + steps);
}

/* In the members' own arrays --------------------------------------------------------------------*/

/* The pieces in which another process's memory is read to be reduced. */
#define READ_PIECE 65536

bool
peer_read_memory(pid_t pid, uint64_t address, void *to, size_t bytes)
{
    uint8_t *at = to;
    while (bytes > 0) {
        struct iovec here = {at, bytes}, there = {(void *)(uintptr_t)address, bytes};
        ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        at += got;
        address += got;
        bytes -= got;
    }
    return true;
}

static bool
read_memory(struct cells_peer *p, uint64_t address, void *to, size_t bytes)
{
    return peer_read_memory((pid_t)atomic_load_explicit(&p->worker->pid, memory_order_relaxed),
                            address, to, bytes);
}

bool
peer_reads_all(CellsObject *self)
{
    if (self->reads_all != 0)
        return self->reads_all > 0;
    struct cells_members *c = &self->world;
    /* Only once all are there: the answer is kept. */
    for (int m = 0; m < c->size; m++)
        if (atomic_load_explicit(&c->peers[m].worker->probe, memory_order_acquire) == 0)
            return false;
    self->reads_all = 1;
    for (int m = 0; m < c->size; m++) {
        struct cells_worker *worker = c->peers[m].worker;
        uint64_t found = 0;
        if (!read_memory(&c->peers[m], atomic_load(&worker->probe_address), &found, sizeof found)
            || found != atomic_load(&worker->probe))
            self->reads_all = -1;
    }
    atomic_store(&self->own->reads_all, self->reads_all > 0);
    return self->reads_all > 0;
}

static const struct cells_cell *
cell_of(struct move *move, int member)
{
    const struct cells_peer *p = &move->c->peers[member];
    return &p->cells[p->cursor % CELLS_EACH];
}

/* What the record of a member says of it. */
static uint32_t
flags_of(struct move *move, int member)
{
    uint32_t flags = atomic_load_explicit(&cell_of(move, member)->flags, memory_order_relaxed);
    if (move->self->pools == NULL)
        flags &= ~(uint32_t)(CELLS_SEND_IN_POOL | CELLS_RECV_IN_POOL);
    return flags;
}

/* What the records of all members from this one on say. */
static uint32_t
common_flags(struct move *move, int from)
{
    uint32_t flags = UINT32_MAX;
    for (int m = from; m < move->c->size; m++)
        flags &= flags_of(move, m);
    return flags;
}

/* The array of a member that its record places in its pool; NULL where that cannot be. */
static uint8_t *
placed(struct move *move, int member, uint32_t which, size_t bytes)
{
    struct cells_under_way *op = move->op;
    if (member == move->c->rank)
        return which == CELLS_SEND_IN_POOL ? (uint8_t *)op->send : op->recv;
    const struct cells_cell *cell = cell_of(move, member);
    uint64_t offset = atomic_load_explicit(which == CELLS_SEND_IN_POOL ? &cell->send : &cell->recv,
                                           memory_order_relaxed);
    return pool_address(move->self->pools, move->c->first + member, offset, bytes);
}

/* Read `bytes` from `at` on of another member's array of `size` bytes, wherever it lies. */
static void
fetch(struct move *move, int member, uint32_t which, size_t size, size_t at, uint8_t *to,
      size_t bytes)
{
    struct cells_under_way *op = move->op;
    if (member == move->c->rank) {
        const uint8_t *from = which == CELLS_SEND_IN_POOL ? op->send : op->recv;
        if (from + at != to)
            disco_copy(to, from + at, bytes, move->stream);
    } else if (flags_of(move, member) & which) {
        const uint8_t *from = placed(move, member, which, size);
        if (from != NULL)
            disco_copy(to, from + at, bytes, move->stream);
    } else if (!move->dead) {
        const struct cells_cell *cell = cell_of(move, member);
        uint64_t address = atomic_load_explicit(
            which == CELLS_SEND_IN_POOL ? &cell->send : &cell->recv, memory_order_relaxed);
        if (!read_memory(&move->c->peers[member], address + at, to, bytes)) {
            move->c->withdrawn = member;
            move->dead = true;
        }
    }
}

/* Wait until all are done with this member's arrays, at the end of a move. */
static void
exit_barrier(struct move *move, uint64_t steps)
{
    move_tell_all(move, steps);
    MOVE_REACH_ALL(move, put, move->base + steps);
}

/* Every member reduces its part, from where the arrays are to where they are. */
static void
pushed_allreduce(struct move *move)
{
    struct cells_under_way *op = move->op;
    int size = move->c->size, rank = move->c->rank;
    size_t itemsize = op->bytes / op->count;
    size_t begin = move_part_begin(op->count, itemsize, rank, size);
    size_t count = move_part_begin(op->count, itemsize, rank + 1, size) - begin;
    const void *ins[size];
    void *outs[size];
    bool reachable = true;
    for (int m = 0; m < size && reachable; m++) {
        uint8_t *send = placed(move, m, CELLS_SEND_IN_POOL, op->bytes);
        uint8_t *recv = placed(move, m, CELLS_RECV_IN_POOL, op->bytes);
        reachable = send != NULL && recv != NULL;
        if (reachable) {
            ins[m] = send + begin * itemsize;
            outs[m] = recv + begin * itemsize;
        }
    }
    if (reachable)
        disco_reduce(op->dtype, op->kind, outs, size, ins, size, count, move->stream);
    exit_barrier(move, 1);
}

/* Every member reduces its part, which it reads from the others, and then reads theirs. */
static void
pulled_allreduce(struct move *move)
{
    struct cells_under_way *op = move->op;
    int size = move->c->size, rank = move->c->rank;
    size_t itemsize = op->bytes / op->count;
    size_t begin = move_part_begin(op->count, itemsize, rank, size);
    size_t end = move_part_begin(op->count, itemsize, rank + 1, size);
    /* All have done with the staging area, since they have come to this operation. */
    uint8_t *scratch = move->c->peers[rank].staging;
    size_t most = (size_t)CELLS_STAGING / (size - 1);
    size_t piece = move_smaller(most, READ_PIECE) / LINE * LINE / itemsize;
    const void *ins[size];
    for (size_t at = begin; at < end; at += piece) {
        size_t count = move_smaller(piece, end - at);
        for (int m = 0, used = 0; m < size; m++) {
            if (m == rank) {
                ins[m] = op->send + at * itemsize;
                continue;
            }
            uint8_t *to = scratch + used++ * piece * itemsize;
            fetch(move, m, CELLS_SEND_IN_POOL, op->bytes, at * itemsize, to, count * itemsize);
            ins[m] = to;
        }
        void *outs[1] = {op->recv + at * itemsize};
        disco_reduce(op->dtype, op->kind, outs, 1, ins, size, count, 0);
    }
    move_tell(&move_mine(move)->put, move->base + 1);
    for (int d = 1; d < size; d++) {
        int m = (rank + d) % size;
        move_reach(move, m, &move->c->peers[m].told->put, move->base + 1);
        size_t from = move_part_begin(op->count, itemsize, m, size) * itemsize;
        size_t to = move_part_begin(op->count, itemsize, m + 1, size) * itemsize;
        fetch(move, m, CELLS_RECV_IN_POOL, op->bytes, from, op->recv + from, to - from);
    }
    exit_barrier(move, 2);
}

/* The members share out the pieces of the first one's array, and write each into everyone's: it is
 * read from memory once, all cores work, and whoever is faster does more. */
static void
pushed_broadcast(struct move *move)
{
    struct cells_under_way *op = move->op;
    struct cells_members *c = move->c;
    int size = c->size, count = 0;
    uint8_t *outs[size];
    for (int m = 0; m < size; m++) {
        uint8_t *to = placed(move, m, CELLS_RECV_IN_POOL, op->bytes);
        if (to != NULL)
            outs[count++] = to;
    }
    bool direct = c->rank == 0 || (flags_of(move, 0) & CELLS_SEND_IN_POOL);
    const uint8_t *from = direct ? placed(move, 0, CELLS_SEND_IN_POOL, op->bytes) : NULL;
    uint8_t *scratch = c->peers[c->rank].staging;
    uint64_t pieces = (op->bytes + READ_PIECE - 1) / READ_PIECE, piece;
    while ((piece = atomic_fetch_add(&c->peers[0].told->claimed, 1) - c->claimed) < pieces) {
        size_t at = piece * READ_PIECE, length = move_smaller(op->bytes - at, READ_PIECE);
        const uint8_t *source = direct ? from + at : scratch;
        if (!direct)
            fetch(move, 0, CELLS_SEND_IN_POOL, op->bytes, at, scratch, length);
        for (int i = 0; i < count && (from != NULL || !direct); i++)
            if (outs[i] + at != source) /* the first member's own array, in place */
                disco_copy(outs[i] + at, source, length, move->stream);
    }
    /* Each member has claimed one piece too many, to see that there is none left. */
    c->claimed += pieces + size;
    exit_barrier(move, 1);
}

/* Do it in the members' own arrays; false where these do not lie so that it could be. */
static bool
move_in_place(struct move *move)
{
    struct cells_members *c = move->c;
    struct cells_under_way *op = move->op;
    int size = c->size, rank = c->rank;
    size_t bytes = op->bytes;
    uint32_t all = common_flags(move, 0), others = common_flags(move, 1), root = flags_of(move, 0);
    bool read = all & CELLS_READS_ALL;
    switch (op->operation) {
    case CELLS_ALLREDUCE:
        if ((all & CELLS_SEND_IN_POOL) && (all & CELLS_RECV_IN_POOL))
            pushed_allreduce(move);
        else if (read)
            pulled_allreduce(move);
        else
            return false;
        return true;
    case CELLS_ALLGATHER:
        if ((all & CELLS_RECV_IN_POOL)
            && (!(all & CELLS_SEND_IN_POOL) || move->stream)) {
            /* Piece by piece, so that it is read from memory once. */
            for (size_t at = 0; at < bytes; at += CELLS_PIECE)
                for (int d = 0; d < size; d++) {
                    int m = (rank + d) % size;
                    uint8_t *to = placed(move, m, CELLS_RECV_IN_POOL, bytes * size);
                    if (to != NULL && to + rank * bytes != op->send)
                        disco_copy(to + rank * bytes + at, op->send + at,
                                   move_smaller(bytes - at, CELLS_PIECE), move->stream);
                }
        } else if (read || (all & CELLS_SEND_IN_POOL)) {
            for (int d = 0; d < size; d++) {
                int m = (rank + d) % size;
                fetch(move, m, CELLS_SEND_IN_POOL, bytes, 0, op->recv + m * bytes, bytes);
            }
        } else
            return false;
        break;
    case CELLS_GATHER:
        if (root & CELLS_RECV_IN_POOL) {
            uint8_t *to = placed(move, 0, CELLS_RECV_IN_POOL, bytes * size);
            if (to != NULL && to + rank * bytes != op->send)
                disco_copy(to + rank * bytes, op->send, bytes, move->stream);
        } else if (read || (others & CELLS_SEND_IN_POOL)) {
            for (int m = 0; rank == 0 && m < size; m++)
                fetch(move, m, CELLS_SEND_IN_POOL, bytes, 0, op->recv + m * bytes, bytes);
        } else
            return false;
        break;
    case CELLS_SCATTER:
        if (read || (root & CELLS_SEND_IN_POOL))
            fetch(move, 0, CELLS_SEND_IN_POOL, bytes * size, rank * bytes, op->recv, bytes);
        else if (others & CELLS_RECV_IN_POOL) {
            for (int m = 0; rank == 0 && m < size; m++) {
                uint8_t *to = placed(move, m, CELLS_RECV_IN_POOL, bytes);
                if (to != NULL && to != op->send + m * bytes)
                    disco_copy(to, op->send + m * bytes, bytes, move->stream);
            }
        } else
            return false;
        break;
    case CELLS_BROADCAST:
        if (move->stream && (all & CELLS_RECV_IN_POOL) && (read || (root & CELLS_SEND_IN_POOL))) {
            pushed_broadcast(move);
            return true;
        }
        if (root & CELLS_SEND_IN_POOL)
            fetch(move, 0, CELLS_SEND_IN_POOL, bytes, 0, op->recv, bytes);
        else if ((root & CELLS_RECV_IN_POOL) && (!read || (root & CELLS_CROWDED))) {
            /* The others follow the first member from piece to piece. With a core for each they
             * need not wait for it. */
            const uint8_t *from = placed(move, 0, CELLS_RECV_IN_POOL, bytes);
            uint64_t steps = (bytes + CELLS_PIECE - 1) / CELLS_PIECE;
            for (uint64_t i = 0; i < steps; i++) {
                size_t at = i * CELLS_PIECE, length = move_smaller(bytes - at, CELLS_PIECE);
                if (rank == 0) {
                    memcpy(op->recv + at, op->send + at, length);
                    move_tell(&move_mine(move)->put, move->base + i + 1);
                } else if (move_reach(move, 0, &c->peers[0].told->put, move->base + i + 1)
                           && from != NULL)
                    disco_copy(op->recv + at, from + at, length, move->stream);
            }
            move_tell_all(move, steps);
            if (rank == 0)
                MOVE_REACH_ALL(move, taken, move->base + steps);
            return true;
        } else if (read)
            fetch(move, 0, CELLS_SEND_IN_POOL, bytes, 0, op->recv, bytes);
        else
            return false;
        break;
    }
    exit_barrier(move, 1);
    return true;
}

/* Whether the arrays of all members together are more than the last cache holds. */
static bool
is_beyond_caches(const struct cells_under_way *op)
{
    static atomic_long known;
    long cache = atomic_load_explicit(&known, memory_order_relaxed);
    if (cache == 0) {
#ifdef _SC_LEVEL3_CACHE_SIZE
        cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
        if (cache <= 0)
            cache = LAST_CACHE;
        atomic_store_explicit(&known, cache, memory_order_relaxed);
    }
    size_t size = op->members->size, parts;
    switch (op->operation) {
    case CELLS_ALLREDUCE:
        parts = op->send == op->recv ? size : 2 * size;
        break;
    case CELLS_ALLGATHER:
        parts = size * (size + 1);
        break;
    case CELLS_BROADCAST:
        parts = size + 1;
        break;
    default:
        parts = 2 * size;
    }
    return op->bytes > (size_t)cache / parts;
}

enum cells_verdict
peer_move(CellsObject *self)
{
    struct cells_under_way *op = &self->op;
    struct cells_members *c = op->members;
    struct move move = {.self = self, .c = c, .op = op, .base = c->steps,
                        .stream = is_beyond_caches(op)};
    if (!move_in_place(&move))
        move_staged(&move);
    return move.dead ? CELLS_DEAD : CELLS_MOVED;
}
