/* All kernels, compiled once per level of instructions: each level_*.c includes this file with LEVEL defined. */
#include "native.h"

#include "vm.h"
#include "product.h"
#include "product_16.h"
#include "conv.h"
#include "batch_norm.h"
#include "gemm.h"
#include "gemm_16.h"
#include "n_bits.h"
#include "conv_16.h"
#include "rows.h"
#include "pool2d.h"
#include "attention.h"
#include "attention_16.h"
#include "move.h"
#include "reduce.h"
#include "random.h"
#include "combine.h"
#include "trees.h"
#include "vectors.h"
#include "grid.h"
#include "integer.h"
#include "integer_rows.h"

#define BOTH(name, words) {#name "_f32", words, name##_f32}, {#name "_f64", words, name##_f64}
#define FLOATS(name, words) BOTH(name, words), {#name "_f16", words, name##_f16}, {#name "_bf16", words, name##_bf16}
const Kernel LEVEL(kernels)[] = {
    BOTH(gemm, GEMM_WORDS),
    {"gemm_16", GEMM_16_WORDS, gemm_16},
    {"matmul_n_bits_f32", N_BITS_WORDS, matmul_n_bits},
    BOTH(vm, -1),
    BOTH(conv, CONV_WORDS + 1),
    BOTH(conv_back, CONV_WORDS + 1),
    BOTH(conv_filter, CONV_WORDS),
    {"conv_16", CONV_16_WORDS + 1, conv_16},
    {"conv_back_16", CONV_16_WORDS + 1, conv_back_16},
    {"conv_filter_16", CONV_16_WORDS, conv_filter_16},
    BOTH(pool, POOL_WORDS),
    BOTH(pool_grad, POOL_WORDS),
    FLOATS(batch_norm, BN_WORDS),
    FLOATS(batch_norm_grad, BN_GRAD_WORDS),
    BOTH(softmax, ROWS_WORDS),
    BOTH(log_softmax, ROWS_WORDS),
    BOTH(softmax_grad, ROWS_WORDS),
    BOTH(log_softmax_grad, ROWS_WORDS),
    BOTH(logsumexp, ROWS_WORDS),
    BOTH(xent, ROWS_WORDS),
    BOTH(xent_grad, ROWS_WORDS),
    BOTH(layer_norm, 11),
    BOTH(layer_norm_grad, 13),
    BOTH(attention, ATTENTION_WORDS),
    BOTH(attention_grad, ATTENTION_WORDS),
    {"attention_16", ATTENTION_16_WORDS, attention_16},
    {"attention_grad_16", ATTENTION_16_WORDS, attention_grad_16},
    BOTH(reduce, REDUCE_WORDS),
    {"reduce_i32", REDUCE_WORDS, reduce_i32},
    {"reduce_i64", REDUCE_WORDS, reduce_i64},
    {"reduce_u8", REDUCE_WORDS, reduce_u8},
    BOTH(pick, ROWS_WORDS),
    BOTH(pick_grad, ROWS_WORDS),
    FLOATS(dropout, DROPOUT_WORDS),
    BOTH(trees, TREES_WORDS),
    {"vectors_f64", VECTORS_WORDS, vectors},
    BOTH(grid_sample, GRID_WORDS),
    {"integer", INTEGER_WORDS, integer},
    {"quantize", QUANTIZE_WORDS, quantize},
    {"quantize_range", RANGE_WORDS, quantize_range},
    {"dequantize", DEQUANTIZE_WORDS, dequantize},
    {"lookup", LOOKUP_WORDS, lookup},
    {"sum_bytes", SUM_WORDS, sum_bytes},
    {"largest_bytes", LARGEST_WORDS, largest_bytes},
    {"copy", -1, copy},
    {"take_rows", TAKE_WORDS, take_rows},
    {"put_rows", IDS_WORDS, put_rows},
    BOTH(add_rows, ADD_WORDS),
    {"add_rows_i32", ADD_WORDS, add_rows_i32},
    {"add_rows_i64", ADD_WORDS, add_rows_i64},
    {"one_hot", IDS_WORDS, one_hot},
    {"meet", -1, meet},
    {"meet_at", 1, meet_at},
    {"exchange", -1, exchange},
    {"reach", PACE_WORDS, reach},
    {"await", PACE_WORDS, await},
    {NULL, 0, NULL},
};

#define OP1(name, e) #name "_v",
#define OP2(name, e) #name "_vv", #name "_vs",
#define OP3(name, e) #name "_vv", #name "_vs", #name "_sv",
#define OPM(name, e) #name "_vv",
#define OPF(name, e) #name "_vvv", #name "_vvs", #name "_vsv", #name "_vss",
#define OPX(name) #name,
const char *const LEVEL(vm_names)[] = {ALL_OPS(OP1, OP2, OP3, OPM, OPF, OPX) NULL};
