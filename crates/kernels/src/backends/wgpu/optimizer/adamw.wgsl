// A step of AdamW in f32, decay first; or the sum of two gradients, or a copy of one (ADD).
#if ADD
struct P { count: u32, a_at: u32, b_at: u32, y_at: u32 }
#else
struct P {
    count: u32, parameter_at: u32, first_at: u32, second_at: u32, gradient_at: u32, scale_at: u32,
    beta1: f32, rest1: f32, beta2: f32, rest2: f32, epsilon: f32, correction2: f32, rate: f32, kept: f32,
}
#end
var<immediate> p: P;
#if ADD
@binding(_) var<storage, READ> a: array<f32>;
#if BOTH
@binding(_) var<storage, READ> b: array<f32>;
#end
@binding(_) var<storage, read_write> y: array<f32>;
#else
@binding(_) var<storage, read_write> parameter: array<f32>;
@binding(_) var<storage, read_write> first: array<f32>;
@binding(_) var<storage, read_write> second: array<f32>;
@binding(_) var<storage, READ> gradient: array<f32>;
@binding(_) var<storage, READ> scale: array<f32>;
#end

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let i = (group.x + group.y * 65535u) * 256u + thread;
    if (i >= p.count) { return; }
#if ADD
    var sum = a[p.a_at + i];
#if BOTH
    sum += b[p.b_at + i];
#end
    y[p.y_at + i] = sum;
#else
    let factor = scale[p.scale_at];
    // By bits: a compiler may assume that no value is infinite or NaN.
    if ((bitcast<u32>(factor) & 0x7f800000u) == 0x7f800000u) { return; }
    let g = gradient[p.gradient_at + i] * factor;
    let m = first[p.first_at + i] * p.beta1 + g * p.rest1;
    let v = second[p.second_at + i] * p.beta2 + g * g * p.rest2;
    let value = parameter[p.parameter_at + i];
    parameter[p.parameter_at + i] = value * p.kept - m / (sqrt(v) / p.correction2 + p.epsilon) * p.rate;
    first[p.first_at + i] = m;
    second[p.second_at + i] = v;
#end
}
