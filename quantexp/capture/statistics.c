/* Statistics of captured tensors on a CPU: counts of 16-bit patterns, what follows from them, and MX block errors.

   Vectors are those of GCC and Clang (vector_size): the compiler makes of them what the machine has. Nothing allocates,
   nothing is shared between calls, and no call looks beyond the memory it is given. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PATTERNS 65536
#define BLOCK 32
#define LANES 16
/* Vectors whose float sums are added up before they join the double ones. */
#define PENDING 64

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint16_t quarter __attribute__((vector_size(LANES)));
typedef double doubles __attribute__((vector_size(64)));
typedef int64_t longs __attribute__((vector_size(64)));
typedef float narrow __attribute__((vector_size(32)));

/* How often each pattern occurs among x[0], x[stride], ...; scratch holds two zeroed tables and is left zeroed. */
void count_patterns(const uint16_t *x, int64_t n, int64_t stride, uint32_t *scratch, int64_t *counts) {
  uint32_t *even = scratch, *odd = scratch + PATTERNS;
  while (n > 0) {
    /* No count of a table can pass 2^32. */
    int64_t part = n < (1LL << 31) ? n : 1LL << 31, i = 0;
    if (stride == 1) {
      for (; i + 4 <= part; i += 4) {
        uint64_t four;
        memcpy(&four, x + i, 8);
        even[four & 0xffff]++;
        odd[four >> 16 & 0xffff]++;
        even[four >> 32 & 0xffff]++;
        odd[four >> 48]++;
      }
    }
    for (; i < part; i++) even[x[i * stride]]++;
    for (int v = 0; v < PATTERNS; v++) counts[v] += (int64_t)even[v] + odd[v];
    memset(scratch, 0, 2 * PATTERNS * sizeof *scratch);
    x += part * stride;
    n -= part;
  }
}

/* The patterns that occur, by ascending value, -0 before 0; NaN and Inf are counted apart. Returns how many there are.
   `values` has the value of each pattern; totals gets NaN, Inf, zeros, finite. */
static int64_t ordered(const int64_t *counts, const double *values, double *v, double *c, double *totals) {
  int64_t found = 0;
  double nan = 0, inf = 0, zeros = 0, finite = 0;
  for (int k = 0; k < PATTERNS; k++) {
    int pattern = k < PATTERNS / 2 ? PATTERNS - 1 - k : k - PATTERNS / 2;
    if (counts[pattern] == 0) continue;
    double value = values[pattern], count = (double)counts[pattern];
    if (value != value) {
      nan += count;
    } else if (isinf(value)) {
      inf += count;
    } else {
      zeros += value == 0 ? count : 0;
      finite += count;
      v[found] = value;
      c[found++] = count;
    }
  }
  totals[0] = nan, totals[1] = inf, totals[2] = zeros, totals[3] = finite;
  return found;
}

/* What follows from the counts of a dtype's patterns. `scratch` holds 2 * 65536 doubles.
   Returns how many values occur: their values and counts are then in the halves of `scratch`.
   out: NaN, Inf, zeros | n, pivot, S1 .. S4, min, max about the pivot | quantiles | magnitudes by exponent. */
int64_t describe_counts(const int64_t *counts, const double *values, const double *shares, int64_t num_shares,
                        int64_t lowest, int64_t highest, double *scratch, double *out) {
  double *v = scratch, *c = scratch + PATTERNS, totals[4], sum = 0;
  int64_t found = ordered(counts, values, v, c, totals);
  double n = totals[3], s[4] = {0, 0, 0, 0};
  for (int64_t k = 0; k < found; k++) sum += v[k] * c[k];
  double pivot = sum / (n > 0 ? n : 1);
  for (int64_t k = 0; k < found; k++) {
    double d = v[k] - pivot, first = c[k] * d, second = first * d, third = second * d;
    s[0] += first, s[1] += second, s[2] += third, s[3] += third * d;
  }
  memcpy(out, totals, 3 * sizeof *out);
  double sums[8] = {n, pivot, s[0], s[1], s[2], s[3], found ? v[0] : INFINITY, found ? v[found - 1] : -INFINITY};
  memcpy(out + 3, sums, sizeof sums);
  double *quantile = out + 11, below = 0;
  for (int64_t q = 0, k = 0; q < num_shares; q++) {
    double position = shares[q] * (n > 1 ? n - 1 : 0), rank = floor(position);
    if (found == 0) {
      quantile[q] = NAN;
      continue;
    }
    /* below elements lie before pattern k */
    while (k + 1 < found && below + c[k] <= rank) below += c[k++];
    double low = v[k], high = k + 1 < found && below + c[k] <= rank + 1 ? v[k + 1] : low;
    quantile[q] = low + (high - low) * (position - rank);
  }
  double *bins = quantile + num_shares;
  int64_t last = highest - lowest + 2;
  memset(bins, 0, (size_t)(last + 1) * sizeof *bins);
  for (int64_t k = 0; k < found; k++) {
    if (v[k] == 0) continue;
    uint64_t bits;
    memcpy(&bits, v + k, 8);
    int64_t bin = (int64_t)(bits >> 52 & 0x7ff) - 1023 - lowest + 1;
    bins[bin < 0 ? 0 : bin > last ? last : bin] += c[k];
  }
  return found;
}

/* Of floats about a pivot: n, S1 .. S4, min, max of the finite; NaN, Inf, zeros. */
void float_sums(const float *x, int64_t n, double pivot, double *out) {
  doubles s1 = {0}, s2 = {0}, s3 = {0}, s4 = {0}, low = {0}, high = {0};
  low += INFINITY;
  high -= INFINITY;
  longs finite = {0}, nan = {0}, zeros = {0};
  for (int64_t i = 0; i < n; i += 8) {
    narrow part;
    int64_t here = n - i < 8 ? n - i : 8;
    longs in = {0, 1, 2, 3, 4, 5, 6, 7};
    if (here == 8) {
      memcpy(&part, x + i, sizeof part);
    } else {
      memset(&part, 0, sizeof part);
      memcpy(&part, x + i, (size_t)here * sizeof *x);
    }
    in = in < here;
    doubles v = __builtin_convertvector(part, doubles);
    longs is_nan = (v != v) & in, is_finite = (v - v == 0) & in;
    doubles d = (doubles)((longs)(v - pivot) & is_finite), square = d * d;
    nan -= is_nan, finite -= is_finite, zeros -= (v == 0) & in;
    s1 += d, s2 += square, s3 += square * d, s4 += square * square;
    longs lower = (v < low) & is_finite, higher = (v > high) & is_finite;
    low = (doubles)(((longs)v & lower) | ((longs)low & ~lower));
    high = (doubles)(((longs)v & higher) | ((longs)high & ~higher));
  }
  double sums[10] = {0, 0, 0, 0, 0, INFINITY, -INFINITY, 0, 0, 0};
  for (int lane = 0; lane < 8; lane++) {
    sums[0] += (double)finite[lane], sums[1] += s1[lane], sums[2] += s2[lane], sums[3] += s3[lane];
    sums[4] += s4[lane], sums[7] += (double)nan[lane], sums[9] += (double)zeros[lane];
    sums[5] = low[lane] < sums[5] ? low[lane] : sums[5];
    sums[6] = high[lane] > sums[6] ? high[lane] : sums[6];
  }
  sums[8] = (double)n - sums[0] - sums[7];
  memcpy(out, sums, sizeof sums);
}

/* An element format and the tensor's own scale: what blocks are held in. */
typedef struct {
  int32_t mantissa_bits, emin;
  float max;
  /* The E8M0 byte that sums are relative to: that of the tensor's amax. */
  int32_t top;
} held_in;

/* Sums of a lane; counts are of comparisons, whose true is -1. */
typedef struct {
  floats signal, noise, energy;
  ints nonzero, underflowed, saturated;
} tally;

/* Signal, noise, energy, non-zero, underflowed and saturated join the sums. */
static __attribute__((noinline)) void join(tally t, double *sums) {
  for (int lane = 0; lane < LANES; lane++) {
    sums[0] += t.signal[lane], sums[1] += t.noise[lane], sums[2] += t.energy[lane];
    sums[3] -= t.nonzero[lane], sums[4] -= t.underflowed[lane], sums[5] -= t.saturated[lane];
  }
}

/* One vector of elements with the scales of their blocks: 1 / scale, and scale / the tensor's. */
static inline __attribute__((always_inline)) void take(tally *t, const held_in *f, floats x, floats inverse, floats relative) {
  floats a = (floats)((words)x & 0x7fffffffu) * inverse;
  words binade = (words)a & 0x7f800000u;
  words least = (words){0} + ((uint32_t)(127 + f->emin) << 23);
  words smaller = (words)(binade < least);
  binade = (binade & ~smaller) | (least & smaller);
  /* a + 2^(e + 23 - m) has no bit below the last that the format keeps: the sum rounds to nearest even. */
  floats magic = (floats)(binade + ((uint32_t)(23 - f->mantissa_bits) << 23));
  floats q = (a + magic) - magic;
  floats max = (floats){0} + f->max;
  words beyond = (words)(q > max);
  q = (floats)(((words)q & ~beyond) | ((words)max & beyond));
  floats error = (a - q) * relative, signal = a * relative, energy = q * relative;
  t->signal += signal * signal;
  t->noise += error * error;
  t->energy += energy * energy;
  ints nonzero = a > 0;
  t->nonzero += nonzero;
  t->underflowed += nonzero & (ints)(q == 0);
  t->saturated += (ints)(a > max);
}

/* Blocks whose byte is below the first, unless they are all zero, or above the second hold values where bfloat16 itself has
   gaps or ends, and are left to torch. */
#define LEAST_BYTE 24
#define MOST_BYTE 230
#define NAN_BYTE 255

static inline float of_exponent(int32_t biased) {
  uint32_t bits = biased > 0 ? (uint32_t)biased << 23 : 0;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline floats load16(const uint16_t *x) {
  halves h;
  memcpy(&h, x, sizeof h);
  return (floats)(__builtin_convertvector(h, words) << 16);
}

static inline floats load32(const float *x) {
  floats v;
  memcpy(&v, x, sizeof v);
  return v;
}

/* Some elements from x[at] on, zeros after them. */
static inline floats load(const void *x, int wide, int64_t at, int64_t lanes) {
  if (lanes == LANES) return wide ? load32((const float *)x + at) : load16((const uint16_t *)x + at);
  float full[LANES] = {0};
  uint16_t half[LANES] = {0};
  if (wide) {
    memcpy(full, (const float *)x + at, (size_t)lanes * 4);
    return load32(full);
  }
  memcpy(half, (const uint16_t *)x + at, (size_t)lanes * 2);
  return load16(half);
}

/* Amax of 32 patterns. */
static inline uint32_t amax32(const uint16_t *x) {
  halves a, b;
  memcpy(&a, x, sizeof a);
  memcpy(&b, x + LANES, sizeof b);
  a &= 0x7fff, b &= 0x7fff;
  halves larger = (halves)(a > b);
  a = (a & larger) | (b & ~larger);
  quarter c[2];
  memcpy(c, &a, sizeof c);
  quarter upper = (quarter)(c[0] > c[1]), d = (c[0] & upper) | (c[1] & ~upper);
  uint16_t v[8];
  memcpy(v, &d, sizeof v);
  uint32_t most = 0;
  for (int k = 0; k < 8; k++) most = v[k] > most ? v[k] : most;
  return most;
}

static uint32_t amax_short(const uint16_t *x, int64_t n) {
  uint32_t most = 0;
  for (int64_t k = 0; k < n; k++) most = (x[k] & 0x7fffu) > most ? x[k] & 0x7fffu : most;
  return most;
}

static int result(tally t, double *joined, const held_in *f, double judged, double *sums) {
  join(t, joined);
  double unit = ldexp(1, 2 * (f->top - 127));
  double all[7] = {joined[0] * unit, joined[1] * unit, joined[2] * unit, judged, joined[3], joined[4], joined[5]};
  memcpy(sums, all, sizeof all);
  return 0;
}

/* MX along the last axis: x is [rows, extent] in memory, bfloat16 (wide = 0) or float (wide = 1). A block's E8M0 byte is
   byte_of[the bits of its amax] for bfloat16, and bytes[rows, ceil(extent / 32)] for float; byte 255 leaves a block out.
   sums: signal, noise, energy, judged, non-zero, underflowed, saturated.
   Returns 0, or 1 where a block's scale is outside what is exact here, and nothing is to be used. */
int mx_rows(const void *x, int wide, int64_t rows, int64_t extent, const uint8_t *byte_of, const uint8_t *bytes,
            const held_in *f, int64_t *blocks, double *sums) {
  const tally none = {{0}, {0}, {0}, {0}, {0}, {0}};
  tally t = none;
  double judged = 0, joined[6] = {0};
  int pending = 0;
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t b = 0; b < extent; b += BLOCK) {
      int64_t n = extent - b < BLOCK ? extent - b : BLOCK, at = row * extent + b;
      const uint16_t *half = (const uint16_t *)x + at;
      int32_t byte = wide ? *bytes++ : byte_of[n == BLOCK ? amax32(half) : amax_short(half, n)];
      blocks[byte]++;
      if (byte == NAN_BYTE) continue;
      judged += (double)n;
      if (byte < LEAST_BYTE) {
        for (int64_t k = 0; k < n; k++)
          if (wide ? ((const float *)x)[at + k] != 0 : (half[k] & 0x7fff) != 0) return 1;
        continue;
      }
      if (byte > MOST_BYTE) return 1;
      floats inverse = (floats){0} + of_exponent(254 - byte), relative = (floats){0} + of_exponent(127 + byte - f->top);
      for (int64_t k = 0; k < n; k += LANES)
        take(&t, f, load(x, wide, at + k, n - k < LANES ? n - k : LANES), inverse, relative);
      if ((pending += BLOCK / LANES) >= PENDING) join(t, joined), t = none, pending = 0;
    }
  }
  return result(t, joined, f, judged, sums);
}

/* The same along an axis before the last: x is [outer, extent, inner], bytes [outer, ceil(extent / 32), inner]. */
int mx_columns(const void *x, int wide, int64_t outer, int64_t extent, int64_t inner, const uint8_t *bytes,
               const held_in *f, int64_t *blocks, double *sums) {
  const tally none = {{0}, {0}, {0}, {0}, {0}, {0}};
  tally t = none;
  double judged = 0, joined[6] = {0};
  int pending = 0;
  for (int64_t o = 0; o < outer; o++) {
    for (int64_t b = 0; b < extent; b += BLOCK, bytes += inner) {
      int64_t depth = extent - b < BLOCK ? extent - b : BLOCK;
      for (int64_t w = 0; w < inner; w += LANES) {
        int64_t lanes = inner - w < LANES ? inner - w : LANES;
        float inverse[LANES] = {0}, relative[LANES] = {0};
        words kept = {0}, least = {0}, odd = {0};
        for (int64_t lane = 0; lane < lanes; lane++) {
          int32_t byte = bytes[w + lane];
          blocks[byte]++;
          if (byte == NAN_BYTE) continue;
          if (byte > MOST_BYTE) return 1;
          judged += (double)depth;
          kept[lane] = ~0u;
          least[lane] = byte < LEAST_BYTE ? ~0u : 0;
          inverse[lane] = of_exponent(254 - byte);
          relative[lane] = of_exponent(127 + byte - f->top);
        }
        floats per_scale = load32(inverse), scale = load32(relative);
        for (int64_t row = 0; row < depth; row++) {
          words v = (words)load(x, wide, (o * extent + b + row) * inner + w, lanes) & kept;
          odd |= v & least & 0x7fffffffu;
          take(&t, f, (floats)v, per_scale, scale);
        }
        for (int lane = 0; lane < LANES; lane++)
          if (odd[lane]) return 1;
        if ((pending += BLOCK) >= PENDING) join(t, joined), t = none, pending = 0;
      }
    }
  }
  return result(t, joined, f, judged, sums);
}

/* The bits of each block's amax, of bfloat16 or of float: [outer, ceil(extent / 32), inner]. */
void block_amax(const void *x, int wide, int64_t outer, int64_t extent, int64_t inner, uint32_t *amax) {
  for (int64_t o = 0; o < outer; o++) {
    for (int64_t b = 0; b < extent; b += BLOCK, amax += inner) {
      memset(amax, 0, (size_t)inner * sizeof *amax);
      for (int64_t row = b; row < extent && row < b + BLOCK; row++) {
        int64_t at = (o * extent + row) * inner;
        const uint32_t *full = (const uint32_t *)x + at;
        const uint16_t *half = (const uint16_t *)x + at;
        for (int64_t w = 0; w < inner; w++) {
          uint32_t bits = wide ? full[w] & 0x7fffffffu : half[w] & 0x7fffu;
          amax[w] = bits > amax[w] ? bits : amax[w];
        }
      }
    }
  }
}
