/* The heap of a rank that is a process, in its own part of the shared memory. Only this process allocates and frees there, so its state is
 * private and no lock is shared. There are two block sizes for each power of two; a freed block is reused for the next one of its size. */
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "meet.h"

#if !defined(__linux__)

void heap_begin(void *at, size_t bytes) { (void)at, (void)bytes; }
void *heap_take(size_t bytes) {
    (void)bytes;
    return NULL;
}
void heap_give(void *p) { (void)p; }

#else

#include <pthread.h>
#include <sys/mman.h>

enum { LINE = 64, SIZES = 96, PAGE = 1 << 16 };

/* The header of a block. */
typedef union Head {
    struct {
        union Head *next;
        int size; /* the number of its size */
    };
    char line[LINE];
} Head;

static struct {
    pthread_mutex_t mutex;
    char *first, *at, *end;
    Head *given[SIZES];
} heap = {.mutex = PTHREAD_MUTEX_INITIALIZER};

/* 128, 192, 256, 384, ..., including the header */
static size_t size_of(int number) { return (size_t)(2 + number % 2) * LINE << number / 2; }

void heap_begin(void *at, size_t bytes) {
    heap.first = heap.at = at, heap.end = heap.at + bytes;
    memset(heap.given, 0, sizeof heap.given);
}

void *heap_take(size_t bytes) {
    int number = 0;
    while (number < SIZES && size_of(number) < bytes + LINE) number++;
    if (number == SIZES) return NULL;
    pthread_mutex_lock(&heap.mutex);
    Head *head = heap.given[number];
    if (head) {
        heap.given[number] = head->next;
    } else if (size_of(number) <= (size_t)(heap.end - heap.at)) {
        head = (Head *)heap.at;
        heap.at += size_of(number);
        head->size = number;
    }
    pthread_mutex_unlock(&heap.mutex);
    return head ? head + 1 : NULL;
}

/* The pages of a large block are returned to the system, which zeroes them. */
static void let_go(Head *head) {
    char *end = (char *)head + size_of(head->size), *first = (char *)(((uintptr_t)(head + 1) + PAGE - 1) / PAGE * PAGE);
    char *last = (char *)((uintptr_t)end / PAGE * PAGE);
    int gone = !madvise(first, (size_t)(last - first), MADV_REMOVE);
    memset(head + 1, 0, (size_t)(gone ? first - (char *)(head + 1) : end - (char *)(head + 1)));
    if (gone) memset(last, 0, (size_t)(end - last));
}

void heap_give(void *p) {
    Head *head = (Head *)p - 1;
    if (size_of(head->size) > HEAP_LARGE) let_go(head);
    pthread_mutex_lock(&heap.mutex);
    if ((char *)head >= heap.first && (char *)head < heap.end) { /* not a block of another memory that this process used before */
        head->next = heap.given[head->size];
        heap.given[head->size] = head;
    }
    pthread_mutex_unlock(&heap.mutex);
}

#endif
