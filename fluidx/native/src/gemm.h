/* C = alpha op(A) op(B) + beta C over a batch, row major, by the BLAS of NumPy; the split over threads is ours.
 *
 * The library runs at one thread: its own pool and ours would fight for the cores. A product is cut into
 * pieces of C, each time across its longer side, so that little is packed twice. How many follows from the shape alone: the library's
 * rounding can depend on the shape of a piece. Where it was seen not to (`blas_even`, of large pieces), one thread does the whole product at once. */

enum { GEMM_WORDS = 21 };

/* Products of at most 1e6 multiplications take another path through OpenBLAS, with sums in another order. */
static const double GEMM_EVEN = 1.5e6;

typedef struct {
    const int64_t *a;
    int64_t rows, columns; /* of one piece */
    int64_t across, pieces; /* pieces in one row of them, and of one product */
} Product;

/* Half of a side, in multiples of 16: no kernel of the library has an odd edge but at the end. */
static int64_t gemm_half(int64_t side) { return (side / 2 + 15) / 16 * 16; }

static Product gemm_plan(const int64_t *a, int threads, int64_t *grain) {
    int64_t m = a[2], n = a[3];
    Product p = {a, m, n, 1, 1};
    double flops = 2.0 * (double)m * (double)n * (double)a[4];
    if (a[13] * a[17] < 8) {
        int halvings = flops < 6e5 ? 0 : flops < 2e8 ? 1 : flops < 3e9 ? 2 : flops < 3e10 ? 3 : flops < 3e11 ? 4 : 6;
        while (halvings-- && (p.rows > 31 || p.columns > 31)) {
            if (p.rows >= p.columns)
                p.rows = gemm_half(p.rows);
            else
                p.columns = gemm_half(p.columns);
        }
    }
    double last = (double)(m - (m - 1) / p.rows * p.rows) * (double)(n - (n - 1) / p.columns * p.columns) * (double)a[4];
    if (threads < 2 && blas_even && last > GEMM_EVEN) p.rows = m, p.columns = n;
    p.across = (n - 1) / p.columns + 1;
    p.pieces = p.across * ((m - 1) / p.rows + 1);
    *grain = p.pieces > 1 ? 1 : (int64_t)(6e5 / (flops + 1.0)) + 1;
    return p;
}

#define GEMM(NAME, T, CALL)                                                                                                             \
    static void NAME##_pieces(void *ctx, int64_t begin, int64_t end) {                                                                  \
        const Product *p = ctx;                                                                                                         \
        const int64_t *a = p->a, m = a[2], n = a[3], k = a[4], lda = a[7], ldb = a[9], ldc = a[12];                                      \
        for (int64_t i = begin; i < end; i++) {                                                                                         \
            int64_t item = i / p->pieces, o = item / a[17], in = item % a[17], piece = i % p->pieces, r = piece / p->across * p->rows, c = piece % p->across * p->columns;     \
            const T *A = PTR(const T, a[6]) + o * a[14] + in * a[18] + (a[0] ? r : r * lda);                                                       \
            const T *B = PTR(const T, a[8]) + o * a[15] + in * a[19] + (a[1] ? c * ldb : c);                                                       \
            T *C = PTR(T, a[11]) + o * a[16] + in * a[20] + r * ldc + c;                                                                          \
            CALL(101, a[0] ? 112 : 111, a[1] ? 112 : 111, m - r < p->rows ? m - r : p->rows,                                      \
                 n - c < p->columns ? n - c : p->columns, k, (T)as_double(a[5]), A, lda, B, ldb, (T)as_double(a[10]), C, ldc);                                                                                   \
        }                                                                                                                               \
    }                                                                                                                                   \
    /* transA, transB, M, N, K, alpha, A, lda, B, ldb, beta, C, ldc; batch, the strides of A, B and C in it; inner batch, its strides */              \
    static void NAME(const int64_t *a, Team *team) {                                                                                    \
        if (!CALL) {                                                                                                                    \
            team->error = "no BLAS was found";                                                                                          \
            return;                                                                                                                     \
        }                                                                                                                               \
        if (a[2] < 1 || a[3] < 1 || a[13] < 1 || a[17] < 1) return;                                                                                   \
        int64_t grain;                                                                                                                  \
        Product p = gemm_plan(a, team->threads, &grain);                                                                                               \
        parallel_for(team, a[13] * a[17] * p.pieces, grain, NAME##_pieces, &p);                                                                  \
    }

GEMM(gemm_f32, float, blas_f32)
GEMM(gemm_f64, double, blas_f64)
