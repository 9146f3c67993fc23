/* Copies and conversions between arrays of any strides, rows taken and added by id, one-hot rows. */

/* -- copies ------------------------------------------------------------------------------------------------------------------------ */

/* words: how (bytes of an element, or 16 + number of a conversion), to, from, outer axes, rows and columns: a size and the strides in bytes
 * of both for each axis. Columns have the smallest stride in `to`, and rows, where that helps, in `from`. */
typedef struct {
    const int64_t *a, *rows, *columns;
    int64_t outer, block, blocks; /* elements of a piece of a row, and pieces of a row */
} Copy;

enum { COPY_PIECE = 16384, COPY_TILE = 16 };

#define COPY_OF(T)                                                                                                                      \
    static void copy_##T(char *to, const char *from, int64_t rows, int64_t n, int64_t tr, int64_t fr, int64_t tc, int64_t fc) {         \
        if (tc == sizeof(T) && fr == sizeof(T) && rows > 3) { /* a transposition: tiles that stay in the cache */                       \
            for (int64_t c0 = 0; c0 < n; c0 += COPY_TILE)                                                                               \
                for (int64_t r0 = 0; r0 < rows; r0 += COPY_TILE) {                                                                      \
                    int64_t r1 = rows - r0 < COPY_TILE ? rows : r0 + COPY_TILE, c1 = n - c0 < COPY_TILE ? n : c0 + COPY_TILE;           \
                    for (int64_t r = r0; r < r1; r++)                                                                                   \
                        for (int64_t c = c0; c < c1; c++) *(T *)(to + r * tr + c * (int64_t)sizeof(T)) =                                \
                            *(const T *)(from + r * (int64_t)sizeof(T) + c * fc);                                                       \
                }                                                                                                                       \
            return;                                                                                                                     \
        }                                                                                                                               \
        for (int64_t r = 0; r < rows; r++, to += tr, from += fr) {                                                                      \
            if (tc == sizeof(T) && fc == sizeof(T)) {                                                                                   \
                memcpy(to, from, (size_t)n * sizeof(T));                                                                                \
            } else if (tc == sizeof(T) && !fc) {                                                                                        \
                T x = *(const T *)from;                                                                                                 \
                for (int64_t c = 0; c < n; c++) ((T *)to)[c] = x;                                                                       \
            } else {                                                                                                                    \
                for (int64_t c = 0; c < n; c++) *(T *)(to + c * tc) = *(const T *)(from + c * fc);                                      \
            }                                                                                                                           \
        }                                                                                                                               \
    }
COPY_OF(uint8_t)
COPY_OF(uint16_t)
COPY_OF(uint32_t)
COPY_OF(uint64_t)
#undef COPY_OF

/* Conversions, as C does them; a number becomes a bool by being compared with 0 */
#define CAST(FROM, TO, E)                                                                                                               \
    for (int64_t r = 0; r < rows; r++, to += tr, from += fr) {                                                                          \
        if (tc == sizeof(TO) && fc == sizeof(FROM)) {                                                                                   \
            IVDEP for (int64_t c = 0; c < n; c++) {                                                                                     \
                FROM x = ((const FROM *)from)[c];                                                                                       \
                ((TO *)to)[c] = (TO)(E);                                                                                                \
            }                                                                                                                           \
        } else {                                                                                                                        \
            for (int64_t c = 0; c < n; c++) {                                                                                           \
                FROM x = *(const FROM *)(from + c * fc);                                                                                \
                *(TO *)(to + c * tc) = (TO)(E);                                                                                         \
            }                                                                                                                           \
        }                                                                                                                               \
    }                                                                                                                                   \
    break;
#define CASTS(number, FROM)                                                                                                             \
    case number + 0: CAST(FROM, float, x)                                                                                               \
    case number + 1: CAST(FROM, double, x)                                                                                              \
    case number + 2: CAST(FROM, int32_t, x)                                                                                             \
    case number + 3: CAST(FROM, int64_t, x)                                                                                             \
    case number + 4: CAST(FROM, uint8_t, x != 0)

static void copy_range(void *ctx, int64_t begin, int64_t end) {
    const Copy *p = ctx;
    const int64_t *a = p->a, *R = p->rows, *C = p->columns;
    while (begin < end) {
        int64_t line = begin / p->blocks, piece = begin % p->blocks, row = line % R[0], o = line / R[0], rows = 1, n = p->block;
        if (p->blocks == 1) rows = end - begin < R[0] - row ? end - begin : R[0] - row;
        if (piece == p->blocks - 1) n = C[0] - piece * p->block;
        char *to = PTR(char, a[1]) + row * R[1] + piece * p->block * C[1];
        const char *from = PTR(const char, a[2]) + row * R[2] + piece * p->block * C[2];
        for (int64_t k = p->outer - 1; k >= 0; k--) {
            const int64_t *w = a + 4 + 3 * k;
            to += o % w[0] * w[1], from += o % w[0] * w[2];
            o /= w[0];
        }
        int64_t tr = R[1], fr = R[2], tc = C[1], fc = C[2];
        begin += rows;
        switch (a[0]) {
        case 1: copy_uint8_t(to, from, rows, n, tr, fr, tc, fc); break;
        case 2: copy_uint16_t(to, from, rows, n, tr, fr, tc, fc); break;
        case 4: copy_uint32_t(to, from, rows, n, tr, fr, tc, fc); break;
        case 8: copy_uint64_t(to, from, rows, n, tr, fr, tc, fc); break;
            CASTS(16, float)
            CASTS(21, double)
            CASTS(26, int32_t)
            CASTS(31, int64_t)
            CASTS(36, uint8_t)
        case 41:
            for (; tc == 4 && fc == 2 && rows; rows--, to += tr, from += fr) line_of_f16_f32((float *)to, (const uint16_t *)from, n);
            CAST(uint16_t, float, float_of_f16(x))
        case 42:
            for (; tc == 2 && fc == 4 && rows; rows--, to += tr, from += fr) f16_of_line_f32((uint16_t *)to, (const float *)from, n);
            CAST(float, uint16_t, f16_of_float(x))
        case 43: CAST(uint16_t, float, float_of_bf16(x))
        case 44: CAST(float, uint16_t, bf16_of_float(x))
        case 45: CAST(uint16_t, uint16_t, bf16_of_float(float_of_f16(x)))
        case 46: CAST(uint16_t, uint16_t, f16_of_float(float_of_bf16(x)))
        }
    }
}

static void copy(const int64_t *a, Team *team) {
    const int64_t *rows = a + 4 + 3 * a[3], *columns = rows + 3;
    Copy p = {a, rows, columns, a[3], columns[0], 1};
    if (columns[0] > 2 * COPY_PIECE) p.block = COPY_PIECE, p.blocks = (columns[0] - 1) / COPY_PIECE + 1;
    int64_t items = rows[0] * p.blocks;
    for (int64_t k = 0; k < p.outer; k++) items *= a[4 + 3 * k];
    if (items < 1 || columns[0] < 1) return;
    parallel_for(team, items, grain_of((double)p.block * (columns[2] > 8 || columns[1] > 8 ? 1.0 : 0.2) + 3), copy_range, &p);
}

/* -- rows by id ---------------------------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t ids, id_bytes, n, start, here, size; /* ids count from `start`; `here` rows lie here, of `size` in all */
    int64_t table, rows, width, row_stride, other_stride, padding, chunk;
} Ids;

INLINE int64_t id_of(const Ids *p, int64_t k) {
    return p->id_bytes == 8 ? PTR(const int64_t, p->ids)[k] : PTR(const int32_t, p->ids)[k];
}

/* Report the first id outside [0, size) */
static int ids_wrong(const Ids *p, Team *team, int64_t text) {
    uint64_t most = 0;
    for (int64_t k = 0; k < p->n; k++) {
        uint64_t id = (uint64_t)id_of(p, k);
        most = id > most ? id : most;
    }
    if (p->n < 1 || most < (uint64_t)p->size) return 0;
    int64_t k = 0;
    while ((uint64_t)id_of(p, k) < (uint64_t)p->size) k++;
    report(team, PTR(const char, text), id_of(p, k));
    return 1;
}

#define IDS(a) {a[0], a[1], a[2], a[3], a[4], a[5], a[7], a[8], a[9], a[10], a[11], a[12], 0}
enum { IDS_WORDS = 13 };

/* Row k of `rows` becomes row ids[k] of the table, or zeros: ids, bytes of one, their number, start, here, size, address of an error's
 * text, table, rows, bytes of a row, bytes from row to row of the table and of `rows`, an id whose row is zeros or -1; and how many
 * tables there are, one behind the other, of which the same rows are taken, one behind the other */
enum { TAKE_WORDS = IDS_WORDS + 1 };

static void take_range(void *ctx, int64_t begin, int64_t end) {
    const Ids *p = ctx;
    const char *table = PTR(const char, p->table) + begin / p->n * p->here * p->row_stride;
    char *to = PTR(char, p->rows) + begin * p->other_stride;
    for (int64_t item = begin, k = begin % p->n; item < end; item++, to += p->other_stride) {
        int64_t id = id_of(p, k), row = id - p->start;
        const char *from = table + row * p->row_stride;
        if (id == p->padding || row < 0 || row >= p->here)
            memset(to, 0, (size_t)p->width);
        else if (p->width == 4) /* a copy of a size that the compiler knows is one instruction */
            memcpy(to, from, 4);
        else if (p->width == 8)
            memcpy(to, from, 8);
        else
            memcpy(to, from, (size_t)p->width);
        if (++k == p->n) k = 0, table += p->here * p->row_stride;
    }
}
static void take_rows(const int64_t *a, Team *team) {
    Ids p = IDS(a);
    if (p.n < 1 || ids_wrong(&p, team, a[6])) return;
    parallel_for(team, p.n * a[IDS_WORDS], grain_of((double)p.width * 0.1 + 10), take_range, &p);
}

/* Row ids[k] of a table takes row k of `rows`, in the order of k: the first words of take_rows, of which a padding is not read. */
static void put_range(void *ctx, int64_t begin, int64_t end) {
    const Ids *p = ctx;
    int64_t first = begin * p->chunk, last = end * p->chunk < p->here ? end * p->chunk : p->here;
    for (int64_t k = 0; k < p->n; k++) {
        int64_t row = id_of(p, k) - p->start;
        if (row >= first && row < last)
            memcpy(PTR(char, p->table) + row * p->row_stride, PTR(const char, p->rows) + k * p->other_stride, (size_t)p->width);
    }
}
/* Whoever writes a piece of the table looks at all ids: so few pieces, whose number depends on sizes alone */
INLINE int64_t table_pieces(Ids *p, double ns) {
    int64_t pieces = ns < 2 * PARALLEL_NS ? 1 : ns < 20 * PARALLEL_NS ? 4 : 16;
    p->chunk = (p->here + pieces - 1) / pieces;
    return p->chunk ? (p->here + p->chunk - 1) / p->chunk : 0;
}
static void put_rows(const int64_t *a, Team *team) {
    Ids p = IDS(a);
    if (!ids_wrong(&p, team, a[6])) parallel_for(team, table_pieces(&p, (double)p.n * (double)p.width * 0.2), 1, put_range, &p);
}

/* A table of zeros, or as it is, with row k of `rows` added to row ids[k], in the order of k: the first words of take_rows with the width in
 * elements and strides in elements. The padding's row stays zero. The last word says whether the table starts as zeros (1), whether only
 * the named rows do (2), or none (0). */
enum { ADD_WORDS = 14 };
#define ADD(T, NAME)                                                                                                                    \
    static void NAME##_range(void *ctx, int64_t begin, int64_t end) {                                                                   \
        const Ids *p = ctx;                                                                                                             \
        int64_t first = begin * p->chunk, last = end * p->chunk < p->here ? end * p->chunk : p->here;                                   \
        T *table = PTR(T, p->table);                                                                                                    \
        for (int64_t row = first; p->size == 1 && row < last; row++) memset(table + row * p->row_stride, 0, (size_t)p->width * sizeof(T)); \
        for (int64_t k = 0; p->size == 2 && k < p->n; k++) {                                                                            \
            int64_t row = id_of(p, k) - p->start;                                                                                       \
            if (row >= first && row < last) memset(table + row * p->row_stride, 0, (size_t)p->width * sizeof(T));                       \
        }                                                                                                                               \
        for (int64_t k = 0; k < p->n; k++) {                                                                                            \
            int64_t id = id_of(p, k), row = id - p->start;                                                                              \
            if (row < first || row >= last || id == p->padding) continue;                                                               \
            T *to = table + row * p->row_stride;                                                                                        \
            const T *from = PTR(const T, p->rows) + k * p->other_stride;                                                                \
            IVDEP for (int64_t i = 0; i < p->width; i++) to[i] += from[i];                                                              \
        }                                                                                                                               \
    }                                                                                                                                   \
    static void NAME(const int64_t *a, Team *team) {                                                                                    \
        Ids p = IDS(a);                                                                                                                 \
        if (ids_wrong(&p, team, a[6])) return;                                                                                          \
        p.size = a[13];                                                                                                                 \
        double moved = (double)p.n + (p.size == 1 ? (double)p.here : 0);                                                                \
        parallel_for(team, table_pieces(&p, moved * (double)p.width * 0.3), 1, NAME##_range, &p);                                       \
    }
ADD(float, add_rows_f32)
ADD(double, add_rows_f64)
ADD(int32_t, add_rows_i32)
ADD(int64_t, add_rows_i64)
#undef ADD

/* Rows of zeros with a one where an id says: the first words of take_rows, where the table is the address of a one of `row stride` bytes, a row
 * of the result has `here` columns, and a padding of 1 leaves the row of an id out of range zero. */
static void one_hot_range(void *ctx, int64_t begin, int64_t end) {
    const Ids *p = ctx;
    for (int64_t k = begin; k < end; k++) {
        int64_t column = id_of(p, k) - p->start, bytes = p->row_stride;
        char *to = PTR(char, p->rows) + k * p->here * bytes;
        memset(to, 0, (size_t)(p->here * bytes));
        if (column >= 0 && column < p->here) memcpy(to + column * bytes, PTR(const char, p->table), (size_t)bytes);
    }
}
static void one_hot(const int64_t *a, Team *team) {
    Ids p = IDS(a);
    if (p.padding != 1 && ids_wrong(&p, team, a[6])) return;
    parallel_for(team, p.n, grain_of((double)(p.here * p.row_stride) * 0.05 + 10), one_hot_range, &p);
}
