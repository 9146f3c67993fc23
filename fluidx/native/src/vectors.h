/* Support vector machines in float64: for each row, the sums of its kernels with the vectors of each class, and what follows from them.
 *
 * words: rows of numbers, number of rows, features, vectors in panels [panels, features, VECTOR_LANES], number of vectors, weights
 * [sums, vectors], the first vector of each class and the end of the last one (int64), classes, sums for each class, the kind of kernel
 * (0 linear, 1 RBF, 2 polynomial, 3 sigmoid), its gamma, bias and degree, the results [rows, classes, sums]; and for machines of pairs of
 * classes, else 0: rho of each pair, the scores [rows, pairs], the pairs that each class wins [rows, classes] (int64), prob_a, prob_b and
 * the probabilities [rows, classes]
 *
 * The score of the pair of classes i < j is sum j - 1 of class i, sum i of class j and rho. Class i wins if it is positive. */

enum { VECTORS_WORDS = 20, VECTOR_LANES = 16, VECTOR_ROWS = 4 };

typedef struct {
    int64_t x, rows, features, panels, count, weights, starts, classes, sums, kind;
    double gamma, bias, degree;
    int64_t out, rho, scores, wins, a, b, shares;
    int failed;
} Vectors;

/* e^x in loops over lanes: 2^n times the series of e^r for |r| below half of log 2, whose first term left out is below 1e-17 */
INLINE double exp_lane(double x) {
    static const double terms[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                                   1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
    double c = x < -746.0 ? -746.0 : x > 710.0 ? 710.0 : x;
    double shifted = c * 1.4426950408889634 + 6755399441055744.0, n = shifted - 6755399441055744.0; /* the nearest whole number */
    double r = (c - n * 0.6931471803691238) - n * 1.9082149292705877e-10, p = 1.0 / 6227020800.0;
    UNROLL for (int k = 0; k < 13; k++) p = p * r + terms[k];
    int64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    int64_t whole = bits - 0x4338000000000000, half = whole >> 1; /* two factors reach the denormal numbers and infinity */
    int64_t first = (int64_t)((uint64_t)(half + 1023) << 52), second = (int64_t)((uint64_t)(whole - half + 1023) << 52);
    double f, s;
    memcpy(&f, &first, sizeof f);
    memcpy(&s, &second, sizeof s);
    return p * f * s;
}

INLINE double tanh_lane(double x) {
    double e = exp_lane(-2.0 * fabs(x)), y = (1.0 - e) / (1.0 + e);
    return x < 0 ? -y : y;
}

/* A panel's numbers to a whole power, by squares */
INLINE void whole_power(double *x, int64_t degree) {
    double y[VECTOR_LANES];
    for (int j = 0; j < VECTOR_LANES; j++) y[j] = 1;
    for (; degree; degree >>= 1) {
        if (degree & 1)
            for (int j = 0; j < VECTOR_LANES; j++) y[j] *= x[j];
        for (int j = 0; j < VECTOR_LANES; j++) x[j] *= x[j];
    }
    for (int j = 0; j < VECTOR_LANES; j++) x[j] = y[j];
}

/* One rounding where the level has FMA, two in the baseline */
#if defined(HAVE_FMA) || defined(__ARM_FEATURE_FMA)
#define ADD_PRODUCT(sum, a, b) __builtin_fma(a, b, sum)
#else
#define ADD_PRODUCT(sum, a, b) ((sum) + (a) * (b))
#endif

/* The kernels of `rows` rows with one panel of vectors, of distances (RBF) or of products. Rows and which of both are known when it is
 * compiled: a test in the inner loop would keep the sums out of the registers. */
INLINE void kernel_panel(const Vectors *p, const double *x, const double *panel, int rows, int distances, double *out, int64_t apart) {
    double acc[VECTOR_ROWS][VECTOR_LANES] = {{0}};
    for (int64_t f = 0; f < p->features; f++, panel += VECTOR_LANES)
        UNROLL for (int r = 0; r < rows; r++) {
            double v = x[r * p->features + f];
            if (distances)
                IVDEP for (int j = 0; j < VECTOR_LANES; j++) acc[r][j] = ADD_PRODUCT(acc[r][j], v - panel[j], v - panel[j]);
            else
                IVDEP for (int j = 0; j < VECTOR_LANES; j++) acc[r][j] = ADD_PRODUCT(acc[r][j], v, panel[j]);
        }
    for (int r = 0; r < rows; r++) {
        double *to = out + r * apart, whole = floor(p->degree);
        if (p->kind == 0)
            IVDEP for (int j = 0; j < VECTOR_LANES; j++) to[j] = acc[r][j];
        else if (p->kind == 1)
            IVDEP for (int j = 0; j < VECTOR_LANES; j++) to[j] = exp_lane(-p->gamma * acc[r][j]);
        else if (p->kind == 3)
            IVDEP for (int j = 0; j < VECTOR_LANES; j++) to[j] = tanh_lane(p->gamma * acc[r][j] + p->bias);
        else {
            IVDEP for (int j = 0; j < VECTOR_LANES; j++) to[j] = p->gamma * acc[r][j] + p->bias;
            if (whole == p->degree && whole >= 0 && whole <= 64)
                whole_power(to, (int64_t)whole);
            else
                for (int j = 0; j < VECTOR_LANES; j++) to[j] = pow(to[j], p->degree);
        }
    }
}

INLINE void kernels_of_panel(const Vectors *p, const double *x, const double *panel, int64_t rows, int distances, double *out,
                             int64_t apart) {
    if (rows == VECTOR_ROWS)
        kernel_panel(p, x, panel, VECTOR_ROWS, distances, out, apart);
    else
        for (int64_t r = 0; r < rows; r++) kernel_panel(p, x + r * p->features, panel, 1, distances, out + r * apart, apart);
}

static void kernels_of_rows(const Vectors *p, const double *x, int64_t rows, double *out, int64_t apart) {
    const double *panel = PTR(const double, p->panels);
    for (int64_t first = 0; first < apart; first += VECTOR_LANES, panel += VECTOR_LANES * p->features)
        if (p->kind == 1)
            kernels_of_panel(p, x, panel, rows, 1, out + first, apart);
        else
            kernels_of_panel(p, x, panel, rows, 0, out + first, apart);
}

static double weighted_sum(const double *x, const double *w, int64_t n) {
    double t[8] = {0}, rest = 0;
    int64_t at = 0;
    for (; at + 8 <= n; at += 8)
        for (int j = 0; j < 8; j++) t[j] += x[at + j] * w[at + j];
    for (; at < n; at++) rest += x[at] * w[at];
    return ((t[0] + t[4]) + (t[1] + t[5])) + ((t[2] + t[6]) + (t[3] + t[7])) + rest;
}

/* Probabilities of classes from those of pairs, r[i][j] that of i against j: the second method of Wu, Lin & Weng (2004), by the iteration
 * of LIBSVM. q and qp are memory of classes * classes and of classes numbers. */
static void coupled(const double *r, int64_t n, double *q, double *qp, double *p) {
    for (int64_t i = 0; i < n; i++) {
        double own = 0;
        for (int64_t j = 0; j < n; j++) {
            if (j == i) continue;
            q[i * n + j] = -r[i * n + j] * r[j * n + i];
            own += r[j * n + i] * r[j * n + i];
        }
        q[i * n + i] = own;
        p[i] = 1.0 / (double)n;
    }
    for (int64_t round = 0; round < (n > 100 ? n : 100); round++) {
        double pqp = 0, most = 0;
        for (int64_t i = 0; i < n; i++) {
            qp[i] = 0;
            for (int64_t j = 0; j < n; j++) qp[i] += q[i * n + j] * p[j];
            pqp += p[i] * qp[i];
        }
        for (int64_t i = 0; i < n; i++) most = fmax(most, fabs(qp[i] - pqp));
        if (!(most >= 0.005 / (double)n)) return;
        for (int64_t t = 0; t < n; t++) {
            double step = (pqp - qp[t]) / q[t * n + t], all = 1 + step;
            p[t] += step;
            pqp = (pqp + step * (step * q[t * n + t] + 2 * qp[t])) / (all * all);
            for (int64_t j = 0; j < n; j++) {
                qp[j] = (qp[j] + step * q[t * n + j]) / all;
                p[j] /= all;
            }
        }
    }
}

/* The scores of the pairs of classes of one row, the pairs that each class wins, and the probabilities if they are asked for. `room` has
 * (2 * classes + 1) * classes numbers. */
static void pairs_of_row(const Vectors *p, int64_t row, double *room) {
    int64_t n = p->classes, pair = 0, *wins = PTR(int64_t, p->wins) + row * n;
    const double *sums = PTR(const double, p->out) + row * n * p->sums, *rho = PTR(const double, p->rho);
    const double *a = PTR(const double, p->a), *b = PTR(const double, p->b);
    double *scores = PTR(double, p->scores) + row * (n * (n - 1) / 2);
    for (int64_t i = 0; i < n; i++) wins[i] = 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = i + 1; j < n; j++, pair++) {
            double score = scores[pair] = sums[i * p->sums + j - 1] + sums[j * p->sums + i] + rho[pair];
            wins[score > 0 ? i : j]++;
            if (!p->shares) continue;
            double of = 1 / (1 + exp(score * a[pair] + b[pair]));
            of = of < 1e-7 ? 1e-7 : of > 1 - 1e-7 ? 1 - 1e-7 : of;
            room[i * n + j] = of, room[j * n + i] = 1 - of;
        }
    if (p->shares) coupled(room, n, room + n * n, room + 2 * n * n, PTR(double, p->shares) + row * n);
}

static void vectors_range(void *ctx, int64_t begin, int64_t end) {
    Vectors *p = ctx;
    int64_t apart = up_div(p->count, VECTOR_LANES) * VECTOR_LANES, n = p->classes;
    double *kernel = scratch(sizeof(double) * (size_t)(VECTOR_ROWS * apart + (2 * n + 1) * n));
    if (!kernel) {
        p->failed = 1;
        return;
    }
    const double *weights = PTR(const double, p->weights);
    const int64_t *starts = PTR(const int64_t, p->starts);
    for (int64_t first = begin; first < end; first += VECTOR_ROWS) {
        int64_t rows = at_most(VECTOR_ROWS, end - first);
        kernels_of_rows(p, PTR(const double, p->x) + first * p->features, rows, kernel, apart);
        for (int64_t r = 0; r < rows; r++) {
            double *out = PTR(double, p->out) + (first + r) * n * p->sums;
            for (int64_t c = 0; c < n; c++)
                for (int64_t s = 0; s < p->sums; s++)
                    *out++ = weighted_sum(kernel + r * apart + starts[c], weights + s * p->count + starts[c], starts[c + 1] - starts[c]);
            if (p->rho) pairs_of_row(p, first + r, kernel + VECTOR_ROWS * apart);
        }
    }
}

static void vectors(const int64_t *w, Team *team) {
    Vectors p = {w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], as_double(w[10]), as_double(w[11]), as_double(w[12]),
                 w[13], w[14], w[15], w[16], w[17], w[18], w[19], 0};
    double ns = (double)p.count * ((double)p.features * 0.15 + 2.0 + (double)p.sums * 0.2);
    parallel_for(team, p.rows, up_div(grain_of(ns), VECTOR_ROWS) * VECTOR_ROWS, vectors_range, &p);
    if (p.failed) team->error = "no memory for support vectors";
}
