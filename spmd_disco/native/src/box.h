/* A reply box: a stream of bytes from one worker to the controller; see box.c. No Python in it. */
#ifndef SPMD_DISCO_BOX_H
#define SPMD_DISCO_BOX_H

#include "node.h"

typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint64_t head;
    /* The worker has more to say and no room. */
    _Atomic uint32_t blocked;
    _Alignas(CACHE_LINE) _Atomic uint64_t tail;
} BoxHeader;

/* One side's view of a box. */
typedef struct {
    BoxHeader *header;
    uint8_t *data;
    uint64_t size;
    /* What this side has written, or read, since ever. */
    uint64_t at;
} Box;

/* Look at the box of `worker`, in which nothing has been written yet. */
void box_open(Box *box, const Node *node, uint32_t worker);

/* On the worker: write as many of `size` bytes as there is room for; how many, or -1 where the box
 * is damaged. */
int64_t box_write(Box *box, const void *from, uint64_t size);
/* Ask to be rung when there is room. False where there is some now. */
bool box_block(Box *box);

/* On the controller: how many bytes there are to read, or -1 where the box is damaged. */
int64_t box_available(const Box *box);
/* Read bytes that are available. */
void box_read(Box *box, void *to, uint64_t size);
/* Let the worker write over what has been read, and ring its bell if it waits for that. */
void box_release(Box *box, Node *node, uint32_t worker);

#endif
