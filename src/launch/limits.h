#pragma once
// System limits of this process and of the ranks that it starts, which inherit them.

#include <cstddef>

namespace shoal {

// UsageError if the limit of open files (ulimit -n) is below the minimum for a launcher, or for a rank, of so many
// ranks. Beyond it libraries end the process without a message.
void require_open_files(int ranks);
// UsageError if files cannot be that large (ulimit -f); memory that ranks share counts as a file.
void require_file_size(std::size_t bytes);

}  // namespace shoal
