// Pairs of answers: sums of log probabilities over documents, and from them the loss of each pair and the weight of each target.
//
// Does not depend on T. Targets of document d are begins[d] .. begins[d + 1]; documents alternate, chosen and rejected. Sums are taken in a
// fixed order. Trade-off: one block, since a micro-batch has few pairs; a thread computes the few numbers of its pair.


// The losses, numbered as in the host code.
enum Loss { SIGMOID, ROBUST, HINGE, IPO, ODDS_RATIO };

// sums[d] = sum of values, each times its mark unless marks is null, over the targets of document d.
// grid (documents), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256)
document_sums(float *sums, const float *values, const float *marks, const int *begins) {
    const int end = begins[blockIdx.x + 1];
    float sum = 0.0f;
    for (int i = begins[blockIdx.x] + threadIdx.x; i < end; i += 256)
        sum += marks != nullptr ? marks[i] * values[i] : values[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

DEVICE float log_sigmoid(float x) { return fminf(x, 0.0f) - log1pf(expf(-fabsf(x))); }
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct Pair {
    float loss;
    float slope[2];         // derivatives with respect to the log probabilities of both answers
    float reward[2];
    float log_prob[2];      // as reported
};

// Log probabilities of a pair's answers, of the same under the reference, and the numbers of their targets.
DEVICE Pair pair_of(int kind, float beta, float smoothing, const float *answers, const float *reference, const float *counts) {
    Pair pair;
    if (kind == ODDS_RATIO) {
        // FLT_EPSILON: the odds of an answer that is certain are not finite.
        float rest[2];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            pair.log_prob[side] = answers[side] / counts[side];
            pair.reward[side] = beta * pair.log_prob[side];
            rest[side] = fmaxf(-expm1f(pair.log_prob[side]), 1.1920929e-7f);
        }
        const float odds = (pair.log_prob[0] - pair.log_prob[1]) - (logf(rest[0]) - logf(rest[1]));
        const float slope = -beta * sigmoid(-odds);
        pair.loss = -beta * log_sigmoid(odds);
        pair.slope[0] = slope / (rest[0] * counts[0]), pair.slope[1] = -slope / (rest[1] * counts[1]);
        return pair;
    }
    float ratio[2];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        pair.log_prob[side] = answers[side];
        ratio[side] = answers[side] - reference[side];
        pair.reward[side] = beta * ratio[side];
    }
    if (kind == IPO) {
        const float distance = (ratio[0] / counts[0] - ratio[1] / counts[1]) - 0.5f / beta;
        pair.loss = distance * distance;
        pair.slope[0] = 2.0f * distance / counts[0], pair.slope[1] = -2.0f * distance / counts[1];
        return pair;
    }
    const float x = beta * (ratio[0] - ratio[1]);
    float slope;
    if (kind == HINGE) {
        pair.loss = fmaxf(1.0f - x, 0.0f);
        slope = x < 1.0f ? -1.0f : 0.0f;
    } else {
        // Robust: the share of flipped labels is taken off instead of added.
        const float sign = kind == ROBUST ? -1.0f : 1.0f;
        const float norm = kind == ROBUST ? 1.0f / (1.0f - 2.0f * smoothing) : 1.0f;
        pair.loss = -norm * ((1.0f - smoothing) * log_sigmoid(x) + sign * smoothing * log_sigmoid(-x));
        slope = -norm * ((1.0f - smoothing) * sigmoid(-x) - sign * smoothing * sigmoid(x));
    }
    pair.slope[0] = beta * slope, pair.slope[1] = -beta * slope;
    return pair;
}

// weights[i]: minus the slope of the target's answer where it belongs to the answer (marks null: every target does), plus nll_factor in
// chosen documents, all times factor[0] unless that is null. numbers [7]: sums over the pairs of the loss, of -all of the chosen, of both
// rewards, of the pairs whose chosen reward is higher, and of both log probabilities. all may be answers; reference is not read for
// ODDS_RATIO.
// grid (1), block (1024) exactly, no dynamic shared memory.
KERNEL __launch_bounds__(PAIR_THREADS)
pair_loss(float *weights, float *numbers, const float *answers, const float *all, const float *reference, const float *counts,
          const float *marks, const float *factor, const int *begins, int pairs, int kind, float beta, float smoothing, float nll_factor) {
    float sums[7] = {};
    for (int p = threadIdx.x; p < pairs; p += PAIR_THREADS) {
        const Pair pair = pair_of(kind, beta, smoothing, answers + 2 * p, reference + 2 * p, counts + 2 * p);
        sums[0] += pair.loss, sums[1] -= all[2 * p];
        sums[2] += pair.reward[0], sums[3] += pair.reward[1];
        sums[4] += pair.reward[0] > pair.reward[1] ? 1.0f : 0.0f;
        sums[5] += pair.log_prob[0], sums[6] += pair.log_prob[1];
    }
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        const float sum = block_sum(sums[i]);
        if (threadIdx.x == 0) numbers[i] = sum;
    }
    const float scale = factor != nullptr ? factor[0] : 1.0f;
    // A warp per document.
    for (int d = threadIdx.x / 32; d < 2 * pairs; d += PAIR_THREADS / 32) {
        const int p = d / 2;
        const Pair pair = pair_of(kind, beta, smoothing, answers + 2 * p, reference + 2 * p, counts + 2 * p);
        const float of_answer = -pair.slope[d % 2], of_all = d % 2 == 0 ? nll_factor : 0.0f;
        for (int i = begins[d] + threadIdx.x % 32; i < begins[d + 1]; i += 32)
            weights[i] = scale * ((marks != nullptr ? marks[i] * of_answer : of_answer) + of_all);
    }
}
