#include "dcp/file_names.h"

#include <fsdp2/error.h>

#include <algorithm>

namespace fsdp2::dcp::detail {

bool is_plain_file_name(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

void check_file_name(const std::string& name) {
  std::string shown = name.substr(0, 100);
  std::replace(shown.begin(), shown.end(), '\0', '?');
  FSDP2_CHECK(is_plain_file_name(name), kCorruption, "[dcp] the metadata point to the file '", shown,
              "', which is not a plain file name; files outside of the checkpoint folder are not read");
}

bool is_checkpoint_file(std::string_view name) {
  if (name == kMetadataName || name == ".metadata.tmp" || name == kChecksumsName) return true;
  if (name.ends_with(".safetensors") || name == "model.safetensors.index.json") return true;
  return name.starts_with("__") &&
         (name.ends_with(".distcp") || name.ends_with(".metadata") || name.ends_with(".metadata.tmp"));
}

std::shared_ptr<Storage> or_local(const std::shared_ptr<Storage>& storage) {
  return storage ? storage : local_storage();
}

std::string read_file(Storage& storage, const std::filesystem::path& folder, const std::string& name) {
  const auto file = storage.open(folder, name);
  FSDP2_CHECK(file->size() > 0 && file->size() < (uint64_t{1} << 31), kCorruption, "[dcp] ", file->name(), " is ",
              file->size(), " bytes long");
  std::string content(static_cast<size_t>(file->size()), '\0');
  file->read(0, content.data(), content.size());
  return content;
}

}  // namespace fsdp2::dcp::detail
