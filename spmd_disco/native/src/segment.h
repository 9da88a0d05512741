/* Memory that processes of one node share; see segment.c. */
#ifndef SPMD_DISCO_SEGMENT_H
#define SPMD_DISCO_SEGMENT_H

#include "native.h"

/* The first bytes of every segment: the nonce, and the rest of a page line that nobody uses. */
#define NONCE_SIZE 16
#define SEGMENT_HEADER 64

typedef struct {
    PyObject_HEAD
    uint8_t *base;
    Py_ssize_t size;
    int fd;
} SegmentObject;

extern PyTypeObject *Segment_Type;

#endif
