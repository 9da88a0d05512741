/* What the parts of a node's data plane share: cells.h, peer_mail.h. */
#ifndef SPMD_DISCO_CELLS_SHARED_H
#define SPMD_DISCO_CELLS_SHARED_H

/* What one worker writes and others poll is kept two cache lines apart, since processors fetch
 * lines in pairs. */
#define CELLS_APART 128

/* The bytes of a signature (arrival.py). */
#define CELLS_SIGNATURE 120

#endif
