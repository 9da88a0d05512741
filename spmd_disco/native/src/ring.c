/* The ring of commands: one process writes, all others read everything.
 *
 * Positions count bytes for ever; a position's place is its remainder by the size, a power of two.
 * A record lies in one piece: where it does not fit before the end, a record to skip fills that up.
 * The writer puts a record in place and publishes it by one store to `head`; each reader tells by
 * its `tail` what may be overwritten. The writer remembers the slowest, so that it needs to look at
 * the tails only when the ring seems to be full. */
#include "ring.h"

#include <string.h>

#define RECORD_ALIGNMENT 16

static uint64_t
record_size(uint64_t size)
{
    return sizeof(RecordHead) + (size + RECORD_ALIGNMENT - 1) / RECORD_ALIGNMENT * RECORD_ALIGNMENT;
}

void
ring_open(Ring *ring, Node *node)
{
    memset(ring, 0, sizeof *ring);
    ring->node = node;
    ring->header = (RingHeader *)(node->base + node->ring_offset);
    ring->data = (uint8_t *)(ring->header + 1);
    ring->size = node->ring_size;
}

/* The writer ----------------------------------------------------------------------------------- */

void
ring_look_at_tails(Ring *ring)
{
    uint64_t slowest = ring->head;
    for (uint32_t i = 1; i < ring->node->workers; i++) {
        const NodeStatus *status = &ring->node->status[i];
        if (atomic_load_explicit(&status->gone, memory_order_relaxed))
            continue;
        uint64_t tail = atomic_load_explicit(&status->tail, memory_order_acquire);
        if (tail < slowest)
            slowest = tail;
    }
    ring->slowest = slowest;
}

/* What a record of `need` bytes takes up, with the rest of the ring if it does not fit there. */
static uint64_t
with_skip(const Ring *ring, uint64_t need)
{
    uint64_t to_end = ring->size - (ring->head & (ring->size - 1));
    return need > to_end ? to_end + need : need;
}

bool
ring_fits(const Ring *ring, uint64_t size)
{
    return ring->head - ring->slowest + with_skip(ring, record_size(size)) <= ring->size;
}

void
ring_want_room(Ring *ring, uint64_t size, uint64_t until)
{
    uint64_t end = ring->head + with_skip(ring, record_size(size));
    /* Not at every record: only some more room makes it worth while to wake up. */
    uint64_t wanted = (end > ring->size ? end - ring->size : 1) + ring->size / 8;
    if (until != 0 && until < wanted)
        wanted = until;
    atomic_store(&ring->header->wanted, wanted < ring->head ? wanted : ring->head);
    /* Readers store their tail, then look at `wanted`; here it is the other way round. */
    atomic_thread_fence(memory_order_seq_cst);
}

void
ring_write(Ring *ring, uint32_t kind, uint64_t number, const struct iovec *parts, int count)
{
    uint64_t size = 0;
    for (int i = 0; i < count; i++)
        size += parts[i].iov_len;
    uint64_t need = record_size(size), place = ring->head & (ring->size - 1);
    uint64_t head = ring->head + with_skip(ring, need);
    RecordHead record = {.kind = RECORD_SKIP};
    if (need > ring->size - place) {
        memcpy(ring->data + place, &record, sizeof record);
        place = 0;
    }
    record = (RecordHead){(uint32_t)size, kind, number};
    memcpy(ring->data + place, &record, sizeof record);
    uint8_t *to = ring->data + place + sizeof record;
    for (int i = 0; i < count; i++) {
        memcpy(to, parts[i].iov_base, parts[i].iov_len);
        to += parts[i].iov_len;
    }
    ring->head = head;
    ring->published = number;
    if (atomic_load_explicit(&ring->header->wanted, memory_order_relaxed) != 0)
        atomic_store_explicit(&ring->header->wanted, 0, memory_order_relaxed);
    atomic_store_explicit(&ring->header->head, head, memory_order_release);
    node_ring_bells(ring->node, 1, ring->node->workers);
}

/* Readers -------------------------------------------------------------------------------------- */

static int
damaged(Ring *ring)
{
    ring->broken = true;
    return -1;
}

int
ring_read(Ring *ring, RecordHead *record, const uint8_t **data)
{
    if (ring->broken)
        return -1;
    uint64_t head = atomic_load_explicit(&ring->header->head, memory_order_acquire);
    uint64_t tail = ring->tail;
    if (head == tail)
        return 0;
    if (head - tail > ring->size || (head - tail) % RECORD_ALIGNMENT)
        return damaged(ring);
    uint64_t place = tail & (ring->size - 1);
    memcpy(record, ring->data + place, sizeof *record);
    if (record->kind == RECORD_SKIP) {
        uint64_t to_end = ring->size - place;
        if (to_end >= head - tail)
            return damaged(ring);
        tail += to_end;
        place = 0;
        memcpy(record, ring->data, sizeof *record);
    }
    uint64_t need = record_size(record->size);
    if (need > head - tail || need > ring->size - place)
        return damaged(ring);
    if (record->kind != RECORD_PLAIN &&
        (record->kind != RECORD_SIDE || record->size != sizeof(SideRecord)))
        return damaged(ring);
    *data = ring->data + place + sizeof *record;
    ring->next = tail + need;
    return 1;
}

void
ring_pass(Ring *ring)
{
    ring->tail = ring->next;
    atomic_store_explicit(&ring->node->mine->tail, ring->tail, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    uint64_t wanted = atomic_load_explicit(&ring->header->wanted, memory_order_relaxed);
    if (wanted != 0 && ring->tail >= wanted)
        node_ring_bell(ring->node, 0);
}

static bool
has_record(const void *what)
{
    const Ring *ring = what;
    return atomic_load_explicit(&ring->header->head, memory_order_acquire) != ring->tail;
}

bool
ring_spin(const Ring *ring, int64_t ns)
{
    return node_poll(has_record, ring, ns);
}
