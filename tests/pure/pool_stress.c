/* Threads that allocate, fill, hand over and free blocks of one pool, under a sanitizer. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#define THREADS 4
#define STEPS 4000
#define PLACES 64

/* Blocks on their way from one thread to another: the offset, which is never 0. */
static _Atomic size_t places[PLACES];
static struct Pool *pool;

static void
give_back(size_t offset)
{
    uint8_t *at = pool_base(pool) + offset;
    size_t bytes;
    memcpy(&bytes, at, sizeof bytes);
    for (size_t i = sizeof bytes; i < bytes; i++)
        if (at[i] != (uint8_t)bytes) {
            fprintf(stderr, "a block of %zu bytes at %zu was overwritten\n", bytes, offset);
            exit(1);
        }
    pool_free(pool, offset);
}

static void *
work(void *seed)
{
    unsigned state = (unsigned)(uintptr_t)seed;
    for (int i = 0; i < STEPS; i++) {
        size_t bytes = sizeof bytes + ((size_t)1 << rand_r(&state) % 17) - 1, offset;
        bytes += (size_t)rand_r(&state) % 8;
        enum PoolResult result = i % 2 ? pool_alloc(pool, bytes, &offset)
                                       : pool_alloc_at_once(pool, bytes, &offset);
        if (result == POOL_BUSY)
            continue;
        if (result != POOL_OK) {
            fprintf(stderr, "no %zu bytes: %d, %zu in use\n", bytes, result, pool_used(pool));
            exit(1);
        }
        uint8_t *at = pool_base(pool) + offset;
        memset(at, (uint8_t)bytes, bytes);
        memcpy(at, &bytes, sizeof bytes);
        size_t other = atomic_exchange(&places[rand_r(&state) % PLACES], offset);
        if (other)
            give_back(other);
        if (i % 500 == 499)
            pool_trim(pool);
    }
    return NULL;
}

int
main(void)
{
    pthread_t threads[THREADS];
    pool = pool_create((size_t)64 << 20, false);
    if (pool == NULL) {
        perror("pool_create");
        return 1;
    }
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, work, (void *)(i + 1));
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < PLACES; i++)
        if (places[i])
            give_back(places[i]);
    pool_close(pool);
    if (pool_used(pool) || pool_reserved(pool)) {
        fprintf(stderr, "%zu bytes in use, %zu reserved\n", pool_used(pool), pool_reserved(pool));
        return 1;
    }
    pool_destroy(pool);
    return 0;
}
