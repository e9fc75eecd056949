#pragma once
// One operation in flight over MPI. Only for files of comm/.

#include <mpi.h>

#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "comm/mpi_process.h"
#include "comm/transport.h"

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

// What MPI works on until the requests have finished, and what is left to do then.
struct MpiOperation {
  std::shared_ptr<MpiCommunicator> communicator;
  std::vector<MPI_Request> requests;
  std::vector<at::Tensor> tensors;
  std::shared_ptr<MpiBytes> bytes;
  std::function<void()> finish = [] {};

  const MpiBytes& count_bytes(int64_t number) { return *(bytes = std::make_shared<MpiBytes>(number)); }
  // Valid until the next call.
  MPI_Request* add_request() { return &requests.emplace_back(MPI_REQUEST_NULL); }
};

class MpiWork : public TransportWork {
 public:
  explicit MpiWork(std::shared_ptr<MpiOperation> operation);
  ~MpiWork() override;

  bool done() override;
  bool wait_for(Milliseconds slice, Milliseconds remaining) override;

 private:
  bool test();

  std::shared_ptr<MpiOperation> operation_;  // null: finished
  std::exception_ptr failure_;
};

}  // namespace shoal
