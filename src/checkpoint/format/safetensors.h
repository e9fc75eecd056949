#pragma once
// Writer of the safetensors format, which Python's library opens.

#include <torch/types.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// File to which tensors are written one by one or in parts, in any order, so that they need not be in memory together.
// It appears under its name once it is complete, or not at all; until then it has a temporary name, and an older file
// stays. Names must be distinct and not "__metadata__"; the format must have their dtypes. UsageError names a tensor
// that differs from its entry; CheckpointError names the file and the system's reason (no permission, disk full).
class SafetensorsFile {
 public:
  struct Entry {
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
  };
  SafetensorsFile(const std::string& path, const std::vector<Entry>& entries,
                  const std::map<std::string, std::string>& metadata);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  // Writes the elements in row-major order, whatever the tensor's layout.
  void write(const std::string& name, const at::Tensor& tensor);
  // Writes `size` bytes of the tensor's elements in row-major order, from element `first` on.
  void write_elements(const std::string& name, int64_t first, const void* data, int64_t size);
  // Call after all tensors. Syncs the file and renames it to its final name.
  void complete();
  // Size of the whole file in bytes.
  int64_t size() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Writes all tensors, of a symbolic link to its target.
void save_safetensors(const std::string& path, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata);

}  // namespace shoal
