/* Where ranks meet that share memory: meetings of the members of a group, and mailboxes between two ranks.
 *
 * A rank comes as a call in its block of calls, without the interpreter's lock; its words say what it brings. See meet.c. */
#ifndef FLUIDX_MEET_H
#define FLUIDX_MEET_H

#include "native.h"

typedef struct World World; /* what the ranks of one world share */
typedef struct Meeting Meeting;
typedef struct Mailbox Mailbox;

enum { MOST_RANKS = 256 };

/* The threads of a rank: the one that computes, and, where a run has two lists of calls, the one that communicates beside it. */
enum { COMPUTES, BESIDE, THREADS };

/* A rank waits `spin` ns awake before it sleeps, and `timeout` seconds in all. NULL without memory, or where ranks cannot meet in C. */
typedef int (*Interrupted)(void *with); /* whether a user has stopped the run */
typedef void (*Stalled)(void *told, const char *text); /* a rank has waited long for another; it goes on waiting */

/* What one thread is to do: to copy feeds, then to make calls. `at` is behind the latest that began, and `team` has its error. */
typedef struct {
    void *to;
    const void *from;
    size_t bytes;
} Fed;
typedef struct Task {
    const Fed *feeds;
    const Record *records;
    int64_t fed, count, at;
    Team team;
} Task;

World *world_make(int ranks, double timeout, int64_t spin);
World *world_in(void *memory, size_t bytes, int ranks, double timeout, int64_t spin); /* of processes, in zeroed memory that they share */
void world_watch(World *w, int rank, double seconds, Stalled stalled, void *told); /* have waits of so many seconds told of; -1: by all */
void world_free(World *w);
int world_ranks(const World *w);
void world_abort(World *w, const char *why); /* stop who waits and who comes; the first reason stays */
const char *world_failed(World *w);          /* what ranks that come are told then, or NULL */
void world_reset(World *w);                  /* forget failures and messages, while no rank is there */
Meeting *world_meeting(World *w, int n, const int *ranks); /* the one there is for a group, or a new one; NULL without memory */
Mailbox *world_mailbox(World *w, int from, int to);
int world_brought(const Meeting *m, const int64_t *const **words); /* by how many members, and what, to the latest meeting */
enum { TRAIL_TEXT, TRAIL_STEP, TRAIL }; /* the address of a text of the operator, or 0; the number of the run */
int64_t *world_trail(World *w, int rank);
const char *world_latest(World *w, int rank, int done); /* what it came to, or got behind it, last: a text, or NULL */
void world_note(World *w, int rank, const char *text, int done); /* has it come to something that is not met here, or got behind it? */
int world_inside(World *w, int rank);                    /* is it not behind what it came to? */

/* heap.c. Memory that a rank which is a process takes from its own part of what all share. */
void heap_begin(void *at, size_t bytes);
void *heap_take(size_t bytes); /* aligned to 64 bytes; all zero if it is large. NULL when there is no more */
void heap_give(void *p);
enum { HEAP_LARGE = 1 << 20 };

/* lane.c. A rank's thread serves: it sleeps without the interpreter's lock until it is called, carries out its task if it is called for one,
 * and returns if not. `world_launch` gives the threads their tasks, which are those that compute, by rank, then those beside them; one
 * without calls is nobody's. It does that of rank 0 which computes itself, and returns when all are done. */
void world_serve(World *w, int rank, int thread);
void world_knock(World *w, int rank, int thread); /* let the thread return */
void world_expect(World *w);                      /* let the threads wake up: a launch is near */
void world_begin(World *w, int rank);             /* a run begins: no thread of the rank, or of any (-1), has come anywhere in it */
void world_launch(World *w, Task *tasks, Interrupted interrupted, void *with);

/* Words of the kernels `reach` and `await`: the world, the rank, which of its threads does it, and how far: what `reach` says of the thread
 * itself, and how far `await` lets the other one come first. */
enum { PACE_WORLD, PACE_RANK, PACE_THREAD, PACE_AT, PACE_WORDS };
void reach_pace(const int64_t *a);
void await_pace(const int64_t *a, Team *team);

/* Words of the kernel `meet`: what one member brings. MEET_TOLD is a text for the flight recorder, and MEET_KEPT the same again or NULL where
 * nobody asks whether it got behind it. MEET_GRACE are ns beyond the timeout, where members may be late because ranks elsewhere are, which
 * they tell themselves. After MEET_TAKES follow the places, in the words, of the arrays: given ones by reader, then those that take what the
 * others give; of a call without parts there is one of each, MEET_GIVES is -1 then, and less where there are more which nobody compares. An
 * array is its address, a text of its type, its number of axes, their sizes and their strides in bytes. */
enum {
    MEET_AT, MEET_ME, MEET_WORK, MEET_HOW, MEET_ROOT, MEET_ITEM, MEET_SIZE, MEET_TEXT, MEET_TOLD, MEET_KEPT, MEET_GRACE, MEET_ALIKE,
    MEET_GIVES, MEET_TAKES, MEET_ARRAYS
};
enum { ARRAY_AT, ARRAY_TEXT, ARRAY_AXES, ARRAY_SIZES };

/* Do the work of the members from `first` to `end` for all n of them, whose words are given. */
typedef void (*MeetWork)(const int64_t *const *words, int64_t n, int64_t first, int64_t end);

/* A rank that is a process brings words, and texts and arrays in them, that lie in shared memory: `meet_at` has one word, their address. */

/* Meet the others; when all have come and brought what fits together, do this member's share of the work. `work` may be NULL. */
void meet_others(const int64_t *a, MeetWork work, Team *team);

/* Words of the kernel `exchange`: the world, my rank, how many messages are sent and received, a text for the flight recorder, and for each
 * message its mailbox, the peer, address, bytes, and a text of the type. All are posted before the first is waited for. */
enum { MAIL_WORLD, MAIL_ME, MAIL_SENDS, MAIL_RECVS, MAIL_TOLD, MAIL_FIRST };
enum { MAIL_BOX, MAIL_PEER, MAIL_AT, MAIL_BYTES, MAIL_TEXT, MAIL_WORDS };
void exchange_mail(const int64_t *a, Team *team);

#endif
