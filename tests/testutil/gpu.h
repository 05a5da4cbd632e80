// For tests that need a GPU. They are built for CUDA alone, and say so where
// there is none:
//
//   class NcclTest : public testutil::GpuTest {};
//   TEST_F(NcclTest, ...)
#ifndef TRAINER_LORA_TESTS_TESTUTIL_GPU_H_
#define TRAINER_LORA_TESTS_TESTUTIL_GPU_H_

#include "ATen/detail/CUDAHooksInterface.h"
#include "gtest/gtest.h"

namespace trainer_lora::testutil {

// The number of visible CUDA devices.
inline int NumGpus() { return at::detail::getCUDAHooks().deviceCount(); }

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (NumGpus() == 0) GTEST_SKIP() << "this machine has no GPU";
  }
};

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_GPU_H_
