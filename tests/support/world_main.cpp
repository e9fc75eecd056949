// Main function of tests that run on several real processes. `TEST --ranks N [--transport T] [--check-agreement]
// [--timeout SECONDS] [--device cuda]` forks N ranks, as `mpirun -n N TEST` starts copies. Each rank joins the world
// and runs the whole suite, so that all ranks execute every test body together.

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <charconv>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include "base/end_process.h"
#include "base/environment.h"
#include "launch/launcher.h"
#include "shoal/error.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::test {
namespace {

std::unique_ptr<World>& joined() {
  static std::unique_ptr<World> world;
  return world;
}

// With SHOAL_TEST_HALF, leaves out half of the cases by a hash of their names: a count, or a sum of characters, would
// leave out the same strategies of every case of a suite.
void leave_out_half() {
  if (!process_environment()("SHOAL_TEST_HALF")) return;
  auto filter = GTEST_FLAG_GET(filter);
  const auto* unit = ::testing::UnitTest::GetInstance();
  char before = filter.find('-') == std::string::npos ? '-' : ':';
  for (int i = 0; i < unit->total_test_suite_count(); ++i) {
    const auto* suite = unit->GetTestSuite(i);
    for (int j = 0; j < suite->total_test_count(); ++j) {
      const auto name = fmt::format("{}.{}", suite->name(), suite->GetTestInfo(j)->name());
      if ((std::hash<std::string>()(name) >> 32) % 2 == 0) continue;
      filter += before + name;
      before = ':';
    }
  }
  GTEST_FLAG_SET(filter, filter);
}

// Silences ranks other than 0 unless they fail.
class FailuresOnly : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    fmt::print(stderr, "{}:{}: {}\n", result.file_name() != nullptr ? result.file_name() : "?", result.line_number(),
               result.message());
  }
};

int run_rank(const std::vector<std::string>& arguments) {
  WorldOptions options;
  options.timeout_seconds = 60;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--transport" && i + 1 < arguments.size()) options.transport = arguments[i + 1];
    if (arguments[i] == "--timeout" && i + 1 < arguments.size()) options.timeout_seconds = std::stoi(arguments[i + 1]);
    if (arguments[i] == "--check-agreement") options.check_agreement = true;
    if (arguments[i] == "--device" && i + 1 < arguments.size()) test_device() = at::Device(arguments[i + 1]);
  }
  joined() = std::make_unique<World>(init(options));
  if (joined()->rank() > 0) {
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOnly);
  }
  at::set_num_threads(1);
  const int code = RUN_ALL_TESTS();
  joined()->group().barrier().wait();
  joined().reset();
  return code;
}

}  // namespace

const World& world() {
  return *joined();
}

}  // namespace shoal::test

namespace {

int run(int argc, char** argv) {
  std::vector<std::string> command(argv, argv + argc);
  int ranks = 1;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::strcmp(argv[i], "--ranks") == 0)
      std::from_chars(argv[i + 1], argv[i + 1] + std::strlen(argv[i + 1]), ranks);
  }
  const auto run_tests = [&] {
    ::testing::InitGoogleTest(&argc, argv);
    shoal::test::leave_out_half();
    return shoal::test::run_rank(command);
  };
  try {
    const auto environment = shoal::process_environment();
    if (!environment("RANK") && !environment("OMPI_COMM_WORLD_RANK") && !environment("PMI_RANK")) {
#ifdef SHOAL_SANITIZED  // TSan does not follow a fork of a process with threads
      return shoal::launch({.ranks = ranks, .command = command, .threads = 1});
#else
      return shoal::launch({.ranks = ranks, .body = run_tests, .threads = 1});
#endif
    }
    return run_tests();
  } catch (const std::exception& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  shoal::end_process(run(argc, argv));
}
