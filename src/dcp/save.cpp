#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fsdp2/dcp/dcp.h>
#include <fsdp2/error.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "dcp/file_writer.h"
#include "dcp/save_run.h"
#include "dcp/stored_metadata.h"

namespace fsdp2::dcp {

namespace detail {
namespace {

void check_options(const SaveOptions& options) {
  FSDP2_CHECK(options.files_per_rank >= 1 && options.files_per_rank <= 1024, kInvalidArgument,
              "[dcp] SaveOptions::files_per_rank is ", options.files_per_rank, "; it is 1 to 1024");
  FSDP2_CHECK(!options.file_per_item || options.files_per_rank == 1, kInvalidArgument,
              "[dcp] SaveOptions::file_per_item and files_per_rank exclude each other");
  FSDP2_CHECK(!options.safetensors || !options.zstd, kInvalidArgument,
              "[dcp] SaveOptions::safetensors and zstd exclude each other: a blob is read in parts");
}

/// Content hashes of what other ranks hold too: they must have the same. In order of the plan.
std::vector<uint64_t> replica_prints(int rank, const SavePlan& plan, const std::vector<SaveItem>& items) {
  std::unordered_map<std::string_view, const SaveItem*> by_name;
  std::vector<uint64_t> prints;
  for (const PlannedItem& planned : plan.items) {
    for (size_t k = 0; k < planned.holders.size(); ++k) {
      const auto& holders = planned.holders[k];
      if (holders.size() < 2 || !std::binary_search(holders.begin(), holders.end(), rank)) continue;
      if (by_name.empty()) {
        for (const SaveItem& item : items) by_name.emplace(item.fqn, &item);
      }
      const SaveItem& item = *by_name.at(planned.fqn);
      uint64_t print = XXH3_64bits(item.value.pickle.data(), item.value.pickle.size());
      const auto mix = [&](const at::Tensor& tensor) {
        const at::Tensor plain = storable(tensor, item.fqn);
        if (plain.nbytes() > 0) print = XXH3_64bits_withSeed(plain.const_data_ptr(), plain.nbytes(), print);
      };
      if (planned.tensor) {
        const auto& mine = item.tensor->chunks;
        for (size_t i = 0; i < mine.size(); ++i) {
          if (mine[i].offsets == planned.tensor->chunks[k].offsets && mine[i].sizes == planned.tensor->chunks[k].sizes)
            mix(item.data[i]);
        }
      } else {
        for (const at::Tensor& tensor : item.value.tensors) mix(tensor);
      }
      prints.push_back(print);
    }
  }
  return prints;
}

void check_replicas(const SavePlan& plan, const std::vector<std::vector<uint64_t>>& prints) {
  std::vector<size_t> next(prints.size(), 0);
  for (const PlannedItem& planned : plan.items) {
    for (const auto& holders : planned.holders) {
      if (holders.size() < 2) continue;
      const auto print = [&](int rank) {
        return prints[static_cast<size_t>(rank)].at(next[static_cast<size_t>(rank)]);
      };
      for (const int rank : holders) {
        FSDP2_CHECK(print(rank) == print(holders[0]), kInvalidArgument, "[dcp] ", planned.fqn,
                    " differs between ranks: rank ", holders[0], " has one ", planned.tensor ? "tensor" : "value",
                    ", rank ", rank, " another; a key must mean the same on every rank: mark it with dcp::per_rank() ",
                    "if it is meant to differ",
                    planned.tensor ? ", or make it equal first (running statistics of a module: average them)" : "");
      }
      for (const int rank : holders) ++next[static_cast<size_t>(rank)];
    }
  }
}

std::string encode_written(const std::vector<WrittenFile>& files, const std::vector<uint64_t>& prints) {
  ByteWriter out;
  out.number(uint64_t{prints.size()});
  for (const uint64_t print : prints) out.number(print);
  for (const WrittenFile& file : files) {
    out.text(file.name);
    out.number(uint64_t{file.parts.size()});
    for (const WrittenPart& part : file.parts) {
      out.number(part.item);
      out.number(part.part);
      out.number(part.offset);
      out.number(part.length);
    }
    out.number(uint64_t{file.bytes.size()});
    for (const WrittenBytes& bytes : file.bytes) {
      out.number(bytes.offset);
      out.number(bytes.length);
      out.number(uint64_t{bytes.checksums.size()});
      for (const uint32_t sum : bytes.checksums) out.number(sum);
    }
  }
  return out.take();
}

/// Every rank's report put together.
class Assembly {
 public:
  Assembly(const SavePlan& plan, std::vector<std::string> transforms) : transforms_(std::move(transforms)) {
    for (const PlannedItem& item : plan.items) {
      stored.locations.emplace_back(item.owners.size());
      if (item.tensor) {
        stored.metadata.entries.emplace_back(item.fqn, *item.tensor);
      } else {
        stored.metadata.entries.emplace_back(item.fqn, BytesEntry{});
      }
      stored.metadata.paths.emplace(item.fqn, item.path);
    }
    stored.index();
  }

  /// `own`: the report is in terms of the plan of this assembly.
  void add(const std::string& report, bool own) {
    ByteReader in(report);
    auto& rank_prints = prints.emplace_back(in.number<uint64_t>());
    for (uint64_t& print : rank_prints) print = in.number<uint64_t>();
    while (!in.done()) {
      const std::string name = in.text();
      checksums.add_file(name);
      for (auto parts = in.number<uint64_t>(); parts > 0; --parts) {
        const auto item = in.number<uint64_t>(), part = in.number<uint64_t>();
        const auto offset = in.number<uint64_t>(), length = in.number<uint64_t>();
        if (own) stored.locations.at(item).at(part) = {name, offset, length, true, transforms_};
      }
      for (auto ranges = in.number<uint64_t>(); ranges > 0; --ranges) {
        const auto offset = in.number<uint64_t>(), length = in.number<uint64_t>();
        std::vector<uint32_t> sums(in.number<uint64_t>());
        for (uint32_t& sum : sums) sum = in.number<uint32_t>();
        checksums.add(name, offset, length, sums);
      }
    }
  }

  /// Every part was written by somebody.
  void check_complete() const {
    for (size_t i = 0; i < stored.locations.size(); ++i) {
      for (const ItemLocation& place : stored.locations[i]) {
        FSDP2_CHECK(place.present, kPeerFailed, "[dcp] no rank has written ", stored.metadata.entries[i].first,
                    "; the ranks have come to different plans");
      }
    }
  }

  StoredMetadata stored;
  Checksums checksums;
  std::vector<std::vector<uint64_t>> prints;  // by rank

 private:
  std::vector<std::string> transforms_;
};

void write_small(Storage& storage, const std::string& place, const std::string& name, const std::string& content) {
  const std::unique_ptr<OutputFile> file = storage.create(place, name);
  file->write(content.data(), content.size());
  file->finish();
}

/// What has to be the same on every rank, as users write it.
std::string describe(const std::filesystem::path& path, const SaveOptions& options) {
  const auto yes_or_no = [](bool value) { return value ? "true" : "false"; };
  return c10::str("path ", path.lexically_normal().string(), ", overwrite = ", yes_or_no(options.overwrite),
                  ", checksums = ", yes_or_no(options.checksums),
                  ", replicas = ", options.replicas == Replicas::Spread ? "Spread" : "LowestRank",
                  ", safetensors = ", yes_or_no(options.safetensors), ", zstd = ", yes_or_no(options.zstd),
                  ", rank_local_metadata = ", yes_or_no(options.rank_local_metadata));
}

/// The first message of a rank.
struct Proposal {
  std::string call;   // see describe()
  std::string place;  // of rank 0
  std::array<uint64_t, 2> plan{};
  std::string layout;

  std::string encode() const {
    ByteWriter out;
    out.text(call);
    out.text(place);
    for (const uint64_t part : plan) out.number(part);
    out.text(layout);
    return out.take();
  }
  static Proposal decode(const std::string& message) {
    ByteReader in(message);
    Proposal proposal{in.text(), in.text(), {}, {}};
    for (uint64_t& part : proposal.plan) part = in.number<uint64_t>();
    proposal.layout = in.text();
    return proposal;
  }
};

/// `.metadata` that can be read again.
std::string encoded(const StoredMetadata& stored) {
  std::string content = encode_metadata(stored);
  FSDP2_CHECK(content.size() < (size_t{1} << 31), kUnsupported, "[dcp] the metadata of this checkpoint have ",
              content.size(), " bytes; at most 2 GiB are read: save the state in several checkpoints");
  return content;
}

/// A save that goes through its steps.
class SaveRun {
 public:
  SaveRun(const Exchange& exchange, const std::filesystem::path& path, const SaveOptions& options,
          WriteProgress* progress)
      : exchange_(exchange), path_(path), options_(options), progress_(progress), storage_(or_local(options.storage)) {}

  Metadata run(const std::function<std::vector<SaveItem>()>& make_items) {
    try {
      plan(make_items);
      Metadata metadata = write();
      began_ = false;
      return metadata;
    } catch (...) {
      if (began_) storage_->discard(place_);
      throw;
    }
  }

 private:
  bool is_first() const { return exchange_.rank() == 0; }

  /// Every rank says what it has, unless the plan of the last save holds for all.
  void plan(const std::function<std::vector<SaveItem>()>& make_items) {
    std::string layout;
    std::shared_ptr<const SavePlan> cached;
    const auto own = exchange_.gather("planning a save", [&] {
      check_options(options_);
      items_ = make_items();
      layout = encode_layout(items_, options_.replicas);
      if (!options_.rank_local_metadata) cached = find_plan(exchange_, layout);
      if (is_first()) {
        place_ = storage_->begin(path_, options_.overwrite);
        began_ = true;
      }
      // Alone, there is nobody to wait for with the layout.
      return Proposal{describe(path_, options_), place_, cached ? cached->id : std::array<uint64_t, 2>{},
                      exchange_.world_size() == 1 ? layout : std::string()}
          .encode();
    });
    std::vector<Proposal> proposals;
    for (const std::string& message : own) proposals.push_back(Proposal::decode(message));
    place_ = proposals[0].place;
    for (size_t rank = 1; rank < proposals.size(); ++rank) {
      FSDP2_CHECK(proposals[rank].call == proposals[0].call, kInvalidArgument,
                  "[dcp] ranks save in different ways: rank 0 with ", proposals[0].call, "; rank ", rank, " with ",
                  proposals[rank].call, "; all ranks have to pass the same");
    }
    if (options_.rank_local_metadata) {
      plan_ = std::make_shared<SavePlan>(make_own_plan(layout, exchange_.rank()));
      return;
    }
    const bool all_cached = std::all_of(proposals.begin(), proposals.end(), [&](const Proposal& proposal) {
      return proposal.plan == proposals[0].plan && proposal.plan != std::array<uint64_t, 2>{};
    });
    if (all_cached) {
      plan_ = std::move(cached);
      return;
    }
    std::vector<std::string> layouts{proposals[0].layout};
    if (exchange_.world_size() > 1) layouts = exchange_.gather("planning a save", [&] { return layout; });
    plan_ = std::make_shared<SavePlan>(make_plan(layouts, options_.replicas));
    keep_plan(exchange_, layout, plan_);
  }

  Metadata write() {
    const std::vector<std::string> reports = exchange_.gather("writing its part of a checkpoint", [&] {
      FSDP2_CHECK(
          is_first() || storage_->sees(place_), kIo, "[dcp] the folder ", place_,
          ", which rank 0 made for this save, is not there on this rank; save to a path on a file system that all "
          "ranks share");
      const auto files = write_files(*storage_, place_, exchange_.rank(), *plan_, items_, options_, progress_);
      return encode_written(files, options_.rank_local_metadata ? std::vector<uint64_t>()
                                                                : replica_prints(exchange_.rank(), *plan_, items_));
    });
    Assembly all(*plan_, transforms_of(options_));
    for (size_t rank = 0; rank < reports.size(); ++rank) {
      all.add(reports[rank], !options_.rank_local_metadata || static_cast<int>(rank) == exchange_.rank());
    }
    if (!options_.rank_local_metadata) {
      check_replicas(*plan_, all.prints);
      all.check_complete();
    }
    return commit(std::move(all));
  }

  Metadata commit(Assembly all) {
    const std::string name =
        options_.rank_local_metadata ? c10::str("__", exchange_.rank(), kMetadataName) : kMetadataName;
    if (options_.rank_local_metadata) {
      const std::vector<std::string> contents = exchange_.gather("writing its metadata", [&] {
        std::string content = encoded(all.stored);
        write_small(*storage_, place_, name, content);
        return content;
      });
      for (size_t rank = 0; rank < contents.size(); ++rank)
        all.checksums.add(c10::str("__", rank, kMetadataName), 0, contents[rank].size(),
                          block_checksums(contents[rank]));
    }
    exchange_.gather("committing a checkpoint", [&] {
      if (!is_first()) return std::string();
      std::string content;
      if (!options_.rank_local_metadata) {
        content = encoded(all.stored);
        all.checksums.add(name, 0, content.size(), block_checksums(content));
      }
      if (options_.checksums) write_small(*storage_, place_, kChecksumsName, all.checksums.encode());
      if (!options_.rank_local_metadata) write_small(*storage_, place_, name, content);
      storage_->commit(place_, path_, options_.overwrite);
      began_ = false;
      return std::string();
    });
    storage_->clean(place_, exchange_.rank(), exchange_.world_size());
    return std::move(all.stored.metadata);
  }

  const Exchange& exchange_;
  const std::filesystem::path& path_;
  const SaveOptions& options_;
  WriteProgress* progress_;
  std::shared_ptr<Storage> storage_;
  std::vector<SaveItem> items_;
  std::shared_ptr<const SavePlan> plan_;
  std::string place_;
  bool began_ = false;  // on rank 0: there is a place to discard
};

}  // namespace

Metadata run_save(const Exchange& exchange, const std::function<std::vector<SaveItem>()>& make_items,
                  const std::filesystem::path& path, const SaveOptions& options, WriteProgress* progress) {
  const at::NoGradGuard no_grad;
  const c10::InferenceMode normal_mode(false);
  return SaveRun(exchange, path, options, progress).run(make_items);
}

}  // namespace detail

Metadata save(const StateDict& state, const std::filesystem::path& path, const SaveOptions& options) {
  const detail::Exchange exchange(options.group);
  StateDict own = state;
  const auto make_items = [&] {
    detail::finish_async_save();
    return detail::make_save_items(own, exchange.rank());
  };
  return detail::run_save(exchange, make_items, path, options, nullptr);
}

}  // namespace fsdp2::dcp
