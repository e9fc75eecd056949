#pragma once
// Metrics file: one JSON object per line, for each step.

#include <cstdint>
#include <deque>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace shoal::cli {

// File that other programs may read while it grows: lines appear complete. One rank writes it; if that rank ends,
// another one takes over, so that no line is missing and none is there twice.
class Metrics {
 public:
  // behind: appends, for a run that is resumed. What a killed writer left of a line is cut off.
  enum class Start { anew, behind };
  // Empty path: writes nothing. writes: false on ranks that only keep their last lines until they take over. UsageError
  // names a file that cannot be written.
  explicit Metrics(const std::string& path, Start start = Start::anew, bool writes = true);
  bool wanted() const { return !path_.empty(); }
  // A file that cannot be written any more does not end the training: it is told once, and nothing is written from then
  // on.
  void write(const nlohmann::ordered_json& line);
  // Appends from now on, in place of a rank that has ended: first the kept lines that it has not written. Lines that it
  // has written are left out.
  void take_over();
  // Another rank writes from now on.
  void hand_over();
  // What is missing of this rank's lines, and why; empty: nothing.
  const std::string& fault() const { return fault_; }

 private:
  void append(const nlohmann::ordered_json& line);
  void give_up(const std::string& from);
  // By the rank that has ended.
  bool is_written(std::string_view kind, int64_t number) const;

  std::string path_;
  bool writes_;
  int64_t begin_ = 0;  // bytes of former runs
  std::ofstream file_;
  std::string fault_;
  int64_t generation_ = 0;  // of the ranks, by the last line that says so
  std::deque<std::pair<int64_t, nlohmann::ordered_json>>
      kept_;  // the last lines of a rank that does not write, and generations
  // Of the rank that has ended: its last generation, and by kind of line the last number in it.
  int64_t former_generation_ = 0;
  std::map<std::string_view, int64_t> last_former_;
};

}  // namespace shoal::cli
