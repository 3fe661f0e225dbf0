#pragma once

// What reads files of strangers, as functions of some bytes: for libFuzzer and for the replay of its corpus. Each
// returns normally or throws fsdp2::Error; anything else is a fault.

#include <fsdp2/error.h>

#include <array>
#include <stdexcept>
#include <string>
#include <string_view>

#include "dcp/byte_range.h"
#include "dcp/item.h"
#include "dcp/safetensors.h"
#include "dcp/stored_metadata.h"
#include "dcp/tensor_item.h"
#include "dcp/transforms.h"
#include "pickle/reader.h"

namespace fsdp2::fuzz {

/// What may not happen, whatever the bytes.
inline void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

inline void read_pickle(std::string_view bytes) {
  using pickle::Type;
  const pickle::Graph graph = pickle::read(bytes, "fuzz", {.allow_persistent = true, .max_nodes = 1 << 20});
  size_t seen = 0;
  const auto look = [&](pickle::Ref ref) {
    switch (graph.type(ref)) {
      case Type::kBool:
        seen += graph.boolean(ref) ? 1 : 0;
        break;
      case Type::kInt:
        seen += graph.integer(ref) == 7 ? 1 : 0;
        break;
      case Type::kDouble:
        seen += graph.real(ref) > 0 ? 1 : 0;
        break;
      case Type::kString:
      case Type::kBytes:
      case Type::kByteArray:
      case Type::kLong:
        require(graph.text(ref).size() <= bytes.size(), "a text is longer than the pickle");
        break;
      case Type::kGlobal:
        seen += graph.global(ref).name.size();
        break;
      case Type::kCall:
      case Type::kRecord:
        seen += graph.callee(ref).name.size() + static_cast<size_t>(graph.type(graph.arguments(ref)));
        break;
      case Type::kPersistent:
        seen += static_cast<size_t>(graph.type(graph.persistent_id(ref)));
        break;
      default:
        break;
    }
  };
  look(graph.root());
  for (pickle::Ref ref = 0; ref < graph.size(); ++ref) {
    look(ref);
    const Type type = graph.type(ref);
    if (type < Type::kList || type > Type::kFrozenSet) continue;
    for (size_t i = 0; i < graph.count(ref); ++i) seen += static_cast<size_t>(graph.type(graph.begin(ref)[i]));
  }
  require(seen != static_cast<size_t>(-1), "");  // nothing above is left out
}

inline void read_metadata(std::string_view bytes) {
  using namespace dcp::detail;
  const StoredMetadata stored = decode_metadata(bytes, "fuzz");
  std::string again;
  try {
    again = encode_metadata(decode_metadata(encode_metadata(stored), "again"));
  } catch (const Error& error) {
    throw std::logic_error(std::string("what was read cannot be written and read: ") + error.what());
  }
  require(again == encode_metadata(stored), "what was read is written in two ways");
}

inline void read_item(std::string_view bytes) {
  using namespace dcp::detail;
  const ByteRange range(std::string(bytes), "fuzz");
  for (const bool verify : {true, false}) {
    try {
      const dcp::Value value = read_value_item(range, verify);
      if (value.kind() != dcp::Kind::Tensor) continue;
      const at::Tensor& tensor = value.tensor();
      TensorItem item(ByteRange(std::string(bytes), "fuzz"), verify, tensor.scalar_type(), tensor.sizes().vec());
      require(item.whole().sizes() == tensor.sizes(), "an item has two shapes");
    } catch (const Error&) {
      if (!verify) throw;
    }
  }
}

inline void read_safetensors(std::string_view bytes) {
  using namespace dcp::detail;
  const SafetensorsHeader header = read_safetensors_header(ByteRange(std::string(bytes), "fuzz"));
  for (const SafetensorsTensor& tensor : header.tensors)
    require(tensor.begin <= tensor.end && tensor.end <= bytes.size(), "a tensor leaves the blob");
}

inline void read_zstd(std::string_view bytes) {
  using namespace dcp::detail;
  constexpr uint64_t kMost = 1 << 20;
  const ByteRange item = undo_transforms(ByteRange(std::string(bytes), "fuzz"), {kZstdTransform}, kMost);
  require(item.size() <= kMost, "more came out than is allowed");
}

struct Target {
  const char* name;  // of its corpus
  void (*read)(std::string_view bytes);
};
inline constexpr std::array kTargets = {Target{"pickle", read_pickle}, Target{"metadata", read_metadata},
                                        Target{"item", read_item}, Target{"safetensors", read_safetensors},
                                        Target{"zstd", read_zstd}};

}  // namespace fsdp2::fuzz
