/* conv.h for one type: columns (im2col) in rows of pixels; T, FN(name). */

/* Pixels of a padded row that windows at stride sw read one after the other stand together: rows are [sw][pitch]. */
INLINE int64_t FN(pitch)(const Conv *k) { return up_div(FN(wide)(k), k->sw); }
INLINE int64_t FN(dealt_size)(const Conv *k) { return k->c * FN(tall)(k) * k->sw * FN(pitch)(k); }

INLINE int64_t FN(padded_plane)(const Conv *k) { return k->sw > 1 ? FN(tall)(k) * FN(wide)(k) + TILE_LANES + k->sw : 0; }

/* Planes padded and dealt so, by way of one plane in `room`. */
static void FN(deal)(const Conv *k, const T *x, T *to, T *room) {
    Conv one = *k;
    one.c = 1;
    if (k->sw == 1) {
        FN(pad)(k, x, to);
        return;
    }
    int64_t tall = FN(tall)(k), wide = FN(wide)(k), pitch = FN(pitch)(k);
    for (int64_t c = 0; c < k->c; c++, x += k->h * k->w) {
        FN(pad)(&one, x, room);
        for (int64_t y = 0; y < tall; y++)
            for (int64_t d = 0; d < k->sw; d++, to += pitch) {
                const T *from = room + y * wide + d;
                if (k->sw == 2) {
                    IVDEP for (int64_t i = 0; i < pitch; i++) to[i] = from[2 * i];
                } else {
                    for (int64_t i = 0; i < pitch; i++) to[i] = from[i * k->sw];
                }
            }
    }
}

/* Columns [c][taps][p1 - p0] of pixels [p0, p1) of results, from planes dealt out; those of the next image lie `size` further. Runs are
 * copied TILE_LANES at a time; what is written beyond their end the next one overwrites. */
static void FN(gather)(const Conv *k, const T *dealt, int64_t size, int64_t c, int64_t p0, int64_t p1, T *to) {
    int64_t row = k->sw * FN(pitch)(k), down = k->sh * row, x0 = p0 % k->ow, y0 = p0 / k->ow % k->oh, next = size - k->oh * down;
    const T *first = dealt + p0 / k->ow / k->oh * size + y0 * down + x0;
    for (int64_t ch = 0; ch < c; ch++, first += FN(tall)(k) * row)
        for (int64_t i = 0; i < k->kh; i++)
            for (int64_t j = 0; j < k->kw; j++) {
                const T *s = first + i * k->dh * row + j * k->dw % k->sw * FN(pitch)(k) + j * k->dw / k->sw;
                for (int64_t left = p1 - p0, run = at_most(k->ow - x0, left), y = y0, x = x0; left; x = 0, run = at_most(k->ow, left)) {
                    for (int64_t l = 0; l < run; l += TILE_LANES) IVDEP for (int v = 0; v < TILE_LANES; v++) to[l + v] = s[l + v];
                    s += down - x, to += run, left -= run;
                    if (++y == k->oh) y = 0, s += next;
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

/* Of images [first, last) the gradient of the image, or that of the filter, summed in `sums`. */
static void FN(columns_images)(FN(Job) *j, int64_t first, int64_t last, T *sums) {
    const Conv *k = &j->k;
    int64_t cg = k->c / k->groups, og = k->o / k->groups, taps = k->kh * k->kw, depth = cg * taps, pixels = k->oh * k->ow;
    int64_t image_size = k->c * k->h * k->w, out_size = k->o * pixels, step = FN(some_rows)(k, depth), plane = FN(dealt_size)(k) / k->c;
    int64_t dealt_size = j->back ? 0 : FN(dealt_size)(k) + TILE_LANES + FN(padded_plane)(k);
    T *columns = scratch(sizeof(T) * (size_t)(depth * step * k->ow + TILE_LANES + dealt_size + (k->nhwc ? image_size + out_size : 0)));
    if (!columns) {
        j->failed = 1;
        return;
    }
    T *dealt = columns + depth * step * k->ow + TILE_LANES, *room_x = dealt + dealt_size, *room_y = room_x + image_size;
    for (int64_t n = first; n < last; n++) {
        T *in = (T *)j->in + n * image_size, *x = k->nhwc ? room_x : in;
        const T *y = FN(channels)(j->out + n * out_size, k->nhwc, k->o, pixels, room_y);
        if (j->back)
            FN(clear)(x, image_size);
        else
            FN(deal)(k, FN(channels)(in, k->nhwc, k->c, k->h * k->w, room_x), dealt, dealt + k->c * plane + TILE_LANES);
        for (int64_t g = 0; g < k->groups; g++)
            for (int64_t y0 = 0; y0 < k->oh; y0 += step) {
                int64_t y1 = at_most(k->oh, y0 + step), some = (y1 - y0) * k->ow, fresh = n == first && !y0;
                const T *rows = y + g * og * pixels + y0 * k->ow;
                const T *w = j->filter + g * og * depth;
                if (j->back) {
                    if (FN(product)(1, 0, depth, some, og, 1, w, depth, rows, pixels, 0, columns, some)) j->failed = 1;
                    FN(scatter)(k, x + g * cg * k->h * k->w, cg, y0, y1, columns);
                } else {
                    T *to = sums + g * og * depth;
                    FN(gather)(k, dealt + g * cg * plane, 0, cg, y0 * k->ow, y1 * k->ow, columns);
                    if (FN(product)(0, 1, og, depth, some, 1, rows, pixels, columns, some, !fresh, to, depth)) j->failed = 1;
                }
            }
        if (j->back && k->nhwc) FN(turn)(x, k->c, k->h * k->w, in);
        if (j->back) FN(complete)(j, in, 1, image_size, image_size);
    }
}

static void FN(columns_back)(void *ctx, int64_t begin, int64_t end) { FN(columns_images)(ctx, begin, end, NULL); }

/* A piece as a convolution of its own: fewer rows of one group's channels. */
INLINE Conv FN(part_of)(const Conv *k, const FN(Piece) *p) {
    Conv q = *k;
    q.c = p->c1 - p->c0, q.oh = p->y1 - p->y0, q.top = k->top - p->y0 * k->sh;
    return q;
}

/* Products of the filter with columns, of which a few at a time are made: as many as `product` reads where they lie. */
static int FN(columns_product)(const Conv *q, const T *dealt, int64_t size, const T *w, int64_t depth, int64_t outputs, int64_t pixels,
                               T *y, int64_t ld, T *room) {
    int64_t taps = q->kh * q->kw, deep = at_least(1, COLUMN_ROWS / taps), plane = FN(dealt_size)(q) / q->c, failed = 0;
    int64_t chunk = at_least(COLUMN_WIDTH, COLUMN_RESULTS / outputs / COLUMN_WIDTH * COLUMN_WIDTH);
    for (int64_t p0 = 0; p0 < pixels; p0 += chunk)
        for (int64_t c = 0; c < q->c; c += deep)
            for (int64_t p = p0, some, end = at_most(pixels, p0 + chunk); p < end; p += some) {
                int64_t channels = at_most(deep, q->c - c), left = end - p;
                some = left <= COLUMN_WIDTH ? left : left < COLUMN_WIDTH + COLUMN_WIDTH / 4 ? COLUMN_WIDTH / 2 : COLUMN_WIDTH;
                FN(gather)(q, dealt + c * plane, size, channels, p, p + some, room);
                failed |= FN(product)(0, 0, outputs, some, channels * taps, 1, w + c * taps, depth, room, some, c ? 1 : 0, y + p, ld);
            }
    return (int)failed;
}

static void FN(columns_run)(void *ctx, int64_t begin, int64_t end) {
    const FN(Cut) *cut = ctx;
    FN(Job) *j = cut->j;
    const Conv *k = &j->k;
    FN(View) out = FN(view_y)(k);
    FN(Piece) p = {0, 0, 0, cut->rows, 0, k->c / k->groups}, o;
    Conv q = FN(part_of)(k, &p);
    int64_t taps = k->kh * k->kw, depth = q.c * taps, area = k->h * k->w, most = cut->group * cut->rows * k->ow * cut->outputs;
    int64_t size = FN(dealt_size)(&q), plane = FN(padded_plane)(&q);
    int64_t columns = at_least(COLUMN_ROWS, taps) * COLUMN_WIDTH + TILE_LANES;
    T *dealt = scratch(sizeof(T) * (size_t)(cut->group * size + TILE_LANES + plane + columns + (k->nhwc ? q.c * area + 2 * most : most)));
    if (!dealt) {
        j->failed = 1;
        return;
    }
    T *padded = dealt + cut->group * size + TILE_LANES, *room = padded + plane, *made = room + columns;
    T *turned = made + most, *last = turned + most;
    for (int64_t item = begin; item < end; item++) {
        FN(pieces_of)(cut, item, &p, &o);
        q = FN(part_of)(k, &p);
        int64_t some = o.c1 - o.c0, pixels = p.count * q.oh * k->ow, ld = pixels, direct = !k->nhwc && FN(lies)(&out, &o, 0);
        for (int64_t i = 0; i < p.count; i++) {
            const T *x = j->in + (p.first + i) * k->c * area;
            if (k->nhwc)
                FN(turn_part)(x + p.c0, k->c, area, q.c, last, area), x = last;
            else
                x += p.c0 * area;
            FN(deal)(&q, x, dealt + i * size, padded);
        }
        T *y = direct ? FN(place)(&out, &o, 0, j->out, NULL, k->ow, &ld) : made;
        if (FN(columns_product)(&q, dealt, size, j->filter + o.c0 * depth, depth, some, pixels, y, ld, room)) j->failed = 1;
        if (k->nhwc) FN(turn_part)(made, pixels, some, pixels, turned, some);
        if (!direct) FN(put)(&out, &o, k->nhwc, j->out, k->nhwc ? turned : made, k->ow);
        FN(complete_piece)(j, &out, &o, k->nhwc);
    }
}

static void FN(columns_sums)(void *ctx, int64_t begin, int64_t end) {
    FN(Job) *j = ctx;
    int64_t size = j->k.o * (j->k.c / j->k.groups) * j->k.kh * j->k.kw;
    if (begin == end) FN(columns_images)(j, 0, 0, j->scratch); /* which asks for scratch alone */
    for (int64_t p = begin; p < end; p++)
        FN(columns_images)(j, j->k.n * p / j->parts, j->k.n * (p + 1) / j->parts, j->scratch + p * size);
}
