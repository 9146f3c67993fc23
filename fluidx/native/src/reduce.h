/* Sums, products, extrema and sums of squares over some axes of an array.
 *
 * The axes are four loops, k0 r0 k1 r1, of which the k are kept and the r reduced. What is added up in which order follows from sizes and
 * strides: columns are cut into pieces of REDUCE_COLUMNS, or REDUCE_GATHERED where they are not neighbours, rows into pieces of
 * REDUCE_PIECE, and where that gives few items, each result is made from panels. Floats are added up in float64 beyond the smallest
 * pieces, integers in int64.
 *
 * words: what to do, addresses of x and of the contiguous result, sizes k0 r0 k1 r1, strides in elements, a divisor, the formats of x and of the
 * result (halves.h), of which only kernels of floats have others than the plain one */

enum { R_SUM, R_MAX, R_MIN, R_PROD, R_SQUARES };
enum { REDUCE_WORDS = 13, REDUCE_COLUMNS = 1024, REDUCE_GATHERED = 256, REDUCE_PIECE = 4096, REDUCE_ITEMS = 16, REDUCE_LEAST = 16384 };

typedef struct {
    int op, by_columns;
    int64_t x, out, k0, r0, k1, r1, sk0, sr0, sk1, sr1;
    double divisor;
    int64_t width, chunks, pieces, units, panel, panels, items, grain;
    void *partial;
    int from, to; /* the formats */
} Reduce;

static Reduce reduce_plan(const int64_t *a, size_t bytes) {
    Reduce p = {.op = (int)a[0], .x = a[1], .out = a[2], .k0 = a[3], .r0 = a[4], .k1 = a[5], .r1 = a[6], .sk0 = a[7], .sr0 = a[8],
                .sk1 = a[9], .sr1 = a[10], .divisor = as_double(a[11]), .pieces = 1,
                .from = FORMAT(a[12], 0), .to = FORMAT(a[12], 1)};
    p.by_columns = p.r1 == 1 && p.k1 > 1;
    p.width = p.sk1 == 1 ? REDUCE_COLUMNS : REDUCE_GATHERED;
    p.chunks = p.by_columns ? (p.k1 + p.width - 1) / p.width : p.k1;
    if (!p.by_columns) p.pieces = (p.r1 + REDUCE_PIECE - 1) / REDUCE_PIECE;
    p.units = p.r0 * p.pieces;
    double each = (double)p.r0 * (double)p.r1 * (p.by_columns ? (double)p.k1 / (double)p.chunks : 1);
    int64_t items = p.k0 * p.chunks, least = p.units ? (int64_t)(REDUCE_LEAST / (each / (double)p.units + 1)) + 1 : 1;
    int64_t wanted = items > 0 && items < REDUCE_ITEMS ? REDUCE_ITEMS / items : 1;
    p.panel = (p.units + wanted - 1) / wanted;
    if (p.panel < least) p.panel = least;
    if (p.by_columns) p.panel = (p.panel + 7) / 8 * 8;
    p.panels = p.units > p.panel ? (p.units + p.panel - 1) / p.panel : 1;
    p.items = items * p.panels;
    p.grain = grain_of(each / (double)p.panels * 0.05 * (double)bytes + 15);
    return p;
}

#define FLOAT 1
#define IS_NAN(x) ((x) != (x))
#define SAFE_IN_T 1
#define DIVIDED(x, by) ((x) / (by))
#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * (b))
#define NONE(low, high) op == R_MAX ? low : op == R_MIN ? high : op == R_PROD ? 1 : 0
#define T float
#define ACC double
#define FN(name) name##_f32
INLINE ACC FN(none)(int op) { return NONE(-INFINITY, INFINITY); }
#include "reduce_body.h"
#undef T
#undef FN
#define T double
#define FN(name) name##_f64
INLINE ACC FN(none)(int op) { return NONE(-INFINITY, INFINITY); }
#include "reduce_body.h"
#undef T
#undef FN
#undef FLOAT
#undef IS_NAN
#undef ACC
#undef DIVIDED
#undef PLUS
#undef TIMES
#undef SAFE_IN_T

#define FLOAT 0
#define IS_NAN(x) 0
#define SAFE_IN_T (op == R_MAX || op == R_MIN) /* sums of narrow integers wrap around once, at the end */
#define DIVIDED(x, by) (x)
#define PLUS(a, b) ((int64_t)((uint64_t)(a) + (uint64_t)(b))) /* wraps around, as NumPy's do */
#define TIMES(a, b) ((int64_t)((uint64_t)(a) * (uint64_t)(b)))
#define ACC int64_t
#define T int64_t
#define FN(name) name##_i64
INLINE ACC FN(none)(int op) { return NONE(INT64_MIN, INT64_MAX); }
#include "reduce_body.h"
#undef T
#undef FN
#define T int32_t
#define FN(name) name##_i32
INLINE ACC FN(none)(int op) { return NONE(INT32_MIN, INT32_MAX); }
#include "reduce_body.h"
#undef T
#undef FN
#define T uint8_t
#define FN(name) name##_u8
INLINE ACC FN(none)(int op) { return NONE(0, 255); }
#include "reduce_body.h"
#undef T
#undef FN
#undef FLOAT
#undef IS_NAN
#undef ACC
#undef NONE
#undef DIVIDED
#undef PLUS
#undef TIMES
#undef SAFE_IN_T
