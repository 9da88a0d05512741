/* All reductions at one level of the processor; included by reduce.c once for each.
 *
 * Parameters, undefined at the end:
 *   LEVEL         its name, with which all names here end
 *   TARGET        the attribute that lets the compiler use its instructions
 *   VECTOR_BYTES  the size of its vectors
 *   STREAM, STREAM_HALF  (p, v): store a vector, or half a one, around the caches
 *   WIDEN, NARROW where the compiler needs help: (p) gives a vector of 32-bit integers from 16-bit
 *                 ones at p, (v) the way back for those below 2^16
 *   WIDEN_FLOAT16, NARROW_FLOAT16  where it has instructions for them: the same for floats */

#define LEVEL_NAME(name, type) LEVEL_JOIN(name, type, LEVEL)

/* Between 16-bit floats and float32 ---------------------------------------------------------------
 *
 * The nearest value, of two the even one. A NaN keeps its sign. */

typedef uint16_t LEVEL_NAME(bits, half) __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t LEVEL_NAME(stored, half)
    __attribute__((vector_size(VECTOR_BYTES / 2), aligned(1), may_alias));
typedef uint32_t LEVEL_NAME(bits, float) __attribute__((vector_size(VECTOR_BYTES)));
typedef float LEVEL_NAME(vec, float) __attribute__((vector_size(VECTOR_BYTES)));

static inline __attribute__((always_inline)) TARGET LEVEL_NAME(bits, float)
LEVEL_NAME(choose, float)(LEVEL_NAME(bits, float) which, LEVEL_NAME(bits, float) yes,
                          LEVEL_NAME(bits, float) no)
{
    return (which & yes) | (~which & no);
}

static inline __attribute__((always_inline)) TARGET LEVEL_NAME(bits, float)
LEVEL_NAME(widen, bits)(const uint8_t *p)
{
#ifdef WIDEN
    return (LEVEL_NAME(bits, float))WIDEN(p);
#else
    return __builtin_convertvector(*(const LEVEL_NAME(stored, half) *)p, LEVEL_NAME(bits, float));
#endif
}

static inline __attribute__((always_inline)) TARGET LEVEL_NAME(bits, half)
LEVEL_NAME(narrow, bits)(LEVEL_NAME(bits, float) x)
{
#ifdef NARROW
    return (LEVEL_NAME(bits, half))NARROW(x);
#else
    return __builtin_convertvector(x, LEVEL_NAME(bits, half));
#endif
}

static inline __attribute__((always_inline)) TARGET LEVEL_NAME(vec, float)
LEVEL_NAME(widen, bfloat16)(const uint8_t *p)
{
    return (LEVEL_NAME(vec, float))(LEVEL_NAME(widen, bits)(p) << 16);
}

static inline __attribute__((always_inline)) TARGET LEVEL_NAME(bits, half)
LEVEL_NAME(narrow, bfloat16)(LEVEL_NAME(vec, float) x)
{
    LEVEL_NAME(bits, float) bits = (LEVEL_NAME(bits, float))x;
    LEVEL_NAME(bits, float) rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    LEVEL_NAME(bits, float) nan = ((bits >> 16) & 0x8000) | 0x7fc0;
    rounded = LEVEL_NAME(choose, float)((LEVEL_NAME(bits, float))(x != x), nan, rounded);
    return LEVEL_NAME(narrow, bits)(rounded);
}

static inline __attribute__((always_inline)) TARGET LEVEL_NAME(vec, float)
LEVEL_NAME(widen, float16)(const uint8_t *p)
{
#ifdef WIDEN_FLOAT16
    return WIDEN_FLOAT16(p);
#else
    LEVEL_NAME(bits, float) bits = LEVEL_NAME(widen, bits)(p);
    LEVEL_NAME(bits, float) magnitude = bits & 0x7fff;
    /* The product moves the exponent, and makes the small ones normal. */
    LEVEL_NAME(vec, float) scaled = (LEVEL_NAME(vec, float))(magnitude << 13) * 0x1p112f;
    LEVEL_NAME(bits, float) result = (LEVEL_NAME(bits, float))scaled;
    result |= (LEVEL_NAME(bits, float))(magnitude >= 0x7c00) & 0x7f800000;
    result |= (LEVEL_NAME(bits, float))(magnitude > 0x7c00) & 0x00400000;
    return (LEVEL_NAME(vec, float))(result | (bits & 0x8000) << 16);
#endif
}

static inline __attribute__((always_inline)) TARGET LEVEL_NAME(bits, half)
LEVEL_NAME(narrow, float16)(LEVEL_NAME(vec, float) x)
{
#ifdef NARROW_FLOAT16
    return NARROW_FLOAT16(x);
#else
    LEVEL_NAME(bits, float) bits = (LEVEL_NAME(bits, float))x;
    LEVEL_NAME(bits, float) magnitude = bits & 0x7fffffff;
    /* What rounds beyond the largest value becomes the infinity by itself, below 2^16. */
    LEVEL_NAME(bits, float) result =
        (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    /* Below the smallest normal value an addition rounds at the right place. */
    LEVEL_NAME(vec, float) aligned = (LEVEL_NAME(vec, float))magnitude + 0.5f;
    result = LEVEL_NAME(choose, float)((LEVEL_NAME(bits, float))(magnitude < (127 - 14) << 23),
                                       (LEVEL_NAME(bits, float))aligned - (126 << 23), result);
    LEVEL_NAME(bits, float) nan = ((magnitude >> 13) & 0x3ff) | 0x200;
    nan = 0x7c00 | ((LEVEL_NAME(bits, float))(magnitude > 0x7f800000) & nan);
    result = LEVEL_NAME(choose, float)((LEVEL_NAME(bits, float))(magnitude >= (127 + 16) << 23),
                                       nan, result);
    return LEVEL_NAME(narrow, bits)(result | ((bits >> 16) & 0x8000));
#endif
}

/* The dtypes ----------------------------------------------------------------------------------- */

#define TYPE float64
#define A double
#define U uint64_t
#define DIVISOR double
#define FLOATING 1
#define HALF 0
#include "reduce_type.h"

#define TYPE float32
#define A float
#define U uint32_t
#define DIVISOR float
#define FLOATING 1
#define HALF 0
#include "reduce_type.h"

#define TYPE float16
#define A float
#define U uint32_t
#define DIVISOR float
#define FLOATING 1
#define HALF 1
#include "reduce_type.h"

#define TYPE bfloat16
#define A float
#define U uint32_t
#define DIVISOR float
#define FLOATING 1
#define HALF 1
#include "reduce_type.h"

#define TYPE int8
#define A int8_t
#define U uint8_t
#define DIVISOR int32_t
#define FLOATING 0
#define HALF 0
#include "reduce_type.h"

#define TYPE int16
#define A int16_t
#define U uint16_t
#define DIVISOR int32_t
#define FLOATING 0
#define HALF 0
#include "reduce_type.h"

#define TYPE int32
#define A int32_t
#define U uint32_t
#define DIVISOR int32_t
#define FLOATING 0
#define HALF 0
#include "reduce_type.h"

#define TYPE int64
#define A int64_t
#define U uint64_t
#define DIVISOR int64_t
#define FLOATING 0
#define HALF 0
#include "reduce_type.h"

#define TYPE uint8
#define A uint8_t
#define U uint8_t
#define DIVISOR uint32_t
#define FLOATING 0
#define HALF 0
#include "reduce_type.h"

#define TYPE uint16
#define A uint16_t
#define U uint16_t
#define DIVISOR uint32_t
#define FLOATING 0
#define HALF 0
#include "reduce_type.h"

#define TYPE uint32
#define A uint32_t
#define U uint32_t
#define DIVISOR uint32_t
#define FLOATING 0
#define HALF 0
#include "reduce_type.h"

#define TYPE uint64
#define A uint64_t
#define U uint64_t
#define DIVISOR uint64_t
#define FLOATING 0
#define HALF 0
#include "reduce_type.h"

/* [dtype][kind]; the rest of both is put in terms of these by reduce.c. */
#define KERNELS(type) \
    [DISCO_##type] = { \
        LEVEL_NAME(DISCO_SUM, type), \
        LEVEL_NAME(DISCO_PROD, type), \
        LEVEL_NAME(DISCO_MIN, type), \
        LEVEL_NAME(DISCO_MAX, type), \
    },
static const kernel LEVEL_NAME(kernels, all)[DISCO_DTYPE_COUNT][4] = {
    KERNELS(float64)
    KERNELS(float32)
    KERNELS(float16)
    KERNELS(bfloat16)
    KERNELS(int8)
    KERNELS(int16)
    KERNELS(int32)
    KERNELS(int64)
    KERNELS(uint8)
    KERNELS(uint16)
    KERNELS(uint32)
    KERNELS(uint64)
};

#undef KERNELS
#undef LEVEL_NAME
#undef NARROW_FLOAT16
#undef WIDEN_FLOAT16
#undef NARROW
#undef WIDEN
#undef STREAM_HALF
#undef STREAM
#undef VECTOR_BYTES
#undef TARGET
#undef LEVEL
