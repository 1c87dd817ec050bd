// The tile of core/isa_avx512.cpp.
#define LEVELHEAD_VECTOR_BYTES 64
#define LEVELHEAD_TILE_ROWS 12
#include "account.inl.h"

LEVELHEAD_ACCOUNT(avx512);
