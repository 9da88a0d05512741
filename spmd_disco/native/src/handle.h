/* Handles to registers; see handle.c. */
#ifndef SPMD_DISCO_HANDLE_H
#define SPMD_DISCO_HANDLE_H

#include "native.h"

struct ControllerState;

typedef struct {
    PyObject_HEAD
    unsigned long long reg_id;
    long long command;
    PyObject *session;
    /* Of the handle that the register lives by; NULL in a second one. */
    struct ControllerState *owner;
} HandleObject;

extern PyTypeObject *Handle_Type;

#endif
