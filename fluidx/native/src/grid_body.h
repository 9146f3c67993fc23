/* grid_sample of one type T: included with T, FN(name). */

INLINE T FN(below)(T x) { return sizeof(T) == 4 ? (T)floorf((float)x) : (T)floor((double)x); }
INLINE T FN(nearest)(T x) { return sizeof(T) == 4 ? (T)rintf((float)x) : (T)rint((double)x); }
INLINE T FN(magnitude)(T x) { return sizeof(T) == 4 ? (T)fabsf((float)x) : (T)fabs((double)x); }

/* x thrown back at `low` and `high` until it lies between them */
INLINE T FN(thrown_back)(T x, T low, T high, T span) {
    T turn = x - low;
    turn -= FN(below)(turn / (2 * span)) * (2 * span);
    return span > 0 ? high - FN(magnitude)(turn - span) : low;
}

/* Keys' kernel at distance t, with a = -0.75 */
INLINE T FN(cubic)(T t) {
    T c = (T)-0.75, near = ((c + 2) * t - (c + 3)) * t * t + 1, far = ((t - 5) * t + 8) * t * c - 4 * c;
    return t <= 1 ? near : far;
}

/* The places and weights of the taps of m points along one axis of size d; `grid` steps from point to point. NaN is at place 0. */
static void FN(taps_along)(const Grid *p, const T *grid, int64_t m, int64_t d, int32_t (*at)[GRID_BLOCK], T (*weight)[GRID_BLOCK]) {
    T low = p->centers ? 0 : (T)-0.5, high = (T)(p->centers ? (double)d - 1 : (double)d - 0.5), span = high - low;
    T slope = (T)(((double)high - (double)low) / 2), middle = (T)(((double)high + (double)low) / 2), last = (T)(d - 1);
    for (int64_t k = 0; k < m; k++) {
        T x = grid[k * p->axes] * slope + middle;
        if (p->taps == 1) x = FN(nearest)(x);
        if (p->padding == 2) {
            x = FN(thrown_back)(x, low, high, span);
        } else { /* where all taps lie outside it does not matter how far */
            x = x < -3 ? -3 : x;
            x = x > (T)(d + 2) ? (T)(d + 2) : x;
        }
        T base = FN(below)(x);
        for (int64_t tap = 0; tap < p->taps; tap++) {
            T place = base + (T)(tap - (p->taps == 4)), t = FN(magnitude)(place - x);
            T w = p->taps == 1 ? 1 : p->taps == 2 ? 1 - t : FN(cubic)(t);
            if (p->padding == 2) place = FN(thrown_back)(place, low, high, span);
            T inside = place > 0 ? place > last ? last : place : 0;
            at[tap][k] = (int32_t)inside;
            weight[tap][k] = p->padding == 0 && inside != place ? 0 * w : w;
        }
    }
}

static void FN(grid_sample_range)(void *ctx, int64_t begin, int64_t end) {
    const Grid *p = ctx;
    int64_t ways = 1, elements = p->size[0] * p->size[1] * p->size[2];
    for (int64_t k = 0; k < p->axes; k++) ways *= p->taps;
    T weights[64][GRID_BLOCK], w[3][4][GRID_BLOCK];
    int64_t places[64][GRID_BLOCK];
    int32_t at[3][4][GRID_BLOCK];
    for (; begin < end; begin++) {
        int64_t image = begin / p->blocks, first = begin % p->blocks * GRID_BLOCK, left = p->points - first;
        int64_t m = left < GRID_BLOCK ? left : GRID_BLOCK;
        const T *grid = PTR(const T, p->grid) + (image * p->points + first) * p->axes;
        const T *x = PTR(const T, p->x) + image * p->channels * elements;
        for (int64_t k = 0; k < p->axes; k++) FN(taps_along)(p, grid + p->axes - 1 - k, m, p->size[k], at[k], w[k]);
        for (int64_t way = 0; way < ways; way++) {
            for (int64_t i = 0; i < m; i++) places[way][i] = 0, weights[way][i] = 1;
            for (int64_t k = 0, step = ways; k < p->axes; k++) {
                step /= p->taps;
                int64_t tap = way / step % p->taps, d = p->size[k];
                for (int64_t i = 0; i < m; i++) places[way][i] = places[way][i] * d + at[k][tap][i], weights[way][i] *= w[k][tap][i];
            }
        }
        for (int64_t c = 0; c < p->channels; c++, x += elements) {
            T sum[GRID_BLOCK] = {0}, *to = PTR(T, p->out) + (image * p->channels + c) * p->points + first;
            for (int64_t way = 0; way < ways; way++)
                for (int64_t i = 0; i < m; i++) sum[i] += x[places[way][i]] * weights[way][i];
            for (int64_t i = 0; i < m; i++) to[i] = sum[i];
        }
    }
}

static void FN(grid_sample)(const int64_t *a, Team *team) {
    Grid p = {a[0], a[1], a[2], a[4], a[5], {a[6], a[7], a[8]}, a[9], a[10], a[11], a[12], (a[9] + GRID_BLOCK - 1) / GRID_BLOCK};
    double ways = pow((double)p.taps, (double)p.axes);
    parallel_for(team, a[3] * p.blocks, grain_of(GRID_BLOCK * ways * ((double)p.channels * 0.5 + 2)), FN(grid_sample_range), &p);
}
