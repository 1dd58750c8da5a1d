/* Files of captured tensors, many in a call: each is written beside its place in one go, and renamed.

   Whatever goes wrong ends the call, and leaves nothing of the file that it happened to: the caller writes that one
   again by itself, and finds out what it was. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/uio.h>
#include <unistd.h>

struct job {
  const char *beside, *path;
  const struct iovec *parts;
  int64_t num_parts, num_bytes, past_cache;
};

static int write_file(const struct job *job) {
  int flags = O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC;
#ifdef O_DIRECT
  if (job->past_cache) flags |= O_DIRECT;
#endif
  int file = open(job->beside, flags, 0666);
  if (file < 0) return 0;
  int is_whole = pwritev(file, job->parts, (int)job->num_parts, 0) == job->num_bytes;
  int is_closed = close(file) == 0;
  if (is_whole && is_closed && rename(job->beside, job->path) == 0) return 1;
  unlink(job->beside);
  return 0;
}

/* How many of n files were written, from the first on. */
int64_t write_files(const struct job *jobs, int64_t n) {
  for (int64_t i = 0; i < n; i++)
    if (!write_file(jobs + i)) return i;
  return n;
}
