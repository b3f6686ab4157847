// Intel's AMX: eight registers of a tile each, 16 rows by 64 bytes, and their products.
//
// By instructions of the assembler: GCC's intrinsics do not say that they read memory, and need a compiler that was told of
// AMX. So every build for processors with products of bf16 has them, and asks the processor before their first use.
//
// A build with LORAMUX_EMULATED_TILES computes the same without them, to the bit, for tests on other processors.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.hpp"

#if defined(__x86_64__) && defined(__linux__) && defined(__AVX512BF16__)
#define LORAMUX_TILES 1
#else
#define LORAMUX_TILES 0
#endif

namespace loramux {

constexpr int TILE_ROWS = 16, TILE_BYTES = 64;         // of a row
constexpr int TILE_DEPTH = TILE_BYTES / sizeof(bf16);  // inputs that a product of tiles adds

// 0 if this process may use tiles, -1 if the processor has none, else the number of the kernel's error. Asked once.
int find_tiles();
inline bool has_tiles() { return find_tiles() == 0; }

#if LORAMUX_TILES

// Rows in blocks of up to sixteen, all of one height: one shape of tiles serves a call. The last block goes back over rows of
// the one before it, if it has to.
struct TileBlocks {
    int64_t rows, count = (rows + TILE_ROWS - 1) / TILE_ROWS, height = count ? (rows + count - 1) / count : 0;

    int64_t first(int64_t block) const { return block + 1 < count ? block * height : rows - height; }
};

// Tiles 0 to 3 are sums, 4 and 5 have rows, 6 and 7 columns.
struct TileShapes {
    uint8_t palette = 1, first_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    explicit TileShapes(int height) {
        for (int tile = 0; tile < 8; tile++) bytes[tile] = TILE_BYTES, rows[tile] = tile < 6 ? height : TILE_ROWS;
    }
};

#if defined(LORAMUX_EMULATED_TILES)

struct EmulatedTiles {
    TileShapes shapes{TILE_ROWS};
    alignas(64) uint8_t tile[8][TILE_ROWS][TILE_BYTES];
};
inline thread_local EmulatedTiles emulated;

inline void shape_tiles(const TileShapes& shapes) { emulated = EmulatedTiles{shapes, {}}; }
inline void release_tiles() {}

template <int TILE>
inline void clear_tile() { std::memset(emulated.tile[TILE], 0, sizeof emulated.tile[TILE]); }

template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
    for (int row = 0; row < emulated.shapes.rows[TILE]; row++)
        std::memcpy(emulated.tile[TILE][row], (const char*)from + row * stride, TILE_BYTES);
}

template <int TILE>
inline void store_tile(void* to, int64_t stride) {
    for (int row = 0; row < emulated.shapes.rows[TILE]; row++)
        std::memcpy((char*)to + row * stride, emulated.tile[TILE][row], TILE_BYTES);
}

// Denormal numbers count as zero.
inline f32x16 flushed(f32x16 x) {
    const u32x16 bits = bits_of<u32x16>(x), is_small = bits_of<u32x16>((bits & 0x7f800000u) == 0u);
    return bits_of<f32x16>(bits & (~is_small | 0x80000000u));
}

// Intel's manual, TDPBF16PS: a pair's products are summed apart, then added to each other, then to the sum.
template <int SUMS, int ROWS, int COLUMNS>
inline void add_tile_product() {
    for (int row = 0; row < emulated.shapes.rows[ROWS]; row++) {
        f32x16 parts[2] = {};
        for (int pair = 0; pair < TILE_ROWS; pair++) {
            const u32x16 columns = read_lanes<u32x16>((const uint32_t*)emulated.tile[COLUMNS][pair]);
            const u32x16 two = u32x16{} + ((const uint32_t*)emulated.tile[ROWS][row])[pair];
            parts[0] = flushed(fused(parts[0], flushed(bits_of<f32x16>(two << 16)), flushed(bits_of<f32x16>(columns << 16))));
            parts[1] = flushed(fused(parts[1], flushed(bits_of<f32x16>(two & 0xffff0000u)),
                                     flushed(bits_of<f32x16>(columns & 0xffff0000u))));
        }
        float* const sums = (float*)emulated.tile[SUMS][row];
        store(sums, flushed(flushed(load(sums)) + flushed(parts[0] + parts[1])));
    }
}

#else

inline void shape_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int TILE>
inline void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }

// Rows lie `stride` bytes apart.
template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// sums[row][column] += the 16 pairs of a row times those of a column
template <int SUMS, int ROWS, int COLUMNS>
inline void add_tile_product() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
}

#endif

// While it lives, the calling thread's tiles of sums and of rows have `height` rows. Tiles in use are saved whenever the thread
// stops.
struct ShapedTiles {
    explicit ShapedTiles(int height) { shape_tiles(TileShapes(height)); }
    ~ShapedTiles() { release_tiles(); }
    ShapedTiles(const ShapedTiles&) = delete;
};

#endif

}  // namespace loramux
