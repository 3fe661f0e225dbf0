#include <algorithm>
#include <initializer_list>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensor/operators.h"

namespace fsdp2::detail {
namespace {

using Names = std::initializer_list<const char*>;
struct NameAndOverload {
  const char* name;
  const char* overload;
};
using Exact = std::initializer_list<NameAndOverload>;

class TableBuilder {
 public:
  void add(const char* name, const char* overload, OperatorHandler handler, OnPartial on_partial) {
    rows_.push_back({name, overload, handler, on_partial});
  }
  void add(Exact list, OperatorHandler handler, OnPartial on_partial = OnPartial::kThrow) {
    for (const auto& item : list) add(item.name, item.overload, handler, on_partial);
  }
  void add(Names names, std::initializer_list<const char*> overloads, OperatorHandler handler,
           OnPartial on_partial = OnPartial::kThrow) {
    for (const char* name : names) {
      for (const char* overload : overloads) add(name, overload, handler, on_partial);
    }
  }
  std::vector<OperatorRow> take() { return std::move(rows_); }

 private:
  std::vector<OperatorRow> rows_;
};

// Element-wise operators: value i of the result depends on value i of the arguments alone.
void add_elementwise(TableBuilder& table) {
  const auto local = run_elementwise;
  // f(x)
  table.add({"aten::abs",       "aten::absolute",   "aten::acos",      "aten::acosh",     "aten::angle",
             "aten::arccos",    "aten::arccosh",    "aten::arcsin",    "aten::arcsinh",   "aten::arctan",
             "aten::arctanh",   "aten::asin",       "aten::asinh",     "aten::atan",      "aten::atanh",
             "aten::bitwise_not", "aten::ceil",     "aten::conj_physical", "aten::cos",   "aten::cosh",
             "aten::deg2rad",   "aten::digamma",    "aten::elu",       "aten::erf",       "aten::erfc",
             "aten::erfinv",    "aten::exp",        "aten::exp2",      "aten::expm1",     "aten::fix",
             "aten::floor",     "aten::frac",       "aten::gelu",      "aten::hardshrink", "aten::hardsigmoid",
             "aten::hardswish", "aten::hardtanh",   "aten::i0",        "aten::isneginf",  "aten::isposinf",
             "aten::leaky_relu", "aten::lgamma",    "aten::log",       "aten::log10",     "aten::log1p",
             "aten::log2",      "aten::log_sigmoid", "aten::logical_not", "aten::logit",  "aten::mish",
             "aten::mvlgamma",  "aten::nan_to_num", "aten::polygamma", "aten::rad2deg",   "aten::reciprocal",
             "aten::round",     "aten::rsqrt",      "aten::sgn",       "aten::sigmoid",   "aten::sign",
             "aten::signbit",   "aten::silu",       "aten::sin",       "aten::sinc",      "aten::sinh",
             "aten::softplus",  "aten::softshrink", "aten::sqrt",      "aten::square",    "aten::tan",
             "aten::tanh",      "aten::threshold",  "aten::trunc"},
            {"", "out"}, local);
  table.add({"aten::abs_",      "aten::absolute_",  "aten::acos_",     "aten::acosh_",    "aten::arccos_",
             "aten::arccosh_",  "aten::arcsin_",    "aten::arcsinh_",  "aten::arctan_",   "aten::arctanh_",
             "aten::asin_",     "aten::asinh_",     "aten::atan_",     "aten::atanh_",    "aten::bitwise_not_",
             "aten::ceil_",     "aten::celu",       "aten::celu_",     "aten::conj_physical_", "aten::cos_",
             "aten::cosh_",     "aten::deg2rad_",   "aten::digamma_",  "aten::elu_",      "aten::erf_",
             "aten::erfc_",     "aten::erfinv_",    "aten::exp_",      "aten::exp2_",     "aten::expm1_",
             "aten::fix_",      "aten::floor_",     "aten::frac_",     "aten::gelu_",     "aten::hardsigmoid_",
             "aten::hardswish_", "aten::hardtanh_", "aten::i0_",       "aten::isfinite",  "aten::isinf",
             "aten::isnan",     "aten::isreal",     "aten::leaky_relu_", "aten::lgamma_", "aten::log_",
             "aten::log10_",    "aten::log1p_",     "aten::log2_",     "aten::logical_not_", "aten::logit_",
             "aten::mish_",     "aten::mvlgamma_",  "aten::nan_to_num_", "aten::polygamma_", "aten::rad2deg_",
             "aten::reciprocal_", "aten::relu",     "aten::relu6",     "aten::relu6_",    "aten::relu_",
             "aten::round_",    "aten::rsqrt_",     "aten::selu",      "aten::selu_",     "aten::sgn_",
             "aten::sigmoid_",  "aten::sign_",      "aten::silu_",     "aten::sin_",      "aten::sinc_",
             "aten::sinh_",     "aten::sqrt_",      "aten::square_",   "aten::tan_",      "aten::tanh_",
             "aten::threshold_", "aten::trunc_"},
            {""}, local);
  table.add({{"aten::round", "decimals"}, {"aten::round", "decimals_out"}, {"aten::round_", "decimals"}}, local);
  table.add({"aten::special_airy_ai", "aten::special_bessel_j0", "aten::special_bessel_j1", "aten::special_bessel_y0",
             "aten::special_bessel_y1", "aten::special_digamma", "aten::special_entr", "aten::special_erf",
             "aten::special_erfc", "aten::special_erfcx", "aten::special_erfinv", "aten::special_exp2",
             "aten::special_expit", "aten::special_expm1", "aten::special_gammaln", "aten::special_i0",
             "aten::special_i0e", "aten::special_i1", "aten::special_i1e", "aten::special_log1p",
             "aten::special_log_ndtr", "aten::special_logit", "aten::special_modified_bessel_i0",
             "aten::special_modified_bessel_i1", "aten::special_modified_bessel_k0",
             "aten::special_modified_bessel_k1", "aten::special_ndtr", "aten::special_ndtri", "aten::special_psi",
             "aten::special_round", "aten::special_scaled_modified_bessel_k0",
             "aten::special_scaled_modified_bessel_k1", "aten::special_sinc", "aten::special_spherical_bessel_j0"},
            {"", "out"}, local);
  // f(x), linear
  table.add({"aten::neg", "aten::negative"}, {"", "out"}, local, OnPartial::kScaleFirst);
  table.add({"aten::neg_", "aten::negative_", "aten::positive"}, {""}, local, OnPartial::kScaleFirst);

  // f(x, y)
  table.add({"aten::arctan2", "aten::atan2", "aten::fmax", "aten::fmin", "aten::gcd", "aten::heaviside", "aten::hypot",
             "aten::igamma", "aten::igammac", "aten::lcm", "aten::logaddexp", "aten::logaddexp2", "aten::logical_and",
             "aten::logical_or", "aten::logical_xor", "aten::maximum", "aten::minimum", "aten::nextafter",
             "aten::floor_divide", "aten::special_gammainc", "aten::special_gammaincc"},
            {"", "out"}, local);
  table.add({"aten::arctan2_", "aten::atan2_", "aten::gcd_", "aten::heaviside_", "aten::hypot_", "aten::igamma_",
             "aten::igammac_", "aten::lcm_", "aten::logical_and_", "aten::logical_or_", "aten::logical_xor_",
             "aten::nextafter_"},
            {""}, local);
  table.add({{"aten::floor_divide", "Scalar"}, {"aten::floor_divide_", "Scalar"}, {"aten::floor_divide_", "Tensor"}},
            local);
  table.add({"aten::max", "aten::min"}, {"other", "out"}, local);
  table.add({"aten::eq", "aten::ge", "aten::gt", "aten::le", "aten::lt", "aten::ne", "aten::not_equal",
             "aten::greater", "aten::greater_equal", "aten::less", "aten::less_equal"},
            {"Scalar", "Scalar_out", "Tensor", "Tensor_out"}, local);
  table.add({"aten::eq_", "aten::ge_", "aten::gt_", "aten::le_", "aten::lt_", "aten::ne_", "aten::not_equal_",
             "aten::greater_", "aten::greater_equal_", "aten::less_", "aten::less_equal_"},
            {"Scalar", "Tensor"}, local);
  table.add({"aten::bitwise_and", "aten::bitwise_or", "aten::bitwise_xor"},
            {"Scalar", "Scalar_Tensor", "Scalar_Tensor_out", "Scalar_out", "Tensor", "Tensor_out"}, local);
  table.add({"aten::bitwise_and_", "aten::bitwise_or_", "aten::bitwise_xor_", "aten::__ilshift__", "aten::__irshift__",
             "aten::__iand__", "aten::__ior__", "aten::__ixor__", "aten::__and__", "aten::__or__", "aten::__xor__",
             "aten::__lshift__", "aten::__rshift__"},
            {"Scalar", "Tensor"}, local);
  table.add({"aten::bitwise_left_shift", "aten::bitwise_right_shift"},
            {"Scalar_Tensor", "Scalar_Tensor_out", "Tensor", "Tensor_Scalar", "Tensor_Scalar_out", "Tensor_out"},
            local);
  table.add({"aten::bitwise_left_shift_", "aten::bitwise_right_shift_"}, {"Tensor", "Tensor_Scalar"}, local);
  table.add({"aten::fmod", "aten::copysign"}, {"Scalar", "Scalar_out", "Tensor"}, local);
  table.add({{"aten::fmod", "Tensor_out"}, {"aten::copysign", "out"}}, local);
  table.add({"aten::fmod_", "aten::remainder_", "aten::copysign_"}, {"Scalar", "Tensor"}, local);
  table.add({"aten::remainder"},
            {"Scalar", "Scalar_Tensor", "Scalar_Tensor_out", "Scalar_out", "Tensor", "Tensor_out"}, local);
  table.add({"aten::pow", "aten::float_power"},
            {"Scalar", "Scalar_out", "Tensor_Scalar", "Tensor_Scalar_out", "Tensor_Tensor", "Tensor_Tensor_out"},
            local);
  table.add({"aten::pow_", "aten::float_power_"}, {"Scalar", "Tensor"}, local);
  table.add({"aten::ldexp"}, {"Tensor", "out"}, local);
  table.add({{"aten::ldexp_", ""}}, local);
  table.add({"aten::xlogy"}, {"OutScalar_Other", "OutScalar_Self", "OutTensor", "Scalar_Other", "Scalar_Self",
                              "Tensor"}, local);
  table.add({"aten::xlogy_"}, {"Scalar_Other", "Tensor"}, local);
  table.add({"aten::special_xlog1py", "aten::special_xlogy", "aten::special_zeta"},
            {"", "other_scalar", "other_scalar_out", "out", "self_scalar", "self_scalar_out"}, local);
  table.add({"aten::special_chebyshev_polynomial_t", "aten::special_chebyshev_polynomial_u",
             "aten::special_chebyshev_polynomial_v", "aten::special_chebyshev_polynomial_w",
             "aten::special_hermite_polynomial_h", "aten::special_hermite_polynomial_he",
             "aten::special_laguerre_polynomial_l", "aten::special_legendre_polynomial_p",
             "aten::special_shifted_chebyshev_polynomial_t", "aten::special_shifted_chebyshev_polynomial_u",
             "aten::special_shifted_chebyshev_polynomial_v", "aten::special_shifted_chebyshev_polynomial_w"},
            {"", "n_scalar", "n_scalar_out", "out", "x_scalar", "x_scalar_out"}, local);
  // Linear in both arguments together, or in one.
  table.add({"aten::add", "aten::sub", "aten::subtract"}, {"Tensor", "out"}, local, OnPartial::kAdditive);
  table.add({"aten::add_", "aten::sub_", "aten::subtract_", "aten::rsub"}, {"Tensor"}, local, OnPartial::kAdditive);
  table.add({"aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::subtract", "aten::subtract_", "aten::rsub"},
            {"Scalar"}, local);
  table.add({{"aten::add", "Scalar_out"}, {"aten::sub", "Scalar_out"}, {"aten::rsub", "Tensor_out"},
             {"aten::rsub", "Scalar_out"}}, local);
  table.add({"aten::mul", "aten::multiply", "aten::mul_", "aten::multiply_"}, {"Tensor", "Scalar"}, local,
            OnPartial::kScale);
  table.add({"aten::mul", "aten::multiply"}, {"out"}, local, OnPartial::kThrow);
  table.add({{"aten::mul", "Scalar_out"}}, local);
  table.add({"aten::div", "aten::divide", "aten::true_divide", "aten::div_", "aten::divide_", "aten::true_divide_"},
            {"Tensor", "Scalar"}, local, OnPartial::kScaleFirst);
  table.add({"aten::div", "aten::divide", "aten::true_divide"}, {"out"}, local);
  table.add({"aten::div", "aten::divide", "aten::div_", "aten::divide_"}, {"Tensor_mode", "Scalar_mode"}, local);
  table.add({"aten::div", "aten::divide"}, {"out_mode"}, local);
  table.add({{"aten::div", "Scalar_out"}, {"aten::div", "Scalar_mode_out"}}, local);
  table.add({"aten::lerp", "aten::lerp_"}, {"Scalar"}, local, OnPartial::kAdditive);
  table.add({"aten::lerp"}, {"Scalar_out", "Tensor", "Tensor_out"}, local);
  table.add({{"aten::lerp_", "Tensor"}}, local);

  // f(x, y, z)
  table.add({"aten::addcmul", "aten::addcdiv"}, {"", "out"}, local);
  table.add({"aten::addcmul_", "aten::addcdiv_"}, {""}, local);
  table.add({"aten::clamp", "aten::clamp_max", "aten::clamp_min"}, {"", "Tensor", "Tensor_out", "out"}, local);
  table.add({"aten::clip"}, {"", "Tensor", "Tensor_out", "out"}, local);
  table.add({"aten::clamp_", "aten::clamp_max_", "aten::clamp_min_", "aten::clip_"}, {"", "Tensor"}, local);
  table.add({"aten::where"}, {"self", "self_out", "Scalar", "ScalarSelf", "ScalarOther"}, local);
  table.add({"aten::masked_fill", "aten::masked_fill_"}, {"Scalar", "Tensor"}, local);
  table.add({"aten::isclose"}, {""}, local);
  table.add({"aten::gelu_backward", "aten::silu_backward", "aten::sigmoid_backward", "aten::tanh_backward",
             "aten::threshold_backward", "aten::logit_backward", "aten::elu_backward", "aten::hardtanh_backward",
             "aten::leaky_relu_backward", "aten::softplus_backward"},
            {"", "grad_input"}, local);
}

// Values move or are cleared; also what reads no value at all.
void add_copies(TableBuilder& table) {
  const auto local = run_elementwise;
  table.add({{"aten::zero_", ""}, {"aten::copy_", ""}, {"aten::zeros_like", ""}, {"aten::empty_like", ""},
             {"aten::pin_memory", ""}, {"aten::record_stream", ""}, {"aten::is_pinned", ""}},
            local, OnPartial::kIdentity);
  table.add({{"aten::clone", ""}, {"aten::clone", "out"}, {"aten::zero", ""}, {"aten::zero", "out"}, {"aten::copy", ""},
             {"aten::fill_", "Scalar"}, {"aten::fill_", "Tensor"}, {"aten::fill", "Scalar"}, {"aten::fill", "Tensor"},
             {"aten::fill", "Scalar_out"}, {"aten::fill", "Tensor_out"}, {"aten::ones_like", ""},
             {"aten::ones_like", "out"}, {"aten::zeros_like", "out"}, {"aten::full_like", ""},
             {"aten::full_like", "out"}, {"aten::isin", "Tensor_Scalar"}},
            local);
  table.add({{"aten::detach", ""}}, run_detach, OnPartial::kIdentity);
  table.add({{"aten::alias", ""}}, run_alias, OnPartial::kIdentity);
  table.add({{"aten::contiguous", ""}}, run_contiguous, OnPartial::kIdentity);
  table.add({{"aten::to", "dtype"}, {"aten::to", "dtype_layout"}, {"aten::to", "device"}, {"aten::to", "other"},
             {"aten::_to_copy", ""}, {"aten::type_as", ""}},
            run_cast, OnPartial::kIdentity);
  table.add({{"aten::requires_grad_", ""}, {"aten::detach_", ""}, {"aten::is_leaf", ""}, {"aten::output_nr", ""},
             {"aten::_version", ""}, {"aten::retain_grad", ""}, {"aten::retains_grad", ""}, {"aten::size", "int"},
             {"aten::sym_size", "int"}, {"aten::stride", "int"}, {"aten::sym_stride", "int"}, {"aten::sym_numel", ""},
             {"aten::is_same_size", ""}, {"aten::is_floating_point", ""}, {"aten::is_complex", ""},
             {"aten::is_signed", ""}, {"aten::is_conj", ""}, {"aten::is_neg", ""}, {"aten::is_inference", ""},
             {"aten::result_type", "Tensor"}, {"aten::result_type", "Scalar"}, {"aten::result_type", "Scalar_Tensor"}},
            run_on_marked, OnPartial::kIdentity);
  // Tensor::set_data is no operator, but asks the second of these first.
  table.add({{"aten::set_data", ""}, {"aten::_has_compatible_shallow_copy_type", ""}}, run_set_data,
            OnPartial::kIdentity);
  table.add({{"aten::_backward", ""}}, run_backward_call, OnPartial::kIdentity);
}

void add_lists(TableBuilder& table) {
  const auto lists = run_foreach;
  table.add({"aten::_foreach_abs", "aten::_foreach_acos", "aten::_foreach_asin", "aten::_foreach_atan",
             "aten::_foreach_ceil", "aten::_foreach_cos", "aten::_foreach_cosh", "aten::_foreach_erf",
             "aten::_foreach_erfc", "aten::_foreach_exp", "aten::_foreach_expm1", "aten::_foreach_floor",
             "aten::_foreach_frac", "aten::_foreach_lgamma", "aten::_foreach_log", "aten::_foreach_log10",
             "aten::_foreach_log1p", "aten::_foreach_log2", "aten::_foreach_neg", "aten::_foreach_reciprocal",
             "aten::_foreach_round", "aten::_foreach_rsqrt", "aten::_foreach_sigmoid", "aten::_foreach_sign",
             "aten::_foreach_sin", "aten::_foreach_sinh", "aten::_foreach_sqrt", "aten::_foreach_tan",
             "aten::_foreach_tanh", "aten::_foreach_trunc"},
            {"", "out"}, lists);
  table.add({"aten::_foreach_abs_", "aten::_foreach_acos_", "aten::_foreach_asin_", "aten::_foreach_atan_",
             "aten::_foreach_ceil_", "aten::_foreach_cos_", "aten::_foreach_cosh_", "aten::_foreach_erf_",
             "aten::_foreach_erfc_", "aten::_foreach_exp_", "aten::_foreach_expm1_", "aten::_foreach_floor_",
             "aten::_foreach_frac_", "aten::_foreach_lgamma_", "aten::_foreach_log_", "aten::_foreach_log10_",
             "aten::_foreach_log1p_", "aten::_foreach_log2_", "aten::_foreach_neg_", "aten::_foreach_reciprocal_",
             "aten::_foreach_round_", "aten::_foreach_rsqrt_", "aten::_foreach_sigmoid_", "aten::_foreach_sign_",
             "aten::_foreach_sin_", "aten::_foreach_sinh_", "aten::_foreach_sqrt_", "aten::_foreach_tan_",
             "aten::_foreach_tanh_", "aten::_foreach_trunc_"},
            {""}, lists);
  table.add({"aten::_foreach_add", "aten::_foreach_sub", "aten::_foreach_mul", "aten::_foreach_div",
             "aten::_foreach_maximum", "aten::_foreach_minimum", "aten::_foreach_clamp_max",
             "aten::_foreach_clamp_min"},
            {"List", "Scalar", "ScalarList", "List_out", "Scalar_out", "ScalarList_out"}, lists);
  table.add({"aten::_foreach_add_", "aten::_foreach_sub_", "aten::_foreach_mul_", "aten::_foreach_div_",
             "aten::_foreach_maximum_", "aten::_foreach_minimum_", "aten::_foreach_clamp_max_",
             "aten::_foreach_clamp_min_", "aten::_foreach_pow_"},
            {"List", "Scalar", "ScalarList"}, lists);
  table.add({"aten::_foreach_add", "aten::_foreach_mul", "aten::_foreach_div"}, {"Tensor", "Tensor_out"}, lists);
  table.add({"aten::_foreach_add_", "aten::_foreach_mul_", "aten::_foreach_div_"}, {"Tensor"}, lists);
  table.add({"aten::_foreach_pow"}, {"List", "Scalar", "ScalarList", "List_out", "Scalar_out", "ScalarList_out"},
            lists);
  table.add({"aten::_foreach_addcmul", "aten::_foreach_addcdiv"},
            {"Scalar", "ScalarList", "Scalar_out", "ScalarList_out"}, lists);
  table.add({"aten::_foreach_addcmul_", "aten::_foreach_addcdiv_"}, {"Scalar", "ScalarList"}, lists);
  table.add({"aten::_foreach_lerp"}, {"List", "Scalar", "List_out", "Scalar_out"}, lists);
  table.add({"aten::_foreach_lerp_"}, {"List", "Scalar"}, lists);
  table.add({{"aten::_foreach_copy", ""}, {"aten::_foreach_copy_", ""}, {"aten::_foreach_copy", "out"},
             {"aten::_foreach_zero", ""}, {"aten::_foreach_zero", "out"}},
            lists);
  table.add({{"aten::_foreach_zero_", ""}}, lists, OnPartial::kIdentity);
  table.add({"aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_fused_adagrad_"},
            {"", "tensor_lr"}, lists);
}

void add_reductions(TableBuilder& table) {
  table.add({{"aten::sum", ""}, {"aten::sum", "dim_IntList"}}, run_sum);
  table.add({{"aten::mean", ""}, {"aten::mean", "dim"}}, run_mean);
  table.add({{"aten::prod", ""}}, run_prod);
  table.add({{"aten::max", ""}, {"aten::amax", ""}}, run_max);
  table.add({{"aten::min", ""}, {"aten::amin", ""}}, run_min);
  table.add({{"aten::any", ""}}, run_any);
  table.add({{"aten::all", ""}}, run_all);
  table.add({{"aten::count_nonzero", ""}, {"aten::count_nonzero", "dim_IntList"}}, run_count_nonzero);
  table.add({{"aten::norm", "Scalar"}, {"aten::norm", "ScalarOpt_dtype"}, {"aten::norm", "ScalarOpt_dim"},
             {"aten::norm", "ScalarOpt_dim_dtype"}, {"aten::linalg_vector_norm", ""}},
            run_norm);
  table.add({{"aten::_foreach_norm", "Scalar"}}, run_foreach_norm);
  table.add({{"aten::dot", ""}, {"aten::vdot", ""}}, run_dot);
  table.add({{"aten::equal", ""}}, run_equal);
  table.add({{"aten::item", ""}, {"aten::_local_scalar_dense", ""}, {"aten::is_nonzero", ""}}, run_item);
}

void add_random(TableBuilder& table) {
  table.add({{"aten::uniform_", ""}, {"aten::normal_", ""}, {"aten::bernoulli_", "float"}, {"aten::random_", ""},
             {"aten::random_", "from"}, {"aten::random_", "to"}, {"aten::exponential_", ""}, {"aten::cauchy_", ""},
             {"aten::log_normal_", ""}, {"aten::geometric_", ""}},
            run_random);
  table.add({{"aten::rand_like", ""}, {"aten::rand_like", "generator"}, {"aten::randn_like", ""},
             {"aten::randn_like", "generator"}, {"aten::randint_like", ""}, {"aten::randint_like", "low_dtype"},
             {"aten::randint_like", "generator"}, {"aten::randint_like", "low_generator_dtype"}},
            run_random_like);
}

bool holds_tensors(const c10::TypePtr& type, bool* list) {
  *list = type->kind() == c10::TypeKind::ListType;
  if (type->kind() == c10::TypeKind::TensorType) return true;
  if (type->kind() == c10::TypeKind::OptionalType) {
    return holds_tensors(type->castRaw<c10::OptionalType>()->getElementType(), list);
  }
  if (!*list) return false;
  bool nested = false;
  const bool tensors = holds_tensors(type->castRaw<c10::ListType>()->getElementType(), &nested);
  *list = true;
  return tensors;
}

OperatorInfo read_schema(const c10::FunctionSchema& schema, const OperatorRow& row) {
  OperatorInfo info{row.handler, row.on_partial, 0, 0, false, {}, {}};
  info.num_args = static_cast<uint16_t>(schema.arguments().size());
  info.num_returns = static_cast<uint16_t>(schema.returns().size());
  for (size_t index = 0; index < schema.arguments().size(); ++index) {
    const auto& argument = schema.arguments()[index];
    bool list = false;
    if (!holds_tensors(argument.type(), &list)) continue;
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    info.tensors.push_back({static_cast<uint16_t>(index), list, written});
    info.has_lists = info.has_lists || list;
  }
  for (const auto& result : schema.returns()) {
    bool list = false;
    int16_t source = OperatorInfo::kNotATensor;
    if (holds_tensors(result.type(), &list)) {
      source = OperatorInfo::kFresh;
      const auto* alias = result.alias_info();
      for (const auto& argument : info.tensors) {
        const auto* other = schema.arguments()[argument.index].alias_info();
        if (alias != nullptr && alias->isWrite() && other != nullptr && argument.written &&
            alias->beforeSets() == other->beforeSets()) {
          source = static_cast<int16_t>(argument.index);
        }
      }
    }
    info.returns.push_back(source);
  }
  return info;
}

using Table = std::unordered_map<c10::OperatorHandle, OperatorInfo>;

Table resolve_table() {
  Table table;
  for (const auto& row : operator_rows()) {
    // Not every supported libtorch has every operator.
    const auto op = c10::Dispatcher::singleton().findSchema({row.name, row.overload});
    if (op.has_value()) table.emplace(*op, read_schema(op->schema(), row));
  }
  return table;
}

}  // namespace

const std::vector<OperatorRow>& operator_rows() {
  static const std::vector<OperatorRow> rows = [] {
    TableBuilder table;
    add_elementwise(table);
    add_copies(table);
    add_lists(table);
    add_reductions(table);
    add_random(table);
    return table.take();
  }();
  return rows;
}

const OperatorInfo* find_operator(const c10::OperatorHandle& op) {
  static const Table table = resolve_table();
  const auto found = table.find(op);
  return found == table.end() ? nullptr : &found->second;
}

}  // namespace fsdp2::detail
