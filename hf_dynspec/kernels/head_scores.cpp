// `reference.block_scores`, `scattered_scores` and `packed_scores` for CPUs: reads each row where it lies, once from
// memory, and writes the scores alone. Scattered rows are blocks of one; packed rows are all of them, in order.
//
// Rows are multiplied in tiles of a few queries by a few rows. All sums of a tile stay in registers, and several of
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

// The product of the last columns, where they do not fill a cache line.
template <typename Number>
__attribute__((noinline)) float product_of(const float* query, const Number* row, int64_t count) {
    Floats sums = {};
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) sums += load(query + k) * load(row + k);
    float sum = sum_of<LANES>(reinterpret_cast<const float*>(&sums));
    for (; k < count; k++) sum += query[k] * as_float(row[k]);
    return sum;
}

// Scores of QUERIES queries with ROWS rows of `d` columns each; `stride` numbers lie between the scores of two queries.
// Where it FETCHES, the ROWS rows `ahead` come from memory into the cache meanwhile, about; one more is looked up.
template <bool FETCHES, int QUERIES, int ROWS, typename Number>
inline __attribute__((always_inline)) void score_tile(
    const float* queries, const Number* const* rows, const Number* const* ahead, const float* bias, int64_t d,
    float* scores, int64_t stride) {
    constexpr int64_t CACHE_LINE = 64 / sizeof(Number);
    Floats sums[ROWS][QUERIES] = {};
    // Fetching anew in each step costs as much as a load, which matters with few queries; with many, the addresses in
    // a longer loop leave too few registers.
    constexpr int64_t STEP = QUERIES <= 3 || ROWS == 1 ? CACHE_LINE : std::max<int64_t>(LANES, CACHE_LINE / ROWS);
    const int64_t lines_end = d - d % CACHE_LINE;
    // One row after the other: memory is fastest in its own order.
    const Number* fetched = *ahead;
    int64_t unfetched = d;
    for (int64_t first = 0; first < lines_end; first += STEP) {
        if constexpr (FETCHES) {
#pragma GCC unroll 16
            for (int64_t i = 0; i < ROWS * STEP; i += CACHE_LINE) __builtin_prefetch(fetched + i);
            fetched += ROWS * STEP;
            unfetched -= ROWS * STEP;
            while (unfetched <= 0) {
                fetched = *++ahead - unfetched;
                unfetched += d;
            }
        }
#pragma GCC unroll 4
        for (int64_t k = first; k < first + STEP; k += LANES) {
            Floats loaded[ROWS];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) loaded[r] = load(rows[r] + k);
#pragma GCC unroll 16
            for (int q = 0; q < QUERIES; q++) {
                const Floats query = load(queries + q * d + k);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) sums[r][q] += loaded[r] * query;
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 16
        for (int q = 0; q < QUERIES; q++) {
            scores[q * stride + r] = sum_of<LANES>(reinterpret_cast<const float*>(&sums[r][q])) + bias[r];
        }
    }
    if (lines_end == d) return;
    for (int r = 0; r < ROWS; r++) {
        for (int q = 0; q < QUERIES; q++) {
            scores[q * stride + r] += product_of(queries + q * d + lines_end, rows[r] + lines_end, d - lines_end);
        }
    }
}

// Rows that are scored together with all queries, while they are in the cache.
constexpr int CHUNK = 8;
static_assert(CHUNK % rows_for(1) == 0);

// The rows of a chunk and of the next one, one more, and the bias of the chunk's.
template <typename Number>
struct Chunk {
    const Number* rows[2 * CHUNK + 1];
    float bias[CHUNK];
};

// Which rows of the next chunk a group of queries fetches: each group does so for a part, so that memory has as long as
// all of them take. A group of -1 fetches nothing.
struct Share {
    int64_t group, groups;
    bool has(int64_t row) const { return row / 4 % groups == group; }
};

template <int QUERIES, typename Number>
void score_rows(
    const float* queries, const Chunk<Number>& chunk, Share share, int64_t count, int64_t d, float* scores,
    int64_t stride) {
    constexpr int ROWS = rows_for(QUERIES);
    int64_t r = 0;
    for (; r + ROWS <= count; r += ROWS) {
        const Number* const* const rows = chunk.rows + r;
        if (share.has(r)) {
            score_tile<true, QUERIES, ROWS>(queries, rows, rows + CHUNK, chunk.bias + r, d, scores + r, stride);
        } else {
            score_tile<false, QUERIES, ROWS>(queries, rows, rows, chunk.bias + r, d, scores + r, stride);
        }
    }
    for (; r < count; r++) {
        const Number* const* const rows = chunk.rows + r;
        score_tile<false, QUERIES, 1>(queries, rows, rows, chunk.bias + r, d, scores + r, stride);
    }
}

// Takes `count` queries, any number from 1 to MOST_QUERIES, to the code that was compiled for that many.
template <int QUERIES = MOST_QUERIES, typename... Others>
inline void score_queries(int64_t count, const float* queries, const Others&... others) {
    if constexpr (QUERIES > 1) {
        if (count < QUERIES) return score_queries<QUERIES - 1>(count, queries, others...);
    }
    score_rows<QUERIES>(queries, others...);
}

constexpr int64_t FEWEST_FETCHED_BYTES = 4 << 20;
constexpr int64_t PAGE_BYTES = 4096;

// All rows in order, or the rows of some blocks: which row of the weight each column of the scores belongs to.
struct Columns {
    const int64_t* blocks;
    int64_t block_rows;

    // Calls `take(i, row)` for the columns `first + i` up to `end`; the row is negative where there is no block.
    template <typename Take>
    inline void each(int64_t first, int64_t end, Take take) const {
        if (!blocks) {
            for (int64_t i = 0; first + i < end; i++) take(i, first + i);
            return;
        }
        int64_t block = first / block_rows, offset = first % block_rows;
        for (int64_t i = 0; first + i < end; i++) {
            take(i, blocks[block] < 0 ? -1 : blocks[block] * block_rows + offset);
            if (++offset == block_rows) {
                offset = 0;
                block++;
            }
        }
    }
};

template <typename Number>
void score_columns(
    const float* hidden, const Number* weight, Columns columns, const Number* bias, float* scores, int64_t m,
    int64_t d, int64_t n, [[maybe_unused]] int64_t threads) {
    // The fewest groups of queries, of about equal size.
    const int64_t groups = (m + MOST_QUERIES - 1) / MOST_QUERIES;
    // CPUs fetch by themselves, though only within a page; for few queries that is enough where a row fills one. What
    // is smaller than this is often in the cache.
    const int64_t row_bytes = d * sizeof(Number);
    const bool fetches = n * row_bytes > FEWEST_FETCHED_BYTES && (m > 3 || row_bytes < PAGE_BYTES);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < n; first += CHUNK) {
        const int64_t count = std::min<int64_t>(CHUNK, n - first);
        Chunk<Number> chunk;
        std::fill_n(chunk.rows, 2 * CHUNK + 1, weight);
        int64_t absent = 0;
        columns.each(first, std::min(first + 2 * CHUNK + 1, n), [&](int64_t i, int64_t row) {
            if (row >= 0) chunk.rows[i] = weight + row * d;
            if (i < CHUNK) {
                chunk.bias[i] = bias && row >= 0 ? as_float(bias[row]) : 0.0f;
                absent += row < 0;
            }
        });
        for (int64_t group = 0; group < groups && absent < count; group++) {
            const int64_t query = m * group / groups;
            const Share share{fetches ? group : -1, groups};
            score_queries(
                m * (group + 1) / groups - query, hidden + query * d, chunk, share, count, d,
                scores + query * n + first, n);
        }
        if (absent == 0) continue;
        columns.each(first, first + count, [&](int64_t i, int64_t row) {
            for (int64_t q = 0; row < 0 && q < m; q++) {
                scores[q * n + first + i] = -std::numeric_limits<float>::infinity();
            }
        });
    }
}

}  // namespace

// hidden fp32 [m, d], weight [B, block_rows, d], blocks int64 [n] or null for all B in order (n = B), bias
// [B, block_rows] or null, scores fp32 [m, n * block_rows], all contiguous. Returns whether every block is below `B`;
// nothing is written where one is not.
#define DEFINE_HEAD_SCORES(NAME, NUMBER)                                                                              \
    extern "C" bool NAME(                                                                                             \
        const float* hidden, const NUMBER* weight, const int64_t* blocks, const NUMBER* bias, float* scores,          \
        int64_t m, int64_t d, int64_t n, int64_t B, int64_t block_rows, int64_t threads) {                            \
        if (blocks && std::any_of(blocks, blocks + n, [B](int64_t block) { return block >= B; })) return false;       \
        score_columns(hidden, weight, Columns{blocks, block_rows}, bias, scores, m, d, n * block_rows, threads);      \
        return true;                                                                                                  \
    }

DEFINE_HEAD_SCORES(head_scores_float32, float)
DEFINE_HEAD_SCORES(head_scores_bfloat16, BFloat16)
DEFINE_HEAD_SCORES(head_scores_float16, Float16)
