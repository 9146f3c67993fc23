/* Kernels of which a level above v4 has its own: each such level_*.c includes this file with LEVEL defined. They are those of level v4 with
 * another product. */
#include "native.h"

#include "functions.h"
#include "halves.h"
#include "product_16.h"

enum { GEMM_16_WORDS = 25 };
int product_16_v4(const Product16 *p);
void gemm_16_with_v4(const int64_t *a, Team *team, Product16Fn product);

/* float16 has more digits than pairs of bfloat16 hold. */
static int product_of_16(const Product16 *p) { return p->a.is == AS_F16 || p->b.is == AS_F16 ? product_16_v4(p) : LEVEL(product_16)(p); }
static void gemm_16(const int64_t *a, Team *team) { gemm_16_with_v4(a, team, product_of_16); }

const Kernel LEVEL(kernels)[] = {
    {"gemm_16", GEMM_16_WORDS, gemm_16},
    {NULL, 0, NULL},
};
