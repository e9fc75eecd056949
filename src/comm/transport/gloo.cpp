// Gloo transport; the only file that includes Gloo. libtorch's package ships c10d's Gloo header but not the Gloo
// headers that it includes. The distribution's headers serve, because only opaque pointers cross the boundary.

#include "comm/transport/gloo.h"

#include <c10/util/Exception.h>
#include <cxxabi.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/without_sigpipe.h"
#include "comm/agreement/fingerprint.h"
#include "comm/group/group_state.h"
#include "comm/group/released_groups.h"
#include "comm/rendezvous/while_waiting.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/store.h"
#include "comm/transport/c10d_transport.h"
#include "shoal/error.h"

namespace shoal {
namespace {

std::atomic<bool> thread_stays = false;
std::terminate_handler before = nullptr;

// Terminate handler for Gloo's threads. Gloo throws on its own thread if a message is longer than requested, as happens
// when ranks call different things. Nobody can catch that, and the process would end before it could report the calls.
// So the thread, which serves this group only, blocks here; the wait for the operation diagnoses the cause.
[[noreturn]] void stay_or_end() {
  const auto* type = abi::__cxa_current_exception_type();
  if (type != nullptr && std::strcmp(type->name(), "N4gloo13EnforceNotMetE") == 0) {
    thread_stays = true;
    while (true) pause();
  }
  if (before != nullptr) before();
  std::abort();
}

void watch_threads() {
  static std::once_flag once;
  std::call_once(once, [] { before = std::set_terminate(stay_or_end); });
}

// Gloo with tags that describe the call. Gloo matches messages of a collective by a tag, for which libtorch uses a
// counter; equally long messages of different calls would then be summed. With a description in the tag, ranks that
// call different things wait for each other without touching any data, and the wait diagnoses it (stuck_wait.h).
class TaggedGloo : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;

  void tag_next(const Call& call) {
    constexpr uint32_t bits_of_number = 12;  // for more operations than are in flight at a time
    const auto number = count_++ % (1U << bits_of_number);
    collectiveCounter_ = static_cast<uint32_t>(hash_of(fingerprint_of(call, 0))) << bits_of_number | number;
  }

  // Not a virtual call: in the headers' version of Gloo a Context has a vptr, in libtorch's it may have none.
  __attribute__((no_sanitize("vptr"))) void disconnect() {
    for (const auto& context : contexts_) context->closeConnections();
  }

 private:
  uint32_t count_ = 0;
};

// Waits until all ranks are connected. Otherwise an early rank might finish with the group and close its end before a
// late rank has connected, which Gloo reports as a failure. Uses keys rather than a counter of the store, because
// counters are not authenticated.
void await_all(c10d::Store& store, int rank, int size) {
  const std::string all = "all ranks are connected";
  const auto connected = [](int which) { return fmt::format("rank {} is connected", which); };
  const std::vector<uint8_t> yes{1};
  store.set(connected(rank), yes);
  if (rank == 0) {
    std::vector<std::string> keys;
    for (int which = 0; which < size; ++which) keys.push_back(connected(which));
    store.wait(keys);
    store.set(all, yes);
  }
  store.wait({all});
}

// Gloo waits for ranks that do not come as long as for an operation, in a thread that is left behind then. In an
// elastic job they are not waited for.
c10::intrusive_ptr<TaggedGloo> connect(const WorldState& world, const std::string& name,
                                       const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                       const c10::intrusive_ptr<c10d::ProcessGroupGloo::Options>& options,
                                       Milliseconds limit) {
  const auto failure = [name, address = world.listen_address](const std::string& why) {
    return CommError(fmt::format("cannot connect the ranks of group '{}' over Gloo at {}: {}", name, address, why));
  };
  const auto work = [failure, store, rank, size, options, released_groups = world.released_groups] {
    try {
      released_groups->end_unreferenced(/*aside=*/thread_stays);
      auto connected = c10::make_intrusive<TaggedGloo>(store, rank, size, options);
      await_all(*store, rank, size);
      return connected;
    } catch (const std::exception& error) {
      const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
      const std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
      throw failure(text.substr(0, text.find('\n')));
    }
  };
  WhileWaiting while_waiting(world.options.while_waiting);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  const auto given_up = [&] {
    while_waiting.look();
    if (world.watch && world.watch->raised()) throw CommError(world.watch->why());
    return std::chrono::steady_clock::now() > deadline;
  };
  const auto connected = unless(given_up, work);
  if (!connected) {
    throw failure(fmt::format("not all of them made it within {} s", std::chrono::duration<double>(limit).count()));
  }
  return *connected;
}

}  // namespace

std::shared_ptr<Transport> make_gloo_transport(const WorldState& world, const std::string& name, int rank, int size,
                                               Milliseconds limit) {
  using c10d::ProcessGroupGloo;
  const WithoutSigpipe guard;  // for the thread that connects, and for all of Gloo's: the device has one
  auto options = ProcessGroupGloo::Options::create();
  options->devices.push_back(ProcessGroupGloo::createDeviceForHostname(world.listen_address));
  // Our own waits name the culprit; Gloo's deadline is a fallback.
  options->timeout =
      std::max<Milliseconds>(limit, std::chrono::seconds(world.options.timeout_seconds)) + std::chrono::seconds(30);
  auto store = c10::make_intrusive<c10d::PrefixStore>(world.meeting.prefix + "/group/" + name, world.meeting.store);
  store->setTimeout(limit);
  watch_threads();
  const auto connected = connect(world, name, store, rank, size, options, limit);
  std::function<void(const Call&)> tag;  // none for groups that compare calls, whose ranks may call different things
  if (!compares_calls(name)) tag = [gloo = connected.get()](const Call& call) { gloo->tag_next(call); };
  auto transport = make_c10d_transport("gloo", connected, tag, [gloo = connected.get()] { gloo->disconnect(); });
  auto* seen = transport.get();
  auto keep = [released_groups = world.released_groups, transport = std::move(transport), store, rank,
               size](Transport*) mutable {
    // Given up: an operation in flight that waits for a rank that lives ends at Gloo's deadline.
    if (!transport->joins_threads()) return end_aside(std::move(transport));
    released_groups->keep(std::move(transport), std::move(store), rank, size);
  };
  return {seen, std::move(keep)};
}

}  // namespace shoal
