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

// Elements of k that panels of bf16 take together: a width is a multiple of it. 0 if bf16 is not multiplied.
LORAMUX_EXPORT int loramux_bf16_unit() { return LORAMUX_BF16_SQUARES ? 4 : LORAMUX_BF16_PAIRS ? 2 : 0; }
