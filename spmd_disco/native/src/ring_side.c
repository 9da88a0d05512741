/* Messages of any size through the ring: one above a quarter of it goes to a side block, a segment
 * of its own, and its record says where that is. Blocks of moderate size are kept by both sides and
 * used again once all readers have passed. */
#include "ring.h"

#include <string.h>
#include <unistd.h>

/* From this size on, other threads may run while a message is copied. */
#define LARGE_COPY (1024 * 1024)
#define SMALLEST_SIDE_BLOCK (512 * 1024)
/* Messages from this size on lie in aligned memory: arrays may come to lie in it. */
#define ALIGNED_MESSAGE (64 * 1024)
#define MESSAGE_ALIGNMENT 64

PyObject *
new_message(size_t size, uint8_t **data)
{
    size_t more = size >= ALIGNED_MESSAGE ? MESSAGE_ALIGNMENT : 0;
    if (size > (size_t)PY_SSIZE_T_MAX - more)
        return PyErr_NoMemory();
    PyObject *memory = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(size + more));
    if (memory == NULL)
        return NULL;
    PyObject *view = PyMemoryView_FromObject(memory);
    size_t start = 0;
    if (more > 0)
        start = -(uintptr_t)PyByteArray_AS_STRING(memory) % MESSAGE_ALIGNMENT;
    *data = (uint8_t *)PyByteArray_AS_STRING(memory) + start;
    Py_DECREF(memory);
    if (view == NULL || more == 0)
        return view;
    PyObject *part = PySequence_GetSlice(view, (Py_ssize_t)start, (Py_ssize_t)(start + size));
    Py_DECREF(view);
    return part;
}

void
copy_message(uint8_t *to, const uint8_t *from, size_t size)
{
    if (size < LARGE_COPY) {
        memcpy(to, from, size);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    memcpy(to, from, size);
    Py_END_ALLOW_THREADS
}

/* The writer ----------------------------------------------------------------------------------- */

static bool
goes_aside(const Ring *ring, uint64_t size)
{
    return size > ring->size / 4;
}

static void
free_side_blocks(Ring *ring)
{
    for (int i = 0; i < SIDE_BLOCKS; i++) {
        SideBlock *block = &ring->side[i];
        if (block->used == 0 || block->until > ring->slowest)
            continue;
        ring->side_used -= block->used;
        block->used = 0;
        /* Whoever will read it again has it mapped now. */
        if (block->segment->named)
            shared_unlink(block->segment->base);
        if (i >= SIDE_KEPT)
            Py_CLEAR(block->segment);
    }
}

/* The block that a message of `size` bytes may go to, or -1. */
static int
find_side_block(const Ring *ring, uint64_t size)
{
    if (ring->side_used > 0 && ring->side_used + size > SIDE_WINDOW)
        return -1;
    bool kept = size + SEGMENT_HEADER <= SIDE_KEPT_SIZE;
    int found = -1;
    for (int i = kept ? 0 : SIDE_KEPT; i < (kept ? SIDE_KEPT : SIDE_BLOCKS); i++) {
        const SideBlock *block = &ring->side[i];
        if (block->used > 0)
            continue;
        if (block->segment != NULL && (uint64_t)block->segment->size >= size + SEGMENT_HEADER)
            return i;
        /* One that is not there yet rather than one that would have to be replaced. */
        if (found < 0 || block->segment == NULL)
            found = i;
    }
    return found;
}

static bool
has_room(Ring *ring, uint64_t size)
{
    if (!goes_aside(ring, size))
        return ring_fits(ring, size);
    free_side_blocks(ring);
    return ring_fits(ring, sizeof(SideRecord)) && find_side_block(ring, size) >= 0;
}

bool
ring_has_room(Ring *ring, uint64_t size)
{
    if (has_room(ring, size))
        return true;
    bool aside = goes_aside(ring, size);
    uint64_t until = 0;
    for (int i = 0; aside && i < SIDE_BLOCKS; i++)
        if (ring->side[i].used > 0 && (until == 0 || ring->side[i].until < until))
            until = ring->side[i].until;
    ring_want_room(ring, aside ? sizeof(SideRecord) : size, until);
    ring_look_at_tails(ring);
    return has_room(ring, size);
}

static int
push_aside(Ring *ring, uint64_t number, const struct iovec *parts, int count, uint64_t size)
{
    int slot = find_side_block(ring, size);
    SideBlock *block = &ring->side[slot];
    uint64_t need = size + SEGMENT_HEADER;
    if (block->segment == NULL || (uint64_t)block->segment->size < need) {
        uint64_t room = need;
        /* Blocks that are kept have few different sizes, so that the next message fits, too. */
        if (slot < SIDE_KEPT)
            for (room = SMALLEST_SIDE_BLOCK; room < need;)
                room *= 2;
        Py_CLEAR(block->segment);
        block->segment = (SegmentObject *)PyObject_CallMethod((PyObject *)Segment_Type, "create",
                                                              "nni", (Py_ssize_t)room,
                                                              (Py_ssize_t)room,
                                                              (int)ring->named_blocks);
        if (block->segment == NULL)
            return -1;
    }
    uint8_t *to = block->segment->base + SEGMENT_HEADER;
    for (int i = 0; i < count; i++) {
        copy_message(to, parts[i].iov_base, parts[i].iov_len);
        to += parts[i].iov_len;
    }
    SideRecord record = {getpid(), block->segment->fd, {0}, size, (uint64_t)slot};
    memcpy(record.nonce, block->segment->base, NONCE_SIZE);
    struct iovec part = {&record, sizeof record};
    ring_write(ring, RECORD_SIDE, number, &part, 1);
    block->used = size;
    block->until = ring->head;
    ring->side_used += size;
    return 1;
}

int
ring_try_push(Ring *ring, uint64_t number, const struct iovec *parts, int count)
{
    uint64_t size = 0;
    for (int i = 0; i < count; i++)
        size += parts[i].iov_len;
    if (!ring_has_room(ring, size))
        return 0;
    if (goes_aside(ring, size))
        return push_aside(ring, number, parts, count, size);
    ring_write(ring, RECORD_PLAIN, number, parts, count);
    return 1;
}

void
ring_collect(Ring *ring)
{
    if (ring->side_used > 0) {
        ring_look_at_tails(ring);
        free_side_blocks(ring);
    }
}

void
ring_close(Ring *ring)
{
    for (int i = 0; i < SIDE_BLOCKS; i++)
        Py_CLEAR(ring->side[i].segment);
    for (int i = 0; i < SIDE_KEPT; i++)
        Py_CLEAR(ring->mapped[i]);
    Py_CLEAR(ring->transient);
}

/* Readers -------------------------------------------------------------------------------------- */

static int
damaged(Ring *ring)
{
    ring->broken = true;
    PyErr_SetString(PyExc_OSError, "the ring of commands is damaged: something has written into "
                    "the memory that the processes of this session share");
    return -1;
}

static int
peek_aside(Ring *ring, const uint8_t *at, const uint8_t **data, size_t *size)
{
    SideRecord record;
    memcpy(&record, at, sizeof record);
    if (record.slot >= SIDE_BLOCKS)
        return damaged(ring);
    SegmentObject **mapped =
        record.slot < SIDE_KEPT ? &ring->mapped[record.slot] : &ring->transient;
    if (*mapped == NULL || memcmp((*mapped)->base, record.nonce, NONCE_SIZE) != 0) {
        Py_CLEAR(*mapped);
        *mapped = (SegmentObject *)PyObject_CallMethod(
            (PyObject *)Segment_Type, "attach", "liy#", (long)record.pid, (int)record.fd,
            (const char *)record.nonce, (Py_ssize_t)NONCE_SIZE);
        if (*mapped == NULL)
            return -1;
    }
    if (record.size > (uint64_t)(*mapped)->size - SEGMENT_HEADER)
        return damaged(ring);
    *data = (*mapped)->base + SEGMENT_HEADER;
    *size = record.size;
    return 1;
}

int
ring_peek(Ring *ring, const uint8_t **data, size_t *size, uint64_t *number)
{
    RecordHead record;
    int result = ring_read(ring, &record, data);
    if (result < 0)
        return damaged(ring);
    if (result == 0)
        return 0;
    *number = record.number;
    *size = record.size;
    return record.kind == RECORD_SIDE ? peek_aside(ring, *data, data, size) : 1;
}

void
ring_advance(Ring *ring)
{
    Py_CLEAR(ring->transient);
    ring_pass(ring);
}
