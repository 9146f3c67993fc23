/* batch_norm.h for one type: T, FN(name); and S, in which x, y and their gradients are stored, with LOAD and STORE from and to it. */

typedef struct {
    const S *x, *g;
    S *y;
    const T *scale, *bias, *mean, *var;
    T *mean_out, *var_out, *saved_mean, *saved_inv, *dscale, *dbias;
    int64_t n, c, k, given, block, parts;
    T keep, eps;
    double *sums;
    Tail *tail;
} FN(BatchNorm);

/* -- one channel --------------------------------------------------------------------------------------------------------------------- */

/* The outputs for a channel of these statistics. Variances go through T once, as the values that are handed out do. */
static void FN(bn_put)(const FN(BatchNorm) *j, int64_t c, T mean, T var) {
    T one = 1, inv = one / (T)sqrt((double)(T)(var + j->eps));
    if (j->given) {
        if (j->mean_out && j->mean_out != j->mean) j->mean_out[c] = mean;
        if (j->var_out && j->var_out != j->var) j->var_out[c] = var;
    } else {
        if (j->mean_out) j->mean_out[c] = j->mean[c] * j->keep + mean * (one - j->keep);
        if (j->var_out) j->var_out[c] = j->var[c] * j->keep + var * (one - j->keep);
    }
    if (j->saved_mean) j->saved_mean[c] = mean;
    if (j->saved_inv) j->saved_inv[c] = inv;
}

INLINE T FN(bn_factor)(const FN(BatchNorm) *j, int64_t c, T var) { return j->scale[c] / (T)sqrt((double)(T)(var + j->eps)); }

/* Sums along a run: of x; of (x - mean)^2; of g and g (x - mean). Lanes keep each chain of roundings short, doubles join the runs. */
INLINE double FN(bn_sum)(const S *x, int64_t n) {
    T s[BN_LANES] = {0};
    double total = 0;
    int64_t i = 0;
    for (; i + BN_LANES <= n; i += BN_LANES)
        for (int l = 0; l < BN_LANES; l++) s[l] += LOAD(x[i + l]);
    for (int l = 0; i < n; i++, l++) s[l] += LOAD(x[i]);
    for (int l = 0; l < BN_LANES; l++) total += (double)s[l];
    return total;
}
INLINE double FN(bn_squares)(const S *x, int64_t n, T mean) {
    T s[BN_LANES] = {0};
    double total = 0;
    int64_t i = 0;
    for (; i + BN_LANES <= n; i += BN_LANES)
        for (int l = 0; l < BN_LANES; l++) s[l] += (LOAD(x[i + l]) - mean) * (LOAD(x[i + l]) - mean);
    for (int l = 0; i < n; i++, l++) s[l] += (LOAD(x[i]) - mean) * (LOAD(x[i]) - mean);
    for (int l = 0; l < BN_LANES; l++) total += (double)s[l];
    return total;
}
INLINE void FN(bn_products)(const S *x, const S *g, int64_t n, T mean, double *sum, double *dot) {
    T s[BN_LANES] = {0}, d[BN_LANES] = {0};
    int64_t i = 0;
    for (; i + BN_LANES <= n; i += BN_LANES)
        for (int l = 0; l < BN_LANES; l++) s[l] += LOAD(g[i + l]), d[l] += LOAD(g[i + l]) * (LOAD(x[i + l]) - mean);
    for (int l = 0; i < n; i++, l++) s[l] += LOAD(g[i]), d[l] += LOAD(g[i]) * (LOAD(x[i]) - mean);
    for (int l = 0; l < BN_LANES; l++) *sum += (double)s[l], *dot += (double)d[l];
}

/* -- NCHW: blocks of channels -------------------------------------------------------------------------------------------------------- */

static void FN(bn_channels)(void *ctx, int64_t begin, int64_t end) {
    const FN(BatchNorm) *j = ctx;
    int64_t apart = j->c * j->k;
    for (int64_t b = begin; b < end; b++)
        for (int64_t c = b * j->block; c < at_most((b + 1) * j->block, j->c); c++) {
            const S *x = j->x + c * j->k;
            S *y = j->y + c * j->k;
            T mean, var, shift;
            if (j->given) {
                mean = j->mean[c], var = j->var[c];
            } else {
                double sum = 0, count = (double)j->n * (double)j->k;
                for (int64_t n = 0; n < j->n; n++) sum += FN(bn_sum)(x + n * apart, j->k);
                mean = (T)(sum / count), sum = 0;
                for (int64_t n = 0; n < j->n; n++) sum += FN(bn_squares)(x + n * apart, j->k, mean);
                var = (T)(sum / count);
            }
            T factor = FN(bn_factor)(j, c, var), bias = j->bias[c];
            FN(bn_put)(j, c, mean, var);
            shift = bias - mean * factor;
            for (int64_t n = 0; n < j->n; n++) {
                const S *from = x + n * apart;
                S *to = y + n * apart;
                if (j->given) {
                    IVDEP for (int64_t i = 0; i < j->k; i++) to[i] = STORE(LOAD(from[i]) * factor + shift);
                } else {
                    IVDEP for (int64_t i = 0; i < j->k; i++) to[i] = STORE((LOAD(from[i]) - mean) * factor + bias);
                }
                if (j->tail) TFN(vm_part)(j->tail, to, 1, j->k, j->k);
            }
        }
}

static void FN(bn_grad_channels)(void *ctx, int64_t begin, int64_t end) {
    const FN(BatchNorm) *j = ctx;
    int64_t apart = j->c * j->k;
    for (int64_t b = begin; b < end; b++)
        for (int64_t c = b * j->block; c < at_most((b + 1) * j->block, j->c); c++) {
            const S *x = j->x + c * j->k, *g = j->g + c * j->k;
            S *y = j->y + c * j->k;
            T mean = j->mean[c], inv = j->var[c];
            double sum = 0, dot = 0, count = (double)j->n * (double)j->k;
            for (int64_t n = 0; n < j->n; n++) FN(bn_products)(x + n * apart, g + n * apart, j->k, mean, &sum, &dot);
            T factor = j->scale[c] * inv, slope = (T)(dot * (double)inv * (double)inv / count), shift = (T)(sum / count);
            j->dbias[c] = (T)sum, j->dscale[c] = (T)(dot * (double)inv);
            for (int64_t n = 0; n < j->n; n++) {
                const S *from = x + n * apart, *d = g + n * apart;
                S *to = y + n * apart;
                if (j->given) {
                    IVDEP for (int64_t i = 0; i < j->k; i++) to[i] = STORE(LOAD(d[i]) * factor);
                } else {
                    IVDEP for (int64_t i = 0; i < j->k; i++) to[i] = STORE((LOAD(d[i]) - (LOAD(from[i]) - mean) * slope - shift) * factor);
                }
            }
        }
}

/* -- NHWC: parts of the rows ----------------------------------------------------------------------------------------------------------- */

/* Mean and squared deviations of the channels over parts [begin, end) of the rows: [part][3][channels], first how many. */
static void FN(bn_part_moments)(void *ctx, int64_t begin, int64_t end) {
    const FN(BatchNorm) *j = ctx;
    int64_t c = j->c;
    T *sum = scratch(sizeof(T) * (size_t)(3 * c)), *square = sum + c, *rest = square + c;
    for (int64_t p = begin; p < end; p++) {
        double *mean = j->sums + p * 3 * c + c, *squares = mean + c;
        int64_t first = j->n * p / j->parts, last = j->n * (p + 1) / j->parts;
        memset(mean, 0, sizeof(double) * (size_t)(2 * c));
        for (int64_t r = first; r < last; r += BN_ROWS) {
            int64_t rows = at_most(BN_ROWS, last - r);
            const S *x = j->x + r * c;
            for (int64_t i = 0; i < c; i++) sum[i] = 0, square[i] = 0, rest[i] = 0;
            for (int64_t q = 0; q < rows; q++)
                IVDEP for (int64_t i = 0; i < c; i++) sum[i] += LOAD(x[q * c + i]);
            for (int64_t i = 0; i < c; i++) sum[i] /= (T)rows;
            for (int64_t q = 0; q < rows; q++)
                IVDEP for (int64_t i = 0; i < c; i++) {
                    T d = LOAD(x[q * c + i]) - sum[i];
                    rest[i] += d, square[i] += d * d;
                }
            /* sum[i] is the block's mean rounded to T, and rest[i] the rounding error */
            double before = (double)(r - first), share = (double)rows / (before + (double)rows);
            IVDEP for (int64_t i = 0; i < c; i++) {
                double lost = (double)rest[i] / (double)rows, delta = (double)sum[i] + lost - mean[i];
                mean[i] += delta * share;
                squares[i] += (double)square[i] - (double)rest[i] * lost + delta * delta * before * share;
            }
        }
        for (int64_t i = 0; i < c; i++) mean[i - c] = (double)(last - first);
    }
}

static void FN(bn_rows)(void *ctx, int64_t begin, int64_t end) {
    const FN(BatchNorm) *j = ctx;
    const T *mean = j->mean_out, *factor = j->saved_mean, *shift = j->saved_inv;
    int64_t c = j->c, some = at_least(1, TFN(VM_BLOCK) / c), behind = begin; /* rows that the tail has not seen yet */
    for (int64_t r = begin; r < end; r++) {
        const S *x = j->x + r * c;
        S *y = j->y + r * c;
        if (j->given) {
            IVDEP for (int64_t i = 0; i < c; i++) y[i] = STORE(LOAD(x[i]) * factor[i] + shift[i]);
        } else {
            IVDEP for (int64_t i = 0; i < c; i++) y[i] = STORE((LOAD(x[i]) - mean[i]) * factor[i] + shift[i]);
        }
        if (j->tail && (r + 1 == end || r + 1 - behind == some)) {
            TFN(vm_part)(j->tail, j->y + behind * c, r + 1 - behind, c, c);
            behind = r + 1;
        }
    }
}

/* Sums of g and of g (x - mean) over parts of the rows: [part][3][channels], the last unused. */
static void FN(bn_part_products)(void *ctx, int64_t begin, int64_t end) {
    const FN(BatchNorm) *j = ctx;
    int64_t c = j->c;
    T *sum = scratch(sizeof(T) * (size_t)(2 * c)), *dot = sum + c;
    for (int64_t p = begin; p < end; p++) {
        double *sums = j->sums + p * 3 * c, *dots = sums + c;
        int64_t last = j->n * (p + 1) / j->parts;
        memset(sums, 0, sizeof(double) * (size_t)(2 * c));
        for (int64_t r = j->n * p / j->parts; r < last; r += 2 * BN_ROWS) {
            for (int64_t i = 0; i < c; i++) sum[i] = 0, dot[i] = 0;
            for (int64_t q = r; q < at_most(r + 2 * BN_ROWS, last); q++) {
                const S *x = j->x + q * c, *g = j->g + q * c;
                IVDEP for (int64_t i = 0; i < c; i++) sum[i] += LOAD(g[i]), dot[i] += LOAD(g[i]) * (LOAD(x[i]) - j->mean[i]);
            }
            IVDEP for (int64_t i = 0; i < c; i++) sums[i] += (double)sum[i], dots[i] += (double)dot[i];
        }
    }
}

static void FN(bn_grad_rows)(void *ctx, int64_t begin, int64_t end) {
    const FN(BatchNorm) *j = ctx;
    const T *factor = j->mean_out, *slope = j->saved_mean, *shift = j->saved_inv, *mean = j->mean;
    int64_t c = j->c;
    for (int64_t r = begin; r < end; r++) {
        const S *x = j->x + r * c, *g = j->g + r * c;
        S *y = j->y + r * c;
        if (j->given) {
            IVDEP for (int64_t i = 0; i < c; i++) y[i] = STORE(LOAD(g[i]) * factor[i]);
        } else {
            IVDEP for (int64_t i = 0; i < c; i++) y[i] = STORE((LOAD(g[i]) - (LOAD(x[i]) - mean[i]) * slope[i] - shift[i]) * factor[i]);
        }
    }
}

/* -- the kernels --------------------------------------------------------------------------------------------------------------------- */

static int64_t FN(bn_grain)(int64_t elements) { return (1 << 15) / at_least(elements, 1) + 1; }

static void FN(batch_norm)(const int64_t *a, Team *team) {
    Tail tail;
    FN(BatchNorm) j = {.x = PTR(S, a[0]), .y = PTR(S, a[1]), .scale = PTR(T, a[2]), .bias = PTR(T, a[3]), .mean = PTR(T, a[4]),
                  .var = PTR(T, a[5]), .mean_out = PTR(T, a[6]), .var_out = PTR(T, a[7]), .saved_mean = PTR(T, a[8]),
                  .saved_inv = PTR(T, a[9]), .n = a[10], .c = a[11], .k = a[12], .given = a[13], .keep = (T)as_double(a[14]),
                  .eps = (T)as_double(a[15]), .sums = PTR(double, a[16]), .block = 1,
                  .tail = tail_of(a[17], a[1], TFN(VM_BLOCK), &tail)};
    if (j.k) {
        j.block = at_least(1, 64 / j.k);
        parallel_for(team, up_div(j.c, j.block), FN(bn_grain)(j.n * j.k * j.block), FN(bn_channels), &j);
        tail_done(j.tail, team);
        return;
    }
    j.parts = bn_parts(j.n);
    if (!j.given) parallel_for(team, j.parts, 1, FN(bn_part_moments), &j);
    /* the second pass reads its inputs in the first part's place */
    FN(BatchNorm) next = j;
    T *first = (T *)j.sums, *mean = first, *factor = first + j.c, *shift = first + 2 * j.c;
    double *total = j.sums + j.parts * 3 * j.c;
    for (int64_t c = 0; c < j.c; c++) {
        double middle = 0, squares = 0, count = 0;
        for (int64_t p = 0; p < j.parts && !j.given; p++) {
            const double *s = j.sums + p * 3 * j.c + c;
            double delta = s[j.c] - middle, share = s[0] / (count + s[0]);
            middle += delta * share;
            squares += s[2 * j.c] + delta * delta * count * share;
            count += s[0];
        }
        total[c] = j.given ? (double)j.mean[c] : middle;
        total[j.c + c] = j.given ? (double)j.var[c] : squares / count;
    }
    for (int64_t c = 0; c < j.c; c++) {
        T var = (T)total[j.c + c];
        mean[c] = (T)total[c], factor[c] = FN(bn_factor)(&j, c, var);
        shift[c] = j.given ? j.bias[c] - mean[c] * factor[c] : j.bias[c];
        FN(bn_put)(&j, c, mean[c], var);
    }
    next.mean_out = mean, next.saved_mean = factor, next.saved_inv = shift;
    parallel_for(team, j.n, FN(bn_grain)(j.c), FN(bn_rows), &next);
    tail_done(j.tail, team);
}

static void FN(batch_norm_grad)(const int64_t *a, Team *team) {
    FN(BatchNorm) j = {.x = PTR(S, a[0]), .g = PTR(S, a[1]), .y = PTR(S, a[2]), .scale = PTR(T, a[3]), .mean = PTR(T, a[4]),
                  .var = PTR(T, a[5]), .dscale = PTR(T, a[6]), .dbias = PTR(T, a[7]), .n = a[8], .c = a[9], .k = a[10], .given = a[11],
                  .sums = PTR(double, a[12]), .block = 1};
    if (j.k) {
        j.block = at_least(1, 64 / j.k);
        parallel_for(team, up_div(j.c, j.block), FN(bn_grain)(j.n * j.k * j.block), FN(bn_grad_channels), &j);
        return;
    }
    j.parts = bn_parts(j.n);
    parallel_for(team, j.parts, 1, FN(bn_part_products), &j);
    FN(BatchNorm) next = j;
    double *total = j.sums + j.parts * 3 * j.c;
    for (int64_t c = 0; c < 2 * j.c; c++) {
        total[c] = 0;
        for (int64_t p = 0; p < j.parts; p++) total[c] += j.sums[p * 3 * j.c + c];
    }
    T *factor = (T *)j.sums, *slope = factor + j.c, *shift = factor + 2 * j.c;
    for (int64_t c = 0; c < j.c; c++) {
        double inv = (double)j.var[c], count = (double)j.n;
        factor[c] = j.scale[c] * j.var[c], slope[c] = (T)(total[j.c + c] * inv * inv / count), shift[c] = (T)(total[c] / count);
        j.dbias[c] = (T)total[c], j.dscale[c] = (T)(total[j.c + c] * inv);
    }
    next.mean_out = factor, next.saved_mean = slope, next.saved_inv = shift;
    parallel_for(team, j.n, FN(bn_grain)(j.c), FN(bn_grad_rows), &next);
}
