/* The workers of a node as threads of one process, to be run under a sanitizer: arrivals, small
 * operations through the slots, large ones in the members' arrays and through the staging areas,
 * messages, and workers that fail, break off, or come to another operation.
 *
 * There is no interpreter: its lock would put in order what processes do at the same time. What the
 * data plane uses of it is below. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cells.h"
#include "reduce.h"

enum {
    WORKERS = 4,
    GROUPS = 2,
    COMMANDS = 250,
    OPERATIONS = 10,
    MOST = 20000, /* elements of one member's part */
    SPIN_NS = 1000000,
};

/* In pools, in the memory of the others' processes, in pieces. */
enum way { IN_POOLS, IN_PROCESSES, STAGED, WAYS };

static void
check(bool good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "%s\n", what);
    abort();
}

/* Python --------------------------------------------------------------------------------------- */

PyThreadState *
PyEval_SaveThread(void)
{
    return NULL;
}

void
PyEval_RestoreThread(PyThreadState *state)
{
}

void *
PyMem_Calloc(size_t count, size_t size)
{
    return calloc(count, size);
}

void
PyMem_Free(void *memory)
{
    free(memory);
}

void *
PyMem_RawMalloc(size_t size)
{
    return malloc(size);
}

void *
PyMem_RawCalloc(size_t count, size_t size)
{
    return calloc(count, size);
}

void
PyMem_RawFree(void *memory)
{
    free(memory);
}

PyObject *
PyErr_NoMemory(void)
{
    check(false, "no memory");
    return NULL;
}

/* Integers are what verdicts go to Python as; here such a pointer is the verdict. */
PyObject *
PyLong_FromLong(long value)
{
    return (PyObject *)(intptr_t)value;
}

PyObject *
PyObject_CallNoArgs(PyObject *function)
{
    check(false, "nothing is to be called");
    return NULL;
}

void
_Py_Dealloc(PyObject *object)
{
    check(false, "there is no object");
}

/* The plan ------------------------------------------------------------------------------------- */

/* What all workers do in a command, as it follows from its number. */
struct step {
    enum cells_operation operation;
    bool in_group;
    size_t count;
};

struct plan {
    int count;
    struct step steps[OPERATIONS];
    /* Who does something else at which step, and what. */
    int culprit;
    int at;
    enum { FAILS, BREAKS_OFF, DIFFERS } deed;
    /* The bytes of a message from everyone to the next one, or 0. */
    size_t letter;
};

static const size_t counts[] = {0, 3, 500, CELLS_SLOT / 8, CELLS_SLOT / 8 + 1, MOST};
static const size_t letters[] = {0, 8, 4000, 9000, 160000};

static struct plan
plan_of(int64_t command, enum way way)
{
    unsigned state = (unsigned)(command * WAYS + way);
    struct plan plan = {.count = rand_r(&state) % (OPERATIONS + 1), .culprit = -1};
    for (int i = 0; i < plan.count; i++)
        plan.steps[i] = (struct step){
            .operation = CELLS_ALLREDUCE + rand_r(&state) % CELLS_GATHER,
            .in_group = rand_r(&state) % 2,
            .count = counts[rand_r(&state) % (sizeof counts / sizeof *counts)],
        };
    if (plan.count > 0 && rand_r(&state) % 3 == 0) {
        plan.culprit = rand_r(&state) % WORKERS;
        plan.at = rand_r(&state) % plan.count;
        plan.deed = rand_r(&state) % 3;
    } else
        plan.letter = letters[rand_r(&state) % (sizeof letters / sizeof *letters)];
    return plan;
}

/* The workers ---------------------------------------------------------------------------------- */

static SegmentObject block;
static struct cells_layout layout;
static struct Pool *pools[WORKERS];
static enum way way;
/* By command, step and first worker of the group: how many have done it, and how many have not. */
static _Atomic int done[COMMANDS][OPERATIONS][WORKERS], undone[COMMANDS][OPERATIONS][WORKERS];

struct worker {
    CellsObject cells;
    PoolTableObject table;
    struct PoolRange ranges[WORKERS];
    int64_t *send, *recv;
};

static void
open_worker(struct worker *self, int me)
{
    CellsObject *cells = &self->cells;
    size_t bytes = (size_t)WORKERS * MOST * sizeof *self->send, offset;
    cells->block = &block;
    cells->worker = me;
    cells->num_workers = WORKERS;
    cells->spin_ns = me * 10000;
    cells->polls_per_yield = me % 2 ? CELLS_POLLS : CELLS_POLLS_CROWDED;
    cells->probe = 1 + (uint64_t)me;
    int group = WORKERS / GROUPS;
    check(cells_make_members(cells, &cells->world, &layout, 0, 0, WORKERS) == 0
              && cells_make_members(cells, &cells->group, &layout, 1, me / group * group, group) == 0
              && mail_make(&cells->mail, block.base + layout.mail, me, WORKERS) == 0,
          "no memory");
    if (way == IN_POOLS) {
        for (int w = 0; w < WORKERS; w++)
            self->ranges[w] = (struct PoolRange){pool_base(pools[w]), pool_size(pools[w]), NULL};
        self->table.count = WORKERS;
        self->table.own = me;
        self->table.ranges = self->ranges;
        cells->pools = &self->table;
        cells->mail.pool = pools[me];
        check(pool_alloc(pools[me], bytes, &offset) == POOL_OK, "no memory");
        self->send = (int64_t *)(pool_base(pools[me]) + offset);
        check(pool_alloc(pools[me], bytes, &offset) == POOL_OK, "no memory");
        self->recv = (int64_t *)(pool_base(pools[me]) + offset);
    } else {
        self->send = malloc(bytes);
        self->recv = malloc(bytes);
        check(self->send != NULL && self->recv != NULL, "no memory");
    }
    if (way == STAGED)
        cells->reads_all = -1;
    cells->own = cells->world.peers[me].worker;
    atomic_store(&cells->own->failed, -1);
    atomic_store(&cells->own->pid, getpid());
    atomic_store(&cells->own->probe_address, (uintptr_t)&cells->probe);
    atomic_store(&cells->own->probe, cells->probe);
}

static void
close_worker(struct worker *self)
{
    mail_free(&self->cells.mail);
    cells_free_members(&self->cells.world);
    cells_free_members(&self->cells.group);
    if (way == IN_POOLS) {
        struct Pool *pool = pools[self->cells.worker];
        pool_free(pool, (uint8_t *)self->send - pool_base(pool));
        pool_free(pool, (uint8_t *)self->recv - pool_base(pool));
    } else {
        free(self->send);
        free(self->recv);
    }
}

/* The i-th element that a worker gives. */
static int64_t
element(int64_t command, int worker, size_t i)
{
    return command * 1000000 + worker * 1000 + (int64_t)(i % 997);
}

/* What is to be at `i` of the result of a member, of which the group's first is `first`. */
static int64_t
wanted(const struct step *step, int64_t command, int me, int first, int size, size_t i)
{
    switch (step->operation) {
    case CELLS_ALLREDUCE: {
        int64_t sum = 0;
        for (int m = 0; m < size; m++)
            sum += element(command, first + m, i);
        return sum;
    }
    case CELLS_BROADCAST:
        return element(command, first, i);
    case CELLS_SCATTER:
        return element(command, first, (me - first) * step->count + i);
    default:
        return element(command, first + (int)(i / step->count), i % step->count);
    }
}

/* Come to an operation, and say what has become of it. */
static int
operate(struct worker *self, const struct step *step, bool differs, bool breaks_off)
{
    CellsObject *cells = &self->cells;
    struct cells_under_way *op = &cells->op;
    struct cells_members *c = step->in_group ? &cells->group : &cells->world;
    bool spreads = step->operation == CELLS_ALLGATHER || step->operation == CELLS_GATHER;
    size_t sent = step->count * (step->operation == CELLS_SCATTER && c->rank == 0 ? c->size : 1);
    size_t received = step->count * (spreads ? c->size : 1);
    for (size_t i = 0; i < sent; i++)
        self->send[i] = element(cells->command, cells->worker, i);
    memset(self->recv, 0xff, received * sizeof *self->recv);
    op->digest = step->operation + 8 * step->count + (differs ? 1000000 : 0);
    memset(op->signature, (int)(op->digest % 251), sizeof op->signature);
    op->kind = DISCO_SUM;
    op->dtype = DISCO_int64;
    op->count = step->count;
    int verdict = (int)(intptr_t)cells_go(cells, c, step->operation,
                                          step->count * sizeof *self->send,
                                          (const uint8_t *)self->send, (uint8_t *)self->recv,
                                          way == STAGED);
    while (verdict == CELLS_WAIT) {
        if (breaks_off) {
            check(cells_break_off(cells) == 0, "it cannot be broken off");
            return CELLS_WAIT;
        }
        mail_pump(&cells->mail, NULL);
        verdict = cells_run(cells, SPIN_NS);
    }
    if (verdict == CELLS_MISMATCH)
        for (int m = 0; m < c->size; m++)
            check(c->signatures[m * CELLS_SIGNATURE] == c->signatures[(m + 1) * CELLS_SIGNATURE - 1],
                  "a torn signature");
    if (verdict == CELLS_MOVED && !(step->operation == CELLS_GATHER && c->rank > 0))
        for (size_t i = 0; i < received; i++)
            check(self->recv[i] == wanted(step, cells->command, cells->worker, c->first, c->size, i),
                  "another result");
    return verdict;
}

/* Send to the next worker, and read what the one before has sent. */
static void
correspond(struct worker *self, size_t bytes)
{
    CellsObject *cells = &self->cells;
    struct mail *mail = &cells->mail;
    uint8_t signature[CELLS_SIGNATURE], value = (uint8_t)cells->command;
    int next = (cells->worker + 1) % WORKERS, before = (cells->worker + WORKERS - 1) % WORKERS;
    memset(signature, value, sizeof signature);
    memset(self->send, value, bytes);
    bool is_read = peer_reads_all(cells) && atomic_load(&cells->world.peers[next].worker->reads_all);
    check(mail_send(mail, next, cells->command, signature, (uint8_t *)self->send, bytes, is_read)
              == 0,
          "no memory");
    const struct mail_header *header;
    while ((header = mail_look(mail, before)) == NULL) {
        mail_pump(mail, NULL);
        sched_yield();
    }
    check(header->command == cells->command && header->bytes == bytes
              && header->signature[CELLS_SIGNATURE - 1] == value,
          "another message");
    while (mail_read(mail, before, (uint8_t *)self->recv, cells->pools, getpid()) == 0) {
        mail_pump(mail, NULL);
        sched_yield();
    }
    for (size_t i = 0; i < bytes; i++)
        check(((uint8_t *)self->recv)[i] == value, "other bytes");
}

static void
run_command(struct worker *self, int64_t command)
{
    CellsObject *cells = &self->cells;
    struct plan plan = plan_of(command, way);
    cells->command = command;
    cells_has_left(cells, command - 1);
    mail_pump(&cells->mail, NULL);
    for (int i = 0; i < plan.count; i++) {
        const struct step *step = &plan.steps[i];
        bool mine = cells->worker == plan.culprit && i == plan.at;
        if (mine && plan.deed == FAILS)
            break;
        int verdict = operate(self, step, mine && plan.deed == DIFFERS,
                              mine && plan.deed == BREAKS_OFF);
        int first = step->in_group ? cells->group.first : 0;
        if (verdict == CELLS_MOVED)
            atomic_fetch_add(&done[command][i][first], 1);
        else if (verdict == CELLS_GONE || verdict == CELLS_MISMATCH)
            atomic_fetch_add(&undone[command][i][first], 1);
        else
            check(verdict == CELLS_WAIT, "another verdict");
        if (verdict != CELLS_MOVED)
            break; /* and so it fails */
    }
    if (plan.letter > 0)
        correspond(self, plan.letter);
    if (plan.culprit < 0 && command % 2)
        return; /* it leaves as it begins the next one */
    cells_has_left(cells, command);
}

static void *
work(void *argument)
{
    struct worker *self = argument;
    for (int64_t command = 1; command < COMMANDS; command++)
        run_command(self, command);
    while (self->cells.mail.queued > 0) {
        mail_pump(&self->cells.mail, NULL);
        sched_yield();
    }
    cells_has_left(&self->cells, INT64_MAX);
    return NULL;
}

static void
run(void)
{
    pthread_t threads[WORKERS];
    static struct worker workers[WORKERS];
    memset(workers, 0, sizeof workers);
    memset(done, 0, sizeof done);
    memset(undone, 0, sizeof undone);
    layout = cells_lay_out(WORKERS, GROUPS);
    block.size = (Py_ssize_t)layout.size;
    block.base = mmap(NULL, layout.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(block.base != MAP_FAILED, "no memory");
    for (int w = 0; w < WORKERS; w++) {
        pools[w] = pool_create((size_t)64 << 20, false);
        check(pools[w] != NULL, "no pool");
    }
    for (int w = 0; w < WORKERS; w++)
        open_worker(&workers[w], w);
    for (int w = 0; w < WORKERS; w++)
        check(pthread_create(&threads[w], NULL, work, &workers[w]) == 0, "no thread");
    for (int w = 0; w < WORKERS; w++)
        pthread_join(threads[w], NULL);
    int moved = 0, given_up = 0;
    for (int command = 1; command < COMMANDS; command++)
        for (int i = 0; i < OPERATIONS; i++)
            for (int w = 0; w < WORKERS; w++) {
                check(done[command][i][w] == 0 || undone[command][i][w] == 0,
                      "an operation that some have done and others have not");
                moved += done[command][i][w] > 0;
                given_up += undone[command][i][w] > 0;
            }
    check(moved > COMMANDS / 4 && given_up > COMMANDS / 20, "hardly anything has happened");
    for (int w = 0; w < WORKERS; w++)
        close_worker(&workers[w]);
    for (int w = 0; w < WORKERS; w++)
        pool_destroy(pools[w]);
    munmap(block.base, layout.size);
}

int
main(void)
{
    for (way = 0; way < WAYS; way++)
        run();
    return 0;
}
