/* Messages between two workers of one node.
 *
 * Each ordered pair of workers has a ring of bytes in the block: a header, then the data of the
 * message. A send never waits. What the ring has no room for goes through the sender's memory pool
 * or other memory of its own (the header says where), or into a queue that is moved on whenever it
 * waits.
 *
 * How many messages have been sent, those in the queue included, is told before the sender leaves
 * the command. So a receiver can tell whether one is still to come. */
#include "peer_mail.h"

#include <string.h>

#include "copy.h"

/* Larger messages go through the pool even where the ring has room. */
#define DIRECT 8192

/* Rings --------------------------------------------------------------------------------------- */

size_t
mail_ring_bytes(int num_workers)
{
    size_t bytes = MAIL_BUDGET / num_workers / num_workers, size = MAIL_LEAST;
    while (2 * size <= bytes && size < MAIL_MOST)
        size *= 2;
    return size;
}

size_t
mail_bytes(int num_workers)
{
    return (size_t)num_workers * num_workers
           * (sizeof(struct mail_pair) + mail_ring_bytes(num_workers));
}

int
mail_make(struct mail *mail, uint8_t *base, int worker, int num_workers)
{
    mail->num_workers = num_workers;
    mail->ring_bytes = mail_ring_bytes(num_workers);
    mail->out = PyMem_Calloc(num_workers, sizeof *mail->out);
    mail->in = PyMem_Calloc(num_workers, sizeof *mail->in);
    if (mail->out == NULL || mail->in == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    size_t stride = sizeof(struct mail_pair) + mail->ring_bytes;
    for (size_t w = 0; w < (size_t)num_workers; w++) {
        mail->out[w].pair = (struct mail_pair *)(base + (worker * num_workers + w) * stride);
        mail->in[w].pair = (struct mail_pair *)(base + (w * num_workers + worker) * stride);
    }
    return 0;
}

static void
copy_in(struct mail *mail, struct mail_pair *pair, uint64_t at, const void *from, size_t bytes)
{
    size_t start = at & (mail->ring_bytes - 1), first = mail->ring_bytes - start;
    if (first > bytes)
        first = bytes;
    memcpy(pair->ring + start, from, first);
    memcpy(pair->ring, (const uint8_t *)from + first, bytes - first);
}

static void
copy_out(struct mail *mail, struct mail_pair *pair, uint64_t at, void *to, size_t bytes)
{
    size_t start = at & (mail->ring_bytes - 1), first = mail->ring_bytes - start;
    if (first > bytes)
        first = bytes;
    memcpy(to, pair->ring + start, first);
    memcpy((uint8_t *)to + first, pair->ring, bytes - first);
}

/* Sending ------------------------------------------------------------------------------------- */

static size_t
room(struct mail *mail, struct mail_out *out)
{
    uint64_t used = out->head - atomic_load_explicit(&out->pair->tail, memory_order_acquire);
    return used < mail->ring_bytes ? mail->ring_bytes - used : 0;
}

static void
publish(struct mail_out *out)
{
    atomic_store_explicit(&out->pair->head, out->head, memory_order_release);
}

/* Put as much of the queue into the ring as there is room for. */
static bool
push_queue(struct mail *mail, struct mail_out *out)
{
    bool moved = false;
    while (out->first != NULL) {
        struct mail_letter *letter = out->first;
        size_t bytes = letter->size - letter->at, free = room(mail, out);
        if (bytes > free)
            bytes = free;
        if (bytes == 0)
            break;
        copy_in(mail, out->pair, out->head, letter->data + letter->at, bytes);
        out->head += bytes;
        letter->at += bytes;
        moved = true;
        if (letter->at < letter->size)
            break;
        out->first = letter->next;
        if (out->first == NULL)
            out->last = NULL;
        PyMem_RawFree(letter);
        mail->queued--;
    }
    if (moved)
        publish(out);
    return moved;
}

static void
give_back(struct mail *mail, struct mail_lent *lent)
{
    if (lent->memory == NULL && mail->pool != NULL)
        pool_free(mail->pool, lent->offset);
    PyMem_RawFree(lent->memory);
    PyMem_RawFree(lent);
    mail->lent--;
}

/* Copy a message to where its receiver can read it: into the pool, or, where the receiver reads
 * this process's memory, anywhere. NULL where neither can be. */
static struct mail_lent *
lend(struct mail *mail, struct mail_out *out, bool is_read, const uint8_t *data, size_t bytes)
{
    struct mail_lent *lent = PyMem_RawCalloc(1, sizeof *lent);
    if (lent == NULL)
        return NULL;
    lent->number = out->sent + 1;
    uint8_t *to = NULL;
    if (mail->pool != NULL && pool_alloc(mail->pool, bytes, &lent->offset) == POOL_OK)
        to = pool_base(mail->pool) + lent->offset;
    else if (is_read)
        to = lent->memory = PyMem_RawMalloc(bytes);
    if (to == NULL) {
        PyMem_RawFree(lent);
        return NULL;
    }
    mail->lent++;
    disco_copy(to, data, bytes, bytes >= DIRECT_STREAM);
    return lent;
}

static void
take_back(struct mail *mail, struct mail_out *out)
{
    if (out->lent == NULL)
        return;
    uint64_t done = atomic_load_explicit(&out->pair->done, memory_order_acquire);
    while (out->lent != NULL && (int64_t)(done - out->lent->number) >= 0) {
        struct mail_lent *lent = out->lent;
        out->lent = lent->next;
        if (out->lent == NULL)
            out->last_lent = NULL;
        give_back(mail, lent);
    }
}

/* Throw away what a receiver that reads no more has not read. */
void
mail_forget(struct mail *mail, int receiver)
{
    struct mail_out *out = &mail->out[receiver];
    while (out->first != NULL) {
        struct mail_letter *letter = out->first;
        out->first = letter->next;
        PyMem_RawFree(letter);
        mail->queued--;
    }
    out->last = NULL;
    while (out->lent != NULL) {
        struct mail_lent *lent = out->lent;
        out->lent = lent->next;
        give_back(mail, lent);
    }
    out->last_lent = NULL;
}

void
mail_pump(struct mail *mail, NodeObject *node)
{
    for (int w = 0; w < mail->num_workers; w++) {
        struct mail_out *out = &mail->out[w];
        take_back(mail, out);
        if (out->first != NULL && push_queue(mail, out) && node != NULL)
            node_ring_bell(&node->node, w);
    }
}

int
mail_send(struct mail *mail, int receiver, int64_t command, const uint8_t *signature,
          const uint8_t *data, size_t bytes, bool is_read)
{
    struct mail_out *out = &mail->out[receiver];
    struct mail_header header = {.command = command, .bytes = bytes};
    memcpy(header.signature, signature, CELLS_SIGNATURE);
    take_back(mail, out);
    push_queue(mail, out);
    size_t inside = bytes;
    struct mail_lent *lent = bytes > DIRECT ? lend(mail, out, is_read, data, bytes) : NULL;
    if (lent != NULL) {
        header.place = lent->memory == NULL ? MAIL_IN_POOL : MAIL_IN_PROCESS;
        header.offset = lent->memory == NULL ? lent->offset : (uintptr_t)lent->memory;
        inside = 0;
    }
    size_t free = out->first == NULL ? room(mail, out) : 0;
    if (free >= sizeof header + inside) {
        copy_in(mail, out->pair, out->head, &header, sizeof header);
        copy_in(mail, out->pair, out->head + sizeof header, data, inside);
        out->head += sizeof header + inside;
    } else {
        struct mail_letter *letter = PyMem_RawMalloc(sizeof *letter + sizeof header + inside);
        if (letter == NULL) {
            if (lent != NULL)
                give_back(mail, lent);
            return -1;
        }
        letter->next = NULL;
        letter->at = 0;
        letter->size = sizeof header + inside;
        memcpy(letter->data, &header, sizeof header);
        memcpy(letter->data + sizeof header, data, inside);
        if (out->last == NULL)
            out->first = letter;
        else
            out->last->next = letter;
        out->last = letter;
        mail->queued++;
    }
    if (lent != NULL) {
        if (out->last_lent == NULL)
            out->lent = lent;
        else
            out->last_lent->next = lent;
        out->last_lent = lent;
    }
    atomic_store_explicit(&out->pair->sent, ++out->sent, memory_order_release);
    push_queue(mail, out);
    publish(out);
    return 0;
}

/* Receiving ----------------------------------------------------------------------------------- */

static size_t
available(struct mail *mail, struct mail_in *in)
{
    uint64_t bytes = atomic_load_explicit(&in->pair->head, memory_order_acquire) - in->tail;
    return bytes <= mail->ring_bytes ? bytes : 0;
}

static void
advance(struct mail_in *in, size_t bytes)
{
    in->tail += bytes;
    atomic_store_explicit(&in->pair->tail, in->tail, memory_order_release);
}

int
mail_read(struct mail *mail, int sender, uint8_t *to, const PoolTableObject *pools, pid_t process)
{
    struct mail_in *in = &mail->in[sender];
    size_t left = in->header.bytes - in->read;
    int result = 1;
    if (in->header.place == MAIL_IN_PROCESS) {
        if (to != NULL && !peer_read_memory(process, in->header.offset, to, left))
            result = -1;
        left = 0;
    } else if (in->header.place == MAIL_IN_POOL) {
        const uint8_t *from = to == NULL || pools == NULL
                                  ? NULL
                                  : pool_address(pools, sender, in->header.offset, left);
        if (from != NULL)
            disco_copy(to, from, left, left >= DIRECT_STREAM);
        left = 0;
    } else {
        size_t bytes = available(mail, in);
        if (bytes > left)
            bytes = left;
        if (to != NULL)
            copy_out(mail, in->pair, in->tail, to + in->read, bytes);
        advance(in, bytes);
        in->read += bytes;
        left -= bytes;
    }
    if (left > 0)
        return 0;
    in->open = in->is_void = false;
    atomic_store_explicit(&in->pair->done, in->opened, memory_order_release);
    return result;
}

void
mail_drop(struct mail *mail, int sender)
{
    mail->in[sender].is_void = mail->in[sender].open;
}

const struct mail_header *
mail_look(struct mail *mail, int sender)
{
    struct mail_in *in = &mail->in[sender];
    /* Somebody has begun to read it and was interrupted. */
    if (in->open && in->read > 0)
        in->is_void = true;
    if (in->is_void && mail_read(mail, sender, NULL, NULL, 0) == 0)
        return NULL;
    if (!in->open) {
        if (available(mail, in) < sizeof in->header)
            return NULL;
        copy_out(mail, in->pair, in->tail, &in->header, sizeof in->header);
        advance(in, sizeof in->header);
        in->read = 0;
        in->opened++;
        in->open = true;
    }
    return &in->header;
}

bool
mail_is_coming(const struct mail *mail, int sender)
{
    const struct mail_in *in = &mail->in[sender];
    return atomic_load_explicit(&in->pair->sent, memory_order_acquire) != in->opened;
}

void
mail_free(struct mail *mail)
{
    /* What is lent of the pool stays so: somebody may still be reading it. It ends with the
     * pool. */
    mail->pool = NULL;
    for (int w = 0; w < mail->num_workers && mail->out != NULL; w++)
        mail_forget(mail, w);
    PyMem_Free(mail->out);
    PyMem_Free(mail->in);
    mail->out = NULL;
    mail->in = NULL;
}
