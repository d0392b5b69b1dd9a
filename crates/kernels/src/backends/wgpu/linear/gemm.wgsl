// C [m, n] = sum over segments s of scale_s * A_s [m, k_s] * B_s [n, k_s]^T [+ bias of the column] [+ add], in f32.
//
// Values of A, B and C have any strides, so the same text multiplies with a weight, with its transpose, and for its gradient. B_0 may be codes, each
// looked up in a table and multiplied by the scale of its block, which may be a code as well. A thread computes 4 x 4 values of a tile TM x TN.
#if HALF
enable f16;
#end
struct P {
    m: u32, n: u32, tiles: u32, c_row: u32, c_at: u32, add_row: u32, add_at: u32, bias_at: u32, codes_at: u32, scales_at: u32,
    k_0: u32, a_row_0: u32, a_column_0: u32, a_at_0: u32, b_row_0: u32, b_column_0: u32, b_at_0: u32, scale_0: f32,
    k_1: u32, a_row_1: u32, a_column_1: u32, a_at_1: u32, b_row_1: u32, b_column_1: u32, b_at_1: u32, scale_1: f32,
}
var<immediate> p: P;
@binding(_) var<storage, READ> a_0: array<f32>;
#if QUANTIZED
@binding(_) var<storage, READ> b_0: array<u32>;
#if NARROW
@binding(_) var<storage, READ> scales: array<u32>;
@binding(_) var<storage, READ> map: array<f32>;
#else
@binding(_) var<storage, READ> scales: array<f32>;
#end
@binding(_) var<storage, READ> table: array<f32>;
#else
#if HALF
@binding(_) var<storage, READ> b_0: array<f16>;
#else
@binding(_) var<storage, READ> b_0: array<f32>;
#end
#end
#if SECOND
@binding(_) var<storage, READ> a_1: array<f32>;
@binding(_) var<storage, READ> b_1: array<f32>;
#end
#if BIAS
@binding(_) var<storage, READ> bias: array<f32>;
#end
#if ADD
@binding(_) var<storage, READ> add: array<f32>;
#end
@binding(_) var<storage, read_write> c: array<f32>;

const TM = {TM}u;
const TN = {TN}u;
const TK = 16u;
const THREADS = {THREADS}u;
var<workgroup> a_tile: array<f32, TM * TK>;
var<workgroup> b_tile: array<f32, TN * TK>;

fn value_0(i: u32) -> f32 {
#if QUANTIZED
    let word = b_0[p.codes_at + i / {PER_WORD}u];
    let place = (i % {PER_WORD}u) ^ {SWAPPED}u;
    let code = extractBits(word, place * {BITS}u, {BITS}u);
    let block = p.scales_at + i / {BLOCK}u;
#if NARROW
    return table[code] * map[extractBits(scales[block / 4u], (block % 4u) * 8u, 8u)];
#else
    return table[code] * scales[block];
#end
#else
    return f32(b_0[i]);
#end
}
#if SECOND
fn value_1(i: u32) -> f32 { return b_1[i]; }
#end

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let tile = group.x + group.y * 65535u;
    let row_0 = tile / p.tiles * TM;
    let column_0 = tile % p.tiles * TN;
    if (row_0 >= p.m) { return; }
    let row = thread / (TN / 4u) * 4u;
    let column = thread % (TN / 4u) * 4u;
    var sum_0 = vec4<f32>();
    var sum_1 = vec4<f32>();
    var sum_2 = vec4<f32>();
    var sum_3 = vec4<f32>();
#for s in SEGMENTS
    for (var k_0 = 0u; k_0 < p.k_{s}; k_0 += TK) {
        for (var i = thread; i < TM * TK; i += THREADS) {
#if A_ROWS_{s}
            let r = i / TK;
            let k = i % TK;
#else
            let r = i % TM;
            let k = i / TM;
#end
            var value = 0.0;
            if (row_0 + r < p.m && k_0 + k < p.k_{s}) {
                value = a_{s}[p.a_at_{s} + (row_0 + r) * p.a_row_{s} + (k_0 + k) * p.a_column_{s}];
            }
            a_tile[k * TM + r] = value;
        }
        for (var i = thread; i < TN * TK; i += THREADS) {
#if B_ROWS_{s}
            let r = i / TK;
            let k = i % TK;
#else
            let r = i % TN;
            let k = i / TN;
#end
            var value = 0.0;
            if (column_0 + r < p.n && k_0 + k < p.k_{s}) {
                value = p.scale_{s} * value_{s}(p.b_at_{s} + (column_0 + r) * p.b_row_{s} + (k_0 + k) * p.b_column_{s});
            }
            b_tile[k * TN + r] = value;
        }
        workgroupBarrier();
        for (var k = 0u; k < TK; k++) {
            let at_b = k * TN + column;
            let b = vec4<f32>(b_tile[at_b], b_tile[at_b + 1u], b_tile[at_b + 2u], b_tile[at_b + 3u]);
            let at_a = k * TM + row;
            sum_0 += a_tile[at_a] * b;
            sum_1 += a_tile[at_a + 1u] * b;
            sum_2 += a_tile[at_a + 2u] * b;
            sum_3 += a_tile[at_a + 3u] * b;
        }
        workgroupBarrier();
    }
#end
    let sums = array<vec4<f32>, 4>(sum_0, sum_1, sum_2, sum_3);
    for (var r = 0u; r < 4u; r++) {
        for (var i = 0u; i < 4u; i++) {
            let y = row_0 + row + r;
            let x = column_0 + column + i;
            if (y < p.m && x < p.n) {
                var value = sums[r][i];
#if BIAS
                value += bias[p.bias_at + x];
#end
#if ADD
                value += add[p.add_at + y * p.add_row + x];
#end
                c[p.c_at + y * p.c_row + x] = value;
            }
        }
    }
}
