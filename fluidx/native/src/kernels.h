/* All kernels, compiled once per level of instructions: each level_*.c includes this file with LEVEL defined. */
#include "native.h"

#include "conv.h"
#include "batch_norm.h"
#include "pool2d.h"
#include "gemm.h"
#include "vm.h"
#include "rows.h"
#include "move.h"
#include "reduce.h"
#include "random.h"

#define BOTH(name, words) {#name "_f32", words, name##_f32}, {#name "_f64", words, name##_f64}
const Kernel LEVEL(kernels)[] = {
    {"batch_norm_f32", BN_WORDS, batch_norm_f32},
    {"batch_norm_f64", BN_WORDS, batch_norm_f64},
    {"batch_norm_grad_f32", BN_GRAD_WORDS, batch_norm_grad_f32},
    {"batch_norm_grad_f64", BN_GRAD_WORDS, batch_norm_grad_f64},
    {"conv_f32", CONV_WORDS, conv_f32},
    {"conv_f64", CONV_WORDS, conv_f64},
    {"conv_back_f32", CONV_WORDS, conv_back_f32},
    {"conv_back_f64", CONV_WORDS, conv_back_f64},
    {"conv_filter_f32", CONV_WORDS, conv_filter_f32},
    {"conv_filter_f64", CONV_WORDS, conv_filter_f64},
    {"gemm_f32", GEMM_WORDS, gemm_f32},
    {"gemm_f64", GEMM_WORDS, gemm_f64},
    {"pool_f32", POOL_WORDS, pool_f32},
    {"pool_f64", POOL_WORDS, pool_f64},
    {"pool_grad_f32", POOL_WORDS, pool_grad_f32},
    {"pool_grad_f64", POOL_WORDS, pool_grad_f64},
    {"vm_f32", -1, vm_f32},
    {"vm_f64", -1, vm_f64},
    BOTH(softmax, ROWS_WORDS),
    BOTH(log_softmax, ROWS_WORDS),
    BOTH(softmax_grad, ROWS_WORDS),
    BOTH(log_softmax_grad, ROWS_WORDS),
    BOTH(logsumexp, ROWS_WORDS),
    BOTH(xent, ROWS_WORDS),
    BOTH(xent_grad, ROWS_WORDS),
    BOTH(layer_norm, 9),
    BOTH(layer_norm_grad, 11),
    BOTH(reduce, REDUCE_WORDS),
    {"reduce_i32", REDUCE_WORDS, reduce_i32},
    {"reduce_i64", REDUCE_WORDS, reduce_i64},
    {"reduce_u8", REDUCE_WORDS, reduce_u8},
    BOTH(pick, ROWS_WORDS),
    BOTH(pick_grad, ROWS_WORDS),
    BOTH(dropout, DROPOUT_WORDS),
    {"copy", -1, copy},
    {"take_rows", IDS_WORDS, take_rows},
    {"put_rows", IDS_WORDS, put_rows},
    BOTH(add_rows, ADD_WORDS),
    {"add_rows_i32", ADD_WORDS, add_rows_i32},
    {"add_rows_i64", ADD_WORDS, add_rows_i64},
    {"one_hot", IDS_WORDS, one_hot},
    {NULL, 0, NULL},
};

#define OP1(name, e) #name "_v",
#define OP2(name, e) #name "_vv", #name "_vs",
#define OP3(name, e) #name "_vv", #name "_vs", #name "_sv",
#define OPM(name, e) #name "_vv",
#define OPF(name, e) #name "_vvv", #name "_vvs", #name "_vsv", #name "_vss",
#define OPX(name) #name,
const char *const LEVEL(vm_names)[] = {ALL_OPS(OP1, OP2, OP3, OPM, OPF, OPX) NULL};
