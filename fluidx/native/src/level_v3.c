/* The kernels for x86-64-v3: AVX2 and FMA. */
#include "levels.h"
#if LEVELS_X86
#include "native.h"
#include <immintrin.h>
#define LEVEL(name) name##_v3
#define HAVE_FMA 1
#define HAVE_F16C 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2,f16c"))), apply_to = function)
#include "kernels.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx2,fma,bmi,bmi2,f16c")
#include "kernels.h"
#endif
#endif
