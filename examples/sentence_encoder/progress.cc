#include "examples/sentence_encoder/progress.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace trainer_lora::examples {

std::string FormatDuration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "?";
  const int64_t total = std::llround(seconds);
  const int64_t minutes = total / 60;
  if (minutes < 60) return absl::StrFormat("%d:%02d", minutes, total % 60);
  return absl::StrFormat("%d:%02d:%02d", minutes / 60, minutes % 60,
                         total % 60);
}

std::string Progress::Describe(const ProgressUpdate& update) const {
  return absl::StrFormat(
      "step %d/%d  loss %.4f  grad norm %.3f  %.1f examples/s  %s left",
      update.step, total_steps_, update.loss, update.grad_norm,
      update.examples_per_second, FormatDuration(update.seconds_left));
}

void Progress::Report(const ProgressUpdate& update) {
  const std::string text = Describe(update);
  if (is_terminal_) {
    constexpr int kWidth = 20;
    const int filled = static_cast<int>(kWidth * update.step / total_steps_);
    // Back to the start of the line, and at the end erase what an older, longer
    // line left.
    const std::string line =
        absl::StrFormat("\r[%s%s] %s\x1b[K", std::string(filled, '#'),
                        std::string(kWidth - filled, '.'), text);
    std::fputs(line.c_str(), stream_);
    line_is_open_ = true;
  } else {
    const int64_t every = std::max<int64_t>(1, total_steps_ / 20);
    if (update.step != 1 && update.step != total_steps_ &&
        update.step % every != 0) {
      return;
    }
    std::fputs((text + "\n").c_str(), stream_);
  }
  std::fflush(stream_);
}

void Progress::Finish() {
  if (!line_is_open_) return;
  line_is_open_ = false;
  std::fputs("\n", stream_);
  std::fflush(stream_);
}

}  // namespace trainer_lora::examples
