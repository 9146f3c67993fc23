/* Pooling of images and its gradient. In NCHW items are planes, in NHWC images, of which rows of channels are worked on.
 *
 * A maximum keeps NaN. Its gradient goes to the first element of a window, in row order, that equals the output. Choices are made on
 * bits: which element is the largest is nothing that a branch could be predicted by.
 *
 * words: x, y, gradients of y and of x or 0, N, C, height and width of the image, of the window, strides, padding above and to the left,
 * height and width of the outputs, NHWC (0 or 1), mean (0 or 1), whether a mean counts pixels of the image alone */

enum { POOL_WORDS = 19, POOL_ROOM = 2048, POOL_LANES = 16 };

typedef struct {
    int64_t n, c, h, w, kh, kw, sh, sw, top, left, oh, ow, nhwc, mean, exclusive;
    const void *x, *y, *g;
    void *out;
    int failed;
} Pool;

INLINE Pool pool_of(const int64_t *a) {
    return (Pool){a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18],
                  PTR(void, a[0]), PTR(void, a[1]), PTR(void, a[2]), PTR(void, a[3]), 0};
}

/* The taps of window `k` of an axis that lie inside the image: [lo, hi). */
INLINE void pool_taps(int64_t k, int64_t stride, int64_t before, int64_t window, int64_t size, int64_t *lo, int64_t *hi) {
    *lo = at_least(0, before - k * stride), *hi = at_most(window, size + before - k * stride);
}

/* The windows that find tap `k` of an axis inside the image: [lo, hi). */
INLINE void pool_windows(int64_t k, int64_t stride, int64_t before, int64_t size, int64_t out, int64_t *lo, int64_t *hi) {
    *lo = k < before ? up_div(before - k, stride) : 0;
    *hi = at_most(out, size + before > k ? (size - 1 + before - k) / stride + 1 : 0);
}

#define T float
#define I int32_t
#define FN(name) name##_f32
#include "pool2d_body.h"
#undef T
#undef I
#undef FN

#define T double
#define I int64_t
#define FN(name) name##_f64
#include "pool2d_body.h"
#undef T
#undef I
#undef FN
