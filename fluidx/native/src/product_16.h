/* C = alpha op(A) op(B) + beta C of one pair of matrices, row major, most of 16-bit floats, on the calling thread.
 *
 * A block of B is copied first, and then rows of A a few at a time: as pairs of bfloat16 along k for AVX512_BF16 and AMX (pairs_16.h), as
 * float32 elsewhere and for float16 (wide_16.h). The sums are float32 in the second-level cache. From there they are rounded to C, over which
 * the tail runs if there is one.
 *
 * Each element is a chain along k, whose order follows from k and the level alone. Hence its bits do not depend on the shape of the
 * product, nor on how it is cut into pieces. AVX512_BF16 and AMX take subnormal numbers for 0. */

enum { AS_F32, AS_BF16, AS_F16, AS_ROUNDED }; /* what a matrix holds; the last is float32 that counts as rounded to bfloat16 */
enum { WIDTH_16 = 512, DEPTH_16 = 2048 }; /* a block of B: columns and rows at most; BLOCK_16: bytes */

/* turned: it stands transposed in memory. Lines of it there are `ld` elements apart; those of a B may lie anywhere, in this case at `lines`. */
typedef struct {
    const char *at;
    int64_t turned, ld, is;
    const int64_t *lines;
} Side16;

typedef struct {
    int64_t m, n, k;
    float alpha, beta;
    Side16 a, b;
    char *c;
    int64_t ldc, c_is;
    void *tail; /* for parts of C that are complete now, or NULL, and what runs it */
    void (*run_tail)(void *tail, const void *at, int64_t rows, int64_t columns, int64_t apart);
} Product16;
typedef int (*Product16Fn)(const Product16 *p); /* 0, or -1 without memory */

/* Rows of A as they are multiplied: `apart` between them; or, where `across`, between columns of A */
typedef struct {
    const char *at;
    int64_t apart;
    int across;
} Rows16;

INLINE int64_t bytes_16(int64_t is) { return is == AS_BF16 || is == AS_F16 ? 2 : 4; }
INLINE int64_t up_to_16(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

INLINE int64_t line_16(const Side16 *x, int64_t line) { return x->lines ? x->lines[line] : line * x->ld; }

/* The address of op(X)[row][column] */
INLINE const char *at_16(const Side16 *x, int64_t row, int64_t column) {
    return x->at + (x->turned ? line_16(x, column) + row : line_16(x, row) + column) * bytes_16(x->is);
}

/* A line of n elements as float32, and back */
INLINE void line_as_f32(float *to, const char *from, int64_t is, int64_t n) {
    if (is == AS_F32)
        memcpy(to, from, (size_t)n * sizeof *to);
    else if (is == AS_BF16)
        line_of_bf16_f32(to, (const uint16_t *)from, n);
    else if (is == AS_ROUNDED)
        IVDEP for (int64_t i = 0; i < n; i++) to[i] = float_of_bf16(bf16_of_float(((const float *)from)[i]));
    else
        line_of_f16_f32(to, (const uint16_t *)from, n);
}
INLINE void f32_as_line(char *to, const float *from, int64_t is, int64_t n) {
    if (is == AS_F32)
        memcpy(to, from, (size_t)n * sizeof *from);
    else if (is == AS_BF16)
        bf16_of_line_f32((uint16_t *)to, from, n);
    else
        f16_of_line_f32((uint16_t *)to, from, n);
}

#if HAVE_PAIRS
#include "pairs_16.h"
#else
#include "wide_16.h"
#endif
#if HAVE_PAIRS || !HAVE_FMA
INLINE int64_t most_rows_16(int64_t k, int64_t turned) { return (void)k, (void)turned, ROWS_16; }
INLINE int64_t rows_room_16(int64_t rows, int64_t most) { return up_to_16(rows, 16) * (most + 128); }

/* Sums of rows of A times a block of B; `more`: on top of those that are there */
static void rows_16(int64_t all, const Side16 *a, int64_t i, int64_t rows, int64_t k0, int64_t k, char *room, const char *b, int64_t n,
                    float *sums, int64_t ld, int more) {
    times_16(all, rows, n, k, pack_a_16(a, i, rows, k0, k, room), b, sums, ld, more);
}
#endif

/* Sums of some rows become rows of C. */
static void finish_16(const Product16 *p, float *sums, int64_t apart, int64_t row, int64_t column, int64_t rows, int64_t n) {
    int64_t size = bytes_16(p->c_is);
    float there[WIDTH_16];
    char *c = p->c + (row * p->ldc + column) * size;
    for (int64_t r = 0; r < rows; r++, sums += apart, c += p->ldc * size) {
        if (p->alpha != 1)
            IVDEP for (int64_t j = 0; j < n; j++) sums[j] *= p->alpha;
        if (p->beta != 0) {
            line_as_f32(there, c, p->c_is, n);
            IVDEP for (int64_t j = 0; j < n; j++) sums[j] += p->beta * there[j];
        }
        f32_as_line(c, sums, p->c_is, n);
    }
}

/* Memory for a block of B, for rows of A, and for sums: of all rows where k comes in several blocks */
typedef struct {
    int64_t deep, wide, rows, blocks; /* of a block of B; rows at a time; blocks along k */
    char *b, *a;
    float *sums;
} Room16;

static int room_16(const Product16 *p, Room16 *o) {
    o->deep = deep_16(p->k), o->blocks = p->k ? (p->k - 1) / o->deep + 1 : 1;
    int64_t most = up_to_16(o->blocks > 1 ? o->deep : p->k, KEYS_16) * PACKED_16, wide = BLOCK_16 / (most + 1) / PANEL_16 * PANEL_16;
    wide = wide < 2 * PANEL_16 ? 2 * PANEL_16 : wide > WIDTH_16 ? WIDTH_16 : wide;
    o->wide = wide < up_to_16(p->n, PANEL_16) ? wide : up_to_16(p->n, PANEL_16);
    int64_t rows = most_rows_16(p->k, p->a.turned);
    o->rows = rows < p->m ? rows : p->m;
    int64_t b = o->wide * most, a = rows_room_16(o->rows, most), held = up_to_16(o->blocks > 1 ? p->m : o->rows, 32);
    o->b = own_memory(PANELS, (size_t)(up_to_16(b, 64) + up_to_16(a, 64) + held * o->wide * (int64_t)sizeof(float)));
    if (!o->b) return -1;
    o->a = o->b + up_to_16(b, 64), o->sums = (float *)(o->a + up_to_16(a, 64));
    return 0;
}

int LEVEL(product_16)(const Product16 *p) {
    Room16 o;
    if (room_16(p, &o)) return -1;
    begin_16();
    for (int64_t j = 0; j < p->n; j += o.wide) {
        int64_t n = p->n - j < o.wide ? p->n - j : o.wide;
        for (int64_t block = 0; block < o.blocks; block++) {
            int64_t k0 = block * o.deep, deep = p->k - k0 < o.deep ? p->k - k0 : o.deep;
            pack_b_16(&p->b, p->k, k0, deep, j, n, o.b);
            for (int64_t i = 0; i < p->m; i += o.rows) {
                int64_t rows = p->m - i < o.rows ? p->m - i : o.rows;
                float *sums = o.sums + (o.blocks > 1 ? i * o.wide : 0);
                rows_16(p->k, &p->a, i, rows, k0, deep, o.a, o.b, n, sums, o.wide, block > 0);
                if (block + 1 < o.blocks) continue;
                finish_16(p, sums, o.wide, i, j, rows, n);
                if (p->tail) p->run_tail(p->tail, p->c + (i * p->ldc + j) * bytes_16(p->c_is), rows, n, p->ldc);
            }
        }
    }
    end_16();
    return 0;
}
