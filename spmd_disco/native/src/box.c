/* A reply box: one process writes a stream of bytes into a ring, another reads it. Positions count
 * bytes for ever; a position's place is its remainder by the size. */
#include "box.h"

#include <string.h>

void
box_open(Box *box, const Node *node, uint32_t worker)
{
    box->header = (BoxHeader *)(node->base + node->boxes_offset +
                                worker * (sizeof(BoxHeader) + node->box_size));
    box->data = (uint8_t *)(box->header + 1);
    box->size = node->box_size;
    box->at = 0;
}

int64_t
box_write(Box *box, const void *from, uint64_t size)
{
    uint64_t tail = atomic_load_explicit(&box->header->tail, memory_order_acquire);
    uint64_t used = box->at - tail;
    if (used > box->size)
        return -1;
    if (size > box->size - used)
        size = box->size - used;
    if (size == 0)
        return 0;
    uint64_t place = box->at % box->size;
    uint64_t first = box->size - place < size ? box->size - place : size;
    memcpy(box->data + place, from, first);
    memcpy(box->data, (const uint8_t *)from + first, size - first);
    box->at += size;
    atomic_store_explicit(&box->header->head, box->at, memory_order_release);
    return (int64_t)size;
}

bool
box_block(Box *box)
{
    /* The controller moves the tail, then looks at this mark; here it is the other way round. */
    atomic_store(&box->header->blocked, 1);
    return box->at - atomic_load(&box->header->tail) >= box->size;
}

int64_t
box_available(const Box *box)
{
    uint64_t head = atomic_load_explicit(&box->header->head, memory_order_acquire);
    return head - box->at > box->size ? -1 : (int64_t)(head - box->at);
}

void
box_read(Box *box, void *to, uint64_t size)
{
    if (size == 0)
        return;
    uint64_t place = box->at % box->size;
    uint64_t first = box->size - place < size ? box->size - place : size;
    memcpy(to, box->data + place, first);
    memcpy((uint8_t *)to + first, box->data, size - first);
    box->at += size;
}

void
box_release(Box *box, Node *node, uint32_t worker)
{
    atomic_store(&box->header->tail, box->at);
    if (atomic_load(&box->header->blocked) && atomic_exchange(&box->header->blocked, 0))
        node_ring_bell(node, worker);
}
