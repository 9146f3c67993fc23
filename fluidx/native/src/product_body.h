/* product.h for one type: T, FN(name), its vector V, OP(name) for intrinsics, and masks of the first lanes. */

enum { FN(LANES) = LANES_OF(T), FN(PANEL_WIDTH) = 2 * LANES_OF(T) };

typedef void (*FN(Tile))(int64_t k, const T *a, int64_t lda, const T *b, int64_t ldb, T *c, int64_t ldc, const Finish *end);

/* Steps along k for all of a tile; between some of them lines are fetched of what is read next. */
#define STEPS(LAST)                                                                                                                     \
    for (int64_t p = 0, stop; p < k;) {                                                                                                 \
        stop = next < end->next_stop && k - p > PRODUCT_STRIDE ? p + PRODUCT_STRIDE : k;                                                \
        for (int i = 0; i < PRODUCT_LINES && next < end->next_stop; i++, next += 64) __builtin_prefetch(next, 0, 2);                    \
        for (; p < stop; p++, b += ldb) {                                                                                               \
            V y[8];                                                                                                                     \
            UNROLL for (int j = 0; j < vectors - 1; j++) y[j] = OP(loadu)(b + j * lanes);                                               \
            y[vectors - 1] = LAST(b + (vectors - 1) * lanes);                                                                           \
            UNROLL for (int j = 0; j < vectors; j++) __builtin_prefetch(b + PRODUCT_AHEAD * ldb + j * lanes);                           \
            UNROLL for (int i = 0; i < rows; i++) {                                                                                     \
                V x = OP(set1)(across ? a[i] : at[i / 3][i % 3 * lda]);                                                                 \
                UNROLL for (int j = 0; j < vectors; j++) s[i][j] = OP(fmadd)(x, y[j], s[i][j]);                                         \
            }                                                                                                                           \
            if (across) {                                                                                                               \
                a += lda;                                                                                                               \
            } else {                                                                                                                    \
                UNROLL for (int i = 0; i < (rows + 2) / 3; i++) at[i]++;                                                                \
            }                                                                                                                           \
        }                                                                                                                               \
    }

/* A tile of C: `rows` by `vectors`, of which the last may be partial. Columns of A lie `lda` apart if `across`, else rows do. */
INLINE void FN(tile)(const int rows, const int vectors, const int across, int64_t k, const T *a, int64_t lda, const T *b, int64_t ldb, T *c,
                     int64_t ldc, const Finish *end) {
    enum { lanes = FN(LANES) };
    const T *at[(TILE_ROWS + 2) / 3];
    V s[TILE_ROWS][8];
    const char *next = end->next;
    MASK mask = FIRST(end->lanes);
    UNROLL for (int i = 0; i < (rows + 2) / 3; i++) at[i] = a + 3 * i * lda;
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < vectors; j++) s[i][j] = OP(setzero)();
    if (k >= PRODUCT_LONG) {
        T *to = c;
        UNROLL for (int i = 0; i < rows; i++, to += ldc) {
            __builtin_prefetch(to, 1);
            __builtin_prefetch(to + vectors * lanes - 1, 1);
        }
    }
#if HAVE_512
#define PART(p) LOAD_FIRST(p, mask)
    STEPS(PART)
#else
#define PART(p) LOAD_FIRST(p, mask)
    if (end->whole) {
        STEPS(OP(loadu))
    } else {
        STEPS(PART)
    }
#endif
#undef PART
    V alpha = OP(set1)((T)end->alpha), beta = OP(set1)((T)end->beta);
    if (end->alpha == 1 && end->beta == 0) {
        UNROLL for (int i = 0; i < rows; i++, c += ldc) {
            UNROLL for (int j = 0; j < vectors - 1; j++) OP(storeu)(c + j * lanes, s[i][j]);
            STORE_FIRST(c + (vectors - 1) * lanes, mask, s[i][vectors - 1]);
        }
    } else if (end->beta == 0) {
        UNROLL for (int i = 0; i < rows; i++, c += ldc) {
            UNROLL for (int j = 0; j < vectors - 1; j++) OP(storeu)(c + j * lanes, OP(mul)(alpha, s[i][j]));
            STORE_FIRST(c + (vectors - 1) * lanes, mask, OP(mul)(alpha, s[i][vectors - 1]));
        }
    } else {
        UNROLL for (int i = 0; i < rows; i++, c += ldc) {
            UNROLL for (int j = 0; j < vectors - 1; j++)
                OP(storeu)(c + j * lanes, OP(fmadd)(alpha, s[i][j], OP(mul)(beta, OP(loadu)(c + j * lanes))));
            T *last = c + (vectors - 1) * lanes;
            STORE_FIRST(last, mask, OP(fmadd)(alpha, s[i][vectors - 1], OP(mul)(beta, LOAD_FIRST(last, mask))));
        }
    }
}
#undef STEPS

#define ONE(rows, vectors, across)                                                                                                      \
    static void FN(tile_##rows##_##vectors##_##across)(int64_t k, const T *a, int64_t lda, const T *b, int64_t ldb, T *c, int64_t ldc,  \
                                                       const Finish *end) {                                                             \
        FN(tile)(rows, vectors, across, k, a, lda, b, ldb, c, ldc, end);                                                                \
    }
#define NAME(rows, vectors, across) FN(tile_##rows##_##vectors##_##across),
#define FEW(X, vectors, across) X(1, vectors, across) X(2, vectors, across) X(3, vectors, across)
#if HAVE_512
#define ALL(X, vectors, across)                                                                                                         \
    FEW(X, vectors, across)                                                                                                             \
    X(4, vectors, across) X(5, vectors, across) X(6, vectors, across) X(7, vectors, across) X(8, vectors, across) X(9, vectors, across)  \
    X(10, vectors, across) X(11, vectors, across) X(12, vectors, across) X(13, vectors, across) X(14, vectors, across)
#define WIDE(X, across) FEW(X, 8, across) X(4, 4, across) X(5, 4, across) X(6, 4, across)
#else
#define ALL(X, vectors, across) FEW(X, vectors, across) X(4, vectors, across) X(5, vectors, across) X(6, vectors, across)
#define WIDE(X, across) FEW(X, 4, across)
#endif
ALL(ONE, 1, 0) ALL(ONE, 2, 0) ALL(ONE, 1, 1) ALL(ONE, 2, 1) WIDE(ONE, 0) WIDE(ONE, 1)
static const FN(Tile) FN(tiles)[2][2][TILE_ROWS] = {{{ALL(NAME, 1, 0)}, {ALL(NAME, 2, 0)}}, {{ALL(NAME, 1, 1)}, {ALL(NAME, 2, 1)}}};
static const FN(Tile) FN(wide_tiles)[2][TILE_FEW] = {{WIDE(NAME, 0)}, {WIDE(NAME, 1)}};
#undef ONE
#undef NAME
#undef FEW
#undef ALL
#undef WIDE

/* B [k][n] to panels [n / width][k][width]; the last may end in any numbers of its own. */
static void FN(pack_rows)(const T *b, int64_t ldb, int64_t k, int64_t n, T *to) {
    enum { lanes = FN(LANES), width = FN(PANEL_WIDTH) };
    int64_t whole = n / width, rest = n % width;
    int64_t first = rest < lanes ? rest : lanes;
    MASK one = FIRST(first), two = FIRST(rest - first);
    for (int64_t p = 0; p < k; p++) {
        const T *from = b + p * ldb;
        T *at = to + p * width;
        for (int64_t j = 0; j < whole; j++, from += width, at += k * width) {
            OP(storeu)(at, OP(loadu)(from));
            OP(storeu)(at + lanes, OP(loadu)(from + lanes));
        }
        if (rest) OP(storeu)(at, LOAD_FIRST(from, one));
        if (rest > lanes) OP(storeu)(at + lanes, LOAD_FIRST(from + lanes, two));
    }
}

/* Likewise B [n][k]. A last vector is filled up with its last column. */
static void FN(pack_columns)(const T *b, int64_t ldb, int64_t k, int64_t n, T *to) {
    enum { lanes = FN(LANES), width = FN(PANEL_WIDTH), few = 16 / sizeof(T) };
    int64_t row[FN(LANES)];
    for (int i = 0; i < lanes; i++) row[i] = i * ldb;
    for (int64_t j = 0; j < n; j += lanes) {
        int64_t panel = j / width * width, p = 0;
        const T *from = b + j * ldb;
        T *at = to + panel * k + j - panel;
        for (int i = 0; i < lanes && j + lanes > n; i++) row[i] = (j + i < n ? i : n - 1 - j) * ldb;
        for (; p + few <= k; p += few) FN(product_turn)(from + p, row, at + p * width, width);
        for (; p < k; p++)
            for (int i = 0; i < lanes; i++) at[p * width + i] = from[row[i] + p];
    }
}

/* Columns of an A that stands transposed, for some tiles of `rows` each, one more in the first `larger`: next to each other for a tile */
static void FN(pack_part)(const T *a, int64_t lda, int64_t k, int64_t rows, int64_t larger, int64_t tiles, T *to) {
    enum { lanes = FN(LANES), vectors = TILE_PITCH / FN(LANES) };
    MASK mask[2][vectors];
    for (int64_t more = 0; more < 2; more++)
        for (int64_t v = 0, left = rows + more; v < vectors; v++, left -= lanes) mask[more][v] = FIRST(left < 0 ? 0 : left < lanes ? left : lanes);
    for (int64_t p = 0; p < k; p++, a += lda, to += TILE_PITCH) {
        const T *from = a;
        for (int64_t i = 0; i < tiles; i++) {
            UNROLL for (int v = 0; v < vectors; v++)
                OP(storeu)(to + i * k * TILE_PITCH + v * lanes, LOAD_FIRST(from + v * lanes, mask[i < larger][v]));
            from += rows + (i < larger);
        }
    }
}

/* All rows of C in the columns of a block of B, which are `width` wide panels `apart` apart. Where there is room, A is copied to it.
 * Where rows of A follow on each other, those of the next tile are fetched meanwhile, elsewhere rows of the block of B that
 * comes next. */
static void FN(block)(int64_t ta, int64_t m, int64_t n, int64_t k, const T *a, int64_t lda, const T *b, int64_t ldb, int64_t apart, T *c,
                      int64_t ldc, Finish *end, T *room, Fetch behind) {
    enum { lanes = FN(LANES), width = FN(PANEL_WIDTH) };
    int64_t tiles = (m + TILE_ROWS - 1) / TILE_ROWS, many = m <= 3 ? TILE_MANY * lanes : 4 * lanes;
    int64_t least = tiles ? m / tiles : 0, larger = m - least * tiles;
    int64_t share = !ta && lda == k ? (TILE_ROWS * k * (int64_t)sizeof(T) / ((n + width - 1) / width) + 63) / 64 * 64 : 0;
    for (int64_t i = 0, first = 0, rows; i < tiles; i++, first += rows) {
        int64_t ld = lda, some, tile_of = i % TILE_GROUP;
        rows = least + (i < larger);
        const T *part = a + (ta ? first : first * lda);
        const char *next = (const char *)(part + rows * k), *stop = i + 1 < tiles ? next + rows * k * (int64_t)sizeof(T) : next;
        if (room) {
            if (!tile_of) FN(pack_part)(part, lda, k, least, larger - i, tiles - i < TILE_GROUP ? tiles - i : TILE_GROUP, room);
            part = room + tile_of * k * TILE_PITCH, ld = TILE_PITCH;
        }
        for (int64_t j = 0; j < n; j += some, next += share) {
            FN(Tile) tile;
            if (rows <= TILE_FEW && apart == width && n - j >= many)
                tile = FN(wide_tiles)[ta][rows - 1], some = many;
            else
                some = n - j < width ? n - j : width, tile = FN(tiles)[ta][some > lanes][rows - 1];
            end->lanes = (some - 1) % lanes + 1, end->whole = end->lanes == lanes;
            if (share)
                end->next = next, end->next_stop = next + share < stop ? next + share : stop;
            else if (behind.count-- > 0)
                end->next = behind.at, end->next_stop = end->next + behind.bytes, behind.at += behind.apart;
            else
                end->next = end->next_stop;
            tile(k, part, ld, b + j / width * apart, ldb, c + first * ldc + j, ldc, end);
        }
        if (end->tail) FN(vm_part)(end->tail, c + first * ldc, rows, n, ldc);
    }
}

static int FN(product_then)(int64_t ta, int64_t tb, int64_t m, int64_t n, int64_t k, T alpha, const T *a, int64_t lda, const T *b,
                            int64_t ldb, T beta, T *c, int64_t ldc, Tail *tail);

/* Few columns: the rows of the transpose, a strip at a time */
static int FN(product_turned)(int64_t ta, int64_t tb, int64_t m, int64_t n, int64_t k, T alpha, const T *a, int64_t lda, const T *b,
                              int64_t ldb, T beta, T *c, int64_t ldc, Tail *tail) {
    T strip[TURNED_COLUMNS * TURNED_ROWS];
    for (int64_t i = 0; i < m; i += TURNED_ROWS, c += TURNED_ROWS * ldc) {
        int64_t rows = m - i < TURNED_ROWS ? m - i : TURNED_ROWS;
        for (int64_t r = 0; r < rows && beta != 0; r++)
            for (int64_t j = 0; j < n; j++) strip[j * rows + r] = c[r * ldc + j];
        if (FN(product_then)(!tb, !ta, n, rows, k, alpha, b, ldb, a + (ta ? i : i * lda), lda, beta, strip, rows, NULL)) return -1;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < n; j++) c[r * ldc + j] = strip[j * rows + r];
        if (tail) FN(vm_part)(tail, c, rows, n, ldc);
    }
    return 0;
}

/* With a tail for C. 0, or -1 without memory */
static int FN(product_then)(int64_t ta, int64_t tb, int64_t m, int64_t n, int64_t k, T alpha, const T *a, int64_t lda, const T *b,
                            int64_t ldb, T beta, T *c, int64_t ldc, Tail *tail) {
    enum { width = FN(PANEL_WIDTH) };
    if (n <= (ta ? TURNED_COLUMNS : 6) && m > 2 * TURNED_COLUMNS)
        return FN(product_turned)(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, tail);
    int64_t parts = (k + PRODUCT_DEPTH - 1) / PRODUCT_DEPTH, depth = parts ? ((k + parts - 1) / parts + 3) / 4 * 4 : 1;
    int64_t most = depth < k ? depth : k;
    int64_t row = ldb * (int64_t)sizeof(T), even = row % 64 == 0; /* rows that begin anywhere lie in more lines */
    int64_t passes = m / TILE_ROWS * (even ? row : 4 * row), least = (even ? 2 : 1) * TILE_ROWS;
    int copy_b = tb || (m > least && most * row > PRODUCT_CLOSE && passes > PRODUCT_PASSES);
    int copy_a = ta && n > 2 * width && most * lda * (int64_t)sizeof(T) > PRODUCT_CLOSE;
    T *room = NULL;
    if (copy_a || copy_b) {
        int64_t columns = copy_b ? ((n < PRODUCT_WIDTH ? n : PRODUCT_WIDTH) + width - 1) / width * width : 0;
        room = own_memory(PANELS, sizeof(T) * (size_t)((most + 1) * (columns + TILE_GROUP * TILE_PITCH)));
        if (!room) return -1;
    }
    T *panels = room + most * TILE_GROUP * TILE_PITCH;
    Finish end = {.alpha = (double)alpha, .next = NULL, .next_stop = NULL};
    for (int64_t j = 0; j < n; j += PRODUCT_WIDTH) {
        int64_t wide = n - j < PRODUCT_WIDTH ? n - j : PRODUCT_WIDTH;
        end.beta = (double)beta;
        for (int64_t p = 0; p == 0 || p < k; p += depth, end.beta = 1) {
            int64_t deep = k - p < depth ? k - p : depth, pitch = copy_b ? width : ldb, apart = copy_b ? deep * width : width;
            const T *from = b + (tb ? j * ldb + p : p * ldb + j);
            if (copy_b) (tb ? FN(pack_columns) : FN(pack_rows))(from, ldb, deep, wide, panels);
            end.tail = p + deep < k ? NULL : tail;
            Fetch behind = {.apart = row};
            int64_t p2 = p + deep < k ? p + deep : 0, j2 = p + deep < k ? j : j + wide;
            if (j2 < n) {
                int64_t deep2 = k - p2 < depth ? k - p2 : depth, wide2 = n - j2 < PRODUCT_WIDTH ? n - j2 : PRODUCT_WIDTH;
                behind.at = (const char *)(b + (tb ? j2 * ldb + p2 : p2 * ldb + j2));
                behind.count = tb ? wide2 : deep2, behind.bytes = (tb ? deep2 : wide2) * (int64_t)sizeof(T);
            }
            FN(block)(ta, m, wide, deep, a + (ta ? p * lda : p), lda, copy_b ? panels : from, pitch, apart, c + j, ldc, &end,
                      copy_a ? room : NULL, behind);
        }
    }
    return 0;
}
