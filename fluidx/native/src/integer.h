/* Products and convolutions of 8-bit integers, exact in int32, with what follows as the tail: a sum per channel, scales, rounding to 8 bits,
 * and the sum with another quantized value.
 *
 * A product is a convolution of 1x1 images: rows are pixels of NHWC images, and the columns of a strip of rows lie next to each other, in
 * place or copied. Weights are packed once, by Python: panels of 16 outputs, in them groups of 4 inputs, so that 4 bytes of a row meet 4 bytes
 * of each output; inputs are filled up to 64 with zeros, and behind them are the sums of the weights of each output, as int32. A zero point z
 * of the rows is then a term -z * sum.
 *
 * words: X, signed (0 or 1), zero point, address of a zero point or 0, packed weights, int32 terms by output or 0, scales, number of scales (0, 1,
 * outputs), address of a factor of the scales or 0, terms in float or 0, result, its kind (0 int32, 1 float, 2 uint8, 3 int8), zero point, least
 * and largest value, another operand of 8 bits or 0, signed, zero point, its scale and that of the result by the scale of their sum, zero
 * point, least and largest value of the sum; N, H, W, channels and outputs of a group, groups, kernel, stride, dilation (height and width),
 * padding above and to the left, output height and width, zero points of the weights by output (int32) or 0, a tail for a result in float or 0 */

enum { INTEGER_WORDS = 41, STRIP = 32, INTEGER_WIDE = 32, INTEGER_DEEP = 64 };

typedef struct {
    const uint8_t *x;
    const int8_t *w;
    const int32_t *terms, *weight_zeros;
    const float *scales, *shifts;
    float factor; /* of the scales */
    int32_t zero, is_signed; /* of x */
    void *out;
    int32_t kind, out_zero, least, largest;
    const uint8_t *other;
    int32_t other_signed, other_zero, sum_zero, sum_least, sum_largest;
    float other_ratio, ratio; /* their scales by that of the sum */
    int64_t scale_step; /* 0: one scale for all */
    int64_t n, h, wd, c, o, groups, kh, kw, sh, sw, dh, dw, top, left, oh, ow;
    int64_t deep, depth; /* inputs of an output; filled up */
    int64_t rows, strips, parts, wide; /* of the result; parts of the outputs, and outputs of one */
    int direct;  /* rows lie as they are read */
    Tail *tail;
    const int64_t *words;
    int failed;
} Integer;

/* One block of sums, [rows][INTEGER_WIDE], to results */
typedef struct {
    float scale[INTEGER_WIDE], shift[INTEGER_WIDE];
    int32_t term[INTEGER_WIDE], weight_zero[INTEGER_WIDE];
} Columns;

/* The nearest integer of a float within +-2^22, ties to even: in a float of that size the last bit is 1 */
INLINE float integer_round(float x) { return (x + 12582912.0f) - 12582912.0f; }
INLINE float integer_between(float x, float lo, float hi) { return x > lo ? x < hi ? x : hi : lo; } /* NaN: lo */

/* The sums of one row to results. `whole`: of INTEGER_WIDE outputs; else `count` are written. */
#if HAVE_512
INLINE __m512i integer_near(__m512 f, int32_t zero, int32_t least, int32_t largest) {
    f = _mm512_min_ps(_mm512_max_ps(f, _mm512_set1_ps((float)(least - zero))), _mm512_set1_ps((float)(largest - zero))); /* NaN: the least */
    return _mm512_cvtps_epi32(f);
}

INLINE void integer_half(const Integer *p, const Columns *k, int j, const int32_t *sums, int64_t at, __mmask16 m) {
    __m512i i = _mm512_add_epi32(_mm512_loadu_si512(sums), _mm512_loadu_si512(k->term + j));
    if (p->kind == 0) {
        _mm512_mask_storeu_epi32((int32_t *)p->out + at, m, i);
        return;
    }
    __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(i), _mm512_loadu_ps(k->scale + j));
    if (p->shifts) f = _mm512_add_ps(f, _mm512_loadu_ps(k->shift + j));
    if (p->kind == 1) {
        _mm512_mask_storeu_ps((float *)p->out + at, m, f);
        return;
    }
    i = integer_near(f, p->out_zero, p->least, p->largest);
    int32_t zero = p->out_zero;
    if (p->other) {
        __m128i other = _mm_maskz_loadu_epi8(m, p->other + at);
        __m512i o = p->other_signed ? _mm512_cvtepi8_epi32(other) : _mm512_cvtepu8_epi32(other);
        __m512 more = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(o, _mm512_set1_epi32(p->other_zero))), _mm512_set1_ps(p->other_ratio));
        f = _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(i), _mm512_set1_ps(p->ratio)), more);
        i = integer_near(f, p->sum_zero, p->sum_least, p->sum_largest), zero = p->sum_zero;
    }
    _mm_mask_storeu_epi8((uint8_t *)p->out + at, m, _mm512_cvtepi32_epi8(_mm512_add_epi32(i, _mm512_set1_epi32(zero))));
}

INLINE void integer_row(const Integer *p, const Columns *k, const int32_t *sums, int64_t at, int whole, int64_t count) {
    __mmask16 all = 0xffff, some = (__mmask16)(count < 16 ? (1 << count) - 1 : 0xffff), rest = (__mmask16)(count > 16 ? (1 << (count - 16)) - 1 : 0);
    integer_half(p, k, 0, sums, at, whole ? all : some);
    if (whole || rest) integer_half(p, k, 16, sums + 16, at + 16, whole ? all : rest);
}
#else
INLINE void integer_row(const Integer *p, const Columns *k, const int32_t *sums, int64_t at, int whole, int64_t count) {
    enum { W = INTEGER_WIDE };
    union { int32_t i[W]; float f[W]; } to;
    if (whole) count = W;
    if (p->kind == 0) {
        for (int j = 0; j < W; j++) to.i[j] = (int32_t)((uint32_t)sums[j] + (uint32_t)k->term[j]);
        memcpy((int32_t *)p->out + at, &to, (size_t)count * 4);
        return;
    }
    for (int j = 0; j < W; j++) to.f[j] = (float)(int32_t)((uint32_t)sums[j] + (uint32_t)k->term[j]) * k->scale[j];
    if (p->shifts)
        for (int j = 0; j < W; j++) to.f[j] += k->shift[j];
    if (p->kind == 1) {
        memcpy((float *)p->out + at, &to, (size_t)count * 4);
        return;
    }
    uint8_t q[W];
    float zero = (float)p->out_zero, least = (float)(p->least - p->out_zero), largest = (float)(p->largest - p->out_zero);
    if (p->other) {
        uint8_t other[W] = {0};
        memcpy(other, p->other + at, (size_t)count);
        float zo = (float)p->other_zero, ro = p->other_ratio, r = p->ratio;
        int32_t flip = p->other_signed ? 128 : 0;
        for (int j = 0; j < W; j++) {
            float first = integer_round(integer_between(to.f[j], least, largest)) * r;
            to.f[j] = first + ((float)((int32_t)(other[j] ^ flip) - flip) - zo) * ro;
        }
        zero = (float)p->sum_zero, least = (float)(p->sum_least - p->sum_zero), largest = (float)(p->sum_largest - p->sum_zero);
    }
    for (int j = 0; j < W; j++) q[j] = (uint8_t)(int32_t)(integer_round(integer_between(to.f[j], least, largest)) + zero);
    memcpy((uint8_t *)p->out + at, q, (size_t)count);
}

#endif

static void integer_rows(const Integer *p, const Columns *k, const int32_t *sums, int64_t row, int64_t rows, int64_t first, int64_t count) {
    int64_t wide = p->o * p->groups, at = row * wide + first;
    if (count == INTEGER_WIDE)
        for (int64_t r = 0; r < rows; r++, sums += INTEGER_WIDE, at += wide) integer_row(p, k, sums, at, 1, count);
    else
        for (int64_t r = 0; r < rows; r++, sums += INTEGER_WIDE, at += wide) integer_row(p, k, sums, at, 0, count);
}

/* `count` numbers, and zeros */
INLINE void integer_few(void *to, const void *from, int64_t count) {
    memset(to, 0, 4 * INTEGER_WIDE);
    if (!from) return;
    if (count == INTEGER_WIDE) memcpy(to, from, 4 * INTEGER_WIDE);
    else memcpy(to, from, (size_t)count * 4);
}

/* `count` outputs from number `at` on: scales and terms, with the zero point of the rows in the terms. `sums` are those of their weights,
 * of which a panel has 16, `panel` bytes apart. */
static void integer_columns(const Integer *p, int64_t at, int64_t count, int32_t zero, const int8_t *sums, int64_t panel, Columns *to) {
    int32_t of[INTEGER_WIDE] = {0};
    integer_few(to->term, p->terms ? p->terms + at : NULL, count);
    if (zero && sums) {
        memcpy(of, sums, 64);
        if (count > 16) memcpy(of + 16, sums + panel, 64);
        for (int j = 0; j < INTEGER_WIDE; j++) to->term[j] = (int32_t)((uint32_t)to->term[j] - (uint32_t)zero * (uint32_t)of[j]);
    }
    if (p->scale_step || !p->scales)
        integer_few(to->scale, p->scales ? p->scales + at : NULL, count);
    else
        for (int j = 0; j < INTEGER_WIDE; j++) to->scale[j] = p->scales[0];
    if (p->factor != 1)
        for (int j = 0; j < INTEGER_WIDE; j++) to->scale[j] *= p->factor;
    integer_few(to->weight_zero, p->weight_zeros ? p->weight_zeros + at : NULL, count);
    integer_few(to->shift, p->shifts ? p->shifts + at : NULL, count);
}

#include "integer_tiles.h"

/* A few bytes, of which the compiler does not know the number */
INLINE void integer_bytes(uint8_t *to, const uint8_t *from, int64_t n) {
#if HAVE_512
    for (; n > 64; n -= 64, to += 64, from += 64) _mm512_storeu_si512(to, _mm512_loadu_si512(from));
    __mmask64 m = ~(__mmask64)0 >> (64 - n);
    if (n > 0) _mm512_mask_storeu_epi8(to, m, _mm512_maskz_loadu_epi8(m, from));
#else
    memcpy(to, from, (size_t)n);
#endif
}

/* With zero points of the weights the sum of a row counts, without its own zero point */
static void integer_row_sums(const Integer *p, const uint8_t *a, int64_t lda, int64_t rows, int32_t *to) {
    for (int64_t r = 0; r < rows; r++, a += lda) {
        int32_t sum = 0;
        if (p->is_signed)
            for (int64_t k = 0; k < p->deep; k++) sum += (int8_t)a[k];
        else
            for (int64_t k = 0; k < p->deep; k++) sum += a[k];
        to[r] = (int32_t)((uint32_t)sum - (uint32_t)p->zero * (uint32_t)p->deep);
    }
}

static void integer_less(const Columns *k, const int32_t *row_sums, int64_t rows, int32_t *sums) {
    for (int64_t r = 0; r < rows; r++, sums += INTEGER_WIDE)
        for (int j = 0; j < INTEGER_WIDE; j++) sums[j] = (int32_t)((uint32_t)sums[j] - (uint32_t)row_sums[r] * (uint32_t)k->weight_zero[j]);
}

/* A strip of rows of group `g`, copied: for each tap the channels of its pixel, or the zero point where there is none */
static void integer_copy(const Integer *p, int64_t g, int64_t first, int64_t rows, uint8_t *to) {
    int64_t pixel = p->c * p->groups, line = p->wd * pixel, taps = p->kw * p->c;
    int together = p->groups == 1 && p->dw == 1;
    for (int64_t r = 0; r < rows; r++, to += p->depth) {
        int64_t image = (first + r) / (p->oh * p->ow), at = (first + r) % (p->oh * p->ow);
        int64_t y0 = at / p->ow * p->sh - p->top, x0 = at % p->ow * p->sw - p->left;
        const uint8_t *from = p->x + image * p->h * line + g * p->c;
        uint8_t *put = to;
        for (int64_t i = 0; i < p->kh; i++, put += taps) {
            int64_t y = y0 + i * p->dh;
            if (y < 0 || y >= p->h) {
                memset(put, (uint8_t)p->zero, (size_t)taps);
            } else if (together && x0 >= 0 && x0 + p->kw <= p->wd) {
                integer_bytes(put, from + y * line + x0 * pixel, taps);
            } else {
                for (int64_t j = 0; j < p->kw; j++) {
                    int64_t x = x0 + j * p->dw;
                    if (x < 0 || x >= p->wd)
                        memset(put + j * p->c, (uint8_t)p->zero, (size_t)p->c);
                    else
                        integer_bytes(put + j * p->c, from + y * line + x * pixel, p->c);
                }
            }
        }
        memset(put, 0, (size_t)(p->depth - p->deep));
    }
}

/* What is read from operands: in bodies alone, as a kernel may be asked for its scratch without any */
static void integer_read(Integer *p) {
    if (p->words[3]) p->zero = p->is_signed ? *PTR(const int8_t, p->words[3]) : *PTR(const uint8_t, p->words[3]);
    if (p->words[8]) p->factor = *PTR(const float, p->words[8]);
}

static void integer_strips(void *ctx, int64_t begin, int64_t end) {
    Integer own = *(Integer *)ctx, *p = &own;
    size_t sums = sizeof(int32_t) * STRIP * INTEGER_WIDE;
#if INTEGER_WIDENS
    uint8_t *room = scratch(sums + (size_t)(3 * STRIP * p->depth) + INTEGER_DEEP);
    int16_t *wide = (int16_t *)(room + sums + STRIP * p->depth);
#else
    uint8_t *room = scratch(sums + (size_t)(STRIP * p->depth) + INTEGER_DEEP);
#endif
    if (!room) {
        if (begin < end) ((Integer *)ctx)->failed = 1;
        return;
    }
    if (begin < end) integer_read(p);
    Columns columns;
    int32_t row_sums[STRIP];
    INTEGER_BEGIN
    for (int64_t i = begin, copied = -1; i < end; i++) {
        int64_t strip = i / p->parts, part = i % p->parts, g = strip / p->strips, first = strip % p->strips * STRIP;
        int64_t rows = p->rows - first < STRIP ? p->rows - first : STRIP, lda = p->direct ? p->c * p->groups : p->depth;
        const uint8_t *a = p->direct ? p->x + first * lda + g * p->c : room + sums;
        if (!p->direct && copied != strip) integer_copy(p, g, first, rows, room + sums);
        if (p->weight_zeros && copied != strip) integer_row_sums(p, a, lda, rows, row_sums);
#if INTEGER_WIDENS
        if (copied != strip) integer_widen(p, a, lda, rows, wide);
        a = (const uint8_t *)wide, lda = p->depth;
#endif
        copied = strip;
        int64_t stop = p->o - part * p->wide < p->wide ? p->o : (part + 1) * p->wide;
        for (int64_t j = part * p->wide; j < stop; j += INTEGER_WIDE) {
            int64_t count = stop - j < INTEGER_WIDE ? stop - j : INTEGER_WIDE;
            const int8_t *w = p->w + (g * up_div(p->o, 16) + j / 16) * (p->depth + 4) * 16;
            integer_columns(p, g * p->o + j, count, p->zero + INTEGER_FLIP(p), w + p->depth * 16, (p->depth + 4) * 16, &columns);
            integer_block(p, a, lda, rows, count, w, (int32_t *)room);
            if (p->weight_zeros) integer_less(&columns, row_sums, rows, (int32_t *)room);
            integer_rows(p, &columns, (int32_t *)room, first, rows, g * p->o + j, count);
        }
        if (p->tail && p->parts == 1 && p->groups == 1) vm_part_f32(p->tail, (float *)p->out + first * p->o, rows, p->o, p->o);
    }
    INTEGER_END
}

/* Filters of one channel each: w is [taps][channels] */
static void integer_depthwise(void *ctx, int64_t begin, int64_t end) {
    Integer own = *(Integer *)ctx, *p = &own;
    if (begin < end) integer_read(p);
    int64_t c = p->groups, line = p->wd * c;
    for (int64_t row = begin; row < end; row++) {
        int64_t image = row / (p->oh * p->ow), at = row % (p->oh * p->ow);
        int64_t y0 = at / p->ow * p->sh - p->top, x0 = at % p->ow * p->sw - p->left;
        for (int64_t first = 0; first < c; first += INTEGER_WIDE) {
            int64_t count = c - first < INTEGER_WIDE ? c - first : INTEGER_WIDE;
            int32_t sums[INTEGER_WIDE] = {0};
            Columns columns;
            integer_columns(p, first, count, 0, NULL, 0, &columns);
            for (int64_t i = 0; i < p->kh; i++) {
                int64_t y = y0 + i * p->dh;
                for (int64_t k = 0; k < p->kw && y >= 0 && y < p->h; k++) {
                    int64_t x = x0 + k * p->dw;
                    if (x < 0 || x >= p->wd) continue;
                    const uint8_t *from = p->x + image * p->h * line + y * line + x * c + first;
                    const int8_t *w = p->w + (i * p->kw + k) * c + first;
                    int32_t flip = p->is_signed ? 128 : 0, zero = p->zero + flip;
                    for (int64_t j = 0; j < count; j++) sums[j] += ((from[j] ^ flip) - zero) * (w[j] - columns.weight_zero[j]);
                }
            }
            integer_rows(p, &columns, sums, row, 1, first, count);
        }
    }
}

static void integer_tail(void *ctx, int64_t begin, int64_t end) {
    const Integer *p = ctx;
    int64_t wide = p->o * p->groups;
    if (begin < end) vm_part_f32(p->tail, (float *)p->out + begin * wide, end - begin, wide, wide);
}

static void integer(const int64_t *a, Team *team) {
    Integer p = {.words = a,
                 .x = PTR(const uint8_t, a[0]), .is_signed = (int32_t)a[1], .zero = (int32_t)a[2], .w = PTR(const int8_t, a[4]),
                 .terms = PTR(const int32_t, a[5]), .scales = PTR(const float, a[6]), .scale_step = a[7] > 1, .factor = 1,
                 .shifts = PTR(const float, a[9]), .out = PTR(void, a[10]), .kind = (int32_t)a[11], .out_zero = (int32_t)a[12],
                 .least = (int32_t)a[13], .largest = (int32_t)a[14], .other = PTR(const uint8_t, a[15]), .other_signed = (int32_t)a[16],
                 .other_zero = (int32_t)a[17], .other_ratio = (float)as_double(a[18]), .ratio = (float)as_double(a[19]),
                 .sum_zero = (int32_t)a[20], .sum_least = (int32_t)a[21], .sum_largest = (int32_t)a[22], .n = a[23], .h = a[24],
                 .wd = a[25], .c = a[26], .o = a[27], .groups = a[28], .kh = a[29], .kw = a[30], .sh = a[31], .sw = a[32], .dh = a[33],
                 .dw = a[34], .top = a[35], .left = a[36], .oh = a[37], .ow = a[38], .weight_zeros = PTR(const int32_t, a[39])};
    Tail tail;
    p.tail = tail_of(a[40], a[10], VM_BYTES / sizeof(float), &tail);
    p.rows = p.n * p.oh * p.ow;
    if (p.rows < 1 || p.o < 1 || p.groups < 1) return;
    p.deep = p.kh * p.kw * p.c;
    double work = (double)p.rows * (double)p.o * (double)p.groups * (double)(p.deep + 16);
    if (p.groups > 1 && p.c == 1 && p.o == 1) {
        parallel_for(team, p.rows, (int64_t)(5e4 / ((double)p.groups * (double)p.deep)) + 1, integer_depthwise, &p);
    } else {
        p.depth = up_div(p.deep, INTEGER_DEEP) * INTEGER_DEEP;
        p.direct = p.kh == 1 && p.kw == 1 && p.sh == 1 && p.sw == 1 && !a[35] && !a[36] && p.oh == p.h && p.ow == p.wd && p.c % INTEGER_ALIGN == 0 && p.c > 0;
        p.strips = up_div(p.rows, STRIP), p.parts = 1;
        int64_t blocks = up_div(p.o, INTEGER_WIDE), items = p.strips * p.groups;
        if (team->threads > 1 && !p.tail && items < 4 * team->threads && work > 4 * INTEGER_GRAIN) {
            p.parts = up_div(4 * team->threads, items);
            if (p.parts > blocks) p.parts = blocks;
        }
        p.wide = up_div(blocks, p.parts) * INTEGER_WIDE;
        p.parts = up_div(p.o, p.wide);
        items *= p.parts;
        parallel_for(team, items, (int64_t)(INTEGER_GRAIN * (double)items / work) + 1, integer_strips, &p);
    }
    if (p.tail && (p.groups > 1 || p.parts > 1)) parallel_for(team, p.rows, STRIP, integer_tail, &p);
    tail_done(p.tail, team);
    if (p.failed) team->error = "out of memory";
}
