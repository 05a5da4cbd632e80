#include "distributed/checkpoint/internal/shard_reader.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "c10/core/GradMode.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/internal/shard_destination.h"
#include "distributed/checkpoint/load_plan.h"
#include "distributed/checkpoint/safetensors_checkpoint.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/internal/guarded_step.h"

namespace trainer_lora::distributed::internal {
namespace {

// A part of a copy that one thread reads at once: the runs [begin, end), or, of
// a single one, the elements [first, first + count) of it.
struct Task {
  const PlannedCopy* copy;
  int64_t begin;
  int64_t end;
  int64_t first;
  int64_t count;
};

// Deals out the parts of the copies, in their order.
class TaskQueue {
 public:
  TaskQueue(absl::Span<const PlannedCopy> copies,
            absl::Span<const CheckpointTensor> sources)
      : copies_(copies), sources_(sources) {}

  // Nothing at the end, or after Stop().
  std::optional<Task> Next() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (copy_ == copies_.size()) return std::nullopt;
    const PlannedCopy& copy = copies_[copy_];
    Task task{&copy, run_, copy.ReadEnd(run_), first_, copy.run_elements};
    if (task.end == run_ + 1) {
      const int64_t element_size =
          TensorDtypeBits(sources_[copy.source].info->dtype) / 8;
      task.count =
          std::min(copy.run_elements - first_,
                   std::max<int64_t>(kMaxSpannedBytes / element_size, 1));
      first_ += task.count;
      if (first_ < copy.run_elements) return task;
    }
    first_ = 0;
    run_ = task.end;
    if (run_ == copy.num_runs) {
      run_ = 0;
      ++copy_;
    }
    return task;
  }

  void Stop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    copy_ = copies_.size();
  }

 private:
  const absl::Span<const PlannedCopy> copies_;
  const absl::Span<const CheckpointTensor> sources_;
  std::mutex mutex_;
  // What comes next.
  size_t copy_ = 0;
  int64_t run_ = 0;
  int64_t first_ = 0;
};

absl::Status ExecuteTask(const SafetensorsCheckpoint& checkpoint,
                         const Task& task, const ShardDestination& destination,
                         std::vector<char>& buffer, int64_t& bytes_read) {
  const PlannedCopy& copy = *task.copy;
  const CheckpointTensor& source = checkpoint.tensors()[copy.source];
  const SafetensorsFile& file = checkpoint.files()[source.file];
  const TensorDtype dtype = source.info->dtype;
  const int64_t element_size = TensorDtypeBits(dtype) / 8;

  const int64_t source_begin = copy.SourceBegin(task.begin) + task.first;
  const int64_t source_end =
      copy.SourceBegin(task.end - 1) + task.first + task.count;
  bytes_read = (source_end - source_begin) * element_size;
  if (task.end == task.begin + 1) {
    const int64_t local_begin = copy.LocalBegin(task.begin) + task.first;
    if (char* direct = destination.DirectPointer(dtype, local_begin);
        direct != nullptr) {
      return file.Read(*source.info, source_begin * element_size,
                       absl::MakeSpan(direct, bytes_read));
    }
  }
  if (buffer.size() < bytes_read) buffer.resize(bytes_read);
  LORA_RETURN_IF_ERROR(file.Read(*source.info, source_begin * element_size,
                                 absl::MakeSpan(buffer.data(), bytes_read)));
  for (int64_t run = task.begin; run < task.end; ++run) {
    const int64_t offset = copy.SourceBegin(run) + task.first - source_begin;
    destination.Write(dtype, buffer.data() + offset * element_size,
                      copy.LocalBegin(run) + task.first, task.count);
  }
  return absl::OkStatus();
}

// The first error of several threads.
class FirstError {
 public:
  void Update(const absl::Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    status_.Update(status);
  }
  absl::Status Get() const { return status_; }  // After all have ended.

 private:
  std::mutex mutex_;
  absl::Status status_;
};

}  // namespace

absl::Status ReadShards(const SafetensorsCheckpoint& checkpoint,
                        absl::Span<const PlannedCopy> copies,
                        absl::Span<const ShardDestination> destinations,
                        int num_threads, const BytesCallback& on_bytes,
                        const std::function<absl::Status()>& meanwhile) {
  TaskQueue queue(copies, checkpoint.tensors());
  FirstError error;
  std::mutex callback_mutex;
  const auto read = [&] {
    const at::NoGradGuard no_grad;  // It is off in one thread alone.
    std::vector<char> buffer;
    while (const std::optional<Task> task = queue.Next()) {
      int64_t bytes_read = 0;
      const absl::Status status =
          ExecuteTask(checkpoint, *task, destinations[task->copy->target],
                      buffer, bytes_read);
      if (!status.ok()) return status;
      const std::lock_guard<std::mutex> lock(callback_mutex);
      on_bytes(bytes_read);
    }
    return absl::OkStatus();
  };
  const auto run = [&](const std::function<absl::Status()>& function) {
    const absl::Status status =
        GuardedStep(absl::StrCat("loading ", checkpoint.path()), function);
    if (status.ok()) return;
    error.Update(status);
    queue.Stop();
  };

  std::vector<std::thread> threads;
  run([&] {
    for (int i = 0; i < num_threads; ++i) {
      threads.emplace_back([&] { run(read); });
    }
    return absl::OkStatus();
  });
  run(meanwhile);
  for (std::thread& thread : threads) thread.join();
  return error.Get();
}

}  // namespace trainer_lora::distributed::internal
