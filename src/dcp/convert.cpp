#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fsdp2/dcp/convert.h>
#include <fsdp2/error.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include "dcp/convert_output.h"
#include "dcp/convert_plan.h"
#include "dcp/geometry.h"
#include "dcp/item.h"
#include "dcp/key_patterns.h"
#include "dcp/scalar_types.h"
#include "dcp/tensor_source.h"

namespace fsdp2::dcp {
namespace {

using namespace detail;

/// XXH3 of bytes that come in pieces.
class Digest {
 public:
  Digest() : state_(XXH3_createState(), XXH3_freeState) { XXH3_64bits_reset(state_.get()); }
  void add(const void* data, size_t size) {
    XXH3_64bits_update(state_.get(), data, size);
    const auto* bytes = static_cast<const char*>(data);
    if (size > 0 && same_) {
      if (!first_) first_ = bytes[0];
      same_ = bytes[0] == *first_ && std::memcmp(bytes, bytes + 1, size - 1) == 0;
    }
  }
  uint64_t value() const { return XXH3_64bits_digest(state_.get()); }
  /// All bytes are equal, as in a tensor of zeros.
  bool same() const { return same_; }

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
  std::optional<char> first_;
  bool same_ = true;
};

/// A box of the destination that was written, and the digest of its bytes.
struct Part {
  size_t tensor;
  Chunk box;
  uint64_t digest;
  bool same;
};

Format other_format(Format format) { return format == Format::Safetensors ? Format::Dcp : Format::Safetensors; }

bool is_single_file(const std::filesystem::path& destination) { return destination.extension() == ".safetensors"; }

Format choose_format(const std::filesystem::path& destination, Format from, const ConvertOptions& options) {
  const std::string extension = destination.extension().string();
  const bool torch_name = extension == ".pt" || extension == ".pth" || extension == ".bin";
  if (!options.format) {
    if (is_single_file(destination)) return Format::Safetensors;
    if (torch_name) return Format::TorchSave;
    return from == Format::TorchSave ? Format::Dcp : other_format(from);
  }
  FSDP2_CHECK(*options.format == Format::TorchSave || !torch_name, kInvalidArgument, "[dcp] ", destination.string(),
              " is the name of a torch.save file, the format asked for is ", to_string(*options.format));
  FSDP2_CHECK(*options.format == Format::Safetensors || !is_single_file(destination), kInvalidArgument, "[dcp] ",
              destination.string(), " is the name of a safetensors file, the format asked for is ",
              to_string(*options.format));
  return *options.format;
}

bool same_value(const Value& a, const Value& b, const std::string& name) {
  const PickledValue left = pickle_value(a, name), right = pickle_value(b, name);
  return left.pickle == right.pickle &&
         std::equal(left.tensors.begin(), left.tensors.end(), right.tensors.begin(), right.tensors.end(),
                    [](const at::Tensor& x, const at::Tensor& y) {
                      return x.nbytes() == y.nbytes() &&
                             (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
                    });
}

class Converter final : public ConvertInput {
 public:
  Converter(TensorSource& source, const ConvertPlan& plan, const ConvertOptions& options)
      : source_(source), plan_(plan), options_(options) {
    for (const ConvertPlan::Entry& tensor : plan.tensors) progress_.total += plan.bytes(tensor);
  }

  void stream(size_t tensor, const Chunk& box, const Consume& consume) override {
    Digest digest;
    // A cast looks at its elements as doubles.
    const bool cast = source_.items()[plan_.tensors[tensor].item].tensor->dtype != plan_.tensors[tensor].dtype;
    const int64_t element = cast ? static_cast<int64_t>(sizeof(double)) : element_size(tensor);
    for_each_piece(box, element, kPieceBytes, [&](const Chunk& piece) {
      const at::Tensor data = converted(tensor, piece);
      digest.add(data.const_data_ptr(), data.nbytes());
      consume(data.const_data_ptr(), data.nbytes());
      advance(data.nbytes());
    });
    parts_.push_back({tensor, box, digest.value(), digest.same()});
  }

  at::Tensor read(size_t tensor, const Chunk& box) override {
    const at::Tensor data = converted(tensor, box);
    Digest digest;
    if (data.nbytes() > 0) digest.add(data.const_data_ptr(), data.nbytes());
    parts_.push_back({tensor, box, digest.value(), digest.same()});
    advance(data.nbytes());
    return data;
  }

  Value value(size_t value) override { return source_.value(plan_.values[value].item); }

  /// Reads the result and compares it with what was written: names, dtypes, shapes, bytes, values.
  void check(TensorSource& result, const std::filesystem::path& destination) {
    progress_ = {true, 0, progress_.total};
    std::unordered_map<std::string, size_t> by_name;
    for (size_t i = 0; i < result.items().size(); ++i) by_name.emplace(result.items()[i].key, i);
    const auto find = [&](const std::string& name, bool tensor) {
      const auto found = by_name.find(name);
      const bool good = found != by_name.end() && result.items()[found->second].tensor.has_value() == tensor;
      FSDP2_CHECK(good, kCorruption, "[dcp] ", destination.string(), ": '", name,
                  "' was written and is not there when the result is read back; nothing was kept");
      return found->second;
    };
    std::vector<size_t> items;
    for (const ConvertPlan::Entry& tensor : plan_.tensors) {
      items.push_back(find(tensor.name, true));
      const TensorEntry& entry = *result.items()[items.back()].tensor;
      FSDP2_CHECK(entry.dtype == tensor.dtype && entry.sizes == tensor.sizes, kCorruption, "[dcp] ",
                  destination.string(), ": '", tensor.name, "' of shape ", shape_text(tensor.sizes),
                  " was written, read back has it the shape ", shape_text(entry.sizes), "; nothing was kept");
    }
    for (const ConvertPlan::Entry& value : plan_.values) {
      FSDP2_CHECK(same_value(source_.value(value.item), result.value(find(value.name, false)), value.name), kCorruption,
                  "[dcp] ", destination.string(), ": '", value.name,
                  "' is another value when the result is read back; nothing was kept");
    }
    check_count(result, destination);
    for (const Part& part : parts_) {
      Digest digest;
      for_each_piece(part.box, element_size(part.tensor), kPieceBytes, [&](const Chunk& piece) {
        const at::Tensor data = result.read(items[part.tensor], piece);
        digest.add(data.const_data_ptr(), data.nbytes());
        advance(data.nbytes());
      });
      FSDP2_CHECK(digest.value() == part.digest, kCorruption, "[dcp] ", destination.string(), ": '",
                  plan_.tensors[part.tensor].name, "' has other bytes at ", shape_text(part.box.offsets),
                  " when the result is read back; nothing was kept");
    }
  }

  /// Matrices with the same bytes, by name.
  std::vector<std::vector<std::string>> equal_tensors(
      const std::vector<std::pair<std::string, std::string>>& tied) const {
    std::set<std::string> known;  // to be equal to another one
    for (const auto& [name, twin] : tied) known.insert(name);
    std::vector<std::vector<uint64_t>> digests(plan_.tensors.size());
    std::vector<bool> same(plan_.tensors.size(), true);
    for (const Part& part : parts_) {
      digests[part.tensor].push_back(part.digest);
      same[part.tensor] = same[part.tensor] && part.same;
    }
    std::map<std::tuple<at::ScalarType, std::vector<int64_t>, std::vector<uint64_t>>, std::vector<std::string>> groups;
    for (size_t i = 0; i < plan_.tensors.size(); ++i) {
      const ConvertPlan::Entry& tensor = plan_.tensors[i];
      if (tensor.sizes.size() < 2 || same[i] || known.count(tensor.name) != 0) continue;
      groups[{tensor.dtype, tensor.sizes, digests[i]}].push_back(tensor.name);
    }
    std::vector<std::vector<std::string>> result;
    for (auto& [what, names] : groups) {
      if (names.size() > 1) result.push_back(std::move(names));
    }
    return result;
  }

 private:
  int64_t element_size(size_t tensor) const {
    return static_cast<int64_t>(c10::elementSize(plan_.tensors[tensor].dtype));
  }

  at::Tensor converted(size_t tensor, const Chunk& piece) {
    const ConvertPlan::Entry& entry = plan_.tensors[tensor];
    const at::Tensor data = source_.read(entry.item, piece);
    if (data.scalar_type() == entry.dtype) return data;
    const at::Tensor result = data.to(entry.dtype);
    // A weight that became infinite (or NaN) would be found only when the model is used.
    const auto finite = [](const at::Tensor& values) { return at::isfinite(values.to(at::kDouble)); };
    if (!finite(result).all().item<bool>() && !finite(data).eq(finite(result)).all().item<bool>()) {
      FSDP2_THROW(kInvalidArgument, "[dcp] '", source_.items()[entry.item].key, "' holds values that ",
                  dtype_name(entry.dtype), " cannot represent; choose a dtype of greater range, such as bfloat16, or ",
                  "leave it out with patterns for the cast");
    }
    return result;
  }

  void check_count(TensorSource& result, const std::filesystem::path& destination) const {
    size_t expected = plan_.tensors.size() + plan_.values.size(), found = result.items().size();
    if (result.format() == Format::TorchSave) {
      // Places of lists whose elements were not chosen are None.
      for (size_t i = 0; i < result.items().size() && found > expected; ++i) {
        if (!result.items()[i].tensor && result.value(i).is_none()) --found;
      }
    }
    FSDP2_CHECK(found == expected, kCorruption, "[dcp] ", destination.string(), " has ", found,
                " keys when it is read back, ", expected, " were written; nothing was kept");
  }

  void advance(size_t bytes) {
    progress_.done += bytes;
    if (options_.progress) options_.progress(progress_);
  }

  TensorSource& source_;
  const ConvertPlan& plan_;
  const ConvertOptions& options_;
  ConvertProgress progress_;
  std::vector<Part> parts_;
};

void check_options(const ConvertOptions& options) {
  FSDP2_CHECK(options.ranks >= 1 && options.ranks <= 100'000, kInvalidArgument, "[dcp] ranks = ", options.ranks,
              "; allowed is 1 to 100000");
  FSDP2_CHECK(options.max_file_bytes >= 1, kInvalidArgument, "[dcp] max_file_bytes = 0; it has to be at least 1");
  if (options.dtype) {
    const at::ScalarType type = *options.dtype;
    const bool real = type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16 ||
                      type == at::kFloat8_e4m3fn || type == at::kFloat8_e5m2;
    FSDP2_CHECK(real, kInvalidArgument, "[dcp] cannot cast to ", dtype_name(type),
                "; allowed are float32, float64, float16, bfloat16, float8_e4m3fn, float8_e5m2");
  }
}

}  // namespace

const char* to_string(Format format) noexcept {
  switch (format) {
    case Format::Dcp:
      return "DCP";
    case Format::Safetensors:
      return "safetensors";
    case Format::TorchSave:
      break;
  }
  return "torch.save";
}

std::string dtype_text(at::ScalarType dtype) { return std::string(dtype_name(dtype)); }
std::optional<at::ScalarType> parse_dtype(const std::string& name) { return dtype_from_name(name); }

CheckpointContents inspect(const std::filesystem::path& path, const InspectOptions& options) {
  constexpr int64_t kSmall = 16;
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  const auto source = open_source(path, detect_format(path), /*verify=*/true);
  CheckpointContents info;
  info.format = source->format();
  source->describe(info);
  KeyPatterns chosen(options.keys);
  for (size_t i = 0; i < source->items().size(); ++i) {
    const TensorSource::Item& item = source->items()[i];
    if (!chosen.empty() && !chosen.match(item.key)) continue;
    ItemInfo out;
    out.key = item.key;
    out.bytes = item.bytes;
    out.files = source->files_of(i);
    out.chunks = 1;
    if (item.tensor) {
      out.dtype = item.tensor->dtype;
      out.sizes = item.tensor->sizes;
      out.chunks = item.tensor->chunks.size();
    }
    if (options.values && !item.tensor) out.value = source->value(i);
    if (options.values && item.tensor && checked_numel(out.sizes).value_or(kSmall + 1) <= kSmall)
      out.value = source->read(i, whole_box(out.sizes));
    info.items.push_back(std::move(out));
  }
  chosen.check_used("the pattern for keys");
  return info;
}

ConvertReport convert(const std::filesystem::path& source_path, const std::filesystem::path& destination,
                      const ConvertOptions& options) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  check_options(options);
  ConvertReport report;
  report.from = detect_format(source_path);
  report.to = choose_format(destination, report.from, options);
  const auto source = open_source(source_path, report.from, options.verify_checksums);
  const ConvertPlan plan = make_plan(*source, options, report);
  FSDP2_CHECK(!plan.tensors.empty() || (!plan.values.empty() && report.to != Format::Safetensors), kInvalidArgument,
              "[dcp] ", source_path.string(), " has no ", report.to == Format::Safetensors ? "tensors" : "keys",
              " to convert");

  const bool folder = report.to == Format::Dcp || (report.to == Format::Safetensors && !is_single_file(destination));
  const auto target =
      folder ? make_folder_target(destination, options.overwrite) : make_file_target(destination, options.overwrite);
  Converter converter(*source, plan, options);
  if (report.to == Format::Dcp) {
    write_dcp(*target, plan, converter, options.ranks);
  } else if (report.to == Format::Safetensors) {
    write_safetensors(*target, plan, converter, options.max_file_bytes, !folder);
  } else {
    write_torch_save(*target, plan, converter);
  }
  const auto result = open_source(target->path(), report.to, /*verify=*/true);
  converter.check(*result, destination);
  CheckpointContents info;
  result->describe(info);
  for (const FileInfo& file : info.files) report.files.push_back(folder ? file.name : destination.filename().string());
  target->commit();

  report.tensors = plan.tensors.size();
  report.values = plan.values.size();
  for (const ConvertPlan::Entry& tensor : plan.tensors) report.bytes += plan.bytes(tensor);
  report.equal = converter.equal_tensors(report.tied);
  return report;
}

}  // namespace fsdp2::dcp
