// The core as custom calls of XLA, for JAX on CPUs: an extension of its own, since it needs the headers of jaxlib.
//
// A custom call brings buffers by position and attributes by name. The attributes `operands` and `results` name the
// buffers, and what has a name becomes a Problem as for Python (_problem.h). Buffers are used where they lie. Nothing is
// thrown across: every error is returned.
//
// What jax.vmap maps are further leading axes of every buffer, of size 1 where an operand is not mapped. They are one
// batch for the core. Where an option is shared by a batch but differs between what is mapped (a scale, sinks, dropout,
// whose numbers are counted from batch row 0 on), or where a gradient sums over the batch, the calls run one by one.
#include <nanobind/nanobind.h>

#include <cstring>
#include <exception>
#include <list>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>

#include "_problem.h"
#include "_shared.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
namespace nb = nanobind;

namespace levelhead {
namespace {

const SharedCore* core = nullptr;  // of _core; set before any handler is registered

// A dense buffer of XLA's.
struct Buffer {
  char* data;
  char format;
  Shape shape;
};

char format_of(ffi::DataType dtype, std::string_view name) {
  switch (dtype) {
    case ffi::DataType::F32: return 'f';
    case ffi::DataType::F64: return 'd';
    case ffi::DataType::F16: return 'e';
    case ffi::DataType::BF16: return 'H';
    case ffi::DataType::PRED: return '?';
    case ffi::DataType::S32: return 'i';
    case ffi::DataType::U32: return 'I';
    case ffi::DataType::S64: return 'q';
    default: throw std::invalid_argument(std::string(name) + ": unsupported type of XLA");
  }
}

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Everything a custom call was given, by name.
class Frame {
 public:
  Frame(const ffi::Dictionary& attributes, const ffi::RemainingArgs& operands, const ffi::RemainingRets& results)
      : attributes_(attributes) {
    name(text("operands"), operands.size(), [&](std::size_t i) { return operands.get<ffi::AnyBuffer>(i).value(); });
    name(text("results"), results.size(), [&](std::size_t i) { return *results.get<ffi::AnyBuffer>(i).value(); });
    const Buffer& q = buffers.at("q");
    mapped_axes = static_cast<int>(q.shape.size()) - static_cast<int>(integer("rank", 0));
    const Buffer& result = buffers.at(first_result_);  // results have every mapped axis in full
    require(mapped_axes >= 0 && static_cast<int>(result.shape.size()) >= mapped_axes, "fewer axes than agreed");
    mapped.assign(result.shape.begin(), result.shape.begin() + mapped_axes);
  }

  std::int64_t integer(std::string_view key, std::int64_t otherwise) const {
    return attributes_.contains(key) ? attributes_.get<std::int64_t>(key).value() : otherwise;
  }
  double number(std::string_view key) const { return attributes_.contains(key) ? attributes_.get<double>(key).value() : 0.0; }
  bool has(std::string_view key) const { return attributes_.contains(key); }
  ffi::Span<const double> numbers(std::string_view key) const { return attributes_.get<ffi::Span<const double>>(key).value(); }
  std::int64_t elements() const { return product(mapped, mapped.size()); }

  // Whether the calls that are mapped must run one by one.
  bool one_by_one() const {
    if (mapped_axes == 0) return false;
    if (elements() <= 1) return true;
    for (const auto& [key, buffer] : buffers) {
      if (is_one_of(key, {"dscale", "dsinks"})) return true;
      if (is_one_of(key, {"scale", "sinks", "alibi"}) && product(buffer.shape, mapped_axes) > 1) return true;
    }
    return number("dropout") > 0;
  }

  std::map<std::string, Buffer, std::less<>> buffers;
  int mapped_axes;
  Shape mapped;  // the sizes of these axes

 private:
  std::string_view text(const char* key) const { return attributes_.get<std::string_view>(key).value(); }

  template <class At>
  void name(std::string_view names, std::size_t count, const At& at) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t end = std::min(names.find(' '), names.size());
      const ffi::AnyBuffer buffer = at(i);
      const auto sides = buffer.dimensions();
      static char nowhere[64];  // an empty array needs an address, too
      void* const data = buffer.untyped_data() ? buffer.untyped_data() : nowhere;
      const std::string key(names.substr(0, end));
      require(!key.empty(), "more buffers than names");
      buffers[key] = {static_cast<char*>(data), format_of(buffer.element_type(), key), {sides.begin(), sides.end()}};
      first_result_ = i == 0 ? key : first_result_;
      names.remove_prefix(std::min(end + 1, names.size()));
    }
  }

  const ffi::Dictionary& attributes_;
  std::string first_result_;
};

// One core call of a frame: all that is mapped as one batch (element -1), or one of them.
class Call final : public Arguments {
 public:
  Call(const Frame& frame, std::int64_t element) : frame_(frame), element_(element) {}

  std::optional<Memory> array(const char* name) override {
    const std::string_view key = name;
    if (is_one_of(key, {"scale", "sinks", "alibi"}) && frame_.has(key)) return constants(frame_.numbers(key));
    if (key == "query_start" && frame_.has("start")) return starts();
    if (key == "first_keys") return first_keys();
    const auto found = frame_.buffers.find(key);
    if (found == frame_.buffers.end()) return std::nullopt;
    Memory memory = placed(found->second);
    if (is_one_of(key, {"q", "k", "v", "out", "dout", "dq", "dk", "dv"})) return in_order(std::move(memory));
    if (is_one_of(key, {"mask", "dmask"})) return stretched(std::move(memory));
    if (is_one_of(key, {"scale", "sinks", "alibi"})) return converted<double>(placed(found->second, std::max<std::int64_t>(element_, 0)));
    if (is_one_of(key, {"key_lengths", "query_lengths", "query_start"})) return joined(converted<std::int64_t>(memory), 1);
    if (is_one_of(key, {"query_segments", "key_segments"})) return joined(converted<std::int64_t>(memory), 2);
    if (is_one_of(key, {"logsumexp", "dlogsumexp"}) && !memory.is_contiguous()) return densely(memory);
    if (key == "counts") return written<std::int64_t>(memory);
    if (is_one_of(key, {"dsinks", "dscale"})) return written<double>(memory);
    return memory;
  }
  Memory needed(const char* name) { return array(name).value(); }

  bool flag(const char* name) override { return frame_.integer(name, 0) != 0; }
  double number(const char* name) override { return frame_.number(name); }
  std::int64_t integer(const char* name, std::int64_t otherwise) override { return frame_.integer(name, otherwise); }
  std::uint64_t seed() override {
    const auto found = frame_.buffers.find("seed");
    if (found == frame_.buffers.end()) return 0;
    const Memory words = placed(found->second);  // two of 32 bits
    return at<std::uint32_t>(words, 0) | std::uint64_t(at<std::uint32_t>(words, 1)) << 32;
  }
  std::optional<Runs> runs(const char*) override { return std::nullopt; }

  // Numbers that a traced call could not check before.
  void check(const Problem& problem) const {
    const auto within = [&](const std::int64_t* lengths, std::int64_t most, const char* what) {
      for (std::int64_t b = 0; lengths && b < problem.B; ++b)
        require(lengths[b] >= 0 && lengths[b] <= most, std::string(what) + ": lengths from 0 to " + std::to_string(most) +
                                                           " expected, given " + std::to_string(lengths[b]));
    };
    within(problem.scoring.key_lengths, problem.S, "key_lengths");
    within(problem.scoring.query_lengths, problem.T, "query_lengths");
  }

  // Results that XLA holds in narrower types than the core.
  void finish() {
    for (const auto& [memory, scratch] : narrowed_) {
      for (std::size_t i = 0; i < scratch->size(); ++i) {
        if (memory.format == 'i') reinterpret_cast<std::int32_t*>(memory.data)[i] = static_cast<std::int32_t>((*scratch)[i].integer);
        else if (memory.format == 'f') reinterpret_cast<float*>(memory.data)[i] = static_cast<float>((*scratch)[i].real);
        else std::memcpy(static_cast<char*>(memory.data) + i * 8, &(*scratch)[i], 8);
      }
    }
  }

 private:
  union Number {
    std::int64_t integer;
    double real;
  };
  using Numbers = std::vector<Number>;

  // A buffer without its mapped axes, at this call's element; with all of them, broadcast, in a joint call.
  Memory placed(const Buffer& buffer) const { return placed(buffer, element_); }
  Memory placed(const Buffer& buffer, std::int64_t element) const {
    Memory memory{buffer.data, buffer.format, buffer.shape, Shape(buffer.shape.size())};
    std::int64_t stride = memory.format == 'I' ? 4 : memory.item_bytes();
    for (std::size_t axis = buffer.shape.size(); axis-- > 0;) {
      memory.strides[axis] = stride;
      stride *= buffer.shape[axis];
    }
    std::int64_t rest = element, offset = 0;
    for (int axis = frame_.mapped_axes; axis-- > 0;) {
      if (memory.shape[axis] == 1) memory.strides[axis] = 0;
      memory.shape[axis] = frame_.mapped[axis];
      if (element < 0) continue;
      offset += rest % memory.shape[axis] * memory.strides[axis];
      rest /= memory.shape[axis];
    }
    if (element < 0) return memory;
    memory.data = buffer.data + offset;
    memory.shape.erase(memory.shape.begin(), memory.shape.begin() + frame_.mapped_axes);
    memory.strides.erase(memory.strides.begin(), memory.strides.begin() + frame_.mapped_axes);
    return memory;
  }

  // Heads before tokens, as the core reads them.
  Memory in_order(Memory memory) const {
    if (!frame_.integer("tokens_first", 0)) return memory;
    const std::size_t rank = memory.shape.size();
    std::swap(memory.shape[rank - 3], memory.shape[rank - 2]);
    std::swap(memory.strides[rank - 3], memory.strides[rank - 2]);
    return memory;
  }

  // A mask over all rows and keys: its axes of size 1 have stride 0.
  Memory stretched(Memory memory) const {
    const Memory q = in_order(placed(frame_.buffers.at("q"))), k = in_order(placed(frame_.buffers.at("k")));
    Shape full = q.shape;
    full.back() = k.shape[k.shape.size() - 2];
    require(memory.shape.size() == full.size(), "mask does not fit");
    for (std::size_t axis = 0; axis < full.size(); ++axis) {
      if (memory.shape[axis] == 1) memory.strides[axis] = 0;
      else require(memory.shape[axis] == full[axis], "mask does not fit");
    }
    memory.shape = full;
    return memory;
  }

  template <class Item>
  static Item at(const Memory& memory, std::int64_t index) {  // as if it were dense, whatever its strides
    const char* place = static_cast<const char*>(memory.data);
    for (std::size_t axis = memory.shape.size(); axis-- > 0;) {
      place += index % memory.shape[axis] * memory.strides[axis];
      index /= memory.shape[axis];
    }
    Item item;
    std::memcpy(&item, place, sizeof item);
    return item;
  }

  Numbers& fresh(std::int64_t count) { return scratch_.emplace_back(count); }
  static Memory over(Numbers& numbers, char format, Shape shape) {
    Shape strides(shape.size());
    std::int64_t stride = 8;
    for (std::size_t axis = shape.size(); axis-- > 0; stride *= shape[axis]) strides[axis] = stride;
    return {numbers.data(), format, std::move(shape), std::move(strides)};
  }

  // In the type that the core reads options in.
  template <class Wide>
  Memory converted(const Memory& memory) {
    const std::int64_t count = product(memory.shape, memory.shape.size());
    Numbers& numbers = fresh(count);
    for (std::int64_t i = 0; i < count; ++i) {
      switch (memory.format) {
        case 'f': numbers[i].real = at<float>(memory, i); break;
        case 'd': numbers[i].real = at<double>(memory, i); break;
        case 'i': numbers[i].integer = at<std::int32_t>(memory, i); break;
        default: numbers[i].integer = at<std::int64_t>(memory, i);
      }
    }
    return over(numbers, std::is_same_v<Wide, double> ? 'd' : 'q', memory.shape);
  }

  // The leading axes of a number per batch row, or per batch row and token, as one.
  static Memory joined(Memory memory, std::size_t axes) {
    const std::size_t leading = memory.shape.size() - (axes - 1);
    Shape shape{product(memory.shape, leading)};
    shape.insert(shape.end(), memory.shape.begin() + leading, memory.shape.end());
    memory.strides = axes == 1 ? Shape{8} : Shape{8 * shape[1], 8};
    memory.shape = std::move(shape);
    return memory;
  }

  Memory constants(ffi::Span<const double> given) {
    Numbers& numbers = fresh(static_cast<std::int64_t>(given.size()));
    for (std::size_t i = 0; i < given.size(); ++i) numbers[i].real = given.begin()[i];
    return over(numbers, 'd', {static_cast<std::int64_t>(given.size())});
  }

  Memory starts() {
    const Shape& shape = placed(frame_.buffers.at("q")).shape;
    const std::int64_t B = product(shape, shape.size() - 3);
    Numbers& numbers = fresh(B);
    for (Number& number : numbers) number.integer = frame_.integer("start", 0);
    return over(numbers, 'q', {B});
  }

  // The first key of each query's segment; -1: none.
  std::optional<Memory> first_keys() {
    if (!frame_.buffers.count("sums") || !frame_.buffers.count("query_segments")) return std::nullopt;
    const Memory queries = needed("query_segments"), keys = needed("key_segments");
    const std::int64_t B = queries.shape[0], T = queries.shape[1], S = keys.shape[1];
    Numbers& numbers = fresh(B * T);
    for (std::int64_t b = 0; b < B; ++b) {
      std::unordered_map<std::int64_t, std::int64_t> first;
      for (std::int64_t j = 0; j < S; ++j) first.emplace(at<std::int64_t>(keys, b * S + j), j);
      for (std::int64_t t = 0; t < T; ++t) {
        const auto found = first.find(at<std::int64_t>(queries, b * T + t));
        numbers[b * T + t].integer = found == first.end() ? -1 : found->second;
      }
    }
    return over(numbers, 'q', {B, T});
  }

  // A number per row where not everything is mapped, in full.
  Memory densely(const Memory& memory) {
    const std::int64_t count = product(memory.shape, memory.shape.size()), bytes = memory.item_bytes();
    Numbers& numbers = fresh((count * bytes + 7) / 8);
    for (std::int64_t i = 0; i < count; ++i) {
      if (bytes == 8) numbers[i].integer = at<std::int64_t>(memory, i);
      else reinterpret_cast<std::int32_t*>(numbers.data())[i] = at<std::int32_t>(memory, i);
    }
    Memory dense = over(numbers, memory.format, memory.shape);
    for (std::int64_t& stride : dense.strides) stride = stride / 8 * bytes;
    return dense;
  }

  template <class Wide>
  Memory written(const Memory& memory) {
    Numbers& numbers = fresh(product(memory.shape, memory.shape.size()));
    narrowed_.push_back({memory, &numbers});
    return over(numbers, std::is_same_v<Wide, double> ? 'd' : 'q', memory.shape);
  }

  const Frame& frame_;
  const std::int64_t element_;
  std::list<Numbers> scratch_;
  std::vector<std::pair<Memory, Numbers*>> narrowed_;
};

int threads_of(const Frame& frame) {
  const std::int64_t wanted = frame.integer("threads", 0);
  return wanted > 0 ? static_cast<int>(wanted) : core->default_threads();
}

// What the core reports, as an exception of this extension.
void check(const Failure& failure) {
  if (failure.kind == Failure::argument) throw std::invalid_argument(failure.why);
  if (failure.kind != Failure::none) throw std::runtime_error(failure.why);
}

void forward_call(const Frame& frame, std::int64_t element) {
  Call call(frame, element);
  Results results(call);
  const Given given(call.needed("q"), call.needed("k"), call.array("v"), call);
  call.check(given.problem);
  const Result result = results.of(given);
  Interrupt never;
  Failure failure;
  core->forward(given.problem, result, threads_of(frame), never, failure);
  check(failure);
  call.finish();
}

void backward_call(const Frame& frame, std::int64_t element) {
  Call call(frame, element);
  Slopes slopes(call.needed("dout"), call.needed("out"), call.needed("logsumexp"), call);
  Given given(call.needed("q"), call.needed("k"), call.array("v"), call);
  call.check(given.problem);
  const Gradients gradients = slopes.of(given);
  Interrupt never;
  Failure failure;
  core->backward(given.problem, gradients, threads_of(frame), never, failure);
  check(failure);
  call.finish();
}

template <class Run>
ffi::Error run(ffi::Dictionary attributes, ffi::RemainingArgs operands, ffi::RemainingRets results, const Run& each) {
  try {
    const Frame frame(attributes, operands, results);
    if (const auto found = frame.buffers.find("dmask"); found != frame.buffers.end()) {  // the core adds to it
      const Buffer& dmask = found->second;
      std::memset(dmask.data, 0, product(dmask.shape, dmask.shape.size()) * (dmask.format == 'd' ? 8 : 4));
    }
    if (frame.one_by_one())
      for (std::int64_t element = 0; element < frame.elements(); ++element) each(frame, element);
    else
      each(frame, -1);
    return ffi::Error::Success();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(std::string("levelhead: ") + error.what());
  } catch (const std::exception& error) {  // bad_alloc; an attribute that is not as agreed
    return ffi::Error::Internal(std::string("levelhead: ") + error.what());
  }
}

ffi::Error attend(ffi::Dictionary attributes, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return run(attributes, operands, results, forward_call);
}

ffi::Error attend_backward(ffi::Dictionary attributes, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return run(attributes, operands, results, backward_call);
}

XLA_FFI_DEFINE_HANDLER(attend_handler, attend, ffi::Ffi::Bind().Attrs().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER(attend_backward_handler, attend_backward, ffi::Ffi::Bind().Attrs().RemainingArgs().RemainingRets());

}  // namespace
}  // namespace levelhead

NB_MODULE(_jax_ffi, m) {
  using namespace levelhead;
  const nb::capsule shared = nb::cast<nb::capsule>(nb::module_::import_("levelhead._core").attr("_shared"));
  core = static_cast<const SharedCore*>(shared.data(shared_core_name));
  m.attr("api") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("attend") = nb::capsule(reinterpret_cast<void*>(attend_handler));
  m.attr("attend_backward") = nb::capsule(reinterpret_cast<void*>(attend_backward_handler));
}
