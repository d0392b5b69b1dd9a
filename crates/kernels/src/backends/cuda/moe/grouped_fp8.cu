// Products of experts' rows in codes of 8-bit floats, on Hopper: tiles, sums and stores of grouped_hopper.cu, over rows of E4M3 codes. Scales of
// rows and of columns go onto the sums before these are rounded.
//
// One thread of the third warpgroup copies boxes of 128 codes to shared memory by the tensor memory accelerator, 48 KB per stage: cp.async by a
// warpgroup of threads took 1.3 to 1.9 times as long. Rows after an expert's last are the next one's, whose products are not stored. Both
// operands have the inner dimension along their rows, since wgmma reads 8-bit ones in no other way. Trade-off: wgmma keeps some 14
// bits of sums of 8-bit products, as cuBLASLt's fast accumulation does, and nothing here adds them up in f32 in between. Two blocks
// that share a weight's boxes (a cluster) were slower: an odd tile of an expert is computed twice, and each waits for the other.
//
// Compiled after grouped_hopper.cu. k and the strides of codes are multiples of 32, n and the stride of the result of 8, and all addresses lie
// on the 16-byte grid.

#if HAS_WGMMA
constexpr int CODES = 128; // of a row of a stage

struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// Arrives, and lets the barrier wait for this many bytes of copies too.
DEVICE void barrier_expect(Word barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Copies a box of a matrix from a byte of a row on.
DEVICE void copy_box(Word to, const TensorMap &map, Word barrier, int byte, int row, int matrix) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(byte), "r"(row), "r"(matrix)
                 : "memory");
}

// Copies bytes, a multiple of 16.
DEVICE void copy_bytes(Word to, const void *from, int bytes, Word barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}

// c[64, 256] = a[64, 32] b[32, 256], plus c if `adds`.
DEVICE void multiply_codes(float (&c)[128], unsigned long long a, unsigned long long b, int adds) {
    asm volatile(
        "{\n\t.reg .pred adds;\n\tsetp.ne.b32 adds, %130, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3"
        WIDE_OPERANDS ";\n\t}"
        : F64(0), F64(64)
        : "l"(a), "l"(b), "r"(adds));
}

// Scales of rows [s], of each expert's columns [e, n], and where the latter wait in shared memory: WIDE floats per stage.
struct Scales {
    const float *rows, *columns;
    Word waiting;
};

// Copies all tiles of this block, one thread alone. A tile's column scales come with its last stage.
DEVICE void copy_codes(const Rows &of, const TensorMap &a, const TensorMap &b, const Scales &scales, const Stages &stages) {
    Ring ring;
    TileOf tile;
    for (int t = blockIdx.x; tile.next(of, t);) {
        for (int inner = 0; inner < of.k; inner += CODES, ring.advance()) {
            const Word full = stages.full + 8 * ring.stage, to = stages.first + ring.stage * WIDE_STAGE;
            const int of_scales = inner + CODES >= of.k ? min(WIDE, of.n - tile.column) * 4 : 0;
            barrier_wait(stages.empty + 8 * ring.stage, ring.phase ^ 1);
            barrier_expect(full, WIDE_STAGE + of_scales);
            copy_box(to, a, full, inner, tile.row, 0);
            copy_box(to + 128 * 128, b, full, inner, tile.column, tile.expert);
            if (of_scales > 0)
                copy_bytes(scales.waiting + ring.stage * WIDE * 4,
                           scales.columns + static_cast<long long>(tile.expert) * of.n + tile.column, of_scales, full);
        }
    }
}

// Begins products i of a stage whose addresses are given.
DEVICE void begin_codes(float (&sums)[128], Word at, int i, int adds) {
    multiply_codes(sums, descriptor(at + threadIdx.x / 128 * PANEL + i * 32), descriptor(at + 128 * 128 + i * 32), adds);
}

// Sums of this warpgroup's 64 rows of a tile. Hands all stages back but the last, whose scales are still to be read.
DEVICE void multiply_codes_of_tile(float (&sums)[128], const Stages &stages, Ring &ring, int k) {
    Word before = 0;
    int inner = 0;
    for (; inner + CODES <= k; inner += CODES, ring.advance()) {
        barrier_wait(stages.full + 8 * ring.stage, ring.phase);
        hold(sums);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < 4; ++i) begin_codes(sums, stages.first + ring.stage * WIDE_STAGE, i, inner + i > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        hold(sums);
        if (inner > 0) {
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (threadIdx.x % 32 == 0) barrier_arrive(before);
        }
        before = stages.empty + 8 * ring.stage;
    }
    if (inner < k) {
        barrier_wait(stages.full + 8 * ring.stage, ring.phase);
        for (int i = 0; inner + i * 32 < k; ++i) {
            hold(sums);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            begin_codes(sums, stages.first + ring.stage * WIDE_STAGE, i, inner + i > 0);
            asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
            hold(sums);
        }
        if (inner > 0 && threadIdx.x % 32 == 0) barrier_arrive(before);
        ring.advance();
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold(sums);
}

// Applies both scales, and hands the last stage back. `after`: the place after it.
DEVICE void scale_tile(float (&sums)[128], const Scales &scales, const TileOf &tile, const Stages &stages, const Ring &after) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    const int last = (after.stage + WIDE_STAGES - 1) % WIDE_STAGES;
    const float upper = row < tile.rows ? scales.rows[tile.row + row] : 0.0f;
    const float lower = row + 8 < tile.rows ? scales.rows[tile.row + row + 8] : 0.0f;
#pragma unroll
    for (int i = 0; i < WIDE / 8; ++i) {
        float x, y;
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                     : "=f"(x), "=f"(y) : "r"(scales.waiting + (last * WIDE + i * 8 + lane % 4 * 2) * 4));
        sums[i * 4] *= upper * x, sums[i * 4 + 1] *= upper * y, sums[i * 4 + 2] *= lower * x, sums[i * 4 + 3] *= lower * y;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(stages.empty + 8 * last);
}

// out [s, n] = a [s, k] b_e [n, k] transposed, times the scale of the row [s] and that of the expert's column [e, n], plus c [s, n] and the expert's
// bias [e, n] if given. Tiles as for expert_rows. Boxes of a have 128 rows, those of b 256. grid (multiprocessors), block (384), dynamic shared memory:
// as for expert_rows_wide, and 1,024 per stage.
KERNEL __launch_bounds__(384, 1) expert_codes_wide(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, T *out,
                                                   const T *c, const T *bias, const float *row_scales, const float *column_scales,
                                                   const int *starts, const int2 *tiles, long long out_stride, int n, int k,
                                                   int count) {
    __shared__ unsigned long long barriers[2 * WIDE_STAGES];
    const Word first = shared_address(shared_stages()), full = shared_address(barriers), staging = first + WIDE_STAGES * WIDE_STAGE;
    const Stages stages = {first, full, full + 8 * WIDE_STAGES};
    const Rows of = {out, nullptr, nullptr, c, bias, starts, tiles, out_stride, 0, 0, 0, n, k, count};
    const Scales scales = {row_scales, column_scales, staging + 8 * WARP_ROWS_BYTES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < WIDE_STAGES; ++i) barrier_start(stages.full + 8 * i, 1), barrier_start(stages.empty + 8 * i, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if (threadIdx.x == 256) copy_codes(of, a, b, scales, stages);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    Ring ring;
    TileOf tile;
    for (int t = blockIdx.x; tile.next(of, t);) {
        float sums[128];
        multiply_codes_of_tile(sums, stages, ring, k);
        scale_tile(sums, scales, tile, stages, ring);
        store_tile(of, tile, sums, staging + threadIdx.x / 32 * WARP_ROWS_BYTES);
    }
}
#endif
