/* attention.h for one type: T, FN(name). */

INLINE T *FN(head_of)(const Matrices *m, int64_t batch, int64_t head) {
    return PTR(T, m->at) + batch * m->batch + head * m->head;
}

/* Rows [n][width], `row` apart, as panels of PANEL of them: [n / PANEL][width][PANEL] */
static void FN(panels)(const T *x, int64_t row, int64_t n, int64_t width, T *to) {
    for (int64_t c = 0; c < n; c += PANEL) FN(turn_part)(x + c * row, row, at_most(PANEL, n - c), width, to + c * width, PANEL);
}

/* s [rows][n], ATTENTION_APART apart: the products of rows with what lies in panels */
static void FN(against)(const T *x, int64_t row, int64_t rows, const T *panels, int64_t n, int64_t width, T *s) {
    for (int64_t c = 0; c < n; c += PANEL)
        FN(multiply)(0, rows, at_most(PANEL, n - c), width, x, row, panels + c * width, PANEL, 0, s + c, ATTENTION_APART);
}

/* Rows of Q times `scale`, side by side */
static void FN(scaled)(const T *q, int64_t row, int64_t rows, int64_t width, T scale, T *to) {
    for (int64_t r = 0; r < rows; r++, q += row, to += width)
        for (int64_t i = 0; i < width; i++) to[i] = q[i] * scale;
}

/* The mask on n scores of a row with the keys from `first` on */
INLINE void FN(put_mask)(const Attention *p, int64_t batch, int64_t head, int64_t row, int64_t first, T *s, int64_t n) {
    int64_t at = batch * p->mask_batch + head * p->mask_head + row * p->mask_row + first * p->mask_key, step = p->mask_key;
    if (p->kind == 1) {
        const T *more = PTR(const T, p->mask) + at;
        if (step)
            IVDEP for (int64_t i = 0; i < n; i++) s[i] += more[i];
        else
            IVDEP for (int64_t i = 0; i < n; i++) s[i] += *more;
    } else if (p->kind == 2) {
        const uint8_t *kept = PTR(const uint8_t, p->mask) + at;
        if (step)
            IVDEP for (int64_t i = 0; i < n; i++) s[i] = kept[i] ? s[i] : -(T)INFINITY;
        else if (!*kept)
            for (int64_t i = 0; i < n; i++) s[i] = -(T)INFINITY;
    }
}

/* Up to LANES elements behind the first n, so that loops over those have no odd end; returns how many there are then. */
INLINE int64_t FN(rounded)(T *s, int64_t n, T value) {
    for (int i = 0; i < LANES; i++) s[n + i] = value;
    return up_div(n, LANES) * LANES;
}

/* Items [begin, end): up to ATTENTION_SPAN rows of one head of Q each. */
static void FN(attention_spans)(void *ctx, int64_t begin, int64_t end) {
    Attending *job = ctx;
    const Attention *p = &job->p;
    int64_t d = p->width, e = p->values, spans = up_div(p->rows, ATTENTION_SPAN);
    T *panels = scratch(sizeof(T) * (size_t)((ATTENTION_KEYS + ATTENTION_SPAN) * d + ATTENTION_ROWS * ATTENTION_APART));
    if (!panels) {
        job->failed = 1;
        return;
    }
    T *queries = panels + ATTENTION_KEYS * d, *scores = queries + ATTENTION_SPAN * d, top[ATTENTION_SPAN];
    double total[ATTENTION_SPAN];
    for (int64_t item = begin; item < end; item++) {
        int64_t head = item / spans, start = item % spans * ATTENTION_SPAN, rows = at_most(ATTENTION_SPAN, p->rows - start);
        int64_t b = head / p->heads, h = head % p->heads, limit = seen_keys(p, start + rows - 1, 0, p->keys);
        const T *k = FN(head_of)(&p->k, b, h / p->group), *v = FN(head_of)(&p->v, b, h / p->group);
        T *out = FN(head_of)(&p->out, b, h) + start * p->out.row;
        FN(scaled)(FN(head_of)(&p->q, b, h) + start * p->q.row, p->q.row, rows, d, (T)as_double(p->scale), queries);
        for (int64_t r = 0; r < rows; r++) top[r] = -(T)INFINITY, total[r] = 0;
        for (int64_t first = 0; first < limit; first += ATTENTION_KEYS) {
            int64_t some = at_most(ATTENTION_KEYS, limit - first);
            FN(panels)(k + first * p->k.row, p->k.row, some, d, panels);
            for (int64_t at = 0; at < rows; at += ATTENTION_ROWS) {
                int64_t m = at_most(ATTENTION_ROWS, rows - at), n = seen_keys(p, start + at + m - 1, first, some);
                if (!n) continue;
                FN(against)(queries + at * d, d, m, panels, n, d, scores);
                for (int64_t r = at; r < at + m; r++) {
                    T *s = scores + (r - at) * ATTENTION_APART;
                    int64_t seen = seen_keys(p, start + r, first, n);
                    FN(put_mask)(p, b, h, start + r, first, s, seen);
                    int64_t whole = FN(rounded)(s, seen, -(T)INFINITY);
                    T most = FN(largest)(s, whole), before = top[r];
                    most = most > before || most != most ? most : before;
                    T shift = most == -(T)INFINITY ? 0 : most;
                    if (first && before != most) {
                        T kept = FN(exp)(before - shift);
                        total[r] *= kept;
                        for (int64_t i = 0; i < e; i++) out[r * p->out.row + i] *= kept;
                    }
                    top[r] = most;
                    total[r] += FN(exp_row)(s, shift, s, whole);
                    for (int64_t i = whole; i < n; i++) s[i] = 0;
                }
                FN(multiply)(0, m, e, n, scores, ATTENTION_APART, v + first * p->v.row, p->v.row, first ? 1 : 0, out + at * p->out.row,
                             p->out.row);
            }
        }
        for (int64_t r = 0; r < rows; r++) {
            T inv = total[r] != 0 ? (T)(1 / total[r]) : 0; /* of a row that sees nothing, zeros */
            for (int64_t i = 0; i < e; i++) out[r * p->out.row + i] *= inv;
            if (p->lse) PTR(T, p->lse)[head * p->rows + start + r] = total[r] != 0 ? (T)(log(total[r]) + top[r]) : -(T)INFINITY;
        }
    }
}

static void FN(attention)(const int64_t *a, Team *team) {
    Attending job = {.failed = 0};
    memcpy(&job.p, a, sizeof job.p);
    const Attention *p = &job.p;
    double ns = attention_ns(p, at_most(ATTENTION_SPAN, p->rows), 1, sizeof(T));
    parallel_for(team, p->batch * p->heads * up_div(p->rows, ATTENTION_SPAN), grain_of(ns), FN(attention_spans), &job);
    if (job.failed) team->error = "no memory for a piece of attention";
}

/* m rows of a head from `at` on against n keys from `first` on: what lies at the first of these rows, and what is computed with them */
typedef struct {
    const T *out, *dout, *lse;
    T *dscores, *scores, *products; /* dscores: or NULL */
    int64_t b, h, at, m, first, n;
} FN(Block);

/* Scores, and products of gradients with values, become weights and gradients of the scores times `scale`. */
static void FN(weigh)(const Attention *p, const FN(Block) *o) {
    T scale = (T)as_double(p->scale);
    for (int64_t r = 0; r < o->m; r++) {
        T *s = o->scores + r * ATTENTION_APART, *ds = o->products + r * ATTENTION_APART, lse = o->lse[r];
        int64_t seen = seen_keys(p, o->at + r, o->first, o->n);
        T shift = lse == -(T)INFINITY ? 0 : lse, mean = (T)FN(dot)(o->out + r * p->out.row, o->dout + r * p->dout.row, p->values);
        FN(put_mask)(p, o->b, o->h, o->at + r, o->first, s, seen);
        int64_t whole = up_div(seen, LANES) * LANES;
        IVDEP for (int64_t i = 0; i < whole; i++) s[i] = FN(exp)(s[i] - shift);
        IVDEP for (int64_t i = 0; i < whole; i++) ds[i] = s[i] * (ds[i] - mean);
        FN(rounded)(s, seen, 0), FN(rounded)(ds, seen, 0);
        for (int64_t i = whole; i < o->n; i++) s[i] = ds[i] = 0;
        if (o->dscores) FN(move)(o->dscores + r * p->keys + o->first, ds, seen);
        for (int64_t i = 0; i < whole; i++) ds[i] *= scale;
    }
}

/* Items [begin, end): heads of K */
static void FN(attention_grad_heads)(void *ctx, int64_t begin, int64_t end) {
    Attending *job = ctx;
    const Attention *p = &job->p;
    int64_t d = p->width, e = p->values, few = p->heads / p->group;
    T *keys = scratch(sizeof(T) * (size_t)(ATTENTION_KEYS * (d + e) + ATTENTION_ROWS * (2 * ATTENTION_APART + d)));
    if (!keys) {
        job->failed = 1;
        return;
    }
    T *values = keys + ATTENTION_KEYS * d, *scores = values + ATTENTION_KEYS * e, *products = scores + ATTENTION_ROWS * ATTENTION_APART;
    T *queries = products + ATTENTION_ROWS * ATTENTION_APART;
    for (int64_t item = begin; item < end; item++) {
        int64_t b = item / few, shared = item % few, limit = seen_keys(p, p->rows - 1, 0, p->keys);
        const T *k = FN(head_of)(&p->k, b, shared), *v = FN(head_of)(&p->v, b, shared);
        T *dk = FN(head_of)(&p->dk, b, shared), *dv = FN(head_of)(&p->dv, b, shared);
        for (int64_t r = 0; r < p->keys; r++) {
            if (p->dk.at) FN(clear)(dk + r * p->dk.row, d);
            if (p->dv.at) FN(clear)(dv + r * p->dv.row, e);
        }
        if (p->dscores) FN(clear)(PTR(T, p->dscores) + item * p->group * p->rows * p->keys, p->group * p->rows * p->keys);
        for (int64_t first = 0; first < limit; first += ATTENTION_KEYS) {
            int64_t some = at_most(ATTENTION_KEYS, limit - first);
            FN(panels)(k + first * p->k.row, p->k.row, some, d, keys);
            FN(panels)(v + first * p->v.row, p->v.row, some, e, values);
            for (int64_t h = shared * p->group; h < (shared + 1) * p->group; h++)
                for (int64_t at = 0; at < p->rows; at += ATTENTION_ROWS) {
                    int64_t m = at_most(ATTENTION_ROWS, p->rows - at), n = seen_keys(p, at + m - 1, first, some);
                    int64_t row = (b * p->heads + h) * p->rows + at;
                    if (!n) continue;
                    const T *q = FN(head_of)(&p->q, b, h) + at * p->q.row, *dout = FN(head_of)(&p->dout, b, h) + at * p->dout.row;
                    FN(Block) block = {.out = FN(head_of)(&p->out, b, h) + at * p->out.row, .dout = dout, .lse = PTR(const T, p->lse) + row,
                                       .dscores = p->dscores ? PTR(T, p->dscores) + row * p->keys : NULL, .scores = scores,
                                       .products = products, .b = b, .h = h, .at = at, .m = m, .first = first, .n = n};
                    FN(scaled)(q, p->q.row, m, d, (T)as_double(p->scale), queries);
                    FN(against)(queries, d, m, keys, n, d, scores);
                    FN(against)(dout, p->dout.row, m, values, n, e, products);
                    FN(weigh)(p, &block);
                    if (p->dv.at)
                        FN(multiply)(1, n, e, m, scores, ATTENTION_APART, dout, p->dout.row, 1, dv + first * p->dv.row, p->dv.row);
                    if (p->dk.at) FN(multiply)(1, n, d, m, products, ATTENTION_APART, q, p->q.row, 1, dk + first * p->dk.row, p->dk.row);
                    if (p->dq.at)
                        FN(multiply)(0, m, d, n, products, ATTENTION_APART, k + first * p->k.row, p->k.row, first ? 1 : 0,
                                     FN(head_of)(&p->dq, b, h) + at * p->dq.row, p->dq.row);
                }
        }
    }
}

static void FN(attention_grad)(const int64_t *a, Team *team) {
    Attending job = {.failed = 0};
    memcpy(&job.p, a, sizeof job.p);
    const Attention *p = &job.p;
    double ns = attention_ns(p, p->rows * p->group, 2.5, sizeof(T));
    parallel_for(team, p->batch * p->heads / p->group, grain_of(ns), FN(attention_grad_heads), &job);
    if (job.failed) team->error = "no memory for a piece of attention";
}
