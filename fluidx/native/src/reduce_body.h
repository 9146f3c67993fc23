/* Reductions of one type T, which are added up in ACC: included with T, ACC, FN(name), whether T is a FLOAT, and PLUS and TIMES of two ACC. */

INLINE ACC FN(join)(int op, ACC a, ACC b) {
    switch (op) {
    case R_MAX: return ((b > a) | IS_NAN(b)) ? b : a;
    case R_MIN: return ((b < a) | IS_NAN(b)) ? b : a;
    case R_PROD: return TIMES(a, b);
    default: return PLUS(a, b);
    }
}
INLINE T FN(join_T)(int op, T a, T b) {
    switch (op) {
    case R_MAX: return ((b > a) | IS_NAN(b)) ? b : a;
    case R_MIN: return ((b < a) | IS_NAN(b)) ? b : a;
    case R_PROD: return (T)TIMES(a, b);
    default: return (T)PLUS(a, b);
    }
}
/* The same for columns, in two choices of one comparison each: where eight follow each other gcc makes branches of the other form */
#define IN_COLUMNS(R)                                                                                                                   \
    R larger = b > a ? b : a, smaller = b < a ? b : a;                                                                                  \
    switch (op) {                                                                                                                       \
    case R_MAX: return IS_NAN(b) ? b : larger;                                                                                          \
    case R_MIN: return IS_NAN(b) ? b : smaller;                                                                                         \
    case R_PROD: return (R)TIMES(a, b);                                                                                                 \
    default: return (R)PLUS(a, b);                                                                                                      \
    }
INLINE ACC FN(mix)(int op, ACC a, ACC b) { IN_COLUMNS(ACC) }
INLINE T FN(mix_T)(int op, T a, T b) { IN_COLUMNS(T) }
#undef IN_COLUMNS
INLINE T FN(term)(int op, T x) { return op == R_SQUARES ? (T)TIMES(x, x) : x; }

/* Rows `r` to `stop` of the columns [0, n), each `down` and `right` elements apart, joined into `to`. Eight rows at a time in T. */
INLINE void FN(reduce_columns)(int op, const T *x, int64_t down, int64_t right, int64_t rows, int64_t n, ACC *to) {
    T own[8][REDUCE_GATHERED];
    int64_t r = 0;
    for (; r < rows; r += 8) {
        const T *v[8];
        int64_t some = rows - r < 8 ? rows - r : 8;
        for (int64_t k = 0; k < some; k++) {
            v[k] = x + (r + k) * down;
            if (right != 1) {
                for (int64_t j = 0; j < n; j++) own[k][j] = v[k][j * right];
                v[k] = own[k];
            }
        }
        if (some == 8 && SAFE_IN_T) {
            const T *a = v[0], *b = v[1], *c = v[2], *d = v[3], *e = v[4], *f = v[5], *g = v[6], *h = v[7];
            IVDEP for (int64_t j = 0; j < n; j++) {
                T ab = FN(mix_T)(op, FN(term)(op, a[j]), FN(term)(op, b[j])), cd = FN(mix_T)(op, FN(term)(op, c[j]), FN(term)(op, d[j]));
                T ef = FN(mix_T)(op, FN(term)(op, e[j]), FN(term)(op, f[j])), gh = FN(mix_T)(op, FN(term)(op, g[j]), FN(term)(op, h[j]));
                to[j] = FN(mix)(op, to[j], FN(mix_T)(op, FN(mix_T)(op, ab, cd), FN(mix_T)(op, ef, gh)));
            }
        } else {
            for (int64_t k = 0; k < some; k++)
                IVDEP for (int64_t j = 0; j < n; j++) to[j] = FN(mix)(op, to[j], op == R_SQUARES ? (ACC)TIMES((ACC)v[k][j], v[k][j]) : (ACC)v[k][j]);
        }
    }
}

/* One function for each operation: the loops above are long, and compiled once for each. */
#define COLUMNS_OF(OP)                                                                                                                  \
    NOINLINE void FN(columns_##OP)(const T *x, int64_t down, int64_t right, int64_t rows, int64_t n, ACC *to) {                         \
        FN(reduce_columns)(OP, x, down, right, rows, n, to);                                                                            \
    }
COLUMNS_OF(R_SUM)
COLUMNS_OF(R_MAX)
COLUMNS_OF(R_MIN)
COLUMNS_OF(R_PROD)
COLUMNS_OF(R_SQUARES)
#undef COLUMNS_OF
INLINE void FN(columns)(int op, const T *x, int64_t down, int64_t right, int64_t rows, int64_t n, ACC *to) {
    switch (op) {
    case R_SUM: FN(columns_R_SUM)(x, down, right, rows, n, to); break;
    case R_MAX: FN(columns_R_MAX)(x, down, right, rows, n, to); break;
    case R_MIN: FN(columns_R_MIN)(x, down, right, rows, n, to); break;
    case R_PROD: FN(columns_R_PROD)(x, down, right, rows, n, to); break;
    case R_SQUARES: FN(columns_R_SQUARES)(x, down, right, rows, n, to); break;
    }
}

/* A row of n elements, `step` apart: its elements in lanes, as columns of a matrix of LANES columns, and the lanes by halves */
INLINE ACC FN(reduce_row)(int op, const T *x, int64_t step, int64_t n, ACC start) {
#if FLOAT
    if ((op == R_SUM || op == R_SQUARES) && step == 1) return start + (op == R_SUM ? FN(sum)(x, n) : FN(sum_of_squares)(x, n));
#endif
    if ((op == R_MAX || op == R_MIN) && step == 1 && n >= LANES) {
        T t[LANES];
        memcpy(t, x, sizeof t);
        for (int64_t at = LANES; at < n; at += LANES) { /* the last time some elements again, which an extremum forgives */
            const T *from = x + (n - at < LANES ? n - LANES : at);
            IVDEP for (int64_t j = 0; j < LANES; j++) t[j] = FN(join_T)(op, t[j], from[j]);
        }
        for (int half = LANES / 2; half; half /= 2)
            for (int j = 0; j < half; j++) t[j] = FN(join_T)(op, t[j], t[j + half]);
        return FN(join)(op, start, t[0]);
    }
    ACC lanes[LANES];
    int64_t whole = n / LANES * LANES;
    for (int j = 0; j < LANES; j++) lanes[j] = FN(none)(op);
    if (whole) FN(columns)(op, x, LANES * step, step, n / LANES, LANES, lanes);
    if (n > whole) FN(columns)(op, x + whole * step, 0, step, 1, n - whole, lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) lanes[j] = FN(join)(op, lanes[j], lanes[j + half]);
    return FN(join)(op, start, lanes[0]);
}

#define ROW_OF(OP)                                                                                                                      \
    NOINLINE ACC FN(row_##OP)(const T *x, int64_t step, int64_t n, ACC start) { return FN(reduce_row)(OP, x, step, n, start); }
ROW_OF(R_SUM)
ROW_OF(R_MAX)
ROW_OF(R_MIN)
ROW_OF(R_PROD)
ROW_OF(R_SQUARES)
#undef ROW_OF
INLINE ACC FN(row)(int op, const T *x, int64_t step, int64_t n, ACC start) {
    switch (op) {
    case R_SUM: return FN(row_R_SUM)(x, step, n, start);
    case R_MAX: return FN(row_R_MAX)(x, step, n, start);
    case R_MIN: return FN(row_R_MIN)(x, step, n, start);
    case R_PROD: return FN(row_R_PROD)(x, step, n, start);
    default: return FN(row_R_SQUARES)(x, step, n, start);
    }
}

/* Put a result where it belongs. */
INLINE void FN(reduced)(const Reduce *p, int64_t k, ACC x) {
#if FLOAT
    FN(put_element)(p->to, PTR(void, p->out), k, (T)DIVIDED(x, p->divisor));
#else
    PTR(T, p->out)[k] = (T)DIVIDED(x, p->divisor);
#endif
}

#if FLOAT
/* n 16-bit elements, `step` apart, in T */
INLINE void FN(widen_apart)(int format, T *to, const uint16_t *x, int64_t step, int64_t n) {
    if (step == 1) {
        FN(widen)(format, to, x, n);
        return;
    }
    uint16_t own[REDUCE_GATHERED];
    for (int64_t j = 0; j < n; j += REDUCE_GATHERED) {
        int64_t some = n - j < REDUCE_GATHERED ? n - j : REDUCE_GATHERED;
        for (int64_t i = 0; i < some; i++) own[i] = x[(j + i) * step];
        FN(widen)(format, to + j, own, some);
    }
}
/* `columns` and `row` of 16-bit elements from number `at` on, in T and in the same order: eight rows, or one piece of a row, at a time */
static void FN(narrow_columns)(const Reduce *p, int64_t at, int64_t rows, int64_t n, ACC *to) {
    T own[8 * REDUCE_COLUMNS];
    for (int64_t r = 0; r < rows; r += 8) {
        int64_t some = rows - r < 8 ? rows - r : 8;
        for (int64_t k = 0; k < some; k++)
            FN(widen_apart)(p->from, own + k * n, PTR(const uint16_t, p->x) + at + (r + k) * p->sr0, p->sk1, n);
        FN(columns)(p->op, own, n, 1, some, n, to);
    }
}
static ACC FN(narrow_row)(const Reduce *p, int64_t at, int64_t n, ACC start) {
    T own[2 * REDUCE_PIECE];
    FN(widen_apart)(p->from, own, PTR(const uint16_t, p->x) + at, p->sr1, n);
    if (p->sr1 == 1) return FN(row)(p->op, own, 1, n, start);
    for (int64_t i = n - 1; i > 0; i--) own[2 * i] = own[i]; /* any distance but 1: the order of sums is that of elements apart */
    return FN(row)(p->op, own, 2, n, start);
}
#endif

static void FN(reduce_range)(void *ctx, int64_t begin, int64_t end) {
    const Reduce *p = ctx;
    int op = p->op;
    const T *x0 = PTR(const T, p->x);
    ACC *partial = p->partial, none = FN(none)(op), acc[REDUCE_COLUMNS];
    for (int64_t item = begin; item < end; item++) {
        int64_t panel = item % p->panels, rest = item / p->panels, at, n = 1;
        int64_t first = panel * p->panel, last = first + p->panel < p->units ? first + p->panel : p->units;
        if (p->by_columns) {
            int64_t chunk = rest % p->chunks, k0 = rest / p->chunks;
            at = k0 * p->k1 + chunk * p->width;
            n = p->k1 - chunk * p->width < p->width ? p->k1 - chunk * p->width : p->width;
            for (int64_t j = 0; j < n; j++) acc[j] = none;
            int64_t from = k0 * p->sk0 + chunk * p->width * p->sk1 + first * p->sr0;
#if FLOAT
            if (p->from)
                FN(narrow_columns)(p, from, last - first, n, acc);
            else
#endif
                FN(columns)(op, x0 + from, p->sr0, p->sk1, last - first, n, acc);
        } else {
            at = rest;
            int64_t row = rest / p->k1 * p->sk0 + rest % p->k1 * p->sk1;
            acc[0] = none;
            for (int64_t u = first; u < last; u++) { /* a unit is a piece of one of the r0 rows */
                int64_t r = u / p->pieces, from = u % p->pieces * REDUCE_PIECE, left = p->r1 - from;
                int64_t some = left < REDUCE_PIECE ? left : REDUCE_PIECE, place = row + r * p->sr0 + from * p->sr1;
#if FLOAT
                if (p->from)
                    acc[0] = FN(narrow_row)(p, place, some, acc[0]);
                else
#endif
                    acc[0] = FN(row)(op, x0 + place, p->sr1, some, acc[0]);
            }
        }
        if (partial) {
            memcpy(partial + panel * p->k0 * p->k1 + at, acc, (size_t)n * sizeof *acc);
        } else {
            for (int64_t j = 0; j < n; j++) FN(reduced)(p, at + j, acc[j]);
        }
    }
}

static void FN(reduce)(const int64_t *a, Team *team) {
    Reduce p = reduce_plan(a, sizeof(T));
    int64_t outs = p.k0 * p.k1;
    if (outs < 1) return;
    if (p.panels > 1 && !(p.partial = scratch((size_t)(p.panels * outs) * sizeof(ACC)))) {
        team->error = "no memory for partial results";
        return;
    }
    ACC *partial = p.partial;
    parallel_for(team, p.items, p.grain, FN(reduce_range), &p);
    for (int64_t k = 0; partial && k < outs; k++) {
        ACC total = partial[k];
        for (int64_t panel = 1; panel < p.panels; panel++) total = FN(join)(p.op, total, partial[panel * outs + k]);
        FN(reduced)(&p, k, total);
    }
}
