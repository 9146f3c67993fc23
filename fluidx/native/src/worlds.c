/* Worlds in the Python module: collective calls of ranks, and launches, in which every rank executes a block of calls. */
#include "module.h"

static const char WORLD[] = "fluidx._native.world";

static void free_world(PyObject *capsule) {
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return;
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule));
    world_free(w);
}

/* The memory of a shared world belongs to its owner and may be unmapped already. */
static void forget_world(PyObject *capsule) { Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule)); }

static PyObject *make_world(PyObject *Py_UNUSED(module), PyObject *args) {
    int ranks;
    double timeout;
    long long spin, at = 0, bytes = 0;
    if (!PyArg_ParseTuple(args, "idL|LL:world", &ranks, &timeout, &spin, &at, &bytes)) return NULL;
    World *w = at ? world_in(PTR(void, at), (size_t)bytes, ranks, timeout, spin) : world_make(ranks, timeout, spin);
    if (!w) Py_RETURN_NONE;
    PyObject *capsule = PyCapsule_New(w, WORLD, at ? forget_world : free_world);
    if (!capsule && !at) world_free(w);
    return capsule;
}

static PyObject *join_world(PyObject *Py_UNUSED(module), PyObject *args) {
    long long world, at, bytes;
    if (!PyArg_ParseTuple(args, "LLL:join", &world, &at, &bytes)) return NULL;
    heap_begin(PTR(void, at), (size_t)bytes);
    return PyCapsule_New(PTR(void, world), WORLD, forget_world);
}

/* Call the Python callback of a thread that waits in C without the interpreter's lock. An error of the callback is only reported. */
static void tell(void *told, const char *text) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *done = PyObject_CallFunction(told, "s", text);
    if (!done) PyErr_WriteUnraisable(told);
    Py_XDECREF(done);
    PyGILState_Release(state);
}

static PyObject *watch(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule, *told;
    double seconds;
    int rank;
    if (!PyArg_ParseTuple(args, "OidO:watch", &capsule, &rank, &seconds, &told)) return NULL;
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    PyObject *before = PyCapsule_GetContext(capsule);
    if (PyCapsule_SetContext(capsule, Py_NewRef(told))) return NULL;
    world_watch(w, rank, seconds, tell, told);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *place_of(const void *p) { return p ? PyLong_FromVoidPtr((void *)(intptr_t)p) : PyErr_NoMemory(); }

static PyObject *take(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_ssize_t bytes;
    return PyArg_ParseTuple(args, "n:take", &bytes) ? place_of(heap_take((size_t)bytes)) : NULL;
}

static PyObject *give(PyObject *Py_UNUSED(module), PyObject *args) {
    long long at;
    if (!PyArg_ParseTuple(args, "L:give", &at)) return NULL;
    heap_give(PTR(void, at));
    Py_RETURN_NONE;
}

static PyObject *brought(PyObject *Py_UNUSED(module), PyObject *args) {
    long long at;
    if (!PyArg_ParseTuple(args, "L:brought", &at)) return NULL;
    const int64_t *const *words;
    int n = world_brought(PTR(const Meeting, at), &words);
    PyObject *all = PyTuple_New(n);
    for (int k = 0; all && k < n; k++) {
        PyObject *one = PyLong_FromVoidPtr((void *)(intptr_t)words[k]);
        if (!one || PyTuple_SetItem(all, k, one)) Py_CLEAR(all);
    }
    return all;
}

static PyObject *latest(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule;
    int rank, done;
    if (!PyArg_ParseTuple(args, "Oip:latest", &capsule, &rank, &done)) return NULL;
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    if (rank < 0 || rank >= world_ranks(w)) return PyErr_Format(PyExc_ValueError, "there is no rank %d", rank);
    const char *text = world_latest(w, rank, done);
    return PyUnicode_DecodeUTF8(text ? text : "", text ? (Py_ssize_t)strnlen(text, 400) : 0, "replace");
}

static PyObject *note(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule;
    int rank, done;
    long long text;
    if (!PyArg_ParseTuple(args, "OiLp:note", &capsule, &rank, &text, &done)) return NULL;
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    if (rank < 0 || rank >= world_ranks(w)) return PyErr_Format(PyExc_ValueError, "there is no rank %d", rank);
    world_note(w, rank, PTR(const char, text), done);
    Py_RETURN_NONE;
}

static PyObject *inside(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule;
    int rank;
    if (!PyArg_ParseTuple(args, "Oi:inside", &capsule, &rank)) return NULL;
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    return PyBool_FromLong(rank >= 0 && rank < world_ranks(w) && world_inside(w, rank));
}

static PyObject *trail(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule;
    int rank;
    if (!PyArg_ParseTuple(args, "Oi:trail", &capsule, &rank)) return NULL;
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    return rank >= 0 && rank < world_ranks(w) ? place_of(world_trail(w, rank)) : PyErr_Format(PyExc_ValueError, "there is no rank %d", rank);
}

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

static PyObject *failed(PyObject *Py_UNUSED(module), PyObject *capsule) {
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    const char *why = world_failed(w);
    return PyUnicode_DecodeUTF8(why ? why : "", why ? (Py_ssize_t)strlen(why) : 0, "replace");
}

static PyObject *reset_world(PyObject *Py_UNUSED(module), PyObject *capsule) {
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    world_reset(w);
    Py_RETURN_NONE;
}

/* -- launches ------------------------------------------------------------------------------------------------------------------ */

/* The world, the rank that is one of it, and which of its threads; NULL with an error set */
static World *world_with(PyObject *args, const char *format, int *rank, int *beside) {
    PyObject *capsule;
    World *w = PyArg_ParseTuple(args, format, &capsule, rank, beside) ? PyCapsule_GetPointer(capsule, WORLD) : NULL;
    if (!w || (*rank >= 0 && *rank < world_ranks(w))) return w;
    PyErr_Format(PyExc_ValueError, "there is no rank %d", *rank);
    return NULL;
}

static PyObject *serve(PyObject *Py_UNUSED(module), PyObject *args) {
    int rank, beside;
    World *w = world_with(args, "Oip:serve", &rank, &beside);
    if (!w) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    world_serve(w, rank, beside ? BESIDE : COMPUTES);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *knock(PyObject *Py_UNUSED(module), PyObject *args) {
    int rank, beside;
    World *w = world_with(args, "Oip:knock", &rank, &beside);
    if (!w) return NULL;
    world_knock(w, rank, beside ? BESIDE : COMPUTES);
    Py_RETURN_NONE;
}

static PyObject *begin(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule;
    int rank;
    if (!PyArg_ParseTuple(args, "Oi:begin", &capsule, &rank)) return NULL;
    World *w = PyCapsule_GetPointer(capsule, WORLD);
    if (!w) return NULL;
    world_begin(w, rank);
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
    Task *tasks;      /* what does not change from launch to launch: of all threads that compute, then of those beside them */
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

int signalled(void *with) {
    PyThreadState **state = with;
    PyEval_RestoreThread(*state);
    int found = PyErr_CheckSignals();
    *state = PyEval_SaveThread();
    return found;
}

/* None, or for each task its error or None. */
static PyObject *outcome(const Task *tasks, int count) {
    int wrong = 0;
    for (int k = 0; k < count; k++) wrong |= tasks[k].team.error != NULL;
    if (!wrong) Py_RETURN_NONE;
    PyObject *all = PyTuple_New(count);
    for (int k = 0; all && k < count; k++) {
        PyObject *one = tasks[k].team.error ? error_of(&tasks[k].team, (Py_ssize_t)tasks[k].at - 1) : Py_NewRef(Py_None);
        if (!one || PyTuple_SetItem(all, k, one)) Py_CLEAR(all);
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
    if (!PyTuple_Check(feeds) || PyTuple_Size(feeds) != l->fed)
        return PyErr_Format(PyExc_ValueError, "a launch takes a tuple of %zd feeds", l->fed);
    int ranks = world_ranks(l->world), threads = pool_threads() / ranks, count = THREADS * ranks;
    Task *tasks = PyMem_Malloc((size_t)count * sizeof(Task));
    Py_buffer *views = PyMem_Malloc(((size_t)l->fed + 1) * sizeof(Py_buffer));
    Fed *to = PyMem_Malloc(((size_t)l->fed + 1) * sizeof(Fed));
    PyObject *found = NULL;
    if (!tasks || !views || !to) PyErr_NoMemory();
    Py_ssize_t held = PyErr_Occurred() ? 0 : hold_feeds(l, feeds, views, to);
    if (!PyErr_Occurred()) {
        for (int k = 0; k < count; k++) {
            tasks[k] = l->tasks[k];
            if (tasks[k].fed) tasks[k].feeds = to + (l->tasks[k].feeds - l->feeds);
            tasks[k].team.threads = threads < 1 ? 1 : threads;
        }
        PyThreadState *state = PyEval_SaveThread();
        world_launch(l->world, tasks, signalled, &state);
        PyEval_RestoreThread(state);
        if (!PyErr_Occurred()) found = outcome(tasks, count);
    }
    for (Py_ssize_t k = 0; k < held; k++) PyBuffer_Release(&views[k]);
    PyMem_Free(tasks);
    PyMem_Free(views);
    PyMem_Free(to);
    return found;
}

static PyMethodDef LAUNCHING = {"launch", run_launch, METH_O, "Copy the feeds, execute the blocks of all ranks, and say what failed."};

/* The calls of a thread's block. */
static int fill_calls(Task *t, PyObject *block) {
    PyObject *capsule = PyCFunction_Check(block) ? PyCFunction_GetSelf(block) : NULL;
    const Block *b = PyCapsule_IsValid(capsule, BLOCK) ? PyCapsule_GetPointer(capsule, BLOCK) : NULL;
    if (!b) {
        PyErr_SetString(PyExc_TypeError, "a launch is made of blocks, and of tuples of arrays for their feeds");
        return -1;
    }
    *t = (Task){.records = b->records, .count = b->count, .team = {.rank = -1}};
    return 0;
}

/* Where a rank's feeds go. */
static int fill_feeds(Launch *l, Task *t, PyObject *buffers) {
    if (!PyTuple_Check(buffers)) {
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
    t->fed = fed;
    l->fed += fed;
    return 0;
}

static PyObject *launcher(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *world, *blocks, *buffers, *beside;
    if (!PyArg_ParseTuple(args, "OO!O!O!:launcher", &world, &PyTuple_Type, &blocks, &PyTuple_Type, &buffers, &PyTuple_Type, &beside)) return NULL;
    World *w = PyCapsule_GetPointer(world, WORLD);
    if (!w) return NULL;
    int ranks = world_ranks(w);
    if (PyTuple_Size(blocks) != ranks || PyTuple_Size(buffers) != ranks || PyTuple_Size(beside) != ranks)
        return PyErr_Format(PyExc_ValueError, "a launch is for %d ranks", ranks);
    Launch *l = PyMem_Calloc(1, sizeof(Launch));
    PyObject *capsule = l ? PyCapsule_New(l, LAUNCH, NULL) : PyErr_NoMemory();
    if (!capsule || PyCapsule_SetDestructor(capsule, free_launch)) {
        Py_XDECREF(capsule);
        PyMem_Free(l);
        return NULL;
    }
    l->keeps = Py_NewRef(args), l->world = w;
    if (!(l->tasks = PyMem_Calloc((size_t)(THREADS * ranks), sizeof(Task)))) PyErr_NoMemory();
    for (int r = 0; l->tasks && r < ranks; r++) {
        PyObject *other = PyTuple_GetItem(beside, r);
        if (fill_calls(&l->tasks[r], PyTuple_GetItem(blocks, r)) || fill_feeds(l, &l->tasks[r], PyTuple_GetItem(buffers, r))) break;
        if (other != Py_None && fill_calls(&l->tasks[ranks + r], other)) break;
    }
    PyObject *run = NULL;
    if (!PyErr_Occurred()) {
        Py_ssize_t first = 0;
        for (int r = 0; r < ranks; first += l->tasks[r++].fed) l->tasks[r].feeds = l->feeds + first;
        run = PyCFunction_NewEx(&LAUNCHING, capsule, NULL);
    }
    Py_DECREF(capsule);
    return run;
}

PyMethodDef world_methods[] = {
    {"world", make_world, METH_VARARGS,
     "world(ranks, seconds to wait, ns to spin): a world for collective calls in C, or None without C11 atomics. For processes, with the "
     "address and the size of zeroed shared memory."},
    {"join", join_world, METH_VARARGS, "join(address, address and size of this rank's own part): the world of processes at that address."},
    {"take", take, METH_VARARGS, "take(bytes): allocate in this process's part of the shared memory; the address."},
    {"give", give, METH_VARARGS, "give(address): free what `take` allocated."},
    {"brought", brought, METH_VARARGS, "brought(meeting): the addresses of its members' words in the latest collective call."},
    {"latest", latest, METH_VARARGS, "latest(world, rank, done): the text of the latest call that a rank started, or completed."},
    {"note", note, METH_VARARGS,
     "note(world, rank, address of a text or 0, done): record that the rank starts, or has completed, a call outside of this world."},
    {"inside", inside, METH_VARARGS, "inside(world, rank): is the rank in a call?"},
    {"trail", trail, METH_VARARGS, "trail(world, rank): the address of its progress record: the address of the operator's text, the run's number."},
    {"place", world_place, METH_O, "The address of a world."},
    {"meeting", meeting, METH_VARARGS, "meeting(world, ranks): the address of a group's meeting, which lives as long as the world."},
    {"mailbox", mailbox, METH_VARARGS, "mailbox(world, from, to): the address of a mailbox, which lives as long as the world."},
    {"abort", abort_world, METH_VARARGS, "abort(world, why): stop all ranks that wait."},
    {"failed", failed, METH_O, "The error text for ranks that start a call after a failure; \"\" before one."},
    {"watch", watch, METH_VARARGS, "watch(world, rank or -1, seconds, function of a text): call it when a rank has waited so long."},
    {"serve", serve, METH_VARARGS, "serve(world, rank, beside): run launched blocks on this thread, until `knock`."},
    {"knock", knock, METH_VARARGS, "knock(world, rank, beside): make `serve` return, now or at its next call."},
    {"begin", begin, METH_VARARGS, "begin(world, rank or -1): begin a run: set the progress of the rank's threads, or of all, to 0."},
    {"expect", expect, METH_O, "Wake the threads that serve a world."},
    {"launcher", launcher, METH_VARARGS,
     "launcher(world, blocks, tuples of arrays, blocks of second threads or None) -> a function of one tuple: the feeds of all ranks."},
    {"reset", reset_world, METH_O, "Drop the failures and messages of a world, while no rank is in it."},
    {NULL, NULL, 0, NULL},
};
