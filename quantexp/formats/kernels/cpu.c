/* Quantises tensors on a CPU, bit for bit like the torch code of the package: every format whose scales follow from amaxes,
   to nearest or at random, after a Hadamard transform or not.

   Elements are float in registers, whatever their type in memory (panels.h), except most of bfloat16: MX (mx_bf16.h), HiF8
   and the amax (hif8_bf16.h) are computed in 16-bit integers. Floats are rounded by addition: numbers from 2^k to 2^(k+1)
   are 2^(k-23) apart, so (v + 2^k) - 2^k is v rounded to nearest even at that spacing. No product is an operand of an
   addition unless it is exact, so a contraction would change nothing. Work is split into units, which threads take from a
   counter. A unit is read from memory once, into a panel that stays in the caches. Nothing is allocated, and nothing
   outlives a call. */

#include "hif8_bf16.h"

INLINE floats on_hif8(floats v, const grid *g) {
  /* 3/2 max is on the grid's continuation, and every value above max counts as beyond it. */
  floats a = at_most((floats)magnitude(v), every(g->beyond ? 1.5f * g->max : g->max));
  words bits = (words)a | ((words)v & SIGN) | g->away;
  floats magic = (floats)magic_of(binade_of(bits, g->emin));
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

INLINE void raise_to(job *j, uint32_t here) {
  uint32_t before = __atomic_load_n(&j->amax, __ATOMIC_RELAXED);
  while (before < here && !__atomic_compare_exchange_n(&j->amax, &before, here, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

INLINE void find_largest(job *j, enum dtype dtype, int64_t unit) {
  int64_t first = unit * SHARE, end = least(first + SHARE, j->inner);
#if LANES > 4
  uint32_t here = dtype == BF16 ? largest_bits(j->x, first, end) : largest(j->x, dtype, first, end);
#else
  uint32_t here = largest(j->x, dtype, first, end);
#endif
  raise_to(j, here);
}

/* Of a panel's transform. */
INLINE void find_largest_of_panel(job *j, enum dtype dtype, int64_t unit) {
  const patch p = patch_of(j, unit);
  _Alignas(64) float v[PANEL + PAIR];
  int64_t pitch = parts_of(p.wide, PAIR) * PAIR;
  read_panel(j, dtype, &p, v, pitch);
  uint32_t most = 0;
  for (int64_t r = 0; r < p.depth; r++) {
    uint32_t here = largest(v, FP32, r * pitch, r * pitch + p.wide);
    most = here > most ? here : most;
  }
  raise_to(j, most);
}

INLINE void panels(const job *j, enum dtype dtype, int how, int64_t unit) {
  const patch p = patch_of(j, unit);
#if LANES > 4
  if (dtype == BF16 && how == EXACT && j->g->in_integers && panel_bits(j, &p)) return;
#endif
  round_panel(j, dtype, how, &p);
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
UNIT(multiplied, panels(j, D, MULTIPLIED, unit))
UNIT(exact, panels(j, D, EXACT, unit))
UNIT(divided, panels(j, D, DIVIDED, unit))
UNIT(drawn, panels(j, D, RANDOM, unit))
UNIT(drawn_and_divided, panels(j, D, RANDOM | DIVIDED, unit))
UNIT(any, panels(j, D, ANY, unit))
UNIT(fp8, flat(j, D, 0, 0, unit))
UNIT(fp8_by_power, flat(j, D, 0, 1, unit))
UNIT(hif8, flat(j, D, 1, 0, unit))
UNIT(hif8_by_power, flat(j, D, 1, 1, unit))
UNIT(amax_of_unit, find_largest(j, D, unit))
UNIT(amax_of_panel, find_largest_of_panel(j, D, unit))

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
  int64_t bytes = bytes_of((enum dtype)j->dtype), is_flat = !j->tall, lines = is_flat ? 0 : j->inner | columns_of(j);
  uint64_t ends = (uint64_t)j->y | (uint64_t)j->rows | (uint64_t)(lines * bytes);
  int in_blocks = is_flat || !j->g->in_integers || j->tall * j->wide == BLOCK;
  return LANES > 4 && ends % 64 == 0 && in_blocks && j->outer * j->extent * j->inner * bytes >= STREAMED;
}

static void share_panels(job *j, int64_t threads) {
  int64_t depth = depth_of(j), columns = least(columns_of(j), j->width);
  int64_t per_row = j->inner / j->width * parts_of(j->width, columns);
  share(j, j->outer * parts_of(j->extent, depth) * per_row, depth * columns, threads);
}

static void (*work_in_blocks(const job *j))(void *, int64_t) {
  const grid *g = j->g;
  int is_usual = g->kind != CONSTANT && g->lowest == g->max && g->has_negative_zero && (g->is_random || g->pre_scale == 1);
  if (!is_usual) return any;
  if (g->is_random) return g->is_divided ? drawn_and_divided : drawn;
  if (g->is_divided) return divided;
  return j->hadamard || g->mantissa_bits > 7 ? multiplied : exact; /* bfloat16 has 7 bits */
}

/* No extent of a job may be 0. Without blocks, and to nearest, `tall` is 0. */
void quantise(job *j, int64_t threads) {
  static void (*const flat_work[2][2])(void *, int64_t) = {{fp8, fp8_by_power}, {hif8, hif8_by_power}};
  j->past = goes_past(j);
  if (!j->tall) {
    j->work = flat_work[j->g->family - 1][j->g->is_power];
    share(j, parts_of(j->inner, SHARE), SHARE, threads);
  } else {
    j->work = work_in_blocks(j);
    share_panels(j, threads);
  }
}

/* The bits of the largest finite magnitude as a float, of the transform if there is one. */
uint32_t largest_finite(job *j, int64_t threads) {
  j->amax = 0;
  if (j->hadamard) {
    j->work = amax_of_panel;
    share_panels(j, threads);
  } else {
    j->work = amax_of_unit;
    share(j, parts_of(j->inner, SHARE), SHARE, threads);
  }
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

/* Random numbers of `rows` rows of `extent` elements, each from its own position on. */
typedef struct {
  const int64_t *starts;
  float *numbers;
  int64_t rows, extent;
  uint64_t seed, offset;
  int64_t next;
} draw;

enum { PART = 8192 };

static void draw_parts(void *p) {
  draw *d = p;
  float space[PART + 2 * DRAWN];
  int64_t per_row = parts_of(d->extent, PART), part;
  while ((part = __atomic_fetch_add(&d->next, 1, __ATOMIC_RELAXED)) < d->rows * per_row) {
    int64_t row = part / per_row, first = part % per_row * PART, n = least(d->extent - first, PART);
    const float *numbers = numbers_at(d->seed, d->offset, d->starts[row] + first, n, space);
    memcpy(d->numbers + row * d->extent + first, numbers, (size_t)n * sizeof *numbers);
  }
}

void random_numbers(draw *d, int64_t threads) {
  d->next = 0;
  if (threads > 1 && d->rows * d->extent > PART && GOMP_parallel)
    GOMP_parallel(draw_parts, d, (unsigned)threads, 0);
  else
    draw_parts(d);
}
