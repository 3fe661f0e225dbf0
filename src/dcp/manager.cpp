#include <fsdp2/dcp/manager.h>

#include <fsdp2/error.h>
#include <fsdp2/log.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string_view>
#include <utility>

#include "dcp/checksums.h"
#include "dcp/exchange.h"
#include "dcp/file_names.h"
#include "dcp/metadata_files.h"
#include "dcp/save_run.h"

namespace fsdp2::dcp {
namespace {

using namespace detail;

std::string text_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours ? ours->what_without_backtrace() : error.what();
}

/// Whether the files of a folder are those of a checkpoint that was finished.
bool describes(const std::vector<std::string>& files) {
  const auto has = [&](const char* file) { return std::find(files.begin(), files.end(), file) != files.end(); };
  return has(kMetadataName) || has("__0.metadata");
}

/// Whether a checkpoint that could not be loaded is to blame for that, rather than the state it was loaded into.
bool is_damaged(Storage& storage, const std::filesystem::path& checkpoint) {
  try {
    const std::vector<std::string> listed = storage.list(checkpoint);
    const std::set<std::string> files(listed.begin(), listed.end());
    if (files.count(kChecksumsName)) {
      const Checksums checksums = Checksums::decode(read_file(storage, checkpoint, kChecksumsName), kChecksumsName);
      for (const std::string& name : checksums.files()) {
        if (!name.ends_with(kMetadataName)) continue;
        if (!checksums.match(name, read_file(storage, checkpoint, name))) return true;
      }
    }
    for (const auto& locations : read_metadata(storage, checkpoint).locations) {
      for (const ItemLocation& location : locations) {
        if (location.present && !files.count(location.file)) return true;
      }
    }
    return false;
  } catch (const Error& error) {
    return error.code() == ErrorCode::kCorruption || error.code() == ErrorCode::kNotFound;
  } catch (const std::exception&) {
    return false;  // of a storage of the user: like the code of ours that says nothing about the file
  }
}

}  // namespace

CheckpointManager::CheckpointManager(std::filesystem::path folder, CheckpointManagerOptions options)
    : folder_(std::move(folder)), options_(std::move(options)) {
  FSDP2_CHECK(!folder_.empty(), kInvalidArgument, "[dcp] a checkpoint manager needs a folder; its path is empty");
  FSDP2_CHECK(options_.keep_last >= 0 && options_.keep_every >= 0, kInvalidArgument, "[dcp] keep_last is ",
              options_.keep_last, ", keep_every is ", options_.keep_every, "; they are 0 or more");
  FSDP2_CHECK(!options_.prefix.empty() && options_.prefix[0] != '.' &&
                  options_.prefix.find_first_of("/\\") == std::string::npos,
              kInvalidArgument, "[dcp] the prefix of checkpoints is '", options_.prefix,
              "'; it is the start of a file name, and not of a hidden one");
  if (!options_.save.storage) options_.save.storage = local_storage();
  options_.load.storage = options_.save.storage;
  options_.load.group = options_.save.group;
}

std::filesystem::path CheckpointManager::path(int64_t step) const {
  char digits[24];
  std::snprintf(digits, sizeof(digits), "%08lld", static_cast<long long>(step));
  return folder_ / (options_.prefix + digits);
}

std::optional<int64_t> CheckpointManager::step_of(const std::string& name) const {
  if (!name.starts_with(options_.prefix)) return {};
  const std::string digits = name.substr(options_.prefix.size());
  if (digits.empty() || digits.size() > 18 || digits.find_first_not_of("0123456789") != std::string::npos) return {};
  return std::stoll(digits);
}

std::optional<int64_t> CheckpointManager::step_of_leftover(const std::string& name) const {
  const size_t start = name.find_first_not_of('.'), mark = name.find(kStagingMark);
  if (start == 0 || start == std::string::npos || mark == std::string::npos || mark < start) return {};
  return step_of(name.substr(start, mark - start));
}

CheckpointManager::Listing CheckpointManager::list() const {
  Listing result;
  Storage& storage = *options_.save.storage;
  std::set<int64_t> steps;
  const auto look_at = [&](int64_t step, const std::string& name) {
    const std::vector<std::string> files = storage.list(folder_ / name);
    if (describes(files)) {
      result.complete.push_back({step, folder_ / name});
    } else {
      result.skipped.push_back({name, "no .metadata: its save was interrupted, or goes on"});
    }
  };
  std::vector<std::string> names = storage.list(folder_);
  std::erase_if(names, [](const std::string& name) { return !name.ends_with('/'); });
  for (std::string& name : names) {
    name.pop_back();
    const std::optional<int64_t> step = step_of(name);
    if (!step) continue;
    steps.insert(*step);
    look_at(*step, name);
  }
  for (const std::string& name : names) {
    const std::optional<int64_t> step = step_of_leftover(name);
    if (!step) continue;
    if (name.ends_with(kOldMark) && !steps.count(*step)) {
      look_at(*step, name);  // its save was killed before the new one was in its place: this is the checkpoint
    } else {
      result.leftovers.push_back(name);
      result.skipped.push_back({name, "what a save left behind that was interrupted, or goes on"});
    }
  }
  std::sort(result.complete.begin(), result.complete.end(), [](const CheckpointInfo& a, const CheckpointInfo& b) {
    return a.step != b.step ? a.step > b.step : a.path < b.path;
  });
  return result;
}

CheckpointManager::Listing CheckpointManager::agreed_list() const {
  const Exchange exchange(options_.save.group);
  const std::vector<std::string> views = exchange.gather("listing checkpoints", [&] {
    ByteWriter out;
    if (exchange.rank() != 0) return out.take();
    const Listing listing = list();
    out.number(uint64_t{listing.complete.size()});
    for (const CheckpointInfo& info : listing.complete) {
      out.number(info.step);
      out.text(info.path.string());
    }
    for (const SkippedCheckpoint& skipped : listing.skipped) {
      out.text(skipped.name);
      out.text(skipped.reason);
    }
    return out.take();
  });
  Listing result;
  ByteReader in(views[0]);
  for (auto left = in.number<uint64_t>(); left > 0; --left) {
    const auto step = in.number<int64_t>();
    result.complete.push_back({step, in.text()});
  }
  while (!in.done()) {
    std::string name = in.text();
    result.skipped.push_back({std::move(name), in.text()});
  }
  return result;
}

std::vector<CheckpointInfo> CheckpointManager::all() {
  wait();
  return agreed_list().complete;
}

LatestCheckpoint CheckpointManager::latest() {
  wait();
  Listing listing = agreed_list();
  LatestCheckpoint result;
  if (!listing.complete.empty()) result.checkpoint = std::move(listing.complete[0]);
  result.skipped = std::move(listing.skipped);
  if (Exchange(options_.save.group).rank() == 0) {
    for (const SkippedCheckpoint& skipped : result.skipped)
      FSDP2_LOG_WARN("[dcp] ", (folder_ / skipped.name).string(), " is skipped: ", skipped.reason);
  }
  return result;
}

void CheckpointManager::clear_leftovers() const {
  for (const std::string& name : list().leftovers) {
    try {
      options_.save.storage->remove(folder_ / name);
    } catch (const std::exception& error) {
      FSDP2_LOG_WARN("[dcp] what an interrupted save left behind stays: ", text_of(error));
    }
  }
}

void CheckpointManager::prune(int64_t saved) const {
  if (options_.keep_last == 0) return;
  try {
    int kept = 0;
    for (const CheckpointInfo& info : list().complete) {
      if (damaged_.count(info.path)) continue;  // neither counted nor removed: somebody may want to look at it
      if (kept < options_.keep_last) {
        ++kept;
      } else if (info.step != saved && (options_.keep_every == 0 || info.step % options_.keep_every != 0)) {
        options_.save.storage->remove(info.path);
      }
    }
  } catch (const std::exception& error) {
    // Whatever a storage throws: the other ranks have saved, and go on without asking this one.
    FSDP2_LOG_WARN("[dcp] an old checkpoint stays: ", text_of(error));
  }
}

void CheckpointManager::save(int64_t step, const StateDict& state) {
  wait();
  const Exchange exchange(options_.save.group);
  const std::filesystem::path target = path(step);
  const std::vector<std::string> views = exchange.gather("starting to save", [&] {
    finish_async_save();  // perhaps of another manager, whose staging folder would look like a leftover
    FSDP2_CHECK(step >= 0 && step < 1'000'000'000'000'000'000, kInvalidArgument,
                "[dcp] a checkpoint cannot be saved as step ", step,
                "; steps are 0 or more, and have at most 18 digits");
    ByteWriter out;
    out.number(step);
    if (exchange.rank() != 0) return out.take();
    clear_leftovers();
    const Listing listing = list();
    const bool incomplete = std::any_of(listing.skipped.begin(), listing.skipped.end(),
                                        [&](const auto& skipped) { return folder_ / skipped.name == target; });
    out.number(uint8_t{incomplete || damaged_.count(target) != 0});
    return out.take();
  });
  for (size_t rank = 0; rank < views.size(); ++rank) {
    const auto other = ByteReader(views[rank]).number<int64_t>();
    FSDP2_CHECK(other == ByteReader(views[0]).number<int64_t>(), kInvalidArgument, "[dcp] rank 0 saves step ",
                ByteReader(views[0]).number<int64_t>(), ", rank ", rank, " saves step ", other,
                "; all ranks save the same step");
  }
  SaveOptions save = options_.save;
  ByteReader decision(views[0]);
  decision.number<int64_t>();
  if (decision.number<uint8_t>() != 0) save.overwrite = true;
  if (options_.async) {
    pending_ = async_save(state, target, save);
    pending_step_ = step;
    return;
  }
  dcp::save(state, target, save);
  damaged_.erase(target);
  if (exchange.rank() == 0) prune(step);
}

void CheckpointManager::wait() {
  if (!pending_.valid()) return;
  std::exchange(pending_, {}).wait();
  damaged_.erase(path(pending_step_));
  if (Exchange(options_.save.group).rank() == 0) prune(pending_step_);
}

ResumeReport CheckpointManager::load_latest(StateDict& state) {
  wait();
  const Exchange exchange(options_.save.group);
  Listing listing = agreed_list();
  ResumeReport result;
  const auto skip = [&](SkippedCheckpoint skipped) {
    if (exchange.rank() == 0)
      FSDP2_LOG_WARN("[dcp] ", (folder_ / skipped.name).string(), " is skipped: ", skipped.reason);
    result.skipped.push_back(std::move(skipped));
  };
  for (SkippedCheckpoint& skipped : listing.skipped) skip(std::move(skipped));
  std::string damage;
  for (CheckpointInfo& info : listing.complete) {
    std::exception_ptr failure;
    std::string verdict(1, 0);  // error code, its text
    try {
      result.load = load(state, info.path, options_.load);
    } catch (const Error& error) {
      failure = std::current_exception();
      verdict = static_cast<char>(error.code()) + text_of(error);
    } catch (const std::exception& error) {
      // Of torch, a storage or an object of the user. The other ranks wait for a verdict all the same.
      failure = std::current_exception();
      verdict = static_cast<char>(ErrorCode::kIo) + text_of(error);
    }
    // Ranks may see different errors, or none: what they do next has to be the same.
    const std::vector<std::string> verdicts = exchange.gather("loading a checkpoint", [&] {
      const bool unclear = verdict[0] == static_cast<char>(ErrorCode::kNotFound) ||
                           verdict[0] == static_cast<char>(ErrorCode::kUnsupported);
      if (exchange.rank() == 0 && unclear && is_damaged(*options_.save.storage, info.path))
        verdict[0] = static_cast<char>(ErrorCode::kCorruption);
      return verdict;
    });
    const auto failed = std::find_if(verdicts.begin(), verdicts.end(), [](const auto& each) { return each[0] != 0; });
    if (failed == verdicts.end()) {
      result.checkpoint = std::move(info);
      return result;
    }
    const auto code = static_cast<ErrorCode>((*failed)[0]);
    if (code != ErrorCode::kCorruption) {
      if (failure) std::rethrow_exception(failure);
      throw Error(code, failed->substr(1));
    }
    damaged_.insert(info.path);
    damage += (damage.empty() ? "" : "; ") + info.path.filename().string() + ": " + failed->substr(1);
    skip({info.path.filename().string(), failed->substr(1)});
  }
  FSDP2_CHECK(damage.empty(), kCorruption, "[dcp] none of the ", listing.complete.size(), " checkpoints in ",
              folder_.string(), " can be loaded: ", damage);
  return result;
}

}  // namespace fsdp2::dcp
