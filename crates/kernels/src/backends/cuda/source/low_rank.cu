// One pass over a gradient of outputs for both products of its adapters: d_low = dy (s B), and dB = dyᵀ low.
//
// A warp owns COLUMNS columns of dy and walks over tokens, sixteen at a time. Its tiles come through shared memory, several under way at
// once, and are read twice there: as rows for d_low, a sum over columns, and transposed for dB, a sum over tokens, which
// stays in registers until the end. The warps of a block add up what they have of d_low; what blocks have of both goes to
// memory as parts, which `add_low_parts` and `add_b_parts` sum in a fixed order: results do not depend on scheduling.
//
// Macros of the host: RANKS, 16 or 32, the most that an adapter here has; fewer are filled up with zeros. STAGES, 2 to 4: tiles under way,
// as many as fit the shared memory of a block. Compiled after matrix_units.cu. Trade-off: parts of d_low are 4 * RANKS bytes per token for every 16,384 / RANKS columns, and more ranks are cheaper
// as two products.

constexpr int WARPS = 8;
constexpr int TOKENS = 16;             // of a tile
constexpr int COLUMNS = 2048 / RANKS;  // of a warp: its sums of dB are 64 registers
constexpr int DY_PITCH = COLUMNS + 8, LOW_PITCH = RANKS + 8; // values; eight rows of one chunk hit all banks
constexpr int STAGE_VALUES = TOKENS * (DY_PITCH + LOW_PITCH);

// An adapted module: its columns of dy, its ranks of low and d_low, and s B [width, rank] at a row stride.
struct AdaptedModule {
    const T *b;
    float *db; // [width, rank]
    long long b_stride;
    int first_column, width, first_rank, rank, first_chunk;
    float scale;
};

struct AdaptedModules {
    AdaptedModule of[4];
    int count, chunks;
};

DEVICE const AdaptedModule &module_of_chunk(const AdaptedModules &modules, int chunk) {
    int m = modules.count - 1;
    while (chunk < modules.of[m].first_chunk) --m;
    return modules.of[m];
}

// low_parts [chunks, n, RANKS], b_parts [gridDim.y, chunks * WARPS * COLUMNS, RANKS]; dy and low at their row strides,
// all on 16 bytes, ranks and widths multiples of 8. Launch: grid (chunks, parts of the tokens), block 256, shared memory
// WARPS * STAGES * STAGE_VALUES * 2 + 2 * WARPS * TOKENS * RANKS * 4 bytes.
KERNEL __launch_bounds__(256, 1)
output_gradient_pass(float *low_parts, float *b_parts, AdaptedModules modules, const T *dy, long long dy_stride,
                     const T *low, long long low_stride, int n, int tokens_per_block) {
    extern __shared__ uint4 shared_memory[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = blockIdx.x;
    const AdaptedModule &module = module_of_chunk(modules, chunk);
    const int own = (chunk - module.first_chunk) * WARPS * COLUMNS + warp * COLUMNS; // first column, in the module
    const int width = module.width, rank = module.rank;
    dy += module.first_column + own, low += module.first_rank;
    const int first = blockIdx.y * tokens_per_block, end = min(n, first + tokens_per_block);
    const int tiles = max(0, (end - first + TOKENS - 1) / TOKENS);

    T *stages = reinterpret_cast<T *>(shared_memory) + warp * STAGES * STAGE_VALUES;
    float *sums = reinterpret_cast<float *>(reinterpret_cast<T *>(shared_memory) + WARPS * STAGES * STAGE_VALUES);

    auto fetch = [&](int tile) {
        if (tile < tiles) {
            T *dy_tile = stages + tile % STAGES * STAGE_VALUES, *low_tile = dy_tile + TOKENS * DY_PITCH;
            const int token = first + tile * TOKENS;
#pragma unroll
            for (int k = 0; k < TOKENS * COLUMNS / 8 / 32; ++k) {
                const int at = k * 32 + lane, row = at / (COLUMNS / 8), column = at % (COLUMNS / 8) * 8;
                const bool inside = token + row < end && own + column < width;
                const T *from = inside ? dy + (token + row) * dy_stride + column : dy;
                copy_16(shared_address(dy_tile + row * DY_PITCH + column), from, inside);
            }
            for (int at = lane; at < TOKENS * RANKS / 8; at += 32) {
                const int row = at / (RANKS / 8), column = at % (RANKS / 8) * 8;
                const bool inside = token + row < end && column < rank;
                const T *from = inside ? low + (token + row) * low_stride + column : low;
                copy_16(shared_address(low_tile + row * LOW_PITCH + column), from, inside);
            }
        }
        copies_issued();
    };
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; ++tile) fetch(tile);

    // s B of the warp's columns, as the right operand of d_low.
    Word b[COLUMNS / 16][RANKS / 8][2];
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; ++k)
#pragma unroll
        for (int r = 0; r < RANKS / 8; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = own + k * 16 + half * 8 + lane % 4 * 2, at = r * 8 + lane / 4;
                const T *from = module.b + column * module.b_stride + at;
                const unsigned low_bits = column < width && at < rank ? from[0].bits : 0u;
                const unsigned high_bits = column + 1 < width && at < rank ? from[module.b_stride].bits : 0u;
                b[k][r][half] = low_bits | high_bits << 16;
            }

    float db[COLUMNS / 16][RANKS / 8][4] = {};
    for (int tile = 0; tile < tiles; ++tile) {
        wait_for_all_but<STAGES - 2>();
        __syncwarp();
        fetch(tile + STAGES - 1);
        const T *dy_tile = stages + tile % STAGES * STAGE_VALUES, *low_tile = dy_tile + TOKENS * DY_PITCH;

        // low of the tile's tokens, as the right operand of dB: two eights of ranks in one load.
        Word of_low[RANKS / 16][4];
#pragma unroll
        for (int r = 0; r < RANKS / 16; ++r)
            load_matrices_transposed(of_low[r],
                                     shared_address(low_tile + lane % 16 * LOW_PITCH + r * 16 + lane / 16 * 8));
        float d_low[RANKS / 8][4] = {};
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; ++k) {
            Word rows[4], columns[4];
            load_matrices(rows, shared_address(dy_tile + lane % 16 * DY_PITCH + k * 16 + lane / 16 * 8));
            load_matrices_transposed(columns, shared_address(dy_tile + (lane % 8 + lane / 16 * 8) * DY_PITCH + k * 16 +
                                                             lane / 8 % 2 * 8));
#pragma unroll
            for (int r = 0; r < RANKS / 8; ++r) {
                multiply_add(d_low[r], rows, b[k][r][0], b[k][r][1]);
                multiply_add(db[k][r], columns, of_low[r / 2][r % 2 * 2], of_low[r / 2][r % 2 * 2 + 1]);
            }
        }

        float *of_block = sums + tile % 2 * WARPS * TOKENS * RANKS, *of_warp = of_block + warp * TOKENS * RANKS;
#pragma unroll
        for (int r = 0; r < RANKS / 8; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2 *>(of_warp + (lane / 4 + half * 8) * RANKS + r * 8 + lane % 4 * 2) =
                    make_float2(d_low[r][half * 2], d_low[r][half * 2 + 1]);
        // The other half of `sums` is free again once all warps have come here twice.
        __syncthreads();
        const long long token = first + tile * TOKENS;
        for (int at = threadIdx.x; at < TOKENS * RANKS; at += 256) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += of_block[w * TOKENS * RANKS + at];
            if (token + at / RANKS < end) low_parts[(chunk * static_cast<long long>(n) + token) * RANKS + at] = sum;
        }
    }

    b_parts += ((static_cast<long long>(blockIdx.y) * modules.chunks + chunk) * WARPS + warp) * COLUMNS * RANKS;
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; ++k)
#pragma unroll
        for (int r = 0; r < RANKS / 8; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                *reinterpret_cast<float2 *>(b_parts + (k * 16 + lane / 4 + half * 8) * RANKS + r * 8 + lane % 4 * 2) =
                    make_float2(db[k][r][half * 2], db[k][r][half * 2 + 1]);
}

// d_low [n, ranks of all modules] at a row stride. Launch: block 256, grid ceil(n * RANKS * modules / 256).
KERNEL __launch_bounds__(256) add_low_parts(T *d_low, long long stride, const float *low_parts, AdaptedModules modules, int n) {
    const long long at = blockIdx.x * 256ll + threadIdx.x, each = static_cast<long long>(n) * RANKS;
    const int m = static_cast<int>(at / each);
    if (m >= modules.count) return;
    const AdaptedModule &module = modules.of[m];
    const long long token = at % each / RANKS;
    const int r = static_cast<int>(at % RANKS), end = m + 1 < modules.count ? modules.of[m + 1].first_chunk : modules.chunks;
    if (r >= module.rank) return;
    float sum = 0.0f;
#pragma unroll 4
    for (int chunk = module.first_chunk; chunk < end; ++chunk) sum += low_parts[chunk * each + token * RANKS + r];
    d_low[token * stride + module.first_rank + r] = from_float<T>(sum);
}

// dB of each module. Launch: block 256, grid chunks * WARPS * COLUMNS * RANKS / 256.
KERNEL __launch_bounds__(256) add_b_parts(const float *b_parts, AdaptedModules modules, int parts) {
    const long long each = static_cast<long long>(modules.chunks) * WARPS * COLUMNS * RANKS;
    const long long at = blockIdx.x * 256ll + threadIdx.x;
    const AdaptedModule &module = module_of_chunk(modules, static_cast<int>(at / (WARPS * COLUMNS * RANKS)));
    const int column = static_cast<int>(at / RANKS) - module.first_chunk * WARPS * COLUMNS, r = static_cast<int>(at % RANKS);
    if (column >= module.width || r >= module.rank) return;
    float sum = 0.0f;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) sum += b_parts[part * each + at];
    module.db[static_cast<long long>(column) * module.rank + r] = sum * module.scale;
}
