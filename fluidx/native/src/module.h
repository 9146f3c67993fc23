/* What the files share that Python's module fluidx._native is made of. */
#ifndef FLUIDX_MODULE_H
#define FLUIDX_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "meet.h"
#include "native.h"

#define BLOCK "fluidx._native.block" /* name of the capsules that hold one */

typedef struct {
    PyObject *keeps; /* what the addresses in the words point into */
    int64_t *words;
    Py_ssize_t count;
    Record records[];
} Block;

/* What the team says went wrong: an error which knows as `call` the number of the call in its block. */
PyObject *error_of(const Team *team, Py_ssize_t call);

/* Python's handlers of signals run between its own instructions only, so a long call has to ask for them: it gives the thread state that
 * it saved. Whether one raised, as Ctrl-C does. */
int signalled(void *state);

extern PyMethodDef world_methods[]; /* worlds.c */

#endif
