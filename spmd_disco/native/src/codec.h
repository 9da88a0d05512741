/* The compact encoding of arguments; see codec.c. */
#ifndef SPMD_DISCO_CODEC_H
#define SPMD_DISCO_CODEC_H

#include "native.h"

/* Bytes that grow. What fits into `small` needs no allocation. */
typedef struct {
    uint8_t *data;
    size_t size, capacity;
    uint8_t small[1024];
} Buffer;

static inline void
buffer_init(Buffer *buffer)
{
    buffer->data = buffer->small;
    buffer->size = 0;
    buffer->capacity = sizeof buffer->small;
}

void buffer_free(Buffer *buffer);
/* Makes room for `size` more bytes and returns where they start, or NULL with MemoryError set. */
uint8_t *buffer_extend(Buffer *buffer, size_t size);

/* Encodes one value: 1, or 0 if it is not in the compact set (and nothing is set), or -1 with an
 * exception set. A handle stands for its register. */
int encode_compact(Buffer *buffer, PyObject *value);

/* A cursor over encoded values. */
typedef struct {
    const uint8_t *data;
    size_t size, at;
} Reader;

/* Gives the value of a register, a new reference, or NULL with an exception set. */
typedef PyObject *(*Lookup)(void *context, uint64_t id);

/* Decodes one value. NULL with no exception set: the value is of a kind that Python decodes. */
PyObject *decode_compact(Reader *reader, Lookup lookup, void *context);

#endif
