// Sets dropped values to zero and scales the others [plus add]. The mask is a hash of a value's place in the step: `linear/dropout.rs` defines it, over
// 64-bit indices.
struct P {
    tokens: u32, width: u32, x_row: u32, x_at: u32, key_low: u32, key_high: u32, first_token: u32, first_row: u32, row_len: u32, threshold: u32,
    scale: f32, add_row: u32, add_at: u32,
}
var<immediate> p: P;
@binding(_) var<storage, READ> x: array<f32>;
#if ADD
@binding(_) var<storage, READ> add: array<f32>;
#end
@binding(_) var<storage, read_write> y: array<f32>;

// The low and the high half of a product.
fn product(a: u32, b: u32) -> vec2<u32> {
    let a_low = a & 0xffffu;
    let a_high = a >> 16u;
    let b_low = b & 0xffffu;
    let b_high = b >> 16u;
    let middle = a_high * b_low + ((a_low * b_low) >> 16u);
    let rest = a_low * b_high + (middle & 0xffffu);
    return vec2<u32>(a * b, a_high * b_high + (middle >> 16u) + (rest >> 16u));
}

fn mixed(given: u32) -> u32 {
    var value = given;
    value ^= value >> 16u;
    value *= 0x7feb352du;
    value ^= value >> 15u;
    value *= 0x846ca68bu;
    return value ^ (value >> 16u);
}

fn is_kept(token: u32, column: u32) -> bool {
    let place = p.first_token + token;
    let row = p.first_row + place / p.row_len;
    // Rows have 2^24 places.
    var index = product((row << 24u) | (place % p.row_len), p.width);
    index.y += (row >> 8u) * p.width;
    let low = index.x + column;
    let high = index.y + select(0u, 1u, low < column);
    let bits = mixed(mixed(((low >> 1u) | (high << 31u)) ^ p.key_low) ^ p.key_high ^ ((high >> 1u) * 0x9e3779b9u));
    return ((bits >> (16u * (low & 1u))) & 0xffffu) >= p.threshold;
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let index = (group.x + group.y * 65535u) * 256u + thread;
    if (index >= p.tokens * p.width) { return; }
    let token = index / p.width;
    let column = index % p.width;
    var value = select(0.0, p.scale * x[p.x_at + token * p.x_row + column], is_kept(token, column));
#if ADD
    value += add[p.add_at + token * p.add_row + column];
#end
    y[index] = value;
}
