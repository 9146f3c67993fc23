/* Kernels of which a level above v4 has its own: each such level_*.c includes this file with LEVEL defined. They are those of level v4 with
 * another product. */
#include "native.h"

#include "functions.h"
#include "halves.h"
#include "product_16.h"

int product_16_v4(const Product16 *p);
void gemm_16_with_v4(const int64_t *a, Team *team, Product16Fn product);
void conv_16_with_v4(const int64_t *a, Team *team, Product16Fn product, int back);
void conv_filter_16_with_v4(const int64_t *a, Team *team, Product16Fn product);
void attention_16_with_v4(const int64_t *a, Team *team, Product16Fn product);
void attention_grad_16_with_v4(const int64_t *a, Team *team, Product16Fn product);

/* float16 has more digits than pairs of bfloat16 hold. */
static int product_of_16(const Product16 *p) { return p->a.is == AS_F16 || p->b.is == AS_F16 ? product_16_v4(p) : LEVEL(product_16)(p); }
static void gemm_16(const int64_t *a, Team *team) { gemm_16_with_v4(a, team, product_of_16); }
static void conv_16(const int64_t *a, Team *team) { conv_16_with_v4(a, team, product_of_16, 0); }
static void conv_back_16(const int64_t *a, Team *team) { conv_16_with_v4(a, team, product_of_16, 1); }
static void conv_filter_16(const int64_t *a, Team *team) { conv_filter_16_with_v4(a, team, product_of_16); }
static void attention_16(const int64_t *a, Team *team) { attention_16_with_v4(a, team, product_of_16); }
static void attention_grad_16(const int64_t *a, Team *team) { attention_grad_16_with_v4(a, team, product_of_16); }

/* -1: as many words as at level v4 */
const Kernel LEVEL(kernels)[] = {
    {"gemm_16", -1, gemm_16},
    {"conv_16", -1, conv_16},
    {"conv_back_16", -1, conv_back_16},
    {"conv_filter_16", -1, conv_filter_16},
    {"attention_16", -1, attention_16},
    {"attention_grad_16", -1, attention_grad_16},
    {NULL, 0, NULL},
};
