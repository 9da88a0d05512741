/* The reductions of one complex dtype; included by reduce.c.
 *
 * Parameters, undefined at the end: TYPE, the dtype's name, and A, the type of its parts. */

static void
LEVEL_JOIN(reduce, TYPE, complex)(int product, const struct arrays *arrays)
{
    /* An average is NumPy's division by a complex number without an imaginary part: it multiplies
     * by the inverse, and the zero spoils infinities alike. */
    const A scale = arrays->divisor ? (A)1 / (A)arrays->divisor : (A)1;
    for (size_t offset = 0; offset < arrays->bytes; offset += 2 * sizeof(A)) {
        A total[2], next[2];
        memcpy(total, arrays->ins[0] + offset, sizeof total);
        for (int i = 1; i < arrays->n_in; i++) {
            memcpy(next, arrays->ins[i] + offset, sizeof next);
            if (product) {
                A real = total[0] * next[0] - total[1] * next[1];
                total[1] = total[0] * next[1] + total[1] * next[0];
                total[0] = real;
            } else {
                total[0] += next[0];
                total[1] += next[1];
            }
        }
        if (arrays->divisor) {
            A real = (total[0] + total[1] * 0) * scale;
            total[1] = (total[1] - total[0] * 0) * scale;
            total[0] = real;
        }
        for (int o = 0; o < arrays->n_out; o++)
            memcpy(arrays->outs[o] + offset, total, sizeof total);
    }
}

#undef A
#undef TYPE
