/* conv.h for one type: depthwise convolutions; T, FN(name). */

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

/* `lanes` pixels of each of `rows` rows of results: the windows of a plane dealt out for stride `step` from `s` on, times the filter from `w`
 * on, which goes on by `next`. Sums stay in registers. */
INLINE void FN(direct_rows)(const int rows, const int64_t step, const Conv *k, int64_t pitch, const T *s, const T *w, int64_t next, int add,
                            T *y, int lanes) {
    T sums[DIRECT_ROWS][TILE_LANES];
    int64_t row = step * pitch, apart = k->sh * row;
    UNROLL for (int r = 0; r < rows; r++) LANEWISE for (int l = 0; l < TILE_LANES; l++) sums[r][l] = 0;
    for (int64_t i = 0; i < k->kh; i++, s += k->dh * row)
        for (int64_t j = 0, at = 0; j < k->kw; j++, w += next, at += k->dw) {
            const T *from = s + (step == 1 ? at : at % step * pitch + at / step), f = *w;
            UNROLL for (int r = 0; r < rows; r++)
                LANEWISE for (int l = 0; l < TILE_LANES; l++) sums[r][l] = MULADD(f, from[r * apart + l], sums[r][l]);
        }
    UNROLL for (int r = 0; r < rows; r++, y += k->ow) {
        if (lanes == TILE_LANES && !add) {
            LANEWISE for (int l = 0; l < TILE_LANES; l++) y[l] = sums[r][l];
        } else if (!add) {
            LANEWISE for (int l = 0; l < TILE_LANES; l++) if (l < lanes) y[l] = sums[r][l];
        } else {
            LANEWISE for (int l = 0; l < TILE_LANES; l++) if (l < lanes) y[l] += sums[r][l];
        }
    }
}

/* y, or what is added to it: the windows of a plane dealt out times the filter w [taps], which is turned over if `back`. TILE_LANES pixels are
 * read beyond the plane. */
static void FN(direct_plane)(const Conv *k, const T *dealt, const T *w, int64_t back, T *y) {
    int64_t pitch = FN(pitch)(k), row = k->sw * pitch, next = back ? -1 : 1;
    const T *first = w + (back ? k->kh * k->kw - 1 : 0);
    for (int64_t r = 0, rows; r < k->oh; r += rows) {
        rows = k->oh - r >= DIRECT_ROWS ? DIRECT_ROWS : k->oh - r >= 2 ? 2 : 1;
        for (int64_t x = 0; x < k->ow; x += TILE_LANES) {
            const T *s = dealt + r * k->sh * row + x;
            T *to = y + r * k->ow + x;
            int lanes = (int)at_most(TILE_LANES, k->ow - x);
#define ROWS_AT(step)                                                                                                                   \
    if (rows == DIRECT_ROWS)                                                                                                            \
        FN(direct_rows)(DIRECT_ROWS, step, k, pitch, s, first, next, back != 0, to, lanes);                                             \
    else if (rows == 2)                                                                                                                 \
        FN(direct_rows)(2, step, k, pitch, s, first, next, back != 0, to, lanes);                                                       \
    else                                                                                                                                \
        FN(direct_rows)(1, step, k, pitch, s, first, next, back != 0, to, lanes)
            if (k->sw == 1) {
                ROWS_AT(1);
            } else if (k->sw == 2) {
                ROWS_AT(2);
            } else {
                ROWS_AT(k->sw);
            }
#undef ROWS_AT
        }
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
    int64_t size = FN(dealt_size)(&q) + TILE_LANES;
    T *dealt = scratch(sizeof(T) * (size_t)(size + FN(padded_plane)(&q)));
    if (!dealt) {
        j->failed = 1;
        return;
    }
    for (int64_t item = begin; item < end; item++) {
        T *x = (T *)j->in + item * area, *y = j->out + item * og * pixels;
        const T *w = j->filter + item % k->c * og * taps;
        if (j->back) {
            FN(clear)(x, area);
        } else {
            FN(deal)(&q, x, dealt, dealt + size);
        }
        for (int64_t o = 0; o < og; o++, y += pixels, w += taps) {
            if (!gathers) {
                FN(spread)(k, x, w, y);
                continue;
            }
            if (j->back) FN(deal)(&q, y, dealt, dealt + size);
            FN(direct_plane)(&q, dealt, w, j->back, j->back ? x : y);
        }
        if (j->back)
            FN(complete)(j, x, 1, area, area);
        else
            FN(complete)(j, y - og * pixels, 1, og * pixels, og * pixels);
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
