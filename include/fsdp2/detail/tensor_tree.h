#pragma once

// Finds the Tensors inside a module's inputs and outputs. Part of module.h.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

/// Lists the fields of a struct that a module takes or returns, in the struct's own namespace. Fields that hold
/// no tensors may be left out.
#define FSDP2_FIELDS(Type, ...)                                                     \
  template <class Visitor>                                                          \
  void fsdp2_visit_fields(Type& value, Visitor&& visitor) {                         \
    FSDP2_DETAIL_FOR_EACH(FSDP2_DETAIL_VISIT_FIELD, __VA_ARGS__)                    \
  }                                                                                 \
  static_assert(true, "a semicolon follows")

/// Declares a type free of tensors. At global scope.
#define FSDP2_OPAQUE(...)                                                   \
  template <>                                                               \
  struct fsdp2::detail::IsOpaque<__VA_ARGS__> : std::true_type {};          \
  static_assert(true, "a semicolon follows")

#define FSDP2_DETAIL_VISIT_FIELD(field) visitor(value.field);
#define FSDP2_DETAIL_PARENS ()
#define FSDP2_DETAIL_EXPAND(...) \
  FSDP2_DETAIL_EXPAND3(FSDP2_DETAIL_EXPAND3(FSDP2_DETAIL_EXPAND3(__VA_ARGS__)))
#define FSDP2_DETAIL_EXPAND3(...) \
  FSDP2_DETAIL_EXPAND2(FSDP2_DETAIL_EXPAND2(FSDP2_DETAIL_EXPAND2(__VA_ARGS__)))
#define FSDP2_DETAIL_EXPAND2(...) \
  FSDP2_DETAIL_EXPAND1(FSDP2_DETAIL_EXPAND1(FSDP2_DETAIL_EXPAND1(__VA_ARGS__)))
#define FSDP2_DETAIL_EXPAND1(...) __VA_ARGS__
#define FSDP2_DETAIL_FOR_EACH(macro, ...) \
  __VA_OPT__(FSDP2_DETAIL_EXPAND(FSDP2_DETAIL_FOR_EACH_STEP(macro, __VA_ARGS__)))
#define FSDP2_DETAIL_FOR_EACH_STEP(macro, first, ...) \
  macro(first) __VA_OPT__(FSDP2_DETAIL_FOR_EACH_AGAIN FSDP2_DETAIL_PARENS(macro, __VA_ARGS__))
#define FSDP2_DETAIL_FOR_EACH_AGAIN() FSDP2_DETAIL_FOR_EACH_STEP

namespace fsdp2::detail {

/// Types that hold no tensors and pass as they are.
template <class T>
struct IsOpaque
    : std::bool_constant<std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_pointer_v<T> ||
                         std::is_null_pointer_v<T>> {};
template <>
struct IsOpaque<std::string> : std::true_type {};
template <>
struct IsOpaque<std::string_view> : std::true_type {};
template <>
struct IsOpaque<std::nullopt_t> : std::true_type {};
template <>
struct IsOpaque<std::monostate> : std::true_type {};
template <>
struct IsOpaque<c10::Scalar> : std::true_type {};
template <>
struct IsOpaque<c10::Device> : std::true_type {};
template <>
struct IsOpaque<c10::IntArrayRef> : std::true_type {};

template <class T, class Visitor>
concept HasListedFields = requires(T& value, Visitor& visitor) { fsdp2_visit_fields(value, visitor); };

template <class T>
struct AlwaysFalse : std::false_type {};

/// Calls `f(Tensor&)` on every Tensor inside `value`.
template <class T, class F>
void visit_tensors(T& value, F& f);

template <class F>
struct TensorVisitor {
  F& f;
  template <class T>
  void operator()(T& value) const {
    visit_tensors(value, f);
  }

  void visit(at::Tensor& tensor) const { f(tensor); }
  template <class T>
  void visit(std::optional<T>& value) const {
    if (value) (*this)(*value);
  }
  template <class T, class A>
  void visit(std::vector<T, A>& values) const {
    if constexpr (!IsOpaque<T>::value) {
      for (T& value : values) (*this)(value);
    }
  }
  template <class T, size_t N>
  void visit(std::array<T, N>& values) const {
    for (T& value : values) (*this)(value);
  }
  template <class A, class B>
  void visit(std::pair<A, B>& value) const {
    (*this)(value.first);
    (*this)(value.second);
  }
  template <class... T>
  void visit(std::tuple<T...>& value) const {
    std::apply([this](T&... each) { ((*this)(each), ...); }, value);
  }
  template <class K, class V, class... Rest>
  void visit(std::map<K, V, Rest...>& values) const {
    for (auto& entry : values) (*this)(entry.second);
  }
  template <class K, class V, class... Rest>
  void visit(std::unordered_map<K, V, Rest...>& values) const {
    for (auto& entry : values) (*this)(entry.second);
  }
};

template <class T, class F>
void visit_tensors(T& value, F& f) {
  using Plain = std::remove_cv_t<T>;
  const TensorVisitor<F> visitor{f};
  if constexpr (IsOpaque<Plain>::value) {
    return;
  } else if constexpr (requires { visitor.visit(value); }) {
    visitor.visit(value);
  } else if constexpr (HasListedFields<T, const TensorVisitor<F>>) {
    fsdp2_visit_fields(value, visitor);
  } else {
    static_assert(AlwaysFalse<T>::value,
                  "fsdp2: a module takes or returns a type that may hide tensors. List its fields with "
                  "FSDP2_FIELDS(Type, field, ...) in its namespace, or declare it free of tensors with "
                  "FSDP2_OPAQUE(Type) at global scope.");
  }
}

}  // namespace fsdp2::detail
