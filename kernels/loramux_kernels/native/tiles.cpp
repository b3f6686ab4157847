#include "tiles.hpp"

#include "abi.hpp"

#if LORAMUX_TILES && !defined(LORAMUX_EMULATED_TILES)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace loramux {
namespace {

// The kernel keeps tiles for a process that has asked for it, in all of its threads.
int ask_for_tiles() {
#if !LORAMUX_TILES
    return -1;
#elif defined(LORAMUX_EMULATED_TILES)
    return 0;
#else
    constexpr unsigned needed = 1u << 22 | 1u << 24;    // AMX-BF16, AMX-TILE
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;     // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & needed) != needed) return -1;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0 ? 0 : errno;
#endif
}

}  // namespace

int find_tiles() {
    static const int found = ask_for_tiles();
    return found;
}

}  // namespace loramux

LORAMUX_EXPORT int loramux_find_tiles() { return loramux::find_tiles(); }
