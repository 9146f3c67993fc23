/* The kernels for x86-64-v4: AVX-512 at its full width, which gcc does not use unless told. */
#include "levels.h"
#if LEVELS_X86
#include "native.h"
#include <immintrin.h>
#define LEVEL(name) name##_v4
#define HAVE_FMA 1
#define HAVE_512 1
#define HAVE_F16C 1
#define V4 "avx2,fma,bmi,bmi2,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512cd"
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target(V4))), apply_to = function)
#include "kernels.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx2,fma,bmi,bmi2,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512cd,prefer-vector-width=512")
#include "kernels.h"
#endif
#endif
