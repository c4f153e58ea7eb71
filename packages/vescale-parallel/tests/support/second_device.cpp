#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <atomic>

namespace {
constexpr auto kDevice = c10::DeviceType::PrivateUse1;
std::atomic<int64_t> live{0}, peak{0};

struct Block { void* at; size_t size; };
void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  live -= block->size;
  c10::free_cpu(block->at);
  delete block;
}
struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* at = size ? c10::alloc_cpu(size) : nullptr;
    live += size;
    if (live > peak) peak = live.load();
    auto* block = new Block{at, size};
    return {at, block, &give_back, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
Hooks hooks;

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}
at::Tensor on_host(const at::Tensor& one) {  // the same memory, as a tensor of the host
  if (one.device().is_cpu()) return one;
  return at::for_blob(one.storage().mutable_data() ? static_cast<char*>(one.storage().mutable_data()) +
                          one.storage_offset() * one.element_size() : nullptr, one.sizes())
      .strides(one.strides()).options(one.options().device(at::kCPU)).make_tensor();
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  if (target.numel()) on_host(target).copy_(on_host(self));
  return target;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (target.sizes() != self.sizes()) at::native::resize_(target, self.sizes(), std::nullopt);
  return copy_from(self, target, false);
}
at::Scalar local_scalar(const at::Tensor& self) { return on_host(self).item(); }
at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  if (self.numel()) on_host(self).fill_(value);
  return self;
}
at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> at_) {
  return at::native::as_strided_tensorimpl(self, size, stride, at_);
}
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) { return at::native::set_tensor_(self, other); }
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("fill_.Scalar", &fill);
  m.impl("zero_", &zero);
  m.impl("resize_", &resize);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return {kDevice, 0}; }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kDevice, 0)); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(c10::Device(kDevice, 0)); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(c10::Device(kDevice, 0)); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  // What runs here is done when the call returns.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}  // namespace


PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kDevice, &memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("as_host", &on_host);
  m.def("live", [] { return live.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = live.load(); });
}
