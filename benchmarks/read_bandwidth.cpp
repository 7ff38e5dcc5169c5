// Reads a buffer with as many threads as asked, each a contiguous part of it, and says how long the slowest took.

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Vector = std::uint64_t __attribute__((vector_size(64)));
constexpr std::size_t kStreams = 8;  // independent sums, so that no addition waits for another
constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::uint64_t sum(const Vector* part, std::size_t vectors) {
    Vector sums[kStreams] = {};
    for (std::size_t i = 0; i < vectors; i += kStreams)
        for (std::size_t s = 0; s < kStreams; ++s) sums[s] += part[i + s];
    Vector all = {};
    for (const Vector& one : sums) all += one;
    std::uint64_t total = 0;
    for (int lane = 0; lane < 8; ++lane) total += all[lane];
    return total;
}

}  // namespace

// The best of `rounds` in bytes per second; 0 where there is no memory. `bytes`: a multiple of 2 MiB * threads.
extern "C" __attribute__((visibility("default"))) double read_bandwidth(std::size_t bytes, int threads, int rounds) {
    void* buffer = std::aligned_alloc(kHugePage, bytes);
    if (buffer == nullptr) return 0.0;
    madvise(buffer, bytes, MADV_HUGEPAGE);
    std::memset(buffer, 1, bytes);
    const std::size_t vectors = bytes / sizeof(Vector) / threads;
    std::vector<std::uint64_t> sums(threads);
    double best = 0.0;
    for (int round = 0; round < rounds; ++round) {
        const auto started = std::chrono::steady_clock::now();
        std::vector<std::thread> readers;
        for (int t = 0; t < threads; ++t)
            readers.emplace_back([&, t] { sums[t] = sum(static_cast<Vector*>(buffer) + t * vectors, vectors); });
        for (std::thread& reader : readers) reader.join();
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
        for (std::uint64_t s : sums)
            if (s != sums[0]) return 0.0;  // equal bytes, equal sums: nothing was left out
        best = std::max(best, bytes / seconds.count());
    }
    std::free(buffer);
    return best;
}
