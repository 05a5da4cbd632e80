// What a benchmark reports of contenders on a machine whose speed drifts:
//
//   const auto [own, baseline] = TakeTurns(
//       state, [&] { return SecondsOnHost([&] { Own(); }); },
//       [&] { return SecondsOnHost([&] { Baseline(); }); });
//   state.counters["vs_baseline"] = own / baseline;
#ifndef TRAINER_LORA_TESTS_TESTUTIL_TAKE_TURNS_H_
#define TRAINER_LORA_TESTS_TESTUTIL_TAKE_TURNS_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include "benchmark/benchmark.h"
#include "tests/testutil/median.h"

namespace trainer_lora::testutil {

// The seconds that `function` takes, which returns nothing.
template <typename Function>
double SecondsOnHost(const Function& function) {
  const auto begin = std::chrono::steady_clock::now();
  function();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

// Runs the benchmark's iterations, in each of which every contender has a turn,
// in their order. A contender is a function that returns the seconds that
// count, so that it may do more than it times. One turn before the others
// warms up and counts nowhere. The first contender's seconds are the time of
// the iteration, for UseManualTime(). Returns the median of each; zeros after
// state.SkipWithError().
template <typename... Contenders>
std::array<double, sizeof...(Contenders)> TakeTurns(
    benchmark::State& state, const Contenders&... contenders) {
  constexpr size_t kCount = sizeof...(Contenders);
  // In a list in braces, calls are made from left to right.
  const auto turn = [&] { return std::array<double, kCount>{contenders()...}; };
  std::array<std::vector<double>, kCount> seconds;
  turn();
  for (auto _ : state) {
    const std::array<double, kCount> times = turn();
    if (state.error_occurred()) break;
    for (size_t i = 0; i < kCount; ++i) seconds[i].push_back(times[i]);
    state.SetIterationTime(times[0]);
  }
  std::array<double, kCount> medians = {};
  if (state.error_occurred()) return medians;
  for (size_t i = 0; i < kCount; ++i)
    medians[i] = Median(std::move(seconds[i]));
  return medians;
}

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_TAKE_TURNS_H_
