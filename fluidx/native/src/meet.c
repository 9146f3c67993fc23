/* Meetings and mailboxes of ranks that are threads of one process.
 *
 * Every wait is for a counter that only grows. A rank looks at it awake for a while, then sleeps in a seat of its own, from which whoever
 * moves the counter calls it. A world that has failed ends all waits but those for ranks that are at work on this one's arrays: they
 * finish soon, and what they read and write must not go away under them. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "meet.h"

#include <stdlib.h>

#if defined(_MSC_VER)

World *world_make(int ranks, double timeout, int64_t spin) {
    (void)ranks, (void)timeout, (void)spin;
    return NULL; /* no C11 atomics: ranks meet in Python */
}
void world_free(World *w) { (void)w; }
int world_ranks(const World *w) {
    (void)w;
    return 0;
}
void world_abort(World *w, const char *why) { (void)w, (void)why; }
void world_reset(World *w) { (void)w; }
Meeting *world_meeting(World *w, int n, const int *ranks) {
    (void)w, (void)n, (void)ranks;
    return NULL;
}
Mailbox *world_mailbox(World *w, int from, int to) {
    (void)w, (void)from, (void)to;
    return NULL;
}
void meet_others(const int64_t *a, MeetWork work, Team *team) { (void)a, (void)work, (void)team; }
void exchange_mail(const int64_t *a, Team *team) { (void)a, (void)team; }

#else

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum {
    LOOKS = 64,         /* at a counter between two looks at the clock */
    TRY_AGAIN = 32,     /* waits after which a rank has its full patience again */
    SMALL = 4096,       /* elements up to which the last to arrive does all the work, and nobody waits a second time */
    EAGER = 64 * 1024,  /* bytes up to which a message is copied; above, its sender waits until the receiver has read */
    ARRIVALS = 1 << 16, /* a meeting's counter: ARRIVALS for each time that all had come, and the number of those who have come since */
};

typedef atomic_uint_least64_t Counter;

typedef struct {
    pthread_mutex_t mutex;
    pthread_cond_t call;
    _Alignas(64) atomic_int asleep;
    int64_t patience; /* ns to wait awake */
    unsigned waits;
} Seat;

struct World {
    int ranks;
    int64_t spin, timeout; /* ns */
    double seconds;
    atomic_int failed; /* 0, 1 while `why` is written, 2 */
    char *why;
    Meeting *meetings;
    Mailbox *mailboxes;
    Seat seats[];
};

enum { REFUSED, DONE, SHARED }; /* how a meeting went */

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
    _Alignas(64) Counter posted; /* written by the sender, like the next two */
    uint64_t waits_for;          /* the number of the latest message that it has to see taken */
    Message *last;
    _Alignas(64) Counter taken; /* written by the receiver, like the next two */
    atomic_int taking;
    Message *read; /* the one before the first that is not taken */
};

/* -- worlds ------------------------------------------------------------------------------------------------------------------------ */

static const char STOPPED[] = "stopped because another rank failed: ";

static void *zeroed(size_t bytes) {
    void *p;
    if (posix_memalign(&p, 64, bytes)) return NULL;
    return memset(p, 0, bytes);
}

static int seat_init(Seat *s) {
    pthread_condattr_t attr;
    if (pthread_condattr_init(&attr)) return -1;
#if !defined(__APPLE__)
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
#endif
    int wrong = pthread_mutex_init(&s->mutex, NULL) || pthread_cond_init(&s->call, &attr);
    pthread_condattr_destroy(&attr);
    return wrong ? -1 : 0;
}

World *world_make(int ranks, double timeout, int64_t spin) {
    World *w = ranks > 0 && ranks <= MOST_RANKS ? zeroed(sizeof(World) + (size_t)ranks * sizeof(Seat)) : NULL;
    if (!w) return NULL;
    w->ranks = ranks, w->seconds = timeout, w->spin = spin;
    w->timeout = timeout < 1e9 ? (int64_t)(timeout * 1e9) : (int64_t)1e18;
    for (int r = 0; r < ranks; r++) {
        w->seats[r].patience = spin;
        if (seat_init(&w->seats[r])) {
            free(w);
            return NULL;
        }
    }
    return w;
}

int world_ranks(const World *w) { return w->ranks; }

static void empty(Mailbox *box) {
    for (Message *at = box->read, *next; at; at = next) {
        next = at->next;
        free(at);
    }
    box->read = box->last = NULL;
    box->waits_for = 0;
    atomic_store(&box->posted, 0);
    atomic_store(&box->taken, 0);
}

void world_reset(World *w) {
    for (Meeting *m = w->meetings; m; m = m->next) {
        atomic_store(&m->state, 0);
        for (int k = 0; k < m->n; k++) atomic_store(&m->members[k].came, 0);
    }
    for (Mailbox *box = w->mailboxes; box; box = box->next) empty(box);
    free(w->why);
    w->why = NULL;
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
    for (int r = 0; r < w->ranks; r++) {
        pthread_cond_destroy(&w->seats[r].call);
        pthread_mutex_destroy(&w->seats[r].mutex);
    }
    free(w);
}

Meeting *world_meeting(World *w, int n, const int *ranks) {
    Meeting *m = zeroed(sizeof(Meeting) + (size_t)n * sizeof(Member));
    if (!m) return NULL;
    m->world = w, m->n = n, m->next = w->meetings;
    for (int k = 0; k < n; k++) m->members[k].rank = ranks[k];
    return w->meetings = m;
}

Mailbox *world_mailbox(World *w, int from, int to) {
    Mailbox *box = zeroed(sizeof(Mailbox));
    if (!box) return NULL;
    box->world = w, box->from = from, box->to = to, box->next = w->mailboxes;
    return w->mailboxes = box;
}

/* -- waiting ----------------------------------------------------------------------------------------------------------------------- */

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

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

static int has_failed(World *w) { return atomic_load(&w->failed) == 2; }

enum { REACHED, FAILED, LATE };

/* Wait until a counter has reached `goal`. A wait for `work` of another rank has no deadline and does not end when the world fails.
 *
 * Being called from sleep takes some 30 us, so a rank first stays awake. Where others share its core that only keeps them from coming: a
 * rank that stayed awake in vain does so half as long the next time, and now and then tries again. */
static int wait_for(World *w, int rank, Counter *counter, uint64_t goal, int work) {
    Seat *s = &w->seats[rank];
    int64_t start = 0, waited = 0, most = ++s->waits % TRY_AGAIN ? s->patience : w->spin;
    for (; waited <= most; waited = now() - start) {
        for (int i = 0; i < LOOKS; i++) {
            if (atomic_load_explicit(counter, memory_order_acquire) >= goal) {
                if (start) s->patience = now() - start <= most ? w->spin : s->patience / 2; /* later: the other one took this core */
                return REACHED;
            }
            if (!work && has_failed(w)) return FAILED;
            pause_briefly();
        }
        if (!start) start = now();
    }
    s->patience /= 2;
    int64_t deadline = work ? INT64_MAX : start + w->timeout;
    pthread_mutex_lock(&s->mutex);
    atomic_store(&s->asleep, 1); /* before the look at the counter: whoever moves it looks here afterwards */
    int found;
    while ((found = atomic_load(counter) >= goal ? REACHED : !work && has_failed(w) ? FAILED : LATE) == LATE && now() < deadline) {
        if (work)
            pthread_cond_wait(&s->call, &s->mutex);
        else
            sleep_until(s, deadline);
    }
    atomic_store(&s->asleep, 0);
    pthread_mutex_unlock(&s->mutex);
    return found;
}

static void call(World *w, int rank) {
    Seat *s = &w->seats[rank];
    if (!atomic_load(&s->asleep)) return;
    pthread_mutex_lock(&s->mutex);
    pthread_cond_signal(&s->call);
    pthread_mutex_unlock(&s->mutex);
}

void world_abort(World *w, const char *why) {
    int none = 0;
    if (!atomic_compare_exchange_strong(&w->failed, &none, 1)) return;
    size_t size = sizeof STOPPED + strlen(why);
    if ((w->why = malloc(size))) snprintf(w->why, size, "%s%s", STOPPED, why);
    atomic_store(&w->failed, 2);
    for (int r = 0; r < w->ranks; r++) call(w, r);
}

static void stopped(World *w, Team *team) {
    while (!has_failed(w)) sched_yield(); /* somebody is writing why */
    team->error = w->why ? w->why : STOPPED;
    team->kind = "CommAborted", team->rank = -1;
}

/* The text in `team` is an error, which stops all others. */
static void fail(World *w, Team *team, const char *kind, int rank) {
    team->error = team->text, team->kind = kind, team->rank = rank;
    world_abort(w, team->text);
}

#define SAY(team, ...) snprintf((team)->text, sizeof(team)->text, __VA_ARGS__)

/* -- meetings ---------------------------------------------------------------------------------------------------------------------- */

static const char *text_of(const int64_t *a) { return PTR(const char, a[MEET_TEXT]); }
static const int64_t *array_of(const int64_t *a, int64_t k) { return a + a[MEET_ARRAYS + k]; }

/* Whether all are in the same call with arrays that fit together; the error is in `team` otherwise. */
static int agree(Meeting *m, Team *team) {
    const int64_t *first = m->words[0];
    int64_t n = m->n;
    for (int k = 1; k < n; k++) {
        const int64_t *other = m->words[k];
        if (other[MEET_ALIKE] == first[MEET_ALIKE] && !memcmp(text_of(other), text_of(first), (size_t)first[MEET_ALIKE])) continue;
        int r = m->members[0].rank, s = m->members[k].rank;
        SAY(team, "ranks disagree: rank %d is in %s, rank %d in %s", r, text_of(first), s, text_of(other));
        team->rank = s;
        return 0;
    }
    if (first[MEET_GIVES] < 0) return 1;
    int length = (int)strcspn(text_of(first), " ");
    for (int k = 0; k < n; k++) {
        const int64_t *a = m->words[k];
        if (a[MEET_GIVES] == n && a[MEET_TAKES] == n) continue;
        SAY(team, "ranks disagree: rank %d brings %lld parts to %.*s and takes %lld, among %lld ranks", m->members[k].rank,
            (long long)a[MEET_GIVES], length, text_of(first), (long long)a[MEET_TAKES], (long long)n);
        team->rank = m->members[k].rank;
        return 0;
    }
    for (int k = 0; k < n; k++) {
        for (int j = 0; j < n; j++) {
            const char *want = PTR(const char, array_of(m->words[k], n + j)[ARRAY_TEXT]);
            const char *have = PTR(const char, array_of(m->words[j], k)[ARRAY_TEXT]);
            if (!strcmp(want, have)) continue;
            int r = m->members[k].rank, s = m->members[j].rank;
            SAY(team, "ranks disagree: rank %d expects %s from rank %d in %.*s, which gives %s", r, want, s, length, text_of(first), have);
            team->rank = s;
            return 0;
        }
    }
    return 1;
}

/* What the last to arrive does: compare, and work for everyone where that is little. */
static int preside(Meeting *m, MeetWork work, Team *team) {
    int64_t most = 0;
    for (int k = 0; k < m->n; k++) {
        m->words[k] = m->members[k].words;
        if (m->words[k][MEET_SIZE] > most) most = m->words[k][MEET_SIZE]; /* ranks may bring different sizes */
    }
    if (!agree(m, team)) {
        fail(m->world, team, "CommError", team->rank);
        return REFUSED;
    }
    if (work && most > SMALL) return SHARED;
    if (work) work(m->words, m->n, 0, m->n);
    return DONE;
}

/* All have come: let them go. */
static void release(Meeting *m, int64_t me, uint64_t state) {
    atomic_store(&m->state, (state / ARRIVALS + 1) * ARRIVALS);
    for (int k = 0; k < m->n; k++)
        if (k != me) call(m->world, m->members[k].rank);
}

static void say_missing(Meeting *m, const int64_t *a, uint64_t came, Team *team) {
    int rank = m->members[a[MEET_ME]].rank, first = -1, some = 0;
    char names[200] = "?";
    size_t at = 0;
    for (int k = 0; k < m->n; k++) {
        if (atomic_load(&m->members[k].came) >= came) continue;
        if (first < 0 || m->members[k].rank < first) first = m->members[k].rank;
        if (at < sizeof names - 8) at += (size_t)snprintf(names + at, sizeof names - at, "%s%d", some ? ", " : "", m->members[k].rank);
        some++;
    }
    SAY(team, "rank %d waited %g s in %.*s; rank%s %s did not arrive", rank, m->world->seconds, (int)strcspn(text_of(a), " "), text_of(a),
        some > 1 ? "s" : "", names);
    team->rank = first;
}

/* Whether this member, which will not wait any more, is out of the meeting; not if all have come meanwhile. */
static int left(Meeting *m, uint64_t goal) {
    uint64_t s = atomic_load(&m->state);
    while (s < goal) {
        if (s % ARRIVALS == (uint64_t)m->n) return 0; /* the last one is at work */
        if (atomic_compare_exchange_weak(&m->state, &s, s - 1)) return 1;
    }
    return 0;
}

void meet_others(const int64_t *a, MeetWork work, Team *team) {
    Meeting *m = PTR(Meeting, a[MEET_AT]);
    World *w = m->world;
    int64_t me = a[MEET_ME];
    Member *mine = &m->members[me];
    if (has_failed(w)) {
        stopped(w, team);
        return;
    }
    mine->words = a;
    uint64_t came = atomic_fetch_add(&mine->came, 1) + 1, state = atomic_fetch_add(&m->state, 1) + 1;
    uint64_t goal = (state / ARRIVALS + 1) * ARRIVALS;
    if (state % ARRIVALS == (uint64_t)m->n) {
        m->verdict = preside(m, work, team);
        release(m, me, state);
    } else {
        int found = wait_for(w, mine->rank, &m->state, goal, 0);
        if (found == LATE) say_missing(m, a, came, team);
        if (found != REACHED && left(m, goal)) {
            if (found == LATE)
                fail(w, team, "CommTimeout", team->rank);
            else
                stopped(w, team);
            return;
        }
        wait_for(w, mine->rank, &m->state, goal, 1);
        if (m->verdict == REFUSED) stopped(w, team);
    }
    if (m->verdict != SHARED) return;
    work(m->words, m->n, me, me + 1);
    state = atomic_fetch_add(&m->state, 1) + 1;
    if (state % ARRIVALS == (uint64_t)m->n)
        release(m, me, state);
    else
        wait_for(w, mine->rank, &m->state, (state / ARRIVALS + 1) * ARRIVALS, 1);
}

/* -- messages ---------------------------------------------------------------------------------------------------------------------- */

static const int64_t *mail(const int64_t *a, int64_t k) { return a + MAIL_FIRST + k * MAIL_WORDS; }

/* Messages are a list of which the first is read already, so that sender and receiver never touch the same end. */
static Message *message(const char *text, const char *data, size_t bytes, size_t copied) {
    size_t length = strlen(text) + 1;
    Message *made = malloc(sizeof(Message) + length + copied);
    if (!made) return NULL;
    memcpy(made->text, text, length);
    made->next = NULL;
    made->data = copied || !bytes ? memcpy(made->text + length, data, copied) : data;
    return made;
}

static int post(const int64_t *a) {
    Mailbox *box = PTR(Mailbox, a[MAIL_BOX]);
    size_t bytes = (size_t)a[MAIL_BYTES], copied = bytes <= EAGER ? bytes : 0;
    if (!box->last && !(box->read = box->last = message("", "", 0, 0))) return -1;
    Message *made = message(PTR(const char, a[MAIL_TEXT]), PTR(const char, a[MAIL_AT]), bytes, copied);
    if (!made) return -1;
    box->last->next = made;
    box->last = made;
    uint64_t number = atomic_load(&box->posted) + 1;
    if (bytes != copied) box->waits_for = number;
    atomic_store(&box->posted, number);
    call(box->world, box->to);
    return 0;
}

/* Wait for the peer of a message, whose counter has to reach `goal`. */
static int met(const int64_t *a, int rank, Counter *counter, uint64_t goal, const char *what, Team *team) {
    World *w = PTR(Mailbox, a[MAIL_BOX])->world;
    int found = wait_for(w, rank, counter, goal, 0);
    if (found == FAILED) stopped(w, team);
    if (found == LATE) {
        int peer = (int)a[MAIL_PEER];
        SAY(team, "rank %d waited %g s in %s rank %d; rank %d did not arrive", rank, w->seconds, what, peer, peer);
        fail(w, team, "CommTimeout", peer);
    }
    return found == REACHED;
}

static int receive(const int64_t *a, int rank, Team *team) {
    Mailbox *box = PTR(Mailbox, a[MAIL_BOX]);
    uint64_t taken = atomic_load(&box->taken);
    if (!met(a, rank, &box->posted, taken + 1, "recv from", team)) return 0;
    atomic_store(&box->taking, 1); /* before the look at the failure: a sender that gives up looks here afterwards */
    if (has_failed(box->world)) {
        stopped(box->world, team);
    } else {
        Message *next = box->read->next;
        const char *want = PTR(const char, a[MAIL_TEXT]);
        if (strcmp(want, next->text)) {
            SAY(team, "ranks disagree: rank %d expects %s from rank %d, which sent %s", rank, want, box->from, next->text);
            fail(box->world, team, "CommError", box->from);
        } else {
            memcpy(PTR(char, a[MAIL_AT]), next->data, (size_t)a[MAIL_BYTES]);
            free(box->read);
            box->read = next;
            atomic_store(&box->taken, taken + 1);
        }
    }
    atomic_store(&box->taking, 0);
    call(box->world, box->from);
    return !team->error;
}

/* A rank that fails takes its arrays away once nobody is reading them; the failed world keeps others from beginning to. */
static void give_up(const int64_t *a) {
    for (int64_t k = 0; k < a[MAIL_SENDS]; k++)
        while (atomic_load(&PTR(Mailbox, mail(a, k)[MAIL_BOX])->taking)) sched_yield();
}

void exchange_mail(const int64_t *a, Team *team) {
    World *w = PTR(World, a[MAIL_WORLD]);
    int rank = (int)a[MAIL_ME], well = !has_failed(w);
    int64_t sends = a[MAIL_SENDS], all = sends + a[MAIL_RECVS];
    if (!well) stopped(w, team);
    for (int64_t k = 0; well && k < sends; k++) {
        if ((well = !post(mail(a, k)))) continue;
        SAY(team, "rank %d has no memory for a message to rank %d", rank, (int)mail(a, k)[MAIL_PEER]);
        fail(w, team, "CommError", rank);
    }
    for (int64_t k = sends; well && k < all; k++) well = receive(mail(a, k), rank, team);
    for (int64_t k = 0; well && k < sends; k++) {
        Mailbox *box = PTR(Mailbox, mail(a, k)[MAIL_BOX]);
        well = met(mail(a, k), rank, &box->taken, box->waits_for, "send to", team);
    }
    if (!well) give_up(a);
}

#endif
