// Embeds sentences with the base model and with an adapter, for peft_test.py.
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/status.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "examples/sentence_encoder/sentence_batch.h"
#include "examples/sentence_encoder/trainer.h"
#include "examples/sentence_encoder/training_config.h"
#include "examples/sentence_encoder/word_piece_tokenizer.h"
#include "lora/adapter_file.h"
#include "tools/cpp/runfiles/runfiles.h"

ABSL_FLAG(std::string, config, "", "YAML file of the run");
ABSL_FLAG(std::string, adapter, "", "folder of the adapter");
ABSL_FLAG(std::string, output, "", "safetensors file to write");

namespace trainer_lora::examples {
namespace {

// The same in peft_test.py.
const char* const kSentences[] = {
    "a feline mammal usually having thick soft fur",
    "cat",
    "the capital and largest city of France, on the Seine",
    "any of numerous plants; caf\u00e9, na\u00efve, 42!",
};

absl::Status Embed(const std::string& program) {
  using ::bazel::tools::cpp::runfiles::Runfiles;
  const std::unique_ptr<Runfiles> runfiles(Runfiles::Create(program));
  if (runfiles == nullptr) return absl::NotFoundError("no runfiles");
  const auto config = TrainingConfig::Load(absl::GetFlag(FLAGS_config));
  if (!config.ok()) return config.status();
  const TrainingFiles files = {
      runfiles->Rlocation("minilm/config.json"),
      runfiles->Rlocation("minilm/model.safetensors"),
      runfiles->Rlocation("minilm/vocab.txt"),
      runfiles->Rlocation("wordnet/wordnet/data.noun")};
  const auto trainer = Trainer::Create(*config, files, /*mesh=*/nullptr);
  if (!trainer.ok()) return trainer.status();
  const auto tokenizer = WordPieceTokenizer::Load(files.vocabulary);
  if (!tokenizer.ok()) return tokenizer.status();

  std::vector<std::vector<int64_t>> sentences;
  for (const char* sentence : kSentences) {
    sentences.push_back(tokenizer->Encode(sentence, 64));
  }
  BertEncoder& encoder = (*trainer)->encoder();
  const at::Tensor base =
      EmbedSentences(encoder, sentences, tokenizer->pad_id()).contiguous();
  const absl::Status loaded =
      lora::LoadAdapter(*encoder, absl::GetFlag(FLAGS_adapter));
  if (!loaded.ok()) return loaded;
  const at::Tensor adapted =
      EmbedSentences(encoder, sentences, tokenizer->pad_id()).contiguous();
  const auto f32 = distributed::TensorDtype::kF32;
  return distributed::WriteSafetensors(
      absl::GetFlag(FLAGS_output),
      {{"base", f32, base.sizes().vec(), base.const_data_ptr()},
       {"adapted", f32, adapted.sizes().vec(), adapted.const_data_ptr()}},
      {});
}

}  // namespace
}  // namespace trainer_lora::examples

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const absl::Status status = trainer_lora::examples::Embed(argv[0]);
  if (status.ok()) return 0;
  std::cerr << "embed: " << status << "\n";
  return 1;
}
