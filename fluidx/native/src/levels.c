/* The levels of instructions: which this processor has, and the kernels of each.
 *
 * base, v3 and v4 have all kernels. The levels above have a few of their own, and the others of the level below: products of 8-bit integers
 * are what AVX512_VNNI is for, those of 16-bit floats what AVX512_BF16 is for, and AMX is for both. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "levels.h"

enum { MOST_KERNELS = 160 };

#if LEVELS_X86
#include <cpuid.h>
#if LEVELS_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern const Kernel kernels_v3[], kernels_v4[];
#if LEVELS_VNNI
extern const Kernel kernels_v4_vnni[]; /* in place of those of the same names */
static Kernel all_v4_vnni[MOST_KERNELS];
#endif
#if LEVELS_BF16
extern const Kernel kernels_v4_bf16[];
static Kernel all_v4_bf16[MOST_KERNELS];
#endif
#if LEVELS_AMX
extern const Kernel kernels_amx[], kernels_8_amx[];
static Kernel all_amx[MOST_KERNELS];
#endif

const Level LEVELS[] = {
    {"base", kernels_base},
    {"v3", kernels_v3},
    {"v4", kernels_v4},
#if LEVELS_VNNI
    {"v4_vnni", all_v4_vnni},
#endif
#if LEVELS_BF16
    {"v4_bf16", all_v4_bf16},
#endif
#if LEVELS_AMX
    {"amx", all_amx},
#endif
};

/* All kernels of the level below, with `own` in the place of those of their names. 0, or -1 if there is no such place */
UNUSED static int join(Kernel *all, const Kernel *below, const Kernel *own) {
    int64_t n = 0;
    for (; below[n].name; n++) {
        if (n + 1 >= MOST_KERNELS) return -1;
        all[n] = below[n];
    }
    for (; own->name; own++) {
        int64_t i = 0;
        while (i < n && strcmp(all[i].name, own->name)) i++;
        if (i == n || (own->words >= 0 && all[i].words != own->words)) return -1;
        all[i].fn = own->fn;
    }
    return 0;
}

static int has_bf16(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
}

/* Intel's processors need for a product of pairs four times the time of a fused multiply-add: there v4 is faster. */
static int pairs_are_slow(void) { return __builtin_cpu_is("intel"); }

/* Tiles of bfloat16 and of 8-bit integers. Their 8 KB of registers are memory that the kernel keeps for a process once it was asked. */
static int has_amx(void) {
#if LEVELS_AMX
    enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 13) != 13) return 0; /* BF16, TILE and INT8 */
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return 0;
#endif
}

int levels_init(int *best) {
#if LEVELS_VNNI
    if (join(all_v4_vnni, kernels_v4, kernels_v4_vnni)) return -1;
#endif
#if LEVELS_BF16
    if (join(all_v4_bf16, all_v4_vnni, kernels_v4_bf16)) return -1;
#endif
#if LEVELS_AMX
    if (join(all_amx, all_v4_bf16, kernels_amx) || join(all_amx, all_amx, kernels_8_amx)) return -1;
#endif
    __builtin_cpu_init();
    int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
    int vnni = v4 && __builtin_cpu_supports("avx512vnni");
    int has = !vnni ? v3 + v4 : !has_bf16() ? 3 : !has_amx() ? 4 : 5, last = (int)(sizeof LEVELS / sizeof *LEVELS) - 1;
    *best = has < last ? has : last;
    return *best == 4 && pairs_are_slow() ? 3 : *best;
}

#else

const Level LEVELS[] = {{"base", kernels_base}};
int levels_init(int *best) { return *best = 0; }

#endif
