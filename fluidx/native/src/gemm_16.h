/* `gemm` of 16-bit floats: the same pieces, by a product that the level has (product_16.h).
 *
 * words: those of gemm but the tail, then what A, B and C hold, then the tail */

enum { GEMM_16_WORDS = GEMM_WORDS + 3 };

typedef struct {
    Product p;
    Product16Fn product;
} Gemm16;

static void run_tail_16(void *tail, const void *at, int64_t rows, int64_t columns, int64_t apart) {
    vm_part_f32(tail, at, rows, columns, apart);
}

static void gemm_16_pieces(void *ctx, int64_t begin, int64_t end) {
    Gemm16 *g = ctx;
    const Product *p = &g->p;
    const int64_t *a = p->a, *is = a + GEMM_WORDS - 1;
    Product16 one = {.k = a[4], .alpha = (float)as_double(a[5]), .beta = (float)as_double(a[10]), .a = {.turned = a[0], .ld = a[7], .is = is[0]},
                     .b = {.turned = a[1], .ld = a[9], .is = is[1]}, .ldc = a[12], .c_is = is[2], .tail = p->tail, .run_tail = run_tail_16};
    for (int64_t i = begin; i < end; i++) {
        int64_t item = i / p->pieces, o = item / a[17], in = item % a[17], piece = i % p->pieces;
        int64_t r = piece / p->across * p->rows, c = piece % p->across * p->columns;
        one.m = a[2] - r < p->rows ? a[2] - r : p->rows, one.n = a[3] - c < p->columns ? a[3] - c : p->columns;
        one.a.at = PTR(const char, a[6]) + (o * a[14] + in * a[18]) * bytes_16(is[0]);
        one.b.at = PTR(const char, a[8]) + (o * a[15] + in * a[19]) * bytes_16(is[1]);
        one.a.at = at_16(&one.a, r, 0), one.b.at = at_16(&one.b, 0, c);
        one.c = PTR(char, a[11]) + (o * a[16] + in * a[20] + r * a[12] + c) * bytes_16(is[2]);
        if (g->product(&one)) g->p.failed = 1;
    }
}

void LEVEL(gemm_16_with)(const int64_t *a, Team *team, Product16Fn product) {
    if ((team->error = NO_PRODUCT(blas_f32))) return;
    if (a[2] < 1 || a[3] < 1 || a[13] < 1 || a[17] < 1) return;
    Tail tail;
    Gemm16 g = {{.a = a, .rows = a[2], .columns = a[3], .tail = tail_of(a[GEMM_16_WORDS - 1], a[11], VM_BYTES / sizeof(float), &tail)}, product};
    Product *p = &g.p;
    gemm_cut(p, team->threads);
    p->across = (a[3] - 1) / p->columns + 1;
    p->pieces = p->across * ((a[2] - 1) / p->rows + 1);
    double flops = 2.0 * (double)a[2] * (double)a[3] * (double)a[4];
    int64_t grain = p->pieces > 1 ? 1 : (int64_t)(6e5 / (flops + 1.0)) + 1;
    parallel_for(team, a[13] * a[17] * p->pieces, grain, gemm_16_pieces, &g);
    tail_done(p->tail, team);
    if (p->failed) team->error = "out of memory";
}

static void gemm_16(const int64_t *a, Team *team) { LEVEL(gemm_16_with)(a, team, LEVEL(product_16)); }
