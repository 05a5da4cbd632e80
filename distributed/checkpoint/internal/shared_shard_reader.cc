// ReadShardsOnce of shard_reader.h.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "c10/util/intrusive_ptr.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/internal/shard_destination.h"
#include "distributed/checkpoint/internal/shard_reader.h"
#include "distributed/checkpoint/load_plan.h"
#include "distributed/checkpoint/safetensors_checkpoint.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/internal/guarded_step.h"
#include "distributed/internal/rank_agreement.h"
#include "distributed/internal/run_collective.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace trainer_lora::distributed::internal {
namespace {

// Of a tensor, what one rank reads at once and sends on.
constexpr int64_t kBlockBytes = 1 << 20;
// How many blocks are under way at once, each read by another rank.
constexpr int64_t kMaxBlocksAtOnce = 16;
constexpr int64_t kRoundsPerAgreement = 16;

// Elements that are contiguous in the file and in a rank's tensor.
struct Piece {
  int64_t source_begin;
  int64_t local_begin;
  int64_t count;
  size_t target;
};

// A part of a source, and who wants what of it.
struct Block {
  size_t source;
  // From the first to the last element that somebody wants.
  int64_t begin;
  int64_t end;
  int64_t reader;                          // A rank of the group.
  std::vector<std::vector<Piece>> pieces;  // One entry a rank.
};

// Whether the pieces are one run of their source.
bool LieTogether(const std::vector<Piece>& pieces) {
  for (size_t i = 1; i < pieces.size(); ++i) {
    if (pieces[i].source_begin !=
        pieces[i - 1].source_begin + pieces[i - 1].count) {
      return false;
    }
  }
  return true;
}

// Whether both are the same of their source.
bool AreEqualInSource(const std::vector<Piece>& a,
                      const std::vector<Piece>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Piece& left, const Piece& right) {
                      return left.source_begin == right.source_begin &&
                             left.count == right.count;
                    });
}

// A message of the block's reader, and the ranks that get it.
struct Message {
  const std::vector<Piece>* pieces;
  std::vector<int64_t> ranks;
};

// One for all ranks that want the same.
std::vector<Message> MessagesOf(const Block& block) {
  std::vector<Message> messages;
  for (size_t rank = 0; rank < block.pieces.size(); ++rank) {
    const std::vector<Piece>& pieces = block.pieces[rank];
    if (static_cast<int64_t>(rank) == block.reader || pieces.empty()) continue;
    const auto same = std::find_if(
        messages.begin(), messages.end(),
        [&](const Message& m) { return AreEqualInSource(*m.pieces, pieces); });
    if (same == messages.end()) {
      messages.push_back({&pieces, {static_cast<int64_t>(rank)}});
    } else {
      same->ranks.push_back(rank);
    }
  }
  return messages;
}

int64_t Elements(const std::vector<Piece>& pieces) {
  int64_t count = 0;
  for (const Piece& piece : pieces) count += piece.count;
  return count;
}

// Appends what `copy` takes of the elements [begin, end) of its source.
void AppendPieces(const PlannedCopy& copy, int64_t begin, int64_t end,
                  std::vector<Piece>& pieces) {
  // The first run that ends after `begin`: runs follow each other in the file.
  int64_t run = 0;
  int64_t not_before = copy.num_runs;
  while (run < not_before) {
    const int64_t middle = run + (not_before - run) / 2;
    if (copy.SourceBegin(middle) + copy.run_elements <= begin) {
      run = middle + 1;
    } else {
      not_before = middle;
    }
  }
  for (; run < copy.num_runs; ++run) {
    const int64_t run_begin = copy.SourceBegin(run);
    if (run_begin >= end) break;
    const int64_t first = std::max(begin, run_begin);
    const int64_t last = std::min(end, run_begin + copy.run_elements);
    pieces.push_back({first, copy.LocalBegin(run) + first - run_begin,
                      last - first, copy.target});
  }
}

// Cuts the sources that somebody wants into blocks, one after the other.
class BlockQueue {
 public:
  BlockQueue(const SafetensorsCheckpoint& checkpoint,
             const std::vector<std::vector<PlannedCopy>>& copies)
      : checkpoint_(checkpoint), copies_(copies), next_copy_(copies.size()) {}

  // False at the end.
  bool Next(Block& block) {
    while (true) {
      if (begin_ == end_ && !NextSource()) return false;
      const int64_t element_size =
          TensorDtypeBits(checkpoint_.tensors()[source_].info->dtype) / 8;
      const int64_t end = std::min(
          end_, begin_ + std::max<int64_t>(kBlockBytes / element_size, 1));
      block.source = source_;
      block.pieces.assign(copies_.size(), {});
      block.begin = end;
      block.end = begin_;
      std::vector<int64_t> wanting;
      for (size_t rank = 0; rank < copies_.size(); ++rank) {
        for (const PlannedCopy* copy : source_copies_[rank]) {
          AppendPieces(*copy, begin_, end, block.pieces[rank]);
        }
        for (const Piece& piece : block.pieces[rank]) {
          block.begin = std::min(block.begin, piece.source_begin);
          block.end = std::max(block.end, piece.source_begin + piece.count);
        }
        if (!block.pieces[rank].empty()) wanting.push_back(rank);
      }
      begin_ = end;
      if (wanting.empty()) continue;
      block.reader = wanting[num_blocks_++ % wanting.size()];
      return true;
    }
  }

 private:
  bool NextSource() {
    source_ = checkpoint_.tensors().size();
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      if (next_copy_[rank] == copies_[rank].size()) continue;
      source_ = std::min(source_, copies_[rank][next_copy_[rank]].source);
    }
    if (source_ == checkpoint_.tensors().size()) return false;
    source_copies_.assign(copies_.size(), {});
    begin_ = std::numeric_limits<int64_t>::max();
    end_ = 0;
    for (size_t rank = 0; rank < copies_.size(); ++rank) {
      size_t& next = next_copy_[rank];
      for (; next < copies_[rank].size(); ++next) {
        const PlannedCopy& copy = copies_[rank][next];
        if (copy.source != source_) break;
        source_copies_[rank].push_back(&copy);
        const int64_t end =
            copy.SourceBegin(copy.num_runs - 1) + copy.run_elements;
        begin_ = std::min(begin_, copy.source_begin);
        end_ = std::max(end_, end);
      }
    }
    return true;
  }

  const SafetensorsCheckpoint& checkpoint_;
  const std::vector<std::vector<PlannedCopy>>& copies_;
  std::vector<size_t> next_copy_;  // One a rank.
  size_t source_ = 0;
  // Of the source, those that a rank has.
  std::vector<std::vector<const PlannedCopy*>> source_copies_;
  int64_t begin_ = 0;  // What is left of the source.
  int64_t end_ = 0;
  size_t num_blocks_ = 0;
};

class SharedReader {
 public:
  SharedReader(const SafetensorsCheckpoint& checkpoint,
               const std::vector<std::vector<PlannedCopy>>& copies,
               absl::Span<const ShardDestination> destinations,
               c10d::ProcessGroup& group, const std::string& group_name,
               const BytesCallback& on_bytes)
      : checkpoint_(checkpoint),
        copies_(copies),
        destinations_(destinations),
        group_(group),
        group_name_(group_name),
        context_(absl::StrCat(group_name, ", rank ", group.getRank(),
                              ": exchange of checkpoint data")),
        on_bytes_(on_bytes),
        blocks_(checkpoint, copies) {}

  absl::StatusOr<int64_t> Run() {
    // As many blocks at once as there are ranks, so that all have one to read,
    // but for very many.
    const int64_t round_size =
        std::min<int64_t>(group_.getSize(), kMaxBlocksAtOnce);
    // Once the exchange has begun the others wait for this rank: it takes all
    // that is large before.
    Guard([&] {
      contents_ = at::empty({round_size, kBlockBytes}, at::kByte);
      packed_ = at::empty({round_size, LargestPacking()}, at::kByte);
      return absl::OkStatus();
    });
    LORA_RETURN_IF_ERROR(AgreeToGoOn());
    std::vector<Block> round;
    int64_t num_rounds = 0;
    bool is_last = false;
    while (!is_last) {
      round.clear();
      Block block;
      while (static_cast<int64_t>(round.size()) < round_size) {
        if (!blocks_.Next(block)) {
          is_last = true;
          break;
        }
        round.push_back(std::move(block));
      }
      LORA_RETURN_IF_ERROR(RunRound(round));
      if (is_last || ++num_rounds % kRoundsPerAgreement == 0) {
        LORA_RETURN_IF_ERROR(AgreeToGoOn());
      }
    }
    return bytes_read_;
  }

 private:
  absl::Status RunRound(const std::vector<Block>& round) {
    const int64_t rank = group_.getRank();
    for (size_t i = 0; i < round.size(); ++i) {
      if (round[i].reader != rank) continue;
      // What could not be read is sent all the same, as others wait for it.
      Guard([&] { return ReadBlock(round[i], ContentsOf(i)); });
    }

    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<std::vector<at::Tensor>> buffers;  // Alive until all are sent.
    LORA_RETURN_IF_ERROR(CallCollective(context_, [&] {
      for (size_t i = 0; i < round.size(); ++i) {
        const Block& block = round[i];
        if (block.reader == rank || block.pieces[rank].empty()) continue;
        buffers.push_back({contents_.select(0, i).narrow(
            0, 0, BytesOf(block, block.pieces[rank]))});
        works.push_back(StartCollective(group_, [&] {
          return group_.recv(buffers.back(), block.reader, i);
        }));
      }
      for (size_t i = 0; i < round.size(); ++i) {
        const Block& block = round[i];
        if (block.reader != rank) continue;
        int64_t packed_bytes = 0;
        for (const Message& message : MessagesOf(block)) {
          std::vector<at::Tensor> payload = {
              PayloadOf(block, i, *message.pieces, packed_bytes)};
          for (const int64_t peer : message.ranks) {
            works.push_back(StartCollective(
                group_, [&] { return group_.send(payload, peer, i); }));
          }
          buffers.push_back(std::move(payload));
        }
      }
      for (const auto& work : works) work->wait();
    }));

    for (size_t i = 0; i < round.size(); ++i) {
      if (round[i].reader == rank) continue;
      Guard([&] {
        const char* position = ContentsOf(i);
        for (const Piece& piece : round[i].pieces[rank]) {
          Place(round[i], piece, position);
          position += piece.count * ElementSize(round[i]);
        }
        return absl::OkStatus();
      });
    }
    return absl::OkStatus();
  }

  // A step whose error must wait: the others count on this rank until they
  // agree.
  void Guard(const std::function<absl::Status()>& step) {
    read_status_.Update(
        GuardedStep(absl::StrCat("loading ", checkpoint_.path()), step));
  }

  // Ends the reading on all ranks if one of them could not read.
  absl::Status AgreeToGoOn() {
    LORA_ASSIGN_OR_RETURN(
        const bool has_failed,
        IsTrueOnAnyRank(group_, group_name_, "agreement on what was read",
                        !read_status_.ok()));
    LORA_RETURN_IF_ERROR(read_status_);
    if (has_failed) return absl::AbortedError("another rank could not read");
    return absl::OkStatus();
  }

  absl::Status ReadBlock(const Block& block, char* contents) {
    const CheckpointTensor& source = checkpoint_.tensors()[block.source];
    const int64_t size = (block.end - block.begin) * ElementSize(block);
    LORA_RETURN_IF_ERROR(checkpoint_.files()[source.file].Read(
        *source.info, block.begin * ElementSize(block),
        absl::MakeSpan(contents, size)));
    bytes_read_ += size;
    for (const Piece& piece : block.pieces[group_.getRank()]) {
      Place(block, piece, contents + OffsetOf(block, piece));
    }
    return absl::OkStatus();
  }

  // The most bytes that this rank packs of a block. Ranks that share a part of
  // what they want, as fused projections with replicated heads do, take more
  // together than the block has.
  int64_t LargestPacking() const {
    int64_t largest = 0;
    BlockQueue blocks(checkpoint_, copies_);
    Block block;
    while (blocks.Next(block)) {
      if (block.reader != group_.getRank()) continue;
      int64_t bytes = 0;
      for (const Message& message : MessagesOf(block)) {
        if (!LieTogether(*message.pieces)) {
          bytes += BytesOf(block, *message.pieces);
        }
      }
      largest = std::max(largest, bytes);
    }
    return largest;
  }

  // What message `pieces` of block `index` of a round sends. Of what is packed,
  // `packed_bytes` are there before it, and are counted on.
  at::Tensor PayloadOf(const Block& block, size_t index,
                       const std::vector<Piece>& pieces,
                       int64_t& packed_bytes) const {
    const int64_t bytes = BytesOf(block, pieces);
    if (LieTogether(pieces)) {
      return contents_.select(0, index).narrow(
          0, OffsetOf(block, pieces.front()), bytes);
    }
    const at::Tensor payload =
        packed_.select(0, index).narrow(0, packed_bytes, bytes);
    packed_bytes += bytes;
    Pack(block, pieces, ContentsOf(index), payload);
    return payload;
  }

  void Pack(const Block& block, const std::vector<Piece>& pieces,
            const char* contents, const at::Tensor& message) const {
    char* position = static_cast<char*>(message.mutable_data_ptr());
    for (const Piece& piece : pieces) {
      const int64_t bytes = piece.count * ElementSize(block);
      std::memcpy(position, contents + OffsetOf(block, piece), bytes);
      position += bytes;
    }
  }

  void Place(const Block& block, const Piece& piece, const char* bytes) {
    const TensorDtype dtype = checkpoint_.tensors()[block.source].info->dtype;
    destinations_[piece.target].Write(dtype, bytes, piece.local_begin,
                                      piece.count);
    on_bytes_(piece.count * ElementSize(block));
  }

  int64_t ElementSize(const Block& block) const {
    return TensorDtypeBits(checkpoint_.tensors()[block.source].info->dtype) / 8;
  }

  int64_t BytesOf(const Block& block, const std::vector<Piece>& pieces) const {
    return Elements(pieces) * ElementSize(block);
  }

  // Where a piece begins in the bytes of its block.
  int64_t OffsetOf(const Block& block, const Piece& piece) const {
    return (piece.source_begin - block.begin) * ElementSize(block);
  }

  char* ContentsOf(size_t index) const {
    return static_cast<char*>(contents_.mutable_data_ptr()) +
           index * kBlockBytes;
  }

  const SafetensorsCheckpoint& checkpoint_;
  const std::vector<std::vector<PlannedCopy>>& copies_;
  const absl::Span<const ShardDestination> destinations_;
  c10d::ProcessGroup& group_;
  const std::string group_name_;
  const std::string context_;
  const BytesCallback& on_bytes_;
  BlockQueue blocks_;
  // A row for each block of a round: what this rank has read or got of it.
  at::Tensor contents_;
  // And what it sends of it, where that does not lie together.
  at::Tensor packed_;
  int64_t bytes_read_ = 0;
  absl::Status read_status_;  // The first error of this rank.
};

}  // namespace

absl::StatusOr<int64_t> ReadShardsOnce(
    const SafetensorsCheckpoint& checkpoint,
    const std::vector<std::vector<PlannedCopy>>& copies,
    absl::Span<const ShardDestination> destinations, c10d::ProcessGroup& group,
    const std::string& group_name, const BytesCallback& on_bytes) {
  return SharedReader(checkpoint, copies, destinations, group, group_name,
                      on_bytes)
      .Run();
}

}  // namespace trainer_lora::distributed::internal
