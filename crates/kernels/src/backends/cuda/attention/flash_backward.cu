// Flash attention, backward. Compiled after prelude.cu and flash.cu; see the latter for the layout of the tensors.
//
// Two launches: flash_backward_queries (dq, and the delta of each row), then flash_backward_keys (dk, dv).
// With p = exp(scale * q k - lse), dp = do v and delta = Σ do o:  ds = p (dp - delta),  dv = pᵀ do,  dk = scale dsᵀ q,
// dq = scale ds k; where scores have a soft cap, ds is multiplied by its slope too. Each output element has one block that sums it in a fixed order: no atomics, the same bits every time.
// Trade-off: two of seven GEMMs are computed by both launches, against a kernel that adds dq in global memory.
//
// p and ds stay in registers: the product that makes them leaves a lane what it needs as left factor of the next one.
//
// Macros, each with _KEYS_ (flash_backward_keys) or _QUERIES_ (flash_backward_queries) behind FLASH. Those of the host are OWN, STEP,
// STAGES and WARPS.

#ifndef FLASH_PIECES
#error "flash_backward.cu is compiled behind flash.cu"
#endif

// flash_backward_keys. OWN: keys a block. STEP: queries a step. STAGES: steps in shared memory at a time, 1 or 2. HELD: 1 if
// a warp's rows of k and v live in registers. BLOCKS: blocks that must fit a multiprocessor.
#ifndef FLASH_KEYS_HELD
#define FLASH_KEYS_HELD (HEAD_DIM == 64)
#endif
#ifndef FLASH_KEYS_BLOCKS
#define FLASH_KEYS_BLOCKS 2
#endif

// flash_backward_queries. OWN: queries a block. STEP: keys a step. The others as above, HELD for q and do.
#ifndef FLASH_QUERIES_HELD
#define FLASH_QUERIES_HELD (HEAD_DIM == 96 || HEAD_DIM == 128)
#endif
#ifndef FLASH_QUERIES_BLOCKS
#define FLASH_QUERIES_BLOCKS (HEAD_DIM == 64 ? 1 : 2)
#endif

namespace flash {

constexpr int KEYS_THREADS = FLASH_KEYS_WARPS * 32, KEYS_M = FLASH_KEYS_OWN / FLASH_KEYS_WARPS / 16;
constexpr int QUERIES_THREADS = FLASH_QUERIES_WARPS * 32, QUERIES_M = FLASH_QUERIES_OWN / FLASH_QUERIES_WARPS / 16;
static_assert(KEYS_M * FLASH_KEYS_WARPS * 16 == FLASH_KEYS_OWN, "each warp needs whole tiles of 16 keys");
static_assert(QUERIES_M * FLASH_QUERIES_WARPS * 16 == FLASH_QUERIES_OWN, "each warp needs whole tiles of 16 queries");
static_assert(FLASH_QUERIES_WARPS >= 4, "each warp needs one head");

// A warp's rows of one tensor as left factor, in registers or read from the tile at each use.
template <int M, bool HELD> struct Band {
    Word tile;

    DEVICE Band(Word tile) : tile(tile) {}
    DEVICE void load(Lane) {}
    template <int N> DEVICE void times(float (&c)[M][N][4], Lane left, Word b_tile, Lane right) const {
        multiply(c, tile, left, b_tile, right);
    }
};

template <int M> struct Band<M, true> {
    Word tile;
    Held<M> held;

    DEVICE Band(Word tile) : tile(tile) {}
    DEVICE void load(Lane left) { held.load(tile, left); }
    template <int N> DEVICE void times(float (&c)[M][N][4], Lane, Word b_tile, Lane right) const {
        multiply(c, held, b_tile, right);
    }
};

// dots[m][half] = Σ o * do over the head width of row 16 m + 8 half + lane / 4 of a warp's: o in global memory, do in a tile that this waits
// for. Four lanes have a row, and each gets the sum. All threads of the block must call.
template <int M>
DEVICE void row_dots(float (&dots)[M][2], const Rows<const Half> &o, Word do_tile, int first, int tokens) {
    constexpr int EACH = CHUNKS / 4;
    const int lane = threadIdx.x % 32;
    uint4 x[M * 2][EACH];
#pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        const int row = first + i * 8 + lane / 4;
        const Half *from = o.data + row * o.stride + lane % 4 * 8;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            if (row >= tokens) x[i][k] = make_uint4(0, 0, 0, 0);
            else x[i][k] = o.aligned ? *reinterpret_cast<const uint4 *>(from + k * 32) : read_chunk_slowly(from + k * 32);
        }
    }
    wait_for_copies();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const uint4 y = load_chunk(chunk_address(do_tile, i * 8 + lane / 4, k * 4 + lane % 4));
            const Word left[4] = {x[i][k].x, x[i][k].y, x[i][k].z, x[i][k].w}, right[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float x0, x1, y0, y1;
                unpack2<T>(left[j], x0, x1), unpack2<T>(right[j], y0, y1);
                sum += x0 * y0 + x1 * y1;
            }
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        dots[i / 2][i % 2] = sum + __shfl_xor_sync(0xffffffffu, sum, 2);
    }
}

// What the two launches share: the tensors that they read.
struct Inputs {
    Rows<const Half> q, k, v, d_o;
    const float *lse, *delta;   // of the query head
    int tokens;

    // Moves what belongs to query heads on by `count` heads.
    DEVICE void skip_heads(int count) {
        const Long columns = static_cast<Long>(count) * HEAD_DIM, rows = static_cast<Long>(count) * tokens;
        q.data += columns, d_o.data += columns, lse += rows, delta += rows;
    }
};

// ----------------------------------------------------------------------------------------------------- dk and dv

constexpr int STAGE_BYTES = FLASH_KEYS_STEP * (2 * PITCH + 8);   // q, do, lse, delta

DEVICE void copy_query_step(const Inputs &in, Word stage, int query0) {
    constexpr int STEP = FLASH_KEYS_STEP, THREADS = KEYS_THREADS;
    copy_rows<STEP, THREADS>(stage, in.q, query0, in.tokens);
    copy_rows<STEP, THREADS>(stage + STEP * PITCH, in.d_o, query0, in.tokens);
    copy_floats<STEP, THREADS>(stage + 2 * STEP * PITCH, in.lse, query0, in.tokens);
    copy_floats<STEP, THREADS>(stage + 2 * STEP * PITCH + 4 * STEP, in.delta, query0, in.tokens);
}

// The scores of keys x queries, in place, to probabilities; `lse` holds the tile's queries, lane's first at [0].
template <int M, int N> DEVICE void probabilities(float (&scores)[M][N][4], const float *lse, float scale_log2) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float2 pair = *reinterpret_cast<const float2 *>(lse + n * 8);
        const float base[2] = {pair.x * LOG2_E, pair.y * LOG2_E};
#pragma unroll
        for (int i = 0; i < M * 4; ++i) {
            float &score = scores[i / 4][n][i % 4];
            score = exp2_fast(score * scale_log2 - base[i % 2]);
        }
    }
}

// Zeroes the probabilities of queries outside [key, end) of each key row. `ends` holds the band's rows, `key` is the lane's
// first row and `query` its first query.
template <int M, int N> DEVICE void hide_queries(float (&p)[M][N][4], const int *ends, int key, int query) {
    const int lane_row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        const int start = key + i * 8, end = ends[lane_row + i * 8];
#pragma unroll
        for (int j = 0; j < N * 2; ++j) {
            const int at = query + j / 2 * 8 + j % 2;
            if (at < start || at >= end) p[i / 2][j / 2][i % 2 * 2 + j % 2] = 0.0f;
        }
    }
}

// p to ds, in place. dp - delta comes out of one product: its sums begin at -delta. `lse` is read for the slope of a soft cap only.
template <int M, int N, class VBand>
DEVICE void score_gradients(float (&p)[M][N][4], const VBand &v_band, Lane left, Word do_tile, Lane right,
                            const float *lse, const float *delta) {
    float dp[M][N][4];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float2 pair = *reinterpret_cast<const float2 *>(delta + n * 8);
#pragma unroll
        for (int i = 0; i < M * 4; ++i) dp[i / 4][n][i % 4] = i % 2 == 0 ? -pair.x : -pair.y;
    }
    v_band.times(dp, left, do_tile, right);
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
        const int n = i / 4 % N, j = i % 4;
        float &value = p[i / (N * 4)][n][j];
#ifdef SOFT_CAP
        value *= cap_slope(value, lse[n * 8 + j % 2] * LOG2_E);
#endif
        value *= dp[i / (N * 4)][n][j];
    }
}

// One block's dv (DV) and dk (DK). in.q, in.d_o, in.lse and in.delta stand at the first of `group` query heads.
template <bool DV, bool DK>
DEVICE void keys_body(Inputs in, const Rows<Half> &dk_rows, const Rows<Half> &dv_rows, const Documents &of_rows, int key0,
                      int group, float scale, unsigned char *shared_memory) {
    constexpr int OWN = FLASH_KEYS_OWN, STEP = FLASH_KEYS_STEP, STAGES = FLASH_KEYS_STAGES, M = KEYS_M;
    const Word k_tile = shared_address(shared_memory), v_tile = k_tile + OWN * PITCH, stages = v_tile + OWN * PITCH;
    const int first_end = of_rows.first_end(), last_end = of_rows.last_end();
    const int query_begin = key0 / STEP * STEP;

    copy_rows<OWN, KEYS_THREADS>(k_tile, in.k, key0, in.tokens);
    if (DK) copy_rows<OWN, KEYS_THREADS>(v_tile, in.v, key0, in.tokens);
    copy_query_step(in, stages, query_begin);
    copies_issued();

    const int lane = threadIdx.x % 32, band = threadIdx.x / 32 * M * 16, key = key0 + band + lane / 4;
    const Lane left = left_lane(lane), right = right_lane(lane);
    int *const ends = reinterpret_cast<int *>(shared_memory + 2 * OWN * PITCH + STAGES * STAGE_BYTES);
    of_rows.store_ends(ends, OWN);
    Band<M, FLASH_KEYS_HELD> k_band(k_tile + band * PITCH), v_band(v_tile + band * PITCH);
    float dk[M][CHUNKS][4], dv[M][CHUNKS][4];
    clear(dk), clear(dv);

    const float scale_log2 = scale_of_scores(scale) * LOG2_E;
    const int steps = (last_end - query_begin + STEP - 1) / STEP, all = steps * group;
    int query0 = query_begin, stage = 0;
    for (int i = 0; i < all; ++i) {
        wait_for_copies();
        __syncthreads();
        if (FLASH_KEYS_HELD && i == 0) {
            k_band.load(left);
            if (DK) v_band.load(left);
        }
        const Word q_tile = stages + stage * STAGE_BYTES, do_tile = q_tile + STEP * PITCH;
        const unsigned char *floats = shared_memory + 2 * OWN * PITCH + stage * STAGE_BYTES + 2 * STEP * PITCH;
        const float *lse = reinterpret_cast<const float *>(floats) + lane % 4 * 2, *delta = lse + STEP;
        const int this_query0 = query0;
        query0 += STEP;
        if (query0 >= last_end) query0 = query_begin, in.skip_heads(1);
        if (STAGES == 2) {
            stage ^= 1;
            if (i + 1 < all) copy_query_step(in, stages + stage * STAGE_BYTES, query0);
            copies_issued();
        }

        // Queries before the band's first key, and after the last document of its last.
        if (this_query0 + STEP > key0 + band && this_query0 < ends[band + M * 16 - 1]) {
            float p[M][STEP / 8][4];
            clear(p);
            k_band.times(p, left, q_tile, right);
            cap_scores(p, scale);
            probabilities(p, lse, scale_log2);
            if (this_query0 < key0 + OWN - 1 || this_query0 + STEP > first_end)
                hide_queries(p, ends + band, key, this_query0 + lane % 4 * 2);
            if (DV) multiply_rounded(dv, p, do_tile, left);
            if (DK) {
                score_gradients(p, v_band, left, do_tile, right, lse, delta);
                multiply_rounded(dk, p, q_tile, left);
            }
        }
        if (STAGES == 1) {
            __syncthreads();
            if (i + 1 < all) copy_query_step(in, stages, query0);
            copies_issued();
        }
    }

    float one[M][2], scales[M][2];
#pragma unroll
    for (int i = 0; i < M * 2; ++i) one[i / 2][i % 2] = 1.0f, scales[i / 2][i % 2] = scale;
    if (DV) write_rows(dv_rows, key0 + band, in.tokens, v_tile + band * PITCH, dv, one);
    if (DK) write_rows(dk_rows, key0 + band, in.tokens, k_tile + band * PITCH, dk, scales);
}

}   // namespace flash

// dk and dv [tokens, kv_heads, HEAD_DIM], summed over the query heads of each key head, from lse of flash_forward and delta
// of flash_backward_queries, both [query_heads, tokens].
//
// Launch: grid (kv_heads, ceil(tokens / FLASH_KEYS_OWN), HEAD_DIM == 256 ? 2 : 1), block 32 * FLASH_KEYS_WARPS, dynamic
// shared bytes 4 * HEAD_DIM * (FLASH_KEYS_OWN + FLASH_KEYS_STAGES * FLASH_KEYS_STEP) + 8 * FLASH_KEYS_STAGES *
// FLASH_KEYS_STEP + 4 * FLASH_KEYS_OWN. By default 64 keys, 128 threads and, for HEAD_DIM 64, 96, 128, 256: 50432, 75008, 99584, 98816
// bytes.
//
// At HEAD_DIM 256 the sums of dk and dv do not fit the registers together: blockIdx.z 0 makes dv and 1 makes dk.
KERNEL __launch_bounds__(flash::KEYS_THREADS, FLASH_KEYS_BLOCKS)
flash_backward_keys(T *dk, T *dv, const T *q, const T *k, const T *v, const T *d_o, const float *lse, const float *delta,
                    long long dk_stride, long long dv_stride, long long q_stride, long long k_stride, long long v_stride,
                    long long do_stride, const int *cu_seqlens, int documents, int tokens, int query_heads, int kv_heads,
                    float scale, int window, int) {
    using namespace flash;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    // The first tile has the most queries in a long document: it goes first.
    const int kv_head = blockIdx.x, key0 = blockIdx.y * FLASH_KEYS_OWN, group = query_heads / kv_heads;
    const Documents of_rows(cu_seqlens, documents, tokens, window, key0, min(key0 + FLASH_KEYS_OWN, tokens) - 1);
    Inputs in{{q, q_stride, 0}, {k, k_stride, kv_head}, {v, v_stride, kv_head}, {d_o, do_stride, 0}, lse, delta, tokens};
    in.skip_heads(kv_head * group);
    const Rows<Half> dk_rows(dk, dk_stride, kv_head), dv_rows(dv, dv_stride, kv_head);
    if constexpr (HEAD_DIM == 256) {
        if (blockIdx.z == 0) keys_body<true, false>(in, dk_rows, dv_rows, of_rows, key0, group, scale, shared_memory);
        else keys_body<false, true>(in, dk_rows, dv_rows, of_rows, key0, group, scale, shared_memory);
    } else {
        keys_body<true, true>(in, dk_rows, dv_rows, of_rows, key0, group, scale, shared_memory);
    }
}

// dq [tokens, query_heads, HEAD_DIM], from the same inputs and o, and delta [query_heads, tokens].
//
// Launch: grid (query_heads / heads, ceil(tokens / (FLASH_QUERIES_OWN / heads))), block 32 * FLASH_QUERIES_WARPS, dynamic shared bytes
// 4 * HEAD_DIM * (FLASH_QUERIES_OWN + FLASH_QUERIES_STAGES * FLASH_QUERIES_STEP) + 4 * FLASH_QUERIES_OWN. By default, for HEAD_DIM 64, 96,
// 128, 256: queries 128, 64, 64, 64; 128 threads; 66048, 73984, 98560, 98560 bytes.
KERNEL __launch_bounds__(flash::QUERIES_THREADS, FLASH_QUERIES_BLOCKS)
flash_backward_queries(T *dq, float *delta, const T *q, const T *k, const T *v, const T *o, const T *d_o, const float *lse,
                       long long dq_stride, long long q_stride, long long k_stride, long long v_stride,
                       long long o_stride, long long do_stride, const int *cu_seqlens, int documents, int tokens, int query_heads,
                       int kv_heads, float scale, int window, int heads) {
    using namespace flash;
    constexpr int OWN = FLASH_QUERIES_OWN, STEP = FLASH_QUERIES_STEP, THREADS = QUERIES_THREADS, M = QUERIES_M;
    constexpr int STAGES = FLASH_QUERIES_STAGES;
    extern __shared__ __align__(128) unsigned char shared_memory[];
    const Word q_tile = shared_address(shared_memory), do_tile = q_tile + OWN * PITCH, stages = do_tile + OWN * PITCH;

    const Heads of_heads = Heads::of_tile<OWN>(blockIdx.x, heads);
    const int kv_head = of_heads.head0 / (query_heads / kv_heads), query0 = (gridDim.y - 1 - blockIdx.y) * of_heads.tokens();
    const int key_end = min(query0 + of_heads.tokens(), tokens);
    const Rows<const Half> k_rows(k, k_stride, kv_head), v_rows(v, v_stride, kv_head);
    const Documents of_rows(cu_seqlens, documents, tokens, window, query0, key_end - 1);
    const int last_start = of_rows.last_start(), key_begin = of_rows.first_start();
    const auto copy_key_step = [&](Word stage, int key0) {
        copy_rows<STEP, THREADS>(stage, k_rows, key0, tokens);
        copy_rows<STEP, THREADS>(stage + STEP * PITCH, v_rows, key0, tokens);
    };
    copy_heads<OWN, THREADS>(q_tile, Rows<const Half>(q, q_stride, of_heads.head0), of_heads, query0, tokens);
    copy_heads<OWN, THREADS>(do_tile, Rows<const Half>(d_o, do_stride, of_heads.head0), of_heads, query0, tokens);
    copy_key_step(stages, key_begin);
    copies_issued();

    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * M * 16;
    const int head = of_heads.head0 + of_heads.head(warp_row), band = of_heads.token(warp_row), row = query0 + band + lane / 4;
    const Lane left = left_lane(lane), right = right_lane(lane);
    int *const starts = reinterpret_cast<int *>(shared_memory + 2 * (OWN + STAGES * STEP) * PITCH);
    of_rows.store_starts(starts, of_heads.tokens());
    float base[M][2], minus_delta[M][2], scales[M][2];
#pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        const int mine = row + i / 2 * 16 + i % 2 * 8, m = i / 2, half = i % 2;
        base[m][half] = mine < tokens ? lse[static_cast<Long>(head) * tokens + mine] * LOG2_E : 0.0f;
        scales[m][half] = scale;
    }
    row_dots(minus_delta, Rows<const Half>(o, o_stride, head), do_tile + warp_row * PITCH, query0 + band, tokens);
#pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        const int mine = row + i / 2 * 16 + i % 2 * 8;
        float &dot = minus_delta[i / 2][i % 2];
        if (lane % 4 == 0 && mine < tokens) delta[static_cast<Long>(head) * tokens + mine] = dot;
        dot = -dot;
    }
    Band<M, FLASH_QUERIES_HELD> q_band(q_tile + warp_row * PITCH), do_band(do_tile + warp_row * PITCH);
    float sum[M][CHUNKS][4];
    clear(sum);

    const float scale_log2 = scale_of_scores(scale) * LOG2_E;
    int stage = 0;
    for (int key0 = key_begin; key0 < key_end; key0 += STEP) {
        wait_for_copies();
        __syncthreads();
        if (FLASH_QUERIES_HELD && key0 == key_begin) q_band.load(left), do_band.load(left);
        const Word k_tile = stages + stage * 2 * STEP * PITCH, v_tile = k_tile + STEP * PITCH;
        if (STAGES == 2) {
            stage ^= 1;
            if (key0 + STEP < key_end) copy_key_step(stages + stage * 2 * STEP * PITCH, key0 + STEP);
            copies_issued();
        }

        if (sees_keys<M>(starts + band, query0 + band, key0, STEP)) {
            float p[M][STEP / 8][4], dp[M][STEP / 8][4];
            clear(p);
            q_band.times(p, left, k_tile, right);
            cap_scores(p, scale);
#pragma unroll
            for (int i = 0; i < M * STEP / 2; ++i) {
                const int m = i / (STEP / 2), n = i / 4 % (STEP / 8), j = i % 4;
                p[m][n][j] = exp2_fast(p[m][n][j] * scale_log2 - base[m][j / 2]);
                dp[m][n][j] = minus_delta[m][j / 2];
            }
            if (key0 + STEP - 1 > query0 || key0 < last_start) hide_keys(p, starts + band, row, key0 + lane % 4 * 2, 0.0f);
            do_band.times(dp, left, v_tile, right);
#pragma unroll
            for (int i = 0; i < M * STEP / 2; ++i) {
                const int m = i / (STEP / 2), n = i / 4 % (STEP / 8), j = i % 4;
#ifdef SOFT_CAP
                p[m][n][j] *= cap_slope(p[m][n][j], base[m][j / 2]);
#endif
                p[m][n][j] *= dp[m][n][j];
            }
            multiply_rounded(sum, p, k_tile, left);
        }
        if (STAGES == 1) {
            __syncthreads();
            if (key0 + STEP < key_end) copy_key_step(stages, key0 + STEP);
            copies_issued();
        }
    }
    write_rows(Rows<Half>(dq, dq_stride, head), query0 + band, tokens, q_tile + warp_row * PITCH, sum, scales);
}
