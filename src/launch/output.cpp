#include "launch/output.h"

namespace shoal {

void Output::wait_for(std::vector<pollfd>& waits) const {
  for (const auto* outlet : {&out_, &err_}) {
    if (!outlet->empty()) waits.push_back({outlet->fd(), POLLOUT, 0});
  }
}

void Output::drain() {
  out_.drain();
  err_.drain();
}

}  // namespace shoal
