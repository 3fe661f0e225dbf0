#include <fsdp2/dcp/convert.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <memory>

#include "checkpoint/command.h"
#include "checkpoint/json.h"
#include "checkpoint/text.h"

namespace fsdp2::tool {
namespace {

struct Options {
  std::string path;
  dcp::InspectOptions inspect;
  bool json = false;
};

struct Total {
  size_t count = 0;
  uint64_t bytes = 0;
};

/// By dtype ("value" for what has none), and by what stands before the first dot of the key.
struct Totals {
  std::map<std::string, Total> by_dtype, by_top;
  Total tensors, values;

  explicit Totals(const dcp::CheckpointContents& info) {
    for (const dcp::ItemInfo& item : info.items) {
      add(by_dtype[item.dtype ? dcp::dtype_text(*item.dtype) : "value"], item);
      add(by_top[item.key.substr(0, item.key.find('.'))], item);
      add(item.dtype ? tensors : values, item);
    }
  }
  static void add(Total& total, const dcp::ItemInfo& item) {
    ++total.count;
    total.bytes += item.bytes;
  }
};

Json value_json(const dcp::Value& value) {
  switch (value.kind()) {
    case dcp::Kind::None:
      return nullptr;
    case dcp::Kind::Bool:
      return value.boolean();
    case dcp::Kind::Int:
      return value.integer();
    case dcp::Kind::Double:
      return value.number();
    case dcp::Kind::String:
      return value.str();
    case dcp::Kind::List:
    case dcp::Kind::Tuple: {
      Json list = Json::array();
      for (const dcp::Value& item : value.list()) list.push_back(value_json(item));
      return list;
    }
    default:
      return value_text(value, 10'000);
  }
}

Json files_json(const std::vector<dcp::FileInfo>& files) {
  Json list = Json::array();
  for (const dcp::FileInfo& file : files) list.push_back({{"name", file.name}, {"bytes", file.bytes}});
  return list;
}

Json totals_json(const std::map<std::string, Total>& totals) {
  Json object = Json::object();
  for (const auto& [name, total] : totals) object[name] = {{"items", total.count}, {"bytes", total.bytes}};
  return object;
}

void show_json(const Options& options, const dcp::CheckpointContents& info, const Totals& totals) {
  Json items = Json::array();
  for (const dcp::ItemInfo& item : info.items) {
    Json one = {{"key", item.key}};
    one["dtype"] = item.dtype ? Json(dcp::dtype_text(*item.dtype)) : Json(nullptr);
    one["shape"] = item.dtype ? Json(item.sizes) : Json(nullptr);
    one["bytes"] = item.bytes;
    one["chunks"] = item.chunks;
    one["files"] = item.files;
    if (item.value) one["value"] = value_json(*item.value);
    items.push_back(std::move(one));
  }
  Json out = {{"path", options.path}, {"format", dcp::to_string(info.format)}, {"items", std::move(items)}};
  if (info.num_ranks > 0) out["ranks"] = info.num_ranks;
  out["by_dtype"] = totals_json(totals.by_dtype);
  out["by_top_level_key"] = totals_json(totals.by_top);
  out["files"] = files_json(info.files);
  out["unreferenced"] = files_json(info.unreferenced);
  out["notes"] = info.notes;
  print_json(out);
}

std::string totals_text(const std::map<std::string, Total>& totals) {
  std::vector<std::pair<std::string, Total>> sorted(totals.begin(), totals.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.second.bytes > b.second.bytes; });
  constexpr size_t kMost = 12;
  Table table;
  for (size_t i = 0; i < std::min(kMost, sorted.size()); ++i) {
    table.row({"  " + printable(sorted[i].first), count_text(sorted[i].second.count, "key"),
               bytes_text(sorted[i].second.bytes)});
  }
  return table.text() + (sorted.size() > kMost ? "  and " + std::to_string(sorted.size() - kMost) + " more\n" : "");
}

std::string files_text(const std::vector<std::string>& files) {
  constexpr size_t kWidth = 40;
  const std::string two = list_text(files, 2);
  return two.size() <= kWidth ? two : list_text(files, 1);
}

void show_text(const Options& options, const dcp::CheckpointContents& info, const Totals& totals) {
  std::cout << options.path << ": " << dcp::to_string(info.format) << ", " << count_text(totals.tensors.count, "tensor")
            << " of " << bytes_text(totals.tensors.bytes) << ", " << count_text(totals.values.count, "value") << ", "
            << count_text(info.files.size(), "file");
  if (info.num_ranks > 0) std::cout << ", written by " << count_text(static_cast<size_t>(info.num_ranks), "rank");
  std::cout << "\n\n";
  Table table;
  table.row({"key", "dtype", "shape", "bytes", "chunks", "files", options.inspect.values ? "value" : ""});
  for (const dcp::ItemInfo& item : info.items) {
    table.row({printable(item.key), item.dtype ? dcp::dtype_text(*item.dtype) : "value",
               item.dtype ? shape_text(item.sizes) : "", bytes_text(item.bytes), std::to_string(item.chunks),
               files_text(item.files), item.value ? value_text(*item.value) : ""});
  }
  std::cout << table.text() << "\nby dtype\n" << totals_text(totals.by_dtype);
  std::cout << "by top-level key\n" << totals_text(totals.by_top);
  if (!info.notes.empty()) {
    std::cout << "notes in the header\n";
    for (const auto& [key, note] : info.notes) std::cout << "  " << printable(key) << ": " << printable(note) << '\n';
  }
  if (info.unreferenced.empty()) return;
  std::cout << "not part of the checkpoint (left over from another save?)\n";
  for (const dcp::FileInfo& file : info.unreferenced)
    std::cout << "  " << printable(file.name) << "  " << bytes_text(file.bytes) << '\n';
}

}  // namespace

CheckpointCommand::Subcommand add_inspect(CLI::App& parent) {
  auto options = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("inspect", "List what a checkpoint holds; reads headers only.");
  app->add_option("PATH", options->path, "a checkpoint folder or file")->required();
  app->add_option("--keys", options->inspect.keys, "only keys that match this pattern (* is any text); may be repeated")
      ->allow_extra_args(false);
  app->add_flag("--values", options->inspect.values, "show plain values, and tensors of at most 16 elements");
  app->add_flag("--json", options->json, "print JSON");
  return {app, [options] {
            const dcp::CheckpointContents info = dcp::inspect(options->path, options->inspect);
            const Totals totals(info);
            options->json ? show_json(*options, info, totals) : show_text(*options, info, totals);
            return 0;
          }};
}

}  // namespace fsdp2::tool
