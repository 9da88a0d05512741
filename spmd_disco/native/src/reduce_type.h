/* The reductions of one dtype at one level of the processor; included by reduce_level.h.
 *
 * Parameters, undefined at the end:
 *   TYPE      the dtype's name
 *   A         the C type that is accumulated in
 *   U         the unsigned integer of the same size
 *   DIVISOR   what A is divided by: A itself, or what C promotes it to
 *   FLOATING  1 where A is a floating-point type, else 0
 *   HALF      1 where the arrays hold a 16-bit float: functions widen_TYPE and narrow_TYPE convert
 *             it to and from A then; else 0
 *
 * Elements at the ends take the same way as the others (through a block of scratch memory), so that
 * the bits of none depend on its place. */

#define VEC LEVEL_NAME(vec, TYPE)
#define BITS LEVEL_NAME(bits, TYPE)
#define STORED LEVEL_NAME(stored, TYPE)

/* As many accumulators as stay in registers beside what they are combined with. */
#define VECTORS 8
#define STORED_BYTES (HALF ? VECTOR_BYTES / 2 : VECTOR_BYTES)
#define STEP_BYTES (VECTORS * STORED_BYTES)

typedef A VEC __attribute__((vector_size(VECTOR_BYTES)));
typedef U BITS __attribute__((vector_size(VECTOR_BYTES)));
/* As it lies in the arrays: at any address, and anything else for those who see it as an array. */
typedef uint8_t STORED __attribute__((vector_size(STORED_BYTES), aligned(1), may_alias));

#if HALF
#define LOAD(p) LEVEL_NAME(widen, TYPE)(p)
#define PACK(v) ((STORED)LEVEL_NAME(narrow, TYPE)(v))
#define STREAM_OUT STREAM_HALF
#else
#define LOAD(p) ((VEC) * (const STORED *)(p))
#define PACK(v) ((STORED)(v))
#define STREAM_OUT STREAM
#endif

/* Return `a` combined with `b`. A NaN wins, as in NumPy's minimum and maximum; of two equal values
 * (zeros of both signs) the later one does. */
static inline __attribute__((always_inline)) TARGET VEC
LEVEL_NAME(combine, TYPE)(const int op, VEC a, VEC b)
{
    if (op == DISCO_SUM || op == DISCO_PROD) {
#if FLOATING
        return op == DISCO_SUM ? a + b : a * b;
#else
        /* They wrap around, which in C only unsigned integers may. */
        return (VEC)(op == DISCO_SUM ? (BITS)a + (BITS)b : (BITS)a * (BITS)b);
#endif
    }
    BITS keep = op == DISCO_MIN ? (BITS)(a < b) : (BITS)(a > b);
#if FLOATING
    keep |= (BITS)(a != a);
#endif
    return (VEC)(((BITS)a & keep) | ((BITS)b & ~keep));
}

#if FLOATING
#define DIVIDE(sum, divisor) \
    UNROLL \
    for (int v = 0; v < VECTORS; v++) \
        (sum)[v] /= divisor;
#else
static TARGET __attribute__((noinline)) void
LEVEL_NAME(divide, TYPE)(A *values, DIVISOR divisor)
{
    for (size_t i = 0; i < VECTORS * VECTOR_BYTES / sizeof(A); i++)
        values[i] = (A)(values[i] / divisor);
}

/* Through a copy, since what has an address does not stay in registers. */
#define DIVIDE(sum, divisor) \
    A values[VECTORS * VECTOR_BYTES / sizeof(A)]; \
    memcpy(values, sum, sizeof values); \
    LEVEL_NAME(divide, TYPE)(values, divisor); \
    memcpy(sum, values, sizeof values);
#endif

/* Reduce the next STEP_BYTES, or fewer, of all inputs and write them to all outputs. */
static inline __attribute__((always_inline)) TARGET void
LEVEL_NAME(step, TYPE)(const int op, const struct arrays *arrays, size_t offset, size_t bytes,
                       DIVISOR divisor, int stream)
{
    uint8_t block[STEP_BYTES];
    VEC sum[VECTORS];
    const uint8_t *in = arrays->ins[0] + offset;
    if (bytes < STEP_BYTES) {
        memset(block, 0, sizeof block);
        in = memcpy(block, in, bytes);
    }
    UNROLL
    for (int v = 0; v < VECTORS; v++)
        sum[v] = LOAD(in + v * STORED_BYTES);
    for (int i = 1; i < arrays->n_in; i++) {
        in = arrays->ins[i] + offset;
        if (bytes < STEP_BYTES)
            in = memcpy(block, in, bytes);
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            sum[v] = LEVEL_NAME(combine, TYPE)(op, sum[v], LOAD(in + v * STORED_BYTES));
    }
    if (op == DISCO_SUM && divisor != 0) {
        DIVIDE(sum, divisor)
    }
    STORED result[VECTORS];
    UNROLL
    for (int v = 0; v < VECTORS; v++)
        result[v] = PACK(sum[v]);
    if (bytes < STEP_BYTES) {
        UNROLL
        for (int v = 0; v < VECTORS; v++)
            *(STORED *)(block + v * STORED_BYTES) = result[v];
        for (int o = 0; o < arrays->n_out; o++)
            memcpy(arrays->outs[o] + offset, block, bytes);
        return;
    }
    for (int o = 0; o < arrays->n_out; o++) {
        uint8_t *out = arrays->outs[o] + offset;
        if (stream) {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                STREAM_OUT(out + v * STORED_BYTES, result[v]);
        } else {
            UNROLL
            for (int v = 0; v < VECTORS; v++)
                *(STORED *)(out + v * STORED_BYTES) = result[v];
        }
    }
}

static TARGET __attribute__((noinline)) void
LEVEL_NAME(rest, TYPE)(int op, const struct arrays *arrays, size_t offset, size_t bytes,
                       DIVISOR divisor)
{
    LEVEL_NAME(step, TYPE)(op, arrays, offset, bytes, divisor, 0);
}

static inline __attribute__((always_inline)) TARGET void
LEVEL_NAME(all, TYPE)(const int op, const struct arrays *arrays)
{
    DIVISOR divisor = (DIVISOR)arrays->divisor;
    size_t offset = arrays->head, bytes = arrays->bytes;
    if (offset > 0)
        LEVEL_NAME(rest, TYPE)(op, arrays, 0, offset, divisor);
    for (; bytes - offset >= STEP_BYTES; offset += STEP_BYTES)
        LEVEL_NAME(step, TYPE)(op, arrays, offset, STEP_BYTES, divisor, arrays->stream);
    if (bytes > offset)
        LEVEL_NAME(rest, TYPE)(op, arrays, offset, bytes - offset, divisor);
}

#define KERNEL(op) \
    static TARGET void LEVEL_NAME(op, TYPE)(const struct arrays *arrays) \
    { \
        LEVEL_NAME(all, TYPE)(op, arrays); \
    }
KERNEL(DISCO_SUM)
KERNEL(DISCO_PROD)
KERNEL(DISCO_MIN)
KERNEL(DISCO_MAX)

#undef KERNEL
#undef DIVIDE
#undef STREAM_OUT
#undef PACK
#undef LOAD
#undef STEP_BYTES
#undef STORED_BYTES
#undef VECTORS
#undef STORED
#undef BITS
#undef VEC
#undef HALF
#undef FLOATING
#undef DIVISOR
#undef U
#undef A
#undef TYPE
