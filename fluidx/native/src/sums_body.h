/* Sums over rows of one type T: the same order of additions for every level of instructions and every number of threads.
 *
 * Up to SUM_BLOCK elements are added in LANES columns, eight rows at a time as a tree, and the columns then by halves: some 13 roundings
 * lie on the longest path, fewer than in NumPy's pairwise sums. Blocks are added up in float64. */

/* A function NAME(arguments, n): the sum of E(i) for i below n. E is a macro over the arguments. */
#define SUM(NAME, ARGUMENTS, E)                                                                                                        \
    static double NAME(ARGUMENTS, int64_t n) {                                                                                          \
        double total = 0;                                                                                                               \
        int64_t at = 0;                                                                                                                 \
        do {                                                                                                                            \
            T t[LANES] = {0};                                                                                                           \
            int64_t end = n - at < SUM_BLOCK ? n : at + SUM_BLOCK;                                                                      \
            for (; at + 8 * LANES <= end; at += 8 * LANES)                                                                              \
                IVDEP for (int64_t i = at; i < at + LANES; i++)                                                                         \
                    t[i - at] += ((E(i) + E(i + LANES)) + (E(i + 2 * LANES) + E(i + 3 * LANES))) +                                      \
                                 ((E(i + 4 * LANES) + E(i + 5 * LANES)) + (E(i + 6 * LANES) + E(i + 7 * LANES)));                       \
            if (at + 4 * LANES <= end) {                                                                                                \
                IVDEP for (int64_t i = at; i < at + LANES; i++)                                                                         \
                    t[i - at] += (E(i) + E(i + LANES)) + (E(i + 2 * LANES) + E(i + 3 * LANES));                                         \
                at += 4 * LANES;                                                                                                        \
            }                                                                                                                           \
            if (at + 2 * LANES <= end) {                                                                                                \
                IVDEP for (int64_t i = at; i < at + LANES; i++) t[i - at] += E(i) + E(i + LANES);                                       \
                at += 2 * LANES;                                                                                                        \
            }                                                                                                                           \
            if (at + LANES <= end) {                                                                                                    \
                IVDEP for (int64_t i = at; i < at + LANES; i++) t[i - at] += E(i);                                                      \
                at += LANES;                                                                                                            \
            }                                                                                                                           \
            for (int64_t i = at; i < end; i++) t[i - at] += E(i);                                                                       \
            at = end;                                                                                                                   \
            total += FN(halved)(t);                                                                                                     \
        } while (at < n);                                                                                                               \
        return total;                                                                                                                   \
    }

INLINE T FN(halved)(T *t) {
    for (int j = 0; j < 32; j++) t[j] += t[j + 32];
    for (int j = 0; j < 16; j++) t[j] += t[j + 16];
    for (int j = 0; j < 8; j++) t[j] += t[j + 8];
    for (int j = 0; j < 4; j++) t[j] += t[j + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

/* Several arguments of a function as one of a macro */
#define LIST(...) __VA_ARGS__

#define E(i) x[i]
SUM(FN(sum), LIST(const T *x), E)
#undef E
#define E(i) (x[i] * x[i])
SUM(FN(sum_of_squares), LIST(const T *x), E)
#undef E
#define E(i) (x[i] * y[i])
SUM(FN(dot), LIST(const T *x, const T *y), E)
#undef E
#define E(i) ((x[i] - m) * (x[i] - m))
SUM(FN(sum_of_deviations), LIST(const T *x, T m), E)
#undef E
#define E(i) (d[i] != 0 ? d[i] * (log_of_sum - (x[i] - m)) : 0)
SUM(FN(expected_loss), LIST(const T *x, const T *d, T m, T log_of_sum), E)
#undef E
#define E(i) (g[i] * s[i])
#define H(i) (g[i] * s[i] * ((x[i] - m) * inv))
SUM(FN(sum_of_scaled), LIST(const T *g, const T *s), E)
SUM(FN(dot_scaled), LIST(const T *g, const T *s, const T *x, T m, T inv), H)
#undef E
#undef H
#define E(i) (g[i] * ((x[i] - m) * inv))
SUM(FN(dot_normal), LIST(const T *g, const T *x, T m, T inv), E)
#undef E
#undef SUM
#undef LIST

/* The largest element; NaN wins, and of nothing -infinity. */
static T FN(largest)(const T *x, int64_t n) {
    T t[LANES], top = -(T)INFINITY;
    int64_t at = 0;
    if (n >= LANES) {
        for (int j = 0; j < LANES; j++) t[j] = x[j];
        for (at = LANES; at + LANES <= n; at += LANES)
            IVDEP for (int64_t j = 0; j < LANES; j++) {
                T v = x[at + j];
                t[j] = ((v > t[j]) | (v != v)) ? v : t[j];
            }
        for (int half = LANES / 2; half > 8; half /= 2)
            IVDEP for (int j = 0; j < half; j++) t[j] = ((t[j + half] > t[j]) | (t[j + half] != t[j + half])) ? t[j + half] : t[j];
        for (int j = 0; j < 16; j++) top = t[j] > top || t[j] != t[j] ? t[j] : top;
    }
    for (; at < n; at++) top = x[at] > top || x[at] != x[at] ? x[at] : top;
    return top;
}
