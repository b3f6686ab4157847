// Work shared among the threads of torch's own OpenMP pool.
#pragma once

#include <cstdint>

namespace loramux {

// The runtime that torch has loaded, by its functions: linking against "an" OpenMP could bring in a second pool of
// threads, which would fight the first one for the cores.
struct Runtime {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel
    int (*thread)();                                               // omp_get_thread_num
    int (*threads)();                                              // omp_get_num_threads
};
extern Runtime runtime;

// body(thread, threads), once on each thread of a team of at most `threads`
template <class Body>
void on_threads(int threads, const Body& body) {
    if (threads <= 1) return body(0, 1);
    runtime.parallel([](void* p) { (*(const Body*)p)(runtime.thread(), runtime.threads()); }, (void*)&body, threads, 0);
}

// How many threads are worth waking for so many bytes of memory to read.
inline int threads_for(int64_t bytes, int threads) {
    const int64_t worth_waking = 128 << 10;  // a sleeping thread wakes in about 4 us, in which one alone reads as much
    int64_t useful = 1 + bytes / worth_waking;
    return useful < threads ? (int)useful : threads;
}

inline int64_t share(int64_t total, int thread, int threads) { return total * thread / threads; }

}  // namespace loramux
