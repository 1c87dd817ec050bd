// AVX2 + FMA + F16C: 6 x 16 floats, 12 of 16 registers accumulate.
#define LEVELHEAD_VECTOR_BYTES 32
#define LEVELHEAD_TILE_ROWS 6
#include "kernel.inl.h"

LEVELHEAD_KERNEL(avx2);
