/* Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011) as formats/philox.py defines it: random integers of 24 bits, as
   float, by position. Four consecutive positions share a counter; a vector holds counters in lanes of 64 bits, of which a
   product reads the lower half, so that the upper one need not be cleared. */

#include "lanes.h"

/* Counters of a step, and the numbers that they give. */
#define TOGETHER 4
#define COUNTERS (TOGETHER * LANES / 2)
#define DRAWN (4 * COUNTERS)

typedef uint64_t longs __attribute__((vector_size(4 * LANES)));

/* products: of the lower halves; interleaved: a[0] b[0] a[1] b[1] .. */
#if LANES == 16
INLINE longs products(longs a, longs b) { return (longs)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
INLINE void interleaved(longs a, longs b, longs *out) {
  static const uint64_t first[8] = {0, 8, 1, 9, 2, 10, 3, 11}, second[8] = {4, 12, 5, 13, 6, 14, 7, 15};
  out[0] = (longs)_mm512_permutex2var_epi64((__m512i)a, _mm512_loadu_si512(first), (__m512i)b);
  out[1] = (longs)_mm512_permutex2var_epi64((__m512i)a, _mm512_loadu_si512(second), (__m512i)b);
}
#elif LANES == 8
INLINE longs products(longs a, longs b) { return (longs)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
INLINE void interleaved(longs a, longs b, longs *out) {
  __m256i low = _mm256_unpacklo_epi64((__m256i)a, (__m256i)b), high = _mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
  out[0] = (longs)_mm256_permute2x128_si256(low, high, 0x20);
  out[1] = (longs)_mm256_permute2x128_si256(low, high, 0x31);
}
#else
INLINE longs products(longs a, longs b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
INLINE void interleaved(longs a, longs b, longs *out) {
  out[0] = (longs){a[0], b[0]};
  out[1] = (longs){a[1], b[1]};
}
#endif

/* The DRAWN numbers of the positions from 4 * counter on. */
INLINE void draw_some(uint64_t seed, uint64_t offset, uint64_t counter, float *to) {
  longs c0[TOGETHER], c1[TOGETHER], c2[TOGETHER], c3[TOGETHER];
  for (int t = 0; t < TOGETHER; t++) {
    longs lane = {0};
    for (int k = 0; k < LANES / 2; k++) lane[k] = (uint64_t)(t * LANES / 2 + k);
    c0[t] = lane + counter;
    c1[t] = c0[t] >> 32, c2[t] = (longs){0} + offset, c3[t] = c2[t] >> 32;
  }
  uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int round = 0; round < 10; round++) {
    for (int t = 0; t < TOGETHER; t++) {
      longs a = products(c0[t], (longs){0} + 0xD2511F53u), b = products(c2[t], (longs){0} + 0xCD9E8D57u);
      c0[t] = (b >> 32) ^ c1[t] ^ k0, c1[t] = b;
      c2[t] = (a >> 32) ^ c3[t] ^ k1, c3[t] = a;
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  for (int t = 0; t < TOGETHER; t++) {
    longs four[2];
    interleaved((c0[t] & 0xffffffffu) | c1[t] << 32, (c2[t] & 0xffffffffu) | c3[t] << 32, four);
    for (int half = 0; half < 2; half++) {
      floats numbers = whole((words)four[half] >> 8);
      memcpy(to + (2 * t + half) * LANES, &numbers, sizeof numbers);
    }
  }
}

/* The numbers of n positions from `at` on: at the result, which lies in `space` for n + 2 * DRAWN. */
static __attribute__((noinline)) const float *numbers_at(uint64_t seed, uint64_t offset, int64_t at, int64_t n, float *space) {
  int64_t skew = at & 3;
  for (int64_t k = 0; k < n + skew; k += DRAWN) draw_some(seed, offset, (uint64_t)((at + k) >> 2), space + k);
  return space + skew;
}
