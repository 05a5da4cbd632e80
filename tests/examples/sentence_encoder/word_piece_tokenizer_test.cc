// The oracle is Hugging Face's tokenizer:
// tests/parity/make_tokenizer_fixture.py wrote what it makes of the same text.
#include "examples/sentence_encoder/word_piece_tokenizer.h"

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <ios>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::examples {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::RunfilePath;
using ::trainer_lora::testutil::StatusIs;

constexpr int kNoLimit = 1 << 20;
constexpr int64_t kBegin = 101;  // [CLS]
constexpr int64_t kEnd = 102;    // [SEP]

// The fixtures hold ids without the two markers.
std::vector<int64_t> WithMarkers(const std::vector<int64_t>& ids) {
  std::vector<int64_t> marked = {kBegin};
  marked.insert(marked.end(), ids.begin(), ids.end());
  marked.push_back(kEnd);
  return marked;
}

std::string Utf8(uint32_t c) {
  std::string bytes;
  const auto add = [&](uint32_t byte) { bytes += static_cast<char>(byte); };
  if (c < 0x80) {
    add(c);
  } else if (c < 0x800) {
    add(0xC0 | c >> 6);
    add(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    add(0xE0 | c >> 12);
    add(0x80 | (c >> 6 & 0x3F));
    add(0x80 | (c & 0x3F));
  } else {
    add(0xF0 | c >> 18);
    add(0x80 | (c >> 12 & 0x3F));
    add(0x80 | (c >> 6 & 0x3F));
    add(0x80 | (c & 0x3F));
  }
  return bytes;
}

// 64-bit FNV-1a over the ids as pairs of bytes, as the script has it.
class IdHash {
 public:
  void Add(int64_t id) {
    AddByte(id & 0xFF);
    AddByte(id >> 8);
  }
  uint64_t value() const { return value_; }

 private:
  void AddByte(uint64_t byte) { value_ = (value_ ^ byte) * 0x100000001B3; }

  uint64_t value_ = 0xCBF29CE484222325;
};

class WordPieceTokenizerTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto tokenizer = WordPieceTokenizer::Load(RunfilePath("minilm/vocab.txt"));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = new WordPieceTokenizer(*std::move(tokenizer));
  }
  static void TearDownTestSuite() {
    delete tokenizer_;
    tokenizer_ = nullptr;
  }

  static std::vector<int64_t> Encode(absl::string_view text) {
    return tokenizer_->Encode(text, kNoLimit);
  }

  static WordPieceTokenizer* tokenizer_;
};

WordPieceTokenizer* WordPieceTokenizerTest::tokenizer_ = nullptr;

TEST_F(WordPieceTokenizerTest, AgreesWithHuggingFaceOnWordNet) {
  constexpr int kStride = 16;  // As the script has it.
  std::ifstream glosses(RunfilePath("wordnet/wordnet/data.noun"));
  std::ifstream expected(
      RunfilePath("trainer_lora/tests/testdata/tokenizer_wordnet.txt"));
  int synset = 0;
  int compared = 0;
  std::string line, ids_line;
  while (std::getline(glosses, line)) {
    if (absl::StartsWith(line, "  ") || synset++ % kStride != 0) continue;
    if (!std::getline(expected, ids_line)) break;
    std::istringstream stream(ids_line);
    std::vector<int64_t> ids;
    for (int64_t id; stream >> id;) ids.push_back(id);
    const std::string gloss = line.substr(line.find(" | ") + 3);
    EXPECT_EQ(Encode(gloss), WithMarkers(ids)) << gloss;
    ++compared;
  }
  EXPECT_EQ(compared, 5000);
}

TEST_F(WordPieceTokenizerTest, AgreesWithHuggingFaceOnAwkwardText) {
  std::ifstream file(
      RunfilePath("trainer_lora/tests/testdata/tokenizer_table.json"));
  const nlohmann::json table = nlohmann::json::parse(file);
  EXPECT_GT(table.size(), 100);
  for (const nlohmann::json& row : table) {
    const std::string text = row[0];
    EXPECT_EQ(Encode(text), WithMarkers(row[1])) << row[0].dump(-1, ' ', true);
  }
}

TEST_F(WordPieceTokenizerTest, AgreesWithHuggingFaceOnEachUnicodeCharacter) {
  std::ifstream file(
      RunfilePath("trainer_lora/tests/testdata/tokenizer_unicode.txt"));
  int characters = 0;
  uint32_t first, last;
  uint64_t expected;
  while (file >> std::hex >> first >> last >> expected) {
    IdHash hash;
    for (uint32_t c = first; c <= last; ++c, ++characters) {
      const auto ids = Encode(absl::StrCat("a", Utf8(c), "b"));
      for (size_t i = 1; i + 1 < ids.size(); ++i) hash.Add(ids[i]);
    }
    EXPECT_EQ(hash.value(), expected)
        << "between U+" << std::hex << first << " and U+" << last;
  }
  EXPECT_GT(characters, 200'000);
}

TEST_F(WordPieceTokenizerTest, LeavesOutBytesThatAreNotUtf8) {
  for (const char* text : {
           "ca\xFFt",          // Never a byte of UTF-8.
           "ca\xE4\xB8t",      // Cut off by a letter.
           "cat\xF0\x9F\x98",  // Cut off by the end.
           "\x80\xBF"
           "cat",                  // Continuation of nothing.
           "ca\xC0\xAFt",          // Overlong.
           "ca\xED\xA0\x80t",      // A surrogate.
           "ca\xF4\x90\x80\x80t",  // Beyond U+10FFFF.
       }) {
    EXPECT_EQ(Encode(text), Encode("cat")) << testing::PrintToString(text);
  }
}

TEST_F(WordPieceTokenizerTest, KeepsTheMarkersWhenItTruncates) {
  const std::vector<int64_t> ids = Encode("a large feline");
  ASSERT_EQ(ids.size(), 6);  // Five and a half words: "fe ##line".
  EXPECT_EQ(tokenizer_->Encode("a large feline", 6), ids);
  EXPECT_THAT(tokenizer_->Encode("a large feline", 4),
              ElementsAre(kBegin, ids[1], ids[2], kEnd));
  EXPECT_THAT(tokenizer_->Encode("a large feline", 2),
              ElementsAre(kBegin, kEnd));
  EXPECT_THAT(tokenizer_->Encode("a large feline", -1),
              ElementsAre(kBegin, kEnd));
}

TEST_F(WordPieceTokenizerTest, PadsWithThePadToken) {
  EXPECT_EQ(tokenizer_->pad_id(), 0);
}

std::string WriteVocabulary(const std::string& name,
                            const std::string& content) {
  const std::string path = testing::TempDir() + "/" + name;
  std::ofstream(path) << content;
  return path;
}

TEST(WordPieceTokenizerLoadTest, NamesAFileThatIsNotThere) {
  EXPECT_THAT(
      WordPieceTokenizer::Load("no_such_vocab.txt"),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("no_such_vocab.txt")));
}

TEST(WordPieceTokenizerLoadTest, NamesWhatIsWrongWithAVocabulary) {
  const std::string special = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n";
  const struct {
    std::string name;
    std::string content;
    std::string complaint;
  } kCases[] = {
      {"no_sep.txt", "[PAD]\n[UNK]\n[CLS]\n[MASK]\na\n", "[SEP]"},
      {"empty_piece.txt", special + "a\n\nb\n", ":7:"},
      {"twice.txt", special + "a\nb\na\n", ":8: 'a' was on line 6"},
      {"nothing.txt", "", "[PAD]"},
  };
  for (const auto& test_case : kCases) {
    const std::string path = WriteVocabulary(test_case.name, test_case.content);
    EXPECT_THAT(WordPieceTokenizer::Load(path),
                StatusIs(absl::StatusCode::kDataLoss,
                         AllOf(HasSubstr(test_case.name),
                               HasSubstr(test_case.complaint))));
  }
}

}  // namespace
}  // namespace trainer_lora::examples
