/* Element-wise reductions of arrays; see reduce.c. */
#ifndef SPMD_DISCO_REDUCE_H
#define SPMD_DISCO_REDUCE_H

#include <stddef.h>

/* The dtypes that can be reduced, by NumPy's (and ml_dtypes') names and in the order of their
 * codes, and the bytes of an element. */
#define DISCO_DTYPES(X) \
    X(float64, 8) \
    X(float32, 4) \
    X(float16, 2) \
    X(bfloat16, 2) \
    X(int8, 1) \
    X(int16, 2) \
    X(int32, 4) \
    X(int64, 8) \
    X(uint8, 1) \
    X(uint16, 2) \
    X(uint32, 4) \
    X(uint64, 8) \
    X(complex64, 8) \
    X(complex128, 16) \
    X(bool, 1)

enum disco_dtype {
#define X(name, size) DISCO_##name,
    DISCO_DTYPES(X)
#undef X
    DISCO_DTYPE_COUNT
};

/* The values of transport/ccl.py's ReduceKind. */
enum disco_kind { DISCO_SUM, DISCO_PROD, DISCO_MIN, DISCO_MAX, DISCO_AVG, DISCO_KIND_COUNT };

/* The bytes of an element, or 0 where `dtype` is none of the codes. */
size_t disco_dtype_size(int dtype);

/* Whether disco_reduce can do it. */
int disco_can_reduce(int dtype, int kind);

/* Combine `count` elements at each of `ins`, in the order given, into all of `outs`.
 *
 * The same elements give the same bits at every place and in every process of a machine (but where
 * several are NaN, which of them is open). Each of `outs` is the very memory of one of `ins`, or
 * overlaps with nothing. Nothing need be aligned. `stream` writes around this processor's caches,
 * and fences that at the end: right for more than they hold, and for what other processors will
 * read.
 *
 * Returns 0, or -1 where the dtype has no such reduction or there are no inputs. */
int disco_reduce(int dtype, int kind, void *const *outs, int n_out, const void *const *ins,
                 int n_in, size_t count, int stream);

/* The levels of the processor's instructions that can be chosen, the best one last, and the same as
 * above at one of them: for tests. */
extern const char *const disco_levels[];
int disco_level_count(void);
int disco_reduce_at(int level, int dtype, int kind, void *const *outs, int n_out,
                    const void *const *ins, int n_in, size_t count, int stream);

#endif
