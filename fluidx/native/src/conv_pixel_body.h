/* conv.h for one type: filters of one pixel, without padding; T, FN(name).
 *
 * An image is a matrix of channels by pixels, or in NHWC of pixels by channels, and so is what comes of it: one product straight from
 * memory to memory. Pixels are put next to each other first where a stride leaves some away, and in NCHW those of several images where one
 * has few. */

/* Into the second-level cache: `product` copies columns row by row, and planes are too far apart for the processor to see where it goes.
 * With few outputs that is a third of the time. */
INLINE void FN(fetch)(const T *x, int64_t ld, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < columns; i += 64 / (int64_t)sizeof(T)) FETCH(x + r * ld + i);
}

static void FN(pixel_run)(void *ctx, int64_t begin, int64_t end) {
    const FN(Cut) *cut = ctx;
    FN(Job) *j = cut->j;
    const Conv *k = &j->k;
    int64_t nhwc = k->nhwc, depth = j->ci / k->groups, outputs = j->co / k->groups, ld = k->c / k->groups;
    FN(View) in = j->back ? FN(view_y)(k) : FN(view_x)(k), out = j->back ? FN(view_x)(k) : FN(view_y)(k);
    FN(Piece) p = {0, cut->group, 0, cut->rows, 0, depth}, q = p;
    q.c1 = cut->outputs;
    int64_t size = FN(room_of)(&in, &p, nhwc, k->ow);
    T *room = scratch(sizeof(T) * (size_t)at_least(1, size + FN(room_of)(&out, &q, nhwc, k->ow)));
    if (!room) {
        j->failed = 1;
        return;
    }
    for (int64_t item = begin; item < end; item++) {
        FN(pieces_of)(cut, item, &p, &q);
        int64_t some = q.c1 - q.c0, pixels = p.count * (p.y1 - p.y0) * k->ow, group = p.c0 / depth, o0 = q.c0 % outputs, ld_in, ld_out;
        T *a = FN(place)(&in, &p, nhwc, (T *)j->in, room, k->ow, &ld_in);
        T *y = FN(place)(&out, &q, nhwc, j->out, room + size, k->ow, &ld_out);
        const T *w = j->filter + group * (k->o / k->groups) * ld + (j->back ? o0 : o0 * ld);
        if (!FN(lies)(&in, &p, nhwc)) FN(take)(&in, &p, nhwc, j->in, room, k->ow);
        for (int64_t x = 0, wide = nhwc ? pixels : PIXEL_WIDE; x < pixels; x += wide) {
            int64_t here = at_most(wide, pixels - x);
            if (!nhwc && FN(lies)(&in, &p, 0)) FN(fetch)(a + x, ld_in, depth, here);
            if (nhwc ? FN(product)(0, !j->back, here, some, depth, 1, a, ld_in, w, ld, 0, y, ld_out)
                     : FN(product)(j->back, 0, some, here, depth, 1, w, ld, a + x, ld_in, 0, y + x, ld_out))
                j->failed = 1;
            if (FN(lies)(&out, &q, nhwc)) FN(complete)(j, nhwc ? y : y + x, nhwc ? here : some, nhwc ? some : here, ld_out);
        }
        if (FN(lies)(&out, &q, nhwc)) continue;
        FN(put)(&out, &q, nhwc, j->out, y, k->ow);
        FN(complete_piece)(j, &out, &q, nhwc);
    }
}

/* Parts [begin, end) of the batch: the gradient of the filter, for each part. */
static void FN(pixel_sums)(void *ctx, int64_t begin, int64_t end) {
    FN(Job) *j = ctx;
    const Conv *k = &j->k;
    int64_t nhwc = k->nhwc, cg = k->c / k->groups, og = k->o / k->groups, ld_x, ld_y;
    FN(View) vx = FN(view_x)(k), vy = FN(view_y)(k);
    FN(Piece) p = {0, j->group, 0, k->oh, 0, cg}, q = p;
    q.c1 = og;
    int64_t size = FN(room_of)(&vx, &p, nhwc, k->ow);
    T *room = scratch(sizeof(T) * (size_t)at_least(1, size + FN(room_of)(&vy, &q, nhwc, k->ow)));
    if (!room) {
        j->failed = 1;
        return;
    }
    for (int64_t part = begin; part < end; part++) {
        int64_t start = k->n * part / j->parts, last = k->n * (part + 1) / j->parts;
        for (int64_t first = start; first < last; first += j->group)
            for (int64_t g = 0; g < k->groups; g++) {
                p.first = q.first = first, p.count = q.count = at_most(j->group, last - first);
                p.c0 = g * cg, p.c1 = p.c0 + cg, q.c0 = g * og, q.c1 = q.c0 + og;
                T *x = FN(place)(&vx, &p, nhwc, (T *)j->in, room, k->ow, &ld_x);
                T *y = FN(place)(&vy, &q, nhwc, j->out, room + size, k->ow, &ld_y);
                if (!FN(lies)(&vx, &p, nhwc)) FN(take)(&vx, &p, nhwc, j->in, x, k->ow);
                if (!FN(lies)(&vy, &q, nhwc)) FN(take)(&vy, &q, nhwc, j->out, y, k->ow);
                T *sums = j->scratch + (part * k->o + g * og) * cg;
                if (FN(product)(nhwc, !nhwc, og, cg, p.count * k->oh * k->ow, 1, y, ld_y, x, ld_x, first > start ? 1 : 0, sums, cg))
                    j->failed = 1;
            }
    }
}
