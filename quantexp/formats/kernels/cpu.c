/* Quantises tensors to MX, FP8 and HiF8 on a CPU, bit for bit like the torch code of the package.

   Elements are float in registers, whatever their type in memory, except most of bfloat16: MX (mx_bf16.h), HiF8 and the
   amax (hif8_bf16.h) are computed in 16-bit integers. Floats are rounded by addition: numbers from 2^k to 2^(k+1) are
   2^(k-23) apart, so (v + 2^k) - 2^k is v rounded to nearest even at that spacing. No product is an operand of an
   addition, so nothing can be contracted. Work is split into units, which threads take from a counter. A unit is read
   from memory once, and blocks that do not lie along memory are gathered in a tile that stays in the L1 cache. Nothing
   is allocated, and nothing outlives a call. */

#include "hif8_bf16.h"
#include "philox.h"

/* A unit of blocks along memory: at most a span of a row. */
INLINE int64_t span_of(const job *j) { return SHARE / j->block * j->block; }

INLINE void span(const job *j, enum dtype dtype, int64_t unit) {
  const grid g = *j->g;
  int64_t per_row = parts_of(j->extent, span_of(j)), first = unit % per_row * span_of(j);
  int64_t start = unit / per_row * j->extent + first, n = least(j->extent - first, span_of(j));
#if LANES > 4
  if (dtype == BF16 && !g.away) {
    const bits_grid bits = bits_grid_of(&g);
    along_bits(j, (const uint16_t *)j->x + start, 0, j->y, start, 1, n, &bits, 0);
    return;
  }
#endif
  if (dtype == BF16)
    along_bf16(j, j->y, start, n);
  else
    along(j, j->y, dtype, start, n, &g, 0);
}

INLINE void across(const job *j, enum dtype dtype, int64_t unit) {
#if LANES > 4
  if (dtype == BF16 && !j->g->away && tile_bits(j, unit)) return;
#endif
  tile(j, dtype, unit);
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
#if LANES > 4
  if (dtype == BF16 && hif8 && exact && hif8_bits(j, unit * SHARE, end)) return;
#endif
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

/* The bits of the largest finite magnitude from `at` to `end`. Nothing is prefetched: the processor predicts the reads. */
INLINE uint32_t largest(const void *x, enum dtype dtype, int64_t at, int64_t end) {
  words most = {0};
  for (; at < end; at += PAIR) {
    pair v = load_some(x, dtype, at, end - at);
    most = larger(most, larger(if_finite(v.a), if_finite(v.b)));
  }
  return largest_lane(most);
}

INLINE void find_largest(job *j, enum dtype dtype, int64_t unit) {
  int64_t first = unit * SHARE, end = least(first + SHARE, j->inner);
#if LANES > 4
  uint32_t here = dtype == BF16 ? largest_bits(j->x, first, end) : largest(j->x, dtype, first, end);
#else
  uint32_t here = largest(j->x, dtype, first, end);
#endif
  uint32_t before = __atomic_load_n(&j->amax, __ATOMIC_RELAXED);
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
UNIT(mx_across, across(j, D, unit))
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
  uint64_t mode = enter_exact();
  job *j = p;
  int64_t first;
  while ((first = __atomic_fetch_add(&j->next, j->step, __ATOMIC_RELAXED)) < j->units)
    for (int64_t unit = first; unit < least(first + j->step, j->units); unit++) j->work(j, unit);
#if LANES > 4
  _mm_sfence(); /* what went past the caches is there for all threads */
#endif
  restore_mode(mode);
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

static _Thread_local uint64_t mode_before;

static void make_exact(void *is_changed) {
  mode_before = enter_exact();
  if (mode_before & INEXACT) __atomic_store_n((int32_t *)is_changed, 1, __ATOMIC_RELAXED);
}
static void restore(void *unused) {
  (void)unused;
  restore_mode(mode_before);
}

/* For arithmetic outside of this file: makes that of the caller and of torch's threads exact until
   `restore_threads(threads)` by the same caller. The result is whether a mode was changed; if not, there is nothing to
   restore. */
int32_t make_threads_exact(int64_t threads) {
  int32_t is_changed = 0;
  if (threads > 1 && GOMP_parallel)
    GOMP_parallel(make_exact, &is_changed, (unsigned)threads, 0);
  else
    make_exact(&is_changed);
  return is_changed;
}
void restore_threads(int64_t threads) {
  if (threads > 1 && GOMP_parallel)
    GOMP_parallel(restore, 0, (unsigned)threads, 0);
  else
    restore(0);
}

/* The random numbers of all counters. */
void random_integers(draw *d, int64_t threads) {
  d->next = 0;
  if (threads > 1 && d->count > COUNTERS && GOMP_parallel)
    GOMP_parallel(take_counters, d, (unsigned)threads, 0);
  else
    take_counters(d);
}
