/* The Python module fluidx._native: blocks of calls, the pool's settings, the level of instructions.
 *
 * Python packs calls as [number of the function, number of words, words...] into bytes; `block` gives a function without arguments
 * that executes them all with the GIL released. Blocks are immutable, so several threads may run one. */
#include "module.h"

#include <time.h>

#include "levels.h"

int blas_even;
GemmF32 blas_f32;
GemmF64 blas_f64;

extern const char *const vm_names_base[];

static int best, chosen; /* numbers in LEVELS; only Python code that holds no run changes them */

/* -- blocks ------------------------------------------------------------------------------------------------------------------ */

static void free_block(PyObject *capsule) {
    Block *b = PyCapsule_GetPointer(capsule, BLOCK);
    if (!b) return;
    Py_DECREF(b->keeps);
    PyMem_Free(b->words);
    PyMem_Free(b);
}

PyObject *error_of(const Team *team, Py_ssize_t call) {
    PyObject *errors = PyImport_ImportModule(team->kind ? "fluidx.comm.base" : "fluidx.ir.errors");
    PyObject *kind = errors ? PyObject_GetAttrString(errors, team->kind ? team->kind : "ExecutionError") : NULL;
    PyObject *error = kind ? PyObject_CallFunction(kind, team->kind && team->rank >= 0 ? "si" : "s", team->error, team->rank) : NULL;
    PyObject *number = error ? PyLong_FromSsize_t(call) : NULL;
    if (!number || PyObject_SetAttrString(error, "call", number)) Py_CLEAR(error);
    Py_XDECREF(number);
    Py_XDECREF(kind);
    Py_XDECREF(errors);
    return error;
}

static PyObject *raised(PyObject *error) {
    if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    return NULL;
}

#define ASK_NS 100000000 /* between two questions for signals: each takes the GIL */

static int64_t now(void) {
    struct timespec t;
#ifdef CLOCK_MONOTONIC_COARSE /* the time of the latest tick, which costs nanoseconds */
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
#else
    timespec_get(&t, TIME_UTC);
#endif
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static PyObject *run_block(PyObject *self, PyObject *Py_UNUSED(none)) {
    const Block *b = PyCapsule_GetPointer(self, BLOCK);
    if (!b) return NULL;
    Team team = {.threads = pool_team()};
    const Record *r = b->records, *end = r + b->count;
    int interrupted = 0;
    PyThreadState *state = PyEval_SaveThread();
    int64_t asked = now();
    while (r < end && !team.error && !interrupted) {
        r->fn(r->words, &team);
        r++;
        if (r < end && now() - asked >= ASK_NS) interrupted = signalled(&state), asked = now();
    }
    PyEval_RestoreThread(state);
    if (interrupted) return NULL;
    if (team.error) return raised(error_of(&team, r - b->records - 1));
    Py_RETURN_NONE;
}

static PyMethodDef RUN = {"run", run_block, METH_NOARGS, "Execute the calls of a block, in order, without the GIL."};

static Py_ssize_t kernel_count(void) {
    Py_ssize_t n = 0;
    while (kernels_base[n].name) n++;
    return n;
}

static PyObject *make_block(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *data;
    Py_ssize_t size, count = 0, known = kernel_count();
    PyObject *keeps;
    if (!PyArg_ParseTuple(args, "y#O:block", &data, &size, &keeps)) return NULL;
    Py_ssize_t n = size / 8;
    int64_t *words = PyMem_Malloc(size ? (size_t)size : 8);
    if (!words) return PyErr_NoMemory();
    memcpy(words, data, (size_t)size);
    for (Py_ssize_t i = 0; i < n; i += 2 + words[i + 1], count++) {
        const Kernel *k = words[i] >= 0 && words[i] < known ? &kernels_base[words[i]] : NULL;
        if (n - i < 2 || !k || words[i + 1] < 0 || words[i + 1] > n - i - 2 || (k->words >= 0 && k->words != words[i + 1])) {
            PyMem_Free(words);
            PyErr_SetString(PyExc_ValueError, "the words of a block do not describe calls");
            return NULL;
        }
    }
    Block *b = PyMem_Malloc(sizeof(Block) + (size_t)count * sizeof(Record));
    if (!b) {
        PyMem_Free(words);
        return PyErr_NoMemory();
    }
    b->keeps = Py_NewRef(keeps), b->words = words, b->count = count;
    Record *r = b->records;
    for (Py_ssize_t i = 0; i < n; i += 2 + words[i + 1]) *r++ = (Record){LEVELS[chosen].kernels[words[i]].fn, words + i + 2};
    PyObject *capsule = PyCapsule_New(b, BLOCK, NULL);
    if (!capsule || PyCapsule_SetDestructor(capsule, free_block)) {
        Py_XDECREF(capsule);
        Py_DECREF(keeps);
        PyMem_Free(words);
        PyMem_Free(b);
        return NULL;
    }
    PyObject *run = PyCFunction_NewEx(&RUN, capsule, NULL);
    Py_DECREF(capsule);
    return run;
}

/* -- settings and facts ------------------------------------------------------------------------------------------------------- */

static PyObject *functions(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    PyObject *all = PyList_New(0);
    for (const Kernel *k = kernels_base; all && k->name; k++) {
        PyObject *pair = Py_BuildValue("(si)", k->name, k->words);
        if (!pair || PyList_Append(all, pair)) Py_CLEAR(all);
        Py_XDECREF(pair);
    }
    return all;
}

static PyObject *opcodes(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    PyObject *all = PyList_New(0);
    for (const char *const *at = vm_names_base; all && *at; at++) {
        PyObject *name = PyUnicode_FromString(*at);
        if (!name || PyList_Append(all, name)) Py_CLEAR(all);
        Py_XDECREF(name);
    }
    return all;
}

static PyObject *levels(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    PyObject *all = PyList_New(0);
    for (int i = 0; all && i <= best; i++) {
        PyObject *name = PyUnicode_FromString(LEVELS[i].name);
        if (!name || PyList_Append(all, name)) Py_CLEAR(all);
        Py_XDECREF(name);
    }
    return all;
}

static PyObject *level(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) { return PyUnicode_FromString(LEVELS[chosen].name); }

static PyObject *set_level(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *name;
    if (!PyArg_ParseTuple(args, "s:set_level", &name)) return NULL;
    for (int i = 0; i <= best; i++) {
        if (!strcmp(name, LEVELS[i].name)) {
            chosen = i;
            Py_RETURN_NONE;
        }
    }
    return PyErr_Format(PyExc_ValueError, "this processor has no level %s", name);
}

static PyObject *set_blas(PyObject *Py_UNUSED(module), PyObject *args) {
    long long f32, f64;
    if (!PyArg_ParseTuple(args, "LLi:set_blas", &f32, &f64, &blas_even)) return NULL;
    blas_f32 = (GemmF32)(intptr_t)f32, blas_f64 = (GemmF64)(intptr_t)f64;
    Py_RETURN_NONE;
}

static PyObject *set_num_threads(PyObject *Py_UNUSED(module), PyObject *args) {
    int n;
    if (!PyArg_ParseTuple(args, "i:set_num_threads", &n)) return NULL;
    pool_set_threads(n);
    Py_RETURN_NONE;
}

static PyObject *use_threads(PyObject *Py_UNUSED(module), PyObject *args) {
    int n;
    if (!PyArg_ParseTuple(args, "i:use_threads", &n)) return NULL;
    pool_limit(n);
    Py_RETURN_NONE;
}

static PyObject *num_threads(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) { return PyLong_FromLong(pool_threads()); }

static PyObject *address(PyObject *Py_UNUSED(module), PyObject *array) {
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_STRIDES)) return NULL;
    void *at = view.buf;
    PyBuffer_Release(&view);
    return PyLong_FromVoidPtr(at);
}

static PyObject *taken(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) { return PyLong_FromSize_t(pool_taken()); }

static PyObject *ask(PyObject *Py_UNUSED(module), PyObject *args) {
    int64_t words[2 + 64] = {-1};
    const char *data;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "y#:ask", &data, &size)) return NULL;
    if (size <= (Py_ssize_t)sizeof words) memcpy(words, data, (size_t)size);
    Py_ssize_t n = size / 8;
    if (words[0] < 0 || words[0] >= kernel_count() || words[1] != n - 2 || kernels_base[words[0]].words != words[1] || size % 8) {
        PyErr_SetString(PyExc_ValueError, "the words do not describe a call of a kernel with a fixed number of them");
        return NULL;
    }
    return PyLong_FromSize_t(pool_ask(LEVELS[chosen].kernels[words[0]].fn, words + 2));
}

static PyMethodDef METHODS[] = {
    {"taken", taken, METH_NOARGS, "Bytes of scratch that the calling thread keeps."},
    {"ask", ask, METH_VARARGS, "ask(words: bytes of one call) -> bytes that each thread takes for it."},
    {"address", address, METH_O, "Where the first element of an array lies; eight times faster than asking the array."},
    {"block", make_block, METH_VARARGS, "block(words: bytes, keeps) -> a function that executes the calls in the words."},
    {"functions", functions, METH_NOARGS, "(name, words it takes or -1) of every kernel, in the order of their numbers."},
    {"opcodes", opcodes, METH_NOARGS, "Names of the vector machine's instructions, in the order of their numbers."},
    {"levels", levels, METH_NOARGS, "Names of the levels of instructions that this processor has, lowest first."},
    {"level", level, METH_NOARGS, "The level that blocks made from now on use."},
    {"set_level", set_level, METH_VARARGS, "Choose the level of the blocks made from now on."},
    {"set_blas", set_blas, METH_VARARGS, "set_blas(address of cblas_sgemm, of cblas_dgemm, are pieces as the whole); 0 for none."},
    {"set_num_threads", set_num_threads, METH_VARARGS, "The number of threads of the pool, the caller's included."},
    {"num_threads", num_threads, METH_NOARGS, "The number of threads of the pool, the caller's included."},
    {"use_threads", use_threads, METH_VARARGS, "At most so many threads for runs of the calling thread; 0 lifts the limit."},
    {NULL, NULL, 0, NULL},
};

static int exec(PyObject *module) {
    static int done; /* another interpreter of the process keeps what was chosen */
    if (PyModule_AddFunctions(module, world_methods)) return -1;
    if (done) return 0;
    chosen = levels_init(&best);
    if (chosen < 0 || pool_init()) {
        PyErr_SetString(PyExc_ImportError, chosen < 0 ? "the kernels of the levels do not fit" : "the thread pool cannot be set up");
        return -1;
    }
    done = 1;
    return 0;
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "fluidx._native", "Kernels in C.", 0, METHODS, SLOTS, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&MODULE); }
