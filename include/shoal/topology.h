#pragma once
// Who averages with whom in decentralised training, and with what weights.
//
// A topology of n ranks is a sequence of rounds that repeats. A round is an n x n matrix W, mostly zeros:
//   x_i <- W_ii x_i + sum over i's sources j of W_ij x_j.
// The names and graphs of decent-dp ("complete", "ring", "one-peer-exp", "alternating-exp-ring") mean here what they
// mean there; docs/topologies.md describes all of them.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

class Group;

// What a topology may have at most: proofs and reports work with matrices of ranks x ranks.
constexpr int max_topology_ranks = 4096;
constexpr int64_t max_topology_rounds = 65536;
constexpr int64_t max_topology_edges = int64_t{1} << 24;  // of all rounds together; a link is two

// W_ij, seen from rank i: it takes the values of `rank` = j times `weight`.
struct Neighbour {
  int rank = 0;
  double weight = 0;

  bool operator==(const Neighbour&) const = default;
};

// Rank `to` takes the values of rank `from` times `weight`.
struct Edge {
  int from = 0;
  int to = 0;
  double weight = 0;
};

// Which sums of W are 1 in every round.
enum class Stochastic {
  doubly,  // rows and columns: the mean over ranks stays what it is
  row,     // the weights into a rank: ranks come to agree, on a mean with unequal weights
  column   // the weights out of a rank: the sum stays what it is; for push-sum (Kempe, Dobra and Gehrke 2003)
};

// "doubly", "row", "column": as in topology files.
std::string to_string(Stochastic kind);

// A round as its author writes it down: groups, links or edges.
struct RoundSpec {
  // Every rank is in exactly one group, alone if it idles. A rank keeps its own values times `weight` (default: 1 /
  // size of the group) and takes those of the group's other ranks, which share the rest equally.
  std::vector<std::vector<int>> groups{};
  std::optional<double> weight{};

  // Undirected, each once. The weights are Metropolis's, 1 / (1 + the larger number of links of the two ranks), which
  // are doubly stochastic on any graph (Xiao, Boyd and Kim 2007).
  std::vector<std::pair<int, int>> links{};

  // Directed, each once, with weights in (0, 1]. `self` has W_ii of every rank; without it a rank keeps what its edges
  // leave to 1: those into it, for Stochastic::column those out of it.
  std::vector<Edge> edges{};
  std::vector<double> self{};

  // With links or edges: the ranks that have none. All others must have one.
  std::vector<int> idle{};
};

// One round's matrix, proven. Immutable.
class MixingRound {
 public:
  // `where` begins the message of a UsageError, which names the rank or the edge at fault: an edge that is repeated,
  // leads from a rank to itself or out of 0 .. size - 1, or has a weight outside (0, 1]; a rank that is left out, is in
  // two groups, or whose weights do not sum to 1 within 1e-9 as `kind` says. W_ii becomes what the others leave to 1,
  // so that sums are 1 to rounding.
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

// How fast and at what price the ranks come to agree. With T rounds W_0 .. W_(T-1), P = W_(T-1) ... W_0, J the matrix
// of ones: D_k = (I - J/n) W_(k-1) ... W_0 (I - J/n) is what k steps leave of the differences between ranks. For
// push-sum, of those between its numerators.
struct TopologyReport {
  // A period leaves at most this of the differences. Doubly stochastic: the second largest singular value of P, that is
  // the largest of P - J/n. Else the second largest modulus of P's eigenvalues: in one period differences may grow.
  double period_contraction = 0;
  double spectral_gap = 1;  // 1 - period_contraction

  // What a step leaves after many periods: the T-th root of the second largest modulus of P's eigenvalues.
  double step_contraction = 0;
  // Steps from round 0 until the consensus distance is a thousandth: ||D_k||_F <= 1e-3 ||D_0||_F, the root mean square
  // over starts in which ranks are independent. None beyond 2^40 periods.
  std::optional<int64_t> steps_to_thousandth;
  // Steps from round 0 after which all ranks have the same, whatever the start, but for rounding; for doubly stochastic
  // rounds it is the mean. None where it takes more than two periods and a hundred steps.
  std::optional<int64_t> exact_after;
  // ||D_k||_F / ||D_0||_F for k = 0, 1, ..: until it is a thousandth, at most a hundred steps.
  std::vector<double> distance;

  // What a rank sends in a step, point to point, as multiples of the bytes of its parameters, which is also the number
  // of messages per bucket: mean over ranks and rounds, and the most of one rank in one round.
  double mean_sent = 0;
  int most_sent = 0;
};

// What make_topology makes a topology for.
struct TopologyRequest {
  int size = 1;              // ranks
  std::vector<int> hosts{};  // ranks of each host, in rank order, size together; none: one each
  uint64_t seed = 0;         // equal on all ranks
};

// Threads: immutable, may be shared. Not collective: every rank makes the same one, agree() below checks that.
class Topology {
 public:
  // Throws UsageError beyond the limits above, as MixingRound does, naming the topology and the round, and when some
  // rank's values would never reach some other rank (the edges of all rounds together must be strongly connected; where ranks keep nothing of
  // their own, values must also mix and not just move).
  Topology(std::string name, int size, Stochastic kind, const std::vector<RoundSpec>& rounds);

  int size() const { return size_; }
  const std::string& name() const { return name_; }
  Stochastic kind() const { return kind_; }
  int64_t period() const { return static_cast<int64_t>(rounds_->size()); }  // rounds
  // Round index modulo period. UsageError below 0.
  const MixingRound& round(int64_t index) const;

  // The topology of the ranks that are left, renumbered in order. One that make_topology has made is made again for
  // fewer ranks, on the hosts that they are on, if its factory can. Else lost weights go to the remaining rank's own
  // weight; a doubly stochastic round that is directed at a lost rank stays doubly stochastic by joining that rank's
  // sources to its targets (the stochastic complement, Meyer 1989). UsageError when a rank is out of range or repeated,
  // nobody is left, or the remaining ranks are not connected.
  Topology without(const std::vector<int>& ranks) const;

  // Computes with dense n x n matrices: milliseconds for tens of ranks, seconds for hundreds. UsageError above 1024
  // ranks, and where ranks x ranks x rounds is more than 2^30.
  TopologyReport report() const;
  double spectral_gap() const { return report().spectral_gap; }

  // "ring, 4 ranks, doubly stochastic, 2 rounds, 1c92a3f00b7d5e64": the last is a hash of all weights' bits.
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

// Names a topology of one's own; make_topology then gives it `name`. UsageError for a name that is taken. Thread-safe.
// Call it on every rank.
void register_topology(const std::string& name, TopologyFactory factory, const std::string& summary = "");

// The names that make_topology knows and what they are, in the order of a help text.
std::vector<std::pair<std::string, std::string>> known_topologies();

// By name, for `size` ranks on hosts of `local_size` each. UsageError, listing the names, for an unknown one; when size
// is no multiple of local_size; and when a registered factory refuses. All built-in ones exist for every size >= 1.
Topology make_topology(const std::string& name, int size, int local_size = 1, uint64_t seed = 0);
Topology make_topology(const std::string& name, const TopologyRequest& request);

// From a JSON file (docs/topologies.md):
//
//   {"ranks": 4,
//    "kind": "doubly",                                   // doubly (default), row, column
//    "rounds": [                                         // of each, one of
//      {"groups": [[0, 1], [2, 3]], "weight": 0.5},      // RoundSpec::groups; weight may be left out
//      {"links": [[0, 2], [1, 3]]},                      // RoundSpec::links
//      {"edges": [[0, 1, 0.5], [1, 0, 0.5]],             // from, to, weight
//       "self": [0.5, 0.5, 1, 1], "idle": [2, 3]}]}      // self may be left out; idle as in RoundSpec, also with links
//
// Its name is the file's without folder and extension. UsageError that names the file and what is wrong in it; a file may
// have 16 MiB.
Topology read_topology(const std::string& path);

// Returns when all ranks of the group have the same topology, of the group's size; throws DisagreeError on every rank
// that names the first round that differs (against rank 0) and both ranks, UsageError on every rank for another size.
// Collective.
void agree(const Group& group, const Topology& topology);

}  // namespace shoal
