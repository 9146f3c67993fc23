/* Kernels of 8-bit integers, of which a level with instructions for them has its own: such a level_*.c includes this file with LEVEL defined.
 * A tail is a program of the vector machine, which has functions that are not called here. */
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-function"
#endif
#include "native.h"

#include "vm.h"
#include "integer.h"

const Kernel LEVEL(kernels)[] = {
    {"integer", INTEGER_WORDS, integer},
    {NULL, 0, NULL},
};
