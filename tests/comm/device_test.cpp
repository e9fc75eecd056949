// Every operation with tensors of a device equals the same operation with tensors of the CPU. Without --device cuda the
// tensors are on the CPU, and the transport treats them as those of a device.

#include <chrono>
#include <thread>

#include "comm/rendezvous/gpus.h"
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

bool over_nccl() {
  return !test_device().is_cpu() && group().size() > 1 && (group().transport() == "nccl");
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

TEST(Device, bitwise_operations_work_or_are_refused_by_name) {
  auto tensor = at::full({3}, 1 << group().rank(), at::kInt).to(test_device());
  if (!over_nccl()) {
    device_group().all_reduce(tensor, ReduceOp::bor).wait();
    EXPECT_EQ(tensor[0].item<int>(), (1 << group().size()) - 1);
    return;
  }
  try {
    device_group().all_reduce(tensor, ReduceOp::bor).wait();
    FAIL() << "not refused";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("bor"), std::string::npos) << error.what();
  }
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

TEST(Device, messages) {
  if (group().size() == 1) return;
  if (group().rank() == 0) device_group().send(own(5), 1).wait();
  if (group().rank() == 1) {
    auto tensor = empty(5);
    device_group().recv(tensor, 0).wait();
    EXPECT_SAME(tensor, input(0, 5));
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
}

}  // namespace
}  // namespace shoal::device_test
