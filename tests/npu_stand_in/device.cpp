// A device that looks like an NPU to torch and computes on the CPU: its tensors have memory of their own, and an operator that gets
// tensors of both kinds refuses them, as a card would. Compiled by test_npu_stand_in.py; torch_npu.py beside it makes it "npu".
#include <cstdlib>
#include <cstring>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::Tensor;
constexpr auto NPU = c10::DeviceType::PrivateUse1;
thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = NPU;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return NPU; }
  c10::Device getDevice() const override { return {NPU, current}; }
  void setDevice(c10::Device device) const override { if (device.has_index()) current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { if (device.has_index()) current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override { auto before = getDevice(); setDevice(device); return before; }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* place = bytes ? std::malloc(bytes) : nullptr;
    return {place, place, &std::free, c10::Device(NPU, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(NPU, &memory);

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 8; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto place = memory.allocate(bytes);
    if (storage.nbytes()) std::memcpy(place.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(place));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
Hooks hooks;
const bool hooked = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

Tensor empty_here(at::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(type), format);
}

Tensor empty_strided_here(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(type));
}

Tensor on_cpu(const Tensor& tensor) { // the same memory as a tensor of the CPU
  if (tensor.is_cpu()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto numbers = static_cast<int64_t>(tensor.storage().nbytes() / tensor.element_size());
  auto flat = at::from_blob(const_cast<void*>(tensor.storage().data()), {numbers}, options);
  return flat.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (to.numel()) on_cpu(to).copy_(on_cpu(from));
  return to;
}

const Tensor& resize_here(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* own = tensor.unsafeGetTensorImpl();
  own->set_sizes_contiguous(size);
  size_t bytes = (own->storage_offset() + own->numel()) * tensor.element_size();
  if (bytes > tensor.storage().nbytes()) hooks.resizePrivateUse1Bytes(tensor.storage(), bytes);
  return tensor;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) resize_here(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar item_here(const Tensor& tensor) { return on_cpu(tensor).item(); }

void other(const c10::OperatorHandle& op, torch::jit::Stack* stack) { // every other operator
  bool npu = false, cpu = false;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    npu |= !value.toTensor().is_cpu();
    cpu |= value.toTensor().is_cpu() && value.toTensor().dim() > 0; // numbers may come from anywhere
  }
  TORCH_CHECK(!(npu && cpu) || op.schema().name().find("index") != std::string::npos, // indices may be on the CPU
              "Expected all tensors to be on the same device, but found npu and cpu in ", op.schema().name());
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty_here);
  library.impl("empty_strided", &empty_strided_here);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item_here);
  library.impl("resize_", &resize_here);
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&other>()); }

} // namespace
