// Changes to grad() between steps: zero_grad in every form and order, gradients set or zeroed by hand, local backwards,
// steps without gradients. Under every strategy the same as in one process on the whole batch, or refused.

#include <random>

#include "tests/strategy/all/gradients_loop.h"
#include "tests/support/refusal.h"

namespace shoal::test::gradients_test {
namespace {

using namespace gradients_loop;

const std::vector<std::string> strategies{"ddp",  "zero1",        "zero2",         "megatron",   "megatron_in_grads",
                                          "fsdp", "fsdp_grad_op", "fsdp_no_shard", "fsdp_hybrid"};
INSTANTIATE_TEST_SUITE_P(, EveryStrategy, ::testing::ValuesIn(strategies), [](const auto& info) { return info.param; });

// Half of the forms on 2 ranks that share memory, the other half on 3 and over sockets, a third elsewhere.
std::string forms() {
  if (group().size() == 1) return "zH";
  if (group().size() == 3 || group().transport() != "host") return "ZmH";
  return group().size() == 2 ? "zMh" : "Mh";
}

TEST_P(EveryStrategy, zero_grad_in_every_form_and_order) {
  for (const char zero : forms()) {
    const std::string z(1, zero);
    for (const auto& word : {"bs" + z + "bs" + z + "bs", z + "bs" + z + "bs", "bsf" + z + "bs", "bbs" + z + "bbs",
                             "b" + z + "bs", "bl" + z + "bs", "lb" + z + "lbs"}) {
      expect_as_in_one_process(word, GetParam());
    }
  }
}

TEST_P(EveryStrategy, zero_grad_between_forward_and_backward) {
  for (const auto* word : {"xsxsxs", "XsXsXs", "bsxsbszbs"}) expect_as_in_one_process(word, GetParam());
}

TEST_P(EveryStrategy, a_forward_without_backward_changes_nothing) {
  for (const auto* word : {"bfsbfs", "bsfbs", "lfbs", "bfzfbs"}) expect_as_in_one_process(word, GetParam());
}

TEST_P(EveryStrategy, gradients_add_up_without_zero_grad) {
  for (const auto* word : {"bbs", "bsbs", "bllbs", "bBbs", "BsbsBs", "bsBsBs"}) {
    expect_as_in_one_process(word, GetParam());
  }
}

TEST_P(EveryStrategy, zero_grad_of_a_part_leaves_the_rest) {
  for (const auto* word : {"bpbs", "bPbs", "bspbs", "blpbs", "lpbs", "bBPbs"})
    expect_as_in_one_process(word, GetParam());
}

TEST_P(EveryStrategy, a_step_after_zero_grad_does_what_it_does_in_one_process) {
  for (const auto* word : {"bszs", "bsZs", "bsms", "bsMs", "bzs", "bZsZs", "bsps", "bsPs", "bsHszs"}) {
    expect_as_in_one_process(word, GetParam());
  }
}

TEST_P(EveryStrategy, gradients_set_by_hand_count) {
  for (const auto* word : {"bws", "bswsz", "ws", "wszbs", "bwbs", "bwzbs", "wBszbs", "bswbs", "lwbs"}) {
    expect_as_in_one_process(word, GetParam());
  }
}

// Others at each world size.
TEST_P(EveryStrategy, loops_of_any_order) {
  const auto first = 10U * static_cast<unsigned>(group().size() - 1);
  for (unsigned seed = first; seed < first + 10; ++seed) {
    std::mt19937 random(seed);
    std::string word;
    bool local = false;  // a step would use gradients that ranks have not reduced
    while (word.size() < 16) {
      const char letter = std::string("bbBlLfxXzZmMhHpPwss")[random() % 19];
      if (letter == 's' && local) continue;
      if (letter == 'l' || letter == 'L') local = true;
      if (std::string("bBxXzZmMhHw").find(letter) != std::string::npos) local = false;
      word += letter;
    }
    expect_as_in_one_process(word + "bs", GetParam());
    if (HasFatalFailure()) return;
  }
}

TEST_P(EveryStrategy, BEY04_micro_batches_that_zero_grad_drops_have_no_weight) {
  for (const bool set_to_none : {true, false}) {
    for (const bool of_module : {true, false}) {
      auto model = net();
      auto alone = net();
      auto training = Training<NetImpl>::make<torch::optim::SGD>(GetParam(), model.ptr(), group(), sgd_with_decay);
      torch::optim::SGD optimizer(alone->parameters(), sgd_with_decay);
      const auto backward = [&](int64_t number) {
        training.backward(training.forward(batch(group().rank(), number)).pow(2).sum(), 4);
      };
      for (int64_t step = 0; step < 3; ++step) {
        {
          const auto local = training.no_sync(true);
          backward(10 + step);
        }
        of_module ? model->zero_grad(set_to_none) : training.optimizer().zero_grad(set_to_none);
        backward(step);
        training.step();
        training.zero_grad();
        for (int rank = 0; rank < group().size(); ++rank) {
          (alone->forward(batch(rank, step)).pow(2).sum() / (4 * group().size())).backward();
        }
        optimizer.step();
        optimizer.zero_grad();
      }
      EXPECT_LT(difference(model->parameters(), alone->parameters()), 1e-11)
          << "set_to_none " << set_to_none << ", of the module " << of_module;
    }
  }
}

// The second backward leaves a layer out, and the third has a micro-batch under no_sync before it.
TEST_P(EveryStrategy, BEY04_weighted_means_add_up_without_zero_grad) {
  auto model = net();
  auto alone = net();
  auto training = Training<NetImpl>::make<torch::optim::SGD>(GetParam(), model.ptr(), group(), sgd_with_decay,
                                                             {.find_unused_parameters = true, .bucket_mb = 0.0003});
  torch::optim::SGD optimizer(alone->parameters(), sgd_with_decay);
  const auto backward = [&](int64_t number) {
    training.backward(training.forward(batch(group().rank(), number)).pow(2).sum(), group().rank() + 1);
  };
  const auto backward_alone = [&](int64_t number, int micros) {
    const double weight = micros * group().size() * (group().size() + 1) / 2.0;
    for (int rank = 0; rank < group().size(); ++rank) {
      (alone->forward(batch(rank, number)).pow(2).sum() / weight).backward();
    }
  };
  for (int64_t step = 0; step < 3; ++step) {
    if (step == 2) {
      const auto local = training.no_sync(true);
      backward(10);
      backward_alone(10, 2);
    }
    model->leave_out = alone->leave_out = step == 1;
    backward(step);
    backward_alone(step, step == 2 ? 2 : 1);
  }
  training.step();
  optimizer.step();
  EXPECT_LT(difference(model->parameters(), alone->parameters()), 1e-11);
}

TEST_P(EveryStrategy, step_after_local_backwards_alone_is_refused_where_ranks_share_the_result) {
  for (const auto* word : {"l", "bsl", "bszl", "L"}) {
    Loop loop(GetParam());
    for (const char letter : for_strategy(word, GetParam())) loop.run(letter);
    if (GetParam() == "ddp") {
      EXPECT_NO_THROW(loop.run('s')) << "each rank by itself is a way to train";
      continue;
    }
    std::vector<at::Tensor> before;
    for (const auto& parameter : loop.parameters()) before.push_back(parameter.detach().clone());
    group().barrier({-1, -1, "before"}).wait();
    const auto text = test::refusal([&] { loop.run('s'); });
    EXPECT_NE(text.find("outside no_sync"), std::string::npos) << GetParam() << " " << word << ": " << text;
    EXPECT_EQ(difference(loop.parameters(), before), 0) << "nothing has changed";
    group().barrier({-1, -1, "after"}).wait();
    for (const char letter : std::string("bsz")) EXPECT_NO_THROW(loop.run(letter)) << "and training goes on";
  }
}

}  // namespace
}  // namespace shoal::test::gradients_test
