// The gated delta rule, forward: the scan over the states of a document's chunks, and what the chunks' tokens read. Compiled after
// tiles.cu; delta_chunks runs first.
//
// A warp of the scan owns 16 columns of v: the state's 16 rows of [value dim, key dim] stay in its registers, as sums and, rounded,
// as left factors. Per chunk and 128 columns the scan reads k, the inverse and v, and writes the state and the corrections.

// What the scan has in shared memory of a chunk.
struct Stage {
    Tile<KEY_DIM> k;
    Tile<CHUNK> inverse;
    Tile<SLICE> v;
    Gate *gates;
};

// states [chunks, value_heads, VALUE_DIM, KEY_DIM], at the starts of chunks; corrections [n, value_heads, VALUE_DIM]. v is qkv's first
// column of values, at qkv's stride; the others are those of delta_chunks. start and end, or null: the state before the first document
// and after the last, [value_heads, KEY_DIM, VALUE_DIM] f32.
//
// Launch: grid SLICES * value_heads * documents, block 2 SLICE, dynamic shared bytes 2 (p(KEY_DIM) + p(64) + p(SLICE) + 1024). For
// 128 of a 16-bit type and SLICE 64: SLICES 2; 73728 bytes.
KERNEL __launch_bounds__(SCAN_THREADS, LEAST_BLOCKS)
delta_scan(T *states, T *corrections, const T *k_hat, const Gate *gates, const T *inverse, const T *v, long long v_stride,
           const float *start, float *end, const int *chunks, const int *documents, int n, int key_heads, int value_heads) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    const Sequence scan(chunks, documents, key_heads, value_heads);
    const int head = scan.head, stride = value_heads * VALUE_DIM, keys_stride = key_heads * KEY_DIM;
    const auto stage_of = [&](int index) {
        constexpr int ROW = Tile<KEY_DIM>::PITCH + Tile<CHUNK>::PITCH + Tile<SLICE>::PITCH;
        Shared at = {shared_memory + index % 2 * CHUNK * (ROW * sizeof(T) + sizeof(Gate))};
        return Stage{at.tile<KEY_DIM>(), at.tile<CHUNK>(), at.tile<SLICE>(), at.values<Gate>(CHUNK)};
    };
    const auto copy = [&](int index) {
        if (index >= scan.end_chunk) return;
        const Chunk chunk = scan.chunk(index);
        const Stage to = stage_of(index);
        copy_rows<SCAN_THREADS, CHUNK>(to.k, k_hat + chunk.row(keys_stride) + scan.key_head * KEY_DIM, keys_stride, chunk.tokens);
        copy_rows<SCAN_THREADS, CHUNK>(to.inverse, inverse + chunk.matrix(value_heads, head, CHUNK * CHUNK), CHUNK, CHUNK);
        copy_rows<SCAN_THREADS, CHUNK>(to.v, v + chunk.row(v_stride) + head * VALUE_DIM + scan.slice, v_stride, chunk.tokens);
        copy_gates<SCAN_THREADS>(to.gates, gates + static_cast<Long>(head) * n + chunk.first, chunk.tokens);
        copies_issued();
    };

    float state[KEY_TILES][4];
    clear(state);
    if (start && scan.is_first) for_each(state, [&](float &sum, int column, int key) { sum = start[scan.carried(column, key)]; });
    copy(scan.first_chunk);
    for (int index = scan.first_chunk; index < scan.end_chunk; ++index) {
        const Chunk chunk = scan.chunk(index);
        const Stage in = stage_of(index);
        wait_for_copies();
        __syncthreads();
        // The state leaves through the tile that the next keys are to arrive in.
        store_through(stage_of(index + 1).k,
                      states + chunk.matrix(value_heads, head, VALUE_DIM * KEY_DIM) + scan.slice * KEY_DIM, KEY_DIM, state,
                      scan.own, CHUNK);
        __syncthreads();
        copy(index + 1);

        // Transposed: a row is a column of v, and a column is a token.
        float error[CHUNK_TILES][4], corrected[CHUNK_TILES][4];
        clear(error), clear(corrected);
        multiply_sums<COLUMNS_OF>(error, state, in.k);
        for_each(error, [&](float &sum, int column, int token) {
            const Gate gate = in.gates[token];
            sum = gate.beta * (to_float(*in.v.at(token, scan.own + column)) - gate.from_start * sum);
        });
#pragma unroll
        for (int k = 0; k < CHUNK_TILES; k += 2)
            multiply<COLUMNS_OF>(corrected, Left::of(error[k], error[k + 1]), in.inverse, 0, k * 8, k);
        store_transposed(in.v, scan.own, corrections + chunk.row(stride) + head * VALUE_DIM + scan.slice, stride, corrected,
                         chunk.tokens);

        for_each(corrected, [&](float &sum, int, int token) { sum *= in.gates[token].to_end; });
        for_each(state, [&](float &sum, int, int) { sum *= in.gates[chunk.tokens - 1].from_start; });
        multiply_sums<ROWS>(state, corrected, in.k);
    }
    if (end && scan.is_last) for_each(state, [&](float sum, int column, int key) { end[scan.carried(column, key)] = sum; });
}

// o [n, value_heads, VALUE_DIM].
//
// Launch: grid SLICES * value_heads * chunks, block 128, dynamic shared bytes p(KEY_DIM) (1 + SLICE / 64) + p(64) + p(SLICE) + 1024.
// For 128 of a 16-bit type and SLICE 64: 54272 bytes.
KERNEL __launch_bounds__(THREADS)
delta_output(T *o, const T *q_hat, const Gate *gates, const T *scores, const T *states, const T *corrections,
             const int *chunks, int n, int key_heads, int value_heads) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    const int slice = blockIdx.x % SLICES, head = blockIdx.x / SLICES % value_heads;
    const Chunk chunk = chunk_of(chunks, blockIdx.x / SLICES / value_heads);
    const int key_head = head / (value_heads / key_heads), band = threadIdx.x / 32 * 16;
    Shared shared = {shared_memory};
    const Tile<KEY_DIM> q = shared.tile<KEY_DIM>(), state = shared.tile<KEY_DIM>(SLICE);
    const Tile<CHUNK> score = shared.tile<CHUNK>();
    const Tile<SLICE> corrected = shared.tile<SLICE>();
    Gate *const gate = shared.values<Gate>(CHUNK);

    const int keys_stride = key_heads * KEY_DIM, stride = value_heads * VALUE_DIM;
    const Long values = chunk.row(stride) + head * VALUE_DIM + slice * SLICE;
    copy_rows<THREADS, CHUNK>(q, q_hat + chunk.row(keys_stride) + key_head * KEY_DIM, keys_stride, chunk.tokens);
    const T *const from = states + chunk.matrix(value_heads, head, VALUE_DIM * KEY_DIM) + slice * SLICE * KEY_DIM;
    copy_rows<THREADS, SLICE>(state, from, KEY_DIM, SLICE);
    copy_rows<THREADS, CHUNK>(score, scores + chunk.matrix(value_heads, head, CHUNK * CHUNK), CHUNK, CHUNK);
    copy_rows<THREADS, CHUNK>(corrected, corrections + values, stride, chunk.tokens);
    copy_gates<THREADS>(gate, gates + static_cast<Long>(head) * n + chunk.first, chunk.tokens);
    copies_issued();
    wait_for_copies();
    __syncthreads();

    float sum[SLICE_TILES][4];
    clear(sum);
    multiply_tiles<COLUMNS_OF, KEY_DIM>(sum, q, band, state);
    for_each(sum, [&](float &value, int row, int) { value *= gate[band + row].from_start; });
    multiply_tiles<ROWS, CHUNK>(sum, score, band, corrected, 0, band + 16);
    __syncthreads();
    store_through(corrected, o + values, stride, sum, band, chunk.tokens);
}
