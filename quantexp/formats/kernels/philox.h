/* Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011) as formats/philox.py defines it: for each counter four random
   integers of 24 bits, as float. */

#include <stdint.h>

typedef struct {
  const int64_t *index; /* the low half of each counter */
  float *numbers;       /* four for each counter */
  int64_t count;
  uint64_t seed, offset;
  int64_t next; /* the first counter that no thread has taken */
} draw;

enum { COUNTERS = 2048 };

static inline void four_numbers(const draw *d, int64_t i) {
  uint32_t c0 = (uint32_t)d->index[i], c1 = (uint32_t)((uint64_t)d->index[i] >> 32);
  uint32_t c2 = (uint32_t)d->offset, c3 = (uint32_t)(d->offset >> 32);
  uint32_t k0 = (uint32_t)d->seed, k1 = (uint32_t)(d->seed >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
    c0 = (uint32_t)(b >> 32) ^ c1 ^ k0, c1 = (uint32_t)b;
    c2 = (uint32_t)(a >> 32) ^ c3 ^ k1, c3 = (uint32_t)a;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  float *to = d->numbers + 4 * i;
  to[0] = (float)(int32_t)(c0 >> 8), to[1] = (float)(int32_t)(c1 >> 8);
  to[2] = (float)(int32_t)(c2 >> 8), to[3] = (float)(int32_t)(c3 >> 8);
}

static void take_counters(void *p) {
  draw *d = p;
  int64_t first;
  while ((first = __atomic_fetch_add(&d->next, COUNTERS, __ATOMIC_RELAXED)) < d->count) {
    int64_t end = first + COUNTERS < d->count ? first + COUNTERS : d->count;
    for (int64_t i = first; i < end; i++) four_numbers(d, i);
  }
}
