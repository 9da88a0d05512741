/* What the parts of the native module share. Each part adds its types and functions to the module
 * by a function of its own, which module.c calls. */
#ifndef SPMD_DISCO_NATIVE_H
#define SPMD_DISCO_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "messages are little-endian; on this machine the package does without its native module"
#endif

#define CACHE_LINE 64

/* One place in a polling loop where the processor may rest, and memory is looked at anew. */
static inline void
relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield" ::: "memory");
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* Each returns 0, or -1 with a Python exception set. */
int add_segment(PyObject *module);
int add_codec(PyObject *module);
int add_handle(PyObject *module);
int add_worker(PyObject *module);
int add_controller(PyObject *module);
int add_fastcall(PyObject *module);
int add_node(PyObject *module);
int add_ring(PyObject *module);
int add_replies(PyObject *module);
int add_reduce(PyObject *module);
int add_copy(PyObject *module);
int add_orphan(PyObject *module);
int add_pool(PyObject *module);
int add_cells(PyObject *module);

#endif
