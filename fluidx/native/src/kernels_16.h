/* Kernels of which a level above v4 has its own: each such level_*.c includes this file with LEVEL defined. */
#include "native.h"

const Kernel LEVEL(kernels)[] = {
    {NULL, 0, NULL},
};
