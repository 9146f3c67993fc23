/* Kernels for AVX512_BF16, in place of those of level v4. */
#include "levels.h"
#if LEVELS_BF16
#define LEVEL(name) name##_v4_bf16
#define HAVE_DPBF16 1
#include "kernels_16.h"
#endif
