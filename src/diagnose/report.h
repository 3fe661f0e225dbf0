#pragma once

// Findings as text and as JSON, and their order.

#include <fsdp2/diagnose.h>

#include <nlohmann/json.hpp>

namespace fsdp2::detail::diagnose {

nlohmann::json json_of(const Finding& finding);
Finding finding_from(const nlohmann::json& value);

/// Position among diagnose_rules(); their number for an unknown id.
size_t rule_index(const std::string& rule);

}  // namespace fsdp2::detail::diagnose
