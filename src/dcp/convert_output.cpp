#include "dcp/convert_output.h"

#include <fsdp2/error.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <unordered_map>

#include "dcp/checksums.h"
#include "dcp/file_names.h"
#include "dcp/file_writer.h"
#include "dcp/geometry.h"
#include "dcp/item.h"
#include "dcp/metadata_files.h"
#include "dcp/safetensors.h"
#include "dcp/safetensors_folder.h"

namespace fsdp2::dcp::detail {
namespace {

/// One safetensors file with these tensors of the plan.
void write_safetensors_file(FileWriter& file, const ConvertPlan& plan, const std::vector<size_t>& chosen,
                            ConvertInput& input) {
  std::vector<SafetensorsTensor> tensors;
  std::unordered_map<std::string, size_t> by_name;
  for (const size_t i : chosen) {
    tensors.push_back({plan.tensors[i].name, plan.tensors[i].dtype, plan.tensors[i].sizes, 0, 0});
    by_name.emplace(plan.tensors[i].name, i);
  }
  const std::string header = make_safetensors_header(tensors, {{"format", "pt"}});
  file.write(header.data(), header.size());
  for (const SafetensorsTensor& tensor : tensors) {
    input.stream(by_name.at(tensor.name), whole_box(tensor.sizes),
                 [&](const void* data, size_t size) { file.write(data, size); });
  }
  file.finish();
}

class DcpOutput {
 public:
  DcpOutput(ConvertTarget& target, const ConvertPlan& plan, ConvertInput& input)
      : target_(target), plan_(plan), input_(input) {
    for (const auto* entries : {&plan.values, &plan.tensors}) {
      for (const ConvertPlan::Entry& entry : *entries) {
        if (entries == &plan.tensors) {
          stored_.metadata.entries.emplace_back(entry.name, TensorEntry{entry.dtype, entry.sizes, {}});
        } else {
          stored_.metadata.entries.emplace_back(entry.name, BytesEntry{});
        }
        stored_.metadata.paths.emplace(entry.name, entry.path);
        stored_.locations.emplace_back();
      }
    }
  }

  void write_rank(int rank, int ranks) {
    const std::string name = c10::str("__", rank, "_0.distcp");
    FileWriter file(target_.create(name), /*checksums=*/true);
    for (size_t i = 0; rank == 0 && i < plan_.values.size(); ++i) {
      item(file, name, i, [&] { write_value_item(file, pickle_value(input_.value(i), plan_.values[i].name)); });
    }
    for (size_t i = 0; i < plan_.tensors.size(); ++i) {
      const ConvertPlan::Entry& tensor = plan_.tensors[i];
      Chunk chunk = rows_of_rank(tensor.sizes, rank, ranks);
      const bool empty = checked_numel(chunk.sizes) == 0;
      if (empty && (rank > 0 || checked_numel(tensor.sizes) != 0)) continue;
      item(file, name, plan_.values.size() + i, [&] {
        TensorItemWriter writer(file, tensor.dtype, chunk.sizes);
        input_.stream(i, chunk, [&](const void* data, size_t size) { writer.write(data, size); });
        writer.finish();
      });
      std::get<TensorEntry>(stored_.metadata.entries[plan_.values.size() + i].second)
          .chunks.push_back(std::move(chunk));
    }
    file.finish();
  }

  void finish() {
    const std::string metadata = encode_metadata(stored_);
    sums_.add(kMetadataName, 0, metadata.size(), block_checksums(metadata));
    put(kChecksumsName, sums_.encode());
    put(kMetadataName, metadata);
  }

 private:
  template <class Write>
  void item(FileWriter& file, const std::string& name, size_t entry, const Write& write) {
    const uint64_t offset = file.position();
    file.begin_item();
    write();
    const uint64_t length = file.position() - offset;
    sums_.add(name, offset, length, file.end_item());
    ItemLocation place;
    place.file = name;
    place.offset = offset;
    place.length = length;
    place.present = true;
    stored_.locations[entry].push_back(std::move(place));
  }

  void put(const std::string& name, const std::string& content) {
    FileWriter file(target_.create(name), /*checksums=*/false);
    file.write(content.data(), content.size());
    file.finish();
  }

  ConvertTarget& target_;
  const ConvertPlan& plan_;
  ConvertInput& input_;
  StoredMetadata stored_;
  Checksums sums_;
};

}  // namespace

Chunk rows_of_rank(const std::vector<int64_t>& sizes, int rank, int ranks) {
  Chunk chunk = whole_box(sizes);
  if (sizes.empty() || checked_numel(sizes) == 0) {
    if (rank > 0) chunk.sizes.assign(std::max<size_t>(sizes.size(), 1), 0);  // nothing
    return chunk;
  }
  const int64_t rows = (sizes[0] + ranks - 1) / ranks, begin = std::min(sizes[0], rank * rows);
  chunk.offsets[0] = begin;
  chunk.sizes[0] = std::min(sizes[0], begin + rows) - begin;
  return chunk;
}

void write_dcp(ConvertTarget& target, const ConvertPlan& plan, ConvertInput& input, int ranks) {
  DcpOutput output(target, plan, input);
  for (int rank = 0; rank < ranks; ++rank) output.write_rank(rank, ranks);
  output.finish();
}

void write_safetensors(ConvertTarget& target, const ConvertPlan& plan, ConvertInput& input, uint64_t max_file_bytes,
                       bool single) {
  std::vector<std::vector<size_t>> files(1);
  uint64_t in_file = 0, total = 0;
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    const uint64_t bytes = plan.bytes(plan.tensors[i]);
    if (!single && !files.back().empty() && (in_file >= max_file_bytes || bytes > max_file_bytes - in_file)) {
      files.emplace_back();
      in_file = 0;
    }
    files.back().push_back(i);
    in_file += bytes;
    total += bytes;
  }
  nlohmann::json weight_map = nlohmann::json::object();
  for (size_t k = 0; k < files.size(); ++k) {
    const std::string name = safetensors_file_name(k + 1, files.size());
    FileWriter file(target.create(name), /*checksums=*/false);
    write_safetensors_file(file, plan, files[k], input);
    for (const size_t i : files[k]) weight_map[plan.tensors[i].name] = name;
  }
  if (single) return;
  const std::string index =
      nlohmann::json{{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}}.dump(2) + "\n";
  FileWriter file(target.create(kSafetensorsIndex), /*checksums=*/false);
  file.write(index.data(), index.size());
  file.finish();
}

void write_torch_save(ConvertTarget& target, const ConvertPlan& plan, ConvertInput& input) {
  std::vector<std::pair<Path, Value>> leaves;
  for (size_t i = 0; i < plan.values.size(); ++i) leaves.emplace_back(plan.values[i].path, input.value(i));
  for (size_t i = 0; i < plan.tensors.size(); ++i) {
    leaves.emplace_back(plan.tensors[i].path, input.read(i, whole_box(plan.tensors[i].sizes)));
  }
  FileWriter file(target.create(""), /*checksums=*/true);
  write_value_item(file, pickle_value(Value(unflatten(std::move(leaves))), "the state"));
  file.finish();
}

}  // namespace fsdp2::dcp::detail
