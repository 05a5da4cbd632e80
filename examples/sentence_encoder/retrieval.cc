#include "examples/sentence_encoder/retrieval.h"

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "c10/core/ScalarType.h"
#include "c10/util/Exception.h"

namespace trainer_lora::examples {
namespace {

// [queries, candidates]
at::Tensor CosineSimilarities(const at::Tensor& queries,
                              const at::Tensor& candidates) {
  TORCH_CHECK(queries.dim() == 2 && queries.sizes() == candidates.sizes(),
              "queries and candidates must both be [batch, hidden], got ",
              queries.sizes(), " and ", candidates.sizes());
  return at::matmul(queries, candidates.t());
}

}  // namespace

at::Tensor ContrastiveLoss(const at::Tensor& queries,
                           const at::Tensor& candidates, double scale) {
  const at::Tensor scores = CosineSimilarities(queries, candidates) * scale;
  const at::Tensor right =
      at::arange(scores.size(0), scores.options().dtype(at::kLong));
  return at::cross_entropy_loss(scores, right);
}

RetrievalMetrics EvaluateRetrieval(const at::Tensor& queries,
                                   const at::Tensor& candidates) {
  const at::Tensor scores = CosineSimilarities(queries, candidates);
  // The right candidate counts itself, so ranks start at 1.
  const at::Tensor ranks =
      (scores >= scores.diagonal().unsqueeze(1)).sum(/*dim=*/1).to(at::kDouble);
  return {(ranks == 1).to(at::kDouble).mean().item<double>(),
          ranks.reciprocal().mean().item<double>()};
}

}  // namespace trainer_lora::examples
