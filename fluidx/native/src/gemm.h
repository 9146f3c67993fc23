/* C = alpha op(A) op(B) + beta C over a batch, row major, by `product`; the split over threads is here.
 *
 * Where `product` is our own, a product may be cut anywhere, and is as the threads like it. A BLAS may round as the shape of a piece has it:
 * then pieces follow from the shape of the product alone, each time across its longer side, so that little is packed twice. Where pieces
 * were seen to have the bits of the whole (`blas_even`, of large pieces), one thread does the whole product at once. */

enum { GEMM_WORDS = 22 };

typedef struct {
    const int64_t *a;
    int64_t rows, columns; /* of one piece */
    int64_t across, pieces; /* pieces in one row of them, and of one product */
    Tail *tail;
    int failed;
} Product;

#if HAVE_FMA

/* Pieces of 2.5 us or more, several for each thread. Columns are shared out first, because a piece packs those of B for itself, but not too
 * narrow: it packs a transposed A as well. */
static void gemm_cut(Product *p, int threads) {
    int64_t m = p->rows, n = p->columns, batch = p->a[13] * p->a[17];
    double flops = 2.0 * (double)m * (double)n * (double)p->a[4], most = flops / 5e5;
    if (threads < 2 || most < 2) return;
    int64_t wanted = ((flops * (double)batch < 2e8 ? 2 : 4) * (int64_t)threads - 1) / batch + 1, narrow = p->a[0] ? 256 : 128;
    wanted = (double)wanted < most ? wanted : (int64_t)most;
    int64_t across = n / narrow < wanted ? n / narrow : wanted;
    across = across < 1 ? 1 : across;
    int64_t down = (wanted - 1) / across + 1;
    p->columns = ((n - 1) / across / 32 + 1) * 32;
    p->rows = (m - 1) / down + 1;
}

#else

/* Products of at most 1e6 multiplications take another path through OpenBLAS, with sums in another order. */
static const double GEMM_EVEN = 1.5e6;

/* Half of a side, in multiples of 16: no kernel of the library has an odd edge but at the end. */
static int64_t gemm_half(int64_t side) { return (side / 2 + 15) / 16 * 16; }

static void gemm_cut(Product *p, int threads) {
    int64_t m = p->rows, n = p->columns, k = p->a[4];
    double flops = 2.0 * (double)m * (double)n * (double)k;
    if (p->a[13] * p->a[17] >= 8) return;
    int64_t halvings = flops < 6e5 ? 0 : flops < 2e8 ? 1 : flops < 3e9 ? 2 : flops < 3e10 ? 3 : flops < 3e11 ? 4 : 6;
    while (halvings-- && (p->rows > 31 || p->columns > 31)) {
        if (p->rows >= p->columns)
            p->rows = gemm_half(p->rows);
        else
            p->columns = gemm_half(p->columns);
    }
    double last = (double)(m - (m - 1) / p->rows * p->rows) * (double)(n - (n - 1) / p->columns * p->columns) * (double)k;
    if (threads < 2 && blas_even && last > GEMM_EVEN) p->rows = m, p->columns = n;
}

#endif

#define GEMM(NAME, T, CALL, BLAS)                                                                                                       \
    static void NAME##_pieces(void *ctx, int64_t begin, int64_t end) {                                                                  \
        Product *p = ctx;                                                                                                               \
        const int64_t *a = p->a, m = a[2], n = a[3], k = a[4], lda = a[7], ldb = a[9], ldc = a[12];                                     \
        for (int64_t i = begin; i < end; i++) {                                                                                         \
            int64_t item = i / p->pieces, o = item / a[17], in = item % a[17], piece = i % p->pieces;                                   \
            int64_t r = piece / p->across * p->rows, c = piece % p->across * p->columns;                                                \
            const T *A = PTR(const T, a[6]) + o * a[14] + in * a[18] + (a[0] ? r : r * lda);                                            \
            const T *B = PTR(const T, a[8]) + o * a[15] + in * a[19] + (a[1] ? c * ldb : c);                                            \
            T *C = PTR(T, a[11]) + o * a[16] + in * a[20] + r * ldc + c;                                                                \
            if (CALL(a[0], a[1], m - r < p->rows ? m - r : p->rows, n - c < p->columns ? n - c : p->columns, k, (T)as_double(a[5]), A,  \
                     lda, B, ldb, (T)as_double(a[10]), C, ldc, p->tail))                                                                         \
                p->failed = 1;                                                                                                          \
        }                                                                                                                               \
    }                                                                                                                                   \
    /* transA, transB, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc; batch, the strides of A, B and C in it; inner batch, its strides;    \
     * a tail for C or 0 */                                                                                                             \
    static void NAME(const int64_t *a, Team *team) {                                                                                    \
        if ((team->error = NO_PRODUCT(BLAS))) return;                                                                                   \
        if (a[2] < 1 || a[3] < 1 || a[13] < 1 || a[17] < 1) return;                                                                     \
        Tail tail;                                                                                                                      \
        Product p = {.a = a, .rows = a[2], .columns = a[3], .tail = tail_of(a[21], a[11], VM_BYTES / sizeof(T), &tail)};                 \
        gemm_cut(&p, team->threads);                                                                                                    \
        p.across = (a[3] - 1) / p.columns + 1;                                                                                          \
        p.pieces = p.across * ((a[2] - 1) / p.rows + 1);                                                                                \
        double flops = 2.0 * (double)a[2] * (double)a[3] * (double)a[4];                                                                \
        int64_t grain = p.pieces > 1 ? 1 : (int64_t)(6e5 / (flops + 1.0)) + 1;                                                          \
        parallel_for(team, a[13] * a[17] * p.pieces, grain, NAME##_pieces, &p);                                                         \
        tail_done(p.tail, team);                                                                                                        \
        if (p.failed) team->error = "out of memory";                                                                                    \
    }

GEMM(gemm_f32, float, product_then_f32, blas_f32)
GEMM(gemm_f64, double, product_then_f64, blas_f64)
