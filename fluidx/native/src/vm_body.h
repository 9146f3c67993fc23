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
    IVDEP for (int64_t k = 0; k < n; k++) { __VA_ARGS__; }                                                                              \
    break;
#define OP1(name, e) case OP_##name##_v: EACH(T x = a[k]; d[k] = e)
#define OP2(name, e)                                                                                                                    \
    case OP_##name##_vv: EACH(T x = a[k]; T y = b[k]; d[k] = e)                                                                         \
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
    case OP_##name##_vvv: EACH(T x = a[k]; T y = b[k]; T z = c[k]; d[k] = e)                                                            \
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
    case OP_##name##_vv: EACH(T x = a[k]; T y = b[k]; di[k] = -(I)(e))                                                                  \
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
        case OP_load_float16: FN(line_of_f16)(d, (const uint16_t *)a, n); break;
        case OP_load_bfloat16: FN(line_of_bf16)(d, (const uint16_t *)a, n); break;
        case OP_store_float16: FN(f16_of_line)((uint16_t *)d, a, n); break;
        case OP_store_bfloat16: FN(bf16_of_line)((uint16_t *)d, a, n); break;
        case OP_gather_float16:
            s = column_stride[ra];
            EACH(d[k] = (T)float_of_f16(*(const uint16_t *)((const char *)a + k * s)))
        case OP_gather_bfloat16:
            s = column_stride[ra];
            EACH(d[k] = (T)float_of_bf16(*(const uint16_t *)((const char *)a + k * s)))
        case OP_scatter_float16:
            s = column_stride[rd];
            EACH(*(uint16_t *)((char *)d + k * s) = f16_of_float((float)a[k]))
        case OP_scatter_bfloat16:
            s = column_stride[rd];
            EACH(*(uint16_t *)((char *)d + k * s) = bf16_of_float((float)a[k]))
#undef EACH
        }
    }
}

enum { FN(VM_BLOCK) = VM_BYTES / sizeof(T) };

/* Whole rows of an operand, one behind the other. Half of the words of `to` are used for 16-bit elements. */
static void FN(vm_gather_rows)(T *to, const char *from, int64_t row_stride, int64_t column_stride, int64_t width, int64_t rows, int64_t columns) {
#define ROWS(type)                                                                                                                      \
    for (int64_t r = 0; r < rows; r++, from += row_stride) {                                                                            \
        type *row = (type *)to + r * columns, x = *(const type *)from;                                                                  \
        if (column_stride == 0)                                                                                                         \
            for (int64_t k = 0; k < columns; k++) row[k] = x;                                                                           \
        else                                                                                                                            \
            for (int64_t k = 0; k < columns; k++) row[k] = *(const type *)(from + k * column_stride);                                   \
    }
    if (width == 2) {
        ROWS(uint16_t)
    } else {
        ROWS(T)
    }
#undef ROWS
}

/* The registers of one thread that runs a program */
typedef struct {
    T *R[VM_REGISTERS], constants[VM_REGISTERS], scalars[VM_REGISTERS];
    int64_t column_stride[VM_REGISTERS];
    T *spread; /* blocks of scratch for operands that are spread out */
} FN(Machine);

/* 0, or -1 without memory, which the program notes */
static int FN(vm_ready)(Program *p, FN(Machine) *m) {
    int r = p->n_operands;
    for (int i = 0; i < r; i++) m->column_stride[i] = p->operands[OPERAND_WORDS * i + 3];
    for (int i = 0; i < p->n_constants; i++) {
        m->constants[i] = (T)as_double(p->constants[i]);
        m->R[r++] = m->constants + i;
    }
    for (int i = 0; i < p->n_scalars; i++) m->R[r++] = m->scalars + i;
    int vectors = p->n_vectors + p->n_spread;
    T *block = vectors ? own_memory(REGISTERS, (size_t)vectors * VM_BYTES) : NULL;
    if (vectors && !block) {
        p->error = "no memory for temporaries";
        return -1;
    }
    for (int i = 0; i < p->n_vectors; i++) m->R[r++] = block + i * FN(VM_BLOCK);
    m->spread = block + p->n_vectors * FN(VM_BLOCK);
    return 0;
}

/* Point the operands at an element, and make what is the same along its row. */
static void FN(vm_at)(const Program *p, FN(Machine) *m, int64_t line, int64_t column) {
    int64_t o = line / p->rows, row = line % p->rows, spread = 0;
    for (int i = 0; i < p->n_operands; i++) {
        const int64_t *w = p->operands + OPERAND_WORDS * i;
        if (vm_spread(p, w))
            m->column_stride[i] = 0, m->R[i] = m->spread + spread++ * FN(VM_BLOCK);
        else
            m->R[i] = (T *)(PTR(char, w[0]) + o * w[1] + row * w[2] + column * w[3]);
    }
    if (p->n_first) FN(vm_execute)(p->first, p->n_first, m->R, m->column_stride, 1);
}

static void FN(vm_block)(const Program *p, FN(Machine) *m, int64_t n) {
    FN(vm_execute)(p->second, p->n_second, m->R, m->column_stride, n);
    for (int i = 0; i < p->n_operands; i++) m->R[i] = (T *)((char *)m->R[i] + n * m->column_stride[i]);
}

static void FN(vm_range)(void *ctx, int64_t begin, int64_t end) {
    Program *p = ctx;
    FN(Machine) m;
    if (FN(vm_ready)(p, &m)) return;
    int64_t line = begin / p->blocks, first = begin % p->blocks;
    for (; begin < end; line++, first = 0) {
        int64_t o = line / p->rows, stop = first + (end - begin) < p->blocks ? first + (end - begin) : p->blocks;
        FN(vm_at)(p, &m, line, first * p->block);
        for (int64_t k = first; k < stop; k++) {
            int64_t left = p->columns - k * p->block, n = left < p->block ? left : p->block;
            for (int i = 0; p->n_spread && i < p->n_operands; i++) {
                const int64_t *w = p->operands + OPERAND_WORDS * i, at = k * p->block / p->inner;
                if (vm_spread(p, w) && (k == first || w[2])) /* a row vector is the same in every block */
                    FN(vm_gather_rows)(m.R[i], PTR(char, w[0]) + o * w[1] + at * w[2], w[2], w[3], w[4], n / p->inner, p->inner);
            }
            FN(vm_block)(p, &m, n);
        }
        begin += stop - first;
    }
}

/* Run a tail over a part of the result: `rows` of `columns` elements from `at` on, `apart` elements apart. */
static void FN(vm_part)(Tail *tail, const void *at, int64_t rows, int64_t columns, int64_t apart) {
    Program *p = &tail->program;
    FN(Machine) m;
    if (FN(vm_ready)(p, &m)) return;
    if (apart == columns) columns *= rows, rows = 1;
    for (int64_t from = ((const char *)at - (const char *)tail->result) / tail->width; rows-- > 0; from += apart)
        for (int64_t k = from, some; k < from + columns; k += some) {
            int64_t row = p->columns - k % p->columns;
            some = from + columns - k < row ? from + columns - k : row;
            FN(vm_at)(p, &m, k / p->columns, k % p->columns);
            for (int64_t left = some; left > 0; left -= p->block) FN(vm_block)(p, &m, left < p->block ? left : p->block);
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
