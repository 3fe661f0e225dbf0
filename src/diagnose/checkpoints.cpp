// A checkpoint folder, or a run's folder of them, that is not all of one kind.

#include <fsdp2/error.h>

#include <algorithm>
#include <map>
#include <set>

#include "dcp/file_names.h"
#include "dcp/metadata_files.h"
#include "diagnose/subject.h"

namespace fsdp2::detail::diagnose {

namespace {

namespace fs = std::filesystem;
namespace dcp = fsdp2::dcp::detail;

/// R of "__R_i.distcp", "__R.metadata"; -1 for other names.
int rank_of(const std::string& name) {
  if (!name.starts_with("__")) return -1;
  const size_t end = name.find_first_not_of("0123456789", 2);
  return end == std::string::npos || end == 2 || end > 11 ? -1 : std::stoi(name.substr(2, end - 2));
}

bool ends_with_any(const std::string& name, std::initializer_list<const char*> endings) {
  return std::any_of(endings.begin(), endings.end(), [&](const char* ending) { return name.ends_with(ending); });
}

std::vector<std::string> files_of(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_regular_file()) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool has_metadata(const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(), [](const std::string& name) {
    return name == dcp::kMetadataName || (rank_of(name) >= 0 && name.ends_with(dcp::kMetadataName));
  });
}

struct Checkpoint {
  std::string name;
  std::string writer;
  int ranks = 0;  // that wrote it, as far as its files tell
};

void check_formats(const std::vector<std::string>& names, const std::string& where, Findings& found) {
  std::map<std::string, std::string> formats;  // name of the format, and a file of it
  for (const std::string& name : names) {
    if (name == dcp::kMetadataName) formats.emplace("DCP", name);
    if (rank_of(name) >= 0 && name.ends_with(dcp::kMetadataName))
      formats.emplace("DCP with metadata of each rank", name);
    if (name.ends_with(".safetensors")) formats.emplace("safetensors", name);
    if (ends_with_any(name, {".pt", ".pth", ".bin", ".ckpt"})) formats.emplace("torch.save", name);
  }
  if (formats.size() < 2) return;
  std::string text;
  for (const auto& [format, name] : formats) text += c10::str(text.empty() ? "" : "; ", format, " (", name, ")");
  found.push_back({"checkpoint-mixed-formats", Severity::kError, c10::str("one folder holds several formats: ", text),
                   where, "save each to a folder of its own; what is left of an older save is to be removed"});
}

/// What its metadata say, and what lies beside the files that they name.
Checkpoint look_at(const fs::path& folder, const std::vector<std::string>& names, const std::string& where,
                   Findings& found) {
  const auto storage = fsdp2::dcp::local_storage();
  const dcp::StoredMetadata stored = dcp::read_metadata(*storage, folder);
  std::set<std::string> used;
  for (const auto& locations : stored.locations) {
    for (const auto& location : locations) used.insert(location.file);
  }
  int ranks = 0;
  for (const std::string& file : used) ranks = std::max(ranks, rank_of(file) + 1);
  std::vector<std::string> stale;
  for (const std::string& name : names) {
    const bool data = rank_of(name) >= 0 && name.ends_with(".distcp");
    // A rank without anything to write may leave an empty file.
    if (data && used.count(name) == 0 && fs::file_size(folder / name) > 0) stale.push_back(name);
  }
  if (!stale.empty()) {
    found.push_back(
        {"checkpoint-mixed-world-sizes", Severity::kWarning,
         c10::str("its metadata name files of ", ranks, " ranks, and it holds ", stale.size(),
                  " more that they do not name: ", list_names(stale), "; they are left of a save by other ranks"),
         where, "remove them, or save with .overwrite = true, which replaces the folder"});
  }
  const std::string version = stored.version.empty() ? "before 1.0.0" : stored.version;
  return {where, c10::str(stored.foreign ? "PyTorch" : "libfsdp2", ", format ", version), ranks};
}

template <class Of>
std::string differing(const std::vector<Checkpoint>& all, Of&& of) {
  for (const Checkpoint& each : all) {
    if (of(each) != of(all.front())) {
      return c10::str(all.front().name, " by ", of(all.front()), ", ", each.name, " by ", of(each));
    }
  }
  return "";
}

void compare(const std::vector<Checkpoint>& all, const std::string& where, Findings& found) {
  if (const auto text = differing(all, [](const Checkpoint& each) { return each.writer; }); !text.empty()) {
    found.push_back(
        {"checkpoint-mixed-versions", Severity::kWarning,
         c10::str("its checkpoints were written by different programs: ", text), where,
         "use one environment for a run, or keep a folder for each; fsdp2 checkpoint inspect shows what is in "
         "one"});
  }
  const auto ranks = [](const Checkpoint& each) { return c10::str(each.ranks, " ranks"); };
  if (const auto text = differing(all, ranks); !text.empty()) {
    found.push_back({"checkpoint-mixed-world-sizes", Severity::kNote,
                     c10::str("its checkpoints were written by different numbers of ranks: ", text), where,
                     "tensors load on any number of ranks; values that were saved with per_rank() are those of the "
                     "ranks of that save"});
  }
}

void look(const fs::path& folder, Findings& found) {
  std::vector<Checkpoint> checkpoints;
  const auto add = [&](const fs::path& each, const std::string& where) {
    const std::vector<std::string> names = files_of(each);
    check_formats(names, where, found);
    if (has_metadata(names)) checkpoints.push_back(look_at(each, names, where, found));
  };
  add(folder, folder.string());
  if (checkpoints.empty()) {
    std::vector<fs::path> folders;
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.is_directory() && !entry.path().filename().string().starts_with(".")) folders.push_back(entry.path());
    }
    std::sort(folders.begin(), folders.end());
    for (const auto& each : folders) add(each, each.filename().string());
  }
  if (checkpoints.size() > 1) compare(checkpoints, folder.string(), found);
}

}  // namespace

void check_checkpoints(const fs::path& folder, Findings& found) {
  if (folder.empty()) return;
  try {
    look(folder, found);
  } catch (const Error& error) {
    found.push_back({"checkpoint-unreadable", Severity::kError, error.what_without_backtrace(), folder.string(),
                     "save it again, or load an older one; fsdp2 checkpoint verify says what is whole"});
  } catch (const fs::filesystem_error& error) {
    found.push_back({"checkpoint-unreadable", Severity::kError, error.what(), folder.string(),
                     "name an existing folder that this process may read"});
  }
}

}  // namespace fsdp2::detail::diagnose
