// The tile of core/isa_avx512.cpp.
#define LEVELHEAD_VECTOR_BYTES 64
#define LEVELHEAD_TILE_ROWS 12
#include "steps.inl.h"

LEVELHEAD_LADDER(avx512);
