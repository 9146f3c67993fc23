/* Copies of matrices as pairs of bfloat16 along k. Panels of B are [k / 2][32] pairs, rows of A lie `apart` bytes apart; k is filled up with
 * zeros to a multiple of KEYS_16. */

enum { PANEL_16 = 32, PACKED_16 = 2 };
#if HAVE_AMX
enum { KEYS_16 = 32, ROWS_16 = 32, BLOCK_16 = 512 << 10 };
#else
enum { KEYS_16 = 2, ROWS_16 = 56, BLOCK_16 = 512 << 10 };
#endif

/* Chains of sums go on from one block along k to the next, so its length is free. */
INLINE int64_t deep_16(int64_t k) { return k < DEPTH_16 ? (k ? k : 1) : DEPTH_16; }

#define FIRST_32(n) ((n) < 1 ? 0 : (n) > 31 ? (__mmask32)-1 : (__mmask32)(((uint32_t)1 << (n)) - 1))

/* Up to 32 elements as bfloat16, zeros behind */
INLINE __m512i taken_16(const char *at, int64_t is, __mmask32 mask) {
    if (is == AS_BF16) return _mm512_maskz_loadu_epi16(mask, at);
    __m512 low = _mm512_maskz_loadu_ps((__mmask16)mask, at), high = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), at + 64);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* Pairs of the elements of two rows, in columns 0 to 15 and 16 to 31 */
INLINE void pair_16(__m512i x, __m512i y, __m512i *low, __m512i *high) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2,
                                           33, 1, 32, 0);
    *low = _mm512_permutex2var_epi16(x, first, y);
    *high = _mm512_permutex2var_epi16(x, _mm512_add_epi16(first, _mm512_set1_epi16(16)), y);
}

/* A square of pairs, turned */
INLINE void turn_16(__m512i *r) {
    __m512i t[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i even = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), odd = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        __m512i even2 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), odd2 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        t[i] = _mm512_shuffle_i32x4(even, even2, 0x88), t[8 + i] = _mm512_shuffle_i32x4(even, even2, 0xdd);
        t[4 + i] = _mm512_shuffle_i32x4(odd, odd2, 0x88), t[12 + i] = _mm512_shuffle_i32x4(odd, odd2, 0xdd);
    }
    UNROLL for (int i = 0; i < 16; i++) r[i] = t[i];
}

/* Rows along k: two of them make a row of pairs. */
INLINE void pack_rows_16(const Side16 *b, int64_t is, int64_t k0, int64_t k, int64_t j0, int64_t n, char *to) {
    int64_t deep = up_to_16(k, KEYS_16) / 2, step = PANEL_16 * bytes_16(is);
    for (int64_t p = 0; p < deep; p++) {
        char *at = to + p * 128;
        int first = 2 * p < k, second = 2 * p + 1 < k;
        const char *x = at_16(b, first ? k0 + 2 * p : k0, j0), *y = at_16(b, second ? k0 + 2 * p + 1 : k0, j0);
        for (int64_t j = 0; j < n; j += PANEL_16, at += deep * 128, x += step, y += step) {
            __mmask32 mask = FIRST_32(n - j);
            __m512i low, high;
            pair_16(taken_16(x, is, first ? mask : 0), taken_16(y, is, second ? mask : 0), &low, &high);
            _mm512_storeu_si512(at, low);
            _mm512_storeu_si512(at + 64, high);
        }
    }
}

/* Columns: squares of pairs are turned. */
INLINE void pack_columns_16(const Side16 *b, int64_t is, int64_t k0, int64_t k, int64_t j0, int64_t n, char *to) {
    int64_t deep = up_to_16(k, KEYS_16) / 2, size = bytes_16(is);
    for (int64_t j = 0; j < up_to_16(n, PANEL_16); j += 16) {
        char *at = to + j / PANEL_16 * deep * 128 + j % PANEL_16 * 4;
        const char *x[16];
        for (int i = 0; i < 16; i++) x[i] = at_16(b, k0, j0 + (j + i < n ? j + i : 0));
        for (int64_t p = 0; p < k; p += 32) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) r[i] = taken_16(x[i] + p * size, is, j + i < n ? FIRST_32(k - p) : 0);
            turn_16(r);
            for (int64_t i = 0; i < 16 && p / 2 + i < deep; i++) _mm512_storeu_si512(at + (p / 2 + i) * 128, r[i]);
        }
    }
}

static void pack_b_16(const Side16 *b, int64_t all, int64_t k0, int64_t k, int64_t j, int64_t n, char *to) {
    (void)all;
    if (b->turned && b->is == AS_BF16)
        pack_columns_16(b, AS_BF16, k0, k, j, n, to);
    else if (b->turned)
        pack_columns_16(b, AS_ROUNDED, k0, k, j, n, to);
    else if (b->is == AS_BF16)
        pack_rows_16(b, AS_BF16, k0, k, j, n, to);
    else
        pack_rows_16(b, AS_ROUNDED, k0, k, j, n, to);
}

INLINE void take_rows_16(const char *from, int64_t is, int64_t ld, int64_t rows, int64_t k, char *to, int64_t apart) {
    for (int64_t i = 0; i < rows; i++, from += ld * bytes_16(is), to += apart)
        for (int64_t p = 0; p < k; p += 32) _mm512_storeu_si512(to + 2 * p, taken_16(from + p * bytes_16(is), is, FIRST_32(k - p)));
}

/* Rows of an A that stands transposed, [k][rows] */
INLINE void turn_rows_16(const char *from, int64_t is, int64_t ld, int64_t rows, int64_t k, char *to, int64_t apart) {
    int64_t row = ld * bytes_16(is);
    for (int64_t p = 0; p < k; p += 32)
        for (int64_t i = 0; i < rows; i += 32) {
            __m512i low[16], high[16];
            const char *x = from + p * row + i * bytes_16(is);
            __mmask32 mask = FIRST_32(rows - i);
            UNROLL for (int q = 0; q < 16; q++, x += 2 * row)
                pair_16(taken_16(x, is, p + 2 * q < k ? mask : 0), taken_16(x + row, is, p + 2 * q + 1 < k ? mask : 0), low + q, high + q);
            turn_16(low);
            for (int q = 0; q < 16 && i + q < rows; q++) _mm512_storeu_si512(to + (i + q) * apart + 2 * p, low[q]);
            if (i + 16 >= rows) break;
            turn_16(high);
            for (int q = 0; q < 16 && i + 16 + q < rows; q++) _mm512_storeu_si512(to + (i + 16 + q) * apart + 2 * p, high[q]);
        }
}

/* In place where pairs lie there, else in `room` */
static Rows16 pack_a_16(const Side16 *a, int64_t i, int64_t rows, int64_t k0, int64_t k, char *room) {
    const char *from = at_16(a, i, k0);
    int whole = HAVE_AMX ? rows % 16 == 0 && a->ld * 2 % 4096 != 0 : 1; /* rows that far apart would push each other out of the cache */
    if (!a->turned && a->is == AS_BF16 && k % KEYS_16 == 0 && whole) return (Rows16){from, a->ld * 2, 0};
    Rows16 to = {room, up_to_16(k, 32) * 2 + 64, 0};
    if (a->turned && a->is == AS_BF16)
        turn_rows_16(from, AS_BF16, a->ld, rows, k, room, to.apart);
    else if (a->turned)
        turn_rows_16(from, AS_ROUNDED, a->ld, rows, k, room, to.apart);
    else if (a->is == AS_BF16)
        take_rows_16(from, AS_BF16, a->ld, rows, k, room, to.apart);
    else
        take_rows_16(from, AS_ROUNDED, a->ld, rows, k, room, to.apart);
    return to;
}

#if HAVE_AMX
#include "tiles_16.h"
#else

enum { TILE_16 = 14 };
INLINE void begin_16(void) {}
INLINE void end_16(void) {}

/* Rows of A against one panel: `vectors` of 16 columns */
INLINE void tile_16(const int rows, const int vectors, int64_t k, const char *a, int64_t apart, const char *b, float *c, int64_t ldc, int more) {
    const char *at[(TILE_16 + 2) / 3];
    __m512 s[TILE_16][2];
    UNROLL for (int i = 0; i < (rows + 2) / 3; i++) at[i] = a + 3 * i * apart;
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vectors; j++) s[i][j] = more ? _mm512_loadu_ps(c + i * ldc + 16 * j) : _mm512_setzero_ps();
    for (int64_t p = 0; p < k; p += 2, b += 128) {
        __m512i y[2];
        UNROLL for (int j = 0; j < vectors; j++) {
            y[j] = _mm512_loadu_si512(b + 64 * j);
            __builtin_prefetch(b + 12 * 128 + 64 * j);
        }
        UNROLL for (int i = 0; i < rows; i++) {
            int32_t pair;
            memcpy(&pair, at[i / 3] + i % 3 * apart, sizeof pair);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            UNROLL for (int j = 0; j < vectors; j++) s[i][j] = _mm512_dpbf16_ps(s[i][j], x, (__m512bh)y[j]);
        }
        UNROLL for (int i = 0; i < (rows + 2) / 3; i++) at[i] += 4;
    }
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < vectors; j++) _mm512_storeu_ps(c + i * ldc + 16 * j, s[i][j]);
}

typedef void (*Tile16)(int64_t k, const char *a, int64_t apart, const char *b, float *c, int64_t ldc, int more);
#define EACH_ROWS(X, v) X(1, v) X(2, v) X(3, v) X(4, v) X(5, v) X(6, v) X(7, v) X(8, v) X(9, v) X(10, v) X(11, v) X(12, v) X(13, v) X(14, v)
#define ONE(r, v)                                                                                                                     \
    static void tile_16_##r##_##v(int64_t k, const char *a, int64_t apart, const char *b, float *c, int64_t ldc, int more) {            \
        tile_16(r, v, k, a, apart, b, c, ldc, more);                                                                                  \
    }
#define NAME(r, v) tile_16_##r##_##v,
EACH_ROWS(ONE, 1) EACH_ROWS(ONE, 2)
static const Tile16 TILES_16[2][TILE_16] = {{EACH_ROWS(NAME, 1)}, {EACH_ROWS(NAME, 2)}};
#undef EACH_ROWS
#undef ONE
#undef NAME

/* Rows of A against panels of B; `more`: on top of the sums that are there */
static void times_16(int64_t all, int64_t rows, int64_t n, int64_t k, Rows16 a, const char *b, float *sums, int64_t ld, int more) {
    (void)all;
    int64_t tiles = (rows - 1) / TILE_16 + 1, panel = up_to_16(k, KEYS_16) / 2 * 128;
    for (int64_t j = 0; j < n; j += PANEL_16, b += panel)
        for (int64_t t = 0, row = 0, some; t < tiles; t++, row += some) {
            some = (rows - row - 1) / (tiles - t) + 1;
            TILES_16[n - j > 16][some - 1](k, a.at + row * a.apart, a.apart, b, sums + row * ld + j, ld, more);
        }
}

#endif
