/* Attention without its scores: softmax(Q K' scale + mask) V, and the gradient.
 *
 * A thread holds the scores of some rows against ATTENTION_KEYS keys at most. Forward, keys go by in pieces, and what was summed
 * so far is scaled down when a larger score comes. Backward, weights come at once from the logarithm of each row's sum of exponentials.
 * Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
 *
 * Keys and values that rows are multiplied with are first turned into panels, a piece at a time, so that a product need not pack them for
 * each block of rows. With `causal` a block of rows leaves out what lies beyond its last one. Backward, the weights of ATTENTION_BLOCK rows
 * are kept until they are summed into the gradients of K and V, which are then loaded and stored less often. An item of work is forward
 * some rows of one head, and backward one head of K with all of Q that share it: what each of them adds up follows from shapes alone. */

/* Blocks of rows are two of the largest tiles of a product; rows of scores are padded for loops over so many. */
enum { ATTENTION_ROWS = 28, ATTENTION_SPAN = 10 * ATTENTION_ROWS, ATTENTION_BLOCK = 5 * ATTENTION_ROWS };
enum { EDGE = 16, ATTENTION_KEYS = 256, ATTENTION_APART = ATTENTION_KEYS + 2 * EDGE };

typedef struct {
    int64_t at, batch, head, row; /* address, 0 for none, and distances, in elements, of neighbours; columns lie side by side */
} Matrices;

/* The words of a call, in their order */
typedef struct {
    int64_t batch, heads, group, rows, keys, width, values; /* `group` heads of Q share one of K */
    int64_t causal, start, scale;                           /* `start`: which row of all the first one is; a double by its bits */
    int64_t mask, kind, mask_batch, mask_head, mask_row, mask_key; /* kind: none, numbers to add (1), bools (2); distances */
    int64_t lse, dscores;
    Matrices q, k, v, out, dout, dq, dk, dv;
} Attention;

enum { ATTENTION_WORDS = sizeof(Attention) / sizeof(int64_t) };

typedef struct {
    Attention p;
    int failed;
} Attending;

/* How many of n keys from `first` on a row sees */
INLINE int64_t seen_keys(const Attention *p, int64_t row, int64_t first, int64_t n) {
    return p->causal ? at_least(0, at_most(n, p->start + row + 1 - first)) : n;
}

/* Nanoseconds of some products, and of exponentials, over all scores of a head */
INLINE double attention_ns(const Attention *p, int64_t rows, double products, size_t bytes) {
    double scores = (double)rows * (double)p->keys / (p->causal ? 2 : 1);
    return scores * (products * (double)(p->width + p->values) * 0.015 + 1) * (double)bytes / 4;
}

#define T float
#define FN(name) name##_f32
#include "attention_body.h"
#undef T
#undef FN

#define T double
#define FN(name) name##_f64
#include "attention_body.h"
#undef T
#undef FN
