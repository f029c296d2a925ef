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

// The arguments of a call, laid out as `cpu_best_rows.py` packs them.
struct Call {
    const float* hidden;      // [m, d]
    const float* projection;  // [r - 1, d]
    const uint8_t* levels;    // [tiles, groups, TILE, GROUP]
    const float* scale;       // [r]
    const float* lowest;      // [r]
    const float* bias;        // [tiles, TILE]
    const float* highest;     // [tiles]: the largest bias of each tile, at least 0
    int64_t* rows;            // [count]
    int64_t m, d, r, groups, tiles, count, threads;
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

// Digits of a number to the base of 256, each a signed byte, and the largest number. What two of them leave of a query
// is a hundredth of what the levels leave of the rows.
constexpr int DIGITS = 2;
constexpr float LARGEST = 127 << 8;

// What the levels of a row are multiplied with, so that the sum and `base` are its product with the query.
struct Query {
    float base;
    std::vector<float> numbers;  // [groups * GROUP]
    // The numbers once more, rounded to units of `unit`: of each group the first digits of its columns, then the second
    // ones. CPUs multiply and add four times as many bytes as floats at a time.
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

// Projections of less than this take one thread less time than others need to wake.
constexpr int64_t FEWEST_SHARED_PRODUCTS = 1 << 18;

float product_of(const float* first, const float* second, int64_t count) {
    Floats sums[4] = {};
    int64_t k = 0;
    for (; k + 4 * LANES <= count; k += 4 * LANES) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sums[i] += load<Floats>(first + k + i * LANES) * load<Floats>(second + k + i * LANES);
    }
    const Floats lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = 0;
    for (; k < count; k++) sum += first[k] * second[k];
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

// What a call multiplies with; kept for the next one of the same thread.
struct Queries {
    std::vector<float> projected;  // [m, r]
    std::vector<Query> asked;
    int64_t count;

    // The projections of the hidden states, and their squared lengths.
    void project(const Call& call) {
        projected.resize(call.m * call.r);
        float* const into = projected.data();
        const bool shares = call.threads > 1 && call.m * call.r * call.d >= FEWEST_SHARED_PRODUCTS;
#pragma omp parallel for num_threads(call.threads) schedule(static) if (shares)
        for (int64_t k = 0; k < call.r; k++) {
            for (int64_t i = 0; i < call.m; i++) {
                const float* const state = call.hidden + i * call.d;
                const float* const other = k + 1 < call.r ? call.projection + k * call.d : state;
                into[i * call.r + k] = product_of(state, other, call.d);
            }
        }
    }

    // Leaves out those with a number that is not finite.
    void read(const Call& call) {
        project(call);
        if (int64_t(asked.size()) < call.m) asked.resize(call.m);
        count = 0;
        for (int64_t i = 0; i < call.m; i++) {
            const float* query = projected.data() + i * call.r;
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
            const Floats first = __builtin_convertvector(whole[q][0][v], Floats);
            const Floats second = __builtin_convertvector(whole[q][1][v], Floats);
            sums[q][v] = (256 * first + second) * asked[q]->unit;
        }
    }
#endif
    for (int q = 0; q < QUERIES; q++) {
        for (int v = 0; v < VECTORS; v++) {
            const Floats product = sums[q][v] + asked[q]->base;
            best[v] = product > best[v] ? product : best[v];
        }
    }
}

// The best product of each of a tile's rows; the lowest number where none is a number.
inline void find_products(const Call& call, const Queries& queries, int64_t index, Floats* best) {
    const uint8_t* tile = call.levels + index * call.groups * TILE * GROUP;
    for (int v = 0; v < VECTORS; v++) best[v] = Floats{} + LOWEST;
    if (queries.count == 1) {
        raise_to_products<1>(queries, tile, call.groups, 0, best);
    } else {
        for (int64_t q = 0; q < queries.count; q += MOST_QUERIES) {
            raise_to_products<MOST_QUERIES>(queries, tile, call.groups, q, best);
        }
    }
}

// The score of a row, or of several side by side, given the best product. What is no number is the lowest; what is
// barred, lower.
template <typename Number>
inline Number score_of(const Number& product, const Number& bias) {
    const Number sum = product + bias;
    return bias == NONE ? Number{} + NONE : (sum > LOWEST ? sum : Number{} + LOWEST);
}

// Appends the numbers of a tile that reach `least`, after a bias that is added to all of them, and their rows, from
// `first` on. Beyond them it may write to as many places as the tile has rows. Returns how many they are.
inline int64_t append(const Floats* numbers, float bias, float least, int64_t first, float* into, int32_t* rows) {
    int64_t count = 0;
    for (int v = 0; v < VECTORS; v++) {
        const Floats most = numbers[v] + bias;
        const int32_t start = int32_t(first + v * LANES);
#ifdef __AVX512F__
        // Without a branch, as about every second tile has one.
        const __mmask16 reached = _mm512_cmp_ps_mask((__m512)most, _mm512_set1_ps(least), _CMP_GE_OQ);
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        _mm512_storeu_ps(into + count, _mm512_maskz_compress_ps(reached, (__m512)numbers[v]));
        _mm512_storeu_si512(
            rows + count, _mm512_maskz_compress_epi32(reached, _mm512_add_epi32(lanes, _mm512_set1_epi32(start))));
        count += __builtin_popcount(reached);
#else
#ifdef __AVX2__
        uint32_t bits = _mm256_movemask_ps(_mm256_cmp_ps((__m256)most, _mm256_set1_ps(least), _CMP_GE_OQ));
#else
        uint32_t bits = 0;
        for (int lane = 0; lane < LANES; lane++) bits |= uint32_t(most[lane] >= least) << lane;
#endif
        for (; bits; bits &= bits - 1, count++) {
            const int lane = __builtin_ctz(bits);
            into[count] = numbers[v][lane];
            rows[count] = start + lane;
        }
#endif
    }
    return count;
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
        // From the middle of each stretch: many of the best tokens are among the very first.
        const int64_t index = (2 * i + 1) * call.tiles / (2 * SAMPLED_TILES);
        Floats products[VECTORS];
        find_products(call, memory.queries, index, products);
        for (int v = 0; v < VECTORS; v++) {
            const Floats scores = score_of(products[v], load<Floats>(call.bias + index * TILE + v * LANES));
            std::memcpy(sampled.data() + i * TILE + v * LANES, &scores, sizeof(scores));
        }
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
            Floats products[VECTORS];
            find_products(call, queries, index, products);
            // Those that the tile's largest bias lifts to `least`, so that few of the biases are read.
            next += append(products, call.highest[index], least, index * TILE, scores + next, rows + next);
        }
        int64_t count = 0;
        for (int64_t i = first * TILE; i < next; i++) {
            const float score = score_of(scores[i], call.bias[rows[i]]);
            scores[first * TILE + count] = score;
            rows[first * TILE + count] = rows[i];
            count += score >= least;
        }
        parts[thread] = {first * TILE, count};
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
    // In place, as what is not chosen is written too: every fifth is none, which no CPU can foresee.
    int32_t* const rows = memory.rows.data();
    int64_t chosen = 0;
    for (const Part& part : memory.parts) {
        for (int64_t i = part.first; i < part.first + part.count; i++) {
            const float score = memory.scores[i];
            const bool is_equal = score == least;
            rows[chosen] = rows[i];
            chosen += (score > least) | (is_equal & (equals > 0));
            equals -= is_equal;
        }
    }
    std::copy_n(rows, call.count, call.rows);
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
