/* MX in floats, for every dtype: blocks along memory, and blocks across it. */

#include "job.h"

/* 2^-s and 2^s of blocks from the bits of their amax; the latter is NaN if a block has a NaN or Inf. */
INLINE void scales_of(words amax, const grid *g, float *inverse, float *scale) {
  ints field = (ints)((amax + g->offset) & EXPONENT) - (g->emax << MANTISSA_BITS);
  field &= field > 0;
  words power = larger((words)field, all(1u << (MANTISSA_BITS - 1))); /* 2^-127 has no exponent field of its own */
  power = where((words)(amax >= EXPONENT), all(NOT_A_NUMBER), power);
  words over = all((uint32_t)(2 * BIAS) << MANTISSA_BITS) - (words)field;
  memcpy(inverse, &over, sizeof over);
  memcpy(scale, &power, sizeof power);
}

INLINE floats in_block(floats x, floats inverse, floats scale, const grid *g) {
  floats q = rounded((floats)magnitude(x) * inverse, g);
  q = (floats)lesser((words)q, (words)every(g->max)); /* neither is negative */
  return (floats)((words)(q * scale) | ((words)x & SIGN));
}

INLINE uint32_t amax_of(const void *x, enum dtype dtype, int64_t at, int64_t n, int cached) {
  words most = {0};
  for (int64_t k = 0; k < n; k += PAIR) {
    if (!cached) fetch(x, dtype, at + k + AHEAD);
    pair v = load_some(x, dtype, at + k, n - k);
    most = larger(most, larger(magnitude(v.a), magnitude(v.b)));
  }
  return largest_lane(most);
}

INLINE void one_block(const job *j, void *y, enum dtype dtype, int64_t at, int64_t n, float inverse, float scale,
                      const grid *g) {
  floats i = every(inverse), s = every(scale);
  for (int64_t k = 0; k < n; k += PAIR) {
    pair v = load_some(j->x, dtype, at + k, n - k);
    store_some(y, dtype, at + k, n - k, (pair){in_block(v.a, i, s, g), in_block(v.b, i, s, g)}, 1, (int)j->past);
  }
}

/* Quantises n elements of x to y, in blocks along memory, the last of which may be short. `cached`: x was just read. */
INLINE void along(const job *j, void *y, enum dtype dtype, int64_t start, int64_t n, const grid *g, int cached) {
  _Alignas(64) float inverse[GROUP], scale[GROUP];
  _Alignas(64) uint32_t amax[GROUP] = {0};
  for (int64_t first = 0; first < n; first += GROUP * j->block) {
    int64_t left = least(n - first, GROUP * j->block);
    for (int64_t b = 0; b * j->block < left; b++) {
      int64_t here = least(left - b * j->block, j->block), at = start + first + b * j->block;
      amax[b] = here == BLOCK ? amax_of(j->x, dtype, at, BLOCK, cached) : amax_of(j->x, dtype, at, here, cached);
    }
    for (int k = 0; k < GROUP; k += LANES) scales_of(words_at(amax + k), g, inverse + k, scale + k);
    for (int64_t b = 0; b * j->block < left; b++) {
      int64_t here = least(left - b * j->block, j->block), at = start + first + b * j->block;
      if (here == BLOCK)
        one_block(j, y, dtype, at, BLOCK, inverse[b], scale[b], g);
      else
        one_block(j, y, dtype, at, here, inverse[b], scale[b], g);
    }
  }
}

/* `along` for bfloat16, compiled once. */
static __attribute__((noinline)) void along_bf16(const job *j, void *y, int64_t start, int64_t n) {
  const grid g = *j->g;
  along(j, y, BF16, start, n, &g, 0);
}

/* A unit of blocks across memory: a block's rows and some columns. */
INLINE int64_t columns_of(const job *j) { return least(COLUMNS, TILE / j->block); }

/* Its first element and its extents. */
typedef struct {
  int64_t start, depth, wide;
} patch;

INLINE patch patch_of(const job *j, int64_t unit) {
  int64_t per_width = parts_of(j->width, columns_of(j)), per_strip = j->inner / j->width * per_width;
  int64_t strip = unit / per_strip, strips = parts_of(j->extent, j->block), first = strip % strips * j->block;
  int64_t column = unit % per_width * columns_of(j);
  return (patch){(strip / strips * j->extent + first) * j->inner + unit % per_strip / per_width * j->width + column,
                 least(j->extent - first, j->block), least(j->width - column, columns_of(j))};
}

/* Offset of the prefetched elements from those of row r: of a later row, or of the next patch. */
INLINE int64_t ahead_of(const job *j, const patch *p, int64_t r) {
  return r + ROWS_AHEAD < p->depth ? ROWS_AHEAD * j->inner : p->wide + (ROWS_AHEAD - p->depth) * j->inner;
}

INLINE void tile(const job *j, enum dtype dtype, int64_t unit) {
  const grid g = *j->g;
  const patch p = patch_of(j, unit);
  _Alignas(64) float gathered[TILE], inverse[COLUMNS], scale[COLUMNS];
  enum dtype as = dtype == BF16 ? BF16 : FP32; /* half of the tile is enough for bfloat16 */
  _Alignas(64) uint32_t amax[COLUMNS] = {0};
  int64_t pitch = parts_of(p.wide, PAIR) * PAIR;
  for (int64_t r = 0; r < p.depth; r++) {
    int64_t at = p.start + r * j->inner, ahead = ahead_of(j, &p, r);
    for (int64_t k = 0; k < p.wide; k += PAIR) {
      fetch(j->x, dtype, at + ahead + k);
      pair v = load_some(j->x, dtype, at + k, p.wide - k);
      words a = larger(words_at(amax + k), magnitude(v.a)), b = larger(words_at(amax + k + LANES), magnitude(v.b));
      memcpy(amax + k, &a, sizeof a);
      memcpy(amax + k + LANES, &b, sizeof b);
      store(gathered, as, r * pitch + k, v, 1, 0);
    }
    if (j->rows && dtype == BF16)
      along_bf16(j, j->rows, at, p.wide);
    else if (j->rows)
      along(j, j->rows, dtype, at, p.wide, &g, 1);
  }
  for (int64_t k = 0; k < pitch; k += LANES) scales_of(words_at(amax + k), &g, inverse + k, scale + k);
  for (int64_t r = 0; r < p.depth; r++)
    for (int64_t k = 0; k < p.wide; k += PAIR) {
      fetch_far(j->x, dtype, p.start + r * j->inner + p.wide + k); /* for the next tile */
      pair v = load(gathered, as, r * pitch + k);
      floats a = in_block(v.a, floats_at(inverse + k), floats_at(scale + k), &g);
      floats b = in_block(v.b, floats_at(inverse + k + LANES), floats_at(scale + k + LANES), &g);
      store_some(j->y, dtype, p.start + r * j->inner + k, p.wide - k, (pair){a, b}, 1, (int)j->past);
    }
}
