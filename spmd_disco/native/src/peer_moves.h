/* What the ways to do a large operation have in common; see peer_moves.c. */
#ifndef SPMD_DISCO_PEER_MOVES_H
#define SPMD_DISCO_PEER_MOVES_H

#include "cells.h"

/* Parts that members work on side by side are cut at cache lines. */
#define LINE 64

/* The move under way. */
struct move {
    CellsObject *self;
    struct cells_members *c;
    struct cells_under_way *op;
    uint64_t base;
    /* Whether what is written goes around the caches, as the arrays are more than these hold. */
    bool stream;
    bool dead;
};

static inline uint64_t
move_smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Where part `m` of `count` elements begins, at a cache line of the array. */
static inline size_t
move_part_begin(size_t count, size_t itemsize, int m, int size)
{
    if (m == size)
        return count;
    size_t lines = (count * itemsize + LINE - 1) / LINE;
    size_t begin = lines * m / size * LINE / itemsize;
    return begin < count ? begin : count;
}

/* Wait until a member's counter has come to `target`; false where its process has ended. */
bool move_reach(struct move *move, int member, const _Atomic uint64_t *counter, uint64_t target);

#define MOVE_REACH_ALL(move, field, target) \
    for (int reach_m = 0; reach_m < (move)->c->size; reach_m++) \
        if (reach_m != (move)->c->rank) \
    move_reach(move, reach_m, &(move)->c->peers[reach_m].told->field, target)

static inline struct cells_member *
move_mine(struct move *move)
{
    return move->c->peers[move->c->rank].told;
}

static inline void
move_tell(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, value, memory_order_release);
}

/* End a move of so many steps: this member is done with all of them. */
void move_tell_all(struct move *move, uint64_t steps);

/* Through the staging areas, which always can be (peer_staged.c). */
void move_staged(struct move *move);

#endif
