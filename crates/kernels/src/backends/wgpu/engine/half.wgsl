// Values in float16, divided by a power of two, so that the largest is near 16,384: with 11 bits down to 2^-28 of that. Rows and columns are padded
// with zeros. LARGEST: only the largest of each workgroup's values.
//
// MEASURED: the power follows from those largest values, and is written. RELATIVE: it is that of other values, times `scale`. Else it is `scale`.
#if LARGEST
#else
enable f16;
#end
struct P { rows: u32, width: u32, x_row: u32, x_at: u32, y_rows: u32, y_width: u32, largest: u32, scale: f32 }
var<immediate> p: P;
#if VECTORS
@binding(_) var<storage, READ> x: array<vec4<f32>>;
#else
@binding(_) var<storage, READ> x: array<f32>;
#end
#if LARGEST
@binding(_) var<storage, read_write> largest: array<f32>;
#else
#if MEASURED
@binding(_) var<storage, READ> largest: array<f32>;
#end
#if RELATIVE
@binding(_) var<storage, READ> given: array<f32>;
#end
#if FACTOR
@binding(_) var<storage, read_write> factor_of: array<f32>;
#end
@binding(_) var<storage, read_write> y: array<vec4<f16>>;
#end

const THREADS = 256u;
#if SHARES
var<workgroup> most: array<f32, THREADS>;

fn largest_of(thread: u32, value: f32) -> f32 {
    most[thread] = value;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if (thread < half) { most[thread] = max(most[thread], most[thread + half]); }
        workgroupBarrier();
    }
    return most[0];
}
#end

// Four values of a row; zeros outside of it.
fn four(row: u32, column: u32) -> vec4<f32> {
    var values = vec4<f32>();
    let at = p.x_at + row * p.x_row + column;
#if VECTORS
    if (row < p.rows && column < p.width) { values = x[at / 4u]; }
#else
    for (var i = 0u; i < 4u && row < p.rows && column + i < p.width; i++) { values[i] = x[at + i]; }
#end
    return values;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32, @builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
    let first = (group.x + group.y * 65535u) * THREADS + thread;
#if LARGEST
    let across = (p.width + 3u) / 4u;
    var value = 0.0;
    for (var i = first; i < p.rows * across; i += groups.x * THREADS) {
        let values = abs(four(i / across, i % across * 4u));
        value = max(value, max(max(values.x, values.y), max(values.z, values.w)));
    }
    value = largest_of(thread, value);
    if (thread == 0u) { largest[group.x] = value; }
#else
    var factor = p.scale;
#if RELATIVE
    factor *= given[0];
#end
#if MEASURED
    var value = 0.0;
    for (var i = thread; i < p.largest; i += THREADS) { value = max(value, largest[i]); }
    // The exponent by bits, so that the division is exact.
    let exponent = (bitcast<u32>(largest_of(thread, value)) >> 23u) & 255u;
    factor = bitcast<f32>((clamp(exponent, 14u, 254u) - 13u) << 23u);
#end
#if FACTOR
    if (first == 0u) { factor_of[0] = factor; }
#end
    let across = p.y_width / 4u;
    if (first < p.y_rows * across) { y[first] = vec4<f16>(four(first / across, first % across * 4u) / factor); }
#end
}
