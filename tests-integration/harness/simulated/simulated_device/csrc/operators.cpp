// Operators: all run on the CPU, on tensors that alias the device's memory under its real address.
#include "simulated.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/ResizeCommon.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <set>

namespace simulated {

at::Tensor host_alias(const at::Tensor& t) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      t.layout() == c10::kStrided && t.unsafeGetTensorImpl()->has_storage(),
      "the simulated device has strided tensors only");
  const auto& storage = t.storage();
  at::DataPtr data(host_pointer(storage.data_ptr().get()), at::Device(at::kCPU));
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  at::Tensor alias =
      at::detail::make_tensor<c10::TensorImpl>(std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) alias._set_conj(true);
  if (t.is_neg()) alias._set_neg(true);
  return alias;
}

// ---------------------------------------------------------------- storage

static void ensure_bytes(const at::Tensor& t, size_t nbytes) {
  if (t.numel() > 0 && nbytes > t.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), nbytes);
}

static const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    ensure_bytes(
        self, at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset()));
  }
  if (format.has_value()) impl->empty_tensor_restride(*format);
  return self;
}

static at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

static at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

static at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
    ensure_bytes(self, at::detail::computeStorageNbytes(size, stride, self.dtype().itemsize(), offset));
  } else {
    impl->set_sizes_contiguous(size);
    ensure_bytes(self, at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), offset));
  }
  return self;
}

static at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const int64_t n = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_offset(self, std::move(source), 0, {n}, {});
}

static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

static at::Tensor& set_empty(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true);
  return set_storage_offset(self, std::move(storage), 0, {0}, {});
}

// Without it `parameter.data = tensor_on_the_device` is refused, and `module.to(device)` makes new parameters instead
// of changing those that an optimizer holds.
static bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto is_dense = [](const at::Tensor& t) {
    return t.layout() == c10::kStrided && (t.device().is_cpu() || t.device().type() == kType) &&
        t.key_set().has(c10::DispatchKey::Dense);
  };
  const bool are_alike = self.key_set().has(c10::DispatchKey::Python) == from.key_set().has(c10::DispatchKey::Python);
  return is_dense(self) && is_dense(from) && are_alike;
}

static void record_stream(at::Tensor& self, c10::Stream stream) {
  static_cast<c10::DeviceAllocator*>(allocator())->recordStream(self.storage().data_ptr(), stream);
}

// ---------------------------------------------------------------- copies

static at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0 && source.numel() == 0) return target;
  const bool from_device = source.device().type() == kType, to_device = target.device().type() == kType;
  at::Tensor to = to_device ? host_alias(target) : target, from = from_device ? host_alias(source) : source;
  Lock lock;
  at::NoGradGuard no_grad;
  if (from_device && to_device) {
    count("copy:device_to_device");
    auto &reads = current_stream(source.device().index()), &writes = current_stream(target.device().index());
    begin_operation(reads);
    if (&reads != &writes) {  // torch lets both devices' current streams wait for each other
      begin_operation(writes);
      wait_for(reads, writes.clock);
      wait_for(writes, reads.clock);
    }
    use(reads, source, false, "aten::copy_");
    use(writes, target, true, "aten::copy_");
    to.copy_(from);
    return target;
  }
  count(to_device ? "copy:host_to_device" : "copy:device_to_host");
  const at::Tensor& host = to_device ? source : target;
  const at::Tensor& on_device = to_device ? target : source;
  auto& stream = current_stream(on_device.device().index());
  const bool is_host_pinned =
      host.device().is_cpu() && host.unsafeGetTensorImpl()->has_storage() && is_pinned(host.storage().data());
  begin_late_operation(stream);
  use(stream, on_device, to_device, "aten::copy_");
  stream.submitted++;
  stream.late.push_back([to, from, block = block_of(on_device)]() mutable {
    at::NoGradGuard no_grad;
    to.copy_(from);
  });
  if (non_blocking && is_host_pinned) return target;
  if (non_blocking && to_device) {  // pageable memory is read before the call returns, and the stream is not waited for
    run_late(stream);
  } else {
    synchronise(stream, "copy");
  }
  return target;
}

static at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

static at::Scalar local_scalar_dense(const at::Tensor& self) {
  Lock lock;
  auto& stream = current_stream(self.device().index());
  begin_operation(stream);
  use(stream, self, false, "aten::_local_scalar_dense");
  synchronise(stream, "item");
  return at::native::_local_scalar_dense_cpu(host_alias(self));
}

// ---------------------------------------------------------------- all other operators

// Operators that take CPU tensors beside those of an accelerator.
static bool takes_cpu_tensors(const std::string& name) {
  static const std::set<std::string> names{
      "aten::index",
      "aten::index_put",
      "aten::index_put_",
      "aten::_index_put_impl_",
      "aten::_unsafe_index",
      "aten::_unsafe_index_put",
      "aten::_pack_padded_sequence",
      "aten::_pad_packed_sequence",
      "aten::_pack_padded_sequence_backward"};
  return names.count(name) > 0;
}

// Whether an accelerator has to wait for values: the result's shape, or what the host gets, depends on them.
static bool depends_on_values(const c10::OperatorHandle& op, const at::ArrayRef<c10::IValue>& arguments) {
  const auto& name = op.schema().name();
  if (name.find("index") != std::string::npos) {  // only by a mask
    for (const auto& argument : arguments)
      if (argument.isOptionalTensorList())
        for (const auto& index : argument.toOptionalTensorVector())
          if (index.has_value() && index->defined() &&
              (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
            return true;
    return false;
  }
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

struct Call {
  struct Argument {
    at::Tensor original, alias;
    void* host = nullptr;
    bool is_written = false;
  };
  std::vector<Argument> arguments;

  at::Tensor to_host(const at::Tensor& t, bool is_written) {
    if (!t.defined() || t.device().type() != kType) return t;
    for (auto& argument : arguments)
      if (argument.original.is_same(t)) {
        argument.is_written |= is_written;
        return argument.alias;
      }
    arguments.push_back({t, host_alias(t), host_pointer(t.storage().data_ptr().get()), is_written});
    return arguments.back().alias;
  }

  // The device's tensor for a result: the argument itself, a view of one, or a new one.
  at::Tensor to_device(const at::Tensor& result, c10::Device device) const {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (const auto& argument : arguments) {
      if (argument.alias.is_same(result)) return argument.original;
      if (argument.host != nullptr && result.storage().is_alias_of(argument.alias.storage())) {
        at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(argument.original.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
            result.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
        return view;
      }
    }
    at::Tensor copy = result.is_non_overlapping_and_dense()
        ? empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, device, false)
        : empty(result.sizes(), result.scalar_type(), {}, device, false, std::nullopt);
    if (result.numel() > 0) host_alias(copy).copy_(result);
    return copy;
  }

  // What an operator did to the shape and the storage of tensors that it wrote (`out=`).
  void write_back() {
    for (auto& [original, alias, host, is_written] : arguments) {
      if (!is_written) continue;
      if (alias.sizes() != original.sizes() || alias.strides() != original.strides()) {
        original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
        ensure_bytes(
            original,
            at::detail::computeStorageNbytes(
                alias.sizes(), alias.strides(), alias.dtype().itemsize(), original.storage_offset()));
      }
      if (alias.storage().data_ptr().get() != host && alias.numel() > 0) host_alias(original).copy_(alias);
    }
  }
};

// The device of a call: that of its tensors, which must be one.
static c10::Device device_of(const std::string& name, const at::ArrayRef<c10::IValue>& arguments) {
  std::optional<c10::Device> device, requested;
  bool has_cpu_tensor = false;
  auto look_at = [&](const at::Tensor& t, bool is_in_list) {
    if (!t.defined()) return;
    if (t.device().type() == kType) {
      TORCH_CHECK(
          !device.has_value() || *device == t.device(),
          "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
          t.device(), "! (when calling ", name, ")");
      device = t.device();
    } else if (t.device().is_cpu() && (t.dim() > 0 || is_in_list)) {
      has_cpu_tensor = true;  // without dimensions, it is a number
    }
  };
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      look_at(value.toTensor(), false);
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) look_at(t, true);
    } else if (value.isOptionalTensorList()) {
      for (const auto& t : value.toOptionalTensorVector())
        if (t.has_value()) look_at(*t, true);
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      requested = value.toDevice();
    }
  }
  TORCH_CHECK(
      !device.has_value() || !has_cpu_tensor || takes_cpu_tensors(name),
      "Expected all tensors to be on the same device, but found at least two devices, ", *device,
      " and cpu! (when calling ", name, ")");
  if (device.has_value()) return *device;
  if (requested.has_value() && requested->has_index()) return *requested;
  return c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
}

static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size(), begin = stack->size() - n;
  const at::ArrayRef<c10::IValue> given(stack->data() + begin, n);
  const c10::Device device = device_of(schema.name(), given);
  c10::DeviceGuard device_guard(device);
  Lock lock;
  auto& stream = current_stream(device.index());
  begin_operation(stream);
  const bool must_wait = depends_on_values(op, given);

  // 1. Arguments: aliases for tensors, the CPU for the device, a CPU generator for the device's.
  Call call;
  bool has_generator = false;
  for (size_t i = 0; i < n; i++) {
    auto& value = (*stack)[begin + i];
    const auto& argument = schema.arguments()[i];
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = call.to_host(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(call.to_host(t, is_written));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& t : value.toOptionalTensorVector())
        list.push_back(t.has_value() ? std::optional<at::Tensor>(call.to_host(*t, is_written)) : std::nullopt);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator() || (value.isNone() && argument.name() == "generator")) {
      value = next_cpu_generator(value.isGenerator() ? value.toGenerator() : default_generator(device.index()));
      has_generator = true;
    }
  }
  for (const auto& argument : call.arguments) use(stream, argument.original, argument.is_written, schema.name());

  // 2. The CPU's kernel. One that takes no generator (dropout) draws from the CPU's default generator: lend it a state.
  const auto cpu = c10::DispatchKeySet(c10::DispatchKey::CPU);
  if (!has_generator && op.hasTag(at::Tag::nondeterministic_seeded)) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const auto before = generator.get_state();
    generator.set_state(next_cpu_generator(default_generator(device.index())).get_state());
    op.redispatchBoxed(cpu, stack);
    generator.set_state(before);
  } else {
    op.redispatchBoxed(cpu, stack);
  }

  // 3. Results.
  if (must_wait) synchronise(stream, schema.name().c_str());
  call.write_back();
  const size_t returns = schema.returns().size();
  for (size_t i = stack->size() - returns; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.to_device(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(call.to_device(t, device));
      value = list;
    }
  }
}

// Every operator that has a kernel for the CPU gets the fallback under its own name, too: else torch would take its
// generic decompositions of some of them, whose results differ from the CPU's in the last digit.
void register_operators() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != std::optional<std::string_view>("aten")) continue;
    auto op = dispatcher.findOp(name);
    if (!op.has_value() || !op->hasSchema() || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      continue;
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    library.impl((name.name.substr(6) + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// Runs an operator that has no kernel for the CPU under its own name.
template <class Function>
static auto on_host(const std::string& name, at::TensorList tensors, Function function) {
  std::vector<c10::IValue> given(tensors.begin(), tensors.end());
  const c10::Device device = device_of(name, given);
  c10::DeviceGuard guard(device);
  Lock lock;
  auto& stream = current_stream(device.index());
  begin_operation(stream);
  std::vector<at::Tensor> hosts;
  for (const auto& t : tensors) {
    if (t.defined()) use(stream, t, false, name);
    hosts.push_back(t.defined() ? host_alias(t) : t);
  }
  return function(hosts, [device](const at::Tensor& result) { return Call().to_device(result, device); });
}

// PrivateUse1 gets the *overrideable* convolutions.
static at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  return on_host(
      "aten::convolution", {input, weight, bias.value_or(at::Tensor())}, [&](const auto& host, const auto& to_device) {
        return to_device(at::convolution(
            host[0], host[1], host[2], stride, padding, dilation, transposed, output_padding, groups));
      });
}

static std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  return on_host(
      "aten::convolution_backward", {grad, input, weight}, [&](const auto& host, const auto& to_device) {
        auto [of_input, of_weight, of_bias] = at::convolution_backward(
            host[0], host[1], host[2], at::OptionalIntArrayRef({channels}), stride, padding, dilation, transposed,
            output_padding, groups, mask);
        return std::make_tuple(to_device(of_input), to_device(of_weight), to_device(of_bias));
      });
}

// An accelerator counts integers, too; the CPU's kernel does not.
static at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return on_host("aten::histc", {self}, [&](const auto& host, const auto& to_device) {
    const auto dtype = self.scalar_type();
    return to_device(
        at::isIntegralType(dtype, true) ? at::histc(host[0].to(at::kDouble), bins, low, high).to(dtype)
                                        : at::histc(host[0], bins, low, high));
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  // Views share the storage, which a fallback cannot do.
  m.impl(
      "as_strided",
      [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
        return at::native::as_strided_tensorimpl(self, size, stride, offset);
      });
  m.impl("view", [](const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("unfold", &at::native::unfold);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("histc", &histc);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace simulated
