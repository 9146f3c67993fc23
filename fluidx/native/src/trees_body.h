/* Forests over rows of one type T: included with T, FN(name). */

/* Mode -1 is a leaf: `yes` is its first entry and `no` the number of entries. Other modes compare a feature with `split`: <= < >= > == !=.
 * If `missing` is set, NaN takes the branch `yes`. */
typedef struct {
    T split;
    int32_t yes, no, feature;
    int8_t mode, missing;
} FN(TreeNode);

INLINE const FN(TreeNode) *FN(leaf)(const FN(TreeNode) *nodes, int32_t root, const T *x) {
    const FN(TreeNode) *node = nodes + root;
    while (node->mode >= 0) {
        T v = x[node->feature], s = node->split;
        int yes = 0;
        switch (node->mode) {
        case 0: yes = v <= s; break;
        case 1: yes = v < s; break;
        case 2: yes = v >= s; break;
        case 3: yes = v > s; break;
        case 4: yes = v == s; break;
        case 5: yes = v != s; break;
        }
        yes |= node->missing & (v != v);
        node = nodes + (yes ? node->yes : node->no);
    }
    return node;
}

static void FN(trees_range)(void *ctx, int64_t begin, int64_t end) {
    const Forest *p = ctx;
    const FN(TreeNode) *nodes = PTR(const FN(TreeNode), p->nodes);
    const int32_t *roots = PTR(const int32_t, p->roots), *target = PTR(const int32_t, p->target);
    const double *weight = PTR(const double, p->weight);
    double start = p->how == 1 ? INFINITY : p->how == 2 ? -INFINITY : 0;
    for (int64_t first = begin; first < end; first += 64) { /* a tree stays in the cache while so many rows are evaluated on it */
        int64_t last = end - first < 64 ? end : first + 64;
        double *out = PTR(double, p->out);
        for (int64_t i = first * p->targets; i < last * p->targets; i++) out[i] = start;
        for (int64_t tree = 0; tree < p->trees; tree++)
            for (int64_t r = first; r < last; r++) {
                const FN(TreeNode) *leaf = FN(leaf)(nodes, roots[tree], PTR(const T, p->x) + r * p->columns);
                for (int32_t e = leaf->yes; e < leaf->yes + leaf->no; e++) {
                    double *to = out + r * p->targets + target[e];
                    *to = one_of(*to, weight[e], p->how);
                }
            }
        for (int64_t i = first * p->targets; p->how && i < last * p->targets; i++)
            if (isinf(out[i])) out[i] = 0;
    }
}

static void FN(trees)(const int64_t *a, Team *team) {
    Forest p = {a[0], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10]};
    parallel_for(team, a[1], grain_of((double)p.trees * 20), FN(trees_range), &p);
}
