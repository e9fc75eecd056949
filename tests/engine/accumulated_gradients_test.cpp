// Gradients that earlier backwards accumulated: this rank's own, for the next step, and sums.

#include "engine/gradients/accumulated_gradients.h"

#include <ATen/native/Resize.h>
#include <gtest/gtest.h>

#include <numeric>

#include "comm/transport/dry_run.h"
#include "engine/gradients/local_gradients.h"
#include "engine/reducer/gradient_reduction.h"
#include "tests/support/refusal.h"

namespace shoal {
namespace {

// Two gradients of two elements in one bucket, whose sum each of two ranks gets.
struct WithGradients {
  explicit WithGradients(bool in_buckets = true) {
    for (const auto* name : {"a", "b"}) gradients.push_back({name, at::zeros({2}).set_requires_grad(true)});
    buckets.emplace(gradients, group, reduction.plan());
    accumulated.emplace(gradients, *buckets, AccumulatedGradients::Options{.in_buckets = in_buckets});
    accumulated->move_to(buckets->build({1, 0}));
  }
  at::Tensor& grad(size_t gradient) { return gradients[gradient].parameter.mutable_grad(); }
  void backward(size_t gradient, double value) {
    accumulated->adopt_changes();
    grad(gradient) = grad(gradient).defined() ? grad(gradient).add_(value) : at::full({2}, value);
    accumulated->note_arrival(gradient);
    accumulated->note_local(gradient);
  }
  const at::Tensor& flat() { return (*buckets)[0].flat(); }
  bool in_bucket(size_t gradient) { return grad(gradient).is_alias_of((*buckets)[0].flat()); }

  Group group = dry_run_group(2);
  AllReduce reduction{group, BucketCaps{}};
  std::vector<Gradient> gradients;
  std::optional<BucketSet> buckets;
  std::optional<AccumulatedGradients> accumulated;
};

TEST(AccumulatedGradients, DDP07_local_gradients_lie_in_the_bucket_and_count_for_the_next_step) {
  WithGradients with;
  with.backward(0, 1);
  with.backward(0, 2);
  EXPECT_TRUE(with.in_bucket(0));
  EXPECT_TRUE(at::equal(with.grad(0), at::full({2}, 3.0)));
  EXPECT_EQ(with.accumulated->used(), (std::vector<bool>{true, false}));
  EXPECT_TRUE(has_local_gradient(with.gradients[0].parameter));
  with.accumulated->forget();
  with.accumulated->unmark();
  EXPECT_EQ(with.accumulated->used(), (std::vector<bool>{false, false}));
  EXPECT_FALSE(has_local_gradient(with.gradients[0].parameter));
}

TEST(AccumulatedGradients, stay_out_of_the_bucket_where_they_are_to_be_a_tensor_of_their_own) {
  WithGradients with(/*in_buckets=*/false);
  with.backward(0, 1);
  EXPECT_FALSE(with.in_bucket(0));
}

TEST(AccumulatedGradients, what_is_dropped_is_not_of_the_next_step_nor_its_weight) {
  WithGradients with;
  with.backward(0, 1);
  with.backward(1, 1);
  with.accumulated->add_weight(2);
  with.accumulated->add_weight(3);
  with.grad(0).reset();
  with.accumulated->adopt_changes();
  EXPECT_EQ(with.accumulated->used(), (std::vector<bool>{false, true}));
  EXPECT_EQ(with.accumulated->weight(), 5);
  with.grad(1).reset();
  with.accumulated->adopt_changes();
  EXPECT_FALSE(with.accumulated->weight());
}

TEST(AccumulatedGradients, what_is_zeroed_has_no_weight) {
  WithGradients with;
  for (const size_t gradient : {0, 1}) with.backward(gradient, 1);
  with.accumulated->add_weight(2);
  with.accumulated->note_values();
  with.grad(1).zero_();
  with.accumulated->adopt_changes();
  EXPECT_EQ(with.accumulated->weight(), 2);
  with.grad(0).zero_();
  with.accumulated->adopt_changes();
  EXPECT_FALSE(with.accumulated->weight());
}

TEST(AccumulatedGradients, a_backward_that_gave_zeros_has_its_weight) {
  WithGradients with;
  with.backward(0, 0);
  with.accumulated->add_weight(2);
  with.accumulated->note_values();
  with.accumulated->move_to(with.buckets->build({0, 1}));
  with.accumulated->adopt_changes();
  EXPECT_EQ(with.accumulated->weight(), 2);
  with.grad(0).zero_();  // as on the ranks where it was not zero
  with.accumulated->adopt_changes();
  EXPECT_FALSE(with.accumulated->weight());
}

TEST(AccumulatedGradients, handing_over_writes_this_ranks_part_of_the_mean) {
  WithGradients with;
  with.backward(0, 4);
  EXPECT_FALSE(with.accumulated->hand_over(0, /*scale=*/0.5).defined());
  EXPECT_FALSE(with.accumulated->hand_over(1, /*scale=*/0.5).defined());
  EXPECT_TRUE(at::equal((*with.buckets)[0].view(with.buckets->places()[0].index), at::full({2}, 2.0)));
  EXPECT_TRUE(at::equal((*with.buckets)[0].view(with.buckets->places()[1].index), at::zeros({2})));
}

TEST(AccumulatedGradients, handing_over_keeps_what_this_rank_did_not_touch) {
  WithGradients with;
  with.backward(0, 4);
  with.accumulated->forget();  // the previous step took it; this one brings nothing
  const auto untouched = with.accumulated->hand_over(0, /*scale=*/0.5);
  ASSERT_TRUE(untouched.defined());
  EXPECT_TRUE(at::equal(untouched, at::full({2}, 4.0)));
}

TEST(AccumulatedGradients, a_gradient_in_its_place_is_zero_where_there_is_none) {
  WithGradients with;
  with.backward(0, 4);
  EXPECT_TRUE(at::equal(with.accumulated->local(0), at::full({2}, 4.0)));
  EXPECT_TRUE(at::equal(with.accumulated->local(1), at::zeros({2})));
  EXPECT_EQ(with.accumulated->used(), (std::vector<bool>{true, true}));
}

TEST(AccumulatedGradients, are_refused_to_an_optimizer_until_they_have_been_reduced) {
  WithGradients with;
  with.backward(1, 1);
  const auto text = test::refusal([&] { with.accumulated->prepare_sums("Optimizer", [] {}); });
  EXPECT_NE(text.find("Optimizer: the gradient of parameter b has been accumulated under no_sync"), std::string::npos)
      << text;
}

TEST(AccumulatedGradients, another_object_goes_on_from_what_is_left) {
  WithGradients with;
  with.backward(1, 3);
  with.accumulated->add_weight(7);
  with.accumulated->note_values();
  const auto left = with.accumulated->left();
  const auto gradients = with.gradients;
  with.accumulated.reset();
  with.buckets.reset();
  BucketSet buckets(gradients, with.group, with.reduction.plan());
  AccumulatedGradients next(gradients, buckets, {});
  next.move_to(buckets.build({0, 1}));
  next.resume(left, [](const Bucket&) { return true; });
  EXPECT_EQ(next.used(), (std::vector<bool>{false, true}));
  EXPECT_EQ(next.weight(), 7);
  EXPECT_TRUE(with.grad(1).is_alias_of(buckets[0].flat()));
  EXPECT_TRUE(at::equal(with.grad(1), at::full({2}, 3.0)));
  with.grad(1).zero_();
  next.adopt_changes();
  EXPECT_FALSE(next.weight());
}

TEST(AccumulatedGradients, a_mean_that_the_program_has_written_to_is_a_mean_no_more) {
  const auto is_mean_after = [](const std::function<void(WithGradients&)>& change) {
    WithGradients with;
    with.grad(0) = at::full({2}, 3.0);
    with.accumulated->note_mean(0);
    with.accumulated->move_to(with.buckets->build({0, 1}));  // which puts another tensor there
    change(with);
    with.accumulated->adopt_changes();
    EXPECT_EQ(with.accumulated->has_mean(0), with.accumulated->mean(0).defined());
    return with.accumulated->has_mean(0);
  };
  EXPECT_TRUE(is_mean_after([](WithGradients&) {}));
  EXPECT_FALSE(is_mean_after([](WithGradients& with) { with.grad(0).add_(1); }));
  EXPECT_FALSE(is_mean_after([](WithGradients& with) { with.grad(0) = at::full({2}, 3.0); }));
  EXPECT_FALSE(is_mean_after([](WithGradients& with) { with.grad(0).reset(); }));
}

TEST(AccumulatedGradients, another_object_leaves_means_where_they_are) {
  for (const bool converted : {false, true}) {
    WithGradients with(/*in_buckets=*/false);
    with.grad(0) = at::full({2}, 3.0);
    with.accumulated->note_mean(0);
    const auto left = with.accumulated->left();
    auto gradients = with.gradients;
    if (converted) gradients[0].reduce_dtype = at::kDouble;
    BucketSet buckets(gradients, with.group, with.reduction.plan());
    AccumulatedGradients next(gradients, buckets, {.in_buckets = converted});
    next.move_to(buckets.build({0, 1}));
    next.resume(left, [](const Bucket&) { return true; });
    EXPECT_FALSE(same_storage(with.grad(0), buckets.of(0).flat()));
    EXPECT_EQ(with.grad(0).scalar_type(), at::kFloat);
    EXPECT_TRUE(next.has_mean(0));
  }
}

// What a program has in the same memory would be left behind.
TEST(AccumulatedGradients, DDP05_a_gradient_that_is_part_of_another_tensor_stays_there) {
  WithGradients with;
  const auto flat = at::zeros({4});
  with.grad(0) = flat.narrow(0, 0, 2);
  with.accumulated->note_arriving(0);
  with.grad(0).add_(3);
  with.accumulated->note_arrival(0);
  with.accumulated->hand_over(0, 0.5);
  EXPECT_FALSE(with.in_bucket(0));
  EXPECT_TRUE(at::equal((*with.buckets)[0].view(1), at::full({2}, 1.5)));  // buckets in the order 1, 0
  with.accumulated->leave_mean(0, at::full({2}, 7.0));
  EXPECT_TRUE(at::equal(flat.narrow(0, 0, 2), at::full({2}, 7.0)));
}

TEST(AccumulatedGradients, DDP05_a_tensor_that_is_kept_follows_the_gradient_or_gets_a_copy) {
  WithGradients with;
  with.backward(0, 1);
  const auto kept = with.grad(0);
  with.grad(0).reset();
  with.backward(0, 5);
  EXPECT_TRUE(at::equal(kept, at::full({2}, 1.0)));
  const auto followed = with.grad(0);
  with.grad(0).add_(2);
  EXPECT_TRUE(at::equal(followed, at::full({2}, 7.0)));
  // Other buckets, as after the first step.
  with.accumulated->move_to(with.buckets->build({0, 1}));
  with.grad(0).add_(1);
  EXPECT_TRUE(at::equal(followed, at::full({2}, 8.0)));
}

TEST(AccumulatedGradients, DDP05_what_is_kept_of_a_dropped_gradient_keeps_its_memory) {
  WithGradients with;
  with.backward(0, 1);
  const auto memory = with.flat().data_ptr();
  with.grad(0).reset();
  with.backward(0, 2);
  EXPECT_EQ(with.flat().data_ptr(), memory);  // nobody has kept anything
  const auto view = with.grad(0).detach();
  with.backward(0, 3);
  EXPECT_EQ(with.flat().data_ptr(), memory);
  EXPECT_TRUE(at::equal(view, with.grad(0))) << "the gradient was not dropped, and a view of it follows";
  with.grad(0).reset();
  with.backward(0, 4);
  EXPECT_NE(with.flat().data_ptr(), memory);
  EXPECT_TRUE(at::equal(view, at::full({2}, 5.0)));
  EXPECT_TRUE(at::equal(with.grad(0), at::full({2}, 4.0)));
  // An array of NumPy keeps the tensor that it is of, and has its pointer.
  const auto array = with.grad(0);
  const auto* values = array.const_data_ptr<float>();
  with.grad(0).reset();
  with.backward(0, 6);
  EXPECT_EQ(array.const_data_ptr<float>(), values);
  EXPECT_EQ(values[0], 4);
}

TEST(AccumulatedGradients, DDP05_a_gradient_whose_storage_was_resized_gets_memory_again) {
  WithGradients with;
  with.backward(0, 1);
  at::native::resize_bytes_nocuda(with.grad(0).storage(), 0);
  with.grad(0).reset();
  with.backward(0, 2);
  EXPECT_TRUE(at::equal(with.grad(0), at::full({2}, 2.0)));
}

TEST(AccumulatedGradients, DDP05_views_follow_gradients_though_another_was_dropped_long_ago) {
  WithGradients with;
  with.backward(0, 1);
  with.backward(1, 1);
  with.grad(1).reset();  // and never comes again
  with.backward(0, 1);
  const auto view = with.grad(0).detach();
  for (int step = 0; step < 2; ++step) {
    with.accumulated->adopt_changes();
    with.backward(0, 1);
    EXPECT_TRUE(at::equal(view, with.grad(0)));
  }
}

}  // namespace
}  // namespace shoal
