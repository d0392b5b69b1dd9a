// The gated delta rule, backward: gradients of q, k, a, b, a_log, dt_bias. Compiled after tiles.cu; backward.cu has the formulas.

// Warps that share 16 tokens.
static constexpr int SIDES = KEY_DIM % 32 == 0 ? 2 : 1, INPUTS_THREADS = THREADS * SIDES;
static constexpr int SIDE_TILES = KEY_TILES / SIDES;

// Adds the dots of a lane's two rows of sums and a tile.
DEVICE void add_dots(float (&dots)[2], const float (&c)[SIDE_TILES][4], Tile<KEY_DIM> tile, int band, int column) {
#pragma unroll
    for (int i = 0; i < SIDE_TILES * 4; i += 2) {
        const float2 pair = load_pair(tile.at(band + row_of(i % 4), column + i / 4 * 8 + column_of(i)));
        dots[i % 4 / 2] += c[i / 4][i % 4] * pair.x + c[i / 4][i % 4 + 1] * pair.y;
    }
}

// Sums over the lanes that share rows, for `row_dot`.
DEVICE void share_dots(float *rows, const float (&dots)[2], int band, int side) {
    for (int i = 0; i < 2; ++i) {
        const float sum = sum_of_four(dots[i]);
        if (lane() % 4 == 0) rows[side * CHUNK + band + row_of(2 * i)] = sum;
    }
}

DEVICE float row_dot(const float *rows, int row) { return rows[row] + (SIDES == 2 ? rows[CHUNK + row] : 0.0f); }

// A slice of a product of rows of v and a state.
struct Slices {
    Tile<SLICE> rows;
    Tile<KEY_DIM> state;
};

// The columns of q and k of d_qkv, summed over the value heads of a key head; da and db [n, value_heads]; each at a stride. partial
// [chunks, 2, value_heads] f32, to be summed over chunks: of a_log, of dt_bias. From what the kernels before wrote; dv are columns
// of d_qkv. First dq of all heads, then dk: there are registers for one of them.
//
// Launch: grid key_heads * chunks, block KEY_DIM % 32 == 0 ? 256 : 128, dynamic shared bytes 2 p(KEY_DIM) + 2 p(64) + 2 (p(SLICE) +
// p(KEY_DIM) SLICE / 64) + 3328 + 512 value_heads / key_heads. For 128 of a 16-bit type: 110848 bytes with SLICE 64 and two value heads
// a key head.
KERNEL __launch_bounds__(INPUTS_THREADS, T_IS_F32 ? 1 : 2)
delta_inputs_backward(T *d_qkv, long long d_qkv_stride, T *da, long long da_stride, T *db, long long db_stride, float *partial,
                      const T *q_hat, const T *k_hat, const float *inverse_lengths, const Gate *gates, const T *of_scores,
                      const T *of_inverse, const T *states, const T *d_states, const T *corrections, const T *dv,
                      const float *value_dots, const T *d_o, long long d_o_stride, const T *a, long long a_stride,
                      const float *a_log, const float *dt_bias, const int *chunks, int n, int key_heads, int value_heads) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    const int key_head = blockIdx.x % key_heads, group = value_heads / key_heads, head0 = key_head * group;
    const Chunk chunk = chunk_of(chunks, blockIdx.x / key_heads);
    const int warp = threadIdx.x / 32, band = warp % 4 * 16, side = warp / 4, column = side * SIDE_TILES * 8;
    Shared shared = {shared_memory};
    const Tile<KEY_DIM> q = shared.tile<KEY_DIM>(), k = shared.tile<KEY_DIM>();
    const Tile<CHUNK> d_scores = shared.tile<CHUNK>(), d_inverse = shared.tile<CHUNK>();
    Gate *const two_gates = shared.values<Gate>(2 * CHUNK);   // of even heads, of odd ones
    float *const of_beta = shared.values<float>(2 * CHUNK), *const of_keys = shared.values<float>(2 * CHUNK);
    float *const of_last = shared.values<float>(CHUNK), *const of_queries = shared.values<float>(group * 2 * CHUNK);
    const auto slices_of = [&](int step) {
        constexpr int VALUES = CHUNK * Tile<SLICE>::PITCH + SLICE * Tile<KEY_DIM>::PITCH;
        Shared at = {shared.next + step % 2 * VALUES * sizeof(T)};
        return Slices{at.tile<SLICE>(), at.tile<KEY_DIM>(SLICE)};
    };

    const Long keys_stride = key_heads * KEY_DIM, keys = chunk.row(keys_stride) + key_head * KEY_DIM;
    copy_rows<INPUTS_THREADS, CHUNK>(q, q_hat + keys, keys_stride, chunk.tokens);
    copy_rows<INPUTS_THREADS, CHUNK>(k, k_hat + keys, keys_stride, chunk.tokens);
    const auto copy_head = [&](int head, bool with_inverse) {
        const Long matrix = chunk.matrix(value_heads, head, CHUNK * CHUNK);
        copy_rows<INPUTS_THREADS, CHUNK>(d_scores, of_scores + matrix, CHUNK, CHUNK);
        if (with_inverse) copy_rows<INPUTS_THREADS, CHUNK>(d_inverse, of_inverse + matrix, CHUNK, CHUNK);
        copy_gates<INPUTS_THREADS>(two_gates + head % 2 * CHUNK, gates + static_cast<Long>(head) * n + chunk.first, chunk.tokens);
        copies_issued();
    };
    // The slices of all steps of dq, and then of dk.
    const int query_steps = group * SLICES, all_steps = 3 * query_steps;
    const auto copy_step = [&](int step) {
        if (step >= all_steps) return;
        const bool of_query = step < query_steps;
        const int at = of_query ? step : step - query_steps, product = at / SLICES, slice = at % SLICES * SLICE;
        const int head = head0 + (of_query ? product : product / 2);
        const bool at_end = !of_query && product % 2 == 1;
        const Long stride = of_query ? d_o_stride : at_end ? value_heads * VALUE_DIM : d_qkv_stride;
        const T *const rows = (of_query ? d_o : at_end ? corrections : dv) + chunk.row(stride) + head * VALUE_DIM + slice;
        const Long state = chunk.matrix(value_heads, head, VALUE_DIM * KEY_DIM) + slice * KEY_DIM;
        const Slices to = slices_of(step);
        copy_rows<INPUTS_THREADS, CHUNK>(to.rows, rows, stride, chunk.tokens);
        copy_rows<INPUTS_THREADS, SLICE>(to.state, (at_end ? d_states : states) + state, KEY_DIM, SLICE);
        copies_issued();
    };
    copy_step(0);

    int step = 0;
    float sum[SIDE_TILES][4], total[SIDE_TILES][4], total_dots[2] = {0.0f, 0.0f}, last;
    clear(total);
    // sum = rows of v times a state; if `other` is not null, `last` grows by the dot of the two states.
    const auto multiply_state = [&](const T *other) {
        clear(sum);
#pragma unroll 1
        for (int slice = 0; slice < SLICES; ++slice) {
            wait_for_copies();
            __syncthreads();
            copy_step(step + 1);
            const Slices in = slices_of(step++);
            multiply_tiles<ROWS, SLICE>(sum, in.rows, band, in.state, column);
            if (other == nullptr) continue;
            constexpr int EACH = 16 / sizeof(T);
#pragma unroll 4
            for (int i = threadIdx.x * EACH; i < SLICE * KEY_DIM; i += INPUTS_THREADS * EACH) {
                float first[EACH], second[EACH];
                Pack<T, EACH>::load(other + slice * SLICE * KEY_DIM + i).unpack(first);
                Pack<T, EACH>::load(in.state.at(i / KEY_DIM, i % KEY_DIM)).unpack(second);
                for (int j = 0; j < EACH; ++j) last += first[j] * second[j];
            }
        }
    };
    const auto add_to_total = [&] {
#pragma unroll
        for (int i = 0; i < SIDE_TILES * 4; ++i) total[i / 4][i % 4] += sum[i / 4][i % 4];
    };
    // Through the lengths: with y = c x / |x|, dx = (c dy - y (y dy) / c) / |x|.
    const auto write_total = [&](Tile<KEY_DIM> tile, float length, int heads) {
        share_dots(of_beta, total_dots, band, side);
        __syncthreads();
        const float *const inverses = inverse_lengths + static_cast<Long>(heads + key_head) * n + chunk.first;
#pragma unroll
        for (int i = 0; i < SIDE_TILES * 4; i += 2) {
            const int row = band + row_of(i % 4);
            const float2 y = load_pair(tile.at(row, column + i / 4 * 8 + column_of(i)));
            const float inverse = row < chunk.tokens ? inverses[row] : 0.0f, along = row_dot(of_beta, row) / length;
            float *const d = total[i / 4] + i % 4;
            d[0] = inverse * (length * d[0] - y.x * along), d[1] = inverse * (length * d[1] - y.y * along);
        }
        store(d_qkv + chunk.row(d_qkv_stride) + (heads + key_head) * KEY_DIM + column, d_qkv_stride, total, band, chunk.tokens);
    };

    // The gradients of a head's gates, from the dots of rows, by one warp; a lane has two tokens.
    const auto write_gates = [&](int head, const Gate *gate) {
        const float *const of_query = of_queries + (head - head0) * 2 * CHUNK;
        const float of_end = warp_sum(lane() < 4 * SIDES ? of_last[lane()] : 0.0f), rate = expf(a_log[head]);
        const int token = 2 * lane();
        float dg[2], sums[2] = {0.0f, 0.0f};
        for (int i = 0; i < 2; ++i) dg[i] = row_dot(of_query, token + i) + row_dot(of_keys, token + i);
        const float after = running_sum<true>(dg[0] + dg[1]) + of_end;
        dg[1] = after - dg[0], dg[0] = after;
        for (int i = 0; i < 2; ++i) {
            if (token + i >= chunk.tokens) continue;
            const Long at = chunk.first + token + i;
            const float x = to_float(a[at * a_stride + head]) + dt_bias[head], of_a = -dg[i] * rate * sigmoid(x);
            const float of_beta_and_v = row_dot(of_beta, token + i) + value_dots[static_cast<Long>(head) * n + at];
            da[at * da_stride + head] = from_float<T>(of_a);
            db[at * db_stride + head] = from_float<T>((1.0f - gate[token + i].beta) * of_beta_and_v);
            sums[0] -= dg[i] * rate * softplus(x), sums[1] += of_a;
        }
        for (int i = 0; i < 2; ++i) {
            const float sum = warp_sum(sums[i]);
            if (lane() == 0) partial[(chunk.index * 2ll + i) * value_heads + head] = sum;
        }
    };

    for (int head = head0; head < head0 + group; ++head) {
        const Gate *const gate = two_gates + head % 2 * CHUNK;
        copy_head(head, false);
        multiply_state(nullptr);
        for_each(sum, [&](float &value, int row, int) { value *= gate[band + row].from_start; });
        multiply_tiles<ROWS, CHUNK>(sum, d_scores, band, k, column, band + 16);
        add_to_total();
        float dots[2] = {0.0f, 0.0f};
        add_dots(dots, sum, q, band, column);
        for (int i = 0; i < 2; ++i) total_dots[i] += dots[i];
        share_dots(of_queries + (head - head0) * 2 * CHUNK, dots, band, side);
        __syncthreads();
    }
    write_total(q, rsqrtf(KEY_DIM), 0);
    clear(total);
    total_dots[0] = total_dots[1] = 0.0f;

    for (int head = head0; head < head0 + group; ++head) {
        const Gate *const gate = two_gates + head % 2 * CHUNK;
        copy_head(head, true);
        float row_dots[2] = {0.0f, 0.0f}, dots[2] = {0.0f, 0.0f}, end_dots[2] = {0.0f, 0.0f};
        multiply_state(nullptr);
        for_each(sum, [&](float &value, int row, int) { value *= -gate[band + row].from_start; });
        multiply_tiles<ROWS, CHUNK>(sum, d_inverse, band, k, column, band + 16);
        add_to_total();
        add_dots(row_dots, sum, k, band, column);

        last = 0.0f;
        multiply_state(states + chunk.matrix(value_heads, head, VALUE_DIM * KEY_DIM));
        last *= gate[chunk.tokens - 1].from_start;
        for_each(sum, [&](float &value, int row, int) { value *= gate[band + row].to_end; });
        add_dots(end_dots, sum, k, band, column);
        last += end_dots[0] + end_dots[1];
#pragma unroll (T_IS_F32 ? 1 : 8)
        for (int i = 0; i < CHUNK; i += 16) {
            if (i < band) continue;
            multiply<ROWS>(sum, Left::load_transposed(d_scores, band, i), q, column, i);
            multiply<ROWS>(sum, Left::load_transposed(d_inverse, band, i), k, column, i);
        }
        add_to_total();
        add_dots(dots, sum, k, band, column);

        for (int i = 0; i < 2; ++i) total_dots[i] += row_dots[i] + dots[i], dots[i] = row_dots[i] - dots[i];
        share_dots(of_keys, dots, band, side);
        share_dots(of_beta, row_dots, band, side);
        last = warp_sum(last);
        if (lane() == 0) of_last[warp] = last;
        __syncthreads();
        if (warp == 0) write_gates(head, gate);
    }
    __syncthreads();
    write_total(k, 1.0f, key_heads);
}
