/* C = alpha op(A) op(B) + beta C of one pair of matrices, row major, on the calling thread.
 *
 * At levels with fused multiply-add it is our own. A tile of C, a few rows by two vectors, stays in registers while k runs; rows of A are
 * broadcast from where they lie, and B is copied first to panels as wide as a tile, which stay in the second-level cache while all rows
 * of A pass over them. Where B or A is small, or few rows use it, it is read in place. Source of the scheme: Goto and van de Geijn,
 * "Anatomy of high-performance matrix multiplication", 2008.
 *
 * Each element is a chain of fused multiply-adds along k, cut into parts whose length follows from k alone. Hence its bits do not depend
 * on the shape of the product, nor on how it is cut into pieces, nor on the level.
 *
 * At other levels it is the product of the BLAS of NumPy. */

enum { PRODUCT_DEPTH = 256, PRODUCT_WIDTH = 512 }; /* of a block of B that is copied */
/* What is read in place, in bytes: a matrix that spans so many; a B whose rows are so long that, times the tiles along A, it is at most this */
enum { PRODUCT_CLOSE = 64 << 10, PRODUCT_PASSES = 64 << 10 };
enum { PRODUCT_AHEAD = 12, PRODUCT_LONG = 96 }; /* steps along k that B is fetched ahead; from how many on C is */
enum { PRODUCT_STRIDE = 16, PRODUCT_LINES = 2 }; /* every so many steps, so many lines of what is read next */
enum { TURNED_COLUMNS = 16, TURNED_ROWS = 256 }; /* of a strip of C that is made as its transpose */

#if HAVE_FMA

typedef struct {
    double alpha, beta;
    int whole; /* all lanes of the last vector are in C */
    int64_t lanes; /* so many are */
    Tail *tail; /* for parts of C that are complete now */
    const char *next, *next_stop; /* to be fetched into the second-level cache meanwhile, not all at once: that would hold the tile up */
} Finish;

/* So many rows of memory, to be fetched */
typedef struct {
    const char *at;
    int64_t bytes, apart, count;
} Fetch;

/* Rows of a tile, between columns of a copied part of A, tiles that A is copied for at once; up to how many rows a tile may be wider, and the
 * vectors in one of 1 to 3 rows */
#define QUARTER(f, at) _mm_loadu_ps((const float *)((f) + (at)))
#if HAVE_512
enum { TILE_ROWS = 14, TILE_PITCH = 16, TILE_GROUP = 4, TILE_FEW = 6, TILE_MANY = 8 };
/* 16 bytes from each of the rows i, i + step, ... */
#define QUARTERS(f, row, i, step)                                                                                                       \
    _mm512_mask_broadcast_f32x4(                                                                                                        \
        _mm512_mask_broadcast_f32x4(_mm512_mask_broadcast_f32x4(_mm512_castps128_ps512(QUARTER(f, row[i])), 0x00f0,                     \
                                                                QUARTER(f, row[i + step])),                                             \
                                    0x0f00, QUARTER(f, row[i + 2 * step])),                                                             \
        0xf000, QUARTER(f, row[i + 3 * step]))
#define PS __m512
#define PD __m512d
#define PS_(name) _mm512_##name##_ps
#define PD_(name) _mm512_##name##_pd
#define TO_PS(v) _mm512_castpd_ps(v)
#define TO_PD(v) _mm512_castps_pd(v)
#define LANES_OF(T) (64 / (int)sizeof(T))
#define MASK_PS __mmask16
#define MASK_PD __mmask8
#define FIRST_PS(n) ((__mmask16)((1u << (n)) - 1))
#define FIRST_PD(n) ((__mmask8)((1u << (n)) - 1))
#define LOAD_PS(p, mask) _mm512_maskz_loadu_ps(mask, p)
#define LOAD_PD(p, mask) _mm512_maskz_loadu_pd(mask, p)
#define STORE_PS(p, mask, v) _mm512_mask_storeu_ps(p, mask, v)
#define STORE_PD(p, mask, v) _mm512_mask_storeu_pd(p, mask, v)
#else
enum { TILE_ROWS = 6, TILE_PITCH = 8, TILE_GROUP = 4, TILE_FEW = 3, TILE_MANY = 4 };
#define QUARTERS(f, row, i, step) _mm256_insertf128_ps(_mm256_castps128_ps256(QUARTER(f, row[i])), QUARTER(f, row[i + step]), 1)
static const int32_t PRODUCT_MASK[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
#define PS __m256
#define PD __m256d
#define PS_(name) _mm256_##name##_ps
#define PD_(name) _mm256_##name##_pd
#define TO_PS(v) _mm256_castpd_ps(v)
#define TO_PD(v) _mm256_castps_pd(v)
#define LANES_OF(T) (32 / (int)sizeof(T))
#define MASK_PS __m256i
#define MASK_PD __m256i
#define FIRST_PS(n) _mm256_loadu_si256((const __m256i *)(PRODUCT_MASK + 8 - (n)))
#define FIRST_PD(n) _mm256_loadu_si256((const __m256i *)(PRODUCT_MASK + 8 - 2 * (n)))
#define LOAD_PS(p, mask) _mm256_maskload_ps(p, mask)
#define LOAD_PD(p, mask) _mm256_maskload_pd(p, mask)
#define STORE_PS(p, mask, v) _mm256_maskstore_ps(p, mask, v)
#define STORE_PD(p, mask, v) _mm256_maskstore_pd(p, mask, v)
#endif

/* Columns of 16 bytes of as many rows as a vector has lanes, turned: each becomes a vector at `to`, `pitch` apart. */
INLINE void product_turn_f32(const float *f, const int64_t *row, float *to, int64_t pitch) {
    PS a = QUARTERS(f, row, 0, 4), b = QUARTERS(f, row, 1, 4), c = QUARTERS(f, row, 2, 4), d = QUARTERS(f, row, 3, 4);
    PD ab = TO_PD(PS_(unpacklo)(a, b)), cd = TO_PD(PS_(unpacklo)(c, d));
    PS_(storeu)(to, TO_PS(PD_(unpacklo)(ab, cd)));
    PS_(storeu)(to + pitch, TO_PS(PD_(unpackhi)(ab, cd)));
    ab = TO_PD(PS_(unpackhi)(a, b)), cd = TO_PD(PS_(unpackhi)(c, d));
    PS_(storeu)(to + 2 * pitch, TO_PS(PD_(unpacklo)(ab, cd)));
    PS_(storeu)(to + 3 * pitch, TO_PS(PD_(unpackhi)(ab, cd)));
}

INLINE void product_turn_f64(const double *f, const int64_t *row, double *to, int64_t pitch) {
    PD a = TO_PD(QUARTERS(f, row, 0, 2)), b = TO_PD(QUARTERS(f, row, 1, 2));
    PD_(storeu)(to, PD_(unpacklo)(a, b));
    PD_(storeu)(to + pitch, PD_(unpackhi)(a, b));
}

#define T float
#define FN(name) name##_f32
#define V PS
#define OP PS_
#define MASK MASK_PS
#define FIRST FIRST_PS
#define LOAD_FIRST LOAD_PS
#define STORE_FIRST STORE_PS
#include "product_body.h"
#undef T
#undef FN
#undef V
#undef OP
#undef MASK
#undef FIRST
#undef LOAD_FIRST
#undef STORE_FIRST

#define T double
#define FN(name) name##_f64
#define V PD
#define OP PD_
#define MASK MASK_PD
#define FIRST FIRST_PD
#define LOAD_FIRST LOAD_PD
#define STORE_FIRST STORE_PD
#include "product_body.h"
#undef T
#undef FN
#undef V
#undef OP
#undef MASK
#undef FIRST
#undef LOAD_FIRST
#undef STORE_FIRST

#define NO_PRODUCT(blas) NULL

#else

#define PRODUCT(NAME, T, CALL, PART)                                                                                                         \
    static int NAME(int64_t ta, int64_t tb, int64_t m, int64_t n, int64_t k, T alpha, const T *a, int64_t lda, const T *b, int64_t ldb, \
                    T beta, T *c, int64_t ldc, Tail *tail) {                                                                            \
        CALL(101, ta ? 112 : 111, tb ? 112 : 111, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                                        \
        if (tail) PART(tail, c, m, n, ldc);                                                                                             \
        return 0;                                                                                                                       \
    }
PRODUCT(product_then_f32, float, blas_f32, vm_part_f32)
PRODUCT(product_then_f64, double, blas_f64, vm_part_f64)

/* What is in the way of products, or NULL */
#define NO_PRODUCT(blas) ((blas) ? NULL : "no BLAS was found")

#endif

#define WITHOUT_TAIL(NAME, T, THEN)                                                                                                     \
    static int NAME(int64_t ta, int64_t tb, int64_t m, int64_t n, int64_t k, T alpha, const T *a, int64_t lda, const T *b, int64_t ldb, \
                    T beta, T *c, int64_t ldc) {                                                                                        \
        return THEN(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, NULL);                                                        \
    }
WITHOUT_TAIL(product_f32, float, product_then_f32)
WITHOUT_TAIL(product_f64, double, product_then_f64)
