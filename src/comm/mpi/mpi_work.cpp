#include "comm/mpi/mpi_work.h"

#include <torch/utils.h>

#include <algorithm>
#include <climits>
#include <list>
#include <mutex>
#include <thread>

#include "shoal/detail/clock.h"

namespace shoal {
namespace {

struct InFlight {
  std::mutex mutex;
  std::list<std::shared_ptr<MpiOperation>> operations;
};

// Never destroyed: MPI may write to tensors of operations that never finish.
InFlight& in_flight() {
  static auto* in_flight = new InFlight;
  return *in_flight;
}

bool is_complete(std::vector<MPI_Request>& requests) {
  for (; !requests.empty(); requests.pop_back()) {
    int complete = 0;
    check_mpi(MPI_Test(&requests.back(), &complete, MPI_STATUS_IGNORE), "MPI_Test");
    if (complete == 0) return false;
  }
  return true;
}

// Finishing a part may add parts. True if any part has finished.
bool advance_parts(MpiOperation& operation) {
  bool moved = false;
  for (auto& lane : operation.parts) {
    for (; !lane.empty() && is_complete(lane.front().requests); lane.pop_front()) {
      lane.front().finish();
      moved = true;
    }
  }
  return moved;
}

// oldest: the oldest operation in flight, which may use more memory than the others, since they wait for it.
bool advance(MpiOperation& operation, bool oldest) {
  const size_t most = oldest ? 8 : 1;
  bool moved = false;
  try {
    moved = advance_parts(operation);
    auto& lane = operation.parts[MpiOperation::temporary];
    for (auto& waiting = operation.waiting; !waiting.empty() && lane.size() < most; waiting.pop_front()) {
      waiting.front()(lane.emplace_back());
    }
    if (std::all_of(operation.parts.begin(), operation.parts.end(), [](const auto& lane) { return lane.empty(); })) {
      operation.finish();
      operation.finished = true;
    }
  } catch (const std::exception&) {
    operation.failure = std::current_exception();
    operation.finished = true;
  }
  return moved || operation.finished;
}

}  // namespace

MpiBytes::MpiBytes(int64_t bytes) {
  if (bytes <= INT_MAX) {
    count = static_cast<int>(bytes);
    return;
  }
  constexpr int64_t block = 1 << 30;
  MPI_Datatype whole = MPI_DATATYPE_NULL;
  check_mpi(MPI_Type_contiguous(block, MPI_BYTE, &whole), "MPI_Type_contiguous");
  const int lengths[] = {static_cast<int>(bytes / block), static_cast<int>(bytes % block)};
  const MPI_Aint places[] = {0, bytes - bytes % block};
  const MPI_Datatype types[] = {whole, MPI_BYTE};
  check_mpi(MPI_Type_create_struct(2, lengths, places, types, &type), "MPI_Type_create_struct");
  check_mpi(MPI_Type_commit(&type), "MPI_Type_commit");
  MPI_Type_free(&whole);
  count = 1;
}

MpiBytes::~MpiBytes() {
  if (type != MPI_BYTE) MPI_Type_free(&type);
}

void put_in_flight(std::shared_ptr<MpiOperation> operation) {
  auto& [mutex, operations] = in_flight();
  const std::lock_guard lock(mutex);
  operations.push_back(std::move(operation));
}

bool any_in_flight() {
  auto& [mutex, operations] = in_flight();
  const std::lock_guard lock(mutex);
  return std::any_of(operations.begin(), operations.end(), [](const auto& operation) { return !operation->abandoned; });
}

bool advance_all() {
  const torch::NoGradGuard no_grad;
  auto& [mutex, operations] = in_flight();
  const std::lock_guard lock(mutex);
  bool moved = false;
  std::erase_if(operations, [&moved, &operations = operations](const auto& operation) {
    if (operation->failure) return false;  // MPI may still use its tensors
    moved = advance(*operation, operation == operations.front()) || moved;
    if (!operation->finished || operation->failure) return false;
    operation->tensors.clear();
    operation->finish = nullptr;
    return true;
  });
  return moved;
}

// A failed operation counts as done; the wait throws its error.
bool MpiWork::done() {
  if (!operation_->finished) advance_all();
  return operation_->finished;
}

bool MpiWork::wait_for(Milliseconds slice, Milliseconds) {
  // MPI moves data only while it is called: poll without a pause while data move, then now and again.
  constexpr auto patience = std::chrono::microseconds(500);
  constexpr auto nap = std::chrono::microseconds(50);
  const auto start = Clock::now();
  auto moved = start;
  while (!operation_->finished) {
    if (advance_all()) moved = Clock::now();
    const auto now = Clock::now();
    if (now - start >= slice) return false;
    if (now - moved < patience) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(nap);
    }
  }
  if (operation_->failure) std::rethrow_exception(operation_->failure);
  return true;
}

}  // namespace shoal
