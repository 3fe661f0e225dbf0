#include "dcp/write_files.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <fsdp2/error.h>

#include <algorithm>
#include <exception>
#include <thread>
#include <unordered_map>

#include "dcp/file_writer.h"
#include "dcp/geometry.h"

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

WrittenFile write_file(std::unique_ptr<OutputFile> output, std::string name, const std::vector<Part>& parts,
                       const SaveOptions& options, WriteProgress* progress) {
  FileWriter file(std::move(output), options.checksums, progress ? &progress->done : nullptr);
  WrittenFile written{std::move(name), {}};
  for (const Part& part : parts) {
    const uint64_t offset = file.position();
    file.begin_item();
    if (part.source->tensor) {
      write_tensor_item(file, storable(part.source->data[part.chunk], part.source->fqn));
    } else {
      write_value_item(file, part.source->value);
    }
    written.parts.push_back({part.item, part.part, offset, file.position() - offset, file.end_item()});
  }
  file.finish();
  return written;
}

}  // namespace

std::vector<WrittenFile> write_files(Storage& storage, const std::string& place, int rank, const SavePlan& plan,
                                     const std::vector<SaveItem>& items, const SaveOptions& options,
                                     WriteProgress* progress) {
  std::vector<Part> parts = parts_of(rank, plan, items);
  if (progress != nullptr) {
    for (const Part& part : parts) progress->total += part.bytes;
  }
  const std::vector<std::vector<Part>> files = deal(std::move(parts), options);
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
  std::vector<std::thread> threads;
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
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return written;
}

}  // namespace fsdp2::dcp::detail
