#include "comm/mpi_work.h"

#include <torch/utils.h>

#include <climits>
#include <thread>

namespace shoal {

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

MpiWork::MpiWork(std::shared_ptr<MpiOperation> operation) : operation_(std::move(operation)) {}

MpiWork::~MpiWork() {
  if (operation_ && !operation_->requests.empty()) abandon(std::move(operation_));
}

// The last request first: while it is not finished, one call per look serves all requests.
bool MpiWork::test() {
  auto& requests = operation_->requests;
  while (!requests.empty()) {
    int finished = 0;
    check_mpi(MPI_Test(&requests.back(), &finished, MPI_STATUS_IGNORE), "MPI_Test");
    if (finished == 0) return false;
    requests.pop_back();
  }
  const torch::NoGradGuard no_grad;
  operation_->finish();
  operation_.reset();
  return true;
}

// Failing is a way of being done; the wait says how.
bool MpiWork::done() {
  if (!operation_ || failure_) return true;
  try {
    return test();
  } catch (const std::exception&) {
    failure_ = std::current_exception();
    return true;
  }
}

bool MpiWork::wait_for(Milliseconds slice, Milliseconds) {
  using Clock = std::chrono::steady_clock;
  // MPI moves data only while it is asked; so it is asked often at first, between whatever else this core has to do.
  constexpr auto eager = std::chrono::microseconds(500);
  constexpr auto nap = std::chrono::microseconds(50);
  const auto start = Clock::now();
  while (!done()) {
    const auto waited = Clock::now() - start;
    if (waited >= slice) return false;
    if (waited < eager) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(nap);
    }
  }
  if (failure_) std::rethrow_exception(failure_);
  return true;
}

}  // namespace shoal
