// Causal attention inside documents by 16 x 16 matrices of a subgroup, with memory linear in the tokens. The modes are those of attention.wgsl.
//
// A workgroup computes ROWS rows, in steps of OTHERS others; two subgroups share 16 rows: each computes half of the scores of a step and half of
// the columns of a result. Operands are float16, divided by a power of two each. Rows and others, by mode:
//   FORWARD  queries; keys, values            scores S, weights P; o = P V
//   QUERIES  queries, d_o; keys, values       S, dP = d_o V^T; d_q = dS K
//   KEYS     keys, values; queries, d_o       S^T, dP^T; d_k = dS^T Q, d_v = P^T d_o
// FORWARD: weights are relative to the largest score of the first step, as long as no later one is larger by more than 8; then sums begin again.
// EMULATED: the same text with matrices as plain code.
enable f16;
#if EMULATED
#else
enable wgpu_cooperative_matrix;
#end
struct P {
    tokens: u32, documents: u32, heads: u32, sharing: u32, window: u32, x_0_row: u32, x_1_row: u32, y_0_row: u32, y_1_row: u32, scale: f32, cap: f32,
}
var<immediate> p: P;
struct H8 { a: vec4<f16>, b: vec4<f16> }
@binding(_) var<storage, READ> x_0: array<vec4<f16>>;
@binding(_) var<storage, READ> factor_x_0: array<f32>;
@binding(_) var<storage, READ> y_0: array<H8>;
@binding(_) var<storage, READ> factor_y_0: array<f32>;
#if BACKWARD
@binding(_) var<storage, READ> x_1: array<vec4<f16>>;
@binding(_) var<storage, READ> factor_x_1: array<f32>;
#end
@binding(_) var<storage, READ> y_1: array<H8>;
@binding(_) var<storage, READ> factor_y_1: array<f32>;
@binding(_) var<storage, READ> boundaries: array<i32>;
#if SINKS
@binding(_) var<storage, READ> sinks: array<f32>;
#end
#if BACKWARD
@binding(_) var<storage, READ> log_sums: array<f32>;
@binding(_) var<storage, READ> deltas: array<f32>;
@binding(_) var<storage, read_write> result_0: array<f32>;
#if KEYS
@binding(_) var<storage, read_write> result_1: array<f32>;
#end
#else
@binding(_) var<storage, read_write> result_1: array<f32>;
@binding(_) var<storage, read_write> log_sums: array<f32>;
#end

const D = {D}u;
const ROWS = 64u;
const OTHERS = {OTHERS}u;
const LANES = {LANES}u;
const THREADS = 8u * LANES;
// Threads per row, and its columns for each.
const SHARERS = THREADS / ROWS;
const COLUMNS = OTHERS / SHARERS;
const PITCH = D + 8u;
const S_PITCH = OTHERS + 4u;
const W_PITCH = OTHERS + 8u;
// Puts dS near 1 where d_o and values are as large as their factors say.
const SHRUNK = 9.5367431640625e-7;
var<workgroup> tile_0: array<vec4<f16>, OTHERS * PITCH / 4u>;
var<workgroup> tile_1: array<vec4<f16>, OTHERS * PITCH / 4u>;
var<workgroup> scores_0: array<vec4<f32>, ROWS * S_PITCH / 4u>;
var<workgroup> weights_1: array<vec4<f16>, ROWS * W_PITCH / 4u>;
var<workgroup> parts: array<f32, THREADS>;
#if BACKWARD
var<workgroup> scores_1: array<vec4<f32>, ROWS * S_PITCH / 4u>;
var<workgroup> weights_0: array<vec4<f16>, ROWS * W_PITCH / 4u>;
#end
#if KEYS
var<workgroup> statistics: array<vec2<f32>, OTHERS>;
#end
#if FORWARD
// Matrices must begin at multiples of 16 bytes, so all variables have such a size.
var<workgroup> grows: vec4<u32>;
var<workgroup> by_row: array<f32, ROWS>;
#end

#if EMULATED
// A lane has half a row of a 16 x 16 result. Adds the product of 16 columns of rows and of others.
#for t in SCORES
fn add_scores_{t}(sum: ptr<function, array<f32, 8>>, at_x: u32, x_row: u32, at_y: u32, lane: u32) {
    for (var e = 0u; e < 8u; e++) {
        for (var i = 0u; i < 16u; i++) {
            let from_x = at_x * 4u + lane / 2u * x_row + i;
            let from_y = at_y * 4u + (lane % 2u * 8u + e) * PITCH + i;
            (*sum)[e] += f32(x_{t}[from_x / 4u][from_x % 4u]) * f32(tile_{t}[from_y / 4u][from_y % 4u]);
        }
    }
}
#end
#for t in PARTS
#if SKIP_{t}
#else
// Adds the product of 16 weights of rows and of 16 others.
fn add_values_{t}(sum: ptr<function, array<f32, 8>>, at_w: u32, at_y: u32, lane: u32) {
    for (var e = 0u; e < 8u; e++) {
        for (var i = 0u; i < 16u; i++) {
            let from_w = at_w * 4u + lane / 2u * W_PITCH + i;
            let from_y = at_y * 4u + i * PITCH + lane % 2u * 8u + e;
            (*sum)[e] += f32(weights_{t}[from_w / 4u][from_w % 4u]) * f32(tile_{t}[from_y / 4u][from_y % 4u]);
        }
    }
}
#end
#end
#end

#use document

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let head = group.y;
    let subgroup = thread / LANES;
    let lane = thread % LANES;
    let first = group.x * ROWS;
    // Matrices of this subgroup: their first row, and which half they are.
    let m_row = subgroup / 2u * 16u;
    let half = subgroup % 2u;
    // Scores of this thread.
    let row = thread / SHARERS;
    let s_column = thread % SHARERS * COLUMNS;
    let token = first + row;
    let range = document(min(token, p.tokens - 1u));
    let scale = p.scale * factor_x_0[0] * factor_y_0[0];
#if EMULATED
#else
    var none: coop_mat16x16<f32, C>;
#end
#for t in PARTS
#if SKIP_{t}
#else
#for d in FD
#if EMULATED
    var sum_{t}_{d} = array<f32, 8>();
#else
    var sum_{t}_{d}: coop_mat16x16<f32, C>;
#end
#end
#end
#end
#for t in SCORES
#for k in KD
    let from_x_{t}_{k} = ((first + m_row) * p.x_{t}_row + head * D + {k}u * 16u) / 4u;
#if EMULATED
#else
    let x_{t}_{k} = coopLoadT<coop_mat16x16<f16, A>>(&x_{t}[from_x_{t}_{k}], p.x_{t}_row / 4u);
#end
#end
#end
#if FORWARD
    var most = -1e30;
    var total = 0.0;
#else
    // The product of both factors of dP may be too small for f32 where all gradients are zero.
    let d_factor = max(factor_x_1[0] * factor_y_1[0], 1e-37);
#end
#if KEYS
    let last = min(first + ROWS, p.tokens) - 1u;
    let low = first;
    var high = document(last).y;
    if (p.window != 0u) { high = min(high, last + p.window); }
    // The queries that see a key.
    let seen_from = token;
    var seen_to = min(range.y, high);
    if (p.window != 0u) { seen_to = min(seen_to, token + p.window); }
    for (var member = 0u; member < p.sharing; member++) {
    let y_head = head * p.sharing + member;
#else
    var low = document(first).x;
    if (p.window != 0u && first + 1u > p.window) { low = max(low, first + 1u - p.window); }
    let high = min(first + ROWS, p.tokens);
    let y_head = head / p.sharing;
    // The keys that a query sees.
    var seen_from = range.x;
    if (p.window != 0u && token + 1u > p.window) { seen_from = max(seen_from, token + 1u - p.window); }
    let seen_to = min(token + 1u, high);
#if QUERIES
    let log_sum = log_sums[head * p.tokens + min(token, p.tokens - 1u)];
    let delta = deltas[head * p.tokens + min(token, p.tokens - 1u)] / d_factor;
#end
#end
#for n in NL
    let part_{n} = thread + {n}u * THREADS;
    let y_token_{n} = part_{n} / (D / 8u);
    let y_column_{n} = part_{n} % (D / 8u);
    let to_y_{n} = (y_token_{n} * PITCH + y_column_{n} * 8u) / 4u;
    var next_0_{n} = y_0[((low + y_token_{n}) * p.y_0_row + y_head * D) / 8u + y_column_{n}];
    var next_1_{n} = y_1[((low + y_token_{n}) * p.y_1_row + y_head * D) / 8u + y_column_{n}];
#end
    for (var start = low; start < high; start += OTHERS) {
        workgroupBarrier();
#for n in NL
        tile_0[to_y_{n}] = next_0_{n}.a;
        tile_0[to_y_{n} + 1u] = next_0_{n}.b;
        tile_1[to_y_{n}] = next_1_{n}.a;
        tile_1[to_y_{n} + 1u] = next_1_{n}.b;
#end
#if KEYS
        if (thread < OTHERS) {
            let at = y_head * p.tokens + min(start + thread, p.tokens - 1u);
            statistics[thread] = vec2<f32>(log_sums[at], deltas[at] / d_factor);
        }
#end
        workgroupBarrier();
        if (start + OTHERS < high) {
#for n in NL
            next_0_{n} = y_0[((start + OTHERS + y_token_{n}) * p.y_0_row + y_head * D) / 8u + y_column_{n}];
            next_1_{n} = y_1[((start + OTHERS + y_token_{n}) * p.y_1_row + y_head * D) / 8u + y_column_{n}];
#end
        }
#for t in SCORES
#for j in FO
        {
            let column = (half * {FO}u + {j}u) * 16u;
            let to = (m_row * S_PITCH + column) / 4u;
#if EMULATED
            var sum = array<f32, 8>();
#for k in KD
            add_scores_{t}(&sum, from_x_{t}_{k}, p.x_{t}_row, (column * PITCH + {k}u * 16u) / 4u, lane);
#end
            let at = to + lane / 2u * (S_PITCH / 4u) + lane % 2u * 2u;
            scores_{t}[at] = vec4<f32>(sum[0], sum[1], sum[2], sum[3]);
            scores_{t}[at + 1u] = vec4<f32>(sum[4], sum[5], sum[6], sum[7]);
#else
            // A variable without a value keeps that of the turn before.
            var sum = none;
#for k in KD
            let y_{k} = coopLoad<coop_mat16x16<f16, B>>(&tile_{t}[(column * PITCH + {k}u * 16u) / 4u], PITCH / 4u);
            sum = coopMultiplyAdd(x_{t}_{k}, y_{k}, sum);
#end
            let value = sum;
            let pitch = S_PITCH / 4u;
            coopStoreT(value, &scores_{t}[to], pitch);
#end
        }
#end
#end
        workgroupBarrier();
        let from_s = (row * S_PITCH + s_column) / 4u;
        let to_w = (row * W_PITCH + s_column) / 4u;
#if FORWARD
        var largest = -1e30;
#end
#for v in CV
        let other_{v} = vec4<u32>(start + s_column + {v}u * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
        let is_seen_{v} = (other_{v} >= vec4<u32>(seen_from)) & (other_{v} < vec4<u32>(seen_to));
        var score_{v} = scores_0[from_s + {v}u] * scale;
        var slope_{v} = vec4<f32>(1.0);
#if CAP
        let bent_{v} = tanh(clamp(score_{v} / p.cap, vec4<f32>(-15.0), vec4<f32>(15.0)));
        score_{v} = p.cap * bent_{v};
        slope_{v} = vec4<f32>(1.0) - bent_{v} * bent_{v};
#end
#if FORWARD
        score_{v} = select(vec4<f32>(-1e30), score_{v}, is_seen_{v});
        largest = max(largest, max(max(score_{v}.x, score_{v}.y), max(score_{v}.z, score_{v}.w)));
#else
#if KEYS
        let at_{v} = s_column + {v}u * 4u;
        let stats_{v} = array<vec2<f32>, 4>(statistics[at_{v}], statistics[at_{v} + 1u], statistics[at_{v} + 2u], statistics[at_{v} + 3u]);
        let log_sum_{v} = vec4<f32>(stats_{v}[0].x, stats_{v}[1].x, stats_{v}[2].x, stats_{v}[3].x);
        let delta_{v} = vec4<f32>(stats_{v}[0].y, stats_{v}[1].y, stats_{v}[2].y, stats_{v}[3].y);
#else
        let log_sum_{v} = vec4<f32>(log_sum);
        let delta_{v} = vec4<f32>(delta);
#end
        let weight_{v} = select(vec4<f32>(), exp(score_{v} - log_sum_{v}), is_seen_{v});
        weights_0[to_w + {v}u] = vec4<f16>(weight_{v} * (scores_1[from_s + {v}u] - delta_{v}) * slope_{v} * SHRUNK);
#if KEYS
        weights_1[to_w + {v}u] = vec4<f16>(weight_{v});
#end
#end
#end
#if FORWARD
        if (largest > most + 8.0) { grows.x = 1u; }
        let must_grow = workgroupUniformLoad(&grows).x;
        if (must_grow != 0u) {
            if (thread == 0u) { grows.x = 0u; }
            parts[thread] = largest;
            workgroupBarrier();
            for (var i = 0u; i < SHARERS; i++) { most = max(most, parts[row * SHARERS + i]); }
            if (start != low) {
                total = 0.0;
#for d in FD
#if EMULATED
                sum_1_{d} = array<f32, 8>();
#else
                sum_1_{d} = none;
#end
#end
#for n in NL
                next_0_{n} = y_0[((low + y_token_{n}) * p.y_0_row + y_head * D) / 8u + y_column_{n}];
                next_1_{n} = y_1[((low + y_token_{n}) * p.y_1_row + y_head * D) / 8u + y_column_{n}];
#end
                // The step is added next.
                start = low - OTHERS;
                continue;
            }
        }
#for v in CV
        let weight_{v} = select(vec4<f32>(), exp(score_{v} - most), is_seen_{v});
        total += dot(weight_{v}, vec4<f32>(1.0));
        weights_1[to_w + {v}u] = vec4<f16>(weight_{v});
#end
#end
        workgroupBarrier();
#for t in PARTS
#if SKIP_{t}
#else
#for o in OD
#if EMULATED
        let w_{t}_{o} = (m_row * W_PITCH + {o}u * 16u) / 4u;
#else
        let w_{t}_{o} = coopLoadT<coop_mat16x16<f16, A>>(&weights_{t}[(m_row * W_PITCH + {o}u * 16u) / 4u], W_PITCH / 4u);
#end
#for d in FD
        {
            let at = ({o}u * 16u * PITCH + (half * {FD}u + {d}u) * 16u) / 4u;
#if EMULATED
            add_values_{t}(&sum_{t}_{d}, w_{t}_{o}, at, lane);
#else
            let y = coopLoadT<coop_mat16x16<f16, B>>(&tile_{t}[at], PITCH / 4u);
            sum_{t}_{d} = coopMultiplyAdd(w_{t}_{o}, y, sum_{t}_{d});
#end
        }
#end
#end
#end
#end
    }
#if KEYS
    }
#end
#if FORWARD
    parts[thread] = total;
    workgroupBarrier();
    total = 0.0;
    for (var i = 0u; i < SHARERS; i++) { total += parts[row * SHARERS + i]; }
    var factor_1 = factor_y_1[0];
#if SINKS
    let largest = max(most, sinks[head]);
    let shrunk = exp(most - largest);
    total = total * shrunk + exp(sinks[head] - largest);
    most = largest;
    factor_1 *= shrunk;
#end
    if (s_column == 0u) { by_row[row] = factor_1 / total; }
    if (s_column == 0u && token < p.tokens) { log_sums[head * p.tokens + token] = most + log(total); }
#else
    let factor_0 = d_factor * (1.0 / SHRUNK) * p.scale * factor_y_0[0];
#if KEYS
    let factor_1 = factor_y_1[0];
#end
#end
#if KEYS
    let result_heads = p.heads / p.sharing;
#else
    let result_heads = p.heads;
#end
    workgroupBarrier();
#for t in PARTS
#if SKIP_{t}
#else
#for d in FD
    {
        let place = subgroup * 64u;
#if EMULATED
        let sums = sum_{t}_{d};
        scores_0[place + lane * 2u] = vec4<f32>(sums[0], sums[1], sums[2], sums[3]);
        scores_0[place + lane * 2u + 1u] = vec4<f32>(sums[4], sums[5], sums[6], sums[7]);
#else
        let value = sum_{t}_{d};
        let pitch = 4u;
        coopStoreT(value, &scores_0[place], pitch);
#end
        workgroupBarrier();
        for (var i = lane; i < 64u; i += LANES) {
            let to_token = first + m_row + i / 4u;
#if FORWARD
            let values = scores_0[place + i] * by_row[m_row + i / 4u];
#else
            let values = scores_0[place + i] * factor_{t};
#end
            let to = (to_token * result_heads + head) * D + (half * {FD}u + {d}u) * 16u + i % 4u * 4u;
            if (to_token < p.tokens) {
                for (var e = 0u; e < 4u; e++) { result_{t}[to + e] = values[e]; }
            }
        }
        workgroupBarrier();
    }
#end
#end
#end
}
