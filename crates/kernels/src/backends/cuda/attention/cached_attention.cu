// Attention of single tokens over the keys and values that were stored before: what a step of generation computes. Compiled after
// prelude.cu alone.
//
// Keys and values of all sequences lie in two matrices of rows [kv_heads * HEAD_DIM]; a sequence's rows are in pages of PAGE_ROWS. Each
// query has the number of its own key and the pages of its sequence. A team of sixteen lanes, of 32 for wide heads, takes a key at a time and holds a
// part of each head's columns; the queries that share a key/value head share what is loaded. Softmax is online, per team; teams and parts of the
// keys are added in a fixed order, so the bits are the same every time.
// Trade-off: several new tokens of one sequence read its keys once each; a prompt is read by the kernels for documents.
//
// Macros of the host: HEAD_DIM, a multiple of 16 up to 256, of 32 up to 512; SOFT_CAP: cap of the scaled scores, undefined where there is none;
// CACHED_QUERIES; PAGE_ROWS.

namespace cached {

typedef long long Long;
constexpr int LANES = HEAD_DIM > 256 ? 32 : 16, EACH = HEAD_DIM / LANES, TEAMS = 256 / LANES, OF_WARP = 32 / LANES;
// Keys that a team has under way.
constexpr int KEYS = EACH >= 16 ? 2 : 4;
// Queries of a team: what fits into registers.
constexpr int QUERIES = CACHED_QUERIES;
constexpr int VECTOR = EACH % 8 == 0 ? 8 : EACH % 4 == 0 ? 4 : EACH % 2 == 0 ? 2 : 1;
static_assert(EACH * LANES == HEAD_DIM && EACH <= 16, "HEAD_DIM must be a multiple of the lanes, at most 512");
// Below every score; finite, so that differences are no NaN.
constexpr float LOWEST = -1e30f;

DEVICE void load_columns(float (&value)[EACH], const T *head) {
    const T *from = head + threadIdx.x % LANES * EACH;
#pragma unroll
    for (int at = 0; at < EACH; at += VECTOR) {
        float part[VECTOR];
        Pack<T, VECTOR>::load(from + at).unpack(part);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) value[at + i] = part[i];
    }
}

// Over the lanes of a team.
DEVICE float team_sum(float value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

DEVICE float score_of(float product, float scale) {
#ifdef SOFT_CAP
    return SOFT_CAP * tanhf(product * scale / SOFT_CAP);
#else
    return product * scale;
#endif
}

// What a head's sink adds to the sum of exponentials. Far above the maximum it is infinite, and the output zero.
DEVICE float sink_of(const float *sinks, int head, float maximum) {
    return sinks == nullptr ? 0.0f : __expf(sinks[head] - maximum);
}

// What a team knows of a query's softmax.
struct Softmax {
    float maximum[QUERIES], sum[QUERIES], out[QUERIES][EACH];

    DEVICE void add(const float (&scores)[KEYS][QUERIES], const float (&values)[KEYS][EACH], const bool (&visible)[KEYS]) {
#pragma unroll
        for (int q = 0; q < QUERIES; ++q) {
            float highest = maximum[q];
#pragma unroll
            for (int key = 0; key < KEYS; ++key) highest = fmaxf(highest, visible[key] ? scores[key][q] : LOWEST);
            const float shrink = __expf(maximum[q] - highest);
            maximum[q] = highest;
            sum[q] *= shrink;
#pragma unroll
            for (int i = 0; i < EACH; ++i) out[q][i] *= shrink;
#pragma unroll
            for (int key = 0; key < KEYS; ++key) {
                const float p = visible[key] ? __expf(scores[key][q] - highest) : 0.0f;
                sum[q] += p;
#pragma unroll
                for (int i = 0; i < EACH; ++i) out[q][i] += p * values[key][i];
            }
        }
    }
};

}   // namespace cached

// o [n, heads * HEAD_DIM] of queries q (rows at their strides), over keys and values at `kv_stride`. Query t is key places[n + t] of its
// sequence, whose pages begin at places[places[2 n + t]]. A query sees `window` keys at most. With `splits` > 1 the keys of a query are cut into parts of
// `part_keys`, and `parts` [n, heads, splits, HEAD_DIM + 2] f32 gets their sums, for cached_attention_combine; else it may be null.
// `sinks` [heads] are logits of one more column without a value, or null.
// Launch: grid (kv_heads * ceil(heads / kv_heads / QUERIES), n, splits), block 256.
KERNEL __launch_bounds__(256, 2)
cached_attention(T *o, float *parts, const T *q, const T *keys, const T *values, long long o_stride, long long q_stride,
                 long long kv_stride, const int *places, int heads, int kv_heads, float scale, int window,
                 int splits, int part_keys, const float *sinks) {
    using namespace cached;
    __shared__ float maxima[TEAMS][QUERIES], sums[TEAMS][QUERIES];
    __shared__ float outs[TEAMS][QUERIES * HEAD_DIM];
    const int token = blockIdx.y, team = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int shared = heads / kv_heads, chunks = (shared + QUERIES - 1) / QUERIES;
    const int kv_head = blockIdx.x / chunks, first_query = blockIdx.x % chunks * QUERIES;
    const int last = places[gridDim.y + token], *pages = places + places[2 * gridDim.y + token];
    const int begin = max(0, last - window + 1) + static_cast<int>(blockIdx.z) * part_keys;
    const int end = min(last + 1, begin + part_keys);

    float query[QUERIES][EACH];
    Softmax softmax;
#pragma unroll
    for (int i = 0; i < QUERIES; ++i) {
        const int head = kv_head * shared + min(first_query + i, shared - 1);
        load_columns(query[i], q + token * q_stride + static_cast<Long>(head) * HEAD_DIM);
        softmax.maximum[i] = LOWEST, softmax.sum[i] = 0.0f;
#pragma unroll
        for (int k = 0; k < EACH; ++k) softmax.out[i][k] = 0.0f;
    }
    // The teams of a warp go the same number of rounds: they sum together.
    for (int base = begin + team / OF_WARP * OF_WARP * KEYS; base < end; base += TEAMS * KEYS) {
        float scores[KEYS][QUERIES], loaded[KEYS][EACH];
        bool visible[KEYS];
        Long place[KEYS];
#pragma unroll
        for (int key = 0; key < KEYS; ++key) {
            const int number = base + team % OF_WARP * KEYS + key, shown = min(number, last);
            visible[key] = number < end;
            const Long row = static_cast<Long>(pages[shown / PAGE_ROWS]) * PAGE_ROWS + shown % PAGE_ROWS;
            place[key] = row * kv_stride + static_cast<Long>(kv_head) * HEAD_DIM;
            load_columns(loaded[key], keys + place[key]);
        }
#pragma unroll
        for (int key = 0; key < KEYS; ++key)
#pragma unroll
            for (int i = 0; i < QUERIES; ++i) {
                float product = 0.0f;
#pragma unroll
                for (int k = 0; k < EACH; ++k) product += query[i][k] * loaded[key][k];
                scores[key][i] = score_of(team_sum(product), scale);
            }
#pragma unroll
        for (int key = 0; key < KEYS; ++key) load_columns(loaded[key], values + place[key]);
        softmax.add(scores, loaded, visible);
    }

#pragma unroll
    for (int i = 0; i < QUERIES; ++i) {
        if (lane == 0) maxima[team][i] = softmax.maximum[i], sums[team][i] = softmax.sum[i];
#pragma unroll
        for (int k = 0; k < EACH; ++k) outs[team][i * HEAD_DIM + lane * EACH + k] = softmax.out[i][k];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < QUERIES * HEAD_DIM; at += 256) {
        const int i = at / HEAD_DIM, column = at % HEAD_DIM;
        if (first_query + i >= shared) continue;
        const int head = kv_head * shared + first_query + i;
        float maximum = LOWEST, sum = 0.0f, out = 0.0f;
        for (int other = 0; other < TEAMS; ++other) maximum = fmaxf(maximum, maxima[other][i]);
        for (int other = 0; other < TEAMS; ++other) {
            const float factor = __expf(maxima[other][i] - maximum);
            sum += sums[other][i] * factor;
            out += outs[other][at] * factor;
        }
        if (splits == 1) {
            sum += sink_of(sinks, head, maximum);
            o[token * o_stride + static_cast<Long>(head) * HEAD_DIM + column] = from_float<T>(out / sum);
        } else {
            float *part = parts + ((static_cast<Long>(token) * heads + head) * splits + blockIdx.z) * (HEAD_DIM + 2);
            part[column] = out;
            if (column == 0) part[HEAD_DIM] = maximum, part[HEAD_DIM + 1] = sum;
        }
    }
}

// Adds up the parts of each query's keys.
// Launch: grid (heads, n), block any.
KERNEL cached_attention_combine(T *o, const float *parts, long long o_stride, int heads, int splits, const float *sinks) {
    using namespace cached;
    const int head = blockIdx.x, token = blockIdx.y;
    const float *from = parts + (static_cast<Long>(token) * heads + head) * splits * (HEAD_DIM + 2);
    float maximum = LOWEST;
    for (int part = 0; part < splits; ++part) maximum = fmaxf(maximum, from[part * (HEAD_DIM + 2) + HEAD_DIM]);
    for (int column = threadIdx.x; column < HEAD_DIM; column += blockDim.x) {
        float sum = sink_of(sinks, head, maximum), out = 0.0f;
        for (int part = 0; part < splits; ++part) {
            const float *of_part = from + part * (HEAD_DIM + 2);
            const float factor = __expf(of_part[HEAD_DIM] - maximum);
            sum += of_part[HEAD_DIM + 1] * factor;
            out += of_part[column] * factor;
        }
        o[token * o_stride + static_cast<Long>(head) * HEAD_DIM + column] = from_float<T>(out / sum);
    }
}
