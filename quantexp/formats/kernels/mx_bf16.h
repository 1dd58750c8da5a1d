/* MX of bfloat16 to nearest even in 16-bit integers, twice as many to a vector as floats.

   The magnitudes of bfloat16 are ordered like their bits. `zero`, a power of two, is the largest magnitude that rounds
   to zero: half of the grid's smallest value. The bits above it, u = magnitude - zero, have an exponent field f = 0,
   1, ... and 7 mantissa bits, of which the grid keeps min(f - 1, mantissa bits). So u is rounded by adding half a step,
   less one where the kept part is even, and by a mask; step and mask depend on f alone. At f = 0 all but 0 become f = 1.

   Floats are used where `zero` is not a normal number, for blocks with a NaN or Inf, and without AVX2. */

#include "panels.h"

#if LANES > 4
#define FIELD 0x7f80u
#define FRACTION_BITS 7

/* A format's grid for the bits of bfloat16. */
typedef struct {
  /* The offset of the scale rule; the distance from `zero` to 2^emax, and to the largest value; the smallest amax whose
     `zero` is normal. */
  uint32_t offset, reach, max, least;
  /* Tables of half a step less one and of the mask, by `last` - f: mantissa bits + 1 - f, at least 0. */
  halves steps, masks, last;
} bits_grid;

INLINE bits_grid bits_grid_of(const grid *g) {
  /* For 3 mantissa bits; fewer start later. The upper byte of every index is 15. */
  static const uint8_t steps[18] = {7, 15, 31, 63, 127};
  static const uint8_t masks[18] = {0xf0, 0xe0, 0xc0, 0x80, 0x80, 255, 255, 255, 255,
                                    255,  255,  255,  255,  255,  255, 255, 255, 255};
  uint32_t offset = g->offset >> 16, reach = (uint32_t)(g->emax - g->emin + g->mantissa_bits + 1) << FRACTION_BITS, max;
  memcpy(&max, &g->max, sizeof max);
  return (bits_grid){.offset = offset,
                     .reach = reach,
                     .max = reach | (max >> 16 & ~FIELD),
                     .least = reach + (1 << FRACTION_BITS) - offset,
                     .steps = table_of(steps + 3 - g->mantissa_bits),
                     .masks = table_of(masks + 3 - g->mantissa_bits),
                     .last = all_halves(15 << 8 | (uint32_t)(g->mantissa_bits + 1))};
}

INLINE halves rounded_bits(halves x, halves zero, const bits_grid *g) {
  halves u = above(x & 0x7fff, zero), index = above_bytes(g->last, u >> FRACTION_BITS);
  halves mask = looked_up_bytes(g->masks, index), odd = lesser_half(u & (0 - mask), all_halves(1));
  u = lesser_half((u + looked_up_bytes(g->steps, index) + odd) & mask, all_halves(g->max));
  return sum_or_zero(u, zero) | (x & 0x8000);
}

/* n elements of bfloat16 from x[at] on, in blocks along them, to y. */
static __attribute__((noinline)) void round_row(const job *j, void *y, int64_t at, int64_t n, int64_t block) {
  job own = *j;
  own.y = y, own.rows = 0, own.tall = 1, own.wide = block;
  round_panel(&own, BF16, EXACT, &(patch){at, 1, n});
}

/* Blocks of n elements, at most GROUP. All amaxes come first, so that no rounding waits for its block's amax. */
INLINE int64_t group_bits(const job *j, const uint16_t *x, void *y, int64_t at, int64_t length, int64_t n,
                          const bits_grid *g, int cached) {
  int64_t blocks = least(length / n, GROUP);
  uint16_t zero[GROUP];
  int unfit = 0, past = (int)j->past;
  for (int64_t b = 0; b < blocks; b++) {
    halves most = {0};
    for (int64_t k = b * n; k < b * n + n; k += PAIR) {
      if (!cached) fetch(x, BF16, k + AHEAD);
      most = larger_half(most, load_halves(x, k, b * n + n - k) & 0x7fff);
    }
    uint32_t amax = largest_half(most);
    unfit |= (amax - g->least >= FIELD - g->least) & (amax > 0);
    zero[b] = (uint16_t)(((amax + g->offset) & FIELD) - g->reach);
  }
  if (unfit)
    round_row(j, y, at, blocks * n, n);
  else
    for (int64_t b = 0; b < blocks; b++)
      for (int64_t k = b * n; k < b * n + n; k += PAIR) {
        halves v = rounded_bits(load_halves(x, k, b * n + n - k), all_halves(zero[b]), g);
        store_halves(y, at + k, b * n + n - k, v, past);
      }
  return blocks * n;
}

/* Rows of n elements in blocks along them: x, `pitch` apart, is what the job's x has from `start`, j->inner apart. */
static __attribute__((noinline)) void along_bits(const job *j, const uint16_t *x, int64_t pitch, void *y, int64_t start,
                                                 int64_t rows, int64_t n, const bits_grid *shared, int cached) {
  const bits_grid g = *shared;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < n;) {
      int64_t at = start + r * j->inner + k, block = least(n - k, j->tall * j->wide);
      if (block == BLOCK)
        k += group_bits(j, x + r * pitch + k, y, at, n - k, BLOCK, &g, cached);
      else
        k += group_bits(j, x + r * pitch + k, y, at, n - k, block, &g, cached);
    }
}

/* A panel of blocks down its columns, or along its row. If a block down columns needs floats, nothing is written along
   them, and the result is 0. */
INLINE int panel_bits(const job *j, const patch *panel) {
  const bits_grid g = bits_grid_of(j->g);
  const patch p = *panel;
  if (j->wide > 1 || j->tall == 1) {
    along_bits(j, (const uint16_t *)j->x + p.start, 0, j->y, p.start, 1, p.wide, &g, 0);
    if (j->rows) along_bits(j, (const uint16_t *)j->x + p.start, 0, j->rows, p.start, 1, p.wide, &g, 1);
    return 1;
  }
  _Alignas(64) uint16_t gathered[PANEL], zero[COLUMNS] = {0}; /* zero: first the amax */
  int64_t pitch = parts_of(p.wide, PAIR) * PAIR;
  const void *x = j->x;
  for (int64_t r = 0; r < p.depth; r++) {
    int64_t at = p.start + r * j->inner, ahead = ahead_of(j, &p, r);
    for (int64_t k = 0; k < p.wide; k += PAIR) {
      fetch(x, BF16, at + ahead + k);
      halves v = load_halves(x, at + k, p.wide - k);
      store_halves(zero, k, PAIR, larger_half(load_halves(zero, k, PAIR), v & 0x7fff), 0);
      store_halves(gathered, r * pitch + k, PAIR, v, 0);
    }
  }
  if (j->rows) along_bits(j, gathered, pitch, j->rows, p.start, p.depth, p.wide, &g, 1);
  halves unfit = {0};
  for (int64_t k = 0; k < pitch; k += PAIR) {
    halves amax = load_halves(zero, k, PAIR), top = (amax + (uint16_t)g.offset) & FIELD;
    unfit |= (halves)(amax >= FIELD) | (amax & (halves)(top <= (uint16_t)g.reach));
    store_halves(zero, k, PAIR, above(top, all_halves(g.reach)), 0);
  }
  if (largest_half(unfit)) return 0;
  void *y = j->y;
  int past = (int)j->past;
  for (int64_t r = 0; r < p.depth; r++) {
    int64_t at = p.start + r * j->inner;
    for (int64_t k = 0; k < p.wide; k += PAIR) {
      fetch_far(x, BF16, at + p.wide + k); /* for the next tile */
      halves v = rounded_bits(load_halves(gathered, r * pitch + k, PAIR), load_halves(zero, k, PAIR), &g);
      store_halves(y, at + k, p.wide - k, v, past);
    }
  }
  return 1;
}
#endif
