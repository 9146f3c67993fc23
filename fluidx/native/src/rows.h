/* Kernels that work on rows: softmax, its logarithm and losses, layer_norm, rms_norm, and their gradients.
 *
 * words of those along an axis: up to 3 operands of [outer, columns, inner] elements (addresses, 0 for none), the address of what has one
 * element in a row, of integer labels or 0, bytes of a label, the label to ignore, outer, columns, inner, the address of an error's text,
 * which class the first column is, and the number of classes: columns may be a part of them; and the formats of the three operands and of
 * what has one element in a row (halves.h). A row that is not contiguous, or has 16-bit elements, is copied to scratch first. */

typedef struct {
    int64_t at[3], single, labels, label_bytes, ignore, columns, inner, first, classes, formats;
    int64_t failed; /* a row whose label is out of range; -1: none, -2: no memory */
} Rows;

enum { ROWS_WORDS = 14, SUM_BLOCK = 2048, LANES = 64 };

INLINE int64_t label_of(const Rows *p, int64_t r) {
    return p->label_bytes == 8 ? PTR(const int64_t, p->labels)[r] : PTR(const int32_t, p->labels)[r];
}

/* Is a label neither ignored nor one of the classes? */
INLINE int is_wrong(const Rows *p, int64_t label) { return label < 0 || label >= p->classes; }

/* The column of a label; -1: it has none here */
INLINE int64_t column_of(const Rows *p, int64_t label) {
    return label < p->first || label >= p->first + p->columns ? -1 : label - p->first;
}

/* The number of items of so many nanoseconds from which another thread pays off */
INLINE int64_t grain_of(double ns) { return (int64_t)(PARALLEL_NS / (ns + 1)) + 1; }

static void run_rows(const int64_t *a, Team *team, Body body, double ns) {
    Rows p = {{a[0], a[1], a[2]}, a[3], a[4], a[5], a[6], a[8], a[9], a[11], a[12], a[13], -1};
    if (!p.columns) return;
    parallel_for(team, a[7] * a[9], grain_of((double)p.columns * ns + 40), body, &p);
    if (p.failed == -2) team->error = "no memory for a row";
    if (p.failed < 0) return;
    for (int64_t r = 0; r < a[7] * a[9]; r++) { /* the first one, whichever thread found which */
        int64_t label = label_of(&p, r);
        if (label != p.ignore && is_wrong(&p, label)) {
            report(team, PTR(const char, a[10]), label);
            return;
        }
    }
}

#define T float
#define FN(name) name##_f32
#include "sums_body.h"
#include "rows_body.h"
#undef T
#undef FN

#define T double
#define FN(name) name##_f64
#include "sums_body.h"
#include "rows_body.h"
#undef T
#undef FN
