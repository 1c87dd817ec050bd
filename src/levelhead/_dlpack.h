// DLPack's C structures, as far as _fast_call.cpp uses them: layout and names are the standard's (major version 1).
// A library that supports it has a table of functions in its array type's capsule `__dlpack_c_exchange_api__`.
#pragma once

#include <cstdint>

namespace levelhead::dlpack {

constexpr std::uint32_t major_version = 1, minor_version = 3;
constexpr std::int32_t cpu = 1;                         // DLDeviceType
constexpr std::uint8_t ieee_float = 2, brain_float = 4;  // DLDataTypeCode

struct Version {
  std::uint32_t major, minor;
};
struct Device {
  std::int32_t type, id;
};
struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  std::int32_t rank;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};
struct ManagedTensor {  // DLManagedTensorVersioned
  Version version;
  void* context;
  void (*deleter)(ManagedTensor* self);
  std::uint64_t flags;
  Tensor tensor;
};

// The functions return 0, or -1 with a Python exception set, and need the GIL.
struct ExchangeApi {
  Version version;
  const ExchangeApi* previous;  // for an older major version
  void* allocate;               // not used here
  void* export_managed;         // not used here
  int (*import_managed)(ManagedTensor* tensor, void** object);  // takes the tensor over
  int (*borrow)(void* object, Tensor* tensor);                  // valid while the object lives; may be null
  void* current_stream;                                         // not used here
};

}  // namespace levelhead::dlpack
