// Shows how far a training run is: a bar on a terminal, plain lines elsewhere.
//
//   Progress progress(stdout, /*is_terminal=*/isatty(fileno(stdout)), 60);
//   for (...) progress.Report({step, loss, grad_norm, pairs_per_second, 42.0});
//   progress.Finish();
#ifndef TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_PROGRESS_H_
#define TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_PROGRESS_H_

#include <cstdint>
#include <cstdio>
#include <string>

namespace trainer_lora::examples {

struct ProgressUpdate {
  int64_t step = 0;  // Steps done.
  double loss = 0;
  double grad_norm = 0;
  double examples_per_second = 0;
  double seconds_left = 0;
};

// "1:02:03", or "2:03" below an hour. Negative and not finite: "?".
std::string FormatDuration(double seconds);

class Progress {
 public:
  // Writes to `stream`, which stays the caller's.
  Progress(std::FILE* stream, bool is_terminal, int64_t total_steps)
      : stream_(stream), is_terminal_(is_terminal), total_steps_(total_steps) {}

  // On a terminal draws the bar anew; elsewhere prints a line for the first,
  // the last and about twenty more steps.
  void Report(const ProgressUpdate& update);

  // Ends the bar's line. Call it before anything else is printed.
  void Finish();

 private:
  std::string Describe(const ProgressUpdate& update) const;

  std::FILE* stream_;
  bool is_terminal_;
  int64_t total_steps_;
  bool line_is_open_ = false;
};

}  // namespace trainer_lora::examples

#endif  // TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_PROGRESS_H_
