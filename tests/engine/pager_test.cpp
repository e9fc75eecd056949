// Pages that are gathered when an operator uses them, on several ranks.

#include "engine/paging/pager.h"

#include <fmt/format.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <atomic>
#include <random>
#include <thread>

#include "shoal/error.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal {
namespace {

using test::group;
using Pass = Pager::Pass;

// Page p: numel() elements of value p + 1, each rank with its shard.
class Book {
 public:
  explicit Book(size_t count, PagerOptions options = {}) : pager(group(), options) {
    for (size_t i = 0; i < count; ++i) {
      parts.push_back(at::full({part}, static_cast<double>(i + 1)));
      pages.push_back(
          pager.add(numel(), at::TensorOptions(at::kFloat), {.name = "page " + std::to_string(i), .own = parts[i]}));
    }
  }

  static int64_t numel() { return part * group().size(); }
  void invalidate() {
    for (const auto& page : pages) pager.invalidate(page);
  }
  double read(size_t page) const { return pages[page].mean().item<double>(); }

  static constexpr int64_t part = 1000;
  Pager pager;
  std::vector<at::Tensor> parts;
  std::vector<at::Tensor> pages;
};

TEST(Pager, BEY16_a_page_is_there_when_an_operator_takes_it_or_a_view_of_it) {
  const Book book(4);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(book.read(i), static_cast<double>(i + 1));
    const auto view = book.pages[i].view({group().size(), Book::part}).t();
    EXPECT_EQ(view.sum().item<double>(), static_cast<double>(i + 1) * static_cast<double>(Book::numel()));
  }
  const auto copy = book.pages[0].clone();
  for (size_t i = 1; i < 4; ++i) book.read(i);
  EXPECT_EQ(copy.mean().item<double>(), 1) << "a clone outlives the page's stay";
  EXPECT_EQ(at::cat({book.pages[0], book.pages[3]}).mean().item<double>(), 2.5) << "several pages in one operator";
}

TEST(Pager, FSDP07_no_more_pages_are_in_memory_than_the_limit_says) {
  for (const size_t resident : {1, 2, 3}) {
    Book book(6, {.resident = resident, .ahead = 1});
    for (int pass = 0; pass < 3; ++pass) {
      book.pager.begin(Pass::training);
      for (size_t i = 0; i < 6; ++i) book.read(i);
      for (size_t i = 6; i-- > 0;) book.read(i);
      book.pager.end();
      book.invalidate();
    }
    // Down from page 5: the last `resident` pages are still in memory.
    EXPECT_EQ(book.pager.statistics().gathers, 3 * (12 - static_cast<int64_t>(resident))) << resident;
    EXPECT_LE(book.pager.statistics().peak_pages, resident + 1);
    EXPECT_LE(book.pager.statistics().peak_bytes, static_cast<int64_t>((resident + 1) * 4) * Book::numel());
  }
}

TEST(Pager, FSDP07_no_more_bytes_are_in_memory_than_the_limit_says) {
  const int64_t page = 4 * Book::numel();
  Book book(6, {.resident = 6, .ahead = 1, .bytes = 3 * page + 1});
  for (int pass = 0; pass < 3; ++pass) {
    book.pager.begin(Pass::training);
    for (size_t i = 0; i < 6; ++i) ASSERT_EQ(book.read(i), static_cast<double>(i + 1));
    for (size_t i = 6; i-- > 0;) ASSERT_EQ(book.read(i), static_cast<double>(i + 1));
    book.pager.end();
    book.invalidate();
  }
  EXPECT_EQ(book.pager.statistics().gathers, 3 * (12 - 2));
  EXPECT_EQ(book.pager.statistics().peak_bytes, 3 * page);
}

TEST(Pager, FSDP07_an_operator_that_needs_more_than_the_limit_fails_and_nothing_else_does) {
  Book book(3, {.resident = 2, .ahead = 0});
  EXPECT_EQ(at::cat({book.pages[0], book.pages[1], book.pages[0]}).numel(), 3 * Book::numel());
  const auto message = test::refusal<UsageError>([&] { at::cat({book.pages[0], book.pages[1], book.pages[2]}); });
  for (const auto& part :
       {std::string("aten::cat takes the parameters of 3 units"), std::string("page 0, page 1, page 2"),
        std::to_string(3 * 4 * Book::numel()) + " bytes", std::string("summon_full_params")}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  EXPECT_EQ(book.read(2), 3);
  book.pager.unshard_all();
  EXPECT_EQ(at::cat({book.pages[0], book.pages[1], book.pages[2]}).mean().item<double>(), 2);
  book.pager.reshard_all(/*store=*/false);
}

TEST(Pager, FSDP08_from_the_second_pass_on_pages_leave_before_they_are_used) {
  Book book(4, {.resident = 1, .ahead = 1});
  const auto pass = [&] {
    std::vector<int64_t> gathered;
    book.pager.begin(Pass::training);
    for (size_t i = 0; i < 4; ++i) {
      book.read(i);
      gathered.push_back(book.pager.statistics().gathers);
    }
    book.pager.end();
    book.invalidate();
    return gathered;
  };
  EXPECT_EQ(pass(), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(pass(), (std::vector<int64_t>{6, 7, 8, 8}));
}

TEST(Pager, changed_parts_are_seen_after_invalidate) {
  Book book(2);
  EXPECT_EQ(book.read(1), 2);
  book.parts[1].fill_(7);
  book.invalidate();
  EXPECT_EQ(book.read(1), 7);
}

TEST(Pager, reading_past_the_operators_is_an_error_that_says_what_to_do) {
  Book book(3, {.resident = 1, .ahead = 0});
  book.read(0);
  EXPECT_EQ(book.pages[0].data_ptr<float>()[0], 1);
  book.read(1);
  try {
    book.pages[0].data_ptr<float>();
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("summon_full_params"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("page 0"), std::string::npos);
  }
  book.pager.unshard_all();
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(book.pages[i].data_ptr<float>()[0], static_cast<float>(i + 1));
  // Writes to held pages count only if they are stored.
  const torch::NoGradGuard no_grad;
  book.pages[2].fill_(9);
  book.pager.reshard_all(/*store=*/true);
  EXPECT_EQ(book.parts[2].mean().item<double>(), 9);
  book.invalidate();
  EXPECT_EQ(book.read(2), 9);
}

// Ranks read different pages, different numbers of times and in different orders, in every pass.
TEST(Pager, BEY02_ranks_may_use_different_pages) {
  constexpr size_t pages = 7;
  Book book(pages, {.resident = 2, .ahead = 1});
  std::mt19937 same(1);
  std::mt19937 own(static_cast<unsigned>(group().rank() + 2));
  for (int pass = 0; pass < 40; ++pass) {
    // Half of the passes repeat the last one, some of them on all ranks but this one.
    static std::vector<size_t> reads;
    if (same() % 2 == 0) {
      auto& random = same() % 2 == 0 ? own : same;
      reads.clear();
      for (size_t i = random() % 12; i > 0; --i) reads.push_back(random() % pages);
    }
    book.pager.begin(pass % 5 == 0 ? Pass::evaluation : Pass::training);
    for (const auto page : reads) ASSERT_EQ(book.read(page), static_cast<double>(page + 1));
    book.pager.end();
    EXPECT_LE(book.pager.statistics().peak_pages, 4U);
  }
}

TEST(Pager, ranks_that_call_forward_differently_often_are_told_so) {
  if (group().size() == 1) GTEST_SKIP() << "no peers";
  Book book(2);
  EXPECT_THROW(group().rank() == 0 ? book.pager.begin(Pass::training) : book.pager.end(), DisagreeError);
}

// Rank 0 is about to change its shard; the others read first.
// As micro-batches of a share of the batch that only rank 0 has.
TEST(Pager, ELA05_ranks_take_part_in_passes_that_they_do_not_make) {
  Book book(4, {.resident = 1, .ahead = 1});
  const auto read_all = [&](Pass pass) {
    book.pager.begin(pass);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(book.read(i), static_cast<double>(i + 1));
    if (pass == Pass::evaluation) book.pager.end();
  };
  for (int step = 0; step < 3; ++step) {
    if (group().rank() == 0) {
      read_all(Pass::training);
      read_all(Pass::evaluation);
      read_all(Pass::training);
    }
    book.pager.meet();
    read_all(Pass::training);
    book.pager.end();
    book.invalidate();
  }
}

TEST(Pager, FSDP21_what_is_read_before_all_ranks_update_is_what_was_there) {
  Book book(3, {.resident = 1, .ahead = 1});
  for (int step = 0; step < 4; ++step) {
    if (group().rank() > 0) {
      for (size_t i = 0; i < 3; ++i) ASSERT_EQ(book.read(i), static_cast<double>(i + 1 + 10 * step));
    }
    book.pager.update();
    for (auto& part : book.parts) part += 10;
    book.invalidate();
  }
}

TEST(Pager, ranks_that_evaluate_and_train_at_once_are_told_so) {
  if (group().size() == 1) GTEST_SKIP() << "no peers";
  Book book(2);
  const auto message =
      test::refusal<DisagreeError>([&] { book.pager.begin(group().rank() == 0 ? Pass::training : Pass::evaluation); });
  EXPECT_NE(message.find("rank 0 begins a forward for training, rank 1 begins a forward without gradients"),
            std::string::npos)
      << message;
}

TEST(Pager, a_page_with_a_root_comes_from_it) {
  Pager pager(group(), {});
  const int root = group().size() - 1;
  const auto whole = group().rank() == root ? at::arange(10, at::kFloat) : at::Tensor();
  const auto page = pager.add(10, at::TensorOptions(at::kFloat), {.name = "page", .own = whole, .root = root});
  EXPECT_EQ(page.sum().item<double>(), 45);
}

TEST(Pager, several_threads_may_read_the_pages_that_are_there) {
  Book book(3, {.resident = 3, .ahead = 0});
  for (size_t i = 0; i < 3; ++i) book.read(i);
  std::vector<std::thread> threads;
  std::atomic<int> right = 0;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) right += book.read(i % 3) == i % 3 + 1 ? 1 : 0;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(right, 800);
}

}  // namespace
}  // namespace shoal
