#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "comm/group/text.h"
#include "tests/support/temp_folder.h"
#include "tests/support/world.h"

namespace shoal::test {

// One temporary folder for all ranks, removed at the end. Collective at both ends.
class SharedFolder {
 public:
  SharedFolder() {
    if (world().group().rank() == 0) folder_ = std::make_unique<TempFolder>();
    path_ = broadcast_text(world().group(), folder_ ? folder_->path().string() : "", 0, {});
  }
  ~SharedFolder() { world().group().barrier().wait(); }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::unique_ptr<TempFolder> folder_;
  std::filesystem::path path_;
};

}  // namespace shoal::test
