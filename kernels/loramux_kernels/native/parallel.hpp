// Work shared among the threads of torch's own OpenMP pool.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace loramux {

// The runtime that torch has loaded, by its functions: linking against "an" OpenMP could bring in a second pool of
// threads, which would fight the first one for the cores.
struct Runtime {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel
    int (*thread)();                                               // omp_get_thread_num
    int (*threads)();                                              // omp_get_num_threads
};
extern Runtime runtime;

// Something that threads wait for: they look for about as long as waking them would take, and sleep then. A machine that
// has other work gives it the core meanwhile, and wakes the sleeper at once.
class Signal {
   public:
    template <class Ready>
    void await(const Ready& ready) {
        constexpr int LOOKS = 2000;
        for (int looks = 0; looks < LOOKS; looks++) {
            if (ready()) return;
#if defined(__x86_64__)
            _mm_pause();
#endif
        }
        std::unique_lock<std::mutex> lock(mutex);
        asleep++;
        changed.wait(lock, ready);
        asleep--;
    }

    // After a change that may make one ready: who saw nothing of it has been counted as asleep before.
    void announce() {
        if (asleep == 0) return;
        std::lock_guard<std::mutex> lock(mutex);
        changed.notify_all();
    }

   private:
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<int> asleep{0};
};

// Threads that stay awake between the parts of one piece of work. A decoder layer is a dozen parts of some ten
// microseconds each: putting the threads to sleep between them would take longer than the smaller ones.
//
// A part is cut into shares, one for each thread, and is over when all are done. The first thread does the shares of
// those that have not come for theirs: a thread that the machine holds up elsewhere is not waited for.
class Team {
   public:
    // The team whose work this thread is doing; null: none.
    static thread_local Team* current;

    // Runs work() on this thread; its calls of on_threads share their parts with the threads of the team.
    template <class Work>
    static void hold(int threads, const Work& work) {
        if (threads <= 1 || current) return work();
        Team team(threads);
        auto member = [&] {
            if (runtime.thread() != 0) return team.serve(runtime.thread());
            team.size = runtime.threads();
            current = &team;
            work();
            current = nullptr;
            team.is_over = true;
            team.publish();
        };
        runtime.parallel([](void* p) { (*(decltype(member)*)p)(); }, &member, threads, 0);
    }

    // body(share, shares), once for each of at most `threads` shares
    template <class Body>
    void run(int threads, const Body& body) {
        const int shares = threads < size ? threads : size;
        if (shares <= 1) return body(0, 1);
        part = [](void* p, int share, int shares) { (*(const Body*)p)(share, shares); };
        data = (void*)&body, cut = shares, left = shares - 1;
        for (int thread = shares; thread < size; thread++) taken[thread].by_round = round + 1;
        publish();
        body(0, shares);
        for (int share = 1; share < shares; share++)
            if (take(share, round)) {
                body(share, shares);
                left--;
            }
        done.await([&] { return left == 0; });
    }

   private:
    struct alignas(64) Taken {
        std::atomic<uint32_t> by_round{0};  // the last round whose share of this thread has been taken
    };

    explicit Team(int threads) : taken(new Taken[threads]) {}

    const std::unique_ptr<Taken[]> taken;
    int size = 1;
    // Of the round that has begun. Only who has taken a share of it may read them.
    void (*part)(void*, int, int) = nullptr;
    void* data = nullptr;
    int cut = 0;
    std::atomic<bool> is_over{false};
    alignas(64) std::atomic<uint32_t> round{0};
    alignas(64) std::atomic<int> left{0};  // shares, without the first thread's
    Signal begun, done;

    void publish() {
        round++;
        begun.announce();
    }

    // False where it has been taken, or is none: of a round that is over everything has.
    bool take(int share, uint32_t of_round) {
        uint32_t last = taken[share].by_round;
        return (int32_t)(of_round - last) > 0 && taken[share].by_round.compare_exchange_strong(last, of_round);
    }

    void serve(int thread) {
        for (uint32_t seen = 0;;) {
            begun.await([&] { return round != seen; });
            seen = round;
            if (is_over) return;
            if (!take(thread, seen)) continue;
            part(data, thread, cut);
            if (--left == 0) done.announce();
        }
    }
};

// body(thread, threads), once on each thread of a team of at most `threads`
template <class Body>
void on_threads(int threads, const Body& body) {
    if (threads <= 1) return body(0, 1);
    if (Team::current) return Team::current->run(threads, body);
    runtime.parallel([](void* p) { (*(const Body*)p)(runtime.thread(), runtime.threads()); }, (void*)&body, threads, 0);
}

// How many threads are worth waking for so many bytes of memory to read.
inline int threads_for(int64_t bytes, int threads) {
    const int64_t worth_waking = 128 << 10;  // a sleeping thread wakes in about 4 us, in which one alone reads as much
    int64_t useful = 1 + bytes / worth_waking;
    return useful < threads ? (int)useful : threads;
}

inline int64_t share(int64_t total, int thread, int threads) { return total * thread / threads; }

// Runs of neighbouring items, taken one after the other by threads that come for them: a thread that the machine holds
// up takes fewer, and the others wait for its last one at most. Long ones first, for a run is read in one stream and its end is not
// foreseen; short ones last, so that all threads end together. All but the last are even.
class Runs {
   public:
    Runs(int64_t total, int team) : total(total), team(team) {}

    // body(first, one past the last), for each run that this thread takes
    template <class Body>
    void take(const Body& body) {
        for (int64_t first = next.load(std::memory_order_relaxed); first < total;) {
            const int64_t left = total - first, length = left / (4 * team) > 1 ? left / (4 * team) * 2 : 2;
            if (!next.compare_exchange_weak(first, first + length, std::memory_order_relaxed)) continue;
            body(first, length < left ? first + length : total);
            first = next.load(std::memory_order_relaxed);
        }
    }

   private:
    const int64_t total, team;
    std::atomic<int64_t> next{0};
};

}  // namespace loramux
