/* The instructions of the vector machine, once for each list they are needed in: OP1(name, value of x), OP2 and OP2S (of x and y; OP2S
 * are those whose order of operands matters, so that a scalar may stand on either side), COMPARE, OP3 and the rest by name.
 *
 * A name ends with the shapes of its operands, v for a vector and s for a scalar. */

#define UNARY_OPS(X)                                                                                                                    \
    X(copy, x)                                                                                                                          \
    X(neg, -x)                                                                                                                          \
    X(abs, FN(abs)(x))                                                                                                                  \
    X(sqrt, FN(sqrt)(x))                                                                                                                \
    X(rsqrt, 1 / FN(sqrt)(x))                                                                                                           \
    X(exp, FN(exp)(x))                                                                                                                  \
    X(log, FN(log)(x))                                                                                                                  \
    X(log1p, FN(log1p)(x))                                                                                                              \
    X(tanh, FN(tanh)(x))                                                                                                                \
    X(sigmoid, FN(sigmoid)(x))                                                                                                          \
    X(softplus, FN(softplus)(x))                                                                                                        \
    X(erf, FN(erf)(x))                                                                                                                  \
    X(sign, x > 0 ? 1 : x < 0 ? -1 : x == 0 ? 0 : x)                                                                                    \
    X(floor, FN(floor)(x))                                                                                                              \
    X(ceil, FN(ceil)(x))                                                                                                                \
    X(round, FN(round)(x))                                                                                                              \
    X(float16, (T)float_of_f16(f16_of_float((float)x)))                                                                                 \
    X(bfloat16, (T)float_of_bf16(bf16_of_float((float)x)))

/* A scalar may stand second. */
#define COMMUTING_OPS(X) X(add, x + y) X(mul, x * y)

/* A scalar may stand first or second. Of equal operands, and -0 and 0 are equal, min and max give the second, as NumPy does; NaN wins. */
#define ORDERED_OPS(X)                                                                                                                  \
    X(sub, x - y)                                                                                                                       \
    X(div, x / y)                                                                                                                       \
    X(min, x < y || x != x ? x : y)                                                                                                     \
    X(max, x > y || x != x ? x : y)

/* Two numbers to a mask: an integer of the same width, 0 or all bits. */
#define COMPARE_OPS(X) X(gt, x > y) X(ge, x >= y) X(lt, x < y) X(le, x <= y) X(eq, x == y) X(ne, x != y)
#define TEST_OPS(X) X(isnan, x != x) X(isinf, FN(abs)(x) == (T)INFINITY) X(isfinite, FN(abs)(x) < (T)INFINITY)
#define MASK_OPS(X) X(and, x &y) X(or, x | y) X(xor, x ^ y)

/* Two roundings, as two instructions would do: one pass over memory saved. */
#define FUSED_OPS(X) X(muladd, x *y + z) X(mulsub, x *y - z) X(submul, z - x * y)

#define ALL_OPS(X1, X2, X3, XM, XF, X)                                                                                                  \
    UNARY_OPS(X1) COMMUTING_OPS(X2) ORDERED_OPS(X3) COMPARE_OPS(X2) TEST_OPS(X1) MASK_OPS(XM) FUSED_OPS(XF)                             \
    X(not ) X(axpby) X(where_vv) X(where_vs) X(where_sv) X(where_ss) X(fill) X(gather) X(scatter) X(load_bool) X(store_bool)            \
    X(load_float16) X(gather_float16) X(store_float16) X(scatter_float16) X(load_bfloat16) X(gather_bfloat16) X(store_bfloat16)         \
    X(scatter_bfloat16)
