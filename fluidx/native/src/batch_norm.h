/* batch_norm and its gradient in few passes over memory.
 *
 * In NCHW a block of channels of all images stays in the second-level cache: it is read from memory once, for its mean, then its squared
 * deviations from that, then its result. In NHWC the rows are cut into parts; each block of rows gives a mean and squared deviations while
 * it is in the first-level cache, which are joined in double precision (Chan, Golub and LeVeque, 1979), and a second pass makes the
 * result. Parts and blocks follow from the shape.
 *
 * words of batch_norm: x, y, scale, bias, mean, variance, the addresses of MeanOut, VarianceOut, SavedMean and SavedVariance or 0, images,
 * channels, pixels (NHWC: rows, channels, 0), 1 where mean and variance are given ones, momentum, epsilon, scratch, a tail for y or 0.
 * words of batch_norm_grad: x, gradient of y, of x, scale, saved mean, saved 1 / deviation, gradients of scale and bias, images, channels,
 * pixels, 1 where the statistics are given ones, scratch */

enum { BN_WORDS = 18, BN_GRAD_WORDS = 13, BN_LANES = 32, BN_ROWS = 16, BN_PARTS = 16 };

/* Into how many parts rows are cut; the scratch of NHWC, in ops/nn/batch_norm.py, is three doubles a channel and part. */
INLINE int64_t bn_parts(int64_t rows) { return rows < BN_ROWS * BN_PARTS ? 1 : BN_PARTS; }

#define T float
#define TFN(name) name##_f32
#define S float
#define LOAD(x) (x)
#define STORE(x) (x)
#define FN(name) name##_f32
#include "batch_norm_body.h"
#undef S
#undef LOAD
#undef STORE
#undef FN

#define S uint16_t
#define LOAD(x) float_of_f16(x)
#define STORE(x) f16_of_float(x)
#define FN(name) name##_f16
#include "batch_norm_body.h"
#undef LOAD
#undef STORE
#undef FN

#define LOAD(x) float_of_bf16(x)
#define STORE(x) bf16_of_float(x)
#define FN(name) name##_bf16
#include "batch_norm_body.h"
#undef T
#undef TFN
#undef S
#undef LOAD
#undef STORE
#undef FN

#define T double
#define TFN(name) name##_f64
#define S double
#define LOAD(x) (x)
#define STORE(x) (x)
#define FN(name) name##_f64
#include "batch_norm_body.h"
#undef T
#undef TFN
#undef S
#undef LOAD
#undef STORE
#undef FN
