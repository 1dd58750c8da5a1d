/* A thread's floating-point mode. A program may have set it to flush subnormals to zero or to round in one direction;
   the arithmetic here needs subnormals, and rounding to nearest. */

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__) || defined(__i386__)
/* MXCSR: flush results (15), rounding (13, 14), subnormal operands are zero (6). */
#define INEXACT 0xe040u
INLINE uint64_t fp_mode(void) { return __builtin_ia32_stmxcsr(); }
INLINE void set_fp_mode(uint64_t mode) { __builtin_ia32_ldmxcsr((uint32_t)mode); }
#elif defined(__aarch64__)
/* FPCR: flush (24), rounding (22, 23). */
#define INEXACT 0x1c00000u
INLINE uint64_t fp_mode(void) {
  uint64_t mode;
  __asm__ volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
  return mode;
}
INLINE void set_fp_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
#define INEXACT 0u
INLINE uint64_t fp_mode(void) { return 0; }
INLINE void set_fp_mode(uint64_t mode) { (void)mode; }
#endif

/* Makes arithmetic exact, and returns the mode to restore. */
INLINE uint64_t enter_exact(void) {
  uint64_t mode = fp_mode();
  if (mode & INEXACT) set_fp_mode(mode & ~(uint64_t)INEXACT);
  return mode;
}
INLINE void restore_mode(uint64_t mode) {
  if (mode & INEXACT) set_fp_mode(mode);
}
