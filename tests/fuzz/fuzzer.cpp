// The entry of libFuzzer; FSDP2_FUZZ_TARGET is the name of a corpus.

#include "fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fsdp2::fuzz::Target* const target = [] {
    for (const auto& known : fsdp2::fuzz::kTargets) {
      if (std::string_view(known.name) == FSDP2_FUZZ_TARGET) return &known;
    }
    throw std::logic_error("no such target: " FSDP2_FUZZ_TARGET);
  }();
  try {
    target->read({reinterpret_cast<const char*>(data), size});
  } catch (const fsdp2::Error&) {
  }
  return 0;
}
