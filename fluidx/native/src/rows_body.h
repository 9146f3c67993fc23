/* Row kernels of one type T: included with T, FN(name). */

/* What has one element in a row */
INLINE T FN(single)(const Rows *p, int64_t r) { return FN(element)(FORMAT(p->formats, 3), PTR(void, p->single), r); }
INLINE void FN(put_single)(const Rows *p, int64_t r, T x) { FN(put_element)(FORMAT(p->formats, 3), PTR(void, p->single), r, x); }

/* -- softmax and losses of it ------------------------------------------------------------------------------------------------------- */

/* out = exp(x - m), and the sum of it; `out` may be `x` */
INLINE double FN(exp_row)(const T *x, T m, T *out, int64_t n) {
    IVDEP for (int64_t i = 0; i < n; i++) out[i] = FN(exp)(x[i] - m);
    return FN(sum)(out, n);
}

/* The same without keeping the values */
INLINE double FN(exp_sum)(const T *x, T m, int64_t n) {
    T e[SUM_BLOCK];
    double total = 0;
    for (int64_t at = 0; at < n; at += SUM_BLOCK) total += FN(exp_row)(x + at, m, e, n - at < SUM_BLOCK ? n - at : SUM_BLOCK);
    return total;
}

INLINE int FN(softmax_row)(const Rows *p, int64_t r, T *const *v) {
    (void)r;
    const T *x = v[0];
    T *out = v[1];
    int64_t n = p->columns;
    T inv = (T)(1 / FN(exp_row)(x, FN(largest)(x, n), out, n));
    for (int64_t i = 0; i < n; i++) out[i] *= inv;
    return 0;
}

INLINE int FN(log_softmax_row)(const Rows *p, int64_t r, T *const *v) {
    (void)r;
    const T *x = v[0];
    T *out = v[1], m = FN(largest)(x, p->columns), less = (T)log(FN(exp_sum)(x, m, p->columns));
    IVDEP for (int64_t i = 0; i < p->columns; i++) out[i] = x[i] - m - less;
    return 0;
}

INLINE int FN(softmax_grad_row)(const Rows *p, int64_t r, T *const *v) {
    (void)r;
    const T *y = v[0], *g = v[1];
    T *out = v[2], mean = (T)FN(dot)(y, g, p->columns);
    IVDEP for (int64_t i = 0; i < p->columns; i++) out[i] = (g[i] - mean) * y[i];
    return 0;
}

INLINE int FN(log_softmax_grad_row)(const Rows *p, int64_t r, T *const *v) {
    (void)r;
    const T *y = v[0], *g = v[1];
    T *out = v[2], total = (T)FN(sum)(g, p->columns);
    IVDEP for (int64_t i = 0; i < p->columns; i++) out[i] = g[i] - FN(exp)(y[i]) * total;
    return 0;
}

/* The log of the sum of exponentials; a row without a finite largest element is that element */
INLINE int FN(logsumexp_row)(const Rows *p, int64_t r, T *const *v) {
    const T *x = v[0];
    T m = FN(largest)(x, p->columns), shift = m - m == 0 ? m : 0;
    FN(put_single)(p, r, (T)(log(FN(exp_sum)(x, shift, p->columns)) + shift));
    return 0;
}

/* X, Softmax, and Label where it is soft; Loss is the single value of a row */
INLINE int FN(xent_row)(const Rows *p, int64_t r, T *const *v) {
    const T *x = v[0];
    T *out = v[1];
    int64_t n = p->columns, label = p->labels ? label_of(p, r) : 0;
    if (p->labels && label != p->ignore && is_wrong(p, label)) return 1;
    T m = FN(largest)(x, n);
    int kept = p->labels && label != p->ignore;
    double of_label = kept ? (double)x[label] - m : 0; /* `out` may not be `x`, but a row gathered from elsewhere is read here */
    double total = FN(exp_row)(x, m, out, n), logs = log(total);
    T inv = (T)(1 / total), loss = 0;
    if (kept) loss = (T)(logs - of_label);
    if (!p->labels) loss = (T)FN(expected_loss)(x, v[2], m, (T)logs, n);
    for (int64_t i = 0; i < n; i++) out[i] *= inv;
    FN(put_single)(p, r, loss);
    return 0;
}

/* Softmax, X@GRAD, and Label where it is soft; Loss@GRAD is the single value of a row */
INLINE int FN(xent_grad_row)(const Rows *p, int64_t r, T *const *v) {
    const T *s = v[0];
    T *out = v[1], g = FN(single)(p, r);
    int64_t n = p->columns;
    if (!p->labels) {
        const T *d = v[2];
        T total = (T)FN(sum)(d, n);
        IVDEP for (int64_t i = 0; i < n; i++) out[i] = (s[i] * total - d[i]) * g;
        return 0;
    }
    int64_t label = label_of(p, r);
    if (label == p->ignore) {
        for (int64_t i = 0; i < n; i++) out[i] = 0;
        return 0;
    }
    if (is_wrong(p, label)) return 1;
    int64_t k = column_of(p, label);
    T at_label = k < 0 ? 0 : (s[k] - 1) * g;
    IVDEP for (int64_t i = 0; i < n; i++) out[i] = s[i] * g;
    if (k >= 0) out[k] = at_label;
    return 0;
}

/* cross_entropy of integer labels: X; Y is the single value of a row. log(0) counts as -1e20. */
INLINE int FN(pick_row)(const Rows *p, int64_t r, T *const *v) {
    int64_t label = label_of(p, r), kept = label != p->ignore, k = column_of(p, label);
    if (kept && is_wrong(p, label)) return 1;
    if (k < 0) kept = 0; /* another part's */
    T x = kept ? v[0][k] : 1, tiny = sizeof(T) == 4 ? (T)1e-30 : (T)1e-300;
    T loss = x > 0 ? (T)-log(x < tiny ? tiny : x) : x != x ? x : (T)1e20;
    FN(put_single)(p, r, kept ? loss : 0);
    return 0;
}

/* X, X@GRAD; Y@GRAD is the single value of a row. A label that does not name a column leaves zeros. */
INLINE int FN(pick_grad_row)(const Rows *p, int64_t r, T *const *v) {
    int64_t label = label_of(p, r), k = column_of(p, label);
    memset(v[1], 0, (size_t)p->columns * sizeof(T));
    if (label != p->ignore && k >= 0) v[1][k] = -FN(single)(p, r) / v[0][k];
    return 0;
}

/* Rows `begin` to `end` of a kernel of COUNT operands, of which OUT is written (-1: none is) and the others are read */
#define ROWS(NAME, ROW, OUT, COUNT, NS)                                                                                                 \
    static void FN(NAME##_range)(void *ctx, int64_t begin, int64_t end) {                                                               \
        Rows *p = ctx;                                                                                                                  \
        int64_t n = p->columns, inner = p->inner;                                                                                       \
        int apart = inner > 1 || p->formats & 63;                                                                                       \
        T *own = apart ? scratch((size_t)(COUNT * n) * sizeof(T)) : NULL, *v[3] = {0};                                                  \
        if (apart && !own) {                                                                                                            \
            p->failed = -2;                                                                                                             \
            return;                                                                                                                     \
        }                                                                                                                               \
        for (int64_t r = begin; r < end; r++) {                                                                                         \
            int64_t start = r / inner * n * inner + r % inner;                                                                          \
            for (int k = 0; k < COUNT; k++) {                                                                                           \
                int format = FORMAT(p->formats, k);                                                                                     \
                const char *from = PTR(char, p->at[k]);                                                                                 \
                v[k] = from && inner == 1 && !format ? PTR(T, p->at[k]) + start : own + k * n;                                          \
                if (!from || k == OUT) continue;                                                                                        \
                if (inner > 1)                                                                                                          \
                    for (int64_t i = 0; i < n; i++) v[k][i] = FN(element)(format, from, start + i * inner);                             \
                else if (format)                                                                                                        \
                    FN(widen)(format, v[k], from + 2 * start, n);                                                                       \
            }                                                                                                                           \
            if (FN(ROW)(p, r, v)) p->failed = r;                                                                                        \
            if (OUT < 0) continue;                                                                                                      \
            int format = FORMAT(p->formats, OUT < 0 ? 0 : OUT);                                                                         \
            char *to = PTR(char, p->at[OUT < 0 ? 0 : OUT]);                                                                             \
            T *made = v[OUT < 0 ? 0 : OUT];                                                                                             \
            if (inner > 1)                                                                                                              \
                for (int64_t i = 0; i < n; i++) FN(put_element)(format, to, start + i * inner, made[i]);                                \
            else if (format)                                                                                                            \
                FN(narrow)(format, to + 2 * start, made, n);                                                                            \
        }                                                                                                                               \
    }                                                                                                                                   \
    static void FN(NAME)(const int64_t *a, Team *team) { run_rows(a, team, FN(NAME##_range), NS * sizeof(T) / 4); }

ROWS(softmax, softmax_row, 1, 2, 1.2)
ROWS(log_softmax, log_softmax_row, 1, 2, 1.2)
ROWS(softmax_grad, softmax_grad_row, 2, 3, 0.3)
ROWS(log_softmax_grad, log_softmax_grad_row, 2, 3, 1.0)
ROWS(logsumexp, logsumexp_row, -1, 1, 1.0)
ROWS(xent, xent_row, 1, 3, 1.2)
ROWS(xent_grad, xent_grad_row, 1, 3, 0.3)
ROWS(pick, pick_row, -1, 1, 0.01)
ROWS(pick_grad, pick_grad_row, 1, 2, 0.1)
#undef ROWS

/* -- layer_norm, and rms_norm, which takes 0 for the mean ------------------------------------------------------------------------------ */

typedef struct {
    const char *x, *g;
    char *y;
    const T *scale, *bias;
    T *mean, *var;
    double *partial; /* sums of a panel of rows, [panels][2][columns], and as many T behind them */
    T *sums, *rooms; /* three rows for each panel, where elements have 16 bits */
    int64_t columns, panel, rows, centered, formats, failed;
    double epsilon;
} FN(Norm);

/* Row r of an operand of n columns, in T: where it lies, or widened into `room` */
INLINE const T *FN(row_of)(const char *x, int format, int64_t r, int64_t n, T *room) {
    if (!format) return (const T *)x + r * n;
    FN(widen)(format, room, x + 2 * r * n, n);
    return room;
}

/* x, scale, bias, y, mean, variance (addresses, 0 for none), rows, columns, epsilon, whether a mean is taken off; the formats of x and y */
static void FN(layer_norm_range)(void *ctx, int64_t begin, int64_t end) {
    FN(Norm) *p = ctx;
    int64_t n = p->columns;
    int from = FORMAT(p->formats, 0), to = FORMAT(p->formats, 1);
    const T *scale = p->scale, *bias = p->bias;
    T *room = from || to ? scratch((size_t)(2 * n) * sizeof(T)) : NULL;
    if ((from || to) && !room) {
        p->failed = 1;
        return;
    }
    for (int64_t r = begin; r < end; r++) {
        const T *x = FN(row_of)(p->x, from, r, n, room);
        T *y = to ? room + n : (T *)p->y + r * n, m = p->centered ? (T)(FN(sum)(x, n) / (double)n) : 0;
        double var = FN(sum_of_deviations)(x, m, n) / (double)n;
        T inv = (T)(1 / sqrt(var + p->epsilon));
        if (p->mean) p->mean[r] = m;
        if (p->var) p->var[r] = (T)var;
        if (scale && bias) {
            IVDEP for (int64_t i = 0; i < n; i++) y[i] = (x[i] - m) * inv * scale[i] + bias[i];
        } else {
            IVDEP for (int64_t i = 0; i < n; i++) y[i] = (x[i] - m) * inv;
            if (scale) IVDEP for (int64_t i = 0; i < n; i++) y[i] *= scale[i];
            if (bias) IVDEP for (int64_t i = 0; i < n; i++) y[i] += bias[i];
        }
        if (to) FN(narrow)(to, p->y + 2 * r * n, y, n);
    }
}

static void FN(layer_norm)(const int64_t *a, Team *team) {
    FN(Norm) p = {.x = PTR(char, a[0]), .scale = PTR(T, a[1]), .bias = PTR(T, a[2]), .y = PTR(char, a[3]), .mean = PTR(T, a[4]),
                  .var = PTR(T, a[5]), .columns = a[7], .epsilon = as_double(a[8]), .centered = a[9], .formats = a[10]};
    parallel_for(team, a[6], grain_of((double)a[7] * 0.3 * sizeof(T) / 4 + 30), FN(layer_norm_range), &p);
    if (p.failed) team->error = "no memory for a row";
}

static void FN(layer_norm_grad_range)(void *ctx, int64_t begin, int64_t end) {
    FN(Norm) *p = ctx;
    int64_t n = p->columns;
    const T *scale = p->scale;
    for (int64_t panel = begin; panel < end; panel++) {
        int64_t last = (panel + 1) * p->panel < p->rows ? (panel + 1) * p->panel : p->rows;
        double *db = p->partial + panel * 2 * n, *ds = db + n;
        T *b = p->sums + panel * 2 * n, *s = b + n, *room = p->rooms + panel * 3 * n;
        int of_x = FORMAT(p->formats, 0), of_g = FORMAT(p->formats, 1), of_dx = FORMAT(p->formats, 2);
        memset(db, 0, (size_t)n * 2 * sizeof *db);
        memset(b, 0, (size_t)n * 2 * sizeof *b);
        for (int64_t r = panel * p->panel, k = 1; r < last; r++, k++) {
            const T *x = FN(row_of)(p->x, of_x, r, n, room), *g = FN(row_of)(p->g, of_g, r, n, room + n);
            T m = p->centered ? p->mean[r] : 0, inv = (T)(1 / sqrt((double)p->var[r] + p->epsilon));
            IVDEP for (int64_t i = 0; i < n; i++) {
                b[i] += g[i];
                s[i] += g[i] * ((x[i] - m) * inv);
            }
            if (k % 16 == 0 || r + 1 == last) { /* sums of 16 in T, beyond that in float64 */
                IVDEP for (int64_t i = 0; i < n; i++) {
                    db[i] += b[i], ds[i] += s[i];
                    b[i] = s[i] = 0;
                }
            }
            if (!p->y) continue;
            T *dx = of_dx ? room + 2 * n : (T *)p->y + r * n;
            T mean_g = p->centered ? (T)((scale ? FN(sum_of_scaled)(g, scale, n) : FN(sum)(g, n)) / (double)n) : 0;
            T mean_h = (T)((scale ? FN(dot_scaled)(g, scale, x, m, inv, n) : FN(dot_normal)(g, x, m, inv, n)) / (double)n);
            if (scale) {
                IVDEP for (int64_t i = 0; i < n; i++) dx[i] = (g[i] * scale[i] - mean_g - (x[i] - m) * inv * mean_h) * inv;
            } else {
                IVDEP for (int64_t i = 0; i < n; i++) dx[i] = (g[i] - mean_g - (x[i] - m) * inv * mean_h) * inv;
            }
            if (of_dx) FN(narrow)(of_dx, p->y + 2 * r * n, dx, n);
        }
    }
}

/* x, scale, mean, variance, gradient, dx, dscale, dbias (addresses, 0 for none), rows, columns, epsilon, whether a mean was taken off; the formats of
 * x, the gradient and dx */
static void FN(layer_norm_grad)(const int64_t *a, Team *team) {
    FN(Norm) p = {.x = PTR(char, a[0]), .scale = PTR(T, a[1]), .mean = PTR(T, a[2]), .var = PTR(T, a[3]), .g = PTR(char, a[4]),
                  .y = PTR(char, a[5]), .rows = a[8], .columns = a[9], .epsilon = as_double(a[10]), .centered = a[11], .formats = a[12]};
    T *sums[2] = {PTR(T, a[7]), PTR(T, a[6])};
    int64_t n = p.columns;
    p.panel = (p.rows + 31) / 32 > 16 ? (p.rows + 31) / 32 : 16;
    int64_t panels = (p.rows + p.panel - 1) / p.panel;
    size_t rooms = p.formats ? (size_t)(panels * 3 * n) * sizeof(T) : 0;
    p.partial = scratch((size_t)(panels * 2 * n + 1) * (sizeof(double) + sizeof(T)) + rooms);
    if (!p.partial) {
        team->error = "no memory for partial sums";
        return;
    }
    p.sums = (T *)(p.partial + panels * 2 * n), p.rooms = p.sums + panels * 2 * n;
    parallel_for(team, panels, grain_of((double)p.panel * ((double)n * 0.6 * sizeof(T) / 4 + 60)), FN(layer_norm_grad_range), &p);
    for (int k = 0; k < 2; k++) {
        if (!sums[k]) continue;
        for (int64_t i = 0; i < n; i++) {
            double total = 0;
            for (int64_t panel = 0; panel < panels; panel++) total += p.partial[(panel * 2 + k) * n + i];
            sums[k][i] = (T)total;
        }
    }
}
