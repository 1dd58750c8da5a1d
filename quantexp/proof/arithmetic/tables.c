/* Counts the elements of a 16-bit operand that are not the images of its source, by tables (see tables.py).

   A table holds the images of codes; no arithmetic of a number format is here. Codes are bits of bf16 or fp16: a sign
   and a magnitude, whose order is that of the integers. Nothing is allocated, and nothing is read beyond the arguments. */

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define MAGNITUDE 0x7FFF
/* Elements whose images are looked up at once: the vectorised loops around the look-up stay in the L1 cache. */
#define SPAN 1024

/* Tensors are [outer, extent, inner]; blocks lie along extent. */
typedef struct {
  const uint16_t *operand, *source;
  int64_t outer, extent, inner, block;
  /* Code of the largest magnitude of each block, [outer, blocks, inner]. */
  uint16_t *amax;
  /* Whether a code is among them. */
  uint8_t *seen;
  /* By amax: the lowest magnitude with an image of its own, and the place of the code zero in `images`. */
  const uint16_t *low;
  const uint32_t *first;
  const uint16_t *images;
  uint16_t infinity;
} job;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE uint16_t magnitude(uint16_t x) { return x & MAGNITUDE; }

INLINE uint16_t larger(uint16_t a, uint16_t b) { return a > b ? a : b; }

/* Of at most SPAN elements; NaN equals NaN. */
INLINE int64_t differing(const uint16_t *q, const uint16_t *y, int64_t n, uint16_t infinity) {
  uint16_t differ = 0;
  for (int64_t i = 0; i < n; i++) differ += q[i] != y[i];
  if (!differ) return 0;
  differ = 0;
  for (int64_t i = 0; i < n; i++)
    differ += q[i] != y[i] && !(magnitude(q[i]) > infinity && magnitude(y[i]) > infinity);
  return differ;
}

/* The place of a code relative to that of zero: magnitudes in order, each with its negative after it. */
INLINE uint16_t place(uint16_t x, uint16_t low) {
  uint16_t sign = x >> 15;
  return larger((uint16_t)(x << 1) | sign, (uint16_t)(low << 1) | sign);
}

INLINE int64_t looked_up(const job *j, int64_t start, const uint32_t *places, int64_t n) {
  uint16_t y[SPAN];
  for (int64_t i = 0; i < n; i++) y[i] = j->images[places[i]];
  return differing(j->operand + start, y, n, j->infinity);
}

INLINE int64_t num_blocks(const job *j) { return (j->extent + j->block - 1) / j->block; }

void find_amaxes(const job *j) {
  int64_t blocks = num_blocks(j);
  const uint16_t *x = j->source;
  uint16_t *amax = j->amax;
  for (int64_t o = 0; o < j->outer; o++)
    for (int64_t b = 0; b < blocks; b++) {
      int64_t size = least(j->block, j->extent - b * j->block);
      if (j->inner == 1) {
        uint16_t most = 0;
        for (int64_t k = 0; k < size; k++) most = larger(most, magnitude(x[k]));
        *amax = most;
      } else {
        for (int64_t i = 0; i < j->inner; i++) amax[i] = 0;
        for (int64_t k = 0; k < size; k++)
          for (int64_t i = 0; i < j->inner; i++)
            amax[i] = larger(amax[i], magnitude(x[k * j->inner + i]));
      }
      for (int64_t i = 0; i < j->inner; i++) j->seen[amax[i]] = 1;
      x += size * j->inner;
      amax += j->inner;
    }
}

/* Blocks along memory: their places are collected until a span is full. */
static int64_t count_along(const job *j) {
  int64_t blocks = num_blocks(j), num = 0, start = 0, filled = 0;
  uint32_t places[SPAN];
  for (int64_t o = 0; o < j->outer; o++)
    for (int64_t b = 0; b < blocks; b++) {
      uint16_t amax = j->amax[o * blocks + b], low = j->low[amax];
      uint32_t first = j->first[amax];
      int64_t left = least(j->block, j->extent - b * j->block);
      while (left) {
        if (filled == SPAN || (left <= SPAN && filled + left > SPAN)) {
          num += looked_up(j, start, places, filled);
          start += filled, filled = 0;
        }
        int64_t n = least(left, SPAN - filled);
        const uint16_t *x = j->source + start + filled;
        for (int64_t k = 0; k < n; k++) places[filled + k] = first + place(x[k], low);
        filled += n, left -= n;
      }
    }
  return num + looked_up(j, start, places, filled);
}

static int64_t count_across(const job *j) {
  int64_t blocks = num_blocks(j), num = 0;
  uint32_t places[SPAN], first[SPAN];
  uint16_t low[SPAN];
  for (int64_t o = 0; o < j->outer; o++)
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t start = 0; start < j->inner; start += SPAN) {
        const uint16_t *amax = j->amax + (o * blocks + b) * j->inner + start;
        int64_t n = least(SPAN, j->inner - start);
        for (int64_t i = 0; i < n; i++) low[i] = j->low[amax[i]], first[i] = j->first[amax[i]];
        for (int64_t k = b * j->block; k < least(j->extent, (b + 1) * j->block); k++) {
          int64_t at = (o * j->extent + k) * j->inner + start;
          for (int64_t i = 0; i < n; i++) places[i] = first[i] + place(j->source[at + i], low[i]);
          num += looked_up(j, at, places, n);
        }
      }
  return num;
}

int64_t count_in_blocks(const job *j) { return j->inner == 1 ? count_along(j) : count_across(j); }

/* `images` has one for each of the 65,536 codes. */
int64_t count_each(const job *j) {
  int64_t num = 0;
  uint16_t y[SPAN];
  for (int64_t start = 0; start < j->extent; start += SPAN) {
    int64_t n = least(SPAN, j->extent - start);
    for (int64_t i = 0; i < n; i++) y[i] = j->images[j->source[start + i]];
    num += differing(j->operand + start, y, n, j->infinity);
  }
  return num;
}
