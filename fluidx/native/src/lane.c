/* Steps of ranks without the interpreter: what a rank is to do reaches its thread through a lane, on which the thread waits in C. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "world.h"

#if defined(_MSC_VER)

void world_serve(World *w, int rank) { (void)w, (void)rank; }
void world_knock(World *w, int rank) { (void)w, (void)rank; }
void world_expect(World *w) { (void)w; }
void world_launch(World *w, Task *tasks, Interrupted interrupted, void *with) { (void)w, (void)tasks, (void)interrupted, (void)with; }

#else

/* Whatever goes wrong on a rank, the others must not wait for it. */
static void carry_out(World *w, int rank, Task *t) {
    Seat *s = &w->rank[rank].seat;
    note_core(s);
    for (const Fed *f = t->feeds; f < t->feeds + t->fed; f++) memcpy(f->to, f->from, f->bytes);
    while (t->at < t->count && !t->team.error) {
        const Record *r = &t->records[t->at++];
        r->fn(r->words, &t->team);
        if (interrupted(w, s) && !t->team.error) stopped(w, &t->team);
    }
    if (t->team.error) world_abort(w, t->team.error);
}

void world_serve(World *w, int rank) {
    Lane *lane = &w->rank[rank].lane;
    for (;;) {
        wait_for(w, &lane->seat, &lane->given, lane->taken + 1, 1);
        if (atomic_load(&lane->number) != ++lane->taken) return;
        carry_out(w, rank, lane->task);
        atomic_store(&lane->done, lane->taken); /* the task is gone from here on */
        call(&w->rank[0].seat);
    }
}

void world_knock(World *w, int rank) {
    atomic_fetch_add(&w->rank[rank].lane.given, 1);
    call(&w->rank[rank].lane.seat);
}

/* Not where they would be awake at the cost of whoever has work. */
void world_expect(World *w) {
    if (w->crowded) return;
    for (int r = 1; r < w->ranks; r++) call(&w->rank[r].lane.seat);
}

void world_launch(World *w, Task *tasks, Interrupted asked, void *with) {
    Seat *own = &w->rank[0].seat;
    for (int r = 1; r < w->ranks; r++) {
        Lane *lane = &w->rank[r].lane;
        lane->task = &tasks[r];
        atomic_store(&lane->number, atomic_load(&lane->given) + 1);
        world_knock(w, r);
    }
    own->with = with, own->asked = 0, own->interrupted = asked;
    carry_out(w, 0, &tasks[0]);
    for (int r = 1; r < w->ranks; r++) {
        Lane *lane = &w->rank[r].lane;
        wait_for(w, own, &lane->done, atomic_load(&lane->number), 1);
    }
    own->interrupted = NULL;
}

#endif
