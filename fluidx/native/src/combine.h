/* The work of collective calls of ranks that share memory: reductions of all members' arrays in rank order, and copies between them.
 * A block is read from all arrays before it is written to any, so a result may overwrite a term. */
#include "meet.h"

enum { COMBINE_BLOCK = 2048 };
enum { COMBINE_SUM, COMBINE_AVG, COMBINE_MAX, COMBINE_MIN, COMBINE_PROD };

/* Add one more term, into two places: the block of the partial sum, or the first two results, which saves a pass over them. */
#define COMBINE_TERM(T, EXPRESSION)                                                                                                     \
    IVDEP for (int64_t i = 0; i < n; i++) {                                                                                             \
        T a = left[i], b = x[i];                                                                                                        \
        to[i] = also[i] = EXPRESSION;                                                                                                   \
    }                                                                                                                                   \
    break

/* A NaN wins over numbers, as in NumPy. */
#define COMBINE(NAME, T)                                                                                                                \
    static void NAME(int64_t how, int64_t size, int64_t terms, char *const *ins, int64_t results, char *const *outs) {                  \
        T sum[COMBINE_BLOCK];                                                                                                           \
        for (int64_t at = 0; at < size; at += COMBINE_BLOCK) {                                                                          \
            int64_t n = size - at < COMBINE_BLOCK ? size - at : COMBINE_BLOCK;                                                          \
            const T *left = (const T *)ins[0] + at;                                                                                     \
            T *first = (T *)outs[0] + at;                                                                                               \
            if (terms == 1) memmove(first, left, (size_t)n * sizeof(T));                                                                \
            for (int64_t k = 1; k < terms; k++) {                                                                                       \
                const T *x = (const T *)ins[k] + at;                                                                                    \
                int last = k == terms - 1;                                                                                              \
                T *to = last ? first : sum, *also = last && results > 1 ? (T *)outs[1] + at : to;                                       \
                switch (last || how != COMBINE_AVG ? how : COMBINE_SUM) {                                                               \
                case COMBINE_MAX: COMBINE_TERM(T, a >= b || a != a ? a : b);                                                            \
                case COMBINE_MIN: COMBINE_TERM(T, a <= b || a != a ? a : b);                                                            \
                case COMBINE_PROD: COMBINE_TERM(T, a * b);                                                                              \
                case COMBINE_AVG: COMBINE_TERM(T, (a + b) / (T)terms);                                                                  \
                default: COMBINE_TERM(T, a + b);                                                                                        \
                }                                                                                                                       \
                left = sum;                                                                                                             \
            }                                                                                                                           \
            for (int64_t k = terms == 1 ? 1 : 2; k < results; k++) memcpy((T *)outs[k] + at, first, (size_t)n * sizeof(T));             \
        }                                                                                                                               \
    }
COMBINE(combine_f32, float)
COMBINE(combine_f64, double)
#undef COMBINE
#undef COMBINE_TERM

static void combine(const int64_t *a, int64_t size, int64_t terms, char *const *ins, int64_t results, char *const *outs) {
    (a[MEET_ITEM] == 4 ? combine_f32 : combine_f64)(a[MEET_HOW], size, terms, ins, results, outs);
}

/* -- arrays of any strides ---------------------------------------------------------------------------------------------------------- */

static const int64_t *given(const int64_t *a, int64_t k) { return a + a[MEET_ARRAYS + k]; }
static const int64_t *taken(const int64_t *a, int64_t k) { return given(a, (a[MEET_GIVES] < 0 ? 1 : a[MEET_GIVES]) + k); }

/* Walks over arrays of one shape, stretch by stretch. A stretch is contiguous in all of them. */
typedef struct {
    const int64_t *arrays[MOST_RANKS + 1];
    char *at[MOST_RANKS + 1];
    int64_t count, axes, bytes, index[64]; /* of the axes in front of a stretch, and of a stretch */
} Walk;

static int walk_begin(Walk *w, int64_t item) {
    const int64_t *shape = w->arrays[0] + ARRAY_SIZES;
    int64_t axes = w->arrays[0][ARRAY_AXES];
    for (int64_t d = 0; d < axes; d++)
        if (!shape[d]) return 0;
    w->axes = axes, w->bytes = item;
    for (; w->axes; w->bytes *= shape[--w->axes]) {
        int64_t d = w->axes - 1, k = 0;
        while (k < w->count && (shape[d] == 1 || w->arrays[k][ARRAY_SIZES + axes + d] == w->bytes)) k++;
        if (k < w->count) break;
    }
    for (int64_t k = 0; k < w->count; k++) w->at[k] = PTR(char, w->arrays[k][ARRAY_AT]);
    memset(w->index, 0, sizeof w->index);
    return 1;
}

static int walk_on(Walk *w) {
    const int64_t *shape = w->arrays[0] + ARRAY_SIZES;
    for (int64_t d = w->axes - 1; d >= 0; d--) {
        int64_t steps = ++w->index[d] < shape[d] ? 1 : 1 - shape[d];
        for (int64_t k = 0; k < w->count; k++) w->at[k] += steps * w->arrays[k][ARRAY_SIZES + w->arrays[k][ARRAY_AXES] + d];
        if (steps == 1) return 1;
        w->index[d] = 0;
    }
    return 0;
}

/* -- the work of a collective call -------------------------------------------------------------------------------------------------- */

enum { WORK_NONE, WORK_BROADCAST, WORK_REDUCE, WORK_MOVE, WORK_SCATTER };

/* Every member reduces a range of the elements for all receivers, so that a root is no bottleneck. Ranges begin on cache lines. */
static void reduce_share(const int64_t *const *words, int64_t n, int64_t first, int64_t end) {
    const int64_t *a = words[0];
    int64_t size = a[MEET_SIZE], item = a[MEET_ITEM], root = a[MEET_ROOT];
    int64_t from = size * first / n / 16 * 16, to = end == n ? size : size * end / n / 16 * 16;
    char *ins[MOST_RANKS], *outs[MOST_RANKS];
    for (int64_t k = 0; k < n; k++) {
        ins[k] = PTR(char, given(words[k], 0)[ARRAY_AT]) + from * item;
        outs[k] = PTR(char, taken(words[k], 0)[ARRAY_AT]) + from * item;
    }
    if (root >= 0)
        combine(a, to - from, n, ins, 1, outs + root);
    else
        combine(a, to - from, n, ins, n, outs);
}

static void broadcast_share(const int64_t *const *words, int64_t first, int64_t end) {
    const int64_t *a = words[0], *x = given(words[a[MEET_ROOT]], 0);
    for (int64_t k = first; k < end; k++) {
        const int64_t *out = taken(words[k], 0);
        if (out[ARRAY_AT] != x[ARRAY_AT]) memcpy(PTR(char, out[ARRAY_AT]), PTR(char, x[ARRAY_AT]), (size_t)(a[MEET_SIZE] * a[MEET_ITEM]));
    }
}

static void move_share(const int64_t *const *words, int64_t n, int64_t first, int64_t end) {
    Walk w;
    w.count = 2;
    for (int64_t k = first; k < end; k++) {
        for (int64_t j = 0; j < n; j++) {
            w.arrays[0] = taken(words[k], j), w.arrays[1] = given(words[j], k);
            if (w.arrays[0][ARRAY_AT] == w.arrays[1][ARRAY_AT] || !walk_begin(&w, words[0][MEET_ITEM])) continue;
            do memcpy(w.at[0], w.at[1], (size_t)w.bytes);
            while (walk_on(&w));
        }
    }
}

static void scatter_share(const int64_t *const *words, int64_t n, int64_t first, int64_t end) {
    Walk w;
    w.count = n + 1;
    for (int64_t k = first; k < end; k++) {
        w.arrays[n] = taken(words[k], 0);
        for (int64_t j = 0; j < n; j++) w.arrays[j] = given(words[j], k);
        if (!walk_begin(&w, words[0][MEET_ITEM])) continue;
        do combine(words[0], w.bytes / words[0][MEET_ITEM], n, w.at, 1, w.at + n);
        while (walk_on(&w));
    }
}

static void share(const int64_t *const *words, int64_t n, int64_t first, int64_t end) {
    switch (words[0][MEET_WORK]) {
    case WORK_BROADCAST: broadcast_share(words, first, end); break;
    case WORK_REDUCE: reduce_share(words, n, first, end); break;
    case WORK_MOVE: move_share(words, n, first, end); break;
    case WORK_SCATTER: scatter_share(words, n, first, end); break;
    }
}

static void meet(const int64_t *a, Team *team) { meet_others(a, a[MEET_WORK] == WORK_NONE ? NULL : share, team); }
static void meet_at(const int64_t *a, Team *team) { meet(PTR(const int64_t, a[0]), team); }
static void exchange(const int64_t *a, Team *team) { exchange_mail(a, team); }
static void reach(const int64_t *a, Team *team) { reach_pace(a), (void)team; }
static void await(const int64_t *a, Team *team) { await_pace(a, team); }
