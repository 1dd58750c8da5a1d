/* The random numbers of positions (see philox.py). Nothing is allocated, and nothing is read beyond the arguments. */

#include <stdint.h>

/* Positions at a time: the words of their counters stay in the L1 cache. */
#define SPAN 1024
#define ROUNDS 10

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Encrypts counters in place; a loop over them is a vector's. */
static void encrypt(uint32_t (*words)[SPAN], int64_t n, uint64_t seed) {
  uint32_t *restrict a = words[0], *restrict b = words[1], *restrict c = words[2], *restrict d = words[3];
  uint32_t k = (uint32_t)seed, m = (uint32_t)(seed >> 32);
  for (int round = 0; round < ROUNDS; round++, k += 0x9E3779B9, m += 0xBB67AE85)
    for (int64_t i = 0; i < n; i++) {
      uint64_t left = a[i] * UINT64_C(0xD2511F53), right = c[i] * UINT64_C(0xCD9E8D57);
      a[i] = (uint32_t)(right >> 32) ^ b[i] ^ k, b[i] = (uint32_t)right;
      c[i] = (uint32_t)(left >> 32) ^ d[i] ^ m, d[i] = (uint32_t)left;
    }
}

void draw(const int64_t *positions, int32_t *numbers, int64_t n, uint64_t seed, uint64_t offset) {
  uint32_t words[4][SPAN];
  uint16_t counter[SPAN];
  for (int64_t start = 0; start < n; start += SPAN) {
    const int64_t *at = positions + start;
    int64_t count = least(SPAN, n - start), num = 0;
    for (int64_t i = 0; i < count; i++) {
      if (!i || at[i] >> 2 != at[i - 1] >> 2) {
        words[0][num] = (uint32_t)(at[i] >> 2), words[1][num] = (uint32_t)(at[i] >> 34);
        words[2][num] = (uint32_t)offset, words[3][num] = (uint32_t)(offset >> 32);
        num++;
      }
      counter[i] = (uint16_t)(num - 1);
    }
    encrypt(words, num, seed);
    for (int64_t i = 0; i < count; i++)
      numbers[start + i] = (int32_t)(words[at[i] & 3][counter[i]] >> 8);
  }
}
