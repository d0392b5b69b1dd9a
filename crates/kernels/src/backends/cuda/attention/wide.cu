// The softmax of attention whose scores are in memory: heads too wide for the flash kernels. Compiled after prelude.cu alone.
//
// Scores s [rows, keys] in f32 are those of a tile: row r is the query of token first + r / group and head first_head + r % group, column c is key
// key0 + c. A query sees the keys of its document up to its own, and no more than `window`. Probabilities of the others are zero. lse [heads, tokens].
// Trade-off: a block reads its row twice; the second time mostly from a cache.

namespace wide {

struct Row {
    int token, head, begin, end;

    DEVICE Row(const int *starts, int first, int group, int first_head, int key0, int window) {
        token = first + static_cast<int>(blockIdx.x) / group;
        head = first_head + static_cast<int>(blockIdx.x) % group;
        begin = max(starts[token], token - window + 1) - key0;
        end = token + 1 - key0;
    }
};

}   // namespace wide

// starts [tokens]: where the document of each token begins. Launch: grid ceil(tokens / 256), block 256.
KERNEL document_starts(int *starts, const int *cu_seqlens, int documents, int tokens) {
    const int token = blockIdx.x * 256 + threadIdx.x;
    if (token >= tokens) return;
    int low = 0, high = documents;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (cu_seqlens[middle] <= token) low = middle;
        else high = middle;
    }
    starts[token] = cu_seqlens[low];
}

// p [rows, keys], at the stride of s: the probabilities of scores times `scale`. Launch: grid rows, block 256.
KERNEL __launch_bounds__(256)
wide_softmax(T *p, float *lse, const float *s, const int *starts, long long stride, int first, int group, int first_head,
             int key0, int keys, int window, int tokens, float scale) {
    const wide::Row row(starts, first, group, first_head, key0, window);
    const float *const scores = s + blockIdx.x * stride;
    T *const out = p + blockIdx.x * stride;
    // Finite, so that differences are no NaN.
    float top = -1e30f, sum = 0.0f;
    for (int key = row.begin + threadIdx.x; key < row.end; key += 256) {
        const float score = scores[key] * scale, higher = fmaxf(top, score);
        sum = sum * expf(top - higher) + expf(score - higher);
        top = higher;
    }
    const float highest = block_max(top);
    const float log_sum = highest + logf(block_sum(sum * expf(top - highest)));
    for (int key = threadIdx.x; key < keys; key += 256) {
        const bool seen = key >= row.begin && key < row.end;
        out[key] = from_float<T>(seen ? expf(scores[key] * scale - log_sum) : 0.0f);
    }
    if (threadIdx.x == 0) lse[static_cast<long long>(row.head) * tokens + row.token] = log_sum;
}

// p as above from lse, and d_s, the gradients of the scores before `scale`, from d_p [rows, keys] and the rows of o and d_o. Launch: grid rows, block 256.
KERNEL __launch_bounds__(256)
wide_softmax_backward(T *p, T *d_s, const float *s, const float *d_p, const float *lse, const T *o, const T *d_o,
                      const int *starts, long long stride, long long o_stride, long long do_stride, int head_dim,
                      int first, int group, int first_head, int key0, int keys, int window, int tokens, float scale) {
    const wide::Row row(starts, first, group, first_head, key0, window);
    const long long column = static_cast<long long>(row.head) * head_dim, at = blockIdx.x * stride;
    const T *const outputs = o + row.token * o_stride + column, *const gradients = d_o + row.token * do_stride + column;
    float product = 0.0f;
    for (int i = threadIdx.x; i < head_dim; i += 256) product += to_float(outputs[i]) * to_float(gradients[i]);
    const float delta = block_sum(product);
    const float log_sum = lse[static_cast<long long>(row.head) * tokens + row.token];
    for (int key = threadIdx.x; key < keys; key += 256) {
        const bool seen = key >= row.begin && key < row.end;
        const float probability = seen ? expf(s[at + key] * scale - log_sum) : 0.0f;
        p[at + key] = from_float<T>(probability);
        d_s[at + key] = from_float<T>(seen ? probability * (d_p[at + key] - delta) * scale : 0.0f);
    }
}
