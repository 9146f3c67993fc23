/* The state that the ranks of one world share. A rank waits in its own seat for a counter that only grows.
 *
 * Ranks are threads of one process, or processes (`shared`). For processes the world is in shared memory, which all of them map at the same
 * address, so that addresses in it, and those of the ranks' arrays, are valid in each process. */
#ifndef FLUIDX_WORLD_H
#define FLUIDX_WORLD_H

#include "meet.h"

#if !defined(_MSC_VER) /* MSVC has no C11 atomics: collective calls are in Python there */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

typedef atomic_uint_least64_t Counter;

/* With futexes a killed process cannot hold a lock, as it could with a mutex. */
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
    int meets; /* does its rank wait here for other ranks, not for a task? */
    _Alignas(64) atomic_int asleep;
    atomic_int core;  /* the core of its rank at its latest collective call, or -1 */
    int64_t patience; /* ns to spin */
    unsigned waits, moved, stays; /* waits so far; the wait in which it last moved to another core; the waits before it may move again */
    Interrupted interrupted; /* NULL if nobody can interrupt */
    void *with;
    int64_t asked; /* when `interrupted` was called last, or 0 */
} Seat;

/* The task of one of a rank's threads. The thread waits for it in a separate seat, because the time between steps differs from that between
 * collective calls. */
typedef struct {
    Seat seat;
    _Alignas(64) Counter given; /* tasks and knocks so far */
    Counter number;             /* the value of `given` for the task */
    Task *task;
    Seat *own; /* the seat in which the thread waits during the task */
    _Alignas(64) Counter done; /* the number of the latest completed task */
    uint64_t taken;
} Lane;

/* The progress of one of a rank's threads in a run, and the seat in which it waits for the other one. */
typedef struct {
    Seat seat;
    _Alignas(64) Counter at;
} Pace;

typedef struct {
    Seat seat; /* of the thread that communicates */
    Stalled stalled; /* the callback of the rank's process, with its argument `told` */
    void *told;
    _Atomic(const char *) came, done; /* the texts of the latest call that it started, and that it completed */
    atomic_int inside;                /* is it in a call? */
    int64_t trail[TRAIL];             /* the progress record, written by the executor */
    Lane lane[THREADS];
    Pace pace[THREADS];
} Rank;

typedef struct {
    _Alignas(64) Counter came; /* the number of its arrivals */
    const int64_t *words;
    int rank;
} Member;

struct Meeting {
    World *world;
    Meeting *next;
    int n, verdict; /* set by the last member to arrive; it does not change before all have read it, because the next call needs them all */
    _Alignas(64) Counter state;
    const int64_t *words[MOST_RANKS]; /* the words of all members, set by the last one to arrive */
    Member members[];
};

typedef struct Message {
    struct Message *next;
    const char *data;
    char text[]; /* the type; then the data of a small message */
} Message;

struct Mailbox {
    World *world;
    Mailbox *next;
    int from, to;
    _Alignas(64) Counter posted; /* written by the sender, like the next four */
    uint64_t waits_for;          /* the number of the latest message for whose receive it must wait */
    uint64_t gone;               /* the number of received messages that it has freed */
    Message *oldest, *last;
    _Alignas(64) Counter taken; /* written by the receiver, like the next two */
    atomic_int taking;
    Message *read; /* the message before the first unreceived one */
};

struct World {
    int ranks, crowded; /* crowded: there are more ranks than cores */
    int64_t spin, timeout, stall; /* ns */
    double seconds;
    size_t shared, used; /* for processes: the bytes of the world's memory, and those in use; 0 if ranks are threads */
    _Atomic(Seat *) launcher; /* the seat of the thread that launches */
    atomic_int failed; /* 0, 1 while `why` is written, 2 */
    char why[1024];
    _Atomic(Meeting *) meetings;
    _Atomic(Mailbox *) mailboxes;
    Rank rank[];
};

static inline int has_failed(World *w) { return atomic_load(&w->failed) == 2; }
void stopped(World *w, Team *team); /* the error of a rank that stops because the world has failed */

/* Wait until a counter has reached `goal`, at most `most` ns. A wait for work on arrays does not end when the world fails. */
enum { REACHED, FAILED, LATE, CALLED, PAUSED }; /* the last two are internal */
#define ENDLESS INT64_MAX
int wait_for(World *w, Seat *s, Counter *counter, uint64_t goal, int64_t most);
void wait_for_work(World *w, Seat *s, Counter *counter, uint64_t goal);
void call(Seat *s); /* wake the thread in the seat, so that it checks its counter again */
int interrupted(World *w, Seat *s); /* has a user stopped the run? Checked from time to time; if so, the world is aborted */
void note_core(Seat *s);

/* The flight recorder: processes that share the memory read it after the rank has ended. Texts live as long as the world. */
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
