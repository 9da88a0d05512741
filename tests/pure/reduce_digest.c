/* All reductions of the same random bytes, one line each: what all processors must agree upon. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "reduce.h"

enum { INPUTS = 3, COUNT = 1003 };

static uint8_t inputs[INPUTS][COUNT * 16], output[COUNT * 16];

static const char *const names[] = {
#define X(name, size) #name,
    DISCO_DTYPES(X)
#undef X
};

/* Random numbers that are of this kind: no NaN, of which there are many, and small sums. */
static void
fill(int dtype, size_t size)
{
    uint64_t state = 1;
    for (int i = 0; i < INPUTS; i++)
        for (size_t at = 0; at < COUNT * size; at++) {
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            inputs[i][at] = (uint8_t)(state >> 56);
            if (dtype == DISCO_bool)
                inputs[i][at] &= 1;
        }
    for (int i = 0; i < INPUTS; i++)
        for (size_t at = 0; at < COUNT; at++) {
            uint8_t *last = &inputs[i][(at + 1) * size - 1];
            switch (dtype) {
            case DISCO_float16: /* without infinities: an exponent that is not all ones */
            case DISCO_bfloat16:
            case DISCO_float32:
            case DISCO_float64:
                *last &= 0xbb;
                break;
            case DISCO_complex64:
            case DISCO_complex128:
                *last &= 0xbb;
                last[-(ptrdiff_t)size / 2] &= 0xbb;
                break;
            }
        }
}

int
main(void)
{
    const void *ins[INPUTS] = {inputs[0], inputs[1], inputs[2]};
    void *outs[1] = {output};
    for (int dtype = 0; dtype < DISCO_DTYPE_COUNT; dtype++)
        for (int kind = 0; kind < DISCO_KIND_COUNT; kind++) {
            size_t size = disco_dtype_size(dtype);
            if (!disco_can_reduce(dtype, kind))
                continue;
            fill(dtype, size);
            disco_reduce_at(0, dtype, kind, outs, 1, ins, INPUTS, COUNT, 0);
            uint64_t digest = 0;
            for (size_t at = 0; at < COUNT * size; at++)
                digest = digest * 31 + output[at];
            printf("%s %d %016" PRIx64 "\n", names[dtype], kind, digest);
        }
    return 0;
}
