#pragma once

// Errors that say which file they are about.

#include <fsdp2/error.h>

#include <string>

namespace fsdp2::dcp::detail {

/// Runs `work`; an error that does not name `what` gets it in front. What reads pickles does not know whose they are.
template <class Work>
auto naming(const std::string& what, const Work& work) {
  try {
    return work();
  } catch (const Error& error) {
    const std::string text = error.what_without_backtrace();
    if (text.find(what) != std::string::npos) throw;
    throw Error(error.code(), "[dcp] " + what + ": " + text);
  }
}

}  // namespace fsdp2::dcp::detail
