/* Vectors of floats on any processor, 16-bit tensors in them, and vectors of 16-bit integers. The types are those of GCC
   and Clang (vector_size); intrinsics are used where the compiler would emit several instructions for one. */

#include "fp_mode.h"

#include <stddef.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#endif
/* Elements of a pair of vectors. */
#define PAIR (2 * LANES)

#define SIGN 0x80000000u
#define MAGNITUDE 0x7fffffffu
#define EXPONENT 0x7f800000u
#define NOT_A_NUMBER 0x7fc00000u
#define MANTISSA_BITS 23
#define BIAS 127
#define ONE ((uint32_t)BIAS << MANTISSA_BITS)

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* 2 * LANES consecutive elements, the first half in a. */
typedef struct {
  floats a, b;
} pair;

enum dtype { BF16, FP16, FP32 };

INLINE int64_t bytes_of(enum dtype dtype) { return dtype == FP32 ? 4 : 2; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t parts_of(int64_t n, int64_t part) { return (n + part - 1) / part; }

INLINE words all(uint32_t v) { return (words){0} + v; }
INLINE floats every(float v) { return (floats){0} + v; }
INLINE words magnitude(floats v) { return (words)v & MAGNITUDE; }
INLINE words where(words mask, words a, words b) { return (a & mask) | (b & ~mask); }

/* at_most: the smaller of v and a bound; NaN if v is NaN.
   looked_up: a lookup in a table of 16, of which the first 8 are used; every index is below 8.
   swapped: the element `h` lanes away, for the powers of two below LANES.
   whole: integers below 2^24 as floats.
   floored: v >= 0, below 2^23, rounded down.
   one_more: v + 1 where a >= b. */
#if LANES == 16
INLINE words larger(words a, words b) { return (words)_mm512_max_epu32((__m512i)a, (__m512i)b); }
INLINE words lesser(words a, words b) { return (words)_mm512_min_epu32((__m512i)a, (__m512i)b); }
INLINE floats at_most(floats v, floats bound) { return (floats)_mm512_min_ps((__m512)bound, (__m512)v); }
INLINE uint32_t largest_lane(words v) { return _mm512_reduce_max_epu32((__m512i)v); }
INLINE words looked_up(words table, words at) { return (words)_mm512_permutexvar_epi32((__m512i)at, (__m512i)table); }
INLINE pair from_fp16(const void *x) {
  __m512i h = _mm512_loadu_si512(x);
  return (pair){(floats)_mm512_cvtph_ps(_mm512_castsi512_si256(h)), (floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1))};
}
INLINE words to_fp16(pair v) {
  __m256i a = _mm512_cvtps_ph((__m512)v.a, _MM_FROUND_TO_NEAREST_INT), b = _mm512_cvtps_ph((__m512)v.b, _MM_FROUND_TO_NEAREST_INT);
  return (words)_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}
INLINE pair from_bf16(const void *x) {
  __m512i h = _mm512_loadu_si512(x);
  return (pair){(floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(h)), 16),
                (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(h, 1)), 16)};
}
INLINE words upper_halves(words a, words b) {
  static const uint16_t odd[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                   33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return (words)_mm512_permutex2var_epi16((__m512i)a, _mm512_loadu_si512(odd), (__m512i)b);
}
INLINE floats swapped(floats v, int h) {
  if (h == 1) return (floats)_mm512_permute_ps((__m512)v, 0xb1);
  if (h == 2) return (floats)_mm512_permute_ps((__m512)v, 0x4e);
  if (h == 4) return (floats)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0xb1);
  return (floats)_mm512_shuffle_f32x4((__m512)v, (__m512)v, 0x4e);
}
INLINE floats whole(words v) { return (floats)_mm512_cvtepi32_ps((__m512i)v); }
INLINE floats floored(floats v) { return (floats)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
INLINE floats one_more(floats v, floats a, floats b) {
  return (floats)_mm512_mask_add_ps((__m512)v, _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ), (__m512)v, _mm512_set1_ps(1));
}
INLINE void stream(void *y, words v) { _mm512_stream_si512(y, (__m512i)v); }
#elif LANES == 8
INLINE words larger(words a, words b) { return (words)_mm256_max_epu32((__m256i)a, (__m256i)b); }
INLINE words lesser(words a, words b) { return (words)_mm256_min_epu32((__m256i)a, (__m256i)b); }
INLINE floats at_most(floats v, floats bound) { return (floats)_mm256_min_ps((__m256)bound, (__m256)v); }
INLINE uint32_t largest_lane(words v) {
  __m128i m = _mm_max_epu32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1)));
}
INLINE words looked_up(words table, words at) { return (words)_mm256_permutevar8x32_epi32((__m256i)table, (__m256i)at); }
INLINE pair from_fp16(const void *x) {
  __m256i h = _mm256_loadu_si256(x);
  return (pair){(floats)_mm256_cvtph_ps(_mm256_castsi256_si128(h)), (floats)_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
INLINE words to_fp16(pair v) {
  __m128i a = _mm256_cvtps_ph((__m256)v.a, _MM_FROUND_TO_NEAREST_INT), b = _mm256_cvtps_ph((__m256)v.b, _MM_FROUND_TO_NEAREST_INT);
  return (words)_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}
INLINE pair from_bf16(const void *x) {
  __m256i h = _mm256_loadu_si256(x);
  return (pair){(floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(h)), 16),
                (floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(h, 1)), 16)};
}
INLINE words upper_halves(words a, words b) {
  __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32((__m256i)a, 16), _mm256_srli_epi32((__m256i)b, 16));
  return (words)_mm256_permute4x64_epi64(packed, 0xd8);
}
INLINE floats swapped(floats v, int h) {
  if (h == 1) return (floats)_mm256_permute_ps((__m256)v, 0xb1);
  if (h == 2) return (floats)_mm256_permute_ps((__m256)v, 0x4e);
  return (floats)_mm256_permute2f128_ps((__m256)v, (__m256)v, 1);
}
INLINE floats whole(words v) { return (floats)_mm256_cvtepi32_ps((__m256i)v); }
INLINE floats floored(floats v) { return (floats)_mm256_floor_ps((__m256)v); }
INLINE floats one_more(floats v, floats a, floats b) { return v + (floats)((words)(a >= b) & ONE); }
INLINE void stream(void *y, words v) { _mm256_stream_si256(y, (__m256i)v); }
#else
INLINE words larger(words a, words b) { return where((words)(a > b), a, b); }
INLINE words lesser(words a, words b) { return where((words)(a < b), a, b); }
INLINE floats at_most(floats v, floats bound) { return (floats)where((words)(v > bound), (words)bound, (words)v); }
INLINE uint32_t largest_lane(words v) {
  uint32_t most = 0;
  for (int k = 0; k < LANES; k++) most = v[k] > most ? v[k] : most;
  return most;
}
INLINE floats swapped(floats v, int h) {
  floats w;
  for (int k = 0; k < LANES; k++) w[k] = v[k ^ h];
  return w;
}
INLINE floats whole(words v) {
  floats f;
  for (int k = 0; k < LANES; k++) f[k] = (float)(int32_t)v[k];
  return f;
}
INLINE floats floored(floats v) {
  floats nearest = (v + 0x1p23f) - 0x1p23f;
  return nearest - (floats)((words)(nearest > v) & ONE);
}
INLINE floats one_more(floats v, floats a, floats b) { return v + (floats)((words)(a >= b) & ONE); }
INLINE pair from_bf16(const void *x) {
  uint16_t h[PAIR];
  memcpy(h, x, sizeof h);
  words a, b;
  for (int k = 0; k < LANES; k++) a[k] = (uint32_t)h[k] << 16, b[k] = (uint32_t)h[k + LANES] << 16;
  return (pair){(floats)a, (floats)b};
}
INLINE words upper_halves(words a, words b) {
  uint16_t h[PAIR];
  for (int k = 0; k < LANES; k++) h[k] = (uint16_t)(a[k] >> 16), h[k + LANES] = (uint16_t)(b[k] >> 16);
  words both;
  memcpy(&both, h, sizeof both);
  return both;
}
#endif

INLINE floats floats_at(const float *x) {
  floats v;
  memcpy(&v, x, sizeof v);
  return v;
}
INLINE words words_at(const uint32_t *x) {
  words v;
  memcpy(&v, x, sizeof v);
  return v;
}

/* The pair that starts at x[at]. */
INLINE pair load(const void *x, enum dtype dtype, int64_t at) {
  const char *from = (const char *)x + at * bytes_of(dtype);
  if (dtype == FP32) return (pair){floats_at((const float *)from), floats_at((const float *)from + LANES)};
#if LANES > 4
  if (dtype == FP16) return from_fp16(from);
#endif
  return from_bf16(from);
}

/* Prefetches a pair; it may lie beyond the end. Between streaming stores the processor does not predict the next reads
   itself. */
INLINE void fetch(const void *x, enum dtype dtype, int64_t at) {
  for (int64_t byte = 0; byte < PAIR * bytes_of(dtype); byte += 64)
    __builtin_prefetch((const char *)x + at * bytes_of(dtype) + byte);
}
/* The same for what is read later: into the second cache, whose sets fewer rows share. */
INLINE void fetch_far(const void *x, enum dtype dtype, int64_t at) {
  for (int64_t byte = 0; byte < PAIR * bytes_of(dtype); byte += 64)
    __builtin_prefetch((const char *)x + at * bytes_of(dtype) + byte, 0, 2);
}

/* The first n elements of a pair, followed by zeros. */
INLINE pair load_some(const void *x, enum dtype dtype, int64_t at, int64_t n) {
  if (n >= PAIR) return load(x, dtype, at);
  char full[4 * PAIR] = {0};
  memcpy(full, (const char *)x + at * bytes_of(dtype), (size_t)(n * bytes_of(dtype)));
  return load(full, dtype, 0);
}

/* Rounds to nearest even. A NaN came from a bfloat16, so its lower half is 0. */
INLINE words nearest_bf16(floats v) { return (words)v + 0x7fffu + ((words)v >> 16 & 1u); }

/* `exact`: bfloat16 represents all values. `past`: bypasses the caches, to a multiple of 64 bytes. */
INLINE void store(void *y, enum dtype dtype, int64_t at, pair v, int exact, int past) {
  char *to = (char *)y + at * bytes_of(dtype);
  words first = (words)v.a, second = (words)v.b;
  if (dtype == BF16) {
    if (!exact) first = nearest_bf16(v.a), second = nearest_bf16(v.b);
    first = upper_halves(first, second);
  }
#if LANES > 4
  if (dtype == FP16) first = to_fp16(v);
  if (past) {
    stream(to, first);
    if (dtype == FP32) stream(to + sizeof first, second);
    return;
  }
#else
  (void)past;
#endif
  memcpy(to, &first, sizeof first);
  if (dtype == FP32) memcpy(to + sizeof first, &second, sizeof second);
}

/* The first n of the pair. */
INLINE void store_some(void *y, enum dtype dtype, int64_t at, int64_t n, pair v, int exact, int past) {
  if (n >= PAIR) {
    store(y, dtype, at, v, exact, past);
    return;
  }
  char full[4 * PAIR];
  store(full, dtype, 0, v, exact, 0);
  memcpy((char *)y + at * bytes_of(dtype), full, (size_t)(n * bytes_of(dtype)));
}

#if LANES > 4
/* 16-bit integers, as many as a pair has elements. */
typedef uint16_t halves __attribute__((vector_size(4 * LANES)));
typedef int16_t shorts __attribute__((vector_size(4 * LANES)));

INLINE halves all_halves(uint32_t v) { return (halves){0} + (uint16_t)v; }

/* above: a - b, at least 0, of 16-bit integers and of bytes.
   distance: |a - b|, which is at most 2^15.
   exceeds: all bits where a > b, else none; both are below 2^15.
   looked_up_bytes: a lookup of each byte in a table of 16, from table_of; every index is below 16.
   sum_or_zero: a + b, but 0 where a is 0; a is below 2^15. */
#if LANES == 16
#define V(name) _mm512_##name
#define VECTOR __m512i
#define SUM_OR_ZERO(a, b) _mm512_maskz_add_epi16(_mm512_test_epi16_mask(a, a), a, b)
#define REPEATED(v) _mm512_broadcast_i32x4(v)
#define FOLDED(h) _mm256_max_epu16(_mm512_castsi512_si256((__m512i)h), _mm512_extracti64x4_epi64((__m512i)h, 1))
#else
#define V(name) _mm256_##name
#define VECTOR __m256i
#define SUM_OR_ZERO(a, b) _mm256_add_epi16(a, _mm256_sign_epi16(b, a))
#define REPEATED(v) _mm256_broadcastsi128_si256(v)
#define FOLDED(h) (__m256i) h
#endif
INLINE halves larger_half(halves a, halves b) { return (halves)V(max_epu16)((VECTOR)a, (VECTOR)b); }
INLINE halves lesser_half(halves a, halves b) { return (halves)V(min_epu16)((VECTOR)a, (VECTOR)b); }
INLINE halves above(halves a, halves b) { return (halves)V(subs_epu16)((VECTOR)a, (VECTOR)b); }
INLINE halves above_bytes(halves a, halves b) { return (halves)V(subs_epu8)((VECTOR)a, (VECTOR)b); }
INLINE halves distance(halves a, halves b) { return (halves)V(abs_epi16)((VECTOR)(a - b)); }
INLINE halves exceeds(halves a, halves b) { return (halves)((shorts)a > (shorts)b); }
INLINE halves looked_up_bytes(halves table, halves at) { return (halves)V(shuffle_epi8)((VECTOR)table, (VECTOR)at); }
INLINE halves sum_or_zero(halves a, halves b) { return (halves)SUM_OR_ZERO((VECTOR)a, (VECTOR)b); }
INLINE uint32_t largest_half(halves h) {
  __m256i v = FOLDED(h);
  __m128i m = _mm_max_epu16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  return 0xffff - (uint32_t)_mm_extract_epi16(_mm_minpos_epu16(~m), 0);
}
INLINE halves table_of(const uint8_t *bytes) { return (halves)REPEATED(_mm_loadu_si128((const __m128i *)bytes)); }

/* The first n integers at x[at], followed by zeros. */
INLINE halves load_halves(const void *x, int64_t at, int64_t n) {
  halves v = {0};
  if (n >= PAIR)
    memcpy(&v, (const char *)x + 2 * at, sizeof v);
  else
    memcpy(&v, (const char *)x + 2 * at, (size_t)(2 * n));
  return v;
}

/* The first n of v. `past`: bypasses the caches, if n >= PAIR. */
INLINE void store_halves(void *y, int64_t at, int64_t n, halves v, int past) {
  char *to = (char *)y + 2 * at;
  if (n < PAIR)
    memcpy(to, &v, (size_t)(2 * n));
  else if (past)
    stream(to, (words)v);
  else
    memcpy(to, &v, sizeof v);
}
#endif
