/* The Python module fluidx._native: blocks of calls, the pool's settings, the level of instructions.
 *
 * Python packs calls as [number of the function, number of words, words...] into bytes; `block` gives a function without arguments
 * that executes them all with the GIL released. Blocks are immutable, so several threads may run one. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "levels.h"
#include "meet.h"
#include "native.h"

int blas_even;
GemmF32 blas_f32;
GemmF64 blas_f64;

extern const Kernel kernels_base[];
extern const char *const vm_names_base[];
#if LEVELS_X86
extern const Kernel kernels_v3[], kernels_v4[];
#endif

static const struct Level {
    const char *name;
    const Kernel *kernels;
} LEVELS[] = {
    {"base", kernels_base},
#if LEVELS_X86
    {"v3", kernels_v3},
    {"v4", kernels_v4},
#endif
};
static int best, chosen; /* numbers in LEVELS; only Python code that holds no run changes them */

static int best_level(void) {
#if LEVELS_X86
    __builtin_cpu_init();
    int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
    return v4 ? 2 : v3 ? 1 : 0;
#else
    return 0;
#endif
}

/* -- blocks ------------------------------------------------------------------------------------------------------------------ */

static const char BLOCK[] = "fluidx._native.block";

typedef struct {
    PyObject *keeps; /* what the addresses in the words point into */
    int64_t *words;
    Py_ssize_t count;
    Record records[];
} Block;

static void free_block(PyObject *capsule) {
    Block *b = PyCapsule_GetPointer(capsule, BLOCK);
    if (!b) return;
    Py_DECREF(b->keeps);
    PyMem_Free(b->words);
    PyMem_Free(b);
}

/* What the team says went wrong: an error which knows as `call` the number of the call in its block. */
static PyObject *error_of(const Team *team, Py_ssize_t call) {
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

static PyObject *run_block(PyObject *self, PyObject *Py_UNUSED(none)) {
    const Block *b = PyCapsule_GetPointer(self, BLOCK);
    if (!b) return NULL;
    Team team = {.threads = pool_team()};
    const Record *r = b->records, *end = r + b->count;
    Py_BEGIN_ALLOW_THREADS;
    for (; r < end && !team.error; r++) r->fn(r->words, &team);
    Py_END_ALLOW_THREADS;
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

/* -- worlds -------------------------------------------------------------------------------------------------------------------- */

static const char WORLD[] = "fluidx._native.world";

static void free_world(PyObject *capsule) {
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (w) world_free(w);
}

static PyObject *make_world(PyObject *Py_UNUSED(module), PyObject *args) {
    int ranks;
    double timeout;
    long long spin;
    if (!PyArg_ParseTuple(args, "idL:world", &ranks, &timeout, &spin)) return NULL;
    World *w = world_make(ranks, timeout, spin);
    if (!w) Py_RETURN_NONE;
    PyObject *capsule = PyCapsule_New(w, WORLD, free_world);
    if (!capsule) world_free(w);
    return capsule;
}

static PyObject *place_of(const void *p) { return p ? PyLong_FromVoidPtr((void *)(intptr_t)p) : PyErr_NoMemory(); }

static PyObject *world_place(PyObject *Py_UNUSED(module), PyObject *capsule) {
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    return w ? place_of(w) : NULL;
}

static PyObject *meeting(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule, *members;
    int ranks[MOST_RANKS];
    if (!PyArg_ParseTuple(args, "OO!:meeting", &capsule, &PyTuple_Type, &members)) return NULL;
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    Py_ssize_t n = PyTuple_Size(members);
    if (!w || n < 0) return NULL;
    if (!n || n > MOST_RANKS) return PyErr_Format(PyExc_ValueError, "a meeting of %zd ranks", n);
    for (Py_ssize_t k = 0; k < n; k++) {
        long rank = PyLong_AsLong(PyTuple_GetItem(members, k));
        if (PyErr_Occurred()) return NULL;
        if (rank < 0 || rank >= world_ranks(w)) return PyErr_Format(PyExc_ValueError, "there is no rank %ld", rank);
        ranks[k] = (int)rank;
    }
    return place_of(world_meeting(w, (int)n, ranks));
}

static PyObject *mailbox(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule;
    int from, to;
    if (!PyArg_ParseTuple(args, "Oii:mailbox", &capsule, &from, &to)) return NULL;
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    int ranks = world_ranks(w);
    if (from < 0 || to < 0 || from >= ranks || to >= ranks) return PyErr_Format(PyExc_ValueError, "ranks are 0 to %d", ranks - 1);
    return place_of(world_mailbox(w, from, to));
}

static PyObject *abort_world(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule;
    const char *why;
    if (!PyArg_ParseTuple(args, "Os:abort", &capsule, &why)) return NULL;
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    world_abort(w, why);
    Py_RETURN_NONE;
}

static PyObject *reset_world(PyObject *Py_UNUSED(module), PyObject *capsule) {
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    world_reset(w);
    Py_RETURN_NONE;
}

/* -- launches ------------------------------------------------------------------------------------------------------------------ */

static PyObject *serve(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule;
    int rank;
    if (!PyArg_ParseTuple(args, "Oi:serve", &capsule, &rank)) return NULL;
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    if (rank < 0 || rank >= world_ranks(w)) return PyErr_Format(PyExc_ValueError, "there is no rank %d", rank);
    Py_BEGIN_ALLOW_THREADS;
    world_serve(w, rank);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *knock(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule;
    int rank;
    if (!PyArg_ParseTuple(args, "Oi:knock", &capsule, &rank)) return NULL;
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    if (rank < 0 || rank >= world_ranks(w)) return PyErr_Format(PyExc_ValueError, "there is no rank %d", rank);
    world_knock(w, rank);
    Py_RETURN_NONE;
}

static PyObject *expect(PyObject *Py_UNUSED(module), PyObject *capsule) {
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    world_expect(w);
    Py_RETURN_NONE;
}

static const char LAUNCH[] = "fluidx._native.launch";

typedef struct {
    PyObject *keeps;
    World *world;
    Py_ssize_t fed; /* arrays, of all ranks */
    Task *tasks;      /* what does not change from launch to launch */
    Fed *feeds;
} Launch;

static void free_launch(PyObject *capsule) {
    Launch *l = PyCapsule_GetPointer(capsule, LAUNCH);
    if (!l) return;
    Py_XDECREF(l->keeps);
    PyMem_Free(l->tasks);
    PyMem_Free(l->feeds);
    PyMem_Free(l);
}

/* Python's handlers of signals run between its own instructions only, so a long call has to ask for them. */
static int signalled(void *with) {
    PyThreadState **state = with;
    PyEval_RestoreThread(*state);
    int found = PyErr_CheckSignals();
    *state = PyEval_SaveThread();
    return found;
}

/* None, or for each rank its error or None. */
static PyObject *outcome(const Task *tasks, int ranks) {
    int wrong = 0;
    for (int r = 0; r < ranks; r++) wrong |= tasks[r].team.error != NULL;
    if (!wrong) Py_RETURN_NONE;
    PyObject *all = PyTuple_New(ranks);
    for (int r = 0; all && r < ranks; r++) {
        PyObject *one = tasks[r].team.error ? error_of(&tasks[r].team, (Py_ssize_t)tasks[r].at - 1) : Py_NewRef(Py_None);
        if (!one || PyTuple_SetItem(all, r, one)) Py_CLEAR(all);
    }
    return all;
}

/* Addresses of the feeds, which are held by `views` until the launch is over; how many were. */
static Py_ssize_t hold_feeds(const Launch *l, PyObject *feeds, Py_buffer *views, Fed *to) {
    for (Py_ssize_t k = 0; k < l->fed; k++) {
        if (PyObject_GetBuffer(PyTuple_GetItem(feeds, k), &views[k], PyBUF_SIMPLE)) return k;
        to[k] = l->feeds[k], to[k].from = views[k].buf;
        if ((size_t)views[k].len == to[k].bytes) continue;
        PyErr_Format(PyExc_ValueError, "feed %zd of a launch has %zd bytes instead of %zu", k, views[k].len, to[k].bytes);
        return k + 1;
    }
    return l->fed;
}

static PyObject *run_launch(PyObject *self, PyObject *feeds) {
    const Launch *l = PyCapsule_GetPointer(self, LAUNCH);
    if (!l) return NULL;
    if (!PyTuple_Check(feeds) || PyTuple_Size(feeds) != l->fed) return PyErr_Format(PyExc_ValueError, "a launch takes a tuple of %zd feeds", l->fed);
    int ranks = world_ranks(l->world), threads = pool_threads() / ranks;
    Task *tasks = PyMem_Malloc((size_t)ranks * sizeof(Task));
    Py_buffer *views = PyMem_Malloc(((size_t)l->fed + 1) * sizeof(Py_buffer));
    Fed *to = PyMem_Malloc(((size_t)l->fed + 1) * sizeof(Fed));
    PyObject *found = NULL;
    if (!tasks || !views || !to) PyErr_NoMemory();
    Py_ssize_t held = PyErr_Occurred() ? 0 : hold_feeds(l, feeds, views, to);
    if (!PyErr_Occurred()) {
        for (int r = 0; r < ranks; r++) {
            tasks[r] = l->tasks[r];
            tasks[r].feeds = to + (l->tasks[r].feeds - l->feeds);
            tasks[r].team.threads = threads < 1 ? 1 : threads;
        }
        PyThreadState *state = PyEval_SaveThread();
        world_launch(l->world, tasks, signalled, &state);
        PyEval_RestoreThread(state);
        if (!PyErr_Occurred()) found = outcome(tasks, ranks);
    }
    for (Py_ssize_t k = 0; k < held; k++) PyBuffer_Release(&views[k]);
    PyMem_Free(tasks);
    PyMem_Free(views);
    PyMem_Free(to);
    return found;
}

static PyMethodDef LAUNCHING = {"launch", run_launch, METH_O, "Copy the feeds, execute the blocks of all ranks, and say what failed."};

/* Where a rank's feeds go, and the calls of its block. */
static int fill_task(Launch *l, Task *t, PyObject *block, PyObject *buffers) {
    PyObject *capsule = PyCFunction_Check(block) ? PyCFunction_GetSelf(block) : NULL;
    const Block *b = PyCapsule_IsValid(capsule, BLOCK) ? PyCapsule_GetPointer(capsule, BLOCK) : NULL;
    if (!b || !PyTuple_Check(buffers)) {
        PyErr_SetString(PyExc_TypeError, "a launch is made of blocks, and of tuples of arrays for their feeds");
        return -1;
    }
    Py_ssize_t fed = PyTuple_Size(buffers);
    Fed *at = PyMem_Realloc(l->feeds, (size_t)(l->fed + fed + 1) * sizeof(Fed));
    if (!at) return PyErr_NoMemory(), -1;
    l->feeds = at;
    for (Py_ssize_t k = 0; k < fed; k++) {
        Py_buffer view;
        if (PyObject_GetBuffer(PyTuple_GetItem(buffers, k), &view, PyBUF_WRITABLE)) return -1;
        at[l->fed + k] = (Fed){view.buf, NULL, (size_t)view.len};
        PyBuffer_Release(&view);
    }
    *t = (Task){.records = b->records, .count = b->count, .fed = fed, .team = {.rank = -1}};
    l->fed += fed;
    return 0;
}

static PyObject *launcher(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *world, *blocks, *buffers;
    if (!PyArg_ParseTuple(args, "OO!O!:launcher", &world, &PyTuple_Type, &blocks, &PyTuple_Type, &buffers)) return NULL;
    World *w = PyCapsule_GetPointer(world, WORLD);
    if (!w) return NULL;
    int ranks = world_ranks(w);
    if (PyTuple_Size(blocks) != ranks || PyTuple_Size(buffers) != ranks) return PyErr_Format(PyExc_ValueError, "a launch is for %d ranks", ranks);
    Launch *l = PyMem_Calloc(1, sizeof(Launch));
    PyObject *capsule = l ? PyCapsule_New(l, LAUNCH, NULL) : PyErr_NoMemory();
    if (!capsule || PyCapsule_SetDestructor(capsule, free_launch)) {
        Py_XDECREF(capsule);
        PyMem_Free(l);
        return NULL;
    }
    l->keeps = Py_NewRef(args), l->world = w;
    if (!(l->tasks = PyMem_Calloc((size_t)ranks, sizeof(Task)))) PyErr_NoMemory();
    for (int r = 0; l->tasks && r < ranks; r++)
        if (fill_task(l, &l->tasks[r], PyTuple_GetItem(blocks, r), PyTuple_GetItem(buffers, r))) break;
    PyObject *run = NULL;
    if (!PyErr_Occurred()) {
        Py_ssize_t first = 0;
        for (int r = 0; r < ranks; first += l->tasks[r++].fed) l->tasks[r].feeds = l->feeds + first;
        run = PyCFunction_NewEx(&LAUNCHING, capsule, NULL);
    }
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
    {"world", make_world, METH_VARARGS, "world(ranks, seconds to wait, ns to wait awake): where they meet in C, or None where they cannot."},
    {"place", world_place, METH_O, "Where a world lies."},
    {"meeting", meeting, METH_VARARGS, "meeting(world, ranks): where a meeting of a group lies, which lasts as long as the world."},
    {"mailbox", mailbox, METH_VARARGS, "mailbox(world, from, to): where messages between two ranks lie, as long as the world."},
    {"abort", abort_world, METH_VARARGS, "abort(world, why): stop all ranks that wait."},
    {"serve", serve, METH_VARARGS, "serve(world, rank): let this thread carry out what is launched, until somebody knocks."},
    {"knock", knock, METH_VARARGS, "knock(world, rank): let `serve` return, now or when it is called next."},
    {"expect", expect, METH_O, "Let the threads that serve a world wake up."},
    {"launcher", launcher, METH_VARARGS, "launcher(world, blocks, tuples of arrays) -> a function of one tuple: the feeds of all ranks."},
    {"reset", reset_world, METH_O, "Forget the failures and messages of a world, while no rank is in it."},
    {NULL, NULL, 0, NULL},
};

static int exec(PyObject *Py_UNUSED(module)) {
    static int done; /* another interpreter of the process keeps what was chosen */
    if (done) return 0;
    best = chosen = best_level();
    if (pool_init()) {
        PyErr_SetString(PyExc_ImportError, "the thread pool cannot be set up");
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
