// `reference.best_rows` for CPUs: which rows of a low-rank factor score best, in one pass over it and without sorting.
//
// The scores of a few tiles, spread over the factor, tell about how high the best ones lie. What lies as high is
// collected while the factor is read, each thread in the order of its rows, and the best of it are chosen exactly. If
// the few tiles misled, too few are collected, and a second pass collects all: that takes no more than twice as long.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

// Rows of a tile, side by side, so that a tile's scores need no sum across a register, and columns of a group.
constexpr int TILE = 32, GROUP = 4;
// Queries that are multiplied while a tile's numbers are in a register.
constexpr int MOST_QUERIES = 4;
// Bytes between what is read and what comes from memory into the second cache meanwhile: two pages, as CPUs fetch by
// themselves only within a page.
constexpr int64_t FETCHED_AHEAD = 8192;
// Tiles that the height is estimated from.
constexpr int64_t SAMPLED_TILES = 128;
// Standard deviations of the estimate that are collected in addition, so that too few are one case in a thousand.
constexpr double MARGIN = 3;

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int VECTORS = TILE / LANES;

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Mask __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint32_t Bits __attribute__((vector_size(LANES * sizeof(uint32_t))));

constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr float NONE = -std::numeric_limits<float>::infinity();

template <typename Vector, typename Number>
inline Vector load(const Number* numbers) {
    Vector loaded;
    std::memcpy(&loaded, numbers, sizeof(loaded));
    return loaded;
}

inline Floats choose(const Mask& mask, const Floats& yes, const Floats& no) {
    return (Floats)(((Bits)mask & (Bits)yes) | (~(Bits)mask & (Bits)no));
}

// The arguments of a call, laid out as `cpu_best_rows.py` packs them.
struct Call {
    const float* queries;   // [m, r]
    const uint8_t* levels;  // [tiles, groups, TILE, GROUP]
    const float* scale;     // [r]
    const float* lowest;    // [r]
    const float* bias;      // [tiles, TILE]
    int64_t* rows;          // [count]
    int64_t m, r, groups, tiles, count, threads;
};

#if defined(__AVX512VNNI__)
#define MULTIPLIES_BYTES
typedef Mask Integers;
// Adds the products of four unsigned bytes with four signed ones, lane by lane.
inline Integers add_products(const Integers& sums, const Bits& levels, const Integers& digits) {
    return (Integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)levels, (__m512i)digits);
}
#elif defined(__AVXVNNI__)
#define MULTIPLIES_BYTES
typedef Mask Integers;
inline Integers add_products(const Integers& sums, const Bits& levels, const Integers& digits) {
    return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)levels, (__m256i)digits);
}
#endif

// Digits of a number to the base of 256, each a signed byte: as many as fp32 has of precision; and the largest number.
constexpr int DIGITS = 3;
constexpr float LARGEST = 127 << 16;

// What the levels of a row are multiplied with, so that the sum and `base` are its product with the query.
struct Query {
    float base;
    std::vector<float> numbers;  // [groups * GROUP]
    // The numbers once more, in units of `unit`: of each group the first digits of its columns, then the second ones.
    // CPUs multiply and add four times as many bytes as floats at a time.
    float unit;
    std::vector<int32_t> digits;  // [groups, DIGITS]

    void find_digits() {
        float largest = 0;
        for (const float number : numbers) largest = std::max(largest, std::abs(number));
        unit = std::max(largest / LARGEST, std::numeric_limits<float>::min());
        digits.assign(numbers.size() / GROUP * DIGITS, 0);
        for (size_t k = 0; k < numbers.size(); k++) {
            int32_t left = int32_t(std::lrint(numbers[k] / unit));
            for (int digit = DIGITS - 1; digit >= 0; digit--) {
                const int8_t byte = int8_t(left);
                left = (left - byte) / 256;
                digits[k / GROUP * DIGITS + digit] |= int32_t(uint32_t(uint8_t(byte)) << (8 * (k % GROUP)));
            }
        }
    }
};

// What a call multiplies with; kept for the next one of the same thread.
struct Queries {
    std::vector<Query> asked;
    int64_t count;

    // Leaves out those with a number that is not finite.
    void read(const Call& call) {
        if (int64_t(asked.size()) < call.m) asked.resize(call.m);
        count = 0;
        for (int64_t i = 0; i < call.m; i++) {
            const float* query = call.queries + i * call.r;
            Query& one = asked[count];
            one.base = 0;
            one.numbers.assign(call.groups * GROUP, 0.0f);
            bool is_finite = true;
            for (int64_t k = 0; k < call.r; k++) {
                one.numbers[k] = query[k] * call.scale[k];
                one.base += query[k] * call.lowest[k];
                is_finite = is_finite && std::isfinite(query[k]) && std::isfinite(one.numbers[k]);
            }
            count += is_finite;
#ifdef MULTIPLIES_BYTES
            if (is_finite) one.find_digits();
#endif
        }
    }
};

// Raises `best` to the products of a tile with QUERIES queries from `first` on; beyond the last one it is taken again.
template <int QUERIES>
inline void raise_to_products(const Queries& queries, const uint8_t* tile, int64_t groups, int64_t first, Floats* best) {
    const Query* asked[QUERIES];
    for (int q = 0; q < QUERIES; q++) asked[q] = &queries.asked[std::min(first + q, queries.count - 1)];
    Floats sums[QUERIES][VECTORS] = {};
#ifdef MULTIPLIES_BYTES
    Integers whole[QUERIES][DIGITS][VECTORS] = {};
#endif
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t* const numbers = tile + group * TILE * GROUP;
        Bits levels[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            __builtin_prefetch(numbers + v * sizeof(Bits) + FETCHED_AHEAD, 0, 2);
            levels[v] = load<Bits>(numbers + v * sizeof(Bits));
        }
#ifdef MULTIPLIES_BYTES
#pragma GCC unroll 4
        for (int q = 0; q < QUERIES; q++) {
#pragma GCC unroll 4
            for (int digit = 0; digit < DIGITS; digit++) {
                const Integers digits = Integers{} + asked[q]->digits[group * DIGITS + digit];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    whole[q][digit][v] = add_products(whole[q][digit][v], levels[v], digits);
                }
            }
        }
#else
        for (int column = 0; column < GROUP; column++) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const Floats level = __builtin_convertvector((Mask)(levels[v] >> (8 * column) & 255u), Floats);
#pragma GCC unroll 4
                for (int q = 0; q < QUERIES; q++) sums[q][v] += asked[q]->numbers[group * GROUP + column] * level;
            }
        }
#endif
    }
#ifdef MULTIPLIES_BYTES
    for (int q = 0; q < QUERIES; q++) {
        for (int v = 0; v < VECTORS; v++) {
            for (int digit = 0; digit < DIGITS; digit++) {
                sums[q][v] = 256 * sums[q][v] + __builtin_convertvector(whole[q][digit][v], Floats);
            }
            sums[q][v] *= asked[q]->unit;
        }
    }
#endif
    for (int q = 0; q < QUERIES; q++) {
        for (int v = 0; v < VECTORS; v++) {
            const Floats product = sums[q][v] + asked[q]->base;
            best[v] = choose(product > best[v], product, best[v]);
        }
    }
}

// The scores of a tile's rows: the best product and the bias. What is no number is the lowest; what is barred, lower.
inline void score_tile(const Call& call, const Queries& queries, int64_t index, Floats* scores) {
    const uint8_t* tile = call.levels + index * call.groups * TILE * GROUP;
    for (int v = 0; v < VECTORS; v++) scores[v] = Floats{} + LOWEST;
    if (queries.count == 1) {
        raise_to_products<1>(queries, tile, call.groups, 0, scores);
    } else {
        for (int64_t q = 0; q < queries.count; q += MOST_QUERIES) {
            raise_to_products<MOST_QUERIES>(queries, tile, call.groups, q, scores);
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        const Floats bias = load<Floats>(call.bias + index * TILE + v * LANES), sum = scores[v] + bias;
        scores[v] = choose(bias == NONE, Floats{} + NONE, choose(sum > LOWEST, sum, Floats{} + LOWEST));
    }
}

// A bit for each row whose score is at least `least`.
inline uint32_t rows_from(const Floats* scores, float least) {
    uint32_t bits = 0;
    for (int v = 0; v < VECTORS; v++) {
#if defined(__AVX512F__)
        bits |= uint32_t(_mm512_cmp_ps_mask((__m512)scores[v], _mm512_set1_ps(least), _CMP_GE_OQ)) << v * LANES;
#elif defined(__AVX2__)
        const __m256 mask = _mm256_cmp_ps((__m256)scores[v], _mm256_set1_ps(least), _CMP_GE_OQ);
        bits |= uint32_t(_mm256_movemask_ps(mask)) << v * LANES;
#else
        for (int lane = 0; lane < LANES; lane++) bits |= uint32_t(scores[v][lane] >= least) << (v * LANES + lane);
#endif
    }
    return bits;
}

// What one thread collected: a part of memory that has room for all of its rows.
struct Part {
    int64_t first, count;
};

// What a call needs; kept for the next one of the same thread, as the system hands out memory slowly.
struct Memory {
    Queries queries;
    std::vector<float> scores, copied;
    std::vector<Keys> keys;
    std::vector<int32_t> rows;
    std::vector<Part> parts;
};

// A score that about as many rows reach as are wanted, and rather more.
float estimated_least(const Call& call, Memory& memory) {
    if (call.tiles < 4 * SAMPLED_TILES) return LOWEST;
    std::vector<float>& sampled = memory.copied;
    sampled.resize(SAMPLED_TILES * TILE);
    for (int64_t i = 0; i < SAMPLED_TILES; i++) {
        Floats scores[VECTORS];
        // From the middle of each stretch: many of the best tokens are among the very first.
        score_tile(call, memory.queries, (2 * i + 1) * call.tiles / (2 * SAMPLED_TILES), scores);
        std::memcpy(sampled.data() + i * TILE, scores, sizeof(scores));
    }
    const double expected = double(call.count) / double(call.tiles) * SAMPLED_TILES;
    const int64_t wanted = int64_t(expected + MARGIN * std::sqrt(expected)) + 1;
    if (wanted >= int64_t(sampled.size())) return LOWEST;
    return std::max(reached_by(wanted, wanted, sampled.data(), sampled.size(), memory.keys), LOWEST);
}

// Collects the rows that reach `least`. Returns how many.
int64_t collect(const Call& call, float least, Memory& memory) {
    float* const scores = memory.scores.data();
    int32_t* const rows = memory.rows.data();
    Part* const parts = memory.parts.data();
    const Queries& queries = memory.queries;
#pragma omp parallel for num_threads(call.threads) schedule(static, 1) if (call.threads > 1)
    for (int64_t thread = 0; thread < call.threads; thread++) {
        const int64_t first = thread * call.tiles / call.threads, end = (thread + 1) * call.tiles / call.threads;
        int64_t next = first * TILE;
        for (int64_t index = first; index < end; index++) {
            Floats tile[VECTORS];
            score_tile(call, queries, index, tile);
            uint32_t bits = rows_from(tile, least);
            if (!bits) continue;
            float values[TILE];
            std::memcpy(values, tile, sizeof(values));
            for (; bits; bits &= bits - 1, next++) {
                const int lane = __builtin_ctz(bits);
                scores[next] = values[lane];
                rows[next] = int32_t(index * TILE + lane);
            }
        }
        parts[thread] = {first * TILE, next - first * TILE};
    }
    int64_t total = 0;
    for (const Part& part : memory.parts) total += part.count;
    return total;
}

// Writes the `count` best of what was collected, in the order of their rows; of equals at the end the first ones.
void choose_best(const Call& call, Memory& memory) {
    memory.copied.clear();
    for (const Part& part : memory.parts) {
        const auto start = memory.scores.begin() + part.first;
        memory.copied.insert(memory.copied.end(), start, start + part.count);
    }
    const float least = reached_by(call.count, call.count, memory.copied.data(), memory.copied.size(), memory.keys);
    const auto is_better = [least](float score) { return score > least; };
    int64_t equals = call.count - std::count_if(memory.copied.begin(), memory.copied.end(), is_better);
    int64_t* into = call.rows;
    for (const Part& part : memory.parts) {
        for (int64_t i = part.first; i < part.first + part.count; i++) {
            const float score = memory.scores[i];
            if (score > least || (score == least && equals-- > 0)) *into++ = memory.rows[i];
        }
    }
}

}  // namespace

// All tensors are contiguous, and 0 < count. Returns whether there are as many rows that are not barred; nothing is
// written where there are not.
extern "C" bool best_rows(const void* packed) {
    Call call;
    std::memcpy(&call, packed, sizeof(call));
    thread_local Memory memory;
    memory.scores.resize(call.tiles * TILE);
    memory.rows.resize(call.tiles * TILE);
    memory.parts.resize(call.threads);
    memory.queries.read(call);
    const float least = estimated_least(call, memory);
    if (collect(call, least, memory) < call.count) {
        if (least == LOWEST || collect(call, LOWEST, memory) < call.count) return false;
    }
    choose_best(call, memory);
    return true;
}
