// The largest number that so many of some numbers reach: for sources of this folder, which are compiled with this text
// before them.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int KEYS = 16;
#else
constexpr int KEYS = 8;
#endif
// Whole numbers side by side. By hand, as loops may be compiled without being made into vectors.
typedef int32_t Keys __attribute__((vector_size(KEYS * sizeof(int32_t))));

constexpr int32_t LOWEST_KEY = std::numeric_limits<int32_t>::min(), HIGHEST_KEY = std::numeric_limits<int32_t>::max();
// Of −inf.
constexpr int32_t LEAST_KEY = int32_t(0xff800000u ^ 0x7fffffffu);

inline Keys vector_of(int32_t key) { return Keys{} + key; }

// Whole numbers with the order of fp32 numbers given by their bits, and back: the bits of negative ones but the sign's
// are turned around.
inline Keys reordered(const Keys& bits) { return bits ^ ((bits >> 31) & HIGHEST_KEY); }

// A number that at least `wanted` of `count` numbers reach, none of which is NaN: the largest such one, or any that no
// more than `most` reach. By halves, counting how many reach the middle: thousands are counted in less than a
// microsecond, while what sorts them takes every second branch the wrong way. `keys` is memory to work in.
inline float reached_by(int64_t wanted, int64_t most, const float* numbers, int64_t count, std::vector<Keys>& keys) {
    const int64_t vectors = (count + KEYS - 1) / KEYS;
    if (int64_t(keys.size()) < vectors) keys.resize(vectors);
    Keys lows = vector_of(HIGHEST_KEY), highs = vector_of(LOWEST_KEY);
    for (int64_t i = 0; i < vectors; i++) {
        // What the last numbers leave of their vector is below all.
        Keys bits = reordered(vector_of(LOWEST_KEY));
        std::memcpy(&bits, numbers + i * KEYS, std::min<int64_t>(KEYS, count - i * KEYS) * sizeof(float));
        keys[i] = reordered(bits);
        lows = keys[i] < lows ? keys[i] : lows;
        highs = keys[i] > highs ? keys[i] : highs;
    }
    int32_t low = HIGHEST_KEY, high = LOWEST_KEY;
    for (int lane = 0; lane < KEYS; lane++) {
        low = std::min(low, int32_t(lows[lane]));
        high = std::max(high, int32_t(highs[lane]));
    }
    // Below −inf no number is, though what the last vector was filled with.
    low = std::max(low, LEAST_KEY);
    while (low < high) {
        const int32_t middle = int32_t(high - (int64_t(high) - low) / 2);
        // What is so is -1 in each lane.
        Keys reached[4] = {};
        int64_t i = 0;
        for (; i + 4 <= vectors; i += 4) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) reached[j] -= keys[i + j] >= middle;
        }
        for (; i < vectors; i++) reached[0] -= keys[i] >= middle;
        const Keys sums = reached[0] + reached[1] + reached[2] + reached[3];
        int64_t total = 0;
        for (int lane = 0; lane < KEYS; lane++) total += sums[lane];
        if (total >= wanted) {
            low = middle;
            if (total <= most) break;
        } else {
            high = middle - 1;
        }
    }
    const Keys bits = reordered(vector_of(low));
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
}

}  // namespace
