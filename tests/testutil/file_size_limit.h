// Files that can't grow, as on a full disk:
//
//   {
//     const FileSizeLimit disk_full(20'000);
//     status = WriteSafetensors(path, tensors, {});
//   }
//
// And a process that is killed while it writes:
//
//   GTEST_FLAG_SET(death_test_style, "threadsafe");
//   EXPECT_EXIT(
//       {
//         DieAtFileSize(20'000);
//         WriteSafetensors(path, tensors, {}).IgnoreError();
//       },
//       ::testing::KilledBySignal(SIGXFSZ), "");
#ifndef TRAINER_LORA_TESTS_TESTUTIL_FILE_SIZE_LIMIT_H_
#define TRAINER_LORA_TESTS_TESTUTIL_FILE_SIZE_LIMIT_H_

#include <sys/resource.h>

#include <csignal>

namespace trainer_lora::testutil {

// While it lives, writing beyond `bytes` of a file fails with EFBIG.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes)
      : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*handler_)(int);
  rlimit before_;
};

// From now on, writing beyond `bytes` of a file kills this process, by SIGXFSZ
// and without a core.
inline void DieAtFileSize(rlim_t bytes) {
  std::signal(SIGXFSZ, SIG_DFL);
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  const rlimit limit = {bytes, bytes};
  setrlimit(RLIMIT_FSIZE, &limit);
}

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_FILE_SIZE_LIMIT_H_
