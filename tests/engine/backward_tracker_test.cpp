// Tracking of backwards: where they begin and end, and which gradients arrive in them.

#include "engine/gradients/backward_tracker.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <string>

#include "shoal/error.h"
#include "tests/support/refusal.h"

namespace shoal {
namespace {

using Phase = BackwardTracker::Phase;
using Told = std::vector<std::string>;

// Two parameters, and a record of the listener's calls.
struct Tracked : BackwardListener {
  explicit Tracked(const BackwardTracker::Options& options = {}) {
    for (const auto* name : {"a", "b"}) gradients.push_back({name, at::ones({2}).set_requires_grad(true)});
    tracker.emplace(gradients, options, *this);
  }

  void begin_backward() override {
    told.push_back("begin");
    tracker->enter(next);
  }
  void arriving(size_t gradient) override { told.push_back("arriving " + gradients[gradient].name); }
  void arrived(size_t gradient) override {
    told.push_back("arrived " + gradients[gradient].name);
    if (tracker->phase() == Phase::running && tracker->count(gradient)) told.push_back("complete");
  }
  void end_local_backward() override { told.push_back("end local"); }
  void backward_failed(const BackwardPlace& /*where*/) override { told.push_back("failed"); }
  void end_backward(EndStage stage) override {
    if (stage != EndStage::deliver) return;
    told.push_back("end");
    tracker->require_all_arrivals();
    tracker->expect_the_same();
    tracker->enter(Phase::idle);
  }

  const at::Tensor& of(size_t gradient) const { return gradients[gradient].parameter; }
  Told backward(const at::Tensor& loss) {
    told.clear();
    loss.backward();
    return told;
  }

  std::vector<Gradient> gradients;
  Phase next = Phase::running;
  Told told;
  std::optional<BackwardTracker> tracker;
};

TEST(BackwardTracker, tells_of_a_backward_from_its_first_gradient_to_its_end) {
  Tracked tracked;
  for (int step = 0; step < 2; ++step) {
    EXPECT_EQ(tracked.backward(tracked.of(1).sum()), (Told{"begin", "arriving b", "arrived b", "complete", "end"}));
    EXPECT_EQ(tracked.tracker->order(), std::vector<size_t>{1});
    EXPECT_EQ(tracked.tracker->phase(), Phase::idle);
  }
}

TEST(BackwardTracker, a_local_backward_is_idle_again_at_its_end) {
  Tracked tracked;
  tracked.next = Phase::local;
  EXPECT_EQ(tracked.backward(tracked.of(0).sum()), (Told{"begin", "arriving a", "arrived a", "end local"}));
  EXPECT_EQ(tracked.tracker->phase(), Phase::idle);
}

TEST(BackwardTracker, a_local_backward_that_failed_is_followed_by_another_that_begins) {
  Tracked tracked;
  tracked.next = Phase::local;
  bool first = true;
  tracked.of(0).register_hook([&](const at::Tensor&) {
    if (std::exchange(first, false)) throw std::runtime_error("fails");
  });
  EXPECT_ANY_THROW(tracked.backward((tracked.of(0) * tracked.of(1)).sum()));
  const auto told = tracked.backward(tracked.of(1).sum());
  EXPECT_EQ(told, (Told{"begin", "arriving b", "arrived b", "end local"}));
}

TEST(BackwardTracker, a_backward_after_one_that_failed_in_the_middle_of_a_step_is_refused) {
  for (const bool inspected : {true, false}) {
    Tracked tracked;
    bool first = true;
    tracked.of(0).register_hook([&](const at::Tensor&) {
      if (std::exchange(first, false)) throw std::runtime_error("fails");
    });
    const auto loss = (tracked.of(1) * 2 + (tracked.of(0) * 2).exp()).sum();
    if (inspected) tracked.tracker->inspect({loss});
    EXPECT_ANY_THROW(loss.backward({}, /*keep_graph=*/true));
    if (tracked.tracker->phase() == Phase::idle) {
      tracked.tracker->enter(Phase::running);  // the backward failed before the first gradient
    } else {
      EXPECT_EQ(tracked.told.back(), "failed");
    }
    for (int again = 0; again < 2; ++again) {
      const auto text = test::refusal([&] { loss.backward({}, /*keep_graph=*/true); });
      EXPECT_NE(text.find("the last backward failed in the middle of a step: call abandon_step()"), std::string::npos)
          << text;
    }
    EXPECT_NE(test::refusal([&] { tracked.tracker->begin(); }).find("abandon_step()"), std::string::npos);
    tracked.tracker->enter(Phase::idle);  // abandoned
    EXPECT_EQ(tracked.backward(tracked.of(1).sum()), (Told{"begin", "arriving b", "arrived b", "complete", "end"}));
  }
}

TEST(BackwardTracker, a_backward_without_a_gradient_is_the_callers) {
  Tracked tracked;
  tracked.tracker->begin();
  EXPECT_EQ(tracked.tracker->phase(), Phase::running);
  tracked.tracker->end();
  tracked.tracker->end();
  EXPECT_EQ(tracked.told, (Told{"begin", "end"}));
  EXPECT_TRUE(tracked.tracker->order().empty());
}

TEST(BackwardTracker, autograd_grad_is_no_backward) {
  Tracked tracked;
  const auto loss = (tracked.of(0) * 2).sum();
  tracked.tracker->inspect({loss});
  torch::autograd::grad({loss}, {tracked.of(0)});
  EXPECT_EQ(tracked.told, Told{});
}

TEST(BackwardTracker, DDP08_a_static_graphs_gradient_is_complete_when_it_has_come_as_often_as_the_first_time) {
  Tracked tracked({.static_graph = true});
  // One accumulation each: a second one within the backward would mean a recomputed block.
  EXPECT_EQ(tracked.backward(tracked.of(0).sum()), (Told{"begin", "arriving a", "arrived a", "end"}));
  EXPECT_EQ(tracked.backward(tracked.of(0).sum()), (Told{"begin", "arriving a", "arrived a", "complete", "end"}));
  const auto more = test::refusal([&] { tracked.backward(tracked.of(1).sum()); });
  EXPECT_NE(
      more.find("static_graph: the gradient of b was computed 1 times in this backward, but 0 times in the first"),
      std::string::npos);
}

TEST(BackwardTracker, a_static_graphs_gradient_that_stays_away_is_refused_at_the_end) {
  Tracked tracked({.static_graph = true});
  tracked.backward((tracked.of(0) * tracked.of(1)).sum());
  const auto fewer = test::refusal([&] { tracked.backward(tracked.of(1).sum()); });
  EXPECT_NE(
      fewer.find("static_graph: the gradient of a was computed 0 times in this backward, but 1 times in the first"),
      std::string::npos);
}

TEST(BackwardTracker, gradients_that_no_forward_reaches_are_taken_once) {
  Tracked tracked({.find_unused_parameters = true});
  EXPECT_TRUE(tracked.tracker->take_unreached().empty()) << "no forward has been looked at";
  tracked.tracker->inspect({tracked.of(0) * 2});
  EXPECT_EQ(tracked.tracker->take_unreached(), std::vector<size_t>{1});
  EXPECT_TRUE(tracked.tracker->take_unreached().empty());
  tracked.tracker->inspect({tracked.of(0) * 2});
  tracked.tracker->inspect({tracked.of(1) * 2});
  EXPECT_TRUE(tracked.tracker->take_unreached().empty()) << "one of two forwards reaches each";
}

// x, with a backward that runs another one: of the sum of what `inner` returns.
struct Nested : torch::autograd::Function<Nested> {
  using Inner = std::function<at::Tensor()>;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Inner* inner) {
    context->saved_data["inner"] = reinterpret_cast<int64_t>(inner);
    return x * 1;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list grads) {
    const torch::AutoGradMode enabled(true);
    (*reinterpret_cast<Inner*>(context->saved_data["inner"].toInt()))().sum().backward();
    return {grads[0], at::Tensor()};
  }
};

TEST(BackwardTracker, DDP08_a_backward_run_by_a_node_of_another_is_a_part_of_it) {
  for (const bool local : {false, true}) {
    Tracked tracked;
    if (local) tracked.next = Phase::local;
    const auto strings = [&](Told told) {
      if (local) std::erase(told, "complete");
      told.push_back(local ? "end local" : "end");
      return told;
    };
    const Nested::Inner of_b = [&] { return tracked.of(1) * 2; };
    const Nested::Inner deeper = [&] { return Nested::apply(tracked.of(0) * 1, &of_b); };
    for (int step = 0; step < 2; ++step) {
      EXPECT_EQ(tracked.backward(Nested::apply(tracked.of(0) * 3, &of_b).sum()),
                strings({"begin", "arriving b", "arrived b", "complete", "arriving a", "arrived a", "complete"}));
      EXPECT_EQ(tracked.backward(Nested::apply(at::ones({2}).requires_grad_(), &of_b).sum()),
                strings({"begin", "arriving b", "arrived b", "complete"}))
          << "no gradient is left for the outer one";
      EXPECT_EQ(tracked.backward(Nested::apply(at::ones({2}).requires_grad_(), &deeper).sum()),
                strings({"begin", "arriving b", "arrived b", "complete", "arriving a", "arrived a", "complete"}));
      EXPECT_EQ(tracked.tracker->phase(), Phase::idle);
    }
  }
}

TEST(BackwardTracker, DDP08_a_backward_that_reaches_the_outputs_of_forward_is_no_part_of_another) {
  Tracked tracked;
  const Nested::Inner step = [&] {
    const auto output = tracked.of(1) * 2;
    tracked.tracker->inspect({output});
    return output;
  };
  EXPECT_EQ(tracked.backward(Nested::apply(at::ones({2}).requires_grad_(), &step).sum()),
            (Told{"begin", "arriving b", "arrived b", "complete", "end"}));
  bool ended = false;
  const auto x = at::ones({2}).requires_grad_();
  x.register_hook([&](const at::Tensor&) { ended = tracked.told.back() == "end"; });
  tracked.backward(Nested::apply(x, &step).sum());
  EXPECT_TRUE(ended);
}

TEST(BackwardTracker, DDP08_a_gradient_that_comes_again_begins_another_step_if_the_listener_splits) {
  for (const bool splits : {true, false}) {
    Tracked tracked({.splits = splits});
    const Nested::Inner of_b = [&] { return tracked.of(1) * 2; };
    auto expected = Told{"begin", "arriving b", "arrived b", "complete"};
    if (splits) expected.insert(expected.end(), {"end", "begin"});
    expected.insert(expected.end(),
                    {"arriving b", "arrived b", "complete", "arriving a", "arrived a", "complete", "end"});
    const auto x = tracked.of(0) * 3;
    EXPECT_EQ(tracked.backward(Nested::apply(Nested::apply(x, &of_b), &of_b).sum()), expected);
  }
}

TEST(BackwardTracker, DDP08_an_outer_backward_that_failed_is_followed_by_a_refusal) {
  Tracked tracked;
  const Nested::Inner of_b = [&] { return tracked.of(1) * 2; };
  bool first = true;
  const auto x = at::ones({2}).requires_grad_();
  x.register_hook([&](const at::Tensor&) {
    if (std::exchange(first, false)) throw std::runtime_error("fails");
  });
  EXPECT_ANY_THROW(tracked.backward(Nested::apply(x, &of_b).sum()));
  EXPECT_EQ(tracked.told, (Told{"begin", "arriving b", "arrived b", "complete", "failed"}));
  const auto text = test::refusal([&] { tracked.backward(Nested::apply(x, &of_b).sum()); });
  EXPECT_NE(text.find("the last backward failed in the middle of a step"), std::string::npos) << text;
  tracked.tracker->enter(Phase::idle);  // abandoned
  EXPECT_EQ(tracked.backward(Nested::apply(x, &of_b).sum()),
            (Told{"begin", "arriving b", "arrived b", "complete", "end"}));
}

TEST(BackwardTracker, DDP06_a_forward_without_known_outputs_may_reach_all) {
  Tracked tracked({.find_unused_parameters = true});
  tracked.tracker->inspect({});
  EXPECT_TRUE(tracked.tracker->take_unreached().empty());
}

TEST(BackwardTracker, tells_nothing_once_detached) {
  Tracked tracked;
  const auto output = tracked.of(0) * 2;
  tracked.tracker->inspect({output});
  tracked.tracker->detach();
  EXPECT_FALSE(tracked.tracker->attached());
  EXPECT_EQ(tracked.backward((tracked.of(0) * 2).sum()), Told{});
  const auto text = test::refusal([&] { tracked.backward(output.sum()); });
  EXPECT_NE(text.find("a forward whose wrapper is gone by now, has been unwrapped, or has changed its ranks since: "
                      "gradients, such as that of a,"),
            std::string::npos);
  EXPECT_EQ(tracked.told, Told{});
}

// On a GPU nobody may be told of the failure.
TEST(BackwardTracker, a_backward_that_failed_before_its_first_gradient_is_left_open) {
  Tracked tracked;
  const auto output = tracked.of(0) * 2;
  tracked.tracker->inspect({output});
  bool fails = true;
  output.register_hook([&](const at::Tensor&) {
    if (fails) throw std::runtime_error("fails");
  });
  EXPECT_FALSE(tracked.tracker->left_open());
  EXPECT_ANY_THROW(output.sum().backward({}, /*keep_graph=*/true));
  EXPECT_TRUE(tracked.tracker->left_open());
  fails = false;
  output.sum().backward();
  EXPECT_FALSE(tracked.tracker->left_open());
}

// Listens together with others to one backward.
struct Sharing : Tracked {
  Sharing(std::string called, Told& stages) : name(std::move(called)), all(stages) {}
  bool ends_with_others() const override { return true; }
  void end_backward(EndStage stage) override {
    const auto* names = stage == EndStage::send ? "sends" : stage == EndStage::await ? "awaits" : "delivers";
    all.push_back(fmt::format("{} {}", name, names));
    if (stage == EndStage::await && fails) throw std::runtime_error("fails");
    Tracked::end_backward(stage);
  }
  std::string name;
  Told& all;
  bool fails = false;
};

TEST(BackwardTracker, BEY10_those_that_share_a_backward_end_in_stages_and_fail_together) {
  for (const bool fails : {false, true}) {
    Told stages;
    Sharing upper("upper", stages), lower("lower", stages);
    lower.fails = fails;
    const auto output = lower.of(0) * 2;
    lower.tracker->inspect({output});
    const auto backward = [&] { (upper.of(0) * output).sum().backward(); };
    if (fails) {
      EXPECT_ANY_THROW(backward());
    } else {
      backward();
    }
    Told expected{"upper sends", "lower sends", "upper awaits", "lower awaits", "upper delivers", "lower delivers"};
    if (stages.front() == "lower sends") {
      for (size_t i = 0; i < expected.size(); i += 2) std::swap(expected[i], expected[i + 1]);
    }
    if (fails) expected.resize(stages.front() == "lower sends" ? 3 : 4);
    EXPECT_EQ(stages, expected);
    EXPECT_EQ(upper.told.back(), fails ? "failed" : "end");
  }
}

}  // namespace
}  // namespace shoal
