/* Sums of products of 8-bit integers for a block of up to STRIP rows and INTEGER_WIDE outputs: [rows][INTEGER_WIDE] int32. `w` are one or two
 * packed panels. INTEGER_ALIGN: rows that are read in place have a multiple of so many bytes. INTEGER_FLIP(p): what is added to rows of
 * signed bytes before they are multiplied. INTEGER_GRAIN: multiplications that are worth a thread. */

#if HAVE_AMX

enum { INTEGER_ALIGN = 64 };
#define INTEGER_GRAIN 1e6
#define INTEGER_FLIP(p) 0
#define INTEGER_BEGIN int64_t shaped = 0;
#define INTEGER_END if (begin < end) _tile_release();
#define INTEGER_SHAPE &shaped,

/* Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 panels of w. */
INLINE void integer_shape(int64_t rows) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {.palette = 1};
    uint8_t first = (uint8_t)(rows < 16 ? rows : 16), second = (uint8_t)(rows - first ? rows - first : 1);
    const uint8_t of[8] = {first, first, second, second, first, second, 16, 16};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = of[i];
    _tile_loadconfig(&shape);
}

#define STEP(dp)                                                                                                                        \
    for (int64_t k = 0; k < depth; k += 64, a += 64, w += 1024) {                                                                       \
        _tile_loadd(6, w, 64);                                                                                                          \
        _tile_loadd(4, a, lda);                                                                                                         \
        dp(0, 4, 6);                                                                                                                    \
        if (two) { _tile_loadd(7, w + panel, 64); dp(1, 4, 7); }                                                                        \
        if (below) {                                                                                                                    \
            _tile_loadd(5, a + 16 * lda, lda);                                                                                          \
            dp(2, 5, 6);                                                                                                                \
            if (two) dp(3, 5, 7);                                                                                                       \
        }                                                                                                                               \
    }

INLINE void integer_tile(int is_signed, int two, int below, const uint8_t *a, int64_t lda, int64_t depth, const int8_t *w, int32_t *to) {
    int64_t panel = (depth + 4) * 16;
    _tile_zero(0);
    if (two) _tile_zero(1);
    if (below) _tile_zero(2);
    if (two && below) _tile_zero(3);
    if (is_signed) {
        STEP(_tile_dpbssd)
    } else {
        STEP(_tile_dpbusd)
    }
    _tile_stored(0, to, 4 * INTEGER_WIDE);
    if (two) _tile_stored(1, to + 16, 4 * INTEGER_WIDE);
    if (below) _tile_stored(2, to + 16 * INTEGER_WIDE, 4 * INTEGER_WIDE);
    if (two && below) _tile_stored(3, to + 16 * INTEGER_WIDE + 16, 4 * INTEGER_WIDE);
}
#undef STEP

static void integer_tiled(const Integer *p, const uint8_t *a, int64_t lda, int64_t rows, int64_t count, const int8_t *w, int32_t *to,
                          int64_t *shaped) {
    if (*shaped != rows) integer_shape(rows), *shaped = rows;
    if (p->is_signed) {
        if (rows > 16) {
            if (count > 16) integer_tile(1, 1, 1, a, lda, p->depth, w, to);
            else integer_tile(1, 0, 1, a, lda, p->depth, w, to);
        } else if (count > 16) integer_tile(1, 1, 0, a, lda, p->depth, w, to);
        else integer_tile(1, 0, 0, a, lda, p->depth, w, to);
    } else if (rows > 16) {
        if (count > 16) integer_tile(0, 1, 1, a, lda, p->depth, w, to);
        else integer_tile(0, 0, 1, a, lda, p->depth, w, to);
    } else if (count > 16) integer_tile(0, 1, 0, a, lda, p->depth, w, to);
    else integer_tile(0, 0, 0, a, lda, p->depth, w, to);
}
#define integer_block(p, a, lda, rows, count, w, to) integer_tiled(p, a, lda, rows, count, w, to, &shaped)

#elif HAVE_VNNI

enum { INTEGER_ALIGN = 4, INTEGER_TALL = 12 };
#define INTEGER_GRAIN 5e5
#define INTEGER_FLIP(p) ((p)->is_signed ? 128 : 0)
#define INTEGER_BEGIN
#define INTEGER_END

/* Bytes of rows are made unsigned, which the instruction wants, by adding 128. */
INLINE void integer_tile(int rows, int vectors, const uint8_t *a, int64_t lda, int64_t groups, const int8_t *w, int64_t panel, __m512i flip,
                         int32_t *to) {
    __m512i s[INTEGER_TALL][2];
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < vectors; j++) s[i][j] = _mm512_setzero_si512();
    for (int64_t k = 0; k < groups; k++, w += 64) {
        __m512i b[2];
        UNROLL for (int j = 0; j < vectors; j++) b[j] = _mm512_loadu_si512(w + j * panel);
        UNROLL for (int i = 0; i < rows; i++) {
            int32_t four;
            memcpy(&four, a + i * lda + 4 * k, 4);
            __m512i x = _mm512_xor_si512(_mm512_set1_epi32(four), flip);
            UNROLL for (int j = 0; j < vectors; j++) s[i][j] = _mm512_dpbusd_epi32(s[i][j], x, b[j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < vectors; j++) _mm512_storeu_si512(to + i * INTEGER_WIDE + 16 * j, s[i][j]);
}

#define ONE(rows, vectors)                                                                                                              \
    static void integer_tile_##rows##_##vectors(const uint8_t *a, int64_t lda, int64_t groups, const int8_t *w, int64_t panel,         \
                                                __m512i flip, int32_t *to) {                                                            \
        integer_tile(rows, vectors, a, lda, groups, w, panel, flip, to);                                                                \
    }
#define NAME(rows, vectors) integer_tile_##rows##_##vectors,
#define ALL(X, v) X(1, v) X(2, v) X(3, v) X(4, v) X(5, v) X(6, v) X(7, v) X(8, v) X(9, v) X(10, v) X(11, v) X(12, v)
ALL(ONE, 1) ALL(ONE, 2)
static void (*const integer_table[2][INTEGER_TALL])(const uint8_t *, int64_t, int64_t, const int8_t *, int64_t, __m512i, int32_t *) = {
    {ALL(NAME, 1)}, {ALL(NAME, 2)}};
#undef ONE
#undef NAME
#undef ALL

static void integer_block(const Integer *p, const uint8_t *a, int64_t lda, int64_t rows, int64_t count, const int8_t *w, int32_t *to) {
    __m512i flip = _mm512_set1_epi8(p->is_signed ? -128 : 0);
    for (int64_t i = 0, some; i < rows; i += some) {
        some = rows - i <= INTEGER_TALL ? rows - i : rows - i < 2 * INTEGER_TALL ? (rows - i + 1) / 2 : INTEGER_TALL;
        integer_table[count > 16][some - 1](a + i * lda, lda, up_div(p->deep, 4), w, (p->depth + 4) * 16, flip, to + i * INTEGER_WIDE);
    }
}

#else

enum { INTEGER_ALIGN = 4, INTEGER_TALL = 4 };
#define INTEGER_GRAIN 1e5
#define INTEGER_FLIP(p) 0
#define INTEGER_BEGIN
#define INTEGER_END

/* Pairs of bytes as pairs of 16-bit integers, whose products are added up in 32 bits without loss */
INLINE void integer_tile(int rows, int is_signed, const uint8_t *a, int64_t lda, int64_t groups, const int8_t *w, int32_t *to) {
#if HAVE_FMA
    __m256i s[INTEGER_TALL][4];
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 4; j++) s[i][j] = _mm256_setzero_si256();
    for (int64_t k = 0; k < groups; k++, w += 64) {
        __m256i x[INTEGER_TALL];
        UNROLL for (int i = 0; i < rows; i++) {
            int32_t four;
            memcpy(&four, a + i * lda + 4 * k, 4);
            __m128i narrow = _mm_cvtsi32_si128(four);
            x[i] = _mm256_broadcastq_epi64(is_signed ? _mm_cvtepi8_epi16(narrow) : _mm_cvtepu8_epi16(narrow));
        }
        UNROLL for (int j = 0; j < 4; j++) {
            __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16 * j)));
            UNROLL for (int i = 0; i < rows; i++) s[i][j] = _mm256_add_epi32(s[i][j], _mm256_madd_epi16(x[i], b));
        }
    }
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 2; j++) { /* two sums for each output, the lanes in halves */
        __m256i both = _mm256_hadd_epi32(s[i][2 * j], s[i][2 * j + 1]);
        _mm256_storeu_si256((__m256i *)(to + i * INTEGER_WIDE + 8 * j), _mm256_permute4x64_epi64(both, 0xd8));
    }
#else
    int32_t s[INTEGER_TALL][16] = {{0}};
    for (int64_t k = 0; k < groups; k++, w += 64)
        for (int i = 0; i < rows; i++) {
            const uint8_t *at = a + i * lda + 4 * k;
            int32_t x0 = at[0], x1 = at[1], x2 = at[2], x3 = at[3];
            if (is_signed) x0 = (int8_t)at[0], x1 = (int8_t)at[1], x2 = (int8_t)at[2], x3 = (int8_t)at[3];
            for (int j = 0; j < 16; j++) s[i][j] += x0 * w[4 * j] + x1 * w[4 * j + 1] + x2 * w[4 * j + 2] + x3 * w[4 * j + 3];
        }
    for (int i = 0; i < rows; i++) memcpy(to + i * INTEGER_WIDE, s[i], sizeof s[i]);
#endif
}

static void integer_block(const Integer *p, const uint8_t *a, int64_t lda, int64_t rows, int64_t count, const int8_t *w, int32_t *to) {
    int64_t groups = up_div(p->deep, 4), panel = (p->depth + 4) * 16;
    for (int64_t j = 0; j < count; j += 16, w += panel)
        for (int64_t i = 0; i < rows; i += INTEGER_TALL) {
            const uint8_t *from = a + i * lda;
            int32_t *sums = to + i * INTEGER_WIDE + j;
            if (rows - i >= INTEGER_TALL) {
                if (p->is_signed) integer_tile(INTEGER_TALL, 1, from, lda, groups, w, sums);
                else integer_tile(INTEGER_TALL, 0, from, lda, groups, w, sums);
            } else {
                for (int64_t r = i; r < rows; r++, from += lda, sums += INTEGER_WIDE) {
                    if (p->is_signed) integer_tile(1, 1, from, lda, groups, w, sums);
                    else integer_tile(1, 0, from, lda, groups, w, sums);
                }
            }
        }
}

#endif
