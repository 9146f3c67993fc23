/* Forests over rows of one type T: included with T, FN(name). */

/* Mode -1 is a leaf: `below` is its first entry and the number of entries. Other modes compare a feature with `split`, <= < >= > == !=, and
 * `below` are the nodes for yes and for no. If `missing` is set, NaN takes the branch for yes. */
typedef struct {
    T split;
    int32_t below[2], feature;
    int8_t mode, missing;
} FN(TreeNode);

enum { FN(WALKS) = 8 }; /* ways down trees that are walked at a time: they do not wait for one another's loads */

INLINE int FN(is_yes)(const FN(TreeNode) *node, T v, int mode) {
    T s = node->split;
    int yes = 0;
    switch (mode) {
    case 0: yes = v <= s; break;
    case 1: yes = v < s; break;
    case 2: yes = v >= s; break;
    case 3: yes = v > s; break;
    case 4: yes = v == s; break;
    case 5: yes = v != s; break;
    }
    return yes | (node->missing & (v != v));
}

/* Walk down from the nodes `at` to leaves, row `x[w]` on way w. `mode` is that of all inner nodes, or -1; it is known when this is compiled,
 * and then a step has no branch. */
INLINE void FN(walk)(const FN(TreeNode) *nodes, int32_t *at, const T **x, int ways, int mode) {
    for (int32_t inner = 1; inner;) {
        inner = 0;
        UNROLL for (int w = 0; w < ways; w++) {
            const FN(TreeNode) *node = nodes + at[w];
            int32_t next = node->below[!FN(is_yes)(node, x[w][node->feature], mode < 0 ? node->mode : mode)];
            int32_t go = -(int32_t)(node->mode >= 0);
            at[w] ^= (at[w] ^ next) & go;
            inner |= go;
        }
    }
}

INLINE void FN(walks)(const FN(TreeNode) *nodes, int32_t *at, const T **x, int ways, int mode) {
    if (ways == FN(WALKS) && mode == 0)
        FN(walk)(nodes, at, x, FN(WALKS), 0);
    else if (ways == FN(WALKS) && mode == 1)
        FN(walk)(nodes, at, x, FN(WALKS), 1);
    else
        FN(walk)(nodes, at, x, ways, -1);
}

/* All trees for the rows from `first` up to `last` */
static void FN(rows_of_trees)(const Forest *p, int64_t first, int64_t last) {
    const FN(TreeNode) *nodes = PTR(const FN(TreeNode), p->nodes);
    const int32_t *roots = PTR(const int32_t, p->roots), *target = PTR(const int32_t, p->target);
    const double *weight = PTR(const double, p->weight);
    int64_t rows = last - first, left = rows * p->trees, row = 0, tree = 0;
    while (left) {
        int32_t at[FN(WALKS)];
        const T *x[FN(WALKS)];
        int64_t of[FN(WALKS)];
        int ways = (int)at_most(FN(WALKS), left);
        for (int w = 0; w < ways; w++) {
            at[w] = roots[tree], of[w] = first + row;
            x[w] = PTR(const T, p->x) + of[w] * p->columns;
            if (++row == rows) row = 0, tree++;
        }
        FN(walks)(nodes, at, x, ways, (int)p->mode);
        for (int w = 0; w < ways; w++) {
            const int32_t *entries = nodes[at[w]].below;
            for (int32_t e = entries[0]; e < entries[0] + entries[1]; e++) {
                double *to = PTR(double, p->out) + of[w] * p->targets + target[e];
                *to = one_of(*to, weight[e], p->how);
            }
        }
        left -= ways;
    }
}

static void FN(trees_range)(void *ctx, int64_t begin, int64_t end) {
    const Forest *p = ctx;
    double start = p->how == 1 ? INFINITY : p->how == 2 ? -INFINITY : 0, *out = PTR(double, p->out);
    for (int64_t first = begin; first < end; first += 64) { /* a tree stays in the cache while so many rows are evaluated on it */
        int64_t last = at_most(first + 64, end);
        for (int64_t i = first * p->targets; i < last * p->targets; i++) out[i] = start;
        FN(rows_of_trees)(p, first, last);
        for (int64_t i = first * p->targets; p->how && i < last * p->targets; i++)
            if (isinf(out[i])) out[i] = 0;
    }
}

static void FN(trees)(const int64_t *a, Team *team) {
    Forest p = {a[0], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]};
    parallel_for(team, a[1], grain_of((double)p.trees * 12), FN(trees_range), &p);
}
