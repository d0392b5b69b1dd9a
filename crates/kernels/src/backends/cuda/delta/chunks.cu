// The gated delta rule: what the chunks need before their states are known. Forward and backward begin with it. Compiled after
// tiles.cu.
//
// The inverse is found in f32 by substitution, each column in the registers of a lane: stable where keys are alike, and without a
// barrier.

static constexpr int LOWER_PITCH = CHUNK + 4;
static constexpr float EPSILON = 1e-6f;

// Scales row `row` to length `length`, in place; returns 1 / its old length.
DEVICE float normalize(Tile<KEY_DIM> tile, int row, float length) {
    constexpr int EACH = 16 / sizeof(T);
    float sum = 0.0f, value[EACH];
    for (int i = 0; i < KEY_DIM; i += EACH) {
        Pack<T, EACH>::load(tile.at(row, i)).unpack(value);
        for (int j = 0; j < EACH; ++j) sum += value[j] * value[j];
    }
    const float inverse = 1.0f / sqrtf(sum + EPSILON);
    for (int i = 0; i < KEY_DIM; i += EACH) {
        Pack<T, EACH>::load(tile.at(row, i)).unpack(value);
        for (int j = 0; j < EACH; ++j) value[j] *= inverse * length;
        Pack<T, EACH>::pack(value).store(tile.at(row, i));
    }
    return inverse;
}

// Writes one column of (1 + lower)^-1, which is zero above row FIRST. lower[k * LOWER_PITCH + i] is row i and column k.
template <int FIRST> DEVICE void invert_column(T *inverse, const float *lower, int column) {
    float x[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int k = FIRST; k < CHUNK - 1; ++k)
#pragma unroll
        for (int i = (k + 1) / 4 * 4; i < CHUNK; i += 4) {
            const float4 part = *reinterpret_cast<const float4 *>(lower + k * LOWER_PITCH + i);
            if (i > k) x[i] -= part.x * x[k];
            if (i + 1 > k) x[i + 1] -= part.y * x[k];
            if (i + 2 > k) x[i + 2] -= part.z * x[k];
            x[i + 3] -= part.w * x[k];
        }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) inverse[i * CHUNK + column] = from_float<T>(x[i]);
}

// q_hat and k_hat [n, key_heads, KEY_DIM], of length KEY_DIM^-0.5 and 1; inverse_lengths [2, key_heads, n] f32, of q and of k; gates
// [value_heads, n, 4] f32; inverse and scores [chunks, value_heads, 64, 64]. From qkv [n, 2 * key_heads * KEY_DIM + value_heads *
// VALUE_DIM], a and b [n, value_heads], each at a stride; a_log and dt_bias [value_heads] f32.
//
// Launch: grid chunks * key_heads, block 128, dynamic shared bytes max(2 p(KEY_DIM), 34816) + 2048.
KERNEL __launch_bounds__(THREADS, LEAST_BLOCKS)
delta_chunks(T *q_hat, T *k_hat, float *inverse_lengths, Gate *gates, T *inverse, T *scores, const T *qkv, long long qkv_stride,
             const T *a, long long a_stride, const T *b, long long b_stride, const float *a_log, const float *dt_bias, const int *chunks,
             int n, int key_heads, int value_heads) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    const int key_head = blockIdx.x % key_heads, group = value_heads / key_heads;
    const Chunk chunk = chunk_of(chunks, blockIdx.x / key_heads);
    const int warp = threadIdx.x / 32, band = warp * 16;
    Shared shared = {shared_memory};
    Gate *const of_pair = shared.values<Gate>(2 * CHUNK);
    // The matrices to invert take the place of q and k, which are in registers and in global memory by then.
    float *const lower = reinterpret_cast<float *>(shared.next);
    const Tile<KEY_DIM> q = shared.tile<KEY_DIM>(), k = shared.tile<KEY_DIM>();

    const T *const from = qkv + chunk.row(qkv_stride) + key_head * KEY_DIM;
    copy_rows<THREADS, CHUNK>(q, from, qkv_stride, chunk.tokens);
    copy_rows<THREADS, CHUNK>(k, from + key_heads * KEY_DIM, qkv_stride, chunk.tokens);
    copies_issued();
    wait_for_copies();
    __syncthreads();
    const int own_row = threadIdx.x % CHUNK, is_key = threadIdx.x / CHUNK;
    const float inverse_length = normalize(is_key ? k : q, own_row, is_key ? 1.0f : rsqrtf(KEY_DIM));
    if (own_row < chunk.tokens)
        inverse_lengths[static_cast<Long>(is_key * key_heads + key_head) * n + chunk.first + own_row] = inverse_length;
    __syncthreads();
    const Long stride = key_heads * KEY_DIM, keys = chunk.row(stride) + key_head * KEY_DIM;
    write_rows(q_hat + keys, stride, q, chunk.tokens, threadIdx.x, THREADS);
    write_rows(k_hat + keys, stride, k, chunk.tokens, threadIdx.x, THREADS);
    float of_queries[CHUNK_TILES][4], of_keys[CHUNK_TILES][4];
    clear(of_queries), clear(of_keys);
    multiply_tiles<COLUMNS_OF, KEY_DIM>(of_queries, q, band, k);
    multiply_tiles<COLUMNS_OF, KEY_DIM>(of_keys, k, band, k);

    // The gates of a head, by one warp; a lane has two tokens.
    const auto make_gates = [&](Gate *shared_gates, int head) {
        const int token = 2 * lane();
        const float rate = expf(a_log[head]);
        Gate gate[2] = {};
        for (int i = 0; i < 2; ++i) {
            const Long at = chunk.first + token + i;
            if (token + i >= chunk.tokens) continue;
            gate[i].sum = -rate * softplus(to_float(a[at * a_stride + head]) + dt_bias[head]);
            gate[i].beta = sigmoid(to_float(b[at * b_stride + head]));
        }
        const float through = running_sum<false>(gate[0].sum + gate[1].sum);
        const float before = __shfl_up_sync(0xffffffffu, through, 1), last = __shfl_sync(0xffffffffu, through, 31);
        gate[0].sum += lane() == 0 ? 0.0f : before, gate[1].sum = through;
        for (int i = 0; i < 2; ++i) {
            gate[i].from_start = expf(gate[i].sum), gate[i].to_end = expf(last - gate[i].sum);
            shared_gates[token + i] = gate[i];
            if (token + i < chunk.tokens) gates[static_cast<Long>(head) * n + chunk.first + token + i] = gate[i];
        }
    };

    for (int pair = 0; pair < group; pair += 2) {
        const int head0 = key_head * group + pair, heads = min(2, group - pair);
        if (warp < heads) make_gates(of_pair + warp * CHUNK, head0 + warp);
        __syncthreads();
        for (int i = 0; i < heads; ++i) {
            const Gate *const gate = of_pair + i * CHUNK;
            float score[CHUNK_TILES][4];
#pragma unroll
            for (int m = 0; m < CHUNK_TILES * 4; ++m) {
                const int row = band + row_of(m % 4), column = m / 4 * 8 + column_of(m);
                const float decay = decay_between(gate, row, column);
                score[m / 4][m % 4] = of_queries[m / 4][m % 4] * decay;
                lower[(i * CHUNK + column) * LOWER_PITCH + row] = gate[row].beta * of_keys[m / 4][m % 4] * decay;
            }
            store(scores + chunk.matrix(value_heads, head0 + i, CHUNK * CHUNK), CHUNK, score, band, CHUNK);
        }
        __syncthreads();
        if (warp / 2 < heads) {
            T *const to = inverse + chunk.matrix(value_heads, head0 + warp / 2, CHUNK * CHUNK);
            const float *const mine = lower + warp / 2 * CHUNK * LOWER_PITCH;
            if (warp % 2 == 0) invert_column<0>(to, mine, lane());
            else invert_column<CHUNK / 2>(to, mine, CHUNK / 2 + lane());
        }
    }
}

// The tables of chunks and documents, from the boundaries of documents.
//
// Launch: grid 1, block 256, no dynamic shared memory.
KERNEL __launch_bounds__(256) delta_tables(int *chunks, int *documents, const int *boundaries, int count, int all) {
    if (threadIdx.x == 0) {
        int chunk = 0;
        for (int document = 0; document < count; ++document) {
            documents[document] = chunk;
            chunk += (boundaries[document + 1] - boundaries[document] + CHUNK - 1) / CHUNK;
        }
        documents[count] = chunk;
        chunks[all] = boundaries[count];
    }
    __syncthreads();
    for (int document = threadIdx.x; document < count; document += 256) {
        const int first = documents[document], last = documents[document + 1];
        for (int chunk = first; chunk < last; ++chunk) chunks[chunk] = boundaries[document] + (chunk - first) * CHUNK;
    }
}
