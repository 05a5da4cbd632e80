#include "distributed/internal/run_collective.h"

#include <stdexcept>

#include "absl/status/status.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::distributed::internal {
namespace {

using ::trainer_lora::testutil::StatusIs;

// As c10d's C10D_NCCL_CHECK words it.
constexpr char kNcclError[] =
    "NCCL error in: NCCLUtils.cpp:94, invalid usage, NCCL version 2.28.9\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\n"
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a0\n"
    "Exception raised from create at NCCLUtils.cpp:94";

TEST(CallCollectiveTest, KeepsTheLastErrorOfNccl) {
  EXPECT_THAT(
      CallCollective(
          "connecting",
          [] { TORCH_CHECK_WITH(DistBackendError, false, kNcclError); }),
      StatusIs(
          absl::StatusCode::kUnavailable,
          "connecting failed: NCCL error in: NCCLUtils.cpp:94, invalid "
          "usage, NCCL version 2.28.9: Duplicate GPU detected : rank 1 and "
          "rank 0 both on CUDA device 1a0"));
}

TEST(CallCollectiveTest, LeavesOutFurtherLinesOfOtherErrors) {
  EXPECT_THAT(
      CallCollective(
          "all-reduce",
          [] { throw std::runtime_error("Timed out\nframe #0: main"); }),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               "all-reduce failed: Timed out"));
}

}  // namespace
}  // namespace trainer_lora::distributed::internal
