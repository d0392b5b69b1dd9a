// Routing of tokens to experts: probabilities and the most probable experts, the order of rows, and sums over the rows of a token.
//
// Nothing has atomics: the rows of an expert are placed by the block of that expert in the order of tokens, and sums over a token's rows
// are gathered, so results do not depend on the schedule. Trade-off: every expert's block reads the experts of all choices.

static constexpr int MAX_EXPERTS_PER_LANE = MAX_EXPERTS / 32;

// probabilities [n, e] f32 = softmax of logits [n, e]; experts [n, k] and weights [n, k] f32 of the k largest, divided by their sum if
// `normalizes`. Of equal ones the lower expert comes first. One warp per token; e at most 1024.
// grid (ceil(n / 8)), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) route_top_k(float *probabilities, int *experts, float *weights, const T *logits, long long n, int e,
                                          int k, int normalizes) {
    const int lane = threadIdx.x % 32;
    const long long token = static_cast<long long>(blockIdx.x) * TOKENS_PER_BLOCK + threadIdx.x / 32;
    if (token >= n) return;
    const T *row = logits + token * e;
    float *p = probabilities + token * e;
    float largest = -__int_as_float(0x7f800000);
    for (int i = lane; i < e; i += 32) largest = fmaxf(largest, to_float(row[i]));
    largest = warp_max(largest);
    float sum = 0.0f;
    for (int i = lane; i < e; i += 32) {
        const float value = expf(to_float(row[i]) - largest);
        p[i] = value;
        sum += value;
    }
    sum = warp_sum(sum);
    for (int i = lane; i < e; i += 32) p[i] /= sum;
    unsigned chosen = 0;  // bit i: expert lane + 32 i
    float total = 0.0f;
    for (int j = 0; j < k; ++j) {
        float best = -1.0f;
        int index = e;
        for (int i = 0; lane + 32 * i < e && i < MAX_EXPERTS_PER_LANE; ++i) {
            const float value = p[lane + 32 * i];
            if (!(chosen >> i & 1) && value > best) best = value, index = lane + 32 * i;
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, best, step);
            const int other_index = __shfl_xor_sync(0xffffffffu, index, step);
            if (other > best || (other == best && other_index < index)) best = other, index = other_index;
        }
        // Probabilities that are not numbers choose the first experts left, so that every index is one.
        if (index >= e) {
            index = j;
            best = p[j];
        }
        if (index % 32 == lane) chosen |= 1u << (index / 32);
        total += best;
        if (lane == 0) {
            experts[token * k + j] = index;
            weights[token * k + j] = best;
        }
    }
    if (!normalizes) return;
    __syncwarp();
    for (int j = lane; j < k; j += 32) weights[token * k + j] /= total;
}

// counts [e] = how many of `choices` experts are each. grid (e), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) count_rows(int *counts, const int *experts, long long choices) {
    __shared__ int sums[8];
    const int expert = blockIdx.x;
    int count = 0;
    for (long long i = threadIdx.x; i < choices; i += 256) count += experts[i] == expert;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(0xffffffffu, count, step);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = count;
    __syncthreads();
    if (threadIdx.x != 0) return;
    int total = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) total += sums[i];
    counts[expert] = total;
}

// Places the choices of each expert one after the other: rows [choices] and its inverse choices_of [choices], the token of each row, and the
// first row of each expert and the end of the last one, starts [e + 1].
// grid (e), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) place_rows(int *rows, int *choices_of, int *tokens, int *starts, const int *experts, const int *counts,
                                         long long choices, int k) {
    __shared__ int warps[8];
    const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int next = 0;
    for (int i = 0; i < expert; ++i) next += counts[i];
    if (threadIdx.x == 0) {
        starts[expert] = next;
        if (expert + 1 == gridDim.x) starts[gridDim.x] = next + counts[expert];
    }
    if (counts[expert] == 0) return;
    for (long long first = 0; first < choices; first += 256) {
        const long long choice = first + threadIdx.x;
        const bool is_mine = choice < choices && experts[choice] == expert;
        const unsigned mine = __ballot_sync(0xffffffffu, is_mine);
        if (lane == 0) warps[warp] = __popc(mine);
        __syncthreads();
        int row = next + __popc(mine & ((1u << lane) - 1)), all = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (i < warp) row += warps[i];
            all += warps[i];
        }
        if (is_mine) {
            rows[choice] = row;
            choices_of[row] = static_cast<int>(choice);
            tokens[row] = static_cast<int>(choice / k);
        }
        next += all;
        __syncthreads();
    }
}

// y [n, d] = residual (if any) + sum over j of weights [n, k] (one each, if null) times row rows[n, k] of x [n k, d], in f32 and rounded
// once. grid (n), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) combine_rows(T *y, const T *x, const int *rows, const float *weights, const T *residual, int k, int d) {
    const long long token = blockIdx.x;
    const int *row = rows + token * k;
    const float *weight = weights == nullptr ? nullptr : weights + token * k;
    for (int c = threadIdx.x; c < d; c += 256) {
        float sum = 0.0f;
        for (int j = 0; j < k; ++j) {
            const float value = to_float(x[static_cast<long long>(row[j]) * d + c]);
            sum += weight == nullptr ? value : weight[j] * value;
        }
        if (residual != nullptr) sum += to_float(residual[token * d + c]);
        y[token * d + c] = from_float<T>(sum);
    }
}

// For each row of y [s, d]: dx [s, d] = its weight times the gradient dy [n, d] of its token, and d_weights [n k] f32 at its choice = the dot
// product of both. grid (s), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) combine_rows_backward(T *dx, float *d_weights, const T *y, const T *dy, const float *weights,
                                                    const int *choices_of, int k, int d) {
    const long long row = blockIdx.x;
    const int choice = choices_of[row];
    const float weight = weights[choice];
    const T *gradient = dy + static_cast<long long>(choice / k) * d;
    float dot = 0.0f;
    for (int c = threadIdx.x; c < d; c += 256) {
        const float value = to_float(gradient[c]);
        dot += value * to_float(y[row * d + c]);
        dx[row * d + c] = from_float<T>(weight * value);
    }
    dot = block_sum(dot);
    if (threadIdx.x == 0) d_weights[choice] = dot;
}

// d_logits [n, e] from the gradient of the weights [n, k] f32: through the division by their sum if `normalizes`, then through the softmax.
// One warp per token. grid (ceil(n / 8)), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) route_backward(T *d_logits, const float *probabilities, const int *experts, const float *weights,
                                             const float *d_weights, long long n, int e, int k, int normalizes) {
    const int lane = threadIdx.x % 32;
    const long long token = static_cast<long long>(blockIdx.x) * TOKENS_PER_BLOCK + threadIdx.x / 32;
    if (token >= n) return;
    const float *p = probabilities + token * e;
    const int *chosen = experts + token * k;
    const float *w = weights + token * k, *dw = d_weights + token * k;
    float mean = 0.0f, total = 0.0f;
    for (int j = lane; j < k; j += 32) {
        mean += dw[j] * w[j];
        total += p[chosen[j]];
    }
    mean = normalizes ? warp_sum(mean) : 0.0f;
    const float scale = normalizes ? 1.0f / warp_sum(total) : 1.0f;
    float through = 0.0f;
    for (int j = lane; j < k; j += 32) through += p[chosen[j]] * (dw[j] - mean) * scale;
    through = warp_sum(through);
    for (int i = lane; i < e; i += 32) d_logits[token * e + i] = from_float<T>(-p[i] * through);
    __syncwarp();
    for (int j = lane; j < k; j += 32) {
        const float value = p[chosen[j]] * ((dw[j] - mean) * scale - through);
        d_logits[token * e + chosen[j]] = from_float<T>(value);
    }
}
