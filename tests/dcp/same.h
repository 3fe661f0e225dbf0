#pragma once

// Bit-exact comparison of state dicts.

#include <fsdp2/dcp/dcp.h>
#include <fsdp2/tensor/dtensor.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

namespace fsdp2::testing {

/// A DTensor is compared by its local part; against a plain tensor, both must be whole.
inline ::testing::AssertionResult same(const torch::Tensor& a, const torch::Tensor& b, const std::string& where) {
  torch::NoGradGuard no_grad;
  const torch::Tensor x = is_dtensor(a) ? DTensor(a).to_local() : a, y = is_dtensor(b) ? DTensor(b).to_local() : b;
  if (x.scalar_type() != y.scalar_type() || x.sizes() != y.sizes()) {
    return ::testing::AssertionFailure() << where << ": " << x.toString() << x.sizes() << " against " << y.toString()
                                         << y.sizes();
  }
  const auto bits = [](const torch::Tensor& t) { return t.contiguous().reshape({-1}).view(torch::kUInt8); };
  if (x.numel() > 0 && !bits(x).equal(bits(y)))
    return ::testing::AssertionFailure() << where << ": " << x << " against " << y;
  return ::testing::AssertionSuccess();
}

inline ::testing::AssertionResult same(const dcp::Value& a, const dcp::Value& b, const std::string& where) {
  using dcp::Kind;
  const auto is_dict = [](const dcp::Value& v) { return v.kind() == Kind::Dict || v.kind() == Kind::OrderedDict; };
  if (is_dict(a) && is_dict(b)) {
    const auto x = a.items(), y = b.items();
    if (x.size() != y.size())
      return ::testing::AssertionFailure() << where << ": " << x.size() << " keys against " << y.size();
    for (const auto& [key, value] : y) {
      bool found = false;
      for (const auto& [other_key, other] : x) {
        if (!same(other_key, key, "")) continue;
        found = true;
        const auto result = same(other, value, where + "." + (key.kind() == Kind::String ? key.str() : "<key>"));
        if (!result) return result;
      }
      if (!found) return ::testing::AssertionFailure() << where << ": a key is missing";
    }
    return ::testing::AssertionSuccess();
  }
  if (a.kind() != b.kind())
    return ::testing::AssertionFailure() << where << ": " << to_string(a.kind()) << " against " << to_string(b.kind());
  switch (a.kind()) {
    case Kind::None:
      return ::testing::AssertionSuccess();
    case Kind::Bool:
    case Kind::Int:
    case Kind::Double:
      if (a.number() == b.number()) return ::testing::AssertionSuccess();
      return ::testing::AssertionFailure() << where << ": " << a.number() << " against " << b.number();
    case Kind::Tensor:
      return same(a.tensor(), b.tensor(), where);
    case Kind::List:
    case Kind::Tuple:
    case Kind::Set:
    case Kind::FrozenSet:
    case Kind::Size:
    case Kind::Complex:
      if (a.list().size() != b.list().size()) return ::testing::AssertionFailure() << where << ": lengths differ";
      for (size_t i = 0; i < a.list().size(); ++i) {
        const auto result = same(a.list()[i], b.list()[i], where + "[" + std::to_string(i) + "]");
        if (!result) return result;
      }
      return ::testing::AssertionSuccess();
    default:
      if (a.str() == b.str()) return ::testing::AssertionSuccess();
      return ::testing::AssertionFailure() << where << ": '" << a.str() << "' against '" << b.str() << "'";
  }
}

inline ::testing::AssertionResult same(const dcp::StateDict& a, const dcp::StateDict& b) {
  return same(dcp::Value(a), dcp::Value(b), "");
}

}  // namespace fsdp2::testing
