// Elastic jobs that cannot be joined, and say why.

#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>

#include "shoal/zero.h"
#include "tests/elastic/elastic_join.h"

namespace shoal::elastic_closed_test {
namespace {

using test::expect_good;
using test::JoinJob;
using test::reach;
using test::Trained;

TEST(ElasticJoin, ELA06_a_job_that_cannot_be_joined_says_why) {
  const test::SharedRecord record;
  const auto train = [&](const World& world, const Trained& trained) {
    return test::train(world, *record, 1, {}, {}, trained);
  };
  const auto plain = [&](const World& world) { return train(world, {}); };
  const auto zero = [&](const World& world) { return train(world, {.sharding = test::Sharding::zero1_by_host}); };
  WorldOptions tcp;
  tcp.transport = "tcp";
  record->last_step = 2;
  JoinJob job(1, zero, tcp);
  ASSERT_TRUE(reach(*record, {0}, 2));
  const auto ended = job.end_of(job.add(plain, tcp));
  EXPECT_NE(ended.text.find("ranks cannot join this job: its optimizer is sharded, which needs the transport host"),
            std::string::npos)
      << ended.text;
  record->last_step = 0;
  expect_good(job, {0}, *record, 1);
}

// Over sockets, ranks of the same host need second owners, too.
TEST(ElasticJoin, ELA06_a_hook_closes_a_job_over_sockets) {
  const test::SharedRecord record;
  const Trained trained{.sharding = test::Sharding::zero2, .hooked = true};
  const auto body = [&](const World& world) { return test::train(world, *record, 1, {}, {}, trained); };
  WorldOptions tcp;
  tcp.transport = "tcp";
  record->last_step = 2;
  JoinJob job(1, body, tcp);
  ASSERT_TRUE(reach(*record, {0}, 2));
  const auto ended = job.end_of(job.add(body, tcp));
  EXPECT_NE(ended.text.find("cannot join a job like this one: a communication_hook or reduce_fp16 is not supported"),
            std::string::npos)
      << ended.text;
  record->last_step = 0;
  expect_good(job, {0}, *record, 1);
}

// A lone rank may have them.
TEST(ElasticJoin, ELA06_sparse_gradients_of_oss_close_a_job) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    const auto table = std::make_shared<torch::nn::EmbeddingImpl>(torch::nn::EmbeddingOptions(8, 4).sparse(true));
    OSS<torch::optim::SGD> optimizer(table->parameters(), torch::optim::SGDOptions(0.1), world.group());
    DistributedDataParallel parallel(table, world.group());
    const Elastic elastic(world, parallel, optimizer);
    while (record->last_step != 0) usleep(200);
    return "";
  };
  record->last_step = 1;
  JoinJob job(1, body);
  const auto ended = job.end_of(job.add(body));
  EXPECT_NE(
      ended.text.find("cannot join a job like this one: sparse gradients, such as that of weight, are not supported"),
      std::string::npos)
      << ended.text;
  record->last_step = 0;
  EXPECT_EQ(job.end_of(0).text, "");
}

// Nobody has its value and state by a name that the ranks have in common.
TEST(ElasticJoin, ELA06_a_parameter_beside_the_module_closes_a_job) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    const auto net = std::make_shared<test::Net>();
    auto parameters = net->parameters();
    parameters.push_back(torch::ones({2}, torch::requires_grad()));
    OSS<torch::optim::SGD> optimizer(parameters, torch::optim::SGDOptions(0.1), world.group());
    ShardedDataParallel parallel(net, optimizer, world.group(), {.log_sizes = false});
    const Elastic elastic(world, parallel, optimizer);
    while (record->last_step != 0) usleep(200);
    return "";
  };
  record->last_step = 1;
  JoinJob job(2, body);
  const auto ended = job.end_of(job.add(body));
  EXPECT_NE(ended.text.find("its optimizer has parameter 6 [2], which no wrapper trains"), std::string::npos)
      << ended.text;
  record->last_step = 0;
  for (const int rank : {0, 1}) EXPECT_EQ(job.end_of(rank).text, "");
}

}  // namespace
}  // namespace shoal::elastic_closed_test
