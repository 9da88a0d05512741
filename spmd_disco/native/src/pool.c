/* Memory for arrays that the peers on the node can reach: one sparse segment per worker.
 *
 * The whole of it is mapped from the start, here and by the peers, and none of it is backed by
 * memory: its owner has the system back it piece by piece, by posix_fallocate, before a block there
 * is handed out. So a lack of memory is an error where memory is asked for, and never a SIGBUS
 * where it is touched, and growth needs nothing from the peers.
 *
 * The memory is cut into spans of pages. A span is free (backed or not), or one large block, or a
 * run of small blocks of one size. Free spans next to each other and alike are merged. All of this
 * bookkeeping is in private memory, where no peer can spoil it.
 *
 * Allocation takes a lock. A free takes none, and may come from any thread: it pushes the block on
 * its run's list of freed blocks, and the span on the pool's list of spans to look at, where the
 * run's list was empty. The next allocation takes the lists over. Each span is in the pool's list
 * once at most, and it stays alive while it is there, since a block that is freed but not taken
 * over counts as in use. */
#include "pool.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shared.h"

/* What is taken from the system at once, where the cap allows: one call costs some microseconds. */
#define GROWTH ((size_t)2 << 20)
/* A signal makes the system undo and give up a posix_fallocate, so that it comes in pieces. */
#define FALLOCATE_PIECE ((size_t)16 << 20)
#define RUN_BYTES ((size_t)64 << 10)

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define SMALL_CLASSES 28
/* Free spans by size: one list for each number of pages below 64, eight for each doubling above. */
#define EXACT_BINS 64
#define BINS (EXACT_BINS + 8 * 40)
/* How many spans of a list are looked through for the one that fits best. */
#define BEST_OF 32

enum SpanState { BACKED, UNBACKED, LARGE, RUN };

struct Span {
    size_t start, pages;
    enum SpanState state;
    /* Neighbours in the list of free spans of a size, or of runs of a class with free blocks. */
    struct Span *previous, *next;
    struct Span *next_freed; /* in the pool's list of spans to look at */
    /* Only in runs. Blocks go by their number in the run plus one; 0 ends a list. */
    unsigned class, live;
    uint16_t free;
    atomic_uint_least32_t freed;
    uint16_t links[];
};

struct Limit {
    struct Limit *next;
    size_t limit;
    char *usage, *statistics;
};

struct Pool {
    uint8_t *base;
    size_t size, cap, page;
    int fd;
    bool named;
    unsigned forks;
    pthread_mutex_t lock;
    bool closed;
    atomic_bool free_at_once;
    size_t reserved; /* what has been backed, under the lock */
    atomic_size_t used, reserved_now, peak;
    _Atomic(struct Span *) freed;
    struct Span **spans; /* by page; of spans that are no runs, the first and the last page only */
    struct Span *unbacked;
    struct Span *runs[SMALL_CLASSES];
    struct Span *bins[BINS];
    uint64_t filled[(BINS + 63) / 64];
    struct Limit *limits;
};

/* How often this process has come out of a fork() as the child. */
static unsigned forks;

static void
count_fork(void)
{
    forks++;
}

static pthread_once_t fork_hook = PTHREAD_ONCE_INIT;

static void
install_fork_hook(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

unsigned
pool_forks(void)
{
    pthread_once(&fork_hook, install_fork_hook);
    return forks;
}

/* Sizes ------------------------------------------------------------------------------------- */

/* Multiples of 64 up to 512, then four sizes for each doubling up to 16 KiB. */
static unsigned
class_of(size_t bytes)
{
    size_t units = bytes ? (bytes + 63) / 64 : 1;
    if (units <= 8)
        return (unsigned)units - 1;
    unsigned power = 63 - (unsigned)__builtin_clzll(units - 1); /* 3: above 512 */
    return 8 + 4 * (power - 3) + (unsigned)(((units - 1) >> (power - 2)) & 3);
}

static size_t
class_bytes(unsigned class)
{
    if (class < 8)
        return 64 * (class + 1);
    unsigned power = (class - 8) / 4 + 3, quarter = (class - 8) % 4;
    return ((size_t)(5 + quarter) << (power - 2)) * 64;
}

static unsigned
bin_of(size_t pages)
{
    if (pages < EXACT_BINS)
        return (unsigned)pages;
    unsigned power = 63 - (unsigned)__builtin_clzll(pages);
    return EXACT_BINS + 8 * (power - 6) + (unsigned)((pages >> (power - 3)) & 7);
}

/* Free spans -------------------------------------------------------------------------------- */

static void
list_push(struct Span **head, struct Span *span)
{
    span->previous = NULL;
    span->next = *head;
    if (*head != NULL)
        (*head)->previous = span;
    *head = span;
}

static void
list_remove(struct Span **head, struct Span *span)
{
    if (span->previous != NULL)
        span->previous->next = span->next;
    else
        *head = span->next;
    if (span->next != NULL)
        span->next->previous = span->previous;
}

static void
mark(struct Pool *pool, struct Span *span)
{
    pool->spans[span->start] = span;
    pool->spans[span->start + span->pages - 1] = span;
}

static void
insert_free(struct Pool *pool, struct Span *span)
{
    mark(pool, span);
    if (span->state == UNBACKED) {
        list_push(&pool->unbacked, span);
        return;
    }
    unsigned bin = bin_of(span->pages);
    list_push(&pool->bins[bin], span);
    pool->filled[bin / 64] |= (uint64_t)1 << bin % 64;
}

static void
remove_free(struct Pool *pool, struct Span *span)
{
    if (span->state == UNBACKED) {
        list_remove(&pool->unbacked, span);
        return;
    }
    unsigned bin = bin_of(span->pages);
    list_remove(&pool->bins[bin], span);
    if (pool->bins[bin] == NULL)
        pool->filled[bin / 64] &= ~((uint64_t)1 << bin % 64);
}

/* The span before or behind one, if it is in `state`. */
static struct Span *
neighbour(struct Pool *pool, const struct Span *span, bool behind, enum SpanState state)
{
    struct Span *other = pool->spans[behind ? span->start + span->pages : span->start - 1];
    return other != NULL && other->state == state ? other : NULL;
}

/* Add a span that is in no list to the free ones, merged with its neighbours. */
static void
give(struct Pool *pool, struct Span *span)
{
    struct Span *other;
    if ((other = neighbour(pool, span, false, span->state)) != NULL) {
        remove_free(pool, other);
        span->start = other->start;
        span->pages += other->pages;
        free(other);
    }
    if ((other = neighbour(pool, span, true, span->state)) != NULL) {
        remove_free(pool, other);
        span->pages += other->pages;
        free(other);
    }
    insert_free(pool, span);
}

/* Return the smallest backed free span found of at least so many pages, or NULL. */
static struct Span *
find_backed(struct Pool *pool, size_t pages)
{
    unsigned bin = bin_of(pages);
    struct Span *best = NULL;
    int looks = 0;
    for (struct Span *s = pool->bins[bin]; s != NULL && (best == NULL || looks < BEST_OF);
         s = s->next, looks++)
        if (s->pages >= pages && (best == NULL || s->pages < best->pages))
            best = s;
    if (best != NULL)
        return best;
    unsigned shift = (bin + 1) % 64;
    for (unsigned i = (bin + 1) / 64; i < (BINS + 63) / 64; i++, shift = 0) {
        uint64_t filled = pool->filled[i] >> shift << shift;
        if (filled)
            return pool->bins[i * 64 + (unsigned)__builtin_ctzll(filled)];
    }
    return NULL;
}

/* Memory from the system, and back ---------------------------------------------------------- */

static size_t
number_in(const char *path, const char *key, size_t unless)
{
    char text[8192];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return unless;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return unless;
    text[length] = '\0';
    const char *at = text;
    if (key != NULL) {
        at = strstr(text, key);
        if (at == NULL)
            return unless;
        at += strlen(key);
    }
    char *end;
    unsigned long long number = strtoull(at, &end, 10);
    return end == at ? unless : number;
}

/* Whether the system, and each control group, still has so many bytes. Where it has not, asking for
 * them would not fail, but have the kernel end a process of its choice. */
static bool
has_room(const struct Pool *pool, size_t bytes)
{
    size_t available = number_in("/proc/meminfo", "MemAvailable:", SIZE_MAX / 1024);
    if (bytes / 1024 > available)
        return false;
    for (const struct Limit *l = pool->limits; l != NULL; l = l->next) {
        size_t usage = number_in(l->usage, NULL, 0);
        if (usage <= l->limit && bytes <= l->limit - usage)
            continue;
        /* File pages that are not in use count as used, and go when memory is wanted. */
        size_t idle = number_in(l->statistics, "total_inactive_file ", SIZE_MAX);
        if (idle == SIZE_MAX)
            idle = number_in(l->statistics, "inactive_file ", 0);
        usage -= idle < usage ? idle : usage;
        if (usage > l->limit || bytes > l->limit - usage)
            return false;
    }
    return true;
}

static void
punch(struct Pool *pool, size_t start, size_t pages)
{
    fallocate(pool->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(start * pool->page),
              (off_t)(pages * pool->page));
}

/* Back pages that are not; return 0 or an errno, and then none of them is backed. */
static int
back(struct Pool *pool, size_t start, size_t pages)
{
    size_t bytes = pages * pool->page, done = 0;
    if (!has_room(pool, bytes))
        return ENOMEM;
    while (done < bytes) {
        size_t piece = bytes - done < FALLOCATE_PIECE ? bytes - done : FALLOCATE_PIECE;
        int error = posix_fallocate(pool->fd, (off_t)(start * pool->page + done), (off_t)piece);
        if (error == EINTR)
            continue;
        if (error) {
            punch(pool, start, pages);
            return error;
        }
        /* Mapped in one go it costs a good deal less than by a fault for each page later. Kernels
         * before 5.14 refuse, and then it comes to that. */
        madvise(pool->base + start * pool->page + done, piece, MADV_POPULATE_WRITE);
        done += piece;
    }
    pool->reserved += bytes;
    atomic_store_explicit(&pool->reserved_now, pool->reserved, memory_order_relaxed);
    return 0;
}

static size_t
release_all(struct Pool *pool)
{
    size_t released = 0;
    for (unsigned bin = 0; bin < BINS; bin++) {
        struct Span *span;
        while ((span = pool->bins[bin]) != NULL) {
            remove_free(pool, span);
            punch(pool, span->start, span->pages);
            released += span->pages * pool->page;
            span->state = UNBACKED;
            give(pool, span);
        }
    }
    pool->reserved -= released;
    atomic_store_explicit(&pool->reserved_now, pool->reserved, memory_order_relaxed);
    return released;
}

/* Have a backed free span of at least so many pages, by backing what is missing at the place where
 * that is least. */
static enum PoolResult
grow(struct Pool *pool, size_t pages)
{
    struct Span *best = NULL;
    size_t least = SIZE_MAX;
    for (struct Span *s = pool->unbacked; s != NULL; s = s->next) {
        const struct Span *before = neighbour(pool, s, false, BACKED);
        const struct Span *behind = neighbour(pool, s, true, BACKED);
        size_t beside = before != NULL ? before->pages : 0;
        size_t missing = pages - beside; /* no backed span has as many pages */
        if (missing > s->pages) {
            if (behind == NULL || missing > s->pages + behind->pages)
                continue;
            missing = s->pages;
        }
        if (missing < least) {
            least = missing;
            best = s;
        }
    }
    if (best == NULL || pool->reserved + least * pool->page > pool->cap)
        return POOL_FULL;
    size_t more = GROWTH / pool->page;
    size_t allowed = (pool->cap - pool->reserved) / pool->page;
    more = more < allowed ? more : allowed;
    more = more < best->pages ? more : best->pages;
    more = more > least ? more : least;

    struct Span *rest = NULL;
    if (more < best->pages && (rest = calloc(1, sizeof *rest)) == NULL)
        return POOL_NO_MEMORY;
    int error = back(pool, best->start, more);
    if (error && more > least)
        error = back(pool, best->start, more = least);
    if (error) {
        free(rest);
        return POOL_NO_MEMORY;
    }
    remove_free(pool, best);
    if (rest != NULL) {
        rest->state = UNBACKED;
        rest->start = best->start + more;
        rest->pages = best->pages - more;
        best->pages = more;
        insert_free(pool, rest);
    }
    best->state = BACKED;
    give(pool, best);
    return POOL_OK;
}

static void drop_empty_runs(struct Pool *pool);

/* Take a span of just so many pages out of the free ones. */
static enum PoolResult
take(struct Pool *pool, size_t pages, bool at_once, struct Span **taken)
{
    struct Span *span = find_backed(pool, pages);
    if (span == NULL) {
        if (at_once)
            return POOL_BUSY;
        enum PoolResult result = grow(pool, pages);
        if (result == POOL_FULL || result == POOL_NO_MEMORY) {
            /* What is free elsewhere, in pieces that are too small, can be had here. */
            drop_empty_runs(pool);
            if (release_all(pool))
                result = grow(pool, pages);
        }
        if (result != POOL_OK)
            return result;
        span = find_backed(pool, pages);
        if (span == NULL)
            return POOL_FULL;
    }
    if (span->pages > pages) {
        struct Span *rest = calloc(1, sizeof *rest);
        if (rest == NULL)
            return POOL_NO_MEMORY;
        remove_free(pool, span);
        rest->state = BACKED;
        rest->start = span->start + pages;
        rest->pages = span->pages - pages;
        span->pages = pages;
        insert_free(pool, rest);
    }
    else
        remove_free(pool, span);
    *taken = span;
    return POOL_OK;
}

/* Runs of small blocks ---------------------------------------------------------------------- */

static enum PoolResult
new_run(struct Pool *pool, unsigned class, bool at_once)
{
    size_t pages = RUN_BYTES / pool->page;
    pages = pages ? pages : 1;
    unsigned blocks = (unsigned)(pages * pool->page / class_bytes(class));
    if (blocks > UINT16_MAX - 1)
        blocks = UINT16_MAX - 1;
    struct Span *run = calloc(1, sizeof *run + blocks * sizeof *run->links), *span;
    if (run == NULL)
        return POOL_NO_MEMORY;
    enum PoolResult result = take(pool, pages, at_once, &span);
    if (result != POOL_OK) {
        free(run);
        return result;
    }
    run->start = span->start;
    run->pages = pages;
    run->state = RUN;
    run->class = class;
    free(span);
    for (unsigned i = 0; i < blocks; i++)
        run->links[i] = i + 1 < blocks ? (uint16_t)(i + 2) : 0;
    run->free = 1;
    for (size_t i = 0; i < pages; i++)
        pool->spans[run->start + i] = run;
    list_push(&pool->runs[class], run);
    return POOL_OK;
}

static void
drop_run(struct Pool *pool, struct Span *run)
{
    list_remove(&pool->runs[run->class], run);
    run->state = BACKED;
    give(pool, run);
}

static void
drop_empty_runs(struct Pool *pool)
{
    for (unsigned class = 0; class < SMALL_CLASSES; class++)
        for (struct Span *run = pool->runs[class], *next; run != NULL; run = next) {
            next = run->next;
            if (run->live == 0)
                drop_run(pool, run);
        }
}

/* Take over what has been freed. */
static void
drain(struct Pool *pool)
{
    struct Span *span = atomic_exchange_explicit(&pool->freed, NULL, memory_order_acquire), *next;
    for (; span != NULL; span = next) {
        /* Read first: once the run's list has been taken, another free may put the run in the
         * pool's list again. */
        next = span->next_freed;
        if (span->state == LARGE) {
            span->state = BACKED;
            give(pool, span);
            continue;
        }
        unsigned block = atomic_exchange_explicit(&span->freed, 0, memory_order_acq_rel);
        bool was_full = span->free == 0;
        while (block) {
            unsigned following = span->links[block - 1];
            span->links[block - 1] = span->free;
            span->free = (uint16_t)block;
            span->live--;
            block = following;
        }
        if (was_full)
            list_push(&pool->runs[span->class], span);
        /* One that is empty stays while it is the last of its class with free blocks: else a block
         * allocated and freed by turns would make and drop a run each time. */
        if (span->live == 0 && (span->previous != NULL || span->next != NULL))
            drop_run(pool, span);
    }
}

/* Blocks ------------------------------------------------------------------------------------ */

static void
count(struct Pool *pool, size_t bytes)
{
    size_t used = atomic_fetch_add_explicit(&pool->used, bytes, memory_order_relaxed) + bytes;
    if (used > atomic_load_explicit(&pool->peak, memory_order_relaxed))
        atomic_store_explicit(&pool->peak, used, memory_order_relaxed);
}

static enum PoolResult
alloc_locked(struct Pool *pool, size_t bytes, bool at_once, size_t *offset)
{
    if (pool->closed)
        return POOL_CLOSED;
    if (atomic_load_explicit(&pool->freed, memory_order_relaxed) != NULL)
        drain(pool);
    struct Span *span;
    if (bytes <= POOL_SMALL_MAX) {
        unsigned class = class_of(bytes);
        if (pool->runs[class] == NULL) {
            enum PoolResult result = new_run(pool, class, at_once);
            if (result != POOL_OK)
                return result;
        }
        span = pool->runs[class];
        unsigned block = span->free;
        span->free = span->links[block - 1];
        span->live++;
        if (span->free == 0)
            list_remove(&pool->runs[class], span);
        *offset = span->start * pool->page + (block - 1) * class_bytes(class);
        count(pool, class_bytes(class));
        return POOL_OK;
    }
    if (bytes > pool->cap)
        return POOL_FULL;
    size_t pages = (bytes + pool->page - 1) / pool->page;
    enum PoolResult result = take(pool, pages, at_once, &span);
    if (result != POOL_OK)
        return result;
    span->state = LARGE;
    mark(pool, span);
    *offset = span->start * pool->page;
    count(pool, pages * pool->page);
    return POOL_OK;
}

enum PoolResult
pool_alloc(struct Pool *pool, size_t bytes, size_t *offset)
{
    if (pool->forks != forks)
        return POOL_FORKED;
    pthread_mutex_lock(&pool->lock);
    enum PoolResult result = alloc_locked(pool, bytes, false, offset);
    pthread_mutex_unlock(&pool->lock);
    return result;
}

enum PoolResult
pool_alloc_at_once(struct Pool *pool, size_t bytes, size_t *offset)
{
    if (pool->forks != forks)
        return POOL_FORKED;
    if (pthread_mutex_trylock(&pool->lock))
        return POOL_BUSY;
    enum PoolResult result = alloc_locked(pool, bytes, true, offset);
    pthread_mutex_unlock(&pool->lock);
    return result;
}

static void
look_at(struct Pool *pool, struct Span *span)
{
    struct Span *head = atomic_load_explicit(&pool->freed, memory_order_relaxed);
    do
        span->next_freed = head;
    while (!atomic_compare_exchange_weak_explicit(&pool->freed, &head, span, memory_order_release,
                                                  memory_order_relaxed));
}

void
pool_free(struct Pool *pool, size_t offset)
{
    if (pool->forks != forks)
        return;
    struct Span *span = pool->spans[offset / pool->page];
    size_t bytes;
    if (span->state == LARGE) {
        bytes = span->pages * pool->page;
        look_at(pool, span);
    }
    else {
        bytes = class_bytes(span->class);
        size_t number = (offset - span->start * pool->page) / bytes;
        uint_least32_t head = atomic_load_explicit(&span->freed, memory_order_relaxed);
        do
            span->links[number] = (uint16_t)head;
        while (!atomic_compare_exchange_weak_explicit(&span->freed, &head,
                                                      (uint_least32_t)number + 1,
                                                      memory_order_acq_rel, memory_order_relaxed));
        if (head == 0)
            look_at(pool, span);
    }
    atomic_fetch_sub_explicit(&pool->used, bytes, memory_order_relaxed);
    if (atomic_load_explicit(&pool->free_at_once, memory_order_acquire))
        pool_trim(pool);
}

size_t
pool_trim(struct Pool *pool)
{
    if (pool->forks != forks)
        return 0;
    pthread_mutex_lock(&pool->lock);
    drain(pool);
    drop_empty_runs(pool);
    size_t released = release_all(pool);
    pthread_mutex_unlock(&pool->lock);
    return released;
}

void
pool_close(struct Pool *pool)
{
    if (pool->forks != forks)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->closed = true;
    pthread_mutex_unlock(&pool->lock);
    atomic_store_explicit(&pool->free_at_once, true, memory_order_release);
    pool_trim(pool);
}

/* The pool ---------------------------------------------------------------------------------- */

struct Pool *
pool_create(size_t cap, bool named)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (cap > SIZE_MAX / 8) {
        errno = EINVAL;
        return NULL;
    }
    cap = (cap + page - 1) / page * page;
    struct Pool *pool = calloc(1, sizeof *pool);
    struct Span *all = calloc(1, sizeof *all);
    if (pool == NULL || all == NULL) {
        free(pool);
        free(all);
        return NULL;
    }
    /* The first page has the nonce. Twice the cap: what is free in pieces that are too small can
     * then go back to the system, and be had in one piece elsewhere. */
    size_t pages = 1 + 2 * (cap / page);
    pool->size = pages * page;
    pool->cap = cap;
    pool->page = page;
    pool->forks = pool_forks();
    pool->named = named;
    pthread_mutex_init(&pool->lock, NULL);
    /* One entry more than pages, so that the last span has nothing behind it. */
    void *spans = MAP_FAILED, *base = MAP_FAILED;
    uint8_t nonce[NONCE_SIZE];
    pool->fd = shared_make(pool->size, nonce, &pool->named);
    if (pool->fd >= 0)
        base = mmap(NULL, pool->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, pool->fd,
                    0);
    if (base != MAP_FAILED)
        spans = mmap(NULL, (pages + 1) * sizeof *pool->spans, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int error = 0;
    if (spans == MAP_FAILED)
        error = errno;
    else
        error = posix_fallocate(pool->fd, 0, (off_t)page);
    if (error) {
        if (spans != MAP_FAILED)
            munmap(spans, (pages + 1) * sizeof *pool->spans);
        if (base != MAP_FAILED)
            munmap(base, pool->size);
        if (pool->fd >= 0) {
            shared_unlink(nonce);
            close(pool->fd);
        }
        pthread_mutex_destroy(&pool->lock);
        free(all);
        free(pool);
        errno = error;
        return NULL;
    }
    pool->base = base;
    pool->spans = spans;
    memcpy(base, nonce, sizeof nonce);
    all->state = UNBACKED;
    all->start = 1;
    all->pages = pages - 1;
    if (all->pages)
        insert_free(pool, all);
    else
        free(all);
    return pool;
}

void
pool_unlink(struct Pool *pool)
{
    if (pool->named)
        shared_unlink(pool->base);
}

void
pool_destroy(struct Pool *pool)
{
    pool_unlink(pool);
    size_t pages = pool->size / pool->page;
    /* In a forked child another thread of the parent may have been in the middle of a change; the
     * child keeps the few bytes. */
    if (pool->forks == forks) {
        drain(pool);
        drop_empty_runs(pool);
        for (size_t page = 1; page < pages;) {
            struct Span *span = pool->spans[page];
            page = span->start + span->pages;
            free(span);
        }
        struct Limit *next;
        for (struct Limit *l = pool->limits; l != NULL; l = next) {
            next = l->next;
            free(l->usage);
            free(l->statistics);
            free(l);
        }
        pthread_mutex_destroy(&pool->lock);
    }
    munmap(pool->spans, (pages + 1) * sizeof *pool->spans);
    munmap(pool->base, pool->size);
    close(pool->fd);
    free(pool);
}

int
pool_add_limit(struct Pool *pool, const char *usage, const char *statistics, size_t limit)
{
    struct Limit *l = calloc(1, sizeof *l);
    if (l == NULL)
        return -1;
    l->limit = limit;
    l->usage = strdup(usage);
    l->statistics = strdup(statistics);
    if (l->usage == NULL || l->statistics == NULL) {
        free(l->usage);
        free(l->statistics);
        free(l);
        return -1;
    }
    l->next = pool->limits;
    pool->limits = l;
    return 0;
}

uint8_t *
pool_base(const struct Pool *pool)
{
    return pool->base;
}

size_t
pool_size(const struct Pool *pool)
{
    return pool->size;
}

bool
pool_is_named(const struct Pool *pool)
{
    return pool->named;
}

int
pool_fd(const struct Pool *pool)
{
    return pool->fd;
}

size_t
pool_cap(const struct Pool *pool)
{
    return pool->cap;
}

size_t
pool_used(const struct Pool *pool)
{
    return atomic_load_explicit(&pool->used, memory_order_relaxed);
}

size_t
pool_reserved(const struct Pool *pool)
{
    return atomic_load_explicit(&pool->reserved_now, memory_order_relaxed);
}

size_t
pool_peak(const struct Pool *pool)
{
    return atomic_load_explicit(&pool->peak, memory_order_relaxed);
}
