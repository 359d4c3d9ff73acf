/* Preloaded into a process, it shifts the clock on its wall by as many microseconds as stand in the file that
 * SHIFTED_CLOCK names, at any moment anew. Its steady clock goes on as it is. Asks the kernel and allocates nothing, so
 * that it gets in nobody's way (libfaketime and jemalloc, which Redis uses, wait for each other). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *ahead_us;

__attribute__((constructor)) static void find_file(void) {
  const char *path = getenv("SHIFTED_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file >= 0) {
    void *page = mmap(NULL, sizeof *ahead_us, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) ahead_us = page;
    close(file);
  }
}

static int shifted(struct timespec *now) {
  long failed = syscall(SYS_clock_gettime, CLOCK_REALTIME, now);
  if (!failed && ahead_us) {
    long long ns = now->tv_nsec + *ahead_us % 1000000 * 1000;
    now->tv_sec += *ahead_us / 1000000;
    if (ns < 0) { ns += 1000000000; now->tv_sec -= 1; }
    if (ns >= 1000000000) { ns -= 1000000000; now->tv_sec += 1; }
    now->tv_nsec = ns;
  }
  return failed ? -1 : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) return shifted(now);
  return syscall(SYS_clock_gettime, clock, now) ? -1 : 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  if (shifted(&precise)) return -1;
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec precise;
  time_t seconds = shifted(&precise) ? (time_t)-1 : precise.tv_sec;
  if (out) *out = seconds;
  return seconds;
}
