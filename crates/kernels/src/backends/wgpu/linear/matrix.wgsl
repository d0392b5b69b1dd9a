// C [m, n] = factor * (A [m, k] B [n, k]^T + A_1 [m, ranks] B_1 [n, ranks]^T) [+ bias of the column] [+ add], by 16 x 16 matrices of a subgroup.
//
// A and A_1 are float16. So is B_1, or it is f32 as the matrix of an adapter; so is B, or it is codes of 4 bits, each pair looked up in a table of
// bytes on the way into workgroup memory. The factor is a product of the powers of two by which A, or each row of it (FACTORS), and B were divided. A_TURNED, TURNED: A is stored
// as [k, m], B and B_1 as [k, n]. Sums are f32. A workgroup computes BM x BN values, a subgroup FM x FN matrices of them; BK is 32, of which k is a
// multiple. If k is divided, workgroups with the same values have parts of it, and C is [parts, m, n]. EMULATED: the same text with matrices as plain
// code, for adapters without them.
enable f16;
#if EMULATED
#else
enable wgpu_cooperative_matrix;
#end
struct H8 { a: vec4<f16>, b: vec4<f16> }
struct P {
    m: u32, n: u32, k: u32, part: u32, row_tiles: u32, tiles: u32, c_row: u32, c_at: u32, add_row: u32, add_at: u32, bias_at: u32,
    a_row: u32, b_row: u32, b_at: u32, scales_at: u32, ranks: u32, a_1_row: u32, b_1_row: u32, scale: f32,
}
var<immediate> p: P;
@binding(_) var<storage, READ> a: array<H8>;
@binding(_) var<storage, READ> factor_a: array<f32>;
#if QUANTIZED
#if WORDS_4
@binding(_) var<storage, READ> b: array<vec4<u32>>;
#else
@binding(_) var<storage, READ> b: array<vec2<u32>>;
#end
#if NARROW
@binding(_) var<storage, READ> scales: array<u32>;
@binding(_) var<storage, READ> map: array<f32>;
#else
@binding(_) var<storage, READ> scales: array<f32>;
#end
@binding(_) var<storage, READ> table: array<f32>;
#else
#if WIDE_B
@binding(_) var<storage, READ> b: array<vec4<f32>>;
#else
@binding(_) var<storage, READ> b: array<H8>;
#end
#if FACTOR_B
@binding(_) var<storage, READ> factor_b: array<f32>;
#end
#end
#if SECOND
@binding(_) var<storage, READ> a_1: array<H8>;
#if WIDE_1
@binding(_) var<storage, READ> b_1: array<vec4<f32>>;
#else
@binding(_) var<storage, READ> b_1: array<H8>;
#end
#end
#if BIAS
@binding(_) var<storage, READ> bias: array<f32>;
#end
#if ADD
#if VECTORS
@binding(_) var<storage, READ> add: array<vec4<f32>>;
#else
@binding(_) var<storage, READ> add: array<f32>;
#end
#end
#if VECTORS
@binding(_) var<storage, read_write> c: array<vec4<f32>>;
#else
@binding(_) var<storage, read_write> c: array<f32>;
#end

const BM = {BM}u;
const SQUARE = 8u;
const BN = {BN}u;
const BK = 32u;
const THREADS = {THREADS}u;
const LANES = {LANES}u;
// Values from one row of a tile to the next: 16 bytes more than the row, so that rows begin in different banks.
const PITCH = BK + 8u;
const WIDE = BN + 8u;
const TALL = BM + 8u;
#if A_TURNED
var<workgroup> tile_a: array<vec4<f16>, BK * TALL / 4u>;
#else
var<workgroup> tile_a: array<vec4<f16>, BM * PITCH / 4u>;
#end
var<workgroup> tile_b: array<vec4<f16>, max(BN * PITCH, BK * WIDE) / 4u>;
var<workgroup> results: array<vec4<f32>, THREADS / LANES * 64u>;
#if QUANTIZED
var<workgroup> pairs: array<vec2<f16>, 256>;

fn scale_of(value: u32) -> f32 {
    let block = p.scales_at + value / {BLOCK}u;
#if NARROW
    return map[extractBits(scales[block / 4u], (block % 4u) * 8u, 8u)];
#else
    return scales[block];
#end
}

fn values_of(word: u32, scale: vec2<f16>) -> H8 {
    return H8(
        vec4<f16>(pairs[word & 255u] * scale, pairs[(word >> 8u) & 255u] * scale),
        vec4<f16>(pairs[(word >> 16u) & 255u] * scale, pairs[word >> 24u] * scale));
}
#end

// Matrices of adapters may be f32; they are below 64, so 1,024 times as much is float16.
#if QUANTIZED
#else
fn b_values(at: u32) -> H8 {
#if WIDE_B
    return H8(vec4<f16>(1024.0 * b[2u * at]), vec4<f16>(1024.0 * b[2u * at + 1u]));
#else
    return b[at];
#end
}
#end
#if SECOND
fn b_1_values(at: u32) -> H8 {
#if WIDE_1
    return H8(vec4<f16>(1024.0 * b_1[2u * at]), vec4<f16>(1024.0 * b_1[2u * at + 1u]));
#else
    return b_1[at];
#end
}
#end

fn put_a(at: u32, value: H8) {
    tile_a[at] = value.a;
    tile_a[at + 1u] = value.b;
}
fn put_b(at: u32, value: H8) {
    tile_b[at] = value.a;
    tile_b[at + 1u] = value.b;
}

#if EMULATED
// Adds a product of two 16 x 16 matrices, whose places are in vectors of four; a lane has half a row of the result.
fn multiply(sum: ptr<function, array<f32, 8>>, at_a: u32, at_b: u32, lane: u32, a_is_turned: bool, b_is_turned: bool) {
    let row = lane / 2u;
    for (var e = 0u; e < 8u; e++) {
        let column = lane % 2u * 8u + e;
        var value = (*sum)[e];
        for (var i = 0u; i < 16u; i++) {
            var from_a = at_a * 4u + row * PITCH + i;
            if (a_is_turned) { from_a = at_a * 4u + i * TALL + row; }
            var from_b = at_b * 4u + column * PITCH + i;
            if (b_is_turned) { from_b = at_b * 4u + i * WIDE + column; }
            value += f32(tile_a[from_a / 4u][from_a % 4u]) * f32(tile_b[from_b / 4u][from_b % 4u]);
        }
        (*sum)[e] = value;
    }
}
#end

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
#use tile_order
    let row_0 = row_tile * BM;
    let column_0 = column_tile * BN;
    let k_0 = part * p.part;
    if (k_0 >= p.k) { return; }
    let subgroup = thread / LANES;
    let lane = thread % LANES;
    let sub_row = subgroup / {SN}u * ({FM}u * 16u);
    let sub_column = subgroup % {SN}u * ({FN}u * 16u);
#for i in FM
#for j in FN
#if EMULATED
    var sum_{i}_{j} = array<f32, 8>();
#else
    var sum_{i}_{j}: coop_mat16x16<f32, C>;
#end
#end
#end
#if QUANTIZED
    for (var i = thread; i < 256u; i += THREADS) {
        let low = f16(table[i & 15u]);
        let high = f16(table[i >> 4u]);
#if SWAPPED
        pairs[i] = vec2<f16>(high, low);
#else
        pairs[i] = vec2<f16>(low, high);
#end
    }
    workgroupBarrier();
#end
#for i in NA
    let part_a_{i} = thread + {i}u * THREADS;
#if A_TURNED
    let to_a_{i} = (part_a_{i} / (BM / 8u) * TALL + part_a_{i} % (BM / 8u) * 8u) / 4u;
    let from_a_{i} = ((k_0 + part_a_{i} / (BM / 8u)) * p.a_row + row_0) / 8u + part_a_{i} % (BM / 8u);
#else
    let to_a_{i} = (part_a_{i} / 4u * PITCH + part_a_{i} % 4u * 8u) / 4u;
    let from_a_{i} = ((row_0 + part_a_{i} / 4u) * p.a_row + k_0) / 8u + part_a_{i} % 4u;
#end
    var next_a_{i} = a[from_a_{i}];
#end
#if A_TURNED
    let step_a = BK * p.a_row / 8u;
#else
    let step_a = BK / 8u;
#end
#if QUANTIZED
    // {WORDS} words of a row of B, eight codes each.
#if TURNED
    let row_b = thread / (BN / 8u / {WORDS}u);
    let column_b = thread % (BN / 8u / {WORDS}u) * {WORDS}u;
    let to_b = (row_b * WIDE + column_b * 8u) / 4u;
    let from_b = p.b_at + (k_0 + row_b) * p.b_row + column_0 + column_b * 8u;
    let step_b = BK * p.b_row;
#else
    let row_b = thread / (BK / 8u / {WORDS}u);
    let column_b = thread % (BK / 8u / {WORDS}u) * {WORDS}u;
    let to_b = (row_b * PITCH + column_b * 8u) / 4u;
    let from_b = p.b_at + (column_0 + row_b) * p.b_row + k_0 + column_b * 8u;
    let step_b = BK;
#end
    var next_b = b[from_b / (8u * {WORDS}u)];
    var next_scale = scale_of(from_b);
#else
#for i in NB
    let part_b_{i} = thread + {i}u * THREADS;
#if TURNED
    let to_b_{i} = (part_b_{i} / (BN / 8u) * WIDE + part_b_{i} % (BN / 8u) * 8u) / 4u;
    let from_b_{i} = (p.b_at + (k_0 + part_b_{i} / (BN / 8u)) * p.b_row + column_0) / 8u + part_b_{i} % (BN / 8u);
#else
    let to_b_{i} = (part_b_{i} / 4u * PITCH + part_b_{i} % 4u * 8u) / 4u;
    let from_b_{i} = (p.b_at + (column_0 + part_b_{i} / 4u) * p.b_row + k_0) / 8u + part_b_{i} % 4u;
#end
    var next_b_{i} = b_values(from_b_{i});
#end
#if TURNED
    let step_b = BK * p.b_row / 8u;
#else
    let step_b = BK / 8u;
#end
#end
    let steps = (min(k_0 + p.part, p.k) - k_0) / BK;
    for (var step = 0u; step < steps; step++) {
#for i in NA
        put_a(to_a_{i}, next_a_{i});
#end
#if QUANTIZED
        {
            let scale = vec2<f16>(f16(next_scale), f16(next_scale));
#for w in WORDS
            put_b(to_b + 2u * {w}u, values_of(next_b[{w}], scale));
#end
        }
#else
#for i in NB
        put_b(to_b_{i}, next_b_{i});
#end
#end
        workgroupBarrier();
        if (step + 1u < steps) {
#for i in NA
            next_a_{i} = a[from_a_{i} + (step + 1u) * step_a];
#end
#if QUANTIZED
            let at = from_b + (step + 1u) * step_b;
            next_b = b[at / (8u * {WORDS}u)];
            next_scale = scale_of(at);
#else
#for i in NB
            next_b_{i} = b_values(from_b_{i} + (step + 1u) * step_b);
#end
#end
        }
#use products
        workgroupBarrier();
    }
#if SECOND
    // Once, if k is divided.
    let second_steps = select(0u, p.ranks / BK, k_0 + p.part >= p.k);
    for (var step = 0u; step < second_steps; step++) {
        for (var i = thread; i < BM * 4u; i += THREADS) {
            put_a((i / 4u * PITCH + i % 4u * 8u) / 4u, a_1[((row_0 + i / 4u) * p.a_1_row + step * BK) / 8u + i % 4u]);
        }
        for (var i = thread; i < BN * 4u; i += THREADS) {
#if TURNED
            put_b((i / (BN / 8u) * WIDE + i % (BN / 8u) * 8u) / 4u, b_1_values(((step * BK + i / (BN / 8u)) * p.b_1_row + column_0) / 8u + i % (BN / 8u)));
#else
            put_b((i / 4u * PITCH + i % 4u * 8u) / 4u, b_1_values(((column_0 + i / 4u) * p.b_1_row + step * BK) / 8u + i % 4u));
#end
        }
        workgroupBarrier();
#use products
        workgroupBarrier();
    }
#end
#if FACTORS
    var factor = p.scale;
#else
    var factor = p.scale * factor_a[0];
#end
#if FACTOR_B
    factor *= factor_b[0];
#end
    let pitch = 4u;
    // Each matrix passes through memory of its subgroup, whose lanes have half a row of it.
    let place = subgroup * 64u;
    let result_row = lane / 2u;
    let result_column = lane % 2u * 2u;
#for i in FM
#for j in FN
    {
#if EMULATED
        let sums = sum_{i}_{j};
        results[place + result_row * 4u + result_column] = vec4<f32>(sums[0], sums[1], sums[2], sums[3]);
        results[place + result_row * 4u + result_column + 1u] = vec4<f32>(sums[4], sums[5], sums[6], sums[7]);
#else
        let value = sum_{i}_{j};
        coopStoreT(value, &results[place], pitch);
#end
#if EMULATED
        workgroupBarrier();
#else
        subgroupBarrier();
#end
        let row = row_0 + sub_row + {i}u * 16u + result_row;
        if (lane < 32u && row < p.m) {
#if FACTORS
            let of_row = factor * factor_a[row];
#else
            let of_row = factor;
#end
            for (var v = 0u; v < 2u; v++) {
                let column = column_0 + sub_column + {j}u * 16u + result_column * 4u + v * 4u;
                var values = results[place + result_row * 4u + result_column + v] * of_row;
#if VECTORS
                if (column < p.n) {
#if BIAS
                    let of_bias = p.bias_at + column;
                    values += vec4<f32>(bias[of_bias], bias[of_bias + 1u], bias[of_bias + 2u], bias[of_bias + 3u]);
#end
#if ADD
                    values += add[(p.add_at + row * p.add_row + column) / 4u];
#end
                    c[(p.c_at + (part * p.m + row) * p.c_row + column) / 4u] = values;
                }
#else
                for (var e = 0u; e < 4u; e++) {
                    if (column + e < p.n) {
                        var value = values[e];
#if BIAS
                        value += bias[p.bias_at + column + e];
#end
#if ADD
                        value += add[p.add_at + row * p.add_row + column + e];
#end
                        c[p.c_at + (part * p.m + row) * p.c_row + column + e] = value;
                    }
                }
#end
            }
        }
#if EMULATED
        workgroupBarrier();
#else
        subgroupBarrier();
#end
    }
#end
#end
}
