/* Element-wise reductions of arrays: what an allreduce does with its peers' memory.
 *
 * Every input is read once and every output written once, whatever their number: accumulators stay
 * in registers. The semantics are those of transport/reduce.py: 16-bit floats are combined in
 * float32 and rounded once at the end, integers wrap around, their average is truncated toward
 * zero, a NaN is the minimum and the maximum. There is one source for all dtypes and processors:
 * reduce_type.h, in the compiler's generic vectors. */
#include "reduce.h"

#include <string.h>

#include "native.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

/* One reduction, in bytes. */
struct arrays {
    uint8_t *const *outs;
    const uint8_t *const *ins;
    int n_out;
    int n_in;
    size_t bytes;
    /* How many come before those that are aligned in all outputs. */
    size_t head;
    /* What an average divides by; else 0. */
    int divisor;
    int stream;
};

typedef void (*kernel)(const struct arrays *);

#define LEVEL_JOIN(name, type, level) LEVEL_JOIN_(name, type, level)
#define LEVEL_JOIN_(name, type, level) name##_##type##_##level
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__x86_64__)
static inline __m128i
narrow_sse2(__m128i x)
{
    /* The only packing of 32 bits saturates as signed, so these become such first. */
    x = _mm_srai_epi32(_mm_slli_epi32(x, 16), 16);
    return _mm_packs_epi32(x, x);
}
#endif

/* What every processor of the architecture has. */
#define LEVEL baseline
#define TARGET
#define VECTOR_BYTES 16
#if defined(__x86_64__)
#define STREAM(p, v) _mm_stream_si128((__m128i *)(p), (__m128i)(v))
#define STREAM_HALF(p, v) _mm_stream_si64((long long *)(p), (long long)(v))
#define WIDEN(p) \
    _mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i *)(p)), _mm_setzero_si128())
#define NARROW(v) _mm_cvtsi128_si64(narrow_sse2((__m128i)(v)))
#else
#define STREAM(p, v) memcpy(p, &(v), sizeof(v))
#define STREAM_HALF STREAM
#endif
#include "reduce_level.h"

#if defined(__x86_64__)
#define LEVEL avx2
#define TARGET __attribute__((target("avx2,f16c")))
#define VECTOR_BYTES 32
#define STREAM(p, v) _mm256_stream_si256((__m256i *)(p), (__m256i)(v))
#define STREAM_HALF(p, v) _mm_stream_si128((__m128i *)(p), (__m128i)(v))
#define WIDEN(p) _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define NARROW(v) \
    _mm256_castsi256_si128(_mm256_permute4x64_epi64( \
        _mm256_packus_epi32((__m256i)(v), (__m256i)(v)), 0x08))
#define WIDEN_FLOAT16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define NARROW_FLOAT16(v) ((bits_half_avx2)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#include "reduce_level.h"

#define LEVEL avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c")))
#define VECTOR_BYTES 64
#define STREAM(p, v) _mm512_stream_si512((__m512i *)(p), (__m512i)(v))
#define STREAM_HALF(p, v) _mm256_stream_si256((__m256i *)(p), (__m256i)(v))
#define WIDEN(p) _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p)))
#define NARROW(v) _mm512_cvtepi32_epi16((__m512i)(v))
#define WIDEN_FLOAT16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define NARROW_FLOAT16(v) ((bits_half_avx512)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#include "reduce_level.h"
#endif

#define TYPE complex64
#define A float
#include "reduce_complex.h"

#define TYPE complex128
#define A double
#include "reduce_complex.h"

/* The choice ----------------------------------------------------------------------------------- */

const char *const disco_levels[] = {
    "baseline",
#if defined(__x86_64__)
    "avx2",
    "avx512",
#endif
};

static const kernel (*const kernels[])[4] = {
    kernels_all_baseline,
#if defined(__x86_64__)
    kernels_all_avx2,
    kernels_all_avx512,
#endif
};

#if defined(__x86_64__)
/* Not all compilers let __builtin_cpu_supports say it. */
static bool
has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

int
disco_level_count(void)
{
    static atomic_int known;
    int count = atomic_load_explicit(&known, memory_order_relaxed);
    if (count == 0) {
        count = 1;
#if defined(__x86_64__)
        if (__builtin_cpu_supports("avx2") && has_f16c()) {
            count = 2;
            if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
                count = 3;
        }
#endif
        atomic_store_explicit(&known, count, memory_order_relaxed);
    }
    return count;
}

static const size_t sizes[] = {
#define X(name, size) size,
    DISCO_DTYPES(X)
#undef X
};

size_t
disco_dtype_size(int dtype)
{
    return dtype >= 0 && dtype < DISCO_DTYPE_COUNT ? sizes[dtype] : 0;
}

int
disco_can_reduce(int dtype, int kind)
{
    if (dtype < 0 || dtype >= DISCO_DTYPE_COUNT || kind < 0 || kind >= DISCO_KIND_COUNT)
        return 0;
    if (dtype == DISCO_bool)
        return kind != DISCO_AVG;
    if (dtype == DISCO_complex64 || dtype == DISCO_complex128)
        return kind != DISCO_MIN && kind != DISCO_MAX;
    return 1;
}

#if defined(__x86_64__)
/* How many bytes come before those that can be streamed; or -1 where there are no such, because the
 * outputs are aligned differently. */
static ptrdiff_t
before_aligned(void *const *outs, int n_out, size_t size)
{
    size_t head = -(uintptr_t)outs[0] % CACHE_LINE;
    for (int o = 1; o < n_out; o++)
        if (-(uintptr_t)outs[o] % CACHE_LINE != head)
            return -1;
    return head % size ? -1 : (ptrdiff_t)head;
}
#endif

int
disco_reduce_at(int level, int dtype, int kind, void *const *outs, int n_out,
                const void *const *ins, int n_in, size_t count, int stream)
{
    if (n_in < 1 || !disco_can_reduce(dtype, kind))
        return -1;
    size_t size = sizes[dtype];
    struct arrays arrays = {
        .outs = (uint8_t *const *)outs,
        .ins = (const uint8_t *const *)ins,
        .n_out = n_out,
        .n_in = n_in,
        .bytes = count * size,
        .divisor = kind == DISCO_AVG ? n_in : 0,
    };
    if (count == 0 || n_out < 1)
        return 0;
    if (kind == DISCO_AVG)
        kind = DISCO_SUM;
    if (dtype == DISCO_bool) {
        /* As NumPy has it: sum is «or», product is «and»; with the bytes 0 and 1, the maximum
         * and the minimum. */
        dtype = DISCO_uint8;
        kind = kind == DISCO_SUM || kind == DISCO_MAX ? DISCO_MAX : DISCO_MIN;
    } else if (dtype == DISCO_complex64 || dtype == DISCO_complex128) {
        if (kind == DISCO_PROD || arrays.divisor) {
            (dtype == DISCO_complex64 ? reduce_complex64_complex : reduce_complex128_complex)(
                kind == DISCO_PROD, &arrays);
            return 0;
        }
        dtype = dtype == DISCO_complex64 ? DISCO_float32 : DISCO_float64;
    }
#if defined(__x86_64__)
    if (stream) {
        ptrdiff_t head = before_aligned(outs, n_out, sizes[dtype]);
        if (head >= 0 && (size_t)head < arrays.bytes) {
            arrays.head = head;
            arrays.stream = 1;
        }
    }
#endif
    kernels[level][dtype][kind](&arrays);
#if defined(__x86_64__)
    if (arrays.stream)
        _mm_sfence();
#endif
    return 0;
}

int
disco_reduce(int dtype, int kind, void *const *outs, int n_out, const void *const *ins, int n_in,
             size_t count, int stream)
{
    return disco_reduce_at(disco_level_count() - 1, dtype, kind, outs, n_out, ins, n_in, count,
                           stream);
}

/* For Python ----------------------------------------------------------------------------------- */

/* Arrays that Python gives as buffers. */
struct buffers {
    Py_buffer *views;
    void **addresses;
    Py_ssize_t count;
};

static void
release(struct buffers *buffers)
{
    for (Py_ssize_t i = 0; i < buffers->count; i++)
        PyBuffer_Release(&buffers->views[i]);
    PyMem_Free(buffers->views);
    PyMem_Free(buffers->addresses);
}

/* Take the buffers of `sequence`, all of `size` bytes, or of any one size where it is negative. */
static int
acquire(PyObject *sequence, const char *what, int flags, Py_ssize_t size, struct buffers *buffers)
{
    PyObject *items = PySequence_Fast(sequence, what);
    if (items == NULL)
        return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    buffers->views = PyMem_New(Py_buffer, count ? count : 1);
    buffers->addresses = PyMem_New(void *, count ? count : 1);
    if (buffers->views == NULL || buffers->addresses == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_buffer *view = &buffers->views[i];
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(items, i), view, flags) < 0)
            goto failed;
        buffers->count++;
        buffers->addresses[i] = view->buf;
        if (size < 0)
            size = view->len;
        if (view->len != size) {
            PyErr_Format(PyExc_ValueError,
                         "arrays of %zd and %zd bytes: all must have the same size", size,
                         view->len);
            goto failed;
        }
    }
    Py_DECREF(items);
    return 0;
failed:
    Py_DECREF(items);
    return -1;
}

static int
apart(const struct buffers *outs, const struct buffers *ins)
{
    for (Py_ssize_t o = 0; o < outs->count; o++) {
        uintptr_t start = (uintptr_t)outs->addresses[o], size = outs->views[o].len;
        for (Py_ssize_t i = 0; i < ins->count; i++) {
            uintptr_t other = (uintptr_t)ins->addresses[i];
            if (other != start && other < start + size && start < other + size)
                return 0;
        }
        for (Py_ssize_t p = 0; p < o; p++) {
            uintptr_t other = (uintptr_t)outs->addresses[p];
            if (other < start + size && start < other + size)
                return 0;
        }
    }
    return 1;
}

static PyObject *
reduce(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"", "", "", "", "stream", "level", NULL};
    PyObject *inputs, *outputs;
    int dtype, kind, stream = 0, level = -1;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiOO|$pi:reduce", names, &dtype, &kind,
                                     &inputs, &outputs, &stream, &level))
        return NULL;
    if (level < 0)
        level = disco_level_count() - 1;
    if (level >= disco_level_count())
        return PyErr_Format(PyExc_ValueError, "level %d: this processor has 0 to %d", level,
                            disco_level_count() - 1);
    if (!disco_can_reduce(dtype, kind))
        return PyErr_Format(PyExc_TypeError, "dtype %d cannot be reduced by kind %d", dtype, kind);
    struct buffers ins = {0}, outs = {0};
    PyObject *result = NULL;
    if (acquire(inputs, "the inputs are no sequence", PyBUF_SIMPLE, -1, &ins) < 0)
        goto done;
    if (ins.count < 1) {
        PyErr_SetString(PyExc_ValueError, "no input: there must be one at least");
        goto done;
    }
    Py_ssize_t bytes = ins.views[0].len, size = sizes[dtype];
    if (acquire(outputs, "the outputs are no sequence", PyBUF_WRITABLE, bytes, &outs) < 0)
        goto done;
    if (bytes % size) {
        PyErr_Format(PyExc_ValueError, "arrays of %zd bytes: an element has %zd", bytes, size);
        goto done;
    }
    if (!apart(&outs, &ins)) {
        PyErr_SetString(PyExc_ValueError,
                        "an output overlaps with another array without being one of the inputs");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    disco_reduce_at(level, dtype, kind, outs.addresses, (int)outs.count,
                    (const void *const *)ins.addresses, (int)ins.count, bytes / size, stream);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release(&outs);
    release(&ins);
    return result;
}

static PyMethodDef functions[] = {
    {"reduce", (PyCFunction)(void (*)(void))reduce, METH_VARARGS | METH_KEYWORDS,
     "Combine the inputs, element by element, into every output."},
    {NULL},
};

int
add_reduce(PyObject *module)
{
    PyObject *dtypes = PyDict_New();
    if (dtypes == NULL)
        return -1;
    int error = 0;
#define X(name, size) \
    { \
        PyObject *code = PyLong_FromLong(DISCO_##name); \
        error |= code == NULL || PyDict_SetItemString(dtypes, #name, code) < 0; \
        Py_XDECREF(code); \
    }
    DISCO_DTYPES(X)
#undef X
    PyObject *levels = PyTuple_New(disco_level_count());
    for (int i = 0; levels != NULL && i < disco_level_count(); i++) {
        PyObject *name = PyUnicode_FromString(disco_levels[i]);
        error |= name == NULL;
        PyTuple_SET_ITEM(levels, i, name);
    }
    error = error || levels == NULL || PyModule_AddObjectRef(module, "DTYPES", dtypes) < 0 ||
            PyModule_AddObjectRef(module, "LEVELS", levels) < 0 ||
            PyModule_AddFunctions(module, functions) < 0;
    Py_DECREF(dtypes);
    Py_XDECREF(levels);
    return error ? -1 : 0;
}
