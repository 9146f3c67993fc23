/* One reduction of several arrays into each of several others, in the order of the arrays: what ranks that are threads do for one another.
 * Blocks are read from all before they are written to any, so a result may take the place of a term. */

enum { COMBINE_BLOCK = 2048 };
enum { COMBINE_SUM, COMBINE_AVG, COMBINE_MAX, COMBINE_MIN };

/* Words: how, elements, terms, results, and the addresses of the terms and of the results. */
#define COMBINE(NAME, T)                                                                                   \
    static void NAME(const int64_t *a, Team *team) {                                                       \
        (void)team;                                                                                        \
        T sum[COMBINE_BLOCK];                                                                              \
        const int64_t *ins = a + 4, *outs = ins + a[2];                                                    \
        for (int64_t at = 0; at < a[1]; at += COMBINE_BLOCK) {                                             \
            int64_t n = a[1] - at < COMBINE_BLOCK ? a[1] - at : COMBINE_BLOCK;                             \
            memcpy(sum, PTR(T, ins[0]) + at, (size_t)n * sizeof(T));                                       \
            for (int64_t k = 1; k < a[2]; k++) {                                                           \
                const T *x = PTR(T, ins[k]) + at;                                                          \
                if (a[0] == COMBINE_MAX) /* a NaN wins, as in NumPy */                                     \
                    for (int64_t i = 0; i < n; i++) sum[i] = sum[i] >= x[i] || sum[i] != sum[i] ? sum[i] : x[i]; \
                else if (a[0] == COMBINE_MIN)                                                              \
                    for (int64_t i = 0; i < n; i++) sum[i] = sum[i] <= x[i] || sum[i] != sum[i] ? sum[i] : x[i]; \
                else                                                                                       \
                    for (int64_t i = 0; i < n; i++) sum[i] += x[i];                                        \
            }                                                                                              \
            if (a[0] == COMBINE_AVG)                                                                       \
                for (int64_t i = 0; i < n; i++) sum[i] /= (T)a[2];                                         \
            for (int64_t k = 0; k < a[3]; k++) memcpy(PTR(T, outs[k]) + at, sum, (size_t)n * sizeof(T));   \
        }                                                                                                  \
    }

COMBINE(combine_f32, float)
COMBINE(combine_f64, double)
