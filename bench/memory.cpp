// Benchmark of the lower bound for collectives of ranks on one host: the same bytes read and written by as many
// threads, without coordination. Argument: MiB per rank. Read the column CPU, the time of each thread; the benchmark
// library divides real time by the number of threads.

#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <new>

namespace {

constexpr int ranks = 2;

// Pages like those of Group::allocate.
class SharedFloats {
 public:
  explicit SharedFloats(size_t count) : bytes_(count * sizeof(float)) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<float*>(memory);
  }
  ~SharedFloats() { munmap(data_, bytes_); }
  SharedFloats(const SharedFloats&) = delete;
  SharedFloats& operator=(const SharedFloats&) = delete;
  float* data() const { return data_; }

 private:
  size_t bytes_;
  float* data_ = nullptr;
};

// Buffers of both ranks and a result for each, allocated before any thread starts to measure.
struct Memory {
  explicit Memory(size_t count)
      : full{SharedFloats(count), SharedFloats(count)}, part{SharedFloats(count / 2), SharedFloats(count / 2)} {}
  std::array<SharedFloats, ranks> full, part;
};
Memory* memory = nullptr;

void set_up(const benchmark::State& state) {
  memory = new Memory((static_cast<size_t>(state.range(0)) << 20) / sizeof(float));
}
void tear_down(const benchmark::State&) {
  delete memory;
}

template <class Body>
void measure(benchmark::State& state, Body body) {
  const auto half = static_cast<int64_t>((static_cast<size_t>(state.range(0)) << 20) / sizeof(float) / ranks);
  const int rank = state.thread_index();
  float* a = memory->full[0].data() + rank * half;
  float* b = memory->full[1].data() + rank * half;
  float* part = memory->part[rank].data();
  for (auto _ : state) {
    body(a, b, part, half);
    benchmark::ClobberMemory();
  }
}

// Each thread sums its half of both buffers, and writes the sum to both.
void all_reduce(benchmark::State& state) {
  measure(state, [](float* a, float* b, float*, int64_t count) {
    for (int64_t i = 0; i < count; ++i) a[i] = b[i] = a[i] + b[i];
  });
}

void reduce_scatter(benchmark::State& state) {
  measure(state, [](const float* a, const float* b, float* part, int64_t count) {
    for (int64_t i = 0; i < count; ++i) part[i] = a[i] + b[i];
  });
}

void reduce_scatter_in_place(benchmark::State& state) {
  measure(state, [](float* a, const float* b, float*, int64_t count) {
    for (int64_t i = 0; i < count; ++i) a[i] += b[i];
  });
}

// Copies half of the peer's buffer with the C library.
void all_gather(benchmark::State& state) {
  measure(state, [](const float* a, const float*, float* part, int64_t count) {
    std::memcpy(part, a, static_cast<size_t>(count) * sizeof(float));
  });
}

void configure(benchmark::internal::Benchmark* it) {
  it->Arg(1)->Arg(16)->Arg(64)->Arg(256)->Threads(ranks)->UseRealTime()->Unit(benchmark::kMicrosecond);
  it->Setup(set_up)->Teardown(tear_down);
}

BENCHMARK(all_reduce)->Apply(configure);
BENCHMARK(reduce_scatter)->Apply(configure);
BENCHMARK(reduce_scatter_in_place)->Apply(configure);
BENCHMARK(all_gather)->Apply(configure);

}  // namespace

BENCHMARK_MAIN();
