// A group over two hosts: results, and the bytes that cross the link between them. Started by hosts.py.

#include <gmock/gmock.h>

#include <fstream>
#include <numeric>
#include <thread>

#include "base/environment.h"
#include "comm/backend/backend.h"
#include "shoal/group.h"
#include "tests/support/world.h"

namespace shoal::span_test {
namespace {

using test::group;
using test::world;

// Bytes that this host has sent to the other one.
int64_t sent_bytes() {
  const auto link = process_environment()("SHOAL_LINK").value_or("?");
  std::ifstream file("/sys/class/net/" + link + "/statistics/tx_bytes");
  int64_t bytes = -1;
  file >> bytes;
  return bytes;
}

class Span : public ::testing::Test {
 protected:
  void SetUp() override {
    if (group().transport() != "host+tcp") GTEST_SKIP() << "not on two hosts, but over " << group().transport();
  }
};

at::Tensor input(int rank, int64_t numel) {
  return at::arange(numel, at::kFloat).remainder_(1000) + 1000 * rank;
}

at::Tensor sum_of_inputs(int64_t numel) {
  auto sum = at::zeros({numel});
  for (int rank = 0; rank < group().size(); ++rank) sum += input(rank, numel);
  return sum;
}

TEST_F(Span, every_operation_gives_what_it_should) {
  const int size = group().size();
  for (const int64_t numel : {1, 5, 1000, 300001}) {
    SCOPED_TRACE(numel);
    for (const bool shared : {false, true}) {
      const auto make = [&](const at::Tensor& from) {
        return shared ? group().allocate(from.numel(), from.options()).copy_(from) : from.clone();
      };
      auto tensor = make(input(group().rank(), numel));
      group().all_reduce(tensor).wait();
      EXPECT_TRUE(at::equal(tensor, sum_of_inputs(numel)));
      tensor = make(input(group().rank(), numel));
      group().all_reduce(tensor, ReduceOp::avg).wait();
      EXPECT_TRUE(at::allclose(tensor, sum_of_inputs(numel) / size));
      for (const int root : {0, size - 1}) {
        tensor = make(input(group().rank(), numel));
        group().broadcast(tensor, root).wait();
        EXPECT_TRUE(at::equal(tensor, input(root, numel)));
        tensor = make(input(group().rank(), numel));
        group().reduce(tensor, root).wait();
        if (group().rank() == root) {
          EXPECT_TRUE(at::equal(tensor, sum_of_inputs(numel)));
        }
      }
      auto part = make(at::zeros({numel}));
      group().reduce_scatter(part, make(input(group().rank(), numel * size))).wait();
      EXPECT_TRUE(at::equal(part, sum_of_inputs(numel * size).narrow(0, numel * group().rank(), numel)));
      auto whole = make(at::zeros({numel * size}));
      group().all_gather(whole, make(input(group().rank(), numel))).wait();
      auto exchanged = make(at::zeros({numel * size}));
      group().all_to_all(exchanged, make(input(group().rank(), numel * size))).wait();
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_TRUE(at::equal(whole.narrow(0, numel * rank, numel), input(rank, numel)));
        EXPECT_TRUE(at::equal(exchanged.narrow(0, numel * rank, numel),
                              input(rank, numel * size).narrow(0, numel * group().rank(), numel)));
      }
      auto sent = group().send(tensor.copy_(input(group().rank(), numel)), (group().rank() + 1) % size, 3);
      auto received = make(at::zeros({numel}));
      group().recv(received, (group().rank() + size - 1) % size, 3).wait();
      sent.wait();
      EXPECT_TRUE(at::equal(received, input((group().rank() + size - 1) % size, numel)));
      group().barrier().wait();
    }
  }
}

TEST_F(Span, factors_of_a_premultiplied_sum_count_once) {
  const auto backend = make_backend(group());
  const auto factor = [](int rank) { return 0.5 + rank; };
  auto expected = at::zeros({1000 * group().size()});
  for (int rank = 0; rank < group().size(); ++rank) expected += input(rank, expected.numel()) * factor(rank);
  const auto own = input(group().rank(), expected.numel());

  std::vector<at::Tensor> everywhere{own.clone()};
  c10d::AllreduceOptions all;
  all.reduceOp = c10d::makePreMulSum(factor(group().rank()));
  backend->allreduce(everywhere, all)->wait(c10d::kUnsetTimeout);
  EXPECT_TRUE(at::allclose(everywhere[0], expected));

  auto part = at::empty({1000});
  auto whole = own.clone();
  c10d::ReduceScatterOptions scattered;
  scattered.reduceOp = all.reduceOp;
  backend->_reduce_scatter_base(part, whole, scattered)->wait(c10d::kUnsetTimeout);
  EXPECT_TRUE(at::allclose(part, expected.narrow(0, 1000 * group().rank(), 1000)));

  std::vector<at::Tensor> at_root{own.clone()};
  c10d::ReduceOptions one;
  one.reduceOp = all.reduceOp;
  one.rootRank = group().size() - 1;
  backend->reduce(at_root, one)->wait(c10d::kUnsetTimeout);
  if (group().rank() == one.rootRank) {
    EXPECT_TRUE(at::allclose(at_root[0], expected));
  }
}

TEST_F(Span, many_operations_are_in_flight) {
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int i = 0; i < 20; ++i) {
    tensors.push_back(input(group().rank(), 1000 + i));
    works.push_back(i % 3 == 0 ? group().broadcast(tensors.back(), 1) : group().all_reduce(tensors.back()));
  }
  for (int i = 19; i >= 0; --i) works[i].wait();
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(at::equal(tensors[i], i % 3 == 0 ? input(1, 1000 + i) : sum_of_inputs(1000 + i))) << i;
  }
}

// Runs `act` and compares the bytes that this host has sent with `expected`. TCP and IP headers take 66 of every 1514
// bytes; short messages and acknowledgements take some more.
template <class Act>
void expect_sent(const char* what, double expected, Act act) {
  act();  // connections
  group().barrier().wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto before = sent_bytes();
  group().barrier().wait();  // all ranks have read the counter
  act();
  group().barrier().wait();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto sent = static_cast<double>(sent_bytes() - before);
  group().barrier().wait();
  if (world().local_rank() == 0) {
    std::printf("%-15s %9.0f bytes sent by a host, %9.0f are the minimum\n", what, sent, expected);
  }
  EXPECT_GE(sent, expected) << what;
  EXPECT_LT(sent, expected * 1.07 + 20000) << what;
}

TEST_F(Span, crosses_the_link_with_the_fewest_bytes) {
  const int64_t numel = 400000;
  const double bytes = 4.0 * numel;
  const int size = group().size();
  auto tensor = group().allocate(numel, at::kFloat);
  auto part = group().allocate(numel / size, at::kFloat);
  // With two hosts, each sends half of the total of 2 (H - 1) / H for all-reduce, and so on.
  expect_sent("all_reduce", bytes, [&] { group().all_reduce(tensor).wait(); });
  expect_sent("reduce_scatter", bytes / 2, [&] { group().reduce_scatter(part, tensor).wait(); });
  expect_sent("all_gather", bytes / 2, [&] { group().all_gather(tensor, part).wait(); });
  const bool host_of_root = group().rank() < size / 2;
  expect_sent("broadcast", host_of_root ? bytes : 0, [&] { group().broadcast(tensor, 0).wait(); });
  expect_sent("reduce", host_of_root ? 0 : bytes, [&] { group().reduce(tensor, 0).wait(); });
}

}  // namespace
}  // namespace shoal::span_test
