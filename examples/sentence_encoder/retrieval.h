// Finding the right sentence among many by its embedding: how to train for it,
// how to measure it.
//
//   at::Tensor loss = ContrastiveLoss(definitions, lemmas);
//   RetrievalMetrics metrics = EvaluateRetrieval(definitions, lemmas);
#ifndef TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_RETRIEVAL_H_
#define TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_RETRIEVAL_H_

#include "ATen/core/Tensor.h"

namespace trainer_lora::examples {

// The cross entropy of choosing candidate i for query i among all candidates
// of the batch, by cosine similarity times `scale`; a mean over the queries.
// queries, candidates: [batch, hidden], each row of length 1. Returns a scalar.
at::Tensor ContrastiveLoss(const at::Tensor& queries,
                           const at::Tensor& candidates, double scale = 20);

struct RetrievalMetrics {
  double recall_at_1 = 0;           // How often the right candidate is first.
  double mean_reciprocal_rank = 0;  // The mean of 1 / its rank.
};

// Ranks all candidates for each query by cosine similarity; candidate i is the
// right one for query i. A wrong candidate that is as similar as the right one
// ranks before it: a model that maps everything to one point finds nothing.
// Shapes as above.
RetrievalMetrics EvaluateRetrieval(const at::Tensor& queries,
                                   const at::Tensor& candidates);

}  // namespace trainer_lora::examples

#endif  // TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_RETRIEVAL_H_
