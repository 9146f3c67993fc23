/* Which levels beyond the baseline exist in this build. Compilers without target pragmas have the baseline alone. */
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define LEVELS_X86 1
#include <immintrin.h> /* here, before a level says which instructions the functions that follow may use */
#endif
