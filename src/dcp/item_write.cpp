#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include <algorithm>

#include "dcp/item.h"
#include "dcp/scalar_types.h"
#include "dcp/value_rep.h"
#include "pickle/writer.h"

namespace fsdp2::dcp::detail {
namespace {

/// The pickle of a row-major tensor whose bytes are the record data/`key`.
void describe_tensor(pickle::Writer& out, at::ScalarType type, at::IntArrayRef sizes, const std::string& key) {
  // A dtype that Python's storage classes do not cover is a further argument.
  const std::string_view storage = storage_class(type);
  const std::string_view dtype = dtype_name(type);
  const int64_t numel = c10::multiply_integers(sizes);
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  out.global("torch._utils", storage.empty() ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
  out.mark();
  out.mark();
  out.text("storage");
  out.global(storage.empty() ? "torch.storage" : "torch", storage.empty() ? "UntypedStorage" : storage);
  out.text(key);
  out.text("cpu");
  out.integer(storage.empty() ? numel * static_cast<int64_t>(c10::elementSize(type)) : numel);
  out.tuple();
  out.persistent_id();
  out.integer(0);
  out.integers(sizes);
  out.integers(strides);
  out.boolean(false);
  out.global("collections", "OrderedDict");
  out.tuple_of(0);
  out.reduce();
  if (storage.empty()) out.global("torch", dtype);
  out.tuple();
  out.reduce();
}

void begin_archive(ZipWriter& archive, const std::string& pickle) {
  archive.record("data.pkl", pickle);
  archive.record(".format_version", "1");
  archive.record(".storage_alignment", "64");
  archive.record("byteorder", "little");
}

void end_archive(ZipWriter& archive) {
  archive.record("version", "3\n");
  archive.finish();
}

std::string pickle_of_tensor(at::ScalarType type, at::IntArrayRef sizes) {
  pickle::Writer pickle;
  describe_tensor(pickle, type, sizes, "0");
  return std::move(pickle).finish();
}

class ValueWriter {
 public:
  ValueWriter(std::string fqn, std::vector<at::Tensor>& tensors) : fqn_(std::move(fqn)), tensors_(tensors) {}

  void write(const Value& value, int depth = 0) {
    FSDP2_CHECK(depth < kMaxDepth, kInvalidArgument, "[dcp] the value of ", fqn_, " is nested deeper than ", kMaxDepth,
                " levels");
    switch (value.kind()) {
      case Kind::None:
        return out_.none();
      case Kind::Bool:
        return out_.boolean(value.boolean());
      case Kind::Int:
        return out_.integer(value.integer());
      case Kind::BigInt:
        return out_.big_integer(bytes_from_decimal(value.str()));
      case Kind::Double:
        return out_.real(value.number());
      case Kind::String:
        return out_.text(value.str());
      case Kind::Bytes:
        return out_.bytes(value.str());
      case Kind::ByteArray:
        out_.global("__builtin__", "bytearray");
        out_.bytes(value.str());
        return call_with_one();
      case Kind::Complex:
        out_.global("__builtin__", "complex");
        return write_tuple_call(value.list(), depth);
      case Kind::Tensor:
        return write_tensor_value(value.tensor());
      case Kind::List:
        return write_list(value.list(), depth);
      case Kind::Tuple:
        return write_tuple(value.list(), depth);
      case Kind::Set:
      case Kind::FrozenSet:
        out_.global("__builtin__", value.kind() == Kind::Set ? "set" : "frozenset");
        write_list(value.list(), depth);
        return call_with_one();
      case Kind::Dict:
        out_.empty_dict();
        return write_items(value, depth);
      case Kind::OrderedDict:
        out_.global("collections", "OrderedDict");
        out_.tuple_of(0);
        out_.reduce();
        return write_items(value, depth);
      case Kind::Dtype:
        return out_.global("torch", value.str());
      case Kind::Device:
        return write_device(c10::Device(value.str()));
      case Kind::Size:
        out_.global("torch", "Size");
        write_tuple(value.list(), depth);
        return call_with_one();
      case Kind::Opaque:
        FSDP2_THROW(kUnsupported, "[dcp] ", fqn_,
                    ": a value of unknown classes can be saved again only as it was, not inside of "
                    "another value");
    }
  }
  std::string finish() && { return std::move(out_).finish(); }

 private:
  void call_with_one() {
    out_.tuple_of(1);
    out_.reduce();
  }
  void write_list(const std::vector<Value>& items, int depth) {
    out_.empty_list();
    out_.mark();
    for (const Value& item : items) write(item, depth + 1);
    out_.appends();
  }
  void write_tuple(const std::vector<Value>& items, int depth) {
    out_.mark();
    for (const Value& item : items) write(item, depth + 1);
    out_.tuple();
  }
  void write_tuple_call(const std::vector<Value>& items, int depth) {
    write_tuple(items, depth);
    out_.reduce();
  }
  void write_items(const Value& value, int depth) {
    out_.mark();
    for (const auto& [key, item] : value.items()) {
      write(key, depth + 1);
      write(item, depth + 1);
    }
    out_.set_items();
  }
  void write_device(const c10::Device& device) {
    out_.global("torch", "device");
    out_.mark();
    out_.text(c10::DeviceTypeName(device.type(), /*lower_case=*/true));
    if (device.has_index()) out_.integer(device.index());
    out_.tuple();
    out_.reduce();
  }
  void write_tensor_value(const at::Tensor& tensor) {
    const at::Tensor stored = storable(tensor, fqn_);
    describe_tensor(out_, stored.scalar_type(), stored.sizes(), std::to_string(tensors_.size()));
    tensors_.push_back(stored);
  }

  std::string fqn_;
  std::vector<at::Tensor>& tensors_;
  pickle::Writer out_;
};

}  // namespace

void check_storable(const at::Tensor& tensor, const std::string& fqn) {
  dtype_name(tensor.scalar_type());  // throws for quantized and bit types
  FSDP2_CHECK(tensor.layout() == at::kStrided && !tensor.is_nested(), kUnsupported, "[dcp] ", fqn, " has layout ",
              c10::str(tensor.layout()), "; a checkpoint holds dense tensors only: convert it with to_dense()");
  FSDP2_CHECK(!tensor.is_meta(), kInvalidArgument, "[dcp] ", fqn,
              " is on the meta device and has no values to save; materialise it first");
}

at::Tensor storable(const at::Tensor& tensor, const std::string& fqn) {
  check_storable(tensor, fqn);
  at::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
  if (!plain.device().is_cpu()) plain = plain.to(at::kCPU);
  return plain.contiguous();
}

TensorItemWriter::TensorItemWriter(ByteSink& out, at::ScalarType dtype, const std::vector<int64_t>& sizes)
    : archive_(out) {
  begin_archive(archive_, pickle_of_tensor(dtype, sizes));
  archive_.begin_record("data/0");
}

void TensorItemWriter::finish() {
  archive_.end_record();
  end_archive(archive_);
}

void write_tensor_item(ByteSink& out, const at::Tensor& tensor) {
  TensorItemWriter writer(out, tensor.scalar_type(), tensor.sizes().vec());
  if (tensor.nbytes() > 0) writer.write(tensor.const_data_ptr(), tensor.nbytes());
  writer.finish();
}

PickledValue pickle_value(const Value& value, const std::string& fqn) {
  PickledValue result;
  if (value.kind() == Kind::Opaque) {
    result.pickle = value.str();
    result.raw = true;
    return result;
  }
  ValueWriter writer(fqn, result.tensors);
  writer.write(value);
  result.pickle = std::move(writer).finish();
  return result;
}

void write_value_item(ByteSink& out, const PickledValue& value) {
  if (value.raw) {
    out.write(value.pickle.data(), value.pickle.size());
  } else {
    ZipWriter archive(out);
    begin_archive(archive, value.pickle);
    for (size_t i = 0; i < value.tensors.size(); ++i) {
      const at::Tensor& tensor = value.tensors[i];
      archive.record("data/" + std::to_string(i), tensor.nbytes() ? tensor.const_data_ptr() : "", tensor.nbytes());
    }
    end_archive(archive);
  }
}

}  // namespace fsdp2::dcp::detail
