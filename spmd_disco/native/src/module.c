/* The native module: its parts, one after the other. */
#include "native.h"

static int
execute(PyObject *module)
{
    static int (*const parts[])(PyObject *) = {
        add_segment,
        add_codec,
        add_handle,
        add_worker,
        add_controller,
        add_fastcall,
        add_node,
        add_ring,
        add_replies,
        add_reduce,
        add_copy,
        add_orphan,
        add_pool,
        add_cells,
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i](module) < 0)
            return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "spmd_disco.native._native",
    .m_doc = "The parts of spmd_disco that are written in C; see the stub file for their interface.",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
