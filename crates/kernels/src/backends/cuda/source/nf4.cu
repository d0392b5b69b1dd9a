// NF4 weights (QLoRA, arXiv 2305.14314; bytes of bitsandbytes): codes to values, values to codes, and codes to values
// with a LoRA product added, which is what every linear layer multiplies with.
//
// A weight [o, i] is row-major; blocks of 64 values run over the flat order, across rows. Codes: two a byte, the
// earlier in the high nibble, and the buffer holds whole blocks (32 bytes each), so that whole words may be read. The
// scale of a block is absmax[block], or with double quantization (absmax null) map[codes[block]] * nested[block /
// 256] + *offset, each operation rounded. What the codes are: crates/precision, src/nf4; the quantizers here give its
// bytes.
//
// Pointers to codes and outputs must be aligned to 4 and 16 bytes; where an output or a source is not, the kernels that
// say so take a slow path. Not supported: other block sizes, FP4, stochastic rounding, matrices of 2^31 rows or columns.

constexpr int VALUES_PER_BLOCK = 64;
constexpr int BLOCKS_PER_NESTED = 256;
constexpr unsigned ALL_LANES = 0xffffffffu;

// The sixteen levels, to digits that name the f32 numbers exactly.
#define NF4_LEVELS                                                                                                  \
    {-1.0f,       -0.6961928f,  -0.52507305f, -0.3949175f,  -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,        \
     0.0795803f,  0.1609302f,   0.2461123f,   0.33791524f,  0.44070983f,  0.562617f,    0.72295684f,   1.0f}

__constant__ float LEVELS[16] = NF4_LEVELS;

// The scales of the blocks, in either form.
struct Scales {
    const float *absmax;
    const unsigned char *codes;
    const float *nested;
    const float *map;
    const float *offset;

    DEVICE float at(long long block) const {
        if (absmax) return absmax[block];
        // Two roundings as on the host: a fused one would give other values than bitsandbytes.
        return __fadd_rn(__fmul_rn(map[codes[block]], nested[block / BLOCKS_PER_NESTED]), *offset);
    }
};

// A lane's part of the table of levels: decode() looks up in another lane's register, which needs no address and no
// memory, and takes the index modulo 32, so that a code needs no mask.
DEVICE float level_of_lane() { return LEVELS[threadIdx.x & 15]; }

// Level of value `index` of a word of eight codes. All lanes of the warp must call.
DEVICE float decode(float level, unsigned word, int index) {
    return __shfl_sync(ALL_LANES, level, word >> (index / 2 * 8 + (index % 2 ? 0 : 4)));
}

// ---------------------------------------------------------------------------------------------------------- dequantize

// V neighbors a thread and store, UNROLL of them in flight; the codes of V values are one load.
template <class OUT, int V, class WORD>
DEVICE void dequantize(OUT *out, const unsigned char *codes, Scales scales, long long n) {
    constexpr int UNROLL = 4;
    const float level = level_of_lane();
    const long long first = static_cast<long long>(blockIdx.x) * (256 * UNROLL) + threadIdx.x;
    const bool wide = aligned16(out);
    unsigned word[UNROLL];
    float scale[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long piece = first + u * 256;
        const bool inside = piece * V < n;
        word[u] = inside ? __ldcs(reinterpret_cast<const WORD *>(codes) + piece) : 0;
        scale[u] = inside ? scales.at(piece * V / VALUES_PER_BLOCK) : 0.0f;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long start = (first + u * 256) * V;
        float value[V];
#pragma unroll
        for (int k = 0; k < V; ++k) value[k] = decode(level, word[u], k) * scale[u];
        if (wide && start + V <= n) {
            Pack<OUT, V>::pack(value).store(out + start);
        } else {
#pragma unroll
            for (int k = 0; k < V; ++k)
                if (start + k < n) out[start + k] = from_float<OUT>(value[k]);
        }
    }
}

// out[n] = values of the codes, rounded once.
// Launch: block 256; grid ceil(n / 8192), for f32 ceil(n / 4096); no shared memory. Any alignment of out.
KERNEL __launch_bounds__(256) nf4_dequantize_f32(
    float *out, const unsigned char *codes, const float *absmax, const unsigned char *absmax_codes,
    const float *nested_absmax, const float *map, const float *offset, long long n) {
    dequantize<float, 4, unsigned short>(out, codes, {absmax, absmax_codes, nested_absmax, map, offset}, n);
}

// --------------------------------------------------------------------------------------------------------------- merge

// Eight neighbors of row k of A, zero beyond the matrix.
DEVICE void load_a(float (&value)[8], const float *a, long long start, int inside, bool wide) {
    if (wide) {
        load8(a + start, value);
        return;
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) value[c] = c < inside ? a[start + c] : 0.0f;
}

// out[o, i] = T(dequantized + scale * B A), a [r, i], b [o, r], added in f32 before the one rounding.
// Any o, i, r (r = 0: a and b may be null), any T, any alignment of out and a: the general path, in plain f32.
// Launch: block 256 (8 warps of 8 rows x 256 columns); grid (ceil(i / 256), min(ceil(o / 64), 65535)).
KERNEL __launch_bounds__(256, 2) nf4_merge(
    T *out, const unsigned char *codes, const float *absmax, const unsigned char *absmax_codes,
    const float *nested_absmax, const float *map, const float *offset, const float *a, const float *b, float scale,
    int o, int i, int r) {
    constexpr int ROWS = 8;
    const Scales scales = {absmax, absmax_codes, nested_absmax, map, offset};
    const float level = level_of_lane();
    const int column = blockIdx.x * 256 + threadIdx.x % 32 * 8;
    const int inside = i - column; // may be negative, or beyond 8
    const bool whole = i % 8 == 0, wide_a = whole && inside > 0 && aligned16(a), wide_out = whole && aligned16(out);
    const int row_step = gridDim.y * 64;
    for (int first = blockIdx.y * 64 + threadIdx.x / 32 * ROWS; first < o; first += row_step) {
        float sum[ROWS][8] = {};
        for (int k = 0; k < r; ++k) {
            float from_a[8];
            load_a(from_a, a, static_cast<long long>(k) * i + column, inside, wide_a);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float from_b = first + row < o ? b[static_cast<long long>(first + row) * r + k] * scale : 0.0f;
#pragma unroll
                for (int c = 0; c < 8; ++c) sum[row][c] = fmaf(from_a[c], from_b, sum[row][c]);
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const bool in_row = first + row < o;
            const long long start = static_cast<long long>(first + row) * i + column;
            if (whole) { // eight columns are eight codes of one block
                const bool inside_row = in_row && inside > 0;
                const unsigned word = inside_row ? reinterpret_cast<const unsigned *>(codes)[start >> 3] : 0;
                const float block_scale = inside_row ? scales.at(start / VALUES_PER_BLOCK) : 0.0f;
#pragma unroll
                for (int c = 0; c < 8; ++c) sum[row][c] = fmaf(decode(level, word, c), block_scale, sum[row][c]);
                if (!inside_row) continue;
                if (wide_out) {
                    store8(out + start, sum[row]);
                    continue;
                }
#pragma unroll
                for (int c = 0; c < 8; ++c) out[start + c] = from_float<T>(sum[row][c]);
                continue;
            }
#pragma unroll 1
            for (int c = 0; c < 8; ++c) {
                const bool valid = in_row && c < inside;
                const long long flat = start + c;
                const unsigned byte = valid ? codes[flat / 2] : 0;
                const float from_level = __shfl_sync(ALL_LANES, level, flat % 2 ? byte : byte >> 4);
                const float block_scale = valid ? scales.at(flat / VALUES_PER_BLOCK) : 0.0f;
                float added = 0.0f; // a run-time index into sum would move it to memory
#pragma unroll
                for (int at = 0; at < 8; ++at) added = at == c ? sum[row][at] : added;
                if (valid) out[flat] = from_float<T>(fmaf(from_level, block_scale, added));
            }
        }
    }
}

#if !T_IS_F32

// A weight and its adapter, as a merge reads them, and where it writes.
struct MergeItem {
    T *out;
    const unsigned *codes;
    Scales scales;
    const float *a, *b;
    float scale;
    int o;
};

// Two neighbors as a bf16 pair and the bf16 pair of what that leaves: 16 bits of mantissa together.
DEVICE void split(float first, float second, unsigned &high, unsigned &low) {
    float first_high, second_high;
    high = pack2<bf16>(first, second);
    unpack2<bf16>(high, first_high, second_high);
    low = pack2<bf16>(first - first_high, second - second_high);
}

DEVICE void multiply_add(float (&sum)[4], uint4 left, uint2 right) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left.x), "r"(left.y), "r"(left.z), "r"(left.w), "r"(right.x), "r"(right.y));
}

template <bool SMALL> struct OffsetOf { typedef long long Type; };
template <> struct OffsetOf<true> { typedef int Type; };

// The merge on tensor cores for r <= 16 * CHUNKS. A warp keeps its part of A, 64 columns, in registers and goes down
// the rows sixteen at a time; what the next sixteen need is on its way while these are computed. No warp waits for
// another, and nothing goes through shared memory.
//
// The product is made of bf16 halves (high*high + high*low + low*high, summed in f32), which leaves an error of about
// 2^-16 of it, far below the rounding of the result to 16 bits.
//
// The transpose is computed, 16 columns x 8 rows a product, with the columns dealt so that a thread ends with eight
// neighbors of a row: product j covers the columns 8 g + 2 j and 8 g + 2 j + 1, g = 0..7. Eight lanes then write 128
// bytes in a line and read 32 bytes of codes. The rows k of a chunk are dealt likewise: lane t = 0..3 has 4 t .. 4 t +
// 3, one 16-byte load of B.
template <int CHUNKS> struct Merge {
    static constexpr int ROWS = 16, WARP_COLUMNS = 64, WARPS = 4;

    // What a lane reads for sixteen rows. Its own are 8 tile + 2 t + row, row 0 or 1.
    struct Step {
        unsigned word[2][2]; // [tile][row]
        float b[CHUNKS][2][4];
        // Of the block of 64 that row `lane % 16` of the warp begins in, for lanes of 16 and more the block after it:
        // the scale, or its nested scale and code.
        float factor;
        unsigned code;
    };

    // Offsets of a few rows, in values.
    template <bool WHOLE> using Offset = typename OffsetOf<WHOLE>::Type;
    static constexpr int MAX_WHOLE = 1 << 26;
    // Whether there are registers for the next rows of B in addition to A.
    static constexpr bool B_AHEAD = CHUNKS < 4;

    MergeItem item;
    int i, r, warp_column, column; // the lane's eight columns begin at `column`
    float level, offset;
    // This lane's part of scale * A, high and low: [chunk][j], pairs of k of the columns 2 j, 2 j + 1, 2 j, 2 j + 1.
    uint4 a_high[CHUNKS][4], a_low[CHUNKS][4];

    static DEVICE int lane() { return threadIdx.x % 32; }

    DEVICE void load_a() {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            float value[4][8];
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int k = chunk * 16 + lane() % 4 * 4 + part;
                if (k < r && column < i) {
                    load8(item.a + static_cast<long long>(k) * i + column, value[part]);
                } else {
#pragma unroll
                    for (int c = 0; c < 8; ++c) value[part][c] = 0.0f;
                }
#pragma unroll
                for (int c = 0; c < 8; ++c) value[part][c] *= item.scale;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                uint4 &high = a_high[chunk][j], &low = a_low[chunk][j];
                split(value[0][2 * j], value[1][2 * j], high.x, low.x);
                split(value[0][2 * j + 1], value[1][2 * j + 1], high.y, low.y);
                split(value[2][2 * j], value[3][2 * j], high.z, low.z);
                split(value[2][2 * j + 1], value[3][2 * j + 1], high.w, low.w);
            }
        }
    }

    // Where this lane reads for the sixteen rows from first_row on.
    struct Place {
        int first_row;
        const unsigned *codes;
        const float *b;
        unsigned block; // the one that row `lane % 16` of the warp begins in; 2^32 are more than any weight has
    };

    DEVICE long long flat(int row, int at) const { return static_cast<long long>(row) * i + at; }

    DEVICE unsigned block_of(int first_row) const {
        return static_cast<unsigned>(flat(first_row + lane() % 16, warp_column) / VALUES_PER_BLOCK);
    }

    DEVICE Place place(int first_row) const {
        return {first_row, item.codes + flat(first_row + lane() % 4 * 2, column) / 8,
                item.b + static_cast<long long>(first_row + lane() / 4) * r + lane() % 4 * 4, block_of(first_row)};
    }

    template <bool WHOLE> DEVICE void advance(Place &place, int rows) const {
        place.first_row += rows;
        place.codes += static_cast<long long>(rows) * (i / 8);
        place.b += static_cast<long long>(rows) * r;
        place.block = WHOLE ? place.block + rows * (i / VALUES_PER_BLOCK) : block_of(place.first_row);
    }

    // Whether a row is there and the lane's columns too; with WHOLE sixteen rows and 64 columns are there together.
    template <bool WHOLE> DEVICE bool inside(int first_row, int down) const {
        return WHOLE ? first_row < item.o : first_row + down < item.o && column < i;
    }

    template <bool WHOLE> DEVICE void fetch_b(Step &step, const Place &place) const {
        const bool wide = WHOLE || (r % 4 == 0 && aligned16(item.b));
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const int k = chunk * 16 + lane() % 4 * 4;
                const float *from = place.b + tile * 8 * r + chunk * 16;
                const bool in_row = WHOLE ? place.first_row < item.o : place.first_row + tile * 8 + lane() / 4 < item.o;
                float(&value)[4] = step.b[chunk][tile];
                if (wide) {
                    const float4 read =
                        in_row && k < r ? *reinterpret_cast<const float4 *>(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    value[0] = read.x, value[1] = read.y, value[2] = read.z, value[3] = read.w;
                } else {
#pragma unroll
                    for (int at = 0; at < 4; ++at) value[at] = in_row && k + at < r ? from[at] : 0.0f;
                }
            }
    }

    template <bool WHOLE> DEVICE void fetch_scale(Step &step, const Place &place) const {
        const unsigned block = place.block + (WHOLE ? 0 : lane() / 16);
        const unsigned phase = static_cast<unsigned>(flat(place.first_row + lane() % 16, warp_column)) % VALUES_PER_BLOCK;
        // The second block is there only where the warp's columns reach into it.
        const bool reached = lane() < 16 || phase + min(i - warp_column, WARP_COLUMNS) > VALUES_PER_BLOCK;
        const bool in_row =
            WHOLE ? place.first_row < item.o : place.first_row + lane() % 16 < item.o && reached;
        const bool nested = !item.scales.absmax;
        const float *from = nested ? item.scales.nested : item.scales.absmax;
        step.factor = in_row ? from[nested ? block / BLOCKS_PER_NESTED : block] : 0.0f;
        step.code = nested && in_row ? item.scales.codes[block] : 0;
    }

    template <bool WHOLE> DEVICE void fetch(Step &step, const Place &place) const {
        if (B_AHEAD) fetch_b<WHOLE>(step, place);
        const Offset<WHOLE> words = i / 8;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int row = 0; row < 2; ++row)
                step.word[tile][row] = inside<WHOLE>(place.first_row, lane() % 4 * 2 + tile * 8 + row)
                                           ? __ldcs(place.codes + (tile * 8 + row) * words)
                                           : 0;
        fetch_scale<WHOLE>(step, place);
    }

    // Scales::at of what was read.
    DEVICE float scale_of(const Step &step) const {
        if (item.scales.absmax) return step.factor;
        return __fadd_rn(__fmul_rn(item.scales.map[step.code], step.factor), offset);
    }

    // Eight rows x 64 columns of the product, transposed.
    DEVICE void product(float (&sum)[4][4], const uint2 (&b_high)[CHUNKS], const uint2 (&b_low)[CHUNKS]) const {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                multiply_add(sum[j], a_low[chunk][j], b_high[chunk]);
                multiply_add(sum[j], a_high[chunk][j], b_low[chunk]);
                multiply_add(sum[j], a_high[chunk][j], b_high[chunk]);
            }
    }

    // What the codes say added to eight rows of the product, written.
    template <bool WHOLE>
    DEVICE void write(const float (&sum)[4][4], const unsigned (&word)[2], float scale, int tile, int first_row, T *to) const {
        const Offset<WHOLE> width = i;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const int down = tile * 8 + lane() % 4 * 2 + row;
            // Where in its block of 64 the warp's first column lies in this row; only the low bits count.
            const unsigned before = static_cast<unsigned>(first_row + down) * static_cast<unsigned>(i) + warp_column;
            const unsigned next = WHOLE ? 0 : (before % 64 + lane() / 4 * 8) / 64;
            const float block_scale = __shfl_sync(ALL_LANES, scale, down + next * 16);
            float value[8];
#pragma unroll
            for (int c = 0; c < 8; ++c)
                value[c] = fmaf(decode(level, word[row], c), block_scale, sum[c / 2][c % 2 * 2 + row]);
            if (WHOLE || inside<WHOLE>(first_row, down)) store8(to + (tile * 8 + row) * width, value);
        }
    }

    // WHOLE: offsets of a few rows fit an int, blocks of 64 do not cross rows, all sixteen rows and 64 columns are there, and B is read in 16 bytes.
    template <bool WHOLE> DEVICE void down_the_rows(int block, int blocks) {
        Step step;
        Place next = place(block * ROWS);
        T *to = item.out + flat(block * ROWS + lane() % 4 * 2, column);
        fetch<WHOLE>(step, next);
        load_a();
#pragma unroll 1
        for (int first_row = block * ROWS; first_row < item.o; first_row += blocks * ROWS) {
            if (!B_AHEAD) fetch_b<WHOLE>(step, next);
            uint2 b_high[2][CHUNKS], b_low[2][CHUNKS];
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    const float(&value)[4] = step.b[chunk][tile];
                    split(value[0], value[1], b_high[tile][chunk].x, b_low[tile][chunk].x);
                    split(value[2], value[3], b_high[tile][chunk].y, b_low[tile][chunk].y);
                }
            const float scale = scale_of(step);
            const unsigned word[2][2] = {{step.word[0][0], step.word[0][1]}, {step.word[1][0], step.word[1][1]}};
            advance<WHOLE>(next, blocks * ROWS);
            fetch<WHOLE>(step, next); // reads nothing beyond the last row
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                float sum[4][4] = {};
                product(sum, b_high[tile], b_low[tile]);
                write<WHOLE>(sum, word[tile], scale, tile, first_row, to);
            }
            to += static_cast<long long>(blocks * ROWS) * i;
        }
    }

    // This block's rows: every `blocks`-th sixteen from the `block`-th on.
    DEVICE void run(const MergeItem &given, int width, int rank, int block, int blocks) {
        item = given, i = width, r = rank;
        warp_column = (blockIdx.x * WARPS + threadIdx.x / 32) * WARP_COLUMNS;
        if (warp_column >= i) return;
        column = warp_column + lane() / 4 * 8;
        level = level_of_lane();
        offset = item.scales.absmax ? 0.0f : *item.scales.offset;
        if (i % WARP_COLUMNS == 0 && i <= MAX_WHOLE && item.o % ROWS == 0 && r % 4 == 0 && aligned16(item.b))
            down_the_rows<true>(block, blocks);
        else
            down_the_rows<false>(block, blocks);
    }
};

// As nf4_merge, for T of 16 bits, i % 8 == 0, out and a aligned to 16 bytes, codes to 4, and r at most 16, 32 or 64
// (r = 0 too). Launch: block 128; grid (ceil(i / 256), 1..ceil(o / 16)): a block takes every grid-y-th sixteen rows and
// reads its part of A once, so that as many blocks as the device holds at a time (BLOCKS a multiprocessor) are best.
#define MERGE(NAME, CHUNKS, BLOCKS)                                                                                   \
    KERNEL __launch_bounds__(128, BLOCKS) NAME(                                                                       \
        T *out, const unsigned char *codes, const float *absmax, const unsigned char *absmax_codes,                   \
        const float *nested_absmax, const float *map, const float *offset, const float *a, const float *b, float scale,\
        int o, int i, int r) {                                                                                        \
        const Scales scales = {absmax, absmax_codes, nested_absmax, map, offset};                                     \
        const MergeItem item = {out, reinterpret_cast<const unsigned *>(codes), scales, a, b, scale, o};              \
        Merge<CHUNKS> merge;                                                                                          \
        merge.run(item, i, r, blockIdx.y, gridDim.y);                                                                 \
    }
MERGE(nf4_merge_r16, 1, 4)
MERGE(nf4_merge_r32, 2, 3)
MERGE(nf4_merge_r64, 4, 2)
#undef MERGE

#endif

// ------------------------------------------------------------------------------------------------------------ quantize

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
        const long long start = (warp * UNROLL + u) * 256 + lane * 8, block = start / VALUES_PER_BLOCK;
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
        const bool partial = (block + 1) * VALUES_PER_BLOCK > n;
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
        if (block * VALUES_PER_BLOCK >= n) continue;
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
