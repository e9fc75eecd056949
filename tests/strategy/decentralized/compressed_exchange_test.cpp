// Exchange of compressed differences (BEY22): CHOCO-SGD with copies per round, compared with a second, plain
// implementation.

#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "shoal/decentralized.h"
#include "shoal/error.h"
#include "strategy/decentralized/public_copies.h"
#include "tests/support/world.h"

namespace shoal::compressed_exchange_test {
namespace {

using test::group;
using Numbers = std::vector<double>;

constexpr int64_t numel = 512;
constexpr double lr = 0.0625;

// Loss |x - target|^2 / 2, with a different target on every rank.
struct PointImpl : torch::nn::Module {
  PointImpl() { point = register_parameter("point", at::zeros({numel}, at::kDouble)); }
  at::Tensor forward(const at::Tensor& target) { return (point - target).pow(2).sum() / 2; }
  at::Tensor point;
};

Numbers target_of(int rank) {
  Numbers numbers(numel);
  for (int64_t i = 0; i < numel; ++i) numbers[i] = std::sin(0.37 * static_cast<double>(i * (rank + 1))) * (1 + rank);
  return numbers;
}

// The part of `difference` that the other side receives.
Numbers through_int8(const Numbers& difference) {
  Numbers got(numel);
  for (int64_t begin = 0; begin < numel; begin += 256) {
    float largest = 0;
    for (int64_t i = begin; i < begin + 256; ++i) {
      largest = std::max(largest, std::abs(static_cast<float>(difference[i])));
    }
    const float scale = largest / 127;
    for (int64_t i = begin; i < begin + 256 && scale > 0; ++i) {
      got[i] = std::nearbyint(static_cast<float>(difference[i]) * (1 / scale)) * scale;
    }
  }
  return got;
}
Numbers through_top_k(const Numbers& difference, double part) {
  std::vector<size_t> order(numel);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return std::abs(difference[a]) > std::abs(difference[b]); });
  Numbers got(numel);
  for (size_t i = 0; i < static_cast<size_t>(std::ceil(part * numel)); ++i) {
    got[order[i]] = static_cast<float>(difference[order[i]]);
  }
  return got;
}

class Simulation {
 public:
  Simulation(Topology topology, CompressedExchange how, double rate)
      : topology_(std::move(topology)), how_(how), rate_(rate), x(topology_.size(), Numbers(numel)) {}

  void step(double learning_rate) {
    const auto before = x;
    if (steps_ > 0) mix();
    ++steps_;
    for (int rank = 0; rank < topology_.size(); ++rank) {
      const auto target = target_of(rank);
      for (int64_t i = 0; i < numel; ++i) x[rank][i] -= learning_rate * (before[rank][i] - target[i]);
      Numbers difference(numel);
      auto& copy = copy_of(rank);
      for (int64_t i = 0; i < numel; ++i) difference[i] = x[rank][i] - copy[i];
      const auto sent = how_.top_k ? through_top_k(difference, *how_.top_k) : through_int8(difference);
      for (int64_t i = 0; i < numel; ++i) copy[i] += sent[i];
    }
  }
  void average() {
    Numbers mean(numel);
    for (const auto& row : x) {
      for (int64_t i = 0; i < numel; ++i) mean[i] += row[i] / topology_.size();
    }
    for (auto& row : x) row = mean;
    for (auto& [key, copy] : copies_) copy = mean;
    fresh_ = mean;
    ++steps_;
  }

 private:
  Numbers& copy_of(int rank) {
    return copies_.emplace(std::pair(steps_ % topology_.period(), rank), fresh_).first->second;
  }
  void mix() {
    const auto& round = topology_.round(steps_);
    auto mixed = x;
    for (int rank = 0; rank < topology_.size(); ++rank) {
      for (const auto& [source, weight] : round.sources(rank)) {
        for (int64_t i = 0; i < numel; ++i) {
          mixed[rank][i] += rate_ * weight * (copy_of(source)[i] - copy_of(rank)[i]);
        }
      }
    }
    x = mixed;
  }

  Topology topology_;
  CompressedExchange how_;
  double rate_;
  int64_t steps_ = 0;
  std::map<std::pair<int64_t, int>, Numbers> copies_;  // by round and rank
  Numbers fresh_ = Numbers(numel);

 public:
  std::vector<Numbers> x;  // by rank
};

struct Training {
  Training(const std::string& topology, const CompressedExchange& how)
      : parallel(model, optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(lr)), group(),
                 {.topology = make_topology(topology, group().size()), .compressed_exchange = how}) {}
  void step() { parallel.forward(at::tensor(target_of(group().rank()), at::kDouble)).backward(); }
  void stop_learning() const {
    for (auto* optimizer : parallel.optimizers()) optimizer->param_groups()[0].options().set_lr(0);
  }

  std::shared_ptr<PointImpl> model = std::make_shared<PointImpl>();
  DecentralizedDataParallel<PointImpl> parallel;
};

double distance(const at::Tensor& tensor, const Numbers& numbers) {
  return (tensor - at::tensor(numbers, at::kDouble)).abs().max().item<double>();
}

// Each topology has both forms of messages, one of them at a rate of its own.
TEST(CompressedExchange, BEY22_equals_choco_sgd_written_down_with_loops) {
  int number = 0;
  for (const auto& [how, rate] : std::vector<std::pair<CompressedExchange, double>>{
           {{}, 1}, {{.rate = 0.5}, 0.5}, {{.top_k = 0.02, .rate = 0.05}, 0.05}, {{.top_k = 0.1}, 0.1}}) {
    ++number;
    for (const auto* name : {"complete", "ring", "one-peer-exp", "exp"}) {
      if (++number % 2 == 0) continue;
      Training training(name, how);
      Simulation simulation(make_topology(name, group().size()), how, rate);
      for (int step = 0; step < 24; ++step) {
        if (step == 15) {
          training.parallel.global_avg();
          simulation.average();
        }
        training.step();
        simulation.step(lr);
        ASSERT_LT(distance(training.model->point, simulation.x[group().rank()]), 1e-11)
            << name << (how.top_k ? " top_k" : " int8") << " step " << step;
      }
      EXPECT_EQ(training.parallel.statistics().skipped, 0);
    }
  }
}

TEST(CompressedExchange, BEY22_ranks_come_to_agree_and_keep_their_mean) {
  for (const auto& [how, steps, left] :
       std::vector<std::tuple<CompressedExchange, int, double>>{{{}, 80, 1e-6}, {{.top_k = 0.1}, 400, 1e-3}}) {
    Training training("one-peer-exp", how);
    for (int step = 0; step < 20; ++step) training.step();
    training.stop_learning();
    const auto apart = training.parallel.consensus_distance();
    auto mean = training.model->point.detach().clone();
    group().all_reduce(mean, ReduceOp::avg).wait();
    for (int step = 0; step < steps; ++step) training.step();
    if (group().size() > 1) {
      EXPECT_GT(apart, 0.1);
    }
    EXPECT_LE(training.parallel.consensus_distance(), left * apart);
    auto later = training.model->point.detach().clone();
    group().all_reduce(later, ReduceOp::avg).wait();
    // With three ranks, one-peer-exp is one-way in every round; h_j - h_i still sum to 0.
    EXPECT_LT((later - mean).abs().max().item<double>(), 1e-12);
  }
}

TEST(CompressedExchange, BEY22_a_reader_that_missed_messages_has_the_right_copy_in_the_end) {
  for (const CompressedExchange how : {CompressedExchange{}, CompressedExchange{.top_k = 0.05}}) {
    const GossipBuffer buffer{numel * 8, at::kFloat};
    PublicCopies writer(buffer, how, 2);
    PublicCopies reader(buffer, how, 2);
    const auto message = at::empty({writer.message_bytes()}, at::kByte);
    auto generator = at::detail::createCPUGenerator(1);
    const auto values = [&] { return at::randn({buffer.numel}, generator, at::kFloat); };
    const auto x = values();
    const auto gap = [&](int64_t version) {
      auto of_reader = at::zeros_like(x);  // the reader's own copy is zero
      reader.add_difference(7, version, 1, of_reader);
      return of_reader / how.rate.value_or(how.top_k ? 0.1 : 1);
    };
    for (int64_t version = 1; version <= 200; ++version) {
      writer.write(version, x, message);
      const bool missed = version > 10 && version < 20;
      if (!missed) reader.take(7, version, message);
      // Each of the two rounds needs 64 consecutive messages; the message of version 20 shows that some are missing.
      if (!missed) {
        EXPECT_EQ(reader.knows(7, version), version <= 10 || version >= 20 + 2 * 63) << version;
      }
      if (version == 100) reader.take(7, 50, message.fill_(1));  // not newer: ignored
    }
    // From here on the writer's copy nearly equals x if everything is sent.
    const auto copy = gap(200);
    PublicCopies attentive(buffer, how, 2);
    PublicCopies again(buffer, how, 2);
    for (int64_t version = 1; version <= 200; ++version) {
      again.write(version, x, message);
      attentive.take(7, version, message);
    }
    auto expected = at::zeros_like(x);
    attentive.add_difference(7, 200, 1, expected);
    expected /= how.rate.value_or(how.top_k ? 0.1 : 1);
    EXPECT_LT((copy - expected).abs().max().item<double>(), 1e-5);
    EXPECT_GT(expected.abs().max().item<double>(), 1);
  }
}

// Whichever side notices first that a rank has gone: the first message over other rounds builds on no earlier one.
TEST(CompressedExchange, BEY22_when_rounds_change_copies_begin_anew_and_are_right_at_once) {
  const GossipBuffer buffer{numel * 8, at::kFloat};
  const auto x = at::randn({buffer.numel}, at::detail::createCPUGenerator(1), at::kFloat);
  for (const bool reader_first : {false, true}) {
    PublicCopies writer(buffer, {}, 2);
    PublicCopies reader(buffer, {}, 2);
    const auto message = at::empty({writer.message_bytes()}, at::kByte);
    for (int64_t version = 1; version <= 20; ++version) {
      if (version == 10) (reader_first ? reader : writer).start_afresh(3);
      if (version == 13) (reader_first ? writer : reader).start_afresh(3);
      writer.write(version, x, message);
      reader.take(7, version, message);
      EXPECT_EQ(reader.knows(7, version), version < 10 || version >= 13) << version;
      if (version < 13) continue;
      auto copy = at::zeros_like(x);  // less the reader's own, which is zero
      reader.add_difference(7, version, 1, copy);
      EXPECT_LT((copy - x).abs().max().item<double>(), x.abs().max().item<double>() / 127) << version;
    }
  }
}

TEST(CompressedExchange, BEY22_int8_messages_are_a_quarter_and_bad_input_is_refused) {
  const GossipBuffer buffer{1 << 20, at::kFloat};
  EXPECT_LT(PublicCopies(buffer, {}, 1).message_bytes(), 0.29 * 4 * (1 << 20));
  EXPECT_LT(PublicCopies(buffer, {.top_k = 0.01}, 1).message_bytes(), 0.04 * 4 * (1 << 20));
  const auto refused = [&](const DecentralizedDataParallelOptions& options, const std::string& text) {
    try {
      options.validate(group().size());
      ADD_FAILURE() << "accepted: " << text;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused({.compressed_exchange = CompressedExchange{.top_k = 0}}, "top_k is 0");
  refused({.compressed_exchange = CompressedExchange{.rate = 1.5}}, "rate is 1.5");
  refused({.exchange_dtype = at::kBFloat16, .compressed_exchange = CompressedExchange{}}, "set one of them");
  refused({.pre_average_hook = [](const PreAverage&) {}, .compressed_exchange = CompressedExchange{}},
          "pre_average_hook");
  if (group().size() > 2) {
    refused({.topology = make_topology("random", group().size()), .compressed_exchange = CompressedExchange{}},
            "rounds; give a doubly stochastic one");
  }
}

}  // namespace
}  // namespace shoal::compressed_exchange_test
