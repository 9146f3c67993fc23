/* Collective calls of ranks that share memory: barriers of a group's members, and mailboxes between two ranks.
 *
 * A collective call is a call in a rank's block of calls, without the interpreter's lock; its words describe the rank's contribution. See
 * meet.c. */
#ifndef FLUIDX_MEET_H
#define FLUIDX_MEET_H

#include "native.h"

typedef struct World World; /* the state that the ranks of one world share */
typedef struct Meeting Meeting;
typedef struct Mailbox Mailbox;

enum { MOST_RANKS = 256 };

/* The threads of a rank: the one that computes and, if a run has two lists of calls, the one that communicates at the same time. */
enum { COMPUTES, BESIDE, THREADS };

/* A rank spins for `spin` ns before it sleeps, and waits `timeout` seconds in all. NULL without memory, or if C has no worlds here. */
typedef int (*Interrupted)(void *with); /* has a user stopped the run? */
typedef void (*Stalled)(void *told, const char *text); /* called when a rank has waited long for another; it goes on waiting */

/* The work of one thread: copy feeds, then make calls. `at` is one after the latest started call, and `team` has its error. */
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
World *world_in(void *memory, size_t bytes, int ranks, double timeout, int64_t spin); /* for processes, in zeroed shared memory */
void world_watch(World *w, int rank, double seconds, Stalled stalled, void *told); /* report waits of so many seconds; rank -1: of all */
void world_free(World *w);
int world_ranks(const World *w);
void world_abort(World *w, const char *why); /* stop all waiting and arriving ranks; the first reason stays */
const char *world_failed(World *w);          /* the error text for arriving ranks after a failure, or NULL */
void world_reset(World *w);                  /* drop failures and messages, while no rank is in a call */
Meeting *world_meeting(World *w, int n, const int *ranks); /* the meeting of a group, made at the first call; NULL without memory */
Mailbox *world_mailbox(World *w, int from, int to);
int world_brought(const Meeting *m, const int64_t *const **words); /* the number of members, and their words, in the latest call */
enum { TRAIL_TEXT, TRAIL_STEP, TRAIL }; /* a progress record: the address of the operator's text, or 0; the number of the run */
int64_t *world_trail(World *w, int rank);
const char *world_latest(World *w, int rank, int done); /* the text of the latest call that a rank started, or completed; or NULL */
void world_note(World *w, int rank, const char *text, int done); /* record the start, or the end, of a call outside of this world */
int world_inside(World *w, int rank);                    /* is the rank in a call? */

/* heap.c. A heap in the part of the shared memory that belongs to the process of a rank. */
void heap_begin(void *at, size_t bytes);
void *heap_take(size_t bytes); /* aligned to 64 bytes; all zero if it is large. NULL if there is no more */
void heap_give(void *p);
enum { HEAP_LARGE = 1 << 20 };

/* lane.c. `world_serve`: a rank's thread sleeps without the interpreter's lock until it gets a task or a knock; it runs a task and sleeps
 * again, or returns after a knock. `world_launch` gives the threads their tasks: those of the compute threads, by rank, then those of the
 * second threads; a task without calls is skipped. The calling thread runs rank 0's compute task. It returns when all are done. */
void world_serve(World *w, int rank, int thread);
void world_knock(World *w, int rank, int thread); /* make the thread return */
void world_expect(World *w);                      /* wake the threads: a launch comes soon */
void world_begin(World *w, int rank);             /* begin a run: set the progress of a rank's threads, or of all (-1), to 0 */
void world_launch(World *w, Task *tasks, Interrupted interrupted, void *with);

/* Words of the kernels `reach` and `await`: the world, the rank, the calling thread, and the progress: `reach` sets that of the calling
 * thread, and `await` waits for that of the other one. */
enum { PACE_WORLD, PACE_RANK, PACE_THREAD, PACE_AT, PACE_WORDS };
void reach_pace(const int64_t *a);
void await_pace(const int64_t *a, Team *team);

/* Words of the kernel `meet`: one member's contribution to a collective call. MEET_TOLD is a text for the flight recorder, and MEET_KEPT the
 * same text, or NULL if the completed call is not recorded. MEET_GRACE are ns beyond the timeout, for members that may be late because of
 * ranks on other hosts, which report it themselves. After MEET_TAKES follow the positions of the arrays in the words: inputs by receiver,
 * then outputs by sender. A call without parts has one of each, and MEET_GIVES is -1; it is less than -1 for more arrays, which are not
 * compared. An array is its address, a text of its type, its number of axes, their sizes and their strides in bytes. */
enum {
    MEET_AT, MEET_ME, MEET_WORK, MEET_HOW, MEET_ROOT, MEET_ITEM, MEET_SIZE, MEET_TEXT, MEET_TOLD, MEET_KEPT, MEET_GRACE, MEET_ALIKE,
    MEET_GIVES, MEET_TAKES, MEET_ARRAYS
};
enum { ARRAY_AT, ARRAY_TEXT, ARRAY_AXES, ARRAY_SIZES };

/* Do the share of the members `first` to `end` of the work for all n members. `words` are those of all. */
typedef void (*MeetWork)(const int64_t *const *words, int64_t n, int64_t first, int64_t end);

/* For ranks that are processes, the words, texts and arrays are in shared memory: the kernel `meet_at` has one word, their address. */

/* A collective call: wait for the other members, check that all contributions fit together, and do this member's share of the work. `work`
 * may be NULL. */
void meet_others(const int64_t *a, MeetWork work, Team *team);

/* Words of the kernel `exchange`: the world, this rank, the numbers of sent and of received messages, a text for the flight recorder, and for
 * each message its mailbox, the peer, address, bytes, and a text of the type. All sends are posted before the first wait. */
enum { MAIL_WORLD, MAIL_ME, MAIL_SENDS, MAIL_RECVS, MAIL_TOLD, MAIL_FIRST };
enum { MAIL_BOX, MAIL_PEER, MAIL_AT, MAIL_BYTES, MAIL_TEXT, MAIL_WORDS };
void exchange_mail(const int64_t *a, Team *team);

#endif
