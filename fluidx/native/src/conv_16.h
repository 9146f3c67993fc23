/* Convolutions of 16-bit floats in NCHW without groups, and their gradients, by a product that the level has (product_16.h).
 *
 * An image is staged with its padding as [channels][planes][height][pitch]. At stride s the pixels are dealt out to s x s planes, so that
 * each tap of the filter finds its pixels next to each other: a channel and a tap are a line of columns that is read in place. Between rows
 * lie columns that are no outputs; they are left out on the way to C. The gradient of the image at stride s is s x s convolutions of that
 * of the outputs, each with the taps that reach it. That of the filter is summed over parts of the batch in float32.
 *
 * words: those of conv, then what the arrays hold; forward and back a tail, or 0 */

enum { CONV_16_WORDS = CONV_WORDS + 1 };
enum { CONV_16_RUN = 256, CONV_16_SUM = 1024 }; /* columns at a time at least, where there are as many; and where they are summed */

/* Outputs [rows][columns] at (y, x) of an image, `step` apart, that taps of the filter make */
typedef struct {
    int64_t rows, columns, y, x, step_y, step_x, taps;
    int64_t tap[MOST_TAPS], plane[MOST_TAPS], from[MOST_TAPS]; /* of the filter; the plane that it reads, and the first pixel there */
    char *filter; /* [outputs][channels][taps] */
} Grid16;

typedef struct {
    Conv k;
    Product16Fn product;
    const char *in, *filter, *made; /* made: where only the filter's gradient is wanted, the gradient of the outputs */
    char *out;
    float *sums;
    int64_t is, ci, co, ih, iw, oh, ow; /* of the convolution that is done, which for `back` is that of the gradient */
    int64_t planes_y, planes_x, height, pitch, plane, above, before, group, parts, n_grids;
    uint32_t read; /* bits of the planes that taps read: at most MOST_GRIDS */
    Grid16 *grids;
    Tail *tail;
    int back, failed;
    int odd, by_rows; /* some sums are not finite; so they are made of rows that are apart */
} Job16;

/* Rows of one image into its places in the planes; zeros are there already. Planes of a channel are `apart` elements apart. */
static void stage_16(const Job16 *j, const uint16_t *image, uint16_t *to, int64_t apart) {
    int64_t sx = j->planes_x, wide = j->iw < j->pitch * sx - j->before ? j->iw : j->pitch * sx - j->before;
    for (int64_t c = 0; c < j->ci; c++)
        for (int64_t y = 0; y < j->ih; y++) {
            int64_t row = y + j->above, across = row % j->planes_y * sx;
            if (row / j->planes_y >= j->height) break;
            uint16_t *plane = to + (c * j->planes_y * sx + across) * apart + row / j->planes_y * j->pitch;
            const uint16_t *from = image + (c * j->ih + y) * j->iw;
            if (sx == 1) {
                memcpy(plane + j->before, from, (size_t)wide * sizeof *from);
                continue;
            }
            for (int64_t s = 0; s < sx; s++) {
                if (!(j->read >> (across + s) & 1)) continue;
                int64_t x = ((s - j->before) % sx + sx) % sx; /* the first pixel that belongs to this plane */
                uint16_t *at = plane + s * apart + (x + j->before) / sx;
                for (; x < wide; x += sx) *at++ = from[x];
            }
        }
}

/* Lines of columns of a grid: channel c and tap t */
static void lines_of_16(const Job16 *j, const Grid16 *g, int64_t apart, int64_t *lines) {
    for (int64_t c = 0; c < j->ci; c++)
        for (int64_t t = 0; t < g->taps; t++) *lines++ = (c * j->planes_y * j->planes_x + g->plane[t]) * apart + g->from[t];
}

/* Elements of what is staged of a group; windows of the last image reach beyond its plane. */
INLINE int64_t staged_16(const Job16 *j) {
    return up_to_16(j->ci * j->planes_y * j->planes_x * j->group * j->plane + j->above * j->pitch + j->before + 64, 64);
}

INLINE int64_t most_taps_16(const Job16 *j) {
    int64_t most = 1;
    for (int64_t n = 0; n < j->n_grids; n++) most = most < j->grids[n].taps ? j->grids[n].taps : most;
    return most;
}

/* Outputs of a grid of `count` images from their runs of columns */
static void spread_16(const Job16 *j, const Grid16 *g, int64_t first, int64_t count, const uint16_t *made, int64_t run) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t o = 0; o < j->co; o++)
            for (int64_t y = 0; y < g->rows; y++) {
                const uint16_t *from = made + o * run + i * j->plane + y * j->pitch;
                uint16_t *to = (uint16_t *)j->out + (((first + i) * j->co + o) * j->oh + g->y + y * g->step_y) * j->ow + g->x;
                if (!g->taps)
                    for (int64_t x = 0; x < g->columns; x++) to[x * g->step_x] = 0;
                else if (g->step_x == 1)
                    memcpy(to, from, (size_t)g->columns * sizeof *to);
                else
                    for (int64_t x = 0; x < g->columns; x++) to[x * g->step_x] = from[x];
            }
}

/* Items [begin, end): groups of images */
static void conv_16_images(void *ctx, int64_t begin, int64_t end) {
    Job16 *j = ctx;
    int64_t apart = j->group * j->plane, staged = staged_16(j);
    int64_t most = j->ci * most_taps_16(j), size = up_to_16(j->co * apart, 64);
    char *room = scratch((size_t)(2 * (staged + size) + 8 * most));
    if (!room) {
        j->failed = 1;
        return;
    }
    uint16_t *made = (uint16_t *)room + staged;
    int64_t *lines = (int64_t *)(made + size), in_size = j->ci * j->ih * j->iw, out_size = j->co * j->oh * j->ow;
    if (begin < end) memset(room, 0, (size_t)(2 * staged));
    for (int64_t item = begin; item < end; item++) {
        int64_t first = item * j->group, count = at_most(j->group, j->k.n - first);
        int lies = count == 1 && j->planes_y * j->planes_x == 1 && j->plane == j->ih * j->iw; /* an image without padding */
        for (int64_t i = 0; i < count && !lies; i++)
            stage_16(j, (const uint16_t *)j->in + (first + i) * in_size, (uint16_t *)room + i * j->plane, apart);
        for (int64_t n = 0; n < j->n_grids; n++) {
            const Grid16 *g = j->grids + n;
            int64_t run = (count - 1) * j->plane + (g->rows - 1) * j->pitch + g->columns;
            Product16 p = {.m = j->co, .n = run, .k = j->ci * g->taps, .alpha = 1, .a = {.at = g->filter, .ld = j->ci * g->taps, .is = j->is},
                           .b = {.at = lies ? j->in + 2 * first * in_size : room, .is = j->is, .lines = lines}, .c = (char *)made, .ldc = run, .c_is = j->is};
            lines_of_16(j, g, lies ? j->plane : apart, lines);
            int direct = count == 1 && g->step_x == 1 && g->step_y == 1 && g->columns == j->pitch && g->taps;
            if (direct) p.c = j->out + 2 * first * out_size, p.ldc = j->oh * j->ow, p.tail = j->tail, p.run_tail = run_tail_16;
            if (g->taps && j->product(&p)) j->failed = 1;
            if (direct) continue;
            spread_16(j, g, first, count, made, run);
            if (n + 1 < j->n_grids || !j->tail) continue;
            for (int64_t i = first; i < first + count; i++) run_tail_16(j->tail, j->out + 2 * i * out_size, 1, out_size, out_size);
        }
    }
}

/* Sizes of the planes: `above` and `before` pixels of padding, and as many below and behind as windows reach. At stride 1 rows share the
 * padding between them. */
static void planes_16(Job16 *j, int64_t below, int64_t behind) {
    int64_t tall = j->above + j->ih + at_least(0, below), wide = j->before + j->iw + at_least(0, behind);
    if (j->planes_y == 1 && j->planes_x == 1) {
        j->pitch = j->iw + at_least(j->before, at_least(0, behind)), j->height = j->ih + at_least(j->above, at_least(0, below));
        j->plane = j->height * j->pitch;
        return;
    }
    j->height = up_div(tall, j->planes_y), j->pitch = up_div(wide, j->planes_x), j->plane = j->height * j->pitch;
}

static void forward_16(Job16 *j) {
    const Conv *k = &j->k;
    Grid16 *g = j->grids;
    j->n_grids = 1, j->planes_y = k->sh, j->planes_x = k->sw, j->above = k->top, j->before = k->left;
    planes_16(j, (k->oh - 1) * k->sh + (k->kh - 1) * k->dh - k->top - k->h + 1, (k->ow - 1) * k->sw + (k->kw - 1) * k->dw - k->left - k->w + 1);
    *g = (Grid16){.rows = k->oh, .columns = k->ow, .step_y = 1, .step_x = 1, .filter = (char *)j->filter};
    for (int64_t t = 0; t < k->kh * k->kw; t++, g->taps++) {
        int64_t y = t / k->kw * k->dh, x = t % k->kw * k->dw;
        g->tap[t] = t, g->plane[t] = y % k->sh * k->sw + x % k->sw, g->from[t] = y / k->sh * j->pitch + x / k->sw;
        j->read |= (uint32_t)1 << g->plane[t];
    }
}

/* Row y = q s + a of the image is reached by tap i from row q + (a + top - i d) / s of the gradient, where that is whole. */
static void backward_16(Job16 *j, char *filters) {
    const Conv *k = &j->k;
    int64_t low_y = 0, low_x = 0, high_y = 0, high_x = 0;
    j->n_grids = 0, j->planes_y = j->planes_x = 1;
    for (int64_t a = 0; a < k->sh && a < j->oh; a++)
        for (int64_t b = 0; b < k->sw && b < j->ow; b++) {
            Grid16 *g = &j->grids[j->n_grids++];
            *g = (Grid16){.rows = up_div(j->oh - a, k->sh), .columns = up_div(j->ow - b, k->sw), .y = a, .x = b, .step_y = k->sh,
                          .step_x = k->sw, .filter = filters};
            for (int64_t t = 0; t < k->kh * k->kw; t++) {
                int64_t y = a + k->top - t / k->kw * k->dh, x = b + k->left - t % k->kw * k->dw;
                if (y % k->sh || x % k->sw) continue;
                low_y = at_most(low_y, y / k->sh), low_x = at_most(low_x, x / k->sw);
                high_y = at_least(high_y, y / k->sh + g->rows), high_x = at_least(high_x, x / k->sw + g->columns);
                g->tap[g->taps++] = t;
            }
            filters += 2 * k->o * k->c * g->taps;
        }
    j->above = -low_y, j->before = -low_x;
    planes_16(j, high_y - j->ih, high_x - j->iw);
    for (int64_t n = 0; n < j->n_grids; n++)
        for (int64_t i = 0; i < j->grids[n].taps; i++) {
            Grid16 *g = &j->grids[n];
            int64_t t = g->tap[i], y = g->y + k->top - t / k->kw * k->dh, x = g->x + k->left - t % k->kw * k->dw;
            g->from[i] = (y / k->sh - low_y) * j->pitch + x / k->sw - low_x;
        }
}

/* Filters of all grids of the gradient of the image, for its channels [begin, end) */
static void filters_16(void *ctx, int64_t begin, int64_t end) {
    const Job16 *j = ctx;
    int64_t taps = j->k.kh * j->k.kw;
    for (int64_t n = 0; n < j->n_grids; n++) {
        const Grid16 *g = j->grids + n;
        for (int64_t c = begin; c < end; c++) {
            uint16_t *to = (uint16_t *)g->filter + c * j->k.o * g->taps;
            for (int64_t o = 0; o < j->k.o; o++)
                for (int64_t t = 0; t < g->taps; t++) *to++ = ((const uint16_t *)j->filter)[(o * j->k.c + c) * taps + g->tap[t]];
        }
    }
}

static Job16 job_16(const int64_t *a, Product16Fn product, Grid16 *grids) {
    Conv k = conv_of(a);
    return (Job16){.k = k, .product = product, .in = PTR(const char, a[0]), .filter = PTR(const char, a[1]), .out = PTR(char, a[2]), .is = a[CONV_WORDS],
                   .ci = k.c, .co = k.o, .ih = k.h, .iw = k.w, .oh = k.oh, .ow = k.ow, .grids = grids};
}

void LEVEL(conv_16_with)(const int64_t *a, Team *team, Product16Fn product, int back) {
    Grid16 grids[MOST_GRIDS];
    Job16 j = job_16(a, product, grids);
    Tail tail;
    j.back = back, j.tail = tail_of(a[CONV_16_WORDS], a[back ? 0 : 2], VM_BYTES / sizeof(float), &tail);
    if (back) {
        j.in = PTR(const char, a[2]), j.out = PTR(char, a[0]), j.ci = j.k.o, j.co = j.k.c;
        j.ih = j.k.oh, j.iw = j.k.ow, j.oh = j.k.h, j.ow = j.k.w;
        backward_16(&j, PTR(char, a[21]));
        parallel_for(team, j.k.c, at_least(1, 8192 / at_least(1, j.k.o * j.k.kh * j.k.kw)), filters_16, &j);
    } else {
        forward_16(&j);
    }
    j.group = at_most(j.k.n, up_div(CONV_16_RUN, at_least(1, j.plane)));
    parallel_for(team, up_div(j.k.n, j.group), 1, conv_16_images, &j);
    tail_done(j.tail, team);
    if (j.failed) team->error = "out of memory";
}

/* Sums of the images [first, first + count) that are staged, into p->c or, if there are sums already, on top of them. A run of rows has
 * columns between them, where zeros meet pixels of the image: what is not finite there would be NaN in taps that never see it. */
static void add_images_16(Job16 *j, Product16 *p, int64_t count, int more) {
    const Grid16 *g = j->grids;
    const char *a = p->a.at, *b = p->b.at;
    p->beta = more, p->k = (count - 1) * j->plane + (g->rows - 1) * j->pitch + g->columns;
    if (!j->by_rows) {
        if (j->product(p)) j->failed = 1;
        return;
    }
    p->k = g->columns;
    for (int64_t row = 0; row < count * g->rows; row++, p->beta = 1) {
        int64_t at = row / g->rows * j->plane + row % g->rows * j->pitch;
        p->a.at = a + 2 * at, p->b.at = b + 2 * at;
        if (j->product(p)) j->failed = 1;
    }
    p->a.at = a, p->b.at = b;
}

/* Items [begin, end): parts of the batch, each with sums of its own */
static void conv_16_sums(void *ctx, int64_t begin, int64_t end) {
    Job16 *j = ctx;
    const Grid16 *g = j->grids;
    int64_t apart = j->group * j->plane, staged = staged_16(j), keys = j->ci * g->taps;
    int64_t in_size = j->ci * j->ih * j->iw, out_size = j->co * j->oh * j->ow, spread = up_to_16(j->co * apart, 64);
    char *room = scratch((size_t)(2 * (staged + spread) + 8 * keys));
    if (!room) {
        j->failed = 1;
        return;
    }
    uint16_t *made = (uint16_t *)room + staged;
    int64_t *lines = (int64_t *)(made + spread);
    if (begin < end) {
        memset(room, 0, (size_t)(2 * (staged + spread)));
        lines_of_16(j, g, apart, lines);
    }
    for (int64_t part = begin; part < end; part++) {
        int64_t start = j->k.n * part / j->parts, stop = j->k.n * (part + 1) / j->parts;
        Product16 p = {.m = j->co, .n = keys, .alpha = 1, .a = {.at = (char *)made, .ld = apart, .is = j->is},
                       .b = {.at = room, .turned = 1, .is = j->is, .lines = lines}, .c = (char *)(j->sums + part * j->co * keys), .ldc = keys,
                       .c_is = AS_F32};
        if (start == stop) memset(p.c, 0, (size_t)(j->co * keys) * sizeof(float));
        for (int64_t first = start; first < stop; first += j->group) {
            int64_t count = at_most(j->group, stop - first);
            for (int64_t i = 0; i < count; i++) {
                stage_16(j, (const uint16_t *)j->in + (first + i) * in_size, (uint16_t *)room + i * j->plane, apart);
                for (int64_t o = 0; o < j->co; o++)
                    for (int64_t y = 0; y < j->oh; y++)
                        memcpy(made + o * apart + i * j->plane + y * j->pitch,
                               (const uint16_t *)j->made + (first + i) * out_size + (o * j->oh + y) * j->ow, (size_t)j->ow * 2);
            }
            add_images_16(j, &p, count, first > start);
        }
    }
}

/* Elements [begin, end) of the filter's gradient from the sums of all parts */
static void add_sums_16(void *ctx, int64_t begin, int64_t end) {
    Job16 *j = ctx;
    int64_t size = j->k.o * j->k.c * j->k.kh * j->k.kw;
    int odd = 0;
    IVDEP for (int64_t i = begin; i < end; i++) {
        float sum = j->sums[i];
        for (int64_t p = 1; p < j->parts; p++) sum += j->sums[p * size + i];
        j->sums[i] = sum;
        odd |= sum - sum != 0;
    }
    if (odd) j->odd = 1;
    f32_as_line((char *)j->filter + 2 * begin, j->sums + begin, j->is, end - begin);
}

void LEVEL(conv_filter_16_with)(const int64_t *a, Team *team, Product16Fn product) {
    Grid16 grid;
    Job16 j = job_16(a, product, &grid);
    int64_t size = j.k.o * j.k.c * j.k.kh * j.k.kw;
    forward_16(&j);
    j.made = PTR(const char, a[2]), j.sums = PTR(float, a[21]);
    j.parts = conv_parts(j.k.n, size * (int64_t)sizeof(float));
    j.group = at_most(up_div(j.k.n, j.parts), up_div(CONV_16_SUM, at_least(1, j.plane)));
    for (j.by_rows = 0; j.by_rows < 2; j.by_rows += j.odd && !j.by_rows ? 1 : 2) {
        parallel_for(team, j.parts, 1, conv_16_sums, &j);
        parallel_for(team, size, 8192, add_sums_16, &j);
    }
    if (j.failed) team->error = "out of memory";
}

static void conv_16(const int64_t *a, Team *team) { LEVEL(conv_16_with)(a, team, LEVEL(product_16), 0); }
static void conv_back_16(const int64_t *a, Team *team) { LEVEL(conv_16_with)(a, team, LEVEL(product_16), 1); }
static void conv_filter_16(const int64_t *a, Team *team) { LEVEL(conv_filter_16_with)(a, team, LEVEL(product_16)); }
