/* C = A W or A W^T in float, of a frozen weight W [k][n] of 2, 4 or 8 bits, whose transpose is stored: for each of its columns blocks of
 * integers, the lowest bits first, with a scale and a zero point each. Strips of W are converted in the cache and multiplied by `product`.
 *
 * words: is it A W^T, rows of A, n, k, bits, elements of a block, blocks, kind of zero points (0: 2^(bits - 1), 1: packed integers,
 * 2: floats), zero points or their bytes for a column, A, W, scales, zero points, C
 *
 * Sums are cut along k as those of `product` are, so results have the bits of the product with the converted weight. Few rows of A are the
 * exception: a line of W is converted and multiplied at once, in N_BITS_LANES sums that are added in pairs. */

enum { N_BITS_WORDS = 14, N_BITS_STRIP = 64, N_BITS_FEW = 4, N_BITS_LINE = 1024, N_BITS_LANES = 32 };

/* A vector of integers as floats, from whole bytes */
#if HAVE_512
enum { N_BITS_VECTOR = 16 };
INLINE __m512 n_bits_vector(const int bits, const uint8_t *from) {
    if (bits == 8) return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)));
    int32_t word[2] = {0};
    memcpy(word, from, (size_t)(2 * bits));
    __m512i v = _mm512_set1_epi32(word[0]), lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (bits == 4) v = _mm512_mask_set1_epi32(v, 0xff00, word[1]);
    v = _mm512_srlv_epi32(v, _mm512_and_si512(_mm512_slli_epi32(lane, bits / 2), _mm512_set1_epi32(31)));
    return _mm512_cvtepi32_ps(_mm512_and_si512(v, _mm512_set1_epi32((1 << bits) - 1)));
}
#elif HAVE_FMA
enum { N_BITS_VECTOR = 8 };
INLINE __m256 n_bits_vector(const int bits, const uint8_t *from) {
    if (bits == 8) return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
    int32_t word = 0;
    memcpy(&word, from, (size_t)bits);
    __m256i v = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_slli_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), bits / 2));
    return _mm256_cvtepi32_ps(_mm256_and_si256(v, _mm256_set1_epi32((1 << bits) - 1)));
}
#endif

/* A part of a block, which begins with a byte */
INLINE void n_bits_part(const int bits, float *to, const uint8_t *from, int64_t n, float zero, float scale) {
    const int in_byte = 8 / bits, mask = (1 << bits) - 1;
    int64_t c = 0;
#if HAVE_FMA
    PS z = PS_(set1)(zero), s = PS_(set1)(scale);
    for (; c + N_BITS_VECTOR <= n; c += N_BITS_VECTOR, from += N_BITS_VECTOR / in_byte)
        PS_(storeu)(to + c, PS_(mul)(PS_(sub)(n_bits_vector(bits, from), z), s));
#else
    for (; bits == 8 && c + 16 <= n; c += 16, from += 16)
        for (int i = 0; i < 16; i++) to[c + i] = ((float)from[i] - zero) * scale;
#endif
    for (int64_t i = 0; c < n; c++, i++) to[c] = ((float)(from[i / in_byte] >> bits * (i % in_byte) & mask) - zero) * scale;
}

/* Elements of a column of W from number `at` of block b on; `at` is a multiple of 4. */
INLINE void n_bits_blocks(const int bits, const int64_t *a, int64_t column, int64_t b, int64_t at, int64_t count, float *to) {
    int64_t size = a[5], bytes = size * bits / 8;
    const uint8_t *y = PTR(const uint8_t, a[10]) + (column * a[6] + b) * bytes, *packed = PTR(const uint8_t, a[12]) + column * a[8];
    const float *scale = PTR(const float, a[11]) + column * a[6], *zeros = PTR(const float, a[12]) + column * a[8];
    for (; count > 0; b++, y += bytes, at = 0) {
        int64_t n = size - at < count ? size - at : count;
        float zero = (float)(1 << (bits - 1));
        if (a[7] == 1)
            zero = (float)(packed[b * bits / 8] >> b * bits % 8 & ((1 << bits) - 1));
        else if (a[7])
            zero = zeros[b];
        n_bits_part(bits, to, y + at * bits / 8, n, zero, scale[b]);
        to += n, count -= n;
    }
}

static void n_bits_line(const int64_t *a, int64_t column, int64_t b, int64_t at, int64_t count, float *to) {
    if (a[4] == 8)
        n_bits_blocks(8, a, column, b, at, count, to);
    else if (a[4] == 4)
        n_bits_blocks(4, a, column, b, at, count, to);
    else
        n_bits_blocks(2, a, column, b, at, count, to);
}

typedef struct {
    const int64_t *a;
    int failed;
} NBits;

/* The parts of a sum of k elements: their length */
static int64_t n_bits_depth(int64_t k) {
    int64_t parts = (k + PRODUCT_DEPTH - 1) / PRODUCT_DEPTH;
    return parts ? ((k + parts - 1) / parts + 3) / 4 * 4 : 1;
}

/* Columns j, ... of C, `wide` of them */
static int n_bits_strip(const int64_t *a, int64_t j, int64_t wide, float *room) {
    int64_t turned = a[0], m = a[1], k = turned ? a[2] : a[3], n = turned ? a[3] : a[2], depth = n_bits_depth(k);
    const float *A = PTR(const float, a[9]);
    float *c = PTR(float, a[13]) + j;
    for (int64_t p = 0; p == 0 || p < k; p += depth) {
        int64_t deep = k - p < depth ? k - p : depth, line = turned ? wide : deep, lines = turned ? deep : wide;
        int64_t first = turned ? j : p, b = first / a[5];
        for (int64_t i = 0; i < lines; i++) n_bits_line(a, (turned ? p : j) + i, b, first - b * a[5], line, room + i * line);
        if (product_f32(0, !turned, m, wide, deep, 1, A + p, k, room, line, p ? 1 : 0, c, n)) return -1;
    }
    return 0;
}

/* The same for few rows of A, not turned */
static void n_bits_few(const int64_t *a, int64_t j, int64_t wide) {
    int64_t m = a[1], n = a[2], k = a[3];
    float *c = PTR(float, a[13]);
    for (int64_t i = j; i < j + wide; i++) {
        float sums[N_BITS_FEW][N_BITS_LANES] = {{0}}, line[N_BITS_LINE];
        for (int64_t p = 0; p < k; p += N_BITS_LINE) {
            int64_t deep = k - p < N_BITS_LINE ? k - p : N_BITS_LINE;
            n_bits_line(a, i, p / a[5], p % a[5], deep, line);
            for (int64_t r = 0; r < m; r++) {
                const float *x = PTR(const float, a[9]) + r * k + p;
                float s[N_BITS_LANES];
                int64_t q = 0;
                memcpy(s, sums[r], sizeof s);
                for (; q + N_BITS_LANES <= deep; q += N_BITS_LANES)
                    for (int l = 0; l < N_BITS_LANES; l++) s[l] += x[q + l] * line[q + l];
                for (int l = 0; q < deep; l++, q++) s[l] += x[q] * line[q];
                memcpy(sums[r], s, sizeof s);
            }
        }
        for (int64_t r = 0; r < m; r++) {
            for (int step = N_BITS_LANES / 2; step; step /= 2)
                for (int l = 0; l < step; l++) sums[r][l] += sums[r][l + step];
            c[r * n + i] = sums[r][0];
        }
    }
}

static void n_bits_range(void *ctx, int64_t begin, int64_t end) {
    NBits *p = ctx;
    const int64_t *a = p->a;
    int64_t n = a[0] ? a[3] : a[2], k = a[0] ? a[2] : a[3], few = !a[0] && a[1] <= N_BITS_FEW;
    float *room = few ? NULL : scratch(sizeof(float) * N_BITS_STRIP * (size_t)n_bits_depth(k));
    for (int64_t i = begin; i < end; i++) {
        int64_t j = i * N_BITS_STRIP, wide = n - j < N_BITS_STRIP ? n - j : N_BITS_STRIP;
        if (few)
            n_bits_few(a, j, wide);
        else if (!room || n_bits_strip(a, j, wide, room))
            p->failed = 1;
    }
}

static void matmul_n_bits(const int64_t *a, Team *team) {
    if ((team->error = NO_PRODUCT(blas_f32))) return;
    int64_t n = a[0] ? a[3] : a[2], k = a[0] ? a[2] : a[3];
    if (a[1] < 1 || n < 1) return;
    NBits p = {.a = a};
    double work = (double)(a[1] + 8) * N_BITS_STRIP * (double)k;
    parallel_for(team, (n - 1) / N_BITS_STRIP + 1, (int64_t)(2e5 / (work + 1)) + 1, n_bits_range, &p);
    if (p.failed) team->error = "out of memory";
}
