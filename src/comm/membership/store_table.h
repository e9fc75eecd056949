#pragma once
// Table of the processes of an elastic job on several hosts.

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/membership/join_table.h"
#include "comm/membership/patient_store.h"
#include "comm/rendezvous/rendezvous.h"

namespace shoal {

// One text in the job's store, which whoever changes it replaces (compare and set). Each process has a copy, which the
// thread of its StoreBoard brings up to date, so that most calls do not wait for the store; those that change
// something, do. CommError if the store is lost.
class StoreTable final : public JoinTable {
 public:
  // Where a newcomer finds the table: under a key of the launcher's generation, once members have made it. A member
  // says where it is by open().
  StoreTable(std::shared_ptr<PatientStore> store, std::string generation, const OpenJob& job);

  // For members: under the prefix of their board.
  void open(const std::string& prefix);
  // For one of them: makes it, and, once all members show themselves, lets newcomers find it.
  void make(const std::vector<Peer>& first);
  void announce();
  // Empty: a newcomer has not found it yet.
  std::string prefix() const;
  const std::shared_ptr<PatientStore>& store() const { return store_; }
  // Key whose value is another one after each change, and which is there once the table is.
  std::string changes_key() const;
  // For the thread that reads it. Whether something has changed. Uses the store without repeating calls.
  bool follow(const std::string& changes);

  int first_ranks() const override { return job_.first_ranks; }
  int most_ranks() const override { return job_.most_ranks; }
  void refresh() override;
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
  std::vector<Peer> peers() const override;
  uint64_t changes() const override;
  void publish(const std::string& description) override;
  void close(const std::string& why) override;
  std::optional<std::string> description() const override;
  std::string why_closed() const override;

 private:
  enum class State { member, knocks, claimed, withdrawn, refused };
  struct Entry {
    State state = State::withdrawn;
    Peer peer{};
    std::string why{};  // it is refused
  };
  struct Content {
    uint64_t version = 0;
    std::string closed{};
    std::map<int, Entry> entries{};
  };

  static std::string to_text(const Content& content);
  static Content from_text(const std::string& text);
  std::string key(const char* what) const;
  // Replaces the table by what `edit` makes of it, again whenever another process has been faster. False: edit has
  // returned false, and nothing has changed.
  bool change(const std::function<bool(Content& content)>& edit);
  void read(DeadlineStore& store);
  void adopt(const std::string& text);
  State state_of(int number, State otherwise) const;

  const std::shared_ptr<PatientStore> store_;
  const std::string generation_;
  const OpenJob job_;

  mutable std::mutex mutex_;  // guards what follows
  std::string prefix_;
  std::string text_;
  Content content_;
  std::string changes_;
  int follows_ = 0;  // since the table was read
  mutable std::optional<std::string> description_;
};

}  // namespace shoal
