/* Dropout by the counter-based numbers of ops/shared/random_numbers.py: Philox4x64-10 (Salmon, Moraes, Dror and Shaw, SC 2011) with the
 * key (seed, step), whose block k + 1 holds words 4k to 4k + 3; element i is dropped when 16-bit lane i lies below a limit. */

INLINE void multiply(uint64_t a, uint64_t b, uint64_t *high, uint64_t *low) {
#if defined(__SIZEOF_INT128__)
    unsigned __int128 product = (unsigned __int128)a * b;
    *high = (uint64_t)(product >> 64), *low = (uint64_t)product;
#else
    uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32, t = a0 * b0;
    uint64_t mid = a1 * b0 + (t >> 32), mid2 = a0 * b1 + (uint32_t)mid;
    *high = a1 * b1 + (mid >> 32) + (mid2 >> 32), *low = mid2 << 32 | (uint32_t)t;
#endif
}

INLINE void philox(uint64_t block, uint64_t seed, uint64_t step, uint64_t *words) {
    uint64_t c0 = block + 1, c1 = 0, c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t high0, low0, high1, low1;
        multiply(0xD2E7470EE14C6C93, c0, &high0, &low0);
        multiply(0xCA5A826395121157, c2, &high1, &low1);
        c0 = high1 ^ c1 ^ seed, c1 = low1, c2 = high0 ^ c3 ^ step, c3 = low0;
        seed += 0x9E3779B97F4A7C15, step += 0xBB67AE8584CAA73B;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

enum { DROPOUT_WORDS = 9, DROPOUT_ITEM = 1024 };

/* x, out, mask (addresses, the last 0 for none), elements, number of the first one, seed, address of the step, limit, scale */
#define DROPOUT(T, S, LOAD, STORE, NAME)                                                                                                \
    static void NAME##_range(void *ctx, int64_t begin, int64_t end) {                                                                   \
        const int64_t *a = ctx;                                                                                                         \
        const S *x = PTR(const S, a[0]);                                                                                                \
        S *out = PTR(S, a[1]);                                                                                                          \
        T scale = (T)as_double(a[8]);                                                                                                   \
        uint8_t *mask = PTR(uint8_t, a[2]);                                                                                             \
        uint64_t words[DROPOUT_ITEM / 4 + 4], step = *PTR(const uint64_t, a[6]);                                                        \
        for (int64_t item = begin; item < end; item++) {                                                                                \
            int64_t at = item * DROPOUT_ITEM, n = a[3] - at < DROPOUT_ITEM ? a[3] - at : DROPOUT_ITEM, skip = (a[4] + at) % 16;         \
            for (int64_t k = 0; k * 16 < skip + n; k++) philox((uint64_t)((a[4] + at) / 16 + k), (uint64_t)a[5], step, words + 4 * k);  \
            uint16_t lanes[DROPOUT_ITEM + 16];                                                                                          \
            for (int64_t k = 0; k < (skip + n + 3) / 4; k++)                                                                            \
                for (int j = 0; j < 4; j++) lanes[4 * k + j] = (uint16_t)(words[k] >> 16 * j);                                          \
            for (int64_t i = 0; i < n; i++) {                                                                                           \
                uint8_t kept = lanes[skip + i] >= a[7];                                                                                 \
                if (mask) mask[at + i] = kept;                                                                                          \
                out[at + i] = STORE(LOAD(x[at + i]) * (T)kept * scale);                                                                 \
            }                                                                                                                           \
        }                                                                                                                               \
    }                                                                                                                                   \
    static void NAME(const int64_t *a, Team *team) {                                                                                    \
        parallel_for(team, (a[3] + DROPOUT_ITEM - 1) / DROPOUT_ITEM, 4, NAME##_range, (void *)(intptr_t)a);                             \
    }
#define AS_IT_IS(x) (x)
DROPOUT(float, float, AS_IT_IS, AS_IT_IS, dropout_f32)
DROPOUT(float, uint16_t, float_of_f16, f16_of_float, dropout_f16)
DROPOUT(float, uint16_t, float_of_bf16, bf16_of_float, dropout_bf16)
DROPOUT(double, double, AS_IT_IS, AS_IT_IS, dropout_f64)
#undef AS_IT_IS
#undef DROPOUT
