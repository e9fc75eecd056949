#pragma once
// Writing tensors in the safetensors format, which Python opens as it is.

#include <torch/types.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// A file to which tensors are written one by one or in parts, in any order, so that they need not be in memory
// together. It appears under its name when it is complete, or not at all: until then it has another one beside it, and
// an older file stays. Names must be different and not "__metadata__"; dtypes must be ones that the format has.
// UsageError names the tensor that is not as announced; CheckpointError the file, and the system's reason (no
// permission, disk full).
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

  // In row-major order whatever its layout.
  void write(const std::string& name, const at::Tensor& tensor);
  // `size` bytes of its elements in row-major order, from element `first` on.
  void write_elements(const std::string& name, int64_t first, const void* data, int64_t size);
  // After all of them. Syncs the file and gives it its name.
  void complete();
  // Bytes of the whole file.
  int64_t size() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Writes them all.
void save_safetensors(const std::string& path, const NamedTensors& tensors,
                      const std::map<std::string, std::string>& metadata);

}  // namespace shoal
