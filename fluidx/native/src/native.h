/* What every part of fluidx._native shares: the shape of a kernel, the pool, the words of a call.
 *
 * To add a kernel: write `static void name(const int64_t *a, Team *team)` in a header of its own, include it in kernels.h and add
 * its line there. It is compiled once per level of instructions, so plain loops are enough. */
#ifndef FLUIDX_NATIVE_H
#define FLUIDX_NATIVE_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define UNUSED __attribute__((unused))
#else
#define INLINE static inline
#define NOINLINE static
#define UNUSED
#endif

/* Before a loop whose iterations are independent: arrays in it are the same or apart, never shifted. */
#if defined(__clang__)
#define IVDEP _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define IVDEP _Pragma("GCC ivdep")
#else
#define IVDEP
#endif

/* Before a loop of at most 16 iterations whose number the compiler knows: it shall be unrolled, so that arrays become registers. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL
#endif

/* Before a loop over the lanes of one vector instruction, which is not to become as many instructions for one element. */
#if defined(__clang__)
#define LANEWISE _Pragma("clang loop unroll(disable)")
#elif defined(__GNUC__)
#define LANEWISE _Pragma("GCC unroll 1")
#else
#define LANEWISE
#endif

/* The threads that a run may use. A kernel that finds something wrong sets `error` from the calling thread and returns. */
typedef struct Team {
    int threads;
    const char *error;
    const char *kind; /* the error's class in fluidx.comm.base; NULL for an ExecutionError */
    int rank;         /* to blame for an error of communication, or -1 */
    char text[400]; /* room for an error that names a number */
} Team;

/* An error whose text has `number` in the place of its first '#' */
static inline void report(Team *team, const char *text, int64_t number) {
    const char *at = strchr(text, '#');
    int before = at ? (int)(at - text) : (int)strlen(text);
    if (at)
        snprintf(team->text, sizeof team->text, "%.*s%lld%s", before, text, (long long)number, at + 1);
    else
        snprintf(team->text, sizeof team->text, "%s", text);
    team->error = team->text;
}

/* A kernel reads its arguments from 64-bit words: addresses, sizes, and doubles by their bits. Words are never written. */
typedef void (*KernelFn)(const int64_t *a, Team *team);
typedef struct {
    const char *name;
    int words; /* how many it takes; -1 for any number */
    KernelFn fn;
} Kernel;

/* A call: a kernel and what it reads. */
typedef struct {
    KernelFn fn;
    const int64_t *words;
} Record;

INLINE double as_double(int64_t w) {
    double d;
    memcpy(&d, &w, sizeof d);
    return d;
}
INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t up_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
#define PTR(type, word) ((type *)(intptr_t)(word))

/* Let the core's other thread go on for a moment, in a loop that waits. */
INLINE void pause_briefly(void) {
#if defined(_MSC_VER)
#elif defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory"); /* `yield` ends at once on most cores */
#endif
}

/* pool.c. `body` is called with ranges that together are [0, items), each but the last `grain` long or a multiple of it, on several
 * threads when there is more than one range. What an item is follows from shapes alone, so results do not depend on the threads. */
typedef void (*Body)(void *ctx, int64_t begin, int64_t end);
void parallel_for(Team *team, int64_t items, int64_t grain, Body body, void *ctx);
enum { SCRATCH, PANELS, REGISTERS, MEMORIES }; /* of kernels, of `product` within them, and of the vector machine within both */
/* This thread's own, aligned to 64 bytes, valid until its next call for the same use; NULL without memory */
void *own_memory(int use, size_t bytes);
static inline void *scratch(size_t bytes) { return own_memory(SCRATCH, bytes); }
/* The scratch that each thread takes for a call of which no memory exists: bodies are called with the range [0, 0), and get none. For kernels
 * that touch their operands in bodies alone. */
size_t pool_ask(KernelFn fn, const int64_t *words);
size_t pool_taken(void); /* bytes of scratch that the calling thread keeps, without the panels */
int pool_init(void);
void pool_set_threads(int n);
int pool_threads(void);
void pool_limit(int n); /* at most n threads for runs of the calling thread; 0 lifts the limit */
int pool_team(void);

/* blas.c: the product of the library that NumPy brought, found by Python */
typedef void (*GemmF32)(int64_t order, int64_t ta, int64_t tb, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                        const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
typedef void (*GemmF64)(int64_t order, int64_t ta, int64_t tb, int64_t m, int64_t n, int64_t k, double alpha, const double *a,
                        int64_t lda, const double *b, int64_t ldb, double beta, double *c, int64_t ldc);
extern int blas_even; /* pieces of a product have the bits of the whole one */
extern GemmF32 blas_f32;
extern GemmF64 blas_f64;

/* An elapsed time below which waking another thread costs more than it saves. */
#define PARALLEL_NS 5000.0

#endif
