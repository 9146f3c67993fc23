/* The machine for one type: included with T, the integer I of its width, and FN(name). */

static void FN(vm_execute)(const int64_t *at, int count, T *const *R, const int64_t *column_stride, int64_t n) {
    for (const int64_t *end = at + count; at < end; at++) {
        uint64_t w = (uint64_t)*at;
        int ra = w >> 16 & 255, rd = w >> 8 & 255;
        T *d = R[rd];
        const T *a = R[ra], *b = R[w >> 24 & 255], *c = R[w >> 32 & 255], *f = R[w >> 40 & 255];
        I *di = (I *)d;
        const I *ai = (const I *)a, *bi = (const I *)b;
        int64_t s;
        switch (w & 255) {
#define EACH(...)                                                                                                                       \
    IVDEP for (int64_t k = 0; k < n; k++) { __VA_ARGS__; }                                                                               \
    break;
#define OP1(name, e) case OP_##name##_v: EACH(T x = a[k]; d[k] = e)
#define OP2(name, e)                                                                                                                    \
    case OP_##name##_vv: EACH(T x = a[k]; T y = b[k]; d[k] = e)                                                                          \
    case OP_##name##_vs: {                                                                                                              \
        T y = *b;                                                                                                                       \
        EACH(T x = a[k]; d[k] = e)                                                                                                      \
    }
#define OP3(name, e)                                                                                                                    \
    OP2(name, e)                                                                                                                        \
    case OP_##name##_sv: {                                                                                                              \
        T x = *a;                                                                                                                       \
        EACH(T y = b[k]; d[k] = e)                                                                                                      \
    }
#define OPF(name, e)                                                                                                                    \
    case OP_##name##_vvv: EACH(T x = a[k]; T y = b[k]; T z = c[k]; d[k] = e)                                                              \
    case OP_##name##_vvs: {                                                                                                             \
        T z = *c;                                                                                                                       \
        EACH(T x = a[k]; T y = b[k]; d[k] = e)                                                                                          \
    }                                                                                                                                   \
    case OP_##name##_vsv: {                                                                                                             \
        T y = *b;                                                                                                                       \
        EACH(T x = a[k]; T z = c[k]; d[k] = e)                                                                                          \
    }                                                                                                                                   \
    case OP_##name##_vss: {                                                                                                             \
        T y = *b, z = *c;                                                                                                               \
        EACH(T x = a[k]; d[k] = e)                                                                                                      \
    }
            UNARY_OPS(OP1)
            COMMUTING_OPS(OP2)
            ORDERED_OPS(OP3)
            FUSED_OPS(OPF)
#undef OP1
#undef OP2
#define OP1(name, e) case OP_##name##_v: EACH(T x = a[k]; di[k] = -(I)(e))
#define OP2(name, e)                                                                                                                    \
    case OP_##name##_vv: EACH(T x = a[k]; T y = b[k]; di[k] = -(I)(e))                                                                    \
    case OP_##name##_vs: {                                                                                                              \
        T y = *b;                                                                                                                       \
        EACH(T x = a[k]; di[k] = -(I)(e))                                                                                               \
    }
#define OPM(name, e) case OP_##name##_vv: EACH(I x = ai[k]; I y = bi[k]; di[k] = e)
            COMPARE_OPS(OP2)
            TEST_OPS(OP1)
            MASK_OPS(OPM)
#undef OP1
#undef OP2
#undef OP3
#undef OPM
#undef OPF
        case OP_not: EACH(di[k] = ~ai[k])
        case OP_axpby: { /* a * b + c * f, with b and f scalars */
            T y = *b, z = *f;
            EACH(T u = a[k] * y; T v = c[k] * z; d[k] = u + v)
        }
        case OP_where_vv: EACH(d[k] = ai[k] ? b[k] : c[k])
        case OP_where_vs: {
            T z = *c;
            EACH(d[k] = ai[k] ? b[k] : z)
        }
        case OP_where_sv: {
            T y = *b;
            EACH(d[k] = ai[k] ? y : c[k])
        }
        case OP_where_ss: {
            T y = *b, z = *c;
            EACH(d[k] = ai[k] ? y : z)
        }
        case OP_fill: {
            T x = *a;
            EACH(d[k] = x)
        }
        case OP_gather:
            s = column_stride[ra];
            EACH(d[k] = *(const T *)((const char *)a + k * s))
        case OP_scatter:
            s = column_stride[rd];
            EACH(*(T *)((char *)d + k * s) = a[k])
        case OP_load_bool:
            s = column_stride[ra];
            if (s == 1) {
                EACH(di[k] = -(I)(((const uint8_t *)a)[k] != 0))
            }
            EACH(di[k] = -(I)(((const uint8_t *)a)[k * s] != 0))
        case OP_store_bool:
            s = column_stride[rd];
            if (s == 1) {
                EACH(((uint8_t *)d)[k] = (uint8_t)(ai[k] & 1))
            }
            EACH(((uint8_t *)d)[k * s] = (uint8_t)(ai[k] & 1))
#undef EACH
        }
    }
}

enum { FN(VM_BLOCK) = VM_BYTES / sizeof(T) };

/* Whole rows of an operand, one behind the other. */
static void FN(vm_gather_rows)(T *to, const char *from, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++, to += columns, from += row_stride) {
        if (column_stride == 0) {
            T x = *(const T *)from;
            for (int64_t k = 0; k < columns; k++) to[k] = x;
        } else {
            for (int64_t k = 0; k < columns; k++) to[k] = *(const T *)(from + k * column_stride);
        }
    }
}

static void FN(vm_range)(void *ctx, int64_t begin, int64_t end) {
    Program *p = ctx;
    T *R[VM_REGISTERS] = {0}, constants[VM_REGISTERS], scalars[VM_REGISTERS];
    int64_t column_stride[VM_REGISTERS];
    int r = p->n_operands;
    for (int i = 0; i < r; i++) column_stride[i] = p->operands[4 * i + 3];
    for (int i = 0; i < p->n_constants; i++) {
        constants[i] = (T)as_double(p->constants[i]);
        R[r++] = constants + i;
    }
    for (int i = 0; i < p->n_scalars; i++) R[r++] = scalars + i;
    int vectors = p->n_vectors + p->n_spread, spread[VM_REGISTERS], n_spread = 0;
    char *block = vectors ? scratch((size_t)vectors * VM_BYTES) : NULL;
    if (vectors && !block) {
        p->error = "no memory for temporaries";
        return;
    }
    for (int i = 0; i < p->n_vectors; i++) R[r++] = (T *)(block + (size_t)i * VM_BYTES);
    for (int i = 0; i < p->n_operands; i++) {
        if (vm_spread(p, p->operands + 4 * i)) spread[n_spread++] = i;
    }
    int64_t line = begin / p->blocks, first = begin % p->blocks;
    for (; begin < end; line++, first = 0) {
        int64_t o = line / p->rows, row = line % p->rows, stop = first + (end - begin) < p->blocks ? first + (end - begin) : p->blocks;
        int64_t from = first * p->block;
        for (int i = 0; i < p->n_operands; i++) {
            const int64_t *w = p->operands + 4 * i;
            R[i] = (T *)(PTR(char, w[0]) + o * w[1] + row * w[2] + from * w[3]);
        }
        for (int i = 0; i < n_spread; i++) {
            column_stride[spread[i]] = 0;
            R[spread[i]] = (T *)(block + (size_t)(p->n_vectors + i) * VM_BYTES);
        }
        if (p->n_first) FN(vm_execute)(p->first, p->n_first, R, column_stride, 1);
        for (int64_t k = first; k < stop; k++) {
            int64_t left = p->columns - k * p->block, n = left < p->block ? left : p->block;
            for (int i = 0; i < n_spread; i++) {
                const int64_t *w = p->operands + 4 * spread[i];
                int64_t at = k * p->block / p->inner; /* a row vector is the same in every block */
                if (k == first || w[2])
                    FN(vm_gather_rows)(R[spread[i]], PTR(char, w[0]) + o * w[1] + at * w[2], w[2], w[3], n / p->inner, p->inner);
            }
            FN(vm_execute)(p->second, p->n_second, R, column_stride, n);
            for (int i = 0; i < p->n_operands; i++) R[i] = (T *)((char *)R[i] + p->block * column_stride[i]);
        }
        begin += stop - first;
    }
}

static void FN(vm)(const int64_t *a, Team *team) {
    Program p = vm_program(a, FN(VM_BLOCK));
    if (p.outer < 1 || p.rows < 1 || p.columns < 1) return;
    int64_t items = p.outer * p.rows * p.blocks;
    double size = (double)p.columns / (double)p.blocks, ns = (double)a[4] / 1000.0 * size + 2.0 * p.n_second;
    parallel_for(team, items, (int64_t)(PARALLEL_NS / ns) + 1, FN(vm_range), &p);
    if (p.error) team->error = p.error;
}
