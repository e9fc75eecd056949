// Every operation with tensors of a device equals the same operation with tensors of the CPU. Without --device cuda the
// tensors are on the CPU, and the transport treats them as those of a device.

#include <chrono>
#include <numeric>
#include <optional>
#include <thread>

#include "comm/group/group_state.h"
#include "comm/rendezvous/gpus.h"
#include "comm/transport/by_device.h"
#include "comm/transport/recording.h"
#include "comm/transport/staged.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "tests/support/models.h"
#include "tests/support/with_transport.h"
#include "tests/support/world.h"

namespace shoal::device_test {
namespace {

using test::group;
using test::test_device;

const Group& device_group() {
  static const Group staged = test::with_transport(
      group(), [](std::shared_ptr<Transport> below) { return make_staged_transport(std::move(below)); });
  return test_device().is_cpu() ? staged : group();
}

// Element i of rank r's input: different on every rank and at every index.
at::Tensor input(int rank, int64_t numel, at::ScalarType dtype = at::kFloat) {
  return (at::arange(numel, at::kDouble) + 100 * rank + 1).to(dtype);
}

at::Tensor own(int64_t numel, at::ScalarType dtype = at::kFloat) {
  return input(group().rank(), numel, dtype).to(test_device());
}

at::Tensor empty(int64_t numel) {
  return at::full({numel}, -1.0F).to(test_device());
}

at::Tensor sum_of(int64_t numel, at::ScalarType dtype = at::kFloat) {
  auto sum = at::zeros({numel}, at::kDouble);
  for (int rank = 0; rank < group().size(); ++rank) sum += input(rank, numel, at::kDouble);
  return sum.to(dtype);
}

#define EXPECT_SAME(tensor, expected)                                           \
  do {                                                                          \
    EXPECT_EQ((tensor).device().type(), test_device().type());                  \
    EXPECT_TRUE(at::equal((tensor).cpu(), expected)) << (tensor) << (expected); \
  } while (false)

TEST(Device, all_reduce_in_every_dtype) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kLong, at::kInt, at::kHalf, at::kBFloat16}) {
    auto tensor = at::full({1000}, group().rank() + 1, at::TensorOptions(dtype)).to(test_device());
    device_group().all_reduce(tensor).wait();
    const int64_t ranks = group().size();
    EXPECT_SAME(tensor, at::full({1000}, ranks * (ranks + 1) / 2, dtype));
  }
}

TEST(Device, all_reduce_by_every_operation) {
  const int64_t ranks = group().size();
  const auto reduced = [&](ReduceOp op) {
    auto tensor = at::full({3}, group().rank() + 1, at::kDouble).to(test_device());
    device_group().all_reduce(tensor, op).wait();
    return tensor[1].item<double>();
  };
  EXPECT_EQ(reduced(ReduceOp::min), 1);
  EXPECT_EQ(reduced(ReduceOp::max), ranks);
  EXPECT_EQ(reduced(ReduceOp::product), std::tgamma(ranks + 1));
  EXPECT_NEAR(reduced(ReduceOp::avg), (ranks + 1) / 2.0, 1e-12);
}

TEST(Device, what_nccl_does_not_know_goes_by_copies) {
  auto bits = at::full({3}, 1 << group().rank(), at::kInt).to(test_device());
  device_group().all_reduce(bits, ReduceOp::bor).wait();
  EXPECT_SAME(bits, at::full({3}, (1 << group().size()) - 1, at::kInt));
  auto small = at::ones({3}, at::kShort).to(test_device());
  device_group().all_reduce(small).wait();
  EXPECT_SAME(small, at::full({3}, group().size(), at::kShort));
}

TEST(Device, part_of_a_tensor) {
  auto whole = at::zeros({3, 10}).to(test_device());
  whole[1].copy_(own(10));
  device_group().all_reduce(whole[1]).wait();
  EXPECT_SAME(whole[1], sum_of(10));
  EXPECT_EQ(whole[0].abs().sum().item<double>() + whole[2].abs().sum().item<double>(), 0);
}

TEST(Device, reduce_and_broadcast) {
  for (int root = 0; root < group().size(); ++root) {
    auto sum = own(9);
    device_group().reduce(sum, root).wait();
    if (group().rank() == root) EXPECT_SAME(sum, sum_of(9));
    auto tensor = own(6);
    device_group().broadcast(tensor, root).wait();
    EXPECT_SAME(tensor, input(root, 6));
  }
}

TEST(Device, reduce_scatter_and_all_gather) {
  const int64_t part = 5;
  auto output = empty(part);
  device_group().reduce_scatter(output, own(part * group().size())).wait();
  EXPECT_SAME(output, sum_of(part * group().size()).narrow(0, part * group().rank(), part));
  auto all = empty(4 * group().size());
  device_group().all_gather(all, own(4)).wait();
  for (int rank = 0; rank < group().size(); ++rank) EXPECT_SAME(all.narrow(0, 4 * rank, 4), input(rank, 4));
}

// Rank r has a part of r + 1 elements.
TEST(Device, parts_of_unequal_size) {
  std::vector<at::Tensor> parts, inputs;
  int64_t begin = 0, own_begin = 0, all = 0;
  for (int rank = 0; rank < group().size(); ++rank) {
    parts.push_back(empty(rank + 1));
    all += rank + 1;
  }
  issue(device_group(), {.op = Op::all_gather, .inputs = {own(group().rank() + 1)}, .outputs = parts, .label = {}})
      .wait();
  for (int rank = 0; rank < group().size(); ++rank) EXPECT_SAME(parts[rank], input(rank, rank + 1));
  const auto whole = own(all);
  for (int rank = 0; rank < group().size(); ++rank) {
    if (rank == group().rank()) own_begin = begin;
    inputs.push_back(whole.narrow(0, begin, rank + 1).clone());
    begin += rank + 1;
  }
  auto mine = empty(group().rank() + 1);
  issue(device_group(), {.op = Op::reduce_scatter, .inputs = inputs, .outputs = {mine}, .label = {}}).wait();
  EXPECT_SAME(mine, sum_of(all).narrow(0, own_begin, group().rank() + 1));
}

TEST(Device, gather_scatter_and_all_to_all) {
  const int ranks = group().size();
  for (int root = 0; root < ranks; ++root) {
    const bool is_root = group().rank() == root;
    std::vector<at::Tensor> gathered, parts;
    for (int rank = 0; is_root && rank < ranks; ++rank) {
      gathered.push_back(empty(3));
      parts.push_back(input(rank, 4).to(test_device()));
    }
    device_group().gather(gathered, own(3), root).wait();
    for (int rank = 0; is_root && rank < ranks; ++rank) EXPECT_SAME(gathered[rank], input(rank, 3));
    auto part = empty(4);
    device_group().scatter(part, parts, root).wait();
    EXPECT_SAME(part, input(group().rank(), 4));
  }
  auto output = empty(2 * ranks);
  device_group().all_to_all(output, own(2 * ranks)).wait();
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_SAME(output.narrow(0, 2 * rank, 2), input(rank, 2 * ranks).narrow(0, 2 * group().rank(), 2));
  }
}

TEST(Device, messages_by_tag_around_a_ring_and_from_any_source) {
  const int ranks = group().size();
  if (ranks == 1) return;
  const int next = (group().rank() + 1) % ranks;
  const int before = (group().rank() + ranks - 1) % ranks;
  auto first = device_group().send(own(5), next, /*tag=*/1);
  auto second = device_group().send(own(5) + 1000, next, /*tag=*/2);
  auto other = empty(5);
  auto tensor = empty(5);
  device_group().recv(other, before, /*tag=*/2).wait();
  device_group().recv(tensor, before, /*tag=*/1).wait();
  EXPECT_SAME(other, input(before, 5) + 1000);
  EXPECT_SAME(tensor, input(before, 5));
  first.wait();
  second.wait();
  if (group().rank() > 0) device_group().send(own(5), 0).wait();
  for (int from = 1; group().rank() == 0 && from < ranks; ++from) {
    auto work = device_group().recv(tensor, any_source);
    work.wait();
    EXPECT_SAME(tensor, input(work.source(), 5));
  }
  device_group().barrier().wait();
}

// A wait looks at the peers every 100 ms, and an operation may take longer than that.
TEST(Device, waits_for_a_slow_rank) {
  for (int slow = 0; slow < group().size(); ++slow) {
    auto tensor = own(7);
    if (group().rank() == slow) std::this_thread::sleep_for(std::chrono::milliseconds(350));
    device_group().all_reduce(tensor).wait();
    EXPECT_SAME(tensor, sum_of(7));
  }
}

TEST(Device, several_in_flight_beside_some_of_the_cpu) {
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 10; ++i) {
    tensors.push_back(i % 2 == 0 ? own(1000 + i) : input(group().rank(), 1000 + i));
    works.push_back(device_group().all_reduce(tensors.back()));
  }
  for (auto& work : works) work.wait();
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(at::equal(tensors[i].cpu(), sum_of(1000 + i))) << i;
}

TEST(Device, tensors_of_inference_mode_and_saved_for_backward) {
  at::Tensor made;
  {
    const c10::InferenceMode inside;
    made = own(6);
  }
  device_group().all_reduce(made).wait();
  EXPECT_SAME(made, sum_of(6));
  auto weight = own(6).requires_grad_(true);
  auto loss = (weight * weight).sum();
  device_group().broadcast(weight, 0).wait();
  loss.backward();  // autograd has not been told of a change, as on the CPU
  EXPECT_SAME(weight.grad(), 2 * input(0, 6));
}

TEST(Device, allocates_zeros) {
  const auto memory = device_group().allocate(33, at::TensorOptions(test_device()).dtype(at::kFloat));
  EXPECT_SAME(memory, at::zeros({33}));
}

// A transport of devices, for whose tensors those of float64 stand.
struct Sides {
  Sides(const std::string& address, std::function<bool(const Call&)> takes)
      : Sides([address] { return address; }, std::move(takes)) {}

  Sides(std::function<std::string()> address, std::function<bool(const Call&)> takes) {
    const auto fresh = group().subgroup([] {
      std::vector<int> everyone(static_cast<size_t>(group().size()));
      std::iota(everyone.begin(), everyone.end(), 0);
      return everyone;
    }());
    auto cpu = state_of(fresh)->transport;
    below = std::make_shared<CallLog>();
    const auto make = [this, cpu] {
      ++made;
      return make_recording_transport(cpu, below, "devices");
    };
    const auto is_double = [](const at::Tensor& tensor) { return tensor.scalar_type() == at::kDouble; };
    state_of(fresh)->progress->transport = make_transport_by_device(
        cpu->name(), cpu, {make, std::move(takes), [address](const Call&) { return address(); }, is_double});
    handle = test::with_transport(fresh, [&](const auto&) { return state_of(fresh)->progress->transport; });
  }

  int made = 0;
  std::shared_ptr<CallLog> below;
  std::optional<Group> handle;
};

TEST(ByDevice, collectives_go_by_the_transport_of_devices_which_is_made_once_and_all_else_by_copies) {
  if (group().size() == 1 || !test_device().is_cpu()) return;
  Sides sides("gpu of rank " + std::to_string(group().rank()),
              [](const Call& call) { return call.reduce != ReduceOp::max; });
  const auto sum = [&](at::ScalarType dtype, ReduceOp op) {
    auto tensor = input(group().rank(), 9, dtype);
    sides.handle->all_reduce(tensor, op).wait();
    return tensor;
  };
  EXPECT_TRUE(at::equal(sum(at::kFloat, ReduceOp::sum), sum_of(9)));
  EXPECT_EQ(sides.made, 0) << "tensors of the CPU";
  EXPECT_TRUE(at::equal(sum(at::kDouble, ReduceOp::max), input(group().size() - 1, 9, at::kDouble)));
  EXPECT_EQ(sides.made, 0) << "it does not take them";
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(sum(at::kDouble, ReduceOp::sum), sum_of(9, at::kDouble)));
  EXPECT_EQ(sides.made, 1);
  EXPECT_EQ(sides.below->count(Op::all_reduce), 3);
  EXPECT_FALSE(sides.handle->name().empty());
}

TEST(ByDevice, ranks_that_share_a_gpu_are_refused_by_name_on_every_rank) {
  if (group().size() == 1 || !test_device().is_cpu()) return;
  const bool shares = group().rank() == 0 || group().rank() == group().size() - 1;
  Sides sides(shares ? "0000:3C:00.0 of host a" : "gpu of rank " + std::to_string(group().rank()),
              [](const Call&) { return true; });
  for (int i = 0; i < 2; ++i) {
    try {
      auto tensor = own(3, at::kDouble);
      sides.handle->all_reduce(tensor).wait();
      FAIL() << "not refused";
    } catch (const UsageError& error) {
      const auto ranks = "ranks 0 and " + std::to_string(group().size() - 1) + " have their tensors on one GPU";
      EXPECT_NE(std::string(error.what()).find(ranks), std::string::npos) << error.what();
    }
  }
  EXPECT_EQ(sides.made, 0);
}

TEST(ByDevice, a_rank_whose_tensor_is_on_the_cpu_is_named) {
  if (group().size() == 1 || !test_device().is_cpu() || group().transport() == "gloo") return;
  Sides sides("gpu of rank " + std::to_string(group().rank()), [](const Call&) { return true; });
  auto tensor = own(3, group().rank() == 0 ? at::kDouble : at::kFloat);
  try {
    sides.handle->all_reduce(tensor).wait();
    FAIL() << "ranks called different things";
  } catch (const DisagreeError& error) {
    EXPECT_NE(std::string(error.what()).find("the first collective on a GPU"), std::string::npos) << error.what();
  }
}

TEST(ByDevice, a_rank_that_changes_its_gpu_is_refused_with_both) {
  if (group().size() == 1 || !test_device().is_cpu()) return;
  const auto gpu = std::make_shared<std::string>("first of rank " + std::to_string(group().rank()));
  Sides sides([gpu] { return *gpu; }, [](const Call&) { return true; });
  auto tensor = own(3, at::kDouble);
  sides.handle->all_reduce(tensor).wait();
  *gpu = "second";
  try {
    sides.handle->all_reduce(tensor).wait();
    FAIL() << "not refused";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("on GPU second"), std::string::npos) << text;
    EXPECT_NE(text.find("first of rank"), std::string::npos) << text;
  }
}

Peer peer(const std::string& host, const std::string& gpus) {
  Peer one{host, {}, {}};
  one.gpus = gpus;
  return one;
}

TEST(GpuForEachRank, counts_what_the_ranks_of_a_host_see_together) {
  EXPECT_TRUE(gpu_for_each_rank({peer("a", "0,1"), peer("a", "0,1")}));
  EXPECT_TRUE(gpu_for_each_rank({peer("a", "0"), peer("a", "1"), peer("b", "0")})) << "each sees its own";
  EXPECT_FALSE(gpu_for_each_rank({peer("a", "0"), peer("a", "0")})) << "they share one";
  EXPECT_FALSE(gpu_for_each_rank({peer("a", "0,1"), peer("a", "0,1"), peer("a", "0,1")}));
  EXPECT_FALSE(gpu_for_each_rank({peer("a", "0"), peer("b", "")})) << "the second host has none";
  EXPECT_FALSE(gpu_for_each_rank({peer("a", "0,1"), peer("a", "")})) << "a rank sees none";
  EXPECT_FALSE(gpu_for_each_rank({peer("a", "0"), peer("a", "0"), peer("a", "0,1,2")})) << "two see but one";
  EXPECT_TRUE(gpu_for_each_rank({peer("a", "0,1"), peer("a", "0"), peer("a", "1,2")}));
}

}  // namespace
}  // namespace shoal::device_test
