// `reference.block_scores`, `scattered_scores` and `packed_scores` for CPUs: reads each row where it lies, once from
// memory, and writes the scores alone. Scattered rows are blocks of one; packed rows are all of them, in order.
//
// Rows are multiplied in tiles of a few queries by a few rows. All sums of a tile stay in registers, and several of
// them are under way at a time, as each addition waits for the one before it. Nothing is packed, which is what a matrix
// product spends most of its time on where there are few queries. Sums are in fp32 for all types.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

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
// Sums of a tile, which has as many rows as fit its queries: they and what is multiplied fit sixteen registers.
constexpr int TILE = 12;
constexpr int MOST_QUERIES = 6;

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef float Four __attribute__((vector_size(4 * sizeof(float))));
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

// Keeps in a register what is used several times. Compilers short of registers would rather read it again for each
// product, and a CPU reads no more vectors in a cycle than it multiplies.
template <int USES>
inline Floats in_register(Floats loaded) {
#if defined(__AVX512F__)
    if constexpr (USES > 1) asm("" : "+v"(loaded));
#elif defined(__AVX__)
    if constexpr (USES > 1) asm("" : "+x"(loaded));
#endif
    return loaded;
}

template <typename Number>
inline float as_float(Number number) {
    Number numbers[LANES] = {number};
    return load(numbers)[0];
}

// Lanes FIRST and SECOND of each four of `a`, and then those of `b`: within fours, one instruction does it.
template <int FIRST, int SECOND, size_t... LANE>
inline Floats of_fours(const Floats& a, const Floats& b, std::index_sequence<LANE...>) {
    return Floats{(LANE % 4 < 2 ? a : b)[LANE / 4 * 4 + (LANE % 2 ? SECOND : FIRST)]...};
}

inline Floats add_neighbours(const Floats& a, const Floats& b) {
    constexpr auto lanes = std::make_index_sequence<LANES>();
    return of_fours<0, 2>(a, b, lanes) + of_fours<1, 3>(a, b, lanes);
}

// The sums of all lanes of four vectors: together they take half the instructions that they would one by one.
inline Four sums_of(const Floats& a, const Floats& b, const Floats& c, const Floats& d) {
    const Floats lanes = add_neighbours(add_neighbours(a, b), add_neighbours(c, d));
    Four parts[LANES / 4];
    std::memcpy(parts, &lanes, sizeof(lanes));
    Four sums = parts[0];
    for (int part = 1; part < LANES / 4; part++) sums += parts[part];
    return sums;
}

// The product of the last columns, where they do not fill a cache line.
template <typename Number>
__attribute__((noinline)) float product_of(const float* query, const Number* row, int64_t count) {
    Floats sums = {};
    int64_t k = 0;
    for (; k + LANES <= count; k += LANES) sums += load(query + k) * load(row + k);
    float sum = sums_of(sums, Floats{}, Floats{}, Floats{})[0];
    for (; k < count; k++) sum += query[k] * as_float(row[k]);
    return sum;
}

// Scores of QUERIES queries with ROWS rows of `d` columns each; `stride` numbers lie between the scores of two queries.
// Where it FETCHES, the ROWS rows `ahead` come from memory into the cache meanwhile, about; one more is looked up.
// Not inlined: what lives around a tile would take registers from its sums.
template <bool FETCHES, int QUERIES, int ROWS, typename Number>
__attribute__((noinline)) void score_tile(
    const float* queries, const Number* const* rows, const Number* const* ahead, const float* bias, int64_t d,
    float* scores, int64_t stride) {
    constexpr int64_t CACHE_LINE = 64 / sizeof(Number);
    constexpr int COUNT = (QUERIES * ROWS + 3) / 4 * 4;
    // With many queries, the addresses to fetch in a longer loop leave too few registers.
    constexpr bool IS_SHORT = FETCHES && QUERIES > 4 && ROWS > 1;
    constexpr int64_t STEP = IS_SHORT ? std::max<int64_t>(LANES, CACHE_LINE / ROWS) : CACHE_LINE;
    static_assert(CACHE_LINE % STEP == 0);
    Floats sums[COUNT] = {};
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
            // What is fewer, queries or rows, stays in registers while the others pass.
            if constexpr (QUERIES < ROWS) {
                Floats held[QUERIES];
#pragma GCC unroll 16
                for (int q = 0; q < QUERIES; q++) held[q] = in_register<ROWS>(load(queries + q * d + k));
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    const Floats row = in_register<QUERIES>(load(rows[r] + k));
#pragma GCC unroll 16
                    for (int q = 0; q < QUERIES; q++) sums[q * ROWS + r] += held[q] * row;
                }
            } else {
                Floats held[ROWS];
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) held[r] = in_register<QUERIES>(load(rows[r] + k));
#pragma GCC unroll 16
                for (int q = 0; q < QUERIES; q++) {
                    const Floats query = in_register<ROWS>(load(queries + q * d + k));
#pragma GCC unroll 16
                    for (int r = 0; r < ROWS; r++) sums[q * ROWS + r] += held[r] * query;
                }
            }
        }
    }
    float totals[COUNT];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i += 4) {
        const Four four = sums_of(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        std::memcpy(totals + i, &four, sizeof(four));
    }
#pragma GCC unroll 16
    for (int q = 0; q < QUERIES; q++) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) scores[q * stride + r] = totals[q * ROWS + r] + bias[r];
    }
    if (lines_end == d) return;
    for (int r = 0; r < ROWS; r++) {
        for (int q = 0; q < QUERIES; q++) {
            scores[q * stride + r] += product_of(queries + q * d + lines_end, rows[r] + lines_end, d - lines_end);
        }
    }
}

// Rows that are scored together with all queries, while they are in the cache.
constexpr int CHUNK = TILE;

// The rows of a chunk and, where these are fetched, of the next one and one more; and the bias of the chunk's.
template <typename Number>
struct Chunk {
    const Number* rows[2 * CHUNK + 1];
    float bias[CHUNK];
};

// Which rows of the next chunk a group of queries fetches: each group does so for a part, so that memory has as long as
// all of them take. A group of -1 fetches nothing.
struct Share {
    int64_t group, groups;
    bool has(int64_t row) const { return row * groups / CHUNK == group; }
};

template <int QUERIES, int ROWS, typename Number>
int64_t score_tiles(
    const float* queries, const Chunk<Number>& chunk, Share share, int64_t start, int64_t count, int64_t d,
    float* scores, int64_t stride) {
    int64_t r = start;
    for (; r + ROWS <= count; r += ROWS) {
        const Number* const* const rows = chunk.rows + r;
        if (share.has(r)) {
            score_tile<true, QUERIES, ROWS>(queries, rows, rows + CHUNK, chunk.bias + r, d, scores + r, stride);
        } else {
            score_tile<false, QUERIES, ROWS>(queries, rows, rows, chunk.bias + r, d, scores + r, stride);
        }
    }
    return r;
}

// Takes `count` queries, any number from 1 to MOST_QUERIES, to the code that was compiled for that many.
template <int QUERIES = MOST_QUERIES, typename Number>
inline void score_rows(
    int64_t count, const float* queries, const Chunk<Number>& chunk, Share share, int64_t rows, int64_t d,
    float* scores, int64_t stride) {
    if constexpr (QUERIES > 1) {
        if (count < QUERIES) return score_rows<QUERIES - 1>(count, queries, chunk, share, rows, d, scores, stride);
    }
    constexpr int ROWS = TILE / QUERIES;
    int64_t done = score_tiles<QUERIES, ROWS>(queries, chunk, share, 0, rows, d, scores, stride);
    // The last rows.
    if constexpr (ROWS > 4) done = score_tiles<QUERIES, 4>(queries, chunk, share, done, rows, d, scores, stride);
    score_tiles<QUERIES, 1>(queries, chunk, share, done, rows, d, scores, stride);
}

constexpr int64_t FEWEST_FETCHED_BYTES = 1 << 19;
constexpr int64_t PAGE_BYTES = 4096;

// All rows in order, or the rows of some blocks: which row of the weight each column of the scores belongs to.
struct Columns {
    const int64_t* blocks;
    int64_t block_rows;

    // Calls `take(i, row, count)` for the columns `first + i` up to `end`: rows in order, from `row` on, which is negative
    // where there is no block.
    template <typename Take>
    inline void each_run(int64_t first, int64_t end, Take take) const {
        if (!blocks) return take(0, first, end - first);
        int64_t block = first / block_rows, offset = first % block_rows;
        for (int64_t i = 0; first + i < end; block++, offset = 0) {
            const int64_t count = std::min(block_rows - offset, end - first - i);
            take(i, blocks[block] < 0 ? -1 : blocks[block] * block_rows + offset, count);
            i += count;
        }
    }
};

template <typename Number>
void score_columns(
    const float* hidden, const Number* weight, Columns columns, const Number* bias, float* scores, int64_t m,
    int64_t d, int64_t n, [[maybe_unused]] int64_t threads) {
    // The fewest groups of queries, of about equal size.
    const int64_t groups = (m + MOST_QUERIES - 1) / MOST_QUERIES;
    // CPUs fetch by themselves, though only within a page; for few queries that is enough where a row fills one. Few
    // bytes arrive within microseconds anyway; more of them a verification has driven out of the cache since the last
    // draft.
    const int64_t row_bytes = d * sizeof(Number);
    const bool fetches = n * row_bytes > FEWEST_FETCHED_BYTES && (m > 3 || row_bytes < PAGE_BYTES);
    const int64_t looked_up = fetches ? 2 * CHUNK + 1 : CHUNK;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < n; first += CHUNK) {
        const int64_t count = std::min<int64_t>(CHUNK, n - first);
        Chunk<Number> chunk;
        std::fill_n(chunk.bias, CHUNK, 0.0f);
        const int64_t known = std::min(looked_up, n - first);
        std::fill(chunk.rows + known, chunk.rows + looked_up, weight);
        int64_t absent = 0;
        columns.each_run(first, first + known, [&](int64_t i, int64_t row, int64_t run) {
            // Any row in the place of none: scoring it is quicker than asking.
            for (int64_t j = 0; j < run; j++) chunk.rows[i + j] = weight + (row < 0 ? 0 : row + j) * d;
            if (i >= count) return;
            run = std::min(run, count - i);
            if (row < 0) absent += run;
            for (int64_t j = 0; j < run && bias && row >= 0; j++) chunk.bias[i + j] = as_float(bias[row + j]);
        });
        for (int64_t group = 0; group < groups && absent < count; group++) {
            const int64_t query = m * group / groups;
            const Share share{fetches ? group : -1, groups};
            score_rows(
                m * (group + 1) / groups - query, hidden + query * d, chunk, share, count, d,
                scores + query * n + first, n);
        }
        if (absent == 0) continue;
        columns.each_run(first, first + count, [&](int64_t i, int64_t row, int64_t run) {
            for (int64_t q = 0; row < 0 && q < m; q++) {
                std::fill_n(scores + q * n + first + i, run, -std::numeric_limits<float>::infinity());
            }
        });
    }
}

// The arguments of a call, laid out as `cpu.py` packs them.
template <typename Number>
struct Call {
    const float* hidden;    // [m, d]
    const Number* weight;   // [B, block_rows, d]
    const int64_t* blocks;  // [n], or null for all B in order (n = B)
    const Number* bias;     // [B, block_rows], or null
    float* scores;          // [m, n * block_rows]
    int64_t m, d, n, B, block_rows, threads;
};

// All tensors are contiguous. Returns whether every block is below `B`; nothing is written where one is not.
template <typename Number>
bool score_blocks(const void* packed) {
    Call<Number> call;
    std::memcpy(&call, packed, sizeof(call));
    const auto is_beyond = [&](int64_t block) { return block >= call.B; };
    if (call.blocks && std::any_of(call.blocks, call.blocks + call.n, is_beyond)) return false;
    score_columns(
        call.hidden, call.weight, Columns{call.blocks, call.block_rows}, call.bias, call.scores, call.m, call.d,
        call.n * call.block_rows, call.threads);
    return true;
}

}  // namespace

extern "C" bool head_scores_float32(const void* call) { return score_blocks<float>(call); }
extern "C" bool head_scores_bfloat16(const void* call) { return score_blocks<BFloat16>(call); }
extern "C" bool head_scores_float16(const void* call) { return score_blocks<Float16>(call); }
