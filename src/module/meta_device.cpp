// MetaDeviceGuard. A fallback on a dispatch key that libtorch reserves for tests, switched on for one thread: it sees
// every operator above autograd and sends factories that name no device to meta. A device that is named stays:
// torch::tensor({1, 2}) needs real memory while it is filled.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <fsdp2/error.h>
#include <fsdp2/meta_init.h>

namespace fsdp2 {

namespace {

constexpr c10::DispatchKey kMetaKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

bool is_on_meta(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_meta();
}

void meta_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  bool has_tensor = false, has_meta = false;
  for (size_t i = first; i < stack->size(); ++i) {
    const c10::IValue& value = (*stack)[i];
    has_tensor |= value.isTensor() || value.isTensorList();
    has_meta |= is_on_meta(value);
  }
  if (!has_tensor) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = (*stack)[first + i];
      if (value.isNone() && arguments[i].name() == "device") {
        value = c10::Device(c10::kMeta);
      }
    }
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(kMetaKey);
  if (!has_meta) {
    op.callBoxed(stack);
    return;
  }
  try {
    op.callBoxed(stack);
  } catch (const Error&) {
    throw;
  } catch (const c10::Error& error) {
    FSDP2_THROW(kUnsupported, "[meta] operator ", op.schema().name(), " cannot work on tensors without data, under "
                "MetaDeviceGuard: ", error.what_without_backtrace(), "; leave it to reset_parameters(), or give the "
                "tensor a device where it is made");
  }
}

}  // namespace

MetaDeviceGuard::MetaDeviceGuard() : guard_(kMetaKey) {}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&meta_fallback>());
}

}  // namespace fsdp2
