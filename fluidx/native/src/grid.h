/* Values of images at points that a grid names, weighed sums of the elements around them.
 *
 * words: images [n, channels, sizes], a grid [n, points, axes], results [n, channels, points], n, channels, axes (1 to 3), the sizes along
 * three axes (1 for those that are not there), points, taps along an axis (1: the nearest element, 2: linear, 4: cubic), what lies outside
 * (0: zeros, 1: the border, 2: what is reflected there), and whether -1 and 1 are the centers of border elements */

typedef struct {
    int64_t x, grid, out, channels, axes, size[3], points, taps, padding, centers, blocks;
} Grid;

enum { GRID_WORDS = 13, GRID_BLOCK = 32 };

#define T float
#define FN(name) name##_f32
#include "grid_body.h"
#undef T
#undef FN

#define T double
#define FN(name) name##_f64
#include "grid_body.h"
#undef T
#undef FN
