#pragma once

#include <nlohmann/json.hpp>

#include <iostream>

namespace fsdp2::tool {

using Json = nlohmann::ordered_json;

/// Names of other programs need not be UTF-8.
inline void print_json(const Json& json) {
  std::cout << json.dump(2, ' ', false, Json::error_handler_t::replace) << '\n';
}

}  // namespace fsdp2::tool
