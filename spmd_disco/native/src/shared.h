/* Memory that other processes can find, as a file descriptor; see shared.c. No Python in it. */
#ifndef SPMD_DISCO_SHARED_H
#define SPMD_DISCO_SHARED_H

#include "native.h"

#include <sys/types.h>

/* The random bytes at the start of it. */
#define NONCE_SIZE 16

/* Make `size` bytes of it, of which none is backed yet; fill in its nonce, and whether it has got a
 * name: where `named` says so, or the system has no memory without one. Returns a descriptor, or -1
 * with errno set. The nonce is to be written to its start before others look for it. */
int shared_make(size_t size, uint8_t *nonce, bool *named);

/* Open what process `pid` has as its descriptor `fd`, or what has a name by that nonce, and set
 * *size. Returns a descriptor, or -1 with errno set: ESTALE where there is something else. */
int shared_find(pid_t pid, int fd, const uint8_t *nonce, size_t *size);

/* Take its name away, if it has one that this process gave it; who has it open or mapped keeps it. */
void shared_unlink(const uint8_t *nonce);

#endif
