#include "dcp/tensor_item.h"

#include <ATen/Functions.h>
#include <fsdp2/error.h>

#include <algorithm>
#include <utility>

#include "dcp/geometry.h"
#include "dcp/named_errors.h"
#include "dcp/scalar_types.h"
#include "pickle/reader.h"

namespace fsdp2::dcp::detail {

using pickle::Graph;
using pickle::Ref;
using pickle::Type;

namespace {

constexpr size_t kMaxTensorPickleBytes = size_t{1} << 20;
constexpr size_t kMaxDims = 64;
constexpr int64_t kSlabBytes = int64_t{4} << 20;

std::vector<int64_t> integers(const Graph& graph, Ref ref) {
  if (graph.type(ref) == Type::kCall && graph.callee(ref) == Graph::Name{"torch", "Size"}) {
    const Ref arguments = graph.arguments(ref);
    FSDP2_CHECK(graph.count(arguments) == 1, kCorruption, "[dcp] a torch.Size with ", graph.count(arguments),
                " arguments");
    return integers(graph, *graph.begin(arguments));
  }
  const size_t count = graph.count(ref);
  FSDP2_CHECK(count <= kMaxDims, kCorruption, "[dcp] a shape with ", count, " dimensions");
  std::vector<int64_t> result(count);
  for (size_t i = 0; i < count; ++i) result[i] = graph.integer(graph.begin(ref)[i]);
  return result;
}

int64_t element_size(at::ScalarType type) { return static_cast<int64_t>(c10::elementSize(type)); }

void swap_bytes(at::Tensor& data, size_t element) {
  auto* bytes = static_cast<char*>(data.mutable_data_ptr());
  for (int64_t i = 0; element > 1 && i + static_cast<int64_t>(element) <= data.numel();
       i += static_cast<int64_t>(element)) {
    std::reverse(bytes + i, bytes + i + element);
  }
}

/// kCorruption (through `fail`) unless all elements lie among `elements` stored ones.
template <class Fail>
void check_extent(const StoredTensor& tensor, int64_t elements, const Fail& fail) {
  if (tensor.strides.size() != tensor.sizes.size() || tensor.offset < 0)
    fail("its shape and strides do not fit together");
  int64_t last = tensor.offset;
  bool overflow = !checked_numel(tensor.sizes).has_value();
  for (size_t d = 0; d < tensor.sizes.size(); ++d) {
    if (tensor.sizes[d] < 0 || tensor.strides[d] < 0) fail("it has a negative size or stride");
    int64_t span = 0;
    overflow |= tensor.sizes[d] > 0 && __builtin_mul_overflow(tensor.sizes[d] - 1, tensor.strides[d], &span);
    overflow |= __builtin_add_overflow(last, span, &last);
  }
  const bool empty = std::find(tensor.sizes.begin(), tensor.sizes.end(), 0) != tensor.sizes.end();
  if (overflow || (!empty && last >= elements)) fail("its last element is ", last, " of ", elements, " stored ones");
}

}  // namespace

bool StoredTensor::is_plain() const {
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] != 1 && strides[d] != stride) return false;
    stride *= sizes[d];
  }
  return !conj && !neg && !swapped;
}

bool is_tensor(const Graph& graph, Ref ref) {
  if (graph.type(ref) != Type::kCall) return false;
  const Graph::Name callee = graph.callee(ref);
  return callee.module == "torch._utils" &&
         (callee.name == "_rebuild_tensor_v2" || callee.name == "_rebuild_tensor_v3");
}

TensorReader::TensorReader(const ZipReader& archive, const Graph& graph) : archive_(archive), graph_(graph) {
  if (const auto* order = archive.find("byteorder")) swapped_ = archive.read_text(*order, 16) == "big";
}

template <class... Parts>
void TensorReader::fail(const Parts&... parts) const {
  FSDP2_THROW(kCorruption, "[dcp] ", archive_.what(), ": damaged tensor: ", parts...);
}

StoredTensor TensorReader::describe(Ref ref) const {
  StoredTensor stored;
  const bool v3 = graph_.callee(ref).name == "_rebuild_tensor_v3";
  const Ref arguments = graph_.arguments(ref);
  const size_t count = graph_.count(arguments), least = v3 ? 7 : 6;
  if (count < least || count > least + 1) fail("a tensor is described by ", count, " arguments");
  const Ref* argument = graph_.begin(arguments);
  stored.offset = graph_.integer(argument[1]);
  stored.sizes = integers(graph_, argument[2]);
  stored.strides = integers(graph_, argument[3]);
  std::optional<at::ScalarType> type;
  if (v3) {
    const Graph::Name name = graph_.global(argument[6]);
    if (name.module == "torch") type = dtype_from_name(name.name);
    if (!type) fail("its dtype is ", name.module, ".", name.name);
  }
  stored.record = storage_of(graph_.persistent_id(argument[0]), type);
  stored.dtype = *type;
  stored.swapped = swapped_ && element_size(*type) > 1;
  check_extent(stored, static_cast<int64_t>(stored.record->size) / element_size(*type),
               [&](const auto&... parts) { fail(parts...); });
  if (count > least) read_flags(argument[least], stored);
  return stored;
}

/// The record of a storage; sets `type` from its class unless it is untyped.
const ZipReader::Record* TensorReader::storage_of(Ref id, std::optional<at::ScalarType>& type) const {
  if (graph_.type(id) != Type::kTuple || graph_.count(id) != 5) fail("its storage is not described by five things");
  const Ref* part = graph_.begin(id);
  const Graph::Name name = graph_.global(part[1]);
  const bool untyped = name == Graph::Name{"torch.storage", "UntypedStorage"};
  if (!untyped) {
    const auto stored = name.module == "torch" ? dtype_of_storage_class(name.name) : std::nullopt;
    if (!stored) fail("its storage is a ", name.module, ".", name.name);
    type = stored;
  }
  if (!type) fail("its storage has no dtype");
  const int64_t count = graph_.integer(part[4]);
  const ZipReader::Record& record = archive_.at("data/" + std::string(graph_.text(part[2])));
  int64_t bytes = 0;
  if (count < 0 || __builtin_mul_overflow(count, untyped ? 1 : element_size(*type), &bytes) ||
      static_cast<uint64_t>(bytes) != record.size) {
    fail("its storage of ", count, " elements is ", record.size, " bytes long");
  }
  return &record;
}

void TensorReader::read_flags(Ref flags, StoredTensor& stored) const {
  if (graph_.type(flags) == Type::kNone) return;
  if (graph_.type(flags) != Type::kDict && graph_.type(flags) != Type::kOrderedDict)
    fail("its flags are a ", to_string(graph_.type(flags)));
  for (size_t i = 0; i < graph_.count(flags); i += 2) {
    const std::string_view name = graph_.text(graph_.begin(flags)[i]);
    if (!graph_.boolean(graph_.begin(flags)[i + 1])) continue;
    if (name == "conj" && c10::isComplexType(stored.dtype)) {
      stored.conj = true;
    } else if (name == "neg" && stored.dtype != at::kBool) {
      stored.neg = true;
    } else {
      fail("it has the unknown flag ", name);
    }
  }
}

namespace {

at::Tensor read_storage(const ZipReader& archive, const StoredTensor& stored) {
  at::Tensor data = at::empty({static_cast<int64_t>(stored.record->size)}, at::kByte);
  archive.read(*stored.record, stored.record->size ? data.mutable_data_ptr() : nullptr);
  if (stored.swapped) swap_bytes(data, c10::elementSize(stored.dtype) / (c10::isComplexType(stored.dtype) ? 2 : 1));
  return data;
}

at::Tensor view_of_storage(const at::Tensor& data, const StoredTensor& stored) {
  at::Tensor result = at::empty({0}, at::TensorOptions().dtype(stored.dtype));
  result.set_(data.storage(), stored.offset, stored.sizes, stored.strides);
  if (stored.conj) result = result.conj().resolve_conj();
  if (stored.neg) result = result.neg();
  return result;
}

}  // namespace

at::Tensor TensorReader::read(const StoredTensor& stored) {
  at::Tensor& data = storages_[stored.record];
  if (!data.defined()) data = read_storage(archive_, stored);
  return view_of_storage(data, stored);
}

/// One walk over the bytes of the tensor, from front to back.
class TensorItem::Pass {
 public:
  explicit Pass(const TensorItem& item) : bytes_(*item.bytes_), begin_(item.begin_) {
    if (item.archive_) record_.emplace(*item.archive_, *item.stored_.record, !item.checked_);
  }
  void read(uint64_t offset, void* out, uint64_t size) {
    if (record_) {
      record_->read(offset, out, size);
    } else {
      bytes_.read(begin_ + offset, out, static_cast<size_t>(size));
    }
  }
  void finish() {
    if (record_) record_->finish();
  }

 private:
  const ByteRange& bytes_;
  uint64_t begin_;
  std::optional<RecordReader> record_;
};

TensorItem::TensorItem(ByteRange bytes, bool verify, at::ScalarType dtype, std::vector<int64_t> sizes)
    : bytes_(std::make_unique<ByteRange>(std::move(bytes))), archive_(std::make_unique<ZipReader>(*bytes_, verify)) {
  const std::string& what = bytes_->what();
  const std::string pickle = archive_->read_text(archive_->at("data.pkl"), kMaxTensorPickleBytes);
  const Graph graph = pickle::read(pickle, what, {.allow_persistent = true});
  FSDP2_CHECK(is_tensor(graph, graph.root()), kCorruption, "[dcp] ", what,
              ": the metadata say tensor, the item holds a ", to_string(graph.type(graph.root())),
              " (quantized and other special tensors are not read)");
  stored_ = naming(what, [&] { return TensorReader(*archive_, graph).describe(graph.root()); });
  FSDP2_CHECK(stored_.dtype == dtype, kCorruption, "[dcp] ", what, ": damaged tensor: its dtype is ",
              dtype_name(stored_.dtype), ", the metadata say ", dtype_name(dtype));
  FSDP2_CHECK(stored_.sizes == sizes, kCorruption, "[dcp] ", what, ": damaged tensor: it has the shape ",
              shape_text(stored_.sizes), ", the metadata say ", shape_text(sizes));
}

TensorItem::TensorItem(ByteRange bytes, uint64_t begin, at::ScalarType dtype, std::vector<int64_t> sizes)
    : bytes_(std::make_unique<ByteRange>(std::move(bytes))), begin_(begin) {
  stored_.dtype = dtype;
  stored_.sizes = std::move(sizes);
  stored_.strides.assign(stored_.sizes.size(), 1);
  for (size_t d = stored_.sizes.size(); d-- > 1;) stored_.strides[d - 1] = stored_.strides[d] * stored_.sizes[d];
}

at::Tensor TensorItem::read_permuted() {
  if (!permuted_.defined()) permuted_ = view_of_storage(read_storage(*archive_, stored_), stored_);
  return permuted_;
}

void TensorItem::check() {
  if (archive_) RecordReader(*archive_, *stored_.record).finish();
  checked_ = true;
}

at::Tensor TensorItem::whole() {
  if (!stored_.is_plain()) return read_permuted();
  const at::Tensor result = at::empty(stored_.sizes, at::TensorOptions().dtype(stored_.dtype));
  copy_window({std::vector<int64_t>(stored_.sizes.size(), 0), stored_.sizes}, result);
  return result;
}

void TensorItem::copy_window(const Chunk& window, const at::Tensor& to) {
  if (!stored_.is_plain()) {
    to.copy_(part_of(read_permuted(), window));
    return;
  }
  Pass pass(*this);
  copy_rows(pass, window, 0, stored_.offset, to);
  pass.finish();
}

/// `to` is the window without its first `dim` dimensions, which stand at one index each; `first` is the element there.
void TensorItem::copy_rows(Pass& pass, const Chunk& window, size_t dim, int64_t first, const at::Tensor& to) {
  const int64_t element = element_size(stored_.dtype);
  const auto read = [&](int64_t begin, int64_t count, const at::Tensor& into) {
    pass.read(static_cast<uint64_t>(begin * element), into.mutable_data_ptr(), static_cast<uint64_t>(count * element));
  };
  const auto scratch = [&](std::vector<int64_t> sizes) {
    return at::empty(sizes, at::TensorOptions().dtype(stored_.dtype));
  };
  const size_t dims = window.sizes.size();
  const bool scalar = dim == dims;
  int64_t row = 1;  // elements
  bool whole_rows = true;
  for (size_t d = dim + 1; d < dims; ++d) {
    row *= stored_.sizes[d];
    whole_rows &= window.sizes[d] == stored_.sizes[d];
  }
  const int64_t rows = scalar ? 1 : window.sizes[dim];
  if (!scalar) first += window.offsets[dim] * row;
  if (whole_rows && to.device().is_cpu() && to.scalar_type() == stored_.dtype && to.is_contiguous() && !to.is_conj() &&
      !to.is_neg()) {
    if (!to.is_inference()) to.unsafeGetTensorImpl()->bump_version();
    return read(first, rows * row, to);
  }
  if (scalar) {
    const at::Tensor one = scratch({});
    read(first, 1, one);
    to.copy_(one);
    return;
  }
  if (row * element > kSlabBytes) {  // into the rows
    for (int64_t i = 0; i < rows; ++i) copy_rows(pass, window, dim + 1, first + i * row, to.select(0, i));
    return;
  }
  const int64_t slab =
      std::clamp<int64_t>(kSlabBytes / std::max<int64_t>(row * element, 1), 1, std::max<int64_t>(rows, 1));
  std::vector<int64_t> sizes(stored_.sizes.begin() + static_cast<std::ptrdiff_t>(dim), stored_.sizes.end());
  sizes[0] = slab;
  const at::Tensor buffer = scratch(sizes);
  for (int64_t i = 0; i < rows; i += slab) {
    const int64_t count = std::min(slab, rows - i);
    read(first + i * row, count * row, buffer);
    at::Tensor part = buffer.narrow(0, 0, count);
    for (size_t d = dim + 1; d < dims; ++d)
      part = part.narrow(static_cast<int64_t>(d - dim), window.offsets[d], window.sizes[d]);
    to.narrow(0, i, count).copy_(part);
  }
}

}  // namespace fsdp2::dcp::detail
