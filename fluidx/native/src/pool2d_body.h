/* pool2d.h for one type: T, FN(name). */

INLINE I FN(pool_bits)(T x) {
    I bits;
    memcpy(&bits, &x, sizeof x);
    return bits;
}
INLINE T FN(pool_value)(I bits) {
    T x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
/* The first choice is one instruction, which gives `a` where `b` is NaN; then its bits are made those of a NaN. */
INLINE T FN(larger)(T a, T b) {
    T most = b > a ? b : a;
    return FN(pool_value)(FN(pool_bits)(most) | (-(I)(b != b) & FN(pool_bits)((T)NAN)));
}
/* What the element `x` gets of `rest`, which is all or nothing; then nothing is left. NaN is the largest of a window that has one. */
INLINE T FN(pool_take)(T x, T most, I *rest) {
    I hit = -(I)((x == most) | (x != x)), taken = *rest & hit;
    *rest &= ~hit;
    return FN(pool_value)(taken);
}

/* How many pixels a mean divides by. */
INLINE T FN(area)(const Pool *p, int64_t rows, int64_t columns) {
    return (T)(p->exclusive ? at_least(1, rows * columns) : p->kh * p->kw);
}

/* One tap of a row of windows [left, right). */
INLINE void FN(pool_row)(T *y, const T *s, int64_t stride, int64_t mean, int64_t left, int64_t right) {
    if (mean && stride == 1) {
        IVDEP for (int64_t k = left; k < right; k++) y[k] += s[k];
    } else if (mean) {
        IVDEP for (int64_t k = left; k < right; k++) y[k] += s[k * stride];
    } else if (stride == 1) {
        IVDEP for (int64_t k = left; k < right; k++) y[k] = FN(larger)(y[k], s[k]);
    } else if (stride == 2) {
        IVDEP for (int64_t k = left; k < right; k++) y[k] = FN(larger)(y[k], s[2 * k]);
    } else {
        IVDEP for (int64_t k = left; k < right; k++) y[k] = FN(larger)(y[k], s[k * stride]);
    }
}

/* -- NCHW ---------------------------------------------------------------------------------------------------------------------------- */

/* The largest of 2 x 2 in planes that have nothing else: `rows` of results, each from two rows that follow each other. Along the rows first,
 * in one go over many of them; then whole vectors, beyond the end of a row, where the next one comes to lie. */
static void FN(pool_pairs)(const T *x, int64_t rows, int64_t width, T *y) {
    T room[POOL_ROOM + POOL_LANES];
    int64_t some = at_least(1, POOL_ROOM / (2 * width)), all = rows * width;
    memset(room + POOL_ROOM, 0, sizeof(T) * POOL_LANES);
    for (int64_t r = 0; r < rows; r += some) {
        int64_t count = at_most(some, rows - r), size = 2 * width * count;
        const T *from = x + 4 * width * r;
        IVDEP for (int64_t k = 0; k < size; k++) room[k] = FN(larger)(from[2 * k], from[2 * k + 1]);
        for (int64_t i = 0; i < count; i++) {
            const T *a = room + 2 * width * i, *b = a + width;
            int64_t at = (r + i) * width, k = 0;
            for (; k < width && at + k + POOL_LANES <= all; k += POOL_LANES)
                LANEWISE for (int l = 0; l < POOL_LANES; l++) y[at + k + l] = FN(larger)(a[k + l], b[k + l]);
            for (; k < width; k++) y[at + k] = FN(larger)(a[k], b[k]);
        }
    }
}

/* A row of results from `rows` of the image: the largest of each column first, in `room` with what lies beside the image. */
static void FN(pool_largest)(const Pool *p, const T *x, int64_t rows, T *room, T *y) {
    int64_t wide = (p->ow - 1) * p->sw + p->kw, left = at_most(p->left, wide), some = at_most(p->w, wide - left);
    for (int64_t k = 0; k < wide; k++) room[k] = (T)-INFINITY;
    for (int64_t u = 0; u < rows; u++) FN(pool_row)(room + left, x + u * p->w, 1, 0, 0, some);
    for (int64_t k = 0; k < p->ow; k++) y[k] = (T)-INFINITY;
    for (int64_t v = 0; v < p->kw; v++) FN(pool_row)(y, room + v, p->sw, 0, 0, p->ow);
}

static void FN(pool_planes)(void *ctx, int64_t begin, int64_t end) {
    Pool *p = ctx;
    int quarters = p->kh == 2 && p->kw == 2 && p->sh == 2 && p->sw == 2 && !p->top && !p->left && 2 * p->oh <= p->h && 2 * p->ow <= p->w;
    if (quarters && !p->mean && 2 * p->oh == p->h && 2 * p->ow == p->w && p->w <= POOL_ROOM) {
        int64_t size = p->oh * p->ow;
        FN(pool_pairs)((const T *)p->x + 4 * begin * size, (end - begin) * p->oh, p->ow, (T *)p->y + begin * size);
        return;
    }
    if (p->mean && p->oh == 1 && p->ow == 1 && !p->top && !p->left && p->kh == p->h && p->kw == p->w) {
        for (int64_t i = begin; i < end; i++)
            ((T *)p->y)[i] = (T)(FN(sum)((const T *)p->x + i * p->h * p->w, p->h * p->w) / (double)(p->h * p->w));
        return;
    }
    T *room = scratch(sizeof(T) * (size_t)((p->ow - 1) * p->sw + p->kw));
    if (!room) {
        p->failed = 1;
        return;
    }
    for (int64_t i = begin; i < end; i++) {
        const T *x = (const T *)p->x + i * p->h * p->w;
        T *y = (T *)p->y + i * p->oh * p->ow;
        for (int64_t r = 0; r < p->oh; r++, y += p->ow) {
            if (quarters) {
                const T *a = x + 2 * r * p->w, *b = a + p->w;
                if (p->mean) {
                    IVDEP for (int64_t k = 0; k < p->ow; k++) y[k] = (a[2 * k] + a[2 * k + 1] + b[2 * k] + b[2 * k + 1]) / 4;
                } else {
                    IVDEP for (int64_t k = 0; k < p->ow; k++)
                        y[k] = FN(larger)(FN(larger)(FN(larger)(a[2 * k], a[2 * k + 1]), b[2 * k]), b[2 * k + 1]);
                }
                continue;
            }
            int64_t top, bottom;
            pool_taps(r, p->sh, p->top, p->kh, p->h, &top, &bottom);
            if (!p->mean) {
                FN(pool_largest)(p, x + (r * p->sh - p->top + top) * p->w, bottom - top, room, y);
                continue;
            }
            for (int64_t k = 0; k < p->ow; k++) y[k] = 0;
            for (int64_t u = top; u < bottom; u++)
                for (int64_t v = 0; v < p->kw; v++) {
                    int64_t left, right;
                    pool_windows(v, p->sw, p->left, p->w, p->ow, &left, &right);
                    FN(pool_row)(y, x + (r * p->sh - p->top + u) * p->w - p->left + v, p->sw, 1, left, right);
                }
            for (int64_t k = 0; k < p->ow; k++) {
                int64_t left, right;
                pool_taps(k, p->sw, p->left, p->kw, p->w, &left, &right);
                y[k] /= FN(area)(p, bottom - top, right - left);
            }
        }
    }
}

static void FN(pool_grad_planes)(void *ctx, int64_t begin, int64_t end) {
    const Pool *p = ctx;
    int quarters = p->kh == 2 && p->kw == 2 && p->sh == 2 && p->sw == 2 && !p->top && !p->left && 2 * p->oh == p->h && 2 * p->ow == p->w;
    for (int64_t i = begin; i < end; i++) {
        const T *x = (const T *)p->x + i * p->h * p->w, *y = (const T *)p->y + i * p->oh * p->ow, *g = (const T *)p->g + i * p->oh * p->ow;
        T *d = (T *)p->out + i * p->h * p->w;
        if (!quarters) memset(d, 0, sizeof(T) * (size_t)(p->h * p->w));
        for (int64_t r = 0; r < p->oh; r++, y += p->ow, g += p->ow) {
            if (quarters && p->mean) {
                T *c = d + 2 * r * p->w, *e = c + p->w;
                IVDEP for (int64_t k = 0; k < p->ow; k++) c[2 * k] = c[2 * k + 1] = e[2 * k] = e[2 * k + 1] = g[k] / 4;
                continue;
            }
            if (quarters) {
                const T *a = x + 2 * r * p->w, *b = a + p->w;
                T *c = d + 2 * r * p->w, *e = c + p->w;
                IVDEP for (int64_t k = 0; k < p->ow; k++) {
                    I rest = FN(pool_bits)(g[k]);
                    c[2 * k] = FN(pool_take)(a[2 * k], y[k], &rest), c[2 * k + 1] = FN(pool_take)(a[2 * k + 1], y[k], &rest);
                    e[2 * k] = FN(pool_take)(b[2 * k], y[k], &rest), e[2 * k + 1] = FN(pool_take)(b[2 * k + 1], y[k], &rest);
                }
                continue;
            }
            int64_t top, bottom, left, right;
            pool_taps(r, p->sh, p->top, p->kh, p->h, &top, &bottom);
            for (int64_t k = 0; k < p->ow; k++) {
                pool_taps(k, p->sw, p->left, p->kw, p->w, &left, &right);
                int64_t at = (r * p->sh - p->top) * p->w + k * p->sw - p->left;
                I rest = FN(pool_bits)(p->mean ? g[k] / FN(area)(p, bottom - top, right - left) : g[k]);
                for (int64_t u = at + top * p->w; u < at + bottom * p->w; u += p->w)
                    for (int64_t v = u + left; v < u + right; v++)
                        d[v] += p->mean ? FN(pool_value)(rest) : FN(pool_take)(x[v], y[k], &rest);
            }
        }
    }
}

/* -- NHWC ---------------------------------------------------------------------------------------------------------------------------- */

static void FN(pool_images)(void *ctx, int64_t begin, int64_t end) {
    const Pool *p = ctx;
    int64_t c = p->c, top, bottom, left, right;
    for (int64_t i = begin; i < end; i++) {
        int64_t r = i % p->oh;
        T *y = (T *)p->y + i * p->ow * c;
        pool_taps(r, p->sh, p->top, p->kh, p->h, &top, &bottom);
        for (int64_t k = 0; k < p->ow; k++, y += c) {
            pool_taps(k, p->sw, p->left, p->kw, p->w, &left, &right);
            for (int64_t l = 0; l < c; l++) y[l] = p->mean ? 0 : (T)-INFINITY;
            for (int64_t u = top; u < bottom; u++)
                for (int64_t v = left; v < right; v++) {
                    const T *s = (const T *)p->x + ((i / p->oh * p->h + r * p->sh - p->top + u) * p->w + k * p->sw - p->left + v) * c;
                    if (p->mean) {
                        IVDEP for (int64_t l = 0; l < c; l++) y[l] += s[l];
                    } else {
                        IVDEP for (int64_t l = 0; l < c; l++) y[l] = FN(larger)(y[l], s[l]);
                    }
                }
            T area = FN(area)(p, bottom - top, right - left);
            if (p->mean)
                for (int64_t l = 0; l < c; l++) y[l] /= area;
        }
    }
}

static void FN(pool_grad_images)(void *ctx, int64_t begin, int64_t end) {
    Pool *p = ctx;
    int64_t c = p->c, top, bottom, left, right;
    T *rest = scratch(sizeof(T) * (size_t)c);
    if (!rest) {
        p->failed = 1;
        return;
    }
    for (int64_t i = begin; i < end; i++) {
        const T *image = (const T *)p->x + i * p->h * p->w * c, *y = (const T *)p->y + i * p->oh * p->ow * c;
        const T *g = (const T *)p->g + i * p->oh * p->ow * c;
        T *out = (T *)p->out + i * p->h * p->w * c;
        memset(out, 0, sizeof(T) * (size_t)(p->h * p->w * c));
        for (int64_t k = 0; k < p->oh * p->ow; k++, y += c, g += c) {
            int64_t r = k / p->ow, q = k % p->ow;
            pool_taps(r, p->sh, p->top, p->kh, p->h, &top, &bottom);
            pool_taps(q, p->sw, p->left, p->kw, p->w, &left, &right);
            T area = p->mean ? FN(area)(p, bottom - top, right - left) : 1;
            for (int64_t l = 0; l < c; l++) rest[l] = g[l] / area;
            for (int64_t u = top; u < bottom; u++)
                for (int64_t v = left; v < right; v++) {
                    int64_t at = ((r * p->sh - p->top + u) * p->w + q * p->sw - p->left + v) * c;
                    const T *x = image + at;
                    T *d = out + at;
                    if (p->mean) {
                        IVDEP for (int64_t l = 0; l < c; l++) d[l] += rest[l];
                    } else {
                        IVDEP for (int64_t l = 0; l < c; l++) {
                            I left_over = FN(pool_bits)(rest[l]);
                            d[l] += FN(pool_take)(x[l], y[l], &left_over);
                            rest[l] = FN(pool_value)(left_over);
                        }
                    }
                }
        }
    }
}

static void FN(pool)(const int64_t *a, Team *team) {
    Pool p = pool_of(a);
    int64_t each = p.oh * p.ow * p.kh * p.kw;
    if (p.nhwc)
        parallel_for(team, p.n * p.oh, 16384 / at_least(1, p.ow * p.kh * p.kw * p.c) + 1, FN(pool_images), &p);
    else
        parallel_for(team, p.n * p.c, 16384 / at_least(1, each) + 1, FN(pool_planes), &p);
    if (p.failed) team->error = "out of memory";
}

static void FN(pool_grad)(const int64_t *a, Team *team) {
    Pool p = pool_of(a);
    int64_t each = p.oh * p.ow * p.kh * p.kw;
    if (p.nhwc)
        parallel_for(team, p.n, 16384 / at_least(1, each * p.c) + 1, FN(pool_grad_images), &p);
    else
        parallel_for(team, p.n * p.c, 16384 / at_least(1, each) + 1, FN(pool_grad_planes), &p);
    if (p.failed) team->error = "out of memory";
}
