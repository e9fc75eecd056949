// BEY02, BEY10: every behaviour under every strategy equals one process on the whole batch, or is refused on every rank
// as the strategy declares. Tests are STRATEGY.BEHAVIOUR; those in pending.txt are disabled.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <set>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/store_gather.h"
#include "shoal/error.h"
#include "tests/conformance/behaviours.h"
#include "tests/conformance/strategy.h"
#include "tests/support/variants.h"
#include "tests/support/world.h"

namespace shoal::test {
namespace {

struct Outcome {
  enum Kind { equal, different, refused, lacking, failed };
  Kind kind = equal;
  std::string text{};
};

const char* word(Outcome::Kind kind) {
  constexpr const char* words[] = {"was as in one process", "differed", "was refused", "could not be written",
                                   "failed"};
  return words[kind];
}

template <class Act>
Outcome outcome_of(const Act& act) {
  try {
    return act();
  } catch (const Lacks& lacks) {
    return {Outcome::lacking, lacks.what()};
  } catch (const RefusedElsewhere&) {
    return {Outcome::refused, ""};
  } catch (const UsageError& error) {
    return {Outcome::refused, error.what()};
  } catch (const DisagreeError& error) {
    return {Outcome::refused, error.what()};
  } catch (const std::exception& error) {
    return {Outcome::failed, std::string(error.what()).substr(0, 600)};
  }
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += (text.empty() ? "" : "; ") + line;
  return text;
}

// Group for behaviours, shared by all of them until one breaks it. Synchronisation between behaviours uses the store,
// which cannot break.
class Grounds {
 public:
  const Group& group() {
    if (!group_) {
      std::vector<int> ranks;
      for (int rank = 0; rank < world().size(); ++rank) ranks.push_back(rank);
      group_.emplace(world().group().subgroup(ranks));
    }
    return *group_;
  }
  void spoiled() { group_.reset(); }

  // Outcomes of all ranks.
  std::vector<Outcome> exchange(const Outcome& own) {
    if (world().size() == 1) return {own};
    const auto& state = *state_of(world().group());
    std::vector<Outcome> all;
    for (const auto& line :
         store_gather(*state.world, fmt::format("conformance/{}", count_++), state.world_ranks, world().rank(),
                      fmt::format("{}{}", static_cast<int>(own.kind), own.text), state.world->rendezvous_limit())) {
      all.push_back({static_cast<Outcome::Kind>(line.at(0) - '0'), line.substr(1)});
    }
    return all;
  }

  // Folder that the ranks of this run share.
  std::filesystem::path folder() const {
    return std::filesystem::temp_directory_path() / fmt::format("shoal-conformance-{}-{}", getppid(), count_);
  }

 private:
  std::optional<Group> group_;
  int count_ = 0;
};

Grounds& grounds() {
  static Grounds one;
  return one;
}

// Observations of one process; cached, because all strategies with the same parts share them.
const std::vector<Observation>& expected_of(const Behaviour& behaviour, int parts,
                                            const std::filesystem::path& folder) {
  static std::map<std::pair<std::string, int>, std::vector<Observation>> known;
  const auto key = std::pair(behaviour.name, parts);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  const auto own = folder / fmt::format("one-process-{}", world().rank());
  std::filesystem::create_directories(own);
  Bench bench(one_process(), grounds().group(), own, parts, nullptr);
  try {
    behaviour.body(bench);
  } catch (const std::exception& error) {
    throw std::logic_error(fmt::format("in one process: {}", error.what()));
  }
  if (!bench.differences().empty()) throw std::logic_error("in one process: " + joined(bench.differences()));
  return known[key] = bench.observed();
}

Outcome run(const Strategy& strategy, const Behaviour& behaviour, const std::filesystem::path& folder) {
  return outcome_of([&]() -> Outcome {
    const int parts = strategy.part(grounds().group()).of;
    const auto& expected = expected_of(behaviour, parts, folder);
    const auto shared = folder / "ranks";
    std::filesystem::create_directories(shared);
    Bench bench(strategy, grounds().group(), shared, parts, &expected);
    behaviour.body(bench);
    if (bench.observed().size() < expected.size()) bench.check(false, "one process observed more");
    if (bench.differences().empty()) return {};
    return {Outcome::different, joined(bench.differences())};
  });
}

// Whether ranks communicate over a network instead of shared memory.
bool on_network() {
  return world().size() > 1 && grounds().group().transport() != "host";
}

// The exception that the strategy declares for this number of ranks and transport; nullptr: none.
const Exception* declared(const Strategy& strategy, const Behaviour& behaviour) {
  const Exception* found = nullptr;
  const auto [begin, end] = strategy.exceptions.equal_range(behaviour.name);
  for (auto each = begin; each != end; ++each) {
    const auto& exception = each->second;
    if (exception.from_ranks > world().size()) continue;
    if (exception.where >= Exception::on_network && !on_network()) continue;
    if (exception.where == Exception::on_network_in_pairs && ranks_per_host(world().group()) == 1) continue;
    if (found == nullptr || exception.from_ranks > found->from_ranks) found = &exception;
  }
  return found;
}

// Reports faults of this rank's outcome.
void judge(const Exception* expected, const Outcome& outcome) {
  const auto report = fmt::format("rank {} {}: {}", world().rank(), word(outcome.kind), outcome.text);
  if (expected == nullptr) {
    EXPECT_EQ(outcome.kind, Outcome::equal) << report;
    return;
  }
  if (world().size() == 1 && outcome.kind == Outcome::equal) return;
  if (outcome.kind == Outcome::refused && outcome.text.empty()) return;  // another rank says how
  constexpr Outcome::Kind kinds[] = {Outcome::refused, Outcome::failed, Outcome::different, Outcome::lacking};
  EXPECT_EQ(outcome.kind, kinds[expected->kind]) << report << "\ndeclared: " << joined(expected->text);
  if (outcome.kind != kinds[expected->kind] || expected->kind == Exception::differs || outcome.text.empty()) return;
  for (const auto& part : expected->text) {
    EXPECT_NE(outcome.text.find(part), std::string::npos) << "the error does not say '" << part << "'; " << report;
  }
}

class Conformance : public testing::Test {
 public:
  // pending_on_network: known to be wrong where ranks do not share memory.
  Conformance(const Strategy& strategy, const Behaviour& behaviour, bool pending_on_network)
      : strategy_(strategy), behaviour_(behaviour), pending_on_network_(pending_on_network) {}

  void TestBody() override {
    const auto* exception = declared(strategy_, behaviour_);
    if (on_network() && pending_on_network_) GTEST_SKIP() << "pending where ranks do not share memory";
    const auto folder = grounds().folder();
    const auto own = run(strategy_, behaviour_, folder);
    const auto all = grounds().exchange(own);
    if (world().rank() == 0) std::filesystem::remove_all(folder);
    if (std::any_of(all.begin(), all.end(), [](const Outcome& one) { return one.kind != Outcome::equal; })) {
      grounds().spoiled();
    }
    judge(exception, own);
  }

 private:
  const Strategy& strategy_;
  const Behaviour& behaviour_;
  bool pending_on_network_;
};

// Known faults, as STRATEGY.BEHAVIOUR or STRATEGY.BEHAVIOUR@network.
std::set<std::string> pending() {
  std::ifstream file(PENDING);
  std::set<std::string> names;
  for (std::string line; std::getline(file, line);) {
    line = line.substr(0, line.find(' '));
    if (!line.empty() && line[0] != '#') names.insert(line);
  }
  return names;
}

bool register_all() {
  const auto waiting = pending();
  for (const auto& strategy : strategies()) {
    for (const auto& behaviour : behaviours()) {
      const auto place = strategy.name + "." + behaviour.name;
      const auto name = (waiting.count(place) > 0 ? "DISABLED_" : "") + behaviour.name;
      const bool waits_on_network = waiting.count(place + "@network") > 0;
      testing::RegisterTest(strategy.name.c_str(), name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                            [&strategy, &behaviour, waits_on_network]() -> Conformance* {
                              return new Conformance(strategy, behaviour, waits_on_network);
                            });
    }
  }
  return true;
}
const bool registered = register_all();

// Behaviours that the last cell of a table's row names, as `name`.
std::vector<std::string> named_in(std::string row) {
  row = row.substr(0, row.find_last_of('|'));
  row = row.substr(row.find_last_of('|') + 1);
  std::vector<std::string> names;
  for (size_t at = row.find('`'); at != std::string::npos; at = row.find('`', at)) {
    const size_t end = row.find('`', at + 1);
    names.push_back(row.substr(at + 1, end - at - 1));
    at = end + 1;
  }
  return names;
}

TEST(BehaviourRegistry, every_line_of_the_page_is_a_behaviour) {
  std::set<std::string> names;
  for (const auto& behaviour : behaviours()) names.insert(behaviour.name);
  std::ifstream page(YOUR_LOOP);
  ASSERT_TRUE(page) << YOUR_LOOP;
  int rows = 0;
  for (std::string line; std::getline(page, line);) {
    if (!line.starts_with("| ") || line.starts_with("| your loop") || line.starts_with("| ---")) continue;
    ++rows;
    const auto named = named_in(line);
    EXPECT_FALSE(named.empty()) << "no behaviour stands behind: " << line;
    for (const auto& name : named) EXPECT_TRUE(names.count(name)) << "no behaviour " << name << " in: " << line;
  }
  EXPECT_GE(rows, 30);
}

// A strategy that shoal::make_training() knows is held to every behaviour, and what is declared here is one of those.
TEST(BehaviourRegistry, strategies_are_those_of_the_library) {
  std::set<std::string> declared{"none", "local"};  // one_process() is the one, ranks of the other share nothing
  for (const auto& strategy : strategies()) declared.insert(variant(strategy.name, world().group()).strategy);
  const auto names = strategy_names();
  EXPECT_EQ(declared, std::set<std::string>(names.begin(), names.end()));
}

TEST(BehaviourRegistry, names_are_those_of_behaviours) {
  std::set<std::string> names;
  for (const auto& behaviour : behaviours()) {
    EXPECT_TRUE(names.insert(behaviour.name).second) << behaviour.name << " is there twice";
  }
  for (const auto& strategy : strategies()) {
    for (const auto& [name, exception] : strategy.exceptions) {
      EXPECT_TRUE(names.count(name)) << strategy.name << ": " << name;
      EXPECT_FALSE(exception.text.empty()) << strategy.name << ": " << name;
    }
  }
  EXPECT_GE(names.size(), 120u);
  fmt::print("{} behaviours, {} strategies\n", names.size(), strategies().size());
}

}  // namespace
}  // namespace shoal::test
