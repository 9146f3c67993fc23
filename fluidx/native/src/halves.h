/* float16 and bfloat16 as float and back, rounded to the nearest, ties to even: by bits and without branches, so that loops over them
 * become vector instructions. A NaN stays one, made quiet; that of bfloat16 keeps its sign alone, as in ml_dtypes. */

INLINE uint32_t word_of(float x) { return (uint32_t)bits_of(x); }
INLINE float float_of_word(uint32_t u) { return float_of((int32_t)u); }

INLINE float float_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, a = h & 0x7FFF;
    uint32_t normal = (a << 13) + (112u << 23); /* the exponents count from 15 and from 127 */
    uint32_t special = (a << 13) | 0x7F800000u | (a > 0x7C00 ? 0x400000u : 0);
    uint32_t small = word_of((float)(int32_t)a * 0x1p-24f);
    return float_of_word(sign | (a < 0x400 ? small : a < 0x7C00 ? normal : special));
}

INLINE uint16_t f16_of_float(float x) {
    uint32_t u = word_of(x), a = u & 0x7FFFFFFFu;
    uint32_t normal = (a - (112u << 23) + 0xFFF + (a >> 13 & 1)) >> 13; /* what is rounded up beyond the largest becomes infinity */
    uint32_t small = word_of(float_of_word(a) + 0.5f) - 0x3F000000u;    /* the last bit of 0.5 is the smallest half */
    uint32_t special = a > 0x7F800000u ? 0x7E00 | (a >> 13 & 0x1FF) : 0x7C00;
    return (uint16_t)((u >> 16 & 0x8000) | (a < 0x38800000u ? small : a < 0x47800000u ? normal : special));
}

INLINE float float_of_bf16(uint16_t h) { return float_of_word((uint32_t)h << 16); }

INLINE uint16_t bf16_of_float(float x) {
    uint32_t u = word_of(x), rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
    return (uint16_t)((u & 0x7FFFFFFFu) > 0x7F800000u ? (u >> 16 & 0x8000) | 0x7FC0 : rounded);
}

/* Lines of them. The processor's own conversions of float16 give the same bits; those of bfloat16 make a subnormal number zero. */
static inline void line_of_f16_f32(float *to, const uint16_t *from, int64_t n) {
    int64_t c = 0;
#ifdef HAVE_F16C
    for (; c + 8 <= n; c += 8) _mm256_storeu_ps(to + c, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + c))));
#endif
    IVDEP for (int64_t k = c; k < n; k++) to[k] = float_of_f16(from[k]);
}
static inline void f16_of_line_f32(uint16_t *to, const float *from, int64_t n) {
    int64_t c = 0;
#ifdef HAVE_F16C
    for (; c + 8 <= n; c += 8) _mm_storeu_si128((__m128i *)(to + c), _mm256_cvtps_ph(_mm256_loadu_ps(from + c), _MM_FROUND_TO_NEAREST_INT));
#endif
    IVDEP for (int64_t k = c; k < n; k++) to[k] = f16_of_float(from[k]);
}
static inline void line_of_bf16_f32(float *to, const uint16_t *from, int64_t n) {
    IVDEP for (int64_t k = 0; k < n; k++) to[k] = float_of_bf16(from[k]);
}
static inline void bf16_of_line_f32(uint16_t *to, const float *from, int64_t n) {
    IVDEP for (int64_t k = 0; k < n; k++) to[k] = bf16_of_float(from[k]);
}

/* The same for double, through float */
static inline void line_of_f16_f64(double *to, const uint16_t *from, int64_t n) {
    IVDEP for (int64_t k = 0; k < n; k++) to[k] = float_of_f16(from[k]);
}
static inline void f16_of_line_f64(uint16_t *to, const double *from, int64_t n) {
    IVDEP for (int64_t k = 0; k < n; k++) to[k] = f16_of_float((float)from[k]);
}
static inline void line_of_bf16_f64(double *to, const uint16_t *from, int64_t n) {
    IVDEP for (int64_t k = 0; k < n; k++) to[k] = float_of_bf16(from[k]);
}
static inline void bf16_of_line_f64(uint16_t *to, const double *from, int64_t n) {
    IVDEP for (int64_t k = 0; k < n; k++) to[k] = bf16_of_float((float)from[k]);
}

/* In which type the elements of an operand lie in memory, beside the one that a kernel computes in: 2 bits of a word for each operand */
enum { PLAIN, FLOAT16, BFLOAT16 };
#define FORMAT(formats, k) ((int)((formats) >> 2 * (k) & 3))
#define FORMATS(T, FN)                                                                                                                  \
    /* n elements of an operand in a kernel's own type */                                                                               \
    static inline void FN(widen)(int format, T *to, const void *from, int64_t n) {                                                             \
        if (format == FLOAT16)                                                                                                          \
            FN(line_of_f16)(to, from, n);                                                                                               \
        else if (format == BFLOAT16)                                                                                                    \
            FN(line_of_bf16)(to, from, n);                                                                                              \
        else                                                                                                                            \
            memcpy(to, from, (size_t)n * sizeof(T));                                                                                    \
    }                                                                                                                                   \
    static inline void FN(narrow)(int format, void *to, const T *from, int64_t n) {                                                            \
        if (format == FLOAT16)                                                                                                          \
            FN(f16_of_line)(to, from, n);                                                                                               \
        else if (format == BFLOAT16)                                                                                                    \
            FN(bf16_of_line)(to, from, n);                                                                                              \
        else                                                                                                                            \
            memcpy(to, from, (size_t)n * sizeof(T));                                                                                    \
    }                                                                                                                                   \
    static inline T FN(element)(int format, const void *at, int64_t k) {                                                                \
        return format == FLOAT16    ? (T)float_of_f16(((const uint16_t *)at)[k])                                                        \
               : format == BFLOAT16 ? (T)float_of_bf16(((const uint16_t *)at)[k])                                                       \
                                    : ((const T *)at)[k];                                                                               \
    }                                                                                                                                   \
    static inline void FN(put_element)(int format, void *at, int64_t k, T x) {                                                          \
        if (format)                                                                                                                     \
            ((uint16_t *)at)[k] = format == FLOAT16 ? f16_of_float((float)x) : bf16_of_float((float)x);                                 \
        else                                                                                                                            \
            ((T *)at)[k] = x;                                                                                                           \
    }
#define FN(name) name##_f32
FORMATS(float, FN)
#undef FN
#define FN(name) name##_f64
FORMATS(double, FN)
#undef FN
#undef FORMATS
