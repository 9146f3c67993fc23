/* Forests of decision trees: for each row, the leaf entries that it reaches, combined for each target.
 *
 * words: rows of numbers, number of rows, columns, nodes, roots (int32), trees, targets (int32) and weights (float64) of leaf entries,
 * results [rows, targets] in float64, targets, how entries are combined: 0 the sum, 1 the least, 2 the largest (a target without an entry
 * gives 0), and the mode of all inner nodes, or -1 */

typedef struct {
    int64_t x, columns, nodes, roots, trees, target, weight, out, targets, how, mode;
} Forest;

enum { TREES_WORDS = 12 };

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
