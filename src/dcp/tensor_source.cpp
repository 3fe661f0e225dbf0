#include "dcp/tensor_source.h"

#include <fsdp2/error.h>

#include <fstream>

#include "dcp/file_names.h"

namespace fsdp2::dcp {
namespace detail {
namespace {

namespace fs = std::filesystem;

bool is_rank_metadata(const std::string& name) { return name.starts_with("__") && name.ends_with(".metadata"); }

Format detect_folder(const fs::path& folder) {
  bool safetensors = false, nested = false;
  std::string other;
  for (const std::string& name : local_storage()->list(folder)) {
    if (name == kMetadataName || is_rank_metadata(name)) return Format::Dcp;
    safetensors |= name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json");
    nested |= name == "sharded/";
    if (name.ends_with(".distcp")) other = "; it holds .distcp files but no .metadata: that save did not finish";
  }
  if (safetensors) return Format::Safetensors;
  if (nested) other = "; its folder sharded/ may be one, name that";
  FSDP2_THROW(kNotFound, "[dcp] ", folder.string(), " is not a checkpoint: it has neither .metadata nor *.safetensors",
              other);
}

}  // namespace

Format detect_format(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  FSDP2_CHECK(status.type() != fs::file_type::not_found, kNotFound, "[dcp] there is nothing at ", path.string());
  FSDP2_CHECK(status.type() != fs::file_type::none, kIo, "[dcp] looking at ", path.string(),
              " failed: ", error.message());
  if (status.type() == fs::file_type::directory) return detect_folder(path);
  FSDP2_CHECK(status.type() == fs::file_type::regular, kInvalidArgument, "[dcp] ", path.string(),
              " is neither a folder nor a regular file");
  const std::string name = path.filename().string();
  FSDP2_CHECK(name != kMetadataName && !name.ends_with(".distcp"), kInvalidArgument, "[dcp] ", path.string(),
              " is one file of a checkpoint; name the folder that it is in");
  char start[4] = {};
  std::ifstream(path, std::ios::binary).read(start, sizeof(start));
  const bool zip = std::string_view(start, 4) == "PK\x03\x04";
  if (zip) return Format::TorchSave;
  FSDP2_CHECK(!name.ends_with(".pt") && !name.ends_with(".pth") && !name.ends_with(".bin"), kUnsupported, "[dcp] ",
              path.string(), " is not a zip archive as torch.save makes them since torch 1.6; load and save it again");
  FSDP2_CHECK(name.ends_with(".safetensors"), kInvalidArgument, "[dcp] ", path.string(),
              " is neither a torch.save archive nor called .safetensors");
  return Format::Safetensors;
}

std::unique_ptr<TensorSource> open_source(const fs::path& path, Format format, bool verify) {
  switch (format) {
    case Format::Dcp:
      return open_dcp(path, verify);
    case Format::Safetensors:
      return open_safetensors(path);
    case Format::TorchSave:
      break;
  }
  return open_torch_save(path, verify);
}

}  // namespace detail
}  // namespace fsdp2::dcp
