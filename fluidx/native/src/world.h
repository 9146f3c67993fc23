/* What the ranks of one world share, for the files that work on it. A rank waits in a seat of its own for a counter that only grows.
 *
 * Ranks are threads of one process, or processes (`shared`): a world lies in memory then that all of them have at the same address, so that
 * addresses in it mean the same to all, and so do those of what ranks bring to a meeting. */
#ifndef FLUIDX_WORLD_H
#define FLUIDX_WORLD_H

#include "meet.h"

#if !defined(_MSC_VER) /* no C11 atomics there: ranks meet in Python */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

typedef atomic_uint_least64_t Counter;

/* Where who sits in a seat is called by a futex: a process that is killed holds nothing of it, as it would of a mutex. */
#if defined(__linux__) && UINTPTR_MAX > UINT32_MAX
#define FUTEXES 1
#else
#define FUTEXES 0
#endif

typedef struct {
#if !FUTEXES
    pthread_mutex_t mutex;
    pthread_cond_t call;
#endif
    atomic_int called;
    int meets; /* whether its rank waits there for others, not for a task */
    _Alignas(64) atomic_int asleep;
    atomic_int core;  /* on which its rank was when it came to its latest meeting, or -1 */
    int64_t patience; /* ns to wait awake */
    unsigned waits, moved, stays; /* the wait in which it last left another rank's core, and how many it stays at least before it does again */
    Interrupted interrupted; /* NULL where nobody can interrupt */
    void *with;
    int64_t asked; /* when that was looked into, or 0 */
} Seat;

/* What one of a rank's threads is given to do. It waits for that in a seat apart: how long steps are apart says nothing of meetings. */
typedef struct {
    Seat seat;
    _Alignas(64) Counter given; /* how often the thread was called */
    Counter number;             /* of the call that is for the task */
    Task *task;
    Seat *own; /* where the thread waits while it does that */
    _Alignas(64) Counter done; /* the number of the task that it has done */
    uint64_t taken;
} Lane;

/* How far one of a rank's threads has come in a run, and where it waits for the other one. */
typedef struct {
    Seat seat;
    _Alignas(64) Counter at;
} Pace;

typedef struct {
    Seat seat; /* of whichever thread communicates */
    Stalled stalled; /* of the process that the rank is in, and what it is given */
    void *told;
    _Atomic(const char *) came, done; /* the texts of the meeting or the messages that it came to, and got behind it, last */
    atomic_int inside;                /* it is not behind what it came to */
    int64_t trail[TRAIL];             /* where it is in its program, by whoever runs that */
    Lane lane[THREADS];
    Pace pace[THREADS];
} Rank;

typedef struct {
    _Alignas(64) Counter came; /* how often */
    const int64_t *words;
    int rank;
} Member;

struct Meeting {
    World *world;
    Meeting *next;
    int n, verdict; /* by the last to arrive; it stays as it is until all have seen it, for nobody is last before */
    _Alignas(64) Counter state;
    const int64_t *words[MOST_RANKS]; /* what all brought, by the last to arrive */
    Member members[];
};

typedef struct Message {
    struct Message *next;
    const char *data;
    char text[]; /* of the type; behind it the data of a small one */
} Message;

struct Mailbox {
    World *world;
    Mailbox *next;
    int from, to;
    _Alignas(64) Counter posted; /* written by the sender, like the next four */
    uint64_t waits_for;          /* the number of the latest message that it has to see taken */
    uint64_t gone;               /* how many messages it has freed, which were taken */
    Message *oldest, *last;
    _Alignas(64) Counter taken; /* written by the receiver, like the next two */
    atomic_int taking;
    Message *read; /* the one before the first that is not taken */
};

struct World {
    int ranks, crowded; /* more of them than cores */
    int64_t spin, timeout, stall; /* ns */
    double seconds;
    size_t shared, used; /* the bytes that a world of processes lies in, and has taken; 0 where ranks are threads */
    _Atomic(Seat *) launcher; /* where the thread that launches waits */
    atomic_int failed; /* 0, 1 while `why` is written, 2 */
    char why[1024];
    _Atomic(Meeting *) meetings;
    _Atomic(Mailbox *) mailboxes;
    Rank rank[];
};

static inline int has_failed(World *w) { return atomic_load(&w->failed) == 2; }
void stopped(World *w, Team *team); /* the error of a rank that stops because the world has failed */

/* Wait until a counter has reached `goal`, at most so many ns. A wait for work on arrays does not end when the world fails. */
enum { REACHED, FAILED, LATE, CALLED, PAUSED }; /* the last two stay within the wait */
#define ENDLESS INT64_MAX
int wait_for(World *w, Seat *s, Counter *counter, uint64_t goal, int64_t most);
void wait_for_work(World *w, Seat *s, Counter *counter, uint64_t goal);
void call(Seat *s); /* who sits there, to look again */
int interrupted(World *w, Seat *s); /* whether a user has stopped the run, which is looked into now and then; the world has failed then */
void note_core(Seat *s);

/* A flight recorder: whoever shares the memory reads it when the rank is gone. Texts last as long as the world. */
static inline void note_came(World *w, int rank, const char *text) {
    atomic_store_explicit(&w->rank[rank].inside, 1, memory_order_relaxed);
    atomic_store_explicit(&w->rank[rank].came, text, memory_order_relaxed);
}
static inline void note_done(World *w, int rank, const char *text) {
    if (text) atomic_store_explicit(&w->rank[rank].done, text, memory_order_relaxed);
    atomic_store_explicit(&w->rank[rank].inside, 0, memory_order_relaxed);
}

#endif
#endif
