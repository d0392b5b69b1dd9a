// Small products of adapters in passes over the values that they read: sums over tokens, valuesᵀ low, which are gradients of adapters, and
// sums over columns, values b, which are their low-rank values. As GEMMs each of them reads all values for a handful of columns, which is what
// it takes its time for. A kernel says what it loads and makes of it (`walk`); what it makes is multiplied while it is in registers.
//
// A block owns columns and walks over tokens, sixteen at a time; what it loads comes through shared memory, several tiles under way at once. A
// thread has eight neighbors of two rows, eight rows apart: four threads hold 32 columns, eight groups of four the tokens of a tile. That is
// a left operand of the matrix units with columns in another order, which a sum over columns allows; for sums over tokens, which stay in
// registers until the end, the same registers are transposed in eights. Warps add up their sums over columns; what blocks have of both
// goes to memory as parts, which `add_over_columns` and `add_over_tokens` add in a fixed order: results do not depend on scheduling.
//
// Macros of the host: RANKS, a multiple of 16, the most that an adapter here has; fewer are filled up with zeros. STAGES, 2 or 3: tiles under
// way, as many as fit the shared memory of a block. Compiled after matrix_units.cu.
// Trade-off: parts of sums over columns are 4 * RANKS bytes per token for every block of columns, and more ranks are cheaper as products of
// their own.

constexpr int WARPS = 8;
constexpr int TOKENS = 16;  // of a tile
constexpr int VALUES = 8;   // of a thread, neighbors in a row
constexpr int COLUMNS = 32; // of a warp's piece
typedef Pack<T, VALUES> Values;

// A matrix that an adapter multiplies values with, and its gradient, which sums them. Matrices are [width, rank] or [rank, width], by strides.
struct Adapter {
    const T *low; // [n, rank], for sums over tokens
    const T *b;   // [width, rank], for sums over columns
    float *gradient;
    long long low_stride, b_column, b_rank, gradient_column, gradient_rank; // from one row of low, column or rank to the next
    int first_column, width, first_rank, rank, first_chunk;
    float scale; // of the gradient
};

struct Adapters {
    Adapter of[4];
    int count, chunks; // blocks along the columns of all
    int columns, tokens_per_block; // columns of one part of the sums over tokens, tokens of a part
};

// Rows that a kernel loads, from the first column of the adapter.
struct Rows {
    const T *first;
    long long stride;
};

// What `walk` gets: inputs, pieces of columns per warp, and how many of the made values are summed over tokens and over columns.
template <int INPUTS_, int PIECES_, int OVER_TOKENS_, int OVER_COLUMNS_> struct Walk {
    static constexpr int INPUTS = INPUTS_, PIECES = PIECES_, OVER_TOKENS = OVER_TOKENS_, OVER_COLUMNS = OVER_COLUMNS_;
    static constexpr int MADE = OVER_TOKENS > OVER_COLUMNS ? OVER_TOKENS : OVER_COLUMNS;
    static constexpr int LOW_PITCH = OVER_TOKENS * RANKS + 8; // values; eight rows of one chunk hit all banks
    static constexpr int LOW_COPIES = TOKENS * OVER_TOKENS * RANKS / 8;
    static constexpr int STAGE = INPUTS * PIECES * 2 * 32 * WARPS * VALUES + TOKENS * LOW_PITCH; // values
    static constexpr int SUMS = WARPS * TOKENS * OVER_COLUMNS * RANKS;                            // floats, twice
};

// s B of a thread's columns, as the right operand of a sum over columns.
DEVICE void load_b(Word (&b)[VALUES / 4][RANKS / 8][2], const Adapter &adapter, int column, int lane) {
#pragma unroll
    for (int s = 0; s < VALUES / 4; ++s)
#pragma unroll
        for (int r = 0; r < RANKS / 8; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = column + 4 * s + 2 * half, rank = r * 8 + lane / 4;
                const T *from = adapter.b + at * adapter.b_column + rank * adapter.b_rank;
                const bool inside = at < adapter.width && rank < adapter.rank;
                const unsigned low_bits = inside ? from[0].bits : 0u, high_bits = inside ? from[adapter.b_column].bits : 0u;
                b[s][r][half] = low_bits | high_bits << 16;
            }
}

// The tokens of this block are blockIdx.y's part, its columns are `chunk`, counted from the adapters' first. `make(in, out, row, column, inside)`
// turns the inputs of a thread, VALUES each, into MADE packs, and stores what is to be stored; `inside` is false past the rows or columns.
// Widths are multiples of 8, rows of inputs and of low begin on 16 bytes. Launch: block 32 * WARPS, dynamic shared memory
// STAGES * STAGE * 2 + 2 * SUMS * 4 bytes; low_parts [chunks, n, RANKS], parts [gridDim.y, RANKS, columns].
template <class W, class Make>
DEVICE void walk(const Rows (&inputs)[W::INPUTS], const Adapter *adapters, int chunk, const Adapters &all,
                 float *low_parts, float *parts, int n, Make make) {
    extern __shared__ uint4 shared_memory[];
    static_assert(W::LOW_COPIES <= 32 * WARPS, "each thread copies one piece of low at most");
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = adapters[0].width;
    const int own = (chunk * WARPS + warp) * W::PIECES * COLUMNS + lane % 4 * VALUES; // first column of this thread
    const int first = blockIdx.y * all.tokens_per_block, end = min(n, first + all.tokens_per_block);
    const int tiles = max(0, (end - first + TOKENS - 1) / TOKENS);
    T *stages = reinterpret_cast<T *>(shared_memory);
    float *sums = reinterpret_cast<float *>(stages + STAGES * W::STAGE);
    auto place = [&](int input, int piece, int half) {
        return (((input * W::PIECES + piece) * 2 + half) * 32 * WARPS + threadIdx.x) * VALUES;
    };

    const int low_chunks = W::OVER_TOKENS > 0 ? W::OVER_TOKENS * RANKS / 8 : 1;
    const int low_row = threadIdx.x / low_chunks, low_chunk = threadIdx.x % low_chunks;
    const Adapter &low_of = adapters[low_chunk / (RANKS / 8)];
    const int low_rank = low_chunk % (RANKS / 8) * 8;
    auto fetch = [&](int tile) {
        if (tile < tiles) {
            T *stage = stages + tile % STAGES * W::STAGE;
            const int token = first + tile * TOKENS;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int piece = 0; piece < W::PIECES; ++piece) {
                    const long long row = token + lane / 4 + half * 8;
                    const int column = own + piece * COLUMNS;
                    const bool inside = row < end && column < width;
#pragma unroll
                    for (int m = 0; m < W::INPUTS; ++m) {
                        const T *from = inside ? inputs[m].first + row * inputs[m].stride + column : inputs[m].first;
                        copy_16(shared_address(stage + place(m, piece, half)), from, inside);
                    }
                }
            if (threadIdx.x < W::LOW_COPIES) {
                const bool inside = token + low_row < end && low_rank < low_of.rank;
                const T *from = inside ? low_of.low + (token + low_row) * low_of.low_stride + low_rank : low_of.low;
                T *to = stage + W::STAGE - TOKENS * W::LOW_PITCH + low_row * W::LOW_PITCH + low_chunk * 8;
                copy_16(shared_address(to), from, inside);
            }
        }
        copies_issued();
    };
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) fetch(tile);

    constexpr int BS = W::OVER_COLUMNS > 0 ? W::OVER_COLUMNS : 1, TS = W::OVER_TOKENS > 0 ? W::OVER_TOKENS : 1;
    Word b[BS][W::PIECES][VALUES / 4][RANKS / 8][2];
#pragma unroll
    for (int m = 0; m < W::OVER_COLUMNS; ++m)
#pragma unroll
        for (int piece = 0; piece < W::PIECES; ++piece) load_b(b[m][piece], adapters[m], own + piece * COLUMNS, lane);
    float over_tokens[TS][W::PIECES][VALUES / 2][RANKS / 16][4] = {};
    wait_for_all_but<STAGES - 2>();
    __syncthreads();

    for (int tile = 0; tile < tiles; ++tile) {
        fetch(tile + STAGES - 1);
        const T *stage = stages + tile % STAGES * W::STAGE, *low = stage + W::STAGE - TOKENS * W::LOW_PITCH;
        const int token = first + tile * TOKENS;
        float over_columns[BS][RANKS / 8][4] = {};
#pragma unroll
        for (int piece = 0; piece < W::PIECES; ++piece) {
            Values made[W::MADE][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                Values in[W::INPUTS], out[W::MADE];
#pragma unroll
                for (int m = 0; m < W::INPUTS; ++m) in[m] = Values::load(stage + place(m, piece, half));
                const long long row = token + lane / 4 + half * 8;
                const int column = own + piece * COLUMNS;
                make(in, out, row, column, row < end && column < width);
#pragma unroll
                for (int m = 0; m < W::MADE; ++m) made[m][half] = out[m];
            }
#pragma unroll
            for (int m = 0; m < W::OVER_TOKENS; ++m) {
                // Sixteen ranks of the tokens as the left operand, and eight columns as the right one.
                Word ranks[RANKS / 16][4];
#pragma unroll
                for (int r = 0; r < RANKS / 16; ++r)
                    load_matrices_transposed(ranks[r], shared_address(low + (lane % 8 + lane / 16 * 8) * W::LOW_PITCH +
                                                                      m * RANKS + r * 16 + lane / 8 % 2 * 8));
#pragma unroll
                for (int j = 0; j < VALUES / 2; ++j) {
                    const Word top = transposed(made[m][0].word[j]), bottom = transposed(made[m][1].word[j]);
#pragma unroll
                    for (int r = 0; r < RANKS / 16; ++r) multiply_add(over_tokens[m][piece][j][r], ranks[r], top, bottom);
                }
            }
#pragma unroll
            for (int m = 0; m < W::OVER_COLUMNS; ++m)
#pragma unroll
                for (int s = 0; s < VALUES / 4; ++s) {
                    const Word rows[4] = {made[m][0].word[2 * s], made[m][1].word[2 * s], made[m][0].word[2 * s + 1],
                                          made[m][1].word[2 * s + 1]};
#pragma unroll
                    for (int r = 0; r < RANKS / 8; ++r)
                        multiply_add(over_columns[m][r], rows, b[m][piece][s][r][0], b[m][piece][s][r][1]);
                }
        }
        float *of_block = sums + tile % 2 * W::SUMS;
#pragma unroll
        for (int m = 0; m < W::OVER_COLUMNS; ++m)
#pragma unroll
            for (int r = 0; r < RANKS / 8; ++r)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    *reinterpret_cast<float2 *>(of_block + ((m * WARPS + warp) * TOKENS + lane / 4 + half * 8) * RANKS + r * 8 +
                                                lane % 4 * 2) =
                        make_float2(over_columns[m][r][half * 2], over_columns[m][r][half * 2 + 1]);
        // Low of the next tile is there, and the other half of `sums` is free again once all warps have come here twice.
        wait_for_all_but<STAGES - 2>();
        __syncthreads();
#pragma unroll
        for (int m = 0; m < W::OVER_COLUMNS; ++m)
            for (int at = threadIdx.x; at < TOKENS * RANKS; at += 32 * WARPS) {
                float sum = 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) sum += of_block[(m * WARPS + w) * TOKENS * RANKS + at];
                if (token + at / RANKS < end)
                    low_parts[((adapters[m].first_chunk + chunk) * static_cast<long long>(n) + token) * RANKS + at] = sum;
            }
    }

#pragma unroll
    for (int m = 0; m < W::OVER_TOKENS; ++m) {
        float *of_part = parts + static_cast<long long>(blockIdx.y) * RANKS * all.columns + adapters[m].first_column;
#pragma unroll
        for (int piece = 0; piece < W::PIECES; ++piece)
#pragma unroll
            for (int r = 0; r < RANKS / 16; ++r)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int j = 0; j < VALUES / 2; j += 2) {
                        const int column = own + piece * COLUMNS, rank = r * 16 + half * 8 + lane / 4;
                        const float *low_pair = &over_tokens[m][piece][j][r][half * 2], *high_pair = &over_tokens[m][piece][j + 1][r][half * 2];
                        if (column < width)
                            *reinterpret_cast<float4 *>(of_part + static_cast<long long>(rank) * all.columns + column + 2 * j) =
                                make_float4(low_pair[0], low_pair[1], high_pair[0], high_pair[1]);
                    }
    }
}

// Sums over columns, [n, ranks of the adapters] at a row stride. Launch: block 256, grid ceil(n * RANKS / 256), adapters.
KERNEL __launch_bounds__(256)
add_over_columns(T *low, long long stride, const float *low_parts, Adapters adapters, int n) {
    const long long at = blockIdx.x * 256ll + threadIdx.x, each = static_cast<long long>(n) * RANKS;
    const Adapter &adapter = adapters.of[blockIdx.y];
    const int r = static_cast<int>(at % RANKS);
    if (at >= each || r >= adapter.rank) return;
    const int end = blockIdx.y + 1 < adapters.count ? adapters.of[blockIdx.y + 1].first_chunk : adapters.chunks;
    float sum = 0.0f;
#pragma unroll 4
    for (int chunk = adapter.first_chunk; chunk < end; ++chunk) sum += low_parts[chunk * each + at];
    low[at / RANKS * stride + adapter.first_rank + r] = from_float<T>(sum);
}

// Gradients of the adapters from the sums over tokens, added to what they are where tokens come in several rounds. Launch: block 256, grid
// (ceil(widest / 256), RANKS, adapters).
KERNEL __launch_bounds__(256) add_over_tokens(const float *parts, Adapters adapters, int count, int is_continued) {
    const Adapter &adapter = adapters.of[blockIdx.z];
    const int column = blockIdx.x * 256 + threadIdx.x, rank = blockIdx.y;
    if (column >= adapter.width || rank >= adapter.rank) return;
    parts += static_cast<long long>(rank) * adapters.columns + adapter.first_column + column;
    float sum = 0.0f;
#pragma unroll 8
    for (int part = 0; part < count; ++part) sum += parts[part * static_cast<long long>(RANKS) * adapters.columns];
    float *gradient = adapter.gradient + column * adapter.gradient_column + rank * adapter.gradient_rank;
    *gradient = sum * adapter.scale + (is_continued ? *gradient : 0.0f);
}
