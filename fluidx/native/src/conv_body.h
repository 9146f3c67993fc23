/* conv.h for one type: T, FN(name), BLAS. */

/* -- pieces ------------------------------------------------------------------------------------------------------------------------- */

/* What `product` does; small ones by the BLAS where there is one: up to 1e6 multiplications OpenBLAS copies nothing and is a little faster. */
static int FN(small_product)(int ta, int tb, int64_t m, int64_t n, int64_t k, const T *a, int64_t lda, const T *b, int64_t ldb, T beta, T *c,
                             int64_t ldc) {
    if (!BLAS || m * n * k > 1000000) return FN(product)(ta, tb, m, n, k, 1, a, lda, b, ldb, beta, c, ldc);
    BLAS(101, ta ? 112 : 111, tb ? 112 : 111, m, n, k, 1, a, lda, b, ldb, beta, c, ldc);
    return 0;
}

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

typedef struct {
    Conv k;
    const T *in, *filter;
    T *out, *scratch;
    int64_t ci, co, ih, iw, oh, ow, top, left; /* of the convolution that is done, which for `back` is that of the gradient */
    int64_t back, parts, group;
    int failed;
    struct FN(Grid) *grids;
    int64_t n_grids, pitch, plane, planes, height, above, before;
} FN(Job);

/* -- Winograd ------------------------------------------------------------------------------------------------------------------------ */

#include "winograd_body.h"

/* -- shifted products ---------------------------------------------------------------------------------------------------------------- */

/* A convolution at stride 1 over staged pixels: `rows` x `columns` results at every `step_y`, `step_x` from (y, x) on, and its taps. */
typedef struct FN(Grid) {
    int64_t rows, columns, y, x, step_y, step_x, taps;
    int64_t from[MOST_TAPS], tap[MOST_TAPS]; /* where in the staged pixels, and which of the filter */
} FN(Grid);

/* The filter as [taps][co / 64][ci][64]. Items are outputs. */
static void FN(shifted_filters)(void *ctx, int64_t begin, int64_t end) {
    const FN(Job) *j = ctx;
    int64_t taps = j->k.kh * j->k.kw, lane = j->back ? taps : j->ci * taps, step = j->back ? j->co * taps : taps;
    for (int64_t o = begin; o < end; o++) {
        int64_t first = o / PANEL * PANEL, width = at_most(PANEL, j->co - first);
        const T *from = j->filter + o * lane;
        T *to = j->scratch + first * j->ci + (o - first);
        for (int64_t c = 0; c < j->ci; c++)
            for (int64_t t = 0; t < taps; t++) to[t * j->ci * j->co + c * width] = from[c * step + t];
    }
}

/* Lay an image out, pixel by pixel, dealt out to planes; `planes` of them, `apart` elements apart, are zero around it already. */
static void FN(stage)(const FN(Job) *j, const T *image, T *to, int64_t apart) {
    int64_t sh = j->back ? 1 : j->k.sh, sw = j->back ? 1 : j->k.sw, c = j->ci, pitch = j->pitch;
    for (int64_t y = 0; y < j->ih; y++) {
        int64_t row = y + j->above;
        if (row / sh >= j->height) break;
        T *at = to + row % sh * sw * apart + row / sh * pitch * c;
        const T *from = image + y * j->iw * c;
        if (sw == 1) {
            FN(move)(at + j->before * c, from, at_most(j->iw, pitch - j->before) * c);
            continue;
        }
        for (int64_t x = 0; x < j->iw; x++) {
            int64_t column = x + j->before;
            if (column / sw < pitch) FN(move)(at + column % sw * apart + column / sw * c, from + x * c, c);
        }
    }
}

static void FN(shifted_images)(void *ctx, int64_t begin, int64_t end) {
    FN(Job) *j = ctx;
    int64_t ci = j->ci, co = j->co, nhwc = j->k.nhwc, group = j->group, plane = j->plane * ci, longest = 0;
    int64_t in_size = j->ih * j->iw * ci, out_size = j->oh * j->ow * co, staged_size = j->planes * group * plane;
    for (int64_t g = 0; g < j->n_grids; g++)
        longest = at_least(longest, (j->grids[g].rows - 1) * j->pitch + j->grids[g].columns);
    T *staged = scratch(sizeof(T) * (size_t)(staged_size + group * longest * co + (nhwc ? 0 : in_size + group * out_size)));
    if (!staged) {
        j->failed = 1;
        return;
    }
    T *made = staged + staged_size, *turned = made + group * longest * co, *out_images = turned + in_size;
    FN(clear)(staged, staged_size);
    for (int64_t first = begin * group; first < at_most(end * group, j->k.n); first += group) {
        int64_t count = at_most(group, j->k.n - first);
        for (int64_t i = 0; i < count; i++)
            FN(stage)(j, FN(pixels)(j->in + (first + i) * in_size, nhwc, ci, j->ih * j->iw, turned), staged + i * plane, group * plane);
        for (int64_t n = 0; n < j->n_grids; n++) {
            const FN(Grid) *g = j->grids + n;
            int64_t run = (g->rows - 1) * j->pitch + g->columns;
            for (int64_t o = 0; o < co && g->taps; o += PANEL) {
                int64_t width = at_most(PANEL, co - o);
                for (int64_t r = 0; r < run; r += ROWS)
                    for (int64_t t = 0; t < g->taps; t++)
                        for (int64_t l = 0; l < ci; l += DEPTH)
                            for (int64_t i = 0; i < count; i++)
                                if (FN(multiply)(0, at_most(run - r, ROWS), width, at_most(ci - l, DEPTH),
                                                 staged + g->from[t] + i * plane + r * ci + l, ci,
                                                 j->scratch + g->tap[t] * ci * co + o * ci + l * width, width, t || l ? 1 : 0,
                                                 made + (i * run + r) * co + o, co))
                                    j->failed = 1;
            }
            for (int64_t i = 0; i < count; i++) {
                T *image = (nhwc ? j->out + first * out_size : out_images) + i * out_size;
                for (int64_t y = 0; y < g->rows; y++) {
                    const T *from = made + (i * run + y * j->pitch) * co;
                    T *to = image + ((g->y + y * g->step_y) * j->ow + g->x) * co;
                    if (g->taps && g->step_x == 1) {
                        FN(move)(to, from, g->columns * co);
                        continue;
                    }
                    for (int64_t x = 0; x < g->columns; x++, to += g->step_x * co) {
                        if (g->taps)
                            FN(move)(to, from + x * co, co);
                        else
                            FN(clear)(to, co);
                    }
                }
            }
        }
        for (int64_t i = 0; i < count && !nhwc; i++)
            FN(turn)(out_images + i * out_size, j->oh * j->ow, co, j->out + (first + i) * out_size);
    }
}

/* The planes of staged pixels of a convolution, and its one grid. */
static void FN(planes)(FN(Job) *j, FN(Grid) *g) {
    const Conv *k = &j->k;
    j->planes = k->sh * k->sw, j->above = k->top, j->before = k->left;
    j->height = up_div((k->oh - 1) * k->sh + (k->kh - 1) * k->dh + 1, k->sh);
    j->pitch = up_div((k->ow - 1) * k->sw + (k->kw - 1) * k->dw + 1, k->sw);
    j->plane = j->height * j->pitch;
    *g = (FN(Grid)){.rows = k->oh, .columns = k->ow, .step_y = 1, .step_x = 1};
}

static void FN(place_taps)(FN(Job) *j, FN(Grid) *g) {
    const Conv *k = &j->k;
    for (int64_t t = 0; t < k->kh * k->kw; t++, g->taps++) {
        int64_t y = t / k->kw * k->dh, x = t % k->kw * k->dw, plane = y % k->sh * k->sw + x % k->sw;
        g->tap[t] = t, g->from[t] = (plane * j->group * j->plane + y / k->sh * j->pitch + x / k->sw) * j->ci;
    }
}

static void FN(shifted)(FN(Job) *j, Team *team) {
    const Conv *k = &j->k;
    FN(Grid) grids[MOST_GRIDS];
    j->grids = grids, j->n_grids = 1;
    if (!j->back) {
        FN(planes)(j, grids);
        j->group = at_most(k->n, at_least(1, ROWS / j->plane));
        FN(place_taps)(j, grids);
    } else {
        /* row y = q s + a of the image is reached by tap i from row q + (a + top - i d) / s of the gradient, where that is whole */
        int64_t low_y = 0, low_x = 0, high_y = 0, high_x = 0;
        j->n_grids = 0;
        for (int64_t a = 0; a < k->sh && a < j->oh; a++)
            for (int64_t b = 0; b < k->sw && b < j->ow; b++) {
                FN(Grid) *g = &grids[j->n_grids++];
                *g = (FN(Grid)){.rows = up_div(j->oh - a, k->sh), .columns = up_div(j->ow - b, k->sw), .y = a, .x = b,
                                .step_y = k->sh, .step_x = k->sw};
                for (int64_t t = 0; t < k->kh * k->kw; t++) {
                    int64_t y = a + k->top - t / k->kw * k->dh, x = b + k->left - t % k->kw * k->dw;
                    if (y % k->sh || x % k->sw) continue;
                    y /= k->sh, x /= k->sw;
                    low_y = at_most(low_y, y), low_x = at_most(low_x, x);
                    high_y = at_least(high_y, y + g->rows), high_x = at_least(high_x, x + g->columns);
                    g->tap[g->taps++] = t;
                }
            }
        j->planes = 1, j->above = -low_y, j->before = -low_x;
        j->height = high_y - low_y, j->pitch = high_x - low_x;
        /* what lies further out is never read */
        j->plane = j->height * j->pitch;
        j->group = at_most(k->n, at_least(1, ROWS / at_least(1, j->plane)));
        for (int64_t n = 0; n < j->n_grids; n++)
            for (int64_t i = 0; i < grids[n].taps; i++) {
                int64_t t = grids[n].tap[i], y = grids[n].y + k->top - t / k->kw * k->dh, x = grids[n].x + k->left - t % k->kw * k->dw;
                grids[n].from[i] = ((y / k->sh - low_y) * j->pitch + x / k->sw - low_x) * j->ci;
            }
    }
    parallel_for(team, j->co, at_least(1, 4096 / j->ci), FN(shifted_filters), j);
    parallel_for(team, up_div(k->n, j->group), 1, FN(shifted_images), j);
}

static void FN(shifted_sums)(void *ctx, int64_t begin, int64_t end) {
    FN(Job) *j = ctx;
    const FN(Grid) *g = j->grids;
    int64_t ci = j->ci, co = j->co, nhwc = j->k.nhwc, group = j->group, taps = j->k.kh * j->k.kw;
    int64_t in_size = j->ih * j->iw * ci, out_size = j->oh * j->ow * co, staged_size = j->planes * group * j->plane * ci;
    T *staged = scratch(sizeof(T) * (size_t)(staged_size + group * j->plane * co + (nhwc ? 0 : at_least(in_size, out_size))));
    if (!staged) {
        j->failed = 1;
        return;
    }
    T *spread = staged + staged_size, *turned = spread + group * j->plane * co;
    FN(clear)(staged, staged_size + group * j->plane * co);
    for (int64_t part = begin; part < end; part++) {
        T *sums = j->scratch + part * taps * ci * co;
        int64_t start = j->k.n * part / j->parts, last = j->k.n * (part + 1) / j->parts;
        for (int64_t first = start; first < last; first += group) {
            int64_t count = at_most(group, last - first), run = (count - 1) * j->plane + (g->rows - 1) * j->pitch + g->columns;
            for (int64_t i = 0; i < count; i++) {
                const T *image = FN(pixels)(j->in + (first + i) * in_size, nhwc, ci, j->ih * j->iw, turned);
                FN(stage)(j, image, staged + i * j->plane * ci, group * j->plane * ci);
                image = FN(pixels)(j->out + (first + i) * out_size, nhwc, co, j->oh * j->ow, turned);
                for (int64_t y = 0; y < j->oh; y++)
                    FN(move)(spread + (i * j->plane + y * j->pitch) * co, image + y * j->ow * co, j->ow * co);
            }
            for (int64_t t = 0; t < taps; t++)
                for (int64_t o = 0; o < co; o += PANEL)
                    if (FN(multiply)(1, at_most(PANEL, co - o), ci, run, spread + o, co, staged + g->from[t], ci, first > start ? 1 : 0,
                                     sums + (t * co + o) * ci, ci))
                        j->failed = 1;
        }
    }
}

/* Rows [begin, end) of the filter from the sums of all parts, [taps][co][ci]. */
static void FN(shifted_result)(void *ctx, int64_t begin, int64_t end) {
    const FN(Job) *j = ctx;
    int64_t size = j->ci * j->co, taps = j->k.kh * j->k.kw;
    for (int64_t o = begin; o < end; o++) {
        T *to = (T *)j->filter + o * j->ci * taps;
        for (int64_t t = 0; t < taps; t++)
            for (int64_t c = 0; c < j->ci; c++) {
                const T *s = j->scratch + t * size + o * j->ci + c;
                T sum = s[0];
                for (int64_t p = 1; p < j->parts; p++) sum += s[p * taps * size];
                to[c * taps + t] = sum;
            }
    }
}

static void FN(shifted_filter)(FN(Job) *j, Team *team) {
    FN(Grid) grid;
    j->grids = &grid, j->n_grids = 1;
    FN(planes)(j, &grid);
    j->parts = conv_parts(j->k.n, j->k.kh * j->k.kw * j->ci * j->co * (int64_t)sizeof(T));
    j->group = at_most(j->k.n, 2 * DEPTH / j->plane + 1);
    FN(place_taps)(j, &grid);
    parallel_for(team, j->parts, 1, FN(shifted_sums), j);
    parallel_for(team, j->co, at_least(1, 4096 / j->ci), FN(shifted_result), j);
}

/* -- columns ------------------------------------------------------------------------------------------------------------------------- */

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

/* Output rows [y0, y1) of one group's columns [c][taps][pixels], from padded planes. Runs are copied TILE_LANES at a time, beyond their end,
 * where the next run is written then. */
static void FN(gather)(const Conv *k, const T *padded, int64_t c, int64_t y0, int64_t y1, T *to) {
    int64_t tall = FN(tall)(k), wide = FN(wide)(k);
    for (int64_t ch = 0; ch < c; ch++)
        for (int64_t i = 0; i < k->kh; i++)
            for (int64_t j = 0; j < k->kw; j++)
                for (int64_t y = y0; y < y1; y++, to += k->ow) {
                    const T *s = padded + (ch * tall + y * k->sh + i * k->dh) * wide + j * k->dw;
                    if (k->sw == 1) {
                        for (int64_t x = 0; x < k->ow; x += TILE_LANES)
                            IVDEP for (int l = 0; l < TILE_LANES; l++) to[x + l] = s[x + l];
                    } else {
                        for (int64_t x = 0; x < k->ow; x++) to[x] = s[x * k->sw];
                    }
                }
}

/* Output rows [y0, y1) of one group's columns [c][taps][pixels] added to the planes of the image that they were taken from. */
static void FN(scatter)(const Conv *k, T *image, int64_t c, int64_t y0, int64_t y1, const T *columns) {
    int64_t pixels = (y1 - y0) * k->ow;
    for (int64_t i = 0; i < k->kh; i++)
        for (int64_t j = 0; j < k->kw; j++) {
            int64_t left, right, low, high, offset = j * k->dw - k->left;
            FN(seen)(k->w, k->ow, offset, k->sw, &left, &right);
            FN(seen)(k->h, k->oh, i * k->dh - k->top, k->sh, &low, &high);
            for (int64_t ch = 0; ch < c; ch++)
                for (int64_t y = at_least(y0, low); y < at_most(y1, high); y++) {
                    const T *at = columns + ((ch * k->kh + i) * k->kw + j) * pixels + (y - y0) * k->ow;
                    T *s = image + (ch * k->h + y * k->sh + i * k->dh - k->top) * k->w + offset;
                    if (k->sw == 1) {
                        IVDEP for (int64_t x = left; x < right; x++) s[x] += at[x];
                    } else {
                        for (int64_t x = left; x < right; x++) s[x * k->sw] += at[x];
                    }
                }
        }
}

/* Rows of outputs whose columns are made at a time: 256 KB of them. */
static int64_t FN(some_rows)(const Conv *k, int64_t depth) {
    int64_t rows = (256 << 10) / ((int64_t)sizeof(T) * depth * k->ow);
    return at_most(k->oh, at_least(rows, 1));
}

/* An image as [c][h][w]: itself, or turned into `room`. */
INLINE const T *FN(channels)(const T *x, int64_t nhwc, int64_t c, int64_t size, T *room) {
    if (!nhwc || c == 1 || size == 1) return x;
    FN(turn)(x, size, c, room);
    return room;
}

/* One of the three products on images [first, last): out is that of `forward`, the sum over the images goes to `sums` for the filter. */
static void FN(columns_images)(FN(Job) *j, int64_t first, int64_t last, T *sums) {
    const Conv *k = &j->k;
    int64_t cg = k->c / k->groups, og = k->o / k->groups, taps = k->kh * k->kw, depth = cg * taps, pixels = k->oh * k->ow;
    int64_t image_size = k->c * k->h * k->w, out_size = k->o * pixels, step = FN(some_rows)(k, depth);
    /* OpenBLAS multiplies a transposed second operand without copying it if the result has at most 1200 elements */
    int64_t piece = og <= 75 && og * depth * step * k->ow <= 1000000 ? 1200 / og : depth;
    int64_t plain = taps == 1 && k->sh == 1 && k->sw == 1 && !k->top && !k->left && k->h == k->oh && k->w == k->ow;
    int64_t padded_size = j->back || plain ? 0 : k->c * FN(tall)(k) * FN(wide)(k) + TILE_LANES;
    T *columns = scratch(sizeof(T) * (size_t)(depth * step * k->ow + TILE_LANES + padded_size + (k->nhwc ? image_size + out_size : 0)));
    if (!columns) {
        j->failed = 1;
        return;
    }
    T *padded = columns + depth * step * k->ow + TILE_LANES, *room_x = padded + padded_size, *room_y = room_x + image_size;
    if (plain) step = k->oh;
    for (int64_t n = first; n < last; n++) {
        /* `in` is read except by `back`, which writes it; likewise `out` and `forward` */
        T *in = (T *)j->in + n * image_size, *out = j->out + n * out_size, *x = in, *y = out;
        if (j->back == 1)
            x = k->nhwc ? room_x : in;
        else
            x = (T *)FN(channels)(in, k->nhwc, k->c, k->h * k->w, room_x);
        if (j->back || sums)
            y = (T *)FN(channels)(out, k->nhwc, k->o, pixels, room_y);
        else
            y = k->nhwc ? room_y : out;
        if (j->back && !plain) FN(clear)(x, image_size);
        if (!j->back && !plain) FN(pad)(k, x, padded);
        for (int64_t g = 0; g < k->groups; g++) {
            T *xg = x + g * cg * k->h * k->w, *yg = y + g * og * pixels;
            for (int64_t y0 = 0; y0 < k->oh; y0 += step) {
                int64_t y1 = at_most(k->oh, y0 + step), some = (y1 - y0) * k->ow;
                T *seen = plain ? xg : columns, *rows = yg + y0 * k->ow;
                if (!j->back && !plain) FN(gather)(k, padded + g * cg * FN(tall)(k) * FN(wide)(k), cg, y0, y1, columns);
                const T *w = j->filter + g * og * depth;
                int bad = 0;
                if (sums)
                    for (int64_t d = 0; d < depth; d += piece)
                        bad |= FN(small_product)(0, 1, og, at_most(piece, depth - d), some, rows, pixels, seen + d * some, some,
                                                 n > first || y0 ? 1 : 0, sums + g * og * depth + d, depth);
                else if (j->back)
                    bad = FN(small_product)(1, 0, depth, some, og, w, depth, rows, pixels, 0, seen, some);
                else
                    bad = FN(small_product)(0, 0, og, some, depth, w, depth, seen, some, 0, rows, pixels);
                if (bad) j->failed = 1;
                if (j->back && !plain) FN(scatter)(k, xg, cg, y0, y1, columns);
            }
        }
        if (j->back && k->nhwc) FN(turn)(x, k->c, k->h * k->w, in);
        if (!j->back && !sums && k->nhwc) FN(turn)(y, k->o, pixels, out);
    }
}

static void FN(columns_run)(void *ctx, int64_t begin, int64_t end) { FN(columns_images)(ctx, begin, end, NULL); }

static void FN(columns_sums)(void *ctx, int64_t begin, int64_t end) {
    FN(Job) *j = ctx;
    int64_t size = j->k.o * (j->k.c / j->k.groups) * j->k.kh * j->k.kw;
    if (begin == end) FN(columns_images)(j, 0, 0, j->scratch); /* which asks for scratch alone */
    for (int64_t p = begin; p < end; p++)
        FN(columns_images)(j, j->k.n * p / j->parts, j->k.n * (p + 1) / j->parts, j->scratch + p * size);
}

/* -- directly, for depthwise convolutions -------------------------------------------------------------------------------------------- */

/* The windows' gradients y, times the filter, added where the windows lie in a plane. */
static void FN(spread)(const Conv *k, T *plane, const T *w, const T *y) {
    for (int64_t t = 0; t < k->kh * k->kw; t++) {
        int64_t left, right, low, high, down = t / k->kw * k->dh - k->top, offset = t % k->kw * k->dw - k->left;
        FN(seen)(k->w, k->ow, offset, k->sw, &left, &right);
        FN(seen)(k->h, k->oh, down, k->sh, &low, &high);
        for (int64_t r = low; r < high; r++) {
            T *s = plane + (r * k->sh + down) * k->w + offset, f = w[t];
            IVDEP for (int64_t i = left; i < right; i++) s[i * k->sw] += f * y[r * k->ow + i];
        }
    }
}

/* y += the windows of a padded plane times the filter w [taps], which is turned over if `back`. Sums stay in registers. */
static void FN(direct_plane)(const Conv *k, const T *padded, const T *w, int64_t back, T *y) {
    int64_t taps = k->kh * k->kw, wide = FN(wide)(k);
    for (int64_t r = 0; r < k->oh; r++)
        for (int64_t x = 0; x < k->ow; x += TILE_LANES) {
            T sums[TILE_LANES] = {0};
            const T *s = padded + r * k->sh * wide + x * k->sw;
            for (int64_t i = 0, t = 0; i < k->kh; i++)
                for (int64_t j = 0; j < k->kw; j++, t++) {
                    const T *from = s + i * k->dh * wide + j * k->dw, f = w[back ? taps - 1 - t : t];
                    if (k->sw == 1)
                        for (int l = 0; l < TILE_LANES; l++) sums[l] += f * from[l];
                    else
                        for (int64_t l = 0; l < at_most(TILE_LANES, k->ow - x); l++) sums[l] += f * from[l * k->sw];
                }
            T *to = y + r * k->ow + x;
            if (x + TILE_LANES <= k->ow)
                for (int l = 0; l < TILE_LANES; l++) to[l] += sums[l];
            else
                for (int64_t l = 0; l < k->ow - x; l++) to[l] += sums[l];
        }
}

/* Planes [begin, end) of the results, one channel of one image each, of which o / c outputs are made. */
static void FN(direct_run)(void *ctx, int64_t begin, int64_t end) {
    FN(Job) *j = ctx;
    const Conv *k = &j->k;
    Conv q = *k;
    q.c = 1;
    /* at stride 1 the gradient is a convolution, too, unless what lies in the padding alone would have to be left away */
    int64_t gathers = !j->back || (k->sh == 1 && k->sw == 1 && k->top <= (k->kh - 1) * k->dh && k->left <= (k->kw - 1) * k->dw);
    if (j->back && gathers) {
        q.h = k->oh, q.w = k->ow, q.oh = k->h, q.ow = k->w;
        q.top = (k->kh - 1) * k->dh - k->top, q.left = (k->kw - 1) * k->dw - k->left;
    }
    int64_t og = k->o / k->groups, area = k->h * k->w, pixels = k->oh * k->ow, taps = k->kh * k->kw;
    T *padded = scratch(sizeof(T) * (size_t)(FN(tall)(&q) * FN(wide)(&q) + TILE_LANES));
    if (!padded) {
        j->failed = 1;
        return;
    }
    for (int64_t item = begin; item < end; item++) {
        T *x = (T *)j->in + item * area, *y = j->out + item * og * pixels;
        const T *w = j->filter + item % k->c * og * taps;
        if (j->back) {
            FN(clear)(x, area);
        } else {
            FN(clear)(y, og * pixels);
            FN(pad)(&q, x, padded);
        }
        for (int64_t o = 0; o < og; o++, y += pixels, w += taps) {
            if (!gathers) {
                FN(spread)(k, x, w, y);
                continue;
            }
            if (j->back) FN(pad)(&q, y, padded);
            FN(direct_plane)(&q, padded, w, j->back, j->back ? x : y);
        }
    }
}

/* The filters of outputs [begin, end): for every tap a sum over all windows. Rows of the gradient end in zeros, to whole lanes. */
static void FN(direct_sums)(void *ctx, int64_t begin, int64_t end) {
    FN(Job) *j = ctx;
    const Conv *k = &j->k;
    Conv q = *k;
    q.c = 1;
    int64_t og = k->o / k->groups, area = k->h * k->w, pixels = k->oh * k->ow, taps = k->kh * k->kw, wide = FN(wide)(&q);
    int64_t pitch = up_div(k->ow, TILE_LANES) * TILE_LANES, room = FN(tall)(&q) * wide + TILE_LANES * k->sw; /* read beyond the last row */
    T *padded = scratch(sizeof(T) * (size_t)(room + k->oh * pitch));
    if (!padded) {
        j->failed = 1;
        return;
    }
    T *rows = padded + room;
    FN(clear)(padded, room + k->oh * pitch);
    for (int64_t o = begin; o < end; o++) {
        T *to = (T *)j->filter + o * taps;
        FN(clear)(to, taps);
        for (int64_t n = 0; n < k->n; n++) {
            FN(pad)(&q, j->in + (n * k->c + o / og) * area, padded);
            for (int64_t r = 0; r < k->oh; r++) FN(move)(rows + r * pitch, j->out + (n * k->o + o) * pixels + r * k->ow, k->ow);
            for (int64_t t = 0; t < taps; t++) {
                const T *s = padded + t / k->kw * k->dh * wide + t % k->kw * k->dw, *g = rows;
                T sums[TILE_LANES] = {0}, total = 0;
                for (int64_t r = 0; r < k->oh; r++, s += k->sh * wide)
                    for (int64_t x = 0; x < pitch; x += TILE_LANES, g += TILE_LANES) {
                        if (k->sw == 1)
                            for (int l = 0; l < TILE_LANES; l++) sums[l] += s[x + l] * g[l];
                        else
                            for (int l = 0; l < TILE_LANES; l++) sums[l] += s[(x + l) * k->sw] * g[l];
                    }
                for (int l = 0; l < TILE_LANES; l++) total += sums[l];
                to[t] += total;
            }
        }
    }
}

/* -- few channels -------------------------------------------------------------------------------------------------------------------- */

#include "conv_few_body.h"

/* -- the kernels --------------------------------------------------------------------------------------------------------------------- */

static FN(Job) FN(job)(const int64_t *a, int64_t back) {
    Conv k = conv_of(a);
    FN(Job) j = {.k = k, .in = PTR(T, a[0]), .filter = PTR(T, a[1]), .out = PTR(T, a[2]), .scratch = PTR(T, a[21]), .ci = k.c, .co = k.o,
                 .ih = k.h, .iw = k.w, .oh = k.oh, .ow = k.ow, .top = k.top, .left = k.left, .back = back};
    if (back && k.way <= SHIFTED) { /* a convolution of the gradient with the filter turned over */
        j.in = PTR(T, a[2]), j.out = PTR(T, a[0]), j.ci = k.o, j.co = k.c, j.ih = k.oh, j.iw = k.ow, j.oh = k.h, j.ow = k.w;
        j.top = (k.kh - 1) * k.dh - k.top, j.left = (k.kw - 1) * k.dw - k.left;
    }
    return j;
}

static void FN(conv_images)(const int64_t *a, Team *team, int64_t back) {
    FN(Job) j = FN(job)(a, back);
    if (j.k.way < DIRECT && (team->error = NO_PRODUCT(BLAS))) return;
    int64_t flops = 2 * j.k.o * j.k.c / j.k.groups * j.k.kh * j.k.kw * j.k.oh * j.k.ow;
    if (j.k.way <= WINOGRAD_4)
        FN(winograd)(&j, team);
    else if (j.k.way == SHIFTED)
        FN(shifted)(&j, team);
    else if (j.k.way == FEW) {
        parallel_for(team, up_div(j.k.o, TILE_LANES), at_least(1, 4096 / (j.k.c * j.k.kh * j.k.kw)), FN(few_filters), &j);
        parallel_for(team, j.k.n, 500000 / at_least(flops, 1) + 1, FN(few_images), &j);
    } else if (j.k.way == COLUMNS)
        parallel_for(team, j.k.n, 500000 / at_least(flops, 1) + 1, FN(columns_run), &j);
    else
        parallel_for(team, j.k.n * j.k.c, 50000 * j.k.c / at_least(flops, 1) + 1, FN(direct_run), &j);
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
    } else if (j.k.way == COLUMNS) {
        j.parts = conv_parts(j.k.n, size * (int64_t)sizeof(T));
        parallel_for(team, j.parts, 1, FN(columns_sums), &j);
        parallel_for(team, size, 8192, FN(add_parts), &j);
    } else {
        parallel_for(team, j.k.o, 1, FN(direct_sums), &j);
    }
    if (j.failed) team->error = "out of memory";
}
