/* The work of a call: a tensor, and the grid that its elements are rounded to. */

#include "philox.h"

/* The usual size of an MX block, for which the compiler unrolls. */
#define BLOCK 32
/* Elements of a panel: the most, and how many there are if blocks allow it and no numbers are drawn for its rows. Columns of a panel: the most of one row, how
   many of one row, and of several, if blocks allow it. `quantexp.formats.table` refuses blocks that do not fit. */
#define PANEL 16384
#define USUAL 8192
#define WIDEST 8192
#define LONG 2048
#define COLUMNS 256
#define LEAST 32
/* Blocks along memory whose scales are computed before their elements. */
#define GROUP 16
/* Approximate number of elements that a thread takes at a time. */
#define SHARE 65536
/* Prefetch distance in elements. */
#define AHEAD 512
/* Prefetch distance in rows of a panel. More would not stay in the first cache: rows whose distance is a power of two
   share its sets. */
#define ROWS_AHEAD 8
/* Bytes of a result from which stores bypass the caches, which then need not read it first. */
#define STREAMED (32 << 20)

/* The scales of blocks: powers of two, small floats, bfloat16, float32; one scale for all elements. */
enum kind { POWER, SMALL, WIDE, SINGLE, CONSTANT };
/* How a scale is rounded to its grid. */
enum rule { NEAREST, FLOOR, CEIL };
enum family { BLOCKS, FP8, HIF8 };

/* A number format, and how to round to it. */
typedef struct {
  /* Of the element: mantissa bits, exponent of the smallest normal (HiF8: of the smallest) and of the largest value, the
     largest value, the magnitude of the lowest. */
  int32_t mantissa_bits, emin, emax;
  float max, lowest;
  /* 1: ties go away from zero; 0: to even. */
  uint32_t away;
  int32_t has_negative_zero, family;
  /* Not in blocks: the result for values beyond the largest, as bits; 0: the largest. */
  uint32_t beyond;
  /* The scale of the tensor: a factor of the elements of FP8 and HiF8, of the scales of blocks; and whether it is a power
     of two. */
  float scale;
  int32_t is_power;
  /* What elements are multiplied by before they are rounded. */
  float pre_scale;
  /* Whether elements are divided by the scale of their block, rather than multiplied by its inverse. */
  int32_t is_divided;
  /* The scales of blocks: their kind and rule; the offset that the rule adds to the bits of an amax; their own element and
     its smallest and largest value; whether amax is divided by the scale of the tensor before the largest value. */
  int32_t kind, rule;
  uint32_t offset;
  int32_t scale_mantissa_bits, scale_emin;
  float scale_min, scale_max;
  int32_t tensor_first;
  /* Stochastic rounding. Whether bfloat16 may be rounded in 16-bit integers. */
  int32_t is_random, in_integers;
} grid;

/* Work on [outer, extent, inner], in blocks of `tall` elements down the extent and `wide` along the last `width` of
   `inner`; `rows`, a second result, has blocks of `tall` along them. */
typedef struct {
  const void *x;
  void *y, *rows;
  int64_t dtype, outer, extent, inner, width, tall, wide;
  const grid *g;
  /* The Hadamard transform before rounding: its block, 0 without one; whether blocks run down the extent; whether x is the
     left operand; random signs of a block, repeated to at least 16, or none. */
  int64_t hadamard, is_down, is_left;
  const float *signs;
  /* Stochastic rounding: seed and offset; the position of the first element of each of the last `length` elements, none
     if they follow each other. */
  uint64_t seed, offset;
  const int64_t *starts;
  int64_t length;
  /* Whether stores of results bypass the caches. */
  int64_t past;
  /* For `largest_finite`: the largest magnitude so far, as bits. */
  uint32_t amax;
  /* Number of units, units taken at a time, and the first unit not yet taken. */
  int64_t units, step, next;
  void (*work)(void *job, int64_t unit);
} job;

/* Rows and columns of a panel: whole blocks of both kinds. */
INLINE int64_t common(int64_t a, int64_t b) {
  int64_t n = a, m = b;
  while (m) {
    int64_t rest = n % m;
    n = m, m = rest;
  }
  return a / n * b;
}
INLINE int64_t depth_of(const job *j) { return j->hadamard && j->is_down ? common(j->tall, j->hadamard) : j->tall; }
INLINE int64_t columns_of(const job *j) {
  int64_t grain = j->rows ? j->tall : j->hadamard && !j->is_down ? common(j->wide, j->hadamard) : j->wide;
  int64_t depth = depth_of(j), most = j->g && j->g->is_random ? PANEL : USUAL;
  int64_t fitting = most / depth / LEAST * LEAST, usual = depth == 1 ? LONG : least(COLUMNS, fitting ? fitting : LEAST);
  return usual < grain ? grain : usual / grain * grain;
}

/* A unit of work: its first element and its extents. */
typedef struct {
  int64_t start, depth, wide;
} patch;

INLINE patch patch_of(const job *j, int64_t unit) {
  int64_t columns = columns_of(j), depth = depth_of(j);
  int64_t per_width = parts_of(j->width, columns), per_strip = j->inner / j->width * per_width;
  int64_t strip = unit / per_strip, strips = parts_of(j->extent, depth), first = strip % strips * depth;
  int64_t column = unit % per_width * columns;
  return (patch){(strip / strips * j->extent + first) * j->inner + unit % per_strip / per_width * j->width + column,
                 least(j->extent - first, depth), least(j->width - column, columns)};
}

/* Offset of the prefetched elements from those of row r: of a later row, or of the next patch. */
INLINE int64_t ahead_of(const job *j, const patch *p, int64_t r) {
  return r + ROWS_AHEAD < p->depth ? ROWS_AHEAD * j->inner : p->wide + (ROWS_AHEAD - p->depth) * j->inner;
}

/* The exponent field of each magnitude, at least that of the element's smallest normal. */
INLINE words binade_of(words bits, int32_t emin) { return larger(bits & EXPONENT, all((uint32_t)(BIAS + emin) << MANTISSA_BITS)); }

/* v >= 0 rounded to `mantissa_bits` from 2^emin on, and to multiples below. */
INLINE floats on_steps(floats v, int32_t mantissa_bits, int32_t emin) {
  floats magic = (floats)(binade_of((words)v, emin) + ((uint32_t)(MANTISSA_BITS - mantissa_bits) << MANTISSA_BITS));
  return (v + magic) - magic;
}

/* v >= 0 on the element's grid, continued beyond its largest value. */
INLINE floats rounded(floats v, const grid *g) { return on_steps((floats)((words)v | g->away), g->mantissa_bits, g->emin); }
