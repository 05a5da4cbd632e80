#include "distributed/checkpoint/safetensors_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
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
using ::testing::Pair;
using ::trainer_lora::testutil::DieAtFileSize;
using ::trainer_lora::testutil::FileSizeLimit;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::ReadBytes;
using ::trainer_lora::testutil::RunfilePath;
using ::trainer_lora::testutil::StatusIs;
using ::trainer_lora::testutil::TemporaryFolder;
using ::trainer_lora::testutil::WriteBytes;

namespace fs = std::filesystem;

class SafetensorsFileTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const { return folder_.Path(name); }

  std::vector<std::string> FilesInFolder() const { return folder_.Names(); }

 private:
  const TemporaryFolder folder_;
};

std::string LittleEndian(uint64_t value) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) {
    bytes += static_cast<char>(value >> (8 * i) & 0xff);
  }
  return bytes;
}

// A file with the header `json` and `data_size` bytes of data.
std::string FileBytes(const std::string& json, int data_size) {
  return LittleEndian(json.size()) + json + std::string(data_size, 'x');
}

template <typename T>
std::vector<T> ReadTensor(const SafetensorsFile& file,
                          const std::string& name) {
  const TensorInfo* tensor = file.Find(name);
  if (tensor == nullptr) {
    ADD_FAILURE() << "no tensor " << name;
    return {};
  }
  std::vector<T> values(tensor->byte_size / sizeof(T));
  EXPECT_THAT(file.Read(*tensor, 0,
                        absl::MakeSpan(reinterpret_cast<char*>(values.data()),
                                       tensor->byte_size)),
              IsOk());
  return values;
}

// The contents of testdata/reference.safetensors, as
// tests/parity/make_safetensors_fixture.py has them.
const char kOddName[] = "größe \"層\"\n";
const float kWeight[] = {0.0f, 0.5f, -1.0f, 1.5f, -2.0f, 3.25f};
const uint16_t kBiasBits[] = {0x3f80, 0xbf00};          // 1, -0.5
const uint16_t kHalfBits[] = {0x3400, 0xc400, 0x7bff};  // 0.25, -4, 65504
const int64_t kIds[] = {-1, int64_t{1} << 62};
const int64_t kScalar[] = {7};
const float kOdd[] = {2.5f};

// Its tensors "dtype.<name>", one for each type that the Python library can
// write: the bytes 0 to 15, or 0 and 1 in turn for booleans.
struct ReferenceDtype {
  const char* name;
  TensorDtype dtype;
  int64_t elements;
};
const ReferenceDtype kReferenceDtypes[] = {
    {"BOOL", TensorDtype::kBool, 16},
    {"F4", TensorDtype::kF4, 32},
    {"U8", TensorDtype::kU8, 16},
    {"I8", TensorDtype::kI8, 16},
    {"F8_E5M2", TensorDtype::kF8E5M2, 16},
    {"F8_E4M3", TensorDtype::kF8E4M3, 16},
    {"F8_E8M0", TensorDtype::kF8E8M0, 16},
    {"F8_E4M3FNUZ", TensorDtype::kF8E4M3Fnuz, 16},
    {"F8_E5M2FNUZ", TensorDtype::kF8E5M2Fnuz, 16},
    {"I16", TensorDtype::kI16, 8},
    {"U16", TensorDtype::kU16, 8},
    {"F16", TensorDtype::kF16, 8},
    {"BF16", TensorDtype::kBF16, 8},
    {"I32", TensorDtype::kI32, 4},
    {"U32", TensorDtype::kU32, 4},
    {"F32", TensorDtype::kF32, 4},
    {"C64", TensorDtype::kC64, 2},
    {"F64", TensorDtype::kF64, 2},
    {"I64", TensorDtype::kI64, 2},
    {"U64", TensorDtype::kU64, 2},
};

std::vector<char> ReferenceBytes(TensorDtype dtype) {
  std::vector<char> bytes(16);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(dtype == TensorDtype::kBool ? i % 2 : i);
  }
  return bytes;
}

std::string ReferencePath() {
  return RunfilePath("trainer_lora/tests/testdata/reference.safetensors");
}

TEST_F(SafetensorsFileTest, ReadsAFileOfThePythonLibrary) {
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(ReferencePath()));
  EXPECT_THAT(file.metadata(), ElementsAre(Pair("note", "Grüße \"層\"\t")));
  EXPECT_EQ(file.tensors().size(), 27);
  EXPECT_EQ(file.Find("encoder.weight")->dtype, TensorDtype::kF32);
  EXPECT_THAT(file.Find("encoder.weight")->shape, ElementsAre(2, 3));
  EXPECT_THAT(ReadTensor<float>(file, "encoder.weight"),
              ::testing::ElementsAreArray(kWeight));
  EXPECT_EQ(file.Find("encoder.bias")->dtype, TensorDtype::kBF16);
  EXPECT_THAT(ReadTensor<uint16_t>(file, "encoder.bias"),
              ::testing::ElementsAreArray(kBiasBits));
  EXPECT_EQ(file.Find("half")->dtype, TensorDtype::kF16);
  EXPECT_THAT(ReadTensor<uint16_t>(file, "half"),
              ::testing::ElementsAreArray(kHalfBits));
  EXPECT_EQ(file.Find("ids")->dtype, TensorDtype::kI64);
  EXPECT_THAT(ReadTensor<int64_t>(file, "ids"),
              ::testing::ElementsAreArray(kIds));
  EXPECT_THAT(file.Find("scalar")->shape, IsEmpty());
  EXPECT_THAT(ReadTensor<int64_t>(file, "scalar"), ElementsAre(7));
  EXPECT_THAT(file.Find("empty")->shape, ElementsAre(0, 4));
  EXPECT_THAT(ReadTensor<float>(file, "empty"), IsEmpty());
  EXPECT_THAT(ReadTensor<float>(file, kOddName), ElementsAre(2.5f));
  EXPECT_EQ(file.Find("encoder"), nullptr);
}

TEST_F(SafetensorsFileTest, ReadsEveryTypeThatThePythonLibraryWrites) {
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(ReferencePath()));
  for (const ReferenceDtype& type : kReferenceDtypes) {
    SCOPED_TRACE(type.name);
    const std::string name = absl::StrCat("dtype.", type.name);
    ASSERT_NE(file.Find(name), nullptr);
    EXPECT_EQ(file.Find(name)->dtype, type.dtype);
    EXPECT_THAT(file.Find(name)->shape, ElementsAre(type.elements));
    EXPECT_EQ(ReadTensor<char>(file, name), ReferenceBytes(type.dtype));
  }
}

TEST_F(SafetensorsFileTest, ReadsAndWritesTypesOfSixBits) {
  // No library writes one: the header is by hand.
  const std::string json =
      R"({"b":{"dtype":"F6_E3M2","shape":[2,2],"data_offsets":[0,3]},)"
      R"("a":{"dtype":"F6_E2M3","shape":[8],"data_offsets":[3,9]}})";
  const std::string padded = json + std::string(-json.size() % 8, ' ');
  const std::string bytes = LittleEndian(padded.size()) + padded + "tuvabcdef";
  WriteBytes(Path("read"), bytes);
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(Path("read")));
  EXPECT_EQ(file.Find("a")->dtype, TensorDtype::kF6E2M3);
  EXPECT_EQ(file.Find("b")->dtype, TensorDtype::kF6E3M2);
  ASSERT_THAT(WriteSafetensors(Path("written"),
                               {{"a", TensorDtype::kF6E2M3, {8}, "abcdef"},
                                {"b", TensorDtype::kF6E3M2, {2, 2}, "tuv"}},
                               {}),
              IsOk());
  EXPECT_EQ(ReadBytes(Path("written")), bytes);
}

TEST_F(SafetensorsFileTest, NamesEachTypeOnce) {
  EXPECT_EQ(AllTensorDtypes().size(), 22);
  for (const TensorDtype dtype : AllTensorDtypes()) {
    SCOPED_TRACE(TensorDtypeName(dtype));
    EXPECT_EQ(ParseTensorDtype(TensorDtypeName(dtype)), dtype);
  }
  for (const char* name : {"", "f32", "F6", "F128", "unknown"}) {
    EXPECT_EQ(ParseTensorDtype(name), std::nullopt) << name;
  }
}

TEST_F(SafetensorsFileTest, WritesTheBytesOfThePythonLibrary) {
  const std::string path = Path("written.safetensors");
  std::vector<TensorView> tensors = {
      {"scalar", TensorDtype::kI64, {}, kScalar},
      {"encoder.weight", TensorDtype::kF32, {2, 3}, kWeight},
      {"empty", TensorDtype::kF32, {0, 4}, nullptr},
      {"half", TensorDtype::kF16, {3}, kHalfBits},
      {kOddName, TensorDtype::kF32, {1}, kOdd},
      {"encoder.bias", TensorDtype::kBF16, {2}, kBiasBits},
      {"ids", TensorDtype::kI64, {2}, kIds}};
  std::list<std::vector<char>> data;
  for (const ReferenceDtype& type : kReferenceDtypes) {
    data.push_back(ReferenceBytes(type.dtype));
    tensors.push_back({absl::StrCat("dtype.", type.name),
                       type.dtype,
                       {type.elements},
                       data.back().data()});
  }
  ASSERT_THAT(WriteSafetensors(path, tensors, {{"note", "Grüße \"層\"\t"}}),
              IsOk());
  EXPECT_EQ(ReadBytes(path), ReadBytes(ReferencePath()));
}

TEST_F(SafetensorsFileTest, RoundTripsSeveralEntriesOfMetadata) {
  const std::string path = Path("metadata.safetensors");
  const std::map<std::string, std::string> metadata = {
      {"", ""}, {"format", "pt"}, {"rank", "{\"r\": 8}\x01"}, {"ä", "\x7f/"}};
  ASSERT_THAT(WriteSafetensors(path, {}, metadata), IsOk());
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(path));
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_THAT(file.tensors(), IsEmpty());
}

TEST_F(SafetensorsFileTest, OpensAFileWithoutTensors) {
  WriteBytes(Path("none"), FileBytes("{}", 0));
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(Path("none")));
  EXPECT_THAT(file.tensors(), IsEmpty());
  EXPECT_THAT(file.metadata(), IsEmpty());
}

TEST_F(SafetensorsFileTest, ListsTensorsInTheOrderOfTheirBytes) {
  WriteBytes(
      Path("order"),
      FileBytes(
          R"({"b":{"dtype":"F32","shape":[2],"data_offsets":[2,10]},)"
          R"("z":{"dtype":"F32","shape":[0],"data_offsets":[2,2]},)"
          R"("y":{"shape":[7,0],"data_offsets":[2,2],"dtype":"I64"},)"
          R"( "a" : {"data_offsets":[0,2],"dtype":"BF16","shape":[1]}}   )",
          10));
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(Path("order")));
  std::vector<std::string> names;
  for (const TensorInfo& tensor : file.tensors()) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("a", "y", "z", "b"));
}

struct BrokenFile {
  std::string name;
  std::string bytes;
  std::string message;
};

std::vector<BrokenFile> BrokenFiles() {
  // One float32 tensor "t" of 2 elements, with something put in or changed.
  const auto tensor = [](const std::string& dtype, const std::string& shape,
                         const std::string& offsets, int data_size = 8) {
    return FileBytes(absl::StrCat("{\"t\":{\"dtype\":", dtype, ",\"shape\":",
                                  shape, ",\"data_offsets\":", offsets, "}}"),
                     data_size);
  };
  const auto two = [](const std::string& a_offsets,
                      const std::string& b_offsets, int data_size) {
    return FileBytes(
        absl::StrCat(R"({"a":{"dtype":"F16","shape":[4],"data_offsets":)",
                     a_offsets,
                     R"(},"b":{"dtype":"F16","shape":[4],"data_offsets":)",
                     b_offsets, "}}"),
        data_size);
  };
  const std::string good = tensor("\"F32\"", "[2]", "[0,8]");
  return {
      // The file.
      {"Empty", "", "it has only 0 bytes"},
      {"CutInTheLength", good.substr(0, 5), "it has only 5 bytes"},
      {"CutInTheHeader", good.substr(0, 30), "but the file only 30"},
      {"CutInTheData", good.substr(0, good.size() - 1),
       "data_offsets [0, 8] are not a range of the file's 7 bytes"},
      {"MoreDataThanTensors", good + "x",
       "the tensors take 8 bytes, but the file has 9 bytes of data"},
      {"DataWithoutTensors", FileBytes("{}", 3), "take 0 bytes"},
      {"HeaderLengthOf2To63", LittleEndian(uint64_t{1} << 63) + "{}",
       "a length of 9223372036854775808 bytes"},
      {"HeaderLengthOf2To64Minus1",
       LittleEndian(std::numeric_limits<uint64_t>::max()) + "{}",
       "a length of 18446744073709551615 bytes"},

      // The JSON.
      {"NoHeader", LittleEndian(0), "does not begin with {"},
      {"ByteOrderMark", FileBytes("\xef\xbb\xbf{}", 0),
       "does not begin with {"},
      {"SpaceBeforeTheHeader", FileBytes(" {}", 0), "does not begin with {"},
      {"AnArray", FileBytes("[]", 0), "does not begin with {"},
      {"NotJson", FileBytes("{\"t\":}", 0), "not valid JSON at its byte 6"},
      {"UnclosedObject", FileBytes("{", 0), "not valid JSON"},
      {"TextAfterTheObject", FileBytes("{}x", 0), "not valid JSON"},
      {"ZeroByteAfterTheObject", FileBytes(std::string("{}\0x", 4), 0),
       "a zero byte at its byte 2"},
      {"NotUtf8", FileBytes("{\"\xff\":{}}", 0), "not valid JSON"},
      {"DeepArrays", FileBytes("{\"t\":" + std::string(1000000, '['), 0),
       "\"t\" must be an object, got an array"},
      {"NameOfControlCharacters", FileBytes("{\"a\\n\\u001b[2J\":1}", 0),
       "\"a\\x0a\\x1b[2J\" must be an object, got 1"},
      {"DeepObjects",
       FileBytes("{\"t\":{\"shape\":{\"shape\":{\"shape\":{}}}}}", 0),
       "tensor \"t\": shape must be an array, got an object"},
      {"DeepShape", tensor("\"F32\"", "[[[[2]]]]", "[0,8]"),
       "tensor \"t\": shape must hold integers"},

      // Keys.
      {"TensorTwice",
       FileBytes(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                 R"("t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
                 4),
       "the header has \"t\" twice"},
      {"TensorTwiceByEscape",
       FileBytes(R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                 R"("\u0074":{"dtype":"F32","shape":[1],)"
                 R"("data_offsets":[4,8]}})",
                 8),
       "the header has \"t\" twice"},
      {"MetadataTwice",
       FileBytes(R"({"__metadata__":{},"__metadata__":{}})", 0),
       "the header has \"__metadata__\" twice"},
      {"MetadataKeyTwice",
       FileBytes(R"({"__metadata__":{"k":"1","k":"1"}})", 0),
       "__metadata__ has \"k\" twice"},
      {"TensorTwiceWithOthersBetween",
       FileBytes(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                 R"("u":{"dtype":"U8","shape":[1],"data_offsets":[1,2]},)"
                 R"("t":{"dtype":"I8","shape":[1],"data_offsets":[2,3]}})",
                 3),
       "the header has \"t\" twice"},
      {"LongName", FileBytes("{\"" + std::string(1000000, 'n') + "\":null}", 0),
       "\"" + std::string(200, 'n') + "...\" must be an object"},
      {"LongShape",
       tensor("\"F32\"",
              absl::StrCat("[", absl::StrJoin(std::vector<int>(1000, 1), ","),
                           "]"),
              "[0,8]"),
       "the shape [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, ...] of"},
      {"FieldTwice", tensor("\"F32\",\"dtype\":\"F32\"", "[2]", "[0,8]"),
       "tensor \"t\": it has dtype twice"},
      {"UnknownField", tensor("\"F32\",\"codec\":\"zip\"", "[2]", "[0,8]"),
       "tensor \"t\": unknown field \"codec\""},
      {"NoDtype", FileBytes(R"({"t":{"shape":[0],"data_offsets":[0,0]}})", 0),
       "tensor \"t\": it has no dtype"},
      {"NoShape", FileBytes(R"({"t":{"dtype":"F32","data_offsets":[0,0]}})", 0),
       "tensor \"t\": it has no shape"},
      {"NoOffsets", FileBytes(R"({"t":{"dtype":"F32","shape":[0]}})", 0),
       "tensor \"t\": it has no data_offsets"},

      // Types of values.
      {"TensorIsNull", FileBytes(R"({"t":null})", 0),
       "\"t\" must be an object, got null"},
      {"MetadataIsAString", FileBytes(R"({"__metadata__":"x"})", 0),
       "\"__metadata__\" must be an object, got a string"},
      {"MetadataIsANumber", FileBytes(R"({"__metadata__":{"k":3}})", 0),
       "__metadata__ \"k\" must be a string, got 3"},
      {"MetadataIsNull", FileBytes(R"({"__metadata__":{"k":null}})", 0),
       "__metadata__ \"k\" must be a string, got null"},
      {"MetadataIsAnObject", FileBytes(R"({"__metadata__":{"k":{}}})", 0),
       "__metadata__ \"k\" must be a string, got an object"},
      {"DtypeIsANumber", tensor("32", "[2]", "[0,8]"),
       "tensor \"t\": dtype must be a string, got 32"},
      {"DtypeIsAnArray", tensor("[]", "[2]", "[0,8]"),
       "tensor \"t\": dtype must be a string, got an array"},
      {"UnknownDtype", tensor("\"F7\"", "[8]", "[0,8]"),
       "tensor \"t\": the type \"F7\" is not one of BOOL, F4, F6_E2M3, "},
      {"LowerCaseDtype", tensor("\"f32\"", "[2]", "[0,8]"),
       "the type \"f32\" is not one of"},
      {"ShapeIsANumber", tensor("\"F32\"", "2", "[0,8]"),
       "tensor \"t\": shape must be an array, got 2"},
      {"NegativeShape", tensor("\"F32\"", "[-2]", "[0,8]"),
       "tensor \"t\": shape must hold integers from 0 to 2^63 - 1, got -2"},
      {"FractionalShape", tensor("\"F32\"", "[2.0]", "[0,8]"), "got 2.0"},
      {"BooleanShape", tensor("\"F32\"", "[true]", "[0,8]"), "got true"},
      {"ShapeOf2To63", tensor("\"F32\"", "[9223372036854775808]", "[0,8]"),
       "got 9223372036854775808"},
      {"ShapeBeyond64Bits",
       tensor("\"F32\"", "[99999999999999999999]", "[0,8]"),
       "got 99999999999999999999"},

      // Sizes and places.
      {"ShapeProductOverflows",
       tensor("\"F32\"", "[4294967296,4294967296,2]", "[0,8]"),
       "tensor \"t\": the shape [4294967296, 4294967296, 2] of F32 is too "
       "large"},
      {"ShapeTimesDtypeOverflows",
       tensor("\"F32\"", "[4611686018427387906]", "[0,8]"), "is too large"},
      {"EmptyShapeOverflows",
       tensor("\"F32\"", "[4294967296,4294967296,0]", "[0,0]", 0),
       "is too large"},
      {"ShapeSmallerThanOffsets", tensor("\"F32\"", "[1]", "[0,8]"),
       "tensor \"t\": the shape [1] of F32 takes 4 bytes, but data_offsets "
       "[0, 8] give it 8"},
      {"ShapeEndsInsideAByte", tensor("\"F4\"", "[3,5]", "[0,8]"),
       "the shape [3, 5] of F4 takes 60 bits, which do not fill whole bytes"},
      {"ScalarInsideAByte", tensor("\"F6_E2M3\"", "[]", "[0,1]", 1),
       "takes 6 bits, which do not fill whole bytes"},
      {"ScalarOfTwoElements", tensor("\"F32\"", "[]", "[0,8]"),
       "the shape [] of F32 takes 4 bytes"},
      {"OneOffset", tensor("\"F32\"", "[2]", "[8]"),
       "tensor \"t\": data_offsets must be 2 numbers, got 1"},
      {"ThreeOffsets", tensor("\"F32\"", "[2]", "[0,8,8]"),
       "data_offsets must be 2 numbers, got more"},
      {"OffsetsBackwards", tensor("\"F32\"", "[2]", "[8,0]"),
       "data_offsets [8, 0] are not a range"},
      {"OffsetsOutOfRange", tensor("\"F32\"", "[2]", "[8,16]"),
       "data_offsets [8, 16] are not a range of the file's 8 bytes"},
      {"OffsetsNearOverflow",
       tensor("\"F32\"", "[2]", "[9223372036854775800,9223372036854775807]"),
       "are not a range"},
      {"Overlap", two("[0,8]", "[4,12]", 12),
       "tensor \"b\" begins at byte 4 of the data, inside tensor \"a\""},
      {"SamePlace", two("[0,8]", "[0,8]", 8),
       "tensor \"b\" begins at byte 0 of the data, inside tensor \"a\""},
      {"Hole", two("[0,8]", "[10,18]", 18),
       "the bytes 8 to 10 of the data, before tensor \"b\", belong to no"},
      {"HoleAtTheBeginning", two("[2,10]", "[10,18]", 18),
       "the bytes 0 to 2 of the data, before tensor \"a\""},
  };
}

class BrokenFileTest : public SafetensorsFileTest,
                       public ::testing::WithParamInterface<BrokenFile> {};

TEST_P(BrokenFileTest, IsDataLossThatSaysWhere) {
  const std::string path = Path("broken");
  WriteBytes(path, GetParam().bytes);
  EXPECT_THAT(SafetensorsFile::Open(path),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr(path), HasSubstr(GetParam().message))));
}

INSTANTIATE_TEST_SUITE_P(All, BrokenFileTest,
                         ::testing::ValuesIn(BrokenFiles()),
                         [](const ::testing::TestParamInfo<BrokenFile>& info) {
                           return info.param.name;
                         });

TEST_F(SafetensorsFileTest, RefusesAHeaderOverTheLimit) {
  // A sparse file: it has the bytes, but takes none.
  const std::string path = Path("sparse");
  WriteBytes(path, LittleEndian(100'000'001) + "{");
  fs::resize_file(path, 200'000'000);
  EXPECT_THAT(SafetensorsFile::Open(path),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("more than the format's limit of 100000000")));
}

TEST_F(SafetensorsFileTest, NamesAFileThatIsNotThere) {
  EXPECT_THAT(
      SafetensorsFile::Open(Path("missing")),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr(Path("missing"))));
}

TEST_F(SafetensorsFileTest, RefusesWhatIsNotAFileWithoutWaiting) {
  EXPECT_THAT(SafetensorsFile::Open(Path("")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("not a regular file")));
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(SafetensorsFile::Open(Path("pipe")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("not a regular file")));
}

TEST_F(SafetensorsFileTest, ReadsPartsOfATensor) {
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(ReferencePath()));
  const TensorInfo& weight = *file.Find("encoder.weight");
  float row[3];
  const absl::Span<char> bytes(reinterpret_cast<char*>(row), sizeof(row));
  ASSERT_THAT(file.Read(weight, 12, bytes), IsOk());
  EXPECT_THAT(row, ElementsAre(1.5f, -2.0f, 3.25f));
  EXPECT_THAT(file.Read(weight, 24, {}), IsOk());
  for (const uint64_t offset :
       {uint64_t{13}, uint64_t{25}, std::numeric_limits<uint64_t>::max()}) {
    EXPECT_THAT(file.Read(weight, offset, bytes),
                StatusIs(absl::StatusCode::kOutOfRange,
                         HasSubstr("tensor \"encoder.weight\"")));
  }
}

TEST_F(SafetensorsFileTest, ReadsBeyondFourGiB) {
  // Sparse: 5 GiB of zeros and then one tensor.
  const uint64_t big = uint64_t{5} << 30;
  const std::string path = Path("big");
  const std::string json = absl::StrCat(
      R"({"big":{"dtype":"I64","shape":[)", big / 8, R"(],"data_offsets":[0,)",
      big, R"(]},"last":{"dtype":"I64","shape":[1],"data_offsets":[)", big, ",",
      big + 8, "]}}");
  WriteBytes(path, LittleEndian(json.size()) + json);
  std::error_code error;
  fs::resize_file(path, 8 + json.size() + big, error);
  if (error) GTEST_SKIP() << "no sparse file of 5 GiB: " << error.message();
  std::ofstream(path, std::ios::binary | std::ios::app)
      << LittleEndian(0x0123456789abcdef);

  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(path));
  EXPECT_THAT(ReadTensor<int64_t>(file, "last"),
              ElementsAre(0x0123456789abcdef));
  int64_t element = -1;
  ASSERT_THAT(file.Read(*file.Find("big"), big - 8,
                        absl::MakeSpan(reinterpret_cast<char*>(&element), 8)),
              IsOk());
  EXPECT_EQ(element, 0);
}

TEST_F(SafetensorsFileTest, ReadsFromSeveralThreads) {
  const std::string path = Path("threads");
  std::vector<int64_t> values(100'000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = i * i;
  ASSERT_THAT(
      WriteSafetensors(
          path, {{"t", TensorDtype::kI64, {100'000}, values.data()}}, {}),
      IsOk());
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(path));
  std::vector<std::vector<int64_t>> read(4);
  std::vector<std::thread> threads;
  for (auto& result : read) {
    threads.emplace_back([&] { result = ReadTensor<int64_t>(file, "t"); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : read) EXPECT_EQ(result, values);
}

TEST_F(SafetensorsFileTest, ReportsAFileThatIsCutAfterOpening) {
  const std::string path = Path("cut");
  fs::copy_file(ReferencePath(), path);
  fs::permissions(path, fs::perms::owner_write, fs::perm_options::add);
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(path));
  const TensorInfo& half = *file.Find("half");
  fs::resize_file(path, half.byte_offset + 2);
  char bytes[6];
  EXPECT_THAT(file.Read(half, 0, absl::MakeSpan(bytes)),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr(path), HasSubstr("tensor \"half\""),
                             HasSubstr("4 more bytes were expected"))));
}

TEST_F(SafetensorsFileTest, StaysReadableWhenMovedOrReplaced) {
  const std::string path = Path("moved");
  const float before[] = {1.0f}, after[] = {2.0f};
  ASSERT_THAT(
      WriteSafetensors(path, {{"t", TensorDtype::kF32, {1}, before}}, {}),
      IsOk());
  LORA_ASSERT_OK_AND_ASSIGN(SafetensorsFile opened,
                            SafetensorsFile::Open(path));
  ASSERT_THAT(
      WriteSafetensors(path, {{"t", TensorDtype::kF32, {1}, after}}, {}),
      IsOk());
  SafetensorsFile moved = std::move(opened);
  EXPECT_THAT(ReadTensor<float>(moved, "t"), ElementsAre(1.0f));
  LORA_ASSERT_OK_AND_ASSIGN(moved, SafetensorsFile::Open(path));
  EXPECT_THAT(ReadTensor<float>(moved, "t"), ElementsAre(2.0f));
}

TEST_F(SafetensorsFileTest, RefusesToWriteMemoryThatTwoNamesShare) {
  const std::string path = Path("shared");
  const float values[4] = {};
  struct {
    const float* second;
    int64_t second_size;
    bool shares;
  } cases[] = {{values, 2, true},
               {values + 1, 1, true},
               {values + 1, 3, true},
               {values + 2, 2, false},
               {values + 1, 0, false}};
  for (const auto& c : cases) {
    SCOPED_TRACE(absl::StrCat(c.second - values, " ", c.second_size));
    const absl::Status status = WriteSafetensors(
        path,
        {{"first", TensorDtype::kF32, {2}, values},
         {"second", TensorDtype::kF32, {c.second_size}, c.second}},
        {});
    if (c.shares) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                   AllOf(HasSubstr("\"first\""),
                                         HasSubstr("\"second\""),
                                         HasSubstr("share memory"))));
    } else {
      EXPECT_THAT(status, IsOk());
    }
  }
}

TEST_F(SafetensorsFileTest, RefusesTensorsThatTheFormatCannotHold) {
  const float value[] = {1.0f};
  struct {
    std::vector<TensorView> tensors;
    std::string message;
  } cases[] = {
      {{{"t", TensorDtype::kF32, {1}, value},
        {"t", TensorDtype::kF32, {0}, nullptr}},
       "tensor \"t\" is there twice"},
      {{{"__metadata__", TensorDtype::kF32, {1}, value}},
       "\"__metadata__\" has a name that the format reserves"},
      {{{"t", TensorDtype::kF32, {2, -1}, value}},
       "tensor \"t\": the shape [2, -1] of F32 has a negative dimension"},
      {{{"t", TensorDtype::kF32, {int64_t{1} << 61, 2}, value}},
       "tensor \"t\": the shape [2305843009213693952, 2] of F32 is too large"},
      {{{"t", TensorDtype::kF4, {3}, value}},
       "tensor \"t\": the shape [3] of F4 takes 12 bits"},
      {{{"t", TensorDtype::kF32, {1}, nullptr}}, "tensor \"t\" has no data"},
      {{{"\xff", TensorDtype::kF32, {1}, value}}, "not UTF-8"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(
        WriteSafetensors(Path("refused"), c.tensors, {}),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.message)));
  }
  EXPECT_THAT(FilesInFolder(), IsEmpty());
}

TEST_F(SafetensorsFileTest, NamesTheFolderThatIsNotThere) {
  const std::string path = Path("no_such_folder/t.safetensors");
  EXPECT_THAT(WriteSafetensors(path, {}, {}),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr(Path("no_such_folder"))));
}

TEST_F(SafetensorsFileTest, KeepsTheOldFileWholeWhenTheDiskIsFull) {
  const std::string path = Path("model.safetensors");
  const float old_value[] = {1.0f};
  ASSERT_THAT(
      WriteSafetensors(path, {{"old", TensorDtype::kF32, {1}, old_value}}, {}),
      IsOk());
  const std::string old_bytes = ReadBytes(path);

  const std::vector<float> large(10'000, 2.0f);
  {
    const FileSizeLimit disk_full(20'000);
    EXPECT_THAT(
        WriteSafetensors(
            path, {{"new", TensorDtype::kF32, {10'000}, large.data()}}, {}),
        StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("writing")));
  }
  EXPECT_EQ(ReadBytes(path), old_bytes);
  EXPECT_THAT(FilesInFolder(), ElementsAre("model.safetensors"));

  // And with room again the new one takes its place.
  EXPECT_THAT(
      WriteSafetensors(
          path, {{"new", TensorDtype::kF32, {10'000}, large.data()}}, {}),
      IsOk());
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(path));
  EXPECT_EQ(ReadTensor<float>(file, "new"), large);
  EXPECT_THAT(FilesInFolder(), ElementsAre("model.safetensors"));
}

// The child repeats the test up to the write that kills it.
TEST_F(SafetensorsFileTest, KeepsTheOldFileWholeWhenTheWriterIsKilled) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const std::string path = Path("model.safetensors");
  const float old_value[] = {1.0f};
  ASSERT_THAT(
      WriteSafetensors(path, {{"old", TensorDtype::kF32, {1}, old_value}}, {}),
      IsOk());
  const std::string old_bytes = ReadBytes(path);
  const std::vector<float> large(10'000, 2.0f);
  const std::vector<TensorView> tensors = {
      {"new", TensorDtype::kF32, {10'000}, large.data()}};
  EXPECT_EXIT(
      {
        DieAtFileSize(20'000);
        WriteSafetensors(path, tensors, {}).IgnoreError();
      },
      ::testing::KilledBySignal(SIGXFSZ), "");
  EXPECT_EQ(ReadBytes(path), old_bytes);
  // What was written is beside it, cut at the limit.
  const std::vector<std::string> names = FilesInFolder();
  ASSERT_THAT(names, ElementsAre(HasSubstr(".tmp"), "model.safetensors"));
  EXPECT_EQ(fs::file_size(Path(names[0])), 20'000);

  EXPECT_THAT(WriteSafetensors(path, tensors, {}), IsOk());
  LORA_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                            SafetensorsFile::Open(path));
  EXPECT_EQ(ReadTensor<float>(file, "new"), large);
}

TEST_F(SafetensorsFileTest, LeavesNoTemporaryFileWhenTheTargetIsAFolder) {
  fs::create_directory(Path("taken"));
  EXPECT_THAT(WriteSafetensors(Path("taken"), {}, {}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("replacing")));
  EXPECT_THAT(FilesInFolder(), ElementsAre("taken"));
}

TEST_F(SafetensorsFileTest, WritesWithTheProcessesDefaultPermissions) {
  const mode_t before = umask(0027);
  EXPECT_THAT(WriteSafetensors(Path("permissions"), {}, {}), IsOk());
  umask(before);
  EXPECT_EQ(fs::status(Path("permissions")).permissions(),
            static_cast<fs::perms>(0640));
}

}  // namespace
}  // namespace trainer_lora::distributed
