#pragma once

// What the parity.cpp share. It includes all that the programs include, before they stand in namespaces.

#include <fsdp2/fsdp2.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

inline bool report(const char* what, const fsdp2::ParityReport& parity) {
  if (fsdp2::get_rank() == 0) std::cout << what << ": " << parity.to_string() << std::endl;
  return parity.ok;
}
