/* Blocks of any shape, scale and element, in floats: a panel of whole blocks is read once, transformed if the job says so,
   and rounded under the scales of its blocks; for a second result, once more under other blocks. A row is an array of
   floats, whatever the type in memory. */

#include "job.h"

/* How elements are rounded. Multiplied by the inverse of a power of two to nearest, or one of: the results are exact in
   bfloat16; divided; at random; and any grid, also one whose ends are not alike, or without blocks. */
enum how { MULTIPLIED = 0, EXACT = 1, DIVIDED = 2, RANDOM = 4, ANY = 8 };

/* The scales of blocks from the bits of their amax, NaN for a block with NaN or Inf, and the inverses of powers of two. */
INLINE floats powers_of(words ratio, const grid *g, words *is_nan) {
  ints field = (ints)((ratio + g->offset) & EXPONENT) - (g->emax << MANTISSA_BITS);
  field &= field > 0;
  *is_nan |= (words)(ratio >= EXPONENT) | (words)((words)field >= EXPONENT);
  return (floats)larger((words)field, all(1u << (MANTISSA_BITS - 1))); /* 2^-127 has no exponent field of its own */
}

INLINE floats small_scales(floats ratio, const grid *g) {
  ratio = (floats)larger(lesser((words)ratio, (words)every(g->scale_max)), (words)every(g->scale_min));
  floats b = on_steps(ratio, g->scale_mantissa_bits, g->scale_emin);
  if (g->rule == NEAREST) return b;
  words step = binade_of((words)ratio, g->scale_emin) - ((uint32_t)g->scale_mantissa_bits << MANTISSA_BITS);
  if (g->rule == FLOOR) return b - (floats)((words)(b > ratio) & step);
  b += (floats)((words)(b < ratio) & step);
  return (floats)lesser((words)b, (words)every(g->scale_max));
}

INLINE floats wide_scales(words ratio, const grid *g) {
  words more = g->rule == NEAREST ? 0x7fffu + (ratio >> 16 & 1u) : all(g->rule == CEIL ? 0xffffu : 0);
  words b = (lesser(ratio, all(EXPONENT)) + more) & 0xffff0000u;
  return (floats)larger(lesser(b, (words)every(g->scale_max)), (words)every(g->scale_min));
}

INLINE void scales_of(words amax, const grid *g, float *inverse, float *factor) {
  floats t = every(g->scale), largest = every(g->max), a = (floats)amax, d;
  words is_nan = (words)(amax >= EXPONENT);
  if (g->kind == POWER)
    d = powers_of((words)(a / t), g, &is_nan);
  else {
    a = g->kind == CONSTANT ? a : g->tensor_first ? a / t / largest : a / largest / t;
    if (g->kind == SMALL)
      d = small_scales(a, g);
    else if (g->kind == WIDE)
      d = wide_scales((words)a, g);
    else
      d = (floats)where((words)(a == 0), all(ONE), larger((words)a, (words)every(0x1p-126f)));
  }
  words over = larger(all((uint32_t)(2 * BIAS) << MANTISSA_BITS) - ((words)d & EXPONENT), all(1u << (MANTISSA_BITS - 1)));
  d = (floats)where(is_nan, all(NOT_A_NUMBER), (words)(d * t));
  memcpy(inverse, &over, sizeof over);
  memcpy(factor, &d, sizeof d);
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
/* The bits of that addend for HiF8's binades. */
INLINE words magic_of(words binade) {
  ints e = (ints)binade - (BIAS << MANTISSA_BITS), minus = e >> 31;
  return binade + spacing((words)((e ^ minus) - minus) >> (MANTISSA_BITS + 2));
}

/* v >= 0, rounded up if its part beyond the multiple of the spacing below, in 2^-24, exceeds its random number. */
INLINE floats at_random(floats v, floats number, const grid *g, int how) {
  words step = binade_of((words)v, g->emin);
  if (how == ANY && g->family == HIF8) {
    step = lesser(step, all((uint32_t)(BIAS + g->emax) << MANTISSA_BITS));
    step = magic_of(step) - (MANTISSA_BITS << MANTISSA_BITS) - (1u << (MANTISSA_BITS - 1));
  } else
    step -= (uint32_t)g->mantissa_bits << MANTISSA_BITS;
  floats multiples = v * (floats)(all((uint32_t)(2 * BIAS) << MANTISSA_BITS) - step), below = floored(multiples);
  return one_more(below, (multiples - below) * 0x1p24f, number + 1) * (floats)step;
}

INLINE floats on_element(floats x, floats inverse, floats factor, floats number, const grid *g, int how) {
  int is_any = how == ANY, is_random = is_any ? g->is_random : how & RANDOM;
  words sign = (words)x & SIGN;
  floats v = (floats)magnitude(x), most = every(is_any && g->beyond ? 2 * g->max : g->max);
  v = (is_any ? g->is_divided : how & DIVIDED) ? v / factor : v * inverse;
  if (is_any || is_random) v *= g->pre_scale;
  if (is_any && g->lowest != g->max) most = (floats)where((words)((ints)sign < 0), (words)every(g->lowest), (words)most);
  v = at_most(v, most);
  v = (floats)((words)(is_random ? at_random(v, number, g, how) : rounded(v, g)) | sign);
  if (is_any && !g->has_negative_zero) v += 0.0f;
  if (!is_any || !g->family) return v * factor;
  words over = (words)((floats)magnitude(v) > every(g->max));
  if (g->beyond) v = (floats)where(over, sign | g->beyond, (words)v);
  return v / factor;
}

/* v and the element `h` lanes away: their sum, or difference where the element comes first. */
INLINE floats crossed(floats v, words lane, int h) {
  words minus = (words)((lane & (uint32_t)h) != 0) & SIGN;
  return swapped(v, h) + (floats)((words)v ^ minus);
}

/* The remaining steps of a transform of `size` rows of n elements, `pitch` apart; the results are multiplied. */
static __attribute__((noinline)) void transform_rows(float *v, int64_t size, int64_t pitch, int64_t n, float factor) {
  for (int64_t h = 1; h < size;) {
    int is_double = 4 * h <= size;
    int64_t span = is_double ? 4 * h : 2 * h, step = h * pitch;
    floats c = every(span == size ? factor : 1);
    for (int64_t first = 0; first < size; first += span)
      for (int64_t i = first; i < first + h; i++)
        for (int64_t k = 0; k < n; k += LANES) {
          float *at = v + i * pitch + k;
          floats a = floats_at(at), b = floats_at(at + step), p = a + b, q = a - b;
          if (is_double) {
            floats d = floats_at(at + 2 * step), e = floats_at(at + 3 * step), r = d + e, s = d - e;
            a = (p - r) * c, b = (q - s) * c, p += r, q += s;
            memcpy(at + 2 * step, &a, sizeof a);
            memcpy(at + 3 * step, &b, sizeof b);
          }
          p *= c, q *= c;
          memcpy(at, &p, sizeof p);
          memcpy(at + step, &q, sizeof q);
        }
    h = span;
  }
}

INLINE float factor_of(int64_t size, int64_t is_left) {
  int k = __builtin_ctzll((unsigned long long)size);
  return 1.0f / (float)(1 << (is_left ? (k + 1) / 2 : k / 2));
}

/* A transform of `size` elements in a row. */
INLINE void transform_row(float *v, int64_t size, float factor) {
  if (size < LANES) {
    for (int64_t h = 1; h < size; h *= 2)
      for (int64_t i = 0; i < size; i++)
        if (!(i & h)) {
          float a = v[i], b = v[i + h];
          v[i] = a + b, v[i + h] = a - b;
        }
    for (int64_t i = 0; i < size; i++) v[i] *= factor;
    return;
  }
  words lane;
  for (uint32_t k = 0; k < LANES; k++) lane[k] = k;
  floats c = every(size == LANES ? factor : 1);
  for (int64_t k = 0; k < size; k += LANES) {
    floats part = floats_at(v + k);
    part = crossed(crossed(part, lane, 1), lane, 2);
    if (LANES > 4) part = crossed(part, lane, 4);
    if (LANES > 8) part = crossed(part, lane, 8);
    part *= c;
    memcpy(v + k, &part, sizeof part);
  }
  transform_rows(v, size / LANES, LANES, LANES, factor);
}

/* The largest power of two up to the block that is left of n elements. */
INLINE int64_t size_of(int64_t block, int64_t n) {
  while (block > n) block /= 2;
  return block;
}

static __attribute__((noinline)) void transform(const job *j, float *v, int64_t rows, int64_t columns, int64_t pitch) {
  int64_t extent = j->is_down ? rows : columns;
  for (int64_t first = 0, size = 0; first < extent; first += size) {
    size = size_of(j->hadamard, extent - first);
    float factor = factor_of(size, j->is_left);
    if (j->is_down)
      transform_rows(v + first * pitch, size, pitch, pitch, factor);
    else
      for (int64_t r = 0; r < rows; r++) transform_row(v + r * pitch + first, size, factor);
  }
}

/* Reads a panel; rows are filled with zeros up to `pitch`. Signs are those of a transform. */
INLINE void read_rows(const job *j, enum dtype dtype, const patch *p, float *v, int64_t pitch, int is_signed) {
  int64_t last = (j->hadamard < 16 ? 16 : j->hadamard) - 1;
  for (int64_t r = 0; r < p->depth; r++) {
    int64_t at = p->start + r * j->inner, ahead = p->depth > 1 ? ahead_of(j, p, r) : p->wide;
    for (int64_t k = 0; k < p->wide; k += PAIR) {
      fetch(j->x, dtype, at + k + ahead);
      pair both = load_some(j->x, dtype, at + k, p->wide - k);
      if (is_signed && j->is_down) both.a *= j->signs[r & last], both.b *= j->signs[r & last];
      if (is_signed && !j->is_down)
        both.a *= floats_at(j->signs + (k & last)), both.b *= floats_at(j->signs + ((k + LANES) & last));
      memcpy(v + r * pitch + k, &both, sizeof both);
    }
  }
}

INLINE void read_panel(const job *j, enum dtype dtype, const patch *p, float *v, int64_t pitch) {
  if (j->signs)
    read_rows(j, dtype, p, v, pitch, 1);
  else
    read_rows(j, dtype, p, v, pitch, 0);
  if (j->hadamard) transform(j, v, p->depth, p->wide, pitch);
}

/* The largest magnitude of each column. */
INLINE void largest_of_columns(const float *v, int64_t rows, int64_t pitch, uint32_t *amax) {
  memset(amax, 0, (size_t)pitch * sizeof *amax);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < pitch; k += LANES) {
      words most = larger(words_at(amax + k), magnitude(floats_at(v + r * pitch + k)));
      memcpy(amax + k, &most, sizeof most);
    }
}

INLINE uint32_t largest_of(const uint32_t *bits, int64_t n) {
  uint32_t most = 0;
  if (n % LANES == 0) {
    words lanes = {0};
    for (int64_t k = 0; k < n; k += LANES) lanes = larger(lanes, words_at(bits + k) & MAGNITUDE);
    return largest_lane(lanes);
  }
  for (int64_t k = 0; k < n; k++) most = (bits[k] & MAGNITUDE) > most ? bits[k] & MAGNITUDE : most;
  return most;
}

/* What each column of a strip of blocks is multiplied by before and after rounding. */
typedef struct {
  _Alignas(64) float inverse[WIDEST + PAIR], factor[WIDEST + PAIR];
} scales;

/* Those of a strip in v, for columns up to `pitch`. */
static __attribute__((noinline)) void find_scales(const job *j, const float *v, int64_t rows, int64_t columns, int64_t pitch,
                                                  int64_t wide, scales *s) {
  const grid g = *j->g;
  _Alignas(64) uint32_t amax[WIDEST + PAIR];
  scales own;
  if (g.kind == CONSTANT) {
    for (int64_t k = 0; k < pitch; k++) s->inverse[k] = s->factor[k] = g.scale;
    return;
  }
  const uint32_t *top = rows == 1 ? (const uint32_t *)v : amax;
  if (rows > 1) largest_of_columns(v, rows, pitch, amax);
  int64_t blocks = parts_of(columns, wide);
  scales *of_blocks = wide == 1 ? s : &own;
  if (wide > 1)
    for (int64_t b = 0; b < blocks; b++) amax[b] = largest_of(top + b * wide, least(wide, pitch - b * wide));
  for (int64_t b = 0; b < blocks; b += LANES)
    scales_of(words_at((wide > 1 ? amax : top) + b) & MAGNITUDE, &g, of_blocks->inverse + b, of_blocks->factor + b);
  for (int64_t b = 0; b < blocks && wide > 1; b++)
    for (int64_t k = b * wide; k < least(b * wide + wide, pitch); k += LANES) {
      floats inverse = every(own.inverse[b]), factor = every(own.factor[b]);
      if (!g.is_divided) memcpy(s->inverse + k, &inverse, sizeof inverse);
      memcpy(s->factor + k, &factor, sizeof factor);
    }
}

/* The random numbers of n elements from x[at] on; `space` has 2 * (WIDEST + 2 * DRAWN). */
static __attribute__((noinline)) const float *numbers_of(const job *j, int64_t at, int64_t n, float *space) {
  if (!j->starts) return numbers_at(j->seed, j->offset, at, n, space);
  float *numbers = space + WIDEST + 2 * DRAWN;
  for (int64_t k = 0; k < n;) {
    int64_t row = (at + k) / j->length, column = (at + k) % j->length, here = least(n - k, j->length - column);
    const float *from = numbers_at(j->seed, j->offset, j->starts[row] + column, here, space);
    memcpy(numbers + k, from, (size_t)here * sizeof *from);
    k += here;
  }
  return numbers;
}

/* Rounds v[k], which has the number `number` if it is rounded at random. */
INLINE floats on_column(const float *v, const scales *s, const float *numbers, int64_t k, const grid *g, int how) {
  floats number = how & (RANDOM | ANY) ? floats_at(numbers + k) : every(0);
  return on_element(floats_at(v + k), floats_at(s->inverse + k), floats_at(s->factor + k), number, g, how);
}

INLINE void round_panel(const job *j, enum dtype dtype, int how, const patch *p) {
  const grid g = *j->g;
  scales s;
  _Alignas(64) float panel[PANEL + PAIR], space[2 * (WIDEST + 2 * DRAWN)];
  int64_t pitch = parts_of(p->wide, PAIR) * PAIR;
  int past = (int)j->past;
  read_panel(j, dtype, p, panel, pitch);
  for (int second = 0; second <= (j->rows != 0); second++) {
    void *y = second ? j->rows : j->y;
    int64_t tall = second ? 1 : j->tall, wide = second ? j->tall : j->wide;
    for (int64_t r = 0; r < p->depth; r++) {
      const float *v = panel + r * pitch, *numbers = space;
      int64_t at = p->start + r * j->inner;
      if (r % tall == 0) find_scales(j, v, least(tall, p->depth - r), p->wide, pitch, wide, &s);
      if (how & (RANDOM | ANY) && g.is_random) numbers = numbers_of(j, at, p->wide, space);
      for (int64_t k = 0; k < p->wide; k += PAIR) {
        pair both = {on_column(v, &s, numbers, k, &g, how), on_column(v, &s, numbers, k + LANES, &g, how)};
        store_some(y, dtype, at + k, p->wide - k, both, how == EXACT, past);
      }
    }
  }
}
