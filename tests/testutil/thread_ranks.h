// The ranks of a job as threads of the test, for what needs collectives but no
// processes:
//
//   RunRanks(2, [](int rank, c10::intrusive_ptr<c10d::ProcessGroup> group) {
//     LORA_ASSERT_OK_AND_ASSIGN(auto mesh, DeviceMesh::Create(group));
//     EXPECT_EQ(mesh->rank(), rank);
//   });
#ifndef TRAINER_LORA_TESTS_TESTUTIL_THREAD_RANKS_H_
#define TRAINER_LORA_TESTS_TESTUTIL_THREAD_RANKS_H_

#include <chrono>
#include <functional>

#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::testutil {

// Calls `body` once for each rank in [0, world_size), each on its own thread
// and with its own Gloo group on loopback, and returns when all have returned.
// A failed expectation on any thread fails the test, as does an exception; both
// name the rank. A rank that waits for one that left early gets an error within
// `timeout`. State of the thread, such as GradMode, is a new thread's.
void RunRanks(
    int world_size,
    const std::function<
        void(int rank, c10::intrusive_ptr<c10d::ProcessGroup> group)>& body,
    std::chrono::milliseconds timeout = std::chrono::seconds(60));

// Lets the threads of this process make collectives at the same time; RunRanks
// calls it. It must come before the first collective of the process.
void AllowRanksOnThreads();

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_THREAD_RANKS_H_
