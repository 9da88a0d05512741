/* The node block: status lines, doorbells, interrupts; see node.h. */
#include "node.h"

#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "box.h"
#include "ring.h"

int64_t
node_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

void
futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void
futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t ns)
{
    if (ns <= 0)
        return;
    struct timespec limit = {ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0);
}

/* A doorbell, and what it was when somebody last looked. */
struct bell {
    _Atomic uint32_t *word;
    uint32_t seen;
};

static bool
has_rung(const void *what)
{
    const struct bell *bell = what;
    return atomic_load(bell->word) != bell->seen;
}

bool
node_wait(Node *node, uint32_t seen, int64_t deadline)
{
    struct bell bell = {&node->mine->bell, seen};
    int64_t left = deadline - node_now();
    int64_t ns = left < node->spin_ns ? left : node->spin_ns;
    if (ns > 0 && node_poll(has_rung, &bell, ns))
        return true;
    return node_sleep(node, seen, deadline);
}

bool
node_rest(Node *node, uint32_t seen, int64_t ns)
{
    _Atomic uint32_t *bell = &node->mine->bell;
    if (ns > 0) {
        atomic_fetch_add(&node->mine->asleep, 1);
        /* The kernel compares the word once more: who counts up later sees that we are asleep. */
        futex_wait(bell, seen, ns);
        atomic_fetch_sub(&node->mine->asleep, 1);
    }
    return atomic_load(bell) != seen;
}

bool
node_sleep(Node *node, uint32_t seen, int64_t deadline)
{
    int64_t ns = deadline - node_now();
    return node_rest(node, seen, ns < NODE_LONGEST_SLEEP_NS ? ns : NODE_LONGEST_SLEEP_NS);
}

void
node_begin_command(Node *node, uint64_t number, const char *function, size_t size)
{
    NodeStatus *mine = node->mine;
    if (function != NULL) {
        if (size > NODE_FUNCTION_SIZE) {
            size = NODE_FUNCTION_SIZE;
            /* Not in the middle of a character. */
            while (size > 0 && ((uint8_t)function[size] & 0xC0) == 0x80)
                size--;
        }
        uint32_t version = atomic_load_explicit(&mine->function_version, memory_order_relaxed) | 1;
        atomic_store_explicit(&mine->function_version, version, memory_order_relaxed);
        atomic_thread_fence(memory_order_release);
        for (size_t i = 0; i < size; i++)
            atomic_store_explicit(&mine->function[i], function[i], memory_order_relaxed);
        atomic_store_explicit(&mine->function_size, size, memory_order_relaxed);
        atomic_store_explicit(&mine->function_version, version + 1, memory_order_release);
    }
    atomic_store_explicit(&mine->since, node_now(), memory_order_relaxed);
    atomic_store_explicit(&mine->running, number, memory_order_release);
}

size_t
node_function(const NodeStatus *status, char *text)
{
    size_t size = 0;
    /* A few tries are enough for all but a process that was killed while it wrote. */
    for (int tries = 0; tries < 8; tries++) {
        uint32_t before = atomic_load_explicit(&status->function_version, memory_order_acquire);
        size = atomic_load_explicit(&status->function_size, memory_order_relaxed);
        if (size > NODE_FUNCTION_SIZE)
            size = NODE_FUNCTION_SIZE;
        for (size_t i = 0; i < size; i++)
            text[i] = atomic_load_explicit(&status->function[i], memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        uint32_t after = atomic_load_explicit(&status->function_version, memory_order_relaxed);
        if (before == after && before % 2 == 0)
            break;
    }
    return size;
}

void
node_ring_watchers(Node *node)
{
    atomic_fetch_add(&node->header->watch_bell, 1);
    futex_wake(&node->header->watch_bell);
}

void
node_interrupt(Node *node, uint64_t through)
{
    _Atomic uint64_t *word = &node->header->interrupted_through;
    uint64_t known = atomic_load(word);
    while (known < through && !atomic_compare_exchange_weak(word, &known, through))
        ;
    node_ring_watchers(node);
    node_ring_all(node);
}

/* Layout --------------------------------------------------------------------------------------- */

static uint64_t
aligned(uint64_t offset)
{
    return (offset + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

static void
lay_out(NodeHeader *header, uint32_t workers, uint64_t ring_size, uint64_t box_size)
{
    header->magic = NODE_MAGIC;
    header->version = NODE_VERSION;
    header->workers = workers;
    header->ring_size = ring_size;
    header->box_size = box_size;
    header->status_offset = aligned(SEGMENT_HEADER + sizeof(NodeHeader));
    header->ring_offset = aligned(header->status_offset + workers * sizeof(NodeStatus));
    header->boxes_offset = aligned(header->ring_offset + sizeof(RingHeader) + ring_size);
    header->end = header->boxes_offset + workers * (sizeof(BoxHeader) + box_size);
}

bool
node_is_possible(uint32_t workers, uint64_t ring_size, uint64_t box_size)
{
    return workers >= 1 && workers <= NODE_MOST_WORKERS && ring_size >= 1024 &&
           ring_size <= (uint64_t)1 << 31 && (ring_size & (ring_size - 1)) == 0 &&
           box_size >= CACHE_LINE && box_size <= (uint64_t)1 << 31 && box_size % CACHE_LINE == 0;
}

uint64_t
node_size(uint32_t workers, uint64_t ring_size, uint64_t box_size)
{
    NodeHeader header = {0};
    lay_out(&header, workers, ring_size, box_size);
    return header.end;
}

static void
take(Node *node, uint8_t *base, const NodeHeader *layout, uint32_t me)
{
    node->base = base;
    node->header = (NodeHeader *)(base + SEGMENT_HEADER);
    node->status = (NodeStatus *)(base + layout->status_offset);
    node->workers = layout->workers;
    node->me = me;
    node->mine = &node->status[me];
    node->ring_offset = layout->ring_offset;
    node->ring_size = layout->ring_size;
    node->boxes_offset = layout->boxes_offset;
    node->box_size = layout->box_size;
    node->waiters = 0;
    atomic_store(&node->mine->pid, (uint32_t)getpid());
}

bool
node_initialise(Node *node, uint8_t *base, uint64_t size, uint32_t workers, uint64_t ring_size,
                uint64_t box_size)
{
    NodeHeader *header = (NodeHeader *)(base + SEGMENT_HEADER);
    if (!node_is_possible(workers, ring_size, box_size) ||
        size < node_size(workers, ring_size, box_size))
        return false;
    lay_out(header, workers, ring_size, box_size);
    header->controller_pid = (uint32_t)getpid();
    take(node, base, header, 0);
    return true;
}

bool
node_attach(Node *node, uint8_t *base, uint64_t size, uint32_t me)
{
    if (size < SEGMENT_HEADER + sizeof(NodeHeader))
        return false;
    /* What follows uses this copy: nobody can change it between the check and the use. */
    const volatile NodeHeader *shared = (NodeHeader *)(base + SEGMENT_HEADER);
    NodeHeader layout = {0};
    if (shared->magic != NODE_MAGIC || shared->version != NODE_VERSION)
        return false;
    uint32_t workers = shared->workers;
    uint64_t ring_size = shared->ring_size, box_size = shared->box_size;
    if (!node_is_possible(workers, ring_size, box_size) || me >= workers)
        return false;
    lay_out(&layout, workers, ring_size, box_size);
    if (size < layout.end)
        return false;
    take(node, base, &layout, me);
    return true;
}
