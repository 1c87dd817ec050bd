// The tile of core/isa_avx2.cpp.
#define LEVELHEAD_VECTOR_BYTES 32
#define LEVELHEAD_TILE_ROWS 6
#include "account.inl.h"

LEVELHEAD_ACCOUNT(avx2);
