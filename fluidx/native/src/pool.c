/* One pool of threads for all kernels.
 *
 * A job is cut into chunks; every thread takes chunks from its own part first and then from the others'. The caller works too, and when
 * no chunk is left it closes the job: it waits for threads that have begun a chunk, never for one that is still asleep. So a late or
 * sleeping thread costs nothing but its help. Waking a sleeper takes some 30 us, hence the short spin after each job. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "native.h"

#include <stdlib.h>

#if defined(_MSC_VER)
static __declspec(thread) size_t *asked;
#else
static _Thread_local size_t *asked; /* where a call that is only asked for its scratch puts it */
#endif

size_t pool_ask(KernelFn fn, const int64_t *words) {
    size_t most = 0;
    Team team = {.threads = 1};
    asked = &most;
    fn(words, &team);
    asked = NULL;
    return most;
}

static void *answer(size_t bytes) {
    if (bytes > *asked) *asked = bytes;
    return NULL;
}

#if defined(_MSC_VER)

static __declspec(thread) struct { void *at; size_t size; } memories[MEMORIES];
int pool_init(void) { return 0; }
void pool_set_threads(int n) { (void)n; }
int pool_threads(void) { return 1; }
void pool_limit(int n) { (void)n; }
int pool_team(void) { return 1; }
void parallel_for(Team *team, int64_t items, int64_t grain, Body body, void *ctx) {
    (void)team, (void)grain;
    if (items > 0) body(ctx, 0, asked ? 0 : items);
}
void *own_memory(int use, size_t bytes) {
    if (asked) return answer(bytes);
    if (bytes > memories[use].size) {
        _aligned_free(memories[use].at);
        memories[use].at = _aligned_malloc(bytes, 64);
        memories[use].size = memories[use].at ? bytes : 0;
    }
    return memories[use].at;
}
size_t pool_taken(void) { return memories[SCRATCH].size; }

#else

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

enum { MOST = 256, SPIN_US = 30 };
#define OPEN ((uint64_t)1 << 31)
#define ACTIVE (OPEN - 1)

typedef struct {
    _Alignas(64) atomic_llong next; /* first chunk that nobody took */
    int64_t end;
} Part;

static struct {
    _Alignas(64) atomic_uint_least64_t state; /* number of the job << 32 | OPEN while threads may join | threads at work */
    _Alignas(64) _Atomic uint32_t number;     /* number of the job, for sleepers to wait on */
    atomic_int sleepers;
    _Alignas(64) atomic_int taken; /* by the calling thread that runs a job */
    atomic_int wanted;             /* threads, the caller's included */
    int made;
    long spins;
    int threads; /* of the job, and what it does */
    int64_t items, grain;
    Body body;
    void *ctx;
    Part part[MOST];
} pool = {.wanted = 1, .made = 1};

static _Thread_local int limit;

#if defined(__linux__)
static void sleep_on(uint32_t seen) { syscall(SYS_futex, &pool.number, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0); }
static void wake_all(void) { syscall(SYS_futex, &pool.number, FUTEX_WAKE_PRIVATE, MOST, NULL, NULL, 0); }
#else
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static void sleep_on(uint32_t seen) {
    pthread_mutex_lock(&mutex);
    while (atomic_load(&pool.number) == seen) pthread_cond_wait(&cond, &mutex);
    pthread_mutex_unlock(&mutex);
}
static void wake_all(void) {
    pthread_mutex_lock(&mutex);
    pthread_cond_broadcast(&cond);
    pthread_mutex_unlock(&mutex);
}
#endif

static void take_chunks(int me) {
    for (int k = 0; k < pool.threads; k++) {
        Part *p = &pool.part[(me + k) % pool.threads];
        for (;;) {
            int64_t chunk = atomic_load_explicit(&p->next, memory_order_relaxed) < p->end ? atomic_fetch_add(&p->next, 1) : p->end;
            if (chunk >= p->end) break;
            int64_t begin = chunk * pool.grain, end = begin + pool.grain;
            pool.body(pool.ctx, begin, end < pool.items ? end : pool.items);
        }
    }
}

static void *work(void *arg) {
    int me = (int)(intptr_t)arg;
    uint32_t seen = 0;
    for (;;) {
        uint64_t s = atomic_load_explicit(&pool.state, memory_order_acquire);
        for (long i = 0; (uint32_t)(s >> 32) == seen; i++) {
            if (i < pool.spins) {
                pause_briefly();
            } else {
                atomic_fetch_add(&pool.sleepers, 1);
                sleep_on(seen);
                atomic_fetch_sub(&pool.sleepers, 1);
                i = 0;
            }
            s = atomic_load_explicit(&pool.state, memory_order_acquire);
        }
        seen = (uint32_t)(s >> 32);
        while ((s & OPEN) && (uint32_t)(s >> 32) == seen) {
            if (!atomic_compare_exchange_weak(&pool.state, &s, s + 1)) continue;
            if (me < pool.threads) take_chunks(me);
            atomic_fetch_sub(&pool.state, 1);
            break;
        }
    }
    return NULL;
}

static void make_threads(int n) {
    pthread_attr_t attr;
    if (pool.made >= n || pthread_attr_init(&attr)) return;
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, (size_t)1 << 20);
    pthread_t t;
    while (pool.made < n && !pthread_create(&t, &attr, work, (void *)(intptr_t)pool.made)) pool.made++;
    pthread_attr_destroy(&attr);
}

void parallel_for(Team *team, int64_t items, int64_t grain, Body body, void *ctx) {
    if (items <= 0) return;
    if (asked) {
        body(ctx, 0, 0);
        return;
    }
    if (grain < 1) grain = 1;
    int64_t chunks = (items - 1) / grain + 1;
    /* A pool that serves another caller is not waited for: two callers at once are two threads at work already. */
    if (team->threads < 2 || chunks < 2 || atomic_exchange(&pool.taken, 1)) {
        body(ctx, 0, items);
        return;
    }
    int n = team->threads < chunks ? team->threads : (int)chunks;
    make_threads(n);
    pool.threads = n < pool.made ? n : pool.made;
    pool.items = items, pool.grain = grain, pool.body = body, pool.ctx = ctx;
    for (int t = 0; t < pool.threads; t++) {
        atomic_store_explicit(&pool.part[t].next, chunks * t / pool.threads, memory_order_relaxed);
        pool.part[t].end = chunks * (t + 1) / pool.threads;
    }
    uint32_t number = (uint32_t)(atomic_load(&pool.state) >> 32) + 1;
    atomic_store(&pool.state, (uint64_t)number << 32 | OPEN);
    atomic_store(&pool.number, number);
    if (atomic_load(&pool.sleepers)) wake_all();
    take_chunks(0);
    atomic_fetch_and(&pool.state, ~OPEN);
    for (long i = 0; atomic_load_explicit(&pool.state, memory_order_acquire) & ACTIVE; i++) {
        pause_briefly();
        if (i > 4 * pool.spins) sched_yield(); /* more threads than cores */
    }
    atomic_store(&pool.taken, 0);
}

/* Threads do not survive a fork: the child starts without them and makes its own at its first job. */
static void after_fork(void) {
    pool.made = 1;
    atomic_store(&pool.state, 0);
    atomic_store(&pool.number, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.taken, 0);
}

static pthread_key_t keys[MEMORIES];
static _Thread_local struct {
    void *at;
    size_t size;
} memories[MEMORIES];

void *own_memory(int use, size_t bytes) {
    if (asked) return answer(bytes);
    if (bytes > memories[use].size) {
        size_t size = (bytes + 4095) & ~(size_t)4095;
        free(memories[use].at);
        memories[use].at = NULL, memories[use].size = 0;
        pthread_setspecific(keys[use], NULL);
        if (posix_memalign(&memories[use].at, 4096, size)) return memories[use].at = NULL;
        memories[use].size = size;
        pthread_setspecific(keys[use], memories[use].at); /* freed when the thread ends */
    }
    return memories[use].at;
}

size_t pool_taken(void) { return memories[SCRATCH].size; }

int pool_init(void) {
    static int done;
    if (done) return 0;
    for (int use = 0; use < MEMORIES; use++)
        if (pthread_key_create(&keys[use], free)) return -1;
    if (pthread_atfork(NULL, NULL, after_fork)) return -1;
    struct timespec a, b;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < 1000; i++) pause_briefly();
    clock_gettime(CLOCK_MONOTONIC, &b);
    double ns = (double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec);
    pool.spins = (long)(SPIN_US * 1000 * 1000.0 / (ns > 1000 ? ns : 1000));
    done = 1;
    return 0;
}

void pool_set_threads(int n) { atomic_store(&pool.wanted, n < 1 ? 1 : n > MOST ? MOST : n); }
int pool_threads(void) { return atomic_load(&pool.wanted); }
void pool_limit(int n) { limit = n; }
int pool_team(void) {
    int n = atomic_load_explicit(&pool.wanted, memory_order_relaxed);
    return limit && limit < n ? limit : n;
}

#endif
