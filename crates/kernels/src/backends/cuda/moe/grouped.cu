// Products over the rows of experts: each expert's rows with its own matrix, in one launch whose sizes are read on the device.
//
// Rows are sorted by expert; expert e has rows starts[e] to starts[e + 1]. A block computes a tile of TILE_ROWS x BN of one expert, in
// steps of 64 along the inner dimension: all threads copy tiles to shared memory (EXPERT_STAGES of them in flight), in rows of 128 bytes whose
// 16-byte chunks are swizzled as wgmma and ldmatrix read them without conflicts. On Hopper a warpgroup multiplies 64 rows by wgmma, elsewhere a warp
// 32 x BN / 2 by mma.sync. Sums are f32, in a fixed order, and rounded once. Trade-off: tiles of 128 rows, so an expert with few rows
// costs as much as one with 128; the copies are the threads' own (cp.async), which one launch can mask by row, and not TMA's.
//
// Widths and strides are multiples of 8 values, and all addresses lie on the 16-byte grid. Compiled after matrix_units.cu.

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

constexpr int STEP = 64;             // inner values of a tile
constexpr int THREADS = 256;        // of a block
constexpr int PANEL = 64 * 128;      // bytes of 64 rows of 64 values

// Copies `ROWS` rows of 64 values to shared memory at `to`; zeros beyond rows_left rows and columns_left columns.
template <int ROWS> DEVICE void copy_panel(Word to, const T *from, long long stride, int rows_left, int columns_left) {
#pragma unroll
    for (int i = 0; i < ROWS * 8 / THREADS; ++i) {
        const int at = threadIdx.x + i * THREADS, row = at / 8, chunk = at % 8;
        copy_16(to + row * 128 + ((chunk ^ (row & 7)) << 4), from + row * stride + chunk * 8,
                row < rows_left && chunk * 8 < columns_left);
    }
}

// A matrix as tiles are copied from it. `lines` bounds rows and `columns` columns, both counted from `from`.
struct Operand {
    const T *from;
    long long stride;
    int rows, columns;
};

// One operand's tile for inner values k to k + 64: WIDTH of its outer values. Where the inner dimension runs along rows of memory
// (INNER_IS_ROWS), as panels of 64 outer values; else as WIDTH rows of 64 inner values.
template <int WIDTH, bool INNER_IS_ROWS> DEVICE void copy_tile(Word to, const Operand &operand, int k) {
    if constexpr (INNER_IS_ROWS) {
#pragma unroll
        for (int panel = 0; panel < WIDTH / 64; ++panel)
            copy_panel<64>(to + panel * PANEL, operand.from + k * operand.stride + panel * 64, operand.stride,
                           operand.rows - k, operand.columns - panel * 64);
    } else {
        copy_panel<WIDTH>(to, operand.from + k, operand.stride, operand.rows, operand.columns - k);
    }
}

#if HAS_WGMMA
// Describes a tile in shared memory with swizzled rows of 128 bytes: bytes between panels of 64 outer values, and between groups of eight rows.
DEVICE unsigned long long descriptor(Word address) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) | static_cast<unsigned long long>(PANEL >> 4) << 16 |
           static_cast<unsigned long long>(1024 >> 4) << 32 | 1ull << 62;
}

#define F4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#if T_IS_BF16
#define WGMMA_TYPES ".f32.bf16.bf16"
#else
#define WGMMA_TYPES ".f32.f16.f16"
#endif

// c[64, BN] += a[64, 16] b[16, BN]; A_ROWS, B_ROWS: whether the inner dimension runs along rows of memory.
template <bool A_ROWS, bool B_ROWS> DEVICE void multiply(float (&c)[64], unsigned long long a, unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16" WGMMA_TYPES
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,"
        "%62,%63}, %64, %65, 1, 1, 1, %66, %67;"
        : F16(0), F16(16), F16(32), F16(48)
        : "l"(a), "l"(b), "n"(A_ROWS ? 1 : 0), "n"(B_ROWS ? 1 : 0));
}

template <bool A_ROWS, bool B_ROWS> DEVICE void multiply(float (&c)[32], unsigned long long a, unsigned long long b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16" WGMMA_TYPES
        " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
        " %32, %33, 1, 1, 1, %34, %35;"
        : F16(0), F16(16)
        : "l"(a), "l"(b), "n"(A_ROWS ? 1 : 0), "n"(B_ROWS ? 1 : 0));
}

template <int N> DEVICE void hold(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
#endif

// The sums of a tile, and the products that are added to them.
template <int BN, bool A_ROWS, bool B_ROWS> struct Tile {
    static constexpr int A_BYTES = 128 * 128, B_BYTES = BN * 128, STAGE = A_BYTES + B_BYTES;
    float c[BN / 2] = {};

#if HAS_WGMMA
    // Begins the products of a stage.
    DEVICE void add(Word a, Word b) {
        const int group = threadIdx.x / 128;
        hold(c);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            // Along rows, sixteen inner values are sixteen rows; else 32 bytes.
            const Word a_at = a + group * PANEL + (A_ROWS ? k * 2048 : k * 32);
            const Word b_at = b + (B_ROWS ? k * 2048 : k * 32);
            multiply<A_ROWS, B_ROWS>(c, descriptor(a_at), descriptor(b_at));
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        hold(c);
    }

    // Waits for all products that were begun.
    DEVICE void wait() {
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        hold(c);
    }

    // Makes copies to shared memory visible to the matrix units; before a barrier.
    static DEVICE void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

    // Row and column of c[i] and c[i + 1], for even i.
    static DEVICE int row(int i) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
    static DEVICE int column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2; }
#else
    static constexpr int WARP_COLUMNS = BN / 2;

    DEVICE void add(Word a, Word b) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const int first_row = warp / 2 * 32, first_column = warp % 2 * WARP_COLUMNS;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            Word left[2][4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                // Matrices of the fragment: rows 0-7 and 8-15 of the first eight inner values, then of the next eight.
                const int outer = first_row + i * 16;
                if constexpr (A_ROWS) {
                    const int inner = k * 16 + lane % 8 + lane / 16 * 8, at = outer + lane / 8 % 2 * 8;
                    load_matrices_transposed(left[i], panel_chunk(a, inner, at));
                } else {
                    const int row = outer + lane % 16;
                    load_matrices(left[i], row_chunk(a, row, k * 2 + lane / 16));
                }
            }
#pragma unroll
            for (int j = 0; j < WARP_COLUMNS / 16; ++j) {
                Word right[4];
                const int outer = first_column + j * 16;
                if constexpr (B_ROWS) {
                    const int inner = k * 16 + lane % 16, at = outer + lane / 16 * 8;
                    load_matrices_transposed(right, panel_chunk(b, inner, at));
                } else {
                    const int row = outer + lane % 8 + lane / 16 * 8;
                    load_matrices(right, row_chunk(b, row, k * 2 + lane / 8 % 2));
                }
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float (&sums)[4] = *reinterpret_cast<float (*)[4]>(&c[(i * (WARP_COLUMNS / 8) + j * 2 + half) * 4]);
                        multiply_add(sums, left[i], right[half * 2], right[half * 2 + 1]);
                    }
            }
        }
    }

    static DEVICE Word row_chunk(Word tile, int row, int chunk) { return tile + row * 128 + ((chunk ^ (row & 7)) << 4); }
    static DEVICE Word panel_chunk(Word tile, int inner, int outer) {
        return tile + outer / 64 * PANEL + inner * 128 + ((outer % 64 / 8 ^ (inner & 7)) << 4);
    }

    DEVICE void wait() {}
    static DEVICE void publish() {}

    static DEVICE int row(int i) {
        return threadIdx.x / 64 * 32 + i / (WARP_COLUMNS / 2) * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
    }
    static DEVICE int column(int i) {
        return threadIdx.x / 32 % 2 * WARP_COLUMNS + i % (WARP_COLUMNS / 2) / 4 * 8 + threadIdx.x % 4 * 2;
    }
#endif

    // Adds the products of all `inner` values. `shared` holds EXPERT_STAGES stages and lies on the 1,024-byte grid.
    DEVICE void multiply_all(Word shared, const Operand &a, const Operand &b, int inner) {
        const int steps = (inner + STEP - 1) / STEP;
#pragma unroll
        for (int step = 0; step < EXPERT_STAGES - 1; ++step) {
            if (step < steps) copy(shared, a, b, step);
            copies_issued();
        }
        for (int step = 0; step < steps; ++step) {
            wait_for_all_but<EXPERT_STAGES - 2>();
            publish();
            wait();
            __syncthreads();
            const Word stage = shared + step % EXPERT_STAGES * STAGE;
            add(stage, stage + A_BYTES);
            if (step + EXPERT_STAGES - 1 < steps) copy(shared, a, b, step + EXPERT_STAGES - 1);
            copies_issued();
        }
        wait();
        __syncthreads();
    }

    static DEVICE void copy(Word shared, const Operand &a, const Operand &b, int step) {
        const Word stage = shared + step % EXPERT_STAGES * STAGE;
        copy_tile<128, A_ROWS>(stage, a, step * STEP);
        copy_tile<BN, B_ROWS>(stage + A_BYTES, b, step * STEP);
    }

    // Bytes from one row of sums in shared memory to the next.
    static constexpr int PITCH = BN * 4 + 16;

    // Calls `store(row, column, values)` for eight neighbors at a time, after the sums went through shared memory.
    template <class STORE> DEVICE void store_all(unsigned char *shared, STORE store) {
#pragma unroll
        for (int i = 0; i < BN / 2; i += 2) {
            float *to = reinterpret_cast<float *>(shared + row(i) * PITCH) + column(i);
            *reinterpret_cast<float2 *>(to) = make_float2(c[i], c[i + 1]);
        }
        __syncthreads();
        for (int at = threadIdx.x; at < 128 * BN / 8; at += THREADS) {
            const int row = at / (BN / 8), column = at % (BN / 8) * 8;
            const float4 *from = reinterpret_cast<const float4 *>(shared + row * PITCH + column * 4);
            const float4 low = from[0], high = from[1];
            float value[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            store(row, column, value);
        }
    }
};

extern __shared__ unsigned char dynamic_shared[];

// Dynamic shared memory begins on the 16-byte grid; the swizzle needs the 1,024-byte grid.
DEVICE unsigned char *shared_stages() {
    return dynamic_shared + (1024 - (shared_address(dynamic_shared) & 1023)) % 1024;
}

// out [s, n] = alpha a [s, k] b_e, plus c [s, n] and the expert's bias [e, n] if given; b_e is [n, k] transposed, or [k, n] (B_ROWS).
// tiles[t]: expert and first row of a tile of 128 rows; expert -1: none.
template <int BN, bool B_ROWS>
DEVICE void expert_rows(T *out, const T *a, const T *b, const T *c, const T *bias, const int *starts, const int2 *tiles,
                        long long out_stride, long long a_stride, long long b_stride, long long b_expert, int n, int k) {
    const int column_tiles = (n + BN - 1) / BN;
    const int2 tile = tiles[blockIdx.x / column_tiles];
    if (tile.x < 0) return;
    const int first_column = blockIdx.x % column_tiles * BN, rows = min(128, starts[tile.x + 1] - tile.y);
    unsigned char *shared = shared_stages();
    const Operand left = {a + tile.y * a_stride, a_stride, rows, k};
    const T *matrix = b + tile.x * b_expert;
    const Operand right = B_ROWS ? Operand{matrix + first_column, b_stride, k, n - first_column}
                                 : Operand{matrix + first_column * b_stride, b_stride, n - first_column, k};
    Tile<BN, false, B_ROWS> sums;
    sums.multiply_all(shared_address(shared), left, right, k);
    sums.store_all(shared, [&](int row, int column, float (&value)[8]) {
        column += first_column;
        if (row >= rows || column >= n) return;
        const long long at = (tile.y + row) * out_stride + column;
        float other[8];
        if (bias != nullptr) {
            load8(bias + static_cast<long long>(tile.x) * n + column, other);
#pragma unroll
            for (int i = 0; i < 8; ++i) value[i] += other[i];
        }
        if (c != nullptr) {
            load8(c + at, other);
#pragma unroll
            for (int i = 0; i < 8; ++i) value[i] += other[i];
        }
        store8(out + at, value);
    });
}

#define EXPERT_ROWS(NAME, BN, B_ROWS)                                                                                  \
    KERNEL __launch_bounds__(256, 2) NAME(T *out, const T *a, const T *b, const T *c, const T *bias, const int *starts, \
                                          const int2 *tiles, long long out_stride, long long a_stride,                 \
                                          long long b_stride, long long b_expert, int n, int k) {                      \
        expert_rows<BN, B_ROWS>(out, a, b, c, bias, starts, tiles, out_stride, a_stride, b_stride, b_expert, n, k);    \
    }
// grid (tiles * ceil(n / BN)), block (256), dynamic shared memory: stages or sums, and 1,024.
EXPERT_ROWS(expert_rows_64, 64, false)
EXPERT_ROWS(expert_rows_128, 128, false)
EXPERT_ROWS(expert_rows_across_64, 64, true)
EXPERT_ROWS(expert_rows_across_128, 128, true)

// sums [e, m, n] f32 = (add ? sums : 0) + alpha times the sum over the expert's rows of left [s, m] transposed times right [s, n].
struct Sums {
    float *sums;
    const T *left, *right;
    int m;
    float alpha;
};

// Up to two such sums, the second one with m = 0 if there is none. If their left operands are neighbors and the right one is the same, tiles
// cover both at once.
struct TwoSums {
    Sums of[2];

    // One of both, field by field: an index that the compiler does not know would need a copy on the stack.
    DEVICE Sums pick(bool second) const {
        return {second ? of[1].sums : of[0].sums, second ? of[1].left : of[0].left, second ? of[1].right : of[0].right,
                second ? of[1].m : of[0].m, second ? of[1].alpha : of[0].alpha};
    }
};

template <int BN>
DEVICE void expert_sums(const TwoSums &two, const int *starts, long long left_stride, long long right_stride, int n, int add) {
    const bool joint = two.of[1].left == two.of[0].left + two.of[0].m && two.of[1].right == two.of[0].right;
    const int all_m = two.of[0].m + two.of[1].m;
    const int tiles_of_first = ((joint ? all_m : two.of[0].m) + 127) / 128;
    const int row_tiles = tiles_of_first + (joint ? 0 : (two.of[1].m + 127) / 128);
    // Tiles of both sums that read the same columns of `right` are neighbors.
    const int column_tiles = (n + BN - 1) / BN, tile = blockIdx.x % (row_tiles * column_tiles);
    const int expert = blockIdx.x / (row_tiles * column_tiles), first_column = tile / row_tiles * BN;
    const bool is_second = tile % row_tiles >= tiles_of_first;
    const Sums of_tile = two.pick(is_second);
    const int m = joint ? all_m : of_tile.m;
    const int first_row = (tile % row_tiles - (is_second ? tiles_of_first : 0)) * 128;
    const int start = starts[expert], inner = starts[expert + 1] - start;
    unsigned char *shared = shared_stages();
    const Operand a = {of_tile.left + start * left_stride + first_row, left_stride, inner, m - first_row};
    const Operand b = {of_tile.right + start * right_stride + first_column, right_stride, inner, n - first_column};
    Tile<BN, true, true> product;
    product.multiply_all(shared_address(shared), a, b, inner);
    product.store_all(shared, [&](int row, int column, float (&value)[8]) {
        row += first_row, column += first_column;
        if (row >= m || column >= n) return;
        const bool of_second = joint ? row >= two.of[0].m : is_second;
        const Sums own = two.pick(of_second);
        const int own_row = joint && of_second ? row - two.of[0].m : row;
        float *to = own.sums + (static_cast<long long>(expert) * own.m + own_row) * n + column;
        float other[8] = {};
        if (add) load8(to, other);
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = other[i] + own.alpha * value[i];
        store8(to, value);
    });
}

#define EXPERT_SUMS(NAME, BN)                                                                                          \
    KERNEL __launch_bounds__(256, 2) NAME(TwoSums two, const int *starts, long long left_stride,                       \
                                          long long right_stride, int n, int add) {                                    \
        expert_sums<BN>(two, starts, left_stride, right_stride, n, add);                                               \
    }
// grid (e * (ceil(m / 128) of both) * ceil(n / BN)), block (256), dynamic shared memory as above.
EXPERT_SUMS(expert_sums_64, 64)
EXPERT_SUMS(expert_sums_128, 128)

// tiles [t]: expert and first row of each tile of 128 rows, in the order of experts; -1 after the last. starts [e + 1].
// grid (1), block (1024), no dynamic shared memory.
KERNEL __launch_bounds__(1024) expert_tiles(int2 *tiles, const int *starts, int experts, int count) {
    __shared__ int ends[1024];
    const int e = threadIdx.x;
    ends[e] = e < experts ? (starts[e + 1] - starts[e] + 127) / 128 : 0;
    __syncthreads();
    for (int step = 1; step < 1024; step *= 2) {
        const int before = e >= step ? ends[e - step] : 0;
        __syncthreads();
        ends[e] += before;
        __syncthreads();
    }
    if (e < experts) {
        const int end = ends[e], first = e == 0 ? 0 : ends[e - 1];
        for (int t = first; t < end; ++t) tiles[t] = make_int2(e, starts[e] + (t - first) * 128);
    }
    for (int t = ends[1023] + e; t < count; t += 1024) tiles[t] = make_int2(-1, 0);
}

// sums [e, d] f32 = the columns of x [s, d] added up over the rows of each expert. grid (ceil(d / 256), e), block (256), no dynamic shared memory.
KERNEL __launch_bounds__(256) expert_column_sums(float *sums, const T *x, const int *starts, long long stride, int d) {
    const int column = blockIdx.x * 256 + threadIdx.x, expert = blockIdx.y;
    if (column >= d) return;
    float sum = 0.0f;
    for (long long row = starts[expert]; row < starts[expert + 1]; ++row) sum += to_float(x[row * stride + column]);
    sums[static_cast<long long>(expert) * d + column] = sum;
}
