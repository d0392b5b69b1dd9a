// Products of experts' rows with wide matrices, on Hopper: what expert_rows of grouped.cu computes, by blocks that stay and specialize.
//
// A block computes tiles of 128 x 256 one after the other. Its third warpgroup copies tiles to shared memory (WIDE_STAGES of them in flight, full and
// empty barriers), also those of the next tile while the other two warpgroups, which multiply 64 rows each by wgmma, store the last one. Sums are
// f32, in a fixed order, and rounded once. Trade-off: one block per multiprocessor, so this pays only where there are many rows.
//
// Compiled after grouped.cu.

#if HAS_WGMMA
constexpr int WIDE = 256, WIDE_STAGE = (128 + WIDE) * 128, COPIERS = 128;
constexpr int WARP_ROWS_BYTES = 16 * 128; // staging of a warp: 16 rows of 64 values

DEVICE void barrier_start(Word barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void barrier_arrive(Word barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

// Arrives once this thread's copies so far are there.
DEVICE void barrier_arrive_after_copies(Word barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_wait(Word barrier, int phase) {
    asm volatile("{\n\t.reg .pred done;\n\tWAIT:\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@done bra DONE;\n\tbra WAIT;\n\tDONE:\n\t}" ::"r"(barrier),
                 "r"(phase)
                 : "memory");
}

#define F64(i) F16(i), F16(i + 16), F16(i + 32), F16(i + 48)
// The sums of a tile and both descriptors in the text of an instruction.
#define WIDE_OPERANDS \
    " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61," \
    "%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91," \
    "%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116," \
    "%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, adds, 1, 1"
// c[64, 256] = a[64, 16] b[16, 256], plus c if `adds`.
template <bool B_ROWS> DEVICE void multiply_wide(float (&c)[128], unsigned long long a, unsigned long long b, int adds) {
    asm volatile(
        "{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %130, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n256k16" WGMMA_TYPES
        WIDE_OPERANDS ", 0, %131;\n\t}"
        : F64(0), F64(64)
        : "l"(a), "l"(b), "r"(adds), "n"(B_ROWS ? 1 : 0));
}

// Copies ROWS rows of 64 values, as copy_panel does, by the copying warpgroup alone.
template <int ROWS> DEVICE void copy_wide(Word to, const T *from, long long stride, int rows_left, int columns_left) {
    const int thread = threadIdx.x % COPIERS, chunk = thread % 8;
    const bool inside = chunk * 8 < columns_left;
    const T *at = from + thread / 8 * stride + chunk * 8;
    to += thread / 8 * 128 + ((chunk ^ (thread / 8 & 7)) << 4);
#pragma unroll
    for (int i = 0; i < ROWS / 16; ++i) {
        copy_16(to + i * 2048, at, inside && thread / 8 + i * 16 < rows_left);
        at += 16 * stride;
    }
}

// A place in the ring of stages.
struct Ring {
    int stage = 0, phase = 0;
    DEVICE void advance() {
        if (++stage == WIDE_STAGES) stage = 0, phase ^= 1;
    }
};

// The operands of expert_rows, and the number of its tiles of rows.
struct Rows {
    T *out;
    const T *a, *b, *c, *bias;
    const int *starts;
    const int2 *tiles;
    long long out_stride, a_stride, b_stride, b_expert;
    int n, k, count;
};

// Shared memory: the stages, whose barriers say that they are full or empty, and 16 rows of 64 values for each warp that stores.
struct Stages {
    Word first, full, empty;
};

// The tiles of 128 x 256 of this block, one after the other.
struct TileOf {
    int expert, row, rows, column;

    // Moves on to the next tile; false after the last.
    DEVICE bool next(const Rows &of, int &t) {
        const int column_tiles = (of.n + WIDE - 1) / WIDE;
        if (t >= of.count * column_tiles) return false;
        const int2 tile = of.tiles[t / column_tiles];
        if (tile.x < 0) return false;
        expert = tile.x, row = tile.y, rows = of.starts[tile.x + 1] - tile.y, column = t % column_tiles * WIDE;
        t += gridDim.x;
        return true;
    }
};

template <bool B_ROWS> DEVICE void copy_stages(const Rows &of, const Stages &stages) {
    Ring ring;
    TileOf tile;
    for (int t = blockIdx.x; tile.next(of, t);) {
        const T *left = of.a + tile.row * of.a_stride, *matrix = of.b + tile.expert * of.b_expert;
        for (int inner = 0; inner < of.k; inner += STEP, ring.advance()) {
            barrier_wait(stages.empty + 8 * ring.stage, ring.phase ^ 1);
            const Word to = stages.first + ring.stage * WIDE_STAGE;
            copy_wide<128>(to, left + inner, of.a_stride, tile.rows, of.k - inner);
            if constexpr (B_ROWS) {
#pragma unroll
                for (int panel = 0; panel < WIDE / 64; ++panel)
                    copy_wide<64>(to + 128 * 128 + panel * PANEL, matrix + inner * of.b_stride + tile.column + panel * 64, of.b_stride,
                                  of.k - inner, of.n - tile.column - panel * 64);
            } else {
                copy_wide<WIDE>(to + 128 * 128, matrix + tile.column * of.b_stride + inner, of.b_stride, of.n - tile.column, of.k - inner);
            }
            barrier_arrive_after_copies(stages.full + 8 * ring.stage);
        }
    }
}

// Sums of this warpgroup's 64 rows of a tile; hands stages back as soon as they are read.
template <bool B_ROWS> DEVICE void multiply_tile(float (&sums)[128], const Stages &stages, Ring &ring, int k) {
    Word before = 0;
    for (int inner = 0; inner < k; inner += STEP, ring.advance()) {
        barrier_wait(stages.full + 8 * ring.stage, ring.phase);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        const Word at = stages.first + ring.stage * WIDE_STAGE;
        hold(sums);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i)
            multiply_wide<B_ROWS>(sums, descriptor(at + threadIdx.x / 128 * PANEL + i * 32),
                                  descriptor(at + 128 * 128 + (B_ROWS ? i * 2048 : i * 32)), inner + i > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        hold(sums);
        if (inner > 0) {
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (threadIdx.x % 32 == 0) barrier_arrive(before);
        }
        before = stages.empty + 8 * ring.stage;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold(sums);
    if (threadIdx.x % 32 == 0) barrier_arrive(before);
}

// Two neighbors of a tile's sums with what is added to them, rounded.
DEVICE unsigned rounded_pair(const Rows &of, const TileOf &tile, int row, int column, float x, float y) {
    float other_x, other_y;
    if (of.bias != nullptr && column < of.n) {
        unpack2<T>(*reinterpret_cast<const unsigned *>(of.bias + static_cast<long long>(tile.expert) * of.n + column), other_x, other_y);
        x += other_x, y += other_y;
    }
    if (of.c != nullptr && column < of.n && row < tile.rows) {
        unpack2<T>(*reinterpret_cast<const unsigned *>(of.c + (tile.row + row) * of.out_stride + column), other_x, other_y);
        x += other_x, y += other_y;
    }
    return pack2<T>(x, y);
}

// Stores this warp's 16 rows of a tile, 64 columns at a time, through shared memory.
DEVICE void store_tile(const Rows &of, const TileOf &tile, const float (&sums)[128], Word staging) {
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16;
#pragma unroll
    for (int part = 0; part < WIDE / 64; ++part) {
        const int column = tile.column + part * 64;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            unsigned word[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = part * 32 + i * 8 + j * 2;
                word[j] = rounded_pair(of, tile, first_row + lane / 4 + j % 2 * 8, column + i * 16 + j / 2 * 8 + lane % 4 * 2, sums[at],
                                       sums[at + 1]);
            }
            const int row = lane % 16, chunk = i * 2 + lane / 16;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                             staging + row * 128 + ((chunk ^ (row & 7)) << 4)),
                         "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                         : "memory");
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = i * 4 + lane / 8, chunk = lane % 8;
            const uint4 value = load_chunk(staging + row * 128 + ((chunk ^ (row & 7)) << 4));
            if (first_row + row < tile.rows && column + chunk * 8 < of.n)
                *reinterpret_cast<uint4 *>(of.out + (tile.row + first_row + row) * of.out_stride + column + chunk * 8) = value;
        }
        __syncwarp();
    }
}

template <bool B_ROWS> DEVICE void expert_rows_of(const Rows &of) {
    __shared__ unsigned long long barriers[2 * WIDE_STAGES];
    const Word first = shared_address(shared_stages()), full = shared_address(barriers);
    const Stages stages = {first, full, full + 8 * WIDE_STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < WIDE_STAGES; ++i) barrier_start(stages.full + 8 * i, COPIERS), barrier_start(stages.empty + 8 * i, 8);
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        copy_stages<B_ROWS>(of, stages);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        Ring ring;
        TileOf tile;
        for (int t = blockIdx.x; tile.next(of, t);) {
            float sums[128];
            multiply_tile<B_ROWS>(sums, stages, ring, of.k);
            store_tile(of, tile, sums, first + WIDE_STAGES * WIDE_STAGE + threadIdx.x / 32 * WARP_ROWS_BYTES);
        }
    }
}

#define EXPERT_ROWS_WIDE(NAME, B_ROWS)                                                                                 \
    KERNEL __launch_bounds__(384, 1) NAME(T *out, const T *a, const T *b, const T *c, const T *bias, const int *starts, \
                                          const int2 *tiles, long long out_stride, long long a_stride,                 \
                                          long long b_stride, long long b_expert, int n, int k, int count) {           \
        expert_rows_of<B_ROWS>({out, a, b, c, bias, starts, tiles, out_stride, a_stride, b_stride, b_expert, n, k,     \
                                count});                                                                               \
    }
// grid (multiprocessors), block (384), dynamic shared memory: stages, 16 KB and 1,024.
EXPERT_ROWS_WIDE(expert_rows_wide, false)
EXPERT_ROWS_WIDE(expert_rows_across_wide, true)
#endif
