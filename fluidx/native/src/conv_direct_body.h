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
