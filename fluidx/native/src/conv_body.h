/* conv.h for one type: T, FN(name), BLAS. */

/* -- pieces ------------------------------------------------------------------------------------------------------------------------- */

/* C = op(A) B + beta C: 0, or -1 without memory. A BLAS multiplies blocks that it need not copy, and is a little faster at them than
 * `product`. */
static int FN(multiply)(int ta, int64_t m, int64_t n, int64_t k, const T *a, int64_t lda, const T *b, int64_t ldb, T beta, T *c,
                        int64_t ldc) {
    if (!BLAS) return FN(product)(ta, 0, m, n, k, 1, a, lda, b, ldb, beta, c, ldc);
    for (int64_t j = 0; j < n; j += PANEL)
        for (int64_t l = 0; l < k; l += DEPTH)
            for (int64_t i = 0; i < m; i += ROWS) {
                const T *from = a + (ta ? l * lda + i : i * lda + l);
                BLAS(101, ta ? 112 : 111, 111, at_most(m - i, ROWS), at_most(n - j, PANEL), at_most(k - l, DEPTH), 1, from, lda,
                     b + l * ldb + j, ldb, l ? 1 : beta, c + i * ldc + j, ldc);
            }
    return 0;
}

/* y [columns][rows] = x [rows][columns], rows `from` and `to` apart, in tiles that fill cache lines on both sides. */
static void FN(turn_part)(const T *x, int64_t from, int64_t rows, int64_t columns, T *y, int64_t to) {
    for (int64_t c = 0; c < columns; c += 16)
        for (int64_t r = 0; r < rows; r += 16) {
            if (r + 16 <= rows && c + 16 <= columns) {
                T t[16][16];
                for (int i = 0; i < 16; i++)
                    for (int j = 0; j < 16; j++) t[i][j] = x[(r + i) * from + c + j];
#if HAVE_FMA
                static const int64_t row[16] = {0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240};
                for (int j = 0; j < 16; j += 16 / sizeof(T))
                    for (int i = 0; i < 16; i += FN(LANES)) FN(product_turn)(t[i] + j, row, y + (c + j) * to + r + i, to);
#else
                for (int j = 0; j < 16; j++)
                    for (int i = 0; i < 16; i++) y[(c + j) * to + r + i] = t[i][j];
#endif
            } else {
                for (int64_t j = c; j < columns && j < c + 16; j++)
                    for (int64_t i = r; i < rows && i < r + 16; i++) y[j * to + i] = x[i * from + j];
            }
        }
}
static void FN(turn)(const T *x, int64_t rows, int64_t columns, T *y) { FN(turn_part)(x, columns, rows, columns, y, rows); }

INLINE void FN(clear)(T *x, int64_t n) { memset(x, 0, (size_t)n * sizeof(T)); }
INLINE void FN(move)(T *y, const T *x, int64_t n) { memcpy(y, x, (size_t)n * sizeof(T)); }

/* An image with its channels last: itself, or turned into `room`. */
INLINE const T *FN(pixels)(const T *x, int64_t nhwc, int64_t c, int64_t size, T *room) {
    if (nhwc || c == 1 || size == 1) return x;
    FN(turn)(x, c, size, room);
    return room;
}

/* An image as [c][h][w]: itself, or turned into `room`. */
INLINE const T *FN(channels)(const T *x, int64_t nhwc, int64_t c, int64_t size, T *room) {
    if (!nhwc || c == 1 || size == 1) return x;
    FN(turn)(x, size, c, room);
    return room;
}

/* The windows that find tap `t` of an axis inside the image: [lo, hi). */
INLINE void FN(seen)(int64_t size, int64_t out, int64_t offset, int64_t stride, int64_t *lo, int64_t *hi) {
    *lo = at_most(out, offset < 0 ? up_div(-offset, stride) : 0);
    *hi = at_least(*lo, at_most(out, size > offset ? (size - 1 - offset) / stride + 1 : 0));
}

/* Sizes of an image with the padding that its windows read. */
INLINE int64_t FN(tall)(const Conv *k) { return (k->oh - 1) * k->sh + (k->kh - 1) * k->dh + 1; }
INLINE int64_t FN(wide)(const Conv *k) { return (k->ow - 1) * k->sw + (k->kw - 1) * k->dw + 1; }

/* Planes with zeros around them: then no window needs to be looked at. Rows are copied TILE_LANES at a time, beyond their end, where zeros
 * and the next row are written then; not the last ones of the image, behind which nothing may be read. */
static void FN(pad)(const Conv *k, const T *x, T *to) {
    int64_t tall = FN(tall)(k), wide = FN(wide)(k), some = at_least(0, at_most(k->w, wide - k->left));
    const T *end = x + k->c * k->h * k->w;
    for (int64_t c = 0; c < k->c; c++)
        for (int64_t y = -k->top; y < tall - k->top; y++, to += wide) {
            if (y < 0 || y >= k->h) {
                FN(clear)(to, wide);
                continue;
            }
            const T *from = x + (c * k->h + y) * k->w;
            for (int64_t i = 0; i < at_most(k->left, wide); i++) to[i] = 0;
            if (end - from >= some + TILE_LANES)
                for (int64_t i = 0; i < some; i += TILE_LANES)
                    LANEWISE for (int l = 0; l < TILE_LANES; l++) to[k->left + i + l] = from[i + l];
            else
                FN(move)(to + k->left, from, some);
            for (int64_t i = k->left + some; i < wide; i++) to[i] = 0;
        }
}

typedef struct {
    Conv k;
    const T *in, *filter;
    T *out, *scratch;
    int64_t ci, co, ih, iw, oh, ow, top, left; /* of the convolution that is done, which for `back` is that of the gradient */
    int64_t back, parts, group;
    int failed;
    struct FN(Grid) *grids;
    int64_t n_grids, pitch, plane, planes, height, above, before;
    Tail *tail;
} FN(Job);

/* `rows` of `columns` elements of what is made are complete, `apart` elements apart. */
INLINE void FN(complete)(const FN(Job) *j, const T *at, int64_t rows, int64_t columns, int64_t apart) {
    if (j->tail) FN(vm_part)(j->tail, at, rows, columns, apart);
}

#include "conv_pieces_body.h"
#include "winograd_body.h"
#include "conv_pixel_body.h"
#include "conv_shifted_body.h"
#include "conv_columns_body.h"
#include "conv_direct_body.h"
#include "conv_few_body.h"

/* -- the kernels --------------------------------------------------------------------------------------------------------------------- */

static FN(Job) FN(job)(const int64_t *a, int64_t back) {
    Conv k = conv_of(a);
    FN(Job) j = {.k = k, .in = PTR(T, a[0]), .filter = PTR(T, a[1]), .out = PTR(T, a[2]), .scratch = PTR(T, a[21]), .ci = k.c, .co = k.o,
                 .ih = k.h, .iw = k.w, .oh = k.oh, .ow = k.ow, .top = k.top, .left = k.left, .back = back};
    if (back && k.way <= PIXEL) { /* a convolution of the gradient with the filter turned over */
        j.in = PTR(T, a[2]), j.out = PTR(T, a[0]), j.ci = k.o, j.co = k.c, j.ih = k.oh, j.iw = k.ow, j.oh = k.h, j.ow = k.w;
        j.top = (k.kh - 1) * k.dh - k.top, j.left = (k.kw - 1) * k.dw - k.left;
    }
    return j;
}

static void FN(conv_images)(const int64_t *a, Team *team, int64_t back) {
    FN(Job) j = FN(job)(a, back);
    if (j.k.way < DIRECT && (team->error = NO_PRODUCT(BLAS))) return;
    Tail tail;
    j.tail = tail_of(a[CONV_WORDS], a[back ? 0 : 2], FN(VM_BLOCK), &tail);
    int64_t flops = 2 * j.k.o * j.k.c / j.k.groups * j.k.kh * j.k.kw * j.k.oh * j.k.ow;
    if (j.k.way <= WINOGRAD_4) {
        FN(winograd)(&j, team);
    } else if (j.k.way == SHIFTED) {
        FN(shifted)(&j, team);
    } else if (j.k.way == PIXEL || (j.k.way == COLUMNS && !back)) {
        FN(Cut) cut = FN(cut)(&j, SHARERS(team));
        parallel_for(team, cut.items, cut.grain, j.k.way == PIXEL ? FN(pixel_run) : FN(columns_run), &cut);
    } else if (j.k.way == FEW) {
        FN(few)(&j, team);
    } else if (j.k.way == COLUMNS) {
        parallel_for(team, j.k.n, 500000 / at_least(flops, 1) + 1, FN(columns_back), &j);
    } else {
        parallel_for(team, j.k.n * j.k.c, 50000 * j.k.c / at_least(flops, 1) + 1, FN(direct_run), &j);
    }
    tail_done(j.tail, team);
    if (j.failed) team->error = "out of memory";
}

static void FN(conv)(const int64_t *a, Team *team) { FN(conv_images)(a, team, 0); }
static void FN(conv_back)(const int64_t *a, Team *team) { FN(conv_images)(a, team, 1); }

static void FN(add_parts)(void *ctx, int64_t begin, int64_t end) {
    const FN(Job) *j = ctx;
    int64_t size = j->k.o * (j->k.c / j->k.groups) * j->k.kh * j->k.kw;
    T *to = (T *)j->filter;
    for (int64_t i = begin; i < end; i++) {
        T sum = 0;
        for (int64_t p = 0; p < j->parts; p++) sum += j->scratch[p * size + i];
        to[i] = sum;
    }
}

static void FN(conv_filter)(const int64_t *a, Team *team) {
    FN(Job) j = FN(job)(a, 0);
    if (j.k.way < DIRECT && (team->error = NO_PRODUCT(BLAS))) return;
    int64_t size = j.k.o * (j.k.c / j.k.groups) * j.k.kh * j.k.kw;
    if (j.k.way == WINOGRAD) {
        FN(winograd_filter)(&j, team);
    } else if (j.k.way == SHIFTED) {
        FN(shifted_filter)(&j, team);
    } else if (j.k.way == PIXEL || j.k.way == COLUMNS) {
        j.parts = conv_parts(j.k.n, size * (int64_t)sizeof(T));
        j.group = FN(group_of)(&j.k, PIECE_ROWS);
        parallel_for(team, j.parts, 1, j.k.way == PIXEL ? FN(pixel_sums) : FN(columns_sums), &j);
        parallel_for(team, size, 8192, FN(add_parts), &j);
    } else {
        parallel_for(team, j.k.o, 1, FN(direct_sums), &j);
    }
    if (j.failed) team->error = "out of memory";
}
