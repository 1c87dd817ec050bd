// What every CPU of the architecture has; the tile of core/isa_baseline.cpp.
#define LEVELHEAD_VECTOR_BYTES 16
#if defined(__aarch64__)
#define LEVELHEAD_TILE_ROWS 12
#else
#define LEVELHEAD_TILE_ROWS 6
#endif
#include "account.inl.h"

LEVELHEAD_ACCOUNT(baseline);
