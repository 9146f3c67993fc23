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

/* The matrices of transformed filters, each in panels of 64 outputs: [ELEMENTS][co / 64][ci][64], SPREAD elements between them: at distances
 * of a power of two they would all meet in the same few lines of the cache. Backwards the filters are turned over. Items are blocks of
 * TILE_LANES outputs. */
static void W(filters)(void *ctx, int64_t begin, int64_t end) {
    const FN(Job) *j = ctx;
    int64_t lane = j->back ? 9 : j->ci * 9, step = j->back ? j->co * 9 : 9, size = j->ci * j->co + SPREAD;
    for (int64_t block = begin; block < end; block++) {
        int64_t o = block * TILE_LANES, lanes = at_most(TILE_LANES, j->co - o), first = o / PANEL * PANEL, width = at_most(PANEL, j->co - first);
        T w[TILE_LANES][9][TILE_LANES], u[ELEMENTS][TILE_LANES];
        memset(w, 0, sizeof w);
        for (int64_t c0 = 0; c0 < j->ci; c0 += TILE_LANES) {
            int64_t some = at_most(TILE_LANES, j->ci - c0);
            const T *from = j->filter + o * lane + c0 * step;
            if (j->back) {
                for (int64_t c = 0; c < some; c++)
                    for (int64_t l = 0; l < lanes; l++)
                        for (int t = 0; t < 9; t++) w[c][8 - t][l] = from[c * step + l * 9 + t];
            } else {
                for (int64_t l = 0; l < lanes; l++)
                    for (int64_t c = 0; c < some; c++)
                        for (int t = 0; t < 9; t++) w[c][t][l] = from[l * lane + c * 9 + t];
            }
            for (int64_t c = 0; c < some; c++) {
                W(filter_in)(w[c], u);
                T *to = j->scratch + first * j->ci + (c0 + c) * width + (o - first);
                for (int e = 0; e < ELEMENTS; e++) {
                    T *row = to + e * size;
                    if (lanes == TILE_LANES)
                        for (int l = 0; l < TILE_LANES; l++) row[l] = u[e][l];
                    else
                        for (int64_t l = 0; l < lanes; l++) row[l] = u[e][l];
                }
            }
        }
    }
}

/* Images [begin, end): transform, multiply, transform back, a block of tiles at a time. */
static void W(images)(void *ctx, int64_t begin, int64_t end) {
    FN(Job) *j = ctx;
    int64_t ci = j->ci, co = j->co, th = up_div(j->oh, OUT), tw = up_div(j->ow, OUT), tiles = th * tw, nhwc = j->k.nhwc;
    int64_t in_size = j->ih * j->iw * ci, out_size = j->oh * j->ow * co, group = j->group, block = BLOCK;
    T *v = scratch(sizeof(T) * (size_t)(ELEMENTS * (block * (ci + co) + 2 * SPREAD + ci) + (nhwc ? 0 : group * (in_size + out_size))));
    if (!v) {
        j->failed = 1;
        return;
    }
    T *m = v + ELEMENTS * (block * ci + SPREAD), *room = m + ELEMENTS * (block * co + SPREAD);
    T *turned = room + ELEMENTS * ci, *made = turned + group * in_size;
    for (int64_t first = begin * group; first < at_most(end * group, j->k.n); first += group) {
        int64_t count = at_most(group, j->k.n - first);
        for (int64_t i = 0; i < count && !nhwc; i++) FN(turn)(j->in + (first + i) * in_size, ci, j->ih * j->iw, turned + i * in_size);
        const T *in = nhwc ? j->in + first * in_size : turned;
        T *out = nhwc ? j->out + first * out_size : made;
        for (int64_t t0 = 0; t0 < count * tiles; t0 += block) {
            int64_t some = at_most(block, count * tiles - t0), apart = some * ci + SPREAD, apart_m = some * co + SPREAD;
            for (int64_t t = 0; t < some; t++) {
                int64_t image = (t0 + t) / tiles, y = (t0 + t) % tiles / tw * OUT, x = (t0 + t) % tw * OUT, row, c = 0;
                const T *s = FN(patch)(in + image * in_size, j->ih, j->iw, ci, y - j->top, x - j->left, SIDE, room, &row);
                for (; c + TILE_LANES <= ci; c += TILE_LANES) W(tile_in)(s + c, row, ci, v + t * ci + c, apart, TILE_LANES);
                if (c < ci) W(tile_in)(s + c, row, ci, v + t * ci + c, apart, (int)(ci - c));
            }
            for (int64_t e = 0; e < ELEMENTS; e++)
                for (int64_t o = 0; o < co; o += PANEL)
                    if (FN(channel_sums)(some, at_most(PANEL, co - o), ci, v + e * apart, j->scratch + e * (ci * co + SPREAD) + o * ci,
                                         m + e * apart_m + o, co))
                        j->failed = 1;
            for (int64_t t = 0; t < some; t++) {
                int64_t image = (t0 + t) / tiles, y = (t0 + t) % tiles / tw * OUT, x = (t0 + t) % tw * OUT;
                T *to = out + image * out_size + (y * j->ow + x) * co;
                int64_t down = at_most(OUT, j->oh - y), right = at_most(OUT, j->ow - x);
                for (int64_t c = 0; c < co; c += TILE_LANES) {
                    T r[OUT * OUT][TILE_LANES];
                    int lanes = (int)at_most(TILE_LANES, co - c);
                    if (lanes == TILE_LANES)
                        W(tile_out)(m + t * co + c, apart_m, r, TILE_LANES);
                    else
                        W(tile_out)(m + t * co + c, apart_m, r, lanes);
                    for (int64_t i = 0; i < down; i++)
                        for (int64_t k = 0; k < right; k++) {
                            T *p = to + (i * j->ow + k) * co + c;
                            if (lanes == TILE_LANES)
                                LANEWISE for (int l = 0; l < TILE_LANES; l++) p[l] = r[i * OUT + k][l];
                            else
                                for (int l = 0; l < lanes; l++) p[l] = r[i * OUT + k][l];
                        }
                }
            }
        }
        for (int64_t i = 0; i < count; i++) {
            T *image = j->out + (first + i) * out_size;
            if (!nhwc) FN(turn)(made + i * out_size, j->oh * j->ow, co, image);
            FN(complete)(j, image, 1, out_size, out_size);
        }
    }
}

static void W(convolve)(FN(Job) *j, Team *team) {
    j->group = at_most(j->k.n, at_least(1, BLOCK / (up_div(j->oh, OUT) * up_div(j->ow, OUT))));
    parallel_for(team, up_div(j->co, TILE_LANES), 1, W(filters), j);
    parallel_for(team, up_div(j->k.n, j->group), 1, W(images), j);
}

#undef SIDE
#undef ELEMENTS
#undef BLOCK
