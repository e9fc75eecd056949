#pragma once
// Operations in flight over MPI. Only for files of comm/.

#include <mpi.h>

#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "comm/mpi/mpi_process.h"
#include "comm/transport/transport.h"

namespace shoal {

// Byte count in MPI's form: an int, or one element of a derived type above INT_MAX.
class MpiBytes {
 public:
  explicit MpiBytes(int64_t bytes);
  ~MpiBytes();
  MpiBytes(const MpiBytes&) = delete;
  MpiBytes& operator=(const MpiBytes&) = delete;

  int count = 0;
  MPI_Datatype type = MPI_BYTE;
};

// Requests that are started together, and the work that follows on this rank.
struct MpiPart {
  std::vector<MPI_Request> requests;
  std::function<void()> finish = [] {};
  std::unique_ptr<MpiBytes> bytes;

  const MpiBytes& count(int64_t number) { return *(bytes = std::make_unique<MpiBytes>(number)); }
  // The pointer is valid until the next call.
  MPI_Request* add_request() { return &requests.emplace_back(MPI_REQUEST_NULL); }
};

struct MpiOperation {
  // Parts of one lane finish in order; parts of different lanes are independent.
  enum Lane { first, second, temporary, lanes };

  std::shared_ptr<MpiCommunicator> communicator;
  std::vector<at::Tensor> tensors;  // tensors of the call
  std::array<std::deque<MpiPart>, lanes> parts;
  // Pending starts of parts in the lane `temporary`. These allocate memory, so that only few of them are in flight at
  // once.
  std::deque<std::function<void(MpiPart&)>> waiting;
  std::function<void()> finish = [] {};  // runs after all parts
  std::atomic<bool> finished = false;
  std::atomic<bool> abandoned = false;  // the group has failed: the operation may never finish, and nobody waits for it
  std::exception_ptr failure;           // valid once finished

  MpiPart& add(Lane lane = first) { return parts[lane].emplace_back(); }
};

// Keeps the operation, and so its tensors, until it is finished, whether or not somebody waits.
void put_in_flight(std::shared_ptr<MpiOperation> operation);
// Whether any operation is in flight that is not abandoned.
bool any_in_flight();
// Progresses all operations in flight without waiting; true if any of them progressed. All, because a peer may wait for
// our part of another operation than the one we wait for.
bool advance_all();

class MpiWork : public TransportWork {
 public:
  explicit MpiWork(std::shared_ptr<MpiOperation> operation) : operation_(std::move(operation)) {}
  ~MpiWork() override { operation_->abandoned = !operation_->finished; }

  bool done() override;
  bool wait_for(Milliseconds slice, Milliseconds remaining) override;

 private:
  std::shared_ptr<MpiOperation> operation_;
};

}  // namespace shoal
