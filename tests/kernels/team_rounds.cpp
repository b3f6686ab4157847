// Many short rounds by more threads than cores, some of which come late: each share of each round must be done once.
#include "parallel.hpp"

#include <cstdio>
#include <vector>

extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();

namespace loramux {
Runtime runtime{GOMP_parallel, omp_get_thread_num, omp_get_num_threads};
thread_local Team* Team::current = nullptr;
}  // namespace loramux

using namespace loramux;

int main() {
    constexpr int THREADS = 7, ROUNDS = 100000;
    std::vector<std::atomic<int>> done(THREADS);
    std::atomic<long> wrong{0}, by_others{0};
    Team::hold(THREADS, [&] {
        for (int round = 0; round < ROUNDS; round++) {
            const int shares = 2 + round * 31 % (THREADS - 1);
            for (auto& count : done) count = 0;
            on_threads(shares, [&, round](int share, int of) {
                wrong += of != shares || done[share]++ != 0;
                by_others += share > 0 && Team::current != nullptr;
                if (round % 997 == share)
                    for (volatile int i = 0; i < 20000; i = i + 1) {
                    }
            });
            for (int share = 0; share < THREADS; share++) wrong += done[share] != (share < shares);
        }
    });
    std::printf("wrong %ld, by the first thread for others %ld\n", wrong.load(), by_others.load());
    return wrong != 0 || by_others == 0;
}
