// AVX-512 (F, VL, BW, DQ): 12 x 32 floats, 24 of 32 registers accumulate.
#define LEVELHEAD_VECTOR_BYTES 64
#define LEVELHEAD_TILE_ROWS 12
#include "kernel.inl.h"

LEVELHEAD_KERNEL(avx512);
