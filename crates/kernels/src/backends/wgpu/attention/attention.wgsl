// Causal attention inside documents, in tiles of 32 rows and 32 columns, so memory is linear in the tokens (Dao et al., FlashAttention, 2022).
//
// FORWARD: rows are queries, columns are keys; o and the log of the sum of exponentials. QUERIES: the same rows and columns; the gradient of q.
// KEYS: rows are keys, columns are queries; the gradients of k and v, over all query heads that share them.
// Eight threads compute a row; each has four columns of the scores and four values of every 32 of a head.
struct P {
    tokens: u32, documents: u32, heads: u32, sharing: u32, width: u32, window: u32,
    q_row: u32, q_at: u32, k_row: u32, k_at: u32, v_row: u32, v_at: u32, d_row: u32, d_at: u32,
    scale: f32, cap: f32,
}
var<immediate> p: P;
@binding(_) var<storage, READ> q: array<f32>;
@binding(_) var<storage, READ> k: array<f32>;
@binding(_) var<storage, READ> v: array<f32>;
@binding(_) var<storage, READ> boundaries: array<i32>;
#if FORWARD
#if SINKS
@binding(_) var<storage, READ> sinks: array<f32>;
#end
@binding(_) var<storage, read_write> o: array<f32>;
@binding(_) var<storage, read_write> log_sums: array<f32>;
#else
@binding(_) var<storage, READ> d_o: array<f32>;
@binding(_) var<storage, READ> log_sums: array<f32>;
@binding(_) var<storage, READ> deltas: array<f32>;
#if QUERIES
@binding(_) var<storage, read_write> d_q: array<f32>;
#else
@binding(_) var<storage, read_write> d_k: array<f32>;
@binding(_) var<storage, read_write> d_v: array<f32>;
#end
#end

const TILE = 32u;
const PITCH = 33u;
var<workgroup> rows: array<f32, TILE * PITCH>;
var<workgroup> columns: array<f32, TILE * PITCH>;
var<workgroup> wide: array<vec4<f32>, TILE * 8u>;
var<workgroup> weights: array<f32, TILE * PITCH>;
#if KEYS
var<workgroup> weights_v: array<f32, TILE * PITCH>;
#end
#if FORWARD
var<workgroup> parts: array<f32, TILE * 8u>;
#end

#use document

// Four values of a head; zeros outside of it.
fn of_q(token: u32, head: u32, i: u32) -> vec4<f32> {
    var four = vec4<f32>();
    for (var j = 0u; j < 4u && token < p.tokens && i + j < p.width; j++) { four[j] = q[p.q_at + token * p.q_row + head * p.width + i + j]; }
    return four;
}
fn of_k(token: u32, head: u32, i: u32) -> vec4<f32> {
    var four = vec4<f32>();
    for (var j = 0u; j < 4u && token < p.tokens && i + j < p.width; j++) { four[j] = k[p.k_at + token * p.k_row + head * p.width + i + j]; }
    return four;
}
fn of_v(token: u32, head: u32, i: u32) -> vec4<f32> {
    var four = vec4<f32>();
    for (var j = 0u; j < 4u && token < p.tokens && i + j < p.width; j++) { four[j] = v[p.v_at + token * p.v_row + head * p.width + i + j]; }
    return four;
}
#if FORWARD
#else
fn of_d(token: u32, head: u32, i: u32) -> vec4<f32> {
    var four = vec4<f32>();
    for (var j = 0u; j < 4u && token < p.tokens && i + j < p.width; j++) { four[j] = d_o[p.d_at + token * p.d_row + head * p.width + i + j]; }
    return four;
}
#end

// Adds the products of 32 values of a row with those of this thread's four columns.
fn dots(row: u32, lane: u32, sums: vec4<f32>) -> vec4<f32> {
    var result = sums;
    for (var i = 0u; i < TILE; i++) {
        let at = lane * 4u * PITCH + i;
        result += rows[row * PITCH + i] * vec4<f32>(columns[at], columns[at + PITCH], columns[at + 2u * PITCH], columns[at + 3u * PITCH]);
    }
    return result;
}

fn put(row: u32, lane: u32, own: vec4<f32>, other: vec4<f32>) {
    let at = row * PITCH + lane * 4u;
    for (var i = 0u; i < 4u; i++) {
        rows[at + i] = own[i];
        columns[at + i] = other[i];
    }
}

// Scaled and capped scores, and their slopes.
fn scores(products: vec4<f32>) -> array<vec4<f32>, 2> {
    let scaled = products * p.scale;
#if CAP
    let bent = tanh(clamp(scaled / p.cap, vec4<f32>(-15.0), vec4<f32>(15.0)));
    return array<vec4<f32>, 2>(p.cap * bent, vec4<f32>(1.0) - bent * bent);
#else
    return array<vec4<f32>, 2>(scaled, vec4<f32>(1.0));
#end
}

fn is_visible(query: u32, key: u32, range: vec2<u32>, other: u32) -> bool {
    return query >= key && other >= range.x && other < range.y && (p.window == 0u || query - key < p.window);
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let head = group.y;
    let row = thread / 8u;
    let lane = thread % 8u;
    let first = group.x * TILE;
    let token = first + row;
    let range = document(min(token, p.tokens - 1u));
#for c in CHUNKS
    var sum_{c} = vec4<f32>();
#if KEYS
    var sum_v_{c} = vec4<f32>();
#end
#end
#if FORWARD
    var most = -1e30;
    var total = 0.0;
#end
#if KEYS
    let last = min(first + TILE, p.tokens) - 1u;
    let low = first;
    var high = document(last).y;
    if (p.window != 0u) { high = min(high, last + p.window); }
    for (var member = 0u; member < p.sharing; member++) {
    let query_head = head * p.sharing + member;
    let key_head = head;
#else
    var low = document(first).x;
    if (p.window != 0u && first + 1u > p.window) { low = max(low, first + 1u - p.window); }
    let high = min(first + TILE, p.tokens);
    let query_head = head;
    let key_head = head / p.sharing;
#if QUERIES
    let log_sum = log_sums[query_head * p.tokens + min(token, p.tokens - 1u)];
    let delta = deltas[query_head * p.tokens + min(token, p.tokens - 1u)];
#end
#end
    for (var start = low; start < high; start += TILE) {
        let other = start + row;
        var products = vec4<f32>();
        var d_weights = vec4<f32>();
        for (var chunk = 0u; chunk < {CHUNKS}u; chunk++) {
            let i = chunk * TILE + lane * 4u;
            workgroupBarrier();
#if KEYS
            put(row, lane, of_k(token, key_head, i), of_q(other, query_head, i));
#else
            put(row, lane, of_q(token, query_head, i), of_k(other, key_head, i));
#end
            workgroupBarrier();
            products = dots(row, lane, products);
#if FORWARD
#else
            workgroupBarrier();
#if KEYS
            put(row, lane, of_v(token, key_head, i), of_d(other, query_head, i));
#else
            put(row, lane, of_d(token, query_head, i), of_v(other, key_head, i));
#end
            workgroupBarrier();
            d_weights = dots(row, lane, d_weights);
#end
        }
        let scored = scores(products);
        var score = scored[0];
        var weight = vec4<f32>();
        var slope = vec4<f32>();
#if FORWARD
        var largest = most;
        for (var j = 0u; j < 4u; j++) {
            let key = start + lane * 4u + j;
            if (key < high && is_visible(token, key, range, key)) { largest = max(largest, score[j]); } else { score[j] = -1e30; }
        }
        parts[row * 8u + lane] = largest;
        workgroupBarrier();
        for (var j = 0u; j < 8u; j++) { largest = max(largest, parts[row * 8u + j]); }
        workgroupBarrier();
        for (var j = 0u; j < 4u; j++) {
            if (score[j] > -1e29) { weight[j] = exp(score[j] - largest); }
        }
        parts[row * 8u + lane] = weight.x + weight.y + weight.z + weight.w;
        let shrunk = exp(most - largest);
        most = largest;
        total *= shrunk;
#for c in CHUNKS
        sum_{c} *= shrunk;
#end
#else
        for (var j = 0u; j < 4u; j++) {
            let column = start + lane * 4u + j;
#if KEYS
            let query = column;
            let key = token;
            var log_sum = 0.0;
            var delta = 0.0;
            if (query < p.tokens) {
                log_sum = log_sums[query_head * p.tokens + query];
                delta = deltas[query_head * p.tokens + query];
            }
#else
            let query = token;
            let key = column;
#end
            if (column < high && is_visible(query, key, range, column)) {
                weight[j] = exp(score[j] - log_sum);
                slope[j] = weight[j] * (d_weights[j] - delta) * scored[1][j] * p.scale;
            }
        }
#end
        let at = row * PITCH + lane * 4u;
        for (var j = 0u; j < 4u; j++) {
#if FORWARD
            weights[at + j] = weight[j];
#else
            weights[at + j] = slope[j];
#if KEYS
            weights_v[at + j] = weight[j];
#end
#end
        }
        workgroupBarrier();
#if FORWARD
        for (var j = 0u; j < 8u; j++) { total += parts[row * 8u + j]; }
#end
#for c in CHUNKS
        {
            let i = {c}u * TILE + lane * 4u;
#if FORWARD
            wide[thread] = of_v(other, key_head, i);
#end
#if QUERIES
            wide[thread] = of_k(other, key_head, i);
#end
#if KEYS
            wide[thread] = of_q(other, query_head, i);
#end
            workgroupBarrier();
            for (var j = 0u; j < TILE; j++) { sum_{c} += weights[row * PITCH + j] * wide[j * 8u + lane]; }
            workgroupBarrier();
#if KEYS
            wide[thread] = of_d(other, query_head, i);
            workgroupBarrier();
            for (var j = 0u; j < TILE; j++) { sum_v_{c} += weights_v[row * PITCH + j] * wide[j * 8u + lane]; }
            workgroupBarrier();
#end
        }
#end
    }
#if KEYS
    }
#end
    if (token >= p.tokens) { return; }
#if FORWARD
#if SINKS
    let largest = max(most, sinks[head]);
    let shrunk = exp(most - largest);
    total = total * shrunk + exp(sinks[head] - largest);
    most = largest;
#for c in CHUNKS
    sum_{c} *= shrunk;
#end
#end
    if (lane == 0u) { log_sums[head * p.tokens + token] = most + log(total); }
#end
#for c in CHUNKS
    for (var j = 0u; j < 4u; j++) {
        let i = {c}u * TILE + lane * 4u + j;
        if (i < p.width) {
#if FORWARD
            o[(token * p.heads + head) * p.width + i] = sum_{c}[j] / total;
#end
#if QUERIES
            d_q[(token * p.heads + head) * p.width + i] = sum_{c}[j];
#end
#if KEYS
            let to = (token * (p.heads / p.sharing) + head) * p.width + i;
            d_k[to] = sum_{c}[j];
            d_v[to] = sum_v_{c}[j];
#end
        }
    }
#end
}
