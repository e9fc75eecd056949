// Main function of tests in one process: GoogleTest's own, but for the end. libtorch's static destructors take a third
// of the time of a short test.

#include <gmock/gmock.h>

#include "base/end_process.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  shoal::end_process(RUN_ALL_TESTS());
}
