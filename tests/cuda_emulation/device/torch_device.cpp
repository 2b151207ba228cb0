// A CUDA device for torch on a machine without one: tensors on it have the host's memory, and torch's own operators on
// it are those of the CPU, called with the same memory. This package's operators on it run its CUDA kernels, compiled
// for the CPU. So a whole run takes the way that it takes on a GPU.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>

namespace {

using at::Tensor;
const c10::Device kGpu(c10::kCUDA, 0);

/// The same memory as a tensor of another device.
Tensor moved(const Tensor& t, c10::Device device) {
  if (!t.defined() || t.device() == device) return t;
  auto* const owner = new c10::Storage(t.storage());
  c10::DataPtr data(owner->mutable_data(), owner, [](void* p) { delete static_cast<c10::Storage*>(p); }, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), owner->nbytes(), std::move(data), c10::GetCPUAllocator(),
                       /*resizable=*/true);
  const c10::DispatchKeySet keys(device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return made;
}

/// `t` becomes what `result` is, which the operator has resized.
void take_over(const Tensor& t, const Tensor& result) {
  auto* const of = t.unsafeGetTensorImpl();
  of->set_storage_keep_dtype(moved(result, kGpu).storage());
  of->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
}

/// The arguments of a call, brought to the CPU.
class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack) : schema_(schema) {
    for (std::size_t i = stack.size() - schema.arguments().size(); i < stack.size(); ++i) bring(stack[i]);
    if (asked_) on_gpu_ = asked_->is_cuda();
  }

  /// Whether new tensors that the operator returns are on the GPU.
  bool on_gpu() const { return on_gpu_; }

  /// The argument that the operator returns changed; undefined: it is a new tensor.
  Tensor changed(const c10::AliasInfo* alias) const {
    if (alias == nullptr || !alias->isWrite()) return {};
    for (std::size_t i = 0; i < given_.size(); ++i) {
      const auto* const own = schema_.arguments()[i].alias_info();
      if (own != nullptr && own->isWrite() && own->beforeSets() == alias->beforeSets()) return given_[i];
    }
    return {};
  }

 private:
  Tensor bring(const Tensor& t) {
    on_gpu_ = on_gpu_ || (t.defined() && t.is_cuda());
    return moved(t, c10::kCPU);
  }
  void bring(c10::IValue& value) {
    given_.push_back(value.isTensor() ? value.toTensor() : Tensor());
    if (value.isTensor()) {
      value = bring(value.toTensor());
    } else if (value.isTensorList()) {
      auto all = value.toTensorVector();
      for (auto& t : all) t = bring(t);
      value = all;
    } else if (value.isList() && std::ranges::any_of(value.toListRef(), &c10::IValue::isTensor)) {  // an index
      c10::List<std::optional<Tensor>> all;
      for (const auto& each : value.toListRef().vec())
        all.push_back(each.isNone() ? std::nullopt : std::optional(bring(each.toTensor())));
      value = all;
    } else if (value.isDevice()) {
      asked_ = value.toDevice();
      value = c10::Device(c10::kCPU);
    }
  }

  const c10::FunctionSchema& schema_;
  std::vector<Tensor> given_;
  bool on_gpu_ = false;
  std::optional<c10::Device> asked_;
};

void call_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const Arguments arguments(schema, *stack);
  op.callBoxed(stack);
  const std::size_t first = stack->size() - schema.returns().size();
  for (std::size_t r = 0; r < schema.returns().size(); ++r) {
    auto& value = (*stack)[first + r];
    if (value.isTensorList() && arguments.on_gpu()) {
      auto all = value.toTensorVector();
      for (auto& t : all) t = moved(t, kGpu);
      value = all;
    }
    if (!value.isTensor()) continue;
    const auto result = value.toTensor(), changed = arguments.changed(schema.returns()[r].alias_info());
    if (changed.defined()) {
      if (changed.is_cuda() && changed.sizes() != result.sizes()) take_over(changed, result);
      value = changed;
    } else if (arguments.on_gpu()) {
      value = moved(result, kGpu);
    }
  }
}

struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return kGpu; }
  c10::Device exchangeDevice(c10::Device) const override { return kGpu; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kGpu); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, kGpu); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kGpu); }
};

}  // namespace

/// For the rest of the process. Returns how many of torch's operators take part.
extern "C" int emulate_a_gpu() {
  static OneDevice device;
  static std::vector<c10::RegistrationHandleRAII> kept;
  c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::DeviceType::CUDA)].store(&device);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    // copy_ is one function for all devices, which asks for the device's kernel itself
    if (!op || !op->hasSchema() || !(op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || name.name == "aten::copy_"))
      continue;
    kept.push_back(dispatcher.registerImpl(name, c10::DispatchKey::CUDA,
                                           c10::KernelFunction::makeFromBoxedFunction<&call_on_cpu>(), std::nullopt,
                                           nullptr, "emulation"));
  }
  return static_cast<int>(kept.size());
}
