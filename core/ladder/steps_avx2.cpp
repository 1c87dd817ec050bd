// The tile of core/isa_avx2.cpp.
#define LEVELHEAD_VECTOR_BYTES 32
#define LEVELHEAD_TILE_ROWS 6
#include "steps.inl.h"

LEVELHEAD_LADDER(avx2);
