/* Statistics of captured tensors on a CPU: counts of 16-bit patterns, what follows from them, and MX block errors.

   Vectors are those of GCC and Clang (vector_size), which compile to the machine's instructions. Nothing allocates, calls
   share nothing, and no call reads beyond its arguments. Threads take tensors, and segments of a large tensor, from a
   counter; the number of threads changes no bit of the results. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define PATTERNS 65536
#define BLOCK 32
/* Lanes of a sum. Element i of a block goes to lane i % LANES on every machine, so that the order of a sum does not
   depend on how many lanes its vectors have. */
#define LANES 16
/* Lanes of a vector. GCC splits comparisons and conversions of vectors that are wider than the machine's into single
   elements. */
#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define PARTS (LANES / WIDTH)
/* Elements that fit in half of a level-2 cache. */
#define PART 32768
/* 16-bit elements of a cache line, and the distance in elements at which lines are prefetched. */
#define LINE 32
#define AHEAD 2048
/* Vectors whose sums are accumulated in float before they are added to the double sums. */
#define PENDING 64
/* The least elements of a tensor that several threads share, and the least elements of a thread. */
#define SHARED (1 << 20)
#define THREAD_SHARE (1 << 19)
/* Segments of a shared tensor, whose sums are added in order. */
#define SEGMENTS 64
/* Sums of `errors_of_rows` and of `float_sums`, and bytes of scales. */
#define NUM_ERRORS 7
#define NUM_FLOAT_SUMS 10
#define BYTES 256

typedef float floats __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t words __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDTH)));
typedef double doubles __attribute__((vector_size(4 * WIDTH)));
typedef int64_t longs __attribute__((vector_size(4 * WIDTH)));
typedef float narrow __attribute__((vector_size(2 * WIDTH)));
/* Lanes of a vector of doubles, and of a sum. */
#define DOUBLES (WIDTH / 2)
#define DOUBLE_LANES (PARTS * DOUBLES)

/* Add the counts of the patterns of x[0], x[stride], ... to two tables; fewer than 2^32 in all. */
static void count_patterns(const uint16_t *x, int64_t n, int64_t stride, uint32_t *tables) {
  uint32_t *even = tables, *odd = tables + PATTERNS;
  int64_t i = 0;
  if (stride == 1) {
    for (; i + 4 <= n; i += 4) {
      /* The writes to the tables prevent the processor's own prefetching. */
      if (i % LINE == 0) __builtin_prefetch(x + i + AHEAD);
      uint64_t four;
      memcpy(&four, x + i, 8);
      even[four & 0xffff]++;
      odd[four >> 16 & 0xffff]++;
      even[four >> 32 & 0xffff]++;
      odd[four >> 48]++;
    }
  }
  for (; i < n; i++) even[x[i * stride]]++;
}

static double value_of(int pattern, const double *values) {
  if (values) return values[pattern];
  uint32_t bits = (uint32_t)pattern << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* Whether any of LANES counts in either table is not zero. */
INLINE int any_counts(const uint32_t *even, const uint32_t *odd) {
  words any = {0}, more;
  for (int k = 0; k < LANES; k += WIDTH) {
    memcpy(&more, even + k, sizeof more);
    any |= more;
    memcpy(&more, odd + k, sizeof more);
    any |= more;
  }
  uint64_t pairs[WIDTH / 2], bits = 0;
  memcpy(pairs, &any, sizeof any);
  for (int k = 0; k < WIDTH / 2; k++) bits |= pairs[k];
  return bits != 0;
}

/* The values v and counts c of the patterns that occur in either table, by ascending value, -0 before 0, without NaN and
   Inf. Returns their number. totals: NaN, Inf, zeros, finite. Zeroes the tables. */
static int64_t ordered(uint32_t *tables, const double *values, double *v, double *c, double *totals) {
  uint32_t *even = tables, *odd = tables + PATTERNS;
  int64_t num_values = 0;
  double nan = 0, inf = 0, zeros = 0, finite = 0;
  for (int group = 0; group < PATTERNS / LANES; group++) {
    int is_negative = group < PATTERNS / 2 / LANES;
    int first = is_negative ? PATTERNS - (group + 1) * LANES : group * LANES - PATTERNS / 2;
    if (!any_counts(even + first, odd + first)) continue;
    for (int k = 0; k < LANES; k++) {
      int pattern = first + (is_negative ? LANES - 1 - k : k);
      double count = (double)even[pattern] + odd[pattern];
      if (count == 0) continue;
      double value = value_of(pattern, values);
      if (value != value) {
        nan += count;
      } else if (isinf(value)) {
        inf += count;
      } else {
        zeros += value == 0 ? count : 0;
        finite += count;
        v[num_values] = value;
        c[num_values++] = count;
      }
    }
    memset(even + first, 0, LANES * sizeof *even);
    memset(odd + first, 0, LANES * sizeof *odd);
  }
  totals[0] = nan, totals[1] = inf, totals[2] = zeros, totals[3] = finite;
  return num_values;
}

/* Derive moments, quantiles and magnitudes from the counts of patterns, and zero the tables. `values` has the value of
   each pattern; NULL means bfloat16. `scratch` has room for 2 * 65536 doubles.
   Returns the number of values that occur; their values and counts are in the halves of `scratch`.
   out: NaN, Inf, zeros | n, pivot, S1 .. S4, min, max about the pivot | quantiles | magnitudes by exponent. */
static int64_t describe_counts(uint32_t *tables, const double *values, const double *shares, int64_t num_shares, int64_t lowest,
                               int64_t highest, double *scratch, double *out) {
  double *v = scratch, *c = scratch + PATTERNS, totals[4], sum = 0;
  int64_t num_values = ordered(tables, values, v, c, totals);
  double n = totals[3], s[4] = {0, 0, 0, 0};
  for (int64_t k = 0; k < num_values; k++) sum += v[k] * c[k];
  double pivot = sum / (n > 0 ? n : 1);
  for (int64_t k = 0; k < num_values; k++) {
    double d = v[k] - pivot, first = c[k] * d, second = first * d, third = second * d;
    s[0] += first, s[1] += second, s[2] += third, s[3] += third * d;
  }
  memcpy(out, totals, 3 * sizeof *out);
  double sums[8] = {n, pivot, s[0], s[1], s[2], s[3], num_values ? v[0] : INFINITY, num_values ? v[num_values - 1] : -INFINITY};
  memcpy(out + 3, sums, sizeof sums);
  double *quantile = out + 11, below = 0;
  for (int64_t q = 0, k = 0; q < num_shares; q++) {
    double position = shares[q] * (n > 1 ? n - 1 : 0), rank = floor(position);
    if (num_values == 0) {
      quantile[q] = NAN;
      continue;
    }
    /* `below` elements precede value k */
    while (k + 1 < num_values && below + c[k] <= rank) below += c[k++];
    double low = v[k], high = k + 1 < num_values && below + c[k] <= rank + 1 ? v[k + 1] : low;
    quantile[q] = low + (high - low) * (position - rank);
  }
  double *bins = quantile + num_shares;
  int64_t last = highest - lowest + 2;
  memset(bins, 0, (size_t)(last + 1) * sizeof *bins);
  for (int64_t k = 0; k < num_values; k++) {
    if (v[k] == 0) continue;
    uint64_t bits;
    memcpy(&bits, v + k, 8);
    int64_t bin = (int64_t)(bits >> 52 & 0x7ff) - 1023 - lowest + 1;
    bins[bin < 0 ? 0 : bin > last ? last : bin] += c[k];
  }
  return num_values;
}

/* Sums of the lanes of one vector. */
typedef struct {
  doubles s1, s2, s3, s4, low, high;
  longs finite, nan, zeros;
} moments;

/* `in` is true where a lane has an element. */
INLINE void add_moments(moments *m, narrow part, longs in, double pivot) {
  doubles v = __builtin_convertvector(part, doubles);
  longs is_nan = (v != v) & in, is_finite = (v - v == 0) & in;
  doubles d = (doubles)((longs)(v - pivot) & is_finite), square = d * d;
  m->nan -= is_nan, m->finite -= is_finite, m->zeros -= (v == 0) & in;
  m->s1 += d, m->s2 += square, m->s3 += square * d, m->s4 += square * square;
  longs lower = (v < m->low) & is_finite, higher = (v > m->high) & is_finite;
  m->low = (doubles)(((longs)v & lower) | ((longs)m->low & ~lower));
  m->high = (doubles)(((longs)v & higher) | ((longs)m->high & ~higher));
}

/* Sums of floats about a pivot: n, S1 .. S4, min, max of the finite ones; NaN, Inf, zeros. */
static void float_sums(const float *x, int64_t n, double pivot, double *out) {
  moments m[PARTS];
  memset(m, 0, sizeof m);
  for (int part = 0; part < PARTS; part++) m[part].low += INFINITY, m[part].high -= INFINITY;
  longs all = {0};
  all = ~all;
  int64_t i = 0;
  for (; i + DOUBLE_LANES <= n; i += DOUBLE_LANES) {
    for (int part = 0; part < PARTS; part++) {
      narrow v;
      memcpy(&v, x + i + part * DOUBLES, sizeof v);
      add_moments(m + part, v, all, pivot);
    }
  }
  for (int64_t lane = 0; lane < n - i; lane++) {
    narrow v = {0};
    longs in = {0};
    v[lane % DOUBLES] = x[i + lane];
    in[lane % DOUBLES] = -1;
    add_moments(m + lane / DOUBLES, v, in, pivot);
  }
  double sums[10] = {0, 0, 0, 0, 0, INFINITY, -INFINITY, 0, 0, 0};
  for (int k = 0; k < DOUBLE_LANES; k++) {
    const moments *of = m + k / DOUBLES;
    int lane = k % DOUBLES;
    sums[0] += (double)of->finite[lane], sums[1] += of->s1[lane], sums[2] += of->s2[lane], sums[3] += of->s3[lane];
    sums[4] += of->s4[lane], sums[7] += (double)of->nan[lane], sums[9] += (double)of->zeros[lane];
    sums[5] = of->low[lane] < sums[5] ? of->low[lane] : sums[5];
    sums[6] = of->high[lane] > sums[6] ? of->high[lane] : sums[6];
  }
  sums[8] = (double)n - sums[0] - sums[7];
  memcpy(out, sums, sizeof sums);
}

/* An element format, and the E8M0 byte of a block by its amax, a float a:
   0 if a is 0, 255 if it is not finite, else the byte of 1 + floor(log2 a) + (the mantissa of a >= step). */
typedef struct {
  int32_t mantissa_bits, emin;
  float max;
  int32_t zero, one;
  uint32_t step;
} element_format;

/* Sums of the lanes of one vector; counts are of comparisons, whose true is -1. */
typedef struct {
  floats signal, noise, energy;
  ints nonzero, kept, saturated;
} tally;

/* Add signal, noise, energy, non-zero, kept (not rounded to zero) and saturated elements to the sums. */
static __attribute__((noinline)) void join(const tally *t, double *sums) {
  for (int k = 0; k < LANES; k++) {
    const tally *of = t + k / WIDTH;
    int lane = k % WIDTH;
    sums[0] += of->signal[lane], sums[1] += of->noise[lane], sums[2] += of->energy[lane];
    sums[3] -= of->nonzero[lane], sums[4] -= of->kept[lane], sums[5] -= of->saturated[lane];
  }
}

/* Intrinsics where GCC would use several instructions instead of one. */
#if WIDTH == 16
INLINE words larger(words a, words b) { return (words)_mm512_max_epu32((__m512i)a, (__m512i)b); }
INLINE words lesser(words a, words b) { return (words)_mm512_min_epu32((__m512i)a, (__m512i)b); }
INLINE uint32_t largest_lane(words v) { return _mm512_reduce_max_epu32((__m512i)v); }
INLINE ints less_where_above(ints count, floats a, floats b) {
  __mmask16 above = _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
  return (ints)_mm512_mask_sub_epi32((__m512i)count, above, (__m512i)count, _mm512_set1_epi32(1));
}
#else
INLINE ints less_where_above(ints count, floats a, floats b) { return count + (a > b); }
#if WIDTH == 8
INLINE words larger(words a, words b) { return (words)_mm256_max_epu32((__m256i)a, (__m256i)b); }
INLINE words lesser(words a, words b) { return (words)_mm256_min_epu32((__m256i)a, (__m256i)b); }
#else
INLINE words larger(words a, words b) {
  words first = (words)(a > b);
  return (a & first) | (b & ~first);
}
INLINE words lesser(words a, words b) {
  words first = (words)(a < b);
  return (a & first) | (b & ~first);
}
#endif
INLINE uint32_t largest_lane(words v) {
  uint32_t most = 0;
  for (int lane = 0; lane < WIDTH; lane++) most = v[lane] > most ? v[lane] : most;
  return most;
}
#endif

/* Sums of blocks in units of their own scale, of the lanes of one vector. */
typedef struct {
  floats signal, noise, energy;
} at_scale;

/* Add one vector of elements; `inverse` has 1 / the scales of their blocks. */
INLINE void add_vector(at_scale *s, tally *t, const element_format *f, floats x, floats inverse) {
  floats a = (floats)((words)x & 0x7fffffffu) * inverse;
  words least = (words){0} + ((uint32_t)(127 + f->emin) << 23);
  words binade = larger((words)a & 0x7f800000u, least);
  /* a + 2^(e + 23 - m) has no bit below the format's last one, so the sum rounds to nearest even. */
  floats magic = (floats)(binade + ((uint32_t)(23 - f->mantissa_bits) << 23));
  floats max = (floats){0} + f->max;
  floats q = (floats)lesser((words)((a + magic) - magic), (words)max); /* neither is negative */
  floats error = a - q;
  s->signal += a * a;
  s->noise += error * error;
  s->energy += q * q;
  t->nonzero = less_where_above(t->nonzero, a, (floats){0});
  t->kept = less_where_above(t->kept, q, (floats){0});
  t->saturated = less_where_above(t->saturated, a, max);
}

/* `square` is (scale / the tensor's)^2. */
INLINE void add(tally *t, at_scale s, floats square) {
  t->signal += s.signal * square;
  t->noise += s.noise * square;
  t->energy += s.energy * square;
}

/* Blocks with a byte below the first, unless they are all zero, or above the second, have values near the ends of
   bfloat16's range, and are left to torch. */
#define LEAST_BYTE 24
#define MOST_BYTE 230
#define NAN_BYTE 255

INLINE float of_exponent(int32_t biased) {
  uint32_t bits = biased > 0 ? (uint32_t)biased << 23 : 0;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

INLINE floats load16(const uint16_t *x) {
  halves h;
  memcpy(&h, x, sizeof h);
  return (floats)(__builtin_convertvector(h, words) << 16);
}

INLINE floats load32(const float *x) {
  floats v;
  memcpy(&v, x, sizeof v);
  return v;
}

/* The elements from x[at] on, at most a vector of them, followed by zeros. */
INLINE floats load(const void *x, int wide, int64_t at, int64_t lanes) {
  if (lanes >= WIDTH) return wide ? load32((const float *)x + at) : load16((const uint16_t *)x + at);
  float full[WIDTH] = {0};
  uint16_t half[WIDTH] = {0};
  if (lanes <= 0) return load32(full);
  if (wide) {
    memcpy(full, (const float *)x + at, (size_t)lanes * 4);
    return load32(full);
  }
  memcpy(half, (const uint16_t *)x + at, (size_t)lanes * 2);
  return load16(half);
}

INLINE int32_t byte_of(uint32_t amax, const element_format *f) {
  if (amax == 0) return f->zero;
  if (amax >= 0x7f800000u) return NAN_BYTE;
  return f->one + (int32_t)(amax >> 23) - 127 + ((amax & 0x7fffffu) >= f->step);
}

/* Express the sums in units of a larger scale, so that float does not lose the largest terms. */
static void raise_scale(int32_t byte, int32_t *top, tally *t, double *joined) {
  join(t, joined);
  memset(t, 0, PARTS * sizeof *t);
  for (int k = 0; k < 3; k++) joined[k] = ldexp(joined[k], 2 * (*top - byte));
  *top = byte;
}

static int result(const tally *t, double *joined, int32_t top, double judged, double *sums) {
  join(t, joined);
  for (int k = 0; k < 3; k++) sums[k] += ldexp(joined[k], 2 * (top - 127));
  sums[3] += judged;
  sums[4] += joined[3];
  sums[5] += joined[3] - joined[4];
  sums[6] += joined[5];
  return 0;
}

/* MX errors along the last axis: x is [rows, extent] in memory, bfloat16 (wide = 0) or float (wide = 1). Blocks with NaN
   or Inf are left out.
   Adds to blocks the number of blocks of each byte, and to sums signal, noise, energy, and the judged, non-zero,
   underflowed and saturated elements.
   Returns 0, or 1 if a block's scale is outside the exact range; the results are then invalid. */
INLINE int errors_of_rows(const void *x, int wide, int64_t rows, int64_t extent, const element_format *f, int64_t *blocks, double *sums) {
  tally t[PARTS];
  memset(t, 0, sizeof t);
  double judged = 0, joined[6] = {0};
  int pending = 0;
  int32_t top = 0;
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t b = 0; b < extent; b += BLOCK) {
      int64_t n = extent - b < BLOCK ? extent - b : BLOCK, at = row * extent + b;
      floats v[BLOCK / WIDTH];
      for (int k = 0; k < BLOCK / WIDTH; k++) v[k] = load(x, wide, at + k * WIDTH, n - k * WIDTH);
      words most = {0};
      for (int k = 0; k < BLOCK / WIDTH; k++) most = larger(most, (words)v[k] & 0x7fffffffu);
      uint32_t amax = largest_lane(most);
      int32_t byte = byte_of(amax, f);
      if (amax != 0 && (byte < LEAST_BYTE || (byte > MOST_BYTE && byte != NAN_BYTE))) return 1;
      blocks[byte]++;
      if (byte == NAN_BYTE) continue;
      judged += (double)n;
      if (amax == 0) continue;
      if (byte > top) raise_scale(byte, &top, t, joined), pending = 0;
      floats inverse = (floats){0} + of_exponent(254 - byte), square = (floats){0} + of_exponent(127 + 2 * (byte - top));
      for (int part = 0; part < PARTS; part++) {
        at_scale s = {{0}, {0}, {0}};
        for (int k = part; k < BLOCK / WIDTH; k += PARTS) add_vector(&s, t + part, f, v[k], inverse);
        add(t + part, s, square);
      }
      if ((pending += BLOCK / LANES) >= PENDING) join(t, joined), memset(t, 0, sizeof t), pending = 0;
    }
  }
  return result(t, joined, top, judged, sums);
}

/* Blocks along an axis. */
INLINE int64_t num_blocks(int64_t extent) { return (extent + BLOCK - 1) / BLOCK; }

/* The same along an axis before the last: x is [outer, extent, inner], for the rows of blocks from first to last. */
INLINE int errors_of_columns(const void *x, int wide, int64_t first, int64_t last, int64_t extent, int64_t inner, const element_format *f,
                      int64_t *blocks, double *sums) {
  tally t[PARTS];
  memset(t, 0, sizeof t);
  double judged = 0, joined[6] = {0};
  int pending = 0;
  int32_t top = 0;
  for (int64_t unit = first; unit < last; unit++) {
    int64_t o = unit / num_blocks(extent), b = unit % num_blocks(extent) * BLOCK;
    int64_t depth = extent - b < BLOCK ? extent - b : BLOCK;
    for (int64_t w = 0; w < inner; w += LANES) {
      int64_t lanes = inner - w < LANES ? inner - w : LANES, at = (o * extent + b) * inner + w;
      uint32_t most[LANES], kept[LANES] = {0};
      for (int part = 0; part < PARTS; part++) {
        words largest = {0};
        for (int64_t row = 0; row < depth; row++)
          largest = larger(largest, (words)load(x, wide, at + row * inner + part * WIDTH, lanes - part * WIDTH) & 0x7fffffffu);
        memcpy(most + part * WIDTH, &largest, sizeof largest);
      }
      float inverse[LANES] = {0}, square[LANES] = {0};
      for (int64_t lane = 0; lane < lanes; lane++) {
        int32_t byte = byte_of(most[lane], f);
        if (byte != NAN_BYTE && byte > top) raise_scale(byte, &top, t, joined), pending = 0;
      }
      for (int64_t lane = 0; lane < lanes; lane++) {
        int32_t byte = byte_of(most[lane], f);
        if (most[lane] != 0 && (byte < LEAST_BYTE || (byte > MOST_BYTE && byte != NAN_BYTE))) return 1;
        blocks[byte]++;
        if (byte == NAN_BYTE) continue;
        judged += (double)depth;
        if (most[lane] == 0) continue;
        kept[lane] = ~0u;
        inverse[lane] = of_exponent(254 - byte);
        square[lane] = of_exponent(127 + 2 * (byte - top));
      }
      for (int part = 0; part < PARTS; part++) {
        int64_t from = part * WIDTH;
        words chosen = (words)load32((const float *)kept + from);
        floats per_scale = load32(inverse + from);
        at_scale s = {{0}, {0}, {0}};
        for (int64_t row = 0; row < depth; row++)
          add_vector(&s, t + part, f, (floats)((words)load(x, wide, at + row * inner + from, lanes - from) & chosen), per_scale);
        add(t + part, s, load32(square + from));
      }
      if ((pending += BLOCK) >= PENDING) join(t, joined), memset(t, 0, sizeof t), pending = 0;
    }
  }
  return result(t, joined, top, judged, sums);
}

static int errors_along_columns(const void *x, int wide, int64_t first, int64_t last, int64_t extent, int64_t inner, const element_format *f,
                      int64_t *blocks, double *sums) {
  return wide ? errors_of_columns(x, 1, first, last, extent, inner, f, blocks, sums)
              : errors_of_columns(x, 0, first, last, extent, inner, f, blocks, sums);
}

static int errors_along_rows(const void *x, int wide, int64_t rows, int64_t extent, const element_format *f, int64_t *blocks, double *sums) {
  return wide ? errors_of_rows(x, 1, rows, extent, f, blocks, sums) : errors_of_rows(x, 0, rows, extent, f, blocks, sums);
}

/* A tensor of n elements, bfloat16 or float16 (wide = 0) or float (wide = 1). */
typedef struct {
  const void *x;
  int64_t n, wide;
  /* The value of each float16 pattern; NULL for bfloat16 and float. */
  const double *values;
  /* The format of its blocks, along the middle axis of [outer, extent, inner]; NULL without errors. */
  const element_format *format;
  int64_t outer, extent, inner;
  /* The results: the numbers of `describe_counts`, those of `errors_of_rows`, whether a scale was out of range, and the
     number of values that occur. */
  double *numbers;
  int64_t *blocks;
  double *sums;
  int64_t out_of_range, num_values;
} job;

/* The number of units, which are not split: elements without a format, rows with blocks along the last axis, else rows
   of blocks. */
static int64_t num_units(const job *j) {
  if (!j->format) return j->n;
  return j->inner == 1 ? j->outer : j->outer * num_blocks(j->extent);
}

/* The first element of a unit, or the end of the last one. */
static int64_t first_element(const job *j, int64_t unit) {
  if (!j->format) return unit;
  if (j->inner == 1) return unit * j->extent;
  return (unit / num_blocks(j->extent) * j->extent + unit % num_blocks(j->extent) * BLOCK) * j->inner;
}

static const char *element(const job *j, int64_t at) { return (const char *)j->x + at * (j->wide ? 4 : 2); }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Count the elements of units and judge their blocks, part by part, so that the second pass reads from the cache. */
static void count_and_judge(job *j, int64_t first, int64_t last, uint32_t *tables, int64_t *blocks, double *sums) {
  int64_t of_unit = first_element(j, 1), part = PART / of_unit > 0 ? PART / of_unit : 1;
  for (int64_t unit = first; unit < last; unit += part) {
    int64_t end = least(unit + part, last), at = first_element(j, unit);
    /* The upper half of a float: every machine that torch runs on is little-endian. */
    count_patterns((const uint16_t *)element(j, at) + j->wide, first_element(j, end) - at, j->wide ? 2 : 1, tables);
    if (!j->format || __atomic_load_n(&j->out_of_range, __ATOMIC_RELAXED)) continue;
    int is_out_of_range = j->inner == 1
                     ? errors_along_rows(element(j, at), (int)j->wide, end - unit, j->extent, j->format, blocks, sums)
                     : errors_along_columns(j->x, (int)j->wide, unit, end, j->extent, j->inner, j->format, blocks, sums);
    if (is_out_of_range) __atomic_store_n(&j->out_of_range, 1, __ATOMIC_RELAXED);
  }
}

/* Replace the counts and sums of the upper halves of floats by those of the floats. */
static void replace_by_floats(const job *j, const double *sums, int64_t num_shares, int64_t num_bins) {
  double *out = j->numbers;
  out[0] = sums[7], out[1] = sums[8], out[2] = sums[9], out[3] = sums[0];
  for (int k = 0; k < 4; k++) out[5 + k] = sums[1 + k];
  out[9] = sums[5], out[10] = sums[6];
  double *bins = out + 11 + num_shares, above_zero = 0;
  for (int64_t k = 1; k < num_bins; k++) above_zero += bins[k];
  bins[0] = out[3] - out[2] - above_zero;
}

/* torch's threads; if torch has another kind of threads, the caller does all the work. */
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

/* The arguments of `summarise`, and what the threads share. */
typedef struct call {
  job *jobs;
  const double *shares;
  int64_t num_jobs, num_shares, lowest, highest;
  uint32_t *tables;
  double *scratch;
  /* The shared tensor, and the sums of its segments. */
  job *shared;
  double errors[SEGMENTS][NUM_ERRORS], floats[SEGMENTS][NUM_FLOAT_SUMS];
  void (*work)(struct call *, int64_t unit, int64_t thread);
  int64_t units, next, threads;
} call;

static void take_units(void *p) {
  call *c = p;
  int64_t thread = __atomic_fetch_add(&c->threads, 1, __ATOMIC_RELAXED), unit;
  while ((unit = __atomic_fetch_add(&c->next, 1, __ATOMIC_RELAXED)) < c->units) c->work(c, unit, thread);
}

static void share(call *c, void (*work)(call *, int64_t, int64_t), int64_t units, int64_t threads) {
  c->work = work, c->units = units, c->next = c->threads = 0;
  threads = least(threads, units);
  if (threads > 1 && GOMP_parallel)
    GOMP_parallel(take_units, c, (unsigned)threads, 0);
  else
    take_units(c);
}

static uint32_t *tables_of(const call *c, int64_t thread) { return c->tables + thread * 2 * PATTERNS; }

static void describe(const call *c, job *j, int64_t thread) {
  double *scratch = c->scratch + thread * 2 * PATTERNS;
  j->num_values = describe_counts(tables_of(c, thread), j->values, c->shares, c->num_shares, c->lowest, c->highest, scratch,
                             j->numbers);
}

static int is_shared(const job *j) { return j->n >= SHARED; }

static void take_tensor(call *c, int64_t unit, int64_t thread) {
  job *j = c->jobs + unit;
  if (is_shared(j)) return;
  count_and_judge(j, 0, num_units(j), tables_of(c, thread), j->blocks, j->sums);
  describe(c, j, thread);
  if (!j->wide) return;
  double sums[NUM_FLOAT_SUMS];
  float_sums(j->x, j->n, j->numbers[4], sums);
  replace_by_floats(j, sums, c->num_shares, c->highest - c->lowest + 3);
}

static void take_segment(call *c, int64_t segment, int64_t thread) {
  job *j = c->shared;
  int64_t units = num_units(j), blocks[BYTES] = {0};
  double *sums = memset(c->errors[segment], 0, sizeof c->errors[segment]);
  count_and_judge(j, units * segment / SEGMENTS, units * (segment + 1) / SEGMENTS, tables_of(c, thread), blocks, sums);
  for (int k = 0; j->format && k < BYTES; k++) __atomic_fetch_add(j->blocks + k, blocks[k], __ATOMIC_RELAXED);
}

static void sum_floats_of_segment(call *c, int64_t segment, int64_t thread) {
  (void)thread;
  const job *j = c->shared;
  int64_t first = j->n * segment / SEGMENTS, last = j->n * (segment + 1) / SEGMENTS;
  float_sums((const float *)j->x + first, last - first, j->numbers[4], c->floats[segment]);
}

/* Summarise a large tensor with all threads. */
static void take_shared(call *c, job *j, int64_t threads) {
  threads = least(threads, j->n / THREAD_SHARE);
  c->shared = j;
  share(c, take_segment, SEGMENTS, threads);
  for (int64_t thread = 1; thread < c->threads; thread++) {
    for (int64_t k = 0; k < 2 * PATTERNS; k++) c->tables[k] += tables_of(c, thread)[k];
    memset(tables_of(c, thread), 0, 2 * PATTERNS * sizeof *c->tables);
  }
  for (int segment = 0; segment < SEGMENTS; segment++)
    for (int k = 0; k < NUM_ERRORS; k++) j->sums[k] += c->errors[segment][k];
  describe(c, j, 0);
  if (!j->wide) return;
  share(c, sum_floats_of_segment, SEGMENTS, threads);
  double sums[NUM_FLOAT_SUMS] = {0, 0, 0, 0, 0, INFINITY, -INFINITY, 0, 0, 0};
  for (int segment = 0; segment < SEGMENTS; segment++)
    for (int k = 0; k < NUM_FLOAT_SUMS; k++) {
      double more = c->floats[segment][k];
      sums[k] = k == 5 ? fmin(sums[k], more) : k == 6 ? fmax(sums[k], more) : sums[k] + more;
    }
  replace_by_floats(j, sums, c->num_shares, c->highest - c->lowest + 3);
}

/* Summarise all tensors. For each thread, `tables` has 2 * 65536 counts, zero before and after, and `scratch` the room
   of `describe_counts`: with one tensor, the first thread's then has the values of it. */
void summarise(job *jobs, int64_t num_jobs, const double *shares, int64_t num_shares, int64_t lowest, int64_t highest,
               int64_t threads, uint32_t *tables, double *scratch) {
  call c = {.jobs = jobs, .num_jobs = num_jobs, .shares = shares, .num_shares = num_shares};
  c.lowest = lowest, c.highest = highest, c.tables = tables, c.scratch = scratch;
  share(&c, take_tensor, num_jobs, threads);
  for (job *j = jobs; j < jobs + num_jobs; j++)
    if (is_shared(j)) take_shared(&c, j, threads);
}
