/* Memory for arrays that the peers on the node can reach; see pool.c.
 *
 * Everything down to the Python types needs no GIL and may be called from any thread. */
#ifndef SPMD_DISCO_POOL_H
#define SPMD_DISCO_POOL_H

#include "native.h"

/* Every block starts at a multiple of this; blocks above POOL_SMALL_MAX at one of the page size. */
#define POOL_ALIGNMENT 64
#define POOL_SMALL_MAX 16384

struct Pool;

enum PoolResult {
    POOL_OK,
    POOL_FULL,        /* the cap does not allow it */
    POOL_NO_MEMORY,   /* the system has no more, or the control group may have no more */
    POOL_CLOSED,
    POOL_FORKED,      /* this is a forked child of the process that the pool belongs to */
    POOL_BUSY,        /* only from pool_alloc_at_once: it would have to wait, or to grow */
};

/* Return a new pool, or NULL with errno set. `named`: see shared.h. */
struct Pool *pool_create(size_t cap, bool named);
/* Take its name away, if it has one, as all peers have it mapped. */
void pool_unlink(struct Pool *pool);
/* Unmap it. No block may be in use any more. */
void pool_destroy(struct Pool *pool);

/* Set *offset to that of a new block of `bytes` (0 gives a block, too). */
enum PoolResult pool_alloc(struct Pool *pool, size_t bytes, size_t *offset);
/* The same, for callers that hold the GIL: POOL_BUSY instead of anything that takes long. */
enum PoolResult pool_alloc_at_once(struct Pool *pool, size_t bytes, size_t *offset);
/* Free a block, by a lock-free push that the next allocation drains. In a forked child: nothing. */
void pool_free(struct Pool *pool, size_t offset);

/* Give the pages of free memory back to the system; return how many bytes. */
size_t pool_trim(struct Pool *pool);
/* From now on nothing is allocated, and what becomes free goes back to the system at once. */
void pool_close(struct Pool *pool);

uint8_t *pool_base(const struct Pool *pool);
/* The bytes that are mapped, a good deal more than the cap. */
size_t pool_size(const struct Pool *pool);
int pool_fd(const struct Pool *pool);
bool pool_is_named(const struct Pool *pool);
size_t pool_cap(const struct Pool *pool);
/* Bytes in blocks, bytes that the system has given, and the most that were ever in blocks. */
size_t pool_used(const struct Pool *pool);
size_t pool_reserved(const struct Pool *pool);
size_t pool_peak(const struct Pool *pool);

/* How often this process has come out of a fork() as the child: what another number was noted with
 * has been inherited. */
unsigned pool_forks(void);

/* Have growth also look at a limit of a control group: usage and statistics are read from the
 * files. Return 0, or -1 for lack of memory. */
int pool_add_limit(struct Pool *pool, const char *usage, const char *statistics, size_t limit);

/* The Python types; to be used with the GIL, apart from the fields and where it says otherwise. */

typedef struct {
    PyObject_HEAD
    struct Pool *pool;
} PoolObject;

typedef struct {
    PyObject_HEAD
    PoolObject *owner;
    size_t offset;
    Py_ssize_t nbytes;
} PoolBlockObject;

/* The pool of a peer, mapped whole, so that its growth needs nothing here. */
typedef struct {
    PyObject_HEAD
    uint8_t *base;
    size_t size;
} PeerMapObject;

/* The pools that this process can reach, by member; base is NULL where there is none. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t count;
    Py_ssize_t own; /* the member whose pool is this process's own, or -1 */
    struct PoolRange {
        uint8_t *base;
        size_t size;
        PyObject *owner;
    } *ranges;
} PoolTableObject;

/* A block that a member lends to others; see pool_loan.c. */
typedef struct {
    PyObject_HEAD
    PoolTableObject *table;
    uint8_t *data;
    Py_ssize_t nbytes;
    atomic_uchar *state;
    unsigned forks;
} PoolLoanObject;

extern PyTypeObject *Pool_Type, *PoolBlock_Type, *PeerMap_Type, *PoolTable_Type, *PoolLoan_Type;
extern PyType_Spec pool_loan_spec;

/* Set the exception for what pool_alloc returned. */
void pool_raise(struct Pool *pool, size_t bytes, enum PoolResult result);
/* Return a new block object of pool_alloc's memory, or NULL with an exception. */
PyObject *pool_new_block(PoolObject *owner, size_t bytes);

/* Where in the table's pools `nbytes` at `address` lie: the member, or -1. Needs no GIL. */
static inline Py_ssize_t
pool_find(const PoolTableObject *table, const void *address, size_t nbytes, size_t *offset)
{
    /* The own pool first: that is where most arrays are. */
    for (Py_ssize_t i = table->own < 0 ? 0 : -1; i < table->count; i++) {
        Py_ssize_t member = i < 0 ? table->own : i;
        const struct PoolRange *range = &table->ranges[member];
        size_t at = (uintptr_t)address - (uintptr_t)range->base;
        if (range->base != NULL && at <= range->size && nbytes <= range->size - at) {
            *offset = at;
            return member;
        }
    }
    return -1;
}

/* The address here of `nbytes` at `offset` of a member's pool, or NULL where that is not all in
 * what is mapped. Needs no GIL. */
static inline uint8_t *
pool_address(const PoolTableObject *table, Py_ssize_t member, size_t offset, size_t nbytes)
{
    if (member < 0 || member >= table->count)
        return NULL;
    const struct PoolRange *range = &table->ranges[member];
    if (range->base == NULL || offset > range->size || nbytes > range->size - offset)
        return NULL;
    return range->base + offset;
}

#endif
