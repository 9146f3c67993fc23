/* Transcendental functions of float32 without branches, so that loops over them become vector instructions.
 *
 * Polynomials are minimax fits of the relative error (Lawson's reweighted least squares over Chebyshev points), each below a tenth of a
 * unit in the last place before rounding. NaN passes every clamp, since a comparison with NaN is false. MAD is one rounding where the
 * level has FMA and two in the baseline: the same within an ulp. */

#if defined(HAVE_FMA) || defined(__ARM_FEATURE_FMA)
#define MAD(a, b, c) __builtin_fmaf(a, b, c)
#else
#define MAD(a, b, c) ((a) * (b) + (c))
#endif

INLINE float float_of(int32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
INLINE int32_t bits_of(float f) {
    int32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}
INLINE float with_sign_of(float magnitude, float x) { return float_of(bits_of(magnitude) | (bits_of(x) & INT32_MIN)); }

/* 2^n as a factor, for -126 <= n <= 127 */
INLINE float power_of_2(int32_t n) { return float_of((int32_t)((uint32_t)(n + 127) << 23)); }

/* e^x = 2^n (1 + r + r^2 q(r)): sets n, returns the bracket. Adding 1.5 * 2^23 rounds to a whole number, held in the low bits. */
INLINE float exp_parts(float x, int32_t *n) {
    float shifted = MAD(x, 1.44269504f, 12582912.0f), whole = shifted - 12582912.0f;
    *n = bits_of(shifted) - 0x4B400000;
    float r = MAD(whole, -0.693359375f, x); /* log 2 in two parts, the first short enough that its product is exact */
    r = MAD(whole, 2.12194440e-4f, r);
    float q = MAD(1.3813144e-3f, r, 8.369419e-3f);
    q = MAD(q, r, 4.1668456e-2f);
    q = MAD(q, r, 0.16666515f);
    q = MAD(q, r, 0.49999994f);
    return MAD(q, r * r, r) + 1.0f;
}

INLINE float exp_f32(float x0) {
    float x = x0 < -104.0f ? 0.0f : x0; /* not -104: making a denormal number takes some processors a hundred cycles */
    x = x > 89.0f ? 89.0f : x;
    int32_t n;
    float p = exp_parts(x, &n);
    int32_t half = n >> 1; /* two factors reach the denormal numbers and infinity */
    float y = p * power_of_2(half) * power_of_2(n - half);
    return x0 != x0 ? x0 : x0 < -104.0f ? 0.0f : y;
}

/* Of x about 0 or less, the logarithm of a weight: one of no normal number is 0. */
INLINE float exp_weight_f32(float x0) {
    int32_t n;
    float p = exp_parts(x0 < -87.0f ? 0.0f : x0, &n);
    return x0 < -87.0f ? 0.0f : p * power_of_2(n);
}

INLINE float tanh_f32(float x) {
    float a = fabsf(x), u = a < 0.6f ? x * x : 0.0f;
    float p = MAD(-5.8951555e-3f, u, 2.079597e-2f);
    p = MAD(p, u, -5.378383e-2f);
    p = MAD(p, u, 0.13331924f);
    p = MAD(p, u, -0.333333f);
    float small = MAD(x * u, p, x);
    int32_t n;
    float far = a > 10.0f ? 10.0f : a, e = exp_parts(far + far, &n);
    float large = 1.0f - 2.0f / MAD(e, power_of_2(n), 1.0f);
    return a < 0.6f ? small : with_sign_of(large, x);
}

INLINE float erf_f32(float x) {
    float a = fabsf(x), u = a < 0.9f ? x * x : 0.0f;
    float p = MAD(-6.0903595e-4f, u, 5.0119627e-3f);
    p = MAD(p, u, -2.6778908e-2f);
    p = MAD(p, u, 0.11282141f);
    p = MAD(p, u, -0.37612525f);
    p = MAD(p, u, 0.12837915f);
    float small = MAD(x, p, x);
    float b = a > 4.0f ? 4.0f : a; /* log erfc; erf rounds to 1 before 4 */
    float q = MAD(1.9822002e-4f, b, -3.0654937e-3f);
    q = MAD(q, b, 2.2315225e-2f);
    q = MAD(q, b, -0.1041137f);
    q = MAD(q, b, -0.63697606f);
    q = MAD(q, b, -1.1277972f);
    q = MAD(q, b, -1.6644476e-4f);
    int32_t n;
    float e = exp_parts(q, &n);
    float large = 1.0f - e * power_of_2(n);
    return a < 0.9f ? small : with_sign_of(large, x);
}

/* log(u + c), where c is what rounding took from u: with u = 2^k (1 + m), k log 2 + m - m^2 / 2 + m^3 p(m) */
INLINE float log_sum(float u0, float c) {
    int tiny = u0 < FLT_MIN;
    float u = tiny ? u0 * 8388608.0f : u0;
    int32_t bits = bits_of(u), k = (int32_t)((uint32_t)bits - 0x3f3504f3u) >> 23; /* m in sqrt(1/2) - 1 ... sqrt(2) - 1 */
    float m = float_of((int32_t)((uint32_t)bits - ((uint32_t)k << 23))) - 1.0f;
    m = MAD(c, power_of_2(k > 126 ? -126 : -k), m);
    float e = (float)k - (tiny ? 23.0f : 0.0f);
    float p = MAD(-7.635633e-2f, m, 0.12763318f);
    p = MAD(p, m, -0.13160586f);
    p = MAD(p, m, 0.14201555f);
    p = MAD(p, m, -0.16623299f);
    p = MAD(p, m, 0.20001233f);
    p = MAD(p, m, -0.25000823f);
    p = MAD(p, m, 0.3333333f);
    float m2 = m * m, y = MAD(e, -2.12194440e-4f, m * m2 * p);
    y = MAD(m2, -0.5f, y) + m;
    y = MAD(e, 0.693359375f, y);
    y = u0 == INFINITY ? u0 : y;
    y = u0 == 0.0f ? -INFINITY : y;
    y = u0 < 0.0f ? NAN : y;
    return u0 != u0 ? u0 : y;
}

INLINE float log_f32(float x) { return log_sum(x, 0.0f); }

INLINE float log1p_f32(float x) {
    float u = 1.0f + x, c = x - (u - 1.0f);
    float y = log_sum(u, u <= FLT_MAX && u > 0.0f ? c : 0.0f);
    return x == 0.0f ? x : y;
}

INLINE float sigmoid_f32(float x) {
    float e = exp_f32(-fabsf(x));
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

INLINE float softplus_f32(float x) { return (x > 0.0f ? x : 0.0f) + log1p_f32(exp_f32(-fabsf(x))); }

INLINE float sqrt_f32(float x) { return sqrtf(x); }
INLINE float abs_f32(float x) { return fabsf(x); }
INLINE float floor_f32(float x) { return floorf(x); }
INLINE float ceil_f32(float x) { return ceilf(x); }
INLINE float round_f32(float x) { return rintf(x); }

/* float64: the C library's */
INLINE double exp_f64(double x) { return exp(x); }
INLINE double exp_weight_f64(double x) { return exp(x); }
INLINE double log_f64(double x) { return log(x); }
INLINE double log1p_f64(double x) { return log1p(x); }
INLINE double tanh_f64(double x) { return tanh(x); }
INLINE double erf_f64(double x) { return erf(x); }
INLINE double sqrt_f64(double x) { return sqrt(x); }
INLINE double abs_f64(double x) { return fabs(x); }
INLINE double floor_f64(double x) { return floor(x); }
INLINE double ceil_f64(double x) { return ceil(x); }
INLINE double round_f64(double x) { return rint(x); }
INLINE double sigmoid_f64(double x) {
    double e = exp(-fabs(x));
    return (x < 0.0 ? e : 1.0) / (1.0 + e);
}
INLINE double softplus_f64(double x) { return (x > 0.0 ? x : 0.0) + log1p(exp(-fabs(x))); }
