/* Sums of products of 8-bit integers for a block of up to STRIP rows and INTEGER_WIDE outputs: [rows][INTEGER_WIDE] int32. `w` are one or two
 * packed panels. INTEGER_ALIGN: rows that are read in place have a multiple of so many bytes. INTEGER_FLIP(p): what is added to rows of
 * signed bytes before they are multiplied. INTEGER_GRAIN: multiplications that are worth a thread. INTEGER_WIDENS: rows are copied to 16 bits
 * first. */

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

#elif HAVE_FMA

enum { INTEGER_ALIGN = 4 };
#define INTEGER_GRAIN 1e5
#define INTEGER_FLIP(p) 0
#define INTEGER_BEGIN
#define INTEGER_END
#define INTEGER_WIDENS 1

/* Pairs of bytes as pairs of 16-bit integers, whose products are added up in 32 bits without loss: the instruction that multiplies bytes adds up
 * in 16 bits, and saturates. A vector has two sums for each output. */
#if HAVE_512
enum { INTEGER_TALL = 8, INTEGER_LANES = 8 }; /* outputs of a vector */
#define VI __m512i
#define VI_(name) _mm512_##name
#define LOAD_HALF(w) _mm256_loadu_si256((const __m256i *)(w))
#define ZERO_VI _mm512_setzero_si512()
#else
enum { INTEGER_TALL = 4, INTEGER_LANES = 4 };
#define VI __m256i
#define VI_(name) _mm256_##name
#define LOAD_HALF(w) _mm_loadu_si128((const __m128i *)(w))
#define ZERO_VI _mm256_setzero_si256()
#endif

/* The sums of pairs, in order */
INLINE void integer_pairs(VI a, VI b, int32_t *to) {
#if HAVE_512
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b)));
#else
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8)); /* the lanes are in halves */
#endif
}

INLINE void integer_tile(int rows, const int16_t *a, int64_t lda, int64_t groups, const int8_t *w, int32_t *to) {
    VI s[INTEGER_TALL][2];
    UNROLL for (int i = 0; i < rows; i++) s[i][0] = s[i][1] = ZERO_VI;
    for (int64_t k = 0; k < groups; k++, w += 64) {
        VI b = VI_(cvtepi8_epi16)(LOAD_HALF(w)), c = VI_(cvtepi8_epi16)(LOAD_HALF(w + 4 * INTEGER_LANES));
        UNROLL for (int i = 0; i < rows; i++) {
            int64_t four;
            memcpy(&four, a + i * lda + 4 * k, 8);
#if HAVE_512
            VI x = _mm512_set1_epi64(four);
#else
            VI x = _mm256_set1_epi64x(four);
#endif
            s[i][0] = VI_(add_epi32)(s[i][0], VI_(madd_epi16)(x, b)), s[i][1] = VI_(add_epi32)(s[i][1], VI_(madd_epi16)(x, c));
        }
    }
    UNROLL for (int i = 0; i < rows; i++) integer_pairs(s[i][0], s[i][1], to + i * INTEGER_WIDE);
}

#define ONE(rows)                                                                                                                       \
    static void integer_tile_##rows(const int16_t *a, int64_t lda, int64_t groups, const int8_t *w, int32_t *to) {                       \
        integer_tile(rows, a, lda, groups, w, to);                                                                                      \
    }
ONE(1) ONE(2) ONE(3) ONE(4)
#if HAVE_512
ONE(5) ONE(6) ONE(7) ONE(8)
#define NAMES integer_tile_1, integer_tile_2, integer_tile_3, integer_tile_4, integer_tile_5, integer_tile_6, integer_tile_7, integer_tile_8
#else
#define NAMES integer_tile_1, integer_tile_2, integer_tile_3, integer_tile_4
#endif
static void (*const integer_table[INTEGER_TALL])(const int16_t *, int64_t, int64_t, const int8_t *, int32_t *) = {NAMES};
#undef ONE
#undef NAMES

/* Rows of 16 bits, lda of them apart */
static void integer_block(const Integer *p, const void *rows_of, int64_t lda, int64_t rows, int64_t count, const int8_t *w, int32_t *to) {
    int64_t groups = up_div(p->deep, 4), panel = (p->depth + 4) * 16, across = 2 * INTEGER_LANES;
    const int16_t *a = rows_of;
    for (int64_t j = 0; j < count; j += across)
        for (int64_t i = 0, some; i < rows; i += some) {
            some = rows - i < INTEGER_TALL ? rows - i : INTEGER_TALL;
            integer_table[some - 1](a + i * lda, lda, groups, w + j / 16 * panel + j % 16 * 4, to + i * INTEGER_WIDE + j);
        }
}
#undef VI
#undef VI_
#undef LOAD_HALF
#undef ZERO_VI

static void integer_widen(const Integer *p, const uint8_t *from, int64_t lda, int64_t rows, int16_t *to) {
    for (int64_t r = 0; r < rows; r++, from += lda, to += p->depth) {
        if (p->is_signed)
            IVDEP for (int64_t k = 0; k < p->deep; k++) to[k] = (int8_t)from[k];
        else
            IVDEP for (int64_t k = 0; k < p->deep; k++) to[k] = from[k];
        for (int64_t k = p->deep; k < p->depth; k++) to[k] = 0;
    }
}

#else

enum { INTEGER_ALIGN = 4 };
#define INTEGER_GRAIN 1e5
#define INTEGER_FLIP(p) 0
#define INTEGER_BEGIN
#define INTEGER_END

INLINE void integer_tile(int is_signed, const uint8_t *a, int64_t groups, const int8_t *w, int32_t *to) {
    int32_t s[16] = {0};
    for (int64_t k = 0; k < groups; k++, w += 64, a += 4) {
        int32_t x0 = a[0], x1 = a[1], x2 = a[2], x3 = a[3];
        if (is_signed) x0 = (int8_t)a[0], x1 = (int8_t)a[1], x2 = (int8_t)a[2], x3 = (int8_t)a[3];
        for (int j = 0; j < 16; j++) s[j] += x0 * w[4 * j] + x1 * w[4 * j + 1] + x2 * w[4 * j + 2] + x3 * w[4 * j + 3];
    }
    memcpy(to, s, sizeof s);
}

static void integer_block(const Integer *p, const uint8_t *a, int64_t lda, int64_t rows, int64_t count, const int8_t *w, int32_t *to) {
    int64_t groups = up_div(p->deep, 4), panel = (p->depth + 4) * 16;
    for (int64_t j = 0; j < count; j += 16, w += panel)
        for (int64_t i = 0; i < rows; i++) {
            if (p->is_signed) integer_tile(1, a + i * lda, groups, w, to + i * INTEGER_WIDE + j);
            else integer_tile(0, a + i * lda, groups, w, to + i * INTEGER_WIDE + j);
        }
}

#endif
