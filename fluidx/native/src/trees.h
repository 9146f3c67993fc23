/* Forests of decision trees: what the leaves that rows come to add up to.
 *
 * words: rows of numbers, how many, columns of one, nodes, roots (int32), trees, targets (int32) and weights (float64) of what leaves say,
 * results [rows, targets] in float64, targets, and what results are: 0 the sum of what leaves say, 1 the least, 2 the largest, or 0 where no
 * leaf says anything */

typedef struct {
    int64_t x, columns, nodes, roots, trees, target, weight, out, targets, how;
} Forest;

enum { TREES_WORDS = 11 };

INLINE double one_of(double a, double b, int64_t how) {
    if (!how) return a + b;
    return b != b || (how == 1 ? b < a : b > a) ? b : a;
}

#define T float
#define FN(name) name##_f32
#include "trees_body.h"
#undef T
#undef FN

#define T double
#define FN(name) name##_f64
#include "trees_body.h"
#undef T
#undef FN
