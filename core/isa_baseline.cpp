// What every CPU of the architecture has: SSE2 on x86-64, NEON on aarch64 (which has registers for 12 rows).
#define LEVELHEAD_VECTOR_BYTES 16
#if defined(__aarch64__)
#define LEVELHEAD_TILE_ROWS 12
#else
#define LEVELHEAD_TILE_ROWS 6
#endif
#include "kernel.inl.h"

LEVELHEAD_KERNEL(baseline);
