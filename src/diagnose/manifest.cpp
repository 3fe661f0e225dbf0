#include "diagnose/manifest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <nlohmann/json.hpp>

#include <set>

#include "diagnose/report.h"

namespace fsdp2::detail::diagnose {

namespace {

using nlohmann::json;

std::string hash_values(const Tensor& local) {
  const Tensor bytes = local.detach().to(at::kCPU).contiguous();
  return c10::str(XXH3_64bits(bytes.numel() == 0 ? "" : bytes.const_data_ptr(), bytes.nbytes()));
}

std::string place_of(const DTensorSpec& spec) {
  std::string text = c10::str("ranks ");
  const Tensor ranks = spec.mesh.ranks();
  for (int64_t i = 0; i < ranks.numel(); ++i) text += c10::str(ranks.const_data_ptr<int64_t>()[i], " ");
  for (const Box& box : spec.local_chunks()) {
    text += c10::str("at ", at::IntArrayRef(box.offsets), " ", at::IntArrayRef(box.sizes));
  }
  return text;
}

Manifest::Entry entry_of(const SeenParam& param, const Subject& subject) {
  const DTensorSpec* spec = param.spec();
  Manifest::Entry entry{param.fqn, "", "", "", param.tensor.grad().defined()};
  entry.text = c10::str(spec != nullptr ? at::IntArrayRef(spec->sizes) : param.tensor.sizes(), " ",
                        param.local().scalar_type(), param.trainable() ? ", trainable" : ", frozen",
                        spec != nullptr ? ", " + to_string(spec->placements) : std::string(", plain"));
  // A plain parameter, ignored or not, is for the user to keep equal or not.
  if (spec == nullptr || spec->local.is_meta() || !subject.options.compare_values) return entry;
  entry.place = place_of(*spec);
  entry.values = hash_values(spec->local);
  return entry;
}

void add_peers(const DeviceMesh& mesh, std::set<int>& peers) {
  const Tensor ranks = mesh.ranks();
  for (int64_t i = 0; i < ranks.numel(); ++i) peers.insert(static_cast<int>(ranks.const_data_ptr<int64_t>()[i]));
}

json to_json(const std::vector<Manifest::Entry>& entries) {
  json list = json::array();
  for (const auto& each : entries) {
    list.push_back({each.fqn, each.text, each.place, each.values, each.has_gradient});
  }
  return list;
}

std::vector<Manifest::Entry> entries_from(const json& list) {
  std::vector<Manifest::Entry> entries;
  for (const json& each : list) entries.push_back({each[0], each[1], each[2], each[3], each[4]});
  return entries;
}

}  // namespace

int64_t hash_of(const std::string& text) { return static_cast<int64_t>(XXH3_64bits(text.data(), text.size()) >> 1); }

Manifest manifest_of(const Subject& subject, const Findings& own) {
  Manifest manifest;
  manifest.findings = own;
  for (const SeenParam& param : subject.params) manifest.params.push_back(entry_of(param, subject));
  for (const auto& [fqn, buffer] : subject.buffers) {
    Manifest::Entry entry{fqn, c10::str(buffer.sizes(), " ", buffer.scalar_type(), ", a buffer"), "", "", false};
    if (subject.options.compare_values && !is_marked(buffer) && !buffer.is_meta()) entry.values = hash_values(buffer);
    manifest.buffers.push_back(std::move(entry));
  }
  std::set<int> peers;
  for (const SeenState& each : subject.states) {
    for (const auto& group : each.state->groups) {
      std::vector<std::string> fqns;
      for (const FSDPParam& param : group->params()) fqns.push_back(param.fqn());
      manifest.groups.push_back(c10::str("the group of ", each.name(), ": ", list_names(fqns)));
      add_peers(group->mesh().mesh, peers);
    }
  }
  manifest.peers.assign(peers.begin(), peers.end());
  return manifest;
}

std::string Manifest::encode() const {
  json all{{"params", to_json(params)},
           {"buffers", to_json(buffers)},
           {"groups", groups},
           {"peers", peers},
           {"findings", json::array()}};
  for (const Finding& each : findings) all["findings"].push_back(json_of(each));
  return all.dump(-1, ' ', false, json::error_handler_t::replace);
}

Manifest Manifest::decode(const std::string& text) {
  const json all = json::parse(text);
  Manifest manifest;
  manifest.params = entries_from(all["params"]);
  manifest.buffers = entries_from(all["buffers"]);
  manifest.groups = all["groups"].get<std::vector<std::string>>();
  manifest.peers = all["peers"].get<std::vector<int>>();
  for (const json& each : all["findings"]) manifest.findings.push_back(finding_from(each));
  return manifest;
}

}  // namespace fsdp2::detail::diagnose
