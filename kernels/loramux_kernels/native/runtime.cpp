#include "parallel.hpp"

#include "abi.hpp"

namespace loramux {
Runtime runtime;
thread_local Team* Team::current = nullptr;
}

LORAMUX_EXPORT void loramux_use_runtime(loramux::Runtime theirs) { loramux::runtime = theirs; }

// Bit d is set where tensors of dtype d are served.
LORAMUX_EXPORT int loramux_dtypes() {
#if LORAMUX_HAS_F16
    return 7;
#else
    return 3;
#endif
}

LORAMUX_EXPORT int loramux_multiplies_bf16_pairs() { return LORAMUX_BF16_PAIRS; }
