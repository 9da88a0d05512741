/* Memory that processes of one node share; see segment.c. */
#ifndef SPMD_DISCO_SEGMENT_H
#define SPMD_DISCO_SEGMENT_H

#include "native.h"
#include "shared.h"

/* The first bytes of every segment: the nonce, and the rest of a page line that nobody uses. */
#define SEGMENT_HEADER 64

typedef struct {
    PyObject_HEAD
    uint8_t *base;
    Py_ssize_t size;
    int fd;
    /* Whether it has been made here, with a name. */
    bool named;
} SegmentObject;

extern PyTypeObject *Segment_Type;

/* Map what another process has made, a `what`, and set its size and its descriptor here; NULL with an
 * exception where it is not to be found. */
uint8_t *segment_map(long pid, int fd, const char *nonce, Py_ssize_t nonce_size, const char *what,
                     int *opened, size_t *size);

#endif
