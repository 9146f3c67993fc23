/* Worlds, and how ranks wait.
 *
 * Every wait is for a counter that only grows. A rank spins for a while, then sleeps in its own seat; the thread that increases the counter
 * wakes it. A failed world ends all waits, except waits for ranks that work on this rank's arrays: these end soon, and the arrays must stay
 * until then. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "world.h"

#include <stdlib.h>

#if defined(_MSC_VER)

World *world_make(int ranks, double timeout, int64_t spin) {
    (void)ranks, (void)timeout, (void)spin;
    return NULL; /* no C11 atomics: collective calls are in Python */
}
World *world_in(void *memory, size_t bytes, int ranks, double timeout, int64_t spin) {
    (void)memory, (void)bytes;
    return world_make(ranks, timeout, spin);
}
void world_watch(World *w, int rank, double seconds, Stalled stalled, void *told) {
    (void)w, (void)rank, (void)seconds, (void)stalled, (void)told;
}
void world_free(World *w) { (void)w; }
int world_ranks(const World *w) {
    (void)w;
    return 0;
}
void world_abort(World *w, const char *why) { (void)w, (void)why; }
const char *world_failed(World *w) {
    (void)w;
    return NULL;
}
void world_reset(World *w) { (void)w; }
Meeting *world_meeting(World *w, int n, const int *ranks) {
    (void)w, (void)n, (void)ranks;
    return NULL;
}
Mailbox *world_mailbox(World *w, int from, int to) {
    (void)w, (void)from, (void)to;
    return NULL;
}
int world_brought(const Meeting *m, const int64_t *const **words) {
    (void)m, (void)words;
    return 0;
}
int64_t *world_trail(World *w, int rank) {
    (void)w, (void)rank;
    return NULL;
}
void world_note(World *w, int rank, const char *text, int done) { (void)w, (void)rank, (void)text, (void)done; }
int world_inside(World *w, int rank) {
    (void)w, (void)rank;
    return 0;
}
const char *world_latest(World *w, int rank, int done) {
    (void)w, (void)rank, (void)done;
    return NULL;
}

#else

#include <time.h>
#include <unistd.h>
#if FUTEXES
#include <sys/syscall.h>
enum { FUTEX_WAKE = 1, FUTEX_WAIT_BITSET = 9 }; /* <linux/futex.h> is not everywhere */
#endif

enum {
    LOOKS = 64,           /* polls of a counter between two readings of the clock */
    TRY_AGAIN = 32,       /* every so many waits a rank spins for the full time again */
    MOST_STAYS = 4096,    /* the largest number of waits between two moves to another core */
    ASK_NS = 50 * 1000000 /* between two checks whether the run was interrupted */
};

/* -- worlds ------------------------------------------------------------------------------------------------------------------------ */

static const char STOPPED[] = "stopped because another rank failed: ";

static void *zeroed(size_t bytes) {
    void *p;
    if (posix_memalign(&p, 64, bytes)) return NULL;
    return memset(p, 0, bytes);
}

/* Zeros that live as long as the world. In shared memory they are allocated without a lock, which a killed process could hold for ever. */
static void *part_of(World *w, size_t bytes) {
    if (!w->shared) return zeroed(bytes);
    bytes = (bytes + 63) / 64 * 64;
    size_t at = __atomic_fetch_add(&w->used, bytes, __ATOMIC_RELAXED);
    return at + bytes <= w->shared ? (char *)w + at : NULL;
}

static void seat_free(Seat *s) {
#if FUTEXES
    (void)s;
#else
    pthread_cond_destroy(&s->call);
    pthread_mutex_destroy(&s->mutex);
#endif
}

static int seat_init(Seat *s, int64_t patience, int meets) {
    s->patience = patience, s->meets = meets;
    atomic_store(&s->core, -1);
#if FUTEXES
    return 0;
#else
    pthread_condattr_t attr;
    if (pthread_condattr_init(&attr)) return -1;
#if !defined(__APPLE__)
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
#endif
    int wrong = pthread_mutex_init(&s->mutex, NULL) || pthread_cond_init(&s->call, &attr);
    pthread_condattr_destroy(&attr);
    return wrong ? -1 : 0;
#endif
}

static int cores(void) {
#if defined(__linux__)
    cpu_set_t all;
    if (!sched_getaffinity(0, sizeof all, &all)) return CPU_COUNT(&all);
#endif
    return (int)sysconf(_SC_NPROCESSORS_ONLN);
}

static size_t world_bytes(int ranks) { return sizeof(World) + (size_t)ranks * sizeof(Rank); }

static int world_init(World *w, int ranks, double timeout, int64_t spin) {
    w->ranks = ranks, w->crowded = ranks > cores(), w->seconds = timeout, w->spin = spin;
    w->timeout = timeout < 1e9 ? (int64_t)(timeout * 1e9) : (int64_t)1e18;
    int wrong = 0;
    for (Rank *r = w->rank; r < w->rank + ranks; r++) {
        wrong |= seat_init(&r->seat, spin, 1);
        for (int t = 0; t < THREADS; t++) wrong |= seat_init(&r->lane[t].seat, spin, 0) | seat_init(&r->pace[t].seat, spin, 0);
    }
    return wrong;
}

World *world_make(int ranks, double timeout, int64_t spin) {
    World *w = ranks > 0 && ranks <= MOST_RANKS ? zeroed(world_bytes(ranks)) : NULL;
    if (w && !world_init(w, ranks, timeout, spin)) return w;
    free(w);
    return NULL;
}

World *world_in(void *memory, size_t bytes, int ranks, double timeout, int64_t spin) {
    World *w = memory;
    if (ranks < 1 || ranks > MOST_RANKS || bytes < world_bytes(ranks)) return NULL;
    w->shared = bytes, w->used = (world_bytes(ranks) + 63) / 64 * 64;
    return world_init(w, ranks, timeout, spin) ? NULL : w;
}

void world_watch(World *w, int rank, double seconds, Stalled stalled, void *told) {
    w->stall = seconds < 1e9 ? (int64_t)(seconds * 1e9) : (int64_t)1e18;
    for (int r = 0; r < w->ranks; r++)
        if (rank < 0 || r == rank) w->rank[r].told = told, w->rank[r].stalled = stalled;
}

int world_ranks(const World *w) { return w->ranks; }

static void empty(Mailbox *box) {
    for (Message *at = box->oldest, *next; at; at = next) {
        next = at->next;
        free(at);
    }
    box->read = box->last = box->oldest = NULL;
    box->waits_for = box->gone = 0;
    atomic_store(&box->posted, 0);
    atomic_store(&box->taken, 0);
}

void world_reset(World *w) {
    for (Meeting *m = w->meetings; m; m = m->next) {
        atomic_store(&m->state, 0);
        for (int k = 0; k < m->n; k++) atomic_store(&m->members[k].came, 0);
    }
    for (Mailbox *box = w->mailboxes; box; box = box->next) empty(box);
    atomic_store(&w->failed, 0);
}

void world_free(World *w) {
    world_reset(w);
    for (Meeting *m = w->meetings, *next; m; m = next) {
        next = m->next;
        free(m);
    }
    for (Mailbox *box = w->mailboxes, *next; box; box = next) {
        next = box->next;
        free(box);
    }
    for (Rank *r = w->rank; r < w->rank + w->ranks; r++) {
        seat_free(&r->seat);
        for (int t = 0; t < THREADS; t++) {
            seat_free(&r->lane[t].seat);
            seat_free(&r->pace[t].seat);
        }
    }
    free(w);
}

Meeting *world_meeting(World *w, int n, const int *ranks) {
    Meeting *head = atomic_load(&w->meetings), *made = NULL;
    for (;;) {
        for (Meeting *m = head; m; m = m->next) {
            int k = 0;
            while (m->n == n && k < n && m->members[k].rank == ranks[k]) k++;
            if (k == n) return m; /* if another thread was faster, the memory of `made` stays unused in the world */
        }
        if (!made && !(made = part_of(w, sizeof(Meeting) + (size_t)n * sizeof(Member)))) return NULL;
        made->world = w, made->n = n, made->next = head;
        for (int k = 0; k < n; k++) made->members[k].rank = ranks[k];
        if (atomic_compare_exchange_strong(&w->meetings, &head, made)) return made;
    }
}

Mailbox *world_mailbox(World *w, int from, int to) {
    Mailbox *head = atomic_load(&w->mailboxes), *made = NULL;
    for (;;) {
        for (Mailbox *box = head; box; box = box->next)
            if (box->from == from && box->to == to) return box;
        if (!made && !(made = part_of(w, sizeof(Mailbox)))) return NULL;
        made->world = w, made->from = from, made->to = to, made->next = head;
        if (atomic_compare_exchange_strong(&w->mailboxes, &head, made)) return made;
    }
}

int world_brought(const Meeting *m, const int64_t *const **words) {
    *words = (const int64_t *const *)m->words;
    return m->n;
}

int64_t *world_trail(World *w, int rank) { return w->rank[rank].trail; }

const char *world_latest(World *w, int rank, int done) {
    return atomic_load(done ? &w->rank[rank].done : &w->rank[rank].came);
}

void world_note(World *w, int rank, const char *text, int done) {
    if (done)
        note_done(w, rank, text);
    else
        note_came(w, rank, text);
}

int world_inside(World *w, int rank) { return atomic_load(&w->rank[rank].inside); }

/* -- waiting ----------------------------------------------------------------------------------------------------------------------- */

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#if FUTEXES

/* A wake-up between the check of `called` and the sleep ends the sleep at once. */
static void doze(Seat *s, int64_t until) {
    struct timespec t = {(time_t)(until / 1000000000), (long)(until % 1000000000)};
    syscall(SYS_futex, &s->called, FUTEX_WAIT_BITSET, 0, until == ENDLESS ? NULL : &t, NULL, UINT32_MAX);
}
static void lie_down(Seat *s) { (void)s; }
static void get_up(Seat *s) { (void)s; }

void call(Seat *s) {
    if (!atomic_load(&s->asleep)) return;
    atomic_store(&s->called, 1);
    syscall(SYS_futex, &s->called, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

#else

static void sleep_until(Seat *s, int64_t deadline) {
    int64_t left = deadline - now();
    if (left < 0) left = 0;
#if defined(__APPLE__)
    struct timespec t = {(time_t)(left / 1000000000), (long)(left % 1000000000)};
    pthread_cond_timedwait_relative_np(&s->call, &s->mutex, &t);
#else
    struct timespec t = {(time_t)(deadline / 1000000000), (long)(deadline % 1000000000)};
    pthread_cond_timedwait(&s->call, &s->mutex, &t);
#endif
}

static void doze(Seat *s, int64_t until) {
    if (until == ENDLESS)
        pthread_cond_wait(&s->call, &s->mutex);
    else
        sleep_until(s, until);
}
static void lie_down(Seat *s) { pthread_mutex_lock(&s->mutex); }
static void get_up(Seat *s) { pthread_mutex_unlock(&s->mutex); }

void call(Seat *s) {
    if (!atomic_load(&s->asleep)) return;
    pthread_mutex_lock(&s->mutex);
    atomic_store(&s->called, 1);
    pthread_cond_signal(&s->call);
    pthread_mutex_unlock(&s->mutex);
}

#endif

void note_core(Seat *s) {
#if defined(__linux__)
    atomic_store_explicit(&s->core, sched_getcpu(), memory_order_relaxed);
#else
    (void)s;
#endif
}

/* Ranks that sleep alternately look like one busy thread, so the scheduler leaves them on one core although others are idle. A rank that is
 * about to sleep on the core of another awake rank moves to another core; its affinity is restored afterwards. If the scheduler moves it
 * back, each move costs more than sharing the core: then the number of waits until the next move doubles. */
static void make_room(World *w, Seat *s) {
#if defined(__linux__)
    if (s->waits - s->moved < s->stays) return;
    cpu_set_t all, others;
    int here = sched_getcpu(), met = 0;
    for (int r = 0; r < w->ranks; r++) {
        Rank *other = &w->rank[r];
        if (&other->seat == s || atomic_load(&other->seat.asleep) || atomic_load(&other->lane[COMPUTES].seat.asleep)) continue;
        met |= atomic_load_explicit(&other->seat.core, memory_order_relaxed) == here;
    }
    if (!met || sched_getaffinity(0, sizeof all, &all) || CPU_COUNT(&all) < w->ranks) return;
    int again = s->waits - s->moved < 16 * (s->stays + TRY_AGAIN);
    s->stays = !again ? 1 : s->stays < MOST_STAYS ? 2 * s->stays + 1 : MOST_STAYS;
    s->moved = s->waits;
    others = all;
    CPU_CLR((size_t)here, &others);
    if (!sched_setaffinity(0, sizeof others, &others)) sched_setaffinity(0, sizeof all, &all);
    s->patience = w->spin;
#else
    (void)w, (void)s;
#endif
}

int interrupted(World *w, Seat *s) {
    if (!s->interrupted) return 0;
    int64_t at = now();
    if (!s->asked) s->asked = at;
    if (at < s->asked + ASK_NS) return 0;
    s->asked = at;
    if (!s->interrupted(s->with)) return 0;
    s->interrupted = NULL;
    world_abort(w, "the run was interrupted");
    return 1;
}

enum { FOR_RANK, FOR_WORK }; /* what is waited for */

static int look(World *w, Counter *counter, uint64_t goal, int what) {
    return atomic_load(counter) >= goal ? REACHED : what != FOR_WORK && has_failed(w) ? FAILED : LATE;
}

/* Sleep until the counter has reached the goal, a wake-up comes, or the deadline has passed. */
static int sleep_in(World *w, Seat *s, Counter *counter, uint64_t goal, int what, int64_t deadline) {
    int64_t until = s->interrupted && now() + ASK_NS < deadline ? now() + ASK_NS : deadline;
    int found;
    lie_down(s);
    atomic_store(&s->called, 0);
    atomic_store(&s->asleep, 1); /* set before the check of the counter: the thread that increases it checks this flag afterwards */
    while ((found = look(w, counter, goal, what)) == LATE && !atomic_load(&s->called) && now() < until) doze(s, until);
    if (found == LATE && atomic_load(&s->called)) found = CALLED;
    atomic_store(&s->asleep, 0);
    get_up(s);
    return found == LATE && now() < deadline ? PAUSED : found;
}

/* Waking from sleep takes about 30 us, so a rank first spins. If other ranks share its core, spinning only delays them: a rank that spun in
 * vain spins half as long the next time, and tries the full time again now and then. */
static int wait_in(World *w, Seat *s, Counter *counter, uint64_t goal, int what, int64_t longest) {
    int64_t start = 0, waited = 0, awake = ++s->waits % TRY_AGAIN ? s->patience : w->spin, deadline = ENDLESS;
    for (;;) {
        for (; waited <= awake; waited = now() - start) {
            for (int i = 0; i < LOOKS; i++) {
                if (atomic_load_explicit(counter, memory_order_acquire) >= goal) {
                    if (start) s->patience = now() - start <= awake ? w->spin : s->patience / 2; /* longer: the other rank needed this core */
                    return REACHED;
                }
                if (what != FOR_WORK && has_failed(w)) return FAILED;
                pause_briefly();
            }
            if (!start) start = now();
        }
        if (deadline == ENDLESS && longest != ENDLESS) deadline = start + longest;
        s->patience /= 2;
        if (s->meets) make_room(w, s);
        int found = sleep_in(w, s, counter, goal, what, deadline);
        if (found < CALLED) return found;
        interrupted(w, s);
        start = now(), waited = 0, awake = found == CALLED ? w->spin : 0;
    }
}

int wait_for(World *w, Seat *s, Counter *counter, uint64_t goal, int64_t most) { return wait_in(w, s, counter, goal, FOR_RANK, most); }
void wait_for_work(World *w, Seat *s, Counter *counter, uint64_t goal) { wait_in(w, s, counter, goal, FOR_WORK, ENDLESS); }

void world_abort(World *w, const char *why) {
    int none = 0;
    if (!atomic_compare_exchange_strong(&w->failed, &none, 1)) return;
    snprintf(w->why, sizeof w->why, "%s%s", STOPPED, why);
    atomic_store(&w->failed, 2);
    for (int r = 0; r < w->ranks; r++) {
        call(&w->rank[r].seat);
        for (int t = 0; t < THREADS; t++) call(&w->rank[r].pace[t].seat);
    }
}

const char *world_failed(World *w) { return has_failed(w) ? w->why : NULL; }

void stopped(World *w, Team *team) {
    while (!has_failed(w)) sched_yield(); /* another thread is writing the reason */
    team->error = w->why;
    team->kind = "CommAborted", team->rank = -1;
}

#endif
