/* The vector machine: a chain of elementwise instructions over blocks that stay in the first-level cache.
 *
 * A call describes a box of (outer, rows, columns) elements, operands with a stride in bytes for each of the three, constants, and two
 * lists of instructions over registers. The first list runs on one element per row and makes the values that are the same along it; the
 * second runs on blocks of columns. A register is an operand, a constant, a scalar temporary or a block of scratch, in that order; an
 * operand with unit stride is read and written in place. 16-bit floats are widened by the instructions that load them, and rounded by
 * those that store them.
 *
 * Short rows may be packed: then a block is several whole rows, and an operand that does not walk rows and columns evenly is spread out
 * into scratch first. A row is then no longer where scalars change.
 *
 * words: outer, rows, columns, packed (0 or 1), picoseconds an element, operands, constants, scalar temporaries, vector temporaries, instructions in the
 * first list, in the second, then 5 words an operand (address, strides, bytes of an element), a constant each as a double, an instruction each:
 * opcode | d << 8 | a << 16 | b << 24 | c << 32 | e << 40 (operator, destination, operands). */

#include "functions.h"
#include "halves.h"
#include "vm_ops.h"

enum { VM_BYTES = 4096, VM_REGISTERS = 256, OPERAND_WORDS = 5 };

#define OP1(name, e) OP_##name##_v,
#define OP2(name, e) OP_##name##_vv, OP_##name##_vs,
#define OP3(name, e) OP_##name##_vv, OP_##name##_vs, OP_##name##_sv,
#define OPM(name, e) OP_##name##_vv,
#define OPF(name, e) OP_##name##_vvv, OP_##name##_vvs, OP_##name##_vsv, OP_##name##_vss,
#define OPX(name) OP_##name,
enum { ALL_OPS(OP1, OP2, OP3, OPM, OPF, OPX) VM_OPS };
#undef OP1
#undef OP2
#undef OP3
#undef OPM
#undef OPF
#undef OPX

typedef struct {
    const int64_t *operands, *constants, *first, *second;
    int64_t outer, rows, columns;  /* as executed: a packed program has one long row */
    int64_t inner;                 /* columns in a row that is packed, or 0 */
    int64_t block, blocks;         /* elements of a block, and blocks of a row */
    int n_operands, n_constants, n_scalars, n_vectors, n_first, n_second, n_spread;
    const char *error;
} Program;

/* Whether an operand of a packed program must be spread out: it is neither one element nor evenly spaced. */
INLINE int vm_spread(const Program *p, const int64_t *operand) {
    return p->inner && (operand[2] || operand[3]) && operand[2] != p->inner * operand[3];
}

static Program vm_program(const int64_t *a, int64_t block) {
    Program p = {.outer = a[0], .rows = a[1], .columns = a[2], .block = block, .n_operands = (int)a[5], .n_constants = (int)a[6],
                 .n_scalars = (int)a[7], .n_vectors = (int)a[8], .n_first = (int)a[9], .n_second = (int)a[10]};
    if (a[3]) {
        p.inner = a[2], p.block = block / p.inner * p.inner;
        p.columns = p.rows * p.inner, p.rows = 1;
    }
    p.blocks = (p.columns + p.block - 1) / p.block;
    p.operands = a + 11;
    for (int i = 0; i < p.n_operands; i++) p.n_spread += vm_spread(&p, p.operands + OPERAND_WORDS * i);
    p.constants = p.operands + OPERAND_WORDS * p.n_operands, p.first = p.constants + p.n_constants;
    p.second = p.first + p.n_first;
    return p;
}

/* A program that runs over the parts of another kernel's result as soon as they are made, while they are in cache: the result is an
 * operand of it, the elements of which follow on one another in the order of the loops. Packed rows have no such order. */
typedef struct {
    Program program;
    const void *result;
    int64_t width; /* bytes of an element of the result */
} Tail;

/* What the last word of a kernel says that may have one: the address of the words of a program, or 0 */
static Tail *tail_of(int64_t word, int64_t result, int64_t block, Tail *to) {
    if (!word) return NULL;
    *to = (Tail){vm_program(PTR(const int64_t, word), block), PTR(const void, result), VM_BYTES / block};
    for (int i = 0; i < to->program.n_operands; i++) {
        const int64_t *operand = to->program.operands + OPERAND_WORDS * i;
        if (operand[0] == result) to->width = operand[4];
    }
    return to;
}

static void tail_done(const Tail *tail, Team *team) {
    if (tail && tail->program.error) team->error = tail->program.error;
}

#define T float
#define I int32_t
#define FN(name) name##_f32
#include "vm_body.h"
#undef T
#undef I
#undef FN

#define T double
#define I int64_t
#define FN(name) name##_f64
#include "vm_body.h"
#undef T
#undef I
#undef FN
