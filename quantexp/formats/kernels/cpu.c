/* Quantises tensors to MX, FP8 and HiF8 on a CPU, bit for bit like the torch code of the package.

   Elements are float in registers, whatever their type in memory, and rounding is done by addition: numbers from 2^k to
   2^(k+1) are 2^(k-23) apart, so (v + 2^k) - 2^k is v rounded to nearest even at that spacing. No product is an operand
   of an addition, so nothing can be contracted. Work is split into units, which threads take from a counter. A unit is
   read from memory once, and blocks that do not lie along memory are gathered in a tile that stays in the L1 cache.
   Nothing is allocated, and nothing outlives a call. */

#include "lanes.h"

/* The usual size of an MX block, for which the compiler unrolls. */
#define BLOCK 32
/* Floats of a tile, 32 kB, and its largest number of columns. */
#define TILE 8192
#define COLUMNS 256
/* Blocks along memory whose scales are computed together. */
#define GROUP 16
/* Approximate number of elements that a thread takes at a time. */
#define SHARE 65536
/* Prefetch distance in elements. */
#define AHEAD 512
/* Prefetch distance in rows of a tile. More would not stay in the cache: rows whose distance is a power of two share its
   sets. */
#define ROWS_AHEAD 8
/* Bytes of a result from which stores bypass the caches, which then need not read it first. */
#define STREAMED (32 << 20)

/* A number format, and how to round to it. */
typedef struct {
  /* Of the element: mantissa bits, exponent of the smallest normal (HiF8: of the smallest) and of the largest value, the
     largest value. */
  int32_t mantissa_bits, emin, emax;
  float max;
  /* The offset that the scale rule adds to the bits of a block's amax. */
  uint32_t offset;
  /* 1: ties go away from zero; 0: to even. */
  uint32_t away;
  /* 0: MX; 1: FP8; 2: HiF8. */
  int32_t family;
  /* Not MX: the result for values beyond the largest, as bits; 0: the largest. */
  uint32_t beyond;
  /* Not MX: the scale of the tensor, and whether it is a power of two. */
  float scale;
  int32_t is_power;
} grid;

/* Work: blocks run along the middle of [outer, extent, inner] and, if there is a second result, also along the last
   `width` of `inner`; otherwise width is inner. Without blocks outer and extent are 1. */
typedef struct {
  const void *x;
  void *y, *rows;
  int64_t dtype, outer, extent, inner, width, block;
  const grid *g;
  /* Whether stores of results bypass the caches. */
  int64_t past;
  /* For `largest_finite`: the largest magnitude so far, as bits. */
  uint32_t amax;
  /* Number of units, units taken at a time, and the first unit not yet taken. */
  int64_t units, step, next;
  void (*work)(void *job, int64_t unit);
} job;

/* v >= 0 on the element's grid, continued beyond its largest value. */
INLINE floats rounded(floats v, const grid *g) {
  words bits = (words)v | g->away;
  words binade = larger(bits & EXPONENT, all((uint32_t)(BIAS + g->emin) << MANTISSA_BITS));
  floats magic = (floats)(binade + ((uint32_t)(MANTISSA_BITS - g->mantissa_bits) << MANTISSA_BITS));
  return ((floats)bits + magic) - magic;
}

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

/* A unit of blocks along memory: at most a span of a row. */
INLINE int64_t span_of(const job *j) { return SHARE / j->block * j->block; }

INLINE void span(const job *j, enum dtype dtype, int64_t unit) {
  const grid g = *j->g;
  int64_t per_row = parts_of(j->extent, span_of(j)), first = unit % per_row * span_of(j);
  along(j, j->y, dtype, unit / per_row * j->extent + first, least(j->extent - first, span_of(j)), &g, 0);
}

/* A unit of blocks across memory: a block's rows and some columns. */
INLINE int64_t columns_of(const job *j) { return least(COLUMNS, TILE / j->block); }

INLINE void tile(const job *j, enum dtype dtype, int64_t unit) {
  const grid g = *j->g;
  _Alignas(64) float held[TILE], inverse[COLUMNS], scale[COLUMNS];
  enum dtype as = dtype == BF16 ? BF16 : FP32; /* half of the tile is enough for bfloat16 */
  _Alignas(64) uint32_t amax[COLUMNS] = {0};
  int64_t per_width = parts_of(j->width, columns_of(j)), per_strip = j->inner / j->width * per_width;
  int64_t strip = unit / per_strip, strips = parts_of(j->extent, j->block), first = strip % strips * j->block;
  int64_t column = unit % per_width * columns_of(j), wide = least(j->width - column, columns_of(j));
  int64_t start = (strip / strips * j->extent + first) * j->inner + unit % per_strip / per_width * j->width + column;
  int64_t depth = least(j->extent - first, j->block), pitch = parts_of(wide, PAIR) * PAIR;
  for (int64_t r = 0; r < depth; r++) {
    int64_t at = start + r * j->inner;
    int64_t ahead = r + ROWS_AHEAD < depth ? ROWS_AHEAD * j->inner : wide + (ROWS_AHEAD - depth) * j->inner;
    for (int64_t k = 0; k < wide; k += PAIR) {
      fetch(j->x, dtype, at + ahead + k);
      pair v = load_some(j->x, dtype, at + k, wide - k);
      words a = larger(words_at(amax + k), magnitude(v.a)), b = larger(words_at(amax + k + LANES), magnitude(v.b));
      memcpy(amax + k, &a, sizeof a);
      memcpy(amax + k + LANES, &b, sizeof b);
      store(held, as, r * pitch + k, v, 1, 0);
    }
    if (j->rows) along(j, j->rows, dtype, at, wide, &g, 1);
  }
  for (int64_t k = 0; k < pitch; k += LANES) scales_of(words_at(amax + k), &g, inverse + k, scale + k);
  for (int64_t r = 0; r < depth; r++)
    for (int64_t k = 0; k < wide; k += PAIR) {
      pair v = load(held, as, r * pitch + k);
      floats a = in_block(v.a, floats_at(inverse + k), floats_at(scale + k), &g);
      floats b = in_block(v.b, floats_at(inverse + k + LANES), floats_at(scale + k + LANES), &g);
      store_some(j->y, dtype, start + r * j->inner + k, wide - k, (pair){a, b}, 1, (int)j->past);
    }
}

/* The number to add to the bits of 2^E, indexed by |E| / 4, for an addend that preserves HiF8's mantissa of
   4 - max(1, floor(log2 |E|)) bits, for either sign: (23 - m + 1/2) 2^23. */
INLINE words spacing(words quarter) {
#if LANES > 4
#define KEEPS(m) (MANTISSA_BITS - (m)) * (1u << MANTISSA_BITS) + (1u << (MANTISSA_BITS - 1))
  static const uint32_t table[16] = {KEEPS(3), KEEPS(2), KEEPS(1), KEEPS(1), KEEPS(0), KEEPS(0)};
  return looked_up(words_at(table), quarter);
#else
  words lost = (words){0} - (words)(quarter > 0) - (words)(quarter > 1) - (words)(quarter > 3);
  return ((lost + (MANTISSA_BITS - 3u)) << MANTISSA_BITS) + (1u << (MANTISSA_BITS - 1));
#endif
}

INLINE floats on_hif8(floats v, const grid *g) {
  /* 3/2 max is on the grid's continuation, and every value above max counts as beyond it. */
  floats a = at_most((floats)magnitude(v), every(g->beyond ? 1.5f * g->max : g->max));
  words bits = (words)a | ((words)v & SIGN) | g->away;
  words binade = larger(bits & EXPONENT, all((uint32_t)(BIAS + g->emin) << MANTISSA_BITS));
  ints e = (ints)binade - (BIAS << MANTISSA_BITS), minus = e >> 31;
  words quarter = (words)((e ^ minus) - minus) >> (MANTISSA_BITS + 2);
  floats magic = (floats)(binade + spacing(quarter));
  return ((floats)bits + magic) - magic;
}

INLINE floats on_fp8(floats v, const grid *g) {
  floats a = at_most((floats)magnitude(v), every(g->beyond ? 2 * g->max : g->max));
  return (floats)((words)rounded(a, g) | ((words)v & SIGN));
}

INLINE floats on_flat(floats v, const grid *g, int hif8) {
  v = hif8 ? on_hif8(v, g) : on_fp8(v, g);
  if (!g->beyond) return v;
  words over = (words)((floats)magnitude(v) > every(g->max));
  return (floats)where(over, ((words)v & SIGN) | g->beyond, (words)v);
}

/* Independent elements; `exact`: the scale is a power of two, so bfloat16 represents the results. */
INLINE void flat(const job *j, enum dtype dtype, int hif8, int exact, int64_t unit) {
  const grid g = *j->g;
  int64_t end = least((unit + 1) * SHARE, j->inner);
  floats scale = every(g.scale), inverse = every(1 / g.scale);
  for (int64_t at = unit * SHARE; at < end; at += PAIR) {
    fetch(j->x, dtype, at + AHEAD);
    pair v = load_some(j->x, dtype, at, end - at);
    floats a = on_flat(v.a * scale, &g, hif8), b = on_flat(v.b * scale, &g, hif8);
    v = exact ? (pair){a * inverse, b * inverse} : (pair){a / scale, b / scale};
    store_some(j->y, dtype, at, end - at, v, exact, (int)j->past);
  }
}

INLINE words if_finite(floats v) { return magnitude(v) & (words)(magnitude(v) < EXPONENT); }

INLINE void find_largest(job *j, enum dtype dtype, int64_t unit) {
  int64_t end = least((unit + 1) * SHARE, j->inner);
  words most = {0};
  for (int64_t at = unit * SHARE; at < end; at += PAIR) {
    fetch(j->x, dtype, at + AHEAD);
    pair v = load_some(j->x, dtype, at, end - at);
    most = larger(most, larger(if_finite(v.a), if_finite(v.b)));
  }
  uint32_t here = largest_lane(most), before = __atomic_load_n(&j->amax, __ATOMIC_RELAXED);
  while (before < here && !__atomic_compare_exchange_n(&j->amax, &before, here, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

/* A function for one unit of a job, compiled for each dtype D. */
#define UNIT(name, call)                    \
  static void name(void *p, int64_t unit) { \
    job *j = p;                             \
    if (j->dtype == BF16) {                 \
      const enum dtype D = BF16;            \
      call;                                 \
    } else if (j->dtype == FP16) {          \
      const enum dtype D = FP16;            \
      call;                                 \
    } else {                                \
      const enum dtype D = FP32;            \
      call;                                 \
    }                                       \
  }
UNIT(mx_along, span(j, D, unit))
UNIT(mx_across, tile(j, D, unit))
UNIT(fp8, flat(j, D, 0, 0, unit))
UNIT(fp8_by_power, flat(j, D, 0, 1, unit))
UNIT(hif8, flat(j, D, 1, 0, unit))
UNIT(hif8_by_power, flat(j, D, 1, 1, unit))
UNIT(amax_of_unit, find_largest(j, D, unit))

/* torch's threads; absent if torch uses another kind, and then the caller does all the work. */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

int32_t shares_work(void) { return GOMP_parallel != 0; }
/* Floats per vector; float16 vectors exist from 8 on. */
int32_t num_lanes(void) { return LANES; }

static void take_units(void *p) {
  job *j = p;
  int64_t first;
  while ((first = __atomic_fetch_add(&j->next, j->step, __ATOMIC_RELAXED)) < j->units)
    for (int64_t unit = first; unit < least(first + j->step, j->units); unit++) j->work(j, unit);
#if LANES > 4
  _mm_sfence(); /* what went past the caches is there for all threads */
#endif
}

static void share(job *j, int64_t units, int64_t elements_of_unit, int64_t threads) {
  j->units = units, j->next = 0, j->step = elements_of_unit < SHARE ? SHARE / elements_of_unit : 1;
  threads = least(threads, parts_of(units, j->step));
  if (threads > 1 && GOMP_parallel)
    GOMP_parallel(take_units, j, (unsigned)threads, 0);
  else
    take_units(j);
}

/* Whether the results are too large to remain in a cache, and pairs of vectors are aligned for streaming stores. */
static int goes_past(const job *j) {
  int64_t bytes = bytes_of((enum dtype)j->dtype), line = j->inner == 1 ? j->extent : j->width;
  uint64_t ends = (uint64_t)j->y | (uint64_t)j->rows | (uint64_t)(j->g->family ? 0 : line * bytes);
  return LANES > 4 && ends % 64 == 0 && (j->g->family || j->block == BLOCK) &&
         j->outer * j->extent * j->inner * bytes >= STREAMED;
}

/* No extent of a job may be 0. */
void quantise(job *j, int64_t threads) {
  static void (*const flat_work[2][2])(void *, int64_t) = {{fp8, fp8_by_power}, {hif8, hif8_by_power}};
  j->past = goes_past(j);
  if (j->g->family) {
    j->work = flat_work[j->g->family - 1][j->g->is_power];
    share(j, parts_of(j->inner, SHARE), SHARE, threads);
  } else if (j->inner == 1 && !j->rows) {
    if (j->extent % j->block == 0) j->extent *= j->outer, j->outer = 1;
    j->work = mx_along;
    share(j, j->outer * parts_of(j->extent, span_of(j)), least(j->extent, span_of(j)), threads);
  } else {
    int64_t tiles = j->inner / j->width * parts_of(j->width, columns_of(j));
    j->work = mx_across;
    share(j, j->outer * parts_of(j->extent, j->block) * tiles, j->block * least(j->width, columns_of(j)), threads);
  }
}

/* The bits of the largest finite magnitude as a float. */
uint32_t largest_finite(job *j, int64_t threads) {
  j->work = amax_of_unit, j->amax = 0;
  share(j, parts_of(j->inner, SHARE), SHARE, threads);
  return j->amax;
}
