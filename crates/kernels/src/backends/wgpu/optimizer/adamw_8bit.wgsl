// A step of AdamW with moments in 8 bits for several parameters, four codes per word, as bitsandbytes takes it. A workgroup has a block of 256 values
// of one of them.
struct P {
    scale_at: u32, maps_at: u32, beta1: f32, rest1: f32, beta2: f32, rest2: f32, epsilon: f32, rate: f32, kept: f32,
#for t in TENSORS
    count_{t}: u32, parameter_at_{t}: u32, first_at_{t}: u32, first_scale_at_{t}: u32, second_at_{t}: u32, second_scale_at_{t}: u32, gradient_at_{t}: u32,
#end
}
var<immediate> p: P;
#for t in TENSORS
@binding(_) var<storage, read_write> parameter_{t}: array<f32>;
@binding(_) var<storage, read_write> first_{t}: array<u32>;
@binding(_) var<storage, read_write> first_scales_{t}: array<f32>;
@binding(_) var<storage, read_write> second_{t}: array<u32>;
@binding(_) var<storage, read_write> second_scales_{t}: array<f32>;
@binding(_) var<storage, READ> gradient_{t}: array<f32>;
#end
@binding(_) var<storage, READ> scale: array<f32>;
// The signed and the unsigned map, then the midpoints of their values, 256 each.
@binding(_) var<storage, READ> maps: array<f32>;

const BLOCK = 256u;
var<workgroup> most: array<vec2<f32>, BLOCK>;
var<workgroup> codes: array<vec2<u32>, BLOCK>;

// By bits: a compiler may assume that no value is infinite or NaN.
fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }

fn value_of(map: u32, code: u32) -> f32 { return maps[p.maps_at + map * BLOCK + code]; }

// The nearest code: how many midpoints are below.
fn code_of(map: u32, value: f32) -> u32 {
    var count = 0u;
    for (var step = 128u; step > 0u; step /= 2u) {
        if (value > maps[p.maps_at + (2u + map) * BLOCK + count + step - 1u]) { count += step; }
    }
    return count;
}

#for t in TENSORS
fn step_{t}(thread: u32, block: u32, factor: f32) {
    let i = block * BLOCK + thread;
    let word = block * (BLOCK / 4u) + thread / 4u;
    let shift = (thread % 4u) * 8u;
    var m = value_of(0u, extractBits(first_{t}[p.first_at_{t} + word], shift, 8u)) * first_scales_{t}[p.first_scale_at_{t} + block];
    var v = value_of(1u, extractBits(second_{t}[p.second_at_{t} + word], shift, 8u)) * second_scales_{t}[p.second_scale_at_{t} + block];
    let is_inside = i < p.count_{t};
    var given = 0.0;
    if (is_inside) { given = gradient_{t}[p.gradient_at_{t} + i]; }
    if (is_inside && is_finite(given)) {
        let g = given * factor;
        m = m * p.beta1 + g * p.rest1;
        v = v * p.beta2 + g * g * p.rest2;
        let value = parameter_{t}[p.parameter_at_{t} + i];
        parameter_{t}[p.parameter_at_{t} + i] = (value - m / (sqrt(v) + p.epsilon) * p.rate) * p.kept;
    } else {
        m = 0.0;
        v = 0.0;
    }
    most[thread] = vec2<f32>(abs(m), v);
    workgroupBarrier();
    for (var half = BLOCK / 2u; half > 0u; half /= 2u) {
        if (thread < half) { most[thread] = max(most[thread], most[thread + half]); }
        workgroupBarrier();
    }
    let scales = most[0];
    // A block of zeros has no scale; any positive divisor keeps its values at zero.
    let divisors = max(scales, vec2<f32>(1.17549435e-38));
    let normal = m / divisors.x;
    var code = code_of(0u, normal);
    // Rounding must not change the sign of a first moment.
    let rounded = value_of(0u, code);
    if (normal < 0.0 && rounded >= 0.0) { code -= 1u; }
    if (normal > 0.0 && rounded < 0.0) { code += 1u; }
    codes[thread] = vec2<u32>(code, code_of(1u, v / divisors.y));
    workgroupBarrier();
    if (thread < BLOCK / 4u) {
        var words = vec2<u32>();
        for (var j = 0u; j < 4u; j++) { words |= codes[thread * 4u + j] << vec2<u32>(j * 8u); }
        first_{t}[p.first_at_{t} + block * (BLOCK / 4u) + thread] = words.x;
        second_{t}[p.second_at_{t} + block * (BLOCK / 4u) + thread] = words.y;
    }
    if (thread == 0u) {
        first_scales_{t}[p.first_scale_at_{t} + block] = scales.x;
        second_scales_{t}[p.second_scale_at_{t} + block] = scales.y;
    }
}
#end

@compute @workgroup_size(BLOCK)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>) {
    let block = group.x + group.y * 65535u;
    let factor = scale[p.scale_at];
    if (!is_finite(factor)) { return; }
    // Blocks of the parameters before.
    var before = 0u;
#for t in TENSORS
    {
        let blocks = (p.count_{t} + BLOCK - 1u) / BLOCK;
        if (block >= before && block < before + blocks) { step_{t}(thread, block - before, factor); }
        before += blocks;
    }
#end
}
