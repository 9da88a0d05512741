/* Copies of memory around the caches; see copy.c. */
#ifndef SPMD_DISCO_COPY_H
#define SPMD_DISCO_COPY_H

#include <stddef.h>

/* Copy `bytes` from `src` to `dst`, which do not overlap.
 *
 * With `stream`, and where it is enough for that to pay, what is written goes around this
 * processor's caches, and is fenced at the end: right for more than they hold, and for what other
 * processors will read. */
void disco_copy(void *dst, const void *src, size_t bytes, int stream);

#endif
