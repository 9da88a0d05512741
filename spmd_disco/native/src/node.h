/* What the processes of one node share for the control plane: a *node block* in one segment.
 *
 *     segment header | NodeHeader | NodeStatus of each worker | ring | reply box of each worker
 *
 * Worker 0 lives in the controller's process; process i and worker i are one. Every process has a
 * doorbell, a word that others count up to tell it to look at everything again. The one ringing
 * does so only if that process is marked as waiting, and makes a system call only if it sleeps:
 *
 *     who rings:   publish (release store); fence; waiting? -> count up; asleep? -> futex wake
 *     who waits:   mark as waiting; read the doorbell; look at the condition; wait for the
 *                  doorbell to change; ...; unmark
 *
 * One of the two fences comes second, so either the waiter sees what was published or the one that
 * rings sees the mark: nothing is missed. Waits are bounded all the same.
 *
 * What is shared is never trusted with anything that could reach out of the segment: sizes and
 * offsets are checked once, when a process attaches, and kept in its own Node. */
#ifndef SPMD_DISCO_NODE_H
#define SPMD_DISCO_NODE_H

#include <sched.h>

#include "native.h"

#define NODE_MAGIC 0x4353444eu /* "NDSC" */
#define NODE_VERSION 1
/* Bounds the bit set of those who wait to one cache line. */
#define NODE_MOST_WORKERS 512
/* The longest sleep in a wait, after which everything is looked at again: signals, limits. */
#define NODE_LONGEST_SLEEP_NS 50000000
#define NODE_FUNCTION_SIZE 184
/* Polls between two yields. Without yields, waits among more processes than cores take
 * milliseconds: the one that is waited for does not get to run. */
#define POLLS_PER_YIELD 16

typedef struct {
    uint32_t magic;
    uint32_t version;
    uint32_t workers;
    uint32_t controller_pid;
    /* Offsets in the segment. */
    uint64_t status_offset;
    uint64_t ring_offset;
    uint64_t ring_size;
    uint64_t boxes_offset;
    uint64_t box_size;
    uint64_t end;
    /* Bit i: process i waits for its doorbell to change. */
    _Alignas(CACHE_LINE) _Atomic uint64_t waiting[NODE_MOST_WORKERS / 64];
    /* The watchers' doorbell, which the interrupt word below it and others' messages ring. */
    _Alignas(CACHE_LINE) _Atomic uint32_t watch_bell;
    /* NODE_OPEN and so on. */
    _Atomic uint32_t closed;
    /* Commands up to this one are cancelled. */
    _Atomic uint64_t interrupted_through;
    /* Who leaves this command, or a later one, rings the controller's bell; 0 for none. */
    _Atomic uint64_t awaited;
} NodeHeader;

enum { NODE_OPEN = 0, NODE_CLOSED = 1 };

/* One worker's status line. */
typedef struct {
    /* Written by the worker alone, with every command. */
    _Alignas(CACHE_LINE) _Atomic uint64_t tail; /* how far it has read the ring */
    _Atomic uint64_t executed;                  /* the last command that it has left */
    _Atomic uint64_t running;                   /* the one it is in, or 0 */
    _Atomic uint64_t since;                     /* monotonic ns: since when it is in there */
    _Atomic uint64_t operation_command;         /* the collective that it is in: k, */
    _Atomic uint64_t operation_index;           /* and 1 + i, or 0 for none */
    _Atomic uint64_t failed;                    /* the last command that failed */
    _Atomic uint64_t failures;                  /* how many did */
    /* The doorbell, and how many threads of the process sleep at it. */
    _Alignas(CACHE_LINE) _Atomic uint32_t bell;
    _Atomic uint32_t asleep;
    /* Not reckoned with any more: its process has ended. */
    _Atomic uint32_t gone;
    /* Written by the worker, now and then. */
    _Alignas(CACHE_LINE) _Atomic uint64_t interrupted_through; /* as far as it has taken note */
    _Atomic uint32_t pid;
    /* How the process has ended, as a wait status says it, plus 1; 0 while it has not. */
    _Atomic uint32_t ended;
    /* Odd while the text is being written. */
    _Atomic uint32_t function_version;
    _Atomic uint32_t function_size;
    /* What it calls, UTF-8, cut to fit; read as bytes, so that a torn text harms nobody. */
    _Atomic char function[NODE_FUNCTION_SIZE];
} NodeStatus;

_Static_assert(sizeof(NodeStatus) % CACHE_LINE == 0, "each status line has cache lines of its own");

/* One process's end of a node block. `node_attach` and `node_initialise` fill it in. */
typedef struct {
    NodeHeader *header;
    NodeStatus *status;
    uint8_t *base; /* of the segment */
    NodeStatus *mine;
    uint32_t workers;
    uint32_t me;
    uint64_t ring_offset, ring_size, boxes_offset, box_size;
    int64_t spin_ns;
    /* How many threads of this process wait now. Only with the GIL held. */
    uint32_t waiters;
} Node;

typedef struct {
    PyObject_HEAD
    Node node;
    PyObject *segment; /* keeps the memory */
} NodeObject;

extern PyTypeObject *Node_Type;

/* The clock of `since` and of deadlines: CLOCK_MONOTONIC in ns. */
int64_t node_now(void);

/* Poll with yields until `ready` says so, for `ns` at most; say whether it does. */
static inline bool
node_poll(bool (*ready)(const void *), const void *what, int64_t ns)
{
    int64_t end = node_now() + ns;
    do {
        for (int poll = 0; poll < POLLS_PER_YIELD; poll++) {
            if (ready(what))
                return true;
            relax();
        }
        sched_yield();
    } while (node_now() < end);
    return false;
}

/* Wake everybody who sleeps at a word, and sleep at it while it holds `seen`, `ns` at most. All
 * futexes are shared between processes. `futex_wait` ends early at a signal. */
void futex_wake(_Atomic uint32_t *word);
void futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t ns);

static inline void
node_count_up(Node *node, uint32_t worker)
{
    NodeStatus *status = &node->status[worker];
    atomic_fetch_add(&status->bell, 1);
    if (atomic_load(&status->asleep) != 0)
        futex_wake(&status->bell);
}

/* Tell a process to look at everything again. What it is to see must have been published. */
static inline void
node_ring_bell(Node *node, uint32_t worker)
{
    atomic_thread_fence(memory_order_seq_cst);
    uint64_t set = atomic_load_explicit(&node->header->waiting[worker / 64], memory_order_relaxed);
    if (set >> worker % 64 & 1)
        node_count_up(node, worker);
}

/* The same for workers from `first` to before `end`, but not for this process itself. */
static inline void
node_ring_bells(Node *node, uint32_t first, uint32_t end)
{
    atomic_thread_fence(memory_order_seq_cst);
    for (uint32_t word = first / 64; word * 64 < end; word++) {
        uint64_t set = atomic_load_explicit(&node->header->waiting[word], memory_order_relaxed);
        while (set != 0) {
            uint32_t worker = word * 64 + (uint32_t)__builtin_ctzll(set);
            set &= set - 1;
            if (worker >= first && worker < end && worker != node->me)
                node_count_up(node, worker);
        }
    }
}

/* The same for all processes but this one. */
static inline void
node_ring_all(Node *node)
{
    node_ring_bells(node, 0, node->workers);
}

/* Begin and end a wait: mark this process as waiting, and unmark it with the last of its threads
 * that waits. With the GIL held. The doorbell is read after the mark, and before the condition. */
static inline void
node_begin_wait(Node *node)
{
    if (node->waiters++ == 0)
        atomic_fetch_or(&node->header->waiting[node->me / 64], (uint64_t)1 << node->me % 64);
}

static inline void
node_end_wait(Node *node)
{
    if (node->waiters > 0 && --node->waiters == 0)
        atomic_fetch_and(&node->header->waiting[node->me / 64], ~((uint64_t)1 << node->me % 64));
}

static inline uint32_t
node_bell(const Node *node)
{
    return atomic_load(&node->mine->bell);
}

/* Wait until the doorbell differs from `seen`, or node_now() passes `deadline`, or a signal comes;
 * never longer than spin_ns + NODE_LONGEST_SLEEP_NS. Polls with yields for spin_ns, then sleeps.
 * Says whether the doorbell differs. node_sleep does not poll. Both without the GIL. */
bool node_wait(Node *node, uint32_t seen, int64_t deadline);
bool node_sleep(Node *node, uint32_t seen, int64_t deadline);
/* The same for `ns`, without that bound. */
bool node_rest(Node *node, uint32_t seen, int64_t ns);

/* The worker's own status line. */
static inline void
node_set_operation(Node *node, uint64_t command, uint64_t index)
{
    atomic_store_explicit(&node->mine->operation_command, command, memory_order_relaxed);
    atomic_store_explicit(&node->mine->operation_index, index + 1, memory_order_release);
}

static inline void
node_clear_operation(Node *node)
{
    atomic_store_explicit(&node->mine->operation_index, 0, memory_order_release);
}

/* Say that this worker starts a command: number, function (NULL leaves the text), time. */
void node_begin_command(Node *node, uint64_t number, const char *function, size_t size);

static inline void
node_leave_command(Node *node, uint64_t number)
{
    atomic_store_explicit(&node->mine->running, 0, memory_order_relaxed);
    atomic_store_explicit(&node->mine->executed, number, memory_order_release);
    /* Either the controller sees that, or this process sees that the controller waits for it. */
    atomic_thread_fence(memory_order_seq_cst);
    uint64_t awaited = atomic_load_explicit(&node->header->awaited, memory_order_relaxed);
    if (awaited != 0 && number >= awaited)
        node_ring_bell(node, 0);
}

static inline void
node_fail_command(Node *node, uint64_t number)
{
    NodeStatus *mine = node->mine;
    uint64_t failures = atomic_load_explicit(&mine->failures, memory_order_relaxed);
    atomic_store_explicit(&mine->failures, failures + 1, memory_order_relaxed);
    atomic_store_explicit(&mine->failed, number, memory_order_release);
}

static inline uint64_t
node_interrupted_through(const Node *node)
{
    return atomic_load_explicit(&node->header->interrupted_through, memory_order_acquire);
}

/* Cancel the commands up to `through` on all workers, and tell everybody. */
void node_interrupt(Node *node, uint64_t through);
/* Wake all watchers. */
void node_ring_watchers(Node *node);

static inline bool
node_closed(const Node *node)
{
    return atomic_load_explicit(&node->header->closed, memory_order_acquire) != NODE_OPEN;
}

/* Copy a worker's function text into `text`, of NODE_FUNCTION_SIZE bytes, and return its size. */
size_t node_function(const NodeStatus *status, char *text);

bool node_is_possible(uint32_t workers, uint64_t ring_size, uint64_t box_size);
/* Bytes of a segment for a node block. `ring_size` is a power of two. */
uint64_t node_size(uint32_t workers, uint64_t ring_size, uint64_t box_size);
/* Lay out a new block in `size` zeroed bytes, as process 0; false where it does not fit. */
bool node_initialise(Node *node, uint8_t *base, uint64_t size, uint32_t workers,
                     uint64_t ring_size, uint64_t box_size);
/* Look at somebody else's block, as process `me`; false where it is none, or damaged. */
bool node_attach(Node *node, uint8_t *base, uint64_t size, uint32_t me);

#endif
