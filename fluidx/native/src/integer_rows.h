/* Values of 8 bits between products: rounding floats to them and back, tables of 256 values, sums, maxima of windows. Bytes are unsigned, or
 * signed where a word says so; scales and zero points are those of ONNX. */

enum { QUANTIZE_WORDS = 7, RANGE_WORDS = 5, DEQUANTIZE_WORDS = 6, LOOKUP_WORDS = 4, SUM_WORDS = 13, LARGEST_WORDS = 15 };

typedef struct {
    const int64_t *a;
    float scale, lowest, highest;
    float (*ranges)[2];
    int32_t zero;
} Bytes;

enum { BYTES_GRAIN = 1 << 14, RANGES = 64 };

/* x / scale to the nearest integer, ties to even, plus the zero point, within the range */
INLINE void quantize_line(const float *x, uint8_t *to, int64_t n, float scale, int32_t zero, int32_t least, int32_t largest) {
    int64_t i = 0;
#if HAVE_512
    for (; i < n; i += 16) {
        __mmask16 m = (__mmask16)(n - i < 16 ? (1 << (n - i)) - 1 : 0xffff);
        __m512i q = integer_near(_mm512_div_ps(_mm512_maskz_loadu_ps(m, x + i), _mm512_set1_ps(scale)), zero, least, largest);
        _mm_mask_storeu_epi8(to + i, m, _mm512_cvtepi32_epi8(_mm512_add_epi32(q, _mm512_set1_epi32(zero))));
    }
#else
    float lo = (float)(least - zero), hi = (float)(largest - zero);
    for (; i < n; i++) to[i] = (uint8_t)(int32_t)(integer_round(integer_between(x[i] / scale, lo, hi)) + (float)zero);
#endif
}

static void quantize_part(void *ctx, int64_t begin, int64_t end) {
    const Bytes *b = ctx;
    quantize_line(PTR(const float, b->a[0]) + begin, PTR(uint8_t, b->a[1]) + begin, end - begin, b->scale, b->zero, (int32_t)b->lowest,
                  (int32_t)b->highest);
}

/* x, to, elements, scale, zero point, least and largest value */
static void quantize(const int64_t *a, Team *team) {
    Bytes b = {.a = a, .scale = (float)as_double(a[3]), .zero = (int32_t)a[4], .lowest = (float)a[5], .highest = (float)a[6]};
    parallel_for(team, a[2], BYTES_GRAIN, quantize_part, &b);
}

static void range_part(void *ctx, int64_t begin, int64_t end) {
    const Bytes *b = ctx;
    int64_t n = b->a[2], each = up_div(n, RANGES);
    for (int64_t k = begin; k < end; k++) {
        const float *x = PTR(const float, b->a[0]) + k * each;
        int64_t count = n - k * each < each ? n - k * each : each, i = 0;
        float lo = 0, hi = 0;
#if HAVE_512
        __m512 l = _mm512_setzero_ps(), h = l;
        for (; i + 16 <= count; i += 16) {
            __m512 v = _mm512_loadu_ps(x + i);
            l = _mm512_min_ps(v, l), h = _mm512_max_ps(v, h);
        }
        lo = _mm512_reduce_min_ps(l), hi = _mm512_reduce_max_ps(h);
#endif
        for (; i < count; i++) lo = x[i] < lo ? x[i] : lo, hi = x[i] > hi ? x[i] : hi;
        b->ranges[k][0] = lo, b->ranges[k][1] = hi;
    }
}

/* x, to, elements, the scale and the zero point that the values' range has over 255 steps, 0 among them */
static void quantize_range(const int64_t *a, Team *team) {
    float ranges[RANGES][2], lo = 0, hi = 0;
    memset(ranges, 0, sizeof ranges);
    Bytes b = {.a = a, .highest = 255, .ranges = ranges};
    if (a[2] > 0) parallel_for(team, up_div(a[2], up_div(a[2], RANGES)), RANGES * BYTES_GRAIN / a[2] + 1, range_part, &b);
    for (int k = 0; k < RANGES; k++) lo = ranges[k][0] < lo ? ranges[k][0] : lo, hi = ranges[k][1] > hi ? ranges[k][1] : hi;
    b.scale = hi > lo ? (hi - lo) / 255.0f : 1.0f;
    b.zero = (int32_t)integer_round(integer_between(-lo / b.scale, 0, 255));
    *PTR(float, a[3]) = b.scale, *PTR(uint8_t, a[4]) = (uint8_t)b.zero;
    parallel_for(team, a[2], BYTES_GRAIN, quantize_part, &b);
}

static void dequantize_part(void *ctx, int64_t begin, int64_t end) {
    const Bytes *b = ctx;
    const uint8_t *x = PTR(const uint8_t, b->a[0]);
    float *to = PTR(float, b->a[1]);
    int32_t flip = b->a[3] ? 128 : 0, zero = b->zero + flip;
    IVDEP for (int64_t i = begin; i < end; i++) to[i] = (float)((int32_t)(x[i] ^ flip) - zero) * b->scale;
}

/* x, to, elements, signed, scale, zero point */
static void dequantize(const int64_t *a, Team *team) {
    Bytes b = {.a = a, .scale = (float)as_double(a[4]), .zero = (int32_t)a[5]};
    parallel_for(team, a[2], BYTES_GRAIN, dequantize_part, &b);
}

static void lookup_part(void *ctx, int64_t begin, int64_t end) {
    const int64_t *a = ctx;
    const uint8_t *x = PTR(const uint8_t, a[0]), *table = PTR(const uint8_t, a[1]);
    uint8_t *to = PTR(uint8_t, a[2]);
    for (int64_t i = begin; i < end; i++) to[i] = table[x[i]];
}

/* x, a table of 256 bytes, to, elements */
static void lookup(const int64_t *a, Team *team) { parallel_for(team, a[3], BYTES_GRAIN, lookup_part, (void *)(intptr_t)a); }

static void sum_part(void *ctx, int64_t begin, int64_t end) {
    const int64_t *a = ctx;
    const uint8_t *x = PTR(const uint8_t, a[0]), *y = PTR(const uint8_t, a[1]);
    uint8_t *to = PTR(uint8_t, a[2]);
    int32_t flip_x = a[4] ? 128 : 0, flip_y = a[7] ? 128 : 0, zero_x = (int32_t)a[5] + flip_x, zero_y = (int32_t)a[8] + flip_y;
    float rx = (float)as_double(a[6]), ry = (float)as_double(a[9]), zero = (float)a[10], lo = (float)(a[11] - a[10]), hi = (float)(a[12] - a[10]);
    IVDEP for (int64_t i = begin; i < end; i++) {
        float f = (float)((int32_t)(x[i] ^ flip_x) - zero_x) * rx + (float)((int32_t)(y[i] ^ flip_y) - zero_y) * ry;
        to[i] = (uint8_t)(int32_t)(integer_round(integer_between(f, lo, hi)) + zero);
    }
}

/* x, y, to, elements; signed, zero point and scale by that of the result, of both; zero point, least and largest value of the result */
static void sum_bytes(const int64_t *a, Team *team) { parallel_for(team, a[3], BYTES_GRAIN, sum_part, (void *)(intptr_t)a); }

static void largest_part(void *ctx, int64_t begin, int64_t end) {
    const int64_t *a = ctx;
    int64_t h = a[4], w = a[5], c = a[6], kh = a[7], kw = a[8], sh = a[9], sw = a[10], top = a[11], left = a[12], oh = a[13], ow = a[14];
    uint8_t flip = a[2] ? 128 : 0;
    for (int64_t row = begin; row < end; row++) {
        int64_t image = row / (oh * ow), y0 = row % (oh * ow) / ow * sh - top, x0 = row % ow * sw - left;
        uint8_t *to = PTR(uint8_t, a[1]) + row * c;
        memset(to, flip, (size_t)c); /* the least value */
        for (int64_t y = at_least(y0, 0); y < at_most(y0 + kh, h); y++)
            for (int64_t x = at_least(x0, 0); x < at_most(x0 + kw, w); x++) {
                const uint8_t *from = PTR(const uint8_t, a[0]) + ((image * h + y) * w + x) * c;
                if (flip)
                    IVDEP for (int64_t j = 0; j < c; j++) to[j] = (int8_t)from[j] > (int8_t)to[j] ? from[j] : to[j];
                else
                    IVDEP for (int64_t j = 0; j < c; j++) to[j] = from[j] > to[j] ? from[j] : to[j];
            }
    }
}

/* The largest byte of each window of NHWC images: x, to, signed, N, H, W, C, window, stride (height and width), padding above and to the left,
 * output height and width */
static void largest_bytes(const int64_t *a, Team *team) {
    parallel_for(team, a[3] * a[13] * a[14], BYTES_GRAIN / (a[6] * a[7] * a[8] + 1) + 1, largest_part, (void *)(intptr_t)a);
}
