/* Attention of 16-bit floats and its gradient, by a product that the level has (product_16.h): blocks of rows against blocks of keys, the
 * scores and sums of which are float32. Weights and gradients of scores are rounded to 16 bits to be multiplied, as other operands are.
 *
 * words: those of attention, then what the matrices hold. The mask's numbers are of the same dtype, `lse` is float32, and `dscores` 0. */

enum { ATTENTION_16_WORDS = ATTENTION_WORDS + 1, ROWS_AT_ONCE = 128 };

typedef struct {
    Attention p;
    Product16Fn product;
    int64_t is;
    int failed;
} Attending16;

/* Memory of a thread: scores and what becomes of them, float32 and rounded; sums of results */
typedef struct {
    float *scores, *products, *dq, *dk, *dv, *line;
    uint16_t *weights, *ds;
} Room16Attention;

INLINE char *head_16(const Matrices *m, int64_t batch, int64_t head, int64_t row) {
    return PTR(char, m->at) + 2 * (batch * m->batch + head * m->head + row * m->row);
}

/* C [m][n] = alpha op(A) op(B) + beta C, C being float32 or what the matrices hold */
static void times_of_16(Attending16 *job, int64_t m, int64_t n, int64_t k, float alpha, Side16 a, Side16 b, float beta, void *c, int64_t ldc,
                        int64_t c_is) {
    a.is = b.is = job->is;
    Product16 p = {.m = m, .n = n, .k = k, .alpha = alpha, .beta = beta, .a = a, .b = b, .c = c, .ldc = ldc, .c_is = c_is};
    if (m > 0 && n > 0 && job->product(&p)) job->failed = 1;
}

static void put_mask_16(const Attending16 *job, int64_t batch, int64_t head, int64_t row, int64_t first, float *s, int64_t n, float *line) {
    const Attention *p = &job->p;
    if (p->kind != 1) {
        put_mask_f32(p, batch, head, row, first, s, n);
        return;
    }
    int64_t at = batch * p->mask_batch + head * p->mask_head + row * p->mask_row + first * p->mask_key;
    line_as_f32(line, PTR(const char, p->mask) + 2 * at, job->is, p->mask_key ? n : 1);
    for (int64_t i = 0; i < n; i++) s[i] += line[p->mask_key ? i : 0];
}

/* Items [begin, end): up to ROWS_AT_ONCE rows of one head of Q each */
static void attention_16_spans(void *ctx, int64_t begin, int64_t end) {
    Attending16 *job = ctx;
    const Attention *p = &job->p;
    int64_t e = p->values, spans = up_div(p->rows, ROWS_AT_ONCE);
    float *scores = scratch(sizeof(float) * (size_t)(ROWS_AT_ONCE * (ATTENTION_APART + e + ATTENTION_KEYS / 2) + ATTENTION_APART));
    if (!scores) {
        job->failed = 1;
        return;
    }
    float *sums = scores + ROWS_AT_ONCE * ATTENTION_APART, *line = sums + ROWS_AT_ONCE * e, top[ROWS_AT_ONCE], total[ROWS_AT_ONCE];
    uint16_t *weights = (uint16_t *)(line + ATTENTION_APART);
    for (int64_t item = begin; item < end; item++) {
        int64_t head = item / spans, start = item % spans * ROWS_AT_ONCE, rows = at_most(ROWS_AT_ONCE, p->rows - start);
        int64_t b = head / p->heads, h = head % p->heads, limit = seen_keys(p, start + rows - 1, 0, p->keys);
        for (int64_t r = 0; r < rows; r++) top[r] = -INFINITY, total[r] = 0;
        if (!limit) clear_f32(sums, rows * e);
        for (int64_t first = 0; first < limit; first += ATTENTION_KEYS) {
            int64_t n = at_most(ATTENTION_KEYS, limit - first);
            times_of_16(job, rows, n, p->width, (float)as_double(p->scale), (Side16){.at = head_16(&p->q, b, h, start), .ld = p->q.row},
                        (Side16){.at = head_16(&p->k, b, h / p->group, first), .turned = 1, .ld = p->k.row}, 0, scores, ATTENTION_APART, AS_F32);
            for (int64_t r = 0; r < rows; r++) {
                float *s = scores + r * ATTENTION_APART;
                int64_t seen = seen_keys(p, start + r, first, n);
                put_mask_16(job, b, h, start + r, first, s, seen, line);
                int64_t whole = rounded_f32(s, seen, -INFINITY);
                float most = largest_seen_f32(s, whole), before = top[r];
                most = most > before ? most : before;
                float shift = most == -INFINITY ? 0 : most;
                if (first && before != most) {
                    float kept = exp_weight_f32(before - shift);
                    total[r] *= kept;
                    for (int64_t i = 0; i < e; i++) sums[r * e + i] *= kept;
                }
                top[r] = most;
                total[r] += exp_seen_f32(s, shift, whole);
                for (int64_t i = whole; i < n; i++) s[i] = 0;
                f32_as_line((char *)(weights + r * ATTENTION_KEYS), s, job->is, n);
            }
            times_of_16(job, rows, e, n, 1, (Side16){.at = (char *)weights, .ld = ATTENTION_KEYS},
                        (Side16){.at = head_16(&p->v, b, h / p->group, first), .ld = p->v.row}, first ? 1 : 0, sums, e, AS_F32);
        }
        for (int64_t r = 0; r < rows; r++) {
            float inv = total[r] != 0 ? 1 / total[r] : 0; /* zeros for a row that sees no key */
            for (int64_t i = 0; i < e; i++) sums[r * e + i] *= inv;
            f32_as_line(head_16(&p->out, b, h, start + r), sums + r * e, job->is, e);
            if (p->lse) PTR(float, p->lse)[head * p->rows + start + r] = total[r] != 0 ? log_f32(total[r]) + top[r] : -INFINITY;
        }
    }
}

void LEVEL(attention_16_with)(const int64_t *a, Team *team, Product16Fn product) {
    Attending16 job = {.product = product, .is = a[ATTENTION_WORDS]};
    memcpy(&job.p, a, sizeof job.p);
    const Attention *p = &job.p;
    double ns = attention_ns(p, at_most(ROWS_AT_ONCE, p->rows), 1, sizeof(float));
    parallel_for(team, p->batch * p->heads * up_div(p->rows, ROWS_AT_ONCE), grain_of(ns), attention_16_spans, &job);
    if (job.failed) team->error = "no memory for a piece of attention";
}

/* Scores of rows from `at` on, and products of gradients with values, become weights and gradients of the scores times `scale`, rounded;
 * keys that a row does not see count as 0. */
static void weigh_16(Attending16 *job, const Room16Attention *o, int64_t b, int64_t h, int64_t at, int64_t m, int64_t first, int64_t n) {
    const Attention *p = &job->p;
    float scale = (float)as_double(p->scale), *out = o->line, *dout = o->line + p->values;
    for (int64_t r = 0; r < m; r++) {
        float *s = o->scores + r * ATTENTION_APART, *ds = o->products + r * ATTENTION_APART;
        float lse = PTR(const float, p->lse)[(b * p->heads + h) * p->rows + at + r], shift = lse == -INFINITY ? 0 : lse;
        line_as_f32(out, head_16(&p->out, b, h, at + r), job->is, p->values);
        line_as_f32(dout, head_16(&p->dout, b, h, at + r), job->is, p->values);
        float mean = dot_seen_f32(out, dout, p->values);
        int64_t seen = seen_keys(p, at + r, first, n);
        put_mask_16(job, b, h, at + r, first, s, seen, out);
        int64_t whole = rounded_f32(s, seen, -INFINITY);
        rounded_f32(ds, seen, 0);
        IVDEP for (int64_t i = 0; i < whole; i++) {
            float weight = exp_weight_f32(s[i] - shift);
            s[i] = weight, ds[i] = weight * (ds[i] - mean) * scale;
        }
        for (int64_t i = seen; i < n; i++) s[i] = ds[i] = 0;
        f32_as_line((char *)(o->weights + r * ATTENTION_KEYS), s, job->is, n);
        f32_as_line((char *)(o->ds + r * ATTENTION_KEYS), ds, job->is, n);
    }
}

/* What m rows of one head from `at` on add to the gradients, against n keys from `first` on */
static void add_rows_16(Attending16 *job, const Room16Attention *o, int64_t b, int64_t h, int64_t at, int64_t m, int64_t first, int64_t n) {
    const Attention *p = &job->p;
    int64_t d = p->width, e = p->values, shared = h / p->group;
    Side16 q = {.at = head_16(&p->q, b, h, at), .ld = p->q.row}, k = {.at = head_16(&p->k, b, shared, first), .ld = p->k.row}, kt = k;
    Side16 dout = {.at = head_16(&p->dout, b, h, at), .ld = p->dout.row}, vt = {.at = head_16(&p->v, b, shared, first), .ld = p->v.row, .turned = 1};
    Side16 weights = {.at = (char *)o->weights, .ld = ATTENTION_KEYS, .turned = 1}, ds = {.at = (char *)o->ds, .ld = ATTENTION_KEYS}, dst = ds;
    kt.turned = dst.turned = 1;
    times_of_16(job, m, n, d, (float)as_double(p->scale), q, kt, 0, o->scores, ATTENTION_APART, AS_F32);
    times_of_16(job, m, n, e, 1, dout, vt, 0, o->products, ATTENTION_APART, AS_F32);
    weigh_16(job, o, b, h, at, m, first, n);
    if (p->dq.at) times_of_16(job, m, d, n, 1, ds, k, first ? 1 : 0, o->dq + ((h % p->group) * p->rows + at) * d, d, AS_F32);
    if (p->dv.at) times_of_16(job, n, e, m, 1, weights, dout, 1, o->dv, e, AS_F32);
    if (p->dk.at) times_of_16(job, n, d, m, 1, dst, q, 1, o->dk, d, AS_F32);
}

static Room16Attention room_of_attention_16(const Attention *p) {
    int64_t d = p->width, e = p->values, scores = ROWS_AT_ONCE * ATTENTION_APART, line = at_least(2 * e, ATTENTION_APART);
    float *at = scratch(sizeof(float) * (size_t)(2 * scores + ATTENTION_KEYS * (d + e + ROWS_AT_ONCE) + p->group * p->rows * d + line));
    Room16Attention o = {.scores = at};
    if (!at) return o;
    o.products = at + scores, o.dk = o.products + scores, o.dv = o.dk + ATTENTION_KEYS * d, o.dq = o.dv + ATTENTION_KEYS * e;
    o.line = o.dq + p->group * p->rows * d, o.weights = (uint16_t *)(o.line + line), o.ds = o.weights + ROWS_AT_ONCE * ATTENTION_KEYS;
    return o;
}

/* Items [begin, end): heads of K */
static void attention_grad_16_heads(void *ctx, int64_t begin, int64_t end) {
    Attending16 *job = ctx;
    const Attention *p = &job->p;
    int64_t d = p->width, e = p->values, few = p->heads / p->group, limit = seen_keys(p, p->rows - 1, 0, p->keys);
    Room16Attention o = room_of_attention_16(p);
    if (!o.scores) {
        job->failed = 1;
        return;
    }
    for (int64_t item = begin; item < end; item++) {
        int64_t b = item / few, shared = item % few;
        for (int64_t r = limit; r < p->keys; r++) { /* that no row sees */
            if (p->dk.at) memset(head_16(&p->dk, b, shared, r), 0, (size_t)d * 2);
            if (p->dv.at) memset(head_16(&p->dv, b, shared, r), 0, (size_t)e * 2);
        }
        if (!limit) clear_f32(o.dq, p->group * p->rows * d);
        for (int64_t first = 0; first < limit; first += ATTENTION_KEYS) {
            int64_t some = at_most(ATTENTION_KEYS, limit - first);
            clear_f32(o.dk, some * d), clear_f32(o.dv, some * e);
            for (int64_t h = shared * p->group; h < (shared + 1) * p->group; h++)
                for (int64_t at = 0; at < p->rows; at += ROWS_AT_ONCE) {
                    int64_t m = at_most(ROWS_AT_ONCE, p->rows - at), n = seen_keys(p, at + m - 1, first, some);
                    if (n) add_rows_16(job, &o, b, h, at, m, first, n);
                }
            for (int64_t r = 0; r < some; r++) {
                if (p->dk.at) f32_as_line(head_16(&p->dk, b, shared, first + r), o.dk + r * d, job->is, d);
                if (p->dv.at) f32_as_line(head_16(&p->dv, b, shared, first + r), o.dv + r * e, job->is, e);
            }
        }
        for (int64_t h = 0; h < p->group && p->dq.at; h++)
            for (int64_t r = 0; r < p->rows; r++) f32_as_line(head_16(&p->dq, b, shared * p->group + h, r), o.dq + (h * p->rows + r) * d, job->is, d);
    }
}

void LEVEL(attention_grad_16_with)(const int64_t *a, Team *team, Product16Fn product) {
    Attending16 job = {.product = product, .is = a[ATTENTION_WORDS]};
    memcpy(&job.p, a, sizeof job.p);
    const Attention *p = &job.p;
    double ns = attention_ns(p, p->rows * p->group, 2.5, sizeof(float));
    parallel_for(team, p->batch * p->heads / p->group, grain_of(ns), attention_grad_16_heads, &job);
    if (job.failed) team->error = "no memory for a piece of attention";
}

static void attention_16(const int64_t *a, Team *team) { LEVEL(attention_16_with)(a, team, LEVEL(product_16)); }
static void attention_grad_16(const int64_t *a, Team *team) { LEVEL(attention_grad_16_with)(a, team, LEVEL(product_16)); }
