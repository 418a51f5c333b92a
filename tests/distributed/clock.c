/* A wrong clock, by LD_PRELOAD: adds STIO_TEST_CLOCK_SECONDS to the time of day, and to no other clock. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef int (*timed_wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
typedef int (*get_time)(clockid_t, struct timespec *);

static long wrong_by(void)
{
    const char *text = getenv("STIO_TEST_CLOCK_SECONDS");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *found)
{
    static get_time real;
    if (!real)
        real = (get_time)dlsym(RTLD_NEXT, "clock_gettime");
    int result = real ? real(clock, found) : (int)syscall(SYS_clock_gettime, clock, found);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        found->tv_sec += wrong_by();
    return result;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *found)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found)
        *found = now.tv_sec;
    return now.tv_sec;
}

/* The kernel waits by the right clock. A time after 2001 is one of day, and not one since the start of the machine. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *end)
{
    static timed_wait real;
    struct timespec right = *end;
    if (!real)
        real = (timed_wait)dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real)
        real = (timed_wait)dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    if (right.tv_sec > 1000000000)
        right.tv_sec -= wrong_by();
    return real(condition, mutex, &right);
}
