// Attention sinks: one more column in the softmax of each query's scores, without a value. Compiled after prelude.cu alone.
//
// What the kernels without sinks computed is corrected in place: with lse' = log(exp(lse) + exp(sink)), outputs are scaled by
// exp(lse - lse'). The backward of attention reads both and needs nothing else; the gradient of a sink is -sum exp(sink - lse') (do o).
// Statistics lie in the order that the forward left: that of (head, token) at
// token / length * heads * length + head * head_step + token % length * token_step.
// Trade-off: outputs are rounded to T once more, and read once more; no forward kernel needs a variant.

DEVICE long long statistic_of(int head, int token, int heads, int length, int head_step, int token_step) {
    const long long of_document = static_cast<long long>(token / length) * heads * length;
    return of_document + static_cast<long long>(head) * head_step + static_cast<long long>(token % length) * token_step;
}

// o [tokens, heads * head_dim] at o_stride and lse, in place. Launch: grid (ceil(tokens / 8), heads), block 256.
KERNEL __launch_bounds__(256)
add_sinks(T *o, float *lse, const float *sinks, long long o_stride, int tokens, int heads, int head_dim, int length,
          int head_step, int token_step) {
    const int token = blockIdx.x * 8 + threadIdx.x / 32, head = blockIdx.y, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    float *const statistic = lse + statistic_of(head, token, heads, length, head_step, token_step);
    const float without = *statistic, sink = sinks[head], largest = fmaxf(without, sink);
    const float merged = largest + logf(expf(without - largest) + expf(sink - largest));
    const float factor = expf(without - merged);
    __syncwarp();
    if (lane == 0) *statistic = merged;
    T *const row = o + token * o_stride + static_cast<long long>(head) * head_dim;
    for (int column = lane; column < head_dim; column += 32) row[column] = from_float<T>(to_float(row[column]) * factor);
}

// parts [parts, heads]: the gradients of the sinks from `part_tokens` tokens each; o and lse as `add_sinks` left them.
// Launch: grid (parts, heads), block 256.
KERNEL __launch_bounds__(256)
sinks_gradient(float *parts, const T *o, const T *d_o, const float *lse, const float *sinks, long long o_stride,
               long long do_stride, int tokens, int heads, int head_dim, int length, int head_step, int token_step,
               int part_tokens) {
    const int head = blockIdx.y, lane = threadIdx.x % 32, begin = blockIdx.x * part_tokens;
    const int end = min(tokens, begin + part_tokens);
    const long long first = static_cast<long long>(head) * head_dim;
    const float sink = sinks[head];
    float sum = 0.0f;
    for (int token = begin + threadIdx.x / 32; token < end; token += 8) {
        const float p = expf(sink - lse[statistic_of(head, token, heads, length, head_step, token_step)]);
        const T *const of_o = o + token * o_stride + first, *const of_d_o = d_o + token * do_stride + first;
        float delta = 0.0f;
        for (int column = lane; column < head_dim; column += 32) delta += to_float(of_o[column]) * to_float(of_d_o[column]);
        sum += p * delta;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[static_cast<long long>(blockIdx.x) * heads + head] = -sum;
}
