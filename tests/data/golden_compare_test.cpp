// Comparison with golden files: it finds differences, and none in equal runs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/golden/compare.h"

namespace shoal::golden {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Report that `shoal train --json` would write for a golden run.
json report_of(const json& reference, const std::string& peer) {
  const json& run = reference.at("peers").at(peer);
  json report{{"loss", run.at("loss")}, {"params", json::object()}, {"buffers", json::object()}};
  for (const std::string kind : {"params", "buffers"}) {
    const json digests = run.value(kind, json::object());
    for (const auto& [name, digest] : digests.items()) {
      report[kind][name] = {{"sum", digest[0]}, {"abs_sum", digest[1]}, {"l2", digest[2]}, {"probe", digest[3]}};
      if (reference.at("shapes").contains(name)) report[kind][name]["shape"] = reference.at("shapes").at(name);
    }
  }
  return report;
}

class GoldenCompare : public testing::Test {
 protected:
  std::vector<std::string> differences() const { return compare(report_, reference_, "single"); }

  const json reference_ = load(SHOAL_GOLDEN_FOLDER "/cnn_adamw_w3.json");
  json report_ = report_of(reference_, "single");
};

TEST_F(GoldenCompare, finds_nothing_in_an_equal_run) {
  EXPECT_THAT(differences(), IsEmpty());
}

TEST_F(GoldenCompare, accepts_what_lies_within_the_tolerance) {
  report_["loss"][3] = report_["loss"][3].get<double>() * (1 + 5e-6);
  report_["params"]["fc.weight"]["sum"] = report_["params"]["fc.weight"]["sum"].get<double>() +
                                          5e-6 * report_["params"]["fc.weight"]["abs_sum"].get<double>();
  EXPECT_THAT(differences(), IsEmpty());
}

TEST_F(GoldenCompare, allows_adam_more_than_sgd) {
  auto reference = reference_;
  auto& sum = report_["params"]["fc.weight"]["sum"];
  sum = sum.get<double>() + 2e-5 * report_["params"]["fc.weight"]["abs_sum"].get<double>();
  EXPECT_THAT(compare(report_, reference, "single"), IsEmpty());
  reference["config"]["optimizer"] = "sgd_momentum";
  EXPECT_THAT(compare(report_, reference, "single"), ElementsAre(HasSubstr("parameter fc.weight sum")));
}

TEST_F(GoldenCompare, names_a_loss) {
  report_["loss"][3] = report_["loss"][3].get<double>() * (1 + 2e-5);
  EXPECT_THAT(differences(), ElementsAre(HasSubstr("loss of step 3")));
  report_["loss"][3] = NAN;
  EXPECT_THAT(differences(), ElementsAre(HasSubstr("loss of step 3")));
  report_["loss"].erase(3);
  EXPECT_THAT(differences(), ElementsAre("9 losses instead of 10"));
}

TEST_F(GoldenCompare, names_a_figure_of_a_tensor) {
  report_["params"]["fc.weight"]["probe"] = 0.5;
  report_["buffers"]["stage1.bn.running_mean"]["l2"] = 0.5;
  EXPECT_THAT(differences(),
              ElementsAre(HasSubstr("parameter fc.weight probe"), HasSubstr("buffer stage1.bn.running_mean l2")));
}

TEST_F(GoldenCompare, names_a_shape) {
  report_["params"]["fc.weight"]["shape"] = {784, 10};
  EXPECT_THAT(differences(), ElementsAre("parameter fc.weight: shape [784,10] instead of [10,784]"));
}

TEST_F(GoldenCompare, names_a_missing_or_superfluous_tensor) {
  report_["params"]["fc.extra"] = report_["params"]["fc.bias"];
  report_["params"].erase("fc.bias");
  report_.erase("buffers");
  EXPECT_THAT(differences(),
              testing::IsSupersetOf({"parameter fc.extra is not in the reference run", "parameter fc.bias is missing",
                                     "buffer stage2.bn.num_batches_tracked is missing"}));
}

// Every file has its peers' runs, which agree with each other within the tolerance for shoal's runs.
TEST(GoldenFiles, agree_among_themselves) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(SHOAL_GOLDEN_FOLDER)) {
    if (entry.path().extension() != ".json") continue;
    SCOPED_TRACE(entry.path().filename().string());
    const auto reference = load(entry.path());
    for (const auto& [peer, run] : reference.at("peers").items()) {
      EXPECT_THAT(compare(report_of(reference, peer), reference, "single"), IsEmpty()) << peer;
    }
    ++files;
  }
  EXPECT_EQ(files, 30u);
}

}  // namespace
}  // namespace shoal::golden
