#include "distributed/checkpoint/safetensors_checkpoint.h"

#include <sys/resource.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "config/logging.h"
#include "distributed/checkpoint/internal/safetensors_index.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/log_capture.h"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/temporary_folder.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::SizeIs;
using ::trainer_lora::config::LogLevel;
using ::trainer_lora::distributed::internal::ParseSafetensorsIndex;
using ::trainer_lora::distributed::internal::SafetensorsIndex;
using ::trainer_lora::distributed::internal::SafetensorsIndexJson;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::LogCapture;
using ::trainer_lora::testutil::ReadBytes;
using ::trainer_lora::testutil::RunfilePath;
using ::trainer_lora::testutil::StatusIs;
using ::trainer_lora::testutil::TemporaryFolder;
using ::trainer_lora::testutil::WriteBytes;

namespace fs = std::filesystem;

std::string WanFolder() {
  return RunfilePath("trainer_lora/tests/testdata/wan_checkpoint");
}

std::string LlamaFolder() {
  return RunfilePath("trainer_lora/tests/testdata/llama_checkpoint");
}

// "file number: name" of each tensor.
std::vector<std::string> Describe(const SafetensorsCheckpoint& checkpoint) {
  std::vector<std::string> tensors;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    tensors.push_back(absl::StrCat(tensor.file, ": ", tensor.info->name));
  }
  return tensors;
}

class SafetensorsCheckpointTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_.Path(name); }

  // A file with one float32 scalar a name.
  void WriteFile(const std::string& file,
                 const std::vector<std::string>& names) const {
    const std::vector<float> values(names.size());
    std::vector<TensorView> tensors;
    for (size_t i = 0; i < names.size(); ++i) {
      tensors.push_back({names[i], TensorDtype::kF32, {}, &values[i]});
    }
    ASSERT_THAT(WriteSafetensors(Path(file), tensors, {}), IsOk());
  }

  void WriteIndex(const std::string& weight_map,
                  const std::string& metadata = "{}") const {
    WriteBytes(index_, absl::StrCat("{\"metadata\": ", metadata,
                                    ", \"weight_map\": ", weight_map, "}"));
  }

  // One of two files, of two tensors each.
  void WriteTwoFiles() const {
    WriteFile("m-1.safetensors", {"d", "b"});
    WriteFile("m-2.safetensors", {"a", "c"});
    WriteIndex(R"({"a": "m-2.safetensors", "b": "m-1.safetensors",)"
               R"( "c": "m-2.safetensors", "d": "m-1.safetensors"})",
               R"({"total_size": 16})");
  }

  const TemporaryFolder folder_;
  const std::string index_ = Path("m.safetensors.index.json");
  const LogCapture logs_;
};

TEST_F(SafetensorsCheckpointTest, OpensAFolderThatDiffusersWrote) {
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsCheckpoint checkpoint,
                            SafetensorsCheckpoint::Open(WanFolder()));
  EXPECT_EQ(checkpoint.path(), WanFolder());
  EXPECT_THAT(checkpoint.files(), SizeIs(3));
  // The index says 69 lines of tensors and 82688 bytes.
  EXPECT_THAT(checkpoint.tensors(), SizeIs(69));
  uint64_t bytes = 0;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    bytes += tensor.info->byte_size;
  }
  EXPECT_EQ(bytes, 82688);
  EXPECT_THAT(logs_.Records(), IsEmpty());
}

TEST_F(SafetensorsCheckpointTest, OpensAnIndexThatTransformersWrote) {
  const std::string path = LlamaFolder() + "/model.safetensors.index.json";
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsCheckpoint checkpoint,
                            SafetensorsCheckpoint::Open(path));
  EXPECT_EQ(checkpoint.path(), path);
  ASSERT_THAT(checkpoint.files(), SizeIs(3));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(checkpoint.files()[i].path(),
              absl::StrCat(LlamaFolder(), "/model-0000", i + 1,
                           "-of-00003.safetensors"));
  }
  EXPECT_THAT(logs_.Records(), IsEmpty());
}

TEST_F(SafetensorsCheckpointTest, ListsTensorsByFileAndPlace) {
  WriteTwoFiles();
  for (const std::string& path : {folder_.path(), index_}) {
    LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsCheckpoint checkpoint,
                              SafetensorsCheckpoint::Open(path));
    EXPECT_THAT(Describe(checkpoint),
                ElementsAre("0: b", "0: d", "1: a", "1: c"));
  }
}

TEST_F(SafetensorsCheckpointTest, OpensOneFile) {
  WriteFile("any name", {"b", "a"});
  WriteFile("model.safetensors", {"c"});
  fs::create_directory(Path("empty"));
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsCheckpoint named,
                            SafetensorsCheckpoint::Open(Path("any name")));
  EXPECT_THAT(Describe(named), ElementsAre("0: a", "0: b"));
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsCheckpoint found,
                            SafetensorsCheckpoint::Open(folder_.path()));
  EXPECT_EQ(found.files().front().path(), Path("model.safetensors"));
  EXPECT_THAT(Describe(found), ElementsAre("0: c"));
}

TEST_F(SafetensorsCheckpointTest, KeepsItsTensorsWhenItIsMoved) {
  WriteTwoFiles();
  LORA_ASSERT_OK_AND_ASSIGN(SafetensorsCheckpoint checkpoint,
                            SafetensorsCheckpoint::Open(index_));
  const TensorInfo* info = checkpoint.tensors().back().info;
  SafetensorsCheckpoint moved = std::move(checkpoint);
  WriteFile("other", {"x"});
  LORA_ASSERT_OK_AND_ASSIGN(SafetensorsCheckpoint assigned,
                            SafetensorsCheckpoint::Open(Path("other")));
  assigned = std::move(moved);
  EXPECT_EQ(assigned.tensors().back().info, info);
  EXPECT_EQ(info, assigned.files()[1].Find("c"));
  EXPECT_THAT(Describe(assigned), ElementsAre("0: b", "0: d", "1: a", "1: c"));
}

TEST_F(SafetensorsCheckpointTest, NamesWhatIsNotThere) {
  EXPECT_THAT(
      SafetensorsCheckpoint::Open(Path("missing")),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr(Path("missing"))));
  EXPECT_THAT(SafetensorsCheckpoint::Open(index_),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(index_)));
  WriteBytes(Path("model.bin"), "");
  EXPECT_THAT(SafetensorsCheckpoint::Open(folder_.path()),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr(folder_.path()),
                             HasSubstr("no *.safetensors.index.json and no "
                                       "*.safetensors"))));
}

TEST_F(SafetensorsCheckpointTest, RefusesAFolderOfSeveralCheckpoints) {
  const auto ambiguous = [this](const std::string& candidates) {
    return StatusIs(absl::StatusCode::kInvalidArgument,
                    AllOf(HasSubstr(folder_.path()),
                          HasSubstr("give the path of one of " + candidates)));
  };
  WriteFile("b.safetensors", {"b"});
  WriteFile("a.safetensors", {"a"});
  EXPECT_THAT(SafetensorsCheckpoint::Open(folder_.path()),
              ambiguous("\"a.safetensors\", \"b.safetensors\""));
  // The index may be meant, or the file that it does not name.
  WriteIndex(R"({"a": "a.safetensors"})");
  EXPECT_THAT(SafetensorsCheckpoint::Open(folder_.path()),
              ambiguous("\"m.safetensors.index.json\", \"b.safetensors\""));
  EXPECT_THAT(SafetensorsCheckpoint::Open(index_), IsOk());
  WriteIndex(R"({"a": "a.safetensors", "b": "b.safetensors"})");
  EXPECT_THAT(SafetensorsCheckpoint::Open(folder_.path()), IsOk());
  fs::copy_file(index_, Path("n.fp16.safetensors.index.json"));
  EXPECT_THAT(SafetensorsCheckpoint::Open(folder_.path()),
              ambiguous("\"m.safetensors.index.json\", "
                        "\"n.fp16.safetensors.index.json\""));
}

TEST_F(SafetensorsCheckpointTest, ListsAllThatTheIndexNamesInVain) {
  WriteFile("m-1.safetensors", {"a"});
  WriteIndex(R"({"a": "m-1.safetensors", "b": "m-1.safetensors",)"
             R"( "c": "m-3.safetensors", "d": "m-2.safetensors",)"
             R"( "e": "m-1.safetensors"})");
  EXPECT_THAT(
      SafetensorsCheckpoint::Open(index_),
      StatusIs(absl::StatusCode::kDataLoss,
               AllOf(HasSubstr(index_),
                     HasSubstr("missing files: \"m-2.safetensors\", "
                               "\"m-3.safetensors\";"),
                     HasSubstr("missing tensors: \"b\" of m-1.safetensors, "
                               "\"e\" of m-1.safetensors"))));
}

TEST_F(SafetensorsCheckpointTest, ListsTenAndCountsTheRest) {
  WriteFile("m-1.safetensors", {"a"});
  std::string weight_map = "{\"a\": \"m-1.safetensors\"";
  for (int i = 10; i < 33; ++i) {
    absl::StrAppend(&weight_map, ", \"k", i, "\": \"m-1.safetensors\"");
  }
  WriteIndex(weight_map + "}");
  EXPECT_THAT(SafetensorsCheckpoint::Open(index_),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("\"k10\" of"),
                             HasSubstr("\"k19\" of m-1.safetensors and 13 "
                                       "more"),
                             Not(HasSubstr("k20")))));
}

TEST_F(SafetensorsCheckpointTest, ReportsABrokenFile) {
  WriteTwoFiles();
  fs::resize_file(Path("m-2.safetensors"),
                  fs::file_size(Path("m-2.safetensors")) - 1);
  EXPECT_THAT(SafetensorsCheckpoint::Open(index_),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr(Path("m-2.safetensors")),
                             HasSubstr("tensor \"c\""))));
}

TEST_F(SafetensorsCheckpointTest, WarnsOfTensorsThatTheIndexDoesNotName) {
  WriteFile("m-1.safetensors", {"a", "b", "x"});
  WriteFile("m-2.safetensors", {"b", "c"});
  WriteIndex(R"({"a": "m-1.safetensors", "b": "m-2.safetensors",)"
             R"( "c": "m-2.safetensors"})",
             R"({"total_size": 12})");
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsCheckpoint checkpoint,
                            SafetensorsCheckpoint::Open(folder_.path()));
  EXPECT_THAT(Describe(checkpoint), ElementsAre("0: a", "1: b", "1: c"));
  EXPECT_THAT(
      logs_.Messages(LogLevel::kWarning),
      ElementsAre(AllOf(HasSubstr(index_),
                        HasSubstr("left out, as the index does not name them: "
                                  "\"b\" of m-1.safetensors, \"x\" of "
                                  "m-1.safetensors"))));
}

TEST_F(SafetensorsCheckpointTest, WarnsOfATotalSizeThatIsNotTheTensors) {
  WriteFile("m-1.safetensors", {"a", "b"});
  WriteIndex(R"({"a": "m-1.safetensors", "b": "m-1.safetensors"})",
             R"({"total_size": 9})");
  EXPECT_THAT(SafetensorsCheckpoint::Open(index_), IsOk());
  EXPECT_THAT(
      logs_.Messages(LogLevel::kWarning),
      ElementsAre(HasSubstr("total_size is 9, but the tensors have 8 bytes")));
}

TEST_F(SafetensorsCheckpointTest, RefusesAnIndexThatIsNoFileWithoutWaiting) {
  ASSERT_EQ(mkfifo(index_.c_str(), 0600), 0);
  EXPECT_THAT(SafetensorsCheckpoint::Open(index_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("not a regular file")));
}

TEST_F(SafetensorsCheckpointTest, SaysWhyAnIndexCannotBeOpened) {
  fs::create_symlink(index_, index_);
  EXPECT_THAT(
      SafetensorsCheckpoint::Open(index_),
      StatusIs(absl::ErrnoToStatus(ELOOP, "").code(), HasSubstr(index_)));
  fs::remove(index_);
  WriteTwoFiles();
  // That no further file may be opened: for a test, what permissions are to
  // those who are not root.
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit limit = before;
  limit.rlim_cur = 0;
  setrlimit(RLIMIT_NOFILE, &limit);
  const absl::Status status = SafetensorsCheckpoint::Open(index_).status();
  setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted,
                               HasSubstr(index_)));
}

TEST_F(SafetensorsCheckpointTest, RefusesAHugeIndexBeforeReadingIt) {
  // A sparse file: it has the bytes, but takes none.
  WriteBytes(index_, "{");
  fs::resize_file(index_, uint64_t{1} << 40);
  EXPECT_THAT(
      SafetensorsCheckpoint::Open(index_),
      StatusIs(absl::StatusCode::kDataLoss,
               AllOf(HasSubstr(index_), HasSubstr("1099511627776 bytes"))));
}

struct BrokenIndex {
  std::string name;
  std::string json;
  std::string message;
};

std::vector<BrokenIndex> BrokenIndices() {
  // The weight map of one tensor, "t".
  const auto entry = [](const std::string& file) {
    return "{\"weight_map\":{\"t\":" + file + "}}";
  };
  const std::string good = entry("\"f\"");
  return {
      {"Empty", "", "not valid JSON"},
      {"OnlyAnObject", "{}", "weight_map names no tensor"},
      {"NoTensors", R"({"weight_map":{}})", "weight_map names no tensor"},
      {"Cut", good.substr(0, 15), "not valid JSON"},
      {"TextAfterTheObject", good + "x", "not valid JSON"},
      {"ZeroByteAfterTheObject", good + std::string("\0x", 2),
       "a zero byte at its byte 24"},
      {"ByteOrderMark", "\xef\xbb\xbf" + good, "a byte order mark"},
      {"NotUtf8", entry("\"\xff\""), "not valid JSON"},
      {"AnArray", "[]", "must be a JSON object, got an array"},
      {"AString", "\"x\"", "must be a JSON object, got a string"},
      {"WeightMapTwice", R"({"weight_map":{"t":"f"},"weight_map":{}})",
       "has \"weight_map\" twice"},
      {"MetadataTwice", R"({"metadata":{},"metadata":{}})",
       "has \"metadata\" twice"},
      {"TotalSizeTwice", R"({"metadata":{"total_size":1,"total_size":1}})",
       "metadata has total_size twice"},
      {"TensorTwice", R"({"weight_map":{"t":"f","u":"f","t":"f"}})",
       "weight_map has \"t\" twice"},
      {"TensorTwiceByEscape", R"({"weight_map":{"t":"f","\u0074":"f"}})",
       "weight_map has \"t\" twice"},
      {"WeightMapIsAnArray", R"({"weight_map":[]})",
       "\"weight_map\" must be an object, got an array"},
      {"WeightMapIsNull", R"({"weight_map":null})",
       "\"weight_map\" must be an object, got null"},
      {"MetadataIsAString", R"({"metadata":"x"})",
       "\"metadata\" must be an object, got a string"},
      {"FileIsANumber", entry("3"), "weight_map \"t\" must be a string, got 3"},
      {"FileIsNegative", entry("-3"), "must be a string, got -3"},
      {"FileIsAFraction", entry("1.5"), "must be a string, got 1.5"},
      {"FileIsABoolean", entry("true"), "must be a string, got true"},
      {"FileIsNull", entry("null"), "must be a string, got null"},
      {"FileIsAnArray", entry("[\"f\"]"), "must be a string, got an array"},
      {"FileIsAnObject", entry("{}"), "must be a string, got an object"},
      {"NegativeTotalSize", R"({"metadata":{"total_size":-1}})",
       "total_size must not be negative, got -1"},
      {"EmptyFileName", entry("\"\""),
       "weight_map \"t\" must be the name of a file beside the index, got "
       "\"\""},
      {"FileInAFolder", entry("\"a/f\""), "beside the index, got \"a/f\""},
      {"FileOfTheRoot", entry("\"/f\""), "beside the index"},
      {"FileAbove", entry("\"../f\""), "beside the index"},
      {"TheFolder", entry("\".\""), "beside the index"},
      {"TheFolderAbove", entry("\"..\""), "beside the index"},
      {"LongFileName", entry("\"" + std::string(256, 'f') + "\""),
       "beside the index, got \"fff"},
      {"FileNameWithAZeroByte", entry("\"f\\u0000g\""), "beside the index"},
      {"DeepArrays", "{\"x\":" + std::string(1000000, '['),
       "nested more than 64 levels deep"},
      {"DeepObjectsInTheMetadata",
       [] {
         std::string json = "{\"metadata\":";
         for (int i = 0; i < 100000; ++i) json += "{\"x\":";
         return json;
       }(),
       "nested more than 64 levels deep"},
      {"DeepWeightMap", R"({"weight_map":{"t":{"t":{"t":"f"}}}})",
       "weight_map \"t\" must be a string, got an object"},
  };
}

class BrokenIndexTest : public SafetensorsCheckpointTest,
                        public ::testing::WithParamInterface<BrokenIndex> {};

TEST_P(BrokenIndexTest, IsDataLossThatSaysWhere) {
  WriteBytes(index_, GetParam().json);
  EXPECT_THAT(
      SafetensorsCheckpoint::Open(index_),
      StatusIs(absl::StatusCode::kDataLoss,
               AllOf(HasSubstr(index_), HasSubstr(GetParam().message))));
}

INSTANTIATE_TEST_SUITE_P(All, BrokenIndexTest,
                         ::testing::ValuesIn(BrokenIndices()),
                         [](const ::testing::TestParamInfo<BrokenIndex>& info) {
                           return info.param.name;
                         });

TEST(SafetensorsIndexTest, TakesNoNoticeOfOtherEntries) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const SafetensorsIndex index,
      ParseSafetensorsIndex(
          R"( {"a": [{"total_size": 1}, [{}], 2], "b": {"weight_map": {}},
               "c": "x", "d": 1, "e": -1.5, "f": null,
               "metadata": {"total_parameters": 3, "x": {"total_size": [4]},
                            "total_size": 18446744073709551615, "y": [-1]},
               "weight_map": {"t": "f"}, "total_size": -5} )"));
  EXPECT_EQ(index.total_size, std::numeric_limits<uint64_t>::max());
  EXPECT_THAT(index.weight_map, ElementsAre(Pair("t", "f")));
}

TEST(SafetensorsIndexTest, HasNoTotalSizeThatIsNoInteger) {
  for (const char* metadata :
       {"", "\"metadata\": {},", "\"metadata\": {\"total_size\": \"9\"},",
        "\"metadata\": {\"total_size\": 9.5},",
        "\"metadata\": {\"total_size\": [9]},"}) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const SafetensorsIndex index,
        ParseSafetensorsIndex(
            absl::StrCat("{", metadata, R"("weight_map": {"t": "f"}})")));
    EXPECT_EQ(index.total_size, std::nullopt) << metadata;
  }
}

TEST(SafetensorsIndexTest, WritesTheBytesOfThePythonLibraries) {
  const std::string text = ReadBytes(
      WanFolder() + "/diffusion_pytorch_model.safetensors.index.json");
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsIndex index,
                            ParseSafetensorsIndex(text));
  LORA_ASSERT_OK_AND_ASSIGN(const std::string written,
                            SafetensorsIndexJson(index));
  EXPECT_EQ(written, text);

  // What Python's json.dumps(..., indent=2, sort_keys=True) made of it.
  LORA_ASSERT_OK_AND_ASSIGN(
      const std::string odd,
      SafetensorsIndexJson(
          {{{"ä\x7f\n\"\\/", "f"}, {"\xf0\x9f\x98\x80", "ü"}, {"Z", "f"}},
           std::nullopt}));
  EXPECT_EQ(odd,
            "{\n"
            "  \"metadata\": {},\n"
            "  \"weight_map\": {\n"
            "    \"Z\": \"f\",\n"
            "    \"\\u00e4\\u007f\\n\\\"\\\\/\": \"f\",\n"
            "    \"\\ud83d\\ude00\": \"\\u00fc\"\n"
            "  }\n"
            "}\n");
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsIndex parsed,
                            ParseSafetensorsIndex(odd));
  EXPECT_THAT(parsed.weight_map,
              ElementsAre(Pair("Z", "f"), Pair("ä\x7f\n\"\\/", "f"),
                          Pair("\xf0\x9f\x98\x80", "ü")));
}

TEST(SafetensorsIndexTest, RefusesToWriteWhatItWouldNotRead) {
  const std::map<std::string, std::string> cases[] = {
      {},
      {{"t", "a/f"}},
      {{"t", ".."}},
      {{"t", ""}},
      {{"\xff", "f"}},
      {{"t", "\xff"}},
      {{"t", std::string(256, 'f')}}};
  for (const auto& weight_map : cases) {
    EXPECT_THAT(SafetensorsIndexJson({weight_map, std::nullopt}),
                StatusIs(absl::StatusCode::kInvalidArgument, Not(IsEmpty())));
  }
}

}  // namespace
}  // namespace trainer_lora::distributed
