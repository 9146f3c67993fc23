/* Kernels for AMX_INT8, in place of those of level v4_bf16. */
#include "levels.h"
#if LEVELS_AMX
#include "native.h"
#define LEVEL(name) name##_8_amx
#define HAVE_FMA 1
#define HAVE_512 1
#define HAVE_F16C 1
#define HAVE_AMX 1
#define WITH "avx2,fma,bmi,bmi2,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512cd,avx512vnni,amx-tile,amx-int8"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target(WITH))), apply_to = function)
#include "kernels_8.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx2,fma,bmi,bmi2,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512cd,avx512vnni,amx-tile,amx-int8,prefer-vector-width=512")
#include "kernels_8.h"
#endif
#endif
