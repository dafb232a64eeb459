// What the parts of the simulated device share. `harness/simulated/__init__.py` describes the device.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 16;

// The whole device is one lock. A thread never waits for it while it holds the GIL: the thread with the lock may
// need the GIL, for example to drop the last reference to a tensor.
struct Lock {
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
};

// A vector clock: for each stream, by its serial number, how much of its work is ordered before.
using Clock = std::vector<uint64_t>;
void join(Clock& clock, const Clock& other);

struct Stream {
  int device = 0;
  int64_t id = 0;
  size_t serial = 0;
  bool communicates = false;  // of a process group, which keeps its tensors until somebody has waited
  Clock clock;                // of the last operation that was submitted
  uint64_t submitted = 0, done = 0;
  std::deque<std::function<void()>> late;  // copies, and waits for other streams, that have not run
};

Stream& current_stream(int device);
Stream& new_stream(int device);
// Finish the stream's late copies, begin an operation, and order it after all that the host has waited for.
void begin_operation(Stream& stream);
// Begin an operation without finishing what is late.
void begin_late_operation(Stream& stream);
// Order what is submitted to `stream` from now on after `clock`.
void wait_for(Stream& stream, const Clock& clock);
// Record that the stream's present operation reads or writes a tensor's memory, and report races.
void use(Stream& stream, const at::Tensor& tensor, bool writes, const std::string& name);
// Run all copies of the stream that are late.
void run_late(Stream& stream);
// The host waits for the stream.
void synchronise(Stream& stream, const char* cause);

void count(const std::string& what, int64_t number = 1);

int current_device();
at::Tensor host_alias(const at::Tensor& tensor);  // a CPU tensor over the same memory
void* host_pointer(const void* device_pointer);
std::shared_ptr<void> block_of(const at::Tensor& tensor);  // keeps the tensor's memory
bool is_pinned(const void* pointer);
c10::Allocator* allocator();
at::Generator next_cpu_generator(const at::Generator& generator);  // its numbers follow from seed and offset
const at::Generator& default_generator(c10::DeviceIndex index);

void register_operators();
void register_collectives(py::module& module);

}  // namespace simulated
