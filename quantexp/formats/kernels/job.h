/* The work of a call: a tensor, and the grid that its elements are rounded to. */

#include "lanes.h"

/* The usual size of an MX block, for which the compiler unrolls. */
#define BLOCK 32
/* Floats of a tile, 32 kB, and its largest number of columns. */
#define TILE 8192
#define COLUMNS 256
/* Blocks along memory whose scales are computed before their elements. */
#define GROUP 16
/* Approximate number of elements that a thread takes at a time. */
#define SHARE 65536
/* Prefetch distance in elements. */
#define AHEAD 512
/* Prefetch distance in rows of a tile. More would not stay in the first cache: rows whose distance is a power of two
   share its sets. */
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
