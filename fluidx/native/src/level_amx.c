/* Kernels for AMX_BF16, in place of those of level v4_bf16. */
#include "levels.h"
#if LEVELS_AMX
#define LEVEL(name) name##_amx
#define HAVE_AMX 1
#include "kernels_16.h"
#endif
