// `reference.top_k_ids` for CPUs: the largest numbers of each row, which comes from memory once.
//
// A row is read in blocks, of which the largest number in each lane is kept. As many of these as numbers are wanted
// reach some height, and so do at least as many numbers of the row. The blocks that have such a lane, which are few, are
// then looked through, and of what lies as high the largest are chosen exactly.

#include <algorithm>
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
// Groups of a block.
constexpr int GROUPS = 4;
constexpr int64_t BLOCK = GROUPS * GROUP;
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

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));

// What a thread needs; kept for its next row, as the system hands out memory slowly.
struct Memory {
    std::vector<float> highest;
    std::vector<Keys> keys;
    std::vector<uint64_t> collected;
};

// The largest number in each lane of a block; what is no number counts as infinite.
inline Floats highest_of(const float* block) {
    Floats highest[GROUPS];
#pragma GCC unroll 4
    for (int group = 0; group < GROUPS; group++) highest[group] = Floats{} - HIGHEST;
    for (int64_t i = 0; i < GROUP; i += LANES) {
#pragma GCC unroll 4
        for (int group = 0; group < GROUPS; group++) {
            Floats numbers;
            std::memcpy(&numbers, block + group * GROUP + i, sizeof(numbers));
            numbers = numbers == numbers ? numbers : Floats{} + HIGHEST;
            highest[group] = numbers > highest[group] ? numbers : highest[group];
        }
    }
    for (int step = GROUPS / 2; step > 0; step /= 2) {
        for (int i = 0; i < step; i++) highest[i] = highest[i + step] > highest[i] ? highest[i + step] : highest[i];
    }
    return highest[0];
}

// The largest number in each lane of each block of a row, one block after the other. Beyond the row's end nothing is.
void find_highest(const Call& call, const float* row, std::vector<float>& highest) {
    highest.resize((call.columns + BLOCK - 1) / BLOCK * LANES);
    float* to = highest.data();
    int64_t start = 0;
    for (; start + BLOCK <= call.columns; start += BLOCK, to += LANES) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < BLOCK; i += 16) __builtin_prefetch(row + start + i + FETCHED_AHEAD, 0, 2);
        const Floats numbers = highest_of(row + start);
        std::memcpy(to, &numbers, sizeof(numbers));
    }
    if (start == call.columns) return;
    float last[BLOCK];
    std::fill(std::copy(row + start, row + call.columns, last), last + BLOCK, -HIGHEST);
    const Floats numbers = highest_of(last);
    std::memcpy(to, &numbers, sizeof(numbers));
}

// Collects the numbers of a row that are not below `least`.
void collect(const Call& call, const float* row, float least, Memory& memory) {
    memory.collected.clear();
    const float* highest = memory.highest.data();
    for (int64_t start = 0; start < call.columns; start += BLOCK, highest += LANES) {
        if (*std::max_element(highest, highest + LANES) < least) continue;
        const int64_t end = std::min(start + BLOCK, call.columns);
        int64_t first = start;
        for (; first + GROUP <= end; first += GROUP) {
            for (uint64_t bits = not_below(row + first, least); bits; bits &= bits - 1) {
                const int64_t column = first + __builtin_ctzll(bits);
                memory.collected.push_back(ranked(row[column], column));
            }
        }
        for (; first < end; first++) {
            if (!(row[first] < least)) memory.collected.push_back(ranked(row[first], first));
        }
    }
}

void choose(const Call& call, int64_t index) {
    thread_local Memory memory;
    const float* row = call.scores + index * call.stride;
    find_highest(call, row, memory.highest);
    const int64_t lanes = memory.highest.size();
    // Where that is as good, to collect a few more takes less time than to find out how high exactly.
    const int64_t most = call.k + call.k / 4;
    const float least = lanes < call.k ? -HIGHEST : reached_by(call.k, most, memory.highest.data(), lanes, memory.keys);
    collect(call, row, least, memory);
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
