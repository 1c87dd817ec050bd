// The AVX-512 kernel's width and tile, built for AVX2: slow, never chosen by itself, there so that the
// 16-wide code can be tested on a CPU without AVX-512.
#define LEVELHEAD_VECTOR_BYTES 64
#define LEVELHEAD_TILE_ROWS 12
#include "kernel.inl.h"

LEVELHEAD_KERNEL(avx2x16);
