#include "examples/sentence_encoder/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace trainer_lora::examples {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

// What 40 steps print.
std::string Output(bool is_terminal) {
  std::FILE* stream = std::tmpfile();
  Progress progress(stream, is_terminal, 40);
  for (int64_t step = 1; step <= 40; ++step) {
    progress.Report({step, 0.5, 0.25, 12.34, 40.0 - step});
  }
  progress.Finish();
  std::rewind(stream);
  std::string text(1 << 16, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), stream));
  std::fclose(stream);
  return text;
}

TEST(ProgressTest, FormatsDurations) {
  EXPECT_EQ(FormatDuration(0), "0:00");
  EXPECT_EQ(FormatDuration(62.4), "1:02");
  EXPECT_EQ(FormatDuration(3599.6), "1:00:00");
  EXPECT_EQ(FormatDuration(3723), "1:02:03");
  EXPECT_EQ(FormatDuration(-1), "?");
  EXPECT_EQ(FormatDuration(std::nan("")), "?");
}

TEST(ProgressTest, PrintsAboutTwentyPlainLinesElsewhere) {
  const std::string text = Output(/*is_terminal=*/false);
  EXPECT_THAT(text, HasSubstr("step 1/40  loss 0.5000  grad norm 0.250  "
                              "12.3 examples/s  0:39 left\n"));
  EXPECT_THAT(text, HasSubstr("step 40/40"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 21);
  EXPECT_EQ(text.find('\r'), std::string::npos);
}

TEST(ProgressTest, DrawsABarInPlaceOnATerminal) {
  const std::string text = Output(/*is_terminal=*/true);
  EXPECT_THAT(text, HasSubstr("\r[##########..........] step 20/40"));
  EXPECT_THAT(text, EndsWith("\n"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
}

}  // namespace
}  // namespace trainer_lora::examples
