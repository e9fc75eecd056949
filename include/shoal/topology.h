#pragma once
// Topology: the neighbours and weights with which ranks average in decentralised training.
//
// A topology of n ranks is a periodic sequence of rounds. A round is a sparse n x n matrix W:
//   x_i <- W_ii x_i + sum over i's sources j of W_ij x_j.
// Names and graphs of decent-dp ("complete", "ring", "one-peer-exp", "alternating-exp-ring") have the same meaning
// here; docs/topologies.md describes all topologies.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

class Group;

// Limits of a topology; checks and reports use dense matrices of ranks x ranks.
constexpr int max_topology_ranks = 4096;
constexpr int64_t max_topology_rounds = 65536;
constexpr int64_t max_topology_edges = int64_t{1} << 24;  // of all rounds together; a link counts as two

// Entry W_ij as seen from rank i: the weight of the values of rank j = `rank`.
struct Neighbour {
  int rank = 0;
  double weight = 0;

  bool operator==(const Neighbour&) const = default;
};

// Directed edge: rank `to` adds the values of rank `from` times `weight`.
struct Edge {
  int from = 0;
  int to = 0;
  double weight = 0;
};

// Normalisation of W: the sums that are 1 in every round.
enum class Stochastic {
  doubly,  // rows and columns: the mean over ranks is preserved
  row,     // rows (weights into a rank): ranks reach consensus on a weighted mean
  column   // columns (weights out of a rank): the sum is preserved; for push-sum (Kempe, Dobra and Gehrke 2003)
};

// Returns "doubly", "row" or "column", as in topology files.
std::string to_string(Stochastic kind);

// Specification of a round: groups, links or edges.
struct RoundSpec {
  // Groups: every rank is in exactly one, alone if it idles. A rank keeps its own values times `weight` (default: 1 /
  // size of the group); the other ranks of the group share the rest equally.
  std::vector<std::vector<int>> groups{};
  std::optional<double> weight{};

  // Undirected links, each listed once, with Metropolis weights 1 / (1 + the larger degree of the two ranks), which are
  // doubly stochastic on any graph (Xiao, Boyd and Kim 2007).
  std::vector<std::pair<int, int>> links{};

  // Directed edges, each listed once, with weights in (0, 1]. `self` gives W_ii of every rank. Without it, W_ii is what
  // the edges leave to 1: the edges into the rank, or for Stochastic::column the edges out of it.
  std::vector<Edge> edges{};
  std::vector<double> self{};

  // Ranks without links or edges. All other ranks must have at least one.
  std::vector<int> idle{};
};

// Validated matrix of one round. Immutable.
class MixingRound {
 public:
  // Throws UsageError, whose message begins with `where` and names the rank or edge: for an edge that is repeated,
  // connects a rank with itself, leaves 0 .. size - 1, or has a weight outside (0, 1]; for a rank that is missing, is
  // in two groups, or whose weights do not sum to 1 within 1e-9 as `kind` requires. W_ii is set to what the other
  // weights leave to 1.
  MixingRound(const RoundSpec& spec, int size, Stochastic kind, const std::string& where);

  int size() const { return static_cast<int>(self_.size()); }
  double self(int rank) const { return self_.at(rank); }                               // W_ii
  const std::vector<Neighbour>& sources(int rank) const { return sources_.at(rank); }  // ascending
  const std::vector<int>& targets(int rank) const { return targets_.at(rank); }        // ascending
  bool idle(int rank) const { return sources(rank).empty() && targets(rank).empty(); }

 private:
  std::vector<double> self_;
  std::vector<std::vector<Neighbour>> sources_;
  std::vector<std::vector<int>> targets_;
};

// Convergence and cost of a topology. For T rounds W_0 .. W_(T-1), let P = W_(T-1) ... W_0, J the matrix of ones, and
// D_k = (I - J/n) W_(k-1) ... W_0 (I - J/n), the remaining differences between ranks after k steps. For push-sum, the
// differences between its numerators.
struct TopologyReport {
  // Upper bound of the factor by which one period reduces the differences. Doubly stochastic: the second largest
  // singular value of P, that is the largest of P - J/n. Otherwise: the second largest modulus of P's eigenvalues; a
  // single period may then increase the differences.
  double period_contraction = 0;
  double spectral_gap = 1;  // 1 - period_contraction

  // Asymptotic factor per step: the T-th root of the second largest modulus of P's eigenvalues.
  double step_contraction = 0;
  // Number of steps from round 0 until the consensus distance is a thousandth: ||D_k||_F <= 1e-3 ||D_0||_F, the root
  // mean square over independent initial values. None if it exceeds 2^40 periods.
  std::optional<int64_t> steps_to_thousandth;
  // Number of steps from round 0 after which all ranks have equal values up to rounding, for any initial values; for
  // doubly stochastic rounds this is the mean. None if it exceeds two periods and a hundred steps.
  std::optional<int64_t> exact_after;
  // ||D_k||_F / ||D_0||_F for k = 0, 1, ..., until it is a thousandth; at most a hundred steps.
  std::vector<double> distance;

  // Point-to-point data that a rank sends per step, as a multiple of the size of its parameters, which is also the
  // number of messages per bucket: mean over ranks and rounds, and maximum of one rank in one round.
  double mean_sent = 0;
  int most_sent = 0;
};

// Arguments of make_topology.
struct TopologyRequest {
  int size = 1;              // ranks
  std::vector<int> hosts{};  // number of ranks on each host, in rank order, which sum to size; empty: one rank per host
  uint64_t seed = 0;         // equal on all ranks
};

// Validated sequence of rounds. Immutable, so it may be shared between threads. Not collective: every rank creates the
// same topology; agree() below compares them.
class Topology {
 public:
  // Throws UsageError beyond the limits above; as MixingRound, with the topology and the round in the message; and if
  // the values of some rank never reach some other rank. The edges of all rounds together must be strongly connected,
  // and if ranks keep nothing of their own values, the values must mix and not only move.
  Topology(std::string name, int size, Stochastic kind, const std::vector<RoundSpec>& rounds);

  int size() const { return size_; }
  const std::string& name() const { return name_; }
  Stochastic kind() const { return kind_; }
  int64_t period() const { return static_cast<int64_t>(rounds_->size()); }  // rounds
  // Round `index` modulo period. Throws UsageError for a negative index.
  const MixingRound& round(int64_t index) const;

  // Topology of the remaining ranks, renumbered in order. A topology of make_topology is created again for fewer ranks
  // on their hosts, if its factory supports that. Otherwise lost weights are added to the remaining rank's own weight;
  // a directed doubly stochastic round remains doubly stochastic by connecting the lost rank's sources to its targets
  // (stochastic complement, Meyer 1989). Throws UsageError if a rank is out of range or repeated, no rank remains, or
  // the remaining ranks are not connected.
  Topology without(const std::vector<int>& ranks) const;

  // Report computed with dense n x n matrices: milliseconds for tens of ranks, seconds for hundreds. Throws UsageError
  // above 1024 ranks, or if ranks x ranks x rounds exceeds 2^30.
  TopologyReport report() const;
  double spectral_gap() const { return report().spectral_gap; }

  // Summary with a hash of all weights' bits: "ring, 4 ranks, doubly stochastic, 2 rounds, 1c92a3f00b7d5e64".
  std::string fingerprint() const;

 private:
  friend Topology make_topology(const std::string& name, const TopologyRequest& request);

  std::string name_;
  int size_;
  Stochastic kind_;
  std::shared_ptr<const std::vector<MixingRound>> rounds_;
  std::optional<TopologyRequest> request_;  // of make_topology
};

using TopologyFactory = std::function<Topology(const TopologyRequest& request)>;

// Registers a topology; make_topology(name) then uses the factory. Call it on every rank. Throws UsageError for a name
// that is taken. Thread-safe.
void register_topology(const std::string& name, TopologyFactory factory, const std::string& summary = "");

// Names known to make_topology with their summaries, in the order of a help text.
std::vector<std::pair<std::string, std::string>> known_topologies();

// Creates a topology by name for `size` ranks on hosts of `local_size` ranks each. Throws UsageError, with a list of
// names, for an unknown name; if size is not a multiple of local_size; and if a registered factory throws. All built-in
// topologies exist for every size >= 1.
Topology make_topology(const std::string& name, int size, int local_size = 1, uint64_t seed = 0);
Topology make_topology(const std::string& name, const TopologyRequest& request);

// Reads a topology from a JSON file (docs/topologies.md):
//
//   {"ranks": 4,
//    "kind": "doubly",                                   // doubly (default), row, column
//    "rounds": [                                         // of each, one of
//      {"groups": [[0, 1], [2, 3]], "weight": 0.5},      // RoundSpec::groups; weight is optional
//      {"links": [[0, 2], [1, 3]]},                      // RoundSpec::links
//      {"edges": [[0, 1, 0.5], [1, 0, 0.5]],             // from, to, weight
//       "self": [0.5, 0.5, 1, 1], "idle": [2, 3]}]}      // self is optional; idle as in RoundSpec, also with links
//
// Its name is the file name without folder and extension. Throws UsageError, which names the file and the fault in it,
// also for files above 16 MiB.
Topology read_topology(const std::string& path);

// Checks that all ranks of the group have the same topology, of the group's size. Otherwise throws on every rank:
// DisagreeError, which names the first round that differs from rank 0 and both ranks; UsageError for another size.
// Collective.
void agree(const Group& group, const Topology& topology);

}  // namespace shoal
