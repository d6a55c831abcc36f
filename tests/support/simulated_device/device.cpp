// A simulated GPU for tests: PyTorch's private-use device, with the CPU's memory and the CPU's operators.
//
// Strict where CUDA is: an operator refuses tensors of two devices and products of integers; fresh memory holds NaNs; what a copy that
// nobody has waited for brings to pinned memory is not there yet; a graph capture refuses whatever makes the host wait. It counts
// launches, copies, waits and bytes. Python's side of it is in __init__.py, which also says what it cannot find.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int UNWRITTEN = 0xFF;  // a NaN in every floating-point type

using Names = std::set<std::string>;

std::mutex mutex;  // of all that follows up to the thread's own
std::map<std::string, long> counts, operators;
std::set<const void*> pinned;
std::atomic<long> held{0}, peak{0};  // bytes

thread_local c10::DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream = 0;
thread_local bool capturing = false;
thread_local bool inside = false;  // of an operator or a replay: what it copies and launches is not the program's

void count(const char* what, long by = 1) {
  if (inside) return;
  std::lock_guard<std::mutex> lock(mutex);
  counts[what] += by;
}

void refuse_in_capture(const std::string& what) {
  TORCH_CHECK(!capturing || inside, "operation not permitted when stream is capturing: ", what);
}

struct Inside {
  bool before = inside;
  Inside() { inside = true; }
  ~Inside() { inside = before; }
};

// ---- memory ------------------------------------------------------------------------------------------------------------------------

void* take(size_t size) { return size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr; }

struct Block {
  void* memory;
  size_t size;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  held -= static_cast<long>(block->size);
  std::free(block->memory);
  delete block;
}

struct SimAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    auto* block = new Block{take(size), size};
    if (size) std::memset(block->memory, UNWRITTEN, size);
    long now = held += static_cast<long>(size);
    for (long seen = peak; now > seen && !peak.compare_exchange_weak(seen, now);) {}
    return {block->memory, block, &release, at::Device(SIM, current_device)};
  }
  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
SimAllocator allocator;
REGISTER_ALLOCATOR(SIM, &allocator);

void release_pinned(void* memory) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    pinned.erase(memory);
  }
  std::free(memory);
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    void* memory = take(std::max<size_t>(size, 1));
    std::lock_guard<std::mutex> lock(mutex);
    pinned.insert(memory);
    return {memory, memory, &release_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* memory) {
  std::lock_guard<std::mutex> lock(mutex);
  return pinned.count(memory) > 0;
}

at::Tensor on_cpu(const at::Tensor& tensor) {  // the same memory
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  auto storage = tensor.storage();
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [storage](void*) {}, options);
}

// ---- copies to the host that are under way -----------------------------------------------------------------------------------------

struct Download {
  long number;
  at::Tensor content, to;  // the content as it was when the copy was started; both of the CPU
};
std::mutex downloads_mutex;
std::deque<Download> downloads;
long started_downloads = 0;

void start_download(const at::Tensor& from, const at::Tensor& to) {
  at::Tensor content = at::empty_like(to).copy_(from);
  at::Tensor unwritten = at::empty_like(to);
  std::memset(unwritten.mutable_data_ptr(), UNWRITTEN, unwritten.nbytes());
  to.copy_(unwritten);
  std::lock_guard<std::mutex> lock(downloads_mutex);
  downloads.push_back({++started_downloads, content, to});
}

void finish_downloads(long last) {
  std::lock_guard<std::mutex> lock(downloads_mutex);
  for (; !downloads.empty() && downloads.front().number <= last; downloads.pop_front()) {
    at::AutoDispatchBelowADInplaceOrView guard;
    downloads.front().to.copy_(downloads.front().content);
  }
}

long last_download() {
  std::lock_guard<std::mutex> lock(downloads_mutex);
  return started_downloads;
}

void synchronize(const char* what) {
  refuse_in_capture(what);
  count("synchronizations");
  finish_downloads(last_download());
}

// ---- device, streams, events -------------------------------------------------------------------------------------------------------

struct SimEvent {
  long last_download;
  std::chrono::steady_clock::time_point time;
};

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  at::Device exchangeDevice(at::Device device) const override {
    at::Device before(SIM, current_device);
    current_device = device.index();
    return before;
  }
  at::Device getDevice() const override { return at::Device(SIM, current_device); }
  void setDevice(at::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(at::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static at::Stream stream(c10::StreamId id) { return at::Stream(at::Stream::UNSAFE, at::Device(SIM, 0), id); }
  at::Stream getStream(at::Device) const override { return stream(current_stream); }
  at::Stream getDefaultStream(at::Device) const override { return stream(0); }
  at::Stream getNewStream(at::Device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream(++last);
  }
  at::Stream getStreamFromGlobalPool(at::Device device, bool) const override { return getNewStream(device, 0); }
  at::Stream exchangeStream(at::Stream next) const override {
    auto before = current_stream;
    current_stream = next.id();
    return stream(before);
  }
  bool queryStream(const at::Stream&) const override { return true; }
  bool isStreamCapturing(const at::Stream&) const { return capturing; }  // overrides one that torch 2.11 has not
  void synchronizeStream(const at::Stream&) const override { synchronize("synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const at::Stream&) const override {}

  void record(void** event, const at::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new SimEvent;
    *static_cast<SimEvent*>(*event) = {last_download(), std::chrono::steady_clock::now()};
  }
  void block(void*, const at::Stream&) const override {}
  bool queryEvent(void* event) const override {
    if (event) finish_downloads(static_cast<SimEvent*>(event)->last_download);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    refuse_in_capture("synchronize");
    count("synchronizations");
    queryEvent(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto elapsed = static_cast<SimEvent*>(second)->time - static_cast<SimEvent*>(first)->time;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<SimEvent*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static at::Generator generator = at::make_generator<at::CPUGeneratorImpl>();
    return generator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = allocator.allocate(size);
    std::memcpy(fresh.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
SimHooks hooks;

// ---- operators of its own ----------------------------------------------------------------------------------------------------------

const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device>, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(size, &allocator, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  at::Tensor source = on_cpu(self), target = on_cpu(to);
  bool up = self.is_cpu(), down = to.is_cpu();
  bool host_is_pinned = (up || down) && is_pinned((up ? self : to).storage().data());
  if (inside || !self.numel()) {
    target.copy_(source);
    return to;
  }
  if (up || down) {
    count("copied bytes", static_cast<long>(to.nbytes()));
    if (!(host_is_pinned && non_blocking)) refuse_in_capture("copy between the host's pageable memory and the device, or one that waits");
    count(up ? (host_is_pinned ? "pinned uploads" : "pageable uploads") : (host_is_pinned && non_blocking ? "pinned downloads" : "downloads"));
  } else {
    count("launches");
  }
  if (down && host_is_pinned && non_blocking && !capturing) {
    start_download(source, target);
    return to;
  }
  if (down) finish_downloads(last_download());
  target.copy_(source);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) const_cast<at::Tensor&>(to).resize_(self.sizes());
  on_cpu(to).copy_(on_cpu(self));
  return to;
}

at::Scalar local_scalar(const at::Tensor& self) {
  refuse_in_capture("the host reads a value");
  count("host reads");
  finish_downloads(last_download());
  return on_cpu(self).item();
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  if (self.sizes() == size) return self;  // whatever its strides
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (needed > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || (stride.empty() && !size.empty())) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  int64_t numbers = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {numbers}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

bool may_exchange_data(const at::Tensor& self, const at::Tensor& from) {  // `tensor.data =` between it and the CPU, as CUDA has it
  auto is_dense = [](const at::Tensor& each) { return (each.is_cpu() || each.is_privateuseone()) && each.layout() == at::kStrided; };
  return is_dense(self) && is_dense(from);
}

at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  count("launches");  // of integers too, which a CPU has not
  Inside guard;
  return at::histc(on_cpu(self).to(at::kDouble), bins, least, most).to(self.scalar_type()).to(self.device());
}

void record_stream(at::Tensor&, at::Stream) {}

// ---- all others: the CPU's ---------------------------------------------------------------------------------------------------------

const Names INDEXED = {"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index.Tensor"};
const Names WAITS = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive", "aten::equal",
                     "aten::repeat_interleave.Tensor", "aten::bincount"};  // the size of the result depends on values
const Names PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot", "aten::vdot",
                        "aten::mm.out", "aten::bmm.out", "aten::addmm.out"};

struct Call {
  std::string name;
  bool device = false, host = false, integers = false, waits = false;

  void see(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_privateuseone()) device = true;
    else if (tensor.dim() > 0) host = true;
    integers |= at::isIntegralType(tensor.scalar_type(), true);
  }
  void see_index(const at::Tensor& index) {  // may be the CPU's, and is sent then; a mask's positions are counted first
    if (!index.defined()) return;
    if (index.is_cpu() && index.dim() > 0) {
      count("pageable uploads");
      refuse_in_capture(name + " with indices of the CPU");
    }
    waits |= index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
  }
};

// Tensors as the CPU's kernels are to read them: a view with gaps keeps its strides, as these decide which elements kernels leave to
// their tails, and so their last digit.
std::vector<at::Tensor> to_cpu(at::TensorList tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& each : tensors) {
    if (!each.defined() || !each.is_privateuseone() || each.numel() == 0 || each.is_non_overlapping_and_dense()) {
      copies.push_back(each.defined() && each.is_privateuseone() ? each.to(at::kCPU) : each);
      continue;
    }
    int64_t extent = 1;
    for (int64_t dim = 0; dim < each.dim(); ++dim) extent += (each.size(dim) - 1) * each.stride(dim);
    at::Tensor memory = at::empty({extent}, each.options().device(at::kCPU).pinned_memory(false));
    std::memcpy(memory.data_ptr(), each.data_ptr(), extent * each.element_size());
    copies.push_back(memory.as_strided(each.sizes(), each.strides(), 0));
  }
  return copies;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call{schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name())};
  call.waits = WAITS.count(call.name) > 0;
  auto arguments = torch::jit::last(stack, schema.arguments().size());
  for (const auto& argument : arguments) {
    if (argument.isTensor()) call.see(argument.toTensor());
    else if (argument.isTensorList()) for (const auto& each : argument.toTensorVector()) call.see(each);
    else if (argument.isOptionalTensorList())
      for (const std::optional<at::Tensor>& each : argument.toOptionalTensorVector())
        if (each) INDEXED.count(call.name) ? call.see_index(*each) : call.see(*each);
  }
  TORCH_CHECK(!call.host, "Expected all tensors to be on the same device, but found at least two devices, ",
              c10::get_privateuse1_backend(), ":0 and cpu! (", call.name, ")");
  TORCH_CHECK(!(call.integers && PRODUCTS.count(call.name)), "\"", call.name, "\" not implemented for integers on a GPU");
  if (call.waits) {
    refuse_in_capture(call.name);
    count("host reads");
  }
  if (call.name == "aten::_grouped_mm" && arguments[0].toTensor().scalar_type() != at::kBFloat16)
    refuse_in_capture(call.name + " reads its offsets on the host, but for bfloat16");
  count("launches");
  if (!inside) {
    std::lock_guard<std::mutex> lock(mutex);
    operators[call.name]++;
  }
  Inside guard;
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_has_compatible_shallow_copy_type", &may_exchange_data);
  m.impl("histc", &histc);
  m.impl("_to_cpu", &to_cpu);
  // Where PyTorch has a composite beside the CPU's kernel, the fallback is not asked: a GPU has a kernel of its own, as the CPU has.
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("mish_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("record_stream", &record_stream);
}

// Autocast with CUDA's lists.
#define SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FLOAT32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FLOAT32_RESULT)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("set_capturing", [](bool on) { capturing = on; });
  m.def("set_inside", [](bool on) { return std::exchange(inside, on); });
  m.def("count", [](const std::string& what) { count(what.c_str()); });
  m.def("counts", [] {
    std::lock_guard<std::mutex> lock(mutex);
    return counts;
  });
  m.def("operators", [] {
    std::lock_guard<std::mutex> lock(mutex);
    return operators;
  });
  m.def("clear_counts", [] {
    std::lock_guard<std::mutex> lock(mutex);
    counts.clear();
    operators.clear();
  });
  m.def("held_bytes", [] { return held.load(); });
  m.def("peak_bytes", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = held.load(); });
}
