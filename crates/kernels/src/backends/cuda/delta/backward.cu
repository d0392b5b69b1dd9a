// The gated delta rule, backward, from the inputs, the states at the starts of chunks and d_o: the scan, and what pairs of tokens have
// in common. Compiled after tiles.cu; delta_chunks runs before, and delta_inputs_backward after.
//
// With dv = beta inverseᵀ d_corrections, and the state S0 at the start of a chunk and the gradient dS1 of the state at its end:
//     d_corrections = scoresᵀ d_o + e^(G_last - G) k dS1;    dS0 = e^G_last dS1 + qᵀ e^G d_o - kᵀ e^G dv
//     of_scores = lower(d_o correctionsᵀ) D;    of_inverse = -strictly_lower(dv correctionsᵀ) D
//     dq = e^G d_o S0ᵀ + of_scores k;    dk = rows + columns
//     rows = of_inverse k - e^G dv S0ᵀ;    columns = of_scoresᵀ q + of_inverseᵀ k + e^(G_last - G) corrections dS1ᵀ
//     db = (1 - beta) (k rows + v dv);    dG = q dq + k rows - k columns (dots of equal rows)
//     dG_last += Σ k (e^(G_last - G) corrections dS1ᵀ) + e^G_last Σ dS1 S0;    dg = sum of dG from the token to the end
// Each sum has one place and a fixed order: no atomics, the same bits every time.

// d_states [chunks, value_heads, VALUE_DIM, KEY_DIM], the gradients of the states at the ends of chunks; dv [n, value_heads, VALUE_DIM] at
// a stride, columns of d_qkv. From what delta_chunks writes, and d_o [n, value_heads, VALUE_DIM] at a stride. d_start and d_end, or null:
// the gradients of the state before the first document and after the last, [value_heads, KEY_DIM, VALUE_DIM] f32.
//
// Launch: grid SLICES * value_heads * documents, block 2 SLICE, dynamic shared bytes 2 p(KEY_DIM) + 2 p(64) + p(SLICE) + 1024. For 128
// of a 16-bit type and SLICE 64: SLICES 2; 63488 bytes.
KERNEL __launch_bounds__(SCAN_THREADS, LEAST_BLOCKS)
delta_scan_backward(T *d_states, T *dv, long long dv_stride, const T *q_hat, const T *k_hat, const Gate *gates, const T *inverse,
                    const T *scores, const T *d_o, long long d_o_stride, float *d_start, const float *d_end, const int *chunks,
                    const int *documents, int n, int key_heads, int value_heads) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    const Sequence scan(chunks, documents, key_heads, value_heads);
    const int head = scan.head, first_column = head * VALUE_DIM + scan.slice, keys_stride = key_heads * KEY_DIM;
    Shared shared = {shared_memory};
    const Tile<KEY_DIM> q = shared.tile<KEY_DIM>(), k = shared.tile<KEY_DIM>();
    const Tile<CHUNK> inverted = shared.tile<CHUNK>(), score = shared.tile<CHUNK>();
    const Tile<SLICE> d_out = shared.tile<SLICE>();
    Gate *const gate = shared.values<Gate>(CHUNK);
    const auto copy = [&](int index) {
        if (index < scan.first_chunk) return;
        const Chunk chunk = scan.chunk(index);
        const Long matrix = chunk.matrix(value_heads, head, CHUNK * CHUNK);
        copy_rows<SCAN_THREADS, CHUNK>(k, k_hat + chunk.row(keys_stride) + scan.key_head * KEY_DIM, keys_stride, chunk.tokens);
        copy_rows<SCAN_THREADS, CHUNK>(inverted, inverse + matrix, CHUNK, CHUNK);
        copy_rows<SCAN_THREADS, CHUNK>(score, scores + matrix, CHUNK, CHUNK);
        copy_rows<SCAN_THREADS, CHUNK>(d_out, d_o + chunk.row(d_o_stride) + first_column, d_o_stride, chunk.tokens);
        copy_gates<SCAN_THREADS>(gate, gates + static_cast<Long>(head) * n + chunk.first, chunk.tokens);
        copies_issued();
    };

    float state[KEY_TILES][4];   // the gradient of the state, transposed like the state
    clear(state);
    if (d_end && scan.is_last) for_each(state, [&](float &sum, int column, int key) { sum = d_end[scan.carried(column, key)]; });
    copy(scan.end_chunk - 1);
    for (int index = scan.end_chunk - 1; index >= scan.first_chunk; --index) {
        const Chunk chunk = scan.chunk(index);
        wait_for_copies();
        __syncthreads();
        // It leaves through the tile that the queries are to arrive in.
        store_through(q, d_states + chunk.matrix(value_heads, head, VALUE_DIM * KEY_DIM) + scan.slice * KEY_DIM, KEY_DIM, state,
                      scan.own, CHUNK);
        __syncthreads();
        copy_rows<SCAN_THREADS, CHUNK>(q, q_hat + chunk.row(keys_stride) + scan.key_head * KEY_DIM, keys_stride, chunk.tokens);
        copies_issued();

        // Transposed: a row is a column of v, and a column is a token.
        float d_corrected[CHUNK_TILES][4], d_value[CHUNK_TILES][4];
        clear(d_corrected), clear(d_value);
        multiply_sums<COLUMNS_OF>(d_corrected, state, k);
        for_each(d_corrected, [&](float &sum, int, int token) { sum *= gate[token].to_end; });
#pragma unroll
        for (int i = 0; i < CHUNK; i += 16)
            multiply<ROWS>(d_corrected, Left::load_transposed(d_out, scan.own, i), score, 0, i, 0, i / 8 + 2);
#pragma unroll
        for (int i = 0; i < CHUNK_TILES; i += 2)
            multiply<ROWS>(d_value, Left::of(d_corrected[i], d_corrected[i + 1]), inverted, 0, i * 8, 0, i + 2);
        for_each(d_value, [&](float &sum, int, int token) { sum *= gate[token].beta; });
        Left d_read[CHUNK / 16];   // e^G d_o
#pragma unroll
        for (int i = 0; i < CHUNK; i += 16) {
            float part[2][4];
            for_each(part, [&](float &sum, int column, int token) {
                sum = gate[i + token].from_start * to_float(*d_out.at(i + token, scan.own + column));
            });
            d_read[i / 16] = Left::of(part[0], part[1]);
        }
        store_transposed(d_out, scan.own, dv + chunk.row(dv_stride) + first_column, dv_stride, d_value, chunk.tokens);

        for_each(state, [&](float &sum, int, int) { sum *= gate[chunk.tokens - 1].from_start; });
        for_each(d_value, [&](float &sum, int, int token) { sum *= -gate[token].from_start; });
        multiply_sums<ROWS>(state, d_value, k);
        wait_for_copies();
        __syncthreads();
        copy(index - 1);
#pragma unroll
        for (int i = 0; i < CHUNK; i += 16) multiply<ROWS>(state, d_read[i / 16], q, 0, i);
    }
    if (d_start && scan.is_first) for_each(state, [&](float sum, int column, int key) { d_start[scan.carried(column, key)] = sum; });
}

// corrections [n, value_heads, VALUE_DIM] once more; of_scores in the place of scores and of_inverse in that of inverse; value_dots
// [value_heads, n] f32, of rows of v and dv. v and dv are columns of qkv and d_qkv, at their strides.
//
// Launch: grid value_heads * chunks, block 128, dynamic shared bytes p(KEY_DIM) (1 + SLICE / 64) + p(64) + 3 p(SLICE) + 1024. For 128
// of a 16-bit type and SLICE 64: 72704 bytes.
KERNEL __launch_bounds__(THREADS, LEAST_BLOCKS)
delta_pairs_backward(T *corrections, T *scores, T *inverse, float *value_dots, const T *k_hat, const Gate *gates,
                     const T *states, const T *v, long long v_stride, const T *dv, long long dv_stride, const T *d_o, long long d_o_stride,
                     const int *chunks, int n, int key_heads, int value_heads) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    const int head = blockIdx.x % value_heads, key_head = head / (value_heads / key_heads);
    const Chunk chunk = chunk_of(chunks, blockIdx.x / value_heads);
    const int band = threadIdx.x / 32 * 16;
    Shared shared = {shared_memory};
    const Tile<KEY_DIM> k = shared.tile<KEY_DIM>(), state = shared.tile<KEY_DIM>(SLICE);
    const Tile<CHUNK> inverted = shared.tile<CHUNK>();
    const Tile<SLICE> value = shared.tile<SLICE>(), d_value = shared.tile<SLICE>(), d_out = shared.tile<SLICE>();
    Gate *const gate = shared.values<Gate>(CHUNK);

    const Long matrix = chunk.matrix(value_heads, head, CHUNK * CHUNK);
    const int keys_stride = key_heads * KEY_DIM, stride = value_heads * VALUE_DIM;
    copy_rows<THREADS, CHUNK>(k, k_hat + chunk.row(keys_stride) + key_head * KEY_DIM, keys_stride, chunk.tokens);
    copy_rows<THREADS, CHUNK>(inverted, inverse + matrix, CHUNK, CHUNK);
    copy_gates<THREADS>(gate, gates + static_cast<Long>(head) * n + chunk.first, chunk.tokens);

    float of_scores[CHUNK_TILES][4], of_inverse[CHUNK_TILES][4], dots[2] = {0.0f, 0.0f};
    clear(of_scores), clear(of_inverse);
    for (int slice = 0; slice < VALUE_DIM; slice += SLICE) {
        const int column = head * VALUE_DIM + slice;
        const T *const from = states + chunk.matrix(value_heads, head, VALUE_DIM * KEY_DIM) + slice * KEY_DIM;
        copy_rows<THREADS, SLICE>(state, from, KEY_DIM, SLICE);
        copy_rows<THREADS, CHUNK>(value, v + chunk.row(v_stride) + column, v_stride, chunk.tokens);
        copy_rows<THREADS, CHUNK>(d_value, dv + chunk.row(dv_stride) + column, dv_stride, chunk.tokens);
        copy_rows<THREADS, CHUNK>(d_out, d_o + chunk.row(d_o_stride) + column, d_o_stride, chunk.tokens);
        copies_issued();
        wait_for_copies();
        __syncthreads();

        float error[SLICE_TILES][4], corrected[SLICE_TILES][4];
        clear(error), clear(corrected);
        multiply_tiles<COLUMNS_OF, KEY_DIM>(error, k, band, state);
#pragma unroll
        for (int i = 0; i < SLICE_TILES * 4; i += 2) {
            const int row = band + row_of(i % 4), at = i / 4 * 8 + column_of(i);
            const float2 v_pair = load_pair(value.at(row, at)), dv_pair = load_pair(d_value.at(row, at));
            dots[i % 4 / 2] += v_pair.x * dv_pair.x + v_pair.y * dv_pair.y;
            const float beta = gate[row].beta, from_start = gate[row].from_start;
            store_pair(value.at(row, at), beta * (v_pair.x - from_start * error[i / 4][i % 4]),
                       beta * (v_pair.y - from_start * error[i / 4][i % 4 + 1]));
        }
        __syncthreads();
        multiply_tiles<ROWS, CHUNK>(corrected, inverted, band, value, 0, band + 16);
        __syncthreads();
        store_through(value, corrections + chunk.row(stride) + column, stride, corrected, band, chunk.tokens);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SLICE; i += 16) {
            multiply<COLUMNS_OF>(of_scores, Left::load(d_out, band, i), value, 0, i, 0, band / 8 + 2);
            multiply<COLUMNS_OF>(of_inverse, Left::load(d_value, band, i), value, 0, i, 0, band / 8 + 2);
        }
        __syncthreads();
    }
    for_each(of_scores, [&](float &sum, int row, int column) { sum *= decay_between(gate, band + row, column); });
    for_each(of_inverse, [&](float &sum, int row, int column) {
        sum *= band + row == column ? 0.0f : -decay_between(gate, band + row, column);
    });
    store_through(inverted, scores + matrix, CHUNK, of_scores, band, CHUNK);
    store_through(inverted, inverse + matrix, CHUNK, of_inverse, band, CHUNK);
    for (int i = 0; i < 2; ++i) {
        const int row = band + row_of(2 * i);
        const float sum = sum_of_four(dots[i]);
        if (lane() % 4 == 0 && row < chunk.tokens) value_dots[static_cast<Long>(head) * n + chunk.first + row] = sum;
    }
}
