// Collectives of the simulated device: gloo's, on CPU tensors that alias the device's memory, and what gloo lacks.
//
// As NCCL's, an operation has a stream of its own, which first waits for the current one; `wait` lets the current stream
// wait for it, and counts as no synchronisation of the host.
#include "simulated.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <map>
#include <set>

namespace simulated {

using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using Future = c10::ivalue::Future;

static Tensors concatenate(Tensors a, const Tensors& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct SimulatedWork final : c10d::Work {
  c10::Device device{kType, 0};
  Stream* stream = nullptr;  // none for a barrier
  Clock clock;
  std::vector<WorkPointer> inner;  // gloo's
  c10::IValue outputs;
  c10::TypePtr type_of_outputs;
  Tensors held;  // tensors and aliases that live until the work is done
  std::function<void()> finish;

  SimulatedWork(int rank, OpType type) : c10d::Work(rank, type) {}

  bool wait(std::chrono::milliseconds timeout) override {
    if (!is_finished_)
      for (auto& work : inner) work->wait(timeout);
    complete();
    order();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool isCompleted() override {
    if (!is_finished_) {
      for (auto& work : inner)
        if (!work->isCompleted()) return false;
      for (auto& work : inner) work->wait(kNoTimeout);
      complete();
    }
    return true;
  }
  bool isSuccess() const override { return is_finished_; }
  int sourceRank() const override { return inner.empty() ? -1 : inner[0]->sourceRank(); }
  Tensors result() override { return outputs.isTensorList() ? outputs.toTensorVector() : Tensors{}; }

  c10::intrusive_ptr<Future> getFuture() override {
    std::lock_guard<std::mutex> guard(future_mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<Future>(type_of_outputs, std::vector<c10::Device>{device});
    if (is_finished_ || inner.empty()) {
      complete();
      complete_future();
      return future_;
    }
    remaining_ = inner.size();
    auto self = c10::intrusive_ptr<SimulatedWork>::reclaim_copy(this);
    for (auto& work : inner)
      work->getFuture()->addCallback([self](Future& done) {
        if (done.hasError()) {
          self->future_->setErrorIfNeeded(done.exception_ptr());
        } else if (--self->remaining_ == 0) {
          self->complete();
          self->complete_future();
        }
      });
    return future_;
  }

 private:
  void complete() {
    std::call_once(once_, [this] {
      if (finish) finish();
      finish = nullptr;
      held.clear();
      is_finished_ = true;
    });
  }
  void order() {
    if (stream == nullptr) return;
    Lock lock;
    wait_for(current_stream(stream->device), clock);
  }
  // A future records events on the current streams: let the operation's be the current one.
  void complete_future() {
    if (future_->completed()) return;
    if (stream == nullptr) return future_->markCompleted(outputs);
    const c10::impl::VirtualGuardImpl guard(kType);
    const auto before = guard.exchangeStream(c10::Stream(c10::Stream::UNSAFE, device, stream->id));
    future_->markCompleted(outputs);
    guard.exchangeStream(before);
  }

  std::once_flag once_;
  std::atomic<bool> is_finished_{false};
  std::mutex future_mutex_;
  c10::intrusive_ptr<Future> future_;
  std::atomic<size_t> remaining_{0};
};

static ReduceOp without_factor(const ReduceOp& op) {
  return op.op_ == ReduceOp::AVG || op.op_ == ReduceOp::PREMUL_SUM ? ReduceOp(ReduceOp::SUM) : op;
}

static void premultiply(const ReduceOp& op, at::Tensor& host) {
  if (op.op_ != ReduceOp::PREMUL_SUM) return;
  const auto* factor = static_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (factor->tensor_factor.defined())
    host.mul_(host_alias(factor->tensor_factor));
  else
    host.mul_(factor->double_factor);
}

static void average(const ReduceOp& op, at::Tensor host, int ranks) {
  if (op.op_ != ReduceOp::AVG) return;
  if (at::isIntegralType(host.scalar_type(), true))
    host.floor_divide_(ranks);
  else
    host.div_(ranks);
}

class SimulatedBackend final : public c10d::Backend {
 public:
  SimulatedBackend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::string name)
      : c10d::Backend(rank, size), gloo_(std::move(gloo)), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { is_collecting_ = true; }
  WorkPointer endCoalescing() override {
    is_collecting_ = false;
    return group_of(std::exchange(collected_, {}), {});
  }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setSequenceNumberForGroup() override {}

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto call = begin("broadcast", {}, tensors);
    return end(call, OpType::BROADCAST, {gloo_->broadcast(call.outputs, options)});
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto call = begin("allreduce", {}, tensors);
    auto plain = options;
    plain.reduceOp = without_factor(options.reduceOp);
    for (auto& host : call.outputs) premultiply(options.reduceOp, host);
    auto work = gloo_->allreduce(call.outputs, plain);
    return end(call, OpType::ALLREDUCE, {work}, [hosts = call.outputs, op = options.reduceOp, n = size_] {
      for (const auto& host : hosts) average(op, host, n);
    });
  }

  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    c10d::AllreduceOptions each;
    each.reduceOp = options.reduceOp;
    each.timeout = options.timeout;
    return one_by_one(tensors, [&](size_t i) {
      Tensors single{tensors[i]};
      return allreduce(single, each);
    });
  }

  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const bool is_root = rank_ == options.rootRank;
    auto call = is_root ? begin("reduce", {}, tensors) : begin("reduce", tensors, {});
    Tensors buffers;  // on ranks but the root, gloo leaves partial sums
    for (auto& host : is_root ? call.outputs : call.inputs) buffers.push_back(is_root ? host : host.clone());
    for (auto& host : buffers) premultiply(options.reduceOp, host);
    auto plain = options;
    plain.reduceOp = without_factor(options.reduceOp);
    auto work = gloo_->reduce(buffers, plain);
    return end(call, OpType::REDUCE, {work}, [buffers, op = options.reduceOp, n = is_root ? size_ : 1] {
      for (const auto& host : buffers) average(op, host, n);
    });
  }

  WorkPointer allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "one tensor per rank");
    auto call = begin("allgather", inputs, outputs[0]);
    call.set_result(outputs);
    const auto& input = call.inputs[0];
    bool is_even = true;
    for (const auto& host : call.outputs) is_even &= host.sizes() == input.sizes() && host.is_contiguous();
    if (is_even) {
      Tensors contiguous{input.contiguous()};
      std::vector<Tensors> lists{call.outputs};
      call.held.push_back(contiguous[0]);
      return end(call, OpType::ALLGATHER, {gloo_->allgather(lists, contiguous, options)});
    }
    std::vector<WorkPointer> works;  // one broadcast per rank, as NCCL does
    for (int rank = 0; rank < size_; rank++) {
      if (rank == rank_) call.outputs[rank].copy_(input);
      c10d::BroadcastOptions from;
      from.rootRank = rank;
      Tensors single{call.outputs[rank]};
      works.push_back(gloo_->broadcast(single, from));
    }
    return end(call, OpType::ALLGATHER, works);
  }

  // torch calls it by either name.
  WorkPointer all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    check_single(output, input, input.numel() * size_, output.numel());
    auto call = begin("allgather", {input}, {output});
    at::Tensor from = call.inputs[0].clone().view({-1});  // may be a part of the output
    at::Tensor to = call.outputs[0].view({-1});           // NCCL compares numbers of elements; gloo, shapes
    call.held.push_back(from);
    return end(call, OpType::_ALLGATHER_BASE, {gloo_->_allgather_base(to, from, options)});
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return all_gather_single(output, input, options);
  }
  WorkPointer all_gather_single_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return one_by_one(outputs, [&](size_t i) { return all_gather_single(outputs[i], inputs[i], options); });
  }
  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return all_gather_single_coalesced(outputs, inputs, options);
  }

  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto call = begin("gather", inputs, outputs.empty() ? Tensors{} : outputs[0]);
    call.set_result(outputs);
    std::vector<Tensors> lists;
    if (!outputs.empty()) lists.push_back(call.outputs);
    return end(call, OpType::GATHER, {gloo_->gather(lists, call.inputs, options)});
  }

  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto call = begin("scatter", inputs.empty() ? Tensors{} : inputs[0], outputs);
    std::vector<Tensors> lists;
    if (!inputs.empty()) lists.push_back(call.inputs);
    return end(call, OpType::SCATTER, {gloo_->scatter(call.outputs, lists, options)});
  }

  WorkPointer reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "one tensor per rank");
    auto call = begin("reduce_scatter", inputs[0], outputs);
    std::vector<WorkPointer> works;
    Tensors sums;
    for (const auto& host : call.inputs) sums.push_back(sum_of(host, options.reduceOp, works));
    return end(
        call, OpType::REDUCE_SCATTER, works,
        [output = call.outputs[0], sum = sums[rank_], op = options.reduceOp, n = size_]() mutable {
          output.copy_(sum);
          average(op, output, n);
        });
  }

  WorkPointer reduce_scatter_single(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check_single(output, input, input.numel(), output.numel() * size_);
    auto call = begin("reduce_scatter", {input}, {output});
    std::vector<WorkPointer> works;
    at::Tensor sum = sum_of(call.inputs[0], options.reduceOp, works);
    return end(
        call, OpType::_REDUCE_SCATTER_BASE, works,
        [output = call.outputs[0].view({-1}), sum, op = options.reduceOp, n = size_, rank = rank_]() mutable {
          output.copy_(sum.view({-1}).narrow(0, rank * output.numel(), output.numel()));
          average(op, output, n);
        });
  }
  WorkPointer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_single(output, input, options);
  }
  WorkPointer reduce_scatter_single_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return one_by_one(outputs, [&](size_t i) { return reduce_scatter_single(outputs[i], inputs[i], options); });
  }
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_single_coalesced(outputs, inputs, options);
  }

  WorkPointer all_to_all_single(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    check_single(output, input, 0, 0);
    auto call = begin("alltoall", {input}, {output});
    auto work = gloo_->alltoall_base(call.outputs[0], call.inputs[0], output_splits, input_splits, options);
    return end(call, OpType::ALLTOALL_BASE, {work});
  }
  WorkPointer alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    return all_to_all_single(output, input, output_splits, input_splits, options);
  }
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto call = begin("alltoall", inputs, outputs);
    std::vector<int64_t> output_splits, input_splits;
    Tensors flat;
    int64_t total = 0;
    for (const auto& host : call.outputs) {
      output_splits.push_back(host.numel());
      total += host.numel();
    }
    for (const auto& host : call.inputs) {
      input_splits.push_back(host.numel());
      flat.push_back(host.reshape({-1}));
    }
    at::Tensor sent = at::cat(flat), received = at::empty({total}, sent.options());
    call.held.push_back(sent);
    auto work = gloo_->alltoall_base(received, sent, output_splits, input_splits, options);
    return end(call, OpType::ALLTOALL, {work}, [hosts = call.outputs, received] {
      int64_t begin = 0;
      for (const auto& host : hosts) {
        host.copy_(received.narrow(0, begin, host.numel()).view(host.sizes()));
        begin += host.numel();
      }
    });
  }

  WorkPointer send(Tensors& tensors, int to, int tag) override {
    auto call = begin("send", tensors, {}, false);
    return end(call, OpType::SEND, {gloo_->send(call.inputs, to, tag)});
  }
  WorkPointer recv(Tensors& tensors, int from, int tag) override {
    auto call = begin("recv", {}, tensors, false);
    return end(call, OpType::RECV, {gloo_->recv(call.outputs, from, tag)});
  }

  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    count("collective:barrier");
    c10d::BarrierOptions plain;  // without the device
    plain.timeout = options.timeout;
    Call call;
    return end(call, OpType::BARRIER, {gloo_->barrier(plain)});
  }

 private:
  struct Call {
    Tensors inputs, outputs;  // aliases
    Tensors held;
    c10::Device device{kType, 0};
    Stream* stream = nullptr;
    Clock clock;
    c10::IValue result{Tensors{}};
    c10::TypePtr type = c10::ListType::ofTensors();

    void set_result(const std::vector<Tensors>& lists) {
      result = c10::IValue(lists);
      type = c10::ListType::create(c10::ListType::ofTensors());
    }
  };

  // Check tensors as NCCL does, start the operation on the group's stream, and alias the tensors. What is in `outputs`
  // alone may also be read.
  Call begin(const char* name, const Tensors& inputs, const Tensors& outputs, bool is_collective = true) {
    Call call;
    const Tensors all = concatenate(inputs, outputs);
    for (const auto& t : all) {
      TORCH_CHECK(
          t.device().type() == kType, "No backend type associated with device type ", t.device().type(), " in ", name_);
      TORCH_CHECK(t.layout() == c10::kStrided, "Tensors must be dense");
      TORCH_CHECK(t.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    }
    call.held = all;
    call.result = c10::IValue(outputs);
    for (const auto& t : inputs) call.inputs.push_back(host_alias(t));
    for (const auto& t : outputs) call.outputs.push_back(host_alias(t));
    count(std::string("collective:") + name);
    if (all.empty()) return call;
    call.device = all[0].device();
    {
      Lock lock;
      auto*& own = streams_[call.device.index()];
      if (own == nullptr) {
        own = &new_stream(call.device.index());
        own->communicates = true;
      }
      auto& current = current_stream(call.device.index());
      run_late(current);
      wait_for(*own, current.clock);
      begin_operation(*own);
      for (const auto& t : inputs) use(*own, t, false, name);
      for (const auto& t : outputs) use(*own, t, true, name);
      call.stream = own;
      call.clock = own->clock;
    }
    if (is_collective) check_distinct(call.device);
    return call;
  }

  WorkPointer end(Call& call, OpType type, std::vector<WorkPointer> inner, std::function<void()> finish = nullptr) {
    sequence_++;
    auto work = c10::make_intrusive<SimulatedWork>(rank_, type);
    work->device = call.device;
    work->stream = call.stream;
    work->clock = call.clock;
    work->inner = std::move(inner);
    work->outputs = call.result;
    work->type_of_outputs = call.type;
    work->held = concatenate(concatenate(call.held, call.inputs), call.outputs);
    work->finish = std::move(finish);
    keep(work);
    if (is_collecting_) collected_.push_back(work);
    return work;
  }

  // A work that waits for others. Theirs are the clocks.
  WorkPointer group_of(std::vector<WorkPointer> works, const Tensors& outputs) {
    Call call;
    call.result = c10::IValue(outputs);
    if (!outputs.empty()) call.device = outputs[0].device();
    return end(call, OpType::COALESCED, std::move(works));
  }

  template <class Function>
  WorkPointer one_by_one(const Tensors& outputs, Function start) {
    std::vector<WorkPointer> works;
    const bool before = std::exchange(is_collecting_, false);
    for (size_t i = 0; i < outputs.size(); i++) works.push_back(start(i));
    is_collecting_ = before;
    return group_of(std::move(works), outputs);
  }

  at::Tensor sum_of(const at::Tensor& host, const ReduceOp& op, std::vector<WorkPointer>& works) {
    at::Tensor sum = host.clone(at::MemoryFormat::Contiguous);
    premultiply(op, sum);
    c10d::AllreduceOptions options;
    options.reduceOp = without_factor(op);
    Tensors single{sum};
    works.push_back(gloo_->allreduce(single, options));
    return sum;
  }

  static void check_single(const at::Tensor& output, const at::Tensor& input, int64_t expected, int64_t number) {
    TORCH_CHECK(output.is_contiguous() && input.is_contiguous(), "Tensors must be contiguous");
    TORCH_CHECK(
        output.scalar_type() == input.scalar_type(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(expected == number, "the sizes of the output and of the input of all ranks differ: ", number, ", ", expected);
  }

  // Two ranks cannot share a device (NCCL: "Duplicate GPU detected").
  void check_distinct(c10::Device device) {
    if (size_ < 2 || !checked_.insert(device.index()).second) return;
    at::Tensor own = at::full({1}, static_cast<int64_t>(device.index()), at::kLong), all = at::empty({size_}, at::kLong);
    gloo_->_allgather_base(all, own, {})->wait();
    for (int a = 0; a < size_; a++)
      for (int b = a + 1; b < size_; b++)
        TORCH_CHECK(
            all[a].item<int64_t>() != all[b].item<int64_t>(), "Duplicate device detected: rank ", a, " and rank ", b,
            " both on device ", all[a].item<int64_t>());
  }

  // A work that nobody waits for still reads and writes its tensors: keep it until it is done.
  void keep(const WorkPointer& work) {
    std::lock_guard<std::mutex> guard(kept_mutex_);
    auto is_done = [](const WorkPointer& kept) {
      try {
        return kept->isCompleted();
      } catch (const std::exception&) {
        return true;  // it failed: whoever waits for it is told
      }
    };
    kept_.erase(std::remove_if(kept_.begin(), kept_.end(), is_done), kept_.end());
    kept_.push_back(work);
  }

  std::mutex kept_mutex_;
  std::vector<WorkPointer> kept_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;
  bool is_collecting_ = false;
  std::vector<WorkPointer> collected_;
  std::set<int> checked_;
  std::map<int, Stream*> streams_;
  uint64_t sequence_ = 0;
};

void register_collectives(py::module& m) {
  m.def(
      "make_backend",
      [](const c10::intrusive_ptr<c10d::Backend>& gloo, int rank, int size, const std::string& name)
          -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<SimulatedBackend>(gloo, rank, size, name);
      });
}

}  // namespace simulated
