/* Which levels beyond the baseline exist in this build. Compilers without target pragmas have the baseline alone. */
#ifndef FLUIDX_LEVELS_H
#define FLUIDX_LEVELS_H

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define LEVELS_X86 1
#include <immintrin.h> /* here, before a level says which instructions the functions that follow may use */
#if __has_include(<avx512vnniintrin.h>)
#define LEVELS_VNNI 1
#endif
#if LEVELS_VNNI && __has_include(<avx512bf16intrin.h>)
#define LEVELS_BF16 1
#endif
#if LEVELS_BF16 && __has_include(<amxbf16intrin.h>) && defined(__linux__) /* elsewhere nobody gives a process the tiles' memory */
#define LEVELS_AMX 1
#endif
#endif

#include "native.h"

/* levels.c: a level of instructions and all kernels in it, in one order for all levels; the last has no name */
typedef struct {
    const char *name;
    const Kernel *kernels;
} Level;
extern const Kernel kernels_base[];
extern const Level LEVELS[];
/* The number of the level to use on this processor, and of the best that it has; -1 if the kernels of a level do not fit the others */
int levels_init(int *best);

#endif
