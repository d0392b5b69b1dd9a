// Operations on each value of rows: gated activations and their backward, rotation of heads. HALF: a workgroup per row, and a copy in float16.
#if HALF
enable f16;
#end
#if ROTARY
struct P { tokens: u32, width: u32, x_row: u32, x_at: u32, head: u32, half: u32, sign: f32 }
#else
struct P { tokens: u32, width: u32, gate_row: u32, gate_at: u32, up_row: u32, up_at: u32, dy_row: u32, dy_at: u32, limit: f32, alpha: f32 }
#end
var<immediate> p: P;
#if ROTARY
@binding(_) var<storage, READ> x: array<f32>;
@binding(_) var<storage, READ> cosines: array<f32>;
@binding(_) var<storage, READ> sines: array<f32>;
#if FACTORS
@binding(_) var<storage, READ> factors: array<f32>;
#end
@binding(_) var<storage, read_write> y: array<f32>;

// Pairs (a, b) become (a cos - b sin, b cos + a sin); the backward has the opposite sine. A thread computes a column and its partner.
fn one(token: u32, column: u32) {
    let k = column % p.head;
    var i = k;
    var partner = column + p.half;
#if NEIGHBORS
    i = k / 2u;
    partner = column + 1u;
#end
    let at = p.x_at + token * p.x_row;
    var factor = 1.0;
#if FACTORS
    factor = factors[token];
#end
    if (k >= 2u * p.half) {
        y[token * p.width + column] = factor * x[at + column];
        return;
    }
#if NEIGHBORS
    if (k % 2u != 0u) { return; }
#else
    if (k >= p.half) { return; }
#end
    let a = x[at + column];
    let b = x[at + partner];
    let cosine = cosines[token * p.half + i];
    let sine = p.sign * sines[token * p.half + i];
    y[token * p.width + column] = factor * (a * cosine - b * sine);
    y[token * p.width + partner] = factor * (b * cosine + a * sine);
}
#else
@binding(_) var<storage, READ> gate: array<f32>;
@binding(_) var<storage, READ> up: array<f32>;
#if BACKWARD
@binding(_) var<storage, READ> dy: array<f32>;
@binding(_) var<storage, read_write> d_gate: array<f32>;
@binding(_) var<storage, read_write> d_up: array<f32>;
#else
@binding(_) var<storage, read_write> y: array<f32>;
#end

fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exp(-x)); }

// The activation and its slope.
fn activated(given: f32) -> vec2<f32> {
#if SILU
    let s = sigmoid(given);
    return vec2<f32>(given * s, s + given * s * (1.0 - s));
#end
#if GELU
    let cubic = 0.044715;
    let z = 2.0 * 0.7978845608028654;
    let s = sigmoid(z * given * (1.0 + cubic * given * given));
    return vec2<f32>(given * s, s + given * s * (1.0 - s) * z * (1.0 + 3.0 * cubic * given * given));
#end
#if SIGMOID
    let s = sigmoid(given);
    return vec2<f32>(s, s * (1.0 - s));
#end
#if CLAMPED
    let g = min(given, p.limit);
    let s = sigmoid(p.alpha * g);
    return vec2<f32>(g * s, select(0.0, s + p.alpha * g * s * (1.0 - s), given <= p.limit));
#end
}

// What the activation multiplies, and its slope.
fn factor(given: f32) -> vec2<f32> {
#if CLAMPED
    return vec2<f32>(clamp(given, -p.limit, p.limit) + 1.0, select(0.0, 1.0, abs(given) <= p.limit));
#else
    return vec2<f32>(given, 1.0);
#end
}

fn one(token: u32, column: u32) {
    let a = activated(gate[p.gate_at + token * p.gate_row + column]);
    let b = factor(up[p.up_at + token * p.up_row + column]);
    let to = token * p.width + column;
#if BACKWARD
    let d = dy[p.dy_at + token * p.dy_row + column];
    d_gate[to] = d * b.x * a.y;
    d_up[to] = d * a.x * b.y;
#else
    y[to] = a.x * b.x;
#end
}
#end

const THREADS = 256u;
#if HALF
#use half_rows
#end

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let index = group.x + group.y * 65535u;
#if HALF
    var largest = 0.0;
    for (var i = thread; i < p.width && index < p.tokens; i += THREADS) {
        one(index, i);
        largest = max(largest, abs(y[index * p.width + i]));
    }
    put_half(thread, index, p.tokens, p.width, largest);
#else
    let value = index * THREADS + thread;
    if (value < p.tokens * p.width) { one(value / p.width, value % p.width); }
#end
}
