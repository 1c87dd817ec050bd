// AVX-512 with BF16: adds to isa_avx512.cpp the products of bfloat16 in pairs, 12 x 32 sums at two terms a step.
#define LEVELHEAD_VECTOR_BYTES 64
#define LEVELHEAD_TILE_ROWS 12
#include "kernel.inl.h"

extern "C" const levelhead::KernelTable levelhead_kernel_avx512bf16 = levelhead::table_for<levelhead::Pairs>;
