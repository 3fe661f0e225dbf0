#include "dcp/write_files.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fsdp2/error.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "dcp/file_writer.h"
#include "dcp/geometry.h"
#include "dcp/safetensors.h"
#include "dcp/transforms.h"

namespace fsdp2::dcp::detail {
namespace {

/// A part of the plan that this rank writes.
struct Part {
  size_t item, part;
  const SaveItem* source;
  size_t chunk;  // of the source
  uint64_t bytes;
};

std::vector<Part> parts_of(int rank, const SavePlan& plan, const std::vector<SaveItem>& items) {
  std::unordered_map<std::string_view, const SaveItem*> by_name;
  by_name.reserve(items.size());
  for (const SaveItem& item : items) by_name.emplace(item.fqn, &item);
  std::vector<Part> values, tensors;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const PlannedItem& planned = plan.items[i];
    for (size_t k = 0; k < planned.owners.size(); ++k) {
      if (planned.owners[k] != rank) continue;
      const SaveItem* source = by_name.at(planned.fqn);
      if (!planned.tensor) {
        values.push_back({i, k, source, 0, source->value.pickle.size()});
        continue;
      }
      const auto& mine = source->tensor->chunks;
      const auto chunk = std::find_if(mine.begin(), mine.end(), [&](const Chunk& candidate) {
        return candidate.offsets == planned.tensor->chunks[k].offsets &&
               candidate.sizes == planned.tensor->chunks[k].sizes;
      });
      const auto index = static_cast<size_t>(chunk - mine.begin());
      tensors.push_back({i, k, source, index, static_cast<uint64_t>(source->data[index].nbytes())});
    }
  }
  // Values first, as in Python's files.
  values.insert(values.end(), tensors.begin(), tensors.end());
  return values;
}

/// Deals parts to files: values in turn, tensors to the file with the least bytes, the biggest first.
std::vector<std::vector<Part>> deal(std::vector<Part> parts, const SaveOptions& options) {
  std::vector<std::vector<Part>> files;
  if (options.file_per_item) {
    for (Part& part : parts) files.push_back({part});
    return files;
  }
  files.resize(static_cast<size_t>(options.files_per_rank));
  if (files.size() == 1) {
    files[0] = std::move(parts);
    return files;
  }
  std::vector<uint64_t> load(files.size(), 0);
  size_t next = 0;
  std::vector<Part> tensors;
  for (Part& part : parts) {
    if (part.source->tensor) {
      tensors.push_back(part);
    } else {
      files[next++ % files.size()].push_back(part);
    }
  }
  std::stable_sort(tensors.begin(), tensors.end(), [](const Part& a, const Part& b) { return a.bytes > b.bytes; });
  for (Part& part : tensors) {
    const auto least = static_cast<size_t>(std::min_element(load.begin(), load.end()) - load.begin());
    load[least] += part.bytes;
    files[least].push_back(part);
  }
  return files;
}

/// A blob names its tensors by key, so chunks of one key go to files of their own.
void separate_chunks(std::vector<std::vector<Part>>& files) {
  for (size_t i = 0; i < files.size(); ++i) {
    std::unordered_set<size_t> seen;
    std::vector<Part> kept, moved;
    for (Part& part : files[i]) {
      const bool again = part.source->tensor && !seen.insert(part.item).second;
      (again ? moved : kept).push_back(part);
    }
    if (moved.empty()) continue;
    files[i] = std::move(kept);
    files.push_back(std::move(moved));
  }
}

void write_archive(ByteSink& out, const Part& part) {
  if (part.source->tensor) {
    write_tensor_item(out, storable(part.source->data[part.chunk], part.source->fqn));
  } else {
    write_value_item(out, part.source->value);
  }
}

/// Tensors as one blob, in the way of torch.distributed.checkpoint: `offset` is that of the blob, `length` that of the
/// tensor's bytes.
void write_blob(FileWriter& file, const std::vector<Part>& tensors, WrittenFile& written) {
  std::vector<SafetensorsTensor> header;
  std::unordered_map<std::string_view, const Part*> by_name;
  nlohmann::json offsets = nlohmann::json::object();
  for (const Part& part : tensors) {
    const at::Tensor& data = part.source->data[part.chunk];
    header.push_back({part.source->fqn, data.scalar_type(), data.sizes().vec(), 0, 0});
    by_name.emplace(part.source->fqn, &part);
    offsets[part.source->fqn] = {{"saved_offsets", part.source->tensor->chunks[part.chunk].offsets}};
  }
  const std::string start = make_safetensors_header(
      header, {{"format", "pt"},
               {"DCP_VERSION", "1.0"},
               {"DCP_SHARDING_INFO", offsets.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)}});
  const uint64_t offset = file.position();
  file.begin_item();
  file.write(start.data(), start.size());
  for (const SafetensorsTensor& tensor : header) {
    const Part& part = *by_name.at(tensor.name);
    const at::Tensor data = storable(part.source->data[part.chunk], part.source->fqn);
    if (data.nbytes() > 0) file.write(data.const_data_ptr(), data.nbytes());
    written.parts.push_back({part.item, part.part, offset, static_cast<uint64_t>(data.nbytes())});
  }
  written.bytes.push_back({offset, file.position() - offset, file.end_item()});
}

WrittenFile write_file(std::unique_ptr<OutputFile> output, std::string name, const std::vector<Part>& parts,
                       const SaveOptions& options, WriteProgress* progress) {
  FileWriter file(std::move(output), options.checksums, progress ? &progress->done : nullptr);
  WrittenFile written{std::move(name), {}, {}};
  std::vector<Part> tensors;
  for (const Part& part : parts) {
    if (options.safetensors && part.source->tensor) {
      tensors.push_back(part);
      continue;
    }
    const uint64_t offset = file.position();
    file.begin_item();
    if (options.zstd) {
      ZstdSink compressed(file);
      write_archive(compressed, part);
      compressed.finish();
    } else {
      write_archive(file, part);
    }
    const uint64_t length = file.position() - offset;
    if (progress != nullptr && length < part.bytes) progress->done += part.bytes - length;  // what compression saved
    written.parts.push_back({part.item, part.part, offset, length});
    written.bytes.push_back({offset, length, file.end_item()});
  }
  if (!tensors.empty()) write_blob(file, tensors, written);
  file.finish();
  return written;
}

}  // namespace

std::vector<std::string> transforms_of(const SaveOptions& options) {
  return options.zstd ? std::vector<std::string>{kZstdTransform} : std::vector<std::string>();
}

std::vector<WrittenFile> write_files(Storage& storage, const std::string& place, int rank, const SavePlan& plan,
                                     const std::vector<SaveItem>& items, const SaveOptions& options,
                                     WriteProgress* progress) {
  std::vector<Part> parts = parts_of(rank, plan, items);
  if (progress != nullptr) {
    for (const Part& part : parts) progress->total += part.bytes;
  }
  std::vector<std::vector<Part>> files = deal(std::move(parts), options);
  if (options.safetensors) separate_chunks(files);
  std::vector<WrittenFile> written(files.size());
  const auto write_one = [&](size_t i) {
    std::string name = c10::str("__", rank, "_", i, ".distcp");
    std::unique_ptr<OutputFile> output = storage.create(place, name);
    written[i] = write_file(std::move(output), std::move(name), files[i], options, progress);
  };
  if (options.file_per_item || files.size() == 1) {
    for (size_t i = 0; i < files.size(); ++i) write_one(i);
    return written;
  }
  std::vector<std::exception_ptr> errors(files.size());
  std::vector<std::jthread> threads;  // joined also where starting one of them fails
  for (size_t i = 0; i < files.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        const at::NoGradGuard no_grad;
        write_one(i);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  threads.clear();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return written;
}

}  // namespace fsdp2::dcp::detail
