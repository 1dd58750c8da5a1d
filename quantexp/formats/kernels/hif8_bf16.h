/* HiF8 of bfloat16 in 16-bit integers (see mx_bf16.h), with ties away from zero and saturation.

   The scale, a power of two, shifts the grid along the magnitudes: `one`, the bits of 1 / scale, becomes 1. A magnitude
   with exponent E then is one + 128 E + its 7 mantissa bits. HiF8 keeps 3 of them for E in -3 .. 3, 2 in -7 .. 7, 1 in
   -15 .. 15, and none beyond. These ranges lie around one + 64, and their ends are powers of two, which any rounding
   preserves. So half a step and the mask depend on the distance from one + 64 alone.

   Floats are used where part of the shifted grid is not normal. */

#include "mx_bf16.h"

#if LANES > 4
/* HiF8's grid for the bits of bfloat16. */
typedef struct {
  /* 1 / scale; the smallest and the largest value; the largest magnitude that rounds to zero. */
  uint32_t one, min, max, zero;
  /* Tables of half a step and of the mask, by 5 - (distance + 64) / 512, at least 0. */
  halves steps, masks;
} hif8_grid;

INLINE hif8_grid hif8_grid_of(const grid *g) {
  /* The upper byte of every index is 15. */
  static const uint8_t steps[16] = {64, 64, 32, 32, 16, 8};
  static const uint8_t masks[16] = {0x80, 0x80, 0xc0, 0xc0, 0xe0, 0xf0, [15] = 255};
  uint32_t scale;
  memcpy(&scale, &g->scale, sizeof scale);
  uint32_t one = (2 * ONE - scale) >> 16, min = one + ((uint32_t)g->emin << FRACTION_BITS);
  return (hif8_grid){.one = one,
                     .min = min,
                     .max = one + ((uint32_t)g->emax << FRACTION_BITS),
                     .zero = min - (1 << FRACTION_BITS) - 1,
                     .steps = table_of(steps),
                     .masks = table_of(masks)};
}

/* Whether `hif8_bits` is exact: magnitudes that do not become zero are normal (otherwise `zero` wraps), and so is the
   largest value. */
INLINE int fits_bits(const grid *g, const hif8_grid *h) {
  return g->away && !g->beyond && h->zero < h->max && h->max < FIELD;
}

/* 0x40 makes a NaN quiet. */
INLINE halves on_hif8_bits(halves x, const hif8_grid *g) {
  halves v = x & 0x7fff, nan = exceeds(v, all_halves(FIELD)) & (v | 0x40);
  halves index = above_bytes(all_halves(15 << 8 | 5), (distance(v, all_halves(g->one + 64)) + 64) >> 9);
  halves y = (v + looked_up_bytes(g->steps, index)) & looked_up_bytes(g->masks, index);
  y = larger_half(lesser_half(y, all_halves(g->max)), all_halves(g->min));
  return (larger_half(y, nan) | (x ^ v)) & exceeds(v, all_halves(g->zero));
}

/* Elements from `first` to `end`. If they need floats, nothing is written, and the result is 0. */
INLINE int hif8_bits(const job *j, int64_t first, int64_t end) {
  const hif8_grid g = hif8_grid_of(j->g);
  if (!fits_bits(j->g, &g)) return 0;
  const void *x = j->x;
  void *y = j->y;
  int past = (int)j->past;
  for (int64_t at = first; at < end; at += PAIR) {
    fetch(x, BF16, at + AHEAD);
    store_halves(y, at, end - at, on_hif8_bits(load_halves(x, at, end - at), &g), past);
  }
  return 1;
}

/* `largest` on bits. Twice a magnitude is below 0xff00 if it is finite; otherwise 0x100 more wraps to less than 0x100. */
INLINE uint32_t largest_bits(const void *x, int64_t at, int64_t end) {
  halves most = all_halves(0x100);
  for (; at < end; at += PAIR) {
    halves v = load_halves(x, at, end - at);
    most = larger_half(most, v + v + 0x100);
  }
  return (largest_half(most) - 0x100) << 15;
}
#endif
