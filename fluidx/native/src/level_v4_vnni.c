/* Kernels for AVX512_VNNI, in place of those of level v4. */
#include "levels.h"
#if LEVELS_VNNI
#include "native.h"
#define LEVEL(name) name##_v4_vnni
#define HAVE_FMA 1
#define HAVE_512 1
#define HAVE_F16C 1
#define HAVE_VNNI 1
#define WITH "avx2,fma,bmi,bmi2,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512cd,avx512vnni"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target(WITH))), apply_to = function)
#include "kernels_8.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx2,fma,bmi,bmi2,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512cd,avx512vnni,prefer-vector-width=512")
#include "kernels_8.h"
#endif
#endif
