#include "distributed/checkpoint/safetensors_writer.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/file_size_limit.h"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/temporary_folder.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::ReadBytes;
using ::trainer_lora::testutil::RunfilePath;
using ::trainer_lora::testutil::StatusIs;
using ::trainer_lora::testutil::TemporaryFolder;
using ::trainer_lora::testutil::WriteBytes;

namespace fs = std::filesystem;

class SafetensorsWriterTest : public ::testing::Test {
 protected:
  // A writer for 4 bytes of "a" and 8 of "b"; b comes first.
  absl::StatusOr<SafetensorsWriter> CreateSmall() const {
    return SafetensorsWriter::Create(
        path_, {{"a", TensorDtype::kI32, {}}, {"b", TensorDtype::kI64, {1}}},
        {});
  }

  const TemporaryFolder folder_;
  const std::string path_ = folder_.Path("model.safetensors");
};

TEST_F(SafetensorsWriterTest, WritesTheBytesOfThePythonLibraryInAnyPieces) {
  const std::string reference_path =
      RunfilePath("trainer_lora/tests/testdata/reference.safetensors");
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile reference,
                            SafetensorsFile::Open(reference_path));
  std::vector<TensorSpec> specs;
  std::string data;
  for (const TensorInfo& info : reference.tensors()) {
    specs.push_back({info.name, info.dtype, info.shape});
    std::string bytes(info.byte_size, '\0');
    ASSERT_THAT(
        reference.Read(info, 0, absl::MakeSpan(&bytes[0], bytes.size())),
        IsOk());
    data += bytes;
  }
  std::reverse(specs.begin(), specs.end());

  for (const size_t piece : {1, 7, 1000}) {
    LORA_ASSERT_OK_AND_ASSIGN(
        SafetensorsWriter writer,
        SafetensorsWriter::Create(path_, specs, reference.metadata()));
    for (size_t i = 0; i < data.size(); i += piece) {
      ASSERT_THAT(writer.Append(data.substr(i, piece)), IsOk());
    }
    ASSERT_THAT(writer.Finish(), IsOk());
    EXPECT_EQ(ReadBytes(path_), ReadBytes(reference_path)) << piece;
    EXPECT_THAT(folder_.Names(), ElementsAre("model.safetensors"));
  }
}

TEST_F(SafetensorsWriterTest, GivesTheOrderInWhichBytesFollow) {
  // The widest type first, then by name; that the reference agrees is tested
  // above.
  LORA_ASSERT_OK_AND_ASSIGN(
      const SafetensorsWriter writer,
      SafetensorsWriter::Create(path_,
                                {{"a", TensorDtype::kBool, {1}},
                                 {"z", TensorDtype::kF32, {1}},
                                 {"c", TensorDtype::kU64, {}},
                                 {"b", TensorDtype::kF32, {2, 0}}},
                                {}));
  std::vector<std::string> names;
  for (const TensorSpec& tensor : writer.tensors()) {
    names.push_back(tensor.name);
  }
  EXPECT_THAT(names, ElementsAre("c", "b", "z", "a"));
}

TEST_F(SafetensorsWriterTest, KnowsTheSizeOfTheFileBeforeItIsThere) {
  const std::vector<TensorSpec> specs = {{"a", TensorDtype::kI32, {}},
                                         {"b", TensorDtype::kI64, {1}}};
  for (const std::map<std::string, std::string>& metadata :
       {std::map<std::string, std::string>{}, {{"format", "pt"}, {"k", "ä"}}}) {
    LORA_ASSERT_OK_AND_ASSIGN(const uint64_t size,
                              SafetensorsFileSize(specs, metadata));
    EXPECT_THAT(folder_.Names(), IsEmpty());
    LORA_ASSERT_OK_AND_ASSIGN(
        SafetensorsWriter writer,
        SafetensorsWriter::Create(path_, specs, metadata));
    ASSERT_THAT(writer.Append("bbbbbbbbaaaa"), IsOk());
    ASSERT_THAT(writer.Finish(), IsOk());
    EXPECT_EQ(fs::file_size(path_), size);
    fs::remove(path_);
  }
  // More than any disk has.
  LORA_ASSERT_OK_AND_ASSIGN(
      const uint64_t size,
      SafetensorsFileSize({{"t", TensorDtype::kU8, {int64_t{1} << 59}}}, {}));
  EXPECT_GT(size, uint64_t{1} << 59);
}

TEST_F(SafetensorsWriterTest, IsNotThereBeforeFinish) {
  WriteBytes(path_, "old");
  LORA_ASSERT_OK_AND_ASSIGN(SafetensorsWriter writer, CreateSmall());
  ASSERT_THAT(writer.Append("bbbbbbbbaaaa"), IsOk());
  EXPECT_EQ(ReadBytes(path_), "old");
  ASSERT_THAT(writer.Finish(), IsOk());
  EXPECT_THAT(SafetensorsFile::Open(path_), IsOk());
}

TEST_F(SafetensorsWriterTest, LeavesNothingBehindWhenItIsNotFinished) {
  WriteBytes(path_, "old");
  {
    LORA_ASSERT_OK_AND_ASSIGN(SafetensorsWriter writer, CreateSmall());
    ASSERT_THAT(writer.Append("bbbbbbbbaaaa"), IsOk());
    EXPECT_EQ(folder_.Names().size(), 2);
    SafetensorsWriter moved = std::move(writer);
    EXPECT_EQ(folder_.Names().size(), 2);
    // The second takes the place of the first, which goes.
    LORA_ASSERT_OK_AND_ASSIGN(moved, CreateSmall());
    EXPECT_EQ(folder_.Names().size(), 2);
  }
  EXPECT_THAT(folder_.Names(), ElementsAre("model.safetensors"));
  EXPECT_EQ(ReadBytes(path_), "old");
}

TEST_F(SafetensorsWriterTest, TakesNoMoreBytesThanTheTensorsHave) {
  LORA_ASSERT_OK_AND_ASSIGN(SafetensorsWriter writer, CreateSmall());
  ASSERT_THAT(writer.Append("bbbbbbbb"), IsOk());
  EXPECT_THAT(writer.Append("aaaax"),
              StatusIs(absl::StatusCode::kOutOfRange,
                       AllOf(HasSubstr(path_), HasSubstr("5 bytes"),
                             HasSubstr("have 4 left"))));
  ASSERT_THAT(writer.Append("aaaa"), IsOk());
  EXPECT_THAT(writer.Append("x"), StatusIs(absl::StatusCode::kOutOfRange,
                                           HasSubstr("have 0 left")));
  EXPECT_THAT(writer.Append(""), IsOk());
  ASSERT_THAT(writer.Finish(), IsOk());
  EXPECT_EQ(ReadBytes(path_).substr(ReadBytes(path_).size() - 12),
            "bbbbbbbbaaaa");
}

TEST_F(SafetensorsWriterTest, NamesTheTensorThatLacksBytes) {
  LORA_ASSERT_OK_AND_ASSIGN(SafetensorsWriter writer, CreateSmall());
  const auto lacks = [](absl::string_view what) {
    return StatusIs(absl::StatusCode::kFailedPrecondition,
                    HasSubstr(std::string(what)));
  };
  EXPECT_THAT(writer.Finish(), lacks("lacks 12 bytes, from tensor \"b\" on"));
  ASSERT_THAT(writer.Append("bbbbbbb"), IsOk());
  EXPECT_THAT(writer.Finish(), lacks("lacks 5 bytes, from tensor \"b\" on"));
  ASSERT_THAT(writer.Append("b"), IsOk());
  EXPECT_THAT(writer.Finish(), lacks("lacks 4 bytes, from tensor \"a\" on"));
  EXPECT_FALSE(fs::exists(path_));
  ASSERT_THAT(writer.Append("aaaa"), IsOk());
  EXPECT_THAT(writer.Finish(), IsOk());
}

TEST_F(SafetensorsWriterTest, IsDoneOnce) {
  LORA_ASSERT_OK_AND_ASSIGN(SafetensorsWriter writer, CreateSmall());
  ASSERT_THAT(writer.Append("bbbbbbbbaaaa"), IsOk());
  ASSERT_THAT(writer.Finish(), IsOk());
  for (const absl::Status& status : {writer.Append("x"), writer.Finish()}) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                 HasSubstr("is done")));
  }
  EXPECT_EQ(fs::file_size(path_) % 4, 0);
}

// t10, t11 and so on, of `bytes` each.
std::vector<TensorSpec> ManyOfSize(int count, int64_t bytes) {
  std::vector<TensorSpec> specs;
  for (int i = 0; i < count; ++i) {
    specs.push_back({absl::StrCat("t", 10 + i), TensorDtype::kU8, {bytes}});
  }
  return specs;
}

TEST_F(SafetensorsWriterTest, ChecksTensorsBeforeItMakesAFile) {
  struct {
    std::vector<TensorSpec> tensors;
    std::map<std::string, std::string> metadata;
    std::string message;
  } cases[] = {
      {{{"t", TensorDtype::kF32, {}}, {"t", TensorDtype::kI64, {}}},
       {},
       "tensor \"t\" is there twice"},
      {{{"__metadata__", TensorDtype::kF32, {}}}, {}, "the format reserves"},
      {{{"t", TensorDtype::kF32, {-1}}}, {}, "negative dimension"},
      {{{"t", TensorDtype::kF32, {int64_t{1} << 61}}}, {}, "too large"},
      {{{"t", TensorDtype::kF6E2M3, {2}}}, {}, "takes 12 bits"},
      {{{"\xff", TensorDtype::kF32, {}}}, {}, "not UTF-8"},
      {{}, {{"k", "\xff"}}, "not UTF-8"},
      // Each is possible, all together are 2^63 bytes.
      {ManyOfSize(16, int64_t{1} << 59),
       {},
       "tensor \"t25\" makes the file larger than 2^63 bytes"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(
        SafetensorsWriter::Create(path_, c.tensors, c.metadata),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.message)));
    EXPECT_THAT(
        SafetensorsFileSize(c.tensors, c.metadata),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.message)));
  }
  EXPECT_THAT(folder_.Names(), IsEmpty());
}

// No further file can be opened, so that the folder can't be flushed.
TEST_F(SafetensorsWriterTest, KeepsTheOldFileWhenItCannotOpenTheFolder) {
  WriteBytes(path_, "old");
  LORA_ASSERT_OK_AND_ASSIGN(SafetensorsWriter writer, CreateSmall());
  ASSERT_THAT(writer.Append("bbbbbbbbaaaa"), IsOk());
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit limit = before;
  limit.rlim_cur = 0;
  setrlimit(RLIMIT_NOFILE, &limit);
  const absl::Status status = writer.Finish();
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_THAT(status,
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr(absl::StrCat("opening ", folder_.path()))));
  EXPECT_EQ(ReadBytes(path_), "old");
  EXPECT_THAT(folder_.Names(), ElementsAre("model.safetensors"));
}

// Not kInvalidArgument, as if a tensor could not be written.
TEST_F(SafetensorsWriterTest, AnotherErrorOfTheFileSystemIsUnavailable) {
  const std::string path = absl::StrCat(path_, std::string(300, 'x'));
  EXPECT_THAT(WriteSafetensors(path, {}, {}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("replacing")));
  EXPECT_THAT(folder_.Names(), IsEmpty());
}

TEST_F(SafetensorsWriterTest, RemovesItsFileWhenTheDiskIsFull) {
  LORA_ASSERT_OK_AND_ASSIGN(
      SafetensorsWriter writer,
      SafetensorsWriter::Create(path_, {{"t", TensorDtype::kU8, {100'000}}},
                                {}));
  ASSERT_THAT(writer.Append(std::string(10'000, 'x')), IsOk());
  {
    const testutil::FileSizeLimit disk_full(20'000);
    EXPECT_THAT(
        writer.Append(std::string(50'000, 'x')),
        StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("writing")));
  }
  EXPECT_THAT(folder_.Names(), IsEmpty());
  // Part of it may be written: it can't go on.
  EXPECT_THAT(writer.Append("x"),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("failed before")));
}

}  // namespace
}  // namespace trainer_lora::distributed
