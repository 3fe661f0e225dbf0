#pragma once

// One part of the report of `fsdp2 doctor`: what was seen, and what is wrong with it.

#include <string>
#include <utility>
#include <vector>

#include <fsdp2/diagnose.h>

#include "checkpoint/json.h"
#include "checkpoint/text.h"

namespace fsdp2::tool {

struct DoctorOptions {
  int num_ranks = 2;  // that are to run on this machine
  std::string folder = ".";
  bool benchmarks = true;
};

class Topic {
 public:
  /// `name` is its key in the JSON, and where its findings are.
  explicit Topic(std::string name) : name_(std::move(name)) {}

  /// A fact: a value for programs, and a row for people.
  void fact(const std::string& key, Json value, const std::string& label, const std::string& text) {
    fact(key, std::move(value));
    rows_.emplace_back(label, text);
  }
  /// One for programs only.
  void fact(const std::string& key, Json value) { facts_[key] = std::move(value); }

  /// `rule` is a stable id.
  void find(Severity severity, const std::string& rule, const std::string& what, const std::string& fix) {
    findings_.push_back({rule, severity, printable(what), name_, printable(fix)});
  }

  const std::string& name() const { return name_; }
  const Json& facts() const { return facts_; }
  const std::vector<std::pair<std::string, std::string>>& rows() const { return rows_; }
  const std::vector<Finding>& findings() const { return findings_; }

 private:
  std::string name_;
  Json facts_ = Json::object();
  std::vector<std::pair<std::string, std::string>> rows_;
  std::vector<Finding> findings_;
};

// The parts, in the order of the report. Each works on its own; what one throws is a finding, and the others go on.
void check_libtorch(const DoctorOptions& options, Topic& topic);
void check_devices(const DoctorOptions& options, Topic& topic);
void check_backends(const DoctorOptions& options, Topic& topic);
void check_network(const DoctorOptions& options, Topic& topic);
void check_shared_memory(const DoctorOptions& options, Topic& topic);
void check_limits(const DoctorOptions& options, Topic& topic);
void check_environment(const DoctorOptions& options, Topic& topic);
void check_collectives(const DoctorOptions& options, Topic& topic);
void check_folder(const DoctorOptions& options, Topic& topic);

}  // namespace fsdp2::tool
