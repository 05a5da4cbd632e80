#include "distributed/checkpoint/safetensors_checkpoint.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "config/logging.h"
#include "distributed/checkpoint/internal/json_handler.h"
#include "distributed/checkpoint/internal/read_file.h"
#include "distributed/checkpoint/internal/safetensors_index.h"
#include "distributed/checkpoint/safetensors_file.h"

namespace trainer_lora::distributed {
namespace {

namespace fs = std::filesystem;

constexpr char kFileSuffix[] = ".safetensors";
constexpr char kIndexSuffix[] = ".safetensors.index.json";

// The names of a folder's checkpoints, sorted.
struct FolderContents {
  std::vector<std::string> indices;
  std::vector<std::string> files;
};

// Names for a message: the first ten, and how many more there are.
class NameList {
 public:
  void Add(absl::string_view name, absl::string_view note = "") {
    if (++count_ > kMaxShown) return;
    absl::StrAppend(&text_, count_ > 1 ? ", " : "", internal::QuoteName(name),
                    note);
  }
  bool empty() const { return count_ == 0; }
  std::string ToString() const {
    if (count_ <= kMaxShown) return text_;
    return absl::StrCat(text_, " and ", count_ - kMaxShown, " more");
  }

 private:
  static constexpr size_t kMaxShown = 10;
  size_t count_ = 0;
  std::string text_;
};

void Warn(const std::string& path, absl::string_view message) {
  config::InitLogger("checkpoint").Warning(absl::StrCat(path, ": ", message));
}

absl::StatusOr<FolderContents> ListFolder(const std::string& folder) {
  FolderContents contents;
  std::error_code error;
  fs::directory_iterator entry(folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (absl::EndsWith(name, kIndexSuffix)) contents.indices.push_back(name);
    if (absl::EndsWith(name, kFileSuffix)) contents.files.push_back(name);
  }
  if (error) {
    return absl::ErrnoToStatus(error.value(), absl::StrCat("opening ", folder));
  }
  std::sort(contents.indices.begin(), contents.indices.end());
  std::sort(contents.files.begin(), contents.files.end());
  return contents;
}

absl::Status Ambiguous(absl::string_view folder, const NameList& candidates) {
  return absl::InvalidArgumentError(
      absl::StrCat(folder, " has more than one checkpoint: give the path of ",
                   "one of ", candidates.ToString()));
}

// The path in `folder` of its index or, without one, of its file.
absl::StatusOr<std::string> ChooseCheckpoint(const std::string& folder,
                                             const FolderContents& contents) {
  const std::vector<std::string>& names =
      contents.indices.empty() ? contents.files : contents.indices;
  if (names.empty()) {
    return absl::NotFoundError(absl::StrCat(folder, " has no *", kIndexSuffix,
                                            " and no *", kFileSuffix));
  }
  if (names.size() == 1) return (fs::path(folder) / names.front()).string();
  NameList candidates;
  for (const std::string& name : names) candidates.Add(name);
  return Ambiguous(folder, candidates);
}

absl::StatusOr<internal::SafetensorsIndex> ReadIndex(const std::string& path) {
  LORA_ASSIGN_OR_RETURN(
      const std::string json,
      internal::ReadFile(path, internal::kMaxSafetensorsIndexSize));
  absl::StatusOr<internal::SafetensorsIndex> index =
      internal::ParseSafetensorsIndex(json);
  if (index.ok()) return index;
  return absl::DataLossError(absl::StrCat(
      path, " is not a valid safetensors index: ", index.status().message()));
}

// That none of `files_beside` the index at `path` is a checkpoint of its own.
absl::Status CheckFilesAreNamed(const std::string& path,
                                const std::map<std::string, size_t>& files,
                                const std::vector<std::string>& files_beside) {
  NameList candidates;
  candidates.Add(fs::path(path).filename().string());
  bool all_are_named = true;
  for (const std::string& name : files_beside) {
    if (files.count(name) != 0) continue;
    candidates.Add(name);
    all_are_named = false;
  }
  if (all_are_named) return absl::OkStatus();
  return Ambiguous(fs::path(path).parent_path().string(), candidates);
}

}  // namespace

absl::StatusOr<SafetensorsCheckpoint> SafetensorsCheckpoint::Open(
    const std::string& path) {
  SafetensorsCheckpoint checkpoint(path);
  std::string chosen = path;
  FolderContents contents;
  std::error_code error;
  if (fs::is_directory(path, error)) {
    LORA_ASSIGN_OR_RETURN(contents, ListFolder(path));
    LORA_ASSIGN_OR_RETURN(chosen, ChooseCheckpoint(path, contents));
  }
  LORA_RETURN_IF_ERROR(absl::EndsWith(chosen, kIndexSuffix)
                           ? checkpoint.OpenIndex(chosen, contents.files)
                           : checkpoint.OpenFile(chosen));
  return checkpoint;
}

absl::Status SafetensorsCheckpoint::OpenFile(const std::string& path) {
  LORA_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path));
  files_.push_back(std::move(file));
  for (const TensorInfo& info : files_.front().tensors()) {
    tensors_.push_back({0, &info});
  }
  return absl::OkStatus();
}

absl::Status SafetensorsCheckpoint::OpenIndex(
    const std::string& path, const std::vector<std::string>& files_beside) {
  LORA_ASSIGN_OR_RETURN(const internal::SafetensorsIndex index,
                        ReadIndex(path));
  std::map<std::string, size_t> file_numbers;
  for (const auto& [tensor, file] : index.weight_map) file_numbers[file] = 0;
  LORA_RETURN_IF_ERROR(CheckFilesAreNamed(path, file_numbers, files_beside));
  LORA_RETURN_IF_ERROR(OpenFiles(path, index, file_numbers));

  NameList left_out;
  uint64_t total_size = 0;
  for (const auto& [name, number] : file_numbers) {
    for (const TensorInfo& info : files_[number].tensors()) {
      const auto entry = index.weight_map.find(info.name);
      if (entry == index.weight_map.end() || entry->second != name) {
        left_out.Add(info.name, absl::StrCat(" of ", config::Printable(name)));
        continue;
      }
      tensors_.push_back({number, &info});
      total_size += info.byte_size;
    }
  }
  if (!left_out.empty()) {
    Warn(path, absl::StrCat("left out, as the index does not name them: ",
                            left_out.ToString()));
  }
  if (index.total_size.value_or(total_size) != total_size) {
    Warn(path, absl::StrCat("total_size is ", *index.total_size,
                            ", but the tensors have ", total_size, " bytes"));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsCheckpoint::OpenFiles(
    const std::string& index_path, const internal::SafetensorsIndex& index,
    std::map<std::string, size_t>& file_numbers) {
  constexpr size_t kMissing = static_cast<size_t>(-1);
  const fs::path folder = fs::path(index_path).parent_path();
  NameList missing_files;
  for (auto& [name, number] : file_numbers) {
    absl::StatusOr<SafetensorsFile> file =
        SafetensorsFile::Open((folder / name).string());
    if (absl::IsNotFound(file.status())) {
      missing_files.Add(name);
      number = kMissing;
      continue;
    }
    LORA_RETURN_IF_ERROR(file.status());
    number = files_.size();
    files_.push_back(*std::move(file));
  }
  NameList missing_tensors;
  for (const auto& [tensor, file] : index.weight_map) {
    const size_t number = file_numbers.at(file);
    if (number == kMissing || files_[number].Find(tensor) != nullptr) continue;
    missing_tensors.Add(tensor, absl::StrCat(" of ", config::Printable(file)));
  }
  std::vector<std::string> problems;
  if (!missing_files.empty()) {
    problems.push_back(
        absl::StrCat("missing files: ", missing_files.ToString()));
  }
  if (!missing_tensors.empty()) {
    problems.push_back(
        absl::StrCat("missing tensors: ", missing_tensors.ToString()));
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      index_path, " names what is not there: ", absl::StrJoin(problems, "; ")));
}

}  // namespace trainer_lora::distributed
