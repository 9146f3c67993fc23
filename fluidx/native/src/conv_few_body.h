/* conv.h for one type: convolutions of few channels or to few outputs, from padded planes; T, FN(name), MULADD.
 *
 * Sums stay in registers while the taps run: those of some pixels of a row, with outputs as lanes, or those of some outputs, with the pixels
 * of a row as lanes, whichever leaves fewer lanes idle. Either way an output is one sum along the depth, and the filter lies as
 * [depth][outputs], which end in zeros to whole lanes. */

INLINE int64_t FN(few_lanes)(const Conv *k) { return up_div(k->o, TILE_LANES) * TILE_LANES; }

/* Items are blocks of TILE_LANES outputs. */
static void FN(few_filters)(void *ctx, int64_t begin, int64_t end) {
    const FN(Job) *j = ctx;
    int64_t depth = j->k.c * j->k.kh * j->k.kw, pitch = FN(few_lanes)(&j->k);
    for (int64_t o = begin * TILE_LANES; o < end * TILE_LANES; o++)
        for (int64_t d = 0; d < depth; d++) j->scratch[d * pitch + o] = o < j->k.o ? j->filter[o * depth + d] : 0;
}

/* TILE_LANES outputs at [count] neighbouring pixels, from the planes at `s` on. */
INLINE void FN(few_pixels)(const int count, const Conv *k, const T *s, const T *w, T *y, int64_t pitch) {
    int64_t plane = FN(tall)(k) * FN(wide)(k), row = FN(wide)(k) * k->dh, lanes = FN(few_lanes)(k), step = k->sw;
    T sums[FEW_PIXELS][TILE_LANES];
    UNROLL for (int p = 0; p < count; p++) UNROLL for (int l = 0; l < TILE_LANES; l++) sums[p][l] = 0;
    for (int64_t c = 0; c < k->c; c++)
        for (int64_t i = 0; i < k->kh; i++) {
            const T *from = s + c * plane + i * row;
            for (int64_t t = 0; t < k->kw; t++, from += k->dw, w += lanes)
                UNROLL for (int p = 0; p < count; p++) {
                    T x = from[p * step];
                    for (int l = 0; l < TILE_LANES; l++) sums[p][l] = MULADD(x, w[l], sums[p][l]);
                }
        }
    UNROLL for (int p = 0; p < count; p++)
        for (int l = 0; l < TILE_LANES; l++) y[p * pitch + l] = sums[p][l];
}

/* [count] outputs at `vectors` of neighbouring pixels, from the planes at `s` on; of the last one `rest` pixels are there. */
INLINE void FN(few_outputs)(const int count, const int vectors, const Conv *k, const T *s, const T *w, T *y, int64_t rest) {
    int64_t plane = FN(tall)(k) * FN(wide)(k), row = FN(wide)(k) * k->dh, lanes = FN(few_lanes)(k), pixels = k->oh * k->ow;
    T sums[FEW_OUTPUTS][FEW_VECTORS][TILE_LANES];
    UNROLL for (int o = 0; o < count; o++)
        UNROLL for (int v = 0; v < vectors; v++) UNROLL for (int l = 0; l < TILE_LANES; l++) sums[o][v][l] = 0;
    for (int64_t c = 0; c < k->c; c++)
        for (int64_t i = 0; i < k->kh; i++) {
            const T *from = s + c * plane + i * row;
            for (int64_t t = 0; t < k->kw; t++, from += k->dw, w += lanes)
                UNROLL for (int o = 0; o < count; o++) {
                    T x = w[o];
                    UNROLL for (int v = 0; v < vectors; v++)
                        for (int l = 0; l < TILE_LANES; l++) sums[o][v][l] = MULADD(x, from[v * TILE_LANES + l], sums[o][v][l]);
                }
        }
    UNROLL for (int o = 0; o < count; o++) {
        T *to = y + o * pixels;
        UNROLL for (int v = 0; v < vectors - 1; v++)
            for (int l = 0; l < TILE_LANES; l++) to[v * TILE_LANES + l] = sums[o][v][l];
        if (rest == TILE_LANES)
            for (int l = 0; l < TILE_LANES; l++) to[(vectors - 1) * TILE_LANES + l] = sums[o][vectors - 1][l];
        else
            for (int64_t l = 0; l < rest; l++) to[(vectors - 1) * TILE_LANES + l] = sums[o][vectors - 1][l];
    }
}

#define ONE(n)                                                                                                                          \
    static void FN(few_pixels_##n)(const Conv *k, const T *s, const T *w, T *y, int64_t pitch) { FN(few_pixels)(n, k, s, w, y, pitch); }
FEW_EACH_PIXEL(ONE)
#undef ONE
#define ONE(n, v)                                                                                                                       \
    static void FN(few_outputs_##n##_##v)(const Conv *k, const T *s, const T *w, T *y, int64_t rest) {                                  \
        FN(few_outputs)(n, v, k, s, w, y, rest);                                                                                        \
    }
FEW_EACH_OUTPUT(ONE, 1)
#if HAVE_512
FEW_EACH_OUTPUT(ONE, 2)
#endif
#undef ONE
typedef void (*FN(Few))(const Conv *k, const T *s, const T *w, T *y, int64_t last);
#define ONE(n) FN(few_pixels_##n),
static const FN(Few) FN(few_pixels_of)[] = {FEW_EACH_PIXEL(ONE)};
#undef ONE
#define ONE(n, v) FN(few_outputs_##n##_##v),
static const FN(Few) FN(few_outputs_of)[][FEW_OUTPUTS] = {{FEW_EACH_OUTPUT(ONE, 1)},
#if HAVE_512
                                                          {FEW_EACH_OUTPUT(ONE, 2)},
#endif
};
#undef ONE

/* How many of `n` go together, at most `most`, so that the last ones are hardly fewer. */
INLINE int64_t FN(few_share)(int64_t n, int64_t most) { return up_div(n, up_div(n, most)); }

/* Results [pixels][lanes of outputs], or straight where they belong if that is the layout. The last pixels of a row may be done twice. */
static void FN(few_by_pixels)(const FN(Job) *j, const Conv *k, const T *padded, T *y, T *room) {
    int64_t area = j->k.oh * j->k.ow, pixels = k->oh * k->ow, count = FN(few_share)(k->ow, FEW_PIXELS), wide = FN(wide)(k);
    FN(Few) some = FN(few_pixels_of)[count - 1];
    for (int64_t o = 0; o < k->o; o += TILE_LANES) {
        int64_t lanes = at_most(TILE_LANES, k->o - o), straight = k->nhwc && lanes == TILE_LANES, pitch = straight ? k->o : TILE_LANES;
        T *to = straight ? y + o : room;
        for (int64_t r = 0; r < k->oh; r++)
            for (int64_t x = 0; x < k->ow; x += count) {
                int64_t at = at_most(x, k->ow - count);
                some(k, padded + r * k->sh * wide + at * k->sw, j->scratch + o, to + (r * k->ow + at) * pitch, pitch);
            }
        if (k->nhwc && !straight) {
            for (int64_t p = 0; p < pixels; p++)
                for (int64_t l = 0; l < lanes; l++) y[p * k->o + o + l] = room[p * TILE_LANES + l];
        } else if (!k->nhwc && lanes == TILE_LANES) {
            FN(turn_part)(room, TILE_LANES, pixels, TILE_LANES, y + o * area, area);
        } else if (!k->nhwc) {
            for (int64_t l = 0; l < lanes; l++)
                for (int64_t p = 0; p < pixels; p++) y[(o + l) * area + p] = room[p * TILE_LANES + l];
        }
    }
}

/* Planes of results. Whole vectors are stored beyond the end of a row, where the next row comes to lie. */
static void FN(few_by_outputs)(const FN(Job) *j, const Conv *k, const T *padded, T *y) {
    int64_t share = FN(few_share)(k->o, FEW_OUTPUTS), wide = FN(wide)(k), most = FEW_VECTORS * TILE_LANES;
    for (int64_t o = 0; o < k->o; o += share) {
        int64_t count = at_most(share, k->o - o);
        for (int64_t r = 0; r < k->oh; r++)
            for (int64_t x = 0; x < k->ow; x += most) {
                int64_t left = at_most(most, k->ow - x), vectors = up_div(left, TILE_LANES);
                int64_t rest = r + 1 < k->oh && k->ow >= TILE_LANES ? TILE_LANES : left - (vectors - 1) * TILE_LANES;
                FN(few_outputs_of)[vectors - 1][count - 1](k, padded + r * k->sh * wide + x, j->scratch + o,
                                                           y + o * k->oh * k->ow + r * k->ow + x, rest);
            }
    }
}

/* Items are bands of `height` rows, `planes` of them in each image. */
static void FN(few_bands)(void *ctx, int64_t begin, int64_t end) {
    FN(Job) *j = ctx;
    const Conv *k = &j->k;
    Conv q = *k;
    q.oh = j->height;
    int64_t area = k->oh * k->ow, in_size = k->c * k->h * k->w, most = q.oh * k->ow * at_least(TILE_LANES, k->o);
    int64_t by_pixels = FN(few_share)(k->ow, FEW_PIXELS) * up_div(k->ow, FEW_PIXELS) * up_div(k->o, TILE_LANES);
    int64_t planes = k->sw == 1 && k->o * up_div(k->ow, TILE_LANES) <= by_pixels, direct = !k->nhwc && j->planes == 1;
    int64_t padded_size = k->c * FN(tall)(&q) * FN(wide)(k) + FEW_VECTORS * TILE_LANES; /* read beyond the last row */
    T *padded = scratch(sizeof(T) * (size_t)(padded_size + most + (k->nhwc ? in_size : 0)));
    if (!padded) {
        j->failed = 1;
        return;
    }
    T *room = padded + padded_size, *turned = room + most;
    for (int64_t item = begin; item < end; item++) {
        int64_t n = item / j->planes, y0 = item % j->planes * j->height, pixels;
        q.oh = at_most(j->height, k->oh - y0), q.top = k->top - y0 * k->sh, pixels = q.oh * k->ow;
        T *y = j->out + n * k->o * area + y0 * k->ow * (k->nhwc ? k->o : 1);
        FN(pad)(&q, FN(channels)(j->in + n * in_size, k->nhwc, k->c, k->h * k->w, turned), padded);
        if (planes)
            FN(few_by_outputs)(j, &q, padded, direct ? y : room);
        else
            FN(few_by_pixels)(j, &q, padded, y, room);
        if (planes && k->nhwc) FN(turn)(room, k->o, pixels, y);
        for (int64_t o = 0; o < k->o && planes && !k->nhwc && !direct; o++) FN(move)(y + o * area, room + o * pixels, pixels);
        if (k->nhwc)
            FN(complete)(j, y, 1, k->o * pixels, k->o * pixels);
        else
            FN(complete)(j, y, k->o, pixels, area);
    }
}

/* A batch of fewer images than threads is cut into bands of rows; the sums are the same. */
static void FN(few)(FN(Job) *j, Team *team) {
    const Conv *k = &j->k;
    int64_t multiplications = k->o * k->c * k->kh * k->kw * k->oh * k->ow, bands = up_div(team->threads, at_least(1, k->n));
    bands = at_least(1, at_most(at_most(k->oh, bands), multiplications / PIECE_SMALL));
    j->height = up_div(k->oh, bands), j->planes = up_div(k->oh, j->height);
    parallel_for(team, up_div(k->o, TILE_LANES), at_least(1, 4096 / (k->c * k->kh * k->kw)), FN(few_filters), j);
    parallel_for(team, k->n * j->planes, j->planes > 1 ? 1 : 250000 / at_least(multiplications, 1) + 1, FN(few_bands), j);
}
