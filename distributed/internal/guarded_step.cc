#include "distributed/internal/guarded_step.h"

#include <exception>
#include <functional>
#include <new>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "distributed/device_mesh.h"
#include "distributed/internal/rank_agreement.h"
#include "distributed/internal/run_collective.h"

namespace trainer_lora::distributed::internal {

bool IsOutOfMemory(const std::exception& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         absl::StrContains(error.what(), "DefaultCPUAllocator: ");
}

absl::Status GuardedStep(const std::string& context,
                         const std::function<absl::Status()>& step) {
  try {
    return step();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrCat(context, ": out of memory"));
  } catch (const std::exception& error) {
    const std::string message =
        absl::StrCat(context, ": ", ErrorMessage(error));
    return IsOutOfMemory(error) ? absl::ResourceExhaustedError(message)
                                : absl::InternalError(message);
  }
}

absl::Status AgreedStep(const DeviceMesh* mesh, const std::string& what,
                        const std::string& context,
                        const std::function<absl::Status()>& step) {
  const absl::Status status = GuardedStep(context, step);
  if (mesh == nullptr) return status;
  return AgreeOnStatus(*mesh->group(), mesh->ToString(), what, status);
}

}  // namespace trainer_lora::distributed::internal
