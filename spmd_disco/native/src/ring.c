/* The ring of commands and the boxes of replies; see ring.h.
 *
 * The ring: one process writes, all others read everything. Positions count bytes for ever; a
 * position's place is its remainder by the size, a power of two. A record lies in one piece: where
 * it does not fit before the end, a record to skip fills that up. The writer puts a record in
 * place and publishes it by one store to `head`; each reader tells by its `tail` what may be
 * overwritten, and the writer remembers the slowest, so that it needs to look at the tails only
 * when the ring seems to be full.
 *
 * A message above a quarter of the ring goes to a side block, a segment of its own, and the record
 * says where that is. Blocks of moderate size are kept by both sides and used again once all
 * readers have passed.
 *
 * A reply box: one process writes a stream of bytes, another reads it; each reply comes after its
 * size, in as many pieces as it takes. */
#include "ring.h"

#include <string.h>
#include <unistd.h>

#define RECORD_ALIGNMENT 16
#define RECORD_HEAD sizeof(RecordHead)
/* From this size on, other threads may run while a message is copied. */
#define LARGE_COPY (1024 * 1024)
#define SMALLEST_SIDE_BLOCK (512 * 1024)
/* Messages from this size on lie in aligned memory: arrays may come to lie in it. */
#define ALIGNED_MESSAGE (64 * 1024)
#define MESSAGE_ALIGNMENT 64
/* No reply is larger; a size above it is rubbish. */
#define LARGEST_REPLY ((uint64_t)1 << 46)

static uint64_t
record_size(uint64_t size)
{
    return RECORD_HEAD + (size + RECORD_ALIGNMENT - 1) / RECORD_ALIGNMENT * RECORD_ALIGNMENT;
}

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

static void
copy(uint8_t *to, const uint8_t *from, size_t size)
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

static void
look_at_tails(Ring *ring)
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

static bool
fits(const Ring *ring, uint64_t total)
{
    return ring->head - ring->slowest + total <= ring->size;
}

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
        return fits(ring, with_skip(ring, record_size(size)));
    free_side_blocks(ring);
    return fits(ring, with_skip(ring, record_size(sizeof(SideRecord)))) &&
           find_side_block(ring, size) >= 0;
}

/* The tail at which the slowest reader should ring, so that there is room for `size` bytes. */
static uint64_t
wanted_tail(const Ring *ring, uint64_t size)
{
    bool aside = goes_aside(ring, size);
    uint64_t total = with_skip(ring, record_size(aside ? sizeof(SideRecord) : size));
    uint64_t wanted = ring->head + total > ring->size ? ring->head + total - ring->size : 1;
    /* Not at every record: some more room makes it worth while to wake up. */
    wanted += ring->size / 8;
    if (aside)
        for (int i = 0; i < SIDE_BLOCKS; i++)
            if (ring->side[i].used > 0 && ring->side[i].until < wanted)
                wanted = ring->side[i].until;
    return wanted < ring->head ? wanted : ring->head;
}

bool
ring_has_room(Ring *ring, uint64_t size)
{
    if (has_room(ring, size))
        return true;
    atomic_store(&ring->header->wanted, wanted_tail(ring, size));
    /* Readers store their tail, then look at `wanted`; we the other way round. */
    atomic_thread_fence(memory_order_seq_cst);
    look_at_tails(ring);
    if (!has_room(ring, size))
        return false;
    atomic_store_explicit(&ring->header->wanted, 0, memory_order_relaxed);
    return true;
}

/* Start the record at the head with its first bytes; return where the rest goes, and what the head
 * will be. */
static uint8_t *
place_record(Ring *ring, uint64_t size, uint32_t kind, uint64_t number, uint64_t *head)
{
    uint64_t need = record_size(size), place = ring->head & (ring->size - 1);
    *head = ring->head + with_skip(ring, need);
    RecordHead record = {.kind = RECORD_SKIP};
    if (need > ring->size - place) {
        memcpy(ring->data + place, &record, sizeof record);
        place = 0;
    }
    record = (RecordHead){(uint32_t)size, kind, number};
    memcpy(ring->data + place, &record, sizeof record);
    return ring->data + place + sizeof record;
}

static void
publish(Ring *ring, uint64_t head, uint64_t number)
{
    ring->head = head;
    ring->published = number;
    atomic_store_explicit(&ring->header->head, head, memory_order_release);
    node_ring_bells(ring->node, 1, ring->node->workers);
}

static void
gather(uint8_t *to, const struct iovec *parts, int count)
{
    for (int i = 0; i < count; i++) {
        copy(to, parts[i].iov_base, parts[i].iov_len);
        to += parts[i].iov_len;
    }
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
                                                              "n", (Py_ssize_t)room);
        if (block->segment == NULL)
            return -1;
    }
    gather(block->segment->base + SEGMENT_HEADER, parts, count);
    SideRecord record = {getpid(), block->segment->fd, {0}, size, (uint64_t)slot};
    memcpy(record.nonce, block->segment->base, NONCE_SIZE);
    uint64_t head;
    uint8_t *place = place_record(ring, sizeof record, RECORD_SIDE, number, &head);
    memcpy(place, &record, sizeof record);
    block->used = size;
    block->until = head;
    ring->side_used += size;
    publish(ring, head, number);
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
    uint64_t head;
    gather(place_record(ring, size, RECORD_PLAIN, number, &head), parts, count);
    publish(ring, head, number);
    return 1;
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
    if (ring->broken)
        return damaged(ring);
    uint64_t head = atomic_load_explicit(&ring->header->head, memory_order_acquire);
    uint64_t tail = ring->tail;
    if (head == tail)
        return 0;
    uint64_t place = tail & (ring->size - 1);
    if (head - tail > ring->size || (head - tail) % RECORD_ALIGNMENT)
        return damaged(ring);
    RecordHead record;
    memcpy(&record, ring->data + place, sizeof record);
    if (record.kind == RECORD_SKIP) {
        uint64_t to_end = ring->size - place;
        if (to_end >= head - tail)
            return damaged(ring);
        tail += to_end;
        place = 0;
        memcpy(&record, ring->data, sizeof record);
    }
    uint64_t need = record_size(record.size);
    if (need > head - tail || need > ring->size - place)
        return damaged(ring);
    const uint8_t *at = ring->data + place + RECORD_HEAD;
    if (record.kind == RECORD_SIDE && record.size == sizeof(SideRecord)) {
        int result = peek_aside(ring, at, data, size);
        if (result < 0)
            return -1;
    } else if (record.kind == RECORD_PLAIN) {
        *data = at;
        *size = record.size;
    } else
        return damaged(ring);
    *number = record.number;
    ring->next = tail + need;
    return 1;
}

void
ring_advance(Ring *ring)
{
    ring->tail = ring->next;
    Py_CLEAR(ring->transient);
    atomic_store_explicit(&ring->node->mine->tail, ring->tail, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    uint64_t wanted = atomic_load_explicit(&ring->header->wanted, memory_order_relaxed);
    if (wanted != 0 && ring->tail >= wanted)
        node_ring_bell(ring->node, 0);
}

/* The Python type of the ring ------------------------------------------------------------------ */

static PyObject *
ring_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"node", NULL};
    PyObject *node;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Ring", names, Node_Type, &node))
        return NULL;
    RingObject *self = (RingObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(node);
    self->node = node;
    Ring *ring = &self->ring;
    ring->node = &((NodeObject *)node)->node;
    ring->header = (RingHeader *)(ring->node->base + ring->node->ring_offset);
    ring->data = (uint8_t *)(ring->header + 1);
    ring->size = ring->node->ring_size;
    return (PyObject *)self;
}

static void
ring_dealloc(RingObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    for (int i = 0; i < SIDE_BLOCKS; i++)
        Py_CLEAR(self->ring.side[i].segment);
    for (int i = 0; i < SIDE_KEPT; i++)
        Py_CLEAR(self->ring.mapped[i]);
    Py_CLEAR(self->ring.transient);
    Py_XDECREF(self->node);
    type->tp_free(self);
    Py_DECREF(type);
}

static int
check_side(Ring *ring, bool writer)
{
    if ((ring->node->me == 0) == writer)
        return 0;
    PyErr_SetString(PyExc_ValueError, writer ? "only the controller pushes commands"
                                             : "only workers other than worker 0 read commands");
    return -1;
}

static PyObject *
py_has_room(RingObject *self, PyObject *number)
{
    unsigned long long size = PyLong_AsUnsignedLongLong(number);
    if ((size == (unsigned long long)-1 && PyErr_Occurred()) || check_side(&self->ring, true) < 0)
        return NULL;
    return PyBool_FromLong(ring_has_room(&self->ring, size));
}

static PyObject *
py_try_push(RingObject *self, PyObject *args)
{
    unsigned long long number;
    Py_buffer message;
    if (!PyArg_ParseTuple(args, "Ky*:try_push", &number, &message))
        return NULL;
    int result = -1;
    if (check_side(&self->ring, true) == 0) {
        struct iovec part = {message.buf, (size_t)message.len};
        result = ring_try_push(&self->ring, number, &part, 1);
    }
    PyBuffer_Release(&message);
    return result < 0 ? NULL : PyBool_FromLong(result);
}

static PyObject *
py_pop(RingObject *self, PyObject *unused)
{
    Ring *ring = &self->ring;
    const uint8_t *data = NULL;
    size_t size = 0;
    uint64_t number;
    int result = check_side(ring, false) < 0 ? -1 : ring_peek(ring, &data, &size, &number);
    if (result < 0)
        return NULL;
    if (result == 0)
        Py_RETURN_NONE;
    uint8_t *to;
    PyObject *message = new_message(size, &to);
    if (message == NULL)
        return NULL;
    copy(to, data, size);
    ring_advance(ring);
    return message;
}

static PyObject *
py_collect(RingObject *self, PyObject *unused)
{
    Ring *ring = &self->ring;
    if (ring->side_used > 0) {
        look_at_tails(ring);
        free_side_blocks(ring);
    }
    Py_RETURN_NONE;
}

static PyObject *
py_slowest(RingObject *self, PyObject *unused)
{
    Ring *ring = &self->ring;
    uint64_t slowest = UINT64_MAX;
    unsigned long worker = 0;
    for (uint32_t i = 1; i < ring->node->workers; i++) {
        const NodeStatus *status = &ring->node->status[i];
        uint64_t tail = atomic_load_explicit(&status->tail, memory_order_relaxed);
        if (!atomic_load_explicit(&status->gone, memory_order_relaxed) && tail < slowest) {
            slowest = tail;
            worker = i;
        }
    }
    return PyLong_FromUnsignedLong(worker);
}

static PyObject *
get_published(RingObject *self, void *closure)
{
    return PyLong_FromUnsignedLongLong(self->ring.published);
}

static PyMethodDef ring_methods[] = {
    {"has_room", (PyCFunction)py_has_room, METH_O, NULL},
    {"try_push", (PyCFunction)py_try_push, METH_VARARGS, NULL},
    {"pop", (PyCFunction)py_pop, METH_NOARGS, NULL},
    {"collect", (PyCFunction)py_collect, METH_NOARGS, NULL},
    {"slowest", (PyCFunction)py_slowest, METH_NOARGS, NULL},
    {NULL},
};

static PyGetSetDef ring_attributes[] = {
    {"published", (getter)get_published, NULL, NULL, NULL},
    {NULL},
};

static PyType_Slot ring_slots[] = {
    {Py_tp_new, ring_new},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, ring_methods},
    {Py_tp_getset, ring_attributes},
    {Py_tp_doc, "One process's end of the ring of commands."},
    {0, NULL},
};

static PyType_Spec ring_spec = {
    .name = "spmd_disco.native._native.Ring",
    .basicsize = sizeof(RingObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = ring_slots,
};

PyTypeObject *Ring_Type;

/* Replies -------------------------------------------------------------------------------------- */

static BoxHeader *
box_of(const Node *node, uint32_t worker)
{
    return (BoxHeader *)(node->base + node->boxes_offset +
                         worker * (sizeof(BoxHeader) + node->box_size));
}

/* Copy between a box's memory from position `at` and memory of our own. */
static void
box_put(BoxHeader *box, uint64_t box_size, uint64_t at, const uint8_t *from, uint64_t size)
{
    uint8_t *data = (uint8_t *)(box + 1);
    uint64_t place = at % box_size, first = box_size - place < size ? box_size - place : size;
    memcpy(data + place, from, first);
    memcpy(data, from + first, size - first);
}

static void
box_take(const BoxHeader *box, uint64_t box_size, uint64_t at, uint8_t *to, uint64_t size)
{
    const uint8_t *data = (const uint8_t *)(box + 1);
    uint64_t place = at % box_size, first = box_size - place < size ? box_size - place : size;
    memcpy(to, data + place, first);
    memcpy(to + first, data, size - first);
}

static int
boxes_damaged(void)
{
    PyErr_SetString(PyExc_OSError, "a box of replies is damaged: something has written into the "
                    "memory that the processes of this session share");
    return -1;
}

/* Put as much of the first pending reply into the box as there is room for; how much that was. */
static uint64_t
put_some(RepliesObject *self, BoxHeader *box, uint64_t room)
{
    PyObject *message = PyList_GET_ITEM(self->pending, 0);
    uint64_t size = (uint64_t)PyBytes_GET_SIZE(message), put = 0;
    if (self->sent < sizeof size) {
        uint64_t rest = sizeof size - self->sent;
        put = rest < room ? rest : room;
        box_put(box, self->node->box_size, self->head, (uint8_t *)&size + self->sent, put);
        self->sent += put;
    }
    if (self->sent >= sizeof size) {
        uint64_t from = self->sent - sizeof size;
        uint64_t part = size - from < room - put ? size - from : room - put;
        box_put(box, self->node->box_size, self->head + put,
                (uint8_t *)PyBytes_AS_STRING(message) + from, part);
        self->sent += part;
        put += part;
    }
    return put;
}

int
replies_pump(RepliesObject *self)
{
    if (PyList_GET_SIZE(self->pending) == 0)
        return 0;
    BoxHeader *box = box_of(self->node, self->node->me);
    bool told = false, put = false;
    int result = 0;
    while (PyList_GET_SIZE(self->pending) > 0) {
        uint64_t tail = atomic_load_explicit(&box->tail, memory_order_acquire);
        uint64_t used = self->head - tail;
        if (used > self->node->box_size)
            return boxes_damaged();
        if (used == self->node->box_size) {
            if (told) {
                result = 1;
                break;
            }
            /* The controller moves the tail, then looks whether somebody is blocked. */
            atomic_store(&box->blocked, 1);
            told = true;
            continue;
        }
        self->head += put_some(self, box, self->node->box_size - used);
        atomic_store_explicit(&box->head, self->head, memory_order_release);
        put = true;
        uint64_t size = (uint64_t)PyBytes_GET_SIZE(PyList_GET_ITEM(self->pending, 0));
        if (self->sent == sizeof size + size) {
            self->sent = 0;
            if (PySequence_DelItem(self->pending, 0) < 0)
                return -1;
        }
    }
    if (put)
        node_ring_bell(self->node, 0);
    return result;
}

int
replies_send(RepliesObject *self, PyObject *message)
{
    if (PyList_Append(self->pending, message) < 0)
        return -1;
    return replies_pump(self);
}

/* Take what is here of the replies in one box. */
static int
poll_box(RepliesObject *self, uint32_t worker, PyObject *queue)
{
    BoxHeader *box = box_of(self->node, worker);
    Incoming *in = &self->incoming[worker];
    uint64_t head = atomic_load_explicit(&box->head, memory_order_acquire);
    if (head == in->tail)
        return 0;
    if (head - in->tail > self->node->box_size)
        return boxes_damaged();
    while (true) {
        uint64_t here = head - in->tail, part;
        if (in->message == NULL) {
            part = sizeof in->length - in->length_size;
            part = part < here ? part : here;
            box_take(box, self->node->box_size, in->tail, in->length + in->length_size, part);
            in->length_size += (uint32_t)part;
            in->tail += part;
            if (in->length_size < sizeof in->length)
                break;
            memcpy(&in->size, in->length, sizeof in->size);
            if (in->size > LARGEST_REPLY)
                return boxes_damaged();
            in->have = 0;
            in->message = new_message(in->size, &in->data);
            if (in->message == NULL)
                return -1;
            here = head - in->tail;
        }
        part = in->size - in->have < here ? in->size - in->have : here;
        box_take(box, self->node->box_size, in->tail, in->data + in->have, part);
        in->have += part;
        in->tail += part;
        if (in->have < in->size)
            break;
        PyObject *pair = Py_BuildValue("(IO)", worker, in->message);
        PyObject *done = pair == NULL ? NULL : PyObject_CallMethod(queue, "append", "(O)", pair);
        Py_XDECREF(pair);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
        Py_CLEAR(in->message);
        in->length_size = 0;
        if (in->tail == head)
            break;
    }
    return 1;
}

int
replies_poll(RepliesObject *self, PyObject *queue)
{
    for (uint32_t i = 1; i < self->node->workers; i++) {
        BoxHeader *box = box_of(self->node, i);
        int result = poll_box(self, i, queue);
        if (result == 0)
            continue;
        atomic_store(&box->tail, self->incoming[i].tail);
        if (atomic_load(&box->blocked) && atomic_exchange(&box->blocked, 0))
            node_ring_bell(self->node, i);
        if (result < 0)
            return -1;
    }
    return 0;
}

static void
replies_dealloc(RepliesObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (self->incoming != NULL)
        for (uint32_t i = 0; i < self->node->workers; i++)
            Py_XDECREF(self->incoming[i].message);
    PyMem_Free(self->incoming);
    Py_XDECREF(self->pending);
    Py_XDECREF(self->owner);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
replies_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"node", NULL};
    PyObject *node;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Replies", names, Node_Type, &node))
        return NULL;
    RepliesObject *self = (RepliesObject *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(node);
    self->owner = node;
    self->node = &((NodeObject *)node)->node;
    self->pending = PyList_New(0);
    if (self->node->me == 0)
        self->incoming = PyMem_Calloc(self->node->workers, sizeof *self->incoming);
    if (self->pending == NULL || (self->node->me == 0 && self->incoming == NULL)) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyObject *
py_send(RepliesObject *self, PyObject *message)
{
    if (!PyBytes_Check(message) || self->node->me == 0) {
        PyErr_SetString(PyExc_TypeError, "a worker other than worker 0 sends bytes");
        return NULL;
    }
    int result = replies_send(self, message);
    return result < 0 ? NULL : PyBool_FromLong(result);
}

static PyObject *
py_pump(RepliesObject *self, PyObject *unused)
{
    int result = replies_pump(self);
    return result < 0 ? NULL : PyBool_FromLong(result);
}

static PyObject *
py_poll(RepliesObject *self, PyObject *queue)
{
    if (self->node->me != 0) {
        PyErr_SetString(PyExc_ValueError, "only the controller takes replies");
        return NULL;
    }
    if (replies_poll(self, queue) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef replies_methods[] = {
    {"send", (PyCFunction)py_send, METH_O, NULL},
    {"pump", (PyCFunction)py_pump, METH_NOARGS, NULL},
    {"poll", (PyCFunction)py_poll, METH_O, NULL},
    {NULL},
};

static PyType_Slot replies_slots[] = {
    {Py_tp_new, replies_new},
    {Py_tp_dealloc, replies_dealloc},
    {Py_tp_methods, replies_methods},
    {Py_tp_doc, "The boxes of replies, or a worker's own."},
    {0, NULL},
};

static PyType_Spec replies_spec = {
    .name = "spmd_disco.native._native.Replies",
    .basicsize = sizeof(RepliesObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = replies_slots,
};

PyTypeObject *Replies_Type;

int
add_ring(PyObject *module)
{
    Ring_Type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &ring_spec, NULL);
    if (Ring_Type == NULL || PyModule_AddType(module, Ring_Type) < 0)
        return -1;
    Replies_Type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &replies_spec, NULL);
    if (Replies_Type == NULL)
        return -1;
    return PyModule_AddType(module, Replies_Type);
}
