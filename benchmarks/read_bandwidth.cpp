// Reads a buffer with as many threads as asked, each a contiguous part of it, and says how long the slowest took. Which
// way is the fastest is the processor's choice: as its prefetchers do it alone, or asked for some KB ahead.

#include <sys/mman.h>

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
constexpr std::size_t kAhead = 4096;  // bytes

template <bool kAsk>
std::uint64_t sum(const Vector* part, std::size_t vectors) {
    Vector sums[kStreams] = {};
    for (std::size_t i = 0; i < vectors; i += kStreams)
        for (std::size_t s = 0; s < kStreams; ++s) {
            if (kAsk) __builtin_prefetch(part + i + s + kAhead / sizeof(Vector));
            sums[s] += part[i + s];
        }
    Vector all = {};
    for (const Vector& one : sums) all += one;
    std::uint64_t total = 0;
    for (int lane = 0; lane < 8; ++lane) total += all[lane];
    return total;
}

}  // namespace

extern "C" {

// Memory in huge pages, written once; null where there is none.
__attribute__((visibility("default"))) void* make_buffer(std::size_t bytes) {
    void* buffer = std::aligned_alloc(kHugePage, bytes);
    if (buffer == nullptr) return nullptr;
    madvise(buffer, bytes, MADV_HUGEPAGE);
    return std::memset(buffer, 1, bytes);
}

__attribute__((visibility("default"))) void free_buffer(void* buffer) { std::free(buffer); }

// Reads a buffer once, in bytes per second. `bytes`: a multiple of 2 MiB * threads. `ask`: ahead. 0 if something was
// left out.
__attribute__((visibility("default"))) double read_once(const void* buffer, std::size_t bytes, int threads, bool ask) {
    const std::size_t vectors = bytes / sizeof(Vector) / threads;
    std::vector<std::uint64_t> sums(threads);
    const auto started = std::chrono::steady_clock::now();
    std::vector<std::thread> readers;
    for (int t = 0; t < threads; ++t)
        readers.emplace_back([&, t] {
            const Vector* part = static_cast<const Vector*>(buffer) + t * vectors;
            sums[t] = ask ? sum<true>(part, vectors) : sum<false>(part, vectors);
        });
    for (std::thread& reader : readers) reader.join();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    for (std::uint64_t s : sums)
        if (s != sums[0]) return 0.0;  // equal bytes, equal sums
    return bytes / seconds.count();
}

}  // extern "C"
