#include "tests/testutil/run_benchmarks.h"

#include <cstddef>
#include <cstdlib>
#include <vector>

#include "benchmark/benchmark.h"

namespace trainer_lora::testutil {
namespace {

// The reporter that the flags ask for, and whether a run had an error.
class Reporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& context) override {
    return reporter_->ReportContext(context);
  }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) failed_ |= run.error_occurred;
    reporter_->ReportRuns(runs);
  }
  void Finalize() override { reporter_->Finalize(); }

  bool failed() const { return failed_; }

 private:
  // A process has one, which is never deleted.
  benchmark::BenchmarkReporter* const reporter_ =
      benchmark::CreateDefaultDisplayReporter();
  bool failed_ = false;
};

}  // namespace

int RunBenchmarks() {
  Reporter reporter;
  const size_t count = benchmark::RunSpecifiedBenchmarks(&reporter);
  benchmark::Shutdown();
  return count == 0 || reporter.failed() ? EXIT_FAILURE : EXIT_SUCCESS;
}

}  // namespace trainer_lora::testutil
