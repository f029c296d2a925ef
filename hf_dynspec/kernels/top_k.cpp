// `reference.top_k_ids` for CPUs: the largest numbers of each row, in one pass over it.
//
// A few numbers, spread over the row, tell about how high the largest ones lie. What lies as high is collected, and the
// largest of it are chosen exactly. If the few misled, too little is collected, and a second pass collects all.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// Numbers that are compared before anything is done about one of them.
constexpr int64_t GROUP = 64;
// Numbers that the height is estimated from, at most, in groups of neighbours; and of how many numbers one is taken.
constexpr int64_t MOST_SAMPLED = 4096, NEIGHBOURS = 16, ONE_OF = 4;
// Standard deviations of the estimate that are collected in addition, so that too few are one case in a thousand.
constexpr double MARGIN = 3;
// Numbers between what is read and what comes from memory into the second cache meanwhile: two pages, as CPUs fetch by
// themselves only within a page.
constexpr int64_t FETCHED_AHEAD = 2048;
constexpr float HIGHEST = std::numeric_limits<float>::infinity();

// The arguments of a call, laid out as `cpu_top_k.py` packs them.
struct Call {
    const float* scores;  // [m, columns], a row every `stride` numbers
    int64_t* ids;         // [m, k]
    int64_t m, columns, stride, k, threads;
};

// A number and its column as one whole number, which is the larger, the larger the number is, and of equal numbers, the
// smaller the column is. What is no number is larger than all, as it is to torch.
inline uint64_t ranked(float number, int64_t column) {
    number += 0.0f;  // the two zeros are equal
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    bits = number != number ? UINT32_MAX : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | (UINT32_MAX - uint32_t(column));
}

// A bit for each of GROUP numbers that is not below `least`.
inline uint64_t not_below(const float* numbers, float least) {
    uint64_t bits = 0;
#if defined(__AVX512F__)
    for (int i = 0; i < GROUP; i += 16) {
        const __m512 loaded = _mm512_loadu_ps(numbers + i);
        bits |= uint64_t(_mm512_cmp_ps_mask(loaded, _mm512_set1_ps(least), _CMP_NLT_UQ)) << i;
    }
#elif defined(__AVX2__)
    for (int i = 0; i < GROUP; i += 8) {
        const __m256 loaded = _mm256_loadu_ps(numbers + i);
        const __m256 mask = _mm256_cmp_ps(loaded, _mm256_set1_ps(least), _CMP_NLT_UQ);
        bits |= uint64_t(uint32_t(_mm256_movemask_ps(mask))) << i;
    }
#else
    for (int i = 0; i < GROUP; i++) bits |= uint64_t(!(numbers[i] < least)) << i;
#endif
    return bits;
}

// What a thread needs; kept for its next row, as the system hands out memory slowly.
struct Memory {
    std::vector<float> sampled;
    std::vector<Keys> keys;
    std::vector<uint64_t> collected;
};

// A number that about as many of a row as are wanted reach, and rather more.
float estimated_least(const Call& call, const float* row, Memory& memory) {
    const int64_t sampled = std::min(MOST_SAMPLED, call.columns / ONE_OF / NEIGHBOURS * NEIGHBOURS);
    const double expected = double(call.k) / double(call.columns) * sampled;
    const int64_t wanted = int64_t(expected + MARGIN * std::sqrt(expected)) + 1;
    if (wanted >= sampled) return -HIGHEST;
    memory.sampled.resize(sampled);
    for (int64_t i = 0; i < sampled; i += NEIGHBOURS) {
        // From the middle of each stretch: many of the largest are among the very first.
        const float* from = row + (2 * i + NEIGHBOURS) * (call.columns - NEIGHBOURS) / (2 * sampled);
        for (int64_t j = 0; j < NEIGHBOURS; j++) memory.sampled[i + j] = from[j] == from[j] ? from[j] : HIGHEST;
    }
    return reached_by(wanted, memory.sampled.data(), sampled, memory.keys);
}

// Collects the numbers of a row that are not below `least`.
void collect(const Call& call, const float* row, float least, std::vector<uint64_t>& collected) {
    collected.clear();
    int64_t start = 0;
    for (; start + GROUP <= call.columns; start += GROUP) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < GROUP; i += 16) __builtin_prefetch(row + start + i + FETCHED_AHEAD, 0, 2);
        for (uint64_t bits = not_below(row + start, least); bits; bits &= bits - 1) {
            const int64_t column = start + __builtin_ctzll(bits);
            collected.push_back(ranked(row[column], column));
        }
    }
    for (; start < call.columns; start++) {
        if (!(row[start] < least)) collected.push_back(ranked(row[start], start));
    }
}

void choose(const Call& call, int64_t index) {
    thread_local Memory memory;
    const float* row = call.scores + index * call.stride;
    const float least = estimated_least(call, row, memory);
    collect(call, row, least, memory.collected);
    if (int64_t(memory.collected.size()) < call.k) collect(call, row, -HIGHEST, memory.collected);
    const auto first = memory.collected.begin(), end = first + call.k;
    std::nth_element(first, end - 1, memory.collected.end(), std::greater<uint64_t>());
    std::sort(first, end, std::greater<uint64_t>());
    for (int64_t i = 0; i < call.k; i++) {
        call.ids[index * call.k + i] = UINT32_MAX - uint32_t(memory.collected[i]);
    }
}

}  // namespace

// Rows are contiguous, and 0 < k <= columns < 2³².
extern "C" void top_k(const void* packed) {
    Call call;
    std::memcpy(&call, packed, sizeof(call));
#pragma omp parallel for num_threads(call.threads) schedule(static, 1) if (call.threads > 1)
    for (int64_t index = 0; index < call.m; index++) choose(call, index);
}
