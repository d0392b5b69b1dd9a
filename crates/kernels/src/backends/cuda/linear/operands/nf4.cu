// Weights to NF4 (QLoRA, arXiv 2305.14314): the bytes of bitsandbytes. Compiled after weight_values.cu, which has the layout.
//
// Pointers to codes must be aligned to 4 bytes; where a source is not on the 16-byte grid, it is read value by value. Not
// supported: other block sizes, FP4, stochastic rounding.

// A scaled value lies in one of 32 cells of width 1/15. Decision points are further apart, so a cell holds at most
// one: the code is the number of decision points in lower cells, and one more above the cell's own. On a decision
// point it is the lower code.
struct Cells {
    float decision[32]; // the one inside, or one that no value exceeds
    int below[32];
};

constexpr Cells make_cells() {
    constexpr float levels[16] = NF4_LEVELS;
    Cells cells = {};
    for (int cell = 0; cell < 32; ++cell) cells.decision[cell] = 1e30f;
    for (int k = 0; k < 15; ++k) {
        const float decision = (levels[k] + levels[k + 1]) / 2.0f;
        const int inside = static_cast<int>(15.0 * decision + 16.0);
        cells.decision[inside] = decision;
        for (int cell = inside + 1; cell < 32; ++cell) cells.below[cell] += 1;
    }
    return cells;
}

__constant__ Cells CELLS = make_cells();

// Code of a value in [-1, 1]; `decision` and `below` are those of the lane's cell. All lanes must call.
DEVICE unsigned encode(float value, float decision, int below) {
    // Rounded down at a magnitude where floats are integers: the lowest bits are floor(15 value) + 16.
    const int cell = __float_as_int(__fmaf_rd(value, 15.0f, 12582928.0f));
    const float found = __shfl_sync(ALL_LANES, decision, cell);
    return __shfl_sync(ALL_LANES, below, cell) + (value > found ? 1 : 0);
}

template <class SRC> DEVICE void load_source(float (&value)[8], const SRC *w, long long start, long long n, bool wide) {
    if (wide && start + 8 <= n) {
        load8(w + start, value);
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) value[k] = start + k < n ? to_float(w[start + k]) : 0.0f;
}

// A lane takes eight values, eight lanes a block of 64.
template <class SRC> DEVICE void quantize(unsigned char *codes, float *absmax, const SRC *w, long long n) {
    constexpr int UNROLL = 2;
    // Blocks of zeros divide by something.
    constexpr float SMALLEST_DIVISOR = 1e-38f;
    const int lane = threadIdx.x % 32;
    const float decision = CELLS.decision[lane];
    const int below = CELLS.below[lane];
    const long long warp = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    const bool wide = aligned16(w);
    float value[UNROLL][8];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) load_source(value[u], w, (warp * UNROLL + u) * 256 + lane * 8, n, wide);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long start = (warp * UNROLL + u) * 256 + lane * 8, block = start / NF4_BLOCK;
        // Without their sign the bits of floats are ordered as the floats are, with infinity and NaN on top: a value
        // that is not finite shows in the scale.
        unsigned largest_bits = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k) largest_bits = max(largest_bits, __float_as_uint(value[u][k]) & 0x7fffffffu);
#pragma unroll
        for (int step = 4; step > 0; step /= 2)
            largest_bits = max(largest_bits, __shfl_xor_sync(ALL_LANES, largest_bits, step));
        const float largest = __uint_as_float(largest_bits), divisor = fmaxf(largest, SMALLEST_DIVISOR);
        // As in bitsandbytes' CPU path, a partial block divides and stores a scale that is kept off zero.
        const bool partial = (block + 1) * NF4_BLOCK > n;
        const float inverse = __frcp_rn(divisor);
        if (partial) {
#pragma unroll
            for (int k = 0; k < 8; ++k) value[u][k] = __fdiv_rn(value[u][k], divisor);
        } else {
#pragma unroll
            for (int k = 0; k < 8; ++k) value[u][k] = __fmul_rn(value[u][k], inverse);
        }
        unsigned word = 0;
#pragma unroll
        for (int k = 0; k < 8; ++k)
            word |= encode(value[u][k], decision, below) << (k / 2 * 8 + (k % 2 ? 0 : 4));
        if (block * NF4_BLOCK >= n) continue;
        reinterpret_cast<unsigned *>(codes)[start / 8] = word;
        if (lane % 8 == 0) absmax[block] = partial && largest_bits < 0x7f800000u ? divisor : largest;
    }
}

// codes [ceil(n / 64) * 32] and absmax [ceil(n / 64)] of w [n]; the last block is filled up with the code of zero. A
// block with a NaN or an infinity gets that as its scale (and codes of no meaning): the caller looks for scales that
// are not finite. Launch: block 256; grid ceil(n / 4096). Any alignment of w; codes aligned to 4 bytes.
KERNEL __launch_bounds__(256) nf4_quantize_bf16(unsigned char *codes, float *absmax, const bf16 *w, long long n) {
    quantize(codes, absmax, w, n);
}

KERNEL __launch_bounds__(256) nf4_quantize_f16(unsigned char *codes, float *absmax, const f16 *w, long long n) {
    quantize(codes, absmax, w, n);
}

KERNEL __launch_bounds__(256) nf4_quantize_f32(unsigned char *codes, float *absmax, const float *w, long long n) {
    quantize(codes, absmax, w, n);
}

// Sum over the block of 256 threads, in a fixed order; thread 0 gets it.
DEVICE double block_sum_double(double value) {
    __shared__ double partial[256];
    partial[threadIdx.x] = value;
    for (int step = 128; step > 0; step /= 2) {
        __syncthreads();
        if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
    }
    return partial[0];
}

// partial[gridDim.x] = sums of parts of absmax [blocks] in f64. Launch: block 256; any grid (same grid, same result),
// as min(ceil(blocks / 4096), 1024).
KERNEL __launch_bounds__(256) absmax_sum(double *partial, const float *absmax, long long blocks) {
    double sum = 0.0;
    const long long step = static_cast<long long>(gridDim.x) * 256;
    for (long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x; at < blocks; at += step)
        sum += absmax[at];
    sum = block_sum_double(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// mean[1] = sum of partial[count] / blocks: the offset of the nested scales. The host sums in f32 in PyTorch's CPU
// order, so the two may differ in the last bit. Launch: grid 1, block 256.
KERNEL __launch_bounds__(256) absmax_mean(float *mean, const double *partial, int count, long long blocks) {
    double sum = 0.0;
    for (int at = threadIdx.x; at < count; at += 256) sum += partial[at];
    sum = block_sum_double(sum);
    if (threadIdx.x == 0) *mean = static_cast<float>(sum / static_cast<double>(blocks));
}

// 8-bit codes [ceil(blocks / 256) * 256] (filled up with code 0) and nested_absmax [ceil(blocks / 256)] of absmax -
// *mean under the signed dynamic map [256]: nearest value, a tie to the even code, a NaN (0 / 0) to code 0. Launch:
// block 256; grid ceil(blocks / 256).
KERNEL __launch_bounds__(256) absmax_quantize(unsigned char *codes, float *nested_absmax, const float *absmax,
                                              const float *mean, const float *map, long long blocks) {
    __shared__ float midpoint[255];
    if (threadIdx.x < 255) midpoint[threadIdx.x] = __fadd_rn(map[threadIdx.x], map[threadIdx.x + 1]) * 0.5f;
    const long long at = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
    const float difference = at < blocks ? __fsub_rn(absmax[at], *mean) : 0.0f;
    const float largest = block_max(fabsf(difference)); // its barriers also publish the midpoints
    const float scaled = __fmul_rn(difference, __frcp_rn(largest));
    int below = 0;
#pragma unroll
    for (int step = 128; step > 0; step /= 2) below += midpoint[below + step - 1] < scaled ? step : 0;
    if (below % 2 == 1 && below < 255 && midpoint[below] == scaled) below += 1;
    codes[at] = at < blocks ? below : 0;
    if (threadIdx.x == 0) nested_absmax[blockIdx.x] = largest;
}
