#include "tests/testutil/thread_ranks.h"

#include <mutex>
#include <set>
#include <stdexcept>

#include "c10/util/intrusive_ptr.h"
#include "gtest/gtest-spi.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::testutil {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

TEST(RunRanksTest, RunsEachRankOnceInAGroupOfThatSize) {
  std::mutex mutex;
  std::multiset<int> ranks;
  RunRanks(4, [&](int rank, GroupPtr group) {
    EXPECT_EQ(group->getRank(), rank);
    EXPECT_EQ(group->getSize(), 4);
    const std::lock_guard<std::mutex> lock(mutex);
    ranks.insert(rank);
  });
  EXPECT_EQ(ranks, (std::multiset<int>{0, 1, 2, 3}));
}

TEST(RunRanksTest, AFailedExpectationOnARankFailsTheTest) {
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(
      RunRanks(2, [](int rank, GroupPtr) { EXPECT_NE(rank, 1); }), "rank 1");
}

TEST(RunRanksTest, AnExceptionOnARankFailsTheTest) {
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(
      RunRanks(2,
               [](int rank, GroupPtr) {
                 if (rank == 1) throw std::runtime_error("out of luck");
               }),
      "out of luck");
}

}  // namespace
}  // namespace trainer_lora::testutil
