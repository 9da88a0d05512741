/* Messages between two workers of one node; see peer_mail.c. Not for two threads at a time. */
#ifndef SPMD_DISCO_PEER_MAIL_H
#define SPMD_DISCO_PEER_MAIL_H

#include <sys/types.h>

#include "cells_shared.h"
#include "native.h"
#include "node.h"
#include "pool.h"

enum {
    /* Bytes of a ring: a power of two, so that all of them together stay in the budget. */
    MAIL_BUDGET = 16 << 20,
    MAIL_LEAST = 2048,
    MAIL_MOST = 65536,
    /* From so many bytes on it pays to write around the caches. */
    DIRECT_STREAM = 262144,
};

/* Where the data of a message is. */
enum { MAIL_IN_RING, MAIL_IN_POOL, MAIL_IN_PROCESS };

struct mail_header {
    int64_t command;
    uint64_t bytes;
    uint64_t place;
    /* In the pool, or the address. */
    uint64_t offset;
    uint8_t signature[CELLS_SIGNATURE];
};

/* Of one ordered pair of workers, in shared memory. */
struct mail_pair {
    /* Written by the sender: bytes put into the ring, and messages sent. */
    _Atomic uint64_t head __attribute__((aligned(CELLS_APART)));
    _Atomic uint64_t sent;
    /* Written by the receiver: bytes taken out of the ring, and messages it is done with. */
    _Atomic uint64_t tail __attribute__((aligned(CELLS_APART)));
    _Atomic uint64_t done;
    uint8_t ring[] __attribute__((aligned(CELLS_APART)));
};

/* A message, or what is left of it, that waits for room. */
struct mail_letter {
    struct mail_letter *next;
    size_t size;
    size_t at;
    uint8_t data[];
};

/* What a message lies in until its receiver is done with it: other memory, or some of the pool. */
struct mail_lent {
    struct mail_lent *next;
    uint64_t number;
    uint8_t *memory;
    size_t offset;
};

struct mail_out {
    struct mail_pair *pair;
    uint64_t head;
    uint64_t sent;
    struct mail_letter *first, *last;
    struct mail_lent *lent, *last_lent;
};

struct mail_in {
    struct mail_pair *pair;
    uint64_t tail;
    /* How many headers have been seen. */
    uint64_t opened;
    /* The message that is being read, how much of it has been, and whether that is for nothing. */
    bool open;
    bool is_void;
    uint64_t read;
    struct mail_header header;
};

struct mail {
    int num_workers;
    size_t ring_bytes;
    struct mail_out *out;
    struct mail_in *in;
    /* Messages that wait for room, to all receivers together. */
    size_t queued;
    /* And those whose receivers have not read them where they lie in this worker's memory. */
    size_t lent;
    /* This worker's own, or NULL. */
    struct Pool *pool;
};

/* The bytes that the rings of all pairs need. */
size_t mail_bytes(int num_workers);
/* Fill in one worker's side of the zeroed or older memory at `base`; 0, or -1 with an exception. */
int mail_make(struct mail *mail, uint8_t *base, int worker, int num_workers);
void mail_free(struct mail *mail);

/* Send; 0, or -1 for a lack of memory. `is_read`: the receiver can read this process's memory. */
int mail_send(struct mail *mail, int receiver, int64_t command, const uint8_t *signature,
              const uint8_t *data, size_t bytes, bool is_read);
/* Move on what waits for room, and take back what has been read. */
void mail_pump(struct mail *mail, NodeObject *node);

void mail_forget(struct mail *mail, int receiver);

/* Read memory of another process; false where that cannot be. */
bool peer_read_memory(pid_t process, uint64_t address, void *to, size_t bytes);

/* The oldest message of a sender, or NULL where none is there yet. */
const struct mail_header *mail_look(struct mail *mail, int sender);
/* Whether more messages have been sent than were looked at. */
bool mail_is_coming(const struct mail *mail, int sender);
/* Read on in the message that was looked at: 1 where that was all, 0 where more is to come, -1
 * where the sender's process has ended. NULL throws it away. */
int mail_read(struct mail *mail, int sender, uint8_t *to, const PoolTableObject *pools,
              pid_t process);
/* Throw the message that was looked at away, as soon as it can be. */
void mail_drop(struct mail *mail, int sender);

#endif
