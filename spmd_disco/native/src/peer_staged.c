/* Large collectives through the staging areas, in pieces.
 *
 * A piece is written around the writer's cache, in which it would only be looked for by others, and
 * read by them soon after, while the next one is written. */
#include "peer_moves.h"

#include <string.h>

#include "copy.h"
#include "reduce.h"

/* The bytes of a piece: with fewer bytes, smaller ones, so that members work at the same time. */
static size_t
piece_size(size_t bytes, size_t most)
{
    size_t piece = (bytes / 4 + LINE - 1) / LINE * LINE;
    if (piece < most / 4)
        piece = most / 4;
    return (piece < most ? piece : most) / LINE * LINE;
}

static inline uint8_t *
stage(struct move *move, int member, uint64_t step)
{
    return move->c->peers[member].staging + (move->base + step) % CELLS_STAGES * CELLS_PIECE;
}

static inline uint8_t *
result_stage(struct move *move, int member, uint64_t step)
{
    return stage(move, member, step) + CELLS_STAGES * CELLS_PIECE;
}

static void
staged_allreduce(struct move *move)
{
    struct cells_members *c = move->c;
    struct cells_under_way *op = move->op;
    struct cells_member *me = move_mine(move);
    int size = c->size, rank = c->rank;
    size_t itemsize = op->bytes / op->count;
    size_t piece = piece_size(op->bytes, CELLS_PIECE) / itemsize;
    uint64_t steps = (op->count + piece - 1) / piece;
    const void *ins[size];
    for (uint64_t i = 0; i < steps + 2; i++) {
        if (i < steps) {
            /* Put the others' parts of this piece where they can read them. */
            size_t at = i * piece, count = move_smaller(piece, op->count - at);
            if (move->base + i + 1 > CELLS_STAGES)
                MOVE_REACH_ALL(move, reduced, move->base + i + 1 - CELLS_STAGES);
            uint8_t *to = stage(move, rank, i);
            const uint8_t *from = op->send + at * itemsize;
            size_t begin = move_part_begin(count, itemsize, rank, size) * itemsize;
            size_t end = move_part_begin(count, itemsize, rank + 1, size) * itemsize;
            disco_copy(to, from, begin, 1);
            disco_copy(to + end, from + end, count * itemsize - end, 1);
            move_tell(&me->put, move->base + i + 1);
        }
        if (i >= 1 && i - 1 < steps) {
            uint64_t step = i - 1;
            size_t at = step * piece, count = move_smaller(piece, op->count - at);
            size_t begin = move_part_begin(count, itemsize, rank, size);
            size_t end = move_part_begin(count, itemsize, rank + 1, size);
            MOVE_REACH_ALL(move, put, move->base + step + 1);
            if (move->base + step + 1 > CELLS_STAGES)
                MOVE_REACH_ALL(move, taken, move->base + step + 1 - CELLS_STAGES);
            for (int m = 0; m < size; m++)
                ins[m] = m == rank ? op->send + (at + begin) * itemsize
                                   : stage(move, m, step) + begin * itemsize;
            void *outs[2] = {op->recv + (at + begin) * itemsize,
                             result_stage(move, rank, step) + begin * itemsize};
            if (!move->dead)
                disco_reduce(op->dtype, op->kind, outs, 2, ins, size, end - begin, 0);
            move_tell(&me->reduced, move->base + step + 1);
        }
        if (i >= 2) {
            uint64_t step = i - 2;
            size_t at = step * piece, count = move_smaller(piece, op->count - at);
            for (int d = 1; d < size; d++) {
                int m = (rank + d) % size;
                move_reach(move, m, &c->peers[m].told->reduced, move->base + step + 1);
                size_t begin = move_part_begin(count, itemsize, m, size) * itemsize;
                size_t end = move_part_begin(count, itemsize, m + 1, size) * itemsize;
                disco_copy(op->recv + at * itemsize + begin, result_stage(move, m, step) + begin,
                           end - begin, move->stream);
            }
            move_tell(&me->taken, move->base + step + 1);
        }
    }
    move_tell_all(move, steps);
}

/* The others: some members put their stream of pieces, some take those of others. */
static void
staged_copy(struct move *move)
{
    struct cells_members *c = move->c;
    struct cells_under_way *op = move->op;
    struct cells_member *me = move_mine(move);
    int size = c->size, rank = c->rank;
    bool first = rank == 0;
    bool puts, takes;
    switch (op->operation) {
    case CELLS_GATHER:
        puts = !first;
        takes = first;
        break;
    case CELLS_BROADCAST:
    case CELLS_SCATTER:
        puts = first;
        takes = !first;
        break;
    default:
        puts = takes = true;
    }
    /* A scatter's piece has something for each of the others. */
    size_t shares = op->operation == CELLS_SCATTER ? size - 1 : 1;
    size_t most = CELLS_PIECE / shares / LINE * LINE;
    size_t piece = most == 0 ? 1 : piece_size(op->bytes, most);
    uint64_t steps = (op->bytes + piece - 1) / piece;
    if (!puts)
        move_tell(&me->put, move->base + steps);
    if (!takes) {
        move_tell(&me->reduced, move->base + steps);
        move_tell(&me->taken, move->base + steps);
    }
    size_t own = op->operation == CELLS_ALLGATHER || op->operation == CELLS_GATHER ? rank : 0;
    for (uint64_t i = 0; i < steps + 1; i++) {
        if (i < steps) {
            size_t at = i * piece, bytes = move_smaller(piece, op->bytes - at);
            if (puts) {
                if (move->base + i + 1 > CELLS_STAGES)
                    MOVE_REACH_ALL(move, taken, move->base + i + 1 - CELLS_STAGES);
                uint8_t *to = stage(move, rank, i);
                if (op->operation == CELLS_SCATTER)
                    for (int m = 1; m < size; m++)
                        disco_copy(to + (m - 1) * piece, op->send + m * op->bytes + at, bytes, 1);
                else
                    disco_copy(to, op->send + at, bytes, 1);
                move_tell(&me->put, move->base + i + 1);
            }
            /* This member's own share. */
            if (op->recv != NULL && op->send != NULL && op->recv + own * op->bytes != op->send)
                disco_copy(op->recv + own * op->bytes + at, op->send + at, bytes,
                           move->stream);
        }
        if (i >= 1 && takes) {
            uint64_t step = i - 1;
            size_t at = step * piece, bytes = move_smaller(piece, op->bytes - at);
            for (int d = 1; d < size; d++) {
                int m = (rank + d) % size;
                if (m != 0
                    && (op->operation == CELLS_BROADCAST || op->operation == CELLS_SCATTER))
                    continue;
                move_reach(move, m, &c->peers[m].told->put, move->base + step + 1);
                const uint8_t *from = stage(move, m, step);
                uint8_t *to = op->recv + at;
                if (op->operation == CELLS_SCATTER)
                    from += (rank - 1) * piece;
                else if (op->operation != CELLS_BROADCAST)
                    to += m * op->bytes;
                disco_copy(to, from, bytes, move->stream);
            }
            move_tell(&me->reduced, move->base + step + 1);
            move_tell(&me->taken, move->base + step + 1);
        }
    }
    move_tell_all(move, steps);
}

void
move_staged(struct move *move)
{
    if (move->op->operation == CELLS_ALLREDUCE)
        staged_allreduce(move);
    else
        staged_copy(move);
}
