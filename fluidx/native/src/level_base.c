/* The kernels in the instructions that every machine of the target has: SSE2 on x86-64, NEON on ARM64. */
#define LEVEL(name) name##_base
#include "kernels.h"
