/* Collective calls and messages of ranks that share memory. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "world.h"

#include <stdlib.h>

#if defined(_MSC_VER)

void meet_others(const int64_t *a, MeetWork work, Team *team) { (void)a, (void)work, (void)team; }
void exchange_mail(const int64_t *a, Team *team) { (void)a, (void)team; }


#else

enum {
    SMALL = 4096,       /* elements up to which the last member to arrive does all the work, and nobody waits a second time */
    EAGER = 64 * 1024,  /* bytes up to which a message is copied; above, the sender waits until the receiver has read it */
    ARRIVALS = 1 << 16, /* the unit of a meeting's counter: the counter is ARRIVALS * (completed calls) + (arrived members) */
};

enum { REFUSED, DONE, SHARED }; /* the outcome of a collective call: error; work done; each member does its share */

/* The text in `team` is an error, which stops all others. */
static void fail(World *w, Team *team, const char *kind, int rank) {
    team->error = team->text, team->kind = kind, team->rank = rank;
    world_abort(w, team->text);
}

#define SAY(team, ...) snprintf((team)->text, sizeof(team)->text, __VA_ARGS__)

/* Does a rank warn before it gives up, and how long does it wait before the warning? */
static int has_patience(const World *w, int rank) { return w->rank[rank].stalled && w->stall < w->timeout; }
static int64_t before_stall(const World *w, int rank) { return has_patience(w, rank) ? w->stall : w->timeout; }
static void tell(World *w, int rank, const char *text) { w->rank[rank].stalled(w->rank[rank].told, text); }

/* -- collective calls -------------------------------------------------------------------------------------------------------------- */

static const char *text_of(const int64_t *a) { return PTR(const char, a[MEET_TEXT]); }
static const int64_t *array_of(const int64_t *a, int64_t k) { return a + a[MEET_ARRAYS + k]; }

/* Do all members make the same call with arrays that fit together? If not, the error is in `team`. */
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
        SAY(team, "ranks disagree: rank %d passes %lld parts to %.*s and expects %lld, in a group of %lld ranks", m->members[k].rank,
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

/* The last member to arrive compares all contributions and, if they are small, does all the work. */
static int preside(Meeting *m, MeetWork work, Team *team) {
    int64_t most = 0;
    for (int k = 0; k < m->n; k++) {
        m->words[k] = m->members[k].words;
        if (m->words[k][MEET_SIZE] > most) most = m->words[k][MEET_SIZE]; /* sizes may differ by rank */
    }
    if (!agree(m, team)) {
        fail(m->world, team, "CommError", team->rank);
        return REFUSED;
    }
    if (work && most > SMALL) return SHARED;
    if (work) work(m->words, m->n, 0, m->n);
    return DONE;
}

/* All members have arrived: let them go on. */
static void release(Meeting *m, int64_t me, uint64_t state) {
    atomic_store(&m->state, (state / ARRIVALS + 1) * ARRIVALS);
    for (int k = 0; k < m->n; k++)
        if (k != me) call(&m->world->rank[m->members[k].rank].seat);
}

/* The members that have arrived `came` times (`there`), or those that have not. */
typedef struct {
    int first, count; /* the lowest rank, or -1 */
    char names[200];  /* cut if there are too many */
} Some;

static Some some_members(Meeting *m, uint64_t came, int there) {
    Some some = {-1, 0, "?"};
    size_t at = 0;
    for (int k = 0; k < m->n; k++) {
        int rank = m->members[k].rank;
        if ((atomic_load(&m->members[k].came) >= came) != there) continue;
        if (some.first < 0 || rank < some.first) some.first = rank;
        if (at < sizeof some.names - 8) at += (size_t)snprintf(some.names + at, sizeof some.names - at, "%s%d", some.count ? ", " : "", rank);
        some.count++;
    }
    return some;
}

#define S(some) ((some).count > 1 ? "s" : "")

static void say_missing(Meeting *m, const int64_t *a, uint64_t came, Team *team) {
    Some late = some_members(m, came, 0);
    SAY(team, "rank %d waited %g s in %.*s; rank%s %s did not arrive", m->members[a[MEET_ME]].rank, m->world->seconds,
        (int)strcspn(text_of(a), " "), text_of(a), S(late), late.names);
    team->rank = late.first;
}

static void tell_missing(Meeting *m, const int64_t *a, uint64_t came) {
    Some late = some_members(m, came, 0), here = some_members(m, came, 1);
    char text[800];
    snprintf(text, sizeof text, "rank %d has waited %g s in %s: rank%s %s %s here, rank%s %s %s not arrived; it goes on waiting",
             m->members[a[MEET_ME]].rank, 1e-9 * (double)m->world->stall, text_of(a), S(here), here.names, here.count > 1 ? "are" : "is",
             S(late), late.names, late.count > 1 ? "have" : "has");
    tell(m->world, m->members[a[MEET_ME]].rank, text);
}

/* Do this member's share of the work, if each has one, and complete the call. */
static void finish(Meeting *m, const int64_t *a, MeetWork work) {
    World *w = m->world;
    int64_t me = a[MEET_ME];
    if (m->verdict == SHARED) {
        work(m->words, m->n, me, me + 1);
        uint64_t state = atomic_fetch_add(&m->state, 1) + 1;
        if (state % ARRIVALS == (uint64_t)m->n)
            release(m, me, state);
        else
            wait_for_work(w, &w->rank[m->members[me].rank].seat, &m->state, (state / ARRIVALS + 1) * ARRIVALS);
    }
    if (m->verdict != REFUSED) note_done(w, m->members[me].rank, PTR(const char, a[MEET_KEPT]));
}

/* A member stops waiting: has it left the call? Not if all members have arrived meanwhile. */
static int left(Meeting *m, uint64_t goal) {
    uint64_t s = atomic_load(&m->state);
    while (s < goal) {
        if (s % ARRIVALS == (uint64_t)m->n) return 0; /* the last member to arrive is comparing or working */
        if (atomic_compare_exchange_weak(&m->state, &s, s - 1)) return 1;
    }
    return 0;
}

void meet_others(const int64_t *a, MeetWork work, Team *team) {
    Meeting *m = PTR(Meeting, a[MEET_AT]);
    World *w = m->world;
    int64_t me = a[MEET_ME];
    Member *mine = &m->members[me];
    Seat *seat = &w->rank[mine->rank].seat;
    note_core(seat);
    if (has_failed(w)) {
        stopped(w, team);
        return;
    }
    mine->words = a;
    note_came(w, mine->rank, PTR(const char, a[MEET_TOLD]));
    uint64_t came = atomic_fetch_add(&mine->came, 1) + 1, state = atomic_fetch_add(&m->state, 1) + 1;
    uint64_t goal = (state / ARRIVALS + 1) * ARRIVALS;
    if (state % ARRIVALS == (uint64_t)m->n) {
        m->verdict = preside(m, work, team);
        release(m, me, state);
    } else {
        int tells = !a[MEET_GRACE] && has_patience(w, mine->rank);
        int found = wait_for(w, seat, &m->state, goal, tells ? w->stall : w->timeout + a[MEET_GRACE]);
        if (found == LATE && tells) {
            tell_missing(m, a, came);
            found = wait_for(w, seat, &m->state, goal, w->timeout - w->stall);
        }
        if (found == LATE) say_missing(m, a, came, team);
        if (found != REACHED && left(m, goal)) {
            if (found == LATE)
                fail(w, team, "CommTimeout", team->rank);
            else
                stopped(w, team);
            return;
        }
        wait_for_work(w, seat, &m->state, goal);
        if (m->verdict == REFUSED) stopped(w, team);
    }
    finish(m, a, work);
}

/* -- messages ---------------------------------------------------------------------------------------------------------------------- */

static const int64_t *mail(const int64_t *a, int64_t k) { return a + MAIL_FIRST + k * MAIL_WORDS; }

/* Messages are a linked list whose first element was read already, so that sender and receiver never touch the same end. */
static Message *message(const World *w, const char *text, const char *data, size_t bytes, size_t copied) {
    size_t length = strlen(text) + 1, size = sizeof(Message) + length + copied;
    Message *made = w->shared ? heap_take(size) : malloc(size);
    if (!made) return NULL;
    memcpy(made->text, text, length);
    made->next = NULL;
    made->data = copied || !bytes ? memcpy(made->text + length, data, copied) : data;
    return made;
}

static int post(const int64_t *a) {
    Mailbox *box = PTR(Mailbox, a[MAIL_BOX]);
    const World *w = box->world;
    size_t bytes = (size_t)a[MAIL_BYTES], copied = bytes <= EAGER ? bytes : 0;
    if (!box->last && !(box->read = box->oldest = box->last = message(w, "", "", 0, 0))) return -1;
    for (uint64_t taken = atomic_load(&box->taken); box->gone < taken; box->gone++) { /* the sender frees its messages, because it may be another process */
        Message *old = box->oldest;
        box->oldest = old->next;
        w->shared ? heap_give(old) : free(old);
    }
    Message *made = message(w, PTR(const char, a[MAIL_TEXT]), PTR(const char, a[MAIL_AT]), bytes, copied);
    if (!made) return -1;
    box->last->next = made;
    box->last = made;
    uint64_t number = atomic_load(&box->posted) + 1;
    if (bytes != copied) box->waits_for = number;
    atomic_store(&box->posted, number);
    call(&box->world->rank[box->to].seat);
    return 0;
}

/* Wait for the peer of a message, whose counter has to reach `goal`. */
static int met(const int64_t *a, int rank, Counter *counter, uint64_t goal, const char *what, Team *team) {
    World *w = PTR(Mailbox, a[MAIL_BOX])->world;
    int found = wait_for(w, &w->rank[rank].seat, counter, goal, before_stall(w, rank)), peer = (int)a[MAIL_PEER];
    if (found == LATE && has_patience(w, rank)) {
        char text[200];
        snprintf(text, sizeof text, "rank %d has waited %g s in %s rank %d, which has not arrived; it goes on waiting", rank,
                 1e-9 * (double)w->stall, what, peer);
        tell(w, rank, text);
        found = wait_for(w, &w->rank[rank].seat, counter, goal, w->timeout - w->stall);
    }
    if (found == FAILED) stopped(w, team);
    if (found == LATE) {
        SAY(team, "rank %d waited %g s in %s rank %d; rank %d did not arrive", rank, w->seconds, what, peer, peer);
        fail(w, team, "CommTimeout", peer);
    }
    return found == REACHED;
}

static int receive(const int64_t *a, int rank, Team *team) {
    Mailbox *box = PTR(Mailbox, a[MAIL_BOX]);
    uint64_t taken = atomic_load(&box->taken);
    if (!met(a, rank, &box->posted, taken + 1, "recv from", team)) return 0;
    atomic_store(&box->taking, 1); /* set before the check for a failure: a sender that gives up checks it afterwards */
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
            box->read = next;
            atomic_store(&box->taken, taken + 1);
        }
    }
    atomic_store(&box->taking, 0);
    call(&box->world->rank[box->from].seat);
    return !team->error;
}

/* A failing rank waits until nobody reads its arrays; in a failed world no rank starts to read. */
static void give_up(const int64_t *a) {
    for (int64_t k = 0; k < a[MAIL_SENDS]; k++)
        while (atomic_load(&PTR(Mailbox, mail(a, k)[MAIL_BOX])->taking)) sched_yield();
}

void exchange_mail(const int64_t *a, Team *team) {
    World *w = PTR(World, a[MAIL_WORLD]);
    int rank = (int)a[MAIL_ME], well = !has_failed(w);
    int64_t sends = a[MAIL_SENDS], all = sends + a[MAIL_RECVS];
    note_core(&w->rank[rank].seat);
    if (!well)
        stopped(w, team);
    else
        note_came(w, rank, PTR(const char, a[MAIL_TOLD]));
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
    if (well)
        note_done(w, rank, PTR(const char, a[MAIL_TOLD]));
    else
        give_up(a);
}

#endif
