#pragma once
// The system's limits on this process and on the ranks that it starts, which have the same.

#include <cstddef>

namespace shoal {

// UsageError where fewer files may be open (ulimit -n) than a launcher or a rank of so many has at least. Below that
// libraries end the process without a word.
void require_open_files(int ranks);
// UsageError where a file, which memory that ranks share is for the system, may not be that large (ulimit -f).
void require_file_size(std::size_t bytes);

}  // namespace shoal
