/* winograd_body.h for one size of tiles: OUT outputs along a side, W(name).
 *
 * The transforms of a line; those of a tile are of its columns, then of its rows. In the notation of Lavin and Gray they are B^t for the
 * image, G for the filter and A^t for the outputs. */

#define SIDE (OUT + 2)
#define ELEMENTS (SIDE * SIDE)
#define BLOCK (OUT == 2 ? TILES : TILES / 2)

#if OUT == 2

INLINE void W(line_in)(const T *d, T *v) { v[0] = d[0] - d[2], v[1] = d[1] + d[2], v[2] = d[2] - d[1], v[3] = d[1] - d[3]; }
INLINE void W(line_filter)(const T *g, T *u) {
    T half = (T)0.5 * (g[0] + g[2]), mid = (T)0.5 * g[1];
    u[0] = g[0], u[1] = half + mid, u[2] = half - mid, u[3] = g[2];
}
INLINE void W(line_out)(const double *m, double *y) { y[0] = m[0] + m[1] + m[2], y[1] = m[1] - m[2] - m[3]; }

#else

/* The polynomials are taken at 0, a, -a, b, -b and infinity. With a = 5/8 and b = 3/2 a rounding of the products weighs 2.3 times less
 * than at the usual 1 and 2, and all factors but those of the filter are numbers of T. */
#define A_ 0.625
#define B_ 1.5
#define AA (A_ * A_)
#define BB (B_ * B_)

INLINE void W(line_in)(const T *d, T *v) {
    const T a = A_, b = B_, aa = AA, bb = BB, sum = AA + BB, product = AA * BB;
    T even = MULADD(-bb, d[2], d[4]), odd = MULADD(-bb, d[1], d[3]);
    v[0] = MULADD(product, d[0], MULADD(-sum, d[2], d[4])), v[5] = MULADD(product, d[1], MULADD(-sum, d[3], d[5]));
    v[1] = MULADD(a, odd, even), v[2] = MULADD(-a, odd, even);
    even = MULADD(-aa, d[2], d[4]), odd = MULADD(-aa, d[1], d[3]);
    v[3] = MULADD(b, odd, even), v[4] = MULADD(-b, odd, even);
}
INLINE void W(line_filter)(const T *g, T *u) {
    const T none = 1 / (AA * BB), a = 1 / (2 * AA * (AA - BB)), b = 1 / (2 * BB * (BB - AA));
    T even = a * MULADD((T)AA, g[2], g[0]), odd = a * (T)A_ * g[1];
    u[0] = none * g[0], u[1] = even + odd, u[2] = even - odd, u[5] = g[2];
    even = b * MULADD((T)BB, g[2], g[0]), odd = b * (T)B_ * g[1];
    u[3] = even + odd, u[4] = even - odd;
}
INLINE void W(line_out)(const double *m, double *y) {
    double even_a = m[1] + m[2], odd_a = m[1] - m[2], even_b = m[3] + m[4], odd_b = m[3] - m[4];
    y[0] = m[0] + even_a + even_b, y[1] = A_ * odd_a + B_ * odd_b, y[2] = AA * even_a + BB * even_b;
    y[3] = A_ * AA * odd_a + B_ * BB * odd_b + m[5];
}

#undef A_
#undef B_
#undef AA
#undef BB

#endif

/* TILE_LANES channels or fewer of a tile of pixels s, `row` and `pixel` apart, to v [ELEMENTS], `apart` apart. */
INLINE void W(tile_in)(const T *s, int64_t row, int64_t pixel, T *v, int64_t apart, int lanes) {
    T t[ELEMENTS][TILE_LANES];
    for (int j = 0; j < SIDE; j++)
        IVDEP for (int l = 0; l < lanes; l++) {
            T d[SIDE], made[SIDE];
            UNROLL for (int i = 0; i < SIDE; i++) d[i] = s[i * row + j * pixel + l];
            W(line_in)(d, made);
            UNROLL for (int i = 0; i < SIDE; i++) t[i * SIDE + j][l] = made[i];
        }
    for (int i = 0; i < SIDE; i++)
        IVDEP for (int l = 0; l < lanes; l++) {
            T d[SIDE], made[SIDE], *to = v + i * SIDE * apart + l;
            UNROLL for (int j = 0; j < SIDE; j++) d[j] = t[i * SIDE + j][l];
            W(line_in)(d, made);
            UNROLL for (int j = 0; j < SIDE; j++) to[j * apart] = made[j];
        }
}

/* m [ELEMENTS] to the outputs y of a tile, each of which is rounded once. */
INLINE void W(tile_out)(const T *m, int64_t apart, T (*y)[TILE_LANES], int lanes) {
    double t[OUT * SIDE][TILE_LANES];
    for (int j = 0; j < SIDE; j++)
        IVDEP for (int l = 0; l < lanes; l++) {
            double d[SIDE], made[OUT];
            UNROLL for (int i = 0; i < SIDE; i++) d[i] = m[(i * SIDE + j) * apart + l];
            W(line_out)(d, made);
            UNROLL for (int i = 0; i < OUT; i++) t[i * SIDE + j][l] = made[i];
        }
    for (int i = 0; i < OUT; i++)
        IVDEP for (int l = 0; l < lanes; l++) {
            double d[SIDE], made[OUT];
            UNROLL for (int j = 0; j < SIDE; j++) d[j] = t[i * SIDE + j][l];
            W(line_out)(d, made);
            UNROLL for (int j = 0; j < OUT; j++) y[i * OUT + j][l] = (T)made[j];
        }
}

/* Lanes of filters w [9] to u [ELEMENTS]. */
INLINE void W(filter_in)(T (*w)[TILE_LANES], T (*u)[TILE_LANES]) {
    T t[SIDE * 3][TILE_LANES];
    for (int j = 0; j < 3; j++)
        for (int l = 0; l < TILE_LANES; l++) {
            T g[3] = {w[j][l], w[3 + j][l], w[6 + j][l]}, made[SIDE];
            W(line_filter)(g, made);
            UNROLL for (int i = 0; i < SIDE; i++) t[i * 3 + j][l] = made[i];
        }
    for (int i = 0; i < SIDE; i++)
        for (int l = 0; l < TILE_LANES; l++) {
            T g[3] = {t[3 * i][l], t[3 * i + 1][l], t[3 * i + 2][l]}, made[SIDE];
            W(line_filter)(g, made);
            UNROLL for (int j = 0; j < SIDE; j++) u[i * SIDE + j][l] = made[j];
        }
}

/* Filters of `lanes` outputs from o on and `some` channels from c0 on, transformed: to [ELEMENTS][some][width], matrices `apart` apart.
 * Backwards they are turned over. */
static void W(filters_of)(const FN(Job) *j, int64_t o, int64_t lanes, int64_t c0, int64_t some, T *to, int64_t width, int64_t apart) {
    int64_t lane = j->back ? 9 : j->ci * 9, step = j->back ? j->co * 9 : 9;
    T w[TILE_LANES][9][TILE_LANES], u[ELEMENTS][TILE_LANES];
    if (lanes < TILE_LANES) memset(w, 0, sizeof w);
    for (int64_t first = 0; first < some; first += TILE_LANES) {
        int64_t here = at_most(TILE_LANES, some - first);
        const T *from = j->filter + o * lane + (c0 + first) * step;
        if (!j->back) FN(turn_part)(from, lane, lanes, here * 9, w[0][0], TILE_LANES);
        for (int64_t c = 0; c < here; c++) {
            if (j->back) FN(taps_back)(from + c * step, lanes, w[c]);
            W(filter_in)(w[c], u);
            T *row = to + (first + c) * width;
            for (int e = 0; e < ELEMENTS; e++, row += apart)
                if (lanes == TILE_LANES)
                    for (int l = 0; l < TILE_LANES; l++) row[l] = u[e][l];
                else
                    for (int64_t l = 0; l < lanes; l++) row[l] = u[e][l];
        }
    }
}

/* The matrices of all transformed filters, each in panels of 64 outputs: [ELEMENTS][co / 64][ci][64], SPREAD elements between them: at
 * distances of a power of two they would all meet in the same few lines of the cache. Items are blocks of TILE_LANES outputs. */
static void W(filters)(void *ctx, int64_t begin, int64_t end) {
    const FN(Job) *j = ctx;
    for (int64_t o = begin * TILE_LANES; o < at_most(j->co, end * TILE_LANES); o += TILE_LANES) {
        int64_t first = o / PANEL * PANEL, width = at_most(PANEL, j->co - first);
        T *to = j->scratch + first * j->ci + o - first;
        W(filters_of)(j, o, at_most(TILE_LANES, j->co - o), 0, j->ci, to, width, j->ci * j->co + SPREAD);
    }
}

/* Where the whole batch is two blocks of tiles or one, filters are transformed for each, in cache: to store them all and to read them again
 * takes longer. As in conv_native.py. */
INLINE int W(passing)(const FN(Job) *j) { return j->k.n * up_div(j->oh, OUT) * up_div(j->ow, OUT) <= 2 * BLOCK; }

/* A piece of results, `high` by `wide` tiles of each image, and the `rows` rows of pixels that it needs, from row `low` on; how far apart
 * images and pixels are; room for a block of tiles, `deep` of its channels at a time, and for filters that are transformed in passing. */
typedef struct {
    const FN(Job) *j;
    FN(Piece) p;
    int64_t deep, wide, high, low, rows, in_image, out_image, out_pixel;
    const T *in;
    T *out, *v, *m, *u, *room;
} W(Work);

INLINE void W(tile_at)(const W(Work) *w, int64_t t, int64_t *image, int64_t *y, int64_t *x) {
    *image = t / (w->wide * w->high), *y = t / w->wide % w->high * OUT, *x = t % w->wide * OUT;
}

/* Channels [c0, c0 + some) of tiles [t0, t0 + count), transformed: v [ELEMENTS][count][some] */
static void W(transform)(const W(Work) *w, int64_t t0, int64_t count, int64_t c0, int64_t some) {
    const FN(Job) *j = w->j;
    int64_t apart = count * some + SPREAD;
    for (int64_t t = 0; t < count; t++) {
        int64_t image, y, x, row, pixel, c = 0;
        W(tile_at)(w, t0 + t, &image, &y, &x);
        const T *s = FN(patch)(w->in + image * w->in_image + c0, w->rows, j->iw, j->ci, some, w->p.y0 + y - j->top - w->low,
                               x - j->left, SIDE, w->room, &row, &pixel);
        for (; c + TILE_LANES <= some; c += TILE_LANES) W(tile_in)(s + c, row, pixel, w->v + t * some + c, apart, TILE_LANES);
        if (c < some) W(tile_in)(s + c, row, pixel, w->v + t * some + c, apart, (int)(some - c));
    }
}

/* Their products with the filters: m [ELEMENTS][count][outputs], or what is added to it. All matrices of a panel of outputs follow on each
 * other where its filters are transformed in passing, else all panels of a matrix. */
static int W(products)(const W(Work) *w, int64_t count, int64_t c0, int64_t some) {
    const FN(Job) *j = w->j;
    int64_t outputs = w->p.c1 - w->p.c0, apart = count * some + SPREAD, apart_m = count * outputs + SPREAD, failed = 0;
    for (int64_t i = 0, panels = up_div(outputs, PANEL); i < ELEMENTS * panels; i++) {
        int64_t e = w->u ? i % ELEMENTS : i / panels, first = (w->u ? i / ELEMENTS : i % panels) * PANEL, o = w->p.c0 + first;
        int64_t width = at_most(PANEL, outputs - first), apart_u = w->u ? some * width + SPREAD : j->ci * j->co + SPREAD;
        for (int64_t l = 0; l < width && w->u && !e; l += TILE_LANES)
            W(filters_of)(j, o + l, at_most(TILE_LANES, width - l), c0, some, w->u + l, width, apart_u);
        const T *u = (w->u ? w->u : j->scratch + o * j->ci + c0 * width) + e * apart_u;
        failed |= FN(channel_sums)(count, width, some, w->v + e * apart, u, w->m + e * apart_m + first, outputs, c0 > 0);
    }
    return (int)failed;
}

/* m to outputs */
static void W(transform_back)(const W(Work) *w, int64_t t0, int64_t count) {
    const FN(Job) *j = w->j;
    int64_t outputs = w->p.c1 - w->p.c0, apart = count * outputs + SPREAD;
    for (int64_t t = 0; t < count; t++) {
        int64_t image, y, x;
        W(tile_at)(w, t0 + t, &image, &y, &x);
        T *to = w->out + image * w->out_image + (y * j->ow + x) * w->out_pixel;
        int64_t down = at_most(OUT, w->p.y1 - w->p.y0 - y), right = at_most(OUT, j->ow - x);
        for (int64_t c = 0; c < outputs; c += TILE_LANES) {
            T r[OUT * OUT][TILE_LANES];
            int lanes = (int)at_most(TILE_LANES, outputs - c);
            if (lanes == TILE_LANES)
                W(tile_out)(w->m + t * outputs + c, apart, r, TILE_LANES);
            else
                W(tile_out)(w->m + t * outputs + c, apart, r, lanes);
            for (int64_t i = 0; i < down; i++)
                for (int64_t k = 0; k < right; k++) {
                    T *p = to + (i * j->ow + k) * w->out_pixel + c;
                    if (lanes == TILE_LANES)
                        LANEWISE for (int l = 0; l < TILE_LANES; l++) p[l] = r[i * OUT + k][l];
                    else
                        for (int l = 0; l < lanes; l++) p[l] = r[i * OUT + k][l];
                }
        }
    }
}

/* A piece whose pixels and results have their channels next to each other */
static int W(tiles)(const W(Work) *w) {
    int64_t tiles = w->p.count * w->wide * w->high, block = up_div(tiles, up_div(tiles, BLOCK)), failed = 0;
    for (int64_t t = 0; t < tiles; t += block) {
        int64_t count = at_most(block, tiles - t);
        for (int64_t c = 0; c < w->j->ci; c += w->deep) {
            int64_t some = at_most(w->deep, w->j->ci - c);
            W(transform)(w, t, count, c, some);
            failed |= W(products)(w, count, c, some);
        }
        W(transform_back)(w, t, count);
    }
    return (int)failed;
}

/* A piece as it lies, by way of `turned` and `made` in NCHW */
static int W(piece)(W(Work) *w, T *turned, T *made) {
    const FN(Job) *j = w->j;
    int64_t nhwc = j->k.nhwc, rows = w->p.y1 - w->p.y0, outputs = w->p.c1 - w->p.c0, in_area = j->ih * j->iw, area = j->oh * j->ow;
    const T *in = j->in + w->p.first * in_area * j->ci;
    T *out = j->out + w->p.first * area * j->co;
    w->high = up_div(rows, OUT), w->low = at_least(0, w->p.y0 - j->top);
    w->rows = at_least(0, at_most(j->ih, w->p.y0 - j->top + w->high * OUT + SIDE - OUT) - w->low);
    w->in = nhwc ? in + w->low * j->iw * j->ci : turned, w->in_image = (nhwc ? j->ih : w->rows) * j->iw * j->ci;
    w->out = nhwc ? out + w->p.y0 * j->ow * j->co + w->p.c0 : made, w->out_pixel = nhwc ? j->co : outputs;
    w->out_image = (nhwc ? j->oh : rows) * j->ow * w->out_pixel;
    for (int64_t i = 0; i < w->p.count && !nhwc; i++) {
        const T *image = in + i * in_area * j->ci + w->low * j->iw;
        FN(turn_part)(image, in_area, j->ci, w->rows * j->iw, turned + i * w->in_image, j->ci);
    }
    int failed = W(tiles)(w);
    for (int64_t i = 0; i < w->p.count && !nhwc; i++) {
        T *image = out + (i * j->co + w->p.c0) * area + w->p.y0 * j->ow;
        FN(turn_part)(made + i * w->out_image, outputs, rows * j->ow, outputs, image, area);
    }
    FN(View) view = {j->co, j->oh, j->ow, 1, 1};
    FN(complete_piece)(j, &view, &w->p, nhwc);
    return failed;
}

static void W(images)(void *ctx, int64_t begin, int64_t end) {
    const FN(Cut) *cut = ctx;
    FN(Job) *j = cut->j;
    int64_t most = at_most(j->co, cut->outputs), passing = W(passing)(j), deep = passing ? at_most(j->ci, DEPTH) : j->ci;
    int64_t in_size = cut->group * at_most(j->ih, cut->rows + SIDE - OUT) * j->iw * j->ci;
    int64_t out_size = cut->group * at_most(j->oh, cut->rows) * j->ow * most;
    int64_t size = ELEMENTS * (BLOCK * (deep + most) + 2 * SPREAD + deep + (passing ? deep * PANEL + SPREAD : 0));
    T *v = scratch(sizeof(T) * (size_t)(size + (j->k.nhwc ? 0 : in_size + out_size)));
    if (!v) {
        j->failed = 1;
        return;
    }
    T *m = v + ELEMENTS * (BLOCK * deep + SPREAD), *room = m + ELEMENTS * (BLOCK * most + SPREAD);
    W(Work) w = {.j = j, .deep = deep, .wide = up_div(j->ow, OUT), .v = v, .m = m, .room = room};
    if (passing) w.u = room + ELEMENTS * deep;
    for (int64_t item = begin; item < end; item++) {
        FN(Piece) in;
        FN(pieces_of)(cut, item, &in, &w.p);
        if (W(piece)(&w, v + size, v + size + in_size)) j->failed = 1;
    }
}

/* Bands of rows, enough of them for a few threads and for pixels and results to stay in cache, but of three quarters of a block of tiles at
 * least; and cuts of outputs where bands are too few, each of which transforms the same pixels. */
static FN(Cut) W(cut)(FN(Job) *j, int threads) {
    int64_t high = up_div(j->oh, OUT), tiles = high * up_div(j->ow, OUT), n = j->k.n;
    int64_t most = pieces_wanted(n * j->oh * j->ow * j->co * j->ci * 9, threads), bytes = j->oh * j->ow * (j->ci + j->co) * (int64_t)sizeof(T);
    int64_t group = up_div(n, up_div(n, at_least(1, BLOCK / tiles))), blocks = up_div(n, group);
    FN(Cut) cut = {.j = j, .height = j->oh, .group = group, .grain = 1};
    int64_t down = at_least(up_div(most, blocks), up_div(bytes, BAND_BYTES));
    down = group > 1 ? 1 : at_least(1, at_most(down, tiles / (BLOCK - BLOCK / 4)));
    cut.rows = up_div(high, down) * OUT, cut.row_cuts = up_div(j->oh, cut.rows);
    int64_t across = at_least(1, up_div(at_most(at_least(MOST_PIECES / 2, threads), most), blocks * cut.row_cuts));
    cut.outputs = at_least(blocks * cut.row_cuts < threads ? PANEL : 2 * PANEL, up_div(up_div(j->co, across), PANEL) * PANEL), cut.output_cuts = up_div(j->co, cut.outputs);
    cut.items = blocks * cut.row_cuts * cut.output_cuts;
    return cut;
}

static void W(convolve)(FN(Job) *j, Team *team) {
    FN(Cut) cut = W(cut)(j, SHARERS(team));
    if (!W(passing)(j)) parallel_for(team, up_div(j->co, TILE_LANES), 1, W(filters), j);
    parallel_for(team, cut.items, cut.grain, W(images), &cut);
}

#undef SIDE
#undef ELEMENTS
#undef BLOCK
