/* 16-bit floats widened to float32 while they are copied, for the tiles of float32 or, at level base, for a BLAS. Parts along k are those
 * of `product`, and so are the sums. */

enum { PACKED_16 = 4, KEYS_16 = 1 };
INLINE void begin_16(void) {}
INLINE void end_16(void) {}

/* op(X) from [row][column] on, `lines` lines of n elements as they stand in memory */
static void widen_16(const Side16 *x, int64_t row, int64_t column, int64_t lines, int64_t n, float *to, int64_t apart) {
    for (int64_t i = 0; i < lines; i++, to += apart) line_as_f32(to, x->turned ? at_16(x, row, column + i) : at_16(x, row + i, column), x->is, n);
}

static Rows16 pack_a_16(const Side16 *a, int64_t i, int64_t rows, int64_t k0, int64_t k, char *room) {
    if (a->turned) {
        widen_16(a, i, k0, k, rows, (float *)room, rows);
        return (Rows16){room, rows, 1};
    }
    widen_16(a, i, k0, rows, k, (float *)room, k);
    return (Rows16){room, k, 0};
}

#if HAVE_FMA

enum { PANEL_16 = PANEL_WIDTH_f32, ROWS_16 = 4 * TILE_ROWS };

INLINE int64_t part_16(int64_t k) {
    int64_t parts = (k + PRODUCT_DEPTH - 1) / PRODUCT_DEPTH;
    return parts ? ((k + parts - 1) / parts + 3) / 4 * 4 : 1;
}
INLINE int64_t deep_16(int64_t k) { return DEPTH_16 / part_16(k) * part_16(k); }

/* Panels of each part along k, for the parts one behind the other. A block along k begins a part. */
static void pack_b_16(const Side16 *b, int64_t all, int64_t k0, int64_t k, int64_t j, int64_t n, char *room) {
    float *to = (float *)room;
    int64_t part = part_16(all);
    for (int64_t p = 0, deep; p < k; p += deep, to += deep * up_to_16(n, PANEL_16)) {
        deep = k - p < part ? k - p : part;
        for (int64_t c = 0; c < n; c += PANEL_16) {
            int64_t some = n - c < PANEL_16 ? n - c : PANEL_16;
            float *panel = to + c * deep, turned[PANEL_16 * (PRODUCT_DEPTH + 4)];
            if (b->turned) {
                widen_16(b, k0 + p, j + c, some, deep, turned, deep);
                pack_columns_f32(turned, deep, deep, some, panel);
            } else if (some == PANEL_16) {
                widen_16(b, k0 + p, j + c, deep, PANEL_16, panel, PANEL_16);
            } else {
                widen_16(b, k0 + p, j + c, deep, some, panel, PANEL_16);
            }
        }
    }
}

/* Rows of A against panels of B; `more`: on top of the sums that are there */
static void times_16(int64_t all, int64_t rows, int64_t n, int64_t k, Rows16 a, const char *b, float *sums, int64_t ld, int more) {
    int64_t part = part_16(all);
    const float *panels = (const float *)b;
    for (int64_t p = 0, deep; p < k || !p; p += deep, panels += deep * up_to_16(n, PANEL_16)) {
        deep = k - p < part ? k - p : part;
        Finish end = {.alpha = 1, .beta = more || p ? 1 : 0};
        block_f32(a.across, rows, n, deep, (const float *)a.at + (a.across ? p * a.apart : p), a.apart, panels, PANEL_16, deep * PANEL_16, sums, ld,
                  &end, NULL, (Fetch){.at = NULL});
        if (!k) return;
    }
}

#else

enum { PANEL_16 = 16, ROWS_16 = 120 };
INLINE int64_t deep_16(int64_t k) { return (void)k, DEPTH_16; }

/* Rows of B, as many columns apart as panels have */
static void pack_b_16(const Side16 *b, int64_t all, int64_t k0, int64_t k, int64_t j, int64_t n, char *room) {
    (void)all;
    float *to = (float *)room, column[DEPTH_16];
    int64_t wide = up_to_16(n, PANEL_16);
    if (!b->turned) widen_16(b, k0, j, k, n, to, wide);
    for (int64_t c = 0; c < n && b->turned; c++) {
        widen_16(b, k0, j + c, 1, k, column, k);
        for (int64_t p = 0; p < k; p++) to[p * wide + c] = column[p];
    }
}

static void times_16(int64_t all, int64_t rows, int64_t n, int64_t k, Rows16 a, const char *b, float *sums, int64_t ld, int more) {
    (void)all;
    if (!k) { /* a BLAS has no lines that are 0 apart */
        for (int64_t r = 0; r < rows; r++) memset(sums + r * ld, 0, (size_t)n * sizeof *sums);
        return;
    }
    blas_f32(101, a.across ? 112 : 111, 111, rows, n, k, 1, (const float *)a.at, a.apart, (const float *)b, up_to_16(n, PANEL_16),
             more ? 1 : 0, sums, ld);
}

#endif
