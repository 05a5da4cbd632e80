#include "distributed/internal/run_collective.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "c10/core/Device.h"
#include "c10/util/Exception.h"
#include "c10/util/intrusive_ptr.h"
#include "config/internal/status_macros.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace trainer_lora::distributed::internal {

c10::intrusive_ptr<c10d::Work> StartCollective(
    const c10d::ProcessGroup& group,
    const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
  const std::vector<c10::Device> devices = group.getDeviceTypes();
  const bool is_cpu_alone =
      std::all_of(devices.begin(), devices.end(),
                  [](const c10::Device& device) { return device.is_cpu(); });
  static std::mutex mutex;
  std::unique_lock<std::mutex> lock(mutex, std::defer_lock);
  if (is_cpu_alone) lock.lock();
  return start();
}

absl::Status CallCollective(const std::string& what,
                            const std::function<void()>& call) {
  const std::string context = absl::StrCat(what, " failed");
  try {
    call();
    return absl::OkStatus();
  } catch (const c10::DistError& exception) {
    return StatusFromException(exception, context);
  } catch (const c10::Error& exception) {
    // c10d's check of a call, such as for a backend; Gloo's own are no
    // c10::Error.
    return absl::FailedPreconditionError(
        absl::StrCat(context, ": ", ErrorMessage(exception)));
  } catch (const std::exception& exception) {
    return StatusFromException(exception, context);
  }
}

absl::Status RunCollective(
    const c10d::ProcessGroup& group, const std::string& what,
    const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
  return CallCollective(what, [&] { StartCollective(group, start)->wait(); });
}

bool HasNccl(c10d::ProcessGroup& group) {
  try {
    return group.getBackend(at::kCUDA)->getBackendName() == "nccl";
  } catch (const c10::Error&) {
    return false;  // It has none for CUDA.
  }
}

absl::Status CheckCudaBackend(c10d::ProcessGroup& group,
                              const std::string& what) {
  if (!HasNccl(group)) return absl::OkStatus();
  switch (group.getBackend(at::kCUDA)->getError()) {
    case c10d::ErrorType::SUCCESS:
      return absl::OkStatus();
    case c10d::ErrorType::TIMEOUT:
      return absl::DeadlineExceededError(absl::StrCat(
          what, " failed: a collective of the group timed out on the device"));
    default:
      return absl::UnavailableError(absl::StrCat(
          what, " failed: a collective of the group failed on the device, ",
          "here or on another rank; c10d's log says why"));
  }
}

absl::StatusOr<at::Tensor> ReadResult(c10d::ProcessGroup& group,
                                      const std::string& what,
                                      const at::Tensor& result) {
  at::Tensor read = result.cpu();
  if (result.is_cuda()) LORA_RETURN_IF_ERROR(CheckCudaBackend(group, what));
  return read;
}

std::string ErrorMessage(const std::exception& exception) {
  const auto* error = dynamic_cast<const c10::Error*>(&exception);
  const std::string text =
      error != nullptr ? error->what_without_backtrace() : exception.what();
  // A nested c10 error brings its own backtrace along on further lines; NCCL's
  // account of what happened is behind a heading of c10d's among them.
  const std::string first_line = text.substr(0, text.find('\n'));
  const std::string heading = "\nLast error:\n";
  const size_t found = text.find(heading);
  if (found == std::string::npos) return first_line;
  const std::string last_error = text.substr(found + heading.size());
  return absl::StrCat(first_line, ": ",
                      last_error.substr(0, last_error.find('\n')));
}

absl::Status StatusFromException(const std::exception& exception,
                                 const std::string& context) {
  const std::string text = ErrorMessage(exception);
  const std::string message = absl::StrCat(context, ": ", text);
  // Gloo throws one type for a timeout and for a closed connection: only the
  // text tells them apart.
  const std::string lower = absl::AsciiStrToLower(text);
  return absl::StrContains(lower, "timed out") ||
                 absl::StrContains(lower, "timeout")
             ? absl::DeadlineExceededError(message)
             : absl::UnavailableError(message);
}

at::Device MetadataDevice(const c10d::ProcessGroup& group) {
  const std::vector<at::Device> devices = group.getDeviceTypes();
  for (const at::Device& device : devices) {
    if (device.is_cpu()) return device;
  }
  if (devices.empty()) return at::kCPU;
  return group.getBoundDeviceId().value_or(devices.front());
}

}  // namespace trainer_lora::distributed::internal
