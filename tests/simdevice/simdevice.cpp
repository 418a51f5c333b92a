// A device for torch (PrivateUse1) that is asynchronous as CUDA is: streams, events, copies, operators; see __init__.py.
//
// Copies, casts, strided copies and fills are queued on the current stream and hold no reference to their tensors. Every other
// operator waits for what its stream has queued and is computed by the CPU: it sees what a kernel in its place would see.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include "../../stio/native/engine.h"
#include "memory.hpp"

// Of Python and of torch's extension for it, whose headers need those of Python.
extern "C" {
void* PyTuple_GetItem(void*, ssize_t);
ssize_t PyTuple_Size(void*);
long long PyLong_AsLongLong(void*);
}
struct _object* THPVariable_Wrap(const at::TensorBase&);
namespace torch {
void translate_exception_to_python(const std::exception_ptr&);
}

namespace sim {
namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;

Stream* stream_of(const c10::Stream& stream) { return stream_number(stream.device_index(), stream.id()); }

c10::Stream as_torch(Stream* stream) { return c10::Stream(c10::Stream::UNSAFE, Device(kType, stream->device), stream->id); }

// Setting an index makes a context there, as it does with CUDA 12; going back to one that had none makes none.
void set_device(int device) {
  require_device(device);
  if (device == current_device) return;
  make_context(device);
  current_device = device;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    set_device(device.index());
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  c10::Stream getStream(Device device) const override { return as_torch(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(Device device) const override { return as_torch(streams(index_of(device)).all[0].get()); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return as_torch(pooled_stream(index_of(device))); }
  c10::Stream getNewStream(Device device, int) const override { return as_torch(pooled_stream(index_of(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_stream_ids[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return stream_of(stream)->passed(stream_of(stream)->num_queued());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Released released;
    make_context(stream.device_index());
    stream_of(stream)->wait_all();
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize(device);
    make_context(current_device);  // the way back is a call of cudaSetDevice
  }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const c10::Stream& stream) const override {
    device_memory().recordStream(ptr, stream);
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex index, const c10::EventFlag) const override {
    TORCH_CHECK(index == -1 || index == stream.device_index(), "the event belongs to another device than the stream");
    // torch's generic event sets the device, and sets it back, which makes a context there. `torch.cuda.Event` does not; see
    // `_Event` of the Python module.
    Released released(true);
    const int before = current_device;
    set_device(stream.device_index());
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = mark(stream_of(stream));
    set_device(before);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    Released released(true);
    const int before = current_device;
    set_device(stream.device_index());
    sim::block(stream_of(stream), *static_cast<Mark*>(event));
    set_device(before);
  }
  bool queryEvent(void* event) const override {  // CUDA's holds the GIL too
    make_context(current_device);
    return !event || static_cast<Mark*>(event)->passed();
  }
  void synchronizeEvent(void* event) const override {
    Released released;
    make_context(current_device);
    if (event) static_cast<Mark*>(event)->wait();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    Released released;
    delete static_cast<Mark*>(event);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    const auto *from = static_cast<Mark*>(start), *to = static_cast<Mark*>(end);
    from->wait();
    to->wait();
    return static_cast<double>(*to->time_ns - *from->time_ns) / 1e6;
  }

 private:
  static int index_of(Device device) { return device.has_index() ? device.index() : current_device; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex device) const override { return contexts[device]; }
  DeviceIndex deviceCount() const override { return kNumDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const int before = current_device;
    set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    const int before = current_device;
    if (device >= 0) {
      require_device(device);
      current_device = device;
    }
    return before;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  bool isPinnedPtr(const void* address) const override { return pinned_memory().find(address) != nullptr; }
  Device getDeviceFromPtr(void* address) const override {
    for (int device = 0; device < kNumDevices; ++device)
      if (arena(device).holds(address)) return Device(kType, device);
    TORCH_CHECK(false, "not an address of a simulated device");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto grown = device_memory().allocate(nbytes);
    if (const size_t kept = std::min(nbytes, storage.nbytes())) {
      char *const target = reach(grown.get()), *const source = reach(storage.data());
      current_stream(storage.device().index())->put([=] { std::memcpy(target, source, kept); }, true);
    }
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(nbytes);
  }
};

// Copies.

thread_local bool no_delay = false;  // inside an operator that the CPU computes, and after the first copy of a batch

struct NoDelay {
  const bool before = no_delay;
  NoDelay() { no_delay = true; }
  ~NoDelay() { no_delay = before; }
};

bool counts_down(std::atomic<int64_t>& count) {
  if (count <= 0) return false;
  return --count == 0;
}

// Queue a copy. It may be refused here or fail there, if a test says so.
void put_copy(Stream* stream, std::function<void()> copy) {
  ++settings.num_copies;
  if (!no_delay) {
    if (counts_down(settings.refuse_copy)) throw std::runtime_error("the simulated device was told to refuse this copy");
    if (counts_down(settings.fail_copy)) copy = [] { throw std::runtime_error("the simulated device was told to fail in this copy"); };
  }
  stream->put(std::move(copy), !no_delay);
}

// The bytes of a tensor of the device as a tensor of the CPU's, for use on a stream. It holds no reference.
Tensor reached(const Tensor& tensor) {
  auto found = at::from_blob(tensor.numel() ? reach(tensor.const_data_ptr()) : nullptr, tensor.sizes(), tensor.strides(),
                             tensor.options().device(at::kCPU).requires_grad(false));
  found._set_conj(tensor.is_conj());
  found._set_neg(tensor.is_neg());
  return found;
}

// A tensor of the CPU as integers of the same size, which are copied without arithmetic. As CUDA's kernels, those of the CPU
// read BOOL as 0 or 1.
Tensor as_integers(const Tensor& tensor) {
  switch (tensor.scalar_type() == at::kBool ? 0 : tensor.element_size()) {
    case 1: return tensor.view(at::kByte);
    case 2: return tensor.view(at::kShort);
    case 4: return tensor.view(at::kInt);
    case 8: return tensor.view(at::kLong);
    default: return tensor;
  }
}

bool have_equal_bits(const Tensor& source, const Tensor& target) {
  return source.scalar_type() == target.scalar_type() && source.is_conj() == target.is_conj() && source.is_neg() == target.is_neg();
}

bool are_dense_alike(const Tensor& source, const Tensor& target) {
  return source.strides() == target.strides() && target.is_non_overlapping_and_dense() && source.is_non_overlapping_and_dense();
}

void copy_on_device(const Tensor& source, const Tensor& target) {
  const int from = source.device().index(), to = target.device().index();
  Stream *const stream = current_stream(from), *const waiting = current_stream(to);
  block(stream, place(waiting));  // nothing, where both are one
  const bool equal_bits = have_equal_bits(source, target);
  if (equal_bits && ((source.is_contiguous() && target.is_contiguous()) || are_dense_alike(source, target))) {
    char *const bytes = reach(source.const_data_ptr()), *const there = reach(target.data_ptr());
    put_copy(stream, [=, nbytes = source.nbytes()] { std::memmove(there, bytes, nbytes); });
  } else {
    put_copy(stream, [=, source = reached(source), target = reached(target)] {
      c10::InferenceMode on_bytes;  // the caller may have made them in this mode
      if (equal_bits && !source.is_conj() && !source.is_neg())
        as_integers(target).copy_(as_integers(source));
      else
        target.copy_(source);
    });
  }
  block(waiting, place(stream));
}

void copy_bytes(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool upwards = source.is_cpu();
  const Tensor &host = upwards ? source : target, &there = upwards ? target : source;
  Stream* const stream = current_stream(there.device().index());
  auto* const host_address = static_cast<char*>(host.data_ptr());
  char* const address = reach(there.data_ptr());
  const size_t nbytes = source.nbytes();
  Pinned* const pinned = pinned_memory().find(host_address);
  if (pinned && host_address + nbytes > pinned->address + pinned->nbytes)
    throw std::runtime_error("a copy crosses the end of pinned memory");
  if (upwards && non_blocking && !pinned) {  // the driver takes a copy of pageable memory before it returns
    auto taken = std::make_shared<std::vector<char>>(host_address, host_address + nbytes);
    put_copy(stream, [=] { std::memcpy(address, taken->data(), nbytes); });
    return;
  }
  if (upwards)
    put_copy(stream, [=] { std::memcpy(address, host_address, nbytes); });
  else
    put_copy(stream, [=] { std::memcpy(host_address, address, nbytes); });
  pinned_memory().note_copy(host_address, stream);
  if (non_blocking && pinned)
    pinned_memory().record_event(host_address, host.storage().data_ptr().get_context(), as_torch(stream));
  else
    stream->wait_all();
}

Tensor copy_from(const Tensor& given, const Tensor& target, bool non_blocking) {
  Released released;
  const Tensor source = given.expand(target.sizes());
  if (!target.numel()) return target;
  const Tensor& there = target.is_cpu() ? source : target;
  c10::DeviceGuard guard(there.device());
  make_context(there.device().index());
  if (!source.is_cpu() && !target.is_cpu()) {
    copy_on_device(source, target);
    return target;
  }
  if (have_equal_bits(source, target) && source.is_contiguous() && target.is_contiguous()) {
    copy_bytes(source, target, non_blocking);
    return target;
  }
  // As torch does it for CUDA: what is not a plain copy of bytes goes through contiguous temporaries. A cast is done by the CPU if
  // the copy blocks, else on the device.
  const bool cast_before = source.is_cpu() != non_blocking;
  const auto dtype = cast_before ? target.scalar_type() : source.scalar_type();
  const Tensor plain = source.to(dtype).resolve_conj().resolve_neg().contiguous();
  const bool direct = target.scalar_type() == dtype && target.is_contiguous() && !target.is_conj() && !target.is_neg();
  const Tensor landed = direct ? target : at::empty(target.sizes(), target.options().dtype(dtype));
  copy_bytes(plain, landed, non_blocking);
  if (!direct) target.copy_(landed, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// Lists of tensors. CUDA has one kernel for all tensors of a list on one device, if its conditions hold; otherwise each is copied
// alone. The kernel computes: in float for floats of 8 and 16 bits (a NaN becomes the one that the conversion makes), and BOOL
// becomes 0 or 1. torch 2.11 refuses 8-bit floats there, later releases take them.

bool has_kernel(at::TensorList targets, at::TensorList sources) {
  for (size_t k = 0; k < targets.size(); ++k) {
    const Tensor &target = targets[k], &source = sources[k];
    if (target.device() != targets[0].device() || source.device() != targets[0].device()) return false;
    if (source.scalar_type() != sources[0].scalar_type()) return false;
    if (source.sizes() != target.sizes() || !are_dense_alike(source, target)) return false;
  }
  return true;
}

// What a conversion to float and back makes of each element.
template <typename Bits>
void through_float(char* bytes, size_t nbytes, Bits infinity, Bits nan, Bits kept) {
  auto* const elements = reinterpret_cast<Bits*>(bytes);
  const Bits sign = Bits{1} << (8 * sizeof(Bits) - 1);
  for (size_t k = 0; k < nbytes / sizeof(Bits); ++k)
    if (static_cast<Bits>(elements[k] & ~sign) > infinity) elements[k] = nan | (elements[k] & kept);
}

void copy_by_kernel(const Tensor& source, const Tensor& target) {
  using T = at::ScalarType;
  const auto dtype = target.scalar_type();
  const bool is_known = c10::isIntegralType(dtype, true) ? !c10::isBarebonesUnsignedType(dtype)
                                                         : dtype != T::Float8_e8m0fnu && dtype != T::Float4_e2m1fn_x2 && dtype != T::ComplexHalf;
  TORCH_CHECK_NOT_IMPLEMENTED(is_known, "\"foreach_tensor_copy\" not implemented for '", dtype, "'");
  c10::DeviceGuard guard(target.device());
  Stream* const stream = current_stream(target.device().index());
  if (source.scalar_type() != dtype) {
    put_copy(stream, [source = reached(source), target = reached(target)] {
      c10::InferenceMode on_bytes;
      target.copy_(source);
    });
    return;
  }
  char *const bytes = reach(source.const_data_ptr()), *const there = reach(target.data_ptr());
  put_copy(stream, [=, nbytes = source.nbytes()] {
    std::memmove(there, bytes, nbytes);
    if (dtype == T::Half) through_float<uint16_t>(there, nbytes, 0x7C00, 0x7FFF, 0);
    if (dtype == T::BFloat16) through_float<uint16_t>(there, nbytes, 0x7F80, 0x7FFF, 0);
    if (dtype == T::Float8_e5m2) through_float<uint8_t>(there, nbytes, 0x7C, 0x7F, 0x80);
    if (dtype == T::Bool)
      for (size_t k = 0; k < nbytes; ++k) there[k] = there[k] != 0;
  });
}

void copy_batch(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  TORCH_CHECK(targets.size() == sources.size(), "as many targets as sources");
  Released released;
  std::optional<NoDelay> rest;
  const bool by_kernel = has_kernel(targets, sources);
  for (size_t k = 0; k < targets.size(); ++k) {
    if (by_kernel) {
      // CUDA's kernel is made for the dtype of the first target, and would write elements of that size into all of them.
      TORCH_CHECK(targets[k].scalar_type() == targets[0].scalar_type(), "CUDA would write another dtype into this tensor");
      if (targets[k].numel()) copy_by_kernel(sources[k], targets[k]);
      if (!targets[k].is_inference()) targets[k].unsafeGetTensorImpl()->bump_version();
    } else {
      targets[k].copy_(sources[k], non_blocking);
    }
    if (!rest && targets[k].numel()) rest.emplace();
  }
}

std::vector<Tensor> clone_batch(at::TensorList tensors, std::optional<at::MemoryFormat> format) {
  Released released;
  std::vector<Tensor> made;
  for (const Tensor& tensor : tensors) made.push_back(at::empty_like(tensor, tensor.options(), format));
  copy_batch(made, tensors, false);
  return made;
}

Tensor& fill(Tensor& tensor, const at::Scalar& value) {
  if (!tensor.numel()) return tensor;
  Released released;
  c10::DeviceGuard guard(tensor.device());
  current_stream(tensor.device().index())->put([target = reached(tensor), value]() mutable {
    c10::InferenceMode on_bytes;  // the caller may have made them in this mode
    target.fill_(value);
  }, !no_delay);
  return tensor;
}

Tensor& zero(Tensor& tensor) {
  if (!tensor.is_contiguous()) return fill(tensor, 0);
  if (!tensor.numel()) return tensor;
  Released released;
  c10::DeviceGuard guard(tensor.device());
  char* const address = reach(tensor.data_ptr());
  current_stream(tensor.device().index())->put([address, nbytes = tensor.nbytes()] { std::memset(address, 0, nbytes); }, !no_delay);
  return tensor;
}

// Memory and views.

// Let a storage have so many bytes at least, on its own device (torch's function for the CPU would use the current one).
void grow(const c10::Storage& storage, size_t nbytes) {
  if (nbytes > storage.nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, nbytes);
}

c10::Device device_of(std::optional<Device> device) {
  const Device wanted = device.value_or(Device(kType));
  return wanted.has_index() ? wanted : Device(kType, current_device);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  Released released;
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_generic(size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  Released released;
  c10::DeviceGuard guard(device_of(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  Released released;
  device_memory().recordStream(tensor.storage().data_ptr(), stream);
}

// Refuse tensors of two devices, as kernels do; an index, a length and a number may be the CPU's.
void require_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.schema().name();
  const bool takes_host = name.find("index") != std::string::npos || name.find("pack_padded") != std::string::npos;
  std::optional<Device> found;
  const auto look = [&](const Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && (takes_host || !tensor.dim()))) return;
    if (!found) found = tensor.device();
    TORCH_CHECK(*found == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *found,
                " and ", tensor.device(), " (", name, ")");
  };
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& tensor : value.toTensorVector()) look(tensor);
  }
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Released released;
  NoDelay here;
  require_one_device(op, *stack);
  at::native::cpu_fallback(op, stack);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  NoDelay here;
  const auto host_bias = bias && bias->defined() ? std::optional(bias->cpu()) : std::nullopt;
  return at::convolution(input.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // computed by plain operators
}

struct Registered {
  Registered() {
    c10::SetAllocator(kType, &device_memory(), 1);
    at::setHostAllocator(kType, &pinned_memory(), 1);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    pthread_atfork(nullptr, nullptr, [] {
      if (any_started) forked = true;
    });
  }
} registered;

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }

// A copy does pending conjugation and negation by itself; torch's fallback for them would call it again.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_foreach_copy_", copy_batch);
  m.impl("_foreach_clone", clone_batch);
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("record_stream", record_stream);
  m.impl("convolution_overrideable", convolution);
  m.impl("as_strided", [](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  m.impl("view", [](const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("view_as_real", [](const Tensor& self) { return at::native::view_as_real(self); });
  m.impl("view_as_complex", [](const Tensor& self) { return at::native::view_as_complex(self); });
  m.impl("unfold", [](const Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); });
  m.impl("resize_", [](const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) -> const Tensor& {
    grow(self.storage(), at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset()));
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    return self;
  });
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& { return at::native::set_(self, source); });
  m.impl("set_.source_Tensor", [](Tensor& self, const Tensor& source) -> Tensor& { return at::native::set_tensor_(self, source); });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) -> Tensor& {
           at::native::checkSetStorage(self, source, offset, size, stride);
           const auto contiguous = c10::contiguous_strides(size);
           if (!stride.data()) stride = contiguous;  // none given, as when torch copies a storage
           grow(source, at::detail::computeStorageNbytes(size, stride, self.dtype().itemsize(), offset));
           auto* const impl = self.unsafeGetTensorImpl();
           impl->set_storage_offset(offset);
           impl->set_sizes_and_strides(size, stride);
           return self;
         });
  m.impl("is_set_to", [](const Tensor& self, const Tensor& other) { return at::native::is_set_to(self, other); });
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::plain_attention)
}

// The driver: what the engine of stio calls (stio/native/engine.h), in the shapes of CUDA's. It takes no GIL, and copies bytes.

namespace sim {
namespace {

thread_local std::string driver_failure;

// Call, and return the driver's code: 0, or 1 with the text kept.
template <typename F>
int coded(F call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    driver_failure = error.what();
    return 1;
  }
}

constexpr int kNotReady = 600;

const stio_driver driver = {
    .make_current = [](void* context) {
      return coded([&] {
        const int device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
        require_device(device);
        make_context(device);
        current_device = device;
      });
    },
    .copy = [](uint64_t target, const void* source, size_t nbytes, void* stream) {
      return coded([&] {
        char* const there = reach(reinterpret_cast<void*>(target));
        const auto* const bytes = static_cast<const char*>(source);
        if (pinned_memory().find(source)) {
          put_copy(static_cast<Stream*>(stream), [=] { std::memcpy(there, bytes, nbytes); });
          pinned_memory().note_copy(source, static_cast<Stream*>(stream));
        } else {  // the driver takes a copy of pageable memory before it returns
          auto taken = std::make_shared<std::vector<char>>(bytes, bytes + nbytes);
          put_copy(static_cast<Stream*>(stream), [=] { std::memcpy(there, taken->data(), nbytes); });
        }
      });
    },
    .copy_to_host = [](void* target, uint64_t source, size_t nbytes, void* queue) {
      return coded([&] {
        auto* const stream = static_cast<Stream*>(queue);
        auto* const there = static_cast<char*>(target);
        char* const bytes = reach(reinterpret_cast<void*>(source));
        Pinned* const pinned = pinned_memory().find(target);
        if (pinned && there + nbytes > pinned->address + pinned->nbytes)
          throw std::runtime_error("a copy crosses the end of pinned memory");
        put_copy(stream, [=] { std::memcpy(there, bytes, nbytes); });
        if (pinned)
          pinned_memory().note_copy(target, stream);
        else
          stream->wait_all();
      });
    },
    .copy_on_device = [](uint64_t target, uint64_t source, size_t nbytes, void* stream) {
      return coded([&] {
        char* const there = reach(reinterpret_cast<void*>(target));
        char* const bytes = reach(reinterpret_cast<void*>(source));
        put_copy(static_cast<Stream*>(stream), [=] { std::memmove(there, bytes, nbytes); });
      });
    },
    .event_create = [](void** event, unsigned) { return coded([&] { *event = new Mark; }); },
    .event_record = [](void* event, void* stream) {
      return coded([&] { *static_cast<Mark*>(event) = mark(static_cast<Stream*>(stream)); });
    },
    .event_query = [](void* event) {
      bool passed = false;
      const int code = coded([&] { passed = static_cast<Mark*>(event)->passed(); });
      return code ? code : passed ? 0 : kNotReady;
    },
    .event_destroy = [](void* event) { return coded([&] { delete static_cast<Mark*>(event); }); },
    .pin = [](void* address, size_t nbytes, unsigned) {
      return coded([&] {
        if (settings.refuse_pinning) throw std::runtime_error("the simulated device was told to refuse pinning");
        pinned_memory().add_registered(address, nbytes);
      });
    },
    .unpin = [](void* address) { return coded([&] { pinned_memory().remove_registered(address); }); },
    .error_text = [](int, const char** text) {
      *text = driver_failure.c_str();
      return 0;
    },
    .not_ready = kNotReady,
};

}  // namespace
}  // namespace sim

namespace {
std::vector<int64_t> numbers_of(void* tuple) {
  std::vector<int64_t> found(PyTuple_Size(tuple));
  for (size_t k = 0; k < found.size(); ++k) found[k] = PyLong_AsLongLong(PyTuple_GetItem(tuple, k));
  return found;
}
}  // namespace

// What Python asks and sets, by ctypes.

extern "C" {
// As `_empty_strided_cuda` of torch, which holds the GIL: sizes, strides, and a dtype, of which the first field is its number.
struct _object* sim_empty_strided(void* size, void* stride, void* dtype) {
  try {
    const auto kind = static_cast<at::ScalarType>(static_cast<const int8_t*>(dtype)[2 * sizeof(void*)]);
    const at::TensorOptions options = at::TensorOptions(c10::Device(sim::kType)).dtype(kind);
    return THPVariable_Wrap(at::empty_strided(numbers_of(size), numbers_of(stride), options));
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}
// As torch.cuda.init: before it no memory is pinned, as far as torch knows.
void sim_init() { at::globalContext().lazyInitDevice(sim::kType); }
const stio_driver* sim_driver() { return &sim::driver; }
void* sim_stream(int device, int64_t id) { return sim::stream_number(device, id); }
void sim_delay(double seconds) { sim::settings.delay_ns = static_cast<int64_t>(seconds * 1e9); }
void sim_refuse_copy(int64_t number) { sim::settings.refuse_copy = number; }
void sim_fail_copy(int64_t number) { sim::settings.fail_copy = number; }
void sim_refuse_pinning(bool refuse) { sim::settings.refuse_pinning = refuse; }
void sim_released(double seconds) { sim::settings.released_ns = static_cast<int64_t>(seconds * 1e9); }
void sim_set_fills(bool fills) { sim::settings.fills = fills; }
int64_t sim_num_copies() { return sim::settings.num_copies; }
bool sim_has_context(int device) { return sim::contexts[device]; }
bool sim_is_forked() { return sim::forked; }
void sim_clear_failures() {
  for (int device = 0; device < sim::kNumDevices; ++device)
    for (auto& stream : sim::streams(device).all) stream->clear_failure();
}
void sim_limit(int device, uint64_t bytes) { sim::device_memory().set_limit(device, bytes); }
uint64_t sim_total_bytes(int device) { return sim::device_memory().total_bytes(device); }
uint64_t sim_pinned_bytes(bool with_cached) {
  return with_cached ? sim::pinned_memory().reserved_bytes : sim::pinned_memory().used_bytes;
}
int64_t sim_num_unpinned_early() { return sim::pinned_memory().num_unpinned_early; }
void sim_sleep(int device, double seconds) {
  const auto time = std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
  sim::current_stream(device)->put([time] { std::this_thread::sleep_for(time); }, false);
}
void* sim_reach(void* address) {
  try {
    return sim::reach(address);
  } catch (const std::exception&) {
    return nullptr;
  }
}
// Write to the device's memory at once, and return the thread's current device, in the shapes of CUDA's driver.
int sim_write(uint64_t target, const void* source, size_t nbytes) {
  return sim::coded([&] { std::memcpy(sim::reach(reinterpret_cast<void*>(target)), source, nbytes); });
}
int sim_current(int* device) {
  *device = sim::current_device;
  return 0;
}
// Wait for all streams; false if one holds a failure. For the end of the process.
bool sim_drain() {
  if (sim::forked) return true;
  bool good = true;
  for (int device = 0; device < sim::kNumDevices; ++device)
    for (auto& stream : sim::streams(device).all) try {
        stream->wait_all();
      } catch (const std::exception&) {
        good = false;
      }
  return good;
}
}
