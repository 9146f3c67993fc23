/* conv.h for one type: convolutions of 3x3 filters at stride 1 by Winograd's transforms, and their gradients; T, FN(name), MULADD. */

/* The first `some` of c channels of the part [side][side] of an image at (y, x) with zeros around it: in place where it lies inside, else
 * copied to `room`. Also how far apart its rows and its pixels are. */
INLINE const T *FN(patch)(const T *image, int64_t h, int64_t w, int64_t c, int64_t some, int64_t y, int64_t x, int side, T *room,
                          int64_t *row, int64_t *pixel) {
    if (y >= 0 && x >= 0 && y + side <= h && x + side <= w) {
        *row = w * c, *pixel = c;
        return image + (y * w + x) * c;
    }
    for (int i = 0; i < side; i++)
        for (int k = 0; k < side; k++) {
            int inside = y + i >= 0 && y + i < h && x + k >= 0 && x + k < w;
            if (inside)
                FN(move)(room + (i * side + k) * some, image + ((y + i) * w + x + k) * c, some);
            else
                FN(clear)(room + (i * side + k) * some, some);
        }
    *row = side * some, *pixel = some;
    return room;
}

/* m [rows][width] = v [rows][k] u [k][width], or with that added. An output sums 9 of these with signs, so that their errors weigh 5/3 as
 * much as in a sum of the same length taken directly; chains of CHAIN products and of few sums of them make up for it. */
static int FN(channel_sums)(int64_t rows, int64_t width, int64_t k, const T *v, const T *u, T *m, int64_t ldm, int add) {
    T more[TILES * PANEL];
    for (int64_t first = 0; first < k; first += DEPTH, add = 1) {
        T *to = add ? more : m;
        int64_t ld = add ? PANEL : ldm, end = at_most(k, first + DEPTH);
        for (int64_t l = first; l < end; l += CHAIN)
            if (FN(product)(0, 0, rows, width, at_most(CHAIN, end - l), 1, v + l, k, u + l * width, width, l > first, to, ld)) return -1;
        for (int64_t r = 0; r < rows && add; r++)
            for (int64_t c = 0; c < width; c++) m[r * ldm + c] += more[r * PANEL + c];
    }
    return 0;
}

/* The taps of filters [lanes][9], turned over. */
INLINE void FN(taps_back)(const T *from, int64_t lanes, T (*w)[TILE_LANES]) {
#if HAVE_FMA
    enum { few = 16 / sizeof(T) };
    if (lanes == TILE_LANES) {
        int64_t row[FN(LANES)];
        for (int i = 0; i < FN(LANES); i++) row[i] = 9 * i;
        for (int l = 0; l < TILE_LANES; l += FN(LANES))
            for (int t = 0; t < 9; t = t == 9 - few ? 9 : t + 2 * few > 9 ? 9 - few : t + few)
                FN(product_turn)(from + 9 * l + t, row, w[8 - t] + l, -TILE_LANES);
        return;
    }
#endif
    for (int64_t l = 0; l < lanes; l++)
        for (int t = 0; t < 9; t++) w[8 - t][l] = from[l * 9 + t];
}

#define W(name) FN(name##_2)
#define OUT 2
#include "winograd_tiles_body.h"
#undef W
#undef OUT

#define W(name) FN(name##_4)
#define OUT 4
#include "winograd_tiles_body.h"
#undef W
#undef OUT

static void FN(winograd)(FN(Job) *j, Team *team) {
    if (j->k.way == WINOGRAD)
        FN(convolve_2)(j, team);
    else
        FN(convolve_4)(j, team);
}

/* A g A^t: the gradient of 2x2 outputs g [2][2] to that of m [16]. */
INLINE void FN(tile_grad)(const T *g, int64_t row, int64_t pixel, T *m, int64_t apart, int lanes) {
    T t[8][TILE_LANES];
    for (int j = 0; j < 2; j++)
        for (int l = 0; l < lanes; l++) {
            T a = g[j * pixel + l], b = g[row + j * pixel + l];
            t[j][l] = a, t[2 + j][l] = a + b, t[4 + j][l] = a - b, t[6 + j][l] = -b;
        }
    for (int i = 0; i < 4; i++)
        for (int l = 0; l < lanes; l++) {
            T a = t[2 * i][l], b = t[2 * i + 1][l], *to = m + 4 * i * apart + l;
            to[0] = a, to[apart] = a + b, to[2 * apart] = a - b, to[3 * apart] = -b;
        }
}

/* G^t u G: the gradient of the transformed filter to that of the filter. */
INLINE void FN(filter_grad)(T (*u)[TILE_LANES], T (*w)[TILE_LANES]) {
    T t[12][TILE_LANES];
    for (int j = 0; j < 4; j++)
        for (int l = 0; l < TILE_LANES; l++) {
            T sum = (T)0.5 * (u[4 + j][l] + u[8 + j][l]), diff = (T)0.5 * (u[4 + j][l] - u[8 + j][l]);
            t[j][l] = u[j][l] + sum, t[4 + j][l] = diff, t[8 + j][l] = sum + u[12 + j][l];
        }
    for (int i = 0; i < 3; i++)
        for (int l = 0; l < TILE_LANES; l++) {
            T sum = (T)0.5 * (t[4 * i + 1][l] + t[4 * i + 2][l]), diff = (T)0.5 * (t[4 * i + 1][l] - t[4 * i + 2][l]);
            w[3 * i][l] = t[4 * i][l] + sum, w[3 * i + 1][l] = diff, w[3 * i + 2][l] = sum + t[4 * i + 3][l];
        }
}

/* Parts [begin, end) of the batch: the gradient of the transformed filter, [16][co][ci] for each part. */
static void FN(winograd_sums)(void *ctx, int64_t begin, int64_t end) {
    FN(Job) *j = ctx;
    int64_t ci = j->ci, co = j->co, th = up_div(j->oh, 2), tw = up_div(j->ow, 2), tiles = th * tw, nhwc = j->k.nhwc;
    int64_t in_size = j->ih * j->iw * ci, out_size = j->oh * j->ow * co, group = j->group, block = 2 * TILES;
    T *v = scratch(sizeof(T) * (size_t)(16 * ((block + 1) * (ci + co) + 2 * SPREAD) + (nhwc ? 0 : group * (in_size + out_size))));
    if (!v) {
        j->failed = 1;
        return;
    }
    T *m = v + 16 * (block * ci + SPREAD), *room = m + 16 * (block * co + SPREAD);
    T *turned = room + 16 * (ci + co), *turned_g = turned + group * in_size;
    for (int64_t part = begin; part < end; part++) {
        T *sums = j->scratch + part * 16 * (ci * co + SPREAD);
        int64_t last = j->k.n * (part + 1) / j->parts, fresh = 1;
        for (int64_t first = j->k.n * part / j->parts; first < last; first += group) {
            int64_t count = at_most(group, last - first);
            for (int64_t i = 0; i < count && !nhwc; i++) {
                FN(turn)(j->in + (first + i) * in_size, ci, j->ih * j->iw, turned + i * in_size);
                FN(turn)(j->out + (first + i) * out_size, co, j->oh * j->ow, turned_g + i * out_size);
            }
            const T *in = nhwc ? j->in + first * in_size : turned, *g = nhwc ? j->out + first * out_size : turned_g;
            for (int64_t t0 = 0; t0 < count * tiles; t0 += block, fresh = 0) {
                int64_t some = at_most(block, count * tiles - t0), apart = some * ci + SPREAD, apart_m = some * co + SPREAD;
                for (int64_t t = 0; t < some; t++) {
                    int64_t image = (t0 + t) / tiles, y = (t0 + t) % tiles / tw * 2, x = (t0 + t) % tw * 2, row, pixel, c = 0;
                    const T *s = FN(patch)(in + image * in_size, j->ih, j->iw, ci, ci, y - j->top, x - j->left, 4, room, &row, &pixel);
                    for (; c + TILE_LANES <= ci; c += TILE_LANES) FN(tile_in_2)(s + c, row, ci, v + t * ci + c, apart, TILE_LANES);
                    if (c < ci) FN(tile_in_2)(s + c, row, ci, v + t * ci + c, apart, (int)(ci - c));
                    s = FN(patch)(g + image * out_size, j->oh, j->ow, co, co, y, x, 2, room, &row, &pixel);
                    for (c = 0; c + TILE_LANES <= co; c += TILE_LANES) FN(tile_grad)(s + c, row, co, m + t * co + c, apart_m, TILE_LANES);
                    if (c < co) FN(tile_grad)(s + c, row, co, m + t * co + c, apart_m, (int)(co - c));
                }
                for (int64_t e = 0; e < 16; e++)
                    for (int64_t o = 0; o < co; o += PANEL)
                        if (FN(multiply)(1, at_most(PANEL, co - o), ci, some, m + e * apart_m + o, co, v + e * apart, ci, fresh ? 0 : 1,
                                         sums + e * (ci * co + SPREAD) + o * ci, ci))
                            j->failed = 1;
            }
        }
    }
}

/* Rows [begin, end) of the filter: the sums of all parts, transformed back. */
static void FN(winograd_result)(void *ctx, int64_t begin, int64_t end) {
    const FN(Job) *j = ctx;
    int64_t size = j->ci * j->co + SPREAD;
    for (int64_t o = begin; o < end; o++)
        for (int64_t c = 0; c < j->ci; c += TILE_LANES) {
            T u[16][TILE_LANES], w[9][TILE_LANES];
            int64_t lanes = at_most(TILE_LANES, j->ci - c);
            for (int e = 0; e < 16; e++) {
                const T *s = j->scratch + e * size + o * j->ci + c;
                for (int l = 0; l < TILE_LANES; l++) u[e][l] = 0;
                for (int64_t p = 0; p < j->parts; p++, s += 16 * size) {
                    if (lanes == TILE_LANES)
                        for (int l = 0; l < TILE_LANES; l++) u[e][l] += s[l];
                    else
                        for (int64_t l = 0; l < lanes; l++) u[e][l] += s[l];
                }
            }
            FN(filter_grad)(u, w);
            T *to = (T *)j->filter + (o * j->ci + c) * 9;
            for (int64_t l = 0; l < lanes; l++)
                for (int t = 0; t < 9; t++) to[l * 9 + t] = w[t][l];
        }
}

static void FN(winograd_filter)(FN(Job) *j, Team *team) {
    j->parts = conv_parts(j->k.n, 16 * (j->ci * j->co + SPREAD) * (int64_t)sizeof(T));
    j->group = at_most(j->k.n, at_least(1, 2 * TILES / (up_div(j->oh, 2) * up_div(j->ow, 2))));
    parallel_for(team, j->parts, 1, FN(winograd_sums), j);
    parallel_for(team, j->co, at_least(1, 4096 / j->ci), FN(winograd_result), j);
}
