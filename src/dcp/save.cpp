#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>
#include <zlib.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "dcp/exchange.h"
#include "dcp/file_system.h"
#include "dcp/flatten.h"
#include "dcp/geometry.h"
#include "dcp/item.h"
#include "dcp/local_parts.h"
#include "dcp/scalar_types.h"
#include "dcp/stored_metadata.h"

namespace fsdp2::dcp {
namespace {

using namespace detail;

/// What this rank could write for one key.
struct LocalItem {
  std::string fqn;
  Path path;
  std::optional<TensorEntry> tensor;  // chunks: those of this rank; none for a value
  std::vector<at::Tensor> data;       // one per chunk
  PickledValue value;
};

/// What all ranks together write for one key.
struct GlobalItem {
  std::string fqn;
  Path path;
  std::optional<TensorEntry> tensor;
  int first_rank = 0;
  uint64_t fingerprint = 0;               // of a value
  std::vector<std::vector<int>> holders;  // ranks that have chunk i (the value)
  std::vector<int> owners;                // the one that writes it
};

std::vector<LocalItem> make_local_items(StateDict& state) {
  std::vector<LocalItem> items;
  for (Leaf& leaf : flatten(state)) {
    LocalItem item{std::move(leaf.fqn), std::move(leaf.path), {}, {}, {}};
    if (leaf.value->kind() == Kind::Tensor) {
      const at::Tensor& tensor = leaf.value->tensor();
      item.tensor = TensorEntry{tensor.scalar_type(), tensor.sizes().vec(), {}};
      for (LocalPart& part : local_parts(tensor, item.fqn)) {
        check_storable(part.data, item.fqn);
        item.tensor->chunks.push_back(std::move(part.box));
        item.data.push_back(std::move(part.data));
      }
      dtype_name(tensor.scalar_type());  // also where this rank has no part
    } else {
      item.value = pickle_value(*leaf.value, item.fqn);
    }
    items.push_back(std::move(item));
  }
  return items;
}

uint64_t fingerprint(const PickledValue& value) {
  const auto head =
      static_cast<uint64_t>(crc32_z(0, reinterpret_cast<const Bytef*>(value.pickle.data()), value.pickle.size()));
  return head | (static_cast<uint64_t>(value.pickle.size()) << 32);
}

std::string encode_plan(const std::string& staging, const std::vector<LocalItem>& items) {
  ByteWriter out;
  out.text(staging);
  for (const LocalItem& item : items) {
    out.text(item.fqn);
    out.number(uint64_t{item.path.size()});
    for (const auto& part : item.path) {
      const auto* text = std::get_if<std::string>(&part);
      out.number(uint8_t{text != nullptr});
      if (text != nullptr) {
        out.text(*text);
      } else {
        out.number(std::get<int64_t>(part));
      }
    }
    out.number(uint8_t{item.tensor.has_value()});
    if (!item.tensor) {
      out.number(fingerprint(item.value));
      continue;
    }
    out.number(static_cast<int8_t>(item.tensor->dtype));
    out.numbers(item.tensor->sizes);
    out.number(uint64_t{item.tensor->chunks.size()});
    for (const Chunk& chunk : item.tensor->chunks) {
      out.numbers(chunk.offsets);
      out.numbers(chunk.sizes);
    }
  }
  return out.take();
}

/// Joins the plans of all ranks. Every rank does it and comes to the same result.
class Planner {
 public:
  /// Returns the staging folder that the plan names.
  std::string add(int rank, const std::string& plan) {
    ByteReader in(plan);
    const std::string staging = in.text();
    while (!in.done()) add_item(rank, in);
    return staging;
  }

  std::vector<GlobalItem> finish(int world_size) {
    for (const GlobalItem& item : items_) {
      if (!item.tensor) continue;
      const std::string fault = cover_fault(item.tensor->sizes, item.tensor->chunks);
      FSDP2_CHECK(fault.empty(), kInvalidArgument, "[dcp] ", item.fqn, " of shape ", shape_text(item.tensor->sizes),
                  ": what the ranks hold is not the whole tensor: ", fault,
                  "; every rank of the tensor's mesh has to save it, with the same placements");
    }
    // Each part goes to the rank with the least to write so far among those that have it.
    std::vector<int64_t> load(static_cast<size_t>(world_size), 0);
    for (GlobalItem& item : items_) {
      for (size_t i = 0; i < item.holders.size(); ++i) {
        const int owner = *std::min_element(item.holders[i].begin(), item.holders[i].end(), [&](int a, int b) {
          return load[static_cast<size_t>(a)] < load[static_cast<size_t>(b)];
        });
        item.owners.push_back(owner);
        load[static_cast<size_t>(owner)] += item.tensor ? checked_numel(item.tensor->chunks[i].sizes).value_or(0) *
                                                              static_cast<int64_t>(c10::elementSize(item.tensor->dtype))
                                                        : 1;
      }
    }
    return std::move(items_);
  }

 private:
  void add_item(int rank, ByteReader& in) {
    std::string fqn = in.text();
    Path path(in.number<uint64_t>());
    for (auto& part : path) {
      if (in.number<uint8_t>()) {
        part = in.text();
      } else {
        part = in.number<int64_t>();
      }
    }
    const bool is_tensor = in.number<uint8_t>() != 0;
    const auto [known, fresh] = by_name_.try_emplace(fqn, items_.size());
    if (fresh) {
      items_.push_back({fqn, std::move(path), {}, rank, 0, {}, {}});
      if (is_tensor) items_.back().tensor.emplace();
    }
    GlobalItem& item = items_[known->second];
    const auto disagree = [&](const std::string& here, const std::string& there) {
      FSDP2_THROW(kInvalidArgument, "[dcp] ", fqn, " differs between ranks: rank ", item.first_rank, " has ", there,
                  ", rank ", rank, " has ", here, "; a key must mean the same on every rank");
    };
    if (is_tensor != item.tensor.has_value())
      disagree(is_tensor ? "a tensor" : "a value", is_tensor ? "a value" : "a tensor");
    if (!is_tensor) {
      const auto print = in.number<uint64_t>();
      if (fresh) item.fingerprint = print;
      if (print != item.fingerprint) disagree("another value", "one value");
      item.holders.resize(1);
      item.holders[0].push_back(rank);
      return;
    }
    const auto dtype = static_cast<at::ScalarType>(in.number<int8_t>());
    std::vector<int64_t> sizes = in.numbers();
    TensorEntry& entry = *item.tensor;
    if (fresh) {
      entry.dtype = dtype;
      entry.sizes = sizes;
    }
    if (dtype != entry.dtype) disagree(std::string(dtype_name(dtype)), std::string(dtype_name(entry.dtype)));
    if (sizes != entry.sizes) disagree("shape " + shape_text(sizes), "shape " + shape_text(entry.sizes));
    for (auto left = in.number<uint64_t>(); left > 0; --left) {
      std::vector<int64_t> offsets = in.numbers();
      Chunk chunk{std::move(offsets), in.numbers()};
      const auto same = std::find_if(entry.chunks.begin(), entry.chunks.end(), [&](const Chunk& other) {
        return other.offsets == chunk.offsets && other.sizes == chunk.sizes;
      });
      const auto place = static_cast<size_t>(same - entry.chunks.begin());
      if (same == entry.chunks.end()) {
        entry.chunks.push_back(std::move(chunk));
        item.holders.emplace_back();
      }
      item.holders[place].push_back(rank);
    }
  }

  std::vector<GlobalItem> items_;
  std::unordered_map<std::string, size_t> by_name_;
};

/// Writes this rank's file; returns where each of its parts lies.
std::string write_items(const std::filesystem::path& folder, int rank, const std::vector<GlobalItem>& plan,
                        const std::vector<LocalItem>& items, bool checksums) {
  std::unordered_map<std::string_view, const LocalItem*> by_name;
  for (const LocalItem& item : items) by_name.emplace(item.fqn, &item);
  const std::string name = c10::str("__", rank, "_0.distcp");
  FileWriter file(folder / name);
  ByteWriter result;
  const auto note = [&](size_t item, size_t part, uint64_t offset) {
    result.number(uint64_t{item});
    result.number(uint64_t{part});
    result.text(name);
    result.number(offset);
    result.number(file.position() - offset);
  };
  for (size_t i = 0; i < plan.size(); ++i) {
    if (plan[i].tensor || plan[i].owners[0] != rank) continue;
    const uint64_t offset = file.position();
    write_value_item(file, by_name.at(plan[i].fqn)->value, checksums);
    note(i, 0, offset);
  }
  for (size_t i = 0; i < plan.size(); ++i) {
    if (!plan[i].tensor) continue;
    for (size_t k = 0; k < plan[i].owners.size(); ++k) {
      if (plan[i].owners[k] != rank) continue;
      const LocalItem& item = *by_name.at(plan[i].fqn);
      const auto& chunks = item.tensor->chunks;
      const auto mine = std::find_if(chunks.begin(), chunks.end(), [&](const Chunk& chunk) {
        return chunk.offsets == plan[i].tensor->chunks[k].offsets;
      });
      const uint64_t offset = file.position();
      write_tensor_item(file, storable(item.data[static_cast<size_t>(mine - chunks.begin())], item.fqn), checksums);
      note(i, k, offset);
    }
  }
  file.close();
  return result.take();
}

StoredMetadata assemble(std::vector<GlobalItem> plan, const std::vector<std::string>& written) {
  StoredMetadata stored;
  for (GlobalItem& item : plan) {
    stored.locations.emplace_back(item.owners.size());
    if (item.tensor) {
      stored.metadata.entries.emplace_back(item.fqn, std::move(*item.tensor));
    } else {
      stored.metadata.entries.emplace_back(item.fqn, BytesEntry{});
    }
    stored.metadata.paths.emplace(item.fqn, std::move(item.path));
  }
  for (const std::string& report : written) {
    ByteReader in(report);
    while (!in.done()) {
      const auto item = in.number<uint64_t>(), part = in.number<uint64_t>();
      ItemLocation& place = stored.locations.at(item).at(part);
      place.file = in.text();
      place.offset = in.number<uint64_t>();
      place.length = in.number<uint64_t>();
      place.present = true;
    }
  }
  return stored;
}

}  // namespace

Metadata save(const StateDict& state, const std::filesystem::path& path, const SaveOptions& options) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  const Exchange exchange(options.group);
  std::optional<StagingFolder> staging;  // on rank 0
  try {
    StateDict own = state;
    std::vector<LocalItem> items;
    const std::vector<std::string> plans = exchange.gather("planning a save", [&] {
      items = make_local_items(own);
      if (exchange.rank() == 0) staging.emplace(StagingFolder::create(path, options.overwrite));
      return encode_plan(staging ? staging->path().string() : std::string(), items);
    });
    std::filesystem::path folder;
    std::vector<GlobalItem> plan;
    const std::vector<std::string> written = exchange.gather("writing its part of a checkpoint", [&] {
      Planner planner;
      for (size_t rank = 0; rank < plans.size(); ++rank) {
        const std::string named = planner.add(static_cast<int>(rank), plans[rank]);
        if (rank == 0) folder = named;
      }
      plan = planner.finish(exchange.world_size());
      return write_items(folder, exchange.rank(), plan, items, options.checksums);
    });
    const StoredMetadata stored = assemble(std::move(plan), written);
    exchange.gather("committing a checkpoint", [&] {
      if (exchange.rank() != 0) return std::string();
      FileWriter file(folder / kMetadataName);
      const std::string content = encode_metadata(stored);
      file.write(content.data(), content.size());
      file.close();
      staging->commit();
      return std::string();
    });
    return stored.metadata;
  } catch (...) {
    if (staging) staging->discard();
    throw;
  }
}

}  // namespace fsdp2::dcp
