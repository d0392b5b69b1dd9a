// Attention of single tokens over the keys and values that were stored before: what a step of generation computes. Compiled after matrix_units.cu.
//
// Keys and values of all sequences lie in two matrices of rows [kv_heads * HEAD_DIM]; a sequence's rows are in pages of PAGE_ROWS. Each
// query has the number of its own key and the pages of its sequence. A team of sixteen lanes, of 32 for wide heads, takes a key at a time; on the
// matrix units a team is a warp and takes sixteen. Queries that share a key/value head share what is loaded. Softmax is online,
// per team; teams and parts of the keys are added in a fixed order, so the bits are the same every time.
// If each sequence has one new token, its key and value are read where they were computed, and stored by one of the blocks that read them.
// Trade-off: several new tokens of one sequence read its keys once each; a prompt is read by the kernels for documents.
//
// Macros of the host: HEAD_DIM, a multiple of 16 up to 256, of 32 up to 512; SOFT_CAP: cap of the scaled scores, undefined where there is none;
// CACHED_QUERIES; CACHED_THREADS of a block; ON_MATRIX_UNITS; PAGE_ROWS.

namespace cached {

typedef long long Long;
constexpr int THREADS = CACHED_THREADS, LANES = ON_MATRIX_UNITS || HEAD_DIM > 256 ? 32 : 16, OF_WARP = 32 / LANES;
constexpr int EACH = HEAD_DIM / LANES, TEAMS = THREADS / LANES;
// Keys that a team has under way.
constexpr int KEYS = EACH >= 16 ? 2 : 4;
// Queries of a team: what fits into registers.
constexpr int QUERIES = CACHED_QUERIES;
constexpr int VECTOR = EACH % 8 == 0 ? 8 : EACH % 4 == 0 ? 4 : EACH % 2 == 0 ? 2 : 1;
static_assert(EACH * LANES == HEAD_DIM && EACH <= 16, "HEAD_DIM must be a multiple of the lanes, at most 512");
// Below every score; finite, so that differences are no NaN.
constexpr float LOWEST = -1e30f, HIDDEN = 2.0f * LOWEST;
// Of the teams of a block.
__shared__ float maxima[TEAMS][QUERIES], sums[TEAMS][QUERIES];
__shared__ __align__(16) float outs[TEAMS][QUERIES * HEAD_DIM];

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

// Keys or values of a head in the caches. That of the last token is `own`, or is there as well if that is null.
struct Rows {
    const T *stored, *own;
    const int *pages;
    Long stride;
    int last;
    DEVICE Long place(int key) const {
        return (static_cast<Long>(pages[key / PAGE_ROWS]) * PAGE_ROWS + key % PAGE_ROWS) * stride;
    }
    // Of a key, as the last if it is later.
    DEVICE const T *at(int key) const {
        return key >= last && own != nullptr ? own : stored + place(min(key, last));
    }
};

#if ON_MATRIX_UNITS
// Scores are keys [16, columns] times queries [columns, 8], the output values [columns, 16] times exponentials [16, 8], and the sums a matrix of
// ones times these. A lane loads eight neighboring columns: the products see columns in another order, the same in both factors.
DEVICE void attend(const T *q, const Rows &keys, const Rows &values, float scale, int last_query, int begin, int end) {
    typedef Pack<T, 8> Values;
    constexpr int TILE = 16, TILES = HEAD_DIM / TILE;
    static_assert(PAGE_ROWS % TILE == 0 && QUERIES <= 8, "the keys of a tile are in one page");
    const int lane = threadIdx.x % 32, team = threadIdx.x / 32, group = lane / 4, member = lane % 4;
    float out[TILES + 1][4] = {}, maximum[2] = {LOWEST, LOWEST};
    for (int base = (begin / TILE + team) * TILE; base < end; base += TEAMS * TILE) {
        const Long first = keys.place(base);
        const auto at = [&](const Rows &rows, int key) {
            const bool is_own = base + key >= rows.last && rows.own != nullptr;
            return is_own ? rows.own : rows.stored + first + min(key, rows.last - base) * rows.stride;
        };
        // Values come while the keys are multiplied.
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at(values, lane % TILE) + lane / TILE * 64 % HEAD_DIM));
        Values value[4][TILES / 4];
        float score[4] = {}, shrink[2];
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            value[i % 4][i / 4] = Values::load(at(values, i % 4 / 2 * 8 + member * 2 + i % 2) + i / 4 * 64 + group * 8);
#pragma unroll
        for (int i = 0; i < TILES / 2; ++i) {
            const int column = i * 32 + member * 8;
            const Values upper = Values::load(at(keys, group) + column), lower = Values::load(at(keys, group + 8) + column);
            const Values x = Values::load(q + min(group, last_query) * HEAD_DIM + column);
            for (int k = 0; k < 4; k += 2) {
                const Word a[4] = {upper.word[k], lower.word[k], upper.word[k + 1], lower.word[k + 1]};
                multiply_add(score, a, x.word[k], x.word[k + 1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float highest = maximum[i];
            for (int k = i; k < 4; k += 2) {
                const int key = base + group + k / 2 * 8;
                score[k] = key >= begin && key < end ? score_of(score[k], scale) : HIDDEN;
                highest = fmaxf(highest, score[k]);
            }
            for (int step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
            score[i] = __expf(score[i] - highest), score[i + 2] = __expf(score[i + 2] - highest);
            shrink[i] = __expf(maximum[i] - highest), maximum[i] = highest;
        }
        const Word upper = transposed(pack2<T>(score[0], score[1])), lower = transposed(pack2<T>(score[2], score[3]));
#pragma unroll
        for (int i = 0; i <= TILES; ++i) {
            Word a[4];
            for (int k = 0; k < 4; ++k) {
                const Word one = value[k / 2 * 2][i % TILES / 4].word[i % 4], next = value[k / 2 * 2 + 1][i % TILES / 4].word[i % 4];
                a[k] = i == TILES ? pack2<T>(1.0f, 1.0f) : __byte_perm(one, next, k % 2 ? 0x7632 : 0x5410);
                out[i][k] *= shrink[k % 2];
            }
            multiply_add(out[i], a, upper, lower);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int query = member * 2 + i;
        if (query >= QUERIES) break;
        if (group == 0) maxima[team][query] = maximum[i], sums[team][query] = out[TILES][i];
#pragma unroll
        for (int k = 0; k < HEAD_DIM / 8; ++k)
            outs[team][query * HEAD_DIM + k / 8 * 64 + group * 8 + k % 8] = out[k / 2][k % 2 * 2 + i];
    }
}
#else
DEVICE void attend(const T *q, const Rows &keys, const Rows &values, float scale, int last_query, int begin, int end) {
    const int team = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    float query[QUERIES][EACH], maximum[QUERIES], sum[QUERIES] = {}, out[QUERIES][EACH] = {};
#pragma unroll
    for (int i = 0; i < QUERIES; ++i) load_columns(query[i], q + min(i, last_query) * HEAD_DIM), maximum[i] = LOWEST;
    // The teams of a warp go the same number of rounds: they sum together.
    for (int base = begin + team / OF_WARP * OF_WARP * KEYS; base < end; base += TEAMS * KEYS) {
        float scores[KEYS][QUERIES], loaded[KEYS][EACH];
        const int first = base + team % OF_WARP * KEYS;
#pragma unroll
        for (int key = 0; key < KEYS; ++key) load_columns(loaded[key], keys.at(first + key));
#pragma unroll
        for (int key = 0; key < KEYS; ++key)
            for (int i = 0; i < QUERIES; ++i) {
                float product = 0.0f;
                for (int k = 0; k < EACH; ++k) product += query[i][k] * loaded[key][k];
                product = score_of(team_sum(product), scale);
                scores[key][i] = first + key < end ? product : HIDDEN;
            }
#pragma unroll
        for (int key = 0; key < KEYS; ++key) load_columns(loaded[key], values.at(first + key));
#pragma unroll
        for (int i = 0; i < QUERIES; ++i) {
            float highest = maximum[i];
            for (int key = 0; key < KEYS; ++key) highest = fmaxf(highest, scores[key][i]);
            const float shrink = __expf(maximum[i] - highest);
            maximum[i] = highest, sum[i] *= shrink;
            for (int k = 0; k < EACH; ++k) out[i][k] *= shrink;
            for (int key = 0; key < KEYS; ++key) {
                const float p = __expf(scores[key][i] - highest);
                sum[i] += p;
                for (int k = 0; k < EACH; ++k) out[i][k] += p * loaded[key][k];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < QUERIES; ++i) {
        if (lane == 0) maxima[team][i] = maximum[i], sums[team][i] = sum[i];
#pragma unroll
        for (int k = 0; k < EACH; ++k) outs[team][i * HEAD_DIM + lane * EACH + k] = out[i][k];
    }
}
#endif

}   // namespace cached

// o [n, heads * HEAD_DIM] of queries q (rows at their strides), over keys and values at `kv_stride`. Query t is key places[n + t] of its
// sequence, whose pages begin at places[places[2 n + t]]. Key and value of that place are rows t of `new_keys` and `new_values`, at their strides, and are
// stored; if these are null, they are in the caches already. A query sees `window` keys at most. With `splits` > 1 the keys of a query are cut into parts of
// `part_keys`, and `parts` [n, heads, splits, HEAD_DIM + 2] f32 gets their sums, for cached_attention_combine; else it may be null.
// `sinks` [heads] are logits of one more column without a value, or null.
// Launch: grid (kv_heads * ceil(heads / kv_heads / QUERIES), n, splits), block THREADS.
KERNEL __launch_bounds__(cached::THREADS, 512 / cached::THREADS)
cached_attention(T *o, float *parts, const T *q, T *keys, T *values, const T *new_keys, const T *new_values,
                 long long new_keys_stride, long long new_values_stride, long long o_stride, long long q_stride,
                 long long kv_stride, const int *places, int heads, int kv_heads, float scale, int window,
                 int splits, int part_keys, const float *sinks) {
    using namespace cached;
    wait_for_earlier();
    const int token = blockIdx.y, shared = heads / kv_heads, chunks = (shared + QUERIES - 1) / QUERIES;
    const int kv_head = blockIdx.x / chunks, first_query = blockIdx.x % chunks * QUERIES;
    const int last = places[gridDim.y + token], *pages = places + places[2 * gridDim.y + token];
    const int begin = max(0, last - window + 1) + static_cast<int>(blockIdx.z) * part_keys, end = min(last + 1, begin + part_keys);
    const Long of_head = static_cast<Long>(kv_head) * HEAD_DIM, first_head = kv_head * shared + first_query;
    const bool is_new = new_keys != nullptr;
    const T *own_key = is_new ? new_keys + token * new_keys_stride + of_head : nullptr;
    const T *own_value = is_new ? new_values + token * new_values_stride + of_head : nullptr;
    const Rows of_keys = {keys + of_head, own_key, pages, kv_stride, last}, of_values = {values + of_head, own_value, pages, kv_stride, last};
    attend(q + token * q_stride + first_head * HEAD_DIM, of_keys, of_values, scale, shared - first_query - 1, begin, end);
    if (is_new && begin <= last && last < end && first_query == 0) {
        const Long place = of_keys.place(last) + of_head;
        for (int column = threadIdx.x; column < HEAD_DIM; column += THREADS)
            keys[place + column] = own_key[column], values[place + column] = own_value[column];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < QUERIES * HEAD_DIM; at += THREADS) {
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
    wait_for_earlier();
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
