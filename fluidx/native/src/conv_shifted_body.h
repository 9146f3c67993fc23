/* conv.h for one type: products with shifted pixels; T, FN(name). */

/* A convolution at stride 1 over staged pixels: `rows` x `columns` results at every `step_y`, `step_x` from (y, x) on, and its taps. */
typedef struct FN(Grid) {
    int64_t rows, columns, y, x, step_y, step_x, taps;
    int64_t from[MOST_TAPS], tap[MOST_TAPS]; /* where in the staged pixels, and which of the filter */
} FN(Grid);

/* The filter as [taps][co / 64][ci][64]. Items are blocks of TILE_LANES outputs. */
static void FN(shifted_filters)(void *ctx, int64_t begin, int64_t end) {
    const FN(Job) *j = ctx;
    int64_t taps = j->k.kh * j->k.kw, lane = j->back ? taps : j->ci * taps, step = j->back ? j->co * taps : taps;
    for (int64_t o = begin * TILE_LANES; o < at_most(j->co, end * TILE_LANES); o += TILE_LANES) {
        int64_t first = o / PANEL * PANEL, width = at_most(PANEL, j->co - first), lanes = at_most(TILE_LANES, j->co - o);
        for (int64_t c = 0; c < j->ci; c++)
            for (int64_t t = 0; t < taps; t++) {
                const T *from = j->filter + o * lane + c * step + t;
                T *to = j->scratch + t * j->ci * j->co + first * j->ci + c * width + o - first;
                for (int64_t l = 0; l < lanes; l++) to[l] = from[l * lane];
            }
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
                for (int64_t t = 0; t < g->taps; t++)
                    for (int64_t i = 0; i < count; i++)
                        if (FN(product)(0, 0, run, width, ci, 1, staged + g->from[t] + i * plane, ci,
                                        j->scratch + g->tap[t] * ci * co + o * ci, width, t ? 1 : 0, made + i * run * co + o, co))
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
        for (int64_t i = 0; i < count; i++) {
            T *image = j->out + (first + i) * out_size;
            if (!nhwc) FN(turn)(out_images + i * out_size, j->oh * j->ow, co, image);
            FN(complete)(j, image, 1, out_size, out_size);
        }
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
    parallel_for(team, up_div(j->co, TILE_LANES), 1, FN(shifted_filters), j);
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
