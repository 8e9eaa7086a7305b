#include "guess_loops.h"

#include <algorithm>

// x86-64's oldest vectors take twice as long as AVX2 does, which nearly every such processor has: the loops are written
// for it once more. Everything else, and the last columns that fill no vector, take the plain ones.
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define SPARK_AVX2 __attribute__((target("avx2")))
#endif
#if defined(__GNUC__) && !defined(__clang__)
#define SPARK_VECTORS __attribute__((optimize("O3")))
#else
#define SPARK_VECTORS
#endif

namespace spark {

namespace {

#if defined(SPARK_AVX2)

constexpr uint32_t LANES = 8;  // of 32 bits
constexpr uint32_t MANY = 8;   // vectors that are kept in registers over all rows

bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2");
    return has;
}

template <typename type> SPARK_AVX2 inline __m256i load(const type * from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
}
template <typename type> SPARK_AVX2 inline void store(type * to, __m256i value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), value);
}

// From column `first` on, in blocks of so many vectors; the first column that is left.
template <uint32_t vectors>
SPARK_AVX2 uint32_t add_blocks(int32_t * sums, const int16_t * const * rows, size_t n_rows, uint32_t first, uint32_t n) {
    for (; first + vectors * LANES <= n; first += vectors * LANES) {
        __m256i block[vectors];
#pragma GCC unroll 8
        for (uint32_t i = 0; i < vectors; i++) {
            block[i] = _mm256_setzero_si256();
        }
        for (size_t r = 0; r < n_rows; r++) {
#pragma GCC unroll 8
            for (uint32_t i = 0; i < vectors; i++) {
                const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[r] + first + i * LANES));
                block[i] = _mm256_add_epi32(block[i], _mm256_cvtepi16_epi32(part));
            }
        }
#pragma GCC unroll 8
        for (uint32_t i = 0; i < vectors; i++) {
            store(sums + first + i * LANES, block[i]);
        }
    }
    return first;
}

SPARK_AVX2 uint32_t step_blocks(int32_t * scores, uint32_t n, uint32_t shift) {
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (shift - 1));
    uint32_t first = 0;
    for (; first + LANES <= n; first += LANES) {
        const __m256i error = _mm256_sub_epi32(half, _mm256_max_epi32(load(scores + first), zero));
        store(scores + first, _mm256_sra_epi32(error, _mm_cvtsi32_si128(int(shift))));
    }
    return first;
}

// Ends before a step that 16 bits do not hold.
template <uint32_t vectors>
SPARK_AVX2 uint32_t correct_blocks(int16_t * const * rows, size_t n_rows, const int32_t * steps, uint32_t first, uint32_t n) {
    constexpr uint32_t WIDE = 2 * LANES;
    for (; first + vectors * WIDE <= n; first += vectors * WIDE) {
        __m256i block[vectors];
        __m256i any = _mm256_setzero_si256(), lost = any;
#pragma GCC unroll 8
        for (uint32_t i = 0; i < vectors; i++) {
            const __m256i low = load(steps + first + i * WIDE), high = load(steps + first + i * WIDE + LANES);
            const __m256i packed = _mm256_packs_epi32(low, high);  // of each half a half
            block[i] = _mm256_permute4x64_epi64(packed, 0xd8);
            any = _mm256_or_si256(any, packed);
            const __m256i sign = _mm256_srai_epi16(packed, 15);
            lost = _mm256_or_si256(lost, _mm256_xor_si256(low, _mm256_unpacklo_epi16(packed, sign)));
            lost = _mm256_or_si256(lost, _mm256_xor_si256(high, _mm256_unpackhi_epi16(packed, sign)));
        }
        if (!_mm256_testz_si256(lost, lost)) {
            break;
        }
        if (_mm256_testz_si256(any, any)) {
            continue;  // many experts are guessed rightly not to be selected
        }
        for (size_t r = 0; r < n_rows; r++) {
#pragma GCC unroll 8
            for (uint32_t i = 0; i < vectors; i++) {
                int16_t * part = rows[r] + first + i * WIDE;
                store(part, _mm256_adds_epi16(load(part), block[i]));
            }
        }
    }
    return first;
}

// The highest score without a slot in as many whole vectors as there are.
SPARK_AVX2 int32_t highest_missing(const int32_t * scores, const int32_t * slot_of, uint32_t n) {
    const __m256i none = _mm256_set1_epi32(INT32_MIN);
    __m256i best = none;
    for (uint32_t first = 0; first + LANES <= n; first += LANES) {
        const __m256i missing = _mm256_srai_epi32(load(slot_of + first), 31);
        best = _mm256_max_epi32(best, _mm256_blendv_epi8(none, load(scores + first), missing));
    }
    int32_t lanes[LANES];
    store(lanes, best);
    return *std::max_element(lanes, lanes + LANES);
}

#endif

}  // namespace

SPARK_VECTORS void add_rows(int32_t * sums, const int16_t * const * rows, size_t n_rows, uint32_t n) {
    uint32_t first = 0;
#if defined(SPARK_AVX2)
    if (has_avx2()) {
        first = add_blocks<MANY>(sums, rows, n_rows, 0, n);
        first = add_blocks<1>(sums, rows, n_rows, first, n);
    }
#endif
    std::fill(sums + first, sums + n, 0);
    for (size_t r = 0; r < n_rows; r++) {
        for (uint32_t i = first; i < n; i++) {
            sums[i] += rows[r][i];
        }
    }
}

SPARK_VECTORS void steps_down(int32_t * scores, uint32_t n, uint32_t shift) {
    uint32_t first = 0;
#if defined(SPARK_AVX2)
    first = has_avx2() ? step_blocks(scores, n, shift) : 0;
#endif
    for (uint32_t i = first; i < n; i++) {
        scores[i] = ((1 << (shift - 1)) - std::max(scores[i], 0)) >> shift;
    }
}

SPARK_VECTORS void correct_rows(int16_t * const * rows, size_t n_rows, const int32_t * steps, uint32_t n) {
    uint32_t first = 0;
#if defined(SPARK_AVX2)
    if (has_avx2()) {
        first = correct_blocks<MANY / 2>(rows, n_rows, steps, 0, n);
        first = correct_blocks<1>(rows, n_rows, steps, first, n);
    }
#endif
    for (size_t r = 0; r < n_rows; r++) {
        for (uint32_t i = first; i < n; i++) {
            rows[r][i] = int16_t(std::clamp<int32_t>(rows[r][i] + steps[i], INT16_MIN, INT16_MAX));
        }
    }
}

SPARK_VECTORS int64_t best_missing(const int32_t * scores, const int32_t * slot_of, uint32_t n, int32_t least) {
    uint32_t first = 0;
    int32_t best = INT32_MIN;
#if defined(SPARK_AVX2)
    if (has_avx2()) {
        first = n / LANES * LANES;
        best = highest_missing(scores, slot_of, first);
    }
#endif
    for (uint32_t i = first; i < n; i++) {
        best = std::max(best, slot_of[i] < 0 ? scores[i] : INT32_MIN);
    }
    for (uint32_t i = 0; best >= least && i < n; i++) {
        if (slot_of[i] < 0 && scores[i] == best) {
            return i;
        }
    }
    return -1;
}

}  // namespace spark
