#pragma once
// Slices that the ranks of a group hold in memory, in the form of a checkpoint without files.

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/loading/slice_source.h"
#include "checkpoint/saving/saver.h"
#include "shoal/group.h"

namespace shoal {

// This rank's part of a training, whose ranks may be some of the group's.
struct HeldContents {
  CheckpointContents contents;
  int rank = 0;   // among the training's ranks
  int ranks = 1;  // number of the training's ranks
};

// Every rank can read every slice, whichever rank holds it: its own from memory, others by messages. Reads are made in
// rounds, in each of which every rank asks for at most one portion of one slice. A rank that wants nothing serves the
// others meanwhile, so ranks may read different things, and different numbers of them.
//
// Memory: one rank holds each slice; of slices that several ranks have, the one with the least keeps its copy. Kept are
// the tensors themselves in the part "optimizer", which nobody writes after the training has ended, and copies of all
// others. Portions go straight from the owner's memory to the reader's.
class MemorySource : public SliceSource {
 public:
  static constexpr int64_t usual_portion = 64LL << 20;

  // name: for errors and labels. held: nothing on ranks that are not among the training's. portion_bytes: the most that
  // one message has. Collective. UsageError on every rank for slices that are invalid or do not make up whole tensors.
  MemorySource(const Group& group, const std::string& name, const std::optional<HeldContents>& held,
               int64_t portion_bytes = usual_portion);

  std::string name() const override { return name_; }
  const CheckpointIndex& index() const override { return index_; }
  // Only within together(). CommError if a rank has died.
  void read(const StoredTensor& tensor, const Range& range, char* to) override;

  // Readers call together() any number of times, the same on all of them, and then close(); ranks that read nothing
  // call serve() once. Collective over the group; after that, all may begin again.
  //
  // Runs `work`, which may read, and returns once all readers' work has ended. An exception of `work` is thrown then.
  void together(const std::function<void()>& work);
  void close();
  void serve();

  // Bytes that this rank has read from others.
  int64_t received() const { return received_; }

 private:
  struct Request {
    int64_t tensor = 0;  // index in names_, or a Wish
    Range range{};
  };
  enum Wish : int64_t { nothing = -1, closed = -2, serves = -3 };
  struct Held {
    Range range;
    at::Tensor values;  // contiguous, on the CPU
  };

  void keep(const CheckpointContents& contents, const std::vector<size_t>& numbers);
  void fill_index(const std::vector<std::string>& descriptions);
  const char* own_bytes(const std::string& tensor, int64_t element) const;
  int owner_of(const StoredTensor& tensor, const Range& range) const;
  // Asks for `own` and serves the others. Returns what all ranks asked for.
  std::vector<Request> round(const Request& own, char* to);

  Group group_;
  std::string name_;
  int64_t portion_bytes_;
  CheckpointIndex index_;
  std::vector<const StoredTensor*> tensors_;  // by number
  std::map<std::string, int64_t> numbers_;    // by name
  std::map<std::string, int> owners_;         // by StoredSlice::file
  std::map<std::string, std::vector<Held>> held_;
  int64_t received_ = 0;
};

}  // namespace shoal
