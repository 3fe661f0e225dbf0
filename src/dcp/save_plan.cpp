#include "dcp/save_plan.h"

#include <fsdp2/error.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "dcp/geometry.h"
#include "dcp/scalar_types.h"

namespace fsdp2::dcp::detail {
namespace {

std::array<uint64_t, 2> digest(const std::string& text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return {hash.low64, hash.high64};
}

int64_t bytes_of(const TensorEntry& tensor, const Chunk& chunk) {
  return checked_numel(chunk.sizes).value_or(0) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

class Planner {
 public:
  explicit Planner(Replicas replicas) : replicas_(replicas) {}

  void add(int rank, const std::string& layout) {
    ByteReader in(layout);
    in.number<uint8_t>();  // replicas: for the digest
    while (!in.done()) add_item(rank, in);
  }

  std::vector<PlannedItem> finish(int world_size) {
    for (const PlannedItem& item : items_) {
      if (!item.tensor) continue;
      const std::string fault = cover_fault(item.tensor->sizes, item.tensor->chunks);
      FSDP2_CHECK(fault.empty(), kInvalidArgument, "[dcp] ", item.fqn, " of shape ", shape_text(item.tensor->sizes),
                  ": what the ranks hold is not the whole tensor: ", fault,
                  "; every rank of the tensor's mesh has to save it, with the same placements");
    }
    // Each part goes to the rank with the least to write so far among those that have it.
    std::vector<int64_t> load(static_cast<size_t>(world_size), 0);
    const auto lighter = [&](int a, int b) { return load[static_cast<size_t>(a)] < load[static_cast<size_t>(b)]; };
    for (PlannedItem& item : items_) {
      for (size_t i = 0; i < item.holders.size(); ++i) {
        const auto& holders = item.holders[i];  // in order of rank
        const int owner =
            replicas_ == Replicas::LowestRank ? holders[0] : *std::min_element(holders.begin(), holders.end(), lighter);
        item.owners.push_back(owner);
        load[static_cast<size_t>(owner)] += item.tensor ? bytes_of(*item.tensor, item.tensor->chunks[i]) : 1;
      }
    }
    return std::move(items_);
  }

  std::vector<PlannedItem> finish_own(int rank) {
    for (PlannedItem& item : items_) item.owners.assign(item.holders.size(), rank);
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
      items_.push_back({fqn, std::move(path), {}, rank, {}, {}});
      if (is_tensor) items_.back().tensor.emplace();
    }
    PlannedItem& item = items_[known->second];
    const auto disagree = [&](const std::string& here, const std::string& there) {
      FSDP2_THROW(kInvalidArgument, "[dcp] ", fqn, " differs between ranks: rank ", item.first_rank, " has ", there,
                  ", rank ", rank, " has ", here, "; a key must mean the same on every rank");
    };
    if (is_tensor != item.tensor.has_value())
      disagree(is_tensor ? "a tensor" : "a value", is_tensor ? "a value" : "a tensor");
    if (!is_tensor) {
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
      ByteWriter box;
      box.number(uint64_t{known->second});
      box.numbers(chunk.offsets);
      box.numbers(chunk.sizes);
      const auto [place, is_new] = places_.try_emplace(box.take(), entry.chunks.size());
      if (is_new) {
        entry.chunks.push_back(std::move(chunk));
        item.holders.emplace_back();
      }
      item.holders[place->second].push_back(rank);
    }
  }

  Replicas replicas_;
  std::vector<PlannedItem> items_;
  std::unordered_map<std::string, size_t> by_name_;
  std::unordered_map<std::string, size_t> places_;  // of chunks in their item, by item and box
};

struct CachedPlan {
  int rank = 0, world_size = 0;
  std::array<uint64_t, 2> layout{};  // of this rank
  std::shared_ptr<const SavePlan> plan;
};

struct Plans {
  std::mutex mutex;
  std::unordered_map<const void*, CachedPlan> by_group;
};
Plans& plans() {
  static Plans& all = *new Plans;  // a save in the background may outlive the statics of this library
  return all;
}

}  // namespace

std::string encode_layout(const std::vector<SaveItem>& items, Replicas replicas) {
  ByteWriter out;
  out.number(static_cast<uint8_t>(replicas));
  for (const SaveItem& item : items) {
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
    if (!item.tensor) continue;
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

SavePlan make_plan(const std::vector<std::string>& layouts, Replicas replicas) {
  Planner planner(replicas);
  ByteWriter ids;
  for (size_t rank = 0; rank < layouts.size(); ++rank) {
    planner.add(static_cast<int>(rank), layouts[rank]);
    for (const uint64_t part : digest(layouts[rank])) ids.number(part);
  }
  return {planner.finish(static_cast<int>(layouts.size())), digest(ids.take())};
}

SavePlan make_own_plan(const std::string& layout, int rank) {
  Planner planner(Replicas::Spread);
  planner.add(rank, layout);
  return {planner.finish_own(rank), {}};
}

std::shared_ptr<const SavePlan> find_plan(const Exchange& exchange, const std::string& layout) {
  const std::lock_guard guard(plans().mutex);
  const auto found = plans().by_group.find(exchange.id());
  if (found == plans().by_group.end()) return nullptr;
  const CachedPlan& cached = found->second;
  const bool same =
      cached.rank == exchange.rank() && cached.world_size == exchange.world_size() && cached.layout == digest(layout);
  return same ? cached.plan : nullptr;
}

void keep_plan(const Exchange& exchange, const std::string& layout, std::shared_ptr<const SavePlan> plan) {
  const std::lock_guard guard(plans().mutex);
  plans().by_group[exchange.id()] = {exchange.rank(), exchange.world_size(), digest(layout), std::move(plan)};
}

}  // namespace fsdp2::dcp::detail
