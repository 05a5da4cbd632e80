// What a benchmark reports of turns on a noisy machine:
//
//   state.counters["ratio"] = Median(baseline) / Median(own);
#ifndef TRAINER_LORA_TESTS_TESTUTIL_MEDIAN_H_
#define TRAINER_LORA_TESTS_TESTUTIL_MEDIAN_H_

#include <algorithm>
#include <vector>

namespace trainer_lora::testutil {

// The upper one of an even number of values, of which there is one at least.
inline double Median(std::vector<double> values) {
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_MEDIAN_H_
