// Streams, events, memory, random numbers and the registrations that make them a device of torch.
#include "simulated.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <sstream>

namespace simulated {

// Added to the address of device memory, which is in fact host memory: a pointer that the processor refuses.
constexpr uintptr_t kShift = uintptr_t{1} << 60;
constexpr size_t kRound = 512;  // allocations are rounded up to it, as CUDA's are
constexpr int kPoolStreams = 32;  // torch takes streams for callbacks from a pool, which CUDA limits to these

static int g_device_count = 2;
static std::string g_title;  // of the device, in messages
static std::atomic<bool> g_initialised{false};
static std::atomic<bool> g_forked{false};
static std::array<std::atomic<bool>, kMaxDevices> g_touched{};  // a GPU would have a context

static std::recursive_mutex g_mutex;

Lock::Lock() {
  if (g_mutex.try_lock()) return;
  if (Py_IsInitialized() && PyGILState_Check()) {
    PyThreadState* state = PyEval_SaveThread();
    g_mutex.lock();
    PyEval_RestoreThread(state);
  } else {
    g_mutex.lock();
  }
}

Lock::~Lock() { g_mutex.unlock(); }

static void initialise() {
  TORCH_CHECK(
      !g_forked, "Cannot re-initialize ", g_title, " in forked subprocess. To use it with multiprocessing, you must use "
      "the 'spawn' start method");
  g_initialised = true;
}

static void touch(int device) {
  initialise();
  g_touched[device] = true;
}

void* host_pointer(const void* device_pointer) {
  if (device_pointer == nullptr) return nullptr;
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(device_pointer) - kShift);
}

// ---------------------------------------------------------------- counters

static std::map<std::string, int64_t> g_counters;

void count(const std::string& what, int64_t number) {
  Lock lock;
  g_counters[what] += number;
}

// ---------------------------------------------------------------- streams
//
// An operation runs at once, on the host, except a copy between pinned memory and the device: it runs when
// something waits for it, so that whoever does not wait reads NaN. What an operation is ordered after is tracked apart
// from that, by vector clocks, as a race detector does: two operations on the same bytes, of which one writes, must be
// ordered by events, waits or the host. So is a stream's next allocation after all work that still uses what was
// freed to it, which is what `record_stream` is for. It does not matter when an operation runs: a race is reported
// whether or not it would have had an effect.

static std::map<std::pair<int, int64_t>, std::unique_ptr<Stream>> g_streams;
static size_t g_serials = 0;
static int64_t g_next_stream = kPoolStreams + 1;
static std::array<int, kMaxDevices> g_next_of_pool{};
static Clock g_host;  // what the host has waited for, whichever of its threads
static std::vector<std::string> g_races;

static thread_local int t_device = 0;
static thread_local std::array<int64_t, kMaxDevices> t_stream{};

int current_device() { return t_device; }

static Stream& stream_of(int device, int64_t id) {
  auto& slot = g_streams[{device, id}];
  if (!slot) {
    slot = std::make_unique<Stream>();
    slot->device = device;
    slot->id = id;
    slot->serial = g_serials++;
  }
  return *slot;
}

Stream& current_stream(int device) {
  Lock lock;
  return stream_of(device, t_stream[device]);
}

Stream& new_stream(int device) {
  Lock lock;
  return stream_of(device, g_next_stream++);
}

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

static uint64_t position_in(const Clock& clock, size_t serial) { return serial < clock.size() ? clock[serial] : 0; }

static void run_until(Stream& stream, uint64_t position) {
  while (stream.done < position && !stream.late.empty()) {
    auto task = std::move(stream.late.front());
    stream.late.pop_front();
    stream.done++;
    task();
  }
}

static void submit(Stream& stream, std::function<void()> task) {
  stream.late.push_back(std::move(task));
  stream.submitted++;
}

void begin_late_operation(Stream& stream) {
  join(stream.clock, g_host);
  if (stream.clock.size() <= stream.serial) stream.clock.resize(stream.serial + 1);
  stream.clock[stream.serial]++;
}

void run_late(Stream& stream) { run_until(stream, stream.submitted); }

void begin_operation(Stream& stream) {
  run_late(stream);
  begin_late_operation(stream);
}

void wait_for(Stream& stream, const Clock& clock) { join(stream.clock, clock); }

void synchronise(Stream& stream, const char* cause) {
  Lock lock;
  count(std::string("synchronise:") + cause);
  run_until(stream, stream.submitted);
  join(g_host, stream.clock);
}

static void synchronise_device(int device) {
  touch(device);
  Lock lock;
  count("synchronise:device");
  for (auto& [key, stream] : g_streams) {
    if (key.first != device) continue;
    run_until(*stream, stream->submitted);
    join(g_host, stream->clock);
  }
}

struct Event {
  int device = 0;
  int64_t stream = 0;
  uint64_t position = 0;
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

// ---------------------------------------------------------------- memory

struct Access {
  uintptr_t begin, end;
  size_t serial;
  uint64_t tick;
  bool writes;
};

struct Block {
  void* host = nullptr;
  size_t size = 0;
  int device = 0;
  size_t owner = 0;  // serial of the stream that it was allocated on
  std::set<size_t> recorded;
  std::vector<Access> accesses;
  ~Block() { std::free(host); }
};

struct Pool {
  size_t capacity = size_t{1} << 30;
  size_t allocated = 0, allocated_peak = 0;
  size_t cached = 0;  // freed by tensors, kept by the caching allocator
  size_t reserved_peak = 0;
  int64_t blocks = 0, blocks_peak = 0, ooms = 0, retries = 0, allocations = 0, frees = 0;
  size_t total_allocated = 0, total_freed = 0;
};

// Memory that was freed to the stream `owner` while an operation of another stream may still use it.
struct Freed {
  size_t owner, user;
  uint64_t tick;
  size_t size;
};

static std::array<Pool, kMaxDevices> g_pools;
static std::map<uintptr_t, Block*> g_blocks;  // by device address
static std::vector<Freed> g_freed;

static Stream& by_serial(size_t serial) {
  for (auto& [key, stream] : g_streams)
    if (stream->serial == serial) return *stream;
  TORCH_INTERNAL_ASSERT(false);
}

static std::string name_of(size_t serial) {
  auto& stream = by_serial(serial);
  if (stream.communicates) return "the stream of a process group";
  return stream.id == 0 ? "the default stream" : "stream " + std::to_string(stream.id);
}

static void report(const std::string& race) { g_races.push_back(race); }

static void free_block(void* context) {
  auto* holder = static_cast<std::shared_ptr<Block>*>(context);
  {
    Lock lock;
    Block& block = **holder;
    auto& pool = g_pools[block.device];
    pool.allocated -= block.size;
    pool.cached += block.size;
    pool.blocks--;
    pool.frees++;
    pool.total_freed += block.size;
    g_blocks.erase(reinterpret_cast<uintptr_t>(block.host) + kShift);
    for (const auto& access : block.accesses) {
      if (access.serial == block.owner || block.recorded.count(access.serial)) continue;
      if (by_serial(access.serial).communicates) continue;
      g_freed.push_back({block.owner, access.serial, access.tick, block.size});
    }
  }
  delete holder;
}

// The allocator hands memory that was freed to a stream to the next allocation on that stream.
static void check_freed(const Stream& owner) {
  std::vector<Freed> remaining;
  for (const auto& freed : g_freed) {
    if (freed.owner != owner.serial) {
      remaining.push_back(freed);
    } else if (position_in(owner.clock, freed.user) < freed.tick && position_in(g_host, freed.user) < freed.tick) {
      std::ostringstream text;
      text << name_of(owner.serial) << " of device " << owner.device << " allocates while " << name_of(freed.user)
           << " may still use " << freed.size << " bytes that were freed to it: neither record_stream nor a wait";
      report(text.str());
    }
  }
  g_freed = std::move(remaining);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t n) override {
    const int device = t_device;
    touch(device);
    const at::Device d(kType, static_cast<c10::DeviceIndex>(device));
    if (n == 0) return {nullptr, nullptr, [](void*) {}, d};
    const size_t size = (n + kRound - 1) / kRound * kRound;
    Lock lock;
    auto& stream = current_stream(device);
    check_freed(stream);
    auto& pool = g_pools[device];
    if (pool.cached >= size) {
      pool.cached -= size;
    } else {
      if (pool.allocated + pool.cached + size > pool.capacity && pool.cached > 0) {
        pool.cached = 0;
        pool.retries++;
      }
      if (pool.allocated + pool.cached + size > pool.capacity) {
        pool.ooms++;
        auto text = [](size_t bytes) { return c10::CachingAllocator::format_size(bytes); };
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, g_title, " out of memory. Tried to allocate ", text(size), ". ", g_title, " ", device,
            " has a total capacity of ", text(pool.capacity), " of which ",
            text(pool.capacity - std::min(pool.capacity, pool.allocated)), " is free. Of the allocated memory ",
            text(pool.allocated), " is allocated by PyTorch.");
      }
    }
    auto* holder = new std::shared_ptr<Block>(std::make_shared<Block>());
    Block& block = **holder;
    if (posix_memalign(&block.host, 64, size) != 0) {
      delete holder;
      TORCH_CHECK(false, "the host has no memory for the simulated device");
    }
    std::memset(block.host, 0xFF, size);  // NaN, or -1, for whoever reads what nobody has written
    block.size = size;
    block.device = device;
    block.owner = stream.serial;
    const auto begin = reinterpret_cast<uintptr_t>(block.host);
    // Work of this stream that ran before may still use the memory: other streams have to wait for it.
    block.accesses.push_back({begin, begin + size, stream.serial, position_in(stream.clock, stream.serial), true});
    pool.allocated += size;
    pool.blocks++;
    pool.allocations++;
    pool.total_allocated += size;
    pool.allocated_peak = std::max(pool.allocated_peak, pool.allocated);
    pool.blocks_peak = std::max(pool.blocks_peak, pool.blocks);
    pool.reserved_peak = std::max(pool.reserved_peak, pool.allocated + pool.cached);
    g_blocks[begin + kShift] = &block;
    return {reinterpret_cast<void*>(begin + kShift), holder, &free_block, d};
  }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    std::memcpy(host_pointer(to), host_pointer(from), n);
  }
  bool initialized() override { return g_initialised; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Lock lock;
    for (auto& pool : g_pools) pool.cached = 0;
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_deleter() != &free_block) return;
    Lock lock;
    auto& block = **static_cast<std::shared_ptr<Block>*>(pointer.get_context());
    block.recorded.insert(stream_of(stream.device_index(), stream.id()).serial);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    const auto& pool = g_pools.at(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& statistic, int64_t current, int64_t peak, int64_t allocated, int64_t freed) {
      statistic[0].current = current;
      statistic[0].peak = peak;
      statistic[0].allocated = allocated;
      statistic[0].freed = freed;
    };
    set(stats.allocation, pool.blocks, pool.blocks_peak, pool.allocations, pool.frees);
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes})
      set(*bytes, pool.allocated, pool.allocated_peak, pool.total_allocated, pool.total_freed);
    set(stats.reserved_bytes, pool.allocated + pool.cached, pool.reserved_peak, 0, 0);
    stats.num_ooms = pool.ooms;
    stats.num_alloc_retries = pool.retries;
    stats.num_device_alloc = pool.allocations;
    stats.num_device_free = pool.frees;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock;
    auto& pool = g_pools.at(device);
    pool.allocations = pool.frees = pool.ooms = pool.retries = 0;
    pool.total_allocated = pool.total_freed = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock;
    auto& pool = g_pools.at(device);
    pool.allocated_peak = pool.allocated;
    pool.blocks_peak = pool.blocks;
    pool.reserved_peak = pool.allocated + pool.cached;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    touch(device);
    Lock lock;
    const auto& pool = g_pools.at(device);
    return {pool.capacity - std::min(pool.capacity, pool.allocated + pool.cached), pool.capacity};
  }
};

static DeviceAllocator g_allocator;
REGISTER_ALLOCATOR(kType, &g_allocator)

c10::Allocator* allocator() { return &g_allocator; }

static Block* find_block(const at::Tensor& tensor) {
  const auto& pointer = tensor.storage().data_ptr();
  if (pointer.get_deleter() != &free_block) return nullptr;
  return static_cast<std::shared_ptr<Block>*>(pointer.get_context())->get();
}

std::shared_ptr<void> block_of(const at::Tensor& tensor) {
  const auto& pointer = tensor.storage().data_ptr();
  if (pointer.get_deleter() != &free_block) return nullptr;
  return *static_cast<std::shared_ptr<Block>*>(pointer.get_context());
}

void use(Stream& stream, const at::Tensor& tensor, bool writes, const std::string& name) {
  auto* block = find_block(tensor);
  if (block == nullptr || tensor.numel() == 0) return;
  int64_t extent = 1;
  for (int64_t i = 0; i < tensor.dim(); i++) extent += (tensor.size(i) - 1) * tensor.stride(i);
  const auto begin = reinterpret_cast<uintptr_t>(block->host) + tensor.storage_offset() * tensor.itemsize();
  const auto end = begin + extent * tensor.itemsize();
  const uint64_t tick = position_in(stream.clock, stream.serial);
  auto& accesses = block->accesses;
  for (size_t i = 0; i < accesses.size();) {
    const auto access = accesses[i];
    const bool overlaps = access.begin < end && begin < access.end;
    const bool is_ordered = access.serial == stream.serial || position_in(stream.clock, access.serial) >= access.tick;
    if (overlaps && !is_ordered && (writes || access.writes)) {
      std::ostringstream text;
      text << name << " on " << name_of(stream.serial) << " of device " << stream.device
           << (writes ? " writes" : " reads") << " what " << name_of(access.serial)
           << (access.writes ? " may not have written" : " may still read") << ": a wait is missing";
      report(text.str());
    }
    // What follows this access follows that one, too, if both are ordered: forget that one.
    const bool is_covered = begin <= access.begin && access.end <= end && is_ordered;
    if (is_covered && (writes || !access.writes)) {
      accesses.erase(accesses.begin() + static_cast<ptrdiff_t>(i));
    } else {
      i++;
    }
  }
  accesses.push_back({begin, end, stream.serial, tick, writes});
}

// Pinned host memory: ordinary memory whose addresses are known. A late copy holds its tensor.
static std::map<uintptr_t, size_t> g_pinned;
static size_t g_pinned_bytes = 0, g_pinned_peak = 0;
static size_t g_pinned_capacity = SIZE_MAX;

static void free_pinned(void* pointer) {
  Lock lock;
  auto position = g_pinned.find(reinterpret_cast<uintptr_t>(pointer));
  if (position != g_pinned.end()) {
    g_pinned_bytes -= position->second;
    g_pinned.erase(position);
  }
  std::free(pointer);
}

struct PinnedAllocator final : at::HostAllocator {
  at::DataPtr allocate(size_t n) override {
    initialise();
    if (n == 0) return {nullptr, at::Device(at::kCPU)};
    Lock lock;
    TORCH_CHECK(
        g_pinned_bytes + n <= g_pinned_capacity, g_title, " error: ", n, " bytes of host memory cannot be pinned");
    void* pointer = nullptr;
    TORCH_CHECK(posix_memalign(&pointer, 64, n) == 0, "the host has no memory to pin");
    std::memset(pointer, 0xFF, n);
    g_pinned[reinterpret_cast<uintptr_t>(pointer)] = n;
    g_pinned_bytes += n;
    g_pinned_peak = std::max(g_pinned_peak, g_pinned_bytes);
    return {pointer, pointer, &free_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

static PinnedAllocator g_pinned_allocator;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &g_pinned_allocator)

bool is_pinned(const void* pointer) {
  Lock lock;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto position = g_pinned.upper_bound(address);
  if (position == g_pinned.begin()) return false;
  --position;
  return address < position->first + position->second;
}

// ---------------------------------------------------------------- the device guard
//
// torch.Stream, torch.Event, torch.accelerator and autograd use nothing else. The current device and streams are per
// thread: autograd has one thread per device.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int index_of(c10::Device d) { return d.has_index() ? d.index() : t_device; }
  static c10::Stream handle(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(device)), id);
  }
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kType, static_cast<c10::DeviceIndex>(t_device)); }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.type() == kType, "expected a ", g_title, " device, got ", d);
    if (!d.has_index()) return;
    TORCH_CHECK(
        d.index() >= 0 && d.index() < g_device_count, g_title, " error: invalid device ordinal ",
        static_cast<int>(d.index()));
    t_device = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index() && d.index() < g_device_count) t_device = d.index();
  }
  c10::Stream getStream(c10::Device d) const override { return handle(index_of(d), t_stream[index_of(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return handle(index_of(d), 0); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override {
    touch(index_of(d));
    return handle(index_of(d), new_stream(index_of(d)).id);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool = false) const override {
    Lock lock;
    auto& next = g_next_of_pool[index_of(d)];
    next = next % kPoolStreams + 1;
    return handle(index_of(d), next);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    t_stream[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(g_device_count); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  // Asking runs one more late copy, so that a loop which asks comes to an end.
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock;
    auto& state = stream_of(stream.device_index(), stream.id());
    const bool is_ready = state.late.empty();
    if (is_ready)
      join(g_host, state.clock);
    else
      run_until(state, state.done + 1);
    return is_ready;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock;
    synchronise(stream_of(stream.device_index(), stream.id()), "stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronise_device(device); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    touch(stream.device_index());
    Lock lock;
    auto& state = stream_of(stream.device_index(), stream.id());
    if (*event == nullptr) *event = new Event();
    *static_cast<Event*>(*event) = {
        stream.device_index(), stream.id(), state.submitted, state.clock, std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Lock lock;
    const auto& recorded = *static_cast<Event*>(event);
    auto& other = stream_of(recorded.device, recorded.stream);
    auto& own = stream_of(stream.device_index(), stream.id());
    wait_for(own, recorded.clock);
    if (&other == &own || other.done >= recorded.position) return;
    submit(own, [&other, position = recorded.position] { run_until(other, position); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    Lock lock;
    const auto& recorded = *static_cast<Event*>(event);
    auto& stream = stream_of(recorded.device, recorded.stream);
    const bool is_ready = stream.done >= recorded.position;
    if (is_ready)
      join(g_host, recorded.clock);
    else
      run_until(stream, stream.done + 1);
    return is_ready;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Lock lock;
    count("synchronise:event");
    const auto& recorded = *static_cast<Event*>(event);
    run_until(stream_of(recorded.device, recorded.stream), recorded.position);
    join(g_host, recorded.clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    const auto time = static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    g_allocator.recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---------------------------------------------------------------- random numbers

// The state is a seed and an offset, 16 bytes as on a GPU. Every random operator gets a new CPU generator that is
// seeded with both: its numbers differ from those of the CPU under the same seed, as a GPU's do.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    uint64_t both[2];
    std::memcpy(both, state.data_dtype_initialized<uint8_t>(), 16);
    seed_ = both[0];
    offset_ = both[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    const uint64_t both[2] = {seed_, offset_};
    std::memcpy(state.data_ptr<uint8_t>(), both, 16);
    return state.getIntrusivePtr();
  }
  at::Generator next() {
    std::lock_guard<std::mutex> guard(mutex_);
    uint64_t x = seed_ + 0x9E3779B97F4A7C15ull * (offset_ + 1);  // splitmix64: https://prng.di.unimi.it/splitmix64.c
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    offset_ += 4;
    return at::detail::createCPUGenerator(x ^ (x >> 31));
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

at::Generator next_cpu_generator(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kType, "Expected a '", kType, "' device type for generator but found '",
      generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return generators->at(index < 0 ? t_device : index);
}

// ---------------------------------------------------------------- hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return g_device_count > 0; }
  // A backward pass looks only at devices that have one.
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return g_touched.at(device); }
  void init() const override { initialise(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(g_device_count); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice(c10::Device(kType, device)); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(t_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? static_cast<c10::DeviceIndex>(t_device) : device);
  }
  at::Device getDeviceFromPtr(void* pointer) const override {
    Lock lock;
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    auto position = g_blocks.upper_bound(address);
    TORCH_CHECK(position != g_blocks.begin(), "not a device pointer");
    const auto& [begin, block] = *std::prev(position);
    TORCH_CHECK(address < begin + block->size, "not a device pointer");
    return at::Device(kType, static_cast<c10::DeviceIndex>(block->device));
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  // For `resize_` and FSDP, which frees and allocates storages in place.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
    c10::DeviceGuard guard(storage.device());
    Lock lock;
    begin_operation(current_stream(storage.device().index()));
    at::DataPtr fresh = g_allocator.allocate(size);
    const size_t kept = std::min(size, impl->nbytes());
    if (kept > 0) std::memcpy(host_pointer(fresh.get()), host_pointer(impl->data_ptr().get()), kept);
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

static const bool g_has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace simulated

// ---------------------------------------------------------------- Python

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  pthread_atfork(nullptr, nullptr, [] {
    if (g_initialised) g_forked = true;
  });
  m.def("configure", [](size_t capacity, const std::string& title) {
    g_title = title;
    for (auto& pool : g_pools) pool.capacity = capacity;
    register_operators();
  });
  m.def("set_capacity", [](int device, size_t bytes) {
    Lock lock;
    g_pools.at(device).capacity = bytes;
    g_pools.at(device).cached = 0;  // else it would be reused beyond a smaller capacity
  });
  m.def("set_pinned_capacity", [](std::optional<size_t> bytes) {
    Lock lock;
    g_pinned_capacity = bytes.value_or(SIZE_MAX);
  });
  m.def("pinned_bytes", [] {
    Lock lock;
    return std::make_pair(g_pinned_bytes, g_pinned_peak);
  });
  m.attr("MAX_DEVICES") = kMaxDevices;
  m.def("set_device_count", [](int count) {
    TORCH_CHECK(count >= 0 && count <= kMaxDevices, count, " devices: there are at most ", kMaxDevices);
    g_device_count = count;
  });
  m.def("device_count", [] { return g_device_count; });
  m.def("initialise", [] { initialise(); });
  m.def("is_initialised", [] { return g_initialised.load(); });
  m.def("is_forked", [] { return g_forked.load(); });
  m.def("current_device", [] {
    initialise();
    return t_device;
  });
  m.def("set_device", [](int device) {
    initialise();
    Guard().setDevice(c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
  });
  m.def("synchronize", &synchronise_device, py::call_guard<py::gil_scoped_release>());
  m.def("empty_cache", [] { g_allocator.emptyCache(); });
  m.def("mem_get_info", [](int device) { return g_allocator.getMemoryInfo(static_cast<c10::DeviceIndex>(device)); });
  m.def("reset_peak", [](int device) { g_allocator.resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("reset_accumulated", [](int device) {
    g_allocator.resetAccumulatedStats(static_cast<c10::DeviceIndex>(device));
  });
  m.def("statistics", [](int device) {
    Lock lock;
    const auto& pool = g_pools.at(device);
    return std::map<std::string, size_t>{
        {"allocated", pool.allocated},
        {"allocated_peak", pool.allocated_peak},
        {"reserved", pool.allocated + pool.cached},
        {"reserved_peak", pool.reserved_peak},
        {"capacity", pool.capacity}};
  });
  m.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
  m.def("late_copies", [] {
    Lock lock;
    size_t number = 0;
    for (auto& [key, stream] : g_streams) number += stream->late.size();
    return number;
  });
  m.def("touched", [] {
    std::vector<int> devices;
    for (int i = 0; i < kMaxDevices; i++)
      if (g_touched[i]) devices.push_back(i);
    return devices;
  });
  m.def("counters", [] {
    Lock lock;
    return g_counters;
  });
  m.def("take_races", [] {
    Lock lock;
    return std::exchange(g_races, {});
  });
  register_collectives(m);
}
