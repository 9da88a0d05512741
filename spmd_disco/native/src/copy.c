/* Copies of memory around the caches.
 *
 * A plain store first reads the line that it writes into, and pushes out another one that may still
 * be wanted; for large data, or data that only other processors read, both are waste. */
#include "copy.h"

#include <string.h>

#include "native.h"

/* ThreadSanitizer does not see stores around the caches, so it gets plain ones. */
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#include <emmintrin.h>
#define STREAMS 1
#else
#define STREAMS 0
#endif

/* Below this a copy is over before the fence at the end of a streamed one would be. */
#define STREAM_AT_LEAST 4096
/* What is done between two looks at how much is left, and how far ahead the source is fetched. */
#define BLOCK (4 * CACHE_LINE)
#define AHEAD (16 * CACHE_LINE)

void
disco_copy(void *dst, const void *src, size_t bytes, int stream)
{
#if STREAMS
    if (stream && bytes >= STREAM_AT_LEAST) {
        size_t head = -(uintptr_t)dst % CACHE_LINE;
        memcpy(dst, src, head);
        uint8_t *to = (uint8_t *)dst + head;
        const uint8_t *from = (const uint8_t *)src + head;
        size_t left = bytes - head;
        for (; left >= BLOCK; left -= BLOCK, to += BLOCK, from += BLOCK) {
            for (int i = 0; i < BLOCK; i += CACHE_LINE)
                _mm_prefetch((const char *)from + AHEAD + i, _MM_HINT_NTA);
            __m128i parts[BLOCK / 16];
            for (int i = 0; i < BLOCK / 16; i++)
                parts[i] = _mm_loadu_si128((const __m128i *)from + i);
            for (int i = 0; i < BLOCK / 16; i++)
                _mm_stream_si128((__m128i *)to + i, parts[i]);
        }
        memcpy(to, from, left);
        _mm_sfence();
        return;
    }
#endif
    memcpy(dst, src, bytes);
}

static PyObject *
copy(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"", "", "stream", NULL};
    Py_buffer dst, src;
    int stream = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "w*y*|$p:copy", names, &dst, &src, &stream))
        return NULL;
    PyObject *result = NULL;
    uintptr_t to = (uintptr_t)dst.buf, from = (uintptr_t)src.buf;
    if (dst.len != src.len)
        PyErr_Format(PyExc_ValueError, "%zd bytes into a buffer of %zd: the sizes must be equal",
                     src.len, dst.len);
    else if (to < from + src.len && from < to + dst.len)
        PyErr_SetString(PyExc_ValueError, "the buffers overlap");
    else {
        Py_BEGIN_ALLOW_THREADS
        disco_copy(dst.buf, src.buf, src.len, stream);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&dst);
    PyBuffer_Release(&src);
    return result;
}

static PyMethodDef functions[] = {
    {"copy", (PyCFunction)(void (*)(void))copy, METH_VARARGS | METH_KEYWORDS,
     "Copy all bytes of one buffer into another."},
    {NULL},
};

int
add_copy(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
