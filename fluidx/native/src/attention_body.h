/* attention.h for one type: T, FN(name). */

INLINE T *FN(head_of)(const Matrices *m, int64_t batch, int64_t head) {
    return PTR(T, m->at) + batch * m->batch + head * m->head;
}

/* Rows [n][width], `row` apart, as panels of FN(KEYS_WIDE) of them: [n / FN(KEYS_WIDE)][width][FN(KEYS_WIDE)] */
#if HAVE_FMA
enum { FN(KEYS_WIDE) = FN(PANEL_WIDTH) };
static void FN(panels)(const T *x, int64_t row, int64_t n, int64_t width, T *to) { FN(pack_columns)(x, row, width, n, to); }
#else
enum { FN(KEYS_WIDE) = PANEL };
static void FN(panels)(const T *x, int64_t row, int64_t n, int64_t width, T *to) {
    for (int64_t c = 0; c < n; c += PANEL) FN(turn_part)(x + c * row, row, at_most(PANEL, n - c), width, to + c * width, PANEL);
}
#endif

/* C = alpha op(A) B + beta C */
INLINE void FN(times)(Attending *job, int64_t ta, int64_t m, int64_t n, int64_t k, T alpha, const T *a, int64_t lda, const T *b,
                      int64_t ldb, T beta, T *c, int64_t ldc) {
    if (FN(product)(ta, 0, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc)) job->failed = 1;
}

/* s [rows][n], ATTENTION_APART apart: the products of rows with the panels, times `scale` */
static void FN(against)(Attending *job, const T *x, int64_t row, int64_t rows, const T *panels, int64_t n, int64_t width, T scale, T *s) {
    enum { wide = FN(KEYS_WIDE) };
    for (int64_t c = 0; c < n; c += wide)
        FN(times)(job, 0, rows, at_most(wide, n - c), width, scale, x, row, panels + c * width, wide, 0, s + c, ATTENTION_APART);
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

/* Twice EDGE elements behind the first n, so that loops over those have no odd end; returns n, up to a multiple of EDGE. */
INLINE int64_t FN(rounded)(T *s, int64_t n, T value) {
    for (int i = 0; i < 2 * EDGE; i++) s[n + i] = value;
    return up_div(n, EDGE) * EDGE;
}

/* The largest of n elements, up to a multiple of twice EDGE. It may be any other than NaN: the sum of exponentials has that. */
INLINE T FN(largest_seen)(const T *s, int64_t n) {
    T t[2 * EDGE];
    for (int j = 0; j < 2 * EDGE; j++) t[j] = s[j];
    for (int64_t at = 2 * EDGE; at < n; at += 2 * EDGE)
        IVDEP for (int j = 0; j < 2 * EDGE; j++) t[j] = s[at + j] > t[j] ? s[at + j] : t[j];
    for (int j = 0; j < EDGE; j++) t[j] = t[j + EDGE] > t[j] ? t[j + EDGE] : t[j];
    for (int j = 0; j < 8; j++) t[j] = t[j + 8] > t[j] ? t[j + 8] : t[j];
    for (int j = 0; j < 4; j++) t[j] = t[j + 4] > t[j] ? t[j + 4] : t[j];
    T a = t[2] > t[0] ? t[2] : t[0], b = t[3] > t[1] ? t[3] : t[1];
    return b > a ? b : a;
}

INLINE T FN(folded)(T *t) {
    for (int j = 0; j < 8; j++) t[j] += t[j + 8];
    for (int j = 0; j < 4; j++) t[j] += t[j + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

/* s = exp(s - shift), and the sum of it; n is a multiple of EDGE. */
INLINE T FN(exp_seen)(T *s, T shift, int64_t n) {
    T t[EDGE] = {0};
    for (int64_t at = 0; at < n; at += EDGE)
        IVDEP for (int j = 0; j < EDGE; j++) {
            T e = FN(exp_weight)(s[at + j] - shift);
            s[at + j] = e, t[j] += e;
        }
    return FN(folded)(t);
}

INLINE T FN(dot_seen)(const T *x, const T *y, int64_t n) {
    T t[EDGE] = {0};
    int64_t at = 0;
    for (; at + EDGE <= n; at += EDGE)
        IVDEP for (int j = 0; j < EDGE; j++) t[j] += x[at + j] * y[at + j];
    for (; at < n; at++) t[at % EDGE] += x[at] * y[at];
    return FN(folded)(t);
}

/* Items [begin, end): up to ATTENTION_SPAN rows of one head of Q each. */
static void FN(attention_spans)(void *ctx, int64_t begin, int64_t end) {
    Attending *job = ctx;
    const Attention *p = &job->p;
    int64_t d = p->width, e = p->values, spans = up_div(p->rows, ATTENTION_SPAN);
    T *panels = scratch(sizeof(T) * (size_t)(ATTENTION_KEYS * d + ATTENTION_ROWS * ATTENTION_APART));
    if (!panels) {
        job->failed = 1;
        return;
    }
    T scale = (T)as_double(p->scale), *scores = panels + ATTENTION_KEYS * d, top[ATTENTION_SPAN], total[ATTENTION_SPAN];
    for (int64_t item = begin; item < end; item++) {
        int64_t head = item / spans, start = item % spans * ATTENTION_SPAN, rows = at_most(ATTENTION_SPAN, p->rows - start);
        int64_t b = head / p->heads, h = head % p->heads, limit = seen_keys(p, start + rows - 1, 0, p->keys);
        const T *k = FN(head_of)(&p->k, b, h / p->group), *v = FN(head_of)(&p->v, b, h / p->group);
        const T *q = FN(head_of)(&p->q, b, h) + start * p->q.row;
        T *out = FN(head_of)(&p->out, b, h) + start * p->out.row;
        for (int64_t r = 0; r < rows; r++) top[r] = -(T)INFINITY, total[r] = 0;
        for (int64_t first = 0; first < limit; first += ATTENTION_KEYS) {
            int64_t some = at_most(ATTENTION_KEYS, limit - first);
            FN(panels)(k + first * p->k.row, p->k.row, some, d, panels);
            for (int64_t at = 0; at < rows; at += ATTENTION_ROWS) {
                int64_t m = at_most(ATTENTION_ROWS, rows - at), n = seen_keys(p, start + at + m - 1, first, some);
                if (!n) continue;
                FN(against)(job, q + at * p->q.row, p->q.row, m, panels, n, d, scale, scores);
                for (int64_t r = at; r < at + m; r++) {
                    T *s = scores + (r - at) * ATTENTION_APART;
                    int64_t seen = seen_keys(p, start + r, first, n);
                    FN(put_mask)(p, b, h, start + r, first, s, seen);
                    int64_t whole = FN(rounded)(s, seen, -(T)INFINITY);
                    T most = FN(largest_seen)(s, whole), before = top[r];
                    most = most > before ? most : before;
                    T shift = most == -(T)INFINITY ? 0 : most;
                    if (first && before != most) {
                        T kept = FN(exp_weight)(before - shift);
                        total[r] *= kept;
                        for (int64_t i = 0; i < e; i++) out[r * p->out.row + i] *= kept;
                    }
                    top[r] = most;
                    total[r] += FN(exp_seen)(s, shift, whole);
                    for (int64_t i = whole; i < n; i++) s[i] = 0;
                }
                FN(times)(job, 0, m, e, n, 1, scores, ATTENTION_APART, v + first * p->v.row, p->v.row, first ? 1 : 0, out + at * p->out.row,
                          p->out.row);
            }
        }
        for (int64_t r = 0; r < rows; r++) {
            T inv = total[r] != 0 ? 1 / total[r] : 0; /* zeros for a row that sees no key */
            for (int64_t i = 0; i < e; i++) out[r * p->out.row + i] *= inv;
        }
        T *lse = PTR(T, p->lse) + head * p->rows + start;
        if (p->lse) IVDEP for (int64_t r = 0; r < rows; r++) lse[r] = total[r] != 0 ? FN(log)(total[r]) + top[r] : -(T)INFINITY;
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

/* Rows of a head from `at` on against n keys from `first` on: the operands at the first of these rows, and the results */
typedef struct {
    const T *out, *dout, *lse;
    T *dscores, *scores, *products; /* dscores: or NULL */
    int64_t b, h, at, m, first, n;
} FN(Block);

/* Scores, and products of gradients with values, become weights and gradients of the scores times `scale`; keys up to a whole number of
 * ATTENTION_ROWS that a row does not see count as 0. */
static void FN(weigh)(const Attention *p, const FN(Block) *o) {
    T scale = (T)as_double(p->scale);
    int64_t end = up_div(o->n, ATTENTION_ROWS) * ATTENTION_ROWS;
    for (int64_t r = 0; r < o->m; r++) {
        T *s = o->scores + r * ATTENTION_APART, *ds = o->products + r * ATTENTION_APART, lse = o->lse[r];
        int64_t seen = seen_keys(p, o->at + r, o->first, o->n);
        T shift = lse == -(T)INFINITY ? 0 : lse, mean = FN(dot_seen)(o->out + r * p->out.row, o->dout + r * p->dout.row, p->values);
        FN(put_mask)(p, o->b, o->h, o->at + r, o->first, s, seen);
        int64_t whole = FN(rounded)(s, seen, -(T)INFINITY);
        FN(rounded)(ds, seen, 0);
        IVDEP for (int64_t i = 0; i < whole; i++) {
            T weight = FN(exp_weight)(s[i] - shift);
            s[i] = weight, ds[i] = weight * (ds[i] - mean);
        }
        if (o->dscores) FN(move)(o->dscores + r * p->keys + o->first, ds, seen);
        FN(rounded)(s, seen, 0), FN(rounded)(ds, seen, 0);
        for (int64_t i = 0; i < whole; i++) ds[i] *= scale;
        for (int64_t i = whole; i < end; i++) s[i] = ds[i] = 0;
    }
}

/* Add the contributions of m rows from o->at on to the gradients of K and V, for `some` keys from o->first on. `more`: other heads did. */
static void FN(add_up)(Attending *job, const FN(Block) *o, int64_t m, int more, const T *q, T *dk, T *dv, int64_t some) {
    const Attention *p = &job->p;
    int64_t seen = o->at ? seen_keys(p, o->at - 1, o->first, some) : 0, step = p->causal ? ATTENTION_ROWS : some;
    for (int64_t c = 0, n; c < some; c += n) {
        int64_t row = p->causal ? at_least(0, o->first + c - p->start - o->at) : 0; /* the first that sees any of these keys */
        if (row >= m) return;
        n = at_most(some - c, c < seen ? up_div(seen, step) * step : step);
        row -= row % ATTENTION_ROWS;
        T there = more || c < seen;
        const T *weights = o->scores + row * ATTENTION_APART + c, *ds = o->products + row * ATTENTION_APART + c;
        if (dv)
            FN(times)(job, 1, n, p->values, m - row, 1, weights, ATTENTION_APART, o->dout + row * p->dout.row, p->dout.row, there,
                      dv + c * p->dv.row, p->dv.row);
        if (dk)
            FN(times)(job, 1, n, p->width, m - row, 1, ds, ATTENTION_APART, q + row * p->q.row, p->q.row, there, dk + c * p->dk.row,
                      p->dk.row);
    }
}

/* Items [begin, end): heads of K */
static void FN(attention_grad_heads)(void *ctx, int64_t begin, int64_t end) {
    Attending *job = ctx;
    const Attention *p = &job->p;
    int64_t d = p->width, e = p->values, few = p->heads / p->group;
    T *keys = scratch(sizeof(T) * (size_t)(ATTENTION_KEYS * (d + e) + ATTENTION_BLOCK * 2 * ATTENTION_APART));
    if (!keys) {
        job->failed = 1;
        return;
    }
    T *values = keys + ATTENTION_KEYS * d, *scores = values + ATTENTION_KEYS * e, *products = scores + ATTENTION_BLOCK * ATTENTION_APART;
    for (int64_t item = begin; item < end; item++) {
        int64_t b = item / few, shared = item % few, limit = seen_keys(p, p->rows - 1, 0, p->keys);
        const T *k = FN(head_of)(&p->k, b, shared), *v = FN(head_of)(&p->v, b, shared);
        T *dk = p->dk.at ? FN(head_of)(&p->dk, b, shared) : NULL, *dv = p->dv.at ? FN(head_of)(&p->dv, b, shared) : NULL;
        for (int64_t r = limit; r < p->keys; r++) { /* that no row sees */
            if (dk) FN(clear)(dk + r * p->dk.row, d);
            if (dv) FN(clear)(dv + r * p->dv.row, e);
        }
        if (p->dscores) FN(clear)(PTR(T, p->dscores) + item * p->group * p->rows * p->keys, p->group * p->rows * p->keys);
        for (int64_t first = 0; first < limit; first += ATTENTION_KEYS) {
            int64_t some = at_most(ATTENTION_KEYS, limit - first);
            FN(panels)(k + first * p->k.row, p->k.row, some, d, keys);
            FN(panels)(v + first * p->v.row, p->v.row, some, e, values);
            for (int64_t h = shared * p->group; h < (shared + 1) * p->group; h++)
                for (int64_t at = 0; at < p->rows; at += ATTENTION_BLOCK) {
                    int64_t m = at_most(ATTENTION_BLOCK, p->rows - at), row = (b * p->heads + h) * p->rows + at;
                    const T *q = FN(head_of)(&p->q, b, h) + at * p->q.row;
                    FN(Block) all = {.out = FN(head_of)(&p->out, b, h) + at * p->out.row, .lse = PTR(const T, p->lse) + row,
                                     .dout = FN(head_of)(&p->dout, b, h) + at * p->dout.row, .scores = scores, .products = products,
                                     .dscores = p->dscores ? PTR(T, p->dscores) + row * p->keys : NULL, .b = b, .h = h, .at = at,
                                     .first = first};
                    for (int64_t r = 0; r < m; r += ATTENTION_ROWS) {
                        FN(Block) o = all;
                        o.at += r, o.m = at_most(ATTENTION_ROWS, m - r), o.n = seen_keys(p, o.at + o.m - 1, first, some);
                        if (!o.n) continue;
                        o.out += r * p->out.row, o.dout += r * p->dout.row, o.lse += r;
                        o.scores += r * ATTENTION_APART, o.products += r * ATTENTION_APART;
                        if (o.dscores) o.dscores += r * p->keys;
                        FN(against)(job, q + r * p->q.row, p->q.row, o.m, keys, o.n, d, (T)as_double(p->scale), o.scores);
                        FN(against)(job, o.dout, p->dout.row, o.m, values, o.n, e, 1, o.products);
                        FN(weigh)(p, &o);
                        if (p->dq.at)
                            FN(times)(job, 0, o.m, d, o.n, 1, o.products, ATTENTION_APART, k + first * p->k.row, p->k.row, first ? 1 : 0,
                                      FN(head_of)(&p->dq, b, h) + o.at * p->dq.row, p->dq.row);
                    }
                    FN(add_up)(job, &all, m, h > shared * p->group, q, dk ? dk + first * p->dk.row : NULL,
                               dv ? dv + first * p->dv.row : NULL, some);
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
