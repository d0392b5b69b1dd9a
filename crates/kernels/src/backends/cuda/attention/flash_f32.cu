// Attention for T = float: the kernels of flash_forward.cu and flash_backward.cu by the same names and arguments, in plain
// FMA. Compiled after prelude.cu alone. See flash.cu for the layout of the tensors and the rules of documents.
//
// One warp per row, lanes across the head width, one key (or query) at a time: O(tokens) memory, exact to f32 rounding, no
// tiling. Trade-off: speed; f32 attention exists to test models, not to train them. Same bits every time.
//
// Macros of the host: HEAD_DIM, a multiple of 32 (default 128); SOFT_CAP as in flash.cu.

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif

namespace flash_f32 {

typedef long long Long;
constexpr int EACH = HEAD_DIM / 32;   // values of a row a lane holds: lane, lane + 32, ..
static_assert(EACH * 32 == HEAD_DIM, "HEAD_DIM must be a multiple of 32");

struct Row {
    float value[EACH];

    DEVICE static Row zero() {
        Row row;
#pragma unroll
        for (int i = 0; i < EACH; ++i) row.value[i] = 0.0f;
        return row;
    }

    DEVICE static Row load(const float *tensor, Long stride, int token, int head) {
        const float *from = tensor + token * stride + static_cast<Long>(head) * HEAD_DIM + threadIdx.x % 32;
        Row row;
#pragma unroll
        for (int i = 0; i < EACH; ++i) row.value[i] = from[i * 32];
        return row;
    }

    DEVICE void store(float *tensor, Long stride, int token, int head, float factor) const {
        float *to = tensor + token * stride + static_cast<Long>(head) * HEAD_DIM + threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < EACH; ++i) to[i * 32] = value[i] * factor;
    }

    DEVICE void add(float factor, const Row &other) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) value[i] += factor * other.value[i];
    }

    DEVICE void scale(float factor) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) value[i] *= factor;
    }
};

DEVICE float dot(const Row &a, const Row &b) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += a.value[i] * b.value[i];
    return warp_sum(sum);
}

// The score of a product of a query and a key, and its slope by the scaled product.
DEVICE float score_of(float product, float scale) {
#ifdef SOFT_CAP
    return SOFT_CAP * tanhf(product * scale / SOFT_CAP);
#else
    return product * scale;
#endif
}

DEVICE float slope_of(float score) {
#ifdef SOFT_CAP
    return 1.0f - score / SOFT_CAP * (score / SOFT_CAP);
#else
    return 1.0f;
#endif
}

// The last document that begins at or before the token; `documents` itself for the rows behind all of them.
DEVICE int document_of(const int *cu_seqlens, int documents, int token) {
    int low = 0, high = documents + 1;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (cu_seqlens[middle] <= token) low = middle;
        else high = middle;
    }
    return low;
}

DEVICE int row_of_warp() { return blockIdx.x * 4 + threadIdx.x / 32; }

}   // namespace flash_f32

// Launch: grid (ceil(tokens / 4), query_heads), block 128.
KERNEL __launch_bounds__(128)
flash_forward(float *o, float *lse, const float *q, const float *k, const float *v, long long q_stride,
              long long k_stride, long long v_stride, long long o_stride, const int *cu_seqlens, int documents, int tokens,
              int query_heads, int kv_heads, float scale, int window, int) {
    using namespace flash_f32;
    const int head = blockIdx.y, kv_head = head / (query_heads / kv_heads), row = row_of_warp();
    if (row >= tokens) return;
    const Row query = Row::load(q, q_stride, row, head);
    Row out = Row::zero();
    float maximum = __int_as_float(0xff800000), sum = 0.0f;
    for (int key = max(cu_seqlens[document_of(cu_seqlens, documents, row)], row - window + 1); key <= row; ++key) {
        const float score = score_of(dot(query, Row::load(k, k_stride, key, kv_head)), scale);
        const float highest = fmaxf(maximum, score), shrink = expf(maximum - highest), p = expf(score - highest);
        maximum = highest;
        sum = sum * shrink + p;
        out.scale(shrink);
        out.add(p, Row::load(v, v_stride, key, kv_head));
    }
    out.store(o, o_stride, row, head, 1.0f / sum);
    if (threadIdx.x % 32 == 0) lse[static_cast<Long>(head) * tokens + row] = maximum + logf(sum);
}

// Launch: grid (ceil(tokens / 4), kv_heads), block 128.
KERNEL __launch_bounds__(128)
flash_backward_keys(float *dk, float *dv, const float *q, const float *k, const float *v, const float *d_o,
                    const float *lse, const float *delta, long long dk_stride, long long dv_stride, long long q_stride,
                    long long k_stride, long long v_stride, long long do_stride, const int *cu_seqlens, int documents,
                    int tokens, int query_heads, int kv_heads, float scale, int window, int) {
    using namespace flash_f32;
    const int kv_head = blockIdx.y, group = query_heads / kv_heads, row = row_of_warp();
    if (row >= tokens) return;
    const int document = document_of(cu_seqlens, documents, row);
    const int end = min(document < documents ? cu_seqlens[document + 1] : tokens, row + window);
    const Row key = Row::load(k, k_stride, row, kv_head), value = Row::load(v, v_stride, row, kv_head);
    Row d_key = Row::zero(), d_value = Row::zero();
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const Long at = static_cast<Long>(head) * tokens;
        for (int token = row; token < end; ++token) {
            const Row query = Row::load(q, q_stride, token, head), d_out = Row::load(d_o, do_stride, token, head);
            const float score = score_of(dot(query, key), scale), p = expf(score - lse[at + token]);
            d_value.add(p, d_out);
            d_key.add(p * (dot(d_out, value) - delta[at + token]) * slope_of(score), query);
        }
    }
    d_key.store(dk, dk_stride, row, kv_head, scale);
    d_value.store(dv, dv_stride, row, kv_head, 1.0f);
}

// Launch: grid (ceil(tokens / 4), query_heads), block 128.
KERNEL __launch_bounds__(128)
flash_backward_queries(float *dq, float *delta, const float *q, const float *k, const float *v, const float *o,
                       const float *d_o, const float *lse, long long dq_stride, long long q_stride, long long k_stride,
                       long long v_stride, long long o_stride, long long do_stride, const int *cu_seqlens, int documents,
                       int tokens, int query_heads, int kv_heads, float scale, int window, int) {
    using namespace flash_f32;
    const int head = blockIdx.y, kv_head = head / (query_heads / kv_heads), row = row_of_warp();
    if (row >= tokens) return;
    const Long at = static_cast<Long>(head) * tokens + row;
    const Row query = Row::load(q, q_stride, row, head), d_out = Row::load(d_o, do_stride, row, head);
    const float own_delta = dot(Row::load(o, o_stride, row, head), d_out);
    if (threadIdx.x % 32 == 0) delta[at] = own_delta;
    Row d_query = Row::zero();
    for (int token = max(cu_seqlens[document_of(cu_seqlens, documents, row)], row - window + 1); token <= row; ++token) {
        const Row key = Row::load(k, k_stride, token, kv_head);
        const float score = score_of(dot(query, key), scale), p = expf(score - lse[at]);
        const float dp = dot(d_out, Row::load(v, v_stride, token, kv_head));
        d_query.add(p * (dp - own_delta) * slope_of(score), key);
    }
    d_query.store(dq, dq_stride, row, head, scale);
}
