/* Convolutions of images with filters, and their gradients, in two dimensions.
 *
 * Three products: forward gives the outputs, back the gradient of the image, filter that of the filter. Each is computed in one of several
 * ways, which Python chooses by the shape (ops/nn/conv_native.py):
 *
 * - Winograd F(2x2, 3x3): 3x3 filters at stride 1. Tiles of 4x4 pixels become 16 matrices of tiles by channels, whose products with 16
 *   transformed filters give tiles of 2x2 outputs: 2.25 times fewer multiplications. All factors are 0, 1, 1/2 and 1/4, and sums are
 *   taken in short chains: outputs are as accurate as sums taken directly (benchmarks/winograd.py). Source: Lavin and Gray, "Fast
 *   algorithms for convolutional neural networks", 2016. The gradient of the filter comes from the same transforms, transposed.
 * - Winograd F(4x4, 3x3), where FLUIDX_WINOGRAD asks for it, forward and back: 4 times fewer multiplications, three times the error.
 * - Pixels, for filters of one: an image is a matrix, and one product goes straight from it to the result (conv_pixel_body.h).
 * - Shifted products: an image is laid out pixel by pixel with its padding, and every tap of the filter is a product with the same
 *   pixels moved, read in place. At stride s the pixels are dealt out to s x s planes first, so that each tap finds its pixels next to
 *   each other. The gradient of the image at stride s is s x s such convolutions of the gradient, each with the taps that reach it.
 * - Columns (im2col) in rows of pixels: forward in NCHW, where shifted products would have to turn images, and for groups. They are made a
 *   few at a time, and multiplied while they are in the first-level cache.
 * - Directly, for depthwise convolutions.
 * - Outputs of few channels, or few outputs, need neither products nor columns (conv_few_body.h).
 *
 * The pieces of work are images, their rows and outputs, cut in one place for pixels and columns (conv_pieces_body.h). They depend on shapes
 * alone where a BLAS multiplies; our own `product` sums an output in the same order in every cut, and the number of threads counts too. Images are transposed one at a time, in cache. For gradients of filters, Winograd's products and the shifted ones use
 * the BLAS, if there is one, in blocks of about 64 x 64 x 128, which OpenBLAS multiplies without copying them first.
 *
 * words: image, filter (O, C / groups, height, width), outputs, N, C, O, groups, height and width of the image, of the filter, strides,
 * dilations, padding above and to the left, height and width of the outputs, NHWC (0 or 1), the way, address of scratch; forward and back a tail for what is made, or 0 */

enum { CONV_WORDS = 22 };
enum { WINOGRAD = 0, WINOGRAD_4 = 1, SHIFTED = 2, PIXEL = 3, COLUMNS = 4, DIRECT = 5, FEW = 6 };
enum { PANEL = 64, ROWS = 120, DEPTH = 128, CHAIN = 32, TILES = 64, TILE_LANES = 16, SPREAD = 80, MOST_TAPS = 128, MOST_GRIDS = 16 };
enum { DIRECT_ROWS = 4 }; /* of results, whose sums registers hold */
enum { PIXEL_WIDE = 512 }; /* pixels that are fetched and multiplied at a time */
/* Of a piece: pixels next to each other at least, in NCHW and in NHWC; multiplications at least; and how many pieces are wanted at most */
enum { PIECE_COLUMNS = 192, PIECE_ROWS = 384, PIECE_LEAST = 10000000, MOST_PIECES = 8, PIECE_SMALL = 1500000 };
/* Columns that are made at a time: rows, so few that `product` reads them in place, and elements of results that are worked on meanwhile */
enum { COLUMN_ROWS = 256, COLUMN_RESULTS = 1 << 17 };
enum { BAND_BYTES = 512 << 10 }; /* of pixels and results of a band of rows, for Winograd */
#if HAVE_FMA
#define COLUMN_WIDTH (128 / (int64_t)sizeof(T))
#else
#define COLUMN_WIDTH PANEL
#endif

typedef struct {
    int64_t n, c, o, groups, h, w, kh, kw, sh, sw, dh, dw, top, left, oh, ow, nhwc, way;
} Conv;

INLINE Conv conv_of(const int64_t *a) {
    return (Conv){a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18], a[19], a[20]};
}


/* Threads for whom work may be cut as they like it: one where a BLAS multiplies, which may round as the shape of a piece has it, while our
 * own `product` gives every cut the same bits. */
#if HAVE_FMA
#define SHARERS(team) ((team)->threads)
#else
#define SHARERS(team) 1
#endif

/* Pieces that so many multiplications are worth; each of the threads gets one even if they are small. */
INLINE int64_t pieces_wanted(int64_t multiplications, int threads) {
    int64_t most = at_most(MOST_PIECES, multiplications / PIECE_LEAST);
    return threads > 1 ? at_least(most, at_most(threads, multiplications / PIECE_SMALL)) : most;
}

/* Into how many parts the batch is cut where each part sums a gradient of the filter of its own; as in conv_native.py. */
INLINE int64_t conv_parts(int64_t n, int64_t bytes) {
    int64_t parts = bytes > (8 << 20) ? 2 : bytes > (2 << 20) ? 4 : 8;
    return at_most(parts, at_least(n, 1));
}

#if HAVE_FMA
#define FETCH(at) __builtin_prefetch(at, 0, 2)
#else
#define FETCH(at) (void)(at)
#endif

/* Sums that registers hold: of pixels with outputs as lanes, or of outputs with pixels as lanes */
#define FEW_EACH_OUTPUT(X, v) X(1, v) X(2, v) X(3, v) X(4, v) X(5, v) X(6, v)
#if HAVE_512
enum { FEW_PIXELS = 10, FEW_OUTPUTS = 6, FEW_VECTORS = 2 };
#define FEW_EACH_PIXEL(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10)
#else
enum { FEW_PIXELS = 6, FEW_OUTPUTS = 6, FEW_VECTORS = 1 };
#define FEW_EACH_PIXEL(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif
#if HAVE_FMA
#define MULADD_F32(a, b, c) __builtin_fmaf(a, b, c)
#define MULADD_F64(a, b, c) __builtin_fma(a, b, c)
#else
#define MULADD_F32(a, b, c) ((a) * (b) + (c))
#define MULADD_F64(a, b, c) ((a) * (b) + (c))
#endif

#define T float
#define FN(name) name##_f32
#define MULADD MULADD_F32
#define BLAS blas_f32
#include "conv_body.h"
#undef T
#undef FN
#undef BLAS
#undef MULADD

#define T double
#define FN(name) name##_f64
#define MULADD MULADD_F64
#define BLAS blas_f64
#include "conv_body.h"
#undef T
#undef FN
#undef BLAS
#undef MULADD
#undef COLUMN_WIDTH
