#include "dcp/metadata_files.h"

#include <fsdp2/error.h>

#include <algorithm>
#include <map>

#include "dcp/exchange.h"

namespace fsdp2::dcp::detail {
namespace {

/// Of "__12.metadata": 12.
std::optional<int> rank_of(std::string_view name) {
  constexpr std::string_view kStart = "__", kEnd = kMetadataName;
  if (!name.starts_with(kStart) || !name.ends_with(kEnd) || name.size() <= kStart.size() + kEnd.size()) return {};
  const std::string_view digits = name.substr(kStart.size(), name.size() - kStart.size() - kEnd.size());
  if (digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string_view::npos) return {};
  return std::stoi(std::string(digits));
}

/// Nothing where there is no such file. Listings may be older than the files of a network file system: they are not
/// asked.
std::optional<std::string> read_if_there(Storage& storage, const std::filesystem::path& folder,
                                         const std::string& name) {
  try {
    return read_file(storage, folder, name);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kNotFound) throw;
    return std::nullopt;
  }
}

}  // namespace

std::string MetadataFiles::encode() const {
  ByteWriter out;
  out.number(uint64_t{metadata.size()});
  for (const auto& [name, content] : metadata) {
    out.text(name);
    out.text(content);
  }
  if (checksums) out.text(*checksums);
  return out.take();
}

MetadataFiles MetadataFiles::decode(const std::string& message) {
  MetadataFiles files;
  ByteReader in(message);
  for (auto left = in.number<uint64_t>(); left > 0; --left) {
    std::string name = in.text();
    files.metadata.emplace_back(std::move(name), in.text());
  }
  if (!in.done()) files.checksums = in.text();
  return files;
}

MetadataFiles read_metadata_files(Storage& storage, const std::filesystem::path& folder) {
  MetadataFiles result;
  if (auto content = read_if_there(storage, folder, kMetadataName)) {
    result.metadata.emplace_back(kMetadataName, std::move(*content));
  } else {
    const std::vector<std::string> names = storage.list(folder);
    FSDP2_CHECK(!names.empty(), kNotFound, "[dcp] there is no checkpoint at ", folder.string());
    std::map<int, std::string> by_rank;
    for (const std::string& name : names) {
      if (const auto rank = rank_of(name)) by_rank.emplace(*rank, name);
    }
    const bool died = std::find(names.begin(), names.end(), ".metadata.tmp") != names.end();
    FSDP2_CHECK(!by_rank.empty(), kNotFound, "[dcp] there is no checkpoint at ", folder.string(), ": it has no ",
                kMetadataName, died ? ", only .metadata.tmp" : "",
                "; the save did not finish, or this is not a checkpoint folder");
    for (const auto& [rank, name] : by_rank) {
      FSDP2_CHECK(rank == static_cast<int>(result.metadata.size()), kCorruption, "[dcp] ", folder.string(),
                  " holds metadata of each rank, but not of rank ", result.metadata.size(), ": there is ", name,
                  " and no __", result.metadata.size(), kMetadataName,
                  "; a file is missing or the save did not finish");
      result.metadata.emplace_back(name, read_file(storage, folder, name));
    }
  }
  result.checksums = read_if_there(storage, folder, kChecksumsName);
  return result;
}

StoredMetadata decode_metadata(const MetadataFiles& files, const std::filesystem::path& folder) {
  std::vector<StoredMetadata> parts;
  std::vector<std::string> names;
  for (const auto& [name, content] : files.metadata) {
    names.push_back((folder / name).string());
    parts.push_back(decode_metadata(content, names.back()));
  }
  return merge_metadata(std::move(parts), names);
}

StoredMetadata read_metadata(Storage& storage, const std::filesystem::path& folder) {
  return decode_metadata(read_metadata_files(storage, folder), folder);
}

}  // namespace fsdp2::dcp::detail
