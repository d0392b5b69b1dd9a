// C [m, n] = sum over segments s of scale_s * A_s [m, k_s] * B_s [n, k_s]^T [+ bias of the column] [+ add], in f32.
//
// Values of A, B and C have any strides, so the same text multiplies with a weight, with its transpose, and for its gradient. B_0 may be codes, each
// looked up in a table and multiplied by the scale of its block, which may be a code as well. A thread computes PM x PN vectors of 4 x 4 values, a
// workgroup TM x TN values. SPLIT: workgroups with the same values have parts of k, and C is [parts, m, n].
#if HALF
enable f16;
#end
struct P {
    m: u32, n: u32, row_tiles: u32, tiles: u32, part: u32, c_row: u32, c_at: u32, add_row: u32, add_at: u32, bias_at: u32, codes_at: u32, scales_at: u32,
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
const SQUARE = 8u;
const TN = {TN}u;
const TK = 16u;
const THREADS = {THREADS}u;
// Threads along a row of the tile, and values between a thread's vectors.
const ACROSS = {ACROSS}u;
const DOWN = THREADS / ACROSS;
var<workgroup> a_tile: array<vec4<f32>, TM * TK / 4u>;
var<workgroup> b_tile: array<vec4<f32>, TN * TK / 4u>;
#if QUANTIZED
var<workgroup> levels: array<f32, {LEVELS}>;

fn scale_of(i: u32) -> f32 {
    let block = p.scales_at + i / {BLOCK}u;
#if NARROW
    return map[extractBits(scales[block / 4u], (block % 4u) * 8u, 8u)];
#else
    return scales[block];
#end
}
#end

#if QUANTIZED
fn level_of(word: u32, i: u32) -> f32 {
    return levels[extractBits(word, ((i % {PER_WORD}u) ^ {SWAPPED}u) * {BITS}u, {BITS}u)];
}
#end

// Four adjacent values of B.
fn four_0(i: u32) -> vec4<f32> {
#if QUANTIZED
#if FOURS
    let word = b_0[p.codes_at + i / {PER_WORD}u];
    return scale_of(i) * vec4<f32>(level_of(word, i), level_of(word, i + 1u), level_of(word, i + 2u), level_of(word, i + 3u));
#else
    var values = vec4<f32>();
#for e in FOUR
    values[{e}] = scale_of(i + {e}u) * level_of(b_0[p.codes_at + (i + {e}u) / {PER_WORD}u], i + {e}u);
#end
    return values;
#end
#else
    return vec4<f32>(f32(b_0[i]), f32(b_0[i + 1u]), f32(b_0[i + 2u]), f32(b_0[i + 3u]));
#end
}
#if SECOND
fn four_1(i: u32) -> vec4<f32> { return vec4<f32>(b_1[i], b_1[i + 1u], b_1[i + 2u], b_1[i + 3u]); }
#end

// Keeps the values whose numbers are below a limit.
fn below(values: vec4<f32>, first: u32, limit: u32) -> vec4<f32> {
    return select(vec4<f32>(), values, (vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u)) < vec4<u32>(limit));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
#use tile_order
    let row_0 = row_tile * TM;
    let column_0 = column_tile * TN;
    if (part * p.part >= p.k_0) { return; }
    let y = thread / ACROSS;
    let x = thread % ACROSS;
#for i in PM
#for r in FOUR
#for j in PN
    var sum_{i}_{r}_{j} = vec4<f32>();
#end
#end
#end
#if QUANTIZED
    for (var i = thread; i < {LEVELS}u; i += THREADS) { levels[i] = table[i]; }
    workgroupBarrier();
#end
#for s in SEGMENTS
    {
#if FIRST_{s}
    let end = min((part + 1u) * p.part, p.k_{s});
    let start = part * p.part;
#else
    let end = p.k_{s};
    let start = 0u;
#end
    // Four values of this thread for each of its places in the tiles: of four columns of k where those are adjacent, else of four rows.
#for l in LA
    let part_a_{l} = thread + {l}u * THREADS;
#if A_ROWS_{s}
    let r_a_{l} = part_a_{l} / (TK / 4u);
    let k_a_{l} = part_a_{l} % (TK / 4u) * 4u;
#else
    let r_a_{l} = part_a_{l} % (TM / 4u) * 4u;
    let k_a_{l} = part_a_{l} / (TM / 4u);
#end
    var next_a_{l} = vec4<f32>();
#end
#for l in LB
    let part_b_{l} = thread + {l}u * THREADS;
#if B_ROWS_{s}
    let r_b_{l} = part_b_{l} / (TK / 4u);
    let k_b_{l} = part_b_{l} % (TK / 4u) * 4u;
#else
    let r_b_{l} = part_b_{l} % (TN / 4u) * 4u;
    let k_b_{l} = part_b_{l} / (TN / 4u);
#end
    var next_b_{l} = vec4<f32>();
#end
    for (var k_0 = start; k_0 < end; k_0 += TK) {
#for l in LA
        {
            let at = p.a_at_{s} + (row_0 + r_a_{l}) * p.a_row_{s} + (k_0 + k_a_{l}) * p.a_column_{s};
            let values = vec4<f32>(a_{s}[at], a_{s}[at + 1u], a_{s}[at + 2u], a_{s}[at + 3u]);
#if A_ROWS_{s}
            next_a_{l} = below(values, k_0 + k_a_{l}, select(0u, end, row_0 + r_a_{l} < p.m));
#else
            next_a_{l} = below(values, row_0 + r_a_{l}, select(0u, p.m, k_0 + k_a_{l} < end));
#end
        }
#end
#for l in LB
        {
            let at = p.b_at_{s} + (column_0 + r_b_{l}) * p.b_row_{s} + (k_0 + k_b_{l}) * p.b_column_{s};
            let values = p.scale_{s} * four_{s}(at);
#if B_ROWS_{s}
            next_b_{l} = below(values, k_0 + k_b_{l}, select(0u, end, column_0 + r_b_{l} < p.n));
#else
            next_b_{l} = below(values, column_0 + r_b_{l}, select(0u, p.n, k_0 + k_b_{l} < end));
#end
        }
#end
        workgroupBarrier();
#for l in LA
#if A_ROWS_{s}
#for e in FOUR
        a_tile[((k_a_{l} + {e}u) * TM + r_a_{l}) / 4u][r_a_{l} % 4u] = next_a_{l}[{e}];
#end
#else
        a_tile[(k_a_{l} * TM + r_a_{l}) / 4u] = next_a_{l};
#end
#end
#for l in LB
#if B_ROWS_{s}
#for e in FOUR
        b_tile[((k_b_{l} + {e}u) * TN + r_b_{l}) / 4u][r_b_{l} % 4u] = next_b_{l}[{e}];
#end
#else
        b_tile[(k_b_{l} * TN + r_b_{l}) / 4u] = next_b_{l};
#end
#end
        workgroupBarrier();
        for (var k = 0u; k < TK; k++) {
#for j in PN
            let b_{j} = b_tile[k * (TN / 4u) + {j}u * ACROSS + x];
#end
#for i in PM
            let a_{i} = a_tile[k * (TM / 4u) + {i}u * DOWN + y];
#for r in FOUR
#for j in PN
            sum_{i}_{r}_{j} += a_{i}[{r}] * b_{j};
#end
#end
#end
        }
    }
    }
#end
#for i in PM
#for r in FOUR
    {
        let row = row_0 + ({i}u * DOWN + y) * 4u + {r}u;
#for j in PN
        for (var e = 0u; e < 4u; e++) {
            let column = column_0 + ({j}u * ACROSS + x) * 4u + e;
            if (row < p.m && column < p.n) {
                var value = sum_{i}_{r}_{j}[e];
#if BIAS
                value += bias[p.bias_at + column];
#end
#if ADD
                value += add[p.add_at + row * p.add_row + column];
#end
                c[p.c_at + (part * p.m + row) * p.c_row + column] = value;
            }
        }
#end
    }
#end
#end
}
