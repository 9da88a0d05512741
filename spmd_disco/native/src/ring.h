/* The ring of commands, from the controller to all workers of a node, and their replies.
 *
 * ring.c has the ring itself, without Python. ring_side.c adds messages that are too large for it,
 * and is what other parts use: with the GIL held, and none of it waits. Functions that return an
 * int return -1 with a Python exception set where something is wrong. */
#ifndef SPMD_DISCO_RING_H
#define SPMD_DISCO_RING_H

#include <sys/uio.h>

#include "box.h"
#include "node.h"
#include "segment.h"

/* A message that lies in the ring, the rest of the ring before its end, a message that lies in a
 * side block. */
enum { RECORD_PLAIN = 1, RECORD_SKIP = 2, RECORD_SIDE = 3 };

typedef struct {
    uint32_t size; /* of what follows the head, before padding */
    uint32_t kind;
    uint64_t number;
} RecordHead;

/* What a record with a side block holds instead of its message. */
typedef struct {
    int32_t pid;
    int32_t fd;
    uint8_t nonce[NONCE_SIZE];
    uint64_t size;
    /* Which of the blocks it is; readers keep their mapping of the first SIDE_KEPT. */
    uint64_t slot;
} SideRecord;

/* The blocks that are used again and again, of SIDE_KEPT_SIZE bytes at most, and the others. */
#define SIDE_KEPT 4
#define SIDE_KEPT_SIZE (16 * 1024 * 1024)
#define SIDE_BLOCKS 8
/* Bytes of messages in side blocks that some reader has not read; a larger message goes alone. */
#define SIDE_WINDOW (64 * 1024 * 1024)

typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t head;
    /* Readers whose tail comes to here ring the controller's bell, as it waits for room; or 0. */
    _Alignas(CACHE_LINE) _Atomic uint64_t wanted;
} RingHeader;

typedef struct {
    SegmentObject *segment; /* or NULL */
    uint64_t used;          /* bytes of its message, or 0 where all have read it */
    uint64_t until;         /* readers with this tail have read it */
} SideBlock;

typedef struct {
    Node *node;
    RingHeader *header;
    uint8_t *data;
    uint64_t size;
    /* On the controller. */
    uint64_t head;
    uint64_t slowest; /* a tail that no reader is behind */
    uint64_t published;
    SideBlock side[SIDE_BLOCKS];
    uint64_t side_used;
    bool named_blocks; /* as the segment of the node has a name */
    /* On a worker. */
    uint64_t tail;
    uint64_t next;                    /* the tail after what was looked at */
    SegmentObject *mapped[SIDE_KEPT]; /* the blocks that are kept */
    SegmentObject *transient;         /* the block of what was looked at, if it is not kept */
    bool broken;
} Ring;

typedef struct {
    PyObject_HEAD
    Ring ring;
    PyObject *node;
} RingObject;

extern PyTypeObject *Ring_Type;

/* Without Python (ring.c) ---------------------------------------------------------------------- */

/* Look at the ring of a node, in which nothing has been written yet. */
void ring_open(Ring *ring, Node *node);

/* On the controller. Whether a record of `size` bytes fits, as far as the tails are known. */
bool ring_fits(const Ring *ring, uint64_t size);
/* See how far the readers are. */
void ring_look_at_tails(Ring *ring);
/* Have the readers ring when there is room for a record of `size` bytes and some more, or when all
 * have come to `until`, if that is sooner and not 0. Look at the tails after that. */
void ring_want_room(Ring *ring, uint64_t size, uint64_t until);
/* Publish a record, which fits, and ring the workers' bells. */
void ring_write(Ring *ring, uint32_t kind, uint64_t number, const struct iovec *parts, int count);

/* On a worker. Look at the next record: 1, 0 where there is none, or -1 where the ring is damaged.
 * It may be a plain one or one with a side block. */
int ring_read(Ring *ring, RecordHead *record, const uint8_t **data);
/* Pass the record that was looked at. */
void ring_pass(Ring *ring);
/* Poll with yields until there is a record, for `ns` at most; say whether there is. */
bool ring_spin(const Ring *ring, int64_t ns);

/* With Python (ring_side.c) -------------------------------------------------------------------- */

/* On the controller: whether a message of `size` bytes can be pushed now. */
bool ring_has_room(Ring *ring, uint64_t size);
/* Push the message of command `number`, given in parts, and ring the workers' bells: 1, or 0 where
 * there is no room. `ring->published` is `number` afterwards, in the same call. */
int ring_try_push(Ring *ring, uint64_t number, const struct iovec *parts, int count);
/* The last command that was pushed. */
static inline uint64_t
ring_published(const Ring *ring)
{
    return ring->published;
}

/* Free the memory of large messages that all workers have read. */
void ring_collect(Ring *ring);
/* Give back all memory of large messages. */
void ring_close(Ring *ring);

/* On a worker: look at the next message: 1, or 0 where there is none. It lies in the ring, or in
 * its side block, and only until ring_advance; copy or decode it before. Nothing is taken: peeking
 * twice gives the same. */
int ring_peek(Ring *ring, const uint8_t **data, size_t *size, uint64_t *number);
/* Give the memory of the message that was peeked at back to the controller. */
void ring_advance(Ring *ring);

/* Return new memory of `size` bytes as a writable memoryview, aligned to 64 where it is large, and
 * where its bytes are in `data`. */
PyObject *new_message(size_t size, uint8_t **data);
/* memcpy; other threads may run while much is copied. */
void copy_message(uint8_t *to, const uint8_t *from, size_t size);

/* Replies (replies.c) -------------------------------------------------------------------------- */

/* A reply that is on its way to the controller. */
typedef struct {
    Box box;
    uint8_t length[8];
    uint32_t length_size; /* how much of `length` is here */
    PyObject *message;    /* where the reply goes, and its memory; NULL before that is known */
    uint8_t *data;
    uint64_t size, have;
} Incoming;

typedef struct {
    PyObject_HEAD
    PyObject *owner; /* the node's object */
    Node *node;
    /* On a worker: replies that have not gone wholly, and how much of the first one has. */
    Box box;
    PyObject *pending;
    uint64_t sent;
    /* On the controller, for each worker. */
    Incoming *incoming;
} RepliesObject;

extern PyTypeObject *Replies_Type;

/* On a worker: send a reply, a bytes object; what has no room goes with the next replies_pump. Both
 * return 1 while something is left, or 0. */
int replies_send(RepliesObject *self, PyObject *message);
int replies_pump(RepliesObject *self);
/* On the controller: whether there is something in a worker's box. Needs no GIL. */
bool replies_waiting(const RepliesObject *self, uint32_t worker);
/* On the controller: append (worker, memoryview) to the deque `queue` for each reply that is here
 * wholly. Workers that wait for room are told of it. */
int replies_poll(RepliesObject *self, PyObject *queue);

#endif
