// Flash attention, forward. Compiled after prelude.cu and flash.cu; see the latter for the layout of the tensors.
//
// A block owns FLASH_FORWARD_QUERIES rows of `heads` query heads, each warp a band of one head's, and walks the keys from the first
// that its first token sees to the diagonal with a running maximum and sum. Keys and values have one buffer each: values
// arrive while the scores are computed, the next keys while the values are summed.
//
// O(tokens) memory; sums in f32. Trade-off: probabilities are rounded to T before they are multiplied with the values, as everywhere.

#ifndef FLASH_PIECES
#error "flash_forward.cu is compiled behind flash.cu"
#endif

// Rows of queries a block and of keys a step, and warps, are macros of the host. Blocks that must fit a multiprocessor:
#ifndef FLASH_FORWARD_BLOCKS
#define FLASH_FORWARD_BLOCKS 2
#endif

namespace flash {

constexpr int FORWARD_THREADS = FLASH_FORWARD_WARPS * 32;
constexpr int FORWARD_M = FLASH_FORWARD_QUERIES / FLASH_FORWARD_WARPS / 16;
static_assert(FORWARD_M * FLASH_FORWARD_WARPS * 16 == FLASH_FORWARD_QUERIES, "each warp needs whole tiles of 16 queries");
static_assert(FLASH_FORWARD_WARPS >= 4, "each warp needs one head");

// Running softmax of one warp's rows; index [m][half] is row 16 m + 8 half + lane / 4.
template <int M> struct Softmax {
    float maximum[M][2], sum[M][2];

    DEVICE Softmax() {
#pragma unroll
        for (int i = 0; i < M * 2; ++i) {
            maximum[i / 2][i % 2] = __int_as_float(0xff800000);
            sum[i / 2][i % 2] = 0.0f;
        }
    }

    // Turns scores into exp(scale * (score - maximum)) and rescales what was summed under the old maximum.
    template <int N> DEVICE void update(float (&scores)[M][N][4], float (&o)[M][CHUNKS][4], float scale_log2) {
#pragma unroll
        for (int i = 0; i < M * 2; ++i) {
            const int m = i / 2, half = i % 2;
            float highest = maximum[m][half];
#pragma unroll
            for (int n = 0; n < N; ++n) highest = fmaxf(highest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
            // A row that has seen no key yet keeps probabilities of 0 instead of inf - inf.
            const float base = highest == __int_as_float(0xff800000) ? 0.0f : highest * scale_log2;
            const float shrink = exp2_fast(maximum[m][half] * scale_log2 - base);
            maximum[m][half] = highest;
            float added = 0.0f;
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; ++j) {
                    scores[m][n][j] = exp2_fast(scores[m][n][j] * scale_log2 - base);
                    added += scores[m][n][j];
                }
            sum[m][half] = sum[m][half] * shrink + added;
#pragma unroll
            for (int n = 0; n < CHUNKS; ++n) o[m][n][2 * half] *= shrink, o[m][n][2 * half + 1] *= shrink;
        }
    }
};

}   // namespace flash

// o [tokens, query_heads, HEAD_DIM] and lse [query_heads, tokens], the natural logarithm of the sum of exp(scale * q k), capped
// where SOFT_CAP is defined, of each row; scale > 0; query_heads a multiple of kv_heads.
//
// Launch: grid (query_heads / heads, ceil(tokens / (FLASH_FORWARD_QUERIES / heads))), block 32 * FLASH_FORWARD_WARPS, dynamic shared bytes
// 2 * HEAD_DIM * (FLASH_FORWARD_QUERIES + 2 * FLASH_FORWARD_KEYS) + 4 * FLASH_FORWARD_QUERIES. By default, for HEAD_DIM 64, 96, 128,
// 256: queries 128, 128, 128, 64; 128 threads; 33280, 49664, 66048, 98560 bytes.
KERNEL __launch_bounds__(flash::FORWARD_THREADS, FLASH_FORWARD_BLOCKS)
flash_forward(T *o, float *lse, const T *q, const T *k, const T *v, long long q_stride, long long k_stride,
              long long v_stride, long long o_stride, const int *cu_seqlens, int documents, int tokens, int query_heads,
              int kv_heads, float scale, int window, int heads) {
    using namespace flash;
    constexpr int QUERIES = FLASH_FORWARD_QUERIES, KEYS = FLASH_FORWARD_KEYS, THREADS = FORWARD_THREADS, M = FORWARD_M;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const Word q_tile = shared_address(shared_memory);
    const Word k_tile = q_tile + QUERIES * PITCH, v_tile = k_tile + KEYS * PITCH;

    // The last tile has the most keys in a long document: it goes first.
    const Heads of_heads = Heads::of_tile<QUERIES>(blockIdx.x, heads);
    const int kv_head = of_heads.head0 / (query_heads / kv_heads), query0 = (gridDim.y - 1 - blockIdx.y) * of_heads.tokens();
    const int key_end = min(query0 + of_heads.tokens(), tokens);
    const Rows<const Half> k_rows(k, k_stride, kv_head), v_rows(v, v_stride, kv_head);

    const Documents of_rows(cu_seqlens, documents, tokens, window, query0, key_end - 1);
    const int last_start = of_rows.last_start(), key_begin = of_rows.first_start();

    copy_heads<QUERIES, THREADS>(q_tile, Rows<const Half>(q, q_stride, of_heads.head0), of_heads, query0, tokens);
    copy_rows<KEYS, THREADS>(k_tile, k_rows, key_begin, tokens);
    copies_issued();

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int head = of_heads.head0 + of_heads.head(warp * M * 16), band = of_heads.token(warp * M * 16), row = query0 + band + lane / 4;
    const Word q_band = q_tile + warp * M * 16 * PITCH;
    const Lane left = left_lane(lane), right = right_lane(lane);
    int *const starts = reinterpret_cast<int *>(shared_memory + (QUERIES + 2 * KEYS) * PITCH);
    of_rows.store_starts(starts, of_heads.tokens());

    const float scale_log2 = scale_of_scores(scale) * LOG2_E;
    Softmax<M> softmax;
    float out[M][CHUNKS][4];
    clear(out);
    for (int key0 = key_begin; key0 < key_end; key0 += KEYS) {
        wait_for_copies();
        __syncthreads();   // the keys are here, and no thread reads the old values anymore
        copy_rows<KEYS, THREADS>(v_tile, v_rows, key0, tokens);
        copies_issued();

        const bool is_seen = sees_keys<M>(starts + band, query0 + band, key0, KEYS);
        float scores[M][KEYS / 8][4];
        if (is_seen) {
            clear(scores);
            multiply(scores, q_band, left, k_tile, right);
            cap_scores(scores, scale);
            if (key0 + KEYS - 1 > query0 || key0 < last_start)
                hide_keys(scores, starts + band, row, key0 + lane % 4 * 2, __int_as_float(0xff800000));
        }

        wait_for_copies();
        __syncthreads();   // the values are here, and no thread reads the old keys anymore
        if (key0 + KEYS < key_end) copy_rows<KEYS, THREADS>(k_tile, k_rows, key0 + KEYS, tokens);
        copies_issued();
        if (is_seen) {
            softmax.update(scores, out, scale_log2);
            multiply_rounded(out, scores, v_tile, left);
        }
    }

    float inverse[M][2];
#pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        float sum = softmax.sum[i / 2][i % 2];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        inverse[i / 2][i % 2] = 1.0f / sum;
        const int mine = row + i / 2 * 16 + i % 2 * 8;
        if (lane % 4 == 0 && mine < tokens)
            lse[static_cast<Long>(head) * tokens + mine] = softmax.maximum[i / 2][i % 2] * scale_of_scores(scale) + logf(sum);
    }
    write_rows(Rows<Half>(o, o_stride, head), query0 + band, tokens, q_band, out, inverse);
}
