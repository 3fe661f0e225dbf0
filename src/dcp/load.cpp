#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>
#include <fsdp2/tensor/dtensor.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_set>

#include "dcp/absences.h"
#include "dcp/checkpoint_files.h"
#include "dcp/exchange.h"
#include "dcp/flatten.h"
#include "dcp/geometry.h"
#include "dcp/local_parts.h"
#include "dcp/patterns.h"
#include "dcp/save_run.h"
#include "dcp/scalar_types.h"
#include "dcp/value_rep.h"
#include "process/collectives.h"
#include "process/world.h"
#include "tensor/dtensor_spec.h"
#include "torch_compat.h"

namespace fsdp2::dcp {
namespace {

using namespace detail;

constexpr size_t kLeastBroadcastBytes = size_t{64} << 10;  // smaller ones are read sooner than sent

/// Whether reading once and sending is worth it: ranks of one host share the pages that the first one read.
bool wants_broadcast(const LoadOptions& options, const Exchange& exchange) {
  if (exchange.world_size() == 1) return false;
  return options.broadcast_replicas.value_or(!fsdp2::detail::require_world("load()").single_host);
}

/// A tensor of the target and the entry that fills it.
struct TensorTask {
  size_t entry;
  std::string fqn;
  Value* value;
  bool reshaped;
};
/// A value of the target and what was saved for it.
struct ValueTask {
  Value* target;
  Value content;
};

class Loader {
 public:
  Loader(StateDict& state, CheckpointFiles files, const LoadOptions& options, int rank)
      : state_(state), options_(options), rank_(rank), files_(std::move(files)), asked_(no_bits()) {}

  /// Looks at everything that can be wrong without changing the target.
  void check() {
    std::vector<Leaf> leaves = choose_leaves();
    for (Leaf& leaf : leaves) {
      const size_t entry = files_.stored().find(leaf.fqn);
      if (entry == StoredMetadata::npos) {
        report_.missing.push_back(leaf.fqn);
        if (!matches_any(options_.allow_missing, leaf.fqn)) absences_.add_missing(leaf);
      } else {
        check_leaf(leaf, entry);
        set_bit(asked_, entry);
        report_.loaded.push_back(leaf.fqn);
        absences_.add_found(leaf);
      }
    }
    if (!options_.allow_partial) {
      absences_.check(files_.folder().string(),
                      [&](const std::string& fqn) { return files_.stored().find(fqn + ".0") != StoredMetadata::npos; });
    }
  }

  /// What the other ranks need to know: one bit for each entry that this rank asked for; and, where `broadcast`, one
  /// for each that it wants as a whole, in memory that a broadcast can fill. And how many objects it has.
  std::string encode(bool broadcast) const {
    std::string whole;
    if (broadcast) {
      whole = no_bits();
      std::map<const void*, int> users;  // what arrives in shared memory would go out again under another key
      for (const TensorTask& task : tensors_) ++users[memory_of(task)];
      for (const TensorTask& task : tensors_) {
        if (can_be_broadcast(task) && users[memory_of(task)] == 1) set_bit(whole, task.entry);
      }
    }
    ByteWriter out;
    out.text(asked_);
    out.text(whole);
    out.number(uint64_t{objects_.size()});
    return out.take();
  }

  /// Learns it from every rank, in order. kInvalidArgument, on all ranks, where the checkpoint has keys that none asked
  /// for and that are not allowed.
  void learn(const std::vector<std::string>& messages) {
    std::vector<std::string> asked, whole;
    for (const std::string& message : messages) {
      ByteReader in(message);
      asked.push_back(in.text());
      whole.push_back(in.text());
      any_objects_ = any_objects_ || in.number<uint64_t>() > 0;
    }
    for (size_t entry = 0; entry < files_.stored().metadata.entries.size(); ++entry) {
      const bool by_any =
          std::any_of(asked.begin(), asked.end(), [&](const std::string& bits) { return has_bit(bits, entry); });
      if (!by_any) report_.unexpected.push_back(files_.fqn(entry));
    }
    check_unexpected();
    share(whole);
  }

  void read() {
    // In the order of the files: one pass over the disk.
    std::sort(tensors_.begin(), tensors_.end(),
              [&](const TensorTask& a, const TensorTask& b) { return first_place(a) < first_place(b); });
    for (TensorTask& task : tensors_) {
      if (on_meta(task.value->tensor())) replace(*task.value, fresh_like(task.value->tensor()));
      const auto reader = readers_.find(task.entry);
      if (reader == readers_.end() || reader->second == rank_) fill_tensor(task);
    }
  }

  /// After all ranks have read what is theirs.
  void broadcast(const ProcessGroup& group) {
    std::map<size_t, const TensorTask*> shared;  // the same order on every rank
    for (const TensorTask& task : tensors_) {
      if (readers_.count(task.entry)) shared.emplace(task.entry, &task);
    }
    for (const auto& [entry, task] : shared) {
      const fsdp2::detail::BelowDTensor below;
      at::Tensor data = local_parts(task->value->tensor(), task->fqn)[0].data;
      fsdp2::detail::broadcast_from(data, readers_.at(entry), fsdp2::detail::group_or_default(group),
                                    {task->fqn.c_str()})
          .wait();
    }
  }

  /// Whether finish() runs code of users, on any rank. Nothing else in it can fail.
  bool any_objects() const { return any_objects_; }

  LoadReport finish() {
    for (ValueTask& task : values_) {
      const bool in_place =
          task.target->kind() == Kind::Tensor && task.content.kind() == Kind::Tensor && !on_meta(task.target->tensor());
      if (in_place) {
        task.target->tensor().copy_(task.content.tensor());
      } else {
        replace(*task.target, std::move(task.content));
      }
    }
    if (!options_.allow_partial) absences_.settle();
    for (LoadedObject& object : objects_) object.object->load_state_dict(*object.state);
    return std::move(report_);
  }

 private:
  /// Entries that all ranks want whole are read by one rank each.
  void share(const std::vector<std::string>& whole) {
    int next = 0;
    for (size_t entry = 0; entry < files_.stored().metadata.entries.size(); ++entry) {
      const bool all = std::all_of(whole.begin(), whole.end(),
                                   [&](const std::string& bits) { return !bits.empty() && has_bit(bits, entry); });
      if (all) readers_.emplace(entry, next++ % static_cast<int>(whole.size()));
    }
  }

  std::string no_bits() const { return std::string((files_.stored().metadata.entries.size() + 7) / 8, '\0'); }
  static void set_bit(std::string& bits, size_t at) { bits[at / 8] |= static_cast<char>(1 << (at % 8)); }
  static bool has_bit(const std::string& bits, size_t at) { return (bits[at / 8] >> (at % 8) & 1) != 0; }

  /// Torch before 2.4 entered only dicts that hold tensors. Python's rule: if the checkpoint has
  /// keys that the target lacks and the old way of flattening gives one of those, the checkpoint is
  /// old.
  std::vector<Leaf> choose_leaves() {
    std::vector<Leaf> leaves = flatten(state_, {.rank = rank_, .objects = &objects_});
    std::unordered_set<std::string> asked;
    for (const Leaf& leaf : leaves) asked.insert(leaf.fqn);
    const auto& entries = files_.stored().metadata.entries;
    const bool all_asked =
        std::all_of(entries.begin(), entries.end(), [&](const auto& entry) { return asked.count(entry.first) != 0; });
    if (all_asked) return leaves;
    StateDict copy = state_;
    const std::vector<Leaf> old = flatten(copy, {.rank = rank_, .style = FlattenStyle::kBefore24});
    const bool is_old = std::any_of(old.begin(), old.end(), [&](const Leaf& leaf) {
      return !asked.count(leaf.fqn) && files_.stored().find(leaf.fqn) != StoredMetadata::npos;
    });
    if (!is_old) return leaves;
    objects_.clear();
    return flatten(state_, {.rank = rank_, .objects = &objects_, .style = FlattenStyle::kBefore24});
  }

  void check_leaf(const Leaf& leaf, size_t entry) {
    const TensorEntry* saved = files_.tensor(entry);
    const bool wants_tensor = leaf.value->kind() == Kind::Tensor;
    if (saved && wants_tensor) return check_tensor(leaf, entry, *saved);
    if (saved) {
      FSDP2_CHECK(leaf.value->is_none(), kInvalidArgument, "[dcp] ", leaf.fqn,
                  " is a tensor in the checkpoint, the target has a value of kind ", to_string(leaf.value->kind()),
                  "; pass a tensor of shape ", shape_text(saved->sizes), " or None");
      values_.push_back({leaf.value, files_.read_whole(entry)});
      return;
    }
    Value content = files_.read_value(entry);
    if (wants_tensor) content = tensor_of_number(leaf, content);
    values_.push_back({leaf.value, std::move(content)});
  }

  /// Optimizers of old releases count steps in plain numbers.
  Value tensor_of_number(const Leaf& leaf, const Value& content) {
    const at::Tensor& target = leaf.value->tensor();
    const bool number = content.kind() == Kind::Int || content.kind() == Kind::Double;
    FSDP2_CHECK(number && target.numel() == 1 && !is_dtensor(target), kInvalidArgument, "[dcp] ", leaf.fqn,
                " is a value of kind ", to_string(content.kind()),
                " in the checkpoint, the target has a tensor of shape ", shape_text(target.sizes().vec()),
                "; pass a value (None will do)");
    FSDP2_CHECK(content.kind() == Kind::Int || at::isFloatingType(target.scalar_type()) || options_.allow_narrowing,
                kInvalidArgument, "[dcp] ", leaf.fqn, " is a float in the checkpoint, the target is ",
                dtype_name(target.scalar_type()),
                "; that loses the fraction: set allow_narrowing = true or pass a floating-point target");
    report_.cast.push_back(leaf.fqn);
    const at::Tensor filled =
        at::empty(target.sizes(), target.options().device(on_meta(target) ? c10::Device(c10::kCPU) : target.device()));
    if (content.kind() == Kind::Int) {
      filled.fill_(content.integer());
    } else {
      filled.fill_(content.number());
    }
    return filled;
  }

  void check_tensor(const Leaf& leaf, size_t entry, const TensorEntry& saved) {
    const at::Tensor& target = leaf.value->tensor();
    const std::vector<int64_t> sizes = target.sizes().vec();
    const bool one_element = target.numel() == 1 && checked_numel(saved.sizes) == 1;
    FSDP2_CHECK(sizes == saved.sizes || one_element, kInvalidArgument, "[dcp] ", leaf.fqn, " has shape ",
                shape_text(saved.sizes), " in the checkpoint, the target has shape ", shape_text(sizes),
                "; build the model with the sizes it was saved with");
    if (target.scalar_type() != saved.dtype) {
      FSDP2_CHECK(options_.allow_narrowing || !is_narrowing(saved.dtype, target.scalar_type()), kInvalidArgument,
                  "[dcp] ", leaf.fqn, " is ", dtype_name(saved.dtype), " in the checkpoint, the target is ",
                  dtype_name(target.scalar_type()),
                  "; that cast can lose information: set allow_narrowing = true or load into ",
                  dtype_name(saved.dtype));
      report_.cast.push_back(leaf.fqn);
    }
    if (sizes != saved.sizes) report_.reshaped.push_back(leaf.fqn);
    files_.check_tensor(entry);
    check_chunks(leaf, entry, saved, sizes != saved.sizes);
    tensors_.push_back({entry, leaf.fqn, leaf.value, sizes != saved.sizes});
  }

  /// Only of the files that this rank needs.
  void check_chunks(const Leaf& leaf, size_t entry, const TensorEntry& saved, bool reshaped) {
    const std::vector<LocalPart> parts = local_parts(leaf.value->tensor(), leaf.fqn);
    for (size_t i = 0; i < saved.chunks.size(); ++i) {
      const bool needed = std::any_of(parts.begin(), parts.end(), [&](const LocalPart& part) {
        return part.data.numel() > 0 && (reshaped || intersect(saved.chunks[i], part.box));
      });
      if (needed) files_.check_chunk(entry, i);
    }
  }

  void check_unexpected() const {
    if (!options_.allow_unexpected) return;
    std::vector<std::string> names;
    for (const std::string& fqn : report_.unexpected) {
      if (!matches_any(*options_.allow_unexpected, fqn)) names.push_back(fqn);
    }
    FSDP2_CHECK(names.empty(), kInvalidArgument, "[dcp] the checkpoint ", files_.folder().string(),
                " has keys that the target lacks: ", some_of(names),
                "; add them to it, or name them in allow_unexpected");
  }

  /// A leaf stays what it was marked as.
  static void replace(Value& target, Value content) {
    ValueAccess::set_per_rank(content, ValueAccess::is_per_rank(target));
    target = std::move(content);
  }

  std::tuple<std::string_view, uint64_t> first_place(const TensorTask& task) const {
    const auto& places = files_.stored().locations[task.entry];
    if (places.empty()) return {};
    return {places[0].file, places[0].offset};
  }

  static const void* memory_of(const TensorTask& task) {
    const at::Tensor& tensor = task.value->tensor();
    const fsdp2::detail::DTensorSpec* spec = fsdp2::detail::spec_of(tensor);
    return (spec ? spec->local : tensor).storage().unsafeGetStorageImpl();
  }

  bool can_be_broadcast(const TensorTask& task) const {
    const at::Tensor& tensor = task.value->tensor();
    if (task.reshaped || tensor.scalar_type() != files_.tensor(task.entry)->dtype) return false;
    const fsdp2::detail::DTensorSpec* spec = fsdp2::detail::spec_of(tensor);
    const at::Tensor& data = spec ? spec->local : tensor;
    return data.sizes() == tensor.sizes() && data.is_contiguous() && !data.is_conj() && !data.is_neg() &&
           data.nbytes() >= kLeastBroadcastBytes &&
           fsdp2::detail::has_backend(*fsdp2::detail::group_or_default(options_.group), data.device().type());
  }

  void fill_tensor(TensorTask& task) {
    const std::vector<LocalPart> parts = local_parts(task.value->tensor(), task.fqn);
    if (const std::string* first = filled_before(parts, task.fqn)) return check_same(task, parts, *first);
    const fsdp2::detail::BelowDTensor below;
    const TensorEntry& saved = *files_.tensor(task.entry);
    for (size_t i = 0; i < saved.chunks.size(); ++i) {
      const Chunk& from = saved.chunks[i];
      std::optional<TensorItem> item;  // opened when the first part needs it
      for (const LocalPart& part : parts) {
        if (task.reshaped) {
          if (checked_numel(from.sizes) == 1)
            part.data.copy_(files_.open_chunk(task.entry, i).whole().reshape(part.data.sizes()));
          continue;
        }
        const std::optional<Chunk> meet = part.data.numel() > 0 ? intersect(from, part.box) : std::nullopt;
        if (!meet) continue;
        if (!item) item.emplace(files_.open_chunk(task.entry, i));
        const at::Tensor to = part_of(part.data, relative_to(*meet, part.box.offsets));
        item->copy_window(relative_to(*meet, from.offsets), to);
      }
    }
  }

  /// Tied tensors are the same memory under several keys: the first one fills it, and is returned for the others.
  const std::string* filled_before(const std::vector<LocalPart>& parts, const std::string& fqn) {
    if (parts.empty() || parts[0].data.numel() == 0) return nullptr;
    const at::Tensor& data = parts[0].data;
    const auto [known, fresh] = filled_.try_emplace(
        std::make_tuple(data.data_ptr(), data.sizes().vec(), data.strides().vec(), data.scalar_type()), fqn);
    return fresh ? nullptr : &known->second;
  }

  /// One memory cannot hold what was saved with two values.
  void check_same(const TensorTask& task, const std::vector<LocalPart>& parts, const std::string& first) {
    const fsdp2::detail::BelowDTensor below;
    const TensorEntry& saved = *files_.tensor(task.entry);
    for (size_t i = 0; i < saved.chunks.size() && !task.reshaped; ++i) {
      for (const LocalPart& part : parts) {
        const std::optional<Chunk> meet = part.data.numel() > 0 ? intersect(saved.chunks[i], part.box) : std::nullopt;
        if (!meet) continue;
        const at::Tensor there = part_of(part.data, relative_to(*meet, part.box.offsets)).contiguous();
        const at::Tensor here = at::empty_like(there);
        files_.open_chunk(task.entry, i).copy_window(relative_to(*meet, saved.chunks[i].offsets), here);
        const auto bytes = [](const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); };
        FSDP2_CHECK(
            bytes(here).equal(bytes(there)), kInvalidArgument, "[dcp] ", first, " and ", task.fqn,
            " are one tensor in the target, and two with different values in the checkpoint; untie them, or leave "
            "one of the keys out");
      }
    }
  }

  StateDict& state_;
  const LoadOptions& options_;
  int rank_;
  CheckpointFiles files_;
  std::string asked_;  // one bit for each entry
  LoadReport report_;
  Absences absences_;
  std::vector<LoadedObject> objects_;
  bool any_objects_ = false;  // on any rank
  std::vector<TensorTask> tensors_;
  std::map<size_t, int> readers_;  // of the entries that are read by one rank and broadcast
  std::vector<ValueTask> values_;
  // First key by memory.
  std::map<std::tuple<const void*, std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>, std::string> filled_;
};

}  // namespace

LoadReport load(StateDict& state, const std::filesystem::path& path, const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  const Exchange exchange(options.group);
  const std::shared_ptr<Storage> storage = or_local(options.storage);
  std::exception_ptr earlier;  // on every rank before any step: told once, and together
  try {
    finish_async_save();  // it may be what is loaded
  } catch (...) {
    earlier = std::current_exception();
  }
  const std::string first = exchange.broadcast("reading the metadata", [&] {
    if (earlier) std::rethrow_exception(earlier);
    ByteWriter out;
    out.text(path.lexically_normal().string());
    out.text(read_metadata_files(*storage, path).encode());
    return out.take();
  });
  std::optional<Loader> loader;
  const std::vector<std::string> messages = exchange.gather("checking a checkpoint", [&] {
    if (earlier) std::rethrow_exception(earlier);
    ByteReader in(first);
    const std::string path_of_first = in.text();
    FSDP2_CHECK(path.lexically_normal() == path_of_first, kInvalidArgument, "[dcp] this rank loads from ",
                path.string(), ", rank 0 from ", path_of_first, "; all ranks have to pass the same path");
    CheckpointFiles files(storage, path, options.verify_checksums, MetadataFiles::decode(in.text()));
    loader.emplace(state, std::move(files), options, exchange.rank());
    loader->check();
    return loader->encode(wants_broadcast(options, exchange));
  });
  loader->learn(messages);
  exchange.gather("reading a checkpoint", [&] {
    loader->read();
    return std::string();
  });
  loader->broadcast(options.group);
  if (!loader->any_objects()) return loader->finish();
  LoadReport report;
  exchange.gather("loading values and objects", [&] {
    report = loader->finish();
    return std::string();
  });
  return report;
}

}  // namespace fsdp2::dcp
