/* Kernels for AVX512_BF16, in place of those of level v4. */
#include "levels.h"
#if LEVELS_BF16
#define LEVEL(name) name##_v4_bf16
#define HAVE_PAIRS 1
#define HAVE_AMX 0
#define HAVE_FMA 1
#define HAVE_F16C 1
#define V4_BF16 "avx2,fma,bmi,bmi2,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512cd,avx512bf16"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target(V4_BF16))), apply_to = function)
#include "kernels_16.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx2,fma,bmi,bmi2,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512cd,avx512bf16,prefer-vector-width=512")
#include "kernels_16.h"
#endif
#endif
