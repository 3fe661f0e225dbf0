#include "diagnose/between_ranks.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fsdp2/error.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <type_traits>

#include "backend/shm/host.h"
#include "diagnose/manifest.h"

namespace fsdp2::detail::diagnose {

// Note [Comparing ranks that may differ]
// Nothing about the models may decide which collectives a rank calls: ranks whose models differ would wait for each
// other for ever. So every rank first tells one row of numbers, hashes mostly. From all rows each rank sees the same:
// whether any two ranks differ in anything. Only then are the words behind the hashes exchanged, in one more exchange
// of strings. The findings follow from what all ranks have, in one way, so that they are the same everywhere.

namespace {

constexpr size_t kMostNamed = 8;  // findings of one rule, where many names differ

std::string options_text(const DiagnoseOptions& options) {
  return c10::str(options.compare_values, " ", options.small_group_bytes.value_or(-1), " ",
                  c10::Join(" ", options.ignore), " ", options.checkpoint_folder.string());
}

RankRow row_of(const Subject& subject, const Manifest& manifest) {
  std::string structure = c10::Join(" ", manifest.peers), gradients, buffers, replicated, findings;
  for (const std::string& group : manifest.groups) structure += group + "\n";
  for (const auto& param : manifest.params) {
    structure += c10::str(param.fqn, " ", param.text, "\n");
    gradients += c10::str(param.fqn, param.has_gradient, "\n");
    replicated += c10::str(param.place, param.values, "\n");
  }
  for (const auto& buffer : manifest.buffers) {
    structure += c10::str(buffer.fqn, " ", buffer.text, "\n");
    buffers += buffer.values + "\n";
  }
  for (const Finding& each : manifest.findings) findings += c10::str(each.rule, each.what, each.where, "\n");
  RankRow row;
  row.options = hash_of(options_text(subject.options));
  row.structure = hash_of(structure);
  row.gradients = hash_of(gradients);
  row.buffers = hash_of(buffers);
  row.replicated = hash_of(replicated);
  row.findings = hash_of(findings);
  row.host = hash_of(shm::host_identity());
  row.local_rank = get_local_rank();
  const c10::Device device = subject.device();
  if (!device.is_cpu() && !device.is_meta()) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    row.device_index = std::max<int64_t>(device.index(), 0);
    row.device = hash_of(c10::str(visible == nullptr ? "" : visible, " ", device.type(), row.device_index)) | 1;
    row.visible_devices = c10::impl::VirtualGuardImpl(device.type()).deviceCount();
  }
  return row;
}

std::vector<RankRow> exchange(const RankRow& row) {
  static_assert(std::is_trivially_copyable_v<RankRow>);
  std::vector<RankRow> rows;
  for (const std::string& bytes : all_gather_strings({reinterpret_cast<const char*>(&row), sizeof row})) {
    std::memcpy(&rows.emplace_back(), bytes.data(), sizeof row);
  }
  return rows;
}

bool all_equal(const std::vector<RankRow>& rows, int64_t RankRow::*word) {
  return std::all_of(rows.begin(), rows.end(), [&](const RankRow& row) { return row.*word == rows.front().*word; });
}

/// Ranks that have to do with each other, through meshes; lowest rank first. All of them where none has a mesh.
std::vector<std::vector<int>> circles(const std::vector<Manifest>& all) {
  std::vector<int> lowest(all.size());
  std::iota(lowest.begin(), lowest.end(), 0);
  const auto root = [&](int rank) {
    while (lowest[rank] != rank) rank = lowest[rank];
    return rank;
  };
  const bool no_mesh = std::all_of(all.begin(), all.end(), [](const Manifest& each) { return each.peers.empty(); });
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto join = [&](int other) {
      const int a = root(static_cast<int>(rank)), b = root(other);
      lowest[std::max(a, b)] = std::min(a, b);
    };
    for (const int peer : all[rank].peers) join(peer);
    if (no_mesh) join(0);
  }
  std::map<int, std::vector<int>> members;
  for (size_t rank = 0; rank < all.size(); ++rank)
    members[root(static_cast<int>(rank))].push_back(static_cast<int>(rank));
  std::vector<std::vector<int>> result;
  for (auto& [first, ranks] : members) result.push_back(std::move(ranks));
  return result;
}

using Entries = std::map<std::string, const Manifest::Entry*>;
Entries by_name(const Manifest& manifest) {
  Entries entries;
  for (const auto& each : manifest.params) entries.emplace(each.fqn, &each);
  for (const auto& each : manifest.buffers) entries.emplace(each.fqn, &each);
  return entries;
}

void add_limited(Findings& found, const Findings& some) {
  found.insert(found.end(), some.begin(), some.begin() + static_cast<int64_t>(std::min(some.size(), kMostNamed)));
  if (some.size() > kMostNamed) {
    Finding rest = some[kMostNamed];
    rest.what = c10::str("and ", some.size() - kMostNamed, " more like this");
    rest.where = "";
    found.push_back(std::move(rest));
  }
}

/// Names, shapes and groups of two ranks.
void compare_structure(const Manifest& first, const Manifest& other, int a, int b, Findings& found) {
  const std::string fix = "build the same model and call fully_shard with the same arguments on every rank";
  const Entries left = by_name(first), right = by_name(other);
  Findings some;
  const auto add = [&](const std::string& what, const std::string& where) {
    some.push_back({"ranks-differ", Severity::kError, what, where, fix});
  };
  for (const auto& [fqn, entry] : left) {
    const auto there = right.find(fqn);
    if (there == right.end()) {
      add(c10::str("rank ", a, " has it (", entry->text, "), rank ", b, " does not"), fqn);
    } else if (entry->text != there->second->text) {
      add(c10::str("rank ", a, " has ", entry->text, "; rank ", b, " has ", there->second->text), fqn);
    }
  }
  for (const auto& [fqn, entry] : right) {
    if (left.count(fqn) == 0) add(c10::str("rank ", b, " has it (", entry->text, "), rank ", a, " does not"), fqn);
  }
  if (some.empty() && first.groups != other.groups) {
    size_t at = 0;
    while (at < first.groups.size() && at < other.groups.size() && first.groups[at] == other.groups[at]) ++at;
    const auto text = [&](const Manifest& each) {
      return at < each.groups.size() ? each.groups[at] : "no more groups";
    };
    add(c10::str("rank ", a, " has ", text(first), "; rank ", b, " has ", text(other)), "");
  }
  add_limited(found, some);
}

struct Circle {
  const std::vector<Manifest>& all;
  const std::vector<int>& ranks;
  std::vector<Entries> entries;  // by position in `ranks`

  Circle(const std::vector<Manifest>& all, const std::vector<int>& ranks) : all(all), ranks(ranks) {
    for (const int rank : ranks) entries.push_back(by_name(all[rank]));
  }

  void check_gradients(Findings& found) const {
    Findings some;
    for (const auto& param : all[ranks.front()].params) {
      std::vector<int> with, without;
      for (size_t i = 0; i < ranks.size(); ++i) {
        if (const auto entry = entries[i].find(param.fqn); entry != entries[i].end()) {
          (entry->second->has_gradient ? with : without).push_back(ranks[i]);
        }
      }
      if (with.empty() || without.empty()) continue;
      some.push_back({"gradients-missing", Severity::kError,
                      c10::str("has a gradient on rank", with.size() > 1 ? "s " : " ", c10::Join(", ", with),
                               " and none on rank", without.size() > 1 ? "s " : " ", c10::Join(", ", without)),
                      param.fqn,
                      "use the same parameters in every step of every rank, and clear gradients on all ranks alike; "
                      "set_reduce_scatter_unused_params(true) lets unused ones take part with zeros",
                      without});
    }
    add_limited(found, some);
  }

  void check_buffers(Findings& found) const {
    Findings some;
    for (const auto& buffer : all[ranks.front()].buffers) {
      std::vector<int> differing;
      for (size_t i = 1; i < ranks.size(); ++i) {
        const auto entry = entries[i].find(buffer.fqn);
        if (entry != entries[i].end() && entry->second->values != buffer.values) differing.push_back(ranks[i]);
      }
      if (differing.empty()) continue;
      some.push_back({"buffers-differ", Severity::kWarning,
                      c10::str("values on rank", differing.size() > 1 ? "s " : " ", c10::Join(", ", differing),
                               " are not those on rank ", ranks.front(), ": evaluation differs between ranks, and a ",
                               "checkpoint holds those of one rank"),
                      buffer.fqn,
                      "start from equal values (one seed, or broadcast()); running statistics drift with each rank's "
                      "data: average them with all_reduce before they are used or saved, or use a normalisation "
                      "without them (GroupNorm, LayerNorm)",
                      differing});
    }
    add_limited(found, some);
  }

  /// Parts of one parameter that lie at one place.
  void check_replicas(Findings& found) const {
    Findings some;
    for (const auto& param : all[ranks.front()].params) {
      std::map<std::string, std::pair<int, std::string>> first;  // rank and values, by place
      std::vector<int> differing;
      int beside = 0;
      for (size_t i = 0; i < ranks.size(); ++i) {
        const auto entry = entries[i].find(param.fqn);
        if (entry == entries[i].end() || entry->second->place.empty()) continue;
        const auto known = first.emplace(entry->second->place, std::make_pair(ranks[i], entry->second->values)).first;
        if (known->second.second == entry->second->values) continue;
        if (differing.empty()) beside = known->second.first;
        differing.push_back(ranks[i]);
      }
      if (differing.empty()) continue;
      some.push_back({"replicas-differ", Severity::kError,
                      c10::str("ranks ", beside, " and ", differing.front(),
                               " hold the same part of it, with other values: replicas compute different things"),
                      param.fqn,
                      "start from equal values on all replicas (one seed before reset_parameters(), a checkpoint, or "
                      "broadcast()), and step the optimizers alike",
                      differing});
    }
    add_limited(found, some);
  }
};

/// What ranks found by themselves, one after another; a finding of all ranks names none.
void unite(const std::vector<Manifest>& all, Findings& found) {
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (const Finding& each : all[rank].findings) {
      const auto known = std::find_if(found.begin(), found.end(), [&](const Finding& other) {
        return other.rule == each.rule && other.what == each.what && other.where == each.where;
      });
      if (known == found.end()) {
        found.push_back(each);
        found.back().ranks = {static_cast<int>(rank)};
      } else {
        known->ranks.push_back(static_cast<int>(rank));
      }
    }
  }
  for (Finding& each : found) {
    if (each.ranks.size() == all.size()) each.ranks.clear();
  }
}

/// Local parts differ from rank to rank even where nothing is wrong, so their hashes alone say something only where
/// several ranks hold a part. Whether any do is the same question on all ranks that share a mesh.
bool has_replicas(const Subject& subject) {
  return std::any_of(subject.params.begin(), subject.params.end(), [](const SeenParam& param) {
    return param.spec() != nullptr &&
           param.spec()->layout->sharded_axes().size() < static_cast<size_t>(param.spec()->mesh.ndim());
  });
}

}  // namespace

Findings compare_ranks(const Subject& subject, const Findings& own) {
  const Manifest mine = manifest_of(subject, own);
  RankRow row = row_of(subject, mine);
  if (!has_replicas(subject)) row.replicated = 0;
  const std::vector<RankRow> rows = exchange(row);
  FSDP2_CHECK(all_equal(rows, &RankRow::options), kInvalidArgument,
              "[diagnose] ranks called diagnose() with different options; every rank passes the same");
  const bool alike = all_equal(rows, &RankRow::structure) && all_equal(rows, &RankRow::gradients) &&
                     all_equal(rows, &RankRow::buffers) && all_equal(rows, &RankRow::replicated) &&
                     all_equal(rows, &RankRow::findings);
  Findings found;
  if (alike) {
    found = own;
  } else {
    std::vector<Manifest> all;
    for (const std::string& text : all_gather_strings(mine.encode())) all.push_back(Manifest::decode(text));
    unite(all, found);
    for (const std::vector<int>& ranks : circles(all)) {
      for (const int rank : ranks) {
        const size_t before = found.size();
        compare_structure(all[ranks.front()], all[rank], ranks.front(), rank, found);
        if (found.size() > before) break;  // the first rank that differs tells enough
      }
      const Circle circle(all, ranks);
      circle.check_gradients(found);
      circle.check_buffers(found);
      circle.check_replicas(found);
    }
  }
  check_devices(rows, found);
  return found;
}

}  // namespace fsdp2::detail::diagnose
