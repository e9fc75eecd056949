#pragma once
// Table of the processes of an elastic job on one host.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/membership/join_table.h"
#include "comm/shm/memory_file.h"

namespace shoal {

struct JoinPage;
struct Peer;

// In memory that the launcher holds, which all processes of the host map.
class JoinBoard final : public JoinTable {
 public:
  // For a launcher. job: its name, which nested jobs do not have. std::runtime_error without shared memory.
  JoinBoard(std::string job, int first_ranks);
  // Opens a launcher's. UsageError for an address that is none, std::runtime_error for memory that is not a board of
  // this version.
  explicit JoinBoard(const std::string& address);

  std::string address() const;
  const std::string& job() const { return job_; }
  // A rank of the first generation.
  void enter(int number, const Peer& peer);

  int first_ranks() const override;
  void knock(int number, const Peer& peer) override;
  bool withdraw(int number) override;
  bool claim(int number) override;
  void release(int number) override;
  void refuse(int number, const std::string& why) override;
  void admitted(int number) override;
  bool anyone_knocks() const override;
  std::vector<int> knocking() const override;
  bool is_refused(int number) const override;
  std::string refusal(int number) const override;
  bool is_member(int number) const override;
  // Whether a newcomer was admitted, also if it is no member any more: it, or the others, found afterwards that it does
  // not fit.
  bool was_admitted(int number) const;
  std::vector<Peer> peers() const override;
  uint64_t changes() const override;
  void publish(const std::string& description) override;
  void close(const std::string& why) override;
  std::optional<std::string> description() const override;
  std::string why_closed() const override;

 private:
  std::string job_;
  shm::MemoryFile file_;
  int pid_;
  int descriptor_;
  JoinPage* page_;
};

}  // namespace shoal
