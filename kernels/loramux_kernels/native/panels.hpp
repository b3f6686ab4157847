// What the products by packed panels of weights share; the layouts are in linear.cpp.
#pragma once

#include "simd.hpp"

namespace loramux {

constexpr int PANEL = 32;  // output columns

// Where a product goes.
struct Output {
    void* y;
    int64_t ldy, columns;
    const void* bias;
};

template <class T>
void write(const Output& out, int64_t row, int64_t column, f32x16 value) {
    int64_t left = out.columns - column;
    if (left <= 0) return;
    const T* bias = (const T*)out.bias;
    T* y = (T*)out.y + row * out.ldy + column;
    store_first(y, bias ? value + load_first(bias + column, left) : value, left);
}

}  // namespace loramux
