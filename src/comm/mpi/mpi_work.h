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

// A number of bytes as MPI counts them: as an int, or as one element of a type of its own above INT_MAX.
class MpiBytes {
 public:
  explicit MpiBytes(int64_t bytes);
  ~MpiBytes();
  MpiBytes(const MpiBytes&) = delete;
  MpiBytes& operator=(const MpiBytes&) = delete;

  int count = 0;
  MPI_Datatype type = MPI_BYTE;
};

// What MPI is asked for at once, and what is left to do on this rank afterwards.
struct MpiPart {
  std::vector<MPI_Request> requests;
  std::function<void()> finish = [] {};
  std::unique_ptr<MpiBytes> bytes;

  const MpiBytes& count(int64_t number) { return *(bytes = std::make_unique<MpiBytes>(number)); }
  // Valid until the next call.
  MPI_Request* add_request() { return &requests.emplace_back(MPI_REQUEST_NULL); }
};

struct MpiOperation {
  // Parts of a lane finish in their order; those of different lanes wait for different things.
  enum Lane { first, second, temporary, lanes };

  std::shared_ptr<MpiCommunicator> communicator;
  std::vector<at::Tensor> tensors;  // the call's
  std::array<std::deque<MpiPart>, lanes> parts;
  // Starts of parts of the lane `temporary`: they take memory, so few of them are in flight at once.
  std::deque<std::function<void(MpiPart&)>> waiting;
  std::function<void()> finish = [] {};  // after all parts
  std::atomic<bool> finished = false;
  std::atomic<bool> abandoned = false;  // its group has failed: it may never be finished, and nobody waits for it
  std::exception_ptr failure;  // to be read when finished

  MpiPart& add(Lane lane = first) { return parts[lane].emplace_back(); }
};

// Keeps the operation, and so its tensors, until it is finished, whether somebody waits or not.
void put_in_flight(std::shared_ptr<MpiOperation> operation);
// But for abandoned ones.
bool any_in_flight();
// Goes on with all operations in flight as far as that is possible without waiting; true if any went on. All of them,
// since a peer may wait for our next part in another operation than we wait for.
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
