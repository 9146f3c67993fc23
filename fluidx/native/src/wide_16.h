/* 16-bit floats widened to float32 while they are copied, for the tiles of float32 or, at level base, for a BLAS. Parts along k are those
 * of `product`, and so are the sums. */

enum { PACKED_16 = 4, KEYS_16 = 1 };
INLINE void begin_16(void) {}
INLINE void end_16(void) {}

/* op(X) from [row][column] on, `lines` lines of n elements as they stand in memory */
static void widen_16(const Side16 *x, int64_t row, int64_t column, int64_t lines, int64_t n, float *to, int64_t apart) {
    for (int64_t i = 0; i < lines; i++, to += apart) line_as_f32(to, x->turned ? at_16(x, row, column + i) : at_16(x, row + i, column), x->is, n);
}

#if HAVE_FMA

enum { PANEL_16 = PANEL_WIDTH_f32, BLOCK_16 = 2 << 20 };

INLINE int64_t part_16(int64_t k) {
    int64_t parts = (k + PRODUCT_DEPTH - 1) / PRODUCT_DEPTH;
    return parts ? ((k + parts - 1) / parts + 3) / 4 * 4 : 1;
}
INLINE int64_t deep_16(int64_t k) { return DEPTH_16 / part_16(k) * part_16(k); }

/* Each part of so many rows passes over the panels of a part of B; sums that need no further part stay in the first-level cache. */
INLINE int64_t most_rows_16(int64_t k, int64_t turned) { return (k > PRODUCT_DEPTH ? 16 : turned ? TILE_GROUP : 1) * TILE_ROWS; }
/* Bytes of room for rows of A: some tiles of a part */
INLINE int64_t rows_room_16(int64_t rows, int64_t most) { return (void)rows, (void)most, TILE_GROUP * TILE_PITCH * (PRODUCT_DEPTH + 32) * PACKED_16; }

/* Panels of each part along k, for the parts one behind the other. A block along k begins a part. */
static void pack_b_16(const Side16 *b, int64_t all, int64_t k0, int64_t k, int64_t j, int64_t n, char *room) {
    float *to = (float *)room, turned[PANEL_16 * (PRODUCT_DEPTH + 4)];
    int64_t part = part_16(all), whole = n / PANEL_16, rest = n % PANEL_16;
    for (int64_t p = 0, deep; p < k; p += deep, to += deep * up_to_16(n, PANEL_16)) {
        deep = k - p < part ? k - p : part;
        for (int64_t c = 0; c < n && b->turned; c += PANEL_16) {
            int64_t some = n - c < PANEL_16 ? n - c : PANEL_16;
            widen_16(b, k0 + p, j + c, some, deep, turned, deep);
            pack_columns_f32(turned, deep, deep, some, to + c * deep);
        }
        for (int64_t q = 0; q < deep && !b->turned; q++) {
            const char *from = at_16(b, k0 + p + q, j);
            float *at = to + q * PANEL_16;
            for (int64_t c = 0; c < whole; c++, from += PANEL_16 * bytes_16(b->is), at += deep * PANEL_16) line_as_f32(at, from, b->is, PANEL_16);
            line_as_f32(at, from, b->is, rest);
        }
    }
}

/* Rows of A from [row][column] on against panels of B, a tile after the other: `panels` of a part */
static void tiles_of_16(const Side16 *a, int64_t row, int64_t column, int64_t rows, int64_t n, int64_t k, float *room, const float *panels,
                        float *sums, int64_t ld, int more) {
    int64_t tiles = (rows - 1) / TILE_ROWS + 1, group = a->turned ? TILE_GROUP : 1, apart = a->turned ? TILE_PITCH : up_to_16(k, 16) + 16;
    int64_t size = bytes_16(a->is), tile = a->turned ? k * TILE_PITCH : TILE_ROWS * apart;
    Finish end = {.alpha = 1, .beta = more};
    for (int64_t t = 0, done = 0, some; t < tiles; t++, done += some) {
        some = rows / tiles + (t < rows % tiles);
        if (t % group == 0 && !a->turned) widen_16(a, row + done, column, some, k, room, apart);
        for (int64_t p = 0; p < k && t % group == 0 && a->turned; p++) {
            const char *from = at_16(a, row + done, column + p);
            float *to = room + p * TILE_PITCH;
            __builtin_prefetch(from + 8 * a->ld * size);
            __builtin_prefetch(from + 8 * a->ld * size + 64);
            for (int64_t g = t, at = done, of; g < t + group && g < tiles; g++, at += of, from += of * size, to += tile) {
                of = rows / tiles + (g < rows % tiles);
                if (rows - at < TILE_PITCH) /* twice, because a loop of a length that is known has no end of its own */
                    line_as_f32(to, from, a->is, rows - at);
                else
                    line_as_f32(to, from, a->is, TILE_PITCH);
            }
        }
        Fetch behind = {.at = NULL};
        if (!a->turned && t + 1 < tiles) behind = (Fetch){at_16(a, row + done + some, column), k * size, a->ld * size, TILE_ROWS};
        block_f32(a->turned, some, n, k, room + t % group * tile, apart, panels, PANEL_16, k * PANEL_16, sums + done * ld, ld, &end, NULL, behind);
    }
}

static void rows_16(int64_t all, const Side16 *a, int64_t i, int64_t rows, int64_t k0, int64_t k, char *room, const char *b, int64_t n,
                    float *sums, int64_t ld, int more) {
    int64_t part = part_16(all);
    const float *panels = (const float *)b;
    for (int64_t p = 0, deep; p < k || !p; p += deep, panels += deep * up_to_16(n, PANEL_16)) {
        deep = k - p < part ? k - p : part;
        tiles_of_16(a, i, k0 + p, rows, n, deep, (float *)room, panels, sums, ld, more || p);
        if (!k) return;
    }
}

#else

enum { PANEL_16 = 16, ROWS_16 = 120, BLOCK_16 = 512 << 10 };
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

static Rows16 pack_a_16(const Side16 *a, int64_t i, int64_t rows, int64_t k0, int64_t k, char *room) {
    if (a->turned) {
        widen_16(a, i, k0, k, rows, (float *)room, rows);
        return (Rows16){room, rows, 1};
    }
    widen_16(a, i, k0, rows, k, (float *)room, k);
    return (Rows16){room, k, 0};
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
