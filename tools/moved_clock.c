/* Add DELAYQ_CLOCK_OFFSET seconds to the date of a process, for LD_PRELOAD. Built and used by moved_clock.py.

   Only CLOCK_REALTIME moves: durations are measured with the monotonic clock, which runs on. Waits until a date need the
   date of the kernel again, otherwise a server that waits for a second would wait for the whole offset. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

/* The monotonic clock counts from the last boot, so a later time than this (the year 2001) is a date. */
#define FIRST_DATE 1000000000L

static long offset;

__attribute__((constructor)) static void read_offset(void) {
    const char *value = getenv("DELAYQ_CLOCK_OFFSET");
    offset = value ? atol(value) : 0;
}

#define NEXT(name) \
    static __typeof__(&name) next; \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static struct timespec of_kernel(const struct timespec *until) {
    struct timespec moved = *until;
    if (moved.tv_sec > FIRST_DATE) moved.tv_sec -= offset;
    return moved;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    NEXT(clock_gettime);
    int code = next(clock, found);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec += offset;
    return code;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    NEXT(gettimeofday);
    int code = next(found, zone);
    if (!code) found->tv_sec += offset;
    return code;
}

time_t time(time_t *found) {
    NEXT(time);
    time_t now = next(NULL) + offset;
    if (found) *found = now;
    return now;
}

int timespec_get(struct timespec *found, int base) {
    NEXT(timespec_get);
    int code = next(found, base);
    if (code) found->tv_sec += offset;
    return code;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    NEXT(pthread_cond_timedwait);
    struct timespec moved = of_kernel(until);
    return next(cond, mutex, &moved);
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict until) {
    NEXT(pthread_cond_clockwait);
    struct timespec moved = of_kernel(until);
    return next(cond, mutex, clock, &moved);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    NEXT(pthread_mutex_timedlock);
    struct timespec moved = of_kernel(until);
    return next(mutex, &moved);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    NEXT(sem_timedwait);
    struct timespec moved = of_kernel(until);
    return next(semaphore, &moved);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *wanted, struct timespec *left) {
    NEXT(clock_nanosleep);
    struct timespec moved = *wanted;
    if (flags & TIMER_ABSTIME) moved = of_kernel(wanted);
    return next(clock, flags, &moved, left);
}
