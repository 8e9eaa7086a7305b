// The loops that a guess costs, over whole rows of experts. Exact: what a processor has makes a difference to time alone.

#pragma once

#include <cstddef>
#include <cstdint>

namespace spark {

// sums[i] = the sum of every rows[r][i].
void add_rows(int32_t * sums, const int16_t * const * rows, size_t n_rows, uint32_t n);

// What experts that were not selected are corrected by, in place of their scores: those above 0 come down by a part of
// 2^shift of it, rounded to the nearest.
void steps_down(int32_t * scores, uint32_t n, uint32_t shift);

// rows[r][i] += steps[i], kept to what 16 bits hold. Rows may be the same.
void correct_rows(int16_t * const * rows, size_t n_rows, const int32_t * steps, uint32_t n);

// The first of the highest scores among experts without a slot; -1 where none of those is at least `least`.
int64_t best_missing(const int32_t * scores, const int32_t * slot_of, uint32_t n, int32_t least);

}  // namespace spark
