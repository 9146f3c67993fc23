/* All kernels, compiled once per level of instructions: each level_*.c includes this file with LEVEL defined. */
#include "native.h"

#include "gemm.h"

const Kernel LEVEL(kernels)[] = {
    {"gemm_f32", GEMM_WORDS, gemm_f32},
    {"gemm_f64", GEMM_WORDS, gemm_f64},
    {NULL, 0, NULL},
};
