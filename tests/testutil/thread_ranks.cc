#include "tests/testutil/thread_ranks.h"

#include <stdlib.h>  // For setenv.

#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "c10/util/intrusive_ptr.h"
#include "distributed/process_group.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::testutil {

void AllowRanksOnThreads() {
  // c10d's flight recorder, of which a process has one, is not thread-safe. It
  // reads this variable when it is first used; 0 turns it off.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/1);
}

void RunRanks(
    int world_size,
    const std::function<
        void(int rank, c10::intrusive_ptr<c10d::ProcessGroup> group)>& body,
    std::chrono::milliseconds timeout) {
  AllowRanksOnThreads();
  distributed::ProcessGroupOptions options;
  options.timeout = timeout;
  options.bind_address = "127.0.0.1";
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(timeout);

  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&, rank] {
      SCOPED_TRACE("rank " + std::to_string(rank));
      try {
        auto group = distributed::CreateGlooProcessGroup(store, rank,
                                                         world_size, options);
        ASSERT_TRUE(group.ok()) << group.status();
        body(rank, *std::move(group));
      } catch (const std::exception& exception) {
        ADD_FAILURE() << "threw " << exception.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace trainer_lora::testutil
