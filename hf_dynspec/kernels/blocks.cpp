// `reference.block_scores` for CPUs: reads each chosen row where it lies, once from memory, and writes the scores alone.
//
// A block is multiplied in tiles of a few queries by a few rows. All sums of a tile stay in registers, and several of
// them are under way at a time, as each addition waits for the one before it. Nothing is packed, which is what a matrix
// product spends most of its time on where there are few queries. Sums are in fp32 for all types.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

// Numbers in a register. Compilers split these vectors where registers are smaller.
#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
// Queries in a tile at most: twelve sums, their two rows and a query fit sixteen registers.
constexpr int MOST_QUERIES = 6;
constexpr int rows_for(int queries) { return queries == 1 ? 8 : queries <= 3 ? 4 : 2; }

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t Bits __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint16_t ShortBits __attribute__((vector_size(LANES * sizeof(uint16_t))));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline Floats load(const float* numbers) {
    Floats loaded;
    std::memcpy(&loaded, numbers, sizeof(loaded));
    return loaded;
}

inline Bits load_bits(const void* numbers) {
    ShortBits loaded;
    std::memcpy(&loaded, numbers, sizeof(loaded));
    return __builtin_convertvector(loaded, Bits);
}

inline Floats load(const BFloat16* numbers) { return (Floats)(load_bits(numbers) << 16); }

#ifdef __AVX512F__
inline Floats load(const Float16* numbers) {
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers)));
}
#elif defined(__F16C__)
inline Floats load(const Float16* numbers) {
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers)));
}
#else
inline Floats load(const Float16* numbers) {
    const Bits bits = load_bits(numbers);
    const Bits magnitude = (bits & 0x7fffu) << 13;
    // The exponent's bias is 127 in fp32 and 15 in fp16. A product, unlike a sum of exponents, is right for subnormals.
    const Bits value = (Bits)((Floats)magnitude * 0x1p112f);
    // The largest exponent stands for infinity and NaN in both.
    const Bits not_finite = (Bits)(magnitude >= 0x0f800000u) & 0x7f800000u;
    return (Floats)(value | not_finite | (bits & 0x8000u) << 16);
}
#endif

template <typename Number>
inline float as_float(Number number) {
    Number numbers[LANES] = {number};
    return load(numbers)[0];
}

// The last columns, where they do not fill a vector, and zeros.
template <typename Number>
inline Floats load_last(const Number* numbers, int64_t count) {
    Number padded[LANES] = {};
    std::memcpy(padded, numbers, count * sizeof(Number));
    return load(padded);
}

// Halves are added, then their halves: three steps for eight lanes in place of seven.
template <int WIDTH>
inline float sum_of(const float* lanes) {
    if constexpr (WIDTH == 1) {
        return lanes[0];
    } else {
        typedef float Half __attribute__((vector_size(WIDTH / 2 * sizeof(float))));
        Half first, second;
        std::memcpy(&first, lanes, sizeof(Half));
        std::memcpy(&second, lanes + WIDTH / 2, sizeof(Half));
        const Half sums = first + second;
        return sum_of<WIDTH / 2>(reinterpret_cast<const float*>(&sums));
    }
}

// Scores of QUERIES queries with ROWS rows of `d` columns each; `stride` numbers lie between the scores of two queries.
template <int QUERIES, int ROWS, typename Number>
inline __attribute__((always_inline)) void score_tile(
    const float* queries, const Number* rows, const Number* bias, int64_t d, float* scores, int64_t stride) {
    Floats sums[ROWS][QUERIES] = {};
    const auto add_products = [&](auto load_query, auto load_row) __attribute__((always_inline)) {
        Floats loaded[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) loaded[r] = load_row(rows + r * d);
#pragma GCC unroll 16
        for (int q = 0; q < QUERIES; q++) {
            const Floats query = load_query(queries + q * d);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) sums[r][q] += loaded[r] * query;
        }
    };
    int64_t k = 0;
    for (; k + LANES <= d; k += LANES) {
        const auto load_at_k = [k](const auto* numbers) __attribute__((always_inline)) { return load(numbers + k); };
        add_products(load_at_k, load_at_k);
    }
    if (k < d) {
        const auto load_rest = [k, d](const auto* numbers) { return load_last(numbers + k, d - k); };
        add_products(load_rest, load_rest);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        const float row_bias = bias ? as_float(bias[r]) : 0.0f;
#pragma GCC unroll 16
        for (int q = 0; q < QUERIES; q++) {
            scores[q * stride + r] = sum_of<LANES>(reinterpret_cast<const float*>(&sums[r][q])) + row_bias;
        }
    }
}

template <int QUERIES, typename Number>
void score_block(
    const float* queries, const Number* rows, const Number* bias, int64_t block_rows, int64_t d, float* scores,
    int64_t stride) {
    constexpr int ROWS = rows_for(QUERIES);
    int64_t r = 0;
    for (; r + ROWS <= block_rows; r += ROWS) {
        score_tile<QUERIES, ROWS>(queries, rows + r * d, bias ? bias + r : nullptr, d, scores + r, stride);
    }
    for (; r < block_rows; r++) {
        score_tile<QUERIES, 1>(queries, rows + r * d, bias ? bias + r : nullptr, d, scores + r, stride);
    }
}

// Takes `count` queries, any number from 1 to MOST_QUERIES, to the code that was compiled for that many.
template <int QUERIES = MOST_QUERIES, typename Number, typename... Others>
inline void score_queries(int64_t count, const float* queries, const Number* rows, Others... others) {
    if constexpr (QUERIES > 1) {
        if (count < QUERIES) return score_queries<QUERIES - 1>(count, queries, rows, others...);
    }
    score_block<QUERIES>(queries, rows, others...);
}

template <typename Number>
void score_blocks(
    const float* hidden, const Number* weight, const int64_t* blocks, const Number* bias, float* scores, int64_t m,
    int64_t d, int64_t n, int64_t block_rows, [[maybe_unused]] int64_t threads) {
    const int64_t stride = n * block_rows;
    // The fewest groups of queries, of about equal size.
    const int64_t groups = (m + MOST_QUERIES - 1) / MOST_QUERIES;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < n; i++) {
        float* const block_scores = scores + i * block_rows;
        if (blocks[i] < 0) {
            for (int64_t q = 0; q < m; q++) {
                std::fill_n(block_scores + q * stride, block_rows, -std::numeric_limits<float>::infinity());
            }
            continue;
        }
        const Number* const rows = weight + blocks[i] * block_rows * d;
        const Number* const block_bias = bias ? bias + blocks[i] * block_rows : nullptr;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t first = m * group / groups;
            const int64_t count = m * (group + 1) / groups - first;
            score_queries(
                count, hidden + first * d, rows, block_bias, block_rows, d, block_scores + first * stride, stride);
        }
    }
}

}  // namespace

// hidden fp32 [m, d], weight [B, block_rows, d], blocks int64 [n], bias [B, block_rows] or null, scores fp32
// [m, n * block_rows], all contiguous. Returns whether every block is below `B`; nothing is written where one is not.
#define DEFINE_BLOCK_SCORES(NAME, NUMBER)                                                                             \
    extern "C" bool NAME(                                                                                             \
        const float* hidden, const NUMBER* weight, const int64_t* blocks, const NUMBER* bias, float* scores,          \
        int64_t m, int64_t d, int64_t n, int64_t B, int64_t block_rows, int64_t threads) {                            \
        if (std::any_of(blocks, blocks + n, [B](int64_t block) { return block >= B; })) return false;                 \
        score_blocks(hidden, weight, blocks, bias, scores, m, d, n, block_rows, threads);                             \
        return true;                                                                                                  \
    }

DEFINE_BLOCK_SCORES(block_scores_float32, float)
DEFINE_BLOCK_SCORES(block_scores_bfloat16, BFloat16)
DEFINE_BLOCK_SCORES(block_scores_float16, Float16)
