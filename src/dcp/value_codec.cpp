// State dicts as bytes for other ranks, without the data of their tensors.

#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include <bit>
#include <map>
#include <tuple>

#include "dcp/item.h"
#include "dcp/local_parts.h"
#include "dcp/value_rep.h"
#include "dcp/value_source.h"
#include "tensor/dtensor_spec.h"

namespace fsdp2::dcp::detail {
namespace {

at::Tensor plain_data(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
}

class Encoder {
 public:
  explicit Encoder(std::vector<at::Tensor>& tensors) : tensors_(tensors) {}

  void dict(const StateDict& state, const std::string& name) {
    out_.number(uint64_t{state.size()});
    for (const auto& [key, item] : state) {
      out_.text(key);
      value(item, name.empty() ? key : name + "." + key);
    }
  }
  std::string take() { return out_.take(); }

 private:
  void value(const Value& value, const std::string& name) {
    const Kind kind = value.kind();
    out_.number(static_cast<int32_t>(kind));
    switch (kind) {
      case Kind::None:
        return;
      case Kind::Bool:
      case Kind::Int:
        return out_.number(value.integer());
      case Kind::Double:
        return out_.number(std::bit_cast<uint64_t>(value.number()));
      case Kind::Tensor:
        return tensor(value.tensor(), name);
      case Kind::Dict:
      case Kind::OrderedDict:
        return items(value, name);
      case Kind::List:
      case Kind::Tuple:
      case Kind::Set:
      case Kind::FrozenSet:
      case Kind::Size:
      case Kind::Complex:
        out_.number(uint64_t{value.list().size()});
        for (const Value& item : value.list()) this->value(item, name);
        return;
      default:
        return out_.text(value.str());
    }
  }

  void items(const Value& value, const std::string& name) {
    const Items items = value.items();
    out_.number(uint64_t{items.size()});
    for (const auto& [key, item] : items) {
      this->value(key, name);
      this->value(item, key.kind() == Kind::String ? name + "." + key.str() : name);
    }
  }

  void tensor(const at::Tensor& tensor, const std::string& name) {
    FSDP2_CHECK(!fsdp2::detail::is_marked(tensor), kInvalidArgument, "[dcp] ", name,
                " is a DTensor; with broadcast_from_rank0 values are whole: pass full_tensor() of it");
    FSDP2_CHECK(!on_meta(tensor), kInvalidArgument, "[dcp] the value for ", name,
                " is on the meta device; load it first");
    check_storable(tensor, name);
    out_.number(static_cast<int32_t>(tensor.scalar_type()));
    out_.numbers(tensor.sizes().vec());
    if (tensor.numel() <= 1) {
      const at::Tensor data = plain_data(tensor);
      out_.text({static_cast<const char*>(data.const_data_ptr()), data.nbytes()});
      return;
    }
    const auto key = std::make_tuple(tensor.const_data_ptr(), tensor.scalar_type(), tensor.sizes().vec(),
                                     tensor.strides().vec(), tensor.is_conj(), tensor.is_neg());
    const auto [place, is_new] = places_.emplace(key, tensors_.size());
    if (is_new) tensors_.push_back(tensor);
    out_.number(uint64_t{place->second});
  }

  using Identity = std::tuple<const void*, at::ScalarType, std::vector<int64_t>, std::vector<int64_t>, bool, bool>;
  ByteWriter out_;
  std::vector<at::Tensor>& tensors_;
  std::map<Identity, size_t> places_;
};

class Decoder {
 public:
  Decoder(const std::string& bytes, std::vector<at::Tensor>& stand_ins) : in_(bytes), stand_ins_(stand_ins) {}

  StateDict dict() {
    StateDict state;
    for (auto left = in_.number<uint64_t>(); left > 0; --left) {
      const std::string key = in_.text();
      state[key] = value();
    }
    return state;
  }

 private:
  Value value() {
    const auto kind = static_cast<Kind>(in_.number<int32_t>());
    switch (kind) {
      case Kind::None:
        return nullptr;
      case Kind::Bool:
        return in_.number<int64_t>() != 0;
      case Kind::Int:
        return in_.number<int64_t>();
      case Kind::Double:
        return std::bit_cast<double>(in_.number<uint64_t>());
      case Kind::Tensor:
        return tensor();
      case Kind::Dict:
      case Kind::OrderedDict: {
        Items items(in_.number<uint64_t>());
        for (auto& [key, item] : items) {
          key = value();
          item = value();
        }
        return Value::from_items(std::move(items), kind == Kind::OrderedDict);
      }
      case Kind::List:
      case Kind::Tuple:
      case Kind::Set:
      case Kind::FrozenSet:
      case Kind::Size:
      case Kind::Complex: {
        std::vector<Value> list(in_.number<uint64_t>());
        for (Value& item : list) item = value();
        return ValueAccess::make(kind, std::move(list));
      }
      default:
        return ValueAccess::make(kind, in_.text());
    }
  }

  at::Tensor tensor() {
    const auto dtype = static_cast<at::ScalarType>(in_.number<int32_t>());
    const std::vector<int64_t> sizes = in_.numbers();
    if (c10::multiply_integers(sizes) <= 1) {
      const std::string data = in_.text();
      at::Tensor result = at::empty(sizes, dtype);
      std::memcpy(result.mutable_data_ptr(), data.data(), std::min(data.size(), result.nbytes()));
      return result;
    }
    const auto place = in_.number<uint64_t>();
    FSDP2_CHECK(place <= stand_ins_.size(), kPeerFailed, "[dcp] rank 0 sent a state dict that contradicts itself");
    if (place == stand_ins_.size()) {
      stand_ins_.push_back(at::empty(sizes, at::TensorOptions(dtype).device(c10::kMeta)));
    }
    return stand_ins_[place];
  }

  ByteReader in_;
  std::vector<at::Tensor>& stand_ins_;
};

}  // namespace

std::string encode(const StateDict& state, std::vector<at::Tensor>& tensors) {
  Encoder encoder(tensors);
  encoder.dict(state, "");
  return encoder.take();
}

StateDict decode(const std::string& bytes, std::vector<at::Tensor>& stand_ins) {
  return Decoder(bytes, stand_ins).dict();
}

}  // namespace fsdp2::dcp::detail
