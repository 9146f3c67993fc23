/* Launches: steps of ranks without the interpreter. A thread of a rank waits in C for tasks in its lane. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "world.h"

#if defined(_MSC_VER)

void world_serve(World *w, int rank, int thread) { (void)w, (void)rank, (void)thread; }
void world_knock(World *w, int rank, int thread) { (void)w, (void)rank, (void)thread; }
void world_expect(World *w) { (void)w; }
void world_begin(World *w, int rank) { (void)w, (void)rank; }
void world_launch(World *w, Task *tasks, Interrupted interrupted, void *with) { (void)w, (void)tasks, (void)interrupted, (void)with; }
void reach_pace(const int64_t *a) { (void)a; }
void await_pace(const int64_t *a, Team *team) { (void)a, (void)team; }

#else

/* After any error on a thread, the other ranks must not wait for it. */
static void carry_out(World *w, Seat *s, Task *t) {
    note_core(s);
    for (const Fed *f = t->feeds; f < t->feeds + t->fed; f++) memcpy(f->to, f->from, f->bytes);
    while (t->at < t->count && !t->team.error) {
        const Record *r = &t->records[t->at++];
        r->fn(r->words, &t->team);
        if (interrupted(w, s) && !t->team.error) stopped(w, &t->team);
    }
    if (t->team.error) world_abort(w, t->team.error);
}

/* The seat of a rank's compute thread in a run: it waits for other ranks, or only for its second thread, which waits for them. */
static Seat *own_seat(World *w, int rank, const Task *beside) {
    return beside->count ? &w->rank[rank].pace[COMPUTES].seat : &w->rank[rank].seat;
}

void world_serve(World *w, int rank, int thread) {
    Lane *lane = &w->rank[rank].lane[thread];
    for (;;) {
        wait_for_work(w, &lane->seat, &lane->given, lane->taken + 1);
        if (atomic_load(&lane->number) != ++lane->taken) return;
        carry_out(w, lane->own, lane->task);
        atomic_store(&lane->done, lane->taken); /* the task must not be used after this */
        call(w->launcher);
    }
}

void world_knock(World *w, int rank, int thread) {
    Lane *lane = &w->rank[rank].lane[thread];
    atomic_fetch_add(&lane->given, 1);
    call(&lane->seat);
}

/* Not where they would be awake at the cost of whoever has work. Threads that communicate have nothing to do at first. */
void world_expect(World *w) {
    if (w->crowded) return;
    for (int r = 1; r < w->ranks; r++) call(&w->rank[r].lane[COMPUTES].seat);
}

void world_begin(World *w, int rank) {
    for (int r = 0; r < w->ranks; r++)
        for (int t = 0; t < THREADS; t++)
            if (rank < 0 || r == rank) atomic_store(&w->rank[r].pace[t].at, 0);
}

static void give(World *w, int rank, int thread, Seat *own, Task *task) {
    Lane *lane = &w->rank[rank].lane[thread];
    lane->task = task, lane->own = own;
    atomic_store(&lane->number, atomic_load(&lane->given) + 1);
    world_knock(w, rank, thread);
}

void world_launch(World *w, Task *tasks, Interrupted asked, void *with) {
    Task *beside = tasks + w->ranks;
    Seat *own = own_seat(w, 0, beside);
    world_begin(w, -1);
    w->launcher = own;
    for (int r = 0; r < w->ranks; r++) {
        if (r) give(w, r, COMPUTES, own_seat(w, r, &beside[r]), &tasks[r]);
        if (beside[r].count) give(w, r, BESIDE, &w->rank[r].seat, &beside[r]);
    }
    own->with = with, own->asked = 0, own->interrupted = asked;
    carry_out(w, own, &tasks[0]);
    for (int r = 0; r < w->ranks; r++) {
        for (int t = r ? COMPUTES : BESIDE; t < THREADS; t++) {
            Lane *lane = &w->rank[r].lane[t];
            if (t == COMPUTES || beside[r].count) wait_for_work(w, own, &lane->done, atomic_load(&lane->number));
        }
    }
    own->interrupted = NULL;
}

/* -- the two threads of a rank ------------------------------------------------------------------------------------------------------- */

void reach_pace(const int64_t *a) {
    Rank *r = &PTR(World, a[PACE_WORLD])->rank[a[PACE_RANK]];
    atomic_store(&r->pace[a[PACE_THREAD]].at, (uint64_t)a[PACE_AT]);
    call(&r->pace[!a[PACE_THREAD]].seat);
}

/* No deadline: the other thread may compute for long, and its own waits for ranks have deadlines. */
void await_pace(const int64_t *a, Team *team) {
    World *w = PTR(World, a[PACE_WORLD]);
    Rank *r = &w->rank[a[PACE_RANK]];
    if (wait_for(w, &r->pace[a[PACE_THREAD]].seat, &r->pace[!a[PACE_THREAD]].at, (uint64_t)a[PACE_AT], ENDLESS) != REACHED) stopped(w, team);
}

#endif
