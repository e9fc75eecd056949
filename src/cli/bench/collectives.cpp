#include "cli/bench/collectives.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <optional>

#include "cli/bench/samples.h"
#include "comm/rendezvous/launch_environment.h"
#include "comm/transport/transport.h"
#include "planning/bytes_over_tcp.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"
#include "shoal/progress.h"
#include "shoal/world.h"

namespace shoal::cli {
namespace {

using Worlds = std::vector<std::pair<std::string, World>>;  // by transport, in the requested order

const std::map<std::string, c10::ScalarType>& known_dtypes() {
  static const std::map<std::string, c10::ScalarType> map{
      {"float64", c10::ScalarType::Double},    {"float32", c10::ScalarType::Float}, {"float16", c10::ScalarType::Half},
      {"bfloat16", c10::ScalarType::BFloat16}, {"int64", c10::ScalarType::Long},    {"int32", c10::ScalarType::Int}};
  return map;
}

const std::vector<std::string>& known_ops() {
  static const std::vector<std::string> ops{"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                            "reduce",     "all_to_all",     "send_recv",  "barrier"};
  return ops;
}

const std::vector<std::string>& known_buffers() {
  static const std::vector<std::string> buffers{"shared", "once", "staged"};
  return buffers;
}

// Whether an operation can be measured in this kind of memory over a transport.
bool fits(const std::string& buffers, const std::string& op, const std::string& transport) {
  if (op == "barrier") return false;
  if (buffers == "staged") return true;
  return transport == "host" && (buffers != "once" || op == "all_gather");  // other transports copy in any case
}

// Elements of the full tensor: at least one, and for an operation that divides it equally many for each rank.
int64_t elements_of(const std::string& op, const std::string& dtype, int64_t bytes, int64_t ranks) {
  if (op == "barrier") return 0;
  const bool divides = op == "reduce_scatter" || op == "all_gather" || op == "all_to_all";
  const int64_t parts = divides ? ranks : 1;
  const auto of_one = static_cast<int64_t>(c10::elementSize(known_dtypes().at(dtype)));
  return std::max<int64_t>(1, bytes / of_one / parts) * parts;
}

// Case of the bench: an operation on tensors of one size and dtype, in one kind of memory, over one transport.
class Case {
 public:
  Case(std::string op, std::string dtype, int64_t bytes, std::string transport, std::string buffers, const Group& group)
      : op_(std::move(op)),
        dtype_(std::move(dtype)),
        numel_(elements_of(op_, dtype_, bytes, group.size())),
        bytes_(numel_ > 0 ? numel_ * static_cast<int64_t>(c10::elementSize(known_dtypes().at(dtype_))) : 0),
        transport_(std::move(transport)),
        buffers_(std::move(buffers)),
        group_(group) {}

  // Collective. The tensors exist during one measurement only, so that many large cases fit into memory.
  void measure(const Group& clock) {
    allocate();
    constexpr int64_t small = 64 << 10;
    const bool is_short = bytes_ <= small;
    const int repeat = is_short || once_ ? 50 : 1;  // a gather that moves no data is short at any size
    run();                                          // warms up pages, staging buffers and connections
    const auto wire = bytes_over_tcp();             // before any rank can send what is measured
    clock.barrier().wait();
    const auto start = Clock::now();
    for (int i = 0; i < repeat; ++i) run();
    const std::chrono::duration<double, std::micro> time = Clock::now() - start;
    auto received = at::full({1}, bytes_over_tcp() - wire, at::kLong);
    clock.barrier().wait();
    clock.all_reduce(received).wait();
    wire_bytes_ = received.item<int64_t>() / repeat;
    auto slowest = at::full({1}, time.count() / repeat, at::kDouble);
    clock.all_reduce(slowest, ReduceOp::max).wait();
    times_.values.push_back(slowest.item<double>());
    if (group_.rank() == 0 && bytes_ > 0) copy(is_short ? repeat : 1);
    clock.barrier().wait();
    full_ = part_ = received_ = at::Tensor();
    once_.reset();
  }

  nlohmann::ordered_json json() const {
    nlohmann::ordered_json entry{
        {"op", op_},          {"dtype", dtype_}, {"bytes", bytes_}, {"ranks", group_.size()}, {"transport", transport_},
        {"buffers", buffers_}};
    entry.update(json_of(times_, "us"));
    entry["rounds"] = times_.values.size();
    if (!copies_.values.empty()) entry["memcpy_us"] = copies_.median();
    entry["wire_bytes"] = wire_bytes_;
    return entry;
  }

 private:
  void run() {
    const auto size = group_.size();
    if (once_) {
      once_->publish(++version_);
      once_->wait_published(version_);  // waits for all parts
      return;
    }
    if (op_ == "all_reduce") group_.all_reduce(full_).wait();
    if (op_ == "reduce") group_.reduce(full_, 0).wait();
    if (op_ == "reduce_scatter") group_.reduce_scatter(part_, full_).wait();
    // In place, as a sharded optimizer gathers: this rank's part is already at its place in the output.
    if (op_ == "all_gather") group_.all_gather(full_, own_part()).wait();
    if (op_ == "broadcast") group_.broadcast(full_, 0).wait();
    if (op_ == "all_to_all") group_.all_to_all(received_, full_).wait();
    if (op_ == "barrier") group_.barrier().wait();
    if (op_ == "send_recv") {
      auto sent = group_.send(full_, (group_.rank() + 1) % size);
      group_.recv(received_, (group_.rank() + size - 1) % size).wait();
      sent.wait();
    }
  }

  at::Tensor own_part() const { return full_.narrow(0, group_.rank() * part_.numel(), part_.numel()); }

  void allocate() {
    if (numel_ == 0) return;
    const auto options = at::TensorOptions(known_dtypes().at(dtype_));
    const int64_t size = group_.size();
    const auto part = numel_ / size;
    if (buffers_ == "once") {
      std::vector<Range> owners;
      for (int64_t rank = 0; rank < size; ++rank) owners.push_back({rank * part, (rank + 1) * part});
      once_ = group_.allocate_host_shared(numel_, options, owners);
      once_->own().fill_(1);
      full_ = once_->tensor();
      return;
    }
    const auto make = [&](int64_t count) {
      return buffers_ == "shared" ? group_.allocate(count, options).fill_(1) : at::ones({count}, options);
    };
    full_ = make(numel_);
    if (op_ == "reduce_scatter" || op_ == "all_gather") part_ = make(part);
    if (op_ == "all_to_all" || op_ == "send_recv") received_ = make(numel_);
  }

  void copy(int repeat) {
    const auto source = at::ones({full_.numel()}, full_.options());
    auto target = at::ones_like(source);
    const auto start = Clock::now();
    for (int i = 0; i < repeat; ++i) std::memcpy(target.data_ptr(), source.data_ptr(), source.nbytes());
    const std::chrono::duration<double, std::micro> time = Clock::now() - start;
    copies_.values.push_back(time.count() / repeat);
  }

  std::string op_, dtype_;
  int64_t numel_;  // of the full tensor
  int64_t bytes_;
  std::string transport_, buffers_;
  Group group_;
  at::Tensor full_, part_, received_;
  std::optional<HostSharedBuffer> once_;
  int64_t version_ = 0;
  Samples times_, copies_;
  int64_t wire_bytes_ = 0;
};

constexpr const char* nothing = "none";  // dtype and buffers of a barrier

// Kinds of memory in which an operation can be measured over a transport.
std::vector<std::string> buffers_of(const CollectiveOptions& options, const std::string& op,
                                    const std::string& transport) {
  auto list = options.buffers.empty() ? known_buffers() : options.buffers;
  std::erase_if(list, [&](const auto& buffers) { return !fits(buffers, op, transport); });
  return list;
}

// All cases, grouped by transport.
std::vector<Case> cases_of(const CollectiveOptions& options, const Worlds& worlds) {
  std::vector<Case> cases;
  for (const auto& op : options.ops) {
    if (op == "barrier") {
      for (const auto& [transport, world] : worlds) {
        cases.emplace_back(op, nothing, 0, transport, nothing, world.group());
      }
      continue;
    }
    for (const auto& dtype : options.dtypes) {
      for (const auto& size : options.sizes) {
        for (const auto& [transport, world] : worlds) {
          for (const auto& buffers : buffers_of(options, op, transport)) {
            cases.emplace_back(op, dtype, parse_bytes(size), transport, buffers, world.group());
          }
        }
      }
    }
  }
  return cases;
}

}  // namespace

std::map<std::string, std::vector<std::string>> known_collective_values() {
  std::vector<std::string> types;
  for (const auto& [name, type] : known_dtypes()) types.push_back(name);
  auto transports = transport_names();
  std::erase(transports, "auto");
  return {{"--ops", known_ops()}, {"--dtypes", types}, {"--transports", transports}, {"--buffers", known_buffers()}};
}

void CollectiveOptions::validate() const {
  std::vector<std::string> faults;
  const auto all_known = known_collective_values();
  const auto within = [&](const char* option, const std::vector<std::string>& given) {
    const auto& known = all_known.at(option);
    for (const auto& value : given) {
      if (std::find(known.begin(), known.end(), value) == known.end()) {
        faults.push_back(fmt::format("{} {}: choose from {}", option, value, fmt::join(known, ", ")));
      }
    }
  };
  within("--ops", ops);
  within("--dtypes", dtypes);
  within("--transports", transports);
  within("--buffers", buffers);
  for (const auto& size : sizes) parse_bytes(size);
  if (rounds < 1) faults.emplace_back("--rounds must be at least 1");
  for (const auto& kind : buffers) {
    const bool measured = std::any_of(ops.begin(), ops.end(), [&](const auto& op) {
      return std::any_of(transports.begin(), transports.end(),
                         [&](const auto& transport) { return fits(kind, op, transport); });
    });
    if (measured || !faults.empty()) continue;
    throw UsageError(
        fmt::format("--buffers {}: none of --ops {} over --transports {} has it: shared needs host, once needs "
                    "all_gather over host, a barrier has no memory",
                    kind, fmt::join(ops, ","), fmt::join(transports, ",")));
  }
  if (!faults.empty()) throw UsageError(fmt::format("{}", fmt::join(faults, "; ")));
}

nlohmann::ordered_json bench_collectives(const CollectiveOptions& options) {
  const torch::NoGradGuard no_grad;
  const auto placement = find_placement({}, process_environment());
  Worlds worlds;
  for (const auto& transport : options.transports) {
    WorldOptions world;
    world.transport = transport;
    // Each transport meets in its own store, unless the launcher serves one.
    if (!placement.store_is_served) world.port = placement.port + static_cast<int>(worlds.size());
    worlds.emplace_back(transport, init(world));
  }
  const auto& clock = worlds.front().second.group();
  auto cases = cases_of(options, worlds);
  ProgressBar progress(options.rounds, {.enabled = clock.rank() == 0, .unit = "rounds"});
  for (int round = 0; round < options.rounds; ++round) {
    for (auto& figure : cases) figure.measure(clock);
    progress.update();
  }
  progress.clear();
  auto list = nlohmann::ordered_json::array();
  for (const auto& figure : cases) list.push_back(figure.json());
  return list;
}

}  // namespace shoal::cli
