/* conv.h for one type: the pieces of images that products work on, and how work is cut into them; T, FN(name). */

/* An image of which every sh-th row and sw-th column takes part */
typedef struct {
    int64_t c, h, w, sh, sw;
} FN(View);

/* Rows [y0, y1) of what takes part of images [first, first + count), channels [c0, c1) */
typedef struct {
    int64_t first, count, y0, y1, c0, c1;
} FN(Piece);

INLINE FN(View) FN(view_x)(const Conv *k) { return (FN(View)){k->c, k->h, k->w, k->sh, k->sw}; }
INLINE FN(View) FN(view_y)(const Conv *k) { return (FN(View)){k->o, k->oh, k->ow, 1, 1}; }

/* A piece as a matrix, [channels][pixels] or [pixels][channels]: in place where it is one in the images, else `room`. */
INLINE int FN(lies)(const FN(View) *v, const FN(Piece) *p, int64_t nhwc) { return v->sh == 1 && v->sw == 1 && (nhwc || p->count == 1); }
INLINE T *FN(place)(const FN(View) *v, const FN(Piece) *p, int64_t nhwc, T *images, T *room, int64_t ow, int64_t *ld) {
    T *image = images + p->first * v->c * v->h * v->w;
    if (!FN(lies)(v, p, nhwc)) {
        *ld = nhwc ? p->c1 - p->c0 : p->count * (p->y1 - p->y0) * ow;
        return room;
    }
    *ld = nhwc ? v->c : v->h * v->w;
    return image + (nhwc ? p->y0 * v->w * v->c + p->c0 : p->c0 * v->h * v->w + p->y0 * v->w);
}

/* Elements of room that a piece needs */
INLINE int64_t FN(room_of)(const FN(View) *v, const FN(Piece) *p, int64_t nhwc, int64_t ow) {
    return FN(lies)(v, p, nhwc) ? 0 : (p->c1 - p->c0) * p->count * (p->y1 - p->y0) * ow;
}

/* Pixels of a piece next to each other */
static void FN(take)(const FN(View) *v, const FN(Piece) *p, int64_t nhwc, const T *images, T *to, int64_t ow) {
    int64_t some = p->c1 - p->c0, run = (p->y1 - p->y0) * ow;
    for (int64_t i = 0; i < p->count; i++) {
        const T *image = images + (p->first + i) * v->c * v->h * v->w;
        for (int64_t y = p->y0; y < p->y1 && nhwc; y++)
            for (int64_t x = 0; x < ow; x++, to += some) FN(move)(to, image + (y * v->sh * v->w + x * v->sw) * v->c + p->c0, some);
        for (int64_t c = 0; c < some && !nhwc; c++) {
            T *row = to + (c * p->count + i) * run;
            for (int64_t y = p->y0; y < p->y1; y++, row += ow) {
                const T *from = image + ((p->c0 + c) * v->h + y * v->sh) * v->w;
                if (v->sw == 1) {
                    FN(move)(row, from, ow);
                } else if (v->sw == 2) {
                    IVDEP for (int64_t x = 0; x < ow; x++) row[x] = from[2 * x];
                } else {
                    for (int64_t x = 0; x < ow; x++) row[x] = from[x * v->sw];
                }
            }
        }
    }
}

/* And back, with zeros where no pixel takes part */
static void FN(put)(const FN(View) *v, const FN(Piece) *p, int64_t nhwc, T *images, const T *from, int64_t ow) {
    int64_t some = p->c1 - p->c0, run = (p->y1 - p->y0) * ow, top = p->y0 * v->sh, bottom = at_most(v->h, p->y1 * v->sh);
    for (int64_t i = 0; i < p->count; i++) {
        T *image = images + (p->first + i) * v->c * v->h * v->w;
        for (int64_t y = top; y < bottom && nhwc; y++)
            for (int64_t x = 0; x < v->w; x++) {
                T *to = image + (y * v->w + x) * v->c + p->c0;
                if (y % v->sh || x % v->sw)
                    FN(clear)(to, some);
                else
                    FN(move)(to, from, some), from += some;
            }
        for (int64_t c = 0; c < some && !nhwc; c++) {
            const T *row = from + (c * p->count + i) * run;
            T *plane = image + (p->c0 + c) * v->h * v->w;
            if (v->sh > 1 || v->sw > 1) FN(clear)(plane + top * v->w, (bottom - top) * v->w);
            for (int64_t y = top; y < bottom; y += v->sh, row += ow)
                for (int64_t x = 0; x < ow; x++) plane[y * v->w + x * v->sw] = row[x];
        }
    }
}

INLINE void FN(complete_piece)(const FN(Job) *j, const FN(View) *v, const FN(Piece) *p, int64_t nhwc) {
    int64_t top = p->y0 * v->sh, rows = at_most(v->h, p->y1 * v->sh) - top, some = p->c1 - p->c0;
    for (int64_t i = p->first; i < p->first + p->count; i++) {
        const T *image = j->out + i * v->c * v->h * v->w;
        if (nhwc)
            FN(complete)(j, image + top * v->w * v->c + p->c0, rows * v->w, some, v->c);
        else
            FN(complete)(j, image + (p->c0 * v->h + top) * v->w, some, rows * v->w, v->h * v->w);
    }
}

/* How the images, rows and channels of results are cut. Pieces are many enough for a few threads, but not so small that an operand which
 * each of them packs for itself counts. */
typedef struct {
    FN(Job) *j;
    int64_t height, group, rows, outputs, row_cuts, output_cuts, items, grain;
} FN(Cut);

INLINE int64_t FN(group_of)(const Conv *k, int64_t least) {
    int64_t group = at_most(k->n, up_div(least, k->oh * k->ow));
    return up_div(k->n, up_div(k->n, at_least(group, 1)));
}

static FN(Cut) FN(cut)(FN(Job) *j, int threads) {
    const Conv *k = &j->k;
    int64_t pixels = k->oh * k->ow, outputs = j->co / k->groups, depth = j->ci / k->groups * k->kh * k->kw;
    FN(Cut) cut = {.j = j, .height = k->oh, .group = FN(group_of)(k, k->nhwc ? PIECE_ROWS : PIECE_COLUMNS)};
    int64_t most = pieces_wanted(k->n * k->groups * pixels * outputs * depth, threads), blocks = up_div(k->n, cut.group) * k->groups;
    int64_t wanted = cut.group > 1 ? 1 : up_div(most, blocks), down = at_least(1, at_most(wanted, pixels / PIECE_COLUMNS));
    if (down < wanted && outputs < 2 * PANEL) down = at_least(1, at_most(wanted, 2 * pixels / PIECE_COLUMNS));
    cut.rows = up_div(k->oh, down), cut.row_cuts = up_div(k->oh, cut.rows);
    /* cuts of outputs let several pieces put the same pixels together */
    int64_t across = at_least(1, up_div(at_most(at_least(MOST_PIECES / 2, threads), most), blocks * cut.row_cuts));
    cut.outputs = at_least(PANEL, up_div(up_div(outputs, across), 32) * 32);
    cut.output_cuts = up_div(outputs, cut.outputs);
    cut.items = up_div(k->n, cut.group) * cut.row_cuts * k->groups * cut.output_cuts;
    cut.grain = 250000 / at_least(cut.group * cut.rows * k->ow * cut.outputs * depth, 1) + 1;
    return cut;
}

/* What item `i` reads, as a piece with its channels, and what it makes. */
INLINE void FN(pieces_of)(const FN(Cut) *cut, int64_t i, FN(Piece) *in, FN(Piece) *out) {
    const Conv *k = &cut->j->k;
    int64_t at = i / cut->output_cuts / k->groups, group = i / cut->output_cuts % k->groups, o0 = i % cut->output_cuts * cut->outputs;
    int64_t depth = cut->j->ci / k->groups, outputs = cut->j->co / k->groups;
    int64_t first = at / cut->row_cuts * cut->group, y0 = at % cut->row_cuts * cut->rows;
    *in = (FN(Piece)){first, at_most(cut->group, k->n - first), y0, at_most(cut->height, y0 + cut->rows), group * depth, (group + 1) * depth};
    *out = *in;
    out->c0 = group * outputs + o0, out->c1 = group * outputs + at_most(outputs, o0 + cut->outputs);
}
